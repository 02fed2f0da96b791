"""The benchmarks' GPT: its gradients, its cache, and how models are compared."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from bench import end_to_end, gpt
from bench.peers import base
from bench.results import Wanted, case_of

# --- The model ------------------------------------------------------------------------

TINY = gpt.Size(layers=2, width=8, heads=2, vocabulary=11, seqlen=6, batch=2)


def model(**changes: Any) -> gpt.Gpt:
    options = {"wide": np.float64, "narrow": np.float64} | changes
    # Larger than the initial weights of a training run, so that every part matters.
    weights = {
        name: value if name.endswith("gain") else value + 0.3 * noise
        for (name, value), noise in zip(
            gpt.initial_weights(TINY).items(),
            (
                np.random.default_rng(n).standard_normal(shape)
                for n, shape in enumerate(TINY.shapes().values())
            ),
            strict=True,
        )
    }
    return gpt.Gpt(np, TINY, weights, **options)


def batch() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    shape = (TINY.batch, TINY.seqlen)
    return random.integers(0, 11, shape), random.integers(0, 11, shape)


def unfused_attention() -> gpt.Attention:
    return end_to_end.unfused_attention("cpu", TINY)


@pytest.mark.parametrize("attention", ["fused", "unfused"])
def test_the_gradients_of_the_model_are_those_of_its_loss(attention: str) -> None:
    fused = attention == "fused"
    made = model(attention=gpt.fused_attention if fused else unfused_attention())
    tokens, targets = batch()
    made.loss(tokens, targets)[1]()
    random = np.random.default_rng(6)
    step = 1e-5
    for name, weight in made.weights.by_name.items():
        gradient = made.gradients[name].copy()
        assert np.abs(gradient).max() > 1e-5, name
        # Along a direction in which every element takes part, and along some axes.
        along = [random.standard_normal(weight.shape)]
        for flat in random.integers(0, weight.size, 3):
            along.append(np.zeros(weight.shape))
            along[-1].flat[flat] = 1
        held = weight.copy()
        for direction in along:
            losses = []
            for sign in (1, -1):
                weight[...] = held + sign * step * direction
                losses.append(float(made.loss(tokens, targets)[0]))
            weight[...] = held
            slope = (losses[0] - losses[1]) / (2 * step)
            expected = float((gradient * direction).sum())
            assert slope == pytest.approx(expected, rel=1e-5, abs=1e-8), name


def test_a_training_step_decreases_the_loss() -> None:
    made = model(wide=np.float32, narrow=np.float32)
    tokens, targets = batch()
    losses = [float(made.step(tokens, targets, rate=1e-2)) for _ in range(16)]
    assert losses[1] < losses[0]
    assert losses[-1] < 0.5 * losses[0]


def test_adam_moves_every_weight_by_the_rate_at_first() -> None:
    made = model()
    before = made.weights.flat.copy()
    made.step(*batch(), rate=1e-3)
    moved = np.abs(made.weights.flat - before)
    used = np.abs(made.gradients.flat) > 1e-5
    assert used.mean() > 0.9
    assert moved[used] == pytest.approx(1e-3, rel=2e-3)


def test_the_cache_gives_what_the_whole_sequence_gives() -> None:
    made = model()
    prompt = batch()[0][:, :2]
    tokens, logits = made.generate(prompt, 4)
    whole = np.concatenate([prompt, tokens], axis=1)
    for stop in range(2, 6):
        x = made.embed(whole[:, :stop])[0]
        for i in range(TINY.layers):
            x = made.block(x, i, gpt.fused_attention)[0]
        x = made.norm(x, "norm")[0][:, -1]
        expected = made.linear(x, "tokens", transposed=True)[0]
        assert np.array_equal(expected.argmax(axis=-1), whole[:, stop])
    np.testing.assert_allclose(logits, expected, rtol=1e-12, atol=1e-12)
    again, given = made.generate(prompt, 4, given=tokens)
    assert np.array_equal(again, tokens)
    np.testing.assert_array_equal(given, logits)


def test_the_model_in_pytorch_takes_the_same_steps() -> None:
    if (reason := base.why_not_importable("torch")) is not None:
        pytest.skip(reason)
    torch = base.module("torch")
    from bench.gpt_torch import TorchGpt

    ours = model()
    weights = {name: x.copy() for name, x in ours.weights.by_name.items()}
    theirs = TorchGpt("cpu", TINY, weights, torch.float64, torch.float64)
    tokens, targets = batch()
    both = [torch.from_numpy(x) for x in (tokens, targets)]
    for _ in range(4):
        loss = float(ours.step(tokens, targets))
        assert float(theirs.step(*both)) == pytest.approx(loss, rel=1e-9)
    found, logits = ours.generate(tokens[:, :2], 4)
    expected, right = theirs.generate(both[0][:, :2], 4)
    assert np.array_equal(found, expected.numpy())
    np.testing.assert_allclose(logits, right.numpy(), rtol=1e-8, atol=1e-10)


# --- End to end -----------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(end_to_end.SIZES, "cpu", dataclasses.replace(TINY, seqlen=16))
    monkeypatch.setattr(end_to_end, "MAX_ROUNDS", 3)


def by_name(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["impl"], row["direction"]): row for row in rows}


def test_models_that_agree_are_timed(tiny: None) -> None:
    lines: list[str] = []
    rows = by_name(end_to_end.rows(10.0, lines.append, "cpu"))
    assert len(lines) == len(rows) == 6
    for (name, direction), row in rows.items():
        if name == "torch" and base.why_not_importable("torch") is not None:
            assert row["status"] == "unsupported"
            continue
        assert row["status"] == "ok" and row["rounds"] == 3
        tokens = 2 * 16 if direction == "training step" else 2
        assert row["tokens_per_s"] == pytest.approx(tokens / row["ms"] * 1e3)
        assert row["error"] < 1e-5


def test_a_dtype_is_measured_as_a_whole_or_not_at_all(tiny: None) -> None:
    every = end_to_end.rows(10.0, lambda line: None, "cpu")
    done = frozenset((case_of(row), row["impl"]) for row in every)
    assert end_to_end.rows(10.0, lambda line: None, "cpu", Wanted((), done)) == []
    wanted = Wanted(("naive",), done - {(case_of(every[0]), every[0]["impl"])})
    rows = by_name(end_to_end.rows(10.0, lambda line: None, "cpu", wanted))
    assert {name for name, _ in rows} == {"cupy_flash", "naive"} and len(rows) == 4


def test_a_model_that_is_wrong_has_no_time(
    tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(q: Any, k: Any, v: Any) -> Any:
        return gpt.flash_attention_vjp(q, k, v, causal=False, scale=3.0)

    monkeypatch.setattr(end_to_end, "fused_attention", full)
    # Weights this small hide attention from the loss.
    monkeypatch.setitem(end_to_end.TOLERANCE, "float32", 1e-6)
    rows = by_name(end_to_end.rows(10.0, lambda line: None, "cpu"))
    wrong = rows["cupy_flash", "training step"]
    assert wrong["status"] == "wrong" and wrong["ms"] is None
    assert math.isfinite(wrong["error"]) and "off by" in wrong["why"]
    assert rows["naive", "training step"]["status"] == "ok"


def test_a_model_that_fails_does_not_stop_the_others(
    tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(q: Any, k: Any, v: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(end_to_end, "fused_attention", failing)
    rows = by_name(end_to_end.rows(10.0, lambda line: None, "cpu"))
    assert rows["cupy_flash", "training step"]["why"] == "out of memory"
    assert rows["naive", "training step"]["status"] == "ok"
