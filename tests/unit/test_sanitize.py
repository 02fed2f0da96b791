"""What the run under compute-sanitizer calls, and how it reads what the tools say."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_flash import configs
from cupy_flash.device import CuPyDevice
from cupy_flash.spec import KernelSpec
from tests.gpu import sanitize
from tests.gpu.sanitize import GRID, TOOLS, Found, grid, kernels, understood

DTYPES = {"float16", "bfloat16", "float32", "float64"}
CLEAN = "calls were made: 7\n========= ERROR SUMMARY: 0 errors\n"


@pytest.fixture(scope="module")
def specs() -> list[KernelSpec]:
    return kernels("sm_90")


def test_each_kernel_of_each_family_is_run(specs: list[KernelSpec]) -> None:
    for family, dtype in itertools.product(("simt", "mma"), DTYPES):
        ran = {s.kernel for s in specs if (s.family, s.dtype.name) == (family, dtype)}
        expected = {"forward", "backward_dq", "backward_dkdv", "backward_dbias"}
        expected |= {"backward", "convert_dq"} if family == "mma" else set()
        assert ran == expected, (family, dtype)
    assert {s.kernel for s in specs if s.family == "passes"} == {
        "delta",
        "reduce_dbias",
    }


def test_each_option_is_used_and_left_out(specs: list[KernelSpec]) -> None:
    for family in ("simt", "mma"):
        variants = [s.variant for s in specs if s.family == family]
        for name in ("left", "right", "softcap", "alibi", "mask"):
            assert {getattr(v, name) for v in variants} == {False, True}, name
        assert {v.ragged for v in variants} == (
            {False, True} if family == "mma" else {False}
        )
    assert any(case.q_lengths and case.k_lengths for case in GRID)
    assert any(case.hq > case.hkv for case in GRID)


def test_no_size_fills_a_tile(specs: list[KernelSpec]) -> None:
    for spec, (case, _) in itertools.product(specs, grid()):
        if spec.tile is not None:
            for size in (spec.tile.rows, spec.tile.columns):
                assert case.sq % size and case.sk % size


def test_tiles_of_long_sequences_are_run_too(specs: list[KernelSpec]) -> None:
    tiles = {(s.kernel, s.tile) for s in specs if s.family == "mma"}
    for kernel, table in (
        ("forward", configs.MMA_FORWARD),
        ("backward", configs.MMA_BACKWARD),
    ):
        row = table[0]
        assert (kernel, row.tile(64, 64)) in tiles
    assert len({tile.depth for kernel, tile in tiles if kernel == "forward"}) == 3


def test_each_tile_of_the_gradients_of_wgmma_is_run(specs: list[KernelSpec]) -> None:
    tiles = {s.tile for s in specs if s.kernel in ("backward", "backward_by_role")}
    assert set(configs.WGMMA_BACKWARD) <= tiles


def test_a_family_that_can_not_be_had_is_left_out() -> None:
    """bfloat16 and the wider types, which Turing's tensor cores don't have."""
    specs = kernels("sm_75")
    assert {s.dtype.name for s in specs if s.family == "mma"} == {"float16"}
    assert {s.dtype.name for s in specs if s.family == "simt"} == DTYPES


@pytest.mark.parametrize(
    ("text", "code", "errors"),
    [
        (CLEAN, 0, 0),
        (CLEAN.replace("0 errors", "1 error"), 0, 1),
        (CLEAN.replace("0 errors", "12 errors"), 1, 12),
        (
            "========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n"
            "calls were made: 7\n",
            0,
            3,
        ),
        (
            "calls were made: 7\n"
            "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
            0,
            0,
        ),
        (CLEAN, -9, None),  # killed
        ("========= ERROR SUMMARY: 0 errors\n", 1, None),  # the calls ended early
        ("calls were made: 7\n", 0, None),  # the tool did
        ("========= Device not supported\n", 255, None),
    ],
)
def test_what_a_tool_says(text: str, code: int, errors: int | None) -> None:
    found = understood(text, code, 1.5)
    assert (found.errors, found.calls) == (errors, 0 if errors is None else 7)
    assert bool(found.report) == (errors != 0)


def test_shares_are_added_up() -> None:
    clean, bad = Found(0, 3, 2.0), Found(2, 4, 1.5, ("two",))
    lost = Found(None, 0, 9.0, ("it was stopped",))
    assert clean + bad == Found(2, 7, 2.0, ("two",))
    assert bad + lost + clean == Found(None, 7, 9.0, ("two", "it was stopped"))


def test_shares_are_all_calls_together(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    gpu = SimpleNamespace(synchronize=lambda: None)
    cuda = SimpleNamespace(Device=lambda: gpu, set_allocator=lambda allocator: None)
    monkeypatch.setattr(sanitize, "cp", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(sanitize, "run", lambda *call: made.append(call) or 2)
    counts = [sanitize.run_all(share, 3) for share in range(3)]
    assert sum(counts) == 2 * len(made) and max(counts) - min(counts) <= 2
    assert sorted(map(str, made)) == sorted(map(str, grid()))


# A stand-in for the sanitizer: what it says of a tool is in a file beside it.
FAKE = """#!{python}
import pathlib, sys
if "--version" in sys.argv:
    print("NVIDIA (R) Compute Sanitizer\\nVersion 2025.3.1.0 (build 1)")
else:
    tool = sys.argv[sys.argv.index("--tool") + 1]
    assert sys.argv[-2] == "--calls" and sys.argv[-1] in "012", sys.argv
    print(pathlib.Path(__file__).with_name(tool).read_text())
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a GPU and a sanitizer that finds nothing."""
    executable = tmp_path / "compute-sanitizer"
    executable.write_text(FAKE.format(python=sys.executable))
    executable.chmod(0o755)
    for tool in TOOLS:
        (tmp_path / tool).write_text(CLEAN)

    gpu = SimpleNamespace(compute_capability="90")
    cuda = SimpleNamespace(Device=lambda: gpu)
    monkeypatch.setattr(sanitize, "cp", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(sanitize, "sanitizer", lambda: str(executable))
    monkeypatch.setattr(sanitize, "precompile", lambda specs, capability: len(specs))
    monkeypatch.setattr(sanitize, "run_all", lambda: 7)
    monkeypatch.setattr(sanitize, "describe_machine", lambda: {"device": "a GPU"})
    monkeypatch.setattr(sanitize, "RESULT", tmp_path / "result.json")
    return tmp_path


@pytest.mark.skipif(sys.platform == "win32", reason="Windows runs no such script")
def test_a_record_is_written(fake: Path) -> None:
    assert sanitize.main(["--shares", "3", "--out", str(fake / "too.json")]) == 0
    made = json.loads((fake / "result.json").read_text())
    assert made == json.loads((fake / "too.json").read_text())
    assert made["device"] == "a GPU" and made["compute_sanitizer"] == "2025.3.1.0"
    assert made["source_sha256"] == sanitize.source_sha256() and made["kernels"] > 50
    assert list(made["tools"]) == list(TOOLS)
    for found in made["tools"].values():
        assert (found["errors"], found["calls"]) == (0, 21) and "report" not in found


@pytest.mark.skipif(sys.platform == "win32", reason="Windows runs no such script")
@pytest.mark.parametrize("complete", [True, False])
def test_what_was_found_is_not_hidden(fake: Path, complete: bool) -> None:
    """Errors go into the record; a tool that didn't run leaves none behind."""
    said = CLEAN.replace("0 errors", "2 errors") if complete else "not supported"
    (fake / "initcheck").write_text(said)
    assert sanitize.main(["--shares", "1"]) == 1
    assert (fake / "result.json").exists() == complete
    if complete:
        made = json.loads((fake / "result.json").read_text())
        assert made["tools"]["initcheck"]["errors"] == 2
        assert made["tools"]["initcheck"]["report"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows runs no such script")
def test_one_tool_makes_no_record(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sanitize.main(["--tool", "memcheck", "--shares", "2"]) == 0
    assert "memcheck: 14 calls, 0 errors" in capsys.readouterr().err
    assert not (fake / "result.json").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows runs no such script")
def test_a_tool_that_hangs_is_stopped(tmp_path: Path) -> None:
    executable = tmp_path / "slow"
    # As the sanitizer does, it has another process do the work.
    work = "subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    executable.write_text(f"#!{sys.executable}\nimport subprocess, sys\n{work}\n")
    executable.chmod(0o755)
    began = time.monotonic()
    process = sanitize.start(str(executable), "memcheck", [])
    found = sanitize.read(process, began, began + 0.5)
    assert isinstance(found, Found) and found.errors is None
    assert "because of its time" in found.report[-1]
    assert time.monotonic() - began < 30


@pytest.mark.skipif(sys.platform == "win32", reason="Windows runs no such script")
def test_an_interrupt_stops_the_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = tmp_path / "slow"
    executable.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    executable.chmod(0o755)
    started: list[Any] = []

    def start(*arguments: Any) -> Any:
        started.append(real(*arguments))
        return started[-1]

    def interrupt(*arguments: Any) -> Found:
        raise KeyboardInterrupt

    real = sanitize.start
    monkeypatch.setattr(sanitize, "start", start)
    monkeypatch.setattr(sanitize, "read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sanitize.run_tools(str(executable), ("memcheck", "racecheck"), [], 2, 60)
    assert len(started) == 4
    assert all(process.wait(10) == -signal.SIGKILL for process in started)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--tool", "leakcheck"], "leakcheck unknown; accepted: memcheck"),
     (["--shares", "0"], "0 is less than 1"),
     (["--shares", "2", "--calls", "2"], "share 2 of 2: they begin at 0"),
     ([], "neither on the path")],
)  # fmt: skip
def test_mistakes_are_explained(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    with pytest.raises(SystemExit):
        sanitize.main(arguments)
    assert message in capsys.readouterr().err


def test_a_call_that_is_refused_is_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, or backward alone."""
    tried: list[Any] = []

    def refuse(*arguments: Any, config: Any, **options: Any) -> None:
        tried.append(config)
        raise ValueError("config='mma' can't be had: no")

    def forward(*arguments: Any, config: Any, **options: Any) -> tuple[Any, Any]:
        if config == "wgmma":
            return None, None
        refuse(config=config)

    monkeypatch.setattr(sanitize, "to_gpu", lambda x: x)
    monkeypatch.setattr(sanitize, "flash_attention", forward)
    monkeypatch.setattr(sanitize, "flash_attention_backward", refuse)
    assert sanitize.run(GRID[-1], "mma") == 0 and tried == ["mma"]
    assert sanitize.run(GRID[-1], ("wgmma", "mma")) == 1
    assert tried == ["mma"] * 3


def test_what_is_read_but_not_used_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    def temporary(self: CuPyDevice, shape: tuple[int], dtype: np.dtype) -> np.ndarray:
        return np.full(shape, 7, dtype)

    def dense_copy(self: CuPyDevice, array: None, multiple: int = 1) -> np.ndarray:
        return self.temporary((multiple,), np.dtype(np.uint8))

    monkeypatch.setattr(CuPyDevice, "temporary", temporary)
    monkeypatch.setattr(CuPyDevice, "dense_copy", dense_copy)
    monkeypatch.setattr(CuPyDevice, "clear", lambda _, array: array.fill(0))
    sanitize.clear_unused()
    gpu = object.__new__(CuPyDevice)
    assert not gpu.temporary((1,), np.dtype(np.uint64)).any()
    assert not gpu.dense_copy(None, 4).any()
    # Other workspace isn't: whoever reads of it what nobody wrote is to be found.
    assert gpu.temporary((3,), np.dtype(np.float32)).all()
    assert gpu.temporary((3,), np.dtype(np.uint8)).all()
