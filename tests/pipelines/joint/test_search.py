"""The order of the joint search: known plans, and the time of attempts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.stopping import Deadline
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint import search as search_module
from autoddl.pipelines.joint.explorer import Explorer, Setting, setting_of
from autoddl.pipelines.joint.near_plans import improve_near
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.joint.search import Search, _OpenSetting, explore
from autoddl.pipelines.joint.setting_search import SettingSearch
from autoddl.pipelines.planners import Clock, Patience
from autoddl.zoo import mlp


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    chain, cluster = chain_of(mlp((256, 64, 256, 64, 128, 64, 64))), load_cluster("gcp-a100").resized(2, 2)
    return Explorer(chain, cluster, Workload(16, 1, "mixed", "adam"), limit_bytes=800_000)


def settings_of(explorer: Explorer) -> Iterator[Setting]:
    return explorer.settings(1, False, lambda spec: spec.num_workers > 1)


def test_the_setting_of_a_known_plan_is_attempted_before_the_proof(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan from elsewhere is no better than others of its setting: the search finds the best of them early."""
    best = explore(explorer, settings_of(explorer)).best
    assert best is not None
    attempted: list[Setting] = []
    attempt = Search._attempt

    def noted(self: Search, entry: _OpenSetting, is_early: bool = False) -> None:
        attempted.append(entry.setting)
        attempt(self, entry, is_early)

    monkeypatch.setattr(Search, "_attempt", noted)
    # No estimate is so good that a setting is attempted early.
    monkeypatch.setattr(search_module, "_PROMISING", 0.0)
    known, known_s = setting_of(best.configuration), 1.2 * best.step_s
    search = Search(explorer, settings_of(explorer), known_s, known=known)
    found = search.find_incumbent(Deadline(), 1.0)
    assert attempted[0] == known and set(attempted) == {known}
    assert found is not None and found.step_s == pytest.approx(best.step_s, rel=1e-9)
    attempted.clear()
    assert Search(explorer, settings_of(explorer), known_s).find_incumbent(Deadline(), 1.0) is None and not attempted


def test_the_last_settings_share_the_time_that_is_left(explorer: Explorer) -> None:
    setting = next(settings_of(explorer))
    search = Search(explorer, (), known_s=2.0)
    search.deadline = Deadline(1000.0, timer=lambda: 0.0)
    first, second = (_OpenSetting(1.0, number, setting, num_attempts=2) for number in range(2))
    short_s = search_module._ATTEMPTS_S[2]
    search._undecided[2].extend([first, second])
    share = search_module._EQUAL_SHARES / 2
    assert search._slice_s(first) == 1000.0 * share > short_s
    # Settings with fewer attempts come first, unless their bounds exclude them.
    search._undecided[1].append(_OpenSetting(1.5, 2, setting, num_attempts=1))
    assert search._slice_s(first) == short_s
    search._undecided[1][0].bound_s = 2.0
    assert search._slice_s(first) == 1000.0 * share
    search.open.append(_OpenSetting(1.5, 3, setting))
    assert search._slice_s(first) == short_s and search._slice_s(search.open[0]) == search_module._ATTEMPTS_S[0]
    search.open.clear()
    # The last one has all the time; without a limit there is nothing to share.
    second.bound_s = 2.0
    assert search._slice_s(first) == 1000.0
    # So does one outside of the queues, while its bound is settled otherwise.
    search._undecided[2].clear()
    assert search._slice_s(first) == 1000.0
    search.deadline = Deadline()
    assert search._slice_s(first) == short_s


def test_small_gains_do_not_prolong_the_search_near_a_plan(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    best = explore(explorer, settings_of(explorer)).best
    assert best is not None
    steps = np.array([1.0, 0.999, 0.997, 0.9, 0.899]) * best.step_s

    def improve(self: SettingSearch, sizes: object) -> None:
        for step_s in steps.tolist():
            assert self.incumbent.tell is not None
            self.incumbent.tell(step_s)

    renewed: list[int] = []
    monkeypatch.setattr(SettingSearch, "improve", improve)
    monkeypatch.setattr(Patience, "renew", lambda patience: renewed.append(1))
    told: list[float] = []

    improve_near(explorer, best, Clock(), 1.0, math.inf, told.append, least_gain=0.005)
    assert told == steps.tolist() and len(renewed) == 2  # by the first one, and by 0.9
    improve_near(explorer, best, Clock(), 1.0, math.inf)
    assert len(renewed) == 2 + 5
