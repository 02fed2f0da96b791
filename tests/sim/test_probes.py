"""The twins of ``cuda_src/ptx`` against NumPy, and against what is recorded of them."""

from __future__ import annotations

import functools
import re

import ml_dtypes
import numpy as np
import pytest

from cupy_flash.compiler import source_root

from .build import HOST
from .probes import PROBES, RECORD, Array, Probe, assert_agrees, simulate

_BY_NAME = {probe.name: probe for probe in PROBES}
_FUNCTION = re.compile(r"^(?:CUPY_FLASH_DEVICE|inline) [\w ]+?[*&]? ?(\w+)\(", re.M)


@functools.cache
def results() -> dict[str, Array]:
    return simulate()


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_record(probe: Probe) -> None:
    """``python -m tests.sim.probes`` writes it."""
    with np.load(RECORD) as recorded:
        assert_agrees(probe, results()[probe.name], recorded[probe.name])


def test_every_function_has_a_twin_and_a_probe() -> None:
    without = {"shared_address", "opaque", "cp_async_commit", "cp_async_wait"}
    for path in sorted((source_root() / "ptx").glob("*.cuh")):
        names = set(_FUNCTION.findall(path.read_text(encoding="utf-8")))
        twin = (HOST / "ptx" / path.name).read_text(encoding="utf-8")
        assert names <= set(_FUNCTION.findall(twin)), path.name
        for name in names - without - {"named_barrier"}:
            used = [probe for probe in PROBES if f"ptx::{name}" in probe.body]
            assert used, f"no probe of {name}"


def test_conversions_are_those_of_numpy() -> None:
    got = results()
    wide = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(got["fp16_to_float"], wide)
    for name, dtype in (("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)):
        low, high = _BY_NAME[f"floats_to_{name}x2"].arrays()
        with np.errstate(over="ignore"):
            pair = np.stack([low, high], axis=1).astype(dtype)
        bits = got[f"floats_to_{name}x2"].view(np.uint16).reshape(-1, 2)
        nan = np.isnan(pair.astype(np.float32))
        np.testing.assert_array_equal(bits[~nan], pair.view(np.uint16)[~nan])


def test_products_are_those_of_numpy() -> None:
    """With 16 x 8 sums spread over the lanes as the PTX ISA says."""
    a, b, c = _BY_NAME["mma_fp64"].arrays()
    left, right, sums = np.zeros((16, 8)), np.zeros((8, 8)), np.zeros((16, 8))
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i in range(4):
            left[g + 8 * (i % 2), t + 4 * (i // 2)] = a[lane, i]
            sums[g + 8 * (i // 2), 2 * t + i % 2] = c[lane, i]
        for i in range(2):
            right[t + 4 * i, g] = b[lane, i]
    product = sums + left @ right
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i in range(4):
            np.testing.assert_allclose(
                results()["mma_fp64"][lane, i],
                product[g + 8 * (i // 2), 2 * t + i % 2], rtol=1e-12,
            )  # fmt: skip
