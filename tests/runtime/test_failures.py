"""What is read out of logs and deaths. The texts are OneFlow's own, shortened."""

from __future__ import annotations

import signal

import pytest

from autoddl.pipelines.runtime.ranks.failures import (
    FailureKind,
    RankFailure,
    last_position,
    positions_text,
    waited_too_long,
)

TRANSFER_TIMEOUT = """terminate called after throwing an instance of 'oneflow::RuntimeException'
  what():  \x1b[1m\x1b[38;2;255;000;000mError\x1b[0m: Check failed: cond_.wait_for(lck, seconds, [this]() { return cnt_val_ == 0; })
You can set ONEFLOW_DEBUG or ONEFLOW_PYTHON_STACK_GETTER to 1 to get the Python stack of the error.
Fatal Python error: Aborted

Thread 0x00007f276dfb2b80 (most recent call first):
  File "/x/lib/python3.10/site-packages/oneflow/framework/tensor.py", line 450 in _numpy
  File "/x/train.py", line 22 in step
  File "/x/train.py", line 40 in <module>
"""
BARRIER_TIMEOUT = (
    "Exception: blocking instructions\nGlobalSync:s_barrier ptr: 0x560db8a27f80 dispatched:0 launched:0 done:0\n"
)
LOST_CONNECTION = """F20261120 12:48:35.466825  7191 rpc_client.cpp:40] Check failed: stub->CallMethod<ctrl_method>(...) (14 vs. 0)
*** Check failure stack trace: ***
    @     0x7fc3cd3d09ca  google::LogMessage::Fail()
Fatal Python error: Aborted
"""


@pytest.mark.parametrize(
    ("text", "expected"), [(TRANSFER_TIMEOUT, True), (BARRIER_TIMEOUT, True), (LOST_CONNECTION, False)]
)
def test_timeouts_in_communication_are_recognised(text, expected):
    assert waited_too_long(text) is expected


@pytest.mark.parametrize(
    ("number", "code", "log", "kind", "words"),
    [
        (signal.SIGKILL, 0, "", FailureKind.KILLED, "was killed by SIGKILL, perhaps for lack of memory"),
        (signal.SIGTERM, 0, "", FailureKind.KILLED, "was killed by SIGTERM"),
        (signal.SIGRTMIN + 1, 0, "", FailureKind.KILLED, f"was killed by signal {signal.SIGRTMIN + 1}"),
        (signal.SIGABRT, 0, TRANSFER_TIMEOUT, FailureKind.WAITED, "waited too long for another rank in communication"),
        (signal.SIGSEGV, 0, "nothing to see\n", FailureKind.CRASHED, "crashed with SIGSEGV"),
        (0, 7, "", FailureKind.EXITED, "exited with code 7 before it had finished"),
        (0, 1, "x\nImportError: y\n", FailureKind.EXITED, "exited with code 1 before it had finished: ImportError: y"),
    ],
)
def test_deaths(number, code, log, kind, words):
    assert RankFailure.of_death(2, number, code, log) == RankFailure(2, kind, words)


def test_a_rank_that_was_cut_off_says_where_it_stood():
    """It is the other one, which waited in vain and left, that tells what happened; but this one stood where it was awaited."""
    stack = 'Thread 0x01 (most recent call first):\n  File "/x/net.py", line 9 in forward\n'
    cut_off = RankFailure.of_death(1, signal.SIGABRT, 0, LOST_CONNECTION + stack)
    waited = RankFailure.of_death(0, signal.SIGABRT, 0, TRANSFER_TIMEOUT)
    assert min(cut_off, waited, key=lambda failure: failure.kind) is waited
    text = positions_text({2: "/x/net.py:4 in backward"}, [waited, cut_off])
    assert text == "; rank 1 is at /x/net.py:9 in forward; rank 2 is at /x/net.py:4 in backward"


def test_the_cause_of_a_crash_is_found_above_the_stacks():
    failure = RankFailure.of_death(0, signal.SIGABRT, 0, LOST_CONNECTION)
    assert failure.kind is FailureKind.CUT_OFF
    assert "rpc_client.cpp:40] Check failed" in failure.text
    assert "\n" not in failure.text
    said = "terminate called after throwing an instance of 'std::out_of_range'\n  what():  map::at\nFatal Python error: Aborted\n"
    stack = 'Thread 0x01 (most recent call first):\n  File "/x/train.py", line 9 in step\n'
    failure = RankFailure.of_death(0, signal.SIGABRT, 0, said + stack)
    assert failure.text == "crashed with SIGABRT at /x/train.py:9 in step: what():  map::at"


def test_exceptions():
    assert RankFailure.of_exception(1, "ValueError", "a\nb", False).text == "raised ValueError: a"
    assert RankFailure.of_exception(1, "AssertionError", "", False).text == "raised AssertionError"
    assert RankFailure.of_exception(1, "RuntimeError", BARRIER_TIMEOUT, False).kind is FailureKind.WAITED
    refused = RankFailure.of_exception(1, "PlanError", "batch 3", True)
    assert (refused.text, refused.is_user_error) == ("refused: batch 3", True)


def test_where_a_rank_stands():
    assert last_position(TRANSFER_TIMEOUT) == "/x/train.py:22 in step"
    in_threads = (
        'Thread 0x01 (most recent call first):\n  File "/x/watch.py", line 1 in wait\n\n'
        'Current thread 0x02 (most recent call first):\n  File "/x/lib/python3.10/threading.py", line 5 in join\n'
        '  File "/x/main.py", line 3 in main\n  File "<string>", line 1 in <module>\n'
    )
    assert last_position(in_threads) == "/x/main.py:3 in main"  # the main thread comes last
    assert last_position("") == ""
    assert last_position('Thread 0x01 (most recent call first):\n  File "<string>", line 1 in <module>\n') == ""
