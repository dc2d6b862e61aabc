"""Every way to get the draft network wrong that still runs: each changes one thing of the shipped modules.

The comparison with the reference must fail for each, and pass without any. A constant shift of all positions
is no fault and must not be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from unittest import mock

import mlx.core as mx
import pytest

from drafter import block, context, fuse, layers, selector
from drafter.layers import Coefficients
from tests.parity import dflash2_goldens
from tests.parity.dflash2_goldens import TOLERANCE, replay

Change = Callable[[], AbstractContextManager[object]]


def patched(target: object, name: str, replacement: object) -> AbstractContextManager[object]:
    return mock.patch.object(target, name, replacement)


@contextmanager
def everywhere(name: str, replacement: object) -> Iterator[None]:
    """Replace what both `fuse` and `block` took from `layers`."""
    with patched(fuse, name, replacement), patched(block, name, replacement):
        yield


def params_changed(change: Callable[[dict[str, mx.array]], object]) -> AbstractContextManager[object]:
    load = dflash2_goldens.load_variant

    def changed(variant: str):
        config, params = load(variant)
        change(params)
        return config, params

    return patched(dflash2_goldens, "load_variant", changed)


def causal_block() -> AbstractContextManager[object]:
    def seen(query, start, key, own, *, original=layers.is_seen, **about):
        return original(query, start, key, own, **(about | {"is_causal": True}))

    return patched(block, "is_seen", seen)


def context_through_the_input_norm() -> AbstractContextManager[object]:
    def keys_values(params, config, layer, fused, start, freqs, original=fuse.context_keys_values):
        normed = layers.rms(fused, params[f"layers.{layer}.input_layernorm.weight"], config.rms_norm_eps)
        return original(params, config, layer, normed, start, freqs)

    return patched(context, "context_keys_values", keys_values)


def context_keys_without_norm() -> AbstractContextManager[object]:
    def keys_values(params, config, layer, fused, start, freqs, original=fuse.context_keys_values):
        with patched(fuse, "rms", lambda x, weight, eps: x):
            return original(params, config, layer, fused, start, freqs)

    return patched(context, "context_keys_values", keys_values)


def coefficients_from_the_output() -> AbstractContextManager[object]:
    """`finish` takes its coefficients from what it filters."""

    def kernels(params, config, name, u, original=block._kernels):
        both = original(params, config, name, u)
        return None if both is None else (params, config, name, both)

    def prepared(u, kernels, original=block._prepared):
        return original(u, None if kernels is None else kernels[3])

    def finished(y, kernels, original=block._finished, make=block._kernels):
        return original(y, None if kernels is None else make(*kernels[:3], y))

    return mock.patch.multiple(block, _kernels=kernels, _prepared=prepared, _finished=finished)


def halves_swapped() -> AbstractContextManager[object]:
    def both(params, name, u, kernel, group, original=layers.coefficients):
        return Coefficients(*reversed(original(params, name, u, kernel, group)))

    return patched(block, "coefficients", both)


def projection_rows(order: Callable[[mx.array, int], mx.array]) -> Change:
    """Read the rows of `kernel_projection` in another order."""

    def change(params: dict[str, mx.array]) -> None:
        for name in params:
            if name.endswith("kernel_projection.weight"):
                taps = params[name.replace("kernel_projection.weight", "base_kernel")].shape[1]
                params[name] = order(params[name], taps)

    return lambda: params_changed(change)


def dynamic_halves(weight: mx.array, taps: int) -> mx.array:
    half = weight.shape[0] // 2
    return mx.concatenate([weight[half:], weight[:half]])


def group_before_tap(weight: mx.array, taps: int) -> mx.array:
    wide = weight.reshape(2, -1, taps, weight.shape[1])
    return wide.transpose(0, 2, 1, 3).reshape(weight.shape)


def taps_reversed() -> AbstractContextManager[object]:
    def reverse(x, weights, original=layers.convolve):
        return original(x, weights[:, :, ::-1])

    return patched(block, "convolve", reverse)


def coefficients_shifted_with_the_value() -> AbstractContextManager[object]:
    def convolve(x, weights):
        out = weights[:, :, 0] * x
        for tap in range(1, weights.shape[2]):
            out = out + mx.pad(weights[:, :, tap] * x, [(0, 0), (tap, 0), (0, 0)])[:, : x.shape[1]]
        return out

    return patched(block, "convolve", convolve)


def convolution_wraps() -> AbstractContextManager[object]:
    def pad(x, widths):
        return mx.concatenate([x[:, -widths[1][0] :], x], axis=1)

    class WrappingMx:
        def __getattr__(self, name: str) -> object:
            return pad if name == "pad" else getattr(mx, name)

    return patched(layers, "mx", WrappingMx())


def finish_omitted() -> AbstractContextManager[object]:
    return patched(block, "_finished", lambda y, kernels: y)


def rope_interleaved() -> AbstractContextManager[object]:
    def rotate(x, start, freqs):
        return mx.fast.rope(x, x.shape[-1], traditional=True, base=None, scale=1.0, offset=start, freqs=freqs)

    return everywhere("rotate", rotate)


def block_one_too_high() -> AbstractContextManager[object]:
    """Turn block rows, and judge what they see, as if they lay one position further on."""

    def states(params, config, embeddings, starts, contexts, freqs, original=block.hidden_states):
        return original(params, config, embeddings, [start + 1 for start in starts], contexts, freqs)

    return patched(block, "hidden_states", states)


def window_closed() -> AbstractContextManager[object]:
    def seen(query, start, key, own, *, original=layers.is_seen, **about):
        return original(query, start, key, own, **(about | {"window": about["window"] + 1}))

    return patched(block, "is_seen", seen)


def no_window() -> AbstractContextManager[object]:
    def seen(query, start, key, own, *, original=layers.is_seen, **about):
        return original(query, start, key, own, **(about | {"window": None}))

    return patched(block, "is_seen", seen)


def norm_by_one_plus_w() -> AbstractContextManager[object]:
    def rms(x, weight, eps, original=layers.rms):
        return original(x, 1 + weight, eps)

    return everywhere("rms", rms)


def heads_mapped_in_turn() -> AbstractContextManager[object]:
    """Query head h reads key head h % K instead of h // (heads / K)."""

    def attention(q, k, v, original=mx.fast.scaled_dot_product_attention, **options):
        times = q.shape[1] // k.shape[1]
        tiled = (mx.concatenate([array] * times, axis=1) for array in (k, v))
        return original(q, *tiled, **options)

    return patched(mx.fast, "scaled_dot_product_attention", attention)


def taps_in_reverse_order() -> AbstractContextManager[object]:
    def fused(params, config, features, original=fuse.fuse):
        parts = mx.split(features, len(config.taps), axis=-1)
        return original(params, config, mx.concatenate(parts[::-1], axis=-1))

    return patched(fuse, "fuse", fused)


def anchor_stays_predecessor() -> AbstractContextManager[object]:
    anchors: list[mx.array] = []

    def scores(params, before, projected, ids, logits, original=selector.slot_scores):
        return original(params, anchors[0], projected, ids, logits)

    def walk(params, anchor, *args, original=selector.walk, **options):
        anchors[:] = [mx.array(anchor)]
        with patched(selector, "slot_scores", scores):
            return original(params, anchor, *args, **options)

    return patched(selector, "walk", walk)


def codebooks_swapped() -> AbstractContextManager[object]:
    def change(params: dict[str, mx.array]) -> None:
        one, other = "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"
        params[one], params[other] = params[other], params[one]

    return params_changed(change)


def selector_reads_the_slot_before() -> AbstractContextManager[object]:
    def project(params, hidden, original=selector.project):
        return original(params, mx.concatenate([hidden[:1], hidden[:-1]]))

    return patched(selector, "project", project)


def cap_before_multiplier() -> AbstractContextManager[object]:
    def capped(config, logits):
        if config.softcap is not None:
            logits = config.softcap * mx.tanh(logits / config.softcap)
        return logits * config.multiplier

    return patched(selector, "capped", capped)


def final_norm_omitted() -> AbstractContextManager[object]:
    return patched(block, "final_norm", lambda params, config, x: x)


FAULTS: Mapping[str, tuple[str, Change]] = MappingProxyType(
    {
        "causal block mask": ("base", causal_block),
        "context through the input norm": ("base", context_through_the_input_norm),
        "context keys without their norm": ("base", context_keys_without_norm),
        "coefficients from the sublayer's output": ("base", coefficients_from_the_output),
        "both halves swapped": ("base", halves_swapped),
        "only the dynamic halves swapped": ("base", projection_rows(dynamic_halves)),
        "tap and group axes exchanged": ("base", projection_rows(group_before_tap)),
        "taps reversed": ("base", taps_reversed),
        "coefficients shifted with the value": ("base", coefficients_shifted_with_the_value),
        "convolution wraps around the block": ("base", convolution_wraps),
        "finish omitted": ("base", finish_omitted),
        "rope interleaved": ("base", rope_interleaved),
        "block positions one too high": ("base", block_one_too_high),
        "window closed": ("base", window_closed),
        "no window": ("base", no_window),
        "norm by 1 + w": ("base", norm_by_one_plus_w),
        "final norm omitted": ("base", final_norm_omitted),
        "query heads mapped in turn": ("base", heads_mapped_in_turn),
        "taps in reverse order": ("base", taps_in_reverse_order),
        "selector predecessor fixed to the anchor": ("base", anchor_stays_predecessor),
        "codebooks swapped": ("base", codebooks_swapped),
        "selector reads the slot before": ("base", selector_reads_the_slot_before),
        "cap before multiplier": ("scaled", cap_before_multiplier),
    }
)


def test_all_faults_of_the_source_are_here() -> None:
    assert len(FAULTS) == 23


@pytest.mark.parametrize("variant", ["base", "scaled"])
def test_without_a_fault_the_comparison_passes(variant: str) -> None:
    assert replay(variant).agrees


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    variant, change = FAULTS[fault]
    with change():
        found = replay(variant)
    assert not found.agrees
    assert found.wrong or any(found.worst[kind] > 10 * limit for kind, limit in TOLERANCE.items())


def test_a_shift_of_all_positions_is_no_fault() -> None:
    def rotate(x, start, freqs, original=layers.rotate):
        return original(x, start + 1000, freqs)

    with everywhere("rotate", rotate):
        assert replay("base").agrees
