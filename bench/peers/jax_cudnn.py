"""jax.nn.dot_product_attention with cuDNN."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .base import Inputs, Peer, lengths_of, module, needs_corner, quiet
from .sdpa import HALVES

if TYPE_CHECKING:
    from ..workloads import Case


class Jax(Peer):
    """The jitted function. JAX has a stream of its own, so that no event times it."""

    name = "jax"
    modules = ("jax",)
    dtypes = HALVES
    clock = "wall"
    compiles = True
    implementation = "cudnn"

    def __init__(self) -> None:
        self._last: Any = None

    def why_not(self, case: Case) -> str | None:
        """As every peer; and JAX itself has to see the device."""
        # Else JAX takes three quarters of the device's memory when it starts.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        if (reason := super().why_not(case)) is not None:
            return reason
        with quiet():
            backend = module("jax").default_backend()
        return None if backend == "gpu" else f"jax has no CUDA device, only {backend}"

    def limits(self, case: Case) -> str | None:
        """Say what jax.nn.dot_product_attention doesn't take."""
        if case.head_dim != case.head_dim_v:
            return "jax.nn.dot_product_attention needs one head size for q, k and v"
        lengths = lengths_of(case)
        if needs_corner(case) or (
            case.causal and lengths is not None and (lengths[0] != lengths[1]).any()
        ):
            return "jax.nn.dot_product_attention aligns causal at the top left only"
        return None

    def jitted(self, case: Case, inputs: Inputs) -> tuple[Any, tuple[Any, ...]]:
        """Return the jitted function of a direction and its arguments."""
        jax = module("jax")
        q, k, v, dout = (inputs.jax[name] for name in ("q", "k", "v", "dout"))
        options: dict[str, Any] = {"is_causal": case.causal and case.seqlen > 1}
        if (lengths := lengths_of(case)) is not None:
            options["query_seq_lengths"] = jax.numpy.asarray(lengths[0])
            options["key_value_seq_lengths"] = jax.numpy.asarray(lengths[1])

        def attend(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.dot_product_attention(
                q, k, v, implementation=self.implementation, **options
            )

        def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
            out, pull = jax.vjp(attend, q, k, v)
            return out, *pull(dout)

        if case.direction == "forward":
            return jax.jit(attend), (q, k, v)
        if case.direction == "both":
            return jax.jit(both), (q, k, v, dout)
        # The function that vjp returns is a pytree, so that it can be an argument.
        _, pull = jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v))(q, k, v)
        return jax.jit(lambda pull, dout: pull(dout)), (pull, dout)

    def build(self, case: Case, inputs: Inputs) -> Callable[[], Any]:
        """Return a call of the jitted function."""
        function, arguments = self.jitted(case, inputs)

        def call() -> Any:
            self._last = function(*arguments)
            return self._last

        return call

    def sync(self) -> None:
        """Wait for the last call; JAX runs them in order."""
        if self._last is not None:
            module("jax").block_until_ready(self._last)
            self._last = None

    def allocated_bytes(self, case: Case, inputs: Inputs) -> int:
        """Return what XLA allocates for one pass besides its arguments.

        JAX's own statistics only know the peak of the whole process.
        """
        with quiet():
            function, arguments = self.jitted(case, inputs)
            plan = function.lower(*arguments).compile().memory_analysis()
        return int(plan.temp_size_in_bytes + plan.output_size_in_bytes)
