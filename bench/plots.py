"""Plots of result files, as PNG and SVG: speed, ratio to the best peer, memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .results import OURS, Row, case_of
from .style import FAINT, INK, OURS_COLOR, Look, looks, paper, spread_out
from .tables import best_rival, by_shape, find, grouped, shape_name

Meta = Mapping[str, Any]
# Workloads whose rows aren't times of a pass, and those that are a series of lengths.
OTHER = ("tiles", "first_call", "end_to_end")
SERIES = ("training", "gqa", "long", "cpu")
RATIO_COLORS = LinearSegmentedColormap.from_list(
    "ratio", ["#2166AC", "#92C5DE", "#F7F7F7", "#F4A582", OURS_COLOR]
)


def draw(meta: Meta, rows: Sequence[Row], stem: Path) -> list[Path]:
    """Draw what a result file has data for and return the files.

    Parameters
    ----------
    stem : Path
        Where the files go, and how their names begin.
    """
    written = []
    with paper():
        for workload, group in grouped(rows, lambda row: row["workload"]).items():
            for name, figure in figures(meta, workload, group):
                for suffix in ("png", "svg"):
                    path = stem.with_name(f"{stem.name}-{name}.{suffix}")
                    # Nothing that differs from run to run or that nobody reads.
                    names = ("Date", "Creator", "Format", "Type")
                    metadata = dict.fromkeys(names) if suffix == "svg" else None
                    figure.savefig(path, bbox_inches="tight", metadata=metadata)
                    written.append(path)
    return written


def figures(
    meta: Meta, workload: str, rows: Sequence[Row]
) -> Iterable[tuple[str, Figure]]:
    """Yield the figures of a workload, each with its name."""
    if workload == "memory":
        for dtype, group in grouped(rows, lambda row: row["dtype"]).items():
            if any(row.get("bytes") for row in group):
                yield f"memory-{dtype}", memory(meta, group)
        return
    timed = [row for row in rows if row["status"] == "ok" and row["tflops"]]
    if workload in OTHER or not timed:
        return
    for (direction, dtype), group in grouped(
        timed, lambda row: (row["direction"], row["dtype"])
    ).items():
        figure = speed(meta, group) if workload in SERIES else dots(meta, group)
        yield f"speed-{direction}-{dtype}", figure
    for dtype, group in grouped(timed, lambda row: row["dtype"]).items():
        if any(best_rival(case) for case in grouped(group, case_of).values()):
            yield f"ratio-{dtype}", ratios(meta, group)


def where(meta: Meta) -> str:
    """Name what was measured on."""
    return str(meta.get("cpu") or meta.get("gpu") or "unknown device")


# --- Speed over the sequence length ---------------------------------------------------


def panel_of(row: Row) -> tuple[Any, ...]:
    """Return what a panel has in common."""
    return (row["causal"], row["head_dim"], *heads_of(row))


def heads_of(row: Row) -> tuple[int, int]:
    """Return the heads where they matter; in training the head size gives them."""
    return (0, 0) if row["workload"] == "training" else (row["heads"], row["kv_heads"])


def speed(meta: Meta, rows: Sequence[Row]) -> Figure:
    """Draw TFLOP/s over the sequence length, a panel for each head size and mask."""
    masks = sorted({row["causal"] for row in rows})
    columns = sorted({(row["head_dim"], *heads_of(row)) for row in rows})
    figure = Figure(
        figsize=(2.9 * len(columns) + 0.8, 2.6 * len(masks) + 0.8),
        layout="constrained",
    )
    axes = figure.subplots(len(masks), len(columns), sharey=True, squeeze=False)
    look = looks(list(dict.fromkeys(row["impl"] for row in rows)))
    seqlens = sorted({row["kv_seqlen"] for row in rows})
    gemm = (meta.get("gemm_tflops_by_dtype") or {}).get(rows[0]["dtype"])
    top = 1.04 * max(row["tflops"] for row in rows)
    # A ceiling far above everything would press the lines together.
    gemm = gemm if gemm and gemm < 2.2 * top else None
    top = max(top, 1.06 * gemm) if gemm else top
    for i, causal in enumerate(masks):
        for j, column in enumerate(columns):
            panel = [r for r in rows if panel_of(r) == (causal, *column)]
            ax = axes[i, j]
            ax.set_ylim(0, top)
            ax.set_title(panel_title(column, causal), loc="left")
            seqlen_axis(ax, seqlens)
            if panel:
                lines(ax, panel, "tflops", look)
            else:
                ax.text(0.5, 0.4, "not measured", transform=ax.transAxes, ha="center",
                        fontsize=8, color=FAINT)  # fmt: skip
            if gemm:
                level(ax, gemm, "measured GEMM")
            if j == 0:
                ax.set_ylabel("TFLOP/s")
            if i == len(masks) - 1:
                ax.set_xlabel("sequence length")
    title(figure, meta, rows)
    return figure


def panel_title(column: tuple[int, ...], causal: bool) -> str:
    """Name a panel's head size, heads and mask."""
    head_dim, heads, kv_heads = column
    parts = [f"head size {head_dim}"]
    if heads and heads != kv_heads:
        parts.append(f"{heads}/{kv_heads} heads")
    return ", ".join([*parts, "causal" if causal else "full"])


def title(figure: Figure, meta: Meta, rows: Sequence[Row]) -> None:
    """Say what, where and in which dtype."""
    row = rows[0]
    text = f"Attention {row['direction']}, {row['dtype']}, {where(meta)}"
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold")


End = tuple[str, float, float, Look]


def lines(
    ax: Axes,
    rows: Sequence[Row],
    key: str,
    look: Mapping[str, Look],
    more: Sequence[End] = (),
) -> None:
    """Draw a line for each implementation and its name at the line's end.

    `more` are the ends of other lines: name, x, y and look.
    """
    ends = []
    for impl, group in grouped(rows, lambda row: row["impl"]).items():
        points = sorted((row["kv_seqlen"], row[key]) for row in group if row.get(key))
        if not points:
            continue
        x, y = zip(*points, strict=True)
        style = look[impl]
        ax.plot(
            x, y, color=style.color, marker=style.marker, linestyle=style.line,
            linewidth=style.width, markersize=4.5 if style.width < 2 else 5.5,
            markeredgewidth=1.0, zorder=style.order, clip_on=False,
        )  # fmt: skip
        ends.append((impl, x[-1], y[-1], style))
    names_at_ends(ax, [*ends, *more])


def seqlen_axis(ax: Axes, seqlens: Sequence[int]) -> None:
    """Make the x axis logarithmic with a tick at each sequence length."""
    ax.set_xscale("log", base=2)
    ax.set_xlim(seqlens[0] / 1.15, seqlens[-1] * 1.15)
    ax.xaxis.set_major_locator(FixedLocator(seqlens))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(int(value))))


def short(seqlen: int) -> str:
    """Return 16384 as 16k."""
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


def names_at_ends(ax: Axes, ends: Sequence[End]) -> None:
    """Write names to the right of the axes, each at the height of its line's end."""
    to_axes = ax.transData + ax.transAxes.inverted()
    points = [to_axes.transform((x, y)) for _, x, y, _ in ends]
    wanted = [float(y) for _, y in points]
    inches = ax.figure.get_size_inches()[1] * ax.get_position().height
    placed = spread_out(wanted, 0.125 / inches, 0.0, 1.0)
    for (name, _, _, style), (x, y), height in zip(ends, points, placed, strict=True):
        leader = {"color": style.color, "linewidth": 0.7, "clip_on": False}
        # A line that ends early has a longer way to its name.
        if x < 0.9:
            ax.plot([x, 1.005], [y, y], transform=ax.transAxes, linestyle=":", **leader)
        ax.plot([1.005, 1.045], [y, height], transform=ax.transAxes, **leader)
        ax.text(
            1.055, height, name, transform=ax.transAxes, va="center", fontsize=7.5,
            color=style.color, fontweight="bold" if name == OURS else "normal",
        )  # fmt: skip


def level(ax: Axes, value: float, name: str) -> None:
    """Draw a horizontal line at a measured ceiling."""
    ax.axhline(value, color=FAINT, linewidth=0.9, linestyle=(0, (6, 3)), zorder=1)
    ax.annotate(
        name, (0.0, value), xycoords=("axes fraction", "data"), xytext=(3, -2),
        textcoords="offset points", va="top", fontsize=7, color=FAINT,
    )  # fmt: skip


# --- Cases that aren't a series -------------------------------------------------------


def dots(meta: Meta, rows: Sequence[Row]) -> Figure:
    """Draw each case as a line of points, one for each implementation."""
    key, unit, ceiling = figure_of(meta, rows)
    rows = [row for row in rows if row.get(key)]
    cases = grouped(sorted(rows, key=by_shape), case_of)
    look = looks(list(dict.fromkeys(row["impl"] for row in rows)))
    figure = Figure(figsize=(6.4, 0.34 * len(cases) + 1.5), layout="constrained")
    ax = figure.subplots()
    for y, group in enumerate(cases.values()):
        for row in group:
            style = look[row["impl"]]
            ax.plot(
                row[key], y, color=style.color, marker=style.marker, linestyle="",
                markersize=8 if row["impl"] == OURS else 6, zorder=style.order,
                markeredgewidth=1.2, label=row["impl"],
            )  # fmt: skip
    ax.set_yticks(range(len(cases)), [shape_name(g[0]) for g in cases.values()])
    ax.set_ylim(len(cases) - 0.4, -0.6)
    top = max(row[key] for row in rows)
    if ceiling and ceiling < 2.2 * top:
        ax.axvline(ceiling, color=FAINT, linewidth=0.9, linestyle=(0, (6, 3)))
        ax.annotate(
            f"measured {'copy' if key == 'tbps' else 'GEMM'}", (ceiling, 1.0),
            xycoords=("data", "axes fraction"), xytext=(0, 2), ha="center",
            textcoords="offset points", fontsize=7, color=FAINT,
        )  # fmt: skip
        top = max(top, ceiling)
    if key == "host_us":
        ax.set_xscale("log")
    else:
        ax.set_xlim(0, 1.05 * top)
    ax.set_xlabel(unit)
    handles = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    ax.legend(
        handles.values(), handles.keys(), loc="center left", bbox_to_anchor=(1.01, 0.5),
        frameon=False, fontsize=8,
    )  # fmt: skip
    title(figure, meta, rows)
    return figure


def figure_of(meta: Meta, rows: Sequence[Row]) -> tuple[str, str, float | None]:
    """Return the figure that says most of some cases, its unit and its ceiling."""
    if any(row["host_us"] for row in rows):
        return "host_us", "host µs per call", None
    if all(row["seqlen"] == 1 for row in rows):
        return "tbps", "TB/s", meta.get("copy_tbps")
    gemm = meta.get("gemm_tflops_by_dtype") or {}
    return "tflops", "TFLOP/s", gemm.get(rows[0]["dtype"])


# --- The ratio to the best peer -------------------------------------------------------


def ratios(meta: Meta, rows: Sequence[Row]) -> Figure:
    """Draw this library's speed over that of the best peer, a panel per direction."""
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    shapes = sorted({ratio_line(row) for row in rows})
    seqlens = sorted({row["kv_seqlen"] for row in rows})
    width = max(0.62 * len(seqlens), 1.3) * len(directions) + 2.3
    figure = Figure(
        figsize=(max(width, 6.0), 0.42 * len(shapes) + 1.5), layout="constrained"
    )
    axes = figure.subplots(1, len(directions), sharey=True, squeeze=False)[0]
    for ax, direction in zip(axes, directions, strict=True):
        group = [row for row in rows if row["direction"] == direction]
        image = ratio_panel(ax, group, shapes, seqlens)
        ax.set_title(direction, loc="left")
        ax.set_xlabel("sequence length")
    bar = figure.colorbar(image, ax=list(axes), fraction=0.025, pad=0.02)
    bar.set_ticks([math.log2(r) for r in TICKS], labels=[f"{r:g}" for r in TICKS])
    bar.outline.set_visible(False)
    text = f"Speed of {OURS} / best peer, {rows[0]['dtype']}, {where(meta)}"
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


TICKS = (0.25, 0.5, 1, 2, 4)


def ratio_line(row: Row) -> tuple[Any, ...]:
    """Return what a line of the heat map has in common."""
    return (row["head_dim"], row["causal"], *heads_of(row), *batch_of(row))


def batch_of(row: Row) -> tuple[int, ...]:
    """Return the batch where it isn't given by the sequence length."""
    return (row["batch"],) if row["workload"] in ("decode", "small") else ()


def line_name(line: tuple[Any, ...]) -> str:
    """Name a line of the heat map."""
    head_dim, causal, heads, kv_heads, *batch = line
    parts = [f"D{head_dim}", "causal" if causal else "full"]
    if heads:
        parts.append(f"H{heads}" if heads == kv_heads else f"H{heads}/{kv_heads}")
    return " ".join([*parts, *(f"B{n}" for n in batch)])


def ratio_panel(
    ax: Axes, rows: Sequence[Row], shapes: Sequence[Any], seqlens: Sequence[int]
) -> Any:
    """Fill one panel: a number, and the name of the best peer below it."""
    grid = np.full((len(shapes), len(seqlens)), np.nan)
    for case in grouped(rows, case_of).values():
        rival = best_rival(case)
        if rival is None or not rival["ratio"] or find(case, OURS) is None:
            continue
        i = shapes.index(ratio_line(case[0]))
        j = seqlens.index(case[0]["kv_seqlen"])
        grid[i, j] = math.log2(rival["ratio"])
        # White on the dark ends of the scale.
        color = "white" if abs(grid[i, j]) > 1.2 else INK
        ax.text(j, i - 0.12, f"{rival['ratio']:.2f}", ha="center", va="center",
                fontsize=8, color=color)  # fmt: skip
        ax.text(j, i + 0.24, rival["impl"], ha="center", va="center", fontsize=5.5,
                color=color)  # fmt: skip
    for i, j in zip(*np.nonzero(np.isnan(grid)), strict=True):
        ax.text(j, i, "–", ha="center", va="center", fontsize=8, color=FAINT)
    norm = TwoSlopeNorm(0.0, math.log2(TICKS[0]), math.log2(TICKS[-1]))
    image = ax.imshow(grid, cmap=RATIO_COLORS, norm=norm, aspect="auto")
    ax.set_xticks(range(len(seqlens)), [short(seqlen) for seqlen in seqlens])
    ax.set_yticks(range(len(shapes)), [line_name(line) for line in shapes])
    # White lines between the fields.
    ax.set_xticks(np.arange(0.5, len(seqlens) - 1), minor=True)
    ax.set_yticks(np.arange(0.5, len(shapes) - 1), minor=True)
    ax.grid(False, which="major")
    ax.grid(True, which="minor", color="white", linewidth=1.5)
    ax.tick_params(which="both", length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return image


# --- Memory ---------------------------------------------------------------------------


def memory(meta: Meta, rows: Sequence[Row]) -> Figure:
    """Draw peak memory over the sequence length, a panel for each direction."""
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    figure = Figure(figsize=(2.9 * len(directions) + 0.8, 3.3), layout="constrained")
    axes = figure.subplots(1, len(directions), sharey=True, squeeze=False)[0]
    mebibytes = [
        row | {"mib": row["bytes"] / 2**20} for row in rows if row.get("bytes")
    ]
    look = looks(list(dict.fromkeys(row["impl"] for row in rows)))
    values = [row["mib"] for row in mebibytes]
    for ax, direction in zip(axes, directions, strict=True):
        group = [row for row in mebibytes if row["direction"] == direction]
        ax.set_yscale("log", base=2)
        ax.set_ylim(min(values) / 2, max(values) * 1.5)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size_name(value)))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.set_title(direction, loc="left")
        ax.set_xlabel("sequence length")
        seqlen_axis(ax, sorted({row["kv_seqlen"] for row in rows}))
        if group:
            formulas = [
                formula_line(ax, group, "square_bytes", "S × S arrays"),
                formula_line(ax, group, "needed_bytes", "results"),
            ]
            lines(ax, group, "mib", look, formulas)
    axes[0].set_ylabel("peak memory above the inputs")
    row = rows[0]
    shape = f"{row['batch']} × {row['heads']} heads of {row['head_dim']}"
    text = f"Memory of attention, {row['dtype']}, {shape}, {where(meta)}"
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


def formula_line(ax: Axes, rows: Sequence[Row], key: str, name: str) -> End:
    """Draw what something takes by its formula, and return the line's end."""
    points = sorted({(row["kv_seqlen"], row[key] / 2**20) for row in rows})
    x, y = zip(*points, strict=True)
    style = Look(FAINT, "", (0, (6, 3)), 0.9, 1)
    ax.plot(x, y, color=style.color, linewidth=style.width, linestyle=style.line)
    return name, x[-1], y[-1], style


def size_name(mebibytes: float) -> str:
    """Return a size with its unit."""
    if mebibytes >= 1024:
        return f"{mebibytes / 1024:g} GiB"
    if mebibytes < 1:
        return f"{mebibytes * 1024:g} KiB"
    return f"{mebibytes:g} MiB"
