"""What is compared: who runs in which leg, under which cap, with which budget. Entry point: `LEGS`.

A leg is a set of engines that do the same work under the same conditions. The cap is a share of the
checkpoint's bytes, of the whole process and of what the kernel caches for it. flashnext is given the cap as
its memory target, less `MARGIN_BYTES`; mlx-vlm, whose setting is that of its expert cache alone, the cap
less what its process takes besides: the least, in steps of 200 MB, with which it survives the smallest cap.
"""

import random
from dataclasses import dataclass, field
from typing import Any, Final

MARGIN_BYTES: Final = 64 << 20
SLOW_BYTES_PER_S: Final = 10_000_000
"""At which flashnext's reading takes about as long as its computing, with two fifths of `large`."""
FIRST_PROMPT, FIRST_TOKENS = 48, 3
NEXT_PROMPT, NEXT_TOKENS = 16, 17
TURN_TOKENS: Final = 4
"""Decoded by one contender before the next has its turn: in a second or so the machine keeps its pace."""


@dataclass(frozen=True, slots=True)
class Contender:
    """Who runs, and how.

    Attributes:
        name: what tables call it.
        engine: a name in `engines.ENGINES`.
        form: which form of the checkpoint it opens.
        options: of its own.
        drafter: the form of a drafter beside it.
    """

    name: str
    engine: str
    form: str
    options: dict[str, Any] = field(default_factory=dict)
    drafter: str | None = None

    @property
    def is_ours(self) -> bool:
        """Return whether it is this project."""
        return self.engine == "flashnext"


@dataclass(frozen=True, slots=True)
class Leg:
    """Conditions and contenders.

    Attributes:
        share: of the checkpoint's bytes that the process may take; None: as much as it likes.
        bytes_per_s: of the drive while `next` is decoded; None: as fast as it is.
        contenders: who runs.
        expert_share: of every layer's experts, that each holds; None: as many as the cap allows.
    """

    share: float | None
    bytes_per_s: int | None
    contenders: tuple[Contender, ...]
    expert_share: float | None = None

    def cap_bytes(self, checkpoint_bytes: int) -> int | None:
        """Return what a process may have resident, its page cache included."""
        return None if self.share is None else int(self.share * checkpoint_bytes)

    def process_of(self, name: str) -> tuple[str, str]:
        """Return what names a contender's process: legs that differ by the drive alone share it."""
        return name, f"{self.share} {self.expert_share}"


_OURS = Contender("flashnext", "flashnext", "mlx")
_PACKED = Contender("flashnext", "flashnext", "pack")
"""Capped legs stream: each from the form that its own tool prepares for that, so that nobody finds in the
kernel's cache what another one has read."""
_PEER = Contender("mlx-vlm moe_offload", "mlx-vlm", "off")
LEGS: Final = {
    "resident": Leg(None, None, (_OURS, Contender("mlx-vlm", "mlx-vlm", "mlx"))),
    "half": Leg(0.5, None, (_PACKED, _PEER)),
    "two fifths": Leg(0.4, None, (_PACKED, _PEER)),
    "slow drive": Leg(0.4, SLOW_BYTES_PER_S, (_PACKED, _PEER)),
    "reference": Leg(
        None,
        None,
        (
            _OURS,
            Contender("mlx-vlm", "mlx-vlm", "mlx"),
            Contender("transformers, float32", "transformers", "hf"),
            Contender("llama.cpp", "llama.cpp", "gguf"),
        ),
    ),
    "mtp": Leg(
        None,
        None,
        (
            Contender("flashnext", "flashnext", "mtp"),
            Contender("flashnext, MTP", "flashnext", "mtp", {"draft": "mtp", "num_draft_tokens": 1}),
            _PEER,
            Contender("mlx-vlm moe_offload, MTP", "mlx-vlm", "off", drafter="drafter"),
        ),
        expert_share=0.5,
    ),
}
"""The first four are run on `large`, `reference` and `mtp` on `small`."""
FORMS: Final = {
    "mlx": "mlx", "pack": "pack", "off": "off", "hf": "hf", "gguf": "bf16.gguf", "mtp": "mtp",
    "drafter": "drafter",
}  # fmt: skip
"""How the names of the forms of a checkpoint end."""


def prompt_ids(vocab_size: int, length: int, salt: str) -> list[int]:
    """Return ordinary ids; the same for every engine, others in every round."""
    rng = random.Random(f"peers {salt}")
    return [rng.randrange(8, vocab_size) for _ in range(length)]


def budget_of(
    leg: Leg, one: Contender, checkpoint_bytes: int, overhead_bytes: int, expert_bytes: int = 0
) -> int | None:
    """Return what a contender is told that it may use; None: as much as it likes.

    Of a share of the experts flashnext is told as a number of slots, a peer as bytes of `expert_bytes`, which
    all experts take.

    Raises:
        SystemExit: the cap leaves a peer nothing.
    """
    cap = leg.cap_bytes(checkpoint_bytes)
    if leg.expert_share is not None and not one.is_ours:
        return int(leg.expert_share * expert_bytes)
    if cap is None:
        return None
    budget = cap - (MARGIN_BYTES if one.is_ours else overhead_bytes)
    if budget <= 0:
        raise SystemExit(f"a cap of {cap} bytes leaves {one.name} nothing: take a larger checkpoint")
    return budget
