"""Train the demo model; `--processes 2` shares every batch between two single-thread processes.

Threads lose on products this small.  Two processes are the faster way on idle cores; on cores shared with
other work their lock step costs more than it gains, and one process is the better choice.

    python -m bench.demo.train --work SCRATCH --steps 1000 --length 256 --rows 8
    python -m bench.demo.train --work SCRATCH --steps 2000 --length 512 --rows 4 --decay-from 1200 --resume

Reads `SCRATCH/tokenizer` and `SCRATCH/data`, writes `SCRATCH/run/{checkpoint.pt,log.csv}`.  Everything is
seeded by the step number, so a resumed run sees the batches an uninterrupted one would have seen.
"""

from __future__ import annotations

import argparse
import csv
import os
import pathlib
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tokenizers import Tokenizer
from torch import Tensor, nn

from . import layers, net
from .config import text_config
from .optimizer import Optimizer
from .packing import Rows, load
from .tokenizer import token_ids

MTP_WEIGHT, MTP_EVERY = 0.2, 2
BALANCE_WEIGHT, INDEX_WEIGHT = 0.01, 0.5


def compile_parts() -> None:
    """Compile the element-wise heavy parts.

    Not the attention: torch 2.13 compiles the indexer's backward to NaN on this CPU.  Not the experts: they
    sort.
    """
    torch._dynamo.config.recompile_limit = 64
    for owner, name in (
        (layers, "hc_read"),
        (net, "hc_write"),
        (net, "weighted_cross_entropy"),
        (layers.GatedDeltaNet, "forward"),
        (layers.NgramMemory, "forward"),
    ):
        setattr(owner, name, torch.compile(getattr(owner, name), dynamic=False))


def losses(
    model: net.DemoModel, batch: Tensor, weights: Tensor, with_mtp: bool, sparse: bool
) -> dict[str, Tensor]:
    """Return the parts of the loss for rows `[B,T+2]`; the two extra tokens are the last cells' targets."""
    t = batch.shape[1] - 2
    tokens = batch[:, :t]
    hidden, r, balance, index = model.trunk(tokens, sparse)
    head = model.lm_head.weight
    out = {
        "loss": net.weighted_cross_entropy(
            hidden, head, batch[:, 1 : t + 1].flatten(), weights[:, 1 : t + 1].flatten()
        )
    }
    if with_mtp:
        nxt = batch[:, 1 : t + 1]
        emb = model.embed_tokens(nxt).flatten(0, 1)
        hidden, bal, idx = model.mtp(r, emb, nxt, sparse)
        out["mtp"] = net.weighted_cross_entropy(
            hidden, head, batch[:, 2:].flatten(), weights[:, 2:].flatten()
        )
        balance, index = balance + bal, index + idx
    out["balance"], out["index"] = balance, index
    return out


def rate(step: int, steps: int, decay_from: int) -> float:
    """Return the learning-rate scale: short warm-up, constant, linear to almost zero."""
    if step < 40:
        return (step + 1) / 40
    if step < decay_from:
        return 1.0
    return max(0.01, (steps - step) / max(1, steps - decay_from))


def share_gradients(params: list[nn.Parameter], world: int) -> None:
    """Replace every gradient by its mean over the processes."""
    grads = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in params])
    dist.all_reduce(grads)
    for p, g in zip(params, grads.div_(world).split([p.numel() for p in params]), strict=True):
        p.grad = g.view_as(p)


def worker(rank: int, world: int, args: argparse.Namespace) -> None:
    """Run one process of the group; all hold the same weights after every step."""
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(args.port))
        dist.init_process_group("gloo", rank=rank, world_size=world)
    layers.COMPUTE.dtype = torch.bfloat16
    cfg = text_config(token_ids(Tokenizer.from_file(str(args.work / "tokenizer" / "tokenizer.json"))))
    model = net.build(cfg, args.seed)
    opt, start, run = Optimizer(model, args.muon_lr, args.adam_lr), 0, args.work / "run"
    run.mkdir(parents=True, exist_ok=True)
    if args.resume:
        state = torch.load(run / "checkpoint.pt", weights_only=True)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["optimizer"])
        start = state["step"]
    if not args.eager:
        compile_parts()
    params = [p for p in model.parameters() if p.requires_grad]
    rows = Rows(load(args.work / "data" / "train.npz"), args.length + 2, args.seed)
    begin, history = time.time(), []
    if rank == 0:
        print(
            f"{net.count_parameters(model)} parameters, {len(rows)} rows of {args.length}, from step {start}",
            flush=True,
        )
    for step in range(start, args.steps):
        batch, weights = rows.batch(step * world + rank, args.rows)
        parts = losses(model, batch, weights, step % MTP_EVERY == 0, step >= args.sparse_from)
        total = parts["loss"] + BALANCE_WEIGHT * parts["balance"] + INDEX_WEIGHT * parts["index"]
        if "mtp" in parts:
            total = total + MTP_WEIGHT * MTP_EVERY * parts["mtp"]
        total.backward()
        if world > 1:
            share_gradients(params, world)
        norm = float(nn.utils.clip_grad_norm_(params, args.clip, foreach=True))
        scale = rate(step, args.steps, args.decay_from or args.steps)
        opt.step(scale)
        for p in params:
            p.grad = None
        history.append({k: float(v.detach()) for k, v in parts.items()})
        if rank == 0 and ((step + 1) % args.log_every == 0 or step + 1 == args.steps):
            report(run / "log.csv", step + 1, history, time.time() - begin, scale, norm, args, world)
            history = []
        if rank == 0 and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
            state = {"model": model.state_dict(), "optimizer": opt.state_dict(), "step": step + 1}
            torch.save(state, run / "checkpoint.tmp")
            (run / "checkpoint.tmp").replace(run / "checkpoint.pt")
    if world > 1:
        dist.destroy_process_group()


def report(
    path: pathlib.Path,
    step: int,
    history: list[dict[str, float]],
    seconds: float,
    scale: float,
    norm: float,
    args: argparse.Namespace,
    world: int,
) -> None:
    """Append one line of means to the log and print it."""
    mean = {
        k: float(np.mean([h[k] for h in history if k in h] or [float("nan")]))
        for k in ("loss", "mtp", "balance", "index")
    }
    row = {
        "step": step,
        "tokens": args.length * args.rows * world,
        "seconds": round(seconds, 1),
        "rate": round(scale, 4),
        "grad_norm": round(norm, 3),
        **{k: round(v, 4) for k, v in mean.items()},
    }
    is_new = not path.exists()
    with path.open("a", newline="") as f:
        writer = csv.DictWriter(f, row)
        if is_new:
            writer.writeheader()
        writer.writerow(row)
    print(row, flush=True)


def main() -> None:
    """Parse arguments and start the group."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--work", type=pathlib.Path, required=True, help="folder outside the work tree")
    ap.add_argument("--steps", type=int, required=True, help="last step of this run")
    ap.add_argument("--length", type=int, default=256)
    ap.add_argument("--rows", type=int, default=8, help="rows per process and step")
    ap.add_argument(
        "--decay-from", type=int, default=0, help="step at which the rate starts to fall (0: never)"
    )
    ap.add_argument("--sparse-from", type=int, default=300, help="first step with hard block selection")
    ap.add_argument("--muon-lr", type=float, default=6e-3)
    ap.add_argument("--adam-lr", type=float, default=3e-3)
    ap.add_argument("--clip", type=float, default=2.0)
    ap.add_argument("--processes", type=int, default=1)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--port", type=int, default=29531)
    ap.add_argument("--log-every", type=int, default=10)
    ap.add_argument("--save-every", type=int, default=50)
    ap.add_argument(
        "--eager", action="store_true", help="skip compilation (about 1.6 times slower, no warm-up)"
    )
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()
    if args.processes == 1:
        worker(0, 1, args)
    else:
        mp.spawn(worker, (args.processes, args), nprocs=args.processes)


if __name__ == "__main__":
    main()
