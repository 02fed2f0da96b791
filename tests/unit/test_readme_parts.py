"""The parts of README.md that are made from data, and the page's being up to date."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from bench import readme, speed
from bench.compile_matrix import CAPABILITIES, DTYPES
from cupy_flash import configs
from cupy_flash.aot import Call
from cupy_flash.device import hypothetical
from cupy_flash.problem import Options

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


def tables(text: str) -> list[list[list[str]]]:
    """Return the rows of each table without its head, after a look at its form."""
    found = []
    for paragraph in text.split("\n\n"):
        if not paragraph.startswith("|"):
            continue
        head, rule, *rows = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in paragraph.splitlines()
        ]
        assert set(rule) == {"---"}
        assert {len(row) for row in (head, rule, *rows)} == {len(head)}
        found.append(rows)
    return found


# --- The real page --------------------------------------------------------------------


def test_the_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m bench.readme` renews it."""
    assert readme.main(["--check"]) == 0, capsys.readouterr().err


def test_the_page_has_its_parts() -> None:
    text = readme.README.read_text(encoding="utf-8")
    for name in ("compile-matrix", "kernels"):
        assert name in readme.parts()
        assert all(tables(part_of(text, name)))


def part_of(text: str, name: str) -> str:
    part = re.search(rf"<!-- begin {name} -->\n(.*)\n<!-- end {name} -->", text, re.S)
    assert part is not None
    return part[1]


@pytest.mark.parametrize("name", speed.PARTS)
def test_each_measured_part_names_its_source_and_has_figures(name: str) -> None:
    assert name in readme.parts()
    part = part_of(readme.README.read_text(encoding="utf-8"), name)
    for file in speed.sources_of(name):
        assert f"](bench/results/{file.path.name})" in part
        assert file.meta["gpu"] in part
    lines = [line for line in part.splitlines() if line.startswith("|")]
    assert len(lines) > 3 and len({line.count("|") for line in lines}) == 1
    assert "cupy_flash" in part
    for picture in re.findall(r"!\[[^]]+\]\(([^)]+)\)", part):
        assert (readme.ROOT / picture).exists()


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


def compiled(failed: int) -> dict[str, list[dict[str, object]]]:
    return {
        "rows": [
            {"nvrtc": "13.0", "capability": 90, "kernels": 66, "failed": 0},
            {"nvrtc": "13.0", "capability": 120, "kernels": 62, "failed": 0},
            {"nvrtc": "13.5", "capability": 90, "kernels": 66, "failed": failed},
            {"nvrtc": "12.9", "capability": 61, "kernels": 40, "failed": 0},
        ]
    }


def test_what_was_compiled() -> None:
    text = readme.compile_matrix(compiled(failed=0))
    assert tables(text) == [
        [
            ["6.1", "Pascal", "12.9", "40"],
            ["9.0", "Hopper", "13.0, 13.5", "66"],
            ["12.0", "Blackwell", "13.0", "62"],
        ]
    ]
    assert text.endswith("None of these 234 compilations failed.")


def test_a_failure_is_said() -> None:
    text = readme.compile_matrix(compiled(failed=2))
    assert text.endswith("2 of these 234 compilations failed: for 9.0 with NVRTC 13.5.")


def test_which_gpu_gets_which_kernel() -> None:
    """As planning says it, for each kind of GPU, dtype and head size."""
    gpus = readme.gpus_of(compiled(failed=0))
    assert [gpu.compute_capability for gpu in gpus] == [61, 90, 120]
    families, _, tiles = tables(readme.kernels(gpus))
    halves, others = "float16, bfloat16", "float32, float64"
    assert families == [
        ["6.1", "Pascal", f"{halves}, {others}", "`simt`"],
        ["9.0", "Hopper", halves, "`wgmma`, `simt`"],
        ["12.0", "Blackwell", halves, "`mma`, `simt`"],
        ["9.0–12.0", "Hopper to Blackwell", others, "`mma`, `simt`"],
    ]
    assert {row[1]: row[2] for row in tiles if row[0].endswith("float32")} == {
        "6.1": "48 KiB", "9.0": "227 KiB", "12.0": "99 KiB",
    }  # fmt: skip


def test_what_a_family_can_do() -> None:
    """As planning says it."""
    gpus = [
        dataclasses.replace(hypothetical(f"sm_{capability}"), nvrtc=(13, 0))
        for capability in CAPABILITIES
    ]
    rows = {row[0]: row[1:] for row in tables(readme.kernels(gpus))[1]}
    wide = ", ".join(f"{name} from 8.0" for name in ("bfloat16", "float32", "float64"))
    assert rows == {
        "compute capability": ["9.0", "7.5–12.0", "any"],
        "dtype": ["float16, bfloat16", f"float16, {wide}", "any"],
        "head size": ["up to 256", "up to 256, up to 128 in float64", "any"],
        "backward pass": ["yes", "yes", "yes"],
        "`softcap`": ["forward", "yes", "yes"],
        "`alibi_slopes`": ["forward", "yes", "yes"],
        "`bias`": ["no", "yes", "yes"],
        "`mask`": ["no", "yes", "yes"],
        "`deterministic=True`": ["no", "yes", "yes"],
    }  # fmt: skip
    # With an older compiler nobody has the first one.
    old = [dataclasses.replace(gpu, nvrtc=(12, 8)) for gpu in gpus]
    families, rows, _ = tables(readme.kernels(old))
    assert "wgmma" not in str(families)
    assert [row[1] for row in rows][:3] == ["none"] * 3


@pytest.mark.parametrize(
    ("changes", "cells"),
    [
        ({}, ["up to 256, backward up to 128", "yes", "forward", "forward"]),
        ({"softcap": True}, ["up to 256, backward up to 128", "yes", "yes", "forward"]),
        ({"limit": 256}, ["up to 256", "yes", "forward", "forward"]),
        ({"limit": 0}, ["up to 256", "no", "forward", "forward"]),
    ],
    ids=str,
)
def test_a_family_says_what_only_one_pass_can(
    changes: dict[str, int], cells: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever planning refuses backward, and however large the heads are there."""
    gpu = dataclasses.replace(hypothetical("sm_90"), nvrtc=(13, 0))
    limit, softcap = changes.get("limit", 128), changes.get("softcap", False)

    def plan(call: Call, _: object) -> None:
        options = call.options
        if call.head_dim > 256 or call.dtype.itemsize > 2:
            raise ValueError
        if options.direction == "backward" and (
            call.head_dim > limit or call.alibi or (options.softcap and not softcap)
        ):
            raise ValueError

    monkeypatch.setattr(Call, "plan", plan)
    of_all = readme.features([gpu])
    names = ("head size", "backward pass", "`softcap`", "`alibi_slopes`")
    assert [row[1] for row in of_all if row[0] in names] == cells


def test_the_long_table_is_folded() -> None:
    """Between empty lines, or Markdown would show it as text."""
    text = readme.kernels(readme.gpus_of(compiled(failed=0)))
    shown, folded = text.split("\n\n<details>\n")
    assert len(tables(shown)) == 2 and len(tables(folded)) == 1
    assert re.match(r"<summary>[^<]+</summary>\n\n", folded)
    assert folded.endswith("|\n\n</details>")


def test_dtypes_that_get_the_same_share_rows() -> None:
    """Where they do: on some GPUs float16 gets other tiles than bfloat16."""
    gpus = [hypothetical(f"sm_{capability}") for capability in CAPABILITIES]
    *_, rows = tables(readme.kernels(gpus))
    of_hopper = [row[0] for row in rows if covers(row[1], 9.0)]
    of_turing = [row[0] for row in rows if covers(row[1], 7.5)]
    assert "float16, bfloat16" in of_hopper and "float16" not in of_hopper
    assert "float16" in of_turing


def test_the_tiles_are_those_of_planning() -> None:
    """Every GPU, dtype and head size is in one row, which says what planning says."""
    gpus = [hypothetical(f"sm_{capability}") for capability in CAPABILITIES]
    sizes = configs.head_dim_buckets()
    *_, rows = tables(readme.kernels(gpus))
    for gpu, dtype, size in itertools.product(gpus, DTYPES, sizes):
        own = [
            row[4:]
            for row in rows
            if dtype.name in row[0].split(", ")
            and covers(row[1], gpu.compute_capability / 10)
            and size_covers(row[3], size)
        ]
        shapes = []
        for direction in ("forward", "backward"):
            options = Options(direction)
            plan = Call(options, dtype, size, size).plan(gpu)
            # The last one, which makes dq of its sums, has a tile of its own.
            specs = [step.spec for step in plan.steps]
            tile = [spec.tile for spec in specs if spec.kernel != "convert_dq"][-1]
            shapes.append(f"{tile.rows} × {tile.columns}")
        assert own == [shapes], (gpu.name, dtype.name, size)


def covers(ranges: str, number: float) -> bool:
    ends = [tuple(map(float, part.split("–"))) for part in ranges.split(", ")]
    return any(end[0] <= number <= end[-1] for end in ends)


def size_covers(words: str, size: int) -> bool:
    if words == "any":
        return True
    if words.startswith("up to "):
        return size <= int(words[6:])
    return size > int(words[5:]) if words.startswith("over ") else covers(words, size)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [("a", "a"), ("abcd", "a–d"), ("acd", "a, c–d"), ("bd", "b, d"), ("abd", "a–b, d")],
)
def test_ranges(chosen: str, words: str) -> None:
    assert readme.span(chosen, "abcd", str.lower) == words


@pytest.mark.parametrize(
    ("chosen", "words"),
    [((32, 64), "up to 64"), ((96,), "65–96"), ((128, 256), "over 96"),
     ((32, 64, 96, 128, 256), "any")],
)  # fmt: skip
def test_ranges_of_head_sizes(chosen: tuple[int, ...], words: str) -> None:
    """The last size stands for all that are larger."""
    assert readme.head_sizes(chosen, (32, 64, 96, 128, 256)) == words


@pytest.mark.parametrize(
    ("capability", "name"),
    [(52, "Maxwell"), (61, "Pascal"), (72, "Volta"), (75, "Turing"), (86, "Ampere"),
     (89, "Ada"), (90, "Hopper"), (103, "Blackwell"), (121, "Blackwell")],
)  # fmt: skip
def test_names_of_generations(capability: int, name: str) -> None:
    assert readme.generation(capability) == name
