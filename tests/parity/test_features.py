"""Feature taps: what a drafter is shown of the target's layers, for every row that stays and no other.

The reference is one pass over all committed tokens whose stacks are contracted here, in numpy where that says
it all; `test_blocks_golden.py` holds stacks and mixers themselves to the reference model.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from drafter.api import FeatureRequest
from drafter.oracle import OracleDrafter
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.sampler import SamplingParams
from tests.parity.test_speculative_equals_plain import VOCAB, answer, plain
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import open_tiny, prompt_of
from tests.tiny.stepping import advance

GREEDY = SamplingParams(temperature=0.0)
TAPS = (0, 2, 3)
CONTRACTIONS = ("mean", "stream0", "next_attn_mix", "final_mix")


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mlx(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def whole(tiny_dir: Path) -> Iterator[Engine]:
    """An engine that runs all tokens at once."""
    with open_tiny(tiny_dir) as engine:
        yield engine


class Capturing(OracleDrafter):
    """Keeps what it is shown."""

    def __init__(
        self, recorded: Sequence[int], error_rate: float, contraction: str, last_rows: int | None = None
    ) -> None:
        super().__init__(recorded, VOCAB, error_rate=error_rate)
        self.feature_request = FeatureRequest(TAPS, contraction, last_rows)
        self.rows: list[np.ndarray] = []
        self.positions: list[int] = []

    def observe(
        self,
        tokens: Sequence[int],
        next_token: int,
        stack_TGD: mx.array | None = None,
        *,
        features_RF: mx.array | None = None,
    ) -> None:
        assert stack_TGD is None
        start = self._num_rows
        super().observe(tokens, next_token)
        if features_RF is not None:
            assert features_RF.shape[0] == len(tokens)
            self.rows.extend(np.array(features_RF))
            self.positions.extend(range(start, start + len(tokens)))


def features_of(engine: Engine, tokens: Sequence[int], contraction: str, taps: Sequence[int]) -> np.ndarray:
    """Return [T, F] of one pass over all tokens."""
    model = engine.target.model
    output = advance(model, list(tokens), model.new_state(), logits="none", taps=taps)
    parts = []
    for tap in taps:
        stack_TGD = output.taps[tap]
        if contraction == "mean":
            parts.append(np.array(stack_TGD).mean(axis=1))
        elif contraction == "stream0":
            parts.append(np.array(stack_TGD)[:, 0])
        elif contraction == "next_attn_mix" and tap + 1 < engine.config.num_hidden_layers:
            parts.append(np.array(model._layers[tap + 1]._attn_hyper(stack_TGD)))
        else:
            parts.append(np.array(model._mixer(stack_TGD)))
    engine.target.experts.device_idle()
    return np.concatenate(parts, axis=-1)


@pytest.mark.parametrize("contraction", CONTRACTIONS)
@pytest.mark.parametrize("error_rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("step", [7, 512])
def test_features_of_every_kept_row_are_those_of_one_pass(
    tiny_dir: Path, whole: Engine, contraction: str, error_rate: float, step: int
) -> None:
    """Defects 1, 3, 7, 8; P38: any chunking, full, partial and no acceptance, the last layer included."""
    prompt = prompt_of(30)
    with open_tiny(tiny_dir, slots=6, step=step, draft_tokens=3) as engine:
        expected, _ = plain(engine, prompt, GREEDY)
        drafter = Capturing([*prompt, *expected.tokens], error_rate, contraction)
        got = answer(engine.session(drafter, is_guarded=False), prompt, GREEDY)
        assert got.tokens == expected.tokens
        kept = [*prompt, *expected.tokens[:-1]]
        assert drafter.positions == list(range(len(kept)))
        # numpy adds the four streams of a mean in another order
        tolerance = 1e-6 if contraction == "mean" else 0.0
        wanted = features_of(whole, kept, contraction, TAPS)
        np.testing.assert_allclose(np.stack(drafter.rows), wanted, rtol=0, atol=tolerance)
        for shift in (-1, 1):  # the control: one layer early or late is not the same
            shifted = [min(max(tap + shift, 0), engine.config.num_hidden_layers - 1) for tap in TAPS]
            assert (
                np.abs(np.stack(drafter.rows) - features_of(whole, kept, contraction, shifted)).max() > 0.01
            )


@pytest.mark.parametrize("last_rows", [1, 8, 29, 30, 100])
def test_of_a_prompt_only_the_rows_of_the_window_are_captured(tiny_dir: Path, last_rows: int) -> None:
    prompt = prompt_of(30)
    with open_tiny(tiny_dir, slots=6, step=4, draft_tokens=3) as engine:
        expected, _ = plain(engine, prompt, GREEDY)
        drafter = Capturing([*prompt, *expected.tokens], 0.3, "mean", last_rows)
        answer(engine.session(drafter, is_guarded=False), prompt, GREEDY)
        end = len(prompt) - 1
        assert drafter.positions[-1] == end + len(expected.tokens) - 1
        assert drafter.positions == list(range(drafter.positions[0], drafter.positions[-1] + 1))
        assert max(0, end - last_rows - 3) <= drafter.positions[0] <= max(0, end - last_rows)


def test_capture_adds_no_wait(tiny_dir: Path) -> None:
    """Neither while the prompt is read nor while tokens are said."""
    prompt = prompt_of(30)
    with open_tiny(tiny_dir, slots=15, step=8, draft_tokens=3) as engine:
        expected, _ = plain(engine, prompt, GREEDY)
        recorded = [*prompt, *expected.tokens]
        waits = []
        for drafter in (OracleDrafter(recorded, VOCAB), Capturing(recorded, 0.0, "next_attn_mix")):
            before = engine.target.sync.num_syncs
            end = answer(engine.session(drafter, is_guarded=False), prompt, GREEDY).end
            waits.append((end.statistics.num_syncs, engine.target.sync.num_syncs - before))
        # The drafter above brings every capture to the host itself; the engine's own count is the same.
        assert waits[0] == waits[1]
        assert waits[0][1] > waits[0][0] > 0
