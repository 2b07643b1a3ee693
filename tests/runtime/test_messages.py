from __future__ import annotations

import os
import threading

import pytest

from autoddl.pipelines.runtime.ranks.messages import MessageReader, read_message, write_message


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    yield reading, writing
    for fd in (reading, writing):
        os.close(fd)


VALUES = [None, ("done", {"a": [1, 2.5]}), b"", "text", list(range(1000))]


def test_values_come_through_a_pipe(pipe):
    reading, writing = pipe
    for value in VALUES:
        write_message(writing, value)
        assert read_message(reading) == value


def test_a_message_may_be_larger_than_the_pipe(pipe):
    reading, writing = pipe
    value = os.urandom(1_000_000)
    writer = threading.Thread(target=write_message, args=(writing, value))
    writer.start()
    assert read_message(reading) == value
    writer.join()


def test_an_ended_writer_is_noticed():
    reading, writing = os.pipe()
    os.write(writing, b"\x05")  # within a length
    os.close(writing)
    with pytest.raises(EOFError):
        read_message(reading)
    os.close(reading)


@pytest.mark.parametrize("piece_length", [1, 3, 8, 1000, 1 << 20])
def test_an_inbox_puts_pieces_together(pipe, piece_length):
    reading, writing = pipe
    for value in VALUES:
        write_message(writing, value)
    data = os.read(reading, 1 << 16)
    inbox, got = MessageReader(), []
    for start in range(0, len(data), piece_length):
        got += inbox.feed(data[start : start + piece_length])
    assert got == VALUES


def test_what_belongs_to_oneflow_stays_with_its_rank(pipe):
    reading, writing = pipe
    kind = type("Size", (tuple,), {"__module__": "oneflow.framework"})
    with pytest.raises(TypeError, match=r"oneflow\.framework\.Size cannot be sent between processes"):
        write_message(writing, {"shape": kind((1, 2))})
    write_message(writing, "next")  # nothing of the refused message is in the pipe
    assert read_message(reading) == "next"
