"""Do verified blocks say what the target alone would say? Joint law of four tokens, right and wrong rules.

    python -m bench.studies.verify_law [--sequences 100000] [--wrong-sequences 10000] [--seed 1]
        [--sampling NAME]

A sequence takes two to three cycles: the defaults are more than 200,000 cycles a rule, 20,000 a wrong one.

Injects the logits of a small Markov target (10 tokens) and the proposals of a small drafter (4 candidates a
slot, 3 slots, a score for every edge, as a DFlash2 selector has) into `engine.verify`, and compares the
joint law of the first four emitted tokens of many sequences with the exact product, which other code computes
here in float64. Every wrong rule is the real one with one part replaced, and must be told from it.

The last line of stdout is one JSON document; the exit status is 1 if a rule was misjudged.

Source: dflash2.md 3.6.
"""

# Shapes: N sequences, k proposals, T rows, V vocabulary, K candidates.

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from drafter.api import Proposal
from mlx_flashnext.engine import verify as verify_module
from mlx_flashnext.engine.sampler import Sampler, SamplingParams
from mlx_flashnext.engine.streams import Purpose, draw, stream_keys, uniform
from mlx_flashnext.engine.verify import Rule, verify_blocks
from mlx_flashnext.model.host import HostSync

VOCAB, SLOTS, CANDIDATES, DEPTH = 10, 3, 4, 4
HISTORY = (3, 7)
# Cells that are rarer together than this make one cell: chi-square wants no small expectations.
MIN_EXPECTED = 5.0
# Four standard deviations above 1 at the number of cells that these laws have.
BOUND_20K, BOUND_200K = 1.25, 1.1


# ---------------------------------------------------------------- the exact law, by other code
def row_law(logits: np.ndarray, history: Sequence[int], params: SamplingParams) -> np.ndarray:
    """Return the distribution of one token in float64, processed as `SamplingParams` says."""
    x = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias.items():
        x[token] += bias
    recent = list(history)[-params.penalty_context :]
    for token in set(recent):
        if params.repetition_penalty != 1:
            x[token] = (
                x[token] * params.repetition_penalty if x[token] < 0 else x[token] / params.repetition_penalty
            )
        x[token] -= params.presence_penalty + params.frequency_penalty * recent.count(token)
    p = np.exp(x - x.max())
    p /= p.sum()
    keep = np.ones(len(p), bool)
    order = np.argsort(-p, kind="stable")
    if 0 < params.top_p < 1:
        above = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
        keep[order[above >= params.top_p]] = False
    keep &= p >= params.min_p * p.max()
    p = np.where(keep, p, 0.0)
    if 0 < params.top_k < len(p):
        p[p < np.sort(p)[-params.top_k]] = 0.0
    p = np.where(p > 0, p ** (1 / params.temperature), 0.0)
    return p / p.sum()


def joint_law(
    logits_after: Callable[[tuple[int, ...]], np.ndarray],
    history: Sequence[int],
    params: SamplingParams,
    depth: int,
) -> np.ndarray:
    """Return the law of the next `depth` tokens, one axis each.

    Args:
        logits_after: logits [V] that follow the history and these tokens.
        history: every token before.
        params: of the sampling.
        depth: how many tokens.
    """
    vocab = len(logits_after(()))
    law = np.zeros((vocab,) * depth)
    ways: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while ways:
        said, chance = ways.pop()
        if len(said) == depth:
            law[said] = chance
            continue
        row = row_law(logits_after(said), [*history, *said], params)
        ways += [((*said, int(token)), chance * row[token]) for token in np.flatnonzero(row)]
    return law


@dataclass(frozen=True)
class Fit:
    """How far observed tokens are from a law.

    Attributes:
        chi2: chi-square per degree of freedom over cells with an expected count of 5 or more; the others are
            one cell.
        tv: total variation distance.
        forbidden: sequences seen that the law excludes.
        num_cells: cells of the chi-square.
    """

    chi2: float
    tv: float
    forbidden: int
    num_cells: int

    def is_within(self, bound: float) -> bool:
        """Return whether the law is believed."""
        return self.chi2 < bound and not self.forbidden


def fit(tokens: np.ndarray, law: np.ndarray) -> Fit:
    """Compare sequences [N, depth] with the law of `joint_law`."""
    seen = np.bincount(np.ravel_multi_index(tuple(tokens.T), law.shape), minlength=law.size).astype(float)
    expected = law.ravel() * len(tokens)
    large = expected >= MIN_EXPECTED
    cells = np.append(seen[large], seen[~large].sum()), np.append(expected[large], expected[~large].sum())
    if cells[1][-1] < MIN_EXPECTED:
        cells = cells[0][:-1], cells[1][:-1]
    chi2 = float(((cells[0] - cells[1]) ** 2 / cells[1]).sum()) / (len(cells[0]) - 1)
    tv = float(np.abs(seen - expected).sum()) / 2 / len(tokens)
    return Fit(chi2, tv, int(seen[expected == 0].sum()), len(cells[0]))


# ---------------------------------------------------------------- a small target and a small drafter
class Toy:
    """Target p(x | previous) and a drafter that knows something of it and offers some candidates a slot."""

    def __init__(self, candidates: int = CANDIDATES, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.logits = np.log(rng.dirichlet(np.full(VOCAB, 0.6), VOCAB) + 1e-9).astype(np.float32)
        chain = np.exp(self.logits.astype(np.float64))
        chain /= chain.sum(axis=1, keepdims=True)
        ahead = [np.linalg.matrix_power(chain, slot + 1) for slot in range(SLOTS)]
        unary = np.log(np.stack(ahead, axis=1)) * 0.6 + 0.5 * rng.standard_normal((VOCAB, SLOTS, VOCAB))
        best = np.argsort(-unary, axis=-1, kind="stable")[..., :candidates]
        self.ids = np.sort(best, axis=-1).astype(np.int32)
        self.unary = np.take_along_axis(unary, self.ids, axis=-1)
        self.edges = 0.4 * self.logits + 0.7 * rng.standard_normal((VOCAB, VOCAB))

    def law(self, params: SamplingParams) -> np.ndarray:
        """Return the joint law of the first tokens."""
        return joint_law(lambda said: self.logits[(*HISTORY, *said)[-1]], HISTORY, params, DEPTH)


@dataclass(frozen=True)
class Path:
    """How the drafter walks its candidates. The defaults are right; what is not is a wrong rule.

    Attributes:
        drawn: draw each token from its row, else take the best.
        claim_rows: say that tokens come from rows; None as they were made.
        stale: give rows as if the predecessor had been the anchor.
        cut_max: end the block before a row whose largest probability is below this.
        cut_token: end the block before a token whose own probability is below this.
        temperature: of the draft's rows.
        accept_stream: draw by inverse CDF with the number that will judge the token.
        candidates: how many tokens a row holds.
    """

    drawn: bool = False
    claim_rows: bool | None = None
    stale: bool = False
    cut_max: float = 0.0
    cut_token: float = 0.0
    temperature: float = 1.0
    accept_stream: bool = False
    candidates: int = CANDIDATES


BEST, DRAWN = Path(), Path(drawn=True)
ALL_TOKENS = Path(drawn=True, candidates=VOCAB)


def propose(toy: Toy, path: Path, anchors: np.ndarray, samplers: Sequence[Sampler]) -> list[Proposal]:
    """Return every sequence's proposal."""
    before, tokens, rows, claimed = anchors, [], [], []
    for slot in range(SLOTS):
        ids = toy.ids[anchors, slot]
        row = _softmax((toy.unary[anchors, slot] + toy.edges[before[:, None], ids]) / path.temperature)
        said = _softmax((toy.unary[anchors, slot] + toy.edges[anchors[:, None], ids]) / path.temperature)
        choice = _drawn(row, path, samplers, slot) if path.drawn else row.argmax(axis=1)
        before = ids[np.arange(len(ids)), choice]
        tokens.append(before)
        rows.append(row[np.arange(len(ids)), choice])
        claimed.append(said if path.stale else row)
    lengths = _lengths(np.stack(claimed, axis=1), np.stack(rows, axis=1), path)
    has_rows = path.drawn if path.claim_rows is None else path.claim_rows
    probs, all_tokens = np.stack(claimed, axis=1), np.stack(tokens, axis=1).tolist()
    proposals = []
    for number, (anchor, k) in enumerate(zip(anchors, lengths, strict=True)):
        said_tokens = tuple(all_tokens[number][:k])
        if not has_rows:
            proposals.append(Proposal(said_tokens))
            continue
        ids, row = mx.array(toy.ids[anchor, :k]), mx.array(probs[number, :k])
        proposals.append(Proposal(said_tokens, "rows", ids, row))
    return proposals


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)


def _drawn(row: np.ndarray, path: Path, samplers: Sequence[Sampler], slot: int) -> np.ndarray:
    purpose = Purpose.ACCEPT if path.accept_stream else Purpose.DRAFT
    keys = stream_keys((s.seed, s.position + slot, purpose) for s in samplers)
    if not path.accept_stream:
        return np.array(draw(mx.log(mx.array(row)), keys)).astype(np.int64)
    below = np.cumsum(row, axis=1) <= np.array(uniform(keys))[:, None]
    return np.minimum(below.sum(axis=1), row.shape[1] - 1)


def _lengths(rows: np.ndarray, of_token: np.ndarray, path: Path) -> np.ndarray:
    good = (rows.max(axis=-1) >= path.cut_max) & (of_token >= path.cut_token)
    return np.cumprod(good, axis=1).sum(axis=1)


# ---------------------------------------------------------------- cycles
@dataclass
class Run:
    """What a run of many sequences gave: tokens [N, depth], cycles, accepted proposals."""

    tokens: np.ndarray
    num_cycles: int = 0
    num_accepted: int = 0


def simulate(params: SamplingParams, rule: Rule, path: Path, sequences: int, seed: int) -> Run:
    """Emit the first tokens of many sequences by cycles of propose, verify, commit."""
    toy = Toy(path.candidates)
    samplers = [Sampler(params, HISTORY) for _ in range(sequences)]
    for number, sampler in enumerate(samplers):
        sampler.seed = (seed << 32) + number
    said: list[list[int]] = [[] for _ in range(sequences)]
    run = Run(np.zeros((sequences, DEPTH), np.int64))
    while open_ := [number for number in range(sequences) if len(said[number]) < DEPTH]:
        anchors = np.array([(*HISTORY, *said[number])[-1] for number in open_])
        proposals = propose(toy, path, anchors, [samplers[number] for number in open_])
        for k in sorted({len(p.tokens) for p in proposals}):
            some = [at for at, p in enumerate(proposals) if len(p.tokens) == k]
            numbers = [open_[at] for at in some]
            before = [(int(anchors[at]), *proposals[at].tokens) for at in some]
            verdicts = verify_blocks(
                mx.array(toy.logits[np.array(before)]),
                [proposals[at] for at in some],
                [samplers[number] for number in numbers],
                rule,
                HostSync(),
            )
            for number, verdict in zip(numbers, verdicts, strict=True):
                said[number] += verdict.tokens
                for token in verdict.tokens:
                    samplers[number].observe(token)
                run.num_accepted += verdict.accepted
            run.num_cycles += len(some)
    run.tokens[:] = [tokens[:DEPTH] for tokens in said]
    return run


# ---------------------------------------------------------------- right and wrong
TOP_P = SamplingParams(top_p=0.9)
GRID = {
    "top-p 0.9": TOP_P,
    "no filter": SamplingParams(),
    "T 0.7, top-k 5, top-p 0.95": SamplingParams(temperature=0.7, top_k=5, top_p=0.95),
    "T 1.4, min-p 0.1": SamplingParams(temperature=1.4, min_p=0.1),
    "penalties": SamplingParams(
        top_p=0.9, repetition_penalty=1.2, presence_penalty=0.7, frequency_penalty=0.4, penalty_context=3
    ),
    "bias": SamplingParams(temperature=0.8, logit_bias={1: 1.5, 4: -2.0, 6: float("-inf")}),
}
EXACT: dict[str, tuple[Rule, Path]] = {
    "coupled, best path": ("coupled", BEST),
    "coupled, drawn path": ("coupled", DRAWN),
    "delta, best path": ("delta", BEST),
    "delta, drawn path": ("delta", DRAWN),
    "sampled, rows": ("sampled", DRAWN),
    "sampled, rows of all tokens": ("sampled", ALL_TOKENS),
    "sampled, rows at T 0.6": ("sampled", Path(drawn=True, temperature=0.6)),
    "sampled, cut where max q < 0.5": ("sampled", Path(drawn=True, cut_max=0.5)),
    "sampled, point masses": ("sampled", BEST),
    "delta, cut where q(token) < 0.4": ("delta", Path(drawn=True, cut_token=0.4)),
}


@dataclass(frozen=True)
class Wrong:
    """A wrong rule: the real one with a part replaced.

    Attributes:
        rule: what is judged by.
        path: how proposals are made.
        parts: name in `verify` to a function from the real part to the wrong one.
        params: of the sampling.
        sequences: how many it takes to see the fault, where the usual number is too few.
    """

    rule: Rule
    path: Path = DRAWN
    parts: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict[str, Callable[[Any], Any]])
    params: SamplingParams = TOP_P
    sequences: int = 0

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Replace the parts."""
        with contextlib.ExitStack() as stack:
            for name, wrong in self.parts.items():
                holder: Any = verify_module
                *outer, last = name.split(".")
                for each in outer:
                    holder = getattr(holder, each)
                stack.enter_context(mock.patch.object(holder, last, wrong(getattr(holder, last))))
            yield


def _residual_is_p(_: Any) -> Any:
    return lambda p_NkV, *_: p_NkV


def _residual_unfiltered(residual: Any) -> Any:
    def wrong(p_NkV: mx.array, ids: mx.array, probs: mx.array) -> mx.array:
        return residual(mx.softmax(_Raw.logits[:, : p_NkV.shape[1]], axis=-1), ids, probs)

    return wrong


class _Raw:
    logits: mx.array


def _remember_logits(processed: Any) -> Any:
    def wrong(logits_NTV: mx.array, *rest: Any) -> mx.array:
        _Raw.logits = logits_NTV
        return processed(logits_NTV, *rest)

    return wrong


def _q_forgotten(accepts: Any) -> Any:
    return lambda u, p, q: accepts(u, p, mx.ones_like(q))


def _greedy_choice(_: Any) -> Any:
    return lambda scores_RV, _: mx.argmax(scores_RV, axis=-1)


def _one_position(keys: Any) -> Any:
    return lambda places: keys((seed, 0, purpose) for seed, _, purpose in places)


def _one_purpose(keys: Any) -> Any:
    return lambda places: keys((seed, position, Purpose.DRAFT) for seed, position, _ in places)


def _bonus_after_rejection(walk: Any) -> Any:
    def wrong(drafted: Any, accepts: Any, ends: Any) -> Any:
        verdict = walk(drafted, accepts, ends)
        extra = () if verdict.accepted == len(drafted) else (ends[-1],)
        return dataclasses.replace(verdict, tokens=(*verdict.tokens, *extra))

    return wrong


def _later_slots_tested(_: Any) -> Any:
    def wrong(drafted: Any, accepts: Any, ends: Any) -> Any:
        tokens = [d if yes else end for d, yes, end in zip(drafted, accepts, ends, strict=False)]
        return verify_module.Verdict(sum(map(bool, accepts[: len(drafted)])), (*tokens, ends[-1]))

    return wrong


def _counts_of_committed_only(counts: Any) -> Any:
    def wrong(self: Sampler, proposals: Sequence[int]) -> list[dict[int, int]]:
        return [next(counts(self, ()))] * (len(proposals) + 1)

    return wrong


WRONG: dict[str, Wrong] = {
    "best path judged with softmax q": Wrong("sampled", Path(claim_rows=True)),
    "q row of the wrong predecessor": Wrong("sampled", Path(drawn=True, stale=True)),
    "rejection resampled from p": Wrong("sampled", parts={"_residual": _residual_is_p}),
    "delta: rejection resampled from p": Wrong("delta", BEST, {"_residual": _residual_is_p}),
    "residual from untruncated p": Wrong(
        "sampled", parts={"_residual": _residual_unfiltered, "processed": _remember_logits}
    ),
    "cut where q(sampled token) < 0.4": Wrong("sampled", Path(drawn=True, cut_token=0.4)),
    "one uniform for drawing and accepting": Wrong("sampled", Path(drawn=True, accept_stream=True)),
    "one stream for drawing and replacing": Wrong(
        "sampled", ALL_TOKENS, {"stream_keys": _one_purpose}, sequences=60_000
    ),
    "greedy verification at T = 1": Wrong("coupled", parts={"choose": _greedy_choice}),
    "one random number for all positions": Wrong("delta", BEST, {"stream_keys": _one_position}),
    "a bonus after a rejection": Wrong("sampled", parts={"_walk": _bonus_after_rejection}),
    "slots after a rejection tested": Wrong("sampled", parts={"_walk": _later_slots_tested}),
    "acceptance without q": Wrong("sampled", parts={"_accepts": _q_forgotten}),
    **{
        f"{rule}: rows penalised by committed tokens only": Wrong(
            rule, path, {"Sampler.recent_counts": _counts_of_committed_only}, GRID["penalties"]
        )
        for rule, path in (("coupled", BEST), ("delta", BEST), ("sampled", DRAWN))
    },
}


def judge(rule: Rule, path: Path, params: SamplingParams, sequences: int, seed: int) -> tuple[Fit, Run]:
    """Run a rule and compare what it said with the exact law."""
    run = simulate(params, rule, path, sequences, seed)
    return fit(run.tokens, Toy(path.candidates).law(params)), run


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=100_000)
    parser.add_argument("--wrong-sequences", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sampling", choices=list(GRID), action="append", help="of the exact rules (all)")
    options = parser.parse_args()
    lines, misjudged = [], 0
    bound = BOUND_200K if options.sequences >= 100_000 else BOUND_20K
    grids = options.sampling or list(GRID)
    print(f"{'rule':44} {'sampling':28} {'TV':>7} {'chi2/df':>8} {'a/cycle':>8} {'seconds':>8}")
    cases = [(name, rule, path, grid, None) for name, (rule, path) in EXACT.items() for grid in grids]
    cases += [(f"WRONG {name}", w.rule, w.path, "", w) for name, w in WRONG.items()]
    for name, rule, path, grid, wrong in cases:
        params = wrong.params if wrong else GRID[grid]
        began = time.perf_counter()
        with wrong.planted() if wrong else contextlib.nullcontext():
            count = max(options.wrong_sequences, wrong.sequences) if wrong else options.sequences
            found, run = judge(rule, path, params, count, options.seed)
        seconds = time.perf_counter() - began
        right = found.is_within(bound) if wrong is None else not found.is_within(BOUND_20K)
        misjudged += not right
        accepted = run.num_accepted / run.num_cycles
        print(
            f"{name:44} {grid:28} {found.tv:7.4f} {found.chi2:8.2f} {accepted:8.3f} {seconds:8.1f}"
            f"{'' if right else '   MISJUDGED'}",
            flush=True,
        )
        lines.append({"rule": name, "sampling": grid, "sequences": count, **dataclasses.asdict(found)})
    print(json.dumps({"study": "verify_law", "misjudged": misjudged, "lines": lines}))
    sys.exit(1 if misjudged else 0)


if __name__ == "__main__":
    main()
