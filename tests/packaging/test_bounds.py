"""The lowest and the highest versions that setup.cfg allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from .environments import (
    ROOT,
    copy_of_the_tree,
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
    "test_aot.py", "test_cli.py", "test_compiler.py", "test_cpu.py", "test_device.py",
    "test_launch.py", "test_params.py", "test_plan.py", "test_validate.py",
)  # fmt: skip
# What the tests take beside the package; its own bounds are those of the test extra.
TOOLS = [r for r in requirements("test") if r.startswith(("pytest", "hypothesis"))]


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_the_tree(tmp_path_factory.mktemp("tree") / "cupy_flash")


def files(names: tuple[str, ...]) -> list[str]:
    found = [f"tests/unit/{name}" for name in names]
    assert all((ROOT / name).is_file() for name in found)
    return found


def lower_python() -> str:
    python = working_python(oldest_python())
    if python is None:
        pytest.skip(f"there is no Python {oldest_python()} to test the lower bounds on")
    return python


def test_lowest_numpy_alone(tree: Path, tmp_path: Path) -> None:
    """The CPU path, without CuPy."""
    environment = make_environment(tmp_path, lower_python())
    environment.install(*lowest([*requirements(), *TOOLS]))
    for bound in requirements():
        name, _, version = bound.partition(">=")
        assert environment.version(name).startswith(version), name
    environment.run(*PYTEST, *files(ON_THE_CPU), folder=tree)


def test_lowest_cupy(tree: Path, tmp_path: Path) -> None:
    """With the oldest NumPy that it accepts; kernels are compiled, not run."""
    environment = make_environment(tmp_path, lower_python())
    wanted = lowest([*requirements("cuda13"), *TOOLS])
    # The oldest CuPy that is allowed needs a newer NumPy than the CPU path does.
    environment.install(*(pin for pin in wanted if not pin.startswith("numpy")))
    environment.install("numpy==2.0.*")
    assert "No broken requirements" in environment.run("-m", "pip", "check")
    (cupy,) = (r for r in requirements("cuda13") if r.startswith("cupy"))
    assert environment.version("cupy-cuda13x").startswith(cupy.partition(">=")[2])
    environment.run(*PYTEST, *files(WITH_CUPY), folder=tree)


def test_highest(tree: Path, tmp_path: Path) -> None:
    """What an ordinary installation gives, on the newest Python there is."""
    environment = make_environment(tmp_path, working_python(*named_pythons()))
    environment.install(*requirements("cuda13"), *TOOLS)
    assert "No broken requirements" in environment.run("-m", "pip", "check")
    environment.run(*PYTEST, *files(WITH_CUPY), folder=tree)
