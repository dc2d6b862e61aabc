"""From a cycle's values to its line of a trace: plain numbers in, one `Cycle` out, nothing of the device's.

Entry points: `CycleValues`, `cycle_line`, `answer_line`, `Heard`. The recorder that reads the values is in
`recording.py`.
"""

# Shapes: T rows of a block, K candidates of a slot, V vocabulary.

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

from drafter.api import Law
from drafter.record import DIGEST, NO_FEATURES, PAYLOAD, VERSION, Answer, Cycle, Header, Route, TraceRefused
from mlx_flashnext.engine.sampler import Sampler
from mlx_flashnext.engine.verify import Rule
from mlx_flashnext.experts import HandOver

_MOST_SHARE = 1.01
"""A probability is less, whatever its rounding."""


@dataclass(slots=True)
class Heard:
    """What hints said and routers chose in the block that runs, as it was said."""

    rows: dict[int, Sequence[Sequence[int]]] = field(default_factory=dict[int, Sequence[Sequence[int]]])
    ahead: list[HandOver] = field(default_factory=list[HandOver])

    def guesses(self) -> dict[int, dict[int, dict[int, float]]]:
        """Return confidence by passes ahead, layer and expert; the first that was said counts."""
        found: dict[int, dict[int, dict[int, float]]] = {}
        for ahead in self.ahead:
            of_pass = found.setdefault(ahead.passes_ahead, {})
            for hint in ahead.hints:
                of_pass.setdefault(hint.layer, {}).setdefault(hint.expert, round(float(hint.confidence), 6))
        return found


@dataclass(frozen=True, slots=True)
class CycleValues:
    """A cycle as plain values.

    Attributes:
        candidates: ids and probabilities of every slot.
        target: [T][K + 1] probabilities of candidates and bonus.
        logits: [T, V] as float32; None where they are not kept.
        hidden: shape and bytes of the rows that stay; None if none were wanted.
    """

    generation: int
    position: int
    anchor: int
    tokens: tuple[int, ...]
    law: Law
    accepted: int
    bonus: int
    num_kept: int
    heard: Heard
    candidates: tuple[list[list[int]], list[list[float]]] | None
    target: list[list[float]]
    logits: NDArray[np.float32] | None
    hidden: tuple[tuple[int, ...], bytes] | None
    cancelled: Mapping[int, Sequence[int]] | None


def cycle_line(cycle: CycleValues, header: Header, request: Answer, *, keeps_rows: bool) -> Cycle:
    """Return a cycle's line.

    Args:
        cycle: as values.
        header: of the trace.
        request: of the answer.
        keeps_rows: hold hidden rows whole, not their digest.

    Raises:
        TraceRefused: the target gave values that no line can hold.
    """
    if cycle.logits is not None and not np.isfinite(cycle.logits).all():
        raise TraceRefused("the target gave logits that are no numbers")
    tokens = cycle.tokens
    ids, values, path = tuple((token,) for token in tokens), ((1.0,),) * len(tokens), (0,) * len(tokens)
    if cycle.candidates is not None:
        ids, values, path = _candidates(tokens, *cycle.candidates)
    shape, payload = (0, *header.hidden_row_shape), ""
    if cycle.hidden is not None:
        shape, payload = cycle.hidden[0], _opaque(cycle.hidden[1], keeps_rows=keeps_rows)
    return Cycle(
        schema_version=VERSION,
        target_model_revision=header.target_model_revision,
        tokenizer_revision=header.tokenizer_revision,
        request_owner=request.request_owner,
        request_generation=cycle.generation,
        sequence_position=cycle.position,
        anchor_token_id=cycle.anchor,
        captured_stage=header.captured_stage,
        captured_layer_ids=header.captured_layer_ids,
        hidden_dtype=header.hidden_dtype,
        hidden_shape=shape if header.captured_stage != NO_FEATURES else (),
        hidden_payload_or_digest=payload,
        proposal_law=cycle.law,
        candidate_token_ids=ids,
        candidate_probabilities_or_logits=values,
        selected_candidate_path=path,
        target_token_probabilities_or_digest=_said(cycle.target, cycle.accepted),
        target_logits=None if cycle.logits is None else tuple(map(tuple, cycle.logits.tolist())),
        accepted_prefix_length=cycle.accepted,
        bonus_token=cycle.bonus,
        num_committed=cycle.num_kept,
        routes=_routes(cycle, request.request_owner),
    )


def _opaque(data: bytes, *, keeps_rows: bool) -> str:
    if keeps_rows:
        return PAYLOAD + base64.b64encode(data).decode()
    return DIGEST + xxhash.xxh3_128_hexdigest(data)


def _said(target: list[list[float]], accepted: int) -> tuple[tuple[float, ...], ...]:
    """Return the candidates' probabilities of every slot, and the bonus token's own in the row it is of."""
    said: list[tuple[float, ...]] = []
    for slot, row in enumerate(target):
        shares = [*(row[:-1] if slot < len(target) - 1 else ()), *(row[-1:] if slot == accepted else ())]
        if not all(0 <= share < _MOST_SHARE for share in shares):  # not a number compares false
            raise TraceRefused(f"the target gave probabilities that are none: {shares}")
        said.append(tuple(min(1.0, share) for share in shares))
    return tuple(said)


def _candidates(
    tokens: Sequence[int], ids: Sequence[Sequence[int]], probs: Sequence[Sequence[float]]
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...], tuple[int, ...]]:
    """Return candidates, probabilities and path of a proposal whose tokens were drawn."""
    path = tuple(list(row).index(token) for row, token in zip(ids, tokens, strict=True))
    return tuple(map(tuple, ids)), tuple(map(tuple, probs)), path


def _routes(cycle: CycleValues, owner: int) -> tuple[Route, ...]:
    heard, generation, cancelled, said = cycle.heard, cycle.generation, cycle.cancelled, cycle.heard.guesses()
    now, later = said.get(0, {}), said.get(1, {})
    found: list[Route] = []
    for ahead, guesses in ((0, now), (1, later)):
        for layer in sorted(heard.rows):
            guessed = guesses.get(layer, {})
            if ahead and not guessed:
                continue
            rows = tuple(tuple(row) for row in heard.rows[layer])
            gone = None if cancelled is None or ahead else cancelled.get(layer, ())
            found.append(
                Route(
                    target_route_layer=layer,
                    target_top_k=len(rows[0]),
                    target_expert_ids_in_native_rank_order=() if ahead else rows,
                    predicted_expert_ids=tuple(guessed),
                    prediction_confidence=tuple(guessed.values()),
                    prefetch_ticket_owner=owner,
                    prefetch_ticket_generation=generation + ahead,
                    cancelled_expert_ids=None if gone is None else tuple(sorted(gone)),
                )
            )
    return tuple(found)


def answer_line(
    header: Header, owner: int, generation: int, prompt: Sequence[int], sampler: Sampler, rule: Rule
) -> Answer:
    """Return an answer's first line: how its tokens are chosen, in normal form."""
    params = sampler.params
    is_drawn = not params.is_greedy
    return Answer(
        schema_version=VERSION,
        draft_kind=header.draft_kind,
        draft_digest=header.draft_digest,
        request_owner=owner,
        request_generation=generation,
        num_prompt_tokens=len(prompt),
        rule=rule,
        seed=sampler.seed if is_drawn else None,
        temperature=params.temperature if is_drawn else 0.0,
        top_k=params.top_k if is_drawn else 0,
        top_p=(params.top_p or 1.0) if is_drawn else 1.0,
        min_p=params.min_p if is_drawn else 0.0,
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        penalty_context=params.penalty_context if params.has_penalties else 0,
        logit_bias=tuple((token, float(bias)) for token, bias in sorted(params.logit_bias.items())),
        processors=tuple(type(each).__name__ for each in sampler.processors),
    )
