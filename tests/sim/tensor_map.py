"""Tensor maps as the simulator encodes them, refused where the CUDA driver would.

The rules are those of cuTensorMapEncodeTiled in the CUDA Driver API.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cupy_flash.device import DriverError

BYTES = 128
ALIGNMENT = 64
# Mirrored by host/tensor_map.h: pointer, mark, strides, shape, box, rank, bytes of an
# element, swizzle; the mark tells where in an argument there is a map.
_FIELDS = struct.Struct("<QQ4Q5Q5I3I")
_MARK = 0x70616D20726F736E
_DTYPES = ("float16", "bfloat16", "float32", "float64")
_LARGEST_RANK = 5


def encode(
    pointer: int,
    dtype: np.dtype,
    shape: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    swizzle: int = 128,
) -> bytes:
    """Return what `cupy_flash.device.Device.tensor_map` describes.

    Raises
    ------
    DriverError
        If the driver would refuse it; the message is the rule.
    """
    rank, size = len(shape), dtype.itemsize
    rules = {
        "16-bit, 32-bit or 64-bit floats": dtype.name in _DTYPES,
        "two to five axes": 2 <= rank <= _LARGEST_RANK,
        "a stride for each axis but the first": len(strides_bytes) == rank - 1,
        "a box of as many axes": len(box) == rank,
        "pointer is a multiple of 16": pointer % 16 == 0,
        "1 to 2**32 entries": all(1 <= n <= 2**32 for n in shape),
        "strides are multiples of 16 below 2**40": all(
            s % 16 == 0 and 0 <= s < 2**40 for s in strides_bytes
        ),
        "1 to 256 entries of a box": all(1 <= n <= 256 for n in box),
        "whole 16 bytes in a row of a box": box[0] * size % 16 == 0,
        "128, 64, 32 or 0 swizzled bytes": swizzle in (128, 64, 32, 0),
        "a row of a box within what is swizzled": not 0 < swizzle < box[0] * size,
    }
    for rule, holds in rules.items():
        if not holds:
            raise DriverError(f"no tensor map: {rule}")
    fields = _FIELDS.pack(
        pointer, _MARK,
        *_padded(strides_bytes, _LARGEST_RANK - 1, 0),
        *_padded(shape, _LARGEST_RANK, 1),
        *_padded(box, _LARGEST_RANK, 1),
        rank, size, swizzle,
    )  # fmt: skip
    return fields.ljust(BYTES, b"\0")


def _padded(values: Sequence[int], length: int, fill: int) -> list[int]:
    return [*map(int, values), *[fill] * (length - len(values))]


@dataclass(frozen=True)
class Map:
    """What was encoded, without the axes that fill up the fields."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def decode(encoded: bytes) -> Map:
    """Return what the first map of some bytes describes."""
    pointer, _, *numbers, rank, _, _ = _FIELDS.unpack_from(encoded)
    axes = _LARGEST_RANK
    strides, rest = numbers[: axes - 1], numbers[axes - 1 :]
    shape, box = rest[:rank], rest[axes : axes + rank]
    return Map(pointer, tuple(shape), tuple(strides[: rank - 1]), tuple(box))


def find(argument: bytes) -> Iterator[tuple[int, int]]:
    """Yield where in a kernel's argument there are maps, and their pointers."""
    for at in range(0, len(argument) - BYTES + 1, ALIGNMENT):
        pointer, mark = struct.unpack_from("<QQ", argument, at)
        if mark == _MARK:
            yield at, pointer
