"""Arrays of other libraries, views, and what a call may and may not touch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_flash import (
    explain,
    flash_attention,
    flash_attention_backward,
    flash_attention_vjp,
)
from cupy_flash.device import CuPyDevice
from cupy_flash.params import POINTERS

from ..cases import (
    FAMILIES,
    Array,
    Case,
    Inputs,
    allocate,
    assert_same,
    compare,
    expect_case,
    lay_out,
    make,
    normal,
)
from ..reference import assert_close, error_terms
from .running import check, cp, fetch, fetch_all, run, run_backward, to_gpu

families = pytest.mark.parametrize("family", FAMILIES)
SMALL = {"d": 24, "dv": 20}


def over(*grid: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", grid, ids=str)


Addresses = dict[str, int]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Addresses]:
    """The addresses that each kernel gets which is launched from here on."""
    calls: list[Addresses] = []
    launch = CuPyDevice.launch

    def recording(
        self: CuPyDevice, kernel: Any, grid: int, block: int, shared: int, *given: Array
    ) -> None:
        pointers = np.frombuffer(given[0], np.uint64, len(POINTERS))
        calls.append(dict(zip(POINTERS, pointers.tolist(), strict=True)))
        launch(self, kernel, grid, block, shared, *given)

    monkeypatch.setattr(CuPyDevice, "launch", recording)
    return calls


def names(gradients: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("dq", "dk", "dv", "dbias"), gradients, strict=False))


# --- PyTorch --------------------------------------------------------------------------


def to_torch(torch: Any, x: Array) -> Any:
    """Copy to a tensor on the GPU; exact, since float32 holds every half number."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.astype(np.float32)).cuda().to(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(x)).cuda()


def from_torch(tensor: Any, dtype: np.dtype) -> Array:
    return tensor.detach().double().cpu().numpy().astype(dtype)


@families
@over(
    Case("mask", "bfloat16", mask="b11k"),
    Case("mask", "float32", **SMALL, mask="b11k"),
    Case("lengths", "float16", q_lengths=(100, 37), k_lengths=(64, 130)),
    Case("causal", "float64", **SMALL, causal=True),
    Case("bias", "bfloat16", bias="hqk"),
)
def test_torch_tensors(
    case: Case, family: str, torch: Any, launched: list[Addresses]
) -> None:
    """Taken where they lie, also if they require a gradient; CuPy arrays come back."""
    inputs = make(case)
    wanted = check(inputs, family)
    launched.clear()
    tensors = {name: to_torch(torch, x) for name, x in inputs.arrays.items()}
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.requires_grad_()
    before = {name: x.detach().clone() for name, x in tensors.items()}
    arguments = dict(tensors)
    q, k, v, dout = (arguments.pop(name) for name in ("q", "k", "v", "dout"))
    options = inputs.scalars | arguments | {"config": family}
    out, lse = flash_attention(q, k, v, **options, return_lse=True)
    gradients = run_backward(
        dout, q, k, v, out, lse, **options, bias_grad=case.bias is not None,
        deterministic=True,
    )  # fmt: skip
    results = {"out": out, "lse": lse, **names(gradients)}
    assert all(isinstance(x, cp.ndarray) for x in results.values())
    assert_same(fetch_all(results), wanted)
    for name, tensor in tensors.items():
        calls = launched if name != "dout" else launched[1:]
        assert all(call[name] == tensor.data_ptr() for call in calls), name
        assert torch.equal(tensor.detach(), before[name]), f"{name} was written"


@families
@over(Case("causal", "bfloat16", causal=True), Case("causal", **SMALL, causal=True))
def test_torch_outputs_and_views(case: Case, family: str, torch: Any) -> None:
    """Results are written into the tensors that are given, strides and all."""
    inputs = make(case)
    wanted = check(inputs, family)
    q, k, v, dout = (
        to_torch(torch, x).transpose(1, 2)
        for x in (inputs.q, inputs.k, inputs.v, inputs.dout)
    )
    options = {**inputs.scalars, "layout": "bhsd", "config": family}
    given = {n: torch.full_like(x, torch.nan)
             for n, x in (("out", dout), ("dq", q), ("dk", k), ("dv", v))}  # fmt: skip
    out, lse = flash_attention(q, k, v, **options, return_lse=True, out=given["out"])
    rest = {name: given[name] for name in ("dq", "dk", "dv")}
    rest |= {"deterministic": True}
    gradients = run_backward(dout, q, k, v, out, lse, **options, **rest)
    for name, x in {"out": out, **names(gradients)}.items():
        assert isinstance(x, cp.ndarray)
        assert x.data.ptr == given[name].data_ptr()
        np.testing.assert_array_equal(
            from_torch(given[name].transpose(1, 2), wanted[name].dtype), wanted[name]
        )


def test_results_go_back_to_torch_without_a_copy(torch: Any) -> None:
    q = torch.randn(2, 30, 4, 24, device="cuda", dtype=torch.float32)
    out = flash_attention(q, q, q, causal=True)
    tensor = torch.from_dlpack(out)
    assert tensor.data_ptr() == out.data.ptr
    assert tensor.shape == q.shape


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "bias", "mask", "k_lengths"])
@pytest.mark.parametrize("host", ["torch", "numpy"])
def test_one_array_on_the_host(name: str, host: str, torch: Any) -> None:
    arrays = {n: torch.zeros(2, 5, 2, 8, device="cuda") for n in ("q", "k", "v", "out")}
    arrays["bias"] = torch.zeros(5, 5, device="cuda")
    arrays["mask"] = torch.ones(5, 5, device="cuda", dtype=torch.bool)
    arrays["k_lengths"] = torch.full((2,), 5, device="cuda")
    flash_attention(**arrays)
    arrays[name] = arrays[name].cpu() if host == "torch" else arrays[name].cpu().numpy()
    with pytest.raises(TypeError, match=rf"\b{name} is a"):
        flash_attention(**arrays)


def test_only_host_tensors(torch: Any) -> None:
    x = torch.zeros(2, 5, 2, 8)
    with pytest.raises(TypeError, match="CUDA device"):
        flash_attention(x, x, x)


# --- Agreement with PyTorch -----------------------------------------------------------


def sdpa(torch: Any, inputs: Inputs, dtype: Any, *, causal: bool) -> dict[str, Array]:
    """What PyTorch computes in a dtype, with its gradients, in float64 arrays."""
    q, k, v, dout = (
        to_torch(torch, x).to(dtype)
        for x in (inputs.q, inputs.k, inputs.v, inputs.dout)
    )
    mask = inputs.options.get("mask", inputs.options.get("bias"))
    if mask is not None:
        mask = to_torch(torch, mask)
        mask = mask if mask.dtype == torch.bool else mask.to(dtype).requires_grad_()
    for x in (q, k, v):
        x.requires_grad_()
    group = q.shape[2] // k.shape[2]
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.repeat_interleave(group, 2).transpose(1, 2),
        v.repeat_interleave(group, 2).transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
    ).transpose(1, 2)
    sources = [q, k, v]
    if mask is not None and mask.requires_grad:
        sources.append(mask)
    gradients = torch.autograd.grad(out, sources, dout)
    results = {"out": out, **names(gradients)}
    return {name: from_torch(x, np.dtype(np.float64)) for name, x in results.items()}


_SQUARE = {"sq": 256, "sk": 256}


@families
@over(
    *(
        Case(name, dtype, **_SQUARE, causal=causal)
        for dtype in ("float16", "bfloat16", "float32", "float64")
        for name, causal in (("plain", False), ("causal", True))
    ),
    Case("cross", "float32", sq=77, sk=300),
    Case("bias", "bfloat16", **_SQUARE, bias="hqk"),
    Case("bias", "float32", **_SQUARE, d=24, bias="1hqk"),
    Case("mask", "bfloat16", **_SQUARE, mask="b1qk"),
)
def test_agreement_with_torch(case: Case, family: str, torch: Any) -> None:
    """In error against PyTorch's float64 at most twice PyTorch's own in that dtype."""
    inputs = make(case)
    if case.mask is not None:
        # A row that sees nothing is NaN there.
        mask = inputs.options["mask"] | np.eye(256, dtype=bool)
        inputs = inputs.with_options(mask=mask)
    if case.bias is not None:
        bias = inputs.options["bias"].reshape(1, *inputs.options["bias"].shape[-3:])
        inputs = inputs.with_options(bias=bias)
    results = run(inputs, family)
    causal = bool(case.causal)
    exact = sdpa(torch, inputs, torch.float64, causal=causal)
    plain = sdpa(torch, inputs, getattr(torch, case.dtype), causal=causal)
    terms = error_terms(inputs.dout, inputs.q, inputs.k, inputs.v, **inputs.options)
    assert set(exact) == set(results) - {"lse"}
    for name, wanted in exact.items():
        assert_close(
            results[name], wanted, plain[name], inputs.q.dtype,
            terms=getattr(terms, name), name=name,
        )  # fmt: skip


# --- JAX ------------------------------------------------------------------------------


@families
@over(
    Case("causal", "bfloat16", causal=True),
    Case("causal", "float16", causal=True),
    Case("mask", "float32", **SMALL, mask="b11k"),
)
def test_jax_arrays(
    case: Case, family: str, jax: Any, launched: list[Addresses]
) -> None:
    inputs = make(case)
    wanted = check(inputs, family)
    launched.clear()
    gpu = jax.devices("gpu")[0]
    arrays = {name: jax.device_put(x, gpu) for name, x in inputs.arrays.items()}
    arguments = dict(arrays)
    q, k, v, dout = (arguments.pop(name) for name in ("q", "k", "v", "dout"))
    options = inputs.scalars | arguments | {"config": family}
    out, lse = flash_attention(q, k, v, **options, return_lse=True)
    gradients = run_backward(dout, q, k, v, out, lse, **options, deterministic=True)
    results = {"out": out, "lse": lse, **names(gradients)}
    assert all(isinstance(x, cp.ndarray) for x in results.values())
    assert_same(fetch_all(results), wanted)
    for name in ("q", "k", "v"):
        address = arrays[name].unsafe_buffer_pointer()
        assert all(call[name] == address for call in launched), name
    back = jax.numpy.from_dlpack(out)
    assert back.unsafe_buffer_pointer() == out.data.ptr


def test_jax_array_on_the_host(jax: Any) -> None:
    x = cp.zeros((5, 2, 8), np.float32)
    other = jax.device_put(np.zeros((5, 2, 8), np.float32), jax.devices("cpu")[0])
    with pytest.raises(TypeError, match="k is a"):
        flash_attention(x, other, x)


# --- Other kinds of arguments ---------------------------------------------------------


@pytest.mark.parametrize(
    "other", [[[1.0]], 1.0, "q", object()], ids=["list", "float", "str", "object"]
)
def test_no_array_at_all(other: object) -> None:
    x = cp.zeros((5, 2, 8), np.float32)
    with pytest.raises(TypeError, match="k is a"):
        flash_attention(x, other, x)


def test_numpy_beside_cupy_in_backward() -> None:
    x = cp.zeros((5, 2, 8), np.float32)
    lse = cp.zeros((2, 5), np.float32)
    arguments = [x, x, x, x, x, lse]
    for i, name in enumerate(("dout", "q", "k", "v", "out", "lse")):
        mixed = [a.get() if i == j else a for j, a in enumerate(arguments)]
        with pytest.raises(TypeError, match=rf"\b{name} is a NumPy array"):
            flash_attention_backward(*mixed)


# --- Views ----------------------------------------------------------------------------


@families
@over(
    Case("packed", "bfloat16", hkv=4, sq=130, causal=True),
    Case("packed", "float32", d=24, hkv=4, sq=130, causal=True),
)
def test_packed_qkv(case: Case, family: str, launched: list[Addresses]) -> None:
    """Slices of one array are read where they lie, in either layout."""
    inputs = make(case)
    wanted = check(inputs, family)
    shape = (2, 130, 5, 4, case.d)
    host = np.zeros(shape, inputs.q.dtype)
    for i, x in enumerate((inputs.q, inputs.k, inputs.v, inputs.dout)):
        host[:, :, i] = x
    packed = cp.asarray(host)
    for layout in ("bshd", "bhsd"):
        launched.clear()
        views = [packed[:, :, i] for i in range(5)]
        if layout == "bhsd":
            views = [x.swapaxes(1, 2) for x in views]
        q, k, v, dout, out = views
        options = {"causal": True, "layout": layout, "config": family}
        assert explain(q, k, v, **options).copies == ()
        # The result goes into the same array, between its inputs' elements.
        out, lse = flash_attention(q, k, v, **options, return_lse=True, out=out)
        gradients = run_backward(dout, q, k, v, out, lse, **options, deterministic=True)
        results = {"out": out, **names(gradients)}
        if layout == "bhsd":
            results = {name: x.swapaxes(1, 2) for name, x in results.items()}
        results["lse"] = lse
        assert_same(fetch_all(results), wanted)
        for call in launched:
            for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
                assert call[name] == x.data.ptr


@families
@over(
    Case("causal", "float16", causal=True),
    Case("causal", "float32", **SMALL, causal=True),
    Case("causal", "float64", **SMALL, causal=True),
)
def test_misaligned_arrays_are_copied(
    case: Case, family: str, launched: list[Addresses]
) -> None:
    """A byte past an element's boundary, through a view of bytes."""
    inputs = make(case)
    dense = {name: to_gpu(x) for name, x in inputs.arrays.items()}
    off = {name: to_gpu(lay_out(x, "misaligned")) for name, x in inputs.arrays.items()}
    for x in off.values():
        assert x.data.ptr % x.itemsize == 1

    options = {"causal": True, "config": family}

    def both(arrays: dict[str, Any]) -> dict[str, Array]:
        q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
        out, lse = flash_attention(q, k, v, **options, return_lse=True)
        gradients = run_backward(dout, q, k, v, out, lse, **options, deterministic=True)
        results = {"out": out, "lse": lse, **names(gradients)}
        return fetch_all(results)

    wanted = both(dense)
    assert launched[0]["q"] == dense["q"].data.ptr
    launched.clear()
    assert_same(both(off), wanted)
    for name in ("q", "k", "v"):
        assert launched[0][name] != off[name].data.ptr
        assert launched[0][name] % inputs.q.itemsize == 0
    plan = explain(off["q"], off["k"], dense["v"], causal=True)
    assert set(plan.copies) == {"q", "k"}
    assert "q is copied" in str(plan)
    # One element past an aligned address is too little for loads of 16 bytes.
    offset = to_gpu(lay_out(inputs.q, "offset"))
    copies = explain(offset, dense["k"], dense["v"], **options).copies
    assert copies == (() if family == "simt" else ("q",))
    # Lengths that lie across their elements, too.
    lengths = {"k_lengths": np.array([64, 130], np.int64)}
    bad = {"k_lengths": to_gpu(lay_out(lengths["k_lengths"], "misaligned"))}
    q, k, v = (dense[name] for name in "qkv")
    got = flash_attention(q, k, v, **bad, config=family)
    good = flash_attention(q, k, v, k_lengths=cp.array([64, 130]), config=family)
    np.testing.assert_array_equal(fetch(got), fetch(good))


def test_misaligned_output() -> None:
    x = cp.zeros((5, 2, 8), np.float32)
    out = to_gpu(allocate((5, 2, 8), np.float32, "misaligned"))
    with pytest.raises(ValueError, match="out"):
        flash_attention(x, x, x, out=out)
    lse = cp.zeros((2, 5), np.float32)
    with pytest.raises(ValueError, match="dk"):
        flash_attention_backward(x, x, x, x, x, lse, dk=out)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_output_that_is_an_input(name: str) -> None:
    arrays = {n: cp.full((2, 20, 2, 8), 1.0, np.float32) for n in "qkv"}
    with pytest.raises(ValueError, match="overlap"):
        flash_attention(**arrays, out=arrays[name])
    out, lse = flash_attention(**arrays, return_lse=True)
    q, k, v = (arrays[n] for n in "qkv")
    with pytest.raises(ValueError, match="overlap"):
        flash_attention_backward(out, q, k, v, out, lse, **{f"d{name}": arrays[name]})
    for x in arrays.values():
        assert bool((x == 1.0).all()), "an input was written"


@pytest.mark.parametrize("shift", [1, -1])
def test_output_that_overlaps_an_input_in_part(shift: int) -> None:
    buffer = cp.zeros((22, 2, 8), np.float32)
    q = buffer[1:21]
    other = cp.zeros((20, 2, 8), np.float32)
    with pytest.raises(ValueError, match="overlap"):
        flash_attention(q, other, other, out=buffer[1 + shift : 21 + shift])


def test_outputs_beside_inputs_in_one_buffer() -> None:
    """Next to each other isn't overlapping."""
    buffer = cp.asarray(normal(1, 60, 2, 24))
    q, k, out = buffer[:20], buffer[20:40], buffer[40:]
    wanted = flash_attention(q, k, k, causal=True)
    flash_attention(q, k, k, causal=True, out=out)
    np.testing.assert_array_equal(buffer[40:].get(), wanted.get())


def test_output_that_is_broadcast() -> None:
    x = cp.zeros((5, 2, 8), np.float32)
    out = cp.broadcast_to(cp.zeros((1, 2, 8), np.float32), (5, 2, 8))
    with pytest.raises(ValueError, match="out"):
        flash_attention(x, x, x, out=out)


@families
@over(Case("dlse", **SMALL, dlse=True), Case("bias", **SMALL, bias="hqk", dlse=True))
def test_results_of_the_forward_pass_in_other_layouts(case: Case, family: str) -> None:
    """out, lse and dlse are read by their strides in the backward pass."""
    inputs = make(case)
    wanted = check(inputs, family)
    arrays = {name: to_gpu(x) for name, x in inputs.arrays.items() if name != "dlse"}
    q, k, v, dout = (arrays.pop(name) for name in ("q", "k", "v", "dout"))
    options = arrays | {"config": family, "bias_grad": case.bias is not None}
    options |= {"deterministic": True}
    for memory in ("fortran", "reversed", "stepped", "misaligned"):
        out, lse, dlse = (
            to_gpu(lay_out(x, memory))
            for x in (wanted["out"], wanted["lse"], inputs.dlse)
        )
        gradients = run_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
        got = fetch_all(names(gradients))
        assert_same(got, {name: wanted[name] for name in got})


@families
@over(Case("everything", **SMALL, bias="hqk", mask="bhqk", alibi="batch"))
@pytest.mark.parametrize("memory", ["fortran", "reversed", "stepped", "misaligned"])
def test_memory_of_options(case: Case, memory: str, family: str) -> None:
    """Bias, mask, slopes and lengths are read by their strides."""
    case = replace(case, q_lengths=(100, 37), k_lengths=(64, 130))
    inputs = make(case)
    laid = {
        name: lay_out(x, memory) if isinstance(x, np.ndarray) else x
        for name, x in inputs.options.items()
    }
    results = run(replace(inputs, options=laid), family)
    wanted = run(inputs, family)
    assert_same(results, wanted)
    compare(wanted, expect_case(case))


# --- The functional form --------------------------------------------------------------


@families
@over(Case("bias", **SMALL, bias="hqk", dlse=True))
def test_vjp(case: Case, family: str) -> None:
    inputs = make(case)
    wanted = check(inputs, family)
    q, k, v, dout, dlse, bias = (to_gpu(x) for x in inputs.arrays.values())
    (out, lse), vjp = flash_attention_vjp(
        q, k, v, bias=bias, bias_grad=True, return_lse=True, config=family,
        deterministic=True,
    )  # fmt: skip
    for _ in range(2):  # it can be called again
        results = {"out": out, "lse": lse, **names(vjp(dout, dlse))}
        assert_same(fetch_all(results), wanted)
    out, vjp = flash_attention_vjp(q, k, v, bias=bias, config=family)
    np.testing.assert_array_equal(out.get(), wanted["out"])
    assert len(vjp(dout)) == 3
