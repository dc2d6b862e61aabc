"""The proposal record: what was proposed, what the target said, which experts were guessed, cycle by cycle.

A trace is lines of JSON, appended and never changed: a header, then for every answer its request, its prompt
in pieces, one line a cycle, and its end. Entry points: `TraceWriter`, `open_trace`; who reads starts with
`record_check.py`.

Every line has one spelling: compact, fields in order, each there, none twice, no other. Its `digest` covers
the line and the digest before it, so that a line that is lost, changed or moved is found; what the lines mean
is held against each other in `record_check.py`. Hidden features are opaque: stage, layers, type, shape and
revision are compared, the values are bytes.

Limits: a line has at most `MAX_LINE_BYTES`, and lists are bounded one by one, so that no line makes a reader
hold more than a few times that. Docs: docs/FORMATS.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Final, Literal

import msgspec
import xxhash

from drafter.api import MAX_PROPOSALS
from drafter.documents import brief

FORMAT = "flashnext-trace"
VERSION = 1

MAX_LINE_BYTES: Final = 1 << 20
MAX_TOKENS: Final = 1 << 21
MAX_PROMPT_PIECE: Final = 1 << 16
MAX_CANDIDATES: Final = 64
MAX_VOCABULARY: Final = 1 << 20
MAX_LAYERS: Final = 512
MAX_EXPERTS: Final = 1 << 12
MAX_TOP_K: Final = 64

NO_FEATURES: Final = "none"
LAYER_OUTPUT: Final = "layer_output"
LAST_STACK: Final = "last_stack"
ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
PAYLOAD: Final = "base64:"
DIGEST: Final = "xxh3-128:"

_Token = Annotated[int, msgspec.Meta(ge=0, lt=MAX_VOCABULARY)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Name = Annotated[str, msgspec.Meta(max_length=128)]
_Layer = Annotated[int, msgspec.Meta(ge=0, lt=MAX_LAYERS)]
_Expert = Annotated[int, msgspec.Meta(ge=0, lt=MAX_EXPERTS)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Layers = Annotated[tuple[_Layer, ...], msgspec.Meta(max_length=MAX_LAYERS)]
_Shape = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=4)]


class TraceRefused(Exception):
    """A trace cannot be used; one line that says where and why, however long what was wrong is."""

    def __init__(self, message: str) -> None:
        super().__init__(brief(message))


class TraceForeign(TraceRefused):
    """It is of another target, tokenizer, vocabulary or draft than was wanted; nothing is wrong with it."""


class TraceOfOtherVersion(TraceRefused):
    """It is of another version than this program reads; nothing is wrong with it."""


class TraceNotReplayable(TraceRefused):
    """It lacks what a replay needs; nothing is wrong with it."""


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    pass


class Header(_Line, frozen=True, tag="header"):
    """The first line: of which target, tokenizer and draft everything is, and what was captured.

    Attributes:
        target_model_revision: digest of the checkpoint.
        tokenizer_revision: digest of vocabulary, merges and added tokens.
        vocab_size: rows of the target's logits.
        draft_kind: who proposed.
        draft_digest: of its files; empty for one without.
        captured_stage: `none`, `layer_output` (of 0-based layers, writes applied, contracted, side by side),
            `last_stack` (the streams after the last layer).
        captured_layer_ids: of these layers.
        hidden_dtype: of a value; `none` if nothing was captured.
        hidden_row_shape: of one row.
    """

    format: _Name
    schema_version: _Count
    target_model_revision: _Name
    tokenizer_revision: _Name
    vocab_size: Annotated[int, msgspec.Meta(ge=2, le=MAX_VOCABULARY)]
    draft_kind: _Name
    draft_digest: _Name
    captured_stage: _Name
    captured_layer_ids: _Layers
    hidden_dtype: _Name
    hidden_row_shape: _Shape
    digest: _Name = ""


class Answer(_Line, frozen=True, tag="answer"):
    """The request of an answer: draft, owner, generation of the first cycle, rule, how tokens were chosen.

    What does not apply is in normal form: a greedy answer has no seed and no filters; without penalties their
    context is 0. `processors` names changes of the logits that are not in the record: no replay knows them.
    """

    schema_version: _Count
    draft_kind: _Name
    draft_digest: _Name
    request_owner: _Count
    request_generation: _Count
    num_prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    rule: Literal["coupled", "delta", "sampled"]
    seed: Annotated[int, msgspec.Meta(ge=0)] | None
    temperature: Annotated[float, msgspec.Meta(ge=0)]
    top_k: _Count
    top_p: _Share
    min_p: _Share
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_context: _Count
    logit_bias: Annotated[tuple[tuple[_Token, float], ...], msgspec.Meta(max_length=1024)]
    processors: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=16)]
    digest: _Name = ""


class PromptPiece(_Line, frozen=True, tag="prompt"):
    """Tokens of the prompt from `sequence_position` on."""

    sequence_position: _Count
    token_ids: Annotated[tuple[_Token, ...], msgspec.Meta(min_length=1, max_length=MAX_PROMPT_PIECE)]
    digest: _Name = ""


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer's choice in a block, and what had been guessed of it.

    Attributes:
        target_route_layer: 0-based.
        target_top_k: experts of a row.
        target_expert_ids_in_native_rank_order: for every row of the block, the router's choice, best first;
            empty where the guess is for the next pass.
        predicted_expert_ids: handed over as hints; each once.
        prediction_confidence: of each.
        prefetch_ticket_owner: the request they were handed over for.
        prefetch_ticket_generation: they were good until this generation ended: the block's own, or one more.
        cancelled_expert_ids: guesses of any generation that ended unread with this block; null if not known.
    """

    target_route_layer: _Layer
    target_top_k: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOP_K)]
    target_expert_ids_in_native_rank_order: Annotated[
        tuple[Annotated[tuple[_Expert, ...], msgspec.Meta(max_length=MAX_TOP_K)], ...],
        msgspec.Meta(max_length=MAX_PROPOSALS + 1),
    ]
    predicted_expert_ids: Annotated[tuple[_Expert, ...], msgspec.Meta(max_length=MAX_EXPERTS)]
    prediction_confidence: Annotated[tuple[_Share, ...], msgspec.Meta(max_length=MAX_EXPERTS)]
    prefetch_ticket_owner: _Count
    prefetch_ticket_generation: _Count
    cancelled_expert_ids: Annotated[tuple[_Expert, ...], msgspec.Meta(max_length=MAX_EXPERTS)] | None


_Candidates = Annotated[tuple[_Token, ...], msgspec.Meta(min_length=1, max_length=MAX_CANDIDATES)]
_Values = Annotated[tuple[float, ...], msgspec.Meta(min_length=1, max_length=MAX_CANDIDATES)]
_Probabilities = Annotated[tuple[_Share, ...], msgspec.Meta(max_length=MAX_CANDIDATES + 1)]
_Slots = msgspec.Meta(max_length=MAX_PROPOSALS)
_Rows = msgspec.Meta(max_length=MAX_PROPOSALS + 1)


class Cycle(_Line, frozen=True, tag="cycle"):
    """One cycle: k slots of K candidates, one path through them, k + 1 rows of the target, one verdict.

    Attributes:
        sequence_position: of the anchor: as many tokens as the target had consumed before.
        anchor_token_id: the last committed token.
        hidden_shape: of the rows that stay, and no others: [num_committed, ...]; 0 rows if none were wanted.
        hidden_payload_or_digest: their bytes (`base64:`), row by row, little-endian, or `xxh3-128:` of these.
        proposal_law: `rows`: token j was drawn from the probabilities of slot j; `point`: it was their best.
        candidate_token_ids: [k][K], distinct in a slot.
        candidate_probabilities_or_logits: [k][K]: probabilities for `rows`, scores of any scale for `point`.
        selected_candidate_path: for every slot the index of the candidate that was proposed.
        target_token_probabilities_or_digest: what the target thought after all processing: in row j the
            probability of every candidate of slot j, and in the row of `bonus_token` its own after them; or
            `xxh3-128:` of the logits as float32.
        target_logits: all rows before processing, where they are few; else null.
        accepted_prefix_length: proposals accepted.
        bonus_token: the target's own token after these: a correction, or the bonus after all of them.
        num_committed: how many of accepted proposals and bonus the answer took; it may have ended inside.
    """

    schema_version: _Count
    target_model_revision: _Name
    tokenizer_revision: _Name
    request_owner: _Count
    request_generation: _Count
    sequence_position: _Count
    anchor_token_id: _Token
    captured_stage: _Name
    captured_layer_ids: _Layers
    hidden_dtype: _Name
    hidden_shape: _Shape
    hidden_payload_or_digest: str
    proposal_law: Literal["point", "rows"]
    candidate_token_ids: Annotated[tuple[_Candidates, ...], _Slots]
    candidate_probabilities_or_logits: Annotated[tuple[_Values, ...], _Slots]
    selected_candidate_path: Annotated[tuple[_Count, ...], _Slots]
    target_token_probabilities_or_digest: Annotated[tuple[_Probabilities, ...], _Rows] | _Name
    target_logits: Annotated[tuple[tuple[float, ...], ...], _Rows] | None
    accepted_prefix_length: _Count
    bonus_token: _Token
    num_committed: _Count
    routes: Annotated[tuple[Route, ...], msgspec.Meta(max_length=2 * MAX_LAYERS)]
    digest: _Name = ""

    @property
    def proposal(self) -> tuple[int, ...]:
        """Return the selected path's tokens."""
        pairs = zip(self.candidate_token_ids, self.selected_candidate_path, strict=True)
        return tuple(candidates[index] for candidates, index in pairs)

    @property
    def committed(self) -> tuple[int, ...]:
        """Return the tokens the answer took."""
        tokens = (*self.proposal[: self.accepted_prefix_length], self.bonus_token)
        return tokens[: self.num_committed]


class End(_Line, frozen=True, tag="end"):
    """The end of an answer, and what its lines add up to; see `record_check.Totals`.

    Attributes:
        num_cycles: lines of cycles.
        num_committed_tokens: of the answer.
        sequence_digest: of prompt and answer as int32.
        candidates_digest: of every slot's candidates and their values.
        target_digest: of all logits that were kept.
        routes_digest: of all routes in native rank order, and of all guesses in the order they were made.
        draft_context_digest: of the hidden rows that the draft was handed: those that stayed, in order.
        path_log_probability: of all selected candidates among their own, natural logarithm.
        num_predictions, num_right_predictions: guesses for blocks that ran, and those that a row chose.
        prediction_brier: sum over these guesses of (confidence - right) squared.
    """

    num_cycles: _Count
    num_committed_tokens: _Count
    sequence_digest: _Name
    candidates_digest: _Name
    target_digest: _Name
    routes_digest: _Name
    draft_context_digest: _Name
    path_log_probability: float
    num_predictions: _Count
    num_right_predictions: _Count
    prediction_brier: float
    digest: _Name = ""


Line = Header | Answer | PromptPiece | Cycle | End

_decoder = msgspec.json.Decoder(Line)
_encoder = msgspec.json.Encoder()
_UNSEALED: Final = b'"digest":""}'


def sealed(line: Line, before: str) -> tuple[bytes, str]:
    """Return a line with its digest, newline included, and that digest.

    Args:
        line: its own `digest` is not looked at.
        before: digest of the line before; empty for the first.

    Raises:
        TraceRefused: it is longer than a line may be.
    """
    open_line = _encoder.encode(msgspec.structs.replace(line, digest=""))
    digest = xxhash.xxh3_128_hexdigest(before.encode() + open_line)
    data = open_line[: -len(_UNSEALED)] + b'"digest":"' + digest.encode() + b'"}\n'
    if len(data) > MAX_LINE_BYTES:
        raise TraceRefused(f"a line would have {len(data)} bytes, more than {MAX_LINE_BYTES}")
    return data, digest


def parse_line(data: bytes, before: str) -> Line:
    """Return one line of a file, newline included.

    Raises:
        TraceRefused: it is no such line, not in its one spelling, or its digest is not of it.
    """
    try:
        line = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceRefused(f"not a line of a trace: {str(error)[:200]}") from None
    wanted, digest = sealed(line, before)
    if line.digest != digest:
        raise TraceRefused("its digest is not of this line after the one before it")
    if data != wanted:
        raise TraceRefused("not in the one spelling that lines have")
    return line


def at_line(number: int, error: TraceRefused) -> TraceRefused:
    """Return the same refusal with the line's number before it."""
    return type(error)(f"line {number}: {error}")


def raw_lines(stream: BinaryIO) -> Iterator[Line]:
    """Yield lines, each parsed; what they mean together is not looked at.

    Raises:
        TraceRefused: names the line.
    """
    before, number = "", 0
    while data := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(data) > MAX_LINE_BYTES:
            raise TraceRefused(f"line {number}: longer than {MAX_LINE_BYTES} bytes")
        if not data.endswith(b"\n"):
            raise TraceRefused(f"line {number}: cut short")
        try:
            line = parse_line(data, before)
        except TraceRefused as error:
            raise at_line(number, error) from None
        before = line.digest
        yield line


class TraceWriter:
    """Appends lines to a stream.

    Args:
        stream: opened for writing, empty.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._before = ""
        self.num_lines = 0

    def write(self, line: Line) -> None:
        """Append a line.

        Raises:
            TraceRefused: it is too long. Nothing was written.
            OSError: of the stream.
        """
        data, self._before = sealed(line, self._before)
        self._stream.write(data)
        self.num_lines += 1

    def flush(self) -> None:
        """Hand what was written to the system."""
        self._stream.flush()


def open_trace(path: Path) -> BinaryIO:
    """Open a trace for reading; only regular files are.

    Raises:
        TraceRefused: it is something else.
        OSError: it cannot be opened.
    """
    if not path.is_file():
        path.stat()
        raise TraceRefused("not a regular file")
    return path.open("rb")
