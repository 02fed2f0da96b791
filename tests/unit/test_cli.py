"""The command line: what it prints, where, in which way, and its exit codes."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash import cli, compiler, demo, explain
from cupy_flash.demo import Host, Size
from cupy_flash.device import NoDeviceError

ROOT = Path(cupy_flash.__file__).parents[1]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process: exit code, output, errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            code = cli.main(arguments)
        except SystemExit as left:  # argparse
            code = int(left.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise NoDeviceError("CuPy finds no GPU: there is none")

    monkeypatch.setattr(cli, "current_device", none)
    monkeypatch.setattr("cupy_flash.aot.current_device", none)


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "cupy_flash", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True, timeout=200,
    )  # fmt: skip


# --- The demonstration ----------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    monkeypatch.setattr(Host, "size", Size(batch=1, seqlen=96, heads=2, head_dim=16))


@pytest.mark.usefixtures("small")
def test_the_demonstration(run: Run) -> None:
    code, out, err = run()
    assert code == 0
    assert "there is none" in err and "there is none" not in out
    assert "batch 1, sequence 96, 2 heads of 16" in out
    lines = {tuple(line.split()[:2]): line.split() for line in out.splitlines() if line}
    for direction in ("forward", "backward"):
        *_, ms, rate, peak, square, error = lines["float32", direction]
        assert float(ms) > 0 and float(rate) >= 0
        assert int(peak) >= 0 and int(square) >= 0
        assert 0 < float(error) < 1e-5


def test_what_the_demonstration_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "size", Size(batch=2, seqlen=128, heads=3, head_dim=32))
    forward, backward = demo.measure(Host())
    assert forward.flops == 4 * 2 * 3 * 128**2 * 32
    assert backward.flops == 2.5 * forward.flops
    assert forward.square_bytes == 2 * 3 * 128**2 * 4
    assert backward.square_bytes == 2 * forward.square_bytes
    assert forward.peak_bytes >= 2 * 128 * 3 * 32 * 4  # the output
    assert backward.peak_bytes >= 3 * 2 * 128 * 3 * 32 * 4  # the three gradients
    assert forward.seconds > 0 and backward.seconds > 0


@pytest.mark.parametrize("wrong", ["flash_attention", "flash_attention_backward"])
def test_a_wrong_result_shows(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes from a computation of its own."""
    monkeypatch.setattr(Host, "size", Size(batch=1, seqlen=64, heads=2, head_dim=16))
    right = getattr(demo, wrong)

    def spoilt(*arguments: Any, **options: Any) -> Any:
        results = right(*arguments, **options)
        first = results[0] if isinstance(results, tuple) else results
        first[0, 5, 0, 3] += 0.25
        return results

    monkeypatch.setattr(demo, wrong, spoilt)
    error = max(row.error for row in demo.measure(Host()))
    assert error > 0.1


@pytest.mark.gpu
def test_the_demonstration_on_a_gpu() -> None:
    result = process()
    assert result.returncode == 0, result.stderr.decode()
    lines = [line.split() for line in result.stdout.decode().splitlines()]
    found = {tuple(line[:2]): line[2:] for line in lines if len(line) == 7}
    for dtype, limit in (("float16", 5e-3), ("float32", 1e-5)):
        for direction in ("forward", "backward"):
            ms, rate, peak, square, error = map(float, found[dtype, direction])
            assert ms > 0 and rate > 1
            assert peak < square / 4
            assert 0 < error < limit


# --- info -----------------------------------------------------------------------------


def test_info(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    code, out, err = run("info")
    assert (code, err) == (0, "")
    flat = " ".join(out.split())
    assert f"numpy {np.__version__}" in flat
    assert cupy_flash.__version__ in flat
    assert "NVRTC {}.{}".format(*compiler.nvrtc_version()) in flat
    kernels = flat.partition("compiled kernels ")[2]
    assert kernels.startswith("0, 0.0 MiB") and "can't be written" not in kernels


@pytest.mark.usefixtures("no_gpu")
def test_info_says_why_there_is_no_gpu(run: Run) -> None:
    code, out, _ = run("info")
    assert code == 0
    assert "none: CuPy finds no GPU: there is none" in " ".join(out.split())


def test_info_without_cupy(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise ImportError('no such thing')")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    result = process("info", PYTHONPATH=paths)
    assert result.returncode == 0, result.stderr.decode()
    assert b"no such thing" in result.stdout
    assert re.search(rb"NVRTC +not found", result.stdout)


def test_info_counts_the_kernels(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "cupy_flash"
    folder.mkdir()
    (folder / "a.cubin").write_bytes(bytes(2**20))
    (folder / "b.ptx").write_bytes(bytes(2**19))
    (folder / "note.txt").write_text("not a kernel")
    assert "2, 1.5 MiB" in run("info")[1]


def test_info_of_a_folder_that_cannot_be_made(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file"))
    code, out, _ = run("info")
    assert code == 0
    assert "can't be written" in " ".join(out.split())


# --- explain --------------------------------------------------------------------------


def test_explain_is_that_of_the_function(run: Run) -> None:
    code, out, err = run(
        "explain", "--batch", "2", "--seqlen", "100", "--kv-seqlen", "300",
        "--heads", "8", "--kv-heads", "2", "--head-dim", "96", "--head-dim-v", "64",
        "--dtype", "bf16", "--causal", "top_left", "--window", "30,none",
        "--direction", "both", "--arch", "sm_80",
    )  # fmt: skip
    assert (code, err) == (0, "")
    q, k, v = (
        np.zeros((2, sequence, heads, size), ml_dtypes.bfloat16)
        for sequence, heads, size in ((100, 8, 96), (300, 2, 96), (300, 2, 64))
    )
    options = {"causal": "top_left", "window": (30, None), "device": "sm_80"}
    plans = [explain(q, k, v, **options, direction=d) for d in ("forward", "backward")]
    assert out == f"{plans[0]}\n{plans[1]}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bias", "--bias-grad", "--direction", "backward"], "backward_dbias"),
        (["--mask"], "_mask"),
        (["--alibi"], "_alibi"),
        (["--softcap", "5"], "_softcap"),
        (["--scale", "-1"], "_scale_first"),
        (["--causal"], "_right"),
        (["--window=-1,7"], "_right"),
        (["--window", "7,0"], "_left_right"),
        (["--layout", "bhsd"], "queries 4096 x 16 heads"),
        (["--precision", "tf32", "--dtype", "fp32"], "tf32"),
        (["--dtype", "fp64"], "forward_mma_fp64"),
        (["--config", "simt"], "family: simt"),
        (["--config", "mma"], "family mma: config= asks for it"),
        (["--head-dim", "300"], "family: simt"),
        (["--lengths"], "forward_wgmma"),
        (["--deterministic", "--direction", "backward"], "same bits"),
    ],
)
def test_explain_options(arguments: list[str], words: str, run: Run) -> None:
    code, out, err = run("explain", "--arch", "sm_90", *arguments)
    assert (code, err) == (0, "")
    assert words in out


# --- precompile -----------------------------------------------------------------------


def test_precompile(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    arguments = (
        "precompile", "--head-dim", "16,24", "--dtype", "fp32", "--direction",
        "forward", "--arch", "sm_86",
    )  # fmt: skip
    code, out, err = run(*arguments)
    assert code == 0
    # One for few blocks, one for many.
    assert out.startswith("sm_86: 2 kernels compiled, 0 were there, in ")
    assert str(tmp_path / "cupy_flash") in out
    assert "2/2" in err
    assert len(list((tmp_path / "cupy_flash").glob("*.cubin"))) == 2
    assert run(*arguments)[1].startswith("sm_86: 0 kernels compiled, 2 were there")


def test_precompile_means_what_the_function_means(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(*arguments: Any, **options: Any) -> int:
        del options["progress"]
        seen.append((arguments, options))
        return 0

    monkeypatch.setattr(cli, "precompile", record)
    run("precompile", "--arch", "sm_86")
    run(
        "precompile", "--all", "--head-dim", "40,72", "--head-dim-v", "48",
        "--dtype", "bf16,fp64", "--causal", "--window", "8,0", "--scale", "0.5",
        "--softcap", "30", "--alibi", "--bias", "--bias-grad", "--mask",
        "--direction", "backward", "--precision", "tf32", "--config", "simt",
        "--arch", "sm_80", "--deterministic",
    )  # fmt: skip
    plain, full = seen
    half = cli.parse_dtype("fp16"), cli.parse_dtype("bf16")
    assert plain[0] == ((64, 128), half)
    parameters = inspect.signature(cupy_flash.precompile).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert set(plain[1]) == set(defaults) - {"head_dim", "dtype", "progress"}
    assert plain[1] == {n: defaults[n] for n in plain[1]} | {"device": "sm_86"}
    assert full[0] == ((40, 72), (half[1], cli.parse_dtype("fp64")))
    assert full[1] == {
        "head_dim_v": 48, "causal": True, "window": (8, 0), "scale": 0.5,
        "softcap": 30.0, "alibi": True, "bias": True, "bias_grad": True, "mask": True,
        "direction": "backward", "precision": "tf32", "deterministic": True,
        "config": "simt", "all": True, "device": "sm_80",
    }  # fmt: skip


# --- Errors ---------------------------------------------------------------------------


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nonsense"], 2, "invalid choice: 'nonsense'"),
        (["info", "more"], 2, "unrecognized arguments: more"),
        (["explain", "--arch", "sm_1"], 2, "sm_1"),
        (["explain", "--arch", "sm_90", "--kv-heads", "3"], 2, "16 heads"),
        (["explain", "--batch=-1"], 2, "--batch"),
        (["explain", "--seqlen", "many"], 2, "--seqlen"),
        (["explain", "--dtype", "int8"], 2, "accepted: float16"),
        (["explain", "--causal", "right"], 2, "top_left"),
        (["explain", "--window", "5"], 2, "128,0"),
        (["explain", "--arch", "sm_90", "--head-dim", "0"], 2, "head_dim 0"),
        (["explain", "--arch", "sm_90", "--precision", "tf32"], 2, "tf32"),
        (["explain"], 1, "there is none; name a GPU"),
        (["precompile"], 1, "there is none; name a GPU"),
        (["precompile", "--dtype", "fp16,"], 2, "accepted: float16"),
        (["precompile", "--head-dim", "64,x"], 2, "--head-dim"),
        (["precompile", "--arch", "sm_90", "--bias-grad"], 2, "bias"),
    ],
)
def test_an_error_is_one_line(
    arguments: list[str], code: int, words: str, run: Run
) -> None:
    found, out, err = run(*arguments)
    assert (found, out) == (code, "")
    assert words in err
    lines = [line for line in err.splitlines() if "compiling" not in line]
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (compiler.CompileError("NVRTC can't be loaded\nnor seen"), 1),
        (OSError("the folder can't be written"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise error

    monkeypatch.setattr(cli, "precompile", fail)
    found, out, err = run("precompile", "--arch", "sm_86")
    assert (found, out) == (code, "")
    assert "Traceback" not in err
    assert (" ".join(str(error).split()) or "interrupted") in err


def test_a_defect_is_not_hidden(
    run: Run, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demonstration has no arguments, so a ValueError there is our own."""

    def fail(*_: Any) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(cli, "measure", fail)
    with pytest.raises(ValueError, match="a defect"):
        run()


# --- Terminals and pipes --------------------------------------------------------------


def test_help(run: Run) -> None:
    for arguments in ((), ("info",), ("explain",), ("precompile",)):
        code, out, err = run(*arguments, "--help")
        assert (code, err) == (0, "")
        assert out.startswith("usage: python -m cupy_flash")
    assert run("--version")[1].strip() == cupy_flash.__version__


def test_a_pipe_gets_plain_text(tmp_path: Path) -> None:
    arguments = ("precompile", "--head-dim", "16", "--dtype", "fp32", "--arch", "sm_86")
    result = process(*arguments, CUPY_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr.decode()
    assert b"\x1b" not in result.stdout + result.stderr
    assert len(result.stdout.splitlines()) == 1


@pytest.mark.parametrize("command", ["info", "explain"])
def test_an_ascii_terminal(command: str) -> None:
    arguments = (command, "--arch", "sm_86") if command == "explain" else (command,)
    result = process(*arguments, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout.isascii()


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
@pytest.mark.parametrize("wanted", [True, False])
def test_colour_on_a_terminal_unless_it_is_unwanted(
    wanted: bool, tmp_path: Path
) -> None:
    master, slave = os.openpty()
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "FORCE_COLOR", "COLORTERM")
    } | {
        "PYTHONPATH": str(ROOT), "CUPY_CACHE_DIR": str(tmp_path), "TERM": "xterm",
    }  # fmt: skip
    if not wanted:
        environment["NO_COLOR"] = "1"
    started = subprocess.Popen(
        [
            sys.executable, "-m", "cupy_flash", "precompile", "--head-dim", "16",
            "--dtype", "fp32", "--direction", "forward", "--arch", "sm_86",
        ],
        env=environment, stdout=slave, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    written = b""
    while True:
        try:
            more = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not more:
            break
        written += more
    os.close(master)
    assert started.wait(timeout=200) == 0
    assert b"2 kernels compiled" in written
    coloured = re.search(rb"\x1b\[[0-9;]*3[0-7]m", written) is not None
    assert coloured == wanted


def test_a_reader_that_goes_away() -> None:
    """As in `| head -1`: no traceback."""
    command = f"'{sys.executable}' -m cupy_flash info | head -1"
    result = subprocess.run(
        command, shell=True, capture_output=True, timeout=100,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0
    assert b"Traceback" not in result.stderr
