"""Does the store ever leave its model? The state machine of tests/properties, as long as there is time.

    python -m bench.studies.store_machine --steps 1000000

Every chunk of examples has a seed of its own and tells on stderr when it is done; a failure prints the
shortest example that shows it and ends the process. CI runs 20,000 steps.
"""

import argparse
import json
import sys
import time

from hypothesis import seed, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from tests.properties.test_slot_machine import STEPS, StoreMachine

EXAMPLES = 400


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counted = 0

    class Counted(StoreMachine):
        @invariant()
        def count(self) -> None:
            nonlocal counted
            counted += 1

    began_s, cpu_s = time.monotonic(), time.process_time()
    chunk = 0
    free = settings(STEPS, max_examples=EXAMPLES, derandomize=False, database=None)
    while counted < options.steps:
        machine = seed(options.seed + chunk)(Counted)
        run_state_machine_as_test(machine, settings=free)
        chunk += 1
        print(f"{counted} steps, {chunk} seeds", file=sys.stderr, flush=True)
    print(
        json.dumps(
            {
                "study": "store_machine",
                "steps": counted,
                "first_seed": options.seed,
                "seeds": chunk,
                "seconds": round(time.monotonic() - began_s),
                "cpu_seconds": round(time.process_time() - cpu_s),
                "result": "the store did what the model says",
            }
        )
    )


if __name__ == "__main__":
    main()
