"""The shim against MLX: the attention kernels in MLX's own wheel, run here, give what MLX's CPU backend gives."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from shim import Limits, Output, PlainLaunch, Result, StandIn, prepare, run
from shim.source import flatten

INCLUDE = Path(mx.__file__).parent / "include"
KERNELS = INCLUDE / "mlx/backend/metal/kernels"
NAMES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat16_t"}
TOLERANCE = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 2e-2}
BLOCKS = 32  # MLX's second pass reads the blocks of 32 lanes

pytestmark = pytest.mark.skipif(not (KERNELS / "sdpa_vector.h").is_file(), reason="MLX came without its Metal headers")


def text() -> str:
    return flatten(KERNELS / "sdpa_vector.h", [INCLUDE])


def tensors(kind: mx.Dtype, heads: int, kv_heads: int, rows: int, keys: int, size: int) -> tuple[mx.array, ...]:
    rng = np.random.default_rng(keys + size)
    shapes = [(1, heads, rows, size), (1, kv_heads, keys, size), (1, kv_heads, keys, size)]
    return tuple(mx.array(rng.standard_normal(shape).astype(np.float32)).astype(kind) for shape in shapes)


def constants(*, causal: bool = False, mask: bool = False, sinks: bool = False) -> dict[int, object]:
    return {20: mask, 21: False, 22: causal, 23: mask, 24: False, 25: sinks, 26: BLOCKS}


def one_pass(q: mx.array, k: mx.array, v: mx.array, *, causal: bool, mask: mx.array | None = None,
             sinks: mx.array | None = None) -> PlainLaunch:
    _, heads, rows, size = q.shape
    keys, strides = k.shape[2], mx.array(k.shape[2] * size, mx.uint64)
    step = mx.array(size, mx.uint64)
    buffers: dict[int, mx.array | Output] = {
        0: q, 1: k, 2: v, 3: Output(q.shape, q.dtype), 4: mx.array(heads // k.shape[1], mx.int32),
        5: mx.array(keys, mx.int32), 6: strides, 7: step, 8: strides, 9: step, 10: mx.array(size**-0.5),
    }  # fmt: skip
    if mask is not None:  # (rows, keys), the same for all heads
        buffers |= {11: mask, 13: mx.array(1, mx.int32), 14: mx.array(keys, mx.int32), 15: mx.array(0, mx.int32)}
    if sinks is not None:
        buffers |= {16: sinks, 17: mx.array(heads, mx.int32)}
    return PlainLaunch(text(), f"sdpa_vector<{NAMES[q.dtype]}, {size}, {size}>", buffers, (heads * 1024, rows, 1),
                       (1024, 1, 1), constants(causal=causal, mask=mask is not None, sinks=sinks is not None))


def first_of_two(q: mx.array, k: mx.array, v: mx.array, *, causal: bool) -> PlainLaunch:
    _, heads, rows, size = q.shape
    kv_heads, keys = k.shape[1:3]
    strides, step, partial = mx.array(keys * size, mx.uint64), mx.array(size, mx.uint64), (heads, rows, BLOCKS)
    buffers = {
        0: q, 1: k, 2: v, 3: Output((*partial, size), q.dtype), 4: Output(partial, mx.float32),
        5: Output(partial, mx.float32), 7: mx.array(keys, mx.int32), 8: strides, 9: step, 10: strides, 11: step,
        12: mx.array(size**-0.5),
    }  # fmt: skip
    group = (32, heads // kv_heads, rows)
    return PlainLaunch(text(), f"sdpa_vector_2pass_1<{NAMES[q.dtype]}, {size}, {size}>", buffers,
                       (kv_heads * group[0], group[1], BLOCKS * group[2]), group, constants(causal=causal))


def second_of_two(first: Result, q: mx.array) -> PlainLaunch:
    _, heads, rows, size = q.shape
    buffers = dict(enumerate([*first.outputs, Output(q.shape, q.dtype), mx.array(BLOCKS, mx.int32)]))
    return PlainLaunch(text(), f"sdpa_vector_2pass_2<{NAMES[q.dtype]}, {size}>", buffers, (heads * 1024, rows, 1),
                       (1024, 1, 1), constants())


def reference(q: mx.array, k: mx.array, v: mx.array, **options: object) -> np.ndarray:
    wide = [x.astype(mx.float32) for x in (q, k, v)]
    return np.array(mx.fast.scaled_dot_product_attention(*wide, scale=q.shape[-1] ** -0.5, **options))


def difference(result: Result, expected: np.ndarray) -> float:
    return float(np.abs(np.array(result.outputs[0].astype(mx.float32)) - expected).max())


CASES = [
    (mx.float32, 64, 8, 8, 1, 97, False),
    (mx.float16, 64, 8, 1, 4, 70, True),
    (mx.bfloat16, 128, 8, 2, 1, 45, False),
    (mx.float32, 128, 4, 1, 5, 33, True),
    (mx.float32, 256, 2, 2, 1, 40, False),
]
BIG = Limits(threads=1024)  # these kernels use all that Metal allows


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    launches = []
    for kind, size, heads, kv_heads, rows, keys, causal in CASES:
        q, k, v = tensors(kind, heads, kv_heads, rows, keys, size)
        launches += [one_pass(q, k, v, causal=causal), first_of_two(q, k, v, causal=causal)]
    prepare(launches)


@pytest.mark.parametrize(("kind", "size", "heads", "kv_heads", "rows", "keys", "causal"), CASES)
def test_one_pass(kind: mx.Dtype, size: int, heads: int, kv_heads: int, rows: int, keys: int, causal: bool) -> None:
    q, k, v = tensors(kind, heads, kv_heads, rows, keys, size)
    result = run(one_pass(q, k, v, causal=causal), limits=BIG)
    expected = reference(q, k, v, mask="causal" if causal else None)
    assert difference(result, expected) < TOLERANCE[kind] * np.abs(expected).max()
    # Every key is used by every query head, and each query head is a threadgroup.
    seen = result.report.buffers["keys"]
    if not causal:
        assert seen.loaded_per_threadgroup == heads * rows * keys * size * kind.size
    assert seen.distinct_loaded == k.nbytes


@pytest.mark.parametrize(("kind", "size", "heads", "kv_heads", "rows", "keys", "causal"), CASES)
def test_two_passes(kind: mx.Dtype, size: int, heads: int, kv_heads: int, rows: int, keys: int, causal: bool) -> None:
    q, k, v = tensors(kind, heads, kv_heads, rows, keys, size)
    first = run(first_of_two(q, k, v, causal=causal), limits=BIG)
    result = run(second_of_two(first, q), limits=BIG)
    expected = reference(q, k, v, mask="causal" if causal else None)
    assert difference(result, expected) < TOLERANCE[kind] * np.abs(expected).max()


def test_two_passes_sharing_keys_between_heads() -> None:
    q, k, v = tensors(mx.float32, 16, 2, 1, 150, 64)
    plain = first_of_two(q, k, v, causal=False)
    arguments = {number: argument for number, argument in plain.arguments.items() if number <= 12}
    launch = PlainLaunch(text(), "sdpa_vector_2pass_1_gqa<float, 64, 64, 8, 4>", arguments, (2 * 32, 8, BLOCKS),
                         (32, 8, 1), constants())
    first = run(launch, limits=BIG)
    expected = reference(q, k, v)
    assert difference(run(second_of_two(first, q), limits=BIG), expected) < 2e-6 * np.abs(expected).max()
    # The point of this kernel: two simdgroups of eight heads read each key, not eight.
    assert first.report.buffers["keys"].loaded == 2 * k.nbytes


def test_mask_and_sinks() -> None:
    q, k, v = tensors(mx.float32, 4, 2, 3, 50, 64)
    mask = mx.array(np.random.default_rng(1).random((3, 50)) < 0.7)
    result = run(one_pass(q, k, v, causal=False, mask=mask), limits=BIG)
    expected = reference(q, k, v, mask=mask)
    assert difference(result, expected) < 2e-6 * np.abs(expected).max()
    sinks = mx.array([0.5, -1.0, 2.0, 0.0])
    result = run(one_pass(q, k, v, causal=False, sinks=sinks), limits=BIG)
    expected = reference(q, k, v, sinks=sinks)
    assert difference(result, expected) < 2e-6 * np.abs(expected).max()


def test_limits_are_those_of_mlx() -> None:
    source = (KERNELS / "utils.h").read_text()
    start, end = source.index("template <typename U>\nstruct Limits"), source.index("struct Limits<complex_t<T>>")
    theirs = re.sub(r"\bLimits\b", "TheirLimits", source[start : source.rindex("template", start, end)])
    kernel = mx.fast.metal_kernel(
        name="limits", input_names=["x"], output_names=["out"], header=theirs, source="""
        out[0] = Limits<T>::max; out[1] = TheirLimits<T>::max; out[2] = Limits<T>::min; out[3] = TheirLimits<T>::min;
        out[4] = Limits<T>::finite_max; out[5] = TheirLimits<T>::finite_max;
        out[6] = Limits<T>::finite_min; out[7] = TheirLimits<T>::finite_min;
        """)  # fmt: skip
    for kind in (mx.float32, mx.float16, mx.bfloat16, mx.int8, mx.uint16, mx.int32):
        (out,) = StandIn(kernel)(
            inputs=[mx.zeros((1,))], output_shapes=[(8,)], output_dtypes=[kind], grid=(1, 1, 1), threadgroup=(1, 1, 1),
            template=[("T", kind)],
        )  # fmt: skip
        assert out[0::2].tolist() == out[1::2].tolist()
