"""Trains, exports and evaluates drafts against an open target. Nothing here answers anybody.

Entry points: `train_draft`, `export_run`, `load_draft`, `evaluate_draft`. What they know of networks and
losses is in `drafter/train`; here it meets the target that lends embedding and head, the gate, and files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
import msgspec

from drafter import contract
from drafter.compat import Verdict, check_draft
from drafter.config import DraftConfig, num_parameters
from drafter.contract import contract_of
from drafter.errors import DrafterError
from drafter.files import replace_file, replacing
from drafter.layers import Params
from drafter.loading import load_parameters
from drafter.train import trained
from drafter.train.captures import HELD_OUT, TRAIN, CapturedDocument, CaptureSet
from drafter.train.evaluate import Judged, judge_document, summarise
from drafter.train.runs import Run, RunDescription, TrainSettings, config_of
from drafter.train.trainer import load_position, train
from mlx_flashnext.engine.draft_files import CARD, CONFIG, open_draft
from mlx_flashnext.engine.draft_target import DraftTarget
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.errors import IncompatibleDrafter, TargetDiffers
from mlx_flashnext.training.draft_capture import facts_of

WEIGHTS: Final = "model.safetensors"
DTYPES: Final = {"bfloat16": mx.bfloat16, "float32": mx.float32}
_PARTIAL: Final = ".partial"


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft that the gate let in, ready to be looked at.

    Attributes:
        directory: of its files.
        verdict: of the gate.
        config: of the draft.
        params: of the target's compute type.
        contraction: as the gate found it.
    """

    directory: Path
    verdict: Verdict
    config: DraftConfig
    params: Params
    contraction: str


@dataclass(frozen=True, slots=True)
class Exported:
    """A draft directory that was made: parameters, and bytes of all its files."""

    directory: Path
    num_parameters: int
    num_bytes: int


def default_config(captures: CaptureSet, **sizes: int) -> dict[str, Any]:
    """Return the config of a DFlash2 draft for a captured target, in the proportions of released drafts.

    Args:
        captures: say width, vocabulary, layers and taps.
        sizes: to set by hand: `num_hidden_layers`, `intermediate_size`, `num_attention_heads`,
            `num_key_value_heads`, `head_dim`, `sliding_window`, `block_size`, `selector_rank`,
            `selector_top_k`, `mask_token_id`.
    """
    identity = captures.identity
    hidden = identity.hidden_size
    head_dim = 128 if hidden >= 1024 else 32
    heads = max(2, hidden // head_dim)
    layers = sizes.get("num_hidden_layers", 5 if hidden >= 1024 else 2)
    own = {
        "block_size": sizes.get("block_size", 8),
        "mask_token_id": sizes.get("mask_token_id", identity.vocab_size - 1),
        "target_layer_ids": list(identity.taps),
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": sizes.get("selector_rank", min(256, hidden)),
        "selector_top_k": sizes.get("selector_top_k", 16),
    }
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": sizes.get("intermediate_size", 3 * hidden),
        "num_hidden_layers": layers,
        "num_attention_heads": sizes.get("num_attention_heads", heads),
        "num_key_value_heads": sizes.get("num_key_value_heads", max(1, heads // 4)),
        "head_dim": sizes.get("head_dim", head_dim),
        "layer_types": ["sliding_attention"] * layers,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000000.0, "rope_type": "default"},
        "sliding_window": sizes.get("sliding_window", 2048),
        "use_sliding_window": True,
        "vocab_size": identity.vocab_size,
        "num_target_layers": identity.num_target_layers,
        "is_causal": False,
        "dflash_config": own,
    }


def train_draft(
    engine: Engine,
    captures: CaptureSet,
    directory: Path,
    config: dict[str, Any],
    settings: TrainSettings,
    *,
    progress: Callable[[int, int, float], None] = lambda _done, _total, _loss: None,
    stop: Callable[[], bool] = lambda: False,
) -> Run:
    """Train, or go on training, and return the run.

    Raises:
        TargetDiffers: the capture set is of another build.
        DrafterError: captures, run or config cannot be used.
    """
    check_build(engine, captures.identity.target_digest, "capture set")
    description = RunDescription(
        config=config,
        settings=settings,
        captures_digest=captures.digest(),
        target_digest=captures.identity.target_digest,
        tokenizer_digest=captures.identity.tokenizer_digest,
        contraction=captures.identity.contraction,
        num_ids=engine.tokenizer.num_ids,
        framework="mlx",
    )
    check_features(config_of(config), captures)
    run, view = Run(directory, description), DraftTarget(engine.target.model, engine.target.sync)
    documents = [captures.read(info) for info in captures.of_split(TRAIN)]
    train(run, documents, view, view.to_host, progress=progress, stop=stop)
    return run


def export_run(
    engine: Engine, run: Run, directory: Path, *, licence: str, dtype: str = "bfloat16"
) -> Exported:
    """Make a draft directory of a run: config, weights, contract, card, and how it was trained.

    Raises:
        TargetDiffers: the run was trained for another build.
        DrafterError: there is something in its place, or nothing to export.
        IncompatibleDrafter: the gate refuses what was made.
    """
    description, partial = run.description, directory.with_name(directory.name + _PARTIAL)
    check_build(engine, description.target_digest, "run")
    config = description.draft_config()
    if directory.exists():
        raise DrafterError(f"There is something already: {directory}", hint="give a new directory")
    if not run.state.exists():
        raise DrafterError(f"The run has no checkpoint yet: {run.directory}", hint="train it first")
    here = load_position(run, config)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    stored = {name: value.astype(DTYPES[dtype]) for name, value in here.params.items()}
    with replacing(partial / WEIGHTS) as stream:
        mx.save_safetensors(cast("Any", stream), stored, {"format": "pt"})  # pyright: ignore[reportUnknownMemberType]
    replace_file(partial / CONFIG, _json({**description.config, "dtype": dtype}))
    rows = run.rows()
    training = {
        "format": trained.FORMAT,
        "version": trained.VERSION,
        **asdict(description),
        "steps_done": here.step,
        "log": [rows[0], rows[-1]] if rows else [],
    }
    replace_file(partial / trained.FILE, _json(training))
    replace_file(partial / CARD, _card(engine, config, licence, here.step).encode())
    facts = facts_of(engine)
    with closing(open_draft(partial)) as files:
        own = contract_of(config, files.listing, facts, contraction=description.contraction, licence=licence)
    replace_file(partial / contract.FILE, msgspec.json.format(msgspec.json.encode(own), indent=1))
    with closing(open_draft(partial)) as files:
        verdict = check_draft(files.listing, facts)
    if verdict.refusals:
        first = verdict.refusals[0]
        raise IncompatibleDrafter(f"{first.code}: {first.message}", hint="train with another config")
    partial.rename(directory)
    total = sum(path.stat().st_size for path in directory.iterdir())
    return Exported(directory, num_parameters(config), total)


def load_draft(engine: Engine, directory: Path, *, contraction: str | None = None) -> LoadedDraft:
    """Return a draft through the gate.

    Args:
        engine: the target.
        directory: of the draft.
        contraction: to look at a draft whose contraction is not known yet; None takes what the gate found,
            and refuses a draft without.

    Raises:
        IncompatibleDrafter: the gate refuses it, but for G14 where `contraction` is given.
        StoreError: a file is damaged.
    """
    view = DraftTarget(engine.target.model, engine.target.sync)
    with closing(open_draft(directory)) as files:
        verdict = check_draft(files.listing, facts_of(engine))
        refusals = [each for each in verdict.refusals if contraction is None or each.code != "G14"]
        if refusals or verdict.config is None:
            raise IncompatibleDrafter(
                f"{refusals[0].code}: {refusals[0].message}",
                hint=refusals[0].hint or f"flashnext draft inspect {directory}",
                reasons=[reason.as_row() for reason in verdict.reasons],
            )
        params = load_parameters(
            verdict.config, files.read, view.to_host, dtype=engine.target.model.compute_dtype
        )
    found = contraction or verdict.contraction
    assert found is not None
    return LoadedDraft(directory, verdict, verdict.config, params, found)


def evaluate_draft(
    engine: Engine,
    draft: LoadedDraft,
    captures: CaptureSet,
    *,
    num_proposals: int | None = None,
    most_documents: int | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[str, Any]:
    """Return what the draft does on held-out documents, in all and by label; see docs/FORMATS.md.

    `selector_off` are the same weights with every slot's best logit.

    Raises:
        TargetDiffers: the capture set is of another build.
        DrafterError: its features are not those that the draft reads, or nothing is held out.
    """
    check_build(engine, captures.identity.target_digest, "capture set")
    check_features(draft.config, captures, draft.contraction)
    infos = captures.of_split(HELD_OUT)[:most_documents]
    if not infos:
        raise DrafterError("No document of the capture set is held out", hint="capture more prompts")
    k = num_proposals or draft.config.max_proposals
    by_label: dict[str, list[Judged]] = {}
    plain: list[Judged] = []
    for done, info in enumerate(infos):
        progress(done, len(infos))
        document = captures.read(info)
        by_label.setdefault(info.label, []).append(judge(engine, draft, document))
        if draft.config.has_selector:
            plain.append(judge(engine, draft, document, use_selector=False))
    progress(len(infos), len(infos))
    everything = [one for judged in by_label.values() for one in judged]
    return {
        "num_documents": len(infos),
        "num_proposals": k,
        "all": summarise(everything, k),
        "by_label": {label: summarise(judged, k) for label, judged in sorted(by_label.items())},
        "selector_off": summarise(plain, k)["tokens_per_cycle"] if plain else None,
    }


def judge(
    engine: Engine,
    draft: LoadedDraft,
    document: CapturedDocument,
    *,
    every: int = 1,
    use_selector: bool = True,
) -> Judged:
    """Return the draft's greedy paths at the positions of a document."""
    view = DraftTarget(engine.target.model, engine.target.sync)
    return judge_document(
        draft.params,
        draft.config,
        view,
        view.to_host,
        document,
        num_ids=engine.tokenizer.num_ids,
        every=every,
        use_selector=use_selector,
    )


def check_build(engine: Engine, digest: str, what: str) -> None:
    """Raise TargetDiffers if something was made with another target build."""
    mine = facts_of(engine).digest
    if digest != mine:
        raise TargetDiffers(
            f"The {what} was made with target build {digest[:12]}, this is {mine[:12]}",
            hint="open the build that will be served, or capture again from this one",
        )


def check_features(config: DraftConfig, captures: CaptureSet, contraction: str | None = None) -> None:
    """Raise DrafterError if a draft does not read what a capture set holds."""
    identity = captures.identity
    wanted = (config.taps, config.hidden_size, contraction or identity.contraction)
    found = (identity.taps, identity.hidden_size, identity.contraction)
    if wanted != found:
        raise DrafterError(
            f"The draft reads taps {wanted[0]} of {wanted[1]} by {wanted[2]}, the set holds {found[0]} of "
            f"{found[1]} by {found[2]}",
            hint="capture with the draft's taps and contraction",
        )


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=1).encode() + b"\n"


def _card(engine: Engine, config: DraftConfig, licence: str, steps: int) -> str:
    taps = ", ".join(map(str, config.taps))
    lines: Sequence[str] = (
        f"---\nlicense: {licence}\n---\n",
        f"# {config.architecture} for {engine.checkpoint.directory.name}\n",
        f"A block draft of {num_parameters(config):,} parameters, trained with flashnext for {steps} steps "
        f"on answers of exactly one target build (`{contract.FILE}` names it). It reads layers {taps} of the "
        "target and borrows its embedding and head. It guesses tokens; what is said is the target's.\n",
        f"How it was trained: `{trained.FILE}`. "
        "What it was held to: `flashnext-promotion.json`, if it was.\n",
    )
    return "\n".join(lines)
