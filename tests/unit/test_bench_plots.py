"""Plots: files that exist, and an appearance that is the same everywhere."""

from __future__ import annotations

import xml.etree.ElementTree
from pathlib import Path

import pytest

from . import bench_synthetic
from .bench_synthetic import META, SHARES

pytest.importorskip("matplotlib")

from bench import plots, style  # noqa: E402


def names(written: list[Path]) -> set[str]:
    return {path.name for path in written}


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
    text = (tmp_path / "run-speed-forward-bfloat16.svg").read_text()
    shown = {
        "".join(element.itertext())
        for element in xml.etree.ElementTree.fromstring(text).iter()
        if element.tag.endswith("}text")
    }
    assert {"TFLOP/s", "sequence length", "16k", "measured GEMM"} <= shown
    assert set(SHARES) <= shown
    assert "Attention forward, bfloat16, NVIDIA H200" in shown


def test_memory_has_a_plot_with_units(tmp_path: Path) -> None:
    written = plots.draw(META, bench_synthetic.memory_rows(), tmp_path / "m")
    assert names(written) == {"m-memory-bfloat16.png", "m-memory-bfloat16.svg"}
    assert "GiB" in (tmp_path / "m-memory-bfloat16.svg").read_text()


def test_small_calls_are_drawn_by_the_hosts_time(tmp_path: Path) -> None:
    rows = [
        row | {"host_us": 20.0 if row["impl"] != "jax" else None}
        for row in bench_synthetic.rows("small")
        if row["direction"] == "forward"
    ]
    plots.draw(META, rows, tmp_path / "s")
    text = (tmp_path / "s-speed-forward-bfloat16.svg").read_text()
    assert "host µs per call" in text and ">jax<" not in text


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
