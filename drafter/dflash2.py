"""The DFlash and DFlash2 drafter: a whole block of proposals in one pass over the target's own features.

Entry point: `Dflash2Drafter`. What it computes lies in pure functions of the parameters - `fuse`, `block`,
`selector` - which a trainer differentiates; this file keeps the context of one sequence and speaks to the
engine.

Invariants:
D1. The context ends at the anchor: `rows observed == context end == position of the anchor`.
D2. A proposal waits for the device once; candidates and their probabilities stay there for the verifier.
    Where early route hints are heard, once more: for what was submitted with the last rows observed.
D3. Embedding and head are the target's, borrowed: nothing of them is copied or freed here.
D4. A proposal holds real token ids only, never the mask id nor a padding row, and ends at the first stop id.

Source: dflash2.md 1.4 to 1.11, 2.1 to 2.6.
"""

# Shapes: T rows, F features side by side, B slots, H hidden, k proposals, K candidates.

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from drafter.api import (
    MAX_PROPOSALS,
    DraftSampling,
    Draw,
    FeatureRequest,
    HeadView,
    Law,
    Proposal,
    RouteHints,
)
from drafter.block import hidden_states
from drafter.config import RING_SLACK, DraftConfig
from drafter.context import ContextSnapshot, DraftContext
from drafter.errors import DrafterError
from drafter.fuse import fuse
from drafter.layers import Params
from drafter.live import LiveCounts, check_live, idle_selector
from drafter.selector import Path, best_tokens, candidates, project, unary_logits, walk
from drafter.sidecar import NUM_BEFORE, Sidecar

_log = logging.getLogger(__name__)

# Below it the engine's sampler is greedy, and a row's law a point.
GREEDY_BELOW = 1e-6


@dataclass(frozen=True, slots=True)
class Dflash2Options:
    """How a drafter uses its network.

    Attributes:
        full_block: compute all trained slots and propose the first k. False: k + 1 slots, which the draft was
            not trained on, for a little less work.
        temperature: of sampled proposals; None: the target's. Whatever it is, it is part of their law.
        num_ids: ids from here on are no tokens and are never proposed; None leaves padding rows in, for
            comparison with the reference.
        stop_ids: a proposal ends with the first of them.
        slack: rows kept beyond the window.
        capacity_tokens: tokens that a sequence may have, if they were planned.
        use_selector: False proposes every slot's best logit, as v1 does, to measure what it is worth.
    """

    full_block: bool = True
    temperature: float | None = None
    num_ids: int | None = None
    stop_ids: Collection[int] = ()
    slack: int = RING_SLACK
    capacity_tokens: int | None = None
    use_selector: bool = True


@dataclass(frozen=True, slots=True)
class Dflash2Snapshot:
    """Context, anchor (None before the first row), the draft's digest, the last tokens before the anchor."""

    context: ContextSnapshot
    anchor: int | None
    digest: str
    before: tuple[int, ...] = ()


class _Drafted(NamedTuple):
    """What one pass over a block gave, lazy: states [B, H], the walk, best logits' ids, faults."""

    hidden: mx.array
    path: Path
    best: mx.array
    is_broken: mx.array


class Dflash2Drafter:
    """Proposes blocks for one sequence at a time. See `drafter.api.FeatureDrafter`.

    Args:
        params: of the draft, from `load_parameters`.
        config: of the draft.
        target: embedding and head to borrow.
        draw: draws sampled proposals.
        dtype: of computation and of what is kept.
        contraction: of the target's streams, as the gate found it.
        options: how to use it.
        digest: of the draft's files; snapshots carry it.
        sidecar: says which experts a proposal's rows will want, if there is one.

    Attributes:
        kind: `dflash` or `dflash2`.
        law: of its proposals, where the target is sampled.
        feature_request: what `observe` wants of the target.
        counts: of the session, over all sequences.
        tells_routes: whether proposals are to carry routes; without a sidecar they never do.
        hears_early: told what the anchor's row will want before the draft's own pass; a sidecar's work.
    """

    needs_stack = False

    def __init__(
        self,
        params: Params,
        config: DraftConfig,
        target: HeadView,
        draw: Draw,
        *,
        dtype: mx.Dtype,
        contraction: str,
        options: Dflash2Options | None = None,
        digest: str = "",
        sidecar: Sidecar | None = None,
    ) -> None:
        self.tells_routes = False
        self.hears_early: Callable[[RouteHints], None] | None = None
        self._sidecar = sidecar
        self.kind: str = config.family
        self._options = options or Dflash2Options()
        self._walks = config.has_selector and self._options.use_selector
        self.law: Law = "rows" if self._walks and not _is_greedy(self._options) else "point"
        self.counts = LiveCounts()
        self._params, self._config, self._target, self._draw = params, config, target, draw
        self._dtype, self._digest = dtype, digest
        self._context = DraftContext(
            params,
            config,
            dtype,
            slack=self._options.slack,
            capacity_tokens=self._options.capacity_tokens,
        )
        last_rows = config.window - 1 if config.all_slide and config.window is not None else None
        self.feature_request = FeatureRequest(config.taps, contraction, last_rows)
        self._anchor: int | None = None
        self._before: tuple[int, ...] = ()
        self._early: mx.array | None = None
        self._num_pending = 0
        self._is_idle_said = False

    def max_proposals(self) -> int:
        """Return the most tokens that one proposal may have."""
        return min(self._config.max_proposals, MAX_PROPOSALS)

    def reset(self) -> None:
        """Forget the sequence."""
        self._context.reset()
        self._anchor, self._before, self._early, self._num_pending = None, (), None, 0

    def observe(
        self,
        tokens: Sequence[int],
        next_token: int,
        stack_TGD: mx.array | None = None,
        *,
        features_RF: mx.array | None = None,
    ) -> None:
        """Fuse the features of rows and store them; see `FeatureDrafter.observe`.

        Raises:
            DrafterError: features of another width, or more rows than tokens.
        """
        del stack_TGD
        start, num_rows = self._context.end, 0 if features_RF is None else features_RF.shape[0]
        width = self._config.feature_width
        if features_RF is not None and (features_RF.shape[1:] != (width,) or num_rows > len(tokens)):
            raise DrafterError(
                f"Features are {tuple(features_RF.shape)} for {len(tokens)} rows; it reads {width} wide",
                hint="capture the taps and the contraction that the draft asked for",
            )
        first = start + len(tokens) - num_rows
        if first != start:
            self._context.reset(first)
        if features_RF is not None and num_rows:
            fused_TH = fuse(self._params, self._config, features_RF.astype(self._dtype))
            self._context.append(fused_TH, first)
        self._count_accepted(len(tokens) - 1)
        self._anchor, self._before = next_token, (*self._before, *tokens)[-NUM_BEFORE:]
        self._early = self._early_code()
        # So that features need not live until the next proposal, and the early code is there when it begins.
        mx.async_eval(*self._context.arrays(), *(() if self._early is None else (self._early,)))

    def propose(self, k: int, sampling: DraftSampling) -> Proposal:
        """Return up to `k` tokens; see `Drafter.propose`.

        At temperature 0 the best path, of point masses; above it a path drawn from the selector's rows. A
        draft without selector always takes the best logits: independent draws accept far less.

        Raises:
            DrafterError: `sampling.position` is not the one after the anchor, a row was lost or came twice;
                or what was counted so far says that this draft is defective (G22).
        """
        for reason in check_live(self.counts):
            raise DrafterError(reason.message, hint=reason.hint)
        k = min(k, self.max_proposals())
        if k <= 0 or self._anchor is None:
            return Proposal(())
        position = self._context.end
        if sampling.position != position + 1:
            raise DrafterError(
                f"The first proposal is wanted at {sampling.position}, but the anchor is at {position}",
                hint="hand over every kept row once",
            )
        self._tell_early()
        drafted = self._draft(k, position, sampling)
        path, best_k = drafted.path, drafted.best
        columns = [path.tokens, best_k, path.confidence, mx.broadcast_to(drafted.is_broken, best_k.shape)]
        read = mx.stack([column.astype(mx.float32) for column in columns], axis=-1).reshape(-1)
        codes = self._codes(drafted, k)
        if codes is not None:  # rides along: one wait serves both (D2)
            read = mx.concatenate([read, codes.reshape(-1)])
        values = self._target.to_host(read)
        rows = [values[4 * slot : 4 * slot + 4] for slot in range(k)]
        if any(row[3] for row in rows):
            self.counts = replace(self.counts, num_broken=self.counts.num_broken + 1)
            return Proposal(())
        tokens = [int(row[0]) for row in rows]
        stops = [slot + 1 for slot, token in enumerate(tokens) if token in self._options.stop_ids]
        kept = min(stops, default=k)
        self.counts = replace(
            self.counts,
            num_slots=self.counts.num_slots + k,
            num_overrides=self.counts.num_overrides + sum(row[0] != row[1] for row in rows),
        )
        self._say_idle()
        self._num_pending = kept
        confidence = tuple(float(row[2]) for row in rows[:kept])
        routes = None
        if codes is not None:
            routes = RouteHints(np.asarray(values[4 * k :], np.float32).reshape(k + 1, -1)[: kept + 1])
        if self._temperature(sampling) == 0:
            return Proposal(tuple(tokens[:kept]), confidence=confidence, routes=routes)
        return Proposal(
            tuple(tokens[:kept]),
            law="rows",
            row_ids=path.ids[:kept],
            row_probs=path.probs[:kept],
            confidence=confidence,
            routes=routes,
        )

    def snapshot(self) -> Dflash2Snapshot:
        """Return fused rows of the window, and where they end."""
        context = self._context.snapshot()
        mx.async_eval(context.fused)
        return Dflash2Snapshot(context, self._anchor, self._digest, self._before)

    def restore(self, snapshot: object) -> None:
        """Go back to a snapshot of this draft. That it is of the same text is the engine's to know.

        Raises:
            DrafterError: it is of another draft, or none.
        """
        if (
            not isinstance(snapshot, Dflash2Snapshot)
            or snapshot.digest != self._digest
            or snapshot.context.fused.shape[1] != self._config.hidden_size
        ):
            raise DrafterError("This is no snapshot of this draft", hint="observe the text from the start")
        self._context.restore(snapshot.context)
        mx.async_eval(*self._context.arrays())
        self._anchor, self._before, self._early = snapshot.anchor, snapshot.before, None
        self._num_pending = 0

    def num_bytes(self) -> int:
        """Return the bytes of the sequence's context; weights are not counted."""
        return self._context.num_bytes()

    def weight_bytes(self) -> int:
        """Return the bytes of the draft's own parameters; embedding and head are the target's."""
        return sum(parameter.nbytes for parameter in self._params.values())

    def describe(self) -> dict[str, object]:
        """Return what it is and what it counted."""
        counts = self.counts
        return {
            "kind": self.kind,
            "digest": self._digest,
            "block_size": self._config.block_size,
            "taps": " ".join(map(str, self._config.taps)),
            "contraction": self.feature_request.contraction,
            "context_rows": self._context.num_rows,
            "context_end": self._context.end,
            "cycles": counts.num_cycles,
            "proposed": counts.num_proposed,
            "accepted": counts.num_accepted,
            "slots": counts.num_slots,
            "selector_overrides": counts.num_overrides,
            "broken": counts.num_broken,
        }

    def _codes(self, drafted: _Drafted, k: int) -> mx.array | None:
        """Return the sidecar's codes of anchor and path, lazy; None where nobody reads them."""
        if self._sidecar is None or not self.tells_routes:
            return None
        path = mx.concatenate([mx.array([self._anchor], mx.int32), drafted.path.tokens.astype(mx.int32)])
        hidden = drafted.hidden[: k + 1]
        return self._sidecar.codes(hidden, self._before, path, self._target.embed, self._context.newest())

    def _early_code(self) -> mx.array | None:
        """Return the early code of the anchor's row, lazy; None without anybody who hears it or a context."""
        context = self._context.newest()
        if self._sidecar is None or not self.tells_routes or self.hears_early is None or not context.shape[0]:
            return None
        assert self._anchor is not None
        return self._sidecar.early_code(self._before, self._anchor, self._target.embed, context)

    def _tell_early(self) -> None:
        """Hand over the early code before the draft is described: reads of a row begin while it computes."""
        if self._early is None:
            self._early = self._early_code()
        if self._early is not None and self.tells_routes and self.hears_early is not None:
            self.hears_early(RouteHints(np.asarray(self._target.to_host(self._early), np.float32)))

    def _draft(self, k: int, position: int, sampling: DraftSampling) -> _Drafted:
        """Compute the block and walk the path."""
        assert self._anchor is not None
        config, params = self._config, self._params
        slots = config.block_size if self._options.full_block else k + 1
        ids = mx.array([self._anchor] + [config.mask_token_id] * (slots - 1), mx.int32)
        embeddings = self._target.embed(ids).astype(self._dtype)
        hidden = hidden_states(
            params, config, embeddings[None], (position,), self._context.layers(), self._context.freqs
        )
        hidden_kH = hidden[0, 1 : k + 1]
        logits = unary_logits(config, self._target.head, hidden_kH, self._options.num_ids)
        best_k = mx.argmax(logits, axis=-1)
        if not self._walks:
            path = best_tokens(logits)
            return _Drafted(hidden[0], path, best_k, _is_broken(logits, path.scores))
        path = walk(
            params,
            self._anchor,
            project(params, hidden_kH),
            candidates(logits, config.top_k),
            temperature=self._temperature(sampling),
            position=position + 1,
            draw=lambda scores, at: self._draw(scores, sampling.seed, at),
        )
        return _Drafted(hidden[0], path, best_k, _is_broken(logits, path.scores))

    def _temperature(self, sampling: DraftSampling) -> float:
        if sampling.temperature < GREEDY_BELOW or not self._walks:
            return 0.0
        wanted = self._options.temperature
        wanted = sampling.temperature if wanted is None else wanted
        return 0.0 if wanted < GREEDY_BELOW else wanted

    def _say_idle(self) -> None:
        """Say once that the selector does nothing, if that is so."""
        idle = idle_selector(self.counts) if self._walks and not self._is_idle_said else None
        if idle is not None:
            self._is_idle_said = True
            _log.warning("%s: %s", idle.code, idle.message)

    def _count_accepted(self, num_accepted: int) -> None:
        """Count the cycle that these rows end, if a proposal began it."""
        if not self._num_pending:
            return
        counts = self.counts
        self.counts = replace(
            counts,
            num_cycles=counts.num_cycles + 1,
            num_proposed=counts.num_proposed + self._num_pending,
            num_accepted=counts.num_accepted + min(num_accepted, self._num_pending),
        )
        self._num_pending = 0


def _is_greedy(options: Dflash2Options) -> bool:
    """Return whether proposals are never drawn, whatever the target does."""
    return options.temperature is not None and options.temperature < GREEDY_BELOW


def _is_broken(*values: mx.array) -> mx.array:
    """Return whether any value is not a number, or a whole row has none; a lazy scalar."""
    found = [mx.isnan(value).any() | mx.isinf(mx.max(value, axis=-1)).any() for value in values]
    return mx.stack(found).any()
