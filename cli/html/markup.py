"""HTML that cannot be broken by what it says: text is escaped where it becomes an element. Entry: `tag`.

A string is text and is escaped; `Html` is markup and is not. Only `tag` and `join` make `Html` of anything
that comes from a report. Control characters that no document may hold are shown as U+FFFD.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Final

Attribute = str | float | int | bool | None

_FORBIDDEN: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID: Final = frozenset({"meta", "rect", "line", "circle", "path", "br"})


class Html(str):
    """Markup: goes into a page as it is."""

    __slots__ = ()


def escaped(text: str) -> Html:
    """Return text as markup that shows it, and nothing else, in element or attribute."""
    return Html(html.escape(_FORBIDDEN.sub("�", text), quote=True))


def tag(name: str, /, *children: str, **attributes: Attribute) -> Html:
    """Return an element.

    Args:
        name: of it; from this package, never from a report.
        children: text is escaped, `Html` is not.
        attributes: a trailing underscore is dropped and an inner one becomes a hyphen; None and False leave
            an attribute out, True gives it no value.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(key if value is True else f'{key}="{escaped(_plain(value))}"')
    opening = " ".join(parts)
    if name in _VOID:
        closing = "/>" if name not in ("meta", "br") else ">"
        return Html(f"<{opening}{closing}")
    return Html(f"<{opening}>{join(children)}</{name}>")


def join(children: Iterable[str], between: str = "") -> Html:
    """Return several pieces as one; text is escaped."""
    return Html(between.join(child if isinstance(child, Html) else escaped(child) for child in children))


def _plain(value: str | float) -> str:
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return str(value)
