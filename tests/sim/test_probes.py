"""The twins of ``cuda_src/ptx`` against NumPy, and against what is recorded of them."""

from __future__ import annotations

import functools
import re

import ml_dtypes
import numpy as np
import pytest

from cupy_flash.compiler import source_root

from .build import HOST
from .probe import Array, Probe, widen
from .probes import PROBES, RECORD, assert_agrees, simulate

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
    """Headers without instructions are the same on the CPU; they call the others."""
    texts = {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted((source_root() / "ptx").glob("*.cuh"))
    }
    plain = {name for name, text in texts.items() if "asm" not in text}
    used = "".join([probe.body for probe in PROBES] + [texts[name] for name in plain])
    without = {"shared_address", "opaque"}
    for name, text in texts.items():
        functions = set(_FUNCTION.findall(text))
        if name not in plain:
            twin = (HOST / "ptx" / name).read_text(encoding="utf-8")
            assert functions <= set(_FUNCTION.findall(twin)), name
        for function in functions - without:
            assert re.search(rf"\b{function}\b", used), f"no probe of {function}"


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


def test_the_smaller_of_two_is_that_of_numpy() -> None:
    """-0 is smaller than 0."""
    a, b = _BY_NAME["min_or_nan"].arrays()
    got = results()["min_or_nan"]
    np.testing.assert_array_equal(got, np.minimum(a, b))
    zero = got == 0
    signs = np.signbit(a) | np.signbit(b)
    np.testing.assert_array_equal(np.signbit(got[zero]), signs[zero])


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_the_smaller_halves_are_those_of_numpy(kind: str) -> None:
    name = f"min_or_nan_{kind}x2"
    with np.errstate(invalid="ignore"):  # of NaN that signals
        a, b = (widen(x.view("u2"), kind) for x in _BY_NAME[name].arrays())
    got = widen(results()[name].view("u2"), kind)
    assert np.isnan(got).any() and (got == 0).any()
    np.testing.assert_array_equal(got, np.minimum(a, b))
    zero = got == 0
    signs = np.signbit(a) & (a <= 0) | np.signbit(b) & (b <= 0)
    np.testing.assert_array_equal(np.signbit(got[zero]), signs[zero])


def test_matrices_are_transposed() -> None:
    fragments, rows = _BY_NAME["stmatrix_transposed"].arrays()
    # What a lane gives of matrix i: rows 2t and 2t + 1 of column g.
    halves = fragments.view("u2").reshape(8, 4, 4, 2)  # [g][t][i][half]
    matrices = halves.transpose(2, 1, 3, 0).reshape(32, 8)
    got = results()["stmatrix_transposed"].view("u2").reshape(32, 8)
    np.testing.assert_array_equal(got[rows], matrices)


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


@pytest.mark.parametrize("name", [p.name for p in PROBES if "wgmma" in p.name])
def test_products_of_warpgroups_are_those_of_numpy(name: str) -> None:
    probe = _BY_NAME[name]
    kind, n, major = name.split("_")[1:]
    a, b = (widen(x, kind) for x in probe.arrays()[:2])
    product = a @ (b if major == "mn" else b.T)
    thread, i = np.ogrid[:128, : int(n) // 2]
    rows = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
    columns = i // 4 * 8 + thread % 4 * 2 + i % 2
    start = probe.arrays()[2] if "accumulate = true" in probe.body else 0
    np.testing.assert_array_equal(results()[name], product[rows, columns] + start)


def _zero_padded(x: Array, at: tuple[int, ...], box: tuple[int, ...]) -> Array:
    """Return the part of an array that begins at an index, zeros outside it."""
    part = np.zeros(box, x.dtype)
    index = np.meshgrid(*(np.arange(n) for n in box), indexing="ij")
    index = [i + first for i, first in zip(index, at, strict=True)]
    inside = np.logical_and.reduce(
        [(i >= 0) & (i < n) for i, n in zip(index, x.shape, strict=True)]
    )
    part[inside] = x[tuple(i[inside] for i in index)]
    return part


def test_loads_are_zero_padded_and_swizzled() -> None:
    (bits,) = _BY_NAME["tma_load_4"].arrays()
    x = bits.reshape(2, 19, 3, 72).transpose(0, 2, 1, 3)
    starts = ((0, 0, 0, 0), (1, 2, 8, 64), (0, 1, -3, -8), (0, 3, 0, 0), (1, 0, 4, 16))
    for start, got in zip(starts, results()["tma_load_4"], strict=True):
        part = _zero_padded(x, start, (1, 1, 16, 64)).reshape(16, 8, 8)
        for row, chunk in np.ndindex(16, 8):
            lies = got.view("u2").reshape(16, 8, 8)[row, chunk ^ row % 8]
            np.testing.assert_array_equal(lies, part[row, chunk])


def test_stores_are_clipped() -> None:
    """Outside the map, and outside the boxes, the array stays as it was."""
    (bits,) = _BY_NAME["tma_store_4"].arrays()
    tile = np.zeros((16, 8, 8), np.uint16)
    for row, chunk in np.ndindex(16, 8):
        tile[row, chunk] = bits.reshape(16, 8, 8)[row, chunk ^ row % 8]
    tile = tile.reshape(16, 64)
    want = np.zeros((2, 3, 19, 72), np.uint16)
    want[0, 0, :16, :56] = tile[:, :56]
    want[0, 0, 16:17, :56] = tile[:1, :56]
    want[0, 1, 4:17, 16:56] = tile[:13, :40]
    want[1, 2, 5:17, 24:56] = tile[:12, :32]
    got = results()["tma_store_4"].view("u2").reshape(2, 19, 3, 72)
    np.testing.assert_array_equal(got, want.transpose(0, 2, 1, 3))


def test_copies_of_bytes_are_those_of_numpy() -> None:
    (x,) = _BY_NAME["bulk_load"].arrays()
    for first, got in zip((0, 256), results()["bulk_load"], strict=True):
        part = x[first:]
        want = np.concatenate([x[508:512], part[12:260], part[:4]])
        np.testing.assert_array_equal(got, want)


def test_sums_of_copies_are_those_of_numpy() -> None:
    (x,) = _BY_NAME["bulk_reduce_add"].arrays()
    want = np.zeros(96, np.float32)
    for block in range(2):
        want[32 * block : 32 * block + 64] += x
        want[4:8] += x[8:12]
    np.testing.assert_array_equal(results()["bulk_reduce_add"], want)
