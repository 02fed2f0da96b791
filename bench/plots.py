"""Plots of result files, as PNG and SVG.

Speed, ratio to the best peer, peak memory, and the time to a first result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from .results import OURS, Row, case_of
from .style import FAINT, INK, OURS_COLOR, Look, looks, paper, spread_out
from .tables import best_rival, by_shape, find, grouped, number, shape_name

Meta = Mapping[str, Any]
# Workloads whose rows aren't times of a pass, and those that are a series of lengths.
OTHER = ("tiles", "end_to_end")
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
                yield f"peak-{dtype}", memory(meta, group)
        return
    if workload == "first_call":
        if done := [row for row in rows if row["status"] == "ok"]:
            yield "bars", first_results(meta, done)
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


def pass_name(direction: str) -> str:
    """Return a direction in words."""
    return "forward + backward" if direction == "both" else direction


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
        figsize=(3.1 * len(columns) + 0.8, 2.6 * len(masks) + 0.8),
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
            ceiling = [level(ax, gemm, "measured GEMM")] if gemm else []
            if panel:
                lines(ax, panel, "tflops", look, ceiling)
            else:
                ax.text(0.5, 0.4, "not measured", transform=ax.transAxes, ha="center",
                        fontsize=8, color=FAINT)  # fmt: skip
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
    name = pass_name(row["direction"])
    text = f"Attention {name}, {row['dtype']}, {where(meta)}"
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold")


End = tuple[str, float, float, Look]
# Lines that no implementation was measured for.
FORMULA = Look(FAINT, "", (0, (6, 3)), 0.9, 1)


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


def level(ax: Axes, value: float, name: str) -> End:
    """Draw a horizontal line at a measured ceiling, and return the line's end."""
    ax.axhline(value, color=FAINT, linewidth=0.9, linestyle=(0, (6, 3)), zorder=1)
    return name, ax.get_xlim()[1], value, FORMULA


# --- Cases that aren't a series -------------------------------------------------------


def dots(meta: Meta, rows: Sequence[Row]) -> Figure:
    """Draw each case as a group of points, every implementation in a lane of its own.

    Calls that are timed on the host too have a panel for either time.
    """
    panels = panels_of(meta, rows)
    cases = grouped(sorted(rows, key=by_shape), case_of)
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    look = looks(impls)
    width = 4.4 if len(panels) == 1 else 3.3
    figure = Figure(
        figsize=(
            width * len(panels) + 2.0, (0.09 * len(impls) + 0.2) * len(cases) + 1.2
        ),
        layout="constrained",
    )  # fmt: skip
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, panel in zip(axes, panels, strict=True):
        for y, group in enumerate(cases.values()):
            for row in group:
                lane = (impls.index(row["impl"]) + 0.5) / len(impls) - 0.5
                if value := panel.value(row):
                    style = look[row["impl"]]
                    ax.plot(
                        value, y + 0.84 * lane, color=style.color, linestyle="",
                        marker=style.marker, markeredgewidth=1.0, zorder=style.order,
                        markersize=6 if row["impl"] == OURS else 5, label=row["impl"],
                    )  # fmt: skip
        dots_axis(ax, panel)
        ax.set_ylim(len(cases) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
        for y in range(1, len(cases)):
            ax.axhline(y - 0.5, color=FAINT, linewidth=0.5)
    axes[0].set_yticks(range(len(cases)), [shape_name(g[0]) for g in cases.values()])
    handles = {
        label: handle
        for ax in axes
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    names = [impl for impl in impls if impl in handles]
    axes[-1].legend(
        [handles[name] for name in names], names, loc="center left",
        bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8,
    )  # fmt: skip
    title(figure, meta, rows)
    return figure


@dataclass(frozen=True)
class Panel:
    """What a panel of points shows.

    Attributes
    ----------
    label : str
        The quantity and its unit.
    value : callable
        Returns it for a row, None without one.
    logarithmic : bool
    ceiling : float, optional
    ceiling_name : str
    top : float
        Of the axis, if it isn't logarithmic.
    """

    label: str
    value: Callable[[Row], float | None]
    logarithmic: bool = False
    ceiling: float | None = None
    ceiling_name: str = ""
    top: float = 0.0


def panels_of(meta: Meta, rows: Sequence[Row]) -> list[Panel]:
    """Return the panels that say most of some cases."""
    if any(row["host_us"] for row in rows):
        return [
            Panel("device µs per call", lambda row: row["ms"] * 1e3, True),
            Panel("host µs per call", lambda row: row["host_us"], True),
        ]
    key, unit, name, ceiling = "tbps", "TB/s", "copy", meta.get("copy_tbps")
    if any(row["seqlen"] > 1 for row in rows):
        key, unit, name = "tflops", "TFLOP/s", "GEMM"
        ceiling = (meta.get("gemm_tflops_by_dtype") or {}).get(rows[0]["dtype"])
    top = max(row[key] for row in rows)
    if not ceiling or ceiling > 2.2 * top:
        ceiling = None
    return [
        Panel(
            unit, lambda row: row[key], False, ceiling, f"measured {name}",
            max(top, ceiling or 0.0),
        )
    ]  # fmt: skip


def dots_axis(ax: Axes, panel: Panel) -> None:
    """Set up the axis of a panel's values, with its ceiling."""
    ax.set_xlabel(panel.label)
    ax.grid(False, axis="y")
    if panel.logarithmic:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: thousands(value)))
    else:
        ax.set_xlim(0, 1.05 * panel.top)
    if panel.ceiling:
        ax.axvline(panel.ceiling, color=FAINT, linewidth=0.9, linestyle=(0, (6, 3)))
        ax.annotate(
            panel.ceiling_name, (panel.ceiling, 1.0),
            xycoords=("data", "axes fraction"), xytext=(0, 2), ha="center",
            textcoords="offset points", fontsize=7, color=FAINT,
        )  # fmt: skip


def thousands(value: float) -> str:
    """Return 2000 as 2k."""
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


# --- The ratio to the best peer -------------------------------------------------------

# The ends of the scale of colours, and what it names between.
TICKS = (0.25, 0.5, 1, 2, 4)


def ratios(meta: Meta, rows: Sequence[Row]) -> Figure:
    """Draw this library's speed over that of the best peer.

    A panel for each direction with the sequence lengths beside each other, or, for
    cases that aren't a series of lengths, one panel of cases and directions.
    """
    if rows[0]["workload"] in SERIES:
        line, column = ratio_line, length_name
        by_length = sorted(rows, key=lambda row: row["kv_seqlen"])
        panels = [
            (direction, [row for row in by_length if row["direction"] == direction])
            for direction in dict.fromkeys(row["direction"] for row in rows)
        ]
    else:
        line, column = shape_name, direction_name
        panels = [("", rows)]
    shapes = list(dict.fromkeys(map(line, sorted(rows, key=by_shape))))
    columns = [list(dict.fromkeys(map(column, group))) for _, group in panels]
    counts = [len(names) for names in columns]
    figure = Figure(
        figsize=(max(0.62 * sum(counts) + 2.3, 5.0), 0.42 * len(shapes) + 1.4),
        layout="constrained",
    )
    axes = figure.subplots(
        1, len(panels), sharey=True, squeeze=False, width_ratios=counts
    )[0]
    for ax, (name, group), names in zip(axes, panels, columns, strict=True):
        cells = {
            (shapes.index(line(case[0])), names.index(column(case[0]))): case
            for case in grouped(group, case_of).values()
        }
        image = ratio_panel(ax, cells, shapes, names)
        ax.set_title(pass_name(name), loc="left")
        ax.set_xlabel("sequence length" if name else "")
    bar = figure.colorbar(image, ax=list(axes), fraction=0.025, pad=0.02, extend="both")
    bar.set_ticks([math.log2(r) for r in TICKS], labels=[f"{r:g}" for r in TICKS])
    bar.outline.set_visible(False)
    text = f"Speed of {OURS} / best peer, {rows[0]['dtype']}, {where(meta)}"
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


def length_name(row: Row) -> str:
    """Name the column of a row of a series."""
    return short(row["kv_seqlen"])


def direction_name(row: Row) -> str:
    """Name the column of another row."""
    return pass_name(row["direction"])


def ratio_line(row: Row) -> str:
    """Name the line of the heat map that a row of a series belongs to."""
    heads, kv_heads = heads_of(row)
    parts = [f"D{row['head_dim']}", "causal" if row["causal"] else "full"]
    if heads:
        parts.append(f"H{heads}" if heads == kv_heads else f"H{heads}/{kv_heads}")
    return " ".join(parts)


def ratio_panel(
    ax: Axes,
    cells: Mapping[tuple[int, int], Sequence[Row]],
    shapes: Sequence[str],
    columns: Sequence[str],
) -> Any:
    """Fill one panel: a number, and the name of the best peer below it.

    `cells` are the rows of a case by line and column.
    """
    grid = np.full((len(shapes), len(columns)), np.nan)
    for (i, j), case in cells.items():
        rival = best_rival(case)
        if rival is None or not rival["ratio"] or find(case, OURS) is None:
            continue
        grid[i, j] = math.log2(rival["ratio"])
        # White on the dark ends of the scale.
        color = "white" if abs(grid[i, j]) > 1.2 else INK
        ax.text(j, i - 0.14, f"{rival['ratio']:.2f}", ha="center", va="center",
                fontsize=8, color=color)  # fmt: skip
        ax.text(j, i + 0.24, rival["impl"], ha="center", va="center", fontsize=6.5,
                color=color)  # fmt: skip
    for i, j in zip(*np.nonzero(np.isnan(grid)), strict=True):
        ax.text(j, i, "–", ha="center", va="center", fontsize=8, color=FAINT)
    norm = TwoSlopeNorm(0.0, math.log2(TICKS[0]), math.log2(TICKS[-1]))
    image = ax.imshow(grid, cmap=RATIO_COLORS, norm=norm, aspect="auto")
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(shapes)), shapes)
    # White lines between the fields.
    ax.set_xticks(np.arange(0.5, len(columns) - 1), minor=True)
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
    figure = Figure(figsize=(2.9 * len(directions) + 0.8, 3.6), layout="constrained")
    axes = figure.subplots(1, len(directions), sharey=True, squeeze=False)[0]
    mebibytes = [
        row | {"mib": row["bytes"] / 2**20} for row in rows if row.get("bytes")
    ]
    look = looks(list(dict.fromkeys(row["impl"] for row in rows)))
    seqlens = sorted({row["kv_seqlen"] for row in mebibytes})
    values = [row["mib"] for row in mebibytes]
    values += [row["square_bytes"] / 2**20 for row in mebibytes]
    for ax, direction in zip(axes, directions, strict=True):
        ax.set_yscale("log", base=2)
        ax.set_ylim(min(values) / 2, max(values) * 1.5)
        ax.yaxis.set_major_locator(LogLocator(4, numticks=20))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size_name(value)))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.set_title(pass_name(direction), loc="left")
        ax.set_xlabel("sequence length")
        seqlen_axis(ax, seqlens)
        group = [row for row in mebibytes if row["direction"] == direction]
        if not group:
            continue
        formulas = [
            formula_line(ax, group, "square_bytes", "S × S arrays"),
            formula_line(ax, group, "needed_bytes", "needed"),
        ]
        lines(ax, group, "mib", look, formulas)
    axes[0].set_ylabel("peak memory above the inputs")
    row = rows[0]
    shape = f"batch {row['batch']}, {row['heads']} heads of size {row['head_dim']}"
    text = f"Memory of attention, {row['dtype']}, {shape}, {where(meta)}"
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


def formula_line(ax: Axes, rows: Sequence[Row], key: str, name: str) -> End:
    """Draw what something takes by its formula, and return the line's end."""
    points = sorted({(row["kv_seqlen"], row[key] / 2**20) for row in rows})
    x, y = zip(*points, strict=True)
    ax.plot(x, y, color=FAINT, linewidth=FORMULA.width, linestyle=FORMULA.line)
    return name, x[-1], y[-1], FORMULA


def size_name(mebibytes: float) -> str:
    """Return a size with its unit."""
    if mebibytes >= 1024:
        return f"{mebibytes / 1024:g} GiB"
    if mebibytes < 1:
        return f"{mebibytes * 1024:g} KiB"
    return f"{mebibytes:g} MiB"


# --- The first call -------------------------------------------------------------------


def first_results(meta: Meta, rows: Sequence[Row]) -> Figure:
    """Draw the time to the first result as bars, with cold caches and with warm ones.

    Rows are named as "fa2 (cold)".
    """
    times = {
        (row["direction"], *row["impl"].rstrip(")").split(" (")): row["ms"] / 1e3
        for row in rows
    }
    directions, impls, caches = (
        list(dict.fromkeys(names)) for names in zip(*times, strict=True)
    )
    look = looks(impls)
    figure = Figure(
        figsize=(3.3 * len(directions) + 1.2, 0.5 * len(impls) + 1.3),
        layout="constrained",
    )
    axes = figure.subplots(1, len(directions), sharey=True, squeeze=False)[0]
    thickness = 0.8 / len(caches)
    for ax, direction in zip(axes, directions, strict=True):
        for n, (impl, cache) in enumerate(itertools.product(impls, caches)):
            if (seconds := times.get((direction, impl, cache))) is None:
                continue
            y = n // len(caches) + thickness * (n % len(caches) - (len(caches) - 1) / 2)
            ax.barh(
                y, seconds, 0.92 * thickness, color=look[impl].color,
                alpha=1.0 if cache == caches[0] else 0.45, linewidth=0,
            )  # fmt: skip
            ax.annotate(
                f"{duration(seconds)}, {cache}", (seconds, y), xytext=(3, 0),
                textcoords="offset points", va="center", fontsize=7,
            )  # fmt: skip
        ax.set_title(f"to the end of the first {direction}", loc="left")
        ax.set_xlabel("seconds")
        ax.set_xlim(0, 1.25 * max(times.values()))
        ax.grid(False, axis="y")
        ax.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(impls)), impls)
    axes[0].set_ylim(len(impls) - 0.5, -0.5)
    shape = f"{rows[0]['dtype']}, {shape_name(rows[0])}"
    figure.suptitle(
        f"Time to the first result, {shape}, {where(meta)}", x=0.01, ha="left",
        fontsize=11, fontweight="bold",
    )  # fmt: skip
    return figure


def duration(seconds: float) -> str:
    """Return a time with its unit."""
    if seconds < 1:
        return f"{number(seconds * 1e3)} ms"
    return f"{number(seconds)} s"
