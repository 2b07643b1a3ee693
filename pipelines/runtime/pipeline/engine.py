"""The engine: executes the program of one rank. The same loop executes every schedule."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from ...schedule import Kind, Task
from ..load import load_oneflow
from .actions import Agree, Drop, Message, Program, Receive, Reduce, Rest, Run, Send, Update
from .inbox import Inbox, part_of_each_slot
from .report import RankReport
from .transport import Transport
from .waiting import wait_for
from .work import Work

flow: Any = load_oneflow()

__all__ = ["execute"]

Tensor = Any


def execute(program: Program, work: Work, transport: Transport) -> RankReport:
    """Execute the program of this rank. All ranks of the job must call this function, because it begins with a barrier.

    Args:
        program: Program of this rank.
        work: Computations of this rank.
        transport: A new transport, whose counters start at 0.

    Returns:
        Start and end time of each task, the losses, and the counters of the run.
    """
    engine = _Engine(program, work, transport)
    work.begin()
    flow.comm.barrier()
    engine.run()
    return engine.report()


class _Engine:
    """The state of one rank while it executes its program: received tensors, outputs to send, pending gradient sums, times."""

    def __init__(self, program: Program, work: Work, transport: Transport) -> None:
        self._program = program
        self._work = work
        self._transport = transport
        self._inbox = Inbox()
        # Outputs of tasks that are sent to another worker, until the last message of the task has been sent.
        self._outputs: dict[Task, Tensor] = {}
        self._sends_left = Counter(action.message.task for action in program.actions if isinstance(action, Send))
        # For each (stage, update), the sums that the update waits for: (action, pending sum, time of issue in seconds).
        self._pending_sums: dict[tuple[int, int], list[tuple[Reduce, Tensor, float]]] = {}
        # Start and end time of each task, in seconds.
        self._spans: dict[Task, tuple[float, float]] = {}

    def run(self) -> None:
        for action in self._program.actions:
            if isinstance(action, Run):
                self._compute(action)
            elif isinstance(action, Send):
                self._send(action.message)
            elif isinstance(action, Receive):
                self._receive(action.message)
            elif isinstance(action, Rest):
                self._store(action.message, self._transport.rest(action.message))
            elif isinstance(action, Reduce):
                self._reduce(action)
            elif isinstance(action, Agree):
                self._agree(action)
            elif isinstance(action, Update):
                self._update(action)
            else:
                assert isinstance(action, Drop), action
                self._work.drop(action)
        flow._oneflow_internal.eager.Sync()  # wait for the last sends

    def report(self) -> RankReport:
        return RankReport(
            rank=self._program.rank,
            spans={str(task): span for task, span in self._spans.items()},
            losses=dict(self._work.losses),
            peak_activations=self._work.peak_activations,
            peak_versions=self._work.peak_versions,
            bytes_sent=self._transport.bytes_sent,
            bytes_saved=self._transport.bytes_saved,
            num_uncompressed=self._transport.num_uncompressed,
            bytes_reduced=self._transport.bytes_reduced,
        )

    # ---- Actions -----------------------------------------------------------------------------------------------------

    def _compute(self, run: Run) -> None:
        task = run.task
        x = None
        if self._program.frame.source_of(task) is not None:
            x = self._inbox.take((task.kind is Kind.FORWARD, task.pipeline, task.stage), run.first_slot, run.num_slots)
            wait_for(x)
        if run.ranks:
            flow._oneflow_internal.eager.Sync()  # finish all communication that was issued before
        start = time.monotonic()
        y = self._work.compute(run, x)
        if run.ranks:
            flow._oneflow_internal.eager.Sync()
        self._spans[task] = (start, time.monotonic())
        destination = self._program.frame.destination_of(task)
        if destination is None:
            return
        assert y is not None
        if destination == self._program.worker:
            rows, columns = self._program.output_block(task)
            self._inbox.put(_consumer_key(task), run.first_slot, run.num_slots, rows.start, columns.start, y)
        else:
            self._outputs[task] = y

    def _send(self, message: Message) -> None:
        task = message.task
        self._sends_left[task] -= 1
        y = self._outputs[task] if self._sends_left[task] else self._outputs.pop(task)
        # Rows and columns of the message, counted from the first row and column of this rank's block.
        block = self._program.output_block(task)
        first_row = message.first_row - block.rows.start
        rows = range(first_row, first_row + message.num_rows)
        columns = message.columns
        if columns is not None:
            columns = range(columns.start - block.columns.start, columns.stop - block.columns.start)
        self._transport.send(message, part_of_each_slot(y, message.num_slots, rows, columns))

    def _receive(self, message: Message) -> None:
        is_forward = message.task.kind is Kind.FORWARD
        boundary = self._work.boundaries[message.task.stage - (not is_forward)]
        row_shape = boundary.row_shape
        if message.columns is not None:
            row_shape = (*row_shape[:-1], len(message.columns))
        shape = (message.num_slots * message.num_rows, *row_shape)
        self._store(message, self._transport.receive(message, shape, boundary.dtype))

    def _store(self, message: Message, x: Tensor | None) -> None:
        """Put a received tensor into the inbox; None if its second part is still missing, or if this rank is the sender."""
        if x is not None:
            first_column = 0 if message.columns is None else message.columns.start
            slots = (message.first_slot, message.num_slots)
            self._inbox.put(_consumer_key(message.task), *slots, message.first_row, first_column, x)

    def _reduce(self, action: Reduce) -> None:
        issued = time.monotonic()
        total = self._work.total(action, self._transport)
        if total is None:
            return  # the stages have no weights, which is the same on all ranks
        pending = (action, total, issued)
        for stage in action.stages:
            self._pending_sums.setdefault((stage, action.update), []).append(pending)

    def _agree(self, action: Agree) -> None:
        stages = {stage for _, stage in self._program.frame.stages_on(self._program.worker)}
        for stage in stages if action.stage is None else {action.stage}:
            self._finish_sums(stage, action.update)
        self._work.agree(action, self._transport)

    def _finish_sums(self, stage: int, update: int) -> None:
        """Wait for the sums of a stage's gradients, and set them."""
        for reduction, total, issued in self._pending_sums.pop((stage, update), ()):
            arrived = wait_for(total)
            if len(reduction.stages) == 1:
                for pipeline, held in self._program.frame.stages_on(self._program.worker):
                    if held == stage:
                        self._spans[Task(Kind.ALL_REDUCE, pipeline, stage, update)] = (issued, arrived)
            self._work.set_gradient(stage, reduction, total)

    def _update(self, action: Update) -> None:
        task = action.task
        self._finish_sums(task.stage, task.micro_batch)
        start = time.monotonic()
        self._work.update(action)
        self._spans[task] = (start, time.monotonic())


def _consumer_key(task: Task) -> tuple[bool, int, int]:
    """Return the inbox key of the task that consumes this task's output."""
    is_forward = task.kind is Kind.FORWARD
    return is_forward, task.pipeline, task.stage + (1 if is_forward else -1)
