"""From a kernel specification to machine code, and to a kernel that can be launched.

The source of a kernel is one text: its header and all that it includes, each once,
then the traits and wrapper of its specification. NVRTC compiles it, on a machine
with or without a GPU; the result is kept on disk under a hash of everything that
went in, and `cupy.RawModule` loads it from there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import settings
from .device import DeviceInfo, import_cupy
from .spec import KernelSpec

_INCLUDE = re.compile(r'^#include "([^"]+)"$')
_OPTIONS = ("-std=c++17", "-ftz=true", "--device-as-default-execution-space")
# What CuPy raises if it, or the library, isn't there.
_NVRTC_MISSING = (ImportError, OSError, RuntimeError)
_DIGEST = 24  # hexadecimal digits of a hash in a file name


class CompileError(RuntimeError):
    """A kernel could not be compiled; the message is the compiler's first error."""


@dataclass(frozen=True, slots=True)
class Image:
    """A compiled kernel.

    Attributes
    ----------
    code : bytes
        A cubin, or PTX where NVRTC doesn't know the GPU yet.
    suffix : str
        ".cubin" or ".ptx".
    log : str
        What the compiler said.
    """

    code: bytes
    suffix: str
    log: str


@functools.cache
def source_root() -> Path:
    """Return the folder of the CUDA sources: in the wheel, or beside the package."""
    package = Path(__file__).resolve().parent
    for folder in (package / "cuda_src", package.parent / "cuda_src"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"cuda_src is neither in {package} nor beside it")


def flatten(header: str) -> str:
    """Return a header with everything that it includes, each file once.

    ``#line`` directives keep the compiler's messages at the real file and line.
    """
    seen: set[str] = set()
    lines: list[str] = []

    def add(name: str) -> None:
        seen.add(name)
        lines.append(f'#line 1 "cuda_src/{name}"')
        for number, line in enumerate(_read(name), start=1):
            include = _INCLUDE.match(line)
            if include is None:
                if line != "#pragma once":
                    lines.append(line)
                else:
                    lines.append("")
            elif include[1] in seen:
                lines.append("")
            else:
                add(include[1])
                lines.append(f'#line {number + 1} "cuda_src/{name}"')

    add(header)
    return "\n".join(lines) + "\n"


@functools.cache
def _read(name: str) -> tuple[str, ...]:
    return tuple((source_root() / name).read_text(encoding="utf-8").splitlines())


def source_text(spec: KernelSpec) -> str:
    """Return the whole translation unit of a kernel."""
    return f'{flatten(spec.header)}#line 1 "{spec.symbol}"\n{spec.tail()}'


def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's version, (0, 0) if it can't be loaded."""
    try:
        return _nvrtc().getVersion()
    except _NVRTC_MISSING:
        return (0, 0)


@functools.cache
def _nvrtc() -> Any:
    """Return CuPy's binding of NVRTC, which needs no GPU."""
    return import_cupy().cuda.nvrtc


def options(
    capability: int, architecture_specific: bool = False
) -> tuple[tuple[str, ...], str]:
    """Return NVRTC's options for a compute capability, and the suffix of the result.

    `architecture_specific` code runs on that very architecture alone.

    Raises
    ------
    CompileError
        If there is no NVRTC, or this one can't make code for that GPU.
    """
    try:
        known = _nvrtc().getSupportedArchs()
    except _NVRTC_MISSING as error:
        raise CompileError(
            "NVRTC can't be loaded; pip install 'cupy-flash[cuda13]' brings it "
            f"({str(error).strip().partition(chr(10))[0]})"
        ) from error
    if capability in known:
        specific = "a" if architecture_specific else ""
        return (*_OPTIONS, f"-arch=sm_{capability}{specific}"), ".cubin"
    older = [arch for arch in known if arch < capability]
    if older:
        # The driver makes machine code of PTX for a newer GPU when it loads it.
        return (*_OPTIONS, f"-arch=compute_{max(older)}"), ".ptx"
    major, minor = _nvrtc().getVersion()
    raise CompileError(
        f"NVRTC {major}.{minor} makes code for compute capability "
        f"{_dotted(min(known))} and later, and this GPU has {_dotted(capability)}; "
        "CUDA 12 still knows it: pip install 'cupy-flash[cuda12]'"
    )


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def compile_image(spec: KernelSpec, capability: int) -> Image:
    """Compile a kernel for a compute capability, with or without a GPU.

    Raises
    ------
    CompileError
        With the compiler's first error and the kernel's name.
    """
    flags, suffix = options(capability, spec.architecture_specific)
    return _compile(source_text(spec), spec.symbol, flags, suffix)


def _compile(source: str, symbol: str, flags: tuple[str, ...], suffix: str) -> Image:
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(source, f"{symbol}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, flags)
        except nvrtc.NVRTCError as error:
            reason = _first_error(nvrtc.getProgramLog(program)) or str(error)
            major, minor = nvrtc.getVersion()
            raise CompileError(
                f"NVRTC {major}.{minor} could not compile {symbol}: {reason} "
                f"(options: {' '.join(flags)})"
            ) from None
        get = nvrtc.getCUBIN if suffix == ".cubin" else nvrtc.getPTX
        return Image(get(program), suffix, nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def _first_error(log: str) -> str:
    for line in log.splitlines():
        if "error" in line:
            return line.strip()
    return log.strip().partition("\n")[0]


def cached_image(spec: KernelSpec, capability: int) -> tuple[Path | None, Image | None]:
    """Return a kernel's file in the cache, compiling it if it isn't there.

    Where the cache can't be written the path is None and the image is returned.
    A file's name holds a hash of what went in and one of its content, so that a
    file that was cut off is found out and made anew.
    """
    flags, suffix = options(capability, spec.architecture_specific)
    source = source_text(spec)
    key = _hash(repr((flags, _nvrtc().getVersion())).encode(), source.encode())
    folder = settings.cache_folder()
    for path in _matching(folder, key, suffix):
        try:
            code = path.read_bytes()
        except OSError:
            continue
        if path.name == _file_name(key, code, suffix):
            return path, None
        _discard(path)
    image = _compile(source, spec.symbol, flags, suffix)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _file_name(key, image.code, suffix)
        _write_atomically(path, image.code)
    except OSError:
        return None, image
    return path, image


def _matching(folder: Path, key: str, suffix: str) -> list[Path]:
    try:
        return sorted(folder.glob(f"{key}-*{suffix}"))
    except OSError:
        return []


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part + b"\0")
    return digest.hexdigest()[:_DIGEST]


def _file_name(key: str, code: bytes, suffix: str) -> str:
    return f"{key}-{_hash(code)}{suffix}"


def _discard(path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        pass  # read-only, or another process was faster


def _write_atomically(path: Path, content: bytes) -> None:
    """Write under another name and rename, so that no reader sees half a file."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # others may share the folder
        os.replace(temporary, path)
    except BaseException:  # a KeyboardInterrupt too
        _discard(Path(temporary))
        raise


def load(specs: Sequence[KernelSpec], device: DeviceInfo) -> list[Any]:
    """Return kernels of the current device, ready to be called.

    Those that are missing are compiled side by side. A kernel's arguments are grid,
    block, arguments and dynamic shared memory.
    """
    with _compiling(specs, device.compute_capability) as futures:
        return [
            _function(spec, *future.result())
            for spec, future in zip(specs, futures, strict=True)
        ]


def _function(spec: KernelSpec, path: Path | None, image: Image | None) -> Any:
    if path is None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{spec.symbol[:100]}{image.suffix}"
            path.write_bytes(image.code)
            return _function(spec, path, image)
    kernel = import_cupy().RawModule(path=str(path)).get_function(spec.symbol)
    if spec.shared_memory > 48 * 1024:
        kernel.max_dynamic_shared_size_bytes = spec.shared_memory
    # The bare function: a RawKernel looks up the device again in each call.
    return kernel.kernel


@contextlib.contextmanager
def _compiling(
    specs: Sequence[KernelSpec], capability: int
) -> Iterator[list[Future[tuple[Path | None, Image | None]]]]:
    """Begin to look up or compile kernels, on all cores.

    What hasn't begun when the context ends is dropped.
    """
    pool = ThreadPoolExecutor(min(len(specs), os.cpu_count() or 1) or 1)
    try:
        yield [pool.submit(cached_image, spec, capability) for spec in specs]
    finally:
        pool.shutdown(cancel_futures=True)


def precompile(
    specs: Iterable[KernelSpec],
    capability: int,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Put kernels into the cache; return how many weren't there.

    `progress` is called with the number that is done and that of all. A kernel that
    can't be compiled doesn't keep the others from being made.

    Raises
    ------
    CompileError
        Of the first kernel that couldn't be compiled.
    OSError
        If the cache can't be written.
    """
    with _compiling(list(dict.fromkeys(specs)), capability) as futures:
        for done, future in enumerate(as_completed(futures), start=1):
            if future.exception() is None:
                _require_kept(future.result()[0])
            if progress is not None:
                progress(done, len(futures))
    return sum(future.result()[1] is not None for future in futures)


def _require_kept(path: Path | None) -> None:
    if path is None or settings.cache_is_temporary():
        raise OSError(
            "compiled kernels can't be kept: the folder of the cache can't be made or "
            "written; CUPY_CACHE_DIR names another one"
        )
