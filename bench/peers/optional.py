"""Peers that are measured where somebody has installed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .base import lengths_of, module, needs_corner, why_not_importable
from .sdpa import HALVES, TorchPeer

if TYPE_CHECKING:
    from ..workloads import Case

_NO_LENGTHS = "lengths of padded sequences aren't passed to it here"
_NO_GROUPS = "it takes no grouped query heads"


class TritonTutorial(TorchPeer):
    """The fused attention of Triton's tutorials.

    Triton's wheel doesn't hold it: a copy of 06-fused-attention.py has to be on the
    path by the name of this class's module.
    """

    name = "triton"
    tutorial = "triton_fused_attention"
    modules = ("torch", "triton")
    dtypes = ("float16",)

    def absent(self) -> str | None:
        """Say that the tutorial is missing, where Triton isn't."""
        reason = super().absent()
        if reason is None and why_not_importable(self.tutorial) is not None:
            return (
                f"{self.tutorial} can't be imported: the tutorial isn't part of "
                "Triton's wheel"
            )
        return reason

    def limits(self, case: Case) -> str | None:
        """Say what the tutorial leaves out."""
        if lengths_of(case) is not None:
            return _NO_LENGTHS
        if case.heads != case.kv_heads:
            return _NO_GROUPS
        if case.head_dim != case.head_dim_v or case.seqlen != case.kv_seqlen:
            return "it needs one head size and one sequence length"
        return "it needs a multiple of 128 rows" if case.seqlen % 128 else None

    def attention(self, case: Case) -> Callable[[Any, Any, Any], Any]:
        """Return the tutorial's function."""
        attend = module(self.tutorial).attention
        scale = case.head_dim**-0.5
        return lambda q, k, v: attend(q, k, v, case.causal, scale)


class FlashInfer(TorchPeer):
    """flashinfer.single_prefill_with_kv_cache: forward of one sequence."""

    name = "flashinfer"
    modules = ("torch", "flashinfer")
    dtypes = HALVES
    heads_first = False

    def limits(self, case: Case) -> str | None:
        """Say what the function leaves out."""
        if case.direction != "forward":
            return "FlashInfer has no backward pass"
        if case.batch > 1:
            return "single_prefill_with_kv_cache takes one sequence"
        return _NO_LENGTHS if lengths_of(case) is not None else None

    def attention(self, case: Case) -> Callable[[Any, Any, Any], Any]:
        """Return the function with a batch axis around it."""
        attend = module("flashinfer").single_prefill_with_kv_cache
        return lambda q, k, v: attend(q[0], k[0], v[0], causal=case.causal)[None]


class XFormers(TorchPeer):
    """xformers.ops.memory_efficient_attention, with the kernel that it chooses."""

    name = "xformers"
    modules = ("torch", "xformers.ops")
    dtypes = (*HALVES, "float32")
    heads_first = False

    def limits(self, case: Case) -> str | None:
        """Say what isn't passed to it."""
        if lengths_of(case) is not None:
            return _NO_LENGTHS
        return _NO_GROUPS if case.heads != case.kv_heads else None

    def attention(self, case: Case) -> Callable[[Any, Any, Any], Any]:
        """Return the function with its mask."""
        ops = module("xformers.ops")
        bias = None
        if needs_corner(case):
            bias = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask()
        elif case.causal and case.seqlen > 1:
            bias = ops.LowerTriangularMask()
        return lambda q, k, v: ops.memory_efficient_attention(q, k, v, attn_bias=bias)
