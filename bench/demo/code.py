"""Small Python functions from descriptions: list pipelines, strings, numbers and dictionaries.

The reply follows from the request, but for the name of a parameter: a for loop if and only if the request
says "Use a for loop.", a docstring if and only if it says "Add a docstring."
"""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass

from .heldout import function_is_held_out
from .words import grammar


@dataclass
class Spec:
    """What a list function computes: names of filter, map and reducer ("" for none) and their numbers."""

    filter: str
    map: str
    reducer: str
    k: int
    j: int

    @property
    def key(self) -> str:
        """Return the identity of the function; numbers that it does not use are left out."""
        k = self.k if self.filter in ("above", "below", "multiples") else 0
        j = self.j if self.map == "shifted" else 0
        return f"{self.filter} {self.map} {self.reducer} {k} {j}"


@dataclass
class Snippet:
    """A request, the reasoning and the function text; `spec` is None for functions of the closed list."""

    request: str
    thinking: str
    code: str
    description: str
    name: str
    spec: Spec | None = None

    @property
    def is_held_out(self) -> bool:
        """Return whether training must not see this function."""
        return self.spec is not None and function_is_held_out(self.spec.key)

    @property
    def answer(self) -> str:
        """Return the reply."""
        return fenced(self.code)


GRAMMAR = grammar("code")
LISTS, WORD_LISTS, TEXTS = (GRAMMAR[k].split() for k in ("lists", "word_lists", "texts"))
REQUESTS: list[str] = GRAMMAR["requests"]
SHORT_NAMES = {
    "sum": "sum_list",
    "max": "largest",
    "min": "smallest",
    "list": "copy_list",
    "count": "count_items",
    "sorted": "sort_list",
}


def _pipeline(rng: random.Random) -> Snippet:
    fw, cond, fname = rng.choice(GRAMMAR["filters"]).values()
    mw, expr, mname = rng.choice(GRAMMAR["maps"]).values()
    rw, reduce, rname, start, update = rng.choice(GRAMMAR["reducers"]).values()
    if rname == "count":
        mw, expr, mname = "{f}", "x", ""
    k = rng.randint(2, 9) if "%" in cond else rng.randint(2, 99)
    j = rng.randint(1, 9)
    v = rng.choice(LISTS)
    fw, cond, expr = fw.format(k=k), cond.format(k=k), expr.format(j=j)
    description = rw.format(m=mw.format(f=fw, j=j))
    name = "_".join(p for p in (rname, fname, mname) if p) or rname
    name = SHORT_NAMES.get(name, name)
    suffix = f" if {cond}" if cond else ""
    generator = (
        f"{expr} for x in {v}{suffix}"
        if expr != "x" or cond
        else (v if rname != "list" else f"x for x in {v}")
    )
    use_loop = bool(update) and rng.random() < 0.25
    if use_loop:
        acc = "result" if start == "[]" else "total"
        inner = update.format(e=expr).replace("total", acc)
        block = f"        if {cond}:\n            {inner}" if cond else f"        {inner}"
        code = f"def {name}({v}):\n    {acc} = {start}\n    for x in {v}:\n{block}\n    return {acc}"
        how = "I use a loop"
    else:
        code = f"def {name}({v}):\n    return {reduce.format(g=generator, v=v, c=suffix)}"
        how = "One line is enough"
    steps = [f"The function takes the list {v}."]
    if cond:
        steps.append(f"It keeps x if {cond}.")
    if expr != "x":
        steps.append(f"It uses {expr}.")
    steps.append(f"{how}.")
    request = rng.choice(REQUESTS).format(d=description) + (" Use a for loop." if use_loop else "")
    return Snippet(request, " ".join(steps), code, description, name, Spec(fname, mname, rname, k, j))


def _fixed(rng: random.Random) -> Snippet:
    name, description, params, body, thinking = rng.choice(GRAMMAR["functions"]).values()
    fields = {
        "{t}": rng.choice(TEXTS),
        "{w}": rng.choice(WORD_LISTS),
        "{v}": rng.choice(LISTS),
        "{k}": str(rng.randint(3, 8)),
    }

    def fill(s: str) -> str:
        for key, value in fields.items():
            s = s.replace(key, value)
        return s

    description = fill(description)
    code = f"def {name}({fill(params)}):\n" + textwrap.indent(fill(body), "    ")
    first = fill(params)
    start = f"The parameters are {first}. " if "," in first else f"The parameter is {first}. "
    return Snippet(
        rng.choice(REQUESTS).format(d=description), start + fill(thinking), code, description, name
    )


def with_docstring(snippet: Snippet) -> str:
    """Return the code with the description as docstring, once."""
    if '"""' in snippet.code:
        return snippet.code
    head, body = snippet.code.split("\n", 1)
    text = snippet.description
    return f'{head}\n    """{text[0].upper()}{text[1:]}."""\n{body}'


def fenced(code: str) -> str:
    """Return a Markdown code block."""
    return f"```python\n{code}\n```"


def make(rng: random.Random, is_pipeline: bool | None = None) -> Snippet:
    """Return one function with its request."""
    wants_pipeline = rng.random() < 0.65 if is_pipeline is None else is_pipeline
    snippet = _pipeline(rng) if wants_pipeline else _fixed(rng)
    if rng.random() < 0.12:
        snippet.request += " Add a docstring."
        snippet.code = with_docstring(snippet)
    return snippet


def pick(rng: random.Random, held_out: bool) -> Snippet:
    """Return one function that is or is not held out."""
    while True:
        snippet = make(rng, True if held_out else None)
        if snippet.is_held_out == held_out:
            return snippet
