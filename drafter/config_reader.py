"""From a draft's `config.json` to a `DraftConfig`, or every reason why there is none.

Entry point: `read_config`. Nothing stops at the first fault: a draft for another target shall be answered
with the whole list. A field of the lower table of the source is looked up in `dflash_config` first, then at
the top level, then its default is taken; a field without a default has none here either.

Source: dflash2.md 1.1 (schema), 1.12 (families), 7 (codes).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from fractions import Fraction

from drafter.config import FAMILIES, FULL, SLIDING, DraftConfig, LayerType
from drafter.reasons import Report

# MLX shapes are 32-bit; ids travel to the host as float32, exact up to here.
MAX_SIZE = (1 << 31) - 1
MAX_VOCABULARY = 1 << 24
MAX_BLOCK = 32
MAX_LAYERS = 256
SUPPORTED = ", ".join(sorted(FAMILIES))

# A field that changes what a network computes and that this network does not have.
_FOREIGN = {
    "markov_rank": "DSpark",
    "markov_head_type": "DSpark",
    "sample_from_anchor": "DSpark",
    "confidence_head": "DSpark",
    "transformer_layer_config": "speculators",
    "aux_hidden_state_layer_ids": "speculators (layer boundaries)",
    "speculators_config": "speculators",
    "speculators_model_type": "speculators",
    "sliding_window_non_causal": "speculators",
    "draft_vocab_size": "a reduced vocabulary",
    "eagle_config": "EAGLE",
    "quantization": "a quantised copy",
    "quantization_config": "a quantised copy",
}
_NESTED = {
    "target_layer_ids",
    "block_size",
    "mask_token_id",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "selector_vocab_size",
    "output_multiplier",
    "final_logit_softcapping",
    "input_embedding_scale",
}


class _Missing:
    """Told apart from null, which some fields may be."""


_MISSING = _Missing()


def read_config(document: Mapping[str, object], report: Report) -> DraftConfig | None:
    """Return the draft that a config describes.

    Args:
        document: `config.json`.
        report: receives a reason for every fault and for every default that was taken.

    Returns:
        None if anything was refused.
    """
    before = len(report.refusals)
    fields = _Fields(document, report)
    family = _family(fields)
    hidden = fields.size("hidden_size", "G02")
    layers = fields.size("num_hidden_layers", "G11", most=MAX_LAYERS)
    depth = fields.size("num_target_layers", "G03", most=MAX_LAYERS)
    block = _block(fields)
    taps = _taps(fields, depth, layers)
    attention = _attention(fields, layers, block)
    vocabulary = fields.size("vocab_size", "G05", most=MAX_VOCABULARY)
    mask = fields.size("mask_token_id", "G07", least=0)
    parts = _conv_and_selector(fields, family, hidden, block, vocabulary)
    theta = _rope(fields)
    logits = _logits(fields)
    sizes = {
        "num_heads": fields.size("num_attention_heads", "G11"),
        "num_kv_heads": fields.size("num_key_value_heads", "G11"),
        "head_dim": fields.size("head_dim", "G11"),
        "intermediate_size": fields.size("intermediate_size", "G11"),
    }
    _check_heads(fields, sizes)
    eps = fields.number("rms_norm_eps", "G11")
    longest = fields.size("max_position_embeddings", "G15", default=None)
    if len(report.refusals) != before:
        return None
    values = {
        "family": family,
        "hidden_size": hidden,
        "num_layers": layers,
        "num_target_layers": depth,
        "block_size": block,
        "taps": taps,
        "vocab_size": vocabulary,
        "mask_token_id": mask,
        "rope_theta": theta,
        "rms_norm_eps": eps,
        "max_positions": longest,
        **sizes,
        **attention,
        **parts,
        **logits,
    }
    return DraftConfig(**values)  # type: ignore[arg-type]  # every field above was read with its type


def default_taps(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Return the taps of a config that lists none: spread from 1 to L - 3, halves rounded to even."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    step = Fraction(num_target_layers - 4, num_layers - 1)
    return tuple(round(1 + index * step) for index in range(num_layers))


class _Fields:
    """The fields of a config: each accessor notes a reason and returns None for what it refuses."""

    def __init__(self, document: Mapping[str, object], report: Report) -> None:
        nested = document.get("dflash_config", {})
        self.report = report
        self.top = document
        self.nested: Mapping[str, object] = nested if isinstance(nested, Mapping) else {}
        if not isinstance(nested, Mapping):
            self.refuse("G17", "dflash_config", nested, "an object")
        for name in sorted(set(self.nested) - _NESTED):
            self.refuse("G17", f"dflash_config.{name}", self.nested[name], "no such field is known")

    def get(self, name: str) -> object:
        """Return a field by the look-up rule, or `_MISSING`."""
        if name in _NESTED and name in self.nested:
            return self.nested[name]
        return self.top.get(name, _MISSING)

    def refuse(self, code: str, name: str, value: object, wanted: str) -> None:
        """Note that a field has no value that can be used."""
        given = "nothing" if isinstance(value, _Missing) else value
        self.report.add(
            code,
            name,
            given,
            wanted,
            f"draft config has no usable {name}: {_short(given)}; wanted {wanted}",
            hint="fetch the draft's config.json again; this field has no safe default",
        )

    def size(
        self,
        name: str,
        code: str,
        *,
        least: int = 1,
        most: int = MAX_SIZE,
        default: int | _Missing | None = _MISSING,
    ) -> int | None:
        """Return a whole number from `least` to `most`."""
        value = self.get(name)
        if not isinstance(default, _Missing) and (isinstance(value, _Missing) or value is None):
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.refuse(code, name, value, f"a whole number from {least} to {most}")
            return None
        return value

    def number(self, name: str, code: str, *, default: float | _Missing | None = _MISSING) -> float | None:
        """Return a positive number of float range."""
        value = self.get(name)
        if not isinstance(default, _Missing) and (isinstance(value, _Missing) or value is None):
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(code, name, value, "a positive number")
            return None
        if not 0 < value <= sys.float_info.max:
            self.refuse(code, name, value, "a positive number")
            return None
        return float(value)

    def constant(self, name: str, code: str, allowed: tuple[object, ...]) -> None:
        """Refuse a field that is there and is none of `allowed`."""
        value = self.get(name)
        if not isinstance(value, _Missing) and not any(
            value == a and type(value) is type(a) for a in allowed
        ):
            self.refuse(code, name, value, " or ".join(map(repr, allowed)))


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _family(fields: _Fields) -> str | None:
    """Return the family, or refuse by name what belongs to another (G01)."""
    names = fields.top.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    family = FAMILIES.get(name) if isinstance(name, str) else None
    foreign = [f"{field} ({what})" for field, what in _FOREIGN.items() if _is_set(fields.get(field))]
    if family is None:
        kin = _kin(name)
        fields.report.add(
            "G01",
            "architecture",
            name,
            SUPPORTED,
            f"draft architecture {_short(name)} is {kin}; supported: {SUPPORTED}",
            hint="use --draft mtp, or a draft of a supported architecture",
        )
    if foreign:
        fields.report.add(
            "G01",
            "schema",
            ", ".join(foreign),
            "the schema of DFlash files",
            f"draft config belongs to another schema: {', '.join(foreign)}",
            hint="use the original file; nothing is translated by guess",
        )
    fields.constant("model_type", "G01", ("qwen3",))
    return family


def _is_set(value: object) -> bool:
    return not isinstance(value, _Missing) and value is not None and value is not False


def _kin(name: object) -> str:
    if not isinstance(name, str):
        return "not one name"
    lowered = name.lower()
    if "dspark" in lowered:
        return "of the DSpark family (slot 0 proposes, Markov head), which is not implemented"
    if "eagle" in lowered:
        return "an EAGLE draft (one step a token, boundary taps), which is not implemented"
    return "not known"


def _block(fields: _Fields) -> int | None:
    nested, top = fields.nested.get("block_size", _MISSING), fields.top.get("block_size", _MISSING)
    if not isinstance(nested, _Missing) and not isinstance(top, _Missing) and nested != top:
        fields.report.add("G16", "block_size", nested, top, f"block {_short(nested)} vs {_short(top)}")
        return None
    return fields.size("block_size", "G16", least=2, most=MAX_BLOCK, default=16)


def _taps(fields: _Fields, depth: int | None, layers: int | None) -> tuple[int, ...] | None:
    value = fields.get("target_layer_ids")
    if isinstance(value, _Missing) or value is None:
        if depth is None or layers is None:
            return None
        taps = default_taps(depth, layers)
        fields.report.add(
            "G04", "taps", "not listed", taps, f"tap list by the default rule: {taps}", consequence="info"
        )
    elif isinstance(value, list) and value and all(type(tap) is int for tap in value):
        taps = tuple(value)
    else:
        fields.refuse("G04", "target_layer_ids", value, "a list of layer indices")
        return None
    ends = MAX_LAYERS if depth is None else depth
    if any(not 0 <= tap < ends for tap in taps) or list(taps) != sorted(set(taps)):
        fields.report.add(
            "G04",
            "taps",
            list(taps),
            f"0 to {ends - 1}",
            f"tap list {_short(taps)} does not fit {ends} layers",
        )
        return None
    return taps


def _attention(fields: _Fields, layers: int | None, block: int | None) -> dict[str, object]:
    """Return `layer_types`, `is_causal` and `window` (G11, G12, G13)."""
    for name, allowed in (("attention_bias", (False,)), ("hidden_act", ("silu",))):
        fields.constant(name, "G11", allowed)
    value = fields.get("layer_types")
    kinds: tuple[LayerType, ...] = ()
    if isinstance(value, _Missing) or value is None:
        kinds = (FULL,) * (layers or 0)
    elif isinstance(value, list) and all(kind in (SLIDING, FULL) for kind in value):
        kinds = tuple(value)
    else:
        fields.refuse("G11", "layer_types", value, f"a list of {SLIDING} and {FULL}")
    if layers is not None and kinds and len(kinds) != layers:
        fields.refuse("G11", "layer_types", value, f"{layers} entries")
    window = None
    if SLIDING in kinds:
        window = fields.size("sliding_window", "G11", least=block or 2)
        switch = fields.get("use_sliding_window")
        if isinstance(switch, _Missing) or switch is None:
            fields.report.add(
                "G12",
                "window switch",
                "not said",
                "true",
                "config declares sliding layers and not that they slide; they do",
                consequence="warn",
            )
        elif switch is not True:
            fields.report.add(
                "G12", "window switch", switch, "true", "config disables the window its layers declare"
            )
    causal = fields.get("is_causal")
    causal = None if isinstance(causal, _Missing) else causal
    if causal is not None and not isinstance(causal, bool):
        fields.refuse("G13", "is_causal", causal, "true, false or null")
        causal = None
    resolved = tuple(kind == SLIDING if causal is None else bool(causal) for kind in kinds)
    fields.report.add(
        "G13", "causality", causal, "", f"layers: {_layer_words(kinds, resolved)}", consequence="info"
    )
    return {"layer_types": kinds, "is_causal": resolved, "window": window}


def _layer_words(kinds: tuple[LayerType, ...], causal: tuple[bool, ...]) -> str:
    words = [
        f"{kind.removesuffix('_attention')}/{'causal' if is_causal else 'non-causal'}"
        for kind, is_causal in zip(kinds, causal, strict=True)
    ]
    return ", ".join(f"{word} x{words.count(word)}" for word in dict.fromkeys(words)) or "none"


def _check_heads(fields: _Fields, sizes: Mapping[str, int | None]) -> None:
    heads, kv_heads, width = sizes["num_heads"], sizes["num_kv_heads"], sizes["head_dim"]
    if heads is not None and kv_heads is not None and heads % kv_heads:
        fields.refuse("G11", "num_attention_heads", heads, f"a multiple of {kv_heads} key heads")
    if width is not None and width % 2:
        fields.refuse("G11", "head_dim", width, "an even number: positions turn pairs")


def _rope(fields: _Fields) -> float | None:
    """Return theta, or refuse every rotation but the plain one (G15)."""
    section = fields.get("rope_parameters")
    if isinstance(section, _Missing) or section is None:
        section = {}
    scaling = fields.get("rope_scaling")
    if not isinstance(section, Mapping):
        fields.refuse("G15", "rope_parameters", section, "an object")
        return None
    if not isinstance(scaling, _Missing) and scaling is not None:
        fields.report.add("G15", "rope", scaling, "no scaling", f"unsupported draft rope {_short(scaling)}")
    kind = section.get("rope_type", section.get("type", "default"))
    unknown = sorted(set(section) - {"rope_theta", "rope_type", "type"})
    if kind != "default" or unknown:
        said = {"rope_type": kind} | {name: section[name] for name in unknown}
        fields.report.add("G15", "rope", said, "default", f"unsupported draft rope {_short(said)}")
    fields.constant("partial_rotary_factor", "G15", (1, 1.0))
    nested, top = section.get("rope_theta", _MISSING), fields.get("rope_theta")
    if not isinstance(nested, _Missing) and not isinstance(top, _Missing) and nested != top:
        fields.report.add(
            "G15", "rope_theta", nested, top, f"two rope bases: {_short(nested)}, {_short(top)}"
        )
        return None
    return _Fields({"rope_theta": top if isinstance(nested, _Missing) else nested}, fields.report).number(
        "rope_theta", "G15"
    )


def _conv_and_selector(
    fields: _Fields, family: str | None, hidden: int | None, block: int | None, vocabulary: int | None
) -> dict[str, object]:
    """Return the sizes of convolution and selector: all for DFlash2, none for v1 (G17)."""
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    if family != "dflash2":
        if family == "dflash":
            for name in (*names, "selector_vocab_size"):
                value = fields.get(name)
                if not isinstance(value, _Missing) and value not in (0, None):
                    fields.refuse("G17", name, value, "nothing: the architecture has no such part")
        return {}
    kernel = fields.size(names[0], "G17", most=block or MAX_BLOCK)
    group = fields.size(names[1], "G17")
    rank = fields.size(names[2], "G17")
    top_k = fields.size(names[3], "G17", most=vocabulary or MAX_VOCABULARY)
    if group is not None and hidden is not None and hidden % group:
        fields.refuse("G17", names[1], group, f"a divisor of {hidden}")
    limit = fields.size(
        "selector_vocab_size", "G17", least=top_k or 1, most=vocabulary or MAX_VOCABULARY, default=None
    )
    return {
        "conv_kernel": kernel,
        "conv_group": group,
        "rank": rank,
        "top_k": top_k,
        "selector_vocab_size": limit,
    }


def _logits(fields: _Fields) -> dict[str, object]:
    """Return multiplier, cap and scale, said aloud when they do anything (G18)."""
    multiplier = fields.number("output_multiplier", "G18", default=1.0)
    softcap = fields.number("final_logit_softcapping", "G18", default=None)
    scale = fields.number("input_embedding_scale", "G18", default=1.0)
    if (multiplier, softcap, scale) != (1.0, None, 1.0):
        fields.report.add(
            "G18",
            "logits",
            f"multiplier {multiplier}, cap {softcap}, embedding scale {scale}",
            "",
            f"logits times {multiplier}, cap {softcap}, embedding rows times {scale}",
            consequence="info",
        )
    return {"multiplier": multiplier, "softcap": softcap, "embedding_scale": scale}
