"""A small GPT in plain array code, with CuPy or NumPy: loss, gradients, Adam, a cache.

Every operation returns its result and the function that pulls a gradient back through
it, as `flash_attention_vjp` does. Products and attention are in a dtype of choice,
everything else and the weights in the dtype of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from cupy_flash import flash_attention, flash_attention_vjp

from .peers.naive import matmul

Pull = Callable[..., Any]
# Causal attention of q over k and v, (B, S, H, D), and its pull.
Attention = Callable[[Any, Any, Any], tuple[Any, Pull]]
EPSILON = 1e-5
BETA_1, BETA_2, ADAM_EPSILON = 0.9, 0.999, 1e-8


@dataclass(frozen=True)
class Size:
    """The size of a model and of its batches."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    seqlen: int
    batch: int

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.width // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight by name."""
        c = self.width
        shapes: dict[str, tuple[int, ...]] = {
            "tokens": (self.vocabulary, c), "positions": (self.seqlen, c),
        }  # fmt: skip
        for i in range(self.layers):
            layer = {
                "norm1.gain": (c,), "norm1.bias": (c,), "qkv": (c, 3 * c),
                "projection": (c, c), "norm2.gain": (c,), "norm2.bias": (c,),
                "up": (c, 4 * c), "down": (4 * c, c),
            }  # fmt: skip
            shapes |= {f"{i}.{name}": shape for name, shape in layer.items()}
        return shapes | {"norm.gain": (c,), "norm.bias": (c,)}


def initial_weights(size: Size, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random weights in float64; the embedding is the output layer too."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in size.shapes().items():
        if name.endswith("gain"):
            weights[name] = np.ones(shape)
        elif name.endswith("bias"):
            weights[name] = np.zeros(shape)
        else:
            weights[name] = 0.02 * random.standard_normal(shape)
    return weights


def fused_attention(q: Any, k: Any, v: Any) -> tuple[Any, Pull]:
    """Causal attention by this library."""
    return flash_attention_vjp(q, k, v, causal=True)


class Parameters:
    """Arrays by name that lie behind each other in one flat array.

    Adam then is a few operations on the flat one, whatever the number of weights.
    """

    def __init__(self, xp: ModuleType, size: Size, dtype: Any) -> None:
        shapes = size.shapes()
        self.flat = xp.zeros(sum(map(math.prod, shapes.values())), dtype)
        self.by_name: dict[str, Any] = {}
        start = 0
        for name, shape in shapes.items():
            stop = start + math.prod(shape)
            self.by_name[name] = self.flat[start:stop].reshape(shape)
            start = stop

    def __getitem__(self, name: str) -> Any:
        return self.by_name[name]


class Gpt:
    """The model.

    Parameters
    ----------
    xp : module
        cupy or numpy.
    size : Size
    weights : mapping of str to NumPy array
        As `initial_weights` returns them.
    wide : dtype
        Of the weights and of what isn't a product.
    narrow : dtype
        Of products and attention.
    attention : callable
        For training.
    """

    def __init__(
        self,
        xp: ModuleType,
        size: Size,
        weights: Mapping[str, np.ndarray],
        wide: Any,
        narrow: Any,
        attention: Attention = fused_attention,
    ) -> None:
        self.xp, self.size = xp, size
        self.wide, self.narrow = np.dtype(wide), np.dtype(narrow)
        self.attention = attention
        self.weights, self.gradients = (Parameters(xp, size, wide) for _ in range(2))
        for name, value in weights.items():
            self.weights[name][...] = xp.asarray(value, wide)
        self.moments = [xp.zeros_like(self.weights.flat) for _ in range(2)]
        self.steps = 0

    # --- Operations -------------------------------------------------------------------

    def linear(self, x: Any, name: str, transposed: bool = False) -> tuple[Any, Pull]:
        """Multiply by a weight; its gradient is added to what is there."""
        x, weight = x.astype(self.narrow, copy=False), self.weights[name]
        weight = weight.astype(self.narrow, copy=False)
        weight = weight.T if transposed else weight
        rows = x.reshape(-1, x.shape[-1])
        y = matmul(self.xp, rows, weight).reshape(*x.shape[:-1], -1)

        def pull(dy: Any) -> Any:
            dy = dy.astype(self.narrow, copy=False).reshape(-1, dy.shape[-1])
            factors = (dy.T, rows) if transposed else (rows.T, dy)
            dweight = matmul(self.xp, *factors)
            self.gradients[name][...] += dweight.astype(self.wide, copy=False)
            dx = matmul(self.xp, dy, weight.T).reshape(x.shape)
            return dx.astype(self.wide, copy=False)

        return y, pull

    def norm(self, x: Any, name: str) -> tuple[Any, Pull]:
        """Normalise the channels of each token."""
        gain, bias = self.weights[f"{name}.gain"], self.weights[f"{name}.bias"]
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        scale = 1 / self.xp.sqrt(variance + EPSILON)
        unit = centred * scale

        def pull(dy: Any) -> Any:
            axes = tuple(range(dy.ndim - 1))
            self.gradients[f"{name}.gain"][...] += (dy * unit).sum(axis=axes)
            self.gradients[f"{name}.bias"][...] += dy.sum(axis=axes)
            dunit = dy * gain
            along = (dunit * unit).mean(axis=-1, keepdims=True)
            return scale * (dunit - dunit.mean(axis=-1, keepdims=True) - unit * along)

        return unit * gain + bias, pull

    def gelu(self, x: Any) -> tuple[Any, Pull]:
        """The usual approximation of GELU by tanh."""
        factor = math.sqrt(2 / math.pi)
        x = x.astype(self.wide, copy=False)
        square = x * x
        t = self.xp.tanh(factor * x * (1 + 0.044715 * square))

        def pull(dy: Any) -> Any:
            inner = factor * (1 + 3 * 0.044715 * square)
            return dy * 0.5 * (1 + t + x * (1 - t * t) * inner)

        return 0.5 * x * (1 + t), pull

    def embed(self, tokens: Any, start: int = 0) -> tuple[Any, Pull]:
        """Look tokens and positions up."""
        stop = start + tokens.shape[-1]
        x = self.weights["tokens"][tokens] + self.weights["positions"][start:stop]

        def pull(dx: Any) -> None:
            self.xp.add.at(self.gradients["tokens"], tokens, dx)
            self.gradients["positions"][start:stop] += dx.sum(axis=0)

        return x, pull

    def block(self, x: Any, i: int, attention: Attention) -> tuple[Any, Pull]:
        """Attention and two layers for each token, both added to their input."""
        split = (*x.shape[:2], 3, self.size.heads, self.size.head_dim)
        normed, pull_norm1 = self.norm(x, f"{i}.norm1")
        qkv, pull_qkv = self.linear(normed, f"{i}.qkv")
        q, k, v = (qkv.reshape(split)[:, :, part] for part in range(3))
        attended, pull_attention = attention(q, k, v)
        y, pull_projection = self.linear(attended.reshape(x.shape), f"{i}.projection")
        x = x + y.astype(self.wide, copy=False)
        normed, pull_norm2 = self.norm(x, f"{i}.norm2")
        hidden, pull_up = self.linear(normed, f"{i}.up")
        hidden, pull_gelu = self.gelu(hidden)
        y, pull_down = self.linear(hidden, f"{i}.down")

        def pull(dx: Any) -> Any:
            dx = dx + pull_norm2(pull_up(pull_gelu(pull_down(dx))))
            dattended = pull_projection(dx).astype(self.narrow, copy=False)
            dqkv = self.xp.empty(split, self.narrow)
            gradients = pull_attention(dattended.reshape(attended.shape))
            for part, gradient in enumerate(gradients):
                dqkv[:, :, part] = gradient
            return dx + pull_norm1(pull_qkv(dqkv.reshape(*dx.shape[:2], -1)))

        return x + y.astype(self.wide, copy=False), pull

    def cross_entropy(self, logits: Any, targets: Any) -> tuple[Any, Pull]:
        """The mean of -log softmax at the targets."""
        xp = self.xp
        s = logits.astype(self.wide, copy=False).reshape(-1, logits.shape[-1])
        s = s - s.max(axis=-1, keepdims=True)
        p = xp.exp(s)
        total = p.sum(axis=-1, keepdims=True)
        p /= total
        at = (xp.arange(len(s)), targets.reshape(-1))
        loss = (xp.log(total[:, 0]) - s[at]).mean()

        def pull() -> Any:
            p[at] -= 1
            return (p / len(s)).reshape(logits.shape)

        return loss, pull

    # --- Training ---------------------------------------------------------------------

    def loss(self, tokens: Any, targets: Any) -> tuple[Any, Callable[[], None]]:
        """Return the loss and the function that sets `gradients`."""
        x, pull_embed = self.embed(tokens)
        pulls = []
        for i in range(self.size.layers):
            x, pull = self.block(x, i, self.attention)
            pulls.append(pull)
        x, pull_norm = self.norm(x, "norm")
        logits, pull_logits = self.linear(x, "tokens", transposed=True)
        loss, pull_loss = self.cross_entropy(logits, targets)

        def backward() -> None:
            self.gradients.flat[...] = 0
            dx = pull_norm(pull_logits(pull_loss()))
            for pull in reversed(pulls):
                dx = pull(dx)
            pull_embed(dx)

        return loss, backward

    def step(self, tokens: Any, targets: Any, rate: float = 1e-3) -> Any:
        """Take a step of Adam and return the loss before it."""
        loss, backward = self.loss(tokens, targets)
        backward()
        self.steps += 1
        gradient = self.gradients.flat
        first, second = self.moments
        first += (1 - BETA_1) * (gradient - first)
        second += (1 - BETA_2) * (gradient * gradient - second)
        root = self.xp.sqrt(second / (1 - BETA_2**self.steps)) + ADAM_EPSILON
        self.weights.flat[...] -= rate / (1 - BETA_1**self.steps) * first / root
        return loss

    # --- Generation -------------------------------------------------------------------

    def generate(self, prompt: Any, count: int, given: Any = None) -> tuple[Any, Any]:
        """Continue prompts by the most likely tokens, with a cache of keys and values.

        Parameters
        ----------
        prompt : (B, P) tokens
        count : int
            How many tokens to add; P + count is at most the model's seqlen.
        given : (B, count) tokens, optional
            What to continue with instead.

        Returns
        -------
        tokens : (B, count)
        logits : (B, vocabulary)
            Those that the last token was chosen by.
        """
        xp, size = self.xp, self.size
        batch, known = prompt.shape
        shape = (batch, known + count, size.heads, size.head_dim)
        keys, values = (
            [xp.zeros(shape, self.narrow) for _ in range(size.layers)] for _ in range(2)
        )
        lengths = xp.zeros(batch, np.int32)

        def cached(i: int, start: int) -> Attention:
            def attend(q: Any, k: Any, v: Any) -> tuple[Any, Pull]:
                stop = start + q.shape[1]
                keys[i][:, start:stop], values[i][:, start:stop] = k, v
                # The diagonal ends at the last valid key, so that the last query sees
                # all of them.
                out = flash_attention(
                    q, keys[i], values[i], causal=True, k_lengths=lengths
                )
                return out, _no_pull

            return attend

        tokens = xp.empty((batch, count), prompt.dtype)
        new, start = prompt, 0
        for position in range(count):
            lengths += new.shape[1]
            x, _ = self.embed(new, start)
            for i in range(size.layers):
                x, _ = self.block(x, i, cached(i, start))
            x, _ = self.norm(x[:, -1], "norm")
            logits, _ = self.linear(x, "tokens", transposed=True)
            logits = logits.astype(self.wide, copy=False)
            start += new.shape[1]
            chosen = logits.argmax(axis=-1) if given is None else given[:, position]
            tokens[:, position] = chosen
            new = tokens[:, position : position + 1]
        return tokens, logits


def _no_pull(dout: Any) -> Any:
    raise RuntimeError("attention over a cache has no gradient here")
