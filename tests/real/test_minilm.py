"""all-MiniLM-L6-v2 over `flash_attention` against what `transformers` computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tokenizers import Tokenizer

from . import minilm, weights
from .sentences import SENTENCES, pad, tokenize

EXPECTED = Path(__file__).with_name("expected.npz")


@dataclass(frozen=True)
class Case:
    """One array module and one dtype, with the weights in it."""

    xp: ModuleType
    dtype: np.dtype
    tensors: dict[str, minilm.Array]

    def encode(self, token_ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Embeddings of a padded batch; host arrays in and out."""
        embeddings = minilm.encode(
            self.xp, self.tensors, self.xp.asarray(token_ids), self.xp.asarray(lengths)
        )
        return embeddings if self.xp is np else embeddings.get()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return weights.load_tokenizer(folder)


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, np.ndarray]:
    """The float32 weights, with one more word whose embedding is NaN at the end."""
    tensors = dict(weights.load_tensors(folder))
    words = tensors[weights.WORDS]
    tensors[weights.WORDS] = np.concatenate([words, np.full_like(words[:1], np.nan)])
    return tensors


def cupy_or_skip() -> ModuleType:
    """CuPy, if it is installed and finds a device."""
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"CuPy finds no GPU: {error}")
    return cupy


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("numpy", "float32"), id="numpy-float32"),
        pytest.param(("numpy", "float16"), id="numpy-float16"),
        pytest.param(("cupy", "float32"), id="cupy-float32", marks=pytest.mark.gpu),
        pytest.param(("cupy", "float16"), id="cupy-float16", marks=pytest.mark.gpu),
    ],
)
def case(request: pytest.FixtureRequest) -> Case:
    module, dtype = request.param
    xp = np if module == "numpy" else cupy_or_skip()
    # Asked for here, not as an argument: no download for a test that skips anyway.
    tensors = request.getfixturevalue("tensors")
    return Case(xp, np.dtype(dtype), minilm.prepare(xp, tensors, dtype))


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    with np.load(EXPECTED) as file:
        return dict(file)


@pytest.fixture(scope="module")
def batch(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    return pad(tokenize(tokenizer, SENTENCES))


@pytest.fixture(scope="module")
def embeddings(case: Case, batch: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    return case.encode(*batch)


def test_token_ids(
    batch: tuple[np.ndarray, np.ndarray], expected: dict[str, np.ndarray]
) -> None:
    token_ids, lengths = batch
    np.testing.assert_array_equal(lengths, expected["lengths"])
    np.testing.assert_array_equal(token_ids, expected["token_ids"])


def test_expected_is_of_these_weights(expected: dict[str, np.ndarray]) -> None:
    assert expected["model_sha256"] == weights.SHA256[weights.MODEL]


def test_embeddings(
    case: Case, embeddings: np.ndarray, expected: dict[str, np.ndarray]
) -> None:
    assert embeddings.dtype == np.float32
    assert embeddings.shape == expected["embeddings"].shape
    wanted = expected["embeddings"].astype(np.float64)
    if case.dtype == np.float32:
        np.testing.assert_allclose(embeddings, wanted, rtol=0, atol=1e-5)
    else:
        product = (embeddings * wanted).sum(axis=1)
        cosine = product / np.linalg.norm(embeddings.astype(np.float64), axis=1)
        cosine /= np.linalg.norm(wanted, axis=1)
        # Written so that a NaN fails.
        assert (cosine >= 0.9999).all(), cosine


@pytest.mark.parametrize("padding", ["other words", "NaN"])
def test_padding_has_no_influence(
    case: Case,
    batch: tuple[np.ndarray, np.ndarray],
    embeddings: np.ndarray,
    padding: str,
) -> None:
    """Bit for bit: shapes and lengths are the same, so the arithmetic must be."""
    token_ids, lengths = batch
    is_padding = np.arange(token_ids.shape[1]) >= lengths[:, None]
    assert is_padding.any()
    if padding == "NaN":  # K and V of every padded place are NaN, in every layer
        poison = np.full_like(token_ids, len(case.tensors[weights.WORDS]) - 1)
    else:
        used = np.unique(token_ids[~is_padding])
        poison = np.random.default_rng(7).choice(used, token_ids.shape)
    with np.errstate(invalid="ignore"):  # NaN in the padding is the point
        poisoned = case.encode(np.where(is_padding, poison, token_ids), lengths)
    np.testing.assert_array_equal(poisoned, embeddings)


def test_alone_as_in_the_batch(
    case: Case, batch: tuple[np.ndarray, np.ndarray], embeddings: np.ndarray
) -> None:
    # Matrix products of another shape may sum in another order. Rounding alone moves an
    # embedding's elements, some 0.04 in size, by 2e-7 in float32 and 3e-4 in float16.
    tolerance = 1e-6 if case.dtype == np.float32 else 1e-3
    for row, (ids, length) in enumerate(zip(*batch, strict=True)):
        alone = case.encode(ids[None, :length], np.array([length], dtype=np.int32))
        np.testing.assert_allclose(
            alone[0], embeddings[row], rtol=0, atol=tolerance, err_msg=SENTENCES[row]
        )


def test_nearest_is_the_partner(embeddings: np.ndarray) -> None:
    similarity = embeddings @ embeddings.T
    np.testing.assert_allclose(np.diag(similarity), 1.0, atol=1e-5)
    np.fill_diagonal(similarity, -np.inf)
    partners = np.arange(len(SENTENCES)) ^ 1
    np.testing.assert_array_equal(similarity.argmax(axis=1), partners)
