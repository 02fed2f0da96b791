"""A device that runs nothing: it records what is launched, over NumPy memory.

It stands where CuPy or a simulator would stand, so that everything above the device
interface runs on a machine with no GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupy_flash.device import DeviceInfo
from cupy_flash.problem import ArrayInfo
from cupy_flash.spec import KernelSpec


@dataclass(frozen=True)
class Launch:
    """One recorded kernel launch."""

    spec: KernelSpec
    grid: int
    block: int
    shared: int
    params: np.ndarray


@dataclass(eq=False)
class RecordingDevice:
    """Implements `cupy_flash.device.Device` on host memory."""

    info: DeviceInfo = DeviceInfo("recorder", 90, 132, 227 * 1024, (13, 0))
    launches: list[Launch] = field(default_factory=list)
    temporaries: list[np.ndarray] = field(default_factory=list)
    compiled: list[KernelSpec] = field(default_factory=list)

    def array(self, array: np.ndarray) -> np.ndarray:
        """View a NumPy array as one that lies on this device."""
        view = array.view(DeviceArray)
        view.owner = self
        return view

    def describe(self, array: Any) -> ArrayInfo:
        """Describe an array for validation."""
        return ArrayInfo(
            array.shape, array.strides, array.dtype, self.pointer(array) & 15
        )

    def pointer(self, array: Any) -> int:
        """Return the address of the first element."""
        return array.__array_interface__["data"][0]

    def empty(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Return a new array."""
        return self.array(np.empty(shape, dtype))

    def temporary(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Return workspace, and remember it."""
        self.temporaries.append(self.empty(shape, dtype))
        return self.temporaries[-1]

    def dense_copy(self, array: Any) -> np.ndarray:
        """Return an aligned C-contiguous copy."""
        copy = self.temporary(array.shape, array.dtype)
        copy[...] = array
        return copy

    def clear(self, array: Any) -> None:
        """Fill an array with zeros."""
        array[...] = 0

    def to_host(self, array: Any) -> np.ndarray:
        """Return the array as a plain NumPy array."""
        return np.asarray(array)

    def active(self) -> AbstractContextManager:
        """Return a context in which this is the current device."""
        return contextlib.nullcontext()

    def kernel(self, spec: KernelSpec) -> KernelSpec:
        """Pretend to compile a kernel."""
        self.compiled.append(spec)
        return spec

    def launch(
        self, kernel: KernelSpec, grid: int, block: int, shared: int, params: np.ndarray
    ) -> None:
        """Record a launch."""
        self.launches.append(Launch(kernel, grid, block, shared, params))


class DeviceArray(np.ndarray):
    """A NumPy array that says it lies on a `RecordingDevice`."""

    owner: RecordingDevice | None = None

    def __array_finalize__(self, source: Any) -> None:
        """Views of a device's array lie on that device too."""
        self.owner = getattr(source, "owner", None)

    def __cupy_flash_device__(self) -> RecordingDevice | None:
        """Return the device, for `cupy_flash.device.owner`."""
        return self.owner
