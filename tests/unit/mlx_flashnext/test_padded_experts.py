"""P66: a pack that stores experts wider than the config computes the same as one that does not."""

import mlx.core as mx
import numpy as np
import pytest

from expert_store.source import FileSource
from mlx_flashnext.checkpoint import Checkpoint, open_checkpoint
from mlx_flashnext.model.quant import ExpertBank, ExpertMatrix, expert_glu
from mlx_flashnext.packing import pack_checkpoint
from mlx_flashnext.stored_numbers import NATIVE, array_memory
from tests.parity.test_streamed_equals_resident import run
from tests.tampering import load, save, store
from tests.tiny.checkpoints import build_mlx
from tests.tiny.engines import open_tiny, prompt_of
from tests.tiny.safetensors_io import Stored
from tests.tiny.tokenizer import write_tokenizer

PADDED = 256


def pad(name: str, stored: Stored, width: int, group_size: int, bits: int) -> Stored:
    """Widen one expert tensor so that all it adds is zero: codes, scales and biases 0 stand for 0."""
    kind = {"F32": np.dtype("<f4"), "U32": np.dtype("<u4")}[stored.dtype]
    value = np.frombuffer(stored.data, kind).reshape(stored.shape)
    if ".down_proj." in name:
        unit = {"weight": 32 // bits if stored.dtype == "U32" else 1}.get(name.rpartition(".")[2], group_size)
        padding = [(0, 0), (0, 0), (0, (PADDED - width) // unit)]
    else:
        padding = [(0, 0), (0, PADDED - width), (0, 0)]
    return store(np.pad(value, padding))


def bank(checkpoint: Checkpoint, layer: int) -> ExpertBank:
    layout = checkpoint.experts[layer]
    count = layout.record.num_experts
    arrays = {part.name: mx.zeros((count, *part.shape), NATIVE[part.dtype]) for part in layout.components}
    views = [array_memory(array) for array in arrays.values()]
    lengths = layout.record.component_lengths
    with FileSource(checkpoint.table.files) as source:
        for expert in range(count):
            for read in layout.record.reads(expert):
                targets = [
                    views[i][expert * lengths[i] : (expert + 1) * lengths[i]]
                    for i in range(read.first, read.end)
                ]
                assert source.read_into(read.file, read.offset, targets) == read.length

    def matrix(name) -> ExpertMatrix:
        parts = (arrays.get(f"{name}_proj.{part}") for part in ("weight", "scales", "biases"))
        return ExpertMatrix(*parts, layout.specs[name])

    return ExpertBank(matrix("gate"), matrix("up"), matrix("down"))


@pytest.mark.parametrize("bits", [None, 4])
def test_padded_and_unpadded_packs_give_equal_outputs(tmp_path, bits):
    plain = open_checkpoint(build_mlx(tmp_path / "plain", bits=bits))
    tensors, config = load(tmp_path / "plain")
    wide = {
        name: pad(name, stored, 64, 32, bits or 32) if ".switch_mlp." in name else stored
        for name, stored in tensors.items()
    }
    padded = open_checkpoint(save(tmp_path / "padded", wide, config))
    assert (plain.experts[0].width, padded.experts[0].width) == (64, PADDED)
    x_TD = mx.random.normal((5, 64), key=mx.random.key(1))
    slots_TK = mx.array([[0, 3, 15, 7], [1, 2, 3, 4], [9, 9, 8, 8], [15, 14, 13, 12], [5, 6, 10, 11]])
    for layer in (0, 3):
        outputs = [expert_glu(x_TD, slots_TK, bank(c, layer)) for c in (plain, padded)]
        assert mx.allclose(*outputs, rtol=1e-5, atol=1e-6)
        assert mx.abs(outputs[0]).max() > 0.01


@pytest.mark.parametrize("bits", [None, 4])
def test_a_padded_pack_streams_the_logits_of_the_one_that_is_not(tmp_path, bits):
    """The same through slots and readers, from the checkpoint and from a pack of it."""
    plain = build_mlx(tmp_path / "plain", bits=bits)
    tensors, config = load(plain)
    wide = {
        name: pad(name, stored, 64, 32, bits or 32) if ".switch_mlp." in name else stored
        for name, stored in tensors.items()
    }
    padded = save(tmp_path / "padded", wide, config)
    write_tokenizer(padded, vocab_size=config["text_config"]["vocab_size"])
    names = [name for line in open_checkpoint(padded).account() for name in line.names]
    assert sorted(names) == sorted(open_checkpoint(padded).table.tensors)
    tokens = prompt_of(20)
    logits = []
    for directory in (plain, padded, pack_checkpoint(padded, tmp_path / "pack").directory):
        with open_tiny(directory, slots=5) as engine:
            logits.append(run(engine.target.model, tokens, 7, engine.target.experts)[0])
    assert mx.allclose(logits[0], logits[1], rtol=1e-4, atol=1e-5)
    assert mx.array_equal(logits[1], logits[2])
