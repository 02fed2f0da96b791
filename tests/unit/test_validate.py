"""Every error that a user can cause, with the words that let the user mend it.

A message names the argument, what came and what is accepted. The checks are for these
facts, not for sentences.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_flash import (
    flash_attention,
    flash_attention_backward,
    flash_attention_vjp,
)

bfloat16 = ml_dtypes.bfloat16
BATCH, SQ, SK, HQ, HKV, D, DV = 2, 4, 5, 6, 3, 8, 7
OUT, LSE = (BATCH, SQ, HQ, DV), (BATCH, HQ, SQ)


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def call(direction: str, **changes: Any) -> Any:
    """A call that is right in everything but the changes."""
    arguments: dict[str, Any] = {
        "q": zeros(BATCH, SQ, HQ, D),
        "k": zeros(BATCH, SK, HKV, D),
        "v": zeros(BATCH, SK, HKV, DV),
    }
    if direction == "backward":
        arguments |= {"dout": zeros(*OUT), "out": zeros(*OUT), "lse": zeros(*LSE)}
    arguments |= changes
    function: Callable[..., Any] = {
        "forward": flash_attention,
        "backward": flash_attention_backward,
        "vjp": flash_attention_vjp,
    }[direction]
    return function(**arguments)


def says(error: BaseException, *facts: str) -> None:
    """Every fact is a regular expression that the message must match."""
    message = str(error)
    for fact in facts:
        assert re.search(fact, message), f"{fact!r} isn't in the message: {message}"
    assert len(message) < 600, f"nobody reads that far: {message}"


def test_the_call_is_right_without_changes() -> None:
    assert call("forward").shape == OUT
    assert [x.shape[-1] for x in call("backward")] == [D, D, DV]
    assert call("vjp")[0].shape == OUT


# Changes to a right call, the error, and what its message says. They hold for forward
# and backward alike.
COMMON: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    # Wrong kinds of arrays
    "q_list": ({"q": [[0.0] * 8]}, TypeError, (r"\bq\b", "list", "NumPy")),
    "k_list": ({"k": [[0.0] * 8]}, TypeError, (r"\bk\b", "list", "NumPy")),
    "v_none": ({"v": None}, TypeError, (r"\bv\b", "NoneType")),
    "q_number": ({"q": 1.0}, TypeError, (r"\bq\b", "float", "NumPy")),
    "bias_number": ({"bias": 1.0}, TypeError, (r"\bbias\b", "float", "NumPy")),
    "mask_list": ({"mask": [[True]]}, TypeError, (r"\bmask\b", "list", "NumPy")),
    "alibi_list": ({"alibi_slopes": [0.5] * HQ}, TypeError, ("alibi_slopes", "list")),
    "q_lengths_list": ({"q_lengths": [1, 2]}, TypeError, ("q_lengths", "list")),
    "k_lengths_number": ({"k_lengths": 3}, TypeError, ("k_lengths", "int")),
    # Dtypes of q, k, v
    "k_float64": (
        {"k": zeros(BATCH, SK, HKV, D, dtype=np.float64)},
        TypeError,
        (r"\bq\b.*\bk\b.*\bv\b", "float32.*float64.*float32"),
    ),
    "all_different": (
        {
            "q": zeros(BATCH, SQ, HQ, D, dtype=bfloat16),
            "v": zeros(BATCH, SK, HKV, DV, dtype=np.float16),
        },
        TypeError,
        (r"\bq\b.*\bk\b.*\bv\b", "bfloat16.*float32.*float16"),
    ),
    # Shapes of q, k, v
    "q_one_axis": ({"q": zeros(8)}, ValueError, (r"\bq\b", r"\(8,\)", "head_dim")),
    "q_no_axis": ({"q": zeros()}, ValueError, (r"\bq\b", r"\(\)", "head_dim")),
    "ranks": (
        {"k": zeros(SK, HKV, D)},
        ValueError,
        (r"\bq\b.*\bk\b.*\bv\b", r"\(2, 4, 6, 8\)", r"\(5, 3, 8\)"),
    ),
    "k_batch": (
        {"k": zeros(1, SK, HKV, D)},
        ValueError,
        (r"\bk\b", r"\bq\b", r"\(1,\)", r"\(2,\)", "broadcast_to"),
    ),
    "v_batch": (
        {"v": zeros(3, SK, HKV, DV)},
        ValueError,
        (r"\bv\b", r"\bq\b", r"\(3,\)", r"\(2,\)"),
    ),
    "v_length": (
        {"v": zeros(BATCH, 9, HKV, DV)},
        ValueError,
        (r"\bk\b", r"\bv\b", r"\b5\b", r"\b9\b"),
    ),
    "v_heads": (
        {"v": zeros(BATCH, SK, 6, DV)},
        ValueError,
        (r"\bk\b", r"\bv\b", r"\b3\b", r"\b6\b", "heads"),
    ),
    "k_head_dim": (
        {"k": zeros(BATCH, SK, HKV, 16)},
        ValueError,
        (r"\bq\b", r"\bk\b", r"\b8\b", r"\b16\b"),
    ),
    "head_dim_zero": (
        {"q": zeros(BATCH, SQ, HQ, 0), "k": zeros(BATCH, SK, HKV, 0)},
        ValueError,
        (r"\bq\b|\bk\b", r"\b0\b"),
    ),
    # Options
    "layout": ({"layout": "sbhd"}, ValueError, ("layout", "sbhd", "bshd", "bhsd")),
    "layout_none": ({"layout": None}, ValueError, ("layout", "None", "bshd", "bhsd")),
    "causal_word": (
        {"causal": "foo"},
        ValueError,
        ("causal", "foo", "True", "top_left"),
    ),
    "causal_none": ({"causal": None}, TypeError, ("causal", "None", "top_left")),
    "window_minus_3": ({"window": (-1, -3)}, ValueError, ("window", "-3", "-1")),
    "window_minus_8": ({"window": (7, -8)}, ValueError, ("window", "-8", "-1")),
    "window_left": ({"window": (-2, 0)}, ValueError, ("window", "-2", "-1")),
    "window_minus_2_causal": (
        {"window": (1, -2), "causal": True},
        ValueError,
        ("window", "-2", "-1"),
    ),
    "window_number": ({"window": 3}, TypeError, ("window", r"\b3\b", "left")),
    "window_real": ({"window": (1.5, 2)}, TypeError, ("window", "1.5", "int")),
    "window_word": ({"window": "ab"}, TypeError, ("window", "ab", "left")),
    "scale_nan": ({"scale": float("nan")}, ValueError, ("scale", "nan", "finite")),
    "scale_inf": ({"scale": float("-inf")}, ValueError, ("scale", "-inf", "finite")),
    "scale_word": ({"scale": "1"}, TypeError, ("scale", "str", "number")),
    "softcap_negative": ({"softcap": -2.5}, ValueError, ("softcap", "-2.5", "0")),
    "softcap_too_large": ({"softcap": 1e39}, ValueError, ("softcap", "float32")),
    "softcap_too_small": ({"softcap": 1e-40}, ValueError, ("softcap", "1e-40")),
    "scale_too_large": ({"scale": -1e39}, ValueError, ("scale", "float32")),
    "softcap_nan": ({"softcap": float("nan")}, ValueError, ("softcap", "nan")),
    "softcap_word": ({"softcap": "1"}, TypeError, ("softcap", "str", "number")),
    "precision": ({"precision": "high"}, ValueError, ("precision", "high", "tf32")),
    "config": ({"config": "no such"}, ValueError, ("config", "no such")),
    # ALiBi
    "alibi_shape": (
        {"alibi_slopes": zeros(HKV)},
        ValueError,
        ("alibi_slopes", r"\(3,\)", r"\(6,\)", r"\(2, 6\)"),
    ),
    "alibi_batch": (
        {"alibi_slopes": zeros(1, HQ)},
        ValueError,
        ("alibi_slopes", r"\(1, 6\)", r"\(2, 6\)"),
    ),
    "alibi_scalar": ({"alibi_slopes": zeros()}, ValueError, ("alibi_slopes", r"\(\)")),
    "alibi_float64": (
        {"alibi_slopes": zeros(HQ, dtype=np.float64)},
        TypeError,
        ("alibi_slopes", "float64", "float32"),
    ),
    # Bias and mask
    "bias_shape": (
        {"bias": zeros(HQ, SQ, SQ)},
        ValueError,
        (r"\bbias\b", r"\(6, 4, 4\)", r"\(2, 6, 4, 5\)"),
    ),
    "bias_kv_heads": (
        {"bias": zeros(BATCH, HKV, SQ, SK)},
        ValueError,
        (r"\bbias\b", r"\(2, 3, 4, 5\)", r"\(2, 6, 4, 5\)"),
    ),
    "bias_axes": (
        {"bias": zeros(1, BATCH, HQ, SQ, SK)},
        ValueError,
        (r"\bbias\b", r"\(1, 2, 6, 4, 5\)", r"\(2, 6, 4, 5\)"),
    ),
    "bias_zero": ({"bias": zeros(SQ, 0)}, ValueError, (r"\bbias\b", r"\(4, 0\)")),
    "bias_int": (
        {"bias": zeros(SQ, SK, dtype=np.int32)},
        TypeError,
        (r"\bbias\b", "int32", "float"),
    ),
    "bias_bool": (
        {"bias": zeros(SQ, SK, dtype=bool)},
        TypeError,
        (r"\bbias\b", "bool", "float", r"\bmask\b"),
    ),
    "mask_shape": (
        {"mask": zeros(SK, SQ, dtype=bool)},
        ValueError,
        (r"\bmask\b", r"\(5, 4\)", r"\(2, 6, 4, 5\)"),
    ),
    "mask_padding": (
        # A key padding mask without its two middle axes fits nowhere.
        {"mask": zeros(BATCH, SK, dtype=bool)},
        ValueError,
        (r"\bmask\b", r"\(2, 5\)", r"\(2, 6, 4, 5\)"),
    ),
    "mask_int": (
        {"mask": zeros(SQ, SK, dtype=np.uint8)},
        TypeError,
        (r"\bmask\b", "uint8", "bool"),
    ),
    "mask_float": (
        {"mask": zeros(SQ, SK)},
        TypeError,
        (r"\bmask\b", "float32", "bool", r"\bbias\b"),
    ),
    # Lengths
    "q_lengths_shape": (
        {"q_lengths": zeros(3, dtype=np.int32)},
        ValueError,
        ("q_lengths", r"\(3,\)", r"\(2,\)"),
    ),
    "k_lengths_shape": (
        {"k_lengths": zeros(dtype=np.int32)},
        ValueError,
        ("k_lengths", r"\(\)", r"\(2,\)"),
    ),
    "k_lengths_heads": (
        {"k_lengths": zeros(BATCH, HKV, dtype=np.int32)},
        ValueError,
        ("k_lengths", r"\(2, 3\)", r"\(2,\)"),
    ),
    "q_lengths_float": (
        {"q_lengths": zeros(BATCH)},
        TypeError,
        ("q_lengths", "float32", "int32", "int64"),
    ),
    "k_lengths_uint8": (
        {"k_lengths": zeros(BATCH, dtype=np.uint8)},
        TypeError,
        ("k_lengths", "uint8", "int32", "int64"),
    ),
    "q_lengths_large": (
        {"q_lengths": np.array([4, 5])},
        ValueError,
        ("q_lengths", r"\b5\b", r"\b4\b"),
    ),
    "k_lengths_large": (
        {"k_lengths": np.array([6, 0], np.int32)},
        ValueError,
        ("k_lengths", r"\b6\b", r"\b5\b"),
    ),
    "q_lengths_negative": (
        {"q_lengths": np.array([-1, 4])},
        ValueError,
        ("q_lengths", "-1", r"\b4\b"),
    ),
    "k_lengths_negative": (
        {"k_lengths": np.array([5, -2], np.int32)},
        ValueError,
        ("k_lengths", "-2", r"\b5\b"),
    ),
}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", COMMON)
def test_refuses(name: str, direction: str) -> None:
    changes, error, facts = COMMON[name]
    with pytest.raises(error) as raised:
        call(direction, **changes)
    assert type(raised.value) is error
    says(raised.value, *facts)


@pytest.mark.parametrize("name", ["k_float64", "v_batch", "causal_word", "mask_int"])
def test_vjp_refuses_at_once(name: str) -> None:
    """Not only when the function that it returns is called."""
    changes, error, facts = COMMON[name]
    with pytest.raises(error) as raised:
        call("vjp", **changes)
    says(raised.value, *facts)


@pytest.mark.parametrize(
    "dtype", [np.int32, np.uint8, bool, np.complex64, np.longdouble, object, "S4"]
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_dtypes_that_are_none_of_the_four(dtype: Any, direction: str) -> None:
    changes = {
        "q": zeros(BATCH, SQ, HQ, D, dtype=dtype),
        "k": zeros(BATCH, SK, HKV, D, dtype=dtype),
        "v": zeros(BATCH, SK, HKV, DV, dtype=dtype),
    }
    if direction == "backward":
        changes |= {n: zeros(*OUT, dtype=dtype) for n in ("out", "dout")}
    with pytest.raises(TypeError) as raised:
        call(direction, **changes)
    came = re.escape(str(np.dtype(dtype)))
    says(raised.value, r"\bq\b", came, "float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize(
    ("hq", "hkv"), [(8, 0), (33, 2), (3, 2), (2, 3), (0, 2), (1, 4)]
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_head_counts_are_named(hq: int, hkv: int, direction: str, layout: str) -> None:
    def make(tokens: int, heads: int, size: int) -> np.ndarray:
        axes = (tokens, heads) if layout == "bshd" else (heads, tokens)
        return zeros(BATCH, *axes, size)

    changes = {"q": make(SQ, hq, D), "k": make(SK, hkv, D), "v": make(SK, hkv, DV)}
    if direction == "backward":
        changes |= {"out": make(SQ, hq, DV), "dout": make(SQ, hq, DV)}
        changes |= {"lse": zeros(BATCH, hq, SQ)}
    with pytest.raises(ValueError) as raised:
        call(direction, layout=layout, **changes)
    says(raised.value, rf"\b{hq}\b", rf"\b{hkv}\b", "heads", r"\bq\b", r"\bk\b")


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_the_other_layout_is_noticed(layout: str) -> None:
    """Shapes that fit one layout only are refused under the other one."""
    q, k = zeros(1, 7, 2, 8), zeros(1, 5, 2, 8)
    if layout == "bshd":
        q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
    with pytest.raises(ValueError) as raised:
        flash_attention(q, k, k, layout=layout)
    says(raised.value, r"\b7\b", r"\b5\b", "heads")


# --- What only one direction takes ----------------------------------------------------

Wrong = dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]]
FORWARD: Wrong = {
    "out_shape": (
        {"out": zeros(BATCH, SQ, HQ, D)},
        ValueError,
        (r"\bout\b", r"\(2, 4, 6, 8\)", r"\(2, 4, 6, 7\)"),
    ),
    "out_layout": (
        {"out": zeros(BATCH, HQ, SQ, DV)},
        ValueError,
        (r"\bout\b", r"\(2, 6, 4, 7\)", r"\(2, 4, 6, 7\)"),
    ),
    "out_axes": (
        {"out": zeros(SQ, HQ, DV)},
        ValueError,
        (r"\bout\b", r"\(4, 6, 7\)", r"\(2, 4, 6, 7\)"),
    ),
    "out_dtype": (
        {"out": zeros(*OUT, dtype=np.float64)},
        TypeError,
        (r"\bout\b", "float64", "float32"),
    ),
    "out_list": ({"out": [0.0]}, TypeError, (r"\bout\b", "list")),
    "out_broadcast": (
        {"out": np.lib.stride_tricks.as_strided(zeros(7), OUT, (0, 0, 0, 4))},
        ValueError,
        (r"\bout\b", "broadcast"),
    ),
    "out_read_only": (
        {"out": np.broadcast_to(zeros(*OUT), OUT)},
        ValueError,
        (r"\bout\b", "read-only|writ"),
    ),
}
BACKWARD: Wrong = {
    "dout_shape": (
        {"dout": zeros(BATCH, SQ, HQ, D)},
        ValueError,
        (r"\bdout\b", r"\(2, 4, 6, 8\)", r"\(2, 4, 6, 7\)"),
    ),
    "dout_dtype": (
        {"dout": zeros(*OUT, dtype=np.float64)},
        TypeError,
        (r"\bdout\b", "float64", "float32"),
    ),
    "dout_number": ({"dout": 1.0}, TypeError, (r"\bdout\b", "float")),
    "dout_none": ({"dout": None}, TypeError, (r"\bdout\b", "None")),
    "out_shape": (
        {"out": zeros(BATCH, SK, HQ, DV)},
        ValueError,
        (r"\bout\b", r"\(2, 5, 6, 7\)", r"\(2, 4, 6, 7\)"),
    ),
    "out_dtype": (
        {"out": zeros(*OUT, dtype=bfloat16)},
        TypeError,
        (r"\bout\b", "bfloat16", "float32"),
    ),
    "out_none": ({"out": None}, TypeError, (r"\bout\b", "None")),
    "lse_shape": (
        {"lse": zeros(BATCH, SQ, HQ)},
        ValueError,
        (r"\blse\b", r"\(2, 4, 6\)", r"\(2, 6, 4\)"),
    ),
    "lse_dtype": (
        {"lse": zeros(*LSE, dtype=np.float64)},
        TypeError,
        (r"\blse\b", "float64", "float32"),
    ),
    "lse_none": ({"lse": None}, TypeError, (r"\blse\b", "None")),
    "dlse_shape": (
        {"dlse": zeros(BATCH, HQ, 1)},
        ValueError,
        (r"\bdlse\b", r"\(2, 6, 1\)", r"\(2, 6, 4\)"),
    ),
    "dlse_dtype": (
        {"dlse": zeros(*LSE, dtype=np.float16)},
        TypeError,
        (r"\bdlse\b", "float16", "float32"),
    ),
    "dlse_number": ({"dlse": 1.0}, TypeError, (r"\bdlse\b", "float")),
    "dq_shape": (
        {"dq": zeros(BATCH, SK, HQ, D)},
        ValueError,
        (r"\bdq\b", r"\(2, 5, 6, 8\)", r"\(2, 4, 6, 8\)"),
    ),
    "dk_query_heads": (
        {"dk": zeros(BATCH, SK, HQ, D)},
        ValueError,
        (r"\bdk\b", r"\(2, 5, 6, 8\)", r"\(2, 5, 3, 8\)"),
    ),
    "dv_shape": (
        {"dv": zeros(BATCH, SK, HKV, D)},
        ValueError,
        (r"\bdv\b", r"\(2, 5, 3, 8\)", r"\(2, 5, 3, 7\)"),
    ),
    "dq_dtype": (
        {"dq": zeros(BATCH, SQ, HQ, D, dtype=np.float16)},
        TypeError,
        (r"\bdq\b", "float16", "float32"),
    ),
    "dk_dtype": (
        {"dk": zeros(BATCH, SK, HKV, D, dtype=np.float64)},
        TypeError,
        (r"\bdk\b", "float64", "float32"),
    ),
    "dv_list": ({"dv": []}, TypeError, (r"\bdv\b", "list")),
    "dv_broadcast": (
        {
            "dv": np.lib.stride_tricks.as_strided(
                zeros(7), (BATCH, SK, HKV, DV), (0, 0, 0, 4)
            )
        },
        ValueError,
        (r"\bdv\b", "broadcast"),
    ),
    "dk_read_only": (
        {"dk": np.broadcast_to(zeros(BATCH, SK, HKV, D), (BATCH, SK, HKV, D))},
        ValueError,
        (r"\bdk\b", "read-only|writ"),
    ),
    "bias_grad_without_bias": (
        {"bias_grad": True},
        ValueError,
        ("bias_grad", r"\bbias\b"),
    ),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_refuses(name: str) -> None:
    changes, error, facts = FORWARD[name]
    with pytest.raises(error) as raised:
        call("forward", **changes)
    says(raised.value, *facts)


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_refuses(name: str) -> None:
    changes, error, facts = BACKWARD[name]
    with pytest.raises(error) as raised:
        call("backward", **changes)
    says(raised.value, *facts)


@pytest.mark.parametrize("name", ["dout_shape", "dout_dtype", "dlse_shape"])
def test_vjp_function_refuses(name: str) -> None:
    changes, error, facts = BACKWARD[name]
    _, vjp = call("vjp", return_lse=True)
    with pytest.raises(error) as raised:
        vjp(changes.get("dout", zeros(*OUT)), changes.get("dlse"))
    says(raised.value, *facts)


def test_vjp_refuses_bias_grad_without_bias_at_once() -> None:
    with pytest.raises(ValueError) as raised:
        call("vjp", bias_grad=True)
    says(raised.value, "bias_grad", r"\bbias\b")


def test_lse_of_float64_is_float64() -> None:
    changes = {
        "q": zeros(BATCH, SQ, HQ, D, dtype=np.float64),
        "k": zeros(BATCH, SK, HKV, D, dtype=np.float64),
        "v": zeros(BATCH, SK, HKV, DV, dtype=np.float64),
        "out": zeros(*OUT, dtype=np.float64),
        "dout": zeros(*OUT, dtype=np.float64),
    }
    with pytest.raises(TypeError) as raised:
        call("backward", **changes)
    says(raised.value, r"\blse\b", "float32", "float64")
    call("backward", lse=zeros(*LSE, dtype=np.float64), **changes)


def test_lse_of_halves_is_float32() -> None:
    changes = {
        "q": zeros(BATCH, SQ, HQ, D, dtype=bfloat16),
        "k": zeros(BATCH, SK, HKV, D, dtype=bfloat16),
        "v": zeros(BATCH, SK, HKV, DV, dtype=bfloat16),
        "out": zeros(*OUT, dtype=bfloat16),
        "dout": zeros(*OUT, dtype=bfloat16),
    }
    with pytest.raises(TypeError) as raised:
        call("backward", **changes, lse=zeros(*LSE, dtype=bfloat16))
    says(raised.value, r"\blse\b", "bfloat16", "float32")
    call("backward", **changes)


def test_one_head_of_two_axes() -> None:
    """Shapes in the messages are those that the user gave, with no axis added."""
    q, k = zeros(4, 8), zeros(5, 8)
    with pytest.raises(ValueError) as raised:
        flash_attention(q, k, k, out=zeros(4, 1, 8))
    says(raised.value, r"\bout\b", r"\(4, 1, 8\)", r"\(4, 8\)")
    with pytest.raises(ValueError) as raised:
        flash_attention(q, k, k, bias=zeros(5, 4))
    says(raised.value, r"\bbias\b", r"\(5, 4\)", r"\(4, 5\)")
    with pytest.raises(ValueError) as raised:
        flash_attention_backward(q, q, k, k, q, zeros(1, 4))
    says(raised.value, r"\blse\b", r"\(1, 4\)", r"\(4,\)")
    with pytest.raises(ValueError) as raised:
        flash_attention(q, k, k, k_lengths=np.array([5]))
    says(raised.value, "k_lengths", r"\(1,\)", r"\(\)")
    with pytest.raises(ValueError) as raised:
        # One head of two axes beside one of three: dk could have the shape of k only.
        flash_attention(q, k[:, None], k[:, None])
    says(raised.value, r"\(4, 8\)", r"\(5, 1, 8\)")
    with pytest.raises(ValueError) as raised:
        flash_attention(q, k, zeros(6, 8))
    says(raised.value, r"\b5\b", r"\b6\b")


def test_an_error_leaves_the_outputs_alone() -> None:
    out = np.full(OUT, 7, np.float32)
    with pytest.raises(ValueError, match="k_lengths"):
        call("forward", out=out, k_lengths=np.array([5, 6]))
    assert (out == 7).all()
    dq = np.full((BATCH, SQ, HQ, D), 7, np.float32)
    with pytest.raises(ValueError, match="dv"):
        call("backward", dq=dq, dv=zeros(1))
    assert (dq == 7).all()


def test_outputs_that_overlap() -> None:
    """A result written over an input would spoil the tiles that are still to come."""
    q, k, v = (zeros(2, 6, 3, 8) for _ in range(3))
    for name, x in (("q", q), ("k", k), ("v", v)):
        with pytest.raises(ValueError) as raised:
            flash_attention(q, k, v, out=x)
        says(raised.value, r"\bout\b", rf"\b{name}\b", "memory|overlap")
    out, lse = flash_attention(q, k, v, return_lse=True)
    for given in ({"dq": q}, {"dk": v[:, ::-1]}, {"dv": out}):
        (name,) = given
        with pytest.raises(ValueError) as raised:
            flash_attention_backward(zeros(2, 6, 3, 8), q, k, v, out, lse, **given)
        says(raised.value, rf"\b{name}\b", "memory|overlap")
    both = zeros(2, 6, 3, 8)
    with pytest.raises(ValueError) as raised:
        flash_attention_backward(out, q, k, v, out, lse, dk=both, dv=both)
    says(raised.value, r"\bdk\b", r"\bdv\b", "memory|overlap")


def test_options_come_by_name() -> None:
    q = zeros(4, 8)
    with pytest.raises(TypeError, match="positional"):
        flash_attention(q, q, q, True)
    with pytest.raises(TypeError, match="is_causal"):
        flash_attention(q, q, q, is_causal=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"window": (None, -1)},
        {"window": [2, 3]},
        {"window": (np.int64(2), np.int32(-1))},
        {"window": (-1, -1), "causal": True},
        {"window": (10**12, 0)},
        {"scale": np.float32(0.5)},
        {"scale": 0},
        {"scale": -1.0},
        {"softcap": 1},
        {"softcap": 0},
        {"causal": np.True_},
        {"alibi_slopes": zeros(BATCH, HQ)},
        {"bias": zeros()},
        {"bias": zeros(SK, dtype=np.float16)},
        {"bias": zeros(BATCH, 1, 1, SK, dtype=bfloat16)},
        {"bias": zeros(SQ, SK, dtype=np.float64)},
        {"mask": zeros(1, 1, dtype=bool)},
        {"q_lengths": np.array([0, 4], np.int32)},
        {"k_lengths": np.array([5, 0], np.int64)},
        {"precision": None, "config": None},
        {"precision": "tf32"},
    ],
    ids=lambda changes: "_".join(changes),
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_accepts(changes: dict[str, Any], direction: str) -> None:
    call(direction, **changes)
