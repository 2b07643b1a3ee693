"""The workload of a training step: batch, micro-batch, precision, optimizer, and what is kept from pass to pass.

Bytes per trained element (parameter + gradient + optimizer states):

===============  =========  ========  ===========  ===========================
precision        parameter  gradient  master copy  states
===============  =========  ========  ===========  ===========================
float32          4          4         -            sgd 0, momentum 4, adam 8
half precision   2          2         4            sgd 0, momentum 4, adam 8
*-cpu            4          4         8            sgd 0, momentum 8, adam 16
===============  =========  ========  ===========  ===========================

So Adam needs 16 bytes per parameter in every precision for GPUs.  The types are those of :mod:`autoddl.costmodel.precision`; half
precision is mixed, bfloat16 or fp8.  With ``gradients="master"`` a gradient has the bytes of the master type (Megatron-LM: 18 bytes
per parameter).  With ``zero`` of 1 to 3 the states, the gradients and the parameters are divided among the p0 devices that hold
the parameter (:mod:`.layerwork`).

**Optimizer step.**  It reads the gradient, reads and writes the master copy and the states, and writes the parameter.  With Adam in
half precision, these are 2 + 2 (4 + 8) + 2 = 28 bytes per parameter.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np

from .documents import Fields
from .errors import UserError
from .limits import MAX_BATCH, MAX_BYTES
from .nearest import divisors, nearest_that_work
from .overlap import NUM_BUCKETS, OVERLAPS
from .precision import Precision, precision_of
from .recomputation import check_recomputation

__all__ = [
    "ACTIVATIONS",
    "ATTENTIONS",
    "GRADIENTS",
    "OPTIMIZERS",
    "Workload",
]

#: Number of states, of the master type, that each optimizer has per trained element.
OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2}

#: How attention is computed.  ``fused`` kernels compute the scores piece by piece, skip those that a causal mask discards, and keep
#: none of them.  ``dense`` products compute all scores and keep the probabilities for the backward pass.
ATTENTIONS = ("fused", "dense")

#: The type of gradients that are accumulated over micro-batches and summed over devices.
GRADIENTS = ("compute", "master")

#: How activations lie on devices that split a layer.  ``kept``: they are split between layers, and inputs that were gathered
#: are kept for the backward pass.  ``regathered``: gathered inputs are not kept but gathered again (Megatron-LM's sequence
#: parallelism). ``copied``: every device has all features between layers (Megatron-LM without sequence parallelism).
ACTIVATIONS = ("kept", "regathered", "copied")


@dataclass(frozen=True)
class Workload:
    """The workload of one training step.

    Attributes:
        batch: samples per step, over all devices.
        micro_batch: samples per forward and backward pass, over all devices; gradients accumulate over
            ``batch / micro_batch`` passes.
        precision: ``float32``, ``mixed``, ``bfloat16`` or ``fp8``; on CPU ranks also their stand-ins.
        optimizer: ``sgd``, ``momentum`` or ``adam``.
        recompute: what the backward pass computes again, a way of :mod:`.recomputation`.
        attention: one of :data:`ATTENTIONS`.
        gradients: one of :data:`GRADIENTS`.
        zero: the stage of ZeRO that all layers have at least, 0 to 3; strategies choose more for single layers.
        activations: one of :data:`ACTIVATIONS`.
        overlap: one of :data:`.overlap.OVERLAPS`.
        bucket_bytes: gradients of layers with fewer bytes on a device are summed together, in buckets of at least so many bytes;
            0: layer by layer (:mod:`.layerwork`).

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
    recompute: str = "none"
    attention: str = "fused"
    gradients: str = "compute"
    zero: int = 0
    activations: str = "kept"
    overlap: str = "none"
    bucket_bytes: int = 0

    def __post_init__(self) -> None:
        for name, value in (("batch", self.batch), ("micro-batch", self.micro_batch)):
            if value < 1:
                raise UserError(f"{name} {value} should be at least 1")
            if value > MAX_BATCH:
                raise UserError(f"{name} {value} should be at most {MAX_BATCH}")
        if self.batch % self.micro_batch:
            nearest = nearest_that_work("micro-batch", self.micro_batch, divisors(self.batch))
            raise UserError(f"micro-batch {self.micro_batch} does not divide the batch of {self.batch}; {nearest}")
        if not 0 <= self.bucket_bytes <= MAX_BYTES:
            raise UserError(f"bucket_bytes {self.bucket_bytes} should be at least 0 and at most {MAX_BYTES}")
        precision_of(self.precision)
        check_recomputation(self.recompute)
        for name, known in _WORDS.items():
            value = getattr(self, name)
            if value not in known:
                raise UserError(f"{name} {value!r} is not one of {', '.join(map(str, known))}")

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
        """Bytes of one activation or weight element."""
        return self.types.itemsize

    @property
    def gradient_itemsize(self) -> int:
        """Bytes of one element of a gradient that is accumulated and summed over devices."""
        return self.types.master_itemsize if self.gradients == "master" else self.types.communication_itemsize

    @property
    def exchanges_shards(self) -> bool:
        """Whether stages that share a weight exchange only the gradients that a device updates (ZeRO).

        Megatron-LM, whose gradients have the master type, all-reduces the whole gradients of the table that its first and its last
        stage share, before its distributed optimizer divides them.
        """
        return self.gradients == "compute"

    def share_of_sum(self, nbytes: Any) -> Any:
        """The share that a layer with ``nbytes`` of gradients on a device has in the messages of a sum (:mod:`.layerwork`).

        None if layers share no sums.

        >>> Workload(1, 1, bucket_bytes=1000).share_of_sum(np.array([250.0, 4000.0]))
        array([0.25, 1.  ])
        """
        return np.minimum(1.0, nbytes / self.bucket_bytes) if self.bucket_bytes else None

    @property
    def exposed_gradient_part(self) -> float:
        """The least part of an all-reduce of gradients that does not run beside the backward pass: that of the last bucket."""
        return 1.0 if self.overlap == "none" else 1 / NUM_BUCKETS

    @property
    def optimizer_bytes_per_parameter(self) -> int:
        """Bytes of the optimizer per trained element: its states and, if there is one, the master copy."""
        return (self.types.has_masters + OPTIMIZERS[self.optimizer]) * self.types.master_itemsize

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes per trained element: parameter, gradient, master copy and optimizer states (table: module docstring)."""
        return self.itemsize + self.gradient_itemsize + self.optimizer_bytes_per_parameter

    @property
    def update_bytes_per_parameter(self) -> int:
        """Bytes per trained element that the optimizer step reads and writes (module docstring).

        >>> Workload(1, 1, "mixed").update_bytes_per_parameter
        28
        """
        states = OPTIMIZERS[self.optimizer] + 1  # with the parameter that the optimizer updates
        copy = self.itemsize if self.types.has_masters else 0
        return self.gradient_itemsize + 2 * states * self.types.master_itemsize + copy

    def document(self) -> dict[str, Any]:
        """The workload as a JSON object; words that are the default are left out."""
        document = asdict(self)
        return {
            field.name: document[field.name]
            for field in dataclass_fields(self)
            if field.name not in _OPTIONAL or document[field.name] != field.default
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> Workload:
        """Read the result of :meth:`document`.

        Raises:
            UserError: a field is missing, unknown or out of range.
        """
        batch, micro_batch = fields.integer("batch", 1), fields.integer("micro_batch", 1)
        words = {name: fields.text(name) for name in ("precision", "optimizer", "recompute")}
        words.update({name: fields.text(name) for name in _OPTIONAL if name in fields and name not in _NUMBERS})
        zero, bucket_bytes = (fields.integer(name, 0) if name in fields else 0 for name in _NUMBERS)
        fields.finish()
        try:
            return cls(batch, micro_batch, zero=zero, bucket_bytes=bucket_bytes, **words)
        except UserError as error:
            raise UserError(f"{fields.where}: {error}") from None


#: The values that are allowed for each attribute.
_WORDS: dict[str, tuple[Any, ...]] = {
    "optimizer": tuple(OPTIMIZERS),
    "attention": ATTENTIONS,
    "gradients": GRADIENTS,
    "zero": (0, 1, 2, 3),
    "activations": ACTIVATIONS,
    "overlap": OVERLAPS,
}
#: Attributes that documents leave out if they have the default.
_OPTIONAL = ("attention", "gradients", "zero", "activations", "overlap", "bucket_bytes")
#: Those of them that are whole numbers.
_NUMBERS = ("zero", "bucket_bytes")
