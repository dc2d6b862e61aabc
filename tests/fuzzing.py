"""Hostile files for every reader of a format: damaged bytes, and documents that are well spelled and wrong.

Entry points: `formats` (what is read, from what seeds, and how it refuses), `run_cases`. A case fails if a
reader raises what it does not promise, takes long, allocates more than `MOST_BYTES`, or returns something
that is not the whole document.
"""

import io
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from cli.errors import CommandError
from cli.transcript import FORMAT as CHAT
from cli.transcript import SavedMessage, Transcript, read_transcript
from drafter.calibration import read_record
from drafter.config_reader import read_config
from drafter.contract import read_contract
from drafter.documents import DocumentRefused, parse_object
from drafter.errors import DrafterError
from drafter.reasons import Report
from drafter.record import NO_FEATURES, Line, TraceRefused, sealed
from drafter.record_check import read_trace
from drafter.route_files import DOCUMENT, NearDocument, SidecarDocument, read_route_document, written
from drafter.train import captures
from drafter.train.runs import FORMAT as TRAINING
from drafter.train.runs import RUN, RunDescription, TrainSettings, read_description
from expert_store.errors import StoreError
from expert_store.pack import FORMAT as PACK
from expert_store.pack import MANIFEST_NAME, Manifest, PackFile, read_manifest
from expert_store.popularity import Popularity, load_popularity, save_popularity
from expert_store.safetensors_header import decode_header
from expert_store.safetensors_index import INDEX_NAME, read_tensor_table
from mlx_flashnext.checkpoint.quantization import Quantization
from mlx_flashnext.config import ModelConfig, parse_config
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.governor import Governor
from mlx_flashnext.engine.kept_tables import KeptTables, TablesKey
from mlx_flashnext.engine.learned import Learned
from mlx_flashnext.errors import ModelError
from mlx_flashnext.text.generation_config import read_generation_defaults
from mlx_flashnext.traces.replay import replay_trace
from tests.golden.traces.generate import DRAWN, TWO_TAPS, Case, record, with_sums
from tests.tiny import drafts
from tests.tiny.checkpoints import tiny_config
from tests.tiny.safetensors_io import Stored, write_safetensors
from tests.unit.drafter.train import sets

COSTS_KEY = TablesKey("d" * 64, "own", "e" * 64, "off", "this machine", 0.5)
MOST_BYTES = 64 << 20
MOST_SECONDS = 10.0
STRETCH = 100
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**40, -(2**63), 0.5, -0.0, 1e308, 5e-324,
    "", "x", "\x00", "../../etc/passwd", "\u202e", "a" * 300, [], {}, [[]], [None], {"": None}, [0] * 300,
)  # fmt: skip
TOKENS = (
    b"NaN", b"Infinity", b"-", b"1e999", b"[" * 2000, b'{"a":' * 500, b'"\\ud800"', b"\xff\xfe", b"\x00",
    b"9" * 5000, b",", b"}", b"]", b"\n", b'"digest":""', b"0.1e-400",
)  # fmt: skip


@dataclass(frozen=True)
class Format:
    """One kind of file.

    Attributes:
        name: of the format.
        seeds: good files.
        read: returns the document, or raises one of `refusals`.
        refusals: what a reader may raise.
        repair: makes checksums anew, so that the meaning is read.
        rewrite: the bytes of what was read; they must hold all that the file says. None: not compared.
    """

    name: str
    seeds: Sequence[bytes]
    read: Callable[[bytes], Any]
    refusals: tuple[type[Exception], ...]
    repair: Callable[[bytes], bytes] = lambda data: data
    rewrite: Callable[[Any], bytes] | None = None


def formats(place: Path) -> list[Format]:
    """Return every format that is read from strangers; some readers want a file, which lies in `place`."""
    small = Case("small", [(1, 0)], num_candidates=2, **TWO_TAPS, routes=True, prompt=(3, 1))
    traces = [
        record(small),
        record(replace(small, plan=[(1, 1)], params=DRAWN, stage=NO_FEATURES, layers=(), row_shape=())),
    ]
    pack = Manifest(PACK, 1, "s" * 64, (), (PackFile("other-000.safetensors", 10, "f" * 32),)).sealed()
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


def _formats_of_routes() -> list[Format]:
    shipped = {"near map": (demo_dir() / "near", NearDocument)}
    shipped["route sidecar"] = (demo_dir() / "draft" / "sidecar", SidecarDocument)
    found = []
    for name, (directory, kind) in shipped.items():
        seed = msgspec.json.format((directory / DOCUMENT).read_bytes(), indent=-1)
        read = partial(read_route_document, kind=kind)
        found.append(Format(name, [seed], read, (DocumentRefused,), rewrite=_all_of_routes))
    return found


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


def run_cases(form: Format, num_cases: int, seed: int) -> dict[str, int]:
    """Read so many hostile files; return how many were accepted and refused.

    The peak of memory is that of the process where the system tells it: tracing every allocation takes five
    times as long, and is left to the stretches whose peak is suspicious.

    Raises:
        AssertionError: names the case: format, seed and number make it again.
    """
    counts = {"accepted": 0, "refused": 0}
    for start in range(0, num_cases, STRETCH):
        numbers = range(start, min(start + STRETCH, num_cases))
        before = _forget_peak()
        for number in numbers:
            counts[_run_case(form, seed, number, is_traced=before is None)] += 1
        if before is not None and _memory("VmHWM") - before > MOST_BYTES // 2:
            for number in numbers:
                _run_case(form, seed, number, is_traced=True)
    return counts


def _run_case(form: Format, seed: int, number: int, *, is_traced: bool) -> str:
    data = case(form, seed, number)
    where = f"{form.name}, seed {seed}, case {number}"
    refusal, value = "", None
    if is_traced:
        tracemalloc.start()
    began = time.thread_time()  # others may stop this process, and wall time with it
    try:
        value = form.read(data)
    except form.refusals as error:
        refusal = str(error) or "no reason"
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    finally:
        took = time.thread_time() - began
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= MOST_BYTES, f"{where}: {peak} bytes"
    assert took <= MOST_SECONDS, f"{where}: {took:.1f} s"
    assert len(refusal) < 4000, f"{where}: a refusal of {len(refusal)} characters"
    if form.rewrite is not None and not refusal:
        assert holds(json_lines(form.rewrite(value)), json_lines(data)), f"{where}: loaded in part"
    return "refused" if refusal else "accepted"


def _forget_peak() -> int | None:
    """Let the peak of this process begin anew; return its bytes now, None where there is no such thing."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _memory("VmRSS")
    except OSError:
        return None


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def case(form: Format, seed: int, number: int) -> bytes:
    """Return one hostile file."""
    chance = random.Random(f"{form.name} {seed} {number}")
    data = chance.choice(list(form.seeds))
    if chance.random() < 0.5:
        lines = data.splitlines(keepends=True)
        at = chance.randrange(len(lines))
        lines[at] = _other_document(lines[at], chance)
        data = b"".join(lines)
    else:
        for _ in range(chance.randint(1, 4)):
            data = _other_bytes(data, chance)
    return form.repair(data) if chance.random() < 0.6 else data


def json_lines(data: bytes) -> list[Any]:
    """Return the documents of a file, for comparing what two files say."""
    lines = data.splitlines() if data.startswith(b'{"kind"') else [data]
    # As floats: where a fraction may stand a whole number may too, and 10^40 is none that floats have.
    return [json.loads(line, parse_int=float) for line in lines]


def holds(whole: Any, said: Any) -> bool:
    """Return whether a document says all that another one does; defaults may be added."""
    if isinstance(whole, dict) and isinstance(said, dict):
        return all(key in whole and holds(whole[key], said[key]) for key in said)
    if isinstance(whole, list) and isinstance(said, list):
        return len(whole) == len(said) and all(map(holds, whole, said))
    return bool(whole == said)


def _other_document(line: bytes, chance: random.Random) -> bytes:
    """Return a line of JSON with one value, key or length changed."""
    document = json.loads(line)
    holders: list[Any] = []

    def collect(value: Any) -> None:
        if isinstance(value, dict | list) and value:
            holders.append(value)
            for inner in value.values() if isinstance(value, dict) else value:
                collect(inner)

    collect(document)
    holder = chance.choice(holders)
    key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    action = chance.randrange(5)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, list):
        holder.extend([holder[key]] * chance.choice((1, 3, 2000)))
    elif action == 2 and isinstance(holder, dict):
        holder[chance.choice(("", "more", "__class__", key + "x"))] = holder[key]
    elif isinstance(holder[key], int) and chance.random() < 0.5:
        holder[key] = holder[key] + chance.choice((-1, 1, 256, -256))
    else:
        holder[key] = chance.choice(HOSTILE)
    return json.dumps(document, separators=(",", ":")).encode() + (b"\n" if line.endswith(b"\n") else b"")


def _other_bytes(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    end = min(len(data), at + chance.choice((1, 2, 16, 400)))
    action = chance.randrange(7)
    if action == 0:
        return data[:at]
    if action == 1:
        return data[:at] + data[end:]
    if action == 2:
        return data[:at] + bytes(chance.randrange(256) for _ in range(end - at)) + data[end:]
    if action == 3:
        return data[:at] + chance.choice(TOKENS) + data[end:]
    if action == 4:
        return data[:at] + data[at:end] * 2 + data[end:]
    if action == 5 and chance.random() < 0.03:
        return data[:at] + data[at:end] * (1 + (3 << 20) // max(1, end - at)) + data[end:]
    return (
        data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :] if at < len(data) else data
    )


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


def _tensor_table(path: Path) -> Any:
    table, said = read_tensor_table(path.parent), path.read_bytes().decode(errors="replace")
    missing = json.loads(said)["weight_map"].keys() - table.tensors.keys()
    assert not missing, f"loaded in part: {missing}"
    return table


def _popularity(path: Path) -> Popularity:
    return load_popularity(path, model_digest="d" * 64, num_experts={0: 3, 2: 3})


def _in_file(path: Path, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    def from_bytes(data: bytes) -> Any:
        path.write_bytes(data)
        return read(path)

    return from_bytes
