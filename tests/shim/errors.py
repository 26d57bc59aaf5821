"""What a kernel can do wrong, one class each; every message names kernel, thread and place."""

from __future__ import annotations


class ShimError(Exception):
    """A kernel is wrong, or cannot be run here."""


class OutOfBounds(ShimError):
    """An access outside of its buffer or array."""


class StoreToInput(ShimError):
    """A store to a buffer that is an input."""


class Misaligned(ShimError):
    """An access whose address is not a multiple of its size."""


class Uninitialised(ShimError):
    """A load of threadgroup memory or of an output that nobody has written."""


class Unwritten(ShimError):
    """An output element that no thread has written."""


class DataRace(ShimError):
    """Two threads, one of them storing, with no barrier between."""


class DivergentBarrier(ShimError):
    """A threadgroup barrier that not all threads of the group reach."""


class DivergentSimd(ShimError):
    """A simdgroup operation that not all lanes reach."""


class TooMuchThreadgroupMemory(ShimError):
    """More threadgroup memory than a GPU has."""


class TooManyThreads(ShimError):
    """More threads in a threadgroup than a kernel may count on."""


class UndefinedBehaviour(ShimError):
    """Division by zero, a shift too wide, code that cannot be reached."""


class WildPointer(ShimError):
    """An access to no buffer, array or variable at all."""


class LaneLayout(ShimError):
    """Use of which lane holds which element of a simdgroup matrix: not documented."""


class TooLong(ShimError):
    """The kernel does not end."""


class BadLaunch(ShimError):
    """The call, or the source, is of a form that is not known here or not allowed by Metal."""


class CompileError(ShimError):
    """The source does not compile."""


class AddressSpaceError(CompileError):
    """The source compiles only if address spaces are ignored."""


# In the order of Fault in runtime/state.h, from 1.
FAULTS: tuple[type[ShimError], ...] = (
    OutOfBounds,
    StoreToInput,
    Misaligned,
    Uninitialised,
    Unwritten,
    DataRace,
    DivergentBarrier,
    DivergentSimd,
    TooMuchThreadgroupMemory,
    UndefinedBehaviour,
    WildPointer,
    LaneLayout,
    TooLong,
    BadLaunch,
)
