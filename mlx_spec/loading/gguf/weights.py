"""GGUF's blocks of quantized weights in MLX's affine form: scale * code + bias, per 32 values of a row.

Knows bytes, not which tensor they belong to. Where GGUF's grid is an affine one, the codes are moved over and
nothing is rounded but scales that are no float16; where it is not, the values are rounded again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

GROUP_SIZE = 32
_ELEMENTS_AT_A_TIME = 1 << 24

Bytes = npt.NDArray[Any]  # of uint8
Floats = npt.NDArray[Any]
Grid = tuple[Bytes, Floats, Floats]  # codes (blocks, groups, 32), scales and biases (blocks, groups)


def _nibbles(packed: Bytes) -> Bytes:
    """(blocks, groups, n) -> (blocks, groups, 2n): all low halves, then all high ones."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _halves(blocks: Bytes, count: int) -> list[Floats]:
    """The float16 numbers a block begins with, each (blocks, 1)."""
    return [blocks[:, 2 * i : 2 * i + 2].view(np.float16) for i in range(count)]


def _q4_0(blocks: Bytes) -> Grid:
    (scale,) = _halves(blocks, 1)
    return _nibbles(blocks[:, None, 2:]), scale, -8 * scale


def _q4_1(blocks: Bytes) -> Grid:
    scale, bias = _halves(blocks, 2)
    return _nibbles(blocks[:, None, 4:]), scale, bias


def _fifth_bits(packed: Bytes) -> Bytes:
    """(blocks, 4) -> (blocks, 1, 32), each 0 or 16."""
    return np.unpackbits(packed, axis=-1, bitorder="little")[:, None] << 4


def _q5_0(blocks: Bytes) -> Grid:
    (scale,) = _halves(blocks, 1)
    return _nibbles(blocks[:, None, 6:]) | _fifth_bits(blocks[:, 2:6]), scale, -16 * scale


def _q5_1(blocks: Bytes) -> Grid:
    scale, bias = _halves(blocks, 2)
    return _nibbles(blocks[:, None, 8:]) | _fifth_bits(blocks[:, 4:8]), scale, bias


def _q8_0(blocks: Bytes) -> Grid:
    (scale,) = _halves(blocks, 1)
    return blocks[:, None, 2:] ^ 0x80, scale, -128 * scale  # int8 plus 128


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and biases (blocks, 8): a block of 256 has two float16 factors, then eight pairs of 6 bits."""
    scale, minimum = (half.astype(np.float32) for half in _halves(blocks, 2))
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    low_scales, low_minima, rest = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = np.concatenate([low_scales & 63, (rest & 15) | (low_scales >> 6 << 4)], axis=-1)
    minima = np.concatenate([low_minima & 63, (rest >> 4) | (low_minima >> 6 << 4)], axis=-1)
    return scale * scales, -minimum * minima


def _q4_k(blocks: Bytes) -> Grid:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))  # low halves are one group, high ones the next
    return codes.reshape(-1, 8, 32), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> Grid:
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # bit g belongs to group g
    return codes | fifth << 4, *_k_scales(blocks)


_MOVED: dict[str, tuple[int, Callable[[Bytes], Grid]]] = {  # type -> MLX width, its grid
    "Q4_0": (4, _q4_0), "Q4_1": (4, _q4_1), "Q5_0": (5, _q5_0), "Q5_1": (5, _q5_1), "Q8_0": (8, _q8_0),
    "Q4_K": (4, _q4_k), "Q5_K": (5, _q5_k),
}  # fmt: skip
# Type -> MLX width. IQ1 to IQ3 have uneven grids, which the width they are named for would ruin.
_ROUNDED_AGAIN = {
    "Q2_K": 2, "Q3_K": 3, "Q6_K": 6, "IQ4_NL": 4, "IQ4_XS": 4, "TQ1_0": 2, "TQ2_0": 2,
    "IQ1_S": 3, "IQ1_M": 3, "IQ2_XXS": 3, "IQ2_XS": 3, "IQ2_S": 3, "IQ3_XXS": 4, "IQ3_S": 4,
}  # fmt: skip
WIDTHS = {name: bits for name, (bits, _) in _MOVED.items()} | _ROUNDED_AGAIN
DENSE = ("F32", "F16", "BF16")


def dense(data: npt.NDArray[Any], type_name: str, order: npt.NDArray[np.intp] | None) -> mx.array:
    """A tensor of a type in DENSE, rows taken in `order`."""
    if type_name == "BF16":  # numpy has no such type: the reader gives bytes
        data = data.view(np.uint16)
    array = mx.array(data if order is None else data[order])
    return array.view(mx.bfloat16) if type_name == "BF16" else array


def quantized(data: Bytes, kind: Any, order: npt.NDArray[np.intp] | None) -> dict[str, mx.array]:
    """A tensor (rows, bytes) of a type in WIDTHS -> MLX's weight, scales and biases, rows taken in `order`.

    A slice of rows at a time, so that wide floats never exist for a whole tensor.
    """
    from gguf import GGML_QUANT_SIZES, dequantize

    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    columns = data.shape[-1] // block_bytes * block_elements
    step = max(1, _ELEMENTS_AT_A_TIME // columns)
    parts: list[tuple[mx.array, ...]] = []
    for start in range(0, data.shape[0], step):
        rows = data[start : start + step] if order is None else data[order[start : start + step]]
        if kind.name in _MOVED:
            bits, unpack = _MOVED[kind.name]
            with np.errstate(over="ignore", invalid="ignore"):  # scales that overflow give logits that say so
                codes, scales, biases = unpack(rows.reshape(-1, block_bytes))
                halves = [floats.astype(np.float16).reshape(len(rows), -1) for floats in (scales, biases)]
            part = (mx.array(_pack(codes.reshape(len(rows), -1), bits)), *map(mx.array, halves))
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                values, bits = mx.array(dequantize(rows, kind)), WIDTHS[kind.name]
            packed, *floats = mx.quantize(values, group_size=GROUP_SIZE, bits=bits)
            part = (packed, *(array.astype(mx.float16) for array in floats))
        mx.eval(part)
        parts.append(part)
    arrays = [mx.concatenate(list(pieces)) for pieces in zip(*parts, strict=True)]
    mx.eval(arrays)
    return dict(zip(("weight", "scales", "biases"), arrays, strict=True))


def _pack(codes: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """(rows, n) -> (rows, n * bits / 32) in MLX's order: a stream of bits, lowest first."""
    eights = codes.reshape(len(codes), -1, 8)
    stream = np.zeros(eights.shape[:2], dtype="<u8")
    for i in range(8):
        stream |= eights[..., i].astype(np.uint64) << np.uint64(bits * i)
    # Eight codes fill `bits` bytes exactly.
    octets = stream[..., None].view(np.uint8)[..., :bits]  # (rows, n / 8, bits)
    return np.ascontiguousarray(octets).reshape(len(codes), -1).view(np.uint32)
