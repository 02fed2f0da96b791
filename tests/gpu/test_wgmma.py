"""What the family `wgmma` could get wrong, with each of its tiles.

Its blocks take one tile of queries after the other, and a small problem is given small
tiles, so that what is in the grid of all families reaches only part of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupy_flash import explain, flash_attention, flash_attention_vjp
from cupy_flash.compiler import nvrtc_version
from cupy_flash.configs import WGMMA_FORWARD, WgmmaTile

from .. import cases
from ..cases import (
    SINGLE,
    Array,
    Case,
    Inputs,
    assert_same,
    compare_closely,
    lay_out,
    make,
    normal,
    raised,
)
from .running import (
    check,
    check_case,
    cp,
    fetch,
    fetch_all,
    poison_shared_memory,
    run,
    to_gpu,
)

# More than any row of the table asks for.
_MANY_KEYS = 2**20
_FORWARD = {"gradients": False}
_HALF: dict[str, Any] = {"dtype": "bfloat16", **_FORWARD}


def tiles() -> dict[WgmmaTile, None]:
    """Return every tile of the table, for its largest head."""
    found = {}
    for row in WGMMA_FORWARD:
        banded = bool(row.banded)
        tile = row.tile(row.max_depth, row.max_depth_v, _MANY_KEYS, banded)
        found[tile] = None
    return found


def on_tiles(*each: Case, less: int = 0) -> pytest.MarkDecorator:
    """Give a test each of the cases with each tile.

    Heads have as many channels as there is room for, or `less`.
    """
    return pytest.mark.parametrize(
        ("case", "config"),
        [
            pytest.param(
                replace(case, d=tile.depth - less, dv=tile.depth_v - less),
                tile,
                id=f"{case}-{tile.name}",
            )
            for case in each
            for tile in tiles()
        ],
    )


def over(*grid: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", grid, ids=str)


# Several tiles of queries, and more tiles of keys than are in flight at once.
_LONG = {"sq": 300, "sk": 700}
_BAND = {"window": (150, 30), "softcap": 3.0, "alibi": "heads"}
FORCED = (
    Case("plain", "float16", **_LONG, **_FORWARD),
    Case("causal", **_LONG, **_HALF, causal=True),
    Case("causal_fewer_keys", sq=700, sk=300, **_HALF, causal=True),
    Case("top_left", **_LONG, **_HALF, causal="top_left"),
    Case("window", sq=600, sk=500, **_HALF, window=(100, 30)),
    Case("negative_scale", **_LONG, **_HALF, scale=-0.3, k_lengths=(700, 130)),
    Case("together", **_LONG, **_HALF, **_BAND, scale=0.3, q_lengths=(300, 83),
         k_lengths=(411, 700)),
)  # fmt: skip


@on_tiles(*FORCED, less=8)
def test_forced_tile(case: Case, config: WgmmaTile) -> None:
    """With channels that the tile has room for and the heads don't have."""
    check_case(case, config)


def test_which_calls_get_the_family() -> None:
    if cp.cuda.Device().compute_capability != "90" or nvrtc_version() < (12, 9):
        pytest.skip("needs compute capability 9.0 and NVRTC 12.9")
    x, wide = (cp.zeros((2, 300, 4, 64), np.dtype(t)) for t in ("float16", "float32"))
    assert explain(x, x, x).family == "wgmma"
    backward = {"direction": "backward"}
    assert explain(x, x, x, **backward).family == "wgmma"
    assert explain(x, x, x, **backward, deterministic=True).family == "mma"
    assert explain(wide, wide, wide).family == "mma"
    bias = explain(x, x, x, bias=cp.zeros((300, 300), np.float16))
    assert bias.family == "mma" and "wgmma reads no bias" in str(bias)


# --- Head sizes -----------------------------------------------------------------------

_HEADS: dict[str, Any] = {"batch": (1,), "hq": 2, "hkv": 1, "sq": 100, "sk": 150}


@pytest.mark.parametrize("family", ["wgmma"])
@over(
    *(Case(f"d{d}", **_HEADS, **_HALF, d=d, causal=True) for d in range(8, 257, 8)),
    *(
        Case(f"d{d}v{dv}", **_HEADS, **_HALF, d=d, dv=dv, causal=True)
        for d, dv in (
            (192, 128), (64, 256), (256, 64), (128, 96), (8, 200), (72, 16), (16, 136),
            (136, 40),
        )
    ),
)  # fmt: skip
def test_head_sizes(case: Case, family: str) -> None:
    check_case(case, family)


# --- The shapes of problems -----------------------------------------------------------


@pytest.mark.parametrize("family", ["wgmma"])
@over(*(replace(case, **_HALF) for case in cases.BATCH if case.bias is None))
def test_batch_axes(case: Case, family: str) -> None:
    check_case(case, family)


@pytest.mark.parametrize("family", ["wgmma"])
@over(
    *(
        Case(
            f"{hq}_{hkv}_{sq}x{sk}", **_HALF, hq=hq, hkv=hkv, sq=sq, sk=sk, causal=True
        )
        for hq, hkv in ((1, 1), (6, 3), (8, 1), (16, 2))
        for sq, sk in ((1, 300), (130, 130), (70, 257), (257, 70))
    )
)
def test_groups_of_heads(case: Case, family: str) -> None:
    check_case(case, family)


@on_tiles(
    *(
        Case(f"{sq}x{sk}", **SINGLE, **_HALF, sq=sq, sk=sk)
        for sq, sk in ((1, 1), (65, 129), (200, 31), (63, 513))
    )
)
def test_ragged(case: Case, config: WgmmaTile) -> None:
    for causal in (False, True):
        check_case(replace(case, causal=causal), config)


@pytest.mark.parametrize("family", ["wgmma"])
@over(
    Case("sections", **_HALF, batch=(1,), sq=66, sk=16384, hq=12, hkv=12, d=128,
         causal=True)
)  # fmt: skip
def test_heads_that_share_the_cache_in_sections(case: Case, family: str) -> None:
    """The last section has fewer heads than the others."""
    inputs = make(case)
    q, k, v = (to_gpu(x) for x in (inputs.q, inputs.k, inputs.v))
    section = explain(q, k, v, causal=True, config=family).section
    assert 1 < section < case.hq and case.hq % section
    check_case(case, family)


# More tiles than multiprocessors, of whatever size, so that blocks take several.
MANY = Case("many", **_HALF, batch=(48,), hq=6, hkv=2, sq=100, sk=150)


def of_any_length(case: Case, seed: int) -> Case:
    """Return a case whose sequences have every length from none to all."""
    rng = np.random.default_rng(seed)
    (batch,) = case.batch

    def lengths(most: int) -> tuple[int, ...]:
        return tuple(rng.permutation(np.linspace(0, most, batch).astype(int)).tolist())

    return replace(case, q_lengths=lengths(case.sq), k_lengths=lengths(case.sk))


@on_tiles(
    of_any_length(MANY, 1),
    of_any_length(replace(MANY, name="many_causal", causal=True), 2),
)
def test_many_sequences_of_any_length(case: Case, config: WgmmaTile) -> None:
    """What lies behind their ends may be anything."""
    inputs = make(case)
    clean = check_case(case, config)
    for value in (np.nan, np.inf):
        for x, lengths in (
            (inputs.q, case.q_lengths),
            (inputs.k, case.k_lengths),
            (inputs.v, case.k_lengths),
        ):
            x[np.arange(x.shape[1]) >= np.array(lengths)[:, None]] = value
        assert_same(run(inputs, config, gradients=False), clean)


@on_tiles(
    Case("lengths", **_LONG, **_HALF, q_lengths=(300, 61), k_lengths=(523, 3)),
    Case("top_left", sq=500, sk=700, **_HALF, causal="top_left", q_lengths=(60, 333)),
    Case("window", **_LONG, **_HALF, window=(20, 5), k_lengths=(611, 700)),
)
def test_nan_in_keys_that_nobody_sees(case: Case, config: WgmmaTile) -> None:
    """In tiles of keys that are seen in part, and in those that aren't visited."""
    inputs = make(case)
    clean = check_case(case, config)
    seen = np.zeros((2, case.sk), bool)
    for sequence in range(2):
        q_length, k_length = (
            case.sq if case.q_lengths is None else case.q_lengths[sequence],
            case.sk if case.k_lengths is None else case.k_lengths[sequence],
        )
        offset = 0 if case.causal == "top_left" else k_length - q_length
        keys = np.arange(case.sk)[None] - np.arange(q_length)[:, None] - offset
        visible = np.ones(keys.shape, bool)
        if case.causal:
            visible &= keys <= 0
        if case.window:
            visible &= (keys >= -case.window[0]) & (keys <= case.window[1])
        seen[sequence] = visible.any(0) & (np.arange(case.sk) < k_length)
    assert not seen.all()
    for value in (np.nan, np.inf, -np.inf):
        inputs.k[~seen], inputs.v[~seen] = value, value
        assert_same(run(inputs, config, gradients=False), clean)


# --- Hostile data ---------------------------------------------------------------------


def huge_factors(dtype: np.dtype) -> tuple[float, float]:
    """Return two numbers of a dtype whose product is as large as it may be."""
    return (6e4, 6e4) if dtype == np.float16 else (1e16, 1e15)


def spread(q: Array, k: Array, v: Array) -> None:
    """Logits of a standard deviation of several tens."""
    q[...], k[...] = 5 * q.astype(np.float32), 5 * k.astype(np.float32)


def growing(most: float, *, falling: bool = False) -> Callable[..., None]:
    """Return what makes logits grow along the keys from 0 to about `most`."""

    def change(q: Array, k: Array, v: Array) -> None:
        count = k.shape[1]
        steps = np.arange(count, dtype=np.float32) * most / count
        if falling:
            steps = steps[::-1]
        q[...] = 1 + 0.01 * q.astype(np.float32)
        k[...] = steps[:, None, None] / np.sqrt(q.shape[-1])

    return change


def alternating(q: Array, k: Array, v: Array) -> None:
    """Logits of 1e5 that rise along the keys for every second row and fall for others.

    Maxima are found in the last tile or in the first.
    """
    size = q.shape[-1]
    sign = np.where(np.arange(q.shape[1]) % 2, -1.0, 1.0)
    q[...] = (sign * 1e5 / np.sqrt(size))[:, None, None]
    k[...] = np.linspace(-1, 1, k.shape[1])[:, None, None]


def equal(q: Array, k: Array, v: Array) -> None:
    """All logits are the same huge number."""
    q[...] = k[...] = 480 if q.dtype == np.float16 else 133120


def lowest(q: Array, k: Array, v: Array) -> None:
    """Every second row has logits of about -1e30 alone, the others usual ones."""
    of_q, of_k = huge_factors(q.dtype)
    q[..., 0], k[..., 0] = 0, -of_k
    q[:, ::2] = 0
    q[:, ::2, :, 0] = of_q


def mixed(q: Array, k: Array, v: Array) -> None:
    """Rows of one warp whose maxima do different things, usual rows among them.

    Tiles come from the last key to the first.
    """
    count, size = k.shape[1], k.shape[-1]
    late = np.arange(count) < count // 2
    steps = np.arange(count, dtype=np.float32) * 150 / count
    of_q, of_k = huge_factors(q.dtype)
    of_keys = (
        (of_q, np.full(count, -of_k)),
        (np.sqrt(size), steps),
        (np.sqrt(size), steps[::-1]),
        (of_q, np.where(late, 0, -of_k)),
        (of_q, np.where(late, of_k, 0)),
        (of_q, np.where(late, -of_k, 0)),
    )
    kinds = len(of_keys)
    q[..., :kinds] = 0
    for kind, (factor, values) in enumerate(of_keys):
        # Seven and not eight kinds, so that no two rows of a lane are always alike.
        q[:, kind :: kinds + 1] = 0
        q[:, kind :: kinds + 1, :, kind] = factor
        k[..., kind] = values[:, None]


HOSTILE: dict[str, Callable[..., None]] = {
    "spread": spread,
    "rising": growing(150),
    "falling": growing(150, falling=True),
    "creeping_up": growing(12),
    "creeping_down": growing(12, falling=True),
    "alternating": alternating,
    "equal": equal,
    "lowest": lowest,
    "mixed": mixed,
}


@pytest.mark.parametrize("kind", HOSTILE)
@on_tiles(
    *(
        Case("hostile", dtype, (1,), sq=230, sk=700, hq=2, hkv=1, **_FORWARD)
        for dtype in ("bfloat16", "float16")
    )
)
def test_hostile_data(case: Case, kind: str, config: WgmmaTile) -> None:
    """Exact, whichever way the maximum of a row moves."""
    inputs = make(case)
    HOSTILE[kind](inputs.q, inputs.k, inputs.v)
    huge = kind in ("alternating", "equal", "lowest", "mixed")
    for options in ({}, {"causal": True}):
        given = inputs.with_options(**options)
        results = check(given, config, gradients=False, huge=huge)
        assert np.isfinite(results["out"].astype(np.float64)).all()
        assert np.isfinite(results["lse"]).all()


def leap(case: Case, bits: float) -> Array:
    """Raise the first fifth of the keys, visited last, by so many bits."""
    return (np.arange(case.sk) < case.sk // 5) * bits


def check_closely(inputs: Inputs, config: WgmmaTile | str) -> None:
    """Compare what is computed with the reference alone."""
    compare_closely(run(inputs, config, gradients=False), inputs)


@on_tiles(
    *(
        Case("leap", dtype, **SINGLE, sq=150, sk=1100, **_FORWARD)
        for dtype in ("bfloat16", "float16")
    )
)
def test_a_maximum_that_leaps(case: Case, config: WgmmaTile) -> None:
    """So far that exponentials are divided, or lost and made again."""
    for rows in ("all", "one", "apart"):
        for bits in (35, 60, 90, 200, 3000):
            check_closely(raised(case, leap(case, bits), rows), config)


@pytest.mark.parametrize("family", ["wgmma"])
@over(
    Case("causal", **_LONG, **_HALF, causal=True),
    Case("causal_fewer_keys", sq=700, sk=300, **_HALF, causal=True),
    Case("window", sq=600, sk=500, **_HALF, window=(200, 30), d=128),
    Case("lengths", **_LONG, **_HALF, q_lengths=(300, 83), k_lengths=(411, 700), d=128),
    Case("negative_scale", **_LONG, **_HALF, scale=-0.3, k_lengths=(700, 130)),
    Case("together", "float16", **_LONG, **_FORWARD, window=(250, 30), softcap=400.0,
         alibi="heads", k_lengths=(411, 700)),
)  # fmt: skip
def test_leaps_with_options(case: Case, family: str) -> None:
    for bits, rows in ((60, "all"), (200, "apart"), (500, "one")):
        check_closely(raised(case, leap(case, bits), rows), family)


@pytest.mark.parametrize("family", ["wgmma"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@over(
    Case("plain", **SINGLE, **_HALF, sq=200, sk=500),
    Case("causal", "float16", **SINGLE, **_FORWARD, sq=200, sk=500, causal=True),
)
def test_a_leap_beside_what_is_not_finite(
    case: Case, value: float, family: str
) -> None:
    """In a row or in a key; other rows and those that don't see the key are right."""
    for bits in (60, 200):
        for key in (None, 30, 480):
            inputs = raised(case, leap(case, bits), "apart")
            if key is None:
                inputs.q[:, 37, :, 5] = value
            else:
                inputs.k[:, key, :, 5] = value
            with np.errstate(invalid="ignore"):
                check_closely(inputs, family)


# --- What is in memory ----------------------------------------------------------------


@on_tiles(
    Case("ragged", **_HALF, sq=33, sk=70, k_lengths=(70, 9)),
    Case("causal", **_HALF, sq=200, sk=90, causal=True),
    less=40,
)
def test_whatever_is_in_shared_memory(case: Case, config: WgmmaTile) -> None:
    """Rows and channels past the ends, and stages that aren't filled yet, hold NaN."""
    poison_shared_memory()
    clean = check_case(case, config)
    for _ in range(3):
        poison_shared_memory()
        assert_same(run(make(case), config, gradients=False), clean)


@on_tiles(
    Case("full", **_HALF, batch=(3,), hq=6, hkv=2, sq=700, sk=700),
    Case("causal", **_HALF, batch=(3,), hq=6, hkv=2, sq=700, sk=700, causal=True),
)
def test_a_thousand_runs_give_the_same_bits(case: Case, config: WgmmaTile) -> None:
    wanted = check_case(case, config)
    inputs = make(case)
    q, k, v, out = (to_gpu(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    options = inputs.scalars | {"config": config, "return_lse": True, "out": out}

    def bits() -> tuple[Any, Any]:
        out.data.memset_async(0xFF, out.nbytes)
        _, lse = flash_attention(q, k, v, **options)
        return out.view(np.uint16), lse.view(np.uint32)

    first = [x.copy() for x in bits()]
    differs = cp.zeros((), bool)
    for _ in range(1000):
        for x, right in zip(bits(), first, strict=True):
            differs |= (x != right).any()
    assert not bool(differs)
    for x, name in zip(first, ("out", "lse"), strict=True):
        np.testing.assert_array_equal(x.get().view(wanted[name].dtype), wanted[name])


def _views() -> dict[str, tuple[Array, Array, Array, tuple[str, ...]]]:
    """Views of arrays (batch, tokens, heads, channels), and which are copied."""
    dtype = cases.DTYPES["bfloat16"]
    x = normal(1, 4, 150, 6, 72, dtype=dtype)
    packed = normal(2, 4, 150, 3, 6, 64, dtype=dtype)
    grouped = normal(3, 4, 150, 10, 64, dtype=dtype)
    transposed = normal(4, 4, 6, 72, 150, dtype=dtype).transpose(0, 3, 1, 2)
    swapped = lay_out(x, "swapped")
    one = np.broadcast_to(x[:1], x.shape)
    one_head = np.broadcast_to(x[:, :, :1], x.shape)
    one_key = np.broadcast_to(x[:, :1], x.shape)
    q, k, v = (packed[:, :, i] for i in range(3))
    return {
        "packed": (q, k, v, ()),
        "packed_groups": (
            grouped[:, :, :6], grouped[:, :, 6:8], grouped[:, :, 8:], (),
        ),
        "swapped": (swapped, swapped, x, ()),
        "slices": (x[:, :70], x[:, 1:50], x[:, 1:50, :, :40], ()),
        "steps": (x[::2], x[1::2], x[::2], ()),
        "every_second_token": (x[:, ::2], x[:, 1::2], x[:, ::2], ()),
        "shared_by_sequences": (x, one, one, ()),
        "shared_by_heads": (x, one_head, one_head, ()),
        "the_same_array": (x, x, x, ()),
        "one_key_repeated": (x, one_key, one_key, ("k", "v")),
        "backwards": (x[:, ::-1], x, x[::-1], ("q", "v")),
        "channels": (x[..., :64:2], x[..., 1:64:2], x, ("q", "k")),
        "transposed": (x, transposed, x, ("k",)),
        "offset": (x[..., 1:65], x[..., 8:72], x[..., 8:72], ("q",)),
    }  # fmt: skip


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", _views())
def test_views(name: str, layout: str) -> None:
    """Read where they lie, but for those that no tensor map can describe."""
    *arrays, copies = _views()[name]
    q, _, v = arrays
    dout = normal(9, *q.shape[:-1], v.shape[-1], dtype=q.dtype)
    if layout == "bhsd":
        arrays, dout = [x.swapaxes(1, 2) for x in arrays], dout.swapaxes(1, 2)
    options = {"causal": True, "layout": layout}
    inputs = Inputs(*arrays, dout, None, options)
    dense = Inputs(*map(np.ascontiguousarray, (*arrays, dout)), None, options)
    results = run(inputs, "wgmma", gradients=False)
    assert_same(results, check(dense, "wgmma", gradients=False))
    q, k, v = (to_gpu(x) for x in arrays)
    assert explain(q, k, v, **options, config="wgmma").copies == copies


@on_tiles(Case("margins", **_HALF, sq=201, sk=150, causal=True), less=8)
def test_nothing_is_written_around_the_output(case: Case, config: WgmmaTile) -> None:
    wanted = check_case(case, config)
    shape = make(case).dout.shape
    margins = ((1, 1), (70, 70), (1, 2), (8, 16))
    around = cp.full([n + sum(m) for n, m in zip(shape, margins, strict=True)], 0x5A5A,
                     np.uint16)  # fmt: skip
    inside = tuple(slice(low, -high) for low, high in margins)
    whole = around.view(wanted["out"].dtype)
    results = run(make(case), config, gradients=False, given={"out": whole[inside]})
    assert_same(results, wanted)
    around[inside] = 0x5A5A
    assert bool((around == 0x5A5A).all()), "written outside the view"


def test_arrays_that_move() -> None:
    """Maps are kept by the addresses of all arrays: any of them may change alone."""
    shape = (2, 130, 4, 64)
    dtype = cases.DTYPES["bfloat16"]
    pairs = [
        [to_gpu(normal(2 * i + j, *shape, dtype=dtype)) for j in range(2)]
        for i in range(3)
    ]
    outputs = [cp.empty(shape, dtype) for _ in range(2)]
    for _ in range(2):
        for *choice, place in itertools.product(range(2), repeat=4):
            q, k, v = (pair[i] for pair, i in zip(pairs, choice, strict=True))
            out = outputs[place]
            out.data.memset_async(0xFF, out.nbytes)
            flash_attention(q, k, v, config="wgmma", out=out)
            other = flash_attention(q, k, v, config="simt")
            got, wanted = (fetch(x).astype(np.float64) for x in (out, other))
            np.testing.assert_allclose(got, wanted, atol=0.02, rtol=0.02)


# --- Together with a backward pass ----------------------------------------------------


@over(
    Case("causal", "bfloat16", sq=150, sk=200, causal=True),
    Case("alibi", "float16", sq=150, sk=200, alibi="heads", softcap=2.0),
)
def test_the_functional_form(case: Case) -> None:
    """The library takes another family for the gradients."""
    inputs = make(case)
    wanted = check(inputs, None)
    arrays = {name: to_gpu(x) for name, x in inputs.arrays.items()}
    q, k, v, dout = (arrays.pop(name) for name in ("q", "k", "v", "dout"))
    options = inputs.scalars | arrays
    (out, lse), vjp = flash_attention_vjp(
        q, k, v, **options, return_lse=True, deterministic=True
    )
    results = {"out": out, "lse": lse}
    results |= zip(("dq", "dk", "dv"), vjp(dout), strict=True)
    assert_same(fetch_all(results), wanted)
