"""The composition root: plan, open, converse.

An `Engine` is a loaded model; a `Session` is one mutable timeline. Callers pass whole prompts: the session
reuses its state when the prompt continues what the state has consumed, and starts afresh otherwise. An engine
belongs to the thread that opened it, as the MLX streams of its arrays do.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self

from drafter.api import Drafter
from drafter.lookup import LookupDrafter
from drafter.mtp import MtpDrafter
from drafter.sidecar import Sidecar
from expert_store.mirrored import MirroredSource
from expert_store.source import ByteSource
from mlx_flashnext.checkpoint import Checkpoint, open_checkpoint
from mlx_flashnext.engine.cycle import CycleObserver, Target, Timeline
from mlx_flashnext.engine.draft_target import DraftTarget
from mlx_flashnext.engine.errors import ContextTooLong, EmptyPrompt, EngineClosed, WrongThread
from mlx_flashnext.engine.events import Event
from mlx_flashnext.engine.generate import Limits, generate
from mlx_flashnext.engine.governor import Governor
from mlx_flashnext.engine.hints import Hints
from mlx_flashnext.engine.laps import NO_LAPS, Laps
from mlx_flashnext.engine.learned import NOTHING_LEARNED
from mlx_flashnext.engine.machine import Machine, detect_machine, prepare_device
from mlx_flashnext.engine.meter import Meter
from mlx_flashnext.engine.mtp_view import open_mtp_view
from mlx_flashnext.engine.open_target import Progress as Progress
from mlx_flashnext.engine.open_target import open_target, silent
from mlx_flashnext.engine.own_draft import OwnDraft, find_draft
from mlx_flashnext.engine.plan import Plan, PlanRequest, make_plan
from mlx_flashnext.engine.predictors import PredictorSetting, make_predictor
from mlx_flashnext.engine.route_files import LoadedRoutes, RouteFiles, find_routes, load_routes
from mlx_flashnext.engine.sampler import LogitsProcessor, Sampler, SamplingParams
from mlx_flashnext.engine.sources import open_source
from mlx_flashnext.engine.verify import Asked, resolve_rule
from mlx_flashnext.engine.warm import WarmStart, open_warm_start
from mlx_flashnext.tokenizer import Tokenizer
from mlx_flashnext.weights import CheckpointWeights


class Engine:
    """A model that is open: trunk in memory, experts and n-gram rows behind the store.

    Made by `open`; use as a context manager or call `close`.

    Attributes:
        notices: lines that the person should read once, such as a draft's licence.
        mirror: the second copy of the experts, if there is one.
        routes: trained hints that fit model and draft.
        warm: what the run inherited from the last one, and what its governors have measured since.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        plan: Plan,
        target: Target,
        new_drafter: Callable[[], Drafter | None],
        notices: tuple[str, ...],
        warm: WarmStart,
        routes: LoadedRoutes,
        resources: contextlib.ExitStack,
    ) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.tokenizer = tokenizer
        self.plan = plan
        self.target = target
        self.notices = notices
        self._new_drafter = new_drafter
        self.warm = warm
        self.routes = routes
        self._resources = resources
        self._num_timelines = 0
        self.mirror: MirroredSource | None = None
        self._closed = False
        self._thread = threading.get_ident()

    @classmethod
    def open(
        cls,
        directory: Path,
        request: PlanRequest | None = None,
        *,
        progress: Progress | None = None,
        machine: Machine | None = None,
        wrap_source: Callable[[ByteSource], ByteSource] = lambda source: source,
        warm_directory: Path | None = None,
    ) -> Self:
        """Open a checkpoint as it is.

        Args:
            directory: a checkpoint in the Hugging Face or MLX layout.
            request: what memory and context to plan for.
            progress: called with (stage, done, total) while loading.
            machine: what to plan for; detected when left out.
            wrap_source: wraps the files, to count, throttle or break reads.
            warm_directory: where runs leave what they used most, so that the next one starts warm; None
                starts cold and leaves nothing.

        Raises:
            StoreError: files are damaged, missing or changed.
            ModelError: the checkpoint is not one this engine runs.
            EngineError: the plan does not fit.
        """
        machine = machine or detect_machine()
        checkpoint = open_checkpoint(directory)
        tokenizer = Tokenizer.open(directory)
        tokenizer.check_vocabulary(checkpoint.config)
        request = request or PlanRequest()
        found = find_draft(checkpoint, machine, request)
        own = found.draft
        routes = asked_routes(checkpoint, request, own)
        plan = make_plan(
            checkpoint, machine, request, own and own.bytes, found.reason, hint_bytes=routes.num_bytes
        )
        prepare_device(machine, plan.total_bytes)
        with contextlib.ExitStack() as resources:
            opened = open_source(checkpoint, wrap_source, plan.verify_reads, request.mirror_directory)
            source = opened.source
            resources.callback(source.close)
            target, weights = open_target(checkpoint, source, plan, machine, resources, progress or silent)
            pad_id = 0 if own is None else own.mask_token_id
            loaded = load_routes(routes, target.model.compute_dtype, pad_id)
            new_drafter = _open_drafter(target, weights, plan, own, loaded.sidecar)
            weights.check_all_used()
            notices = own.notices if own is not None and plan.draft == "dflash2" else ()
            notices = (*notices, *loaded.notices, *opened.notices)
            digest = own.verdict.digest if own is not None and plan.draft == "dflash2" else ""
            warm = open_warm_start(checkpoint, plan, machine, target.store, digest, warm_directory)
            resources.callback(warm.save)
            warm.begin()
            kept = resources.pop_all()
            engine = cls(checkpoint, tokenizer, plan, target, new_drafter, notices, warm, loaded, kept)
            engine.mirror = opened.mirror
            return engine

    def session(
        self,
        drafter: Drafter | None = None,
        *,
        is_guarded: bool = True,
        hints: Hints | None = None,
        recorder: "AnswerObserver | None" = None,
        laps: Laps = NO_LAPS,
    ) -> "Session":
        """Return a new, empty timeline.

        Args:
            drafter: who proposes, instead of the one that was planned; the session's own from now on.
            is_guarded: False proposes as many tokens as may be, whether that pays or not.
            hints: who says what to read ahead, instead of the kind that was planned; the session's own.
            recorder: writes the cycles down.
            laps: told where the phases of its cycles end.
        """
        self.check_usable()
        hints = hints or self.new_hints(self.plan.hints)
        if recorder is not None:
            hints = recorder.listen(hints)
        return Session(self, drafter, is_guarded=is_guarded, hints=hints, recorder=recorder, laps=laps)

    def check_usable(self) -> None:
        """Raise EngineClosed after `close`, and WrongThread on any thread but the one that opened it."""
        if self._closed:
            raise EngineClosed("The engine is closed", hint="open it again")
        if threading.get_ident() != self._thread:
            raise WrongThread(
                "The engine was opened on another thread", hint="open it on the thread that asks for answers"
            )

    def new_timeline(
        self, drafter: Drafter | None, governor: Governor, hints: Hints | None = None
    ) -> Timeline:
        """Return an empty timeline with an owner id of its own, so that its generations start at nought.

        Args:
            drafter: who proposes; None for the planned one, if any.
            governor: how many.
            hints: who says what to read ahead.
        """
        self._num_timelines += 1
        if drafter is None:
            drafter = self._new_drafter()
        else:
            drafter.reset()
        state = self.target.model.new_state()
        return Timeline(self.target, state, drafter, governor, self._num_timelines, hints)

    def new_drafter(self) -> Drafter | None:
        """Return a drafter of the planned kind for one more sequence; None where there is none."""
        return self._new_drafter()

    def new_hints(self, kind: str) -> Hints | None:
        """Return who says what to read ahead for a session: one of `HINTS`; None where there is nobody."""
        if kind == "off" or self.plan.is_resident:
            return None
        layouts = self.checkpoint.experts
        layers = {layer: layout.record.num_experts for layer, layout in layouts.items()}
        setting = PredictorSetting(
            layers,
            self.config.num_experts_per_tok,
            self.warm.usage().counts,
            near=self.routes.near,
            head=None if self.routes.sidecar is None else self.routes.sidecar.head,
        )
        return Hints(make_predictor(kind, setting), self.config.num_hidden_layers)

    def close(self) -> None:
        """Join the reader threads and close the files. Safe to call twice."""
        self._closed = True
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def asked_routes(checkpoint: Checkpoint, request: PlanRequest, own: OwnDraft | None) -> RouteFiles:
    """Look for the trained hints that were asked for."""
    if own is None:
        return find_routes(checkpoint, request.hints, None, "")
    return find_routes(checkpoint, request.hints, own.directory, own.verdict.digest)


def _open_drafter(
    target: Target,
    weights: CheckpointWeights,
    plan: Plan,
    own: OwnDraft | None,
    sidecar: Sidecar | None,
) -> Callable[[], Drafter | None]:
    """Load the planned drafter, if any, and return what makes one for each sequence."""
    model, sync = target.model, target.sync
    if plan.draft == "lookup":
        return lambda: LookupDrafter(plan.context_tokens)
    if plan.draft == "mtp":
        view = open_mtp_view(model, weights, target.experts, sync)
        return lambda: MtpDrafter(view)
    if plan.draft == "dflash2" and own is not None:
        own.load(DraftTarget(model, sync), model.compute_dtype)
        return lambda: own.drafter(plan.context_tokens, sidecar)
    return lambda: None


class AnswerObserver(CycleObserver, Protocol):
    """Watches the answers of one session; see `recording.py`."""

    def listen(self, hints: Hints | None) -> Hints | None:
        """Return the hints to use: these, or some that say the same and are overheard."""
        ...

    def begin_answer(self, timeline: Timeline, prompt: Sequence[int], sampler: Sampler) -> None:
        """Take note of an answer before its first cycle. Must not raise."""
        ...

    def end_answer(self, timeline: Timeline) -> None:
        """Take note of the end of this timeline's answer, well or not. Must not raise."""
        ...


class Session:
    """One conversation's timeline.

    Invariants:
        I2  `tokens` are exactly what the state has consumed; after any error the state is dropped, never
            patched.
    """

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None,
        *,
        is_guarded: bool,
        hints: Hints | None = None,
        recorder: AnswerObserver | None = None,
        laps: Laps = NO_LAPS,
    ) -> None:
        self._engine = engine
        self._recorder = recorder
        self._laps = laps
        self._drafter = drafter
        self._hints = hints
        earlier = engine.warm.learned if drafter is None else NOTHING_LEARNED
        most = engine.plan.num_draft_tokens
        first = (most + 1) // 2 if engine.plan.draft == "dflash2" else 1
        self._governor = Governor(most, is_guarded=is_guarded, earlier=earlier, first_width=first)
        self._timeline: Timeline | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the tokens the state has consumed."""
        return () if self._timeline is None else tuple(self._timeline.tokens)

    def reset(self) -> None:
        """Forget everything."""
        self._timeline = None

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int | None = None,
        stop_ids: Collection[int] = (),
        stop_strings: Sequence[str] = (),
        cancelled: Callable[[], bool] = lambda: False,
        rule: Asked = "auto",
        processors: Sequence[LogitsProcessor] = (),
    ) -> Iterator[Event]:
        """Answer a prompt.

        Args:
            prompt: the full rendering of the conversation; reused as far as the state has consumed it, or
                had consumed it where a turn began.
            params: sampling.
            max_tokens: most tokens of the answer; the rest of the context when None.
            stop_ids: ids that end the answer.
            stop_strings: texts that end the answer before them.
            cancelled: asked between cycles and prefill chunks; True ends the answer with the state valid.
            rule: how proposals are verified; every rule leaves the target's distribution as it is.
            processors: further changes of the logits; one that cannot look ahead stops speculation.

        Yields:
            Prefill progress, tokens, one `Finished`.

        Raises:
            EmptyPrompt: no tokens.
            ContextTooLong: the prompt leaves no room for a token.
            InvalidRequest: `params` name a token that the model does not have.
            EngineClosed: the engine was closed.
            WrongThread: the engine was opened on another thread.
            StoreError: a record could not be read; the answer stops there.
        """
        engine, plan = self._engine, self._engine.plan
        _check_prompt(prompt, plan)
        params.check_vocabulary(engine.config.vocab_size)
        resolve_rule(rule, params, "point")  # refused before the conversation's state is touched
        engine.check_usable()
        timeline = self._timeline_for(prompt)
        sampler = Sampler(params, prompt, processors)
        timeline.drafting.begin_answer(prompt, rule, sampler)
        timeline.observer, timeline.laps = self._recorder, self._laps
        if self._recorder is not None:
            self._recorder.begin_answer(timeline, prompt, sampler)
        target = engine.target
        limits = Limits(
            max_tokens=plan.context_tokens if max_tokens is None else max_tokens,
            context_tokens=plan.context_tokens,
            stop_ids=frozenset(stop_ids),
            stop_strings=tuple(stop_strings),
            prefill_step=plan.prefill_step,
            cancelled=cancelled,
        )
        events = generate(
            timeline,
            prompt,
            sampler,
            engine.tokenizer.stream_decoder(),
            limits,
            Meter(target.store.statistics, target.sync),
            lambda: self._keep_snapshot(timeline),
        )
        try:
            yield from events
        except GeneratorExit:
            # Abandoned between two cycles, perhaps long ago and found by the garbage collector in the middle
            # of another answer: the state is whole, and no lease is ours to end.
            self._timeline = timeline
            raise
        except BaseException:
            target.experts.device_idle()
            raise
        finally:
            timeline.rest()
            engine.warm.end()
            if self._drafter is None:
                engine.warm.learned = self._governor.learned()
            if self._recorder is not None:
                self._recorder.end_answer(timeline)
        self._timeline = timeline

    def _timeline_for(self, prompt: Sequence[int]) -> Timeline:
        """Take the timeline to continue, from its end or from where a turn began, or a fresh one.

        While an answer runs its timeline is its own: an answer begun meanwhile must not write into it.
        """
        kept, self._timeline = self._timeline, None
        if kept is not None:
            num_common = _common_prefix(prompt, kept.tokens)
            if num_common == len(kept.tokens) < len(prompt):
                return kept
            # Strictly less than what is common: a drafter has seen the token after its last row.
            while kept.turns and kept.turns[-1].num_tokens >= num_common:
                kept.turns.pop()
            if kept.turns:
                kept.restore(kept.turns[-1])
                return kept
        del kept  # free the old state before the new one grows
        return self._engine.new_timeline(self._drafter, self._governor, self._hints)

    def _keep_snapshot(self, timeline: Timeline) -> None:
        """Keep the newest few; older turns are read again if a conversation goes back that far."""
        timeline.turns.append(timeline.snapshot())
        del timeline.turns[: -self._engine.plan.num_snapshots or None]


def _common_prefix(prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many leading tokens are the same."""
    pairs = zip(prompt, tokens, strict=False)
    return next(
        (at for at, (left, right) in enumerate(pairs) if left != right), min(len(prompt), len(tokens))
    )


def _check_prompt(prompt: Sequence[int], plan: Plan) -> None:
    if not prompt:
        raise EmptyPrompt(
            "The prompt has no tokens", hint="say something, or pipe text into `flashnext run -`"
        )
    if len(prompt) > plan.context_tokens:
        raise ContextTooLong(
            f"The prompt has {len(prompt)} tokens, the planned context holds {plan.context_tokens}",
            hint=_context_hint(len(prompt), plan),
            prompt_tokens=len(prompt),
            context_tokens=plan.context_tokens,
        )


def _context_hint(needed: int, plan: Plan) -> str:
    if needed < plan.longest_context_tokens:
        return f"--max-kv-size {needed + 256} fits this memory target"
    return "shorten it, or start a new conversation"
