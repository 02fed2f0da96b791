"""Attention at a real size on whatever device there is: time, memory and error."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from . import flash_attention, flash_attention_backward
from .device import CuPyDevice, import_cupy


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the demonstration."""

    batch: int
    seqlen: int
    heads: int
    head_dim: int

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass; backward has 2.5 times."""
        return 4 * self.batch * self.heads * self.seqlen**2 * self.head_dim


@dataclass(frozen=True, slots=True)
class Measurement:
    """One line of the table.

    Attributes
    ----------
    dtype, direction : str
    seconds : float
        Median time of a warm call.
    flops : float
        Floating-point operations of the call.
    peak_bytes : int
        The most memory that it had allocated, its results included.
    square_bytes : int
        What unfused attention would have stored of size seqlen x seqlen.
    error : float
        The largest difference from float64 in the first head.
    """

    dtype: str
    direction: str
    seconds: float
    flops: float
    peak_bytes: int
    square_bytes: int
    error: float


def traced_peak(call: Callable[[], Any]) -> int:
    """Return the most bytes that a call holds in Python's allocators."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Host:
    """NumPy on the CPU."""

    name = "CPU (NumPy)"
    xp: ModuleType = np
    size = Size(batch=1, seqlen=2048, heads=8, head_dim=64)
    dtypes = ("float32",)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Time a call."""
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def peak_bytes(self, call: Callable[[], Any]) -> int:
        """Return what a call has allocated at its peak."""
        return traced_peak(call)


class Gpu:
    """CuPy on the current device."""

    size = Size(batch=4, seqlen=4096, heads=16, head_dim=64)
    dtypes = ("float16", "float32")

    def __init__(self, device: CuPyDevice) -> None:
        self.xp = import_cupy()
        self.name = device.info.name

    def seconds(self, call: Callable[[], Any]) -> float:
        """Time a call on the device, the median of five."""
        call()
        times = []
        for _ in range(5):
            start, end = self.xp.cuda.Event(), self.xp.cuda.Event()
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(self.xp.cuda.get_elapsed_time(start, end) / 1e3)
        return sorted(times)[2]

    def peak_bytes(self, call: Callable[[], Any]) -> int:
        """Return what a call takes from CuPy's memory pool."""
        pool = self.xp.get_default_memory_pool()
        pool.free_all_blocks()
        before = pool.total_bytes()
        call()
        return pool.total_bytes() - before


def measure(device: Host | Gpu) -> Iterator[Measurement]:
    """Run forward and backward in each dtype and yield what they cost."""
    xp, size = device.xp, device.size
    random = np.random.default_rng(0)
    shape = (size.batch, size.seqlen, size.heads, size.head_dim)
    for dtype in device.dtypes:
        q, k, v, dout = (
            xp.asarray(random.standard_normal(shape, dtype=np.float32)).astype(dtype)
            for _ in range(4)
        )
        out, lse = flash_attention(q, k, v, return_lse=True)
        gradients = flash_attention_backward(dout, q, k, v, out, lse)
        out_error, gradient_error = errors(xp, (q, k, v, dout), out, gradients)
        del gradients
        square = size.batch * size.heads * size.seqlen**2 * q.itemsize

        def forward(q: Any = q, k: Any = k, v: Any = v) -> Any:
            return flash_attention(q, k, v)

        saved = (dout, q, k, v, out, lse)

        def backward(saved: tuple[Any, ...] = saved) -> Any:
            return flash_attention_backward(*saved)

        # Unfused backward holds the probabilities and their gradient.
        for call, flops, squares, error in (
            (forward, size.flops, 1, out_error),
            (backward, 2.5 * size.flops, 2, gradient_error),
        ):
            yield Measurement(
                dtype, call.__name__, device.seconds(call), flops,
                device.peak_bytes(call), squares * square, error,
            )  # fmt: skip


def errors(
    xp: ModuleType, inputs: tuple[Any, ...], out: Any, gradients: tuple[Any, ...]
) -> tuple[float, float]:
    """Return the largest errors of a head against unfused float64.

    The first is that of the output, the second that of the gradients.
    """
    q, k, v, dout = map(_first_head, inputs)
    scale = 1 / np.sqrt(q.shape[-1])
    logits = q @ k.T * scale
    p = xp.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    exact = p @ v
    dp = dout @ v.T
    ds = p * (dp - (dout * exact).sum(axis=-1, keepdims=True)) * scale
    pairs = zip(
        map(_first_head, gradients), (ds @ k, ds.T @ q, p.T @ dout), strict=True
    )
    return (
        float(xp.abs(_first_head(out) - exact).max()),
        max(float(xp.abs(ours - right).max()) for ours, right in pairs),
    )


def _first_head(x: Any) -> Any:
    """Return the first head of the first sequence in float64."""
    return x[0, :, 0].astype(np.float64)
