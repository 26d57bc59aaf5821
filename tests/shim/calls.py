"""What a kernel is called with.

Either a call of what `mx.fast.metal_kernel` returned, or a plain kernel function and its buffers by number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from .errors import BadLaunch
from .source import Program, capture, generated_program, parameters

Size = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """A call of a kernel that `mx.fast.metal_kernel` made, with the arguments that call takes."""

    kernel: Callable[..., Any]
    inputs: Sequence[mx.array]
    output_shapes: Sequence[Sequence[int]]
    output_dtypes: Sequence[mx.Dtype]
    grid: Size
    threadgroup: Size
    template: Sequence[tuple[str, Any]] = ()
    init_value: float | None = None
    ensure_row_contiguous: bool = True  # as given to mx.fast.metal_kernel

    @functools.cached_property
    def program(self) -> Program:
        def call(*inputs: mx.array) -> Any:
            return self.kernel(
                inputs=list(inputs),
                template=list(self.template),
                grid=self.grid,
                threadgroup=self.threadgroup,
                output_shapes=[tuple(shape) for shape in self.output_shapes],
                output_dtypes=list(self.output_dtypes),
                init_value=self.init_value,
                verbose=True,
            )

        return generated_program(capture(call, list(self.inputs)))

    def buffers(self) -> dict[int, Buffer]:
        """MLX passes each input, then its shape, strides and number of dimensions if the body names them."""
        given = [parameter for parameter in parameters(self.program) if parameter.buffer is not None]
        result: dict[int, Buffer] = {}
        position, inputs = 0, list(self.inputs)
        for array in inputs:
            name = given[position].name
            data, strides = _bytes_of(array, self.ensure_row_contiguous)
            about: dict[str, Any] = {
                f"{name}_shape": np.array(array.shape, np.int32),
                f"{name}_strides": np.array(strides, np.int64),
                f"{name}_ndim": np.array(array.ndim, np.int32),
            }
            result[position] = Buffer(name, data, itemsize=array.itemsize)
            position += 1
            while position < len(given) and given[position].name in about:
                extra = about[given[position].name]
                result[position] = Buffer(given[position].name, extra.tobytes(), itemsize=extra.itemsize)
                position += 1
        for shape, dtype in zip(self.output_shapes, self.output_dtypes, strict=True):
            result[position] = Output(shape, dtype, self.init_value).buffer(given[position].name)
            position += 1
        if position != len(given):
            raise BadLaunch(f"the source takes {len(given)} buffers, {position} are given")
        return result


@dataclass(frozen=True)
class Output:
    """A buffer the kernel writes."""

    shape: Sequence[int]
    dtype: mx.Dtype
    init_value: float | None = None

    def buffer(self, name: str) -> Buffer:
        size = int(np.prod(self.shape, dtype=np.int64))
        if self.init_value is None:
            data = b"\xff" * (size * self.dtype.size)  # not a number in every floating type
        else:
            data = _bytes_of(mx.full(tuple(self.shape), self.init_value, self.dtype), True)[0]
        return Buffer(name, data, self.dtype.size, self)


@dataclass(frozen=True)
class PlainLaunch:
    """A kernel function in Metal source: `instantiation` such as "name<float, 64>", buffers by their number."""

    text: str
    instantiation: str
    arguments: Mapping[int, mx.array | Output]
    grid: Size  # in threads
    threadgroup: Size
    function_constants: Mapping[int, Any] = field(default_factory=dict)

    @functools.cached_property
    def program(self) -> Program:
        return Program(self.text, self.instantiation, self.function_constants)

    def buffers(self) -> dict[int, Buffer]:
        names = {parameter.buffer: parameter.name for parameter in parameters(self.program)}
        result = {}
        for number, argument in self.arguments.items():
            if isinstance(argument, Output):
                result[number] = argument.buffer(names[number])
            else:
                result[number] = Buffer(names[number], _bytes_of(argument, True)[0], argument.itemsize)
        return result


@dataclass(frozen=True)
class Buffer:
    """Bytes for a kernel; `output` says what they become if the kernel writes them."""

    name: str
    data: bytes
    itemsize: int
    output: Output | None = None


def _bytes_of(array: mx.array, contiguous: bool) -> tuple[bytes, list[int]]:
    """The bytes a kernel finds, and the strides in elements."""
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    values: Any = np.asarray(plain)
    if not contiguous and not values.flags.c_contiguous:
        raise BadLaunch("ensure_row_contiguous=False with an input that is not contiguous is not supported")
    strides, step = [], 1
    for length in reversed(array.shape):
        strides.append(step)
        step *= length
    return values.tobytes(), strides[::-1]
