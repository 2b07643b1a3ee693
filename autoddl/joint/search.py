"""The joint search: best first over settings and cuts, by the bounds of :mod:`.bounds`, until no open one can be better.

1.  *Settings* (devices of the workers, schedule, micro-batch) are bounded over all their cuts, from the cheapest strategies of
    single layers.
2.  A setting that is taken up is split in its *cuts*.
3.  A cut that is taken up has its stages searched (:mod:`.interiors`), without regard to memory and then under the memory that its
    schedule leaves each, and is bounded anew with what they really take.
4.  If that is still below the best plan, the schedule is simulated: its makespan is the configuration's step.

Whatever is left open when the bounds reach the best plan is worse, so the plan is optimal over the space of :mod:`.space`
with the stages' interiors of :mod:`.interiors`.  If the time limit comes first, the least open bound says how far it can be
from that.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from .bounds import bound_class, refined_bound
from .evaluation import Evaluation
from .explorer import SAME, Explorer, Setting
from .interiors import Interior
from .meshes import Meshes

__all__ = ["Explored", "explore"]


@dataclass(frozen=True, order=True)
class _Node:
    """A setting that is open, or a cut of it, or that with its stages searched without (``fits``: with) regard to memory."""

    bound: float
    serial: int
    setting: Setting = field(compare=False)
    cut: tuple[int, ...] | None = field(default=None, compare=False)
    stages: tuple[Interior, ...] | None = field(default=None, compare=False)
    fits: bool = field(default=False, compare=False)


@dataclass
class Explored:
    """What a search found and counted."""

    best: Evaluation | None = None
    lower_bound_s: float = math.inf
    configurations: int = 0
    settings: int = 0
    out_of_memory: int = 0
    simulated: int = 0
    opened: set[Setting] = field(default_factory=set)
    fitting: set[Setting] = field(default_factory=set)
    finished: bool = True

    @property
    def optimal(self) -> bool:
        return self.best is not None and self.lower_bound_s >= self.best.step_s * (1 - SAME)


def explore(
    explorer: Explorer,
    settings: Iterable[Setting],
    known_s: float = math.inf,
    deadline: float = math.inf,
    one_cut: bool = False,
    report: Callable[[float, float, int], None] = lambda best, bound, simulated: None,
) -> Explored:
    """The best configuration of these settings, if one is better than ``known_s``.

    Args:
        deadline: of ``time.process_time``, so that a busy machine does not change what is found.
        one_cut: look at each setting's cut of least bound alone.
        report: told the best step, the least open bound and the number of simulations.
    """
    found = Explored()
    nodes = (_Node(bound, n, setting) for n, (bound, setting) in enumerate(_bounded(explorer, settings, found)))
    heap = list(nodes)
    heapq.heapify(heap)
    serials = itertools.count(len(heap))
    best_s = known_s
    while heap and heap[0].bound < best_s * (1 - SAME):
        if time.process_time() > deadline:
            found.finished = False
            break
        node = heapq.heappop(heap)
        if node.cut is None:
            found.opened.add(node.setting)
            for bound, cut in explorer.open_cuts(node.setting, best_s, one_cut):
                heapq.heappush(heap, _Node(bound, next(serials), node.setting, cut))
            continue
        if not node.fits:
            finer = _finer(explorer, node, best_s)
            if finer is not None and finer.bound < best_s * (1 - SAME):
                found.fitting.add(node.setting)
                heapq.heappush(heap, replace(finer, serial=next(serials)))
            continue
        assert node.stages is not None
        step = explorer.simulated(node.setting, node.cut, node.stages)
        if step is None:
            continue
        found.simulated += 1
        if step < best_s:
            evaluation = explorer.evaluation(node.setting, node.cut, node.stages)
            best_s, found.best = evaluation.step_s, evaluation
        report(best_s, node.bound, found.simulated)
    found.lower_bound_s = min(best_s, heap[0].bound if heap else math.inf)
    found.out_of_memory = len(found.opened - found.fitting)
    return found


def _finer(explorer: Explorer, node: _Node, best_s: float) -> _Node | None:
    """With its stages' best interiors without regard to memory, which bound those that fit, or with these.

    None where there are none, or none that could be better than the best plan.
    """
    assert node.cut is not None
    setting, fits = node.setting, node.stages is not None
    stages = explorer.stages(setting, node.cut, best_s) if fits else explorer.best_free(setting, node.cut)
    needs = explorer.needs(setting)
    if stages is None or needs is None:
        return None
    bound = refined_bound(setting.schedule, stages, needs.in_flight)
    return replace(node, bound=max(node.bound, bound), stages=stages, fits=fits)


def _bounded(explorer: Explorer, settings: Iterable[Setting], found: Explored) -> Iterator[tuple[float, Setting]]:
    """Settings with what the best of their cuts takes at least; those without a strategy for some layer left out."""
    known: dict[tuple[Meshes, int, tuple[str, int, int]], float] = {}
    for setting in settings:
        found.settings += 1
        found.configurations += len(setting.cuts(explorer.chain.num_units))
        key = (setting.mesh, setting.micro_batch, bound_class(setting.schedule))
        if key not in known:
            rows = explorer.bounds_of_cuts(setting)
            known[key] = math.inf if rows is None or not len(rows) else float(rows.min())
        if known[key] < math.inf:
            yield known[key], setting
