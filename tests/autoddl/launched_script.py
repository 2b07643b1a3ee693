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
    """One rank gets into trouble while the others wait, or (``sum_ranks``) communicate."""
    if JOB.rank == int(rank):
        print("in trouble", flush=True)
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
    """Do ten steps, a checkpoint after each; rank 1 fails after every third one, so often."""
    path = JOB.checkpoints / f"rank{JOB.rank}"
    path.parent.mkdir(exist_ok=True)
    first = int(path.read_text()) if path.exists() else 0
    print(f"attempt {JOB.restart} begins at {first}")
    for step in range(first + 1, 11):
        path.write_text(str(step))
        if JOB.rank == 1 and step % 3 == 0 and JOB.restart < int(num_failures):
            raise RuntimeError(f"lost at step {step}")
    print("done")


def escape(rank="-1", how=""):
    """Each rank starts children that leave its process group, its tree, or both, and keep nothing of its environment."""
    for ways in (
        (),
        ("setsid",),
        ("fork",),
        ("setsid", "fork"),
        ("fork", "setsid"),
        ("setsid", "fork", "setsid", "fork"),
    ):
        _start_child(ways)
    print("waiting", os.getpid(), flush=True)
    if how == "success":
        return
    fail(rank, how, others="sleep")


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
    print("child", os.read(reader, 100).decode(), flush=True)
    os.close(reader)
    os.close(writer)


def sleep():
    time.sleep(600)


def misfortunes(*faults):
    """Rank 1 meets with another fault in each attempt; `supervisor` is the process that watches over its host."""
    if JOB.rank == 1:
        with open("attempts", "a") as file:
            file.write(str(JOB.restart))
    if JOB.restart == len(faults):
        return
    whose, _, how = faults[JOB.restart].rpartition("-")
    if JOB.rank == 1 and whose:
        keeper = os.getppid()
        supervisor = int(Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill({"keeper": keeper, "supervisor": supervisor}[whose], getattr(signal, how))
        sleep()
    fail(1, how, others="sleep")


def chatter():
    """Says more than anybody reads."""
    print("waiting", os.getpid(), flush=True)
    while True:
        print("x" * 1000)


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


def save():
    """Ends on SIGINT, having written something down."""
    print("waiting", os.getpid(), flush=True)
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        Path(f"saved{JOB.rank}").write_text("saved")
        print("saved", flush=True)


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


def train_plan(num_steps, fails_at="-1"):
    """Steps of the plan's built-in model, with a pipeline or without; a checkpoint after each. Losses where they are known."""
    import numpy as np
    import oneflow as flow

    from autoddl.models.builtin import recognise
    from autoddl.pipelines.runtime.models import initialize
    from autoddl.verification.rank_job import build_module, make_batch

    plan = JOB.load_plan()
    built_in = recognise(plan.graph)
    trainer = JOB.trainer(
        initialize(build_module(built_in), 1),
        lambda weights: flow.optim.Adam(weights, lr=0.01, eps=1e-3),
        lambda number: make_batch(built_in, plan.workload.micro_batch, np.random.default_rng([3, number])),
    )
    if JOB.checkpoints is not None:
        trainer.restore(JOB.checkpoints)
    while trainer.num_updates < int(num_steps):
        if JOB.rank == 1 and JOB.restart == 0 and trainer.num_updates == int(fails_at):
            raise RuntimeError("lost")
        losses = trainer.run().losses
        if losses:
            print(
                "step", trainer.num_updates, f"{sum(losses.values()) / plan.workload.num_micro_batches:.7f}", flush=True
            )
        if JOB.checkpoints is not None:
            trainer.save(JOB.checkpoints)


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
    save,
    sum_ranks,
    train,
    train_plan,
)
{action.__name__: action for action in ACTIONS}[sys.argv[1]](*sys.argv[2:])
