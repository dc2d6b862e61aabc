"""Checked access to one object of a config file.

Entry point: `Fields`. Every refusal is an `UnsupportedCheckpoint` that names the field and its value.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from mlx_flashnext.errors import UnsupportedCheckpoint

# MLX shapes are 32-bit.
MAX_INTEGER = (1 << 31) - 1
_MOST_SHOWN = 200


class Fields:
    """One object of the file: accessors check presence, type and range, and name the field they refuse."""

    def __init__(self, data: Mapping[str, object], prefix: str) -> None:
        self._data = data
        self._prefix = prefix

    def refuse(self, name: str, why: str) -> UnsupportedCheckpoint:
        """Return the error that refuses the field's value."""
        value = self._data.get(name)
        return UnsupportedCheckpoint(
            f"Unsupported config: {self._prefix}{name} = {_shown(value)}, {why}",
            hint="use an official or MLX conversion of Qwen3.8-Flash-Next; see `flashnext show MODEL`",
            field=name,
            value=value,
        )

    def has(self, name: str) -> bool:
        """Return whether the field is present."""
        return name in self._data

    def get(self, name: str) -> object:
        """Return the value of a field that must be present."""
        if name not in self._data:
            raise UnsupportedCheckpoint(
                f"Config field missing: {self._prefix}{name}",
                hint="download the checkpoint's config.json again; this field has no safe default",
                field=name,
            )
        return self._data[name]

    def mapping(self, name: str) -> Mapping[str, object]:
        """Return a field that must be an object."""
        value = self.get(name)
        if not isinstance(value, Mapping):
            raise self.refuse(name, "an object was expected")
        return value

    def integer(self, name: str, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        """Return a field that must be an integer from `minimum` to `maximum`."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.refuse(name, f"an integer of at least {minimum} was expected")
        if value > maximum:
            raise self.refuse(name, f"an integer of at most {maximum} was expected")
        return value

    def number(self, name: str) -> float:
        """Return a field that must be a positive, finite number."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, "a positive number was expected")
        if not 0 < value <= sys.float_info.max:
            raise self.refuse(name, "a positive number was expected")
        return float(value)

    def choice(self, name: str, allowed: tuple[object, ...]) -> None:
        """Refuse a field whose value is none of `allowed`, in value and type."""
        value = self.get(name)
        if not any(value == option and type(value) is type(option) for option in allowed):
            raise self.refuse(name, f"only {' or '.join(map(repr, allowed))} is implemented")

    def require(self, condition: bool, name: str, why: str) -> None:
        """Refuse a field unless `condition` holds."""
        if not condition:
            raise self.refuse(name, why)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
