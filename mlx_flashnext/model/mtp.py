"""The checkpoint's own MTP module: one QSA layer that predicts the token after next.

A cell for position i takes the trunk's stack there (before the terminal mixer) and the token at i + 1. Deeper
drafts feed a cell's own output stack to the next cell.

Source: qwen4exp.md 2.9. `pre_fc_norm_hidden` is ONE norm over the whole stack, not one per stream.
"""

# Shapes: T cells, G streams, D hidden, W = G * D, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_flashnext.config import ModelConfig
from mlx_flashnext.errors import StateError
from mlx_flashnext.layer_state import QsaState
from mlx_flashnext.model.host import HostSync
from mlx_flashnext.model.hyper import HyperRead
from mlx_flashnext.model.layer import DecoderLayer
from mlx_flashnext.model.moe import ExpertProvider
from mlx_flashnext.model.norm import ZeroCentredNorm
from mlx_flashnext.model.quant import Embedding, Linear
from mlx_flashnext.model.rope import Rope
from mlx_flashnext.model.weight_source import WeightSource
from mlx_flashnext.state import Block


class MtpCell:
    """The MTP module.

    Args:
        config: Model geometry; must have an MTP layer.
        weights: Where the weights come from, names under `mtp.`.
        experts: Computes its routed experts; the layer counts as `num_hidden_layers`.
        sync: Counter of waits for the device.
        embed: The trunk's embedding.
        head: The trunk's head.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        experts: ExpertProvider,
        sync: HostSync,
        *,
        embed: Embedding,
        head: Linear,
    ) -> None:
        self.config = config
        self._embed, self._head = embed, head
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._embed_norm = ZeroCentredNorm(weights, "mtp.pre_fc_norm_embedding", hidden, eps)
        self._stack_norm = ZeroCentredNorm(weights, "mtp.pre_fc_norm_hidden", config.stack_size, eps)
        self._fc_embedding = weights.linear("mtp.fc_embedding", hidden, hidden)
        self._fc_hidden = weights.linear("mtp.fc_hidden", hidden, hidden)
        self._layer = DecoderLayer(
            config,
            weights,
            "mtp.layers.0",
            kind="qsa",
            layer=config.num_hidden_layers,
            experts=experts,
            rope=Rope(config),
            sync=sync,
        )
        self._mixer = HyperRead(config, weights, "mtp.hyper_connection_mixer")

    def forward(
        self, stack_TGD: mx.array, next_tokens: Sequence[int] | mx.array, block: Block
    ) -> tuple[mx.array, mx.array]:
        """Run cells for consecutive positions and stage what they leave.

        Args:
            stack_TGD: Stack of each position: the trunk's, or the output of the cell before.
            next_tokens: The token after each position; int32 [T] if they are still on the device.
            block: Opened on an `MtpState` for as many cells, and not yet run.

        Returns:
            logits_TV for the token after `next_tokens`, and the cells' stack_TGD; waiting for the logits
            completes the state too.

        Raises:
            StateError: Stacks, tokens and the block's rows differ in number, a stack is not whole, or the
                block is closed or was run before.
        """
        stack_TGD = self._enter(stack_TGD, next_tokens, block)
        stack_TGD, staged = self._layer(
            stack_TGD, block.before.layers[0], block.position, is_revocable=block.is_revocable
        )
        block.stage([staged])
        return self._head(self._mixer(stack_TGD)), stack_TGD

    def extend(self, stack_TGD: mx.array, next_tokens: Sequence[int], block: Block) -> None:
        """Stage what cells leave to later ones, without their own output: no attention, no experts.

        Args:
            stack_TGD: As for `forward`.
            next_tokens: As for `forward`.
            block: As for `forward`; not revocable.

        Raises:
            StateError: As for `forward`.
        """
        stack_TGD = self._enter(stack_TGD, next_tokens, block)
        state = block.before.layers[0]
        assert isinstance(state, QsaState)
        block.stage([self._layer.extend(stack_TGD, state, block.position)])

    def _enter(self, stack_TGD: mx.array, next_tokens: Sequence[int] | mx.array, block: Block) -> mx.array:
        """Return the stack that enters the layer: every position's own, and the token after it."""
        T = len(next_tokens)
        block.check_rows(T)
        shape = (T, self.config.hc_count, self.config.hidden_size)
        if stack_TGD.shape != shape:
            raise StateError(
                f"A stack of {stack_TGD.shape} for cells that read {shape}",
                hint="give every stream of every position, not what the mixer makes of them",
            )
        ids_T = next_tokens if isinstance(next_tokens, mx.array) else mx.array(list(next_tokens), mx.int32)
        token_TD = self._fc_embedding(self._embed_norm(self._embed(ids_T)))
        unit_TGD = self._stack_norm(stack_TGD.reshape(T, -1)).reshape(stack_TGD.shape)
        return self._fc_hidden(unit_TGD) + token_TD[:, None]
