"""Texts of the library, which name arguments of Python, as the command line says them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoddl.cli._options import fitted, in_options
from autoddl.costmodel.units import format_memory_limit
from autoddl.text.tables import Column, Table, Text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("add allow_stale=True, or use method='exact'", "add --allow-stale, or use --method exact"),
        ("faster: leave out objective='communication'", "faster: leave out --communication-only"),
        ("plan with recompute=False", "plan with --recompute never"),
        ("or give full_size=True to run it as it is", "or give --full-size to run it as it is"),
        ("give model=FILE.py:FUNCTION, which makes it", "give --model FILE.py:FUNCTION, which makes it"),
        ("raise time_limit_s", "raise --time-limit"),
        ("stages is 3; chimera needs an even number", "--stages is 3; chimera needs an even number"),
        ("form='oneflow' cannot write it", "--to oneflow cannot write it"),
        # What is no argument stays: values of the user's, paths, fields of documents, figures.
        ("'pipeline=auto' is unknown", "'pipeline=auto' is unknown"),
        ("/tmp/micro_batches/model=3.py is no plan", "/tmp/micro_batches/model=3.py is no plan"),
        ("plan.json: workload.micro_batches is 3", "plan.json: workload.micro_batches is 3"),
        ("alpha=3 us, W=2 D=4", "alpha=3 us, W=2 D=4"),
    ],
)
def test_arguments_are_named_as_options(text: str, said: str) -> None:
    assert in_options(text) == said


def test_memory_limits_are_in_gib() -> None:
    assert in_options(format_memory_limit(4.368 * 2**30)) == "4.37 GiB (--memory-limit 4.368)"
    assert in_options(format_memory_limit(4.36801 * 2**30)) == "4.37 GiB (--memory-limit 4.369)"
    assert in_options(format_memory_limit(2**20)) == "1 MiB (--memory-limit 0.0009766)"


@given(st.floats(1, 2.0**50))
def test_a_limit_that_is_typed_is_enough_and_hardly_more(nbytes: float) -> None:
    typed = float(in_options(format_memory_limit(nbytes)).split("--memory-limit ")[1].rstrip(")")) * 2**30
    assert nbytes * (1 - 1e-12) <= typed <= nbytes * 1.0011


def test_tables_are_laid_out_with_the_names_that_they_show() -> None:
    table = Table.of((Column("", str), Column("", lambda _: "end")), ["a", "offered with allow_stale=True"])
    assert fitted(Text((["use untied=True"], [table])), None).split("\n") == [
        *("use --untied", ""),
        *("  a                           end", "  offered with --allow-stale  end"),
    ]
