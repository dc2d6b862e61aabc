"""Every format that is read from strangers or from an earlier run. Entry point: `formats`."""

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cli.builds import noted_build
from cli.errors import CommandError
from cli.transcript import FORMAT as CHAT
from cli.transcript import SavedMessage, Transcript, read_transcript
from drafter.calibration import read_record
from drafter.config_reader import read_config
from drafter.contract import read_contract
from drafter.documents import DocumentRefused, parse_object
from drafter.errors import DrafterError
from drafter.promotion import read_promotion
from drafter.reasons import Report
from drafter.record import NO_FEATURES, Line, TraceRefused, sealed
from drafter.record_check import read_trace
from drafter.route_files import DOCUMENT, NearDocument, SidecarDocument, read_route_document, written
from drafter.train import captures
from drafter.train.fit_state import ABOUT, FitState
from drafter.train.fit_state import FILE as FIT
from drafter.train.route_losses import Adam
from drafter.train.runs import FORMAT as TRAINING
from drafter.train.runs import RUN, RunDescription, TrainSettings, read_description
from drafter.train.trained import read_training
from expert_store.errors import StoreError
from expert_store.pack import FORMAT as PACK
from expert_store.pack import (
    MANIFEST_NAME,
    Manifest,
    PackComponent,
    PackFile,
    PackRowPart,
    PackRows,
    read_manifest,
)
from expert_store.pack import VERSION as PACK_VERSION
from expert_store.popularity import Popularity, load_popularity, save_popularity
from expert_store.safetensors_header import decode_header
from expert_store.safetensors_index import INDEX_NAME, read_tensor_table
from mlx_flashnext.checkpoint.quantization import Quantization
from mlx_flashnext.config import ModelConfig, parse_config
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.errors import InvalidRequest
from mlx_flashnext.engine.governor import Governor
from mlx_flashnext.engine.kept_tables import KeptTables, TablesKey
from mlx_flashnext.engine.learned import Learned
from mlx_flashnext.errors import ModelError
from mlx_flashnext.text.generation_config import read_generation_defaults
from mlx_flashnext.traces.replay import replay_trace
from mlx_flashnext.training.prompt_files import parse_prompts
from tests.fuzzing import Format
from tests.golden.traces.generate import DRAWN, TWO_TAPS, Case, record, with_sums
from tests.tiny import drafts
from tests.tiny.checkpoints import tiny_config
from tests.tiny.safetensors_io import Stored, write_safetensors
from tests.unit.drafter.test_promotion import promotion
from tests.unit.drafter.train import sets

COSTS_KEY = TablesKey("d" * 64, "own", "e" * 64, "off", "this machine", 0.5)


def formats(place: Path) -> list[Format]:
    """Return every format that is read from strangers; some readers want a file, which lies in `place`."""
    small = Case("small", [(1, 0)], num_candidates=2, **TWO_TAPS, routes=True, prompt=(3, 1))
    traces = [
        record(small),
        record(replace(small, plan=[(1, 1)], params=DRAWN, stage=NO_FEATURES, layers=(), row_shape=())),
    ]
    rows = PackRows((PackComponent("weight", "U32", (2,), 8),), (PackRowPart(None, 40),))
    files = (PackFile("other-000.safetensors", 10, "f" * 32),)
    pack = Manifest(PACK, PACK_VERSION, "s" * 64, (), files, rows=rows).sealed()
    chat = Transcript(
        CHAT, 1, "demo", "d" * 64, [SavedMessage("user", "hello"), SavedMessage("assistant", "x")]
    )
    config = json.dumps(drafts.document()).encode()
    popularity = place / "popularity.json"
    save_popularity(popularity, Popularity({0: (3.0, 0.0, 1.5), 2: (1.0, 2.0, 0.5)}), model_digest="d" * 64)
    header = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "__metadata__": {"format": "pt"},
    }
    return [
        Format("flashnext-trace", traces, _trace, (TraceRefused,), _reseal, _written),
        Format("replayed trace", traces, lambda data: replay_trace(io.BytesIO(data)), (TraceRefused,),
               _reseal),
        Format("draft contract", [msgspec.json.encode(drafts.contract())], read_contract, (DocumentRefused,),
               rewrite=msgspec.json.encode),
        Format("draft calibration", [msgspec.json.encode(drafts.record())], read_record, (DocumentRefused,),
               rewrite=msgspec.json.encode),
        Format("draft config", [config], _draft_config, (DocumentRefused,)),
        Format("pack manifest", [msgspec.json.encode(pack)], _in_file(place / MANIFEST_NAME, lambda path:
               read_manifest(path.parent)), (StoreError,), _reseal_pack),
        Format("popularity", [popularity.read_bytes()], _in_file(place / "read.json", _popularity),
               (StoreError,)),
        Format("draft costs", [_draft_costs(place / "costs.json")], _in_file(place / "read-costs.json",
               _kept_costs), (DocumentRefused,)),
        Format("chat", [msgspec.json.encode(chat)], _in_file(place / "chat.json", read_transcript),
               (CommandError,)),
        Format("safetensors header", [json.dumps(header).encode()], lambda data: decode_header(data, "x"),
               (StoreError,)),
        *_formats_of_checkpoints(place),
        *_formats_of_training(place),
        *_formats_of_routes(),
        *_formats_of_fits(place),
    ]  # fmt: skip


def _formats_of_checkpoints(place: Path) -> list[Format]:
    shards = place / "shards"
    shards.mkdir(exist_ok=True)
    weight_map = {}
    for name in ("a", "b"):
        tensors = {f"{name}.{part}": Stored("F32", (2,), bytes(8)) for part in ("x", "y")}
        write_safetensors(shards / f"{name}.safetensors", tensors)
        weight_map |= dict.fromkeys(tensors, f"{name}.safetensors")
    index = {"metadata": {"total_size": 32}, "weight_map": weight_map}
    packed = tiny_config() | {
        "quantization": {"bits": 4, "group_size": 32, "lm_head": {"bits": 8, "group_size": 64}}
    }
    configs = [json.dumps(config).encode() for config in (tiny_config(), packed)]
    defaults = {"eos_token_id": [1, 2], "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.95}
    return [
        Format("safetensors index", [json.dumps(index).encode()],
               _in_file(shards / INDEX_NAME, _tensor_table), (StoreError,)),
        Format("model config", configs, _model_config, (ModelError,)),
        Format("generation config", [json.dumps(defaults).encode()],
               _in_file(place / "generation_config.json", lambda path: read_generation_defaults(path.parent)),
               (ModelError,)),
    ]  # fmt: skip


def _formats_of_fits(place: Path) -> list[Format]:
    """Return what a killed fit or run goes on from, and what comes with a draft or is asked of one."""
    adam = Adam({"a": np.arange(6, dtype=np.float32).reshape(2, 3)})
    fit = FitState(place / "fit", {"what": "near", "seed": 1})
    fit.save(3, adam, np.random.default_rng(0))
    with np.load(place / "fit" / FIT) as archive:
        arrays = {name: archive[name] for name in archive.files}
    about = arrays.pop(ABOUT).tobytes()
    trained = {
        "format": "flashnext-draft-training",
        "version": 1,
        "target_digest": "t" * 64,
        "steps_done": 20,
        "log": [{"base": 3.5, "norm": 1.0}, {"base": 0.5, "norm": 0.1}],
    }
    prompts = [
        {"prompt": "hello", "label": "talk"},
        {"messages": [{"role": "user", "content": "x"}], "thinking": False, "guess": "y"},
    ]
    note = {"format": "flashnext-build", "version": 1, "kind": "pack", "directory": str(place), "source": "m"}
    return [
        Format("draft training", [json.dumps(trained).encode()], read_training, (DocumentRefused,)),
        Format("draft promotion", [json.dumps(promotion()).encode()], _promotion, (DocumentRefused,)),
        Format("draft prompts", [b"\n".join(json.dumps(line).encode() for line in prompts)],
               lambda data: list(parse_prompts(data, "prompts.jsonl")), (InvalidRequest,)),
        Format("build note", [json.dumps(note).encode()], _in_file(place / "note.json", _build_note),
               (DocumentRefused,)),
        Format("fit state", [(place / "fit" / FIT).read_bytes()], _in_file(place / "fit" / FIT,
               lambda path: _resumed(path, fit)), (DrafterError,), _recount, is_binary=True),
        Format("fit state's words", [about], _in_file(place / "fit" / FIT, lambda path:
               _resumed(_with_about(path, arrays), fit)), (DrafterError,)),
    ]  # fmt: skip


def _formats_of_routes() -> list[Format]:
    near = partial(read_route_document, kind=NearDocument)
    sidecar = partial(read_route_document, kind=SidecarDocument)
    return [
        _of_routes("near map", demo_dir() / "near", near),
        _of_routes("route sidecar", demo_dir() / "draft" / "sidecar", sidecar),
    ]


def _of_routes(name: str, directory: Path, read: Callable[[bytes], Any]) -> Format:
    seed = msgspec.json.format((directory / DOCUMENT).read_bytes(), indent=-1)
    return Format(name, [seed], read, (DocumentRefused,), rewrite=_all_of_routes)


def _all_of_routes(value: SidecarDocument | NearDocument) -> bytes:
    """Return all that was read: a file leaves out what is as in files before it was there, or says it."""
    document = json.loads(written(value))
    document["lineage"] |= msgspec.to_builtins(msgspec.structs.asdict(value.lineage))
    return json.dumps(document).encode()


def _formats_of_training(place: Path) -> list[Format]:
    identity = sets.identity()
    manifest = {"format": captures.FORMAT, "version": captures.VERSION, **asdict(identity)}
    manifest["identity_digest"] = identity.digest()
    directory = place / "captures"
    if not directory.exists():
        sets.write(directory, 4)
    index = (directory / captures.INDEX).read_bytes()
    settings = TrainSettings(num_steps=6)
    run = RunDescription(drafts.document(), settings, "c" * 64, "t" * 64, "k" * 64, "mean", 124, "mlx")
    said = {"format": TRAINING, "version": 1, **asdict(run)}
    return [
        Format("capture manifest", [json.dumps(manifest).encode()], captures.read_manifest,
               (DocumentRefused,), _redigest, lambda found: json.dumps({**manifest, **asdict(found),
               "identity_digest": found.digest()}).encode()),
        Format("capture index", [index], lambda data: captures.read_index(data, identity),
               (DocumentRefused,)),
        Format("training run", [json.dumps(said).encode()], _in_file(place / RUN, read_description),
               (DrafterError,), rewrite=lambda found: json.dumps({**said, **asdict(found)}).encode()),
    ]  # fmt: skip


def _trace(data: bytes) -> Any:
    return read_trace(io.BytesIO(data))


def _written(lines: Any) -> bytes:
    return b"\n".join(msgspec.json.encode(line) for line in lines) + b"\n"


def _reseal(data: bytes) -> bytes:
    """Make the digests of a trace anew, as far as its lines can be read, and what they add up to."""
    before, told = "", []
    for line in _with_sums(data).splitlines(keepends=True):
        try:
            document = json.loads(line)
            document["digest"] = ""
            plain = msgspec.json.encode(document)
            sealed_line, before = sealed(msgspec.json.decode(plain, type=Line), before)
            told.append(sealed_line)
        except (ValueError, TypeError, RecursionError, TraceRefused):
            told.append(line)
    return b"".join(told)


def _with_sums(data: bytes) -> bytes:
    """Make the ends of answers agree, if all lines can be read and added up."""
    try:
        lines = [msgspec.json.decode(line, type=Line) for line in data.splitlines()]
        return b"".join(msgspec.json.encode(line) + b"\n" for line in with_sums(lines))
    except (ArithmeticError, LookupError, RecursionError, TraceRefused, ValueError):
        return data


def _reseal_pack(data: bytes) -> bytes:
    try:
        return msgspec.json.encode(msgspec.json.decode(data, type=Manifest).sealed())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return data


def _redigest(data: bytes) -> bytes:
    """Make the digest of a capture manifest anew, as far as it can be read."""
    try:
        document = json.loads(data)
        plain = {key: document[key] for key in asdict(sets.identity())}
        document["identity_digest"] = captures.CaptureIdentity(**plain).digest()
        return json.dumps(document).encode()
    except (ValueError, TypeError, LookupError, RecursionError):
        return data


def _model_config(data: bytes) -> Any:
    document = parse_config(data, Path())
    return ModelConfig.from_dict(document), Quantization.from_config(document)


def _draft_config(data: bytes) -> Any:
    return read_config(parse_object(data, "config.json"), Report())


def _draft_costs(path: Path) -> bytes:
    KeptTables(path, COSTS_KEY).save(Learned((1.0, 1.5), (8.0, 3.0), (8.0,), (4.5,), 0.5, 12))
    return path.read_bytes()


def _kept_costs(path: Path) -> Learned:
    tables = KeptTables(path, COSTS_KEY)
    learned = tables.begin()
    if tables.note:
        raise DocumentRefused(tables.note)
    governor = Governor(4, earlier=learned)
    governor.count(0, 0, 1, 1000)
    assert 0 <= governor.width(4) <= 4
    return learned


def _promotion(data: bytes) -> Any:
    found = read_promotion(data)
    return found, found.contraction, found.agreement, found.tokens_per_cycle


def _build_note(path: Path) -> Any:
    build = noted_build(path)
    if build is None:
        raise DocumentRefused("no note of a build that is there")
    return build


def _with_about(path: Path, arrays: Mapping[str, Any]) -> Path:
    """Make a state of arrays and of the words that a file holds."""
    words = np.frombuffer(path.read_bytes(), np.uint8)
    with path.open("wb") as stream:
        np.savez(stream, **{**arrays, ABOUT: words})
    return path


def _resumed(path: Path, fit: FitState) -> Any:
    """Go on from a state; one that is refused must not have changed anything."""
    adam, generator = Adam({"a": np.zeros((2, 3), np.float32)}), np.random.default_rng(7)
    before = generator.bit_generator.state
    try:
        step = fit.resume(adam, generator)
    except DrafterError:
        assert adam.count == 0, f"{path}: half a state was taken"
        assert not adam.params["a"].any(), f"{path}: half a state was taken"
        assert generator.bit_generator.state == before, f"{path}: half a state was taken"
        raise
    generator.random(4)  # the state of the generator is one that it can go on from
    return step, adam.params


def _recount(data: bytes) -> bytes:
    """Make the checksums of an archive anew, as far as it can be read, so that its arrays are."""
    told = bytearray(data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            listed = archive.start_dir
            for entry in archive.infolist():
                lengths = struct.unpack_from("<HHH", data, listed + 28)
                named, more = struct.unpack_from("<HH", data, entry.header_offset + 26)
                start = entry.header_offset + 30 + named + more
                crc = zlib.crc32(data[start : start + entry.file_size])
                struct.pack_into("<I", told, listed + 16, crc)
                struct.pack_into("<I", told, entry.header_offset + 14, crc)
                listed += 46 + sum(lengths)
    except (ValueError, OSError, LookupError, struct.error, zipfile.BadZipFile, NotImplementedError):
        return data
    return bytes(told)


class _Index(msgspec.Struct):
    """What of an index is not for show: numbers beside it may be longer than `json` cares to read."""

    weight_map: dict[str, str]


def _tensor_table(path: Path) -> Any:
    table, said = read_tensor_table(path.parent), path.read_bytes()
    missing = msgspec.json.decode(said, type=_Index).weight_map.keys() - table.tensors.keys()
    assert not missing, f"loaded in part: {missing}"
    return table


def _popularity(path: Path) -> Popularity:
    return load_popularity(path, model_digest="d" * 64, num_experts={0: 3, 2: 3})


def _in_file(path: Path, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    def from_bytes(data: bytes) -> Any:
        path.write_bytes(data)
        return read(path)

    return from_bytes
