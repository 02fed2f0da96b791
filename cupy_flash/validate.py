"""From arrays and options to a `Problem`; the errors a user can cause are here.

Only what depends on the device or on addresses is refused later. The functions see
descriptions of arrays, never their data, so that their result can be kept for the
next call with the same shapes and options. The exceptions are lengths that lie on
the host, whose values are checked.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping

import numpy as np

from .configs import FAMILIES, MmaTile, SimtTile, WgmmaTile
from .device import Device, owner
from .dtypes import ELEMENT_TYPES, FLOAT_NAMES, accumulator
from .problem import ArrayInfo, Operand, Options, Problem

_LENGTH_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
_MAX_SEQLEN = 2**30
# How long NumPy searches for a common element before it says that there is one.
_OVERLAP_WORK = 10_000


def make_problem(arrays: Mapping[str, ArrayInfo], options: Options) -> Problem:
    """Check a call and describe it.

    Parameters
    ----------
    arrays : mapping of str to ArrayInfo
        The arrays of the call by argument name; absent ones left out.
    options : Options
        All other arguments.

    Raises
    ------
    TypeError
        If a dtype or the type of an option is wrong.
    ValueError
        If shapes disagree or an option's value is out of range.
    """
    if options.layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout is {options.layout!r}; accepted: 'bshd', 'bhsd'")
    dtype = _common_dtype(arrays)
    precision = _precision(options.precision, dtype)
    _check_config(options.config)
    for flag in ("return_lse", "bias_grad", "deterministic"):
        if not isinstance(getattr(options, flag), (bool, np.bool_)):
            raise TypeError(
                f"{flag} is a {type(getattr(options, flag)).__name__}; accepted: bool"
            )
    q, k, v = (_sequence_operand(n, arrays[n], options.layout) for n in "qkv")
    ranks = {len(arrays[name].shape) for name in "qkv"}
    if len(ranks) != 1:
        raise ValueError(
            "q, k and v must have the same number of axes; they have shapes "
            + ", ".join(str(arrays[name].shape) for name in "qkv")
        )
    _check_shapes(q, k, v, options.layout)
    batch = q.shape[:-3]
    seqlen_q, heads_q, head_dim = q.shape[-3:]
    seqlen_k, heads_kv = k.shape[-3:-1]
    head_dim_v = v.shape[-1]
    single_head = len(arrays["q"].shape) == 2
    left, right, top_left = _band(options.causal, options.window)

    operands = [q, k, v]
    if "alibi_slopes" in arrays:
        operands.append(_slopes(arrays["alibi_slopes"], batch, heads_q))
    logits = (*batch, heads_q, seqlen_q, seqlen_k)
    if "bias" in arrays:
        if arrays["bias"].dtype not in ELEMENT_TYPES:
            raise TypeError(
                f"bias has dtype {arrays['bias'].dtype}; accepted: {FLOAT_NAMES} "
                "(a boolean mask goes to mask=)"
            )
        operands.append(_broadcast("bias", arrays["bias"], logits, single_head))
    if "mask" in arrays:
        if arrays["mask"].dtype != np.bool_:
            raise TypeError(
                f"mask has dtype {arrays['mask'].dtype}; accepted: bool, True keeps "
                "(an additive array goes to bias=)"
            )
        operands.append(_broadcast("mask", arrays["mask"], logits, single_head))
    for name in ("q_lengths", "k_lengths"):
        if name in arrays:
            operands.append(_lengths(name, arrays[name], batch))

    sums = accumulator(dtype)
    lse = (*batch, heads_q, seqlen_q)
    lse_given = lse[:-2] + lse[-1:] if single_head else lse
    sequences = {
        "out": (*batch, seqlen_q, heads_q, head_dim_v),
        "dq": q.shape,
        "dk": k.shape,
        "dv": v.shape,
    }
    if options.direction == "forward":
        outputs = ["out"]
        if options.return_lse:
            operands.append(_contiguous("lse", lse, sums))
    else:
        outputs = ["dq", "dk", "dv"]
        for name in ("out", "dout"):
            _expect_dtype(name, arrays[name], dtype)
            operands.append(
                _expect_shape(
                    name,
                    _sequence_operand(name, arrays[name], options.layout),
                    sequences["out"],
                    arrays[name],
                    options.layout,
                    single_head,
                )
            )
        for name in ("lse", "dlse"):
            if name in arrays:
                _expect_dtype(name, arrays[name], sums)
                if arrays[name].shape != lse_given:
                    raise ValueError(
                        f"{name} has shape {arrays[name].shape}; expected {lse_given}, "
                        "which is (..., heads, seqlen_q)"
                    )
                strides = arrays[name].strides
                if single_head:
                    strides = (0, *strides)
                operands.append(
                    Operand(name, lse, strides, sums, arrays[name].misalignment)
                )
        if options.bias_grad:
            operands.append(_bias_gradient(arrays, logits, single_head))
    for name in outputs:
        expected = sequences[name]
        if name not in arrays:
            shape = _given_shape(expected, options.layout, single_head)
            info = ArrayInfo(shape, contiguous_strides(shape, dtype), dtype)
            operands.append(_sequence_operand(name, info, options.layout))
            continue
        _expect_dtype(name, arrays[name], dtype)
        operands.append(
            _expect_shape(
                name,
                _sequence_operand(name, arrays[name], options.layout),
                expected,
                arrays[name],
                options.layout,
                single_head,
            )
        )
        _check_writable(name, arrays[name])

    return Problem(
        direction=options.direction,
        dtype=dtype,
        batch_shape=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        layout=options.layout,
        single_head=single_head,
        scale=_scale(options.scale, head_dim, sums),
        softcap=_softcap(options.softcap, sums),
        left=left,
        right=right,
        top_left=top_left,
        precision=precision,
        return_lse=options.return_lse,
        bias_grad=options.bias_grad,
        deterministic=options.deterministic,
        config=options.config,
        bias_shape=arrays["bias"].shape if "bias" in arrays else None,
        operands=tuple(operands),
    )


def check_bias_grad(bias_grad: bool, bias: object) -> None:
    """Raise ValueError if the gradient of a bias that isn't there is asked for."""
    if bias_grad and bias is None:
        raise ValueError("bias_grad=True needs a bias")


def check_overlap(name: str, views: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError if the output `name` shares memory with another array.

    The views stand for the arrays of a call; their data isn't read.
    """
    for other, view in views.items():
        if other != name and np.may_share_memory(view, views[name], _OVERLAP_WORK):
            raise ValueError(
                f"{name} shares memory with {other}; outputs must not overlap inputs "
                "or each other"
            )


def check_length_values(name: str, lengths: np.ndarray, limit: int) -> None:
    """Raise ValueError unless every length on the host is in ``[0, limit]``."""
    if lengths.size and not (0 <= lengths.min() and lengths.max() <= limit):
        raise ValueError(
            f"{name} has values from {lengths.min()} to {lengths.max()}; accepted: "
            f"0 to the sequence length {limit}"
        )


def contiguous_strides(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    """Return the strides in bytes of a C-contiguous array."""
    strides, step = [], dtype.itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def describe_host(array: np.ndarray) -> ArrayInfo:
    """Describe a NumPy array; NumPy itself copes with any alignment."""
    return ArrayInfo(array.shape, array.strides, array.dtype)


def output_shape(problem: Problem, name: str) -> tuple[int, ...]:
    """Return the shape in which the user sees the output `name`."""
    shape = problem.operand(name).shape
    if name == "dbias":
        return problem.bias_shape
    if name == "lse":
        return shape[:-2] + shape[-1:] if problem.single_head else shape
    return _given_shape(shape, problem.layout, problem.single_head)


def _common_dtype(arrays: Mapping[str, ArrayInfo]) -> np.dtype:
    dtypes = [arrays[name].dtype for name in "qkv"]
    named = f"q is {dtypes[0]}, k is {dtypes[1]}, v is {dtypes[2]}"
    if not dtypes[0] == dtypes[1] == dtypes[2]:
        raise TypeError(f"q, k and v must have one dtype: {named}")
    if dtypes[0] not in ELEMENT_TYPES:
        raise TypeError(f"{named}; accepted dtypes: {FLOAT_NAMES}")
    return dtypes[0]


def _precision(precision: str | None, dtype: np.dtype) -> str | None:
    if precision not in (None, "tf32"):
        raise ValueError(f"precision is {precision!r}; accepted: None, 'tf32'")
    if precision == "tf32" and dtype != np.float32:
        raise ValueError(f"precision='tf32' is for float32 arrays; these are {dtype}")
    return precision


def _sequence_operand(name: str, info: ArrayInfo, layout: str) -> Operand:
    """View q, k, v or an array like them as (..., seqlen, heads, head_dim)."""
    shape, strides = info.shape, info.strides
    if len(shape) < 2:
        raise ValueError(
            f"{name} has shape {shape}; expected (seqlen, head_dim) or {_axes(layout)}"
        )
    if len(shape) == 2:
        shape = (shape[0], 1, shape[1])
        strides = (strides[0], 0, strides[1])
    elif layout == "bhsd":
        shape = (*shape[:-3], shape[-2], shape[-3], shape[-1])
        strides = (*strides[:-3], strides[-2], strides[-3], strides[-1])
    return Operand(name, shape, strides, info.dtype, info.misalignment)


def _given_shape(
    shape: tuple[int, ...], layout: str, single_head: bool
) -> tuple[int, ...]:
    """Undo `_sequence_operand` for a shape."""
    if single_head:
        return (shape[0], shape[2])
    if layout == "bhsd":
        return (*shape[:-3], shape[-2], shape[-3], shape[-1])
    return shape


def _axes(layout: str) -> str:
    if layout == "bhsd":
        return "(..., heads, seqlen, head_dim)"
    return "(..., seqlen, heads, head_dim)"


def _check_shapes(q: Operand, k: Operand, v: Operand, layout: str) -> None:
    axes = _axes(layout)
    for name, other in (("k", k), ("v", v)):
        if other.shape[:-3] != q.shape[:-3]:
            raise ValueError(
                f"{name} has batch axes {other.shape[:-3]}, q has {q.shape[:-3]}; they "
                "must be equal (broadcast_to makes them so without a copy)"
            )
    if k.shape[-3] != v.shape[-3]:
        raise ValueError(
            f"k has sequence length {k.shape[-3]}, v has {v.shape[-3]}; they must be "
            f"equal (layout {axes})"
        )
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"k has {k.shape[-2]} heads, v has {v.shape[-2]}; they must be equal "
            f"(layout {axes})"
        )
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if heads_q == 0 or heads_kv == 0 or heads_q % heads_kv:
        raise ValueError(
            f"q has {heads_q} heads and k and v have {heads_kv}; the number of query "
            f"heads must be a positive multiple of the number of kv heads "
            f"(layout {axes})"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q has head_dim {q.shape[-1]}, k has {k.shape[-1]}; they must be equal"
        )
    for operand in (q, v):
        size = operand.shape[-1]
        if size < 1:
            raise ValueError(
                f"{operand.name} has head_dim {size}; it must be at least 1"
            )
    for operand in (q, k):
        if operand.shape[-3] > _MAX_SEQLEN:
            raise ValueError(
                f"{operand.name} has sequence length {operand.shape[-3]}; at most "
                f"{_MAX_SEQLEN} is supported"
            )


def _band(
    causal: bool | str, window: tuple[int | None, int | None] | None
) -> tuple[int | None, int | None, bool]:
    """Return the bounds of ``j - i - off`` as (left, right), and top_left."""
    if isinstance(causal, str):
        if causal != "top_left":
            raise ValueError(f"causal is {causal!r}; accepted: False, True, 'top_left'")
    elif not isinstance(causal, (bool, np.bool_)):
        raise TypeError(
            f"causal is a {type(causal).__name__}; accepted: False, True, 'top_left'"
        )
    left = right = None
    if window is not None:
        try:
            left, right = (None if w is None else operator.index(w) for w in window)
        except (TypeError, ValueError):
            raise TypeError(
                f"window is {window!r}; accepted: None or (left, right), each an int "
                "or None"
            ) from None
        for name, value in (("left", left), ("right", right)):
            if value is not None and value < -1:
                raise ValueError(
                    f"window's {name} side is {value}; accepted: 0 or more, or -1 or "
                    "None for no limit"
                )
        left = None if left == -1 else left
        right = None if right == -1 else right
    if causal:
        right = 0
    return left, right, causal == "top_left"


def _real(name: str, value: float) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(
        value, (int, float, np.integer, np.floating)
    ):
        raise TypeError(f"{name} is a {type(value).__name__}; accepted: a real number")
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}; it must be finite")
    return value


def _scale(scale: float | None, head_dim: int, sums: np.dtype) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    value = _real("scale", scale)
    if abs(value) > float(np.finfo(sums).max):
        raise ValueError(f"scale is {value}, which is beyond {sums}")
    return value


def _softcap(softcap: float, sums: np.dtype) -> float:
    value = _real("softcap", softcap)
    smallest, largest = float(np.finfo(sums).tiny), float(np.finfo(sums).max)
    if value != 0 and not smallest <= value <= largest:
        raise ValueError(
            f"softcap is {value}; accepted: 0 (off) or a positive number within the "
            f"range of {sums}"
        )
    return value


def _broadcast(
    name: str, info: ArrayInfo, target: tuple[int, ...], single_head: bool
) -> Operand:
    shape, strides = info.shape, info.strides
    missing = len(target) - len(shape)
    padded = (1,) * missing + shape
    if missing < 0 or any(a not in (1, b) for a, b in zip(padded, target, strict=True)):
        what = target[-2:] if single_head else target
        raise ValueError(
            f"{name} has shape {shape}, which can't be broadcast to {what}, the shape "
            "(..., heads, seqlen_q, seqlen_k) of the logits"
        )
    strides = tuple(
        0 if size == 1 else stride
        for size, stride in zip(padded, (0,) * missing + strides, strict=True)
    )
    return Operand(name, target, strides, info.dtype, info.misalignment)


def _slopes(info: ArrayInfo, batch: tuple[int, ...], heads: int) -> Operand:
    if info.dtype != np.float32:
        raise TypeError(f"alibi_slopes has dtype {info.dtype}; accepted: float32")
    if info.shape not in ((heads,), (*batch, heads)):
        raise ValueError(
            f"alibi_slopes has shape {info.shape}; accepted: {(heads,)} or "
            f"{(*batch, heads)}"
        )
    strides = (0,) * (len(batch) + 1 - len(info.shape)) + info.strides
    return Operand(
        "alibi_slopes", (*batch, heads), strides, info.dtype, info.misalignment
    )


def _lengths(name: str, info: ArrayInfo, batch: tuple[int, ...]) -> Operand:
    if info.dtype not in _LENGTH_DTYPES:
        raise TypeError(f"{name} has dtype {info.dtype}; accepted: int32, int64")
    if info.shape != batch:
        raise ValueError(
            f"{name} has shape {info.shape}; expected {batch}, the batch axes"
        )
    return Operand(name, batch, info.strides, info.dtype, info.misalignment)


def _contiguous(name: str, shape: tuple[int, ...], dtype: np.dtype) -> Operand:
    return Operand(name, shape, contiguous_strides(shape, dtype), dtype)


def _bias_gradient(
    arrays: Mapping[str, ArrayInfo], logits: tuple[int, ...], single_head: bool
) -> Operand:
    bias = arrays.get("bias")
    check_bias_grad(True, bias)
    dense = ArrayInfo(
        bias.shape, contiguous_strides(bias.shape, bias.dtype), bias.dtype
    )
    return _broadcast("dbias", dense, logits, single_head)


def _expect_dtype(name: str, info: ArrayInfo, dtype: np.dtype) -> None:
    if info.dtype != dtype:
        raise TypeError(f"{name} has dtype {info.dtype}; expected {dtype}")


def _expect_shape(
    name: str,
    operand: Operand,
    expected: tuple[int, ...],
    info: ArrayInfo,
    layout: str,
    single_head: bool,
) -> Operand:
    wanted = _given_shape(expected, layout, single_head)
    if info.shape != wanted:
        raise ValueError(f"{name} has shape {info.shape}; expected {wanted}")
    return operand


def _check_config(config: object) -> None:
    known = isinstance(config, str) and config in FAMILIES
    known = known or isinstance(config, (MmaTile, SimtTile, WgmmaTile))
    if config is not None and not known:
        raise ValueError(
            f"config is {config!r}; accepted: None, one of the families {FAMILIES}, or "
            "a tile of cupy_flash.configs"
        )


def _check_writable(name: str, info: ArrayInfo) -> None:
    if 0 not in info.shape and any(
        stride == 0 and size > 1
        for size, stride in zip(info.shape, info.strides, strict=True)
    ):
        raise ValueError(
            f"{name} has shape {info.shape} and strides {info.strides}: an output must "
            "not be a broadcast view"
        )


def gather(
    arrays: Mapping[str, object], required: int
) -> tuple[Device | None, dict[str, object]]:
    """Return the device that all arrays lie on, None for the host, and the arrays.

    Absent arrays (None) are left out, which the first `required` ones may not be;
    foreign ones are viewed as CuPy arrays.

    Raises
    ------
    TypeError
        If an argument isn't an array, or some lie on the host and some don't.
    ValueError
        If the arrays lie on two devices.
    """
    present: dict[str, object] = {}
    common: Device | None = None
    for name, array in arrays.items():
        if array is None and len(present) >= required:
            continue
        device, array = owner(name, array)
        if device is not common:
            if present:
                raise _not_together(next(iter(present)), common, name, device)
            common = device
        present[name] = array
    return common, present


def _not_together(
    first: str, common: Device | None, name: str, device: Device | None
) -> Exception:
    """Return the error of two arrays that don't lie on one device."""
    if device is None or common is None:
        host, other = (name, first) if device is None else (first, name)
        return TypeError(
            f"{host} is a NumPy array and {other} lies on a GPU; all arrays of a call "
            "must be of one kind"
        )
    return ValueError(
        f"{first} lies on {_place(common)} and {name} on {_place(device)}; all arrays "
        "of a call must lie on one device"
    )


def _place(device: Device) -> str:
    return f"device {getattr(device, 'index', device)}"
