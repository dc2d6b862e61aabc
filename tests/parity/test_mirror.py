"""`--mirror`: the answer is the same with a second copy, a damaged one, and one that vanishes."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from expert_store.mirrored import MirroredSource
from expert_store.source import FileSource
from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Token
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.packing import pack_checkpoint
from mlx_flashnext.reports.disk import measure_disk
from tests.tiny.checkpoints import build_mlx

PROMPT = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mirror")
    plain = build_mlx(root / "plain")
    return {"plain": plain, "pack": pack_checkpoint(plain, root / "pack").directory}


def answer(directory: Path, mirror: Path | None) -> tuple[Sequence[int], str, int]:
    """Return the greedy tokens, why the mirror was dropped, and the bytes that came from it."""
    request = PlanRequest(slots_per_layer=5, context_tokens=128, mirror_directory=mirror)
    with Engine.open(directory, request) as engine:
        events = engine.session().generate(PROMPT, SamplingParams(temperature=0.0), max_tokens=24)
        tokens = [event.token_id for event in events if isinstance(event, Token)]
        if engine.mirror is None:
            return tokens, "", 0
        return tokens, engine.mirror.dropped, engine.mirror.read_bytes[1]


@pytest.mark.parametrize("kind", ["plain", "pack"])
def test_the_answer_is_the_same_with_a_mirror_and_both_are_read(models, tmp_path, kind):
    mirror = tmp_path / "mirror"
    shutil.copytree(models[kind], mirror)
    alone, _, _ = answer(models[kind], None)
    tokens, dropped, num_bytes = answer(models[kind], mirror)
    assert tokens == alone
    assert dropped == ""
    assert num_bytes > 0


@pytest.mark.parametrize("kind", ["plain", "pack"])
def test_a_mirror_with_damaged_records_is_dropped_and_the_answer_is_the_same(models, tmp_path, kind):
    mirror = tmp_path / "mirror"
    shutil.copytree(models[kind], mirror)
    for path in mirror.glob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(raw[:8], "little")
        raw[start:] = bytes(byte ^ 0x10 for byte in raw[start:])
        path.write_bytes(raw)
    alone, _, _ = answer(models[kind], None)
    tokens, dropped, _ = answer(models[kind], mirror)
    assert tokens == alone
    assert "differs" in dropped or "damaged" in dropped


def test_a_mirror_that_vanishes_in_the_middle_is_dropped_and_the_answer_goes_on(models, tmp_path):
    mirror = tmp_path / "mirror"
    shutil.copytree(models["plain"], mirror)
    alone, _, _ = answer(models["plain"], None)
    request = PlanRequest(slots_per_layer=5, context_tokens=128, mirror_directory=mirror)
    with Engine.open(models["plain"], request) as engine:
        tokens: list[int] = []
        for event in engine.session().generate(PROMPT, SamplingParams(temperature=0.0), max_tokens=24):
            if isinstance(event, Token):
                tokens.append(event.token_id)
                if len(tokens) == 4:
                    for path in mirror.glob("*.safetensors"):
                        path.unlink()
        assert engine.mirror is not None
        assert "changed while in use" in engine.mirror.dropped
    assert tokens == alone


def test_two_equal_copies_can_be_measured_together(models):
    """Records are compared where they landed: slots that layers shared would be written meanwhile."""
    checkpoint = open_checkpoint(models["plain"])
    layouts = {layer: layout.record for layer, layout in checkpoint.experts.items()}
    files = checkpoint.table.files
    both = MirroredSource(
        FileSource(files), FileSource(files), {number: number for number in range(len(files))}
    )
    for _ in range(3):
        rate = measure_disk(layouts, both, num_readers=4, per_request=4, max_seconds=60, is_compared=True)
        assert rate.num_records == sum(record.num_experts for record in layouts.values())
    assert both.dropped == ""
    assert min(both.read_bytes) > 0
