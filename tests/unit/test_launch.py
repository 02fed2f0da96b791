"""The public functions on device arrays: what is launched, on what, how often.

A `RecordingDevice` stands for the GPU. It computes nothing, so the tests look at what
the kernels are given: every address and stride, the grids and the workspace.
"""

from __future__ import annotations

import gc
import itertools
import math
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cupy_flash import (
    explain,
    flash_attention,
    flash_attention_backward,
    flash_attention_vjp,
    launch,
    settings,
)
from cupy_flash.configs import SimtTile
from cupy_flash.params import POINTERS

from ..sim import tensor_map
from .recording import GPUS, DeviceArray, Launch, RecordingDevice

DTYPES = {
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))

SEQUENCES = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
LOGITS = ("bias", "mask", "dbias")
WIDE = ("q", "k", "v", "dout")
WORKSPACE = ("delta", "dbias_partial", "dq_sums", "row_terms", "claims")
# The arrays of the tensor maps, in their order.
FORWARD_MAPS = ("q", "k", "v", "out")
BACKWARD_MAPS = ("q", "k", "v", "dout", "dk", "dv")
# What is filled with zeros before the kernels; those of `wgmma` do it themselves.
CLEARED = {"simt": (), "mma": ("dq_sums",), "wgmma": ()}
families = pytest.mark.parametrize("family", GPUS)


@pytest.fixture(params=GPUS)
def device(request: pytest.FixtureRequest) -> RecordingDevice:
    """A device of each kernel family."""
    return RecordingDevice(GPUS[request.param])


def family_of(device: RecordingDevice) -> str:
    (family,) = (name for name, gpu in GPUS.items() if device.info == gpu)
    return family


@pytest.fixture(autouse=True)
def not_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment says."""
    monkeypatch.setattr(settings, "debug", False)


@pytest.fixture(autouse=True)
def forget_prepared_calls() -> Iterator[None]:
    """Prepared calls keep their devices alive."""
    yield
    launch._prepare.cache_clear()


@dataclass
class Example:
    """A call's arrays, as NumPy has them, and its other options."""

    arrays: dict[str, np.ndarray]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> str:
        return self.options.get("layout", "bshd")


def lse_dtype(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def example(
    *,
    batch: tuple[int, ...] = (2,),
    sq: int = 5,
    sk: int = 7,
    hq: int = 4,
    hkv: int = 2,
    d: int = 8,
    dv: int = 16,
    dtype: np.dtype = DTYPES["fp32"],
    layout: str = "bshd",
    **options: Any,
) -> Example:
    def shape(tokens: int, heads: int, size: int) -> tuple[int, ...]:
        axes = (tokens, heads) if layout == "bshd" else (heads, tokens)
        return (*batch, *axes, size)

    arrays = {
        "q": np.zeros(shape(sq, hq, d), dtype),
        "k": np.zeros(shape(sk, hkv, d), dtype),
        "v": np.zeros(shape(sk, hkv, dv), dtype),
    }
    return Example(arrays, options | {"layout": layout})


# --- What the kernels are given -------------------------------------------------------


def canonical(name: str, array: np.ndarray, like: Example) -> np.ndarray:
    """View an array in the kernels' order of axes, batch axes first."""
    q, k = like.arrays["q"], like.arrays["k"]
    swapped = like.layout == "bhsd"
    if name in SEQUENCES:
        if array.ndim == 2:
            return array[:, None]
        return array.swapaxes(-2, -3) if swapped else array
    if name in ("lse", "dlse"):
        return array[None] if q.ndim == 2 else array
    *batch, sq, heads, _ = canonical("q", q, like).shape
    if name == "alibi_slopes":
        return np.broadcast_to(array, (*batch, heads))
    if name in LOGITS:
        sk = canonical("k", k, like).shape[-3]
        return np.broadcast_to(array, (*batch, heads, sq, sk))
    return array


def element_addresses(array: np.ndarray) -> np.ndarray:
    """Return where each element of an array lies."""
    addresses = np.full(array.shape, array.__array_interface__["data"][0], np.int64)
    for axis, (size, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
        steps = np.arange(size) * stride
        addresses += steps.reshape(-1, *(1,) * (array.ndim - axis - 1))
    return addresses


def has_wide_rows(array: np.ndarray) -> bool:
    """Tell whether rows can be loaded 16 bytes at a time, which `mma` asks for."""
    address = array.__array_interface__["data"][0]
    steps = [s for n, s in zip(array.shape, array.strides, strict=True) if n > 1]
    if array.shape[-1] > 1 and steps.pop() != array.itemsize:
        return False
    return not any(step % 16 for step in (address, *steps))


def can_be_mapped(array: np.ndarray) -> bool:
    """Tell whether a tensor map describes an array in the kernels' order of axes."""
    *steps, sequence, heads, _ = zip(array.shape, array.strides, strict=True)
    taken = [s for n, s in (*steps, sequence, heads) if n > 1]
    repeats = sequence[0] > 1 and sequence[1] == 0
    return has_wide_rows(array) and min(taken, default=0) >= 0 and not repeats


def padded_copy(array: np.ndarray) -> np.ndarray:
    """Return an array that lies as a copy does whose rows are padded to 16 bytes."""
    rows, channels, size = array.shape[:-1], array.shape[-1], array.itemsize
    padded = -(-channels * size // 16) * 16 // size
    return np.empty((*rows, padded), array.dtype)[..., :channels]


def check_launch(
    found: Launch, arrays: dict[str, np.ndarray], like: Example, family: str = "simt"
) -> None:
    """Each element of each array is found where it lies; what is absent is null.

    In place of what a family of tensor cores can't load there is a copy.
    """
    fields = found.fields
    maps = read_maps(found, BACKWARD_MAPS if "dq" in arrays else FORWARD_MAPS)
    copies = found.spec.family == "wgmma" and found.spec.kernel != "backward_terms"
    assert bool(maps) == copies
    batch = canonical("q", like.arrays["q"], like).shape[:-3]
    sequences = int(np.prod(batch, dtype=np.int64))
    for name, array in arrays.items():
        moved = 0
        view = canonical(name, array, like)
        loadable = {"simt": lambda x: True, "mma": has_wide_rows}
        if name in WIDE and not loadable.get(family, can_be_mapped)(view):
            array = padded_copy(array)
            moved = int(fields[name]) - array.__array_interface__["data"][0]
            assert int(fields[name]) in found.live, name
            view = canonical(name, array, like)
        own = view.shape[len(batch) :]
        np.testing.assert_array_equal(
            found.addresses(name, own, array.itemsize),
            element_addresses(view).reshape(sequences, *own) + moved,
            err_msg=name,
        )
        if name in maps:
            check_map(maps[name], view, moved)
    for name in set(POINTERS) - set(arrays) - set(WORKSPACE):
        assert fields[name] == 0, f"{name} isn't null"
    for name in WORKSPACE:
        assert fields[name] == 0 or int(fields[name]) in found.live, name
    for name in CLEARED[family]:
        assert fields[name] == 0 or int(fields[name]) in found.cleared, name
    q = canonical("q", like.arrays["q"], like)
    k = canonical("k", like.arrays["k"], like)
    v = canonical("v", like.arrays["v"], like)
    assert fields["batch_shape"].prod() == sequences
    sizes = {
        "seqlen_q": q.shape[-3], "seqlen_k": k.shape[-3], "heads_q": q.shape[-2],
        "heads_kv": k.shape[-2], "head_dim": q.shape[-1], "head_dim_v": v.shape[-1],
    }  # fmt: skip
    assert {name: fields[name] for name in sizes} == sizes
    for name in ("q_lengths", "k_lengths"):
        size = arrays[name].itemsize if name in arrays else 0
        assert fields[f"{name}_bytes"] == size


def read_maps(found: Launch, names: Sequence[str]) -> dict[str, tensor_map.Map]:
    """Return the tensor maps that a kernel is given, by their names."""
    maps = [tensor_map.decode(found.maps[at:]) for at, _ in tensor_map.find(found.maps)]
    return dict(zip(names, maps, strict=bool(maps)))


def check_map(found: tensor_map.Map, view: np.ndarray, moved: int) -> None:
    """A copy's coordinates lead to each element of an array, and to no other."""
    repeats = [s == 0 and n > 1 for n, s in zip(view.shape, view.strides, strict=True)]
    once = view[tuple([slice(0, 1) if r else slice(None) for r in repeats])]
    *batch, sequence, heads, channels = once.shape
    # Channels, sequence, heads, and batch axes from the last to the first.
    wanted = element_addresses(once).T.swapaxes(1, 2) + moved
    assert found.shape[:3] == (channels, sequence, heads)
    assert math.prod(found.shape[3:]) == math.prod(batch)
    addresses = np.full(found.shape, found.pointer, np.int64)
    for axis, stride in enumerate((view.itemsize, *found.strides)):
        steps = np.arange(found.shape[axis]) * stride
        addresses += steps.reshape(-1, *(1,) * (len(found.shape) - axis - 1))
    np.testing.assert_array_equal(
        addresses.reshape(channels, sequence, heads, -1, order="F"),
        wanted.reshape(channels, sequence, heads, -1, order="F"),
    )


def names(launches: Sequence[Launch]) -> list[str]:
    return [found.spec.kernel for found in launches]


def at_once(threads: int, work: Callable[[], object]) -> None:
    """Do the same in several threads, which begin together."""
    barrier = threading.Barrier(threads)
    failures: list[BaseException] = []

    def begin() -> None:
        try:
            barrier.wait(10)
            work()
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=begin) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not failures


def on(device: RecordingDevice, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: device.array(array) for name, array in arrays.items()}


def output_shape(like: Example) -> tuple[int, ...]:
    return (*like.arrays["q"].shape[:-1], like.arrays["v"].shape[-1])


def lse_shape(like: Example) -> tuple[int, ...]:
    q = like.arrays["q"]
    if q.ndim == 2:
        return q.shape[:1]
    heads, tokens = (-2, -3) if like.layout == "bshd" else (-3, -2)
    return (*q.shape[:-3], q.shape[heads], q.shape[tokens])


def check_forward(
    device: RecordingDevice,
    like: Example,
    out: np.ndarray | None = None,
    return_lse: bool = True,
) -> dict[str, Any]:
    """Run and check a forward call; return all its arrays."""
    arrays = on(device, like.arrays)
    device.launches.clear()
    given = {} if out is None else {"out": out}
    results = flash_attention(**arrays, **given, **like.options, return_lse=return_lse)
    if return_lse:
        arrays["out"], arrays["lse"] = results
        assert arrays["lse"].shape == lse_shape(like)
        assert arrays["lse"].dtype == lse_dtype(like.arrays["q"].dtype)
        assert arrays["lse"].flags.c_contiguous
    else:
        arrays["out"] = results
    assert arrays["out"].shape == output_shape(like)
    assert arrays["out"].dtype == like.arrays["q"].dtype
    if out is None:
        assert arrays["out"].flags.c_contiguous
    else:
        assert arrays["out"] is out
    assert names(device.launches) == ["forward"]
    (found,) = device.launches
    check_launch(found, arrays, like, found.spec.family)
    return arrays


def check_backward(
    device: RecordingDevice,
    like: Example,
    given: dict[str, np.ndarray] | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """Run and check a backward call; return all its arrays."""
    dtype = like.arrays["q"].dtype
    arrays = on(device, like.arrays)
    for name in ("out", "dout"):
        arrays[name] = device.array(np.zeros(output_shape(like), dtype))
    arrays["lse"] = device.array(np.zeros(lse_shape(like), lse_dtype(dtype)))
    arrays |= on(device, {n: x for n, x in extra.items() if hasattr(x, "shape")})
    options = {n: x for n, x in extra.items() if not hasattr(x, "shape")}
    device.launches.clear()
    results = flash_attention_backward(
        **arrays, **(given or {}), **options, **like.options
    )
    expected = ["dq", "dk", "dv"]
    family = device.launches[1].spec.family
    kernels = ["delta", "backward_dq", "backward_dkdv"]
    if family == "mma" and not extra.get("deterministic"):
        kernels = ["delta", "backward", "convert_dq"]
    if family == "wgmma":
        large = max(like.arrays[name].shape[-1] for name in ("q", "v")) > 128
        made_by = "backward_by_role" if large else "backward"
        kernels = ["backward_terms", made_by, "convert_dq"]
    if extra.get("bias_grad"):
        expected.append("dbias")
        kernels.append("backward_dbias")
        if device.launches[-1].spec.kernel == "reduce_dbias":
            kernels.append("reduce_dbias")
    assert names(device.launches) == kernels
    for name, result in zip(expected, results, strict=True):
        of = like.arrays["bias" if name == "dbias" else name[1:]]
        assert (result.shape, result.dtype) == (of.shape, of.dtype), name
        if name in (given or {}):
            assert result is given[name]
        else:
            assert result.flags.c_contiguous
        arrays[name] = result
    for found in device.launches:
        check_launch(found, arrays, like, family)
        made = kernels[1] in ("backward", "backward_by_role")
        assert (found.fields["dq_sums"] != 0) == made
        assert (found.fields["row_terms"] != 0) == (family == "wgmma")
        q = canonical("q", like.arrays["q"], like)
        assert (16 * found.fields["dq_row_tiles"] >= q.shape[-3]) == made
    return arrays


# --- Shapes, layouts, strides ---------------------------------------------------------


@dtypes
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("batch", [(), (3,), (1, 1), (2, 3), (2, 1, 3)])
def test_shapes(
    device: RecordingDevice, batch: tuple[int, ...], layout: str, dtype: np.dtype
) -> None:
    like = example(batch=batch, layout=layout, dtype=dtype)
    check_forward(device, like)
    check_forward(device, like, return_lse=False)
    check_backward(device, like)
    check_backward(device, like, deterministic=True)


@dtypes
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(("d", "dv"), [(8, 5), (3, 16), (17, 1)])
def test_rows_that_tensor_cores_can_not_load(
    device: RecordingDevice, d: int, dv: int, layout: str, dtype: np.dtype
) -> None:
    """They are copied into padded rows, each array once and no more."""
    like = example(batch=(2, 3), d=d, dv=dv, layout=layout, dtype=dtype)
    made = check_forward(device, like)
    wrong = [like.arrays[name].shape for name in "qkv"]
    wrong = [x for x in wrong if x[-1] * dtype.itemsize % 16]
    assert wrong
    if family_of(device) == "simt":
        wrong = []
    assert device.copied == wrong
    assert made["out"].flags.c_contiguous
    device.copied.clear()
    check_backward(device, like)
    dout = made["out"].shape
    wrong += [dout] if wrong and dv * dtype.itemsize % 16 else []
    assert sorted(device.copied) == sorted(wrong)


@families
def test_a_second_call_with_copies_prepares_nothing(
    family: str, counts: Counter[str]
) -> None:
    device = RecordingDevice(GPUS[family])
    for _ in range(2):
        check_forward(device, example(dv=6))
        planned = counts["make_plan"]
        assert planned == (1 if family == "simt" else 2)
    assert len(device.copied) == (0 if family == "simt" else 2)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_one_head_of_two_axes(device: RecordingDevice, layout: str) -> None:
    arrays = {"q": np.zeros((5, 8)), "k": np.zeros((7, 8)), "v": np.zeros((7, 6))}
    like = Example(arrays, {"layout": layout})
    made = check_forward(device, like)
    assert made["lse"].shape == (5,)
    check_backward(device, like, dlse=np.zeros(5))


@pytest.mark.parametrize(("hq", "hkv"), [(1, 1), (6, 1), (6, 2), (6, 6)])
def test_grouped_heads(device: RecordingDevice, hq: int, hkv: int) -> None:
    like = example(hq=hq, hkv=hkv)
    check_forward(device, like)
    check_backward(device, like)


def test_views_of_one_packed_array(device: RecordingDevice) -> None:
    packed = np.zeros((2, 5, 3, 4, 8), np.float32)
    q, k, v = (packed[:, :, n] for n in range(3))
    like = Example({"q": q, "k": k, "v": v})
    check_forward(device, like)
    gradient = np.zeros_like(packed)
    given = {
        name: device.array(gradient[:, :, n]) for n, name in enumerate(("dq", "dk"))
    }
    check_backward(device, like, given)
    assert not device.copied


def test_a_cache_that_all_sequences_share(device: RecordingDevice) -> None:
    like = example(batch=(3,))
    for name in ("k", "v"):
        like.arrays[name] = np.broadcast_to(
            like.arrays[name][:1], like.arrays[name].shape
        )
    check_forward(device, like)
    check_backward(device, like)
    assert not device.copied


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Draw an array with any order of axes, gaps, reversed and broadcast axes."""
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.integers(1, 3)) for _ in shape]
    kinds = [draw(st.sampled_from(["", "", "", "back", "one"])) for _ in shape]
    base = np.zeros(
        [1 if kinds[a] == "one" else shape[a] * gaps[a] for a in order], dtype
    )
    array = base.transpose(np.argsort(order))
    for axis, (gap, kind) in enumerate(zip(gaps, kinds, strict=True)):
        step = -gap if kind == "back" else gap
        cut = [slice(None)] * len(shape)
        cut[axis] = slice(None, None, 1 if kind == "one" else step)
        array = array[tuple(cut)]
    return np.broadcast_to(array, shape)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    hkv = draw(st.integers(1, 3))
    like = example(
        batch=batch, layout=draw(st.sampled_from(["bshd", "bhsd"])), dtype=dtype,
        hkv=hkv, hq=hkv * draw(st.integers(1, 2)), sq=draw(st.integers(1, 6)),
    )  # fmt: skip
    for name, array in like.arrays.items():
        like.arrays[name] = draw(views(array.shape, dtype))
    *_, sq, heads, _ = canonical("q", like.arrays["q"], like).shape
    logits = (*batch, heads, sq, 7)
    for name, kind in (
        ("bias", st.sampled_from(list(DTYPES.values()))),
        ("mask", None),
    ):
        if draw(st.booleans()):
            shape = tuple(draw(st.sampled_from([1, size])) for size in logits)
            shape = shape[draw(st.integers(0, len(shape))) :]
            made = np.dtype(bool) if kind is None else draw(kind)
            like.arrays[name] = draw(views(shape, made))
    if draw(st.booleans()):
        shape = (*(batch if draw(st.booleans()) else ()), heads)
        like.arrays["alibi_slopes"] = draw(views(shape, np.dtype(np.float32)))
    for name in ("q_lengths", "k_lengths"):
        if draw(st.booleans()):
            made = np.dtype(draw(st.sampled_from([np.int32, np.int64])))
            like.arrays[name] = draw(views(batch, made))
    return like


@hypothesis_settings(deadline=None, max_examples=200)
@given(examples(), st.booleans(), st.sampled_from(list(GPUS)), st.booleans())
def test_any_strides(
    like: Example, dlse: bool, family: str, deterministic: bool
) -> None:
    device = RecordingDevice(GPUS[family])
    check_forward(device, like)
    extra: dict[str, Any] = {"bias_grad": "bias" in like.arrays}
    if dlse:
        dtype = lse_dtype(like.arrays["q"].dtype)
        extra["dlse"] = np.broadcast_to(np.zeros((), dtype), lse_shape(like))
    check_backward(device, like, **extra, deterministic=deterministic)
    assert family != "simt" or not device.copied


# --- Outputs --------------------------------------------------------------------------


def test_lse_is_not_written_unless_asked_for(device: RecordingDevice) -> None:
    like = example()
    made = check_forward(device, like, return_lse=False)
    assert isinstance(made["out"], DeviceArray)
    assert device.launches[0].fields["lse"] == 0
    check_forward(device, like)
    assert device.launches[0].fields["lse"] != 0


def test_outputs_that_are_given(device: RecordingDevice) -> None:
    like = example(batch=(2, 3))
    for make in (
        lambda shape: np.zeros(shape, np.float32),
        lambda shape: np.zeros((*shape[:-1], 19), np.float32)[..., : shape[-1]],
        lambda shape: np.zeros(shape[::-1], np.float32).T,
        lambda shape: np.zeros(shape, np.float32)[..., ::-1, :],
    ):
        check_forward(device, like, out=device.array(make(output_shape(like))))
        given = {
            f"d{name}": device.array(make(like.arrays[name].shape)) for name in "qkv"
        }
        check_backward(device, like, given)
        check_backward(device, like, {"dk": given["dk"]})


def test_an_output_whose_elements_are_misaligned(device: RecordingDevice) -> None:
    """It must be refused, or written: not left as it was and another one returned."""
    like = example(batch=())
    raw = np.zeros(1000, np.uint8)
    out = np.ndarray(output_shape(like), np.float32, raw, strides=(102, 25, 4))
    arrays = on(device, like.arrays)
    try:
        result = flash_attention(**arrays, out=device.array(out))
    except ValueError as error:
        assert "out" in str(error)
    else:
        assert np.shares_memory(result, raw)


def test_outputs_on_inputs_are_refused(device: RecordingDevice) -> None:
    like = example(dv=8, hkv=4, sk=5)
    arrays = on(device, like.arrays)
    for name in "qkv":
        with pytest.raises(ValueError, match=r"out .*overlap"):
            flash_attention(**arrays, out=arrays[name])
    assert not device.launches
    forward = on(device, {"out": like.arrays["q"] + 1, "dout": like.arrays["q"] + 1})
    forward["lse"] = device.array(np.zeros(lse_shape(like), np.float32))
    for name in ("dq", "dk", "dv"):
        with pytest.raises(ValueError, match=rf"{name} .*overlap"):
            flash_attention_backward(**arrays, **forward, **{name: arrays["k"]})
    assert not device.launches


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "alibi_slopes"])
def test_outputs_that_overlap_somewhere_are_refused(
    device: RecordingDevice, name: str
) -> None:
    """Not only where both start at one address."""
    like = example(dv=8, hkv=4, sk=5)
    like.arrays["bias"] = np.zeros((2, 4, 5, 5), np.float32)
    like.arrays["alibi_slopes"] = np.zeros((2, 4), np.float32)
    shape = like.arrays[name].shape
    raw = device.array(np.zeros(1000, np.float32))
    arrays = on(device, like.arrays)
    size = like.arrays[name].size
    out = raw[:320].reshape(2, 5, 4, 8)
    for start in (8, 319, 320 - size):
        if start < 0:
            continue
        for view in (raw[start : start + size], raw[start : start + size][::-1]):
            arrays[name] = view.reshape(shape)
            with pytest.raises(ValueError, match=rf"out .*{name}.*overlap"):
                flash_attention(**arrays, out=out)
    assert not device.launches
    arrays[name] = raw[320 : 320 + size].reshape(shape)  # right behind it
    assert flash_attention(**arrays, out=out) is out


def test_gradients_that_overlap_are_refused(device: RecordingDevice) -> None:
    x, y, z = (device.array(np.zeros((2, 5, 2, 8), np.float32)) for _ in range(3))
    lse = device.array(np.zeros((2, 2, 5), np.float32))
    arguments = {"dout": y, "q": x, "k": x, "v": x, "out": z, "lse": lse}
    for name, outputs in (
        ("dout", {"dq": y}),
        ("out", {"dk": z}),
        ("dv|dk", {"dk": (w := device.array(np.zeros_like(x))), "dv": w}),
        ("dq|dk", {"dq": w, "dk": w[::-1]}),
    ):
        with pytest.raises(ValueError, match=name):
            flash_attention_backward(**arguments, **outputs)
    assert not device.launches


def test_outputs_may_lie_between_inputs(device: RecordingDevice) -> None:
    """Memory is shared only where elements are."""
    packed = device.array(np.zeros((2, 5, 4, 4, 8), np.float32))
    q, k, v, out = (packed[:, :, n] for n in range(4))
    assert flash_attention(q, k, v, out=out) is out
    lse = device.array(np.zeros((2, 4, 5), np.float32))
    rest = device.array(np.zeros((2, 5, 3, 4, 8), np.float32))
    dq, dk, dv = (rest[:, :, n] for n in range(3))
    results = flash_attention_backward(out, q, k, v, out, lse, dq=dq, dk=dk, dv=dv)
    assert all(x is y for x, y in zip(results, (dq, dk, dv), strict=True))


def test_empty_results_launch_nothing(device: RecordingDevice) -> None:
    for size in ({"batch": (0,)}, {"sq": 0}, {"batch": (2, 0)}):
        like = example(**size, dv=8)
        arrays = on(device, like.arrays)
        out, lse = flash_attention(**arrays, return_lse=True)
        assert out.shape == output_shape(like) and lse.shape == lse_shape(like)
        # Whatever an empty output's address is, it lies on no input.
        assert flash_attention(**arrays, out=arrays["q"]) is arrays["q"]
        assert not device.launches
        results = flash_attention_backward(out, *arrays.values(), out, lse)
        assert [x.shape for x in results] == [x.shape for x in arrays.values()]
        dkdv = "backward_dkdv" if family_of(device) == "simt" else "backward"
        assert names(device.launches) == ([dkdv] if size == {"sq": 0} else [])
        device.launches.clear()


def test_no_keys(device: RecordingDevice) -> None:
    """The kernels still write zeros and -inf, and dbias has nobody else to do it."""
    like = example(sk=0)
    like.arrays["bias"] = np.zeros((2, 1, 5, 1), np.float32)
    check_forward(device, like)
    arrays = on(device, like.arrays)
    out = device.array(np.zeros(output_shape(like), np.float32))
    lse = device.array(np.zeros(lse_shape(like), np.float32))
    device.launches.clear()
    *_, dbias = flash_attention_backward(
        out, **arrays, out=out, lse=lse, bias_grad=True
    )
    dq = "backward_dq" if family_of(device) == "simt" else "convert_dq"
    assert names(device.launches) == ["delta", dq]
    if dq == "convert_dq":
        assert int(device.launches[-1].fields["dq_sums"]) in device.cleared
    assert dbias.shape == (2, 1, 5, 1) and not dbias.any()


def test_the_function_of_vjp(device: RecordingDevice) -> None:
    like = example()
    like.arrays["bias"] = np.zeros((4, 1, 7), np.float32)
    arrays = on(device, like.arrays)
    out, vjp = flash_attention_vjp(**arrays, causal=True, bias_grad=True)
    (found,) = device.launches
    assert found.fields["lse"] != 0, "backward needs it"
    assert found.fields["out"] == device.pointer(out)
    assert found.spec.variant.right
    device.launches.clear()
    dq, dk, dv, dbias = vjp(device.array(np.ones_like(out)))
    assert dbias.shape == (4, 1, 7)
    backward = device.launches[0].fields
    for name in ("q", "k", "v", "bias", "out", "lse"):
        assert backward[name] == found.fields[name], name
    assert device.launches[1].spec.variant == found.spec.variant
    (out, lse), vjp = flash_attention_vjp(**arrays, return_lse=True)
    assert lse.shape == lse_shape(like)
    assert len(vjp(out, dlse=lse)) == 3
    assert device.launches[-1].fields["dlse"] == device.pointer(lse)


# --- Launches -------------------------------------------------------------------------


def test_launches_are_those_of_the_plan(device: RecordingDevice) -> None:
    like = example(sq=300, sk=200, d=40, dv=200)
    like.arrays["bias"] = np.zeros((200,), np.float32)
    for direction in ("forward", "backward"):
        backward = direction == "backward"
        if backward:
            check_backward(device, like, bias_grad=True)
        else:
            check_forward(device, like)
        plan = explain(
            **on(device, like.arrays), **like.options, return_lse=not backward,
            bias_grad=backward, direction=direction,
        )  # fmt: skip
        assert plan.device is device.info
        assert [(x.spec, x.grid, x.block, x.shared) for x in device.launches] == [
            (s.spec, s.grid, s.block, s.shared_memory) for s in plan.steps
        ]
        last = device.launches[-1].fields
        assert last["dbias_splits"] == plan.dbias_splits
        assert (plan.dbias_splits > 1) == backward


def test_config_is_obeyed(device: RecordingDevice) -> None:
    tile = SimtTile(32, 32, 64, 64, resident=False)
    like = example(config=tile)
    check_forward(device, like)
    assert device.launches[0].spec.tile == tile
    check_backward(device, like)
    assert [x.spec.tile for x in device.launches] == [None, tile, tile]
    arrays = on(device, like.arrays)
    with pytest.raises(ValueError, match="doesn't fit"):
        flash_attention(**arrays, config=SimtTile(512, 512, 64, 64, resident=False))
    with pytest.raises(ValueError, match="config"):
        flash_attention(**arrays, config="wgmma9")


def test_options_reach_the_kernels(device: RecordingDevice) -> None:
    like = example(causal="top_left", window=(3, 9), scale=-2.0, softcap=5.0)
    check_forward(device, like)
    fields, variant = device.launches[0].fields, device.launches[0].spec.variant
    assert (fields["left"], fields["right"], fields["top_left"]) == (3, 0, 1)
    assert (fields["scale"], fields["softcap"]) == (-2.0, 5.0)
    assert variant.left and variant.right and variant.softcap and variant.scale_first


def test_a_window_may_be_a_list(device: RecordingDevice) -> None:
    like = example(window=[3, None])
    check_forward(device, like)
    check_backward(device, like)
    first = device.launches[1].fields
    check_backward(device, example(window=(3, None)))
    assert first["left"] == device.launches[1].fields["left"] == 3
    assert len(set(device.compiled)) == len(device.compiled)


# --- Workspace ------------------------------------------------------------------------


def test_workspace_lives_as_long_as_the_launches(device: RecordingDevice) -> None:
    like = example(sq=300)
    like.arrays["bias"] = np.zeros((4, 1, 1), np.float32)
    gc.disable()  # so that what frees it is not the collector
    try:
        check_backward(device, like, bias_grad=True)
    finally:
        gc.enable()
    fields = ["delta", "dbias_partial"]
    if family_of(device) != "simt":
        fields.insert(1, "dq_sums")
    assert device.temporaries[0].shape == (2, 4, 300)
    assert device.launches[-1].spec.kernel == "reduce_dbias"
    for found in device.launches:
        assert found.live == {entry.address for entry in device.temporaries}
        for name, entry in zip(fields, device.temporaries, strict=True):
            assert found.fields[name] == entry.address
    assert all(entry.array() is None for entry in device.temporaries), "never freed"


def test_forward_needs_no_workspace(device: RecordingDevice) -> None:
    for dv in (200, 500):
        check_forward(device, example(sq=300, dv=dv))
    assert not device.temporaries


def broadcast_example(length: int) -> Example:
    """A long sequence that takes no memory."""
    shape = (1, length, 2, 64)
    q = np.broadcast_to(np.zeros((), np.float16), shape)
    arrays = {"q": q, "k": q, "v": q}
    return Example(arrays)


def test_tiles_are_claimed_from_a_counter() -> None:
    """If there are more of them than multiprocessors."""
    device = RecordingDevice(GPUS["wgmma"])
    for sq in (1000, 20000):
        check_forward(device, example(sq=sq, dtype=DTYPES["fp16"]))
        (found,) = device.launches
        fields, many = found.fields, sq == 20000
        assert found.spec.family == "wgmma"
        assert (int(fields["claims"]) in found.live) == many
        assert (fields["claims"] == 0) != many
        assert (fields["first_claim"] == 0) != many
        assert len(device.temporaries) == many and not device.cleared


@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_keys_are_claimed_from_a_counter(d: int) -> None:
    """Of the gradients, whose other kernels have no use for it."""
    device = RecordingDevice(GPUS["wgmma"])
    for sk in (1000, 20000):
        check_backward(device, example(sk=sk, d=d, dv=d, dtype=DTYPES["fp16"]))
        terms, made, _ = device.launches
        fields, many = made.fields, sk == 20000
        assert terms.spec.family == made.spec.family == "wgmma"
        assert (int(fields["claims"]) in made.live) == many
        assert (fields["claims"] == 0) != many
        assert (fields["first_claim"] == 0) != many
        assert not device.cleared


def test_no_two_launches_count_the_same_numbers() -> None:
    """Whatever the counter held before is told apart from what a launch counted."""
    device = RecordingDevice(GPUS["wgmma"])
    first = []
    for _ in range(50):
        check_forward(device, example(sq=20000, dtype=DTYPES["fp16"]))
        first.append(int(device.launches[0].fields["first_claim"]))
    first.sort()
    apart = [b - a for a, b in zip(first, first[1:] + [first[0] + 2**64], strict=True)]
    assert min(apart) > 2**40


def test_no_two_threads_count_the_same_numbers() -> None:
    device = RecordingDevice(GPUS["wgmma"])
    arrays = on(device, example(sq=20000, dtype=DTYPES["fp16"]).arrays)
    flash_attention(**arrays)
    at_once(8, lambda: [flash_attention(**arrays) for _ in range(20)])
    assert len(device.launches) == 8 * 20 + 1
    first = sorted(int(x.fields["first_claim"]) for x in device.launches)
    assert min(b - a for a, b in itertools.pairwise(first)) > 2**24  # tiles of a call


def test_the_import_draws_no_random_numbers() -> None:
    """A program that seeded them gets those that it would get without us."""
    code = """
import random
random.seed(5)
before = random.getstate()
import cupy_flash
import cupy_flash.launch
assert random.getstate() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def counting_maps(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[RecordingDevice, list[int]]:
    """Return a device, and a list to which it adds the address of each map it makes."""
    device = RecordingDevice(GPUS["wgmma"])
    made: list[int] = []
    encode = device.tensor_map

    def counting(pointer: int, *rest: Any) -> bytes:
        made.append(pointer)
        return encode(pointer, *rest)

    monkeypatch.setattr(device, "tensor_map", counting)
    return device, made


def test_tensor_maps_are_made_once_for_each_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, made = counting_maps(monkeypatch)
    like = example(dtype=DTYPES["fp16"])
    out = device.array(np.zeros(output_shape(like), np.float16))
    for _ in range(3):
        arrays = check_forward(device, like, out)
        assert made == [device.pointer(arrays[name]) for name in ("q", "k", "v", "out")]
    made.clear()
    kept = like.arrays["k"]
    like.arrays["k"] = kept.copy()
    arrays = check_forward(device, like, out)
    assert device.pointer(arrays["k"]) in made
    made.clear()
    like.arrays["k"] = kept
    check_forward(device, like, out)
    assert not made
    # Where nothing is launched there may be no address.
    flash_attention(**on(device, example(dtype=DTYPES["fp16"], sq=0).arrays))
    assert not made


def test_tensor_maps_of_all_kinds_share_one_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, made = counting_maps(monkeypatch)
    monkeypatch.setattr(launch, "_MAPS_REMEMBERED", 3)
    monkeypatch.setattr(launch, "_MAPPED", deque())
    calls = []
    for sq in (5, 6, 7, 8):
        like = example(sq=sq, dtype=DTYPES["fp16"])
        out = device.array(np.zeros(output_shape(like), np.float16))
        calls.append(on(device, like.arrays) | {"out": out})
    moved = calls[0] | {"k": device.array(np.zeros_like(calls[0]["k"]))}

    def makes(arrays: dict[str, Any]) -> bool:
        made.clear()
        flash_attention(**arrays)
        return bool(made)

    first, second, third, fourth = calls
    assert all(map(makes, calls[:3])) and not any(map(makes, calls[:3]))
    assert makes(fourth)  # in place of the first, which is the oldest
    assert not any(map(makes, calls[1:]))
    assert makes(moved)  # in place of the second
    assert not any(map(makes, (third, fourth, moved)))
    assert makes(first) and makes(second)
    assert len(launch._MAPPED) == 3


def test_memory_is_linear_in_the_sequence(device: RecordingDevice) -> None:
    def taken(length: int) -> int:
        like = broadcast_example(length)
        arrays = on(device, like.arrays)
        arrays["mask"] = device.array(
            np.broadcast_to(np.zeros((), bool), (length, length))
        )
        arrays["bias"] = device.array(np.zeros((1, length), np.float32))
        device.temporaries.clear()
        out, lse = flash_attention(**arrays, return_lse=True)
        results = flash_attention_backward(
            out, **arrays, out=out, lse=lse, bias_grad=True
        )
        made = sum(x.nbytes for x in (out, lse, *results))
        return made + sum(x.nbytes for x in device.temporaries)

    # At most: outputs, delta, and parts of dbias that depend on the GPU alone.
    parts = 4 * 132 * 64 * 64 * 4
    assert taken(8192) <= 2 * taken(4096) + parts
    assert taken(65536) <= 16 * taken(4096) + parts


# --- Once and for all -----------------------------------------------------------------


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a call was checked and planned."""
    counter: Counter[str] = Counter()

    def counted(name: str) -> None:
        original = getattr(launch, name)

        def wrapper(*arguments: Any, **numbers: int) -> Any:
            counter[name] += 1
            return original(*arguments, **numbers)

        monkeypatch.setattr(launch, name, wrapper)

    for name in ("make_problem", "make_plan", "make_template"):
        counted(name)
    return counter


def test_the_second_call_of_a_kind_prepares_nothing(
    device: RecordingDevice, counts: Counter[str]
) -> None:
    once = {"make_problem": 1, "make_plan": 1, "make_template": 1}
    for _ in range(3):
        like = example(causal=True)  # other arrays of the same shapes
        check_forward(device, like)
        assert counts == once
    assert len(device.requested) == 1
    counts.clear()
    device.requested.clear()
    for _ in range(3):
        check_backward(device, example(causal=True))
        assert counts == once
    assert len(device.requested) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"sq": 6}, {"sk": 8}, {"hq": 2}, {"d": 16}, {"dv": 8}, {"batch": (3,)},
        {"dtype": DTYPES["fp16"]}, {"layout": "bhsd", "hkv": 4}, {"causal": True},
        {"window": (1, 1)}, {"scale": 0.5}, {"softcap": 1.0}, {"precision": "tf32"},
        {"config": "simt"},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_call_of_another_kind_is_prepared(
    device: RecordingDevice, counts: Counter[str], change: dict[str, Any]
) -> None:
    check_forward(device, example())
    check_forward(device, example(**change))
    assert counts["make_problem"] == counts["make_plan"] == 2
    check_forward(device, example())
    assert counts["make_plan"] == 2


def test_strides_and_alignment_are_part_of_the_kind(
    device: RecordingDevice, counts: Counter[str]
) -> None:
    check_forward(device, example())
    like = example()
    like.arrays["q"] = like.arrays["q"][:, ::-1]
    check_forward(device, like)
    assert counts["make_plan"] == 2
    like = example()
    raw = np.zeros(like.arrays["q"].size + 8, np.float32)
    start = (4 - raw.ctypes.data % 16 // 4) % 4 + 1  # 4 bytes past a multiple of 16
    like.arrays["q"] = raw[start:][: like.arrays["q"].size].reshape(2, 5, 4, 8)
    check_forward(device, like)
    assert counts["make_plan"] == 3


def test_devices_are_prepared_apart(counts: Counter[str]) -> None:
    first, second = RecordingDevice(), RecordingDevice()
    for device in (first, second, first, second):
        check_forward(device, example())
    assert counts["make_plan"] == 2
    assert len(first.requested) == len(second.requested) == 1


def test_one_kernel_serves_many_shapes(device: RecordingDevice) -> None:
    """As long as there are few blocks, or many."""
    for sq in (1, 5, 64, 300):
        for batch in ((), (2,), (3, 2)):
            check_forward(device, example(sq=sq, batch=batch))
    assert len(device.compiled) == 1
    check_forward(device, example(causal=True))
    assert len(device.compiled) == 2


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"scale": 1.0}, {"scale": True}),
        ({"causal": True}, {"causal": 1}),
        ({"window": (1, 1)}, {"window": (1.0, 1)}),
    ],
)
def test_what_is_refused_stays_refused(
    device: RecordingDevice, right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    """Equal values of another type, after the right ones were accepted."""
    arrays = on(device, example().arrays)
    with pytest.raises(TypeError):
        flash_attention(**arrays, **wrong)
    flash_attention(**arrays, **right)
    with pytest.raises(TypeError):
        flash_attention(**arrays, **wrong)


def test_many_threads_at_once() -> None:
    """The first calls of a kind may come at the same time."""
    device = RecordingDevice()
    arrays = on(device, example().arrays)
    at_once(8, lambda: [flash_attention(**arrays) for _ in range(20)])
    assert len(device.launches) == 8 * 20
    assert {x.fields["q"] for x in device.launches} == {device.pointer(arrays["q"])}
    outs = [int(x.fields["out"]) for x in device.launches]
    assert all(outs)


# --- Misaligned inputs ----------------------------------------------------------------


def misaligned(shape: tuple[int, ...], dtype: np.dtype, by: int = 1) -> np.ndarray:
    """An array whose first element lies `by` bytes past a multiple of 16."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + 32, np.uint8)
    start = -raw.ctypes.data % 16 + by
    array = np.ndarray(shape, dtype, raw, offset=start)
    array[...] = np.arange(array.size).reshape(shape)
    return array


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_misaligned_inputs_are_copied_once(device: RecordingDevice, name: str) -> None:
    like = example()
    array = misaligned(like.arrays[name].shape, like.arrays[name].dtype)
    like.arrays[name] = array
    arrays = on(device, like.arrays)
    kept = array.copy()
    flash_attention(**arrays, return_lse=True)
    assert device.copied == [array.shape]
    (copy,) = device.temporaries
    (found,) = device.launches
    assert found.fields[name] == copy.address and copy.address in found.live
    assert found.fields[f"{name}_strides"].tolist() == [
        s // 4 for s in np.zeros_like(array).strides
    ]
    assert copy.array() is None, "never freed"
    np.testing.assert_array_equal(array, kept)
    for other in {"q", "k", "v"} - {name}:
        assert found.fields[other] == device.pointer(arrays[other])


def test_misaligned_arrays_of_every_kind(device: RecordingDevice) -> None:
    like = example()
    arrays = on(
        device,
        like.arrays
        | {
            "bias": misaligned((4, 5, 7), DTYPES["bf16"]),
            "alibi_slopes": misaligned((4,), np.dtype(np.float32), 2),
            "k_lengths": misaligned((2,), np.dtype(np.int64), 4),
            "mask": misaligned((5, 7), np.dtype(bool), 3),  # bytes lie anywhere
            "dout": misaligned((2, 5, 4, 16), np.dtype(np.float32), 2),
            "dlse": misaligned((2, 4, 5), np.dtype(np.float32), 2),
            "out": np.zeros((2, 5, 4, 16), np.float32),
            "lse": np.zeros((2, 4, 5), np.float32),
        },
    )
    flash_attention_backward(**arrays)
    assert sorted(device.copied) == sorted(
        [(4, 5, 7), (4,), (2,), (2, 5, 4, 16), (2, 4, 5)]
    )
    for found in device.launches:
        for name in ("bias", "alibi_slopes", "k_lengths", "dout", "dlse"):
            assert int(found.fields[name]) in found.live, name
        assert found.fields["mask"] == device.pointer(arrays["mask"])


@dtypes
def test_elements_on_their_own_multiples_are_not_copied(
    device: RecordingDevice, dtype: np.dtype
) -> None:
    like = example(dtype=dtype)
    shape = like.arrays["q"].shape
    like.arrays["q"] = misaligned(shape, dtype, dtype.itemsize)
    check_forward(device, like)
    assert device.copied == ([] if family_of(device) == "simt" else [shape])


# --- Kinds of arrays ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "mask", "k_lengths", "out"])
def test_host_arrays_beside_device_arrays(device: RecordingDevice, name: str) -> None:
    like = example()
    like.arrays |= {
        "bias": np.zeros((5, 7), np.float32),
        "mask": np.zeros((5, 7), bool),
        "k_lengths": np.zeros(2, np.int32),
        "out": np.zeros(output_shape(like), np.float32),
    }
    arrays = on(device, like.arrays)
    arrays[name] = like.arrays[name]
    with pytest.raises(TypeError) as raised:
        flash_attention(**arrays)
    assert f"{name} is a NumPy array" in str(raised.value)
    assert "lies on a GPU" in str(raised.value)
    assert not device.launches


def test_host_arrays_beside_device_arrays_in_backward(device: RecordingDevice) -> None:
    q = np.zeros((5, 8), np.float32)
    lse = np.zeros(5, np.float32)
    x = device.array(q)
    with pytest.raises(TypeError, match="lse is a NumPy array"):
        flash_attention_backward(x, x, x, x, x, lse)
    with pytest.raises(TypeError, match="dout is a NumPy array"):
        flash_attention_backward(q, x, x, x, x, device.array(lse))


def test_arrays_of_two_devices(device: RecordingDevice) -> None:
    like = example()
    arrays = on(device, like.arrays)
    arrays["v"] = RecordingDevice().array(like.arrays["v"])
    with pytest.raises(ValueError, match=r"q lies on .* and v on .*one device"):
        flash_attention(**arrays)
    assert not device.launches


def test_errors_come_before_any_launch(device: RecordingDevice) -> None:
    arrays = on(device, example().arrays)
    for change, error in (
        ({"causal": "sideways"}, ValueError),
        ({"softcap": -1.0}, ValueError),
        ({"scale": float("nan")}, ValueError),
        ({"window": 3}, TypeError),
        ({"layout": "sbhd"}, ValueError),
        ({"k": device.array(np.zeros((2, 7, 3, 8), np.float32))}, ValueError),
        ({"k": device.array(np.zeros((2, 7, 2, 8)))}, TypeError),
        ({"mask": device.array(np.zeros((5, 7)))}, TypeError),
    ):
        for _ in range(2):  # also when the same call comes again
            with pytest.raises(error):
                flash_attention(**(arrays | change))
    assert not device.launches and not device.temporaries and not device.requested


# --- Lengths --------------------------------------------------------------------------


def test_lengths_on_the_device_are_not_read(device: RecordingDevice) -> None:
    like = example()
    like.arrays |= {
        "q_lengths": np.array([99, -3], np.int32),  # the kernels clamp them
        "k_lengths": np.array([0, 1 << 40]),
    }
    check_forward(device, like)
    check_backward(device, like)
    assert device.downloads == 0


@pytest.mark.parametrize(
    ("name", "values", "limit"),
    [
        ("q_lengths", [6, 0], 5),
        ("k_lengths", [0, 8], 7),
        ("k_lengths", [-1, 3], 7),
    ],
)
def test_the_debug_switch_reads_them(
    device: RecordingDevice,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    values: list[int],
    limit: int,
) -> None:
    monkeypatch.setattr(settings, "debug", True)
    like = example()
    like.arrays[name] = np.array([0, limit])
    check_forward(device, like)
    assert device.downloads == 1
    device.launches.clear()
    like.arrays[name] = np.array(values)  # of the same kind: it is checked again
    with pytest.raises(ValueError) as raised:
        flash_attention(**on(device, like.arrays))
    message = str(raised.value)
    assert name in message and str(limit) in message
    assert str(min(values)) in message and str(max(values)) in message
    assert not device.launches


def test_the_debug_switch_is_free_without_lengths(
    device: RecordingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "debug", True)
    check_forward(device, example())
    assert device.downloads == 0


# --- The current device ---------------------------------------------------------------


def test_another_device_is_current_again_afterwards(
    device: RecordingDevice,
) -> None:
    """The recorder itself refuses to work while it isn't the current device."""
    check_forward(device, example())
    assert device.active_depth == 0
    like = example()
    like.arrays["q"] = misaligned(like.arrays["q"].shape, like.arrays["q"].dtype)
    flash_attention(**on(device, like.arrays))
    assert device.active_depth == 0
    arrays = on(device, example(dv=8, hkv=4, sk=5).arrays)
    with pytest.raises(ValueError, match="overlap"):
        flash_attention(**arrays, out=arrays["q"])
    assert device.active_depth == 0
