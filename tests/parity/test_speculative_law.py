"""Sampled speculation end to end: an engine with a drafter says what the target alone would say, in law.

The acceptance function itself is tested with 20,000 cycles in `tests/properties/test_verify.py`; here every
part between logits and text takes part: drafter, block, rule, commit, sampler, cycle.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from bench.studies.verify_law import fit
from mlx_flashnext.engine import verify as verify_module
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Finished, Token
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import SamplingParams
from tests.tiny.small_vocabulary import MarkovDrafter, build_small_vocabulary, target_law

PROMPT = (3, 1, 4, 1, 5)
DEPTH = 3
SAMPLING = {"temperature": 0.9, "top_k": 4, "repetition_penalty": 1.1}
NUM_ANSWERS = 1000
BOUND = 1.6  # chi2 per degree of freedom; 63 cells: far beyond the 99.9th percentile of an exact rule


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = build_small_vocabulary(tmp_path_factory.mktemp("twelve"))
    request = PlanRequest(context_tokens=64, draft="oracle", num_draft_tokens=3)
    with Engine.open(directory, request) as engine:
        yield engine


@pytest.fixture(scope="module")
def law(engine: Engine) -> np.ndarray:
    return target_law(engine, PROMPT, SamplingParams(**SAMPLING), DEPTH)


def answers(engine: Engine, rule: str, count: int) -> tuple[np.ndarray, int, int]:
    """Return tokens [count, DEPTH], proposals and acceptances; every answer has its own seed."""
    session = engine.session(MarkovDrafter(), is_guarded=False)
    said = np.zeros((count, DEPTH), np.int64)
    proposed = accepted = 0
    for seed in range(count):
        params = SamplingParams(**SAMPLING, seed=seed)
        *events, end = session.generate(PROMPT, params, max_tokens=DEPTH, rule=rule)  # type: ignore[arg-type]
        assert isinstance(end, Finished)
        said[seed] = [event.token_id for event in events if isinstance(event, Token)]
        assert end.statistics.draft.rule == rule
        proposed += end.statistics.draft.num_proposed
        accepted += end.statistics.draft.num_accepted
    return said, proposed, accepted


@pytest.mark.parametrize("rule", ["coupled", "delta", "sampled"])
def test_the_law_of_an_answer_is_that_of_the_target(engine: Engine, law: np.ndarray, rule: str) -> None:
    """P62, defect 22."""
    said, proposed, accepted = answers(engine, rule, NUM_ANSWERS)
    found = fit(said, law)
    assert proposed > NUM_ANSWERS
    assert proposed // 20 < accepted < proposed
    assert found.chi2 < BOUND
    assert found.forbidden == 0


def test_a_wrong_acceptance_is_seen(engine: Engine, law: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above, with the weakest fault: the rejected proposal may be drawn again."""
    monkeypatch.setattr(verify_module, "_residual", lambda p_NkV, *_: p_NkV)
    said, _, _ = answers(engine, "sampled", NUM_ANSWERS)
    assert fit(said, law).chi2 > BOUND
