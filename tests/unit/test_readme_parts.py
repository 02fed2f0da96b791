"""The parts of README.md that are made from data, and the page's being up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import readme
from bench.compile_matrix import NEW, OLD

PAGE = """# Title

<!-- begin one -->
old
<!-- end one -->
between
<!-- begin two -->
<!-- end two -->
end
"""
MAKERS = {"one": lambda: "first\nlines", "two": lambda: "second"}


def cells(text: str) -> list[list[str]]:
    """Return a table's rows without its head, after a look at its form."""
    head, rule, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
    ]
    assert set(rule) == {"---"}
    assert {len(row) for row in (head, rule, *rows)} == {len(head)}
    return rows


# --- The real page --------------------------------------------------------------------


def test_the_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m bench.readme` renews it."""
    assert readme.main(["--check"]) == 0, capsys.readouterr().err


def test_the_page_has_its_parts() -> None:
    text = readme.README.read_text(encoding="utf-8")
    for name in ("compile-matrix", "kernels"):
        assert name in readme.parts()
        part = re.search(
            rf"<!-- begin {name} -->\n(.*)\n<!-- end {name} -->", text, re.S
        )
        assert part is not None and len(cells(part[1])) >= 4


# --- Markers --------------------------------------------------------------------------


def test_only_what_stands_between_markers_is_replaced() -> None:
    new = readme.renewed(PAGE, MAKERS)
    expected = PAGE.replace("old", "first\nlines")
    assert new == expected.replace("two -->\n<!--", "two -->\nsecond\n<!--")
    assert readme.renewed(new, MAKERS) == new


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<!-- begin two -->", "<!-- begin three -->", "three is unknown"),
        ("<!-- end two -->", "", "two has no end"),
        ("<!-- begin two -->", "", "two has no begin"),
        ("<!-- end one -->", "", "stands in one"),
        ("<!-- begin two -->\n<!-- end two -->", "", "no place for two"),
        ("between", "<!-- begin one -->\n<!-- end one -->", "two places"),
    ],
)
def test_markers_that_are_wrong(old: str, new: str, message: str) -> None:
    """A part that is no longer renewed would go stale unseen."""
    assert PAGE.count(old) == 1
    with pytest.raises(ValueError, match=message):
        readme.renewed(PAGE.replace(old, new), MAKERS)


def test_checking_and_renewing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "README.md"
    page.write_text(PAGE, encoding="utf-8")
    monkeypatch.setattr(readme, "README", page)
    monkeypatch.setattr(readme, "parts", lambda: MAKERS)
    assert readme.main(["--check"]) == 1
    assert "python -m bench.readme" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == PAGE, "checking writes nothing"
    assert readme.main([]) == 0
    assert page.read_text(encoding="utf-8") == readme.renewed(PAGE, MAKERS)
    assert readme.main(["--check"]) == 0
    page.write_text("no markers", encoding="utf-8")
    assert readme.main([]) == 1
    assert page.read_text(encoding="utf-8") == "no markers"


# --- The parts ------------------------------------------------------------------------


def test_what_was_compiled() -> None:
    report = {
        "rows": [
            {"nvrtc": "13.0", "capability": 90, "kernels": 66, "failed": 0},
            {"nvrtc": "13.0", "capability": 120, "kernels": 62, "failed": 0},
            {"nvrtc": "13.5", "capability": 90, "kernels": 66, "failed": 2},
            {"nvrtc": "12.9", "capability": 61, "kernels": 40, "failed": 0},
        ]
    }
    found = cells(readme.compile_matrix(report))
    assert found == [
        ["6.1", "Pascal", "12.9", "40", "0"],
        ["9.0", "Hopper", "13.0, 13.5", "66", "2"],
        ["12.0", "Blackwell", "13.0", "62", "0"],
    ]


def test_which_gpu_gets_which_kernel() -> None:
    """Every GPU of the compile matrix once, with the shared memory a block can have."""
    rows = cells(readme.kernels())
    listed = [gpu for row in rows for gpu in row[0].split(", ")]
    assert sorted(listed) == sorted(readme.dotted(c) for c in (*OLD, *NEW))
    of_gpu = {gpu: row for row in rows for gpu in row[0].split(", ")}
    for gpu, memory in (("6.1", "48 KiB"), ("7.5", "64 KiB"), ("9.0", "227 KiB")):
        assert of_gpu[gpu][1] == memory
    # Where shared memory is short, a large head gets another tile.
    assert of_gpu["6.1"][3:] != of_gpu["9.0"][3:]


@pytest.mark.parametrize(
    ("capability", "name"),
    [(52, "Maxwell"), (61, "Pascal"), (72, "Volta"), (75, "Turing"), (86, "Ampere"),
     (89, "Ada"), (90, "Hopper"), (103, "Blackwell"), (121, "Blackwell")],
)  # fmt: skip
def test_names_of_generations(capability: int, name: str) -> None:
    assert readme.generation(capability) == name
