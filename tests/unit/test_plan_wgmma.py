"""Planning for the family `wgmma`: what it serves, tensor maps, tiles, sections."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_flash import configs, explain
from cupy_flash.compiler import source_root
from cupy_flash.configs import WGMMA_DEPTHS, WGMMA_FORWARD, WgmmaRow, WgmmaTile
from cupy_flash.device import DeviceInfo
from cupy_flash.params import merge_batch_axes
from cupy_flash.plan import Plan, make_plan
from cupy_flash.plan_base import MapSpec
from cupy_flash.plan_wgmma import needs_copy
from cupy_flash.problem import ArrayInfo, Operand, Problem
from cupy_flash.spec import KernelSpec
from cupy_flash.tiles import _HOPPER_REGISTERS
from cupy_flash.validate import contiguous_strides
from cupy_flash.variant import Variant

from .test_plan import (
    BOOL,
    DEVICES,
    DTYPES,
    FLOAT32,
    MAX_GRID,
    ceil_div,
    dtypes,
    grids,
    info,
    make,
    sound,
    tiles,
    with_bias,
    zeros,
)

KIB = 1024
INT32 = np.dtype(np.int32)
UINT64 = np.dtype(np.uint64)
BF16, FP16 = DTYPES["bf16"], DTYPES["fp16"]
HOPPER = dataclasses.replace(DEVICES["sm_90"], nvrtc=(13, 0))
halves = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
# The kernels of the gradients, in their order.
PASSES = {"backward_terms": "wgmma", "backward": "wgmma", "convert_dq": "mma"}


def half(**options: Any) -> Problem:
    """Return a problem that the family serves."""
    return make(**{"dtype": BF16, **options})


def laid_out(
    shape: tuple[int, ...], elements: tuple[int, ...], by: int = 0
) -> ArrayInfo:
    """Describe an array of bfloat16 by its strides in elements."""
    return ArrayInfo(shape, tuple(2 * step for step in elements), BF16, by)


def tile_of(plan: Plan) -> WgmmaTile:
    tile = tiles(plan)["forward"]
    assert isinstance(tile, WgmmaTile)
    return tile


def maps_of(plan: Plan) -> dict[str, MapSpec]:
    names = ["q", "k", "v", "out"]
    if plan.problem.direction == "backward":
        names = ["q", "k", "v", "dout", "dk", "dv"]
    assert [spec.name for spec in plan.maps] == names
    return {spec.name: spec for spec in plan.maps}


# --- Which family ---------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", DEVICES)
def test_the_family_goes_by_gpu_dtype_and_direction(
    name: str, direction: str, dtype: np.dtype
) -> None:
    gpu = dataclasses.replace(DEVICES[name], nvrtc=(13, 0))
    plan = make_plan(make(direction, dtype=dtype), gpu)
    served = name == "sm_90" and dtype.itemsize == 2
    assert (plan.family == "wgmma") == served
    why = [x for x in plan.reasons if x.startswith("not family wgmma: ")]
    assert len(why) == (not served)
    assert len([x for x in plan.reasons if x.startswith("family ")]) == 1
    if served:
        assert "family wgmma: Hopper's tensor cores take this call" in plan.reasons
        families = {"forward": "wgmma"} if direction == "forward" else PASSES
        assert {s.spec.kernel: s.spec.family for s in plan.steps} == families
    else:
        assert plan.maps == () and plan.section == 1


OUT, K = (2, 100, 4, 64), (2, 70, 2, 64)
BACKWARD = {"direction": "backward"}
MASK = {"mask": info((100, 70), BOOL)}
# A batch of three axes that a bias, or lengths, keep apart.
APART = {
    "batch": (2, 3, 4),
    "arrays": {"k_lengths": ArrayInfo((2, 3, 4), (0, 4, 0), INT32)},
}
REFUSED = {
    "another GPU": (DEVICES["sm_100"], {}, "compute capability 9.0"),
    "an older one": (DEVICES["sm_80"], {}, "compute capability 9.0"),
    "NVRTC": (
        dataclasses.replace(HOPPER, nvrtc=(12, 8)), {}, "NVRTC 12.9 or later.*is 12.8",
    ),
    "no NVRTC": (dataclasses.replace(HOPPER, nvrtc=(0, 0)), {}, "this is 0.0"),
    "fp32": (HOPPER, {"dtype": FLOAT32}, "no products of float32"),
    "fp64": (HOPPER, {"dtype": DTYPES["fp64"]}, "no products of float64"),
    "deterministic": (
        HOPPER, BACKWARD | {"deterministic": True}, "by atomics, which isn't determin",
    ),
    "softcap": (HOPPER, BACKWARD | {"softcap": 2.0}, "gradients have no softcap yet"),
    "ALiBi": (
        HOPPER, BACKWARD | {"arrays": {"alibi_slopes": info((4,))}},
        "gradients have no alibi_slopes yet",
    ),
    "no scale": (HOPPER, BACKWARD | {"scale": 0.0}, "gradients need a positive scale"),
    "a negative one": (HOPPER, BACKWARD | {"scale": -0.1}, "need a positive scale"),
    "a tiny one": (HOPPER, BACKWARD | {"scale": 1e-38}, "need a positive scale"),
    "bias of gradients": (
        HOPPER, BACKWARD | {"arrays": with_bias(1, 70)}, "reads no bias array yet",
    ),
    "gradient of a bias": (
        HOPPER, BACKWARD | {"arrays": with_bias(1, 70), "bias_grad": True},
        "reads no bias array yet",
    ),
    "mask of gradients": (
        HOPPER, BACKWARD | {"arrays": MASK}, "reads no mask array yet",
    ),
    "head_dim of gradients": (
        HOPPER, BACKWARD | {"d": 257, "dv": 8}, "head sizes of up to 256",
    ),
    "head_dim_v of gradients": (
        HOPPER, BACKWARD | {"d": 8, "dv": 264}, "head sizes of up to 256",
    ),
    "no keys of gradients": (HOPPER, BACKWARD | {"sk": 0}, "no keys"),
    "no queries": (HOPPER, BACKWARD | {"sq": 0}, "no queries"),
    "no batch": (HOPPER, BACKWARD | {"batch": (0,)}, "no queries"),
    "dk's rows": (
        HOPPER, BACKWARD | {"d": 44, "dv": 64}, "dk can't be written by tensor maps",
    ),
    "dv's rows": (
        HOPPER, BACKWARD | {"d": 64, "dv": 44}, "dv can't be written by tensor maps",
    ),
    "dk's start": (
        HOPPER, BACKWARD | {"arrays": {"dk": info(K, BF16, 8)}}, "dk can't be written",
    ),
    "dv's strides": (
        HOPPER, BACKWARD | {"arrays": {"dv": laid_out(K, (9240, 132, 66, 1))}},
        "dv can't be written",
    ),
    "dk's channels": (
        HOPPER, BACKWARD | {"arrays": {"dk": laid_out(K, (17920, 256, 128, 2))}},
        "dk can't be written",
    ),
    "dv backwards": (
        HOPPER, BACKWARD | {"arrays": {"dv": laid_out(K, (8960, -128, 64, 1))}},
        "dv can't be written",
    ),
    "bias": (HOPPER, {"arrays": with_bias(1, 70)}, "reads no bias array yet"),
    "mask": (HOPPER, {"arrays": MASK}, "reads no mask array yet"),
    "head_dim": (HOPPER, {"d": 257, "dv": 8}, "head sizes of up to 256"),
    "head_dim_v": (HOPPER, {"d": 8, "dv": 264}, "head sizes of up to 256"),
    "no keys": (HOPPER, {"sk": 0}, "no keys"),
    "batch axes": (HOPPER, APART, "more than 2 axes that can't be merged"),
    "out's rows": (HOPPER, {"dv": 44}, "out can't be written by tensor maps"),
    "the end of out's rows": (
        HOPPER,
        {"dv": 44, "arrays": {"out": laid_out((2, 100, 4, 44), (19200, 192, 48, 1))}},
        "rows start and end at multiples of 16 bytes",
    ),
    "the end of one row": (
        HOPPER, {"dv": 4, "sq": 1, "batch": (1,), "hq": 1, "hkv": 1},
        "rows start and end at multiples of 16 bytes",
    ),
    "out's start": (
        HOPPER, {"arrays": {"out": info(OUT, BF16, 2)}}, "out can't be written",
    ),
    "out's strides": (
        HOPPER, {"arrays": {"out": laid_out(OUT, (26400, 264, 66, 1))}},
        "out can't be written",
    ),
    "out's channels": (
        HOPPER, {"arrays": {"out": laid_out(OUT, (51200, 512, 128, 2))}},
        "out can't be written",
    ),
    "out backwards": (
        HOPPER, {"arrays": {"out": laid_out(OUT, (25600, -256, 64, 1))}},
        "out can't be written",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("gpu", "options", "why"), REFUSED.values(), ids=list(REFUSED))
def test_what_is_left_to_others(
    gpu: DeviceInfo, options: dict[str, Any], why: str
) -> None:
    plan = make_plan(half(**options), gpu)
    assert plan.family in ("mma", "simt")
    (reason,) = [x for x in plan.reasons if x.startswith("not family wgmma: ")]
    with pytest.raises(
        ValueError, match=f"config='wgmma' can't be had: .*{why}"
    ) as error:
        make_plan(half(**options, config="wgmma"), gpu)
    assert reason.removeprefix("not family wgmma: ") in str(error.value)
    assert f"why: {reason}" in str(plan)
    # A tile says so too.
    with pytest.raises(ValueError, match=why):
        make_plan(half(**options, config=WgmmaTile(1, 16, 16, 16)), gpu)


@pytest.mark.parametrize(
    "options",
    [
        {"d": 256, "dv": 256}, {"d": 1, "dv": 8}, {"sq": 1, "sk": 1}, {"causal": True},
        {"window": (3, 5)}, {"softcap": 2.0}, {"scale": -1.0}, {"scale": 0.0},
        {"return_lse": True}, {"batch": ()}, {"batch": (2, 3, 4)},
        {"arrays": {"alibi_slopes": info((4,))}},
        {"arrays": {"k_lengths": info((2,), INT32), "q_lengths": info((2,), INT32)}},
        {"arrays": {"k_lengths": ArrayInfo((2, 3), (0, 4), INT32)}, "batch": (2, 3)},
        {"batch": (0,)}, {"sq": 0}, {"config": "wgmma"},
        {"arrays": {"out": laid_out(OUT, (40000, 400, 80, 1))}},
        *(
            BACKWARD | options for options in (
                {"d": 128, "dv": 128}, {"d": 8, "dv": 128}, {"sq": 1, "sk": 1},
                {"causal": "top_left"}, {"window": (3, 5)}, {"scale": 1e-30},
                {"batch": ()}, {"config": "wgmma"},
                {"arrays": {"dlse": info((2, 4, 100))}},
                {"arrays": {"k_lengths": ArrayInfo((2, 3), (0, 4), INT32)},
                 "batch": (2, 3)},
                # dq is written by elements.
                {"arrays": {"dq": laid_out(OUT, (52800, -528, 130, 2), 2)}},
                {"arrays": {"dk": laid_out(K, (40000, 400, 80, 1))}},
                {"arrays": {"out": info(OUT, BF16, 2)}},
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_served(options: dict[str, Any]) -> None:
    plan = make_plan(half(**options), HOPPER)
    assert plan.family == "wgmma"
    asked = "config= asks for it" if "config" in options else "Hopper's tensor cores"
    assert any(x.startswith(f"family wgmma: {asked}") for x in plan.reasons)


def test_the_oldest_compiler() -> None:
    gpu = dataclasses.replace(HOPPER, nvrtc=(12, 9))
    assert make_plan(half(), gpu).family == "wgmma"


def test_other_families_can_be_forced() -> None:
    for family in ("simt", "mma"):
        plan = make_plan(half(config=family), HOPPER)
        assert plan.family == family and plan.maps == ()
        assert "not family wgmma" not in str(plan)


# --- Copies ---------------------------------------------------------------------------

Q = (2, 100, 4, 64)
FINE = {
    "transposed": (25600, 64, 6400, 1),
    "padded": (40000, 400, 80, 1),
    "packed": (76800, 768, 192, 1),
    "broadcast batch": (0, 256, 64, 1),
    "broadcast heads": (6400, 64, 0, 1),
    "windows": (64, 8, 16, 1),
}
COPIED = {
    "backwards": (25600, -256, 64, 1),
    "batch backwards": (-25600, 256, 64, 1),
    "heads backwards": (25600, 256, -64, 1),
    "one token": (25600, 0, 64, 1),
    "odd rows": (26000, 260, 65, 1),
    "odd batch": (25601, 256, 64, 1),
    "half a load": (25604, 256, 64, 1),
    "every second": (51200, 512, 128, 2),
    "channels backwards": (25600, 256, 64, -1),
    "channels first": (25600, 1, 6400, 100),
    "too far": (2**40, 256, 64, 1),
}


@pytest.mark.parametrize("name", [*FINE, *COPIED])
def test_steps_that_need_a_copy(name: str) -> None:
    q = laid_out(Q, (FINE | COPIED)[name])
    assert needs_copy(Operand("q", *q)) == (name in COPIED)
    plan = make_plan(half(arrays={"q": q}), HOPPER)
    assert plan.family == "wgmma"
    assert plan.copies == (("q",) if name in COPIED else ())
    why = "q is copied: wgmma loads 16 bytes at a time"
    assert (why in str(plan)) == (name in COPIED)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("by", range(16))
def test_starts_that_need_a_copy(name: str, by: int) -> None:
    shape = (2, 100, 4, 64) if name == "q" else (2, 70, 2, 64)
    plan = make_plan(half(arrays={name: info(shape, BF16, by)}), HOPPER)
    assert plan.family == "wgmma"
    assert plan.copies == ((name,) if by else ())
    assert str(plan).count(f"{name} is copied") == (by != 0)


@halves
@pytest.mark.parametrize("d", [1, 2, 7, 8, 9, 46, 64, 100, 104, 255, 256])
def test_rows_of_copies_are_padded(d: int, dtype: np.dtype) -> None:
    """Copies are taken as they lie, with rows of whole loads."""
    problem = make(d=d, dv=64, dtype=dtype)
    plan = make_plan(problem, HOPPER)
    assert plan.family == "wgmma"
    assert plan.copies == (("q", "k") if d % 8 else ())
    assert {plan.row_multiple(name) for name in "qkv"} == {8}
    assert plan.row_multiple("k_lengths") == 1
    padded = {}
    for name in plan.copies:
        shape = problem.operand(name).shape
        whole = (*shape[:-1], ceil_div(d, 8) * 8)
        padded[name] = ArrayInfo(shape, contiguous_strides(whole, dtype), dtype)
    again = make_plan(make(d=d, dv=64, dtype=dtype, arrays=padded), HOPPER)
    assert again.copies == () and again.steps == plan.steps
    for name, spec in maps_of(again).items():
        assert spec.shape[0] == problem.operand(name).shape[-1]
        assert not any(step % 16 for step in spec.strides)


def test_steps_that_nobody_takes_do_not_matter() -> None:
    one = laid_out((1, 1, 1, 64), (3, -5, 7, 1))
    arrays = {name: one for name in "qkv"} | {"out": one}
    problem = half(batch=(1,), sq=1, sk=1, hq=1, hkv=1, arrays=arrays)
    plan = make_plan(problem, HOPPER)
    assert plan.family == "wgmma" and plan.copies == ()
    # Such a step is none of a tensor map either.
    assert all(spec.strides == (16, 16, 16) for spec in plan.maps)
    # A single channel has no neighbour to lie beside.
    narrow = laid_out((2, 100, 4, 1), (3200, 32, 8, 5))
    plan = make_plan(half(d=1, arrays={"q": narrow}, dv=8), HOPPER)
    assert plan.copies == ("k",)


def test_lengths_and_slopes_are_read_by_elements() -> None:
    arrays = {
        "alibi_slopes": ArrayInfo((4,), (-12,), FLOAT32, 4),
        "k_lengths": ArrayInfo((2,), (20,), INT32, 12),
        "lse": ArrayInfo((2, 4, 100), (4, 8, 32), FLOAT32, 4),
    }
    plan = make_plan(half(arrays=arrays, return_lse=True), HOPPER)
    assert plan.family == "wgmma" and plan.copies == ()


# --- Tensor maps ----------------------------------------------------------------------


def map_of(name: str, problem: Problem) -> MapSpec:
    plan = make_plan(problem, HOPPER)
    assert plan.family == "wgmma" and plan.copies == ()
    spec = maps_of(plan)[name]
    tile = tile_of(plan)
    assert spec.dtype == BF16 and len(spec.strides) == len(spec.shape) - 1
    rows = tile.rows if name in ("q", "out") else tile.columns
    assert spec.box == (64, rows, *(1 for _ in spec.shape[2:]))
    return spec


def test_maps_of_bshd() -> None:
    problem = half(d=64, dv=128)
    assert map_of("q", problem).shape == (64, 100, 4, 2)
    assert map_of("q", problem).strides == (512, 128, 51200)
    assert map_of("k", problem).shape == (64, 70, 2, 2)
    assert map_of("k", problem).strides == (256, 128, 17920)
    assert map_of("v", problem).shape == (128, 70, 2, 2)
    assert map_of("v", problem).strides == (512, 256, 35840)
    assert map_of("out", problem).shape == (128, 100, 4, 2)
    assert map_of("out", problem).strides == (1024, 256, 102400)


def test_maps_of_bhsd() -> None:
    arrays = {"q": info((2, 4, 100, 64), BF16)}
    arrays |= {name: info((2, 2, 70, 64), BF16) for name in "kv"}
    problem = half(arrays=arrays, layout="bhsd")
    assert map_of("q", problem).shape == (64, 100, 4, 2)
    assert map_of("q", problem).strides == (128, 12800, 51200)
    assert map_of("v", problem).shape == (64, 70, 2, 2)
    assert map_of("v", problem).strides == (128, 8960, 17920)
    assert map_of("out", problem).strides == (128, 12800, 51200)


def test_maps_of_packed_views() -> None:
    """q, k and v are parts of (batch, sequence, 3, heads, head_dim)."""
    part = laid_out((2, 100, 4, 64), (100 * 768, 768, 64, 1))
    problem = half(sk=100, hkv=4, arrays=dict.fromkeys("qkv", part))
    for name in "qkv":
        assert map_of(name, problem).shape == (64, 100, 4, 2)
        assert map_of(name, problem).strides == (1536, 128, 153600)
    assert map_of("out", problem).strides == (512, 128, 51200)


def test_maps_of_an_axis_that_repeats() -> None:
    """It has one entry, and a step that a map may have."""
    k = laid_out((2, 70, 2, 64), (0, 128, 64, 1))
    v = laid_out((2, 70, 2, 64), (4480, 64, 0, 1))
    problem = half(arrays={"k": k, "v": v})
    assert map_of("k", problem).shape == (64, 70, 2, 1)
    assert map_of("k", problem).strides == (256, 128, 16)
    assert map_of("v", problem).shape == (64, 70, 1, 2)
    assert map_of("v", problem).strides == (128, 16, 8960)
    # A single query.
    q = laid_out((2, 1, 4, 64), (0, 0, 64, 1))
    spec = map_of("q", half(sq=1, arrays={"q": q}))
    assert (spec.shape, spec.strides) == ((64, 1, 4, 1), (16, 128, 16))


def test_maps_of_two_batch_axes() -> None:
    """The last one first."""
    lengths = {"k_lengths": ArrayInfo((2, 3), (0, 4), INT32)}
    problem = half(batch=(2, 3), arrays=lengths)
    assert len(merge_batch_axes(problem).shape) == 2
    spec = map_of("q", problem)
    assert spec.shape == (64, 100, 4, 3, 2)
    assert spec.strides == (512, 128, 51200, 153600)
    shared = laid_out((2, 3, 70, 2, 64), (8960, 0, 128, 64, 1))
    spec = map_of("k", half(batch=(2, 3), arrays=lengths | {"k": shared}))
    assert spec.shape == (64, 70, 2, 1, 2)
    assert spec.strides == (256, 128, 16, 17920)
    plan = make_plan(problem, HOPPER)
    assert plan.steps[0].spec.batch_axes == 2
    assert plan.steps[0].spec.symbol.endswith("_batch2")


def test_batch_axes_that_can_be_merged_are_one() -> None:
    spec = map_of("q", half(batch=(2, 3, 4)))
    assert spec.shape == (64, 100, 4, 24)
    assert map_of("q", half(batch=())).shape == (64, 100, 4, 1)


@settings(deadline=None, max_examples=100)
@given(
    batch=st.lists(st.integers(1, 3), max_size=3), sq=st.integers(1, 40),
    sk=st.integers(1, 40), hkv=st.integers(1, 3), group=st.integers(1, 3),
    d=st.integers(1, 256), dv=st.integers(1, 32).map(lambda n: 8 * n),
    bhsd=st.booleans(),
)  # fmt: skip
def test_maps_hold_as_many_elements_as_arrays(
    batch: list[int], sq: int, sk: int, hkv: int, group: int, d: int, dv: int,
    bhsd: bool,
) -> None:  # fmt: skip
    def array(tokens: int, heads: int, channels: int) -> ArrayInfo:
        axes = (heads, tokens) if bhsd else (tokens, heads)
        whole = (*batch, *axes, ceil_div(channels, 8) * 8)
        shape = (*whole[:-1], channels)
        return ArrayInfo(shape, contiguous_strides(whole, BF16), BF16)

    arrays = {
        "q": array(sq, hkv * group, d), "k": array(sk, hkv, d), "v": array(sk, hkv, dv),
    }  # fmt: skip
    problem = half(arrays=arrays, layout="bhsd" if bhsd else "bshd")
    plan = make_plan(problem, HOPPER)
    assert plan.copies == ()
    sound(plan)
    for name, spec in maps_of(plan).items():
        operand = problem.operand(name)
        assert math.prod(spec.shape) == math.prod(operand.shape)
        assert all(n >= 1 for n in spec.shape) and len(spec.shape) <= 5
        assert all(n <= 256 for n in spec.box)
        assert all(step % 16 == 0 and 0 < step < 2**40 for step in spec.strides)


# --- Tiles ----------------------------------------------------------------------------


def forward(tile: WgmmaTile, variant: Variant | None = None) -> KernelSpec:
    variant = Variant() if variant is None else variant
    return KernelSpec("wgmma", "forward", FP16, variant, tile, tile.threads, 1)


# Worked out by hand: 128 bytes for 64 channels of a row, 1024 at the end.
@pytest.mark.parametrize(
    ("tile", "query_stages", "apart", "bytes_"),
    [
        # 2 * 64 * 128 + 64 * 128 + 2 * (32 * 128 + 32 * 128) + 1024
        (WgmmaTile(1, 32, 64, 64, 2), 2, True, 41984),
        # 96 channels lie in two panels: 2 * 128 * 256 + 128 * 128 + 3 * 48 * 384
        (WgmmaTile(2, 48, 96, 64, 3), 2, True, 138240),
        # 3 * 128 * 256 + 2 * 2 * 128 * 256
        (WgmmaTile(2, 128, 128, 128, 2), 2, True, 230400),
        # 3 * 192 * 256 + 3 * 2 * 64 * 256 would be too much: 2 * 192 * 256 instead
        (WgmmaTile(3, 64, 128, 128, 3), 2, False, 197632),
        # The wider of queries and output: 2 * 128 * 384, and 2 * 96 * (384 + 256)
        (WgmmaTile(2, 96, 192, 128, 2), 2, False, 222208),
        # 2 * 128 * 512 would be too much beside 2 * 2 * 64 * 512
        (WgmmaTile(2, 64, 256, 256, 2), 1, False, 197632),
        # 16 channels take a panel: 2 * 64 * 128 + 64 * 512 + 2 * 64 * (128 + 512)
        (WgmmaTile(1, 64, 16, 256, 2), 2, True, 132096),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_shared_memory(
    tile: WgmmaTile, query_stages: int, apart: bool, bytes_: int
) -> None:
    for variant in (Variant(), Variant(right=True, softcap=True, alibi=True)):
        assert forward(tile, variant).shared_memory == bytes_
        constants = tile.constants(FP16, variant)
        assert constants["QueryStages"] == query_stages
        assert constants["OutputApart"] is apart


def test_names_of_tiles() -> None:
    tile = WgmmaTile(2, 64, 128, 96, 3, ping_pong=True)
    assert tile.name == "128x64d128v96_3sp"
    assert (tile.rows, tile.threads, tile.blocks) == (128, 384, 1)
    changes = {
        "consumers": 3, "columns": 32, "depth": 96, "depth_v": 64, "stages": 2,
        "ping_pong": False, "by_role": True,
    }  # fmt: skip
    assert set(changes) == {field.name for field in dataclasses.fields(WgmmaTile)}
    others = {dataclasses.replace(tile, **{n: v}).name for n, v in changes.items()}
    assert len(others | {tile.name}) == len(changes) + 1


def test_traits_and_arguments() -> None:
    text = forward(WgmmaTile(3, 48, 96, 64, 2), Variant(right=True)).tail()
    numbers = {
        "Consumers": 3, "Rows": 192, "Columns": 48, "Depth": 96, "DepthV": 64,
        "Stages": 2, "QueryStages": 2, "Threads": 512, "BatchAxes": 1,
    }  # fmt: skip
    for name, value in numbers.items():
        assert f"constexpr int k{name} = {value};" in text
    flags = {
        "BandRight": True,
        "BandLeft": False,
        "OutputApart": True,
        "PingPong": False,
    }
    for name, on in flags.items():
        assert f"constexpr bool k{name} = {str(on).lower()};" in text
    assert "sizeof(wgmma::ForwardStorage<Traits>) == " in text
    assert "__launch_bounds__(512, 1)" in text
    assert "const CUPY_FLASH_GRID_CONSTANT wgmma::ForwardMaps maps) {" in text
    assert "wgmma::forward<Traits>(params, maps);" in text
    assert forward(WgmmaTile(1, 16, 16, 16)).architecture_specific


def row_id(row: WgmmaRow) -> str:
    band = {None: "", True: "_banded", False: "_full"}[row.banded]
    turns = "p" if row.ping_pong else ""
    return (
        f"d{row.max_depth}v{row.max_depth_v}_{row.consumers}x{row.columns}"
        f"_{row.stages}s{turns}{band}"
    )


rows = pytest.mark.parametrize("row", WGMMA_FORWARD, ids=row_id)


def tiles_of(row: WgmmaRow) -> set[WgmmaTile]:
    """Return the tiles that a row can become."""
    made = {
        row.tile(d, dv, 2**20, banded)
        for d, dv in itertools.product(WGMMA_DEPTHS, repeat=2)
        for banded in (False, True)
    }
    return {tile for tile in made if tile is not None}


@rows
def test_rows_make_sense(row: WgmmaRow) -> None:
    made = tiles_of(row)
    assert made
    for tile in made:
        assert tile.fault(FP16) == ""
        assert forward(tile).shared_memory <= 227 * KIB, tile.name
        assert tile.depth <= row.max_depth and tile.depth_v <= row.max_depth_v
        assert tile.threads <= 1024
    assert row.tile(row.max_depth + 1, 1, 2**20, bool(row.banded)) is None
    assert row.tile(1, row.max_depth_v + 1, 2**20, bool(row.banded)) is None
    if row.min_keys:
        assert row.tile(1, 1, row.min_keys - 1, bool(row.banded)) is None
    assert row.tile(1, 1, row.min_keys, bool(row.banded)) is not None
    if row.banded is not None:
        assert row.tile(1, 1, 2**20, not row.banded) is None


@pytest.mark.parametrize(
    ("head", "depth"),
    [(1, 64), (64, 64), (65, 96), (96, 96), (97, 128), (129, 192), (193, 256),
     (256, 256)],
)  # fmt: skip
def test_the_least_depth_that_holds_the_head(head: int, depth: int) -> None:
    row = WgmmaRow(256, 256, consumers=1, columns=64, stages=2)
    assert row.tile(head, 5, 1, True) == WgmmaTile(1, 64, depth, 64, 2)
    assert row.tile(5, head, 1, False) == WgmmaTile(1, 64, 64, depth, 2)


def calls() -> list[Problem]:
    """Return problems of many head sizes and lengths."""
    return [
        half(batch=(b,), sq=sq, sk=sk, hq=8, hkv=8, d=d, dv=dv, causal=causal)
        for d, dv in itertools.product(WGMMA_DEPTHS, repeat=2)
        for b, sq in ((1, 1), (1, 100), (1, 4096), (40, 100), (40, 4096))
        for sk in (1, 1024, 4096, 8192)
        for causal in (False, True)
    ]


def test_no_row_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any of them some call would get another tile."""
    problems = calls()
    tiles = [tile_of(make_plan(problem, HOPPER)) for problem in problems]
    for row in WGMMA_FORWARD:
        others = tuple(other for other in WGMMA_FORWARD if other != row)
        monkeypatch.setattr(configs, "WGMMA_FORWARD", others)
        assert any(
            tile_of(make_plan(problem, HOPPER)) != tile
            for problem, tile in zip(problems, tiles, strict=True)
        ), row_id(row)


def test_every_head_size_has_a_tile() -> None:
    for d, dv in itertools.product((*range(1, 257, 5), 256), range(8, 257, 8)):
        for causal in (False, True):
            plan = make_plan(half(d=d, dv=dv, causal=causal), HOPPER)
            assert plan.family == "wgmma"
            sound(plan)


# From more rows a tile to fewer, among them some for other calls.
STEPS = (
    WgmmaRow(64, 64, 4, 32, 2, banded=True), WgmmaRow(64, 64, 4, 48, 2, banded=False,
    min_keys=1000), WgmmaRow(64, 64, 3, 64, 2, min_keys=500),
    WgmmaRow(64, 64, 2, 64, 2), WgmmaRow(64, 64, 1, 128, 2),
    WgmmaRow(128, 64, 2, 64, 2), WgmmaRow(128, 128, 1, 128, 2),
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"causal": True}, (256, 32)),
        ({"window": (5, None)}, (256, 32)),
        ({"window": (None, 5)}, (256, 32)),
        ({"window": (-1, -1)}, (256, 48)),
        ({"sk": 1000}, (256, 48)),
        ({"sk": 999}, (192, 64)),
        ({"sk": 500}, (192, 64)),
        ({"sk": 499}, (128, 64)),
        ({"d": 65}, (128, 64)),
        ({"d": 65, "causal": True}, (128, 64)),
        ({"dv": 72}, (64, 128)),
        ({"d": 100, "dv": 128}, (64, 128)),
    ],
)
def test_the_first_row_that_is_for_the_call(
    options: dict[str, Any],
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(configs, "WGMMA_FORWARD", STEPS)
    size = {"batch": (64,), "sq": 4096, "sk": 4096, "d": 64, "dv": 64}
    plan = make_plan(half(**{**size, **options}), HOPPER)
    tile = tile_of(plan)
    assert (tile.rows, tile.columns) == expected
    assert f"forward: tile {tile.name}" in plan.reasons
    assert "rows a tile would be" not in str(plan)


@pytest.mark.parametrize(
    ("sq", "heads", "multiprocessors", "rows"),
    [
        (2048, 4, 32, 256),  # 32 tiles
        (2048, 4, 43, 256),  # 44 of 192 rows would be two for one multiprocessor
        (2048, 4, 44, 192),
        (2048, 4, 63, 192),
        (2048, 4, 64, 128),  # 64
        (2048, 4, 127, 128),
        (2048, 4, 128, 64),  # 128
        (2048, 4, 500, 64),  # not enough, but the most
        (2048, 24, 128, 128),  # three of 128 rows each, not two of 256
        (257, 9, 18, 192),  # 18 tiles, with less padding than 256 rows have
        (257, 9, 26, 192),
        (257, 9, 27, 128),  # 27
        (257, 9, 45, 64),  # 45
        (193, 100, 100, 256),  # less padding would be more tiles
        (192, 100, 100, 192),  # a quarter of 256 rows would be padding
        (128, 100, 100, 128),
        (65, 100, 100, 128),
        (64, 100, 100, 64),
        (1, 100, 100, 64),
        (1, 1, 100, 64),
        (128, 50, 100, 64),
    ],
)
def test_few_tiles_get_fewer_rows(
    sq: int,
    heads: int,
    multiprocessors: int,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(configs, "WGMMA_FORWARD", STEPS)
    gpu = dataclasses.replace(HOPPER, multiprocessors=multiprocessors)
    plan = make_plan(half(batch=(1,), hq=heads, hkv=heads, sq=sq, sk=2000), gpu)
    tile = tile_of(plan)
    assert tile.rows == rows
    count, of_first = (heads * ceil_div(sq, n) for n in (rows, 256))
    why = [x for x in plan.reasons if x.startswith("forward: 256 rows a tile")]
    if rows == 256:
        assert why == []
    elif count == of_first:
        padding = f"as many tiles as {rows}, with more padding"
        assert why == [f"forward: 256 rows a tile would be {padding}"]
    else:
        assert why == [
            f"forward: 256 rows a tile would be {of_first} tiles for {multiprocessors} "
            f"multiprocessors, {rows} are {count}"
        ]
    sound(plan)


def test_windows_see_few_keys() -> None:
    """What counts is the keys that a query may see, not all that there are."""
    row = next(r for r in WGMMA_FORWARD if r.banded and r.min_keys > 0)
    assert row.ping_pong
    size = {"batch": (64,), "sq": 16384, "sk": 16384, "d": row.max_depth}
    many, few = (row.tile(*row.limits, n, True) for n in (row.min_keys, 1))
    assert many is not None and few is None
    for window, same in (((None, 0), True), ((127, 0), False), ((9000, 9000), True)):
        problem = half(**size, dv=row.max_depth_v, window=window)
        assert (tile_of(make_plan(problem, HOPPER)) == many) == same


def test_rows_for_larger_heads_are_not_taken() -> None:
    for problem in calls():
        first = next(
            r for r in WGMMA_FORWARD
            if problem.head_dim <= r.max_depth and problem.head_dim_v <= r.max_depth_v
        )  # fmt: skip
        tile = tile_of(make_plan(problem, HOPPER))
        rows = [r for r in WGMMA_FORWARD if r.limits == first.limits]
        keys = problem.seqlen_k
        made = {r.tile(problem.head_dim, problem.head_dim_v, keys, banded)
                for r in rows for banded in (False, True)}  # fmt: skip
        assert tile in made


def test_registers_are_those_of_the_kernel() -> None:
    source = (source_root() / "wgmma" / "forward.cuh").read_text()
    for consumers, registers in _HOPPER_REGISTERS.items():
        condition = f"kConsumers == {consumers}" if consumers > 2 else ""
        assert re.search(rf"{condition}\s*[?:]\s*{registers}\b", source), consumers


def test_known_tiles() -> None:
    """Whatever is tuned: large calls have rows for two warpgroups or more."""
    for d in WGMMA_DEPTHS:
        for causal in (False, True):
            problem = half(batch=(8,), sq=4096, sk=4096, d=d, causal=causal)
            tile = tile_of(make_plan(problem, HOPPER))
            assert (tile.depth, tile.depth_v) == (d, d)
            assert tile.consumers >= 2 and tile.stages >= 2


# --- Launches and workspace -----------------------------------------------------------


@pytest.mark.parametrize("multiprocessors", [1, 7, 8, 9, 132])
def test_a_block_for_each_multiprocessor(multiprocessors: int) -> None:
    """More tiles than that are claimed one by one, with a counter."""
    tile = WgmmaTile(1, 64, 64, 64)
    gpu = dataclasses.replace(HOPPER, multiprocessors=multiprocessors)
    plan = make_plan(half(batch=(2,), hq=4, sq=64, config=tile), gpu)
    assert grids(plan) == {"forward": min(8, multiprocessors)}
    if multiprocessors >= 8:
        assert plan.workspace == ()
    else:
        (claims,) = plan.workspace
        assert (claims.name, claims.shape, claims.dtype) == ("claims", (1,), UINT64)
        assert not claims.zero and claims.nbytes == 8
        assert "workspace: claims" in str(plan)
    assert [step.block for step in plan.steps] == [256]


def test_more_tiles_than_a_launch_can_have() -> None:
    size = {"batch": (2**20,), "sq": 2**20, "sk": 64, "hq": 64, "hkv": 64}
    plan = make_plan(half(**size), HOPPER)
    assert plan.family != "wgmma" and plan.steps[0].grid == MAX_GRID
    (why,) = [x for x in plan.reasons if x.startswith("not family wgmma: ")]
    assert "tiles are more than a launch can have" in why
    with pytest.raises(ValueError, match="more than a launch can have"):
        make_plan(half(**size, config="wgmma"), HOPPER)


@pytest.mark.parametrize("size", [{"batch": (0,)}, {"sq": 0}, {"batch": (2, 0)}])
def test_empty_results_launch_nothing(size: dict[str, Any]) -> None:
    plan = make_plan(half(**size), HOPPER)
    assert plan.family == "wgmma"
    assert plan.steps == () and plan.workspace == ()
    # There may be no address to make a map of.
    assert plan.maps == ()


# --- Sections -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "section"),
    [
        # Every query sees the same keys, so their order is that of the heads.
        ({}, 1),
        ({"window": (100, None)}, 1),
        # 4096 * 256 bytes of a head: 32 MiB hold 32.
        ({"causal": True}, 32),
        ({"window": (None, 7)}, 32),
        ({"window": (100, 7)}, 32),
        # Four heads of queries share each.
        ({"causal": True, "hkv": 16}, 128),
        ({"causal": True, "hq": 16, "hkv": 4}, 64),
        # Never less than eight, and no more than there are.
        ({"causal": True, "sk": 2**17}, 8),
        ({"causal": True, "batch": (1,), "hq": 5, "hkv": 5}, 5),
        ({"causal": True, "batch": (1,), "hq": 1, "hkv": 1}, 1),
        ({"causal": True, "d": 192, "dv": 128}, 12),
    ],
    ids=str,
)
def test_heads_that_share_the_cache(options: dict[str, Any], section: int) -> None:
    size = {"batch": (4,), "sq": 4096, "sk": 4096, "hq": 64, "hkv": 64, "d": 64}
    plan = make_plan(half(**{**size, **options}), HOPPER)
    assert plan.section == section


def test_sections_of_other_families() -> None:
    for family in ("simt", "mma"):
        assert make_plan(half(causal=True, config=family), HOPPER).section == 1


# --- config= --------------------------------------------------------------------------


@halves
def test_a_tile_can_be_forced(dtype: np.dtype) -> None:
    tile = WgmmaTile(2, 48, 128, 96, 3, ping_pong=True)
    plan = make_plan(make(dtype=dtype, config=tile), HOPPER)
    assert tile_of(plan) == tile
    assert f"config= asks for tile {tile.name}" in plan.reasons
    assert "family wgmma: config= asks for it" in plan.reasons
    assert maps_of(plan)["q"].box[1] == 128 and maps_of(plan)["k"].box[1] == 48
    sound(plan)


@pytest.mark.parametrize(
    ("tile", "why"),
    [
        (WgmmaTile(0, 64, 64, 64), "consumers must be 1 to 4"),
        (WgmmaTile(5, 64, 64, 64), "consumers must be 1 to 4"),
        (WgmmaTile(1, 64, 64, 64, 0), "stages must be 1 to 8"),
        (WgmmaTile(1, 16, 64, 64, 9), "stages must be 1 to 8"),
        (WgmmaTile(1, 40, 64, 64), "columns must be a multiple of 16 up to 256"),
        (WgmmaTile(1, 0, 64, 64), "columns must be a multiple of 16 up to 256"),
        (WgmmaTile(1, 272, 64, 64), "columns must be a multiple of 16 up to 256"),
        (WgmmaTile(1, 64, 72, 64), "depth and depth_v must be multiples of 16"),
        (WgmmaTile(1, 64, 64, 72), "depth and depth_v must be multiples of 16"),
        (WgmmaTile(1, 64, 0, 64), "depth and depth_v must be multiples of 16"),
        (WgmmaTile(1, 64, 64, 272), "depth and depth_v must be multiples of 16"),
        (WgmmaTile(1, 64, 48, 64), "doesn't fit.*head_dim 64 and 64"),
        (WgmmaTile(1, 64, 64, 48), "doesn't fit.*head_dim 64 and 64"),
        (WgmmaTile(2, 128, 192, 128, 4), "doesn't fit: 377856 of 232448 bytes"),
        (
            WgmmaTile(4, 80, 64, 64),
            "take 92 registers of a thread beside 26 others",
        ),
        (
            WgmmaTile(3, 16, 64, 256),
            "140 registers of a thread beside 26 others",
        ),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_tiles_that_no_kernel_can_have(tile: WgmmaTile, why: str) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        make_plan(half(config=tile), HOPPER)
    assert tile.name in str(raised.value)
    doubt = tile.fault(BF16)
    assert (doubt != "") == ("doesn't fit" not in why) and doubt in str(raised.value)


def test_a_tile_for_large_heads_serves_small_ones() -> None:
    plan = make_plan(half(d=8, dv=8, config=WgmmaTile(1, 16, 256, 16)), HOPPER)
    assert tile_of(plan).depth == 256
    sound(plan)


# --- explain --------------------------------------------------------------------------


def test_explain_names_family_tile_and_copies() -> None:
    q, k = (
        zeros(2, 50, 4, 46, dtype=np.float16),
        zeros(2, 3000, 4, 46, dtype=np.float16),
    )
    v = zeros(2, 3000, 4, 64, dtype=np.float16)
    text = str(explain(q, k, v, causal=True, device="sm_90"))
    for fact in (
        "family: wgmma", "forward_wgmma_fp16_", "_right, 8 blocks of 256 threads",
        "why: family wgmma: Hopper's tensor cores take this call", "q is copied",
        "k is copied", "why: forward: tile 64x", "positive multiples of 16 bytes",
    ):  # fmt: skip
        assert fact in text, fact
    bias = zeros(50, 3000, dtype=np.float16)
    text = str(explain(q, k, v, bias=bias, device="sm_90"))
    assert "family: mma" in text
    assert "why: not family wgmma: wgmma reads no bias array yet" in text
    text = str(explain(q, k, v, direction="backward", device="sm_90"))
    assert "why: not family wgmma: dk can't be written by tensor maps" in text
    text = str(explain(v, v, v, direction="backward", causal=True, device="sm_90"))
    for fact in (
        "family: wgmma", "kernel: backward_terms_wgmma_fp16_128x128d64v64_2s, ",
        "kernel: backward_wgmma_fp16_128x128d64v64_2s_right, 132 blocks of 384 threads",
        "kernel: convert_dq_mma_fp16_", "workspace: row_terms (2, 4, 24, 2, 128) fl",
        "workspace: claims (1,) uint64",
        "why: backward: tile 128x128d64v64_2s", "its blocks add to dq by atomics",
    ):  # fmt: skip
        assert fact in text, fact
    v = zeros(1, 300, 4, 256, dtype=np.float16)
    text = str(explain(v, v, v, direction="backward", causal=True, device="sm_90"))
    for fact in (
        "family: wgmma", "kernel: backward_terms_wgmma_fp16_64x64d256v256_2sr, ",
        "kernel: backward_by_role_wgmma_fp16_64x64d256v256_2sr_right, "
        "20 blocks of 512 threads",
        "why: backward: tile 64x64d256v256_2sr",
    ):  # fmt: skip
        assert fact in text, fact


def test_what_a_feature_changes_in_the_kernel() -> None:
    cases: list[tuple[dict[str, Any], Variant]] = [
        ({}, Variant()),
        ({"causal": "top_left"}, Variant(right=True)),
        ({"window": (3, None)}, Variant(left=True)),
        ({"softcap": 10.0}, Variant(softcap=True)),
        ({"scale": 0.0}, Variant(scale_first=True)),
        ({"arrays": {"alibi_slopes": info((4,))}}, Variant(alibi=True)),
        ({"d": 46}, Variant()),
    ]
    for options, variant in cases:
        plan = make_plan(half(**{"dv": 64, **options}), HOPPER)
        assert plan.family == "wgmma"
        assert [step.spec.variant for step in plan.steps] == [variant], options
