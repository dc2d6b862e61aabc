"""What a running answer reports, in order: prefill progress, tokens, one end."""

from dataclasses import dataclass
from typing import Literal

from mlx_flashnext.engine.stats import GenerationStatistics

FinishReason = Literal["stop", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """`done` of `total` prompt tokens are in the state."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Token:
    """One committed token and the text that became final with it, which may be empty."""

    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer: why, the text that was still held back, and what it cost."""

    reason: FinishReason
    statistics: GenerationStatistics
    text: str = ""


Event = PrefillProgress | Token | Finished
