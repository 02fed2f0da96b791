"""How plots look: one colour, line and marker for each implementation, everywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

from .results import is_ours


@dataclass(frozen=True)
class Look:
    """The look of one implementation."""

    color: str
    marker: str = "o"
    line: Any = "-"
    width: float = 1.4
    order: float = 2.0


# Okabe and Ito's colours, which people with any colour vision tell apart, and a few
# darker ones of Paul Tol's; similar ones differ in marker and line.
OURS_COLOR = "#D55E00"
LOOKS: Mapping[str, Look] = {
    "cupy_flash": Look(OURS_COLOR, "o", "-", 2.6, 5),
    "fa2": Look("#0072B2", "s"),
    "cudnn": Look("#009E73", "D"),
    "fa4": Look("#332288", "^"),
    "flex": Look("#CC79A7", "v"),
    "jax": Look("#56B4E9", "P"),
    "efficient": Look("#E69F00", "X"),
    "triton": Look("#882255", "<"),
    "flashinfer": Look("#117733", ">"),
    "xformers": Look("#AA4499", "h"),
    "torch": Look("#0072B2", "s"),
    "torch_cpu": Look("#0072B2", "s"),
    "math": Look("#555555", "x", (0, (4, 2))),
    "naive": Look("#999999", "+", (0, (1, 1.5))),
}
# Other kernels of this library, in its colour but thinner: line and marker.
FORCED = (((0, (5, 1.5)), "1"), ((0, (3, 1, 1, 1)), "2"), ((0, (1, 1)), "3"))
UNKNOWN = ("#000000", "#6699CC", "#997700", "#994455")
INK = "#333333"
FAINT = "#8A8A8A"


def looks(impls: Sequence[str]) -> dict[str, Look]:
    """Return the look of each implementation, the same in every plot."""
    found: dict[str, Look] = {}
    forced = [impl for impl in impls if is_ours(impl) and impl not in LOOKS]
    unknown = [impl for impl in impls if impl not in LOOKS and not is_ours(impl)]
    for impl in impls:
        if impl in LOOKS:
            found[impl] = LOOKS[impl]
        elif impl in forced:
            line, marker = FORCED[forced.index(impl) % len(FORCED)]
            found[impl] = Look(OURS_COLOR, marker, line, 1.2, 4)
        else:
            color = UNKNOWN[unknown.index(impl) % len(UNKNOWN)]
            found[impl] = Look(color, "d", "--")
    return found


@contextlib.contextmanager
def paper() -> Iterator[None]:
    """Set fonts, axes and files as a paper wants them."""
    with matplotlib.rc_context():
        matplotlib.rcParams.update({
            "font.size": 9, "axes.titlesize": 9.5, "axes.labelsize": 9,
            "axes.spines.top": False, "axes.spines.right": False,
            "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK,
            "xtick.color": INK, "ytick.color": INK, "axes.grid": True,
            "axes.axisbelow": True, "grid.color": "#E6E6E6", "grid.linewidth": 0.6,
            "figure.facecolor": "white", "savefig.dpi": 200,
            # Text stays text, and the same data give the same file.
            "svg.fonttype": "none", "svg.hashsalt": "cupy_flash",
        })  # fmt: skip
        yield


def spread_out(
    values: Sequence[float], gap: float, low: float, high: float
) -> list[float]:
    """Move labels apart so that neighbours are at least a gap from each other.

    Parameters
    ----------
    values : where the labels want to be
    gap : the least distance
    low, high : the range to stay in, as far as there is room

    Returns
    -------
    list of float
        In the order of `values`.
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    # Clusters of labels that touch: their middle stays at the mean of what they want.
    clusters: list[tuple[float, list[int]]] = []
    for i in order:
        center, members = values[i], [i]
        while clusters:
            before, others = clusters[-1]
            room = gap * (len(others) + len(members)) / 2
            if center - before >= room:
                break
            clusters.pop()
            members = others + members
            center = sum(values[m] for m in members) / len(members)
        half = gap * (len(members) - 1) / 2
        center = max(low + half, min(high - half, center))
        clusters.append((center, members))
    placed = [0.0] * len(values)
    for center, members in clusters:
        for n, i in enumerate(members):
            placed[i] = center + gap * (n - (len(members) - 1) / 2)
    return placed
