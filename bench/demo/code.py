"""Small Python functions from descriptions: list pipelines, strings, numbers and dictionaries."""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass

from .words import grammar


@dataclass
class Snippet:
    """A request, the reasoning, the function text and one sentence about it."""

    request: str
    thinking: str
    code: str
    note: str
    name: str


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
    "product": "product_of",
}


def _pipeline(rng: random.Random) -> Snippet:
    fw, cond, fname = rng.choice(GRAMMAR["filters"]).values()
    mw, expr, mname = rng.choice(GRAMMAR["maps"]).values()
    rw, reduce, rname, start, update = rng.choice(GRAMMAR["reducers"]).values()
    if rname == "count":
        mw, expr, mname = "{f}", "x", ""
    k = rng.randint(2, 9) if "%" in cond else rng.choice((3, 5, 10, 20, 50, 100))
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
    use_loop = reduce == "" or (update and rng.random() < 0.35)
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
    request = rng.choice(REQUESTS).format(d=description)
    if use_loop and reduce and rng.random() < 0.7:
        request += " Use a for loop."
    return Snippet(request, " ".join(steps), code, f"The function {description}.", name)


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
        rng.choice(REQUESTS).format(d=description),
        start + fill(thinking),
        code,
        f"The function {description}.",
        name,
    )


def with_docstring(snippet: Snippet) -> str:
    """Return the code with the note as docstring."""
    head, body = snippet.code.split("\n", 1)
    text = snippet.note.removeprefix("The function ")
    return f'{head}\n    """{text[0].upper()}{text[1:]}"""\n{body}'


def fenced(code: str) -> str:
    """Return a Markdown code block."""
    return f"```python\n{code}\n```"


def reply(rng: random.Random, snippet: Snippet) -> tuple[str, str, str]:
    """Return (request, reasoning, reply) with one of several forms of answer."""
    request, code, u = snippet.request, snippet.code, rng.random()
    if rng.random() < 0.15:
        request, code = request + " Add a docstring.", with_docstring(snippet)
    block = fenced(code)
    if u < 0.3:
        block = f"{block}\n\n{snippet.note}"
    elif u < 0.45:
        block = f"Here is the function:\n\n{block}"
    return request, snippet.thinking, block


def make(rng: random.Random) -> Snippet:
    """Return one function with its request."""
    return _pipeline(rng) if rng.random() < 0.55 else _fixed(rng)
