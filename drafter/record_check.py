"""Holds the lines of a trace against each other: who owns what, which path was verified, what was kept.

Entry points: `TraceChecker` (a line at a time), `Totals` (what an answer's lines add up to, for writer and
checker), `checked_lines`, `read_trace`. Model-free: what the target's logits imply is replayed by
`mlx_flashnext/traces/replay.py`.
"""

from __future__ import annotations

import base64
import binascii
import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import BinaryIO, Final, NoReturn

import xxhash

from drafter.record import (
    DIGEST,
    FORMAT,
    ITEM_BYTES,
    LAST_STACK,
    LAYER_OUTPUT,
    MAX_TOKENS,
    NO_FEATURES,
    PAYLOAD,
    VERSION,
    Answer,
    Cycle,
    End,
    Header,
    Line,
    PromptPiece,
    Route,
    TraceForeign,
    TraceOfOtherVersion,
    TraceRefused,
    at_line,
    raw_lines,
)

MAX_FLOAT32: Final = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class Identity:
    """What a trace must be of; None is not looked at."""

    target_model_revision: str | None = None
    tokenizer_revision: str | None = None
    vocab_size: int | None = None
    draft_digest: str | None = None


@dataclass
class Totals:
    """What the lines of an answer add up to.

    Attributes:
        tokens: prompt and answer so far, the anchor last.
    """

    tokens: array[int] = field(default_factory=lambda: array("i"))
    num_prompt_tokens: int = 0
    num_cycles: int = 0
    path_log_probability: float = 0.0
    num_predictions: int = 0
    num_right_predictions: int = 0
    prediction_brier: float = 0.0

    def __post_init__(self) -> None:
        self._context = xxhash.xxh3_128()
        self._candidates = xxhash.xxh3_128()
        self._target = xxhash.xxh3_128()
        self._routes = xxhash.xxh3_128()
        self._ahead: dict[int, list[Route]] = {}

    def begin(self, prompt: list[int]) -> None:
        """Take the prompt, or a piece of it."""
        self.tokens.extend(prompt)
        self.num_prompt_tokens += len(prompt)

    def add(self, cycle: Cycle) -> None:
        """Take a cycle whose lists fit each other."""
        self.num_cycles += 1
        self.tokens.extend(cycle.committed)
        if cycle.hidden_payload_or_digest:
            self._context.update(hidden_bytes(cycle) or cycle.hidden_payload_or_digest.encode())
        slots = zip(cycle.candidate_probabilities_or_logits, cycle.selected_candidate_path, strict=True)
        for values, chosen in slots:
            self.path_log_probability += _log_share(values, chosen, is_score=cycle.proposal_law == "point")
        for ids, values in zip(
            cycle.candidate_token_ids, cycle.candidate_probabilities_or_logits, strict=True
        ):
            self._candidates.update(array("i", ids).tobytes() + array("d", values).tobytes())
        for row in cycle.target_logits or ():
            self._target.update(array("d", row).tobytes())
        self._add_routes(cycle)

    def _add_routes(self, cycle: Cycle) -> None:
        before, self._ahead = self._ahead, {}
        chosen_by: dict[int, set[int]] = {}
        for route in cycle.routes:
            named = [expert for row in route.target_expert_ids_in_native_rank_order for expert in row]
            numbers = [route.target_route_layer, len(named), *named, *route.predicted_expert_ids]
            self._routes.update(array("i", numbers).tobytes())
            self._routes.update(array("d", route.prediction_confidence).tobytes())
            if route.prefetch_ticket_generation > cycle.request_generation:
                self._ahead.setdefault(route.target_route_layer, []).append(route)
            else:
                rows = route.target_expert_ids_in_native_rank_order
                chosen_by[route.target_route_layer] = {expert for row in rows for expert in row}
                before.setdefault(route.target_route_layer, []).append(route)
        for layer, routes in before.items():
            for route in routes:
                self._judge(route, chosen_by.get(layer, set()))

    def end(self) -> End:
        """Return the last line; guesses that no block followed were wrong."""
        for routes in self._ahead.values():
            for route in routes:
                self._judge(route, set())
        self._ahead = {}
        return End(
            num_cycles=self.num_cycles,
            num_committed_tokens=len(self.tokens) - self.num_prompt_tokens,
            sequence_digest=DIGEST + xxhash.xxh3_128_hexdigest(self.tokens.tobytes()),
            candidates_digest=DIGEST + self._candidates.hexdigest(),
            target_digest=DIGEST + self._target.hexdigest(),
            routes_digest=DIGEST + self._routes.hexdigest(),
            draft_context_digest=DIGEST + self._context.hexdigest(),
            path_log_probability=self.path_log_probability,
            num_predictions=self.num_predictions,
            num_right_predictions=self.num_right_predictions,
            prediction_brier=self.prediction_brier,
        )

    def _judge(self, route: Route, chosen: set[int]) -> None:
        for expert, confidence in zip(route.predicted_expert_ids, route.prediction_confidence, strict=True):
            is_right = expert in chosen
            self.num_predictions += 1
            self.num_right_predictions += is_right
            self.prediction_brier += (confidence - is_right) ** 2


def hidden_bytes(cycle: Cycle) -> bytes | None:
    """Return the hidden rows of a cycle; None if the trace has only their digest.

    Raises:
        TraceRefused: not base64 in its one spelling.
    """
    text = cycle.hidden_payload_or_digest
    if not text.startswith(PAYLOAD):
        return None
    try:
        data = base64.b64decode(text[len(PAYLOAD) :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise TraceRefused(f"hidden_payload_or_digest is not base64: {error}") from None
    if base64.b64encode(data).decode() != text[len(PAYLOAD) :]:
        raise TraceRefused("hidden_payload_or_digest is not in the one spelling of base64")
    return data


class TraceChecker:
    """Takes the lines of a trace in order and refuses what does not follow from those before.

    Args:
        identity: what the trace must be of.
    """

    def __init__(self, identity: Identity | None = None) -> None:
        self._identity = identity or Identity()
        self._header: Header | None = None
        self._answer: Answer | None = None
        self._generations: dict[int, int] = {}
        self._next_generation = 0
        self._totals = Totals()
        self.num_answers = 0

    def feed(self, line: Line) -> None:
        """Take a line.

        Raises:
            TraceRefused: says which field, and both values.
        """
        takes: dict[type, Callable[..., None]] = {
            Header: self._take_header,
            Answer: self._take_answer,
            PromptPiece: self._take_prompt,
            Cycle: self._take_cycle,
            End: self._take_end,
        }
        if self._header is None and not isinstance(line, Header):
            _refuse("the first line is no header")
        takes[type(line)](line)

    def finish(self) -> None:
        """Refuse a trace that ends in the middle.

        Raises:
            TraceRefused: there is no header, or an answer has no end.
        """
        if self._header is None:
            _refuse("no line at all")
        if not self.num_answers:
            _refuse("a header and nothing else: the trace was cut short")
        if self._answer is not None:
            _refuse("the last answer has no end: the trace was cut short")

    def _take_header(self, line: Header) -> None:
        if self._header is not None:
            _refuse("a second header")
        if line.format != FORMAT:
            _refuse(f"format is {line.format!r}, not {FORMAT!r}")
        if line.schema_version != VERSION:
            raise TraceOfOtherVersion(f"schema_version is {line.schema_version}, {VERSION} of this program")
        for name in ("target_model_revision", "tokenizer_revision", "vocab_size", "draft_digest"):
            wanted = getattr(self._identity, name)
            if wanted is not None and getattr(line, name) != wanted:
                raise TraceForeign(f"{name} is {getattr(line, name)!r}, {wanted!r} wanted")
        _check_capture(line)
        self._header = line

    def _take_answer(self, line: Answer) -> None:
        if self._answer is not None:
            _refuse("an answer begins before the last one has ended")
        assert self._header is not None
        for name in ("schema_version", "draft_kind", "draft_digest"):
            _same(name, getattr(line, name), getattr(self._header, name), "of the header")
        least = self._generations.get(line.request_owner, 0)
        if line.request_generation < least:
            _refuse(f"request_generation {line.request_generation} is over: the owner has reached {least}")
        _check_sampling(line)
        self._answer, self._totals = line, Totals()
        self._next_generation = line.request_generation
        self.num_answers += 1

    def _take_prompt(self, line: PromptPiece) -> None:
        answer, totals = self._answer, self._totals
        if answer is None or totals.num_cycles:
            _refuse("a prompt without a request before it, or behind cycles")
        _same("sequence_position", line.sequence_position, len(totals.tokens), "tokens before it")
        self._check_ids("token_ids", line.token_ids)
        totals.begin(list(line.token_ids))
        if len(totals.tokens) > answer.num_prompt_tokens:
            _refuse(f"more tokens than num_prompt_tokens: {len(totals.tokens)} of {answer.num_prompt_tokens}")

    def _take_cycle(self, line: Cycle) -> None:
        header, answer, totals = self._header, self._answer, self._totals
        if header is None or answer is None:
            _refuse("a cycle without a request before it")
        _same("num_prompt_tokens", answer.num_prompt_tokens, totals.num_prompt_tokens, "there")
        for name in (
            "schema_version",
            "target_model_revision",
            "tokenizer_revision",
            "captured_stage",
            "captured_layer_ids",
            "hidden_dtype",
        ):
            _same(name, getattr(line, name), getattr(header, name), "of the header")
        _same("request_owner", line.request_owner, answer.request_owner, "of the request")
        _same("request_generation", line.request_generation, self._next_generation, "comes next")
        _same("sequence_position", line.sequence_position, len(totals.tokens) - 1, "tokens consumed")
        _same("anchor_token_id", line.anchor_token_id, totals.tokens[-1], "the last committed token")
        _check_candidates(line)
        for candidates in line.candidate_token_ids:
            self._check_ids("candidate_token_ids", candidates)
        self._check_ids("bonus_token", (line.bonus_token,))
        _check_verdict(line, answer)
        _check_target(line, header.vocab_size)
        _check_hidden(line, header)
        _check_routes(line)
        if len(totals.tokens) + line.num_committed > MAX_TOKENS:
            _refuse(f"more than {MAX_TOKENS} tokens")
        totals.add(line)
        self._next_generation += 1

    def _take_end(self, line: End) -> None:
        if self._answer is None:
            _refuse("an end without a request before it")
        wanted = self._totals.end()
        for name in wanted.__struct_fields__:
            if name != "digest":
                _same(name, getattr(line, name), getattr(wanted, name), "that the lines add up to")
        self._generations[self._answer.request_owner] = self._next_generation
        self._answer = None

    def _check_ids(self, name: str, ids: tuple[int, ...]) -> None:
        assert self._header is not None
        wrong = [token for token in ids if token >= self._header.vocab_size]
        if wrong:
            _refuse(f"{name} holds {wrong[0]}, the vocabulary ends before {self._header.vocab_size}")


def checked_lines(stream: BinaryIO, identity: Identity | None = None) -> Iterator[Line]:
    """Yield the lines of a trace, each held against those before it.

    What comes later may still be refused: whoever acts on lines reads the whole trace first.

    Raises:
        TraceRefused: names the line and what is wrong with it.
    """
    checker, number = TraceChecker(identity), 0
    for number, line in enumerate(raw_lines(stream), start=1):
        try:
            checker.feed(line)
        except TraceRefused as error:
            raise at_line(number, error) from None
        yield line
    try:
        checker.finish()
    except TraceRefused as error:
        raise TraceRefused(f"after line {number}: {error}") from None


def read_trace(stream: BinaryIO, identity: Identity | None = None) -> list[Line]:
    """Return a whole trace, or nothing of it.

    Raises:
        TraceRefused: as `checked_lines`.
    """
    for _ in checked_lines(stream, identity):
        pass
    stream.seek(0)
    return list(checked_lines(stream, identity))


def _refuse(reason: str) -> NoReturn:
    raise TraceRefused(reason)


def _same(name: str, found: object, wanted: object, of_what: str) -> None:
    if found != wanted:
        _refuse(f"{name} is {found!r}, {wanted!r} {of_what}")


def _check_capture(line: Header) -> None:
    stage, layers, shape = line.captured_stage, line.captured_layer_ids, line.hidden_row_shape
    if stage == NO_FEATURES:
        if layers or shape or line.hidden_dtype != NO_FEATURES:
            _refuse("captured_stage is none, but there are layers, a shape or a type")
        return
    if stage not in (LAYER_OUTPUT, LAST_STACK):
        _refuse(f"captured_stage is not known: {stage!r}")
    if line.hidden_dtype not in ITEM_BYTES:
        _refuse(f"hidden_dtype is not known: {line.hidden_dtype!r}")
    if not layers or any(left >= right for left, right in pairwise(layers)):
        _refuse(f"captured_layer_ids do not ascend: {layers}")
    if min(shape, default=0) < 1 or len(shape) != (1 if stage == LAYER_OUTPUT else 2):
        _refuse(f"hidden_row_shape does not fit {stage}: {shape}")
    if stage == LAYER_OUTPUT and shape[0] % len(layers):
        _refuse(f"hidden_row_shape {shape} is no multiple of {len(layers)} layers")
    if stage == LAST_STACK and len(layers) != 1:
        _refuse(f"captured_layer_ids of the last stack: {layers}")


def _check_sampling(line: Answer) -> None:
    penalties = (line.repetition_penalty, line.presence_penalty, line.frequency_penalty)
    if (penalties == (1.0, 0.0, 0.0)) != (line.penalty_context == 0):
        _refuse(f"penalty_context {line.penalty_context} does not fit the penalties {penalties}")
    if line.penalty_context > MAX_TOKENS or line.repetition_penalty <= 0:
        _refuse(f"penalties out of range: {penalties} over {line.penalty_context}")
    if line.seed is not None and line.seed >= 1 << 64:
        _refuse(f"seed is beyond 64 bits: {line.seed}")
    is_greedy = line.temperature == 0
    if is_greedy and (line.rule != "coupled" or (line.top_k, line.top_p, line.min_p) != (0, 1.0, 0.0)):
        _refuse("temperature is 0, but there are filters, or a rule for drawn tokens")
    if is_greedy != (line.seed is None):
        _refuse(f"seed {line.seed} does not fit temperature {line.temperature}")


def _check_candidates(line: Cycle) -> None:
    ids, values = line.candidate_token_ids, line.candidate_probabilities_or_logits
    path = line.selected_candidate_path
    if not len(ids) == len(values) == len(path):
        _refuse(f"{len(ids)} slots of candidates, {len(values)} of values, a path of {len(path)}")
    if len({len(candidates) for candidates in ids}) > 1:
        _refuse(f"slots of {[len(candidates) for candidates in ids]} candidates: all have as many")
    for slot, (candidates, of_them, chosen) in enumerate(zip(ids, values, path, strict=True)):
        if len(candidates) != len(of_them) or len(set(candidates)) != len(candidates):
            _refuse(f"slot {slot}: {len(of_them)} values for candidates {candidates}, or one named twice")
        if chosen >= len(candidates):
            _refuse(f"slot {slot}: selected_candidate_path names {chosen} of {len(candidates)} candidates")
        if line.proposal_law == "point":
            if of_them[chosen] < max(of_them):
                _refuse(f"slot {slot}: selected_candidate_path does not take the best candidate")
        elif min(of_them) < 0 or abs(sum(of_them) - 1) > 1e-3 or of_them[chosen] <= 0:
            _refuse(f"slot {slot}: candidate_probabilities_or_logits are no probabilities of what was drawn")


def _check_verdict(line: Cycle, answer: Answer) -> None:
    proposal, accepted = line.proposal, line.accepted_prefix_length
    if accepted > len(proposal):
        _refuse(f"accepted_prefix_length {accepted} of {len(proposal)} proposals")
    if not 1 <= line.num_committed <= accepted + 1:
        _refuse(f"num_committed {line.num_committed} of {accepted} accepted and one token more")
    is_rejected = accepted < len(proposal)
    if is_rejected and answer.rule != "sampled" and line.bonus_token == proposal[accepted]:
        _refuse(f"bonus_token {line.bonus_token} is the proposal that was rejected")


def _check_target(line: Cycle, vocab_size: int) -> None:
    num_slots, accepted = len(line.candidate_token_ids), line.accepted_prefix_length
    said = line.target_token_probabilities_or_digest
    if isinstance(said, str):
        _check_digest("target_token_probabilities_or_digest", said)
    else:
        candidates = [*map(len, line.candidate_token_ids), 0]
        wanted = [count + (row == accepted) for row, count in enumerate(candidates)]
        if [len(row) for row in said] != wanted:
            _refuse(f"target_token_probabilities_or_digest has rows of {[len(row) for row in said]}")
        if any(share > 0 for row in said for share in row) and not said[accepted][-1] > 0:
            _refuse("bonus_token had no probability")
    logits = line.target_logits
    if logits is not None and [len(row) for row in logits] != [vocab_size] * (num_slots + 1):
        _refuse(f"target_logits are not {num_slots + 1} rows of the vocabulary's {vocab_size}")
    largest = max((edge for row in logits or () for edge in (min(row), max(row))), key=abs, default=0.0)
    if abs(largest) > MAX_FLOAT32:
        _refuse(f"target_logits beyond float32: {largest:g}")


def _check_hidden(line: Cycle, header: Header) -> None:
    text, shape = line.hidden_payload_or_digest, line.hidden_shape
    if not text:
        wanted = (0, *header.hidden_row_shape) if header.captured_stage != NO_FEATURES else ()
        _same("hidden_shape", shape, wanted, "where no rows are held")
        return
    if header.captured_stage == NO_FEATURES:
        _refuse("hidden_payload_or_digest of features that were not captured")
    _same("hidden_shape", shape, (line.num_committed, *header.hidden_row_shape), "of the rows that stay")
    data = hidden_bytes(line)
    if data is None:
        _check_digest("hidden_payload_or_digest", text)
    else:
        _same(
            "hidden_payload_or_digest", len(data), math.prod(shape) * ITEM_BYTES[line.hidden_dtype], "bytes"
        )


def _check_digest(name: str, text: str) -> None:
    digits = text.removeprefix(DIGEST)
    if len(text) != len(DIGEST) + 32 or len(digits) != 32 or set(digits) - set("0123456789abcdef"):
        _refuse(f"{name} is no digest: {text[:60]!r}")


def _check_routes(line: Cycle) -> None:
    generation, num_rows = line.request_generation, len(line.candidate_token_ids) + 1
    keys = [(route.prefetch_ticket_generation, route.target_route_layer) for route in line.routes]
    if any(left >= right for left, right in pairwise(keys)):
        _refuse("routes do not ascend by prefetch_ticket_generation and target_route_layer")
    for route in line.routes:
        where = f"layer {route.target_route_layer}"
        rows = route.target_expert_ids_in_native_rank_order
        _same("prefetch_ticket_owner", route.prefetch_ticket_owner, line.request_owner, "of the request")
        if not generation <= route.prefetch_ticket_generation <= generation + 1:
            _refuse(
                f"{where}: prefetch_ticket_generation is {route.prefetch_ticket_generation}, "
                f"that of the block {generation}"
            )
        is_ahead = route.prefetch_ticket_generation > generation
        if len(rows) != (0 if is_ahead else num_rows):
            _refuse(f"{where}: target_expert_ids_in_native_rank_order has {len(rows)} rows of {num_rows}")
        if any(len(row) != route.target_top_k or len(set(row)) != len(row) for row in rows):
            _refuse(f"{where}: a row does not choose target_top_k = {route.target_top_k} different experts")
        ids = route.predicted_expert_ids
        if len(ids) != len(route.prediction_confidence) or len(set(ids)) != len(ids):
            _refuse(f"{where}: predicted_expert_ids and prediction_confidence do not fit, or one is twice")
        gone = route.cancelled_expert_ids
        if gone is not None and any(left >= right for left, right in pairwise(gone)):
            _refuse(f"{where}: cancelled_expert_ids do not ascend")


def _log_share(values: tuple[float, ...], chosen: int, *, is_score: bool) -> float:
    """Return the logarithm of a candidate's share among the candidates of its slot."""
    if not is_score:
        return math.log(values[chosen])
    best = max(values)
    return values[chosen] - best - math.log(math.fsum(math.exp(value - best) for value in values))
