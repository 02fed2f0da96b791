"""Faults in a copy of the gradients of `wgmma`, which the simulator has to find."""

# ruff: noqa: E501 - lines of the sources
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_flash.tiles import WgmmaTile

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

# By role: the smallest heads that a fault shows with, as a tile that is asked for.
_ROLE = WgmmaTile(3, 64, 64, 64, by_role=True)
_ROLE_128 = WgmmaTile(3, 64, 128, 64, by_role=True)
_ROLE_256 = WgmmaTile(3, 64, 256, 64, by_role=True)
_ROLE_V_256 = WgmmaTile(3, 64, 64, 256, by_role=True)
_KEYS = backward("role_keys", hq=1, sq=200, sk=100)
_HEADS = backward("role_heads", hq=2, sq=130, sk=70)
_DIAGONAL = backward("role_diagonal", causal=True, hq=1, sq=200, sk=130)
_ENDS = backward("role_ends", hq=1, **LENGTHS)
_MANY = backward("role_many", hq=1, sq=40, sk=260)
_HUGE_ROLE = backward("role_huge", hq=1, scale=1e9)


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
    config: Any = "wgmma"


def by_role(
    name: str,
    old: str,
    new: str,
    case: Case = _KEYS,
    more: tuple[tuple[str, str], ...] = (),
    *,
    file: str = "backward_by_role.cuh",
    tile: WgmmaTile = _ROLE,
) -> Fault:
    """Return a fault of the kernel whose warpgroups make other products each."""
    size = {"d": tile.depth, "dv": tile.depth_v}
    return Fault(name, file, old, new, replace(case, **size), more, config=tile)


_PUBLISH = "shared.ds_pipeline.publish(slot);"
_WRITE = "write_transposed<kN>(shared.ds[slot.stage], ds, group_row);"
_FENCE = "ptx::async_proxy_fence();"
_BARRIER = "consumers_barrier<Traits>();  // both have read all keys"
_PUBLISH_OUT = "shared.out_pipeline.publish(keys_slot);"
_RELEASE_Q = "shared.q_pipeline.release(slot);"
_RELEASE_DOUT = "shared.dout_pipeline.release(slot);"

FAULTS = (
    # Copies and the barriers that count them.
    Fault("K isn't waited for", "backward_consumer.cuh", "shared.k_pipeline.wait(keys_slot);", ""),
    Fault("V isn't waited for", "backward_consumer.cuh", "shared.v_pipeline.wait(keys_slot);", ""),
    Fault("the first Q isn't waited for", "backward_consumer.cuh",
          "shared.q_pipeline.wait(slot_of<kStages>(first));", ""),
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
          _RELEASE_DOUT, _RELEASE_DOUT + _RELEASE_Q, more=(("if (n + 1 < end) {\n      " + _RELEASE_Q, "if (n + 1 < end) {"),)),
    Fault("Q isn't released", "backward_consumer.cuh", _RELEASE_Q, ""),
    Fault("dO isn't released", "backward_consumer.cuh", _RELEASE_DOUT, ""),
    Fault("one reader of Q too few", "backward_storage.cuh",
          "q_pipeline.init(1, kReaders * kWarps);", "q_pipeline.init(1, kReaders * kWarps - 1);"),
    Fault("one reader of dO too many", "backward_storage.cuh",
          "dout_pipeline.init(1, kReaders * kWarps);", "dout_pipeline.init(1, kReaders * kWarps + 1);"),
    Fault("half the writers of dS", "backward_storage.cuh",
          "ds_pipeline.init(kWriters * kWarps, kWarps);", "ds_pipeline.init(kWriters * kWarps / 2, kWarps);"),
    Fault("bytes that nobody expects", "backward_producer.cuh",
          "Storage::TileQ::kBytes + int(sizeof(Terms))", "Storage::TileQ::kBytes"),
    Fault("terms that dO's barrier counts", "backward_producer.cuh",
          "sizeof(Terms), full);", "sizeof(Terms), shared.dout_pipeline.full[slot.stage]);"),
    Fault("a tile that nobody reads", "backward_producer.cuh",
          "left > 0;", "left >= 0;", _TOP_LEFT),
    Fault("copies that don't see the barriers", "backward_storage.cuh", "ptx::mbarrier_init_fence();", ""),
    Fault("barriers that nobody waits for", "backward.cuh", "shared.start(maps);\n  __syncthreads();", "shared.start(maps);"),
    Fault("more registers than there are", "backward.cuh", "registers_increase<kGradientRegisters>", "registers_increase<248>"),
    # What one consumer does before the other has got there.
    Fault("no barrier before the first product", "backward_consumer.cuh",
          "consumers_barrier<Traits>();\n  }\n\n  Sums", "}\n\n  Sums", _LENGTHS),
    Fault("no barrier after Q and dO are cleared", "backward_consumer.cuh",
          "consumers_barrier<Traits>();\n    }\n\n    // S", "}\n\n    // S", _LENGTHS),
    Fault("dK over a K that is still read", "backward_consumer.cuh",
          _BARRIER, ""),
    Fault("gradients before they are written", "backward_consumer.cuh",
          _BARRIER, _PUBLISH_OUT + _BARRIER, more=(("  // all lanes have written\n  " + _PUBLISH_OUT, ""),)),
    Fault("gradients that aren't published", "backward_consumer.cuh", _PUBLISH_OUT, ""),
    Fault("gradients that are stored before", "backward_producer.cuh", "shared.out_pipeline.wait(slot);", ""),
    Fault("gradients that the copy doesn't see", "epilogue.cuh", _FENCE, ""),
    Fault("stores that nobody waits for", "backward_producer.cuh", "ptx::bulk_wait_read<0>();", ""),
    Fault("stores of no group", "backward_producer.cuh", "ptx::bulk_commit();", ""),
    Fault("products that don't see dS", "backward_consumer.cuh", _WRITE + "\n    " + _FENCE, _WRITE),
    Fault("products that don't see cleared keys", "backward_consumer.cuh",
          _FENCE + "\n    consumers_barrier", "consumers_barrier", _LENGTHS),
    Fault("products that don't see cleared queries", "backward_consumer.cuh",
          _FENCE + "\n      consumers_barrier", "consumers_barrier", _LENGTHS),
    Fault("K and V of the first block", "backward_consumer.cuh",
          "slot_of<Storage::kKeyStages>(progress.block)", "slot_of<Storage::kKeyStages>(0)"),
    Fault("a block's first tile is the first of all", "backward_steps.cuh", "progress.tile += count;", ""),
    Fault("tiles of the first block", "backward_consumer.cuh",
          "slot_of<kStages>(end - 1));\n    ptx::wgmma_wait<0>();", "slot_of<kStages>(count - 1));\n    ptx::wgmma_wait<0>();"),
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
    Fault("dQ of all consumers in the same rows", "backward_steps.cuh",
          "(row / 16 + thread.warp)", "thread.warp"),
    Fault("dQ of all consumers in the same channels", "backward_steps.cuh",
          "+ channel / 8;", ";", _WIDE),
    Fault("matrices of dS that are exchanged", "products.cuh",
          "16 * t + lane / 16 * 8 + lane % 8", "16 * t + lane / 8 % 2 * 8 + lane % 8"),
    Fault("dQ of no tile", "backward_consumer.cuh", "if (n > first) add_dq", "add_dq", _PLAIN),
    Fault("the last dQ is forgotten", "backward_consumer.cuh",
          "  }\n  if (count > 0) {", "  }\n  if (count < 0) {"),
    Fault("dQ of the next head too early", "backward_consumer.cuh",
          "skipped = 0;\n    query0", "query0"),
    Fault("dQ of the next head without what is skipped", "backward_consumer.cuh",
          "skipped = query_tiles<Traits>(params) - left;", "", _CAUSAL),
    Fault("a head's tiles begin at its first", "backward_consumer.cuh",
          "query0 = uniform(block.tiles.begin) * kColumns;\n      skipped", "query0 = 0;\n      skipped"),
    # What nobody sees.
    Fault("K isn't cleared", "backward_consumer.cuh", "clear_rows<kThreads, true>(keys, block.row0, block.keys);", "", _LENGTHS),
    Fault("V isn't cleared", "backward_consumer.cuh", "clear_rows<kThreads, true>(values, block.row0, block.keys);", "", _LENGTHS),
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
          "Position(params.q_strides, block.batch, head)", "Position(params.q_strides, block.batch, block.first_head_q)"),
    Fault("dO of another group", "backward_producer.cuh",
          "Position(params.dout_strides, block.batch, head)", "Position(params.dout_strides, block.batch, at.index / per_head)", _PLAIN),
    Fault("terms of the group's first head", "backward_producer.cuh", "terms + at.index,", "terms + at.tile,"),
    Fault("terms of another group", "backward_storage.cuh", "batch.flat * params.heads_q + first_head_q;", "batch.flat * params.heads_q + head;", _PLAIN),
    Fault("dK of another head", "backward_producer.cuh",
          "Position(params.dk_strides, block.batch, block.head)", "Position(params.dk_strides, block.batch, 0)", _PLAIN),
    Fault("gradients of both consumers in the same rows", "backward_consumer.cuh",
          "write_gradient(block, keys, group_row, dk", "write_gradient(block, keys, 0, dk"),
    Fault("a place where an array repeats", "producer.cuh", "strides.batch[a] == 0 ? 0 : int", "int", _SHARED),
    Fault("dK isn't scaled", "backward_consumer.cuh", "dk, float(params.scale)", "dk, 1.0f"),
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
    Fault("dS without P", "backward_steps.cuh", "low * dp[0][j][2 * half], high", "dp[0][j][2 * half], high"),
    Fault("lse of the next query", "backward_consumer.cuh", "-pair.element[c % 2]);", "-pair.element[c / 2]);"),
)  # fmt: skip


_WAIT_DP = "ptx::wgmma_wait<0>();\n      ptx::hold(flat<kN>(dp));"
_WAIT_S = "ptx::wgmma_wait<0>();\n      ptx::hold(flat<kN>(s));"
_HIDE = "mma::hide_columns(s, mask, reader.query0(), block.row0 + 16 * Thread().warp);"
_PUBLISH_P = "shared.weights.pipeline.publish(slot);"
_RELEASE_P = "shared.weights.pipeline.release(slot);"
_PUBLISH_DX = "shared.out_pipeline.publish(key_slot<Traits>(progress));"
_LAST_Q = "shared.q_pipeline.release(slot_of<kStages>(end - 1));\n    "
_LAST_DOUT = "shared.dout_pipeline.release(slot_of<kStages>(end - 1));\n"
_WRITE_DS = "write_transposed<kN>(shared.ds[slot.stage], ds, 0);"

# Of the kernel whose warpgroups make other products each.
FAULTS += (
    # What one warpgroup waits for.
    by_role("by role, K isn't waited for", "shared.k_pipeline.wait(slot);", ""),
    by_role("by role, V isn't waited for", "shared.v_pipeline.wait(slot);", ""),
    by_role("by role, Q isn't waited for", "shared.q_pipeline.wait(slot);", ""),
    by_role("by role, dO isn't waited for by keys",
            "if constexpr (kRole == Role::kKeys) shared.dout_pipeline.wait(slot);", ""),
    by_role("by role, dO isn't waited for by values", "      shared.dout_pipeline.wait(slot);", ""),
    by_role("P isn't waited for", "shared.weights.pipeline.wait(slot);", ""),
    by_role("P is published before it is written",
            "Weights<kN> p;", "Weights<kN> p;" + _PUBLISH_P, more=(("the terms\n      " + _PUBLISH_P, ""),)),
    by_role("P is published before all lanes have written it",
            "__syncwarp();  // all lanes have written, and read the terms", ""),
    by_role("P isn't published", _PUBLISH_P, ""),
    by_role("P isn't released", _RELEASE_P, ""),
    by_role("P where that of the tile before is",
            "shared.weights.values[slot.stage][t][threadIdx.x % kWarpgroup] = four", "shared.weights.values[slot.stage ^ 1][t][threadIdx.x % kWarpgroup] = four"),
    by_role("P of another thread",
            "four = shared.weights.values[slot.stage][t][threadIdx.x % kWarpgroup]", "four = shared.weights.values[slot.stage][t][(threadIdx.x ^ 1) % kWarpgroup]"),
    by_role("by role, dS isn't waited for", "shared.ds_pipeline.wait(slot);", ""),
    by_role("dS over one that is still read", "shared.ds_pipeline.wait_empty(slot);", ""),
    by_role("by role, dS isn't published", "shared.ds_pipeline.publish(slot);", ""),
    by_role("by role, dS is published before it is written",
            _WRITE_DS, "shared.ds_pipeline.publish(slot);" + _WRITE_DS, more=(("// all lanes have written\n      shared.ds_pipeline.publish(slot);", ""),)),
    by_role("dS isn't released",
            "if (channel + kPanelColumns == Traits::kDepth) shared.ds_pipeline.release(slot);", ""),
    by_role("dS is released after its first part",
            "if (channel + kPanelColumns == Traits::kDepth)", "if (channel == 0)", tile=_ROLE_128),
    by_role("by role, Q is released while it is read",
            "if (n > first) shared.q_pipeline.release(slot_of<kStages>(n - 1));", "shared.q_pipeline.release(slot);", more=((_LAST_Q + _LAST_DOUT + "  }\n  finish(shared, block, progress, keys", _LAST_DOUT + "  }\n  finish(shared, block, progress, keys"),)),
    # Barriers.
    by_role("dV over a V that is still read",
            "consumers_barrier<Traits>();\n  write_gradient", "write_gradient", more=(("consumers_barrier<Traits>();  // keys have been read", ""),)),
    by_role("by role, gradients before they are written",
            "consumers_barrier<Traits>();\n  write_gradient", _PUBLISH_DX + "consumers_barrier<Traits>();\n  write_gradient", more=(("// all lanes have written\n  " + _PUBLISH_DX, ""),)),
    by_role("no barrier after K and V are cleared",
            "consumers_barrier<Traits>();\n  }\n}", "}\n}", _ENDS),
    by_role("by role, no barrier after Q and dO are cleared",
            "readers_barrier<Traits>();\n      }", "}", _ENDS),
    by_role("a barrier of one reader",
            "2 + Traits::kConsumers, 2 * kWarpgroup", "2 + Traits::kConsumers, kWarpgroup", _ENDS),
    by_role("by role, barriers that nobody waits for",
            "shared.start(maps);\n  __syncthreads();", "shared.start(maps);"),
    by_role("by role, gradients that aren't published", _PUBLISH_DX, ""),
    # Fences.
    by_role("by role, products that don't see dS",
            "ptx::async_proxy_fence();\n      __syncwarp", "__syncwarp"),
    by_role("by role, products that don't see cleared keys",
            "ptx::async_proxy_fence();\n    consumers_barrier", "consumers_barrier", _ENDS),
    by_role("by role, products that don't see cleared queries",
            "ptx::async_proxy_fence();\n        readers_barrier", "readers_barrier", _ENDS),
    by_role("S without a fence",
            "ptx::hold(flat<kV>(dv));\n    ptx::wgmma_fence();", "ptx::hold(flat<kV>(dv));"),
    by_role("dV and S without a fence",
            "ptx::hold(flat<kN>(s));\n      ptx::wgmma_fence();", "ptx::hold(flat<kN>(s));"),
    by_role("dP without a fence",
            "ptx::hold(flat<kD>(dk));\n    ptx::wgmma_fence();", "ptx::hold(flat<kD>(dk));"),
    by_role("dK and dP without a fence",
            "ptx::hold(flat<kD>(dk));\n      ptx::wgmma_fence();", "ptx::hold(flat<kD>(dk));"),
    by_role("dQ without a fence",
            "ptx::hold(flat<kN>(dq));\n      ptx::wgmma_fence();", "ptx::hold(flat<kN>(dq));"),
    # Products.
    by_role("by role, logits that are still computed", _WAIT_S, "ptx::hold(flat<kN>(s));"),
    by_role("by role, dP that is still computed", _WAIT_DP, "ptx::hold(flat<kN>(dp));"),
    by_role("dV and S that are still computed",
            "ptx::wgmma_wait<0>();\n    ptx::hold(flat<kV>(dv));", "ptx::wgmma_wait<1>();\n    ptx::hold(flat<kV>(dv));"),
    by_role("dK and dP that are still computed",
            "ptx::wgmma_wait<0>();\n    ptx::hold(flat<kD>(dk));", "ptx::wgmma_wait<1>();\n    ptx::hold(flat<kD>(dk));"),
    by_role("by role, dQ that is still computed",
            "ptx::wgmma_wait<0>();\n      ptx::hold(flat<kN>(dq));", "ptx::hold(flat<kN>(dq));"),
    by_role("S of this tile once more", "begin_s(min_of(n + 1, end - 1));", "begin_s(n);"),
    by_role("dP of this tile once more", "begin_dp(next);", "begin_dp(n);"),
    by_role("delta of this tile once more", "read_minus_delta(next);", "read_minus_delta(n);"),
    by_role("by role, dP without delta",
            "begin_logits<Element, Traits::kDepthV, kN, true>", "begin_logits<Element, Traits::kDepthV, kN, false>"),
    by_role("the first half of dO for both halves of dV",
            "begin_output<Element, kPart>(some, weights, tile, 8 * part * kPart);", "begin_output<Element, kPart>(some, weights, tile, 0);", tile=_ROLE_V_256),
    by_role("the first half of Q for both halves of dK",
            "v.across_depth(), TileV::channel_step(channel)", "v.across_depth(), TileV::channel_step(0)", file="products.cuh", tile=_ROLE_256),
    by_role("dQ from the same channels in all parts",
            "TileK::channel_step(channel)", "TileK::channel_step(0)", tile=_ROLE_128),
    by_role("all parts of dQ in the same channels",
            "to + channel / 8 * mma::kFragmentSize", "to", tile=_ROLE_128),
    by_role("dQ of the group's first head", "i64(at.index)", "i64(at.tile)", _HEADS),
    by_role("dQ of the tile before",
            "at.advance(tiles, per_head);\n    float* const to = sums + i64(at.index) * (Traits::kColumns * Traits::kDepth);", "float* const to = sums + i64(at.index) * (Traits::kColumns * Traits::kDepth); at.advance(tiles, per_head);"),
    by_role("by role, dK isn't scaled", "dk, float(params.scale)", "dk, 1.0f"),
    by_role("dV is scaled", "dv, 1.0f", "dv, float(params.scale)"),
    # Masks, weights, and what nobody sees.
    by_role("by role, masks of another warp",
            _HIDE, _HIDE.replace(" + 16 * Thread().warp", ""), _DIAGONAL),
    by_role("the mask of the tile before",
            _HIDE, _HIDE.replace("query0()", "query0() - Traits::kColumns"), _DIAGONAL),
    by_role("clear tiles of the tile before",
            "uniform(block.clear[0]), reader.query0()", "uniform(block.clear[0]), reader.query0() + Traits::kColumns", _DIAGONAL),
    by_role("by role, tiles with cleared rows are plain",
            "plain(uniform(block.plain[0]))", "plain(uniform(block.clear[0]))", _ENDS),
    by_role("by role, K isn't cleared",
            "clear_rows<kWarpgroup, true>(shared.k[slot.stage], block.row0, block.keys);", ";", _ENDS),
    by_role("by role, V isn't cleared",
            "clear_rows<kWarpgroup, true>(shared.v[slot.stage], block.row0, block.keys);", ";", _ENDS),
    by_role("by role, Q isn't cleared",
            "clear_rows<kWarpgroup, true>(shared.q[slot.stage], query0(), queries);", "", _ENDS),
    by_role("by role, dO isn't cleared",
            "clear_rows<kWarpgroup, true>(shared.dout[slot.stage], query0(), queries);", "", _ENDS),
    by_role("Q of the other tile is cleared",
            "(shared.q[slot.stage], query0()", "(shared.q[slot.stage ^ 1], query0()", _ENDS),
    by_role("rows of the tile before are cleared",
            "(shared.dout[slot.stage], query0()", "(shared.dout[slot.stage], query0() - Traits::kColumns", _ENDS),
    by_role("rows from the array's first on are cleared",
            "(shared.v[slot.stage], block.row0", "(shared.v[slot.stage], 0", _ENDS),
    by_role("by role, weights above 1", "limit_to_one<Element, kN>(p);", "", _HUGE_ROLE),
    by_role("terms of the other tile",
            "terms = shared.terms[slot.stage];", "terms = shared.terms[slot.stage ^ 1];"),
    # What barriers count, and registers.
    by_role("queries have one reader",
            "kReaders = kByRole ? 2", "kReaders = kByRole ? 1", file="backward_storage.cuh"),
    by_role("dS has two writers",
            "kWriters = kByRole ? 1", "kWriters = kByRole ? 2", file="backward_storage.cuh"),
    by_role("half the warps publish P",
            "weights.init(kWarps, kWarps);", "weights.init(kWarps / 2, kWarps);", file="backward_storage.cuh"),
    by_role("one warp too many releases dS",
            "kWriters * kWarps, kWarps);", "kWriters * kWarps, kWarps + 1);", file="backward_storage.cuh"),
    by_role("by role, more registers than there are",
            "kRole == Role::kQueries ? 64", "kRole == Role::kQueries ? 72"),
    # A block of keys after the other.
    by_role("by role, K and V of the first block",
            "slot_of<RoleStorage<Traits>::kKeyStages>(progress.block)", "slot_of<RoleStorage<Traits>::kKeyStages>(0)"),
    by_role("by role, a block's first tile is the first of all",
            "progress.tile += count;", "", _HEADS, file="backward_steps.cuh"),
    by_role("K over keys that are still read",
            "shared.k_pipeline.release(slot);", "", _MANY, (("shared.out_pipeline.wait(slot);", "shared.k_pipeline.release(slot); shared.out_pipeline.wait(slot);"),), file="backward_producer.cuh"),
    by_role("blocks that aren't released",
            "shared.queue.release(place);\n    ++progress", "++progress", _MANY, file="backward_steps.cuh"),
    by_role("the next block isn't asked for",
            "if (left == 1) ptx::mbarrier_arrive(shared.queue.wanted);", "", file="backward_producer.cuh"),
    by_role("the one after a block that nobody sees isn't asked for",
            "if (block.count == 0) ptx::mbarrier_arrive(shared.queue.wanted);", "", backward("role_unseen", causal="top_left", hq=1, sq=40, sk=200), file="backward_producer.cuh"),
    by_role("V isn't released",
            "shared.v_pipeline.release(slot);", "", _MANY, file="backward_producer.cuh"),
    by_role("one reader of blocks too few",
            "kWarps + 3);", "kWarps + 2);", _MANY, file="backward_storage.cuh"),
    by_role("gradients of one warpgroup",
            "out_pipeline.init(kReaders * kWarps, 1);", "out_pipeline.init(kWarps, 1);", file="backward_storage.cuh"),
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
        check(gradients(inputs, simulated, fault.config, forward), fault)

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
    met = {(fault.case, fault.nan, fault.config): fault for fault in FAULTS}

    def look(fault: Fault) -> None:
        inputs, forward = inputs_of(fault)
        for ways in WAYS:
            own = device(**ways)
            check(gradients(inputs, own, fault.config, forward), fault)

    with ThreadPoolExecutor() as pool:
        list(pool.map(look, met.values()))
