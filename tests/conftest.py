"""What holds of every test: those that need a GPU are skipped where there is none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from .gpu.record import Recorder

GPU_TESTS = Path(__file__).parent / "gpu"
_REASON = pytest.StashKey[str]()
# PyTorch, JAX and CuPy warn of each other's and of NumPy's latest versions, and that is
# no reason for a test of this library to fail.
_ONLY_OUR_WARNINGS = pytest.mark.filterwarnings("default", "error:::cupy_flash")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-record",
        metavar="FILE",
        help="write the record of a run of the GPU tests to this file too, also if "
        "only some of them were run or some failed",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # else a worker of pytest-xdist
        config.pluginmanager.register(Recorder(config), "gpu_record")


# Before pytest's own -m, which selects by the marker that is added here.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(_ONLY_OUR_WARNINGS)
    need_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if need_gpu else None
    if reason is not None:
        config.stash[_REASON] = reason
        for item in need_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


def why_no_gpu() -> str | None:
    """Return why no CUDA device can be used; None if one can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy's about a toolkit it can't find
            import cupy
    except ImportError as error:
        return f"no usable GPU: CuPy can't be imported ({error})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no usable GPU: {error}"
    return None if count else "no usable GPU: CuPy finds no device"


# Around pytest's own, so that it comes after its list of skipped tests.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Iterator[None]:
    yield
    reason = config.stash.get(_REASON, None)
    if reason is None:
        return
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple) and reason in report.longrepr[2]
    ]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} GPU tests skipped: {reason}")
