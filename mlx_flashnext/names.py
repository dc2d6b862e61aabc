"""Tensor names of every known `qwen4_exp` layout, brought to one canonical spelling.

Entry points: `parse_name` for tensor names, `parse_override` for keys of the `quantization` config.

Canonical names are the official ones without prefix and without the trailing `.weight`, for example
`layers.0.linear_attn.in_proj_qkv`, `layers.0.linear_attn.A_log`, `embed_tokens`, `lm_head`, `mtp.fc_hidden`.

Invariants:
1. The MTP namespace is recognised before any `layers.N` is looked at: `mtp.layers.0` is never layer 0.
2. Table parts carry their number as an integer; callers order by it, never by text.
3. A name is only renamed, never dropped: what no rule knows comes back as it is, in the trunk.

Source: qwen4exp.md 3.1 to 3.5.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Space = Literal["trunk", "mtp", "vision"]

VISION_PREFIXES = ("model.visual.", "vision_tower.", "visual.")
# The first that fits is stripped; an MTP tensor has one of them, or none, in front of its `mtp.`.
PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")
PARTS = ("weight", "scales", "biases", "weight_scale_inv", "weight_scale")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
NGRAM_TABLE = "ngram_embedding"
HASH_BUFFERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")

# One match for the 150,528 names of the FP8 layout; everything else takes the general path.
_PER_EXPERT = re.compile(
    r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.)?(mtp\.)?layers\.(\d+)\.mlp\."
    r"experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|weight_scale_inv|scales|biases)$"
)
_EXPERTS = re.compile(
    r"^(?P<layer>layers\.\d+)\.mlp\.(?:experts|switch_mlp)\."
    r"(?P<projection>gate_up_proj|gate_proj|up_proj|down_proj)(?:\.(?P<part>\w+))?$"
)
_TABLE = re.compile(
    r"^(?P<layer>layers\.\d+)\.ple\.(?:ple_embedding\.)?ngram_embedding"
    r"(?:[.](?:shard_|shards\.)(?P<part_number>\d+))?(?:\.(?P<part>\w+))?$"
)
_HASH_BUFFER = re.compile(r"^(?P<layer>layers\.\d+)\.ple\.(?P<buffer>" + "|".join(HASH_BUFFERS) + r")$")
_LAYER = re.compile(r"^(?:mtp\.)?layers\.(\d+)\.")


class TensorName(NamedTuple):
    """One stored tensor's place in the model.

    `module` is the canonical name; `part` is one of `PARTS`. `expert` is set for per-expert tensors (FP8
    layout), `table_part` for parts of the n-gram table.
    """

    space: Space
    module: str
    part: str
    expert: int | None = None
    table_part: int | None = None


def parse_name(name: str) -> TensorName:
    """Return the canonical place of one stored tensor name.

    Args:
        name: The name in any known layout, for example `language_model.model.layers.3.mlp.gate.scales`.

    Returns:
        Its namespace, canonical module name and part. Names no rule knows keep their own spelling.
    """
    match = _PER_EXPERT.match(name)
    if match is not None:
        mtp, layer, expert, projection, part = match.group(2, 3, 4, 5, 6)
        space: Space = "mtp" if mtp else "trunk"
        return TensorName(space, f"{mtp or ''}layers.{layer}.mlp.experts.{projection}", part, int(expert))
    if name.startswith(VISION_PREFIXES):
        return TensorName("vision", name, "weight")
    for prefix in PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    if name.startswith("mtp."):
        return _in_space("mtp", name[len("mtp.") :])
    return _in_space("trunk", name)


def parse_override(key: str) -> TensorName:
    """Return the canonical place a key of the `quantization` config speaks of, in any spelling."""
    return parse_name(key if key.endswith(".weight") else key + ".weight")


def layer_of(module: str) -> int | None:
    """Return the layer index a canonical name belongs to, counted within its own namespace, or None."""
    match = _LAYER.match(module)
    return None if match is None else int(match.group(1))


def _in_space(space: Space, rest: str) -> TensorName:
    prefix = "mtp." if space == "mtp" else ""
    match = _EXPERTS.match(rest)
    if match is not None:
        module = f"{prefix}{match['layer']}.mlp.experts.{match['projection']}"
        return TensorName(space, module, match["part"] or "weight")
    match = _TABLE.match(rest)
    if match is not None:
        number = match["part_number"]
        return TensorName(
            space,
            f"{prefix}{match['layer']}.ple.ple_embedding.{NGRAM_TABLE}",
            match["part"] or "weight",
            table_part=None if number is None else int(number),
        )
    match = _HASH_BUFFER.match(rest)
    if match is not None:
        return TensorName(space, f"{prefix}{match['layer']}.ple.ple_embedding.{match['buffer']}", "weight")
    if rest.endswith(".conv1d_weight"):
        return TensorName(space, prefix + rest.removesuffix("_weight"), "weight")
    stem, dot, part = rest.rpartition(".")
    if dot and part in PARTS:
        return TensorName(space, prefix + stem, part)
    return TensorName(space, prefix + rest, "weight")
