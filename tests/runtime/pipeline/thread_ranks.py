"""Threads that stand for the ranks of a job which saves and restores checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from autoddl.pipelines.runtime.pipeline.checkpoint import Entry
from autoddl.pipelines.runtime.pipeline.saving import Member, Restored, restore, save

__all__ = ["NUM_RANKS", "PATIENCE_S", "SHAPE", "Job", "entries", "shapes"]

NUM_RANKS = 2
SHAPE = (7, 5)
PATIENCE_S = 120.0


class Job:
    """The ranks of a job, as threads, with what they were warned of."""

    def __init__(self, num_ranks: int = NUM_RANKS) -> None:
        self.num_ranks = num_ranks
        self.warnings: list[str] = []
        self.damaged: set[Path] = set()
        self._barrier = threading.Barrier(num_ranks)
        self._told = [""] * num_ranks

    def each(self, action: Callable[[Member], Any]) -> list[Any]:
        """What each rank returned or raised."""
        results: list[Any] = [None] * self.num_ranks

        def run(rank: int) -> None:
            def exchange(text: str) -> list[str]:
                self._told[rank] = text
                self._barrier.wait(PATIENCE_S)
                told = list(self._told)
                self._barrier.wait(PATIENCE_S)
                return told

            try:
                results[rank] = action(Member(rank, self.num_ranks, exchange, self.warnings.append))
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def save(self, directory: Path, step: int) -> str:
        """Why a checkpoint could not be written, which all ranks have to know."""

        def save_on(member: Member) -> str:
            return save(directory, member, step, 4 * step, "1f1b", entries(step, member.rank), self.damaged)

        failures = self.each(save_on)
        for failure in failures:
            if isinstance(failure, BaseException):
                raise failure
        assert len(set(failures)) == 1
        return failures[0]

    def restore(self, directory: Path) -> int | None:
        """The step that all ranks go on from, with the values of that step; None where there is no checkpoint."""
        found = self.each(lambda member: restore(directory, member, shapes(member.rank)))
        for one in found:
            if isinstance(one, BaseException):
                raise one
        if found == [None] * self.num_ranks:
            return None
        steps = {one.checkpoint.num_updates for one in found}
        (step,) = steps
        for rank, one in enumerate(found):
            assert isinstance(one, Restored) and one.checkpoint.num_micro_batches == 4 * step
            assert same(one.entries, entries(step, rank))
            self.damaged = set(one.damaged)
        return step


def entries(step: int, rank: int) -> dict[str, Entry]:
    """What a rank has at a step."""
    rng = np.random.default_rng([step, rank])
    return {
        f"layer{rank}.{name}": {
            "value": rng.standard_normal(SHAPE).astype(np.float32),
            "exp_avg": rng.standard_normal(SHAPE).astype(np.float32),
            "all.step": np.array(step),
        }
        for name in ("weight", "bias")
    }


def shapes(rank: int) -> dict[str, tuple[int, ...]]:
    return {name: SHAPE for name in entries(0, rank)}


def same(found: dict[str, Entry], wanted: dict[str, Entry]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].keys() == wanted[name].keys()
        and all((found[name][key] == value).all() for key, value in wanted[name].items())
        for name in wanted
    )
