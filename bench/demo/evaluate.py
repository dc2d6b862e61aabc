"""Held-out loss per genre, what quantisation and sparse attention cost, MTP agreement, and expert use.

    python -m bench.demo.evaluate --work SCRATCH --official SCRATCH/hf --pack mlx_flashnext/demo [--json FILE]

Teacher-forced on the held-out documents, in rows of 512 tokens.  The first turn of every document is held
out, later turns are not.  Needs torch, no MLX.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import numpy as np
import torch
from torch.nn import functional

from . import net
from .checkpoint import read_official
from .corpus import GENRES
from .packing import Data, Rows, load
from .prepare import ANSWER_WEIGHT
from .unpack import read_pack


def of_genre(data: Data, genre: int) -> Data:
    """Return the documents of one genre."""
    starts, keep = data["starts"], np.flatnonzero(data["genres"] == genre)
    pick = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in keep])
    lengths = starts[keep + 1] - starts[keep]
    return {
        "tokens": data["tokens"][pick],
        "weights": data["weights"][pick],
        "starts": np.concatenate(([0], lengths.cumsum())),
        "genres": data["genres"][keep],
    }


@torch.no_grad()
def measure(model: net.DemoModel, rows: Rows, num_rows: int, sparse: bool = True) -> dict[str, float]:
    """Return means over the answer tokens of the rows.

    Returns:
        loss: nats of the next token.
        accuracy: how often the most likely token is the next one.
        mtp loss: nats of the next token but one, by the multi-token-prediction module.
        mtp agreement: how often that module's most likely token is the one that the model itself holds most
            likely there, once it has read one token more.
    """
    sums = dict.fromkeys(("loss", "accuracy", "mtp loss", "mtp agreement"), 0.0)
    count = mtp_count = 0.0
    for i in range(0, min(num_rows, len(rows)), 4):
        batch, weights = rows.batch(i // 4, 4)
        tokens = batch[:, :-1]
        mask = weights[:, 1:] * ANSWER_WEIGHT > 1.5
        hidden, r, _, _ = model.trunk(tokens, sparse)
        logits = functional.linear(hidden, model.lm_head.weight).view(*tokens.shape, -1)
        own = logits.argmax(-1)
        sums["loss"] += float(functional.cross_entropy(logits[mask], batch[:, 1:][mask], reduction="sum"))
        sums["accuracy"] += float((own == batch[:, 1:])[mask].sum())
        count += float(mask.sum())
        hidden = model.mtp_hidden(r, tokens, sparse)[0]
        logits = functional.linear(hidden, model.lm_head.weight).view(
            tokens.shape[0], tokens.shape[1] - 1, -1
        )
        mask = mask[:, 1:]
        sums["mtp loss"] += float(functional.cross_entropy(logits[mask], batch[:, 2:][mask], reduction="sum"))
        sums["mtp agreement"] += float((logits.argmax(-1) == own[:, 1:])[mask].sum())
        mtp_count += float(mask.sum())
    return {k: v / (mtp_count if k.startswith("mtp") else count) for k, v in sums.items()}


@torch.no_grad()
def expert_use(model: net.DemoModel, rows: Rows, num_batches: int) -> list[tuple[float, int]]:
    """Return per layer the effective number of experts (exp of the load's entropy) and the unused ones."""
    moes = [layer.mlp for layer in model.layers] + [model.mtp.layers[0].mlp]
    loads = [torch.zeros(m.e) for m in moes]
    for i in range(num_batches):
        model.mtp_logits(rows.batch(i, 4)[0])
        for load_sum, moe in zip(loads, moes, strict=True):
            load_sum += moe.load
    out = []
    for load_sum in loads:
        share = load_sum / load_sum.sum()
        out.append((float(torch.exp(torch.special.entr(share).sum())), int((share < 1e-4).sum())))
    return out


def main() -> None:
    """Print the tables."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--work", type=pathlib.Path, required=True, help="has data/held.npz")
    ap.add_argument("--official", type=pathlib.Path, required=True, help="float32 weights, official layout")
    ap.add_argument("--pack", type=pathlib.Path, required=True, help="the same weights quantised")
    ap.add_argument("--length", type=int, default=512, help="default: four times the QSA budget of 128")
    ap.add_argument("--rows", type=int, default=24, help="rows per genre")
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--json", type=pathlib.Path, help="also write the result here")
    args = ap.parse_args()
    torch.set_num_threads(args.threads)
    held = load(args.work / "data" / "held.npz")
    parts = {genre: of_genre(held, g) for g, genre in enumerate(GENRES)} | {"mixed": held}
    full, packed = read_official(args.official), read_pack(args.pack)
    variants = {
        "quantised": (packed, True),
        "quantised, dense attention": (packed, False),
        "float32": (full, True),
    }
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, (model, sparse) in variants.items():
        print(f"{name}: loss, accuracy, MTP loss, MTP agreement", flush=True)
        found[name] = {}
        for part, data in parts.items():
            result = measure(model, Rows(data, args.length + 1, seed=5), args.rows, sparse)
            found[name][part] = {k: round(v, 5) for k, v in result.items()}
            print(f"  {part:8s} " + " ".join(f"{v:.4f}" for v in result.values()), flush=True)
    mixed = {name: found[name]["mixed"]["loss"] for name in variants}
    over_float = mixed["quantised"] / mixed["float32"] - 1
    over_dense = mixed["quantised"] / mixed["quantised, dense attention"] - 1
    print(f"mixed loss, quantised over float32: {over_float:+.2%}")
    print(f"mixed loss, {args.length} tokens, sparse over dense attention: {over_dense:+.2%}")
    use = expert_use(packed, Rows(held, args.length, seed=5), 6)
    print("effective experts per layer (last: MTP):", " ".join(f"{e:.1f}" for e, _ in use))
    print("unused experts per layer:", " ".join(str(n) for _, n in use))
    if args.json:
        report = {
            "length": args.length,
            "rows": args.rows,
            "variants": found,
            "quantised over float32": round(over_float, 5),
            "sparse over dense": round(over_dense, 5),
            "effective experts": [round(e, 2) for e, _ in use],
            "unused experts": [n for _, n in use],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
