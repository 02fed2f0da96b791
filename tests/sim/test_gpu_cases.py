"""Tests of tests/gpu on the CPU, at small shapes.

They are the same functions; what they call of CuPy is replaced. Neighbours in the table
share kernels as far as they can, since most of the time goes into compiling them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from cupy_flash import flash_attention, flash_attention_vjp

from .. import cases
from ..cases import SINGLE, Array, Case, assert_same, expect_case, make
from ..gpu import running, test_arrays, test_cases
from ..gpu import test_reference_grid as grid
from .device import SimArray, SimDevice, bytes_at
from .running import gpu, mirror

_TINY: dict[str, Any] = {"batch": (2,), "hq": 2, "hkv": 1, "sq": 40, "sk": 70}
_ONE_SEQUENCE: dict[str, Any] = _TINY | {"batch": (1,)}
_D24: dict[str, Any] = _TINY | {"d": 24}


@dataclass(frozen=True)
class SimCopy:
    """A copy of an array on the simulated GPU, in place of `tests.gpu.running.Copy`."""

    array: SimArray

    def unchanged(self, like: Array) -> bool:
        """Whether every byte is still that of the original, gaps included."""
        return like.size == 0 or np.array_equal(_bytes(self.array), _bytes(like))


class Device(SimDevice):
    """A simulated GPU on which empty arrays have no address."""

    def pointer(self, array: Any) -> int:
        """Return the address of the first element."""
        return super().pointer(array) if array.size else 0


def _bytes(x: Array) -> Array:
    low, high = np.lib.array_utils.byte_bounds(x)
    return bytes_at(x, low, high - low)


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimDevice]:
    """Return what makes the GPU tests run on a simulated GPU of a name."""

    def use(name: str, **ways: Any) -> SimDevice:
        device = Device(gpu(name), **ways)
        monkeypatch.setattr(running, "mirror", lambda x: SimCopy(mirror(device, x)))
        # What the device allocates is full of NaN.
        monkeypatch.setattr(running, "poison", lambda *sizes: None)
        monkeypatch.setattr(running, "fetch", np.array)
        # What the GPU can't do is no reason to skip a test here.
        monkeypatch.setattr(running, "_REFUSALS", ())
        return device

    return use


Row = tuple[str, str, Callable[..., None], dict[str, Any]]


def rows(
    family: str, name: str, test: Callable[..., None], *each: Case, **more: Any
) -> Iterator[Row]:
    """Yield a test with each of the cases."""
    for case in each:
        yield family, name, test, {"case": case, **more}


def twice(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield each row a second time, which then runs in another way."""
    for row in rows:
        yield from (row, row)


def named(table: Iterable[Case], *names: str, dtype: str = "float32") -> list[Case]:
    """Return cases of a table, in the order of the names."""
    found = {case.name: case for case in table if case.dtype == dtype}
    return [found[name] for name in names]


# What a family multiplies fastest here.
_DTYPES = {"simt": "float32", "mma": "bfloat16"}


def causal(family: str) -> Iterator[Row]:
    """Whatever needs no other kernels than those of causal attention."""
    d24 = _D24 | {"dtype": _DTYPES[family], "causal": True}
    one = SINGLE | {"dtype": _DTYPES[family], "d": 8}
    for case in cases.LAYOUTS:
        # Each kind of memory with one layout.
        kinds = cases.MEMORY[::2] if case.layout == "bshd" else cases.MEMORY[1::2]
        if case.dtype == "float32" and case.memory in kinds:
            case = replace(case, **d24)
            yield from rows(family, "sm_90", grid.test_memory_of_inputs, case)
    for memory in ("stepped", "margin"):
        yield from rows(
            family, "sm_90", grid.test_memory_of_outputs,
            Case(memory, **d24, layout="bhsd"), memory=memory,
        )  # fmt: skip
    yield from rows(
        family, "sm_90", grid.test_groups_of_heads,
        *(replace(case, **d24 | {"hq": case.hq, "hkv": case.hkv, "batch": (1,)})
          for case in named(cases.GROUPS, "heads_6_3", "heads_8_1")),
    )  # fmt: skip
    yield from rows(
        family, "sm_90", grid.test_options,
        Case("lengths", **d24, q_lengths=(40, 0), k_lengths=(9, 70)),
        Case("top_left", **d24 | {"causal": "top_left"}, q_lengths=(25, 40), dlse=True),
        Case("dlse", **d24, dlse=True, scale=2.0),
    )  # fmt: skip
    yield from rows(
        family, "sm_90", test_cases.test_lengths_on_the_device_are_clamped,
        Case("clamped", **d24 | {"batch": (3,), "sq": 100, "sk": 130, "hq": 1},
             q_lengths=(100, 0, 100), k_lengths=(0, 130, 130)),
    )  # fmt: skip
    yield from rows(
        family, "sm_90", test_cases.test_causal_is_bottom_right,
        *(Case(f"{sq}x{sk}_{kind}", **one, sq=sq, sk=sk, causal=kind)
          for sq, sk, kind in ((2, 5, True), (5, 2, True), (5, 2, "top_left"))),
    )  # fmt: skip
    yield from rows(
        family, "sm_90", test_cases.test_empty_axes,
        *(Case(f"{batch}_{sq}_{sk}", **d24 | {"batch": batch, "sq": sq, "sk": sk})
          for batch, sq, sk in (((2,), 5, 0), ((2,), 0, 5), ((0,), 5, 5))),
    )  # fmt: skip
    yield from rows(
        family, "sm_90", test_cases.test_dout_transposed_or_expanded_from_a_scalar,
        Case("dout", **d24),
    )  # fmt: skip
    yield from rows(
        family, "sm_90", test_cases.test_what_nobody_sees_may_be_anything,
        Case("lengths", **d24 | {"sk": 200, "hq": 1}, k_lengths=(150, 3)),
        keys=np.arange(200) >= np.array([[150], [3]]), rows=None, value=np.nan,
    )  # fmt: skip
    yield from rows(
        family, "sm_90", test_cases.test_nan_around_the_arrays,
        Case("margin", **d24, memory="margin"),
    )  # fmt: skip


def bias(family: str) -> Iterator[Row]:
    """Which axes of the bias are broadcast, and what else its kernels can do."""
    d24 = _D24 | {"dtype": _DTYPES[family], "bias_dtype": "float32"}
    yield from rows(
        family, "sm_90", grid.test_bias_gradient,
        *(replace(case, **d24) for case in cases.BIAS
          if case.dtype == "float32" and "long" not in case.name),
    )  # fmt: skip
    yield from rows(
        family, "sm_90", test_cases.test_bias_that_hides_keys,
        Case("bias", **d24 | {"batch": (1,), "sq": 70}, bias="qk"), hidden=-np.inf,
    )  # fmt: skip
    yield from rows(
        family, "sm_90", test_arrays.test_results_of_the_forward_pass_in_other_layouts,
        Case("bias", **d24, bias="hqk", dlse=True),
    )  # fmt: skip


def other_options() -> Iterator[Row]:
    """Options side by side, on GPUs that have other instructions."""
    together = Case(
        "together", "float16", (2,), 40, 70, 4, 2, d=24, dv=20, window=(30, 5),
        softcap=2.0, alibi="batch", k_lengths=(70, 33), scale=0.5, dlse=True,
    )  # fmt: skip
    yield from twice(rows("mma", "sm_80", grid.test_options, together))
    yield from rows(
        "simt", "sm_90", grid.test_options,
        *(replace(together, name=f"scale_{scale}", dtype="float32", scale=scale)
          for scale in (0.0, -0.3)),
    )  # fmt: skip
    turing = Case(
        "turing", "float16", **_ONE_SEQUENCE, d=24, causal=True, bias="b1qk",
        mask="1hqk", bias_dtype="float32", bias_holes=True, q_lengths=(20,),
    )  # fmt: skip
    yield from twice(rows("mma", "sm_75", grid.test_options, turing))
    everything = replace(
        cases.TILES[1], dtype="float64", sq=40, sk=70, hq=1, hkv=1, d=24, dv=20,
        q_lengths=(40, 23), k_lengths=(61, 70),
    )  # fmt: skip
    yield from twice(rows("mma", "sm_80", grid.test_options, everything))
    yield from rows(
        "simt", "sm_70", grid.test_options,
        Case("causal", "float64", **_D24, causal=True, dlse=True),
    )  # fmt: skip


def masked() -> Iterator[Row]:
    """Rows and keys that a mask hides, and what NaN does there."""
    half = Case("half", "bfloat16", **_ONE_SEQUENCE, mask="11qk", layout="bhsd")
    small = Case("small", "float32", **_ONE_SEQUENCE, d=24, mask="11qk", layout="bhsd")
    for family, case in (("mma", half), ("simt", small)):
        yield from rows(
            family, "sm_90", test_cases.test_mask_that_leaves_rows_empty,
            replace(case, sk=40),
        )  # fmt: skip
        yield from rows(
            family, "sm_90", test_cases.test_transposed_views_and_a_mask_of_stride_0,
            replace(case, batch=(2,), sq=33, sk=33, hq=4),
        )  # fmt: skip
    yield from rows(
        "simt", "sm_90", test_cases.test_a_bad_key_reaches_only_rows_that_see_it,
        replace(small, sq=100, sk=100, layout="bshd"), value=np.nan,
    )  # fmt: skip


def halves() -> Iterator[Row]:
    """Tails of tiles, memory and extreme logits in 16 bits."""
    sizes = ((1, 1), (1, 65), (65, 129), (127, 1))
    for kind in (False, True):
        yield from rows(
            "mma", "sm_90", grid.test_ragged,
            *(Case(f"{sq}x{sk}_{kind}", "bfloat16", **SINGLE, sq=sq, sk=sk, causal=kind)
              for sq, sk in sizes),
        )  # fmt: skip
    yield from rows(
        "mma", "sm_90", grid.test_memory_of_inputs,
        *(replace(case, **_TINY) for case in
          named(cases.LAYOUTS, "packed_bhsd", "margin", dtype="bfloat16")),
    )  # fmt: skip
    yield from rows(
        "mma", "sm_90", test_cases.test_logits_of_1e5,
        Case("causal", "bfloat16", **SINGLE, sq=150, sk=150, causal=True),
    )  # fmt: skip
    yield from rows(
        "mma", "sm_90", test_cases.test_rows_whose_lse_is_far_below_zero,
        Case("no_mask", "bfloat16", **SINGLE, layout="bhsd", sq=64, sk=64),
    )  # fmt: skip
    yield from rows(
        "mma", "sm_90", test_cases.test_one_key_seen_by_the_last_row,
        Case("rows", "bfloat16", **SINGLE, sq=34, sk=1, causal=True),
    )  # fmt: skip


def shapes() -> Iterator[Row]:
    """Any number of batch axes, and heads of other sizes."""
    lengths, one_head, none = named(
        cases.BATCH, "two_axes_lengths", "one_head_lengths", "batch_none"
    )
    yield from rows("mma", "sm_90", grid.test_batch_axes, replace(lengths, hq=1, hkv=1))
    yield from rows("simt", "sm_90", grid.test_batch_axes, one_head, none)
    wide = Case("d192v128", "bfloat16", **_ONE_SEQUENCE, causal=True, d=192, dv=128)
    yield from twice(rows("mma", "sm_90", grid.test_head_dim_of_v, wide))
    wide = Case("d300v260", **_ONE_SEQUENCE, causal=True, d=300, dv=260)
    yield from rows("simt", "sm_90", grid.test_head_dim_of_v, wide)


ROWS = (
    *causal("simt"), *causal("mma"), *bias("simt"), *bias("mma"), *other_options(),
    *masked(), *halves(), *shapes(),
)  # fmt: skip
_ORDERS = ("ascending", "descending", "random")


def identify(row: Row) -> str:
    """Return the name of a row."""
    family, name, test, arguments = row
    what = arguments.get("case", arguments.get("name"))
    return f"{family}-{name}-{test.__name__.removeprefix('test_')}-{what}"


@pytest.mark.parametrize(
    ("index", "row"),
    list(enumerate(ROWS)),
    ids=map(identify, ROWS),
)
def test_as_on_the_gpu(
    index: int,
    row: Row,
    simulate: Callable[..., SimDevice],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In turn in each order of threads, with late copies and early ones."""
    family, name, test, arguments = row
    device = simulate(name, order=_ORDERS[index % 3], early=index % 2 == 1)
    if "config" not in arguments:
        arguments = arguments | {"family": family}
    if "monkeypatch" in test.__code__.co_varnames[: test.__code__.co_argcount]:
        arguments = arguments | {"monkeypatch": monkeypatch}
    test(**arguments)
    launched = {spec.family for spec in device.launched} - {"passes"}
    assert launched <= {family}


# --- What has no test of its own on the GPU -------------------------------------------


@pytest.mark.parametrize("early", [False, True])
def test_less_precise_products(early: bool, simulate: Callable[..., SimDevice]) -> None:
    """precision="tf32": products of factors of 11 bits."""
    device = simulate("sm_90", order="random", early=early)
    case = Case("tf32", **_D24, causal=True)
    results = running.run(make(case).with_options(precision="tf32"), "mma")
    assert any(spec.variant.tf32 for spec in device.launched)
    for name, truth in expect_case(case).items():
        error = np.linalg.norm(results[name] - truth.exact)
        assert 1e-5 < error / np.linalg.norm(truth.exact) < 1e-3, name


@pytest.mark.parametrize("family", _DTYPES)
def test_vjp(family: str, simulate: Callable[..., SimDevice]) -> None:
    simulate("sm_90")
    case = Case("vjp", _DTYPES[family], **_D24, bias="hqk", bias_dtype="float32")
    inputs = make(replace(case, dlse=True))
    wanted = running.check(inputs, family)
    q, k, v, dout, dlse, bias = map(running.to_gpu, inputs.arrays.values())
    options = {"bias": bias, "config": family, "deterministic": True}
    (out, lse), vjp = flash_attention_vjp(
        q, k, v, **options, bias_grad=True, return_lse=True
    )
    results = {"out": out, "lse": lse}
    results |= zip(("dq", "dk", "dv", "dbias"), vjp(dout, dlse), strict=True)
    assert_same(running.fetch_all(results), wanted)
    out, vjp = flash_attention_vjp(q, k, v, **options)
    np.testing.assert_array_equal(out, wanted["out"])
    assert len(vjp(dout)) == 3


@pytest.mark.parametrize("family", _DTYPES)
def test_without_lse(family: str, simulate: Callable[..., SimDevice]) -> None:
    simulate("sm_90")
    inputs = make(Case("causal", _DTYPES[family], **_D24, causal=True))
    q, k, v = (running.to_gpu(x) for x in (inputs.q, inputs.k, inputs.v))
    out = running.to_gpu(np.zeros_like(inputs.dout))
    options = {"causal": True, "config": family}
    assert flash_attention(q, k, v, **options, out=out) is out
    wanted = running.run(inputs, family, gradients=False)
    np.testing.assert_array_equal(out, wanted["out"])
