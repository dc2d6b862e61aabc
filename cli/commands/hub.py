"""`flashnext pull`, `list` and `rm`: models of the Hub in the local Hugging Face cache."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.builds import Build, noted_builds
from cli.cached import CachedModel, partial_bytes, scan
from cli.console import Console, counted, shell_word, size
from cli.engine_factory import Services
from cli.errors import INCOMPATIBLE, INTERRUPTED, NOT_ENOUGH, OK, CommandError, UsageProblem, describe
from cli.hub import SPARE_BYTES, Listing, parse_name, repo_folder
from cli.hub_fetch import Progress, fetch, library_notes
from cli.interrupts import Interrupts
from cli.model_path import ALIASES, complete_model
from cli.settings import expanded, hub_cache, wants_download_progress

SHORT_COMMIT = 8


def pull(
    context: typer.Context,
    console: Console,
    repo: Annotated[str, typer.Argument(metavar="REPO[@REVISION]", help="Such as ORG/NAME or ORG/NAME@v2.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be fetched, and fetch nothing.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Fetch what is no model of flashnext too, such as a draft for one."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Fetch a model from the Hub into the local Hugging Face cache, where other programs find it too.

    Only what flashnext reads is fetched: safetensors that the index names, and documents. A download that was
    cut short goes on where it stopped; every file is compared with the digest that the Hub lists. Endpoint,
    token and cache are Hugging Face's own: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE.
    """
    services: Services = context.obj
    name, revision = parse_name(_whole_name(repo))
    with Interrupts(), library_notes(console.note):
        listing = Listing.of(name, revision)
        _check_model(listing, force=force)
        listing = listing.with_needed_data()
        if dry_run:
            return _show_listing(console, listing, json=json)
        listing.check_space()
        missing = listing.missing()
        try:
            fetch(listing, missing, f"fetching {name}", _progress(console))
        except KeyboardInterrupt:
            console.end_progress()
            left = size(listing.missing_bytes())
            console.note(f"interrupted; {left} are left, the same line goes on from here")
            return INTERRUPTED
        console.end_progress()
        listing.point()
    return _report(console, services, listing, len(missing), json=json)


def list_models(
    console: Console,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """List the models in the local Hugging Face cache, what pack and convert made, and whether they run."""
    models, made = scan(), noted_builds()
    if json:
        console.document(
            {
                "cache": str(hub_cache()),
                "models": [_as_document(model) for model in models],
                "builds": [_build_document(build) for build in made],
            }
        )
        return OK
    if models:
        _show_cached(console, models)
    else:
        console.line(f"no models in {hub_cache()}")
        console.line("flashnext pull ORG/NAME fetches one; without --model, commands use the demo model")
    if made:
        console.line()
        rows = [
            (str(build.directory), f"{build.kind} of {build.source}", size(build.num_bytes), _runs(build))
            for build in made
        ]
        console.table(("directory", "what", "size", "runs"), rows, right=(2,))
    return OK


def _show_cached(console: Console, models: Sequence[CachedModel]) -> None:
    rows = [
        (
            model.repo,
            ", ".join(model.refs) or model.commit[:SHORT_COMMIT],
            size(model.num_bytes),
            _runs(model),
        )
        for model in models
    ]
    console.table(("model", "revision", "size", "runs"), rows, right=(2,))
    console.line()
    console.line(f"in {hub_cache()}")


def _runs(model: CachedModel | Build) -> str:
    return model.trouble or "yes"


def remove(
    console: Console,
    repo: Annotated[
        str,
        typer.Argument(
            metavar="REPO[@REVISION]", help="A model of flashnext list.", autocompletion=complete_model
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Delete a model, or one revision of it, from the local Hugging Face cache.

    Other programs that use the cache lose it too. What will go is named first, and asked for unless --yes.
    """
    whole = _whole_name(repo)
    if (repo.startswith(("/", "./", "../", "~")) or "/" not in repo) and expanded(repo).is_dir():
        raise UsageProblem(
            f"A directory of your own, none of the cache: {repo}", hint=f"rm -r {shell_word(repo)}"
        )
    name, revision = parse_name(whole)
    folder = repo_folder(name)
    if not folder.is_dir():
        raise CommandError(f"No such model in the cache: {name}", hint="flashnext list shows what is there")
    if folder.is_symlink():
        raise CommandError(
            f"A link is not followed to delete what it names: {folder}", hint="remove it by hand"
        )
    chosen = _chosen(name, revision) if "@" in whole else None
    num_bytes = _bytes_of(folder) if chosen is None else _freed(folder, chosen)
    what = f"{name}, all of it" if chosen is None else f"{name}@{chosen.commit[:SHORT_COMMIT]}"
    if not yes:
        _ask(console, f"delete {what}: {size(num_bytes)} in {folder}")
    if chosen is None:
        shutil.rmtree(folder)
    else:
        _strategy(folder, chosen).execute()
    if json:
        console.document({"model": name, "commit": chosen and chosen.commit, "freed_bytes": num_bytes})
    else:
        console.line(f"deleted {what}: {size(num_bytes)}")
    return OK


def _whole_name(repo: str) -> str:
    name, at, revision = repo.partition("@")
    return ALIASES.get(name, name) + at + revision


def _check_model(listing: Listing, *, force: bool) -> None:
    """Refuse another model before its data is fetched."""
    from mlx_flashnext.config import ModelConfig, parse_config
    from mlx_flashnext.errors import ModelError

    if force:
        return
    raw = listing.read("config.json")
    if raw is None:
        raise CommandError(
            f"The repository has no config.json, so it is no model: {listing.repo}",
            hint="--force fetches it all the same",
            code=INCOMPATIBLE,
        )
    try:
        ModelConfig.from_dict(parse_config(raw, Path(listing.repo)))
    except ModelError as error:
        raise CommandError(
            f"flashnext cannot run {listing.repo}: {error.message}",
            hint="nothing was fetched; --force fetches it all the same",
            code=INCOMPATIBLE,
        ) from error


def _show_listing(console: Console, listing: Listing, *, json: bool) -> int:
    """Show what would be fetched. Exit code 4 if it does not fit."""
    missing = {file.name for file in listing.missing()}
    wanted = listing.missing_bytes()
    total = sum(file.size for file in listing.files)
    try:
        listing.check_space()
        problem = None
    except CommandError as error:
        problem = error
    if json:
        console.document(
            {
                "model": listing.repo,
                "revision": listing.revision,
                "commit": listing.commit,
                "directory": str(listing.snapshot),
                "files": [
                    {"name": file.name, "bytes": file.size, "is_here": file.name not in missing}
                    for file in listing.files
                ],
                "total_bytes": total,
                "missing_bytes": wanted,
                "spare_bytes": SPARE_BYTES,
                "fits": problem is None,
            }
        )
    else:
        rows = [
            (file.name, size(file.size), "to fetch" if file.name in missing else "here")
            for file in listing.files
        ]
        console.table(("file", "size", "state"), rows, right=(1,))
        console.line()
        console.line(f"commit   {listing.commit}")
        files = counted(len(missing), "file")
        console.line(f"fetch    {size(wanted)} of {size(total)}, {files}, into {listing.folder}")
        console.line("fits     yes" if problem is None else f"fits     no: {problem.message}")
    return OK if problem is None else NOT_ENOUGH


def _report(console: Console, services: Services, listing: Listing, num_fetched: int, *, json: bool) -> int:
    """Open what is here, from its headers, before it is called ready (FIELD P84)."""
    problem = _problem(services, listing.snapshot)
    if json:
        console.document(
            {
                "model": listing.repo,
                "revision": listing.revision,
                "commit": listing.commit,
                "directory": str(listing.snapshot),
                "num_fetched": num_fetched,
                "is_ready": problem is None,
                "problem": problem and describe(problem).to_dict()["error"],
            }
        )
        return OK if problem is None else describe(problem).code
    total = size(sum(file.size for file in listing.files))
    what = f"{counted(num_fetched, 'file')} fetched" if num_fetched else "all of it was here"
    console.line(f"pulled   {listing.repo}, {total}, {what}")
    console.line(f"commit   {listing.commit}")
    if problem is not None:
        failure = describe(problem)
        raise CommandError(
            f"{listing.repo} is here but does not open: {failure.message}",
            hint=failure.hint,
            code=failure.code,
        )
    shown = listing.repo if listing.revision == "main" else f"{listing.repo}@{listing.revision}"
    console.line(f"ready    flashnext run --model {shown}")
    console.line(f"faster?  flashnext pack {shown} DIRECTORY makes every expert one read")
    return OK


def _problem(services: Services, directory: Path) -> Exception | None:
    from expert_store.errors import StoreError
    from mlx_flashnext.errors import ModelError

    try:
        problems = services.inspect_checkpoint(directory).problems
    except (ModelError, StoreError) as error:
        return error
    return problems[0] if problems else None


def _progress(console: Console) -> Progress:
    def show(label: str, done: int, total: int) -> None:
        if wants_download_progress():
            console.progress(label, done, total, is_bytes=True)

    return show


def _as_document(model: CachedModel) -> dict[str, Any]:
    return {
        "model": model.repo,
        "commit": model.commit,
        "refs": list(model.refs),
        "directory": str(model.directory),
        "bytes": model.num_bytes,
        "partial_bytes": partial_bytes(model.directory.parent.parent),
        "modified_s": model.modified_s,
        "runs": not model.trouble,
        "trouble": model.trouble or None,
    }


def _build_document(build: Build) -> dict[str, Any]:
    return {
        "directory": str(build.directory),
        "kind": build.kind,
        "source": build.source,
        "bytes": build.num_bytes,
        "runs": not build.trouble,
        "trouble": build.trouble or None,
    }


def _chosen(name: str, revision: str) -> CachedModel:
    found = [
        model
        for model in scan()
        if model.repo == name and (revision in model.refs or model.commit.startswith(revision))
    ]
    if len(found) != 1:
        known = ", ".join(model.commit[:SHORT_COMMIT] for model in scan() if model.repo == name)
        raise CommandError(
            f"{'No' if not found else 'More than one'} such revision in the cache: {name}@{revision}",
            hint=f"there are {known or 'none'}",
        )
    return found[0]


def _strategy(folder: Path, chosen: CachedModel) -> Any:
    from huggingface_hub import scan_cache_dir

    return scan_cache_dir(folder.parent).delete_revisions(chosen.commit)


def _freed(folder: Path, chosen: CachedModel) -> int:
    """Return what deleting one revision frees: blobs that no other one shares."""
    return int(_strategy(folder, chosen).expected_freed_size)


def _bytes_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _ask(console: Console, question: str) -> None:
    """Go on only after a yes."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageProblem(f"Nobody is there to ask: {question}", hint="--yes does it without asking")
    console.prompt(f"{question}? [y/N] ")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError("Nothing was deleted", hint="answer y to delete")
