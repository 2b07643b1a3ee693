"""Input that once ended in an exception, a hang or unbounded memory; and the bounds of every reader."""

from __future__ import annotations

import json
import os
import time
from importlib import resources

import pytest

from autoddl.__main__ import main
from autoddl.costmodel import limits, reading
from autoddl.costmodel.documents import load_json
from autoddl.costmodel.errors import UserError, one_line, quote
from autoddl.launching.hosts import parse_hosts, read_hostfile
from autoddl.launching.joining import find_membership, in_slurm_step
from autoddl.launching.nodelist import expand_nodelist
from autoddl.pipelines.generators import generate
from autoddl.pipelines.generators.draft import GeneratorError

TWO = ("--cluster", "dgx-a100", "--nodes", "1", "--devices-per-node", "2")
SCHEDULE = "# schedule,1f1b\n# micro-batches,1\n# update-period,1\n# pipeline,0\nworker 0,0F0,0B0 0U0\n"
NCCL = """\
# all_reduce_perf
#  Rank  0 Pid   1887 on   worker-1 device  0 [0x8d] NVIDIA H100 80GB HBM3
#  Rank  1 Pid   1888 on   worker-1 device  1 [0x95] NVIDIA H100 80GB HBM3
#       size         count      type   redop    root     time   algbw   busbw #wrong
{} 256 float sum -1 27.25 0.04 0.05 0
"""
SAMPLES = "collective,ranks,bytes,seconds\nall-reduce,2,{},{}\n"
GRAPH = "a -- x -- forward_compute_time=1, backward_compute_time=2, activation_size={}, parameter_size=4\n"
PROFILE = {
    "format": "autoddl-profile",
    "version": 1,
    "name": "p",
    "micro_batch": 1,
    "layers": [{"name": "a", "forward_s": 1, "backward_s": 2, "activation_bytes": 3, "parameter_bytes": 4}],
}
PLANNER = ("--profile-batch", "1", *TWO, "--batch", "4")
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}


def short(value: object) -> str:
    """What stands for a value in a test's name: some are megabytes."""
    return ascii(value)[:40]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command refuses its arguments with, at once."""
    begin = time.process_time()
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    line = capsys.readouterr().err
    assert code == 2 and line.startswith("autoddl: ") and line.count("\n") == 1 and line[:-1].isprintable(), line
    assert time.process_time() - begin < 5
    return line


def profile(**changes) -> str:
    return json.dumps({**PROFILE, "layers": [{**PROFILE["layers"][0], **changes}]})


@pytest.mark.parametrize(
    ("name", "text", "arguments", "says"),
    [
        ("s.csv", SCHEDULE.replace("0B0", "0B0\0"), ["schedule"], "is a NUL"),
        ("s.csv", SCHEDULE.replace("batches,1", "batches," + "9" * 5000), ["schedule"], "micro-batches has '999"),
        ("s.csv", SCHEDULE.replace("0F0", "0F" + "9" * 5000), ["schedule"], "is not a task"),
        ("s.csv", SCHEDULE.replace("batches,1", "batches,\u00b2"), ["schedule"], "micro-batches has '\u00b2'"),
        ("s.csv", SCHEDULE.replace("batches,1", "batches,999999999999"), ["schedule"], "give at most 262,144"),
        ("s.csv", SCHEDULE.replace("pipeline,0", "pipeline," + "0 " * 5000), ["schedule"], "5,000 stages; give at most"),
        ("s.csv", SCHEDULE + "# activation-limits,1e308", ["schedule"], "activation-limits are '1e308'"),
        ("s.csv", SCHEDULE.encode("utf-16"), ["schedule"], "is not UTF-8 text"),
        ("n.txt", NCCL.format(2**63), ["fit"], "size is '9223372036854775808', should be at most"),
        ("n.txt", NCCL.format("9" * 500), ["fit"], "size is '999"),
        ("m.csv", SAMPLES.format(2**63, 1), ["fit"], "bytes is '9223372036854775808', should be a whole number"),
        ("m.csv", SAMPLES.format("9" * 5000, 1), ["fit"], "bytes is '999"),
        ("m.csv", SAMPLES.format("\u00b2", 1), ["fit"], "bytes is '\u00b2'"),
        ("m.csv", SAMPLES.format(1, "1e308"), ["fit"], "'1e308', should be a time of more than 0 and at most 1e+09 seconds"),
        ("m.csv", SAMPLES.format(1, "1\0"), ["fit"], "is a NUL"),
        ("g.txt", GRAPH.format("1e308"), ["pipeline", "--profile"], "'activation_size' is '1e308'"),
        ("g.txt", GRAPH.format("1e30"), ["pipeline", "--profile"], "activation_bytes of layer 'x' is 1e+30, should be from 0 to"),
        ("p.json", profile(activation_bytes=1e308), ["pipeline", "--profile"], "activation_bytes is 1e+308, should be at most"),
        ("p.json", profile(forward_s=1e30), ["pipeline", "--profile"], "forward_s of layer 'a' is 1e+30, should be from 0"),
        ("p.json", profile(repeat=4 * 10**9), ["pipeline", "--profile"], "repeat is 4000000000; with it the profile"),
        ("p.json", profile(repeat=2**63), ["pipeline", "--profile"], "repeat is 9223372036854775808, should be"),
        ("p.json", '{"a": ' + "[" * 10**6, ["pipeline", "--profile"], "not a JSON document"),
    ],
    ids=short,
)  # fmt: skip
@pytest.mark.fault(
    "input",
    "a NUL, thousands of digits, digits of other scripts, sizes beyond 64 bits, 1e308 or `repeat: 4e9` in a file",
    "one line names the place, the value and what would be right",
    exit_code=2,
)
def test_files(name, text, arguments, says, tmp_path, capsys):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    more = (
        PLANNER if arguments[0] == "pipeline" and name == "g.txt" else PLANNER[2:] if arguments[0] == "pipeline" else ()
    )
    line = refused(capsys, *arguments, str(path), *more)
    assert says in line and len(line) < 500


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("calibration", "replicates", 0, "values", 0), 1e308, "values: 0 is 1e+308, should be at most"),
        (
            ("calibration", "replicates", 0, "group"),
            2**62,
            "group is 4611686018427387904, should be a whole number from 0 to",
        ),
        (("device", "memory", "value"), 1e308, "memory is 1e+308 "),
        (("num_nodes",), 2**62, "devices should be at most"),
        (("num_nodes",), 10**400, "num_nodes is 1000"),
        (("device", "name"), "\u001b[31m", "should be a string of one line"),
    ],
    ids=short,
)
@pytest.mark.fault(
    "input",
    "a cluster file whose figures overflow (1e308 among its replicates)",
    "one line names the figure and its bound: no NaN reaches a plan",
    exit_code=2,
)
def test_clusters(place, value, says, tmp_path, capsys):
    samples = tmp_path / "samples.csv"
    samples.write_text(
        "collective,ranks,bytes,seconds\n"
        + "".join(
            f"all-reduce,2,{2**k},{1e-5 + 2**k * 1e-9 * (1 + i / 9)}\n" for k in range(10, 22, 3) for i in range(3)
        )
    )
    path = tmp_path / "cluster.json"
    assert main(["fit", str(samples), "--quiet", "-o", str(path)]) == 0
    capsys.readouterr()
    document = json.loads(path.read_text())
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    path.write_text(json.dumps(document))
    assert says in refused(capsys, "plan", "mlp:8,8", "--cluster", str(path))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["schedule", "grouped-gpipe", "--stages=2", "--micro-batches=2", f"--groups={10**12}"], "give at most 262,144"),
        (["schedule", "interleaved-1f1b", "--stages=2", "--micro-batches=2", f"--groups={10**12}"], "--stages x groups x"),
        (["schedule", "1f1b", "--stages=2", f"--micro-batches={10**12}"], "give at most 262,144"),
        (["schedule", "1f1b", "--stages=200000", "--micro-batches=1"], "--stages is 200,000; give at most 4,096"),
        (["schedule", "1f1b", "--stages=2", "--micro-batches=2", f"--width={10**12}"], "give at most 1,048,576"),
        (["schedule", "1f1b", "--stages=\u00b2", "--micro-batches=1"], "'\u00b2' is not a whole number of at most 18 digits"),
        (["schedule", "1f1b", "--stages=\u0663", "--micro-batches=1"], "'\u0663' is not a whole number"),
        (["schedule", "1f1b", "--stages=1_0", "--micro-batches=1"], "'1_0' is not a whole number"),
        (["schedule", "1f1b", "--stages", "9" * 5000, "--micro-batches=1"], "is not a whole number of at most 18 digits"),
        (["schedule", "1f1b", "--stages=--", "--micro-batches=1"], "expected one argument"),
        (["schedule", "1f1b", "--stages=2", "--micro-batches=1", "--forward=1e308"], "'1e308' is not a number of at most 1e+18"),
        (["schedule", "1f1b", "--stages=2", "--micro-batches=1", "--forward=nan"], "'nan' is not a number"),
        (["plan", "mlp:8,8", *TWO, "--memory-limit=1e308"], "'1e308' is not a number of at most 1e+18"),
        (["plan", "mlp:8,8", *TWO, "--latency=1e400s"], "'1e400s' is not a number with a unit"),
        (["plan", "mlp:8,8", *TWO, "--bandwidth=\u00b2GB/s"], "is not a number with a unit"),
        (["plan", "mlp:8,8", *TWO[:2], f"--nodes={10**12}"], "devices should be at most 1048576 devices"),
        (["plan", "mlp:8,8", *TWO, f"--batch={10**15}"], "batch 1000000000000000 should be at most"),
        (["plan", "mlp:" + ",".join(["8"] * 200_000), *TWO], "200,000 widths, should have at most"),
        (["plan", "mlp:\u00b2,8", *TWO], "width '\u00b2' should be a whole number"),
        (["plan", "gpt:" + "9" * 5000 + "x64", *TWO], "should be gpt:LAYERSxWIDTH"),
        (["pipeline", "--profile=transformer:999999999x8x8", *TWO, "--batch=4"], "should be at most 1,998"),
        (["launch", "p", "s", "--grace=1e18"], "--grace is 1e+18, should be more than 0 and at most 1e+09 seconds"),
        (["verify", "p", "--ranks=2", "--timeout=1e18"], "should be a positive number, at most 1e+09"),
        (["calibrate", "--ranks=\u00b2"], "--ranks is '\u00b2', should be a whole number"),
        (["calibrate", "--sizes=" + "9" * 400], "should be at most 1000000000000000000 bytes"),
    ],
    ids=short,
)  # fmt: skip
@pytest.mark.fault(
    "input",
    "options far out of range (--groups 10^12), not finite, or in digits of other scripts",
    "one line names the option, its value and the bound; nothing is allocated",
    exit_code=2,
)
def test_options(arguments, says, capsys):
    assert says in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h:\u00b2", "'h:\u00b2' is not the name of a host"),
        ("h:" + "9" * 5000, "is not the name of a host"),
        ("h:999999999999", "should be a whole number from 1 to 1048576"),
        ("h:0", "slots of 'h' is '0', should be a whole number from 1"),
        (",".join(f"h{i}" for i in range(70_000)), "70,000 hosts should be at most 65,536"),
        ("h\u001b[2J", r"is not the name of a host"),
    ],
    ids=short,
)
@pytest.mark.fault(
    "input", "--hosts with slots that are no numbers, or too many hosts", "one line names the entry", exit_code=2
)
def test_hosts(text, says):
    with pytest.raises(UserError) as error:
        parse_hosts(text)
    assert says in one_line(str(error.value))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h slots=\u00b2", "should be: host"),
        ("h slots=" + "9" * 5000, "slots of 'h' is '999"),
        ("h slots=0", "slots of 'h' is '0'"),
        ("h\0", "is a NUL"),
    ],
    ids=short,
)
def test_hostfiles(text, says, tmp_path):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_hostfile(path)
    assert says in one_line(str(error.value))


def test_a_hostfile_of_many_hosts_is_read_in_linear_time(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("".join(f"h{i} slots=8\n" for i in range(limits.MAX_HOSTS)))
    begin = time.process_time()
    assert len(read_hostfile(path)) == limits.MAX_HOSTS
    assert time.process_time() - begin < 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("n[0-999999999]", "names more than 65,536 hosts"),
        ("n[0-9999][0-9999]", "names more than 65,536 hosts"),
        ("n[0-65535],m", "names more than 65,536 hosts"),
        ("n[" + "0-9," * 9000 + "1]", "names more than 65,536 hosts"),
        ("n[0-" + "9" * 5000 + "]", "of at most 18 digits"),
        ("n[\u00b2]", "'\u00b2' should be a number or a range"),
        ("n[\u0663-\u0664]", "should be a number or a range"),
    ],
    ids=short,
)
@pytest.mark.fault(
    "input",
    "Slurm's list of nodes names 10^9 hosts (`n[0-999999999]`)",
    "it is counted, and refused before a name is made",
    exit_code=2,
)
def test_lists_of_nodes(text, says):
    begin = time.process_time()
    with pytest.raises(UserError) as error:
        expand_nodelist(text)
    assert says in one_line(str(error.value))
    assert time.process_time() - begin < 5


def test_a_list_of_the_most_nodes_is_expanded():
    assert len(expand_nodelist("n[00000-65535]")) == limits.MAX_HOSTS
    assert expand_nodelist("n[1-2]x[01,3]-y") == ["n1x01-y", "n1x3-y", "n2x01-y", "n2x3-y"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"SLURM_NTASKS": "\u00b2"}, "SLURM_NTASKS is '\u00b2', should be a whole number"),
        ({"SLURM_NTASKS": "9" * 5000}, "SLURM_NTASKS is '999"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID is '-1'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "\u00b2"}, "should be like 2(x3),1"),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "2(x999999999)"},
            "times is '999999999', should be a whole number from 1 to 65536",
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x" + "9" * 5000 + ")"}, "times is '999"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x60000),2(x60000)"}, "of more than 65,536 nodes"),
        ({"SLURM_STEP_NODELIST": "n[0-999999999]"}, "names more than 65,536 hosts"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is '99999', should be a whole number from 1 to 65535"),
    ],
    ids=short,
)
@pytest.mark.fault(
    "input",
    "variables of a launcher with digits of other scripts, or counts far out of range",
    "one line names the variable and its value",
    exit_code=2,
)
def test_variables_of_launchers(changes, says):
    with pytest.raises(UserError) as error:
        find_membership({**STEP, **changes})
    assert says in one_line(str(error.value))
    assert not in_slurm_step({**STEP, "SLURM_STEP_ID": "\u00b2"})


@pytest.mark.fault(
    "input",
    "a file without an end (/dev/zero), or larger than 64 MiB",
    "reading stops at the bound, in one line",
    exit_code=2,
)
def test_large_files(tmp_path, capsys):
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(limits.MAX_FILE_BYTES + 1)
    for path in ("/dev/zero", str(large)):
        assert "it has more than 67,108,864 bytes" in refused(capsys, "plan", "mlp:8,8", "--cluster", path)
    assert "Is a directory" in refused(capsys, "fit", str(tmp_path))
    assert "File name too long" in refused(capsys, "fit", "x" * 5000)


@pytest.mark.fault(
    "input", "a pipe that nobody writes into", "it is waited for for a minute, then refused", exit_code=2
)
def test_pipes(tmp_path, monkeypatch, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(limits, "PIPE_WAIT_S", 0.1)
    assert "nothing was written into it for 0.1 s" in refused(capsys, "fit", str(pipe))
    monkeypatch.setattr(limits, "PIPE_WAIT_S", 60.0)
    reader, writer = os.pipe()
    os.write(writer, b'{"a": "' + b"x" * 9000 + b'"}')
    os.close(writer)
    assert load_json(f"/dev/fd/{reader}") == {"a": "x" * 9000}
    os.close(reader)


def test_byte_order_marks_and_line_ends(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    assert reading.read_text(path) == "a\nb\nc\n"


@pytest.mark.parametrize("text", ["\u00b2", "\u0663", "1_0", "", " 1", "1 ", "-1", "9" * 19, "0x1", "1.0", "\uff11"])
def test_whole_numbers_are_plain_digits(text):
    with pytest.raises(UserError, match=r"x is .*, should be a whole number from 0 to"):
        reading.whole_number(text, "x")


def test_numbers():
    assert reading.whole_number("007", "x") == 7 and reading.whole_number("-5", "x", -9) == -5
    assert reading.parse_figure(" 1.5e3 ") == 1500 and reading.parse_figure("-.5") == -0.5
    for text in ("nan", "inf", "1e31", "1_0", "\u00b2", "1" * 101, "1e99999", "", "."):
        value = reading.parse_figure(text)
        assert value != value, text


@pytest.mark.parametrize(
    "message",
    [
        quote("\u0436" * 10_000),
        f"layer {'ж' * 5000!r} of edge {'ж' * 5000!r} -> {'ж' * 5000!r}: {'ж' * 5000}",
        "names " + ", ".join(repr("ж" * 9) for _ in range(5000)),
    ],
    ids=short,
)
@pytest.mark.fault("input", "a value of thousands of characters", "the line shows at most 200 of them", exit_code=2)
def test_messages_show_little_of_the_input(message):
    assert 0 < one_line(message).count("ж") <= limits.MAX_SHOWN


def test_messages_hold_no_control_characters():
    assert one_line("a\x1b[31m\n b\u202e\ud800") == r"a\x1b[31m b\u202e\ud800"
    short = "plan.json: layer 'a': kind 'b' is not one of linear, norm"
    assert one_line(short) == short


def test_large_schedules_are_refused_before_they_are_made():
    begin = time.process_time()
    for options in ({"groups": 10**12}, {"groups": 2**60}, {"iterations": 10**15}):
        with pytest.raises(GeneratorError, match="give at most"):
            generate("grouped-gpipe", num_stages=2, num_micro_batches=2, **options)
    assert time.process_time() - begin < 1


@pytest.mark.fault(
    "input",
    "a plan with a million times as many micro-batches",
    "it is refused before its schedule is made",
    exit_code=2,
)
def test_plans_with_many_micro_batches(tmp_path, capsys):
    path = tmp_path / "plan.json"
    arguments = ["mlp:8,8,8,8", *TWO, "--batch=8", "--bandwidth=1MB/s", "--pipeline=auto", "--quiet", "-o", str(path)]
    assert main(["plan", *arguments]) == 0
    capsys.readouterr()
    document = json.loads(path.read_text())
    document["workload"]["batch"] *= 10**6
    path.write_text(json.dumps(document))
    refused(capsys, "diff", str(path), str(path))


def test_the_largest_profile_is_planned_with():
    text = resources.files("autoddl.pipelines.profiles").joinpath("bert-48.json").read_text(encoding="utf-8")
    from autoddl.pipelines.profile import from_document

    document = json.loads(text)
    document.pop("edges", None)
    layer = {k: v for k, v in document["layers"][0].items() if k != "repeat"}
    document["layers"] = [{**layer, "repeat": limits.MAX_PROFILE_LAYERS}]
    assert len(from_document(document, "p").cuts()) == limits.MAX_PROFILE_LAYERS + 1
