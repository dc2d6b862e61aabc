"""The first 32 greedy tokens of a model on this machine, kept and compared. Entry: `check_golden`.

A pack that loads and answers nonsense, and an update that changes what a model says, look alike from outside:
text comes. So the tokens of one fixed prompt are kept the first time and compared with those of later times.
The first golden proves nothing by itself: it is a fixed point, and its text is shown for a person to judge.

Greedy tokens are the same for every number of slots on the CPU backend. Elsewhere, and between versions of
MLX, they may part at a near tie: the file says what it is of, and is replaced when that changes.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from mlx_flashnext.checkpoint import Checkpoint, open_checkpoint
from mlx_flashnext.engine.conditions import version_of
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.errors import BudgetTooSmall, InvalidRequest, MissingDrafter
from mlx_flashnext.engine.events import Finished, Token
from mlx_flashnext.engine.machine import Machine
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import SamplingParams
from mlx_flashnext.regular_file import read_regular

FORMAT = "flashnext-golden"
VERSION = 1
PROMPT: Final = "The three primary colours are red, yellow and"
NUM_TOKENS: Final = 32
CONTEXT_TOKENS: Final = 256
_FILE_BYTES_MAX: Final = 1 << 20
Outcome = Literal["kept", "same", "differs", "new conditions"]


class Golden(msgspec.Struct, frozen=True):
    """What was said once, and under which conditions.

    Attributes:
        model_digest: of the checkpoint.
        backend: `cpu` or `metal`.
        mlx: version.
        slots_per_layer: 0 on the CPU backend, where they change nothing.
        prompt: token ids.
        tokens: the greedy continuation.
        text: the same for people.
    """

    format: str
    version: int
    model_digest: str
    backend: str
    mlx: str
    slots_per_layer: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str

    @property
    def conditions(self) -> tuple[object, ...]:
        """Return what must be the same for the tokens to be comparable."""
        made = self.model_digest, self.backend, self.mlx, self.slots_per_layer
        return self.format, self.version, *made, self.prompt


@dataclass(frozen=True, slots=True)
class GoldenCheck:
    """What comparing came to.

    Attributes:
        outcome: `kept` the first time; `same`; `differs`; `new conditions` where the file was of another
            backend, version or prompt and was replaced.
        golden: of now.
        num_same: leading tokens that are those of the file.
        path: of the file.
        num_proposed: tokens that the model's own next-token module proposed meanwhile; 0 if it has none.
        num_accepted: of those, the ones that were right. Where the module was converted wrongly it is near 0
            (FIELD P42).
    """

    outcome: Outcome
    golden: Golden
    num_same: int
    path: Path
    num_proposed: int = 0
    num_accepted: int = 0

    @property
    def is_repeated(self) -> bool:
        """Return whether it says one token over and over, as broken packs do."""
        return len(set(self.golden.tokens)) <= 2


def check_golden(
    model: Path,
    machine: Machine,
    directory: Path,
    progress: Callable[[str, int, int], None] = lambda _stage, _done, _total: None,
) -> GoldenCheck:
    """Load a model, say its golden and compare it with the one that is kept; keep it if there is none.

    Args:
        model: directory of the checkpoint.
        machine: this one.
        directory: where goldens are kept, one a model.
        progress: as of `Engine.open`.

    Raises:
        StoreError: a record could not be read.
        EngineError: the model does not fit.
        OSError: the file cannot be read or written.
    """
    checkpoint = open_checkpoint(model)
    path = directory / f"{checkpoint.digest[:32]}.json"
    kept = _load(path)
    with _open(model, machine, progress, _ways(checkpoint, kept)) as engine:
        prompt = tuple(engine.tokenizer.encode(PROMPT)) or (0,)
        said, proposed, accepted = _greedy(engine, prompt)
        slots = 0 if machine.backend == "cpu" else engine.plan.slots_per_layer
        text = engine.tokenizer.decode(said)
        digest, mlx = engine.checkpoint.digest, version_of("mlx")
    golden = Golden(FORMAT, VERSION, digest, machine.backend, mlx, slots, prompt, said, text)
    outcome: Outcome = "same"
    num_same = len(said)
    if kept is None or kept.conditions != golden.conditions:
        _save(path, golden)
        outcome = "kept" if kept is None else "new conditions"
    elif kept.tokens != said:
        outcome = "differs"
        pairs = enumerate(zip(kept.tokens, said, strict=False))
        num_same = next((at for at, (one, other) in pairs if one != other), min(len(kept.tokens), len(said)))
    return GoldenCheck(outcome, golden, num_same, path, proposed, accepted)


def _ways(checkpoint: Checkpoint, kept: Golden | None) -> list[PlanRequest]:
    """Return how to open the model, the best way first: with the slots that the kept golden was said with.

    How much memory is free changes from day to day, and with it the slots that fit; tokens are comparable
    only with the same number of them, where it matters at all.
    """
    drafts = ["mtp", "none"] if checkpoint.mtp_experts is not None else ["none"]
    slots = [kept.slots_per_layer, None] if kept is not None and kept.slots_per_layer else [None]
    return [
        PlanRequest(context_tokens=CONTEXT_TOKENS, slots_per_layer=many, draft=draft, num_snapshots=0)
        for many in slots
        for draft in drafts
    ]


def _open(
    model: Path,
    machine: Machine,
    progress: Callable[[str, int, int], None],
    ways: Sequence[PlanRequest],
) -> Engine:
    """Open the model in the first way that fits.

    Raises:
        EngineError: none does.
    """
    for request in ways[:-1]:
        try:
            return Engine.open(model, request, machine=machine, progress=progress)
        except (BudgetTooSmall, InvalidRequest, MissingDrafter):
            continue
    return Engine.open(model, ways[-1], machine=machine, progress=progress)


def _greedy(engine: Engine, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
    """Return the continuation, and how many tokens were proposed and accepted on the way."""
    said: list[int] = []
    proposed = accepted = 0
    session = engine.session(is_guarded=False)
    for event in session.generate(prompt, SamplingParams(temperature=0.0), max_tokens=NUM_TOKENS):
        if isinstance(event, Token):
            said.append(event.token_id)
        elif isinstance(event, Finished):
            proposed, accepted = event.statistics.draft.num_proposed, event.statistics.draft.num_accepted
    return tuple(said), proposed, accepted


def _load(path: Path) -> Golden | None:
    """Return the golden of a file; None if there is none that can be read."""
    try:
        return msgspec.json.decode(read_regular(path, _FILE_BYTES_MAX), type=Golden)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _save(path: Path, golden: Golden) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several may do this at once (FIELD P73): each writes a file of its own, the last one stays.
    fresh = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(golden), indent=1))
    fresh.replace(path)
