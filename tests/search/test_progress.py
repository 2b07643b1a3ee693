"""The bar of a search: it shows only values that are known, and no infinite or undefined numbers."""

from __future__ import annotations

import functools
import re
from math import inf, nan

import pytest
import tqdm
from hypothesis import given
from hypothesis import strategies as st

from autoddl.search.progress import progress_bar, progress_text

#: What a joint search reports: nothing is known; a bound; families' plans; the whole space, from 0 simulations on; the end.
REPORTS = (
    (inf, -inf, 0), (inf, 0.0, 0), (inf, nan, 0), (inf, 2.0, 1), (4.0, 0.0, 2), (4.0, -inf, 3), (4.0, 2.0, 40), (4.0, 3.0, 0),
    (3.5, inf, 1), (3.5, 3.5, 50), (inf, inf, 50),
)  # fmt: skip


@pytest.mark.parametrize(
    ("cost", "bound", "text"),
    [
        (inf, -inf, "no plan yet"),
        (inf, nan, "no plan yet"),
        (inf, inf, "no plan yet"),
        (nan, 1.0, "no plan yet, bound 1 s"),
        (inf, 0.0, "no plan yet"),
        (inf, 2.0, "no plan yet, bound 2 s"),
        (4.0, 0.0, "incumbent 4 s"),
        (4.0, -inf, "incumbent 4 s"),
        (4.0, nan, "incumbent 4 s"),
        (4.0, 3.0, "incumbent 4 s, bound 3 s, gap 25.00%"),
        (4.0, 4.0, "incumbent 4 s, bound 4 s, gap 0.00%"),
        (4.0, inf, "incumbent 4 s, bound 4 s, gap 0.00%"),
        (0.0, 0.0, "incumbent 0 s, bound 0 s, gap 0.00%"),
    ],
)
def test_only_what_is_known_is_shown(cost, bound, text):
    assert progress_text(cost, bound) == text


@given(st.floats(), st.floats())
def test_nan_is_not_shown(cost, bound):
    assert not re.search(r"\b(inf|nan)", progress_text(cost, bound))


def test_the_bar_of_a_joint_search(capsys, monkeypatch):
    monkeypatch.setattr(tqdm, "tqdm", functools.partial(tqdm.tqdm, mininterval=0, miniters=0, ncols=200))
    with progress_bar("pipelines", disable=False) as report:
        for known in REPORTS:
            report(*known)
    shown = capsys.readouterr().err.split("\r")
    texts = [line for line in shown if "evaluations" in line]
    assert len(texts) >= len(REPORTS)
    assert not any(re.search(r"\b(inf|nan)|-\d", line) for line in texts), texts
    assert any("no plan yet]" in line for line in texts) and any("no plan yet, bound 2 s" in line for line in texts)
    counts = [float(found[1]) for line in texts if (found := re.search(r"([\d.]+) evaluations \[", line))]
    assert counts == sorted(counts) and counts[-1] == 50
