"""Write the model without the word embeddings that the test sentences don't use.

The tests then run where nothing can be downloaded: carry the folder there and name it
in CUPY_FLASH_TEST_MODEL. From the repository's root:

    python -m tests.real.trim_model FOLDER
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from . import weights
from .sentences import SENTENCES, tokenize


def trim(source: Path, target: Path) -> Path:
    """Trim the whole model in `source` into `target`; returns the file written."""
    weights.check(source / weights.MODEL)
    tokens = tokenize(weights.load_tokenizer(source), SENTENCES)
    # 0 is [PAD], which no sentence holds but every batch does.
    rows = np.unique(np.concatenate([[0], *tokens])).astype(np.int32)
    tensors = load_file(source / weights.MODEL)
    tensors[weights.WORDS] = tensors[weights.WORDS][rows]
    tensors[weights.WORD_ROWS] = rows

    target.mkdir(parents=True, exist_ok=True)
    unfinished = target / f"{weights.TRIMMED_MODEL}.part"
    origin = {weights.TRIMMED_FROM: weights.SHA256[weights.MODEL]}
    save_file(tensors, unfinished, metadata=origin)
    os.replace(unfinished, target / weights.TRIMMED_MODEL)
    shutil.copyfile(source / weights.TOKENIZER, target / weights.TOKENIZER)
    return target / weights.TRIMMED_MODEL


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write")
    written = trim(weights.model_folder(), parser.parse_args().folder)
    print(f"{written}: {written.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
