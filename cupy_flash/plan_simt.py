"""Plans of the family `simt`: any GPU, dtype and head size."""

from __future__ import annotations

import math

from . import configs
from .plan_base import Builder, DoesNotFit, blocks
from .tiles import SimtTile


class SimtBuilder(Builder):
    """Collects the launches of a call of the family `simt`."""

    family = "simt"

    def forward(self) -> None:
        """Plan the forward pass."""
        p = self.problem
        tile = self._tile("forward", configs.SIMT_FORWARD)
        chunks = blocks(p.head_dim_v, tile.chunk_v)
        if chunks > 1:
            self.reasons.append(
                f"head_dim_v {p.head_dim_v} is spread over {chunks} blocks, each of "
                "which recomputes the logits"
            )
        rows = blocks(p.seqlen_q, tile.rows)
        self.add_step("forward", tile, p.batch * p.heads_q * rows * chunks)

    def backward(self) -> None:
        """Plan the backward pass."""
        p = self.problem
        self.reasons.append(
            "each gradient has a kernel of its own and none adds by atomics, so every "
            "run gives the same bits"
        )
        self.add_delta()
        tile = self._tile("backward_dq", configs.SIMT_BACKWARD)
        rows, chunks = blocks(p.seqlen_q, tile.rows), blocks(p.head_dim, tile.chunk_d)
        self.add_step("backward_dq", tile, p.batch * p.heads_q * rows * chunks)
        tile = self._tile("backward_dkdv", configs.SIMT_BACKWARD)
        rows = blocks(p.seqlen_k, tile.rows)
        chunks = max(
            blocks(p.head_dim, tile.chunk_d), blocks(p.head_dim_v, tile.chunk_v)
        )
        self.add_step("backward_dkdv", tile, p.batch * p.heads_kv * rows * chunks)
        if p.bias_grad:
            self.add_dbias(self._tile("backward_dbias", configs.SIMT_BACKWARD_DBIAS))

    def _tile(self, kernel: str, table: tuple[configs.SimtRow, ...]) -> SimtTile:
        """Take the first row whose limits hold and which fits the GPU."""

        def fits(tile: SimtTile) -> bool:
            spec = self.spec(kernel, tile)
            resident = tile.resident and kernel != "backward_dbias"
            return spec.shared_memory <= self.device.shared_memory and (
                not resident or self._resident(kernel, tile)
            )

        if self.forced is not None and kernel != "backward_dbias":
            if not fits(self.forced):
                raise DoesNotFit(
                    f"config asks for tile {self.forced.name}, which doesn't fit: "
                    f"{self.spec(kernel, self.forced).shared_memory} of "
                    f"{self.device.shared_memory} bytes of shared memory, head_dim "
                    f"{self.problem.head_dim} and {self.problem.head_dim_v}"
                )
            return self.forced
        for row in table:
            applies = (
                row.accumulator == self.sums.itemsize
                and self.problem.head_dim <= (row.max_head_dim or math.inf)
                and self.problem.head_dim_v <= (row.max_head_dim_v or math.inf)
            )
            if applies and fits(row.tile):
                self.reasons.append(f"{kernel}: tile {row.tile.name}")
                return row.tile
        raise AssertionError("the last rows of a table fit every GPU")

    def _resident(self, kernel: str, tile: SimtTile) -> bool:
        """Whether the block's own rows fit one chunk of channels."""
        p = self.problem
        return p.head_dim <= tile.chunk_d and (
            kernel == "forward" or p.head_dim_v <= tile.chunk_v
        )
