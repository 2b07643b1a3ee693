"""docs/faults.md lists every fault that has a test, as its test has it."""

from __future__ import annotations

from .faults import PAGE, ROOT, faults_in, page_with, rows_of


def test_the_page_has_a_row_for_every_fault_that_is_tested():
    page = PAGE.read_text(encoding="utf-8")
    anew = page_with(page, [(fault, None) for fault in faults_in(ROOT / "tests")])
    assert rows_of(page) == rows_of(anew), "docs/faults.md is not up to date: run `make faults`"
