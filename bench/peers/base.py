"""What an implementation has to offer to be measured, and the arrays it is given."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from ..workloads import Case

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
# What a pass of a direction gives, in this order.
OUTPUTS = {
    "forward": ("out",),
    "backward": ("dq", "dk", "dv"),
    "both": ("out", "dq", "dk", "dv"),
}
Index = Mapping[str, Any]


class Unsupported(Exception):
    """A peer can't do a case; the message is the reason, one line."""


@dataclass(frozen=True)
class Prepared:
    """One case, ready to be timed.

    Attributes
    ----------
    call : callable
        Runs one pass on inputs that exist already. On a GPU it only queues the work.
    outputs : callable
        ``outputs(result, index=None)`` takes what `call` returned to the host: float32
        arrays (float64 for float64 inputs) by name, "out" (B, S, H, Dv) and "dq",
        "dk", "dv" (B, S, H, D). `index` may hold an index into each of them, which is
        applied before the copy: ``{"out": np.s_[:1, :, :2]}``.
    clock : {"stream", "wall"}
        "stream": the work is queued on CuPy's current stream, so that events time it.
        "wall": it runs on another stream or on the host.
    sync : callable
        Waits until the work of the calls is done.
    """

    call: Callable[[], Any]
    outputs: Callable[..., dict[str, np.ndarray]]
    clock: str
    sync: Callable[[], None]


@dataclass(frozen=True)
class Inputs:
    """q, k, v and dout of a case in (B, S, H, D), the same memory for every peer.

    Attributes
    ----------
    dtype : str
    native : mapping of str to array
        CuPy arrays, or NumPy arrays on the host, in that dtype.
    """

    dtype: str
    native: Mapping[str, Any]

    @functools.cached_property
    def host(self) -> dict[str, np.ndarray]:
        """The values as NumPy arrays, float32 (float64 for float64)."""
        return {name: on_host(x) for name, x in self.native.items()}

    @functools.cached_property
    def cupy(self) -> dict[str, Any]:
        """CuPy arrays; copies if the inputs lie on the host."""
        cupy = module("cupy")
        return {name: cupy.asarray(x) for name, x in self.native.items()}

    @functools.cached_property
    def torch(self) -> dict[str, Any]:
        """PyTorch tensors that view the inputs."""
        torch = module("torch")
        return {name: as_torch(torch, x) for name, x in self.native.items()}

    @functools.cached_property
    def jax(self) -> dict[str, Any]:
        """JAX arrays that view the inputs."""
        jax = module("jax")
        return {name: jax.numpy.from_dlpack(x) for name, x in self.native.items()}


def make_inputs(case: Case, device: str = "cuda", seed: int = 0) -> Inputs:
    """Return normally distributed inputs of a case, made where they are used."""
    if device == "cuda":
        random = module("cupy").random.default_rng(seed)
    else:
        random = np.random.default_rng(seed)
    wide = np.float64 if case.dtype == "float64" else np.float32
    dtype = DTYPES[case.dtype]
    q = (case.batch, case.seqlen, case.heads)
    k = (case.batch, case.kv_seqlen, case.kv_heads)
    shapes = {
        "q": (*q, case.head_dim), "k": (*k, case.head_dim),
        "v": (*k, case.head_dim_v), "dout": (*q, case.head_dim_v),
    }  # fmt: skip
    return Inputs(
        case.dtype,
        {
            name: random.standard_normal(shape, dtype=wide).astype(dtype)
            for name, shape in shapes.items()
        },
    )


class Peer:
    """An implementation: what all of them have in common.

    A subclass sets the attributes, builds the call, and says what it can't do in
    `limits` or by raising `Unsupported` or any other error while it builds.

    Attributes
    ----------
    name : str
    device : {"cuda", "cpu"}
    modules : tuple of str
        What has to be importable.
    dtypes : tuple of str
    clock : {"stream", "wall"}
    heads_first : bool
        Results are (B, H, S, D).
    compiles : bool
        It compiles for a case what it then keeps in a folder.
    """

    name = ""
    device = "cuda"
    modules: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = tuple(DTYPES)
    clock = "stream"
    heads_first = False
    compiles = False

    def why_not(self, case: Case) -> str | None:
        """Return why the peer can't do a case, None if nothing is known against it."""
        if (reason := self.absent()) is not None:
            return reason
        if case.dtype not in self.dtypes:
            return f"{case.dtype} isn't supported"
        return self.limits(case)

    def absent(self) -> str | None:
        """Return what keeps the peer from every case, None if it is there."""
        if self.device == "cuda" and (reason := no_cuda()) is not None:
            return reason
        reasons = map(why_not_importable, self.modules)
        return next((reason for reason in reasons if reason is not None), None)

    def limits(self, case: Case) -> str | None:
        """Return what else the peer can't do."""
        return None

    def build(self, case: Case, inputs: Inputs) -> Callable[[], Any]:
        """Return the call; its results are as `OUTPUTS` orders them."""
        raise NotImplementedError

    def sync(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            module("cupy").cuda.get_current_stream().synchronize()

    def prepare(self, case: Case, inputs: Inputs) -> Prepared:
        """Build the call and, on a GPU, run it once, which compiles what is needed.

        Raises
        ------
        Unsupported
            With the reason.
        """
        if (reason := self.why_not(case)) is not None:
            raise Unsupported(reason)
        with quiet():
            call = self.build(case, inputs)
            if self.device == "cuda":
                call()
                self.sync()

        def outputs(result: Any, index: Index | None = None) -> dict[str, np.ndarray]:
            arrays = result if isinstance(result, (tuple, list)) else (result,)
            names = OUTPUTS[case.direction]
            named = dict(zip(names, arrays, strict=True))
            if self.heads_first:
                named = {name: x.swapaxes(1, 2) for name, x in named.items()}
            for name, at in (index or {}).items():
                if name in named:
                    named[name] = named[name][at]
            return {name: on_host(x) for name, x in named.items()}

        return Prepared(call, outputs, self.clock, self.sync)


# --- What the peers share -------------------------------------------------------------


def lengths_of(case: Case) -> tuple[Any, Any] | None:
    """Return the lengths of a case's queries and keys as int32 arrays; None without."""
    q = getattr(case, "q_lengths", None)
    k = getattr(case, "k_lengths", None)
    if q is None and k is None:
        return None
    q = (case.seqlen,) * case.batch if q is None else q
    k = (case.kv_seqlen,) * case.batch if k is None else k
    return np.array(q, np.int32), np.array(k, np.int32)


def needs_corner(case: Case) -> bool:
    """Whether a case is causal with a diagonal that doesn't start at the top left.

    One query alone is the last one and sees every key.
    """
    return case.causal and case.seqlen != case.kv_seqlen and case.seqlen > 1


@functools.cache
def _import(name: str) -> ModuleType | str:
    try:
        with quiet():
            return importlib.import_module(name)
    # A package that is there but broken raises anything: OSError for a missing
    # library, AttributeError for a version that doesn't match another one's.
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        return f"{name} can't be imported: {text[:200]}"


def why_not_importable(name: str) -> str | None:
    """Return why a module can't be imported, None if it can."""
    found = _import(name)
    return found if isinstance(found, str) else None


def module(name: str) -> ModuleType:
    """Import a module without its noise.

    Raises
    ------
    Unsupported
        If it can't be imported; the message names it.
    """
    found = _import(name)
    if isinstance(found, str):
        raise Unsupported(found)
    return found


@functools.cache
def no_cuda() -> str | None:
    """Return why there is no CUDA device to use through CuPy, None if there is one."""
    found = _import("cupy")
    if isinstance(found, str):
        return found
    try:
        count = found.cuda.runtime.getDeviceCount()
    except found.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    return None if count else "no CUDA device"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallow warnings, log messages and what Python code prints."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@functools.cache
def spare_imported(device: str) -> None:
    """Spare later collections of garbage the search through all imported modules.

    On a GPU they hold PyTorch and JAX, some million objects. Called when a first case
    is over and nothing of it is left; later calls do nothing, because what they kept
    from being collected would be of cases.
    """
    if device == "cuda":
        gc.collect()
        gc.freeze()


def as_torch(torch: ModuleType, x: Any) -> Any:
    """View a NumPy or CuPy array as a tensor; bfloat16 on the host is copied."""
    if isinstance(x, np.ndarray):
        if x.dtype == DTYPES["bfloat16"]:
            return torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16)
        return torch.from_numpy(x)
    return torch.from_dlpack(x)


def on_host(x: Any) -> np.ndarray:
    """Copy an array of any library to the host, as float32 or, if it is one, float64.

    A tensor and a JAX array of bfloat16 are widened before, as NumPy may not know it.
    """
    kind = type(x).__module__.partition(".")[0]
    wide = np.float64 if "float64" in str(x.dtype) else np.float32
    if kind == "torch":
        x = x.detach()
        return (x.double() if wide is np.float64 else x.float()).cpu().numpy()
    if kind == "cupy":
        return x.astype(wide).get()
    return np.asarray(x).astype(wide)
