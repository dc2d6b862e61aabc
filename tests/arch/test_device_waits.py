"""The forward pass waits for the device in one file only: `model/host.py`, which counts."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
WAITING_CALLS = {"item", "tolist", "eval", "synchronize"}
FORWARD_PASS = [
    *sorted((ROOT / "mlx_flashnext/model").rglob("*.py")),
    ROOT / "mlx_flashnext/state.py",
    ROOT / "mlx_flashnext/layer_state.py",
    ROOT / "mlx_flashnext/engine/cycle.py",
    ROOT / "mlx_flashnext/engine/prefill.py",
    ROOT / "mlx_flashnext/engine/sampler.py",
    ROOT / "mlx_flashnext/engine/streams.py",
    ROOT / "mlx_flashnext/engine/verify.py",
    ROOT / "mlx_flashnext/experts.py",
    ROOT / "mlx_flashnext/rows.py",
    ROOT / "mlx_flashnext/banks.py",
]
# One-time allocation of slot tensors, never on the forward pass.
ALLOWED = {
    ("mlx_flashnext/model/host.py", "to_host"),
    ("mlx_flashnext/model/host.py", "fence"),
    ("mlx_flashnext/banks.py", "_bank_array"),
}


def waits(source: str) -> list[tuple[str, str]]:
    """Return (enclosing function, call) of everything that waits for the device in a module."""
    found: list[tuple[str, str]] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in WAITING_CALLS:
                found.append((function, name))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "<module>")
    return found


@pytest.mark.parametrize("path", FORWARD_PASS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_forward_pass_waits_only_in_host(path: pathlib.Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    assert [wait for wait in waits(path.read_text()) if (name, wait[0]) not in ALLOWED] == []


def test_the_scan_sees_a_planted_wait() -> None:
    assert waits("def f(x):\n    return x.item()\n") == [("f", "item")]
    assert waits("import mlx.core as mx\nmx.eval(1)\n") == [("<module>", "eval")]
