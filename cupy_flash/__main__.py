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
        print(f"no GPU: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
    return Host()


def one_head_error(xp: ModuleType, q: Any, k: Any, v: Any, out: Any) -> float:
    """Return the largest error of the first head against unfused float64."""
    q, k, v, out = (x[0, :, 0].astype(np.float64) for x in (q, k, v, out))
    logits = q @ k.T / np.sqrt(q.shape[-1])
    weights = xp.exp(logits - logits.max(axis=-1, keepdims=True))
    exact = weights @ v / weights.sum(axis=-1, keepdims=True)
    return float(xp.abs(out - exact).max())


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
        logits = size.batch * size.heads * size.seqlen**2 * q.itemsize
        passes: tuple[tuple[str, Callable[[], Any], float, int], ...] = (
            ("forward", lambda q=q, k=k, v=v: flash_attention(q, k, v), 1, 1),
            (
                "backward",
                lambda d=dout, q=q, k=k, v=v, o=out, s=lse: flash_attention_backward(
                    d, q, k, v, o, s
                ),
                2.5,
                2,
            ),
        )
        for name, call, factor, squares in passes:
            seconds = device.seconds(call)
            error = (
                f"{one_head_error(xp, q, k, v, out):.1e}" if name == "forward" else ""
            )
            print(
                f"{dtype:<9}{name:<10}{1e3 * seconds:>10.2f}"
                f"{factor * size.flops / seconds / 1e12:>9.2f}"
                f"{device.peak_bytes(call) / MIB:>10.0f}"
                f"{squares * logits / MIB:>14.0f} MiB{error:>11}",
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
