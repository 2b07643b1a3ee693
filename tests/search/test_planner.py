"""The planner's sweep over micro-batches and recomputation against solving every one of them."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite
from types import SimpleNamespace

import pytest

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.recomputation import RECOMPUTATIONS, counts_of, first_blocks
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.result import unpipelined
from autoddl.planfile import load_plan, plan_document, save_plan
from autoddl.search import METHODS, solve
from autoddl.search.options import (
    DEFAULT_BATCH_PER_DEVICE,
    USABLE_MEMORY,
    micro_batches,
    partial_recomputations,
    recomputations,
)
from autoddl.search.planner import Candidate, InfeasibleError, Options, make_plan
from autoddl.search.sweep import Sweep
from autoddl.zoo import Transformer, gpt, llama, mlp, resolve_model

#: Many tokens, few parameters: data parallelism is best.
LONG = gpt(Transformer("long", 1, 24, 4, 64, 96))
#: Several blocks of which some may be recomputed.
DEEP = gpt(Transformer("deep", 6, 24, 4, 32, 96))
GPT = gpt(Transformer("gpt", 2, 48, 12, 8, 96))
SMALL = load_cluster("gcp-a100").resized(2, 2).with_links(latency_s=1e-6, bandwidth=1e8)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def everything_solved(graph, cluster, batch, objective, limit, untied=False) -> dict[tuple[int, str], float]:
    """The optimum of every micro-batch and way of recomputation."""
    costs = {}
    options = Options(untied=untied)
    partial = [first_blocks(count) for counts in partial_recomputations(options, graph) for count in counts]
    for recompute in (*recomputations(options, graph), *partial):
        book = PriceBook(
            graph, cluster, Workload(1, 1, cluster.default_precision, "adam", recompute), untied, summa=True
        )
        for micro_batch in divisors(batch):
            try:
                problem = book.problem(batch, micro_batch, objective)
            except UserError:
                continue
            costs[micro_batch, recompute] = solve(problem.table, memory_limit=limit).cost
    return costs


def _least_bytes(message: str) -> float:
    """The sufficient memory limit that an error names."""
    return float(message.split("memory_limit_bytes=")[-1].split(")")[0])


@pytest.mark.parametrize("objective", ["step", "communication"])
@pytest.mark.parametrize("batch", [12])
@pytest.mark.parametrize("tightness", [1.02, 1.4, 100])
@pytest.mark.parametrize("graph", [mlp([96, 3072, 96]), LONG, DEEP], ids=["mlp", "long", "deep"])
def test_sweep_finds_the_best_of_all(graph, objective, batch, tightness):
    with pytest.raises(InfeasibleError) as error:
        make_plan(graph, SMALL, Options(batch=batch, memory_limit_bytes=1))
    least = _least_bytes(str(error.value))
    limit = least * tightness
    truth = everything_solved(graph, SMALL, batch, objective, limit)
    planned = make_plan(graph, SMALL, Options(batch=batch, memory_limit_bytes=limit, objective=objective))
    assert planned.optimal and planned.gap == 0
    assert planned.cost == pytest.approx(min(truth.values()), rel=1e-9)
    assert planned.assessment.memory_bytes <= limit
    assert planned.lower_bound == pytest.approx(planned.cost, rel=1e-9)
    # The claims of the sweep about its candidates hold.
    for candidate in planned.candidates:
        least_cost = least_of(candidate, truth)
        if candidate.outcome == "optimal":
            assert candidate.cost == pytest.approx(least_cost, rel=1e-9)
        assert candidate.lower_bound <= least_cost * (1 + 1e-9) and candidate.cost >= least_cost * (1 - 1e-9)


def test_the_best_plan_recomputes_some_of_its_blocks(tmp_path):
    """All blocks are recomputed if the other numbers of blocks are left out; none does not fit."""
    every, free = (make_plan(DEEP, SMALL, Options(batch=12, recompute=way)).assessment for way in ("blocks", "none"))
    limit = (every.memory_bytes + free.memory_bytes) / 2
    options = Options(batch=12, micro_batch=12, memory_limit_bytes=limit)
    planned = make_plan(DEEP, SMALL, options)
    assert planned.optimal and planned.workload.recompute in {f"blocks:{count}" for count in range(1, 6)}
    assert all(
        planned.cost < make_plan(DEEP, SMALL, replace(options, recompute=way)).cost for way in ("blocks", "layers")
    )
    # The document lists every number of blocks once, and is checked for it.
    save_plan(tmp_path / "plan.json", plan_document(unpipelined(planned)))
    assert load_plan(tmp_path / "plan.json").workload == planned.workload
    counts = [counts_of(one.recompute) or () for one in planned.candidates]
    assert sorted(count for several in counts for count in several) == [1, 2, 3, 4, 5]
    # No numbers at all are no candidate.
    document = plan_document(unpipelined(planned))
    entry = next(one for one in document["candidates"] if counts_of(one["recompute"]))
    entry["recompute"] = "blocks:5-2"
    save_plan(tmp_path / "edited.json", document)
    with pytest.raises(UserError, match="occurs twice or is not one of the options'"):
        load_plan(tmp_path / "edited.json")


def least_of(candidate: Candidate, truth: dict[tuple[int, str], float]) -> float:
    """The optimum of a candidate, which may stand for several numbers of recomputed blocks."""
    counts = counts_of(candidate.recompute)
    ways = [candidate.recompute] if counts is None else [first_blocks(count) for count in counts]
    return min(truth[candidate.micro_batch, way] for way in ways)


@pytest.mark.slow
@pytest.mark.parametrize("tightness", [1.02, 1.3])
def test_untied_plans_are_the_best_of_all_settings(tightness):
    """The proof covers every micro-batch with and without recomputation, not only those of tied plans."""
    tied = make_plan(GPT, SMALL, Options(batch=8, memory_limit_bytes=2**40))
    limit = tied.assessment.memory_bytes / tightness
    truth = everything_solved(GPT, SMALL, 8, "step", limit, untied=True)
    planned = make_plan(GPT, SMALL, Options(batch=8, memory_limit_bytes=limit, untied=True))
    assert planned.optimal and planned.cost == pytest.approx(min(truth.values()), rel=1e-9)
    assert {(candidate.micro_batch, candidate.recompute) for candidate in planned.candidates} == set(truth)
    for candidate in planned.candidates:
        assert candidate.lower_bound <= least_of(candidate, truth) * (1 + 1e-9)


def test_a_micro_batch_is_not_excluded_by_one_that_it_does_not_divide():
    """Of 12 samples, 6 allow no p0 = 4, but 4 do: where 12 need too much memory, nothing of what 6 cost bounds what 4 cost."""
    truth = everything_solved(LONG, SMALL, 12, "communication", inf)
    assert truth[12, "none"] <= truth[4, "none"] < truth[6, "none"]
    limits = {}
    for micro_batch in (12, 6, 4):
        problem = PriceBook(LONG, SMALL, Workload(1, 1, "mixed")).problem(12, micro_batch, "communication")
        limits[micro_batch] = solve(problem.table).memory_bytes
    limit = max(limits[6], limits[4])
    assert limit < limits[12]
    planned = make_plan(
        LONG, SMALL, Options(batch=12, memory_limit_bytes=limit, objective="communication", recompute="none")
    )
    assert planned.workload.micro_batch == 4
    settled = {candidate.micro_batch for candidate in planned.candidates}
    assert settled >= {12, 6, 4}


def test_sweep_finds_the_best_where_smaller_micro_batches_may_move_less():
    """On 3 x 4 devices tensors of 3 samples use exchanges, those of 12 collectives that take longer on these links."""
    cluster = load_cluster("gcp-a100").resized(3, 4).with_links(latency_s=1e-9, bandwidth=1e8)
    book = PriceBook(LONG, cluster, Workload(1, 1, "mixed"))
    assert book.problem(24, 24, "communication").table.edges and book.may_shrink
    truth = everything_solved(LONG, cluster, 24, "communication", inf)
    planned = make_plan(LONG, cluster, Options(batch=24, memory_limit_bytes=2**50, objective="communication"))
    assert planned.optimal and planned.cost == pytest.approx(min(truth.values()), rel=1e-9)
    for candidate in planned.candidates:
        assert candidate.lower_bound <= least_of(candidate, truth) * (1 + 1e-9)


@pytest.mark.parametrize("may_shrink", [False, True])
def test_bounds_are_inherited_where_prices_only_grow(may_shrink):
    """From 24 samples to 12 where no redistribution becomes cheaper; with more recomputation of the same 24 always."""
    sweep = object.__new__(Sweep)
    sweep.free, sweep.books = (
        {(24, "selective"): 10.0},
        SimpleNamespace(grows_from=lambda larger, smaller: not may_shrink),
    )
    for way in RECOMPUTATIONS[1:]:
        assert sweep._free_bound(Workload(24, 12, recompute=way)) == (-inf if may_shrink else 10.0)
        assert sweep._free_bound(Workload(24, 24, recompute=way)) == 10.0
        assert sweep._free_bound(Workload(48, 48, recompute=way)) == -inf
    assert sweep._free_bound(Workload(24, 24)) == -inf


def test_the_smallest_memory_suffices():
    with pytest.raises(InfeasibleError) as error:
        make_plan(GPT, SMALL, Options(batch=8, memory_limit_bytes=1000))
    message = str(error.value)
    assert "no plan of gpt fits 1000 B per device on 4 devices" in message or "fits 1e+03 B" in message, message
    least = _least_bytes(message)
    planned = make_plan(GPT, SMALL, Options(batch=8, memory_limit_bytes=least * 1.001))
    assert planned.assessment.memory_bytes <= least * 1.001
    with pytest.raises(InfeasibleError):
        make_plan(GPT, SMALL, Options(batch=8, memory_limit_bytes=least * 0.998))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_plans_and_is_verified(method):
    planned = make_plan(mlp([96, 48, 24]), SMALL, Options(batch=8, method=method, evaluations=None, seed=3))
    best = make_plan(mlp([96, 48, 24]), SMALL, Options(batch=8))
    assert best.cost * (1 - 1e-9) <= planned.cost and planned.lower_bound <= best.cost * (1 + 1e-9)
    assert 0 <= planned.gap < 1 and planned.optimal == (planned.gap == 0)
    assert isfinite(planned.cost) and planned.evaluations > 0


#: Tight: of the baselines megatron and summa fit, of which summa is better.
TIGHT_MLP, TIGHT = mlp([64, 128, 64, 64]), load_cluster("local-cpu").resized(1, 4)
TIGHT_BYTES = 0.0001155 * 2**30


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("limits", [{"time_limit_s": 1e-9}, {"evaluations": 1}, {}])
@pytest.mark.parametrize("summa", [False, True])
@pytest.mark.parametrize("objective", ["step", "communication"])
def test_no_plan_is_worse_than_a_baseline_in_its_space(method, limits, summa, objective, tmp_path):
    limit = TIGHT_BYTES
    options = Options(
        batch=64, memory_limit_bytes=limit, method=method, summa=summa, objective=objective, seed=5, **limits
    )
    planned = make_plan(TIGHT_MLP, TIGHT, options)
    rows = {one.name: one.assessment for one in planned.baselines if one.assessment is not None}
    assert set(rows) == {"megatron", "summa"}
    could_be = {name: row.cost(objective) for name, row in rows.items() if summa or name != "summa"}
    assert planned.cost <= min(could_be.values()) * (1 + 1e-9)
    assert planned.taken_from in ("", min(could_be, key=could_be.__getitem__))
    faster = [name for name, row in rows.items() if row.step_s < planned.assessment.step_s * (1 - 1e-9)]
    assert ("summa=True includes" in planned.left_out) == (not summa)
    assert all(name in planned.left_out for name in faster)
    # Nothing of it contradicts itself.
    save_plan(tmp_path / "plan.json", plan_document(unpipelined(planned)))
    assert load_plan(tmp_path / "plan.json").strategies == planned.strategies


def test_buckets_make_sums_of_many_small_layers_cheap():
    """Where a message takes long, eight small layers are not summed over the ranks, unless they share their sums."""
    cluster = load_cluster("local-cpu").resized(1, 4).with_links(latency_s=1e-3)
    graph, options = mlp([256] * 9), Options(batch=256, micro_batch=256, untied=True)
    alone, together = (
        make_plan(graph, cluster, replace(options, bucket_bytes=bucket_bytes)) for bucket_bytes in (0, 2**23)
    )
    assert together.cost < alone.cost
    assert {s.p0 for s in alone.strategies.values()} == {1} and {s.p0 for s in together.strategies.values()} == {4}


def test_a_better_plan_elsewhere_ends_the_search():
    """What costs more than the rival need not be told apart; a rival that costs more changes nothing."""
    options = Options(batch=64, memory_limit_bytes=TIGHT_BYTES)
    best = make_plan(TIGHT_MLP, TIGHT, options)
    for factor in (0.5, 0.9, 0.999):
        planned = make_plan(TIGHT_MLP, TIGHT, options, rival=factor * best.cost)
        assert factor * best.cost * (1 - 1e-9) <= planned.lower_bound <= best.cost <= planned.cost
    assert not make_plan(TIGHT_MLP, TIGHT, options, rival=0.5 * best.cost).optimal
    planned = make_plan(TIGHT_MLP, TIGHT, options, rival=2 * best.cost)
    assert planned.optimal and planned.cost == best.cost


def test_a_stop_leaves_the_best_baseline():
    """The stop comes once the baselines are known: before the setting of the best one is priced."""
    options = Options(batch=64, memory_limit_bytes=TIGHT_BYTES, method="metropolis-hastings")
    whole, stop = make_plan(TIGHT_MLP, TIGHT, options), Stop()
    stop.request()
    planned = make_plan(TIGHT_MLP, TIGHT, options, known=whole.baselines, stop=stop)
    assert planned.is_interrupted and planned.taken_from == "summa" and planned.lower_bound == 0
    costs = {one.name: one.assessment.step_s for one in whole.baselines if one.assessment is not None}
    assert planned.cost == pytest.approx(costs["summa"]) and costs["summa"] == min(costs.values())


def test_defaults():
    planned = make_plan(GPT, SMALL, Options())
    assert planned.workload.batch == 4 * DEFAULT_BATCH_PER_DEVICE
    assert planned.workload.precision == "mixed"
    assert planned.memory_limit_bytes == USABLE_MEMORY * SMALL.device.memory_bytes
    assert [figures.name for figures in planned.baselines] == ["data parallel", "megatron", "summa"]
    for figures in planned.baselines:
        assert figures.infeasible is None and figures.assessment is not None
        assert figures.assessment.step_s >= planned.cost * (1 - 1e-12)


def test_the_framework_keeps_its_memory():
    """80 GiB without the 2 GiB of the framework, or 9/10 of 80 GiB if the cluster does not say."""
    for framework, limit in ((2 * 2**30, 78 * 2**30), (0.0, 72 * 2**30)):
        device = replace(SMALL.device, memory_bytes=80 * 2**30, framework_bytes=framework)
        assert make_plan(GPT, replace(SMALL, device=device), Options()).memory_limit_bytes == pytest.approx(limit)


def test_baselines_say_why_they_do_not_fit():
    graph = mlp([4096, 4096, 4096])
    cluster = SMALL
    planned = make_plan(graph, cluster, Options(batch=4, memory_limit_bytes=450 * 2**20))
    (data_parallel, *_) = planned.baselines
    assert data_parallel.assessment is None
    # 2 * 4096^2 parameters of 16 bytes on every device are 512 MiB.
    assert data_parallel.infeasible.startswith("needs 512 MiB per device, over the limit of 450 MiB")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(batch=0), "batch 0 should be at least 1"),
        (Options(batch=2**41), "batch 2199023255552 should be at most"),
        (Options(batch=8, micro_batch=3), "micro-batch 3 does not divide the batch of 8"),
        (Options(batch=8, micro_batch=0), "micro-batch 0 should be at least 1"),
        (Options(method="magic"), "method 'magic' is not one of exact"),
        (Options(memory_limit_bytes=0), "memory limit 0 GiB should be"),
        (Options(memory_limit_bytes=float("nan")), "memory limit nan GiB should be"),
        (Options(time_limit_s=-1), "time limit -1 should be"),
        (Options(time_limit_s=inf), "time limit inf should be"),
        (Options(evaluations=0, method="random"), "evaluations 0 should be at least 1"),
        (Options(seed=-1, method="random"), "seed -1 should be"),
        (Options(precision="float16"), "precision 'float16' is not one of"),
        (Options(optimizer="lion"), "optimizer 'lion' is not one of"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(UserError) as error:
        make_plan(GPT, SMALL, options)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("batch", [1, 2, 12, 36, 97, 1024, 720720])
def test_micro_batches_are_all_divisors_largest_first(batch):
    found = list(micro_batches(Workload(batch, batch), Options()))
    assert found == sorted(divisors(batch), reverse=True)


def test_one_device_has_a_plan_without_communication():
    planned = make_plan(
        mlp([64, 32, 16]), load_cluster("dgx-a100").resized(1, 1), Options(batch=8, objective="communication")
    )
    assert planned.optimal and planned.result.cost == 0.0


def test_perceptron_of_the_paper_on_128_devices():
    """32768-16384-4096-2048-512: the exact method's cost is the exhaustive search's, 36^4 assignments."""
    cluster = load_cluster("piz-daint").resized(128)
    plans = {
        method: make_plan(
            mlp([32768, 16384, 4096, 2048, 512]),
            cluster,
            Options(
                batch=1024, micro_batch=1024, method=method, objective="communication", recompute="none", summa=False
            ),
            with_baselines=False,
        )
        for method in ("exact", "exhaustive")
    }
    assert all(planned.optimal for planned in plans.values())
    assert plans["exact"].cost == pytest.approx(plans["exhaustive"].cost, rel=1e-12)
    assert plans["exhaustive"].evaluations == plans["exact"].result.space_size == 36**4


@pytest.mark.slow
def test_gpt3_untied_on_1024_devices_is_solved_and_proven():
    planned = make_plan(
        resolve_model("gpt3-175b"),
        load_cluster("dgx-a100").resized(128, 8),
        Options(batch=1024, micro_batch=32, recompute="none", untied=True, memory_limit_bytes=40 * 2**30),
    )
    assert planned.optimal and planned.gap == 0
    assert planned.assessment.memory_bytes <= 40 * 2**30
    assert len(planned.strategies) == 4 - 1 + 96 * 9 + 3
    assert planned.result.space_size > 10**1000
    (data_parallel, megatron, _) = planned.baselines
    assert data_parallel.infeasible.startswith("a micro-batch of 32 sequences does not divide over the 1024 slices of")
    assert megatron.assessment is None or megatron.assessment.step_s >= planned.cost


SEQUENCES = llama(Transformer("sequences", 1, 64, 8, 96, 128, kv_heads=4, tied=False))


@pytest.mark.parametrize(("nodes", "devices"), [(1, 4), (2, 2), (1, 6), (3, 2)])
@pytest.mark.parametrize("limit", [1.1, inf])
def test_sweep_finds_the_best_where_ranks_share_samples(nodes, devices, limit):
    """Every micro-batch of 12 samples solved alone; on 6 devices a strategy of 2 samples may have no counterpart at 4."""
    cluster = load_cluster("gcp-a100").resized(nodes, devices)
    least = make_plan(SEQUENCES, cluster, Options(batch=12, memory_limit_bytes=2**50)).assessment.memory_bytes
    limit_bytes = limit if limit == inf else least / limit
    truth = everything_solved(SEQUENCES, cluster, 12, "step", limit_bytes)
    planned = make_plan(SEQUENCES, cluster, Options(batch=12, memory_limit_bytes=min(limit_bytes, 2**50)))
    assert planned.optimal and planned.cost == pytest.approx(min(truth.values()), rel=1e-9)
    for candidate in planned.candidates:
        assert candidate.lower_bound <= least_of(candidate, truth) * (1 + 1e-9)
