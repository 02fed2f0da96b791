"""The implementations that are measured beside each other."""

from __future__ import annotations

from cupy_flash.configs import FAMILIES

from .base import DTYPES, Inputs, Peer, Prepared, Unsupported, make_inputs
from .fa4 import Fa4
from .flex import Flex
from .jax_cudnn import Jax
from .naive import Naive
from .optional import FlashInfer, TritonTutorial, XFormers
from .ours import CuPyFlash
from .sdpa import Sdpa
from .sdpa import peers as sdpa_peers

__all__ = [
    "DTYPES", "CuPyFlash", "Inputs", "Jax", "Naive", "Peer", "Prepared", "Sdpa",
    "Unsupported", "all_peers", "make_inputs",
]  # fmt: skip


def all_peers(device: str = "cuda") -> list[Peer]:
    """Return every peer of a kind of device, ours first.

    Parameters
    ----------
    device : {"cuda", "cpu"}
    """
    if device == "cpu":
        everything = Sdpa("torch_cpu", None, tuple(DTYPES), device="cpu")
        return [CuPyFlash("cpu"), Naive("cpu"), everything]
    if device != "cuda":
        raise ValueError(f"device is {device!r}; accepted: 'cuda', 'cpu'")
    forced = [CuPyFlash(config=family) for family in FAMILIES]
    return [
        CuPyFlash(), *(forced if len(forced) > 1 else ()), Naive(), *sdpa_peers(),
        Flex(), Fa4(), Jax(), TritonTutorial(), FlashInfer(), XFormers(),
    ]  # fmt: skip
