"""The comparison of two builds says what their own runs say."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_flashnext.conversion.recipe import Recipe, parse_spec
from mlx_flashnext.conversion.writing import convert_checkpoint
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.errors import InvalidRequest
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.reports.compare import Difference, compare_builds
from mlx_flashnext.reports.prompt_sets import chat_prompts, demo_tasks
from tests.tiny.checkpoints import build_hf
from tests.tiny.engines import greedy
from tests.tiny.stepping import advance
from tests.tiny.weights import TinyModel

REQUEST = PlanRequest(context_tokens=256, slots_per_layer=6)
TOKENS = 8


def compared(reference: Path, other: Path) -> Difference:
    return compare_builds(reference, other, REQUEST, num_prompts=2, num_tokens=TOKENS)


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("builds")
    source = build_hf(folder / "model")
    found = {"source": source}
    for bits in ("2", "8"):
        recipe = Recipe(experts=parse_spec(bits))
        found[bits] = convert_checkpoint(source, folder / bits, recipe).directory
    return found


def test_a_build_is_itself(builds: dict[str, Path]) -> None:
    found = compared(builds["source"], builds["source"])
    assert (set(found.layers), found.logits, found.divergence) == ({0.0}, 0.0, 0.0)
    assert (found.agreement, found.num_prompts) == (1.0, 2)
    assert sum(found.prefixes) == found.num_positions


def test_fewer_bits_are_further_off(builds: dict[str, Path]) -> None:
    two, eight = (compared(builds["source"], builds[bits]) for bits in ("2", "8"))
    assert all(0 < near < far for near, far in zip(eight.layers, two.layers, strict=True))
    assert 0 < eight.logits < two.logits
    assert 0 < eight.divergence < two.divergence
    assert eight.agreement > two.agreement


def test_prefixes_are_those_of_the_builds_own_answers(builds: dict[str, Path]) -> None:
    """The other build is never asked for an answer of its own; what is said of it must be what it says."""
    found = compared(builds["source"], builds["2"])
    answers: list[list[list[int]]] = []
    for name in ("source", "2"):
        with Engine.open(builds[name], REQUEST) as engine:
            prompts = chat_prompts(builds[name], engine.tokenizer, demo_tasks()[:2])
            stops = engine.config.eos_token_ids
            answers.append([greedy(engine, prompt, TOKENS, stop_ids=stops) for prompt in prompts])
    for prefix, left, right in zip(found.prefixes, *answers, strict=True):
        pairs = zip(left, right, strict=False)
        assert prefix == next((i for i, (a, b) in enumerate(pairs) if a != b), len(left))
    assert min(found.prefixes) < TOKENS, "nothing was tested"


def test_errors_are_those_of_resident_runs(builds: dict[str, Path]) -> None:
    """Against the tests' own reading of both builds: no store, no slots, one block."""
    found = compare_builds(builds["source"], builds["2"], REQUEST, num_prompts=1, num_tokens=1)
    with Engine.open(builds["source"], REQUEST) as engine:
        (prompt,) = chat_prompts(builds["source"], engine.tokenizer, demo_tasks()[:1])
    rows: list[np.ndarray] = []
    for name in ("source", "2"):
        model = TinyModel.open(builds[name]).model
        state = model.new_state()
        output = advance(model, prompt, state, logits="last", taps=range(4))
        rows.append(np.stack([np.array(output.taps[layer].mean(axis=1)) for layer in range(4)]))
    expected = np.linalg.norm(rows[1] - rows[0], axis=(1, 2)) / np.linalg.norm(rows[0], axis=(1, 2))
    assert found.layers == pytest.approx(expected, rel=1e-4)
    mx.clear_cache()


@pytest.mark.parametrize(("prompts", "tokens"), [(0, 4), (2, 0)])
def test_nothing_to_compare_is_refused(builds: dict[str, Path], prompts: int, tokens: int) -> None:
    with pytest.raises(InvalidRequest, match="Nothing to compare"):
        compare_builds(builds["source"], builds["2"], REQUEST, num_prompts=prompts, num_tokens=tokens)
