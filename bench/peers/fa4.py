"""FlashAttention-4, the CuTe DSL kernels of the package flash-attn-4."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .base import lengths_of, module
from .sdpa import HALVES, TorchPeer

if TYPE_CHECKING:
    from ..workloads import Case


class Fa4(TorchPeer):
    """flash_attn_func, or flash_attn_varlen_func for lengths of padded sequences."""

    name = "fa4"
    modules = ("torch", "flash_attn.cute")
    dtypes = HALVES
    heads_first = False
    compiles = True

    def attention(self, case: Case) -> Callable[[Any, Any, Any], Any]:
        """Return the function; causal is aligned at the bottom right."""
        functions = module("flash_attn.cute")
        options: dict[str, Any] = {"causal": case.causal}
        attend = functions.flash_attn_func
        if (lengths := lengths_of(case)) is not None:
            torch = module("torch")
            attend = functions.flash_attn_varlen_func
            options["seqused_q"], options["seqused_k"] = (
                torch.from_numpy(x).cuda() for x in lengths
            )

        def call(q: Any, k: Any, v: Any) -> Any:
            out = attend(q, k, v, **options)
            return out[0] if isinstance(out, tuple) else out  # (out, lse)

        return call
