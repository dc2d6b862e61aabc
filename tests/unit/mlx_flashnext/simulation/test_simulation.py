"""Recorded routes played through a virtual store: hits are a real engine's, times are arithmetic."""

import io
import itertools
import random
from dataclasses import replace

import pytest

from drafter.record_check import read_trace
from expert_store.keys import WaitCause
from expert_store.simulate import Drive, plain_layouts
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.errors import InvalidRequest, TargetDiffers
from mlx_flashnext.engine.guess import Guess
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.predictors import NearGate, Oracle, Previous
from mlx_flashnext.engine.routes import RouteLog
from mlx_flashnext.reports.measure import GREEDY, answer
from mlx_flashnext.reports.prompt_sets import chat_prompts, demo_tasks
from mlx_flashnext.simulation import simulation as simulation_module
from mlx_flashnext.simulation.simulated_machine import FREE, Compute, MachineForeign, SimulatedMachine
from mlx_flashnext.simulation.simulated_report import Sweep, sweep
from mlx_flashnext.simulation.simulated_routes import (
    NoRoutes,
    blocks_of_passes,
    blocks_of_trace,
    has_guesses,
    in_width,
    routes_by_position,
    scaled,
)
from mlx_flashnext.simulation.simulation import NgramReads, RecordedGuesses, RoutedBlock, Simulation
from mlx_flashnext.tokenizer import Tokenizer
from mlx_flashnext.traces.recording import Recorder, TraceSettings

US = 1000
COUNTS = ("num_demands", "num_hits", "num_joined", "num_misses", "num_evictions")


def counts(statistics):
    return [tuple(getattr(layer, name) for name in COUNTS) for layer in statistics.layers]


@pytest.fixture(scope="module")
def demo():
    directory = demo_dir()
    return directory, chat_prompts(directory, Tokenizer.open(directory), demo_tasks()[:1])[0]


@pytest.fixture(scope="module")
def spoken(demo):
    """An answer with proposals, many rejected: its blocks, and what the store of the engine counted."""
    directory, prompt = demo
    request = PlanRequest(
        context_tokens=len(prompt) + 40, slots_per_layer=17, draft="lookup", num_draft_tokens=3
    )
    with Engine.open(directory, request) as engine:
        log = RouteLog()
        session = engine.session(is_guarded=False, hints=Hints(None, engine.config.num_hidden_layers, log))
        answer(session, prompt, 0)
        num_prefill = len(log.passes)
        list(session.generate(prompt, GREEDY, max_tokens=32))
        layouts = {layer: one.record for layer, one in engine.checkpoint.experts.items()}
        blocks = blocks_of_passes(log.passes, num_prefill)
        return layouts, blocks, counts(engine.target.store.statistics())


def played(layouts, blocks, slots=17, predictor=None, machine=FREE):
    simulation = Simulation(layouts, machine, slots=dict.fromkeys(layouts, slots), widest=4, top_k=4)
    simulation.begin_answer(predictor)
    result = simulation.play(blocks)
    simulation.settle()
    found = counts(simulation.store.statistics())
    simulation.close()
    return result, found


def test_every_hit_and_miss_is_the_engines(spoken):
    layouts, blocks, real = spoken
    assert any(len({e for row in rows for e in row}) > 17 for b in blocks for rows in b.routes.values())
    assert any(block.num_kept < block.num_rows for block in blocks)
    slow = SimulatedMachine("slow", Drive(1e6, 20 * US, 10 * US, 10 * US), Compute(100 * US))
    for machine in (FREE, slow):  # without hints, no time can change what is found
        assert played(layouts, blocks, machine=machine)[1] == real


@pytest.mark.parametrize("fault", ["keeps all rows", "counts at once", "no groups of half", "other order"])
def test_a_driver_that_strays_from_the_engine_is_seen(spoken, fault, monkeypatch):
    """Planted faults: each of them changes which records leave, and so the hits."""
    layouts, blocks, real = spoken
    if fault == "keeps all rows":
        blocks = [replace(block, num_kept=block.num_rows) for block in blocks]
    elif fault == "counts at once":
        blocks = [replace(block, is_prefill=True) for block in blocks]
    elif fault == "no groups of half":
        monkeypatch.setattr(simulation_module, "sorted", lambda ids: sorted(ids)[:17], raising=False)
    else:
        monkeypatch.setattr(simulation_module, "sorted", lambda ids: sorted(ids, reverse=True), raising=False)
    assert played(layouts, blocks)[1] != real


def test_a_trace_has_the_blocks_that_ran(demo):
    directory, prompt = demo
    with Engine.open(directory, PlanRequest(context_tokens=len(prompt) + 20, slots_per_layer=16)) as engine:
        num_layers = engine.config.num_hidden_layers
        stream, log = io.BytesIO(), RouteLog()
        settings = TraceSettings(engine.checkpoint.digest, "of nobody", engine.config.vocab_size, num_layers)
        recorder = Recorder(stream, settings)
        session = engine.session(recorder=recorder, hints=Hints(NearGate(), num_layers, log))
        list(session.generate(prompt, GREEDY, max_tokens=8))
        assert not recorder.failure
    (blocks,) = blocks_of_trace(read_trace(io.BytesIO(stream.getvalue())))
    ran = [block for block in blocks_of_passes(log.passes) if block.position >= blocks[0].position]
    assert len(blocks) == len(ran) == 8
    assert has_guesses([blocks])
    for one, other in zip(blocks, ran, strict=True):
        assert (one.position, one.num_kept, one.num_rows) == (other.position, other.num_kept, other.num_rows)
        for layer, rows in one.routes.items():
            # A trace has the native rank order or any; what is demanded is the set.
            assert [sorted(row) for row in rows] == [sorted(row) for row in other.routes[layer]]
            said = {guess.expert for guess in one.guesses.get(layer, ())}
            assert said <= {guess.expert for guess in other.guesses.get(layer, ())}


# Blocks made by hand.


def blocks_of(routes, guesses=None):
    """One block of one row for each entry; an entry is the experts of each layer."""
    return [
        RoutedBlock(
            position,
            1,
            {layer: [experts] for layer, experts in enumerate(entry)},
            {} if guesses is None else guesses(position),
        )
        for position, entry in enumerate(routes)
    ]


def random_blocks(seed, num=40, num_layers=3, num_experts=16, top_k=3):
    chance = random.Random(seed)
    return blocks_of(
        [[sorted(chance.sample(range(num_experts), top_k)) for _ in range(num_layers)] for _ in range(num)]
    )


LAYOUTS = plain_layouts(dict.fromkeys(range(3), 16), 1000)


def test_time_is_what_the_machine_file_says():
    machine = SimulatedMachine(
        "m",
        Drive(1e6, num_readers=4),
        Compute(
            (100 * US, 200 * US, 300 * US),
            row_ns=7 * US,
            expert_ns=10 * US,
            sync_ns=20 * US,
            pass_ns=1000 * US,
        ),
    )
    block = RoutedBlock(0, 2, {layer: [[0, 1], [1, 2]] for layer in range(3)})
    result, _ = played(LAYOUTS, [block, replace(block, position=2)], 6, machine=machine)
    computing = 1000 + 600 + 3 * (7 + 20 + 3 * 10)
    reading = 3 * 3 * 1000  # three records of a millisecond in each layer, the first time
    assert result.wall_ns == (2 * computing + reading) * US
    assert result.store.exposed_wait_ns == reading * US
    assert (result.num_tokens, result.token_ns) == (4, result.wall_ns / 4)


@pytest.mark.parametrize("seed", range(4))
def test_who_knows_everything_and_computes_long_enough_is_never_late(seed):
    blocks = random_blocks(seed)
    machine = SimulatedMachine("m", Drive(1e6, 50 * US, num_readers=2), Compute(20_000 * US))
    known = [
        replace(block, guesses={at: [Guess(at, e) for e in rows[0]] for at, rows in block.routes.items()})
        for block in blocks
    ]
    plain = played(LAYOUTS, blocks, 8, None, machine)[0].store
    for predictor, of in ((Oracle(routes_by_position(blocks)), blocks), (RecordedGuesses(), known)):
        found = played(LAYOUTS, of, 8, predictor, machine)[0].store
        assert found.waits[WaitCause.LATE_HINT].total_ns == found.num_joined == 0
        # What is left: a guess took the slot of a record that the same demand wants, as LRU would have it.
        assert found.num_misses < plain.num_misses / 5
        assert found.exposed_wait_ns <= found.num_misses * 1_000_000


@pytest.mark.parametrize(("tell", "waited"), [(0, 0), (6_000, 0), (15_000, 5_000), (30_000, 10_000)])
def test_where_nothing_was_waited_for_hints_come_when_the_host_has_described_what_follows(tell, waited):
    """Reading takes 10 ms, a layer 20: what is told after 15 has 5 left, what is told at its end has none."""
    compute = Compute(20_000 * US, tell_ns=tell * US)
    machine = SimulatedMachine("m", Drive(1e5, num_readers=4), compute)
    blocks = [
        RoutedBlock(at, 1, {0: [[0]], 1: [[0]], 2: [[at]]}, {2: [Guess(2, at)]}, is_prefill=False)
        for at in range(6)
    ]
    result, _ = played(LAYOUTS, blocks[:1], 12, RecordedGuesses(), machine)
    first_ns = result.store.exposed_wait_ns  # layers 0 and 1 wait in the first block, and tell before that
    result, _ = played(LAYOUTS, blocks, 12, RecordedGuesses(), machine)
    assert result.store.exposed_wait_ns - first_ns == 5 * waited * US


@pytest.mark.parametrize("slots", [12, 4])
def test_a_layer_after_one_that_waited_takes_longer(slots):
    plain, slow = (
        SimulatedMachine("m", Drive(1e6), Compute(500 * US, woken_ns=woken * US)) for woken in (0, 70)
    )
    block = RoutedBlock(1, 3, {layer: [[0, 1], [2, 3], [4, 5]] for layer in range(3)})  # beyond four slots
    blocks = [replace(block, position=at) for at in (1, 4, 7)]
    quick_ns, slow_ns = (
        played(LAYOUTS, blocks, slots, machine=machine)[0].wall_ns for machine in (plain, slow)
    )
    # The first block's demands wait, and the second block's first layer follows the last of them; where six
    # experts do not fit, every demand waits, and nothing follows the last.
    assert slow_ns - quick_ns == (3 if slots == 12 else 8) * 70 * US


@pytest.mark.parametrize("place", [0, 2])
def test_rows_are_waited_for_by_the_layer_that_adds_them(place):
    """Rows of two tokens take 5 ms; no record is read meanwhile."""
    machine = SimulatedMachine("m", Drive(1e6), Compute(100 * US))
    blocks = [RoutedBlock(at, 2, {layer: [[0], [1]] for layer in range(3)}) for at in (1, 3)]
    times = []
    for ngram in (None, NgramReads(2500, place)):
        simulation = Simulation(LAYOUTS, machine, slots=dict.fromkeys(LAYOUTS, 12), ngram=ngram)
        simulation.begin_answer(None)
        simulation.play(blocks[:1])
        times.append(simulation.play(blocks[1:]))
        simulation.close()
    without, found = times
    assert found.wall_ns - without.wall_ns == (5000 - place * 100) * US
    assert found.store.exposed_wait_ns == without.store.exposed_wait_ns == 0  # for experts


@pytest.mark.parametrize("wrong", [NgramReads(10, 3), NgramReads(10, -1), NgramReads(-1, 0)])
def test_rows_that_no_layer_waits_for_are_refused(wrong):
    with pytest.raises(InvalidRequest, match="no such rows"):
        Simulation(LAYOUTS, FREE, slots=dict.fromkeys(LAYOUTS, 12), ngram=wrong)


def test_a_layer_with_a_slot_for_every_expert_is_read_before_anything_is_played():
    result, _ = played(LAYOUTS, random_blocks(1), 16)
    assert (result.store.num_misses, result.store.physical_bytes) == (0, 0)


def test_hints_that_learn_do_so_from_what_was_committed():
    blocks = blocks_of([[[1, 2]] * 3, [[1, 2]] * 3, [[3, 4]] * 3, [[1, 2]] * 3])
    result, _ = played(LAYOUTS, blocks, 4, Previous([0, 1, 2]))
    assert result.num_guesses > 0


# Widths.


@pytest.mark.parametrize(("width", "acceptance"), [(1, 0.5), (3, 0.0), (3, 1.0), (4, 0.6)])
def test_blocks_of_another_width_commit_the_same_rows(width, acceptance):
    blocks = random_blocks(5)
    found = in_width(blocks, width, acceptance, random.Random(0))
    true = routes_by_position(blocks).by_position
    committed = routes_by_position(found).by_position
    assert committed == {position: true[position] for position in range(len(committed))}
    assert len(blocks) - len(committed) < width
    assert {block.num_rows for block in found} == {width}
    for block in found:
        for row in range(width):
            chosen = {layer: tuple(rows[row]) for layer, rows in block.routes.items()}
            assert chosen == true[block.position + row]
    kept = [block.num_kept for block in found]
    assert min(kept) >= 1
    assert max(kept) <= width
    if acceptance in (0.0, 1.0):
        assert set(kept) == {width if acceptance else 1}


def test_prompts_stay_as_they_are_and_guesses_of_several_rows_are_not_taken_apart():
    chunk = RoutedBlock(0, 2, {0: [[0, 1], [2, 3]]}, is_prefill=True)
    single = RoutedBlock(2, 1, {0: [[4, 5]]}, {0: [Guess(0, 4, 0.5)]})
    wide = RoutedBlock(3, 2, {0: [[4, 6], [7, 8]]}, {0: [Guess(0, 6, 0.25)]})
    first, block = in_width([chunk, single, wide], 2, 1.0, random.Random(0))
    assert first == chunk
    assert block.guesses == {0: [Guess(0, 4, 0.5)]}
    both = in_width(
        [single, replace(single, position=3, guesses={0: [Guess(0, 4, 0.75)]})], 2, 1.0, random.Random(0)
    )
    assert both[0].guesses == {0: [Guess(0, 4, 0.75)]}


# Scaled.


def test_scaled_routes_recur_as_their_streams_do():
    streams = [random_blocks(seed, num=30, num_layers=4) for seed in range(3)]
    taken = (2, 1, 1)
    found = scaled(streams, num_layers=11, experts_per_stream=16, taken=taken)
    assert len(found) == 30
    for number, block in enumerate(found):
        assert sorted(block.routes) == list(range(11))
        for layer, (row,) in block.routes.items():
            assert len(set(row)) == len(row) == sum(taken)
            for stream, count in enumerate(taken):
                own = {expert - 16 * stream for expert in row if expert // 16 == stream}
                source = (layer * 5 + stream) % 4
                assert len(own) == count
                assert len(streams[stream][number].routes[source][0]) >= count
    # Where a stream says the same again, so does its part.
    again = [[replace(block, routes=streams[0][0].routes) for block in stream] for stream in streams]
    same = scaled(again, num_layers=2, experts_per_stream=16, taken=taken)
    assert {str(block.routes) for block in same} == {str(same[0].routes)}


def test_scaled_routes_may_recur_more_and_guesses_stay_as_right_as_they_were():
    def again(blocks):
        pairs = itertools.pairwise(set(block.routes[0][0]) for block in blocks)
        return sum(len(one & other) for one, other in pairs)

    def right(blocks):
        return [
            sum(
                guess.expert in block.routes[layer][0]
                for layer in block.routes
                for guess in block.guesses[layer]
            )
            for block in blocks
        ]

    plain = random_blocks(9, num=60, num_layers=1)
    stream = [replace(b, guesses={0: [Guess(0, b.routes[0][0][0]), Guess(0, 15, 0.5)]}) for b in plain]
    found = [
        scaled([stream], num_layers=3, experts_per_stream=16, taken=[3], kept=kept)
        for kept in (0.0, 0.5, 0.9)
    ]
    recurring = [again(blocks) for blocks in found]
    assert recurring == sorted(recurring)
    assert recurring[0] < recurring[1] < recurring[2]
    for blocks in found:
        assert all(len(set(row)) == 3 for block in blocks for (row,) in block.routes.values())
        assert all(count >= 1 for count in right(blocks))


# Refusals.


def cells(blocks, layouts=LAYOUTS, machines=(FREE,), **asked):
    return list(sweep([blocks], layouts, machines, Sweep(**{"slots": [4], **asked})))


def test_a_sweep_has_a_cell_for_every_combination_and_refuses_what_cannot_be():
    blocks = random_blocks(2)
    found = cells(blocks, slots=[4, 8], hints=["off", "oracle"], widths=[0, 1], num_warm=3)
    assert [(c.width, c.slots, c.hints) for c in found] == [
        (w, s, h) for w in (0, 1) for s in (4, 8) for h in ("off", "oracle")
    ]
    assert {cell.num_tokens for cell in found} == {37}
    assert all(cell.wait_ns == 0 and cell.tokens_per_s is None for cell in found)
    for wrong, kind, said in (
        ({"hints": ["recorded"]}, InvalidRequest, "no guesses to replay: recorded"),
        ({"num_warm": 40}, InvalidRequest, "40 blocks are too few to leave out the first 40"),
        ({"widths": [17], "blocks": blocks[:5]}, InvalidRequest, "No answer of the trace has 17 tokens"),
        ({"layouts": plain_layouts({0: 16}, 9)}, TargetDiffers, "no streamed layer 1"),
        (
            {"layouts": plain_layouts(dict.fromkeys(range(3), 15), 9)},
            TargetDiffers,
            "expert 15 of layer 0, which has 15",
        ),
        (
            {"machines": [SimulatedMachine("m", Drive(), Compute((1, 2)))]},
            MachineForeign,
            "layer_us has 2 values",
        ),
    ):
        with pytest.raises(kind, match=said):
            cells(**{"blocks": blocks, **wrong})


def test_a_trace_without_routes_has_nothing_to_play():
    with pytest.raises(NoRoutes, match="no routes"):
        blocks_of_trace([])
