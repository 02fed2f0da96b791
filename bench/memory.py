"""Peak memory of a pass, beside what its results take and what S × S arrays would.

Counted is what is allocated above the inputs while a pass runs: by CuPy's and
PyTorch's allocators on a GPU, where the rest of an allocator's pool doesn't count, and
by Python's on the CPU. JAX says what a compiled function allocates.

In the direction "backward" what the forward pass kept isn't counted; "both" is a
training step's forward and backward, and counts it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

from cupy_flash.demo import traced_peak

from .peers import CuPyFlash, Jax, Peer, Unsupported, all_peers, make_inputs
from .peers.base import module, spare_imported, why_not_importable
from .results import EVERYTHING, TIME_IS_UP, Row, Wanted, new_row
from .workloads import DIRECTIONS, ITEMSIZE, Case, square

SEQLENS = {
    "cuda": (1024, 2048, 4096, 8192, 16384, 32768),
    "cpu": (256, 512, 1024),
}
HEADS = {"cuda": 16, "cpu": 2}
HEAD_DIM = 64


def implementations(device: str) -> tuple[str, ...]:
    """Return the names of what is measured."""
    return tuple(peer.name for peer in all_peers(device))


def rows(
    budget_s: float,
    log: Callable[[str], None],
    device: str = "cuda",
    wanted: Wanted = EVERYTHING,
) -> list[Row]:
    """Measure every implementation, the short sequences first.

    Parameters
    ----------
    budget_s : float
        After so many seconds the rest is skipped.
    log : callable
        Takes a line for each row.
    device : {"cuda", "cpu"}
    wanted : Wanted
        Each row is measured by itself.
    """
    end = time.monotonic() + budget_s
    peers = all_peers(device)
    found = []
    for case in cases(device):
        for peer in peers:
            if case.dtype == "float32" and device == "cuda" and not is_ours(peer):
                continue
            if not wanted(case, peer.name):
                continue
            if time.monotonic() > end:
                row = new_row(case, peer.name, "skipped", TIME_IS_UP)
                row |= {"bytes": None} | formula(case)
            else:
                row = measure(peer, case, device)
            found.append(row)
            log(f"{case.label} {peer.name}: {outcome(row)}")
        spare_imported(device)
    return found


def cases(device: str) -> Iterator[Case]:
    """Yield what is measured."""
    for seqlen in SEQLENS[device]:
        for dtype in ("bfloat16", "float32") if device == "cuda" else ("float32",):
            for direction in DIRECTIONS:
                yield square(
                    "memory", dtype, 1, seqlen, HEADS[device], HEAD_DIM, False,
                    direction,
                )  # fmt: skip


def is_ours(peer: Peer) -> bool:
    """Tell whether a peer is this library."""
    return isinstance(peer, CuPyFlash)


def formula(case: Case) -> dict[str, int]:
    """Return what a pass needs and what its S × S arrays would take, in bytes.

    Needed are the results, the log-sum-exp that backward reads, and one number a row
    that it makes from dout and out. S × S arrays are the probabilities, and in
    backward their gradient.
    """
    size = ITEMSIZE[case.dtype]
    rows, kv_rows = case.heads * case.seqlen, case.kv_heads * case.kv_seqlen
    out = rows * case.head_dim_v * size
    gradients = (rows * case.head_dim + kv_rows * case.head_dim) * size
    gradients += kv_rows * case.head_dim_v * size
    statistic = rows * max(4, size)
    needed = {
        "forward": out,
        "backward": gradients + statistic,
        "both": out + gradients + 2 * statistic,
    }
    squares = 1 if case.direction == "forward" else 2
    return {
        "needed_bytes": case.batch * needed[case.direction],
        "square_bytes": squares * case.batch * rows * case.kv_seqlen * size,
    }


def measure(peer: Peer, case: Case, device: str) -> Row:
    """Return one row; an error becomes its status."""
    size, status, why = None, "ok", ""
    if (reason := peer.why_not(case)) is not None:
        status, why = "unsupported", reason
    elif device == "cpu" and peer.name == "torch_cpu":
        status, why = "unsupported", "PyTorch doesn't count its memory on the CPU"
    else:
        try:
            size = allocated(peer, case, device)
        except Unsupported as error:
            status, why = "unsupported", str(error)
        # Whatever stops one implementation must not stop the others.
        except Exception as error:
            status, why = "failed", reason_of(error)
    release(device)
    row = new_row(case, peer.name, status, why)
    return row | {"bytes": size} | formula(case)


def allocated(peer: Peer, case: Case, device: str) -> int:
    """Return the most bytes that one pass holds above its inputs."""
    inputs = make_inputs(case, device)
    if isinstance(peer, Jax):
        return peer.allocated_bytes(case, inputs)
    prepared = peer.prepare(case, inputs)
    release(device)
    if device == "cpu":
        return traced_peak(prepared.call)

    def call() -> Any:
        result = prepared.call()
        prepared.sync()
        return result

    return device_peak(call)


def device_peak(call: Callable[[], Any]) -> int:
    """Return the most bytes that a call holds on the device.

    A call allocates from CuPy or from PyTorch, so that their peaks may be added.
    """
    hook = counting_hook()
    cuda = None
    if why_not_importable("torch") is None:
        cuda = module("torch").cuda
        cuda = cuda if cuda.is_available() else None
    if cuda is not None:
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
    with hook:
        call()
    peak = hook.peak
    return peak + (cuda.max_memory_allocated() - before if cuda is not None else 0)


def counting_hook() -> Any:
    """Return a hook of CuPy's allocator that knows the peak."""
    cupy = module("cupy")

    class Peak(cupy.cuda.MemoryHook):
        """Sums what is taken from the pool and given back."""

        name = "Peak"

        def __init__(self) -> None:
            self.now = self.peak = 0

        def malloc_postprocess(self, **what: Any) -> None:
            self.now += what["mem_size"]
            self.peak = max(self.peak, self.now)

        def free_postprocess(self, **what: Any) -> None:
            self.now -= what["mem_size"]

    return Peak()


def release(device: str) -> None:
    """Give back what nobody holds."""
    gc.collect()
    if device == "cpu":
        return
    if why_not_importable("torch") is None:
        module("torch").cuda.empty_cache()
    if why_not_importable("cupy") is None:
        module("cupy").get_default_memory_pool().free_all_blocks()


def reason_of(error: Exception) -> str:
    """Return an error in one line; that memory ran out is told in one way."""
    text = " ".join(str(error).split())
    marks = ("OutOfMemory", "out of memory", "RESOURCE_EXHAUSTED", "MemoryError")
    if any(mark in f"{type(error).__name__} {text}" for mark in marks):
        return "out of memory"
    return f"{type(error).__name__}: {text}"


def outcome(row: Row) -> str:
    """Describe a row's result."""
    if row["bytes"] is None:
        return f"{row['status']}: {row['why']}"
    share = row["bytes"] / row["needed_bytes"]
    return f"{row['bytes'] / 2**20:.1f} MiB, {share:.2f} times what is needed"
