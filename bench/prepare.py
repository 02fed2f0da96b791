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
from dataclasses import dataclass
from multiprocessing.connection import Connection

from .first_call import CACHE_FOLDERS, SETTINGS
from .memory import release
from .peers import all_peers, make_inputs
from .results import Wanted
from .workloads import Case

# What decides which kernels a case needs; cases that are alike go to one process.
_ALIKE = ("dtype", "head_dim", "head_dim_v", "direction", "causal")
# The caches of CuPy and of the driver stay where everybody has them.
_NOT_MOVED = ("CUPY_CACHE_DIR", "CUDA_CACHE_DISABLE")
# Else each worker would start a pool of its own to compile in.
_IN_WORKERS = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
# A worker that is in the midst of a case when the time ends gets so much more.
GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Compiled:
    """How many calls of how many cases could be made."""

    calls: int = 0
    cases: int = 0

    def __add__(self, other: Compiled) -> Compiled:
        return Compiled(self.calls + other.calls, self.cases + other.cases)


@contextlib.contextmanager
def shared_caches() -> Iterator[None]:
    """Let this process and those that it starts share what peers compile.

    Where the environment names no folder for it, it is a temporary one.
    """
    before = os.environ.copy()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        wanted = {name: os.path.join(folder, name.lower()) for name in CACHE_FOLDERS}
        for name, value in {**wanted, **SETTINGS}.items():
            if name not in _NOT_MOVED:
                os.environ.setdefault(name, value)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def shares(cases: Iterable[Case], count: int) -> list[list[Case]]:
    """Divide cases into up to so many shares, those with the same kernels together.

    Shares differ by one case at most, and within one the order stays as it was.
    """
    cases = list(dict.fromkeys(cases))
    place = {case: number for number, case in enumerate(cases)}
    alike = sorted(cases, key=lambda case: [getattr(case, name) for name in _ALIKE])
    count = min(count, len(cases))
    ends = [math.ceil(len(cases) * n / count) for n in range(count + 1) if count]
    return [
        sorted(alike[start:end], key=place.__getitem__)
        for start, end in zip(ends, ends[1:], strict=False)
    ]


def prepare(
    cases: Iterable[Case],
    processes: int,
    seconds: float,
    only: Sequence[str] = (),
    device: str = "cuda",
) -> Compiled:
    """Let every implementation that compiles make the call of each case once.

    Parameters
    ----------
    cases : iterable of Case
        The most telling first.
    processes : int
        How many work at once.
    seconds : float
        No case is begun later. What then still runs is stopped after `GRACE_SECONDS`.
    only : sequence of str
        The implementations of the run, empty for all; ours is always one of them.
    device : {"cuda", "cpu"}

    Returns
    -------
    Compiled
        Of the processes that came to their end; one that dies takes nothing with it
        but its own share.
    """
    until = time.time() + seconds
    context = multiprocessing.get_context("spawn")
    workers = []
    total = Compiled()
    try:
        for share in shares(cases, processes):
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(
                target=_work, args=(sender, share, only, device, until)
            )
            worker.start()
            sender.close()
            workers.append((worker, receiver))
        for worker, receiver in workers:
            worker.join(max(0.0, until + GRACE_SECONDS - time.time()))
            with contextlib.suppress(EOFError):  # it died
                if receiver.poll():
                    total += receiver.recv()
    finally:
        for worker, receiver in workers:
            worker.terminate()
            receiver.close()
    return total


def _work(
    sender: Connection,
    cases: Sequence[Case],
    only: Sequence[str],
    device: str,
    until: float,
) -> None:
    for name, value in _IN_WORKERS.items():
        os.environ.setdefault(name, value)
    sender.send(compile_share(cases, only, device, until))


def compile_share(
    cases: Sequence[Case], only: Sequence[str], device: str, until: float
) -> Compiled:
    """Make the calls of some cases, as long as `time.time()` is before `until`.

    An implementation that fails here will say so when it is measured.
    """
    total = Compiled()
    wanted = Wanted(tuple(only))
    peers = [p for p in all_peers(device) if p.compiles and wanted.named(p.name)]
    for case in cases:
        if time.time() > until:
            break
        calls = 0
        # Memory may be short, since the other processes use it too.
        with contextlib.suppress(Exception):
            inputs = make_inputs(case, device)
            for peer in peers:
                with contextlib.suppress(Exception):
                    peer.prepare(case, inputs)
                    calls += 1
            del inputs
            release(device)
        total += Compiled(calls, 1)
    return total
