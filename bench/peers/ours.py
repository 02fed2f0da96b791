"""This library, with the kernel that it chooses or one that is forced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_flash import flash_attention, flash_attention_backward

from .base import Inputs, Peer, Unsupported, lengths_of, module

if TYPE_CHECKING:
    from ..workloads import Case


class CuPyFlash(Peer):
    """cupy_flash on CuPy arrays, or on NumPy arrays.

    Parameters
    ----------
    device : {"cuda", "cpu"}
    config : str or tile, optional
        What `flash_attention` takes: a family or a tile.
    name : str, optional
        Default: "cupy_flash", with a forced family or tile behind a colon.
    """

    compiles = True

    def __init__(
        self, device: str = "cuda", config: Any = None, name: str | None = None
    ) -> None:
        self.device = device
        self.clock = "stream" if device == "cuda" else "wall"
        self.config = config
        forced = "" if config is None else f":{getattr(config, 'name', config)}"
        self.name = name or f"cupy_flash{forced}"

    def build(self, case: Case, inputs: Inputs) -> Callable[[], Any]:
        """Return a call of the public functions."""
        q, k, v, dout = (inputs.native[name] for name in ("q", "k", "v", "dout"))
        options: dict[str, Any] = {"causal": case.causal}
        if (lengths := lengths_of(case)) is not None:
            as_array = np.asarray if self.device == "cpu" else module("cupy").asarray
            options["q_lengths"], options["k_lengths"] = map(as_array, lengths)
        forced = options | {"config": self.config}

        def forward() -> Any:
            return flash_attention(q, k, v, **forced)

        def both() -> Any:
            out, lse = flash_attention(q, k, v, **forced, return_lse=True)
            gradients = flash_attention_backward(dout, q, k, v, out, lse, **forced)
            return out, *gradients

        if case.direction == "both":
            return self._checked(both)
        if case.direction == "forward":
            return self._checked(forward)
        # A tile of the backward pass isn't one of the forward pass.
        first = forced if isinstance(self.config, str) else options
        out, lse = self._first(
            lambda: flash_attention(q, k, v, **first, return_lse=True)
        )

        def backward() -> Any:
            return flash_attention_backward(dout, q, k, v, out, lse, **forced)

        return self._checked(backward)

    def _checked(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return a call that is known to be possible if its config is forced."""
        if self.config is not None:
            self._first(call)
        return call

    def _first(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (ValueError, TypeError, NotImplementedError) as error:
            if self.config is None:
                raise
            # Inputs are right by construction, so that it is the config which can't.
            raise Unsupported(" ".join(str(error).split())) from None
