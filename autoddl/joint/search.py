"""The joint search: best first over settings and cuts, by the bounds of :mod:`.bounds`, until no open one can be better.

1.  *Settings* (devices of the workers, schedule, micro-batch) are bounded over all their cuts, from the cheapest strategies of
    single layers.
2.  A setting that is taken up is split in its *cuts*.
3.  A cut that is taken up has its stages searched (:mod:`.interiors`), without regard to memory and then under the memory that its
    schedule leaves each, and is bounded anew with what they really take.
4.  If that is still below the best plan, the schedule is simulated: its makespan is the configuration's step.

Whatever is left open when the bounds reach the best plan is worse, so the plan is optimal over the space of :mod:`.space`
with the stages' interiors of :mod:`.interiors`.  If the time limit, or a stop, comes first, the least open bound says how far it
can be from that.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from autoddl.costmodel.stopping import Deadline, StopRequestedError

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
    deadline: Deadline | None = None,
    one_cut: bool = False,
    report: Callable[[float, float, int], None] = lambda best, bound, simulated: None,
) -> Explored:
    """The best configuration of these settings, if one is better than ``known_s``.

    Args:
        deadline: when to end with the best so far.  Its stop should be the explorer's, so that what is under way can end, too.
        one_cut: look at each setting's cut of least bound alone.
        report: told the best step, the least open bound and the number of simulations.
    """
    search = _Search(explorer, known_s, one_cut, report)
    search.run(settings, deadline or Deadline())
    return search.found


class _Search:
    """One exploration: what is open, and what has been found."""

    def __init__(
        self, explorer: Explorer, known_s: float, one_cut: bool, report: Callable[[float, float, int], None]
    ) -> None:
        self.explorer, self.one_cut, self.report = explorer, one_cut, report
        self.found, self.best_s = Explored(), known_s
        self._heap: list[_Node] = []
        self._serials: Iterator[int] = itertools.count()

    def run(self, settings: Iterable[Setting], deadline: Deadline) -> None:
        """Best first, until no open node can be better, or the deadline is over."""
        found = self.found
        try:
            bounded = list(_bounded(self.explorer, settings, found))
        except StopRequestedError:
            # Of the settings that are left not even a bound is known.
            found.finished, found.lower_bound_s = False, 0.0
            return
        self._heap = [_Node(bound, next(self._serials), setting) for bound, setting in bounded]
        heapq.heapify(self._heap)
        while self._heap and self._is_open(self._heap[0].bound):
            if deadline.is_over:
                found.finished = False
                break
            node = heapq.heappop(self._heap)
            try:
                self._look_at(node)
            except StopRequestedError:
                heapq.heappush(self._heap, node)
                found.finished = False
                break
        found.lower_bound_s = min(self.best_s, self._heap[0].bound if self._heap else math.inf)
        found.out_of_memory = len(found.opened - found.fitting)

    def _is_open(self, bound: float) -> bool:
        return bound < self.best_s * (1 - SAME)

    def _look_at(self, node: _Node) -> None:
        """Replace a node by what is in it, or simulate it.

        Raises:
            StopRequestedError: before that was done.
        """
        explorer, found = self.explorer, self.found
        if node.cut is None:
            # All of them before any is pushed: where that is interrupted, the setting stays open as it is.
            cuts = list(explorer.open_cuts(node.setting, self.best_s, self.one_cut))
            found.opened.add(node.setting)
            for bound, cut in cuts:
                heapq.heappush(self._heap, _Node(bound, next(self._serials), node.setting, cut))
            return
        if not node.fits:
            finer = _finer(explorer, node, self.best_s)
            if finer is not None and self._is_open(finer.bound):
                found.fitting.add(node.setting)
                heapq.heappush(self._heap, replace(finer, serial=next(self._serials)))
            return
        assert node.stages is not None
        step = explorer.simulated(node.setting, node.cut, node.stages)
        if step is None:
            return
        found.simulated += 1
        if step < self.best_s:
            found.best = explorer.evaluation(node.setting, node.cut, node.stages)
            self.best_s = found.best.step_s
        self.report(self.best_s, node.bound, found.simulated)


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
        explorer.stop.check()
        found.settings += 1
        found.configurations += len(setting.cuts(explorer.chain.num_units))
        key = (setting.mesh, setting.micro_batch, bound_class(setting.schedule))
        if key not in known:
            rows = explorer.bounds_of_cuts(setting)
            known[key] = math.inf if rows is None or not len(rows) else float(rows.min())
        if known[key] < math.inf:
            yield known[key], setting
