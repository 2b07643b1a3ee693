"""The workload of a training step: batch, micro-batch, precision, optimizer, recomputation.

Bytes per trained element (parameter + gradient + optimizer states):

=========  =================  ========  ================  ======
precision  parameter          gradient  master copy       states
=========  =================  ========  ================  ======
float32    4                  4         -                 sgd 0, momentum 4, adam 8
mixed      2                  2         4                 sgd 0, momentum 4, adam 8
=========  =================  ========  ================  ======

So Adam needs 16 bytes per parameter in either precision.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .documents import Fields
from .errors import UserError
from .limits import MAX_BATCH
from .nearest import divisors, nearest_that_work

__all__ = ["OPTIMIZERS", "PRECISIONS", "Workload"]

#: Bytes of one activation, parameter or gradient element.
PRECISIONS = {"float32": 4, "mixed": 2}
#: Bytes of optimizer states per trained element.
OPTIMIZERS = {"sgd": 0, "momentum": 4, "adam": 8}


@dataclass(frozen=True)
class Workload:
    """The workload of one training step.

    Attributes:
        batch: samples per step, over all devices.
        micro_batch: samples per forward and backward pass, over all devices; gradients accumulate over
            ``batch / micro_batch`` passes.
        precision: ``float32`` or ``mixed``.
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
        if self.precision not in PRECISIONS:
            raise UserError(f"precision {self.precision!r} is not one of {', '.join(PRECISIONS)}")
        if self.optimizer not in OPTIMIZERS:
            raise UserError(f"optimizer {self.optimizer!r} is not one of {', '.join(OPTIMIZERS)}")

    @property
    def num_micro_batches(self) -> int:
        """Number of forward and backward passes per training step."""
        return self.batch // self.micro_batch

    @property
    def itemsize(self) -> int:
        """Bytes of one activation or gradient element."""
        return PRECISIONS[self.precision]

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes per trained element: parameter, gradient and optimizer states (table: module docstring)."""
        master = 4 if self.precision == "mixed" else 0
        return 2 * self.itemsize + master + OPTIMIZERS[self.optimizer]

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
