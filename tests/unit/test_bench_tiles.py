"""The tiles of tensor cores that the workload `tiles` tries."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from bench import tiles
from bench.tiles import (
    MOST_OF_MMA,
    SHARED_MEMORY,
    candidates,
    mma_candidates,
    mma_sensible,
    shared_memory,
    simt_candidates,
)
from bench.workloads import WORKLOADS, Case, square
from cupy_flash.configs import MmaTile
from cupy_flash.device import hypothetical
from cupy_flash.dtypes import parse_dtype
from cupy_flash.plan import make_plan
from cupy_flash.problem import ArrayInfo, Options
from cupy_flash.validate import contiguous_strides, make_problem

HOPPER = hypothetical("sm_90")
CASES = WORKLOADS["tiles"]()
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)


def tile_by_itself(case: Case) -> object:
    """Return the tile of a call that asks for none."""
    dtype = parse_dtype(case.dtype)
    shape = (case.batch, case.seqlen, case.heads, case.head_dim)
    q = ArrayInfo(shape, contiguous_strides(shape, dtype), dtype)
    arrays = dict.fromkeys(("q", "k", "v", "out", "dout"), q)
    wide = parse_dtype("float64" if case.dtype == "float64" else "float32")
    lse = (case.batch, case.heads, case.seqlen)
    arrays["lse"] = ArrayInfo(lse, contiguous_strides(lse, wide), wide)
    problem = make_problem(arrays, Options(case.direction, causal=case.causal))
    steps = make_plan(problem, HOPPER).steps
    return next(
        step.spec.tile
        for step in steps
        if step.spec.kernel in ("forward", "backward", "backward_dkdv")
    )


@cases
def test_the_tile_in_use_comes_first(case: Case) -> None:
    assert candidates(case)[0] == tile_by_itself(case)


@cases
def test_candidates_of_mma(case: Case) -> None:
    found = mma_candidates(case)
    if not found:  # then all that fits is the other family
        assert candidates(case) == simt_candidates(case)
        assert case.dtype == "float64" and case.head_dim == 256
        return
    assert len(found) == len(set(found)) == len({tile.name for tile in found})
    assert len(found) <= MOST_OF_MMA
    for tile in found:
        assert isinstance(tile, MmaTile)
        assert tile.fault(parse_dtype(case.dtype)) == ""
        assert shared_memory(tile, case) <= SHARED_MEMORY
        assert tile.depth >= case.head_dim and tile.depth_v >= case.head_dim_v
        assert tile.across == 1 or case.direction == "backward"
    assert all(mma_sensible(tile, case) for tile in found[1:])
    peers = tiles.peers(case)
    assert peers[0].config is None
    assert [peer.config for peer in peers[1:]] == found


def changed(found: Sequence[MmaTile]) -> set[str]:
    names = [field.name for field in dataclasses.fields(MmaTile)]
    return {n for n in names if len({getattr(tile, n) for tile in found}) > 1}


def test_each_property_is_varied() -> None:
    forward, backward = (
        mma_candidates(square("x", "bfloat16", 4, 4096, 16, 64, True, direction))
        for direction in ("forward", "backward")
    )
    assert changed(forward) == {"rows", "columns", "warps", "stages", "blocks"}
    assert changed(backward) == changed(forward) | {"across"}


@pytest.mark.parametrize(
    "change",
    [{"stages": 9}, {"columns": 40}, {"warps": 3}, {"blocks": 4}, {"rows": 512}],
    ids=str,
)
def test_what_is_left_out(change: dict[str, int]) -> None:
    """Too much shared memory, a shape that no kernel has, too few registers."""
    case = square("x", "bfloat16", 4, 4096, 16, 128, True, "forward")
    tile = mma_candidates(case)[0]
    assert mma_sensible(tile, case)
    assert not mma_sensible(dataclasses.replace(tile, **change), case)
