"""The rules of the code's layout, as far as a program can check them."""

from __future__ import annotations

import ast
import functools
import graphlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cupy_flash
from cupy_flash import compiler, settings
from cupy_flash.spec import _KERNELS

PACKAGE = Path(cupy_flash.__file__).parent
ROOT = PACKAGE.parent
CUDA = compiler.source_root()

# Who may import whom: an arrow that isn't here is refused, and there is no circle.
# Data layers (problem, dtypes) stand at the bottom, public functions at the top.
ARROWS = {
    "__init__": {"aot", "attention"},
    "__main__": {"cli"},
    "cli": {
        "__init__", "aot", "compiler", "configs", "demo", "device", "dtypes", "problem",
        "settings",
    },
    "demo": {"__init__", "device"},
    "aot": {
        "compiler", "configs", "device", "dtypes", "launch", "plan", "problem", "spec",
        "validate",
    },
    "attention": {"cpu", "device", "launch", "plan", "problem", "validate"},
    "launch": {
        "device", "params", "plan", "problem", "settings", "tensor_map", "validate",
    },
    "cpu": {"dtypes", "problem", "validate"},
    "validate": {"configs", "device", "dtypes", "problem"},
    "tensor_map": {"device", "plan", "problem"},
    "plan": {
        "device", "dtypes", "plan_base", "plan_mma", "plan_simt", "plan_wgmma",
        "problem", "tiles", "variant",
    },
    "plan_wgmma": {
        "configs", "device", "params", "plan_base", "plan_mma", "problem", "tiles",
        "variant",
    },
    "plan_mma": {"configs", "device", "plan_base", "problem", "tiles"},
    "plan_simt": {"configs", "plan_base", "tiles"},
    "plan_base": {
        "configs", "device", "dtypes", "params", "problem", "spec", "tiles", "variant",
    },
    "compiler": {"device", "settings", "spec"},
    "spec": {"dtypes", "params", "tiles", "variant"},
    "params": {"dtypes", "problem"},
    "configs": {"tiles"},
    "tiles": {"dtypes", "variant"},
    "variant": {"dtypes"},
    "device": {"problem", "settings"},
    "settings": set(),
    "problem": {"dtypes"},
    "dtypes": set(),
}  # fmt: skip

# Arrows that point upward, and so may only be followed inside a function.
LAZY = {
    # A device turns kernel specifications into kernels and knows NVRTC's version; the
    # compiler in turn is given the facts about a device.
    ("device", "compiler"),
}

# torch fronts stand above everything and know the public names alone.
TORCH_MAY_IMPORT = {"__init__", "attention"}

# Third-party modules, and where they may be imported at the top of a file.
EVERYWHERE = {"numpy", "ml_dtypes"}
FAMILIES = {"simt", "mma", "wgmma", "decode"}
# Headers of other families that a family may include: products of both have the same
# fragments.
SHARED = {
    "wgmma": {
        "mma/atom.cuh", "mma/dq_sums.cuh", "mma/gradient.cuh", "mma/masking.cuh",
        "mma/softmax.cuh", "passes/delta.cuh",
    },
}  # fmt: skip


def module_name(path: Path) -> str:
    """Return a module's name below the package: "plan", "torch.autograd"."""
    relative = path.relative_to(PACKAGE).with_suffix("")
    return ".".join(relative.parts)


def python_files() -> list[Path]:
    found = sorted(PACKAGE.rglob("*.py"))
    assert len(found) > 10
    return found


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield what a file imports, and whether at its top.

    Modules of the package are named as "." and the name below the package.
    """
    tree = tree_of(path)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        top = id(node) not in inside
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = (*base, *(node.module or "").split(".")) if node.module else base
            # `from . import x` may name a module or something in the package itself.
            names = []
            for alias in node.names:
                whole = Path(*base, alias.name)
                is_module = (ROOT / whole).with_suffix(".py").is_file() or (
                    ROOT / whole
                ).is_dir()
                local = base and base[0] == PACKAGE.name
                names.append(
                    ".".join((*base, alias.name) if local and is_module else base)
                )
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            yield (f".{rest or '__init__'}" if first == PACKAGE.name else name), top


def test_the_import_finder_finds_imports() -> None:
    found = dict(imports(PACKAGE / "launch.py"))
    assert found[".settings"] and found[".plan"] and found["numpy"]
    found = dict(imports(PACKAGE / "device.py"))
    assert found[".settings"] is True and found[".compiler"] is False
    assert found["cupy"] is False


def test_every_module_has_its_place() -> None:
    modules = {module_name(path) for path in python_files()}
    known = {name for name in modules if not name.startswith("torch.")}
    assert known <= set(ARROWS), "modules that the table of arrows doesn't know"


@pytest.mark.parametrize("path", python_files(), ids=module_name)
def test_imports_point_downward(path: Path) -> None:
    name = module_name(path)
    for imported, top in imports(path):
        if not imported.startswith("."):
            continue
        target = imported[1:]
        if name.startswith("torch."):
            assert target in TORCH_MAY_IMPORT or target.startswith("torch"), target
        elif (name, target) in LAZY:
            assert not top, f"{name} imports {target} at its top"
        else:
            assert target in ARROWS[name], f"{name} imports {target}"


def test_there_is_no_circle() -> None:
    for targets in ARROWS.values():
        assert targets <= set(ARROWS)
    graphlib.TopologicalSorter(ARROWS).prepare()


@pytest.mark.parametrize("path", python_files(), ids=module_name)
def test_third_party_imports(path: Path) -> None:
    """CuPy only where it is needed and only then, torch only in its folder."""
    name = module_name(path)
    for imported, top in imports(path):
        package = imported.partition(".")[0]
        if imported.startswith(".") or package in sys.stdlib_module_names:
            continue
        if package in EVERYWHERE:
            continue
        if package == "rich":
            assert name == "cli", "only the command line prints"
        elif package == "torch":
            assert name.startswith("torch."), "torch is imported outside torch/"
        else:
            assert package == "cupy", f"{name} imports {package}"
            assert name == "device", "CuPy is imported in one place"
            assert not top, f"{name} imports CuPy at its top"


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys; before = set(sys.modules); import cupy_flash; "
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    loaded = set(run.stdout.split())
    assert "cupy_flash" in loaded and "numpy" in loaded
    foreign = loaded - set(sys.stdlib_module_names) - EVERYWHERE - {"cupy_flash"}
    heavy = {
        "cupy", "cupyx", "cupy_backends", "torch", "jax", "scipy", "pytest", "rich",
    }  # fmt: skip
    assert not foreign & heavy


# --- Names that belong to one file ----------------------------------------------------


def code_of(path: Path) -> str:
    """Return a Python file without its docstrings and comments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                body[0] = ast.Pass()
    return ast.unparse(tree)


@pytest.mark.parametrize(
    ("words", "home"),
    [
        (r"\bRawModule\b", "compiler"),
        (r"\bRawKernel\b", None),
        (r"\bnvrtc\.(createProgram|compileProgram)", "compiler"),
        (r"\benviron\b|\bgetenv\b|\bputenv\b", "settings"),
    ],
)
def test_words_that_one_file_may_use(words: str, home: str | None) -> None:
    users = {module_name(p) for p in python_files() if re.search(words, code_of(p))}
    assert users == ({home} if home else set())


def test_environment_variables_are_few_and_documented() -> None:
    text = code_of(PACKAGE / "settings.py")
    names = set(re.findall(r"environ\.get\('(\w+)'", text))
    changed = set(re.findall(r"environ\['(\w+)'\] =", text))
    assert changed <= {"CUPY_CACHE_DIR"}, "no other is changed"
    uses = len(re.findall(r"\benviron\b", text))
    assert uses == len(names) + len(changed)
    assert len(names) <= 5
    for name in names:
        assert f"``{name}``" in (settings.__doc__ or ""), name
        assert name in (ROOT / "README.md").read_text(encoding="utf-8"), name


# --- Public functions -----------------------------------------------------------------


def test_the_public_names() -> None:
    assert sorted(cupy_flash.__all__) == cupy_flash.__all__
    for name in cupy_flash.__all__:
        assert callable(getattr(cupy_flash, name))
    fixed = {
        "explain", "flash_attention", "flash_attention_backward", "flash_attention_vjp",
        "precompile",
    }  # fmt: skip
    assert fixed <= set(cupy_flash.__all__)


@pytest.mark.parametrize("name", cupy_flash.__all__)
def test_public_functions(name: str) -> None:
    """Options by name, types everywhere, and all of it described."""
    function = getattr(cupy_flash, name)
    signature = inspect.signature(function)
    kinds = [p.kind for p in signature.parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert inspect.Parameter.VAR_POSITIONAL not in kinds
    positional = [
        p.name
        for p in signature.parameters.values()
        if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    if name == "precompile":
        assert positional == ["head_dim", "dtype"]
    else:
        assert {"q", "k", "v"} <= set(positional) <= {
            "q", "k", "v", "dout", "out", "lse",
        }  # fmt: skip
    doc = inspect.getdoc(function) or ""
    assert "Returns\n-------" in doc
    described = re.findall(r"^([\w, ]+) : ", doc, re.MULTILINE)
    described = {name for line in described for name in line.split(", ")}
    assert described >= set(signature.parameters) - described_elsewhere(name)


def described_elsewhere(name: str) -> set[str]:
    """Return the parameters for which a docstring refers to another function."""
    forward, backward = (
        set(inspect.signature(function).parameters)
        for function in (
            cupy_flash.flash_attention,
            cupy_flash.flash_attention_backward,
        )
    )
    own = {
        "flash_attention": set(),
        "flash_attention_backward": forward - {"out"},
        "precompile": set(),
    }
    return own.get(name, forward | backward)


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef):
            yield node


@pytest.mark.parametrize("path", python_files(), ids=module_name)
def test_signatures(path: Path) -> None:
    """No **kwargs, which swallows misspelt options; types everywhere."""
    for function in functions(path):
        arguments = function.args
        assert arguments.kwarg is None, f"{function.name} takes **kwargs"
        assert function.returns is not None, f"{function.name} has no return type"
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        for argument in every:
            if argument.arg not in ("self", "cls"):
                assert argument.annotation is not None, (function.name, argument.arg)


def test_public_functions_are_short() -> None:
    for function in functions(PACKAGE / "attention.py"):
        first = function.body[1 if ast.get_docstring(function) else 0]
        assert function.end_lineno - first.lineno < 20, function.name


# --- Files ----------------------------------------------------------------------------


def long_files(root: Path, pattern: str) -> list[str]:
    # "About 500 lines".
    return [
        f"{path.name}: {lines}"
        for path in sorted(root.rglob(pattern))
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 550
    ]


def test_files_are_short() -> None:
    assert long_files(PACKAGE, "*.py") == []
    assert long_files(CUDA, "*.cuh") == []


def headers() -> list[Path]:
    found = sorted(CUDA.rglob("*.cuh"))
    assert len(found) > 10
    return found


def header_name(path: Path) -> str:
    return path.relative_to(CUDA).as_posix()


def without_comments(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    assert "/*" not in text, "comments start with //"
    return re.sub(r"//.*", "", text)


def included(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    lines = re.findall(r"^[ \t]*#[ \t]*include\b.*$", text, re.MULTILINE)
    names = [re.fullmatch(r'#include "([^"]+)"', line) for line in lines]
    assert None not in names, f"an #include of another form: {lines}"
    return [match[1] for match in names if match]


def test_cuda_src_holds_headers_only() -> None:
    others = [
        header_name(path)
        for path in CUDA.rglob("*")
        if path.is_file() and path.suffix != ".cuh" and path.name != "__init__.py"
    ]
    assert not others
    assert {path.parent.parent for path in headers()} == {CUDA}


@pytest.mark.parametrize("path", headers(), ids=header_name)
def test_headers(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[0].startswith("// "), "a header starts by saying what it holds"
    code = next(n for n, line in enumerate(lines) if not line.startswith("//"))
    assert lines[code] == "#pragma once"
    assert text.count("#pragma once") == 1
    assert text.endswith("\n") and "\t" not in text
    for number, line in enumerate(lines, start=1):
        assert len(line) <= 100, f"line {number} has {len(line)} columns"
        assert line == line.rstrip(), f"line {number} ends in spaces"


@pytest.mark.parametrize("path", headers(), ids=header_name)
def test_includes_stay_inside(path: Path) -> None:
    """No CUDA header, and no family includes another one but for what it shares."""
    own = path.parent.name
    names = included(path)
    assert len(names) == len(set(names))
    for name in names:
        assert (CUDA / name).is_file(), f"{name} is not a file of cuda_src"
        assert (CUDA / name).resolve().is_relative_to(CUDA.resolve())
        folder = name.partition("/")[0]
        if own == "ptx":
            assert folder == "ptx" or name == "common/platform.cuh", name
        elif own == "common":
            assert folder in ("common", "ptx"), name
        else:
            assert own in FAMILIES | {"passes"}
            assert folder in ("common", "ptx", own) or name in SHARED.get(own, ()), name


def test_headers_do_not_include_each_other_in_a_circle() -> None:
    graph = {header_name(path): set(included(path)) for path in headers()}
    graphlib.TopologicalSorter(graph).prepare()


def test_every_header_is_part_of_a_kernel() -> None:
    used = set()
    for header, _ in _KERNELS.values():
        text = compiler.flatten(header)
        used |= set(re.findall(r'^#line 1 "cuda_src/(.+)"$', text, re.MULTILINE))
    assert {header_name(path) for path in headers()} == used


def test_every_kernel_lies_where_its_family_says() -> None:
    for (family, kernel), (header, storage) in _KERNELS.items():
        assert header.startswith(f"{family}/")
        text = without_comments(CUDA / header)
        assert re.search(rf"\bvoid {kernel}\(const Params<", text), kernel
        if storage is not None:
            assert storage.startswith(f"{family}::")


def test_asm_is_in_ptx_only() -> None:
    users = {p.parent.name for p in headers() if re.search(r"\basm\b", p.read_text())}
    assert users == {"ptx"}


def test_shared_memory_comes_from_one_place() -> None:
    """Anything else could not be run on a CPU."""
    users = [p for p in headers() if re.search(r"__shared__", without_comments(p))]
    assert [header_name(path) for path in users] == ["common/platform.cuh"]


def test_architectures_are_told_apart_in_one_place() -> None:
    users = {header_name(p) for p in headers() if "__CUDA_ARCH__" in p.read_text()}
    assert {name for name in users if not name.startswith("ptx/")} <= {
        "common/platform.cuh"
    }


def test_atomics_do_not_add_but_in_one_place() -> None:
    """So that every run gives the same bits, but for a dq that isn't deterministic.

    The other one tells blocks which tile is theirs, not what is in it.
    """
    adders = set()
    for path in headers():
        code = without_comments(path)
        atomics = set(re.findall(r"\batomic(?!Or\b)[A-Z]\w*\(", code))
        counts = header_name(path) == "wgmma/schedule.cuh"
        assert atomics == ({"atomicAdd(", "atomicCAS("} if counts else set()), path
        if re.search(r"\b(red|bulk_reduce)_add", code):
            adders.add(header_name(path))
    instructions = {"ptx/reduce.cuh", "ptx/tensor_map.cuh"}
    assert adders == {*instructions, "mma/dq_sums.cuh", "wgmma/backward_steps.cuh"}


def test_no_names_of_the_cuda_toolkit() -> None:
    """Types that only its headers define."""
    words = r"\b(__half2?|__nv_bfloat16|cuda_fp16|uint\d+_t|size_t|INFINITY|FLT_MAX)\b"
    for path in headers():
        found = re.search(words, without_comments(path))
        assert not found, f"{header_name(path)}: {found}"
