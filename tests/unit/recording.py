"""A device that runs nothing: it records what is launched, over NumPy memory.

It stands where CuPy or a simulator would stand, so that everything above the device
interface runs on a machine with no GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupy_flash.device import DeviceInfo
from cupy_flash.params import params_dtype
from cupy_flash.spec import KernelSpec

from ..sim import tensor_map

_ALIGNMENT = 256  # of what a GPU allocates
# A GPU for each family: one on which no faster family serves its calls.
GPUS = {
    "simt": DeviceInfo("recorder", 70, 132, 227 * 1024, (13, 0)),
    "mma": DeviceInfo("recorder", 80, 132, 227 * 1024, (13, 0)),
    "wgmma": DeviceInfo("recorder", 90, 132, 227 * 1024, (13, 0)),
}


@dataclass(frozen=True)
class Launch:
    """One recorded kernel launch.

    Attributes
    ----------
    live : frozenset of int
        Addresses of the workspace that existed when the kernel was launched.
    cleared : frozenset of int
        Addresses of what had been filled with zeros.
    maps : bytes
        The kernel's second argument, if it has one.
    """

    spec: KernelSpec
    grid: int
    block: int
    shared: int
    params: bytes
    live: frozenset[int]
    cleared: frozenset[int]
    maps: bytes = b""

    @property
    def fields(self) -> dict[str, Any]:
        """The kernel's argument, by the names of `cupy_flash.params`."""
        (struct,) = np.frombuffer(self.params, params_dtype(self.spec.batch_axes))
        return {name: struct[name] for name in struct.dtype.names}

    def addresses(self, name: str, shape: Sequence[int], itemsize: int) -> np.ndarray:
        """Return where the kernel finds each element of an array.

        Parameters
        ----------
        name : field of the argument
        shape : axes after the batch axes, in the kernel's order
        itemsize : bytes of an element

        Returns
        -------
        array of int64, shape (number of sequences, *shape)
        """
        fields = self.fields
        sizes = (*fields["batch_shape"], *shape)
        offsets = np.zeros(sizes, np.int64)
        for axis, (size, stride) in enumerate(
            zip(sizes, fields[f"{name}_strides"], strict=True)
        ):
            steps = np.arange(size) * stride
            offsets += steps.reshape(-1, *(1,) * (len(sizes) - axis - 1))
        sequences = int(fields["batch_shape"].prod())
        return (int(fields[name]) + offsets * itemsize).reshape(sequences, *shape)


@dataclass(frozen=True)
class Temporary:
    """Workspace that was asked for; `array` is gone once it was freed."""

    shape: tuple[int, ...]
    dtype: np.dtype
    nbytes: int
    address: int
    array: weakref.ref[np.ndarray]


@dataclass(eq=False)
class RecordingDevice:
    """Implements `cupy_flash.device.Device` on host memory.

    Attributes
    ----------
    launches, temporaries : what was launched and allocated, in order
    copied : shapes of what `dense_copy` copied
    cleared : addresses of what was filled with zeros
    requested : kernels in the order in which they were asked for
    compiled : those of them that were new
    downloads : number of copies to the host
    active_depth : how many times it is the current device right now
    """

    info: DeviceInfo = GPUS["mma"]
    launches: list[Launch] = field(default_factory=list)
    temporaries: list[Temporary] = field(default_factory=list)
    copied: list[tuple[int, ...]] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)
    requested: list[KernelSpec] = field(default_factory=list)
    compiled: list[KernelSpec] = field(default_factory=list)
    downloads: int = 0
    active_depth: int = 0

    def array(self, array: np.ndarray) -> np.ndarray:
        """View a NumPy array as one that lies on this device."""
        view = array.view(DeviceArray)
        view.owner = self
        return view

    def pointer(self, array: Any) -> int:
        """Return the address of the first element."""
        return array.__array_interface__["data"][0]

    def empty(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Return a new array, aligned as a GPU would."""
        assert self.active_depth, "allocated while another device is current"
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        raw = np.empty(size + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        return self.array(raw[start : start + size].view(dtype).reshape(shape))

    def temporary(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Return workspace, and remember it."""
        array = self.empty(shape, dtype)
        self.temporaries.append(
            Temporary(
                array.shape,
                array.dtype,
                array.nbytes,
                self.pointer(array),
                weakref.ref(array),
            )
        )
        return array

    def dense_copy(self, array: Any, multiple: int = 1) -> np.ndarray:
        """Return an aligned copy whose rows start at multiples of some elements."""
        rows, columns = array.shape[:-1], array.shape[-1:]
        padded = tuple(-(-n // multiple) * multiple for n in columns)
        whole = self.temporary((*rows, *padded), array.dtype)
        copy = whole[(..., *map(slice, array.shape))]
        copy[...] = array
        self.copied.append(copy.shape)
        return copy

    def clear(self, array: Any) -> None:
        """Fill an array with zeros."""
        assert self.active_depth, "cleared while another device is current"
        array[...] = 0
        self.cleared.append(self.pointer(array))

    def to_host(self, array: Any) -> np.ndarray:
        """Return the array as a plain NumPy array."""
        self.downloads += 1
        return np.asarray(array)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make this the current device for a while."""
        self.active_depth += 1
        try:
            yield
        finally:
            self.active_depth -= 1

    def tensor_map(
        self,
        pointer: int,
        dtype: np.dtype,
        shape: Sequence[int],
        strides_bytes: Sequence[int],
        box: Sequence[int],
        swizzle: int = 128,
    ) -> bytes:
        """Encode a map as the simulator does, with the driver's rules."""
        return tensor_map.encode(pointer, dtype, shape, strides_bytes, box, swizzle)

    def kernels(self, specs: Sequence[KernelSpec]) -> list[KernelSpec]:
        """Pretend to compile kernels, each once."""
        assert self.active_depth, "compiled while another device is current"
        for spec in specs:
            if spec not in self.requested:
                self.compiled.append(spec)
            self.requested.append(spec)
        return list(specs)

    def launch(
        self, kernel: KernelSpec, grid: int, block: int, shared: int,
        *arguments: ctypes.Array,
    ) -> None:  # fmt: skip
        """Record a launch."""
        assert self.active_depth, "launched while another device is current"
        live = frozenset(t.address for t in self.temporaries if t.array() is not None)
        cleared = frozenset(self.cleared)
        params, *maps = arguments
        self.launches.append(
            Launch(
                kernel, grid, block, shared, bytes(params), live, cleared,
                b"".join(map(bytes, maps)),
            )
        )  # fmt: skip


class DeviceArray(np.ndarray):
    """A NumPy array that says it lies on a `RecordingDevice`."""

    owner: RecordingDevice | None = None

    def __array_finalize__(self, source: Any) -> None:
        """Views of a device's array lie on that device too."""
        self.owner = getattr(source, "owner", None)

    def __cupy_flash_device__(self) -> RecordingDevice | None:
        """Return the device, for `cupy_flash.device.owner`."""
        return self.owner
