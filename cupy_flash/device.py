"""What stands below `launch`: devices that hold arrays and run kernels.

Everything above talks to a `Device`. `CuPyDevice` is a CUDA device through CuPy;
anything else (a simulator) takes part by giving its arrays an attribute
``__cupy_flash_device__`` that returns its own `Device`. NumPy arrays without
that attribute lie on the host, which is no device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from . import settings

_CUDA_DLPACK_TYPES = (2, 13)  # kDLCUDA, kDLCUDAManaged


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The facts about a GPU that decide which kernel it gets.

    Attributes
    ----------
    name : str
    compute_capability : int
        Ten times the major version plus the minor one: 90 for 9.0.
    multiprocessors : int
    shared_memory : int
        Bytes of dynamic shared memory a block can ask for.
    nvrtc : tuple of int
        Version of the run-time compiler, (0, 0) if there is none.
    """

    name: str
    compute_capability: int
    multiprocessors: int
    shared_memory: int
    nvrtc: tuple[int, int]


# Shared memory a block can have, in KiB, and multiprocessors of a usual card, for
# plans made without the GPU. Source: CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability".
_KNOWN = {
    50: (48, 5), 52: (48, 16), 53: (48, 2), 60: (48, 56), 61: (48, 20), 62: (48, 2),
    70: (96, 80), 72: (96, 8), 75: (64, 40), 80: (163, 108), 86: (99, 82),
    87: (163, 16), 89: (99, 128), 90: (227, 132), 100: (227, 148), 103: (227, 148),
    110: (227, 20), 120: (99, 170), 121: (99, 48),
}  # fmt: skip


class Device(Protocol):
    """Where arrays lie and kernels run.

    Its arrays have `shape`, `strides` in bytes and `dtype` as NumPy's do.
    """

    info: DeviceInfo

    def pointer(self, array: Any) -> int:
        """Return the address of the array's first element."""

    def empty(self, shape: Sequence[int], dtype: np.dtype) -> Any:
        """Return a new uninitialised C-contiguous array, to be given to the user."""

    def temporary(self, shape: Sequence[int], dtype: np.dtype) -> Any:
        """Return workspace for the present call; it outlives what is launched."""

    def dense_copy(self, array: Any, multiple: int = 1) -> Any:
        """Return an aligned copy in workspace, in C order.

        Its rows, along the last axis, start at multiples of `multiple` elements.
        """

    def clear(self, array: Any) -> None:
        """Fill an array that is contiguous with zeros on the current stream."""

    def to_host(self, array: Any) -> np.ndarray:
        """Copy an array to the host, which waits for it."""

    def active(self) -> AbstractContextManager:
        """Return a context in which this is the current device."""

    def tensor_map(
        self,
        pointer: int,
        dtype: np.dtype,
        shape: Sequence[int],
        strides_bytes: Sequence[int],
        box: Sequence[int],
        swizzle: int = 128,
    ) -> bytes:
        """Describe an array for the tensor memory accelerator, as a kernel takes it.

        Parameters
        ----------
        pointer : int
            Address of the first element, a multiple of 16.
        dtype : np.dtype
            float16, bfloat16, float32 or float64.
        shape : two to five ints
            The innermost axis first; its elements are neighbours.
        strides_bytes : one int less
            Of the axes after the innermost one, each a multiple of 16.
        box : as many ints as in `shape`
            What one instruction copies, each at most 256. Outside the array are zeros.
        swizzle : {128, 64, 32, 0}
            Bytes within which parts of 16 are permuted in shared memory; the innermost
            axis of the box is at most that long.

        Returns
        -------
        bytes
            128 of them, to be kept at an address that is a multiple of 64.

        Raises
        ------
        DriverError
            If there is no such map.
        """

    def kernels(self, specs: Sequence[Any]) -> list[Any]:
        """Compile or look up kernels and return what `launch` takes of each."""

    def launch(
        self, kernel: Any, grid: int, block: int, shared: int, *arguments: ctypes.Array
    ) -> None:
        """Enqueue a kernel on the current stream; it takes the arguments by value."""


def import_cupy() -> ModuleType:
    """Import CuPy, also where it can't make the folder of its cache.

    Raises
    ------
    ImportError
        If it isn't installed or can't be loaded.
    """
    if "cupy" not in sys.modules:
        settings.let_cupy_start()
    import cupy

    return cupy


class CuPyDevice:
    """A CUDA device, through CuPy."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._cupy = import_cupy()
        self._argument_at = self._cupy.cuda.function.CPointer
        self._on_current = contextlib.nullcontext()
        self._kernels: dict[Any, Any] = {}

    @functools.cached_property
    def info(self) -> DeviceInfo:
        """The facts about this GPU."""
        from .compiler import nvrtc_version

        runtime = self._cupy.cuda.runtime
        properties = runtime.getDeviceProperties(self.index)
        return DeviceInfo(
            name=properties["name"].decode(),
            compute_capability=10 * properties["major"] + properties["minor"],
            multiprocessors=properties["multiProcessorCount"],
            shared_memory=properties["sharedMemPerBlockOptin"]
            or properties["sharedMemPerBlock"],
            nvrtc=nvrtc_version(),
        )

    def count(self) -> int:
        """Return how many devices there are."""
        return self._cupy.cuda.runtime.getDeviceCount()

    def pointer(self, array: Any) -> int:
        """Return the address of the array's first element."""
        return array.data.ptr

    def empty(self, shape: Sequence[int], dtype: np.dtype) -> Any:
        """Return a new uninitialised C-contiguous array."""
        return self._cupy.ndarray(shape, dtype)

    def temporary(self, shape: Sequence[int], dtype: np.dtype) -> Any:
        """Return workspace for the present call.

        Usually it comes from CuPy's pool, whose order of reuse is that of the
        stream. A graph that is being captured runs later, when the pool may have
        given the memory to somebody else, so there the allocation becomes a node
        of the graph.
        """
        if not self._cupy.cuda.get_current_stream().is_capturing():
            return self._cupy.ndarray(shape, dtype)
        size = max(1, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        return self._cupy.ndarray(
            shape, dtype, memptr=self._cupy.cuda.malloc_async(size)
        )

    def dense_copy(self, array: Any, multiple: int = 1) -> Any:
        """Return an aligned copy in workspace, in C order.

        Its rows, along the last axis, start at multiples of `multiple` elements.

        What lies across the boundaries of its elements is copied byte by byte,
        because the GPU can't load an element from an address that isn't a multiple of
        its size.
        """
        size = array.itemsize
        aligned = not any(at % size for at in (array.data.ptr, *array.strides))
        unit = size if aligned else 1
        parts = self._cupy.ndarray(
            (*array.shape, size // unit),
            f"u{unit}",
            memptr=array.data,
            strides=(*array.strides, unit),
        )
        rows, columns = array.shape[:-1], array.shape[-1:]
        padded = tuple(-(-n // multiple) * multiple for n in columns)
        copy = self.temporary((*rows, *padded, size // unit), parts.dtype)
        inside = (..., *map(slice, array.shape))
        copy[(*inside, slice(None))] = parts
        return copy.view(array.dtype).reshape((*rows, *padded))[inside]

    def clear(self, array: Any) -> None:
        """Fill an array that is contiguous with zeros on the current stream."""
        array.data.memset_async(0, array.nbytes)

    def to_host(self, array: Any) -> np.ndarray:
        """Copy an array to the host, which waits for it."""
        return array.get()

    def active(self) -> AbstractContextManager:
        """Return a context in which this is the current device."""
        if self._cupy.cuda.runtime.getDevice() == self.index:
            return self._on_current
        return self._cupy.cuda.Device(self.index)

    def tensor_map(
        self,
        pointer: int,
        dtype: np.dtype,
        shape: Sequence[int],
        strides_bytes: Sequence[int],
        box: Sequence[int],
        swizzle: int = 128,
    ) -> bytes:
        """Describe an array for the tensor memory accelerator, as a kernel takes it."""
        return _encode_tensor_map(pointer, dtype, shape, strides_bytes, box, swizzle)

    def kernels(self, specs: Sequence[Any]) -> list[Any]:
        """Compile or look up kernels; the device must be current."""
        missing = [spec for spec in dict.fromkeys(specs) if spec not in self._kernels]
        if missing:
            from .compiler import load

            self._kernels.update(zip(missing, load(missing, self.info), strict=True))
        return [self._kernels[spec] for spec in specs]

    def launch(
        self, kernel: Any, grid: int, block: int, shared: int, *arguments: ctypes.Array
    ) -> None:
        """Enqueue a kernel on the current stream; it takes the arguments by value."""
        # CuPy would take NumPy arrays too, but is slow to find out where they lie; a
        # CPointer, which it doesn't document, says so.
        found = tuple(map(self._argument_at, map(ctypes.addressof, arguments)))
        kernel((grid,), (block,), found, shared)


class DriverError(RuntimeError):
    """A function of the CUDA driver failed; the message says which and how."""


# Source: CUDA Driver API, "Tensor Map Object Management".
_TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 64
_TENSOR_MAP_TYPES = {"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
_TENSOR_MAP_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_NO_INTERLEAVE = 0
_PROMOTE_TO_256_BYTES = 3  # what the L2 cache fetches at a time
_FILL_WITH_ZEROS = 0


@functools.cache
def _driver() -> ctypes.CDLL:
    """Return the CUDA driver's library.

    Raises
    ------
    DriverError
        If it can't be loaded.
    """
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise DriverError(f"{name} can't be loaded: {_first_line(error)}") from None


def _encode_tensor_map(
    pointer: int,
    dtype: np.dtype,
    shape: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    swizzle: int,
) -> bytes:
    """`Device.tensor_map`, by the CUDA driver."""
    rank = len(shape)
    memory = ctypes.create_string_buffer(_TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT)
    at = -ctypes.addressof(memory) % _TENSOR_MAP_ALIGNMENT
    sizes = ctypes.c_uint64 * rank
    strides = ctypes.c_uint64 * (rank - 1)
    counts = ctypes.c_uint32 * rank
    driver = _driver()
    try:
        encode = driver.cuTensorMapEncodeTiled
    except AttributeError:
        raise DriverError(
            "the CUDA driver is older than tensor maps, which came with CUDA 12.0"
        ) from None
    code = encode(
        ctypes.c_void_p(ctypes.addressof(memory) + at),
        _TENSOR_MAP_TYPES[dtype.name],
        rank,
        ctypes.c_void_p(pointer),
        sizes(*map(int, shape)),
        strides(*map(int, strides_bytes)),
        counts(*map(int, box)),
        counts(*(1,) * rank),
        _NO_INTERLEAVE,
        _TENSOR_MAP_SWIZZLES[swizzle],
        _PROMOTE_TO_256_BYTES,
        _FILL_WITH_ZEROS,
    )
    if code:
        raise DriverError(
            f"cuTensorMapEncodeTiled: {_error_name(driver, code)}, with pointer="
            f"{pointer:#x}, dtype={dtype.name}, shape={tuple(shape)}, strides_bytes="
            f"{tuple(strides_bytes)}, box={tuple(box)}, swizzle={swizzle}"
        )
    return memory.raw[at : at + _TENSOR_MAP_BYTES]


def _error_name(driver: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(name))
    return f"{name.value.decode()} ({code})" if name.value else f"CUresult {code}"


@functools.cache
def cupy_device(index: int) -> CuPyDevice:
    """Return the one object that stands for a CUDA device."""
    return CuPyDevice(index)


class NoDeviceError(RuntimeError):
    """There is no CUDA device; the message is the reason, in one line."""


def current_device() -> CuPyDevice:
    """Return CuPy's current CUDA device.

    Raises
    ------
    NoDeviceError
        If CuPy isn't installed, can't be imported or finds no device.
    """
    try:
        cupy = import_cupy()
    except ImportError as error:
        raise NoDeviceError(f"CuPy can't be imported: {_first_line(error)}") from None
    try:
        return cupy_device(cupy.cuda.runtime.getDevice())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise NoDeviceError(f"CuPy finds no GPU: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def hypothetical(name: str) -> DeviceInfo:
    """Return the facts about a GPU that need not be there, such as ``"sm_86"``."""
    match = re.fullmatch(r"sm_?(\d{2,3})a?", str(name))
    if match is None or int(match[1]) not in _KNOWN:
        known = ", ".join(f"sm_{c}" for c in _KNOWN)
        raise ValueError(f"device is {name!r}; accepted: {known}")
    from .compiler import nvrtc_version

    capability = int(match[1])
    kib, multiprocessors = _KNOWN[capability]
    return DeviceInfo(
        f"sm_{capability}", capability, multiprocessors, kib * 1024, nvrtc_version()
    )


# How to get from an array to its device, for the types that have been met; the host
# is None. A dictionary, because every array of every call is looked up.
_RESOLVERS: dict[type, Callable[[Any], Device | None]] = {np.ndarray: lambda _: None}


def owner(name: str, array: Any) -> tuple[Device | None, Any]:
    """Return the device that holds an array, None for the host, and the array.

    A foreign array on a CUDA device comes back as a CuPy view of its memory.

    Raises
    ------
    TypeError
        If the object isn't an array, or is a foreign array on the host.
    """
    resolve = _RESOLVERS.get(type(array))
    if resolve is not None:
        return resolve(array), array
    if hasattr(array, "__cupy_flash_device__"):
        _RESOLVERS[type(array)] = lambda a: a.__cupy_flash_device__()
        return array.__cupy_flash_device__(), array
    if isinstance(array, np.ndarray):
        return None, array
    if type(array).__module__.partition(".")[0] == "cupy":
        cupy = import_cupy()
        if isinstance(array, cupy.ndarray):
            _RESOLVERS[cupy.ndarray] = lambda a: cupy_device(a.data.device_id)
            return cupy_device(array.data.device_id), array
    return _import(name, array)


def _import(name: str, array: Any) -> tuple[Device, Any]:
    """View a foreign array on a CUDA device as a CuPy array."""
    kind = f"{type(array).__module__}.{type(array).__qualname__}"
    accepted = (
        "accepted: a CuPy array, a NumPy array, or an object with __dlpack__ on a CUDA "
        "device"
    )
    where = getattr(array, "__dlpack_device__", None)
    if where is None:
        raise TypeError(f"{name} is a {kind}; {accepted}")
    device_type, index = where()
    if device_type not in _CUDA_DLPACK_TYPES:
        raise TypeError(
            f"{name} is a {kind} that doesn't lie on a CUDA device; {accepted}"
        )
    try:
        cupy = import_cupy()
    except ImportError:
        raise TypeError(
            f"{name} is a {kind} on a CUDA device, which needs CuPy: "
            "pip install 'cupy-flash[cuda13]'"
        ) from None

    # A torch tensor that requires a gradient refuses to be exported as it is.
    array = array.detach() if hasattr(array, "detach") else array
    with cupy.cuda.Device(index):
        view = cupy.from_dlpack(array)
    return cupy_device(view.data.device_id), view
