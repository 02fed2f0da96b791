"""Faults that are put into a copy of the kernels, which the simulator has to find."""

# ruff: noqa: E501 - lines of the sources
from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ..cases import Case, compare, expect_case, make
from .device import SimDevice
from .running import changed_sources, gpu, run
from .seeded import missed, noticed_by, outcomes_of

# The last tile of keys has one key.
_HALF = Case("faults", "bfloat16", batch=(1,), hq=1, hkv=1, sq=150, sk=129, d=32,
             causal=True, seed=3)  # fmt: skip
_WIDE = replace(_HALF, d=128)
_WINDOW = replace(_HALF, window=(40, None))
_FLOAT = replace(_HALF, dtype="float32", d=24)
_DOUBLE = replace(_FLOAT, dtype="float64")
_RAGGED = replace(_HALF, dtype="float16", d=30)
_ORDERS = ("ascending", "descending", "random")
FEWEST = 0.95  # of all faults


@dataclass(frozen=True)
class Fault:
    """A change of a source file that makes it wrong.

    `passes` says what has to run to meet it: "forward", "backward" or
    "deterministic".
    """

    name: str
    file: str
    old: str
    new: str
    passes: str = "forward"
    case: Case = _HALF
    family: str = "mma"
    gpu: str = "sm_90"


FAULTS = (
    Fault("no wait for K", "mma/forward.cuh",
          "ptx::cp_async_wait<0>();\n    __syncthreads();\n    if constexpr (kStages == 1)",
          "__syncthreads();\n    if constexpr (kStages == 1)"),
    Fault("no wait for V", "mma/forward.cuh",
          "ptx::cp_async_wait<0>();\n      __syncthreads();\n      if (key0",
          "__syncthreads();\n      if (key0"),
    Fault("no barrier before V is read", "mma/forward.cuh",
          "__syncthreads();\n      if (key0", "if (key0"),
    Fault("the next K over the present one", "mma/forward.cuh",
          "load_k(stage ^ 1,", "load_k(stage,", case=_WIDE),
    Fault("no barrier around two stages", "mma/forward.cuh",
          "ptx::cp_async_wait<0>();\n    __syncthreads();\n    if constexpr (kStages == 1)",
          "ptx::cp_async_wait<0>();\n    if constexpr (kStages == 1)", case=_WIDE),
    Fault("the last tile is left out", "mma/forward.cuh",
          "key0 < keys.end; key0 += kColumns", "key0 + 1 < keys.end; key0 += kColumns"),
    Fault("the tail isn't masked", "mma/forward.cuh",
          "key0 + kColumns <= clear_of_mask.end", "key0 <= clear_of_mask.end"),
    Fault("one key too many", "mma/masking.cuh",
          "bool seen = column < end", "bool seen = column <= end"),
    Fault("one query too many", "mma/masking.cuh",
          "i < range.end", "i <= range.end", "backward", _WINDOW),
    Fault("the wrong rows of A", "mma/atom.cuh",
          "row + lane % 16, column + lane / 16 * 8));\n  }\n\n  // Rows [row, row + 16) of B, channels",
          "row + lane % 16, column + lane / 8 % 2 * 8));\n  }\n\n  // Rows [row, row + 16) of B, channels"),
    Fault("the sum isn't rescaled", "mma/softmax.cuh",
          "sum[i][half] *= rescale;", "", case=_FLOAT),
    Fault("the maximum of half a row", "mma/softmax.cuh",
          "return max_of(value, __shfl_xor_sync(kAllLanes, value, 2));", "return value;",
          case=_FLOAT),
    Fault("a row past the end is read", "mma/tile.cuh",
          "u32(first + r - begin) < rows && c", "u32(first + r - begin) <= rows && c"),
    Fault("channels past the end are read", "mma/tile.cuh",
          "< rows && c < columns;", "< rows;", case=_FLOAT),
    Fault("a row past the end is written", "mma/tile.cuh",
          "if (row0 + r >= row_end) break;", "if (row0 + r > row_end) break;"),
    Fault("no barrier before the output is stored", "mma/forward.cuh",
          "write_results<Atom<Traits>>(tile, o, inverse, warp_row, 0);\n  __syncthreads();",
          "write_results<Atom<Traits>>(tile, o, inverse, warp_row, 0);"),
    Fault("the diagonal is off by one", "common/block_range.cuh",
          "keys.end = within(i64(q1) + high, seqlen.k)",
          "keys.end = within(i64(q1) + high + 1, seqlen.k)"),
    Fault("no barrier before dS is read", "mma/backward.cuh",
          "ptx::cp_async_wait<0>();\n    __syncthreads();\n    if (kStages",
          "ptx::cp_async_wait<0>();\n    if (kStages", "backward"),
    Fault("no wait for Q", "mma/backward.cuh",
          "ptx::cp_async_wait<0>();\n    __syncthreads();\n    if (kStages",
          "__syncthreads();\n    if (kStages", "backward"),
    Fault("no barrier between warps that share keys", "mma/backward.cuh",
          "ptx::named_barrier(1 + warp / kAcross, kAcross * kWarpSize);", "", "backward",
          _WIDE),
    Fault("the wrong dS", "mma/backward.cuh",
          "if (before_head >= 0) add_dq(parity ^ 1, before_head, before_query0);\n    }\n    Acc s",
          "if (before_head >= 0) add_dq(parity, before_head, before_query0);\n    }\n    Acc s",
          "backward"),
    Fault("the last dQ is forgotten", "mma/backward.cuh",
          "if (before_head >= 0) add_dq(parity ^ 1, before_head, before_query0);\n    __syncthreads();",
          "__syncthreads();", "backward"),
    Fault("delta is forgotten", "mma/backward.cuh",
          "(dp[i][j][x] - terms.delta)", "dp[i][j][x]", "backward"),
    Fault("lanes that don't wait for each other", "mma/convert_dq.cuh",
          "__syncwarp();\n    store_tile", "store_tile", "backward"),
    Fault("no wait for K in dq", "mma/backward_dq.cuh",
          "ptx::cp_async_wait<0>();\n    __syncthreads();\n    if (kStages",
          "__syncthreads();\n    if (kStages", "deterministic"),
    Fault("no barrier between P and V", "simt/forward.cuh",
          "      }\n      __syncthreads();\n\n      // O += P V",
          "      }\n\n      // O += P V", case=_FLOAT, family="simt"),
    Fault("a key past the end is read", "simt/tile.cuh",
          "if (row0 + r < row_end && column0 + c < column_end) {",
          "if (row0 + r <= row_end && column0 + c < column_end) {",
          case=_FLOAT, family="simt"),
    Fault("half a product on Turing", "ptx/mma.cuh",
          "half < 2; ++half) {\n      mma_m16n8k8_fp16", "half < 1; ++half) {\n      mma_m16n8k8_fp16",
          case=_RAGGED, gpu="sm_75"),
    Fault("an element too many on Turing", "ptx/shared_memory.cuh",
          "2 * h < bytes", "2 * h <= bytes", case=_RAGGED, gpu="sm_75"),
    Fault("the wrong rows before Hopper", "ptx/mma.cuh",
          "a[2 * half + row]", "a[2 * row + half]", case=_DOUBLE, gpu="sm_80"),
)  # fmt: skip


def found(fault: Fault, folder: Path) -> str:
    """Return what a fault was noticed by; empty if it wasn't."""
    sources = changed_sources(folder, fault.file, (fault.old, fault.new))
    inputs = make(fault.case)
    truths = expect_case(fault.case)

    def compute(way: dict[str, str]) -> None:
        device = SimDevice(gpu(fault.gpu), **way, sources=sources)
        results = run(
            inputs, device, fault.family, gradients=fault.passes != "forward",
            deterministic=fault.passes == "deterministic",
        )  # fmt: skip
        compare(results, {n: truth for n, truth in truths.items() if n in results})

    return noticed_by(({"order": order} for order in _ORDERS), compute)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each fault was noticed by."""
    return outcomes_of(FAULTS, found, tmp_path_factory)


@pytest.mark.faults
def test_seeded_faults_are_found(
    outcomes: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """At least 19 of 20."""
    unnoticed = missed(outcomes, capsys)
    assert len(unnoticed) <= (1 - FEWEST) * len(FAULTS), unnoticed
