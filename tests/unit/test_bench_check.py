"""The check that decides whether a result deserves a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from bench import check
from bench.check import Reference, WrongResult
from bench.peers import make_inputs
from bench.workloads import Case, square

from .bench_fakes import right_results

PLAIN = square("x", "float32", 2, 300, 4, 16, False, "both", 2)
CAUSAL = dataclasses.replace(PLAIN, causal=True)
CASES = {
    "plain": PLAIN,
    "causal": CAUSAL,
    "more keys": dataclasses.replace(CAUSAL, kv_seqlen=333),
    "more queries": dataclasses.replace(CAUSAL, kv_seqlen=200),
    "sizes": dataclasses.replace(CAUSAL, head_dim_v=24),
    "ragged": dataclasses.replace(
        CAUSAL, q_lengths=(300, 77), k_lengths=(290, 130), direction="backward"
    ),
    "float64": dataclasses.replace(PLAIN, dtype="float64", direction="backward"),
    "forward": dataclasses.replace(CAUSAL, direction="forward", kv_heads=1),
}


def fetcher(results: dict[str, np.ndarray]) -> Any:
    return lambda index: {name: x[index[name]] for name, x in results.items()}


def setup(case: Case) -> tuple[Reference, dict[str, np.ndarray]]:
    inputs = make_inputs(case, "cpu")
    return Reference(case, inputs.native, np), right_results(case, inputs)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_agrees_with_the_definition(case: Case) -> None:
    reference, results = setup(case)
    assert reference.error(fetcher(results)) < 1e-13


def test_rounding_to_each_dtype_is_within_the_tolerance() -> None:
    for dtype in ("float16", "bfloat16", "float32"):
        case = dataclasses.replace(CAUSAL, dtype=dtype)
        inputs = make_inputs(case, "cpu")
        rounded = {
            name: x.astype(inputs.native["q"].dtype)
            for name, x in right_results(case, inputs).items()
        }
        error = Reference(case, inputs.native, np).error(fetcher(rounded))
        assert 0 < error < check.TOLERANCE[dtype] / 4


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("fault", ["tile", "nan", "scale", "head", "one row"])
def test_faults_are_found_in_every_result(name: str, fault: str) -> None:
    reference, results = setup(dataclasses.replace(CAUSAL, dtype="bfloat16"))
    wrong = results[name]
    if fault == "tile":
        wrong[-1, 128:256] = 0
    elif fault == "nan":
        wrong[0, 5, 0, 3] = np.nan
    elif fault == "scale":
        wrong *= 1.03
    elif fault == "head":
        wrong[0, :, 0] = wrong[0, :, -1].copy()
    else:
        wrong[0, 299, 0] += 3
    with pytest.raises(WrongResult, match=f"{name} of sequence"):
        reference.error(fetcher(results))


def test_tf32_is_not_float32() -> None:
    reference, results = setup(dataclasses.replace(PLAIN, direction="forward"))
    noise = np.random.default_rng(0).standard_normal(results["out"].shape)
    results["out"] *= 1 + 3e-4 * noise
    with pytest.raises(WrongResult, match="off by 3"):
        reference.error(fetcher(results))


def test_a_missing_result_and_a_wrong_shape_are_told() -> None:
    reference, results = setup(PLAIN)
    with pytest.raises(WrongResult, match="no dv"):
        reference.error(fetcher({k: x for k, x in results.items() if k != "dv"}))
    results["dk"] = results["dk"][:, :-1]
    with pytest.raises(WrongResult, match="dk .* expected"):
        reference.error(fetcher(results))


def test_rows_past_the_lengths_are_not_compared() -> None:
    reference, results = setup(CASES["ragged"])
    results["dq"][1, 77:] = np.nan
    results["dk"][0, 290:] = np.nan
    assert reference.error(fetcher(results)) < 1e-13


def test_long_forward_passes_compare_blocks_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "MOST", 1)
    monkeypatch.setattr(check, "PART", 1)
    case = square("x", "float32", 2, 1200, 1, 8, True, "forward")
    inputs = make_inputs(case, "cpu")
    results = right_results(case, inputs)
    reference = Reference(case, inputs.native, np)
    assert reference.error(fetcher(results)) < 1e-13
    assert check.chosen_heads(case) == [(1, 0)]
    compared = np.zeros(1200, bool)
    for block in check.row_blocks(case, check.cut(case, inputs.native, (1, 0), np)):
        compared[block] = True
    assert compared[0] and compared[-1] and 400 < compared.sum() < 600
    results["out"][1, ~compared] = np.nan
    assert reference.error(fetcher(results)) < 1e-13
    results["out"][1, -1] += 1
    with pytest.raises(WrongResult):
        reference.error(fetcher(results))
