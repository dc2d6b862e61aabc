"""The MTP drafter's own experts through the store: streamed proposals are the resident ones, bit for bit."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from drafter.api import DraftSampling
from drafter.mtp import MtpDrafter
from expert_store.source import FileSource
from expert_store.store import ExpertStore
from mlx_flashnext.banks import SlotBanks
from mlx_flashnext.checkpoint import Checkpoint, open_checkpoint
from mlx_flashnext.engine.mtp_view import open_mtp_view
from mlx_flashnext.errors import WeightMismatch
from mlx_flashnext.experts import StreamedExperts
from mlx_flashnext.model.flashnext import FlashNext
from mlx_flashnext.model.host import HostSync
from mlx_flashnext.weights import CheckpointWeights
from tests.tiny.checkpoints import build_mlx
from tests.tiny.stepping import advance
from tests.tiny.weights import TinyModel

TOKENS = [int(token) for token in np.random.default_rng(8).integers(0, 118, 48)]
GREEDY = DraftSampling(temperature=0.0, seed=0, position=0)
EXPERTS, TOP_K = 16, 4


@pytest.fixture(scope="module", params=["float32", "4bit"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    bits = 4 if request.param == "4bit" else None
    return open_checkpoint(build_mlx(tmp_path_factory.mktemp("mtp"), bits=bits))


@dataclass
class Streamed:
    """Target and drafter over one store that holds the MTP layer too."""

    model: FlashNext
    drafter: MtpDrafter
    experts: StreamedExperts
    store: ExpertStore
    sync: HostSync


@contextlib.contextmanager
def streamed(checkpoint: Checkpoint, slots: int) -> Iterator[Streamed]:
    """Open what an engine opens for `--draft mtp`."""
    layouts = checkpoint.expert_layouts(mtp=True)
    counts = dict.fromkeys(layouts, slots)
    with contextlib.ExitStack() as resources:
        source = FileSource(checkpoint.table.files)
        resources.callback(source.close)
        banks, sync = SlotBanks(layouts, counts), HostSync()
        records = {layer: layout.record for layer, layout in layouts.items()}
        store = ExpertStore(records, source, banks, slots=counts, policy="lru", num_readers=2)
        resources.callback(store.close)
        experts = StreamedExperts(store, banks, counts, sync)
        weights = CheckpointWeights(checkpoint, source, compute_dtype=mx.float32)
        rows = TinyModel.open(checkpoint.directory).rows
        model = FlashNext(checkpoint.config, weights, experts, rows, sync, compute_dtype=mx.float32)
        view = open_mtp_view(model, weights, experts, sync)
        weights.check_all_used()
        if slots == EXPERTS:
            experts.preload(tuple(counts))
        yield Streamed(model, MtpDrafter(view), experts, store, sync)


def proposals(rig: Streamed) -> list[tuple[int, ...]]:
    """Prefill, then cycles of one to five rows, the drafter asked at each; the target runs between."""
    state, found, at = rig.model.new_state(), [], 0
    for rows in (20, 1, 3, 1, 5, 2, 4, 1):
        end = at + rows
        output = advance(rig.model, TOKENS[at:end], state)
        mx.eval(output.logits)
        rig.experts.device_idle()
        rig.drafter.observe(TOKENS[at:end], TOKENS[end], output.stack)
        found.append(rig.drafter.propose(4, GREEDY).tokens)
        at = end
    rig.experts.device_idle()
    return found


@pytest.mark.parametrize("slots", [TOP_K, 7, EXPERTS])
def test_streamed_proposals_are_the_resident_ones(checkpoint: Checkpoint, slots: int) -> None:
    layer = checkpoint.config.num_hidden_layers
    with streamed(checkpoint, EXPERTS) as resident:
        expected = proposals(resident)
    with streamed(checkpoint, slots) as rig:
        assert proposals(rig) == expected
        assert rig.experts.is_resident(layer) == (slots == EXPERTS)
        of_layer = next(one for one in rig.store.statistics().layers if one.layer == layer)
        # Loading a resident layer demands every expert once; its ids never reach the store after that.
        assert (of_layer.num_demands > EXPERTS) == (slots < EXPERTS)
        assert (of_layer.num_evictions > 0) == (slots < EXPERTS)


def test_no_weight_of_the_module_is_read_unless_it_is_opened(checkpoint: Checkpoint) -> None:
    """A run without it uses the trunk alone, and the check of unused tensors is content."""
    source = FileSource(checkpoint.table.files)
    with contextlib.closing(source):
        weights = CheckpointWeights(checkpoint, source, compute_dtype=mx.float32)
        rows = TinyModel.open(checkpoint.directory).rows
        experts = TinyModel.open(checkpoint.directory).experts
        model = FlashNext(checkpoint.config, weights, experts, rows, HostSync(), compute_dtype=mx.float32)
        weights.check_all_used()
        assert weights._used.isdisjoint(checkpoint.mtp)
        open_mtp_view(model, weights, experts, HostSync())
        weights.check_all_used()
        assert checkpoint.mtp.keys() <= weights._used


def test_a_checkpoint_without_the_module_says_which_tensor_is_missing(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(build_mlx(tmp_path, mtp=False))
    assert checkpoint.expert_layouts(mtp=True).keys() == checkpoint.experts.keys()
    tiny = TinyModel.open(checkpoint.directory)
    source = FileSource(checkpoint.table.files)
    with contextlib.closing(source):
        weights = CheckpointWeights(checkpoint, source, compute_dtype=mx.float32)
        with pytest.raises(WeightMismatch, match=r"mtp\."):
            open_mtp_view(tiny.model, weights, tiny.experts, HostSync())
