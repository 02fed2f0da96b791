"""Faults in a copy of the family `wgmma`, which the simulator has to find."""

# ruff: noqa: E501 - lines of the sources
from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from cupy_flash.compiler import source_root
from cupy_flash.tiles import WgmmaTile

from ..cases import Case, Inputs, compare, expect_case, make
from .build import compiler
from .device import SimulationError
from .running import run
from .test_faults import headline
from .test_wgmma import (
    ALONE,
    DEEP,
    LENGTHS,
    NARROWER,
    SHALLOW,
    SINGLE,
    SMALL,
    TURNS,
    device,
    forward,
)

_CAUSAL = forward("causal", causal=True, sq=150, sk=260)
_TALL = forward("tall", causal=True, sq=280, sk=150)
_PLAIN = forward("plain", hq=4, hkv=2)
_LENGTHS = forward("lengths", **LENGTHS)
_SHORT = forward("short", hq=8, hkv=2, sk=30)
_WINDOW = forward("window", window=(40, 10), sq=150, sk=260)
_STEEP = forward("steep", scale=20.0)
_REPEATED = forward(
    "repeated", batch=(2,), memory=("dense", "broadcast", "broadcast", "dense")
)
_WAYS = (
    {}, {"order": "descending"}, {"order": "random"}, {"order": "random", "early": True},
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A change of a source file that makes it wrong, and a call that meets it."""

    name: str
    file: str
    old: str
    new: str
    tile: WgmmaTile = DEEP
    case: Case = _CAUSAL


FAULTS = (
    # Copies and the barriers that count them.
    Fault("K isn't waited for", "consumer.cuh",
          "shared.k_pipeline.wait(slot);\n      turns.wait();", "turns.wait();"),
    Fault("V isn't waited for", "consumer.cuh",
          "shared.v_pipeline.wait(v_slot);\n      begin_output", "begin_output"),
    Fault("the last V isn't waited for", "consumer.cuh",
          "shared.v_pipeline.wait(v_slot);\n    ptx::hold(flat(p));", "ptx::hold(flat(p));"),
    Fault("Q isn't waited for", "consumer.cuh",
          "while (more) {\n    shared.q_pipeline.wait(q_slot);", "while (more) {"),
    Fault("the next Q isn't waited for", "consumer.cuh",
          "shared.q_pipeline.wait(q_slot);\n        tile = own.last;", "tile = own.last;"),
    Fault("K isn't released", "consumer.cuh",
          "ptx::wgmma_wait<1>();\n      ptx::hold(flat<kN>(s));\n      shared.k_pipeline.release(slot);",
          "ptx::wgmma_wait<1>();\n      ptx::hold(flat<kN>(s));"),
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
          "if (Traits::kOutputApart && tile == own.first) shared.q_pipeline.release(q_slot);\n      finish_logits(params, *work, own.clear, warp_row, tile, s);\n      const",
          "if (Traits::kOutputApart) shared.q_pipeline.release(q_slot);\n      finish_logits(params, *work, own.clear, warp_row, tile, s);\n      const"),
    Fault("tiles are passed without a look at V", "consumer.cuh",
          "shared.v_pipeline.wait(slot);\n      shared.v_pipeline.release(slot);\n      slot.advance();",
          "shared.v_pipeline.release(slot);\n      slot.advance();", SHALLOW),
    Fault("more tiles are passed than there are stages", "consumer.cuh",
          "own.skipped >= kStages", "own.skipped >= 4 * kStages", SHALLOW),
    Fault("a group without keys stays at its Q", "consumer.cuh",
          "if constexpr (Traits::kOutputApart) shared.q_pipeline.release(q_slot);\n      finish(*work, softmax);\n      q_slot.advance();",
          "if constexpr (Traits::kOutputApart) shared.q_pipeline.release(q_slot);\n      finish(*work, softmax);",
          case=_TALL),
    Fault("the parity of a stage that is free", "pipeline.cuh",
          "empty[slot.stage], slot.parity ^ 1", "empty[slot.stage], slot.parity"),
    Fault("parities change too early", "pipeline.cuh",
          "parity ^= stage == 0;", "parity ^= stage == kStages - 1;"),
    Fault("copies that don't see the barriers", "storage.cuh",
          "ptx::mbarrier_init_fence();", ""),
    Fault("barriers that nobody waits for", "forward.cuh",
          "}\n  __syncthreads();\n", "}\n"),
    Fault("one reader too few", "storage.cuh", "queue.init(kWarps + 3);", "queue.init(kWarps + 2);",
          case=_SHORT),
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
          "if (!mma::contains(own.whole, tile))", "if (tile < 0)", case=_LENGTHS),
    Fault("V is cleared before it is there", "consumer.cuh",
          "shared.v_pipeline.wait(slot);\n        clear_unseen", "clear_unseen", case=_LENGTHS),
    Fault("products don't see the cleared V", "consumer.cuh",
          "ptx::async_proxy_fence();", "", case=_LENGTHS),
    Fault("no barrier after V is cleared", "consumer.cuh",
          "ptx::async_proxy_fence();\n  group_barrier(group);", "ptx::async_proxy_fence();", case=_LENGTHS),
    Fault("the tail isn't masked", "schedule.cuh",
          "clear.end / Traits::kColumns},", "ceil_div(clear.end, Traits::kColumns)},", case=_PLAIN),
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
          "return int(gridDim.x) + atomicAdd", "return int(gridDim.x) + 1 + atomicAdd"),
    Fault("rows of another tile", "schedule.cuh",
          "work.describe(params, row_tiles - 1 - rest / width,", "work.describe(params, row_tiles - rest / width,",
          case=_PLAIN),
    Fault("K of another head", "producer.cuh",
          "k_at(params.k_strides, work.batch,\n                                                work.head / heads_per_kv);",
          "k_at(params.k_strides, work.batch,\n                                                work.head % int(params.heads_kv));",
          case=_PLAIN),
    Fault("a place where an array repeats", "producer.cuh",
          "strides.batch[a] == 0 ? 0 : int", "int", SMALL, _REPEATED),
    Fault("one softmax for all works", "consumer.cuh", "if (ends) softmax = {};", "", case=_PLAIN),
    Fault("output over the next sums", "consumer.cuh",
          "finish(*done, before);", "finish(*done, softmax);", case=_PLAIN),
    Fault("lse of another work", "consumer.cuh",
          "finish(*done, before);", "finish(*work, before);", case=_PLAIN),
    # Softmax and output.
    Fault("output isn't rescaled", "consumer.cuh", "} else if (rescales) {", "} else if (false) {",
          SMALL, _STEEP),
    Fault("sums aren't rescaled", "softmax.cuh", "sum[half] *= rescale[half];", "", SMALL, _STEEP),
    Fault("large sums are taken for right", "softmax.cuh",
          "<= kMost;", "!= -1;", SMALL, replace(_STEEP, dtype="float16", scale=60.0)),
    Fault("the maximum of a lane", "softmax.cuh", "most[half] = mma::row_max(most[half]);", "",
          SMALL, _STEEP),
    Fault("rows past the lengths", "epilogue.cuh", "sum == 0 || query >= work.seqlen.q;", "sum == 0;",
          case=_LENGTHS),
    Fault("lse past the end", "epilogue.cuh",
          "lane.t == 0 && query < params.seqlen_q)", "lane.t == 0)", case=_PLAIN),
)  # fmt: skip


def inputs_of(case: Case) -> Inputs:
    """Return the arrays of a case, with NaN behind its lengths."""
    inputs = make(case)
    for name, arrays in (("q", [inputs.q]), ("k", [inputs.k, inputs.v])):
        for b, length in enumerate(getattr(case, f"{name}_lengths") or ()):
            for x in arrays:
                x[b, length:] = np.nan
    return inputs


def found(fault: Fault, folder: Path) -> str:
    """Return what a fault was noticed by; empty if it wasn't."""
    sources = folder / "cuda_src"
    shutil.copytree(source_root(), sources)
    file = sources / "wgmma" / fault.file
    text = file.read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, f"{fault.name}: {fault.file} has changed"
    file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    inputs = inputs_of(fault.case)
    for ways in _WAYS:
        simulated = device(**ways, sources=sources, seconds=30.0)
        how = ", ".join(map(str, ways.values())) or "ascending"
        try:
            results = run(inputs, simulated, fault.tile, gradients=False)
            compare(results, expect_case(fault.case))
        except SimulationError as error:
            return f"report ({how}): {headline(str(error))[:110]}"
        except AssertionError:
            return f"wrong result ({how})"
    return ""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What each fault was noticed by."""
    folders = [tmp_path_factory.mktemp("fault") for _ in FAULTS]
    with ThreadPoolExecutor() as pool:
        names = (fault.name for fault in FAULTS)
        yield dict(zip(names, pool.map(found, FAULTS, folders), strict=True))


@pytest.mark.faults
def test_seeded_faults_are_found(
    outcomes: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them."""
    assert compiler() and len(outcomes) == len(FAULTS)
    with capsys.disabled():
        print()
        for name, how in outcomes.items():
            print(f"  {name}: {how or 'NOT FOUND'}")
    assert not [name for name, how in outcomes.items() if not how]


@pytest.mark.faults
@pytest.mark.parametrize(
    "tile", sorted({f.tile for f in FAULTS}, key=lambda t: t.name), ids=lambda t: t.name
)
def test_without_a_fault_nothing_is_found(tile: WgmmaTile) -> None:
    for case in {f.case for f in FAULTS if f.tile == tile}:
        for ways in _WAYS:
            results = run(inputs_of(case), device(**ways), tile, gradients=False)
            compare(results, expect_case(case))
