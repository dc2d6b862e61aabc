"""`flashnext show`: what a checkpoint holds, every tensor accounted for, even if it does not open."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.console import Console, counted, size
from cli.engine_factory import Services
from cli.errors import OK, describe
from cli.model_path import FoundModel, chosen_model
from cli.options import ModelOptions

if TYPE_CHECKING:
    from expert_store.safetensors_index import TensorInfo
    from mlx_flashnext.checkpoint import AccountLine, Inspection
    from mlx_flashnext.config import MatrixSpec, ModelConfig

MOST_NAMES = 10


def show(
    context: typer.Context,
    console: Console,
    model: ModelOptions,
    target: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As --model.", show_default=False)
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Show what a checkpoint holds: layout, sizes, quantisation, every tensor, what is missing.

    Reads headers only. The exit code says whether flashnext can run it.
    """
    services: Services = context.obj
    found = chosen_model(target, model.model)
    inspection = services.inspect_checkpoint(found.directory)
    failures = [describe(problem) for problem in inspection.problems]
    if json:
        console.document(_report(found, inspection, with_tensors=tensors))
    else:
        _show(console, found, inspection, with_tensors=tensors)
        for failure in failures[1:]:
            console.note(f"also: {failure.message}")
        if failures:
            console.failure(failures[0])
    return failures[0].code if failures else OK


def _show(console: Console, found: FoundModel, inspection: "Inspection", *, with_tensors: bool) -> None:
    files = inspection.table.files
    stored = sum(line.num_bytes for line in inspection.accounts)
    facts = [
        ("model", found.label),
        ("directory", str(found.directory)),
        (
            "layout",
            f"{inspection.layout}, {counted(len(files), 'file')}, {size(sum(file.size for file in files))}",
        ),
        ("quantisation", _quantisation(inspection)),
        *_geometry(inspection.config),
        ("template", _template(found.directory)[1]),
    ]
    if inspection.checkpoint is not None:
        facts.append(("digest", inspection.checkpoint.digest))
    width = max(len(name) for name, _ in facts)
    for name, fact in facts:
        console.line(f"{name:<{width}}  {fact}")
    console.line()
    infos = inspection.table.tensors
    rows = [
        (
            line.category,
            str(len(line.names)),
            size(line.num_bytes),
            _types(infos[name] for name in line.names),
        )
        for line in inspection.accounts
    ]
    rows.append(("all", str(sum(len(line.names) for line in inspection.accounts)), size(stored), ""))
    console.table(("tensors", "count", "size", "stored as"), rows, right=(1, 2))
    if any(line.category == "vision" for line in inspection.accounts):
        console.line()
        console.line("vision: not read, flashnext reads text only")
    if not inspection.missing:
        console.line()
        console.line("missing: nothing")
    _names(console, "missing", inspection.missing, limit=None if with_tensors else MOST_NAMES)
    _names(console, "not known", inspection.unknown, limit=None if with_tensors else MOST_NAMES)
    if with_tensors:
        _tensors(console, inspection.accounts, infos)


def _template(directory: Path) -> tuple[str | None, str]:
    """Return the digest of the chat template, and what there is to say of it (FIELD P76)."""
    from mlx_flashnext.errors import DocumentCorrupt, DocumentUnreadable
    from mlx_flashnext.text.template import (
        OFFICIAL_DIGEST,
        ChatTemplateFailed,
        read_template,
        template_digest,
    )

    try:
        digest = template_digest(read_template(directory)[0])
    except (ChatTemplateFailed, DocumentCorrupt, DocumentUnreadable) as error:
        return None, error.message
    whose = "the official one" if digest.startswith(OFFICIAL_DIGEST) else "not the official one"
    return digest, f"{digest[:16]}, {whose}"


def _names(console: Console, heading: str, names: tuple[str, ...], *, limit: int | None) -> None:
    if not names:
        return
    console.line()
    console.line(f"{heading}: {len(names)}")
    for name in names[:limit]:
        console.line(f"  {name}")
    if limit is not None and len(names) > limit:
        console.line(f"  and {len(names) - limit} more; --tensors lists them")


def _tensors(
    console: Console, accounts: tuple["AccountLine", ...], infos: Mapping[str, "TensorInfo"]
) -> None:
    console.line()
    for line in accounts:
        for name in line.names:
            info = infos[name]
            shape = " x ".join(map(str, info.shape)) or "scalar"
            console.line(f"{line.category}  {name}  {info.dtype}  {shape}  {size(info.length)}")


def _geometry(config: "ModelConfig") -> list[tuple[str, str]]:
    kinds = Counter(config.layer_kinds)
    mixers = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return [
        ("layers", f"{config.num_hidden_layers} ({mixers}), hidden {config.hidden_size}"),
        (
            "experts",
            f"{config.num_experts} a layer, {config.num_experts_per_tok} a token, "
            f"width {config.moe_intermediate_size}",
        ),
        ("vocabulary", f"{config.vocab_size} ids, {config.max_position_embeddings} positions"),
    ]


def _quantisation(inspection: "Inspection") -> str:
    checkpoint = inspection.checkpoint
    if checkpoint is None:
        return "unknown: the checkpoint does not open"
    first = next(iter(checkpoint.experts.values()))
    experts = {_spec(spec) for layout in checkpoint.experts.values() for spec in layout.specs.values()}
    trunk = Counter(_spec(tensor.spec) for tensor in checkpoint.tensors.values() if tensor.role == "matrix")
    plain = {component.dtype for component in first.components}
    named = ", ".join(sorted(experts)) if experts != {"none"} else f"none ({', '.join(sorted(plain))})"
    record = size(first.record.record_bytes)
    table = _spec(checkpoint.ngram.spec) if checkpoint.ngram.scale is None else "fp8, one scale"
    return f"experts {named}, {record} each; trunk {', '.join(sorted(trunk))}; n-gram {table}"


def _spec(spec: "MatrixSpec | None") -> str:
    from mlx_flashnext.config import Fp8Blocks

    if isinstance(spec, Fp8Blocks):
        return f"fp8 blocks of {spec.rows} x {spec.columns}"
    return "none" if spec is None else f"{spec.mode} {spec.bits}-bit group {spec.group_size}"


def _types(infos: Iterable["TensorInfo"]) -> str:
    counts = Counter(info.dtype for info in infos)
    return ", ".join(f"{count} {dtype}" for dtype, count in counts.most_common())


def _report(found: FoundModel, inspection: "Inspection", *, with_tensors: bool) -> dict[str, Any]:
    from dataclasses import asdict

    from cli.console import as_json_value

    infos, config = inspection.table.tensors, inspection.config
    checkpoint = inspection.checkpoint
    categories: dict[str, Any] = {}
    for line in inspection.accounts:
        categories[line.category] = {"count": len(line.names), "bytes": line.num_bytes}
        if with_tensors:
            categories[line.category]["tensors"] = [
                {"name": name, "dtype": infos[name].dtype, "shape": list(infos[name].shape)}
                for name in line.names
            ]
    return {
        "model": {
            "name": found.label,
            "directory": str(found.directory),
            "layout": inspection.layout,
            "digest": None if checkpoint is None else checkpoint.digest,
            "num_files": len(inspection.table.files),
            "file_bytes": sum(file.size for file in inspection.table.files),
            "template_sha256": _template(found.directory)[0],
        },
        "quantisation": _quantisation(inspection),
        "config": as_json_value(asdict(config)),
        "tensors": categories,
        "missing": list(inspection.missing),
        "unknown": list(inspection.unknown),
        "problems": [describe(problem).to_dict()["error"] for problem in inspection.problems],
    }
