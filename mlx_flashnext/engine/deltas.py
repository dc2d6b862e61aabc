"""What happened between two snapshots of statistics. Entry points: `since`, and `plus` to add such stretches.

Snapshots are frozen dataclasses of counts; a difference is one of the same kind, so that every property of a
snapshot (hidden fraction, useful-prefetch ratio) holds for the time between two as well.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast

_T = TypeVar("_T")
_LEVELS: Final = frozenset({"layer", "num_slots", "num_resident", "num_queued", "num_reading", "last_cycle"})
"""What is so now and cannot be subtracted; largest values are of all time for the same reason."""


def since(now: _T, then: _T) -> _T:
    """Return `now` with every count less what it was `then`.

    Args:
        now: a snapshot: a frozen dataclass of numbers, mappings, tuples and such dataclasses.
        then: an earlier one of the same source.
    """
    return cast("_T", _combined(now, then, operator.sub))


def plus(one: _T, other: _T) -> _T:
    """Return two stretches of the same source as one; what is no count is taken from the second."""
    return cast("_T", _combined(other, one, operator.add))


def _combined(now: Any, then: Any, how: Callable[[Any, Any], Any]) -> Any:
    if is_dataclass(now) and not isinstance(now, type):
        changed = {
            field.name: _combined(getattr(now, field.name), getattr(then, field.name), how)
            for field in fields(now)
            if field.name not in _LEVELS and not field.name.endswith("_max") and field.name != "max_ns"
        }
        return replace(now, **changed)
    if isinstance(now, Mapping):
        items = cast("Mapping[object, object]", now)
        return MappingProxyType({key: _combined(value, then[key], how) for key, value in items.items()})
    if isinstance(now, tuple):
        return tuple(_combined(a, b, how) for a, b in zip(cast("tuple[object, ...]", now), then, strict=True))
    return how(now, then)
