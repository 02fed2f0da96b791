"""What is built once for all tests of the package."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from .environments import Environment, copy_of_the_tree, make_environment


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_the_tree(tmp_path_factory.mktemp("tree") / "cupy_flash")


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = make_environment(tmp_path_factory.mktemp("builder"))
    environment.install("build", "twine")
    return environment


@pytest.fixture(scope="session")
def built(
    tree: Path, builder: Environment, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The wheel and the sdist of the tree, and a wheel made of that sdist alone."""
    folder = tmp_path_factory.mktemp("built")
    builder.run(
        "-m", "build", "--wheel", "--sdist", "--outdir", str(folder / "tree"), str(tree)
    )
    (wheel,) = (folder / "tree").glob("*.whl")
    (sdist,) = (folder / "tree").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    builder.run(
        "-m", "build", "--wheel", "--outdir", str(folder / "again"), str(unpacked)
    )
    (again,) = (folder / "again").glob("*.whl")
    return {"wheel": wheel, "sdist": sdist, "wheel of the sdist": again}
