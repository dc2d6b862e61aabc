"""`flashnext pack` and `flashnext verify`: one aligned record an expert, each with its digest."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.builds import note_build
from cli.console import Console, counted, shell_word, size
from cli.engine_factory import Services
from cli.errors import DAMAGED, OK, describe
from cli.golden import checked_golden, golden_document, golden_lines, why_not
from cli.model_path import find_model
from cli.settings import expanded

if TYPE_CHECKING:
    from mlx_flashnext.reports.pack_gain import PackGain

MOST_DAMAGED = 10


def pack(
    context: typer.Context,
    console: Console,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Checkpoint directory, or Hub id in the local cache.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The directory to make; must not exist.")],
    golden: Annotated[
        bool,
        typer.Option(
            "--golden/--no-golden",
            help="Load the pack and keep its first 32 greedy tokens, for flashnext doctor to compare with.",
        ),
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Rewrite a checkpoint so that every expert is one read, with a digest that each read is compared with.

    A row of a quantised n-gram table becomes one read as well. Not needed to run a model. OUT holds all of it
    and takes as much space again; the original may then be deleted. Folders in it, such as a draft or a near
    map, are not copied but named at the end: they fit the pack as they fit the original. A run that was cut
    short goes on where it stopped; OUT appears only once it is whole.
    """
    services: Services = context.obj
    found = find_model(model)
    packed = services.pack_checkpoint(
        found.directory,
        expanded(out),
        lambda stage, done, total: console.progress(stage, done, total, is_bytes=True),
    )
    note_build(packed.directory, "pack", found.label)
    gain = services.measure_pack_gain(found.directory, packed.directory, console.progress)
    console.end_progress()
    check, problem = checked_golden(services, packed.directory, console) if golden else (None, None)
    if json:
        console.document(
            {
                "directory": str(packed.directory),
                "identity": packed.identity,
                "num_records": packed.num_records,
                "bytes": packed.num_bytes,
                "reads_per_record": {"before": packed.reads_before, "now": 1},
                "gain": gain.to_dict(),
                "left": list(packed.left),
                "golden": golden_document(check, why_not(problem)),
            }
        )
        return OK
    reads = counted(packed.reads_before, "read")
    where = shell_word(packed.directory)
    facts = [
        ("packed", f"{counted(packed.num_records, 'record')}, {size(packed.num_bytes)}, in {where}"),
        ("identity", packed.identity),
        ("an expert", f"one read; {reads} from {found.label}"),
        ("gain", _gain(gain)),
        ("next", f"flashnext run --model {where}"),
    ]
    if packed.left:
        names = ", ".join(map(shell_word, packed.left))
        folders = " ".join(shell_word(found.directory / name) for name in packed.left)
        facts.insert(-1, ("left", f"{names}: cp -R -- {folders} {where}"))
    for name, fact in facts:
        console.line(f"{name:<9}  {fact}")
    for line in golden_lines(check, why_not(problem)):
        console.line(line)
    return OK


def _gain(gain: "PackGain") -> str:
    """Return what the pack gains on this drive, or that it gains nothing."""
    if gain.ratio is None:
        return f"not measured: {gain.why}"
    cache = "cold" if gain.page_cache == "cold" else "page cache unknown"
    figure = f"{gain.ratio:.2f} [{gain.low:.2f} to {gain.high:.2f}] times the rate of the checkpoint as it is"
    rates = (
        f"{size(round(gain.pack_bytes_per_s))}/s against {size(round(gain.source_bytes_per_s))}/s, {cache}"
    )
    return f"{figure}: {rates}" if gain.is_gain else f"none to be seen on this disk: {figure}, {rates}"


def verify(
    context: typer.Context,
    console: Console,
    target: Annotated[str, typer.Argument(metavar="PACK", help="A directory made by flashnext pack.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Read a whole pack and compare every record and file with its digest.

    Exit code 5 means that something is damaged; what is, is listed.
    """
    services: Services = context.obj
    found = find_model(target)
    verified = services.verify_pack(
        Path(found.directory),
        lambda stage, done, total: console.progress(stage, done, total, is_bytes=True),
    )
    console.end_progress()
    failures = [describe(error) for error in verified.damaged]
    if json:
        document: dict[str, Any] = {
            "identity": verified.identity,
            "num_records": verified.num_records,
            "num_files": verified.num_files,
            "bytes": verified.num_bytes,
            "damaged": [failure.to_dict()["error"] for failure in failures],
        }
        console.document(document)
    else:
        records, files = counted(verified.num_records, "record"), counted(verified.num_files, "file")
        console.line(f"compared  {records} and {files}, {size(verified.num_bytes)}")
        console.line(f"identity  {verified.identity}")
        for failure in failures[:MOST_DAMAGED]:
            console.line(f"damaged   {failure.message}")
        if len(failures) > MOST_DAMAGED:
            console.line(f"          and {len(failures) - MOST_DAMAGED} more; --json lists them")
        console.line(f"damaged   {len(failures)}" if failures else "damaged   nothing")
    return DAMAGED if failures else OK
