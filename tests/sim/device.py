"""A GPU that the CPU stands in for, as `cupy_flash.device.Device` describes one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cupy_flash.device import DeviceInfo
from cupy_flash.params import POINTERS, params_dtype
from cupy_flash.spec import KernelSpec

from . import build, tensor_map

_ALIGNMENT = 256  # of what a GPU allocates
_ORDERS = ("ascending", "descending", "random")
# What a process holds at its end is no leak; fibers are no threads.
_SANITIZERS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
_HEADER = struct.Struct("<9Q")
_FIXUP = struct.Struct("<3Q")
_ARRAY = struct.Struct("<2Q")


class SimulationError(RuntimeError):
    """A kernel did what it must not do; the message is the simulator's report."""


class SimArray(np.ndarray):
    """A NumPy array that says it lies on a `SimDevice`."""

    owner: SimDevice | None = None

    def __array_finalize__(self, source: Any) -> None:
        """Views of a device's array lie on that device too."""
        self.owner = getattr(source, "owner", None)

    def __cupy_flash_device__(self) -> SimDevice | None:
        """Return the device, for `cupy_flash.device.owner`."""
        return self.owner


@dataclass(eq=False)
class SimDevice:
    """Implements `cupy_flash.device.Device` by running kernels on the CPU.

    Attributes
    ----------
    info : DeviceInfo
        The GPU that is simulated.
    order : {"ascending", "descending", "random"}
        Which of the warps that can go on does, the first, the last or any, and in
        which order its threads run.
    early : bool
        Whether asynchronous copies happen at once, not as late as waits allow.
    sources : Path, optional
        Another folder in place of ``cuda_src``.
    seconds : float
        After which a kernel is taken to hang.
    """

    info: DeviceInfo = field(
        default_factory=lambda: DeviceInfo("simulator", 90, 4, 227 * 1024, (13, 0))
    )
    order: str = "ascending"
    early: bool = False
    seed: int = 0
    sources: Path | None = None
    seconds: float = 120.0
    launched: list[KernelSpec] = field(default_factory=list)
    memory: dict[int, np.ndarray] = field(default_factory=dict)

    def array(self, array: np.ndarray) -> SimArray:
        """View a NumPy array as one that lies on this device."""
        view = array.view(SimArray)
        view.owner = self
        return view

    def pointer(self, array: Any) -> int:
        """Return the address of the first element, 0 if there is none."""
        if array.size == 0:
            return 0
        self._remember(array)
        return array.__array_interface__["data"][0]

    def _remember(self, array: np.ndarray) -> None:
        """Keep the memory that an array is a view of, as bytes by its first address."""
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        low, high = np.lib.array_utils.byte_bounds(root)
        if high > low and low not in self.memory:
            self.memory[low] = bytes_at(root, low, high - low)

    def holding(self, address: int) -> tuple[int, np.ndarray]:
        """Return the start and the bytes of the memory that an address lies in."""
        for low, data in self.memory.items():
            if low <= address < low + data.nbytes:
                return low, data
        raise LookupError(f"no array at {address:#x}")

    def empty(self, shape: Sequence[int], dtype: np.dtype) -> SimArray:
        """Return a new array, aligned as a GPU would, full of NaN."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self.array(self.allocate(size).view(dtype).reshape(shape))

    def allocate(self, size: int, misalignment: int = 0) -> np.ndarray:
        """Return memory of exactly that size; what lies around it is guarded."""
        raw = np.full(size + 2 * _ALIGNMENT, 0xFF, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT + misalignment
        return bytes_at(raw, raw.ctypes.data + start, size)

    def temporary(self, shape: Sequence[int], dtype: np.dtype) -> SimArray:
        """Return workspace."""
        return self.empty(shape, dtype)

    def dense_copy(self, array: Any, multiple: int = 1) -> SimArray:
        """Return an aligned copy whose rows start at multiples of some elements."""
        rows, columns = array.shape[:-1], array.shape[-1:]
        padded = tuple(-(-n // multiple) * multiple for n in columns)
        whole = self.empty((*rows, *padded), array.dtype)
        copy = whole[(..., *map(slice, array.shape[-1:]))]
        copy[...] = array
        return copy

    def clear(self, array: Any) -> None:
        """Fill an array with zeros."""
        array[...] = 0

    def to_host(self, array: Any) -> np.ndarray:
        """Return the array as a plain NumPy array."""
        return np.asarray(array)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """There is no other device to come back to."""
        yield

    def tensor_map(
        self,
        pointer: int,
        dtype: np.dtype,
        shape: Sequence[int],
        strides_bytes: Sequence[int],
        box: Sequence[int],
        swizzle: int = 128,
    ) -> bytes:
        """Describe an array as the simulator's tensor memory accelerator takes it."""
        return tensor_map.encode(pointer, dtype, shape, strides_bytes, box, swizzle)

    def kernels(self, specs: Sequence[KernelSpec]) -> list[KernelSpec]:
        """Compile kernels for the CPU."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self._executable, dict.fromkeys(specs)))
        return list(specs)

    def _executable(self, spec: KernelSpec) -> Path:
        return build.executable(spec, self.info.compute_capability, self.sources)

    def launch(
        self, kernel: KernelSpec, grid: int, block: int, shared: int,
        *arguments: ctypes.Array,
    ) -> None:  # fmt: skip
        """Run a kernel in a process of its own.

        Raises
        ------
        SimulationError
            If it reads or writes outside its arrays, does what C++ leaves undefined,
            or waits for what never comes.
        """
        path = self._executable(kernel)
        self.launched.append(kernel)
        run(self, path, kernel, grid, block, shared, arguments)


def bytes_at(array: np.ndarray, low: int, size: int) -> np.ndarray:
    """View memory as bytes; the view keeps the array alive."""

    class Interface:
        __array_interface__ = {
            "data": (low, False), "shape": (size,), "typestr": "|u1", "version": 3,
        }  # fmt: skip
        keeps = array

    return np.asarray(Interface())


def _padded(argument: bytes) -> bytes:
    alignment = tensor_map.ALIGNMENT
    return argument.ljust(-(-len(argument) // alignment) * alignment, b"\0")


def run(
    device: SimDevice,
    path: Path,
    spec: KernelSpec,
    grid: int,
    block: int,
    shared: int,
    arguments: Sequence[ctypes.Array],
) -> None:
    """Hand a launch to an executable and take the arrays back.

    The kernel's first argument begins with the pointers of `cupy_flash.params`; each
    begins at a multiple of 64 bytes, where tensor maps are found.
    """
    argument = b"".join(_padded(bytes(each)) for each in arguments)
    fields = params_dtype(spec.batch_axes).fields
    arrays: dict[int, np.ndarray] = {}
    fixups = []
    offsets = [fields[name][1] for name in POINTERS]
    pointers = [(at, *struct.unpack_from("<Q", argument, at)) for at in offsets]
    for offset, address in (*pointers, *tensor_map.find(argument)):
        if address:
            low, data = device.holding(address)
            arrays.setdefault(low, data)
            fixups.append((offset, list(arrays).index(low), address - low))
    head = _HEADER.pack(
        grid, block, shared, _ORDERS.index(device.order), device.early, device.seed,
        len(argument), len(fixups), len(arrays),
    )  # fmt: skip
    handle, name = tempfile.mkstemp(dir=build.cache(), suffix=".launch")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(head)
            file.writelines(_FIXUP.pack(*fixup) for fixup in fixups)
            file.write(argument)
            file.writelines(
                _ARRAY.pack(data.nbytes, low % _ALIGNMENT)
                for low, data in arrays.items()
            )
            file.writelines(data.tobytes() for data in arrays.values())
            start = file.tell() - sum(data.nbytes for data in arrays.values())
        try:
            done = subprocess.run(
                [str(path), name], capture_output=True, text=True,
                timeout=device.seconds, env=os.environ | _SANITIZERS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            seconds = f"{device.seconds:g} s"
            raise SimulationError(f"{spec.symbol}: no end after {seconds}") from None
        if done.returncode:
            report = done.stderr.strip()[:6000]
            raise SimulationError(f"{spec.symbol} ({done.returncode}): {report}")
        with open(name, "rb") as file:
            file.seek(start)
            for data in arrays.values():
                data[:] = np.frombuffer(file.read(data.nbytes), np.uint8)
    finally:
        if os.environ.get("CUPY_FLASH_SIM_KEEP"):
            print(f"{path} {name}", flush=True)
        else:
            os.unlink(name)
