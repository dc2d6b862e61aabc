"""Runs two-token blocks on a model and holds all that they leave against one token at a time.

Entry point: `verify_report`. First the relation of single- to multi-token execution is measured, rows that
nobody rejects: it gives the tolerance of this backend. Then, on each of three prompts, two proposals are both
right, the second is wrong, the first is wrong; a wrong one is the target's second choice among tokens that
are text. It validates how verification and rollback are integrated, not the quality or speed of any draft.
"""

# Shapes: T rows, V vocabulary.

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from drafter.api import Proposal
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.errors import InvalidRequest
from mlx_flashnext.engine.sampler import Sampler, SamplingParams
from mlx_flashnext.engine.verify import verify
from mlx_flashnext.model.host import fence
from mlx_flashnext.state import SequenceState, Snapshot

TITLE: Final = "Validates that verification and rollback are integrated, not a draft's quality or speed"
PROMPTS: Final = (
    "Tell me a short story about a lighthouse keeper who finds a letter in a bottle.",
    "The miller had three sons, a mill, a donkey and a cat. When he died the sons divided what there was: "
    "the eldest took the mill, the second the donkey, and the youngest had nothing left but the cat. He sat "
    "down by the road and said that his brothers could earn their bread together, and that he, once he had "
    "eaten the cat and made gloves of its fur, would have to starve. The cat had heard it all and answered "
    "calmly that he should not be sad: all that was needed was a sack and a pair of boots.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return",
)
LONGEST_PROMPT: Final = 128
NUM_PROPOSALS: Final = 2
NUM_CONTINUED: Final = 6
"""Tokens that are said one by one after a block, and compared."""
LARGEST_TOLERANCE: Final = 0.05
"""Of the spread of a row's logits: beyond it single and multi-token execution are not the same model."""
_CASES: Final = (("both right", 2), ("second wrong", 1), ("first wrong", 0))

_Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Criterion:
    """One thing that must hold. Attributes: `name`, `is_met`, `detail`: what was seen."""

    name: str
    is_met: bool
    detail: str


@dataclass(frozen=True, slots=True)
class BlockResult:
    """One block of an anchor and two proposals.

    Attributes:
        prompt, case: which.
        position: tokens before the block.
        proposed, committed: token ids.
        accepted, expected: proposals.
        num_tokens: carried after the rollback.
        next_token, reference_token: the largest logit after it, in both.
        largest_difference: of the next token's logits, over their spread.
        state_difference: of everything carried, over the spread of each array; 0 is bit for bit.
        continued, reference: tokens said one by one after it, in both.
        verify_ns, rollback_ns: of the pass with its verdict; of the commit until its state is there.
        journal_bytes: what the way back held.
        is_finite: no logit of the block or after it was otherwise.
    """

    prompt: int
    case: str
    position: int
    proposed: tuple[int, ...]
    committed: tuple[int, ...]
    accepted: int
    expected: int
    num_tokens: int
    next_token: int
    reference_token: int
    largest_difference: float
    state_difference: float
    continued: tuple[int, ...]
    reference: tuple[int, ...]
    verify_ns: int
    rollback_ns: int
    journal_bytes: int
    is_finite: bool


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was measured and what must hold.

    Attributes:
        title: what this is, and is not.
        backend: on which arithmetic.
        prompt_tokens: of each prompt.
        row_difference: largest difference between a row alone and in a block, over the spread of its logits.
        state_row_difference: the same of everything carried.
        tolerance, state_tolerance: what is allowed after a rollback.
        blocks: every block.
        criteria: all must be met.
    """

    title: str
    backend: str
    prompt_tokens: tuple[int, ...]
    row_difference: float
    state_row_difference: float
    tolerance: float
    state_tolerance: float
    blocks: tuple[BlockResult, ...]
    criteria: tuple[Criterion, ...]

    @property
    def is_passed(self) -> bool:
        """Return whether every criterion is met."""
        return all(criterion.is_met for criterion in self.criteria)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {**asdict(self), "is_passed": self.is_passed}


@dataclass(frozen=True, slots=True)
class _Reference:
    """A run token by token: where it began, its tokens and their logits, what is carried after the first."""

    start: Snapshot
    anchor: int
    history: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: tuple[_Logits, ...]
    carried: tuple[dict[str, _Logits], ...]


class _Runner:
    """One model and one sequence, gone back to its start before every block."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.model = engine.target.model
        self.sync = engine.target.sync
        self.state: SequenceState = self.model.new_state()

    def step(self, token: int) -> _Logits:
        """Run one token and return its logits."""
        return self.run([token])[0]

    def run(self, tokens: Sequence[int]) -> _Logits:
        """Run a block, keep all of it, return its logits [T, V]."""
        with self.state.begin(len(tokens)) as block:
            output = self.model.forward(tokens, block, logits="all")
            logits = self.values(output.logits)
            block.commit()
        self.engine.target.experts.device_idle()
        return logits

    def values(self, array: mx.array | None) -> _Logits:
        """Wait for an array and return it as float32."""
        assert array is not None
        wide = array.astype(mx.float32)
        fence(self.sync, wide)
        return np.array(wide, dtype=np.float32, copy=True)

    def carried(self) -> dict[str, _Logits]:
        """Return everything the state means."""
        return {name: self.values(array) for name, array in self.state.named_arrays().items()}

    def reference(self, prompt: Sequence[int], count: int) -> _Reference:
        """Read a prompt and say `count` tokens, one at a time; go back to the start."""
        self.state = self.model.new_state()
        for at in range(0, len(prompt) - 1, 32):
            piece = prompt[at : min(at + 32, len(prompt) - 1)]
            with self.state.begin(len(piece), revocable=False) as block:
                fence(self.sync, self.model.forward(piece, block, logits="none").stack)
                block.commit()
            self.engine.target.experts.device_idle()
        start = self.state.snapshot()
        tokens, logits, carried = [prompt[-1]], list[_Logits](), list[dict[str, _Logits]]()
        for number in range(count):
            logits.append(self.step(tokens[-1]))
            tokens.append(int(logits[-1].argmax()))
            if number <= NUM_PROPOSALS:
                carried.append(self.carried())
        self.state.restore(start)
        return _Reference(start, prompt[-1], tuple(prompt), tuple(tokens[1:]), tuple(logits), tuple(carried))


def verify_report(
    engine: Engine,
    progress: Callable[[str, int, int], None] | None = None,
    prompts: Sequence[str] | None = None,
) -> VerifyReport:
    """Measure the tolerance of this backend, then run every case on every prompt.

    Args:
        engine: open; nothing else may use it meanwhile.
        progress: called with (what, done, total).
        prompts: texts, of which at most `LONGEST_PROMPT` tokens are read; `PROMPTS` when left out.

    Raises:
        InvalidRequest: a prompt has fewer than two tokens.
        StoreError, ModelError: as any answer.
    """
    runner = _Runner(engine)
    encoded = [tuple(engine.tokenizer.encode(text)[:LONGEST_PROMPT]) for text in prompts or PROMPTS]
    if min(map(len, encoded)) < 2:
        raise InvalidRequest("A prompt needs at least two tokens", hint="give longer texts")
    total, done = len(encoded) * (1 + len(_CASES)), 0
    references: list[_Reference] = []
    row_difference = state_difference = 0.0
    is_same_choice = True
    for prompt in encoded:
        reference = runner.reference(prompt, NUM_PROPOSALS + 1 + NUM_CONTINUED + 1)
        block = runner.run([reference.anchor, *reference.tokens[:NUM_PROPOSALS]])
        for row, logits in enumerate(block):
            row_difference = max(row_difference, _difference(logits, reference.logits[row]))
            is_same_choice &= int(logits.argmax()) == reference.tokens[row]
        state_difference = max(state_difference, _differences(runner.carried(), reference.carried[-1]))
        references.append(reference)
        done += 1
        if progress is not None:
            progress("one row against several", done, total)
    # Where rows are exact alone they are exact after a rollback; else rounding may add up once more.
    tolerance, state_tolerance = 2 * row_difference, 2 * state_difference
    blocks: list[BlockResult] = []
    for number, (prompt, reference) in enumerate(zip(encoded, references, strict=True)):
        runner.reference(prompt, 0)  # this prompt's rows again
        start = runner.state.snapshot()
        for case, expected in _CASES:
            runner.state.restore(start)
            blocks.append(_block(runner, reference, number, case, expected))
            done += 1
            if progress is not None:
                progress("blocks", done, total)
    backend = "metal" if mx.default_device().type == mx.gpu and mx.metal.is_available() else "cpu"
    return VerifyReport(
        title=TITLE,
        backend=backend,
        prompt_tokens=tuple(map(len, encoded)),
        row_difference=row_difference,
        state_row_difference=state_difference,
        tolerance=tolerance,
        state_tolerance=state_tolerance,
        blocks=tuple(blocks),
        criteria=_criteria(blocks, tolerance, state_tolerance, is_same_choice=is_same_choice),
    )


def _block(runner: _Runner, reference: _Reference, prompt: int, case: str, expected: int) -> BlockResult:
    """Run one block of a case and what follows it."""
    right = reference.tokens[:NUM_PROPOSALS]
    special = runner.engine.tokenizer.special_ids
    proposed = tuple(
        token if slot != expected else _second_choice(reference.logits[slot], special)
        for slot, token in enumerate(right)
    )
    sampler = Sampler(SamplingParams(temperature=0.0), reference.history)
    position, tokens = runner.state.num_tokens, [reference.anchor, *proposed]
    with runner.state.begin(len(tokens)) as block:
        began_ns = time.perf_counter_ns()
        output = runner.model.forward(tokens, block, logits="all")
        assert output.logits is not None
        verdict = verify(output.logits, Proposal(proposed), sampler, "coupled", runner.sync)
        verified_ns = time.perf_counter_ns()
        journal_bytes = block.journal_bytes()
        block.commit(len(verdict.tokens))
        fence(runner.sync, *runner.state.arrays())
        rolled_back_ns = time.perf_counter_ns()
    runner.engine.target.experts.device_idle()
    logits = runner.values(output.logits)
    num_tokens, kept = runner.state.num_tokens, len(verdict.tokens)
    state_difference = _differences(
        runner.carried(), reference.carried[min(kept, len(reference.carried)) - 1]
    )
    following = runner.step(verdict.tokens[-1])
    continued = [int(following.argmax())]
    for _ in range(NUM_CONTINUED - 1):
        continued.append(int(runner.step(continued[-1]).argmax()))
    return BlockResult(
        prompt=prompt,
        case=case,
        position=position,
        proposed=proposed,
        committed=verdict.tokens,
        accepted=verdict.accepted,
        expected=expected,
        num_tokens=num_tokens,
        next_token=continued[0],
        reference_token=reference.tokens[kept],
        largest_difference=_difference(following, reference.logits[kept]),
        state_difference=state_difference,
        continued=tuple(continued),
        reference=reference.tokens[kept : kept + NUM_CONTINUED],
        verify_ns=verified_ns - began_ns,
        rollback_ns=rolled_back_ns - verified_ns,
        journal_bytes=journal_bytes,
        is_finite=bool(np.isfinite(logits).all() and np.isfinite(following).all()),
    )


def _second_choice(logits_V: _Logits, special: frozenset[int]) -> int:
    """Return the likeliest token that is text and not the target's choice."""
    best = int(logits_V.argmax())
    order = np.argsort(-logits_V, kind="stable")
    return next(int(token) for token in order if int(token) != best and int(token) not in special)


def _difference(found: _Logits, wanted: _Logits) -> float:
    """Return the largest difference over the spread of what was wanted; infinite if shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    if np.array_equal(found, wanted):
        return 0.0
    spread = float(wanted.std()) or 1.0
    largest = float(np.abs(found - wanted).max()) / spread
    return largest if np.isfinite(largest) else float("inf")


def _differences(found: dict[str, _Logits], wanted: dict[str, _Logits]) -> float:
    """Return the largest difference of any array; positions and token ids must be the same."""
    if found.keys() != wanted.keys():
        return float("inf")
    exact = [name for name in wanted if name in ("num_tokens", "ple.history")]
    if any(not np.array_equal(found[name], wanted[name]) for name in exact):
        return float("inf")
    return max(_difference(found[name], wanted[name]) for name in wanted)


def _criteria(
    blocks: Sequence[BlockResult], tolerance: float, state_tolerance: float, *, is_same_choice: bool
) -> tuple[Criterion, ...]:
    lengths = [f"{block.accepted} of {block.expected}" for block in blocks]
    largest = max(block.largest_difference for block in blocks)
    state = max(block.state_difference for block in blocks)
    strays = [block for block in blocks if block.committed[:-1] != block.proposed[: block.accepted]]
    shifted = [block for block in blocks if block.num_tokens != block.position + block.accepted + 1]
    parted = [block for block in blocks if block.continued != block.reference]
    return (
        Criterion(
            "a row of a block chooses what it chooses alone",
            is_same_choice and tolerance <= LARGEST_TOLERANCE,
            f"tolerance {tolerance:.2g} of the spread, at most {LARGEST_TOLERANCE:g}",
        ),
        Criterion(
            "accepted lengths are those planned",
            all(block.accepted == block.expected for block in blocks),
            ", ".join(lengths),
        ),
        Criterion(
            "nothing rejected stays committed",
            not strays and state <= state_tolerance,
            f"everything carried differs by {state:.2g} from a run without it, allowed {state_tolerance:.2g}",
        ),
        Criterion(
            "the continuation is the reference's", not parted, f"{len(blocks) - len(parted)} of {len(blocks)}"
        ),
        Criterion(
            "next logits are within the tolerance",
            largest <= tolerance,
            f"they differ by {largest:.2g}, allowed {tolerance:.2g}",
        ),
        Criterion(
            "every logit is finite",
            all(block.is_finite for block in blocks),
            f"{sum(block.is_finite for block in blocks)} of {len(blocks)} blocks",
        ),
        Criterion(
            "positions and cache lengths agree",
            not shifted and state != float("inf"),
            f"{len(blocks) - len(shifted)} of {len(blocks)} blocks",
        ),
    )  # fmt: skip
