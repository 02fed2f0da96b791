"""From a planned call to launched kernels: outputs, workspace, arguments.

What follows from shapes and options alone is prepared once and kept; a warm call
allocates its outputs, fills in the addresses and launches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import settings
from .device import Device, hypothetical
from .params import Template, make_template
from .plan import Plan, make_plan
from .problem import ArrayInfo, Options, Problem
from .validate import (
    check_length_values,
    contiguous_strides,
    describe_host,
    make_problem,
    output_shape,
)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Everything about a call that doesn't depend on addresses."""

    problem: Problem
    plan: Plan
    template: Template
    outputs: tuple[tuple[str, tuple[int, ...], np.dtype], ...]
    launches: list[tuple[Any, int, int, int]] = field(default_factory=list)

    def load(self, device: Device) -> None:
        """Get the kernels ready, which compiles those that were never used before."""
        self.launches[:] = [
            (device.kernel(step.spec), step.grid, step.block, step.shared_memory)
            for step in self.plan.steps
        ]


@functools.lru_cache(maxsize=4096)
def _prepare(
    device: Device, infos: tuple[tuple[str, ArrayInfo], ...], options: Options
) -> _Prepared:
    problem = make_problem(dict(infos), options)
    plan = make_plan(problem, device.info)
    outputs = tuple(
        (name, output_shape(problem, name), problem.operand(name).dtype)
        for name in problem.outputs
    )
    return _Prepared(problem, plan, make_template(problem, plan.dbias_splits), outputs)


def run(device: Device, arrays: dict[str, Any], options: Options) -> tuple[Any, ...]:
    """Compute a call on a device; return its outputs in order."""
    describe = device.describe
    infos = tuple([(name, describe(array)) for name, array in arrays.items()])
    try:
        prepared = _prepare(device, infos, options)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        prepared = _prepare.__wrapped__(device, infos, options)
    with device.active():
        if prepared.plan.copies:
            arrays = dict(arrays)
            for name in prepared.plan.copies:
                arrays[name] = device.dense_copy(arrays[name])
            return run(device, arrays, options)
        if settings.debug:
            _check_device_lengths(device, arrays, prepared.problem)
        if len(prepared.launches) != len(prepared.plan.steps):
            prepared.load(device)
        return _launch(device, arrays, prepared)


def _launch(
    device: Device, arrays: dict[str, Any], prepared: _Prepared
) -> tuple[Any, ...]:
    pointer = device.pointer
    addresses = {name: pointer(array) for name, array in arrays.items()}
    results = []
    for name, shape, dtype in prepared.outputs:
        array = arrays.get(name)
        if array is None:
            array = device.empty(shape, dtype)
            addresses[name] = pointer(array)
        elif addresses[name] in (addresses["q"], addresses["k"], addresses["v"]):
            _refuse_overlap(name, array)
        results.append(array)
    plan = prepared.plan
    workspace = []  # is freed when this function returns, in the order of the stream
    for entry in plan.workspace:
        workspace.append(device.temporary(entry.shape, entry.dtype))
        addresses[entry.name] = pointer(workspace[-1])
    for name in plan.cleared:
        device.clear(results[prepared.problem.outputs.index(name)])
    params = prepared.template.fill(addresses)
    for launch in prepared.launches:
        device.launch(*launch, params)
    return tuple(results)


def _refuse_overlap(name: str, array: Any) -> None:
    if array.size:
        raise ValueError(
            f"{name} starts at the address of an input; outputs must not overlap inputs"
        )


def _check_device_lengths(
    device: Device, arrays: dict[str, Any], problem: Problem
) -> None:
    for name, limit in (
        ("q_lengths", problem.seqlen_q),
        ("k_lengths", problem.seqlen_k),
    ):
        if name in arrays:
            check_length_values(name, device.to_host(arrays[name]), limit)


def explain(
    owner: Device | None, arrays: dict[str, Any], options: Options, device: str | None
) -> Plan:
    """Plan a call; see `cupy_flash.explain`."""
    if options.direction not in ("forward", "backward"):
        raise ValueError(
            f"direction is {options.direction!r}; accepted: 'forward', 'backward'"
        )
    if device is not None:
        info = hypothetical(device)
    elif owner is not None:
        info = owner.info
    else:
        raise ValueError(
            "NumPy arrays are computed on the CPU without a plan; name a GPU, such as "
            "device='sm_90'"
        )
    describe = describe_host if owner is None else owner.describe
    infos = {name: describe(array) for name, array in arrays.items()}
    if options.direction == "backward":
        infos = _with_forward_results(infos, options)
    return make_plan(make_problem(infos, options), info)


def _with_forward_results(
    infos: dict[str, ArrayInfo], options: Options
) -> dict[str, ArrayInfo]:
    """Add what a backward call takes beside the arguments of the forward one."""
    inputs = {n: i for n, i in infos.items() if n not in ("dlse", "out")}
    forward = make_problem(
        inputs, options._replace(direction="forward", return_lse=True, bias_grad=False)
    )
    added = {}
    for name in ("out", "lse"):
        shape, dtype = output_shape(forward, name), forward.operand(name).dtype
        added[name] = ArrayInfo(shape, contiguous_strides(shape, dtype), dtype)
    return {"dout": added["out"], **added, **infos}
