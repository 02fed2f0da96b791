"""Planning: pure functions from a problem and the facts about a GPU to kernels."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupy_flash
from cupy_flash import configs, device, explain
from cupy_flash.configs import FAMILIES, MmaTile, SimtTile
from cupy_flash.device import DeviceInfo, hypothetical
from cupy_flash.params import merge_batch_axes
from cupy_flash.plan import Plan, make_plan
from cupy_flash.problem import ArrayInfo, Options, Problem
from cupy_flash.spec import KernelSpec
from cupy_flash.tiles import Tile, WgmmaTile
from cupy_flash.validate import contiguous_strides, make_problem
from cupy_flash.variant import Variant

FLOAT32, BOOL = np.dtype(np.float32), np.dtype(np.bool_)
DTYPES = {
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": FLOAT32,
    "fp64": np.dtype(np.float64),
}
DEVICES = {f"sm_{c}": hypothetical(f"sm_{c}") for c in device._KNOWN}
HOPPER = DEVICES["sm_90"]
MAX_GRID = 2**31 - 1
BIAS_FAMILIES = tuple(family for family in FAMILIES if family != "wgmma")

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
devices = pytest.mark.parametrize("gpu", DEVICES.values(), ids=list(DEVICES))


def info(
    shape: Sequence[int], dtype: np.dtype = FLOAT32, misalignment: int = 0
) -> ArrayInfo:
    strides = contiguous_strides(tuple(shape), dtype)
    return ArrayInfo(tuple(shape), strides, dtype, misalignment)


def accumulator(dtype: np.dtype) -> np.dtype:
    return dtype if dtype == np.float64 else FLOAT32


def make(
    direction: str = "forward",
    *,
    batch: tuple[int, ...] = (2,),
    sq: int = 100,
    sk: int = 70,
    hq: int = 4,
    hkv: int = 2,
    d: int = 64,
    dv: int | None = None,
    dtype: np.dtype = FLOAT32,
    arrays: dict[str, ArrayInfo] | None = None,
    **options: Any,
) -> Problem:
    """Return a problem of that size; `arrays` adds or replaces operands."""
    dv = d if dv is None else dv
    infos = {
        "q": info((*batch, sq, hq, d), dtype),
        "k": info((*batch, sk, hkv, d), dtype),
        "v": info((*batch, sk, hkv, dv), dtype),
    }
    if direction == "backward":
        out = info((*batch, sq, hq, dv), dtype)
        lse = info((*batch, hq, sq), accumulator(dtype))
        infos |= {"out": out, "dout": out, "lse": lse}
    return make_problem(infos | (arrays or {}), Options(direction, **options))


def with_bias(*shape: int, dtype: np.dtype = FLOAT32) -> dict[str, ArrayInfo]:
    return {"bias": info(shape, dtype)}


def kernels(plan: Plan) -> list[str]:
    return [step.spec.kernel for step in plan.steps]


def grids(plan: Plan) -> dict[str, int]:
    return {step.spec.kernel: step.grid for step in plan.steps}


def tiles(plan: Plan) -> dict[str, Tile]:
    return {s.spec.kernel: s.spec.tile for s in plan.steps if s.spec.tile is not None}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# --- A plan for everything ------------------------------------------------------------
# Head sizes at which something changes, and their neighbours.
EDGES = (1, 8, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 192, 256, 257, 512, 1024)


def sound(plan: Plan) -> None:
    """What must hold of every plan of a problem that isn't empty."""
    problem, gpu = plan.problem, plan.device
    assert plan.steps
    for step in plan.steps:
        assert step.shared_memory <= gpu.shared_memory, step
        assert 1 <= step.grid <= MAX_GRID
        assert 32 <= step.block <= 1024 and step.block % 32 == 0
        tile = step.spec.tile
        assert step.spec.dtype == problem.dtype
        # The pass that makes dq of its sums is one for both families of tensor cores.
        converts = step.spec.kernel == "convert_dq"
        family = "mma" if converts else plan.family
        assert step.spec.family in (family, "passes")
        if tile is None:
            continue
        assert tile.family == family
        if isinstance(tile, (MmaTile, WgmmaTile)):
            assert problem.head_dim <= tile.depth, step
            assert problem.head_dim_v <= tile.depth_v, step
            assert tile.fault(problem.dtype) == ""
        elif tile.resident:
            assert problem.head_dim <= tile.chunk_d, step
            if step.spec.kernel != "forward":
                assert problem.head_dim_v <= tile.chunk_v, step


def every_plan(problems: Iterable[Problem], gpus: Iterable[DeviceInfo]) -> None:
    for problem in problems:
        for gpu in gpus:
            sound(make_plan(problem, gpu))


@dtypes
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_head_size_on_every_gpu(dtype: np.dtype, direction: str) -> None:
    backward = direction == "backward"
    bias = with_bias(100, 70) if backward else {}

    def problem(d: int, dv: int) -> Problem:
        return make(direction, d=d, dv=dv, dtype=dtype, arrays=bias, bias_grad=backward)

    pairs = (problem(d, dv) for d, dv in itertools.product(EDGES, EDGES))
    every_plan(pairs, DEVICES.values())
    # Which tiles there are to choose from depends on shared memory alone.
    by_memory = {gpu.shared_memory: gpu for gpu in DEVICES.values()}
    # In steps of 3, which meet every remainder by a power of two.
    every_plan((problem(d, d) for d in range(1, 1025, 3)), by_memory.values())


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, Any]:
    length = st.one_of(st.integers(1, 300), st.integers(1, 2**30))
    hkv = draw(st.integers(1, 64))
    return {
        "batch": tuple(draw(st.lists(st.integers(1, 40), max_size=3))),
        "sq": draw(length), "sk": draw(length), "hkv": hkv,
        "hq": hkv * draw(st.integers(1, 8)),
        "d": draw(st.integers(1, 2000)), "dv": draw(st.integers(1, 2000)),
        "dtype": draw(st.sampled_from(list(DTYPES.values()))),
    }  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(sizes(), st.sampled_from(list(DEVICES.values())), st.booleans())
def test_every_size(size: dict[str, Any], gpu: DeviceInfo, bias: bool) -> None:
    sound(make_plan(make(**size), gpu))
    arrays = with_bias(size["hq"], 1, size["sk"]) if bias else None
    sound(make_plan(make("backward", **size, arrays=arrays, bias_grad=bias), gpu))


def tables() -> Iterator[tuple[str, configs.SimtRow]]:
    """Return each row with each kernel that its table is for."""
    for kernel, table in (
        ("forward", configs.SIMT_FORWARD),
        ("backward_dq", configs.SIMT_BACKWARD),
        ("backward_dkdv", configs.SIMT_BACKWARD),
        ("backward_dbias", configs.SIMT_BACKWARD_DBIAS),
    ):
        for row in table:
            yield kernel, row


def test_no_row_of_a_table_is_dead() -> None:
    """Each row of `simt` is the choice for some problem on some GPU."""
    met = set()
    for dtype in (FLOAT32, np.dtype(np.float64)):
        for d, dv in itertools.product(EDGES, EDGES):
            for direction in ("forward", "backward"):
                backward = direction == "backward"
                bias = with_bias(100, 70) if backward else None
                problem = make(
                    direction, d=d, dv=dv, dtype=dtype, arrays=bias,
                    bias_grad=backward, config="simt",
                )  # fmt: skip
                for gpu in DEVICES.values():
                    chosen = tiles(make_plan(problem, gpu))
                    met |= {(k, dtype.itemsize, tile) for k, tile in chosen.items()}
    dead = [
        (kernel, row)
        for kernel, row in tables()
        if (kernel, row.accumulator, row.tile) not in met
    ]
    assert not dead


def test_rows_make_sense() -> None:
    for kernel, row in tables():
        assert row.accumulator in (4, 8)
        tile = row.tile
        if row.max_head_dim is not None and tile.resident:
            assert row.max_head_dim <= tile.chunk_d, (kernel, row)
        # Threads of a block, and registers for as many blocks as are asked for.
        assert tile.threads % 32 == 0
        assert tile.threads * tile.blocks <= 1024
    for table in (configs.SIMT_FORWARD, configs.SIMT_BACKWARD):
        for size in (4, 8):
            last = [row for row in table if row.accumulator == size][-1]
            assert last.max_head_dim is None and not last.tile.resident


def test_each_kernel_has_its_own_name() -> None:
    """A profiler, an error and `explain` tell kernels apart by their symbols."""
    variants = [
        Variant(left, right, softcap, alibi, bias, mask, first)
        for left, right, softcap, alibi, mask, first in itertools.product(
            (False, True), repeat=6
        )
        for bias in (None, *DTYPES.values())
    ]
    specs = {
        KernelSpec("simt", kernel, dtype, variant, row.tile, row.tile.threads, axes)
        for kernel, row in tables()
        for dtype in DTYPES.values()
        if accumulator(dtype).itemsize == row.accumulator
        for variant in variants[:: 1 if kernel == "forward" else 7]
        for axes in (1, 2)
    }
    specs |= {
        KernelSpec("passes", kernel, dtype, Variant(bias=bias), tile, 128, axes)
        for kernel, tile in (
            ("delta", None),
            ("reduce_dbias", configs.SIMT_BACKWARD_DBIAS[0].tile),
        )
        for dtype in DTYPES.values()
        for bias in (DTYPES.values() if tile else [None])
        for axes in (1, 3)
    }
    by_symbol = {spec.symbol: spec for spec in specs}
    assert len(by_symbol) == len(specs)
    for symbol in by_symbol:
        assert symbol.isidentifier() and symbol.isascii()


# --- Choices --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "dtype", "d", "tile"),
    [
        ("sm_90", "fp16", 64, "64x64d64v64r"),
        ("sm_90", "fp32", 32, "64x64d32v32r"),
        ("sm_90", "bf16", 128, "64x64d128v128r"),
        ("sm_90", "fp32", 256, "64x64d64v128s"),
        ("sm_90", "fp64", 128, "64x32d64v128s"),
        ("sm_86", "fp32", 96, "64x64d96v96r"),
        ("sm_75", "fp32", 64, "64x64d64v64r"),
        ("sm_75", "fp32", 128, "64x32d64v64s"),
        ("sm_61", "fp32", 64, "64x32d64v64r"),
        ("sm_61", "fp64", 64, "64x32d32v32s"),
    ],
)
def test_forward_tiles(gpu: str, dtype: str, d: int, tile: str) -> None:
    """A few known choices: a change of a table is meant, and shows here."""
    plan = make_plan(make(d=d, dtype=DTYPES[dtype], config="simt"), DEVICES[gpu])
    assert plan.family == "simt"
    assert kernels(plan) == ["forward"]
    name = tiles(plan)["forward"].name
    assert name.partition("_")[0] == tile
    assert f"forward: tile {name}" in plan.reasons


def test_planning_is_pure() -> None:
    problem = make("backward", arrays=with_bias(1, 70), bias_grad=True)
    first, second = make_plan(problem, HOPPER), make_plan(problem, HOPPER)
    assert first == second
    assert hash(problem) == hash(dataclasses.replace(problem))
    assert len({first.steps[0].spec, second.steps[0].spec}) == 1


def test_what_a_feature_changes_in_the_kernels() -> None:
    """Kernels hold the features in use and no others."""
    logits = {"mask": info((100, 70), BOOL)} | with_bias(100, 70, dtype=DTYPES["fp16"])
    slopes = {"alibi_slopes": info((4,))}
    lengths = {"k_lengths": info((2,), np.dtype(np.int32))}
    cases: list[tuple[dict[str, Any], Variant]] = [
        ({}, Variant()),
        ({"causal": True}, Variant(right=True)),
        ({"causal": "top_left"}, Variant(right=True)),
        ({"window": (3, None)}, Variant(left=True)),
        ({"window": (-1, 0)}, Variant(right=True)),
        ({"window": (-1, -1)}, Variant()),
        ({"window": (2, 2), "causal": True}, Variant(left=True, right=True)),
        ({"softcap": 10.0}, Variant(softcap=True)),
        ({"scale": 0.0}, Variant(scale_first=True)),
        ({"scale": -0.5}, Variant(scale_first=True)),
        ({"scale": 1e-9}, Variant()),
        ({"arrays": slopes}, Variant(alibi=True)),
        ({"arrays": lengths}, Variant()),
        ({"arrays": logits}, Variant(bias=DTYPES["fp16"], mask=True)),
        ({"return_lse": True, "layout": "bshd", "deterministic": True}, Variant()),
        ({"precision": "tf32", "config": "mma"}, Variant(tf32=True)),
        ({"precision": "tf32", "config": "simt"}, Variant()),
    ]
    for options, variant in cases:
        plan = make_plan(make(**options), HOPPER)
        assert [step.spec.variant for step in plan.steps] == [variant], options
        plan = make_plan(make("backward", **options), HOPPER)
        for spec in (step.spec for step in plan.steps):
            passes = spec.kernel in ("delta", "convert_dq")
            expected = Variant() if passes else variant
            assert spec.variant == expected, (spec, options)


def test_reasons() -> None:
    def said(problem: Problem) -> str:
        return "\n".join(make_plan(problem, HOPPER).reasons)

    assert "scaled before the softmax" in said(make(scale=0.0))
    assert "scaled before the softmax" not in said(make(scale=0.1))
    assert "10-bit mantissas" in said(make(precision="tf32"))
    assert "tf32' is not made use of" in said(make(precision="tf32", config="simt"))
    assert "tf32" not in said(make())
    assert "head_dim_v 300 is spread over 3 blocks" in said(make(d=200, dv=300))
    assert "none adds by atomics" in said(make("backward", config="simt"))


def test_batch_axes_in_the_kernels() -> None:
    merged = make("backward", batch=(2, 3, 4))
    plan = make_plan(merged, HOPPER)
    assert {step.spec.batch_axes for step in plan.steps} == {1}
    # A bias along the middle axis only keeps all three apart.
    bias = with_bias(3, 1, 1, 1, 70)
    plan = make_plan(
        make("backward", batch=(2, 3, 4), arrays=bias, bias_grad=True), HOPPER
    )
    assert {step.spec.batch_axes for step in plan.steps} == {3}
    assert all(step.spec.symbol.endswith("_batch3") for step in plan.steps)


# --- Grids and workspace --------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("gpu", ["sm_90", "sm_75", "sm_61"])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (128, 16), (40, 300), (500, 700)])
def test_grids(dtype: np.dtype, gpu: str, d: int, dv: int) -> None:
    size = {"batch": (3, 2), "sq": 130, "sk": 65, "hq": 6, "hkv": 2}
    size["config"] = "simt"
    plan = make_plan(make(**size, d=d, dv=dv, dtype=dtype), DEVICES[gpu])
    tile = tiles(plan)["forward"]
    rows, chunks = ceil_div(130, tile.rows), ceil_div(dv, tile.chunk_v)
    assert grids(plan) == {"forward": 6 * 6 * rows * chunks}
    assert plan.workspace == () and plan.cleared == ()

    plan = make_plan(make("backward", **size, d=d, dv=dv, dtype=dtype), DEVICES[gpu])
    dq, dkdv = tiles(plan)["backward_dq"], tiles(plan)["backward_dkdv"]
    dkdv_chunks = max(ceil_div(d, dkdv.chunk_d), ceil_div(dv, dkdv.chunk_v))
    assert grids(plan) == {
        "delta": ceil_div(6 * 6 * 130, 16),
        "backward_dq": 6 * 6 * ceil_div(130, dq.rows) * ceil_div(d, dq.chunk_d),
        "backward_dkdv": 6 * 2 * ceil_div(65, dkdv.rows) * dkdv_chunks,
    }
    (delta,) = plan.workspace
    assert (delta.name, delta.shape) == ("delta", (6, 6, 130))
    assert delta.dtype == accumulator(dtype)
    assert delta.nbytes == 6 * 6 * 130 * delta.dtype.itemsize


def test_grids_stay_below_the_limit() -> None:
    """The kernels walk over what a grid of 2**31 - 1 blocks leaves over."""
    size = {"batch": (2**20,), "sq": 2**20, "sk": 2**20, "hq": 64, "hkv": 64, "d": 8}
    for direction in ("forward", "backward"):
        plan = make_plan(make(direction, **size), HOPPER)
        assert {step.grid for step in plan.steps} == {MAX_GRID}


# What is launched where an axis is empty: forward, then backward by way of computing.
EMPTY = [
    ({"batch": (0,)}, [], {"simt": [], "mma": [], "deterministic": []}),
    ({"batch": (2, 0, 3)}, [], {"simt": [], "mma": [], "deterministic": []}),
    # dk and dv are 0.
    (
        {"sq": 0}, [],
        {"simt": ["backward_dkdv"], "mma": ["backward"],
         "deterministic": ["backward_dkdv"]},
    ),
    # Every row is empty: out and dq are 0, lse is -inf.
    (
        {"sk": 0}, ["forward"],
        {"simt": ["delta", "backward_dq"], "mma": ["delta", "convert_dq"],
         "deterministic": ["delta", "backward_dq"]},
    ),
    ({"sq": 0, "sk": 0}, [], {"simt": [], "mma": [], "deterministic": []}),
]  # fmt: skip


@pytest.mark.parametrize(("size", "forward", "backward"), EMPTY)
@pytest.mark.parametrize("way", ["simt", "mma", "deterministic"])
@pytest.mark.parametrize("gradient", [False, True])
def test_empty_axes(
    size: dict[str, Any],
    forward: list[str],
    backward: dict[str, list[str]],
    way: str,
    gradient: bool,
) -> None:
    options: dict[str, Any] = {"config": "simt" if way == "simt" else "mma"}
    plan = make_plan(make(**size, **options, return_lse=True), HOPPER)
    assert kernels(plan) == forward
    options["deterministic"] = way == "deterministic"
    sizes = {"sq": 100, "sk": 70} | size
    for shape in ((1, 1), (4, sizes["sq"], sizes["sk"]), (1, sizes["sk"])):
        problem = make(
            "backward", **size, **options, arrays=with_bias(*shape), bias_grad=gradient
        )
        plan = make_plan(problem, HOPPER)
        assert kernels(plan) == backward[way]
        # Nothing is summed into dbias, so that its zeros come from elsewhere.
        assert plan.cleared == (("dbias",) if gradient else ())
        assert all(entry.nbytes == 0 for entry in plan.workspace) or backward[way]


# --- The bias's gradient --------------------------------------------------------------
Where = tuple[int, ...]


def walk_dbias(plan: Plan) -> dict[Where, list[Where]]:
    """Return the tiles of logits that each block visits, as bias_tile.cuh does.

    Returns
    -------
    dict from (tile of dbias, part) to (flat batch, head, query tile, key tile)
    """
    problem = plan.problem
    tile = tiles(plan)["backward_dbias"]
    dbias = problem.operand("dbias")
    batch = merge_batch_axes(problem)
    heads, queries, keys = dbias.strides[-3:]
    # In the order in which `locate` takes coordinates.
    axes = [
        (queries == 0, ceil_div(problem.seqlen_q, tile.rows)),
        (keys == 0, ceil_div(problem.seqlen_k, tile.columns)),
        (heads == 0, problem.heads_q),
    ]
    axes += [
        (stride == 0, size)
        for size, stride in zip(
            reversed(batch.shape), reversed(batch.strides["dbias"]), strict=True
        )
    ]
    owned = math.prod(size for summed, size in axes if not summed)
    terms = math.prod(size for summed, size in axes if summed)
    each = ceil_div(terms, plan.dbias_splits)
    visits: dict[Where, list[Where]] = {}
    for block in range(grids(plan)["backward_dbias"]):
        number, part = block % owned, block // owned
        for term in range(part * each, min(terms, (part + 1) * each)):
            left = {False: number, True: term}
            coordinates = []
            for summed, size in axes:
                coordinates.append(left[summed] % size)
                left[summed] //= size
            query, key, head, *reverse = coordinates
            flat = 0
            for size, at in zip(batch.shape, reversed(reverse), strict=True):
                flat = flat * size + at
            visits.setdefault((number, part), []).append((flat, head, query, key))
    return visits


@st.composite
def bias_problems(draw: st.DrawFn) -> Problem:
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    hq, sq, sk = draw(st.integers(1, 4)), draw(st.integers(1, 300)), 70
    full = (*batch, hq, sq, sk)
    shape = tuple(draw(st.sampled_from([1, size])) for size in full)
    shape = shape[draw(st.integers(0, len(shape))) :]
    arrays = with_bias(*shape)
    return make(
        "backward", batch=batch, sq=sq, sk=sk, hq=hq, hkv=1, arrays=arrays,
        bias_grad=True, config=draw(st.sampled_from(BIAS_FAMILIES)),
    )  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(bias_problems(), st.sampled_from([1, 5, 40, 132]))
def test_each_tile_of_logits_is_summed_once(
    problem: Problem, multiprocessors: int
) -> None:
    gpu = dataclasses.replace(HOPPER, multiprocessors=multiprocessors)
    plan = make_plan(problem, gpu)
    visits = walk_dbias(plan)
    tile = tiles(plan)["backward_dbias"]
    found = [where for part in visits.values() for where in part]
    queries = ceil_div(problem.seqlen_q, tile.rows)
    keys = ceil_div(problem.seqlen_k, tile.columns)
    everything = problem.batch, problem.heads_q, queries, keys
    assert sorted(found) == list(np.ndindex(everything))
    # No part is without work, and each tile of dbias has as many parts.
    assert len(visits) == grids(plan)["backward_dbias"]
    owned = len({number for number, _ in visits})
    assert len(visits) == owned * plan.dbias_splits
    assert plan.dbias_splits == 1 or len(visits) <= 4 * multiprocessors
    partial = [entry for entry in plan.workspace if entry.name == "dbias_partial"]
    if plan.dbias_splits == 1:
        assert not partial and "reduce_dbias" not in kernels(plan)
    else:
        assert partial[0].shape == (len(visits), tile.rows, tile.columns)
        assert kernels(plan)[-1] == "reduce_dbias"
        assert grids(plan)["reduce_dbias"] == owned


def test_a_bias_with_everything_of_its_own_is_not_split() -> None:
    plan = make_plan(
        make("backward", arrays=with_bias(2, 4, 100, 70), bias_grad=True), HOPPER
    )
    assert plan.dbias_splits == 1
    assert kernels(plan) == ["delta", "backward", "convert_dq", "backward_dbias"]


def test_a_single_number_is_summed_by_the_whole_gpu() -> None:
    problem = make(
        "backward", batch=(64,), sq=2048, sk=2048, hq=16, hkv=16,
        arrays=with_bias(1, 1), bias_grad=True,
    )  # fmt: skip
    plan = make_plan(problem, HOPPER)
    assert 2 * 132 <= grids(plan)["backward_dbias"] <= 4 * 132
    assert grids(plan)["reduce_dbias"] == 1


def test_passes_know_only_what_they_need() -> None:
    """Else each option would have to compile them again."""
    problem = make(
        "backward", causal=True, softcap=3.0, scale=-1.0,
        arrays=with_bias(1, 70) | {"mask": info((100, 70), BOOL)}, bias_grad=True,
    )  # fmt: skip
    variants = {s.spec.kernel: s.spec.variant for s in make_plan(problem, HOPPER).steps}
    assert variants["delta"] == Variant()
    assert variants["reduce_dbias"] == Variant(bias=FLOAT32)


def test_workspace_is_linear_in_the_sequence() -> None:
    def taken(length: int, **options: Any) -> int:
        problem = make(
            "backward", sq=length, sk=length, arrays=with_bias(length, length),
            bias_grad=True, **options,
        )  # fmt: skip
        return sum(entry.nbytes for entry in make_plan(problem, HOPPER).workspace)

    delta = 2 * 4 * 2**17 * 4  # batch x heads x sequence
    for options in ({}, {"deterministic": True}, {"config": "simt"}):
        assert taken(2**14, **options) <= 2 * taken(2**13, **options)
    assert taken(2**17, config="simt") == taken(2**17, deterministic=True) == delta
    assert taken(2**17) == delta + 64 * delta  # and the sums of dq, of 64 channels


# --- Misaligned arrays ----------------------------------------------------------------


def shifted(shape: Sequence[int], by: int, dtype: np.dtype = FLOAT32) -> ArrayInfo:
    return info(shape, dtype, misalignment=by)


def test_what_lies_across_its_elements_is_copied() -> None:
    plan = make_plan(make(arrays={"k": shifted((2, 70, 2, 64), 2)}), HOPPER)
    assert plan.copies == ("k",)
    (reason,) = [reason for reason in plan.reasons if "copied" in reason]
    assert reason.startswith("k ") and "4 bytes" in reason
    between = info((2, 70, 2, 64))._replace(strides=(70 * 514, 514, 256, 4))
    assert make_plan(make(arrays={"v": between}), HOPPER).copies == ("v",)
    lengths = shifted((2,), 4, np.dtype(np.int64))
    plan = make_plan(make(arrays={"k_lengths": lengths}), HOPPER)
    assert plan.copies == ("k_lengths",)
    both = {"q": shifted((2, 100, 4, 64), 1), "bias": shifted((100, 70), 3)}
    assert make_plan(make(arrays=both), HOPPER).copies == ("q", "bias")


def test_an_output_is_not_copied() -> None:
    """The caller would look for the result where it isn't."""
    between = info((2, 100, 4, 64))._replace(strides=(102402, 1024, 256, 4))
    for out in (shifted((2, 100, 4, 64), 2), between):
        with pytest.raises(ValueError, match=r"out .*aligned"):
            make_plan(make(arrays={"out": out}), HOPPER)
        with pytest.raises(ValueError, match=r"dq .*aligned"):
            make_plan(make("backward", arrays={"dq": out}), HOPPER)
        # In backward it is an input.
        assert make_plan(make("backward", arrays={"out": out}), HOPPER).copies == (
            "out",
        )


def test_a_stride_that_no_step_takes_does_not_matter() -> None:
    """An axis of length 1 may have any stride."""
    q = info((1, 100, 1, 64))._replace(strides=(3, 256, 7, 4))
    problem = make(batch=(1,), hq=1, hkv=1, arrays={"q": q, "out": q})
    assert make_plan(problem, HOPPER).copies == ()


@dtypes
def test_simt_copies_no_whole_elements(dtype: np.dtype) -> None:
    """Any start and any stride that is a multiple of the element."""
    size = dtype.itemsize
    for by in range(0, 16, size):
        q = shifted((2, 100, 4, 64), by, dtype)
        q = q._replace(strides=(0, -511 * size, 77 * size, 3 * size))
        plan = make_plan(make(dtype=dtype, arrays={"q": q}, config="simt"), HOPPER)
        assert plan.copies == ()
        assert "copied" not in str(plan)
    mask = {"mask": shifted((100, 70), 7, BOOL)}
    assert make_plan(make(dtype=dtype, arrays=mask), HOPPER).copies == ()


# --- config= --------------------------------------------------------------------------


def test_a_family_can_be_named() -> None:
    for gpu, own in ((HOPPER, "mma"), (DEVICES["sm_61"], "simt")):
        plan, chosen = make_plan(make(config=own), gpu), make_plan(make(), gpu)
        assert plan.family == own and plan.steps == chosen.steps
        assert f"family {own}: config= asks for it" in plan.reasons
    assert make_plan(make(config="simt"), HOPPER).family == "simt"


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_tile_can_be_forced(direction: str) -> None:
    tile = SimtTile(32, 32, 64, 32, resident=False)
    arrays = with_bias(1, 70) if direction == "backward" else None
    problem = make(direction, config=tile, arrays=arrays, bias_grad=arrays is not None)
    plan = make_plan(problem, HOPPER)
    for kernel, used in tiles(plan).items():
        # The bias's gradient has a table of its own.
        assert (used == tile) == (kernel not in ("backward_dbias", "reduce_dbias"))
    assert f"config= asks for tile {tile.name}" in plan.reasons
    sound(plan)


@pytest.mark.parametrize(
    ("gpu", "d", "dv", "tile"),
    [
        # Too much shared memory.
        ("sm_61", 64, 64, SimtTile(64, 64, 64, 64, resident=True)),
        ("sm_90", 64, 64, SimtTile(256, 256, 128, 128, resident=False)),
        # A head that is larger than the chunk it should lie in.
        ("sm_90", 65, 64, SimtTile(64, 32, 64, 64, resident=True)),
    ],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_tile_that_does_not_fit(
    direction: str, gpu: str, d: int, dv: int, tile: SimtTile
) -> None:
    with pytest.raises(ValueError) as raised:
        make_plan(make(direction, d=d, dv=dv, config=tile), DEVICES[gpu])
    message = str(raised.value)
    assert tile.name in message and "doesn't fit" in message
    assert str(DEVICES[gpu].shared_memory) in message and str(d) in message


def test_values_too_wide_for_a_resident_tile() -> None:
    """Forward spreads the channels of v over blocks, backward can't."""
    tile = SimtTile(64, 32, 64, 64, resident=True)
    assert (
        grids(make_plan(make(dv=65, config=tile), HOPPER))["forward"] == 2 * 4 * 2 * 2
    )
    with pytest.raises(ValueError, match="head_dim 64 and 65"):
        make_plan(make("backward", dv=65, config=tile), HOPPER)


# --- explain --------------------------------------------------------------------------


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_explain_says_what_and_why(name: str, direction: str) -> None:
    q, k = zeros(2, 50, 4, 40), zeros(2, 60, 2, 40)
    plan = explain(q, k, k, causal=True, direction=direction, device=name)
    assert plan.device == DEVICES[name]
    text = str(plan)
    major, minor = divmod(plan.device.compute_capability, 10)
    for fact in (
        f"{direction} on {name}", f"compute capability {major}.{minor}",
        f"{plan.device.shared_memory // 1024} KiB", "float32: batch 2",
        "queries 50 x 4 heads", "keys 60 x 2 heads", "head_dim 40",
        "family: mma" if plan.device.compute_capability >= 80 else "family: simt",
    ):  # fmt: skip
        assert fact in text, fact
    for step in plan.steps:
        assert f"kernel: {step.spec.symbol}, {step.grid} blocks" in text
        if step.spec.tile is not None:
            assert step.spec.tile.name in text
    for reason in plan.reasons:
        assert f"why: {reason}" in text
    for entry in plan.workspace:
        assert f"workspace: {entry.name}" in text


def test_explain_backward_needs_no_results() -> None:
    """What forward returns is made up, in every rank, layout and dtype."""
    for dtype in DTYPES.values():
        for shape in ((50, 40), (50, 4, 40), (2, 50, 4, 40), (2, 3, 50, 4, 40)):
            for layout in ("bshd", "bhsd"):
                q = zeros(*shape, dtype=dtype)
                plan = explain(
                    q, q, q, layout=layout, direction="backward", device="sm_86"
                )
                assert kernels(plan)[0] == "delta"
                assert plan.problem.operand("lse").dtype == accumulator(dtype)


def test_explain_takes_every_option() -> None:
    q, v = zeros(2, 50, 4, 40), zeros(2, 50, 4, 24)
    for direction in ("forward", "backward"):
        plan = explain(
            q, q, v, causal="top_left", window=(5, 3), scale=-0.5, softcap=2.0,
            alibi_slopes=zeros(4), bias=zeros(50, 50), mask=zeros(50, dtype=bool),
            q_lengths=zeros(2, dtype=np.int32), k_lengths=zeros(2, dtype=np.int64),
            precision="tf32", out=zeros(2, 50, 4, 24), return_lse=True,
            dlse=zeros(2, 4, 50), bias_grad=True, deterministic=True, config="simt",
            direction=direction, device="sm_80",
        )  # fmt: skip
        variant = plan.steps[-1 if direction == "forward" else 1].spec.variant
        assert variant == Variant(True, True, True, True, FLOAT32, True, True)
        assert ("backward_dbias" in kernels(plan)) == (direction == "backward")
        assert "head_dim 40 and 24" in str(plan)


def test_explain_shows_which_arrays_are_copied() -> None:
    raw = np.zeros(4 * 50 * 64 + 16, np.uint8)
    between = np.ndarray((50, 60), np.float32, raw, strides=(242, 4))
    text = str(explain(zeros(50, 60), between, between, device="sm_90"))
    assert "why: k is copied" in text and "why: v is copied" in text
    assert "q is copied" not in text


def test_explain_needs_a_gpu() -> None:
    q = zeros(5, 8)
    with pytest.raises(ValueError, match=r"device='sm_90'"):
        explain(q, q, q)
    with pytest.raises(ValueError, match=r"sm_91.*accepted: sm_50"):
        explain(q, q, q, device="sm_91")
    with pytest.raises(ValueError, match=r"'sideways'.*'forward', 'backward'"):
        explain(q, q, q, direction="sideways", device="sm_90")
    with pytest.raises(ValueError, match="doesn't fit"):
        tile = SimtTile(64, 64, 64, 64, resident=True)
        explain(q, q, q, config=tile, device="sm_52")


def test_explain_refuses_what_the_call_would_refuse() -> None:
    q = zeros(5, 8)
    with pytest.raises(ValueError, match="softcap"):
        explain(q, q, q, softcap=-1.0, device="sm_90")
    with pytest.raises(TypeError, match=r"\bk\b"):
        explain(q, q.astype(np.float16), q, device="sm_90")
    with pytest.raises(ValueError, match="bias_grad"):
        explain(q, q, q, bias_grad=True, direction="backward", device="sm_90")
    assert cupy_flash.explain is explain


@pytest.mark.parametrize(
    ("dtype", "scale", "first"),
    [("fp32", 1e-37, False), ("fp32", 1e-40, True), ("bf16", 1e-40, True),
     ("fp64", 1e-40, False), ("fp64", 5e-324, True)],
)  # fmt: skip
def test_a_scale_that_counts_as_zero_comes_first(
    dtype: str, scale: float, first: bool
) -> None:
    """Subnormal numbers are flushed to 0, and (-inf) * 0 is NaN."""
    plan = make_plan(make(dtype=DTYPES[dtype], scale=scale), HOPPER)
    assert [step.spec.variant.scale_first for step in plan.steps] == [first]
