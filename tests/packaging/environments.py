"""Fresh virtual environments, and the package built from a clean copy of the tree."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Where there is no git to ask: what a build or a test leaves behind.
_LEFT_BEHIND = shutil.ignore_patterns(
    ".*", "*.egg-info", "__pycache__", "build", "dist", "venv"
)
_NEEDED = (".ci", ".gitignore")


@dataclass(frozen=True)
class Environment:
    """A virtual environment, used from a folder that holds nothing else."""

    python: Path
    folder: Path

    def run(self, *arguments: str, folder: Path | None = None) -> str:
        """Run Python there and return what it prints; fail with all of it."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "PYTEST", "CUPY", "VIRTUAL_ENV"))
        }
        environment |= {
            "CUPY_CACHE_DIR": str(self.folder / "cache"),
            "OPENBLAS_NUM_THREADS": "1",
        }
        run = subprocess.run(
            [self.python, *arguments], cwd=folder or self.folder, env=environment,
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert run.returncode == 0, (
            f"{' '.join(arguments)[:300]}: exit code {run.returncode}\n"
            f"{run.stdout[-4000:]}\n{run.stderr[-4000:]}"
        )
        return run.stdout

    def pip(self, *arguments: str) -> str:
        """Run pip for this environment and return what it prints."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python)]
        run = subprocess.run(
            [*command, *arguments], cwd=self.folder, capture_output=True, text=True
        )
        assert run.returncode == 0, f"{arguments}: {run.stdout}\n{run.stderr}"
        return run.stdout

    def install(self, *requirements: str) -> None:
        """Install by pip."""
        self.pip("install", "--quiet", "--no-compile", *requirements)

    def version(self, package: str) -> str:
        """Return the version of an installed package."""
        code = "import importlib.metadata, sys; print(importlib.metadata.version("
        return self.run("-c", f"{code}sys.argv[1]))", package).strip()


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
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True,
    )  # fmt: skip
    if listed.returncode != 0:
        shutil.copytree(ROOT, folder, ignore=_LEFT_BEHIND)
        for name in filter(lambda name: (ROOT / name).is_dir(), _NEEDED):
            shutil.copytree(ROOT / name, folder / name)
        return folder
    for name in listed.stdout.decode().split("\0"):
        source = ROOT / name
        if name and source.is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    return folder


def setup_cfg() -> configparser.ConfigParser:
    """Return the package's metadata as it is written."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def requirements(*extras: str) -> list[str]:
    """Return what the package requires with some extras, as setup.cfg says it."""
    parser = setup_cfg()
    texts = [parser["options"]["install_requires"]]
    texts += [parser["options.extras_require"][extra] for extra in extras]
    return [line.strip() for text in texts for line in text.splitlines() if line]


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
