"""Classes of a OneFlow file: one for each kind of repeated block, one for the model, or for each stage of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.units import format_bytes, format_seconds

from .layertext import TextPlace, layer_text
from .scene import Scene
from .source import comment, literal
from .writing import folded, indented

__all__ = ["ClassOfLayers", "class_texts"]


@dataclass(frozen=True)
class ClassOfLayers:
    """A class to be written: the model, or a stage of it.

    Attributes:
        scene: its layers.
        name: what it is called.
        what: its docstring.
        given: the variables of results that its forward pass is given.
    """

    scene: Scene
    name: str
    what: str
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Those that are written."""
        return tuple(layer for layer in self.scene.graph.layers if layer.name not in self.given)


@dataclass(frozen=True)
class _Section:
    """Layers that stand together in the model's forward pass: one, or those of a repeated block."""

    layers: tuple[Layer, ...]
    block: str = ""
    index: int = 0


def _sections(graph: LayerGraph, layers: Sequence[Layer]) -> list[_Section]:
    """The layers in order, the repetitions of each block that can be a class put together."""
    runs: list[_Section] = []
    for layer in layers:
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
    leaving |= {graph.layers[-1].name} & names  # the next stage reads it
    tied = any(
        p.tied_to is not None and (layer.name in names or p.tied_to in names)
        for layer in graph.layers
        for p in layer.parameters
    )
    return len(entering) == 1 and leaving == {run.layers[-1].name} and not tied


def class_texts(wholes: Sequence[ClassOfLayers]) -> list[str]:
    """A class for each kind of block, then those asked for; blocks that look alike share one, in whatever stages they are."""
    sections = [_sections(whole.scene.graph, whole.layers) for whole in wholes]
    bodies: dict[int, str] = {}
    members: dict[str, list[_Section]] = {}
    for whole, own in zip(wholes, sections):
        for section in own:
            if section.block:
                bodies[id(section)] = body = _block_body(whole.scene, section)
                members.setdefault(body, []).append(section)
    names = wholes[0].scene.names
    blocks = list(dict.fromkeys(of_body[0].block for of_body in members.values()))
    classes: dict[str, str] = {}
    for block in blocks:
        alike = [body for body, of_body in members.items() if of_body[0].block == block]
        stem = "Block" if len(blocks) == 1 else "".join(part.title() for part in re.split(r"[._]", block)) + "Block"
        for number, body in enumerate(alike, 1):
            classes[body] = names.of(stem if len(alike) == 1 else f"{stem}{number}")
    texts = [
        body.replace("@class@", classes[body]).replace("@which@", _which(of_body)) for body, of_body in members.items()
    ]
    called = {key: classes[body] for key, body in bodies.items()}
    return [*texts, *(_whole_text(whole, own, called) for whole, own in zip(wholes, sections))]


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
        place = TextPlace(
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
        f"    def __init__(self, path: str{_parameters(scene)}):",
        "        super().__init__()",
        *indented(made),
        "",
        f"    def forward(self, entering: Tensor{'' if scene.is_stage else ', sync: bool = True'}) -> Tensor:",
        *indented(_without_gaps(run)),
        f"        return {variables[section.layers[-1].name]}",
    ]
    return "\n".join(lines)


def _parameters(scene: Scene) -> str:
    """What blocks are made with besides their path."""
    return f"{', placement: Any' if scene.is_stage else ''}{'' if scene.built_in else ', plain: Any'}"


def _write(scene: Scene, layer: Layer, place: TextPlace, made: list[str], run: list[str]) -> None:
    """Append a layer's text."""
    text = layer_text(scene, layer, place)
    made += text.made
    run += ["", *map(comment, scene.heading(layer, place.label)), *text.run]


def _without_gaps(lines: Sequence[str]) -> list[str]:
    """No empty lines at the beginning, nor several in a row."""
    return [line for i, line in enumerate(lines) if line or (i and lines[i - 1])]


def _whole_text(whole: ClassOfLayers, sections: Sequence[_Section], classes: Mapping[int, str]) -> str:
    """The model's own class, or a stage's."""
    scene, graph = whole.scene, whole.scene.graph
    groups = [[layer.name for layer in section.layers] for section in sections]
    variables = _Variables(scene, groups, whole.given, {layer.name: layer.name for layer in graph.layers})
    fed = [layer.name for layer in whole.layers if not graph.inputs(layer.name) and layer.kind != "position"]
    made: list[str] = []
    run: list[str] = []
    for number, section in enumerate(sections):
        if section.block:
            _call(scene, sections, number, classes, variables, made, run)
            continue
        (layer,) = section.layers
        place = TextPlace(
            label=layer.name,
            path=literal,
            inputs=tuple(variables[source] for source in graph.inputs(layer.name)),
            result=variables.result(layer.name),
            data=f"np.zeros((len(inputs), {layer.rows}), dtype=np.int64)" if layer.name in fed[1:] else "inputs",
        )
        _write(scene, layer, place, made, run)
    if scene.is_stage and any("placement" in line for line in made):
        made.insert(0, f"placement = {scene.mesh_text}")
    given = "entering: Any, " if scene.is_stage else ""
    lines = [
        f"class {whole.name}(nn.Module):",
        f'    """{whole.what}"""',
        "",
        f"    def __init__(self{'' if scene.built_in else ', plain: Any'}):",
        "        super().__init__()",
        *indented(made),
        "",
        f"    def forward(self, {given}inputs: np.ndarray, targets: np.ndarray"
        f"{'' if scene.is_stage else ', sync: bool = True'}) -> Tensor:",
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
        extra = (", placement" if scene.is_stage else "") + ("" if scene.built_in else ", plain")
        made += folded(_block_list(attribute, own, classes, extra))
    enters = variables[_entering(graph, section)]
    result, options = variables.result(section.layers[-1].name), "" if scene.is_stage else ", sync"
    is_chain = len(own) > 1 and all(
        _entering(graph, after) == before.layers[-1].name for before, after in zip(own, own[1:])
    )
    if not is_chain or sections[sections.index(own[0]) :][: len(own)] != own:
        run.append(f"{result} = {attribute}[{own.index(section)}]({enters}{options})")
    elif section is own[-1]:
        first = variables[_entering(graph, own[0])]
        run += [
            "",
            *([f"x = {first}"] if first != "x" else []),
            f"for block in {attribute}:",
            f"    x = block(x{options})",
        ]
        run += [f"{result} = x"] if result != "x" else []


def _block_list(attribute: str, following: Sequence[_Section], classes: Mapping[int, str], extra: str) -> str:
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
        f'{name}("{block}.{first}"{extra})'
        if end == first + 1
        else f'*({name}(f"{block}.{{i}}"{extra}) for i in range({f"{first}, {end}" if first else end}))'
        for name, first, end in runs
    ]
    return f"{attribute} = nn.ModuleList([{', '.join(items)}])"
