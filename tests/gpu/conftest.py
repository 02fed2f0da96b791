"""Compiles the kernels of the selected tests on all cores before the first one runs."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from .running import cp, skipping_refusals, specs_of_parameters

# JAX takes most of the GPU's memory when it starts, unless it is told not to.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture(scope="session", autouse=True)
def precompiled_kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The kernels of all tests that have a case as a parameter, in the cache.

    With ``-n``, one process compiles them and the others wait for it.
    """
    worker = getattr(request.config, "workerinput", {}).get("workerid", "gw0")
    done = tmp_path_factory.getbasetemp().parent / "gpu-kernels-compiled"
    if worker != "gw0":
        while not done.exists():
            time.sleep(0.1)
        return
    try:
        precompile_for(request)
    finally:
        done.touch()


def precompile_for(request: pytest.FixtureRequest) -> None:
    """Compile what the selected tests need."""
    from cupy_flash.compiler import CompileError, precompile
    from cupy_flash.device import hypothetical

    parameters = [
        item.callspec.params
        for item in request.session.items
        if hasattr(item, "callspec") and item.get_closest_marker("gpu")
    ]
    capability = int(cp.cuda.Device().compute_capability)
    device = f"sm_{capability}"
    try:
        hypothetical(device)
    except ValueError as error:
        warnings.warn(f"kernels are compiled as they come: {error}", stacklevel=1)
        return
    start = time.monotonic()
    found = specs_of_parameters(parameters, device)
    try:
        precompile(found, capability)
    except CompileError as error:
        # The tests that need this kernel fail by themselves, and only they.
        warnings.warn(str(error), stacklevel=1)
    recorder = request.config.pluginmanager.get_plugin("gpu_record")
    if recorder is not None:
        recorder.precompiled = {
            "kernels": len(found),
            "precompile_s": round(time.monotonic() - start, 1),
        }


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Skip what a family can't do, with the reason that the library gives."""
    with skipping_refusals():
        return (yield)


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """Give the memory of each test back to the GPU."""
    yield
    cp.get_default_memory_pool().free_all_blocks()


@pytest.fixture
def torch() -> Any:
    """PyTorch, if it is installed and sees a GPU."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    return torch


@pytest.fixture
def jax() -> Any:
    """JAX, if it is installed and sees a GPU."""
    jax = pytest.importorskip("jax")
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"JAX sees no GPU: {error}")
    return jax
