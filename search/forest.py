"""Tables without cycles: one pass of messages, and back.

Where the edges of a table form a forest (a perceptron's chain), the optimum needs no elimination order to be compiled.  A variable
v with one edge left is a leaf; it hands its neighbour u, for each option of u, the least that v and all behind it cost,

    message(u) = min over v of  cost_v[v] + messages into v + edge[v, u],

and is gone.  The last variable's minimum is the optimum; going back, each variable takes the option that its message was made of.
One edge costs one pass over its matrix: linear in the size of the table.  Costs that no search can treat (nan, -inf) reach the last
minimum in the same way; the caller is told that there is no choice, and finds out why.
"""

from __future__ import annotations

import numpy as np

from autoddl.costmodel.table import CostTable

__all__ = ["solve_forest"]


def solve_forest(table: CostTable) -> tuple[int, ...] | None:
    """The cheapest choice, memory aside; None where the table has a cycle, or no choice of finite cost."""
    num = len(table.names)
    if len(table.edges) >= num or not all(map(len, table.cost)):
        return None
    edges: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(num)]
    for edge in table.edges:
        # The neighbour, and the matrix as (mine, neighbour's).
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
