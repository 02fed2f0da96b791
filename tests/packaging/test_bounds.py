"""The lowest and the highest versions that setup.cfg allows."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from .environments import (
    Environment,
    build_requirements,
    contents,
    extra,
    lowest,
    make_environment,
    named_pythons,
    oldest_python,
    requirements,
    working_python,
)

pytestmark = pytest.mark.packaging

# Other versions warn of other things, which is no failure of this library.
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default")
# The longest first: they run side by side.
ON_THE_CPU = ("test_cpu.py", "test_reference.py", "test_validate.py")
# What meets CuPy or its compiler; plans and the CPU path don't differ with its version.
WITH_CUPY = (
    "test_compiler.py", "test_cli.py", "test_aot.py", "test_launch.py",
    "test_params.py", "test_device.py",
)  # fmt: skip
# What these tests take beside the package.
TOOLS = [r for r in extra("test") if r.startswith(("pytest", "hypothesis"))]


@pytest.fixture(scope="session")
def tests_alone(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests without the package, so that they import the installed one."""
    folder = tmp_path_factory.mktemp("tests")
    for name in ("tests", "bench"):
        shutil.copytree(tree / name, folder / name)
    for name in ("setup.cfg", "README.md"):
        shutil.copy2(tree / name, folder / name)
    return folder


def run_tests(environment: Environment, folder: Path, names: tuple[str, ...]) -> None:
    where = environment.run("-c", "import cupy_flash as c; print(c.__file__)")
    assert environment.python.parents[1] in Path(where.strip()).parents
    run_pytest = partial(environment.run, *PYTEST, folder=folder)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for output in pool.map(run_pytest, [f"tests/unit/{name}" for name in names]):
            assert " passed" in output


def lower_python() -> str:
    python = working_python(oldest_python())
    if python is None:
        pytest.skip(f"there is no Python {oldest_python()} to test the lower bounds on")
    return python


def test_lowest_numpy_alone(
    built: dict[str, Path], tests_alone: Path, tmp_path: Path
) -> None:
    """The CPU path, without CuPy."""
    environment = make_environment(tmp_path, lower_python())
    environment.install(str(built["wheel"]), *lowest([*requirements(), *TOOLS]))
    assert "No broken requirements" in environment.pip("check")
    run_tests(environment, tests_alone, ON_THE_CPU)


def test_lowest_cupy(built: dict[str, Path], tests_alone: Path, tmp_path: Path) -> None:
    """With the oldest NumPy that it accepts; kernels are compiled, not run."""
    environment = make_environment(tmp_path, lower_python())
    wanted = lowest([*requirements(), *extra("cuda13"), *TOOLS])
    pins = [pin for pin in wanted if not pin.startswith("numpy")]
    environment.install(str(built["wheel"]), *pins)
    # The oldest CuPy that is allowed needs a newer NumPy than the CPU path does.
    code = "import importlib.metadata as m; print(*m.requires('cupy-cuda13x'))"
    needs = environment.run("-c", code).split()
    (numpy,) = (need for need in needs if need.startswith("numpy"))
    (bound,) = (b for b in numpy.removeprefix("numpy").split(",") if b[:2] == ">=")
    environment.install(f"numpy=={bound[2:]}")
    assert "No broken requirements" in environment.pip("check")
    run_tests(environment, tests_alone, WITH_CUPY)


def test_highest(built: dict[str, Path], tests_alone: Path, tmp_path: Path) -> None:
    """What an ordinary installation gives, on the newest Python there is."""
    python = working_python(*named_pythons())
    assert python is not None, f"none of {named_pythons()} starts"
    environment = make_environment(tmp_path, python)
    environment.install(f"cupy-flash[cuda13,test] @ {built['wheel'].as_uri()}")
    assert "No broken requirements" in environment.pip("check")
    run_tests(environment, tests_alone, ("test_cpu.py", *WITH_CUPY))


def test_lowest_build_tools(built: dict[str, Path], tree: Path, tmp_path: Path) -> None:
    """They write the same package; only their own name in it differs."""
    environment = make_environment(tmp_path, lower_python())
    environment.install("build", *lowest(build_requirements()))
    source = shutil.copytree(
        tree, tmp_path / "tree", ignore=shutil.ignore_patterns("*.egg-info", "build")
    )
    build = ("-m", "build", "--no-isolation", "--wheel", "--outdir")
    environment.run(*build, str(tmp_path / "wheel"), str(source))
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    files, expected = contents(wheel), contents(built["wheel"])
    differ = {name for name in expected if files.get(name) != expected[name]}
    assert files.keys() == expected.keys()
    assert {name.rpartition("/")[2] for name in differ} <= {"WHEEL", "RECORD"}
