"""What the shim makes of Metal: what MLX injects, operations across lanes, matrices, numbers, declarations."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from metal_examples import HEAD, LANE, launch, values

import shim
from shim import PlainLaunch, StandIn, prepare, run


def test_attributes() -> None:
    kernel = mx.fast.metal_kernel(name="where", input_names=["x"], output_names=["out"], source="""
        uint3 p = thread_position_in_grid, g = threads_per_grid;
        uint i = (p.z * g.y + p.y) * g.x + p.x;
        uint3 s = threads_per_threadgroup, q = thread_position_in_threadgroup, b = threadgroup_position_in_grid;
        uint3 full = dispatch_threads_per_threadgroup;
        bool ok = all(b * full + q == p) && thread_index_in_threadgroup == (q.z * s.y + q.y) * s.x + q.x;
        ok = ok && simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup == thread_index_in_threadgroup;
        ok = ok && threads_per_simdgroup == 32 && all(threadgroups_per_grid == uint3(3, 2, 1));
        out[i] = ok ? int(s.x * s.y * s.z) : -1;
    """)  # fmt: skip
    (out,) = StandIn(kernel)(
        inputs=[mx.zeros((1,))], output_shapes=[(2, 7, 20)], output_dtypes=[mx.int32], grid=(20, 7, 2),
        threadgroup=(8, 4, 2),
    )  # fmt: skip
    sizes = np.array(out)
    assert sizes.min() > 0
    assert sizes[0, 0, 0] == 64  # the last group of each axis is smaller
    assert sizes[1, 6, 19] == 4 * 3 * 2


def test_what_mlx_injects() -> None:
    kernel = mx.fast.metal_kernel(
        name="inject", input_names=["a", "scale", "flag"], output_names=["out", "info"], header="#define TWICE 2\n",
        source="""
        uint i = thread_position_in_grid.x;
        out[i] = T(a[elem_to_loc(i, a_shape, a_strides, a_ndim)] * scale * TWICE) + T(OFFSET);
        if (i == 0) { info[0] = a_shape[0]; info[1] = a_strides[0]; info[2] = a_ndim; info[3] = flag[2]; }
        """)  # fmt: skip
    a = mx.arange(24).astype(mx.float32).reshape(4, 6)
    for kind in (mx.float32, mx.float16, mx.bfloat16):
        out, info = StandIn(kernel)(
            inputs=[a.T, mx.array(0.5), mx.array([False, False, True])], output_shapes=[(24,), (4,)],
            output_dtypes=[kind, mx.int32], grid=(24, 1, 1), threadgroup=(24, 1, 1),
            template=[("T", kind), ("OFFSET", 3)],
        )  # fmt: skip
        assert out.tolist() == (np.array(a.T).reshape(-1) + 3).tolist()
        assert info.tolist() == [6, 4, 2, 1]


def test_simd_operations() -> None:
    x = np.arange(64, dtype=np.float32).reshape(2, 32)
    lane = np.arange(32)
    expected = {
        "simd_sum(x[t])": x.sum(1, keepdims=True) + 0 * x,
        "simd_max(-x[t])": (-x).max(1, keepdims=True) + 0 * x,
        "simd_min(int(t))": x.min(1, keepdims=True) + 0 * x,
        "simd_product(x[t] > 60 ? 2.0h : 1.0h)": np.repeat([[1], [8]], 32, 1),
        "simd_shuffle(x[t], (lane * 5) % 32)": x[:, lane * 5 % 32],
        "simd_shuffle_xor(x[t], 5)": x[:, lane ^ 5],
        "simd_shuffle_down(x[t], 3)": x[:, np.where(lane + 3 < 32, lane + 3, lane)],
        "simd_shuffle_up(x[t], 3)": x[:, np.where(lane >= 3, lane - 3, lane)],
        "simd_shuffle_rotate_down(x[t], 3)": x[:, (lane + 3) % 32],
        "simd_broadcast(x[t], 7)": x[:, [7] * 32],
        "simd_broadcast_first(x[t])": x[:, [0] * 32],
        "simd_prefix_inclusive_sum(x[t])": np.cumsum(x, 1),
        "simd_prefix_exclusive_sum(x[t])": np.cumsum(x, 1) - x,
        "simd_any(x[t] == 40)": np.repeat([[0], [1]], 32, 1),
        "simd_all(x[t] < 32)": np.repeat([[1], [0]], 32, 1),
        "simd_or(t & 32)": np.repeat([[0], [32]], 32, 1),
        "dot(simd_sum(float2(x[t], 1)), float2(1, 1000))": x.sum(1, keepdims=True) + 32000 + 0 * x,
    }
    launches = {source: launch(LANE + f"out[t] = {source};") for source in expected}
    prepare(list(launches.values()))
    for source, call in launches.items():
        assert np.array_equal(np.array(run(call).outputs[0]).reshape(2, 32), expected[source]), source


def test_a_simdgroup_may_be_smaller_at_the_end() -> None:
    out = values(HEAD + "out[t] = simd_sum(x[t] * 0 + 1) + simd_all(true);", threads=40, group=40, out=40)
    assert out.tolist() == [33] * 32 + [9] * 8


@pytest.mark.parametrize("kind", [mx.float32, mx.float16, mx.bfloat16])
def test_matrices(kind: mx.Dtype) -> None:
    rng = np.random.default_rng(0)
    a, b = (mx.array(rng.integers(-4, 5, (8, 8)).astype(np.float32)).astype(kind) for _ in range(2))
    source = """
        threadgroup T tile[64];
        simdgroup_matrix<T, 8, 8> ma, mb;
        simdgroup_load(ma, a, 8);
        simdgroup_load(mb, b, 8, ulong2(0, 0), true);
        simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
        simdgroup_multiply_accumulate(c, ma, mb, c);
        simdgroup_store(c, out, 8);
        simdgroup_store(ma, tile, 8);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_load(ma, tile, 8, ulong2(0, 0), true);
        simdgroup_multiply(c, ma, mb);
        simdgroup_store(c, out + 64, 8);
    """
    call = launch(source, threads=32, group=32, out=128, inputs={"a": a, "b": b}, template=[("T", kind)])
    result = run(call)
    out = np.array(result.outputs[0]).reshape(2, 8, 8)
    first, second = (np.array(m.astype(mx.float32)) for m in (a, b))
    assert np.array_equal(out[0], first @ second.T + 1)
    assert np.array_equal(out[1], first.T @ second.T)
    assert result.report.buffers["a"].loaded == a.nbytes


def test_numbers() -> None:
    """Rounding, limits, conversions; the values are those of IEEE arithmetic and of MLX."""
    rng = np.random.default_rng(0)
    x = mx.array(np.concatenate([rng.standard_normal(60), [np.inf, -np.inf, np.nan, 1e-40]]).astype(np.float32))
    for kind in (mx.float16, mx.bfloat16):
        out = run(launch(HEAD + "out[t] = T(x[t]);", kind=kind, inputs={"x": x}, template=[("T", kind)])).outputs[0]
        assert mx.array_equal(out, x.astype(kind), equal_nan=True)
    checks = """
        half4 h = half4(1, 2, 3, 4); char4 c = char4(h); float4 f = float4(c) * 0.5f; short2 s = short2(c.xw);
        vec<float, 2> v = vec<float, 2>(f.zw);
        const device packed_half4* p = (const device packed_half4*)(y + 1); half4 q = half4(*p);
        out[0] = f.x + f.w; out[1] = s.x * 10 + s.y; out[2] = v.x + v.y; out[3] = float(q.x) + float(q.w);
        out[4] = as_type<uint>(1.0f) == 0x3f800000u; out[5] = select(1.0f, 2.0f, true); out[6] = clamp(7, 1, 5);
        out[7] = fma(2.0f, 3.0f, 1.0f); out[8] = rsqrt(0.25f); out[9] = fast::exp2(3.0f); out[10] = precise::exp(0.0f);
        out[11] = isinf(-INFINITY) && numeric_limits<half>::max() == 65504.0h && HUGE_VALF > FLT_MAX;
        out[12] = sizeof(packed_float3) + sizeof(float3) + sizeof(bfloat4) + alignof(packed_half4);
        out[13] = TABLE[n[0]];
        out[14] = rint(2.5f) + round(2.5f) * 10; out[15] = float(bfloat(1.0f) + bfloat(0.001953125f));
        char4 packed = *(const device char4*)z; out[16] = packed.x + packed.w; out[17] = popcount(255u) + abs(-3);
        out[18] = dot(float3(1, 2, 3), float3(4, 5, 6)); out[19] = metal::max(1.5h, 2.5h);
        #pragma unroll
        for (int i = 20; i < 64; i++) { out[i] = i; }
    """
    inputs = {"y": mx.arange(16).astype(mx.float16), "z": mx.array([-5, 1, 2, 7] * 4, mx.int8), "n": mx.array([2])}
    header = "constant constexpr float TABLE[3] = {0.5f, 1.5f, 2.5f};\n"
    header += "METAL_FUNC int unused(thread int* p) { return *p; }\n"
    out = values(checks, threads=1, group=1, inputs=inputs, header=header)
    expected = [2.5, 14, 3.5, 5, 1, 2, 5, 7, 2, 8, 1, 1, 12 + 16 + 8 + 2, 2.5, 32, 1, 2, 11, 32, 2.5]
    assert out[:20].tolist() == expected


def test_atomics_do_not_race() -> None:
    source = HEAD + "atomic_fetch_add_explicit(&out[t % 4], x[t], memory_order_relaxed);"
    out = values(source, threads=256, out=4, atomic=True, init=0.0)
    assert out.tolist() == (4 * np.arange(64).reshape(16, 4).sum(0)).tolist()


def test_threadgroup_declarations() -> None:
    """Several in one statement, several dimensions, types with arguments; pointers and parameters stay as they are."""
    header = """
        template <int N> struct Row { float v[N]; };
        float sum(threadgroup float* a, threadgroup const Row<2>& r) { return a[0] + r.v[1]; }
        // threadgroup float none[3];
    """
    source = HEAD + """
        threadgroup float a[2][32], b[64]; threadgroup Row<2> rows[64];   /* threadgroup float none[4]; */
        threadgroup float* p = &a[t / 32][t % 32];
        *p = x[t]; b[t] = 1; rows[t].v[0] = 0; rows[t].v[1] = x[t];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[t] = sum(p, rows[63 - t]) + b[t ^ 1];
    """
    result = run(launch(source, header=header))
    assert result.outputs[0].tolist() == [64] * 64
    assert result.report.threadgroup_bytes == 256 + 256 + 512


def test_plain_kernel_with_function_constants() -> None:
    text = """
    constant bool twice [[function_constant(0)]];
    constant int step [[function_constant(1)]];
    kernel void plain(device const float* x [[buffer(0)]], device float* y [[buffer(2)]],
                      constant float& bias [[buffer(5)]],
                      device const float* extra [[buffer(6), function_constant(twice)]],
                      uint i [[thread_position_in_grid]]) {
      y[i] = x[i] * step + bias;
      if (twice) { y[i] += extra[i]; }
    }
    """
    arguments: dict[int, Any] = {0: mx.arange(4).astype(mx.float32), 2: shim.Output((4,), mx.float32), 5: mx.array(0.5)}
    call = PlainLaunch(text, "plain", arguments, (4, 1, 1), (4, 1, 1), {0: False, 1: 3})
    assert run(call).outputs[0].tolist() == [0.5, 3.5, 6.5, 9.5]
    call = PlainLaunch(text, "plain", arguments, (4, 1, 1), (4, 1, 1), {0: True, 1: 3})
    with pytest.raises(shim.OutOfBounds, match=r"extra \(not given\)"):
        run(call)
    with pytest.raises(shim.BadLaunch, match=r"function constant 1 \(step\) has no value"):
        run(PlainLaunch(text, "plain", arguments, (4, 1, 1), (4, 1, 1), {0: False}))


def test_half_rounds_after_each_operation() -> None:
    out = values(HEAD + "half a = half(x[t]) + 2048.0h; out[t] = a - 2048.0h;")
    expected = (np.arange(64).astype(np.float16) + np.float16(2048)) - np.float16(2048)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("kind", [mx.float32, mx.float16, mx.bfloat16, mx.int8])
def test_vectors_of_a_template_type(kind: mx.Dtype) -> None:
    x = mx.arange(64).astype(kind)
    source = HEAD + """
        float4 a = float4(*(const device vec<T, 4>*)(x + 4 * t));
        const device vec<T, 2>* pairs = (const device vec<T, 2>*)x;
        float2 b = float2(pairs[t]);
        T c = x[t];
        c += T(1);
        *(device vec<T, 4>*)(out + 4 * t) = vec<T, 4>(a.wzy, T(float(c) + b.x + b.y));
    """
    call = launch(source, threads=16, group=16, kind=kind, inputs={"x": x}, template=[("T", kind)])
    result = run(call)
    rows, n = np.arange(64).reshape(16, 4), np.arange(16)
    expected = np.stack([rows[:, 3], rows[:, 2], rows[:, 1], n + 1 + 4 * n + 1], 1)
    assert np.array_equal(np.array(result.outputs[0].astype(mx.float32)).reshape(16, 4), expected)
    assert result.report.buffers["x"].loaded == x.nbytes + x.nbytes // 2 + x.nbytes // 4
    assert result.report.buffers["out"].stored == x.nbytes


def test_contiguity() -> None:
    kernel = mx.fast.metal_kernel(name="whole", input_names=["x"], output_names=["out"], ensure_row_contiguous=False,
                                  source=HEAD + "out[t] = x[t] + x_strides[0];")  # fmt: skip
    x = mx.arange(16).astype(mx.float32).reshape(4, 4)
    arguments: tuple[Any, ...] = ([(16,)], [mx.float32], (16, 1, 1), (16, 1, 1))
    call = shim.Launch(kernel, [x], *arguments, ensure_row_contiguous=False)
    assert run(call).outputs[0].tolist() == list(range(4, 20))
    with pytest.raises(shim.BadLaunch, match="not contiguous"):
        run(shim.Launch(kernel, [x.T], *arguments, ensure_row_contiguous=False))
