"""`LayerKind`, the interface of all kinds of layers, and the input and result of its method `work`."""

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
    from ..strategy import Strategy, StrategyGroup
    from ..workload import Workload

__all__ = ["STATISTIC_BYTES", "Body", "LayerKind", "LayerQuantities", "Number", "Splitting", "States"]

#: A float, an array of floats, or an :class:`autoddl.costmodel.affine.Affine` of them; the formulas of all kinds accept all three.
Number = Any

#: Bytes of a statistic (norms and losses accumulate in float32).
STATISTIC_BYTES = 4

#: The SBP states of a tensor on the axes p0, p1 and p2.
States = tuple[SBPState, SBPState, SBPState]


class Splitting(Enum):
    """The mesh axes that a layer can be split over."""

    #: Rows over p0, the output's features over p1, the input's over p2: a matrix product.
    PRODUCT = "product"
    #: Rows over p0 and features over p1.  There is no product to reduce, so p2 is 1.
    ROWS_AND_FEATURES = "rows and features"
    #: Samples over p0 only.
    SAMPLES = "samples"


class LayerQuantities:
    """The quantities from which the work of a layer is computed, per device and micro-batch.

    All are numbers, or arrays of shape (strategies,).  Those that grow with the samples are affine functions if ``samples`` is
    :data:`autoddl.costmodel.affine.VARIABLE`.

    Args:
        layer, strategy, workload: the layer and its strategy, or a group of strategies, in a workload.
        samples: samples per micro-batch over all devices.

    Attributes:
        itemsize: bytes per element of an activation.
        p0, p1, p2: as of the strategy.
        devices: p0 p1 p2.
        rows: rows of the samples of one device.
        input_bytes, output_bytes, kept_bytes: bytes per device of the evenly split tensors.
    """

    def __init__(self, layer: Layer, strategy: Strategy | StrategyGroup, workload: Workload, samples: Number):
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
        """Number of parts that the parameters are split into."""
        return self.devices if self.strategy.summa else self.p1 * self.p2

    def matmul(self, m: Number, k: Number, n: Number, count: Number = 1) -> LocalWork:
        """Work of ``count`` products (m x k) by (k x n) in one kernel."""
        return matmul(m, k, n, self.itemsize, count)

    def epilogue(self) -> tuple[LocalWork, LocalWork]:
        """Work of the element-wise operations after the layer, forward and backward.

        Each reads and writes one tensor in the forward pass; it reads two and writes one in the backward pass.
        """
        count = len(self.layer.epilogue)
        return count * elementwise(2 * self.output_bytes), count * elementwise(3 * self.output_bytes)


@dataclass(frozen=True)
class Body:
    """The work of one layer for one micro-batch, without recomputation and gradients.

    Attributes:
        forward, backward: communication steps.
        forward_work, backward_work: local computation.
        kept_bytes: bytes of activations kept from the forward to the backward pass.
        buffer_bytes: bytes that exist only while the layer runs.
        forward_steps_to_repeat: communication steps that recomputation repeats; None for all of ``forward``.
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
        attributes: names of the integers that describe such a layer; each is at least 1.
        may_be_zero: the attributes that may be 0.
        splitting: the mesh axes that it can be split over.
        is_lookup: whether it is the product of one-hot rows with a table, whose mesh axes are in the order (p0, p2, p1)
            (:mod:`autoddl.costmodel.strategy`).
        is_recomputed: whether recomputation of activations runs it again.
    """

    name: ClassVar[str]
    attributes: ClassVar[tuple[str, ...]] = ()
    may_be_zero: ClassVar[frozenset[str]] = frozenset()
    splitting: ClassVar[Splitting] = Splitting.ROWS_AND_FEATURES
    is_lookup: ClassVar[bool] = False
    is_recomputed: ClassVar[bool] = True

    # -- extraction

    def layer_of(self, module: Any, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Layer | None:
        """The layer that a module of a traced model is; None where it is none of this kind.

        Asked for kinds from outside of the package, of every module that makes one tensor: the outermost first, and not of
        modules inside of one that is such a layer.  Name, parameters and modules of the layer are filled in.

        Args:
            module: of the user's model.
            input_shape, output_shape: per sample (:mod:`autoddl.costmodel.layer`); of several inputs the first one's.
        """
        return None

    # -- shapes

    def lengths(self, layer: Layer) -> Mapping[str, int]:
        """The attributes that the layer's shapes determine, with their values."""
        return {}

    def shape_text(self, layer: Layer) -> str:
        """The layer's shape as text for errors and tables."""
        return "x".join(map(str, layer.output_shape)) or "scalar"

    def shares_weights_with(self, other: LayerKind) -> bool:
        """Whether a layer of this kind can share a weight with one of the ``other`` kind."""
        return other.name == self.name

    # -- strategies

    def divides(self, layer: Layer, strategy: Strategy) -> bool:
        """Whether the layer's features divide over p1 p2 > 1 devices; the caller checks :attr:`splitting`."""
        return layer.features % (strategy.p1 * strategy.p2) == 0

    def offers_summa(self, layer: Layer, strategy: Strategy) -> bool:
        """Whether the layer can run as a Summa product on the mesh of ``strategy``."""
        return False

    @property
    def states(self) -> tuple[States, States, States]:
        """The SBP states of input, weight and output on the axes p0, p1 and p2."""
        canonical: States = (Split(0), Split(1), Broadcast())
        return canonical, (Broadcast(), Split(0), Broadcast()), canonical

    # -- work

    @abstractmethod
    def work(self, frame: LayerQuantities, is_first: bool) -> Body:
        """The work of the layer under ``frame.strategy``.

        Args:
            frame: the layer, its strategy and the quantities derived from them.
            is_first: whether the layer reads the data itself; then it gathers no input and computes no gradient for it.

        Counts have to be affine in the samples: sums of the frame's quantities, and their multiples by numbers that do not
        depend on the samples.
        """
