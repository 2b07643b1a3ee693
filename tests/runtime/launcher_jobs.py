"""What the ranks do in test_launcher.py. None of these needs OneFlow but those that say so."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

from autoddl.costmodel.devices import CPU
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.ranks.rank import report

RANK, NUM_RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Apart:
    """Defined where the launcher cannot import it."""


def square(value):
    return RANK, value * value


def environment(names):
    return {name: os.environ.get(name) for name in names}


def count(num_reports):
    for i in range(num_reports):
        report((RANK, i))
    return num_reports


def count_for_ever():
    while True:
        report(RANK)
        time.sleep(0.001)


def talk(text):
    sys.stdout.write(f"{text} from {RANK}\n")


def do_on(rank, action):
    """``rank`` gets into trouble; the others wait for a long time."""
    if rank == RANK:
        trouble(action)
    time.sleep(600)


def do_while_others_communicate(rank, action):
    """As `do_on`, but the others wait in an all-reduce. Needs OneFlow."""
    import oneflow as flow

    from autoddl.pipelines.runtime.comm.collectives import all_reduce
    from autoddl.pipelines.runtime.comm.mesh import RankAxis

    axis = RankAxis(NUM_RANKS, 1, NUM_RANKS)
    assert all_reduce(flow.ones(4), axis).numpy().tolist() == [NUM_RANKS] * 4
    if rank == RANK:
        trouble(action)
    return all_reduce(flow.ones(4), axis).numpy()


def do_while_others_wait(rank, action, wait):
    """``rank`` gets into trouble; the others wait for it from the first: in an all-reduce or in a barrier. Needs OneFlow."""
    import oneflow as flow

    from autoddl.pipelines.runtime.comm.collectives import all_reduce
    from autoddl.pipelines.runtime.comm.mesh import RankAxis
    from autoddl.pipelines.runtime.ranks.wire import synchronize

    if rank == RANK:
        trouble(action)
    if wait == "barrier":
        synchronize()
    else:
        all_reduce(flow.ones(4), RankAxis(NUM_RANKS, 1, NUM_RANKS)).numpy()


def wait_for_the_wrong_rank():
    """Everybody receives from everybody's next and nobody sends. Needs OneFlow."""
    import oneflow as flow

    from autoddl.pipelines.runtime.comm.collectives import receive

    return receive((4,), flow.float32, (RANK + 1) % NUM_RANKS, CPU).numpy()


def let_connections_break():
    """From now on the others' ends of our connections break as soon as we have gone, as when a host is lost."""
    at_once = struct.pack("ii", 1, 0)
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the folder's own
            if os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)


def trouble(action):
    if action == "raise":
        raise ValueError("17 is not even\nand more on a second line")
    if action == "refuse":
        raise UserError("batch 17 is odd; take an even one")
    if action == "interrupt":
        raise KeyboardInterrupt
    if action == "exit":
        sys.exit(3)
    if action == "leave":
        os._exit(4)
    if action == "abort":
        os.abort()
    if action == "unpicklable":
        raise_with_file()
    if action == "sleep":
        time.sleep(600)
    os.kill(os.getpid(), getattr(signal, action))


def raise_with_file():
    error = OSError("cannot be pickled")
    error.file = sys.stderr
    raise error


def return_unpicklable():
    return sys.stderr


def return_from_afar():
    return Apart()


def start_children():
    """Two processes of our own that outlive us unless somebody ends them: one in our process group, and one that left it, our
    session, and the tree below us."""
    command = ["sleep", "600"]
    code = f"import subprocess; print(subprocess.Popen({command}, start_new_session=True, stdout=-3, stderr=-3).pid)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return [subprocess.Popen(command).pid, int(done.stdout)]


def large(num_bytes):
    return bytes(num_bytes)


def oneflow_world():
    """Needs OneFlow."""
    import oneflow as flow

    return flow.env.get_rank(), flow.env.get_world_size()
