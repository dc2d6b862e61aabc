"""The main loop of flashnext: one cycle proposes, verifies and commits. READ THIS FIRST.

A cycle verifies a block of B = k + 1 rows: the anchor, which is the last committed token and has not been
through the target yet, and k proposals. Nothing proposes yet, so k = 0: the block is the anchor alone, the
cycle commits one token, and that token is the next anchor. Speculation will lengthen the block, not add a
second loop.

    1  propose    nothing yet: the block is the anchor
    2  rows       n-gram rows of the block are issued: their ids depend on token ids alone
    3  forward    every layer: mix, route (ids to the host: the one wait of a streamed layer), slots, compute
    4  verify     the sampler chooses from the last row's logits; reading its choice is the last wait
    5  commit     the state has consumed the block; the chosen token is the next anchor
    6  advance    the generation moves on: leases end, tickets of the past lose their owner

Waits for the device per cycle: one per streamed layer, plus one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from expert_store.store import ExpertStore
from mlx_flashnext.engine.sampler import Sampler
from mlx_flashnext.experts import StreamedExperts
from mlx_flashnext.model.flashnext import FlashNext
from mlx_flashnext.model.host import HostSync, fence, to_host
from mlx_flashnext.state import SequenceState


@dataclass(slots=True)
class Target:
    """The verified model with everything one forward pass touches.

    Attributes:
        model: the network.
        experts: where routed experts come from.
        store: the expert store behind them.
        sync: counter of waits for the device.
    """

    model: FlashNext
    experts: StreamedExperts
    store: ExpertStore
    sync: HostSync


class Timeline:
    """One sequence in the making: what the state has consumed, the anchor, and the generation.

    Invariants:
        I2  `tokens` are exactly the tokens that `state` has consumed; the anchor is not among them.
    """

    def __init__(self, target: Target, state: SequenceState, owner: int) -> None:
        self.target = target
        self.state = state
        self.owner = owner
        self.tokens: list[int] = []
        self.generation = 0

    def consume(self, chunk: Sequence[int]) -> None:
        """Run one prefill chunk: the same forward pass without proposing and verifying.

        Args:
            chunk: token ids; their logits are not computed.
        """
        self.target.experts.owner = self.owner
        with self.state.begin(len(chunk), revocable=False) as block:
            output = self.target.model.forward(chunk, block, logits="none")
            fence(self.target.sync, output.stack)
            block.commit()
        self._commit(chunk)

    def cycle(self, anchor: int, sampler: Sampler) -> int:
        """Run one cycle and return the token it commits, which is the next anchor.

        Args:
            anchor: the last committed token.
            sampler: chooses from the logits; it has seen every committed token, the anchor included.
        """
        self.target.experts.owner = self.owner
        with self.state.begin(1) as block:
            output = self.target.model.forward([anchor], block, logits="last")
            assert output.logits is not None
            token = int(to_host(self.target.sync, sampler.sample(output.logits.squeeze(0))))
            block.commit()
        self._commit([anchor])
        return token

    def _commit(self, consumed: Sequence[int]) -> None:
        self.target.experts.device_idle()
        self.tokens.extend(consumed)
        self.generation += 1
        self.target.store.advance(self.owner, self.generation)
