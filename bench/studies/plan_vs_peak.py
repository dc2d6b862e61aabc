"""Does the process stay within its plan? Peak resident size of one run against the plan's total.

    python -m bench.studies.plan_vs_peak [--model DIR] [--memory 1GiB] [--tokens 200]

Both figures are taken without the resident size at the end of imports. The run is a process of its own,
because a peak cannot be reset. The bound is 5 % or 16 MiB above the plan, whichever is more (public
reports: a flag obeyed to within a factor of two). The last line of stdout is one JSON document.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from mlx_flashnext.demo import demo_dir
from mlx_flashnext.engine.engine import Engine
from mlx_flashnext.engine.events import Finished
from mlx_flashnext.engine.machine import MIB, detect_machine, peak_resident_bytes
from mlx_flashnext.engine.plan import PlanRequest
from mlx_flashnext.engine.sampler import SamplingParams

TOLERANCE, TOLERANCE_BYTES = 0.05, 16 * MIB


def run(model: Path, slots: int | None, memory: int | None, tokens: int, context: int) -> dict[str, Any]:
    """Run one answer in this process and return plan and peak in bytes, imports taken off both."""
    machine = detect_machine()
    request = PlanRequest(memory_bytes=memory, context_tokens=context, slots_per_layer=slots)
    with Engine.open(model, request, machine=machine) as engine:
        vocabulary = engine.config.vocab_size
        prompt = [(17 * position + 3) % (vocabulary // 2) for position in range(tokens // 2)]
        params = SamplingParams(temperature=1.0, seed=1)
        *_, end = engine.session().generate(prompt, params, max_tokens=tokens - len(prompt))
        assert isinstance(end, Finished)
        total = engine.plan.total_bytes
        slots = engine.plan.slots_per_layer
    peak = peak_resident_bytes()
    return {
        "slots_per_layer": slots,
        "tokens": tokens,
        "imports_bytes": machine.imports_bytes,
        "plan_bytes": total - machine.imports_bytes,
        "peak_bytes": peak - machine.imports_bytes,
        "allowed_bytes": int(max(TOLERANCE * total, TOLERANCE_BYTES)) + total - machine.imports_bytes,
    }


def measure(
    model: Path, *, slots: int | None = None, memory: int | None = None, tokens: int = 200, context: int = 512
) -> dict[str, Any]:
    """Run in a process of its own; see `run`."""
    arguments = {"model": str(model), "slots": slots, "memory": memory, "tokens": tokens, "context": context}
    code = (
        "import json, pathlib, sys; from bench.studies.plan_vs_peak import run\n"
        "a = json.loads(sys.argv[1]); a['model'] = pathlib.Path(a['model']); print(json.dumps(run(**a)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print one run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint; the demo if left out")
    parser.add_argument("--slots", type=int, default=None)
    parser.add_argument("--memory-mib", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--context", type=int, default=512)
    options = parser.parse_args()
    memory = None if options.memory_mib is None else options.memory_mib * MIB
    found = measure(
        options.model or demo_dir(),
        slots=options.slots,
        memory=memory,
        tokens=options.tokens,
        context=options.context,
    )
    plan, peak, bound = (found[name] / MIB for name in ("plan_bytes", "peak_bytes", "allowed_bytes"))
    print(f"plan {plan:.0f} MiB, peak {peak:.0f} MiB: {peak / plan:.3f} of the plan")
    print(f"bound {bound:.0f} MiB: {'kept' if peak <= bound else 'BROKEN'}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
