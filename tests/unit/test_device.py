"""Which device an array lies on, and what is known of devices."""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_flash import compiler, device, flash_attention
from cupy_flash.configs import SIMT_FORWARD
from cupy_flash.device import (
    CuPyDevice,
    Device,
    DeviceInfo,
    cupy_device,
    hypothetical,
    owner,
)
from cupy_flash.spec import KernelSpec, Variant

from .recording import DeviceArray, RecordingDevice

HOPPER = DeviceInfo("a GPU", 90, 132, 227 * 1024, (13, 0))


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """`owner` keeps the types that it has met; here each test meets them anew."""
    monkeypatch.setattr(device, "_RESOLVERS", {np.ndarray: lambda _: None})


# --- owner: the host ------------------------------------------------------------------


class Subclass(np.ndarray):
    """What unit libraries and the like make."""


@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_numpy_arrays_lie_on_the_host(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape)
    found, same = owner("q", array)
    assert found is None and same is array


def test_subclasses_of_numpy_arrays_lie_on_the_host() -> None:
    array = np.zeros((4, 8), np.float32).view(Subclass)
    found, same = owner("q", array)
    assert found is None and same is array
    out = flash_attention(array, array, array)
    assert out.shape == (4, 8) and not out.any()


class Foreign:
    """An array of a library that the package knows nothing of."""

    def __init__(self, device_type: int, index: int = 0) -> None:
        self.where = (device_type, index)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.where

    def __dlpack__(self, **_: Any) -> None:
        raise AssertionError("exported, though it lies on no GPU")


class Unplaced:
    """Exports itself, but can't say where it lies."""

    def __dlpack__(self, **_: Any) -> None:
        raise AssertionError("exported, though it lies nowhere")


# 1: the CPU; 3: pinned memory; 7: Vulkan; 10: ROCm.
@pytest.mark.parametrize("kind", [1, 3, 7, 10])
def test_foreign_arrays_on_other_devices_are_refused(kind: int) -> None:
    with pytest.raises(TypeError) as raised:
        owner("bias", Foreign(kind))
    message = str(raised.value)
    assert "bias" in message and "Foreign" in message and "CUDA" in message
    assert "accepted: a CuPy array, a NumPy array" in message


class CloseToCuPy:
    """Says that it comes from CuPy, as a matrix of cupyx does."""


CloseToCuPy.__module__ = "cupy.sparse"


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        ([[1.0]], "list"),
        ((1.0,), "tuple"),
        (1.0, "float"),
        (np.float32(1), "float32"),
        (None, "NoneType"),
        ("q", "str"),
        (memoryview(b"abcd"), "memoryview"),
        (Unplaced(), "Unplaced"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_no_array_is_refused(array: object, kind: str) -> None:
    with pytest.raises(TypeError) as raised:
        owner("q", array)
    message = str(raised.value)
    assert message.startswith("q is a ") and kind in message
    assert "accepted: a CuPy array, a NumPy array" in message


def test_what_only_resembles_cupy_is_refused() -> None:
    pytest.importorskip("cupy")
    with pytest.raises(TypeError, match="CloseToCuPy"):
        owner("q", CloseToCuPy())


# --- owner: devices -------------------------------------------------------------------


def test_an_array_can_name_its_device() -> None:
    recorder = RecordingDevice()
    array = recorder.array(np.zeros(3))
    for _ in range(2):  # the second time its type is known
        found, same = owner("q", array)
        assert found is recorder and same is array
    other = RecordingDevice()
    assert owner("q", other.array(np.zeros(3)))[0] is other
    assert owner("q", np.zeros(3))[0] is None
    assert DeviceArray in device._RESOLVERS


class Imported:
    """Stands for what `cupy.from_dlpack` returns."""

    def __init__(self, index: int) -> None:
        self.data = SimpleNamespace(device_id=index)


class Tensor(Foreign):
    """A tensor that has to be cut off from its history before it is exported."""

    detached = False

    def detach(self) -> Tensor:
        copy = Tensor(*self.where)
        copy.detached = True
        return copy


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, Any]]]:
    """What is handed to CuPy, with the device that is current then."""
    cupy = pytest.importorskip("cupy")
    seen: list[tuple[int, Any]] = []
    current: list[int] = []

    class FakeDevice:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *_: object) -> None:
            current.pop()

    def from_dlpack(array: Any) -> Imported:
        seen.append((current[-1], array))
        return Imported(current[-1])

    monkeypatch.setattr(cupy.cuda, "Device", FakeDevice)
    monkeypatch.setattr(cupy, "from_dlpack", from_dlpack)
    yield seen
    assert not current


@pytest.mark.parametrize("kind", [2, 13])  # CUDA memory, managed CUDA memory
def test_foreign_arrays_on_a_gpu_are_viewed(kind: int, imports: list) -> None:
    array = Foreign(kind, 3)
    found, view = owner("q", array)
    assert found is cupy_device(3)
    assert isinstance(view, Imported)
    assert imports == [(3, array)]


def test_a_tensor_is_detached_first(imports: list) -> None:
    owner("q", Tensor(2, 1))
    ((index, tensor),) = imports
    assert index == 1 and tensor.detached


# --- Devices --------------------------------------------------------------------------


def test_there_is_one_object_for_a_gpu() -> None:
    """Kernels are kept in it, and `is` tells devices apart."""
    pytest.importorskip("cupy")
    assert cupy_device(0) is cupy_device(0)
    assert cupy_device(0) is not cupy_device(1)
    assert cupy_device(1).index == 1


@pytest.mark.parametrize("kind", [CuPyDevice, RecordingDevice])
def test_devices_have_the_whole_interface(kind: type) -> None:
    for name, method in inspect.getmembers(Device, inspect.isfunction):
        if name.startswith("_"):
            continue
        found = getattr(kind, name)
        assert inspect.signature(found).parameters.keys() == (
            inspect.signature(method).parameters.keys()
        ), name


class HostCuPy:
    """As much of CuPy as a copy needs, over host memory."""

    class Array(np.ndarray):
        """An array whose `data` is a pointer, as CuPy's is."""

        @property
        def data(self) -> SimpleNamespace:
            """The address of the first element."""
            address = self.__array_interface__["data"][0]
            return SimpleNamespace(
                ptr=address, memset_async=functools.partial(ctypes.memset, address)
            )

    cuda = SimpleNamespace(
        get_current_stream=lambda: SimpleNamespace(is_capturing=lambda: False),
        function=SimpleNamespace(CPointer=int),
    )

    @classmethod
    def ndarray(
        cls, shape: tuple[int, ...], dtype: object, memptr: object = None,
        strides: tuple[int, ...] | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Return a new array full of 0xFF, or a view of memory."""
        dtype = np.dtype(dtype)
        if memptr is None:
            size = int(np.prod(shape)) * dtype.itemsize
            raw = np.full(size + 256, 0xFF, np.uint8)
            start = -raw.ctypes.data % 256
            found = raw[start : start + size].view(dtype).reshape(shape)
        else:
            interface = {
                "data": (memptr.ptr, False), "shape": shape, "strides": strides,
                "typestr": dtype.str, "version": 3,
            }  # fmt: skip
            found = np.asarray(SimpleNamespace(__array_interface__=interface))
        return found.view(cls.Array)


def host_gpu(monkeypatch: pytest.MonkeyPatch) -> CuPyDevice:
    monkeypatch.setattr(device, "import_cupy", lambda: HostCuPy)
    return CuPyDevice(0)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i8", "?"])
@pytest.mark.parametrize("multiple", [1, 2, 8])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 7), (2, 0, 3), (3, 8)])
@pytest.mark.parametrize("shift", [0, 1])
def test_copies(
    dtype: str, multiple: int, shape: tuple[int, ...], shift: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """From any strides and any address into rows of a multiple of elements."""
    kind = np.dtype(dtype)
    gap = 2 * kind.itemsize
    strides = tuple(
        gap * int(np.prod([2 * n + 1 for n in shape[axis + 1 :]]))
        for axis in range(len(shape))
    )
    size = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n) + 64
    raw = np.zeros(max(size, 64) + 16, np.uint8)
    start = -raw.ctypes.data % 16 + shift
    array = np.ndarray(shape, kind, raw, start, strides)
    array[...] = (np.arange(array.size) % 100).reshape(shape)
    array = array.view(HostCuPy.Array)
    copy = host_gpu(monkeypatch).dense_copy(array, multiple)
    assert copy.shape == shape and copy.dtype == kind
    np.testing.assert_array_equal(copy, array)
    assert copy.data.ptr % 16 == 0
    if not shape or not array.size:
        return
    rows = (*shape[:-1], -(-shape[-1] // multiple) * multiple)
    recorded = RecordingDevice()
    with recorded.active():
        other = recorded.dense_copy(array, multiple)
    assert copy.strides == np.empty(rows, kind).strides == other.strides
    np.testing.assert_array_equal(other, array)


def test_whole_elements_are_copied_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte only where it must be."""
    units = []

    def recording(shape: tuple[int, ...], dtype: object, **rest: object) -> np.ndarray:
        if rest.get("memptr") is not None:
            units.append(np.dtype(dtype).itemsize)
        return HostCuPy.ndarray(shape, dtype, **rest)

    gpu = host_gpu(monkeypatch)
    gpu._cupy = SimpleNamespace(ndarray=recording, cuda=HostCuPy.cuda)
    raw = HostCuPy.ndarray((512,), np.uint8)
    for start, step in ((0, 8), (4, 12), (2, 8), (0, 10)):
        array = np.ndarray((6, 2), np.float32, raw, start, (4 * step, step))
        gpu.dense_copy(array.view(HostCuPy.Array), 4)
    assert units == [4, 4, 1, 1]


def test_a_gpu_compiles_each_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    loaded = []

    def load(specs: Sequence[KernelSpec], info: DeviceInfo) -> list[object]:
        assert info is HOPPER
        loaded.extend(specs)
        return [object() for _ in specs]

    monkeypatch.setattr(compiler, "load", load)
    gpu, other = CuPyDevice(0), CuPyDevice(1)
    gpu.__dict__["info"] = other.__dict__["info"] = HOPPER

    def spec(dtype: type) -> KernelSpec:
        tile = SIMT_FORWARD[0].tile
        return KernelSpec(
            "simt", "forward", np.dtype(dtype), Variant(), tile, tile.threads, 1
        )

    single, half, double = map(spec, (np.float32, np.float16, np.float64))
    (first,) = gpu.kernels([single])
    second, again, third, repeated = gpu.kernels([half, single, double, half])
    assert again is first and repeated is second
    assert len({id(first), id(second), id(third)}) == 3
    assert other.kernels([single])[0] is not first
    assert loaded == [single, half, double, single]
    assert gpu.kernels([]) == []


def test_kernels_are_told_where_their_arguments_lie() -> None:
    pytest.importorskip("cupy")
    arguments = [ctypes.create_string_buffer(data, len(data)) for data in (b"ab", b"c")]
    launched = []

    def kernel(grid: tuple, block: tuple, found: tuple, shared: int) -> None:
        values = [
            ctypes.string_at(pointer.ptr, len(argument))
            for pointer, argument in zip(found, arguments, strict=True)
        ]
        launched.append((grid, block, values, shared))

    CuPyDevice(0).launch(kernel, 3, 128, 1000, *arguments)
    assert launched == [((3,), (128,), [b"ab", b"c"], 1000)]


def test_all_bytes_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    array = HostCuPy.ndarray((2, 3), np.float32)
    host_gpu(monkeypatch).clear(array)
    assert not array.any()


# --- hypothetical ---------------------------------------------------------------------


@pytest.mark.parametrize("capability", device._KNOWN)
@pytest.mark.parametrize("spelling", ["sm_{}", "sm{}", "sm_{}a"])
def test_gpus_that_need_not_be_there(capability: int, spelling: str) -> None:
    info = hypothetical(spelling.format(capability))
    assert info.name == f"sm_{capability}"
    assert info.compute_capability == capability
    assert info.multiprocessors > 0
    assert 48 * 1024 <= info.shared_memory <= 227 * 1024
    assert info.nvrtc == compiler.nvrtc_version()


@pytest.mark.parametrize(
    ("capability", "kib"),
    [(61, 48), (70, 96), (75, 64), (80, 163), (86, 99), (90, 227)],
)
def test_shared_memory_of_gpus(capability: int, kib: int) -> None:
    """Opt-in maximum of a block, CUDA C++ Programming Guide."""
    assert hypothetical(f"sm_{capability}").shared_memory == kib * 1024


@pytest.mark.parametrize(
    "name",
    ["", "sm_", "sm_20", "sm_91", "sm_999", "sm_1000", "90", "sm_90 ", "SM_90", "H100",
     "compute_90", "sm_90aa", 90, 9.0, ("sm_90",)],
)  # fmt: skip
def test_unknown_gpus_are_refused(name: object) -> None:
    with pytest.raises(ValueError) as raised:
        hypothetical(name)  # type: ignore[arg-type]
    message = str(raised.value)
    assert f"device is {name!r}" in message
    assert "sm_50" in message and "sm_90" in message and "sm_121" in message
