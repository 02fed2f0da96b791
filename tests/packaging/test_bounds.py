"""The lowest and the highest versions that setup.cfg allows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .environments import (
    ROOT,
    Environment,
    lowest,
    make_environment,
    named_pythons,
    oldest_python,
    requirements,
    working_python,
)

pytestmark = pytest.mark.packaging

PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default")
ON_THE_CPU = ("test_cpu.py", "test_reference.py", "test_validate.py")
WITH_CUPY = (
    "test_aot.py", "test_cli.py", "test_compiler.py", "test_device.py",
    "test_launch.py", "test_params.py", "test_plan.py", "test_validate.py",
)  # fmt: skip
# What the tests take beside the package.
TOOLS = [r for r in requirements("test") if r.startswith(("pytest", "hypothesis"))]


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
    assert all((ROOT / "tests/unit" / name).is_file() for name in names)
    files = [f"tests/unit/{name}" for name in names]
    environment.run(*PYTEST, *files, folder=folder)


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
    wanted = lowest([*requirements("cuda13"), *TOOLS])
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
    environment = make_environment(tmp_path, working_python(*named_pythons()))
    package = f"cupy-flash[cuda13] @ {built['wheel'].as_uri()}"
    tools = [tool.partition(">=")[0] for tool in TOOLS]
    environment.install(package, *tools)
    assert "No broken requirements" in environment.pip("check")
    run_tests(environment, tests_alone, WITH_CUPY)
