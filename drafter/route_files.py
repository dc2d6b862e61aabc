"""What the files of trained route hints say: for which router, which draft, and what they were trained on.

Entry points: `SidecarDocument`, `NearDocument`, `read_route_document`, `check_tensors`. Each is a document
and one safetensors file in a directory of their own, beside what they belong to; opening them is for those
who know files. The formats are described in docs/FORMATS.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, TypeVar

import msgspec

from drafter.documents import DocumentRefused, check_version, parse_object
from drafter.facts import SidecarFacts, TensorFacts
from drafter.sidecar import SidecarSizes

SIDECAR_FORMAT = "flashnext-route-sidecar"
NEAR_FORMAT = "flashnext-near-map"
VERSIONS = {SIDECAR_FORMAT: 2, NEAR_FORMAT: 1}
SIDECAR_DIRECTORY, NEAR_DIRECTORY = "sidecar", "near"
DOCUMENT, TENSORS = "routes.json", "routes.safetensors"
STORED = ("F16", "BF16", "F32")

_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_Layers = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 10)]], msgspec.Meta(min_length=1, max_length=1 << 10)
]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Lineage(_Part, frozen=True, omit_defaults=True):
    """What it was trained on; clean rows are of committed text, candidate rows of what a draft proposed.

    Attributes:
        captures_digest: of the capture set.
        target_digest: of the build that was captured.
        num_documents: of the training split.
        clean_rows: rows of committed text.
        candidate_rows: rows of proposed paths, rejected ones included; 0 for a near map.
        calibration_rows: kept apart, for the calibration alone.
        num_steps: of training.
        seed: of first values and batches.
        runtime_version: of this program.
        early_rows: rows of committed text that a sidecar's early trunk learnt from; a near map has none.
    """

    captures_digest: str
    target_digest: str
    num_documents: int
    clean_rows: int
    candidate_rows: int
    calibration_rows: int
    num_steps: int
    seed: int
    runtime_version: str
    early_rows: int = 0


class SidecarDocument(_Part, frozen=True):
    """Of `DRAFT/sidecar`.

    Attributes:
        tensors_digest: SHA-256 of the safetensors file.
        router_digest: over the target's router weights, in the order of its experts.
        draft_digest: of the draft whose states it reads.
        num_layers: of the target.
        num_experts, top_k, layers, hidden_size, rank, num_slots: as in `SidecarSizes`.
        cut: confidence below which an expert is not worth reading.
        lineage: what it was trained on.
    """

    tensors_digest: str
    router_digest: str
    draft_digest: str
    num_layers: _Size
    num_experts: _Size
    top_k: _Size
    layers: _Layers
    hidden_size: _Size
    rank: _Size
    num_slots: _Size
    cut: _Share
    lineage: Lineage

    def sizes(self) -> SidecarSizes:
        """Return its sizes."""
        return SidecarSizes(
            self.hidden_size, self.rank, self.num_slots, tuple(self.layers), self.num_experts, self.top_k
        )

    def facts(self) -> SidecarFacts:
        """Return what the gate compares (G20)."""
        return SidecarFacts(self.router_digest, self.draft_digest, self.num_layers, self.num_experts)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return self.sizes().shapes()


class NearDocument(_Part, frozen=True):
    """Of `MODEL/near`.

    Attributes:
        tensors_digest: SHA-256 of the safetensors file.
        router_digest: as of a sidecar.
        num_layers: of the target.
        num_experts, hidden_size: of it.
        layers: that have a map.
        layers_ahead: how many layers before its turn a layer is guessed.
        num_guesses: experts named of a row.
        cut: confidence below which an expert is not worth reading.
        lineage: what it was trained on.
    """

    tensors_digest: str
    router_digest: str
    num_layers: _Size
    num_experts: _Size
    hidden_size: _Size
    layers: _Layers
    layers_ahead: _Size
    num_guesses: _Size
    cut: _Share
    lineage: Lineage

    def facts(self) -> SidecarFacts:
        """Return what the gate compares (G20); a near map reads no draft."""
        return SidecarFacts(self.router_digest, "", self.num_layers, self.num_experts)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        found: dict[str, tuple[int, ...]] = {}
        for layer in self.layers:
            found[f"layers.{layer}.weight"] = (self.num_experts, self.hidden_size)
            found[f"layers.{layer}.bias"] = (self.num_experts,)
            found[f"layers.{layer}.calibration"] = (2,)
        return found


Routes = TypeVar("Routes", SidecarDocument, NearDocument)
_FORMATS = {SidecarDocument: SIDECAR_FORMAT, NearDocument: NEAR_FORMAT}


def read_route_document(data: bytes, kind: type[Routes]) -> Routes:
    """Return a document of route hints.

    Raises:
        DocumentRefused: it is none of this kind and version, or a field of it cannot be.
    """
    document = parse_object(data, DOCUMENT)
    said = document.pop("format", None), document.pop("version", None)
    check_version(DOCUMENT, said, (_FORMATS[kind], VERSIONS[_FORMATS[kind]]))
    try:
        found = msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise DocumentRefused(f"{DOCUMENT} has a field that cannot be: {error}") from None
    layers = found.layers
    is_ascending = all(one < other for one, other in pairwise(layers))
    if not is_ascending or layers[-1] >= found.num_layers:
        raise DocumentRefused(f"{DOCUMENT} lists layers that {found.num_layers} layers do not have")
    return found


def written(document: SidecarDocument | NearDocument) -> bytes:
    """Return the bytes of a document."""
    name = _FORMATS[type(document)]
    plain = {"format": name, "version": VERSIONS[name], **msgspec.to_builtins(document)}
    return msgspec.json.format(msgspec.json.encode(plain), indent=1) + b"\n"


def check_tensors(document: SidecarDocument | NearDocument, found: Mapping[str, TensorFacts]) -> None:
    """Refuse files whose tensors are not exactly those that the document implies.

    Raises:
        DocumentRefused: names the first that is missing, too many or of another shape or type.
    """
    wanted = document.shapes()
    for name in sorted(wanted.keys() ^ found.keys()):
        raise DocumentRefused(f"{TENSORS} {'lacks' if name in wanted else 'has no use for'} {name}")
    for name, shape in wanted.items():
        tensor = found[name]
        if tensor.shape != shape or tensor.dtype not in STORED:
            raise DocumentRefused(f"{TENSORS} has {name} as {tensor.dtype} {tensor.shape}, wanted {shape}")
