"""What the choices besides splits save and cost: a plan against the same plan without one of them.

The layers that divide states over as many devices, for example, make one comparison: what the fullest device holds and how long a
step takes if these layers divide nothing, all else being as planned. No search is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.pipelines.joint.evaluation import evaluate
from autoddl.pipelines.joint.partition import ENTRY, chain_of

from ..planfile import PlanFile

__all__ = ["Saving", "savings_of"]

#: A difference of step times that is a smaller part of the step is not worth a word.
_NEGLIGIBLE = 5e-5
_DIVIDED = {1: "states", 2: "gradients and states", 3: "weights, gradients and states"}


@dataclass(frozen=True)
class Saving:
    """What a choice of some layers saves and costs.

    Attributes:
        choice: what is chosen, such as ``states split over 8 devices``.
        layers: names of the layers.
        saved_bytes: memory of the fullest device without the choice, less that of the plan; None if there is no plan without it.
        extra_s: step of the plan, less that without the choice [s]; None as above.
        memory_bytes: memory of the fullest device without the choice.
        fits: whether the plan without the choice is within the memory limit.
        step_s: step of the plan [s].
    """

    choice: str
    layers: tuple[str, ...]
    saved_bytes: float | None
    extra_s: float | None
    memory_bytes: float
    fits: bool
    step_s: float

    @property
    def sentence(self) -> str:
        """The saving in words: ``states split over 8 devices: 12.1 GiB less; costs nothing at this micro-batch``."""
        if self.saved_bytes is None or self.extra_s is None:
            return f"{self.choice}: the micro-batch has no other split"
        parts = []
        if abs(self.saved_bytes) >= 2**20:
            parts.append(f"{format_bytes(abs(self.saved_bytes))} {'less' if self.saved_bytes > 0 else 'more'}")
        else:
            parts.append("nothing less on the fullest device")
        if abs(self.extra_s) < _NEGLIGIBLE * self.step_s:
            parts.append("costs nothing at this micro-batch")
        else:
            parts.append(f"a step takes {format_seconds(abs(self.extra_s))} {'more' if self.extra_s > 0 else 'less'}")
        if not self.fits:
            parts.append(f"does not fit without it ({format_bytes(self.memory_bytes)})")
        return f"{self.choice}: {'; '.join(parts)}"


def savings_of(plan: PlanFile, limit_bytes: float) -> tuple[Saving, ...]:
    """Compare a plan with itself without each of its choices besides splits, those of the most layers first.

    Args:
        plan: the plan.
        limit_bytes: memory limit of each device.
    """
    configuration = plan.evaluation.configuration
    chosen: dict[str, tuple[Callable[[Strategy], Strategy] | None, list[tuple[int, str]]]] = {}
    for number, choice in enumerate(configuration.stages):
        for name, strategy in choice.strategies.items():
            for text, without in _choices_of(strategy) if name != ENTRY else ():
                chosen.setdefault(text, (without, []))[1].append((number, name))
    found = [_saving(plan, limit_bytes, text, without, held) for text, (without, held) in chosen.items()]
    return tuple(sorted(found, key=lambda saving: -len(saving.layers)))


def _choices_of(strategy: Strategy) -> Iterator[tuple[str, Callable[[Strategy], Strategy] | None]]:
    """The choices of a strategy in words, each with a function that removes it; None if nothing else is possible."""
    if strategy.zero:
        where = f" ({'weights and ' if strategy.zero == 3 else ''}gradients inside nodes)" if strategy.hybrid else ""
        text = f"{_DIVIDED[strategy.zero]} split over {strategy.copies} devices{where}"
        yield text, lambda one: replace(one, zero=0, hybrid=False)
    if strategy.regathers:
        yield "inputs gathered again in the backward pass", lambda one: replace(one, regathers=False)
    if strategy.experts:
        yield f"experts split over {strategy.expert_parts} devices", lambda one: replace(one, experts=())
    if strategy.positions:
        tiles = " in {} x {} tiles".format(*strategy.tiles) if strategy.columns else ""
        yield f"each sample shared by {strategy.ranks_per_sample} devices{tiles} ({strategy.sequence})", None


def _saving(
    plan: PlanFile,
    limit_bytes: float,
    text: str,
    without: Callable[[Strategy], Strategy] | None,
    held: list[tuple[int, str]],
) -> Saving:
    evaluation, names = plan.evaluation, tuple(name for _, name in held)
    step_s, memory_bytes = evaluation.step_s, evaluation.memory_bytes
    if without is None:
        return Saving(text, names, None, None, memory_bytes, True, step_s)
    stages = [dict(choice.strategies) for choice in evaluation.configuration.stages]
    for number, name in held:
        stages[number][name] = without(stages[number][name])
    choices = zip(evaluation.configuration.stages, stages)
    changed = tuple(replace(choice, strategies=strategies) for choice, strategies in choices)
    try:
        other = evaluate(chain_of(plan.graph), plan.cluster, replace(evaluation.configuration, stages=changed))
    except UserError:  # experts that do not divide otherwise, for example
        return Saving(text, names, None, None, memory_bytes, True, step_s)
    saved, extra = other.memory_bytes - memory_bytes, step_s - other.step_s
    return Saving(text, names, saved, extra, other.memory_bytes, other.memory_bytes <= limit_bytes, step_s)
