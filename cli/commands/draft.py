"""`flashnext draft`: capture what a draft learns from, train it, judge it, and look at any draft."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cli.console import OPENING, Console, as_json_value, counted, shell_word, size
from cli.engine_factory import Services
from cli.errors import DAMAGED, FAILED, INCOMPATIBLE, INTERRUPTED, OK, UsageProblem
from cli.interrupts import Interrupts
from cli.model_path import FoundModel, find_model
from cli.options import ModelOptions, SamplingOptions
from cli.parse import parse_count
from cli.sampling import sampling_params
from cli.settings import expanded

if TYPE_CHECKING:
    from drafter.compat import Verdict
    from mlx_flashnext.engine.engine import Engine

CONTEXT = 4096
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_Draft = Annotated[str, typer.Argument(metavar="DRAFT", help="Directory of a draft.")]
_Slots = Annotated[
    int | None,
    typer.Option("--slots", metavar="N", help="Expert slots of each layer.", parser=parse_count),
]
_Context = Annotated[
    int,
    typer.Option("--ctx-size", "-c", metavar="TOKENS", help="Longest prompt and answer.", min=1),
]
_Captures = Annotated[
    str, typer.Option("--captures", metavar="SET", help="A set that `draft capture` made with this model.")
]


def inspect(
    context: typer.Context,  # noqa: ARG001  as every command
    console: Console,
    model: ModelOptions,
    draft: _Draft,
    json: _Json = False,
) -> int:
    """Hold a draft against the model, comparison by comparison. Nothing is loaded.

    Exit code 3 means that the model would not run with it, 5 that a document of it is damaged.
    """
    from contextlib import closing

    from drafter.compat import check_draft
    from mlx_flashnext.checkpoint import open_checkpoint
    from mlx_flashnext.engine.conditions import version_of
    from mlx_flashnext.engine.draft_files import open_draft
    from mlx_flashnext.engine.draft_target import target_facts
    from mlx_flashnext.engine.machine import detect_machine
    from mlx_flashnext.tokenizer import Tokenizer
    from mlx_flashnext.training.draft_capture import CONTRACTIONS

    found = find_model(model.model)
    checkpoint = open_checkpoint(found.directory)
    facts = target_facts(
        checkpoint,
        Tokenizer.open(found.directory),
        None,
        name=found.directory.name,
        contractions=CONTRACTIONS,
        runtime_version=version_of("flashnext"),
        itemsize=2 if detect_machine().compute_dtype == "bfloat16" else 4,
        context_tokens=checkpoint.config.max_position_embeddings,
        memory_left=None,
    )
    with closing(open_draft(expanded(draft))) as files:
        verdict = check_draft(files.listing, facts)
    if json:
        console.document(as_json_value(verdict.as_document()))
    else:
        _show_verdict(console, verdict)
    if verdict.is_damaged:
        return DAMAGED
    return INCOMPATIBLE if verdict.refusals else OK


def capture(
    context: typer.Context,
    console: Console,
    model: ModelOptions,
    sampling: SamplingOptions,
    prompts: Annotated[
        str,
        typer.Argument(metavar="PROMPTS", help='JSON lines: {"prompt": "..."} or {"messages": [...]}.'),
    ],
    out: Annotated[str, typer.Argument(metavar="SET", help="The capture set to make or to go on with.")],
    taps: Annotated[str, typer.Option("--taps", metavar="LAYERS", help="Layers to keep, such as 1,3,4,6.")],
    contraction: Annotated[
        Literal["mean", "next_attn_mix", "final_mix", "stream0"],
        typer.Option("--contraction", help="How a layer's four streams become one row."),
    ] = "mean",
    held_out: Annotated[
        int,
        typer.Option("--held-out", metavar="N", help="Hold out one document in N.", min=1),
    ] = 16,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            metavar="NUMBER",
            help="Largest difference of a feature between saying and reading a document; 0: none.",
            min=0,
        ),
    ] = 0.0,
    slots: _Slots = None,
    ctx_size: _Context = CONTEXT,
    json: _Json = False,
) -> int:
    """Let the model answer prompts, and keep what a draft learns from: tokens, layer outputs, routes.

    A run that was cut short goes on where it stopped. The first documents are read again as prompts, and must
    give the same values.
    """
    from mlx_flashnext.training.draft_capture import CaptureRequest
    from mlx_flashnext.training.draft_capture import capture as capture_documents
    from mlx_flashnext.training.prompt_files import read_prompts

    found = find_model(model.model)
    params = replace(sampling_params(sampling, found.directory), seed=sampling.seed or 0)
    request = CaptureRequest(
        taps=_layers(taps),
        contraction=contraction,
        params=params,
        max_tokens=sampling.max_tokens or 512,
        held_out_every=held_out,
        tolerance=tolerance,
    )
    with Interrupts(), _engine(context, console, found, slots, ctx_size, draft="oracle") as engine:
        asked = list(read_prompts(expanded(prompts), found.directory, engine.tokenizer))
        done = capture_documents(engine, asked, expanded(out), request, _bar(console, "documents"))
    console.end_progress()
    if json:
        console.document(as_json_value(_fields(done)))
        return OK
    console.line(
        f"captured  {counted(done.num_new, 'document')}, {done.num_new_tokens} tokens; "
        f"{counted(done.num_documents, 'document')} in all"
    )
    if done.num_replayed:
        console.line(
            f"proved    {done.num_replayed_rows} rows read as prompts: largest difference "
            f"{done.largest_difference:.3g}, other experts in {done.num_route_differences} places"
        )
    return OK


def train(
    context: typer.Context,
    console: Console,
    model: ModelOptions,
    captures: Annotated[str, typer.Argument(metavar="SET", help="A capture set of this model.")],
    run: Annotated[str, typer.Argument(metavar="RUN", help="Directory of the run, new or to go on with.")],
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="The draft's config.json. Left out: a usual one."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Of the whole run.", min=1)] = 2000,
    documents: Annotated[int, typer.Option("--documents", metavar="N", help="Of a step.", min=1)] = 8,
    anchors: Annotated[
        int,
        typer.Option("--anchors", metavar="N", help="Blocks of a document of a step.", min=1),
    ] = 32,
    rate: Annotated[
        float, typer.Option("--rate", metavar="NUMBER", help="The highest learning rate.")
    ] = 6e-4,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of first parameters and batches.")] = 0,
    json: _Json = False,
) -> int:
    """Train a draft, or go on training it.

    RUN holds checkpoints, log.csv and curve.svg. Ctrl-C saves and stops; the same command goes on.
    """
    from drafter.documents import DocumentRefused, parse_object, read_document, unusable
    from drafter.train.captures import CaptureSet
    from drafter.train.runs import TrainSettings
    from mlx_flashnext.training.draft_training import default_config, train_draft

    found, captured = find_model(model.model), CaptureSet.open(expanded(captures))
    try:
        wanted = (
            default_config(captured)
            if config is None
            else parse_object(read_document(expanded(config)), config)
        )
    except DocumentRefused as error:
        hint = "docs/reference/dflash2.md, 1.1, or leave --config out"
        raise unusable("No config of a draft", error, hint=hint) from None
    settings = TrainSettings(
        num_steps=steps, num_documents=documents, num_anchors=anchors, rate=rate, seed=seed
    )
    losses: list[float] = []

    def seen(done: int, total: int, loss: float) -> None:
        losses.append(loss)
        console.progress(f"loss {loss:.3f}, steps", done, total)

    with Interrupts() as interrupts, _engine(context, console, found, None, CONTEXT) as engine:
        with interrupts.polled():
            made = train_draft(
                engine, captured, expanded(run), wanted, settings, progress=seen, stop=interrupts.was_pressed
            )
        is_cut = interrupts.was_pressed()
    console.end_progress()
    rows = made.rows()
    if json:
        console.document({"run": str(made.directory), "last": rows[-1] if rows else None})
    else:
        console.line(f"trained  {made.directory}: {rows[-1]['step'] if rows else 0:.0f} of {steps} steps")
        after = f"flashnext draft export {shell_word(run)} DIR --licence NAME"
        console.line(f"next     {'the same line again goes on' if is_cut else after}")
    return INTERRUPTED if is_cut else OK


def export(
    context: typer.Context,
    console: Console,
    model: ModelOptions,
    run: Annotated[str, typer.Argument(metavar="RUN", help="A training run.")],
    out: Annotated[str, typer.Argument(metavar="DRAFT", help="The directory to make; must not exist.")],
    licence: Annotated[str, typer.Option("--licence", help="That you give the draft, such as apache-2.0.")],
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option("--dtype", help="Of the stored weights.")
    ] = "bfloat16",
    json: _Json = False,
) -> int:
    """Make a draft of a training run: config, weights, contract, card."""
    from drafter.train.runs import Run
    from mlx_flashnext.training.draft_training import export_run

    with _engine(context, console, find_model(model.model), None, CONTEXT) as engine:
        made = export_run(engine, Run(expanded(run)), expanded(out), licence=licence, dtype=dtype)
    if json:
        console.document(as_json_value(_fields(made)))
    else:
        console.line(f"made  {made.directory}: {made.num_parameters} parameters, {size(made.num_bytes)}")
        console.line(f"next  flashnext chat --draft dflash2 --draft-model {shell_word(made.directory)}")
    return OK


def evaluate(
    context: typer.Context,
    console: Console,
    model: ModelOptions,
    draft: _Draft,
    captures: _Captures,
    documents: Annotated[
        int | None, typer.Option("--documents", metavar="N", help="At most so many.", parser=parse_count)
    ] = None,
    json: _Json = False,
) -> int:
    """Measure a draft on the held-out documents of a capture set: what greedy service would accept."""
    from drafter.train.captures import CaptureSet
    from mlx_flashnext.training.draft_training import evaluate_draft, load_draft

    with Interrupts(), _engine(context, console, find_model(model.model), None, CONTEXT) as engine:
        found = evaluate_draft(
            engine,
            load_draft(engine, expanded(draft)),
            CaptureSet.open(expanded(captures)),
            most_documents=documents,
            progress=_bar(console, "documents"),
        )
    console.end_progress()
    if json:
        console.document(as_json_value(found))
        return OK
    rows = [("all", found["all"]), *found["by_label"].items()]
    slots = len(found["all"]["acceptance_by_slot"])
    console.table(
        ("documents", "tokens a cycle", *(f"slot {slot + 1}" for slot in range(slots))),
        [
            (
                label or "unnamed",
                f"{figures['tokens_per_cycle']:.2f}",
                *(f"{100 * share:.0f}%" for share in figures["acceptance_by_slot"]),
            )
            for label, figures in rows
        ],
        right=tuple(range(1, slots + 2)),
    )
    if found["selector_off"] is not None:
        console.line(f"without its selector: {found['selector_off']:.2f} tokens a cycle")
    console.line(f"confidence is off by {found['all']['calibration']['expected_error']:.3f} on average")
    return OK


def calibrate(
    context: typer.Context,
    console: Console,
    model: ModelOptions,
    draft: _Draft,
    captures: _Captures,
    json: _Json = False,
) -> int:
    """Find out how the draft's features are made, by trying every way on the model's own text.

    What settles the matter is written beside the draft and judged at every load. What does not is only shown:
    the gate refuses a draft with a record that settles nothing.
    """
    import msgspec

    from drafter import calibration
    from drafter.files import replace_file
    from drafter.train.captures import CaptureSet
    from mlx_flashnext.training.draft_calibrate import calibrate as try_ways
    from mlx_flashnext.training.draft_training import load_draft

    directory = expanded(draft)
    with Interrupts(), _engine(context, console, find_model(model.model), None, CONTEXT) as engine:
        loaded = load_draft(engine, directory, contraction="mean")
        captured = CaptureSet.open(expanded(captures))
        record, faults = try_ways(engine, loaded, captured, progress=_bar(console, "tokens"))
    console.end_progress()
    if not faults:
        replace_file(directory / calibration.FILE, msgspec.json.format(msgspec.json.encode(record), indent=1))
    if json:
        console.document(as_json_value({"record": msgspec.to_builtins(record), "faults": faults}))
    else:
        rows = [
            (
                trial.contraction,
                f"{trial.tap_shift:+d}",
                f"{trial.agreement[0]:.3f}",
                f"{trial.mean_prefix:.2f}",
            )
            for trial in record.trials
        ]
        console.table(("contraction", "taps", "first slot", "prefix"), rows, right=(1, 2, 3))
        console.line(
            f"settled: {record.contraction}" if not faults else "settles nothing, so nothing was written:"
        )
        for fault in faults:
            console.line(f"  {fault}")
    return FAILED if faults else OK


def promote(
    context: typer.Context,
    console: Console,
    model: ModelOptions,
    draft: _Draft,
    captures: _Captures,
    prompts: Annotated[
        str, typer.Option("--prompts", metavar="FILE", help="Prompts to serve, as for `draft capture`.")
    ],
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="Of an answer.", min=1)] = 128,
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", help="Answers drawn; 0: none.", min=0)
    ] = 400,
    slots: _Slots = None,
    json: _Json = False,
) -> int:
    """Climb the ladder that a draft must climb before it is served, and write the evidence beside it.

    What only the hardware that will serve can show is marked so. Exit code 1 means that a rung failed.
    """
    from drafter.train.captures import CaptureSet
    from mlx_flashnext.tokenizer import Tokenizer
    from mlx_flashnext.training.draft_promote import Ladder
    from mlx_flashnext.training.draft_promote import promote as climb
    from mlx_flashnext.training.prompt_files import read_prompts

    found, directory = find_model(model.model), expanded(draft)
    asked = read_prompts(expanded(prompts), found.directory, Tokenizer.open(found.directory))
    ladder = Ladder(
        captures=CaptureSet.open(expanded(captures)),
        prompts=[prompt.tokens for prompt in asked],
        max_tokens=max_tokens,
        num_samples=samples,
    )
    if not ladder.prompts:
        raise UsageProblem(f"No prompt in {prompts}", hint="one JSON object a line")

    def opened(own: Path | None, hints: str) -> "Engine":
        kind = "none" if own is None else "dflash2"
        return _engine(context, console, found, slots, CONTEXT, draft=kind, directory=own, hints=hints)

    with Interrupts():
        rungs = climb(opened, directory, ladder, lambda name: console.progress(name, 0, 0))
    console.end_progress()
    has_failed = any(rung.outcome == "failed" for rung in rungs)
    if json:
        console.document(as_json_value([_fields(rung) for rung in rungs]))
    else:
        console.table(("rung", "outcome", "why"), [(rung.name, rung.outcome, rung.why) for rung in rungs])
    return FAILED if has_failed else OK


def _engine(
    context: typer.Context,
    console: Console,
    found: FoundModel,
    slots: int | None,
    context_tokens: int,
    *,
    draft: str = "none",
    directory: Path | None = None,
    hints: str = "off",
) -> "Engine":
    from drafter.api import MAX_PROPOSALS
    from mlx_flashnext.engine.plan import PlanRequest

    services: Services = context.obj
    console.progress(OPENING, 0, 0)
    request = PlanRequest(
        context_tokens=context_tokens,
        slots_per_layer=slots,
        draft=draft,
        draft_directory=directory,
        num_draft_tokens=MAX_PROPOSALS if draft == "oracle" else None,
        hints=hints,
    )
    return services.open_measured(found.directory, request, console.progress, lambda source: source)


def _bar(console: Console, what: str) -> Callable[[int, int], None]:
    return lambda done, total: console.progress(what, done, total)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageProblem(f"Not a list of layers: --taps {text}", hint="--taps 1,3,4,6") from None


def _fields(value: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(value)


def _show_verdict(console: Console, verdict: "Verdict") -> None:
    rows = [(each.code, each.consequence, each.message) for each in verdict.reasons]
    console.table(("code", "consequence", "comparison"), rows)
    hints = dict.fromkeys(each.hint for each in verdict.refusals if each.hint)
    for hint in hints:
        console.line(f"hint: {hint}")
    if verdict.refusals:
        console.line(f"refused for {counted(len(verdict.refusals), 'reason')}")
        return
    console.line(
        f"fits: {verdict.max_proposals} proposals a cycle, contraction {verdict.contraction}, "
        f"{size(verdict.weight_bytes)} of weights, {size(verdict.context_bytes)} of context at most"
    )
