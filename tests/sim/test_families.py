"""The kernels of every family on the CPU, against the float64 reference."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from cupy_flash.tiles import MmaTile

from ..cases import Array, Case, assert_same, compare, expect_case, make
from .device import SimDevice
from .probes import PROBES, RECORD, assert_agrees
from .running import check_case, gpu, mirror, run

_SMALL = {"batch": (1,), "hq": 2, "hkv": 1, "sq": 70, "sk": 90}
# Every option at once, with sizes that fill no tile.
_ALL: dict[str, Any] = {
    **_SMALL, "causal": True, "window": (60, 9), "softcap": 3.0, "alibi": "heads",
    "bias": "h1k", "mask": "b11k", "scale": -0.2, "dlse": True,
}  # fmt: skip
_LENGTHS: dict[str, Any] = {
    "batch": (3,), "hq": 2, "hkv": 1, "sq": 40, "sk": 90, "q_lengths": (40, 0, 17),
    "k_lengths": (90, 60, 0),
}  # fmt: skip
_FEW: dict[str, Any] = {"batch": (1,), "hq": 1, "hkv": 1, "sq": 20, "sk": 70}
_AWAY = {"order": "random", "early": True}
_BACK = {"order": "descending"}

CASES = (
    ("simt", "sm_90", Case("all", "float32", **_ALL, d=24, dv=20)),
    ("simt", "sm_61", Case("causal", "bfloat16", **_SMALL, causal=True)),
    ("mma", "sm_90", Case("all", "bfloat16", **_ALL)),
    ("mma", "sm_90", Case("causal", "bfloat16", **_SMALL, causal=True)),
    ("mma", "sm_75", Case("ragged", "float16", **_SMALL, d=46, causal=True)),
    ("mma", "sm_86", Case("wide", "bfloat16", **_SMALL, d=128, dv=96)),
    ("mma", "sm_90", Case("packed", "float32", **_SMALL, d=30, memory="packed")),
    ("mma", "sm_90", Case("window", "float64", **_SMALL, d=24, window=(20, 5))),
    ("mma", "sm_90", Case("lengths", "bfloat16", **_LENGTHS, causal=True, dv=96)),
    ("mma", "sm_90",
     Case("top_left", "bfloat16", **_LENGTHS, causal="top_left", dv=96)),
    ("mma", "sm_90", Case("reversed", "bfloat16", **_FEW, d=256, memory="reversed")),
    ("mma", "sm_90", Case("masks", "bfloat16", **_SMALL, mask="bhqk")),
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "name", "case"),
    CASES,
    ids=[f"{family}-{name}-{case}" for family, name, case in CASES],
)
def test_against_the_reference(family: str, name: str, case: Case) -> None:
    """In any order of threads, and however late copies arrive."""
    first = check_case(case, SimDevice(gpu(name)), family)
    for ways in (_AWAY, _BACK):
        again = run(make(case), SimDevice(gpu(name), **ways), family)
        assert_same(again, first)
    # The way in which blocks add up dq.
    check_case(case, SimDevice(gpu(name), **_BACK), family, deterministic=False)


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("sm_75", "mma_fp16"),
        ("sm_75", "cp_async_4"),
        ("sm_75", "cp_async_8"),
        ("sm_75", "cp_async_16"),
        ("sm_80", "mma_fp64"),
        ("sm_86", "red_add"),
    ],
)
def test_what_older_gpus_do_with_other_instructions(
    name: str, instruction: str
) -> None:
    """The results are those of the latest ones."""
    (probe,) = (probe for probe in PROBES if probe.name == instruction)
    device = SimDevice(gpu(name))
    out = probe.run(device, [mirror(device, x) for x in probe.arrays()])
    with np.load(RECORD) as recorded:
        assert_agrees(probe, np.array(out), recorded[instruction])


@pytest.mark.parametrize(
    "tile",
    [
        MmaTile(64, 32, 64, 64, warps=4, stages=2, across=2),
        MmaTile(32, 64, 64, 64, warps=2),
    ],
    ids=lambda tile: tile.name,
)
def test_other_tiles_of_the_backward_pass(tile: MmaTile) -> None:
    """Warps that share keys, and two stages or one."""
    case = Case("causal", "bfloat16", **_SMALL, causal=True)
    device = SimDevice(gpu("sm_90"), **_AWAY)
    results = gradients_of(device, case, tile)
    compare(results, {n: t for n, t in expect_case(case).items() if n in results})


def gradients_of(device: SimDevice, case: Case, tile: MmaTile) -> dict[str, Array]:
    """Run a backward pass with a tile."""
    from cupy_flash import flash_attention, flash_attention_backward

    inputs = make(case)
    arrays = {n: device.array(np.array(x)) for n, x in inputs.arrays.items()}
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    options = inputs.scalars
    out, lse = flash_attention(q, k, v, **options, return_lse=True)
    gradients = flash_attention_backward(
        dout, q, k, v, out, lse, **options, config=tile
    )
    return {
        name: np.array(x) for name, x in zip(("dq", "dk", "dv"), gradients, strict=True)
    }


@functools.cache
def _mask_case() -> Case:
    return Case("mask", "bfloat16", **_SMALL, mask="b11k")


@pytest.mark.parametrize("deterministic", [False, True])
def test_nan_in_keys_that_nobody_sees(deterministic: bool) -> None:
    """It reaches no sum: 0 * NaN would."""
    inputs = make(_mask_case())
    hidden = [0, 13, *range(64, 80)]
    inputs.options["mask"][..., hidden] = False
    clean = run(inputs, SimDevice(gpu("sm_90")), "mma", deterministic=deterministic)
    inputs.k[:, hidden] = np.nan
    inputs.v[:, hidden] = np.nan
    dirty = run(inputs, SimDevice(gpu("sm_90")), "mma", deterministic=deterministic)
    assert_same(dirty, clean)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["k", "v", "dout"])
def test_past_the_lengths_all_is_zero(name: str, deterministic: bool) -> None:
    """Whatever the valid part holds."""
    case = Case("short", "bfloat16", batch=(1,), hq=1, hkv=1, sq=20, sk=24,
                q_lengths=(5,), k_lengths=(7,))  # fmt: skip
    inputs = make(case)
    getattr(inputs, name)[:, 0] = np.nan
    results = run(inputs, SimDevice(gpu("sm_90")), "mma", deterministic=deterministic)
    for key, length in (("out", 5), ("dq", 5), ("dk", 7), ("dv", 7)):
        assert not results[key][:, length:].any(), key


@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_comes_from_rows_that_see_nothing(deterministic: bool) -> None:
    """Also where dlse is NaN, as the derivative of lse = -inf is."""
    case = Case("empty", "bfloat16", batch=(1,), hq=1, hkv=1, sq=20, sk=8,
                causal=True, dlse=True)  # fmt: skip
    inputs = make(case)
    inputs.dlse[..., :12] = 0
    clean = run(inputs, SimDevice(gpu("sm_90")), "mma", deterministic=deterministic)
    inputs.dlse[..., :12] = np.nan
    dirty = run(inputs, SimDevice(gpu("sm_90")), "mma", deterministic=deterministic)
    assert_same(dirty, clean)


def test_huge_equal_logits() -> None:
    """Their exponentials are exactly 1."""
    case = Case("huge", "bfloat16", batch=(1,), hq=1, hkv=1, sq=20, sk=40)
    inputs = make(case)
    for x in (inputs.q, inputs.k, inputs.v):
        x[...] = 133120
    results = run(inputs, SimDevice(gpu("sm_90")), "mma", gradients=False)
    np.testing.assert_array_equal(results["out"].astype(np.float64), 133120)
    np.testing.assert_allclose(results["lse"], 1.41767e11, rtol=1e-5)


@pytest.mark.parametrize("lowest", [True, False])
def test_bias_of_the_lowest_number(lowest: bool) -> None:
    """Times log2(e) it is -inf; rows that have nothing else are means."""
    case = Case("lowest", "float16", batch=(1,), hq=1, hkv=1, sq=20, sk=40, bias="qk",
                bias_dtype="float32")  # fmt: skip
    inputs = make(case)
    bias = np.zeros((20, 40), np.float32)
    bias[10:] = np.finfo(np.float32).min if lowest else -1e30
    inputs = inputs.with_options(bias=bias)
    results = run(inputs, SimDevice(gpu("sm_90")), "mma", gradients=False)
    mean = inputs.v.astype(np.float64).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(
        results["out"][:, 10:].astype(np.float64),
        np.broadcast_to(mean, (1, 10, 1, 64)), atol=1e-3,
    )  # fmt: skip
    np.testing.assert_array_equal(results["lse"][0, 0, 10:], bias[10:, 0])
