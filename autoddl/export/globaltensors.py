"""Writes a plan as a page of OneFlow code for ``nn.Graph``: modules of global tensors, and a graph with its optimizer.

The modules and statements of layers are those that the graph executor runs (:mod:`autoddl.pipelines.runtime.graph.layers`); the
classes of modules are copied from :mod:`autoddl.pipelines.runtime.graph.modules`. Repetitions of a block share a class.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.devices import CPU, GPU
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.graph_meshes import GraphMesh
from autoddl.costmodel.precision import precision_of
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.pipelines.runtime.graph.layers import GlobalLayer, global_layer
from autoddl.pipelines.runtime.graph.meshes import check_graph_plan
from autoddl.pipelines.runtime.model_constants import LAYER_NORM_EPS, LEARNING_RATES, RMS_NORM_EPS, ROTARY_BASE
from autoddl.pipelines.runtime.samples import text_task
from autoddl.pipelines.runtime.statements import Call, Fact, Name

from ..executors import GRAPH, check_executor
from ..staging import stage_plans
from ..zoo.builtin import BuiltIn, MLPSizes, ResNetSizes, VGGSizes
from .assembling import RESERVED, built_in_of, check_graph, merged_imports, names_defined_in, names_in
from .classes import block_sections
from .library import library_text
from .source import Names, comment, plain_text, value_text
from .templates import ENDING, IMPORTS, startup_text
from .writing import folded

if TYPE_CHECKING:
    from ..planfile import PlanFile

__all__ = ["graph_text"]

_DOCSTRING = '''"""@model@ for OneFlow's nn.Graph, with the layouts of an AutoDDL plan. Written by `autoddl export`.

Needs OneFlow 0.9.0 and numpy. Parameters and activations are global tensors. Where a layout changes, `to_global` says it, and that
of the gradient; OneFlow's compiler turns this into transfers. Activations are (samples, rows, features). Start it with

    python3 -m oneflow.distributed.launch --nproc_per_node RANKS_OF_A_NODE THIS_FILE.py --steps 10

or with any launcher that sets MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK and LOCAL_RANK.
"""'''

_TOP = """# Devices ("cuda" or "cpu", also --device cpu) and the type of activations and products; masters of weights are float32.
# Half precision ("float16", "bfloat16") runs on GPUs only.
DEVICE, COMPUTE_TYPE = "@device@", "@compute@"
top = argparse.ArgumentParser(add_help=False)
top.add_argument("--device", default=DEVICE)
DEVICE = top.parse_known_args()[0].device
ON_GPU = DEVICE == "cuda"  # where half precision runs"""

_TRAINING = '''class TrainingGraph(nn.Graph):
    """Forward pass, backward pass and optimizer of a step; gradients of all micro-batches are summed over the ranks once."""

    def __init__(self, model: Model, optimizer: Any):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
@config@        if ON_GPU and COMPUTE_TYPE != "float32":
            self.config.enable_amp(True, dtype=getattr(flow, COMPUTE_TYPE))
            if COMPUTE_TYPE == "float16":
                self.set_grad_scaler(flow.amp.GradScaler())

    def build(self, inputs: Any, targets: Any) -> Any:
        loss = self.model(inputs, targets)
        loss.backward()
        return loss


def initialize(model: Model, seed: int) -> None:
    """Draw initial values of all parameters from the seed and their names."""
    for name, parameter in model.named_parameters():
        value = flow.tensor(
            initial_value(name, tuple(parameter.shape), seed), placement=parameter.placement, sbp=parameter.sbp
        )
        parameter.data.copy_(value)


def batch(seed: int, step: int@batch_argument@) -> tuple[Any, Any]:
    """Return inputs and targets of a step, the same on every rank, as global tensors."""
    rng = np.random.default_rng([seed, step])
@batch@
    return (
        flow.tensor(inputs.reshape(@inputs@), placement=@input_mesh@.placement, sbp=@input_mesh@.sbp(@input_sbp@)),
        flow.tensor(targets.reshape(@targets@), placement=@target_mesh@.placement, sbp=@target_mesh@.sbp(@target_sbp@)),
    )


def main() -> None:
    """Train for the given number of steps."""
    parser = argparse.ArgumentParser(parents=[top], description="Train the model on @what@.")
    parser.add_argument("--steps", type=int, default=10, help="number of training steps (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=@rate@, help="of the optimizer (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of initial values and data (%(default)s)")
@options@    options = parser.parse_args()
    model = Model()
    initialize(model, options.seed)
    graph = TrainingGraph(model, flow.optim.@optimizer@)
@prepare@    for step in range(options.steps):
        loss = graph(*batch(options.seed, step@batch_value@)).to_local().numpy().mean()
        if flow.env.get_rank() == 0:
            print(f"step {step + 1}: loss {loss:.6f}", flush=True)


@ending@
    main()'''

_OPTIMIZERS = {
    "adam": "Adam(model.parameters(), lr=options.learning_rate)",
    "momentum": "SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)",
    "sgd": "SGD(model.parameters(), lr=options.learning_rate)",
}
_OPERATORS = {"add": " + ", "multiply": " * "}


def graph_text(plan: PlanFile) -> str:
    """Return the text of the file.

    Args:
        plan: a plan without a pipeline, of a built-in model.

    Raises:
        UserError: the graph executor cannot run the plan, or its model is not a built-in one.
    """
    check_executor(GRAPH, plan.num_stages)
    built_in = built_in_of(plan.graph, "")
    assert built_in is not None
    check_graph(plan.graph)
    (stage,) = stage_plans(plan)
    if stage.recompute != "none":
        raise UserError(
            f"the plan is for recompute={stage.recompute}, which form='oneflow-graph' does not write; plan with recompute=none, "
            "or export it with form='oneflow'"
        )
    meshes = check_graph_plan(plan.graph, stage.strategies)
    forms = {
        layer.name: global_layer(
            plan.graph,
            layer,
            stage.strategies[layer.name],
            meshes[layer.name],
            functools.partial(_fact, layer, built_in),
        )
        for layer in plan.graph.layers
    }
    writer = _Writer(plan, forms, meshes)
    classes = writer.classes()
    own_text = "\n\n\n".join([writer.meshes_text(), *classes, writer.training_text(built_in)])
    library = library_text(names_in(own_text), (), {"nn", *names_defined_in(own_text)})
    head = [_DOCSTRING.replace("@model@", plain_text(plan.graph.name)), *map(comment, writer.figures()), ""]
    imports = merged_imports(library.standard_imports, IMPORTS)
    compute = precision_of(plan.workload.precision).compute
    top = _TOP.replace("@device@", GPU if plan.cluster.has_gpus else CPU).replace("@compute@", compute)
    imports = [line for line in imports if "__future__" not in line]
    start = ["from __future__ import annotations", "", *imports, "", startup_text(plan.cluster.num_devices)]
    body = [
        f"nn: Any = flow.nn\n{library.early}\n\n{top}",
        *(_with_short_docstrings(text) for _, text in library.sections),
        own_text,
    ]
    text = (
        "\n".join([*head, *start, "", *library.installed_imports, ""]) + "\n" + "\n\n\n".join(filter(None, body)) + "\n"
    )
    ast.parse(text)  # raises SyntaxError: an invalid file must not be written
    return text


def _with_short_docstrings(text: str) -> str:
    """Return definitions whose docstrings are cut after the first line."""
    lines = text.split("\n")
    for node in sorted(ast.walk(ast.parse(text)), key=lambda node: -getattr(node, "lineno", 0)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            first = node.body[0]
            assert first.end_lineno is not None
            if first.end_lineno > first.lineno:
                lines[first.lineno - 1 : first.end_lineno] = [lines[first.lineno - 1] + '"""']
    return "\n".join(lines)


def _fact(layer: Layer, built_in: BuiltIn, fact: Fact) -> Any:
    """Return a property of a built-in model."""
    if fact.function == "eps_of":
        return LAYER_NORM_EPS if layer.attributes["statistics"] == 2 else RMS_NORM_EPS
    if fact.function == "rotary_base_of":
        return ROTARY_BASE if built_in.family in ("llama", "moe") else None
    if fact.function == "convolution_options":
        return {name: layer.attributes[name] for name in ("stride", "padding")}
    return None


@dataclass(frozen=True)
class _Writer:
    """Writes the parts of a file that depend on the plan.

    Attributes:
        plan: the plan.
        forms: modules and statements of each layer.
        meshes: mesh of each layer.
    """

    plan: PlanFile
    forms: Mapping[str, GlobalLayer]
    meshes: Mapping[str, GraphMesh]

    def figures(self) -> list[str]:
        """Return the figures of the plan, for comments at the top."""
        evaluation, workload, cluster = self.plan.evaluation, self.plan.workload, self.plan.cluster
        communication, sent = format_seconds(evaluation.communication_s), format_bytes(evaluation.sent_bytes)
        return [
            f"Cluster  {cluster.name}: {cluster.num_nodes} x {cluster.devices_per_node} {cluster.device.name}",
            f"Step     {workload.batch} {self.plan.graph.sample}s in {workload.num_micro_batches} x {workload.micro_batch}",
            f"Price    {format_seconds(evaluation.step_s)} per step, {communication} of it communication; each rank sends {sent} "
            f"and needs {format_bytes(evaluation.memory_bytes)}",
        ]

    # ---- Meshes --------------------------------------------------------------------------------------------------------------

    def mesh_name(self, mesh: GraphMesh) -> str:
        """Return the name of a mesh in the file."""
        if len(set(self.meshes.values())) == 1:
            return "MESH"
        return "_".join(["MESH", *(f"{role.upper()}_{size}" for role, size in mesh.axes)])

    def meshes_text(self) -> str:
        """Return the definitions of all meshes."""
        lines = [comment("Ranks in rank order, and what their axes split.")]
        for mesh in dict.fromkeys(self.meshes.values()):
            ranks: Any = list(range(mesh.num_ranks))
            if len(mesh.axes) == 2:
                inner = mesh.shape[1]
                ranks = [ranks[start : start + inner] for start in range(0, mesh.num_ranks, inner)]
            roles = ", ".join(map(value_text, mesh.roles))
            shown = value_text(ranks)
            if mesh.num_ranks > 16:
                shown = f"np.arange({mesh.num_ranks}).reshape({value_text(mesh.shape)}).tolist()"
            lines.append(f"{self.mesh_name(mesh)} = Mesh(flow.placement(DEVICE, {shown}), {roles})")
        return "\n".join(lines)

    # ---- Classes -------------------------------------------------------------------------------------------------------------

    def classes(self) -> list[str]:
        """Return the texts of the classes of blocks, and of the class of the model."""
        graph = self.plan.graph
        sections = block_sections(graph, graph.layers)
        texts: dict[str, str] = {}  # class name by text
        init: list[str] = []
        forward: list[str] = []
        values: dict[str, tuple[str, ...]] = {}
        names = Names((*RESERVED, *dir(__builtins__)))
        while sections:
            section = sections[0]
            if not section.block:
                own_init, own_forward = self._layer(section.layers[0], names.of(section.layers[0].name), values, names)
                init += own_init
                forward += own_forward
                del sections[0]
                continue
            # Repetitions in a row with the same text are a loop.
            entering = graph.inputs(section.layers[0].name)[0]
            template = self._block(section.layers)
            run = [section]
            for other in sections[1:]:
                if other.block != section.block or self._block(other.layers) != template:
                    break
                run.append(other)
            del sections[: len(run)]
            class_name = texts.setdefault(template, "Block" if not texts else f"Block{len(texts) + 1}")
            attribute, (source,) = names.of(f"{section.block} {section.index or ''}"), values[entering]
            init.append(f"self.{attribute} = nn.ModuleList([{class_name}() for _ in range({len(run)})])")
            forward += [f"{attribute} = {source}", f"for block in self.{attribute}:"]
            forward.append(f"    {attribute} = block({attribute})")
            values[run[-1].layers[-1].name] = (attribute,)
        (result,) = values[graph.layers[-1].name]
        init += self._ties(names)
        model = _class_text("Model", "The model; it returns the mean loss.", "inputs, targets", init, forward, result)
        return [*(template.replace("@class@", name) for template, name in texts.items()), model]

    def _ties(self, names: Names) -> list[str]:
        return [
            f"self.{names.of(layer.name)}.weight = self.{names.of(parameter.tied_to)}.weight"
            for layer in self.plan.graph.layers
            for parameter in layer.parameters
            if parameter.tied_to is not None
        ]

    def _block(self, layers: Sequence[Layer]) -> str:
        """Return the text of the class of a block, whose first layer reads the only tensor that enters it."""
        entering = self.plan.graph.inputs(layers[0].name)[0]
        init: list[str] = []
        forward: list[str] = []
        values: dict[str, tuple[str, ...]] = {entering: ("x",)}
        names = Names(RESERVED)
        for layer in layers:
            own_init, own_forward = self._layer(layer, names.of(layer.role or layer.name), values, names)
            init += own_init
            forward += own_forward
        (result,) = values[layers[-1].name]
        return _class_text("@class@", "A repeated block.", "x", init, forward, result)

    def _layer(
        self, layer: Layer, label: str, values: dict[str, tuple[str, ...]], names: Names
    ) -> tuple[list[str], list[str]]:
        """Return the lines of a layer in ``__init__`` and in ``forward``; the variables of its results are added to ``values``."""
        form, mesh = self.forms[layer.name], self.meshes[layer.name]
        mesh_name = self.mesh_name(mesh)
        init, forward = [], []
        attributes = {attribute: label if not attribute else f"{label}_{attribute}" for attribute in form.modules}
        for attribute, call in form.modules.items():
            init.append(f"self.{attributes[attribute]} = {_call_text(call, {'mesh': mesh_name})}")
        forward.append(comment(_price(layer, self._assessed(layer))))
        # Inputs, in the layout of this layer.
        sources: list[str] = ["inputs"] if form.data is not None else []
        if form.data is not None and self.plan.graph.data_readers[0].name != layer.name:
            sources = ["flow.zeros_like(inputs)"]
        for producer in self.plan.graph.inputs(layer.name):
            source = self.meshes[producer]
            for value in values[producer]:
                if self._is_image(producer) and len(layer.input_shape) != 3:
                    value = f"{value}.reshape({value}.shape[0], 1, -1)"
                if source != mesh:
                    shared = ", B" if self.forms[producer].is_shared else ""
                    value = f"move({value}, {self.mesh_name(source)}, {mesh_name}{shared})"
                sources.append(value)
        variables: dict[str, str] = {"mesh": mesh_name, "targets": "targets", **dict(zip(form.inputs, sources))}
        # Statements; results have variables named after the layer.
        for call in form.statements:
            (name,) = call.result
            target = label if name == "x" else f"{label}_{name}"
            text = _call_text(call, variables, attributes)
            if call.function:
                forward.append(f"{target} = {text}")
                variables[name] = target
            else:
                variables[name] = text
        values[layer.name] = tuple(variables[name] for name in form.results)
        return init, forward

    def _is_image(self, producer: str) -> bool:
        return len(self.plan.graph[producer].output_shape) == 3

    def _assessed(self, layer: Layer) -> LayerAssessment:
        (figures,) = self.plan.evaluation.stages
        return next(assessed for assessed in figures.assessment.layers if assessed.layer.name == layer.name)

    # ---- Training ------------------------------------------------------------------------------------------------------------

    def training_text(self, built_in: BuiltIn) -> str:
        """Return the graph, data and command line."""
        graph, workload = self.plan.graph, self.plan.workload
        reader = graph.data_readers[0]
        loss = next(layer for layer in graph.layers if self.forms[layer.name].targets is not None)
        data, targets = self.forms[reader.name].data, self.forms[loss.name].targets
        assert data is not None and targets is not None
        config = ""
        if workload.num_micro_batches > 1:
            config += "        if not ON_GPU:\n"
            config += '            raise SystemExit("on CPU ranks nn.Graph sometimes loses accumulated gradients")\n'
            config += f"        self.config.set_gradient_accumulation_steps({workload.num_micro_batches})\n"
        values = {
            "config": config,
            "optimizer": _OPTIMIZERS[workload.optimizer],
            "rate": str(LEARNING_RATES[workload.optimizer]),
            "ending": ENDING,
            "inputs": value_text((workload.batch, *data.shape)),
            "targets": value_text((workload.batch, *targets.shape)),
            "input_mesh": self.mesh_name(self.meshes[reader.name]),
            "target_mesh": self.mesh_name(self.meshes[loss.name]),
            "input_sbp": f"S0, {'S2' if data.is_split else 'B'}",
            "target_sbp": f"S0, {'S2' if targets.is_split else 'B'}",
            **_data_values(built_in, workload.batch),
        }
        text = _TRAINING
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
        return text


def _data_values(built_in: BuiltIn, batch: int) -> dict[str, str]:
    """Return the values of the placeholders for data."""
    sizes = built_in.sizes
    values = {"batch_argument": "", "batch_value": "", "options": "", "prepare": ""}
    if isinstance(sizes, MLPSizes):
        widths = (sizes.widths[0], sizes.widths[-1])
        return {**values, "batch": f"    inputs, targets = random_rows(rng, {widths}, {batch})", "what": "random rows"}
    if isinstance(sizes, (VGGSizes, ResNetSizes)):
        shape = (3, sizes.image, sizes.image)
        line = f"    inputs, targets = random_images(rng, {shape}, {sizes.classes}, {batch})"
        return {**values, "batch": line, "what": "random images"}
    rows, vocabulary, task = sizes.sequence, sizes.vocabulary, text_task(built_in.family)
    return {
        "batch_argument": ', text: bytes = b""',
        "batch_value": ", text",
        "batch": "    if text:\n"
        f"        inputs, targets = {task.samples.__name__}(rng, np.frombuffer(text, np.uint8), {batch}, {rows})\n"
        "    else:\n"
        f"        inputs, targets = random_tokens(rng, {vocabulary}, {batch}, {rows})",
        "options": '    parser.add_argument("--text", metavar="FILE", help="train on the bytes of a file, not on random tokens")\n',
        "prepare": f'    text = read_text(options.text, {rows}, {vocabulary}, {task.num_tokens}) if options.text else b""\n',
        "what": "random tokens, or a text",
    }


# ---- Text ----------------------------------------------------------------------------------------------------------------------


def _call_text(call: Call, variables: Mapping[str, str], attributes: Mapping[str, str] | None = None) -> str:
    """Return the expression of a call."""

    def text(value: Any) -> str:
        if isinstance(value, Name):
            return variables[value.text]
        return _call_text(value, variables) if isinstance(value, Call) else value_text(value)

    arguments = [text(value) for value in call.arguments]
    if call.function in _OPERATORS:
        return _OPERATORS[call.function].join(arguments)
    if not call.function:
        return arguments[0]
    arguments += [f"{name}={text(value)}" for name, value in call.options.items()]
    owner, _, attribute = call.function.rpartition(".")
    function = f"self.{(attributes or {})[attribute]}" if owner == "self" else call.function
    return f"{function}({', '.join(arguments)})"


def _price(layer: Layer, assessed: LayerAssessment) -> str:
    """Return the strategy and the price of a layer per step."""
    parts = [f"{format_seconds(assessed.compute_s)} compute"]
    if assessed.sent_bytes:
        parts.append(
            f"{format_seconds(assessed.communication_s)} communication, {format_bytes(assessed.sent_bytes)} sent"
        )
    return f"{layer.role or layer.name} {assessed.strategy}: {', '.join(parts)} per step"


def _class_text(
    name: str, docstring: str, arguments: str, init: Sequence[str], forward: Sequence[str], result: str
) -> str:
    """Return the text of a class of modules."""
    typed = ", ".join(f"{argument.strip()}: Any" for argument in arguments.split(","))

    def body(lines: Sequence[str]) -> list[str]:
        return [part for line in lines for part in folded(f"        {line}", "        ")]

    return "\n".join(
        [
            f"class {name}(nn.Module):",
            f'    """{docstring}"""',
            "",
            "    def __init__(self) -> None:",
            "        super().__init__()",
            *body(init),
            "",
            f"    def forward(self, {typed}) -> Any:",
            *body(forward),
            f"        return {result}",
        ]
    )
