"""Planning the gradients of the family `wgmma`: tiles, workspace, maps, sections.

What it leaves to other families is in test_plan_wgmma.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from cupy_flash.configs import WGMMA_BACKWARD, MmaTile, WgmmaTile
from cupy_flash.plan import Plan, make_plan
from cupy_flash.problem import Problem
from cupy_flash.spec import KernelSpec
from cupy_flash.variant import Variant

from .test_plan import FLOAT32, ceil_div, grids, info, make, sound, tiles
from .test_plan_wgmma import (
    BF16,
    HOPPER,
    KIB,
    OUT,
    PASSES,
    UINT64,
    K,
    half,
    halves,
    laid_out,
    maps_of,
)


def gradients(**options: Any) -> Problem:
    """Return a problem that the family serves."""
    return half(direction="backward", **options)


def kernel_of(tile: WgmmaTile) -> str:
    """Return the kernel that makes the gradients with a tile."""
    return "backward_by_role" if tile.by_role else "backward"


def by_role(depth: int, depth_v: int, **changes: Any) -> WgmmaTile:
    """Return a tile of the warpgroups that each make other products, or one like it."""
    given = {"consumers": 3, "columns": 64, "depth": depth, "depth_v": depth_v}
    return WgmmaTile(**given | {"by_role": True} | changes)


def agrees(plan: Plan, kernel: str) -> None:
    """Check that kernels of a plan have the tile of the one that makes gradients."""
    order = ["backward_terms", kernel, "convert_dq"]
    assert [step.spec.kernel for step in plan.steps] == order
    tile = tiles(plan)[kernel]
    assert tiles(plan)["backward_terms"] == tile
    convert = tiles(plan)["convert_dq"]
    assert isinstance(convert, MmaTile) and convert.fault(BF16) == ""
    assert (convert.depth, convert.depth_v) == (tile.depth, tile.depth)
    sound(plan)


def name_of(value: object) -> str | None:
    """Return what a parameter is called in the name of a test."""
    return getattr(value, "name", None)


# --- Tiles ----------------------------------------------------------------------------


def test_tiles_of_gradients_make_sense() -> None:
    """Each takes heads that those before it don't take."""
    taken: set[tuple[int, int]] = set()
    for tile in WGMMA_BACKWARD:
        assert tile.fault(BF16) == tile.backward_fault == ""
        assert tile.threads == (512 if tile.by_role else 384)
        for kernel in (kernel_of(tile), "backward_terms"):
            spec = KernelSpec("wgmma", kernel, BF16, Variant(), tile, tile.threads, 1)
            assert spec.shared_memory <= 227 * KIB
        own = set(
            itertools.product(range(1, tile.depth + 1), range(1, tile.depth_v + 1))
        )
        assert own - taken
        taken |= own
    names = {tile.name for tile in WGMMA_BACKWARD}
    assert len(names) == len(WGMMA_BACKWARD)
    assert all(tile.name.endswith("r") == tile.by_role for tile in WGMMA_BACKWARD)
    assert {tile.by_role for tile in WGMMA_BACKWARD} == {False, True}


@pytest.mark.parametrize("tile", [by_role(64, 64), by_role(256, 128)], ids=name_of)
def test_names_of_tiles_by_role(tile: WgmmaTile) -> None:
    """None is that of a tile of other kernels with the same rows and columns."""
    assert (tile.rows, tile.threads, tile.blocks) == (64, 512, 1)
    assert tile.name == f"64x64d{tile.depth}v{tile.depth_v}_2sr"
    same_shape = WgmmaTile(1, 64, tile.depth, tile.depth_v)
    assert same_shape.rows == tile.rows and same_shape.name + "r" == tile.name


# Worked out by hand: 128 bytes for 64 channels of a row.
@pytest.mark.parametrize(
    ("tile", "bytes_"),
    [
        # two of k and v, of q and dout, of dS, their terms, barriers:
        # 4 * 128 * 128 + 4 * 128 * 128 + 2 * 128 * 256 + 2 * 1024 + 1024
        (WgmmaTile(2, 128, 64, 64), 199680),
        # 4 * 128 * 256 + 4 * 64 * 256 + 2 * 64 * 256 + 2 * 512 + 1024
        (WgmmaTile(2, 64, 128, 128), 231424),
        # 2 * 128 * (256 + 128) + 2 * 64 * (256 + 128) + 2 * 64 * 256 + 2 * 512 + 1024
        (WgmmaTile(2, 64, 128, 64), 182272),
        # All of 64 rows: two of k, v, q and dout, of dS, of weights, their terms,
        # barriers: 4 * 64 * (384 + 256) + 2 * 64 * 128 + 2 * 8192 + 1024 + 1024
        (by_role(192, 128), 198656),
        # 4 * 64 * (384 + 384) + 2 * 64 * 128 + 2 * 8192 + 1024 + 1024
        (by_role(192, 192), 231424),
        # 4 * 64 * (128 + 256) + 2 * 64 * 128 + 2 * 8192 + 1024 + 1024
        (by_role(64, 128), 133120),
        # There is room for one k and v:
        # 3 * 64 * (512 + 512) + 2 * 64 * 128 + 2 * 8192 + 1024 + 1024
        (by_role(256, 256), 231424),
        # 3 * 64 * (384 + 512) + 2 * 64 * 128 + 2 * 8192 + 1024 + 1024
        (by_role(192, 256), 206848),
    ],
    ids=name_of,
)
def test_shared_memory_of_gradients(tile: WgmmaTile, bytes_: int) -> None:
    """The compiler compares it with what the kernel declares, in test_compiler.py."""
    assert tile.backward_fault == ""
    for variant in (Variant(), Variant(left=True, right=True)):
        spec = KernelSpec(
            "wgmma", kernel_of(tile), BF16, variant, tile, tile.threads, 1
        )
        assert spec.shared_memory == bytes_
    terms = KernelSpec("wgmma", "backward_terms", BF16, Variant(), tile, 128, 1)
    assert terms.shared_memory == 0


def test_traits_and_arguments_of_gradients() -> None:
    tile = WgmmaTile(2, 128, 64, 64)
    variant = Variant(left=True)
    text = KernelSpec("wgmma", "backward", BF16, variant, tile, 384, 2).tail()
    assert "sizeof(wgmma::BackwardStorage<Traits>) == " in text
    assert "(const CUPY_FLASH_GRID_CONSTANT Params<2> params, const " in text
    assert "const CUPY_FLASH_GRID_CONSTANT wgmma::BackwardMaps maps) {" in text
    assert "wgmma::backward<Traits>(params, maps);" in text
    tile = by_role(256, 192)
    text = KernelSpec("wgmma", "backward_by_role", BF16, variant, tile, 512, 2).tail()
    numbers = {
        "Consumers": 3, "Rows": 64, "Columns": 64, "Depth": 256, "DepthV": 192,
        "Stages": 2, "Threads": 512, "BatchAxes": 2,
    }  # fmt: skip
    for name, value in numbers.items():
        assert f"constexpr int k{name} = {value};" in text
    assert "sizeof(wgmma::BackwardStorage<Traits, true>) == " in text
    assert "const CUPY_FLASH_GRID_CONSTANT wgmma::BackwardMaps maps) {" in text
    assert "wgmma::backward_by_role<Traits>(params, maps);" in text
    spec = KernelSpec("wgmma", "backward_terms", BF16, Variant(), tile, 128, 1)
    text = spec.tail()
    assert "(const CUPY_FLASH_GRID_CONSTANT Params<1> params) {" in text
    assert "Storage<Traits>)" not in text and spec.architecture_specific


@pytest.mark.parametrize(
    ("d", "dv", "depth", "columns"),
    [(1, 8, 64, 128), (64, 64, 64, 128), (72, 8, 128, 64), (8, 72, 128, 64),
     (128, 128, 128, 64)],
)  # fmt: skip
def test_the_tile_that_holds_the_head(
    d: int, dv: int, depth: int, columns: int
) -> None:
    # Rows of dk have whole pieces of 16 bytes.
    d = ceil_div(d, 8) * 8
    plan = make_plan(gradients(d=d, dv=dv), HOPPER)
    assert tiles(plan)["backward"] == WgmmaTile(2, columns, depth, depth)
    assert f"backward: tile 128x{columns}d{depth}v{depth}_2s" in plan.reasons
    agrees(plan, "backward")


@pytest.mark.parametrize(
    ("d", "dv", "depth", "depth_v"),
    [(136, 64, 192, 128), (136, 8, 192, 128), (192, 128, 192, 128),
     (192, 136, 192, 192), (136, 136, 192, 192), (8, 136, 192, 192),
     (128, 192, 192, 192), (128, 200, 256, 256), (200, 128, 256, 256),
     (256, 8, 256, 256), (256, 256, 256, 256)],
)  # fmt: skip
def test_the_tile_of_a_large_head(d: int, dv: int, depth: int, depth_v: int) -> None:
    plan = make_plan(gradients(d=d, dv=dv), HOPPER)
    assert tiles(plan)["backward_by_role"] == by_role(depth, depth_v)
    assert f"backward: tile 64x64d{depth}v{depth_v}_2sr" in plan.reasons
    agrees(plan, "backward_by_role")


def test_every_head_size_has_gradients() -> None:
    """Also those of which a tile's padding is the most part, in a short sequence."""
    for d, dv in itertools.product(range(8, 257, 8), repeat=2):
        for options in ({}, {"causal": True}, {"window": (3, 5)}):
            plan = make_plan(gradients(d=d, dv=dv, **options), HOPPER)
            assert plan.family == "wgmma"
            large = max(d, dv) > 128
            kernels = {step.spec.kernel for step in plan.steps}
            assert ("backward_by_role" in kernels, "backward" in kernels) == (
                large, not large,
            )  # fmt: skip
            sound(plan)


def test_what_an_older_compiler_can_do() -> None:
    """Forward kernels and those by role, whatever the head."""
    older = dataclasses.replace(HOPPER, nvrtc=(12, 9))
    assert make_plan(half(), older).family == "wgmma"
    for d in (64, 128):
        plan = make_plan(gradients(d=d), older)
        assert plan.family == "mma"
        (why,) = [x for x in plan.reasons if x.startswith("not family wgmma: ")]
        assert "_2s needs NVRTC 13.0 or later, and this is 12.9" in why
        for config in ("wgmma", WgmmaTile(2, 64, 128, 128)):
            with pytest.raises(ValueError, match=r"needs NVRTC 13\.0 or later"):
                make_plan(gradients(d=d, config=config), older)
        plan = make_plan(gradients(d=d, config=by_role(128, 128)), older)
        agrees(plan, "backward_by_role")
    for d in (136, 256):
        agrees(make_plan(gradients(d=d), older), "backward_by_role")


# --- Launches and workspace -----------------------------------------------------------


@pytest.mark.parametrize(
    ("sq", "d", "tiles_", "columns"),
    [(1, 64, 1, 128), (128, 64, 1, 128), (129, 64, 2, 128), (128, 128, 2, 64),
     (129, 128, 3, 64), (64, 192, 1, 64), (65, 256, 2, 64)],
)  # fmt: skip
def test_workspace_of_gradients(sq: int, d: int, tiles_: int, columns: int) -> None:
    """Queries are padded to whole tiles; kernels clear what they add to."""
    plan = make_plan(gradients(sq=sq, d=d, batch=(3,), sk=300), HOPPER)
    found = {entry.name: entry for entry in plan.workspace}
    assert set(found) == {"dq_sums", "row_terms"}
    sums, terms = found["dq_sums"], found["row_terms"]
    rows = tiles_ * columns // 16
    assert sums.shape == (3, 4, rows, d // 8, 32, 4) and plan.dq_row_tiles == rows
    assert terms.shape == (3, 4, tiles_, 2, columns)
    assert sums.dtype == terms.dtype == FLOAT32
    assert not sums.zero and not terms.zero and plan.cleared == ()
    # A block for 128 or 64 keys of each kv head, and 16 padded queries of a pass.
    kernel, blocks, threads = (
        ("backward_by_role", 5, 512) if d > 128 else ("backward", 3, 384)
    )
    assert grids(plan) == {
        "backward_terms": 3 * 4 * tiles_ * columns // 16,
        kernel: 3 * 2 * blocks,
        "convert_dq": 3 * 4 * rows // 4,
    }
    found_threads = {step.spec.kernel: step.block for step in plan.steps}
    assert found_threads == {"backward_terms": 128, kernel: threads, "convert_dq": 128}


@pytest.mark.parametrize("multiprocessors", [1, 7, 8, 9, 132])
@pytest.mark.parametrize(("d", "rows"), [(64, 128), (128, 128), (192, 64), (256, 64)])
def test_blocks_of_gradients(d: int, rows: int, multiprocessors: int) -> None:
    """One for each multiprocessor; more tiles of keys than that are claimed."""
    gpu = dataclasses.replace(HOPPER, multiprocessors=multiprocessors)
    plan = make_plan(gradients(d=d, batch=(2,), hkv=2, sk=2 * rows), gpu)
    kernel = "backward_by_role" if d > 128 else "backward"
    assert grids(plan)[kernel] == min(8, multiprocessors)
    claims = [entry for entry in plan.workspace if entry.name == "claims"]
    if multiprocessors >= 8:
        assert not claims
    else:
        (counter,) = claims
        assert (counter.shape, counter.dtype) == ((1,), UINT64)
        assert not counter.zero and "workspace: claims" in str(plan)


@halves
def test_sums_that_would_take_too_much(dtype: np.dtype) -> None:
    """Of few queries, which fill no tile: `mma` pads them less."""
    size = {"hq": 16, "hkv": 16, "d": 64, "dtype": dtype}
    for sq, batch, family in (
        (1, 1, "wgmma"), (1, 8, "mma"), (30, 8, "mma"), (60, 8, "wgmma"),
        (129, 8, "wgmma"), (200, 8, "wgmma"),
    ):  # fmt: skip
        problem = make("backward", **size, sq=sq, batch=(batch,))
        plan = make_plan(problem, HOPPER)
        assert plan.family == family, (sq, batch)
        sound(plan)
        if family == "wgmma":
            continue
        (why,) = [x for x in plan.reasons if x.startswith("not family wgmma: ")]
        assert "the sums of dq, padded to whole tiles, would take more than 2" in why
        with pytest.raises(ValueError, match="sums of dq, padded to whole tiles"):
            make_plan(dataclasses.replace(problem, config="wgmma"), HOPPER)


@pytest.mark.parametrize("d", range(8, 257, 8))
def test_head_sizes_of_long_sequences(d: int) -> None:
    """Where a tile has many channels for few, sums of dq would be mostly padding."""
    size = {"hq": 16, "hkv": 16, "sq": 4096, "sk": 4096, "batch": (4,)}
    plan = make_plan(make("backward", **size, d=d, dtype=BF16), HOPPER)
    assert plan.family == ("mma" if d <= 16 else "wgmma")


def test_gradients_have_the_variant_of_their_band() -> None:
    for options, variant in (
        ({}, Variant()), ({"causal": True}, Variant(right=True)),
        ({"window": (3, None)}, Variant(left=True)),
        ({"window": (3, 5)}, Variant(left=True, right=True)),
    ):  # fmt: skip
        plan = make_plan(gradients(**options), HOPPER)
        variants = {step.spec.kernel: step.spec.variant for step in plan.steps}
        # The passes are the same for all.
        assert variants == dict.fromkeys(PASSES, Variant()) | {"backward": variant}
        plan = make_plan(gradients(d=256, **options), HOPPER)
        variants = {step.spec.kernel: step.spec.variant for step in plan.steps}
        assert variants.pop("backward_by_role") == variant
        assert set(variants.values()) == {Variant()}


# --- Tensor maps and copies -----------------------------------------------------------


def test_maps_of_gradients() -> None:
    """A consumer stores its 64 keys by itself."""
    problem = gradients(d=64, dv=128, arrays={"dk": laid_out(K, (40000, 400, 80, 1))})
    maps = maps_of(make_plan(problem, HOPPER))
    rows = {"q": 64, "k": 128, "v": 128, "dout": 64, "dk": 64, "dv": 64}
    assert {name: spec.box for name, spec in maps.items()} == {
        name: (64, n, 1, 1) for name, n in rows.items()
    }
    assert maps["q"].shape == (64, 100, 4, 2)
    assert maps["dout"].shape == (128, 100, 4, 2)
    assert maps["dout"].strides == (1024, 256, 102400)
    assert maps["dk"].shape == (64, 70, 2, 2)
    assert maps["dk"].strides == (800, 160, 80000)
    assert maps["dv"].shape == (128, 70, 2, 2)
    assert maps["dv"].strides == (512, 256, 35840)
    # By role, all tiles have 64 rows.
    maps = maps_of(make_plan(gradients(d=136, dv=256), HOPPER))
    assert {spec.box for spec in maps.values()} == {(64, 64, 1, 1)}
    assert list(maps) == ["q", "k", "v", "dout", "dk", "dv"]
    assert maps["dk"].shape == (136, 70, 2, 2) and maps["dv"].shape[0] == 256


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_copies_for_gradients(name: str) -> None:
    shape = OUT if name in ("q", "dout") else K
    for operand in (info(shape, BF16, 2), laid_out(shape, (35840, 256, 128, 2))):
        plan = make_plan(gradients(arrays={name: operand}), HOPPER)
        assert plan.family == "wgmma" and plan.copies == (name,)
        assert f"{name} is copied: wgmma loads 16 bytes at a time" in str(plan)
    plan = make_plan(gradients(arrays={"out": info(OUT, BF16, 2)}), HOPPER)
    assert plan.copies == ()


@pytest.mark.parametrize("d", [64, 256])
def test_more_tiles_than_a_launch_can_have(d: int) -> None:
    size = {"batch": (2**20,), "sq": 2**20, "sk": 2**20, "hq": 1, "hkv": 1, "d": d}
    plan = make_plan(gradients(**size), HOPPER)
    assert plan.family != "wgmma"
    (why,) = [x for x in plan.reasons if x.startswith("not family wgmma: ")]
    assert "tiles are more than a launch can have" in why


# --- Sections -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "section"),
    [
        ({}, 1),
        ({"window": (100, None)}, 1),
        # 4096 * (2 * 128 + 256) bytes of a head, with its sums: 32 MiB hold 16.
        ({"causal": True}, 16),
        ({"window": (None, 7)}, 16),
        # Four heads of queries share each, and there are at least eight.
        ({"causal": True, "hkv": 16}, 4),
        ({"causal": True, "hkv": 16, "sq": 2**16}, 2),
        ({"causal": True, "sq": 2**17}, 8),
        ({"causal": True, "hkv": 4, "sq": 2**17}, 1),
        ({"causal": True, "batch": (1,), "hq": 5, "hkv": 5}, 5),
        # 4096 * (2 * 256 + 512) bytes.
        ({"causal": True, "d": 128}, 8),
        # 4096 * (2 * 512 + 1024) bytes, and of a head that fills no tile
        # 4096 * (2 * 272 + 768).
        ({"causal": True, "d": 256, "hkv": 16}, 2),
        ({"causal": True, "d": 256}, 8),
        ({"causal": True, "d": 256, "sq": 1024}, 16),
        ({"causal": True, "d": 136, "sq": 1024}, 24),
        ({"d": 256}, 1),
    ],
    ids=str,
)
def test_kv_heads_that_share_the_cache(options: dict[str, Any], section: int) -> None:
    size = {"batch": (4,), "sq": 4096, "sk": 4096, "hq": 64, "hkv": 64, "d": 64}
    plan = make_plan(gradients(**{**size, **options}), HOPPER)
    assert plan.section == section


# --- config= --------------------------------------------------------------------------


def test_a_tile_can_be_forced_on_gradients() -> None:
    tile = WgmmaTile(2, 64, 128, 64)
    plan = make_plan(gradients(d=40, dv=8, config=tile), HOPPER)
    assert tiles(plan)["backward"] == tile
    assert f"config= asks for tile {tile.name}" in plan.reasons
    assert maps_of(plan)["dout"].box[1] == 64
    sound(plan)


@pytest.mark.parametrize(
    ("tile", "size"),
    [
        (by_role(64, 64), {"d": 64}),
        (by_role(64, 128), {"d": 40, "dv": 64}),
        (by_role(128, 64), {"d": 128, "dv": 8}),
        (by_role(256, 64), {"d": 136, "dv": 64}),
        (by_role(256, 256), {"d": 8}),
    ],
    ids=name_of,
)
def test_a_tile_by_role_can_be_forced(tile: WgmmaTile, size: dict[str, int]) -> None:
    """Also where the table has one of another kernel."""
    plan = make_plan(gradients(config=tile, **size), HOPPER)
    assert tiles(plan)["backward_by_role"] == tile
    assert f"config= asks for tile {tile.name}" in plan.reasons
    assert {spec.box[1] for spec in maps_of(plan).values()} == {64}
    agrees(plan, "backward_by_role")


@pytest.mark.parametrize("tile", [by_role(64, 64), by_role(256, 256)], ids=name_of)
def test_no_forward_pass_is_made_by_role(tile: WgmmaTile) -> None:
    assert tile.fault(BF16) == "" and tile.forward_fault
    with pytest.raises(ValueError, match="only the gradients are made by role") as why:
        make_plan(half(config=tile), HOPPER)
    assert f"config asks for tile {tile.name}: " in str(why.value)
    other = dataclasses.replace(tile, consumers=2, by_role=False)
    assert other.forward_fault == ""


@pytest.mark.parametrize(
    ("tile", "why"),
    [
        (by_role(64, 64, consumers=2), "3 consumers, 64 columns and 2 stages"),
        (by_role(64, 64, consumers=4), "3 consumers, 64 columns and 2 stages"),
        (by_role(64, 64, columns=128), "3 consumers, 64 columns and 2 stages"),
        (by_role(64, 64, columns=32), "3 consumers, 64 columns and 2 stages"),
        (by_role(64, 64, stages=1), "3 consumers, 64 columns and 2 stages"),
        (by_role(64, 64, stages=3), "3 consumers, 64 columns and 2 stages"),
        (by_role(64, 64, ping_pong=True), "by role there is no ping-pong"),
        (by_role(96, 64), "by role, depth and depth_v are multiples of 64"),
        (by_role(64, 80), "by role, depth and depth_v are multiples of 64"),
        (by_role(320, 64), "multiples of 16 up to 256"),
        (by_role(64, 0), "multiples of 16 up to 256"),
        (by_role(64, 64, consumers=5), "consumers must be 1 to 4"),
        (WgmmaTile(1, 64, 128, 64), "have 2 consumers and 2 stages, without ping-pong"),
        (WgmmaTile(3, 64, 128, 64), "have 2 consumers and 2 stages, without ping-pong"),
        (WgmmaTile(2, 64, 128, 64, 1), "have 2 consumers and 2 stages"),
        (WgmmaTile(2, 64, 128, 64, 3), "have 2 consumers and 2 stages"),
        (WgmmaTile(2, 64, 128, 64, ping_pong=True), "without ping-pong"),
        (WgmmaTile(2, 96, 64, 64), "columns must be 64, or 128 as the rows"),
        (WgmmaTile(2, 64, 64, 64), "64 columns need a depth that is a multiple of 128"),
        (
            WgmmaTile(2, 64, 192, 64),
            "64 columns need a depth that is a multiple of 128",
        ),
        (WgmmaTile(2, 128, 48, 64), "a depth that is a multiple of 32"),
        (WgmmaTile(2, 128, 96, 64), "sums take 256 registers of a thread"),
        (WgmmaTile(2, 64, 128, 144), "sums take 232 registers of a thread"),
        (WgmmaTile(2, 128, 32, 64), "doesn't fit.*head_dim 64 and 64"),
        (WgmmaTile(2, 64, 128, 72), "multiples of 16 up to 256"),
    ],
    ids=name_of,
)
def test_tiles_that_no_gradients_can_have(tile: WgmmaTile, why: str) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        make_plan(gradients(config=tile), HOPPER)
    assert tile.name in str(raised.value)


@pytest.mark.parametrize(("d", "dv"), [(72, 64), (64, 136)])
def test_a_tile_by_role_that_is_too_small(d: int, dv: int) -> None:
    with pytest.raises(ValueError, match=f"doesn't fit.*head_dim {d} and {dv}"):
        make_plan(gradients(d=d, dv=dv, config=by_role(64, 128)), HOPPER)
