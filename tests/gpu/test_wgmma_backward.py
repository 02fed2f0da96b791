"""The gradients of the family `wgmma`, with each of their tiles.

Blocks take one block of keys after the other; most problems of the grid of all families
have fewer of them than the GPU has multiprocessors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupy_flash import explain
from cupy_flash.configs import WGMMA_BACKWARD, WgmmaTile

from ..cases import Array, Case, assert_same, make
from .running import check_case, cp, run, to_gpu
from .test_wgmma import of_any_length

_KEPT = ("dk", "dv")  # sums in the same order every time
_ATOMIC: dict[str, Any] = {"deterministic": False}
# More blocks of keys than multiprocessors, of whatever size.
MANY = Case("many", "bfloat16", batch=(48,), hq=6, hkv=2, sq=100, sk=150)
_EMPTY = replace(MANY, batch=(150,), hq=2)
_LONG: dict[str, Any] = {"dtype": "bfloat16", "sq": 700, "sk": 600}


def on_tiles(*each: Case, less: int = 0) -> pytest.MarkDecorator:
    """Give a test each of the cases with each tile, in the backward pass.

    Heads have as many channels as there is room for, or `less`.
    """
    return pytest.mark.parametrize(
        ("case", "tile"),
        [
            pytest.param(
                replace(case, d=tile.depth - less, dv=tile.depth_v - less),
                tile,
                id=f"{case}-{tile.name}",
            )
            for case in each
            for tile in WGMMA_BACKWARD
        ],
    )


def blocks_of(case: Case) -> int:
    """Return how many blocks the kernel of the gradients has."""
    arrays = {name: to_gpu(x) for name, x in make(case).arrays.items()}
    q, k, v = (arrays[name] for name in "qkv")
    plan = explain(q, k, v, direction="backward", config="wgmma")
    (step,) = (
        step
        for step in plan.steps
        if step.spec.kernel in ("backward", "backward_by_role")
    )
    return step.grid


@on_tiles(
    Case("causal", **_LONG, causal=True),
    Case("fewer_keys", "float16", sq=600, sk=200, causal=True),
    Case("window", **_LONG, window=(100, 30)),
    Case("groups", "bfloat16", sq=300, sk=500, hq=8, hkv=1),
    Case("lengths", **_LONG, q_lengths=(700, 83), k_lengths=(411, 600)),
    less=8,
)
def test_each_tile(case: Case, tile: WgmmaTile) -> None:
    """With channels that the tile has room for and the heads don't have."""
    check_case(case, (None, tile), **_ATOMIC)


@on_tiles(MANY, replace(MANY, name="many_causal", causal=True, sq=300))
def test_blocks_that_take_several_pieces(case: Case, tile: WgmmaTile) -> None:
    processors = cp.cuda.Device().attributes["MultiProcessorCount"]
    if tile == WGMMA_BACKWARD[0] and processors < 190:  # blocks of 128 keys
        assert blocks_of(case) == processors
    first = check_case(case, (None, tile), **_ATOMIC)
    inputs = make(case)
    for _ in range(5):
        again = run(inputs, (None, tile), **_ATOMIC)
        assert_same({n: again[n] for n in _KEPT}, {n: first[n] for n in _KEPT})


@on_tiles(
    of_any_length(MANY, 1),
    of_any_length(replace(MANY, name="many_causal", causal=True), 2),
)
def test_many_sequences_of_any_length(case: Case, tile: WgmmaTile) -> None:
    """Also of none, many in turn; what lies behind their ends may be anything."""
    inputs = make(case)
    clean = check_case(case, (None, tile), **_ATOMIC)

    def spoil(x: Array, lengths: tuple[int, ...], value: float) -> None:
        x[np.arange(x.shape[1]) >= np.array(lengths)[:, None]] = value

    for value in (np.nan, np.inf):
        for x in (inputs.q, inputs.dout):
            spoil(x, case.q_lengths, value)
        for x in (inputs.k, inputs.v):
            spoil(x, case.k_lengths, value)
        found = run(inputs, (None, tile), **_ATOMIC)
        assert_same({n: found[n] for n in _KEPT}, {n: clean[n] for n in _KEPT})
        assert np.isfinite(found["dq"].astype(np.float32)).all()


@on_tiles(
    replace(_EMPTY, name="no_queries", q_lengths=(0,) * 149 + (100,)),
    replace(_EMPTY, name="no_keys", k_lengths=(0,) * 149 + (150,)),
)
def test_blocks_without_queries_one_after_the_other(
    case: Case, tile: WgmmaTile
) -> None:
    check_case(case, (None, tile), **_ATOMIC)
