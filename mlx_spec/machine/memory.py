"""How much memory there is, whether a model fits, and the wired limit of macOS. Knows bytes, not models."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

from mlx_spec.errors import DoesNotFit

MOST_CACHED = 2**28
"""Bytes of freed buffers that MLX may keep between passes."""
SMALLER_CACHE = "give a shorter prompt, a smaller --max-tokens (max_tokens=), --kv int8, or a --window."
"""What to do where keys and values do not fit."""
NO_MEMORY = f"no memory for a pass of the model; {SMALLER_CACHE}"
_ALLOCATION = re.compile(r"alloc|(no|out ?of|insufficient) ?memory|resource limit", re.IGNORECASE)


def check_fits(name: str, needed: int, available: int | None, smaller: Mapping[str, int]) -> None:
    """Raise DoesNotFit if `needed` bytes are more than `available`; None is unknown, and passes.

    The message has the numbers, and the largest of `smaller` (name -> bytes) that does fit.
    """
    if available is None or needed <= available:
        return
    fitting = {other: size for other, size in smaller.items() if size <= available}
    if fitting:
        largest = max(fitting, key=lambda other: fitting[other])
        step = (f"choose a smaller model, such as {largest} ({gigabytes(fitting[largest])}; see "
                "`mlx-spec models`)")
    else:
        step = "close other programs"
    raise DoesNotFit(f"{name} needs {gigabytes(needed)} for its weights and {gigabytes(max(available, 0))} "
                     f"is available; {step}.")


def check_cache_fits(tokens: int, needed: int) -> None:
    """Raise DoesNotFit, with numbers, if `needed` bytes for keys and values of so many tokens are not available."""
    available = available_memory()
    if available is None or needed <= available:
        return
    fitting = tokens * max(available, 0) // needed
    raise DoesNotFit(
        f"keys and values of {tokens} tokens need {gigabytes(needed)} more and {gigabytes(max(available, 0))} is "
        f"available, enough for about {fitting} tokens; {SMALLER_CACHE}"
    )


@contextmanager
def memory_or(message: str | Callable[[], str]) -> Iterator[None]:
    """Raise DoesNotFit with this message where an allocation inside fails, be it MLX's or Python's. Every other
    exception stays what it is."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # MLX has no type for it, only texts: "[malloc] Unable to allocate 123 bytes.", "[metal::malloc] Attempting to
        # allocate ...", "... Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)".
        if isinstance(error, RuntimeError) and not _ALLOCATION.search(str(error)):
            raise
        raise DoesNotFit(message if isinstance(message, str) else message()) from error


def bound_cache() -> None:
    """Have MLX give back the buffers it keeps for reuse once they are more than `MOST_CACHED` bytes. MLX itself lets
    them grow up to the size of memory, and every length of a sequence leaves some that fit no other."""
    if mx.get_cache_memory() > MOST_CACHED:
        mx.clear_cache()


def available_memory() -> int | None:
    """Bytes that can still be used for weights, or None where this system does not say.

    On a Mac's GPU, what macOS recommends as its working set less what MLX holds now; elsewhere memory that is
    free or only holds copies of files.
    """
    if sys.platform == "darwin":
        total = _working_set() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total - int(mx.get_active_memory())
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (OSError, ValueError, IndexError):
        return None


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


_lock = threading.Lock()
_holders = 0
_previous = 0


@contextmanager
def wired_limit() -> Iterator[None]:
    """Keep the weights in memory while inside: raise macOS's wired limit to the recommended working set.

    May be nested and used from several threads; the limit found first is put back when the last one leaves,
    after what the default stream still computes. Does nothing without Metal.
    """
    global _holders, _previous
    size = _working_set()
    if not size:
        yield
        return
    with _lock:
        if _holders == 0:
            _previous = mx.set_wired_limit(size)
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0:
                try:
                    mx.synchronize()
                finally:
                    mx.set_wired_limit(_previous)


def _working_set() -> int:
    """Bytes macOS recommends to use at most on the GPU; 0 without Metal."""
    if not mx.metal.is_available():
        return 0
    return int(mx.device_info().get("max_recommended_working_set_size", 0))
