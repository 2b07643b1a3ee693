"""The library of exported files: of the runtime's own source the definitions that a file needs, and no others.

Modules are read as text.  A definition is needed if the file names it, or if one that is needed does; names are looked up where the
module that reads them has them from.  So a file does what :mod:`autoddl.pipelines.runtime` does, because it is that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoddl.pipelines.runtime.kinds.registry import registered_functions

from .definitions import Definition, module_text

__all__ = ["LIBRARY", "LibraryText", "known_names", "library_text"]

_RUNTIME = "autoddl.pipelines.runtime"
_PARTS = "autoddl.export.parts"
#: The modules that files may use, with what their definitions are in a file; of a name that two of them define the first one's
#: counts.
LIBRARY: Mapping[str, str] = {
    f"{_PARTS}.pipeline": "The pipeline",
    f"{_PARTS}.parameters": "Parameters of layers",
    f"{_PARTS}.plain": "The plain model",
    f"{_PARTS}.training": "Values and training",
    f"{_RUNTIME}.operations": "What layers do on one rank",
    f"{_RUNTIME}.attending": "Attention",
    f"{_RUNTIME}.losses": "Losses",
    f"{_RUNTIME}.rows": "Sums along rows",
    f"{_RUNTIME}.facts": "Facts of the plain model",
    f"{_RUNTIME}.parameters": "Global tensors and the sums of their gradients",
    f"{_RUNTIME}.layouts": "Which elements each rank holds",
    f"{_RUNTIME}.stepping": "The ranks",
    f"{_RUNTIME}.collectives": "Collectives along one mesh axis",
    f"{_RUNTIME}.mesh": "Mesh axes of the job",
    f"{_RUNTIME}.moving": "Changes of layout",
    f"{_RUNTIME}.exchanging": "Exchanges",
    f"{_RUNTIME}.pipeline.words": "Actions of ranks, in words of their workers",
    f"{_RUNTIME}.pipeline.engine": "The loop that carries actions out",
    f"{_RUNTIME}.pipeline.actions": "Actions",
    f"{_RUNTIME}.pipeline.slots": "Slots of micro-batches",
    f"{_RUNTIME}.pipeline.local": "Computations of a worker",
    f"{_RUNTIME}.pipeline.passes": "Passes through stages",
    f"{_RUNTIME}.pipeline.work": "Stages and their weights",
    f"{_RUNTIME}.pipeline.weights": "Versions of weights",
    f"{_RUNTIME}.pipeline.inbox": "What has come from other stages",
    f"{_RUNTIME}.pipeline.transport": "Messages and sums beside computations",
    f"{_RUNTIME}.pipeline.gradients": "Sums of gradients",
    f"{_RUNTIME}.pipeline.shared_weights": "Weights that stages share",
    f"{_RUNTIME}.pipeline.data": "Data and losses",
    f"{_RUNTIME}.pipeline.waiting": "Waiting",
    f"{_RUNTIME}.pipeline.report": "What is measured",
    "autoddl.pipelines.schedule": "Schedules",
    f"{_RUNTIME}.samples": "Samples",
    f"{_RUNTIME}.detaching": "Tensors without their history",
    f"{_RUNTIME}.models": "Initial values",
    "autoddl.costmodel.crossing": "Messages",
    "autoddl.costmodel.distribution": "Mesh axes",
    "autoddl.costmodel.strategy": "Mesh axes of strategies",
    "autoddl.costmodel.errors": "Errors",
    "autoddl.costmodel.limits": "Limits",
}
#: What every file imports itself.
_LOADED = frozenset({"flow", "load_oneflow"})
#: Short names that several modules have; they stand in front.
_SHORT = frozenset({"Tensor", "functional", "_Function"})


@dataclass(frozen=True)
class LibraryText:
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


def library_text(used: Iterable[str], first: Iterable[str], given: Iterable[str]) -> LibraryText:
    """The library of a file.

    Args:
        used: names that the file uses.
        first: those that it uses while it is loaded.
        given: those that it defines itself.
    """
    own, used, first = frozenset(given), set(used), set(first)
    given = own | _LOADED
    found = _closure(used | first, given)
    early = [definition for definition in found if definition.names <= _SHORT]
    early += _closure(first, given, early=True)
    late = [definition for definition in found if definition not in early]
    imports = {"flow": ("oneflow", ""), **{name: _entry(name) for name in used & _imported_names()}}
    for definition in found:
        known = module_text(definition.module).imports
        imports.update({name: known[name] for name in definition.reads & set(known) if not _is_ours(known[name][0])})
    standard, installed = _import_lines({name: origin for name, origin in imports.items() if name not in own})
    sections = []
    for module, definitions in _sections(late).items():
        sections.append((_modules()[module], _spaced([definition.text for definition in definitions])))
    return LibraryText(standard, installed, _spaced([definition.text for definition in early]), tuple(sections))


def _sections(definitions: Iterable[Definition]) -> dict[str, list[Definition]]:
    """Definitions by their modules; each behind those that it needs when the file is loaded, else in the order of `LIBRARY`."""
    waiting: dict[str, list[Definition]] = {}
    for definition in definitions:
        waiting.setdefault(definition.module, []).append(definition)
    made_by = {name: module for module, own in waiting.items() for one in own for name in one.names}
    found: dict[str, list[Definition]] = {}
    while waiting:
        ready = (
            module
            for module, own in waiting.items()
            if not any(
                made_by.get(name, module) in waiting.keys() - {module} for one in own for name in one.reads_early
            )
        )
        module = next(ready)
        found[module] = waiting.pop(module)
    return found


def known_names() -> frozenset[str]:
    """All names of the library, imported ones included: variables of a file are to be called otherwise."""
    return frozenset(
        name for module in _modules() for name in (*module_text(module).definitions, *module_text(module).imports)
    )


def _closure(names: Iterable[str], given: frozenset[str], early: bool = False) -> list[Definition]:
    """The definitions of some names and of those that they read, in the order of `LIBRARY`.

    Raises:
        AssertionError: two different ones have the same name, or one is from a module that is not of the library.
    """
    order = {module: number for number, module in enumerate(_modules())}
    waiting = [origin for origin in map(_entry, names) if _is_ours(origin[0])]
    found: dict[str, Definition] = {}
    while waiting:
        module, name = waiting.pop()
        if name in given:
            continue
        assert module in _modules(), f"{module}.{name} is not of the library of exported files"
        definition = module_text(module).definitions.get(name)
        if definition is None:  # that module has it from another one
            waiting.append(module_text(module).imports[name])
            continue
        known = found.setdefault(name, definition)
        if known is not definition:
            alike = known.text.partition("  #")[0] == definition.text.partition("  #")[0]
            assert alike, f"{name} of {module} and of {known.module} differ"
            found[name] = min(known, definition, key=lambda one: order[one.module])
            continue
        own = module_text(module)
        reads = definition.reads_early if early else definition.reads
        for read in reads - given:
            if read in own.definitions and own.definitions[read] is not found.get(read):
                waiting.append((module, read))
            elif read in own.imports and _is_ours(own.imports[read][0]):
                waiting.append(own.imports[read])
    return sorted(set(found.values()), key=lambda definition: (order[definition.module], definition.line))


def _entry(name: str) -> tuple[str, str]:
    """Where a file has a name from: ("", name) where it is none of the library's."""
    for module in _modules():
        if name in module_text(module).definitions:
            return module, name
    for module in _modules():
        if name in module_text(module).imports:
            return module_text(module).imports[name]
    return "", name


def _imported_names() -> set[str]:
    """Names of other packages that modules of the library import."""
    return {
        name for module in _modules() for name, origin in module_text(module).imports.items() if not _is_ours(origin[0])
    }


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "autoddl" or module in _modules()


def _modules() -> Mapping[str, str]:
    """`LIBRARY`, and where the functions of kinds from outside of the package are from."""
    outside = {function.__module__ for function in registered_functions().values()}
    return {**dict.fromkeys(sorted(outside), "Kinds of layers"), **LIBRARY}


def _import_lines(imports: Mapping[str, tuple[str, str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    modules: dict[str, set[str]] = {}
    plain = set()
    for name, (module, member) in imports.items():
        if member:
            modules.setdefault(module, set()).add(member)
        else:
            plain.add(f"import {module}" if module == name else f"import {module} as {name}")
    from_lines = [f"from {module} import {', '.join(sorted(members))}" for module, members in modules.items()]

    def is_installed(line: str) -> bool:
        return line.split()[1].split(".")[0] in ("numpy", "oneflow")

    lines = [*sorted(plain), *sorted(from_lines)]
    return tuple(line for line in lines if not is_installed(line)), tuple(line for line in lines if is_installed(line))


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
