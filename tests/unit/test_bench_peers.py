"""The benchmarks' peers and measurements, as far as they need no GPU."""

from __future__ import annotations

import dataclasses
import subprocess
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bench.peers
from bench import first_call, memory
from bench.peers import (
    DTYPES,
    CuPyFlash,
    Naive,
    Sdpa,
    Unsupported,
    base,
    make_inputs,
    naive,
)
from bench.peers import all_peers as make_all_peers
from bench.peers.flex import COMPILE_SECONDS, Flex
from bench.peers.optional import TritonTutorial
from bench.results import Wanted, case_of, is_ours
from bench.workloads import Case

from ..reference import (
    assert_close,
    attention,
    attention_backward,
    error_terms,
    unfused,
    unfused_backward,
)

PLAIN = Case("test", "float32", 2, 24, 24, 4, 4, 16, 16, False, "forward")
DIRECTIONS = ("forward", "backward", "both")


def variant(case: Case = PLAIN, **changes: Any) -> Case:
    return dataclasses.replace(case, **changes)


SHAPES = {
    "full": PLAIN,
    "causal": variant(causal=True),
    "gqa": variant(kv_heads=2, causal=True),
    "more_keys": variant(kv_seqlen=37, kv_heads=1, causal=True),
    "more_queries": variant(seqlen=37, causal=True),
    "head_dims": variant(head_dim_v=24, kv_seqlen=30, causal=True),
    "one_query": variant(seqlen=1, causal=True),
    "lengths": variant(causal=True, q_lengths=(24, 9), k_lengths=(20, 13)),
}


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "no_cuda", lambda: "no CUDA device")


# --- Results of the peers -------------------------------------------------------------


def cpu_peer(name: str) -> base.Peer:
    if name.startswith("torch"):
        # importorskip would turn PyTorch's own warnings into errors.
        if (reason := base.why_not_importable("torch")) is not None:
            pytest.skip(reason)
    if name == "torch_math":
        return Sdpa(name, "MATH", tuple(DTYPES), device="cpu")
    return next(peer for peer in make_all_peers("cpu") if peer.name == name)


def reference_options(case: Case) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": case.causal}
    if case.q_lengths is not None:
        options["q_lengths"] = np.array(case.q_lengths)
        options["k_lengths"] = np.array(case.k_lengths)
    return options


def check(peer: base.Peer, case: Case) -> None:
    inputs = make_inputs(case, "cpu")
    prepared = peer.prepare(case, inputs)
    results = prepared.outputs(prepared.call())
    prepared.sync()
    assert tuple(results) == base.OUTPUTS[case.direction]
    arrays = [inputs.native[name] for name in ("dout", "q", "k", "v")]
    options = reference_options(case)
    names = ("out", "dq", "dk", "dv")
    exact = (
        attention(*arrays[1:], **options)[0],
        *attention_backward(*arrays, **options)[:3],
    )
    plain = (
        unfused(*arrays[1:], **options)[0],
        *unfused_backward(*arrays, **options)[:3],
    )
    terms = error_terms(*arrays, **options)
    expected = dict(zip(names, zip(exact, plain, strict=True), strict=True))
    for name, x in results.items():
        right, baseline = expected[name]
        assert_close(
            x, right, baseline, DTYPES[case.dtype], terms=getattr(terms, name),
            factor=3.0, name=name,
        )  # fmt: skip


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["cupy_flash", "naive", "torch_cpu", "torch_math"])
def test_peers_on_the_cpu_are_right(name: str, shape: str, direction: str) -> None:
    peer = cpu_peer(name)
    case = variant(SHAPES[shape], direction=direction)
    if name.startswith("torch") and shape in ("lengths", "more_queries"):
        if shape == "lengths":
            assert "lengths" in (peer.why_not(case) or "")
        # A row of PyTorch's that sees no key is no 0 in every version.
        return
    check(peer, case)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["cupy_flash", "naive", "torch_math"])
def test_peers_on_the_cpu_are_right_in_every_dtype(name: str, dtype: str) -> None:
    check(cpu_peer(name), variant(SHAPES["gqa"], dtype=dtype, direction="both"))


def test_a_backward_call_can_be_repeated() -> None:
    case = variant(SHAPES["gqa"], direction="backward")
    for peer in (CuPyFlash("cpu"), Naive("cpu")):
        prepared = peer.prepare(case, make_inputs(case, "cpu"))
        first, second = (prepared.outputs(prepared.call()) for _ in range(2))
        for name in ("dq", "dk", "dv"):
            assert np.array_equal(first[name], second[name])


def test_outputs_are_indexed_before_they_are_copied() -> None:
    case = variant(direction="both")
    prepared = Naive("cpu").prepare(case, make_inputs(case, "cpu"))
    result = prepared.call()
    whole = prepared.outputs(result)
    part = prepared.outputs(result, {"out": np.s_[1:, :, 2], "dk": np.s_[:, :5]})
    assert part["out"].shape == (1, 24, 16)
    assert np.array_equal(part["out"], whole["out"][1:, :, 2])
    assert np.array_equal(part["dk"], whole["dk"][:, :5])
    assert np.array_equal(part["dv"], whole["dv"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_hold_the_values_that_were_rounded(dtype: str) -> None:
    case = variant(dtype=dtype, kv_heads=2, head_dim_v=8, kv_seqlen=5)
    inputs = make_inputs(case, "cpu", seed=3)
    assert inputs.native["q"].shape == (2, 24, 4, 16)
    assert inputs.native["k"].shape == (2, 5, 2, 16)
    assert inputs.native["v"].shape == (2, 5, 2, 8)
    assert inputs.native["dout"].shape == (2, 24, 4, 8)
    again = make_inputs(case, "cpu", seed=3).native
    other = make_inputs(case, "cpu", seed=4).native
    for name, x in inputs.native.items():
        assert x.dtype == DTYPES[dtype]
        assert inputs.host[name].dtype == (dtype if dtype == "float64" else np.float32)
        assert np.array_equal(inputs.host[name], x.astype(np.float64))
        assert np.array_equal(x, again[name])
        assert not np.array_equal(x, other[name])
    assert not np.array_equal(inputs.host["q"][:, :5, :2], inputs.host["k"])


# --- Reasons --------------------------------------------------------------------------


def test_a_module_that_is_absent_is_named() -> None:
    class Absent(base.Peer):
        device = "cpu"
        modules = ("math", "there_is_no_such_module")

    assert "there_is_no_such_module" in Absent().why_not(PLAIN)
    with pytest.raises(Unsupported, match="there_is_no_such_module can't be imported"):
        Absent().prepare(PLAIN, make_inputs(PLAIN, "cpu"))


def test_a_module_that_breaks_is_named_and_stays_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    (tmp_path / "broken_attention.py").write_text(
        "import logging, sys, warnings\n"
        "print('noise'); print('noise', file=sys.stderr); warnings.warn('noise')\n"
        "logging.warning('noise')\n"
        "raise OSError('libcudart.so:\\n  cannot open')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reason = base.why_not_importable("broken_attention")
    assert reason == "broken_attention can't be imported: libcudart.so: cannot open"
    assert capfd.readouterr() == ("", "")


def test_what_a_peer_prints_and_warns_while_it_builds_is_swallowed(
    capfd: pytest.CaptureFixture,
) -> None:
    class Noisy(base.Peer):
        device = "cpu"

        def build(self, case: Case, inputs: base.Inputs) -> Callable[[], Any]:
            print("noise")
            warnings.warn("noise", stacklevel=1)
            return lambda: inputs.native["q"]

    prepared = Noisy().prepare(PLAIN, make_inputs(PLAIN, "cpu"))
    assert capfd.readouterr() == ("", "")
    print("heard")
    assert capfd.readouterr().out == "heard\n"
    assert prepared.outputs(prepared.call())["out"].shape == (2, 24, 4, 16)


def test_collections_are_spared_what_was_imported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Later, what lives is of cases and has to be collected."""
    done: list[str] = []
    stand_in = types.SimpleNamespace(
        collect=lambda: done.append("collect"), freeze=lambda: done.append("freeze")
    )
    monkeypatch.setattr(base, "gc", stand_in)
    base.spare_imported.cache_clear()
    for device in ("cpu", "cuda", "cuda", "cpu"):
        base.spare_imported(device)
    base.spare_imported.cache_clear()
    assert done == ["collect", "freeze"]


def test_every_peer_on_cuda_says_that_there_is_no_device(no_device: None) -> None:
    peers = make_all_peers("cuda")
    # Between them there may be families of kernels of this library.
    rivals = [peer.name for peer in peers if not is_ours(peer.name)]
    assert (peers[0].name, rivals[0]) == ("cupy_flash", "naive")
    assert {"fa2", "cudnn", "efficient", "math", "flex", "fa4", "jax"} < {
        peer.name for peer in peers
    }
    for peer in peers:
        assert peer.why_not(PLAIN) == "no CUDA device"
        with pytest.raises(Unsupported, match="no CUDA device"):
            peer.prepare(PLAIN, make_inputs(PLAIN, "cpu"))


def test_a_device_that_is_no_kind_of_device() -> None:
    with pytest.raises(ValueError, match="'gpu'"):
        make_all_peers("gpu")


def test_each_family_is_a_peer_if_there_is_a_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench.peers, "FAMILIES", ("simt",))
    assert "cupy_flash:simt" not in [p.name for p in make_all_peers("cuda")]
    monkeypatch.setattr(bench.peers, "FAMILIES", ("simt", "mma"))
    names = [peer.name for peer in make_all_peers("cuda")]
    assert names[:3] == ["cupy_flash", "cupy_flash:simt", "cupy_flash:mma"]
    assert len(set(names)) == len(names)
    monkeypatch.undo()
    names = [peer.name for peer in make_all_peers("cuda")]
    assert names[1:4] == [f"cupy_flash:{name}" for name in ("simt", "mma", "wgmma")]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_forced_config_that_cannot_is_unsupported(direction: str) -> None:
    case = variant(direction=direction)
    peer = CuPyFlash("cpu", config="no_such_family")
    assert peer.name == "cupy_flash:no_such_family"
    with pytest.raises(Unsupported, match="no_such_family"):
        peer.prepare(case, make_inputs(case, "cpu"))


def test_an_error_without_a_forced_config_is_an_error() -> None:
    case = variant(kv_heads=3)  # doesn't divide the query heads
    with pytest.raises(ValueError, match="heads"):
        CuPyFlash("cpu").prepare(case, make_inputs(case, "cpu")).call()


@pytest.mark.parametrize(
    ("backend", "case", "word"),
    [
        ("CUDNN_ATTENTION", SHAPES["more_keys"], "top left"),
        ("EFFICIENT_ATTENTION", SHAPES["gqa"], "grouped"),
        ("FLASH_ATTENTION", SHAPES["head_dims"], "head size"),
        ("FLASH_ATTENTION", SHAPES["lengths"], "lengths"),
    ],
)
def test_what_sdpa_backends_do_not_take(backend: str, case: Case, word: str) -> None:
    assert word in Sdpa("peer", backend, ("float32",)).limits(case)
    # What they do take: nothing is known against it.
    assert Sdpa("peer", backend, ("float32",)).limits(SHAPES["causal"]) is None


def test_one_query_needs_no_corner() -> None:
    assert not base.needs_corner(SHAPES["one_query"])
    assert not base.needs_corner(SHAPES["causal"])
    assert not base.needs_corner(variant(kv_seqlen=30))
    assert base.needs_corner(SHAPES["more_keys"])


def test_flex_stops_when_the_time_to_compile_is_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Flex().limits(PLAIN) is None
    monkeypatch.setattr(Flex, "spent", COMPILE_SECONDS + 1)
    assert "compiling took more than" in Flex().limits(PLAIN)


def test_halves_are_multiplied_matrix_by_matrix_on_the_gpu() -> None:
    class Stand:  # for CuPy
        empty, matmul = np.empty, np.matmul

    random = np.random.default_rng(0)
    a = random.standard_normal((2, 3, 5, 4)).astype(np.float16)
    b = random.standard_normal((2, 3, 4, 7)).astype(np.float16)
    found = naive.matmul(Stand, a, b)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, naive.matmul(np, a, b), rtol=0.02, atol=0.02)


def test_a_peer_that_is_not_there_says_so_before_what_it_cannot_do() -> None:
    class Tutorial(TritonTutorial):
        device, modules, tutorial = "cpu", (), "no_such_tutorial"

    case = variant(dtype="bfloat16")
    assert Tutorial().why_not(case).startswith("no_such_tutorial can't be imported")
    Tutorial.tutorial = "json"
    assert Tutorial().absent() is None
    Tutorial.modules = ("no_such_triton",)
    assert Tutorial().why_not(case).startswith("no_such_triton can't be imported")


# --- The first call -------------------------------------------------------------------


class FakeProcess:
    """Runs no process; cold ones take longer."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def __call__(
        self, impl: str, device: str, folder: Path, timeout_s: float
    ) -> first_call.Times:
        assert (impl, device) == ("fake", "cpu") and timeout_s > 0
        assert folder.is_dir()
        self.folders.append(folder)
        warm = (folder / "kept").exists()
        (folder / "kept").write_text("")
        repeat = len(set(self.folders))
        forward = (0.25 if warm else 2.0) * repeat
        return {"import": 0.5, "forward": forward, "backward": 2 * forward}


def test_each_warm_process_follows_a_cold_one_with_the_same_caches() -> None:
    process = FakeProcess()
    rows = first_call.measure("fake", "cpu", process, time.monotonic() + 60)
    assert len(process.folders) == 2 * first_call.REPEATS
    assert process.folders[::2] == process.folders[1::2]
    assert len(set(process.folders)) == first_call.REPEATS
    assert not any(folder.exists() for folder in process.folders)
    found = {(row["impl"], row["direction"]): row for row in rows}
    assert {key: row["ms"] for key, row in found.items()} == {
        ("fake (cold)", "forward"): 4000, ("fake (cold)", "backward"): 8000,
        ("fake (warm)", "forward"): 500, ("fake (warm)", "backward"): 1000,
    }  # fmt: skip
    for row in rows:
        assert row["status"] == "ok" and row["import_ms"] == 500
        assert row["ms_spread"] == 1.0 and row["rounds"] == first_call.REPEATS


@pytest.mark.parametrize(
    ("error", "left", "status", "why"),
    [
        (
            RuntimeError("No module named 'fake'"),
            60,
            "failed",
            "No module named 'fake'",
        ),
        (subprocess.TimeoutExpired("x", 300), 900, "failed", "no result after 300 s"),
        # Stopped since the time is used up, and not for being slow.
        (subprocess.TimeoutExpired("x", 60), 60, "skipped", "the time is used up"),
    ],
)
def test_a_process_that_fails_becomes_a_row(
    error: Exception, left: float, status: str, why: str
) -> None:
    def process(*_: Any) -> first_call.Times:
        raise error

    rows = first_call.measure("fake", "cpu", process, time.monotonic() + left)
    assert len(rows) == 4
    assert {(row["status"], row["why"], row["ms"]) for row in rows} == {
        (status, why, None)
    }


def test_only_implementations_with_a_wanted_row_are_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(first_call.IMPLEMENTATIONS, "cpu", ("cupy_flash", "a", "b"))
    started: list[str] = []

    def process(impl: str, *_: Any) -> first_call.Times:
        started.append(impl)
        return {"import": 0.5, "forward": 1.0, "backward": 2.0}

    monkeypatch.setattr(first_call, "run_child", process)
    rows = first_call.rows(60, lambda line: None, "cpu", Wanted(("a",)))
    assert {row["impl"].partition(" ")[0] for row in rows} == {"cupy_flash", "a"}
    # One row is missing: all four of the implementation are made anew.
    done = frozenset((case_of(row), row["impl"]) for row in rows)
    done -= {(case_of(rows[-1]), rows[-1]["impl"])}
    started.clear()
    rows = first_call.rows(60, lambda line: None, "cpu", Wanted(("a",), done))
    assert set(started) == {"a"} and len(rows) == 4


def test_what_takes_long_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_call, "LONG_SECONDS", -1.0)
    process = FakeProcess()
    rows = first_call.measure("fake", "cpu", process, time.monotonic() + 60)
    assert len(process.folders) == 2  # cold, then warm
    assert {(row["status"], row["rounds"]) for row in rows} == {("ok", 1)}


def test_processes_that_would_start_too_late_are_skipped() -> None:
    rows = first_call.measure("fake", "cpu", FakeProcess(), time.monotonic() - 1)
    assert {row["status"] for row in rows} == {"skipped"}


def test_the_clock_runs_from_the_import_to_each_result() -> None:
    done: list[str] = []

    def step(name: str, seconds: float, result: Any) -> Any:
        done.append(name)
        time.sleep(seconds)
        return result

    times = first_call.child(
        first_call.Steps(
            load=lambda: step("load", 0.02, "library"),
            forward=lambda library: step(f"forward of {library}", 0.03, "out"),
            backward=lambda library, out: step(f"backward of {out}", 0.04, (1, 2, 3)),
            sync=lambda: done.append("sync"),
        )
    )
    assert done == [
        "sync", "load", "forward of library", "sync", "backward of out", "sync",
    ]  # fmt: skip
    assert times["import"] >= 0.02
    assert times["forward"] >= times["import"] + 0.03
    assert times["backward"] >= times["forward"] + 0.04


def test_a_real_process_gives_its_times(tmp_path: Path) -> None:
    times = first_call.run_child("cupy_flash", "cpu", tmp_path, 60)
    assert 0 < times["import"] < times["forward"] < times["backward"] < 60


def test_a_real_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'no_such_implementation'"):
        first_call.run_child("no_such_implementation", "cpu", tmp_path, 60)


def test_every_cache_lies_below_the_folder(tmp_path: Path) -> None:
    environment = first_call.environment(tmp_path)
    folders = [Path(environment[name]) for name in first_call.CACHE_FOLDERS]
    assert len(set(folders)) == len(folders)
    assert all(folder.parent == tmp_path for folder in folders)
    assert environment["CUDA_CACHE_DISABLE"] == "1"


# --- Memory ---------------------------------------------------------------------------


def test_needed_memory_is_that_of_the_results() -> None:
    case = Case("memory", "bfloat16", 2, 10, 30, 4, 2, 8, 16, False, "forward")
    out = 2 * 10 * 4 * 16 * 2
    gradients = 2 * 2 * (10 * 4 * 8 + 30 * 2 * 8 + 30 * 2 * 16)
    statistic = 2 * 10 * 4 * 4  # float32 for each row
    square = 2 * 4 * 10 * 30 * 2
    assert memory.formula(case) == {"needed_bytes": out, "square_bytes": square}
    assert memory.formula(variant(case, direction="backward")) == {
        "needed_bytes": gradients + statistic, "square_bytes": 2 * square,
    }  # fmt: skip
    assert memory.formula(variant(case, direction="both")) == {
        "needed_bytes": out + gradients + 2 * statistic, "square_bytes": 2 * square,
    }  # fmt: skip
    wide = variant(case, dtype="float64", direction="backward")
    assert memory.formula(wide)["needed_bytes"] == 4 * gradients + 2 * statistic


def test_the_peak_counts_what_was_given_back() -> None:
    def call() -> np.ndarray:
        np.ones(300_000)
        return np.ones(100_000)

    assert 2_400_000 <= memory.traced_peak(call) < 2_500_000


def test_the_hook_knows_the_peak() -> None:
    if (reason := base.why_not_importable("cupy")) is not None:
        pytest.skip(reason)
    hook = memory.counting_hook()
    hook.malloc_postprocess(mem_size=512, mem_ptr=1)
    hook.malloc_postprocess(mem_size=1024, mem_ptr=2)
    hook.free_postprocess(mem_size=1024, mem_ptr=2)
    hook.malloc_postprocess(mem_size=512, mem_ptr=3)
    assert (hook.peak, hook.now) == (1536, 1024)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (MemoryError("16 GiB"), "out of memory"),
        (RuntimeError("CUDA error: out of memory"), "out of memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: allocating"), "out of memory"),
        (RuntimeError("another\nreason"), "RuntimeError: another reason"),
    ],
)
def test_an_error_becomes_a_row_with_the_reason(error: Exception, why: str) -> None:
    class Failing(base.Peer):
        name, device = "failing", "cpu"

        def build(self, case: Case, inputs: base.Inputs) -> Callable[[], Any]:
            raise error

    row = memory.measure(Failing(), PLAIN, "cpu")
    assert (row["status"], row["why"], row["bytes"]) == ("failed", why, None)
    assert row["needed_bytes"] == PLAIN.batch * 24 * 4 * 16 * 4


def test_ours_grows_with_the_sequence_and_the_naive_one_with_its_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(memory.SEQLENS, "cpu", (1024, 2048))
    lines: list[str] = []
    rows = memory.rows(60, lines.append, "cpu")
    assert len(lines) == len(rows) == 2 * len(DIRECTIONS) * 3
    for direction in DIRECTIONS:
        sizes = {
            impl: [
                row["bytes"]
                for row in rows
                if row["impl"] == impl and row["direction"] == direction
            ]
            for impl in ("cupy_flash", "naive")
        }
        assert sizes["cupy_flash"][1] < 2.2 * sizes["cupy_flash"][0]
        assert sizes["naive"][1] > 3.5 * sizes["naive"][0]
    for row in rows:
        assert row["impl"] != "torch_cpu" or row["status"] == "unsupported"
        assert row["impl"] == "torch_cpu" or row["bytes"] > row["needed_bytes"]


def test_only_wanted_rows_of_memory_are_measured() -> None:
    every = memory.rows(-1.0, lambda line: None, "cpu")
    done = frozenset((case_of(row), row["impl"]) for row in every[4:])
    rows = memory.rows(-1.0, lambda line: None, "cpu", Wanted((), done))
    assert rows == every[:4]
    rows = memory.rows(-1.0, lambda line: None, "cpu", Wanted(("naive",), done))
    assert {row["impl"] for row in rows} == {"cupy_flash", "naive"}


def test_memory_without_time_is_skipped() -> None:
    rows = memory.rows(-1.0, lambda line: None, "cpu")
    assert {row["status"] for row in rows} == {"skipped"}
