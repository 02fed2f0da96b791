"""Faults in a copy of the gradients of `wgmma`, which the simulator has to find."""

# ruff: noqa: E501 - lines of the sources
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..cases import Array, Case, Inputs, expect, expect_case, make
from .running import changed_sources
from .seeded import WAYS, missed, noticed_by, outcomes_of
from .test_wgmma import device
from .test_wgmma_backward import (
    GRADIENTS,
    LENGTHS,
    WIDE,
    backward,
    compare_gradients,
    forward_of,
    gradients,
)

_PLAIN = backward("plain", hq=4, hkv=2, sq=300)
_CAUSAL = backward("causal", causal=True, sq=400, sk=200)
# A tile of queries begins between those that see all keys of one consumer and of both.
_APART = backward("apart", causal=True, sq=220, sk=200)
_WIDE = backward("wide", causal=True, sq=200, sk=250, **WIDE)
_TALL = backward("tall", causal=True, hq=1, sq=330, sk=150)
_TOP_LEFT = backward("top_left", causal="top_left", sq=150, sk=330)
_LENGTHS = backward("lengths", **LENGTHS)
_CAUSAL_LENGTHS = backward("causal_lengths", causal=True, **LENGTHS)
_LEFT = backward("left", window=(150, None), hq=1, sq=400, sk=300)
_DLSE = backward("dlse", dlse=True, hq=1)
_HUGE = backward("huge", hq=1, scale=1e9)
_HUGE_WIDE = backward("huge", hq=1, scale=1e9, **WIDE)
_SHARED = backward(
    "shared", batch=(2,), memory=("dense", "broadcast", "dense", "dense")
)


@dataclass(frozen=True)
class Fault:
    """A change of a source file that makes it wrong, and a call that meets it."""

    name: str
    file: str
    old: str
    new: str
    case: Case = _CAUSAL
    more: tuple[tuple[str, str], ...] = ()  # other changes of the file
    nan: str = ""  # an array that has one


_PUBLISH = "shared.ds_pipeline.publish(slot);"
_WRITE = "write_transposed<kN>(shared.ds[slot.stage], ds, group_row);"
_FENCE = "ptx::async_proxy_fence();"
_RELEASE_Q = "shared.q_pipeline.release(slot);"
_RELEASE_DOUT = "shared.dout_pipeline.release(slot);"

FAULTS = (
    # Copies and the barriers that count them.
    Fault("K isn't waited for", "backward_consumer.cuh", "shared.k_pipeline.wait({});", ""),
    Fault("V isn't waited for", "backward_consumer.cuh", "shared.v_pipeline.wait({});", ""),
    Fault("the first Q isn't waited for", "backward_consumer.cuh",
          "if (count > 0) shared.q_pipeline.wait({});", ""),
    Fault("the next Q isn't waited for", "backward_consumer.cuh",
          "shared.q_pipeline.wait(slot_of<kStages>(n + 1));", ""),
    Fault("dO isn't waited for", "backward_consumer.cuh", "shared.dout_pipeline.wait(slot);", ""),
    Fault("dS isn't waited for", "backward_consumer.cuh", "shared.ds_pipeline.wait(slot);", ""),
    Fault("the parity of another dS", "backward_consumer.cuh",
          "shared.ds_pipeline.wait(slot);", "shared.ds_pipeline.wait({slot.stage, slot.parity ^ 1});"),
    Fault("the parity of another tile", "pipeline.cuh", "int(n / kStages % 2)", "int(n % 2)"),
    Fault("the dS that isn't made yet", "backward_consumer.cuh",
          "slot_of<kStages>(n - 1);", "slot_of<kStages>(n);"),
    Fault("dS is published before it is written", "backward_consumer.cuh",
          _WRITE, _PUBLISH + _WRITE, more=(("  // all lanes have written\n    " + _PUBLISH, ""),)),
    Fault("dS isn't published", "backward_consumer.cuh", _PUBLISH, ""),
    Fault("dS where the one before is read", "backward_consumer.cuh",
          "shared.ds[slot.stage], ds, group_row", "shared.ds[slot.stage ^ 1], ds, group_row"),
    Fault("Q is released before it is read", "backward_consumer.cuh",
          _RELEASE_Q, "", more=(("shared.dout_pipeline.wait(slot);", "shared.dout_pipeline.wait(slot);" + _RELEASE_Q),)),
    Fault("Q is released while it is read", "backward_consumer.cuh",
          _RELEASE_DOUT, _RELEASE_DOUT + _RELEASE_Q, more=(("ptx::hold(flat(ds));\n    " + _RELEASE_Q, ""),)),
    Fault("Q isn't released", "backward_consumer.cuh", _RELEASE_Q, ""),
    Fault("dO isn't released", "backward_consumer.cuh", _RELEASE_DOUT, ""),
    Fault("one reader of Q too few", "backward_storage.cuh",
          "q_pipeline.init(1, kWarps);", "q_pipeline.init(1, kWarps - 1);"),
    Fault("one reader of dO too many", "backward_storage.cuh",
          "dout_pipeline.init(1, kWarps);", "dout_pipeline.init(1, kWarps + 1);"),
    Fault("half the writers of dS", "backward_storage.cuh",
          "ds_pipeline.init(kWarps, 1);", "ds_pipeline.init(kWarps / 2, 1);"),
    Fault("bytes that nobody expects", "backward_producer.cuh",
          "Storage::TileQ::kBytes + int(sizeof(Terms))", "Storage::TileQ::kBytes"),
    Fault("terms that dO's barrier counts", "backward_producer.cuh",
          "sizeof(Terms), full);", "sizeof(Terms), shared.dout_pipeline.full[slot.stage]);"),
    Fault("a tile that nobody reads", "backward_producer.cuh",
          "if (count > 0) load_queries();", "load_queries();", _TOP_LEFT),
    Fault("the tile after the last isn't announced", "backward_producer.cuh",
          "shared.q_pipeline.publish(slot);", ""),
    Fault("the tile after the last is announced early", "backward_producer.cuh",
          "shared.q_pipeline.wait_empty(slot);", ""),
    Fault("copies that don't see the barriers", "backward_storage.cuh", "ptx::mbarrier_init_fence();", ""),
    Fault("barriers that nobody waits for", "backward.cuh", "}\n  __syncthreads();\n", "}\n"),
    Fault("more registers than there are", "backward.cuh", "registers_increase<kGradientRegisters>", "registers_increase<248>"),
    # What one consumer does before the other has got there.
    Fault("no barrier before the first product", "backward_consumer.cuh",
          "consumers_barrier<Traits>();\n\n  Sums", "\n  Sums", _LENGTHS),
    Fault("no barrier after Q and dO are cleared", "backward_consumer.cuh",
          "consumers_barrier<Traits>();\n    }\n\n    // S", "}\n\n    // S", _LENGTHS),
    Fault("dK over a K that is still read", "backward_consumer.cuh",
          "consumers_barrier<Traits>();  // both have read all keys", ""),
    Fault("gradients before they are written", "backward_consumer.cuh",
          "group_barrier(group);\n  if (threadIdx.x % kWarpgroup == 0)", "if (threadIdx.x % kWarpgroup == 0)"),
    Fault("gradients that the copy doesn't see", "epilogue.cuh", _FENCE, ""),
    Fault("stores that nobody waits for", "backward_consumer.cuh", "ptx::bulk_wait_read<0>();", ""),
    Fault("stores of no group", "backward_consumer.cuh", "ptx::bulk_commit();", ""),
    Fault("products that don't see dS", "backward_consumer.cuh", _WRITE + "\n    " + _FENCE, _WRITE),
    Fault("products that don't see cleared keys", "backward_consumer.cuh",
          _FENCE + "\n  consumers_barrier<Traits>();\n\n  Sums", "consumers_barrier<Traits>();\n\n  Sums", _LENGTHS),
    Fault("products that don't see cleared queries", "backward_consumer.cuh",
          _FENCE + "\n      consumers_barrier", "consumers_barrier", _LENGTHS),
    # Products and the registers that they use.
    Fault("logits that are still computed", "backward_consumer.cuh",
          "ptx::wgmma_wait<1>();\n    ptx::hold(flat<kN>(s));", "ptx::wgmma_wait<2>();\n    ptx::hold(flat<kN>(s));"),
    Fault("dP that is still computed", "backward_consumer.cuh",
          "ptx::wgmma_wait<2>();\n      ptx::hold(flat<kN>(dp));", "ptx::wgmma_wait<3>();\n      ptx::hold(flat<kN>(dp));"),
    Fault("dP of large heads that is still computed", "backward_consumer.cuh",
          "ptx::wgmma_wait<1>();\n      ptx::hold(flat<kN>(dp));", "ptx::wgmma_wait<2>();\n      ptx::hold(flat<kN>(dp));", _WIDE),
    Fault("dQ that is still computed", "backward_consumer.cuh",
          "ptx::wgmma_wait<kKeepsFloats ? 0 : 1>();", "ptx::wgmma_wait<kKeepsFloats ? 1 : 2>();"),
    Fault("dV that is still computed", "backward_consumer.cuh",
          "ptx::wgmma_wait<1>();\n    ptx::hold(flat<kV>(dv));", "ptx::hold(flat<kV>(dv));"),
    Fault("dK that is still computed", "backward_consumer.cuh",
          "ptx::wgmma_wait<0>();\n    ptx::hold(flat<kD>(dk));", "ptx::hold(flat<kD>(dk));"),
    Fault("registers of dQ without a fence", "backward_consumer.cuh",
          "ptx::hold(flat<kQ>(dq));\n    ptx::wgmma_fence();", "ptx::hold(flat<kQ>(dq));"),
    Fault("registers of dK without a fence", "backward_consumer.cuh",
          "ptx::hold(flat<kD>(dk));\n    ptx::wgmma_fence();", "ptx::hold(flat<kD>(dk));"),
    Fault("dQ that goes on from the tile before", "products.cuh", "TileK::row_step(key)), key != 0);", "TileK::row_step(key)), true);"),
    Fault("dP without delta", "backward_consumer.cuh", "begin_logits<Element, Traits::kDepthV, kN, true>(dp", "begin_logits<Element, Traits::kDepthV, kN, false>(dp"),
    Fault("dQ of all consumers from the same queries", "backward_consumer.cuh",
          "along_depth(part.row)", "along_depth(0)"),
    Fault("dQ of all consumers from the same channels", "backward_consumer.cuh",
          "TileK::channel_step(part.channel)", "TileK::channel_step(0)", _WIDE),
    Fault("dQ of all consumers in the same rows", "backward_consumer.cuh",
          "(part.row / 16 + thread.warp)", "thread.warp"),
    Fault("dQ of all consumers in the same channels", "backward_consumer.cuh",
          "+ part.channel / 8;", ";", _WIDE),
    Fault("matrices of dS that are exchanged", "products.cuh",
          "16 * t + lane / 16 * 8 + lane % 8", "16 * t + lane / 8 % 2 * 8 + lane % 8"),
    Fault("dQ of no tile", "backward_consumer.cuh", "if (n > 0) add_dq", "add_dq", _PLAIN),
    Fault("the last dQ is forgotten", "backward_consumer.cuh",
          "  }\n  if (count > 0) {", "  }\n  if (count < 0) {"),
    Fault("dQ of the next head too early", "backward_consumer.cuh",
          "skipped = 0;\n    query0", "query0"),
    Fault("dQ of the next head without what is skipped", "backward_consumer.cuh",
          "skipped = query_tiles<Traits>(params) - left;", "", _CAUSAL),
    Fault("a head's tiles begin at its first", "backward_consumer.cuh",
          "query0 = uniform(block.tiles.begin) * kColumns;\n      skipped", "query0 = 0;\n      skipped"),
    # What nobody sees.
    Fault("K isn't cleared", "backward_consumer.cuh", "clear_rows<kThreads, true>(shared.k, block.row0, block.keys);", "", _LENGTHS),
    Fault("V isn't cleared", "backward_consumer.cuh", "clear_rows<kThreads, true>(shared.v, block.row0, block.keys);", "", _LENGTHS),
    Fault("Q isn't cleared", "backward_consumer.cuh", "clear_rows<kThreads, true>(q, query0, block.queries);", "", _LENGTHS),
    Fault("dO isn't cleared", "backward_consumer.cuh", "clear_rows<kThreads, true>(dout, query0, block.queries);", "", _LENGTHS),
    Fault("one row too many is kept", "backward_storage.cuh", ": rows.end};", ": rows.end + 1};", _LENGTHS),
    Fault("tiles with cleared rows are plain", "backward_storage.cuh",
          "min_of(clear[g].end, queries.end - Traits::kColumns + 1)", "clear[g].end", _LENGTHS),
    Fault("the last keys aren't masked", "backward_storage.cuh",
          "if (last >= band.seqlen.k) return {0, 0};", "", _CAUSAL),
    Fault("the diagonal isn't masked", "backward_storage.cuh",
          "clear.begin = band.queries_of(last, last + 1).begin;", "clear.begin = band.queries_of(key0, key0 + 1).begin;"),
    Fault("the window's end isn't masked", "backward_storage.cuh",
          "end - Traits::kColumns + 1;\n    }\n    return", "end;\n    }\n    return", _LEFT),
    Fault("the first consumer's mask for both", "backward_storage.cuh",
          "clear_queries(band, row0 + g * kGroupRows)", "clear_queries(band, row0)", _APART),
    Fault("masks of another warp", "backward_consumer.cuh", "block.row0 + group_row + 16 * Thread().warp", "block.row0 + group_row"),
    Fault("the first tile is left out", "backward_storage.cuh", "{own.begin / Traits::kColumns,", "{ceil_div(own.begin, Traits::kColumns),"),
    Fault("the last tile is left out", "backward_storage.cuh", "ceil_div(own.end, Traits::kColumns)}", "own.end / Traits::kColumns}"),
    # Where things are.
    Fault("K of another head", "backward_producer.cuh",
          "Position(params.k_strides, block.batch, block.head)", "Position(params.k_strides, block.batch, 0)", _PLAIN),
    Fault("Q of the group's first head", "backward_producer.cuh",
          "Position(params.q_strides, block.batch, block.first_head_q + at.index / per_head)", "Position(params.q_strides, block.batch, block.first_head_q)"),
    Fault("dO of another group", "backward_producer.cuh",
          "Position(params.dout_strides, block.batch, block.first_head_q + at.index / per_head)", "Position(params.dout_strides, block.batch, at.index / per_head)", _PLAIN),
    Fault("terms of the group's first head", "backward_producer.cuh", "terms + at.index,", "terms + at.tile,"),
    Fault("terms of another group", "backward_storage.cuh", "batch.flat * params.heads_q + first_head_q;", "batch.flat * params.heads_q + head;", _PLAIN),
    Fault("dK of another head", "backward_consumer.cuh",
          "Position(params.dk_strides, block.batch, block.head)", "Position(params.dk_strides, block.batch, 0)", _PLAIN),
    Fault("gradients of both consumers in the same rows", "backward_consumer.cuh",
          "const int row0 = block.row0 + group_row;", "const int row0 = block.row0;"),
    Fault("a place where an array repeats", "producer.cuh", "strides.batch[a] == 0 ? 0 : int", "int", _SHARED),
    Fault("dK isn't scaled", "backward_consumer.cuh", "inside ? float(params.scale) : -1.0f", "inside ? 1.0f : -1.0f"),
    # Terms and weights.
    Fault("dlse is forgotten", "../passes/delta.cuh", "delta -= dlse.data[i * dlse.stride];", "", _DLSE),
    Fault("terms past the lengths", "../passes/delta.cuh", "i < Seqlen(params, batch).q", "i < params.seqlen_q", _LENGTHS),
    Fault("terms past the end", "../passes/delta.cuh", "if (exists && i < Seqlen(params, batch).q)", "if (exists)", _PLAIN),
    Fault("a part of each delta", "../passes/delta.cuh", "lanes = kLanes / 2;", "lanes = kLanes / 4;", _PLAIN),
    Fault("the sign of delta", "backward_terms.cuh", "= -found.delta;", "= found.delta;"),
    Fault("weights of rows that see no key", "backward_terms.cuh",
          "mma::RowTerms<float>::of(found.lse, 0.0f).lse;", "found.lse * Constants<float>::kLog2E;", _TALL),
    Fault("half of dQ's sums are cleared", "backward_terms.cuh", "pack < kPacks;", "pack < kPacks / 2;"),
    Fault("no padding of dQ's sums is there", "backward_terms.cuh", "query_tiles<Traits>(params) * Traits::kColumns;", "int(params.seqlen_q);", _PLAIN),
    Fault("weights above 1", "backward_consumer.cuh", "limit_to_one<Element, kN>(p);", "", _HUGE),
    Fault("weights of large heads above 1", "backward_consumer.cuh",
          "kKeepsFloats ? ptx::min_or_nan(exponent, 0) : exponent", "exponent", _HUGE_WIDE),
    Fault("a weight of 1 for NaN", "backward_consumer.cuh",
          "ptx::min_or_nan(exponent, 0)", "min_of(exponent, 0.0f)", backward("nan", hq=1, **WIDE), nan="q"),
    Fault("dS without P", "backward_consumer.cuh", "low * dp[0][j][2 * half], high", "dp[0][j][2 * half], high"),
    Fault("lse of the next query", "backward_consumer.cuh", "-pair.element[c % 2]);", "-pair.element[c / 2]);"),
)  # fmt: skip


def inputs_of(fault: Fault) -> tuple[Inputs, tuple[Array, Array]]:
    """Return the arrays that meet a fault, and the results of the forward pass.

    Behind their lengths and where no key is seen there is NaN.
    """
    case = fault.case
    inputs = make(case)
    if fault.nan:
        getattr(inputs, fault.nan)[:, 37, :, 5] = np.nan
    out, lse = forward_of(inputs)
    for b in range(len(case.q_lengths or ())):
        rows, keys = case.q_lengths[b], case.k_lengths[b]
        for x in (inputs.q, inputs.dout, out):
            x[b, rows:] = np.nan
        lse[b, :, rows:] = np.nan
        for x in (inputs.k, inputs.v):
            x[b, keys:] = np.nan
    empty = (lse == -np.inf).all(axis=(0, 1))
    inputs.q[:, empty] = inputs.dout[:, empty] = np.nan
    return inputs, (out, lse)


def check(results: dict[str, Array], fault: Fault) -> None:
    """Raise AssertionError unless results are close to what is right."""
    if fault.nan:
        truths = expect(inputs_of(fault)[0])
        for name in GRADIENTS:
            nan = np.isnan(truths[name].exact)
            np.testing.assert_array_equal(np.isnan(results[name]), nan)
    else:
        compare_gradients(results, expect_case(fault.case))


def found(fault: Fault, folder: Path) -> str:
    """Return what a fault was noticed by; empty if it wasn't."""
    changes = ((fault.old, fault.new), *fault.more)
    sources = changed_sources(folder, f"wgmma/{fault.file}", *changes)
    inputs, forward = inputs_of(fault)

    def compute(way: dict[str, Any]) -> None:
        simulated = device(**way, sources=sources, seconds=30.0)
        check(gradients(inputs, simulated, forward=forward), fault)

    return noticed_by(WAYS, compute)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each fault was noticed by."""
    return outcomes_of(FAULTS, found, tmp_path_factory)


@pytest.mark.faults
def test_seeded_faults_are_found(
    outcomes: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them."""
    assert len(outcomes) == len(FAULTS) and not missed(outcomes, capsys)


@pytest.mark.faults
def test_without_a_fault_nothing_is_found() -> None:
    met = {(fault.case, fault.nan): fault for fault in FAULTS}

    def look(fault: Fault) -> None:
        inputs, forward = inputs_of(fault)
        for ways in WAYS:
            check(gradients(inputs, device(**ways), forward=forward), fault)

    with ThreadPoolExecutor() as pool:
        list(pool.map(look, met.values()))
