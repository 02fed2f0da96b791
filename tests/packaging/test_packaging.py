"""Wheel, sdist and editable install, each in an environment of its own."""

from __future__ import annotations

import email.message
import email.parser
import zipfile
from pathlib import Path

import pytest

import cupy_flash

from .environments import (
    Environment,
    contents,
    extra,
    lowest,
    make_environment,
    named_pythons,
    oldest_python,
    setup_cfg,
)

pytestmark = pytest.mark.packaging

# The wheel that is made of the sdist alone is the same file by file; see below.
KINDS = ("wheel", "editable")

# Run where the checkout isn't in sight; prints where the package and its sources lie.
CHECK = """
import numpy as np
import cupy_flash
from cupy_flash import compiler, explain, flash_attention

q, k, v = np.random.default_rng(0).standard_normal((3, 2, 50, 4, 32), dtype=np.float32)
s = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(32)
p = np.exp(s - s.max(axis=-1, keepdims=True))
p /= p.sum(axis=-1, keepdims=True)
expected = np.einsum("bhij,bjhd->bihd", p, v)
assert np.abs(flash_attention(q, k, v) - expected).max() < 1e-5

(step,) = explain(q, k, v, device="sm_90").steps
image = compiler.compile_image(step.spec, 90)
assert image.suffix == ".cubin" and image.code.startswith(b"\\x7fELF")
print(cupy_flash.__file__)
print(compiler.source_root())
"""


@pytest.fixture(scope="session", params=KINDS)
def installed(
    request: pytest.FixtureRequest,
    tree: Path,
    built: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Environment]:
    """An environment with the package and what it needs to compile."""
    environment = make_environment(tmp_path_factory.mktemp("installed"))
    if request.param == "editable":
        environment.install("--editable", f"{tree}[cuda13]")
    else:
        environment.install(f"cupy-flash[cuda13] @ {built[request.param].as_uri()}")
    return request.param, environment


# --- Installed ------------------------------------------------------------------------


def test_it_works_where_the_checkout_is_not(
    installed: tuple[str, Environment], tree: Path
) -> None:
    kind, environment = installed
    package, sources = map(Path, environment.run("-c", CHECK).splitlines())
    if kind == "editable":
        assert package.parent == tree / "cupy_flash"
        assert sources == tree / "cuda_src"
    else:
        assert environment.python.parents[1] in package.parents
        assert sources == package.parent / "cuda_src"


def test_requirements_are_met(installed: tuple[str, Environment]) -> None:
    _, environment = installed
    assert "No broken requirements" in environment.pip("check")


def test_the_command_line_works(installed: tuple[str, Environment]) -> None:
    _, environment = installed
    command = ("-m", "cupy_flash")
    assert environment.run(*command, "--version").strip() == cupy_flash.__version__
    assert "sm_90" in environment.run(*command, "explain", "--arch", "sm_90")
    assert "CUDA sources" in environment.run(*command, "info")


@pytest.mark.parametrize("which", ["lowest", "newest"])
def test_cuda_12(built: dict[str, Path], tmp_path: Path, which: str) -> None:
    """The other extra, which GPUs need that CUDA 13 has given up."""
    environment = make_environment(tmp_path)
    package = f"cupy-flash[cuda12] @ {built['wheel'].as_uri()}"
    pins = lowest(extra("cuda12")) if which == "lowest" else []
    environment.install(package, *pins)
    assert "No broken requirements" in environment.pip("check")
    old_gpu = CHECK.replace("sm_90", "sm_61").replace("spec, 90", "spec, 61")
    assert old_gpu != CHECK
    assert environment.run("-c", old_gpu)


# --- The files ------------------------------------------------------------------------


def test_the_sdist_holds_all_that_the_wheel_needs(built: dict[str, Path]) -> None:
    assert contents(built["wheel"]) == contents(built["wheel of the sdist"])


def test_the_wheel_is_small_and_pure(built: dict[str, Path]) -> None:
    assert built["wheel"].name.endswith("-py3-none-any.whl")
    assert built["wheel"].stat().st_size < 2**20


def test_the_wheel_holds_the_package_and_nothing_else(
    built: dict[str, Path], tree: Path
) -> None:
    names = {n for n in contents(built["wheel"]) if ".dist-info/" not in n}
    expected = {"cupy_flash/py.typed"}
    for folder, pattern in (("cupy_flash", "*.py"), ("cuda_src", "*.cuh")):
        for path in (tree / folder).rglob(pattern):
            name = path.relative_to(tree).as_posix()
            expected.add(name if folder == "cupy_flash" else f"cupy_flash/{name}")
    assert len(expected) > 30
    assert names == expected
    assert any(n.endswith("licenses/LICENSE") for n in contents(built["wheel"]))


@pytest.fixture(scope="session")
def metadata(built: dict[str, Path]) -> email.message.Message:
    with zipfile.ZipFile(built["wheel"]) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


def test_metadata(metadata: email.message.Message, tree: Path) -> None:
    assert metadata["Name"] == "cupy-flash"
    assert metadata["Version"] == cupy_flash.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == f">={oldest_python()}"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().strip() == (tree / "README.md").read_text().strip()
    assert metadata["Summary"] and metadata["Keywords"]
    assert set(metadata.get_all("Provides-Extra")) == set(
        setup_cfg()["options.extras_require"]
    )


def test_classifiers(metadata: email.message.Message, builder: Environment) -> None:
    """Known to the index, and those of Python begin where python_requires does."""
    classifiers = metadata.get_all("Classifier")
    assert len(set(classifiers)) == len(classifiers)
    builder.install("trove-classifiers")
    code = "import trove_classifiers as t; print(*sorted(t.classifiers), sep='\\n')"
    assert set(classifiers) <= set(builder.run("-c", code).splitlines())
    minors = sorted(int(version[2:]) for version in named_pythons())
    assert minors == list(range(int(oldest_python()[2:]), minors[-1] + 1))


def test_the_index_would_take_it(built: dict[str, Path], builder: Environment) -> None:
    files = [str(built["wheel"]), str(built["sdist"])]
    output = builder.run("-m", "twine", "check", "--strict", *files)
    assert output.count("PASSED") == 2
