"""Reads Python modules as text: their top-level definitions, and the names that each definition uses."""

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
    """A top-level definition of a module: a function, a class or an assignment.

    Attributes:
        module: name of the module.
        line: line number of the definition.
        names: names that it defines.
        reads: other names that occur in it.
        reads_early: those of `reads` that are needed when Python loads the file: not in bodies of functions, not in annotations.
        text: source text, with decorators and ``#:`` comments. For interfaces and unions of types, which only annotations use,
            ``NAME = Any``.
    """

    module: str
    line: int
    names: frozenset[str]
    reads: frozenset[str]
    reads_early: frozenset[str]
    text: str


@dataclass(frozen=True)
class SourceModule:
    """The definitions and imports of a module.

    Attributes:
        definitions: definitions by each name that they define.
        imports: for each imported name, its module and its name there ("" if the name is the module itself).
    """

    definitions: Mapping[str, Definition]
    imports: Mapping[str, tuple[str, str]]


@cache
def module_text(name: str) -> SourceModule:
    """Return the definitions and imports of a module.

    Args:
        name: a module of AutoDDL, which is not imported, or another module that is loaded.
    """
    if name.split(".")[0] == "autoddl":
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None, name
        path = spec.origin
    else:  # a user's file may be loaded under a name that does not lead to it
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
        elif names := _names_defined_by(node):
            definition = _definition(name, node, names, lines)
            definitions.update(dict.fromkeys(names, definition))
    return SourceModule(definitions, imports)


def _names_defined_by(node: ast.stmt) -> frozenset[str]:
    """Return the names that a statement defines; none if it is not a definition."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return frozenset({node.name})
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
    return frozenset(names - {"__all__", "flow"})


def _definition(module: str, node: ast.stmt, names: frozenset[str], lines: list[str]) -> Definition:
    if _is_only_for_annotations(node):
        return Definition(module, node.lineno, names, frozenset(), frozenset(), f"{min(names)} = Any")
    decorators = getattr(node, "decorator_list", ())
    start = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    while lines[start - 2].startswith("#:"):
        start -= 1
    text = "\n".join(lines[start - 1 : node.end_lineno])
    return Definition(module, node.lineno, names, _names_in(node) - names, _names_read_early(node) - names, text)


def _is_only_for_annotations(node: ast.stmt) -> bool:
    """Return whether a definition is an interface (``Protocol``) or a union of types, which only annotations use."""
    if isinstance(node, ast.ClassDef):
        return "Protocol" in map(ast.unparse, node.bases)
    return isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Union[")


def _names_read_early(node: ast.AST) -> frozenset[str]:
    """Return the names that are needed when Python loads the file: neither in bodies of functions nor in annotations."""
    parts: list[ast.AST | None] = []
    members: list[ast.stmt] = []
    if isinstance(node, ast.FunctionDef):
        parts = [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]
    elif isinstance(node, ast.ClassDef):
        parts, members = [*node.decorator_list, *node.bases], node.body
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.Expr)):
        parts = [node.value]
    return frozenset().union(*(_names_in(part) for part in parts if part), *map(_names_read_early, members))


def _names_in(node: ast.AST) -> frozenset[str]:
    return frozenset(leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name))
