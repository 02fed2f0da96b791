"""Fresh virtual environments, and the package built from a clean copy of the tree."""

from __future__ import annotations

import configparser
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Where there is no git to ask: what a build or a test leaves behind.
_LEFT_BEHIND = shutil.ignore_patterns(
    ".*", "*.egg-info", "__pycache__", "build", "dist", "venv"
)
# Names of variables that would bring something of the checkout or of the machine along.
_KEPT_OUT = ("PYTHON", "PYTEST", "CUPY", "CUDA_PATH", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Environment:
    """A virtual environment, used from a folder that holds nothing else."""

    python: Path
    folder: Path

    def run(self, *arguments: str, folder: Path | None = None) -> str:
        """Run Python there and return what it prints; fail with all of it."""
        return self._run([str(self.python), *arguments], folder or self.folder)

    def pip(self, *arguments: str) -> str:
        """Run pip for this environment; fail with all it says, of the index too."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python)]
        return self._run([*command, *arguments], self.folder)

    def _run(self, command: list[str], folder: Path) -> str:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_KEPT_OUT)
        }
        environment |= {
            "CUPY_CACHE_DIR": str(self.folder / "cache"),
            "OPENBLAS_NUM_THREADS": "1",
        }
        run = subprocess.run(
            command, cwd=folder, env=environment,
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert run.returncode == 0, (
            f"{' '.join(command)[:300]}: exit code {run.returncode}\n"
            f"{run.stdout[-4000:]}\n{run.stderr[-4000:]}"
        )
        return run.stdout

    def install(self, *requirements: str) -> None:
        """Install by pip."""
        self.pip("install", "--quiet", "--no-compile", *requirements)


def make_environment(folder: Path, python: str = sys.executable) -> Environment:
    """Make a virtual environment; pip stays outside."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    binaries = "Scripts" if os.name == "nt" else "bin"
    run_in = folder / "elsewhere"
    run_in.mkdir()
    return Environment(folder / "venv" / binaries / "python", run_in)


def working_python(*versions: str) -> str | None:
    """Return the first interpreter of these versions that starts, None without one."""
    for version in versions:
        if version == f"{sys.version_info.major}.{sys.version_info.minor}":
            return sys.executable
        found = shutil.which(f"python{version}")
        if found is None:
            continue
        # pyenv has one command for all its versions, which asks this variable.
        run = subprocess.run(
            [found, "-c", "import sys, venv; print(sys.executable)"],
            env=os.environ | {"PYENV_VERSION": version}, capture_output=True, text=True,
        )  # fmt: skip
        if run.returncode == 0:
            return run.stdout.strip()
    return None


def copy_of_the_tree(folder: Path) -> Path:
    """Copy what belongs to the project, and nothing that was built in its folder."""
    if not (ROOT / ".git").exists():
        return shutil.copytree(ROOT, folder, ignore=_LEFT_BEHIND)
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.decode().rstrip("\0").split("\0"):
        if (ROOT / name).is_file():  # else removed, but not from git's list
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def contents(wheel: Path) -> dict[str, str]:
    """Return the hash of each file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
        }


def setup_cfg() -> configparser.ConfigParser:
    """Return the package's metadata as it is written."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def requirements() -> list[str]:
    """Return what the package requires, as setup.cfg says it."""
    return setup_cfg()["options"]["install_requires"].split()


def extra(name: str) -> list[str]:
    """Return what an extra adds to that."""
    return setup_cfg()["options.extras_require"][name].split()


def build_requirements() -> list[str]:
    """Return what pyproject.toml says that a build needs."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r'"([^"]+)"', re.search(r"requires = \[(.*?)\]", text, re.S)[1])


def lowest(wanted: Sequence[str]) -> list[str]:
    """Turn lower bounds into the versions that they name: a>=1.2 into a==1.2."""
    assert all(">=" in requirement for requirement in wanted)
    return [requirement.replace(">=", "==") for requirement in wanted]


def oldest_python() -> str:
    """Return the oldest version of Python that setup.cfg allows."""
    return re.fullmatch(r">=(3\.\d+)", setup_cfg()["options"]["python_requires"])[1]


def named_pythons() -> list[str]:
    """Return the versions of Python in the classifiers, the newest first."""
    found = re.findall(
        r"Python :: (3\.\d+)$", setup_cfg()["metadata"]["classifiers"], re.MULTILINE
    )
    return sorted(found, key=lambda version: int(version[2:]), reverse=True)
