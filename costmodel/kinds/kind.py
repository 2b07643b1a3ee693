"""What every kind of layer answers, and what its work is computed from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from ..collectives import Step
from ..localwork import LocalWork, elementwise, matmul
from ..sbp import Broadcast, SBPState, Split

if TYPE_CHECKING:
    from ..layer import Layer
    from ..strategy import Alike, Strategy
    from ..workload import Workload

__all__ = ["STATISTIC_BYTES", "Body", "Frame", "LayerKind", "Number", "Splitting", "States"]

#: A float, or an array of floats: what the formulas of all kinds hold for.
Number = Any

#: Bytes of a statistic (norms and losses accumulate in float32).
STATISTIC_BYTES = 4

#: What the axes p0, p1 and p2 do to a tensor.
States = tuple[SBPState, SBPState, SBPState]


class Splitting(Enum):
    """Which mesh axes a layer can be spread over."""

    #: Rows over p0, the output's features over p1, the input's over p2: a matrix product.
    PRODUCT = "product"
    #: Rows over p0 and features over p1.  Without a product there is nothing to reduce: p2 is 1.
    ROWS_AND_FEATURES = "rows and features"
    #: Samples over p0 alone.
    SAMPLES = "samples"


class Frame:
    """The quantities that every kind of layer starts from, per device and micro-batch.

    All are numbers, or arrays with one entry per strategy.

    Attributes:
        rows: rows of this device's samples, with all their features.
        input_bytes, output_bytes, kept_bytes: of the evenly split tensors.
        devices: p0 p1 p2.
    """

    def __init__(self, layer: Layer, strategy: Strategy | Alike, workload: Workload, samples: Number):
        self.layer, self.strategy, self.samples = layer, strategy, samples
        self.itemsize = workload.itemsize
        self.p0, self.p1, self.p2 = strategy.p0, strategy.p1, strategy.p2
        self.devices = self.p0 * self.p1 * self.p2
        self.rows = samples * layer.rows / self.p0
        self.input_bytes = samples * layer.input_elements * self.itemsize / self.devices
        self.output_bytes = samples * layer.output_elements * self.itemsize / self.devices
        self.kept_bytes = samples * layer.kept_elements * self.itemsize / self.devices

    @property
    def parameter_parts(self) -> Number:
        """Into how many parts the parameters are cut."""
        return self.devices if self.strategy.summa else self.p1 * self.p2

    def matmul(self, m: Number, k: Number, n: Number, count: Number = 1) -> LocalWork:
        """``count`` products (m x k) by (k x n) in one kernel."""
        return matmul(m, k, n, self.itemsize, count)

    def epilogue(self) -> tuple[LocalWork, LocalWork]:
        """The element-wise operations behind the layer, forward and backward: forward each reads and writes its tensor, backward it
        reads two and writes one."""
        count = len(self.layer.epilogue)
        return count * elementwise(2 * self.output_bytes), count * elementwise(3 * self.output_bytes)


@dataclass(frozen=True)
class Body:
    """What one layer does for one micro-batch.

    Attributes:
        forward, backward: communication steps.
        forward_work, backward_work: local computation.
        kept_bytes: activations kept from the forward to the backward pass.
        buffer_bytes: what exists only while the layer runs.
        forward_steps_to_repeat: what recomputation has to send again, where that is not the whole forward pass.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    forward_work: LocalWork
    backward_work: LocalWork
    kept_bytes: Number
    buffer_bytes: Number = 0.0
    forward_steps_to_repeat: tuple[Step, ...] | None = None


class LayerKind(ABC):
    """A kind of layer.

    Attributes:
        name: of the kind.
        attributes: whole numbers that such a layer has, all at least 1.
        may_be_zero: those that may be 0.
        splitting: which mesh axes it can be spread over.
        is_lookup: whether it is the product of one-hot rows with a table, whose mesh axes stand in the order (p0, p2, p1)
            (:mod:`autoddl.costmodel.strategy`).
        is_recomputed: whether recomputation of activations runs it again.
    """

    name: ClassVar[str]
    attributes: ClassVar[tuple[str, ...]] = ()
    may_be_zero: ClassVar[frozenset[str]] = frozenset()
    splitting: ClassVar[Splitting] = Splitting.ROWS_AND_FEATURES
    is_lookup: ClassVar[bool] = False
    is_recomputed: ClassVar[bool] = True

    # -- shapes

    def lengths(self, layer: Layer) -> Mapping[str, int]:
        """The attributes that the layer's shapes fix."""
        return {}

    def shape_text(self, layer: Layer) -> str:
        """The layer's shape as errors and tables show it."""
        return "x".join(map(str, layer.output_shape)) or "scalar"

    def shares_weights_with(self, other: LayerKind) -> bool:
        """Whether such a layer can use a weight of another one's."""
        return other.name == self.name

    # -- strategies

    def divides(self, layer: Layer, strategy: Strategy) -> bool:
        """Whether the layer's features divide over p1 p2 > 1 devices; that ``strategy`` is of :attr:`splitting` is known."""
        return layer.features % (strategy.p1 * strategy.p2) == 0

    def offers_summa(self, layer: Layer, strategy: Strategy) -> bool:
        """Whether the layer can run as a Summa product on this mesh."""
        return False

    @property
    def states(self) -> tuple[States, States, States]:
        """What the axes p0, p1 and p2 do to input, weight and output."""
        canonical: States = (Split(0), Split(1), Broadcast())
        return canonical, (Broadcast(), Split(0), Broadcast()), canonical

    # -- work

    @abstractmethod
    def work(self, frame: Frame, is_first: bool) -> Body:
        """What the layer does at ``frame.strategy``.

        Args:
            is_first: whether it reads the data itself: it gathers no input and returns no gradient for it.
        """
