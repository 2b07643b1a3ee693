"""What the ranks run in the tests of `autoddl launch`: the first argument says what. Only `train` and `sum_ranks` need OneFlow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import autoddl

JOB = autoddl.launched()


def say(*words):
    """Where this rank is and what it was given."""
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "AUTODDL_PLAN", "OMP_NUM_THREADS", "COLOUR")
    print(json.dumps({"words": words, "cwd": os.getcwd(), **{name: os.environ.get(name) for name in names}}))


def wait(*_):
    """For ever, with a child that waits as well."""
    subprocess.Popen(["sleep", "600"])
    print("waiting", os.getpid(), flush=True)
    time.sleep(600)


def fail(rank, how, others="wait"):
    """One rank gets into trouble (``A,B``: of another kind in the second attempt) while the others do something else."""
    if JOB.rank == int(rank):
        print("in trouble", flush=True)
        how = how.split(",")[JOB.restart if "," in how else 0]
        if how == "raise":
            raise ValueError("17 is not even")
        if how == "exit":
            sys.exit(3)
        if how == "refuse":
            from autoddl.costmodel.errors import UserError

            raise UserError("batch 17 is odd; take an even one")
        os.kill(os.getpid(), getattr(signal, how))
    {"wait": wait, "sum_ranks": sum_ranks, "sleep": sleep}[others]()


def recover(num_failures):
    """Do ten steps, a checkpoint after each; the last rank fails after every third one, so often."""
    path = JOB.checkpoints / f"rank{JOB.rank}"
    path.parent.mkdir(exist_ok=True)
    first = int(path.read_text()) if path.exists() else 0
    print(f"attempt {JOB.restart} begins at {first}")
    for step in range(first + 1, 11):
        path.write_text(str(step))
        if JOB.rank == JOB.num_ranks - 1 and step % 3 == 0 and JOB.restart < int(num_failures):
            raise RuntimeError(f"lost at step {step}")
    print("done")


def escape(rank="-1", how=""):
    """One rank gets into trouble, or all are done (``success``), while all have children that escaped."""
    for child in start_children():
        print("child", child)
    try:
        print("waiting", os.getpid(), flush=True)  # whoever reads this may send SIGINT at once, before print returns
        if how != "success":
            fail(rank, how, others="sleep")
    except KeyboardInterrupt:
        save()


def start_children():
    """Children that leave this process's group, its tree, or both, and keep nothing of its environment."""
    ways = ("", "setsid", "fork", "setsid fork", "fork setsid", "setsid fork setsid fork")
    return [_start_child(each.split()) for each in ways]


def _start_child(ways):
    reader, writer = os.pipe()
    if os.fork() == 0:
        for way in ways:
            if way == "setsid":
                os.setsid()
            elif os.fork() > 0:
                os._exit(0)
        os.write(writer, str(os.getpid()).encode())
        os.execve("/bin/sleep", ["sleep", "600"], {})
    pid = int(os.read(reader, 100))
    os.close(reader)
    os.close(writer)
    return pid


def sleep():
    """Ends on SIGINT, having written something down."""
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        save()


def save():
    Path(f"saved{JOB.rank}").write_text("saved")
    print("saved", flush=True)


def misfortunes(*faults):
    """The last rank meets with another fault in each attempt, while all have children that escaped, until there is none left.

    ``keeper`` and ``supervisor`` are the processes above it. Before that each rank writes down its supervisor, itself, its keeper
    and its children.
    """
    keeper = os.getppid()
    supervisor = int(Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[1])
    JOB.checkpoints.mkdir(exist_ok=True)
    files = [JOB.checkpoints / f"attempt{JOB.restart}-rank{rank}" for rank in range(JOB.num_ranks)]
    own = files[JOB.rank].with_suffix(".new")
    own.write_text(" ".join(map(str, (supervisor, os.getpid(), keeper, *start_children()))))
    own.rename(files[JOB.rank])
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    fault = (*faults, "success")[JOB.restart]
    if fault == "success":
        return
    last = JOB.num_ranks - 1
    whose, _, how = fault.rpartition("-")
    if JOB.rank == last and whose:
        os.kill({"keeper": keeper, "supervisor": supervisor}[whose], getattr(signal, how))
        sleep()
    fail(last, how, others="sleep")


def chatter():
    """Says more than anybody reads."""
    print("waiting", os.getpid(), flush=True)
    for _ in range(1000):
        print("x" * 1000)
    sleep()


def write(num_bytes):
    """That many bytes in lines of 100."""
    for number in range(int(num_bytes) // 100):
        print(f"{number:099}")


def stubborn():
    """Does not end on signals, but says that one came."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: print("not yet", flush=True))
    print("waiting", os.getpid(), flush=True)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        time.sleep(0.1)


def sum_ranks():
    """An all-reduce over all ranks."""
    import oneflow as flow

    value = flow.tensor([float(JOB.rank)])
    flow.comm.all_reduce(value)
    print("sum", value.numpy()[0], flow.__version__)


def train():
    """Steps of the plan's model, from values that the test knows; the losses."""
    import numpy as np
    import oneflow as flow

    from autoddl.pipelines.runtime.models import MLP

    generator = np.random.default_rng(2)
    module = MLP([64, 128, 64])
    for layer, shape in ((module.fc1, (128, 64)), (module.fc2, (64, 128))):
        layer.weight.data.copy_(flow.tensor(0.1 * generator.standard_normal(shape).astype(np.float32)))
    inputs, targets = (generator.standard_normal((32, 64)).astype(np.float32) for _ in range(2))
    trained = autoddl.apply(module, JOB.load_plan())
    optimizer = flow.optim.SGD(trained.parameters(), lr=1.0)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(trained.train_step(flow.tensor(inputs), flow.tensor(targets)))
        optimizer.step()
    print("losses", *(f"{loss:.7f}" for loss in losses))


def train_plan(num_steps):
    """Steps of the plan's built-in model, with a pipeline or without; losses where they are known."""
    from plan_training import run_steps, trainer_of

    plan = JOB.load_plan()
    run_steps(trainer_of(plan, JOB.trainer), plan, int(num_steps))


ACTIONS = (
    say,
    wait,
    fail,
    escape,
    sleep,
    misfortunes,
    chatter,
    write,
    recover,
    stubborn,
    sum_ranks,
    train,
    train_plan,
)
{action.__name__: action for action in ACTIONS}[sys.argv[1]](*sys.argv[2:])
