"""A plan as one readable Python file that needs OneFlow alone.

    heading             what it is, what it is predicted to cost, how to run it
    ranks               the mesh and its axes
    model               a class for each repeated block and one for the model: parameters with their SBP, every step with its price
    helpers             the collectives, layouts and layers that the model calls, as short as it needs them
    main                trains some steps

The statements are those that the runtime executes for the same plan, so losses and bytes are too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autoddl.costmodel.assessment import Assessment
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.costmodel.workload import Workload

from ..models.builtin import recognise
from ..plan import assessment_of
from . import templates
from .helpers import helper_text
from .layertext import Place, layer_text
from .scene import Scene
from .source import Names, comment, literal, value_text
from .writing import indented

if TYPE_CHECKING:
    from ..plan import Plan

__all__ = ["oneflow_text"]

#: What a file uses while it is loaded.
_FIRST = ("Axis", "mesh", "S0", "B")
_RESERVED = ("inputs", "targets", "sync", "path", "plain", "x", "weight", "bias", "parts", "sums", "factor", "angles")
_LOSSES = frozenset({"mse_loss", "l1_loss"})


def oneflow_text(plan: Plan, model: str = "") -> str:
    """The file.

    Args:
        model: ``FILE.py:FUNCTION`` that makes the plain model, where it is none that is built in.

    Raises:
        UserError: the plan has a layer that cannot be written, or its model is not built in and nothing makes it; it is named.
    """
    built_in = None if model else recognise(plan.graph)
    if built_in is None and not model:
        raise UserError(
            f"the plan's model {plan.graph.name} is none that can be built in the file; say what makes it: --model FILE.py:FUNCTION"
        )
    if model and not re.fullmatch(r".+\.py:[^\W\d]\w*", model):
        raise UserError(f"--model {model!r} should be FILE.py:FUNCTION")
    _check(plan.graph)
    whole = _whole(plan)
    scene = Scene(
        plan.graph,
        whole.cluster,
        whole.workload,
        plan.strategies,
        {found.layer.name: found for found in whole.assessment.layers},
        built_in,
        Names(_RESERVED),
    )
    classes = _classes(scene)
    main = templates.main(scene, model)
    body = [*classes, main]
    constants = _constants(scene)
    used = _names_in("\n\n".join([constants, *body]))
    helpers = helper_text(used, _FIRST, {"NUM_RANKS"})
    imports = _merged(helpers.standard, templates.IMPORTS)
    parts = [
        "\n".join(
            [
                *[_heading(plan, whole, built_in.family if built_in else model), ""],
                *["from __future__ import annotations", "", *imports, ""],
                *[templates.loading(scene.num_ranks), "", *helpers.installed, ""],
                *[_title("The ranks"), "", f"NUM_RANKS = {scene.num_ranks}", helpers.first],
            ]
        ),
        constants,
        _title("The model"),
        *classes,
        *(f"{_title(title)}\n\n\n{text}" for title, text in helpers.sections),
        f"{_title('Main')}\n\n\n{main}",
    ]
    text = "\n\n\n".join(part.strip("\n") for part in parts) + "\n"
    ast.parse(text)  # never a file that Python does not read
    return text


@dataclass(frozen=True)
class _Whole:
    """A plan without a pipeline, or of one stage: what runs on all devices, and its price."""

    cluster: Cluster
    workload: Workload
    assessment: Assessment


def _whole(plan: Plan) -> _Whole:
    if plan.pipeline is None:
        return _Whole(plan.cluster, plan.workload, assessment_of(plan))
    configuration = plan.pipeline.configuration
    if plan.num_stages > 1:
        raise UserError(
            f"the plan is a pipeline of {plan.num_stages} stages: --to oneflow writes plans of one stage "
            "(made without --pipeline); `autoddl train` runs this one, and json, graphml, dot and chrome-trace can be written"
        )
    (choice,) = configuration.stages
    if choice.recompute == "stage":
        raise UserError(
            "the plan recomputes its stage as a whole, --to oneflow writes recomputation layer by layer; "
            "plan with --recompute never"
        )
    workload = replace(plan.workload, recompute=choice.recompute == "layers")
    return _Whole(configuration.mesh.devices(plan.cluster), workload, plan.pipeline.stages[0].assessment)


def _check(graph: LayerGraph) -> None:
    last = graph.layers[-1]
    if last.kind != "loss" and not _LOSSES & set(last.epilogue):
        raise UserError(
            f"the plan's model ends in {last.describe()}, without a loss: --to oneflow writes models with one"
        )
    readers = [layer for layer in graph.layers if not graph.inputs(layer.name) and layer.kind != "position"]
    for number, layer in enumerate(readers):
        if number and layer.kind != "embedding":
            raise UserError(
                f"{layer.describe()}: it is not clear which input it reads; --to oneflow writes models with one"
            )


def _names_in(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


def _merged(*groups: Iterable[str]) -> list[str]:
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


def _title(text: str) -> str:
    return f"# ---- {text} {'-' * (112 - len(text))}"


# ---- Heading and constants -------------------------------------------------------------------------------------------


def _heading(plan: Plan, whole: _Whole, origin: str) -> str:
    cluster, workload, assessment = plan.cluster, whole.workload, whole.assessment
    precision = (
        "" if workload.precision == "float32" else f" (of {workload.precision} precision; this file runs in float32)"
    )
    kept = ", activations recomputed" if workload.recompute else ""
    lines = [
        f"Model    {plan.graph.name} ({origin}): {plan.graph.num_parameters:,} parameters",
        f"Cluster  {cluster.name}: {cluster.num_nodes} x {cluster.devices_per_node} {cluster.device.name}",
        f"Step     {workload.batch} {plan.graph.sample}s in {workload.num_micro_batches} x {workload.micro_batch}{kept}",
        f"Price    {format_seconds(assessment.step_s)} a step{precision}: {format_seconds(assessment.compute_s)} compute, "
        f"{format_seconds(assessment.communication_s)} communication;",
        f"         each rank sends {format_bytes(assessment.sent_bytes)} and needs {format_bytes(assessment.memory_bytes)}",
        f"Plan     graph {plan.graph.hash}",
        f"         cluster {cluster.hash}",
        *(f"Note     {note}" for note in plan.graph.notes),
    ]
    return "\n".join([templates.DOCSTRING, *map(comment, lines)])


def _constants(scene: Scene) -> str:
    """The mesh, its axes (all that the classes have asked for), the workload."""
    mesh = scene.common_mesh
    lines = []
    if mesh is not None:
        lines += [
            comment("Parameters lie on this mesh; what each of its axes does to them is their SBP signature."),
            f"MESH = mesh({', '.join(str(axis.size) for axis in mesh)})",
        ]
    if scene.axes:
        lines.append(comment("The axes that collectives run along."))
    for axis, name in sorted(scene.axes.items(), key=lambda item: (item[0].stride, item[0].size)):
        lines.append(f"{name} = Axis(size={axis.size}, stride={axis.stride})  {comment(_groups(scene, axis))}")
    workload, aliases = scene.workload, _aliases(scene.graph)
    lines += [
        f"BATCH, MICRO_BATCH = {workload.batch}, {workload.micro_batch}",
        comment("Parameters that are another one, by their names in the plain model."),
        f"ALIASES: dict[str, str] = {value_text(aliases)}",
    ]
    return "\n".join(lines)


def _groups(scene: Scene, axis: Axis) -> str:
    """The groups of ranks along an axis, the first few."""
    firsts = [rank for rank in range(scene.num_ranks) if axis.coordinate(rank) == 0]
    shown = []
    for first in firsts[:4]:
        group = [first + k * axis.stride for k in range(axis.size)]
        shown.append("{" + " ".join(map(str, group[:8])) + (" ..." if len(group) > 8 else "") + "}")
    return " ".join(shown) + (" ..." if len(firsts) > 4 else "")


def _aliases(graph: LayerGraph) -> dict[str, str]:
    found = {}
    for layer in graph.layers:
        for parameter in layer.parameters:
            if parameter.tied_to is not None:
                owners = [p for p in graph[parameter.tied_to].parameters if len(p.shape) == len(parameter.shape)]
                found[parameter.name] = owners[0].name
    return found


# ---- Classes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Section:
    """Layers that stand together in the model's forward pass: one, or those of a repeated block."""

    layers: tuple[Layer, ...]
    block: str = ""
    index: int = 0


def _sections(graph: LayerGraph) -> list[_Section]:
    """The layers in order, the repetitions of each block that can be a class put together."""
    runs: list[_Section] = []
    for layer in graph.layers:
        last = runs[-1] if runs else None
        if layer.block and last and (last.block, last.index) == (layer.block, layer.block_index):
            runs[-1] = _Section((*last.layers, layer), layer.block, layer.block_index)
        else:
            runs.append(_Section((layer,), layer.block, layer.block_index if layer.block else 0))
    unfit = {run.block for run in runs if run.block and not _can_be_class(graph, run)}
    seen: set[tuple[str, int]] = set()
    for run in runs:
        if run.block and (run.block, run.index) in seen:
            unfit.add(run.block)
        seen.add((run.block, run.index))
    result = []
    for run in runs:
        if run.block and run.block not in unfit:
            result.append(run)
        else:
            result += [_Section((layer,)) for layer in run.layers]
    return result


def _can_be_class(graph: LayerGraph, run: _Section) -> bool:
    """One tensor comes in, the last layer's goes out, and nothing is shared with other layers."""
    names, prefix = {layer.name for layer in run.layers}, f"{run.block}.{run.index}."
    if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", run.block, re.ASCII):
        return False
    for layer in run.layers:
        paths = [layer.name, *layer.modules, *(p.name for p in layer.parameters)]
        if not graph.inputs(layer.name) or not all(
            path.startswith(prefix) and re.fullmatch(r"[\w.+]+", path, re.ASCII) for path in paths
        ):
            return False
    entering = {s for s, t in graph.edges if t in names and s not in names}
    leaving = {s for s, t in graph.edges if s in names and t not in names}
    tied = any(
        p.tied_to is not None and (layer.name in names or p.tied_to in names)
        for layer in graph.layers
        for p in layer.parameters
    )
    return len(entering) == 1 and leaving == {run.layers[-1].name} and not tied


def _classes(scene: Scene) -> list[str]:
    """A class for each kind of block, then the model."""
    sections = _sections(scene.graph)
    bodies = {id(section): _block_body(scene, section) for section in sections if section.block}
    members: dict[str, list[_Section]] = {}
    for section in sections:
        if section.block:
            members.setdefault(bodies[id(section)], []).append(section)
    blocks = list(dict.fromkeys(of_body[0].block for of_body in members.values()))
    classes: dict[str, str] = {}
    for block in blocks:
        own = [body for body, of_body in members.items() if of_body[0].block == block]
        stem = "Block" if len(blocks) == 1 else "".join(part.title() for part in re.split(r"[._]", block)) + "Block"
        for number, body in enumerate(own, 1):
            classes[body] = scene.names.of(stem if len(own) == 1 else f"{stem}{number}")
    texts = [
        body.replace("@class@", classes[body]).replace("@which@", _which(of_body)) for body, of_body in members.items()
    ]
    return [*texts, _model_text(scene, sections, {key: classes[body] for key, body in bodies.items()})]


def _which(sections: Sequence[_Section]) -> str:
    """Which repetitions a class is for."""
    block, first, last = sections[0].block, sections[0].index, sections[-1].index
    return f"{block}.{first}" if len(sections) == 1 else f"{block}.{first} to {block}.{last}, {len(sections)} times"


class _Variables:
    """Which variable each result is in: ``x`` where all that read it come next, else one of its own.

    Args:
        groups: the names of the layers that are written together, in order.
        given: variables of results from elsewhere.
        labels: what layers are called.
    """

    def __init__(
        self, scene: Scene, groups: Sequence[Sequence[str]], given: Mapping[str, str], labels: Mapping[str, str]
    ):
        self._found = dict(given)
        self._scene, self._labels = scene, labels
        self._group = {name: number for number, names in enumerate(groups) for name in names}

    def result(self, name: str) -> str:
        """For a layer's own result."""
        own = self._group[name]
        readers = {self._group[t] for s, t in self._scene.graph.edges if s == name and t in self._group} - {own}
        self._found[name] = "x" if readers <= {own + 1} else self._scene.names.of(self._labels[name])
        return self._found[name]

    def __getitem__(self, name: str) -> str:
        return self._found[name]


def _entering(graph: LayerGraph, section: _Section) -> str:
    """The layer that the first repetition of a block reads."""
    names = {layer.name for layer in section.layers}
    return next(source for source, target in graph.edges if target in names and source not in names)


def _block_body(scene: Scene, section: _Section) -> str:
    """A class that does not say which repetition it is."""
    graph, prefix = scene.graph, f"{section.block}.{section.index}."
    labels = {layer.name: layer.name[len(prefix) :] for layer in section.layers}
    given = {_entering(graph, section): "entering"}
    variables = _Variables(scene, [[layer.name] for layer in section.layers], given, labels)
    made: list[str] = []
    run: list[str] = []
    for layer in section.layers:
        place = Place(
            label=labels[layer.name],
            path=lambda name: f'f"{{path}}.{name[len(prefix) :]}"',
            inputs=tuple(variables[source] for source in graph.inputs(layer.name)),
            result=variables.result(layer.name),
            data="",
        )
        _write(scene, layer, place, made, run)
    found = [scene.assessed[layer.name] for layer in section.layers]
    seconds = sum(layer.compute_s + layer.communication_s for layer in found)
    sent = format_bytes(sum(layer.sent_bytes for layer in found))
    lines = [
        "class @class@(nn.Module):",
        f'    """@which@: {format_seconds(seconds)} of a step each, in which a rank sends {sent}."""',
        "",
        f"    def __init__(self, path: str{'' if scene.built_in else ', plain: Any'}):",
        "        super().__init__()",
        *indented(made),
        "",
        "    def forward(self, entering: Tensor, sync: bool = True) -> Tensor:",
        *indented(_without_gaps(run)),
        f"        return {variables[section.layers[-1].name]}",
    ]
    return "\n".join(lines)


def _write(scene: Scene, layer: Layer, place: Place, made: list[str], run: list[str]) -> None:
    """Append a layer's text."""
    text = layer_text(scene, layer, place)
    made += text.made
    run += ["", *map(comment, scene.heading(layer, place.label)), *text.run]


def _without_gaps(lines: Sequence[str]) -> list[str]:
    """No empty lines at the beginning, nor several in a row."""
    return [line for i, line in enumerate(lines) if line or (i and lines[i - 1])]


def _model_text(scene: Scene, sections: Sequence[_Section], classes: Mapping[int, str]) -> str:
    """The model's own class."""
    graph = scene.graph
    groups = [[layer.name for layer in section.layers] for section in sections]
    variables = _Variables(scene, groups, {}, {layer.name: layer.name for layer in graph.layers})
    fed = [layer.name for layer in graph.layers if not graph.inputs(layer.name) and layer.kind != "position"]
    made: list[str] = []
    run: list[str] = []
    for number, section in enumerate(sections):
        if section.block:
            _call(scene, sections, number, classes, variables, made, run)
            continue
        (layer,) = section.layers
        place = Place(
            label=layer.name,
            path=literal,
            inputs=tuple(variables[source] for source in graph.inputs(layer.name)),
            result=variables.result(layer.name),
            data=f"np.zeros((len(inputs), {layer.rows}), dtype=np.int64)" if layer.name in fed[1:] else "inputs",
        )
        _write(scene, layer, place, made, run)
    lines = [
        "class Model(nn.Module):",
        '    """The model; ``model(inputs, targets)`` is the mean loss of a micro-batch, the same arrays on every rank."""',
        "",
        f"    def __init__(self{'' if scene.built_in else ', plain: Any'}):",
        "        super().__init__()",
        *indented(made),
        "",
        "    def forward(self, inputs: np.ndarray, targets: np.ndarray, sync: bool = True) -> Tensor:",
        *indented(_without_gaps(run)),
        f"        return {variables[graph.layers[-1].name]}",
    ]
    return "\n".join(lines)


def _call(
    scene: Scene,
    sections: Sequence[_Section],
    number: int,
    classes: Mapping[int, str],
    variables: _Variables,
    made: list[str],
    run: list[str],
) -> None:
    """Append the call of a repetition: of all of them with the first, where each reads the one before."""
    section, graph = sections[number], scene.graph
    own = [other for other in sections if other.block == section.block]
    is_taken = any(layer.name == section.block for layer in graph.layers)
    attribute = f"self.{scene.names.of(f'{section.block} blocks' if is_taken else section.block)}"
    if section is own[0]:
        made.append(_block_list(attribute, own, classes, "" if scene.built_in else ", plain"))
    enters = variables[_entering(graph, section)]
    result = variables.result(section.layers[-1].name)
    is_chain = len(own) > 1 and all(
        _entering(graph, after) == before.layers[-1].name for before, after in zip(own, own[1:])
    )
    if not is_chain or sections[sections.index(own[0]) :][: len(own)] != own:
        run.append(f"{result} = {attribute}[{own.index(section)}]({enters}, sync)")
    elif section is own[-1]:
        first = variables[_entering(graph, own[0])]
        run += ["", *([f"x = {first}"] if first != "x" else []), f"for block in {attribute}:", "    x = block(x, sync)"]
        run += [f"{result} = x"] if result != "x" else []


def _block_list(attribute: str, following: Sequence[_Section], classes: Mapping[int, str], plain: str) -> str:
    """A ``nn.ModuleList`` of all repetitions, those of one class in a row as a comprehension."""
    runs: list[tuple[str, int, int]] = []
    for section in following:
        name = classes[id(section)]
        if runs and runs[-1][0] == name and runs[-1][2] == section.index:
            runs[-1] = (name, runs[-1][1], section.index + 1)
        else:
            runs.append((name, section.index, section.index + 1))
    block = following[0].block
    items = [
        f'{name}("{block}.{first}"{plain})'
        if end == first + 1
        else f'*({name}(f"{block}.{{i}}"{plain}) for i in range({f"{first}, {end}" if first else end}))'
        for name, first, end in runs
    ]
    return f"{attribute} = nn.ModuleList([{', '.join(items)}])"
