"""From NumPy arrays to the GPU, through the library, and back."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import launch
from cupy_flash.configs import Tile
from cupy_flash.device import cupy_device
from cupy_flash.spec import KernelSpec

from ..cases import (
    Array,
    Case,
    Inputs,
    Truth,
    allocate,
    compare,
    expect,
    expect_case,
    lse_dtype,
    make,
)

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as that it finds no toolkit
        import cupy as cp
except ImportError:  # then every test here is skipped
    cp = None

# A family or a tile, or None for what the library takes by itself.
One = str | Tile | None
# That, for both directions or for each.
Config = One | tuple[One, One]
# Families whose gradients take less than their forward pass does. Backward is left
# to the library, which takes them where they can be had.
PARTLY_BACKWARD = ("wgmma",)
# What an error says of a family or a tile that the call can't have on this GPU.
_REFUSALS = (
    "can't be had", "doesn't fit", "from compute capability",
    "is for compute capability", "needs NVRTC",
)  # fmt: skip


@dataclass(frozen=True)
class Copy:
    """A copy of a NumPy array on the GPU that lies in memory just as the array does.

    Attributes
    ----------
    array : the copy, with the shape, strides and misalignment of the original
    raw : all bytes between its first and its last element, gaps included
    """

    array: Any
    raw: Any

    def unchanged(self, like: Array) -> bool:
        """Whether every byte is still that of the original."""
        if like.size == 0:
            return True
        original = _bytes_of(like)
        return np.array_equal(self.raw.get()[-original.size :], original)


def _span(x: Array) -> tuple[int, int]:
    """How far before x's first element its memory begins, and how long it is."""
    steps = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
    before = -sum(s for s in steps if s < 0)
    return before, before + sum(s for s in steps if s > 0) + x.itemsize


def _bytes_of(x: Array) -> Array:
    before, size = _span(x)
    start = x.ctypes.data - before
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))


def mirror(x: Array) -> Copy:
    """Copy an array to the GPU with its strides, its alignment and its gaps."""
    if x.size == 0:
        empty = cp.empty(x.shape, x.dtype)
        return Copy(empty, empty)
    before, size = _span(x)
    lead = (x.ctypes.data - before) % 16
    raw = cp.empty(lead + size, np.uint8)
    raw[lead:].set(_bytes_of(x))
    array = cp.ndarray(x.shape, x.dtype, raw.data + (lead + before), x.strides)
    return Copy(array, raw)


def to_gpu(x: Array) -> Any:
    """Return `mirror` of an array without its raw bytes."""
    return mirror(x).array


def fetch(x: Any) -> Array:
    """Copy an array of any strides to the host, as the integers that its bits are.

    CuPy then needs no kernel that knows the dtype.
    """
    return x.view(f"u{x.itemsize}").get().view(x.dtype)


def fetch_all(arrays: Mapping[str, Any]) -> dict[str, Array]:
    """`fetch` each of them."""
    return {name: fetch(x) for name, x in arrays.items()}


def poison(*sizes: int) -> None:
    """Fill memory with NaN and give it back, so that the next arrays hold NaN."""
    blocks = [cp.empty(max(1, size), np.uint8) for size in sizes]
    for block in blocks:
        block.data.memset(0xFF, block.nbytes)


_FILL_SHARED_MEMORY = """
extern "C" __global__ void fill(int count) {
  extern __shared__ volatile unsigned words[];
  for (int i = threadIdx.x; i < count; i += blockDim.x) words[i] = 0xFFFFFFFFu;
  __syncthreads();
}
"""


def poison_shared_memory() -> None:
    """Fill the shared memory of all multiprocessors with NaN.

    A kernel that comes next finds there what it doesn't write itself.
    """
    device = cp.cuda.Device()
    size = device.attributes["MaxSharedMemoryPerBlockOptin"]
    kernel = cp.RawKernel(_FILL_SHARED_MEMORY, "fill")
    kernel.max_dynamic_shared_size_bytes = size
    blocks = 4 * device.attributes["MultiProcessorCount"]
    kernel((blocks,), (256,), (np.int32(size // 4),), shared_mem=size)


def output_copies(inputs: Inputs, memory: str) -> dict[str, Copy]:
    """Return arrays for all results that can be given, full of NaN."""
    like = {"out": inputs.dout, "dq": inputs.q, "dk": inputs.k, "dv": inputs.v}
    return {n: mirror(allocate(x.shape, x.dtype, memory)) for n, x in like.items()}


def run(
    inputs: Inputs,
    config: Config,
    *,
    gradients: bool = True,
    given: Mapping[str, Any] | None = None,
    deterministic: bool = True,
    **extra: Any,
) -> dict[str, Array]:
    """Run forward and backward on the GPU.

    Only `mirror`, `poison` and `fetch` know CuPy; tests/sim puts others in their place.

    Checks what holds of every call: kinds, shapes and dtypes of the results, that
    arrays which were given are returned, and that no input was written. What the
    library allocates holds NaN before.

    Parameters
    ----------
    given : arrays for out, dq, dk and dv
    deterministic : True, so that results can be compared bit by bit
    **extra : further arguments of `flash_attention_backward`

    Returns
    -------
    dict with out, lse and, with gradients, dq, dk, dv and (if there is a bias) dbias
    """
    return _run(
        inputs, both(config), gradients, given or {},
        {"deterministic": deterministic, **extra},
    )  # fmt: skip


def usual_dtype(family: str) -> str:
    """Return float32, or bfloat16 for a family that doesn't have it."""
    return "bfloat16" if family == "wgmma" else "float32"


def both(config: Config) -> tuple[One, One]:
    """Return what is asked for in forward and in backward."""
    if isinstance(config, tuple):
        return config
    return config, None if is_partly_backward(config) else config


def is_partly_backward(config: Config) -> bool:
    """Whether one of those families is asked for, or a tile of it."""
    return getattr(config, "family", config) in PARTLY_BACKWARD


def run_backward(*arrays: Any, config: Config, **options: Any) -> tuple[Any, ...]:
    """Call `flash_attention_backward` with what `both` says is asked for there."""
    return cupy_flash.flash_attention_backward(
        *arrays, config=both(config)[1], **options
    )


@contextlib.contextmanager
def skipping_refusals() -> Iterator[None]:
    """Skip the test if a family or a tile can't serve the call on this GPU.

    Every test here runs in it.
    """
    try:
        yield
    except ValueError as error:
        if not is_refusal(error):
            raise
        pytest.skip(str(error))


def is_refusal(error: ValueError) -> bool:
    """Whether an error says that ``config=`` asks for what the GPU can't do."""
    return any(words in str(error) for words in _REFUSALS)


def _run(
    inputs: Inputs,
    configs: tuple[One, One],
    gradients: bool,
    given: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> dict[str, Array]:
    forward_config, backward_config = configs
    copies = {name: mirror(x) for name, x in inputs.arrays.items()}
    arrays = {name: copy.array for name, copy in copies.items()}
    q, k, v, dout = (arrays.pop(name) for name in ("q", "k", "v", "dout"))
    dlse = arrays.pop("dlse", None)
    options = inputs.scalars | arrays
    poison(inputs.dout.nbytes, 8 * inputs.dout.size)
    out, lse = cupy_flash.flash_attention(
        q, k, v, **options, return_lse=True, out=given.get("out"), config=forward_config
    )
    results = {"out": out, "lse": lse}
    bias = inputs.options.get("bias")
    if gradients:
        like = {"dq": inputs.q, "dk": inputs.k, "dv": inputs.v}
        like |= {} if bias is None else {"dbias": bias}
        poison(*(x.nbytes for x in like.values()), lse.nbytes)
        values = cupy_flash.flash_attention_backward(
            dout, q, k, v, out, lse, **options, dlse=dlse, bias_grad=bias is not None,
            config=backward_config, **extra,
            **{name: x for name, x in given.items() if name != "out"},
        )  # fmt: skip
        results |= zip(like, values, strict=True)
        for name, x in like.items():
            assert results[name].shape == x.shape, name
            assert results[name].dtype == x.dtype, name
    assert out.shape == inputs.dout.shape
    assert out.dtype == inputs.q.dtype
    assert lse.dtype == lse_dtype(inputs.q.dtype)
    for name, x in results.items():
        assert isinstance(x, type(q)), name
        assert name not in given or x is given[name], name
    for name, copy in copies.items():
        assert copy.unchanged(inputs.arrays[name]), f"{name} was written"
    return fetch_all(results)


def check(
    inputs: Inputs,
    config: Config,
    truths: Callable[[], Mapping[str, Truth]] | None = None,
    *,
    gradients: bool = True,
    huge: bool = False,
    **keywords: Any,
) -> dict[str, Array]:
    """`run`, held against the float64 reference; returns the results.

    Where dq can also be summed by atomics, that is checked too; the results returned
    are those that come with the same bits each time.

    Parameters
    ----------
    truths : what gives the reference's results, if they are known. It is called last,
        so that a call which is refused costs no time
    huge : the logits are so large that one ulp of lse is far from 0. Weights made from
        lse are then off by exp(ulp), so that of the gradients only NaN is checked.
    """
    ways = [keywords]
    if gradients and "deterministic" not in keywords and has_atomics(config):
        ways.insert(0, keywords | {"deterministic": False})
    found = [run(inputs, config, gradients=gradients, **way) for way in ways]
    if huge:
        wanted = expect(inputs, gradients=False, terms=False)
    else:
        wanted = truths() if truths else expect(inputs, gradients=gradients)
    for results in found:
        if huge:
            for name, x in results.items():
                assert not np.isnan(x.astype(np.float64)).any(), name
        compare({name: results[name] for name in wanted}, wanted)
    return found[-1]


def has_atomics(config: Config) -> bool:
    """Whether gradients come otherwise if they needn't be the same bits each time.

    Not where the library chooses freely: those families have tests of their own.
    """
    if is_partly_backward(config):
        return True
    _, backward = both(config)
    return getattr(backward, "family", backward) not in (None, "simt")


def check_case(case: Case, config: Config, **keywords: Any) -> dict[str, Array]:
    """`check` of a case."""
    truths = functools.partial(expect_case, case)
    return check(make(case), config, truths, gradients=case.gradients, **keywords)


def specs(case: Case, config: Config, device: str) -> Iterator[KernelSpec]:
    """Yield the kernels that `check_case` needs on a GPU such as "sm_90".

    Raises
    ------
    ValueError
        If the family or tile can't serve the case there.
    """
    inputs = _arrays_to_plan_with(case)
    arrays = inputs.arrays
    q, k, v = (arrays.pop(name) for name in "qkv")
    del arrays["dout"]
    options = {**inputs.scalars, **arrays, "device": device}
    dlse = options.pop("dlse", None)
    forward_config, backward_config = both(config)
    plans = [
        cupy_flash.explain(q, k, v, **options, return_lse=True, config=forward_config)
    ]
    if case.gradients:
        plans += [
            cupy_flash.explain(
                q, k, v, **options, dlse=dlse, bias_grad=case.bias is not None,
                direction="backward", config=backward_config,
                deterministic=deterministic,
            )
            for deterministic in ((False, True) if has_atomics(config) else (True,))
        ]  # fmt: skip
    for plan in plans:
        for step in plan.steps:
            yield step.spec


# The next family and the next tile ask for the same ones.
_arrays_to_plan_with = functools.lru_cache(maxsize=1)(make)


def specs_of_parameters(
    parameters: Iterable[Mapping[str, Any]], device: str
) -> dict[KernelSpec, None]:
    """Return the kernels of parametrized tests, each once.

    A test's case is its parameter ``case``; what it is run with is ``config`` or
    ``family``, or what the library takes by itself.
    """
    pairs = {
        (p["case"], p.get("config", p.get("family"))): None
        for p in parameters
        if isinstance(p.get("case"), Case)
    }
    found: dict[KernelSpec, None] = {}
    for case, config in pairs:
        try:
            found |= dict.fromkeys(specs(case, config, device))
        except ValueError as error:
            if not is_refusal(error):
                raise
    return found


def forget_kernels(*, keep: Callable[[KernelSpec], bool] = lambda _: False) -> None:
    """Make the present device load its kernels anew, but for those to be kept.

    A kernel that isn't of the library, such as a probe, is forgotten in any case.
    """
    device = cupy_device(cp.cuda.runtime.getDevice())
    for spec in list(device._kernels):
        if not (isinstance(spec, KernelSpec) and keep(spec)):
            del device._kernels[spec]
    launch._prepare.cache_clear()


class PeakMemory(cp.cuda.MemoryHook if cp else object):
    """While active, how many bytes were in use at once that weren't before.

    Counts what comes from CuPy's memory pool, whose blocks are multiples of 512 bytes.
    """

    name = "PeakMemory"

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.peak = 0

    def malloc_postprocess(self, **block: Any) -> None:
        self.live[block["mem_ptr"]] = block["mem_size"]
        self.peak = max(self.peak, sum(self.live.values()))

    def free_preprocess(self, **block: Any) -> None:
        self.live.pop(block["mem_ptr"], None)


def pool_bytes(*arrays: Any) -> int:
    """Return what arrays of those sizes take in CuPy's memory pool."""
    return sum(-(-x.nbytes // 512) * 512 for x in arrays)
