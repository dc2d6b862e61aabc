"""Compare the torch model with the numpy oracle on a sequence longer than the attention budget.

    python -m bench.demo.check_parity --official SCRATCH/hf --work SCRATCH
    python -m bench.demo.check_parity --pack mlx_flashnext/demo --work SCRATCH

Exits with an error above the tolerance; logits of the trunk and of the MTP cells are compared.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import numpy as np
import torch
from safetensors.torch import load_file

from .checkpoint import read_official
from .oracle import Oracle
from .packing import load
from .unpack import official_tensors, read_pack

TOLERANCE = 1e-4


@torch.no_grad()
def main() -> None:
    """Run both and print the largest differences."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--official", type=pathlib.Path)
    ap.add_argument("--pack", type=pathlib.Path)
    ap.add_argument("--work", type=pathlib.Path, required=True)
    ap.add_argument("--tokens", type=int, default=300)
    args = ap.parse_args()
    torch.set_num_threads(1)
    folder = args.pack or args.official
    model = read_pack(folder) if args.pack else read_official(folder)
    tensors = official_tensors(folder) if args.pack else load_file(str(folder / "model.safetensors"))
    oracle = Oracle(
        json.loads((folder / "config.json").read_text())["text_config"],
        {k: v.numpy() for k, v in tensors.items()},
    )
    tokens = load(args.work / "data" / "held.npz")["tokens"][: args.tokens].astype(np.int64)
    batch = torch.from_numpy(tokens)[None]
    logits, mtp = model(batch)[0].numpy(), model.mtp_logits(batch)[0].numpy()
    state, cell, worst, worst_mtp, previous = oracle.start(), {}, 0.0, 0.0, None
    for t, token in enumerate(tokens.tolist()):
        want, stack = oracle.token(token, t, state)
        worst = max(worst, float(np.abs(want - logits[t]).max()))
        if previous is not None:
            worst_mtp = max(
                worst_mtp, float(np.abs(oracle.mtp(previous, token, t - 1, cell) - mtp[t - 1]).max())
            )
        previous = stack
    print(
        f"{len(tokens)} tokens, logits up to {np.abs(logits).max():.2f}: "
        f"largest difference {worst:.2e}, MTP {worst_mtp:.2e}"
    )
    if max(worst, worst_mtp) > TOLERANCE:
        raise SystemExit("the torch model and the oracle disagree")


if __name__ == "__main__":
    main()
