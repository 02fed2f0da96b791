"""A small GPT with this library beside the same one in PyTorch: tokens per second.

Every model starts from the same weights. Before anything is timed, the losses of some
training steps and the logits of a continuation have to agree.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from .gpt import Attention, Gpt, Size, fused_attention, initial_weights
from .memory import reason_of
from .peers import DTYPES, naive
from .peers.base import as_torch, module, no_cuda, on_host, quiet, why_not_importable
from .results import EVERYTHING, TIME_IS_UP, Row, Wanted, new_row
from .workloads import Case

SIZES = {
    "cuda": Size(4, width=512, heads=8, vocabulary=1024, seqlen=1024, batch=4),
    "cpu": Size(2, width=64, heads=2, vocabulary=128, seqlen=64, batch=2),
}
NARROW = {"cuda": ("bfloat16", "float32"), "cpu": ("float32",)}
# Of a loss and, relative to the largest logit, of a continuation's logits.
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}
CHECKED_STEPS = 3
CHECKED_TOKENS = 4
MIN_ROUNDS = 3
MAX_ROUNDS = 20
DIRECTIONS = ("training step", "generation")


class Model(Protocol):
    """What the two implementations of the model have in common."""

    def step(self, tokens: Any, targets: Any) -> Any:
        """Take a training step and return the loss before it."""

    def generate(self, prompt: Any, count: int, given: Any = None) -> tuple[Any, Any]:
        """Continue prompts; return the tokens and the last logits."""


@dataclass
class Contestant:
    """One implementation of the model with its data.

    Attributes
    ----------
    name : str
    model : Model
    tokens, targets, given : array
        (B, S), (B, S) and (B, CHECKED_TOKENS), as the model takes them.
    sync : callable
    checked : mapping of str to array
        What `check` computed.
    ms : mapping of str to list
        Times by direction; of one token in generation.
    """

    name: str
    model: Model
    tokens: Any
    targets: Any
    given: Any
    sync: Callable[[], Any]
    checked: dict[str, np.ndarray] = field(default_factory=dict)
    ms: dict[str, list[float]] = field(default_factory=dict)

    def check(self) -> None:
        """Compute what has to agree with the other models."""
        prompt = self.tokens[:, : self.tokens.shape[1] // 2]
        _, logits = self.model.generate(prompt, CHECKED_TOKENS, self.given)
        losses = [
            float(self.model.step(self.tokens, self.targets))
            for _ in range(CHECKED_STEPS)
        ]
        self.checked = {
            "training step": np.array(losses), "generation": on_host(logits),
        }  # fmt: skip

    def time(self, direction: str) -> None:
        """Time one step, or one generation of the second half of a sequence."""
        half = self.tokens.shape[1] // 2
        self.sync()
        start = time.perf_counter()
        if direction == "training step":
            self.model.step(self.tokens, self.targets)
        else:
            self.model.generate(self.tokens[:, :half], half)
        self.sync()
        passed = (time.perf_counter() - start) * 1e3
        passed /= 1 if direction == "training step" else half
        self.ms.setdefault(direction, []).append(passed)


def implementations(device: str) -> tuple[str, ...]:
    """Return the names of what is measured."""
    return tuple(makers(device))


def rows(
    budget_s: float,
    log: Callable[[str], None],
    device: str = "cuda",
    wanted: Wanted = EVERYTHING,
) -> list[Row]:
    """Time training steps and generation, all implementations in turn.

    Parameters
    ----------
    budget_s : float
    log : callable
        Takes a line for each row.
    device : {"cuda", "cpu"}
    wanted : Wanted
        A dtype of which any row is wanted is measured as a whole, since all
        implementations are timed in turn.
    """
    start = time.monotonic()
    size = SIZES[device]
    found: list[Row] = []
    dtypes = [
        dtype
        for dtype in NARROW[device]
        if any(
            wanted(case_of(size, dtype, direction), name)
            for name in implementations(device)
            for direction in DIRECTIONS
        )
    ]
    for n, dtype in enumerate(dtypes, 1):
        end = start + budget_s * n / len(dtypes)
        new = compare(device, size, dtype, end, wanted)
        for row in new:
            text = row["why"]
            if row["status"] == "ok":
                text = f"{row['ms']:.3f} ms, {row['tokens_per_s']:.0f} tokens/s"
            log(
                f"GPT {row['direction']} {dtype}, {row['impl']}: {row['status']} {text}"
            )
        found += new
    return found


def compare(
    device: str, size: Size, dtype: str, end: float, wanted: Wanted = EVERYTHING
) -> list[Row]:
    """Return the rows of one dtype; `end` is by `time.monotonic`."""
    contestants: list[Contestant] = []
    found: list[Row] = []
    for name, make in makers(device).items():
        if not wanted.named(name):
            continue
        reason = why_not(name, device)
        if reason is None and time.monotonic() > end:
            found += refused(size, dtype, name, "skipped", TIME_IS_UP)
        elif reason is not None:
            found += refused(size, dtype, name, "unsupported", reason)
        else:
            try:
                with quiet():
                    contestant = make(size, dtype)
                    contestant.check()
                contestants.append(contestant)
            # Whatever stops one implementation must not stop the others.
            except Exception as error:
                found += refused(size, dtype, name, "failed", reason_of(error))
    errors = disagreements(contestants)
    for direction, share in zip(DIRECTIONS, (0.5, 1.0), strict=True):
        now = time.monotonic()
        until = now + (end - now) * share
        right = [
            c for c in contestants if errors[c.name][direction] <= TOLERANCE[dtype]
        ]
        time_in_turn(right, direction, until)
    for contestant in contestants:
        for direction in DIRECTIONS:
            error = errors[contestant.name][direction]
            found.append(result(size, dtype, contestant, direction, error))
    order = list(makers(device))
    return sorted(found, key=lambda row: order.index(row["impl"]))


def time_in_turn(contestants: list[Contestant], direction: str, until: float) -> None:
    """Time all contestants in rounds until the time is used up."""
    for done in range(MAX_ROUNDS):
        if done >= MIN_ROUNDS and time.monotonic() > until:
            return
        for contestant in contestants:
            contestant.time(direction)


def disagreements(contestants: list[Contestant]) -> dict[str, dict[str, float]]:
    """Return how far each contestant is from the last one that was made.

    That is PyTorch's model if there is one, else the one with unfused attention.
    """
    errors: dict[str, dict[str, float]] = {}
    for contestant in contestants:
        of_one = {}
        for direction in DIRECTIONS:
            right = contestants[-1].checked[direction]
            off = np.abs(contestant.checked[direction] - right).max()
            off /= np.abs(right).max()
            of_one[direction] = float(off) if np.isfinite(off) else float("inf")
        errors[contestant.name] = of_one
    return errors


# --- The implementations --------------------------------------------------------------


def makers(device: str) -> Mapping[str, Callable[[Size, str], Contestant]]:
    """Return what makes each contestant; the last one is what the others must equal."""
    return {
        "cupy_flash": lambda size, dtype: arrays(
            "cupy_flash", device, size, dtype, fused_attention
        ),
        "naive": lambda size, dtype: arrays(
            "naive", device, size, dtype, unfused_attention(device, size)
        ),
        "torch": lambda size, dtype: tensors(device, size, dtype),
    }


def why_not(name: str, device: str) -> str | None:
    """Return why a contestant can't run."""
    if device == "cuda" and (reason := no_cuda()) is not None:
        return reason
    if name != "torch":
        return None
    if (reason := why_not_importable("torch")) is not None:
        return reason
    if device == "cuda" and not module("torch").cuda.is_available():
        return "torch has no CUDA device"
    return None


def data(size: Size) -> dict[str, np.ndarray]:
    """Return a batch that can be learned: each token says what the next one is."""
    random = np.random.default_rng(1)
    following = random.permutation(size.vocabulary)
    tokens = [random.integers(0, size.vocabulary, size.batch)]
    for _ in range(size.seqlen):
        tokens.append(following[tokens[-1]])
    sequence = np.stack(tokens, axis=1)
    given = random.integers(0, size.vocabulary, (size.batch, CHECKED_TOKENS))
    return {"tokens": sequence[:, :-1], "targets": sequence[:, 1:], "given": given}


def arrays(
    name: str, device: str, size: Size, dtype: str, attention: Attention
) -> Contestant:
    """Make the model in CuPy or NumPy."""
    xp = np if device == "cpu" else module("cupy")
    model = Gpt(
        xp, size, initial_weights(size), np.float32, DTYPES[dtype], attention
    )  # fmt: skip
    batch = {key: xp.asarray(value) for key, value in data(size).items()}

    def sync() -> None:
        if xp is not np:
            xp.cuda.get_current_stream().synchronize()

    return Contestant(name, model, **batch, sync=sync)


def tensors(device: str, size: Size, dtype: str) -> Contestant:
    """Make the model in PyTorch, which chooses its attention itself."""
    torch = module("torch")
    from .gpt_torch import TorchGpt
    from .peers.sdpa import select

    select(None)
    model = TorchGpt(
        device, size, initial_weights(size), torch.float32, getattr(torch, dtype)
    )
    batch = {key: as_torch(torch, x).to(device) for key, x in data(size).items()}

    def sync() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    return Contestant("torch", model, **batch, sync=sync)


def unfused_attention(device: str, size: Size) -> Attention:
    """Return causal attention that makes every S × S array."""
    xp = np if device == "cpu" else module("cupy")
    row = xp.arange(size.seqlen)
    visible = (row <= row[:, None])[None, None, None]

    def attend(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        out, p = naive.forward(xp, q, k, v, visible)
        return out, lambda dout: naive.backward(xp, dout, q, k, v, p)

    return attend


# --- Rows -----------------------------------------------------------------------------


def case_of(size: Size, dtype: str, direction: str) -> Case:
    """Return the attention problem of a layer."""
    return Case(
        "end_to_end", dtype, size.batch, size.seqlen, size.seqlen, size.heads,
        size.heads, size.head_dim, size.head_dim, True, direction,
    )  # fmt: skip


def refused(size: Size, dtype: str, name: str, status: str, why: str) -> list[Row]:
    """Return the rows of an implementation that wasn't timed."""
    return [
        new_row(case_of(size, dtype, direction), name, status, why)
        | {"tokens_per_s": None}
        for direction in DIRECTIONS
    ]


def result(
    size: Size, dtype: str, contestant: Contestant, direction: str, error: float
) -> Row:
    """Return the row of the median, or what is wrong."""
    case = case_of(size, dtype, direction)
    if error > TOLERANCE[dtype]:
        why = f"off by {error:.1e} from the model it is compared with"
        row = new_row(case, contestant.name, "wrong", why, error=error)
        return row | {"tokens_per_s": None}
    times = contestant.ms[direction]
    middle = statistics.median(times)
    tokens = size.batch * (size.seqlen if direction == "training step" else 1)
    row = new_row(
        case, contestant.name, "ok", ms=middle, error=error, rounds=len(times),
        ms_spread=(max(times) - min(times)) / middle,
    )  # fmt: skip
    return row | {"tokens_per_s": tokens / middle * 1e3}
