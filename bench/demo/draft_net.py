"""The DFlash and DFlash2 network and its losses in torch, for training on one core; no part of the product.

The reference is `drafter/train/losses.py`: gradients of one batch are compared with it by
`tests/unit/drafter/train/test_torch_gradients.py`, through `bench/demo/draft_gradients.py`. Documents of a
step lie side by side, padded, so that products are large.

Source: docs/reference/dflash2.md, 1.4 to 1.10 and 5.
"""

# Shapes: D documents, A anchors, B slots, R context rows, H hidden, N = D * A * (B - 1) judged slots.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as ops

from drafter.config import DraftConfig
from drafter.train.batches import Blocks
from drafter.train.schedule import slot_weights

Params = Mapping[str, Tensor]


class Batch(NamedTuple):
    """Blocks of several documents, padded."""

    features: Tensor  # [D, R, F]
    row_positions: Tensor  # [D, R], -1 for padding
    starts: Tensor  # [D, A]
    is_block: Tensor  # [D, A]
    ids: Tensor  # [D, A, B]: anchor, then the mask id
    targets: Tensor  # [D, A, B - 1]


class Losses(NamedTuple):
    """As `drafter.train.losses.Losses`."""

    base: Tensor
    selector: Tensor
    accuracy: Tensor
    recall: Tensor


def pack(batch: Sequence[Blocks], config: DraftConfig) -> Batch:
    """Return the blocks of a step, padded to the largest document."""
    rows = max(len(one.features) for one in batch)
    anchors = max(len(one.starts) for one in batch)
    size, width = len(batch), config.feature_width
    features = np.zeros((size, rows, width), np.float32)
    positions = np.full((size, rows), -1, np.int64)
    starts = np.zeros((size, anchors), np.int64)
    is_block = np.zeros((size, anchors), bool)
    ids = np.full((size, anchors, config.block_size), config.mask_token_id, np.int64)
    targets = np.zeros((size, anchors, config.max_proposals), np.int64)
    for place, one in enumerate(batch):
        count = len(one.features)
        features[place, :count] = one.features
        positions[place, :count] = one.first + np.arange(count)
        count = len(one.starts)
        starts[place, :count], is_block[place, :count] = one.starts, True
        ids[place, :count, 0], targets[place, :count] = one.anchors, one.targets
    return Batch(*map(torch.from_numpy, (features, positions, starts, is_block, ids, targets)))


class DraftNet:
    """The network as functions of its parameters.

    Args:
        config: of the draft.
        embedding: the target's [V, H], frozen.
        head: the target's [V, H], frozen.
        num_ids: ids from here on are no tokens.
        dtype: of products; everything else is float32.
    """

    def __init__(
        self, config: DraftConfig, embedding: Tensor, head: Tensor, num_ids: int, dtype: torch.dtype
    ) -> None:
        self.config, self.dtype, self.num_ids = config, dtype, num_ids
        self.embedding, self.head = embedding, head.to(dtype)
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.inverse = 1.0 / torch.tensor(config.rope_theta, dtype=torch.float32) ** half
        self.is_no_token = torch.zeros(config.vocab_size, dtype=torch.bool)
        self.is_no_token[num_ids:] = True
        self.is_no_token[config.mask_token_id] = True

    def losses(self, params: Params, batch: Batch, gamma: float) -> Losses:
        """Return the losses of a step."""
        config, num_slots = self.config, self.config.max_proposals
        rows = self.hidden(params, batch)[:, :, 1:][batch.is_block].reshape(-1, config.hidden_size)
        said_next = batch.targets[batch.is_block]
        before = torch.cat([batch.ids[batch.is_block][:, :1], said_next[:, :-1]], 1).reshape(-1)
        targets = said_next.reshape(-1, 1)
        weights = torch.tensor(slot_weights(num_slots, gamma)).repeat(len(said_next))
        logits = ops.linear(rows.to(self.dtype), self.head).float()
        if config.multiplier != 1 or config.softcap is not None or config.embedding_scale != 1:
            raise ValueError("this trainer knows neither multiplier, cap nor embedding scale")
        logits = logits.masked_fill(self.is_no_token, -torch.inf)
        said = logits.logsumexp(-1) - logits.gather(1, targets).squeeze(1)
        base = (weights * said).sum() / weights.sum()
        hits = (logits.detach().argmax(-1) == targets.squeeze(1)).float().reshape(-1, num_slots)
        if not config.has_selector:
            return Losses(base, torch.zeros(()), hits[:, 0].mean(), torch.zeros(()))
        ids = logits.detach().topk(config.top_k, dim=-1).indices
        name = "candidate_selector."
        projected = self.linear(params, f"{name}hidden_projection", rows)
        weighted = ops.embedding(before, params[f"{name}predecessor_codebook"]) * projected
        after = ops.embedding(ids, params[f"{name}successor_codebook"])
        scores = logits.gather(1, ids) + (after * weighted[:, None]).sum(-1)
        is_truth = ids == targets
        is_there = is_truth.any(-1)
        chosen = scores.logsumexp(-1) - torch.where(is_truth, scores, 0.0).sum(-1)
        counted = weights * is_there
        selector = (counted * chosen).sum() / counted.sum().clamp_min(1e-6)
        return Losses(base, selector, hits[:, 0].mean(), is_there.float().mean())

    def hidden(self, params: Params, batch: Batch) -> Tensor:
        """Return final-normed hidden states [D, A, B, H], slot 0 included."""
        config = self.config
        fused = self.rms(self.linear(params, "fc", batch.features), params["hidden_norm.weight"])
        x = ops.embedding(batch.ids, self.embedding)
        slots = batch.starts[..., None] + torch.arange(config.block_size)
        masks = [self.visible(batch, slots, layer) for layer in range(config.num_layers)]
        for layer in range(config.num_layers):
            name = f"layers.{layer}."
            u = self.rms(x, params[f"{name}input_layernorm.weight"])
            first, last = self.kernels(params, f"{name}attention_conv", u)
            mixed = self.attend(
                params, f"{name}self_attn.", convolve(u, first), fused, batch, slots, masks[layer]
            )
            x = x + convolve(mixed, last)
            u = self.rms(x, params[f"{name}post_attention_layernorm.weight"])
            first, last = self.kernels(params, f"{name}mlp_conv", u)
            v = convolve(u, first)
            gate = ops.silu(self.linear(params, f"{name}mlp.gate_proj", v))
            v = self.linear(
                params, f"{name}mlp.down_proj", gate * self.linear(params, f"{name}mlp.up_proj", v)
            )
            x = x + convolve(v, last)
        return self.rms(x, params["norm.weight"])

    def attend(
        self, params: Params, name: str, u: Tensor, fused: Tensor, batch: Batch, slots: Tensor, mask: Tensor
    ) -> Tensor:
        """Return attention of block rows over their document's context and their own block."""
        config, eps_weight = self.config, params[f"{name}k_norm.weight"]
        size, anchors, block, _ = u.shape
        flat, places = u.reshape(size, anchors * block, -1), slots.reshape(size, -1)
        queries = self.heads(self.linear(params, f"{name}q_proj", flat), config.num_heads)
        queries = self.rotate(self.rms(queries, params[f"{name}q_norm.weight"]), places)
        rows = torch.cat([fused, flat], 1)
        keys = self.heads(self.linear(params, f"{name}k_proj", rows), config.num_kv_heads)
        where = torch.cat([batch.row_positions.clamp_min(0), places], 1)
        keys = self.rotate(self.rms(keys, eps_weight), where)
        values = self.heads(self.linear(params, f"{name}v_proj", rows), config.num_kv_heads)
        groups = config.num_heads // config.num_kv_heads
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        mixed = ops.scaled_dot_product_attention(queries, keys, values, mask[:, None])
        mixed = mixed.transpose(1, 2).reshape(size, anchors, block, -1)
        return self.linear(params, f"{name}o_proj", mixed)

    def visible(self, batch: Batch, slots: Tensor, layer: int) -> Tensor:
        """Return which rows every block row sees: [D, A * B, R + A * B]."""
        config = self.config
        size, anchors, block = slots.shape
        places = slots.reshape(size, -1)
        starts = batch.starts.repeat_interleave(block, 1)
        back = places[:, :, None] - batch.row_positions[:, None]
        context = (batch.row_positions[:, None] >= 0) & (batch.row_positions[:, None] < starts[:, :, None])
        number = torch.arange(anchors).repeat_interleave(block)
        own = (number[:, None] == number[None]).expand(size, -1, -1)
        inside = places[:, :, None] - places[:, None]
        if config.is_causal[layer]:
            own = own & (inside >= 0)
        if config.layer_types[layer] == "sliding_attention" and config.window is not None:
            context = context & (back < config.window)
            own = own & (inside.abs() < config.window)
        return torch.cat([context, own], 2)

    def kernels(self, params: Params, name: str, u: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the coefficients of both halves of a convolution, [D, A, B, C, H]; None without one."""
        config = self.config
        if not config.conv_kernel:
            return None, None
        groups = config.hidden_size // config.conv_group
        dynamic = self.linear(params, f"{name}.kernel_projection", u)
        dynamic = dynamic.unflatten(-1, (2, config.conv_kernel, groups, 1))
        base = params[f"{name}.base_kernel"].unflatten(-1, (groups, config.conv_group))
        both = (base + dynamic).flatten(-2)
        return both[..., 0, :, :], both[..., 1, :, :]

    def linear(self, params: Params, name: str, x: Tensor) -> Tensor:
        """Return a product in the type of products."""
        return ops.linear(x.to(self.dtype), params[f"{name}.weight"].to(self.dtype)).float()

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise by the root mean square, and multiply."""
        return ops.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def heads(self, x: Tensor, count: int) -> Tensor:
        """Return [D, heads, rows, d]."""
        return x.unflatten(-1, (count, -1)).transpose(1, 2)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn heads [D, heads, rows, d] by their positions, half split."""
        angle = positions[:, None, :, None] * self.inverse
        left, right = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


def convolve(x: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum over taps of coefficients and shifted values, zeros before slot 0."""
    if weights is None:
        return x
    out = weights[..., 0, :] * x
    for tap in range(1, weights.shape[-2]):
        out = out + weights[..., tap, :] * ops.pad(x, (0, 0, tap, 0))[..., : x.shape[-2], :]
    return out
