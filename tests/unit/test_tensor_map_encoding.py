"""How arrays are described to the CUDA driver and to the stand-in for it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_flash import device
from cupy_flash.device import CuPyDevice, DriverError

from ..sim import tensor_map

# (channels, sequence, heads, batch) of an array (batch, sequence, heads, channels).
_MAP: dict[str, Any] = {
    "pointer": 0x70010, "dtype": np.dtype(ml_dtypes.bfloat16), "shape": (72, 19, 3, 2),
    "strides_bytes": (432, 144, 8208), "box": (64, 16, 1, 1),
}  # fmt: skip


def encode(**changes: Any) -> bytes:
    """Call the method of a device that isn't there."""
    return CuPyDevice.tensor_map(object.__new__(CuPyDevice), **_MAP | changes)


class Driver:
    """Writes what it was called with; refuses one type."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def cuTensorMapEncodeTiled(self, to: ctypes.c_void_p, *rest: Any) -> int:
        assert to.value % 64 == 0
        self.calls.append([list(x) if hasattr(x, "__len__") else x for x in rest])
        ctypes.memset(to, 0xA5, 128)
        return 1 if rest[0] == 8 else 0

    def cuGetErrorName(self, code: int, to: Any) -> int:
        to._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(device, "_driver", lambda: driver)
    return driver


def test_what_the_driver_gets(driver: Driver) -> None:
    assert encode() == b"\xa5" * 128
    ((dtype, rank, pointer, shape, strides, box, steps, *modes),) = driver.calls
    assert (dtype, rank, pointer.value) == (9, 4, 0x70010)
    assert shape == [72, 19, 3, 2] and strides == [432, 144, 8208]
    assert box == [64, 16, 1, 1] and steps == [1, 1, 1, 1]
    assert modes == [0, 3, 3, 0]  # plain, 128 bytes swizzled, 256 fetched, zeros


def test_numbers_of_numpy(driver: Driver) -> None:
    encode(shape=np.array(_MAP["shape"]), box=np.array(_MAP["box"]))
    assert driver.calls[0][3] == [72, 19, 3, 2]


def test_errors_of_the_driver(driver: Driver) -> None:
    with pytest.raises(
        DriverError,
        match=r"cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE \(1\), with pointer="
        r"0x70010, dtype=float64, shape=\(72, 19, 3, 2\), strides_bytes=",
    ):
        encode(dtype=np.dtype(np.float64))


def test_an_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_driver", SimpleNamespace)
    with pytest.raises(DriverError, match="came with CUDA 12.0"):
        encode()


@pytest.mark.parametrize(
    ("platform", "name"), [("linux", "libcuda.so.1"), ("win32", "nvcuda.dll")]
)
def test_no_driver(monkeypatch: pytest.MonkeyPatch, platform: str, name: str) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: not found")

    monkeypatch.setattr(device.sys, "platform", platform)
    monkeypatch.setattr(device.ctypes, "CDLL", refuse)
    device._driver.cache_clear()
    with pytest.raises(DriverError, match=f"{name} can't be loaded: {name}: not found"):
        encode()


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"pointer": 8}, "pointer is a multiple of 16"),
        ({"strides_bytes": (432, 144, 8200)}, "strides are multiples of 16"),
        ({"strides_bytes": (-432, 144, 8208)}, "strides are multiples of 16"),
        ({"strides_bytes": (432, 144)}, "a stride for each axis but the first"),
        ({"box": (64, 257, 1, 1)}, "1 to 256 entries of a box"),
        ({"box": (72, 16, 1, 1)}, "within what is swizzled"),
        ({"box": (60, 16, 1, 1)}, "whole 16 bytes"),
        ({"shape": (72, 0, 3, 2)}, r"1 to 2\*\*32 entries"),
        ({"dtype": np.dtype(np.int16)}, "floats"),
    ],
)
def test_what_the_stand_in_refuses(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(DriverError, match=rule):
        tensor_map.encode(**_MAP | changes)


def test_maps_are_found_in_arguments() -> None:
    first = tensor_map.encode(**_MAP)
    second = tensor_map.encode(**_MAP | {"pointer": 0x80020})
    assert len(first) == tensor_map.BYTES
    argument = b"\0" * 64 + first + b"\0" * 128 + second
    assert list(tensor_map.find(argument)) == [(64, 0x70010), (320, 0x80020)]
