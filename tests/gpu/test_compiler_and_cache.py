"""Compiling, keeping what was compiled, and GPUs that NVRTC doesn't know."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cupy_flash import compiler, explain, flash_attention
from cupy_flash.device import cupy_device

from ..cases import FAMILIES, Case, assert_same
from .running import check_case, cp, forget_kernels, specs

# `wgmma` is for one architecture, which every NVRTC knows that compiles it.
families = pytest.mark.parametrize("family", [f for f in FAMILIES if f != "wgmma"])
ROOT = Path(__file__).resolve().parents[2]
# A kernel that few other tests use, and a quick one to compile.
CASE = Case("causal", "float32", d=24, dv=20, sq=40, sk=50, causal=True)

# Computes something in a fresh process and prints it; with "no compiler" NVRTC raises.
SCRIPT = """
import sys
import cupy, numpy as np
from cupy.cuda import nvrtc
import cupy_flash

if "no compiler" in sys.argv:
    def refuse(*arguments):
        raise AssertionError("something was compiled")
    nvrtc.compileProgram = refuse
x = np.random.default_rng(0).standard_normal((40, 2, 24)).astype(np.float32)
q = cupy.asarray(x)
out, vjp = cupy_flash.flash_attention_vjp(q, q, q, causal=True)
print(*(y.get().tobytes().hex() for y in (out, *vjp(q))))
"""


def start(cache: Path, *arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"CUPY_CACHE_DIR": str(cache), "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return output


def kernels(cache: Path) -> list[Path]:
    return sorted((cache / "cupy_flash").glob("*.cubin"))


# --- The cache on disk ----------------------------------------------------------------


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """A cache that eight processes filled at once, and what they printed."""
    cache = tmp_path_factory.mktemp("cache")
    processes = [start(cache) for _ in range(8)]
    return cache, {finish(process) for process in processes}


def test_eight_processes_at_once(filled: tuple[Path, set[str]]) -> None:
    """All get the same, and a ninth one compiles nothing."""
    cache, outputs = filled
    assert len(outputs) == 1
    found = kernels(cache)
    assert found
    assert not list(cache.rglob("*.part"))
    assert {finish(start(cache, "no compiler"))} == outputs
    assert kernels(cache) == found


def test_bad_files_in_the_cache(filled: tuple[Path, set[str]], tmp_path: Path) -> None:
    """One that was cut off, and one that is empty, are made anew."""
    cache, outputs = filled
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    found = kernels(tmp_path)
    sizes = [path.stat().st_size for path in found]
    found[0].write_bytes(found[0].read_bytes()[: sizes[0] // 2])
    found[1].write_bytes(b"")
    assert {finish(start(tmp_path))} == outputs
    assert [path.stat().st_size for path in kernels(tmp_path)] == sizes


def test_caches_that_cannot_be_written(
    filled: tuple[Path, set[str]], tmp_path: Path
) -> None:
    """Kernels are then made in memory."""
    _, outputs = filled
    # Nobody can make a file in /proc, whereas root may write to a read-only folder.
    read_only = tmp_path / "read-only" / "cupy_flash"
    read_only.parent.mkdir()
    read_only.symlink_to("/proc", target_is_directory=True)
    with pytest.raises(OSError):
        (read_only / "kernel.cubin").write_bytes(b"")
    no_folder = tmp_path / "no-folder" / "cupy_flash"
    no_folder.parent.mkdir()
    no_folder.write_text("")
    processes = [start(path.parent) for path in (read_only, no_folder)]
    for process in processes:
        assert {finish(process)} == outputs


def test_editing_a_header_makes_another_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    capability = cupy_device(0).info.compute_capability
    spec = next(iter(specs(CASE, FAMILIES[0], f"sm_{capability}")))
    first, made = compiler.cached_image(spec, capability)
    assert made is not None
    again, made = compiler.cached_image(spec, capability)
    assert (again, made) == (first, None)
    text = compiler.source_text(spec)
    monkeypatch.setattr(compiler, "source_text", lambda _: text + "// edited\n")
    other, made = compiler.cached_image(spec, capability)
    assert made is not None
    assert other != first


# --- GPUs that NVRTC doesn't know -----------------------------------------------------


@pytest.fixture
def no_kernels() -> Iterator[None]:
    """No kernel is loaded before the test, nor is what it loads there after it."""
    forget_kernels()
    yield
    forget_kernels()


@families
@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    "case", [CASE, Case("causal", "bfloat16", sq=40, sk=50, causal=True)], ids=str
)
def test_ptx_for_a_newer_gpu(
    case: Case, family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a GPU gets that came out after NVRTC; the driver makes code of it.

    The PTX is that of an old GPU here: for `simt` one that has no conversions to
    bfloat16 either.
    """
    options = compiler.options
    old = {"simt": 75, "mma": 80}[family]

    def older(capability: int, specific: bool = False) -> tuple[tuple[str, ...], str]:
        flags, _ = options(capability, specific)
        rest = [flag for flag in flags if not flag.startswith("-arch=")]
        return (*rest, f"-arch=compute_{old}"), ".ptx"

    monkeypatch.setattr(compiler, "options", older)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    results = check_case(case, family)
    assert list((tmp_path / "cupy_flash").glob("*.ptx"))
    forget_kernels()
    assert_same(check_case(case, family), results)  # from the cache


@families
def test_compute_capability_999(family: str) -> None:
    capability = cupy_device(0).info.compute_capability
    spec = next(iter(specs(CASE, family, f"sm_{capability}")))
    image = compiler.compile_image(spec, 999)
    assert image.suffix == ".ptx"
    assert spec.symbol.encode() in image.code


@pytest.mark.usefixtures("no_kernels")
def test_compute_capability_61(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC 13 has given it up: one sentence says so, and nothing is launched."""
    if compiler.nvrtc_version() < (13, 0):
        pytest.skip("NVRTC 12 still makes code for compute capability 6.1")
    device = cupy_device(cp.cuda.runtime.getDevice())
    old = replace(device.info, compute_capability=61, shared_memory=48 * 1024)
    monkeypatch.setattr(device, "info", old)
    x = cp.zeros((3, 41, 2, 24), np.float32)
    with pytest.raises(compiler.CompileError, match=r"6\.1.*CUDA 12") as caught:
        flash_attention(x, x, x, causal=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_cuda_header_is_needed(direction: str) -> None:
    """No option points the compiler at headers, and no source asks for one."""
    x = cp.zeros((3, 41, 2, 24), np.float32)
    bias = cp.zeros((41, 41), np.float32)
    backward = direction == "backward"
    plan = explain(x, x, x, bias=bias, direction=direction, bias_grad=backward)
    assert plan.steps
    for step in plan.steps:
        assert "#include" not in compiler.source_text(step.spec)
    flags, _ = compiler.options(cupy_device(0).info.compute_capability)
    assert not any(flag.startswith(("-I", "--include", "-include")) for flag in flags)
