"""A scripted engine behind the command line's seam: canned tokens, real tokenizer, no model.

As a program (`python -m tests.cli.scripted SCRIPT ...flashnext arguments...`) it is the whole command
line in its own process, for tests of streams, pipes and signals. SCRIPT is a JSON object with the fields
of `Script`.
"""

import dataclasses
import itertools
import json
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cli.engine_factory import Services
from mlx_flashnext.engine.errors import ContextTooLong, EmptyPrompt
from mlx_flashnext.engine.events import Event, Finished, PrefillProgress, Token
from mlx_flashnext.engine.stats import GenerationStatistics
from mlx_flashnext.tokenizer import Tokenizer

FOREVER = 1 << 40


@dataclass
class Script:
    """What the engine will do.

    Attributes:
        answers: text of each answer in turn; the last one repeats.
        repeat: how often each answer's tokens are said.
        hang_in: "load", "prefill" or "decode": say so on stderr and wait there until interrupted; "stuck"
            ignores the cancel flag too.
        fail_in_load, fail_in_decode: class and message of a StoreError to raise there.
    """

    answers: list[str] = field(default_factory=lambda: ["Hello there."])
    repeat: int = 1
    end: str = "stop"
    context_tokens: int = 4096
    max_context_tokens: int = 8192
    hang_in: str = ""
    fail_in_load: tuple[str, str] | None = None
    fail_in_decode: tuple[str, str] | None = None
    digest: str = "d" * 64
    skipped: list[str] = field(default_factory=list)


def store_error(what: tuple[str, str]) -> Exception:
    import expert_store.errors

    return getattr(expert_store.errors, what[0])(what[1], hint="look at the disk")


@dataclass
class Plan:
    context_tokens: int
    max_context_tokens: int
    longest_context_tokens: int = 16384
    slots_per_layer: int = 8
    num_experts: int = 16

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class ScriptedSession:
    def __init__(self, engine: "ScriptedEngine") -> None:
        self.engine = engine
        self.tokens: tuple[int, ...] = ()

    def generate(
        self,
        prompt: Sequence[int],
        params: Any,
        *,
        max_tokens: int | None,
        stop_ids: Collection[int],
        stop_strings: Sequence[str] = (),
        cancelled: Callable[[], bool] = lambda: False,
        rule: str = "auto",
    ) -> Iterator[Event]:
        engine, script = self.engine, self.engine.script
        engine.calls.append(
            SimpleNamespace(
                prompt=list(prompt),
                params=params,
                max_tokens=max_tokens,
                stop_ids=tuple(stop_ids),
                rule=rule,
            )
        )
        if not prompt:
            raise EmptyPrompt("The prompt has no tokens")
        if len(prompt) >= script.context_tokens:
            raise ContextTooLong(
                f"The prompt has {len(prompt)} tokens, the planned context holds {script.context_tokens}",
                hint="shorten it",
            )
        reused = len(self.tokens) if tuple(prompt[: len(self.tokens)]) == self.tokens else 0
        yield PrefillProgress(len(prompt) // 2, len(prompt))
        if script.hang_in == "prefill":
            engine.wait_interrupted(cancelled)
            yield Finished("cancelled", self._statistics(prompt, reused, 0))
            return
        yield PrefillProgress(len(prompt), len(prompt))
        decoder, said, reason = engine.tokenizer.stream_decoder(), [], script.end
        answer = engine.tokenizer.encode(script.answers[min(len(engine.calls), len(script.answers)) - 1])
        for token in itertools.chain.from_iterable(itertools.repeat(answer, script.repeat)):
            if cancelled():
                reason = "cancelled"
                break
            if max_tokens is not None and len(said) >= max_tokens:
                reason = "length"
                break
            if len(prompt) + len(said) >= script.context_tokens:
                reason = "context"
                break
            said.append(token)
            if token in stop_ids:
                yield Token(token, "")
                break
            yield Token(token, decoder.feed(token))
            if script.fail_in_decode:
                raise store_error(script.fail_in_decode)
            if script.hang_in in ("decode", "stuck"):
                engine.wait_interrupted(cancelled)
        self.tokens = (*prompt, *said)
        yield Finished(reason, self._statistics(prompt, reused, len(said)), decoder.flush())

    def _statistics(self, prompt: Sequence[int], reused: int, num_output: int) -> GenerationStatistics:
        return GenerationStatistics(
            prompt_tokens=len(prompt),
            reused_tokens=reused,
            prefill_ns=1_000_000_000,
            output_tokens=num_output,
            decode_ns=2_000_000_000,
            cycles=num_output,
            read_bytes=8 << 20,
            prefill_read_bytes=0,
            hit_rate=0.91,
            exposed_wait_ns=800_000_000,
            peak_bytes=17 << 30,
            num_syncs=9,
        )


class ScriptedEngine:
    def __init__(self, script: Script, directory: Path) -> None:
        self.script = script
        self.tokenizer = Tokenizer.open(directory)
        self.notices: tuple[str, ...] = ()
        self.checkpoint = SimpleNamespace(digest=script.digest, skipped=tuple(script.skipped))
        self.plan = Plan(script.context_tokens, script.max_context_tokens)
        self.calls: list[SimpleNamespace] = []
        self.is_closed = False
        self.warm = SimpleNamespace(note="")
        self.mirror = None

    def session(self) -> ScriptedSession:
        return ScriptedSession(self)

    def close(self) -> None:
        self.is_closed = True

    def wait_interrupted(self, cancelled: Callable[[], bool]) -> None:
        sys.stderr.write(f"HANGING {self.script.hang_in}\n")
        sys.stderr.flush()
        stuck = self.script.hang_in == "stuck"
        while stuck or not cancelled():
            # An event nobody sets: waits in C like a real fence, wakes for signals.
            threading.Event().wait(0.01)


class Rig:
    """Services with a scripted engine, and what they were asked."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.engine: ScriptedEngine | None = None
        self.requests: list[Any] = []
        self.warm_directories: list[Path | None] = []
        self.services = Services(open_engine=self._open)

    def _open(
        self,
        directory: Path,
        request: Any,
        progress: Callable[[str, int, int], None],
        warm_directory: Path | None,
    ) -> ScriptedEngine:
        self.requests.append(request)
        self.warm_directories.append(warm_directory)
        progress("trunk", 1, 2)
        if self.script.fail_in_load:
            raise store_error(self.script.fail_in_load)
        self.engine = ScriptedEngine(self.script, directory)
        if self.script.hang_in == "load":
            self.engine.wait_interrupted(lambda: False)
        return self.engine


def main() -> None:
    from cli.app import main as flashnext

    script = Script(**json.loads(sys.argv[1]))
    flashnext(sys.argv[2:], services=Rig(script).services)


if __name__ == "__main__":
    main()
