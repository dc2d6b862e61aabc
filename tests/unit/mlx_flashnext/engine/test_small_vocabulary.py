"""The small target runs in the engine, and plain sampling from it has the law computed for it."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from bench.studies.verify_law import fit
from drafter.api import DraftSampling
from mlx_flashnext.engine.events import Token
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.engine.verify import check_proposal
from tests.tiny.engines import open_tiny
from tests.tiny.small_vocabulary import VOCAB, MarkovDrafter, build_small_vocabulary, target_law

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_vocabulary(tmp_path_factory.mktemp("small"))


def test_the_engine_says_what_the_law_says(directory: Path) -> None:
    params = {"temperature": 1.2, "top_k": 3}
    with open_tiny(directory, context=64) as engine:
        law = target_law(engine, PROMPT, SamplingParams(**params), 2)
        colder = target_law(engine, PROMPT, SamplingParams(temperature=0.6, top_k=3), 2)
        said = []
        for seed in range(150):
            events = engine.session().generate(PROMPT, SamplingParams(seed=seed, **params), max_tokens=2)
            said.append([event.token_id for event in events if isinstance(event, Token)])
    assert np.count_nonzero(law) == 9
    tokens = np.array([answer for answer in said if len(answer) == 2])
    assert fit(tokens, law).is_within(2.0), fit(tokens, law)
    assert not fit(tokens, colder).is_within(2.0)


def test_the_drafter_draws_from_the_rows_it_shows() -> None:
    drafter = MarkovDrafter(candidates=3)
    drafter.observe([1, 2], 7)
    counts, position = np.zeros(VOCAB), 5
    for seed in range(600):
        proposal = drafter.propose(2, DraftSampling(1.0, seed, position))
        check_proposal(proposal, 2, VOCAB)
        assert proposal.row_ids is not None
        assert proposal.row_probs is not None
        counts[proposal.tokens[0]] += 1
    row = np.zeros(VOCAB)
    row[np.array(proposal.row_ids[0])] = np.array(proposal.row_probs[0])
    assert np.abs(counts / 600 - row).max() < 0.06
    best = drafter.propose(1, DraftSampling(0.0, 1, position))
    assert (best.law, best.tokens[0]) == ("point", int(row.argmax()))
    assert mx.array_equal(proposal.row_ids, drafter.propose(2, DraftSampling(1.0, 599, position)).row_ids)
