"""Many that claim tiles at once, from a counter that holds anything at first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .device import SimDevice, SimulationError
from .probe import Probe
from .running import changed_sources, gpu, mirror

_EACH = 3
_FIRST = 2**64 - 100  # so that numbers begin anew after 2^64


def claimers(threads: int) -> Probe:
    """Return a kernel of some threads, each of which claims some tiles."""
    total = threads * _EACH
    return Probe(
        f"claims_{threads}", f"""
  struct Traits {{
    enum : int {{ kBatchAxes = 1, kRows = 1, kConsumers = 1 }};
  }};
  if (at >= {threads}) return;
  Params<1> p = params;
  p.batch_shape[0] = 1;
  p.heads_q = 1;
  p.seqlen_q = {total};
  p.claims = const_cast<void*>(params.q);
  p.first_claim = {_FIRST}ull;
  const wgmma::Schedule<Traits> schedule(p);
  for (int i = 0; i < {_EACH}; ++i) {{
    const int tile = schedule.claim() - int(gridDim.x);
    ++static_cast<u32*>(params.out)[tile >= 0 && tile < {total} ? tile : {total}];
  }}""",
        lambda random: (np.zeros(1, np.uint64),),
        (total + 1,), block=-(-threads // 32) * 32, capability=90,
    )  # fmt: skip


_MANY, _FEW = claimers(96), claimers(4)
# Many that claim at once soon find a claim; of few, some go on while none has come yet.
_WAYS = {
    _MANY: (
        {"order": "ascending"}, {"order": "descending"},
        *({"order": "random", "seed": seed} for seed in range(6)),
    ),
    _FEW: tuple({"order": "random", "seed": seed} for seed in range(100)),
}  # fmt: skip


def total_of(probe: Probe) -> int:
    """Return how many claims a kernel makes."""
    return probe.shape[0] - 1


# Relative to the first claim: after all claims, as a graph that is replayed finds it;
# far away; and where additions before the first claim come close to it, or lead to it.
_STARTS = {
    probe: (
        total_of(probe), total_of(probe) + 5, 2**40, -(2**40),
        -total_of(probe) // _EACH - 1, -total_of(probe) // _EACH, -2, -1,
    )
    for probe in (_MANY, _FEW)
}  # fmt: skip


def check(probe: Probe, start: int, sources: Path | None = None) -> None:
    """Each tile is claimed once, and the counter ends after the last."""
    total = total_of(probe)
    for ways in _WAYS[probe]:
        device = SimDevice(gpu("sm_90"), sources=sources, seconds=5.0, **ways)
        counter = mirror(device, np.array([(_FIRST + start) % 2**64], np.uint64))
        found = np.array(probe.run(device, [counter]))
        np.testing.assert_array_equal(found, [1] * total + [0])
        assert int(counter[0]) == (_FIRST + total) % 2**64


@pytest.mark.parametrize(
    ("probe", "start"),
    [(probe, start) for probe, starts in _STARTS.items() for start in starts],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_each_tile_is_claimed_once(probe: Probe, start: int) -> None:
    check(probe, start)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if (before < total) return before;", "return before;"),
        ("+ before + 1;", "+ before;"),
        ("own, params.first_claim + 1)", "own, params.first_claim)"),
        ("if (found == own) return 0;", "return 0;"),
        ("while (found - params.first_claim >= total)", "while (false)"),
        ("total);\n    return atomicAdd(counter, u64(1))", "total);\n    return found"),
    ],
)  # fmt: skip
def test_a_fault_is_found(tmp_path: Path, old: str, new: str) -> None:
    sources = changed_sources(tmp_path, "wgmma/schedule.cuh", (old, new))
    with pytest.raises((AssertionError, SimulationError)):
        for probe in (_MANY, _FEW):
            check(probe, total_of(probe) + 5, sources)
