"""What training never sees, by stable hashes of what a turn is about rather than of its words.

| genre | what is held out | share |
| --- | --- | --- |
| sums | an equation a + b (either order) or a - b with an operand of two digits | 1 in 16 |
| code | a list function: filter, map, reducer and numbers | 1 in 8 |
| stories | hero, thing and plot together ("a fox who loses a lantern") | 1 in 16 |
| chat | what an exercise in copying repeats or remembers | 1 in 16 |

A held-out sum works out at least one held-out equation in some step.  No turn of a training document is
held out, whatever its genre; the first turn of every held-out document is.  Equations between two digits are
never held out, since every longer one is worked out with them.

The first 1250 steps of the shipped weights were trained on an earlier data set that knew no such rule.  What
they saw of the held-out items is listed in `first_run.json`; every score leaves those out (`*_is_unseen`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib

SUM_SHARE, CODE_SHARE, STORY_SHARE, CHAT_SHARE = 16, 8, 16, 16


def stable_hash(text: str) -> int:
    """Return 32 bits that depend on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def equation_is_held_out(a: int, op: str, b: int) -> bool:
    """Return whether no training document may work out this equation."""
    if a < 10 and b < 10:
        return False
    if op == "+":
        a, b = min(a, b), max(a, b)
    return stable_hash(f"{a}{op}{b}") % SUM_SHARE == 0


def function_is_held_out(key: str) -> bool:
    """Return whether no training document may ask for this list function."""
    return stable_hash(f"function {key}") % CODE_SHARE == 0


def story_is_held_out(subject: str) -> bool:
    """Return whether no training document may tell a story about this subject."""
    return stable_hash(f"story {subject}") % STORY_SHARE == 0


def exercise_is_held_out(content: str) -> bool:
    """Return whether no training document may hold a word exercise with this content."""
    return stable_hash(f"exercise {content}") % CHAT_SHARE == 0


@functools.cache
def first_run() -> dict[str, frozenset[str]]:
    """Return the held-out items that occur in the first 1250 steps' batches."""
    path = pathlib.Path(__file__).resolve().parent / "first_run.json"
    return {kind: frozenset(items) for kind, items in json.loads(path.read_text()).items()}


def equation_is_unseen(a: int, op: str, b: int) -> bool:
    """Return whether no batch of any step contained this equation."""
    key = f"{min(a, b)}+{max(a, b)}" if op == "+" else f"{a}-{b}"
    return equation_is_held_out(a, op, b) and key not in first_run()["equations"]


def function_is_unseen(key: str) -> bool:
    """Return whether no batch of any step asked for this list function."""
    return function_is_held_out(key) and key not in first_run()["functions"]


def story_is_unseen(subject: str) -> bool:
    """Return whether no batch of any step told a story about this subject."""
    return story_is_held_out(subject) and subject not in first_run()["stories"]
