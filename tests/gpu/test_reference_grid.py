"""Every kernel family against the float64 reference, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cupy_flash import configs
from cupy_flash.configs import MMA_DEPTHS, MmaRow, MmaTile, SimtRow, SimtTile

from .. import cases
from ..cases import FAMILIES, MEMORY, Case, allocate, make
from .running import Config, check_case, is_refusal, output_copies, specs

families = pytest.mark.parametrize("family", FAMILIES)


def over(grid: tuple[Case, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", grid, ids=str)


@families
@over(cases.LADDER)
def test_ladder(case: Case, family: str) -> None:
    check_case(case, family)


@families
@over(cases.OPTIONS)
def test_options(case: Case, family: str) -> None:
    check_case(case, family)


@families
@over(cases.BIAS)
def test_bias_gradient(case: Case, family: str) -> None:
    check_case(case, family)


@families
@over(cases.BATCH)
def test_batch_axes(case: Case, family: str) -> None:
    check_case(case, family)


@families
@over(cases.GROUPS)
def test_groups_of_heads(case: Case, family: str) -> None:
    check_case(case, family)


@families
@over(cases.LAYOUTS)
def test_memory_of_inputs(case: Case, family: str) -> None:
    check_case(case, family)


@families
@pytest.mark.parametrize(
    "memory", [m for m in MEMORY if m not in ("broadcast", "misaligned")]
)
@over(
    tuple(
        Case(f"{layout}", dtype, (3,), 40, 70, d=24, layout=layout, causal=True)
        for layout in ("bshd", "bhsd")
        for dtype in ("float32", "bfloat16")
    )
)
def test_memory_of_outputs(case: Case, memory: str, family: str) -> None:
    copies = output_copies(make(case), memory)
    given = {name: copy.array for name, copy in copies.items()}
    results = check_case(case, family, given=given)
    for name, copy in copies.items():
        whole = allocate(copy.array.shape, copy.array.dtype, memory)
        whole[...] = results[name]
        assert copy.unchanged(whole), f"{name} was written between its elements"


@families
@over(cases.HEAD_DIMS)
def test_head_dim(case: Case, family: str) -> None:
    check_case(case, family)


@families
@over(cases.HEAD_DIMS_V)
def test_head_dim_of_v(case: Case, family: str) -> None:
    check_case(case, family)


@families
@over(cases.RAGGED)
def test_ragged(case: Case, family: str) -> None:
    check_case(case, family)


# --- Every row of every table ---------------------------------------------------------


def head_dim(row: SimtRow) -> int:
    """A head size that the row's tile can do and that isn't a multiple of its chunk."""
    return row.tile.chunk_d - 4 if row.tile.resident else row.tile.chunk_d + 36


def forced_tiles() -> list[pytest.ParameterSet]:
    """Each row of the tables of `simt` with each of the cases.

    Rows for GPUs with less shared memory are among them. The other direction gets the
    last row of its table, which can do everything.
    """

    def last(table: tuple[SimtRow, ...], row: SimtRow) -> SimtTile:
        return [r for r in table if r.accumulator == row.accumulator][-1].tile

    found = []
    for direction, table in (
        ("forward", configs.SIMT_FORWARD),
        ("backward", configs.SIMT_BACKWARD),
    ):
        for row in table:
            if direction == "forward":
                config = row.tile, last(configs.SIMT_BACKWARD, row)
            else:
                config = last(configs.SIMT_FORWARD, row), row.tile
            for case in cases.TILES:
                dtype = "float64" if row.accumulator == 8 else "float32"
                sized = replace(case, dtype=dtype, d=head_dim(row))
                found.append(
                    pytest.param(
                        sized, config, id=f"{direction}-{row.tile.name}-{sized}"
                    )
                )
    return found


@pytest.mark.parametrize(("case", "config"), forced_tiles())
def test_forced_tile(case: Case, config: tuple[SimtTile, SimtTile]) -> None:
    check_case(case, config)


def forced_mma_tiles() -> list[pytest.ParameterSet]:
    """Each row of the tables of `mma` with each of the cases, for its largest heads.

    A tile in backward is that of all its kernels, so that those made for dq alone get
    heads for which dk and dv have room too. There is no way to force a tile for dbias.
    """
    found = []
    for direction, table in (
        ("forward", configs.MMA_FORWARD),
        ("backward", configs.MMA_BACKWARD),
        ("backward_dq", configs.MMA_BACKWARD_DQ),
    ):
        for row in table:
            for case in cases.TILES:
                sized, config = largest(case, row, direction)
                name = f"{direction}-{config[direction != 'forward'].name}-{sized}"
                found.append(pytest.param(sized, config, id=name))
    return found


def largest(
    case: Case, row: MmaRow, direction: str
) -> tuple[Case, tuple[Config, Config]]:
    """Return a case with the largest head that a row's tile can do on a big GPU."""
    dtype = {2: "bfloat16", 4: "float32", 8: "float64"}[row.itemsize]
    for depth in reversed(MMA_DEPTHS):
        tile = row.tile(depth - 6, depth - 6)
        if tile is None:
            continue
        sized = replace(case, dtype=dtype, d=depth - 6)
        config = (tile, "mma") if direction == "forward" else ("mma", tile)
        try:
            list(specs(sized, config, "sm_90"))
        except ValueError as error:
            assert is_refusal(error)
        else:
            return sized, config
    raise AssertionError(f"no head fits {row}")


@pytest.mark.parametrize(("case", "config"), forced_mma_tiles())
def test_forced_mma_tile(case: Case, config: tuple[Config, Config]) -> None:
    check_case(case, config)


@pytest.mark.parametrize(
    "config", [configs.SIMT_BACKWARD[-2].tile, MmaTile(64, 32, 64, 64, 4)]
)
@over((Case("one_tile", **cases.SINGLE, sq=100, sk=150, causal=True),))
def test_one_tile_for_both_directions(case: Case, config: SimtTile | MmaTile) -> None:
    """`config=` is one argument of `flash_attention_vjp`, so a tile must do both."""
    check_case(case, config)
