"""What is measured: counts of operations and bytes, selection, order."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.workloads import (
    ITEMSIZE,
    WORKLOADS,
    Case,
    Selection,
    from_the_middle,
    ragged,
    square,
)

SMALL = Case("x", "bfloat16", 2, 5, 7, 4, 2, 8, 16, True, "forward")


def pairs_by_counting(case: Case) -> int:
    """Count the pairs of query and key that see each other, one by one."""
    total = 0
    for queries, keys in case.lengths:
        i, j = np.arange(queries)[:, None], np.arange(keys)
        seen = j <= i + keys - queries if case.causal else np.ones((queries, keys))
        total += case.heads * int(seen.sum())
    return total


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (1, 9), (9, 1), (6, 6)])
def test_flops_are_those_of_the_visible_pairs(
    shape: tuple[int, int], causal: bool
) -> None:
    case = dataclasses.replace(
        SMALL, seqlen=shape[0], kv_seqlen=shape[1], causal=causal
    )
    pairs = pairs_by_counting(case)
    if causal and shape[0] == shape[1]:
        # By custom half of the square, without half of the diagonal.
        pairs -= case.batch * case.heads * shape[0] / 2
    assert case.flops == 2 * pairs * (8 + 16)


def test_flops_of_ragged_batches_are_counted_exactly() -> None:
    for causal in (False, True):
        case = dataclasses.replace(
            SMALL, seqlen=7, causal=causal, q_lengths=(7, 3), k_lengths=(7, 6)
        )
        assert case.pairs == pairs_by_counting(case)


def test_backward_has_five_products_for_two() -> None:
    work = {
        d: dataclasses.replace(SMALL, direction=d).flops
        for d in ("forward", "backward", "both")
    }
    assert work["backward"] == 2.5 * work["forward"]
    assert work["both"] == work["forward"] + work["backward"]


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_bytes_are_those_of_the_arrays(dtype: str) -> None:
    size = ITEMSIZE[dtype]
    q, k, v = 2 * 5 * 4 * 8 * size, 2 * 7 * 2 * 8 * size, 2 * 7 * 2 * 16 * size
    out, lse = 2 * 5 * 4 * 16 * size, 2 * 5 * 4 * max(4, size)
    expected = {
        "forward": q + k + v + out,
        "backward": (q + k + v + out + out + lse) + (q + k + v),
        "both": (q + k + v + out) + (out + q + k + v),
    }
    for direction, count in expected.items():
        case = dataclasses.replace(SMALL, dtype=dtype, direction=direction)
        assert case.bytes == count


def test_bytes_of_ragged_batches_read_the_valid_prefix_only() -> None:
    case = dataclasses.replace(SMALL, q_lengths=(5, 1), k_lengths=(7, 2))
    read = 6 * 4 * 8 + 9 * 2 * (8 + 16)
    assert case.bytes == 2 * (read + 2 * 5 * 4 * 16)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_case_is_one_that_attention_can_do(workload: str) -> None:
    cases = Selection().cases(workload)
    assert len(set(cases)) == len(cases)
    for case in cases:
        assert case.workload == workload and case.dtype in ITEMSIZE
        assert case.heads % case.kv_heads == 0
        assert case.flops > 0 and case.bytes > 0
        for lengths, longest in (
            (case.q_lengths, case.seqlen),
            (case.k_lengths, case.kv_seqlen),
        ):
            if lengths is not None:
                assert len(lengths) == case.batch
                assert 0 < min(lengths) and max(lengths) == longest


def test_training_has_the_same_work_in_each_shape() -> None:
    for case in WORKLOADS["training"]():
        assert case.batch * case.seqlen == 16384
        assert case.heads * case.head_dim == 2048


def test_ragged_lengths_differ_and_are_no_multiples_of_tiles() -> None:
    lengths = ragged(8, 2048)
    assert len(set(lengths)) == 8 and max(lengths) == 2048
    assert sum(n % 64 == 0 for n in lengths) == 1


def test_a_selection_filters() -> None:
    cases = Selection((64,), (512, 4096), ("backward",)).cases("training")
    assert {(c.head_dim, c.seqlen, c.direction) for c in cases} == {
        (64, 512, "backward"), (64, 4096, "backward"),
    }  # fmt: skip
    assert {c.kv_seqlen for c in Selection((), (65536,)).cases("decode")} == {65536}


def test_dtypes_replace_those_of_the_workload() -> None:
    cases = Selection(dtypes=("float16", "float32")).cases("decode")
    assert len(cases) == 2 * len(WORKLOADS["decode"]())
    assert {case.dtype for case in cases} == {"float16", "float32"}


def test_an_empty_selection_says_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"--head-dim 64,128,256;.*--seqlen 512,"):
        Selection(head_dims=(72,)).cases("training")


def test_the_first_cases_stand_for_all() -> None:
    first = Selection().cases("training")[:6]
    assert {case.seqlen for case in first} == {4096}
    assert {(case.head_dim, case.causal) for case in first} == {
        (d, causal) for d in (64, 128, 256) for causal in (False, True)
    }
    assert from_the_middle([1, 2, 3, 4]) == [3, 4, 2, 1]


def test_a_label_tells_cases_apart() -> None:
    for workload in WORKLOADS:
        cases = Selection().cases(workload)
        assert len({case.label for case in cases}) == len(cases)
    label = square("gqa", "float16", 1, 64, 8, 32, False, "both", 2).label
    assert label == "gqa both float16 D32 full B1 S64 H8/2"
