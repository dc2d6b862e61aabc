"""Finds, checks, loads and writes trained route hints: a draft's sidecar, a model's near map.

Entry points: `find_routes` (before anything is planned), `load_routes`, `write_routes`. Whatever is wrong
with such files, model and draft run without their hints, and the person is told once why (G20).
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import mlx.core as mx
import msgspec
import numpy as np

from drafter.compat import check_sidecar
from drafter.documents import DocumentRefused
from drafter.facts import TargetFacts, TensorFacts
from drafter.files import replace_file
from drafter.near import NearMap
from drafter.reasons import shown
from drafter.route_files import (
    DOCUMENT,
    NEAR_DIRECTORY,
    SIDECAR_DIRECTORY,
    TENSORS,
    NearDocument,
    Routes,
    SidecarDocument,
    check_tensors,
    read_route_document,
    written,
)
from drafter.sidecar import RouteHead, Sidecar
from expert_store.errors import StoreError
from expert_store.safetensors_index import read_tensor_table
from expert_store.source import FileSource
from mlx_flashnext.checkpoint import Checkpoint
from mlx_flashnext.regular_file import read_regular

USES_SIDECAR: Final = ("sidecar", "both")
USES_NEAR: Final = ("near-linear", "both")
_TRAIN: Final = "flashnext draft train"
_ROUTER: Final = "layers.{}.mlp.gate"
_FLOATS: Final = {"F16": np.float16, "F32": np.float32, "BF16": np.uint16}


def kind_that_loads(hints: Collection[str]) -> str:
    """Return the one kind of hints whose files serve all of these."""
    near, sidecar = (not uses.isdisjoint(hints) for uses in (frozenset(USES_NEAR), frozenset(USES_SIDECAR)))
    return "both" if near and sidecar else "near-linear" if near else "sidecar" if sidecar else "off"


@dataclass(frozen=True, slots=True)
class RouteFiles:
    """What lies there for the hints that were asked for.

    Attributes:
        near: the near map's document, None where there is none or it does not fit.
        near_directory: of its files.
        sidecar: the sidecar's, likewise.
        sidecar_directory: of its files.
        notices: why hints are missing that were asked for.
    """

    near: NearDocument | None = None
    near_directory: Path = Path()
    sidecar: SidecarDocument | None = None
    sidecar_directory: Path = Path()
    notices: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Return what they take in memory: every value as float32, and as it is computed with."""
        documents = [one for one in (self.near, self.sidecar) if one is not None]
        return sum(8 * int(np.prod(shape)) for one in documents for shape in one.shapes().values())


def router_digest(checkpoint: Checkpoint, source: FileSource) -> str:
    """Return the digest of every router's stored values, in the order of layers and experts."""
    digest = hashlib.sha256()
    for layer in range(checkpoint.config.num_hidden_layers):
        for part in checkpoint.tensors[_ROUTER.format(layer)].parts:
            data = bytearray(part.length)
            source.read_into(part.file, part.offset, [memoryview(data)])
            digest.update(f"{layer} {part.dtype} {part.shape}\n".encode())
            digest.update(data)
    return digest.hexdigest()


def route_facts(checkpoint: Checkpoint) -> TargetFacts:
    """Return the facts of a target that route hints are held against; others are empty."""
    with FileSource(checkpoint.table.files) as source:
        digest = router_digest(checkpoint, source)
    config = checkpoint.config
    blank = TargetFacts(
        "",
        "",
        "",
        "",
        config.num_hidden_layers,
        config.hidden_size,
        config.hc_count,
        (),
        config.vocab_size,
        0,
        (),
        None,
        "",
        "",
        "",
        4,
        0,
    )
    return replace(blank, num_experts=config.num_experts, router_digest=digest)


def find_routes(checkpoint: Checkpoint, hints: str, draft: Path | None, draft_digest: str) -> RouteFiles:
    """Look for the files of the hints that were asked for and hold them against target and draft.

    Args:
        checkpoint: the target's.
        hints: the kind that was asked for.
        draft: directory of the draft that will propose, None if none of its kind will.
        draft_digest: of it.
    """
    found, facts = RouteFiles(), None
    if hints in USES_NEAR or hints in USES_SIDECAR:
        facts = route_facts(checkpoint)
    if facts is not None and hints in USES_NEAR:
        place = checkpoint.directory / NEAR_DIRECTORY
        document, why = _judged(place, NearDocument, "", facts, "near map", f"{_TRAIN}-near --captures SET")
        found = replace(found, near=document, near_directory=place, notices=(*found.notices, *why))
    if facts is not None and hints in USES_SIDECAR:
        if draft is None:
            said = f"--hints {hints} reads the route sidecar of a draft, and no such draft proposes: "
            left = "the near map alone guesses" if found.near is not None else "nothing is read ahead"
            return replace(found, notices=(*found.notices, said + left))
        place = draft / SIDECAR_DIRECTORY
        document, why = _judged(
            place,
            SidecarDocument,
            draft_digest,
            facts,
            "route sidecar",
            f"{_TRAIN}-sidecar DIR --captures SET",
        )
        found = replace(found, sidecar=document, sidecar_directory=place, notices=(*found.notices, *why))
    return found


def _judged(
    place: Path, kind: type[Routes], draft_digest: str, facts: TargetFacts, name: str, command: str
) -> tuple[Routes | None, tuple[str, ...]]:
    """Return a document that fits, or why there is none."""
    if not place.is_dir():
        return None, (f"there is no {name}, so its hints are off: {place} (run: {command})",)
    try:
        document = read_route_document(read_regular(place / DOCUMENT), kind)
        _check_files(place, document)
    except (DocumentRefused, OSError, StoreError) as error:
        return None, (f"the {name} cannot be used, so its hints are off: {shown(error)} (run: {command})",)
    verdict = check_sidecar(document.facts(), draft_digest, facts)
    if verdict.reasons:
        return None, tuple(f"{one.code}: {one.message}; its hints are off" for one in verdict.reasons)
    return document, ()


def _check_files(place: Path, document: NearDocument | SidecarDocument) -> None:
    data = read_regular(place / TENSORS, 1 << 32)
    found = hashlib.sha256(data).hexdigest()
    if found != document.tensors_digest:
        raise DocumentRefused(
            f"{TENSORS} has digest {found[:12]}, written with {document.tensors_digest[:12]!a}"
        )
    table = read_tensor_table(place)
    check_tensors(document, {name: TensorFacts(one.dtype, one.shape) for name, one in table.tensors.items()})


def _read(place: Path, document: NearDocument | SidecarDocument) -> dict[str, np.ndarray]:
    """Return every tensor as float32.

    Raises:
        StoreError, DocumentRefused: the files changed since they were judged, or hold no numbers.
    """
    _check_files(place, document)
    table = read_tensor_table(place)
    found: dict[str, np.ndarray] = {}
    with closing(FileSource(table.files)) as source:
        for name, info in table.tensors.items():
            data = bytearray(info.length)
            source.read_into(info.file, info.offset, [memoryview(data)])
            raw = np.frombuffer(data, _FLOATS[info.dtype]).reshape(info.shape)
            wide = (
                (raw.astype(np.uint32) << 16).view(np.float32)
                if info.dtype == "BF16"
                else raw.astype(np.float32)
            )
            if not np.isfinite(wide).all():
                raise DocumentRefused(f"{TENSORS} has values in {name} that are no numbers")
            found[name] = wide
    return found


@dataclass(frozen=True, slots=True)
class LoadedRoutes:
    """Trained hints in memory, and why some that were asked for are not."""

    near: NearMap | None = None
    sidecar: Sidecar | None = None
    notices: tuple[str, ...] = ()


def load_routes(files: RouteFiles, dtype: mx.Dtype, pad_id: int) -> LoadedRoutes:
    """Load what fits.

    Args:
        files: from `find_routes`.
        dtype: of computation.
        pad_id: id that stands for tokens before the start of a text.
    """
    near, sidecar, notices = None, None, files.notices
    try:
        if files.near is not None:
            near = near_of(files.near, _read(files.near_directory, files.near), dtype)
        if files.sidecar is not None:
            arrays = _read(files.sidecar_directory, files.sidecar)
            sidecar = sidecar_of(files.sidecar, arrays, dtype, pad_id)
    except (DocumentRefused, OSError, StoreError) as error:
        notices = (*notices, f"route hints cannot be loaded, so they are off: {shown(error)}")
    return LoadedRoutes(near, sidecar, notices)


def near_of(document: NearDocument, arrays: Mapping[str, np.ndarray], dtype: mx.Dtype) -> NearMap:
    """Return the map of some values."""
    layers = document.layers
    return NearMap(
        {layer: mx.array(arrays[f"layers.{layer}.weight"]).astype(dtype) for layer in layers},
        {layer: mx.array(arrays[f"layers.{layer}.bias"]) for layer in layers},
        {layer: tuple(arrays[f"layers.{layer}.calibration"].tolist()) for layer in layers},
        num_guesses=document.num_guesses,
        cut=document.cut,
    )


def sidecar_of(
    document: SidecarDocument, arrays: Mapping[str, np.ndarray], dtype: mx.Dtype, pad_id: int
) -> Sidecar:
    """Return the sidecar of some values."""
    on_host = ("layer", "heads", "bias", "seen", "calibration")
    params = {name: mx.array(value).astype(dtype) for name, value in arrays.items() if name not in on_host}
    head = RouteHead({name: arrays[name] for name in on_host}, document.layers, document.top_k, document.cut)
    return Sidecar(params, document.sizes(), head, pad_id)


def write_routes(
    place: Path, document: NearDocument | SidecarDocument, arrays: Mapping[str, np.ndarray]
) -> int:
    """Write a document and its tensors, float16, and return the bytes of both; the document comes last.

    Args:
        place: a directory of their own; made if it is not there.
        document: its `tensors_digest` is filled in here.
        arrays: by name.
    """
    place.mkdir(parents=True, exist_ok=True)
    data = _safetensors({name: value.astype(np.float16) for name, value in arrays.items()})
    document = msgspec.structs.replace(document, tensors_digest=hashlib.sha256(data).hexdigest())
    said = written(document)
    (place / DOCUMENT).unlink(missing_ok=True)  # a document never stands beside tensors of another one
    replace_file(place / TENSORS, data)
    replace_file(place / DOCUMENT, said)
    return len(data) + len(said)


def _safetensors(arrays: Mapping[str, np.ndarray]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": "F16",
            "shape": list(array.shape),
            "data_offsets": [place, place + array.nbytes],
        }
        place += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in arrays.values())
