"""Plays one answer: engine events in, reasoning and answer out through a sink, a summary at the end.

Entry point: `play`. The sinks decide what a stream of events looks like: text for people, lines of JSON
for programs, or nothing until the end.

Invariant: the concatenated pieces are the final text, and stdout carries nothing else.
"""

from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from cli.console import Console, as_json_value, statistics_line
from cli.demo_notice import show_vision_notice
from cli.engine_factory import EngineLike, Services, SessionLike
from cli.errors import UsageProblem
from cli.interrupts import Interrupts
from cli.model_path import FoundModel
from cli.options import AnswerOptions, DraftOptions, HintOptions, MemoryOptions
from cli.pulse import Pulse
from cli.settings import popularity

if TYPE_CHECKING:
    from mlx_flashnext.engine.plan import PlanRequest
    from mlx_flashnext.engine.sampler import SamplingParams
    from mlx_flashnext.engine.stats import GenerationStatistics


NO_DRAFT = DraftOptions()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to the engine.

    Attributes:
        prompt: the whole rendering, as tokens.
        starts_inside: the prompt ends inside a think block.
        max_tokens: most tokens of the answer, None for the rest of the context.
        rule: how proposals are verified.
    """

    prompt: Sequence[int]
    starts_inside: bool
    params: "SamplingParams"
    stop_ids: tuple[int, ...]
    max_tokens: int | None
    rule: Literal["auto", "coupled", "delta", "sampled"] = "auto"


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer."""

    text: str
    reasoning: str
    finish_reason: str
    statistics: "GenerationStatistics"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; statistics are named as in METRICS.md."""
        return {
            "text": self.text,
            "reasoning": self.reasoning,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.statistics.prompt_tokens,
            "output_tokens": self.statistics.output_tokens,
            "statistics": statistics_report(self.statistics),
        }


class Sink(Protocol):
    """Where an answer goes while it is made."""

    def prefill(self, done: int, total: int) -> None:
        """Take prefill progress."""

    def waiting(self, waited_s: float, done: int, total: int) -> None:
        """Take that the prompt is still being read; called from another thread, never beside another call."""

    def piece(self, reasoning: str, answer: str, token_id: int | None) -> None:
        """Take text that became final."""


class TextSink:
    """For people: the answer on stdout, the reasoning on stderr."""

    def __init__(self, console: Console, *, hide_reasoning: bool) -> None:
        self._console = console
        self._hides_reasoning = hide_reasoning

    def prefill(self, done: int, total: int) -> None:
        """Show progress if it takes a while."""
        self._console.progress("reading the prompt", done, total, steady=True)

    def waiting(self, waited_s: float, done: int, total: int) -> None:
        """Show that time passes."""
        self._console.progress(f"reading the prompt, {waited_s:.0f} s", done, total, now=True)

    def piece(self, reasoning: str, answer: str, token_id: int | None) -> None:  # noqa: ARG002  JSON lines show it
        """Write what is there."""
        if reasoning and not self._hides_reasoning:
            self._console.reasoning(reasoning)
        if answer:
            self._console.answer(answer)


class LinesSink:
    """For programs that follow along: one JSON event a line."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def prefill(self, done: int, total: int) -> None:
        """Report progress."""
        self._console.document({"event": "prefill", "done": done, "total": total}, in_one_line=True)

    def waiting(self, waited_s: float, done: int, total: int) -> None:
        """Report that it goes on."""
        event = {"event": "waiting", "waited_s": round(waited_s, 3), "done": done, "total": total}
        self._console.document(event, in_one_line=True)

    def piece(self, reasoning: str, answer: str, token_id: int | None) -> None:
        """Report a token, or text that became final after the last one."""
        event = {"event": "token", "token_id": token_id, "reasoning": reasoning, "text": answer}
        if token_id is not None or reasoning or answer:
            self._console.document(event, in_one_line=True)


class SilentSink:
    """For programs that wait for the end: progress on the terminal only."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def prefill(self, done: int, total: int) -> None:
        """Show progress if it takes a while."""
        self._console.progress("reading the prompt", done, total, steady=True)

    def waiting(self, waited_s: float, done: int, total: int) -> None:
        """Show that time passes."""
        self._console.progress(f"reading the prompt, {waited_s:.0f} s", done, total, now=True)

    def piece(self, reasoning: str, answer: str, token_id: int | None) -> None:
        """Keep quiet."""


def play(session: SessionLike, ask: Ask, sink: Sink, interrupts: Interrupts) -> Answer:
    """Run one answer to its end.

    Args:
        session: continues when the prompt continues what it has consumed.
        ask: the request.
        sink: takes pieces as they become final.
        interrupts: Ctrl-C ends the answer at the next cycle boundary.

    Returns:
        The whole answer; `finish_reason` is "cancelled" after Ctrl-C.
    """
    from mlx_flashnext.engine.events import PrefillProgress, Token
    from mlx_flashnext.text.thinking import Piece, ThinkingSplitter

    splitter = ThinkingSplitter(starts_inside=ask.starts_inside)
    reasoning: list[str] = []
    answer: list[str] = []

    def take(piece: Piece, token_id: int | None) -> None:
        reasoning.append(piece.reasoning)
        answer.append(piece.answer)
        sink.piece(piece.reasoning, piece.answer, token_id)

    events = session.generate(
        ask.prompt,
        ask.params,
        max_tokens=ask.max_tokens,
        stop_ids=ask.stop_ids,
        cancelled=interrupts.was_pressed,
        rule=ask.rule,
    )
    reached = (0, len(ask.prompt))
    pulse = Pulse(lambda waited_s: sink.waiting(waited_s, *reached))
    with _not_blaming(interrupts), interrupts.polled(), closing(cast("_Closable", events)), pulse:
        for event in events:
            if isinstance(event, PrefillProgress):
                with pulse.held():
                    reached = (event.done, event.total)
                    sink.prefill(event.done, event.total)
                continue
            pulse.stop()
            if isinstance(event, Token):
                take(splitter.feed(event.text), event.token_id)
            else:
                take(splitter.feed(event.text), None)
                take(splitter.flush(), None)
                return Answer("".join(answer), "".join(reasoning), event.reason, event.statistics)
    raise AssertionError("the engine ended an answer without saying so")


@contextmanager
def _not_blaming(interrupts: Interrupts) -> Generator[None]:
    """Take what MLX raises after Ctrl-C for it: the press also ends a compiler that MLX waits for."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is RuntimeError and interrupts.was_pressed():
            raise KeyboardInterrupt from error
        raise


class _Closable(Protocol):
    def close(self) -> None: ...


@contextmanager
def opened(
    services: Services,
    model: FoundModel,
    memory: MemoryOptions,
    draft: DraftOptions,
    hints: HintOptions,
    console: Console,
) -> Generator[EngineLike]:
    """Open an engine for the length of a block, with progress on the terminal."""

    def progress(stage: str, done: int, total: int) -> None:
        console.progress(f"loading {stage}", done, total, is_bytes=total > 1 << 20)

    if hints.hints == "oracle":
        raise UsageProblem(
            "It replays a recorded run, which only a report makes: --hints oracle",
            hint="flashnext bench --report ssd-wait --hints oracle",
        )
    request = replace(plan_request(memory, model, draft), hints=hints.hints)
    engine = services.open_engine(model.directory, request, progress, popularity() if hints.warm else None)
    console.end_progress()
    show_vision_notice(engine.checkpoint, console)
    for notice in engine.notices:
        console.note(f"note: {notice}")
    if engine.warm.note:
        console.note(f"note: {engine.warm.note}")
    if draft.draft == "auto":
        console.note(f"note: drafts come from {engine.plan.draft}: {engine.plan.draft_reason}")
    at_start = engine.warm.note
    with closing(engine):
        yield engine
        mirror = engine.mirror
    if mirror is not None and mirror.dropped:
        console.note(f"note: {mirror.dropped}; the answer is not affected")
    if engine.warm.note != at_start:
        console.note(f"note: {engine.warm.note}")


def plan_request(memory: MemoryOptions, model: FoundModel, draft: DraftOptions = NO_DRAFT) -> "PlanRequest":
    """Return what the flags ask of the plan; the demo streams unless a flag says otherwise.

    Raises:
        UsageProblem: a draft is named that nothing would read.
    """
    from mlx_flashnext.demo import DEMO_SLOTS
    from mlx_flashnext.engine.plan import PlanRequest

    _check_draft(draft)
    slots = memory.slots
    if model.is_demo and slots is None and memory.memory is None:
        slots = DEMO_SLOTS
    return PlanRequest(
        memory_bytes=memory.memory,
        context_tokens=memory.ctx_size,
        slots_per_layer=slots,
        prefill_step=memory.prefill_step_size,
        policy=memory.policy,
        num_readers=memory.readers,
        verify_reads=memory.verify_reads,
        draft=draft.draft,
        draft_directory=draft.draft_model,
        num_draft_tokens=draft.num_draft_tokens,
        mirror_directory=memory.mirror,
    )


def _check_draft(draft: DraftOptions) -> None:
    """Refuse flags that nothing would read."""
    if draft.draft_model is not None and draft.draft not in ("dflash2", "auto"):
        raise UsageProblem(
            f"Nothing reads --draft-model with --draft {draft.draft}",
            hint=f"--draft dflash2 --draft-model {draft.draft_model}",
        )
    if draft.draft != "none":
        return
    given = {
        f"--num-draft-tokens {draft.num_draft_tokens}": draft.num_draft_tokens is not None,
        f"--draft-rule {draft.draft_rule}": draft.draft_rule != "auto",
    }
    for flag in (flag for flag, is_given in given.items() if is_given):
        raise UsageProblem(f"Nothing reads {flag} with --draft none", hint=f"--draft lookup {flag}")


def show_end(
    console: Console, answer: Answer, engine: EngineLike, options: AnswerOptions, *, max_tokens: int | None
) -> None:
    """Tell on stderr why an answer ended early, and what it cost."""
    if answer.finish_reason == "context":
        console.note(f"note: {context_advice(engine)}")
    elif answer.finish_reason == "length" and max_tokens is not None and console.err_is_terminal:
        console.note(f"note: stopped after --max-tokens {max_tokens}")
    wants = options.stats if options.stats is not None else console.err_is_terminal
    draft = answer.statistics.draft
    if draft.num_failures:
        console.note(f"note: the {draft.drafter} drafter {draft.reason}; the answer is not affected")
    if wants:
        console.note(statistics_line(answer.statistics))


def context_advice(engine: EngineLike) -> str:
    """Return that the context is full, and what to do about it."""
    plan = engine.plan
    text = f"the context is full: {plan.context_tokens} tokens"
    if plan.max_context_tokens > plan.context_tokens:
        return f"{text}; --ctx-size {plan.max_context_tokens} fits the same memory"
    if plan.longest_context_tokens > plan.context_tokens:
        return (
            f"{text}; --ctx-size {plan.longest_context_tokens} fits the same memory with fewer expert slots"
        )
    return f"{text}; more --memory allows more"


def statistics_report(statistics: "GenerationStatistics") -> dict[str, Any]:
    """Return the figures of an answer by name."""
    from dataclasses import asdict

    return as_json_value(asdict(statistics))
