"""A draft of one's own beside a target: through the gate, into the plan, and out as drafters.

Entry point: `find_draft`, before anything is planned; then `OwnDraft.load`, once the target is there. Nothing
of a draft is loaded before the gate has let it in and the plan has room for it.
"""

from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import mlx.core as mx

from drafter.compat import Verdict, check_draft
from drafter.dflash2 import Dflash2Drafter, Dflash2Options
from drafter.errors import DrafterError
from drafter.facts import TargetFacts
from drafter.layers import Params
from drafter.loading import load_parameters
from drafter.sidecar import Sidecar
from drafter.sizes import DraftSizes
from expert_store.errors import StoreError
from mlx_flashnext.checkpoint import Checkpoint
from mlx_flashnext.engine.conditions import version_of
from mlx_flashnext.engine.draft_files import open_draft
from mlx_flashnext.engine.draft_target import DraftTarget, target_facts
from mlx_flashnext.engine.errors import DamagedDrafter, IncompatibleDrafter, MissingDrafter
from mlx_flashnext.engine.machine import Machine
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sizes import DraftBytes
from mlx_flashnext.engine.streams import draw_draft
from mlx_flashnext.model.flashnext import Contraction
from mlx_flashnext.tokenizer import Tokenizer

BESIDE_THE_TARGET = "draft"
"""Where a checkpoint directory may hold a draft that belongs to it."""


@dataclass(frozen=True, slots=True)
class Found:
    """What looking for a draft came to.

    Attributes:
        draft: that the gate let in; None if there is none.
        reason: why there is none, for `auto`; None if nobody wanted one.
    """

    draft: "OwnDraft | None" = None
    reason: str | None = None


def find_draft(checkpoint: Checkpoint, machine: Machine, request: PlanRequest) -> Found:
    """Look for the draft that was asked for, and hold it against the target.

    Args:
        checkpoint: the target's.
        machine: says what is computed in.
        request: `draft` is `dflash2` or `auto`; anything else asks for none.

    Raises:
        MissingDrafter: `dflash2` was asked for and there is no such directory.
        IncompatibleDrafter: the gate refuses the draft that was named.
        StoreError: its files are damaged.
    """
    if request.draft not in ("dflash2", "auto"):
        return Found()
    directory = request.draft_directory or checkpoint.directory / BESIDE_THE_TARGET
    is_named = request.draft == "dflash2" or request.draft_directory is not None
    if not directory.is_dir():
        if not is_named:
            return Found(reason="no draft lies beside the checkpoint")
        raise MissingDrafter(
            f"No draft there: {directory}",
            hint="--draft-model DIR names one, flashnext draft makes one, --draft mtp or lookup need none",
        )
    try:
        return Found(_judged(directory, checkpoint, machine, request.num_draft_tokens))
    except (IncompatibleDrafter, StoreError) as error:
        if is_named:
            raise
        return Found(reason=f"the draft beside the checkpoint was refused: {error.message}")


def _judged(directory: Path, checkpoint: Checkpoint, machine: Machine, wanted: int | None) -> "OwnDraft":
    tokenizer = Tokenizer.open(checkpoint.directory)
    facts = target_facts(
        checkpoint,
        tokenizer,
        None,
        name=checkpoint.directory.name,
        contractions=get_args(Contraction),
        runtime_version=version_of("flashnext"),
        itemsize=2 if machine.compute_dtype == "bfloat16" else 4,
        context_tokens=checkpoint.config.max_position_embeddings,
        memory_left=None,
    )
    with closing(open_draft(directory)) as files:
        verdict = check_draft(files.listing, facts, wanted=wanted)
    if verdict.refusals:
        raise _refusal(directory, verdict)
    return OwnDraft(directory, verdict, facts, tokenizer.num_ids, tokenizer.eos_ids)


def _refusal(directory: Path, verdict: Verdict) -> IncompatibleDrafter:
    first = verdict.refusals[0]
    more = f" (and {len(verdict.refusals) - 1} more reasons)" if len(verdict.refusals) > 1 else ""
    kind = DamagedDrafter if verdict.is_damaged else IncompatibleDrafter
    return kind(
        f"{first.code}: {first.message}{more}",
        hint=first.hint or f"flashnext draft inspect {directory} shows every comparison",
        reasons=[reason.as_row() for reason in verdict.reasons],
    )


class OwnDraft:
    """A draft that fits its target. Parameters are shared by its drafters, contexts are not.

    Attributes:
        directory: of its files.
        verdict: of the gate.
    """

    def __init__(
        self,
        directory: Path,
        verdict: Verdict,
        facts: TargetFacts,
        num_ids: int,
        stop_ids: Collection[int],
    ) -> None:
        self.directory = directory
        self.verdict = verdict
        self._facts = facts
        self._num_ids = num_ids
        self._stop_ids = stop_ids
        self._params: Params | None = None
        self._view: DraftTarget | None = None
        self._dtype = mx.float32

    @property
    def bytes(self) -> DraftBytes:
        """Return what it takes, for the plan."""
        config = self.verdict.config
        assert config is not None
        sizes = DraftSizes(config, self._facts.itemsize)

        def linear(size: Callable[[int], int]) -> tuple[int, int]:
            """Return the bytes of an empty sequence, and of every token."""
            return size(0), size(1) - size(0)

        context, context_per_token = linear(lambda tokens: sizes.context(tokens) + sizes.growth(tokens))
        snapshot, snapshot_per_token = linear(sizes.snapshot)
        scratch, scratch_per_token = linear(sizes.block)
        return DraftBytes(
            weights=self.verdict.weight_bytes,
            context=context,
            feature_width=config.feature_width,
            max_proposals=self.verdict.max_proposals,
            context_per_token=context_per_token,
            snapshot=snapshot,
            snapshot_per_token=snapshot_per_token,
            candidates=sizes.candidates,
            scratch=scratch,
            scratch_per_token=scratch_per_token,
            scratch_per_row=sizes.chunk_row(),
        )

    @property
    def notices(self) -> tuple[str, ...]:
        """Return what the gate wants said: warnings, and settings it lowered."""
        said = (each for each in self.verdict.reasons if each.consequence in ("warn", "clamp"))
        return tuple(
            f"{each.code}: {each.message}" + (f" ({each.hint})" if each.hint else "") for each in said
        )

    def load(self, view: DraftTarget, dtype: mx.Dtype) -> None:
        """Read the parameters, once the target is there to lend embedding and head.

        Raises:
            IncompatibleDrafter: the loaded target disagrees, the files changed, or hold values that are none.
            StoreError: a file could not be read.
        """
        with closing(open_draft(self.directory)) as files:
            verdict = check_draft(files.listing, replace(self._facts, row_digest=view.row_digest))
            if verdict.refusals:
                raise _refusal(self.directory, verdict)
            if verdict.digest != self.verdict.digest or verdict.config is None:
                raise IncompatibleDrafter(
                    f"The draft changed while it was opened: {self.directory}", hint="open it again"
                )
            try:
                self._params = load_parameters(verdict.config, files.read, view.to_host, dtype=dtype)
            except DrafterError as error:
                raise IncompatibleDrafter(error.message, hint=error.hint) from error
        self._view, self._dtype = view, dtype

    @property
    def mask_token_id(self) -> int:
        """Return the id that stands for tokens that are not known."""
        assert self.verdict.config is not None
        return self.verdict.config.mask_token_id

    def drafter(self, context_tokens: int, sidecar: Sidecar | None = None) -> Dflash2Drafter:
        """Return a drafter for one more sequence of at most `context_tokens`, with the sidecar, if any."""
        assert self._params is not None
        assert self._view is not None
        config, contraction = self.verdict.config, self.verdict.contraction
        assert config is not None
        assert contraction is not None
        return Dflash2Drafter(
            self._params,
            config,
            self._view,
            draw_draft,
            dtype=self._dtype,
            contraction=contraction,
            options=Dflash2Options(
                num_ids=self._num_ids, stop_ids=self._stop_ids, capacity_tokens=context_tokens
            ),
            digest=self.verdict.digest,
            sidecar=sidecar,
        )
