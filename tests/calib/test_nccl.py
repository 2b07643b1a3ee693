"""nccl-tests' output in the shapes that its versions print."""

from __future__ import annotations

import pytest

from autoddl.calib.measurements import Sample, read_samples
from autoddl.costmodel.errors import UserError

#: Recent: the test is named, ranks have groups, the columns have redop and root.
RECENT = """\
# nccl-tests version 2.17.0 nccl-headers=22704 nccl-library=22704
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 4194304 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid   1887 on   node-a device  0 [0x8d] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   1888 on   node-a device  1 [0x91] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    12.35    0.00    0.00      0    12.10    0.00    0.00      0
node-a:1887:1887 [0] NCCL INFO Launch mode Parallel
       65536         16384     float     sum      -1    15.02    4.36    4.36      0    14.80    4.43    4.43      0
     4194304       1048576     float     sum      -1    57.25   73.26   73.26      0    55.86   75.09   75.09      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 25.9
#
"""

#: Older: no name, no redop or root, "error" for "#wrong"; two nodes of two.
OLDER = """\
# nThread 1 nGpus 4 minBytes 1024 maxBytes 1048576 step: 1024(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
#   Rank  0 Pid  12164 on   left device  0 [0x1a] GeForce RTX 2080 Ti
#   Rank  1 Pid  12164 on   left device  1 [0x1b] GeForce RTX 2080 Ti
#   Rank  2 Pid   9911 on  right device  0 [0x1a] GeForce RTX 2080 Ti
#   Rank  3 Pid   9911 on  right device  1 [0x1b] GeForce RTX 2080 Ti
#
#                                             out-of-place                       in-place
#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)             (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           0             0   float     4.10    0.00    0.00    N/A     4.02    0.00    0.00    N/A
        1024            64   float    50.91    0.02    0.02  0e+00    51.00    0.02    0.02  0e+00
     1048576         65536   float    162.1    6.47    4.85  0e+00    162.0    6.47    4.85  0e+00
"""


def write(tmp_path, name: str, text: str):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_recent_output(tmp_path):
    def sample(nbytes: int, microseconds: float) -> Sample:
        return Sample(
            "all-reduce", "intra-node", 2, nbytes, 0, microseconds * 1e-6, "node-a", job_ranks=2, ranks_per_node=2,
            versions="nccl-tests",
        )  # fmt: skip

    assert read_samples(write(tmp_path, "log", RECENT)) == [
        sample(8, 12.35),
        sample(65536, 15.02),
        sample(4194304, 57.25),
    ]


def test_older_output_is_named_by_its_file(tmp_path):
    samples = read_samples(write(tmp_path, "all_gather-4.txt", OLDER))
    assert [(s.collective, s.level, s.ranks, s.ranks_per_node, s.bytes) for s in samples] == [
        ("all-gather", "inter-node", 4, 2, 1024),
        ("all-gather", "inter-node", 4, 2, 1048576),
    ]
    assert samples[1].seconds == pytest.approx(162.1e-6)


def test_several_tests_in_one_file_with_a_launcher_s_prefixes(tmp_path):
    second = RECENT.replace("all_reduce_perf", "alltoall_perf").replace("node-a device  1", "node-b device  1")
    text = "".join(f"[1,0]<stdout>:{line}\n" for line in (RECENT + second).splitlines())
    samples = read_samples(write(tmp_path, "log", text))
    assert [(s.collective, s.level) for s in samples] == [("all-reduce", "intra-node")] * 3 + [
        ("all-to-all", "inter-node")
    ] * 3
    assert samples[3].ranks_per_node == 1


@pytest.mark.parametrize(
    ("program", "collective"),
    [
        ("all_reduce", "all-reduce"),
        ("all_gather", "all-gather"),
        ("reduce_scatter", "reduce-scatter"),
        ("alltoall", "all-to-all"),
        ("sendrecv", "point-to-point"),
    ],
)
def test_programs(tmp_path, program, collective):
    samples = read_samples(write(tmp_path, "log", RECENT.replace("all_reduce_perf", f"{program}_perf")))
    assert {sample.collective for sample in samples} == {collective}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("# Collective test starting: all_reduce_perf\n", ""), "line 11: the name of the test"),
        (lambda text: text.replace("    57.25 ", "   -57.25 "), "line 15: time is '-57.25'"),
        (lambda text: text[: text.index("57.25") + 5], r"line 15: has 6 values, should have 13; was the file cut off\?"),
        (lambda text: "\n".join(line for line in text.splitlines() if "Rank  1" not in line), "1 ranks are listed before the"),
        (lambda text: text.replace("all_reduce_perf", "broadcast_perf"), "the name of the test is missing"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        read_samples(write(tmp_path, "log", change(RECENT)))
