"""What happens inside a stage: the exact SBP search on the stage's graph over one worker's devices, and what it costs.

The objective is the stage's own share of a step, at N micro-batches:

    N (forward + backward [+ forward again, where the stage is recomputed]) + gradient all-reduce

with one backward pass, also where a schedule goes back through the stage twice.

For each way of recomputation a stage has an optimum without regard to memory, and one within its memory at the number of
micro-batches in flight of the most demanding stage of its shape.  A stage takes the best of these that fits; of equal ones one
that recomputes the whole stage, because this need not wait for the gradient.  All are searched for once per shape of stage, mesh
and micro-batch; stages of equal units share them, and repeated blocks inside a stage share one choice.

**More blocks.** At fixed strategies a stage's cost is linear in how often it repeats a block, so its optimum, the least of
lines, is concave in it: where two numbers of repetitions have the same best strategies, all between have them too, without a
search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.pricing import Problem
from autoddl.costmodel.stopping import Stop, StopRequestedError
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.table import CostTable
from autoddl.costmodel.workload import Workload
from autoddl.search import Status, smallest_memory, solve

from .cutting import ENTRY, Chain
from .interior import Interior, Need, Pricer
from .meshes import StageMesh
from .stagetables import StageTables

__all__ = ["Interior", "Interiors", "Need"]


class Interiors:
    """The stages of one model on one mesh; everything is worked out once, when it is asked for.

    Args:
        workload: batch, precision and optimizer.
        like: others of the same model, mesh and workload, whose tables these may share.
        stop: when it is requested, what is being searched for is given up by StopRequestedError; what is known stays.
    """

    def __init__(
        self,
        chain: Chain,
        mesh: StageMesh,
        cluster: Cluster,
        workload: Workload,
        like: Interiors | None = None,
        stop: Stop | None = None,
    ):
        self.stop = stop or Stop()
        self.chain, self.mesh, self.workload = chain, mesh, workload
        self.tables: StageTables = like.tables if like else StageTables(chain, mesh, cluster, workload)
        self._pricer: Pricer = like._pricer if like else Pricer(self.tables)
        self.num_searches = 0
        self._found: dict[object, Interior | None] = {}
        self._repeated: dict[object, dict[int, _Roles]] = {}
        self._refused: dict[object, float] = {}
        self._hopeless: dict[object, list[tuple[int, float]]] = {}

    def free(self, first: int, stop: int, recompute: str, micro_batch: int) -> Interior | None:
        """The optimum without regard to memory; None where the micro-batch does not divide."""
        key = (self.chain.shape(first, stop), recompute, micro_batch)
        if key not in self._found:
            self._found[key] = self._search(first, stop, recompute, micro_batch, None)
        return self._found[key]

    def within(
        self, first: int, stop: int, recompute: str, micro_batch: int, need: Need, cutoff: float = math.inf
    ) -> Interior | None:
        """The optimum that fits; None where none does, or none of less cost than ``cutoff``."""
        key = (self.chain.shape(first, stop), recompute, micro_batch, need)
        if self._refused.get(key, -math.inf) >= cutoff:
            return None
        if key not in self._found or (self._found[key] is None and self._refused.get(key, math.inf) < cutoff):
            free = self.free(first, stop, recompute, micro_batch)
            if free is None or free.fits(need):
                self._found[key] = free
            else:
                self._found[key] = self._search(first, stop, recompute, micro_batch, need, cutoff)
                if self._found[key] is None:
                    self._refused[key] = cutoff
        return self._found[key]

    def _search(
        self, first: int, stop: int, recompute: str, micro_batch: int, need: Need | None, cutoff: float = math.inf
    ) -> Interior | None:
        self.stop.check()
        layers_again = recompute == "layers"
        if need is None:
            if recompute == "stage":
                # Without a limit those with nothing recomputed: running them again does not change what is best.
                none = self.free(first, stop, "none", micro_batch)
                return none and self._pricer.interior(first, stop, recompute, micro_batch, none.strategies)
            for ends in self._anchors(first, stop):
                self.free(*ends, recompute, micro_batch)
            known = self._between(first, stop, recompute, micro_batch)
            if known is not None:
                return known
        try:
            problem = self.tables.problem(first, stop, layers_again, micro_batch)
        except UserError:
            return None
        strategies = self._solve(problem, first, stop, recompute, micro_batch, need, cutoff)
        if strategies is None:
            return None
        if need is None:
            self._remember(first, stop, recompute, micro_batch, strategies)
        return self._pricer.interior(first, stop, recompute, micro_batch, strategies)

    def _solve(
        self,
        problem: Problem,
        first: int,
        stop: int,
        recompute: str,
        micro_batch: int,
        need: Need | None,
        cutoff: float,
    ) -> tuple[Strategy, ...] | None:
        """The strategies of least cost that fit, in the order of the stage's graph."""
        table, budget = problem.table, None
        if need is not None:
            table, budget = self._limited(problem, first, stop, recompute, micro_batch, need)
        choice = self._choice(problem, table, budget, cutoff)
        return None if choice is None else tuple(problem.strategies(choice).values())

    def _choice(
        self, problem: Problem, table: CostTable, budget: float | None, cutoff: float
    ) -> tuple[int, ...] | None:
        """The option of each variable, for the least cost within the budget of bytes; None where nothing fits."""
        self.num_searches += 1
        if budget is not None and budget <= 0:
            return None
        result = solve(table, memory_limit=budget, cutoff=cutoff + _entry_cost(problem), stop=self.stop)
        if result.status is Status.INTERRUPTED:
            raise StopRequestedError
        return result.choice if math.isfinite(result.cost) else None

    def _limited(
        self, problem: Problem, first: int, stop: int, recompute: str, micro_batch: int, need: Need
    ) -> tuple[CostTable, float]:
        """The table with the memory of what is in flight, and the bytes that there are for it."""
        alive, budget = need.in_flight, need.budget_bytes
        if recompute == "stage":
            alive, budget = 1.0, budget - need.in_flight * self.tables.input_bytes(first, stop, micro_batch)
        return self.tables.limited_table(first, stop, recompute == "layers", micro_batch, alive, need.versions), budget

    # ------------------------------------------------------------------------------------------------ repeated blocks

    def _anchors(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Stages that repeat the same block a power of two times: the next fewer and the next more times, where there are such.

        Two searches for all numbers between, where these have the same optimum.
        """
        pattern = self.chain.shape(first, stop).pattern()
        if pattern is None or pattern[1] & (pattern[1] - 1) == 0:
            return
        for count in (1 << (pattern[1].bit_length() - 1), 1 << pattern[1].bit_length()):
            more = count - pattern[1]
            ends = (first - more, stop) if stop == self.chain.num_units else (first, stop + more)
            if first and stop < self.chain.num_units and ends[1] >= self.chain.num_units:
                ends = (self.chain.num_units - 1 - (stop - first) - more, self.chain.num_units - 1)
            if not (0 <= ends[0] < ends[1] <= self.chain.num_units):
                continue
            other = self.chain.shape(*ends).pattern()
            if other is not None and other == (pattern[0], count):
                yield ends

    def _between(self, first: int, stop: int, recompute: str, micro_batch: int) -> Interior | None:
        """The optimum where fewer and more repetitions have the same one (see the module's docstring)."""
        pattern = self.chain.shape(first, stop).pattern()
        if pattern is None:
            return None
        known = self._repeated.get((pattern[0], recompute, micro_batch), {})
        fewer = [count for count in known if count < pattern[1]]
        more = [count for count in known if count > pattern[1]]
        if not fewer or not more or known[max(fewer)] != known[min(more)]:
            return None
        roles = known[min(more)]
        strategies = tuple(roles[_role(layer)] for layer in self.tables.graph(first, stop).graph.layers)
        return self._pricer.interior(first, stop, recompute, micro_batch, strategies)

    def _remember(
        self, first: int, stop: int, recompute: str, micro_batch: int, strategies: tuple[Strategy, ...]
    ) -> None:
        pattern = self.chain.shape(first, stop).pattern()
        if pattern is not None:
            layers = self.tables.graph(first, stop).graph.layers
            roles = {_role(layer): strategy for layer, strategy in zip(layers, strategies)}
            self._repeated.setdefault((pattern[0], recompute, micro_batch), {})[pattern[1]] = roles

    # -------------------------------------------------------------------------------------------------------- choosing

    def choose(
        self,
        first: int,
        stop: int,
        micro_batch: int,
        need: Need,
        most: Need,
        recomputations: tuple[str, ...],
        cutoff: float = math.inf,
    ) -> Interior | None:
        """The best way to run a stage that fits ``need`` (see the module's docstring); None where none does.

        Args:
            most: the need of the most demanding stage of its shape.
            cutoff: what costs as much is as good as nothing.
        """
        if self.is_hopeless(first, stop, micro_batch, most, recomputations, cutoff):
            return None
        best = self._choose(first, stop, micro_batch, need, most, recomputations, cutoff)
        pattern = self.chain.shape(first, stop).pattern()
        if best is None and pattern is not None and need == most:
            key = (pattern[0], micro_batch, most, recomputations)
            self._hopeless.setdefault(key, []).append((pattern[1], cutoff))
        return best

    def is_hopeless(
        self, first: int, stop: int, micro_batch: int, most: Need, recomputations: tuple[str, ...], cutoff: float
    ) -> bool:
        """Whether fewer repetitions of the same block were too many: more need more memory and time."""
        pattern = self.chain.shape(first, stop).pattern()
        if pattern is None:
            return False
        failed = self._hopeless.get((pattern[0], micro_batch, most, recomputations), ())
        return any(pattern[1] >= count and cutoff <= limit for count, limit in failed)

    def _choose(
        self,
        first: int,
        stop: int,
        micro_batch: int,
        need: Need,
        most: Need,
        recomputations: tuple[str, ...],
        cutoff: float,
    ) -> Interior | None:
        free = []
        for recompute in recomputations:
            lone = self.free(first, stop, recompute, micro_batch)
            if lone is None:
                return None
            free.append(lone)
            if recompute == "none" and lone.fits(need):
                return lone  # nothing costs less than what neither recomputes nor makes room
        best: Interior | None = None
        for lone in free:
            if lone.fits(need) and _is_better(lone, best):
                best = lone
        for lone in sorted(free, key=lambda lone: lone.cost):
            least = cutoff if best is None else min(cutoff, best.cost * (1 + _SAME))
            if lone.cost >= least:
                break
            if lone.fits(need):
                continue
            found = self.within(first, stop, lone.recompute, micro_batch, most, least)
            if found is not None and found.fits(need) and found.cost < cutoff and _is_better(found, best):
                best = found
        return best

    def smallest_memory(self, first: int, stop: int, micro_batch: int, need: Need, recompute: str) -> float:
        """The least bytes per device that a stage can be run with."""
        layers_again, alive, extra = recompute == "layers", need.in_flight, 0.0
        if recompute == "stage":
            alive, extra = 1.0, need.in_flight * self.tables.input_bytes(first, stop, micro_batch)
        try:
            table = self.tables.limited_table(first, stop, layers_again, micro_batch, alive, need.versions)
        except UserError:
            return math.inf
        return smallest_memory(table, self.stop)[0] + extra


_Roles = dict

#: Costs that differ by less, relative, are equal.
_SAME = 1e-9


def _is_better(one: Interior, other: Interior | None) -> bool:
    """Whether it costs less, or as much but is recomputed as a whole, which can be done before the gradient is there."""
    if other is None or one.cost < other.cost * (1 - _SAME):
        return True
    return one.cost <= other.cost * (1 + _SAME) and one.recompute == "stage" != other.recompute


def _entry_cost(problem: Problem) -> float:
    """What the table counts for the layer that stands for the tensor that arrives: equally much in every layout."""
    for variable, costs in zip(problem.variables, problem.alone.cost):
        if variable.layers == (ENTRY,):
            return float(costs[0])
    return 0.0


def _role(layer: Layer) -> tuple[str, str]:
    return (layer.block, layer.role) if layer.block else ("", layer.name)
