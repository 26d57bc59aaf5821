"""Each of the shim's detectors fires on a kernel that is wrong in that way, and stays silent on its correct twin."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import shim
from shim import Launch, Limits, PlainLaunch, StandIn, prepare, run

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
HEAD = "uint t = thread_index_in_threadgroup; "
LANE = HEAD + "uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup; "


def launch(source: str, *, threads: int = 64, group: int = 64, out: int = 64, kind: mx.Dtype = mx.float32,
           header: str = "", inputs: dict[str, mx.array] | None = None, init: float | None = None,
           atomic: bool = False, template: list[tuple[str, Any]] | None = None) -> Launch:
    if inputs is None:
        inputs = {"x": mx.arange(64).astype(mx.float32), "n": mx.array([3, 60, 0], mx.int32)}
    kernel = mx.fast.metal_kernel(name="example", input_names=list(inputs), output_names=["out"], source=source,
                                  header=header, atomic_outputs=atomic)
    return Launch(kernel, list(inputs.values()), [(out,)], [kind], (threads, 1, 1), (group, 1, 1), template or [], init)


def values(source: str, **options: Any) -> np.ndarray:
    return np.array(run(launch(source, **options)).outputs[0].astype(mx.float32))


@dataclass
class Pair:
    """A wrong kernel and a right one that differs as little as possible."""

    error: type[shim.ShimError]
    message: str
    wrong: str
    right: str
    options: dict[str, Any] = field(default_factory=dict)
    options_of_wrong: dict[str, Any] = field(default_factory=dict)


SHARE = HEAD + "threadgroup float tile[64]; tile[t] = x[t];"
PAIRS = {
    "load past a device buffer": Pair(
        shim.OutOfBounds, r"thread \(63, 0, 0\): load out of bounds: 4 bytes at index 64 of device input 'x' \(64 el",
        HEAD + "out[t] = x[t + 1];", HEAD + "out[t] = x[(t + 1) % 64];"),
    "load before a device buffer": Pair(
        shim.OutOfBounds, r"index -1 of device input 'x'",
        HEAD + "out[t] = x[int(t) - 1];", HEAD + "out[t] = x[max(int(t) - 1, 0)];"),
    "load far past a buffer": Pair(
        shim.OutOfBounds, r"index 500000000 of device input 'x'",
        HEAD + "out[t] = x[500000000 + 0 * t];", HEAD + "out[t] = x[t];"),
    "store past an output": Pair(
        shim.OutOfBounds, r"store out of bounds: 4 bytes at index 64 of device output 'out'",
        HEAD + "out[t] = 1; if (t == 7) out[t + 57] = 2;", HEAD + "out[t] = 1; if (t == 7) out[t] = 2;"),
    "load past a constant buffer": Pair(
        shim.OutOfBounds, r"index 3 of constant input 'n'",
        HEAD + "out[t] = n[n[0] + 0 * t];", HEAD + "out[t] = n[n[0] - 1];"),
    "vector load half outside": Pair(
        shim.OutOfBounds, r"16 bytes at index 62 of device input 'x'",
        HEAD + "float4 a = *(const device packed_float4*)(x + n[0] + 59); out[t] = dot(a, a);",
        HEAD + "float4 a = *(const device packed_float4*)(x + n[0] + 57); out[t] = dot(a, a);"),
    "index past a threadgroup array, through a pointer": Pair(
        shim.OutOfBounds, r"index 64 of threadgroup array 'tile' \(64 elements of 4 bytes\)",
        SHARE + "threadgroup float* p = tile;" + BARRIER + "out[t] = p[t + 1];",
        SHARE + "threadgroup float* p = tile;" + BARRIER + "out[t] = p[63 - t];"),
    "index past a threadgroup array": Pair(
        shim.OutOfBounds, r"index 64 out of bounds for an array of type 'float\[64\]'\n  line \d+: .*tile\[t \+ 1\]",
        SHARE + BARRIER + "out[t] = tile[t + 1];", SHARE + BARRIER + "out[t] = tile[63 - t];"),
    "index past a private array": Pair(
        shim.OutOfBounds, r"index 3 out of bounds for an array of type 'float\[3\]'",
        HEAD + "float a[3] = {1, 2, 3}; out[t] = a[n[0]];", HEAD + "float a[3] = {1, 2, 3}; out[t] = a[n[0] - 1];"),
    "store to an input": Pair(
        shim.StoreToInput, r"store to an input: 4 bytes at index 0 of device input 'x'",
        HEAD + "out[t] = 0; ((device float*)(uint64_t)x)[0] = 1;", HEAD + "out[t] = x[0];"),
    "misaligned vector load": Pair(
        shim.Misaligned, r"misaligned 'const float4'.*, not a multiple of 16 bytes: 16 bytes at index 3 of device input 'x'",
        HEAD + "float4 a = *(const device float4*)(x + n[0]); out[t] = a.w;",
        HEAD + "float4 a = *(const device packed_float4*)(x + n[0]), b = *(const device float4*)(x + n[1]); out[t] = a.w + b.w;"),
    "load of unwritten threadgroup memory": Pair(
        shim.Uninitialised, r"nobody has written: 4 bytes at index 0 of threadgroup array 'tile'",
        HEAD + "threadgroup float tile[64]; if (t > 0) tile[t] = x[t];" + BARRIER + "out[t] = tile[63 - t];",
        SHARE + BARRIER + "out[t] = tile[63 - t];"),
    "threadgroup memory of the group before": Pair(
        shim.Uninitialised, r"threadgroup \(1, 0, 0\).*nobody has written",
        HEAD + "threadgroup float tile[64]; if (threadgroup_position_in_grid.x == 0) tile[t] = x[t];" + BARRIER
        + "out[thread_position_in_grid.x] = tile[63 - t];",
        SHARE + BARRIER + "out[thread_position_in_grid.x] = tile[63 - t];",
        {"threads": 128, "out": 128}),
    "load of an unwritten output": Pair(
        shim.Uninitialised, r"nobody has written: 4 bytes at index 0 of device output 'out'",
        HEAD + "out[t] += 1;", HEAD + "out[t] = 1; out[t] += 1;"),
    "an output left unwritten": Pair(
        shim.Unwritten, r"left unwritten: 4 bytes at index 63 of device output 'out'",
        HEAD + "if (t < 63) out[t] = 1;", HEAD + "if (t < 64) out[t] = 1;"),
    "no barrier between store and load": Pair(
        shim.DataRace, r"load after a store by thread 31 with no barrier between: .*'tile'",
        SHARE + "if (t > 31) out[t] = tile[63 - t]; else out[t] = 0;",
        SHARE + BARRIER + "if (t > 31) out[t] = tile[63 - t]; else out[t] = 0;"),
    "no barrier between load and next store": Pair(
        shim.DataRace, r"data race: (store|load) after a (store|load) by thread \d+ with no barrier between: .*'tile'",
        SHARE + BARRIER + "float a = tile[63 - t]; tile[t] = a; out[t] = a;",
        SHARE + BARRIER + "float a = tile[63 - t]; " + BARRIER + " tile[t] = a; out[t] = a;"),
    "a barrier that orders other memory": Pair(
        shim.DataRace, r"load after a store by thread \d+",
        SHARE + "threadgroup_barrier(mem_flags::mem_device); out[t] = tile[t ^ 1];",
        SHARE + "threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup); out[t] = tile[t ^ 1];"),
    "a simdgroup barrier across simdgroups": Pair(
        shim.DataRace, r"load after a store by thread \d+ with",
        SHARE + "simdgroup_barrier(mem_flags::mem_threadgroup); out[t] = tile[t % 32];",
        SHARE + "simdgroup_barrier(mem_flags::mem_threadgroup); out[t] = tile[t ^ 31];"),
    "two threads store to one output": Pair(
        shim.DataRace, r"store after a store by thread 0 .*device output 'out'",
        HEAD + "out[t / 2] = 1;", HEAD + "if (t % 2 == 0) out[t / 2] = 1;", {"out": 32}),
    "two threadgroups store to one output": Pair(
        shim.DataRace, r"store after a store by another threadgroup",
        HEAD + "out[t] = 1;", HEAD + "out[thread_position_in_grid.x] = 1;", {"threads": 128, "out": 128},
        {"out": 64}),
    "a barrier that some threads return before": Pair(
        shim.DivergentBarrier, r"thread \(40, 0, 0\): returned, but threadgroup_barrier at line \d+ waits .* 40 of 64",
        HEAD + "out[t] = 0; if (t >= 40) return; " + BARRIER, HEAD + "out[t] = 0; " + BARRIER + " if (t >= 40) return;"),
    "two different barriers": Pair(
        shim.DivergentBarrier, r"while other threads wait at the one at line",
        HEAD + "out[t] = 0; if (t < 32) {\n" + BARRIER + "\n} else {\n" + BARRIER + "\n}",
        HEAD + "out[t] = 0; if (n[0] < 32) {\n" + BARRIER + "\n} else {\n" + BARRIER + "\n}"),
    "a simd operation some lanes skip": Pair(
        shim.DivergentSimd, r"simd_sum at line \d+ is reached by 20 of the 32 lanes of simdgroup 1",
        HEAD + "out[t] = 0; if (t < 52) out[t] = simd_sum(x[t]);", HEAD + "float s = simd_sum(x[t]); out[t] = s;"),
    "a simd loop of uneven length": Pair(
        shim.DivergentSimd, r"simd_max at line \d+ is reached by \d+ of the 32 lanes",
        LANE + "float m = 0; for (uint i = lane; i < 60; i += 32) m = simd_max(x[i]); out[t] = m;",
        LANE + "float m = 0; for (uint i = lane; i < 64; i += 32) m = simd_max(x[i]); out[t] = m;"),
    "two simd operations at once": Pair(
        shim.DivergentSimd, r"simd_min at line \d+, while other lanes of the simdgroup are at simd_max, line \d+",
        LANE + "if (lane < 9) out[t] = simd_max(x[t]); else out[t] = simd_min(x[t]);",
        LANE + "if (sg < 1) out[t] = simd_max(x[t]); else out[t] = simd_min(x[t]);"),
    "a simd operation against a barrier": Pair(
        shim.DivergentSimd, r"simd_sum at line \d+ is reached by 1 of the 32 lanes",
        LANE + "out[t] = 0; if (t == 5) simd_sum(x[t]); " + BARRIER,
        LANE + "out[t] = 0; simd_sum(x[t]); " + BARRIER),
    "a shuffle from a lane that does not exist": Pair(
        shim.BadLaunch, r"a lane that does not exist",
        HEAD + "out[t] = simd_shuffle(x[t], 32);", HEAD + "out[t] = simd_shuffle(x[t], 31);"),
    "too much threadgroup memory": Pair(
        shim.TooMuchThreadgroupMemory, r"32800 bytes of threadgroup memory with array 'b'; at most 32768",
        HEAD + "threadgroup float a[8191]; threadgroup char b[17]; a[t] = 1; b[t % 8 + t / 64] = 1; out[t] = a[t];",
        HEAD + "threadgroup float a[8188]; threadgroup char b[16]; a[t] = 1; if (!t) b[0] = 1; out[t] = a[t];"),
    "too many threads": Pair(
        shim.TooManyThreads, r"513 threads in a threadgroup, at most 512",
        "out[thread_position_in_grid.x] = 1;", "out[thread_position_in_grid.x] = 1;",
        {"threads": 512, "group": 512, "out": 512}, {"group": 513}),
    "integer division by zero": Pair(
        shim.UndefinedBehaviour, r"integer division by zero or overflow in 'int'",
        HEAD + "out[t] = 7 / n[2];", HEAD + "out[t] = 7 / n[0];"),
    "a shift too wide": Pair(
        shim.UndefinedBehaviour, r"shift of a 'int' by 60 bits",
        HEAD + "out[t] = 1 << n[1];", HEAD + "out[t] = 1 << n[0];"),
    "a null pointer": Pair(
        shim.WildPointer, r"null pointer",
        HEAD + "const device float* p = n[2] ? x : nullptr; out[t] = p[0];",
        HEAD + "const device float* p = n[0] ? x : nullptr; out[t] = p[0];"),
    "a wild pointer": Pair(
        shim.WildPointer, r"wild pointer or full stack",
        HEAD + "out[t] = x[0]; const device float* p = x + (size_t(n[0]) << 44); out[t] = p[0];",
        HEAD + "out[t] = x[0]; const device float* p = x + (size_t(n[2]) << 44); out[t] = p[0];"),
    "lane layout of a matrix": Pair(
        shim.LaneLayout, r"undocumented lane layout",
        LANE + "simdgroup_matrix<float, 8, 8> m; simdgroup_load(m, x); m.thread_elements() *= 2;"
        "simdgroup_store(m, out);",
        LANE + "simdgroup_matrix<float, 8, 8> m; simdgroup_load(m, x); simdgroup_store(m, out);",
        {"threads": 32, "group": 32}),
    "a matrix operation with different pointers": Pair(
        shim.BadLaunch, r"arguments of a simdgroup matrix operation differ",
        LANE + "simdgroup_matrix<float, 8, 8> m; simdgroup_load(m, x + lane % 2 * 0 + lane / 31); simdgroup_store(m, out);",
        LANE + "simdgroup_matrix<float, 8, 8> m; simdgroup_load(m, x + lane / 32); simdgroup_store(m, out);",
        {"threads": 32, "group": 32}),
    "a device pointer to threadgroup memory": Pair(
        shim.AddressSpaceError, r"example.*:\d+:\d+: error: .*const device float\* p = tile|address_space",
        SHARE + "const device float* p = tile;" + BARRIER + "out[t] = p[t];",
        SHARE + "const threadgroup float* p = tile;" + BARRIER + "out[t] = p[t];"),
    "a pointer without a qualifier": Pair(
        shim.AddressSpaceError, r"const float\* p = x",
        HEAD + "const float* p = x; out[t] = p[t];", HEAD + "const device float* p = x; out[t] = p[t];"),
    "a helper for the wrong memory": Pair(
        shim.AddressSpaceError, r"second\(n\)",
        HEAD + "out[t] = second(n);", HEAD + "out[t] = second(x);",
        {"header": "template <typename T> T second(const device T* p) { return p[1]; }\n"}),
    "a private variable nobody has set": Pair(
        shim.CompileError, r"variable 'a' is uninitialized",
        HEAD + "float a; out[t] = a;", HEAD + "float a = 1; out[t] = a;"),
    "a store through constant": Pair(
        shim.CompileError, r"read-only|const",
        HEAD + "constant int* p = n; p[0] = 1; out[t] = 0;", HEAD + "constant int* p = n; out[t] = p[0];"),
    "a float kept as bfloat by accident": Pair(
        shim.CompileError, r"no viable|assigning to|no known conversion",
        HEAD + "out[t] = x[t] * 2;", HEAD + "out[t] = bfloat(x[t] * 2);", {"kind": mx.bfloat16}),
    "minimum of two types": Pair(
        shim.CompileError, r"no matching function for call to 'min'",
        HEAD + "out[t] = min(t, 3);", HEAD + "out[t] = min(t, 3u);"),
    "plain access to an atomic": Pair(
        shim.CompileError, r"atomic<float>",
        HEAD + "out[t] = x[t];",
        HEAD + "atomic_fetch_add_explicit(&out[0], x[t], memory_order_relaxed);",
        {"atomic": True, "init": 0.0, "out": 1}),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compiling = [pair for pair in PAIRS.values() if not issubclass(pair.error, shim.CompileError)]
    prepare([launch(pair.right, **pair.options) for pair in PAIRS.values()])
    prepare([launch(pair.wrong, **pair.options | pair.options_of_wrong) for pair in compiling])


@pytest.mark.parametrize("name", PAIRS)
def test_detector(name: str) -> None:
    pair = PAIRS[name]
    run(launch(pair.right, **pair.options))
    with pytest.raises(pair.error, match=pair.message) as caught:
        run(launch(pair.wrong, **pair.options | pair.options_of_wrong))
    assert "example" in str(caught.value)  # the kernel is named


def test_endless_loop() -> None:
    source = HEAD + "volatile int i = 0; while (i < n[0]) { i = 0; } out[t] = i;"
    with pytest.raises(shim.TooLong, match="after 1 seconds"):
        run(launch(source), limits=Limits(seconds=1))


def test_messages_show_the_line() -> None:
    with pytest.raises(shim.OutOfBounds, match=r"\n  line \d+: s \+= x\[t \+ j\];"):
        run(launch(HEAD + "float s = 0;\nfor (int j = 0; j < 3; j++) {\n  s += x[t + j];\n}\nout[t] = s;"))


def test_full_stack() -> None:
    header = "int deep(int n) { volatile int a[4096]; a[n % 7] = n; return n ? deep(n + 1) + a[0] : 0; }\n"
    with pytest.raises(shim.WildPointer):
        run(launch(HEAD + "out[t] = deep(n[0]);", header=header))


def test_may_stay_unwritten_and_limits() -> None:
    result = run(launch(HEAD + "if (t < 3) out[t] = 1;"), may_stay_unwritten=["out"])
    assert result.outputs[0].tolist()[:3] == [1, 1, 1]
    assert mx.isnan(result.outputs[0][3:]).all()
    run(launch("out[thread_position_in_grid.x] = 1;", threads=1024, group=1024, out=1024), limits=Limits(threads=1024))
    matrix = "simdgroup_matrix<float, 8, 8> m; simdgroup_load(m, x); m.thread_elements() *= 2; simdgroup_store(m, out);"
    doubled = run(launch(matrix, threads=32, group=32), limits=Limits(lane_layout=True)).outputs[0]
    assert doubled.tolist() == (2 * mx.arange(64)).tolist()


def test_traffic_is_counted() -> None:
    source = LANE + """
        threadgroup float tile[4];
        float4 a = *(const device packed_float4*)(x + 4 * (lane % 8));      // 32 floats, each lane 16 bytes
        if (t < 4) { tile[t] = x[60 + t]; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = a.x + tile[t % 4];
    """
    report = run(launch(source, threads=128, out=128)).report
    x = report.buffers["x"]
    assert (x.loaded, x.distinct_loaded, x.loaded_per_threadgroup) == (128 * 16 + 2 * 4 * 4, 144, 2 * 144)
    out = report.buffers["out"]
    assert (out.stored, out.distinct_stored, out.loaded) == (512, 512, 0)
    assert (report.threadgroups, report.threads, report.threadgroup_bytes) == (2, 128, 16)
    assert (report.threadgroup_loaded, report.threadgroup_stored) == (512, 32)
    assert report.total("stored") == 512


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
            output_dtypes=[kind, mx.int32], grid=(24, 1, 1), threadgroup=(24, 1, 1), template=[("T", kind), ("OFFSET", 3)],
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
        out[12] = sizeof(packed_float3) + sizeof(float3) + sizeof(bfloat4) + alignof(packed_half4); out[13] = TABLE[n[0]];
        out[14] = rint(2.5f) + round(2.5f) * 10; out[15] = float(bfloat(1.0f) + bfloat(0.001953125f));
        char4 packed = *(const device char4*)z; out[16] = packed.x + packed.w; out[17] = popcount(255u) + abs(-3);
        out[18] = dot(float3(1, 2, 3), float3(4, 5, 6)); out[19] = metal::max(1.5h, 2.5h);
        #pragma unroll
        for (int i = 20; i < 64; i++) { out[i] = i; }
    """
    inputs = {"y": mx.arange(16).astype(mx.float16), "z": mx.array([-5, 1, 2, 7] * 4, mx.int8), "n": mx.array([2])}
    header = "constant constexpr float TABLE[3] = {0.5f, 1.5f, 2.5f};\nMETAL_FUNC int unused(thread int* p) { return *p; }\n"
    out = values(checks, threads=1, group=1, inputs=inputs, header=header)
    expected = [2.5, 14, 3.5, 5, 1, 2, 5, 7, 2, 8, 1, 1, 12 + 16 + 8 + 2, 2.5, 32, 1, 2, 11, 32, 2.5]
    assert out[:20].tolist() == expected


def test_atomics_do_not_race() -> None:
    source = HEAD + "atomic_fetch_add_explicit(&out[t % 4], x[t], memory_order_relaxed);"
    out = values(source, threads=256, out=4, atomic=True, init=0.0)
    assert out.tolist() == (4 * np.arange(64).reshape(16, 4).sum(0)).tolist()


def test_threadgroup_declarations() -> None:
    """Several in one statement, several dimensions, types with arguments; pointers and parameters stay what they are."""
    header = "template <int N> struct Row { float v[N]; };\nfloat sum(threadgroup float* a, threadgroup const Row<2>& r) {"
    header += " return a[0] + r.v[1]; } // threadgroup float no[3];\n"
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
                      constant float& bias [[buffer(5)]], device const float* extra [[buffer(6), function_constant(twice)]],
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


def test_refused_source() -> None:
    with pytest.raises(shim.BadLaunch, match=r"line 1: a threadgroup variable outside of a kernel function"):
        run(launch("out[0] = 1;", header="void f() { threadgroup float a[4]; a[0] = 1; }\n"))
    with pytest.raises(shim.BadLaunch, match=r"C-style cast to a vector type"):
        run(launch("float4 a = (float4)1.0f; out[0] = a.x;"))
    text = "[[kernel, max_total_threads_per_threadgroup(32)]] void small(device int* x [[buffer(0)]]) { x[0] = 1; }"
    with pytest.raises(shim.TooManyThreads, match="at most 32"):
        run(PlainLaunch(text, "small", {0: shim.Output((1,), mx.int32)}, (33, 1, 1), (33, 1, 1)))
    run(PlainLaunch(text, "small", {0: shim.Output((1,), mx.int32)}, (1, 1, 1), (1, 1, 1)))
    text = "kernel void f(threadgroup int* x [[threadgroup(0)]]) {}"
    with pytest.raises(shim.BadLaunch, match=r"attribute 'threadgroup\(0\)' is not known"):
        run(PlainLaunch(text, "f", {}, (1, 1, 1), (1, 1, 1)))
    with pytest.raises(shim.BadLaunch, match="must be positive"):
        run(launch("out[0] = 1;", threads=0))


def test_half_rounds_after_each_operation() -> None:
    out = values(HEAD + "half a = half(x[t]) + 2048.0h; out[t] = a - 2048.0h;")
    expected = (np.arange(64).astype(np.float16) + np.float16(2048)) - np.float16(2048)
    assert np.array_equal(out, expected)


def test_one_bad_kernel_in_a_batch_is_named() -> None:
    good, bad = (launch(f"out[thread_position_in_grid.x] = {value};") for value in ("12345", "undeclared"))
    with pytest.raises(shim.CompileError, match="undeclared"):
        prepare([good, bad], jobs=1)
    assert run(good).outputs[0].tolist() == [12345] * 64
