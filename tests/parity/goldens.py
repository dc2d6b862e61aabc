"""Golden cases ready to compare: the rebuilt checkpoint, the committed reference arrays, and an observed run.

Entry points: `golden_case`, `observe`.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import mlx.core as mx
import numpy as np

from mlx_flashnext.model.qsa import SparseAttention
from mlx_flashnext.state import MtpState
from tests.parity.golden.cases import CASES, Case
from tests.tiny.checkpoints import build_hf, build_mlx
from tests.tiny.stepping import advance, advance_cells
from tests.tiny.weights import TinyModel

TOLERANCE = 1e-4
GOLDEN_DIR = Path(__file__).parent / "golden"
NAMES = tuple(CASES)
FULL_NAMES = tuple(name for name, case in CASES.items() if case.full)


@functools.cache
def _scratch() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="flashnext-golden-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@functools.cache
def checkpoint_dir(name: str, layout: str = "hf") -> Path:
    """Build the checkpoint of a case once per test process: `hf` in float32, `mlx` in 4 bits."""
    case = CASES[name]
    directory = _scratch() / f"{name}-{layout}"
    if layout == "hf":
        return build_hf(directory, seed=case.seed, overrides=case.overrides, tokenizer=False)
    return build_mlx(directory, seed=case.seed, overrides=case.overrides, tokenizer=False)


@functools.cache
def golden_arrays(name: str) -> dict[str, np.ndarray]:
    """Load the committed reference arrays of a case."""
    with np.load(GOLDEN_DIR / f"{name}.npz") as file:
        return dict(file)


def golden_case(name: str) -> tuple[Case, dict[str, np.ndarray], TinyModel]:
    """Return the case, its reference arrays and a fresh model of its checkpoint."""
    return CASES[name], golden_arrays(name), TinyModel.open(checkpoint_dir(name))


@dataclass
class Observed:
    """What a run did: logits, stacks after each layer, routes, attention masks, rows; and the MTP cells'."""

    logits: np.ndarray
    stacks: np.ndarray
    route_ids: dict[int, np.ndarray]
    masks: dict[int, np.ndarray]
    rows: list[list[int]]
    mtp_logits: np.ndarray | None = None
    mtp_route_ids: np.ndarray | None = None
    mtp_mask: np.ndarray | None = None


@dataclass
class _MaskSpy:
    """Records which positions each attention call lets each query see."""

    calls: list[np.ndarray] = field(default_factory=list)

    def install(self, stack: ExitStack) -> None:
        attend, choose = SparseAttention.attend, SparseAttention._choose
        chosen: list[tuple[int, np.ndarray, np.ndarray]] = []

        def spied_choose(layer, index_q, pooled, position):
            tokens, is_seen = choose(layer, index_q, pooled, position)
            chosen.append((position, np.array(tokens), np.array(is_seen)))
            return tokens, is_seen

        def spied_attend(layer, projected, state, position, **options):
            chosen.clear()
            result = attend(layer, projected, state, position, **options)
            mask = np.tril(np.ones((position + projected.gate.shape[0],) * 2, bool))[position:]
            for first, tokens, is_seen in chosen:
                for row in range(tokens.shape[0]):
                    mask[first - position + row] = False
                    mask[first - position + row, tokens[row][is_seen[row]]] = True
            self.calls.append(mask)
            return result

        stack.enter_context(mock.patch.object(SparseAttention, "attend", spied_attend))
        stack.enter_context(mock.patch.object(SparseAttention, "_choose", spied_choose))


def observe(tiny: TinyModel, tokens: Sequence[int], *, mtp: bool = True) -> Observed:
    """Run all tokens as one block, and the MTP cells over them, recording every discrete choice."""
    config, spy = tiny.config, _MaskSpy()
    tiny.experts.calls.clear()
    tiny.rows.issued.clear()
    num_layers = config.num_hidden_layers
    with ExitStack() as stack:
        spy.install(stack)
        out = advance(tiny.model, list(tokens), tiny.model.new_state(), logits="all", taps=range(num_layers))
        assert out.logits is not None
        seen = Observed(
            logits=np.array(out.logits),
            stacks=np.stack([np.array(out.taps[i]).reshape(len(tokens), -1) for i in range(num_layers)]),
            route_ids={layer: np.array(ids) for layer, ids in tiny.experts.calls},
            masks=dict(zip(config.qsa_layers, spy.calls, strict=True)),
            rows=[list(row) for row in tiny.rows.issued[0]],
        )
        if mtp and tiny.mtp is not None:
            state = MtpState(config, compute_dtype=mx.float32)
            logits, _ = advance_cells(tiny.mtp, out.stack[:-1], list(tokens[1:]), state)
            seen.mtp_logits = np.array(logits)
            seen.mtp_route_ids = np.array(tiny.experts.calls[-1][1])
            seen.mtp_mask = spy.calls[-1]
    return seen


def worst(got: np.ndarray | mx.array, wanted: np.ndarray) -> float:
    """Return the largest absolute difference, checking shapes."""
    array = np.array(got)
    assert array.shape == wanted.shape, (array.shape, wanted.shape)
    return float(np.abs(array - wanted).max())
