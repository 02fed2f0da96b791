"""Planning calls without arrays, and compiling ahead of the first call."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_flash
from cupy_flash import aot, compiler, configs, explain, precompile
from cupy_flash.aot import Call
from cupy_flash.configs import FAMILIES
from cupy_flash.device import NoDeviceError, hypothetical
from cupy_flash.dtypes import ELEMENT_TYPES, parse_dtype
from cupy_flash.problem import Options
from cupy_flash.spec import KernelSpec

ROOT = Path(cupy_flash.__file__).parents[1]
FLOAT16 = np.dtype(np.float16)
SIZES = {"batch": 2, "seqlen_q": 40, "seqlen_k": 50, "heads_q": 4, "heads_kv": 2}


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """The kernels that `precompile` asks for, none of which is compiled."""
    specs: list[KernelSpec] = []

    def record(found: list[KernelSpec], capability: int, progress: Any) -> int:
        assert capability in (86, 90)
        specs.extend(dict.fromkeys(found))
        return len(specs)

    monkeypatch.setattr(compiler, "precompile", record)
    return specs


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array that lies on a multiple of 16 bytes, as CuPy's do."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size + 16, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + size].view(dtype).reshape(shape)


def kernels_of_a_call(
    head_dim: int, dtype: Any, head_dim_v: int | None = None, **options: Any
) -> set[KernelSpec]:
    """The kernels of a real call, of another size than those that are planned for."""
    b, sq, sk, h, hk = 3, 70, 90, 6, 2
    q = aligned((b, sq, h, head_dim), dtype)
    k = aligned((b, sk, hk, head_dim), dtype)
    v = aligned((b, sk, hk, head_dim_v or head_dim), dtype)
    for name in ("bias", "mask"):
        if options.get(name):
            kind = bool if name == "mask" else dtype
            options[name] = aligned((b, h, sq, sk), kind)
    if options.pop("alibi", False):
        options["alibi_slopes"] = aligned((h,), np.float32)
    plan = explain(q, k, v, device="sm_86", **options)
    return {step.spec for step in plan.steps}


# --- Calls without arrays -------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_call_is_planned_as_one_with_arrays(layout: str, direction: str) -> None:
    backward = direction == "backward"
    options = Options(direction, True, layout=layout, bias_grad=backward)
    call = Call(
        options, FLOAT16, 64, 96, **SIZES, alibi=True, bias=True, mask=True,
        lengths=True,
    )  # fmt: skip
    shapes = {"q": (2, 40, 4, 64), "k": (2, 50, 2, 64), "v": (2, 50, 2, 96)}
    if layout == "bhsd":
        shapes = {n: (s[0], s[2], s[1], s[3]) for n, s in shapes.items()}
    q, k, v = (aligned(shapes[name], FLOAT16) for name in "qkv")
    same = explain(
        q, k, v, causal=True, layout=layout, direction=direction, device="sm_86",
        bias_grad=backward,
        alibi_slopes=aligned((4,), np.float32),
        bias=aligned((4, 40, 50), FLOAT16),
        mask=aligned((4, 40, 50), bool),
        q_lengths=aligned((2,), np.int32),
        k_lengths=aligned((2,), np.int32),
    )  # fmt: skip
    assert str(call.plan(hypothetical("sm_86"))) == str(same)


def test_a_call_of_any_size_needs_no_memory() -> None:
    for family in FAMILIES:
        options = Options("forward", config=family)
        huge = Call(options, FLOAT16, 128, 128, batch=100, seqlen_q=2**24)
        gpu = hypothetical("sm_90")
        (step,) = huge.plan(gpu).steps
        tiles = 100 * 16 * 2**24 // step.spec.tile.rows
        assert step.grid == (gpu.multiprocessors if family == "wgmma" else tiles)


def test_a_wrong_call_is_refused_as_with_arrays() -> None:
    call = Call(Options("forward"), FLOAT16, 64, 64, heads_q=4, heads_kv=3)
    with pytest.raises(ValueError, match="multiple"):
        call.plan(hypothetical("sm_90"))


def test_dtypes_by_name() -> None:
    for dtype, element in ELEMENT_TYPES.items():
        for name in (element.name, element.short, dtype, dtype.type):
            assert parse_dtype(name) == dtype
    for wrong in ("int32", "half precision", None, np.int8, "complex64"):
        with pytest.raises(TypeError, match="accepted: float16, bfloat16"):
            parse_dtype(wrong if wrong is not None else object)


# --- Which kernels are compiled -------------------------------------------------------


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "top left": {"causal": "top_left"},
    "window": {"window": (5, 3)},
    "left only": {"window": (5, None)},
    "softcap": {"softcap": 20.0},
    "negative scale": {"scale": -1.0},
    "alibi, mask": {"alibi": True, "mask": True},
    "bias": {"bias": True, "causal": True},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=list(CALLS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", ["simt", "mma"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_call_finds_all_its_kernels(
    options: dict[str, Any],
    dtype: str,
    config: str,
    deterministic: bool,
    wanted: list[KernelSpec],
) -> None:
    """Whatever its batch, lengths and heads are."""
    options = options | {"config": config, "deterministic": deterministic}
    precompile(64, dtype, **options, device="sm_86")
    assert {spec.family for spec in wanted} <= {config, "passes"}
    for direction in ("forward", "backward"):
        kernels = kernels_of_a_call(64, np.dtype(dtype), direction=direction, **options)
        assert kernels and kernels <= set(wanted)


def test_the_gradient_of_a_bias_with_and_without_parts(
    wanted: list[KernelSpec],
) -> None:
    precompile(64, "float32", bias=True, bias_grad=True, device="sm_86")
    names = {spec.kernel for spec in wanted}
    assert {"backward_dbias", "reduce_dbias"} <= names
    kernels = kernels_of_a_call(
        64, np.float32, bias=True, bias_grad=True, direction="backward"
    )
    assert kernels <= set(wanted)
    wanted.clear()
    precompile(64, "float32", bias=True, device="sm_86")
    assert "backward_dbias" not in {spec.kernel for spec in wanted}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_one_direction(direction: str, wanted: list[KernelSpec]) -> None:
    precompile(64, "float32", direction=direction, device="sm_86")
    only_forward = {spec.kernel for spec in wanted} == {"forward"}
    assert only_forward == (direction == "forward")


def test_sequences_multiply(wanted: list[KernelSpec]) -> None:
    precompile((64, 128), ("fp16", "bf16"), direction="forward", device="sm_86")
    dtypes = (FLOAT16, np.dtype(ml_dtypes.bfloat16))
    found = {(spec.tile.depth, spec.dtype) for spec in wanted}
    assert found == set(itertools.product((64, 128), dtypes))


def test_large_and_small_calls(wanted: list[KernelSpec]) -> None:
    """A tile has fewer rows where blocks are few, or sequences short."""
    precompile(128, "fp16", direction="forward", device="sm_86")
    assert len({spec.tile.rows for spec in wanted}) > 1
    for batch, seqlen in itertools.product((1, 3, 40, 2000), (1, 17, 64, 65, 800)):
        for direction in ("forward", "backward"):
            wanted.clear()
            precompile(128, "fp16", direction=direction, device="sm_86")
            call = Call(
                Options(direction), FLOAT16, 128, 128, batch=batch, seqlen_q=seqlen,
                seqlen_k=seqlen,
            )  # fmt: skip
            plan = call.plan(hypothetical("sm_86"))
            assert {step.spec for step in plan.steps} <= set(wanted), (batch, seqlen)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("d", "dv"), [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
)
def test_tiles_of_hopper(
    d: int, dv: int, causal: bool, wanted: list[KernelSpec]
) -> None:
    """They depend on the number of keys and of tiles, in both directions."""
    gpu = hypothetical("sm_90")
    options = Options("forward", causal)
    precompile(d, "bf16", head_dim_v=dv, causal=causal, direction="forward",
               device="sm_90")  # fmt: skip
    assert {spec.family for spec in wanted} == {"wgmma"}
    for batch, seqlen_q, seqlen_k in itertools.product(
        (1, 3, 40, 2000), (1, 64, 65, 130, 800, 2048, 8192), (1, 100, 1500, 10000)
    ):
        call = Call(
            options, np.dtype(ml_dtypes.bfloat16), d, dv, batch=batch,
            seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        )  # fmt: skip
        found = {step.spec for step in call.plan(gpu).steps}
        assert found <= set(wanted), (batch, seqlen_q, seqlen_k)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("d", "dv"),
    [(8, 8), (40, 40), (64, 64), (80, 48), (128, 128), (192, 128), (256, 256)],
)
def test_gradients_on_hopper(
    d: int, dv: int, causal: bool, wanted: list[KernelSpec]
) -> None:
    """Of `wgmma` or, where its sums would be mostly padding, of `mma`."""
    gpu = hypothetical("sm_90")
    precompile(d, "bf16", head_dim_v=dv, causal=causal, device="sm_90")
    families = set()
    for batch, seqlen_q, seqlen_k in itertools.product(
        (1, 3, 40, 2000), (1, 20, 64, 65, 130, 800, 8192), (1, 100, 10000)
    ):
        call = Call(
            Options("backward", causal), np.dtype(ml_dtypes.bfloat16), d, dv,
            batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        )  # fmt: skip
        plan = call.plan(gpu)
        families.add(plan.family)
        found = {step.spec for step in plan.steps}
        assert found <= set(wanted), (batch, seqlen_q, seqlen_k)
    assert families == {"mma", "wgmma"}


def test_different_head_sizes(wanted: list[KernelSpec]) -> None:
    precompile(192, "fp16", head_dim_v=128, device="sm_86")
    for direction in ("forward", "backward"):
        assert kernels_of_a_call(192, FLOAT16, 128, direction=direction) <= set(wanted)


def test_all(wanted: list[KernelSpec]) -> None:
    """Any call with equal head sizes and no option but causal."""
    precompile(1, "fp16", all=True, causal="top_left", device="sm_86")
    for dtype in ELEMENT_TYPES:
        for head_dim in (1, 16, 33, 64, 80, 96, 100, 128, 192, 256, 512):
            for causal in (False, True):
                for direction in ("forward", "backward"):
                    kernels = kernels_of_a_call(
                        head_dim, dtype, causal=causal, direction=direction
                    )
                    assert kernels <= set(wanted), (dtype, head_dim, causal)


def test_buckets_cover_the_tables() -> None:
    buckets = configs.head_dim_buckets()
    assert list(buckets) == sorted(set(buckets))
    for table in (configs.SIMT_FORWARD, configs.SIMT_BACKWARD):
        for row in table:
            assert row.max_head_dim in (None, *buckets)
            assert (row.max_head_dim or 0) < buckets[-1]
    assert set(configs.MMA_DEPTHS) < set(buckets)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device": "sm_1"}, "sm_1"),
        ({"direction": "sideways"}, "sideways.*accepted: 'forward'"),
        ({"head_dim": 0}, "head_dim 0"),
        ({"head_dim": (64, -3)}, "-3"),
        ({"causal": "diagonal"}, "diagonal"),
        ({"softcap": -1.0}, "softcap"),
        ({"bias_grad": True}, "bias"),
    ],
)
def test_wrong_arguments(
    wrong: dict[str, Any], message: str, wanted: list[KernelSpec]
) -> None:
    with pytest.raises(ValueError, match=message):
        precompile(**{"device": "sm_86"} | wrong)
    assert not wanted


def test_a_wrong_dtype(wanted: list[KernelSpec]) -> None:
    with pytest.raises(TypeError, match="int32"):
        precompile(64, ("fp16", "int32"), device="sm_86")


def test_no_gpu_and_none_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise NoDeviceError("CuPy finds no GPU: none")

    monkeypatch.setattr(aot, "current_device", none)
    with pytest.raises(NoDeviceError, match="finds no GPU.*name a GPU"):
        precompile(64)


# --- Compiling ------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    return tmp_path / "cupy_flash"


def test_compiles_once_and_reports(cache: Path) -> None:
    seen: list[tuple[int, int]] = []
    arguments = {"direction": "backward", "device": "sm_86"}
    made = precompile(32, "fp32", **arguments, progress=lambda *step: seen.append(step))
    # delta; dq, dk and dv together and the conversion of dq, or each by itself.
    assert made == 5
    assert seen == [(n, 5) for n in range(1, 6)]
    assert len(list(cache.glob("*.cubin"))) == 5
    assert precompile(32, "fp32", **arguments) == 0
    # A call takes them from there.
    call = Call(Options("backward"), np.dtype(np.float32), 32, 32)
    for step in call.plan(hypothetical("sm_86")).steps:
        assert compiler.cached_image(step.spec, 86)[1] is None


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There would be nothing to show for the time, so it is an error here."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="can't be kept"):
        precompile(16, "fp32", direction="forward", device="sm_86")


def test_an_interrupt_drops_what_has_not_begun(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[KernelSpec] = []

    def compile_slowly(spec: KernelSpec, capability: int) -> tuple[Path, None]:
        begun.append(spec)
        time.sleep(0.01)
        return cache, None

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler, "cached_image", compile_slowly)
    monkeypatch.setattr(compiler.os, "cpu_count", lambda: 1)
    call = Call(Options("forward"), FLOAT16, 32, 32)
    (step,) = call.plan(hypothetical("sm_86")).steps
    specs = [replace(step.spec, batch_axes=n) for n in range(200)]
    with pytest.raises(KeyboardInterrupt):
        compiler.precompile(specs, 86, interrupt)
    assert len(begun) < 200


COLD = """
import sys
from cupy_flash import precompile
print(precompile(16, "fp32", direction="forward", device="sm_75"))
"""


def start(environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COLD],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_second_process_compiles_nothing(cache: Path) -> None:
    environment = {"CUPY_CACHE_DIR": str(cache.parent)}
    made: list[str] = []
    for _ in range(2):
        process = start(environment)
        out, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
        made.append(out.strip())
    assert made == ["1", "0"]
