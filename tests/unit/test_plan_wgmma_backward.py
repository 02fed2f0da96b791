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
from cupy_flash.plan import make_plan
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
    K,
    half,
    halves,
    laid_out,
    maps_of,
)


def gradients(**options: Any) -> Problem:
    """Return a problem that the family serves."""
    return half(direction="backward", **options)


# --- Tiles ----------------------------------------------------------------------------


def test_tiles_of_gradients_make_sense() -> None:
    """Each takes heads that those before it don't take."""
    taken: set[tuple[int, int]] = set()
    for tile in WGMMA_BACKWARD:
        assert tile.fault(BF16) == tile.backward_fault == ""
        for kernel in ("backward", "backward_terms"):
            spec = KernelSpec("wgmma", kernel, BF16, Variant(), tile, tile.threads, 1)
            assert spec.shared_memory <= 227 * KIB
        own = set(
            itertools.product(range(1, tile.depth + 1), range(1, tile.depth_v + 1))
        )
        assert own - taken
        taken |= own


# Worked out by hand: 128 bytes for 64 channels of a row.
@pytest.mark.parametrize(
    ("tile", "bytes_"),
    [
        # k and v, two of q and dout, two of dS, their terms, barriers:
        # 2 * 128 * 128 + 4 * 128 * 128 + 2 * 128 * 256 + 2 * 1024 + 1024
        (WgmmaTile(2, 128, 64, 64), 166912),
        # 2 * 128 * 256 + 4 * 64 * 256 + 2 * 64 * 256 + 2 * 512 + 1024
        (WgmmaTile(2, 64, 128, 128), 165888),
        # 128 * (256 + 128) + 2 * 64 * (256 + 128) + 2 * 64 * 256 + 2 * 512 + 1024
        (WgmmaTile(2, 64, 128, 64), 133120),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_shared_memory_of_gradients(tile: WgmmaTile, bytes_: int) -> None:
    for variant in (Variant(), Variant(left=True, right=True)):
        spec = KernelSpec("wgmma", "backward", BF16, variant, tile, tile.threads, 1)
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
    assert tiles(plan)["backward_terms"] == tiles(plan)["backward"]
    assert f"backward: tile 128x{columns}d{depth}v{depth}_2s" in plan.reasons
    convert = tiles(plan)["convert_dq"]
    assert isinstance(convert, MmaTile)
    assert (convert.depth, convert.depth_v, convert.fault(BF16)) == (depth, depth, "")
    sound(plan)


def test_every_head_size_has_gradients() -> None:
    for d, dv in itertools.product(range(8, 129, 8), repeat=2):
        for options in ({}, {"causal": True}, {"window": (3, 5)}):
            plan = make_plan(gradients(d=d, dv=dv, **options), HOPPER)
            assert plan.family == "wgmma"
            sound(plan)


# --- Launches and workspace -----------------------------------------------------------


@pytest.mark.parametrize(
    ("sq", "d", "tiles_", "columns"),
    [(1, 64, 1, 128), (128, 64, 1, 128), (129, 64, 2, 128), (128, 128, 2, 64),
     (129, 128, 3, 64)],
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
    # A block for 128 keys of each kv head, and 16 padded queries of a pass.
    assert grids(plan) == {
        "backward_terms": 3 * 4 * tiles_ * columns // 16,
        "backward": 3 * 2 * 3,
        "convert_dq": 3 * 4 * rows // 4,
    }
    blocks = {step.spec.kernel: step.block for step in plan.steps}
    assert blocks == {"backward_terms": 128, "backward": 384, "convert_dq": 128}


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


@pytest.mark.parametrize("d", range(8, 129, 8))
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


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_copies_for_gradients(name: str) -> None:
    shape = OUT if name in ("q", "dout") else K
    for operand in (info(shape, BF16, 2), laid_out(shape, (35840, 256, 128, 2))):
        plan = make_plan(gradients(arrays={name: operand}), HOPPER)
        assert plan.family == "wgmma" and plan.copies == (name,)
        assert f"{name} is copied: wgmma loads 16 bytes at a time" in str(plan)
    plan = make_plan(gradients(arrays={"out": info(OUT, BF16, 2)}), HOPPER)
    assert plan.copies == ()


def test_more_blocks_than_a_launch_can_have() -> None:
    size = {"batch": (2**20,), "sq": 2**20, "sk": 2**20, "hq": 1, "hkv": 1}
    plan = make_plan(gradients(**size), HOPPER)
    assert plan.family != "wgmma"
    (why,) = [x for x in plan.reasons if x.startswith("not family wgmma: ")]
    assert "blocks are more than a launch can have" in why


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
    ("tile", "why"),
    [
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
    ids=lambda value: getattr(value, "name", None),
)
def test_tiles_that_no_gradients_can_have(tile: WgmmaTile, why: str) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        make_plan(gradients(config=tile), HOPPER)
    assert tile.name in str(raised.value)
