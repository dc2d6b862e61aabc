"""One batch with its gradients by the torch trainer, for the test that holds the MLX trainer against them.

    python -m bench.demo.draft_gradients --write

Writes `tests/unit/drafter/train/torch_gradients.npz`. Runs in the environment with torch; the test needs
none.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafter.train.batches import Blocks, blocks_at
from drafter.train.captures import CapturedDocument
from drafter.train.initial import initial_parameters
from drafter.train.runs import config_of

PLACE = pathlib.Path(__file__).parents[2] / "tests" / "unit" / "drafter" / "train" / "torch_gradients.npz"
VOCAB, HIDDEN, TAPS, NUM_IDS, GAMMA, SHARE = 96, 32, 2, 90, 4.0, 0.7
ARCHITECTURES = {"dflash2": "DFlash2DraftModel", "dflash": "DFlashDraftModel"}


def config(family: str) -> dict[str, Any]:
    """Return a small draft with a layer of each kind; the causal one sees only what is before it."""
    own = {"block_size": 8, "mask_token_id": 93, "target_layer_ids": [1, 3]}
    selector = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 12}
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": "qwen3",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": 12,
        "use_sliding_window": True,
        "vocab_size": VOCAB,
        "num_target_layers": 4,
        "is_causal": None if family == "dflash2" else False,
        "dflash_config": own | (selector if family == "dflash2" else {}),
    }


def tables() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return embedding and head of a pretend target."""
    generator = np.random.default_rng(5)
    embedding = generator.standard_normal((VOCAB, HIDDEN), np.float32)
    return embedding, 0.4 * generator.standard_normal((VOCAB, HIDDEN), np.float32)


def parameters(family: str) -> dict[str, NDArray[np.float32]]:
    """Return parameters in which nothing is at rest."""
    generator = np.random.default_rng(6)
    fresh = initial_parameters(config_of(config(family)), 7)
    return {n: v + 0.1 * generator.standard_normal(v.shape, np.float32) for n, v in fresh.items()}


def batch() -> list[Blocks]:
    """Return blocks of two documents of different lengths, with different numbers of anchors."""
    found = []
    for seed, length, starts in ((1, 40, [3, 9, 10, 31]), (2, 30, [5, 20])):
        generator = np.random.default_rng(seed)
        tokens = generator.integers(0, NUM_IDS, length).astype(np.int32)
        features = generator.standard_normal((length - 1, TAPS * HIDDEN), np.float32)
        document = CapturedDocument(tokens, 3, features, np.zeros((length - 1, 0, 0), np.uint16))
        found.append(blocks_at(document, starts, 8))
    return found


def main() -> None:
    """Compute the gradients, and write them or say that they are the same."""
    import torch

    from .draft_net import DraftNet, pack

    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--write", action="store_true")
    args = ap.parse_args()
    found: dict[str, NDArray[np.float32]] = {}
    for family in ARCHITECTURES:
        draft = config_of(config(family))
        net = DraftNet(draft, *map(torch.from_numpy, tables()), NUM_IDS, torch.float32)
        params = {n: torch.from_numpy(v).requires_grad_() for n, v in parameters(family).items()}
        parts = net.losses(params, pack(batch(), draft), GAMMA)
        (parts.base + SHARE * parts.selector).backward()
        found |= {f"{family}/{name}": value.grad.numpy() for name, value in params.items()}
        found[f"{family}/losses"] = np.asarray([float(part.detach()) for part in parts], np.float32)
    if args.write:
        np.savez_compressed(PLACE, **found)
        return
    stored = np.load(PLACE)
    for name, value in found.items():
        assert np.allclose(stored[name], value, rtol=1e-4, atol=1e-6), name
    print(f"{len(found)} arrays as stored")


if __name__ == "__main__":
    main()
