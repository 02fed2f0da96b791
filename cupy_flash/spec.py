"""The name of a kernel, and the end of the source text that makes it.

A `KernelSpec` is everything that is fixed when a kernel is compiled. It becomes a
struct of named constants, ``Traits``, and one ``extern "C"`` wrapper.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .dtypes import ELEMENT_TYPES
from .params import params_dtype
from .tiles import Tile
from .variant import Variant

# Kernel: its header, and the struct of its shared memory if it has one.
_KERNELS = {
    ("simt", "forward"): ("simt/forward.cuh", "simt::ForwardStorage<Traits>"),
    ("simt", "backward_dq"): ("simt/backward_dq.cuh", "simt::BackwardStorage<Traits>"),
    ("simt", "backward_dkdv"): (
        "simt/backward_dkdv.cuh",
        "simt::BackwardStorage<Traits>",
    ),
    ("simt", "backward_dbias"): (
        "simt/backward_dbias.cuh",
        "simt::BackwardStorage<Traits>",
    ),
    ("mma", "forward"): ("mma/forward.cuh", "mma::ForwardStorage<Traits>"),
    ("mma", "backward"): ("mma/backward.cuh", "mma::BackwardStorage<Traits, true>"),
    ("mma", "backward_dkdv"): (
        "mma/backward.cuh",
        "mma::BackwardStorage<Traits, false>",
    ),
    ("mma", "backward_dq"): ("mma/backward_dq.cuh", "mma::BackwardDqStorage<Traits>"),
    ("mma", "backward_dbias"): (
        "mma/backward_dbias.cuh",
        "mma::BackwardDbiasStorage<Traits>",
    ),
    ("wgmma", "forward"): ("wgmma/forward.cuh", "wgmma::ForwardStorage<Traits>"),
    ("wgmma", "backward"): ("wgmma/backward.cuh", "wgmma::BackwardStorage<Traits>"),
    ("wgmma", "backward_by_role"): (
        "wgmma/backward_by_role.cuh",
        "wgmma::BackwardStorage<Traits, true>",
    ),
    ("wgmma", "backward_terms"): ("wgmma/backward_terms.cuh", None),
    ("passes", "delta"): ("passes/delta.cuh", None),
    ("mma", "convert_dq"): ("mma/convert_dq.cuh", "mma::ConvertDqStorage<Traits>"),
    ("passes", "reduce_dbias"): ("passes/reduce_dbias.cuh", None),
}

# Kernels that have a second argument: its type.
_MAPS = {
    ("wgmma", "forward"): "wgmma::ForwardMaps",
    ("wgmma", "backward"): "wgmma::BackwardMaps",
    ("wgmma", "backward_by_role"): "wgmma::BackwardMaps",
}
# Families for one architecture, whose code runs on no other.
_ARCHITECTURE_SPECIFIC = ("wgmma",)


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One specialisation of one kernel."""

    family: str
    kernel: str
    dtype: np.dtype
    variant: Variant
    tile: Tile | None
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
        if self.tile is None or _KERNELS[self.family, self.kernel][1] is None:
            return 0
        return self.tile.shared_memory(self.kernel, self.dtype, self.variant)

    @property
    def takes_maps(self) -> bool:
        """Whether the kernel copies by tensor maps, which are its second argument."""
        return (self.family, self.kernel) in _MAPS

    @property
    def architecture_specific(self) -> bool:
        """Whether the kernel has instructions of one architecture alone."""
        return self.family in _ARCHITECTURE_SPECIFIC

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
            "Ragged": v.ragged,
        }
        numbers = {"BatchAxes": self.batch_axes, "Threads": self.threads}
        blocks = 1
        if self.tile is not None:
            for name, value in self.tile.constants(self.dtype, v).items():
                (flags if isinstance(value, bool) else numbers)[name] = value
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
                f'static_assert(sizeof({storage}) == {self.shared_memory}, "spec.py");'
            )
        parameters = [f"const CUPY_FLASH_GRID_CONSTANT {params} params"]
        arguments = ["params"]
        if self.takes_maps:
            maps = _MAPS[self.family, self.kernel]
            parameters.append(f"const CUPY_FLASH_GRID_CONSTANT {maps} maps")
            arguments.append("maps")
        lines += [
            f'extern "C" __global__ void __launch_bounds__({self.threads}, {blocks})',
            f"{self.symbol}({', '.join(parameters)}) {{",
            f"  {self.family}::{self.kernel}<Traits>({', '.join(arguments)});",
            "}",
        ]
        body = "\n".join(lines)
        return f"namespace cupy_flash {{\n\n{body}\n\n}}  // namespace cupy_flash\n"
