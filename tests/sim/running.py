"""From NumPy arrays to the simulated GPU, through the library, and back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

import cupy_flash
from cupy_flash.compiler import source_root
from cupy_flash.device import DeviceInfo, hypothetical

from ..cases import Array, Case, Inputs, compare, expect, expect_case, make
from .device import SimDevice, bytes_at

# Few multiprocessors, so that a bias's gradient isn't summed in many parts.
MULTIPROCESSORS = 4


def gpu(name: str) -> DeviceInfo:
    """Return the facts about a GPU such as "sm_90", with few multiprocessors."""
    info = hypothetical(name)
    return DeviceInfo(
        info.name, info.compute_capability, MULTIPROCESSORS, info.shared_memory,
        (13, 0),
    )  # fmt: skip


def changed_sources(folder: Path, file: str, *changes: tuple[str, str]) -> Path:
    """Copy ``cuda_src`` into a folder and replace text that stands once in a file."""
    sources = folder / "cuda_src"
    shutil.copytree(source_root(), sources)
    path = sources / file
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, f"{file} has changed: {old}"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return sources


def mirror(device: SimDevice, x: Array) -> Any:
    """Copy an array with its strides and its alignment; around it is guarded."""
    if x.size == 0:
        return device.empty(x.shape, x.dtype)
    low, high = np.lib.array_utils.byte_bounds(x)
    memory = device.allocate(high - low, low % 16)
    memory[:] = bytes_at(x, low, high - low)
    copy = np.ndarray(
        x.shape, x.dtype, memory, x.__array_interface__["data"][0] - low, x.strides
    )
    return device.array(copy)


def run(
    inputs: Inputs,
    device: SimDevice,
    config: Any = None,
    *,
    deterministic: bool = True,
    gradients: bool = True,
) -> dict[str, Array]:
    """Run forward and backward; return the results as plain arrays."""
    arrays = {name: mirror(device, x) for name, x in inputs.arrays.items()}
    before = {name: np.array(x) for name, x in arrays.items()}
    q, k, v, dout = (arrays.pop(name) for name in ("q", "k", "v", "dout"))
    dlse = arrays.pop("dlse", None)
    options = inputs.scalars | arrays | {"config": config}
    out, lse = cupy_flash.flash_attention(q, k, v, **options, return_lse=True)
    results = {"out": out, "lse": lse}
    if gradients:
        bias = "bias" in inputs.options
        values = cupy_flash.flash_attention_backward(
            dout, q, k, v, out, lse, **options, dlse=dlse, bias_grad=bias,
            deterministic=deterministic,
        )  # fmt: skip
        results |= zip(("dq", "dk", "dv", "dbias"), values, strict=False)
    for name, x in {**arrays, "q": q, "k": k, "v": v, "dout": dout}.items():
        assert _bits(x).tobytes() == _bits(before[name]).tobytes(), f"{name} written"
    return {name: np.array(x) for name, x in results.items()}


def _bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.uint8)


def check(
    inputs: Inputs, device: SimDevice, config: Any = None, **keywords: Any
) -> dict[str, Array]:
    """`run`, held against the float64 reference; returns the results."""
    results = run(inputs, device, config, **keywords)
    truths = expect(inputs, gradients=keywords.get("gradients", True))
    compare({name: results[name] for name in truths}, truths)
    return results


def check_case(
    case: Case, device: SimDevice, config: Any = None, **keywords: Any
) -> dict[str, Array]:
    """`check` of a case."""
    results = run(make(case), device, config, gradients=case.gradients, **keywords)
    truths = expect_case(case)
    compare({name: results[name] for name in truths}, truths)
    return results
