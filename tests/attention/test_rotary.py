"""Rotation against MLX's own at small positions and against float64 at large ones; when which of the two is used."""

from __future__ import annotations

import io
import re
from typing import Any

import cache_positions
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope
from tiny import tiny_model

from mlx_spec.attention.rotary import EXACT_FROM, Rotary

HEAD_DIM = 16
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "rope_type": "longrope", "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8, "long_factor": [1.0 + i / 4 for i in range(8)],
    },
}
KINDS = [(kind, interleaved) for kind in SCALINGS for interleaved in (False, True)
         if not (interleaved and kind == "longrope")]  # mlx-lm's has no such form


def module_of(kind: str, interleaved: bool, head_dim: int = HEAD_DIM) -> Any:
    return initialize_rope(head_dim, cache_positions.THETA, interleaved, SCALINGS[kind], 4096)


def frequencies_of(kind: str, module: Any) -> tuple[np.ndarray, float]:
    """Radians per position and the length of what was 1, from what mlx-lm's module says."""
    if kind == "default":
        return cache_positions.default_frequencies(HEAD_DIM), 1.0
    if kind == "linear":
        return cache_positions.default_frequencies(HEAD_DIM) / 4, 1.0
    lengths = {"llama3": 1.0, "yarn": getattr(module, "mscale", 1.0), "longrope": getattr(module, "_scale", 1.0)}
    return 1 / np.array(module._freqs, np.float64), lengths[kind]


def plainly_rotated(x: mx.array, cosines: mx.array, sines: mx.array, interleaved: bool) -> mx.array:
    if interleaved:
        swapped = mx.unflatten(x, -1, (-1, 2))[..., ::-1].flatten(-2)
    else:
        half = x.shape[-1] // 2
        swapped = mx.concatenate([x[..., half:], x[..., :half]], axis=-1)
    return (x * cosines + swapped * sines).astype(x.dtype)


@pytest.mark.parametrize(("kind", "interleaved"), KINDS)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_both_ways_are_the_rope_at_small_positions(kind: str, interleaved: bool, rows: int, dtype: mx.Dtype) -> None:
    module = module_of(kind, interleaved)
    rotary = Rotary(module, HEAD_DIM)
    assert rotary.interleaved is interleaved
    x = mx.random.normal((1, 4, rows, HEAD_DIM), key=mx.random.key(0)).astype(dtype)
    tolerance = 2e-6 if dtype == mx.float32 else 0.03
    for offset in (0, 1, 63, 64, 1000):
        expected = module(x, offset=offset)
        for actual in (rotary.fused(x, offset), rotary.rows(offset + np.arange(rows)).rotate(x)):
            assert actual.dtype == dtype
            assert actual.shape == expected.shape
            difference = mx.abs(actual.astype(mx.float32) - expected.astype(mx.float32)).max()
            # A float32 angle near 1000 is itself off by 6e-5.
            assert difference.item() <= (tolerance + 6e-8 * offset) * mx.abs(expected).max().item()


@pytest.mark.parametrize(("kind", "interleaved"), KINDS)
def test_a_batch_is_the_rope_at_each_offset(kind: str, interleaved: bool) -> None:
    module = module_of(kind, interleaved)
    rotary = Rotary(module, HEAD_DIM)
    x = mx.random.normal((3, 2, 4, HEAD_DIM), key=mx.random.key(0))
    offsets = [0, 7, 300]
    rows = rotary.rows(np.array(offsets)[:, None] + np.arange(4))
    by_rows = plainly_rotated(x, rows.cosines[:, None], rows.sines[:, None], rows.interleaved)
    for index, offset in enumerate(offsets):
        expected = module(x[index : index + 1], offset=offset)
        for actual in (by_rows, rotary.fused(x, mx.array(offsets))):
            np.testing.assert_allclose(np.array(actual[index]), np.array(expected[0]), atol=3e-5, rtol=0)


@pytest.mark.parametrize(("kind", "interleaved"), KINDS)
@pytest.mark.parametrize("position", [EXACT_FROM, 60_000, 1_000_000])
def test_rows_are_exact_at_any_position(kind: str, interleaved: bool, position: int) -> None:
    module = module_of(kind, interleaved)
    frequencies, length = frequencies_of(kind, module)
    positions = position + np.array([5, 0, 1, 3])  # in any order
    x = np.random.default_rng(0).standard_normal((2, 4, HEAD_DIM)).astype(np.float32)
    expected = length * cache_positions.rotated(x.astype(np.float64), positions, frequencies, interleaved)
    actual = Rotary(module, HEAD_DIM).rows(positions).rotate(mx.array(x))
    np.testing.assert_allclose(np.array(actual), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_rows_rotate_as_plain_operations_do_whatever_was_compiled_before(interleaved: bool, dtype: mx.Dtype) -> None:
    for head_dim, batch, heads, n in ((64, 1, 4, 1), (128, 2, 3, 5), (64, 1, 1, 70)):
        rows = Rotary(module_of("default", interleaved, head_dim), head_dim).rows(100 + np.arange(n))
        x = mx.random.normal((batch, n, heads, head_dim), key=mx.random.key(n)).astype(dtype).swapaxes(1, 2)
        turned, expected = rows.rotate(x), plainly_rotated(x, rows.cosines, rows.sines, interleaved)
        assert (turned.shape, turned.dtype) == (x.shape, dtype)
        np.testing.assert_allclose(np.array(turned.astype(mx.float32)), np.array(expected.astype(mx.float32)),
                                   atol=1e-6 if dtype == mx.float32 else 0.03, rtol=0)  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_rotate_in_one_operation(interleaved: bool) -> None:
    """What is no view is a kernel, in every layer."""
    rows = Rotary(module_of("default", interleaved), HEAD_DIM).rows(np.arange(3))
    x = mx.zeros((1, 2, 3, HEAD_DIM))
    mx.eval(x, rows.rotate(x))
    graph = io.StringIO()
    mx.export_to_dot(graph, rows.rotate(x))
    operations = set(re.findall(r'label ="(\w+)", shape=rectangle', graph.getvalue()))
    assert len(operations - {"Unflatten", "Slice", "Flatten"}) == 1


def test_the_fused_kernel_is_not_exact_there() -> None:
    """Why there are rows at all."""
    x = mx.random.normal((1, 1, 1, 128), key=mx.random.key(0))
    rotary = Rotary(initialize_rope(128, 10000.0, False, None, 4096), 128)

    def difference(position: int) -> float:
        return mx.abs(rotary.fused(x, position) - rotary.rows(np.array([position])).rotate(x)).max().item()

    assert difference(1000) < 1e-3
    assert difference(1_000_000) > 0.01


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [2, 64, 80, 96, 128, 256])
def test_pairs_keep_their_length_and_only_differences_count(interleaved: bool, head_dim: int) -> None:
    rotary = Rotary(module_of("default", interleaved, head_dim), head_dim)
    x = mx.random.normal((1, head_dim), key=mx.random.key(1))
    y = mx.random.normal((1, head_dim), key=mx.random.key(2))

    def at(vector: mx.array, position: int) -> np.ndarray:
        return np.array(rotary.rows(np.array([position])).rotate(vector)[0], np.float64)

    near = at(x, 7) @ at(y, 3)
    for shift in (1000, 50_000, 3_000_000):
        assert at(x, shift + 7) @ at(y, shift + 3) == pytest.approx(near, abs=3e-5)
    turned, before = at(x, 12345), np.array(x[0], np.float64)
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + head_dim // 2) for i in range(head_dim // 2)]
    for one, two in pairs:
        assert np.hypot(turned[one], turned[two]) == pytest.approx(np.hypot(before[one], before[two]), rel=1e-6)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(("length", "exact"), [
    (0, False), (EXACT_FROM - 4, False), (EXACT_FROM - 3, True), (EXACT_FROM, True),
])
def test_the_fused_kernel_is_for_small_positions_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool, length: int, exact: bool
) -> None:
    model = tiny_model(0)
    context = model.new_context()
    context.table.append(length)  # zeros, which no one reads the logits of
    calls: list[int] = []
    fused = Rotary.fused

    def counted(self: Rotary, x: mx.array, offset: int | mx.array) -> mx.array:
        calls.append(int(offset))
        return fused(self, x, offset)

    monkeypatch.setattr(Rotary, "fused", counted)
    if on_gpu:
        monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    context.extend([1, 2, 3, 4], rows=0)
    assert calls == ([length] * 4 if on_gpu and not exact else [])  # queries and keys of two layers


@pytest.mark.parametrize("options", [{"int8": True}, {"window": 65}])
def test_int8_is_always_exact_and_so_is_what_a_window_hides(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    model = tiny_model(0)
    if "int8" in options:
        model = type(model)(model.module, int8=True)
    context = model.new_context(0, options.get("window"))
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(Rotary, "fused", None)
    if "window" in options:
        context.table.append(66)
    context.extend([1, 2, 3, 4], rows=0)
