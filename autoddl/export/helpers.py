"""The helper sections of exported files: of :mod:`autoddl.export.parts` the definitions that a file needs, and no others.

The parts are read as text.  A definition is needed if the file names it, or if one that is needed does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["PARTS", "PIPELINE_PARTS", "HelperText", "helper_text", "known_names"]

#: The modules of :mod:`.parts` that files without a pipeline are made from, and those with one.
PARTS = ("ranks", "blocks", "exchanges", "layers", "plain", "training")
PIPELINE_PARTS = ("workers", "pipeline", *PARTS)
#: What stands between a file's sections of helpers.
_TITLES = {
    "workers": "The ranks of a worker",
    "pipeline": "The pipeline",
    "ranks": "Collectives along one mesh axis",
    "blocks": "Parameters in blocks",
    "exchanges": "Blocks from rank to rank",
    "layers": "Layers on one rank",
    "plain": "The plain model",
    "training": "Values and training",
}


@dataclass(frozen=True)
class _Definition:
    """A top-level statement of a part: the names that it binds and reads, and its text."""

    part: str
    names: frozenset[str]
    reads: frozenset[str]
    text: str


@dataclass(frozen=True)
class HelperText:
    """What goes into a file.

    Attributes:
        standard: import lines of the standard library.
        installed: import lines of numpy and OneFlow.
        first: definitions that the file needs while it is loaded.
        sections: (title, text) of the others.
    """

    standard: tuple[str, ...]
    installed: tuple[str, ...]
    first: str
    sections: tuple[tuple[str, str], ...]


def helper_text(
    used: Iterable[str], first: Iterable[str], given: Iterable[str], parts: Sequence[str] = PARTS
) -> HelperText:
    """The helpers of a file.

    Args:
        used: names that the file uses.
        first: those that it uses while it is loaded.
        given: those that it defines itself.
        parts: where they are from; of the same name that of the first one counts.
    """
    given, imports = set(given), _imports()
    early = _closure(first, given, parts)
    late = [definition for definition in _closure(used, given, parts) if definition not in early]
    reads = {name for definition in (*early, *late) for name in definition.reads} | set(used)
    standard, installed = _import_lines({name: imports[name] for name in reads & set(imports)})
    sections = []
    for part in parts:
        texts = [definition.text for definition in late if definition.part == part]
        if texts:
            sections.append((_TITLES[part], _spaced(texts)))
    return HelperText(standard, installed, _spaced([definition.text for definition in early]), tuple(sections))


def known_names() -> frozenset[str]:
    """All names that helpers have, imported ones included: variables of a file are to be called otherwise."""
    return frozenset(name for definition in _definitions() for name in definition.names) | frozenset(_imports())


def _closure(names: Iterable[str], given: set[str], parts: Sequence[str]) -> list[_Definition]:
    among = [definition for part in reversed(parts) for definition in _definitions() if definition.part == part]
    by_name = {name: definition for definition in among for name in definition.names}
    waiting, found = set(names), set()
    while waiting:
        name = waiting.pop()
        if name in given or name not in by_name or by_name[name] in found:
            continue
        found.add(by_name[name])
        waiting |= by_name[name].reads
    return [definition for definition in _definitions() if definition in found]


@cache
def _trees() -> dict[str, tuple[str, ast.Module]]:
    texts = {
        part: (Path(__file__).with_name("parts") / f"{part}.py").read_text(encoding="utf-8") for part in PIPELINE_PARTS
    }
    return {part: (text, ast.parse(text)) for part, text in texts.items()}


@cache
def _definitions() -> tuple[_Definition, ...]:
    found = []
    for part, (text, tree) in _trees().items():
        lines = text.splitlines()
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names, start = {node.name}, min([node.lineno, *(d.lineno for d in node.decorator_list)])
            elif isinstance(node, ast.Assign):
                names = {leaf.id for target in node.targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
                start = node.lineno
            else:
                continue
            while lines[start - 2].startswith("#:"):
                start -= 1
            reads = {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)} - names
            body = "\n".join(lines[start - 1 : node.end_lineno])
            found.append(_Definition(part, frozenset(names), frozenset(reads), body))
    return tuple(found)


@cache
def _imports() -> dict[str, tuple[str, str]]:
    """For each imported name its (module, name in the module; "" for the module itself)."""
    found = {}
    for _, tree in _trees().values():
        for node in tree.body:
            if isinstance(node, ast.Import):
                found.update({alias.asname or alias.name: (alias.name, "") for alias in node.names})
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module != "__future__":
                found.update({alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names})
    return found


def _import_lines(imports: dict[str, tuple[str, str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    modules: dict[str, set[str]] = {}
    plain = set()
    for name, (module, member) in imports.items():
        if member:
            modules.setdefault(module, set()).add(member)
        else:
            plain.add(f"import {module}" if module == name else f"import {module} as {name}")
    from_lines = [f"from {module} import {', '.join(sorted(members))}" for module, members in modules.items()]

    def ours(line: str) -> bool:
        return line.split()[1].split(".")[0] in ("numpy", "oneflow")

    lines = [*sorted(plain), *sorted(from_lines)]
    return tuple(line for line in lines if not ours(line)), tuple(line for line in lines if ours(line))


def _spaced(texts: Iterable[str]) -> str:
    """Definitions with two empty lines around functions and classes, assignments together."""
    result, was_long = "", False
    for text in texts:
        is_long = text.startswith(("def ", "class ", "@"))
        if result:
            result += "\n\n\n" if is_long or was_long else "\n"
        result += text
        was_long = is_long
    return result
