"""The child process that renders chat templates. A program, not a library: `python template_worker.py`.

A template is a program from a stranger's checkpoint. Python cannot stop its own loops, so they run here,
where the parent can kill them. Started by path, it imports jinja2 and the standard library, never the
package.

Frames on stdin and stdout: four bytes of length, little-endian, then JSON. First frame in: the setup
(`source`, `memory_bytes`, `output_chars`, `seconds`); first out: `{"variables": [...]}`. Then one answer
per request, `{"text": ...}` or `{"kind": ..., "error": ...}`. End of input ends the process.

Invariants:
1. Whatever happens to the parent, this process ends: end of input when idle, SIGALRM while rendering.
2. Memory is capped by the kernel where it can (RLIMIT_AS on Linux), by a watchdog thread everywhere.

Source: environment and filters as in transformers 5 `chat_template_utils` (trim_blocks, lstrip_blocks,
loop controls, `tojson` without HTML escaping, `raise_exception`, `strftime_now`, `generation` blocks),
compared in a parity test.
"""

import contextlib
import datetime
import json
import os
import re
import resource
import signal
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY_EXIT = 71
_WATCH_INTERVAL_S = 0.02
# A product larger than this is refused before it is computed: one operator must not outrun the watchdog.
_OPERAND_LIMIT = 1 << 24
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)")


class _TooLarge(Exception):
    """The template asked for more memory or more output than it may have."""


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "%"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and _product_size(left, right) > _OPERAND_LIMIT:
            raise _TooLarge("a repetition is too long")
        if operator == "**" and isinstance(left, int) and isinstance(right, int) and right > 64:
            raise _TooLarge("a power is too large")
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise _TooLarge("a format is too wide")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what training code scores; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _product_size(left: Any, right: Any) -> int:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            return len(sequence) * max(times, 0)
    if isinstance(left, int) and isinstance(right, int):
        return (left.bit_length() + right.bit_length()) // 8
    return 0


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _environment() -> jinja2.Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _read_exactly(stream: BinaryIO, size: int) -> bytes | None:
    data = stream.read(size)
    return data if len(data) == size else None


def _read_frame(stream: BinaryIO) -> Any:
    head = _read_exactly(stream, 4)
    if head is None:
        return None
    body = _read_exactly(stream, struct.unpack("<I", head)[0])
    return None if body is None else json.loads(body)


def _write_frame(stream: BinaryIO, value: Any) -> None:
    body = json.dumps(value).encode()
    stream.write(struct.pack("<I", len(body)) + body)
    stream.flush()


def _limit_memory(limit_bytes: int) -> None:
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    unit = 1 if sys.platform == "darwin" else 1024

    def watch() -> None:
        pause = threading.Event()
        while not pause.wait(_WATCH_INTERVAL_S):
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit > limit_bytes:
                os._exit(MEMORY_EXIT)

    threading.Thread(target=watch, daemon=True).start()


def _render(template: jinja2.Template, variables: dict[str, Any], output_chars: int) -> str:
    parts: list[str] = []
    size = 0
    for part in template.generate(**variables):
        size += len(part)
        if size > output_chars:
            raise _TooLarge(f"the output exceeds {output_chars} characters")
        parts.append(part)
    return "".join(parts)


def _answer(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except jinja2.TemplateSyntaxError as error:
        return {"kind": "syntax", "error": f"line {error.lineno}: {error.message}"}
    except (MemoryError, _TooLarge) as error:
        return {"kind": "memory", "error": str(error) or "out of memory"}
    except jinja2.TemplateError as error:
        return {"kind": "refused", "error": error.message or type(error).__name__}
    except Exception as error:  # noqa: BLE001  whatever a stranger's program raises is an answer
        return {"kind": "failed", "error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Serve requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    setup = _read_frame(requests)
    if setup is None:
        return
    _limit_memory(setup["memory_bytes"])
    environment = _environment()
    compiled: list[jinja2.Template] = []

    def compile_source() -> dict[str, Any]:
        compiled.append(environment.from_string(setup["source"]))
        names = jinja2.meta.find_undeclared_variables(environment.parse(setup["source"]))
        return {"variables": sorted(names)}

    def guarded(work: Callable[[], dict[str, Any]]) -> None:
        signal.setitimer(signal.ITIMER_REAL, setup["seconds"])
        answer = _answer(work)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write_frame(answers, answer)

    _write_frame(answers, {"ready": True})
    guarded(compile_source)
    while compiled and (request := _read_frame(requests)) is not None:
        variables = request["variables"]
        guarded(lambda: {"text": _render(compiled[0], variables, setup["output_chars"])})  # noqa: B023  called at once


if __name__ == "__main__":
    main()
