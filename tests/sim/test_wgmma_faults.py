"""Faults in a copy of the family `wgmma`, which the simulator has to find."""

# ruff: noqa: E501 - lines of the sources
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_flash.tiles import WgmmaTile

from ..cases import (
    Array,
    Case,
    Inputs,
    compare,
    compare_closely,
    expect_case,
    make,
    raised,
)
from .running import changed_sources, run
from .seeded import WAYS, missed, noticed_by, outcomes_of
from .test_wgmma import (
    ALONE,
    DEEP,
    LENGTHS,
    NARROWER,
    SHALLOW,
    SINGLE,
    SMALL,
    TURNS,
    WIDEST,
    device,
    forward,
    leap,
)

_CAUSAL = forward("causal", causal=True, sq=150, sk=260)
_TALL = forward("tall", causal=True, sq=280, sk=150)
_PLAIN = forward("plain", hq=4, hkv=2)
_LENGTHS = forward("lengths", **LENGTHS)
_SHORT = forward("short", hq=8, hkv=2, sk=30)
_WINDOW = forward("window", window=(40, 10), sq=150, sk=260)
_STEEP = forward("steep", scale=20.0)
_FEW_KEYS = forward("few_keys", sk=150)
_PIECES = forward("pieces", hq=40, hkv=20, sq=30, sk=60)
_BAND = forward("band", window=(40, 10), sq=128, sk=128)
_HUGE = forward("huge", scale=4.0, sk=150)
_REPEATED = forward(
    "repeated", batch=(2,), memory=("dense", "broadcast", "broadcast", "dense")
)


@dataclass(frozen=True)
class Fault:
    """A change of a source file that makes it wrong, and a call that meets it."""

    name: str
    file: str
    old: str
    new: str
    tile: WgmmaTile = DEEP
    case: Case = _CAUSAL
    bits: float = 0  # that the maxima of `rows` rise in a tile that comes late
    rows: str = "all"
    base: float = 0  # the exponents of all others
    more: tuple[tuple[str, str], ...] = ()  # other changes of the file


FAULTS = (
    # Copies and the barriers that count them.
    Fault("K isn't waited for", "consumer.cuh",
          "shared.k_pipeline.wait(slot);\n      turns.wait();", "turns.wait();"),
    Fault("V isn't waited for", "consumer.cuh",
          "shared.v_pipeline.wait(v_slot);\n      begin_output", "begin_output"),
    Fault("the last V isn't waited for", "consumer.cuh",
          "shared.v_pipeline.wait(v_slot);\n    ptx::hold(flat(p));", "ptx::hold(flat(p));"),
    Fault("Q isn't waited for", "consumer.cuh",
          "while (more) {\n    shared.q_pipeline.wait(q_slot());", "while (more) {"),
    Fault("the next Q isn't waited for", "consumer.cuh",
          "shared.q_pipeline.wait(q_slot());\n        tile = own.last;", "tile = own.last;"),
    Fault("K isn't released", "consumer.cuh",
          "}\n      shared.k_pipeline.release(slot);", "}"),
    Fault("K is released before it is read", "consumer.cuh",
          "turns.wait();\n", "shared.k_pipeline.release(slot);\n      turns.wait();\n", TURNS),
    Fault("K is released while it is read", "consumer.cuh",
          "shared.v_pipeline.wait(v_slot);\n      begin_output",
          "shared.k_pipeline.release(slot);\n      shared.v_pipeline.wait(v_slot);\n      begin_output",
          SINGLE),
    Fault("V is released while it is read", "consumer.cuh",
          "turns.pass_on();\n", "shared.v_pipeline.release(v_slot);\n", SINGLE),
    Fault("another V is released", "consumer.cuh",
          "ptx::hold(flat(p));\n      shared.v_pipeline.release(v_slot);",
          "ptx::hold(flat(p));\n      shared.v_pipeline.release(slot);"),
    Fault("Q is released with each tile", "consumer.cuh",
          "if (Traits::kOutputApart && tile == first) shared.q_pipeline.release(q_slot());\n\n",
          "if (Traits::kOutputApart) shared.q_pipeline.release(q_slot());\n\n"),
    Fault("tiles are passed without a look at V", "consumer.cuh",
          "shared.v_pipeline.wait(slot);\n      __syncwarp();", "__syncwarp();", SHALLOW),
    Fault("more tiles are passed than there are stages", "consumer.cuh",
          "own.skipped >= kStages", "own.skipped >= 4 * kStages", SHALLOW),
    Fault("a group without keys keeps its Q", "consumer.cuh",
          "if constexpr (Traits::kOutputApart) shared.q_pipeline.release(q_slot());\n      close_work",
          "close_work", case=_TALL),
    Fault("the Q of another piece", "pipeline.cuh", "return {int(n % kStages),", "return {int((n + 1) % kStages),",
          case=_PLAIN),
    Fault("the parity of another piece", "pipeline.cuh", "int(n / kStages % 2)", "int(n % 2)", case=_PLAIN),
    Fault("a piece that isn't released", "consumer.cuh",
          "shared.queue.release(slot_of<WorkQueue<Traits>::kStages>(piece));", "", case=_SHORT),
    Fault("the parity of a stage that is free", "pipeline.cuh",
          "empty[slot.stage], slot.parity ^ 1", "empty[slot.stage], slot.parity"),
    Fault("parities change too early", "pipeline.cuh",
          "parity ^= stage == 0;", "parity ^= stage == kStages - 1;"),
    Fault("copies that don't see the barriers", "storage.cuh",
          "ptx::mbarrier_init_fence();", ""),
    Fault("barriers that nobody waits for", "forward.cuh",
          "}\n  __syncthreads();\n", "}\n"),
    Fault("one reader too few", "storage.cuh", "queue.init(kWarps + 3);", "queue.init(kWarps + 2);",
          SMALL, _PIECES),
    Fault("nobody asks for more work", "producer.cuh",
          "ptx::mbarrier_arrive(shared.queue.wanted);", ""),
    # Products and the registers that they use.
    Fault("sums that are still computed", "consumer.cuh",
          "ptx::wgmma_wait<1>();", "ptx::wgmma_wait<2>();"),
    Fault("output that is still computed", "consumer.cuh",
          "ptx::wgmma_wait<0>();\n      ptx::hold(flat<kO>(o));\n      ptx::hold(flat(p));", ""),
    Fault("registers without a fence", "consumer.cuh",
          "ptx::hold(flat<kO>(o));\n      ptx::wgmma_fence();\n      begin_logits",
          "ptx::hold(flat<kO>(o));\n      begin_logits"),
    Fault("another panel of channels", "panels.cuh",
          "channel / kPanelColumns * kPanelBytes", "channel / kPanelColumns * kAtom",
          NARROWER, forward("wide", d=192, dv=128, hq=1)),
    Fault("another panel of V", "panels.cuh",
          "ptx::wgmma_descriptor(data, kPanelBytes, kAtom)", "ptx::wgmma_descriptor(data, kAtom, kAtom)",
          NARROWER, forward("wide", d=192, dv=128, hq=1)),
    Fault("half a step along the keys", "panels.cuh",
          "return row * kPanelColumns * int", "return row / 2 * kPanelColumns * int"),
    Fault("another swizzle", "panels.cuh", "/ 8 ^ row % 8;", "/ 8 ^ row % 4;"),
    Fault("more registers than there are", "forward.cuh", "? 160", "? 168", SHALLOW),
    Fault("more registers than two consumers have", "forward.cuh", ": 232;", ": 240;"),
    Fault("more registers than four consumers have", "forward.cuh", "? 112", "? 120", WIDEST),
    # What a group does before another has got there.
    Fault("output that the copy doesn't see", "epilogue.cuh",
          "ptx::async_proxy_fence();", ""),
    Fault("output before it is written", "epilogue.cuh", "shared.out_pipeline.wait(slot);", ""),
    Fault("output over what is still copied", "consumer.cuh",
          "if constexpr (Traits::kOutputApart) shared.out_pipeline.wait_empty(out_slot);", "",
          case=_SHORT),
    Fault("Q over output that is still copied", "epilogue.cuh",
          "ptx::bulk_wait_read<0>();", "", ALONE, _PLAIN),
    Fault("a consumer doesn't pass its turn on", "consumer.cuh", "turns.pass_on();", "", TURNS),
    Fault("no first turn", "consumer.cuh",
          "if (group == kConsumers - 1) ptx::barrier_arrive(barrier(0), kThreads);", "", TURNS),
    # Keys that nobody sees.
    Fault("V isn't cleared", "consumer.cuh",
          "if (!mma::contains(whole, tile))", "if (tile < 0)", case=_LENGTHS),
    Fault("V is cleared before it is there", "consumer.cuh",
          "shared.v_pipeline.wait(slot);\n        clear_rows", "clear_rows", case=_LENGTHS),
    Fault("products don't see the cleared V", "consumer.cuh",
          "ptx::async_proxy_fence();", "", case=_LENGTHS),
    Fault("no barrier after V is cleared", "consumer.cuh",
          "ptx::async_proxy_fence();\n        group_barrier(group);", "ptx::async_proxy_fence();", case=_LENGTHS),
    Fault("the tail isn't masked", "schedule.cuh",
          "clear.end / Traits::kColumns}};", "ceil_div(clear.end, Traits::kColumns)}};", case=_PLAIN),
    Fault("the window's begin isn't masked", "schedule.cuh",
          "{ceil_div(clear.begin, Traits::kColumns),", "{clear.begin / Traits::kColumns,", case=_WINDOW),
    Fault("the last tile is left out", "schedule.cuh",
          "ceil_div(keys.end, Traits::kColumns)}", "keys.end / Traits::kColumns}"),
    Fault("the first tile is left out", "schedule.cuh",
          "return {keys.begin / Traits::kColumns,", "return {ceil_div(keys.begin, Traits::kColumns),",
          case=_WINDOW),
    Fault("groups of the same rows", "schedule.cuh",
          "row0 + g * kGroupRows;", "row0;"),
    # Work.
    Fault("a tile that nobody claims", "schedule.cuh",
          "return int(gridDim.x) + int", "return int(gridDim.x) + 1 + int"),
    Fault("what the counter held before counts", "schedule.cuh",
          "if (before < total) return before;", "return before;"),
    Fault("the first claim counts as two", "schedule.cuh",
          "own, params.first_claim + 1)", "own, params.first_claim + 2)"),
    Fault("rows of another tile", "schedule.cuh",
          "Item::kLastFirst ? row_tiles - 1 - place :", "Item::kLastFirst ? row_tiles - place :",
          case=_PLAIN),
    Fault("K of another head", "producer.cuh",
          "k_at(params.k_strides, work.batch,\n                                                work.head / heads_per_kv);",
          "k_at(params.k_strides, work.batch,\n                                                work.head % int(params.heads_kv));",
          case=_PLAIN),
    Fault("a place where an array repeats", "producer.cuh",
          "strides.batch[a] == 0 ? 0 : int", "int", SMALL, _REPEATED),
    Fault("one softmax for all works", "consumer.cuh", "softmax = {};", "", case=_PLAIN),
    Fault("output over the next sums", "consumer.cuh",
          "close_work(softmax, factor);\n        softmax = {};",
          "softmax = {};\n        close_work(softmax, factor);", case=_PLAIN),
    Fault("lse of another work", "consumer.cuh",
          "close_rows(params, *work,",
          "close_rows(params, shared.queue.wait(slot_of<WorkQueue<Traits>::kStages>(piece + 1)),", case=_PLAIN),
    # Softmax and output.
    Fault("output isn't rescaled", "consumer.cuh", "} else if (rescales) {", "} else if (false) {",
          SMALL, _STEEP),
    Fault("sums aren't rescaled", "softmax.cuh",
          ": 0.0f;\n      sum[half] *= rescale[half];", ": 0.0f;", SMALL, _FEW_KEYS, bits=500),
    Fault("large sums are taken for right", "softmax.cuh",
          "<= kMost)))", "!= -1)))", SMALL, replace(_FEW_KEYS, dtype="float16"), bits=30),
    Fault("the sum of half the rows is looked at", "softmax.cuh",
          "max_of(part[0], part[1]) <= kMost", "part[0] <= kMost", SMALL, _FEW_KEYS, bits=200, rows="one"),
    Fault("divided exponentials: sums before them aren't", "softmax.cuh",
          "part[half] *= rescale[half];\n      sum[half] *= rescale[half];", "part[half] *= rescale[half];",
          SMALL, _FEW_KEYS, bits=60),
    Fault("divided exponentials: their own sums aren't", "softmax.cuh",
          "part[half] *= rescale[half];", "", SMALL, _FEW_KEYS, bits=60),
    Fault("divided exponentials: they aren't", "softmax.cuh",
          "multiply_rows<kN>(s, rescale);", "", SMALL, _FEW_KEYS, bits=60),
    Fault("divided exponentials: the reference stays", "softmax.cuh",
          "rescale[half] = exp2_of(before - reference_[half]);",
          "rescale[half] = exp2_of(before - reference_[half]);\n      reference_[half] = before;",
          SMALL, _FEW_KEYS, bits=60),
    Fault("divided exponentials: nothing moves", "softmax.cuh",
          "if (most[half] > kFar) reference_[half] += float(exponent + kHeadroom);", "",
          SMALL, replace(_FEW_KEYS, dtype="float16"), bits=60),
    Fault("divided exponentials: output isn't rescaled", "softmax.cuh", "moved = true;\n    }", "}",
          SMALL, _FEW_KEYS, bits=60),
    Fault("divided exponentials: another row's factor", "softmax.cuh",
          "int(__float_as_uint(most[half]) >> 23)", "int(__float_as_uint(most[0]) >> 23)",
          SMALL, replace(_FEW_KEYS, dtype="float16"), bits=60, rows="one"),
    Fault("the sum of a lane", "softmax.cuh", "{mma::row_max(part[0]), mma::row_max(part[1])}", "{part[0], part[1]}",
          SMALL, _FEW_KEYS, bits=60),
    Fault("logits that are lost are taken for divided", "softmax.cuh",
          "if (__any_sync(kAllLanes, !(most[0] < kLost && most[1] < kLost))) return false;", "",
          SMALL, _FEW_KEYS, bits=200),
    Fault("lost logits of half the rows", "softmax.cuh",
          "most[0] < kLost && most[1] < kLost", "most[0] < kLost", SMALL, _FEW_KEYS, bits=200, rows="one"),
    Fault("lost logits are summed", "softmax.cuh",
          "most[1] < kLost))) return false;",
          "most[1] < kLost))) { sum[0] += part[0]; return false; }", SMALL, _FEW_KEYS, bits=200),
    Fault("logits are repeated over what is lost", "products.cuh",
          "clear_sums<kN>(s);\n#pragma unroll 1", "#pragma unroll 1", SMALL, _FEW_KEYS, bits=200),
    Fault("logits are repeated from another K", "consumer.cuh",
          "warp_row,\n                                           shared.k[slot.stage]);",
          "warp_row,\n                                           shared.k[v_slot.stage]);",
          SMALL, _FEW_KEYS, bits=200),
    Fault("logits are repeated from another Q", "consumer.cuh",
          "shared.ends.q(q_slot().stage), warp_row,", "shared.ends.q(q_slot().stage ^ 1), warp_row,",
          SMALL, _FEW_KEYS, bits=200),
    Fault("logits are repeated from the group's first rows", "consumer.cuh",
          "shared.ends.q(q_slot().stage), warp_row,", "shared.ends.q(q_slot().stage), group_row,",
          SMALL, _FEW_KEYS, bits=200),
    Fault("logits are repeated from the first group's rows", "consumer.cuh",
          "shared.ends.q(q_slot().stage), warp_row,", "shared.ends.q(q_slot().stage), warp_row - group_row,",
          bits=200),
    Fault("logits are repeated from the first keys", "products.cuh", "k, 8 * j, channel", "k, 0, channel",
          SMALL, _FEW_KEYS, bits=200),
    Fault("half the logits are repeated", "products.cuh",
          "channel < kDepth; channel += Atom", "channel < kDepth / 2; channel += Atom", SMALL, _FEW_KEYS, bits=200),
    Fault("logits that are repeated aren't masked", "consumer.cuh",
          "finish_logits(params, *work, own.clear, warp_row, tile, s);\n        if (!assumes)",
          "if (assumes || !softmax.is_settled()) finish_logits(params, *work, own.clear, warp_row, tile, s);\n        if (!assumes)",
          case=_BAND, bits=200),
    Fault("K is released before its logits are repeated", "consumer.cuh",
          "ptx::hold(flat<kN>(s));\n      bool rescales;",
          "ptx::hold(flat<kN>(s));\n      shared.k_pipeline.release(slot);\n      bool rescales;",
          SINGLE, bits=200, more=(("}\n      shared.k_pipeline.release(slot);", "}"),)),
    Fault("Q is released before its logits are repeated", "consumer.cuh",
          "ptx::hold(flat<kN>(s));\n      bool rescales;",
          "ptx::hold(flat<kN>(s));\n      if (Traits::kOutputApart && tile == first) shared.q_pipeline.release(q_slot());\n      bool rescales;",
          case=_PIECES, bits=200,
          more=(("if (Traits::kOutputApart && tile == first) shared.q_pipeline.release(q_slot());\n\n", ""),)),
    Fault("a reference is assumed that isn't one", "consumer.cuh",
          "bool assumes = softmax.is_settled();", "bool assumes = true;", SMALL, _HUGE, bits=2.0**23, base=-2.0**24),
    Fault("lse without the room below", "softmax.cuh",
          "reference_[half] - float(kHeadroom);\n    return", "reference_[half];\n    return"),
    Fault("lse of the sum without the room below", "softmax.cuh",
          "log_of(row_sum * float(1 << kHeadroom))", "log_of(row_sum)"),
    Fault("the maximum of a lane", "softmax.cuh", "most[half] = mma::row_max(most[half]);", "",
          SMALL, _STEEP),
    Fault("rows past the lengths", "epilogue.cuh", "sum == 0 || query >= work.seqlen.q;", "sum == 0;",
          case=_LENGTHS),
    Fault("lse past the end", "epilogue.cuh",
          "lane.t == 0 && query < params.seqlen_q)", "lane.t == 0)", case=_PLAIN),
)  # fmt: skip


def inputs_of(fault: Fault) -> Inputs:
    """Return the arrays that meet a fault, with NaN behind their lengths."""
    case = fault.case
    inputs = make(case)
    if fault.bits:
        inputs = raised(
            case, fault.base + leap(case.sk, fault.bits, case.sk // 4), fault.rows
        )
    for name, arrays in (("q", [inputs.q]), ("k", [inputs.k, inputs.v])):
        for b, length in enumerate(getattr(case, f"{name}_lengths") or ()):
            for x in arrays:
                x[b, length:] = np.nan
    return inputs


def check(results: dict[str, Array], fault: Fault) -> None:
    """Raise AssertionError unless results are close to what is right."""
    if fault.bits:
        compare_closely(results, inputs_of(fault))
    else:
        compare(results, expect_case(fault.case))


def found(fault: Fault, folder: Path) -> str:
    """Return what a fault was noticed by; empty if it wasn't."""
    changes = ((fault.old, fault.new), *fault.more)
    sources = changed_sources(folder, f"wgmma/{fault.file}", *changes)
    inputs = inputs_of(fault)

    def compute(way: dict[str, Any]) -> None:
        simulated = device(**way, sources=sources, seconds=30.0)
        check(run(inputs, simulated, fault.tile, gradients=False), fault)

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
@pytest.mark.parametrize(
    "tile", sorted({f.tile for f in FAULTS}, key=lambda t: t.name), ids=lambda t: t.name
)
def test_without_a_fault_nothing_is_found(tile: WgmmaTile) -> None:
    met = {(f.case, f.bits, f.rows, f.base): f for f in FAULTS if f.tile == tile}

    def look(fault: Fault) -> None:
        for ways in WAYS:
            results = run(inputs_of(fault), device(**ways), tile, gradients=False)
            check(results, fault)

    with ThreadPoolExecutor() as pool:
        list(pool.map(look, met.values()))
