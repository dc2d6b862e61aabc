"""Records and rows lie where the layouts say, and never outside a file."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_store.errors import CheckpointCorrupt
from expert_store.layout import ReadOp, RecordLayout, RowLayout, RowPart, Span, StackedComponent
from expert_store.safetensors_index import TensorInfo


def test_a_stack_is_split_evenly_over_the_experts():
    layout = RecordLayout.stacked(
        3, 4, [("weight", Span(0, 100, 400)), ("scales", Span(1, 8, 40))], file_sizes=[500, 48]
    )
    assert (layout.layer, layout.num_experts, layout.record_bytes) == (3, 4, 110)
    assert (layout.component_names, layout.component_lengths) == (("weight", "scales"), (100, 10))
    assert layout.spans(2) == (Span(0, 300, 100), Span(1, 28, 10))
    assert layout.reads(2) == (ReadOp(0, 300, 100, 0, 1), ReadOp(1, 28, 10, 1, 2))


def test_a_tensor_of_a_table_is_a_stack():
    info = TensorInfo("w", "U8", (4, 10), 0, 16, 40)
    assert RecordLayout.stacked(0, 4, [("w", info)], file_sizes=[56]).spans(3) == (Span(0, 46, 10),)


def test_the_two_halves_of_a_fused_tensor_become_one_read():
    gate = StackedComponent("gate", 0, 1000, 60, 0, 30)
    up = StackedComponent("up", 0, 1000, 60, 30, 30)
    layout = RecordLayout.stacked(0, 5, [gate, up, ("down", Span(1, 0, 50))], file_sizes=[1300, 50])
    assert layout.spans(1) == (Span(0, 1060, 30), Span(0, 1090, 30), Span(1, 10, 10))
    assert layout.reads(1) == (ReadOp(0, 1060, 60, 0, 2), ReadOp(1, 10, 10, 2, 3))


def test_components_that_follow_each_other_the_wrong_way_round_are_not_joined():
    late = StackedComponent("up", 0, 0, 60, 30, 30)
    early = StackedComponent("gate", 0, 0, 60, 0, 30)
    assert len(RecordLayout.stacked(0, 2, [late, early], file_sizes=[120]).reads(0)) == 2


def test_listed_tensors_lie_anywhere():
    weight = [Span(0, 50, 10), Span(1, 0, 10), Span(0, 0, 10)]
    scale = [Span(0, 60, 2), Span(1, 10, 2), Span(1, 12, 2)]
    layout = RecordLayout.listed(0, [("weight", weight), ("scale", scale)], file_sizes=[62, 14])
    assert layout.num_experts == 3
    assert layout.spans(2) == (Span(0, 0, 10), Span(1, 12, 2))
    assert [len(layout.reads(expert)) for expert in range(3)] == [1, 1, 2]


@pytest.mark.parametrize("expert", [-1, 4])
def test_an_expert_that_is_not_there_is_refused(expert):
    layout = RecordLayout.stacked(0, 4, [("w", Span(0, 0, 8))], file_sizes=[8])
    with pytest.raises(IndexError, match=f"expert {expert} of 4"):
        layout.spans(expert)


@pytest.mark.parametrize(
    "build",
    [
        lambda: RecordLayout.stacked(0, 4, [("w", Span(0, 0, 9))], file_sizes=[9]),
        lambda: RecordLayout.stacked(0, 4, [("w", Span(0, 1, 8))], file_sizes=[8]),
        lambda: RecordLayout.stacked(0, 4, [("w", Span(1, 0, 8))], file_sizes=[8]),
        lambda: RecordLayout.stacked(0, 4, [("w", Span(-1, 0, 8))], file_sizes=[8]),
        lambda: RecordLayout.stacked(0, 4, [("w", Span(0, -8, 8))], file_sizes=[8]),
        lambda: RecordLayout.stacked(0, 4, [("w", Span(0, 0, 0))], file_sizes=[8]),
        lambda: RecordLayout.stacked(0, 0, [("w", Span(0, 0, 8))], file_sizes=[8]),
        lambda: RecordLayout.stacked(0, 4, [], file_sizes=[8]),
        lambda: RecordLayout.stacked(0, 2, [StackedComponent("w", 0, 0, 4, 2, 3)], file_sizes=[8]),
        lambda: RecordLayout.stacked(0, 2, [StackedComponent("w", 0, 0, 4, -1, 3)], file_sizes=[8]),
        lambda: RecordLayout.stacked(0, 2, [StackedComponent("w", 0, 0, 6, 2, 4)], file_sizes=[11]),
        lambda: RecordLayout.listed(0, [("w", [Span(0, 0, 4), Span(0, 4, 5)])], file_sizes=[9]),
        lambda: RecordLayout.listed(0, [("w", [Span(0, 0, 4), Span(0, 5, 4)])], file_sizes=[8]),
        lambda: RecordLayout.listed(0, [("w", [Span(0, 0, 4)]), ("s", [])], file_sizes=[8]),
        lambda: RecordLayout.listed(0, [], file_sizes=[8]),
        lambda: RowLayout(["w"], [RowPart(3, (Span(0, 0, 8),))], file_sizes=[8]),
        lambda: RowLayout(["w"], [RowPart(4, (Span(0, 1, 8),))], file_sizes=[8]),
        lambda: RowLayout(
            ["w"], [RowPart(4, (Span(0, 0, 8),)), RowPart(4, (Span(0, 0, 4),))], file_sizes=[8]
        ),
        lambda: RowLayout(["w", "s"], [RowPart(4, (Span(0, 0, 8),))], file_sizes=[8]),
        lambda: RowLayout(["w"], [RowPart(0, (Span(0, 0, 0),))], file_sizes=[8]),
        lambda: RowLayout(["w"], [], file_sizes=[8]),
        lambda: RowLayout(["w", "s"], [RowPart(4, (Span(0, 0, 8),), (1, 2))], file_sizes=[8]),
        lambda: RowLayout(["w", "s"], [RowPart(4, (Span(0, 0, 8),), (2,))], file_sizes=[8]),
        lambda: RowLayout(["w", "s"], [RowPart(4, (Span(0, 0, 8),), (2, 0))], file_sizes=[8]),
        lambda: RowLayout(["w", "s"], [RowPart(4, (Span(0, 0, 8),), (3, -1))], file_sizes=[8]),
        lambda: RowLayout(["w", "s"], [RowPart(4, (Span(0, 1, 8),), (1, 1))], file_sizes=[8]),
        lambda: RowLayout(["w", "s"], [RowPart(4, (Span(0, 0, 4), Span(0, 4, 4)), (1, 1))], file_sizes=[8]),
        lambda: RowLayout(
            ["w", "s"],
            [RowPart(2, (Span(0, 0, 4),), (1, 1)), RowPart(2, (Span(0, 4, 6),), (1, 2))],
            file_sizes=[10],
        ),
    ],
)
def test_what_does_not_fit_its_file_is_refused_at_once(build):
    with pytest.raises(CheckpointCorrupt) as caught:
        build()
    assert caught.value.hint


@given(st.data())
def test_reads_cover_the_spans_exactly_and_in_component_order(data):
    num_experts = data.draw(st.integers(1, 4))
    spans = st.builds(Span, st.integers(0, 1), st.integers(0, 5).map(lambda n: 10 * n), st.just(10))
    count = data.draw(st.integers(1, 5))
    components = [
        (f"c{number}", data.draw(st.lists(spans, min_size=num_experts, max_size=num_experts)))
        for number in range(count)
    ]
    layout = RecordLayout.listed(0, components, file_sizes=[60, 60])
    for expert in range(num_experts):
        found = []
        reads = layout.reads(expert)
        for read in reads:
            offset = read.offset
            for component in range(read.first, read.end):
                found.append(Span(read.file, offset, layout.component_lengths[component]))
                offset += layout.component_lengths[component]
            assert offset == read.offset + read.length
        assert tuple(found) == layout.spans(expert)
        for before, after in itertools.pairwise(reads):
            assert (before.file, before.offset + before.length) != (after.file, after.offset)


def test_components_of_a_row_may_lie_side_by_side():
    parts = [RowPart(2, (Span(0, 10, 16),), (5, 2, 1)), RowPart(1, (Span(1, 3, 8),), (5, 2, 1))]
    layout = RowLayout(["w", "s", "b"], parts, file_sizes=[26, 11])
    assert (layout.row_bytes, layout.component_lengths, layout.reads_per_row) == (8, (5, 2, 1), 1)
    assert [layout.spans(row) for row in range(3)] == [
        (Span(0, 10, 5), Span(0, 15, 2), Span(0, 17, 1)),
        (Span(0, 18, 5), Span(0, 23, 2), Span(0, 25, 1)),
        (Span(1, 3, 5), Span(1, 8, 2), Span(1, 10, 1)),
    ]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_rows_run_through_the_parts_in_order(sizes):
    parts, offset = [], 0
    expected = []
    for size in sizes:
        parts.append(RowPart(size, (Span(0, offset, 6 * size), Span(1, offset, 2 * size))))
        expected += [(Span(0, offset + 6 * row, 6), Span(1, offset + 2 * row, 2)) for row in range(size)]
        offset += 6 * size + 5
    layout = RowLayout(["w", "s"], parts, file_sizes=[offset, offset])
    assert (layout.num_rows, layout.row_bytes, layout.component_lengths) == (sum(sizes), 8, (6, 2))
    assert [layout.spans(row) for row in range(layout.num_rows)] == expected
    with pytest.raises(IndexError):
        layout.spans(layout.num_rows)
