"""The trainer in torch, which trains the demo's draft, and the one in MLX go the same way: same batch, same
gradients.

Those of torch are stored; `python -m bench.demo.draft_gradients` compares them where there is torch.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from bench.demo import draft_gradients
from drafter.train import losses as losses_module
from drafter.train.runs import config_of
from drafter.train.trainer import gradients_of

STORED = np.load(draft_gradients.PLACE)


class Tables:
    """Embedding and head of the stored case."""

    def __init__(self) -> None:
        self.table, self.matrix = map(mx.array, draft_gradients.tables())

    def embed(self, ids_T: mx.array) -> mx.array:
        return self.table[ids_T]

    def head(self, hidden_TD: mx.array) -> mx.array:
        return hidden_TD @ self.matrix.T


def largest_error(family: str) -> dict[str, float]:
    """Return for losses and every parameter how far this trainer is from torch, over the largest value."""
    params = {name: mx.array(value) for name, value in draft_gradients.parameters(family).items()}
    parts, gradients = gradients_of(
        params,
        config_of(draft_gradients.config(family)),
        Tables(),
        draft_gradients.batch(),
        gamma=draft_gradients.GAMMA,
        selector_weight=draft_gradients.SHARE,
        num_ids=draft_gradients.NUM_IDS,
    )
    found = {
        "losses": np.asarray([part.item() for part in parts]),
        **{n: np.array(v) for n, v in gradients.items()},
    }
    assert {f"{family}/{name}" for name in found} == {
        name for name in STORED if name.startswith(f"{family}/")
    }
    errors: dict[str, float] = {}
    for name, value in found.items():
        wanted = STORED[f"{family}/{name}"]
        errors[name] = float(np.abs(value - wanted).max() / (np.abs(wanted).max() + 1e-9))
    return errors


@pytest.mark.parametrize("family", draft_gradients.ARCHITECTURES)
def test_gradients_of_one_batch_are_those_of_torch(family: str) -> None:
    assert max(largest_error(family).values()) < 2e-4


@pytest.mark.parametrize("fault", ["decay", "predecessors", "window"])
def test_a_planted_fault_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "decay":
        monkeypatch.setattr(losses_module, "slot_weights", lambda slots, _gamma: [1.0] * slots)
    elif fault == "predecessors":
        from drafter.train.batches import Blocks

        monkeypatch.setattr(Blocks, "predecessors", property(lambda self: self.targets))
    else:
        document = draft_gradients.config("dflash2") | {"sliding_window": 13}
        monkeypatch.setattr(draft_gradients, "config", lambda _family: document)
    assert max(largest_error("dflash2").values()) > 1e-2
