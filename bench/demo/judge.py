"""Is a generated list function right? Checked against what it was asked for, never trusted.

`judge(reply, spec)` takes the code block of a reply, refuses every syntax that a list function does not need,
runs the rest in a child process of little memory and time, and compares its results with `reference`.
"""

from __future__ import annotations

import ast
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from .code import Spec

FILTERS: dict[str, Callable[[int, int], bool]] = {
    "even": lambda x, _: x % 2 == 0,
    "odd": lambda x, _: x % 2 != 0,
    "positive": lambda x, _: x > 0,
    "negative": lambda x, _: x < 0,
    "above": lambda x, k: x > k,
    "below": lambda x, k: x < k,
    "multiples": lambda x, k: x % k == 0,
    "": lambda _x, _k: True,
}
MAPS: dict[str, Callable[[int, int], int]] = {
    "squares": lambda x, _: x**2,
    "doubles": lambda x, _: x + x,
    "shifted": lambda x, j: x + j,
    "": lambda x, _: x,
}
REDUCERS: dict[str, Callable[[list[int]], Any]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "list": list,
    "count": len,
    "sorted": sorted,
}
CALLS = {"sum", "max", "min", "sorted", "len", "list", "range", "abs"}
METHODS = {"append"}
NODES: tuple[type[ast.AST], ...] = (
    *(ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.For),
    *(ast.If, ast.IfExp, ast.Compare, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Call, ast.Attribute),
    *(ast.GeneratorExp, ast.ListComp, ast.comprehension, ast.Name, ast.Constant, ast.List, ast.Expr),
    *(ast.expr_context, ast.cmpop, ast.boolop, ast.unaryop),
    *(ast.Add, ast.Sub, ast.Mult, ast.Mod, ast.FloorDiv, ast.Div),
)
NUM_CASES, NUM_ITEMS, BOUND = 12, 24, 120
SECONDS, MEMORY = 5, 256 * 2**20

RUNNER = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
job = json.load(sys.stdin)
names = {{"__builtins__": {{n: __builtins__.__dict__[n] for n in job["calls"]}}}}
exec(job["source"], names)
print(json.dumps([names[job["name"]](list(case)) for case in job["cases"]]))
"""


def reference(spec: Spec, numbers: list[int]) -> Any:
    """Return what the described function returns; raises ValueError for the largest of nothing."""
    kept = [x for x in numbers if FILTERS[spec.filter](x, spec.k)]
    return REDUCERS[spec.reducer]([MAPS[spec.map](x, spec.j) for x in kept])


def cases(spec: Spec) -> list[list[int]]:
    """Return random lists on which the described function is defined, the same for the same function."""
    rng, out = random.Random(spec.key), []
    while len(out) < NUM_CASES:
        numbers = [rng.randint(-BOUND, BOUND) for _ in range(NUM_ITEMS)]
        if any(FILTERS[spec.filter](x, spec.k) for x in numbers):
            out.append(numbers)
    return out


def code_block(reply: str) -> str | None:
    """Return the first Python block of a reply."""
    found = re.search(r"```python\n(.*?)```", reply, re.DOTALL)
    return found[1] if found else None


def refusal(source: str) -> str | None:
    """Return why a source is not run; None for one function made of harmless parts."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "no valid syntax"
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        return "not one function"
    function = tree.body[0]
    if function.decorator_list or len(function.args.args) != 1 or function.args.defaults:
        return "not a plain function of one argument"
    for node in ast.walk(tree):
        if not isinstance(node, NODES):
            return f"uses {type(node).__name__}"
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            return f"uses the name {node.id}"
        if isinstance(node, ast.Attribute) and node.attr not in METHODS:
            return f"uses the attribute {node.attr}"
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id not in CALLS:
                return f"calls {node.func.id}"
            if not isinstance(node.func, (ast.Name, ast.Attribute)):
                return "calls an expression"
    return None


def judge(reply: str, spec: Spec) -> str:
    """Return "right", or in a few words what is wrong."""
    source = code_block(reply)
    if source is None:
        return "no code"
    reason = refusal(source)
    if reason is not None:
        return f"refused: {reason}"
    lists = cases(spec)
    found = re.match(r"def (\w+)", source)
    job = {"source": source, "name": found and found[1], "cases": lists, "calls": sorted(CALLS)}
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-c", RUNNER],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=2 * SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "too slow"
    if child.returncode:
        return "fails: " + (child.stderr.strip().splitlines() or ["killed"])[-1][:80]
    return "right" if json.loads(child.stdout) == [reference(spec, x) for x in lists] else "wrong result"
