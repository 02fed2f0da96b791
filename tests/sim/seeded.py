"""Faults that are put into a copy of the sources: what each is noticed by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from .build import compiler
from .device import SimulationError

# How kernels of `wgmma` are run until a fault is noticed.
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"order": "descending"},
    {"order": "random"},
    {"order": "random", "early": True},
)


class Named(Protocol):
    """A fault: all that is needed of it here."""

    @property
    def name(self) -> str:
        """What it is."""


F = TypeVar("F", bound=Named)


def headline(report: str) -> str:
    """Return the line of a report that says what is wrong."""
    lines = report.splitlines()
    marks = ("ERROR", "runtime error", "sim: ")
    return next((x for x in lines if any(mark in x for mark in marks)), lines[0])


def noticed_by(
    ways: Iterable[dict[str, Any]], compute: Callable[[dict[str, Any]], None]
) -> str:
    """Return what is wrong in the first way that shows it; empty if none does.

    `compute` raises AssertionError if its results aren't right.
    """
    for way in ways:
        how = ", ".join(map(str, way.values())) or "ascending"
        try:
            compute(way)
        except SimulationError as error:
            return f"report ({how}): {headline(str(error))[:110]}"
        except AssertionError:
            return f"wrong result ({how})"
    return ""


def outcomes_of(
    faults: Sequence[F],
    found: Callable[[F, Path], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, str]:
    """Return what each fault was noticed by, when `found` tries it in a folder."""
    folders = [tmp_path_factory.mktemp("fault") for _ in faults]
    with ThreadPoolExecutor() as pool:
        names = (fault.name for fault in faults)
        return dict(zip(names, pool.map(found, faults, folders), strict=True))


def missed(outcomes: dict[str, str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Show what each fault was noticed by; return those that weren't."""
    assert compiler()
    with capsys.disabled():
        print()
        for name, how in outcomes.items():
            print(f"  {name}: {how or 'NOT FOUND'}")
    return [name for name, how in outcomes.items() if not how]
