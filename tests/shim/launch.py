"""Runs a kernel call on this machine's CPU and says what it did, or what is wrong with it.

Knows the runtime's interface and reports; keep the structures in step with runtime/state.h.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import re
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from . import compile as compiled
from .calls import Buffer, Launch, Output, PlainLaunch, Size
from .errors import FAULTS, BadLaunch, TooManyThreads
from .lines import line_of
from .source import Parameter, Program, most_threads, parameters

_RUNNING = threading.Lock()


@dataclass(frozen=True)
class Limits:
    """What a kernel may use. Metal's own limit of 1024 threads shrinks with the registers a kernel needs."""

    threads: int = 512
    threadgroup_bytes: int = 32 * 1024
    seconds: int = 60  # of processor time
    lane_layout: bool = False  # allow thread_elements(); only a test of the shim itself wants it


@dataclass(frozen=True)
class Traffic:
    """Bytes one buffer was asked for.

    `loaded` and `stored` add up every access of every thread, as the compiler left them: a load it proved redundant
    is not counted, and lanes that read the same address count each. `distinct_*` count a byte once per launch.
    `loaded_per_threadgroup` counts a byte once in each threadgroup that loads it, summed over the threadgroups: what
    must cross from device memory if a threadgroup's caches never forget and are shared with nobody.
    """

    space: str  # device or constant
    nbytes: int
    loaded: int
    stored: int
    distinct_loaded: int
    distinct_stored: int
    loaded_per_threadgroup: int


@dataclass(frozen=True)
class Report:
    """What a launch did."""

    kernel: str
    buffers: Mapping[str, Traffic]
    threadgroups: int
    threads: int
    threadgroup_bytes: int  # of memory declared, each array rounded up to 16
    threadgroup_loaded: int
    threadgroup_stored: int

    def total(self, what: str) -> int:
        """The sum of one field of Traffic over the buffers."""
        return sum(getattr(traffic, what) for traffic in self.buffers.values())


@dataclass(frozen=True)
class Result:
    outputs: list[mx.array]
    report: Report


def run(
    launch: Launch | PlainLaunch, *, limits: Limits | None = None, may_stay_unwritten: Collection[str] = ()
) -> Result:
    """Run one call; raises a ShimError that names what is wrong.

    Outputs that are not written everywhere are an error unless named in `may_stay_unwritten` (their unwritten bytes
    are 0xff) or initialised by init_value.
    """
    limits = limits or Limits()
    name = launch.program.function
    threads = int(np.prod(launch.threadgroup))
    if min(*launch.grid, *launch.threadgroup) < 1:
        raise BadLaunch(f"{name}: grid {launch.grid} and threadgroup {launch.threadgroup} must be positive")
    most = min(limits.threads, most_threads(launch.program) or limits.threads, 1024)
    if threads > most:
        raise TooManyThreads(f"{name}: {threads} threads in a threadgroup, at most {most}")
    buffers = launch.buffers()
    item = compiled.unit(launch.program)
    compiled.build([item])
    return _call(launch, item, buffers, limits, may_stay_unwritten)


def prepare(launches: Sequence[Launch | PlainLaunch], *, jobs: int | None = None) -> None:
    """Compile the kernels of many launches ahead, in batches on all cores. `run` then only runs them."""
    compiled.build([compiled.unit(launch.program) for launch in launches], jobs=jobs)


def _array(data: bytes, output: Output) -> mx.array:
    if output.dtype == mx.bfloat16:
        return mx.array(np.frombuffer(data, np.uint16).reshape(output.shape)).view(mx.bfloat16)
    kind = np.dtype(str(output.dtype).removeprefix("mlx.core.").replace("bool", "bool_"))
    return mx.array(np.frombuffer(data, kind).reshape(output.shape))


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        *[(n, ctypes.c_uint32) for n in ("element_bytes", "kind", "initialised", "may_stay_unwritten")],
        *[
            (n, ctypes.c_uint64)
            for n in ("loaded", "stored", "distinct_loaded", "distinct_stored", "loaded_per_threadgroup")
        ],
    ]


class _Outcome(ctypes.Structure):
    _fields_ = [
        ("fault", ctypes.c_int),
        *[(n, ctypes.c_uint32) for n in ("groups", "threads", "threadgroup_bytes")],
        *[(n, ctypes.c_uint64) for n in ("threadgroup_loaded", "threadgroup_stored")],
        ("line", ctypes.c_uint32),
        ("simd_line", ctypes.c_uint32),
        ("site", ctypes.c_uint64),
        ("message", ctypes.c_char * 1000),
    ]


@functools.cache
def _library(path: str) -> ctypes.CDLL:
    if sys.platform == "linux":  # the linker is not told of the C library's mathematics
        ctypes.CDLL(ctypes.util.find_library("m"), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(path)


def _call(
    launch: Launch | PlainLaunch,
    item: compiled.Unit,
    buffers: Mapping[int, Buffer],
    limits: Limits,
    may_stay_unwritten: Collection[str],
) -> Result:
    path = compiled.located(item)
    assert path is not None
    library = _library(str(path))
    spaces = {p.buffer: p for p in parameters(launch.program) if p.buffer is not None}
    table = (_Buffer * (max(spaces) + 1))()
    data = {
        number: ctypes.create_string_buffer(buffer.data, max(1, len(buffer.data))) for number, buffer in buffers.items()
    }
    for number, parameter in spaces.items():
        table[number] = _row(parameter, buffers.get(number), data.get(number), may_stay_unwritten)
    bounds = (ctypes.c_uint32 * 4)(limits.threads, limits.threadgroup_bytes, limits.seconds, limits.lane_layout)
    outcome = _Outcome()
    with _RUNNING:
        library.shim_launch(
            ctypes.cast(getattr(library, item.entry), ctypes.c_void_p),
            table,
            ctypes.c_uint32(len(table)),
            (ctypes.c_uint32 * 3)(*launch.grid),
            (ctypes.c_uint32 * 3)(*launch.threadgroup),
            bounds,
            ctypes.byref(outcome),
        )
    if outcome.fault:
        raise FAULTS[outcome.fault - 1](_message(launch.program, outcome, path))
    outputs = [_array(data[n].raw[: len(b.data)], b.output) for n, b in sorted(buffers.items()) if b.output]
    traffic = {
        buffers[number].name: Traffic(
            space=parameter.space,
            nbytes=len(buffers[number].data),
            loaded=table[number].loaded,
            stored=table[number].stored,
            distinct_loaded=table[number].distinct_loaded,
            distinct_stored=table[number].distinct_stored,
            loaded_per_threadgroup=table[number].loaded_per_threadgroup,
        )
        for number, parameter in spaces.items()
        if number in buffers
    }
    report = Report(
        kernel=launch.program.function,
        buffers=traffic,
        threadgroups=outcome.groups,
        threads=outcome.threads,
        threadgroup_bytes=outcome.threadgroup_bytes,
        threadgroup_loaded=outcome.threadgroup_loaded,
        threadgroup_stored=outcome.threadgroup_stored,
    )
    return Result(outputs, report)


def _row(parameter: Parameter, buffer: Buffer | None, data: Any, may_stay_unwritten: Collection[str]) -> _Buffer:
    if buffer is None:
        if parameter.needs is None:
            raise BadLaunch(f"no buffer is given for parameter {parameter.name!r}")
        return _Buffer(f"{parameter.name} (not given)".encode(), None, 0, 1, 0, 0, 0)
    kind = 2 if buffer.output else 1 if parameter.space == "constant" else 0
    initialised = buffer.output is None or buffer.output.init_value is not None
    return _Buffer(
        buffer.name.encode(),
        ctypes.cast(data, ctypes.c_void_p),
        len(buffer.data),
        buffer.itemsize,
        kind,
        initialised,
        buffer.name in may_stay_unwritten,
    )


def _message(program: Program, outcome: _Outcome, path: Path) -> str:
    """What the detector said, with the line of the source where it is known."""
    text, lines, line = outcome.message.decode(), program.text.splitlines(), outcome.line
    file, found = line_of(path, outcome.site) or ("", 0)
    if file == program.function:
        line = found
    elif file == "shim_matrix.h":
        line = outcome.simd_line
    if not 0 < line <= len(lines):
        return f"{program.function}: {text}"
    shown = re.sub(r"\s+", " ", lines[line - 1].strip())
    return f"{program.function}: {text}\n  line {line}: {shown}"


class StandIn:
    """Stands in for a kernel: called as `mx.fast.metal_kernel`'s result is, it runs here and keeps its reports."""

    def __init__(
        self, kernel: Callable[..., Any], limits: Limits | None = None, may_stay_unwritten: Collection[str] = ()
    ):
        self.kernel, self.limits, self.may_stay_unwritten = kernel, limits, may_stay_unwritten
        self.reports: list[Report] = []

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Size,
        threadgroup: Size,
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        **_ignored: Any,
    ) -> list[mx.array]:
        launch = Launch(
            self.kernel, inputs, output_shapes, output_dtypes, grid, threadgroup, tuple(template or ()), init_value
        )
        result = run(launch, limits=self.limits, may_stay_unwritten=self.may_stay_unwritten)
        self.reports.append(result.report)
        return result.outputs
