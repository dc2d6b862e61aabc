"""How well do trained hints know native routes, on captured documents that nothing was trained on?

    python -m bench.studies.route_recall --captures SET [--model DIR] [--draft DIR] [--documents 24]

Rows are those of committed text: some blocks of each held-out document, as the draft would see them when it
proposes and as if it proposed what was said. Nothing is served, so that a minute of one core is enough;
`flashnext bench --report predictors` serves, and counts proposed rows too. `near-linear` and `both` are
scored in the first `--near-documents` documents, which have to be read for it. Frequencies are counted of the
training documents. The last line of stdout is one JSON document.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import numpy as np

from drafter.train.captures import HELD_OUT, TRAIN, CaptureSet
from drafter.train.fit_sidecar import SidecarRows
from drafter.train.route_losses import wanted
from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.learned_predictors import averaged
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.reports.predictor_report import MULTIPLES, Scoring, judge
from mlx_flashnext.reports.predictor_report_run import Priors
from mlx_flashnext.training.draft_training import load_draft
from mlx_flashnext.training.route_rows import clean_rows, some_anchors
from mlx_flashnext.training.route_training import near_reads, table_of

AHEAD = 2


def codes_of(engine: Engine, rows: SidecarRows) -> np.ndarray:
    """Return the sidecar's codes of rows."""
    sidecar, table = engine.routes.sidecar, table_of(engine, rows)
    assert sidecar is not None
    embedded = [mx.array(table.rows(rows.ids[:, back]).astype(np.float32)) for back in range(3)]
    from drafter.sidecar import trunk

    context = mx.array(rows.context[rows.anchor].astype(np.float32))
    hidden = mx.array(rows.hidden.astype(np.float32))
    return np.array(trunk(sidecar._params, hidden, embedded, context, mx.array(rows.slot)))


def of_block(
    engine: Engine,
    priors: Priors,
    draws: np.random.Generator,
    codes: np.ndarray | None,
    ids: np.ndarray,
    routes: np.ndarray,
    last: np.ndarray,
    near: dict[int, np.ndarray],
) -> dict[str, np.ndarray]:
    """Return the scores [T, L, E] of every predictor for one block."""
    often, by_token = priors.scores(ids[:, 0].tolist())
    num_layers, num_experts = often.shape[1:]
    found = {
        "random": draws.random(often.shape, np.float32),
        "frequency": often,
        "token-frequency": by_token,
        "previous": 100.0 * wanted(last, num_experts)[None] + often,
    }
    if near:
        early = np.full(often.shape, -np.inf, np.float32)
        for layer, log_odds in near.items():
            early[:, layer] = log_odds
        found["near-linear"] = early
    if codes is None or engine.routes.sidecar is None:
        return found
    head = engine.routes.sidecar.head
    found["sidecar"] = np.ascontiguousarray(head.log_odds(codes, is_refreshed=False).swapaxes(0, 1))
    refreshed = found["sidecar"].copy()
    for layer in range(AHEAD, num_layers):
        codes = head.after(codes, layer - AHEAD, routes[:, layer - AHEAD])
        refreshed[:, layer] = head.log_odds(codes, layer, layer + 1, is_refreshed=True)[0]
    found["sidecar-refreshed"] = refreshed
    if near:
        found["both"] = averaged(found["near-linear"], refreshed)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--captures", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint; the demo if left out")
    parser.add_argument("--draft", type=Path, default=None, help="the one beside the model if left out")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--near-documents", type=int, default=6)
    parser.add_argument("--anchors", type=int, default=12)
    options = parser.parse_args()
    model = options.model or demo_dir()
    draft = options.draft or model / "draft"
    captures, draws = CaptureSet.open(options.captures), np.random.default_rng(0)
    with Engine.open(model, PlanRequest(context_tokens=512)) as probe:
        num_experts = probe.plan.num_experts
    request = PlanRequest(
        context_tokens=4096,
        slots_per_layer=num_experts - 1,
        draft="dflash2",
        draft_directory=draft,
        hints="both",
    )
    with Engine.open(model, request) as engine:
        for notice in engine.notices:
            print(f"note: {notice}")
        config, loaded = engine.config, load_draft(engine, draft)
        layers = tuple(range(config.num_hidden_layers))
        top_k, most = config.num_experts_per_tok, loaded.config.block_size
        priors = Priors(layers, config.num_experts, top_k, config.vocab_size)
        for info in captures.of_split(TRAIN):
            document = captures.read(info)
            priors.add(document.tokens[:-1].tolist(), document.routes)
        parts = {name: Scoring(layers, config.num_experts, top_k, most) for name in ("all", "near")}
        for number, info in enumerate(captures.of_split(HELD_OUT)[: options.documents]):
            document = captures.read(info)
            starts = some_anchors(document, options.anchors, draws)
            rows = clean_rows(engine, loaded, document, number, starts)
            codes = None if engine.routes.sidecar is None else codes_of(engine, rows)
            near, is_near = engine.routes.near, number < options.near_documents
            reads = near_reads(engine, document.tokens.tolist()) if near is not None and is_near else {}
            begins = np.flatnonzero(rows.slot == 0)
            for begin, end, start in zip(begins, [*begins[1:], len(rows)], starts, strict=True):
                at = slice(begin, end)
                early = {}
                for layer, read in reads.items():
                    assert near is not None
                    some = mx.array(read[start : start + end - begin].astype(np.float32))
                    early[layer] = np.array(near.log_odds(layer, some))
                some_codes = None if codes is None else codes[at]
                scores = of_block(
                    engine, priors, draws, some_codes, rows.ids[at], rows.routes[at],
                    document.routes[start - 1], early,
                )  # fmt: skip
                truth = wanted(rows.routes[at], config.num_experts)
                parts["all"].add(
                    {n: s for n, s in scores.items() if n not in ("near-linear", "both")}, truth, 0
                )
                if early:
                    parts["near"].add(scores, truth, 0)
    result = {}
    for name, scoring in parts.items():
        figures = scoring.results()
        if not figures:
            continue
        print(f"{name}: {int(scoring.num_rows.sum())} rows; recall at {scoring.sizes} experts")
        for one in figures:
            by_layer = " ".join(f"{value:.2f}" for value in one.by_layer)
            off = "-" if one.calibration_error is None else f"{one.calibration_error:.4f}"
            recall = " ".join(f"{value:.3f}" for value in one.recall)
            print(f"{one.name:18} {recall}  off by {off}  @{scoring.sizes[2]} by layer {by_layer}")
        print("  by row", {one.name: [round(value, 2) for value in one.by_row] for one in figures[-2:]})
        bars = judge(figures, [])
        print(f"  bars: {bars}")
        result[name] = {"figures": [asdict(one) for one in figures], "bars": asdict(bars)}
    print(json.dumps({"multiples": MULTIPLES, **result}))


if __name__ == "__main__":
    main()
