"""The proposal record: round trips, golden traces, lies, and every field changed in turn."""

import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from drafter.api import DraftSampling
from drafter.errors import DrafterError
from drafter.record import (
    MAX_LINE_BYTES,
    Answer,
    Cycle,
    End,
    Line,
    Route,
    TraceRefused,
    open_trace,
    raw_lines,
)
from drafter.record_check import Identity, checked_lines, read_trace
from drafter.replay import ReplayDrafter, recorded_proposals
from expert_store.prefetch import Prefetcher
from mlx_flashnext.engine import verify as verification
from mlx_flashnext.engine.cycle import Timeline
from mlx_flashnext.engine.drafting import Wants
from mlx_flashnext.state import Block
from mlx_flashnext.traces.replay import replay_trace
from tests.golden.traces import generate

GREEDY = DraftSampling(0.0, 0, 0)
GOLDEN = Path(generate.__file__).parent
NAMES = [case.name for case in generate.CASES]
LIES = {
    "other-target": "line 5: target_model_revision is 'another-target', 'golden-target' of the header",
    "other-tokenizer": "line 5: tokenizer_revision is 'another-tokenizer'",
    "other-vocabulary": "target_logits are not 4 rows of the vocabulary's 32",
    "other-hidden-shape": r"line 4: hidden_shape is \(4, 4\), \(3, 4\) of the rows that stay",
    "other-hidden-type": "hidden_dtype is 'float16', 'bfloat16' of the header",
    "other-layers": r"captured_layer_ids is \(0, 3\), \(1, 3\) of the header",
    "other-stage": "captured_stage is 'last_stack', 'layer_output' of the header",
    "other-owner": "request_owner is 8, 7 of the request",
    "other-generation": "request_generation is 9, 4 comes next",
    "other-ticket-owner": "prefetch_ticket_owner is 8, 7 of the request",
    "other-ticket-generation": "prefetch_ticket_generation is 3, that of the block 4",
    "ticket-not-cancelled": r"layer 0: cancelled_expert_ids is \(3,\) in the record, \(3, 15\) when replayed",
    "one-accepted-too-many": r"bonus_token is \(2, 22\) in the record, \(1, 22\) when replayed",
    "one-accepted-too-few": r"bonus_token is \(0, 22\) in the record, \(1, 22\) when replayed",
    "wrong-bonus": "anchor_token_id is 16, 17 the last committed token",
    "wrong-last-bonus": r"bonus_token is \(0, 21\) in the record, \(0, 20\) when replayed",
    "wrong-correction": r"bonus_token is \(0, 12\) in the record, \(0, 11\) when replayed",
    "wrong-path": "slot 0: selected_candidate_path does not take the best candidate",
    "rejected-row-kept": r"hidden_shape is \(3, 4\), \(2, 4\) of the rows that stay",
    "later-version": "line 1: schema_version is 2, 1 of this program",
}


def golden(name: str) -> bytes:
    return (GOLDEN / f"{name}.jsonl").read_bytes()


def lines_of(data: bytes) -> list[Line]:
    return read_trace(io.BytesIO(data))


def refusal(data: bytes) -> str | None:
    """Return why a trace is refused, by the checker or by the replay; None if it is not."""
    try:
        replay_trace(io.BytesIO(data))
    except TraceRefused as error:
        return str(error)
    return None


# Golden.


def test_the_golden_files_are_what_the_generator_makes():
    made = generate.files()
    assert sorted(made) == sorted(path.name for path in GOLDEN.glob("*.jsonl"))
    for name, data in made.items():
        assert (GOLDEN / name).read_bytes() == data, name


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_trace_is_accepted_and_says_what_was_planned(name):
    data = golden(name)
    outcome = replay_trace(io.BytesIO(data))
    case = next(case for case in generate.CASES if case.name == name)
    cycles = [line for line in lines_of(data) if isinstance(line, Cycle)]
    assert outcome.num_cycles == len(case.plan)
    assert [len(line.proposal) for line in cycles] == [proposed for proposed, _ in case.plan]
    if case.rule in ("auto", "coupled"):
        assert [line.accepted_prefix_length for line in cycles] == [right for _, right in case.plan]
    assert outcome.num_committed == sum(line.num_committed for line in cycles)
    assert (outcome.num_cancelled_tickets > 0) == case.routes


def test_the_golden_traces_cover_none_some_and_all_under_every_rule():
    seen = set()
    for name in NAMES:
        lines = lines_of(golden(name))
        rule = next(line.rule for line in lines if isinstance(line, Answer))
        for line in lines:
            if isinstance(line, Cycle) and line.proposal:
                accepted, proposed = line.accepted_prefix_length, len(line.proposal)
                kind = "all" if accepted == proposed else "some" if accepted else "none"
                seen.add((rule, kind))
    assert {(rule, kind) for rule in ("coupled", "delta", "sampled") for kind in ("none", "some")} <= seen
    assert ("coupled", "all") in seen


def test_several_candidates_stand_at_every_position_and_one_path_is_verified():
    lines = [line for line in lines_of(golden("several-candidates")) if isinstance(line, Cycle)]
    for line in lines:
        assert all(len(candidates) == 4 for candidates in line.candidate_token_ids)
        slots = zip(line.candidate_token_ids, line.selected_candidate_path, strict=True)
        assert line.proposal == tuple(candidates[index] for candidates, index in slots)
        assert len(line.target_logits or ()) == len(line.proposal) + 1


@pytest.mark.parametrize("name", sorted(generate.LIES))
def test_a_trace_that_lies_is_refused_with_the_field_and_both_values(name):
    assert set(LIES) == set(generate.LIES)
    with pytest.raises(TraceRefused, match=LIES[name]):
        replay_trace(io.BytesIO(golden(f"refused-{name}")))


@pytest.mark.parametrize(
    ("identity", "field"),
    [
        (Identity(target_model_revision="mine"), "target_model_revision"),
        (Identity(tokenizer_revision="mine"), "tokenizer_revision"),
        (Identity(vocab_size=25), "vocab_size"),
        (Identity(draft_digest="mine"), "draft_digest"),
    ],
)
def test_a_trace_of_something_else_is_refused_as_a_whole(identity, field):
    with pytest.raises(TraceRefused, match=f"line 1: {field} is"):
        list(checked_lines(io.BytesIO(golden("everything")), identity))


def test_the_record_has_every_field_that_readers_were_promised():
    of_cycle = (
        "schema_version target_model_revision tokenizer_revision request_owner request_generation "
        "sequence_position captured_stage captured_layer_ids hidden_dtype hidden_shape "
        "hidden_payload_or_digest candidate_token_ids candidate_probabilities_or_logits "
        "selected_candidate_path target_token_probabilities_or_digest accepted_prefix_length bonus_token"
    )
    of_routes = (
        "target_route_layer target_top_k target_expert_ids_in_native_rank_order predicted_expert_ids "
        "prediction_confidence prefetch_ticket_owner prefetch_ticket_generation"
    )
    of_answer = "rule seed temperature top_k top_p min_p logit_bias processors draft_digest"
    for kind, names in ((Cycle, of_cycle), (Route, of_routes), (Answer, of_answer)):
        assert set(names.split()) <= set(kind.__struct_fields__)


def test_a_digest_of_the_logits_may_stand_for_probabilities_and_is_held_against_them():
    lines = lines_of(golden("accept-some"))

    def told(flip: int) -> bytes:
        changed = list(lines)
        for number, line in enumerate(lines):
            if isinstance(line, Cycle):
                table = np.array(line.target_logits, np.float32)
                digest = f"{int(xxhash.xxh3_128_hexdigest(table.tobytes()), 16) ^ flip:032x}"
                changed[number] = msgspec.structs.replace(
                    line, target_token_probabilities_or_digest=f"xxh3-128:{digest}"
                )
        return generate.resealed(changed)

    assert refusal(told(0)) is None
    assert "target_token_probabilities_or_digest is 'xxh3-128:" in str(refusal(told(1)))


# Mutations. Digests are made anew, so that what refuses is the meaning of the field.


def mutations(value: Any) -> Iterator[Any]:
    """Yield other values of the same kind."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
        if value:
            yield value - 1
    elif isinstance(value, float):
        yield value * 0.5 + 0.0625
        yield value + 0.25
    elif isinstance(value, str):
        yield value + "0"
        yield value[:-1] + ("B" if value[-1:] == "A" else "A")
    elif value is None:
        yield 1
        yield []
    elif isinstance(value, list):
        yield [*value, *value[-1:]] if value else [0]
        if value:
            yield value[:-1]
            yield None
        if len(value) > 1 and value[0] != value[-1]:
            yield [value[-1], *value[1:-1], value[0]]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of a document; of a long list the first, the last and one between."""
    if path:
        yield path
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = [(key, value[key]) for key in value if key not in ("kind", "digest")]
    elif isinstance(value, list):
        places = sorted({0, len(value) // 2, len(value) - 1}) if value else []
        items = [(place, value[place]) for place in places]
    for key, inner in items:
        yield from leaves(inner, (*path, key))


def mutants(data: bytes, *, with_sums: bool = False, most: int = 1 << 30) -> Iterator[tuple[str, str, bytes]]:
    """Yield traces of which one leaf was changed, sealed again: a name, the field, and the trace.

    Args:
        data: a golden trace.
        with_sums: make what the lines add up to agree as well.
        most: of each field of each kind of line, counted over all lines and places.
    """
    lines = list(raw_lines(io.BytesIO(data)))
    tried: Counter[tuple[type, str]] = Counter()
    for number, line in enumerate(lines):
        if with_sums and isinstance(line, End):
            continue  # it is what is made to agree
        plain = msgspec.json.encode(line)
        for path in leaves(msgspec.json.decode(plain)):
            field = ".".join(step for step in path if isinstance(step, str))
            at = msgspec.json.decode(plain)
            for step in path:
                at = at[step]
            for other in (other for other in mutations(at) if other != at):
                if tried[type(line), field] >= most:
                    break
                document = msgspec.json.decode(plain)
                inner = document
                for step in path[:-1]:
                    inner = inner[step]
                inner[path[-1]] = other
                try:
                    changed = msgspec.convert(document, type(line))
                except msgspec.ValidationError:
                    continue  # refused by its type; such files are made by the fuzzer
                tried[type(line), field] += 1
                name = f"line {number + 1} {'.'.join(map(str, path))}: {at!r:.40} -> {other!r:.40}"
                told = [*lines[:number], changed, *lines[number + 1 :]]
                if with_sums:
                    try:
                        told = generate.with_sums(told)
                    except (TraceRefused, ValueError, IndexError):
                        continue  # what cannot be added up is refused in the other test
                yield name, field, generate.resealed(told)


# What a model, a drafter or a predictor computed, or a person asked for. If the sums at the end are made to
# agree, another trace results, of which only the outcome is different. Everything else stays refused.
INPUTS = (
    "rule",
    "seed",
    "temperature",
    "top_",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "penalty_context",
    "logit_bias",
    "token_ids",
    "hidden_payload_or_digest",
    "candidate_token_ids",
    "candidate_probabilities_or_logits",
    "target_logits",
    "target_expert_ids",
    "predicted_expert_ids",
    "prediction_confidence",
    "selected_candidate_path",  # of drawn proposals: any candidate may have been drawn
    "num_committed",  # of the last cycle: where the answer ends
    "routes",  # one more, one less, in another order
)


MOST_MUTANTS = 6
"""Of a field in a test; `bench.studies.mutate_traces` tries every place."""


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_every_golden_trace_matters(name):
    check_every_field(name, MOST_MUTANTS)


@pytest.mark.parametrize("name", NAMES)
def test_if_the_sums_agree_a_changed_field_is_refused_for_what_it_means_or_the_outcome_is_another(name):
    check_meaning(name, MOST_MUTANTS // 2)


def check_every_field(name: str, most: int) -> int:
    """Change every field, digests made anew: each is refused. Return how many changes there were."""
    found = {mutant: refusal(data) for mutant, _, data in mutants(golden(name), most=most)}
    assert [mutant for mutant, reason in found.items() if reason is None] == []
    assert not [reason for reason in found.values() if "digest is not of this line" in str(reason)]
    return len(found)


def check_meaning(name: str, most: int) -> int:
    """Change every field and make sums agree: it is refused for its meaning, or tells of another outcome."""
    before, count = outcome_of(golden(name)), 0
    for mutant, field, data in mutants(golden(name), with_sums=True, most=most):
        count += 1
        reason = refusal(data)
        if reason is None:
            assert field.rpartition(".")[2].startswith(INPUTS), mutant
            assert outcome_of(data) != before, mutant
        else:
            assert "digest is not of this line" not in reason, mutant
            assert "that the lines add up to" not in reason, mutant
    return count


def outcome_of(data: bytes) -> list[End]:
    return [msgspec.structs.replace(line, digest="") for line in lines_of(data) if isinstance(line, End)]


# Faults of the product: the golden traces find each of them.


def keep_one_row_more(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Block.commit
    monkeypatch.setattr(
        Block, "commit", lambda self, rows=None: commit(self, min(self.num_rows, (rows or self.num_rows) + 1))
    )


def hand_over_rejected_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Wants.seen
    monkeypatch.setattr(Wants, "seen", lambda self, output, num_rows: seen(self, output, num_rows + 1))


def accept_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    real = verification._walk
    monkeypatch.setattr(
        verification,
        "_walk",
        lambda drafted, accepts, ends: real(drafted, [True, *list(accepts)[1:]], ends),
    )


def take_the_bonus_of_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    real = verification._walk

    def walk(drafted, accepts, ends):
        verdict = real(drafted, accepts, ends)
        return verification.Verdict(verdict.accepted, (*verdict.tokens[:-1], ends[-1]))

    monkeypatch.setattr(verification, "_walk", walk)


def cancel_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefetcher, "_cancel", lambda self, tickets: None)


def forget_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Timeline._advance

    def stay(self, consumed):
        advance(self, consumed)
        self.generation -= 1

    monkeypatch.setattr(Timeline, "_advance", stay)


FAULTS = [
    (keep_one_row_more, "accept-some"),
    (keep_one_row_more, "bonus-token"),
    (hand_over_rejected_rows, "rollback-of-features"),
    (hand_over_rejected_rows, "rollback-of-the-stack"),
    (accept_one_more, "accept-none"),
    (take_the_bonus_of_the_last_row, "whole-block"),
    (cancel_nothing, "tickets"),
    (forget_the_generation, "tickets"),
]


@pytest.mark.parametrize(("plant", "name"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_fault_of_the_product_is_found(plant, name, monkeypatch):
    assert refusal(golden(name)) is None
    plant(monkeypatch)
    assert refusal(golden(name)) is not None


# The reader.


def first_line() -> bytes:
    return golden("accept-all").splitlines(keepends=True)[0]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no line at all"),
        (b"\n", "line 1: not a line of a trace"),
        (b"{}\n", "line 1: not a line of a trace"),
        (b"[" * 100_000 + b"\n", "line 1: not a line of a trace"),
        (b"x" * (MAX_LINE_BYTES + 1), "line 1: longer than"),
        (first_line()[:-1], "line 1: cut short"),
        (first_line().replace(b'":', b'": ', 1), "line 1: not in the one spelling"),
        (first_line().replace(b"{", b'{"vocab_size":24,', 1), "line 1: not in the one spelling"),
        (first_line().replace(b"{", b'{"more":1,', 1), "unknown field"),
        (first_line().replace(b"golden-target", b"golden-targes"), "line 1: its digest"),
        (first_line() * 2, "line 2: its digest"),
    ],
    ids=range(11),
)
def test_a_file_that_is_no_trace_is_refused_with_the_line(data, reason):
    with pytest.raises(TraceRefused, match=reason):
        read_trace(io.BytesIO(data))


def test_a_number_of_any_length_does_not_fill_the_screen():
    header, answer, *_ = lines_of(golden("accept-all"))
    reason = str(refusal(generate.resealed([header, msgspec.structs.replace(answer, seed=10**400)])))
    assert "line 2: seed is beyond 64 bits: 1000" in reason
    assert max(map(len, reason.split())) < 160, reason


def test_a_trace_cut_anywhere_is_refused():
    data = golden("accept-none")
    ends = [at + 1 for at, byte in enumerate(data) if byte == 10]
    for cut in sorted({*range(0, len(data), 97), *ends[:-1], *(end - 1 for end in ends)}):
        with pytest.raises(TraceRefused):
            read_trace(io.BytesIO(data[:cut]))


def test_a_line_that_was_taken_out_moved_or_doubled_is_refused():
    lines = golden("accept-all").splitlines(keepends=True)
    for number in range(len(lines)):
        without = [*lines[:number], *lines[number + 1 :]]
        for told in (without, [*lines[: number + 1], *lines[number:]], [lines[number], *without]):
            if told != lines:
                assert refusal(b"".join(told)) is not None, number


def test_logits_beyond_float32_are_refused():
    lines = lines_of(golden("accept-some"))
    number = next(number for number, line in enumerate(lines) if isinstance(line, Cycle))
    rows = [list(row) for row in lines[number].target_logits]
    rows[0][3] = -1e39
    lines[number] = msgspec.structs.replace(lines[number], target_logits=tuple(map(tuple, rows)))
    with pytest.raises(TraceRefused, match=r"target_logits beyond float32: -1e\+39"):
        read_trace(io.BytesIO(generate.resealed(generate.with_sums(lines))))


def test_only_regular_files_are_opened(tmp_path):
    with pytest.raises(TraceRefused, match="not a regular file"):
        open_trace(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_trace(tmp_path / "none")


# The replay drafter.


def test_a_replay_drafter_proposes_what_was_recorded_at_the_same_length_and_nothing_elsewhere():
    lines = lines_of(golden("several-candidates"))
    cycles = {line.sequence_position: line for line in lines if isinstance(line, Cycle)}
    drafter = ReplayDrafter(recorded_proposals(lines))
    assert drafter.max_proposals() == 3
    for position in range(max(cycles) + 2):
        wanted = cycles[position].proposal if position in cycles else ()
        for k in (0, 1, 3, 9):
            assert drafter.propose(k, GREEDY).tokens == wanted[:k]
        drafter.observe([0], 0)
    drafter.restore(min(cycles))
    assert drafter.propose(3, GREEDY).tokens == cycles[min(cycles)].proposal
    with pytest.raises(DrafterError):
        drafter.restore(max(cycles) + 99)
    assert drafter.num_missing == 4 * sum(position not in cycles for position in range(max(cycles) + 2))


def test_recorded_rows_are_handed_over_only_if_they_are_asked_for():
    lines = lines_of(golden("one-coherent-path"))
    position = next(line.sequence_position for line in lines if isinstance(line, Cycle))
    assert recorded_proposals(lines)[position].law == "point"
    kept = recorded_proposals(lines, keeps_law=True)[position]
    assert (kept.law, kept.row_ids.shape, kept.row_probs.shape) == ("rows", (3, 4), (3, 4))
