"""From sources to machine code: flattening, errors, the cache and its misfortunes."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import compiler
from cupy_flash.compiler import CompileError, Image, cached_image, flatten
from cupy_flash.configs import (
    PASS_THREADS,
    SIMT_FORWARD,
    MmaTile,
    SimtTile,
    WgmmaTile,
)
from cupy_flash.device import hypothetical
from cupy_flash.spec import _KERNELS, KernelSpec
from cupy_flash.variant import Variant

ROOT = Path(cupy_flash.__file__).parents[1]
FLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
HOPPER = hypothetical("sm_90")
ELF = b"\x7fELF"

# The kernel that compiles fastest, and one that includes most headers.
DELTA = KernelSpec("passes", "delta", FLOAT32, Variant(), None, PASS_THREADS, 1)
FORWARD = KernelSpec(
    "simt", "forward", FLOAT32, Variant(), SIMT_FORWARD[0].tile, 128, 1
)
KERNELS = {
    "delta": DELTA,
    "forward": FORWARD,
    **{
        kernel: KernelSpec(
            "simt", kernel, FLOAT32, Variant(),
            SimtTile(64, 32, 32, 32, resident=kernel != "backward_dbias"), 128, 1,
        )
        for kernel in ("backward_dq", "backward_dkdv", "backward_dbias")
    },
    "reduce_dbias": KernelSpec(
        "passes", "reduce_dbias", FLOAT32, Variant(),
        SimtTile(64, 32, 32, 32, resident=False), PASS_THREADS, 1,
    ),
    **{
        f"mma_{kernel}": KernelSpec(
            "mma", kernel, FLOAT32, Variant(), MmaTile(32, 32, 32, 32, 2), threads, 1
        )
        for kernel, threads in (
            ("forward", 64), ("backward", 64), ("backward_dkdv", 64),
            ("backward_dq", 64), ("backward_dbias", 64), ("convert_dq", PASS_THREADS),
        )
    },
    "wgmma_forward": KernelSpec(
        "wgmma", "forward", FLOAT16, Variant(), WgmmaTile(1, 32, 64, 64), 256, 1
    ),
    **{
        f"wgmma_{kernel}": KernelSpec(
            "wgmma", kernel, FLOAT16, Variant(), WgmmaTile(2, 128, 64, 64), threads, 1
        )
        for kernel, threads in (("backward", 384), ("backward_terms", PASS_THREADS))
    },
    "wgmma_backward_by_role": KernelSpec(
        "wgmma", "backward_by_role", FLOAT16, Variant(),
        WgmmaTile(3, 64, 64, 64, by_role=True), 512, 1,
    ),
}  # fmt: skip


def relative_names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.cuh"))


HEADERS = relative_names(compiler.source_root())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the kernels, empty."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cupy_flash"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the sources, to be changed by `edit`."""
    copy = tmp_path / "cuda_src"
    shutil.copytree(compiler.source_root(), copy)
    monkeypatch.setattr(compiler, "source_root", lambda: copy)
    compiler._read.cache_clear()
    yield copy
    compiler._read.cache_clear()


def edit(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(change(lines)) + "\n", encoding="utf-8")
    compiler._read.cache_clear()  # a process reads each file once


def insert(path: Path, at: int, line: str) -> None:
    edit(path, lambda lines: [*lines[:at], line, *lines[at:]])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The options of each compilation by NVRTC."""
    nvrtc = compiler._nvrtc()
    original = nvrtc.compileProgram
    seen: list[tuple[str, ...]] = []

    def counting(program: Any, options: tuple[str, ...] = (), *rest: Any) -> Any:
        seen.append(options)
        return original(program, options, *rest)

    monkeypatch.setattr(nvrtc, "compileProgram", counting)
    return seen


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Instead of machine code the cache gets the length of the source."""
    seen: list[str] = []

    def fake(source: str, symbol: str, flags: tuple[str, ...], suffix: str) -> Image:
        seen.append(symbol)
        return Image(f"{symbol} {len(source)}".encode(), suffix, "")

    monkeypatch.setattr(compiler, "_compile", fake)
    return seen


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


# --- Flattening -----------------------------------------------------------------------


def origins(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield each line with the file and number that the compiler will say."""
    name, number = "", 0
    for line in text.splitlines():
        directive = re.fullmatch(r'#line (\d+) "cuda_src/(.+)"', line)
        if directive:
            name, number = directive[2], int(directive[1])
            continue
        yield name, number, line
        number += 1


@pytest.mark.parametrize("header", HEADERS)
def test_every_line_keeps_its_place(header: str) -> None:
    root = compiler.source_root()
    texts = {n: (root / n).read_text(encoding="utf-8").splitlines() for n in HEADERS}
    seen: dict[str, list[int]] = {}
    for name, number, line in origins(flatten(header)):
        original = texts[name][number - 1]
        if line != original:
            assert line == "" and original.startswith(("#include", "#pragma once"))
        seen.setdefault(name, []).append(number)
    for name, numbers in seen.items():
        # Each line once and in order; only an #include has none if its file follows.
        assert numbers == sorted(set(numbers)), name
        for absent in set(range(1, len(texts[name]) + 1)) - set(numbers):
            assert texts[name][absent - 1].startswith("#include"), (name, absent)


@pytest.mark.parametrize("header", HEADERS)
def test_each_header_comes_once_and_before_its_use(header: str) -> None:
    text = flatten(header)
    started = re.findall(r'^#line 1 "cuda_src/(.+)"$', text, re.MULTILINE)
    assert len(started) == len(set(started))
    assert started[0] == header
    assert "#include" not in text and "#pragma once" not in text
    finished: list[str] = []
    open_files = [header]
    for name, _, _ in origins(text):
        if name != open_files[-1]:
            if name in open_files:
                while open_files[-1] != name:
                    finished.append(open_files.pop())
            else:
                assert name not in finished
                open_files.append(name)


def test_flattening_is_repeatable() -> None:
    assert flatten("simt/forward.cuh") == flatten("simt/forward.cuh")


@pytest.mark.parametrize("header", HEADERS)
def test_each_header_includes_what_it_needs(header: str) -> None:
    """It compiles with nothing in front of it."""
    flags, suffix = compiler.options(90)
    compiler._compile(flatten(header), header, flags, suffix)


@pytest.mark.parametrize("name", KERNELS)
def test_the_end_of_the_source_is_found_by_the_kernels_name(name: str) -> None:
    spec = KERNELS[name]
    text = compiler.source_text(spec)
    assert text.startswith(flatten(spec.header))
    assert text.endswith(f'#line 1 "{spec.symbol}"\n{spec.tail()}')


# --- Errors ---------------------------------------------------------------------------


def error_of(spec: KernelSpec, capability: int = 90, caused: bool = False) -> str:
    """Return the message of a compilation that fails, after a look at its form."""
    with pytest.raises(CompileError) as raised:
        compiler.compile_image(spec, capability)
    message = str(raised.value)
    assert "\n" not in message, "more than one line"
    assert len(message) < 500, "nobody reads that far"
    assert "template" not in message and "namespace" not in message, "it shows sources"
    # The traceback of something else would bury the sentence.
    assert (raised.value.__cause__ is not None) == caused
    assert raised.value.__context__ is None or raised.value.__suppress_context__
    return message


@pytest.mark.parametrize("position", ["first", "after includes", "last"])
@pytest.mark.parametrize(
    "header",
    ["simt/forward.cuh", "simt/tile.cuh", "common/mask.cuh", "common/params.cuh",
     "ptx/convert.cuh", "common/platform.cuh"],
)  # fmt: skip
def test_an_error_names_its_file_and_line(
    sources: Path, header: str, position: str
) -> None:
    path = sources / header
    lines = path.read_text(encoding="utf-8").splitlines()
    after = next(n for n, x in enumerate(lines) if x.startswith("namespace"))
    at = {"first": 0, "after includes": after, "last": len(lines)}[position]
    insert(path, at, 'static_assert(sizeof(int) == 5, "broken on purpose");')
    message = error_of(FORWARD)
    assert f"cuda_src/{header}({at + 1}): error: " in message
    assert "broken on purpose" in message
    assert FORWARD.symbol in message


def test_only_the_first_error_is_shown(sources: Path) -> None:
    path = sources / "common/mask.cuh"
    insert(path, 3, "int first = undeclared_one;")
    insert(path, 4, "int second = undeclared_two;")
    message = error_of(FORWARD)
    assert "undeclared_one" in message and "undeclared_two" not in message


def test_a_size_that_disagrees_is_an_error(sources: Path) -> None:
    """Python's side of the structs is checked when a kernel is compiled."""
    path = sources / "common/params.cuh"
    edit(path, lambda x: [y.replace("i64 top_left;", "int top_left[4];") for y in x])
    assert "params.py" in error_of(DELTA)


@pytest.mark.parametrize(
    ("name", "file", "data"),
    [
        ("forward", "simt/tile.cuh", "Acc data[kRows"),
        ("wgmma_forward", "wgmma/panels.cuh", "Element data[kCount"),
        ("wgmma_backward", "wgmma/panels.cuh", "Element data[kCount"),
        ("wgmma_backward", "wgmma/backward_storage.cuh", "Terms terms[Traits"),
        ("wgmma_backward_by_role", "wgmma/backward_storage.cuh", "TileO dout[Traits"),
    ]
    + [
        (name, "mma/tile.cuh", "Element data[kRows")
        for name, spec in KERNELS.items()
        if name.startswith("mma_") and spec.shared_memory
    ],
)
def test_shared_memory_that_disagrees_is_an_error(
    sources: Path, name: str, file: str, data: str
) -> None:
    spec = KERNELS[name]
    before, _, after = data.partition("[")

    def widen(lines: list[str]) -> list[str]:
        return [x.replace(data, f"{before}[8 + {after}") for x in lines]

    path = sources / file
    kept = path.read_text(encoding="utf-8")
    edit(path, widen)
    assert path.read_text(encoding="utf-8") != kept
    assert "spec.py" in error_of(spec)


def test_every_kernel_is_among_them() -> None:
    kernels = {(spec.family, spec.kernel) for spec in KERNELS.values()}
    assert kernels == set(_KERNELS)


def test_a_gpu_that_nvrtc_gave_up() -> None:
    if compiler.nvrtc_version() < (13, 0):
        pytest.skip("this NVRTC still compiles for it")
    message = error_of(DELTA, 61)
    for fact in ("NVRTC 13.", "7.5", "6.1", "CUDA 12", "cupy-flash[cuda12]"):
        assert fact in message


def test_an_option_that_nvrtc_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_OPTIONS", ("--from-the-future",))
    message = error_of(DELTA)
    assert "--from-the-future" in message and DELTA.symbol in message


def test_a_gpu_that_nvrtc_does_not_know_yet_gets_ptx() -> None:
    """The driver, which knows its own GPU, makes machine code of it."""
    image = compiler.compile_image(DELTA, 999)
    assert image.suffix == ".ptx"
    newest = max(compiler._nvrtc().getSupportedArchs())
    text = image.code.decode()
    assert f".target sm_{newest}" in text and f".entry {DELTA.symbol}(" in text


@pytest.mark.parametrize("capability", [75, 90])
def test_a_gpu_that_nvrtc_knows_gets_machine_code(capability: int) -> None:
    image = compiler.compile_image(DELTA, capability)
    assert image.suffix == ".cubin"
    assert image.code.startswith(ELF) and DELTA.symbol.encode() in image.code


def test_no_header_of_cuda_is_needed(
    compiled: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no include path, no header beside the source, and no #include left."""
    nvrtc = compiler._nvrtc()
    original = nvrtc.createProgram
    programs = []

    def create(*arguments: Any) -> Any:
        programs.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(nvrtc, "createProgram", create)
    compiler.compile_image(DELTA, 90)
    ((source, _, headers, names),) = programs
    assert len(headers) == len(names) == 0
    assert "#include" not in source
    (options,) = compiled
    assert not [
        o for o in options if o.startswith(("-I", "--include-path", "-include"))
    ]


# --- Without NVRTC or CuPy ------------------------------------------------------------


def missing(*_: object) -> Any:
    raise RuntimeError("libnvrtc.so: cannot open shared object file")


def test_planning_works_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_nvrtc", lambda: SimpleNamespace(getVersion=missing))
    assert compiler.nvrtc_version() == (0, 0)
    info = hypothetical("sm_90")
    assert info.nvrtc == (0, 0)
    q = np.zeros((5, 8), np.float32)
    assert cupy_flash.explain(q, q, q, device="sm_90").device == info


def test_compiling_without_nvrtc_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvrtc = SimpleNamespace(getVersion=missing, getSupportedArchs=missing)
    monkeypatch.setattr(compiler, "_nvrtc", lambda: nvrtc)
    message = error_of(DELTA, caused=True)
    assert "NVRTC" in message and "pip install" in message and "libnvrtc.so" in message


WITHOUT_CUPY = """
import sys
sys.modules["cupy"] = None  # then importing it fails
import numpy as np
from cupy_flash import compiler, explain, flash_attention, flash_attention_backward
assert compiler.nvrtc_version() == (0, 0)
q = np.ones((5, 2, 8), np.float32)
out, lse = flash_attention(q, q, q, return_lse=True)
flash_attention_backward(out, q, q, q, out, lse)
print(explain(q, q, q, device="sm_86", direction="backward"))
"""


def run_python(code: str, *arguments: str, **environment: str) -> str:
    process = start_python(code, *arguments, **environment)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def start_python(
    code: str, *arguments: str, **environment: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_everything_but_the_gpu_works_without_cupy() -> None:
    text = run_python(WITHOUT_CUPY)
    assert "backward on sm_86" in text and "kernel: backward_mma" in text


# --- The cache ------------------------------------------------------------------------


def test_the_second_time_nothing_is_compiled(
    cache: Path, compiled: list[tuple[str, ...]]
) -> None:
    path, image = cached_image(DELTA, 90)
    assert image is not None and len(compiled) == 1
    assert path is not None and path.parent == cache
    assert path.suffix == ".cubin" and path.read_bytes() == image.code
    assert cached_image(DELTA, 90) == (path, None)
    assert len(compiled) == 1
    assert files(cache) == [path.name]


def test_another_process_compiles_nothing(cache: Path) -> None:
    path, _ = cached_image(DELTA, 90)
    code = """
import pickle, sys
from cupy_flash import compiler
def refuse(*arguments): raise AssertionError("compiled again")
compiler._compile = refuse
path, image = compiler.cached_image(pickle.loads(bytes.fromhex(sys.argv[1])), 90)
assert image is None
print(path)
"""
    for seed in ("0", "12345"):
        # Sets and hashes of strings differ from process to process.
        out = run_python(code, pickle.dumps(DELTA).hex(), PYTHONHASHSEED=seed)
        assert out.strip() == str(path)


def test_the_folder_is_that_of_cupy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_compiler: list[str]
) -> None:
    for name in ("one", "two"):
        monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / name))
        path, _ = cached_image(DELTA, 90)
        assert path.parent == tmp_path / name / "cupy_flash"
    monkeypatch.setenv("CUPY_CACHE_DIR", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path, _ = cached_image(DELTA, 90)
    assert path.parent == tmp_path / "home/.cupy/kernel_cache/cupy_flash"


def key(spec: KernelSpec, capability: int = 90) -> str:
    """Return the part of a file's name that stands for what went in."""
    path, _ = cached_image(spec, capability)
    return path.name.partition("-")[0]


@pytest.mark.parametrize("header", HEADERS)
def test_editing_a_header_renews_the_kernels_that_include_it(
    cache: Path, sources: Path, no_compiler: list[str], header: str
) -> None:
    included = {
        name: f'#line 1 "cuda_src/{header}"' in flatten(spec.header)
        for name, spec in KERNELS.items()
    }
    assert any(included.values()), "no kernel includes it"
    before = {name: key(spec) for name, spec in KERNELS.items()}
    no_compiler.clear()
    edit(sources / header, lambda lines: [*lines[:-1], lines[-1] + "  //"])
    after = {name: key(spec) for name, spec in KERNELS.items()}
    assert {name: before[name] != after[name] for name in KERNELS} == included
    assert len(no_compiler) == sum(included.values())
    # The old kernels are still there, for a checkout of the old version.
    edit(sources / header, lambda lines: [*lines[:-1], lines[-1].removesuffix("  //")])
    assert {name: key(spec) for name, spec in KERNELS.items()} == before
    assert len(no_compiler) == sum(included.values())


def test_what_else_is_in_the_key(
    cache: Path, no_compiler: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [key(spec) for spec in KERNELS.values()]
    keys += [key(DELTA, capability) for capability in (75, 80, 100)]
    keys.append(
        key(KernelSpec("passes", "delta", FLOAT32, Variant(), None, PASS_THREADS, 2))
    )
    monkeypatch.setattr(compiler, "_OPTIONS", (*compiler._OPTIONS, "-lineinfo"))
    keys.append(key(DELTA))
    nvrtc = compiler._nvrtc()
    monkeypatch.setattr(nvrtc, "getVersion", lambda: (13, 9))
    keys.append(key(DELTA))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "damage",
    [
        lambda code: code[: len(code) // 2],
        lambda code: b"",
        lambda code: code + b"\0",
        lambda code: code[:100] + bytes([code[100] ^ 1]) + code[101:],
        lambda code: b"<html>no space left on device</html>",
    ],
    ids=["truncated", "empty", "longer", "one bit", "something else"],
)
def test_a_damaged_file_is_made_anew(
    cache: Path,
    compiled: list[tuple[str, ...]],
    damage: Callable[[bytes], bytes],
) -> None:
    path, image = cached_image(DELTA, 90)
    path.write_bytes(damage(image.code))
    again, made = cached_image(DELTA, 90)
    assert len(compiled) == 2 and made is not None
    assert again.read_bytes() == made.code == image.code
    assert cached_image(DELTA, 90) == (again, None)
    assert files(cache) == [path.name]


def test_foreign_files_are_left_alone(cache: Path, no_compiler: list[str]) -> None:
    cache.mkdir(parents=True)
    for name in ("README", "0123-4567.cubin", "half.part"):
        (cache / name).write_text("not a kernel")
    path, _ = cached_image(DELTA, 90)
    assert cached_image(DELTA, 90) == (path, None)
    assert set(files(cache)) == {"README", "0123-4567.cubin", "half.part", path.name}


def test_a_folder_in_the_place_of_a_file(cache: Path, no_compiler: list[str]) -> None:
    path, image = cached_image(DELTA, 90)
    path.unlink()
    path.mkdir()
    assert cached_image(DELTA, 90) == (None, image)
    assert files(cache) == [path.name]


def test_a_folder_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_compiler: list[str]
) -> None:
    """The kernel is then kept in memory."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "below"))
    path, image = cached_image(DELTA, 90)
    assert path is None and image is not None
    assert files(tmp_path) == ["file"]


UNWRITABLE = """
import os, pickle, sys, tempfile
from cupy_flash import compiler, settings
kept, damaged, absent = pickle.loads(bytes.fromhex(sys.argv[1]))
compiler.compile_image(absent, 90)  # loads NVRTC, which may lie in root's home
if os.geteuid() == 0:  # root may write to any folder
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
folder = settings.cache_folder()
try:
    tempfile.mkstemp(dir=folder)
except OSError:
    pass
else:
    sys.exit("the folder can be written, so this tests nothing")
before = sorted((path.name, path.read_bytes()) for path in folder.iterdir())
for spec in (damaged, absent, damaged, absent):
    path, image = compiler.cached_image(spec, 90)
    assert path is None and image.code[:4] == bytes([127]) + b"ELF"
def refuse(*arguments): raise AssertionError("compiled again")
compiler._compile = refuse
path, image = compiler.cached_image(kept, 90)
assert path.parent == folder and image is None
assert not settings.cache_is_temporary()
assert sorted((path.name, path.read_bytes()) for path in folder.iterdir()) == before
"""


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="needs POSIX permissions")
def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that somebody else filled: what is good there is used, the rest is made.

    The folder isn't pytest's, which no other user may enter.
    """
    specs = [dataclasses.replace(DELTA, batch_axes=n) for n in (1, 2, 3)]
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        monkeypatch.setenv("CUPY_CACHE_DIR", root)
        cached_image(specs[0], 90)
        path, image = cached_image(specs[1], 90)
        path.write_bytes(image.code[: len(image.code) // 2])
        path.parent.chmod(0o555)
        try:
            run_python(UNWRITABLE, pickle.dumps(specs).hex())
        finally:
            path.parent.chmod(0o755)


def test_no_home_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_compiler: list[str]
) -> None:
    """As in a container that runs under a number nobody has given a name."""
    pwd = pytest.importorskip("pwd")

    def unknown(number: int) -> Any:
        raise KeyError(number)

    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    path, image = cached_image(DELTA, 90)
    assert image is not None
    assert path is None or path.is_file()


NO_FOLDER = """
import os, pickle, sys
from cupy_flash import compiler, settings
assert "cupy" not in sys.modules
spec = pickle.loads(bytes.fromhex(sys.argv[1]))
for _ in range(2):
    path, image = compiler.cached_image(spec, 90)
    assert path.read_bytes()[:4] == bytes([127]) + b"ELF"
assert image is None, "compiled once"
assert settings.cache_is_temporary()
import cupy
try:
    compiler.precompile([spec], 90)
except OSError as error:
    print(error)
print(path.parent.parent)
"""


@pytest.mark.parametrize("variable", ["HOME", "CUPY_CACHE_DIR"])
def test_cupy_cannot_make_its_folder(variable: str, tmp_path: Path) -> None:
    """A home that can't be written: CuPy alone would not start.

    A file in the folder's place, because root may write to any folder.
    """
    pytest.importorskip("cupy")
    (tmp_path / "file").write_text("")
    environment = {"CUPY_CACHE_DIR": "", "TMPDIR": str(tmp_path)}
    environment[variable] = str(tmp_path / "file" / "below")
    output = run_python(NO_FOLDER, pickle.dumps(DELTA).hex(), **environment)
    error, folder = output.splitlines()
    assert "CUPY_CACHE_DIR" in error
    assert Path(folder).parent == tmp_path
    assert files(tmp_path) == ["file"], "nothing is left behind"


def test_a_calls_kernels_are_compiled_side_by_side(
    cache: Path, monkeypatch: pytest.MonkeyPatch, modules: SimpleNamespace
) -> None:
    monkeypatch.setattr(compiler.os, "cpu_count", lambda: 3)
    together = threading.Barrier(3)

    def fake(source: str, symbol: str, flags: tuple[str, ...], suffix: str) -> Image:
        together.wait(timeout=20)
        return Image(symbol.encode(), suffix, "")

    monkeypatch.setattr(compiler, "_compile", fake)
    specs = [dataclasses.replace(DELTA, batch_axes=n) for n in (1, 2, 3)]
    kernels = compiler.load(specs, HOPPER)
    assert [k.symbol for k in modules.kernels] == [spec.symbol for spec in specs]
    assert kernels == [k.kernel for k in modules.kernels]


@pytest.mark.parametrize("step", ["mkstemp", "fdopen", "replace"])
def test_writing_fails_half_way(
    cache: Path, no_compiler: list[str], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A full or read-only disk: nothing is left behind."""
    with monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> Any:
            raise OSError(28, "No space left on device")

        if step == "fdopen":

            def broken(handle: int, mode: str) -> Any:
                os.close(handle)
                return fail()

            patch.setattr(compiler.os, "fdopen", broken)
        else:
            patch.setattr(tempfile if step == "mkstemp" else os, step, fail)
        path, image = cached_image(DELTA, 90)
    assert path is None and image is not None
    assert files(cache) == []


COLD = """
import pickle, sys, time
from pathlib import Path
from cupy_flash import compiler
spec = pickle.loads(bytes.fromhex(sys.argv[1]))
compiler.options(90)  # imports what is slow
Path(sys.argv[2], sys.argv[3]).touch()
while not Path(sys.argv[2], "go").exists():
    time.sleep(0.001)
path, image = compiler.cached_image(spec, 90)
assert path.read_bytes()[:4] == bytes([127]) + b"ELF"
print(path.name)
"""


def test_eight_cold_processes_at_once(cache: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ready.mkdir()
    processes = [
        start_python(COLD, pickle.dumps(DELTA).hex(), str(ready), str(n))
        for n in range(8)
    ]
    deadline = time.monotonic() + 100
    while len(files(ready)) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    (ready / "go").touch()
    names = set()
    for process in processes:
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        names.add(out.strip())
    assert files(cache) == sorted(names)
    assert len(names) == 1


def test_precompiling(cache: Path, compiled: list[tuple[str, ...]]) -> None:
    other = KernelSpec("passes", "delta", FLOAT32, Variant(), None, PASS_THREADS, 2)
    compiler.precompile([DELTA, other, DELTA], 90)
    assert len(compiled) == 2 and len(files(cache)) == 2
    assert cached_image(DELTA, 90)[1] is None
    assert cached_image(other, 90)[1] is None
    compiler.precompile([DELTA, other], 90)
    assert len(compiled) == 2


def test_precompiling_reports_errors(cache: Path, sources: Path) -> None:
    insert(sources / "passes/delta.cuh", 3, "int broken = undeclared;")
    with pytest.raises(CompileError, match="undeclared"):
        compiler.precompile([DELTA, KERNELS["reduce_dbias"]], 90)
    assert len(files(cache)) == 1, "the other kernel is made all the same"


# --- Loading, by a stand-in for CuPy's ------------------------------------------------


class Refusal(Exception):
    """What the driver says to code that it can't use."""


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules that were loaded; `refuse` makes the driver refuse some code."""
    cupy = pytest.importorskip("cupy")
    record = SimpleNamespace(paths=[], codes=[], kernels=[], refuse=lambda code: False)

    class Module:
        def __init__(self, *, path: str) -> None:
            code = Path(path).read_bytes()
            record.paths.append(Path(path))
            record.codes.append(code)
            if record.refuse(code):
                raise Refusal

        def get_function(self, symbol: str) -> SimpleNamespace:
            kernel = SimpleNamespace(
                symbol=symbol, kernel=object(), max_dynamic_shared_size_bytes=None
            )
            record.kernels.append(kernel)
            return kernel

    monkeypatch.setattr(cupy, "RawModule", Module)
    monkeypatch.setattr(cupy.cuda.driver, "CUDADriverError", Refusal)
    return record


def test_loading_from_the_cache(
    cache: Path, no_compiler: list[str], modules: SimpleNamespace
) -> None:
    (kernel,) = compiler.load([DELTA], HOPPER)
    assert kernel is modules.kernels[0].kernel
    assert modules.kernels[0].symbol == DELTA.symbol
    assert modules.kernels[0].max_dynamic_shared_size_bytes is None
    compiler.load([DELTA], HOPPER)
    assert len(no_compiler) == 1
    assert [path.parent for path in modules.paths] == [cache, cache]


def test_loading_without_a_cache(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_compiler: list[str],
    modules: SimpleNamespace,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file"))
    compiler.load([DELTA], HOPPER)
    (path,) = modules.paths
    assert path.suffix == ".cubin" and not path.exists()
    assert modules.codes[0].startswith(DELTA.symbol.encode())


def test_an_error_of_the_driver(
    cache: Path, no_compiler: list[str], modules: SimpleNamespace
) -> None:
    """It isn't the file's fault, whose content was checked: nothing is made anew."""
    path, _ = cached_image(DELTA, 90)
    modules.refuse = lambda code: True
    with pytest.raises(Refusal):
        compiler.load([DELTA], HOPPER)
    assert no_compiler == [DELTA.symbol]
    assert path.exists()


def test_more_shared_memory_than_usual_is_asked_for(
    cache: Path, no_compiler: list[str], modules: SimpleNamespace
) -> None:
    for row in SIMT_FORWARD:
        spec = KernelSpec(
            "simt", "forward", FLOAT32, Variant(), row.tile, row.tile.threads, 1
        )
        compiler.load([spec], HOPPER)
        asked = modules.kernels[-1].max_dynamic_shared_size_bytes
        assert asked == (spec.shared_memory if spec.shared_memory > 49152 else None)
    assert {k.max_dynamic_shared_size_bytes is None for k in modules.kernels} == {
        False,
        True,
    }
