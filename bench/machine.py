"""What a measurement was made on, and of which sources."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
# The Python files that decide which kernel runs, and how it is launched.
DECIDING = ("compiler.py", "configs.py", "launch.py", "params.py", "plan.py", "spec.py")
# What the measured implementations come from, as they are called when installed.
PACKAGES = (
    "numpy", "ml_dtypes", "torch", "triton", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
    "flash-attn", "flash-attn-4", "flashinfer-python", "xformers", "jax", "jaxlib",
)  # fmt: skip
REPEATS = 7
WARM_S = 0.3
GEMM_SIZE = {"float16": 8192, "bfloat16": 8192, "float32": 4096, "float64": 4096}


def source_sha256(root: Path = ROOT) -> str:
    """Return the hash of the sources that a record vouches for.

    Of every file in path order: its path from the root, a zero byte, its content, a
    zero byte.
    """
    names = {
        path.relative_to(root).as_posix()
        for suffix in ("cu", "cuh", "h")
        for path in (root / "cuda_src").rglob(f"*.{suffix}")
    }
    names |= {f"cupy_flash/{name}" for name in DECIDING}
    digest = hashlib.sha256()
    for name in sorted(names):
        if (root / name).exists():
            digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    return digest.hexdigest()


def describe_machine() -> dict[str, Any]:
    """Return what the tests ran on."""
    import cupy

    device = cupy.cuda.Device()
    properties = cupy.cuda.runtime.getDeviceProperties(device.id)
    runtime = cupy.cuda.runtime
    return {
        "device": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "devices": runtime.getDeviceCount(),
        "driver": _driver(),
        "driver_cuda": _dotted(runtime.driverGetVersion()),
        "cuda_runtime": _dotted(runtime.runtimeGetVersion()),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "python": platform.python_version(),
        "cupy": cupy.__version__,
        **{name: _version(name) for name in ("numpy", "ml_dtypes", "torch", "jax")},
    }


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _driver() -> str | None:
    """The version of the kernel module, where the system tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return match and match[0]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- A run of the benchmarks ----------------------------------------------------------


def run_meta(device: str, command: str, dtypes: Iterable[str]) -> dict[str, Any]:
    """Return what a result file says of its run, with the measured ceilings.

    Parameters
    ----------
    device : {"cuda", "cpu"}
    command : str
        What to type to get the same.
    dtypes : iterable of str
        Those whose matrix product is to be measured.
    """
    if device == "cuda":
        machine = describe_machine()
        facts = {
            "gpu": machine["device"],
            "multiprocessors": multiprocessors(),
            "driver": machine["driver"] or machine["driver_cuda"],
            "cuda": machine["cuda_runtime"],
            **{k: machine[k] for k in ("compute_capability", "driver_cuda", "nvrtc")},
        }
    else:
        # Keys that belong to a GPU are there all the same.
        facts = {
            "gpu": "cpu", "cpu": _cpu_name(), "multiprocessors": None, "driver": None,
            "cuda": None,
        }  # fmt: skip
    main = "bfloat16" if device == "cuda" else "float32"
    gemm = {
        dtype: gemm_tflops(device, dtype) for dtype in dict.fromkeys((main, *dtypes))
    }
    return {
        **facts,
        "python": platform.python_version(),
        "cupy": _cupy_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": commit(),
        "source_sha256": source_sha256(),
        "command": command,
        "gemm_tflops": gemm[main],
        "gemm_dtype": main,
        "gemm_tflops_by_dtype": gemm,
        "copy_tbps": copy_tbps(device),
    }


def multiprocessors() -> int:
    """Return how many the current device has."""
    import cupy

    runtime = cupy.cuda.runtime
    return int(runtime.getDeviceProperties(runtime.getDevice())["multiProcessorCount"])


def commit(root: Path = ROOT) -> str | None:
    """Return the commit of the sources, with a plus if they were changed since."""
    if shutil.which("git") is None or not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        run = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True, text=True, check=True, timeout=20,
        )  # fmt: skip
        return run.stdout.strip()

    try:
        changed = git(
            "status", "--porcelain", "--", "cupy_flash", "cuda_src", "bench/*.py"
        )
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (subprocess.SubprocessError, OSError):
        return None


def gemm_tflops(device: str, dtype: str) -> float | None:
    """Measure the rate of a large matrix product; None if nobody here can do it."""
    if device == "cpu":
        if dtype not in ("float32", "float64"):
            return None
        size = 1024
        random = np.random.default_rng(0)
        a, b = (random.standard_normal((size, size)).astype(dtype) for _ in range(2))
        ms = _median_ms(lambda: a @ b, _host_ms)
    else:
        size = GEMM_SIZE[dtype]
        product = _torch_product(size, dtype) or _cupy_product(size, dtype)
        if product is None:
            return None
        ms = _median_ms(product, device_ms)
    return 2 * size**3 / ms / 1e9


def _torch_product(size: int, dtype: str) -> Callable[[], Any] | None:
    """Return a product through PyTorch, which knows cuBLAS for every dtype."""
    from .peers.base import module, why_not_importable

    if why_not_importable("torch") is not None:
        return None
    torch = module("torch")
    if not torch.cuda.is_available():
        return None
    a, b = (
        torch.randn(size, size, device="cuda").to(getattr(torch, dtype))
        for _ in range(2)
    )
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _cupy_product(size: int, dtype: str) -> Callable[[], Any] | None:
    import cupy
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    random = cupy.random.default_rng(0)
    a, b = (
        random.standard_normal((size, size), dtype=np.float32).astype(kind)
        for _ in range(2)
    )
    try:
        cupy.matmul(a, b)
    except (TypeError, ValueError, RuntimeError):
        return None
    return lambda: cupy.matmul(a, b)


def copy_tbps(device: str) -> float:
    """Measure the rate of a large copy, counting what is read and what is written."""
    if device == "cpu":
        size = 64 << 20
        source = np.arange(size // 8).view(np.uint8)
        target = np.empty_like(source)
        ms = _median_ms(lambda: np.copyto(target, source), _host_ms)
        return 2 * size / ms / 1e9
    import cupy

    size = 1 << 30
    source = cupy.random.default_rng(0).standard_normal(size // 4, dtype=np.float32)
    target = cupy.empty_like(source)

    def copy() -> None:
        target.data.copy_from_device_async(source.data, size)

    return 2 * size / _median_ms(copy, device_ms) / 1e9


def _median_ms(call: Callable[[], Any], measure: Callable[..., float]) -> float:
    # An idle GPU takes a while to raise its clocks.
    warm = time.perf_counter() + (WARM_S if measure is device_ms else 0.0)
    measure(call)
    while time.perf_counter() < warm:
        measure(call)
    return statistics.median(measure(call) for _ in range(REPEATS))


def _host_ms(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def device_ms(call: Callable[[], Any]) -> float:
    """Time a call on the device; it takes much longer than queueing it."""
    import cupy

    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    call()
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(start, end)


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()


def _cupy_version() -> str | None:
    for package in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        if (version := _version(package)) is not None:
            return version
    return None
