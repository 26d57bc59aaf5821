"""Each of the shim's detectors fires on a kernel that is wrong in that way, and stays silent on its correct twin."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from metal_examples import BARRIER, HEAD, LANE, launch

import shim
from shim import Limits, PlainLaunch, prepare, run


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
MATRIX = (
    LANE + "threadgroup float tile[64]; tile[lane] = 1; tile[lane + 32] = 1;" + BARRIER + "simdgroup_float8x8 m;"
)
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
        HEAD + "out[t] = (*(const device packed_float4*)(x + n[0] + 59)).x;",
        HEAD + "out[t] = (*(const device packed_float4*)(x + n[0] + 57)).x;"),
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
        shim.Misaligned, r"misaligned 'const float4'.*, not a multiple of 16 bytes: 16 bytes at index 3 of device in",
        HEAD + "float4 a = *(const device float4*)(x + n[0]); out[t] = a.w;",
        HEAD + "float4 a = *(const device packed_float4*)(x + n[0]); out[t] = a.w;"),
    "misaligned load of one vector element": Pair(
        shim.Misaligned, r"not a multiple of 16 bytes: 16 bytes at index 3 of device input 'x'",
        HEAD + "out[t] = (*(const device float4*)(x + n[0])).w;",
        HEAD + "out[t] = (*(const device float4*)(x + n[1])).w;"),
    "misaligned store": Pair(
        shim.Misaligned, r"not a multiple of 8 bytes: 8 bytes at index \d+ of threadgroup array 'tile'",
        HEAD + "threadgroup float tile[136]; *(threadgroup float2*)(tile + 2 * t + 1) = 1; out[t] = 1;",
        HEAD + "threadgroup float tile[136]; *(threadgroup packed_float2*)(tile + 2 * t + 1) = 1; out[t] = 1;"),
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
        HEAD + "out[t] = 0; if (t >= 40) return; " + BARRIER,
        HEAD + "out[t] = 0; " + BARRIER + " if (t >= 40) return;"),
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
    "a division that overflows": Pair(
        shim.UndefinedBehaviour, r"division|instruction",
        HEAD + "out[t] = (-2147483647 - 1 + n[2]) / (n[0] - 4);", HEAD + "out[t] = (-2147483647 + n[2]) / (n[0] - 4);"),
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
        LANE + "simdgroup_float8x8 m; simdgroup_load(m, x + lane / 31); simdgroup_store(m, out);",
        LANE + "simdgroup_float8x8 m; simdgroup_load(m, x + lane / 32); simdgroup_store(m, out);",
        {"threads": 32, "group": 32}),
    "a matrix half outside a threadgroup array": Pair(
        shim.OutOfBounds, r"index 64 of threadgroup array 'tile'",
        MATRIX + "simdgroup_load(m, tile + 4 * n[1] / 15 - 12); simdgroup_store(m, out);",
        MATRIX + "simdgroup_load(m, tile + 4 * n[1] / 15 - 16); simdgroup_store(m, out);",
        {"threads": 32, "group": 32}),
    "a matrix nobody has written": Pair(
        shim.Uninitialised, r"nobody has written: 4 bytes at index 32 of threadgroup array 'tile'",
        MATRIX.replace("tile[lane + 32] = 1;", "") + "simdgroup_load(m, tile); simdgroup_store(m, out);",
        MATRIX + "simdgroup_load(m, tile); simdgroup_store(m, out);",
        {"threads": 32, "group": 32}),
    "no barrier between a store and a matrix": Pair(
        shim.DataRace, r"load after a store by thread \d+ with no barrier between: .*'tile'",
        MATRIX + "tile[lane] = 2; simdgroup_load(m, tile); simdgroup_store(m, out);",
        MATRIX + "tile[lane] = 2; " + BARRIER + " simdgroup_load(m, tile); simdgroup_store(m, out);",
        {"threads": 32, "group": 32}),
    "no barrier between a matrix and a load": Pair(
        shim.DataRace, r"load after a store by thread \d+ with no barrier between: .*'tile'",
        MATRIX + "simdgroup_load(m, x); simdgroup_store(m, tile); out[lane] = tile[lane]; out[lane + 32] = 0;",
        MATRIX + "simdgroup_load(m, x); simdgroup_store(m, tile); " + BARRIER
        + "out[lane] = tile[lane]; out[lane + 32] = 0;",
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


@pytest.mark.skipif(sys.platform != "linux", reason="line tables are read from ELF files only")
def test_messages_show_the_line() -> None:
    with pytest.raises(shim.OutOfBounds, match=r"\n  line \d+: simdgroup_load\(m, x \+ i\);"):
        run(launch("simdgroup_float8x8 m;\nint i = n[0];\nsimdgroup_load(m, x + i);\nsimdgroup_store(m, out);"))
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


def test_one_bad_kernel_in_a_batch_is_named() -> None:
    good, bad = (launch(f"out[thread_position_in_grid.x] = {value};") for value in ("12345", "undeclared"))
    with pytest.raises(shim.CompileError, match="undeclared"):
        prepare([good, bad], jobs=1)
    assert run(good).outputs[0].tolist() == [12345] * 64
