"""What a measurement was made on, and of which sources."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The Python files that decide which kernel runs, and how it is launched.
DECIDING = ("compiler.py", "configs.py", "launch.py", "params.py", "plan.py", "spec.py")


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
