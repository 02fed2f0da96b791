"""The time to the first result, in fresh processes with empty and with filled caches.

Each process first starts the array library: it imports it and waits for a trivial
operation on the device. The clock then runs from the import of the attention library,
if that is one of its own, to the first output, and on to the first gradients.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .machine import ROOT
from .results import EVERYTHING, NO_RESULT, TIME_IS_UP, Row, Wanted, new_row
from .workloads import Case, square

IMPLEMENTATIONS = {
    "cuda": ("cupy_flash", "fa2", "cudnn", "flex", "fa4", "jax"),
    "cpu": ("cupy_flash",),
}
CACHES = ("cold", "warm")
DIRECTIONS = ("forward", "backward")
REPEATS = 3
# An implementation that has taken so long isn't started again.
LONG_SECONDS = 45.0
TIMEOUT_S = 300.0
SHAPE = (1, 128, 4, 128)
DTYPE = "float16"
# Where the libraries keep what they compiled, and what makes them keep it.
CACHE_FOLDERS = (
    "CUPY_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "CUTE_DSL_CACHE_DIR",
    "JAX_COMPILATION_CACHE_DIR",
)  # fmt: skip
SETTINGS = {
    # The driver's cache would keep what a cold cache is meant to be without.
    "CUDA_CACHE_DISABLE": "1",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
Times = dict[str, float]


@dataclass(frozen=True)
class Steps:
    """One implementation in a process whose array library has started.

    Attributes
    ----------
    load : callable
        Imports the attention library.
    forward : callable
        Takes what `load` returned.
    backward : callable
        Takes what `load` and `forward` returned.
    sync : callable
        Waits for the device.
    """

    load: Callable[[], Any]
    forward: Callable[[Any], Any]
    backward: Callable[[Any, Any], Any]
    sync: Callable[[], Any]


def implementations(device: str) -> tuple[str, ...]:
    """Return the names of what is measured."""
    return IMPLEMENTATIONS[device]


def rows(
    budget_s: float,
    log: Callable[[str], None],
    device: str = "cuda",
    wanted: Wanted = EVERYTHING,
) -> list[Row]:
    """Time every implementation, cold and then warm, up to `REPEATS` times.

    Parameters
    ----------
    budget_s : float
        After so many seconds the rest is skipped.
    log : callable
        Takes a line for each implementation.
    device : {"cuda", "cpu"}
    wanted : Wanted
        An implementation of which any row is wanted is timed as a whole.
    """
    end = time.monotonic() + budget_s
    found: list[Row] = []
    for impl in implementations(device):
        if not any(
            wanted(case_of(direction), f"{impl} ({cache})")
            for direction in DIRECTIONS
            for cache in CACHES
        ):
            continue
        new = measure(impl, device, run_child, end)
        found += new
        for row in new:
            text = f"{row['ms']:.0f} ms" if row["status"] == "ok" else row["why"]
            log(f"first {row['direction']}, {row['impl']}: {row['status']}, {text}")
    return found


def measure(
    impl: str,
    device: str,
    run: Callable[[str, str, Path, float], Times],
    end: float,
) -> list[Row]:
    """Return the rows of one implementation.

    Parameters
    ----------
    run : callable
        ``run(impl, device, folder, timeout_s)`` starts a process with its caches in
        the folder and returns its times in seconds.
    end : float
        When the time is used up, by `time.monotonic`.
    """
    times: dict[str, list[Times]] = {cache: [] for cache in CACHES}
    status, why = "ok", ""
    start = time.monotonic()
    try:
        for repeat in range(REPEATS):
            if repeat and time.monotonic() - start > LONG_SECONDS:
                break
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                for cache in CACHES:
                    left = end - time.monotonic()
                    if left <= 0:
                        raise TimeoutError
                    limit = min(left, TIMEOUT_S)
                    times[cache].append(run(impl, device, Path(folder), limit))
    except TimeoutError:
        status, why = "skipped", TIME_IS_UP
    except subprocess.TimeoutExpired as error:
        status, why = "failed", f"{NO_RESULT} {error.timeout:.0f} s"
        # The end of the time is no fault of the implementation's.
        if limit < TIMEOUT_S:
            status, why = "skipped", TIME_IS_UP
    except RuntimeError as error:
        status, why = "failed", str(error)
    return [
        make_row(f"{impl} ({cache})", direction, times[cache], status, why)
        for cache in CACHES
        for direction in DIRECTIONS
    ]


def case_of(direction: str) -> Case:
    """Return what is computed."""
    batch, seqlen, heads, head_dim = SHAPE
    return square("first_call", DTYPE, batch, seqlen, heads, head_dim, True, direction)


def make_row(
    impl: str, direction: str, times: list[Times], status: str, why: str
) -> Row:
    """Return the row of the medians; one time is enough, and then the row is ok."""
    case = case_of(direction)
    if not times:
        return new_row(case, impl, status, why) | {"import_ms": None}
    seconds = [one[direction] for one in times]
    middle = statistics.median(seconds)
    row = new_row(
        case, impl, "ok", "" if len(times) == REPEATS else f"of {len(times)} processes",
        ms=middle * 1e3, ms_spread=(max(seconds) - min(seconds)) / middle,
        rounds=len(times),
    )  # fmt: skip
    return row | {"import_ms": statistics.median(one["import"] for one in times) * 1e3}


def run_child(impl: str, device: str, folder: Path, timeout_s: float) -> Times:
    """Time one implementation in a fresh process.

    Raises
    ------
    RuntimeError
        If the process fails; the message is the last line that it wrote.
    subprocess.TimeoutExpired
    """
    command = [
        sys.executable, "-m", "bench.first_call", "--child", impl, "--device", device,
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environment(folder), cwd=ROOT, timeout=timeout_s,
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
    # The last line: libraries print too.
    return json.loads(done.stdout.splitlines()[-1])


def environment(folder: Path) -> dict[str, str]:
    """Return this process's environment with every kernel cache below a folder."""
    caches = {name: str(folder / name.lower()) for name in CACHE_FOLDERS}
    return {**os.environ, **SETTINGS, **caches}


# --- In the child ---------------------------------------------------------------------


def child(steps: Steps) -> Times:
    """Return the seconds from the start to each result."""
    steps.sync()
    start = time.perf_counter()
    library = steps.load()
    imported = time.perf_counter()
    kept = steps.forward(library)
    steps.sync()
    forward = time.perf_counter()
    gradients = steps.backward(library, kept)
    steps.sync()
    backward = time.perf_counter()
    assert len(gradients) == 3
    return {
        "import": imported - start,
        "forward": forward - start,
        "backward": backward - start,
    }


def cupy_flash_steps(device: str) -> Steps:
    """This library on CuPy or NumPy."""
    if device == "cpu":
        import numpy as xp

        def sync() -> None:
            pass
    else:
        import cupy as xp

        sync = xp.cuda.Device().synchronize
    q, k, v, dout = (xp.zeros(SHAPE, DTYPE) for _ in range(4))

    def load() -> Any:
        import cupy_flash

        return cupy_flash

    def forward(library: Any) -> Any:
        return library.flash_attention(q, k, v, causal=True, return_lse=True)

    def backward(library: Any, kept: Any) -> Any:
        return library.flash_attention_backward(dout, q, k, v, *kept, causal=True)

    return Steps(load, forward, backward, sync)


def torch_steps(
    load: Callable[[], Callable[..., Any]], heads_first: bool = True
) -> Steps:
    """PyTorch; `load` returns attention as a function of q, k and v."""
    import torch

    leaves = [torch.zeros(SHAPE, dtype=torch.float16, device="cuda") for _ in range(4)]
    if heads_first:
        leaves = [x.transpose(1, 2) for x in leaves]
    dout = leaves.pop()
    leaves = [x.requires_grad_() for x in leaves]

    def backward(library: Any, out: Any) -> Any:
        return torch.autograd.grad(out, leaves, dout)

    return Steps(load, lambda attend: attend(*leaves), backward, torch.cuda.synchronize)


def sdpa_steps(backend: str) -> Steps:
    """One backend of scaled_dot_product_attention."""

    def load() -> Callable[..., Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        def attend(q: Any, k: Any, v: Any) -> Any:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        return attend

    return torch_steps(load)


def flex_steps() -> Steps:
    """FlexAttention, compiled."""

    def load() -> Callable[..., Any]:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def corner(batch: Any, head: Any, row: Any, key: Any) -> Any:
            return key <= row

        def attend(q: Any, k: Any, v: Any) -> Any:
            mask = create_block_mask(corner, None, None, SHAPE[1], SHAPE[1])
            compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
            return compiled(q, k, v, block_mask=mask)

        return attend

    return torch_steps(load)


def fa4_steps() -> Steps:
    """FlashAttention-4."""

    def load() -> Callable[..., Any]:
        from flash_attn.cute import flash_attn_func

        def attend(q: Any, k: Any, v: Any) -> Any:
            out = flash_attn_func(q, k, v, causal=True)
            return out[0] if isinstance(out, tuple) else out

        return attend

    return torch_steps(load, heads_first=False)


def jax_steps() -> Steps:
    """jax.nn.dot_product_attention with cuDNN."""
    import jax
    import jax.numpy as jnp

    q, k, v, dout = (jnp.zeros(SHAPE, DTYPE) for _ in range(4))
    held: list[Any] = [q, k, v, dout]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn"
        )

    def forward(library: Any) -> Any:
        held[:] = jax.jit(lambda *qkv: jax.vjp(attend, *qkv))(q, k, v)
        return held[1]

    def backward(library: Any, pull: Any) -> Any:
        held[:] = jax.jit(lambda pull, dout: pull(dout))(pull, dout)
        return tuple(held)

    def sync() -> None:
        jax.block_until_ready(held)

    return Steps(lambda: None, forward, backward, sync)


def steps_of(impl: str, device: str) -> Steps:
    """Start an implementation's array library and return its steps."""
    made: dict[str, Callable[[], Steps]] = {
        "cupy_flash": lambda: cupy_flash_steps(device),
        "fa2": lambda: sdpa_steps("FLASH_ATTENTION"),
        "cudnn": lambda: sdpa_steps("CUDNN_ATTENTION"),
        "flex": flex_steps,
        "fa4": fa4_steps,
        "jax": jax_steps,
    }
    return made[impl]()


def main(arguments: list[str]) -> None:
    """Run as the child process: print the times as one line of JSON."""
    flags = dict(zip(arguments[::2], arguments[1::2], strict=True))
    times = child(steps_of(flags["--child"], flags.get("--device", "cuda")))
    print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
