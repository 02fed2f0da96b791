"""What a probe is: a small kernel of one function of ``cuda_src/ptx``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupy_flash.params import POINTERS, params_dtype

Array = np.ndarray


@dataclass(frozen=True)
class Map:
    """A tensor map over q, k, v or out; see `cupy_flash.device.Device.tensor_map`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128


@dataclass(frozen=True)
class Probe:
    """A kernel that reads arrays q, k and v and writes an array out.

    It has what a compiler and a device ask of a `cupy_flash.spec.KernelSpec`.

    Attributes
    ----------
    body : str
        With `lane` of the warp, and `at`, the number of the thread in the grid, and
        `maps.map`, if there are any.
    inputs : callable
        Takes a random generator, returns up to three arrays.
    shape, dtype : of the result
    limit : callable, optional
        Takes the inputs, returns how far a GPU's result may be off; default: the bits
        are the same, but NaN may be any NaN.
    """

    name: str
    body: str
    inputs: Callable[[np.random.Generator], Sequence[Array]]
    shape: tuple[int, ...]
    dtype: Any = np.uint32
    limit: Callable[[Sequence[Array]], Array] | None = None
    grid: int = 1
    block: int = 32
    shared_memory: int = 0
    capability: int = 80
    maps: tuple[Map, ...] = ()
    batch_axes: int = field(default=1, init=False)

    @property
    def symbol(self) -> str:
        """The kernel's name."""
        return f"probe_{self.name}"

    @property
    def header(self) -> str:
        """What it includes, with all of ``ptx`` that its GPU has."""
        names = ("mma/backward.cuh", "wgmma/backward.cuh")
        return names[self.architecture_specific]

    @property
    def architecture_specific(self) -> bool:
        """Whether it is compiled for one architecture alone."""
        return self.capability == 90

    def tail(self) -> str:
        """Return the kernel."""
        maps, parameter = "", ""
        if self.maps:
            maps = f"struct Maps {{ ptx::TensorMap map[{len(self.maps)}]; }};"
            parameter = ", const CUPY_FLASH_GRID_CONSTANT Maps maps"
        return f"""
namespace cupy_flash {{
{maps}
extern "C" __global__ void __launch_bounds__({self.block}, 1)
{self.symbol}(const CUPY_FLASH_GRID_CONSTANT Params<1> params{parameter}) {{
  [[maybe_unused]] const int lane = int(threadIdx.x % 32u);
  [[maybe_unused]] const int at = int(blockIdx.x * {self.block}u + threadIdx.x);
  [[maybe_unused]] auto* const shared = dynamic_shared_memory();
{self.body}
}}
}}  // namespace cupy_flash
"""

    def arrays(self) -> list[Array]:
        """Return the inputs, always the same."""
        seed = sum(map(ord, self.name))
        return list(self.inputs(np.random.default_rng(seed)))

    def run(self, device: Any, inputs: Sequence[Any]) -> Any:
        """Launch it on a device; return the result, which lies there.

        On Hopper it is full of zeros before, so that copies can add to it.
        """
        out = device.empty(self.shape, np.dtype(self.dtype))
        if self.architecture_specific:
            device.clear(out)
        params = np.zeros(1, params_dtype(1))
        for name, array in zip(("q", "k", "v", "out"), (*inputs, out), strict=False):
            assert name in POINTERS
            params[name] = device.pointer(array)
        params["out"] = device.pointer(out)
        (kernel,) = device.kernels([self])
        arguments = [params.tobytes()]
        if self.maps:
            encoded = b"".join(
                device.tensor_map(
                    int(params[m.name][0]), np.dtype(m.dtype), m.shape,
                    m.strides_bytes, m.box, m.swizzle,
                )
                for m in self.maps
            )  # fmt: skip
            arguments.append(encoded)
        structs = [ctypes.create_string_buffer(data, len(data)) for data in arguments]
        device.launch(kernel, self.grid, self.block, self.shared_memory, *structs)
        return out


def to_halves(x: Array, kind: str) -> Array:
    """Return the bits of floats as fp16, or the upper halves of them as bf16."""
    if kind == "fp16":
        return x.astype(np.float16).view("u2")
    return (x.view("u4") >> 16).astype("u2")


def widen(bits: Array, kind: str) -> Array:
    """Return the numbers of which these are the bits."""
    if kind == "fp16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype("u4") << 16).view(np.float32).astype(np.float64)
