"""How tables, lines and grids are laid out, for all widths."""

from __future__ import annotations

import doctest
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoddl.text import graphs, layers, tables
from autoddl.text.tables import NARROWEST, Column, Grid, Table, Text, facts

PLANS = (
    Column("plan"),
    Column("step", right=True),
    Column("communication", right=True, rank=1),
    Column("memory", right=True, rank=2),
    Column("", rank=1, name="how", wraps=True),
)
ROWS = (
    ("data parallel", "19.9 ms", "9.83 ms", "1.49 GiB", "dp 64, micro-batch 128, activations recomputed"),
    ("megatron", "1.2 s", "9.88 us", "63 GiB", ""),
)

words = st.text(st.sampled_from("abc.*(),|0\u4e2d"), min_size=1, max_size=30)
sentences = st.lists(words, max_size=8).map(" ".join)


@st.composite
def any_tables(draw) -> Table:
    columns = draw(
        st.lists(
            st.builds(Column, sentences, st.none(), st.booleans(), st.integers(0, 4), st.just(""), st.booleans()),
            min_size=1,
            max_size=8,
        )
    )
    rows = draw(st.lists(st.tuples(*[sentences] * len(columns)), max_size=4))
    return Table(tuple(columns), tuple(rows), draw(st.sampled_from(["", "  ", "    "])))


def shown_length(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


@pytest.mark.parametrize("module", [tables, layers, graphs])
def test_doctests(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


def test_at_full_width_columns_are_as_wide_as_their_widest_cell():
    assert Table(PLANS, ROWS).lines() == [
        "  plan              step  communication    memory",
        "  data parallel  19.9 ms        9.83 ms  1.49 GiB  dp 64, micro-batch 128, activations recomputed",
        "  megatron         1.2 s        9.88 us    63 GiB",
    ]


def test_sentences_are_broken_before_columns_are_left_out():
    assert Table(PLANS, ROWS).lines(80) == [
        "  plan              step  communication    memory",
        "  data parallel  19.9 ms        9.83 ms  1.49 GiB  dp 64, micro-batch 128,",
        "                                                   activations recomputed",
        "  megatron         1.2 s        9.88 us    63 GiB",
    ]


def test_columns_are_left_out_by_rank_and_then_from_the_right():
    assert Table(PLANS, ROWS).lines(64, "wide=True shows all") == [
        "  plan              step  communication",
        "  data parallel  19.9 ms        9.83 ms",
        "  megatron         1.2 s        9.88 us",
        "  left out: memory, how (wide=True shows all)",
    ]
    assert Table(PLANS, ROWS).lines(66)[:2] == [
        "  plan              step  communication",
        "  data parallel  19.9 ms        9.83 ms  dp 64, micro-batch 128,",
    ]


def test_headings_are_broken_and_stand_on_their_last_line():
    table = Table((Column("layer"), Column("(p0,p1,p2) inter-node | intra-node")), (("h.*.fc", "(2,1,1) | (8,1,1)"),))
    assert table.lines(40) == [
        "          (p0,p1,p2) inter-node |",
        "  layer   intra-node",
        "  h.*.fc  (2,1,1) | (8,1,1)",
    ]


def test_long_names_are_shortened_where_nothing_else_helps():
    table = Table(
        (Column("layer"), Column("time", right=True)), (("transformer.layers.*.attention.c_attn x 48", "1 ms"),)
    )
    assert table.lines(40) == ["  layer                             time", "  transformer.lay..ion.c_attn x 48  1 ms"]


@given(any_tables(), st.integers(NARROWEST, 160))
def test_no_line_is_too_long_and_ranks_are_kept(table, width):
    lines = table.lines(width)
    assert all(shown_length(line) <= width for line in lines)
    fit = tables._Fit(table, width)
    ranks = [table.columns[i].rank for i in fit.shown]
    gone = [column.rank for i, column in enumerate(table.columns) if i not in fit.shown]
    assert all(rank <= least for rank in ranks for least in gone if least) and (fit.shown or not table.columns)
    if all(shown_length(line) <= width for line in table.lines()):
        assert lines == table.lines() and not gone


@given(sentences, st.integers(NARROWEST, 100))
def test_broken_lines_keep_their_characters(line, width):
    text = Text(((f"  {line}",),)).fitted(width)
    assert "".join(text.split()) == "".join(line.split())
    assert all(shown_length(each) <= width for each in text.split("\n"))


@given(st.integers(0, 60), st.integers(1, 6), st.integers(NARROWEST, 100))
def test_grids_go_on_below(count, size, width):
    rows = tuple((f"worker {i}", [f"{k}".center(size)[:size] for k in range(count)]) for i in range(2))
    lines = Grid(rows).lines(width)
    assert all(len(line) <= width for line in lines)
    for name, cells in rows:
        parts = [line[len(name) + 2 :] for line in lines if line.startswith(name)]
        assert " ".join(parts).split() == " ".join(cells).split()


def test_units_stay_with_their_numbers():
    line = "  " + "x" * 30 + " lower bound 664 ms; 12 GiB"
    assert Text(((line,),)).fitted(48).split("\n") == ["  " + "x" * 30 + " lower bound", "    664 ms; 12 GiB"]


@pytest.mark.parametrize("width", [None, 40])
def test_sections_without_content_are_left_out(width):
    text = Text((["Title"], [], [facts([("steps", "3")])]))
    assert text.fitted(width) == "Title\n\nsteps              3"


def test_narrow_terminals_are_taken_for_forty_columns():
    text = Text(([Table(PLANS, ROWS)],))
    assert text.fitted(10) == text.fitted(NARROWEST)
