"""The command line: the demonstration, info, explain and precompile.

Results go to standard output, everything else to standard error. Exit codes: 0, 1 if
something failed, 2 if the arguments are wrong, 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from . import __version__, compiler, configs, settings
from .aot import Call, device_named, directions, precompile
from .demo import Gpu, Host, Measurement, measure
from .device import CuPyDevice, DeviceInfo, NoDeviceError, current_device
from .dtypes import parse_dtype
from .problem import Options

PROGRAM = "python -m cupy_flash"
MIB = 2**20


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help says more)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    # CuPy warns of a CUDA toolkit that it doesn't find and that isn't needed.
    warnings.filterwarnings("ignore", message="CUDA path could not be detected")
    chosen = _parser().parse_args(arguments)
    try:
        chosen.run(chosen)
    except (ValueError, TypeError) as error:
        if chosen.run is _demonstrate:
            raise  # it takes no arguments that could be wrong
        return _fail(2, str(error))
    except (NoDeviceError, compiler.CompileError, OSError) as error:
        return _fail(1, str(error))
    except KeyboardInterrupt:
        return _fail(130, "interrupted")
    return 0


def _fail(code: int, message: str) -> int:
    print(f"cupy_flash: {' '.join(message.split())}", file=sys.stderr)
    return code


# --- The arguments --------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description="Without a command: run attention, forward and backward, at a real "
        "size on the GPU, or on the CPU where there is none, and print time, memory "
        "and error.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(run=_demonstrate)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, run: Callable[[Any], None], text: str) -> _Parser:
        about = text[0].upper() + text[1:] + "."
        sub = commands.add_parser(name, help=text, description=about)
        sub.set_defaults(run=run)
        return sub

    command("info", _info, "show versions, GPUs and the folder of compiled kernels")
    _add_explain(
        command("explain", _explain, "say how a call would be computed, on any GPU")
    )
    _add_precompile(
        command("precompile", _precompile, "compile kernels before their first use")
    )
    return parser


def _add_explain(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("sizes")

    def size(name: str, default: int | None, text: str) -> None:
        sizes.add_argument(name, type=_count, default=default, metavar="N", help=text)

    size("--batch", 4, "sequences, default %(default)s")
    size("--seqlen", 4096, "queries of a sequence, default %(default)s")
    size("--kv-seqlen", None, "keys of a sequence, default as many as queries")
    size("--heads", 16, "query heads, default %(default)s")
    size("--kv-heads", None, "heads of k and v, default as many as query heads")
    size("--head-dim", 64, "channels of a head of q and k, default %(default)s")
    parser.add_argument(
        "--dtype", type=_dtype, default="fp16",
        help="fp16, bf16, fp32 or fp64, default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--layout", choices=("bshd", "bhsd"), default="bshd", help="default %(default)s"
    )
    _add_options(parser, "forward")
    parser.add_argument(
        "--lengths", action="store_true", help="the call has q_lengths and k_lengths"
    )


def _add_precompile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all",
        action="store_true",
        help="every dtype and head size, with and without causal masking: minutes",
    )
    parser.add_argument(
        "--head-dim", type=_counts, default="64,128", metavar="N,...",
        help="channels of a head of q and k, default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", type=_dtypes, default="fp16,bf16", metavar="NAME,...",
        help="of fp16, bf16, fp32, fp64, default %(default)s",
    )  # fmt: skip
    _add_options(parser, "both")


def _add_options(parser: argparse.ArgumentParser, direction: str) -> None:
    """Add the arguments that explain and precompile share."""
    parser.add_argument(
        "--direction", choices=("forward", "backward", "both"), default=direction,
        help="default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--arch", metavar="sm_NN",
        help="a GPU that need not be here, such as sm_86; default the present one",
    )  # fmt: skip
    options = parser.add_argument_group("options of the call")
    options.add_argument(
        "--head-dim-v",
        type=_count,
        metavar="N",
        help="channels of v, default those of q",
    )
    options.add_argument(
        "--causal", nargs="?", const=True, default=False, type=_causal,
        metavar="top_left", help="aligned at the bottom right, or at the top left",
    )  # fmt: skip
    options.add_argument(
        "--window", type=_window, metavar="LEFT,RIGHT",
        help="how many keys a query sees on each side; none is no limit",
    )  # fmt: skip
    options.add_argument(
        "--scale", type=float, metavar="X", help="default 1/sqrt(head_dim)"
    )
    options.add_argument(
        "--softcap", type=float, default=0.0, metavar="X", help="default 0, off"
    )
    options.add_argument("--alibi", action="store_true", help="with alibi_slopes")
    options.add_argument("--bias", action="store_true", help="with a bias")
    options.add_argument(
        "--bias-grad", action="store_true", help="backward: with the bias's gradient"
    )
    options.add_argument("--mask", action="store_true", help="with a boolean mask")
    options.add_argument(
        "--deterministic", action="store_true",
        help="backward: the same bits in every run",
    )  # fmt: skip
    options.add_argument(
        "--precision", choices=("tf32",), help="less than float32 is good enough"
    )
    options.add_argument(
        "--config", choices=configs.FAMILIES, help="force a kernel family"
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} isn't a number of something")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(_count, text.split(",")))


def _dtype(text: str) -> Any:
    try:
        return parse_dtype(text)
    except TypeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _dtypes(text: str) -> tuple[Any, ...]:
    return tuple(map(_dtype, text.split(",")))


def _causal(text: str) -> str:
    if text != "top_left":
        raise argparse.ArgumentTypeError(f"{text!r} is neither absent nor 'top_left'")
    return text


def _window(text: str) -> tuple[int | None, int | None]:
    try:
        left, right = (None if x == "none" else int(x) for x in text.split(","))
    except ValueError:
        message = f"{text!r} isn't like 128,0 or 128,none"
        raise argparse.ArgumentTypeError(message) from None
    return left, right


# --- The commands ---------------------------------------------------------------------


def _demonstrate(_: argparse.Namespace) -> None:
    console, notes = Console(), Console(stderr=True)
    device: Host | Gpu = Host()
    try:
        device = Gpu(current_device())
    except NoDeviceError as reason:
        notes.print(f"no GPU: {reason}", highlight=False, soft_wrap=True)
    with notes.status("compiling and measuring", spinner="line"):
        results = list(measure(device))
    size = device.size
    console.print(
        f"{device.name}: batch {size.batch}, sequence {size.seqlen}, "
        f"{size.heads} heads of {size.head_dim}",
        highlight=False,
    )
    console.print(_table_of(results))
    console.print(
        "peak: all that the call allocates, its results included\n"
        "S x S: the logits that unfused attention would store\n"
        "error: the largest difference from float64",
        style="dim", highlight=False,
    )  # fmt: skip


def _table_of(results: Sequence[Measurement]) -> Table:
    rates = [row.flops / row.seconds for row in results]
    prefix, unit = ("T", 1e12) if min(rates) > 1e12 else ("G", 1e9)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("dtype", no_wrap=True)
    table.add_column("pass", no_wrap=True)
    for title in ("ms", f"{prefix}FLOP/s", "peak MiB", "S x S MiB", "max error"):
        table.add_column(title, justify="right", no_wrap=True)
    for row, rate in zip(results, rates, strict=True):
        table.add_row(
            row.dtype,
            row.direction,
            f"{1e3 * row.seconds:.2f}",
            f"{rate / unit:.1f}",
            f"{row.peak_bytes / MIB:.0f}",
            f"{row.square_bytes / MIB:.0f}",
            f"{row.error:.1e}",
        )
    return table


def _info(_: argparse.Namespace) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("cupy_flash", f"{__version__}, {Path(__file__).parent}")
    table.add_row("CUDA sources", str(compiler.source_root()))
    table.add_row("Python", f"{platform.python_version()}, {sys.executable}")
    for package in ("numpy", "ml_dtypes", *_cupy_packages(), "torch", "jax"):
        table.add_row(package, _version(package))
    table.add_row("NVRTC", _nvrtc())
    for name, value in _gpus():
        table.add_row(name, value)
    table.add_row("compiled kernels", _cache())
    table.add_row("debug checks", "on" if settings.debug else "off")
    Console().print(table, markup=False, highlight=False)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cupy_packages() -> list[str]:
    """Return the installed packages that hold CuPy; more than one is a mistake."""
    found = importlib.metadata.packages_distributions().get("cupy", ["cupy"])
    return sorted(set(found))


def _nvrtc() -> str:
    major, minor = compiler.nvrtc_version()
    return f"{major}.{minor}" if major else "not found"


def _gpus() -> list[tuple[str, str]]:
    try:
        current = current_device()
    except NoDeviceError as reason:
        return [("GPU", f"none: {reason}")]
    return [(f"GPU {current.index}", _facts(current.info))] + [
        (f"GPU {index}", _facts(CuPyDevice(index).info))
        for index in range(current.count())
        if index != current.index
    ]


def _facts(info: DeviceInfo) -> str:
    major, minor = divmod(info.compute_capability, 10)
    return (
        f"{info.name}, compute capability {major}.{minor}, {info.multiprocessors} "
        f"multiprocessors, {info.shared_memory // 1024} KiB shared memory a block"
    )


def _cache() -> str:
    folder = settings.cache_folder()
    files = [path for path in folder.glob("*") if path.suffix in (".cubin", ".ptx")]
    size = sum(path.stat().st_size for path in files) / MIB
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    writable = os.access(existing, os.W_OK) and existing.is_dir()
    note = "" if writable else ", can't be written: they are kept in memory"
    return f"{len(files)}, {size:.1f} MiB, in {folder}{note}"


def _explain(chosen: argparse.Namespace) -> None:
    device = device_named(chosen.arch)
    console = Console()
    for direction in directions(chosen.direction):
        backward = direction == "backward"
        options = Options(
            direction, chosen.causal, chosen.window, chosen.scale, chosen.softcap,
            chosen.layout, chosen.precision, return_lse=not backward,
            bias_grad=chosen.bias_grad and backward,
            deterministic=chosen.deterministic, config=chosen.config,
        )  # fmt: skip
        call = Call(
            options, chosen.dtype, chosen.head_dim,
            chosen.head_dim_v or chosen.head_dim, chosen.batch, chosen.seqlen,
            chosen.kv_seqlen or chosen.seqlen, chosen.heads,
            chosen.kv_heads or chosen.heads, chosen.alibi, chosen.bias, chosen.mask,
            chosen.lengths,
        )  # fmt: skip
        text = str(call.plan(device))
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _precompile(chosen: argparse.Namespace) -> None:
    device = device_named(chosen.arch)
    columns = ("compiling", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)
        made = precompile(
            chosen.head_dim, chosen.dtype, head_dim_v=chosen.head_dim_v,
            causal=chosen.causal, window=chosen.window, scale=chosen.scale,
            softcap=chosen.softcap, alibi=chosen.alibi, bias=chosen.bias,
            bias_grad=chosen.bias_grad, mask=chosen.mask, direction=chosen.direction,
            precision=chosen.precision, deterministic=chosen.deterministic,
            config=chosen.config, all=chosen.all, device=chosen.arch,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
        total = int(bar.tasks[0].total or 0)
    Console().print(
        f"{device.name}: {made} kernels compiled, {total - made} were there, in "
        f"{settings.cache_folder()}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
