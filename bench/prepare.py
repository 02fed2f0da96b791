"""Compiles in several processes at once what a run would compile case after case.

Some implementations compile a kernel for every shape, which takes longer than timing
it. They keep what they compiled in folders; processes that make the same calls before
the run fill these, and the run finds everything there.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence

from .first_call import CACHE_FOLDERS, SETTINGS
from .memory import release
from .peers import all_peers, make_inputs
from .results import OURS
from .workloads import Case

# What decides which kernels a case needs, so that a share needs few.
_ALIKE = ("dtype", "head_dim", "head_dim_v", "direction", "causal", "kv_seqlen")
# The caches of CuPy and of the driver stay where everybody has them.
_OTHERS = ("CUPY_CACHE_DIR", "CUDA_CACHE_DISABLE")
# Else each process would start a pool of its own to compile in.
_ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Let this process and those that it starts share what peers compile.

    Where the environment names no folder for it, it is a temporary one.
    """
    before = os.environ.copy()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        wanted = {name: os.path.join(folder, name.lower()) for name in CACHE_FOLDERS}
        for name, value in {**wanted, **SETTINGS, **_ALONE}.items():
            if name not in _OTHERS:
                os.environ.setdefault(name, value)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def shares(cases: Iterable[Case], count: int) -> list[list[Case]]:
    """Divide cases into so many shares, those that need the same kernels together."""
    ordered = sorted(
        dict.fromkeys(cases), key=lambda case: [getattr(case, n) for n in _ALIKE]
    )
    size = max(1, math.ceil(len(ordered) / count))
    return [ordered[at : at + size] for at in range(0, len(ordered), size)]


def prepare(
    cases: Iterable[Case],
    processes: int,
    seconds: float,
    only: Sequence[str] = (),
    device: str = "cuda",
) -> int:
    """Let every implementation that compiles meet each case once.

    Parameters
    ----------
    cases : iterable of Case
    processes : int
        How many work at once.
    seconds : float
        Cases that no process has begun by then are left out.
    only : sequence of str
        The implementations of the run, empty for all; ours is always one of them.
    device : {"cuda", "cpu"}

    Returns
    -------
    int
        How many cases were met.
    """
    context = multiprocessing.get_context("spawn")
    until = time.time() + seconds
    tasks = [(share, tuple(only), device, until) for share in shares(cases, processes)]
    if not tasks:
        return 0
    with context.Pool(len(tasks)) as pool:
        return sum(pool.starmap(meet, tasks, chunksize=1))


def meet(cases: Sequence[Case], only: Sequence[str], device: str, until: float) -> int:
    """Build the calls of some cases; return how many cases there was time for.

    An implementation that fails here will say so when it is measured.
    """
    peers = [
        peer
        for peer in all_peers(device)
        if peer.compiles and (not only or peer.name in (OURS, *only))
    ]
    done = 0
    for case in cases:
        if time.time() > until:
            break
        inputs = make_inputs(case, device)
        for peer in peers:
            with contextlib.suppress(Exception):
                peer.prepare(case, inputs)
        del inputs
        release(device)
        done += 1
    return done
