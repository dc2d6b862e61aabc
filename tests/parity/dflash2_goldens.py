"""The reference's draft, replayed through the shipped modules round by round, and what differs.

Entry points: `load_variant`, `replay`, `Differences`. Tolerances are those the goldens were recorded with:
hidden states 2e-4, logits 5e-4, scores 1e-3, rows of probabilities 1e-4, ids exact.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from drafter import block, fuse, selector
from drafter.config import DraftConfig
from drafter.config_reader import read_config
from drafter.context import DraftContext
from drafter.reasons import Report

GOLDEN_DIR = Path(__file__).parent / "golden" / "dflash2"
META = json.loads((GOLDEN_DIR / "goldens.json").read_text())
VARIANTS = tuple(META["variants"])
TOLERANCE = {"hidden": 2e-4, "logits": 5e-4, "scores": 1e-3, "probs": 1e-4}
SAMPLED_AT = 0.8


@functools.cache
def arrays(name: str) -> dict[str, mx.array]:
    """Load one of the golden tensor files."""
    return dict(mx.load(str(GOLDEN_DIR / f"{name}.safetensors")))


def document(variant: str) -> dict[str, object]:
    """Return the `config.json` of a variant."""
    config = json.loads((GOLDEN_DIR / "config.json").read_text())
    top, nested = META["variants"][variant]["overrides"]
    config.update(top)
    config["dflash_config"].update(nested)
    return config


def load_variant(variant: str) -> tuple[DraftConfig, dict[str, mx.array]]:
    """Return config and parameters of a variant, by the product's reader."""
    report = Report()
    config = read_config(document(variant), report)
    assert config is not None, report.refusals
    params = dict(arrays("model"))
    if variant == "kernel3":
        params |= arrays("conv_kernel3")
    if variant == "v1":
        params = {name: value for name, value in params.items() if "_conv." not in name}
        params = {name: value for name, value in params.items() if "candidate_selector" not in name}
    return config, params


def head(hidden_TH: mx.array) -> mx.array:
    """The pretend target's output head."""
    return hidden_TH @ arrays("target")["lm_head.weight"].T


def embed(ids_T: mx.array) -> mx.array:
    """The pretend target's embedding."""
    return arrays("target")["embed_tokens.weight"][ids_T]


@dataclass
class Differences:
    """Largest difference of every kind, and what is not the same at all."""

    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOLERANCE, 0.0))
    wrong: list[str] = field(default_factory=list)

    def compare(self, kind: str, got: mx.array, wanted: mx.array) -> None:
        """Note how far two arrays are apart; what is not a number is infinitely far."""
        assert got.shape == wanted.shape, (kind, got.shape, wanted.shape)
        difference = float(np.abs(np.array(got) - np.array(wanted)).max())
        self.worst[kind] = max(self.worst[kind], np.inf if np.isnan(difference) else difference)

    def same(self, what: str, got: object, wanted: object) -> None:
        """Note that two things differ that must not."""
        if got != wanted:
            self.wrong.append(f"{what}: {got} instead of {wanted}")

    @property
    def agrees(self) -> bool:
        """Return whether everything is within its tolerance."""
        return not self.wrong and all(self.worst[kind] <= limit for kind, limit in TOLERANCE.items())


def replay(
    variant: str,
    *,
    slack: int = 64,
    one_by_one: bool = False,
    between: Callable[[DraftContext], DraftContext] = lambda context: context,
    hidden_out: list[np.ndarray] | None = None,
    dtype: mx.Dtype = mx.float32,
) -> Differences:
    """Run every round of a variant with an incremental context.

    Args:
        variant: of the goldens.
        slack: rows of a ring beyond the window.
        one_by_one: append every row alone.
        between: what happens to the context before every round but the first.
        hidden_out: receives the hidden states of every round.
        dtype: of computation.
    """
    config, params = load_variant(variant)
    params = {name: value.astype(dtype) for name, value in params.items()}
    found = Differences()
    context = DraftContext(params, config, dtype, slack=slack)
    features = arrays("goldens")["features"].astype(dtype)
    for number, about in enumerate(META["variants"][variant]["rounds"]):
        if number:
            context = between(context)
        start, done = about["start"], about["context_from"]
        for first, last in [(i, i + 1) for i in range(done, start)] if one_by_one else [(done, start)]:
            if last > first:
                context.append(fuse.fuse(params, config, features[first:last]), first)
        found.same("end of the context", context.end, start)
        hidden = block.hidden_states(
            params,
            config,
            embed(mx.array(about["block_ids"])).astype(dtype)[None],
            (start,),
            context.layers(),
            context.freqs,
        )[0].astype(mx.float32)
        golden = _Golden(f"{variant}.r{number}.")
        found.compare("hidden", hidden, golden["hidden"])
        if hidden_out is not None:
            hidden_out.append(np.array(hidden))
        _compare_proposal(found, config, params, hidden[1:], about, golden)
    return found


class _Golden:
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __getitem__(self, name: str) -> mx.array:
        return arrays("goldens")[self._prefix + name]


def _compare_proposal(
    found: Differences, config: DraftConfig, params: dict[str, mx.array], hidden_TH, about, golden: _Golden
) -> None:
    logits = selector.unary_logits(config, head, hidden_TH)
    if not config.has_selector:
        path = selector.best_tokens(logits)
        found.compare("logits", path.scores.squeeze(-1), golden["argmax_logit"])
        found.same("path", path.tokens.tolist(), about["path"])
        return
    slots = selector.candidates(logits, config.top_k)
    ids = golden["cand_ids"].astype(mx.int32)
    found.same("candidates", slots.ids.tolist(), mx.sort(ids, axis=-1).tolist())
    found.compare("logits", mx.take_along_axis(logits, ids, axis=-1), golden["cand_logits"])

    anchor = about["block_ids"][0]
    projected = selector.project(params, hidden_TH)
    before = mx.concatenate([mx.full((1, config.top_k), anchor, mx.int32), ids[:-1]])
    lattice = selector.slot_scores(
        params,
        before,
        projected[:, None],
        mx.broadcast_to(ids[:, None], (*before.shape, config.top_k)),
        mx.take_along_axis(logits, ids, axis=-1)[:, None],
    )
    found.compare("scores", lattice, golden["lattice"])

    order = mx.argsort(ids, axis=-1)
    greedy = _walk(params, anchor, projected, slots, 0.0, None)
    assert about["margin_path"] > 2e-3
    found.same("path", greedy.tokens.tolist(), about["path"])
    found.compare("scores", greedy.scores, mx.take_along_axis(golden["path_scores"], order, axis=-1))

    drawn = golden["sampled_path_T0.8"].tolist()
    sampled = _walk(params, anchor, projected, slots, SAMPLED_AT, drawn)
    found.same("sampled path", sampled.tokens.tolist(), drawn)
    found.compare("probs", sampled.probs, mx.take_along_axis(golden["sampled_q_T0.8"], order, axis=-1))


def _walk(params, anchor: int, projected, slots, temperature: float, drawn: list[int] | None):
    def draw(scores: mx.array, position: int) -> mx.array:
        assert drawn is not None
        ids = slots.ids[position].tolist()
        # A fault may take the recorded token out of the candidates: any other then differs.
        return mx.array(ids.index(drawn[position]) if drawn[position] in ids else 0)

    return selector.walk(params, anchor, projected, slots, temperature=temperature, position=0, draw=draw)
