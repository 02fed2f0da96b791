"""What a Markdown document holds: blocks, programs, commands, links and options."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEED_GPU = {"cupy", "cupyx", "torch", "jax"}


@dataclass(frozen=True)
class Block:
    """A fenced block, the number of its first line and the heading that it is under."""

    language: str
    code: str
    line: int
    section: str


def lines_and_blocks(text: str) -> Iterator[tuple[int, str | Block]]:
    """Yield the lines outside fenced blocks, and the blocks, with line numbers."""
    lines = enumerate(text.splitlines(), start=1)
    section = ""
    for number, line in lines:
        fence = re.match(r"( *)(`{3,}|~{3,})\s*([^\s`]*)", line)
        if not fence:
            if heading := re.match(r"#{1,6} +(.+)", line):
                section = f"{heading[1]} (line {number})"
            yield number, line
            continue
        indent, marks, language = fence.groups()
        code = []
        for _, inside in lines:
            if re.fullmatch(rf" *{marks}{marks[0]}* *", inside):
                break
            code.append(inside.removeprefix(indent) + "\n")
        else:
            raise ValueError(f"line {number}: the block is never closed")
        yield number, Block(language, "".join(code), number + 1, section)


def blocks_of(text: str) -> list[Block]:
    """Return a document's fenced blocks."""
    return [item for _, item in lines_and_blocks(text) if isinstance(item, Block)]


def with_output(text: str) -> Iterator[tuple[Block, str | None]]:
    """Yield the blocks and, of each, the `text` that is next in its section."""
    blocks = blocks_of(text)
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        output = following is not None and (
            (following.language, following.section) == ("text", block.section)
        )
        yield block, following.code if following and output else None


def prose_of(text: str) -> str:
    """Return a document without its blocks and without code in its lines."""
    lines = [item for _, item in lines_and_blocks(text) if isinstance(item, str)]
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", "\n".join(lines), flags=re.S)


@dataclass(frozen=True)
class Step:
    """A Python block, what it should print, and whether it needs a GPU."""

    block: Block
    expected: str | None
    gpu: bool


def imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def bound_names(tree: ast.Module) -> set[str]:
    """Return the names that a program defines, at its top or further in."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return names


def steps_of(text: str) -> dict[str, list[Step]]:
    """Return the Python blocks of each section that has some.

    A block needs a GPU if it imports what does, or if it reads a name that a block
    with that need was the last to define.
    """
    sections: dict[str, list[Step]] = {}
    on_gpu: dict[tuple[str, str], bool] = {}
    for block, printed in with_output(text):
        if block.language != "python":
            continue
        # At its lines of the file, so that a syntax error names the right one.
        tree = ast.parse("\n" * (block.line - 1) + block.code, "README.md")
        parts = {part for name in imported_modules(tree) for part in name.split(".")}
        bound = bound_names(tree)
        read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        gpu = bool(parts & NEED_GPU) or any(
            on_gpu.get((block.section, name), False) for name in read - bound
        )
        on_gpu.update({(block.section, name): gpu for name in bound})
        sections.setdefault(block.section, []).append(Step(block, printed, gpu))
    return sections


def matches(expected: str, found: str) -> bool:
    """Whether a text is as expected, spaces at the ends of lines aside."""
    expected, found = (
        "\n".join(line.rstrip() for line in text.strip().splitlines())
        for text in (expected, found)
    )
    parts = (re.escape(part) for part in expected.split("…"))
    return re.fullmatch(".*?".join(parts), found, re.DOTALL) is not None


def missing_names(code: str) -> set[str]:
    """Return what a block imports from cupy_flash that isn't there, by its source."""
    missing = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            for name in (alias.name for alias in node.names):
                if name.partition(".")[0] == "cupy_flash" and not source_of(name):
                    missing.add(name)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.partition(".")[0] != "cupy_flash":
                continue
            source = source_of(module)
            names = bound_names(ast.parse(source.read_text("utf-8"))) if source else ()
            missing |= {
                f"{module}.{alias.name}"
                for alias in node.names
                if alias.name not in names and not source_of(f"{module}.{alias.name}")
            }
    return missing


def source_of(module: str) -> Path | None:
    """Return the file of a module of this repository, without importing it."""
    path = ROOT.joinpath(*module.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in found if file.is_file()), None)


@dataclass(frozen=True)
class Command:
    """One command of a shell block, without what stands before and after `&&`."""

    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    line: int
    expected: str | None = None  # what it should print


def commands_of(text: str) -> list[Command]:
    """Return the commands of the blocks `sh` (each line) and `console` (after $)."""
    found = []
    for block, printed in with_output(text):
        if block.language not in ("sh", "console"):
            continue
        in_block = []
        for line, whole in enumerate(block.code.splitlines(), start=block.line):
            if block.language == "console":
                if not whole.startswith("$ "):
                    continue
                whole = whole.removeprefix("$ ")
            for part in whole.split(" && "):
                words = shlex.split(part, comments=True)
                variables = []
                while words and re.match(r"\w+=", words[0]):
                    name, _, value = words.pop(0).partition("=")
                    variables.append((name, value))
                if words:
                    in_block.append(Command(tuple(words), tuple(variables), line))
        if printed is not None and in_block:  # the last command's
            in_block[-1] = dataclasses.replace(in_block[-1], expected=printed)
        found += in_block
    return found


def anchors_of(text: str) -> set[str]:
    """Return the names that GitHub gives to the headings."""
    anchors: set[str] = set()
    for _, line in lines_and_blocks(text):
        if not isinstance(line, str) or not (head := re.match(r"#{1,6} +(.+)", line)):
            continue
        words = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", head[1]).strip().lower()
        name = again = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = 0
        while again in anchors:
            number += 1
            again = f"{name}-{number}"
        anchors.add(again)
    return anchors


def dead_links(path: Path) -> set[str]:
    """Return the links in a document that lead nowhere in the repository."""
    text = path.read_text(encoding="utf-8")
    prose = prose_of(text)
    links = re.findall(r"\]\(\s*<?([^\s)>]+)", prose)
    links += re.findall(r"\b(?:href|src|srcset)=\"([^\"\s]+)", prose)
    links += re.findall(r"^\[[^\]]+\]:\s+<?([^\s>]+)", prose, re.MULTILINE)
    dead = set()
    for link in links:
        address = urllib.parse.urlsplit(link)
        if address.scheme:
            continue
        target = path.parent / urllib.parse.unquote(address.path)
        if not address.path:
            target = path
        if link.startswith("/") or not target.exists():
            dead.add(link)
        elif address.fragment and address.fragment not in anchors_of(
            target.read_text(encoding="utf-8")
        ):
            dead.add(link)
    return dead


def option_table(text: str) -> tuple[set[str], set[str]]:
    """Return the names in the first column of the options' table, and all names in it.

    The table is the one whose first column is headed "argument".
    """
    first, every = set(), set()
    inside = False
    for _, line in lines_and_blocks(text):
        cells = re.split(r"(?<!\\)\|", line)[1:-1] if isinstance(line, str) else []
        inside = bool(cells) and (inside or cells[0].strip() == "argument")
        if inside:
            first |= set(re.findall(r"`([A-Za-z_]\w*)", cells[0]))
            every |= set(re.findall(r"`([A-Za-z_]\w*)", " ".join(cells)))
    return first, every
