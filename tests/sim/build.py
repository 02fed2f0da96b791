"""Compiles a kernel for the CPU, together with what stands in for the GPU."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cupy_flash.compiler import source_root
from cupy_flash.spec import KernelSpec

HOST = Path(__file__).with_name("host")
_FLAGS = (
    "-std=c++17", "-Og", "-g1", "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-Wno-unknown-pragmas",
)  # fmt: skip
# Of what runs the kernels, which is compiled once and takes most of a run's time.
_RUNTIME_FLAGS = (*_FLAGS, "-O1", "-fno-sanitize=undefined")


class BuildError(RuntimeError):
    """A kernel could not be compiled for the CPU."""


@functools.cache
def compiler() -> str | None:
    """Return the C++ compiler, the one that CXX names first; None if there is none."""
    names = (os.environ.get("CXX"), "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


@functools.cache
def cache() -> Path:
    """Return the folder of compiled kernels."""
    named = os.environ.get("CUPY_FLASH_SIM_CACHE")
    folder = Path(named or Path(tempfile.gettempdir(), f"cupy-flash-sim-{os.getuid()}"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def source(spec: KernelSpec) -> str:
    """Return the translation unit: the kernel, and a main that launches it."""
    return f"""#include "main.h"
#include "{spec.header}"

{spec.tail()}
int main(int argc, char** argv) {{
  return sim::main_of("{spec.symbol}", argc, argv, cupy_flash::{spec.symbol});
}}
"""


def executable(spec: KernelSpec, capability: int, sources: Path | None = None) -> Path:
    """Compile a kernel, or return what was compiled before.

    Parameters
    ----------
    capability : int
        Of the GPU that is simulated, such as 90.
    sources : Path, optional
        Another folder in place of ``cuda_src``.

    Raises
    ------
    BuildError
        With the compiler's messages.
    """
    sources = source_root() if sources is None else sources
    text = source(spec)
    flags = (*_FLAGS, f"-DSIM_CAPABILITY={capability}")
    parts = (_digest(HOST), _digest_of_includes(spec.header, sources))
    key = _hash(repr((flags, _RUNTIME_FLAGS)), text, *parts)
    path = cache() / key
    if not path.exists():
        header, objects = _common()
        folders = (f"-I{header}", f"-I{HOST}", f"-I{sources}")
        _compile(path, text, *flags, *folders, *objects, "-x", "c++", "-")
    return path


@functools.cache
def _common() -> tuple[str, tuple[str, ...]]:
    """Return what all executables have: a folder for includes, and object files.

    They are compiled once; whoever comes meanwhile waits.
    """
    import fcntl  # not on Windows

    files = sorted(HOST.glob("*.cc"))
    with open(cache() / "lock", "w") as lock, ThreadPoolExecutor(len(files)) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        objects = pool.map(_object, files)
        return str(_precompiled_header()), tuple(map(str, objects))


def _object(file: Path) -> Path:
    path = cache() / f"{file.stem}-{_hash(repr(_RUNTIME_FLAGS), _digest(HOST))}.o"
    if not path.exists():
        _compile(path, "", *_RUNTIME_FLAGS, f"-I{HOST}", "-c", str(file))
    return path


def _precompiled_header() -> Path:
    """Return a folder where GCC finds main.h parsed; others look for it further on.

    That is most of what a small kernel takes, and a third of a large one.
    """
    folder = cache() / f"header-{_hash(repr(_FLAGS), _digest(HOST))}"
    path = folder / "main.h.gch"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        header = str(HOST / "main.h")
        _compile(path, "", *_FLAGS, f"-I{HOST}", "-x", "c++-header", header)
    return folder


def _compile(path: Path, text: str, *arguments: str) -> None:
    """Compile a text; nobody sees half a result."""
    with tempfile.NamedTemporaryFile(dir=cache(), delete=False) as file:
        part = Path(file.name)
    done = subprocess.run(
        [compiler(), *arguments, "-o", str(part)],
        input=text, text=True, capture_output=True,
    )  # fmt: skip
    if done.returncode:
        part.unlink()
        raise BuildError(done.stderr[:4000])
    part.chmod(0o755)
    os.replace(part, path)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@functools.cache
def _digest(folder: Path) -> str:
    """Return a hash of all files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _digest_of_includes(header: str, sources: Path) -> str:
    """Return a hash of a header and all that it includes, found as the compiler does.

    A change of other sources renews nothing.
    """
    texts: dict[str, str] = {}
    todo = [header]
    while todo:
        name = todo.pop()
        if name in texts:
            continue
        paths = (folder / name for folder in (HOST, sources))
        path = next((path for path in paths if path.is_file()), None)
        texts[name] = "" if path is None else path.read_text(encoding="utf-8")
        todo += re.findall(r'^#include "(.+)"', texts[name], re.MULTILINE)
    return _hash(*(f"{name}\0{texts[name]}" for name in sorted(texts)))
