"""A dry run of programs without data: checks that they end, and that every computation has its inputs.

Every message blocks both its ends, and every reduction and every computation in which ranks communicate blocks all its ranks.
This is stricter than any real execution: a program that passes neither deadlocks nor computes with missing inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autoddl.costmodel.errors import UserError

from ...schedule import Kind, Task
from .actions import Action, Receive, Reduce, Rest, Run, Send, Update
from .holding import Holding

__all__ = ["ProgramError", "check_programs"]


class ProgramError(UserError):
    """Programs that ranks cannot execute."""


def check_programs(holding: Holding, programs: Sequence[Sequence[Action]], compress: bool = False) -> None:
    """Run all programs to their ends.

    Args:
        holding: the schedule, and what its ranks hold.
        programs: of all ranks.
        compress: whether messages are complete only with their second parts.

    Raises:
        ProgramError: the programs deadlock, or an action comes before its inputs; names the rank and the action.
    """
    checks = [_Rank(holding, rank, program, compress) for rank, program in enumerate(programs)]
    waiting = list(range(len(checks)))
    while waiting:
        rank = waiting.pop()
        checks[rank].advance()
        head = checks[rank].head
        if head is None:
            continue
        ends = _ends(head)
        if all(_meets(checks[other].head, head) for other in ends):
            for other in ends:
                checks[other].complete()
            waiting += ends
    for check in checks:
        if check.head is not None:
            others = [other for other in _ends(check.head) if not _meets(checks[other].head, check.head)]
            raise ProgramError(
                f"schedule {holding.schedule.name}: rank {check.rank} waits in '{check.head}' for rank {others[0]}, which is at "
                f"'{checks[others[0]].head or 'its end'}'"
            )


def _ends(action: Action) -> list[int]:
    """The ranks that take part in a communication."""
    if isinstance(action, (Reduce, Run)):
        return list(action.ranks)
    assert isinstance(action, (Send, Receive, Rest))
    return [action.message.source, action.message.destination]


def _meets(there: Action | None, action: Action) -> bool:
    """Whether another rank has reached the same communication."""
    if isinstance(action, (Reduce, Rest, Run)):
        return there == action
    assert isinstance(action, (Send, Receive))
    return isinstance(there, (Send, Receive)) and there.message == action.message


class _Rank:
    """The position of one rank in its program, and what it has received."""

    def __init__(self, holding: Holding, rank: int, program: Sequence[Action], compress: bool) -> None:
        self.rank = rank
        self._holding = holding
        self._schedule = holding.schedule
        self._worker = holding.ranks.worker_of(rank)
        self._program = program
        self._position = 0
        self._last_part: type[Rest] | type[Receive] = Rest if compress else Receive
        # Received elements of the matrix of (is forward, pipeline, consuming stage, slot).
        self._arrived: Counter[tuple[bool, int, int, int]] = Counter()
        self._sums_to_come = Counter(
            (stage, action.update) for action in program if isinstance(action, Reduce) for stage in action.stages
        )

    @property
    def head(self) -> Action | None:
        """The communication that the rank waits for; None at the end."""
        return self._program[self._position] if self._position < len(self._program) else None

    def advance(self) -> None:
        """Run to the next communication."""
        while self._position < len(self._program):
            action = self._program[self._position]
            if isinstance(action, (Send, Receive, Rest, Reduce)) or (isinstance(action, Run) and action.ranks):
                return
            if isinstance(action, Run):
                self._compute(action)
            elif isinstance(action, Update) and self._sums_to_come[action.task.stage, action.task.micro_batch]:
                self._fail(action, "the sum of its gradients (where stages share weights, updates come last)")
            self._position += 1

    def complete(self) -> None:
        """Complete the communication at the head."""
        action = self._program[self._position]
        self._position += 1
        if isinstance(action, self._last_part) and action.message.destination == self.rank:
            message = action.message
            task = message.task
            columns = self._holding.columns(task.stage - (task.kind is not Kind.FORWARD))
            size = message.num_rows * (columns if message.columns is None else len(message.columns))
            self._deliver(task, message.first_slot, message.num_slots, size)
        elif isinstance(action, Reduce):
            for stage in action.stages:
                self._sums_to_come[stage, action.update] -= 1
        elif isinstance(action, Run):
            self._compute(action)

    def _deliver(self, task: Task, first_slot: int, num_slots: int, size: int) -> None:
        """Add ``size`` elements to every slot of a task's output at its consumer."""
        is_forward = task.kind is Kind.FORWARD
        consumer = task.stage + (1 if is_forward else -1)
        for slot in range(first_slot, first_slot + num_slots):
            self._arrived[is_forward, task.pipeline, consumer, slot] += size

    def _compute(self, run: Run) -> None:
        task = run.task
        if self._schedule.source_of(task) is not None:
            is_forward, needed = task.kind is Kind.FORWARD, self._holding.taken(self.rank, task).size
            for slot in range(run.first_slot, run.first_slot + run.num_slots):
                if self._arrived.pop((is_forward, task.pipeline, task.stage, slot), 0) != needed:
                    self._fail(run, "its input")
        if self._schedule.destination_of(task) == self._worker:
            self._deliver(task, run.first_slot, run.num_slots, self._holding.given(self.rank, task).size)

    def _fail(self, action: Action, what: str) -> None:
        raise ProgramError(f"schedule {self._schedule.name}: rank {self.rank} reaches '{action}' without {what}")
