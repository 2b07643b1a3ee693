"""What the ranks do in the tests of buckets of gradients and of connections; run by ranks, never collected."""

from __future__ import annotations

import os
import socket
from collections import Counter
from typing import Any

import numpy as np

from autoddl.calib.hosts import exchange
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.applied import AppliedModule
from autoddl.pipelines.runtime.models import initialize
from autoddl.zoo.builtin import BuiltIn
from autoddl.zoo.modules import build_module, make_batch


def sums_of_gradients(
    built_in: BuiltIn, strategies: dict[str, Strategy], samples: int, bucket_bytes: int
) -> dict[str, Any]:
    """Gradients of a step with buckets of a size, and the sums that this rank ran: number and bytes of each collective."""
    workload = Workload(samples, samples, bucket_bytes=bucket_bytes)
    module = AppliedModule(initialize(build_module(built_in), 0), built_in.graph(), strategies, workload)
    with module.stepper.logging() as steps:
        loss = module.train_step(*make_batch(built_in, samples, np.random.default_rng(0)))
    return {
        "loss": loss,
        "gradients": module.logical_gradients(),
        "sent": sum(step.sent_bytes for step in steps),
        "counts": Counter(step.collective.value for step in steps),
        "messages": sum(step.messages for step in steps),
    }


def connections() -> list[int]:
    """The option TCP_NODELAY of each connection to another rank, after all of them have exchanged something."""
    exchange(np.array([1.0]))
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as own:
                if own.family == socket.AF_INET and own.type == socket.SOCK_STREAM:
                    own.getpeername()
                    found.append(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        except OSError:  # the folder's own descriptor, or a socket that listens
            continue
    return found
