"""The encoder of all-MiniLM-L6-v2 in plain array code over `flash_attention`.

A BERT of 6 layers and 12 heads of 32 (post-LayerNorm, erf GELU), then the mean over a
sentence's tokens, scaled to length 1. `xp` is `numpy` or `cupy`; nothing else differs.

With float16 weights the activations between two steps are float16 as well. Inside a
step (a sum over features, LayerNorm, GELU, pooling) it is float32, rounded once at the
end: that is how half precision runs on tensor cores, whereas NumPy's own float16 matmul
would round every partial sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from cupy_flash import flash_attention

Array = Any  # a numpy.ndarray or a cupy.ndarray

LAYERS = 6
HEADS = 12


def erf(xp: ModuleType, x: Array) -> Array:
    """The error function, float32 in and out."""
    if xp is np:
        # NumPy has none. One call for each element is slow (0.2 µs) but exact, and
        # asks for no further package.
        return np.vectorize(math.erf, otypes=[np.float32])(x)
    from cupyx.scipy import special

    return special.erf(x)


def prepare(
    xp: ModuleType, tensors: Mapping[str, np.ndarray], dtype: Any
) -> dict[str, Array]:
    """The weights as arrays of `xp` in `dtype`."""
    return {name: xp.asarray(tensor.astype(dtype)) for name, tensor in tensors.items()}


def encode(
    xp: ModuleType, weights: Mapping[str, Array], token_ids: Array, lengths: Array
) -> Array:
    """Sentence embeddings of a padded batch.

    Parameters
    ----------
    weights
        From `prepare`, under the names that the model's file uses.
    token_ids
        Integers, (B, S). What stands past a row's length has no influence.
    lengths
        int32, (B,): each sentence's number of tokens, at least 1.

    Returns
    -------
    Array
        float32, (B, 384), each row of length 1.
    """
    batch, seqlen = token_ids.shape
    dtype = weights["embeddings.word_embeddings.weight"].dtype

    def single(name: str) -> Array:
        return weights[name].astype(np.float32, copy=False)

    def linear(x: Array, name: str) -> Array:
        y = x.astype(np.float32, copy=False) @ single(f"{name}.weight").T
        return (y + single(f"{name}.bias")).astype(dtype, copy=False)

    def layer_norm(x: Array, name: str) -> Array:
        x = x.astype(np.float32, copy=False)
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / xp.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-12)
        x = x * single(f"{name}.weight") + single(f"{name}.bias")
        return x.astype(dtype, copy=False)

    def gelu(x: Array) -> Array:
        x = x.astype(np.float32, copy=False)
        return (0.5 * x * (1.0 + erf(xp, x * math.sqrt(0.5)))).astype(dtype, copy=False)

    # Every token is of type 0: the model saw sentences one at a time.
    words = single("embeddings.word_embeddings.weight")[token_ids]
    places = single("embeddings.position_embeddings.weight")[:seqlen]
    kind = single("embeddings.token_type_embeddings.weight")[0]
    hidden = layer_norm(words + places + kind, "embeddings.LayerNorm")

    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}"
        q, k, v = (
            linear(hidden, f"{at}.attention.self.{part}").reshape(
                batch, seqlen, HEADS, -1
            )
            for part in ("query", "key", "value")
        )
        context = flash_attention(q, k, v, k_lengths=lengths)
        context = context.reshape(batch, seqlen, -1)
        attended = linear(context, f"{at}.attention.output.dense")
        hidden = layer_norm(hidden + attended, f"{at}.attention.output.LayerNorm")
        inner = gelu(linear(hidden, f"{at}.intermediate.dense"))
        expanded = linear(inner, f"{at}.output.dense")
        hidden = layer_norm(hidden + expanded, f"{at}.output.LayerNorm")

    # A choice, not a product with 0: padding may hold anything, NaN included.
    real = (xp.arange(seqlen) < lengths[:, None])[..., None]
    kept = xp.where(real, hidden.astype(np.float32, copy=False), np.float32(0))
    mean = kept.sum(axis=1) / lengths[:, None].astype(np.float32)
    return mean / xp.sqrt((mean * mean).sum(axis=1, keepdims=True))
