"""Compute `expected.npz`: the sentences' embeddings as `transformers` sees them.

On the CPU, in float32, with attention written out (`eager`), from the same weights that
the tests read. It needs `torch` and `transformers`, which the tests themselves don't.
From the repository's root:

    python -m tests.real.make_expected
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

from . import weights
from .sentences import SENTENCES

EXPECTED = Path(__file__).with_name("expected.npz")

# What the model's own config.json says, as far as it bears on the encoder.
CONFIG = transformers.BertConfig(
    vocab_size=weights.VOCABULARY,
    hidden_size=384,
    num_hidden_layers=6,
    num_attention_heads=12,
    intermediate_size=1536,
    hidden_act="gelu",
    max_position_embeddings=512,
    type_vocab_size=2,
    layer_norm_eps=1e-12,
    attn_implementation="eager",
)


def embed(
    model: torch.nn.Module, ids: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """Masked mean of the last hidden state, scaled to length 1: (sentences, 384)."""
    with torch.inference_mode():
        hidden = model(input_ids=ids, attention_mask=attention_mask).last_hidden_state
    kept = attention_mask[..., None].to(hidden.dtype)
    mean = (hidden * kept).sum(dim=1) / kept.sum(dim=1)
    return torch.nn.functional.normalize(mean, dim=1)


def main() -> None:
    """Write the file, and print how far float32 is from float64."""
    folder = weights.model_folder()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / weights.TOKENIZER), pad_token="[PAD]"
    )
    batch = tokenizer(list(SENTENCES), padding="longest", return_tensors="pt")
    ids, attention_mask = batch["input_ids"], batch["attention_mask"]

    model = transformers.AutoModel.from_config(CONFIG).eval()
    state = load_file(folder / weights.MODEL)
    # AutoModel's pooler is loaded along; these embeddings don't go through it.
    missing, unexpected = model.load_state_dict(state, strict=False)
    if missing or set(unexpected) - {"embeddings.position_ids"}:
        raise RuntimeError(f"missing weights {missing}, unexpected {unexpected}")

    embeddings = embed(model, ids, attention_mask)
    exact = embed(model.double(), ids, attention_mask)
    error = (embeddings - exact).abs().max().item()
    print(f"{tuple(ids.shape)} tokens; float32 is within {error:.1e} of float64")

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "numpy": np.__version__,
    }
    np.savez_compressed(
        EXPECTED,
        embeddings=embeddings.numpy(),
        token_ids=ids.numpy().astype(np.int32),
        lengths=attention_mask.sum(dim=1).numpy().astype(np.int32),
        model_sha256=np.array(weights.SHA256[weights.MODEL]),
        versions=np.array(json.dumps(versions)),
    )
    print(f"{EXPECTED}: {EXPECTED.stat().st_size} bytes, {versions}")


if __name__ == "__main__":
    main()
