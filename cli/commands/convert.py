"""`flashnext convert` and `flashnext compare`: quantise the official weights, and see what that costs."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.answer import plan_request
from cli.builds import note_build
from cli.console import OPENING, Console, counted, shell_word, size
from cli.engine_factory import Services
from cli.errors import OK, UsageProblem, describe
from cli.golden import checked_golden, golden_document, golden_lines, why_not
from cli.model_path import FoundModel, find_model
from cli.options import MemoryOptions
from cli.settings import expanded

if TYPE_CHECKING:
    from mlx_flashnext.config import QuantSpec
    from mlx_flashnext.conversion.recipe import Recipe
    from mlx_flashnext.conversion.writing import Converted
    from mlx_flashnext.reports.compare import Difference

DROP, SAME = "drop", "same"
AGREEMENT_PROMPTS, AGREEMENT_TOKENS, AGREEMENT_CONTEXT = 2, 16, 2048
TABLE_GROUP = 32


def convert(
    context: typer.Context,
    console: Console,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="BF16 or FP8 checkpoint: directory, or Hub id in the cache."),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The directory to make; must not exist.")],
    experts: Annotated[str, typer.Option("--experts", metavar="SPEC", help="Routed experts.")] = "4:64",
    trunk: Annotated[
        str, typer.Option("--trunk", metavar="SPEC", help="Matrices of the layers, and the head.")
    ] = "8:64",
    table: Annotated[str, typer.Option("--table", metavar="SPEC", help="The n-gram table.")] = "4:32",
    mtp: Annotated[
        str,
        typer.Option("--mtp", metavar="SPEC", help="The MTP module: same as experts and trunk; or drop it."),
    ] = SAME,
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--also",
            metavar="NAME[=SPEC]",
            help="Quantise this too: router, hyper, indexer or embedding. Left out, they stay as they are. "
            "Repeatable.",
        ),
    ] = None,
    vision: Annotated[
        bool, typer.Option("--vision/--no-vision", help="Copy the vision tensors, for other runtimes.")
    ] = True,
    agreement: Annotated[
        bool,
        typer.Option(
            "--agreement/--no-agreement",
            help="At the end let both builds answer and say how often they agree: takes a run's memory.",
        ),
    ] = True,
    golden: Annotated[
        bool,
        typer.Option(
            "--golden/--no-golden",
            help="Load OUT and keep its first 32 greedy tokens, for flashnext doctor to compare with.",
        ),
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Quantise the official weights into an MLX checkpoint, one expert at a time.

    SPEC is bits or bits:group, such as 4:64; mxfp4, mxfp8 or nvfp4; or none. Needs little memory, however
    large the model. A run that was cut short goes on where it stopped; OUT appears only once it is whole, has
    been opened, and parts of it were compared with the source. What follows, answers of both builds and a
    golden, can be left out or stopped: OUT is there.
    """
    services: Services = context.obj
    recipe = _recipe(experts, trunk, table, mtp, also or [], keep_vision=vision)
    found = find_model(model)
    made = services.convert_checkpoint(
        found.directory,
        expanded(out),
        recipe,
        lambda stage, done, total: console.progress(stage, done, total, is_bytes=stage == "converting"),
    )
    console.end_progress()
    note_build(made.directory, "conversion", found.label)
    if not json:
        _show(console, made, found.label)
    said, why_none = _agreement(services, found, made, console) if agreement else (None, "left out")
    if not json:
        console.line()
        if said is None:
            console.line(f"greedy agreement: not measured, {why_none}")
        else:
            _show_agreement(console, said)
    check, problem = checked_golden(services, made.directory, console) if golden else (None, None)
    if json:
        document = _document(made, recipe)
        document["agreement"] = {"why_none": why_none} if said is None else said.to_dict()
        console.document({**document, "golden": golden_document(check, why_not(problem))})
        return OK
    for line in golden_lines(check, why_not(problem)):
        console.line(line)
    return OK


def _agreement(
    services: Services, source: FoundModel, made: "Converted", console: Console
) -> "tuple[Difference | None, str]":
    """Return how far the two builds are apart, or why nobody knows: the conversion stands either way."""
    from expert_store.errors import StoreError
    from mlx_flashnext.engine.errors import EngineError
    from mlx_flashnext.engine.plan import PlanRequest
    from mlx_flashnext.errors import ModelError

    request = PlanRequest(context_tokens=AGREEMENT_CONTEXT, num_snapshots=0)
    console.progress(OPENING, 0, 0)
    try:
        found = services.compare_builds(
            source.directory,
            made.directory,
            request,
            AGREEMENT_PROMPTS,
            AGREEMENT_TOKENS,
            lambda stage, done, total: console.progress(stage, done, total, is_bytes=stage == "trunk"),
        )
    except (EngineError, ModelError, StoreError) as error:
        return None, describe(error).message
    finally:
        console.end_progress()
    return found, ""


def compare(
    context: typer.Context,
    console: Console,
    reference: Annotated[str, typer.Argument(metavar="REFERENCE", help="The build to compare with.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The build to judge.")],
    memory: MemoryOptions,
    num_prompts: Annotated[int, typer.Option("--prompts", metavar="N", help="Prompts to answer.", min=1)] = 4,
    num_tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", help="Most tokens of an answer.", min=1)
    ] = 16,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Say how far a build is from another: the error of each layer, and greedy agreement.

    The reference answers prompts; both builds then read the same text. The two are open one after the other.
    """
    services: Services = context.obj
    judged = find_model(model)
    console.progress(OPENING, 0, 0)
    found = services.compare_builds(
        find_model(reference).directory,
        judged.directory,
        plan_request(memory, judged),
        num_prompts,
        num_tokens,
        lambda stage, done, total: console.progress(stage, done, total, is_bytes=stage == "trunk"),
    )
    console.end_progress()
    if json:
        console.document(found.to_dict())
    else:
        _show_difference(console, found)
    return OK


def _recipe(
    experts: str, trunk: str, table: str, mtp: str, also: list[str], *, keep_vision: bool
) -> "Recipe":
    from mlx_flashnext.conversion.recipe import Recipe
    from mlx_flashnext.errors import ModelError

    try:
        routed, dense = _spec("--experts", experts), _spec("--trunk", trunk)
        module = None if mtp in (SAME, DROP) else _spec("--mtp", mtp)
        groups: dict[str, QuantSpec] = {}
        for entry in also:
            name, _, text = entry.partition("=")
            spec = _spec("--also", text) if text else dense
            if spec is None:
                raise UsageProblem(
                    f"--also {entry}: nothing to quantise it to", hint=f"--also {name}=8:64, or leave it out"
                )
            groups[name] = spec
        return Recipe(
            experts=routed,
            trunk=dense,
            table=_spec("--table", table, TABLE_GROUP),
            mtp_experts=routed if mtp == SAME else module,
            mtp_trunk=dense if mtp == SAME else module,
            keep_mtp=mtp != DROP,
            keep_vision=keep_vision,
            also=groups,
        )
    except ModelError as error:
        raise UsageProblem(error.message, hint=error.hint) from None


def _spec(flag: str, text: str, group: int = 64) -> "QuantSpec | None":
    from mlx_flashnext.conversion.recipe import parse_spec
    from mlx_flashnext.errors import ModelError

    try:
        return parse_spec(text, group)
    except ModelError as error:
        raise UsageProblem(f"{flag}: {error.message}", hint=error.hint) from None


def _show(console: Console, made: "Converted", label: str) -> None:
    ratio = made.source_bytes / made.num_bytes
    facts = [
        (
            "converted",
            f"{size(made.source_bytes)} to {size(made.num_bytes)} ({ratio:.2f} to 1), in {made.directory}",
        ),
        ("digest", made.digest),
    ]
    if made.left_plain:
        left = made.left_plain
        facts.append(("plain", f"{len(left)} for whose width the group is not fit, such as {left[0]}"))
    if made.dropped:
        facts.append(("dropped", f"{counted(len(made.dropped), 'tensor')}, such as {made.dropped[0]}"))
    facts.append(("next", f"flashnext compare {shell_word(label)} {shell_word(made.directory)}"))
    for name, fact in facts:
        console.line(f"{name:<9}  {fact}")
    console.line()
    layers = sorted({error.layer for error in made.errors if error.layer is not None})
    parts = list(dict.fromkeys(error.part for error in made.errors))
    errors = {(error.part, error.layer): error.relative for error in made.errors}
    rows = [[str(layer), *(_share(errors.get((part, layer))) for part in parts)] for layer in layers]
    rows.append(["none", *(_share(errors.get((part, None))) for part in parts)])
    console.line("Relative error of what was quantised, from samples of every part:")
    console.table(("layer", *parts), rows, right=tuple(range(len(parts) + 1)))


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _document(made: "Converted", recipe: "Recipe") -> dict[str, Any]:
    return {
        "directory": str(made.directory),
        "digest": made.digest,
        "source_bytes": made.source_bytes,
        "bytes": made.num_bytes,
        "recipe": recipe.to_dict(),
        "errors": [error.to_dict() for error in made.errors],
        "left_plain": list(made.left_plain),
        "dropped": list(made.dropped),
    }


def _show_difference(console: Console, found: "Difference") -> None:
    rows = [[str(layer), f"{error:.4f}"] for layer, error in enumerate(found.layers)]
    console.table(("layer", "error of its output"), [*rows, ["logits", f"{found.logits:.4f}"]], right=(0, 1))
    console.line()
    _show_agreement(console, found)


def _show_agreement(console: Console, found: "Difference") -> None:
    share = 100 * found.agreement
    console.line(
        f"greedy agreement  {found.num_agreeing} of {found.num_positions} positions ({share:.1f} %), "
        f"{counted(found.num_prompts, 'prompt')}"
    )
    prefixes = ", ".join(map(str, found.prefixes))
    console.line(f"same answer for   {prefixes} tokens")
    console.line(f"divergence        {found.divergence:.4f} nats a position")
