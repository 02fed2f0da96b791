"""The public functions: exact attention, its gradients, and how it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import cpu, launch
from .device import Device
from .plan import Plan
from .problem import Options
from .validate import check_bias_grad, gather

Window = tuple[int | None, int | None]


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    q_lengths: Any = None,
    k_lengths: Any = None,
    layout: str = "bshd",
    precision: str | None = None,
    out: Any = None,
    return_lse: bool = False,
    config: Any = None,
) -> Any:
    """Exact softmax attention, ``softmax(q kᵀ · scale + bias) v``, in O(S) memory.

    The logits are computed tile by tile with a running maximum and sum [1]_, [2]_
    and never stored. Memory is that of the output.

    Parameters
    ----------
    q : array, shape (..., seqlen_q, heads_q, head_dim)
        Queries. Any number of leading batch axes; a 2-D array is one head,
        (seqlen, head_dim). float16, bfloat16, float32 or float64, any strides.
    k : array, shape (..., seqlen_k, heads_kv, head_dim)
        Keys. ``heads_q`` is a multiple of ``heads_kv``; query head h reads kv head
        ``h // (heads_q // heads_kv)``.
    v : array, shape (..., seqlen_k, heads_kv, head_dim_v)
        Values.
    causal : bool or "top_left", default False
        True: query i sees keys ``j <= i + seqlen_k - seqlen_q`` (the last query sees
        every key). "top_left": ``j <= i``.
    window : (left, right), optional
        Query i sees keys ``i + off - left <= j <= i + off + right``, both ends
        included, where ``off`` is the diagonal's offset: 0 for ``causal="top_left"``,
        else ``seqlen_k - seqlen_q``. None or -1 on a side is no limit.
    scale : float, optional
        Factor of ``q kᵀ``; default ``1 / sqrt(head_dim)``.
    softcap : float, default 0
        If positive, logits become ``softcap * tanh(logit / softcap)``.
    alibi_slopes : float32 array, shape (heads_q,) or (..., heads_q), optional
        Adds ``-slope * |i + off - j|`` to the logits.
    bias : floating array, broadcastable to (..., heads_q, seqlen_q, seqlen_k), optional
        Added to the logits; may hold -inf.
    mask : bool array, broadcastable to (..., heads_q, seqlen_q, seqlen_k), optional
        True keeps a pair of query and key, False hides it.
    q_lengths, k_lengths : int32 or int64 array, shape of the batch axes, optional
        The valid prefix of each sequence. Rows past it give 0; keys past it are
        not read. The diagonal's offset is then ``k_length - q_length``.
    layout : {"bshd", "bhsd"}, default "bshd"
        "bhsd" takes and returns (..., heads, seqlen, head_dim). Neither copies.
    precision : {None, "tf32"}
        "tf32" allows tensor cores with 10-bit mantissas for float32 arrays.
    out : array, shape (..., seqlen_q, heads_q, head_dim_v), optional
        Where the result is written; must not overlap the inputs.
    return_lse : bool, default False
        Also return the log-sum-exp of each row.
    config : str or tile, optional
        Forces a kernel family ("simt", "mma", "wgmma") or a tile (a `SimtTile`,
        `MmaTile` or `WgmmaTile` of `cupy_flash.configs`), for benchmarks and tests.

    Returns
    -------
    out : array, shape (..., seqlen_q, heads_q, head_dim_v), dtype of q
        A row that sees no key is 0.
    lse : array, shape (..., heads_q, seqlen_q), float32 (float64 for float64 inputs)
        Natural logarithm of the sum of exponentials, -inf for a row that sees no
        key. Only with ``return_lse=True``.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind, dtypes differ, or NumPy and GPU arrays
        are mixed.
    ValueError
        If shapes disagree or a value is out of range.

    Notes
    -----
    CuPy arrays, and any object with ``__dlpack__`` on a CUDA device, are computed on
    that device in the current stream, and come back as CuPy arrays. NumPy arrays are
    computed on the CPU.

    References
    ----------
    .. [1] T. Dao, D. Fu, S. Ermon, A. Rudra, C. Ré, "FlashAttention: Fast and
       Memory-Efficient Exact Attention with IO-Awareness", NeurIPS 2022.
    .. [2] M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax",
       arXiv:1805.02867.
    """
    device, arrays = gather(
        {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes, "bias": bias,
         "mask": mask, "q_lengths": q_lengths, "k_lengths": k_lengths, "out": out},
        required=3,
    )  # fmt: skip
    options = Options(
        "forward", causal, window, scale, softcap, layout, precision, return_lse,
        config=config,
    )  # fmt: skip
    return _run(device, arrays, options)


def flash_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    causal: bool | str = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    q_lengths: Any = None,
    k_lengths: Any = None,
    layout: str = "bshd",
    precision: str | None = None,
    dlse: Any = None,
    bias_grad: bool = False,
    deterministic: bool = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    config: Any = None,
) -> Any:
    """Gradients of `flash_attention`, recomputing the logits tile by tile [1]_.

    Arguments that `flash_attention` has too must be given as they were given there.

    Parameters
    ----------
    dout : array, shape and dtype of out
        Gradient with respect to the output.
    q, k, v : array
        The inputs of the forward pass.
    out : array, shape (..., seqlen_q, heads_q, head_dim_v)
        The output of the forward pass.
    lse : array, shape (..., heads_q, seqlen_q), float32 (float64 for float64 inputs)
        The log-sum-exp of the forward pass (``return_lse=True``).
    dlse : array, shape and dtype of lse, optional
        Gradient with respect to lse; None is zero.
    bias_grad : bool, default False
        Also return the gradient with respect to `bias`.
    deterministic : bool, default False
        Give bitwise the same result in every run.
    dq, dk, dv : array, shapes and dtypes of q, k, v, optional
        Where the gradients are written.

    Returns
    -------
    dq, dk, dv : array, shapes and dtypes of q, k, v
        Keys that no query sees have gradient 0, and so have rows that see no key.
    dbias : array, shape and dtype of bias
        Summed over the axes in which `bias` was broadcast. Only with
        ``bias_grad=True``.

    Raises
    ------
    TypeError, ValueError
        As `flash_attention`.

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and
       Work Partitioning", arXiv:2307.08691.
    """
    device, arrays = gather(
        {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse, "dlse": dlse,
         "alibi_slopes": alibi_slopes, "bias": bias, "mask": mask,
         "q_lengths": q_lengths, "k_lengths": k_lengths,
         "dq": dq, "dk": dk, "dv": dv},
        required=6,
    )  # fmt: skip
    options = Options(
        "backward", causal, window, scale, softcap, layout, precision,
        bias_grad=bias_grad, deterministic=deterministic, config=config,
    )  # fmt: skip
    return _run(device, arrays, options)


def flash_attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    q_lengths: Any = None,
    k_lengths: Any = None,
    layout: str = "bshd",
    precision: str | None = None,
    out: Any = None,
    return_lse: bool = False,
    bias_grad: bool = False,
    deterministic: bool = False,
    config: Any = None,
) -> tuple[Any, Callable[..., Any]]:
    """Attention and the function that pulls gradients back through it.

    Parameters are those of `flash_attention` and `flash_attention_backward`.

    Returns
    -------
    out : array, or (out, lse) with ``return_lse=True``
        What `flash_attention` returns.
    vjp : callable
        ``vjp(dout, dlse=None)`` returns what `flash_attention_backward` returns. It
        keeps the arrays of the call, which must not be changed in between.
    """
    check_bias_grad(bias_grad, bias)
    same = dict(
        causal=causal, window=window, scale=scale, softcap=softcap,
        alibi_slopes=alibi_slopes, bias=bias, mask=mask, q_lengths=q_lengths,
        k_lengths=k_lengths, layout=layout, precision=precision, config=config,
    )  # fmt: skip
    out, lse = flash_attention(q, k, v, **same, out=out, return_lse=True)

    def vjp(dout: Any, dlse: Any = None) -> Any:
        return flash_attention_backward(
            dout, q, k, v, out, lse, **same,
            dlse=dlse, bias_grad=bias_grad, deterministic=deterministic,
        )  # fmt: skip

    return ((out, lse) if return_lse else out), vjp


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    q_lengths: Any = None,
    k_lengths: Any = None,
    layout: str = "bshd",
    precision: str | None = None,
    out: Any = None,
    return_lse: bool = False,
    dlse: Any = None,
    bias_grad: bool = False,
    deterministic: bool = False,
    config: Any = None,
    direction: str = "forward",
    device: str | None = None,
) -> Plan:
    """Say how a call would be computed, without computing it.

    Parameters are those of `flash_attention` and `flash_attention_backward`, without
    what backward takes from forward and the arrays it writes, and

    direction : {"forward", "backward"}, default "forward"
    device : str, optional
        A GPU that need not be there, such as ``"sm_86"``; the arrays may then be
        NumPy arrays. Default: the device that the arrays lie on.

    Returns
    -------
    Plan
        The kernels, their tiles and grids, the workspace, and the reason for each
        choice; ``print`` shows it.

    Raises
    ------
    TypeError, ValueError
        As `flash_attention`; ValueError too if the arrays lie on the host and no
        `device` is named.
    """
    owner, arrays = gather(
        {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes, "bias": bias,
         "mask": mask, "q_lengths": q_lengths, "k_lengths": k_lengths,
         "dlse": dlse, "out": out},
        required=3,
    )  # fmt: skip
    options = Options(
        direction, causal, window, scale, softcap, layout, precision,
        return_lse, bias_grad, deterministic, config,
    )  # fmt: skip
    return launch.explain(owner, arrays, options, device)


def _run(device: Device | None, arrays: dict[str, Any], options: Options) -> Any:
    if device is None:
        results = cpu.run(arrays, options)
    else:
        results = launch.run(device, arrays, options)
    return results if len(results) > 1 else results[0]
