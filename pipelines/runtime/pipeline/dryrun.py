"""A dry run of programs, without data: checks that they end, and that every computation has its inputs.

In the dry run a message blocks both of its ranks until both have reached it. A reduction, and a computation in which ranks
communicate, block all of their ranks. This is stricter than any real execution: programs that pass the dry run neither deadlock nor
compute with missing inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autoddl.costmodel.errors import UserError

from ...schedule import Kind, Task
from .actions import Action, Agree, Receive, Reduce, Rest, Run, Send, Update
from .holding import Holding

__all__ = ["ProgramError", "check_programs"]


class ProgramError(UserError):
    """Programs that ranks cannot execute."""


def check_programs(holding: Holding, programs: Sequence[Sequence[Action]], compress: bool = False) -> None:
    """Run all programs to their ends, without data.

    Args:
        holding: The schedule, and the blocks that its ranks hold.
        programs: For each rank its actions.
        compress: Whether a message is complete only after its second part.

    Raises:
        ProgramError: the programs deadlock, or an action comes before its inputs. The message names the rank and the action.
    """
    runs = [_DryRun(holding, rank, program, compress) for rank, program in enumerate(programs)]
    # Ranks that may be able to proceed.
    ready = list(range(len(runs)))
    while ready:
        rank = ready.pop()
        runs[rank].advance()
        head = runs[rank].head
        if head is None:
            continue
        participants = _participants(head)
        if all(_is_same_communication(runs[other].head, head) for other in participants):
            for other in participants:
                runs[other].complete()
            ready += participants
    for run in runs:
        if run.head is not None:
            missing = [
                other for other in _participants(run.head) if not _is_same_communication(runs[other].head, run.head)
            ]
            raise ProgramError(
                f"schedule {holding.schedule.name}: rank {run.rank} waits in '{run.head}' for rank {missing[0]}, "
                f"which is at '{runs[missing[0]].head or 'its end'}'"
            )


def _participants(action: Action) -> list[int]:
    """Return the ranks that take part in a communication."""
    if isinstance(action, (Reduce, Agree, Run)):
        return list(action.ranks)
    assert isinstance(action, (Send, Receive, Rest))
    return [action.message.source, action.message.destination]


def _is_same_communication(head: Action | None, action: Action) -> bool:
    """Whether a rank whose next communication is ``head`` has reached the communication ``action`` of another rank."""
    if isinstance(action, (Reduce, Agree, Rest, Run)):
        return head == action
    assert isinstance(action, (Send, Receive))
    return isinstance(head, (Send, Receive)) and head.message == action.message


class _DryRun:
    """The dry run of one rank: its position in its program, the inputs that it has received, and the sums that are missing."""

    def __init__(self, holding: Holding, rank: int, program: Sequence[Action], compress: bool) -> None:
        self.rank = rank
        self._holding = holding
        self._schedule = holding.schedule
        self._worker = holding.ranks.worker_of(rank)
        self._program = program
        self._position = 0
        self._last_part: type[Rest] | type[Receive] = Rest if compress else Receive
        # Number of elements received of each input (is forward, pipeline, consuming stage, slot).
        self._num_received: Counter[tuple[bool, int, int, int]] = Counter()
        # Number of sums that each (stage, update) still waits for.
        self._num_missing_sums = Counter(
            (stage, action.update) for action in program if isinstance(action, Reduce) for stage in action.stages
        )

        self._agrees = any(isinstance(action, Agree) for action in program)
        # (stage, update) of the decisions; None for all stages.
        self._decided: set[tuple[int | None, int]] = set()

    @property
    def head(self) -> Action | None:
        """The next communication, for which the rank waits; None at the end of the program."""
        return self._program[self._position] if self._position < len(self._program) else None

    def advance(self) -> None:
        """Execute actions up to the next communication."""
        while self._position < len(self._program):
            action = self._program[self._position]
            if isinstance(action, (Send, Receive, Rest, Reduce, Agree)) or (isinstance(action, Run) and action.ranks):
                return
            if isinstance(action, Run):
                self._compute(action)
            elif isinstance(action, Update):
                self._check_update(action)
            self._position += 1

    def _check_update(self, action: Update) -> None:
        """Check that the sums of an update's gradients are complete, and that it is decided whether it is skipped."""
        stage, update = action.task.stage, action.task.micro_batch
        if self._num_missing_sums[stage, update]:
            self._fail(action, "the sum of its gradients (where stages share weights, updates come last)")
        if self._agrees and not {(stage, update), (None, update)} & self._decided:
            self._fail(action, "the decision whether it is skipped (updates come last)")

    def complete(self) -> None:
        """Complete the communication at the head, whose ranks have all reached it."""
        action = self._program[self._position]
        self._position += 1
        if isinstance(action, self._last_part) and action.message.destination == self.rank:
            message = action.message
            task = message.task
            columns = self._holding.columns(task.stage - (task.kind is not Kind.FORWARD))
            num_elements = message.num_rows * (columns if message.columns is None else len(message.columns))
            self._deliver(task, message.first_slot, message.num_slots, num_elements)
        elif isinstance(action, Reduce):
            for stage in action.stages:
                self._num_missing_sums[stage, action.update] -= 1
        elif isinstance(action, Agree):
            self._decided.add((action.stage, action.update))
        elif isinstance(action, Run):
            self._compute(action)

    def _deliver(self, task: Task, first_slot: int, num_slots: int, num_elements: int) -> None:
        """Count elements of a task's output, the same number for each slot, as received by its consumer."""
        is_forward = task.kind is Kind.FORWARD
        consumer_stage = task.stage + (1 if is_forward else -1)
        for slot in range(first_slot, first_slot + num_slots):
            self._num_received[is_forward, task.pipeline, consumer_stage, slot] += num_elements

    def _compute(self, run: Run) -> None:
        """Check that a computation has its input, and deliver its output if the consumer is on the same worker."""
        task = run.task
        if self._schedule.source_of(task) is not None:
            is_forward = task.kind is Kind.FORWARD
            num_needed = self._holding.input_block(self.rank, task).size
            for slot in range(run.first_slot, run.first_slot + run.num_slots):
                if self._num_received.pop((is_forward, task.pipeline, task.stage, slot), 0) != num_needed:
                    self._fail(run, "its input")
        if self._schedule.destination_of(task) == self._worker:
            num_elements = self._holding.output_block(self.rank, task).size
            self._deliver(task, run.first_slot, run.num_slots, num_elements)

    def _fail(self, action: Action, missing: str) -> None:
        raise ProgramError(f"schedule {self._schedule.name}: rank {self.rank} reaches '{action}' without {missing}")
