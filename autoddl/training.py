"""Training problems of users' own models and of plans, and the trainer of a plan.

=================  ==========================================  ==========================================================
problem            model                                       data
=================  ==========================================  ==========================================================
`FileProblem`      ``nn.Sequential`` from FILE.py:FUNCTION     samples from the same function
`OwnPlanProblem`   module from FILE.py:FUNCTION, at its plan   samples from the same function
`PlanProblem`      built-in transformer, at its plan           bytes of a text
=================  ==========================================  ==========================================================

Built-in models without a plan are in :mod:`autoddl.pipelines.runtime.pipeline.problems`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autoddl.costmodel.devices import chosen_device
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.pipelines.runtime.pipeline.problems import (
    FAMILIES,
    CountedInSamples,
    TextModel,
    random_batches,
    shipped_text,
)
from autoddl.pipelines.runtime.stage.plan import StagePlan

from .ownmodels import function_of_plan
from .planfile import PlanFile
from .staging import planned_model, schedule_of_plan, stage_plans
from .zoo import is_oneflow_model
from .zoo.builtin import BuiltIn, recognise
from .zoo.transformers import Transformer

if TYPE_CHECKING:
    from autoddl.pipelines.runtime.pipeline.data import BatchSource
    from autoddl.pipelines.runtime.pipeline.problems import TrainingProblem
    from autoddl.pipelines.runtime.pipeline.trainer import PipelineTrainer
    from autoddl.pipelines.runtime.pipeline.weights import OptimizerFactory
    from autoddl.pipelines.schedule import Schedule

__all__ = ["FileProblem", "OwnPlanProblem", "PlanProblem", "check_no_text", "plan_trainer", "problem_of_plan"]


@dataclass(frozen=True)
class FileProblem(CountedInSamples):
    """A user's ``nn.Sequential``, and the samples that it learns from: the results of ``FILE.py:FUNCTION``.

    FUNCTION returns the module and ``(inputs, targets)``, whose rows are the samples. If the targets are integers, the loss is the
    cross entropy of the last layer's output, whose last dimension is the classes; otherwise it is the mean squared error. Every
    micro-batch is drawn from the samples at random. The module keeps its own initial values; all random number generators are
    seeded before FUNCTION is called, so that every rank has the same values.

    Attributes:
        target: ``FILE.py:FUNCTION``.
    """

    target: str

    def check(self) -> None:
        """Do nothing: the file is loaded, and checked, on the ranks only."""

    def load(self, micro_batch: int, seed: int) -> tuple[Any, BatchSource]:
        """Return the chain and its micro-batches by number.

        Raises:
            UserError: As for `load_samples`; or the module is not a chain.
        """
        from autoddl.pipelines.runtime.load import load_oneflow
        from autoddl.pipelines.runtime.models import token_loss
        from autoddl.pipelines.runtime.pipeline.chain import module_chain_of

        model, inputs, targets = load_samples(self.target, seed)
        is_of_classes = np.issubdtype(targets.dtype, np.integer)
        loss = token_loss if is_of_classes else load_oneflow().nn.functional.mse_loss
        return module_chain_of(model, loss), drawn_samples(inputs, targets, micro_batch, seed)


@dataclass(frozen=True)
class OwnPlanProblem(CountedInSamples):
    """A user's module at the strategies of its plan, and the samples that ``FILE.py:FUNCTION`` returns with it.

    The module computes its loss itself. Micro-batches and initial values are determined as for a `FileProblem`.

    Attributes:
        target: ``FILE.py:FUNCTION``.
        graph: Layer graph of the plan.
        stages: Plans of the stages.
    """

    target: str
    graph: LayerGraph
    stages: tuple[StagePlan, ...]

    def check(self) -> None:
        """Do nothing: `problem_of_plan` has compared the model with the plan, and the samples are loaded on the ranks only."""

    def load(self, micro_batch: int, seed: int) -> tuple[Any, BatchSource]:
        """Return the planned model and its micro-batches by number.

        Raises:
            UserError: As for `load_samples`.
        """
        from autoddl.pipelines.runtime.stage.model import PlannedModel

        model, inputs, targets = load_samples(self.target, seed)
        return PlannedModel(model, self.graph, self.stages), drawn_samples(inputs, targets, micro_batch, seed)


def load_samples(target: str, seed: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """Call ``FILE.py:FUNCTION`` and return (module with its own initial values, inputs, targets).

    Args:
        target: ``FILE.py:FUNCTION``.
        seed: Seed of all random number generators that the function may use.

    Raises:
        UserError: As for `load_model`; or the function does not return inputs and targets with the same number of rows.
    """
    from autoddl.pipelines.runtime.load import load_oneflow

    from .extraction.userfile import load_model

    flow: Any = load_oneflow()
    for seeded in (random.seed, np.random.seed, flow.manual_seed):
        seeded(seed)
    model, tensors = load_model(target, with_values=True)
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(tensors) != 2 or not all(shapes) or shapes[0][0] != shapes[1][0] or not shapes[0][0]:
        shown = " and ".join("x".join(map(str, shape)) or "a single number" for shape in shapes)
        raise UserError(
            f"{target} returns tensors of {shown}; to train it should return the model and (inputs, targets), "
            "with as many rows each"
        )
    inputs, targets = (np.array(tensor.numpy()) for tensor in tensors)
    return model, inputs, targets


def drawn_samples(inputs: np.ndarray, targets: np.ndarray, micro_batch: int, seed: int) -> BatchSource:
    """Return micro-batches of ``micro_batch`` samples drawn at random, with replacement."""

    def draw(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        rows = rng.integers(0, len(inputs), micro_batch)
        return inputs[rows], targets[rows]

    return random_batches(seed, draw)


@dataclass(frozen=True)
class PlanProblem:
    """A built-in transformer at the strategies of its plan, which learns the bytes of a text.

    Attributes:
        text_model: The same transformer without a plan: its sizes and its text.
        built_in: Recipe by which the module is built.
        graph: Layer graph of the plan.
        stages: Plans of the stages.
    """

    text_model: TextModel
    built_in: BuiltIn
    graph: LayerGraph
    stages: tuple[StagePlan, ...]

    @property
    def unit(self) -> str:
        return self.text_model.unit

    @property
    def units_per_sample(self) -> int:
        return self.text_model.units_per_sample

    def check(self) -> None:
        """Check the sizes, the text and the vocabulary.

        Raises:
            UserError: As for `TextModel.check`; or the plan's vocabulary is smaller than the number of tokens.
        """
        self.text_model.check()
        vocabulary = self.graph.layers[0].attributes["vocabulary"]
        num_tokens = self.text_model.num_tokens
        if vocabulary < num_tokens:
            raise UserError(
                f"the plan's model has a vocabulary of {vocabulary}; bytes are {num_tokens} tokens, plan with more"
            )

    def load(self, micro_batch: int, seed: int) -> tuple[Any, BatchSource]:
        """Return the planned model and its micro-batches by number."""
        from autoddl.pipelines.runtime.models import initialize
        from autoddl.pipelines.runtime.stage.model import PlannedModel

        from .zoo.modules import build_module

        module = initialize(build_module(self.built_in), seed)
        return PlannedModel(module, self.graph, self.stages), self.text_model.batches(micro_batch, seed)


def problem_of_plan(
    plan: PlanFile, model: str, text: Path | None, num_steps: int
) -> tuple[TrainingProblem, Schedule, int]:
    """Return the training problem of a plan, the schedule of one run, and the number of samples in a micro-batch.

    Args:
        plan: The plan.
        model: ``FILE.py:FUNCTION`` that returns the plan's module and its samples; "" if the plan's model is built in.
        text: Text that a built-in model learns; None: the shipped one.
        num_steps: Training steps of one run, if the schedule is asynchronous.

    Raises:
        UserError: The plan's model is not a built-in one that learns a text, and ``model`` is not given; or ``model`` makes another
            model than the plan's; or a text is given with ``model``.
    """
    stages, schedule = stage_plans(plan), schedule_of_plan(plan, num_steps)
    size = plan.workload.micro_batch
    if model:
        check_no_text(text, model)
        if not is_oneflow_model(model):
            raise UserError(f"model {model!r} should be FILE.py:FUNCTION")
        return OwnPlanProblem(function_of_plan(plan, model), plan.graph, stages), schedule, size
    built_in = recognise(plan.graph)
    if built_in is None or built_in.family not in FAMILIES or not isinstance(built_in.sizes, Transformer):
        raise UserError(
            f"the plan's model {plan.graph.name} is not one that learns a text: {', '.join(FAMILIES)}; "
            "give model=FILE.py:FUNCTION, which makes it and its samples"
        )
    sizes = built_in.sizes
    text_model = TextModel(
        text or shipped_text(),
        built_in.family,
        sizes.layers,
        sizes.width,
        sizes.heads,
        sizes.sequence,
        sizes.tied,
    )
    return PlanProblem(text_model, built_in, plan.graph, stages), schedule, size


def check_no_text(text: Path | None, model: str) -> None:
    """Refuse a text for ``FILE.py:FUNCTION``, which returns the samples itself.

    Raises:
        UserError: ``text`` is given.
    """
    if text is not None:
        raise UserError(f"text={text} is for built-in models; {model} brings its own data")


def plan_trainer(
    module: Any,
    plan: PlanFile,
    make_optimizer: OptimizerFactory,
    batch: BatchSource,
    *,
    num_steps: int | None = None,
    feeds: Mapping[str, int | None] | None = None,
    device: str | None = None,
    **options: Any,
) -> PipelineTrainer:
    """Return the trainer of a plan; called on every rank of a job with as many ranks as the plan has.

    A plan without a pipeline is trained as a pipeline of one stage. The trainer can save and restore checkpoints.

    Args:
        module: The unmodified model, on the host. The values of the first rank are used on all ranks.
        plan: The plan.
        make_optimizer: Returns an optimizer for a list of parameters.
        batch: Returns the (inputs, targets) of a micro-batch of ``plan.workload.micro_batch`` samples, by its number over all
            steps.
        num_steps: Weight updates in one run of an asynchronous schedule; None: a default number. A run of a synchronous schedule
            is one weight update.
        feeds: Index of the model's input that each input layer reads; see :func:`autoddl.apply`.
        device: Type of device; see :func:`autoddl.apply`.
        options: Further options of the `PipelineTrainer`.

    Raises:
        UserError: As for `PipelineTrainer`.
    """
    from autoddl.pipelines.runtime.backend import backend_of
    from autoddl.pipelines.runtime.pipeline.trainer import PipelineTrainer

    from .api.tracing import StepTracer

    schedule = schedule_of_plan(plan, num_steps)
    options["backend"] = backend_of(plan.workload.precision, chosen_device(plan.cluster.has_gpus, device), plan.cluster)
    options["tracer"] = StepTracer.of_job(plan, schedule)
    return PipelineTrainer(planned_model(module, plan, feeds), schedule, make_optimizer, batch, **options)
