"""Ranks that all tests of a session share: starting one takes a second of computing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autoddl.costmodel.devices import CPU, DEVICE_VARIABLE
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.ranks.launcher import RankPool
from autoddl.pipelines.runtime.ranks.network import namespace_available

__all__ = ["counted_ranks", "lending", "lent_ranks", "ranks", "ranks_of_graphs"]

#: Pools that have run graphs are closed when they hold more.
MOST_MEMORY_BYTES = 3 * 2**30

#: Where commands take the pools from that they start.
_USERS = ("pipelines.runtime.ranks.launcher", "pipelines.runtime.pipeline.training", "verification.run")


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], RankPool]]:
    """``ranks(n)``: a pool of n OneFlow ranks that all tests share; skips where there can be none.

    The ranks have a network of their own where the system allows it. A pool that a failure ended is replaced.
    """
    available = is_available()
    private_network = bool(available) and bool(namespace_available())
    pools: dict[int, RankPool] = {}

    def pool(num_ranks: int) -> RankPool:
        if not available:
            pytest.skip(available.reason)
        if num_ranks not in pools or not pools[num_ranks].is_open:
            log_dir: Path = tmp_path_factory.mktemp(f"ranks{num_ranks}")
            # Said here: the test that happens to start them may have changed the environment.
            environment = {DEVICE_VARIABLE: CPU}
            pools[num_ranks] = RankPool(
                num_ranks, private_network=private_network, log_dir=log_dir, environment=environment
            )
        return pools[num_ranks]

    def close() -> None:
        for started in pools.values():
            started.close()
        pools.clear()

    def memory_bytes() -> int:
        """Memory of all pools, where the system tells it; 0 elsewhere."""
        pids = [pid for started in pools.values() if started.is_open for pid in started.pids]
        return sum(map(_memory_bytes, pids))

    pool.close, pool.memory_bytes = close, memory_bytes  # type: ignore[attr-defined]
    yield pool
    close()


def _memory_bytes(pid: int) -> int:
    """Memory of a process that it does not share."""
    with contextlib.suppress(OSError):
        pages, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
        return (pages - shared) * os.sysconf("SC_PAGE_SIZE")
    return 0


@pytest.fixture
def ranks_of_graphs(ranks: Callable[[int], RankPool]) -> Iterator[None]:
    """Close all pools after the test if they hold much: OneFlow frees the memory of a graph when its process ends, not before."""
    yield
    if ranks.memory_bytes() > MOST_MEMORY_BYTES:  # type: ignore[attr-defined]
        ranks.close()  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def counted_ranks(ranks: Callable[[int], RankPool]) -> Callable[[int], RankPool]:
    """As ``ranks``, for tests that count bytes; skips where ranks cannot have a network of their own."""
    available = namespace_available()
    if not available:
        pytest.skip(available.reason)
    return ranks


@contextlib.contextmanager
def lending(ranks: Callable[[int], RankPool]) -> Iterator[None]:
    """Meanwhile commands that are called in this process run on the shared pools, see `lent_ranks`."""

    def lend(num_ranks: int, **_options: Any) -> contextlib.nullcontext[RankPool]:
        return contextlib.nullcontext(ranks(num_ranks))

    with pytest.MonkeyPatch.context() as patch:
        for user in _USERS:
            patch.setattr(f"autoddl.{user}.RankPool", lend)
        yield


@pytest.fixture
def lent_ranks(ranks: Callable[[int], RankPool]) -> Iterator[None]:
    """Commands that are called in this process run on the shared pools in place of pools of their own, which they leave open.

    For what commands compute and say. How they start ranks, and what they do when one fails, takes ranks of their own. Skips where
    there can be none.
    """
    if not (available := is_available()):
        pytest.skip(available.reason)
    with lending(ranks):
        yield
