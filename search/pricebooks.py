"""The price books that the searches of one model on one cluster share, and the problems of all settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.graph_meshes import EAGER
from autoddl.costmodel.overlap import WHOLE, Exposure
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.problem import Problem
from autoddl.costmodel.recomputation import first_blocks
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.strategy import PLAIN, Choices
from autoddl.costmodel.workload import Workload

from . import separable_memory, smallest_memory
from .options import Options, base_workload, micro_batches, recomputations

__all__ = ["PriceBooks", "smallest_limit"]


class PriceBooks:
    """The price books of one graph on one cluster, shared by the baselines and all searches.

    Args:
        graph, cluster: the model and the machine.
        exposure: the part of the gradients' all-reduces that costs count.
        choices: what layers are offered besides splits.
    """

    def __init__(self, graph: LayerGraph, cluster: Cluster, exposure: Exposure = WHOLE, choices: Choices = PLAIN):
        self.graph, self.cluster, self.exposure, self.choices = graph, cluster, exposure, choices
        self._books: dict[tuple[Workload, bool, str], PriceBook] = {}

    def book(self, workload: Workload, untied: bool, executor: str = EAGER) -> PriceBook:
        """The book of a workload, tied or untied, with Summa meshes (if the executor has any), which a problem may leave out."""
        key = (workload, untied, executor)
        if key not in self._books:
            share_with = next(
                (book for (_, *others), book in self._books.items() if others == [untied, executor]), None
            )
            share_with = share_with or next(iter(self._books.values()), None)
            self._books[key] = PriceBook(
                self.graph,
                self.cluster,
                workload,
                untied,
                summa=True,
                share_with=share_with,
                executor=executor,
                exposure=self.exposure,
                choices=self.choices,
            )
        return self._books[key]

    def space_size(self, workload: Workload, untied: bool, executor: str) -> int:
        """The number of assignments of strategies for one setting; 0 if the executor can execute no strategy of some layer."""
        try:
            return self.book(workload, untied, executor).space_size(workload.micro_batch)
        except UserError:
            return 0

    @property
    def may_shrink(self) -> bool:
        """Whether a redistribution priced so far may become cheaper with smaller micro-batches."""
        return any(book.may_shrink for book in self._books.values())

    def grows_from(self, larger: int, smaller: int) -> bool:
        """Whether no plan of the smaller micro-batch costs less than one of its multiple, the larger micro-batch."""
        return not self.may_shrink and all(book.grows_from(larger, smaller) for book in self._books.values())

    def problems(
        self, options: Options, untied: bool, summa: bool = True, executor: str = EAGER
    ) -> Iterator[Problem | UserError]:
        """The problem of every setting that the options allow, or the reason why it has none.

        Args:
            options: batch, micro-batch, recomputation and objective; what else they choose is given by the other arguments.
            untied, summa, executor: of the problems.

        Raises:
            UserError: an option is out of range.
        """
        for recompute in recomputations(options, self.graph):
            workload = base_workload(self.cluster, options, recompute)
            book = self.book(workload, untied, executor)
            for micro_batch in micro_batches(workload, options):
                try:
                    yield book.problem(workload.batch, micro_batch, options.objective, summa)
                except UserError as fault:
                    yield fault

    def with_blocks(self, problem: Problem, count: int) -> Problem:
        """A problem of :meth:`problems` with tied layers and Summa meshes, but with ``count`` recomputed blocks."""
        workload = replace(problem.workload, micro_batch=problem.workload.batch, recompute=first_blocks(count))
        book = self.book(workload, untied=False)
        return book.problem(workload.batch, problem.workload.micro_batch, problem.objective)


def smallest_limit(problems: Sequence[Problem], stop: Stop) -> float:
    """The smallest memory limit [bytes per device] under which one of the problems has a plan.

    Raises:
        StopRequestedError: the stop was requested before it was known.
    """
    least = math.inf
    for problem in sorted(problems, key=lambda problem: separable_memory(problem.layer_table)):
        if separable_memory(problem.layer_table) < least:
            least = min(least, smallest_memory(problem.table, stop)[0])
    return least
