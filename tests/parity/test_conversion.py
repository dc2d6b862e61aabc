"""What `flashnext convert` writes is what MLX's own `quantize` makes of the source, and runs.

The reference reads the source with `mx.load` (or the float32 twin of an FP8 source), maps names by itself and
quantises whole stacks at once; the product does it piece by piece.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from expert_store.source import ByteSource
from mlx_flashnext.checkpoint import open_checkpoint
from mlx_flashnext.config import QuantSpec
from mlx_flashnext.conversion import works
from mlx_flashnext.conversion.recipe import Recipe, parse_spec
from mlx_flashnext.conversion.writing import REPORT_NAME, Converted, convert_checkpoint
from mlx_flashnext.errors import UnsupportedCheckpoint
from mlx_flashnext.packing import pack_checkpoint
from tests.parity.test_layouts import reference_greedy
from tests.tiny.checkpoints import build_hf, build_mlx
from tests.tiny.engines import greedy, open_tiny, prompt_of
from tests.tiny.fp8 import build_fp8
from tests.tiny.weights import TinyModel

SIX, EIGHT = QuantSpec("affine", 6, 32), QuantSpec("affine", 8, 64)
RECIPES: dict[str, Recipe] = {
    "as shipped": Recipe(),
    "mixed": Recipe(
        experts=parse_spec("3:32"),
        trunk=parse_spec("mxfp8"),
        table=parse_spec("nvfp4"),
        mtp_experts=parse_spec("mxfp4"),
        mtp_trunk=SIX,
        also={"router": EIGHT, "hyper": SIX, "indexer": EIGHT, "embedding": SIX},
    ),
    "experts alone": Recipe(trunk=None, table=None, mtp_experts=None, mtp_trunk=None),
    "nothing": Recipe(experts=None, trunk=None, table=None, mtp_experts=None, mtp_trunk=None),
}
SOURCES: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "bfloat16": lambda folder: (build_hf(folder / "bf16", dtype="bfloat16", vision=True),) * 2,
    "float32": lambda folder: (build_hf(folder / "f32"),) * 2,
    "fp8": lambda folder: (build_fp8(folder / "fp8", folder / "twin", trunk=True), folder / "twin"),
}


@pytest.fixture(scope="module", params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a source, and a checkpoint that spells its values out."""
    return SOURCES[request.param](tmp_path_factory.mktemp("source"))


def loaded(directory: Path) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for path in directory.glob("*.safetensors"):
        found |= mx.load(str(path))  # type: ignore[arg-type]
    return found


def renamed(tensors: Mapping[str, mx.array], width: int) -> dict[str, mx.array]:
    """Bring official tensors to the names and shapes of MLX packs, with rules of this test's own."""
    found: dict[str, mx.array] = {}
    for name, value in tensors.items():
        name = name.replace("model.visual.", "vision_tower.").replace(".shard_", ".shards.")
        name = name.replace("model.language_model.", "language_model.model.")
        if name.startswith("lm_head"):
            name = "language_model." + name
        if name.endswith(".experts.gate_up_proj"):
            stem = name.replace("experts.gate_up_proj", "switch_mlp.")
            found[stem + "gate_proj.weight"] = value[:, :width]
            found[stem + "up_proj.weight"] = value[:, width:]
        elif name.endswith(".experts.down_proj"):
            found[name.replace("experts.down_proj", "switch_mlp.down_proj.weight")] = value
        else:
            found[name] = value.moveaxis(1, 2) if name.endswith("conv1d.weight") else value
    return found


def spec_for(name: str, recipe: Recipe) -> QuantSpec | None:
    """Say what a tensor is to become, from the statement's words alone."""
    is_mtp = name.startswith("mtp.")
    if "vision_tower" in name or not name.endswith(".weight") or "norm" in name.split(".")[-2]:
        return None
    if "conv1d" in name:
        return None
    for words, group in (
        ((".gate.weight", "shared_expert_gate"), "router"),
        (("hyper_connection",), "hyper"),
        ((".indexer.",), "indexer"),
        (("embed_tokens",), "embedding"),
    ):
        if any(word in name for word in words):
            return recipe.also.get(group)
    if "ngram_embedding" in name:
        return recipe.table
    if "switch_mlp" in name:
        return recipe.mtp_experts if is_mtp else recipe.experts
    return recipe.mtp_trunk if is_mtp else recipe.trunk


def same_bits(left: mx.array, right: mx.array) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bool(mx.array_equal(left, right))


@pytest.mark.parametrize("name", RECIPES)
def test_every_tensor_is_what_quantising_it_whole_gives(
    source: tuple[Path, Path], name: str, tmp_path: Path
) -> None:
    recipe, (directory, twin) = RECIPES[name], source
    made = convert_checkpoint(directory, tmp_path / "out", recipe)
    written, checkpoint = loaded(made.directory), open_checkpoint(directory)
    plain = mx.float32 if checkpoint.tensors["lm_head"].weight.dtype == "F32" else mx.bfloat16
    seen: set[str] = set()
    for tensor, value in renamed(loaded(twin), checkpoint.config.moe_intermediate_size).items():
        spec = spec_for(tensor, recipe)
        parts = [value.astype(plain) if value.dtype != mx.int64 else value]
        if spec is not None:
            parts = list(mx.quantize(value, group_size=spec.group_size, bits=spec.bits, mode=spec.mode))
            parts = [part if part.dtype in (mx.uint32, mx.uint8) else part.astype(plain) for part in parts]
        stem = tensor.removesuffix(".weight")
        names = [tensor] if spec is None else [f"{stem}.{part}" for part in ("weight", "scales", "biases")]
        for stored, part in zip(names, parts, strict=False):
            assert same_bits(written[stored], part), stored
            seen.add(stored)
    assert seen == set(written)
    assert made.left_plain == ()
    config = json.loads((made.directory / "config.json").read_bytes())
    assert ("quantization" in config) == (name != "nothing")


@pytest.mark.parametrize("name", ["as shipped", "mixed"])
def test_the_output_opens_as_its_config_says_and_answers_as_its_values_do(
    source: tuple[Path, Path], name: str, tmp_path: Path
) -> None:
    made = convert_checkpoint(source[0], tmp_path / "out", RECIPES[name])
    checkpoint = open_checkpoint(made.directory)
    names = [tensor for line in checkpoint.account() for tensor in line.names]
    assert sorted(names) == sorted(checkpoint.table.tensors)
    assert len(names) == len(set(names))
    assert checkpoint.digest == made.digest
    specs = {spec for layout in checkpoint.experts.values() for spec in layout.specs.values()}
    assert specs == {RECIPES[name].experts}
    config = json.loads((made.directory / "config.json").read_bytes())
    assert config.get("quantization") == config.get("quantization_config")
    prompt = prompt_of(12)
    expected = reference_greedy(TinyModel.open(made.directory).model, prompt, 8)
    with open_tiny(made.directory, slots=6) as engine:
        assert greedy(engine, prompt, 8) == expected


def errors(made: Converted) -> dict[str, float]:
    return {f"{error.part} {error.layer}": error.relative for error in made.errors}


def test_reported_errors_are_those_of_the_values_and_fall_with_the_bits(tmp_path: Path) -> None:
    source = build_hf(tmp_path / "model")
    found = {
        bits: convert_checkpoint(source, tmp_path / bits, replace(Recipe(), experts=parse_spec(bits)))
        for bits in ("2", "4", "8", "none")
    }
    experts = [errors(made)["experts 2"] for made in found.values()]
    assert experts[0] > 3 * experts[1] > 30 * experts[2] > experts[3] == 0
    made, values = found["4"], loaded(source)["lm_head.weight"]
    written = loaded(made.directory)
    stem = "language_model.lm_head."
    parts = [written[stem + part] for part in ("weight", "scales", "biases")]
    back = mx.dequantize(*parts, group_size=64, bits=8)
    exact = np.array(values, np.float64)
    expected = np.linalg.norm(np.array(back, np.float64) - exact) / np.linalg.norm(exact)
    assert errors(made)["head None"] == pytest.approx(expected, rel=1e-5)
    report = json.loads((made.directory / REPORT_NAME).read_bytes())
    assert report["errors"] == [error.to_dict() for error in made.errors]
    assert report["source"] == open_checkpoint(source).digest


def test_what_was_dropped_and_what_was_left_plain_is_said(tmp_path: Path) -> None:
    source = build_hf(tmp_path / "model", vision=True, overrides={"shared_expert_intermediate_size": 96})
    made = convert_checkpoint(source, tmp_path / "out", Recipe(keep_mtp=False, keep_vision=False))
    old, new = open_checkpoint(source), open_checkpoint(made.directory)
    gone = {line.category for line in old.account()} - {line.category for line in new.account()}
    assert gone == {"mtp", "mtp experts", "vision"}
    lost = [name for line in old.account() if line.category in gone for name in line.names]
    assert sorted(made.dropped) == sorted(lost)
    assert made.left_plain == tuple(f"layers.{layer}.mlp.shared_expert.down_proj" for layer in range(4))
    assert new.tensors["layers.0.mlp.shared_expert.down_proj"].spec is None


def test_a_pack_of_plain_numbers_converts_to_the_same_bytes(tmp_path: Path) -> None:
    source = build_hf(tmp_path / "model", dtype="bfloat16")
    pack = pack_checkpoint(source, tmp_path / "pack").directory
    out = [
        convert_checkpoint(one, tmp_path / f"{one.name} out", Recipe()).directory for one in (source, pack)
    ]
    left, right = loaded(out[0]), loaded(out[1])
    assert left.keys() == right.keys()
    assert all(same_bits(left[name], right[name]) for name in left)


def test_the_patch_convolution_of_vision_gets_its_channels_last(tmp_path: Path) -> None:
    from tests.tampering import load, save, store

    source = build_hf(tmp_path / "model")
    tensors, config = load(source)
    kernel = np.arange(2 * 3 * 2 * 4 * 5, dtype=np.float32).reshape(2, 3, 2, 4, 5)
    save(source, {**tensors, "model.visual.patch_embed.proj.weight": store(kernel)}, config)
    made = convert_checkpoint(source, tmp_path / "out", Recipe())
    stored = loaded(made.directory)["vision_tower.patch_embed.proj.weight"]
    assert np.array_equal(np.array(stored), kernel.transpose(0, 2, 3, 4, 1))


class Watching(ByteSource):
    """Remembers the largest read."""

    def __init__(self, source: ByteSource) -> None:
        self.source, self.largest = source, 0

    def read_into(self, file, offset, views):
        self.largest = max(self.largest, sum(view.nbytes for view in views))
        return self.source.read_into(file, offset, views)

    def name(self, file):
        return self.source.name(file)

    def close(self):
        self.source.close()


def test_no_more_than_a_piece_is_read_at_once(tmp_path, monkeypatch):
    """The bound on memory, made small: matrices in runs of rows, experts one by one, bytes as before."""
    source = build_fp8(tmp_path / "model", tmp_path / "twin", trunk=True)
    whole = loaded(convert_checkpoint(source, tmp_path / "whole", Recipe()).directory)
    monkeypatch.setattr(works, "PIECE_BYTES", 4096)
    watching: list[Watching] = []

    def watched(files: ByteSource) -> ByteSource:
        watching.append(Watching(files))
        return watching[0]

    made = convert_checkpoint(source, tmp_path / "out", Recipe(), wrap_source=watched)
    checkpoint = open_checkpoint(source)
    record = max(layout.record.record_bytes for layout in checkpoint.experts.values())
    largest = max(info.length for info in checkpoint.table.tensors.values())
    assert watching[0].largest <= max(record, 2 * 4096) < largest
    pieces = loaded(made.directory)
    assert all(same_bits(whole[name], pieces[name]) for name in whole)


QUANTISED: dict[str, Callable[[Path], Path]] = {
    "everything": build_mlx,
    "the table": lambda directory: build_mlx(directory, quantise=lambda module: "ngram" in module),
    "experts": lambda directory: build_mlx(directory, quantise=lambda module: "switch_mlp.up" in module),
}


@pytest.mark.parametrize("name", QUANTISED)
def test_what_was_quantised_before_is_refused(tmp_path: Path, name: str) -> None:
    source = QUANTISED[name](tmp_path / "model")
    with pytest.raises(UnsupportedCheckpoint, match="quantised already") as caught:
        convert_checkpoint(source, tmp_path / "out", Recipe())
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Recipe(experts=parse_spec("4:128")), "128 does not divide hidden_size: 64"),
        (Recipe(table=parse_spec("4:64")), "64 does not divide a row of the table: 96"),
    ],
)
def test_a_group_that_does_not_divide_experts_or_table_is_refused(tmp_path, recipe, words):
    with pytest.raises(UnsupportedCheckpoint, match=words) as caught:
        convert_checkpoint(build_hf(tmp_path / "model"), tmp_path / "out", recipe)
    assert "groups of 32" in caught.value.hint
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("4", QuantSpec("affine", 4, 64)),
        ("3:32", QuantSpec("affine", 3, 32)),
        ("affine:6:128", QuantSpec("affine", 6, 128)),
        ("mxfp4", QuantSpec("mxfp4", 4, 32)),
        ("nvfp4:4:16", QuantSpec("nvfp4", 4, 16)),
        ("none", None),
    ],
)
def test_a_spelling_means_one_quantisation(text: str, spec: QuantSpec | None) -> None:
    assert parse_spec(text) == spec


@pytest.mark.parametrize(
    "text", ["", "7", "4:16", "4:64:2", "mxfp4:8", "nvfp4:4:32", "four", "-4", "4:", "affine", "4.0"]
)
def test_a_spelling_that_means_none_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="Not a quantisation"):
        parse_spec(text)


def test_a_group_of_matrices_that_there_is_not_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpoint, match="norms"):
        Recipe(also={"norms": EIGHT})
