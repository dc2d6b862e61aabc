"""A draft on disk: listed without reading tensors, loaded bit for bit, refused by name when it is hostile."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from drafter import calibration
from drafter import contract as contract_module
from drafter.compat import check_draft
from drafter.contract import contract_of
from drafter.loading import load_parameters
from expert_store.errors import CheckpointNotFound, StoreError
from mlx_flashnext.engine.draft_files import open_draft
from tests.tiny.drafts import document, draft_config, random_parameters, target_facts
from tests.tiny.safetensors_io import Stored, bfloat16_bits, write_safetensors

PARAMS = random_parameters(draft_config())
CARD = "---\nlanguage: en\nlicense: cc-by-nc-nd-4.0\ntags: [draft]\n---\nlicense: mit\n"


def stored(name: str, value: mx.array) -> Stored:
    array = np.array(value)
    if name.endswith("norm.weight"):
        return Stored("F32", array.shape, array.astype("<f4").tobytes())
    return Stored("BF16", array.shape, bfloat16_bits(array).astype("<u2").tobytes())


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    directory = tmp_path / "draft"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(document()))
    (directory / "README.md").write_text(CARD)
    write_safetensors(directory / "model.safetensors", {n: stored(n, v) for n, v in PARAMS.items()})
    with open_draft(directory) as files:
        own = contract_of(
            draft_config(), files.listing, target_facts(), contraction="mean", licence="cc-by-nc-nd-4.0"
        )
    (directory / contract_module.FILE).write_bytes(msgspec.json.encode(own))
    return directory


def refused(directory: Path) -> set[str]:
    with open_draft(directory) as files:
        return {reason.code for reason in check_draft(files.listing, target_facts()).refusals}


def test_a_good_draft_passes_the_gate_and_loads_bit_for_bit(draft: Path) -> None:
    with open_draft(draft) as files:
        answer = check_draft(files.listing, target_facts())
        assert answer.refusals == ()
        assert answer.config is not None
        loaded = load_parameters(answer.config, files.read, lambda a: a.tolist(), dtype=mx.float32)
    for name, value in PARAMS.items():
        wanted = value if name.endswith("norm.weight") else value.astype(mx.bfloat16).astype(mx.float32)
        assert mx.array_equal(loaded[name], wanted), name
    (licence,) = [reason for reason in answer.reasons if reason.code == "G23"]
    assert licence.draft == "cc-by-nc-nd-4.0"


def test_the_digest_sees_config_headers_and_both_ends(draft: Path) -> None:
    """P42: a draft that was converted otherwise is another draft."""

    def digest() -> str:
        with open_draft(draft) as files:
            return files.listing.digest

    before = digest()
    assert digest() == before
    path = draft / "model.safetensors"
    data = bytearray(path.read_bytes())
    assert len(data) < 128 << 10  # else a middle would not be covered
    for place in (len(data) - 1, 8 + struct.unpack("<Q", data[:8])[0]):
        data[place] ^= 1
        path.write_bytes(data)
        assert digest() != before
        data[place] ^= 1
    path.write_bytes(data)
    assert digest() == before
    (draft / "config.json").write_text(json.dumps(document()) + " ")
    assert digest() != before
    assert refused(draft) == {"G10"}  # the contract is of other files


def change_tensors(change: Callable[[dict[str, Stored]], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = {name: stored(name, value) for name, value in PARAMS.items()}
        change(tensors)
        write_safetensors(directory / "model.safetensors", tensors)

    return apply


def packed(tensors: dict[str, Stored]) -> None:
    name = "layers.0.mlp.up_proj.weight"
    tensors[name] = Stored("U32", (48, 4), bytes(48 * 4 * 4))
    tensors["layers.0.mlp.up_proj.scales"] = Stored("BF16", (48, 1), bytes(96))


BY_THE_GATE: dict[str, Callable[[Path], object]] = {
    "a tensor is missing": change_tensors(lambda t: t.pop("fc.weight")),
    "a tensor is extra": change_tensors(lambda t: t.update({"lm_head.weight": t["norm.weight"]})),
    "a tensor is packed": change_tensors(packed),
    "a tensor is of integers": change_tensors(
        lambda t: t.update({"norm.weight": Stored("I32", (32,), bytes(128))})
    ),
    "the contract nests without end": lambda d: (d / contract_module.FILE).write_text('{"a":' * 100_000),
    "the contract is too long": lambda d: (d / contract_module.FILE).write_bytes(b" " * (2 << 20) + b"{}"),
    "the record is not JSON": lambda d: (d / calibration.FILE).write_text('{"date": NaN}'),
    "the config is too long": lambda d: (d / "config.json").write_bytes(b" " * (2 << 20) + b"{}"),
}


@pytest.mark.parametrize("fault", BY_THE_GATE)
def test_the_gate_refuses(draft: Path, fault: str) -> None:
    BY_THE_GATE[fault](draft)
    assert refused(draft) & {"G00", "G10"}


def cut_short(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def linked_away(directory: Path) -> None:
    path = directory / "model.safetensors"
    outside = directory.parent / "outside.safetensors"
    path.rename(outside)
    path.symlink_to(outside)


def header_replaced(header: bytes) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)

    return apply


def pipe(name: str) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)

    return apply


BY_THE_READER: dict[str, Callable[[Path], object]] = {
    "the file is cut short": cut_short,
    "the file is linked away": linked_away,
    "the file is a pipe": pipe("model.safetensors"),
    "the config is a pipe": pipe("config.json"),
    "the contract is a directory": lambda d: (
        (d / contract_module.FILE).unlink(),
        (d / contract_module.FILE).mkdir(),
    ),
    "the config is gone": lambda d: (d / "config.json").unlink(),
    "no tensors": lambda d: (d / "model.safetensors").unlink(),
    "the header is longer than the file": lambda d: (d / "model.safetensors").write_bytes(
        struct.pack("<Q", 1 << 40) + b"{}"
    ),
    "the header nests without end": header_replaced(b'{"a":' * 100_000),
    "offsets beyond the file": header_replaced(
        b'{"norm.weight":{"dtype":"F32","shape":[32],"data_offsets":[0,128]}}'
    ),
    "an absurd shape": header_replaced(
        b'{"norm.weight":{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,0]}}'
    ),
}


@pytest.mark.parametrize("fault", BY_THE_READER)
def test_the_reader_refuses_by_name(draft: Path, fault: str) -> None:
    BY_THE_READER[fault](draft)
    with pytest.raises(StoreError) as refusal:
        open_draft(draft)
    assert refusal.value.message


def test_no_directory_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        open_draft(tmp_path / "nowhere")


def test_a_file_replaced_after_it_was_listed_stops_the_load(draft: Path) -> None:
    with open_draft(draft) as files:
        path = draft / "model.safetensors"
        other = path.with_suffix(".new")
        other.write_bytes(path.read_bytes())
        other.rename(path)
        with pytest.raises(StoreError):
            files.read("layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        (None, None),
        ("# no front matter\nlicense: mit\n", None),
        ("---\ntags: []\n---\nlicense: mit\n", None),
        ("---\nlicense: 'apache-2.0'\n---\n", "apache-2.0"),
        ("---\nlicense: mit", "mit"),
    ],
)
def test_the_licence_is_the_cards(draft: Path, card: str | None, licence: str | None) -> None:
    path = draft / "README.md"
    if card is None:
        path.unlink()
    else:
        path.write_text(card)
    with open_draft(draft) as files:
        assert files.listing.licence == licence
