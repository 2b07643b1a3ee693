"""Cost tables for the tests of the searches: random small ones, blocks in a row, and brute force."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from autoddl.costmodel.table import CostTable, Edge

__all__ = ["Truth", "block_chain", "brute_force", "memory_limits", "random_table", "tables"]


@dataclass(frozen=True)
class Truth:
    """What brute force finds: the least cost within the limit (inf: none), and the least peak of a choice of finite cost."""

    cost: float
    smallest_memory: float


def brute_force(table: CostTable, memory_limit: float | None) -> Truth:
    """All assignments at once, each an element of an array with one axis per variable."""

    def along(values: np.ndarray, *axes: int) -> np.ndarray:
        """One value per option of some variables, to be added to those of all assignments."""
        order = sorted(range(len(axes)), key=axes.__getitem__)
        return values.transpose(order).reshape([len(c) if k in axes else 1 for k, c in enumerate(table.cost)])

    cost = np.zeros([len(costs) for costs in table.cost])
    resident, largest_buffer = cost.copy(), cost.copy()
    for k in range(len(table.cost)):
        cost = cost + along(table.cost[k], k)
        resident = resident + along(table.memory[k], k)
        largest_buffer = np.maximum(largest_buffer, along(table.buffer[k], k))
    for edge in table.edges:
        cost = cost + along(np.asarray(edge.cost), edge.source, edge.target)
    memory = np.where(np.isfinite(cost), resident + largest_buffer, math.inf)
    limit = math.inf if memory_limit is None else memory_limit
    fitting = np.where(memory <= limit, cost, math.inf)
    return Truth(float(fitting.min(initial=math.inf)), float(memory.min(initial=math.inf)))


def random_table(
    seed: int,
    sizes: list[int],
    pairs: list[tuple[int, int]],
    *,
    distinct: int = 3,
    forbidden: float = 0.0,
    levels: int | None = None,
    large_buffers: bool = False,
) -> CostTable:
    """Random costs; rows of edges repeat (``distinct`` kinds), some pairs are forbidden, ``levels`` few values make ties."""
    rng = np.random.default_rng(seed)

    def costs(*shape: int) -> np.ndarray:
        if levels is not None:
            return rng.integers(0, levels, shape).astype(float)
        return rng.exponential(1.0, shape) * 1e-3

    cost, memory, buffer, kind = [], [], [], []
    for size in sizes:
        cost.append(costs(size))
        memory.append(rng.integers(0, 4 if levels else 1000, size).astype(float))
        buffer.append(rng.integers(0, 2000 if large_buffers else 5, size).astype(float))
        kind.append(rng.integers(0, distinct, size))
    edges = []
    for source, target in pairs:
        of_kinds = costs(distinct, distinct)
        of_kinds[rng.random((distinct, distinct)) < forbidden] = np.inf
        edges.append(Edge(source, target, of_kinds[np.ix_(kind[source], kind[target])]))
    return CostTable(tuple(f"v{i}" for i in range(len(sizes))), tuple(cost), tuple(memory), tuple(buffer), tuple(edges))


@st.composite
def tables(draw: st.DrawFn, largest_space: int = 3000) -> CostTable:
    """Chains, residual graphs, long skips, cliques, stars, separate parts; with ties, forbidden pairs, buffers that matter."""
    num = draw(st.integers(1, 7))
    sizes = draw(st.lists(st.integers(1, 5), min_size=num, max_size=num))
    while math.prod(sizes) > largest_space:
        sizes[sizes.index(max(sizes))] -= 1
    chain = [(i, i + 1) for i in range(num - 1)]
    shape = draw(st.sampled_from(["chain", "residual", "skip", "clique", "star", "parts", "any"]))
    pairs = {
        "chain": chain,
        "residual": chain + [(i, i + 3) for i in range(0, num - 3, 2)],
        "skip": chain + ([(0, num - 1)] if num > 2 else []) + ([(1, num - 2)] if num > 4 else []),
        "clique": list(itertools.combinations(range(num), 2)),
        "star": [(i, 0) for i in range(1, num)],
        "parts": chain[::2],
        "any": sorted(draw(st.sets(st.tuples(st.integers(0, num - 1), st.integers(0, num - 1))))),
    }[shape]
    return random_table(
        draw(st.integers(0, 2**32 - 1)),
        sizes,
        [(a, b) for a, b in pairs if a != b],
        distinct=draw(st.integers(1, 4)),
        forbidden=draw(st.sampled_from([0.0, 0.0, 0.2, 0.6])),
        levels=draw(st.sampled_from([None, None, 3])),
        large_buffers=draw(st.booleans()),
    )


def memory_limits() -> st.SearchStrategy[float | None]:
    """None, or where between the smallest and the largest peak of a table the limit lies (below 0: nothing fits)."""
    return st.none() | st.floats(-0.1, 1.0)


def block_chain(
    blocks: int, *, seed: int = 0, linears: int = 4, options: int = 60, classes: int = 8, narrow: int = 8
) -> CostTable:
    """A transformer-like table: equal blocks of norm, linear layers and a residual sum that skips over them; shared arrays.

    A linear layer has ``options`` options in ``classes`` classes, norms and sums have ``narrow`` options.  Memory goes down
    where cost goes up, so that a limit binds.
    """
    rng = np.random.default_rng(seed)
    layer_class = np.arange(options) % classes
    small_class = np.arange(narrow) % classes

    def variable(size: int, weight: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        share = 2.0 ** rng.integers(0, 6, size)
        cost = weight * (rng.random(size) * 1e-3 + 1e-3 * share**-0.5)
        return cost, np.floor(weight * 1e6 * share), np.floor(rng.random(size) * weight * 1e6)

    moves = rng.random((classes, classes)) * 1e-3
    np.fill_diagonal(moves, 0.0)
    wide = [variable(options, 1.0 + k % 3) for k in range(linears)]
    norm, add = variable(narrow, 0.1), variable(narrow, 0.05)
    arrays = {
        (a, b): np.ascontiguousarray(moves[np.ix_(of_a, of_b)])
        for a, of_a in (("wide", layer_class), ("narrow", small_class))
        for b, of_b in (("wide", layer_class), ("narrow", small_class))
    }
    names, columns, kinds, edges = [], [], [], []

    def layer(name: str, kind: str, figures: tuple[np.ndarray, np.ndarray, np.ndarray], *inputs: int) -> int:
        names.append(name)
        columns.append(figures)
        kinds.append(kind)
        edges.extend(Edge(i, len(names) - 1, arrays[kinds[i], kind]) for i in inputs)
        return len(names) - 1

    x = layer("embed", "narrow", add)
    for block in range(blocks):
        y = layer(f"{block}.norm", "narrow", norm, x)
        for k in range(linears):
            y = layer(f"{block}.linear{k}", "wide", wide[k], y)
        x = layer(f"{block}.add", "narrow", add, y, x)
    layer("head", "wide", wide[0], x)
    return CostTable(tuple(names), *(tuple(column) for column in zip(*columns)), tuple(edges))
