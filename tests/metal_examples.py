"""Small kernels for the shim's tests: a body in, a call out."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from shim import Launch, run

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
