"""Committed tokens to text to events: stop ids, stop strings, token budget, end of context, cancellation."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from mlx_flashnext.engine.cycle import Timeline
from mlx_flashnext.engine.events import Event, Finished, FinishReason, PrefillProgress, Token
from mlx_flashnext.engine.meter import Meter
from mlx_flashnext.engine.prefill import prefill
from mlx_flashnext.engine.sampler import Sampler
from mlx_flashnext.tokenizer import StreamDecoder


@dataclass(frozen=True, slots=True)
class Limits:
    """Where an answer ends.

    Attributes:
        max_tokens: most tokens of the answer.
        context_tokens: most tokens of prompt and answer.
        stop_ids: ids that end the answer; the id is committed, its text is not shown.
        stop_strings: texts that end the answer before them.
        prefill_step: tokens of one prefill chunk.
        cancelled: asked between cycles and chunks.
    """

    max_tokens: int
    context_tokens: int
    stop_ids: Collection[int]
    stop_strings: Sequence[str]
    prefill_step: int
    cancelled: Callable[[], bool]


@dataclass(slots=True)
class StopStrings:
    """Holds back text that may turn out to be the start of a stop string."""

    stops: Sequence[str]
    held: str = field(default="", init=False)

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to show, and whether a stop string was met."""
        self.held += text
        found = [at for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if found:
            shown, self.held = self.held[: min(found)], ""
            return shown, True
        keep = max((self._overlap(stop) for stop in self.stops), default=0)
        cut = len(self.held) - keep
        shown, self.held = self.held[:cut], self.held[cut:]
        return shown, False

    def flush(self) -> str:
        """Return what is still held back: the answer ended and it was no stop string."""
        shown, self.held = self.held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        longest = min(len(stop) - 1, len(self.held))
        return next((size for size in range(longest, 0, -1) if self.held.endswith(stop[:size])), 0)


def generate(
    timeline: Timeline,
    prompt: Sequence[int],
    sampler: Sampler,
    decoder: StreamDecoder,
    limits: Limits,
    meter: Meter,
) -> Iterator[Event]:
    """Answer a prompt.

    Args:
        timeline: has consumed a prefix of the prompt.
        prompt: the whole prompt, at least one token.
        sampler: fresh, knowing the prompt.
        decoder: fresh.
        limits: where to end.
        meter: opened before the prefill; closed here.

    Yields:
        Prefill progress, then tokens, then exactly one `Finished`.
    """
    meter.begin_prefill(len(prompt), len(timeline.tokens))
    yield PrefillProgress(len(timeline.tokens), len(prompt))
    for done in prefill(timeline, prompt, limits.prefill_step, limits.cancelled):
        yield PrefillProgress(done, len(prompt))
    meter.begin_decode()
    stops, anchor, num_output = StopStrings(limits.stop_strings), prompt[-1], 0
    is_whole = len(timeline.tokens) >= len(prompt) - 1
    reason: FinishReason | None = None if is_whole else "cancelled"
    tail = ""
    while reason is None:
        if limits.cancelled():
            reason = "cancelled"
        elif num_output >= limits.max_tokens:
            reason = "length"
        elif len(timeline.tokens) >= limits.context_tokens:
            reason = "context"
        if reason is not None:
            tail = stops.feed(decoder.flush())[0] + stops.flush()
            break
        anchor = timeline.cycle(anchor, sampler)
        num_output += 1
        sampler.observe(anchor)
        meter.count_cycle(1)
        if anchor in limits.stop_ids:
            reason, tail = "stop", stops.feed(decoder.flush())[0] + stops.flush()
            yield Token(anchor, "")
            break
        text, stopped = stops.feed(decoder.feed(anchor))
        reason = "stop" if stopped else None
        yield Token(anchor, text)
    yield Finished(reason or "stop", meter.finish(), tail)
