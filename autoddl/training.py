"""What is trained besides the built-in families: a user's own model, which FILE.py:FUNCTION returns with the samples that it learns
from, and the model of a plan, which is one or the other."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.pipelines.runtime.pipeline.problems import FAMILIES, TextModel, shipped_text
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

__all__ = ["FileProblem", "OwnPlanProblem", "PlanProblem", "plan_trainer", "problem_of_plan"]


@dataclass(frozen=True)
class FileProblem:
    """What FUNCTION of a file returns: an ``nn.Sequential`` and ``(inputs, targets)``, whose rows are the samples.

    Where the targets are whole numbers the loss is the cross entropy of the last layer's output (its last dimension being the
    classes), else the mean squared error. Every micro-batch is drawn from the samples at random. Initial values are the
    model's own; all generators of random numbers are seeded before FUNCTION is called, so that they are the same on every rank.

    Attributes:
        target: ``FILE.py:FUNCTION``.
    """

    target: str

    @property
    def unit(self) -> str:
        return "samples"

    @property
    def units_per_sample(self) -> int:
        return 1

    def check(self) -> None:
        """Nothing is known before the file is loaded, which ranks do."""

    def load(self, micro_batch: int, seed: int) -> tuple[Any, Any]:
        """The chain, and micro-batches by their number.

        Raises:
            UserError: see `load_model`; or the inputs and targets do not fit each other, or the model is no chain.
        """
        from autoddl.pipelines.runtime.load import load_oneflow
        from autoddl.pipelines.runtime.models import token_loss
        from autoddl.pipelines.runtime.pipeline.chain import chain_of

        model, inputs, targets = load_samples(self.target, seed)
        is_of_classes = np.issubdtype(targets.dtype, np.integer)
        loss = token_loss if is_of_classes else load_oneflow().nn.functional.mse_loss
        return chain_of(model, loss), drawn(inputs, targets, micro_batch, seed)


@dataclass(frozen=True)
class OwnPlanProblem:
    """A user's model at the strategies of its plan, on the samples that FUNCTION of a file returns with it.

    The model computes its loss itself. Micro-batches and initial values are those of a `FileProblem`.

    Attributes:
        target: ``FILE.py:FUNCTION``.
        graph, stages: the plan's.
    """

    target: str
    graph: LayerGraph
    stages: tuple[StagePlan, ...]

    @property
    def unit(self) -> str:
        return "samples"

    @property
    def units_per_sample(self) -> int:
        return 1

    def check(self) -> None:
        """The model has been compared with the plan's; the samples are known on ranks only."""

    def load(self, micro_batch: int, seed: int) -> tuple[Any, Any]:
        """The planned model, and micro-batches by their number."""
        from autoddl.pipelines.runtime.stage.model import PlannedModel

        model, inputs, targets = load_samples(self.target, seed)
        return PlannedModel(model, self.graph, self.stages), drawn(inputs, targets, micro_batch, seed)


def load_samples(target: str, seed: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """The module that ``FILE.py:FUNCTION`` returns with its own initial values, and the inputs and targets that it learns.

    Raises:
        UserError: see `load_model`; or the inputs and targets do not fit each other.
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


def drawn(inputs: np.ndarray, targets: np.ndarray, micro_batch: int, seed: int) -> BatchSource:
    """Micro-batches by their number, of samples drawn at random."""

    def batches(number: int) -> tuple[np.ndarray, np.ndarray]:
        rows = np.random.default_rng([seed, number]).integers(0, len(inputs), micro_batch)
        return inputs[rows], targets[rows]

    return batches


@dataclass(frozen=True)
class PlanProblem:
    """The transformer of a plan, on the bytes of a text.

    Attributes:
        data: its sizes, and the text.
        built_in: how it is built.
        graph, stages: the plan's.
    """

    data: TextModel
    built_in: BuiltIn
    graph: LayerGraph
    stages: tuple[StagePlan, ...]

    @property
    def unit(self) -> str:
        return self.data.unit

    @property
    def units_per_sample(self) -> int:
        return self.data.units_per_sample

    def check(self) -> None:
        """Raises UserError where the text cannot be learned."""
        self.data.check()
        vocabulary = self.graph.layers[0].attributes["vocabulary"]
        if vocabulary < self.data.num_tokens:
            raise UserError(
                f"the plan's model has a vocabulary of {vocabulary}; bytes are {self.data.num_tokens} tokens, plan with more"
            )

    def load(self, micro_batch: int, seed: int) -> tuple[Any, Any]:
        """The planned model, and micro-batches by their number."""
        from autoddl.pipelines.runtime.models import initialize
        from autoddl.pipelines.runtime.stage.model import PlannedModel

        from .verification.rank_job import build_module

        module = initialize(build_module(self.built_in), seed)
        return PlannedModel(module, self.graph, self.stages), self.data.batches(micro_batch, seed)


def problem_of_plan(
    plan: PlanFile, model: str, text: Path | None, num_steps: int
) -> tuple[TrainingProblem, Schedule, int]:
    """What a plan trains, the schedule of one run, and the samples of a micro-batch.

    Args:
        model: ``FILE.py:FUNCTION`` that makes the plan's model; "" of one that is built in.
        text: what a built-in model learns; the shipped one where it is None.
        num_steps: of one run, where the schedule is asynchronous.

    Raises:
        UserError: the plan's model is not one that learns a text, and nothing else makes it; or ``model`` makes another one.
    """
    stages, schedule = stage_plans(plan), schedule_of_plan(plan, num_steps)
    size = plan.workload.micro_batch
    if model:
        if text is not None:
            raise UserError(f"text={text} is for built-in models; {model} brings its own data")
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
    data = TextModel(
        *(text or shipped_text(), built_in.family, sizes.layers, sizes.width, sizes.heads, sizes.sequence, sizes.tied)
    )
    return PlanProblem(data, built_in, plan.graph, stages), schedule, size


def plan_trainer(
    module: Any,
    plan: PlanFile,
    make_optimizer: OptimizerFactory,
    batch: BatchSource,
    *,
    num_steps: int | None = None,
    feeds: Mapping[str, int | None] | None = None,
    **options: Any,
) -> PipelineTrainer:
    """A trainer of any plan, on every rank of a job of as many ranks as the plan has; it saves and restores checkpoints.

    A plan without a pipeline is trained as a pipeline of one stage.

    Args:
        module: the unmodified model, on the host; where its values differ, the first rank's are taken.
        make_optimizer: of a list of parameters.
        batch: inputs and targets of a micro-batch (of ``plan.workload.micro_batch`` samples) by its number over all steps.
        num_steps: weight updates of a run of an asynchronous schedule; some by default. Others do one.
        feeds: see :func:`autoddl.apply`.
        options: further ones of the `PipelineTrainer`.

    Raises:
        UserError: see `PipelineTrainer`.
    """
    from autoddl.pipelines.runtime.pipeline.trainer import PipelineTrainer

    schedule = schedule_of_plan(plan, num_steps)
    return PipelineTrainer(planned_model(module, plan, feeds), schedule, make_optimizer, batch, **options)
