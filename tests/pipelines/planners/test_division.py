"""The batches that a planner's error names are the nearest ones that it plans for."""

from __future__ import annotations

import importlib
import re
from functools import cache
from typing import Any

import pytest

from autoddl.costmodel.cluster import load_cluster
from autoddl.pipelines.generators import generate
from autoddl.pipelines.planners import PlannerError, ProfiledWorkload, plan_chimera, plan_dapple, plan_wpipe
from autoddl.pipelines.profile import Profile, ProfiledLayer, load_profile
from autoddl.pipelines.schedule import Schedule

#: Few layers, so that no pipeline takes all devices, and everything fits in memory.
PROFILE = Profile.chain("few", 1, [ProfiledLayer(f"layer {i}", 1.0, 2.0, 4.0, 4.0, 4.0) for i in range(4)])
CLUSTER = load_cluster("v100-c").resized(12)
PLANNERS = {"chimera": plan_chimera, "wpipe": plan_wpipe, "dapple": plan_dapple}


@cache
def fault(planner: str, batch: int, micro_batch: int | None) -> str | None:
    try:
        PLANNERS[planner](ProfiledWorkload(PROFILE, CLUSTER, batch), micro_batch)
    except PlannerError as error:
        return str(error)
    return None


def works(planner: str, batch: int, sizes: list[int]) -> bool:
    return any(batch % size == 0 and fault(planner, batch, size) is None for size in sizes)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("micro_batch", [None, 1, 2, 4, 5, 7])
def test_what_is_named_is_the_nearest_that_works(planner: str, micro_batch: int | None) -> None:
    for batch in (1, 5, 6, 13, 16, 25, 28):
        message = fault(planner, batch, micro_batch)
        if message is None:
            continue
        found = re.search(r"; the nearest (micro-batch|batch)\w* that works? (?:is|are) (\d+)(?: and (\d+))?$", message)
        assert found, message
        if found[1] == "micro-batch":
            assert micro_batch is not None
            refused, every = micro_batch, [size for size in range(1, batch + 1) if works(planner, batch, [size])]
        else:
            # Without a micro-batch every planner looks at all of them.
            most = batch + CLUSTER.num_devices * (micro_batch or 1)
            sizes = [micro_batch] if micro_batch else list(range(1, most + 1))
            refused, every = batch, [other for other in range(1, most + 1) if works(planner, other, sizes)]
        below, above = [n for n in every if n < refused], [n for n in every if n > refused]
        assert [int(n) for n in found.groups()[1:] if n] == [*below[-1:], *above[:1]]


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_batch_that_is_too_large_to_simulate_is_named_without_a_schedule(planner: str, monkeypatch) -> None:
    """Of bert-48, micro-batches of some samples alone fit: no schedule is generated for larger ones, or for so many small ones."""
    generated = []
    module = importlib.import_module(f"autoddl.pipelines.planners.{planner}")

    def counted(name: str, **options: Any) -> Schedule:
        generated.append(options)
        return generate(name, **options)

    monkeypatch.setattr(module, "generate", counted)
    cluster = load_cluster("v100-a").resized(4)
    workload = ProfiledWorkload(load_profile("bert-48"), cluster, 2**32)
    message = r"batch 4294967296 in \d[\d,]* micro-batches takes \d[\d,]* passes through stages, should take at most 262,144: "
    with pytest.raises(PlannerError, match=message):
        PLANNERS[planner](workload)
    assert not generated
