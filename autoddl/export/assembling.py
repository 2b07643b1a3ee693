"""What files of plans with and without a pipeline have in common: their order, imports, and library."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.pipelines.runtime.statements import LOSSES

from ..zoo.builtin import BuiltIn, recognise
from . import templates
from .library import library_text
from .source import comment

__all__ = [
    *("RESERVED", "SBP_NAMES", "FileDraft", "aliases_of", "assembled", "axis_lines", "built_in_of", "check_graph"),
    "title",
]

#: Variables that are not to be hidden by names of layers.
RESERVED = (
    *("inputs", "targets", "sync", "path", "plain", "x", "weight", "bias", "parts", "factor", "expected"),
    *("entering", "placement", "RANKS", "WORKERS", "JOINT_STAGES", "SLOTS"),
)
#: OneFlow's words for what a mesh axis does to a tensor.
SBP_NAMES = "S0, S1, S2, S3 = map(flow.sbp.split, range(4))\nB = flow.sbp.broadcast"
#: Where the model ends and the library begins.
LIBRARY_HEADING = """# ==== The library {line}
#
# Up to here the file is the model and its plan (but for `Ranks` and `Axis`). From here to `Main` it is the library: what AutoDDL's
# runtime does on every rank, in its own words.""".format(line="=" * 101)


@dataclass(frozen=True)
class FileDraft:
    """What a file says of its own; the library comes to it.

    Attributes:
        heading: its docstring and comments.
        num_ranks: that it is started with.
        ranks: statements on the ranks, before everything that is first made of them.
        first: names of the library that it uses while it is loaded.
        sections: (title, texts) of what follows, the model and what belongs to it.
        main: how it trains.
    """

    heading: str
    num_ranks: int
    ranks: str
    first: tuple[str, ...]
    sections: tuple[tuple[str, tuple[str, ...]], ...]
    main: str


def assembled(draft: FileDraft) -> str:
    """The file."""
    own = "\n\n".join([draft.ranks, *(text for _, texts in draft.sections for text in texts), draft.main])
    library = library_text(_names_in(own), draft.first, _defined_in(own))
    imports = _merged(library.standard, templates.IMPORTS)
    parts = [
        "\n".join(
            [
                *[draft.heading, ""],
                *["from __future__ import annotations", "", *imports, ""],
                *[templates.loading(draft.num_ranks), "", *library.installed, ""],
                *[title("The ranks"), "", library.first, "", "", draft.ranks],
            ]
        ),
    ]
    for name, texts in draft.sections:
        parts += [title(name), *texts] if name else texts
    parts.append(LIBRARY_HEADING)
    parts += [f"{title(name)}\n\n\n{text}" for name, text in library.sections]
    parts.append(f"{title('Main')}\n\n\n{draft.main}")
    text = "\n\n\n".join(part.strip("\n") for part in parts) + "\n"
    ast.parse(text)  # never a file that Python does not read
    return text


def built_in_of(graph: LayerGraph, model: str) -> BuiltIn | None:
    """How a file makes the plain model: as a built-in one; None where ``model``, a ``FILE.py:FUNCTION``, makes it.

    Raises:
        UserError: it is not built in, and nothing makes it.
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
    """Whether a model can be written.

    Raises:
        UserError: it has no loss, or it is not clear what its layers read.
    """
    last = graph.layers[-1]
    if last.kind != "loss" and not LOSSES & set(last.epilogue):
        raise UserError(
            f"the plan's model ends in {last.describe()}, without a loss: form='oneflow' writes models with one"
        )
    readers = [layer for layer in graph.layers if not graph.inputs(layer.name) and layer.kind != "position"]
    for number, layer in enumerate(readers):
        if number and layer.kind != "embedding":
            raise UserError(
                f"{layer.describe()}: it is not clear which input it reads; form='oneflow' writes models with one"
            )


def title(text: str) -> str:
    """A line that begins a section."""
    return f"# ---- {text} {'-' * (112 - len(text))}"


def axis_lines(axes: Iterable[tuple[Axis, str]], num_ranks: int) -> list[str]:
    """Definitions of mesh axes, with the groups of ranks that each of them is."""
    ordered = sorted(axes, key=lambda item: (item[0].stride, item[0].size))
    return [
        f"{name} = Axis(size={axis.size}, stride={axis.stride})  {comment(_groups(axis, num_ranks))}"
        for axis, name in ordered
    ]


def _groups(axis: Axis, num_ranks: int) -> str:
    """The groups of ranks along an axis, the first few."""
    firsts = [rank for rank in range(num_ranks) if axis.coordinate(rank) == 0]
    shown = []
    for first in firsts[:4]:
        group = [first + k * axis.stride for k in range(axis.size)]
        shown.append("{" + " ".join(map(str, group[:8])) + (" ..." if len(group) > 8 else "") + "}")
    return " ".join(shown) + (" ..." if len(firsts) > 4 else "")


def aliases_of(graph: LayerGraph) -> dict[str, str]:
    """Parameters that are another one, by their names in the plain model."""
    found = {}
    for layer in graph.layers:
        for parameter in layer.parameters:
            if parameter.tied_to is not None:
                owners = [p for p in graph[parameter.tied_to].parameters if len(p.shape) == len(parameter.shape)]
                found[parameter.name] = owners[0].name
    return found


def _names_in(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


def _defined_in(text: str) -> set[str]:
    """The names that a text binds itself, which are not the library's."""
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
    return found


def _merged(*groups: Sequence[str]) -> list[str]:
    """Import lines, plain ones first, each module once."""
    plain: set[str] = set()
    modules: dict[str, set[str]] = {}
    for line in (line for group in groups for line in group):
        if line.startswith("import"):
            plain.add(line)
        else:
            _, module, _, members = line.split(" ", 3)
            modules.setdefault(module, set()).update(members.split(", "))
    members_of = [f"from {module} import {', '.join(sorted(modules[module]))}" for module in sorted(modules)]
    return [*sorted(plain), *members_of]
