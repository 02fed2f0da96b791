"""``python -m cupy_flash``: attention at a real size on whatever device there is."""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from . import flash_attention, flash_attention_backward

MIB = 2**20


@dataclass(frozen=True)
class Size:
    """The size of the demonstration."""

    batch: int
    seqlen: int
    heads: int
    head_dim: int

    def __str__(self) -> str:
        return (
            f"batch {self.batch}, sequence {self.seqlen}, {self.heads} heads of "
            f"{self.head_dim}"
        )

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass; backward has 2.5 times."""
        return 4 * self.batch * self.heads * self.seqlen**2 * self.head_dim


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
        tracemalloc.start()
        try:
            call()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


class Gpu:
    """CuPy on the current device."""

    size = Size(batch=4, seqlen=4096, heads=16, head_dim=64)
    dtypes = ("float16", "float32")

    def __init__(self, cupy: ModuleType) -> None:
        self.xp = cupy
        device = cupy.cuda.Device()
        self.name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()

    def seconds(self, call: Callable[[], Any]) -> float:
        """Time a call on the device, the median of five."""
        call()  # compiles
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


def best_device() -> Host | Gpu:
    """Return the GPU if CuPy is installed and sees one, else the CPU."""
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount() > 0:
            return Gpu(cupy)
    except Exception as error:  # CuPy raises whatever the driver says
        print(f"no GPU: {type(error).__name__}: {str(error).strip()}")
    return Host()


def first_head(x: Any) -> Any:
    """Return the first head of the first sequence in float64."""
    return x[0, :, 0].astype(np.float64)


def errors(
    xp: ModuleType, inputs: tuple[Any, ...], out: Any, gradients: tuple[Any, ...]
) -> tuple[float, float]:
    """Return the largest errors of a head against unfused float64.

    The first is that of the output, the second that of the gradients.
    """
    q, k, v, dout = map(first_head, inputs)
    scale = 1 / np.sqrt(q.shape[-1])
    logits = q @ k.T * scale
    p = xp.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    exact = p @ v
    dp = dout @ v.T
    ds = p * (dp - (dout * exact).sum(axis=-1, keepdims=True)) * scale
    pairs = zip(map(first_head, gradients), (ds @ k, ds.T @ q, p.T @ dout), strict=True)
    return (
        float(xp.abs(first_head(out) - exact).max()),
        max(float(xp.abs(ours - right).max()) for ours, right in pairs),
    )


def demonstrate(device: Host | Gpu) -> None:
    """Run forward and backward and print what they cost."""
    xp, size = device.xp, device.size
    print(f"{device.name}: {size}")
    print(
        f"{'dtype':<9}{'pass':<10}{'ms':>10}{'TFLOP/s':>9}{'peak MiB':>10}"
        f"{'S x S would take':>18}{'max error':>11}"
    )
    random = np.random.default_rng(0)
    shape = (size.batch, size.seqlen, size.heads, size.head_dim)
    for dtype in device.dtypes:
        q, k, v, dout = (
            xp.asarray(random.standard_normal(shape, dtype=np.float32)).astype(dtype)
            for _ in range(4)
        )
        out, lse = flash_attention(q, k, v, return_lse=True)
        gradients = flash_attention_backward(dout, q, k, v, out, lse)
        error = errors(xp, (q, k, v, dout), out, gradients)
        del gradients
        logits = size.batch * size.heads * size.seqlen**2 * q.itemsize

        def forward(q: Any = q, k: Any = k, v: Any = v) -> Any:
            return flash_attention(q, k, v)

        saved = (dout, q, k, v, out, lse)

        def backward(saved: tuple[Any, ...] = saved) -> Any:
            return flash_attention_backward(*saved)

        for call, flops, squares, wrong in (
            (forward, size.flops, 1, error[0]),
            (backward, 2.5 * size.flops, 2, error[1]),
        ):
            seconds = device.seconds(call)
            print(
                f"{dtype:<9}{call.__name__:<10}{1e3 * seconds:>10.2f}"
                f"{flops / seconds / 1e12:>9.2f}"
                f"{device.peak_bytes(call) / MIB:>10.0f}"
                f"{squares * logits / MIB:>14.0f} MiB{wrong:>11.1e}",
                flush=True,
            )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m cupy_flash",
        description="Run attention, forward and backward, at a real size on the GPU, "
        "or on the CPU where there is none, and print time, memory and error.",
    )
    parser.parse_args()
    demonstrate(best_device())


if __name__ == "__main__":
    main()
