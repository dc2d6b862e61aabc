"""From what a person calls a model to the directory it lies in. Never the network.

Entry point: `find_model`. A name is a directory, a Hub id in the local Hugging Face cache (`org/name`, or
`org/name@revision`), an alias, or nothing, which is the demo model that ships with flashnext.
"""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from cli.cached import lacking, named_by, repositories
from cli.errors import DAMAGED, CommandError, UsageProblem
from cli.settings import expanded, hub_cache
from expert_store.errors import brief

DEMO = "demo"
ALIASES = {"flash-next": "Qwen/Qwen3.8-Flash-Next"}


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model on this machine.

    Attributes:
        directory: of the checkpoint's files.
        label: what to call it when talking to people.
        is_demo: it is the demo model.
    """

    directory: Path
    label: str
    is_demo: bool = False


def find_model(name: str | None) -> FoundModel:
    """Return where a model lies.

    Args:
        name: as typed; None for the demo model.

    Raises:
        CommandError: there is no such model here.
    """
    if name is None or (name == DEMO and not Path(name).is_dir()):
        return _demo()
    path = expanded(name)
    try:
        is_directory, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise CommandError(
            f"Cannot look for the model: {error.strerror}: {name}",
            hint="give a directory or a Hub id",
        ) from error
    if is_directory:
        return _local(path, name)
    if exists:
        raise CommandError(
            f"A model is a directory, this is a file: {name}", hint=f"give its directory: {path.parent}"
        )
    hub_id, at, revision = ALIASES.get(name, name).partition("@")
    if at and not revision:
        raise UsageProblem(f"No revision after the @: {name}", hint=f"--model {hub_id}, or {hub_id}@REVISION")
    if hub_id.count("/") == 1 and not name.startswith((".", "/", "~")):
        snapshot = _snapshot(hub_cache() / f"models--{hub_id.replace('/', '--')}", revision)
        if snapshot is not None:
            _check_complete(snapshot, name)
            return FoundModel(snapshot, hub_id)
    raise CommandError(f"No such model on this machine: {name}", hint=_advice(name, hub_id))


def chosen_model(argument: str | None, option: str | None) -> FoundModel:
    """Return the model named by an argument or by `--model`.

    Raises:
        UsageProblem: two different names.
        CommandError: there is no such model here.
    """
    if argument is not None and option is not None and argument != option:
        raise UsageProblem(f"Two models: {argument} and --model {option}", hint="give one")
    return find_model(option if argument is None else argument)


def cached_models() -> list[str]:
    """Return the Hub ids in the local cache, sorted."""
    return sorted(repo for repo, _ in repositories())


def complete_model(incomplete: str) -> list[str]:
    """Return completions for `--model`."""
    return [name for name in (DEMO, *ALIASES, *cached_models()) if name.startswith(incomplete)]


def _demo() -> FoundModel:
    directory = _demo_directory()
    if not (directory / "config.json").is_file():
        raise CommandError(
            f"The demo model is not installed: {directory}",
            hint="name a model with --model DIRECTORY or --model ORG/NAME",
        )
    return FoundModel(directory, "demo", is_demo=True)


def _demo_directory() -> Path:
    from mlx_flashnext.demo import demo_dir

    return demo_dir()


def _local(path: Path, name: str) -> FoundModel:
    config = path / "config.json"
    if not config.is_file() and os.path.lexists(config):
        raise CommandError(f"Not a regular file: {config}", hint="download it again", code=DAMAGED)
    if not config.is_file():
        raise CommandError(
            f"The directory has no config.json: {name}", hint="give the directory of a checkpoint"
        )
    return FoundModel(path, name)


def _snapshot(folder: Path, revision: str) -> Path | None:
    """Return the wanted snapshot of a cached model, by default the one `main` points to, else the newest."""
    snapshots = folder / "snapshots"
    if not snapshots.is_dir():
        return None
    reference = folder / "refs" / (revision or "main")
    if reference.is_file():
        commit = named_by(reference)
        return snapshots / commit if commit and (snapshots / commit / "config.json").is_file() else None
    matches = [entry for entry in snapshots.iterdir() if entry.name.startswith(revision)]
    matches = [entry for entry in matches if (entry / "config.json").is_file()]
    return max(matches, key=lambda entry: entry.stat().st_mtime, default=None)


def _check_complete(snapshot: Path, name: str) -> None:
    """Refuse a download that was cut short, with what completes it (FIELD P84)."""
    missing, num_files = lacking(snapshot)
    if missing:
        raise CommandError(
            f"The download of {name} is not complete: {len(missing)} of {num_files} data files are not here, "
            f"such as {brief(missing[0], 100)}",
            hint=f"flashnext pull {name} goes on with it",
        )


def _advice(name: str, hub_id: str) -> str:
    known = cached_models()
    if hub_id in known:
        return f"what the cache has of it names no commit; flashnext pull {hub_id} mends it"
    near = difflib.get_close_matches(hub_id, known, n=1) or [
        other for other in known if name.casefold() in other.casefold()
    ]
    if near:
        return f"did you mean {near[0]}?"
    if hub_id.count("/") == 1 and not name.startswith((".", "/", "~")):
        return f"flashnext pull {hub_id} fetches it"
    return "give a directory, a Hub id that is in the local cache, or demo for the demo model"
