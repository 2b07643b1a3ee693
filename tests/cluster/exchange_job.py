"""Ranks of two hosts exchange data in pairs, without and with a handshake in turn.

``autoddl launch PLAN exchange_job.py -- FOLDER BYTES [without] [with]``; the folder has the file ``delays.json``: for each rank,
how long it sleeps before each exchange [s]. Each rank writes when its exchanges began and ended [s], by the machine's clock, which
both hosts share.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import oneflow as flow

import autoddl
from autoddl.costmodel.devices import CPU
from autoddl.pipelines.runtime.comm.collectives import swap
from autoddl.pipelines.runtime.comm.handshake import NO_HANDSHAKE, handshake_of
from autoddl.pipelines.runtime.timing import synchronize


def main() -> None:
    """Exchange with the rank of the same place on the other host."""
    folder, num_bytes = Path(sys.argv[1]), int(sys.argv[2])
    rank, num_ranks = flow.env.get_rank(), flow.env.get_world_size()
    other = (rank + num_ranks // 2) % num_ranks
    known = {"without": NO_HANDSHAKE, "with": handshake_of(autoddl.launched().load_plan().cluster)}
    handshakes = {name: known[name] for name in sys.argv[3:]}
    x = flow.ones(num_bytes // 4)
    for handshake in handshakes.values():  # connects
        swap(x, other, handshake)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in handshakes}
    for delay_s in json.loads((folder / "delays.json").read_text())[rank]:
        for name, handshake in handshakes.items():
            synchronize(CPU)
            flow.comm.barrier()
            time.sleep(delay_s)
            begin = time.monotonic()
            swap(x, other, handshake)
            synchronize(CPU)
            times[name].append((begin, time.monotonic()))
    (folder / f"{rank}.json").write_text(json.dumps(times))


main()
