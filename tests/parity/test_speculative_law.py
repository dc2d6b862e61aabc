"""Sampled speculation end to end: an engine with a drafter says what the target alone would say, in law.

The acceptance function itself is tested with 20,000 cycles in `tests/properties/test_verify.py`; here every
part between logits and text takes part: drafter, block, rule, commit, sampler, cycle.
"""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from bench.studies.verify_law import fit
from drafter import dflash2 as dflash2_module
from drafter.selector import Path as Walk
from mlx_flashnext.engine import verify as verify_module
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Finished, Token
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import SamplingParams
from tests.tiny.own_drafts import write_draft
from tests.tiny.small_vocabulary import MarkovDrafter, build_small_vocabulary, target_law

PROMPT = (3, 1, 4, 1, 5)
DEPTH = 3
SAMPLING = {"temperature": 0.9, "top_k": 4, "repetition_penalty": 1.1}
NUM_ANSWERS = 1000
BOUND = (
    1.6  # chi2 per degree of freedom; 63 cells: an exact rule would exceed it with one set of seeds in 500
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_vocabulary(tmp_path_factory.mktemp("twelve"))


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    request = PlanRequest(context_tokens=64, draft="oracle", num_draft_tokens=3)
    with Engine.open(directory, request) as engine:
        yield engine


@pytest.fixture(scope="module")
def law(engine: Engine) -> np.ndarray:
    return target_law(engine, PROMPT, SamplingParams(**SAMPLING), DEPTH)


def answers(
    engine: Engine, rule: str, count: int, sampling: dict = SAMPLING, *, own: bool = False
) -> tuple[np.ndarray, int, int]:
    """Return tokens [count, DEPTH], proposals and acceptances; every answer has its own seed."""
    session = engine.session(None if own else MarkovDrafter(), is_guarded=False)
    said = np.zeros((count, DEPTH), np.int64)
    proposed = accepted = 0
    for seed in range(count):
        params = SamplingParams(**sampling, seed=seed)
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


# As the model is served: temperature 1, nothing cut off but by top-k, so that every pair is frequent enough.
AT_ONE = {"temperature": 1.0, "top_k": 4}
NUM_PAIRS = 150
PAIR_BOUND = 2.6  # 15 degrees: beyond the 99.9th percentile of an exact rule; the control below gives ten


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory, directory: Path) -> Iterator[Engine]:
    """The same target with a DFlash2 draft of random weights, which proposes by its selector's rows."""
    changes = {
        "dflash_config.mask_token_id": 10,
        "dflash_config.selector_top_k": 4,
        "dflash_config.block_size": 4,
    }
    own = write_draft(tmp_path_factory.mktemp("draft") / "own", directory, changes=changes)
    request = PlanRequest(context_tokens=64, draft="dflash2", draft_directory=own)
    with Engine.open(directory, request) as engine:
        yield engine


@pytest.fixture(scope="module")
def law_at_one(engine: Engine) -> np.ndarray:
    """Of pairs: proposals of the third token are judged after what is compared, and change nothing."""
    return target_law(engine, PROMPT, SamplingParams(**AT_ONE), 2)


def test_with_a_block_draft_the_law_at_temperature_one_is_that_of_the_target(
    drafted: Engine, law_at_one: np.ndarray
) -> None:
    """dflash2.md 3.6: the paths of the selector, judged by the rows they were drawn from."""
    said, proposed, accepted = answers(drafted, "sampled", NUM_PAIRS, AT_ONE, own=True)
    found = fit(said[:, :2], law_at_one)
    assert proposed > NUM_PAIRS
    assert proposed // 20 < accepted < proposed
    assert found.chi2 < PAIR_BOUND
    assert found.forbidden == 0


def test_rows_that_the_path_was_not_drawn_from_are_seen(
    drafted: Engine, law_at_one: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: rows whose probabilities belong to the candidate beside."""
    honest = dflash2_module.walk

    def shifted(*args: object, **options: object) -> Walk:
        path = honest(*args, **options)  # type: ignore[arg-type]
        return path._replace(probs=mx.roll(path.probs, 1, axis=-1))

    monkeypatch.setattr(dflash2_module, "walk", shifted)
    said, _, _ = answers(drafted, "sampled", NUM_PAIRS, AT_ONE, own=True)
    assert fit(said[:, :2], law_at_one).chi2 > PAIR_BOUND
