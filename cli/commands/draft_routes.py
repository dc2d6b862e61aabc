"""`flashnext draft train-near | train-sidecar`: maps that say which experts to read ahead."""

from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.console import OPENING, Console, size
from cli.engine_factory import Services
from cli.errors import OK
from cli.interrupts import Interrupts
from cli.model_path import FoundModel, find_model
from cli.options import ModelOptions
from cli.parse import parse_count
from cli.settings import expanded

if TYPE_CHECKING:
    from mlx_flashnext.engine.engine import Engine

CONTEXT = 4096
_Captures = Annotated[
    str, typer.Option("--captures", metavar="SET", help="A set that `draft capture` made with this model.")
]
_Steps = Annotated[int, typer.Option("--steps", metavar="N", help="Of training.", min=1)]
_Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Of first values and batches.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_Documents = Annotated[
    int | None, typer.Option("--documents", metavar="N", help="At most so many.", parser=parse_count)
]


def train_near(
    context: typer.Context,
    console: Console,
    model: ModelOptions,
    captures: _Captures,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="DIR", help="Where to write it. Left out: beside the model."),
    ] = None,
    rows: Annotated[
        int, typer.Option("--rows", metavar="N", help="Rows of text to learn from.", min=1)
    ] = 40_000,
    documents: _Documents = None,
    steps: _Steps = 1500,
    seed: _Seed = 0,
    json: _Json = False,
) -> int:
    """Train the map that guesses a layer's experts two layers early, for --hints near-linear and both.

    It learns from the model's own routes and belongs to the model: no draft is needed. A run that was stopped
    goes on with the same command: it keeps its state beside --out until the map is written.
    """
    from drafter.route_files import NEAR_DIRECTORY
    from drafter.train.captures import CaptureSet
    from drafter.train.fit_near import NearSettings
    from mlx_flashnext.engine.route_files import write_routes
    from mlx_flashnext.training.route_training import RouteRequest
    from mlx_flashnext.training.route_training import train_near as fit

    found = find_model(model.model)
    place = found.directory / NEAR_DIRECTORY if out is None else expanded(out)
    request = RouteRequest(num_rows=rows, num_documents=documents, seed=seed)
    with Interrupts(), _engine(context, console, found) as engine:
        document, arrays = fit(
            engine,
            CaptureSet.open(expanded(captures)),
            request,
            NearSettings(num_steps=steps, seed=seed),
            console.progress,
            kept := kept_state(place),
        )
    console.end_progress()
    num_bytes = write_routes(place, document, arrays)
    rmtree(kept, ignore_errors=True)
    _say(console, place, num_bytes, document, as_json=json)
    return OK


def train_sidecar(
    context: typer.Context,
    console: Console,
    model: ModelOptions,
    draft: Annotated[str, typer.Argument(metavar="DRAFT", help="Directory of the draft; it stays as it is.")],
    captures: _Captures,
    rank: Annotated[int, typer.Option("--rank", metavar="N", help="Of a row's code.", min=1, max=4096)] = 96,
    anchors: Annotated[
        int, typer.Option("--anchors", metavar="N", help="Blocks of each document.", min=1)
    ] = 12,
    candidates: Annotated[
        int,
        typer.Option(
            "--candidates", metavar="N", help="Documents served again, for rows of proposed paths.", min=0
        ),
    ] = 48,
    documents: _Documents = None,
    steps: _Steps = 4000,
    seed: _Seed = 0,
    json: _Json = False,
) -> int:
    """Train a draft's route sidecar: which experts the rows of a proposal will want, for --hints sidecar.

    It is written into the draft's directory and belongs to this very draft and this very model. A run that
    was stopped goes on with the same command: it keeps its state there until the sidecar is written.
    """
    from drafter.route_files import SIDECAR_DIRECTORY
    from drafter.train.captures import CaptureSet
    from drafter.train.fit_sidecar import SidecarSettings
    from mlx_flashnext.engine.route_files import write_routes
    from mlx_flashnext.training.draft_training import load_draft
    from mlx_flashnext.training.route_training import RouteRequest
    from mlx_flashnext.training.route_training import train_sidecar as fit

    found, directory = find_model(model.model), expanded(draft)
    request = RouteRequest(num_anchors=anchors, num_documents=documents, num_candidates=candidates, seed=seed)
    with Interrupts(), _engine(context, console, found, directory) as engine:
        document, arrays = fit(
            engine,
            load_draft(engine, directory),
            CaptureSet.open(expanded(captures)),
            request,
            SidecarSettings(rank=rank, num_steps=steps, seed=seed),
            console.progress,
            kept := kept_state(directory / SIDECAR_DIRECTORY),
        )
    console.end_progress()
    place = directory / SIDECAR_DIRECTORY
    num_bytes = write_routes(place, document, arrays)
    rmtree(kept, ignore_errors=True)
    _say(console, place, num_bytes, document, as_json=json)
    return OK


def kept_state(place: Path) -> Path:
    """Return where a fit keeps itself until its files are written: beside them, under a name of its own."""
    return place.with_name(f".{place.name}.training")


def _engine(
    context: typer.Context, console: Console, found: FoundModel, draft: Path | None = None
) -> "Engine":
    from mlx_flashnext.checkpoint import open_checkpoint
    from mlx_flashnext.engine.plan import PlanRequest

    services: Services = context.obj
    console.progress(OPENING, 0, 0)
    # One expert fewer than there are: routes then come to the host, and next to nothing is read twice.
    num_experts = open_checkpoint(found.directory).config.num_experts
    request = PlanRequest(
        context_tokens=CONTEXT,
        slots_per_layer=num_experts - 1,
        draft="none" if draft is None else "dflash2",
        draft_directory=draft,
    )
    return services.open_measured(found.directory, request, console.progress, lambda source: source)


def _say(console: Console, place: Path, num_bytes: int, document: Any, *, as_json: bool) -> None:
    import msgspec

    lineage = document.lineage
    if as_json:
        console.document(
            {"directory": str(place), "bytes": num_bytes, "lineage": msgspec.to_builtins(lineage)}
        )
        return
    console.line(f"made     {place}: {size(num_bytes)}")
    console.line(
        f"of       {lineage.clean_rows} rows of text, {lineage.candidate_rows} of proposed paths, "
        f"{lineage.calibration_rows} for calibration; {lineage.num_documents} documents"
    )
