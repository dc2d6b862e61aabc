"""A training run on disk: what is trained on what, how far it is, and the log.

Entry points: `RunDescription`, `Run`. Only the standard library, so that trainers of any framework keep
their runs alike, and what one of them trained another exports. The tensors of a run lie in
`state.safetensors`, replaced as a whole: `p.NAME` parameters, `m.NAME` and `v.NAME` moments of the
optimiser, float32, and the step in its metadata.

The format is described in docs/FORMATS.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from drafter.config import DraftConfig
from drafter.config_reader import read_config
from drafter.documents import DocumentRefused, check_version, parse_object, read_document, unusable
from drafter.errors import DrafterError
from drafter.files import naming, read_regular, replace_file
from drafter.reasons import Report, shown

FORMAT = "flashnext-draft-run"
VERSION = 1
RUN, STATE, LOG, CURVE = "run.json", "state.safetensors", "log.csv", "curve.svg"
PARAMETERS, FIRST, SECOND = "p.", "m.", "v."
COLUMNS = ("step", "seconds", "rate", "base", "selector", "accuracy", "recall", "norm")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How a draft is trained.

    Attributes:
        num_steps: of the whole run; the rate's course follows from it.
        num_documents: of a step.
        num_anchors: of a document of a step.
        max_rows: rows of context of a document of a step.
        rate: the highest.
        gamma: how fast later slots count less: 4 for blocks of 8, 5 for 10, 7 for 16.
        selector_weight: of the selector's loss, reached over the first `selector_ramp` steps.
        selector_ramp: steps.
        clip: largest norm of the gradients together.
        seed: of parameters and batches.
        save_every: steps between checkpoints.
        log_every: steps whose means are one line of the log.
    """

    num_steps: int = 2000
    num_documents: int = 8
    num_anchors: int = 32
    max_rows: int = 2048
    rate: float = 6e-4
    gamma: float = 4.0
    selector_weight: float = 1.0
    selector_ramp: int = 20
    clip: float = 1.0
    seed: int = 0
    save_every: int = 100
    log_every: int = 10


@dataclass(frozen=True, slots=True)
class RunDescription:
    """What a run trains on what; a run is only ever continued with an equal one.

    Attributes:
        config: the draft's `config.json`.
        settings: how.
        captures_digest: of the capture set.
        target_digest: of the target build that it was captured from.
        tokenizer_digest: of it.
        contraction: of the captured features.
        num_ids: ids from here on are no tokens.
        framework: what computes the steps.
    """

    config: dict[str, Any]
    settings: TrainSettings
    captures_digest: str
    target_digest: str
    tokenizer_digest: str
    contraction: str
    num_ids: int
    framework: str

    def draft_config(self) -> DraftConfig:
        """Return the draft.

        Raises:
            DrafterError: the config is not one.
        """
        return config_of(self.config)


def config_of(document: dict[str, Any]) -> DraftConfig:
    """Return the draft of a config document.

    Raises:
        DrafterError: it is not one of a draft.
    """
    report = Report()
    config = read_config(document, report)
    if config is None or report.refusals:
        why = "; ".join(reason.message for reason in report.refusals)
        raise DrafterError(f"No config of a draft: {why}", hint="docs/reference/dflash2.md, 1.1")
    return config


class Run:
    """The directory of a run.

    Args:
        directory: outside the sources; made if it is not there.
        description: of the run; None opens one that is there.

    Raises:
        DrafterError: there is another run in it, or none that can be read.
    """

    def __init__(self, directory: Path, description: RunDescription | None = None) -> None:
        self.directory = directory
        place = directory / RUN
        if description is None or place.exists():
            found = read_description(place)
            if description is not None and found != description:
                raise DrafterError(
                    f"{directory} holds a run with another {_differing(found, description)}",
                    hint="give a new directory, or the settings of that run",
                )
            self.description = found
            return
        directory.mkdir(parents=True, exist_ok=True)
        document = {"format": FORMAT, "version": VERSION, **asdict(description)}
        replace_file(place, json.dumps(document, indent=1).encode() + b"\n")
        self.description = description

    @property
    def state(self) -> Path:
        """Return where the tensors are."""
        return self.directory / STATE

    def log(self, row: Mapping[str, float]) -> None:
        """Append a line to the log; figures by `COLUMNS`."""
        place = self.directory / LOG
        with naming(place), place.open("a", encoding="ascii") as stream:
            if not stream.tell():
                stream.write(",".join(COLUMNS) + "\n")
            stream.write(",".join(f"{row[name]:.6g}" for name in COLUMNS) + "\n")

    def rows(self) -> list[dict[str, float]]:
        """Return the lines of the log."""
        place = self.directory / LOG
        if not place.exists():
            return []
        found: list[dict[str, float]] = []
        for line in read_regular(place).decode("ascii", "replace").splitlines()[1:]:
            with suppress(ValueError):  # a line that was cut short, or that somebody edited
                found.append(dict(zip(COLUMNS, map(float, line.split(",")), strict=True)))
        return found

    def cut_log(self, step: int) -> None:
        """Drop what a killed run logged after its last checkpoint."""
        rows = [row for row in self.rows() if row["step"] <= step]
        (self.directory / LOG).unlink(missing_ok=True)
        for row in rows:
            self.log(row)


def read_description(place: Path) -> RunDescription:
    """Return what a run's file says.

    Raises:
        DrafterError: it is missing, or not one.
    """
    try:
        document = parse_object(read_document(place), RUN)
        check_version(RUN, (document.pop("format", None), document.pop("version", None)), (FORMAT, VERSION))
        settings = document.get("settings")
        known = {field.name: type(field.default) for field in fields(TrainSettings)}
        _check_fields("setting", settings, known)
        kinds = {"config": dict, "settings": dict, "num_ids": int}
        names = [field.name for field in fields(RunDescription)]
        _check_fields("field", document, {name: kinds.get(name, str) for name in names})
        kept = cast("dict[str, Any]", document)
        return RunDescription(**{**kept, "settings": TrainSettings(**cast("dict[str, Any]", settings))})
    except FileNotFoundError:
        raise DrafterError(
            f"No training run: {place} is missing", hint="run: flashnext draft train"
        ) from None
    except DocumentRefused as error:
        raise unusable(f"No training run in {place.parent}", error, hint="give a new directory") from None


def _check_fields(what: str, found: object, known: Mapping[str, type]) -> None:
    """Refuse what has other fields, or one of another kind; where a fraction may stand a whole number may."""
    document = cast("dict[str, object]", found) if isinstance(found, dict) else {}
    if document.keys() != known.keys():
        wrong = ", ".join(sorted(document.keys() ^ known.keys()))
        raise DocumentRefused(f"{RUN} lacks or adds a {what}: {shown(wrong)}")
    for name, kind in known.items():
        value = document[name]
        if not isinstance(value, (int, kind) if kind is float else kind) or isinstance(value, bool):
            raise DocumentRefused(f"{RUN} has a {what} that cannot be: {name} = {shown(value)}")


def _differing(one: RunDescription, other: RunDescription) -> str:
    mine, theirs = asdict(one), asdict(other)
    return ", ".join(name for name in mine if mine[name] != theirs[name])
