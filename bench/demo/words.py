"""Word lists and other grammar data, read from the TOML files in `grammar/`."""

from __future__ import annotations

import pathlib
import tomllib
from dataclasses import dataclass
from typing import Any


def grammar(name: str) -> dict[str, Any]:
    """Return the data of `grammar/<name>.toml`."""
    path = pathlib.Path(__file__).resolve().parent / "grammar" / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Person:
    """A name with its pronouns."""

    name: str
    subject: str
    object: str
    possessive: str


_DATA = grammar("words")
PEOPLE = [Person(n, "she", "her", "her") for n in _DATA["she"].split()]
PEOPLE += [Person(n, "he", "him", "his") for n in _DATA["he"].split()]
FOODS: list[str] = _DATA["foods"].split()
THINGS: list[str] = _DATA["things"].split()
ANIMALS: list[str] = _DATA["animals"].split()
ROLES: list[str] = _DATA["roles"].split()
TRAITS: list[str] = _DATA["traits"].split()
OBJECTS: list[str] = _DATA["objects"].split()
OBJECT_TRAITS: list[str] = _DATA["object_traits"].split()
PLACES: list[str] = _DATA["places"]
SEASONS: list[str] = _DATA["seasons"]


def plural(noun: str) -> str:
    """Return the plural of a noun of these lists."""
    return _DATA["irregular"].get(noun, noun + "s")


def article(phrase: str) -> str:
    """Return the phrase with a or an in front."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase
