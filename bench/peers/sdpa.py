"""PyTorch's scaled_dot_product_attention, with one backend at a time."""

from __future__ import annotations

import atexit
import contextlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .base import Inputs, Peer, Unsupported, lengths_of, module, needs_corner

if TYPE_CHECKING:
    from ..workloads import Case

HALVES = ("float16", "bfloat16")
# What PyTorch says, on CUDA and on the CPU, if the only backend allowed refuses.
_NO_BACKEND = ("No available kernel", "No viable backend")


class TorchPeer(Peer):
    """What runs through PyTorch's autograd."""

    modules: tuple[str, ...] = ("torch",)
    heads_first = True

    def why_not(self, case: Case) -> str | None:
        """As every peer; and PyTorch itself has to see the device."""
        if (reason := super().why_not(case)) is not None:
            return reason
        if self.device == "cuda" and not module("torch").cuda.is_available():
            return "torch has no CUDA device"
        return None

    def attention(self, case: Case) -> Callable[[Any, Any, Any], Any]:
        """Return attention as a function of q, k and v."""
        raise NotImplementedError

    def build(self, case: Case, inputs: Inputs) -> Callable[[], Any]:
        """Return attention, its gradient by autograd, or one after the other."""
        torch = module("torch")
        q, k, v, dout = (
            inputs.torch[name].transpose(1, 2) if self.heads_first
            else inputs.torch[name]
            for name in ("q", "k", "v", "dout")
        )  # fmt: skip
        attend = self.attention(case)
        if case.direction == "forward":
            return lambda: attend(q, k, v)
        # Views of the shared memory, made leaves of the graph.
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))

        def both() -> Any:
            out = attend(*leaves)
            return out.detach(), *torch.autograd.grad(out, leaves, dout)

        if case.direction == "both":
            return both
        out = attend(*leaves)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


class Sdpa(TorchPeer):
    """One backend of scaled_dot_product_attention.

    Parameters
    ----------
    name : str
        Of the peer.
    backend : str
        Its name in `torch.nn.attention.SDPBackend`; None leaves the choice to PyTorch.
    dtypes : tuple of str
    device : {"cuda", "cpu"}
    """

    def __init__(
        self,
        name: str,
        backend: str | None,
        dtypes: tuple[str, ...],
        device: str = "cuda",
    ) -> None:
        self.name = name
        self.backend = backend
        self.dtypes = dtypes
        self.device = device
        self.clock = "stream" if device == "cuda" else "wall"

    def limits(self, case: Case) -> str | None:
        """Say what the backend doesn't take."""
        if lengths_of(case) is not None:
            return "scaled_dot_product_attention takes no lengths of padded sequences"
        if case.heads != case.kv_heads and self.backend == "EFFICIENT_ATTENTION":
            return "the memory-efficient backend takes no grouped query heads"
        if self.backend == "CUDNN_ATTENTION" and needs_corner(case):
            return "PyTorch's cuDNN backend aligns causal at the top left only"
        if self.backend == "FLASH_ATTENTION" and case.head_dim != case.head_dim_v:
            return "the FlashAttention-2 backend needs one head size for q, k and v"
        return None

    def build(self, case: Case, inputs: Inputs) -> Callable[[], Any]:
        """As every PyTorch peer; why a backend refuses stands in warnings."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call = super().build(case, inputs)
                if self.device == "cuda":
                    call()
                return call
            except RuntimeError as error:
                if not any(text in str(error) for text in _NO_BACKEND):
                    raise
        texts = [str(w.message).partition(" (Triggered")[0] for w in caught]
        # Those of the other backends say only that these aren't selected.
        reasons = [
            text for text in texts
            if "not used because" not in text and "disabled" not in text
        ]  # fmt: skip
        raise Unsupported(" ".join((reasons or ["no available kernel"])[0].split()))

    def attention(self, case: Case) -> Callable[[Any, Any, Any], Any]:
        """Return the function with its backend, mask and grouping set."""
        torch = module("torch")
        attend = torch.nn.functional.scaled_dot_product_attention
        options: dict[str, Any] = {"enable_gqa": case.heads != case.kv_heads}
        if needs_corner(case):
            # is_causal would align the diagonal at the top left.
            options["attn_mask"] = self._corner(case)
        else:
            options["is_causal"] = case.causal and case.seqlen > 1

        def call(q: Any, k: Any, v: Any) -> Any:
            select(self.backend)
            return attend(q, k, v, **options)

        return call

    def _corner(self, case: Case) -> Any:
        """Return the bottom-right causal mask, stored only where it has to be."""
        torch = module("torch")
        if self.backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION"):
            bias = module("torch.nn.attention.bias")
            return bias.causal_lower_right(case.seqlen, case.kv_seqlen)
        ones = torch.ones(
            case.seqlen, case.kv_seqlen, dtype=torch.bool, device=self.device
        )
        return ones.tril(case.kv_seqlen - case.seqlen)


_selected: tuple[str | None, contextlib.ExitStack] = (None, contextlib.ExitStack())
# While PyTorch is still there to leave its context.
atexit.register(lambda: select(None))


def select(backend: str | None) -> None:
    """Allow one backend, until another one is selected; None allows all.

    Entering `sdpa_kernel` takes longer than queuing a small attention, so the context
    stays open between the calls of one peer.
    """
    global _selected
    current, stack = _selected
    if current == backend:
        return
    stack.close()
    stack = contextlib.ExitStack()
    if backend is not None:
        attention = module("torch.nn.attention")
        chosen = getattr(attention.SDPBackend, backend)
        stack.enter_context(attention.sdpa_kernel(chosen))
    _selected = (backend, stack)


def peers() -> list[Peer]:
    """Return one peer for each backend on CUDA."""
    return [
        Sdpa("fa2", "FLASH_ATTENTION", HALVES),
        Sdpa("cudnn", "CUDNN_ATTENTION", HALVES),
        Sdpa("efficient", "EFFICIENT_ATTENTION", (*HALVES, "float32")),
        Sdpa("math", "MATH", (*HALVES, "float32", "float64")),
    ]
