"""The name of a kernel, and the end of the source text that makes it.

A `KernelSpec` is everything that is fixed when a kernel is compiled. It becomes a
struct of named constants, ``Traits``, and one ``extern "C"`` wrapper.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .configs import SimtTile
from .dtypes import ELEMENT_TYPES
from .params import params_dtype


@dataclass(frozen=True, slots=True)
class Variant:
    """The features that are compiled into a kernel."""

    left: bool = False
    right: bool = False
    softcap: bool = False
    alibi: bool = False
    bias: np.dtype | None = None
    mask: bool = False
    scale_first: bool = False

    @property
    def name(self) -> str:
        """The features in a kernel's name; empty if there are none."""
        parts = [
            name
            for name in ("left", "right", "softcap", "alibi", "mask", "scale_first")
            if getattr(self, name)
        ]
        if self.bias is not None:
            parts.append(f"bias_{ELEMENT_TYPES[self.bias].short}")
        return "_".join(parts)


# Kernel: its header, its function, and the struct of its shared memory if it has one.
_KERNELS = {
    ("simt", "forward"): ("simt/forward.cuh", "simt::ForwardStorage"),
    ("simt", "backward_dq"): ("simt/backward_dq.cuh", "simt::BackwardStorage"),
    ("simt", "backward_dkdv"): ("simt/backward_dkdv.cuh", "simt::BackwardStorage"),
    ("simt", "backward_dbias"): ("simt/backward_dbias.cuh", "simt::BackwardStorage"),
    ("passes", "delta"): ("passes/delta.cuh", None),
    ("passes", "reduce_dbias"): ("passes/reduce_dbias.cuh", None),
}


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One specialisation of one kernel."""

    family: str
    kernel: str
    dtype: np.dtype
    variant: Variant
    tile: SimtTile | None
    threads: int
    batch_axes: int

    @property
    def header(self) -> str:
        """The file in ``cuda_src`` that the kernel is in."""
        return _KERNELS[self.family, self.kernel][0]

    @property
    def symbol(self) -> str:
        """The kernel's name in the compiled module."""
        parts = [self.kernel, self.family, ELEMENT_TYPES[self.dtype].short]
        if self.tile is not None:
            parts.append(self.tile.name)
        if self.variant.name:
            parts.append(self.variant.name)
        if self.batch_axes != 1:
            parts.append(f"batch{self.batch_axes}")
        return "_".join(parts)

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory; the compiler checks the number."""
        if self.tile is None or self.family != "simt":
            return 0
        t = self.tile
        size = ELEMENT_TYPES[self.dtype].accumulator.itemsize
        widest = max(t.chunk_d, t.chunk_v)
        weights = t.rows * _pitch(t.columns, size)
        if self.kernel == "forward":
            own = t.rows * _pitch(t.chunk_d, size)
            return size * (own + t.columns * _pitch(widest, size) + weights)
        copies = 2 if t.resident else 1
        return size * (copies * (t.rows + t.columns) * _pitch(widest, size) + weights)

    def tail(self) -> str:
        """Return the end of the translation unit: traits and wrapper."""
        v = self.variant
        bias = "float" if v.bias is None else ELEMENT_TYPES[v.bias].cuda
        types = {"Element": ELEMENT_TYPES[self.dtype].cuda, "BiasElement": bias}
        flags = {
            "BandLeft": v.left,
            "BandRight": v.right,
            "Softcap": v.softcap,
            "Alibi": v.alibi,
            "Bias": v.bias is not None,
            "Mask": v.mask,
            "ScaleFirst": v.scale_first,
        }
        numbers = {"BatchAxes": self.batch_axes, "Threads": self.threads}
        blocks = 1
        if self.tile is not None:
            flags["Resident"] = self.tile.resident
            numbers |= {
                "Rows": self.tile.rows,
                "Columns": self.tile.columns,
                "ChunkD": self.tile.chunk_d,
                "ChunkV": self.tile.chunk_v,
            }
            blocks = self.tile.blocks
        lines = ["struct Traits {"]
        lines += [f"  using {name} = {cuda};" for name, cuda in types.items()]
        lines += [
            f"  static constexpr bool k{name} = {str(on).lower()};"
            for name, on in flags.items()
        ]
        lines += [f"  static constexpr int k{n} = {i};" for n, i in numbers.items()]
        lines += ["};"]
        params = f"Params<{self.batch_axes}>"
        size = params_dtype(self.batch_axes).itemsize
        lines.append(f'static_assert(sizeof({params}) == {size}, "params.py");')
        storage = _KERNELS[self.family, self.kernel][1]
        if storage is not None:
            lines.append(
                f"static_assert(sizeof({storage}<Traits>) == {self.shared_memory}, "
                '"spec.py");'
            )
        lines += [
            f'extern "C" __global__ void __launch_bounds__({self.threads}, {blocks})',
            f"{self.symbol}(const CUPY_FLASH_GRID_CONSTANT {params} params) {{",
            f"  {self.family}::{self.kernel}<Traits>(params);",
            "}",
        ]
        body = "\n".join(lines)
        return f"namespace cupy_flash {{\n\n{body}\n\n}}  // namespace cupy_flash\n"


def _pitch(columns: int, itemsize: int) -> int:
    """Elements from one row of a shared-memory tile to the next."""
    return columns + 16 // itemsize
