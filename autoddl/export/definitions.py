"""Python modules read as text: their top-level definitions, and what each of these reads."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

__all__ = ["Definition", "SourceModule", "module_text"]


@dataclass(frozen=True)
class Definition:
    """A top-level statement of a module.

    Attributes:
        names: that it binds.
        reads: names in it; ``reads_early`` those that it needs when the file is loaded, not in the bodies of functions.
        text: as it stands in the module; its name alone where nothing but annotations reads it.
    """

    module: str
    line: int
    names: frozenset[str]
    reads: frozenset[str]
    reads_early: frozenset[str]
    text: str


@dataclass(frozen=True)
class SourceModule:
    """A module as text: its definitions by name, and where the other names of it are from: (module, name there)."""

    definitions: Mapping[str, Definition]
    imports: Mapping[str, tuple[str, str]]


@cache
def module_text(name: str) -> SourceModule:
    """A module of the package, or one that is loaded."""
    if name.split(".")[0] == "autoddl":
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None, name
        path = spec.origin
    else:  # a user's file may be loaded under any name
        path = str(sys.modules[name].__file__)
    text = Path(path).read_text(encoding="utf-8")
    lines, tree = text.splitlines(), ast.parse(text)
    definitions: dict[str, Definition] = {}
    imports: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            imports.update({alias.asname or alias.name: (alias.name, "") for alias in node.names})
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            origin = ".".join(filter(None, [*(name.split(".")[: -node.level] if node.level else ()), node.module]))
            imports.update({alias.asname or alias.name: (origin, alias.name) for alias in node.names})
        elif bound := _bound(node):
            definition = _definition(name, node, bound, lines)
            definitions.update(dict.fromkeys(bound, definition))
    return SourceModule(definitions, imports)


def _bound(node: ast.stmt) -> frozenset[str]:
    """The names that a definition binds; none where a statement is none."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return frozenset({node.name})
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
    return frozenset(names - {"__all__", "flow"})


def _definition(module: str, node: ast.stmt, names: frozenset[str], lines: list[str]) -> Definition:
    if _is_for_annotations(node):
        return Definition(module, node.lineno, names, frozenset(), frozenset(), f"{min(names)} = Any")
    start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    while lines[start - 2].startswith("#:"):
        start -= 1
    body = "\n".join(lines[start - 1 : node.end_lineno])
    reads = _names_in(node)
    return Definition(module, node.lineno, names, reads - names, _reads_early(node) - names, body)


def _is_for_annotations(node: ast.stmt) -> bool:
    """Whether it is an interface or a union of types: nothing but annotations reads it, so a file has its name alone."""
    if isinstance(node, ast.ClassDef):
        return "Protocol" in map(ast.unparse, node.bases)
    return isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Union[")


def _reads_early(node: ast.AST) -> frozenset[str]:
    """Names that are needed when the file is loaded: those of neither bodies of functions nor annotations."""
    parts: list[ast.AST | None] = []
    inner: list[ast.stmt] = []
    if isinstance(node, ast.FunctionDef):
        parts = [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]
    elif isinstance(node, ast.ClassDef):
        parts, inner = [*node.decorator_list, *node.bases], node.body
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.Expr)):
        parts = [node.value]
    return frozenset().union(*(_names_in(part) for part in parts if part), *map(_reads_early, inner))


def _names_in(node: ast.AST) -> frozenset[str]:
    return frozenset(leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name))
