"""Many that claim tiles at once, from a counter that holds anything at first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .device import SimDevice, SimulationError
from .probe import Array, Probe
from .running import changed_sources, gpu, mirror

_THREADS, _EACH = 96, 3
_TOTAL = _THREADS * _EACH
_FIRST = 2**64 - 100  # so that numbers begin anew after 2^64
_PROBE = Probe(
    "claims", f"""
  struct Traits {{
    enum : int {{ kBatchAxes = 1, kRows = 1 }};
  }};
  Params<1> p = params;
  p.batch_shape[0] = 1;
  p.heads_q = 1;
  p.seqlen_q = {_TOTAL};
  p.claims = const_cast<void*>(params.q);
  p.first_claim = {_FIRST}ull;
  const wgmma::Schedule<Traits> schedule(p);
  for (int i = 0; i < {_EACH}; ++i) {{
    const int tile = schedule.claim() - int(gridDim.x);
    ++static_cast<u32*>(params.out)[tile >= 0 && tile < {_TOTAL} ? tile : {_TOTAL}];
  }}""",
    lambda random: (np.zeros(1, np.uint64),),
    (_TOTAL + 1,), block=_THREADS, capability=90,
)  # fmt: skip
_WAYS = (
    {"order": "ascending"}, {"order": "descending"},
    *({"order": "random", "seed": seed} for seed in range(6)),
)  # fmt: skip
# Relative to the first claim: after all claims, as a graph that is replayed finds it;
# far away; and where additions before the first claim come close to it.
_STARTS = (_TOTAL, _TOTAL + 5, 2**40, -(2**40), -_THREADS - 1)


def claimed(start: int, sources: Path | None = None, **ways: object) -> Array:
    """Return how often each tile was claimed, and in the end what was none."""
    device = SimDevice(gpu("sm_90"), sources=sources, seconds=5.0, **ways)
    counter = mirror(device, np.array([(_FIRST + start) % 2**64], np.uint64))
    found = np.array(_PROBE.run(device, [counter]))
    assert int(counter[0]) == (_FIRST + _TOTAL) % 2**64
    return found


EXPECTED = np.array([1] * _TOTAL + [0], np.uint32)


@pytest.mark.parametrize("start", _STARTS)
def test_each_tile_is_claimed_once(start: int) -> None:
    for ways in _WAYS:
        np.testing.assert_array_equal(claimed(start, **ways), EXPECTED)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if (found < total) before = atomicAdd(counter, u64(1)) -",
         "if (found < total) before = found + 0 *"),
        ("if (found == shown) return 0;", "return 0;"),
        ("params.first_claim + 1) -", "params.first_claim) -"),
    ],
)  # fmt: skip
def test_a_fault_is_found(tmp_path: Path, old: str, new: str) -> None:
    sources = changed_sources(tmp_path, "wgmma/schedule.cuh", (old, new))
    with pytest.raises((AssertionError, SimulationError)):
        for ways in _WAYS:
            np.testing.assert_array_equal(
                claimed(5 + _TOTAL, sources, **ways), EXPECTED
            )
