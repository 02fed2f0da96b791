"""The sentences of this folder's tests, and how they become a padded batch.

They come in pairs of similar meaning (0 and 1, 2 and 3, ...), from two tokens to more
than a hundred, so that one batch holds much padding and a nearest neighbour means
something.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

SENTENCES = (
    "Hello!",
    "Good morning, everyone.",
    "The bakery on the corner sells out of rye bread before nine.",
    "If you want a loaf of dark bread from that baker, get there early.",
    "Photosynthesis turns sunlight, water and carbon dioxide into sugar and oxygen.",
    "Plants use light to build glucose out of CO₂ and H₂O, and give off O₂.",
    "My train was cancelled twice, so I reached the office at noon.",
    "Two cancelled trains in a row made me hours late for work.",
    "Le café « Ångström » à Zürich costs 4,50 € — naïve tourists pay double! ☕",
    "A small espresso in that Zurich coffee house is priced far too high for visitors.",
    "The defendant's appeal was dismissed because it was filed after the deadline.",
    "Since the papers arrived too late, the court refused to hear the appeal.",
    (
        "A neutron star is what remains when the core of a massive star collapses "
        "under its own gravity: protons and electrons are squeezed together into "
        "neutrons, and a body heavier than the Sun ends up no wider than a city. A "
        "teaspoon of its matter would weigh some billions of tonnes, it may turn "
        "hundreds of times a second, and the beam of radio waves that sweeps past us "
        "with each turn is what Jocelyn Bell noticed in 1967 as a strangely regular "
        "pulse on a paper chart, which was labelled, half in jest, LGM-1, for little "
        "green men."
    ),
    (
        "Pulsars are fast-spinning, city-sized remnants of exploded stars, made almost "
        "wholly of neutrons, whose radio beams reach the Earth like the flashes of a "
        "lighthouse."
    ),
    (
        "To sort a list quickly, pick a pivot, move smaller items to its left and "
        "larger ones to its right, then do the same on both halves: quicksort(a[:i]); "
        "quicksort(a[i + 1:])."
    ),
    "Quicksort partitions an array around a pivot and then recurses on the two parts.",
)


def tokenize(tokenizer: Tokenizer, sentences: Sequence[str]) -> list[list[int]]:
    """Token ids of each sentence with [CLS] and [SEP], neither padded nor cut."""
    # The file asks for padding to 128 and truncation at 128; a batch is padded here.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return [encoding.ids for encoding in tokenizer.encode_batch(list(sentences))]


def pad(tokens: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """One batch of sentences, padded with id 0, which is [PAD].

    Returns
    -------
    token_ids : numpy.ndarray
        int32, (sentences, longest sentence).
    lengths : numpy.ndarray
        int32, (sentences,): how many ids of each row are real.
    """
    lengths = np.array([len(ids) for ids in tokens], dtype=np.int32)
    token_ids = np.zeros((len(tokens), lengths.max()), dtype=np.int32)
    for row, ids in zip(token_ids, tokens, strict=True):
        row[: len(ids)] = ids
    return token_ids, lengths
