"""The model of `gpt` in PyTorch, with autograd and scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from .gpt import ADAM_EPSILON, BETA_1, BETA_2, EPSILON, Size


class TorchGpt:
    """The model; parameters are those of `bench.gpt.Gpt`."""

    def __init__(
        self,
        device: str,
        size: Size,
        weights: Mapping[str, np.ndarray],
        wide: torch.dtype,
        narrow: torch.dtype,
    ) -> None:
        self.size, self.narrow, self.wide = size, narrow, wide
        self.weights = {
            name: torch.tensor(value, dtype=wide, device=device, requires_grad=True)
            for name, value in weights.items()
        }
        self.adam = torch.optim.Adam(
            self.weights.values(), betas=(BETA_1, BETA_2), eps=ADAM_EPSILON
        )

    def linear(self, x: Any, name: str, transposed: bool = False) -> Any:
        """Multiply by a weight."""
        weight = self.weights[name].to(self.narrow)
        return x.to(self.narrow) @ (weight.T if transposed else weight)

    def norm(self, x: Any, name: str) -> Any:
        """Normalise the channels of each token."""
        gain, bias = self.weights[f"{name}.gain"], self.weights[f"{name}.bias"]
        return F.layer_norm(x, (self.size.width,), gain, bias, EPSILON)

    def embed(self, tokens: Any, start: int = 0) -> Any:
        """Look tokens and positions up."""
        stop = start + tokens.shape[-1]
        return self.weights["tokens"][tokens] + self.weights["positions"][start:stop]

    def block(self, x: Any, i: int, attention: Callable[[Any, Any, Any], Any]) -> Any:
        """Attention and two layers for each token, both added to their input."""
        split = (*x.shape[:2], 3, self.size.heads, self.size.head_dim)
        qkv = self.linear(self.norm(x, f"{i}.norm1"), f"{i}.qkv").view(split)
        attended = attention(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2)
        y = self.linear(attended.reshape(x.shape), f"{i}.projection")
        x = x + y.to(self.wide)
        hidden = self.linear(self.norm(x, f"{i}.norm2"), f"{i}.up").to(self.wide)
        y = self.linear(F.gelu(hidden, approximate="tanh"), f"{i}.down")
        return x + y.to(self.wide)

    def step(self, tokens: Any, targets: Any, rate: float = 1e-3) -> Any:
        """Take a step of Adam and return the loss before it."""
        x = self.embed(tokens)
        for i in range(self.size.layers):
            x = self.block(
                x, i,
                lambda q, k, v: F.scaled_dot_product_attention(
                    q, k, v, is_causal=True
                ),
            )  # fmt: skip
        logits = self.linear(self.norm(x, "norm"), "tokens", transposed=True)
        loss = F.cross_entropy(logits.to(self.wide).flatten(0, 1), targets.flatten())
        self.adam.param_groups[0]["lr"] = rate
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        return loss.detach()

    @torch.no_grad()
    def generate(self, prompt: Any, count: int, given: Any = None) -> tuple[Any, Any]:
        """Continue prompts by the most likely tokens, as `bench.gpt.Gpt.generate`."""
        size = self.size
        batch, known = prompt.shape
        shape = (batch, size.heads, known + count, size.head_dim)
        keys, values = (
            [
                torch.zeros(shape, dtype=self.narrow, device=prompt.device)
                for _ in range(size.layers)
            ]
            for _ in range(2)
        )

        def cached(i: int, start: int) -> Callable[[Any, Any, Any], Any]:
            def attend(q: Any, k: Any, v: Any) -> Any:
                stop = start + q.shape[2]
                keys[i][:, :, start:stop], values[i][:, :, start:stop] = k, v
                # The prompt is a square, and one query after it sees every key.
                return F.scaled_dot_product_attention(
                    q, keys[i][:, :, :stop], values[i][:, :, :stop],
                    is_causal=start == 0,
                )  # fmt: skip

            return attend

        tokens = torch.empty((batch, count), dtype=prompt.dtype, device=prompt.device)
        new, start = prompt, 0
        for position in range(count):
            x = self.embed(new, start)
            for i in range(size.layers):
                x = self.block(x, i, cached(i, start))
            x = self.norm(x[:, -1], "norm")
            logits = self.linear(x, "tokens", transposed=True).to(self.wide)
            start += new.shape[1]
            chosen = logits.argmax(-1) if given is None else given[:, position]
            tokens[:, position] = chosen
            new = tokens[:, position : position + 1]
        return tokens, logits
