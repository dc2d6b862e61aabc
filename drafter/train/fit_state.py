"""Where the fit of a predictor is, on disk, so that a killed one goes on. Entry point: `FitState`.

One file, `state.npz`, replaced as a whole: `p.NAME` values, `m.NAME` and `v.NAME` moments of the optimiser,
float32, and `about`: a JSON document with step, state of the generator, and what is fitted to what. A fit
that goes on ends with the values, to the bit, of one that was never disturbed: everything else follows from
its rows, which are made again. Nothing in the file is executed.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from drafter.documents import DocumentRefused, check_version, parse_object, read_document, unusable
from drafter.errors import DrafterError
from drafter.files import replacing
from drafter.reasons import shown
from drafter.train.route_losses import Adam
from drafter.train.runs import FIRST, PARAMETERS, SECOND

FORMAT: Final = "flashnext-fit-state"
VERSION: Final = 1
FILE: Final = "state.npz"
ABOUT: Final = "about"
SAVE_EVERY: Final = 100
"""Steps between checkpoints: what a kill loses."""
_ABOUT_BYTES_MAX: Final = 1 << 16
_ENTRY_BYTES_MAX: Final = 1 << 10
"""Of headers and names of one array, in the archive twice."""

Values = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class FitState:
    """The state of one fit.

    Attributes:
        directory: of the file; made when there is something to keep.
        description: plain values: what is fitted to what, and how; a fit is only ever continued with an
            equal one.
    """

    directory: Path
    description: Mapping[str, Any]

    def resume(self, adam: Adam, generator: np.random.Generator) -> int:
        """Bring values, moments and generator to where the fit was; return the steps done, 0 for a new one.

        Raises:
            DrafterError: there is another fit in the directory, or a file that is none; nothing has changed.
            OSError: the file cannot be read.
        """
        place = self.directory / FILE
        if not place.exists():
            return 0
        parts = {PARAMETERS: adam.params, FIRST: adam.first, SECOND: adam.second}
        shapes = {
            prefix + name: value.shape for prefix, values in parts.items() for name, value in values.items()
        }
        try:
            data = read_document(place, _most_bytes(shapes))
        except DocumentRefused as error:
            raise unusable(f"{place} is no state of this fit", error, hint=self._hint()) from None
        try:
            found, about = _read(data, shapes)
            step, state, said = about.get("step"), about.get("generator"), about.get("description")
            if type(step) is not int or step < 0:
                raise ValueError(f"step {shown(step)}")
            if said == self.description:
                generator.bit_generator.state = cast("Any", state)
        except Exception as error:  # what zipfile and numpy raise at a stranger's bytes has no end
            raise unusable(f"{place} is no state of this fit", error, hint=self._hint()) from error
        if said != self.description:
            other = _differing(said, self.description)
            raise DrafterError(f"{self.directory} holds a fit with another {other}", hint=self._hint())
        for prefix, values in parts.items():
            for name, value in values.items():
                value[...] = found[prefix + name]
        adam.count = step
        return step

    def save(self, step: int, adam: Adam, generator: np.random.Generator) -> None:
        """Write where the fit is, all or nothing.

        Raises:
            OSError: it cannot be written; what was there before is there still.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        about = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "generator": generator.bit_generator.state,
            "description": self.description,
        }
        arrays: dict[str, NDArray[Any]] = {
            prefix + name: value
            for prefix, values in ((PARAMETERS, adam.params), (FIRST, adam.first), (SECOND, adam.second))
            for name, value in values.items()
        }
        arrays[ABOUT] = np.frombuffer(json.dumps(about).encode(), np.uint8)
        with replacing(self.directory / FILE) as stream:
            np.savez(stream, **cast("Any", arrays))

    def _hint(self) -> str:
        return f"delete {self.directory} to begin anew, or give the settings of that fit"


def _most_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return what a file of these arrays has at most."""
    room = (len(shapes) + 1) * _ENTRY_BYTES_MAX + _ABOUT_BYTES_MAX
    return room + sum(4 * math.prod(shape) for shape in shapes.values())


def _read(data: bytes, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Values, dict[str, object]]:
    """Return the arrays of a file and what it says of itself.

    Raises:
        Exception: it is not one of these, or of other sizes.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        # What is stored as it is cannot become more than the file holds.
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("it is compressed")
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        if sorted(file.files) != sorted([*shapes, ABOUT]):
            raise ValueError("it holds other arrays")
        said = file[ABOUT]
        if said.dtype != np.uint8 or said.ndim != 1 or said.size > _ABOUT_BYTES_MAX:
            raise ValueError("it does not say what it is of")
        about = parse_object(said.tobytes(), ABOUT)
        check_version(ABOUT, (about.get("format"), about.get("version")), (FORMAT, VERSION))
        found: Values = {}
        for name, shape in shapes.items():
            array = file[name]
            if array.dtype != np.float32 or array.shape != shape or not np.isfinite(array).all():
                raise ValueError(f"{name} is {array.dtype} {array.shape}, not float32 {shape}, or not finite")
            found[name] = array
    return found, about


def _differing(one: Any, other: Mapping[str, Any]) -> str:
    if not isinstance(one, dict):
        return "description"
    mine = cast("dict[str, Any]", one)
    names = [name for name in other if mine.get(name) != other[name]] + [n for n in mine if n not in other]
    return ", ".join(name[:40] for name in names[:8])
