"""Train a draft for the demo in torch; the run it leaves is one of `flashnext draft train`.

    python -m bench.demo.train_draft --captures SCRATCH/captures --run SCRATCH/run --target mlx_flashnext/demo

MLX's products on the CPU backend are too slow for this (see README.md). Runs in the environment with
torch, resumes from the last checkpoint, and sees the same batches as the MLX trainer would. `flashnext
draft export` makes the draft of the run.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from drafter.files import replace_file
from drafter.train.batches import StepSampler
from drafter.train.captures import TRAIN, CaptureSet
from drafter.train.curve import draw_curve
from drafter.train.initial import initial_parameters
from drafter.train.runs import (
    CURVE,
    FIRST,
    PARAMETERS,
    SECOND,
    Run,
    RunDescription,
    TrainSettings,
)
from drafter.train.schedule import BETAS, EPSILON, rate_at, selector_share

from .draft_net import DraftNet, pack
from .unpack import official_tensors

GEOMETRY: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "sliding_window": 512,
    "block_size": 8,
    "selector_rank": 64,
    "selector_top_k": 16,
}


def draft_document(captures: CaptureSet, *, is_v1: bool = False) -> dict[str, Any]:
    """Return the config of the demo's draft: all layers slide, block rows see each other both ways."""
    identity = captures.identity
    layers = GEOMETRY["num_hidden_layers"]
    own: dict[str, Any] = {
        "block_size": GEOMETRY["block_size"],
        "mask_token_id": identity.vocab_size - 1,
        "target_layer_ids": list(identity.taps),
    }
    if not is_v1:
        own |= {"conv_kernel_size": 2, "conv_group_size": 16}
        own |= {name: GEOMETRY[name] for name in ("selector_rank", "selector_top_k")}
    return {
        "architectures": ["DFlashDraftModel" if is_v1 else "DFlash2DraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "hidden_size": identity.hidden_size,
        "layer_types": ["sliding_attention"] * layers,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "use_sliding_window": True,
        "vocab_size": identity.vocab_size,
        "num_target_layers": identity.num_target_layers,
        "is_causal": False,
        "dflash_config": own,
        **{name: value for name, value in GEOMETRY.items() if not name.startswith(("selector", "block"))},
    }


def target_tables(pack_folder: pathlib.Path) -> tuple[Tensor, Tensor]:
    """Return the demo's embedding and head as the engine computes with them, float32 [V, H]."""
    tensors = official_tensors(pack_folder)
    return tensors["model.language_model.embed_tokens.weight"].float(), tensors["lm_head.weight"].float()


def num_tokens(pack_folder: pathlib.Path) -> int:
    """Return how many ids are tokens."""
    whole = json.loads((pack_folder / "tokenizer.json").read_text())
    added = [token["id"] for token in whole.get("added_tokens", [])]
    return max([*whole["model"]["vocab"].values(), *added]) + 1


class Trainer:
    """Parameters and optimiser of a run."""

    def __init__(self, run: Run, net: DraftNet, clip: float) -> None:
        config, settings = net.config, run.description.settings
        self.run, self.net, self.clip = run, net, clip
        fresh = initial_parameters(config, settings.seed)
        self.params = {name: torch.from_numpy(value).requires_grad_() for name, value in fresh.items()}
        self.optimizer = torch.optim.AdamW(
            self.params.values(), lr=1.0, betas=BETAS, eps=EPSILON, weight_decay=0.0, fused=True
        )
        self.step = 0
        if run.state.exists():
            self._load()

    def advance(self, blocks: list[Any], rate: float, share: float, gamma: float) -> list[float]:
        """Do one step and return base, selector, accuracy, recall, norm."""
        parts = self.net.losses(self.params, pack(blocks, self.net.config), gamma)
        self.optimizer.zero_grad(set_to_none=True)
        (parts.base + share * parts.selector).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.params.values(), self.clip)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.step += 1
        return [float(value.detach()) for value in (*parts, norm)]

    def save(self) -> None:
        """Write a checkpoint, all or nothing."""
        arrays: dict[str, Tensor] = {}
        for name, value in self.params.items():
            state = self.optimizer.state[value]
            arrays[PARAMETERS + name] = value.detach()
            arrays[FIRST + name], arrays[SECOND + name] = state["exp_avg"], state["exp_avg_sq"]
        replace_file(self.run.state, save(arrays, {"step": str(self.step)}))
        replace_file(self.run.directory / CURVE, draw_curve(self.run.rows()).encode())

    def _load(self) -> None:
        with safe_open(self.run.state, framework="pt") as stored:
            self.step = int(stored.metadata()["step"])
            for name, value in self.params.items():
                with torch.no_grad():
                    value.copy_(stored.get_tensor(PARAMETERS + name))
                self.optimizer.state[value] = {
                    "step": torch.tensor(float(self.step)),
                    "exp_avg": stored.get_tensor(FIRST + name).clone(),
                    "exp_avg_sq": stored.get_tensor(SECOND + name).clone(),
                }


def main() -> None:
    """Train until the last step, or until `--minutes` have passed."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--captures", type=pathlib.Path, required=True)
    ap.add_argument("--run", type=pathlib.Path, required=True)
    ap.add_argument("--target", type=pathlib.Path, default=pathlib.Path("mlx_flashnext/demo"))
    ap.add_argument("--steps", type=int, default=6000)
    ap.add_argument("--documents", type=int, default=8)
    ap.add_argument("--anchors", type=int, default=32)
    ap.add_argument("--rate", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--minutes", type=float, default=1e9)
    ap.add_argument("--v1", action="store_true", help="without convolutions and selector")
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--only", type=int, default=0, help="so many documents of the training split")
    args = ap.parse_args()
    torch.set_num_threads(args.threads)
    captures = CaptureSet.open(args.captures)
    settings = TrainSettings(
        num_steps=args.steps,
        num_documents=args.documents,
        num_anchors=args.anchors,
        rate=args.rate,
        selector_ramp=200,
        seed=args.seed,
    )
    identity, num_ids = captures.identity, num_tokens(args.target)
    description = RunDescription(
        draft_document(captures, is_v1=args.v1),
        settings,
        captures.digest(),
        identity.target_digest,
        identity.tokenizer_digest,
        identity.contraction,
        num_ids,
        "torch",
    )
    run, config = Run(args.run, description), description.draft_config()
    infos = captures.of_split(TRAIN)
    documents = [captures.read(info) for info in infos[: args.only or None]]
    sampler = StepSampler(
        documents,
        config.block_size,
        num_documents=settings.num_documents,
        num_anchors=settings.num_anchors,
        max_rows=settings.max_rows,
        seed=settings.seed,
    )
    embedding, head = target_tables(args.target)
    trainer = Trainer(run, DraftNet(config, embedding, head, num_ids, torch.bfloat16), settings.clip)
    run.cut_log(trainer.step)
    print(f"{len(documents)} documents, {sum(len(d.tokens) for d in documents)} tokens; step {trainer.step}")
    began, rows = time.monotonic(), list[list[float]]()
    while trainer.step < settings.num_steps:
        number = trainer.step
        rate = rate_at(number, settings.num_steps, settings.rate)
        share = selector_share(number, settings)
        rows.append(trainer.advance(sampler.step(number), rate, share, settings.gamma))
        seconds = time.monotonic() - began
        is_over = trainer.step == settings.num_steps or seconds > 60 * args.minutes
        if trainer.step % settings.log_every == 0 or is_over:
            means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
            names = ("base", "selector", "accuracy", "recall", "norm")
            row = {
                "step": trainer.step,
                "seconds": seconds,
                "rate": rate,
                **dict(zip(names, means, strict=True)),
            }
            run.log(row)
            print(" ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
            rows = []
        if trainer.step % settings.save_every == 0 or is_over:
            trainer.save()
        if is_over:
            break


if __name__ == "__main__":
    main()
