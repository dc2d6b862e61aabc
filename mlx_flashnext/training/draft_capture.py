"""Captures what a draft is trained on: this very target's own answers, with features and routes of every row.

Entry points: `capture`, `replay`. Rows are taken where a drafter gets them in service - a
`FeatureTap` is a drafter - so what is trained on is what is served. A document is proved
by `replay`: the same tokens read as a prompt must give the same features and routes as saying them one by one
did, because a trainer's target is that prompt.

Source: dflash2.md 5.1.
"""

# Shapes: S tokens, R = S - 1 rows, F features side by side, L routed layers, K experts of a row.

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from drafter.api import MAX_PROPOSALS, DraftSampling, FeatureRequest, Law, Proposal
from drafter.facts import TargetFacts
from drafter.train.capture_writer import SHARD_BYTES, CaptureWriter
from drafter.train.captures import CapturedDocument, CaptureIdentity, document_key
from mlx_flashnext.engine.conditions import version_of
from mlx_flashnext.engine.draft_target import DraftTarget, target_facts
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.errors import EngineError, InvalidRequest
from mlx_flashnext.engine.events import Token
from mlx_flashnext.engine.governor import Governor
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.prefill import prefill
from mlx_flashnext.engine.routes import RecordedRoutes, RouteLog
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.model.host import fence
from mlx_flashnext.training.prompt_files import Prompt

CONTRACTIONS: Final = ("mean", "next_attn_mix", "final_mix", "stream0")
DEFAULT_REPLAYS: Final = 3
_RESUME_TOKENS: Final = 3

Progress = Callable[[int, int], None]


class ReplayDiffers(EngineError):
    """Reading a document as a prompt did not give what saying it gave; nothing may be trained on it."""


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """What to capture.

    Attributes:
        taps: 0-based layers, in order.
        contraction: of the streams.
        params: how answers are drawn; every document has a seed of its own that follows from this one's.
        max_tokens: most tokens of an answer.
        held_out_every: one document in so many is held out.
        num_replays: documents of a run that are proved by `replay`, the first ones.
        tolerance: largest difference of a feature in a replay; 0 demands the same bits, and the same routes.
        shard_bytes: of a shard.
    """

    taps: tuple[int, ...]
    contraction: str
    params: SamplingParams
    max_tokens: int = 512
    held_out_every: int = 16
    num_replays: int = DEFAULT_REPLAYS
    tolerance: float = 0.0
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True, slots=True)
class Captured:
    """What a run did: documents and tokens in all and of this run, and the proof.

    Attributes:
        num_documents: in the set now.
        num_new: of them captured by this run.
        num_new_tokens: prompt and answer tokens captured by this run.
        num_replayed: documents that were read again as prompts.
        num_replayed_rows: rows compared.
        largest_difference: of any feature of them.
        num_route_differences: (row, layer) pairs of them whose experts differed.
    """

    num_documents: int
    num_new: int
    num_new_tokens: int
    num_replayed: int = 0
    num_replayed_rows: int = 0
    largest_difference: float = 0.0
    num_route_differences: int = 0


class FeatureTap:
    """A drafter that keeps every row it is shown, and proposes at most a guess it was given.

    See `drafter.api.FeatureDrafter`. A guess that turns out wrong is taken up again where the last few tokens
    occur in it.

    Attributes:
        feature_request: what it wants of every row.
    """

    kind = "capture"
    law: Law = "point"
    needs_stack = False

    def __init__(self, taps: tuple[int, ...], contraction: str) -> None:
        self.feature_request = FeatureRequest(taps, contraction, None)
        self._guess: list[int] = []
        self._num_prompt = 0
        self._rows: list[mx.array] = []
        self._position = self._next = 0
        self._recent: list[int] = []

    def max_proposals(self) -> int:
        """Return the most tokens of a proposal."""
        return MAX_PROPOSALS

    def reset(self) -> None:
        """Forget the rows; the guess stays."""
        self._rows, self._position, self._next, self._recent = [], 0, 0, []

    def expect(self, num_prompt: int, guess: Sequence[int]) -> None:
        """Take a guess of what follows the next prompt, which has so many tokens."""
        self._num_prompt, self._guess = num_prompt, list(guess)

    def observe(
        self,
        tokens: Sequence[int],
        next_token: int,
        stack_TGD: mx.array | None = None,
        *,
        features_RF: mx.array | None = None,
    ) -> None:
        """Keep rows; computed now, so that nothing of the pass stays alive for them."""
        del stack_TGD
        assert features_RF is not None
        assert len(features_RF) == len(tokens)
        mx.async_eval(features_RF)  # pyright: ignore[reportUnknownMemberType]
        self._rows.append(features_RF)
        for token in (*tokens[1:], next_token):
            self._position += 1
            if self._position >= self._num_prompt:
                self._follow(token)

    def propose(self, k: int, sampling: DraftSampling) -> Proposal:
        """Return the tokens of the guess that come next, if it is known where it stands."""
        del sampling
        if k < 1 or self._next < 0:
            return Proposal(())
        return Proposal(tuple(self._guess[self._next : self._next + min(k, MAX_PROPOSALS)]))

    def _follow(self, token: int) -> None:
        """Move on in the guess, or look for the place where it goes on like the text."""
        self._recent = [*self._recent[1 - _RESUME_TOKENS :], token]
        guess, recent = self._guess, self._recent
        if 0 <= self._next < len(guess) and guess[self._next] == token:
            self._next += 1
            return
        places = range(_RESUME_TOKENS, len(guess))
        found = (end for end in places if guess[end - _RESUME_TOKENS : end] == recent)
        self._next = next(found, -1)

    def snapshot(self) -> object:
        """Return how many rows there are."""
        return len(self._rows)

    def restore(self, snapshot: object) -> None:
        """Forget rows after a snapshot."""
        del self._rows[cast("int", snapshot) :]

    def num_bytes(self) -> int:
        """Return the bytes of the rows kept."""
        return sum(row.nbytes for row in self._rows)

    def describe(self) -> dict[str, object]:
        """Return what it is."""
        return {"kind": self.kind, "rows": sum(map(len, self._rows))}

    def features(self) -> mx.array:
        """Return the rows [R, F]."""
        return mx.concatenate(self._rows)


def facts_of(engine: Engine) -> TargetFacts:
    """Return what the gate is told of an open engine's target."""
    checkpoint, model = engine.checkpoint, engine.target.model
    return target_facts(
        checkpoint,
        engine.tokenizer,
        DraftTarget(model, engine.target.sync),
        name=checkpoint.directory.name,
        contractions=CONTRACTIONS,
        runtime_version=version_of("flashnext") or "",
        itemsize=model.compute_dtype.size,
        context_tokens=engine.plan.context_tokens,
        memory_left=None,
    )


def capture(
    engine: Engine,
    prompts: Iterable[Prompt],
    directory: Path,
    request: CaptureRequest,
    progress: Progress = lambda _done, _total: None,
) -> Captured:
    """Let the target answer prompts, and write down what a trainer needs; goes on where a run was cut short.

    Routes are kept of the layers whose experts are streamed: open the engine with fewer slots than experts.

    Args:
        engine: the target build that will be served.
        prompts: in an order that stays; the same prompt twice counts once.
        directory: of the capture set.
        request: what to capture.
        progress: called with (documents done, documents in all).

    Raises:
        DrafterError: the directory holds another set, or something else.
        ReplayDiffers: the proof failed.
        StoreError, EngineError: the target could not answer.
    """
    distinct = list({document_key(prompt.tokens): prompt for prompt in prompts}.items())
    identity = identity_of(engine, [prompt.tokens for _, prompt in distinct], request)
    tap = FeatureTap(request.taps, request.contraction)
    found = Captured(0, 0, 0)
    with CaptureWriter(directory, identity, request.shard_bytes) as writer:
        done = len(writer.keys)
        progress(done, len(distinct))
        for key, prompt in distinct:
            if key in writer.keys:
                continue
            document, features = _answer(engine, prompt, tap, _own_seed(request, key), identity)
            if found.num_replayed < request.num_replays:
                found = _proved(engine, document, features, identity, request.tolerance, found)
            writer.add(document, features.tobytes())
            done += 1
            found = replace(
                found,
                num_new=found.num_new + 1,
                num_new_tokens=found.num_new_tokens + len(document.tokens),
            )
            progress(done, len(distinct))
    return replace(found, num_documents=done)


def identity_of(engine: Engine, prompts: Sequence[list[int]], request: CaptureRequest) -> CaptureIdentity:
    """Return what a capture of this engine is."""
    facts, config, params = facts_of(engine), engine.config, request.params
    taps = request.taps
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= config.num_hidden_layers:
        raise InvalidRequest(
            f"Taps are ascending layers of {config.num_hidden_layers}: {' '.join(map(str, taps)) or 'none'}",
            hint="--taps 1,3,4,6",
        )
    digest = hashlib.sha256()
    for tokens in prompts:
        digest.update(np.asarray(tokens, "<i4").tobytes() + b"\n")
    layers = () if engine.plan.is_resident else tuple(range(config.num_hidden_layers))
    return CaptureIdentity(
        target_name=facts.name,
        target_digest=facts.digest,
        tokenizer_digest=facts.tokenizer_digest,
        quantisation=facts.quantisation,
        runtime_version=facts.runtime_version,
        vocab_size=config.vocab_size,
        num_target_layers=config.num_hidden_layers,
        taps=taps,
        contraction=request.contraction,
        hidden_size=config.hidden_size,
        dtype=_name_of(engine.target.model.compute_dtype),
        route_layers=layers,
        top_k=config.num_experts_per_tok,
        sampling={
            "temperature": float(params.temperature),
            "top_p": float(params.top_p),
            "top_k": float(params.top_k),
            "min_p": float(params.min_p),
            "repetition_penalty": float(params.repetition_penalty),
            "seed": float(params.seed or 0),
        },
        max_tokens=request.max_tokens,
        prompts_digest=digest.hexdigest(),
        held_out_every=request.held_out_every,
    )


def replay(
    engine: Engine, tokens: Sequence[int], identity: CaptureIdentity
) -> tuple[NDArray[Any], NDArray[np.uint16]]:
    """Read a document as a prompt.

    Returns:
        features [R, F] in the target's type, and routes [R, L, K]; L is 0 where every expert is in memory.
    """
    tap = FeatureTap(identity.taps, identity.contraction)
    log = RouteLog()
    hints = Hints(None, engine.config.num_hidden_layers, log)
    timeline = engine.new_timeline(tap, Governor(0), hints)
    for _ in prefill(timeline, tokens, engine.plan.prefill_step, lambda: False, lambda: None):
        pass
    timeline.rest()
    features = _on_host(engine, tap.features())
    if engine.plan.is_resident:
        return features, np.zeros((len(features), 0, identity.top_k), np.uint16)
    return features, _routes(log, len(features), identity)


def _answer(
    engine: Engine, prompt: Prompt, tap: FeatureTap, params: SamplingParams, identity: CaptureIdentity
) -> tuple[CapturedDocument, NDArray[Any]]:
    """Let the target answer, and return the document and its features."""
    log = RouteLog()
    tap.expect(len(prompt.tokens), prompt.guess)
    hints = Hints(None, engine.config.num_hidden_layers, log)
    session = engine.session(tap, is_guarded=False, hints=hints)
    events = session.generate(
        prompt.tokens, params, max_tokens=identity.max_tokens, stop_ids=engine.tokenizer.eos_ids
    )
    said = [event.token_id for event in events if isinstance(event, Token)]
    tokens = [*prompt.tokens, *said]
    features = _on_host(engine, tap.features())
    if len(features) != len(tokens) - 1:
        raise EngineError(
            f"{len(features)} rows were kept of {len(tokens)} tokens", hint="a tap failed; see the log"
        )
    routes = _routes(log, len(tokens) - 1, identity)
    # Features are handed on as they are; the document's own are for those who read it.
    empty = np.zeros((0, 0), np.float32)
    return CapturedDocument(
        np.asarray(tokens, np.int32), len(prompt.tokens), empty, routes, prompt.label
    ), features


def _proved(
    engine: Engine,
    document: CapturedDocument,
    features: NDArray[Any],
    identity: CaptureIdentity,
    tolerance: float,
    found: Captured,
) -> Captured:
    """Replay a document and add what was found to the account."""
    again, routes = replay(engine, document.tokens.tolist(), identity)
    difference = float(np.abs(_as_float(again) - _as_float(features)).max())
    same = difference <= tolerance if tolerance else again.tobytes() == features.tobytes()
    different = int((routes != document.routes).any(axis=-1).sum()) if routes.size else 0
    if not same or (different and not tolerance):
        raise ReplayDiffers(
            f"Read as a prompt, a document of {len(document.tokens)} tokens has features that differ by up "
            f"to {difference:.3g}, and other experts in {different} (row, layer) places",
            hint="this backend computes blocks of other sizes differently; --tolerance admits that",
        )
    return replace(
        found,
        num_replayed=found.num_replayed + 1,
        num_replayed_rows=found.num_replayed_rows + len(features),
        largest_difference=max(found.largest_difference, difference),
        num_route_differences=found.num_route_differences + different,
    )


def _routes(log: RouteLog, num_rows: int, identity: CaptureIdentity) -> NDArray[np.uint16]:
    """Return the experts of every row and layer, in the order in which the router handed them over."""
    if not identity.route_layers:
        return np.zeros((num_rows, 0, identity.top_k), np.uint16)
    recorded = RecordedRoutes(log.passes)
    rows = [[recorded.at(row)[layer] for layer in identity.route_layers] for row in range(num_rows)]
    return np.asarray(rows, np.uint16)


def _own_seed(request: CaptureRequest, key: str) -> SamplingParams:
    """Return the parameters with a seed that follows from the prompt, whenever it is asked."""
    seed = int(hashlib.sha256(json.dumps([request.params.seed or 0, key]).encode()).hexdigest()[:12], 16)
    return replace(request.params, seed=seed)


def _on_host(engine: Engine, features_RF: mx.array) -> NDArray[Any]:
    """Return features as they are: float32, or bfloat16 as the 16 bits that it is."""
    flat = features_RF if features_RF.dtype == mx.float32 else features_RF.view(mx.uint16)
    fence(engine.target.sync, flat)
    return np.ascontiguousarray(cast("NDArray[Any]", np.array(flat)))


def _as_float(features: NDArray[Any]) -> NDArray[np.float32]:
    if features.dtype == np.float32:
        return features
    return (features.astype(np.uint32) << 16).view(np.float32)


def _name_of(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
