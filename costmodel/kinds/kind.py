"""`LayerKind`, the interface of all kinds of layers, and the input and result of its method `work`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from ..collectives import Step
from ..localwork import LocalWork, elementwise, matmul
from ..sbp import Broadcast, SBPState, Split
from .registry import kind_of

if TYPE_CHECKING:
    from ..layer import Layer
    from ..strategy import Strategy
    from ..strategygroup import StrategyGroup
    from ..workload import Workload

__all__ = [
    "Body",
    "LayerKind",
    "LayerQuantities",
    "Number",
    "Splitting",
    "States",
    "image_rows",
    "independent_rows",
]

#: A float, an array of floats, or an :class:`autoddl.costmodel.affine.Affine` of them; the formulas of all kinds accept all three.
Number = Any

#: The SBP states of a tensor on the axes p0, p1 and p2.
States = tuple[SBPState, SBPState, SBPState]


class Splitting(Enum):
    """The mesh axes that can split a layer."""

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
        layer: the layer.
        strategy: its strategy, or a group of strategies.
        workload: supplies the bytes per element.
        samples: number of samples per micro-batch over all devices.
        is_recomputed: whether the backward pass runs the layer again.

    Attributes:
        workload: the workload.
        itemsize: bytes per element of an activation.
        statistic_bytes: bytes of a statistic of a norm or loss.
        p0, p1, p2: mesh axes of the strategy.
        devices: number of devices, p0 p1 p2.
        parts: number of parts that the layer's tensors are split into, the devices; p0 if the layer works on copies.
        rows: number of rows of the samples of one device.
        regathers: whether the backward pass gathers the input of a product again, in place of keeping it.
        input_bytes, output_bytes, kept_bytes: bytes of one device's part of the tensors, which are split into ``parts``.
    """

    def __init__(
        self,
        layer: Layer,
        strategy: Strategy | StrategyGroup,
        workload: Workload,
        samples: Number,
        is_recomputed: bool = False,
    ):
        self.layer, self.strategy, self.samples, self.workload = layer, strategy, samples, workload
        self.itemsize = workload.itemsize
        self.statistic_bytes = workload.types.master_itemsize
        self.p0, self.p1, self.p2 = strategy.p0, strategy.p1, strategy.p2
        self.devices = self.p0 * self.p1 * self.p2
        is_copied = workload.activations == "copied" and kind_of(layer.kind).is_between
        self.parts = self.p0 if is_copied else self.devices
        self.rows = samples * layer.rows / self.p0
        # The forward pass of a recomputed layer gathers it again anyway.
        self.regathers = workload.activations == "regathered" or (strategy.regathers and not is_recomputed)
        self.input_bytes = samples * layer.input_elements * self.itemsize / self.parts
        self.output_bytes = samples * layer.output_elements * self.itemsize / self.parts
        self.kept_bytes = samples * (layer.kept_elements * self.itemsize + layer.mask_bytes) / self.parts

    @property
    def parameter_parts(self) -> Number:
        """Number of parts that the parameters are split into."""
        return self.devices if self.strategy.summa else self.p1 * self.p2 * self.strategy.expert_parts

    @property
    def block_input_bytes(self) -> Number:
        """Bytes of one device's part of the input, as it lies between the layers, if the layer begins a block."""
        parts = self.p0 if self.workload.activations == "copied" else self.devices
        return self.samples * self.layer.input_elements * self.itemsize / parts

    def matmul(self, m: Number, k: Number, n: Number, count: Number = 1) -> LocalWork:
        """Return the work of ``count`` products (m x k) by (k x n) in one kernel."""
        return matmul(m, k, n, self.itemsize, count)

    def epilogue(self) -> tuple[LocalWork, LocalWork]:
        """Return the work of the element-wise operations after the layer, of the forward and of the backward pass.

        Each operation reads and writes one tensor in the forward pass. It reads two and writes one in the backward pass.
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
    """The base class of all kinds of layers: the strategies, work and memory of their layers.

    Attributes:
        name: name of the kind, unique among registered kinds.
        attributes: names of the integers that describe such a layer. Each is at least 1.
        may_be_zero: the attributes that may be 0.
        optional_attributes: names of further integers, which a layer may have.
        reads_order: whether its result depends on the order of positions: ranks that share samples change it (:mod:`.attention`).
        splitting: the mesh axes that can split such a layer.
        is_lookup: whether it is the product of one-hot rows with a table, whose mesh axes are in the order (p0, p2, p1)
            (:mod:`autoddl.costmodel.strategy`). Its attribute ``vocabulary`` is the number of rows of the table.
        is_recomputed: whether recomputation of activations runs it again.
        is_selected: whether selective recomputation runs it again.
        is_between: whether its tensors are those between products, which every device has as a whole if activations are copied.
        is_loss: whether it is a loss over the classes of its attribute ``vocabulary``, which ends a model and reads targets.
        is_opaque: whether a layer runs modules of the user, whose code is not part of the layer graph.
        reads_data: whether a layer without producers reads an input of the model.
        has_summa: whether such a layer can run as a Summa product.
        gathers_inputs: whether its product gathers the input over p1, and can gather it again in the backward pass.
        gathers_weights: whether its weights of two or more dimensions can be divided over p0 (``zero`` = 3) and gathered when read.
        reads_weights_again: whether the backward pass needs these weights.
        follows_groups: whether the output features can be ordered in the groups of their reader (:meth:`input_groups`).
        colour: fill colour of its layers in drawings.
    """

    name: ClassVar[str]
    attributes: ClassVar[tuple[str, ...]] = ()
    may_be_zero: ClassVar[frozenset[str]] = frozenset()
    optional_attributes: ClassVar[frozenset[str]] = frozenset()
    reads_order: ClassVar[bool] = False
    splitting: ClassVar[Splitting] = Splitting.ROWS_AND_FEATURES
    is_lookup: ClassVar[bool] = False
    is_recomputed: ClassVar[bool] = True
    is_selected: ClassVar[bool] = False
    is_between: ClassVar[bool] = False
    is_loss: ClassVar[bool] = False
    is_opaque: ClassVar[bool] = False
    reads_data: ClassVar[bool] = True
    has_summa: ClassVar[bool] = False
    gathers_inputs: ClassVar[bool] = False
    gathers_weights: ClassVar[bool] = False
    reads_weights_again: ClassVar[bool] = False
    follows_groups: ClassVar[bool] = False
    colour: ClassVar[str] = "#fff2cc"

    # -- extraction

    def layer_of(self, module: Any, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Layer | None:
        """Return the layer that a module of a traced model represents, or None if it is not of this kind.

        Extraction calls this method of kinds from outside of the package, for every module that returns one tensor. It starts with
        the outermost modules, and skips modules inside a module that is such a layer. The caller sets the name, the parameters and
        the modules of the layer.

        Args:
            module: a module of the user's model.
            input_shape: shape of the first input, per sample (:mod:`autoddl.costmodel.layer`).
            output_shape: shape of the output, per sample.
        """
        return None

    # -- shapes

    def lengths(self, layer: Layer) -> Mapping[str, int]:
        """Return the values of the attributes that follow from the layer's shapes."""
        return {}

    def shape_text(self, layer: Layer) -> str:
        """Return the layer's shape as text, for errors and tables."""
        return "x".join(map(str, layer.output_shape)) or "scalar"

    def shares_weights_with(self, other: LayerKind) -> bool:
        """Return whether a layer of this kind can share a weight with a layer of the ``other`` kind."""
        return other.name == self.name

    def input_groups(self, layer: Layer) -> tuple[int, tuple[int, ...]] | None:
        """Return how the features of the layer's only input are grouped, or None if their order does not matter.

        Returns:
            The number of groups, and the number of features of each section. Every group has an equal share of each section
            (:mod:`autoddl.pipelines.runtime.comm.parameter_layouts`).
        """
        return None

    def dropped_elements(self, layer: Layer) -> int:
        """Return the number of elements per sample that a dropout of the layer's own acts on, besides those of its epilogue."""
        return 0

    def drops_elements(self, layer: Layer) -> bool:
        """Return whether the layer has a dropout of its own, besides those of its epilogue."""
        return self.dropped_elements(layer) > 0

    # -- strategies

    @property
    def is_matmul(self) -> bool:
        """Whether it is the product of its input with a weight, not with one-hot rows."""
        return self.splitting is Splitting.PRODUCT and not self.is_lookup

    def divides(self, layer: Layer, strategy: Strategy) -> bool:
        """Return whether the layer's features divide over p1 p2 > 1 devices. The caller checks :attr:`splitting`.

        The features of an image are its channels.
        """
        features = layer.output_shape[0] if layer.is_image else layer.features
        return features % (strategy.p1 * strategy.p2) == 0

    def positions(self, layer: Layer) -> int:
        """Return the number of positions of a sample that any number of ranks which divides it may share.

        Its rows if they are independent of each other, so that every rank computes those that it has; 1 otherwise.
        """
        return 1

    def variants(self, layer: Layer, strategy: Strategy) -> Iterable[Strategy]:
        """Return the strategies with the splits of ``strategy`` that the layer has, with every further choice of the kind."""
        return (strategy,)

    def offers_choices(self, layer: Layer, strategy: Strategy) -> bool:
        """Return whether the layer has the choices of a strategy that only kinds with further :meth:`variants` have."""
        return not (strategy.experts or strategy.sequence or strategy.positions or strategy.key_copies)

    def offers_summa(self, layer: Layer, strategy: Strategy) -> bool:
        """Return whether the layer can run as a Summa product on the mesh of ``strategy``."""
        return False

    @property
    def states(self) -> tuple[States, States, States]:
        """The SBP states of the input, the weight and the output, each on the axes p0, p1 and p2."""
        canonical: States = (Split(0), Split(1), Broadcast())
        return canonical, (Broadcast(), Split(0), Broadcast()), canonical

    # -- work

    @abstractmethod
    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        """Return the work of the layer with ``quantities.strategy``, on one device and for one micro-batch.

        Args:
            quantities: the layer, its strategy and the quantities derived from them.
            is_first: whether the layer reads the data itself. Then it gathers no input and computes no gradient for it.

        Counts have to be affine in the samples: sums of the quantities, and their multiples by numbers that do not depend on the
        samples.
        """


def independent_rows(layer: Layer) -> int:
    """Return the rows of a sample if the layer reads and writes as many: the :meth:`LayerKind.positions` of row-wise layers."""
    read, written = layer.input_shape, layer.output_shape
    if len(written) != 2 or len(read) > 2 or (len(read) == 2 and read[0] != written[0]):
        return 1
    return written[0] if len(read) == 2 or read == written[:1] else 1


def image_rows(layer: Layer) -> int:
    """Return the rows of pixels of an image if the layer reads and writes one of the same shape, else :func:`independent_rows`."""
    shape = layer.output_shape
    return shape[1] if len(shape) == 3 and shape == layer.input_shape else independent_rows(layer)
