"""The tiles that the workload `tiles` tries."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import tiles
from bench.results import OURS, case_of, identity, label_of, new_row
from bench.tiles import (
    MOST_OF_MMA,
    MOST_OF_WGMMA,
    Limited,
    asking,
    candidates,
    kernels,
    limited,
    mma_candidates,
    mma_sensible,
    padded,
    shared_memory,
    simt_candidates,
    wgmma_candidates,
    wgmma_sensible,
)
from bench.workloads import TILE_SHAPES, WORKLOADS, Case, Selection, square
from cupy_flash.aot import Call
from cupy_flash.configs import WGMMA_BACKWARD, WGMMA_FORWARD, MmaTile, WgmmaTile
from cupy_flash.device import hypothetical
from cupy_flash.dtypes import parse_dtype
from cupy_flash.problem import Options

CASES = WORKLOADS["tiles"]()
LARGEST = hypothetical("sm_90")
KIB = (64, 99, 163, 227)
SMALLER = Selection(dtypes=("bfloat16", "float32"), shared_memory=KIB).cases("tiles")
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
some = pytest.mark.parametrize("case", SMALLER[::7], ids=lambda case: case.label)


def tile_by_itself(
    case: Case,
    gpu: Any = LARGEST,
    families: Sequence[str] = ("wgmma", "mma", "simt"),
) -> object:
    """Return the tile of the first family that can serve a call."""
    for family in families:
        options = Options(case.direction, causal=case.causal, config=family)
        call = Call(
            options, parse_dtype(case.dtype), case.head_dim, case.head_dim_v,
            case.batch, case.seqlen, case.kv_seqlen, case.heads, case.kv_heads,
        )  # fmt: skip
        try:
            steps = call.plan(gpu).steps
        except ValueError:
            continue
        return next(
            step.spec.tile for step in steps if step.spec.kernel in tiles.MAIN_KERNELS
        )


@cases
def test_the_tile_in_use_comes_first(case: Case) -> None:
    assert candidates(case, LARGEST)[0] == tile_by_itself(case)


@cases
def test_candidates_of_mma(case: Case) -> None:
    found = mma_candidates(case, LARGEST)
    if not found:  # then all that fits is plain CUDA C++
        assert candidates(case, LARGEST) == simt_candidates(case, LARGEST)
        assert case.dtype == "float64" and case.head_dim == 256
        return
    assert len(found) == len(set(found)) == len({tile.name for tile in found})
    assert len(found) <= MOST_OF_MMA
    for tile in found:
        assert isinstance(tile, MmaTile)
        assert tile.fault(parse_dtype(case.dtype)) == ""
        assert shared_memory(tile, case) <= LARGEST.shared_memory
        assert tile.depth >= case.head_dim and tile.depth_v >= case.head_dim_v
        assert tile.across == 1 or case.direction == "backward"
    assert all(mma_sensible(tile, case, LARGEST) for tile in found[1:])
    first, *others = tiles.peers(case, "mma", LARGEST)
    assert (first.name, first.config) == (OURS, candidates(case, LARGEST)[0])
    assert [peer.config for peer in others] == found
    assert not any(isinstance(peer, Limited) for peer in (first, *others))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_further_tiles_are_measured_where_they_fit(direction: str) -> None:
    further = {
        "forward": tiles.ALSO_FORWARD, "backward": tiles.ALSO_BACKWARD,
    }[direction]  # fmt: skip
    for row in further:
        size = row.max_depth
        for batch, seqlen in ((4, 4096), (1, 512)):
            case = square(
                "tiles", "bfloat16", batch, seqlen, 2048 // size, size, False, direction
            )
            tile = row.tile(size, size)
            assert tile in mma_candidates(case, LARGEST)
            smaller = dataclasses.replace(case, shared_memory=64)
            assert tile not in mma_candidates(smaller, LARGEST)


def changed(found: Sequence[Any]) -> set[str]:
    names = [field.name for field in dataclasses.fields(found[0])]
    return {n for n in names if len({getattr(tile, n) for tile in found}) > 1}


def test_each_property_is_varied() -> None:
    forward, backward = (
        mma_candidates(
            square("x", "bfloat16", 4, 4096, 16, 64, True, direction), LARGEST
        )
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
    tile = mma_candidates(case, LARGEST)[0]
    assert mma_sensible(tile, case, LARGEST)
    assert not mma_sensible(dataclasses.replace(tile, **change), case, LARGEST)


# --- Hopper's -------------------------------------------------------------------------


@cases
def test_candidates_of_wgmma(case: Case) -> None:
    found = wgmma_candidates(case, LARGEST)
    if not found:
        assert "wgmma" not in families_of(case)
        return
    assert len(found) == len(set(found)) == len({tile.name for tile in found})
    if case.direction == "forward":
        assert 10 < len(found) <= MOST_OF_WGMMA
    for tile in found:
        assert isinstance(tile, WgmmaTile)
        assert tile.fault(parse_dtype(case.dtype)) == ""
        assert case.direction == "forward" or tile.backward_fault == ""
        assert shared_memory(tile, case) <= LARGEST.shared_memory
        assert tile.depth >= case.head_dim and tile.depth_v >= case.head_dim_v
    assert all(wgmma_sensible(tile, case, LARGEST) for tile in found)
    assert candidates(case, LARGEST) == candidates(case, LARGEST, "wgmma") == found
    assert [peer.config for peer in tiles.peers(case, None, LARGEST)[1:]] == found


def families_of(case: Case) -> set[str]:
    """Return the families that can serve a case when asked for."""
    found = set()
    for family in tiles.CANDIDATES:
        with contextlib.suppress(ValueError):
            tiles.planned(case, LARGEST, family, case.direction).plan(LARGEST)
            found.add(family)
    return found


def test_where_wgmma_has_candidates() -> None:
    """Forward always; backward if not for a few queries alone."""
    found = {
        (case.direction, case.head_dim, case.seqlen)
        for case in CASES
        if wgmma_candidates(case, LARGEST)
    }
    assert {case.dtype for case in CASES if wgmma_candidates(case, LARGEST)} == {
        "bfloat16"
    }
    assert {(d, n) for direction, d, n in found if direction == "backward"} == {
        (32, 4096), (64, 4096), (64, 512), (64, 64), (128, 4096), (128, 512),
        (128, 64), (256, 4096), (256, 512), (256, 64),
    }  # fmt: skip
    assert {d for direction, d, _ in found if direction == "forward"} == {
        32, 64, 128, 256,
    }  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("depth", "columns"), [(64, [128]), (128, [64])])
def test_backward_tiles_of_wgmma(depth: int, columns: list[int], causal: bool) -> None:
    """All that have registers enough: 64 or 128 queries; and the one by role."""
    case = square("x", "bfloat16", 4, 4096, 16, depth, causal, "backward")
    *found, other = wgmma_candidates(case, LARGEST)
    assert found[0] == tile_by_itself(case, families=("wgmma",))
    assert found[0] in WGMMA_BACKWARD
    possible = [
        tile
        for n in range(16, 257, 16)
        if not (tile := WgmmaTile(2, n, depth, depth)).backward_fault
    ]
    assert found == possible and [tile.columns for tile in found] == columns
    assert other == WgmmaTile(3, 64, depth, depth, by_role=True)
    # What is measured is what a plan asked for it has, with all that goes before it.
    specs = kernels([case], LARGEST)
    assert [s.tile for s in specs if s.kernel == "backward"] == found
    assert [s.tile for s in specs if s.kernel == "backward_by_role"] == [other]
    assert {"forward", "backward_terms", "convert_dq"} < {s.kernel for s in specs}


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "depths"),
    [(256, 256, [(256, 256)]), (192, 192, [(192, 192)]), (192, 128, [(192, 128)]),
     (200, 72, [(256, 256), (256, 128)]), (72, 136, [(192, 192), (128, 192)]),
     (72, 40, [(128, 64)])],
)  # fmt: skip
def test_tiles_by_role(
    head_dim: int, head_dim_v: int, depths: list[tuple[int, int]]
) -> None:
    """The one in use, and one that holds no more channels than it must."""
    case = square("x", "bfloat16", 4, 4096, 8, head_dim, True, "backward")
    case = dataclasses.replace(case, head_dim_v=head_dim_v)
    found = [tile for tile in wgmma_candidates(case, LARGEST) if tile.by_role]
    assert [(tile.depth, tile.depth_v) for tile in found] == depths
    large = max(head_dim, head_dim_v) > 128
    assert (found[0] in WGMMA_BACKWARD) == large
    assert (found == wgmma_candidates(case, LARGEST)) == large
    for tile in found:
        assert wgmma_sensible(tile, case, LARGEST)
        for change in ({"stages": 3}, {"consumers": 2}, {"depth": 80}):
            other = dataclasses.replace(tile, **change)
            assert not wgmma_sensible(other, case, LARGEST)
    specs = kernels([case], LARGEST)
    assert [s.tile for s in specs if s.kernel == "backward_by_role"] == found
    forward = dataclasses.replace(case, direction="forward")
    assert not any(tile.by_role for tile in wgmma_candidates(forward, LARGEST))


def test_backward_tiles_of_wgmma_are_varied(monkeypatch: pytest.MonkeyPatch) -> None:
    """If registers allowed both, there would be both, the one in use first."""
    monkeypatch.setattr(WgmmaTile, "backward_fault", "")
    for depth, columns in ((64, [128, 64]), (128, [64, 128])):
        case = square("x", "bfloat16", 4, 4096, 16, depth, True, "backward")
        found = [t for t in wgmma_candidates(case, LARGEST) if not t.by_role]
        # Two stages of 128 queries with 128 channels have no room.
        room = [n for n in columns if n == 64 or depth == 64]
        assert [tile.columns for tile in found] == room
        assert changed(found) <= {"columns"}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_all_of_the_table_are_among_them(head_dim: int) -> None:
    """Also those for the other mask and for fewer blocks."""
    case = square("x", "bfloat16", 4, 4096, 16, head_dim, False, "forward")
    rows = [r for r in WGMMA_FORWARD if r.max_depth == r.max_depth_v == head_dim]
    assert rows
    wanted = {
        row.tile(head_dim, head_dim, row.min_keys, bool(row.banded)) for row in rows
    }
    assert wanted <= set(wgmma_candidates(case, LARGEST))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_each_property_of_wgmma_is_varied(head_dim: int) -> None:
    case = square("x", "bfloat16", 4, 4096, 16, head_dim, True, "forward")
    found = wgmma_candidates(case, LARGEST)
    assert changed(found) == {"consumers", "columns", "stages", "ping_pong"}
    assert all(tile.consumers > 1 for tile in found if tile.ping_pong)


@pytest.mark.parametrize(
    "change", [{"stages": 9}, {"columns": 40}, {"columns": 256}, {"consumers": 4}],
    ids=str,
)  # fmt: skip
def test_what_is_left_out_of_wgmma(change: dict[str, int]) -> None:
    case = square("x", "bfloat16", 4, 4096, 16, 128, False, "forward")
    tile = WgmmaTile(2, 128, 128, 128, 2)
    assert wgmma_sensible(tile, case, LARGEST)
    assert not wgmma_sensible(dataclasses.replace(tile, **change), case, LARGEST)


@pytest.mark.parametrize(
    "change", [{"stages": 3}, {"columns": 128}, {"consumers": 3}, {"ping_pong": True}],
    ids=str,
)  # fmt: skip
def test_what_is_left_out_of_its_gradients(change: dict[str, Any]) -> None:
    """What is a tile of the forward pass alone."""
    case = square("x", "bfloat16", 4, 4096, 16, 128, False, "backward")
    tile = WgmmaTile(2, 64, 128, 128, 2)
    other = dataclasses.replace(tile, **change)
    assert wgmma_sensible(tile, case, LARGEST)
    assert not wgmma_sensible(other, case, LARGEST)
    forward = dataclasses.replace(case, direction="forward")
    assert wgmma_sensible(other, forward, LARGEST)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("family", tiles.CANDIDATES)
def test_a_family_can_be_asked_for(family: str, direction: str) -> None:
    """Beside its tiles stands what the case gets by itself."""
    case = square("tiles", "bfloat16", 4, 4096, 16, 128, True, direction)
    found = candidates(case, LARGEST, family)
    assert found and {tile.family for tile in found} == {family}
    first, *others = tiles.peers(case, family, LARGEST)
    assert first.config == candidates(case, LARGEST)[0]
    assert first.config.family == "wgmma"
    assert [peer.config for peer in others] == found
    specs = kernels([case], LARGEST, family)
    main = {k for k in tiles.MAIN_KERNELS if k.startswith(direction)}
    made = {spec.tile for spec in specs if spec.kernel in main}
    assert made == {first.config, *found}
    larger = dataclasses.replace(case, head_dim=256, head_dim_v=256)
    assert candidates(larger, LARGEST, family)
    too_large = dataclasses.replace(case, head_dim=264, head_dim_v=264)
    assert bool(candidates(too_large, LARGEST, family)) == (family == "simt")


def test_other_gpus_have_no_tiles_of_wgmma() -> None:
    case = square("tiles", "bfloat16", 4, 4096, 16, 128, True, "forward")
    for name in ("sm_80", "sm_86", "sm_120"):
        assert not wgmma_candidates(case, hypothetical(name))
    # Nor has one that stands for them.
    smaller = dataclasses.replace(case, shared_memory=227)
    assert not wgmma_candidates(smaller, LARGEST)


# --- With the shared memory of smaller GPUs -------------------------------------------


@some
def test_a_smaller_gpu_gets_its_own_tile_and_candidates(case: Case) -> None:
    gpu = dataclasses.replace(LARGEST, shared_memory=case.shared_memory * 1024)
    found = candidates(case, LARGEST)
    assert found[0] == tile_by_itself(case, gpu, ("mma", "simt"))
    for tile in found:
        count = tile.blocks if isinstance(tile, MmaTile) else 1
        needed = shared_memory(tile, case)
        assert count * (needed + 1024) <= (case.shared_memory + 1) * 1024
    peers = tiles.peers(case, None, LARGEST)
    assert all(isinstance(peer, Limited) for peer in peers)
    assert [peer.config for peer in peers] == [found[0], *found]


def test_less_memory_gives_other_tiles() -> None:
    case = square("tiles", "bfloat16", 4, 4096, 16, 128, False, "forward")
    first = [
        candidates(dataclasses.replace(case, shared_memory=kib), LARGEST)[0]
        for kib in KIB
    ]
    assert len(set(first)) == len(KIB)
    assert first[-1] == candidates(case, LARGEST, "mma")[0]


def test_the_workload_has_every_shape() -> None:
    shapes = {(case.batch, case.seqlen, case.kv_seqlen) for case in CASES}
    assert shapes == set(TILE_SHAPES.values())
    assert len({identity(case) for case in CASES}) == len(CASES)
    # Each that isn't large has tiles of its own.
    case = square("tiles", "bfloat16", 4, 4096, 16, 128, False, "forward")
    for name in TILE_SHAPES:
        batch, queries, keys = TILE_SHAPES[name]
        sized = dataclasses.replace(case, batch=batch, seqlen=queries, kv_seqlen=keys)
        same = candidates(sized, LARGEST)[0] == candidates(case, LARGEST)[0]
        assert same == (name == "large"), name


def test_rows_say_which_memory_they_are_of() -> None:
    case = square("tiles", "bfloat16", 4, 4096, 16, 128, False, "forward")
    smaller = dataclasses.replace(case, shared_memory=99)
    rows = [new_row(each, OURS, "skipped") for each in (case, smaller)]
    assert "shared_memory" not in rows[0] and rows[1]["shared_memory"] == 99
    assert [case_of(row) for row in rows] == [identity(case), identity(smaller)]
    assert len({case_of(row) for row in rows}) == 2
    assert label_of(rows[1]) == smaller.label == f"{case.label} 99 KiB"
    assert label_of(rows[0]) == case.label


def test_only_tiles_depend_on_shared_memory() -> None:
    with pytest.raises(ValueError, match="decode doesn't depend"):
        Selection(shared_memory=(99,)).cases("decode")


def test_as_many_blocks_share_a_multiprocessor_as_on_the_smaller_gpu() -> None:
    def count(gpu: Any, needed: int) -> int:
        return (gpu.shared_memory + 1024) // (needed + 1024)

    case = square("tiles", "bfloat16", 4, 4096, 16, 128, False, "forward")
    for kib in KIB:
        smaller = limited(dataclasses.replace(case, shared_memory=kib), LARGEST)
        for needed in range(1024, kib * 1024 + 1, 272):
            asked = padded(needed, smaller, LARGEST)
            assert needed <= asked <= LARGEST.shared_memory
            assert count(LARGEST, asked) == count(smaller, needed)


class FakeDevice:
    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def launch(self, *arguments: Any) -> None:
        self.launched.append(arguments)


def test_launches_ask_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that need so much, and only meanwhile."""
    allowed = []
    driver = types.ModuleType("cupy.cuda.driver")
    driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    driver.funcSetAttribute = lambda *arguments: allowed.append(arguments)
    cuda = types.ModuleType("cupy.cuda")
    cuda.driver = driver
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    device, kernel = FakeDevice(), types.SimpleNamespace(ptr=5)
    with asking(device, 1000, 3000):
        device.launch(kernel, 1, 2, 1000, "params", "maps")
        device.launch(kernel, 1, 2, 0, "params")
    device.launch(kernel, 1, 2, 1000, "params")
    assert [launch[3] for launch in device.launched] == [3000, 0, 1000]
    assert device.launched[0][4:] == ("params", "maps")
    assert allowed == [(5, 8, 3000)]


# --- Compiling before measuring -------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_kernels_of_all_candidates_are_known(direction: str) -> None:
    """Also that of the forward pass before a backward one."""
    chosen = [case for case in SMALLER if case.direction == direction][:9]
    specs = kernels(chosen, LARGEST)
    assert len(specs) == len(set(specs))
    for case in chosen:
        made = {spec.tile for spec in specs if spec.kernel == direction}
        assert {
            tile for tile in candidates(case, LARGEST) if tile.family == "mma"
        } <= made
        first = tiles.planned(case, LARGEST, None, "forward").plan(LARGEST)
        needed = {step.spec for step in first.steps if direction == "backward"}
        assert needed <= set(specs)


def test_they_are_compiled_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    case = square("tiles", "bfloat16", 1, 64, 1, 32, False, "forward")
    monkeypatch.setattr(tiles, "MOST_OF_MMA", 2)
    gpu = hypothetical("sm_80")
    assert tiles.precompile([case], None, gpu) == len(kernels([case], gpu)) == 2
    assert len(list(tmp_path.glob("cupy_flash/*.cubin"))) == 2


def test_what_can_not_be_compiled_does_not_end_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise tiles.compiler.CompileError("no")

    monkeypatch.setattr(tiles.compiler, "cached_image", fail)
    tiles.keep(None, 90)
