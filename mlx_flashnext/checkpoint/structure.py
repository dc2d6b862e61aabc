"""Does the config speak of these files at all? Layers, their kinds, the PLE layer, the MTP module.

Entry point: `structure_problems`. Checked before single tensors, because one wrong count makes hundreds of
tensors missing or left over, and the person needs to read the cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mlx_flashnext.checkpoint.grouping import MTP_LAYER, TensorGroups
from mlx_flashnext.checkpoint.refusals import WRONG_PAIR
from mlx_flashnext.config import ModelConfig
from mlx_flashnext.errors import ModelError, WeightMismatch
from mlx_flashnext.names import layer_of

KIND_PREFIXES = {"gdn": ".linear_attn.", "qsa": ".self_attn."}


def structure_problems(
    config: ModelConfig, groups: TensorGroups, text: Mapping[str, object]
) -> Iterator[ModelError]:
    """Yield what makes config.json and the set of tensors two different models."""
    modules: dict[int, list[str]] = {}
    for module in groups.modules:
        layer = layer_of(module)
        if layer is not None and not module.startswith("mtp."):
            modules.setdefault(layer, []).append(module)
    found = modules.keys() | {layer for layer in groups.experts if layer != MTP_LAYER}
    count = config.num_hidden_layers
    beyond, absent = sorted(found - set(range(count))), sorted(set(range(count)) - found)
    if beyond:
        yield _wrong(f"the tensors reach layer {beyond[-1]}", num_hidden_layers=count)
    if absent:
        yield _wrong(f"no tensor belongs to layer {absent[0]}", num_hidden_layers=count)

    for layer, kind in enumerate(config.layer_kinds):
        other = KIND_PREFIXES["qsa" if kind == "gdn" else "gdn"]
        names = modules.get(layer, ())
        if any(other in name for name in names) and not any(KIND_PREFIXES[kind] in name for name in names):
            types = text.get("layer_types")
            said = types[layer] if isinstance(types, list) else kind
            yield _wrong(f"layer {layer} holds {other.strip('.')} tensors", **{f"layer_types[{layer}]": said})

    ple_layers = {layer for layer, names in modules.items() if any(".ple." in name for name in names)}
    ple_layers |= groups.table_layers
    if ple_layers and ple_layers != {config.ple_layer}:
        yield _wrong(
            f"the PLE tensors are in layer index {', '.join(map(str, sorted(ple_layers)))} (counted from 0)",
            ple_layer_ids=text.get("ple_layer_ids"),
        )

    if not config.num_mtp_layers and any(module.startswith("mtp.") for module in groups.modules):
        yield _wrong("the checkpoint holds an MTP module", mtp_num_hidden_layers=0)


def _wrong(fact: str, **said: object) -> WeightMismatch:
    fields = ", ".join(f"{name} = {value!r}" for name, value in said.items())
    return WeightMismatch(
        f"config.json says {fields}, but {fact}",
        hint=WRONG_PAIR,
        **said,
    )
