"""What a warm start gains: the time of the first answer after opening. Entry: `measure_warm_start`.

The same prompt each time, as who comes back asks more of the same; the popularity is that of one earlier run.
Three ways in turns: cold; warm and asked at once; warm and asked when everything named is in its slot.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from expert_store.source import ByteSource
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.measure import answer
from mlx_flashnext.engine.page_cache import CacheState, prepare
from mlx_flashnext.engine.plan import PlanRequest

Way = Literal["cold", "at once", "warmed"]
_WAYS: tuple[Way, ...] = ("cold", "at once", "warmed")


@dataclass(frozen=True, slots=True)
class FirstAnswers:
    """Times of first answers, one a round.

    Attributes:
        way: how the engine had started.
        prefill_ns: reading the prompt.
        decode_ns: saying the answer.
        exposed_wait_ns: of it, standing still for experts while decoding.
        num_hints: records that the start named.
    """

    way: Way
    prefill_ns: tuple[int, ...]
    decode_ns: tuple[int, ...]
    exposed_wait_ns: tuple[int, ...]
    num_hints: int

    @property
    def median_ns(self) -> float:
        """Return the median time of prompt and answer together."""
        return statistics.median(a + b for a, b in zip(self.prefill_ns, self.decode_ns, strict=True))


def measure_warm_start(
    directory: Path,
    request: PlanRequest,
    prompt: Sequence[int],
    num_tokens: int,
    rounds: int,
    page_cache: CacheState,
    *,
    wrap_source: Callable[[ByteSource], ByteSource] = lambda source: source,
    progress: Callable[[str, int, int], None] = lambda _s, _d, _t: None,
) -> list[FirstAnswers]:
    """Measure the first answer of fresh engines.

    Args:
        directory: of the checkpoint.
        request: of every plan.
        prompt: token ids.
        num_tokens: of each answer.
        rounds: of all three ways.
        page_cache: state before every opening.
        wrap_source: wraps the files.
        progress: told (what runs, openings done, openings in all).
    """
    found: dict[Way, list[tuple[int, int, int]]] = {way: [] for way in _WAYS}
    num_hints = dict.fromkeys(_WAYS, 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Engine.open(directory, request, wrap_source=wrap_source, warm_directory=folder) as engine:
            files = [info.path for info in engine.checkpoint.table.files]
            answer(engine.session(), prompt, num_tokens)
        for number in range(rounds):
            for way in _WAYS if number % 2 == 0 else reversed(_WAYS):
                prepare(files, page_cache)
                warm = None if way == "cold" else folder
                with Engine.open(directory, request, wrap_source=wrap_source, warm_directory=warm) as engine:
                    if way == "warmed":
                        engine.target.store.wait_idle()
                    got = answer(engine.session(), prompt, num_tokens)
                    num_hints[way] = engine.warm.num_hints
                found[way].append((got.prefill_ns, got.decode_ns, got.exposed_wait_ns))
                progress("first answers", sum(map(len, found.values())), rounds * len(_WAYS))
    return [
        FirstAnswers(
            way,
            tuple(one[0] for one in found[way]),
            tuple(one[1] for one in found[way]),
            tuple(one[2] for one in found[way]),
            num_hints[way],
        )
        for way in _WAYS
    ]
