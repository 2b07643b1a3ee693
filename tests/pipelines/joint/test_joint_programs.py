"""The linear and the integer program of a setting against an enumeration of all cuts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import combinations, product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.stopping import Deadline
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.bounds import Bound
from autoddl.pipelines.joint.cut_branching import shares_of_total
from autoddl.pipelines.joint.cut_graph import CutGraph, UnitRuns
from autoddl.pipelines.joint.cut_plans import CutPlans
from autoddl.pipelines.joint.cut_program import TOLERANCE, CutProgram
from autoddl.pipelines.joint.cut_regions import Cut, Region
from autoddl.pipelines.joint.cut_times import times_of_counts, times_of_cuts
from autoddl.pipelines.joint.cut_trials import CutTrials
from autoddl.pipelines.joint.explorer import Explorer
from autoddl.pipelines.joint.incumbent import Incumbent
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.joint.relaxation import Relaxation
from autoddl.pipelines.joint.setting_bounds import MAX_CUT_ROUNDS, SettingBounds, UnsettledError
from autoddl.pipelines.joint.setting_search import SettingSearch
from autoddl.pipelines.stepgraph import Terms
from autoddl.zoo import mlp

kinds_of_units = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def all_cuts(num_stages: int, region: Region) -> list[Cut]:
    """Enumerate the cuts of a region."""
    units = region.num_units
    places = [
        places
        for places in combinations(range(1, units), num_stages - 1)
        if all(low <= place <= high for place, (low, high) in zip(places, region.ranges))
    ]
    cuts = [list(zip((0, *ends), (*ends, units))) for ends in places]
    return [
        cut
        for cut in cuts
        if all(low <= cut[stage][1] - cut[stage][0] <= high for stage, (low, high) in region.sizes.items())
    ]


def runs_of(kinds: list[int], crossing: np.ndarray) -> UnitRuns:
    """Compute `UnitRuns` by hand, from the transfers behind each unit; shape (stages - 1, units)."""
    first = [unit for unit in range(len(kinds)) if unit == 0 or kinds[unit] != kinds[unit - 1]]
    sizes = np.diff([*first, len(kinds)])
    behind = crossing[:, np.array(first)]
    slopes = np.zeros_like(behind)
    for boundary, run in product(range(len(behind)), range(1, len(first))):
        more = behind[boundary, run] - behind[boundary, run - 1]
        of = run if more >= 0 or sizes[run] == 1 else run - 1
        slopes[boundary, of] += more / sizes[of]
    return UnitRuns(np.array(first), sizes, behind[:, 0], slopes)


def region_of(data: st.DataObject, num_stages: int, num_units: int) -> Region:
    """Draw the region of all cuts, or a part of it: by ranges of boundaries."""
    region = Region.whole(num_stages, num_units)
    if data.draw(st.booleans()):
        return region
    ranges = [tuple(sorted(data.draw(st.tuples(*[st.integers(low, high)] * 2)))) for low, high in region.ranges]
    return Region(tuple(ranges), num_units)  # type: ignore[arg-type]


def sized_region_of(data: st.DataObject, num_stages: int, num_units: int) -> Region:
    """Draw a part of the region of all cuts: by ranges of boundaries, and of the numbers of units of stages."""
    region = region_of(data, num_stages, num_units)
    for stage in data.draw(st.lists(st.integers(0, num_stages - 1), max_size=3)):
        least, most = region.limits_of_sizes[:, stage].tolist()
        if least < most:
            parts = region.split(stage, data.draw(st.integers(least, most - 1)))
            region = data.draw(st.sampled_from(parts))
    return region


def totals_of(
    data: st.DataObject, workers: list[tuple[int, ...]], num_units: int
) -> dict[tuple[int, ...], tuple[int, int]]:
    """Draw the least and the largest number of units of some workers, by their stages."""
    limits = st.lists(st.integers(1, num_units), min_size=2, max_size=2).map(sorted)
    return {stages: tuple(data.draw(limits)) for stages in workers if data.draw(st.booleans())}


def has_totals(cut: Cut, totals: Mapping[tuple[int, ...], tuple[int, int]]) -> bool:
    """Return whether all totals of a cut are within their limits."""
    sizes = [stop - first for first, stop in cut]
    return all(low <= sum(sizes[stage] for stage in stages) <= high for stages, (low, high) in totals.items())


def _price_of_limits(price: np.ndarray, homes: list[list[int]], limit: float) -> float:
    """What the limits of all workers cost, at the price of a byte at each stage."""
    return sum(price[held[0]] * limit for held in homes if held)


@settings(max_examples=60, deadline=None)
@given(st.data(), kinds_of_units, st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_a_divided_cut_takes_no_longer_than_any_other(
    data: st.DataObject, kinds: list[int], seed: int, stages: int, paths: int, share: bool
) -> None:
    """Compare the relaxation, and its dual bound, with all cuts and all ways to run their units that fit.

    The first and the last stage exchange gradients, which takes both as long as the one with more bytes.
    """
    assume(stages <= len(kinds))
    dice, units, terms = np.random.default_rng(seed), len(kinds), Terms(stages)
    # What crosses behind units of one kind is the same.
    crossing = dice.exponential(0.3, (stages - 1, 3))[:, kinds]
    runs = runs_of(kinds, crossing)
    ways, byte_s = dice.exponential(1.0, (2, stages, 3, 6))[:, :, kinds], float(dice.integers(0, 3)) * (stages > 1)
    homes = [[0, *range(2, stages)], [1] if stages > 1 else []] if share else [[stage] for stage in range(stages)]
    limit = float(dice.uniform(0.5, 4.0)) * units / stages
    relaxation = Relaxation(runs, [held for held in homes if held], limit, byte_s=byte_s)
    weights = dice.integers(0, 5, (paths, terms.count)).astype(float)
    for path in weights:
        relaxation.add_path(path)
    for way in ways:
        relaxation.add_columns(way[:, runs.first])
    region = sized_region_of(data, stages, units)
    totals = totals_of(data, [tuple(held) for held in homes if len(held) > 1], units)
    solved = relaxation.solve(region.ranges, region.sizes, totals)
    parts = (terms.forward, terms.backward, terms.recompute, terms.all_reduce)
    found = 0
    for cut in all_cuts(stages, region):
        if not has_totals(cut, totals):
            continue
        stage_of = [stage for stage, (first, stop) in enumerate(cut) for _ in range(first, stop)]
        across = np.array([crossing[b, stop - 1] for b, (_, stop) in enumerate(cut[:-1])])
        for chosen in product(range(2), repeat=units):
            sums = np.zeros((stages, 6))
            for unit, (stage, way) in enumerate(zip(stage_of, chosen)):
                sums[stage] += ways[way, stage, unit]
            if max(sum(sums[stage, 4] for stage in held) for held in homes) > limit:
                continue
            times = np.zeros(terms.count)
            for number, part in enumerate(parts):
                times[part] = sums[:, number]
            times[terms.all_reduce][[0, -1]] += byte_s * max(sums[0, 5], sums[-1, 5])
            times[terms.transfer_forward] = times[terms.transfer_backward] = across
            found += 1
            assert solved is not None, "it fits"
            step = (weights @ times).max()
            assert solved.step_s <= step * (1 + 1e-6) + 1e-9
            # The dual bound: the exchange counts by the bytes of both stages, bytes by their price.
            own = times.copy()
            own[terms.all_reduce] = sums[:, 3]
            bound = solved.shares @ weights @ own + sum(solved.price[s] * sums[s, 4] for s in range(stages))
            bound += byte_s * np.dot(solved.exchange or (0.0, 0.0), sums[[0, -1], 5])
            assert bound - _price_of_limits(solved.price, homes, limit) <= step * (1 + 1e-6) + 1e-9
    if solved is not None:
        assert solved.shares.sum() == pytest.approx(1.0) and (solved.shares >= 0).all() and (solved.price >= 0).all()
        # The program lets less than nothing cross where a run has begun before the one in front of it is complete.
        assert solved.step_s <= (weights @ solved.times).max() * (1 + 1e-6) + 1e-9


@settings(max_examples=80, deadline=None)
@given(
    st.data(),
    kinds_of_units,
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
)
def test_the_best_cut_by_all_bounds(
    data: st.DataObject, kinds: list[int], seed: int, stages: int, workers: int, count: int, crosses: bool
) -> None:
    assume(stages <= len(kinds))
    dice, units, terms = np.random.default_rng(seed), len(kinds), Terms(stages)
    crossing = crosses * dice.exponential(0.5, (stages - 1, 3))[:, kinds]
    weights = dice.integers(0, 5, (count, terms.count)).astype(float)
    weights[:, 0] += 1.0  # a path that passes nothing asks for the bytes, which are 1 for each unit
    values = {path.tobytes(): dice.exponential(1.0, (stages, 3))[:, kinds] for path in weights}
    cut_graph = SimpleNamespace(
        num_stages=stages,
        num_units=units,
        terms=terms,
        runs=runs_of(kinds, crossing),
        least_of_units=lambda path, price, exchange=None: values.get(path.tobytes(), np.ones((stages, units))),
        demand=SimpleNamespace(homes=[[(0, stage) for stage in range(w, stages, workers)] for w in range(workers)]),
        limit_bytes=units,
        price_of_limits=lambda price: float(price.sum()),
        fixed_seconds=lambda path: 0.0,
    )
    cut_graph.row_of = partial(CutGraph.row_of, cut_graph)
    cuts = CutProgram(cut_graph)  # type: ignore[arg-type]
    prices = [np.zeros(stages), dice.uniform(0.0, 0.2, stages)]
    bounds = [Bound(path, (prices[number % 2],)) for number, path in enumerate(weights)]
    for bound in bounds:
        cuts.add(bound)

    def cost(cut: Cut) -> float:
        """Return the largest bound."""
        both = weights[:, terms.transfer_forward] + weights[:, terms.transfer_backward]
        across = np.array([crossing[b, stop - 1] for b, (_, stop) in enumerate(cut[:-1])])
        inside = [
            sum(values[path.tobytes()][stage, first:stop].sum() for stage, (first, stop) in enumerate(cut))
            for path in weights
        ]
        return float(np.max(inside + both @ across - [bound.prices[0].sum() for bound in bounds]))

    region = sized_region_of(data, stages, units)
    costs = {tuple(cut): cost(cut) for cut in all_cuts(stages, region)}
    least = min(costs.values(), default=np.inf)
    most = max(costs.values(), default=1.0) + 1.0
    solved, found = cuts.solve(region, most, 60.0), cuts.find(region, most, 60.0)
    if not costs:
        assert solved is None and found is None and cuts.least(region, most, 60.0) == most
        return
    assert found is not None and tuple(found) in costs
    assert cuts.least(region, most, 60.0) <= least + 1e-5
    relaxed = cuts.relaxed(region, most)
    assert relaxed is not None and relaxed[0] <= least + 1e-5
    assert relaxed[1].sum(axis=0) == pytest.approx(cut_graph.runs.sizes)
    assert solved is not None
    bound, cut = solved
    assert tuple(cut) in costs and bound <= least + 1e-5
    # Without a threshold the program has a finite bound, too.
    unlimited = cuts.solve(region, np.inf, 60.0)
    assert unlimited is not None
    assert tuple(unlimited[1]) in costs and np.isfinite(unlimited[0]) and unlimited[0] <= least + 1e-5
    if not crosses or all(size == 1 for size in cut_graph.runs.sizes):
        assert cuts.least(region, most, 60.0) >= least - 1e-3 * max(1.0, abs(least))
        assert bound >= least - 1e-3 * max(1.0, abs(least)) and costs[tuple(cut)] <= least + 1e-3 * max(1.0, abs(least))
        assert max(cuts.value(number, cut) for number in range(count)) == pytest.approx(costs[tuple(cut)])
    if least > 0:
        above = least * (1 + 4 * TOLERANCE) + 1e-5
        found = cuts.find(region, above, 60.0)
        assert found is not None and (crosses or costs[tuple(found)] <= above * (1 + 4 * TOLERANCE))
        cuts.narrow_totals(region, above)
        assert cuts.find(region, above, 60.0) is not None and cuts.relaxed(region, above) is not None
        assert all(
            has_totals(list(one), cuts.limits_of_totals(region)) for one, costs_s in costs.items() if costs_s <= least
        )
        below = least * (1 - 4 * TOLERANCE) - 1e-5
        assert cuts.solve(region, below, 60.0) is None or crosses
        assert cuts.find(region, below, 60.0) is None or crosses


def test_columns_of_the_least_bytes_stay() -> None:
    """Many faster ways to run units are found; that of the least bytes is still known when it is the only one that fits."""
    runs, terms = runs_of([0, 0], np.zeros((1, 2))), Terms(2)
    relaxation = Relaxation(runs, [[0], [1]], limit_bytes=2.0)
    relaxation.add_path(np.ones(terms.count))
    ranges = Region.whole(2, 2).ranges
    relaxation.add_columns(np.full((2, 1, 6), 1.0), stay=True)
    for number in range(100):
        relaxation.add_columns(np.array([[[0.9 - number / 1000, 0, 0, 0, 1.5, 0]]] * 2))
        assert relaxation.solve(ranges) is not None
    relaxation.limit_bytes = 1.0
    solved = relaxation.solve(ranges)
    assert solved is not None and solved.step_s == pytest.approx(2 * 4.0)  # four terms of 1 s at each of two stages


def test_shares_of_a_total_are_all_there_are() -> None:
    least, most = [1, 2, 1], [3, 4, 2]
    every = product(*(range(low, high + 1) for low, high in zip(least, most)))
    assert list(shares_of_total(least, most, (5, 7))) == [share for share in every if 5 <= sum(share) <= 7]
    assert list(shares_of_total(least, most, (10, 12))) == []


@given(st.data(), st.integers(1, 4), st.integers(0, 4))
def test_every_other_cut_is_in_one_region(data: st.DataObject, stages: int, further: int) -> None:
    region = sized_region_of(data, stages, stages + further)
    cuts = all_cuts(stages, region)
    assume(cuts)
    cut = data.draw(st.sampled_from(cuts))
    assert region.only_cut in (None, cut)
    parts = [tuple(one) for part in region.without(cut) for one in all_cuts(stages, part)]
    assert sorted(parts) == sorted(tuple(one) for one in cuts if one != cut)


@given(st.data(), st.integers(1, 4), st.integers(0, 4))
def test_every_cut_is_in_one_of_two_parts(data: st.DataObject, stages: int, further: int) -> None:
    region = sized_region_of(data, stages, stages + further)
    stage = data.draw(st.integers(0, stages - 1))
    least, most = region.limits_of_sizes[:, stage].tolist()
    assume(least < most)
    few, many = (all_cuts(stages, part) for part in region.split(stage, data.draw(st.integers(least, most - 1))))
    assert sorted(map(tuple, few + many)) == sorted(map(tuple, all_cuts(stages, region)))
    sizes = [[cut[stage][1] - cut[stage][0] for cut in part] for part in (few, many)]
    assert max(sizes[0], default=0) < min(sizes[1], default=np.inf)


def test_numbers_of_units_take_as_long_as_their_cut() -> None:
    explorer = _small_explorer()
    (setting, *_) = explorer.settings(
        1, False, lambda spec: spec.name == "1f1b" and spec.num_workers == 4, uneven=False
    )
    bounds = SettingBounds(explorer, setting, Incumbent(np.inf))
    assert bounds.initialise()
    graph = bounds.cut_graph
    vectors = bounds.of_region(bounds.whole_region, 1).vectors
    for cut in all_cuts(graph.num_stages, bounds.whole_region):
        counts = graph.runs.counts_at([stop for _, stop in cut[:-1]])
        (expected,) = (times_of_cuts(graph, [cut], vectors) + graph.fixed_times[:, None]).T
        assert times_of_counts(graph, counts, vectors) == pytest.approx(expected)


def test_a_search_without_an_incumbent_finds_the_plans_that_fit() -> None:
    """The memory limit excludes the first cuts that the integer program proposes, but not all cuts."""
    chain, cluster = chain_of(mlp((256, 64, 256, 64, 128, 64))), load_cluster("gcp-a100").resized(2, 2)
    explorer = Explorer(chain, cluster, Workload(8, 8, "mixed", "adam"), limit_bytes=289_000)
    offered = explorer.settings(8, False, lambda spec: spec.name == "gpipe" and spec.num_workers == 4, uneven=False)
    (setting,) = offered
    search = SettingSearch(explorer, setting, np.inf, Deadline())
    search.run()
    assert search.best is not None and search.best.memory_bytes == 266_240
    # The passes, and Adam's step of fc1's 256 x 64 weights: a kernel that reads and writes 28 bytes of each.
    update_s = 5e-6 + 28 * 256 * 64 / 1.555e12
    assert search.bound_s == search.best_s == pytest.approx(169.6394e-6 + update_s, rel=1e-6)


class _Looks(Deadline):
    """A deadline that is over when it has been looked at so often."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    @property
    def is_over(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def _small_explorer() -> Explorer:
    chain, cluster = chain_of(mlp((256, 64, 256, 64, 128, 64, 64))), load_cluster("gcp-a100").resized(2, 2)
    return Explorer(chain, cluster, Workload(16, 1, "mixed", "adam"), limit_bytes=800_000)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "chimera", "zero-bubble"])
def test_a_search_that_is_interrupted_goes_on_to_the_same_plan(name: str) -> None:
    explorer = _small_explorer()
    offered = explorer.settings(1, False, lambda spec: spec.name == name and spec.num_workers > 1, uneven=False)
    num_resumed = 0
    for setting in list(offered)[:3]:
        whole = SettingSearch(explorer, setting, np.inf, Deadline())
        whole.run()
        parts, looks = SettingSearch(explorer, setting, np.inf, _Looks(1)), 1
        while True:
            try:
                if looks == 1:
                    parts.run()
                else:
                    parts.resume(np.inf, _Looks(looks))
            except UnsettledError:
                assert parts.bound_s <= whole.best_s * (1 + 1e-9)
                looks += 2
                assert looks < 500, "it never ends"
                continue
            break
        assert parts.best_s == pytest.approx(whole.best_s, rel=1e-9), setting
        # With a better incumbent from elsewhere it has no plan of its own.
        better, known_s = SettingSearch(explorer, setting, np.inf, _Looks(1)), 0.5 * whole.best_s
        try:
            better.run()
        except UnsettledError:
            better.resume(known_s, Deadline())
            assert better.best is None and better.bound_s == known_s
            num_resumed += 1
    assert num_resumed


def test_an_early_search_tries_the_even_cut_before_all_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_time(*_: object) -> None:
        raise UnsettledError

    monkeypatch.setattr(SettingBounds, "of_region", no_time)
    explorer = _small_explorer()
    (setting, *_) = explorer.settings(
        1, False, lambda spec: spec.name == "1f1b" and spec.num_workers == 2, uneven=False
    )
    found = []
    for is_early in (False, True):
        search = SettingSearch(explorer, setting, np.inf, Deadline(), is_early=is_early)
        with pytest.raises(UnsettledError):
            search.run()
        found.append(search.best and [stage.num_units for stage in search.best.configuration.stages])
    assert found == [None, [3, 3]]


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_cuts_that_take_long_are_settled_last(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here all cuts take too long at first; each is searched in the end, and the best plan found."""
    explorer = _small_explorer()
    (setting, *_) = explorer.settings(1, False, lambda spec: spec.name == name and spec.num_workers == 2, uneven=False)
    whole = SettingSearch(explorer, setting, np.inf, Deadline())
    whole.run()
    settle, set_aside, settled = CutPlans.settle, list[Cut](), list[Cut]()

    def settle_if_it_may(plans: CutPlans) -> None:
        has_time = np.isinf(plans.limit.limit_s)
        (settled if has_time else set_aside).append(plans.cut)
        if not has_time:
            raise TimeoutError
        settle(plans)

    monkeypatch.setattr(CutPlans, "settle", settle_if_it_may)
    search = SettingSearch(explorer, setting, 1.01 * whole.best_s, Deadline(1e6))
    search.run()
    assert search.best_s == search.bound_s == pytest.approx(whole.best_s, rel=1e-9)
    assert set_aside and {tuple(cut) for cut in settled} <= {tuple(cut) for cut in set_aside}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_the_bound_at_a_point_holds_for_all_cuts(name: str) -> None:
    """No plan of any cut that the trials find is below it; at a whole cut it is the cut's own bound."""
    explorer, dice, num_plans = _small_explorer(), np.random.default_rng(5), 0
    offered = explorer.settings(1, False, lambda spec: spec.name == name and spec.num_workers == 2, uneven=False)
    for setting in offered:
        bounds = SettingBounds(explorer, setting, Incumbent(np.inf))
        assert bounds.initialise()
        program, cuts = CutProgram(bounds.cut_graph), all_cuts(bounds.cut_graph.num_stages, bounds.whole_region)
        points = [[stop for _, stop in cut[:-1]] for cut in cuts]
        mixed = [
            (dice.uniform() * (np.array(one) - other) + other).tolist() for one, other in zip(points, points[::-1])
        ]
        for point in [*points, *mixed]:
            bound = bounds.at(point)
            assert bound is not None
            program.add(bound)
        for number, cut in enumerate(cuts):
            own_s = bounds.of_region(Region.of_cut(cut), MAX_CUT_ROUNDS).least_s
            assert program.value(number, cut) >= 0.8 * own_s  # transfers are linear here
            trials = CutTrials(SettingBounds(explorer, setting, Incumbent(np.inf)))
            assert trials.bounds.initialise()
            trials.try_cut(cut, program.bounds[number].weights)
            if trials.incumbent.best is not None:
                values = [program.value(k, cut) for k in range(len(program.bounds))]
                assert max(values) <= trials.incumbent.best_s * (1 + 1e-9)
                num_plans += 1
    assert num_plans > 3
