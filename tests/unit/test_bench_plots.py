"""Plots: files that exist, and an appearance that is the same everywhere."""

from __future__ import annotations

import xml.etree.ElementTree
from pathlib import Path

import pytest

from bench.results import Row, new_row
from bench.workloads import square

from . import bench_synthetic
from .bench_synthetic import META, SHARES

pytest.importorskip("matplotlib")

from bench import plots, style  # noqa: E402


def names(written: list[Path]) -> set[str]:
    return {path.name for path in written}


def shown(path: Path) -> set[str]:
    """Return the texts of an SVG file."""
    return {
        "".join(element.itertext())
        for element in xml.etree.ElementTree.parse(path).iter()
        if element.tag.endswith("}text")
    }


def test_training_gives_speed_and_ratio_as_png_and_svg(tmp_path: Path) -> None:
    rows = [
        row for row in bench_synthetic.rows("training")
        if row["head_dim"] == 128 and row["direction"] == "forward"
    ]  # fmt: skip
    written = plots.draw(META, rows, tmp_path / "run")
    assert names(written) == {
        f"run-{name}.{suffix}"
        for name in (
            "speed-forward-bfloat16",  "ratio-bfloat16",
        )
        for suffix in ("png", "svg")
    }  # fmt: skip
    for path in written:
        assert path.read_bytes().startswith(
            b"\x89PNG" if path.suffix == ".png" else b"<?xml"
        )
    found = shown(tmp_path / "run-speed-forward-bfloat16.svg")
    assert {"TFLOP/s", "sequence length", "16k", "measured GEMM"} <= found
    assert set(SHARES) <= found
    assert "Attention forward, bfloat16, NVIDIA H200" in found


def test_memory_has_a_plot_with_units(tmp_path: Path) -> None:
    written = plots.draw(META, bench_synthetic.memory_rows(), tmp_path / "m")
    assert names(written) == {"m-peak-bfloat16.png", "m-peak-bfloat16.svg"}
    assert {"4 GiB", "S × S arrays", "needed"} <= shown(written[1])


def test_formulas_stay_within_the_axes() -> None:
    """Where only this library was measured, S × S arrays are far above it."""
    rows = [r for r in bench_synthetic.memory_rows() if r["impl"] == "cupy_flash"]
    rows = [r | {"bytes": r["bytes"] if r["seqlen"] < 9000 else None} for r in rows]
    for ax in plots.memory(META, rows).axes:
        assert ax.get_xlim()[1] < 10000
        bottom, top = ax.get_ylim()
        for line in ax.get_lines():
            if line.get_transform() == ax.transData:
                assert all(bottom < y < top for y in line.get_ydata())


def first_rows(**times: float | None) -> list[Row]:
    case = square("first_call", "float16", 1, 128, 4, 128, True, "forward")
    found = []
    for name, ms in times.items():
        impl = f"{name.partition('_')[0]} ({name.partition('_')[2]})"
        status = "skipped" if ms is None else "ok"
        found.append(new_row(case, impl, status, "", ms=ms, rounds=3))
    return found


def test_first_results_are_bars_with_their_times(tmp_path: Path) -> None:
    rows = first_rows(fa2_cold=1603.0, fa2_warm=81.7, jax_cold=None, jax_warm=None)
    written = plots.draw(META, rows, tmp_path / "f")
    assert names(written) == {"f-bars.png", "f-bars.svg"}
    found = shown(written[1])
    assert {"fa2", "1.60 s, cold", "81.7 ms, warm"} <= found and "jax" not in found
    assert plots.draw(META, rows[2:], tmp_path / "g") == []


def test_the_name_of_the_ceiling_stands_beside_the_axes() -> None:
    rows = [r for r in bench_synthetic.rows("training") if r["direction"] == "both"]
    figure = plots.speed(META, [r for r in rows if r["status"] == "ok"])
    found = [
        t for ax in figure.axes for t in ax.texts if t.get_text() == "measured GEMM"
    ]
    assert len(found) == len(figure.axes) and all(
        t.get_position()[0] > 1 for t in found
    )


def test_small_calls_are_drawn_by_the_times_of_device_and_host(tmp_path: Path) -> None:
    rows = [
        row | {"host_us": 2000.0 if row["impl"] != "jax" else None}
        for row in bench_synthetic.rows("small")
        if row["direction"] == "forward"
    ]
    plots.draw(META, rows, tmp_path / "s")
    found = shown(tmp_path / "s-speed-forward-bfloat16.svg")
    assert {"host µs per call", "device µs per call", "2k", "fa2"} <= found
    done = [row for row in rows if row["status"] == "ok"]
    device, host = plots.dots(META, done).axes
    jax = [row for row in done if row["impl"] == "jax"]
    # In each panel the lines between the four cases, and a point for each row.
    assert len(device.get_lines()) == 3 + len(done)
    assert len(host.get_lines()) == 3 + len(done) - len(jax) and jax
    points = [tuple(line.get_ydata()) for line in device.get_lines()]
    assert len(set(points)) == len(points), "points may hide each other"


def test_ratios_of_single_cases_have_no_empty_fields() -> None:
    rows = [row for row in bench_synthetic.rows("small") if row["status"] == "ok"]
    (panel, _) = plots.ratios(META, rows).axes
    assert [label.get_text() for label in panel.get_xticklabels()] == [
        "forward", "backward",
    ]  # fmt: skip
    assert len(panel.get_yticklabels()) == 4
    assert "–" not in {text.get_text() for text in panel.texts}


def test_lengths_that_a_direction_was_not_measured_at_have_no_column() -> None:
    rows = [row for row in bench_synthetic.rows("training") if row["status"] == "ok"]
    rows = [r for r in rows if r["direction"] != "both" or r["seqlen"] > 512]
    *panels, _ = plots.ratios(META, rows).axes
    counts = {panel.get_title(loc="left"): len(panel.get_xticks()) for panel in panels}
    assert counts == {"forward": 6, "backward": 6, "forward + backward": 5}


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    rows = [
        row for row in bench_synthetic.rows("training") if row["status"] != "ok"
    ] + [row | {"bytes": None} for row in bench_synthetic.memory_rows()]
    assert plots.draw(META, rows, tmp_path / "x") == []


def test_decode_is_drawn_in_bytes_and_twice_the_same(tmp_path: Path) -> None:
    rows = bench_synthetic.rows("decode")
    files = [plots.draw(META, rows, tmp_path / stem) for stem in ("a", "b")]
    for first, second in zip(*files, strict=True):
        if first.suffix == ".svg":
            assert first.read_bytes() == second.read_bytes()
    text = (tmp_path / "a-speed-forward-bfloat16.svg").read_text()
    assert "TB/s" in text and "measured copy" in text


def test_looks_are_stable_and_differ() -> None:
    every = style.looks([*SHARES, "cupy_flash:simt", "cupy_flash:mma", "new"])
    assert every["fa2"] == style.looks(["fa2"])["fa2"]
    assert len({(x.color, x.marker, str(x.line)) for x in every.values()}) == len(every)
    ours = {name for name, x in every.items() if x.color == style.OURS_COLOR}
    assert ours == {"cupy_flash", "cupy_flash:simt", "cupy_flash:mma"}
    assert every["cupy_flash"].width > max(
        x.width for name, x in every.items() if name != "cupy_flash"
    )


def test_labels_do_not_overlap_and_keep_their_order() -> None:
    wanted = [0.5, 0.51, 0.9, 0.49, 0.02, 0.01, 0.99]
    placed = style.spread_out(wanted, 0.1, 0.0, 1.0)
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    heights = [placed[i] for i in order]
    gaps = [b - a for a, b in zip(heights, heights[1:], strict=False)]
    assert min(gaps) >= 0.1 - 1e-9
    assert min(placed) >= 0 and max(placed) <= 1
    assert style.spread_out([0.2, 0.8], 0.1, 0.0, 1.0) == [0.2, 0.8]
