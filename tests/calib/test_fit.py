"""Fits against data whose parameters are known."""

from __future__ import annotations

import numpy as np
import pytest

from autoddl.calib.clusterfile import fit_samples
from autoddl.calib.device import fit_device
from autoddl.calib.fit import fit_level, held_out, points_of, undisturbed
from autoddl.calib.forms import FORMS, Key
from autoddl.calib.measurements import Sample
from autoddl.calib.robust import location, nonnegative_fit
from autoddl.costmodel.collectives import Collective
from autoddl.costmodel.errors import UserError

from .synthetic import MEASURED, SIZES, ring, samples_of

pytestmark = pytest.mark.slow

LATENCY, SLOWNESS = Key("", 0, "latency"), Key("", 0, "slowness")
FORM = {form.name: form for form in FORMS}


def test_location_is_blind_to_gross_outliers_on_one_side():
    """A tenth of the values is three to thirty times too large: the median moves by 0.13 standard deviations (a tenth of
    Phi^-1(0.556) = 0.14), the location by next to nothing."""
    rng = np.random.default_rng(0)
    values = 1 + 0.1 * rng.standard_normal((200, 500))
    bad = values.copy()
    bad[:, :50] *= rng.uniform(3, 30, (200, 50))
    assert abs(location(bad).mean() - 1) < 0.003
    assert abs(np.median(bad, axis=1).mean() - 1) > 0.01
    assert location(np.array([[2.0]])) == [2.0]
    assert location(np.array([[1.0, 1.0, 1.0, 50.0]])) == pytest.approx([1.0])


def test_location_finds_the_undisturbed_minority():
    """Two fifths take 1 +- 0.03, the others anything from there to eight times as long."""
    rng = np.random.default_rng(0)
    quiet = 1 + 0.03 * rng.standard_normal((50, 12))
    values = np.concatenate((quiet, rng.uniform(1.1, 8, (50, 18))), axis=1)
    assert np.median(values, axis=1).mean() > 1.5
    assert np.abs(np.median(location(values)) - 1) < 0.02


def test_location_is_efficient_where_nothing_is_disturbed():
    """No more than 1.5 times the standard error of a mean, whose square root law it follows."""
    rng = np.random.default_rng(0)
    for count in (10, 40):
        errors = location(1 + 0.1 * rng.standard_normal((1000, count))) - 1
        assert abs(errors.mean()) < 0.003
        assert errors.std() < 1.5 * 0.1 / np.sqrt(count)


def test_fit_without_noise_is_exact():
    rng = np.random.default_rng(1)
    features = np.stack([np.ones(30), rng.uniform(1e3, 1e7, 30), rng.uniform(1e3, 1e7, 30)], axis=1)
    theta = np.array([3e-5, 2e-9, 0.0])
    assert nonnegative_fit(features, features @ theta) == pytest.approx(theta, rel=1e-9, abs=1e-18)


def test_fit_stays_non_negative():
    """Time falls with size here: plain least squares would go below zero."""
    features = np.stack([np.ones(4), np.array([1e3, 1e4, 1e5, 1e6])], axis=1)
    seconds = np.array([4e-3, 3e-3, 2e-3, 1e-3])
    assert np.linalg.lstsq(features, seconds, rcond=None)[0][1] < 0
    fitted = nonnegative_fit(features, seconds)
    assert fitted[1] == 0 and 1e-3 < fitted[0] < 4e-3


@pytest.fixture
def few_draws(monkeypatch):
    """For tests that do not examine intervals."""
    monkeypatch.setattr("autoddl.calib.fit.DRAWS", 3)


def test_known_parameters_lie_in_the_interval_nine_times_out_of_ten():
    """5 % noise, a tenth of the samples 2 to 20 times too slow; 95 % intervals of both parameters over 15 data sets."""
    alpha, beta = 50e-6, 1e-9
    hits, errors = [], []
    for seed in range(15):
        points = points_of(
            samples_of(ring(alpha, beta), seed, jobs=(2, 4), sizes=SIZES[::2], outliers=0.1, repetitions=12),
            "intra-node",
        )
        fit = fit_level(points, "intra-node", seed, forms=FORMS[:1])
        for key, true in ((LATENCY, alpha), (SLOWNESS, beta)):
            low, high = fit.interval(key)
            hits.append(low <= true <= high)
            errors.append(fit.parameters[key] / true - 1)
            assert high - low < 0.15 * true
    assert np.mean(hits) >= 0.9
    assert abs(np.mean(errors)) < 0.003


# ---- The choice among formulas -------------------------------------------------------------------------------------------------


def chosen(seconds, **options) -> str:
    return fit_level(points_of(samples_of(seconds, **options), "intra-node"), "intra-node").form.name


@pytest.mark.usefixtures("few_draws")
def test_one_pair_is_chosen_if_it_is_enough():
    assert chosen(ring(50e-6, 1e-9)) == "level"


@pytest.mark.usefixtures("few_draws")
def test_collective_terms_are_chosen_if_collectives_differ():
    slower = {Collective.ALL_TO_ALL: 4.0, Collective.ALL_REDUCE: 0.5}
    assert chosen(lambda c, p, n, job: slower.get(c, 1.0) * ring(50e-6, 1e-9)(c, p, n, job)) == "collective"


@pytest.mark.usefixtures("few_draws")
def test_copy_terms_are_chosen_if_copying_takes_time():
    """Each byte is copied once more, however many ranks there are: seconds = ring + 2 ns n."""
    fit = fit_level(
        points_of(samples_of(lambda c, p, n, job: ring(50e-6, 1e-9)(c, p, n, job) + 2e-9 * n), "intra-node"),
        "intra-node",
    )
    assert fit.form.name == "collective + copy"
    for collective in MEASURED:
        assert fit.parameters[Key(collective.value, 0, "copy")] == pytest.approx(2e-9, rel=0.05)
        assert fit.parameters[Key(collective.value, 0, "slowness")] == pytest.approx(1e-9, rel=0.15)


@pytest.mark.usefixtures("few_draws")
def test_crowding_terms_are_chosen_if_ranks_exceed_cores():
    """2, 4 and 8 ranks on 2 cores are 0, 1 and 3 ranks per core too many; both terms grow by their own amount for each."""

    def seconds(collective: Collective, group: int, nbytes: int, job: int) -> float:
        excess = job / 2 - 1
        return ring(50e-6 + 100e-6 * excess, 1e-9 + 0.7e-9 * excess)(collective, group, nbytes, job)

    fit = fit_level(points_of(samples_of(seconds, cores=2), "intra-node"), "intra-node")
    assert fit.form.name == "level + crowding"
    assert fit.parameters[Key("", 0, "crowded latency")] == pytest.approx(100e-6, rel=0.05)
    assert fit.parameters[Key("", 0, "crowded slowness")] == pytest.approx(0.7e-9, rel=0.05)


@pytest.mark.usefixtures("few_draws")
def test_exchange_terms_are_chosen_if_pairs_of_ranks_take_longer():
    """In groups of two and in all-to-alls, a message takes 30 us and a byte 0.7 ns longer."""

    def seconds(collective: Collective, group: int, nbytes: int, job: int) -> float:
        is_exchange = group == 2 or collective == Collective.ALL_TO_ALL
        return ring(50e-6 + 30e-6 * is_exchange, 1e-9 + 0.7e-9 * is_exchange)(collective, group, nbytes, job)

    fit = fit_level(points_of(samples_of(seconds), "intra-node"), "intra-node")
    assert fit.form.name == "level + exchange"
    assert fit.parameters[Key("", 0, "exchanged latency")] == pytest.approx(30e-6, rel=0.05)
    assert fit.parameters[Key("", 0, "exchanged slowness")] == pytest.approx(0.7e-9, rel=0.05)


@pytest.mark.usefixtures("few_draws")
def test_group_terms_are_chosen_if_no_formula_holds():
    odd = {2: 1.0, 4: 5.0, 8: 2.0}
    assert (
        chosen(lambda c, p, n, job: odd[p] * (1 + list(Collective).index(c)) * ring(50e-6, 1e-9)(c, p, n, job))
        == "group"
    )


def test_held_out_sizes_are_not_seen():
    """One size takes ten times as long as any line says: held out, its own points do not help to predict it."""
    points = points_of(
        samples_of(lambda c, p, n, job: ring(50e-6, 1e-9)(c, p, n, job) * (10 if n == 4**9 else 1)), "intra-node"
    )
    errors = {one.point.num_bytes: one.error for one in held_out(FORM["level"], points)}
    assert errors[4**9] == pytest.approx(0.9, abs=0.05)
    assert np.median([error for size, error in errors.items() if size != 4**9]) < 0.05


@pytest.mark.usefixtures("few_draws")
def test_transfers_have_their_own_line():
    samples = samples_of(ring(50e-6, 1e-9), jobs=(2,))
    for size in (1024, 65536, 2**22):
        samples += [
            Sample("point-to-point", "intra-node", 2, size, i, 20e-6 + size * 3e-9, ranks_per_node=2) for i in range(3)
        ]
    fit = fit_level(points_of(samples, "intra-node"), "intra-node")
    assert fit.transfer[LATENCY] == pytest.approx(20e-6) and fit.transfer[SLOWNESS] == pytest.approx(3e-9)
    assert fit.parameters[LATENCY] == pytest.approx(50e-6, rel=0.02)


# ---- Samples that cannot be fitted -------------------------------------------------------------------------------------------


def test_one_single_size_is_refused():
    with pytest.raises(UserError, match=r"all-reduce on the intra-node level have one message size \(65536 bytes\)"):
        fit_samples(samples_of(ring(1e-5, 1e-9), sizes=[65536]))
    # Sizes that differ only by rounding to group sizes count as one.
    with pytest.raises(UserError, match="have one message size"):
        fit_samples(samples_of(ring(1e-5, 1e-9), sizes=[65536, 65520]))


def test_no_collectives_is_refused():
    only = [Sample("point-to-point", "intra-node", 2, size, 0, 1e-3) for size in (1024, 4096)]
    with pytest.raises(UserError, match="no samples of collectives"):
        fit_samples(only)
    with pytest.raises(UserError, match="no samples of collectives"):
        fit_samples([Sample("matmul", "device", 1, 100, 0, 1e-3, shape="2x2x2")])


def test_disturbed_samples_count_only_if_there_are_no_others():
    quiet = [(1.0, 0.0), (1.1, 0.02), (0.9, 0.05), (1.2, 0.01), (1.3, 0.0)]
    assert list(undisturbed([*quiet, (5.0, 0.5)])) == [1.0, 1.1, 0.9, 1.2, 1.3]
    # Too few: the less disturbed half.
    assert list(undisturbed([*quiet[:2], (3.0, 0.2), (5.0, 0.5), (6.0, 0.6)])) == [1.0, 1.1, 3.0]


# ---- Local work -----------------------------------------------------------------------------------------------------------------


def test_device_parameters():
    """launch 40 us, 40 GFLOP/s, 8 GB/s, everything twice as slow with one rank per core too many; 3 % noise, 10 % outliers."""
    rng = np.random.default_rng(3)
    samples = []
    for ranks in (2, 4):
        slower = 1 + 1.0 * (ranks / 2 - 1)
        work = [((m, k, n), 0) for m in (16, 128, 512) for k in (64, 1024) for n in (256, 2048)]
        work += [((), size) for size in (2**14, 2**18, 2**22, 2**25)]
        for shape, size in work:
            nbytes = size or 4 * (shape[0] * shape[1] + shape[1] * shape[2] + shape[0] * shape[2])
            seconds = slower * (40e-6 + 2 * np.prod(shape or (0,)) / 40e9 + nbytes / 8e9)
            for i in range(9):
                time = seconds * (1 + 0.03 * rng.standard_normal()) * (10 if rng.random() < 0.1 else 1)
                kind = "matmul" if shape else "elementwise"
                text = "x".join(map(str, shape))
                samples.append(Sample(kind, "device", 1, nbytes, i, time, ranks_per_node=ranks, cores=2, shape=text))
    fit = fit_device(samples)
    assert fit is not None and fit.error < 0.03
    true = {"launch": 40e-6, "work float32": 1 / 40e9, "memory": 1 / 8e9, "crowding": 1.0}
    for term, value in true.items():
        assert fit.parameters[term] == pytest.approx(value, rel=0.06)
        low, high = np.quantile(fit.draws[term], [0.005, 0.995])
        assert low <= value * 1.02 and high >= value * 0.98
    assert fit_device(samples[:9]) is None
