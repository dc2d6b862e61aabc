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


class _Output:
    """Committed tokens on their way to text: where the answer ends, and what may be shown.

    Attributes:
        reason: why the answer has ended, None while it has not.
        pieces: tokens taken and the text that became final with each, since the last `shown`.
        num_tokens: tokens taken.
    """

    def __init__(self, decoder: StreamDecoder, limits: Limits) -> None:
        self._decoder = decoder
        self._stop_ids = limits.stop_ids
        self._stops = StopStrings(limits.stop_strings)
        self.reason: FinishReason | None = None
        self.pieces: list[Token] = []
        self.num_tokens = 0

    def take(self, tokens: Sequence[int]) -> int:
        """Take tokens until one ends the answer; return how many were taken."""
        for count, token in enumerate(tokens, start=1):
            self.num_tokens += 1
            if token in self._stop_ids:
                self.reason = "stop"
                self.pieces.append(Token(token, ""))
                return count
            text, is_stopped = self._stops.feed(self._decoder.feed(token))
            self.pieces.append(Token(token, text))
            if is_stopped:
                self.reason = "stop"
                self._decoder.flush()
                return count
        return len(tokens)

    def shown(self) -> list[Token]:
        """Return the pieces there are, and forget them."""
        pieces, self.pieces = self.pieces, []
        return pieces

    def tail(self) -> str:
        """Return the text still held back, now that no token follows."""
        return self._stops.feed(self._decoder.flush())[0] + self._stops.flush()


def generate(
    timeline: Timeline,
    prompt: Sequence[int],
    sampler: Sampler,
    decoder: StreamDecoder,
    limits: Limits,
    meter: Meter,
    at_boundary: Callable[[], None],
) -> Iterator[Event]:
    """Answer a prompt.

    Args:
        timeline: has consumed a prefix of the prompt.
        prompt: the whole prompt, at least one token.
        sampler: fresh, knowing the prompt.
        decoder: fresh.
        limits: where to end.
        meter: opened before the prefill; closed here.
        at_boundary: called when the timeline stands where the next turn may come back to.

    Yields:
        Prefill progress, then tokens, then exactly one `Finished`.
    """
    meter.begin_prefill(len(prompt), len(timeline.tokens))
    yield PrefillProgress(len(timeline.tokens), len(prompt))
    for done in prefill(timeline, prompt, limits.prefill_step, limits.cancelled, at_boundary):
        yield PrefillProgress(done, len(prompt))
    meter.begin_decode()
    output, anchor = _Output(decoder, limits), prompt[-1]
    reason: FinishReason | None = None if len(timeline.tokens) >= len(prompt) - 1 else "cancelled"
    while reason is None:
        rows_left = limits.context_tokens - len(timeline.tokens)
        tokens_left = limits.max_tokens - output.num_tokens
        if limits.cancelled():
            reason = "cancelled"
        elif tokens_left < 1:
            reason = "length"
        elif rows_left < 1:
            reason = "context"
        else:
            kept = timeline.cycle(anchor, sampler, min(tokens_left, rows_left) - 1, output.take)
            for token in kept:
                sampler.observe(token)
            anchor = kept[-1]
            meter.count_cycle(len(kept))
            yield from output.shown()
            reason = output.reason
    yield Finished(reason, meter.finish(timeline.drafting.statistics()), output.tail())
