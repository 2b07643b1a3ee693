"""Cluster files of fits: fitted values survive loading, and invalid files are refused."""

from __future__ import annotations

import copy
import json

import pytest

from autoddl.calib.clusterfile import calibrated_document, errors_of_cluster, fit_samples
from autoddl.calib.fit import predict
from autoddl.calib.measurements import Sample
from autoddl.costmodel.cluster import Cluster, from_document, load_cluster
from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.writing import write_document
from autoddl.text.fits import errors_text, fit_text

from .synthetic import MEASURED, ring, samples_of

pytestmark = pytest.mark.slow

LOCAL = load_cluster("local-cpu")
#: Of the bootstrap, for the documents below; a hundred show no more.
DRAWS = 8
ODD = {2: 1.0, 4: 5.0, 8: 2.0}


def crowded(collective: Collective, group: int, nbytes: int, job: int) -> float:
    """Terms for every collective and group size, and crowding on 2 cores."""
    factor = ODD[group] * (1 + list(Collective).index(collective)) * (1 + 0.8 * max(0.0, job / 2 - 1))
    return factor * ring(50e-6, 1e-9)(collective, group, nbytes, job)


FORMULAS = {
    "level": (ring(50e-6, 1e-9), 0),
    "collective": (lambda c, p, n, job: (1 + list(Collective).index(c)) * ring(50e-6, 1e-9)(c, p, n, job), 0),
    "collective + copy": (lambda c, p, n, job: ring(50e-6, 1e-9)(c, p, n, job) + 2e-9 * n, 0),
    "level + crowding": (lambda c, p, n, job: job * ring(50e-6, 1e-9)(c, p, n, job), 2),
    "level + exchange": (
        lambda c, p, n, job: (1.5 if p == 2 or c == Collective.ALL_TO_ALL else 1.0) * ring(50e-6, 1e-9)(c, p, n, job),
        0,
    ),
    "group + crowding": (crowded, 2),
}


@pytest.fixture(scope="module", autouse=True)
def few_draws():
    with pytest.MonkeyPatch.context() as patch:
        for module in ("fit", "device"):
            patch.setattr(f"autoddl.calib.{module}.DRAWS", DRAWS)
        yield


@pytest.fixture(scope="module")
def documents(few_draws):
    """For each form its fit and its cluster document (data without noise)."""
    found = {}
    for name, (seconds, cores) in FORMULAS.items():
        fit = fit_samples(samples_of(seconds, noise=0.0, repetitions=1, cores=cores))
        assert fit.levels[0].form.name == name
        found[name] = (fit, calibrated_document(fit, LOCAL, "mine"))
    return found


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loaded_file_prices_what_was_measured(documents, tmp_path, name):
    fit, document = documents[name]
    path = tmp_path / "mine.json"
    write_document(path, document)
    seconds, _ = FORMULAS[name]
    for job in (2, 4, 8):
        cluster = load_cluster(path).resized(1, job)
        for group in (p for p in (2, 4, 8) if p <= job):
            for collective in MEASURED:
                for nbytes in (4096, 3 * 2**18):
                    step = Step(collective, Axis(group, 1), nbytes)
                    assert cluster.time(step) == pytest.approx(seconds(collective, group, nbytes, job), rel=2e-3), (
                        job,
                        step,
                    )
    # And the fit says the same as the file.
    points = fit.levels[0].points
    assert predict(fit.levels[0].parameters, fit.levels[0].form, points) == pytest.approx(
        [p.seconds for p in points], rel=2e-3
    )
    assert max(one.error for one in errors_of_cluster(load_cluster(path), fit.samples)) < 2e-3


def test_costs_stay_affine_in_bytes(documents):
    """The price book relies on it: t(0), t(n) and t(2n) lie on a line."""
    for name in FORMULAS:
        cluster = from_document(documents[name][1], name).resized(1, 4)
        for collective in MEASURED:
            for group in (2, 4, 16):
                at = [cluster.time(Step(collective, Axis(group, 1), n)) for n in (0.0, 1e6, 2e6)]
                assert at[2] - at[1] == pytest.approx(at[1] - at[0], rel=1e-9)


def test_the_file_says_what_was_measured(documents):
    cluster = from_document(documents["group + crowding"][1], "mine")
    calibration = cluster.calibration
    assert calibration is not None and cluster.cores_per_node == 2 and cluster.devices_per_node == 8
    assert calibration.date == "2026-01-02T03:04:05Z" and "host (2 cores)" in calibration.machine
    covered = calibration.coverage("intra-node", "all-gather")
    assert (covered.groups, covered.smallest_bytes, covered.largest_bytes) == ((2, 4, 8), 4**6, 4**12)
    assert calibration.coverage("inter-node", "all-gather") is None
    assert [form.form for form in calibration.forms if form.is_taken] == ["group + crowding"]
    assert max(quality.held_out_error for quality in calibration.quality) < 1e-3
    assert {quality.ranks_per_node for quality in calibration.quality} == {2, 4, 8}
    assert {len(replicates.values) for replicates in calibration.replicates} == {DRAWS}
    # The level that was not measured is the base's.
    assert cluster.links[0] == LOCAL.links[0]


def test_intervals_hold_the_value():
    fit = fit_samples(samples_of(ring(50e-6, 1e-9), noise=0.05, cores=0))
    link = calibrated_document(fit, LOCAL, "mine")["links"]["intra-node"]
    for name in ("latency", "bandwidth"):
        low, high = link[name]["interval"]
        assert low < link[name]["value"] < high
        assert "measured 2026-01-02" in link[name]["source"]


def test_both_levels():
    """Inter-node ten times slower, in samples of their own."""
    slow = samples_of(ring(500e-6, 1e-8), noise=0.0, repetitions=1, jobs=(2, 4), level="inter-node")
    slow = [Sample(**{**vars(sample), "ranks_per_node": 1}) for sample in slow]
    fit = fit_samples([*slow, *samples_of(ring(50e-6, 1e-9), noise=0.0, repetitions=1, jobs=(2, 4))])
    cluster = from_document(calibrated_document(fit, LOCAL, "mine"), "mine")
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 4)
    assert cluster.links[0].latency_s == pytest.approx(500e-6, rel=1e-3)
    assert cluster.links[1].bandwidth == pytest.approx(1e9, rel=1e-3)


def test_hash_follows_every_term(documents):
    document = documents["group + crowding"][1]
    one = from_document(document, "mine")

    def changed(change) -> Cluster:
        other = copy.deepcopy(document)
        change(other)
        return from_document(other, "mine")

    collectives = ("links", "intra-node", "collectives", "all-gather")

    def entry(value):
        for name in collectives:
            value = value[name]
        return value

    assert changed(lambda d: d["calibration"].update(machine="another")).hash == one.hash
    assert changed(lambda d: entry(d)["groups"]["4"]["latency"].update(value=1.0)).hash != one.hash
    assert changed(lambda d: entry(d)["groups"]["4"]["crowding"]["slowness"].update(value=1.0)).hash != one.hash
    assert changed(lambda d: entry(d)["latency"].update(value=1.0)).hash != one.hash
    assert changed(lambda d: d.update(cores_per_node=8)).hash != one.hash
    copied = from_document(documents["collective + copy"][1], "mine")
    assert copied.links[1].copies and copied.hash != one.hash


def test_other_links_are_not_calibrated(documents):
    cluster = from_document(documents["level"][1], "mine")
    assert cluster.with_links() is cluster
    assert cluster.with_links(latency_s=1e-6).calibration is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["calibration"].pop("quality"), "calibration: field 'quality' is missing"),
        (lambda d: d["calibration"].update(extra=1), "calibration: unknown field \"extra\""),
        (lambda d: d["calibration"].update(num_samples=0), "num_samples is 0, should be a whole number of at least 1"),
        (lambda d: d["calibration"]["covered"][0].update(level="rack"), r"covered\[0\]: level is 'rack', should be one"),
        (lambda d: d["calibration"]["covered"][0].update(smallest_bytes=2**40), "smallest_bytes .* should be at most"),
        (lambda d: d["calibration"]["covered"][0].update(groups=[1]), "groups holds 1, should hold whole numbers of at least 2"),
        (lambda d: d["calibration"]["quality"][0].update(held_out_error=-1), "held_out_error is -1"),
        (lambda d: d["calibration"]["forms"][0].update(is_taken="yes"), 'is_taken is "yes", should be true or false'),
        (lambda d: d["calibration"]["replicates"][0].update(term="speed"), "term is 'speed', should be one of latency"),
        (lambda d: d["calibration"]["replicates"][0].update(collective="broadcast"), "collective is 'broadcast'"),
        (lambda d: d["calibration"]["replicates"][0]["values"].pop(), "replicates have .* values, all should have the same number"),
        (lambda d: d["calibration"]["replicates"][0]["values"].__setitem__(0, -1.0), "values: 0 is -1.0"),
        (lambda d: d["links"]["intra-node"]["latency"].update(interval=[2, 1]), "interval is .* should be two numbers in"),
        (lambda d: d["links"]["intra-node"]["latency"].update(interval=3), "interval is 3, should be a list"),
        (lambda d: _groups(d).update({"1": _groups(d)["2"]}), "'1' should be the number of devices of a group"),
        (lambda d: _groups(d).update({"two": _groups(d)["2"]}), "'two' should be the number of devices"),
        (lambda d: _groups(d)["2"]["crowding"].pop("slowness"), "crowding: field 'slowness' is missing"),
        (lambda d: d.update(cores_per_node=0), "cores_per_node is 0"),
    ],
)  # fmt: skip
def test_broken_files_are_refused(documents, change, message):
    document = copy.deepcopy(documents["group + crowding"][1])
    change(document)
    with pytest.raises(UserError, match=message):
        from_document(document, "mine.json")


def _groups(document):
    return document["links"]["intra-node"]["collectives"]["all-reduce"]["groups"]


def test_device_of_the_file():
    samples = samples_of(ring(50e-6, 1e-9), noise=0.0, repetitions=1, jobs=(2,), cores=2)
    for ranks in (2, 4):
        for m, k, n in ((16, 64, 256), (128, 256, 512), (512, 512, 512), (64, 2048, 64), (1024, 1024, 256)):
            nbytes = 4 * (m * k + k * n + m * n)
            seconds = (ranks / 2) * (60e-6 + 2 * m * k * n / 20e9 + nbytes / 4e9)
            samples.append(
                Sample("matmul", "device", 1, nbytes, 0, seconds, ranks_per_node=ranks, cores=2, shape=f"{m}x{k}x{n}")
            )
    document = calibrated_document(fit_samples(samples), LOCAL, "mine")
    for ranks, slower in ((1, 1.0), (2, 1.0), (4, 2.0), (8, 4.0)):
        cluster = from_document(document, "mine").resized(1, ranks)
        by_hand = slower * (60e-6 + 2 * 300 * 400 * 500 / 20e9 + 4 * (300 * 400 + 400 * 500 + 300 * 500) / 4e9)
        assert cluster.matmul_time(300, 400, 500, "float32", 4) == pytest.approx(by_hand, rel=0.02)
        assert cluster.elementwise_time(4e6) == pytest.approx(slower * (60e-6 + 1e-3), rel=0.02)


# ---- Reports -------------------------------------------------------------------------------------------------------------------


def test_reports_name_form_errors_and_crowding(documents):
    found = {section[0]: section[1:] for section in fit_text(documents["group + crowding"][0]).sections}
    table, _ = found["Formulas tried, intra-node"]
    assert ("group + crowding", "40", "0.0%", "taken") in table.rows
    table, remark, *_ = found["Held-out message sizes, intra-node"]
    assert ("all of them", "4", "64 KiB to 16 MiB", "40", "0.0%") in table.rows
    # 4 ranks on 2 cores take 1.8 times as long.
    assert "4 ranks on 2 cores" in remark and "all-gather 1.8x" in remark


def test_another_session_is_compared(documents):
    """Everything takes a quarter longer: the file is off by 1 - 1/1.25 = 20 %."""
    cluster = from_document(documents["level"][1], "mine")
    later = samples_of(lambda *what: 1.25 * ring(50e-6, 1e-9)(*what), noise=0.0, repetitions=1)
    ((_, table),) = errors_text(cluster, later).sections
    assert [row[-1] for row in table.rows if row[0] == "all of them"] == ["20.0%"] * 3
    with pytest.raises(UserError, match="no samples of collectives"):
        errors_text(cluster, [])


def test_documents_are_json(documents):
    for _, document in documents.values():
        assert json.loads(json.dumps(document, allow_nan=False)) == document
