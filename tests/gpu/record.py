"""The record of a run on a GPU: what ran, where, of which sources, with what result."""

from __future__ import annotations

import collections
import datetime
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.machine import ROOT, describe_machine, source_sha256
from cupy_flash.configs import FAMILIES

RECORD = ROOT / "bench" / "results" / "gpu-tests.json"
GPU_TESTS = "tests/gpu"
# The folders whose tests are counted.
COUNTED = (GPU_TESTS, "tests/real")
OUTCOMES = ("passed", "failed", "skipped", "xfailed")
# Where a test's name says with which kernel family it was run.
_FAMILY = re.compile(
    rf"[\[-]({'|'.join(FAMILIES)})[\]-]|/test_({'|'.join(FAMILIES)})\.py"
)


class Recorder:
    """A pytest plugin that counts outcomes and writes them down at the end.

    The file that is kept in the repository is written only by a run of all GPU tests
    in which none failed.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.start = time.monotonic()
        self.outcomes: dict[str, str] = {}  # by node id
        self.reasons: dict[str, str] = {}  # of those that were skipped
        self.precompiled: dict[str, Any] = {}
        self.deselected = 0
        self.not_collected = 0
        self.collected_by_workers: set[str] = set()
        self.message = ""

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.deselected += sum(self._folder(x.nodeid) == GPU_TESTS for x in items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.not_collected += report.failed

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """With ``-n``, the processes that run the tests collect them."""
        self.collected_by_workers.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._folder(report.nodeid) is None:
            return
        before = self.outcomes.get(report.nodeid)
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped:
            self.outcomes[report.nodeid] = (
                "xfailed" if hasattr(report, "wasxfail") else "skipped"
            )
            if isinstance(report.longrepr, (tuple, list)):
                reason = str(report.longrepr[-1]).removeprefix("Skipped: ")
                self.reasons[report.nodeid] = reason
        elif report.when == "call" and before is None:
            self.outcomes[report.nodeid] = "passed"

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(self.config, "workerinput"):
            return  # the process that collects all reports writes them down
        ran = [
            node
            for node, outcome in self.outcomes.items()
            if self._folder(node) == GPU_TESTS and outcome != "skipped"
        ]
        if not ran or self.config.option.collectonly:
            return
        whole = self._is_whole(session, exitstatus)
        record = self.record(whole)
        paths = []
        if whole and not record["failed"]:
            paths.append(RECORD)
        if self.config.option.gpu_record:
            paths.append(Path(self.config.option.gpu_record))
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(record, indent=2)
            path.write_text(text + "\n", encoding="utf-8")
        written = " and ".join(map(str, paths))
        self.message = f"GPU record written to {written}" if paths else (
            "GPU record not written: "
            + ("some tests failed" if whole else "not all of tests/gpu was run")
        )  # fmt: skip

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> Iterator[None]:
        yield
        if self.message:
            terminalreporter.write_line(self.message)

    def record(self, whole: bool) -> dict[str, Any]:
        """Return the record of what has run so far."""
        files: dict[str, collections.Counter[str]] = {}
        families: dict[str, collections.Counter[str]] = {}
        for node, outcome in self.outcomes.items():
            files.setdefault(self._file(node), collections.Counter())[outcome] += 1
            if found := _FAMILY.search(node):
                name = found[1] or found[2]
                families.setdefault(name, collections.Counter())[outcome] += 1
        skips = collections.Counter(self.reasons.values())
        total = sum(files.values(), collections.Counter())
        now = datetime.datetime.now(datetime.timezone.utc)
        arguments = self._arguments()
        return {
            **describe_machine(),
            "date": now.isoformat(timespec="seconds"),
            "command": " ".join(["python -m pytest", *arguments]),
            "selected": "all" if whole else arguments,
            **{name: total[name] for name in OUTCOMES},
            "duration_s": round(time.monotonic() - self.start, 1),
            **self.precompiled,
            "source_sha256": source_sha256(),
            "files": _counts(files),
            "families": _counts(families),
            "skips": {reason: skips[reason] for reason in sorted(skips)},
        }

    def _is_whole(self, session: pytest.Session, exitstatus: int) -> bool:
        """Whether every test in tests/gpu was run."""
        nodes = self.collected_by_workers or {x.nodeid for x in session.items}
        items = [node for node in nodes if self._folder(node) == GPU_TESTS]
        on_disk = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / GPU_TESTS).rglob("test_*.py")
        }
        return (
            exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
            and not self.deselected
            and not self.not_collected
            and not any("::" in argument for argument in self.config.args)
            and {self._file(node) for node in items} == on_disk
            and all(node in self.outcomes for node in items)
        )

    def _file(self, node: str) -> str:
        """The file of a node, from the root of the repository."""
        path = (self.config.rootpath / node.partition("::")[0]).resolve()
        return path.relative_to(ROOT).as_posix() if ROOT in path.parents else str(path)

    def _folder(self, node: str) -> str | None:
        """The folder among those that are counted that a node lies in."""
        file = self._file(node)
        return next((f for f in COUNTED if file.startswith(f"{f}/")), None)

    def _arguments(self) -> list[str]:
        """The arguments of pytest, without those that only say where to write."""
        arguments = []
        skip = False
        for argument in map(str, self.config.invocation_params.args):
            if skip or argument.startswith(("--gpu-record=", "--junit", "--basetemp")):
                skip = False
            elif argument == "--gpu-record":
                skip = True
            elif ROOT in Path(argument).parents:
                arguments.append(Path(argument).relative_to(ROOT).as_posix())
            else:
                arguments.append(argument)
        return arguments


def _counts(each: dict[str, collections.Counter[str]]) -> dict[str, dict[str, int]]:
    """Return how many tests came out how, in each group."""
    return {
        name: {o: each[name][o] for o in OUTCOMES if each[name][o]}
        for name in sorted(each)
    }
