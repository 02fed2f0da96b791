"""Planning and compiling ahead of time, for calls that have no arrays yet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import compiler, configs
from .device import DeviceInfo, NoDeviceError, current_device, hypothetical
from .dtypes import ELEMENT_TYPES, parse_dtype
from .launch import plan_call
from .plan import Plan
from .problem import ArrayInfo, Options
from .spec import KernelSpec
from .validate import contiguous_strides

_DIRECTIONS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "both": ("forward", "backward"),
}


@dataclass(frozen=True, slots=True)
class Call:
    """A call by its sizes; all its arrays are contiguous and aligned.

    `bias`, `mask` and `alibi` say whether the call has such an array, of shape
    (heads, seqlen_q, seqlen_k) or (heads,); `lengths` whether it has q_lengths and
    k_lengths.
    """

    options: Options
    dtype: np.dtype
    head_dim: int
    head_dim_v: int
    batch: int = 4
    seqlen_q: int = 4096
    seqlen_k: int = 4096
    heads_q: int = 16
    heads_kv: int = 16
    alibi: bool = False
    bias: bool = False
    mask: bool = False
    lengths: bool = False

    def infos(self) -> dict[str, ArrayInfo]:
        """Return the descriptions of the call's arrays."""

        def rows(seqlen: int, heads: int, channels: int) -> tuple[int, ...]:
            if self.options.layout == "bhsd":
                return (self.batch, heads, seqlen, channels)
            return (self.batch, seqlen, heads, channels)

        pairs = (self.heads_q, self.seqlen_q, self.seqlen_k)
        wanted = {
            "q": (rows(self.seqlen_q, self.heads_q, self.head_dim), self.dtype),
            "k": (rows(self.seqlen_k, self.heads_kv, self.head_dim), self.dtype),
            "v": (rows(self.seqlen_k, self.heads_kv, self.head_dim_v), self.dtype),
        }
        if self.alibi:
            wanted["alibi_slopes"] = ((self.heads_q,), np.dtype(np.float32))
        if self.bias:
            wanted["bias"] = (pairs, self.dtype)
        if self.mask:
            wanted["mask"] = (pairs, np.dtype(bool))
        if self.lengths:
            for name in ("q_lengths", "k_lengths"):
                wanted[name] = ((self.batch,), np.dtype(np.int32))
        return {
            name: ArrayInfo(shape, contiguous_strides(shape, dtype), dtype)
            for name, (shape, dtype) in wanted.items()
        }

    def plan(self, device: DeviceInfo) -> Plan:
        """Plan the call for a GPU, which need not be there."""
        return plan_call(self.infos(), self.options, device)


def device_named(name: str | None) -> DeviceInfo:
    """Return the facts about the GPU of that name, such as "sm_86", or the present one.

    Raises
    ------
    ValueError
        If no GPU has that name.
    NoDeviceError
        If none is named and there is none.
    """
    if name is not None:
        return hypothetical(name)
    try:
        return current_device().info
    except NoDeviceError as error:
        raise NoDeviceError(f"{error}; name a GPU, such as sm_86") from None


def directions(name: str) -> tuple[str, ...]:
    """Return the passes that "forward", "backward" or "both" stands for."""
    if name not in _DIRECTIONS:
        accepted = ", ".join(map(repr, _DIRECTIONS))
        raise ValueError(f"direction is {name!r}; accepted: {accepted}")
    return _DIRECTIONS[name]


def precompile(
    head_dim: int | Sequence[int] = (64, 128),
    dtype: Any = ("float16", "bfloat16"),
    *,
    head_dim_v: int | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi: bool = False,
    bias: bool = False,
    bias_grad: bool = False,
    mask: bool = False,
    direction: str = "both",
    precision: str | None = None,
    deterministic: bool = False,
    config: Any = None,
    all: bool = False,
    device: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Compile kernels before their first use and keep them on disk.

    Which kernels a call takes depends on its dtype, its head sizes and on which
    options it has, hardly on their values: those compiled here serve every batch,
    sequence length and number of heads. Kernels that are there already cost nothing.

    Parameters
    ----------
    head_dim : int or sequence of int, default (64, 128)
        Head sizes of q and k.
    dtype : dtype or sequence of dtypes, default ("float16", "bfloat16")
        A name such as "bfloat16" or "bf16", or a NumPy dtype.
    head_dim_v : int, optional
        Head size of v; default that of q and k.
    causal, window, scale, softcap, precision, config : optional
        As in `flash_attention`.
    alibi, bias, mask : bool, default False
        Whether the calls have `alibi_slopes`, a `bias` of the dtype of q, a `mask`.
    bias_grad : bool, default False
        Also the kernels of the bias's gradient.
    direction : {"both", "forward", "backward"}, default "both"
        Which passes.
    deterministic : bool, default False
        As in `flash_attention_backward`, whose kernels depend on it.
    all : bool, default False
        Every dtype and head size, with and without causal masking, in place of what
        `head_dim`, `dtype` and `causal` say. It takes minutes.
    device : str, optional
        A GPU that need not be there, such as "sm_86"; default: the current device.
        The version of NVRTC is part of a kernel's key, so that kernels compiled
        elsewhere serve where NVRTC is the same.
    progress : callable, optional
        ``progress(done, total)`` is called after each kernel.

    Returns
    -------
    int
        How many kernels were compiled, without those that were there.

    Raises
    ------
    TypeError, ValueError
        As `flash_attention`.
    NoDeviceError
        If no `device` is named and there is no GPU; it is a RuntimeError.
    CompileError
        If NVRTC is missing or doesn't know the GPU; it is a RuntimeError.
    OSError
        If the folder of compiled kernels can't be written.
    """
    options = Options(
        "forward", causal, window, scale, softcap, precision=precision,
        deterministic=deterministic, config=config,
    )  # fmt: skip
    calls = _calls(
        _all_head_dims() if all else _sequence(head_dim),
        ELEMENT_TYPES if all else map(parse_dtype, _sequence(dtype)),
        head_dim_v,
        (False, True) if all else (causal,),
    )
    gpu = device_named(device)
    specs: list[KernelSpec] = []
    for head_size, element, value_size, is_causal in calls:
        call = Call(
            options._replace(causal=is_causal), element, head_size, value_size,
            alibi=alibi, bias=bias, mask=mask,
        )  # fmt: skip
        specs += _specs(call, directions(direction), bias_grad, gpu)
    return compiler.precompile(specs, gpu.compute_capability, progress)


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _all_head_dims() -> tuple[int, ...]:
    return (*configs.head_dim_buckets(), *configs.ragged_head_dims())


def _calls(
    head_dims: Iterable[int],
    dtypes: Iterable[np.dtype],
    head_dim_v: int | None,
    causals: Iterable[bool | str],
) -> Iterator[tuple[int, np.dtype, int, bool | str]]:
    for head_dim, dtype, causal in itertools.product(head_dims, dtypes, causals):
        yield head_dim, dtype, head_dim_v or head_dim, causal


def _specs(
    call: Call, passes: tuple[str, ...], bias_grad: bool, device: DeviceInfo
) -> Iterator[KernelSpec]:
    """Yield the kernels that a call may take on a device."""
    for direction in passes:
        gradient = bias_grad and direction == "backward"
        options = call.options._replace(direction=direction, bias_grad=gradient)
        same = replace(call, options=options)
        gradients = direction == "backward" and options.config is None
        # Where there are few tiles, a bias's gradient is summed in parts.
        few = replace(same, batch=64, seqlen_q=64, seqlen_k=64)
        calls = (same, few, *_from_short_to_long(same, device))
        for sized in (*calls, *_with_tiles_of_wgmma(same, device)):
            plan = sized.plan(device)
            yield from (step.spec for step in plan.steps)
            # `mma` takes calls whose sums of dq would be mostly padding.
            if gradients and plan.family == "wgmma":
                other = replace(sized, options=options._replace(config="mma"))
                yield from (step.spec for step in other.plan(device).steps)


def _with_tiles_of_wgmma(call: Call, device: DeviceInfo) -> Iterator[Call]:
    """Yield the call with each tile of `wgmma` that some size of it gets.

    Backward there is one tile for a head.
    """
    forward = call.options.direction == "forward" and call.options.config is None
    if forward and call.plan(device).family == "wgmma":
        for tile in configs.wgmma_tiles(call.head_dim, call.head_dim_v):
            yield replace(call, options=call.options._replace(config=tile))


def _from_short_to_long(call: Call, device: DeviceInfo) -> Iterator[Call]:
    """Yield calls from less than a tile to a large one for each multiprocessor.

    How many blocks there would be decides about a tile's rows. With many single
    queries, dq is not summed by atomics; with few queries and many keys, it is by many
    blocks.
    """
    length = 16
    if call.options.direction == "backward":
        most = 128 * device.multiprocessors
        yield replace(call, batch=1, seqlen_q=length, seqlen_k=most)
    while length <= 128 * device.multiprocessors:
        long = replace(call, seqlen_k=length)
        yield replace(long, batch=1, heads_q=1, heads_kv=1, seqlen_q=length)
        if call.options.direction == "backward":
            yield replace(long, batch=64, seqlen_q=1)
        length *= 2
