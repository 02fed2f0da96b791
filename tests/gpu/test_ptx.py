"""The functions of ``cuda_src/ptx`` on the chip, against their twins on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_flash.device import cupy_device

from ..sim.probes import PROBES, RECORD, Probe, assert_agrees
from .running import cp


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_chip_and_twin_agree(probe: Probe) -> None:
    """Bit for bit; sums of products within a rounding."""
    device = cupy_device(cp.cuda.runtime.getDevice())
    found, needed = device.info.compute_capability, probe.capability
    if found < needed or (probe.architecture_specific and found != needed):
        pytest.skip(f"needs compute capability {needed / 10}")
    out = probe.run(device, [cp.asarray(x) for x in probe.arrays()])
    with np.load(RECORD) as recorded:
        assert_agrees(probe, out.get(), recorded[probe.name])
