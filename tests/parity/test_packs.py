"""A pack answers as its source does, bit for bit, one read a record; a damaged one does not answer."""

import hashlib
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import msgspec
import pytest
from safetensors import safe_open

from expert_store import pack_writer
from expert_store.errors import RecordCorrupt
from expert_store.layout import RowLayout
from expert_store.pack import ALIGNMENT, read_manifest
from expert_store.source import ByteSource, FileSource
from mlx_flashnext import packing
from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.packing import pack_checkpoint
from tests.parity.test_streamed_equals_resident import run
from tests.tiny.checkpoints import build_hf, build_mlx
from tests.tiny.engines import greedy, open_tiny, prompt_of
from tests.tiny.fp8 import build_fp8
from tests.tiny.own_drafts import write_draft
from tests.tiny.packs import edit_manifest, flip

SIX_BITS = {"bits": 6, "group_size": 32, "mode": "affine"}
LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "hf bfloat16": lambda directory: build_hf(directory, dtype="bfloat16", vision=True),
    "fp8": lambda directory: build_fp8(directory, directory.parent / "twin"),
    "mlx nvfp4": lambda directory: build_mlx(directory, mode="nvfp4", bits=4, group_size=16, mtp=False),
    "mlx mixed": lambda directory: build_mlx(
        directory,
        quant_overrides={
            "layers.0.mlp.switch_mlp.down_proj": SIX_BITS,
            "layers.3.mlp.switch_mlp.up_proj": False,
        },
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_pack_gives_the_logits_of_its_source(tmp_path: Path, name: str) -> None:
    source = LAYOUTS[name](tmp_path / "model")
    tokens = prompt_of(30)
    with open_tiny(source, slots=5) as engine:
        expected, arrays = run(engine.target.model, tokens, 11, engine.target.experts)
    pack = pack_checkpoint(source, tmp_path / "pack").directory
    shutil.rmtree(source)  # nothing of a pack is elsewhere
    with open_tiny(pack, slots=5) as engine:
        got, state = run(engine.target.model, tokens, 11, engine.target.experts)
        assert mx.array_equal(got, expected)
        assert all(mx.array_equal(state[part], arrays[part]) for part in arrays)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_of_a_pack_is_accounted_for_and_every_record_is_one_read(
    tmp_path: Path, name: str
) -> None:
    source = open_checkpoint(LAYOUTS[name](tmp_path / "model"))
    pack = open_checkpoint(pack_checkpoint(source.directory, tmp_path / "pack").directory)
    assert pack.layout == "pack"
    names = [tensor for line in pack.account() for tensor in line.names]
    assert sorted(names) == sorted(pack.table.tensors)
    assert {line.category for line in pack.account()} == {line.category for line in source.account()}
    layouts, originals = pack.expert_layouts(mtp=True), source.expert_layouts(mtp=True)
    assert layouts.keys() == originals.keys()
    with FileSource(pack.table.files) as packed, FileSource(source.table.files) as files:
        for layer, layout in layouts.items():
            original = originals[layer]
            assert (layout.components, layout.specs, layout.width) == (
                original.components,
                original.specs,
                original.width,
            )
            for expert in (0, 7, 15):
                (read,) = layout.record.reads(expert)
                assert read.offset % ALIGNMENT == 0
                memory = [[bytearray(n) for n in layout.record.component_lengths] for _ in range(2)]
                views = [[memoryview(part) for part in parts] for parts in memory]
                packed.read_runs([read], views[0])
                files.read_runs(original.record.reads(expert), views[1])
                assert memory[0] == memory[1]


def row_bytes(source: ByteSource, layout: RowLayout, row: int) -> list[bytes]:
    parts = [bytearray(length) for length in layout.component_lengths]
    for span, part in zip(layout.spans(row), parts, strict=True):
        assert source.read_into(span.file, span.offset, [memoryview(part)]) == span.length
    return [bytes(part) for part in parts]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_row_of_a_pack_is_its_sources_in_one_piece(tmp_path: Path, name: str) -> None:
    source = open_checkpoint(LAYOUTS[name](tmp_path / "model"))
    pack = open_checkpoint(pack_checkpoint(source.directory, tmp_path / "pack").directory)
    table, original = pack.ngram, source.ngram
    assert table.record.reads_per_row == 1
    assert original.record.reads_per_row == len(original.components)
    assert (table.components, table.spec, table.numbers) == (
        original.components,
        original.spec,
        original.numbers,
    )
    with FileSource(pack.table.files) as packed, FileSource(source.table.files) as files:
        for row in range(original.num_rows):
            spans = table.record.spans(row)
            assert all(a.offset + a.length == b.offset for a, b in itertools.pairwise(spans))
            assert row_bytes(packed, table.record, row) == row_bytes(files, original.record, row)


def test_rows_are_put_together_alike_whatever_fits_into_memory(tmp_path: Path, monkeypatch) -> None:
    """A part in many pieces, the last one short; components that no unit of two bytes divides."""
    source = build_mlx(tmp_path / "model")
    whole = pack_checkpoint(source, tmp_path / "whole").directory
    monkeypatch.setattr(pack_writer, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(pack_writer, "SHARD_BYTES", 40_000)
    pieces = open_checkpoint(pack_checkpoint(source, tmp_path / "pieces").directory)
    assert len(list(pieces.directory.glob("rows-*.safetensors"))) > 1
    names = [f"flashnext.rows.parts.{number}" for number in range(8)]
    stored = [mx.load(str(path)) for path in whole.glob("rows-*.safetensors")]
    again = [mx.load(str(path)) for path in pieces.directory.glob("rows-*.safetensors")]
    for name in names:
        (one,), (other,) = ([shard[name] for shard in shards if name in shard] for shards in (stored, again))
        assert mx.array_equal(one, other)


@pytest.mark.parametrize("version", [1, 2])
def test_packs_of_earlier_versions_still_open(tmp_path: Path, monkeypatch, version: int) -> None:
    source = build_mlx(tmp_path / "model")
    tokens = prompt_of(30)
    with open_tiny(source, slots=5) as engine:
        expected, _ = run(engine.target.model, tokens, 11, engine.target.experts)
    with monkeypatch.context() as patched:
        if version == 1:  # what it wrote: the table among the others
            patched.setattr(packing, "_rows", lambda _: None)
        patched.setattr(pack_writer, "VERSION", version)
        pack = packing.pack_checkpoint(source, tmp_path / "pack").directory
    edit_manifest(pack, lambda document: document.pop("build"))
    document = msgspec.json.decode((pack / "manifest.json").read_bytes())
    assert (document["version"], "rows" in document) == (version, version == 2)
    identity = document["identity"]
    first = {**document, "identity": ""}  # its identity as that version computed it
    assert hashlib.sha256(msgspec.json.encode(first)).hexdigest() == identity
    assert read_manifest(pack).identity == identity
    with open_tiny(pack, slots=5) as engine:
        assert engine.checkpoint.build is None
        assert engine.checkpoint.ngram.record.reads_per_row == (3 if version == 1 else 1)
        got, _ = run(engine.target.model, tokens, 11, engine.target.experts)
    assert mx.array_equal(got, expected)


def test_what_was_made_for_a_checkpoint_is_at_home_with_its_pack(tmp_path: Path) -> None:
    """A draft, and through the digest that it is held against a calibration and a capture set."""
    source = build_mlx(tmp_path / "model")
    draft = write_draft(tmp_path / "draft", source)
    pack = pack_checkpoint(source, tmp_path / "pack").directory
    of_another = build_mlx(tmp_path / "another", seed=9)
    notices = {}
    for target in (source, pack, of_another):
        request = PlanRequest(context_tokens=64, draft="dflash2", draft_directory=draft)
        with Engine.open(target, request) as engine:
            notices[target] = [notice for notice in engine.notices if notice.startswith("G")]
    assert notices[pack] == notices[source]
    assert not any(notice.startswith("G19: contract says target") for notice in notices[source])
    assert any(notice.startswith("G19: contract says target.digest") for notice in notices[of_another])
    edit_manifest(pack, lambda document: document.pop("build"))
    with Engine.open(pack, request) as engine:
        assert any(notice.startswith("G19: contract says target.digest") for notice in engine.notices)


def test_stock_tools_list_and_read_the_shards(tmp_path: Path) -> None:
    pack = pack_checkpoint(build_mlx(tmp_path / "model"), tmp_path / "pack").directory
    manifest = read_manifest(pack)
    for layer in manifest.layers:
        with safe_open(pack / layer.file, "numpy") as shard:
            names = [f"flashnext.layers.{layer.layer}.experts.{e}" for e in range(16)]
            assert sorted(shard.keys()) == sorted(names)
            assert shard.get_tensor(names[3]).shape == (layer.stride,)
    assert mx.load(str(pack / "other-001.safetensors"))


def test_a_damaged_record_stops_the_answer(tmp_path: Path) -> None:
    pack = pack_checkpoint(build_mlx(tmp_path / "model"), tmp_path / "pack").directory
    prompt = prompt_of(24)
    with open_tiny(pack, slots=6) as engine:
        assert len(greedy(engine, prompt, 4)) == 4
    for expert in range(16):
        flip(pack / "experts-002.safetensors", ALIGNMENT * (1 + expert) + 9)
    with open_tiny(pack, slots=6) as engine, pytest.raises(RecordCorrupt, match="of layer 2 in experts-002"):
        greedy(engine, prompt, 4)


@pytest.mark.parametrize("verify", ["first", "every"])
def test_the_plan_says_when_records_are_compared(tmp_path: Path, verify: str) -> None:
    from mlx_flashnext.engine.engine import Engine

    pack = pack_checkpoint(build_mlx(tmp_path / "model"), tmp_path / "pack").directory
    request = PlanRequest(context_tokens=64, slots_per_layer=4, verify_reads=verify)  # type: ignore[arg-type]
    with Engine.open(pack, request) as engine:
        assert engine.plan.to_dict()["verify_reads"] == verify
        assert len(greedy(engine, prompt_of(6), 3)) == 3
