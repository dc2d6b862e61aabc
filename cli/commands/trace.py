"""`flashnext trace`: write down what was proposed and verified; show, check and replay it without a model."""

import os
import tempfile
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, Self, cast

import typer

from cli.answer import Ask, TextSink, plan_request, play
from cli.console import Console, as_json_value, counted, size
from cli.engine_factory import Services
from cli.errors import DAMAGED, FAILED, INCOMPATIBLE, INTERRUPTED, OK, CommandError, UsageProblem, code_of
from cli.interrupts import Interrupts
from cli.model_path import find_model
from cli.options import DraftOptions, MemoryOptions, ModelOptions, PromptOptions, SamplingOptions
from cli.prompts import PromptMaker, read_prompt, system_messages
from cli.sampling import sampling_params, stop_ids
from cli.settings import expanded
from mlx_flashnext.text.thinking import prompt_ends_inside

if TYPE_CHECKING:
    from drafter.record import Cycle, Header
    from drafter.record_check import Identity
    from mlx_flashnext.engine.engine import Engine
    from mlx_flashnext.traces.recording import Recorder, TraceSettings

TraceFile = Annotated[str, typer.Argument(metavar="TRACE", help="A file that `trace record` wrote.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_Against = Annotated[
    str | None,
    typer.Option("--model", help="Also refuse a trace of another checkpoint, tokenizer or vocabulary."),
]
MOST_CYCLES = 32


def record(
    context: typer.Context,
    console: Console,
    model: ModelOptions,
    prompting: PromptOptions,
    sampling: SamplingOptions,
    memory: MemoryOptions,
    draft: DraftOptions,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The trace to make; must not exist.")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT", help="What to answer; - stands for standard input.", show_default=False
        ),
    ] = None,
    hints: Annotated[
        Literal["off", "frequency", "previous", "random", "near-gate", "near-linear", "sidecar", "both"],
        typer.Option(
            "--hints", metavar="SOURCE", help="Who guesses which experts to read ahead, as for run."
        ),
    ] = "off",
    hidden: Annotated[
        Literal["digest", "payload"],
        typer.Option("--hidden", help="Keep the hidden rows that the drafter saw, or their digest."),
    ] = "digest",
    logits: Annotated[
        bool,
        typer.Option("--logits", help="Keep all logits where they are few; without, no replay."),
    ] = False,
) -> int:
    """Answer one prompt and write every cycle down: proposals, verdicts, routes, guesses.

    The answer goes to stdout. The trace holds the token ids of prompt and answer, which are as private as the
    text itself, and digests of the model: the file is readable by you alone, and nothing is ever sent
    anywhere. A trace appears when it is whole; if it cannot be written the answer goes on without it.
    """
    services: Services = context.obj
    with Interrupts() as interrupts:
        found = find_model(model.model)
        text = read_prompt(words, console)
        with PromptMaker(found.directory, prompting) as maker:
            params = sampling_params(sampling, found.directory)
            rendered = maker.render([*system_messages(prompting), {"role": "user", "content": text}])
        request = replace(plan_request(memory, found, draft), hints=hints)
        with _NewFile(expanded(output)) as file:
            engine = services.open_measured(
                found.directory,
                request,
                lambda stage, done, total: console.progress(f"loading {stage}", done, total),
                lambda source: source,
            )
            console.end_progress()
            for notice in engine.notices:
                console.note(f"note: {notice}")
            with closing(engine):
                from mlx_flashnext.traces.recording import Recorder

                _check_logits(engine, logits)
                recorder = Recorder(file.stream, _settings(engine, hidden, keeps_logits=logits))
                ask = Ask(
                    prompt=engine.tokenizer.encode(rendered),
                    starts_inside=prompt_ends_inside(rendered),
                    params=params,
                    stop_ids=stop_ids(sampling, engine.tokenizer),
                    max_tokens=sampling.max_tokens,
                    rule=draft.draft_rule,
                )
                sink = TextSink(console, hide_reasoning=False)
                answer = play(engine.session(recorder=recorder), ask, sink, interrupts)
            if console.out_is_terminal and answer.text and not answer.text.endswith("\n"):
                console.answer("\n")
            if recorder.failure:
                raise file.unfinished(recorder) from recorder.cause
            if recorder.num_cycles:
                file.publish()
    if recorder.num_cycles:
        written = size(expanded(output).stat().st_size)
        lacks = "" if logits else ", without logits: no replay"
        console.note(f"{counted(recorder.num_cycles, 'cycle')}, {written} in {output}{lacks}")
    return INTERRUPTED if answer.finish_reason == "cancelled" else OK


def show(console: Console, trace: TraceFile, json: _Json = False) -> int:
    """Show a trace: what it is of, and its cycles.

    Token ids are shown, as private as the text; text is not: nothing is decoded.
    """
    from drafter.record import Answer, Cycle, End, Header, PromptPiece
    from drafter.record_check import checked_lines

    documents: list[Any] = []
    facts: list[str] = []
    rows: list[tuple[str, ...]] = []
    num_cycles = 0
    with opened_trace(trace) as stream:
        for line in checked_lines(stream):  # logits and hidden rows of a line go before the next one comes
            if json and not isinstance(line, PromptPiece):
                documents.append(_plain(line))
            elif isinstance(line, Header):
                facts += [*_facts(line), ""]
            elif isinstance(line, Answer):
                how = "greedy" if line.seed is None else f"temperature {line.temperature:g}, seed {line.seed}"
                prompt = counted(line.num_prompt_tokens, "token")
                facts.append(
                    f"answer of owner {line.request_owner}: prompt of {prompt}, rule {line.rule}, {how}"
                )
            elif isinstance(line, End):
                tokens = counted(line.num_committed_tokens, "token")
                facts.append(f"{tokens} in {counted(line.num_cycles, 'cycle')}")
            elif isinstance(line, Cycle):
                num_cycles += 1
                if len(rows) < MOST_CYCLES:
                    rows.append(_row(line))
    if json:
        console.document(documents)
        return OK
    for fact in facts:
        console.line(fact)
    headings = ("position", "generation", "proposed", "accepted", "taken", "bonus", "its p", "guesses right")
    console.line()
    console.table(headings, rows, right=range(len(headings)))
    if num_cycles > len(rows):
        console.line(f"and {num_cycles - len(rows)} more; --json has all")
    return OK


def verify(
    context: typer.Context, console: Console, trace: TraceFile, model: _Against = None, json: _Json = False
) -> int:
    """Check a trace: every line, every digest, and whether the lines agree with each other.

    Needs no model. Whether the target would decide so again is what `trace replay` asks.
    """
    from drafter.record import Answer, Cycle
    from drafter.record_check import checked_lines

    num_answers = num_cycles = 0
    with opened_trace(trace) as stream:
        for line in checked_lines(stream, identity_of(context.obj, model)):
            num_answers += isinstance(line, Answer)
            num_cycles += isinstance(line, Cycle)
    if json:
        console.document({"num_answers": num_answers, "num_cycles": num_cycles})
        return OK
    console.line(f"consistent: {counted(num_answers, 'answer')}, {counted(num_cycles, 'cycle')}")
    return OK


def replay(
    context: typer.Context, console: Console, trace: TraceFile, model: _Against = None, json: _Json = False
) -> int:
    """Run the recorded cycles again on the recorded logits, without a model.

    Verification, rollback, tickets and what the drafter is shown are computed anew by the product's own code;
    the first thing that comes out otherwise is refused by line and field. A trace that was recorded without
    --logits cannot be replayed: that is exit code 3, not the 5 of one that is damaged or wrong.
    """
    from mlx_flashnext.traces.replay import replay_trace

    with opened_trace(trace) as stream:
        outcome = replay_trace(stream, identity_of(context.obj, model))
    if json:
        console.document(as_json_value(asdict(outcome)))
        return OK
    kinds = outcome.cycles_by_acceptance
    facts = (
        ("replayed", f"{counted(outcome.num_answers, 'answer')}, {counted(outcome.num_cycles, 'cycle')}"),
        ("proposals", f"{outcome.num_accepted} of {outcome.num_proposed} accepted"),
        ("cycles", ", ".join(f"{kinds.get(kind, 0)} accepted {kind}" for kind in ("none", "some", "all"))),
        ("committed", counted(outcome.num_committed, "token")),
        ("rolled back", counted(outcome.num_rejected_rows, "row")),
        ("cancelled", counted(outcome.num_cancelled_tickets, "speculative ticket")),
    )
    for name, fact in facts:
        console.line(f"{name:<12} {fact}")
    return OK


class _NewFile:
    """A file in the making: beside its name, for the user's eyes only, until it is whole.

    Raises:
        CommandError: there is a file of that name, or none can be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._refuse_existing()
        try:
            file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - closed by `__exit__`
                dir=path.parent, prefix=".flashnext-", delete=False
            )
        except OSError as error:
            raise self._failed(error) from error
        self._partial, self.stream = Path(file.name), cast("BinaryIO", file)

    def publish(self) -> None:
        """Give it its name; it is on the disk by then.

        Raises:
            CommandError: it could not be written, or there is such a file by now.
        """
        self._refuse_existing()
        try:
            self.stream.flush()
            os.fsync(self.stream.fileno())
            self._partial.rename(self._path)
        except OSError as error:
            raise self._failed(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # what did not fit on the disk does not fit now
            self.stream.close()
        self._partial.unlink(missing_ok=True)

    def _refuse_existing(self) -> None:
        try:
            self._path.lstat()
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise self._failed(error) from error
        raise CommandError(f"There is a file already: {self._path}", hint="traces are never written over")

    def unfinished(self, recorder: "Recorder") -> CommandError:
        """Return the error of a trace that ended before its answer did."""
        cause = recorder.cause
        reason = (cause.strerror if isinstance(cause, OSError) else None) or recorder.failure
        return CommandError(
            f"No trace was written: {self._path}: {reason}",
            hint="the answer is whole; make room, or choose another place",
            code=FAILED if cause is None else code_of(cause),
        )

    def _failed(self, error: Exception) -> CommandError:
        reason = getattr(error, "strerror", None) or error
        return CommandError(
            f"Cannot write {self._path}: {reason}", hint="choose another place", code=code_of(error)
        )


@contextmanager
def opened_trace(name: str) -> Generator[BinaryIO]:
    """Open a trace; what it is refused for becomes an error of the command."""
    from drafter.files import naming
    from drafter.record import (
        TraceForeign,
        TraceNotReplayable,
        TraceOfOtherVersion,
        TraceRefused,
        open_trace,
    )

    try:
        path = expanded(name)
        with naming(path), open_trace(path) as stream:
            yield stream
    except TraceForeign as error:
        raise CommandError(
            f"{name}: {error}", hint="give the model it was recorded from", code=INCOMPATIBLE
        ) from None
    except TraceOfOtherVersion as error:
        raise CommandError(
            f"{name}: {error}", hint="use the flashnext that wrote it, or record another", code=INCOMPATIBLE
        ) from None
    except TraceNotReplayable as error:
        raise CommandError(
            f"{name}: {error}",
            hint="trace verify checks what it has; trace record --logits makes one that replays",
            code=INCOMPATIBLE,
        ) from None
    except TraceRefused as error:
        raise CommandError(
            f"{name}: {error}", hint="copy it again, or record another: flashnext trace record", code=DAMAGED
        ) from None


def _check_logits(engine: "Engine", wanted: bool) -> None:
    """Refuse to keep logits where a block has too many, rather than leave them out without a word."""
    from mlx_flashnext.traces.recording import MOST_LOGITS

    rows, ids = engine.plan.num_draft_tokens + 1, engine.config.vocab_size
    if wanted and rows * ids > MOST_LOGITS:
        raise UsageProblem(
            f"--logits keeps at most {MOST_LOGITS} logits of a block; a row has {ids}",
            hint="leave --logits out" if ids > MOST_LOGITS else "ask for fewer --num-draft-tokens",
        )


def _settings(
    engine: "Engine", hidden: Literal["digest", "payload"], *, keeps_logits: bool
) -> "TraceSettings":
    from mlx_flashnext.traces.recording import TraceSettings

    checkpoint = engine.checkpoint
    return TraceSettings(
        target_model_revision=checkpoint.digest,
        tokenizer_revision=_tokenizer_digest(checkpoint.directory),
        vocab_size=engine.config.vocab_size,
        num_layers=engine.config.num_hidden_layers,
        # The MTP module is part of the checkpoint.
        draft_digest=checkpoint.digest if engine.plan.draft == "mtp" else "",
        hidden=hidden,
        keeps_logits=keeps_logits,
    )


def identity_of(services: Services, model: str | None) -> "Identity":
    """Return what a trace must be of: a model's, or anything.

    Raises:
        CommandError: there is no such model here, or it does not open.
    """
    from drafter.record_check import Identity

    if model is None:
        return Identity()
    inspection = services.inspect_checkpoint(find_model(model).directory)
    checkpoint = inspection.checkpoint
    if checkpoint is None:
        raise CommandError(f"The checkpoint does not open: {model}", hint=f"flashnext show {model}")
    return Identity(
        target_model_revision=checkpoint.digest,
        tokenizer_revision=_tokenizer_digest(checkpoint.directory),
        vocab_size=checkpoint.config.vocab_size,
    )


def _tokenizer_digest(directory: Path) -> str:
    from mlx_flashnext.engine.draft_target import tokenizer_digest
    from mlx_flashnext.regular_file import read_regular

    return tokenizer_digest(read_regular(directory / "tokenizer.json"))


def _facts(header: "Header") -> list[str]:
    layers = ", ".join(map(str, header.captured_layer_ids))
    captured = "nothing"
    if layers:
        captured = f"{header.captured_stage} of layers {layers}, {header.hidden_dtype}"
    facts = (
        ("target", header.target_model_revision),
        ("tokenizer", header.tokenizer_revision),
        ("vocabulary", f"{header.vocab_size} ids"),
        ("draft", f"{header.draft_kind} {header.draft_digest}".strip()),
        ("captured", captured),
    )
    return [f"{name:<11} {fact}" for name, fact in facts]


def _row(line: "Cycle") -> tuple[str, ...]:
    said = line.target_token_probabilities_or_digest
    share = "" if isinstance(said, str) else f"{said[line.accepted_prefix_length][-1]:.3f}"
    guessed = sum(len(route.predicted_expert_ids) for route in line.routes)
    right = sum(
        expert in {e for row in route.target_expert_ids_in_native_rank_order for e in row}
        for route in line.routes
        for expert in route.predicted_expert_ids
    )
    numbers = (
        line.sequence_position,
        line.request_generation,
        len(line.proposal),
        line.accepted_prefix_length,
        line.num_committed,
        line.bonus_token,
    )
    return (*map(str, numbers), share, f"{right} of {guessed}" if guessed else "")


def _plain(line: Any) -> Any:
    """Return a line without what is long: logits and hidden rows."""
    import msgspec

    document = msgspec.to_builtins(line)
    for name in ("target_logits", "hidden_payload_or_digest"):
        if document.get(name) is not None and len(str(document[name])) > 64:
            document[name] = f"{len(document[name])} {'rows' if name == 'target_logits' else 'characters'}"
    return document
