"""The class `Plan`, which `plan` and `load` return: its figures, and methods to explain, export and verify it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.limits import MAX_SECONDS
from autoddl.pipelines.joint.utilisation import tokens_per_s_per_device

from .. import planfile
from ..explain import explain, view_of
from . import display
from .figures import PlannedLayer, PlannedStage, layers_of, stages_of
from .files import FilePath, write_if_path
from .results import Difference, Explanation, Verification

if TYPE_CHECKING:
    import pandas

    from autoddl.pipelines.joint.result import PlanResult

    from ..explain import Alternative, PlanView
    from ..text.tables import Text
    from ..trusting import PlanTrust
    from .schedules import Timeline

__all__ = ["Plan", "check_verification"]

#: The default form of `Plan.export` for each suffix of the file.
_FORM_OF_SUFFIX = {".py": "oneflow", ".json": "json", ".graphml": "graphml", ".dot": "dot", ".gv": "dot"}


@dataclass(frozen=True, repr=False)
class Plan(planfile.PlanFile):
    """A training plan: the strategy of every layer, the stages and schedule of a pipeline, predicted figures and the proof.

    :func:`autoddl.plan` and :func:`autoddl.load` return plans.  Times are seconds per training step; memory is that of the device
    that needs the most.

    Attributes:
        graph, cluster, workload: The model, the cluster and the training workload that the plan was made for.
        strategies: Strategy of each layer by name, over the devices of the layer's stage.
        document: The whole plan as a JSON document.
        evaluation: The stages, their schedule and its simulation; a plan without a pipeline has one stage.
        search: Result of the planner with statistics of the search; None if the plan was read from a file.
        trust: Reliability of the prediction on a calibrated cluster; None if unknown.
        where: Name of the plan in texts: the file that it was read from, or "the plan".

    >>> import autoddl
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
    >>> plan
    <Plan mlp:256,1024,256 on dgx-a100: 1 node of 8 x NVIDIA A100 SXM4 80 GB; 208 us per step, proven optimal>
    >>> [layer.name for layer in plan.layers], plan.optimal, plan.num_stages
    (['fc1', 'fc2'], True, 1)
    """

    search: PlanResult | None = field(default=None, compare=False)
    trust: PlanTrust | None = field(default=None, compare=False)
    where: str = field(default="the plan", compare=False)

    # ---- Figures

    @property
    def model(self) -> str:
        """Name of the model."""
        return str(self.document["model"])

    @property
    def objective(self) -> str:
        """The time that was minimized: ``step`` or ``communication``."""
        return str(self.document["objective"])

    @property
    def status(self) -> str:
        """How the search ended: ``optimal``, ``limit reached`` or ``interrupted``; ``edited`` if the plan was edited, ``priced`` if
        the configuration was given."""
        return str(self.document["status"])

    @property
    def step_s(self) -> float:
        """Predicted time of a training step, in seconds."""
        return float(self.document["step_s"])

    @property
    def compute_s(self) -> float:
        """Computation time per step, in seconds; in a pipeline, that of the busiest worker."""
        return float(self.document["compute_s"])

    @property
    def communication_s(self) -> float:
        """Communication time per step, in seconds; in a pipeline, that of the busiest worker without overlapped communication."""
        return float(self.document["communication_s"])

    @property
    def samples_per_s(self) -> float:
        """Throughput of all devices, in samples (sequences, images or rows) per second."""
        return self.view.rate

    @property
    def tokens_per_s_per_device(self) -> float | None:
        """Throughput of a device in tokens per second; None if samples are not sequences."""
        return tokens_per_s_per_device(self.graph, self.evaluation)

    @property
    def model_flops_utilisation(self) -> float:
        """FLOP/s of the model as a part of the peak FLOP/s of all devices.

        The FLOPs of a step are 3 times those of the forward pass: attention counts in full, recomputation does not count.
        """
        return self.view.utilisation

    @property
    def hardware_flops_utilisation(self) -> float:
        """FLOP/s that the devices compute as a part of their peak FLOP/s: with recomputation, without skipped scores."""
        return self.view.hardware_utilisation

    @property
    def memory_bytes(self) -> float:
        """Predicted peak memory of the device that needs the most, in bytes."""
        return float(self.document["memory_bytes"])

    @property
    def memory_limit_bytes(self) -> float:
        """Memory limit per device in the search, in bytes."""
        return float(self.document["memory_limit_bytes"])

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends per step."""
        return float(self.document["sent_bytes"])

    @property
    def optimal(self) -> bool:
        """Whether the plan is proven optimal in its search space; False if the plan was edited, or priced."""
        return bool(self.document["optimal"])

    @property
    def lower_bound_s(self) -> float | None:
        """Proven lower bound on the cost of every plan in the search space, in seconds; None if the plan was edited, or priced."""
        bound = self.document["lower_bound_s"]
        return None if bound is None else float(bound)

    @property
    def gap(self) -> float | None:
        """Largest possible improvement over this plan, as a fraction of its cost; None if the plan was edited, or priced."""
        gap = self.document["gap"]
        return None if gap is None else float(gap)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the model, the cluster and the search."""
        return tuple(self.document["notes"])

    @cached_property
    def layers(self) -> tuple[PlannedLayer, ...]:
        """All layers in graph order, with strategies, layouts and figures."""
        return tuple(layers_of(self))

    @cached_property
    def stages(self) -> tuple[PlannedStage, ...]:
        """The stages; a plan without a pipeline has one stage."""
        return tuple(stages_of(self))

    @cached_property
    def timeline(self) -> Timeline | None:
        """Simulated timeline of the plan's schedule, in seconds.

        The timeline lists every micro-batch.  It is None if a plan without a pipeline has more than 131,072 micro-batches, which
        all take the same time, one after the other: a timeline of millions of them would take gigabytes.
        """
        from autoddl.pipelines.joint.space import MAX_PASSES

        from .schedules import timeline_of

        if not self.has_pipeline and self.workload.num_micro_batches > MAX_PASSES:
            return None
        return timeline_of(self.evaluation.timeline)

    @cached_property
    def view(self) -> PlanView:
        """The figures that `explain`, `diff` and `report` show: time by resource, memory by kind, and rivals."""
        return view_of(self, self.where)

    # ---- Display

    def __repr__(self) -> str:
        return f"<Plan {display.one_line(self.view, self.num_stages)}>"

    def __str__(self) -> str:
        return str(self.text)

    @property
    def text(self) -> Text:
        """The text that ``autoddl plan`` prints; for a plan that was read from a file, its tables."""
        from ..text.plans import plan_text

        if self.search is not None:
            return plan_text(self.search, self.trust)
        return display.summary_of(self.view, self.stages)

    def _repr_html_(self) -> str:
        return display.html_of(display.summary_of(self.view, self.stages))

    def to_frame(self) -> pandas.DataFrame:
        """Return the layers as a DataFrame, with a row per layer and a column per attribute of `PlannedLayer`.

        Requires pandas.

        Raises:
            MissingPackageError: If pandas is not installed.

        >>> import autoddl
        >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
        >>> plan.to_frame()[["name", "kind", "strategy"]]
          name    kind strategy
        0  fc1  linear  (1,8,1)
        1  fc2  linear  (1,1,8)
        """
        from .frames import frame_of

        return frame_of([layer.record() for layer in self.layers], PlannedLayer.columns(), "layers")

    # ---- Explanation

    def explain(self, *, count: int = 3, layer: str | None = None, time_limit_s: float = 30.0) -> Explanation:
        """Explain what limits the step time, and list the nearest alternatives of each choice with their regret.

        The regret of an alternative is the additional time of a step if the alternative is used and all other layers of its stage
        are chosen anew.  It is exact for a plan without a pipeline, and an upper bound for a pipeline.

        Args:
            count: Number of alternatives per choice.
            layer: Name of a layer (``fc1``), or of a group of equal layers of a repeated block (``h.*.mlp.c_fc``), to explain only
                its choices.
            time_limit_s: Time limit of the search for alternatives, in seconds.  If it is reached, regrets may be intervals.

        Raises:
            UserError: If the layer does not exist, or a number is out of range.

        >>> import autoddl
        >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
        >>> explanation = plan.explain(count=1)
        >>> explanation
        <Explanation of mlp:256,1024,256: 2 choices>
        >>> explanation.choices[0].limit
        'kernel launches'
        """
        return Explanation(explain(self.view, count=count, layer=layer, time_limit_s=time_limit_s))

    def alternatives(self, layer: str, *, count: int = 3, time_limit_s: float = 30.0) -> tuple[Alternative, ...]:
        """Return the nearest alternatives of a layer's strategy with their regret.

        The regret of an alternative is the additional time of a step if the alternative is used and all other layers of its stage
        are chosen anew.  It is exact for a plan without a pipeline, and an upper bound for a pipeline.

        Args:
            layer: Name of a layer (``fc1``), or of a group of equal layers of a repeated block (``h.*.mlp.c_fc``).
            count: Number of alternatives; in a pipeline, for each group of equal stages.
            time_limit_s: Time limit of the search for alternatives, in seconds.  If it is reached, regrets may be intervals.

        Raises:
            UserError: If the layer does not exist, or a number is out of range.

        >>> import autoddl
        >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
        >>> for alternative in plan.alternatives("fc1", count=2):
        ...     print(alternative.strategy, f"{alternative.regret_s * 1e6:.2f} us")
        (1,8,1) regathers 0.00 us
        (2,4,1) 22.60 us
        """
        explained = self.explain(count=count, layer=layer, time_limit_s=time_limit_s)
        return tuple(alternative for choice in explained.choices for alternative in choice.alternatives)

    def diff(self, other: Plan) -> Difference:
        """Return the differences between this plan ("before") and another plan ("after").

        >>> import autoddl
        >>> plans = [autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=n, batch=64) for n in (1, 2)]
        >>> plans[0].diff(plans[1]).is_empty
        False
        """
        from ..diffing import compare

        names = (self.where, other.where) if self.where != other.where else ("before", "after")
        return Difference(compare(self.view, other.view), names)

    # ---- Files

    def save(self, path: FilePath) -> None:
        """Write the plan to a JSON file, atomically; :func:`autoddl.load` reads it.

        >>> import autoddl, os, tempfile
        >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plan.save(os.path.join(folder, "plan.json"))
        ...     autoddl.load(os.path.join(folder, "plan.json")).step_s == plan.step_s
        True
        """
        planfile.save_plan(path, self.document)

    def report(self, path: FilePath | None = None, *, count: int = 2, time_limit_s: float = 20.0) -> str:
        """Return a report of the plan as one self-contained HTML page, and write it to ``path`` if given.

        Args:
            path: Name of the HTML file; None writes no file.
            count: Number of alternatives per choice; 0 for none.
            time_limit_s: Time limit of the search for alternatives, in seconds.  If it is reached, regrets may be intervals.

        >>> import autoddl
        >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
        >>> plan.report(count=0).startswith("<!DOCTYPE html>")
        True
        """
        from ..report import report_page

        return write_if_path(report_page(self.explain(count=count, time_limit_s=time_limit_s).result), path)

    def export(self, path: FilePath | None = None, *, form: str | None = None, model: str = "") -> str:
        """Return the plan in another form, and write it to ``path`` if given.

        Args:
            path: Name of the file; None writes no file.
            form: ``oneflow`` (a Python file that trains the model with the plan and does not need AutoDDL), ``json`` (the
                document of the plan, indented), ``graphml`` or ``dot`` (the layer graph with strategies), or ``chrome-trace``
                (the predicted step).  By default the suffix of the file decides: ``.py``, ``.json``, ``.graphml`` or ``.dot``.
            model: ``FILE.py:FUNCTION``, where FUNCTION returns the model and its example inputs.  The form ``oneflow`` needs it for
                models that are not built in.  If OneFlow is installed, the model is compared with that of the plan.

        Returns:
            The text of the file.

        Raises:
            UserError: If the form is unknown, or the plan cannot be written in this form.

        >>> import autoddl
        >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
        >>> print(plan.export(form="dot").splitlines()[0])
        digraph "mlp:256,1024,256" {
        """
        from autoddl.pipelines.runtime.load import is_available

        from ..export import export
        from ..ownmodels import function_of_plan
        from ..zoo import is_oneflow_model

        form = _form_of(path) if form is None else form
        if form == "oneflow" and is_oneflow_model(model) and is_available():
            function_of_plan(self, model)
        return write_if_path(export(self, form, model=model), path)

    # ---- Verification

    def verify(
        self,
        ranks: int | None = None,
        *,
        model: str = "",
        tolerance: float = 1e-5,
        full_size: bool = False,
        timeout_s: float = 300.0,
        seed: int = 0,
        executor: str = "eager",
        progress: Any = None,
    ) -> Verification:
        """Run the plan on CPU ranks of this machine and check the result.  Requires OneFlow.

        The check compares losses, gradients and parameters with a run on one device, and the bytes that the ranks send with the
        prediction.

        Args:
            ranks: Number of ranks; by default the number of devices of the plan.  A pipeline can be verified with fewer ranks,
                which leaves out some of its inner stages.
            model: ``FILE.py:FUNCTION``, where FUNCTION returns the model and its example inputs, for models that are not built in.
            tolerance: Relative tolerance of losses, gradients and parameters.
            full_size: Do not scale the model down to a size that this machine can run.
            timeout_s: Time limit of the whole verification, in seconds.
            seed: Seed of initial values and data.
            executor: ``"eager"``, or ``"graph"`` to execute the plan inside OneFlow's ``nn.Graph``.
            progress: A function that is called with a short description of each phase.

        Raises:
            UserError: If the number of ranks does not match the plan, the model cannot be built, a number is out of range, or
                OneFlow is not installed.
            RankError: If a rank failed.  The message names the rank; all ranks have ended.

        >>> import autoddl
        >>> plan = autoddl.plan("mlp:64,128,64", cluster="local-cpu", devices_per_node=2, batch=16)
        >>> plan.verify()
        <Verification of mlp:64,128,64 on 2 ranks: right>
        """
        from ..verification import Limits, VerifyOptions, verify

        check_verification(tolerance, timeout_s, seed)
        options = VerifyOptions(tolerance, timeout_s, seed, Limits() if full_size else None, executor)
        num_ranks = self.cluster.num_devices if ranks is None else ranks
        return Verification(verify(self, num_ranks, model=model, options=options, progress=progress))


def check_verification(tolerance: float, timeout_s: float, seed: int) -> None:
    """Check the arguments of `Plan.verify`.

    Raises:
        UserError: If a number is out of range; the message names the argument.
    """
    for name, value in (("tolerance", tolerance), ("timeout", timeout_s)):
        if not 0 < value <= MAX_SECONDS:
            raise UserError(f"{name} is {value:g}, should be a positive number, at most {MAX_SECONDS:g}")
    if seed < 0:
        raise UserError(f"seed is {seed}, should be 0 or more")


def _form_of(path: FilePath | None) -> str:
    """Return the form that the suffix of a file stands for."""
    if path is None:
        raise UserError("export needs the path of a file, or a form")
    suffix = os.path.splitext(os.fspath(path))[1]
    if suffix not in _FORM_OF_SUFFIX:
        known = ", ".join(_FORM_OF_SUFFIX)
        raise UserError(
            f"{os.fspath(path)}: no form has the suffix {suffix!r}, should be one of {known}; or give the form"
        )
    return _FORM_OF_SUFFIX[suffix]
