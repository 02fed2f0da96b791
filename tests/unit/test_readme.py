"""README.md does what it says: its code runs, its commands exist, its links resolve.

Python blocks run in order in one namespace for each section, a section being what
stands below one heading, so that a reader can copy a section as it stands. The next
block of the section, if it is `text`, is what the block prints; "…" in it matches
anything. So it is with shell blocks, whose commands are run where that is cheap and
else looked up. Blocks that need a GPU, which they show by what they import, run where
there is one. A block whose NumPy import says `# or: import cupy as np` runs there both
ways.
"""

from __future__ import annotations

import ast
import configparser
import contextlib
import importlib.util
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
import types
import xml.etree.ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest

import cupy_flash
from bench import data_flow
from tests.real.conftest import model_or_skip

from .markdown import (
    NEED_GPU,
    ROOT,
    Block,
    Command,
    Step,
    blocks_of,
    commands_of,
    dead_links,
    imported_modules,
    matches,
    missing_names,
    option_table,
    source_of,
    steps_of,
)

README = ROOT / "README.md"
# What a block may be. Another language is refused, since nothing would check it.
LANGUAGES = {"python", "sh", "console", "text", "math"}
NUMPY_OR_CUPY = re.compile(r"^import numpy as (\w+)  # or: (import cupy as \1)$", re.M)


# --- Python ---------------------------------------------------------------------------


def run_steps(path: Path, steps: Sequence[Step], *, cupy: bool = False) -> None:
    """Run blocks in one namespace; `cupy` takes CuPy where a block offers both."""
    namespace = {"__name__": "readme"}
    for step in steps:
        code, line = step.block.code, step.block.line
        if cupy:
            code = NUMPY_OR_CUPY.sub(r"\2", code)
        # At its lines of the file, so that errors name them.
        padded = "\n" * (line - 1) + code
        printed = io.StringIO()
        try:
            program = compile(padded, str(path), "exec", dont_inherit=True)
            with contextlib.redirect_stdout(printed):
                exec(program, namespace)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            inside = [f.lineno for f in frames if f.filename == str(path)]
            at = inside[-1] if inside else getattr(error, "lineno", line)
            raise AssertionError(
                f"{path.name}:{at}: {type(error).__name__}: {error}"
            ) from error
        # CuPy's random numbers are others than NumPy's, so are the figures.
        if step.expected is not None and not cupy:
            assert matches(step.expected, printed.getvalue()), (
                f"{path.name}:{line}: the block prints\n{printed.getvalue()}"
                f"instead of\n{step.expected}"
            )


SECTIONS = steps_of(README.read_text(encoding="utf-8"))
ON_GPU = [
    pytest.param(section, cupy, id=f"{section}-{'cupy' if cupy else 'as it stands'}")
    for section, steps in SECTIONS.items()
    for cupy, wanted in (
        (False, any(step.gpu for step in steps)),
        (True, any(NUMPY_OR_CUPY.search(step.block.code) for step in steps)),
    )
    if wanted
]


@pytest.mark.parametrize(
    "section", [s for s, steps in SECTIONS.items() if not all(x.gpu for x in steps)]
)
def test_code_runs(section: str) -> None:
    run_steps(README, [step for step in SECTIONS[section] if not step.gpu])


@pytest.mark.gpu
# As for the other GPU tests: only this library's own warnings are errors.
@pytest.mark.filterwarnings("default", "error:::cupy_flash")
@pytest.mark.parametrize(("section", "cupy"), ON_GPU)
def test_code_runs_on_the_gpu(section: str, cupy: bool) -> None:
    steps = SECTIONS[section]
    for step in steps:
        for name in imported_modules(ast.parse(step.block.code)):
            if name.partition(".")[0] in NEED_GPU:
                pytest.importorskip(name)
    run_steps(README, steps, cupy=cupy)


def test_code_compiles_and_imports_what_exists() -> None:
    """Also of the blocks that need a GPU where there is none."""
    for step in (step for steps in SECTIONS.values() for step in steps):
        compile(step.block.code, f"README.md:{step.block.line}", "exec")
        assert not missing_names(step.block.code), f"README.md:{step.block.line}"


def test_every_block_names_its_language() -> None:
    for block in blocks_of(README.read_text(encoding="utf-8")):
        assert block.language in LANGUAGES, f"README.md:{block.line - 1}"


def test_blocks_and_their_lines() -> None:
    text = "# A\n```python\nx = 1\n```\n## B\n  ~~~text\n  ``` \n   1\n  ~~~\n"
    assert blocks_of(text) == [
        Block("python", "x = 1\n", 3, "A (line 1)"),
        Block("text", "``` \n 1\n", 7, "B (line 5)"),
    ]
    with pytest.raises(ValueError, match="line 2: .* never closed"):
        blocks_of("text\n```python\nx = 1\n")


def run_text(path: Path, text: str, *, cupy: bool = False) -> None:
    path.write_text(text, encoding="utf-8")
    for steps in steps_of(text).values():
        run_steps(path, [step for step in steps if not step.gpu], cupy=cupy)


def test_a_failure_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    start = "# A\n\n```python\ndef f(x):\n    return 1 / x\n```\n"
    with pytest.raises(AssertionError, match=r"README\.md:5: ZeroDivisionError"):
        run_text(file, start + "```python\nf(0)\n```\n")
    with pytest.raises(AssertionError, match=r"README\.md:9: NameError: .*'g'"):
        run_text(file, start + "```python\nf(1)\ng(0)\n```\n")
    with pytest.raises(AssertionError, match=r"README\.md:9: NameError: .*'f'"):
        run_text(file, start + "## B\n```python\nf(1)\n```\n")  # another section


def test_what_a_block_prints_is_compared(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    block = "```python\nprint('error 1.5e-07', 3)\n```\nprints\n```text\n{}\n```\n"
    run_text(file, block.format("error … 3"))
    run_text(file, block.format("error 1.5e-07 3"))
    for wrong in ("error … 4", "error 1.5e.07 3", "… 1", "error"):
        with pytest.raises(AssertionError, match=r"README\.md:2: the block prints"):
            run_text(file, block.format(wrong))
    run_text(file, "# A\n" + block.format("error … 3") + "# B\n```text\nother\n```\n")


def test_blocks_that_need_a_gpu_are_told_by_what_they_import() -> None:
    code = [
        "import numpy as np  # or: import cupy as np\nx = np.ones(3)",
        "import cupy\nx = cupy.asarray(x)",
        "y = x + 1",
        "x = 3",
        "z = y",
        "x",
    ]
    text = "".join(f"```python\n{block}\n```\n" for block in code)
    (steps,) = steps_of(text).values()
    assert [step.gpu for step in steps] == [False, True, True, False, True, False]


def test_cupy_takes_numpys_place_where_a_block_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(place="taken"))
    block = "```python\nimport numpy as np  # or: import cupy as np\nnp.place.upper()\n"
    run_text(tmp_path / "README.md", block + "```\n", cupy=True)
    with pytest.raises(AssertionError, match=r"README\.md:3: AttributeError"):
        run_text(tmp_path / "README.md", block + "```\n")


def test_missing_names_are_found() -> None:
    assert not missing_names(
        "from cupy_flash import explain, cpu\nimport numpy.nothing"
    )
    assert missing_names("from cupy_flash import attend") == {"cupy_flash.attend"}
    assert missing_names("import cupy_flash.gpu") == {"cupy_flash.gpu"}


# --- Commands -------------------------------------------------------------------------


def execute(command: Command, *arguments: str) -> str:
    """Run a Python program from the repository's root and return what it prints."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "CUPY_CACHE_DIR": cache, "PYTHONUTF8": "1"}
        run = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, timeout=300, encoding="utf-8",
            env=environment | dict(command.environment), capture_output=True,
        )  # fmt: skip
    assert run.returncode == 0, f"exit code {run.returncode}:\n{run.stdout}{run.stderr}"
    return run.stdout


def check_install(words: Sequence[str]) -> None:
    """What `pip install` names are this project, with extras it has, or its needs."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = dict(config["options.extras_require"])
    needs = "\n".join([config["options"]["install_requires"], *extras.values()])
    known = {re.split(r"[^\w-]", need)[0] for need in needs.split()}
    targets = [word for word in words if word not in ("-e", "-U", "--upgrade")]
    assert targets, "nothing to install"
    for target in targets:
        match = re.fullmatch(r"([\w.-]+?)(?:\[([\w,-]+)\])?", target)
        assert match, f"{target} is no package"
        package, wanted = match.groups()
        if package in (".", config["metadata"]["name"]):
            absent = set((wanted or "").split(",")) - {*extras, ""}
            assert not absent, f"extras that aren't in setup.cfg: {absent}"
        else:
            assert package in known and not wanted, f"{target} is needed by nothing"


def check_program(command: Command, module: str, arguments: Sequence[str]) -> None:
    """The module can be run, and knows the options that are given."""
    source = source_of(f"{module}.__main__") or source_of(module)
    assert source, f"there is no module {module}"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    assert "__name__ == '__main__'" in ast.unparse(tree), f"{module} is no program"
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    for option in (word.partition("=")[0] for word in arguments if word[:1] == "-"):
        assert option in strings, f"{module} has no option {option}"
    needed = {name.partition(".")[0] for name in imported_modules(tree)} - {""}
    known = {name for name in needed if importlib.util.find_spec(name)}
    # Others ignore their arguments, and would run.
    if "argparse" in needed and needed == known:
        assert "usage:" in execute(command, "-m", module, *arguments, "--help")


def check_marker(marker: str) -> None:
    """Tests have it; that all of them can be collected another command shows."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    markers = re.findall(r"^(\w+):", config["tool:pytest"]["markers"], re.M)
    assert marker in markers, f"setup.cfg has no marker {marker}"
    files = (ROOT / "tests").rglob("test_*.py")
    marked = [f for f in files if f"pytest.mark.{marker}\n" in f.read_text("utf-8")]
    assert marked, f"no test has the marker {marker}"


def check_command(command: Command) -> None:
    """Run a command, or as much of it as shows that it works."""
    match command.words:
        case ("pip", "install", *rest) | ("python", "-m", "pip", "install", *rest):
            check_install(rest)
        case ("python", "-m", "pytest", "-m", marker):
            check_marker(marker)
        case ("python", "-m", "pytest", *rest):
            quiet = ("--collect-only", "-q", "-p", "no:cacheprovider")
            execute(command, "-m", "pytest", *rest, *quiet)
        case ("python", "-m", "cupy_flash" | "tests.real.alike" as module, *rest):
            if module == "tests.real.alike":
                model_or_skip()
            printed = execute(command, "-m", module, *rest)
            # What these print is about the machine.
            about_machine = module == "cupy_flash" and rest in ([], ["info"])
            if command.expected is not None and not about_machine:
                assert matches(command.expected, printed), printed
        case ("python", "-m", module, *rest) if re.match(r"(bench|tests)\b", module):
            check_program(command, module, rest)
        case _:
            raise AssertionError(f"no test knows what this is: {command.words}")


# Each once, however often it is named.
COMMANDS = {
    (command.words, command.environment, command.expected): command
    for command in commands_of(README.read_text(encoding="utf-8"))
}


@pytest.mark.parametrize(
    "command",
    COMMANDS.values(),
    ids=lambda command: f"{command.line}: {shlex.join(command.words)}",
)
def test_command(command: Command) -> None:
    check_command(command)


def test_commands_are_found() -> None:
    text = "```sh\n# no command\nA=b c 'd e' && f  # note\n\n```\n"
    text += "```text\n1\n```\n```console\n$ python -V\nPython 3\n```\n"
    assert commands_of(text) == [
        Command(("c", "d e"), (("A", "b"),), 3),
        Command(("f",), (), 3, "1\n"),
        Command(("python", "-V"), (), 10),
    ]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("make install", "no test knows"),
        ("python -c 1", "no test knows"),
        ("pip install", "nothing to install"),
        ("pip install -e '.[cuda11]'", "cuda11"),
        ("pip install cupy_flash", "needed by nothing"),
        ("pip install --pre .", "needed by nothing"),
        ("python -m pytest tests/none", "exit code 4"),
        ("python -m pytest -m none", "no marker none"),
        ("python -m cupy_flash --none", "exit code 2"),
        ("python -m bench.none", "no module"),
        ("python -m bench.machine", "no program"),
        ("python -m bench.data_flow --none", "no option --none"),
        ("python -m bench.data_flow --check=1", "exit code 2"),
        ("python -m cupy_flash --version\n```\n```text\n-1", cupy_flash.__version__),
    ],
)
def test_wrong_commands_are_refused(line: str, wrong: str) -> None:
    (command,) = commands_of(f"```sh\n{line}\n```\n")
    with pytest.raises(AssertionError, match=wrong):
        check_command(command)


# --- Links, options, picture ----------------------------------------------------------


def test_links_lead_somewhere() -> None:
    assert not dead_links(README)


def test_dead_links_are_found(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    (tmp_path / "a b.svg").touch()
    good = "# How `it` works\n## Again!\n## Again\n[x](#how-it-works) ![](a%20b.svg)\n"
    good += '<img src="a%20b.svg"> [y](#again-1) `[z](no)` [w](https://example.org)\n'
    file.write_text(good)
    assert not dead_links(file)
    file.write_text(good + '[x](#how) [y](b.md "B")\n\n[z]: c.md\n<a href="d#e">\n')
    assert dead_links(file) == {"#how", "b.md", "c.md", "d#e"}


def keyword_parameters() -> set[str]:
    functions = (
        cupy_flash.flash_attention,
        cupy_flash.flash_attention_backward,
        cupy_flash.flash_attention_vjp,
    )
    return {
        parameter.name
        for function in functions
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def test_the_options_are_the_functions_options() -> None:
    first, every = option_table(README.read_text(encoding="utf-8"))
    assert first <= keyword_parameters(), "options that no function has"
    assert keyword_parameters() <= every, "options that the README doesn't name"


def test_the_options_table_is_read() -> None:
    text = "| file |\n|---|\n| `a` |\n\n| argument | is |\n|---|---|\n"
    text += "| `b`, `c` | 1 \\| `d=True` |\n\n| `e` | |\n"
    assert option_table(text) == ({"b", "c"}, {"b", "c", "d"})


def test_the_picture_is_what_its_script_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = data_flow.PICTURE.read_text(encoding="utf-8")
    assert text == data_flow.draw(), "python -m bench.data_flow writes it anew"
    root = xml.etree.ElementTree.fromstring(text)
    names = [element.tag.rpartition("}")[2] for element in root]
    assert names[:2] == ["title", "desc"] and "text" in {
        element.tag.rpartition("}")[2] for element in root.iter()
    }
    stale = tmp_path / "data-flow.svg"
    monkeypatch.setattr(data_flow, "PICTURE", stale)
    for content in (None, text.replace("Forward", "Upward")):
        if content:
            stale.write_text(content, encoding="utf-8")
        with pytest.raises(SystemExit, match="stale"):
            data_flow.main(["--check"])
    data_flow.main([])
    data_flow.main(["--check"])
    assert stale.read_text(encoding="utf-8") == text
