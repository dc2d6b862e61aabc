"""A predictor is let in as far as it was right: nothing is paid for one that knows nothing."""

import random

import pytest

from expert_store.keys import Prefetch
from mlx_flashnext.engine import worth
from mlx_flashnext.engine.guess import Guess
from mlx_flashnext.engine.hints import REST_PASSES, Hints
from mlx_flashnext.engine.predictors import GateAhead, Predictor, Random

NUM_LAYERS, NUM_EXPERTS, TOP_K = 8, 64, 4


class Knows(Random):
    """Names experts of the next layer, each right with a chance that its rank decides."""

    look_ahead = (GateAhead(),)

    def __init__(self, chances: list[float]) -> None:
        super().__init__(dict.fromkeys(range(NUM_LAYERS), NUM_EXPERTS), TOP_K)
        self.chances = chances
        self.chance = random.Random(7)
        self.true: dict[int, list[int]] = {}

    def begin(self, tokens, position):
        return self._guesses(0)

    def routed(self, layer, ids_TK):
        return self._guesses(layer + 1)

    def _guesses(self, layer):
        if layer == NUM_LAYERS:
            return []
        wrong = [expert for expert in range(NUM_EXPERTS) if expert not in self.true[layer]]
        self.chance.shuffle(wrong)
        return [
            Guess(layer, expert if self.chance.random() < likely else wrong[rank], 1 / (1 + rank))
            for rank, (expert, likely) in enumerate(zip(self.true[layer], self.chances, strict=True))
        ]


def read(hints: Hints, predictor: Predictor, num_passes: int) -> list[list[Prefetch]]:
    """Run passes where every hint leads to a read; return the hints of each pass."""
    chance = random.Random(3)
    found = []
    for _ in range(num_passes):
        true = {layer: chance.sample(range(NUM_EXPERTS), TOP_K) for layer in range(NUM_LAYERS)}
        if isinstance(predictor, Knows):
            predictor.true = true
        handed = list(hints.begin([1], 0, is_prefill=False).hints)
        hints.accepted(handed)
        for layer, ids in true.items():
            ahead = list(hints.routed(layer, [ids]).hints)
            hints.accepted(ahead)
            handed += ahead
        hints.commit(1)
        found.append(handed)
    return found


def reads(predictor: Predictor, num_passes: int) -> list[int]:
    return [len(handed) for handed in read(Hints(predictor, NUM_LAYERS), predictor, num_passes)]


def test_a_predictor_that_knows_nothing_reads_next_to_nothing():
    hat = Random(dict.fromkeys(range(NUM_LAYERS), NUM_EXPERTS), TOP_K, seed=1)
    found = reads(hat, 340)
    assert sum(found[:1]) <= 12, "the opening credit"
    assert sum(found[1:]) <= 2 * 340 / REST_PASSES + 8, "then a try now and then"


def test_without_judging_it_would_read_in_every_pass(monkeypatch):
    monkeypatch.setattr(worth.Worth, "routed", lambda self, deadline, ids_TK: None)
    hat = Random(dict.fromkeys(range(NUM_LAYERS), NUM_EXPERTS), TOP_K, seed=1)
    assert sum(reads(hat, 20)) == 20 * NUM_LAYERS * TOP_K


@pytest.mark.parametrize("chance", [0.7, 1.0])
def test_a_predictor_that_is_mostly_right_is_never_held_back(chance):
    assert reads(Knows([chance] * TOP_K), 100) == [NUM_LAYERS * TOP_K] * 100


def test_of_a_mixed_predictor_the_ranks_that_are_seldom_right_are_withheld():
    predictor = Knows([0.9, 0.8, 0.2, 0.1])
    late = [
        hint.confidence
        for handed in read(Hints(predictor, NUM_LAYERS), predictor, 100)[20:]
        for hint in handed
    ]
    assert late.count(1.0) == late.count(0.5) == 80 * NUM_LAYERS
    assert late.count(1 / 3) + late.count(0.25) <= 3 * 80


def test_a_predictor_that_has_become_good_is_let_in_again():
    predictor = Knows([0.05] * TOP_K)
    hints = Hints(predictor, NUM_LAYERS)
    read(hints, predictor, 50)
    predictor.chances = [1.0] * TOP_K
    later = [len(handed) for handed in read(hints, predictor, 2 * REST_PASSES + 12)]
    assert later[-1] == NUM_LAYERS * TOP_K


def test_guesses_that_nobody_judged_are_forgotten():
    hints = Hints(Knows([1.0] * TOP_K), NUM_LAYERS)
    hints._worth.issued([Prefetch(0, 1, deadline=3), Prefetch(0, 1, deadline=NUM_LAYERS)])
    hints.begin([1], 0, is_prefill=True)
    assert list(hints._worth._open) == [NUM_LAYERS]


def test_a_confidence_that_is_none_is_left_to_the_store():
    judged = worth.Worth()
    judged.begin(0, may_try=False)
    for confidence in (float("nan"), -1.0, 2.0):
        assert judged.lets_in(0, 1, confidence)
