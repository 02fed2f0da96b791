"""PyTorch's FlexAttention, compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .base import Inputs, Unsupported, lengths_of, module
from .sdpa import HALVES, TorchPeer

if TYPE_CHECKING:
    from ..workloads import Case

# Of a process. Every new shape is compiled, its forward and its backward pass.
COMPILE_SECONDS = 200.0
# Above this many pairs of query and key the block mask isn't made from all of them at
# once, but by a compiled function.
_PAIRS = 1 << 30


class Flex(TorchPeer):
    """flex_attention with a block mask for causal and for lengths."""

    name = "flex"
    modules = ("torch", "torch.nn.attention.flex_attention")
    dtypes = (*HALVES, "float32")
    compiles = True
    # Seconds that this process has spent compiling; of all instances together.
    spent = 0.0

    def limits(self, case: Case) -> str | None:
        """Say that the time to compile is used up."""
        if self.spent > COMPILE_SECONDS:
            return f"compiling took more than {COMPILE_SECONDS:.0f} s by now"
        return None

    def build(self, case: Case, inputs: Inputs) -> Callable[[], Any]:
        """Compile for the shape of the case."""
        start = time.perf_counter()
        try:
            call = super().build(case, inputs)
            call()
            module("torch").cuda.synchronize()
        finally:
            Flex.spent += time.perf_counter() - start
        return call

    def attention(self, case: Case) -> Callable[[Any, Any, Any], Any]:
        """Return the compiled function with its block mask."""
        torch = module("torch")
        flex = module("torch.nn.attention.flex_attention")
        # Forget earlier shapes: after a few of them Dynamo stops compiling, and each
        # call looks through those that it has.
        torch._dynamo.reset()
        # Else what is kept of a compiled backward pass can be run only once.
        module("torch._functorch.config").donated_buffer = False
        compiled = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True)
        mask = block_mask(case)
        grouped = case.heads != case.kv_heads

        def call(q: Any, k: Any, v: Any) -> Any:
            return compiled(q, k, v, block_mask=mask, enable_gqa=grouped)

        return call


def block_mask(case: Case) -> Any:
    """Return the block mask of a case, None if every query sees every key."""
    torch = module("torch")
    create = module("torch.nn.attention.flex_attention").create_block_mask
    lengths = lengths_of(case)
    if lengths is None and not case.causal:
        return None
    offset = case.kv_seqlen - case.seqlen
    if lengths is not None:
        queries, keys = (torch.from_numpy(x).cuda() for x in lengths)

    def corner(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return key <= row + offset

    def inside(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return (row < queries[batch]) & (key < keys[batch])

    def inside_corner(batch: Any, head: Any, row: Any, key: Any) -> Any:
        seen = key <= row + keys[batch] - queries[batch]
        return (row < queries[batch]) & (key < keys[batch]) & seen

    if lengths is None:
        batch, visible = None, corner
    else:
        batch, visible = case.batch, inside_corner if case.causal else inside
    pairs = (batch or 1) * case.seqlen * case.kv_seqlen
    if pairs > 64 * _PAIRS:
        raise Unsupported("the block mask of so many pairs is too large to make")
    return create(
        visible, batch, None, case.seqlen, case.kv_seqlen, device="cuda",
        _compile=pairs > _PAIRS,
    )  # fmt: skip
