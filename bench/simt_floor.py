"""Times the family `simt` beside PyTorch's attention, and the host's part of a call.

    python -m bench.simt_floor

float32 against the memory-efficient backend, float64 against the math backend, both
sides alternating in one process; then the host time of warm calls, and the time to
the first result in fresh processes with a cold and a warm kernel cache. The figures
go to bench/results/.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cupy_flash

from .machine import ROOT, describe_machine, device_ms, source_sha256

ROUNDS = 12
FIRST_CALL = """
import time, cupy
q = cupy.zeros((1, 128, 4, 128), dtype="float16")
cupy.cuda.Device().synchronize()
start = time.perf_counter()
import cupy_flash
out = cupy_flash.flash_attention(q, q, q, causal=True)
cupy.cuda.Device().synchronize()
print(time.perf_counter() - start)
"""


def alternate(ours: Callable[[], Any], peer: Callable[[], Any]) -> dict[str, float]:
    """Time two calls turn by turn; return the medians and that of the ratios."""
    for _ in range(2):
        ours()
        peer()
    pairs = [(device_ms(ours), device_ms(peer)) for _ in range(ROUNDS)]
    return {
        "ms": statistics.median(a for a, _ in pairs),
        "peer_ms": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
    }


def compare(
    dtype: torch.dtype, batch: int, heads: int, head_dim: int, causal: bool
) -> list[dict[str, Any]]:
    """Time forward and backward of one shape, sequence length 4096."""
    seqlen = 4096
    name = str(dtype).removeprefix("torch.")
    backend = (
        SDPBackend.MATH if dtype == torch.float64 else SDPBackend.EFFICIENT_ATTENTION
    )
    tensors = [
        torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=dtype)
        for _ in range(4)
    ]
    q, k, v, dout = (cupy.from_dlpack(x) for x in tensors)
    theirs = [x.transpose(1, 2).detach().requires_grad_() for x in tensors[:3]]
    out, lse = cupy_flash.flash_attention(q, k, v, causal=causal, return_lse=True)
    rows = []
    with sdpa_kernel(backend):
        result = scaled_dot_product_attention(*theirs, is_causal=causal)
        difference = (
            (torch.from_dlpack(out).transpose(1, 2) - result.detach()).abs().max()
        )
        directions: dict[str, tuple[Callable[[], Any], Callable[[], Any], float]] = {
            "forward": (
                lambda: cupy_flash.flash_attention(q, k, v, causal=causal),
                lambda: scaled_dot_product_attention(
                    *[x.detach() for x in theirs], is_causal=causal
                ),
                1.0,
            ),
            "backward": (
                lambda: cupy_flash.flash_attention_backward(
                    dout, q, k, v, out, lse, causal=causal
                ),
                lambda: torch.autograd.grad(
                    result, theirs, tensors[3].transpose(1, 2), retain_graph=True
                ),
                2.5,
            ),
        }
        for direction, (ours, peer, factor) in directions.items():
            flops = factor * 4 * batch * heads * seqlen**2 * head_dim
            flops /= 2 if causal else 1
            times = alternate(ours, peer)
            rows.append(
                {
                    "dtype": name, "direction": direction, "head_dim": head_dim,
                    "causal": causal, "batch": batch, "heads": heads,
                    "seqlen": seqlen, "peer": backend.name.lower(), **times,
                    "tflops": flops / times["ms"] / 1e9,
                    "peer_tflops": flops / times["peer_ms"] / 1e9,
                    "max_difference": float(difference),
                }
            )  # fmt: skip
            print(
                f"{name} D={head_dim} {'causal' if causal else 'full'} {direction}: "
                f"{rows[-1]['tflops']:.1f} TFLOP/s, {rows[-1]['peer']} "
                f"{rows[-1]['peer_tflops']:.1f}, ratio {times['ratio']:.2f}",
                flush=True,
            )
    return rows


def host_microseconds(call: Callable[[], Any]) -> float:
    """Return the least time that a warm call keeps the host busy."""
    best = float("inf")
    for _ in range(30):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(30):
            call()
        best = min(best, (time.perf_counter() - start) / 30)
    return best * 1e6


def host_times() -> dict[str, float]:
    """Time the host's part of small forward and backward calls."""
    q, k, v, dout = (cupy.zeros((1, 128, 4, 128), np.float16) for _ in range(4))
    out, lse = cupy_flash.flash_attention(q, k, v, causal=True, return_lse=True)
    given = cupy.empty_like(out)
    return {
        "forward_us": host_microseconds(
            lambda: cupy_flash.flash_attention(q, k, v, causal=True)
        ),
        "forward_out_us": host_microseconds(
            lambda: cupy_flash.flash_attention(q, k, v, causal=True, out=given)
        ),
        "backward_us": host_microseconds(
            lambda: cupy_flash.flash_attention_backward(
                dout, q, k, v, out, lse, causal=True
            )
        ),
    }


def first_call_seconds() -> dict[str, float]:
    """Time import and first call after CuPy's own start, in fresh processes."""
    with tempfile.TemporaryDirectory() as cache:
        # NVRTC keeps what it compiled in the driver's cache, which would hide the cost.
        environment = dict(os.environ, CUPY_CACHE_DIR=cache, CUDA_CACHE_DISABLE="1")
        times = [
            float(
                subprocess.run(
                    [sys.executable, "-c", FIRST_CALL],
                    env=environment, cwd=ROOT, check=True, capture_output=True,
                    text=True,
                ).stdout
            )
            for _ in range(4)
        ]  # fmt: skip
    return {"cold_s": times[0], "warm_s": min(times[1:])}


def main() -> None:
    """Run everything and write the result file."""
    rows = []
    for dtype, batch, heads, head_dim, causal in (
        (torch.float32, 4, 32, 64, False),
        (torch.float32, 4, 32, 64, True),
        (torch.float32, 4, 16, 128, False),
        (torch.float32, 4, 16, 128, True),
        (torch.float64, 1, 16, 64, False),
    ):
        rows += compare(dtype, batch, heads, head_dim, causal)
    host, first = host_times(), first_call_seconds()
    print(f"host: {host}")
    print(f"first call: {first}")
    now = datetime.datetime.now(datetime.timezone.utc)
    meta = {
        **describe_machine(), "date": now.isoformat(timespec="seconds"),
        "command": "python -m bench.simt_floor", "source_sha256": source_sha256(),
    }  # fmt: skip
    path = ROOT / "bench" / "results" / f"{now:%Y-%m-%dT%H%M%S}-simt-floor.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"meta": meta, "rows": rows, "host": host, "first_call": first}
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(Path(path).relative_to(ROOT))


if __name__ == "__main__":
    main()
