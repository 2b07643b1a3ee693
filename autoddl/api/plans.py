"""The plan: what `plan` finds and `load` reads, with everything that can be asked of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Union

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.limits import MAX_SECONDS
from autoddl.costmodel.writing import write_atomically

from .. import planfile
from ..explain import explain, view_of
from . import display
from .figures import PlannedLayer, PlannedStage, layers_of, stages_of
from .results import Difference, Explanation, Verification

if TYPE_CHECKING:
    import pandas

    from autoddl.pipelines.joint.result import PlanResult

    from ..explain import Alternative, PlanView
    from ..text.tables import Text
    from ..trusting import PlanTrust
    from .schedules import Timeline

__all__ = ["Plan", "check_verification"]

Path = Union[str, "os.PathLike[str]"]

#: The forms of `Plan.export` by the suffix of the file; the others are asked for by name.
_FORMS = {".py": "oneflow", ".json": "json", ".graphml": "graphml", ".dot": "dot", ".gv": "dot"}


@dataclass(frozen=True, repr=False)
class Plan(planfile.PlanFile):
    """A plan: the strategy of every layer and, with a pipeline, the stages and their schedule; with its figures and its proof.

    :func:`autoddl.plan` finds one, :func:`autoddl.load` reads one.  Seconds are per training step; bytes are those of the fullest
    device.

    Attributes:
        graph, cluster, workload: what it was made for.
        strategies: of every layer, by name; over the devices of its stage.
        document: the whole plan as a JSON document.
        evaluation: the stages, their schedule and its simulation; a plan without a pipeline has one stage.
        search: what the planner found, with the statistics of its search; None of a plan that was read from a file.
        trust: how far the plan can be trusted on its calibrated cluster; None where that is not known.
        where: where the plan was read from.

    >>> import autoddl
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
    >>> plan
    <Plan mlp:256,1024,256 on dgx-a100: 1 node of 8 x NVIDIA A100 SXM4 80 GB; 61.6 us per step, proven optimal>
    >>> [layer.name for layer in plan.layers], plan.optimal, plan.num_stages
    (['fc1', 'fc2'], True, 1)
    """

    search: PlanResult | None = field(default=None, compare=False)
    trust: PlanTrust | None = field(default=None, compare=False)
    where: str = field(default="the plan", compare=False)

    # ---- What it is

    @property
    def model(self) -> str:
        """The model's name."""
        return str(self.document["model"])

    @property
    def objective(self) -> str:
        """What was minimised: ``step`` or ``communication``."""
        return str(self.document["objective"])

    @property
    def status(self) -> str:
        """How the search ended: ``optimal``, ``limit reached``, ``interrupted``; ``edited`` of a plan that was."""
        return str(self.document["status"])

    @property
    def step_s(self) -> float:
        """A training step [s]."""
        return float(self.document["step_s"])

    @property
    def compute_s(self) -> float:
        """Local work in a step [s]; of a pipeline that of its busiest worker."""
        return float(self.document["compute_s"])

    @property
    def communication_s(self) -> float:
        """Communication in a step [s]; of a pipeline that of its busiest worker, as far as it is not hidden."""
        return float(self.document["communication_s"])

    @property
    def samples_per_s(self) -> float:
        """Samples (sequences, images, rows) per second, of all devices together."""
        return self.view.rate

    @property
    def memory_bytes(self) -> float:
        """What the fullest device holds."""
        return float(self.document["memory_bytes"])

    @property
    def memory_limit_bytes(self) -> float:
        """What the search allowed for each device."""
        return float(self.document["memory_limit_bytes"])

    @property
    def sent_bytes(self) -> float:
        """What a device sends in a step."""
        return float(self.document["sent_bytes"])

    @property
    def optimal(self) -> bool:
        """Whether the plan is proven to be the best of its space; False of a plan that was edited."""
        return bool(self.document["optimal"])

    @property
    def lower_bound_s(self) -> float | None:
        """No plan of the space costs less [s]; None of a plan that was edited."""
        bound = self.document["lower_bound_s"]
        return None if bound is None else float(bound)

    @property
    def gap(self) -> float | None:
        """How much better another plan could be at most, relative to this one; None of a plan that was edited."""
        gap = self.document["gap"]
        return None if gap is None else float(gap)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader should know: of the model, the cluster and the search."""
        return tuple(self.document["notes"])

    @cached_property
    def layers(self) -> tuple[PlannedLayer, ...]:
        """All layers, in order, with strategies, layouts and figures."""
        return tuple(layers_of(self))

    @cached_property
    def stages(self) -> tuple[PlannedStage, ...]:
        """The stages; one where there is no pipeline."""
        return tuple(stages_of(self))

    @cached_property
    def timeline(self) -> Timeline | None:
        """When each task of the pipeline's schedule runs [s], to be printed and drawn; None without a pipeline."""
        from .schedules import timeline_of

        return timeline_of(self.evaluation.timeline) if self.has_pipeline else None

    @cached_property
    def view(self) -> PlanView:
        """The figures as `explain`, `diff` and `report` show them: time by resource, memory by kind, rivals."""
        return view_of(self, self.where)

    # ---- Shown

    def __repr__(self) -> str:
        return f"<Plan {display.one_line(self.view, self.num_stages)}>"

    def __str__(self) -> str:
        return str(self.text)

    @property
    def text(self) -> Text:
        """The whole plan: what ``autoddl plan`` prints; of a plan that was read from a file its tables."""
        from ..text.plans import plan_text

        if self.search is not None:
            return plan_text(self.search, self.trust)
        return display.summary_of(self.view, self.stages)

    def _repr_html_(self) -> str:
        return display.html_of(display.summary_of(self.view, self.stages))

    def to_frame(self) -> pandas.DataFrame:
        """The layers as a pandas DataFrame: a row for each, a column for each attribute of :attr:`layers`.

        Raises:
            MissingPackageError: pandas is not installed.

        >>> import autoddl
        >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
        >>> plan.to_frame()[["name", "kind", "strategy"]]
          name    kind strategy
        0  fc1  linear  (1,8,1)
        1  fc2  linear  (1,2,4)
        """
        from .frames import frame_of

        return frame_of([layer.record() for layer in self.layers], PlannedLayer.columns(), "layers")

    # ---- Explained

    def explain(self, *, count: int = 3, layer: str | None = None, time_limit_s: float = 30.0) -> Explanation:
        """What limits the plan, and for each choice its nearest alternatives with their regret.

        Args:
            count: alternatives for each choice.
            layer: only the choices of this layer or group of layers, such as ``h.*.mlp.c_fc``.
            time_limit_s: after it regrets are bounds.

        Raises:
            UserError: there is no such layer, or a number is out of range.

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
        """The nearest alternatives of a layer's strategy, each with its regret: how much longer the best plan with it takes.

        Args:
            layer: the name of a layer (``fc1``), or of equal layers of a repeated block (``h.*.mlp.c_fc``).
            count: how many; of a pipeline so many for each group of equal stages.
            time_limit_s: after it regrets are bounds.

        Raises:
            UserError: there is no such layer, or a number is out of range.

        >>> import autoddl
        >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
        >>> for alternative in plan.alternatives("fc1", count=2):
        ...     print(alternative.strategy, f"{alternative.regret_s * 1e6:.2f} us")
        (2,4,1) 0.95 us
        (1,4,2) 4.11 us
        """
        explained = self.explain(count=count, layer=layer, time_limit_s=time_limit_s)
        return tuple(alternative for choice in explained.choices for alternative in choice.alternatives)

    def diff(self, other: Plan) -> Difference:
        """What differs between this plan and another one, which comes after it.

        >>> import autoddl
        >>> plans = [autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=n, batch=64) for n in (1, 2)]
        >>> plans[0].diff(plans[1]).is_empty
        False
        """
        from ..diffing import compare

        names = (self.where, other.where) if self.where != other.where else ("before", "after")
        return Difference(compare(self.view, other.view), names)

    # ---- Written

    def save(self, path: Path) -> None:
        """Write the plan as a JSON document, atomically; :func:`autoddl.load` reads it.

        >>> import autoddl, os, tempfile
        >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plan.save(os.path.join(folder, "plan.json"))
        ...     autoddl.load(os.path.join(folder, "plan.json")).step_s == plan.step_s
        True
        """
        planfile.save_plan(path, self.document)

    def report(self, path: Path | None = None, *, count: int = 2, time_limit_s: float = 20.0) -> str:
        """The plan as one HTML page that needs no network; written to ``path`` where that is given.

        Args:
            count: alternatives for each choice; 0 for none.
            time_limit_s: of the search for alternatives; after it regrets are bounds.

        Returns:
            The page.

        >>> import autoddl
        >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
        >>> plan.report(count=0).startswith("<!DOCTYPE html>")
        True
        """
        from ..report import report_page

        page = report_page(self.explain(count=count, time_limit_s=time_limit_s).found)
        if path is not None:
            write_atomically(path, page)
        return page

    def export(self, path: Path | None = None, *, form: str | None = None, model: str = "") -> str:
        """The plan in another form; written to ``path`` where that is given.

        Args:
            form: ``oneflow`` (a readable file that trains the model and needs nothing of AutoDDL), ``json``, ``graphml``, ``dot``
                (the annotated layer graph) or ``chrome-trace`` (the predicted step).  By default what the file's suffix says:
                ``.py``, ``.json``, ``.graphml``, ``.dot``.
            model: ``FILE.py:FUNCTION`` that makes the plain model, for ``oneflow`` where it is none that is built in; where
                OneFlow is installed it is compared with the plan's.

        Returns:
            The text of the file.

        Raises:
            UserError: the form is unknown, or the plan cannot be written so.

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
        text = export(self, form, model=model)
        if path is not None:
            write_atomically(path, text)
        return text

    # ---- Run

    def verify(
        self,
        ranks: int | None = None,
        *,
        model: str = "",
        tolerance: float = 1e-5,
        full_size: bool = False,
        timeout_s: float = 300.0,
        seed: int = 0,
        progress: Any = None,
    ) -> Verification:
        """Run the plan on local CPU ranks, and compare it with one device and with its price; needs OneFlow.

        Args:
            ranks: by default as many as the plan has devices; of a pipeline fewer will do, without some of its inner stages.
            model: ``FILE.py:FUNCTION`` that makes the model, where it is none that is built in.
            tolerance: relative, of loss, gradients and parameters.
            full_size: do not scale the model down to what the machine can run.
            timeout_s: for everything.
            seed: of initial values and data.
            progress: a function that is told in a few words what is going on.

        Raises:
            UserError: the plan is for another number of ranks, the model cannot be made, a number is out of range, or OneFlow is
                not there.
            RankError: a rank failed; it is named, and none is left.

        >>> import autoddl
        >>> plan = autoddl.plan("mlp:64,128,64", cluster="local-cpu", devices_per_node=2, batch=16)
        >>> plan.verify()
        <Verification of mlp:64,128,64 on 2 ranks: right>
        """
        from ..verification import Limits, VerifyOptions, verify

        check_verification(tolerance, timeout_s, seed)
        options = VerifyOptions(tolerance, timeout_s, seed, Limits() if full_size else None)
        num_ranks = self.cluster.num_devices if ranks is None else ranks
        return Verification(verify(self, num_ranks, model=model, options=options, progress=progress))


def check_verification(tolerance: float, timeout_s: float, seed: int) -> None:
    """Refuse arguments of `Plan.verify` that are out of range.

    Raises:
        UserError: naming it.
    """
    for name, value in (("tolerance", tolerance), ("timeout", timeout_s)):
        if not 0 < value <= MAX_SECONDS:
            raise UserError(f"{name} is {value:g}, should be a positive number, at most {MAX_SECONDS:g}")
    if seed < 0:
        raise UserError(f"seed is {seed}, should be 0 or more")


def _form_of(path: Path | None) -> str:
    """The form that a file's suffix stands for."""
    if path is None:
        raise UserError("export needs the path of a file, or a form")
    suffix = os.path.splitext(os.fspath(path))[1]
    if suffix not in _FORMS:
        known = ", ".join(_FORMS)
        raise UserError(
            f"{os.fspath(path)}: no form has the suffix {suffix!r}, should be one of {known}; or give the form"
        )
    return _FORMS[suffix]
