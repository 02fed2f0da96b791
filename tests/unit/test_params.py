"""The kernels' argument: the same struct on both sides, filled in rightly."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_flash import compiler
from cupy_flash.params import (
    POINTERS,
    Batch,
    make_template,
    merge_batch_axes,
    params_dtype,
)
from cupy_flash.problem import ArrayInfo, Options, Problem
from cupy_flash.validate import contiguous_strides, make_problem

FLOAT32, FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)
UNLIMITED = 2**32

# Fields that the struct calls by another name.
CUDA_NAMES = {"alibi_slopes_strides": "alibi_strides"}


def info(shape: Sequence[int], dtype: np.dtype = FLOAT32) -> ArrayInfo:
    return ArrayInfo(tuple(shape), contiguous_strides(tuple(shape), dtype), dtype)


def qkv(batch: tuple[int, ...], dtype: np.dtype = FLOAT32) -> dict[str, ArrayInfo]:
    return {
        "q": info((*batch, 5, 4, 8), dtype),
        "k": info((*batch, 7, 2, 8), dtype),
        "v": info((*batch, 7, 2, 6), dtype),
    }


def problem(
    arrays: dict[str, ArrayInfo], direction: str = "forward", **options: object
):
    return make_problem(arrays, Options(direction, **options))


# --- The struct -----------------------------------------------------------------------


def translation_unit(dtype: np.dtype, batch_axes: int) -> str:
    """C++ that compiles only if the struct is laid out like a NumPy dtype."""
    lines = [
        f"using Struct = cupy_flash::Params<{batch_axes}>;",
        f'static_assert(sizeof(Struct) == {dtype.itemsize}, "sizeof");',
    ]
    for name, (kind, offset) in dtype.fields.items():
        field = CUDA_NAMES.get(name, name)
        # What offsetof is made of in NVRTC, which has no header for it.
        found = f"__INTADDR__(&static_cast<Struct*>(nullptr)->{field})"
        lines += [
            f'static_assert({found} == {offset}, "offset of {name}");',
            f'static_assert(sizeof(Struct::{field}) == {kind.itemsize}, "{name}");',
        ]
    return compiler.flatten("common/params.cuh") + "\n".join(lines) + "\n"


def compile_struct(dtype: np.dtype, batch_axes: int) -> None:
    flags, suffix = compiler.options(90)
    compiler._compile(translation_unit(dtype, batch_axes), "params", flags, suffix)


@pytest.mark.parametrize("batch_axes", [1, 2, 3, 4])
def test_every_field_lies_where_the_kernels_look(batch_axes: int) -> None:
    compile_struct(params_dtype(batch_axes), batch_axes)


def test_fields_that_are_exchanged_are_noticed() -> None:
    """The check above can fail: neighbours of one size are told apart."""
    dtype = params_dtype(2)
    names = list(dtype.names)
    at = names.index("head_dim")
    names[at], names[at + 1] = names[at + 1], names[at]
    exchanged = np.dtype([(name, dtype.fields[name][0]) for name in names])
    with pytest.raises(compiler.CompileError, match="offset of head_dim"):
        compile_struct(exchanged, 2)


def test_the_struct_has_no_gaps() -> None:
    """A gap would hold bytes that nothing sets."""
    for batch_axes in range(1, 5):
        dtype = params_dtype(batch_axes)
        assert dtype.itemsize == sum(kind.itemsize for kind, _ in dtype.fields.values())
        assert dtype.names[: len(POINTERS)] == POINTERS


# --- Merging of batch axes ------------------------------------------------------------


def offsets(shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """Return the offset of each element, in C order."""
    total = np.zeros(shape, np.int64)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        steps = np.arange(size) * stride
        total += steps.reshape(-1, *(1,) * (len(shape) - axis - 1))
    return total.reshape(-1)


def fewest_axes(problem: Problem) -> int:
    """Into how few axes an enumeration in C order fits: one more than the breaks.

    Between two neighbouring axes is a break if some operand doesn't go on along the
    outer one where the inner one ends.
    """
    kept = [axis for axis, size in enumerate(problem.batch_shape) if size != 1]
    breaks = 0
    for outer, inner in zip(kept, kept[1:], strict=False):
        size = problem.batch_shape[inner]
        breaks += any(
            o.strides[outer] != o.strides[inner] * size for o in problem.operands
        )
    return 1 + breaks


def check_merged(problem: Problem) -> Batch:
    batch = merge_batch_axes(problem)
    assert set(batch.strides) == {o.name for o in problem.operands}
    assert math.prod(batch.shape) == problem.batch
    axes = len(problem.batch_shape)
    for operand in problem.operands:
        np.testing.assert_array_equal(
            offsets(batch.shape, batch.strides[operand.name]),
            offsets(problem.batch_shape, operand.strides[:axes]),
            err_msg=operand.name,
        )
    assert len(batch.shape) == fewest_axes(problem)
    return batch


def of_memory(
    batch: tuple[int, ...], draw: st.DrawFn, tail: tuple[int, ...]
) -> ArrayInfo:
    """Draw strides such as views have: transposed, cut, broadcast, reversed."""
    order = draw(st.permutations(range(len(batch))))
    gaps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in batch]
    step = math.prod(tail) * 4
    strides = [0] * len(batch)
    for axis in reversed(order):
        strides[axis] = step
        step *= batch[axis] * gaps[axis]
    for axis in range(len(batch)):
        kind = draw(st.sampled_from(["as is", "as is", "as is", "broadcast", "back"]))
        strides[axis] *= {"as is": 1, "broadcast": 0, "back": -1}[kind]
    shape = (*batch, *tail)
    own = contiguous_strides(tail, FLOAT32)
    return ArrayInfo(shape, (*strides, *own), FLOAT32)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    batch = tuple(draw(st.lists(st.integers(0, 4), max_size=5)))
    if draw(st.booleans()):
        arrays = qkv(batch)  # contiguous, which merges
    else:
        arrays = {
            "q": of_memory(batch, draw, (5, 4, 8)),
            "k": of_memory(batch, draw, (7, 2, 8)),
            "v": of_memory(batch, draw, (7, 2, 6)),
        }
    if draw(st.booleans()):
        sizes = [draw(st.sampled_from([1, size])) for size in batch]
        arrays["bias"] = info((*sizes, 1, 5, 7))
    return problem(arrays, return_lse=draw(st.booleans()))


@settings(deadline=None, max_examples=300)
@given(problems())
def test_merged_axes_reach_the_same_addresses(problem: Problem) -> None:
    check_merged(problem)


@pytest.mark.parametrize(
    ("batch", "merged"),
    [
        ((), (1,)),
        ((1,), (1,)),
        ((1, 1, 1), (1,)),
        ((6,), (6,)),
        ((2, 3, 4), (24,)),
        ((1, 2, 1, 3, 1), (6,)),
        ((0,), (0,)),
    ],
)
def test_contiguous_batch_axes_become_one(
    batch: tuple[int, ...], merged: tuple[int, ...]
) -> None:
    assert check_merged(problem(qkv(batch))).shape == merged


def test_one_operand_keeps_axes_apart() -> None:
    """A bias per second batch axis has other strides than q."""
    arrays = qkv((2, 3, 4)) | {"bias": info((3, 4, 1, 1, 7))}
    batch = check_merged(problem(arrays))
    assert batch.shape == (2, 12)
    assert batch.strides["bias"] == (0, 7 * 4)
    arrays["bias"] = info((3, 1, 1, 1, 7))
    assert check_merged(problem(arrays)).shape == (2, 3, 4)


def test_a_broadcast_batch_is_merged_too() -> None:
    arrays = qkv((2, 3))
    assert check_merged(problem(arrays)).shape == (6,)
    shared = arrays["k"]._replace(strides=(0, 0, *arrays["k"].strides[2:]))
    assert check_merged(problem(arrays | {"k": shared})).shape == (6,)


# --- The values -----------------------------------------------------------------------


PLAIN = {"dbias_splits": 1, "section": 1, "dq_row_tiles": 0}


def filled(
    problem: Problem, plan: Mapping[str, int] = PLAIN, **addresses: int
) -> dict[str, object]:
    """Return the fields of the struct of a problem, with numbers of its plan."""
    template = make_template(problem, addresses, **{**PLAIN, **plan})
    axes = len(merge_batch_axes(problem).shape)
    (record,) = np.frombuffer(template.fill(addresses), params_dtype(axes))
    return {name: record[name] for name in record.dtype.names}


def test_each_address_is_in_its_slot() -> None:
    addresses = {name: 2**40 + 16 * n for n, name in enumerate(POINTERS)}
    fields = filled(problem(qkv((2,))), **addresses)
    assert {name: int(fields[name]) for name in POINTERS} == addresses


def test_what_a_call_does_not_have_is_null() -> None:
    fields = filled(problem(qkv((2,))), q=2**63 + 16, out=48)
    assert int(fields["q"]) == 2**63 + 16
    assert int(fields["out"]) == 48
    assert not any(int(fields[name]) for name in set(POINTERS) - {"q", "out"})
    assert not fields["lse_strides"].any() and not fields["mask_strides"].any()


def test_a_launch_has_a_number_of_its_own() -> None:
    found = filled(problem(qkv((2,))), claims=64, first_claim=2**64 - 1)
    assert (int(found["claims"]), int(found["first_claim"])) == (64, 2**64 - 1)
    assert filled(problem(qkv((2,))), claims=64)["first_claim"] == 0


def test_one_template_serves_many_calls() -> None:
    """None of them changes what another was given."""
    template = make_template(problem(qkv((2,))), ["q", "v"], **PLAIN)
    first = template.fill({"q": 16, "v": 64})
    second = template.fill({"v": 64, "q": 32})
    assert bytes(first)[8:] == bytes(second)[8:]
    assert bytes(first)[:24] == b"".join(n.to_bytes(8, "little") for n in (16, 0, 64))
    assert bytes(second)[:8] == (32).to_bytes(8, "little")


@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT32, np.dtype(np.float64)])
def test_strides_are_in_elements(dtype: np.dtype) -> None:
    size = dtype.itemsize
    arrays = qkv((3,), dtype)
    # k reversed in time, v a slice of a packed array, q broadcast along the batch.
    arrays["q"] = arrays["q"]._replace(strides=(0, 40 * size, 10 * size, size))
    arrays["k"] = arrays["k"]._replace(strides=(112 * size, -16 * size, 8 * size, size))
    arrays["v"] = arrays["v"]._replace(
        strides=(999 * size, 48 * size, 6 * size, 2 * size)
    )
    arrays["mask"] = ArrayInfo((5, 7), (7, 1), np.dtype(np.bool_))
    arrays["bias"] = info((3, 1, 1, 7), np.dtype(np.float64))
    arrays["alibi_slopes"] = info((4,))
    arrays["k_lengths"] = info((3,), np.dtype(np.int64))
    arrays["q_lengths"] = ArrayInfo((3,), (8,), np.dtype(np.int32))
    fields = filled(problem(arrays, return_lse=True))
    expected = {
        "q": [0, 40, 10, 1],
        "k": [112, -16, 8, 1],
        "v": [999, 48, 6, 2],
        "out": [120, 24, 6, 1],
        "lse": [20, 5, 1],
        "mask": [0, 0, 7, 1],
        "bias": [7, 0, 0, 1],
        "alibi_slopes": [0, 1],
        "k_lengths": [1],
        "q_lengths": [2],
    }
    for name, strides in expected.items():
        assert fields[f"{name}_strides"].tolist() == strides, name
    assert (fields["q_lengths_bytes"], fields["k_lengths_bytes"]) == (4, 8)


def test_layout_and_rank_do_not_show() -> None:
    """Kernels always get (batch, seqlen, heads, head_dim)."""
    plain = filled(problem(qkv((2,))))
    arrays = {
        name: info((2, x.shape[2], x.shape[1], x.shape[3]))
        for name, x in qkv((2,)).items()
    }
    other = filled(problem(arrays, layout="bhsd"))
    assert other["q_strides"].tolist() == [160, 8, 40, 1]
    assert plain["q_strides"].tolist() == [160, 32, 8, 1]
    for name in ("seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim"):
        assert plain[name] == other[name]
    one = filled(problem({n: info((9, 8)) for n in "qkv"}, return_lse=True))
    assert one["q_strides"].tolist() == [0, 8, 0, 1]
    assert one["lse_strides"].tolist() == [0, 9, 1]
    assert (one["heads_q"], one["heads_kv"]) == (1, 1)


def test_gradients_have_strides() -> None:
    arrays = qkv((2,)) | {
        "out": info((2, 5, 4, 6)),
        "dout": ArrayInfo((2, 5, 4, 6), (0, 0, 0, 4), FLOAT32),
        "lse": info((2, 4, 5)),
        "dlse": ArrayInfo((2, 4, 5), (80, 4, 16), FLOAT32),
        "bias": info((1, 4, 1, 7)),
        "dk": ArrayInfo((2, 7, 2, 8), (1000, 128, 32, 4), FLOAT32),
    }
    fields = filled(problem(arrays, "backward", bias_grad=True), {"dbias_splits": 3})
    expected = {
        "dout": [0, 0, 0, 1],
        "dlse": [20, 1, 4],
        "dq": [160, 32, 8, 1],
        "dk": [250, 32, 8, 1],
        "dv": [84, 12, 6, 1],
        "dbias": [0, 7, 0, 1],
        "bias": [0, 7, 0, 1],
    }
    for name, strides in expected.items():
        assert fields[f"{name}_strides"].tolist() == strides, name
    assert fields["dbias_splits"] == 3


def test_numbers() -> None:
    plan = {"section": 6, "dq_row_tiles": 4}
    fields = filled(problem(qkv((3,)), scale=-0.25, softcap=30.0), plan)
    numbers = {
        "seqlen_q": 5, "seqlen_k": 7, "heads_q": 4, "heads_kv": 2, "head_dim": 8,
        "head_dim_v": 6, "scale": -0.25, "softcap": 30.0, "dbias_splits": 1,
        "q_lengths_bytes": 0, "k_lengths_bytes": 0, "top_left": 0, "section": 6,
        "dq_row_tiles": 4,
    }  # fmt: skip
    assert {name: fields[name].item() for name in numbers} == numbers
    assert fields["batch_shape"].tolist() == [3]
    assert filled(problem(qkv((3,))))["scale"] == 1 / math.sqrt(8)


@pytest.mark.parametrize(
    ("options", "left", "right", "top_left"),
    [
        ({}, UNLIMITED, UNLIMITED, 0),
        ({"causal": True}, UNLIMITED, 0, 0),
        ({"causal": "top_left"}, UNLIMITED, 0, 1),
        ({"window": (3, None)}, 3, UNLIMITED, 0),
        ({"window": (-1, 2)}, UNLIMITED, 2, 0),
        ({"window": (0, 0)}, 0, 0, 0),
        ({"window": (3, 2), "causal": True}, 3, 0, 0),
        # Kernels subtract these from positions: they must not overflow there.
        ({"window": (2**62, 2**70)}, UNLIMITED, UNLIMITED, 0),
    ],
)
def test_the_band(options: dict, left: int, right: int, top_left: int) -> None:
    fields = filled(problem(qkv((2,)), **options))
    found = tuple(int(fields[name]) for name in ("left", "right", "top_left"))
    assert found == (left, right, top_left)


def test_strides_beyond_32_bits() -> None:
    arrays = qkv((2,))
    far = 2**40
    arrays["k"] = arrays["k"]._replace(strides=(4 * far, 4 * 2**33, -4 * 2**34, 4))
    fields = filled(problem(arrays))
    assert fields["k_strides"].tolist() == [far, 2**33, -(2**34), 1]


def test_no_operand_is_left_out() -> None:
    """Each array that a problem can have has strides in the struct."""
    arrays = qkv((2,)) | {
        "out": info((2, 5, 4, 6)), "dout": info((2, 5, 4, 6)), "lse": info((2, 4, 5)),
        "dlse": info((2, 4, 5)), "bias": info((5, 7)), "alibi_slopes": info((4,)),
        "mask": ArrayInfo((5, 7), (7, 1), np.dtype(np.bool_)),
        "q_lengths": info((2,), np.dtype(np.int32)),
        "k_lengths": info((2,), np.dtype(np.int32)),
    }  # fmt: skip
    full = problem(arrays, "backward", bias_grad=True)
    names = {operand.name for operand in full.operands}
    workspace = {"delta", "dbias_partial", "dq_sums", "row_terms", "claims"}
    assert names | workspace == set(POINTERS)
    fields = params_dtype(1).names
    assert all(f"{name}_strides" in fields for name in names)
    assert dataclasses.replace(full) == full and hash(full) == hash(full)
