"""The family `wgmma` on the CPU, against the float64 reference.

Tiles are small, so that few queries and keys take every path of the kernel. Blocks run
one after the other: with one multiprocessor a single block computes everything, from
one piece of work to the next.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupy_flash import flash_attention, plan_wgmma
from cupy_flash.tiles import WgmmaTile

from ..cases import (
    ROWS,
    Array,
    Case,
    Inputs,
    assert_same,
    compare,
    compare_closely,
    expect,
    expect_case,
    make,
    raised,
)
from .device import SimDevice
from .running import gpu, mirror, run

_WAYS: tuple[dict[str, Any], ...] = (
    {}, {"order": "descending"}, {"order": "random", "early": True},
)  # fmt: skip

SMALL = WgmmaTile(1, 32, 64, 64)
# A group of queries under a causal mask has two tiles of keys less than the next one.
DEEP = WgmmaTile(2, 32, 64, 64, stages=4)
SHALLOW = WgmmaTile(3, 32, 64, 64, stages=2)
SINGLE = WgmmaTile(2, 32, 64, 64, stages=1)
TURNS = WgmmaTile(2, 48, 64, 64, stages=3, ping_pong=True)
WIDEST = WgmmaTile(4, 16, 64, 64, stages=8, ping_pong=True)
# Where the output takes the place of queries, of which there are two tiles or one.
TOGETHER = WgmmaTile(1, 208, 64, 64, stages=4)
ALONE = WgmmaTile(1, 144, 64, 64, stages=6)
# The same with panels of other sizes.
NARROWER = WgmmaTile(2, 96, 192, 128)
WIDER = WgmmaTile(2, 64, 64, 256, stages=4)
PARTLY = WgmmaTile(1, 16, 96, 80)


def device(multiprocessors: int = 1, **ways: Any) -> SimDevice:
    """Return a simulated GPU on which calls are of this family."""
    info = replace(gpu("sm_90"), multiprocessors=multiprocessors)
    return SimDevice(info, **ways)


def in_every_way(
    inputs: Inputs, tile: WgmmaTile, multiprocessors: int = 1
) -> dict[str, Array]:
    """Run in each order of threads, with late and with early copies and products."""
    first, *others = (
        run(inputs, device(multiprocessors, **ways), tile, gradients=False)
        for ways in _WAYS
    )
    for other in others:
        assert_same_bits(other, first)
    return first


def assert_same_bits(results: dict[str, Array], wanted: dict[str, Array]) -> None:
    """Raise AssertionError unless all results are equal, NaN too."""
    assert_same(*({n: x.view(f"u{x.itemsize}") for n, x in each.items()}
                  for each in (results, wanted)))  # fmt: skip


def forward(name: str, dtype: str = "bfloat16", **options: Any) -> Case:
    """Return a case whose queries and keys fill no tile."""
    size: dict[str, Any] = {"batch": (1,), "hq": 2, "hkv": 1, "sq": 100, "sk": 90}
    return Case(name, dtype, **size | options, gradients=False)


_TALL = {"sq": 280, "sk": 150}  # rows that see no key come first
_FLAT = {"sq": 150, "sk": 260}
LENGTHS = {"batch": (4,), "q_lengths": (70, 0, 37, 50), "k_lengths": (75, 60, 13, 0)}

CASES = (
    (SMALL, forward("plain")),
    (SMALL, forward("one", hq=1, sq=1, sk=1)),
    (SMALL, forward("full", sq=128, sk=64)),
    (SMALL, forward("one_more", sq=65, sk=33)),
    (SMALL, forward("one_less", sq=63, sk=31)),
    (SMALL, forward("groups", hq=6, hkv=2)),
    (SMALL, forward("heads", hq=3, hkv=3, batch=(2,), sq=64)),
    (SMALL, forward("lengths", **LENGTHS)),
    (SMALL, forward("packed", hq=2, hkv=2, sk=100, memory="packed")),
    (SMALL, forward("bhsd", layout="bhsd", memory="margin")),
    (SMALL, forward("shared", batch=(2,),
                    memory=("dense", "broadcast", "broadcast", "dense"))),
    (SMALL, forward("misaligned", memory="misaligned")),
    (SMALL, forward("reversed", batch=(2,), memory="reversed")),
    (SMALL, forward("head_46", d=46, dv=64)),
    (SMALL, forward("head_8", d=8, dv=16)),
    (SMALL, forward("spread", scale=4.0)),
    (SMALL, forward("flat_logits", scale=1e-6)),
    (SMALL, forward("axes", batch=(2, 3), sq=70, memory="broadcast")),
    (SMALL, forward("negative_scale", scale=-0.4)),
    (SMALL, forward("scale_0", scale=0.0)),
    (SMALL, forward("large_cap", softcap=3e5, scale=4.0)),
    (SMALL, forward("small_cap", softcap=0.3, scale=4.0)),
    (SMALL, forward("fp16", "float16", **LENGTHS)),
    (SMALL, forward("fp16_spread", "float16", scale=4.0)),
    (DEEP, forward("causal", causal=True, **_FLAT)),
    (DEEP, forward("tall", causal=True, **_TALL)),
    (DEEP, forward("top_left", causal="top_left", **_TALL)),
    (DEEP, forward("top_left_flat", causal="top_left", **_FLAT)),
    (DEEP, forward("causal_lengths", causal=True, **LENGTHS)),
    (DEEP, forward("right", window=(None, 20), **_FLAT)),
    (DEEP, forward("left", window=(40, None), **_TALL)),
    (DEEP, forward("left_lengths", window=(7, None), **LENGTHS)),
    (DEEP, forward("window", window=(50, 20), **_TALL)),
    (DEEP, forward("narrow", window=(0, 0), **_FLAT)),
    (SHALLOW, forward("causal", causal=True, **_FLAT)),
    (SHALLOW, forward("tall", causal=True, **_TALL)),
    (SHALLOW, forward("top_left", causal="top_left", **_FLAT)),
    (SHALLOW, forward("window", window=(9, 5), **_FLAT)),
    (SINGLE, forward("causal", causal=True, **_FLAT)),
    (TURNS, forward("plain", **_FLAT)),
    (TURNS, forward("lengths", **LENGTHS)),
    (TURNS, forward("causal", causal=True, **_FLAT)),
    (TURNS, forward("tall", causal=True, **_TALL)),
    (TURNS, forward("all", window=(60, 20), softcap=3.0, alibi="batch", scale=0.5,
                    **LENGTHS)),
    (TURNS, forward("all_narrow", window=(9, 5), softcap=1.0, alibi="heads", **_TALL)),
    (WIDEST, forward("fp16", "float16", causal=True, sq=260, sk=100)),
    (TOGETHER, forward("causal", causal=True, sk=430)),
    (TOGETHER, forward("tall", causal=True, sq=200, sk=100)),
    (ALONE, forward("plain", sk=300)),
    (ALONE, forward("lengths", **LENGTHS)),
    (NARROWER, forward("causal", causal=True, d=192, dv=128, hq=1, sq=200)),
    (WIDER, forward("plain", d=64, dv=256, hq=1, sq=200)),
    (PARTLY, forward("plain", d=88, dv=72)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("tile", "case"), CASES, ids=[f"{tile.name}-{case}" for tile, case in CASES]
)
def test_against_the_reference(tile: WgmmaTile, case: Case) -> None:
    """In one block and in a few, each tile of queries after the other."""
    results = in_every_way(make(case), tile)
    compare(results, expect_case(case))
    # A few blocks, which claim what is left over.
    assert_same_bits(run(make(case), device(3), tile, gradients=False), results)


def test_the_layouts_of_the_tiles() -> None:
    """What the names of the tiles promise."""
    layouts = {
        tile: (tile.constants(np.dtype(np.float16), None)["QueryStages"],
               tile.constants(np.dtype(np.float16), None)["OutputApart"])
        for tile, _ in CASES
    }  # fmt: skip
    together = {TOGETHER: (2, False), ALONE: (1, False), NARROWER: (2, False),
                WIDER: (1, False)}  # fmt: skip
    assert layouts == dict.fromkeys(layouts, (2, True)) | together


def test_sections_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one is smaller."""
    monkeypatch.setattr(plan_wgmma, "_SECTION", 1)
    case = forward("sections", causal=True, hq=10, hkv=5, sq=130, sk=70)
    compare(in_every_way(make(case), DEEP), expect_case(case))


# --- What lies behind the lengths -----------------------------------------------------


@pytest.mark.parametrize("tile", [SMALL, TURNS, ALONE], ids=lambda tile: tile.name)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nothing_comes_from_behind_the_lengths(tile: WgmmaTile, value: float) -> None:
    inputs = make(forward("lengths", **LENGTHS))
    clean = in_every_way(inputs, tile)
    lengths = zip(LENGTHS["q_lengths"], LENGTHS["k_lengths"], strict=True)
    for b, (rows, keys) in enumerate(lengths):
        assert not clean["out"][b, rows:].any()
        assert (clean["lse"][b, :, rows:] == -np.inf).all()
        inputs.q[b, rows:] = value
        inputs.k[b, keys:] = value
        inputs.v[b, keys:] = value
    assert_same_bits(in_every_way(inputs, tile), clean)


def test_nan_in_keys_that_the_window_hides_from_a_tile() -> None:
    """Before the first key that is seen and after the last, in tiles that are."""
    case = forward("window", window=(10, -1), causal=True, hq=1, sq=40, sk=200)
    inputs = make(case)
    clean = in_every_way(inputs, DEEP)
    inputs.k[:, :150] = inputs.v[:, :150] = np.nan
    assert_same_bits(in_every_way(inputs, DEEP), clean)
    case = forward("top_left", causal="top_left", hq=1, sq=40, sk=200)
    inputs = make(case)
    clean = in_every_way(inputs, DEEP)
    inputs.k[:, 40:] = inputs.v[:, 40:] = np.nan
    assert_same_bits(in_every_way(inputs, DEEP), clean)


def test_a_nan_reaches_only_its_rows() -> None:
    inputs = make(forward("plain"))
    clean = in_every_way(inputs, SMALL)
    inputs.q[:, 37, 1] = np.nan
    dirty = in_every_way(inputs, SMALL)
    assert np.isnan(dirty["out"][:, 37, 1]).all() and np.isnan(dirty["lse"][:, 1, 37])
    dirty["out"][:, 37, 1] = clean["out"][:, 37, 1]
    dirty["lse"][:, 1, 37] = clean["lse"][:, 1, 37]
    # Other rows of its warp may move their references at other times.
    compare(dirty, expect_case(forward("plain")))


# --- Logits of any size ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "tile"), [("float16", SMALL), ("bfloat16", SMALL), ("bfloat16", DEEP)]
)
@pytest.mark.parametrize("most", [8, 30, 400])
def test_logits_that_grow(dtype: str, tile: WgmmaTile, most: float) -> None:
    """From tile to tile, all the way or to the middle and from there on again."""
    inputs = make(forward("grow", dtype, hq=1, sq=70, sk=200, causal=tile == DEEP))
    noise = 0.1 * inputs.k[0, :, 0].astype(np.float32)
    inputs.q[...] = 1
    rising = np.linspace(most, -most, 200)[:, None] / 8  # the last keys come first
    for logits in (rising, -np.abs(rising), np.abs(rising)):
        inputs.k[0, :, 0] = (logits + noise).astype(inputs.k.dtype)
        results = in_every_way(inputs, tile)
        compare(results, expect(inputs, gradients=False))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_that_grow_apart(dtype: str) -> None:
    """Each row of a warp at another tile, some of them never."""
    inputs = make(forward("apart", dtype, hq=1, sq=70, sk=200))
    rng = np.random.default_rng(5)
    inputs.q[...] = rng.choice([0, 0.1, 3, 30], (1, 70, 1, 1))
    results = in_every_way(inputs, SMALL)
    compare(results, expect(inputs, gradients=False))


@pytest.mark.parametrize(
    ("dtype", "value"), [("bfloat16", 133120), ("float16", 40000), ("bfloat16", 1e18)]
)
def test_huge_equal_logits(dtype: str, value: float) -> None:
    """Their exponentials are equal, so the output is exact."""
    inputs = make(forward("huge", dtype, hq=1, sq=70))
    for x in (inputs.q, inputs.k, inputs.v):
        x[...] = value
    results = in_every_way(inputs, SMALL)
    np.testing.assert_array_equal(results["out"], inputs.v[:, :70])
    exact = inputs.q[0, 0, 0, 0].astype(np.float64) ** 2 * 8 + np.log(90)
    np.testing.assert_allclose(results["lse"], exact, rtol=1e-5)


@pytest.mark.parametrize("sign", [-1, 1])
def test_huge_logits_of_either_sign(sign: int) -> None:
    """Rows of one warp, in which one key is larger than all others."""
    inputs = make(forward("huge", hq=1, sq=70, sk=100))
    inputs.q[...] = 1
    inputs.q[:, ::3] = 1e4
    inputs.k[...] = sign * 1e4
    inputs.k[:, 13] += 100
    results = in_every_way(inputs, SMALL)
    out = results["out"][0, :, 0].astype(np.float64)
    expected = inputs.v[0, 13, 0].astype(np.float64)
    np.testing.assert_array_equal(out, np.broadcast_to(expected, out.shape))
    logits = inputs.q[0, :, 0].astype(np.float64) @ inputs.k[0, 13, 0].astype(float) / 8
    np.testing.assert_allclose(results["lse"][0, 0], logits, rtol=1e-5)


@pytest.mark.parametrize("large", [999424, 2097152, 2293760, 2703360, -2506752])
@pytest.mark.parametrize("huge", [1e9, -1e9])
def test_a_row_of_large_logits_beside_huge_ones(huge: float, large: float) -> None:
    """Its weights are alike, whatever its neighbours in the warp become later."""
    inputs = make(forward("mixed", hq=1, sq=64, sk=150, d=64, scale=1.0))
    first = np.arange(150) >= 77  # keys, in the order of visits
    inputs.q[...] = inputs.k[...] = 0
    # Channel 0 makes the even rows, channel 1 the odd ones.
    inputs.q[:, ::2, :, 0] = 1
    inputs.k[..., 0] = large
    inputs.q[:, 1::2, :, 1] = 1
    inputs.k[..., 1] = np.where(first == (huge < 0), huge, 0)[:, None]
    inputs.v[...] = np.where(first, -1, 1)[:, None, None]
    results = in_every_way(inputs, SMALL)
    out = results["out"][0, ::2].astype(np.float64)
    np.testing.assert_allclose(out, 4 / 150, atol=0.0025)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_ties_of_large_logits(dtype: str) -> None:
    """Means, however large what they are relative to."""
    inputs = make(forward("ties", dtype, hq=1, sq=70, sk=100))
    inputs.q[...] = 100
    inputs.k[...] = -100
    inputs.k[:, 10:20] = 100
    results = in_every_way(inputs, SMALL)
    mean = inputs.v[0, 10:20, 0].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(
        results["out"][0, :, 0].astype(np.float64), np.broadcast_to(mean, (70, 64)),
        rtol=1e-2, atol=2e-3,
    )  # fmt: skip
    np.testing.assert_allclose(results["lse"], 8e4 + np.log(10), rtol=1e-5)


# --- Maxima that rise -----------------------------------------------------------------


def leap(keys: int, bits: float, at: int = 77) -> Array:
    """Keys before `at`, which come last, with exponents that are so much larger."""
    return np.where(np.arange(keys) < at, bits, 0.0)


def stairs(keys: int, bits: float, width: int = 32) -> Array:
    """As much more with each tile of so many keys."""
    return bits * (keys // width - np.arange(keys) // width)


def check_closely(inputs: Inputs, tile: WgmmaTile) -> dict[str, Array]:
    """Compare what is computed in every way with the reference."""
    results = in_every_way(inputs, tile)
    compare_closely(results, inputs)
    return results


# The reference follows a maximum from about 30 bits on in bf16 and 20 in fp16. From 130
# and 110 on, exponentials are lost and made again.
BITS = (25, 35, 60, 90, 115, 200, 3000)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", ROWS)
def test_a_maximum_that_leaps(rows: str, bits: float, dtype: str) -> None:
    case = forward("leap", dtype, hq=1, sq=70, sk=150)
    check_closely(raised(case, leap(150, bits), rows), SMALL)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [3, 9, 40, 150])
@pytest.mark.parametrize("rows", ROWS)
def test_a_maximum_that_rises_by_tiles(rows: str, bits: float, dtype: str) -> None:
    case = forward("stairs", dtype, hq=1, sq=70, sk=230)
    check_closely(raised(case, stairs(230, bits), rows), SMALL)


_CAPPED = {"window": (60, 20), "softcap": 400.0, "alibi": "batch"}
LEAPS = (
    (SMALL, forward("lengths", **LENGTHS)),
    (SMALL, forward("alibi", alibi="heads", softcap=300.0, sk=150)),
    (SMALL, forward("negative_scale", scale=-0.4)),
    (DEEP, forward("causal", causal=True, **_FLAT)),
    (DEEP, forward("tall", causal=True, **_TALL)),
    (DEEP, forward("causal_lengths", "float16", causal=True, **LENGTHS)),
    (SHALLOW, forward("causal", causal=True, **_FLAT)),
    (SHALLOW, forward("window", "float16", window=(50, 20), **_TALL)),
    (SINGLE, forward("causal", causal=True, **_FLAT)),
    (SINGLE, forward("window", window=(60, 5), **_FLAT)),
    (TURNS, forward("lengths", **LENGTHS)),
    (TURNS, forward("all", **_CAPPED, **LENGTHS)),
    (TURNS, forward("all_fp16", "float16", **_CAPPED, **_TALL)),
    (WIDEST, forward("fp16", "float16", causal=True, sq=260, sk=150)),
    (TOGETHER, forward("causal", causal=True, sk=430)),
    (ALONE, forward("plain", sk=300)),
    (NARROWER, forward("causal", causal=True, d=192, dv=128, hq=1, sq=200, sk=250)),
    (WIDER, forward("plain", d=64, dv=256, hq=1, sq=200, sk=150)),
    (PARTLY, forward("plain", d=88, dv=72)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("tile", "case"), LEAPS, ids=[f"{tile.name}-{case}" for tile, case in LEAPS]
)
def test_leaps_with_each_tile_and_option(tile: WgmmaTile, case: Case) -> None:
    """Also from one piece of work to the next, which begins at the level of its own."""
    inputs = raised(case, leap(case.sk, 200, case.sk // 4), "apart")
    check_closely(inputs, tile)
    # Where all rows or one of them leap, in one way each.
    for bits, rows, ways in ((60, "all", _WAYS[1]), (500, "one", _WAYS[2])):
        inputs = raised(case, leap(case.sk, bits, case.sk // 4), rows)
        results = run(inputs, device(**ways), tile, gradients=False)
        compare_closely(results, inputs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [60, 200])
def test_what_a_leap_leaves_behind_vanishes(bits: float, dtype: str) -> None:
    """Of values so large that little of them would show."""
    inputs = raised(forward("behind", dtype, hq=1, sq=70, sk=150), leap(150, bits))
    results = check_closely(inputs, SMALL)
    inputs.v[:, 77:] = 6e4
    assert_same_bits(in_every_way(inputs, SMALL), results)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("causal", "dtype"), [(False, "float16"), (True, "bfloat16")])
def test_a_leap_beside_what_is_not_finite(
    causal: bool, dtype: str, value: float
) -> None:
    """In a row or in a key; other rows and those that don't see the key are right."""
    case = forward("beside", dtype, hq=1, sq=150, sk=200, causal=causal)
    for bits in (0, 60, 200):
        for key in (None, 30, 199):
            inputs = raised(case, leap(200, bits), "half")
            if key is None:
                inputs.q[:, 37, :, 5] = value
            else:
                inputs.k[:, key, :, 5] = value
            with np.errstate(invalid="ignore"):
                check_closely(inputs, DEEP)


# --- Outputs --------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [SMALL, ALONE], ids=lambda tile: tile.name)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_an_output_that_is_given(tile: WgmmaTile, layout: str) -> None:
    """Around it nothing is written, and without lse nothing is written there."""
    inputs = make(forward("out", batch=(2,), layout=layout))
    wanted = run(inputs, device(), tile, gradients=False)["out"]
    for ways in _WAYS:
        own = device(2, **ways)
        around = np.full([n + 2 for n in wanted.shape[:-1]] + [80], 7, wanted.dtype)
        around = mirror(own, around)
        out = around[1:-1, 1:-1, 1:-1, 8:72]
        arrays = [mirror(own, x) for x in (inputs.q, inputs.k, inputs.v)]
        options = inputs.scalars | {"out": out, "config": tile}
        assert flash_attention(*arrays, **options) is out
        np.testing.assert_array_equal(out, wanted)
        out[...] = 7
        assert (np.array(around) == 7).all()
