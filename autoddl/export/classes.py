"""Writes the classes of an exported OneFlow file: one for each kind of repeated block, and one for the model or for each stage.

Repetitions of a block whose text is the same share a class. A block becomes a class if one tensor enters it, only the output of its
last layer leaves it, and it shares no weights with other layers. Otherwise its layers are written into the model's class.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.layerwork import is_in_recomputed_block
from autoddl.costmodel.units import format_bytes, format_seconds

from .layertext import TextPlace, layer_text
from .scene import ONE_STAGE, Scene
from .source import comment, literal
from .writing import folded, indented

__all__ = ["ClassOfLayers", "block_sections", "class_texts"]


@dataclass(frozen=True)
class ClassOfLayers:
    """A class to be written: the model, or a stage of it.

    Attributes:
        scene: the model or the stage.
        name: name of the class.
        docstring: text of its docstring.
        inputs: for layers whose outputs the method ``forward`` receives, the names of its parameters.
    """

    scene: Scene
    name: str
    docstring: str
    inputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers that the class runs."""
        return tuple(layer for layer in self.scene.graph.layers if layer.name not in self.inputs)


@dataclass(frozen=True)
class _Section:
    """Layers that are written together: a single layer, or the layers of one repetition of a block.

    Attributes:
        layers: the layers in graph order.
        block: name of the block; empty for a single layer.
        index: number of the repetition.
    """

    layers: tuple[Layer, ...]
    block: str = ""
    index: int = 0


def block_sections(graph: LayerGraph, layers: Sequence[Layer]) -> list[_Section]:
    """Divide layers into sections; repetitions of a block are one section each if the block can be a class."""
    # Layers in a row that belong to the same repetition.
    runs: list[_Section] = []
    for layer in layers:
        last = runs[-1] if runs else None
        if layer.block and last and (last.block, last.index) == (layer.block, layer.block_index):
            runs[-1] = _Section((*last.layers, layer), layer.block, layer.block_index)
        else:
            runs.append(_Section((layer,), layer.block, layer.block_index if layer.block else 0))
    # Blocks of which no repetition becomes a class: one cannot be a class, or its layers do not stand in a row.
    excluded = {run.block for run in runs if run.block and not _can_be_class(graph, run)}
    seen: set[tuple[str, int]] = set()
    for run in runs:
        if run.block and (run.block, run.index) in seen:
            excluded.add(run.block)
        seen.add((run.block, run.index))
    sections = []
    for run in runs:
        if run.block and run.block not in excluded:
            sections.append(run)
        else:
            sections += [_Section((layer,)) for layer in run.layers]
    return sections


def check_recomputation(scene: Scene, sections: Sequence[_Section]) -> None:
    """Check that blocks that are recomputed as a whole can be written.

    Raises:
        UserError: a block cannot be a class.
    """
    for section in sections:
        (layer, *_) = section.layers
        if not section.block and _is_recomputed(scene, section):
            raise UserError(
                f"block {layer.block}.{layer.block_index} is recomputed, but form='oneflow' cannot write it as a class: several "
                "tensors enter or leave it, or it shares weights; plan with recompute='layers'"
            )


def _is_recomputed(scene: Scene, section: _Section) -> bool:
    """Return whether the backward pass runs the block of a section again as a whole."""
    recompute = scene.workload.recompute
    places = (scene.graph.place(layer.name, recompute) for layer in section.layers)
    return any(is_in_recomputed_block(place, recompute) for place in places)


def _can_be_class(graph: LayerGraph, run: _Section) -> bool:
    """Return whether a repetition of a block can be written as a class.

    One tensor has to enter it, only the output of its last layer may leave it, and it may share no weights with other layers. All
    names in it have to begin with its own name: the class gets this prefix as an argument.
    """
    names, prefix = {layer.name for layer in run.layers}, f"{run.block}.{run.index}."
    if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", run.block, re.ASCII):
        return False
    for layer in run.layers:
        # The module of a layer may be the block itself.
        paths = [layer.name, *(f"{path}.module" for path in layer.modules), *(p.name for p in layer.parameters)]
        for program in layer.programs:
            if program.reads_data:
                return False
            paths += [source.name for source in program.sources if source.origin == "buffer"]
            streams = [call.attributes["stream"] for call in program.calls if "stream" in call.attributes]
            paths += [f"{stream.rsplit(' ', 2)[0]}.random" for stream in streams]
        paths += [stream.rsplit(" ", 2)[0] for stream in layer.dropouts]
        if not graph.inputs(layer.name) or not all(
            path.startswith(prefix) and re.fullmatch(r"[\w.+]+", path, re.ASCII) for path in paths
        ):
            return False
    entering = {source for source, target in graph.edges if target in names and source not in names}
    leaving = {source for source, target in graph.edges if source in names and target not in names}
    leaving |= {graph.layers[-1].name} & names  # the next stage reads it
    has_tied_weights = any(
        p.tied_to is not None and (layer.name in names or p.tied_to in names)
        for layer in graph.layers
        for p in layer.parameters
    )
    return len(entering) == 1 and leaving == {run.layers[-1].name} and not has_tied_weights


def class_texts(models: Sequence[ClassOfLayers]) -> list[str]:
    """Return the texts of all classes: those of the blocks, then those of the models or stages.

    Args:
        models: the model, or all stages of a pipeline. Blocks with the same text share a class, even in different stages.
    """
    sections_of = [block_sections(model.scene.graph, model.layers) for model in models]
    for model, sections in zip(models, sections_of):
        check_recomputation(model.scene, sections)
    # The text of each repetition, with placeholders for the name of the class and for the repetitions that it is for.
    templates: dict[int, str] = {}
    repetitions: dict[str, list[_Section]] = {}
    for model, sections in zip(models, sections_of):
        for section in sections:
            if section.block:
                templates[id(section)] = template = _block_template(model.scene, section)
                repetitions.setdefault(template, []).append(section)
    class_names = _class_names(models[0].scene, repetitions)
    texts = [
        template.replace("@class@", class_names[template]).replace("@repetitions@", _repetitions_text(sections))
        for template, sections in repetitions.items()
    ]
    class_of = {section_id: class_names[template] for section_id, template in templates.items()}
    return [*texts, *(_model_text(model, sections, class_of) for model, sections in zip(models, sections_of))]


def _class_names(scene: Scene, repetitions: Mapping[str, Sequence[_Section]]) -> dict[str, str]:
    """Return a class name for each text: ``Block``, after the block's name if there are several blocks; numbered if needed."""
    blocks = list(dict.fromkeys(sections[0].block for sections in repetitions.values()))
    class_names: dict[str, str] = {}
    for block in blocks:
        variants = [template for template, sections in repetitions.items() if sections[0].block == block]
        stem = "Block" if len(blocks) == 1 else "".join(part.title() for part in re.split(r"[._]", block)) + "Block"
        for number, template in enumerate(variants, 1):
            class_names[template] = scene.names.of(stem if len(variants) == 1 else f"{stem}{number}")
    return class_names


def _repetitions_text(sections: Sequence[_Section]) -> str:
    """Name the repetitions that a class is for."""
    block, first, last = sections[0].block, sections[0].index, sections[-1].index
    if len(sections) == 1:
        return f"Block {block}.{first}"
    return f"Blocks {block}.{first} to {block}.{last} ({len(sections)} in all)"


class _Variables:
    """The variable of each layer's output: ``x`` if only the next section reads it, otherwise a variable of its own.

    Args:
        scene: the model or the stage.
        groups: for each section, the names of its layers.
        inputs: variables of outputs that are computed elsewhere.
        labels: names of the layers in the class.
    """

    def __init__(
        self, scene: Scene, groups: Sequence[Sequence[str]], inputs: Mapping[str, str], labels: Mapping[str, str]
    ):
        self._variables = dict(inputs)
        self._scene, self._labels = scene, labels
        self._group_of = {name: number for number, names in enumerate(groups) for name in names}

    def result(self, name: str) -> str:
        """Choose the variable of a layer's output."""
        own_group = self._group_of[name]
        readers = {
            self._group_of[target]
            for source, target in self._scene.graph.edges
            if source == name and target in self._group_of
        } - {own_group}
        self._variables[name] = "x" if readers <= {own_group + 1} else self._scene.names.of(self._labels[name])
        return self._variables[name]

    def __getitem__(self, name: str) -> str:
        return self._variables[name]


def _input_of(graph: LayerGraph, section: _Section) -> str:
    """Return the name of the layer whose output a repetition of a block reads."""
    names = {layer.name for layer in section.layers}
    return next(source for source, target in graph.edges if target in names and source not in names)


def _block_template(scene: Scene, section: _Section) -> str:
    """Return the text of a repetition's class. It is the same for equal repetitions: numbers of repetitions do not occur in it."""
    graph, prefix = scene.graph, f"{section.block}.{section.index}."
    labels = {layer.name: layer.name[len(prefix) :] for layer in section.layers}
    inputs = {_input_of(graph, section): "block_input"}
    variables = _Variables(scene, [[layer.name] for layer in section.layers], inputs, labels)
    init: list[str] = []
    forward: list[str] = []
    for layer in section.layers:
        place = TextPlace(
            label=labels[layer.name],
            path=lambda name: f'f"{{path}}{name[len(prefix) - 1 :]}"',
            inputs=tuple(variables[source] for source in graph.inputs(layer.name)),
            result=variables.result(layer.name),
            data="",
        )
        _append_layer(scene, layer, place, init, forward)
    assessed = [scene.assessed[layer.name] for layer in section.layers]
    seconds = format_seconds(sum(layer.compute_s + layer.communication_s for layer in assessed))
    sent = format_bytes(sum(layer.sent_bytes for layer in assessed))
    lines = [
        "class @class@(nn.Module):",
        f'    """@repetitions@. Per block and step: {seconds}, {sent} sent by each rank."""',
        "",
        f"    def __init__(self, path: str{_parameters({**scene.form.block_arguments, **_plain(scene)})}):",
        "        super().__init__()",
        *indented(init),
        "",
        f"    def forward(self, block_input: Tensor{_parameters(scene.form.forward_arguments)}) -> Tensor:",
        *indented(_without_extra_blank_lines(forward)),
        f"        return {variables[section.layers[-1].name]}",
    ]
    return "\n".join(lines)


def _plain(scene: Scene) -> dict[str, str]:
    """Return the argument of ``__init__`` with the plain model, with its type; none for built-in models."""
    return {} if scene.built_in else {"plain": "Any"}


def _parameters(types: Mapping[str, str]) -> str:
    """Return further parameters of a method as text, given the type of each."""
    return "".join(f", {name}: {kind}" for name, kind in types.items())


def _arguments(names: Iterable[str]) -> str:
    """Return further arguments of a call as text."""
    return "".join(f", {name}" for name in names)


def _append_layer(scene: Scene, layer: Layer, place: TextPlace, init: list[str], forward: list[str]) -> None:
    """Append the statements of a layer to the lines of ``__init__`` and of ``forward``."""
    text = layer_text(scene, layer, place)
    init += text.init
    forward += ["", *map(comment, scene.heading(layer, place.label)), *text.forward]


def _without_extra_blank_lines(lines: Sequence[str]) -> list[str]:
    """Remove empty lines at the beginning, and all but the first of several in a row."""
    return [line for i, line in enumerate(lines) if line or (i and lines[i - 1])]


def _model_text(model: ClassOfLayers, sections: Sequence[_Section], class_of: Mapping[int, str]) -> str:
    """Return the text of the class of the model or of a stage.

    Args:
        class_of: name of the class of each repetition of a block, by the ``id`` of its section.
    """
    scene, graph = model.scene, model.scene.graph
    groups = [[layer.name for layer in section.layers] for section in sections]
    variables = _Variables(scene, groups, model.inputs, {layer.name: layer.name for layer in graph.layers})
    # Layers that read the model's input. Only the first of them gets it; further ones (token types) get zeros.
    readers = [layer.name for layer in graph.data_readers if layer.name not in model.inputs]
    init: list[str] = []
    forward: list[str] = []
    inputs = "arguments[0]" if scene.is_traced else "inputs"
    for number, section in enumerate(sections):
        if section.block:
            _append_block(scene, sections, number, class_of, variables, init, forward)
            continue
        (layer,) = section.layers
        place = TextPlace(
            label=layer.name,
            path=literal,
            inputs=tuple(variables[source] for source in graph.inputs(layer.name)),
            result=variables.result(layer.name),
            data=f"np.zeros((len({inputs}), {layer.rows}), dtype=np.int64)" if layer.name in readers[1:] else inputs,
        )
        _append_layer(scene, layer, place, init, forward)
    # A stage places its parameters on a mesh of its own; blocks that it makes get this mesh as an argument.
    if scene.form.block_arguments and any(scene.form.mesh in line for line in init):
        init.insert(0, f"{scene.form.mesh} = {scene.mesh_text}")
    stage_input = "stage_input: Any, " if scene.form.has_stage_input else ""
    lines = [
        f"class {model.name}(nn.Module):",
        f'    """{model.docstring}"""',
        "",
        f"    def __init__(self{_parameters(_plain(scene))}):",
        "        super().__init__()",
        *indented(init),
        "",
        f"    def forward(self, {stage_input}{_model_arguments(scene)}"
        f"{_parameters(scene.form.forward_arguments)}) -> Tensor:",
        *(["        PASSES.begin(self.training)"] if scene.draws_numbers and scene.form is ONE_STAGE else []),
        *indented(_without_extra_blank_lines(forward)),
        f"        return {variables[graph.layers[-1].name]}",
    ]
    return "\n".join(lines)


def _model_arguments(scene: Scene) -> str:
    """Return the arguments of the model: inputs and targets, or whatever a traced model reads."""
    return "*arguments: np.ndarray" if scene.is_traced else "inputs: np.ndarray, targets: np.ndarray"


def _append_block(
    scene: Scene,
    sections: Sequence[_Section],
    number: int,
    class_of: Mapping[int, str],
    variables: _Variables,
    init: list[str],
    forward: list[str],
) -> None:
    """Append a repetition of a block to the lines of ``__init__`` and of ``forward``.

    The first repetition adds the list of all repetitions to ``__init__``. If each repetition reads the output of the previous one,
    the last adds a loop over the list to ``forward``; otherwise each adds a call.
    """
    section, graph = sections[number], scene.graph
    repetitions = [other for other in sections if other.block == section.block]
    is_taken = any(layer.name == section.block for layer in graph.layers)
    attribute = f"self.{scene.names.of(f'{section.block} blocks' if is_taken else section.block)}"
    if section is repetitions[0]:
        arguments = _arguments({**scene.form.block_arguments, **_plain(scene)})
        init += folded(_block_list(attribute, repetitions, class_of, arguments))
    variable = variables[_input_of(graph, section)]
    result, options = variables.result(section.layers[-1].name), _arguments(scene.form.forward_arguments)
    is_chain = len(repetitions) > 1 and all(
        _input_of(graph, after) == before.layers[-1].name for before, after in zip(repetitions, repetitions[1:])
    )
    start = sections.index(repetitions[0])
    num_recomputed = sum(_is_recomputed(scene, one) for one in repetitions)
    if not is_chain or sections[start : start + len(repetitions)] != repetitions:
        called = f"{attribute}[{repetitions.index(section)}]"
        is_recomputed = _is_recomputed(scene, section)
        call = f"checkpoint_block({called}, {variable}{options})" if is_recomputed else f"{called}({variable}{options})"
        forward.append(f"{result} = {call}")
    elif section is repetitions[-1]:
        first = variables[_input_of(graph, repetitions[0])]
        forward += [
            "",
            *([f"x = {first}"] if first != "x" else []),
            *_loop_over_blocks(attribute, options, num_recomputed, len(repetitions)),
        ]
        forward += [f"{result} = x"] if result != "x" else []


def _loop_over_blocks(attribute: str, options: str, num_recomputed: int, num_blocks: int) -> list[str]:
    """Return the lines of a loop over blocks, of which the first ones are recomputed."""
    if num_recomputed == num_blocks:
        return [f"for block in {attribute}:", f"    x = checkpoint_block(block, x{options})"]
    if not num_recomputed:
        return [f"for block in {attribute}:", f"    x = block(x{options})"]
    return [
        f"for block in {attribute}[:{num_recomputed}]:",
        f"    x = checkpoint_block(block, x{options})",
        f"for block in {attribute}[{num_recomputed}:]:",
        f"    x = block(x{options})",
    ]


def _block_list(attribute: str, repetitions: Sequence[_Section], class_of: Mapping[int, str], arguments: str) -> str:
    """Return the statement that makes a ``nn.ModuleList`` of all repetitions; several in a row of one class are a comprehension.

    Args:
        attribute: expression of the list.
        arguments: arguments of the classes after the path.
    """
    runs: list[tuple[str, int, int]] = []  # class, first repetition, the one after the last
    for section in repetitions:
        name = class_of[id(section)]
        if runs and runs[-1][0] == name and runs[-1][2] == section.index:
            runs[-1] = (name, runs[-1][1], section.index + 1)
        else:
            runs.append((name, section.index, section.index + 1))
    block = repetitions[0].block
    items = [
        f'{name}("{block}.{first}"{arguments})'
        if end == first + 1
        else f'*({name}(f"{block}.{{i}}"{arguments}) for i in range({f"{first}, {end}" if first else end}))'
        for name, first, end in runs
    ]
    return f"{attribute} = nn.ModuleList([{', '.join(items)}])"
