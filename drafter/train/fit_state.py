"""Where the fit of a predictor is, on disk, so that a killed one goes on. Entry point: `FitState`.

One file, `state.npz`, replaced as a whole: `p.NAME` values, `m.NAME` and `v.NAME` moments of the optimiser,
float32, and `about`: a JSON document with step, state of the generator, and what is fitted to what. A fit
that goes on ends with the values, to the bit, of one that was never disturbed: everything else follows from
its rows, which are made again. Nothing in the file is executed.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from drafter.errors import DrafterError
from drafter.train.route_losses import Adam
from drafter.train.runs import FIRST, PARAMETERS, PARTIAL, SECOND

FORMAT: Final = "flashnext-fit-state"
VERSION: Final = 1
FILE: Final = "state.npz"
ABOUT: Final = "about"
SAVE_EVERY: Final = 100
"""Steps between checkpoints: what a kill loses."""
_ABOUT_BYTES_MAX: Final = 1 << 16

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
            DrafterError: there is another fit in the directory, or a file that is none.
        """
        place = self.directory / FILE
        if not place.exists():
            return 0
        parts = {PARAMETERS: adam.params, FIRST: adam.first, SECOND: adam.second}
        try:
            found, about = _read(place, parts)
            step, state = about["step"], about["generator"]
            if not isinstance(step, int) or step < 0:
                raise ValueError(f"step {step!r}")
            if about["description"] == self.description:
                generator.bit_generator.state = state
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            OverflowError,
            EOFError,
            zipfile.BadZipFile,
        ) as error:
            said = str(error)[:200]
            raise DrafterError(f"{place} is no state of this fit: {said}", hint=self._hint()) from error
        if about["description"] != self.description:
            other = _differing(about["description"], self.description)
            raise DrafterError(f"{self.directory} holds a fit with another {other}", hint=self._hint())
        for prefix, values in parts.items():
            for name, value in values.items():
                value[...] = found[prefix + name]
        adam.count = step
        return step

    def save(self, step: int, adam: Adam, generator: np.random.Generator) -> None:
        """Write where the fit is, all or nothing."""
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
        partial = self.directory / f"{PARTIAL}.{FILE}"
        with partial.open("wb") as stream:
            np.savez(stream, **cast("Any", arrays))
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(self.directory / FILE)

    def _hint(self) -> str:
        return f"delete {self.directory} to begin anew, or give the settings of that fit"


def _read(place: Path, parts: Mapping[str, Values]) -> tuple[Values, dict[str, Any]]:
    """Return the arrays of a file and what it says of itself.

    Raises:
        OSError, ValueError, KeyError, zipfile.BadZipFile: it is not one of these, or of other sizes.
    """
    shapes = {
        prefix + name: value.shape for prefix, values in parts.items() for name, value in values.items()
    }
    # A stream of one's own: numpy leaves the one it opens to the garbage collector where the file is none.
    with place.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        if set(file.files) != {*shapes, ABOUT}:
            raise ValueError("it holds other arrays")
        said = file[ABOUT]
        if said.dtype != np.uint8 or said.ndim != 1 or said.size > _ABOUT_BYTES_MAX:
            raise ValueError("it does not say what it is of")
        about = json.loads(said.tobytes())
        if (about["format"], about["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is {str(about['format'])[:40]!r} version {str(about['version'])[:40]}")
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
