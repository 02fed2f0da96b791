"""Tile tables: which tile a family uses for which head size, and why.

A row is taken if its limits hold and its tile fits the GPU's shared memory; the
first such row of a table wins, so tables go from the special to the general.
"""

from __future__ import annotations

from dataclasses import dataclass

FAMILIES = ("simt",)


@dataclass(frozen=True, slots=True)
class SimtTile:
    """A tile of the family `simt`.

    Attributes
    ----------
    rows : int
        Rows that a block owns: queries, or keys for dk and dv.
    columns : int
        Rows of the other side that it takes at a time.
    chunk_d, chunk_v : int
        Channels of q and k, and of v, in shared memory at a time. Channels of the
        result are spread over blocks in chunks of this size.
    resident : bool
        The block's own rows stay in shared memory, which needs a head that is no
        larger than a chunk.
    threads : int
        Threads of a block.
    blocks : int
        Blocks per multiprocessor that the compiler has to leave registers for.
    """

    rows: int
    columns: int
    chunk_d: int
    chunk_v: int
    resident: bool
    threads: int = 128
    blocks: int = 2

    @property
    def name(self) -> str:
        """The tile in a kernel's name: r is for resident, s for streaming."""
        kind = "r" if self.resident else "s"
        return (
            f"{self.rows}x{self.columns}d{self.chunk_d}v{self.chunk_v}{kind}"
            f"_{self.blocks}x{self.threads}"
        )


@dataclass(frozen=True, slots=True)
class SimtRow:
    """For accumulators of `accumulator` bytes and head sizes up to the limits."""

    accumulator: int
    max_head_dim: int | None
    max_head_dim_v: int | None
    tile: SimtTile


# Measured on the H200 at S=4096: float32 with head sizes 64 and 128, float64 with 64
# (bench/LOG.md). The other rows follow the same pattern and aren't tuned.
SIMT_FORWARD = (
    SimtRow(4, 32, 32, SimtTile(64, 64, 32, 32, resident=True, blocks=3)),
    SimtRow(4, 64, 64, SimtTile(64, 64, 64, 64, resident=True, blocks=3)),
    SimtRow(4, 96, 96, SimtTile(64, 64, 96, 96, resident=True)),
    SimtRow(4, 64, None, SimtTile(64, 64, 64, 128, resident=True)),
    SimtRow(4, 128, None, SimtTile(64, 64, 128, 128, resident=True)),
    SimtRow(4, None, None, SimtTile(64, 64, 64, 128, resident=False)),
    SimtRow(8, 32, 32, SimtTile(64, 32, 32, 32, resident=True)),
    SimtRow(8, 64, 64, SimtTile(64, 32, 64, 64, resident=True)),
    SimtRow(8, None, None, SimtTile(64, 32, 64, 128, resident=False)),
    # 48 KiB of shared memory: compute capability 5.0 to 6.2.
    SimtRow(4, 64, None, SimtTile(64, 32, 64, 64, resident=True)),
    SimtRow(4, None, None, SimtTile(64, 32, 64, 64, resident=False)),
    SimtRow(8, None, None, SimtTile(64, 32, 32, 32, resident=False)),
)

# dq, and dk with dv: the same products with the sides exchanged.
SIMT_BACKWARD = (
    SimtRow(4, 32, 32, SimtTile(64, 32, 32, 32, resident=True, blocks=3)),
    SimtRow(4, 64, 64, SimtTile(64, 32, 64, 64, resident=True, blocks=3)),
    SimtRow(4, 96, 96, SimtTile(64, 32, 96, 96, resident=True)),
    SimtRow(4, 128, 128, SimtTile(64, 32, 128, 128, resident=True)),
    SimtRow(4, None, None, SimtTile(64, 32, 128, 128, resident=False)),
    SimtRow(8, 32, 32, SimtTile(64, 32, 32, 32, resident=True)),
    SimtRow(8, None, None, SimtTile(64, 32, 64, 64, resident=False)),
    # 48 KiB of shared memory: compute capability 5.0 to 6.2.
    SimtRow(4, None, None, SimtTile(64, 32, 64, 64, resident=False)),
    SimtRow(8, None, None, SimtTile(64, 32, 32, 32, resident=False)),
)

SIMT_BACKWARD_DBIAS = (
    SimtRow(4, None, None, SimtTile(64, 32, 64, 64, resident=False)),
    SimtRow(8, None, None, SimtTile(64, 32, 32, 32, resident=False)),
)

PASS_THREADS = 128


def head_dim_buckets() -> tuple[int, ...]:
    """Return a head size for each row of the tables, where both head sizes are equal.

    The last one stands for all that are larger than the largest limit.
    """
    rows = (*SIMT_FORWARD, *SIMT_BACKWARD, *SIMT_BACKWARD_DBIAS)
    limits = sorted({row.max_head_dim for row in rows if row.max_head_dim is not None})
    return (*limits, 2 * limits[-1])
