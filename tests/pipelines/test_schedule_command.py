"""`autoddl schedule`, through its own parser."""

from __future__ import annotations

import argparse
import json
import re

import pytest

from autoddl.cli import schedule as command
from autoddl.cli._options import in_options
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.generators import families, generate
from autoddl.pipelines.grid import from_csv, to_csv


@pytest.fixture
def autoddl(capsys):
    def call(*arguments):
        parser = argparse.ArgumentParser()
        command.add_parser(parser.add_subparsers())
        assert command.run(parser.parse_args(["schedule", *arguments])) == 0
        return capsys.readouterr().out

    return call


def test_json_has_what_the_papers_table_has(autoddl):
    document = json.loads(
        autoddl("chimera", "--stages", "8", "--micro-batches", "8", "--forward", "1", "--backward", "2", "--json")
    )
    assert document["valid"] is True
    assert document["makespan"] == 36
    assert document["bubble_ratio"] == pytest.approx(6 / (12 + 6))
    assert (document["critical_path"]["forward"], document["critical_path"]["backward"]) == (8, 14)
    assert document["peak_activations"] == [5, 6, 7, 8, 8, 7, 6, 5]
    assert document["weight_versions"] == [1] * 8
    assert document["weight_copies"] == [2] * 8
    expected = generate("chimera", num_stages=8, num_micro_batches=8)
    assert document["workers"] == [[str(task) for task in tasks] for tasks in expected.workers]
    assert len(document["starts"]) == len(document["ends"]) == 8


def test_json_of_every_family(autoddl):
    for family in families():
        document = json.loads(autoddl(family.name, "--stages", "4", "--micro-batches", "4", "--json"))
        assert document["name"] == family.name
        assert document["synchronous"] is family.synchronous
        assert ("steady_state" in document) is not family.synchronous
        assert len(document["workers"]) == len(document["peak_activations"]) == len(document["weight_versions"]) == 4


def test_list_explains_every_family_in_a_line(autoddl):
    lines = autoddl("list").splitlines()
    assert [line.split()[0] for line in lines] == [family.name for family in families()]
    assert all(len(line.split()) > 5 for line in lines)
    listed = json.loads(autoddl("list", "--json"))["families"]
    assert [entry["name"] for entry in listed] == [family.name for family in families()]


def test_text(autoddl):
    out = autoddl("wpipe", "--stages", "2", "--micro-batches", "2")
    assert "worker 0  0F0 0F1 2F0 2F1" in out
    assert "weight versions    2 2" in out
    assert "steady state       8 per update, bubble ratio 0.0000" in out


def test_options_reach_the_generator(autoddl):
    out = autoddl(
        *("chimera", "--stages", "8", "--micro-batches", "16", "--pipelines", "4", "--concatenation", "doubling"),
        *("--recompute", "--width", "2", "--all-reduce", "none", "--iterations", "2", "--format", "csv"),
    )
    expected = generate(
        "chimera",
        num_stages=8,
        num_micro_batches=16,
        num_pipelines=4,
        concatenation="doubling",
        recompute=True,
        width=2,
        all_reduce="none",
        iterations=2,
    )
    assert from_csv(out) == expected
    out = autoddl(
        "1f1b", "--stages", "3", "--micro-batches", "6", "--warm-up", "5,2,2", "--width", "3,2,1", "--format", "csv"
    )
    assert from_csv(out) == generate("1f1b", num_stages=3, num_micro_batches=6, warm_up=(5, 2, 2), width=(3, 2, 1))


def test_times_reach_the_simulator(autoddl):
    document = json.loads(
        autoddl(
            *("gpipe", "--stages", "2", "--micro-batches", "1", "--forward", "1,2", "--backward", "4,8"),
            *("--transfer", "0.5", "--transfer-latency", "0.25", "--update-time", "16", "--json"),
        )
    )
    # 1 + 0.75 + 2 + 8, then 0.75 + 4 + 16 on worker 0.
    assert document["makespan"] == 32.5


def test_a_grid_of_ones_own(autoddl, tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(to_csv(generate("gems", num_stages=2, num_micro_batches=2)))
    document = json.loads(autoddl(str(file), "--backward", "2", "--json"))
    assert document["name"] == "gems"
    # D F + N D B + (N - 1) F
    assert document["makespan"] == 2 * 1 + 2 * 2 * 2 + 1


def test_an_invalid_grid_is_shown_with_the_bad_cell_marked(tmp_path, capsys):
    file = tmp_path / "mine.csv"
    file.write_text(to_csv(generate("gpipe", num_stages=2, num_micro_batches=2)).replace("1B0", "1B1", 1))
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    with pytest.raises(UserError, match="schedule gpipe: backward 1B1 is done twice") as caught:
        command.run(parser.parse_args(["schedule", str(file)]))
    assert "\n" not in str(caught.value)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ">1B1<" in captured.err


def test_output_goes_to_a_file(autoddl, tmp_path):
    for form, beginning in (
        ("svg", "<svg"),
        ("trace", "{"),
        ("csv", "# schedule"),
        ("text", "worker 0"),
        ("json", "{"),
    ):
        file = tmp_path / f"out.{form}"
        assert autoddl("1f1b", "--stages", "2", "--micro-batches", "2", "--format", form, "-o", str(file)) == ""
        assert file.read_text().startswith(beginning)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chimera", "--stages", "3", "--micro-batches", "3"], "--stages is 3; chimera needs an even number"),
        (
            ["chimera", "--stages", "8", "--micro-batches", "8", "--pipelines", "6"],
            "--pipelines is 6; .* f divides 4",
        ),
        (
            ["gpipe", "--stages", "9" * 9, "--micro-batches", "9" * 9],
            "--stages x --micro-batches x iterations .* at most",
        ),
        (["wpipe", "--stages", "4", "--micro-batches", "3"], "--micro-batches is 3; .* wpipe needs M >= N"),
        (["gpipe", "--micro-batches", "3"], "--stages is missing"),
        (["gpipe", "--stages", "3"], "--micro-batches is missing"),
        (["nothing", "--stages", "3", "--micro-batches", "3"], "schedule 'nothing' is unknown; known are gpipe"),
        (["/nowhere/x.csv"], "schedule /nowhere/x.csv cannot be read .No such file"),
        (["gpipe", "--stages", "2", "--micro-batches", "3", "--forward", "1,2,3"], "forward has 3 entries; give 2"),
        (["gpipe", "--stages", "2", "--micro-batches", "3", "--backward", "-1"], "backward.0. is -1.0"),
        (["gpipe", "--stages", "2", "--micro-batches", "3", "--activation-limit", "2"], "its limit is 2"),
        (
            ["gpipe", "--stages", "2", "--micro-batches", "3", "--groups", "2"],
            "schedule gpipe has no option --groups; it",
        ),
        (
            ["1f1b", "--stages", "2", "--micro-batches", "3", "--groups", "2"],
            "no option --groups; it has --max-in-flight, --policy, --warm-up",
        ),
        (["1f1b", "--stages", "2", "--micro-batches", "3", "--warm-up", "1,2"], "--warm-up is 1 at stage 0"),
        (["chimera", "--stages", "2", "--micro-batches", "3", "--concatenation", "x"], "--concatenation is 'x'"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    with pytest.raises(UserError) as caught:
        command.run(parser.parse_args(["schedule", *arguments]))
    said = in_options(str(caught.value))  # as the command line shows it
    assert re.search(message, said) and "\n" not in said


@pytest.mark.parametrize("arguments", [["--forward", "fast"], ["--width", "1.5"], ["--stages", "four"]])
def test_arguments_that_are_no_numbers(arguments, capsys):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["schedule", "gpipe", *arguments])
    assert caught.value.code == 2
    assert arguments[1] in capsys.readouterr().err
