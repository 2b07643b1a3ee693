"""Puts an exported OneFlow file together: docstring, imports, model, library and training loop, in this order.

The parts that are written for a plan come in a `FileDraft`. Lines ``# ====`` mark the parts of a file, lines ``# ----`` the
sections of the library.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph, tied_parameter
from autoddl.costmodel.kinds.registry import kind_of

from ..zoo.builtin import BuiltIn, recognise
from . import templates
from .library import library_text
from .source import comment

__all__ = [
    "RESERVED",
    "SBP_NAMES",
    "FileDraft",
    "aliases_of",
    "assembled",
    "axis_lines",
    "built_in_of",
    "check_graph",
    "merged_imports",
    "names_defined_in",
    "names_in",
]

#: Names of variables of exported files. Identifiers made from layer names must differ from them.
RESERVED = (
    *(
        "arguments",
        "layer_data",
        "inputs",
        "targets",
        "sync",
        "path",
        "plain",
        "x",
        "weight",
        "bias",
        "parts",
        "factor",
        "expected",
    ),
    *("block_input", "stage_input", "placement", "BACKEND", "RANKS", "WORKERS", "JOINT_STAGES", "SLOTS"),
)
#: Definitions of short names for OneFlow's SBP states.
SBP_NAMES = "S0, S1, S2, S3 = map(flow.sbp.split, range(4))\nB = flow.sbp.broadcast"
#: Library names that `FileDraft.plan` uses while Python loads the file; their definitions stand before it.
_EARLY_NAMES = ("Axis", "Ranks")
#: Library functions that it calls.
_EARLY_CALLS = ("chosen_backend",)
_EARLY_REMARK = """
# Copied from AutoDDL's runtime. The rest of the library stands below the model."""
_LIBRARY_REMARK = """
# From here to `Main` the file is library code, copied from AutoDDL's runtime: what the model and the training loop call.
# The model and its plan stand above, data and training loop below."""


@dataclass(frozen=True)
class FileDraft:
    """The parts of a file that are written for one plan; `assembled` adds imports and library.

    Attributes:
        heading: docstring and comments at the top of the file.
        num_ranks: number of ranks that the file must be started with.
        settings: constants of device and types.
        plan: constants: ranks, mesh axes and sizes.
        sections: (title, texts) of the parts between the plan and the library: the model and, for a pipeline, the schedule.
        main: functions that make the model, make data and train.
    """

    heading: str
    num_ranks: int
    settings: str
    plan: str
    sections: tuple[tuple[str, tuple[str, ...]], ...]
    main: str


def assembled(draft: FileDraft) -> str:
    """Return the text of the file."""
    own_text = "\n\n".join(
        [draft.settings, draft.plan, *(text for _, texts in draft.sections for text in texts), draft.main]
    )
    library = library_text(names_in(own_text), _EARLY_NAMES, names_defined_in(own_text), _EARLY_CALLS)
    imports = merged_imports(library.standard_imports, templates.IMPORTS)
    top = [
        *[draft.heading, ""],
        *["from __future__ import annotations", "", *imports, ""],
        *[templates.startup_text(draft.num_ranks), "", *library.installed_imports, ""],
        *[draft.settings, ""],
        _part_heading("Library: device, ranks, axes") + _EARLY_REMARK,
    ]
    parts = [
        "\n".join(top),
        library.early,
        f"{_part_heading('The plan')}\n\n{draft.plan}",
    ]
    for name, texts in draft.sections:
        parts += [_part_heading(name), *texts]
    parts.append(_part_heading("The library") + _LIBRARY_REMARK)
    for name, text in library.sections:
        parts += [_section_heading(name), text]
    parts += [_part_heading("Main"), draft.main]
    text = "\n\n\n".join(part.strip("\n") for part in parts) + "\n"
    ast.parse(text)  # raises SyntaxError: an invalid file must not be written
    return text


def _part_heading(title: str) -> str:
    return f"# ==== {title} {'=' * (112 - len(title))}"


def _section_heading(title: str) -> str:
    return f"# ---- {title} {'-' * (112 - len(title))}"


def built_in_of(graph: LayerGraph, model: str) -> BuiltIn | None:
    """Return the built-in model that a graph belongs to; None if a user's function makes the model.

    Args:
        graph: the plan's layer graph.
        model: ``FILE.py:FUNCTION`` that makes the model, or empty.

    Raises:
        UserError: ``model`` is malformed, or it is empty and the graph belongs to no built-in model.
    """
    if model:
        if not re.fullmatch(r".+\.py:[^\W\d]\w*", model):
            raise UserError(f"model {model!r} should be FILE.py:FUNCTION")
        return None
    built_in = recognise(graph)
    if built_in is None:
        raise UserError(
            f"the plan's model {graph.name} is not a built-in one; give model=FILE.py:FUNCTION, which makes it"
        )
    return built_in


def check_graph(graph: LayerGraph) -> None:
    """Check that a model can be written.

    Raises:
        UserError: the model has no loss, or several layers that read an input and are no lookups.
    """
    last = graph.layers[-1]
    if not graph.has_loss:
        raise UserError(
            f"the plan's model ends in {last.describe()}, without a loss: form='oneflow' writes only models with a loss"
        )
    for layer in graph.data_readers[1:]:
        if layer.program is None and not kind_of(layer.kind).is_lookup:
            raise UserError(
                f"{layer.describe()}: it is not clear which input it reads; form='oneflow' writes only models with one input"
            )


def axis_lines(axes: Iterable[tuple[Axis, str]], num_ranks: int) -> list[str]:
    """Return the definitions of mesh axes. A comment on each line shows the groups of ranks along the axis.

    >>> axis_lines([(Axis(2, 1), "INNER")], num_ranks=4)
    ['INNER = Axis(size=2, stride=1)  # {0 1} {2 3}']
    """
    ordered = sorted(axes, key=lambda item: (item[0].stride, item[0].size))
    return [
        f"{name} = Axis(size={axis.size}, stride={axis.stride})  {comment(_groups(axis, num_ranks))}"
        for axis, name in ordered
    ]


def _groups(axis: Axis, num_ranks: int) -> str:
    """Return the first groups of ranks along an axis as text."""
    firsts = [rank for rank in range(num_ranks) if axis.coordinate(rank) == 0]
    shown = []
    for first in firsts[:4]:
        group = [first + k * axis.stride for k in range(axis.size)]
        shown.append("{" + " ".join(map(str, group[:8])) + (" ..." if len(group) > 8 else "") + "}")
    return " ".join(shown) + (" ..." if len(firsts) > 4 else "")


def aliases_of(graph: LayerGraph) -> dict[str, str]:
    """Return the names of shared parameters in the plain model, each with the name of the parameter that stores its value."""
    aliases = {}
    for layer in graph.layers:
        for parameter in layer.parameters:
            if parameter.tied_to is not None:
                aliases[parameter.name] = tied_parameter(graph, parameter).name
    return {name: owner for name, owner in aliases.items() if name != owner}


def names_in(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


def names_defined_in(text: str) -> set[str]:
    """Return the names that the top-level statements of a text define."""
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
    return names


def merged_imports(*groups: Sequence[str]) -> list[str]:
    """Merge import lines: one line per module, ``import ...`` before ``from ... import ...``."""
    plain_lines: set[str] = set()
    members_of: dict[str, set[str]] = {}
    for line in (line for group in groups for line in group):
        if line.startswith("import"):
            plain_lines.add(line)
        else:
            _, module, _, members = line.split(" ", 3)
            members_of.setdefault(module, set()).update(members.split(", "))
    from_lines = [f"from {module} import {', '.join(sorted(members_of[module]))}" for module in sorted(members_of)]
    return [*sorted(plain_lines), *from_lines]
