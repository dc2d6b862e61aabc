"""Replays a trace without a model: the real cycle on recorded logits, and every line must come out again.

Entry point: `replay_trace`. What runs is the product's own: `Timeline.cycle`, verification and its draws, the
transaction of the state, the expert store with its tickets (read step by step, no threads), hints, the
recorder. Recorded are only the things that a model would have computed: logits, hidden rows, routes; and what
a drafter and a predictor would have guessed. So a record is accepted if and only if ownership, acceptance,
bonus, rows kept, rows handed to the drafter and tickets cancelled are what this program makes of its inputs.

Rejected rows carry values that are in no trace (`_POISON`): one of them among what a drafter was handed, or
in what was written again, is a rollback that did not happen.
"""

# Shapes: T rows of a block, R of them recorded, V vocabulary, W width of a row's features.

import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn, cast

import mlx.core as mx
import numpy as np
import xxhash

from drafter.api import FeatureRequest
from drafter.record import (
    DIGEST,
    LAST_STACK,
    LAYER_OUTPUT,
    NO_FEATURES,
    Answer,
    Cycle,
    End,
    Header,
    Line,
    PromptPiece,
    Route,
    TraceNotReplayable,
    TraceRefused,
    raw_lines,
)
from drafter.record_check import Identity, checked_lines, hidden_bytes
from drafter.replay import ReplayDrafter, recorded_proposals
from expert_store.errors import StoreError
from mlx_flashnext.engine.cycle import CycleFacts
from mlx_flashnext.engine.errors import EngineError
from mlx_flashnext.engine.sampler import Sampler, SamplingParams
from mlx_flashnext.errors import StateError
from mlx_flashnext.traces.recording import Recorder, TraceSettings
from mlx_flashnext.traces.replay_rig import BlockScript, Capture, ReplayRig, RigSize

_POISON = float("nan")
_TOLERANCE = 1e-4
"""Relative error of recorded probabilities: another backend rounds exponentials and sums in another order."""


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """What a replay found.

    Attributes:
        num_answers, num_cycles: replayed.
        num_proposed, num_accepted, num_committed: tokens.
        num_rejected_rows: rows of the target that were rolled back.
        cycles_by_acceptance: cycles that accepted `none`, `some` or `all` of their proposals.
        num_cancelled_tickets: guesses that ended unread with the cycle that made them stale.
    """

    num_answers: int = 0
    num_cycles: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_committed: int = 0
    num_rejected_rows: int = 0
    num_cancelled_tickets: int = 0
    cycles_by_acceptance: Mapping[str, int] = field(default_factory=dict[str, int])


def replay_trace(stream: BinaryIO, identity: Identity | None = None) -> ReplayOutcome:
    """Replay every answer of a trace.

    Args:
        stream: of the file, from its start.
        identity: what the trace must be of.

    Raises:
        TraceNotReplayable: the trace lacks logits, or says of processors that nobody else knows.
        TraceRefused: says which line and field differ, and both values.
    """
    for _ in checked_lines(stream, identity):
        pass  # whole and consistent before anything of it is run
    stream.seek(0)
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    header: Header | None = None
    lines: list[Line] = []
    for number, line in enumerate(checked_lines(stream, identity), start=1):
        if isinstance(line, Header):
            header = line
            continue
        lines.append(line)
        if isinstance(line, End):
            assert header is not None
            _replay_answer(header, lines, number - len(lines) + 1)
            _count(lines, counts, kinds)
            lines = []
    return ReplayOutcome(**counts, cycles_by_acceptance=dict(kinds))


def _count(lines: Iterable[Line], counts: Counter[str], kinds: Counter[str]) -> None:
    counts["num_answers"] += 1
    for line in lines:
        if isinstance(line, Cycle):
            proposed, accepted = len(line.proposal), line.accepted_prefix_length
            counts["num_cycles"] += 1
            counts["num_proposed"] += proposed
            counts["num_accepted"] += accepted
            counts["num_committed"] += line.num_committed
            counts["num_rejected_rows"] += proposed + 1 - line.num_committed
            counts["num_cancelled_tickets"] += sum(len(r.cancelled_expert_ids or ()) for r in line.routes)
            if proposed:
                kinds["all" if accepted == proposed else "some" if accepted else "none"] += 1


def _replay_answer(header: Header, lines: Sequence[Line], first_number: int) -> None:
    """Run one answer and compare what is written with what was recorded."""
    request = cast("Answer", lines[0])
    prompt = [token for line in lines if isinstance(line, PromptPiece) for token in line.token_ids]
    cycles = [line for line in lines if isinstance(line, Cycle)]
    first_cycle = first_number + len(lines) - 1 - len(cycles)
    _check_replayable(request, cycles)
    try:
        sampler = Sampler(_params(request), prompt)
        written = _run(header, request, prompt, cycles, sampler, first_cycle)
    except (EngineError, StateError, StoreError) as error:
        raise TraceRefused(f"line {first_number}: {error}") from None
    wanted = [line for line in lines if not isinstance(line, PromptPiece)]
    for number, (found, recorded) in enumerate(zip(written, wanted, strict=True)):
        at = first_number if number == 0 else first_cycle + number - 1
        _compare(at, recorded, found)


def _run(
    header: Header,
    request: Answer,
    prompt: Sequence[int],
    cycles: Sequence[Cycle],
    sampler: Sampler,
    first_number: int,
) -> list[Line]:
    """Run the cycles of an answer and return the lines that the recorder wrote: answer, cycles, end."""
    script = _RecordedScript(header, cycles)
    is_counted = any(r.cancelled_expert_ids is not None for line in cycles for r in line.routes)
    drafter = ReplayDrafter(
        recorded_proposals(cycles, keeps_law=True),
        law="rows" if request.rule == "sampled" else "point",
        request=FeatureRequest(header.captured_layer_ids, "mean", None)
        if header.captured_stage == LAYER_OUTPUT
        else None,
        needs_stack=header.captured_stage == LAST_STACK,
    )
    capture = Capture(header.captured_stage, header.captured_layer_ids, tuple(header.hidden_row_shape))
    rig = ReplayRig(script, capture, size_of(cycles), header.vocab_size, drafter, request.request_owner)
    stream = io.BytesIO()
    settings = TraceSettings(
        target_model_revision=header.target_model_revision,
        tokenizer_revision=header.tokenizer_revision,
        vocab_size=header.vocab_size,
        num_layers=rig.num_layers,
        draft_digest=header.draft_digest,
        hidden="payload",
        keeps_logits=True,
    )
    recorder = Recorder(stream, settings, cancelled=rig.cancelled if is_counted else None)
    rig.begin(recorder, prompt, request.request_generation, request.rule, sampler)
    for number, line in enumerate(cycles, start=first_number):
        script.line = line
        facts = rig.cycle(line.anchor_token_id, sampler, len(line.proposal), line.num_committed)
        _check_verdict(number, line, facts)
        rig.check_state(number)
    rig.end(recorder)
    if recorder.failure:
        raise TraceRefused(f"line {first_number}: {recorder.failure}")
    stream.seek(0)
    return [line for line in raw_lines(stream) if not isinstance(line, Header | PromptPiece)]


def size_of(cycles: Iterable[Cycle]) -> RigSize:
    """Return the layers and experts that a store needs for these cycles."""
    experts: dict[int, int] = {}
    widest: dict[int, int] = {}
    for line in cycles:
        for route in line.routes:
            layer = route.target_route_layer
            chosen = {e for row in route.target_expert_ids_in_native_rank_order for e in row}
            named = chosen.union(route.predicted_expert_ids)
            experts[layer] = max(experts.get(layer, 0), *(expert + 1 for expert in named), 1)
            widest[layer] = max(widest.get(layer, 1), len(named))
    return RigSize(experts, widest)


class _RecordedScript:
    """What the target computed, as recorded; `line` is the cycle that runs."""

    def __init__(self, header: Header, cycles: Sequence[Cycle]) -> None:
        self._header = header
        self.line = cycles[0]

    def block(self, position: int, tokens: Sequence[int]) -> BlockScript:
        """Return logits, features and routes of the block; rejected rows are poisoned."""
        del position
        line, header = self.line, self._header
        hidden = None
        if header.captured_stage != NO_FEATURES:
            hidden = self._hidden(len(tokens))
        return BlockScript(
            logits=mx.array(np.array(line.target_logits, np.float32)),
            hidden=hidden,
            routes={
                route.target_route_layer: route.target_expert_ids_in_native_rank_order
                for route in line.routes
                if route.prefetch_ticket_generation == line.request_generation
            },
            guesses=[_guessed(route, line.request_generation) for route in line.routes],
        )

    def _hidden(self, num_rows: int) -> mx.array:
        line, row_shape = self.line, self._header.hidden_row_shape
        data = hidden_bytes(line) or b""
        dtypes = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
        bits = np.frombuffer(data, np.float32 if line.hidden_dtype == "float32" else np.uint16)
        flat = mx.array(bits).view(dtypes[line.hidden_dtype])
        rows = mx.unflatten(flat, 0, (flat.size // math.prod(row_shape), *row_shape))
        poison = mx.full((num_rows - rows.shape[0], *row_shape), _POISON, rows.dtype)
        return mx.concatenate([rows, poison])


def _guessed(route: Route, generation: int) -> tuple[int, int, dict[int, float]]:
    guesses = dict(zip(route.predicted_expert_ids, route.prediction_confidence, strict=True))
    return route.target_route_layer, route.prefetch_ticket_generation - generation, guesses


def _check_replayable(request: Answer, cycles: Sequence[Cycle]) -> None:
    if request.processors:
        raise TraceNotReplayable(f"no replay: processors {list(request.processors)} are not in the record")
    if not cycles:
        raise TraceNotReplayable("no replay: an answer without a cycle")
    if any(line.target_logits is None for line in cycles):
        raise TraceNotReplayable("no replay: there are no target_logits in it")


def _params(request: Answer) -> SamplingParams:
    return SamplingParams(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        penalty_context=request.penalty_context or 1,
        seed=request.seed,
        logit_bias=dict(request.logit_bias),
    )


def _check_verdict(number: int, line: Cycle, facts: CycleFacts) -> None:
    """Compare what verification said with the record, before the sequences part."""
    if facts.proposal.tokens != line.proposal:
        _differ(number, "selected_candidate_path", line.proposal, facts.proposal.tokens)
    found = (facts.verdict.accepted, facts.verdict.tokens[-1])
    if found != (line.accepted_prefix_length, line.bonus_token):
        recorded = (line.accepted_prefix_length, line.bonus_token)
        _differ(number, "accepted_prefix_length, bonus_token", recorded, found)
    if facts.num_kept != line.num_committed:
        _differ(number, "num_committed", line.num_committed, facts.num_kept)


def _compare(number: int, recorded: Line, found: Line) -> None:
    """Refuse the first field that came out otherwise."""
    if type(recorded) is not type(found):
        raise TraceRefused(f"line {number}: a {type(recorded).__name__} came out as {type(found).__name__}")
    for name in recorded.__struct_fields__:
        left, right = getattr(recorded, name), getattr(found, name)
        # A replay has another drafter; both names were held against the header.
        if name in ("digest", "draft_kind") or left == right or _is_unknown(recorded, name):
            continue
        if name == "target_token_probabilities_or_digest" and (
            _are_close(left, right) or left == _digest_of(found)
        ):
            continue
        if name == "routes" and len(left) == len(right):
            _compare_routes(number, left, right)
        _differ(number, name, left, right)


def _compare_routes(number: int, recorded: Sequence[Route], found: Sequence[Route]) -> None:
    for left, right in zip(recorded, found, strict=True):
        for name in left.__struct_fields__:
            if getattr(left, name) != getattr(right, name):
                where = f"layer {left.target_route_layer}: {name}"
                _differ(number, where, getattr(left, name), getattr(right, name))


def _is_unknown(recorded: Line, name: str) -> bool:
    """Return whether the record has too little of a field to say it again: digests of features, no rows."""
    if isinstance(recorded, End):
        # Held by the checker against the lines, which are compared here one by one.
        return name == "draft_context_digest"
    if not isinstance(recorded, Cycle):
        return False
    is_kept = recorded.hidden_payload_or_digest and hidden_bytes(recorded) is not None
    return name in ("hidden_shape", "hidden_payload_or_digest") and not is_kept


def _are_close(left: Any, right: Any) -> bool:
    if isinstance(left, str) or isinstance(right, str):
        return False
    pairs = [pair for rows in zip(left, right, strict=True) for pair in zip(*rows, strict=True)]
    return all(math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=1e-7) for a, b in pairs)


def _digest_of(cycle: Line) -> str:
    """Return the digest of the logits: a record may hold it instead of probabilities."""
    logits = np.array(cast("Cycle", cycle).target_logits, np.float32)
    return DIGEST + xxhash.xxh3_128_hexdigest(logits.tobytes())


def _differ(number: int, name: str, recorded: object, found: object) -> NoReturn:
    texts = [text if len(text := repr(value)) <= 120 else text[:117] + "..." for value in (recorded, found)]
    raise TraceRefused(f"line {number}: {name} is {texts[0]} in the record, {texts[1]} when replayed")
