"""What is checked before a launch, by itself: hosts and their files, the plan's demands, and who a joining process is."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from autoddl.__main__ import main
from autoddl.costmodel.errors import UserError
from autoddl.launching import supervisor
from autoddl.launching.demands import Demands, demands_of, differences
from autoddl.launching.facts import HostFacts, gather_facts
from autoddl.launching.hosts import LOCALHOST, Host, Placement, parse_hosts, place, read_hostfile
from autoddl.launching.joining import check_membership, find_membership
from autoddl.launching.lines import LineReader, LineSender, Message, write_line
from autoddl.launching.output import RankOutput
from autoddl.planfile import load_plan

from .launches import SCRIPT, wait_until_ended

GIB = 2**30


# ---- Hosts --------------------------------------------------------------------------------------------------------------


def test_hosts_are_read():
    assert parse_hosts("a,me@b.c:4, d-1") == [Host("a"), Host("me@b.c", 4), Host("d-1")]
    assert parse_hosts("[fe80::1]") == [Host("[fe80::1]")]
    assert Host("me@b.c").address == "b.c"


def test_a_hostfile_is_read(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\n\na slots=2\nb  # the new one\nme@c slots=8\n")
    assert read_hostfile(path) == [Host("a", 2), Host("b"), Host("me@c", 8)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=x\n", "line 1: 'a slots=x' should be: host [slots=N]"),
        ("a\nb c\n", "line 2: 'b c' should be: host [slots=N]"),
        ("a slots=0\n", "slots of 'a' is '0', should be a whole number from 1"),
        ("a\na\n", "host 'a' is given twice"),
        ("-x\n", "'-x' is not the name of a host"),
        ("a@b@c\n", "is not the name of a host"),
        ("# none\n", "names no host"),
    ],
)
def test_what_is_no_hostfile(tmp_path, text, message):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_hostfile(path)
    assert message in str(caught.value)


def test_ranks_are_placed_node_by_node():
    a, b = Host("a", 4), Host("b")
    assert place([a, b], 2, 2) == [Placement(a, range(0, 2)), Placement(b, range(2, 4))]
    assert place([b, a], 2, 4) == [Placement(b, range(0, 4)), Placement(a, range(4, 8))]
    for hosts, nodes, size, message in (
        ([a], 2, 2, "the plan is for 2 nodes of 2 devices, found 1 node: a"),
        ([a, b], 1, 2, "the plan is for 1 node of 2 devices, found 2 nodes: a, b"),
        ([b, a], 2, 8, "the plan is for 8 devices per node, host a has 4 slots"),
        ([Host(LOCALHOST)], 2, 1, "found 1 node: this host only"),
    ):
        with pytest.raises(UserError) as caught:
            place(hosts, nodes, size)
        assert message in str(caught.value)


def test_ranks_are_placed_on_other_nodes_with_force():
    a, b, c = Host("a", 3), Host("b"), Host("c", 1)
    assert place([a, c], 2, 2, force=True) == [Placement(a, range(0, 3)), Placement(c, range(3, 4))]
    assert place([b], 2, 2, force=True) == [Placement(b, range(0, 4))]
    assert place([a, b], 1, 3, force=True) == [Placement(a, range(0, 3))]
    with pytest.raises(UserError, match="the plan is for 8 ranks, the hosts have slots for 4"):
        place([a, c], 2, 4, force=True)


# ---- What hosts have ----------------------------------------------------------------------------------------------------


CPUS = Demands(2, 2, "a core", False, (1.0 * GIB, 1.0 * GIB, 5.0 * GIB, 3.0 * GIB))
HERE = HostFacts("h", "3.10", "1", "0.9.0", "", 8 * GIB, {"/p": "aa" * 32}, "/work", True, "")


def found(demands: Demands = CPUS, **changes) -> list[tuple[str, bool]]:
    """What the second of two hosts lacks."""
    hosts = place([Host("h1"), Host("h2")], demands.num_nodes, demands.devices_per_node)
    second = dataclasses.replace(HERE, **changes)
    return [(d.text, d.can_be_forced) for d in differences(demands, hosts, [HERE, second], HERE)]


def test_hosts_that_have_everything():
    assert found() == []


@pytest.mark.parametrize(
    ("changes", "text", "can_be_forced"),
    [
        ({"autoddl": "2"}, "host h2 has AutoDDL 2, should have 1 as here", False),
        ({"oneflow": "0.8.0"}, "host h2 has OneFlow 0.8.0, should have 0.9.0", False),
        ({"oneflow": ""}, "host h2: OneFlow is not installed", False),
        ({"oneflow_fault": "OneFlow needs cuDNN"}, "host h2: OneFlow needs cuDNN", False),
        (
            {"has_directory": False},
            "host h2 has no directory /work; make it there, or give another directory=FOLDER",
            False,
        ),
        (
            {"digests": {"/p": ""}},
            "host h2 has no file /p; it should be there as it is here (copy it, or share it)",
            False,
        ),
        (
            {"digests": {"/p": "bb" * 32}},
            "host h2 has another /p (SHA-256 bbbbbbbbbbbb) than this one (aaaaaaaaaaaa); copy it there",
            False,
        ),
    ],
)
def test_what_a_host_lacks(changes, text, can_be_forced):
    assert found(**changes) == [(text, can_be_forced)]


def test_cpu_ranks_share_the_hosts_memory():
    demands = Demands(2, 2, "a core", False, (1.0 * GIB, 1.0 * GIB, 5.0 * GIB, 4.0 * GIB))
    assert found(demands) == [("host h2 has 8 GiB of memory free; the plan's 2 ranks there need 9 GiB", True)]


@pytest.mark.skipif(sys.platform != "linux", reason="looks at Linux's memory")
def test_facts_are_gathered(tmp_path):
    (tmp_path / "file").write_text("abc")
    facts = gather_facts(str(tmp_path), [str(tmp_path / "file"), "/nowhere"])
    assert facts.gpu_facts is None
    assert facts.digests["/nowhere"] == ""
    assert facts.digests[str(tmp_path / "file")].startswith("ba7816bf8f01cfea")  # SHA-256's own test vector
    assert (facts.name, facts.has_directory) == (socket.gethostname(), True)
    assert GIB // 64 < facts.free_memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert HostFacts.of_document(facts.document()) == facts


def test_what_plans_demand(mlp_plan):
    plan = load_plan(mlp_plan(2, 2))
    demands = demands_of(plan)
    assert (demands.num_nodes, demands.devices_per_node, demands.on_gpus) == (2, 2, False)
    assert demands.memory_bytes == (plan.document["memory_bytes"],) * 4


def test_what_plans_with_a_pipeline_demand(mlp_plan):
    """Each rank has the memory of its worker; which devices these are stands in the plan."""
    plan = load_plan(mlp_plan(2, 2))
    workers = [{"ranks": [0, 2], "memory_bytes": 5.0}, {"ranks": [1, 3], "memory_bytes": 7.0}]
    piped = dataclasses.replace(plan, document={**plan.document, "workers": workers})
    assert (demands_of(piped).devices, demands_of(piped).memory_bytes) == ((0, 2, 1, 3), (5.0, 5.0, 7.0, 7.0))
    workers[1]["ranks"] = [1, 2]
    with pytest.raises(UserError, match=r"the plan has ranks \[0, 2, 1, 2\], should have each of 0 to 3 once"):
        demands_of(piped)


# ---- Joining ------------------------------------------------------------------------------------------------------------

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "n1",
    "PMIX_NAMESPACE": "1234@1",
}
PLAIN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "2000"}
FOUR = Demands(2, 2, "x", False, (1.0,) * 4)


@pytest.mark.parametrize("environ", [SLURM, OPENMPI, PLAIN], ids=["slurm", "openmpi", "plain"])
def test_who_a_process_is(environ):
    member = find_membership(environ)
    assert (member.rank, member.num_ranks, member.local_rank, member.rendezvous.address) == (3, 4, 1, "n1")
    check_membership(member, FOUR)
    with pytest.raises(UserError, match=r"the plan is for 2 ranks, .* started 4"):
        check_membership(member, Demands(1, 2, "x", False, (1.0,) * 2))
    with pytest.raises(UserError, match=r"the plan (has rank 3 as number 3 of node 0|has 4 ranks per node)"):
        check_membership(member, Demands(1, 4, "x", False, (1.0,) * 4))
    check_membership(member, Demands(1, 4, "x", False, (1.0,) * 4), force=True)


def test_ports_that_all_ranks_find_alike():
    ports = {find_membership({**SLURM, "SLURM_JOB_ID": str(job)}).rendezvous.port for job in range(50)}
    assert len(ports) > 40 and all(12_000 <= port < 28_000 for port in ports)
    same = [find_membership({**SLURM, "SLURM_PROCID": str(rank)}).rendezvous.port for rank in range(4)]
    assert len(set(same)) == 1
    assert find_membership({**SLURM, "SLURM_STEP_ID": "1"}).rendezvous.port != same[0]  # of the attempt after
    assert find_membership({**SLURM, "MASTER_PORT": "99"}).rendezvous.port == 99


def test_processes_that_nobody_made_ranks():
    assert find_membership({}) is None
    assert find_membership({"SLURM_JOB_ID": "7"}) is None
    assert find_membership({**SLURM, "SLURM_STEP_ID": str(0xFFFFFFFB)}) is None  # a batch script
    assert find_membership({**SLURM, "SLURM_STEP_ID": str(0xFFFFFFFA)}) is None  # a shell
    one_host = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "MASTER_ADDR": ""}
    assert find_membership(one_host).rendezvous.address == "127.0.0.1"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**PLAIN, "MASTER_PORT": ""}, "RANK and WORLD_SIZE are set, MASTER_PORT is not"),
        ({**PLAIN, "RANK": "x"}, "environment variable RANK is 'x', should be a whole number"),
        ({**PLAIN, "RANK": "4"}, "the environment says that this is rank 4 of 4"),
        ({**PLAIN, "MASTER_PORT": "70000"}, "MASTER_PORT is '70000', should be a whole number from 1 to 65535"),
        ({**OPENMPI, "MASTER_ADDR": ""}, "MASTER_ADDR is not set; give it: mpirun -x MASTER_ADDR=HOST"),
    ],
)
def test_what_says_nothing(environ, message):
    with pytest.raises(UserError) as caught:
        find_membership(environ)
    assert message in str(caught.value)


@pytest.mark.ranks("launches")
@pytest.mark.skipif(sys.platform != "linux", reason="ranks run on Linux")
def test_one_rank_joins(mlp_plan, capsys, monkeypatch, tmp_path):
    """With another rank's number, and the restart that its launcher counted."""
    monkeypatch.chdir(tmp_path)
    for name, value in {**PLAIN, "RANK": "1", "WORLD_SIZE": "2", "AUTODDL_RESTART": "3"}.items():
        monkeypatch.setenv(name, value)
    options = ["--without-oneflow", "--checkpoints", "saved", "--log-dir", "logs"]
    assert main(["launch", str(mlp_plan(1, 2)), str(SCRIPT), *options, "--", "recover", "0"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"[rank 1 @{socket.gethostname()}] attempt 3 begins at 0"
    assert Path("logs", "rank1.log").read_text().startswith("attempt 3 begins at 0\n")


# ---- Supervisors --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks("launches")
@pytest.mark.skipif(sys.platform != "linux", reason="ranks run on Linux")
@pytest.mark.parametrize("end", ["silence", "signal", "hanging up"])
def test_a_supervisor_that_is_left_alone_ends_its_ranks(mlp_plan, tmp_path, end):
    """After silence, after a signal, and after the launcher has closed the connection."""
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint('waiting', os.getpid(), flush=True)\ntime.sleep(600)\n")
    timeout_s = 1.0 if end == "silence" else 30.0
    start = f"from autoddl.launching.supervisor import main; main(is_remote=True, host_timeout_s={timeout_s})"
    begin = {"do": "start", "ranks": [1], "local_ranks": [0], "num_ranks": 2, "address": "127.0.0.1", "port": 1}
    begin.update(directory=str(tmp_path), environment={}, stall_timeout_s=5.0, with_oneflow=False)
    script_words = {"script": str(script), "arguments": [], "together": False}
    with subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdin is not None and supervisor.stdout is not None
        for message in (begin, {"do": "load"}, {"do": "run", **script_words}):
            write_line(supervisor.stdin.fileno(), message)
        reader, said = LineReader(), ""
        while not (match := re.search(r"waiting (\d+)\n", said)):
            messages = reader.feed(os.read(supervisor.stdout.fileno(), 1 << 16))
            said += "".join(message["text"] for message in messages if message["kind"] == "output")
        if end == "signal":
            supervisor.terminate()
        elif end == "hanging up":
            supervisor.stdin.close()
        assert supervisor.wait(90) == 1
        wait_until_ended([int(match[1])])
        if end == "silence":
            supervisor.stdin.close()


# ---- What is said -------------------------------------------------------------------------------------------------------


def test_lines_survive_any_cut_and_any_noise():
    read_end, write_end = os.pipe()
    messages = [{"a": "x\ny"}, {"b": ["@autoddl {}", "ü"]}]
    for message in messages:
        write_line(write_end, message)
    os.close(write_end)
    data = b"Welcome!\n" + os.read(read_end, 1000) + b"@autoddl-like, but not\n"
    os.close(read_end)
    for size in range(1, 20):
        reader = LineReader()
        got = [m for i in range(0, len(data), size) for m in reader.feed(data[i : i + size])]
        assert got == messages
        assert reader.noise == ["Welcome!", "@autoddl-like, but not"]


def test_output_is_shown_line_by_line_and_kept_as_it_is(tmp_path):
    shown: list[str] = []
    output = RankOutput(tmp_path / "logs", {0: "h", 1: ""}, shown.append, pytest.fail)
    output.write(0, "one\ntw")
    output.write(1, "10%\r20%\r30%\nno end")
    output.write(0, "o\n\n")
    assert shown == ["[rank 0 @h] one", "[rank 1] 30%", "[rank 0 @h] two", "[rank 0 @h]"]
    output.finish()
    assert shown[-1] == "[rank 1] no end"
    assert (tmp_path / "logs" / "rank0.log").read_text() == "one\ntwo\n\n"
    assert (tmp_path / "logs" / "rank1.log").read_bytes() == b"10%\r20%\r30%\nno end"


@pytest.mark.fault(
    "launch",
    "two launches with the same --log-dir at the same time",
    "one warning of the second names the file; its ranks' output is shown but not kept, and both jobs go on",
)
def test_files_that_another_job_writes_are_left_to_it(tmp_path):
    shown: list[str] = []
    warnings: list[str] = []
    first = RankOutput(tmp_path, {0: ""}, shown.append, pytest.fail)
    second = RankOutput(tmp_path, {0: ""}, shown.append, warnings.append)
    first.write(0, "one\n")
    second.write(0, "two\n")
    second.write(0, "two\n")
    assert shown == ["[rank 0] one", "[rank 0] two", "[rank 0] two"]
    reason = "another job is writing it"
    assert warnings == [
        f"{tmp_path}/rank0.log cannot be written ({reason}): the ranks' output is shown, but no longer kept in files"
    ]
    assert second.path(0) is None
    first.finish()
    assert (tmp_path / "rank0.log").read_text() == "one\n"
    third = RankOutput(tmp_path, {0: ""}, shown.append, pytest.fail)
    third.write(0, "three\n")
    third.finish()
    assert (tmp_path / "rank0.log").read_text() == "one\nthree\n"


def test_sending_never_waits_for_the_reader():
    """What a full pipe does not take waits, in order; signs of life only where nothing else does."""
    read_end, write_end = os.pipe()
    sender, reader = LineSender(write_end), LineReader()
    sender.beat()
    for number in range(40):
        sender.send({"number": number, "text": "x" * 10_000})
    sender.beat()
    assert sender.num_waiting > 0 and not sender.flush()
    got: list[Message] = []
    while len(got) < 41:
        got += reader.feed(os.read(read_end, 1 << 16))
        sender.flush()
    assert got[0]["kind"] == "alive" and [message["number"] for message in got[1:]] == list(range(40))
    assert sender.num_waiting == 0
    os.close(read_end)
    with pytest.raises(BrokenPipeError):
        sender.beat()
    os.close(write_end)


@pytest.mark.skipif(sys.platform != "linux", reason="ranks run on Linux")
def test_output_that_nobody_reads_is_bounded(monkeypatch):
    monkeypatch.setattr(supervisor, "_MAX_UNREAD_BYTES", 1000)
    log = supervisor._LogTail()
    log.path.write_text("a" * 500 + "b" * 1000)
    assert log.read(False) == "\n[autoddl: 500 bytes of output are omitted: they were not read in time]\n" + "b" * 1000
    assert log.read(True) == ""
