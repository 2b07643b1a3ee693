"""Short turns for the threads of ranks that share cores.

A thread of OneFlow that waits for another rank asks for news again and again, and yields its core after each time. That costs
little where the thread that has something to do gets the core next. By default, though, Linux gives every thread a turn of a
millisecond or more: a task of a pipeline passes through several threads at either end, and each of them queues behind others'
turns. With turns of a tenth of a millisecond a thread that wakes up runs almost at once.

Pipelines of tiny perceptrons on 2 cores, milliseconds a step (medians of 2 or 3 stretches, one kind after the other in one job):

==================  =============  ===========
schedule            usual turns    short ones
==================  =============  ===========
wpipe, 2 ranks             37             8
wpipe, 4 ranks            167            50
1f1b, 4 ranks             113            38
chimera, 8 ranks          420           150
==================  =============  ===========

Where a step is long computations (3.7 s, of a GPT with 384 features) there is no difference beyond noise.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

__all__ = ["TURN_NS", "take_short_turns"]

#: The shortest that Linux gives.
TURN_NS = 100_000
#: The number of the system call sched_setattr, for which there is no function.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
#: struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period, least and most utilisation.
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")


def take_short_turns() -> bool:
    """Have this thread, and all that it starts from now on, take turns of `TURN_NS`; False where the system refuses.

    The length is what ``runtime`` says of threads that are scheduled as usual, from Linux 6.12 on; before it had no effect.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if not sys.platform.startswith("linux") or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, TURN_NS, 0, 0, 0, 0)
    return ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0
