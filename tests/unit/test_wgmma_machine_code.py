"""The machine code of the family `wgmma`, for every tile of its tables, without a GPU.

What is looked for here costs the kernel its speed and changes no result: products that
wait for each other, registers that spill, exponentials outside the time of a product.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupy_flash import compiler
from cupy_flash.configs import (
    WGMMA_BACKWARD,
    WGMMA_DEPTHS,
    WGMMA_FORWARD,
    WgmmaTile,
)
from cupy_flash.plan_wgmma import _NVRTC, _NVRTC_GRADIENTS
from cupy_flash.spec import KernelSpec
from cupy_flash.tiles import _HOPPER_REGISTERS
from cupy_flash.variant import Variant

BF16, FP16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
PLAIN, CAUSAL = Variant(), Variant(right=True)
WINDOW = Variant(left=True, right=True)
# Registers of a thread by the number of consumers, those of forward.cuh: of one that
# computes, and of one that loads.
BUDGET = {
    consumers: (registers, 32 if consumers > 2 else 40)
    for consumers, registers in _HOPPER_REGISTERS.items()
}
BACKWARD_BUDGET = (240, 24)  # those of backward.cuh
# Of the warpgroups that each make other products: those of backward_by_role.cuh.
ROLES = {"values": 208, "keys": 216, "queries": 64, "supply": 24}
# Bytes that the threads which supply the gradients may spill, as they have the fewest
# registers that there can be: they plan a block's keys while others are computed.
SUPPLY_SPILL = 96
# What adds a lane's part of dQ, by fours.
ADDITION = r"REDG\.E\.ADD\.F32x4\."
# ptxas makes products wait that could overlap, for one reason or another. The first two
# are about registers, and C7519 is harmless: it only names a wait.
SERIALISED = {7507, 7508, *range(7510, 7519), 7520}


def tiles() -> Iterator[tuple[WgmmaTile, bool]]:
    """Yield the first choice of each row, and whether its queries see other keys."""
    for row in WGMMA_FORWARD:
        sizes = [(row.max_depth, row.max_depth_v)]
        sizes += [(96, 96)] if row.max_depth == 128 else []
        for (d, dv), banded in itertools.product(sizes, (False, True)):
            tile = row.tile(d, dv, row.min_keys, banded)
            if tile is not None:
                yield tile, banded


def kernels() -> Iterator[KernelSpec]:
    """Yield each tile with bfloat16, one also with float16."""
    found = list(dict.fromkeys(tiles()))
    for tile, banded in found:
        variant = CAUSAL if banded else PLAIN
        yield KernelSpec("wgmma", "forward", BF16, variant, tile, tile.threads, 1)
    tile, _ = found[0]
    yield KernelSpec("wgmma", "forward", FP16, PLAIN, tile, tile.threads, 1)


def backward_kernels() -> Iterator[KernelSpec]:
    """Yield each tile with bfloat16 in all its variants, and once with float16."""
    for tile in WGMMA_BACKWARD:
        kernel = "backward_by_role" if tile.by_role else "backward"
        for dtype, variant in (
            (BF16, PLAIN), (BF16, CAUSAL), (BF16, WINDOW), (FP16, CAUSAL)
        ):  # fmt: skip
            yield KernelSpec("wgmma", kernel, dtype, variant, tile, tile.threads, 1)


def test_the_head_sizes_that_are_looked_at() -> None:
    assert {tile.depth for tile, _ in tiles()} == set(WGMMA_DEPTHS)


# --- What ptxas says ------------------------------------------------------------------


def compiled(spec: KernelSpec) -> compiler.Image:
    """Compile a kernel; the log tells about registers and memory."""
    flags, suffix = compiler.options(90, architecture_specific=True)
    source = compiler.source_text(spec)
    flags = (*flags, "--ptxas-options=-v")
    return compiler._compile(source, spec.symbol, flags, suffix)


def check_log(log: str, spill: int = 0) -> None:
    """At most so many bytes are spilled, and no products wait for each other."""
    found = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    assert found is not None and max(map(int, found.groups())) <= spill, log
    warnings = {int(number) for number in re.findall(r"\bC(75\d\d)\b", log)}
    assert not warnings & SERIALISED, log
    assert "setmaxnreg ignored" not in log


# --- What nvdisasm shows --------------------------------------------------------------


@functools.cache
def nvdisasm() -> str | None:
    """Return NVIDIA's disassembler: of the package, or of a toolkit."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    paths = [str(file.locate()) for file in files if Path(file).stem == "nvdisasm"]
    return next(iter(paths), shutil.which("nvdisasm"))


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name with all suffixes, and the whole text."""

    name: str
    text: str

    @property
    def targets(self) -> list[str]:
        """Labels that it may lead to."""
        return re.findall(r"`\((\.L\w+)\)", self.text)

    @property
    def goes_on(self) -> bool:
        """Whether the next instruction may follow."""
        ends = self.name.partition(".")[0] in ("EXIT", "BRA", "RET")
        return not ends or self.text.startswith("@")

    @property
    def registers(self) -> Iterator[int]:
        """The registers that it names, and all that a product sums up in."""
        numbers = [int(n) for n in re.findall(r"\bR(\d+)\b", self.text)]
        yield from numbers
        shape = re.match(r"HGMMA\.64x(\d+)x16\.", self.name)
        if shape is not None:
            yield numbers[0] + int(shape[1]) // 2 - 1


@dataclass(frozen=True)
class Code:
    """A kernel's instructions, and where its labels are."""

    instructions: Sequence[Instruction]
    labels: dict[str, int]

    def positions(self, pattern: str) -> list[int]:
        """Return where there are instructions of a name."""
        return [n for n, x in enumerate(self.instructions) if re.match(pattern, x.name)]

    def count(self, pattern: str, begin: int, end: int) -> int:
        """Return how many instructions of a name there are from a place to another."""
        return sum(begin <= n < end for n in self.positions(pattern))

    def parts(self) -> dict[int, Code]:
        """Return the code of each warpgroup, by the registers that it asks for."""
        found = {}
        for start in self.positions("USETMAXREG"):
            number = re.search(r"\b0x[0-9a-f]+", self.instructions[start].text)
            own = [self.instructions[n] for n in sorted(self.reachable(start))]
            found[int(number[0], 16)] = Code(own, {})
        return found

    def reachable(self, start: int) -> set[int]:
        """Return where a thread may come from a place on."""
        seen: set[int] = set()
        todo = [start]
        while todo:
            at = todo.pop()
            if at in seen or at >= len(self.instructions):
                continue
            seen.add(at)
            instruction = self.instructions[at]
            todo += [self.labels[t] for t in instruction.targets if t in self.labels]
            if instruction.goes_on:
                todo.append(at + 1)
        return seen


def disassembled(code: bytes, folder: Path) -> Code:
    path = folder / "kernel.cubin"
    path.write_bytes(code + b"\0")
    listing = subprocess.run(
        [nvdisasm(), "-c", str(path)], check=True, capture_output=True, text=True
    ).stdout
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        label = re.match(r"(\.L\w+):", line)
        if label is not None:
            labels[label[1]] = len(instructions)
        found = re.match(r"\s+/\*[0-9a-f]+\*/\s+((?:@\S+\s+)?(\S+).*);", line)
        if found is not None:
            name = found[1].split()[1] if found[1].startswith("@") else found[2]
            instructions.append(Instruction(name, found[1]))
    assert instructions, "nvdisasm shows no code"
    return Code(instructions, labels)


def check_registers(code: Code, budgets: tuple[int, int]) -> None:
    """Each side keeps within what it has asked for."""
    for name, budget in zip(("TRY_ALLOC", "DEALLOC"), budgets, strict=True):
        (start,) = code.positions(rf"USETMAXREG\.{name}\b")
        assert f"{budget:#x}" in code.instructions[start].text
        reached = [code.instructions[n] for n in code.reachable(start)]
        highest = max(n for x in reached for n in x.registers)
        assert highest < budget, f"{name}: R{highest}"
        products = [x for x in reached if x.name.startswith("HGMMA")]
        assert bool(products) == (name == "TRY_ALLOC")


def check_products(code: Code, tile: WgmmaTile) -> None:
    """Three pieces of code: the first tile, all that follow, the last product with V.

    The exponentials of a tile stand where its predecessor's weights are multiplied
    with V: after the wait for its logits, before that for the output.
    """
    logits = rf"HGMMA\.64x{tile.columns}x16\."
    output = rf"HGMMA\.64x{tile.depth_v}x16\."
    of_depth, of_columns = tile.depth // 16, tile.columns // 16
    products = code.positions("HGMMA")
    assert len(products) == 2 * of_depth + 2 * of_columns
    assert len(code.positions(r"WARPGROUP\.ARRIVE")) == 4
    waits = code.positions(r"WARPGROUP\.DEPBAR")
    pending = [code.instructions[n].text.rpartition(", ")[2].strip() for n in waits]
    assert pending == ["0x0", "0x1", "0x0", "0x0"]
    first, of_logits, of_output, last = waits
    assert code.count(logits, 0, first) == of_depth
    assert code.count("HGMMA", first, of_logits) == of_depth + of_columns
    assert code.count(logits, first, of_logits) >= of_depth
    assert code.count(output, first, of_logits) >= of_columns
    assert code.count("HGMMA", of_logits, of_output) == 0
    assert code.count(output, of_output, last) == of_columns
    assert products[-1] < last
    exponentials = tile.columns // 2  # of a thread
    begin = next(n for n in products if n > first)
    assert code.count(r"MUFU\.EX2", begin, of_logits) == 0
    assert code.count(r"MUFU\.EX2", of_logits, of_output) >= exponentials
    assert code.count(r"MUFU\.EX2", of_output, len(code.instructions)) == 0


def check_backward_products(code: Code, tile: WgmmaTile) -> None:
    """One loop with all five products, and dQ of its last tile after it.

    Exponentials follow the wait for the logits. A warp writes dS by matrices, and each
    lane adds its part of dQ by fours.
    """
    of_rows, of_columns = tile.rows // 16, tile.columns // 16
    by_queries = tile.columns == tile.rows  # how two consumers divide a tile of dQ
    of_dq = tile.depth if by_queries else tile.depth // 2
    in_loop = {"logits": tile.depth // 16, "dP": tile.depth_v // 16}
    in_loop |= {"dV": of_columns, "dK": of_columns, "dQ": of_rows}
    shapes = [tile.columns] * (in_loop["logits"] + in_loop["dP"])
    shapes += [tile.depth_v] * of_columns + [tile.depth] * of_columns
    shapes += [of_dq] * 2 * of_rows
    names = [code.instructions[n].name for n in code.positions("HGMMA")]
    found = [int(re.match(r"HGMMA\.64x(\d+)x16\.", name)[1]) for name in names]
    assert sorted(found) == sorted(shapes)
    waits = code.positions(r"WARPGROUP\.DEPBAR")
    of_logits, *_, end_of_loop, last = waits
    assert code.count("HGMMA", 0, end_of_loop) == sum(in_loop.values())
    assert code.count(rf"HGMMA\.64x{of_dq}x16\.", end_of_loop, last) == of_rows
    logits = rf"HGMMA\.64x{tile.columns}x16\."
    assert code.count(logits, 0, of_logits) == in_loop["logits"] + in_loop["dP"]
    exponentials = tile.columns // 2  # of a thread
    assert len(code.positions(r"MUFU\.EX2")) == exponentials
    assert code.count(r"MUFU\.EX2", of_logits, end_of_loop) == exponentials
    assert len(code.positions(r"STSM\.16\.MT88\.4")) == of_columns
    assert code.count(r"STSM", 0, end_of_loop) == of_columns
    assert code.count(ADDITION, 0, end_of_loop) == of_dq // 8
    assert code.count(ADDITION, last, len(code.instructions)) == of_dq // 8
    assert len(code.positions("REDG")) == 2 * of_dq // 8


def check_supply(code: Code, supply: int) -> None:
    """The threads that supply the others alone claim keys, and use local memory."""
    parts = code.parts()
    assert code.positions("ATOM")
    for pattern in ("ATOM", "LDL|STL"):
        found = {n: len(part.positions(pattern)) for n, part in parts.items()}
        assert found == dict.fromkeys(parts, 0) | {supply: len(code.positions(pattern))}
    assert not parts[supply].positions(r"HGMMA|REDG|STSM|MUFU\.EX2")


def check_roles(code: Code, tile: WgmmaTile) -> None:
    """Each warpgroup makes its own products, those of the next tile behind the sums."""
    parts = code.parts()
    assert len(code.positions("USETMAXREG")) == len(ROLES)
    assert set(parts) == set(ROLES.values())
    for registers, part in parts.items():
        assert max(n for x in part.instructions for n in x.registers) < registers
    values, keys, queries, _ = (parts[registers] for registers in ROLES.values())
    of_tile = tile.rows // 16  # products along the queries, or keys, of a tile
    # S or dP; behind the sums, in halves if there are many channels, that of the next.
    for part, along, channels in (
        (values, tile.depth, tile.depth_v), (keys, tile.depth_v, tile.depth)
    ):  # fmt: skip
        halves = 2 if channels > 192 else 1
        ahead = [tile.columns] * (along // 16)
        sums = [channels // halves] * halves * of_tile
        assert shapes(part) == ahead + [0] + sums + ahead + [0]
    assert shapes(queries) == ([64] * of_tile + [0]) * (tile.depth // 64)
    # P between the waits of those who make it, dS between those of the others.
    for part, pattern, count in (
        (values, r"MUFU\.EX2", tile.columns // 2), (keys, r"STSM\.16\.MT88\.4", of_tile)
    ):  # fmt: skip
        begin, end = part.positions(r"WARPGROUP\.DEPBAR")
        assert part.count(pattern, begin, end) == count
        assert len(code.positions(pattern)) == count
    waits = [*queries.positions(r"WARPGROUP\.DEPBAR"), len(queries.instructions)]
    for begin, end in itertools.pairwise(waits):
        assert queries.count(ADDITION, begin, end) == tile.columns // 8
    assert len(code.positions("REDG")) == tile.depth // 8


def shapes(code: Code) -> list[int]:
    """Return the columns of the products in their order; 0 is a wait for all."""
    found = []
    for instruction in code.instructions:
        shape = re.match(r"HGMMA\.64x(\d+)x16\.", instruction.name)
        if shape is not None:
            found.append(int(shape[1]))
        elif instruction.name.startswith("WARPGROUP.DEPBAR"):
            assert instruction.text.rpartition(", ")[2].strip() == "0x0"
            found.append(0)
    return found


def code_of(
    spec: KernelSpec, folder: Path, oldest: tuple[int, int] = _NVRTC, spill: int = 0
) -> Code:
    """Compile a kernel, look at what ptxas says, and return the instructions."""
    if compiler.nvrtc_version() < oldest:
        pytest.skip("this NVRTC doesn't compile the kernel")
    image = compiled(spec)
    check_log(image.log, spill)
    if nvdisasm() is None:
        pytest.skip("no nvdisasm; what ptxas says is as it should be")
    code = disassembled(image.code, folder)
    assert spill or not code.positions(r"LDL|STL"), "local memory"
    return code


@pytest.mark.parametrize("spec", list(kernels()), ids=lambda spec: spec.symbol)
def test_machine_code(spec: KernelSpec, tmp_path: Path) -> None:
    code = code_of(spec, tmp_path)
    check_registers(code, BUDGET[spec.tile.consumers])
    check_products(code, spec.tile)


def gradients(*, by_role: bool) -> pytest.MarkDecorator:
    """Run a test with each kernel of the gradients that is made so."""
    specs = [spec for spec in backward_kernels() if spec.tile.by_role == by_role]
    return pytest.mark.parametrize("spec", specs, ids=lambda spec: spec.symbol)


@gradients(by_role=False)
def test_machine_code_of_gradients(spec: KernelSpec, tmp_path: Path) -> None:
    code = code_of(spec, tmp_path, _NVRTC_GRADIENTS, SUPPLY_SPILL)
    check_registers(code, BACKWARD_BUDGET)
    check_supply(code, BACKWARD_BUDGET[1])
    check_backward_products(code, spec.tile)


@gradients(by_role=True)
def test_machine_code_by_role(spec: KernelSpec, tmp_path: Path) -> None:
    code = code_of(spec, tmp_path, spill=SUPPLY_SPILL)
    check_supply(code, ROLES["supply"])
    check_roles(code, spec.tile)


def test_registers_by_role_are_those_of_the_launch() -> None:
    """None is left over, and none is waited for."""
    for tile in WGMMA_BACKWARD:
        if tile.by_role:
            most = 65536 // tile.threads // 8 * 8
            assert sum(ROLES.values()) * 128 == most * tile.threads
