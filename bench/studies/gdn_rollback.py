"""How does a GDN layer return to an earlier row of a block, and what does that cost at real size?

    python -m bench.studies.gdn_rollback [--rounds 7]

One layer of the official geometry (48 value heads of 128 x 128, 16 key heads, 10,240 convolution channels;
4-bit weights, 16 of the 512 experts, 10 of them run) takes a token; then three ways to return to row a of a
block of T rows are compared:

    replay    run the recurrence over the first a rows again, from the state before the block
    calls     the same from the state after the last whole call of 4 rows, which is kept: what the model does
    states    keep the state of every row; nothing is run again

None runs a projection or an expert. Times are CPU seconds of the process, the least of the rounds, since the
machine is shared, each after a token through the layer, which leaves the caches as a block does. `bound` is
one read and one write of the state for every row that `calls` runs again: where a pass over the state takes
much more than half a millisecond, others are using the memory. Bytes are for the 36 layers of the model in
float32, beside the state before and after the block, which all three hold. The last line of stdout is one
JSON document.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from bench.synth.presets import REAL_CONFIG
from mlx_flashnext.config import ModelConfig, QuantSpec
from mlx_flashnext.geometry import FLOAT32_BYTES, GDN_STEP_ROWS, block_bytes
from mlx_flashnext.layer_state import GdnState, QsaState, empty_gdn, empty_qsa
from mlx_flashnext.model.gdn import GdnJournal, recur
from mlx_flashnext.model.host import HostSync
from mlx_flashnext.model.layer import DecoderLayer
from mlx_flashnext.model.moe import LookAhead
from mlx_flashnext.model.qsa import QsaJournal
from mlx_flashnext.model.quant import (
    DenseEmbedding,
    Embedding,
    ExpertBank,
    ExpertMatrix,
    QuantizedLinear,
    expert_glu,
)
from mlx_flashnext.model.rope import Rope

NUM_EXPERTS = 16
MOST_ROWS = 9
SPEC = QuantSpec("affine", 4, 64)
MIB = 1 << 20


class RandomWeights:
    """A `WeightSource` of noise in 4 bits."""

    def array(self, name: str, shape: tuple[int, ...]) -> mx.array:
        """Return a small random tensor."""
        del name
        return mx.random.normal(shape) * 0.02

    def linear(self, name: str, out_features: int, in_features: int) -> QuantizedLinear:
        """Return a random matrix."""
        del name
        weight, scales, biases = quantised((out_features, in_features))
        return QuantizedLinear(weight, scales, biases, SPEC)

    def embedding(self, name: str, num: int, dim: int) -> Embedding:
        """Return a random look-up."""
        del name
        return DenseEmbedding(mx.random.normal((num, dim)), mx.float32)


class FewExperts:
    """An `ExpertProvider` of the real widths; expert ids fold onto the few there are."""

    def __init__(self, config: ModelConfig) -> None:
        hidden, width = config.hidden_size, config.moe_intermediate_size
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        gate, up, down = (ExpertMatrix(*quantised((NUM_EXPERTS, *shape)), spec=SPEC) for shape in shapes)
        self._bank = ExpertBank(gate, up, down)

    def is_resident(self, layer: int) -> bool:
        """Return True: ids stay on the device."""
        del layer
        return True

    def looks_ahead(self, layer: int) -> Sequence[LookAhead]:
        """Return nobody: there is nothing to fetch."""
        del layer
        return ()

    def expect(self, layer: int, ids_TN: Sequence[Sequence[int]]) -> None:
        """Do nothing."""

    def run(self, layer: int, x_TD: mx.array, ids_TK: mx.array | Sequence[Sequence[int]]) -> mx.array:
        """Return every pair's output."""
        del layer
        assert isinstance(ids_TK, mx.array)
        return expert_glu(x_TD, ids_TK % NUM_EXPERTS, self._bank)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: milliseconds of the worst cut, and bytes of the whole model."""

    num_rows: int
    replay_ms: float
    calls_ms: float
    states_ms: float
    bound_ms: float
    replay_mib: float
    calls_mib: float
    states_mib: float


def quantised(shape: tuple[int, ...]) -> tuple[mx.array, mx.array, mx.array]:
    """Return weight, scales and biases of a random matrix."""
    parts = mx.quantize(mx.random.normal(shape) * 0.02, SPEC.group_size, SPEC.bits)
    mx.eval(parts)
    return parts[0], parts[1], parts[2]


def cpu_ms(work: Callable[[], object]) -> float:
    """Return the CPU milliseconds of one run."""
    start = time.process_time()
    work()
    return 1e3 * (time.process_time() - start)


def timed(rounds: int, works: Sequence[Callable[[], object]], between: Callable[[], object]) -> list[float]:
    """Return the least CPU milliseconds of each work, taken in turns, and of what is run before each."""
    found: list[list[float]] = [[] for _ in range(len(works) + 1)]
    for _ in range(rounds):
        for times, work in zip(found, works, strict=False):
            found[-1].append(cpu_ms(between))
            times.append(cpu_ms(work))
    return [min(times) for times in found]


def staged(layer: DecoderLayer, config: ModelConfig, num_rows: int) -> GdnJournal:
    """Run a block and return its journal, computed."""
    stack_TGD = mx.random.normal((num_rows, config.hc_count, config.hidden_size))
    out, left = layer(stack_TGD, empty_gdn(config, mx.float32), 0, is_revocable=True)
    assert isinstance(left.journal, GdnJournal)
    mx.eval(out, left.arrays())
    return left.journal


def returning(journal: GdnJournal, rows: int) -> GdnState:
    """Return to a row by running all rows before it again."""
    kept = [each[:rows] for each in journal.inputs]
    recurrent = recur([kept[0], *kept], journal.starts[0], MOST_ROWS)[1][-1]
    return GdnState(recurrent, journal.state_after(rows).conv_window)


def ways_back(journal: GdnJournal, num_rows: int) -> tuple[Callable[[], object], ...]:
    """Return the worst cut of a block by each way, and a pass over the state, as works to be timed."""
    state = journal.starts[0] + 0.0
    mx.eval(state)
    at_worst = max(range(1, num_rows), key=lambda row: (row % GDN_STEP_ROWS, row))
    for row in range(1, num_rows):
        again, kept = returning(journal, row), journal.state_after(row)
        assert mx.array_equal(again.recurrent, kept.recurrent).item()
    return (
        lambda: mx.eval(returning(journal, num_rows - 1).arrays()),
        lambda: mx.eval(journal.state_after(at_worst).arrays()),
        lambda: mx.eval(journal.window[1:4] + 0.0),
        lambda: mx.eval(state * state),
    )


def held_mib(config: ModelConfig, num_rows: int) -> tuple[float, float, float]:
    """Return what 36 layers hold for each way, beside the states before and after the block."""
    num_gdn = len(config.gdn_layers)
    matrix = config.linear_num_value_heads * config.linear_value_head_dim * config.linear_key_head_dim
    states = num_gdn * matrix * FLOAT32_BYTES
    calls = block_bytes(config, num_rows, FLOAT32_BYTES, revocable=True)
    calls -= block_bytes(config, 1, FLOAT32_BYTES, revocable=False)
    replay = calls - (num_rows - 1) // GDN_STEP_ROWS * states
    # A state of every row needs the convolution rows, but not the inputs of the recurrence.
    inputs = config.linear_conv_dim + config.linear_key_dim + 2 * config.linear_num_value_heads
    every = replay - num_gdn * num_rows * inputs * FLOAT32_BYTES + (num_rows - 1) * states
    return replay / MIB, calls / MIB, every / MIB


def measure(layer: DecoderLayer, config: ModelConfig, rounds: int) -> tuple[float, list[Row]]:
    """Return the milliseconds of one token, and the table."""
    stack_TGD = mx.random.normal((1, config.hc_count, config.hidden_size))
    empty = empty_gdn(config, mx.float32)

    def step() -> None:
        out, left = layer(stack_TGD, empty, 0, is_revocable=False)
        mx.eval(out, left.arrays())

    tokens, lines = [], []
    for rows in range(2, MOST_ROWS + 1):
        works = ways_back(staged(layer, config, rows), rows)
        replay, calls, states, one_pass, token = timed(rounds, works, step)
        bound = one_pass * min(rows - 1, GDN_STEP_ROWS - 1)
        tokens.append(token)
        lines.append(Row(rows, replay, calls, states, bound, *held_mib(config, rows)))
    return min(tokens), lines


def qsa_cut_ms(config: ModelConfig, context_tokens: int, rounds: int) -> float:
    """Return the CPU milliseconds of cutting a QSA layer of a context."""
    final: QsaState = empty_qsa(config, mx.float32, context_tokens)
    window = mx.random.normal((3 + MOST_ROWS, config.indexer_head_dim))
    mx.eval(window, final.arrays())
    journal = QsaJournal(final, window, MOST_ROWS, config.indexer_compress_ratio)
    return min(cpu_ms(lambda: mx.eval(journal.state_after(MOST_ROWS - 2).arrays())) for _ in range(rounds))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    config = ModelConfig.from_dict(json.loads(REAL_CONFIG.read_text()))
    layer = DecoderLayer(
        config,
        RandomWeights(),
        "layers.0",
        kind="gdn",
        layer=0,
        experts=FewExperts(config),
        rope=Rope(config),
        sync=HostSync(),
    )
    step_ms, lines = measure(layer, config, options.rounds)
    print(f"one token through the layer: {step_ms:.1f} ms")
    print("        worst cut, ms (% of a token)              bound   held by 36 layers, MiB")
    print("rows   replay          calls           states       ms     replay   calls   states")
    share = 100 / step_ms
    for line in lines:
        print(
            f"{line.num_rows:4}  {line.replay_ms:6.2f} ({line.replay_ms * share:4.1f})  "
            f"{line.calls_ms:6.2f} ({line.calls_ms * share:4.1f})  "
            f"{line.states_ms:6.2f} ({line.states_ms * share:4.1f})  {line.bound_ms:5.2f}  "
            f"{line.replay_mib:7.1f} {line.calls_mib:7.1f} {line.states_mib:8.1f}"
        )
    contexts = {tokens: qsa_cut_ms(config, tokens, options.rounds) for tokens in (1024, 32_768, 262_144)}
    print("cut of a QSA layer: " + ", ".join(f"{ms:.3f} ms at {tokens}" for tokens, ms in contexts.items()))
    document = {
        "study": "gdn_rollback",
        "step_ms": round(step_ms, 2),
        "worst_share": round(max(line.calls_ms for line in lines) / step_ms, 4),
        "rows": {
            line.num_rows: {
                "replay_ms": round(line.replay_ms, 2),
                "calls_ms": round(line.calls_ms, 2),
                "bound_ms": round(line.bound_ms, 2),
                "replay_mib": round(line.replay_mib, 1),
                "calls_mib": round(line.calls_mib, 1),
                "states_mib": round(line.states_mib, 1),
            }
            for line in lines
        },
        "qsa_cut_ms": {tokens: round(ms, 3) for tokens, ms in contexts.items()},
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
