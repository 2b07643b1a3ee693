"""Tables without cycles, solved by message passing (dynamic programming on a forest).

If the edges of a table form a forest (a chain, for a perceptron), no elimination order has to be compiled.  A variable v with at
most one remaining edge is a leaf.  It sends its neighbour u, for each option of u, the least cost of v and everything behind it,

    message(u) = min over v of  cost_v[v] + messages into v + edge[v, u],

and is removed.  The minimum at the last variable is the optimum.  The way back gives each variable the option that attained its
message.  The time is linear in the size of the table.  Invalid costs (nan, -inf) propagate to the last minimum; then the result is
None, and the caller finds the reason (`check_table`).
"""

from __future__ import annotations

import numpy as np

from autoddl.costmodel.table import CostTable

__all__ = ["solve_forest"]


def solve_forest(table: CostTable) -> tuple[int, ...] | None:
    """The cheapest choice without a memory limit; None if the table has a cycle or no choice of finite cost."""
    num = len(table.names)
    if len(table.edges) >= num or not all(map(len, table.cost)):
        return None
    edges: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(num)]
    for edge in table.edges:
        # The neighbour, and the matrix of shape (options, options of the neighbour).
        edges[edge.source].append((edge.target, edge.cost))
        edges[edge.target].append((edge.source, edge.cost.T))
    degree = [len(of_one) for of_one in edges]
    costs = list(table.cost)
    leaves = [v for v in range(num) if degree[v] <= 1]
    gone = [False] * num
    order: list[tuple[int, int, np.ndarray | None]] = []
    for v in leaves:
        gone[v] = True
        parent, matrix = next(((u, matrix) for u, matrix in edges[v] if not gone[u]), (v, None))
        order.append((v, parent, matrix))
        if matrix is not None:
            costs[parent] = costs[parent] + (matrix + costs[v][:, None]).min(axis=0)
            degree[parent] -= 1
            if degree[parent] == 1:
                leaves.append(parent)
    if len(order) < num:
        return None
    choice = [0] * num
    for v, parent, matrix in reversed(order):
        scores = costs[v] if matrix is None else costs[v] + matrix[:, choice[parent]]
        choice[v] = int(scores.argmin())
        if not np.isfinite(scores[choice[v]]):
            return None
    return tuple(choice)
