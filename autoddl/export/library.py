"""The library of exported files: copies the definitions that a file needs from the source of the runtime, and no others.

The modules listed in `LIBRARY` are read as text, not imported. A definition is needed if the file uses its name, or if another
needed definition uses it. A name is looked up among the definitions and imports of the module that uses it. So an exported file
runs the same code as :mod:`autoddl.pipelines.runtime`.

In the file, definitions are grouped by module, each module under the title that `LIBRARY` gives it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoddl.pipelines.runtime.kinds.registry import registered_functions

from .definitions import Definition, module_text

__all__ = ["LIBRARY", "LibraryText", "known_names", "library_text"]

_RUNTIME = "autoddl.pipelines.runtime"
_PARTS = "autoddl.export.parts"
#: The modules that definitions are copied from, each with the title of its section in a file. The order is that of the sections. If
#: two modules define the same name, the first one provides it.
LIBRARY: Mapping[str, str] = {
    f"{_RUNTIME}.pipeline.slot_stages": "Stages of a worker",
    f"{_PARTS}.pipeline": "The pipeline",
    f"{_PARTS}.parameters": "Parameters of layers",
    f"{_RUNTIME}.comm.handshake": "Handshakes before exchanges",
    f"{_PARTS}.device": "The choice of device",
    f"{_PARTS}.plain": "The plain model",
    f"{_PARTS}.training": "Parameter values and data",
    f"{_PARTS}.passes": "Training passes",
    f"{_RUNTIME}.train_steps": "Training steps",
    f"{_RUNTIME}.updates": "Optimizer steps on master weights",
    f"{_RUNTIME}.loss_scaling": "Scales of losses",
    f"{_RUNTIME}.operations": "Computations of layers on one rank",
    f"{_RUNTIME}.replay.functions": "Operators of the plain model",
    f"{_RUNTIME}.dropouts": "Dropout",
    f"{_RUNTIME}.randomness": "Random numbers",
    f"{_RUNTIME}.seededrandom": "Random numbers of the plain model",
    f"{_RUNTIME}.groupednorms": "Batch norms of the plain model",
    f"{_RUNTIME}.images": "Images",
    f"{_RUNTIME}.runningstats": "Running statistics of batch norms",
    f"{_RUNTIME}.attending": "Attention",
    f"{_RUNTIME}.changed_scores": "Attention whose scores the plain model changes",
    f"{_RUNTIME}.routing": "Experts",
    f"{_RUNTIME}.latent": "Latent attention",
    f"{_RUNTIME}.blockwise": "Attention block by block",
    f"{_RUNTIME}.sequences": "Positions of shared samples",
    f"{_RUNTIME}.norms": "Norms",
    f"{_RUNTIME}.losses": "Losses",
    f"{_RUNTIME}.rows": "Sums along rows",
    f"{_RUNTIME}.facts": "Properties of the plain model",
    f"{_RUNTIME}.parameters": "Global tensors and sums of their gradients",
    f"{_RUNTIME}.shards": "Tensors divided among ranks",
    f"{_RUNTIME}.comm.parameter_layouts": "Layouts of parameters",
    f"{_RUNTIME}.comm.layouts": "Layouts: the elements that each rank holds",
    f"{_RUNTIME}.backend": "Devices and types",
    f"{_RUNTIME}.stepping": "The ranks",
    f"{_RUNTIME}.comm.collectives": "Collectives along one mesh axis",
    f"{_RUNTIME}.comm.mesh": "Mesh axes of the job",
    f"{_RUNTIME}.comm.moving": "Changes of layout",
    f"{_RUNTIME}.comm.exchanging": "Changes of layout by messages between ranks",
    f"{_RUNTIME}.pipeline.words": "Instructions of workers, read as actions of ranks",
    f"{_RUNTIME}.pipeline.engine": "The engine that executes actions",
    f"{_RUNTIME}.pipeline.actions": "Actions",
    f"{_RUNTIME}.pipeline.slots": "Slots of micro-batches",
    f"{_RUNTIME}.pipeline.local": "Computations of a worker",
    f"{_RUNTIME}.pipeline.passes": "Forward and backward passes of stages",
    f"{_RUNTIME}.pipeline.work": "Tasks of a schedule",
    f"{_RUNTIME}.pipeline.weights": "Versions of weights",
    f"{_RUNTIME}.pipeline.inbox": "Messages received from other stages",
    f"{_RUNTIME}.pipeline.transport": "Messages and gradient sums during computation",
    f"{_RUNTIME}.pipeline.gradients": "Sums of gradients",
    f"{_RUNTIME}.pipeline.shared_weights": "Weights that stages share",
    f"{_RUNTIME}.pipeline.data": "Data and losses of micro-batches",
    f"{_RUNTIME}.pipeline.waiting": "Waiting for computations",
    f"{_RUNTIME}.pipeline.report": "Measurements",
    "autoddl.pipelines.schedule": "Schedules",
    f"{_RUNTIME}.ranks.devices": "GPUs of ranks",
    f"{_RUNTIME}.samples": "Samples",
    f"{_RUNTIME}.detaching": "Tensors without their history",
    f"{_RUNTIME}.graph.modules": "Layers on global tensors",
    f"{_RUNTIME}.models": "Initial values",
    "autoddl.costmodel.crossing": "Messages between stages",
    "autoddl.costmodel.distribution": "Mesh axes",
    "autoddl.costmodel.strategy": "Mesh axes of strategies",
    "autoddl.costmodel.devices": "Types of devices",
    "autoddl.costmodel.errors": "Errors",
    "autoddl.costmodel.limits": "Limits",
}
#: Names of the runtime that are not copied: every file imports OneFlow as ``flow``.
_ONEFLOW_NAMES = frozenset({"flow", "load_oneflow"})
#: Short names that several modules define in the same way. They are defined once, before everything else.
_COMMON_NAMES = frozenset({"Tensor", "functional", "_Function"})


@dataclass(frozen=True)
class LibraryText:
    """The library of one file.

    Attributes:
        standard_imports: import lines of the standard library.
        installed_imports: import lines of numpy and OneFlow.
        early: definitions that the file needs while Python loads it.
        sections: (title, text) for all other definitions, by module.
    """

    standard_imports: tuple[str, ...]
    installed_imports: tuple[str, ...]
    early: str
    sections: tuple[tuple[str, str], ...]


def library_text(
    used_names: Iterable[str], early_names: Iterable[str], own_names: Iterable[str], early_calls: Iterable[str] = ()
) -> LibraryText:
    """Return the library of a file.

    Args:
        used_names: names that the file uses.
        early_names: names that the file uses while Python loads it, outside of functions.
        own_names: names that the file defines itself.
        early_calls: functions that the file calls while Python loads it.

    >>> library = library_text({"prime_factors"}, (), ())
    >>> [title for title, text in library.sections]
    ['Mesh axes']
    """
    own_names, used_names, early_names = frozenset(own_names), set(used_names), set(early_names)
    excluded = own_names | _ONEFLOW_NAMES
    early_calls = set(early_calls)
    needed = _needed_definitions(used_names | early_names | early_calls, excluded)
    early = [definition for definition in needed if definition.names <= _COMMON_NAMES]
    early_definitions = _needed_definitions(early_names, excluded, only_early=True)
    called = _needed_definitions(early_calls, excluded)
    early += [one for one in needed if one in early_definitions or one in called]
    late = [definition for definition in needed if definition not in early]
    # Imports of other packages: those that the file's own text uses, and those that the definitions use.
    imports = {"flow": ("oneflow", ""), **{name: _origin_of(name) for name in used_names & _imported_names()}}
    for definition in needed:
        origins = module_text(definition.module).imports
        names = definition.reads & set(origins)
        imports.update({name: origins[name] for name in names if not _is_library_module(origins[name][0])})
    standard, installed = _import_lines({name: origin for name, origin in imports.items() if name not in own_names})
    sections = []
    for module, definitions in _by_module(late).items():
        sections.append((_modules()[module], _joined([definition.text for definition in definitions])))
    return LibraryText(standard, installed, _joined([definition.text for definition in early]), tuple(sections))


def _by_module(definitions: Iterable[Definition]) -> dict[str, list[Definition]]:
    """Group definitions by module.

    Modules stand in the order of `LIBRARY`, except that a module stands after those that it needs while Python loads the file.
    """
    waiting: dict[str, list[Definition]] = {}
    for definition in definitions:
        waiting.setdefault(definition.module, []).append(definition)
    module_of = {name: module for module, members in waiting.items() for member in members for name in member.names}

    def is_ready(module: str) -> bool:
        needed = {module_of.get(name, module) for member in waiting[module] for name in member.reads_early}
        return not needed & (waiting.keys() - {module})

    ordered: dict[str, list[Definition]] = {}
    while waiting:
        module = next(filter(is_ready, waiting))
        ordered[module] = waiting.pop(module)
    return ordered


def known_names() -> frozenset[str]:
    """Return all names that modules of the library define or import. Variables of a file must have other names."""
    return frozenset(
        name for module in _modules() for name in (*module_text(module).definitions, *module_text(module).imports)
    )


def _needed_definitions(names: Iterable[str], excluded: frozenset[str], only_early: bool = False) -> list[Definition]:
    """Return the definitions of some names and, transitively, of all names that these use, in the order of `LIBRARY`.

    Args:
        names: names to begin with; names of other packages are ignored.
        excluded: names that need no definition.
        only_early: whether to follow only names that are used while Python loads the file.

    Raises:
        AssertionError: two definitions of a name differ, or a definition is in a module that `LIBRARY` does not list.
    """
    order = {module: number for number, module in enumerate(_modules())}
    waiting = [origin for origin in map(_origin_of, names) if _is_library_module(origin[0])]
    needed: dict[str, Definition] = {}
    while waiting:
        module, name = waiting.pop()
        if name in excluded:
            continue
        assert module in _modules(), (
            f"{module}.{name} is needed by exported files, but LIBRARY does not list its module"
        )
        source = module_text(module)
        definition = source.definitions.get(name)
        if definition is None:  # the module imports the name
            waiting.append(source.imports[name])
            continue
        known = needed.setdefault(name, definition)
        if known is not definition:
            # Two modules define the name: the definitions have to be equal up to comments.
            are_equal = known.text.partition("  #")[0] == definition.text.partition("  #")[0]
            assert are_equal, f"the definitions of {name} in {module} and in {known.module} differ"
            needed[name] = min(known, definition, key=lambda candidate: order[candidate.module])
            continue
        reads = definition.reads_early if only_early else definition.reads
        for read in reads - excluded:
            if read in source.definitions and source.definitions[read] is not needed.get(read):
                waiting.append((module, read))
            elif read in source.imports and _is_library_module(source.imports[read][0]):
                waiting.append(source.imports[read])
    return sorted(set(needed.values()), key=lambda definition: (order[definition.module], definition.line))


def _origin_of(name: str) -> tuple[str, str]:
    """Return (module, name there) of a name that a file uses; ("", name) if no module of the library defines or imports it."""
    for module in _modules():
        if name in module_text(module).definitions:
            return module, name
    for module in _modules():
        if name in module_text(module).imports:
            return module_text(module).imports[name]
    return "", name


def _imported_names() -> set[str]:
    """Return the names that modules of the library import from other packages."""
    return {
        name
        for module in _modules()
        for name, (origin, _) in module_text(module).imports.items()
        if not _is_library_module(origin)
    }


def _is_library_module(module: str) -> bool:
    return module.split(".")[0] == "autoddl" or module in _modules()


def _modules() -> Mapping[str, str]:
    """Return `LIBRARY`, preceded by the modules of the kinds of layers that users have registered."""
    user_modules = {function.__module__ for function in registered_functions().values()}
    return {**dict.fromkeys(sorted(user_modules), "Registered kinds of layers"), **LIBRARY}


def _import_lines(imports: Mapping[str, tuple[str, str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the import lines of the standard library, and those of installed packages."""
    members_of: dict[str, set[str]] = {}
    plain_lines = set()
    for name, (module, member) in imports.items():
        if member:
            members_of.setdefault(module, set()).add(member)
        else:
            plain_lines.add(f"import {module}" if module == name else f"import {module} as {name}")
    from_lines = [f"from {module} import {', '.join(sorted(members))}" for module, members in members_of.items()]

    def is_installed(line: str) -> bool:
        return line.split()[1].split(".")[0] in ("numpy", "oneflow")

    lines = [*sorted(plain_lines), *sorted(from_lines)]
    return tuple(line for line in lines if not is_installed(line)), tuple(line for line in lines if is_installed(line))


def _joined(texts: Iterable[str]) -> str:
    """Join definitions: two empty lines around functions and classes, none between assignments."""
    result, was_long = "", False
    for text in texts:
        is_long = text.startswith(("def ", "class ", "@"))
        if result:
            result += "\n\n\n" if is_long or was_long else "\n"
        result += text
        was_long = is_long
    return result
