"""Skips everything here where there is no C++ compiler."""

from __future__ import annotations

import pytest

from . import build


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if build.compiler() is None:
        skip = pytest.mark.skip(reason="no C++ compiler; CXX can name one")
        for item in items:
            if "tests/sim/" in item.nodeid:
                item.add_marker(skip)
