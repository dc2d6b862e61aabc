"""Held-out loss per genre, expert use and the cost of quantisation.

python -m bench.demo.evaluate --work SCRATCH --official SCRATCH/hf --pack mlx_flashnext/demo
"""

from __future__ import annotations

import argparse
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
def answer_loss(model: net.DemoModel, rows: Rows, num_rows: int) -> tuple[float, float, float]:
    """Return nats per answer token, next-token accuracy there, and MTP nats."""
    total = hits = count = mtp = mtp_count = 0.0
    for i in range(0, min(num_rows, len(rows)), 4):
        batch, weights = rows.batch(i // 4, 4)
        tokens = batch[:, :-1]
        mask = weights[:, 1:] * ANSWER_WEIGHT > 1.5
        hidden, r, _, _ = model.trunk(tokens, sparse=True)
        logits = functional.linear(hidden, model.lm_head.weight).view(*tokens.shape, -1)
        total += float(functional.cross_entropy(logits[mask], batch[:, 1:][mask], reduction="sum"))
        hits += float((logits.argmax(-1) == batch[:, 1:])[mask].sum())
        count += float(mask.sum())
        hidden = model.mtp_hidden(r, tokens, sparse=True)[0]
        logits = functional.linear(hidden, model.lm_head.weight).view(
            tokens.shape[0], tokens.shape[1] - 1, -1
        )
        mask = mask[:, 1:]
        mtp += float(functional.cross_entropy(logits[mask], batch[:, 2:][mask], reduction="sum"))
        mtp_count += float(mask.sum())
    return total / count, hits / count, mtp / mtp_count


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
    ap.add_argument("--work", type=pathlib.Path, required=True)
    ap.add_argument("--official", type=pathlib.Path, required=True)
    ap.add_argument("--pack", type=pathlib.Path)
    ap.add_argument("--length", type=int, default=512)
    ap.add_argument("--rows", type=int, default=24, help="rows per genre")
    ap.add_argument("--threads", type=int, default=1)
    args = ap.parse_args()
    torch.set_num_threads(args.threads)
    held = load(args.work / "data" / "held.npz")
    models = {"float32": read_official(args.official)}
    if args.pack:
        models["quantised"] = read_pack(args.pack)
    for name, model in models.items():
        print(f"{name}: nats per answer token, next-token accuracy, MTP nats")
        for g, genre in enumerate(GENRES):
            rows = Rows(of_genre(held, g), args.length + 1, seed=5)
            loss, accuracy, mtp = answer_loss(model, rows, args.rows)
            print(f"  {genre:8s} {loss:.4f} {accuracy:.4f} {mtp:.4f}", flush=True)
        loss, accuracy, mtp = answer_loss(model, Rows(held, args.length + 1, seed=5), args.rows)
        print(f"  {'mixed':8s} {loss:.4f} {accuracy:.4f} {mtp:.4f}", flush=True)
    use = expert_use(models["float32"], Rows(held, args.length, seed=5), 6)
    print("effective experts per layer (last: MTP):", " ".join(f"{e:.1f}" for e, _ in use))
    print("unused experts per layer:", " ".join(str(n) for _, n in use))


if __name__ == "__main__":
    main()
