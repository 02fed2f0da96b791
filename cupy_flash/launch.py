"""From a planned call to launched kernels: outputs, workspace, arguments.

What follows from shapes and options alone is prepared once and kept; a warm call
allocates its outputs, fills in the addresses and launches.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

import numpy as np

from . import settings
from .device import Device, DeviceInfo, hypothetical
from .params import Template, make_template, selector
from .plan import Plan, make_plan
from .problem import ArrayInfo, Options, Problem
from .validate import (
    check_length_values,
    check_overlap,
    contiguous_strides,
    make_problem,
    output_shape,
)

_REMEMBERED = 64
# Tensor maps of so many places are kept for all kinds of calls together: a model's
# layers, each with its own arrays, take turns. They are 1 KB each, with their key.
_MAPS_REMEMBERED = 4096
_MAPPED: deque[tuple[dict, tuple[int, ...]]] = deque()  # where, from the oldest on
_STEP = 0x9E3779B97F4A7C15


class _Launches(threading.local):
    """Numbers of the launches that count claims.

    What one left in memory must not look like a claim of another that gets the memory
    after it. So numbers lie far apart: multiples of the golden ratio. Each thread has
    its own, from 64 random bits on, as itertools.count isn't made for threads at once.
    """

    def __init__(self) -> None:
        self.numbers = itertools.count(secrets.randbits(64))


_LAUNCHES = _Launches()


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Everything about a call that doesn't depend on addresses.

    `given` names the outputs that came with the call; `mapped` takes the addresses
    on which the tensor maps depend; `claimed` tells whether tiles are claimed;
    `launches` are kernels, what they are launched with, and how many arguments each
    takes.
    """

    problem: Problem
    plan: Plan
    template: Template
    outputs: tuple[tuple[str, tuple[int, ...], np.dtype], ...]
    infos: Mapping[str, ArrayInfo]
    spans: Mapping[str, tuple[int, int]]
    given: tuple[str, ...]
    mapped: Callable[[Mapping[str, int]], tuple[int, ...]]
    claimed: bool
    launches: list[tuple[tuple[Any, int, int, int], int]] = field(default_factory=list)
    apart: set[tuple[Any, ...]] = field(default_factory=set)
    maps: dict[tuple[int, ...], ctypes.Array] = field(default_factory=dict)

    def tensor_maps(self, device: Device, addresses: Mapping[str, int]) -> ctypes.Array:
        """Return the tensor maps of arrays at their addresses, as one argument."""
        key = self.mapped(addresses)
        maps = self.maps.get(key)
        if maps is None:
            encoded = b"".join(
                device.tensor_map(addresses[m.name], m.dtype, m.shape, m.strides, m.box)
                for m in self.plan.maps
            )
            maps = ctypes.create_string_buffer(encoded, len(encoded))
            self.maps[key] = maps
            _MAPPED.append((self.maps, key))
            if len(_MAPPED) > _MAPS_REMEMBERED:
                kept, oldest = _MAPPED.popleft()
                kept.pop(oldest, None)  # two threads may have made it at once
        return maps

    def load(self, device: Device) -> None:
        """Get the kernels ready, which compiles those that were never used before."""
        steps = self.plan.steps
        kernels = device.kernels([step.spec for step in steps])
        self.launches[:] = [
            (
                (kernel, step.grid, step.block, step.shared_memory),
                2 if step.spec.takes_maps else 1,
            )
            for kernel, step in zip(kernels, steps, strict=True)
        ]


@functools.lru_cache(maxsize=4096, typed=True)
def _prepare(
    device: Device,
    names: tuple[str, ...],
    layouts: tuple[tuple, ...],
    window_types: tuple[type, ...],
    *fields: Any,
) -> _Prepared:
    """Prepare a call with the options `fields`.

    They come one by one so that their types count: 1 == True, but only one of them
    is a legal `causal`.
    """
    options = Options(*fields)
    infos = _infos(names, layouts)
    problem = make_problem(infos, options)
    plan = make_plan(problem, device.info)
    outputs = tuple(
        (name, output_shape(problem, name), problem.operand(name).dtype)
        for name in problem.outputs
    )
    spans = {name: _span(info) for name, info in infos.items() if 0 not in info.shape}
    present = {*names, *problem.outputs, *[entry.name for entry in plan.workspace]}
    claimed = "claims" in present
    if claimed:
        present.add("first_claim")
    template = make_template(
        problem,
        present,
        dbias_splits=plan.dbias_splits,
        section=plan.section,
        dq_row_tiles=plan.dq_row_tiles,
    )
    given = tuple([name for name in problem.outputs if name in infos])
    mapped = selector([entry.name for entry in plan.maps])
    return _Prepared(
        problem, plan, template, outputs, infos, spans, given, mapped, claimed
    )


def run(device: Device, arrays: dict[str, Any], options: Options) -> tuple[Any, ...]:
    """Compute a call on a device; return its outputs in order."""
    window = options.window
    if isinstance(window, list):
        window = tuple(window)
        options = options._replace(window=window)
    types = tuple(map(type, window)) if isinstance(window, tuple) else ()
    addresses, layouts = _places(arrays, device.pointer)
    kind = (device, tuple(arrays), layouts, types) + options
    try:
        prepared = _prepare(*kind)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        prepared = _prepare.__wrapped__(*kind)
    with device.active():
        # Also where a copy would be read: what is refused doesn't depend on strides.
        for name in prepared.given:
            _check_overlap(name, addresses, prepared)
        if prepared.plan.copies:
            arrays = dict(arrays)
            plan = prepared.plan
            for name in plan.copies:
                arrays[name] = device.dense_copy(arrays[name], plan.row_multiple(name))
            return run(device, arrays, options)
        if settings.debug:
            _check_device_lengths(device, arrays, prepared.problem)
        if len(prepared.launches) != len(prepared.plan.steps):
            prepared.load(device)
        return _launch(device, arrays, addresses, prepared)


def _launch(
    device: Device,
    arrays: dict[str, Any],
    addresses: dict[str, int],
    prepared: _Prepared,
) -> tuple[Any, ...]:
    pointer = device.pointer
    results = []
    for name, shape, dtype in prepared.outputs:
        array = arrays.get(name)
        if array is None:
            array = device.empty(shape, dtype)
            addresses[name] = pointer(array)
        results.append(array)
    plan = prepared.plan
    workspace = []  # is freed when this function returns, in the order of the stream
    for entry in plan.workspace:
        workspace.append(device.temporary(entry.shape, entry.dtype))
        addresses[entry.name] = pointer(workspace[-1])
        if entry.zero:
            device.clear(workspace[-1])
    for name in plan.cleared:
        device.clear(results[prepared.problem.outputs.index(name)])
    if prepared.claimed:
        addresses["first_claim"] = next(_LAUNCHES.numbers) * _STEP % 2**64
    arguments = (prepared.template.fill(addresses),)
    if plan.maps:
        arguments += (prepared.tensor_maps(device, addresses),)
    for launch, count in prepared.launches:
        device.launch(*launch, *arguments[:count])
    return tuple(results)


def _places(
    arrays: Mapping[str, Any], pointer: Callable[[Any], int]
) -> tuple[dict[str, int], tuple[tuple, ...]]:
    """Return the addresses of arrays, and the fields of each one's `ArrayInfo`."""
    addresses: dict[str, int] = {}
    layouts = []
    for name, array in arrays.items():
        addresses[name] = address = pointer(array)
        layouts.append((array.shape, array.strides, array.dtype, address & 15))
    return addresses, tuple(layouts)


def _infos(names: Iterable[str], layouts: tuple[tuple, ...]) -> dict[str, ArrayInfo]:
    return dict(zip(names, starmap(ArrayInfo, layouts), strict=True))


def _span(info: ArrayInfo) -> tuple[int, int]:
    """Return the first byte of an array and the one past its last, from its address."""
    steps = [(n - 1) * s for n, s in zip(info.shape, info.strides, strict=True)]
    low, high = (sum(f(step, 0) for step in steps) for f in (min, max))
    return low, high + info.dtype.itemsize


def _check_overlap(name: str, addresses: dict[str, int], prepared: _Prepared) -> None:
    """Raise ValueError if a given output shares memory with another array."""
    spans = prepared.spans
    if name not in spans:
        return
    first, last = (addresses[name] + end for end in spans[name])
    near = [
        other
        for other, (low, high) in spans.items()
        if addresses[other] + low < last and first < addresses[other] + high
    ]
    if len(near) > 1:  # with itself
        # Only now look closer: parts of one buffer may lie between each other. What
        # was found not to overlap doesn't overlap at the same distances either.
        distances = (name, *[(n, addresses[n] - first) for n in near])
        if distances in prepared.apart:
            return
        check_overlap(
            name, {n: _stand_in(prepared.infos[n], addresses[n]) for n in near}
        )
        if len(prepared.apart) < _REMEMBERED:
            prepared.apart.add(distances)


def _stand_in(info: ArrayInfo, address: int) -> np.ndarray:
    """Return a NumPy array at a device's address, which must not be read."""

    class Interface:
        __array_interface__ = {
            "data": (address, True),
            "shape": (*info.shape, info.dtype.itemsize),
            "strides": (*info.strides, 1),
            "typestr": "|u1",
            "version": 3,
        }

    return np.asarray(Interface())


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
    pointer = _host_pointer if owner is None else owner.pointer
    _, layouts = _places(arrays, pointer)
    return plan_call(_infos(arrays, layouts), options, info)


def plan_call(
    infos: dict[str, ArrayInfo], options: Options, device: DeviceInfo
) -> Plan:
    """Plan a call whose arrays are only described.

    A backward call need not name dout, out and lse.
    """
    if options.direction == "backward":
        infos = _with_forward_results(infos, options)
    return make_plan(make_problem(infos, options), device)


def _host_pointer(array: np.ndarray) -> int:
    """Return the address of a NumPy array, as if it lay on a GPU."""
    return array.ctypes.data


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
