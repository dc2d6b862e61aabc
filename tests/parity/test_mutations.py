"""Each way this model has been got wrong elsewhere, planted here, must be seen by the golden comparison.

A mutation replaces one part while a case runs; the comparison has to fail by ten times its tolerance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlx_flashnext import state
from mlx_flashnext.model import flashnext, gdn, hyper, moe, norm, ple, qsa, rope, select
from tests.parity.golden.cases import CASES
from tests.parity.goldens import TOLERANCE, checkpoint_dir, golden_arrays
from tests.tiny.stepping import advance
from tests.tiny.weights import TinyModel


def logits_of(case_name: str, change: Callable[[TinyModel], None] = lambda tiny: None) -> np.ndarray:
    tiny = TinyModel.open(checkpoint_dir(case_name))
    change(tiny)
    sequence, parts = tiny.model.new_state(), []
    tokens = list(CASES[case_name].tokens)
    for start in range(0, len(tokens), 26):  # 26 is no multiple of the block length: alignment faults show
        out = advance(tiny.model, tokens[start : start + 26], sequence, logits="all")
        parts.append(np.array(out.logits))
    return np.concatenate(parts)


def error(case_name: str, change: Callable[[TinyModel], None] = lambda tiny: None) -> float:
    return float(np.abs(logits_of(case_name, change) - golden_arrays(case_name)["logits"]).max())


def with_config(**fields: object) -> Callable[[TinyModel], None]:
    def change(tiny: TinyModel) -> None:
        tiny.model.config = dataclasses.replace(tiny.config, **fields)

    return change


def reorder_projection(linear, order: np.ndarray):
    return lambda x: linear(x)[..., mx.array(order)]


def split_in_halves(tiny: TinyModel) -> None:
    layer, config = tiny.model._layers[3]._qsa, tiny.config
    heads, dim = config.num_attention_heads, config.head_dim
    halves = np.arange(2 * heads * dim).reshape(2, heads, dim).swapaxes(0, 1).reshape(-1)
    layer._q = reorder_projection(layer._q, halves)


def swap_streams(tiny: TinyModel) -> None:
    tiny.model._layers[0]._attn_hyper._norm._scale_GD = tiny.model._layers[0]._attn_hyper._norm._scale_GD[
        ::-1
    ]


def norm_by_w(tiny: TinyModel) -> None:
    tiny.model._layers[3]._qsa._q_norm._scale_D = tiny.model._layers[3]._qsa._q_norm._scale_D - 1.0


def stream_norm_by_w(tiny: TinyModel) -> None:
    tiny.model._mixer._norm._scale_GD = tiny.model._mixer._norm._scale_GD - 1.0


def gdn_norm_by_one_plus_w(tiny: TinyModel) -> None:
    tiny.model._layers[0]._gdn._norm_v = tiny.model._layers[0]._gdn._norm_v + 1.0


def conv_dilation(dilation: int) -> Callable[[TinyModel], None]:
    def change(tiny: TinyModel) -> None:
        tiny.model._ple._conv._dilation = dilation

    return change


def taps_reversed(tiny: TinyModel) -> None:
    conv = tiny.model._layers[0]._gdn._conv
    conv._taps_JC = mx.contiguous(conv._taps_JC[::-1])


@contextmanager
def patched(target: object, name: str, replacement: object) -> Iterator[None]:
    with mock.patch.object(target, name, replacement):
        yield


def silu_gate():
    """Output gate silu(z) instead of sigmoid(z): multiply the gated rows once more by z."""

    def mix(self, x, *rest, original=gdn.GatedDeltaNet.mix):
        z, out = self._z(x), self._out
        self._out = lambda y: out(y * z)
        try:
            return original(self, x, *rest)
        finally:
            self._out = out

    return patched(gdn.GatedDeltaNet, "mix", mix)


def key_heads_tiled():
    def update(q, k, v, gamma, beta, initial_state, original=mx.fast.gated_delta_update):
        times = (1, 1, v.shape[2] // k.shape[2], 1)
        return original(mx.tile(q, times), mx.tile(k, times), v, gamma, beta, initial_state=initial_state)

    return patched(mx.fast, "gated_delta_update", update)


def unscaled_queries():
    def init(self, config, weights, name, original=gdn.GatedDeltaNet.__init__):
        original(self, config, weights, name)
        self._query_scale_k = self._key_scale_k

    return patched(gdn.GatedDeltaNet, "__init__", init)


def cut_by_turn_end():
    def rows(tokens, history, config, original=ple.ngram_rows):
        return original(tokens, history, dataclasses.replace(config, ngram_separator=126))

    return patched(flashnext, "ngram_rows", rows)


def own_separator_cuts():
    def rows(tokens, history, config, original=ple.ngram_rows):
        plain = original(tokens, history, config)
        first = [original([token], [config.ngram_separator] * 2, config)[0] for token in tokens]
        return [f if t == config.ngram_separator else p for t, p, f in zip(tokens, plain, first, strict=True)]

    return patched(flashnext, "ngram_rows", rows)


def tail_dropped():
    def choose(self, index_q, pooled, position, original=qsa.SparseAttention._choose):
        tokens, is_seen = original(self, index_q, pooled, position)
        budget = self._config.indexer_budget
        return tokens, is_seen & (mx.arange(tokens.shape[1]) < budget)

    return patched(qsa.SparseAttention, "_choose", choose)


def last_block_forced():
    def top(scores, k, original=select.select_top):
        last = mx.arange(scores.shape[1]) == scores.shape[1] - 1
        return original(mx.where(last, 1e9, scores), k)

    return patched(qsa, "select_top", top)


@contextmanager
def blocks_aligned_to_chunk() -> Iterator[None]:
    def attend(self, projected, state, position, original=qsa.SparseAttention.attend, **options):
        fresh = dataclasses.replace(state, open_keys=state.open_keys[:0])
        return original(self, projected, fresh, position, **options)

    # The commit notices by itself; what is asked here is whether the logits show it.
    with (
        patched(state.TransactionalState, "check_consistent", lambda *_: None),
        patched(qsa.SparseAttention, "attend", attend),
    ):
        yield


def pooled_rotated_at(shift: int):
    def call(self, x, first, *, stride=1, original=rope.Rope.__call__):
        return original(self, x, first + (shift if stride > 1 else 0), stride=stride)

    return patched(rope.Rope, "__call__", call)


def gate_before_attention_is_skipped():
    def close(self, o, gate, original=qsa.SparseAttention.close):
        sigmoid = mx.sigmoid
        with mock.patch.object(mx, "sigmoid", lambda a: mx.ones_like(sigmoid(a))):
            return original(self, o, gate)

    return patched(qsa.SparseAttention, "close", close)


def weights_in_other_order():
    def route(self, x, original=moe.Router.route):
        ids, weights = original(self, x)
        return ids, weights[:, ::-1]

    return patched(moe.Router, "route", route)


def stream_sum_instead_of_mean():
    def mix(self, unit, wide, original=hyper.HyperRead._mix):
        return original(self, unit, wide) * self._streams

    return patched(hyper.HyperRead, "_mix", mix)


def write_to_normalised_stack():
    def write(stack, y, inject):
        return mx.fast.rms_norm(stack, None, 1e-6) + inject[..., None] * y[:, None]

    return patched(hyper.HyperConnection, "write", staticmethod(write))


def norm_over_all_streams():
    def call(self, x):
        flat = mx.fast.rms_norm(x.reshape(x.shape[0], -1), None, self._eps)
        return flat.reshape(x.shape) * self._scale_GD

    return patched(norm.StreamNorm, "__call__", call)


def final_norm_added():
    def head(self, stack):
        return self._head(mx.fast.rms_norm(self._mixer(stack), None, 1e-6))

    return patched(flashnext.FlashNext, "head", head)


BY_MODEL = MappingProxyType(
    {
        "PLE convolution undilated": conv_dilation(1),
        "PLE convolution dilated by 2": conv_dilation(2),
        "PLE in the next layer": with_config(ple_layer=2),
        "PLE in the first layer": with_config(ple_layer=0),
        "stream norms of other streams": swap_streams,
        "query and gate rows in halves": split_in_halves,
        "QSA query norm by w": norm_by_w,
        "stream norm by w": stream_norm_by_w,
        "GDN norm by 1 + w": gdn_norm_by_one_plus_w,
        "GDN convolution taps reversed": taps_reversed,
    }
)
BY_PATCH = MappingProxyType(
    {
        "GDN gate by silu": silu_gate,
        "GDN key heads tiled": key_heads_tiled,
        "GDN queries unscaled": unscaled_queries,
        "tail dropped": tail_dropped,
        "most recent block forced": last_block_forced,
        "blocks aligned to the chunk": blocks_aligned_to_chunk,
        "pooled key at its last position": lambda: pooled_rotated_at(1),
        "QSA gate skipped": gate_before_attention_is_skipped,
        "router weights against other experts": weights_in_other_order,
        "streams summed": stream_sum_instead_of_mean,
        "write to the normalised stack": write_to_normalised_stack,
        "one norm over all streams": norm_over_all_streams,
        "final norm added": final_norm_added,
        "own separator cuts its context": own_separator_cuts,
    }
)


def test_without_a_fault_the_comparison_passes() -> None:
    assert error("default") < TOLERANCE
    assert error("separators") < TOLERANCE


@pytest.mark.parametrize("fault", BY_MODEL)
def test_a_changed_part_is_seen(fault: str) -> None:
    assert error("default", BY_MODEL[fault]) > 10 * TOLERANCE


@pytest.mark.parametrize("fault", BY_PATCH)
def test_a_replaced_rule_is_seen(fault: str) -> None:
    with BY_PATCH[fault]():
        assert error("default") > 10 * TOLERANCE


def test_context_cut_by_the_turn_end_is_seen() -> None:
    with cut_by_turn_end():
        assert error("separators") > 10 * TOLERANCE


def test_rope_frequencies_from_the_base_are_seen_at_long_range() -> None:
    from tests.parity.test_blocks_golden import (
        test_rope_equals_the_reference_up_to_the_longest_context as check,
    )

    def by_base(self, x, first, *, stride=1):
        return mx.fast.rope(x, 64, traditional=False, base=1e7, scale=float(stride), offset=first)

    with patched(rope.Rope, "__call__", by_base), pytest.raises(AssertionError):
        check("queries")


def test_a_norm_per_stream_in_the_mtp_module_is_seen() -> None:
    from tests.parity.goldens import golden_case, observe

    case, golden, tiny = golden_case("default")
    assert tiny.mtp is not None
    one_norm = tiny.mtp._stack_norm
    streams = tiny.config.hc_count

    def per_stream(flat):
        parts = mx.fast.rms_norm(flat.reshape(flat.shape[0], streams, -1), None, 1e-6)
        return parts.reshape(flat.shape) * one_norm._scale_D

    tiny.mtp._stack_norm = per_stream  # type: ignore[assignment]
    seen = observe(tiny, case.tokens)
    assert seen.mtp_logits is not None
    assert np.abs(seen.mtp_logits - golden["mtp_logits"]).max() > 10 * TOLERANCE


def test_expert_order_shows_in_the_bits() -> None:
    """Summing pairs in another order passes every tolerance, so only the bitwise tests can see it."""
    straight = logits_of("default")

    def route(self, x, original=moe.MixtureOfExperts.route):
        ids, weights = original(self, x)
        return ids[:, ::-1], weights[:, ::-1]

    with patched(moe.MixtureOfExperts, "route", route):
        reversed_sum = logits_of("default")
    assert not np.array_equal(straight, reversed_sum)
    assert np.abs(straight - reversed_sum).max() < TOLERANCE
