"""Plans for machines that are not here: sizes of memory x builds x contexts x drafters. Entry: `plan_table`.

Every cell is a plan made by `make_plan`, the function that runs obey, for a Mac of that memory with nothing
else open; what does not fit is the refusal that a run would give. No figure of a cell was measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from mlx_flashnext.checkpoint import Checkpoint
from mlx_flashnext.engine.errors import BudgetTooSmall, EngineError, MissingDrafter
from mlx_flashnext.engine.machine import GIB, mac_of
from mlx_flashnext.engine.plan import Plan, PlanRequest, make_plan
from mlx_flashnext.engine.sizes import DraftBytes
from mlx_flashnext.reports.expectation import Expectation, expect

MEMORY_GIB: Final = (16, 24, 32, 48, 64, 96, 128)
CONTEXTS: Final = (8192, 32_768, 131_072, 262_144)
DRAFTERS: Final = ("none", "lookup", "mtp", "dflash2")
PUBLIC_DRAFT: Final = DraftBytes(
    weights=1_200_000_000, context=84_000_000, feature_width=5 * 2560, max_proposals=7
)
"""A DFlash2 draft of the published kind for this model: 0.6 B parameters in BF16, five taps, a window of
2048."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One machine with one build, context and drafter.

    Attributes:
        memory_bytes: of the machine.
        build: of the checkpoint.
        plan: None if it does not fit.
        refusal: why not, "" if it fits.
        smallest_bytes: the least budget that would; None if it fits or no budget would.
        expected: None if it does not fit.
    """

    memory_bytes: int
    build: str
    context_tokens: int
    draft: str
    plan: Plan | None
    refusal: str
    smallest_bytes: int | None
    expected: Expectation | None


def plan_table(
    checkpoints: Sequence[tuple[str, Checkpoint]],
    *,
    memory_gib: Sequence[int] = MEMORY_GIB,
    contexts: Sequence[int] = CONTEXTS,
    drafters: Sequence[str] = DRAFTERS,
    own: DraftBytes | None = None,
    bytes_per_s: float | None = None,
    resident_tokens_per_s: float | None = None,
) -> Iterator[Cell]:
    """Yield a cell for every combination.

    Args:
        checkpoints: builds by name.
        memory_gib: of the machines.
        contexts: tokens; those beyond the model's positions are left out.
        drafters: of `plan.DRAFTS`.
        own: what a draft of one's own takes; a published one's where None.
        bytes_per_s: of the drive, for `expect`.
        resident_tokens_per_s: for `expect`.
    """
    for total in memory_gib:
        machine = mac_of(total)
        for build, checkpoint in checkpoints:
            longest = checkpoint.config.max_position_embeddings
            for context in (tokens for tokens in contexts if tokens <= longest):
                for draft in drafters:
                    request = PlanRequest(context_tokens=context, draft=draft)
                    plan, refusal, smallest = None, "", None
                    try:
                        plan = make_plan(checkpoint, machine, request, own or PUBLIC_DRAFT)
                    except BudgetTooSmall as error:
                        refusal, smallest = error.message, _smallest(error)
                    except (MissingDrafter, EngineError) as error:
                        refusal = error.message
                    expected = plan and expect(
                        checkpoint,
                        plan,
                        bytes_per_s=bytes_per_s,
                        resident_tokens_per_s=resident_tokens_per_s,
                    )
                    yield Cell(total * GIB, build, context, draft, plan, refusal, smallest, expected)


def _smallest(error: BudgetTooSmall) -> int | None:
    value = error.context.get("smallest_budget_bytes")
    return value if isinstance(value, int) else None
