"""Runs Metal kernels on a CPU and detects what would be wrong with them on a GPU.

    kernel = mx.fast.metal_kernel(name=..., input_names=[...], output_names=[...], source=...)
    result = run(Launch(kernel, inputs, output_shapes, output_dtypes, grid, threadgroup, template))
    result.outputs, result.report

What runs is the text MLX generates for that very call, compiled as C++ (source.py, translate.py, compile.py, include/)
and executed with one fibre per GPU thread (runtime/). What is right here is not thereby fast on a GPU, nor is Apple's
compiler ruled out as a cause of trouble; those need a Mac.

Not seen: an access outside of a private array through a cast pointer; a private variable read before it is set, unless
the compiler sees it (it is filled with a pattern that is not a number); a load whose value is never used; an order of
threads that matters without being a race, as threads always run in the same order here. Reported though it may be
meant: threads that store the same value to one place, reductions over some lanes of a simdgroup. Not there: textures,
quadgroups, threadgroup memory passed as a parameter, member functions for objects in device or threadgroup memory,
arithmetic on vectors of bfloat.
"""

from .calls import Launch, Output, PlainLaunch
from .errors import (
    AddressSpaceError,
    BadLaunch,
    CompileError,
    DataRace,
    DivergentBarrier,
    DivergentSimd,
    LaneLayout,
    Misaligned,
    OutOfBounds,
    ShimError,
    StoreToInput,
    TooLong,
    TooManyThreads,
    TooMuchThreadgroupMemory,
    UndefinedBehaviour,
    Uninitialised,
    Unwritten,
    WildPointer,
)
from .launch import Limits, Report, Result, StandIn, Traffic, prepare, run

__all__ = [
    "AddressSpaceError",
    "BadLaunch",
    "CompileError",
    "DataRace",
    "DivergentBarrier",
    "DivergentSimd",
    "LaneLayout",
    "Launch",
    "Limits",
    "Misaligned",
    "OutOfBounds",
    "Output",
    "PlainLaunch",
    "Report",
    "Result",
    "ShimError",
    "StandIn",
    "StoreToInput",
    "TooLong",
    "TooManyThreads",
    "TooMuchThreadgroupMemory",
    "Traffic",
    "UndefinedBehaviour",
    "Uninitialised",
    "Unwritten",
    "WildPointer",
    "prepare",
    "run",
]
