"""Makes the golden traces: a scripted target under the real cycle, recorded by the real recorder.

    python -m tests.golden.traces.generate

Logits, candidates, routes and features are drawn from seeds, in multiples of 1/64 where a file shows them.
Acceptance is planned: a slot is right if it has the target's own choice. Two kinds of files are written:
`NAME.jsonl`, which `flashnext trace replay` accepts, and `refused-NAME.jsonl`, which tell one lie each, with
every digest made anew, and are refused for what they say.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from drafter.api import DraftSampling, FeatureRequest, Law, Proposal
from drafter.record import (
    LAST_STACK,
    LAYER_OUTPUT,
    NO_FEATURES,
    PAYLOAD,
    Cycle,
    End,
    Line,
    PromptPiece,
    TraceWriter,
    raw_lines,
)
from drafter.record_check import Totals
from mlx_flashnext.engine.sampler import Sampler, SamplingParams, choose, processed
from mlx_flashnext.engine.verify import Rule, resolve_rule
from mlx_flashnext.traces.recording import Recorder, TraceSettings
from mlx_flashnext.traces.replay_rig import BlockScript, Capture, ReplayRig, RigSize

HERE = Path(__file__).resolve().parent
VOCAB = 24
OWNER = 7


@dataclass(frozen=True)
class Case:
    """One golden trace.

    Attributes:
        plan: for every cycle (proposals, of which the first so many are right).
        takes: for every cycle the most tokens that the answer takes; None for all.
    """

    name: str
    plan: Sequence[tuple[int, int]]
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    rule: Rule | str = "auto"
    law: Law = "point"
    num_candidates: int = 1
    stage: str = NO_FEATURES
    layers: tuple[int, ...] = ()
    row_shape: tuple[int, ...] = ()
    dtype: mx.Dtype = mx.float32
    routes: bool = False
    seed: int = 1
    takes: Sequence[int | None] = ()
    prompt: tuple[int, ...] = (3, 1, 4, 1, 5)


class Target:
    """The scripted target: every value depends on seed, position and token."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def logits(self, position: int, token: int) -> np.ndarray:
        rng = np.random.default_rng([self.case.seed, 1, position, token])
        return (np.round(rng.normal(size=VOCAB) * 96) / 64).astype(np.float32)

    def block(self, position: int, tokens: Sequence[int]) -> BlockScript:
        places = list(enumerate(tokens, start=position))
        case = self.case
        hidden = None
        if case.stage != NO_FEATURES:
            rows = [
                np.random.default_rng([case.seed, 2, *place]).normal(size=case.row_shape) for place in places
            ]
            hidden = mx.array(np.round(np.array(rows) * 64) / 64, dtype=case.dtype)
        routes, guesses = {}, []
        if case.routes:
            for layer in (0, 2):
                rng = np.random.default_rng([case.seed, 3, position, layer])
                routes[layer] = [[int(e) for e in rng.permutation(20)[:3]] for _ in tokens]
                # Two of what will be chosen, two others; and for the next block two more.
                right = routes[layer][0][:2]
                chosen = {e for row in routes[layer] for e in row}
                wrong = [int(e) for e in rng.permutation(20) if e not in chosen][:2]
                sure = dict(zip([*right, *wrong], (0.875, 0.75, 0.5, 0.25), strict=True))
                later = [int(e) for e in rng.permutation(20) if e not in sure][:2]
                guesses.append((layer, 0, sure))
                guesses.append((layer, 1, dict(zip(later, (0.625, 0.375), strict=True))))
        logits = mx.array(np.stack([self.logits(*place) for place in places]))
        return BlockScript(logits, hidden, routes, guesses)


class PlannedDrafter:
    """Proposes so many tokens, of which so many are what the target would choose."""

    kind = "planned"

    def __init__(self, case: Case, target: Target, sampler: Sampler) -> None:
        self.law: Law = case.law
        self.needs_stack = case.stage == LAST_STACK
        if case.stage == LAYER_OUTPUT:
            self.feature_request = FeatureRequest(case.layers, "mean", None)
        self._case, self._target, self._sampler = case, target, sampler
        self._tokens: list[int] = []
        self._anchor = -1
        self.cycle = 0

    def max_proposals(self) -> int:
        return max(k for k, _ in self._case.plan)

    def reset(self) -> None:
        self._tokens = []

    def observe(
        self, tokens: Sequence[int], next_token: int, stack: Any = None, *, features_RF: Any = None
    ) -> None:
        self._tokens.extend(tokens)
        self._anchor = next_token

    def propose(self, k: int, sampling: DraftSampling) -> Proposal:
        wanted, right = self._case.plan[self.cycle]
        assert k >= wanted
        position, case = len(self._tokens), self._case
        tokens: list[int] = []
        ids: list[list[int]] = []
        values: list[list[float]] = []
        for slot in range(wanted):
            before = [self._anchor, *tokens]
            rng = np.random.default_rng([case.seed, 4, position + slot, before[-1]])
            rows = [self._target.logits(position + row, token) for row, token in enumerate(before)]
            best = self._choice(np.stack(rows), tokens)
            others = [int(token) for token in rng.permutation(VOCAB) if token != best]
            chosen = best if slot < right else others.pop()
            among = [chosen, *others[: case.num_candidates - 1]]
            order = rng.permutation(len(among))
            ids.append([among[place] for place in order])
            of_them = self._values(rng, len(among))
            values.append([of_them[place] for place in order])
            tokens.append(chosen)
        if not tokens:
            return Proposal(())
        return Proposal(tuple(tokens), case.law, mx.array(ids, mx.int32), mx.array(values, mx.float32))

    def _values(self, rng: np.random.Generator, count: int) -> list[float]:
        """Return probabilities, or scores of which the first is the best."""
        if self._case.law == "rows":
            parts = np.sort(rng.integers(1, 12, count))[::-1].astype(float)
            return [float(share) for share in (parts / parts.sum()).astype(np.float32)]
        scores = np.sort(np.round(rng.normal(size=count) * 64) / 64)[::-1]
        return [float(score) - rank / 64 for rank, score in enumerate(scores)]

    def _choice(self, rows: np.ndarray, tokens: Sequence[int]) -> int:
        """Return what the target would choose behind the anchor and these tokens, or finds likeliest."""
        scores = processed(mx.array(rows)[None], [self._sampler], [tuple(tokens)])
        if self._case.rule in ("delta", "sampled"):
            return int(mx.argmax(scores[-1]).item())
        return int(choose(scores, [self._sampler])[-1].item())

    def snapshot(self) -> object:
        return None

    def restore(self, snapshot: object) -> None:
        pass

    def num_bytes(self) -> int:
        return 0

    def describe(self) -> dict[str, object]:
        return {}


DRAWN = SamplingParams(temperature=0.875, top_k=12, top_p=0.9375, min_p=0.015625, seed=11)
PENALISED = SamplingParams(
    temperature=0.0,
    repetition_penalty=1.25,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    penalty_context=6,
    logit_bias={2: 1.5, 9: -2.0},
)
FOUR_OF_ROWS: dict[str, Any] = {"rule": "sampled", "law": "rows", "num_candidates": 4}
TWO_TAPS: dict[str, Any] = {"stage": LAYER_OUTPUT, "layers": (1, 3), "row_shape": (4,)}
CASES = [
    Case("several-candidates", [(3, 3), (3, 1), (3, 0), (2, 2)], num_candidates=4, seed=5),
    Case("one-coherent-path", [(3, 3), (3, 2), (2, 0), (3, 1)], DRAWN, **FOUR_OF_ROWS, seed=6),
    Case("whole-block", [(4, 4), (4, 3), (4, 2), (4, 1), (4, 0)], seed=7),
    Case("accept-none", [(3, 0), (1, 0), (2, 0)], seed=8),
    Case("accept-some", [(3, 1), (3, 2), (2, 1)], seed=9),
    Case("accept-all", [(3, 3), (1, 1), (2, 2), (0, 0)], seed=10),
    Case("bonus-token", [(2, 2), (2, 0), (2, 2), (2, 2)], seed=11, takes=(None, None, None, 2)),
    Case("coupled-draws", [(3, 3), (3, 1), (2, 0), (2, 2)], DRAWN, "coupled", seed=12),
    Case(
        "delta-draws", [(3, 3), (3, 3), (2, 1), (2, 2)], replace(DRAWN, temperature=0.375), "delta", seed=21
    ),
    Case("penalties", [(3, 3), (3, 2), (3, 1)], PENALISED, seed=14),
    Case("rollback-of-features", [(3, 1), (3, 0), (3, 3)], **TWO_TAPS, num_candidates=2, seed=15),
    Case(
        "rollback-of-the-stack",
        [(3, 2), (2, 0), (2, 2)],
        stage=LAST_STACK,
        layers=(3,),
        row_shape=(2, 2),
        dtype=mx.bfloat16,
        seed=16,
    ),
    Case("tickets", [(2, 1), (2, 0), (2, 2)], routes=True, seed=17),
    Case(
        "everything",
        [(3, 2), (3, 0), (2, 2)],
        DRAWN,
        **FOUR_OF_ROWS,
        **TWO_TAPS,
        dtype=mx.bfloat16,
        routes=True,
        seed=18,
    ),
]


def record(case: Case) -> bytes:
    """Return the trace of a case."""
    target = Target(case)
    sampler = Sampler(case.params, case.prompt)
    drafter = PlannedDrafter(case, target, sampler)
    size = RigSize({0: 20, 2: 20}, {0: 12, 2: 12}) if case.routes else RigSize({}, {})
    rig = ReplayRig(target, Capture(case.stage, case.layers, case.row_shape), size, VOCAB, drafter, OWNER)
    stream = io.BytesIO()
    settings = TraceSettings(
        "golden-target",
        "golden-tokenizer",
        VOCAB,
        rig.num_layers,
        "golden-draft",
        "payload",
        keeps_logits=True,
    )
    recorder = Recorder(stream, settings, cancelled=rig.cancelled if case.routes else None)
    rule = resolve_rule(case.rule, case.params, case.law)
    rig.begin(recorder, case.prompt, 3, rule, sampler)
    anchor = case.prompt[-1]
    takes = [*case.takes, *[None] * len(case.plan)]
    for number, (k, _) in enumerate(case.plan):
        drafter.cycle = number
        facts = rig.cycle(anchor, sampler, k, takes[number] or k + 1)
        anchor = facts.verdict.tokens[facts.num_kept - 1]
        rig.check_state(number)
    rig.end(recorder)
    assert not recorder.failure, recorder.failure
    return stream.getvalue()


def resealed(lines: Sequence[Line]) -> bytes:
    """Return lines with every digest made anew."""
    stream = io.BytesIO()
    writer = TraceWriter(stream)
    for line in lines:
        writer.write(line)
    return stream.getvalue()


def lie(data: bytes, number: int, changes: Mapping[str, Any]) -> bytes:
    """Return a trace of which one line (from 0) says something else; digests and sums are made anew.

    Args:
        data: the trace.
        number: of the line.
        changes: new values by path, such as `routes.0.prefetch_ticket_owner`; or functions of the old ones.
    """
    lines = list(raw_lines(io.BytesIO(data)))
    plain = msgspec.json.decode(msgspec.json.encode(lines[number]))
    for path, value in changes.items():
        at: Any = plain
        *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        for step in steps:
            at = at[step]
        at[last] = value(at[last]) if callable(value) else value
    lines[number] = msgspec.convert(plain, type(lines[number]))
    return resealed(with_sums(lines))


def longer(payload: str) -> str:
    """Return a payload with one more row of four float32."""
    return base64.b64encode(base64.b64decode(payload) + bytes(16)).decode()


def with_sums(lines: Sequence[Line]) -> list[Line]:
    """Return lines whose end agrees with them, as far as they can be added up."""
    totals, result = Totals(), list(lines)
    for number, line in enumerate(lines):
        if isinstance(line, PromptPiece):
            totals.begin(list(line.token_ids))
        elif isinstance(line, Cycle):
            totals.add(line)
        elif isinstance(line, End):
            result[number] = totals.end()
    return result


# name: (the golden trace it tells a lie of, line from 0, what it says instead)
LIES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "other-target": ("everything", 4, {"target_model_revision": "another-target"}),
    "other-tokenizer": ("everything", 4, {"tokenizer_revision": "another-tokenizer"}),
    "other-vocabulary": ("everything", 0, {"vocab_size": VOCAB + 8}),
    "other-hidden-shape": ("everything", 3, {"hidden_shape.0": lambda rows: rows + 1}),
    "other-hidden-type": ("everything", 3, {"hidden_dtype": "float16"}),
    "other-layers": ("everything", 4, {"captured_layer_ids": [0, 3]}),
    "other-stage": ("everything", 4, {"captured_stage": LAST_STACK}),
    "other-owner": ("everything", 4, {"request_owner": OWNER + 1}),
    "other-generation": ("everything", 4, {"request_generation": 9}),
    "other-ticket-owner": ("tickets", 3, {"routes.0.prefetch_ticket_owner": OWNER + 1}),
    "other-ticket-generation": ("tickets", 4, {"routes.0.prefetch_ticket_generation": 3}),
    "ticket-not-cancelled": ("tickets", 3, {"routes.0.cancelled_expert_ids": lambda ids: ids[:-1]}),
    "one-accepted-too-many": (
        "accept-some",
        5,
        {"accepted_prefix_length": 2, "target_token_probabilities_or_digest": "xxh3-128:" + "0" * 32},
    ),
    "one-accepted-too-few": (
        "accept-some",
        5,
        {
            "accepted_prefix_length": 0,
            "num_committed": 1,
            "target_token_probabilities_or_digest": "xxh3-128:" + "0" * 32,
        },
    ),
    "wrong-bonus": ("bonus-token", 5, {"bonus_token": lambda token: (token + 1) % VOCAB}),
    "wrong-last-bonus": ("accept-all", 6, {"bonus_token": lambda token: (token + 1) % VOCAB}),
    "wrong-correction": ("accept-none", 5, {"bonus_token": lambda token: (token + 1) % VOCAB}),
    "wrong-path": ("several-candidates", 3, {"selected_candidate_path.0": lambda index: (index + 1) % 4}),
    "rejected-row-kept": (
        "rollback-of-features",
        3,
        {
            "hidden_shape.0": 3,
            "hidden_payload_or_digest": lambda text: PAYLOAD + longer(text.removeprefix(PAYLOAD)),
        },
    ),
    "later-version": ("accept-all", 0, {"schema_version": 2}),
}


def files() -> dict[str, bytes]:
    """Return every golden file by name."""
    golden = {case.name: record(case) for case in CASES}
    made = {f"{name}.jsonl": data for name, data in golden.items()}
    for name, (of, number, changes) in LIES.items():
        made[f"refused-{name}.jsonl"] = lie(golden[of], number, changes)
    return made


if __name__ == "__main__":
    for file_name, data in files().items():
        (HERE / file_name).write_bytes(data)
