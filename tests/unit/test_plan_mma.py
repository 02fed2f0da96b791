"""Planning for the family `mma`: which calls it serves, its tiles, grids and copies."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_flash import configs, explain
from cupy_flash.configs import MMA_DEPTHS, MmaRow, MmaTile, SimtTile
from cupy_flash.device import DeviceInfo
from cupy_flash.dtypes import accumulator
from cupy_flash.plan import make_plan
from cupy_flash.problem import ArrayInfo, Options
from cupy_flash.spec import KernelSpec
from cupy_flash.validate import contiguous_strides, make_problem
from cupy_flash.variant import Variant

from .test_plan import (
    BOOL,
    DEVICES,
    DTYPES,
    FLOAT32,
    ceil_div,
    dtypes,
    grids,
    info,
    kernels,
    make,
    sound,
    tiles,
    with_bias,
    zeros,
)

KIB = 1024
# Hopper's memory and multiprocessors without the instructions that only it has.
HOPPER = dataclasses.replace(DEVICES["sm_90"], compute_capability=80)
GPUS = DEVICES | {"sm_90": HOPPER}
TABLES = {
    "forward": configs.MMA_FORWARD,
    "backward": configs.MMA_BACKWARD,
    "backward_dkdv": configs.MMA_BACKWARD,
    "backward_dq": configs.MMA_BACKWARD_DQ,
    "backward_dbias": configs.MMA_BACKWARD_DBIAS,
}
# All kernels of a call, by the way in which its gradients are computed.
WAYS = {
    "forward": {"direction": "forward"},
    "backward": {"direction": "backward"},
    "deterministic": {"direction": "backward", "deterministic": True},
}
ways = pytest.mark.parametrize("way", WAYS)
# Enough blocks for every GPU.
LARGE = {"batch": (8,), "sq": 4096, "sk": 4096, "hq": 8, "hkv": 8}


def with_memory(kib: int) -> DeviceInfo:
    return dataclasses.replace(HOPPER, shared_memory=kib * KIB)


# --- Which family ---------------------------------------------------------------------


@dtypes
@ways
@pytest.mark.parametrize("name", DEVICES)
def test_the_family_goes_by_gpu_and_dtype(name: str, dtype: np.dtype, way: str) -> None:
    gpu = DEVICES[name]
    needed = 75 if dtype == np.float16 else 80
    plan = make_plan(make(**WAYS[way], d=64, dtype=dtype), gpu)
    expected = "mma" if gpu.compute_capability >= needed else "simt"
    if name == "sm_90" and way != "deterministic" and dtype.itemsize == 2:
        expected = "wgmma"
    assert plan.family == expected
    (why,) = [reason for reason in plan.reasons if reason.startswith("family ")]
    assert why.startswith(f"family {expected}: ")
    if expected == "simt":
        (why,) = [x for x in plan.reasons if x.startswith("not family mma: ")]
        assert f"{dtype} from compute capability {needed / 10}" in why


@pytest.mark.parametrize(
    ("d", "dv", "family"),
    [(256, 256, "mma"), (257, 64, "simt"), (64, 257, "simt"), (1, 256, "mma")],
)
@ways
def test_the_family_goes_by_head_size(d: int, dv: int, family: str, way: str) -> None:
    problem = make(**WAYS[way], d=d, dv=dv, dtype=DTYPES["bf16"])
    plan = make_plan(problem, HOPPER)
    assert plan.family == family
    assert ("head sizes of up to 256" in str(plan)) == (family == "simt")


# The kernels of a call, each with its table.
NEEDED = {
    "forward": {"forward": "MMA_FORWARD"},
    "backward": {"backward": "MMA_BACKWARD", "backward_dbias": "MMA_BACKWARD_DBIAS"},
    "deterministic": {
        "backward_dq": "MMA_BACKWARD_DQ", "backward_dkdv": "MMA_BACKWARD",
        "backward_dbias": "MMA_BACKWARD_DBIAS",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("way", "kernel"), [(way, kernel) for way in NEEDED for kernel in NEEDED[way]]
)
def test_what_does_not_fit_is_left_to_simt(
    way: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kernels of a call are of one family, whichever of them doesn't fit."""
    options = {**WAYS[way], "d": 64, "dtype": DTYPES["fp16"]}
    if kernel == "backward_dbias":
        options |= {"arrays": with_bias(1, 70), "bias_grad": True}
    assert make_plan(make(**options), HOPPER).family == "mma"
    monkeypatch.setattr(configs, NEEDED[way][kernel], (MmaRow(2, 256, 4096, 64, 4),))
    plan = make_plan(make(**options), HOPPER)
    sound(plan)
    assert plan.family == "simt"
    assert {s.spec.family for s in plan.steps} <= {"simt", "passes"}
    assert len(plan.workspace) == len({entry.name for entry in plan.workspace})
    assert kernels(plan).count("delta") == (way != "forward")
    assert "family simt: it takes everything" in plan.reasons
    (why,) = [x for x in plan.reasons if x.startswith("not family mma: ")]
    assert f"not family mma: {kernel}: no tile" in why
    assert "64" in why and "227 KiB" in why
    with pytest.raises(ValueError, match=f"config='mma'.*{kernel}: no tile"):
        make_plan(make(**options, config="mma"), HOPPER)


@ways
def test_little_shared_memory(way: str) -> None:
    """The whole tables, on GPUs that have less and less."""
    families = []
    for kib in range(227, 47, -1):
        problem = make(**WAYS[way], d=128, dtype=DTYPES["fp64"])
        plan = make_plan(problem, with_memory(kib))
        sound(plan)
        families.append(plan.family)
    change = families.index("simt")
    assert set(families[:change]) == {"mma"} and set(families[change:]) == {"simt"}


@pytest.mark.parametrize(
    ("gpu", "dtype", "d", "why"),
    [
        ("sm_70", "fp16", 64, r"capability 7\.5"),
        ("sm_75", "bf16", 64, r"capability 8\.0"),
        ("sm_75", "fp32", 64, r"capability 8\.0"),
        ("sm_75", "fp64", 64, r"capability 8\.0"),
        ("sm_90", "fp16", 300, "up to 256"),
    ],
)
@ways
def test_mma_where_it_can_not_be_had(
    gpu: str, dtype: str, d: int, why: str, way: str
) -> None:
    problem = make(**WAYS[way], d=d, dtype=DTYPES[dtype], config="mma")
    with pytest.raises(ValueError, match=f"config='mma' can't be had: .*{why}"):
        make_plan(problem, DEVICES[gpu])


def test_simt_can_be_forced() -> None:
    for way in WAYS.values():
        plan = make_plan(make(**way, config="simt"), HOPPER)
        assert plan.family == "simt"
        assert {s.spec.family for s in plan.steps} <= {"simt", "passes"}
        sound(plan)


@dtypes
@given(d=st.integers(1, 256), dv=st.integers(1, 256), extra=st.booleans())
@settings(deadline=None, max_examples=60)
def test_every_plan_is_sound(dtype: np.dtype, d: int, dv: int, extra: bool) -> None:
    arrays = with_bias(100, 70) | {"mask": info((100, 70), BOOL)} if extra else None
    for gpu in DEVICES.values():
        for way in WAYS.values():
            gradient = extra and way["direction"] == "backward"
            problem = make(
                **way, d=d, dv=dv, dtype=dtype, arrays=arrays, bias_grad=gradient
            )
            sound(make_plan(problem, gpu))


# --- Tiles ----------------------------------------------------------------------------


def spec(
    kernel: str, tile: MmaTile, dtype: np.dtype, variant: Variant | None = None
) -> KernelSpec:
    variant = Variant() if variant is None else variant
    return KernelSpec("mma", kernel, dtype, variant, tile, tile.threads, 1)


# Worked out by hand: 16 bytes of padding after each row of a tile.
@pytest.mark.parametrize(
    ("kernel", "dtype", "tile", "bytes_"),
    [
        # 128 * 272 + 64 * 144 + 64 * 272: the output takes the place of q
        ("forward", "fp16", MmaTile(128, 64, 64, 128, 4), 61440),
        # 64 * 272 + 2 * (32 * 272 + 32 * 144)
        ("forward", "fp32", MmaTile(64, 32, 64, 32, 4, stages=2), 44032),
        # 32 * 784 + 32 * 784 + 32 * 528
        ("forward", "fp64", MmaTile(32, 32, 96, 64, 2), 67072),
        # 128 * 144 * 2 + 2 * 64 * 144 * 2 + 2 * 128 * 144 + 2 * 2 * 64 * 4
        ("backward", "bf16", MmaTile(128, 64, 64, 64, 8, stages=2), 111616),
        ("backward_dkdv", "bf16", MmaTile(128, 64, 64, 64, 8, stages=2), 74752),
        # 64 * 1040 + 64 * 784 + 32 * 1040 + 32 * 784 + 3 * 64 * 144 + 2 * 32 * 4,
        # without dq 2 * 64 * 144
        ("backward", "fp32", MmaTile(64, 32, 256, 192, 8, across=2), 203008),
        ("backward_dkdv", "fp32", MmaTile(64, 32, 256, 192, 8, across=2), 193792),
        # 32 * 272 * 2 + 32 * 272 * 2 + 2 * 32 * 272 + 2 * 32 * 8
        ("backward", "fp64", MmaTile(32, 32, 32, 32, 2), 52736),
        ("backward_dkdv", "fp64", MmaTile(32, 32, 32, 32, 2), 35328),
        # 64 * 144 + 64 * 80 + 64 * 144 + 64 * 80
        ("backward_dq", "fp16", MmaTile(64, 64, 64, 32, 4), 28672),
        # 16 * 144 + 16 * 272 + 2 * (32 * 144 + 32 * 272)
        ("backward_dq", "fp32", MmaTile(16, 32, 32, 64, 1, stages=2), 33280),
        # 64 * 528 + 64 * 400 + 32 * 528 + 32 * 400; the stages play no part
        ("backward_dbias", "fp16", MmaTile(64, 32, 256, 192, 4, stages=3), 89088),
    ],
)
def test_shared_memory(kernel: str, dtype: str, tile: MmaTile, bytes_: int) -> None:
    assert spec(kernel, tile, DTYPES[dtype]).shared_memory == bytes_
    # The bits that say which pairs are seen; they start at multiples of 16 bytes.
    for variant in (Variant(mask=True), Variant(bias=FLOAT32)):
        seen = 16 if kernel in ("forward", "backward_dq") else 0
        with_seen = spec(kernel, tile, DTYPES[dtype], variant).shared_memory
        assert with_seen == bytes_ + seen


@pytest.mark.parametrize(("columns", "seen"), [(16, 16), (64, 16), (96, 32), (128, 32)])
def test_bits_of_what_is_seen(columns: int, seen: int) -> None:
    """Eight bytes for each 32 columns."""
    tile = MmaTile(64, columns, 64, 64, 4)
    fp16 = DTYPES["fp16"]
    without = spec("forward", tile, fp16).shared_memory
    masked = spec("forward", tile, fp16, Variant(mask=True)).shared_memory
    assert masked - without == seen


def test_names_of_tiles() -> None:
    tile = MmaTile(128, 64, 128, 96, 4, stages=2, blocks=2)
    assert tile.name == "128x64d128v96_4w2s_2b" and tile.threads == 128
    assert dataclasses.replace(tile, across=2).name == "128x64d128v96_4w2sa2_2b"
    changes = {
        "rows": 64, "columns": 32, "depth": 96, "depth_v": 64, "warps": 8, "stages": 1,
        "across": 4, "blocks": 1,
    }  # fmt: skip
    assert set(changes) == {field.name for field in dataclasses.fields(MmaTile)}
    others = {dataclasses.replace(tile, **{n: v}).name for n, v in changes.items()}
    assert len(others | {tile.name}) == len(changes) + 1


def test_traits() -> None:
    tile = MmaTile(128, 64, 128, 96, 8, stages=2, across=4, blocks=3)
    text = spec("backward", tile, DTYPES["bf16"], Variant(right=True)).tail()
    for name, value in {
        "Rows": 128, "Columns": 64, "Depth": 128, "DepthV": 96, "Warps": 8,
        "Stages": 2, "Across": 4, "Threads": 256, "BatchAxes": 1, "Products": 1,
    }.items():  # fmt: skip
        assert f"constexpr int k{name} = {value};" in text
    assert "constexpr bool kBandRight = true;" in text
    assert "__launch_bounds__(256, 3)" in text
    assert "sizeof(mma::BackwardStorage<Traits, true>) == " in text
    assert "mma::backward<Traits>(params);" in text
    text = spec("backward_dkdv", tile, DTYPES["bf16"]).tail()
    assert "sizeof(mma::BackwardStorage<Traits, false>) == " in text


@pytest.mark.parametrize(
    ("dtype", "tf32", "products"),
    [("fp16", False, 1), ("bf16", False, 1), ("fp32", False, 3), ("fp32", True, 1),
     ("fp64", False, 1)],
)  # fmt: skip
def test_products_of_float32(dtype: str, tf32: bool, products: int) -> None:
    """As precise as float32 takes three products of tf32."""
    options = {"precision": "tf32"} if tf32 else {}
    for way in WAYS.values():
        plan = make_plan(make(**way, **options, dtype=DTYPES[dtype]), HOPPER)
        specs = [s.spec for s in plan.steps if s.spec.kernel in TABLES]
        assert specs
        for kernel in specs:
            assert f"kProducts = {products};" in kernel.tail()
            assert kernel.symbol.endswith("tf32") == tf32


@dtypes
@pytest.mark.parametrize(
    ("d", "dv"), [(64, 64), (64, 61), (61, 64), (61, 61), (1, 1), (8, 256)]
)
@ways
def test_heads_that_are_no_whole_loads(
    dtype: np.dtype, d: int, dv: int, way: str
) -> None:
    """Only kernels that need it look at the end of each row."""
    ragged = any(size * dtype.itemsize % 16 for size in (d, dv))
    options = {**WAYS[way], "d": d, "dv": dv, "dtype": dtype}
    plan = make_plan(make(**options, config="simt"), HOPPER)
    assert not any(step.spec.variant.ragged for step in plan.steps)
    plan = make_plan(make(**options), HOPPER)
    for spec_ in (step.spec for step in plan.steps if step.spec.kernel in TABLES):
        if spec_.family == "mma":
            assert spec_.variant.ragged == ragged
            assert f"kRagged = {str(ragged).lower()};" in spec_.tail()


def rows() -> Iterator[tuple[str, MmaRow]]:
    for kernel, table in TABLES.items():
        for row in table:
            yield kernel, row


def row_id(value: Any) -> str:
    if isinstance(value, MmaRow):
        return f"{8 * value.itemsize}bit_{value.max_depth}_{value.rows}x{value.columns}"
    return str(value)


@pytest.mark.parametrize(("kernel", "row"), list(rows()), ids=row_id)
def test_rows_make_sense(kernel: str, row: MmaRow) -> None:
    assert row.itemsize in (2, 4, 8) and row.max_depth in MMA_DEPTHS
    dtype = {2: DTYPES["fp16"], 4: FLOAT32, 8: DTYPES["fp64"]}[row.itemsize]
    for depth in (d for d in MMA_DEPTHS if d <= row.max_depth):
        tile = row.tile(depth, 1)
        assert tile.fault(dtype) == ""
        assert tile.depth >= depth
        if tile.across == 1:
            assert (tile.depth, tile.depth_v) == (depth, 32)
        assert tile.threads * tile.blocks <= 1024
    assert row.tile(row.max_depth + 1, 1) is None
    assert row.tile(1, row.max_depth + 1) is None
    assert row.across == 1 or kernel in ("backward", "backward_dkdv")


@pytest.mark.parametrize(
    ("head", "depth"),
    [(1, 32), (32, 32), (33, 64), (65, 96), (96, 96), (97, 128), (129, 192),
     (193, 256), (256, 256)],
)  # fmt: skip
def test_the_least_depth_that_holds_the_head(head: int, depth: int) -> None:
    row = MmaRow(2, 256, 64, 64, warps=4)
    assert row.tile(head, 5).depth == depth and row.tile(5, head).depth_v == depth


@pytest.mark.parametrize(
    ("itemsize", "across", "multiple"),
    [(2, 1, 32), (4, 1, 32), (8, 1, 32), (2, 2, 32), (4, 2, 64), (8, 2, 32),
     (2, 4, 64), (4, 4, 128), (8, 4, 64)],
)  # fmt: skip
def test_depths_that_warps_side_by_side_can_divide(
    itemsize: int, across: int, multiple: int
) -> None:
    row = MmaRow(itemsize, 256, 32, 64, warps=8, across=across)
    for head in range(1, 257):
        tile = row.tile(head, 257 - head)
        for size, depth in ((head, tile.depth), (257 - head, tile.depth_v)):
            possible = [d for d in MMA_DEPTHS if d >= size and d % multiple == 0]
            assert depth == possible[0]
    dtype = {2: DTYPES["fp16"], 4: FLOAT32, 8: DTYPES["fp64"]}[itemsize]
    wrong = MmaTile(128, 64, 96, 128, 8, across=across)
    assert (wrong.fault(dtype) == "") == (96 % multiple == 0)
    wrong = MmaTile(128, 64, 128, 96, 8, across=across)
    assert (wrong.fault(dtype) == "") == (96 % multiple == 0)


@pytest.mark.parametrize("kernel", TABLES)
def test_no_row_is_dead(kernel: str) -> None:
    """Each row is the choice for some head on some GPU."""
    options: dict[str, Any] = {"direction": "forward"}
    if kernel != "forward":
        apart = kernel in ("backward_dq", "backward_dkdv")
        options = {"direction": "backward", "deterministic": apart}
    options["bias_grad"] = kernel == "backward_dbias"
    met: set[tuple[int, MmaTile]] = set()
    memories = {gpu.shared_memory: gpu for gpu in DEVICES.values()}
    for dtype in (DTYPES["fp16"], FLOAT32, DTYPES["fp64"]):
        # Many short sequences, a few, and long ones.
        sizes = ((100, 64), (2, 100), (2, 10**5))
        for d, dv, (b, n) in itertools.product(MMA_DEPTHS, MMA_DEPTHS, sizes):
            bias, mask = with_bias(1, n), {"mask": info((n, n), BOOL)}
            # Whether pairs are looked through makes a difference of a few bytes.
            for arrays in (bias,) if options["bias_grad"] else ({}, mask):
                problem = make(
                    **options, batch=(b,), sq=n, sk=n, d=d, dv=dv, dtype=dtype,
                    arrays=arrays,
                )  # fmt: skip
                for gpu in memories.values():
                    plan = make_plan(problem, gpu)
                    if plan.family == "mma" and kernel in tiles(plan):
                        met.add((dtype.itemsize, tiles(plan)[kernel]))

    def chosen(row: MmaRow) -> bool:
        pairs = itertools.product(MMA_DEPTHS, MMA_DEPTHS)
        return any((row.itemsize, row.tile(d, dv)) in met for d, dv in pairs)

    assert [row for row in TABLES[kernel] if not chosen(row)] == []


@pytest.mark.parametrize(
    ("gpu", "dtype", "d", "way", "kernel", "name"),
    [
        ("sm_90", "fp16", 64, "forward", "forward", "128x128d64v64_4w1s_2b"),
        ("sm_90", "bf16", 128, "forward", "forward", "128x64d128v128_4w2s_2b"),
        ("sm_90", "bf16", 128, "backward", "backward", "128x64d128v128_8w2sa2_1b"),
        ("sm_90", "fp32", 64, "forward", "forward", "128x32d64v64_4w2s_2b"),
        ("sm_90", "fp64", 40, "backward", "backward", "32x32d64v64_4w1sa2_2b"),
    ],
)
def test_known_tiles(
    gpu: str, dtype: str, d: int, way: str, kernel: str, name: str
) -> None:
    """A few known choices: a change of a table is meant, and shows here."""
    problem = make(**WAYS[way], **LARGE, d=d, dtype=DTYPES[dtype], config="mma")
    plan = make_plan(problem, DEVICES[gpu])
    assert tiles(plan)[kernel].name == name
    assert f"{kernel}: tile {name}" in plan.reasons
    assert "rows a block would be" not in str(plan)


# --- Small problems -------------------------------------------------------------------

# Among them one for less memory, one with too few warps, one of another dtype.
STEPS = (
    MmaRow(2, 64, 256, 64, warps=8), MmaRow(2, 64, 128, 32, warps=4),
    MmaRow(2, 64, 128, 64, warps=4), MmaRow(2, 128, 64, 64, warps=4),
    MmaRow(2, 128, 16, 32, warps=1), MmaRow(4, 64, 16, 16, warps=1),
)  # fmt: skip
# The table of each pass, and the kernel whose tile is of it.
PASSES = {
    ("forward", "MMA_FORWARD"): "forward",
    ("backward", "MMA_BACKWARD"): "backward",
    ("deterministic", "MMA_BACKWARD"): "backward_dkdv",
    ("deterministic", "MMA_BACKWARD_DQ"): "backward_dq",
}
passes = pytest.mark.parametrize(
    ("way", "table", "kernel"), [(*key, kernel) for key, kernel in PASSES.items()]
)


def sized(way: str, kernel: str, rows: int, heads: int, **options: Any) -> Any:
    """A problem with so many rows and heads in what the blocks of a kernel share."""
    queries = kernel in ("forward", "backward_dq")
    sq, sk = (rows, 1000) if queries else (1000, rows)
    hkv, group = (1, heads) if queries else (heads, 3)
    return make(
        **WAYS[way], batch=(1,), sq=sq, sk=sk, hq=hkv * group, hkv=hkv,
        **{"dtype": DTYPES["bf16"], **options},
    )  # fmt: skip


@passes
@pytest.mark.parametrize(
    ("rows", "heads", "multiprocessors", "expected"),
    [
        (2048, 4, 32, (256, 64)),  # 32 blocks
        (2048, 4, 33, (128, 32)),  # 64 blocks, and not those of 64 rows
        (2048, 4, 65, (64, 64)),  # 128
        (2048, 4, 500, (64, 64)),  # still not enough, but the most of four warps
        (2000, 4, 32, (256, 64)),  # the last one is short
        (257, 9, 18, (256, 64)),
        (129, 100, 100, (256, 64)),  # less padding would be more blocks
        (128, 100, 100, (128, 32)),  # half of 256 rows would be padding
        (65, 100, 100, (128, 32)),
        (64, 100, 100, (64, 64)),
        (1, 100, 100, (64, 64)),
        (1, 1, 100, (64, 64)),
        (128, 50, 100, (64, 64)),
    ],
)
def test_few_blocks_get_fewer_rows(
    way: str,
    table: str,
    kernel: str,
    rows: int,
    heads: int,
    multiprocessors: int,
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(configs, table, STEPS)
    gpu = dataclasses.replace(HOPPER, multiprocessors=multiprocessors)
    plan = make_plan(sized(way, kernel, rows, heads), gpu)
    tile = tiles(plan)[kernel]
    assert (tile.rows, tile.columns) == expected
    count, of_first = (heads * ceil_div(rows, n) for n in (tile.rows, 256))
    assert grids(plan)[kernel] == count
    why = [r for r in plan.reasons if r.startswith(f"{kernel}: 256 rows a block")]
    if tile.rows == 256:
        assert why == []
    elif count == of_first:
        assert why == [
            f"{kernel}: 256 rows a block would be more than the sequence has"
        ]
    else:
        assert why == [
            f"{kernel}: 256 rows a block would be {of_first} blocks for "
            f"{multiprocessors} multiprocessors, {tile.rows} are {count}"
        ]
    sound(plan)


@passes
def test_a_tile_that_is_asked_for_stays(way: str, table: str, kernel: str) -> None:
    tile = MmaTile(128, 32, 64, 64, 4)
    plan = make_plan(sized(way, kernel, 1, 1, config=tile), HOPPER)
    assert tiles(plan)[kernel] == tile
    assert "rows a block would be" not in str(plan)


@pytest.mark.parametrize(
    ("gpu", "d", "kernel", "rows"),
    [("sm_75", 256, "forward", 32), ("sm_75", 256, "backward", 16),
     ("sm_86", 256, "backward", 32)],
)  # fmt: skip
def test_tiles_for_little_memory_are_no_smaller_for_few_blocks(
    gpu: str, d: int, kernel: str, rows: int
) -> None:
    """Those that are left have too few warps, or are taken already."""
    for n in (1, 100, 100_000):
        problem = make(kernel, sq=n, sk=n, d=d, dtype=DTYPES["fp16"])
        assert tiles(make_plan(problem, DEVICES[gpu]))[kernel].rows == rows


def test_the_gradient_of_a_bias_has_parts_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tile is of the same size for any problem."""
    monkeypatch.setattr(configs, "MMA_BACKWARD_DBIAS", STEPS[1:4])
    met = set()
    for n in (1, 100, 4000):
        problem = make(
            "backward", sq=n, sk=n, arrays=with_bias(1, n), bias_grad=True,
            dtype=DTYPES["fp16"],
        )  # fmt: skip
        plan = make_plan(problem, HOPPER)
        met.add(tiles(plan)["backward_dbias"].rows)
    assert met == {128}


@settings(deadline=None, max_examples=150)
@given(
    n=st.integers(1, 5000), heads=st.integers(1, 40), d=st.integers(1, 256),
    dtype=st.sampled_from(list(DTYPES.values())), gpu=st.sampled_from(list(GPUS)),
    way=st.sampled_from(list(WAYS)),
)  # fmt: skip
def test_more_blocks_only_where_they_are_missing(
    n: int, heads: int, d: int, dtype: np.dtype, gpu: str, way: str
) -> None:
    """A huge problem has more rows a block only if they would be few, or padding."""
    size = {"batch": (1,), "hq": heads, "hkv": heads, "d": d, "dtype": dtype}
    plan, huge = (
        make_plan(make(**WAYS[way], **size, sq=s, sk=s), GPUS[gpu]) for s in (n, 2**20)
    )
    sound(plan)
    for kernel, tile in tiles(plan).items():
        first = tiles(huge).get(kernel)
        if kernel not in TABLES or first is None or plan.family == "simt":
            continue
        assert tile.rows <= first.rows
        assert (tile.depth, tile.depth_v) == (first.depth, first.depth_v)
        few = heads * ceil_div(n, first.rows) < GPUS[gpu].multiprocessors
        if tile != first:
            assert few or n <= tile.rows
            assert grids(plan)[kernel] > heads * ceil_div(n, first.rows) or (
                n <= tile.rows < first.rows
            )


# --- Grids and workspace --------------------------------------------------------------


@dtypes
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (100, 16), (40, 128)])
def test_grids(dtype: np.dtype, d: int, dv: int) -> None:
    size = {"batch": (3, 2), "sq": 130, "sk": 65, "hq": 6, "hkv": 2, "d": d, "dv": dv}
    plan = make_plan(make(**size, dtype=dtype), HOPPER)
    tile = tiles(plan)["forward"]
    assert grids(plan) == {"forward": 6 * 6 * ceil_div(130, tile.rows)}
    assert plan.workspace == ()

    plan = make_plan(make("backward", **size, dtype=dtype), HOPPER)
    assert kernels(plan) == ["delta", "backward", "convert_dq"]
    tile = tiles(plan)["backward"]
    assert grids(plan) == {
        "delta": ceil_div(6 * 6 * 130, 16),
        "backward": 6 * 2 * ceil_div(65, tile.rows),
        "convert_dq": ceil_div(6 * 6 * 9, 4),
    }
    assert tiles(plan)["convert_dq"].depth == tile.depth
    delta, sums = plan.workspace
    assert (delta.name, delta.shape, delta.zero) == ("delta", (6, 6, 130), False)
    assert (sums.name, sums.zero) == ("dq_sums", True)
    assert sums.shape == (6, 6, 9, tile.depth // 8, 32, 4)
    assert delta.dtype == sums.dtype == accumulator(dtype)
    assert "deterministic=True" in str(plan)

    problem = make("backward", **size, dtype=dtype, deterministic=True)
    plan = make_plan(problem, HOPPER)
    dq, dkdv = tiles(plan)["backward_dq"], tiles(plan)["backward_dkdv"]
    assert grids(plan) == {
        "delta": ceil_div(6 * 6 * 130, 16),
        "backward_dq": 6 * 6 * ceil_div(130, dq.rows),
        "backward_dkdv": 6 * 2 * ceil_div(65, dkdv.rows),
    }
    assert [entry.name for entry in plan.workspace] == ["delta"]
    assert "the same bits" in str(plan)


def test_grids_stay_below_the_limit() -> None:
    """A block of `mma` has one tile, so that `simt` does what is left over."""
    size = {"batch": (2**20,), "sq": 2**20, "sk": 2**20, "hq": 64, "hkv": 64, "d": 8}
    for way in WAYS.values():
        plan = make_plan(make(**way, **size), HOPPER)
        assert plan.family == "simt"
        assert "blocks are more than a launch can have" in str(plan)
        with pytest.raises(ValueError, match="more than a launch can have"):
            make_plan(make(**way, **size, config="mma"), HOPPER)


def test_the_sums_hold_every_query() -> None:
    """16 rows and `depth` channels in each 32 x 4 x depth / 8 numbers."""
    for sq, d in ((1, 1), (16, 32), (17, 33), (4096, 100), (100, 256)):
        plan = make_plan(make("backward", sq=sq, d=d, dtype=DTYPES["bf16"]), HOPPER)
        (sums,) = [entry for entry in plan.workspace if entry.name == "dq_sums"]
        batch, heads, *own = sums.shape
        assert (batch, heads) == (2, 4)
        assert np.prod(own) == ceil_div(sq, 16) * 16 * tiles(plan)["backward"].depth
        assert np.prod(own) >= sq * d


def test_passes_know_only_what_they_need() -> None:
    problem = make(
        "backward", causal=True, softcap=3.0, precision="tf32",
        arrays=with_bias(1, 70) | {"mask": info((100, 70), BOOL)}, bias_grad=True,
    )  # fmt: skip
    variants = {s.spec.kernel: s.spec.variant for s in make_plan(problem, HOPPER).steps}
    assert variants["delta"] == variants["convert_dq"] == Variant()
    assert variants["reduce_dbias"] == Variant(bias=FLOAT32)
    assert variants["backward"].tf32 and variants["backward_dbias"].mask


@ways
def test_passes_have_threads_of_their_own(way: str) -> None:
    plan = make_plan(make(**WAYS[way], dtype=DTYPES["fp16"]), HOPPER)
    for step in plan.steps:
        passes = step.spec.kernel in ("delta", "convert_dq")
        assert step.block == (128 if passes else step.spec.tile.threads)
        assert (step.shared_memory == 0) == (step.spec.kernel == "delta")


# --- Copies ---------------------------------------------------------------------------


def strided(
    shape: tuple[int, ...], dtype: np.dtype, elements: tuple[int, ...], by: int = 0
) -> ArrayInfo:
    strides = tuple(step * dtype.itemsize for step in elements)
    return ArrayInfo(shape, strides, dtype, by)


Q = (2, 100, 4, 64)
FINE = {
    "transposed": (100 * 256, 64, 6400, 1),
    "padded": (100 * 4 * 80, 4 * 80, 80, 1),
    "broadcast": (0, 0, 0, 1),
    "reversed": (-100 * 256, -256, -64, 1),
}
COPIED = {
    "odd_rows": (100 * 260, 260 + 4, 65, 1),
    "every_second": (100 * 512, 512, 128, 2),
    "backwards": (100 * 256, 256, 64, -1),
    "channels_first": (100 * 256, 1, 6400, 100),
    "odd_batch": (100 * 256 + 1, 256, 64, 1),
}


@dtypes
@pytest.mark.parametrize("name", [*FINE, *COPIED])
def test_steps_that_need_a_copy(dtype: np.dtype, name: str) -> None:
    q = strided(Q, dtype, (FINE | COPIED)[name])
    plan = make_plan(make(dtype=dtype, arrays={"q": q}), HOPPER)
    assert plan.family == "mma"
    assert plan.copies == (("q",) if name in COPIED else ())
    assert ("q is copied: mma loads 16 bytes at a time" in str(plan)) == (
        name in COPIED
    )
    # No other family needs it.
    problem = make(dtype=dtype, arrays={"q": q}, config="simt")
    assert make_plan(problem, HOPPER).copies == ()


@dtypes
@pytest.mark.parametrize("by", range(16))
def test_starts_that_need_a_copy(dtype: np.dtype, by: int) -> None:
    v = info((2, 70, 2, 64), dtype, misalignment=by)
    plan = make_plan(make(dtype=dtype, arrays={"v": v}), HOPPER)
    assert plan.copies == (("v",) if by else ())


def test_what_is_loaded_by_elements_is_not_copied() -> None:
    fp16 = DTYPES["fp16"]
    odd = strided((2, 100, 4, 64), fp16, (26000, 260, 65, 1), by=2)
    k = strided((2, 70, 2, 64), fp16, (9100, 130, 65, 1), by=2)
    arrays = {
        "out": odd, "dq": odd, "dk": k, "dv": k,
        "lse": info((2, 4, 100), FLOAT32, 4), "dlse": info((2, 4, 100), FLOAT32, 8),
        "bias": info((100, 70), fp16, 2), "mask": info((100, 70), BOOL, 1),
        "alibi_slopes": info((4,), FLOAT32, 4),
    }  # fmt: skip
    problem = make("backward", dtype=fp16, arrays=arrays, bias_grad=True)
    assert make_plan(problem, HOPPER).copies == ()
    problem = make("backward", dtype=fp16, arrays=arrays | {"dout": odd})
    assert make_plan(problem, HOPPER).copies == ("dout",)


def test_one_copy_is_enough_of_a_reason() -> None:
    """What lies across its elements isn't named a second time."""
    q = info(Q, FLOAT32, misalignment=2)
    plan = make_plan(make(arrays={"q": q}), HOPPER)
    assert plan.copies == ("q",)
    assert str(plan).count("q is copied") == 1


@dtypes
def test_rows_of_copies_are_padded(dtype: np.dtype) -> None:
    """A head of 46 channels lies in rows of 48, and is then taken as it is."""
    multiple = 16 // dtype.itemsize
    problem = make("backward", d=45, dv=45, dtype=dtype)
    plan = make_plan(problem, HOPPER)
    assert set(plan.copies) == {"q", "k", "v", "dout"}
    assert {plan.row_multiple(name) for name in plan.copies} == {multiple}
    assert plan.row_multiple("lse") == plan.row_multiple("bias") == 1
    padded = {}
    for name in plan.copies:
        shape = problem.operand(name).shape
        whole = (*shape[:-1], ceil_div(shape[-1], multiple) * multiple)
        padded[name] = ArrayInfo(shape, contiguous_strides(whole, dtype), dtype)
    again = make_plan(make("backward", d=45, dv=45, dtype=dtype, arrays=padded), HOPPER)
    assert again.copies == () and again.steps == plan.steps
    simt = make_plan(make("backward", d=45, dtype=dtype, config="simt"), HOPPER)
    assert simt.copies == () and simt.row_multiple("q") == 1


def test_a_step_that_nobody_takes_does_not_matter() -> None:
    fp16 = DTYPES["fp16"]
    one = strided((1, 1, 1, 64), fp16, (3, 5, 7, 1))
    arrays = {name: one for name in "qkv"}
    problem = make(batch=(1,), sq=1, sk=1, hq=1, hkv=1, d=64, dtype=fp16, arrays=arrays)
    assert make_plan(problem, HOPPER).copies == ()
    # A single channel has no neighbour to lie beside.
    narrow = strided((2, 70, 2, 1), fp16, (70 * 16, 16, 8, 5))
    problem = make(d=64, dv=1, dtype=fp16, arrays={"v": narrow})
    assert make_plan(problem, HOPPER).copies == ()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_two_axes_and_other_layouts(layout: str) -> None:
    fp16 = DTYPES["fp16"]
    q = info((50, 46), fp16)
    options = Options("forward", layout=layout)
    plan = make_plan(make_problem({"q": q, "k": q, "v": q}, options), HOPPER)
    assert plan.copies == ("q", "k", "v")
    q = info((2, 4, 50, 64), fp16)
    plan = make_plan(make_problem({"q": q, "k": q, "v": q}, options), HOPPER)
    assert plan.copies == ()


# --- Workspace ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "sq", "heads", "d", "dtype", "fits"),
    [
        (8300, 1, 16, 128, "bf16", False),  # fragments of 16 queries for one
        (64, 512, 16, 8, "bf16", False),  # 32 channels for 8
        (64, 512, 16, 40, "bf16", False),  # 64 for 40
        (64, 512, 16, 72, "bf16", True),  # 96 for 72
        (64, 512, 16, 128, "bf16", True),
        (64, 512, 16, 24, "fp32", True),
        (1, 1, 16, 128, "bf16", True),  # next to nothing
    ],
)
def test_sums_of_dq_take_no_more_than_out_lse_and_dq(
    batch: int, sq: int, heads: int, d: int, dtype: str, fits: bool
) -> None:
    """Else dq has a kernel of its own, which needs no sums."""
    q = info((batch, sq, heads, d), DTYPES[dtype])
    lse = info((batch, heads, sq), FLOAT32)
    arrays = {"dout": q, "q": q, "k": q, "v": q, "out": q, "lse": lse}
    plan = make_plan(make_problem(arrays, Options("backward")), HOPPER)
    expected = ["backward", "convert_dq"] if fits else ["backward_dq", "backward_dkdv"]
    assert kernels(plan) == ["delta", *expected]
    bound = batch * heads * sq * (d * q.dtype.itemsize + 4 + 4 * d)
    sums = sum(w.nbytes for w in plan.workspace if w.name == "dq_sums")
    assert (sums > 0) == fits
    assert sums <= bound + 2**20
    assert any("more memory than out" in reason for reason in plan.reasons) != fits


# --- config= --------------------------------------------------------------------------


@pytest.mark.parametrize("across", [1, 2])
@ways
def test_a_tile_can_be_forced(way: str, across: int) -> None:
    tile = MmaTile(32 // across, 32, 128, 64, 2, across=across, blocks=3)
    if way == "forward" and across != 1:
        with pytest.raises(ValueError, match="only dk and dv"):
            make_plan(make(**WAYS[way], config=tile), HOPPER)
        return
    arrays = with_bias(1, 70) if way != "forward" else None
    problem = make(**WAYS[way], config=tile, arrays=arrays, bias_grad=way != "forward")
    plan = make_plan(problem, HOPPER)
    own = {"backward_dbias", "reduce_dbias"} | (
        {"backward_dq"} if across > 1 else set()
    )
    for kernel, used in tiles(plan).items():
        assert (used == tile) == (kernel not in own), kernel
    assert f"config= asks for tile {tile.name}" in plan.reasons
    assert "family mma: config= asks for it" in plan.reasons
    sound(plan)


@pytest.mark.parametrize(
    ("dtype", "tile", "why"),
    [
        ("fp16", MmaTile(64, 64, 32, 64, 4), "doesn't fit.*head_dim 64 and 64"),
        ("fp16", MmaTile(64, 64, 64, 32, 4), "doesn't fit.*head_dim 64 and 64"),
        ("fp16", MmaTile(512, 512, 256, 256, 4), "doesn't fit.*of 232448 bytes"),
        ("fp16", MmaTile(48, 64, 64, 64, 4), r"rows must be a multiple"),
        ("fp16", MmaTile(0, 64, 64, 64, 4), r"rows must be a multiple"),
        ("fp16", MmaTile(64, 40, 64, 64, 4), "columns must be a multiple of 16"),
        ("bf16", MmaTile(256, 32, 64, 64, 32, across=2), r"at most 15 \* across"),
        ("fp32", MmaTile(64, 40, 64, 64, 4), "columns must be a multiple of 16"),
        ("fp64", MmaTile(64, 8, 64, 64, 4), "columns must be a multiple of 16"),
        ("fp64", MmaTile(64, 64, 64, 64, 4, stages=3), "stages must be 1 or 2"),
        ("fp16", MmaTile(64, 64, 80, 64, 4), "depth and depth_v"),
        ("fp16", MmaTile(64, 64, 64, 72, 4), "depth and depth_v"),
        ("fp16", MmaTile(64, 64, 64, 64, 0), "at least 1"),
        ("fp16", MmaTile(64, 64, 64, 64, 4, stages=0), "at least 1"),
        ("fp16", MmaTile(1024, 16, 64, 64, 64), "at most 32"),
        ("fp16", MmaTile(64, 64, 64, 64, 4, across=3), "multiple of across"),
        ("fp32", MmaTile(32, 32, 96, 64, 4, across=2), "multiples of 64"),
        ("fp16", MmaTile(32, 32, 64, 64, 8, across=4), "columns.*multiple of 64"),
    ],
)
@ways
def test_tiles_that_no_kernel_can_have(
    dtype: str, tile: MmaTile, why: str, way: str
) -> None:
    problem = make(**WAYS[way], dtype=DTYPES[dtype], config=tile)
    with pytest.raises(ValueError, match=why) as raised:
        make_plan(problem, HOPPER)
    assert tile.name in str(raised.value)


def test_a_tile_of_a_family_that_can_not_be_had() -> None:
    tile = MmaTile(64, 64, 64, 64, 4)
    with pytest.raises(ValueError, match=r"capability 8\.0"):
        make_plan(make(dtype=DTYPES["bf16"], config=tile), DEVICES["sm_75"])


def test_a_simt_tile_forces_its_family() -> None:
    tile = SimtTile(32, 32, 64, 64, resident=False)
    plan = make_plan(make(dtype=DTYPES["fp16"], config=tile), HOPPER)
    assert plan.family == "simt" and tiles(plan) == {"forward": tile}


# --- explain --------------------------------------------------------------------------


def test_explain_names_family_workspace_and_copies() -> None:
    q = zeros(2, 50, 4, 46, dtype=np.float16)
    text = str(explain(q, q, q, direction="backward", device="sm_90"))
    for fact in (
        "family: mma", "backward_mma_fp16_32x32d64v64_4w2sa2_1b_ragged",
        "128 rows a block would be 8 blocks for 132 multiprocessors, 32 are 16",
        "convert_dq_mma",
        "workspace: dq_sums", "k is copied", "dout is copied", "family mma: tensor",
    ):  # fmt: skip
        assert fact in text, fact


def test_sizes_hold_for_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile is chosen with the features that need memory of their own."""
    fp16 = DTYPES["fp16"]
    rows = (MmaRow(2, 256, 64, 64, warps=4), MmaRow(2, 256, 64, 32, warps=4))
    monkeypatch.setattr(configs, "MMA_FORWARD", rows)
    bare = make_plan(make(d=256, dtype=fp16), DEVICES["sm_86"])
    assert tiles(bare)["forward"].columns == 64
    assert bare.steps[0].shared_memory == 99 * KIB
    masked = make(d=256, dtype=fp16, arrays={"mask": info((100, 70), BOOL)})
    assert tiles(make_plan(masked, DEVICES["sm_86"]))["forward"].columns == 32


def test_blocks_that_share_a_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 1 KiB more than it asks for, of which one is already left out."""
    # 64 * 144 + 2 * 64 * 144 bytes: 27 KiB.
    rows = [MmaRow(2, 64, 64, 64, warps=4, blocks=n) for n in (3, 2, 1)]
    monkeypatch.setattr(configs, "MMA_FORWARD", tuple(rows))
    problem = make(d=64, dtype=DTYPES["fp16"])
    for kib, blocks in ((83, 3), (82, 2), (55, 2), (54, 1)):
        plan = make_plan(problem, with_memory(kib))
        assert plan.steps[0].shared_memory == 27 * KIB
        assert tiles(plan)["forward"].blocks == blocks, kib


@settings(deadline=None, max_examples=100)
@given(
    kib=st.integers(8, 227), d=st.integers(1, 256),
    name=st.sampled_from(list(DTYPES)), way=st.sampled_from(list(WAYS)),
)  # fmt: skip
def test_any_amount_of_shared_memory(kib: int, d: int, name: str, way: str) -> None:
    """What fits is taken, and never more than there is."""
    gpu = with_memory(max(kib, 48))
    plan = make_plan(make(**WAYS[way], d=d, dtype=DTYPES[name]), gpu)
    sound(plan)
    if plan.family == "simt":
        assert "fits" in str(plan)
