"""The workload of a training step: batch, micro-batch, precision, optimizer, recomputation.

Bytes per trained element (parameter + gradient + optimizer states):

===============  =========  ========  ===========  ===========================
precision        parameter  gradient  master copy  states
===============  =========  ========  ===========  ===========================
float32          4          4         -            sgd 0, momentum 4, adam 8
mixed, bfloat16  2          2         4            sgd 0, momentum 4, adam 8
*-cpu            4          4         8            sgd 0, momentum 8, adam 16
===============  =========  ========  ===========  ===========================

So Adam needs 16 bytes per parameter in every precision for GPUs.  The types are those of :mod:`autoddl.costmodel.precision`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .documents import Fields
from .errors import UserError
from .limits import MAX_BATCH
from .nearest import divisors, nearest_that_work
from .precision import Precision, precision_of

__all__ = ["OPTIMIZERS", "Workload"]

#: Number of states, of the master type, that each optimizer has per trained element.
OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2}


@dataclass(frozen=True)
class Workload:
    """The workload of one training step.

    Attributes:
        batch: samples per step, over all devices.
        micro_batch: samples per forward and backward pass, over all devices; gradients accumulate over
            ``batch / micro_batch`` passes.
        precision: ``float32``, ``mixed`` or ``bfloat16``; on CPU ranks also their stand-ins.
        optimizer: ``sgd``, ``momentum`` or ``adam``.
        recompute: whether to keep only the evenly split input of every layer, and to repeat its forward pass before its
            backward pass.

    Raises:
        UserError: a value is out of range, or the micro-batch does not divide the batch.

    >>> workload = Workload(batch=512, micro_batch=64, precision="mixed")
    >>> workload.num_micro_batches, workload.itemsize, workload.bytes_per_parameter
    (8, 2, 16)
    """

    batch: int
    micro_batch: int
    precision: str = "float32"
    optimizer: str = "adam"
    recompute: bool = False

    def __post_init__(self) -> None:
        for name, value in (("batch", self.batch), ("micro-batch", self.micro_batch)):
            if value < 1:
                raise UserError(f"{name} {value} should be at least 1")
            if value > MAX_BATCH:
                raise UserError(f"{name} {value} should be at most {MAX_BATCH}")
        if self.batch % self.micro_batch:
            nearest = nearest_that_work("micro-batch", self.micro_batch, divisors(self.batch))
            raise UserError(f"micro-batch {self.micro_batch} does not divide the batch of {self.batch}; {nearest}")
        precision_of(self.precision)
        if self.optimizer not in OPTIMIZERS:
            raise UserError(f"optimizer {self.optimizer!r} is not one of {', '.join(OPTIMIZERS)}")

    @property
    def num_micro_batches(self) -> int:
        """Number of forward and backward passes per training step."""
        return self.batch // self.micro_batch

    @property
    def types(self) -> Precision:
        """The types of the precision."""
        return precision_of(self.precision)

    @property
    def itemsize(self) -> int:
        """Bytes of one activation, weight or gradient element."""
        return self.types.itemsize

    @property
    def optimizer_bytes_per_parameter(self) -> int:
        """Bytes of the optimizer per trained element: its states and, if there is one, the master copy."""
        return (self.types.has_masters + OPTIMIZERS[self.optimizer]) * self.types.master_itemsize

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes per trained element: parameter, gradient, master copy and optimizer states (table: module docstring)."""
        return 2 * self.itemsize + self.optimizer_bytes_per_parameter

    def document(self) -> dict[str, Any]:
        """The workload as a JSON object."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Fields) -> Workload:
        """Read the result of :meth:`document`.

        Raises:
            UserError: a field is missing, unknown or out of range.
        """
        batch, micro_batch = fields.integer("batch", 1), fields.integer("micro_batch", 1)
        precision, optimizer = fields.text("precision"), fields.text("optimizer")
        recompute = fields.boolean("recompute")
        fields.finish()
        try:
            return cls(batch, micro_batch, precision, optimizer, recompute)
        except UserError as error:
            raise UserError(f"{fields.where}: {error}") from None
