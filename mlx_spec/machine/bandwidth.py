"""How fast this machine reads memory, measured. Knows MLX; knows nothing of models."""

from __future__ import annotations

import time
from dataclasses import dataclass

import mlx.core as mx

from mlx_spec.machine.memory import available_memory

_WANTED, _LEAST = 2**30, 2**24
_PASSES = 5


@dataclass(frozen=True)
class Bandwidth:
    bytes_per_second: float
    array_bytes: int
    """Of the array that was read."""

    @property
    def how(self) -> str:
        return (
            f"adding up an array of {self.array_bytes / 1e9:.2g} GB of 32-bit whole numbers with MLX, "
            f"the fastest of {_PASSES} passes"
        )


def measure_bandwidth(wanted: int = _WANTED) -> Bandwidth:
    """Stream one large array, far beyond any cache: a gigabyte, or a quarter of the memory that is left.

    Whole numbers, since MLX adds up floating-point numbers on a CPU several times slower than memory delivers them.
    """
    available = available_memory()
    size = max(_LEAST, wanted if available is None else min(wanted, available // 4))
    rows = size // 2**14
    array = mx.full((rows, 2**12), 1, mx.uint32)  # (rows, 16 KiB each)
    mx.eval(array)
    seconds = []
    for _ in range(_PASSES):
        started = time.perf_counter()
        mx.eval(mx.sum(array))
        seconds.append(time.perf_counter() - started)
    size = array.nbytes
    del array
    mx.clear_cache()  # MLX would keep the memory, which a large model may need
    return Bandwidth(size / min(seconds), size)
