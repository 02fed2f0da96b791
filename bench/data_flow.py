"""Draws `bench/data-flow.svg`: what is read, kept on the chip and written.

    python -m bench.data_flow
    python -m bench.data_flow --check

The second command writes nothing and exits with 1 if the file is not what would be
drawn. The same bytes come out of every run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

PICTURE = Path(__file__).with_name("data-flow.svg")
WIDTH, HEIGHT = 800, 742
TITLE = "Data flow of FlashAttention, forward and backward"
DESCRIPTION = (
    "Forward: Q, K, V and O are tall arrays in GPU memory, cut into tiles of rows. A "
    "block of rows of Q stays on the chip while the tiles of K and V stream by. For "
    "each, a tile of logits S is made, turned into P with the running maximum m and "
    "sum l of each row, multiplied with the tile of V and added to the block of O. S "
    "and P are never stored; O and lse are written once, at the end. Backward: the "
    "tiles of P are made again from Q, K and lse; with dO, V and the row sums Delta of "
    "dO times O they give dS, and from it dQ, dK and dV."
)

INK, GREY, LINE, PAPER = "#1f2328", "#57606a", "#d0d7de", "#ffffff"
CHIP, CHIP_LINE = "#fff8e1", "#8a6100"
# Outline, fill of a tile at work, fill of one at rest; by what the array holds.
COLORS = {
    "q": ("#1f5fa8", "#8fbdec", "#e6f0fb"),
    "k": ("#b1480f", "#f3a878", "#fdeee4"),
    "v": ("#23703f", "#86cba0", "#e5f5ea"),
    "o": ("#6f429c", "#c3a2e3", "#f2eaf9"),
    "s": ("#57606a", "#ccd2d9", "#eef1f4"),
}


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 13,
    anchor: str = "start",
    color: str = INK,
    bold: bool = False,
) -> str:
    """Return a line of text whose baseline is at y."""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{color}"{weight}>{escape(words)}</text>'
    )


def lines(x: float, y: float, *rows: str) -> str:
    """Return formulas below each other."""
    return "\n".join(text(x, y + 18 * n, row) for n, row in enumerate(rows))


def box(
    x: float, y: float, width: float, height: float, fill: str, line: str, radius: int
) -> str:
    """Return a rectangle."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
        f'rx="{radius}" fill="{fill}" stroke="{line}"/>'
    )


def arrow(x0: float, y0: float, x1: float, y1: float, *, heavy: bool = False) -> str:
    """Return an arrow."""
    width, head = (3, "heavy") if heavy else (1.5, "light")
    return (
        f'<path d="M{x0:g} {y0:g}L{x1:g} {y1:g}" stroke="{GREY}" '
        f'stroke-width="{width}" marker-end="url(#{head})"/>'
    )


def tile(x: float, y: float, width: float, name: str, kind: str) -> str:
    """Return a tile on the chip, 36 high, with its name in it."""
    outline, fill, _ = COLORS[kind]
    label = text(x + width / 2, y + 23, name, anchor="middle", bold=True)
    return f"{box(x, y, width, 36, fill, outline, 2)}\n{label}"


def array(
    x: float, y: float, width: float, step: float, name: str, kind: str, at: int | None
) -> str:
    """Return an array in GPU memory: five tiles of rows, number `at` at work."""
    outline, busy, idle = COLORS[kind]
    parts = [text(x + width / 2, y - 8, name, anchor="middle", bold=True)]
    for row in range(5):
        fill = busy if at in (row, None) else idle
        parts.append(box(x, y + row * step, width, step, fill, outline, 0))
    return "\n".join(parts)


def panel(y: float, name: str, about: str, chip_height: float) -> Iterator[str]:
    """Yield what both halves have: headings and the chip."""
    yield text(28, y, name, size=17, bold=True)
    yield text(136, y, about, color=GREY)
    heads = ((142, "read from GPU memory"), (718, "written to it"))
    for x, head in heads:
        yield text(x, y + 28, head, size=12, anchor="middle", color=GREY)
    yield box(268, y + 40, 372, chip_height, CHIP, CHIP_LINE, 8)
    place = "on the chip: registers and shared memory"
    yield text(454, y + 28, place, size=12, anchor="middle", color=CHIP_LINE)


def forward(y: float) -> Iterator[str]:
    """Yield the upper half; y is its heading's baseline."""
    about = "a block of query rows stays, the tiles of K and V stream by"
    yield from panel(y, "Forward", about, 270)
    top = y + 80
    yield array(56, top, 44, 40, "Q", "q", 2)
    yield array(126, top, 44, 40, "K", "k", 1)
    yield array(196, top, 44, 40, "V", "v", 1)
    yield arrow(183, top + 8, 183, top + 192)
    yield text(78, top + 220, "head_dim", size=12, anchor="middle", color=GREY)
    yield text(183, top + 220, "tile by tile", size=12, anchor="middle", color=GREY)
    middle = top + 100
    yield (
        f'<g transform="rotate(-90 42 {middle:g})">'
        + text(42, middle, "sequence", size=12, anchor="middle", color=GREY)
        + "</g>"
    )
    yield arrow(245, middle, 258, middle, heavy=True)

    a, b, c, d = y + 52, y + 116, y + 194, y + 258
    yield tile(284, a, 44, "Qᵢ", "q") + tile(338, a, 44, "Kⱼ", "k")
    yield arrow(390, a + 18, 404, a + 18) + tile(414, a, 36, "S", "s")
    yield lines(468, a + 23, "S = Qᵢ Kⱼᵀ · scale")

    yield tile(284, b, 36, "S", "s")
    yield tile(334, b, 18, "m", "o") + tile(360, b, 18, "l", "o")
    yield arrow(390, b + 18, 404, b + 18) + tile(414, b, 36, "P", "s")
    rows = ("m ← max(m, max of S)", "P = exp(S − m)", "l ← α l + sum of P")
    yield lines(468, b + 5, *rows)

    yield text(356, b + 50, "of each row", size=11, anchor="middle", color=GREY)

    yield tile(284, c, 36, "P", "s") + tile(334, c, 44, "Vⱼ", "v")
    yield arrow(390, c + 18, 404, c + 18) + tile(414, c, 44, "Oᵢ", "o")
    yield lines(468, c + 14, "Oᵢ ← α Oᵢ + P Vⱼ", "α = exp(m before − m)")

    yield (
        f'<path d="M284 {d - 10:g}H624" stroke="{CHIP_LINE}" stroke-dasharray="3 3"/>'
    )
    yield text(284, d + 14, "After the last tile", bold=True)
    yield lines(468, d + 14, "O = Oᵢ / l", "lse = m + ln l")
    yield text(284, d + 32, "only these are written", color=GREY, size=12)

    yield arrow(645, middle, 658, middle, heavy=True)
    yield array(674, top, 44, 40, "O", "o", 2)
    yield array(744, top, 14, 40, "lse", "o", 2)
    yield text(718, top + 220, "once", size=12, anchor="middle", color=GREY)
    never = "S and P exist as tiles only; the sequence × sequence matrix never does."
    yield text(454, y + 336, never, size=12, anchor="middle", color=GREY)


def backward(y: float) -> Iterator[str]:
    """Yield the lower half; y is its heading's baseline."""
    about = "the tiles of P are made again, from Q, K and lse"
    yield from panel(y, "Backward", about, 214)
    top = y + 68
    for x, name, kind, at in (
        (32, "Q", "q", 2), (78, "K", "k", 1), (124, "V", "v", 1), (170, "dO", "o", 2),
    ):  # fmt: skip
        yield array(x, top, 34, 32, name, kind, at)
    yield array(216, top, 12, 32, "lse", "o", 2)
    yield array(238, top, 12, 32, "Δ", "o", 2)
    yield text(
        142, top + 180, "Δ = row sum of dO ∘ O", size=12, anchor="middle", color=GREY
    )
    middle = y + 144
    yield arrow(254, middle, 260, middle, heavy=True)

    a, b, c, d = y + 50, y + 98, y + 146, y + 192
    yield tile(284, a, 34, "Qᵢ", "q") + tile(324, a, 34, "Kⱼ", "k")
    yield tile(364, a, 22, "lse", "o").replace('font-size="13"', 'font-size="11"')
    yield arrow(392, a + 18, 404, a + 18) + tile(414, a, 36, "P", "s")
    yield lines(468, a + 14, "S = Qᵢ Kⱼᵀ · scale", "P = exp(S − lse)")

    yield tile(284, b, 34, "dOᵢ", "o") + tile(324, b, 34, "Vⱼ", "v")
    yield arrow(392, b + 18, 404, b + 18) + tile(414, b, 36, "dP", "s")
    yield lines(468, b + 23, "dP = dOᵢ Vⱼᵀ")

    yield tile(284, c, 34, "P", "s") + tile(324, c, 34, "dP", "s")
    yield tile(364, c, 22, "Δ", "o")
    yield arrow(392, c + 18, 404, c + 18) + tile(414, c, 36, "dS", "s")
    yield lines(468, c + 23, "dS = P ∘ (dP − Δ)")

    yield text(284, d + 14, "Sums over all tiles", bold=True)
    yield text(284, d + 32, "each is written once", color=GREY, size=12)
    sums = ("dQᵢ += dS Kⱼ · scale", "dKⱼ += dSᵀ Qᵢ · scale", "dVⱼ += Pᵀ dOᵢ")
    yield lines(468, d + 14, *sums)

    yield arrow(645, middle, 652, middle, heavy=True)
    for x, name, kind, at in (
        (664, "dQ", "q", 2), (706, "dK", "k", 1), (748, "dV", "v", 1),
    ):  # fmt: skip
        yield array(x, top, 32, 32, name, kind, at)
    notes = (
        "For dQ a block keeps rows of Q and dO and walks over K and V; for dK and dV "
        "it keeps rows of",
        "K and V and walks over Q and dO. A tile of a result has one owner: nothing is "
        "added by atomics.",
    )
    for n, note in enumerate(notes):
        yield text(400, y + 284 + 18 * n, note, size=12, anchor="middle", color=GREY)


def draw() -> str:
    """Return the picture, an SVG document."""
    heads = "\n".join(
        f'<marker id="{name}" viewBox="0 0 6 6" refX="3" refY="3" markerWidth="{size}" '
        f'markerHeight="{size}" orient="auto"><path d="M0 0L6 3L0 6Z" fill="{GREY}"/>'
        "</marker>"
        for name, size in (("light", 5), ("heavy", 3.5))
    )
    parts = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-labelledby="title desc" '
        'font-family="system-ui, Helvetica, Arial, sans-serif">',
        f'<title id="title">{escape(TITLE)}</title>',
        f'<desc id="desc">{escape(DESCRIPTION)}</desc>',
        f"<defs>\n{heads}\n</defs>",
        # A ground of its own, since the page's may be light or dark.
        box(1, 1, WIDTH - 2, HEIGHT - 2, PAPER, LINE, 12),
        *forward(36),
        f'<path d="M28 392H772" stroke="{LINE}"/>',
        *backward(422),
        "</svg>",
    )
    return "\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.data_flow", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if stale"
    )
    if not parser.parse_args(arguments).check:
        PICTURE.write_bytes(draw().encode())
    elif not PICTURE.is_file() or PICTURE.read_bytes() != draw().encode():
        sys.exit(f"{PICTURE.name} is stale; python -m bench.data_flow draws it anew")


if __name__ == "__main__":
    main()
