"""The types of the numbers in a training step.

============  ========  =======  =============  ============================================================================
precision     compute   master   communication  use
============  ========  =======  =============  ============================================================================
float32       float32   float32  float32
mixed         float16   float32  float16        GPUs with tensor cores; losses are scaled, so that small gradients are not zero
bfloat16      bfloat16  float32  bfloat16       GPUs from compute capability 8.0; its range is that of float32
fp8           bfloat16  float32  bfloat16       as bfloat16, but products of linear layers round their factors to 8 bits
mixed-cpu     float32   float64  float32        stand-in for mixed on CPU ranks, which lack half-precision kernels
bfloat16-cpu  float32   float64  float32        the same for bfloat16
float64       float64   float64  float64        comparisons on CPU ranks of models that amplify rounding errors
============  ========  =======  =============  ============================================================================

- Compute type: activations, the weights in products, and the gradients of both.
- Master type: optimizer states, and the weights that the optimizer updates (a separate copy if the compute type is another one).
  Statistics of norms, softmax and losses are computed in it, too.
- Communication type: the gradients of weights while they are summed over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UserError

__all__ = ["PRECISIONS", "RATES", "Precision", "precision_of"]

#: The names under which clusters give the speed of products.
RATES = ("float32", "mixed", "fp8")

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Precision:
    """The types of the numbers in a training step; see the table of the module.

    Attributes:
        name: of the precision.
        compute, master, communication: names of types.
        rate: the name under which clusters give the speed of the products of linear layers.
        scales_losses: whether losses are scaled, since the compute type has a smaller range than the master type.

    >>> mixed = precision_of("mixed")
    >>> mixed.itemsize, mixed.master_itemsize, mixed.has_masters, mixed.scales_losses
    (2, 4, True, True)
    """

    name: str
    compute: str
    master: str
    communication: str
    rate: str
    scales_losses: bool = False

    @property
    def core_rate(self) -> str:
        """The name under which clusters give the speed of the products inside attention, which are not rounded to 8 bits."""
        return "mixed" if self.rate == "fp8" else self.rate

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the compute type."""
        return _BYTES[self.compute]

    @property
    def master_itemsize(self) -> int:
        """Bytes of an element of the master type."""
        return _BYTES[self.master]

    @property
    def communication_itemsize(self) -> int:
        """Bytes of an element of the communication type."""
        return _BYTES[self.communication]

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates copies of the weights, in another type than the compute type."""
        return self.compute != self.master

    @property
    def is_stand_in(self) -> bool:
        """Whether it runs in place of a precision that CPU ranks have no kernels for."""
        return self.name in _STAND_INS

    def on_cpu(self) -> Precision:
        """Return what runs in place of this precision on CPU ranks, which have no half-precision kernels."""
        return _STAND_INS.get(f"{self.name}-cpu", self)


#: The precisions that users choose from.
PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("float32", "float32", "float32", "float32", rate="float32"),
        Precision("mixed", "float16", "float32", "float16", rate="mixed", scales_losses=True),
        Precision("bfloat16", "bfloat16", "float32", "bfloat16", rate="mixed"),
        Precision("fp8", "bfloat16", "float32", "bfloat16", rate="fp8"),
    )
}
#: What the precisions with masters run as on CPU ranks: the same casts, copies and messages, with wider types.
_STAND_INS = {
    f"{name}-cpu": Precision(f"{name}-cpu", "float32", "float64", "float32", "float32", types.scales_losses)
    for name, types in PRECISIONS.items()
    if types.has_masters
}
_STAND_INS["float64"] = Precision("float64", "float64", "float64", "float64", rate="float32")


def precision_of(name: str) -> Precision:
    """Return a precision.

    Raises:
        UserError: the precision is unknown.
    """
    known = {**PRECISIONS, **_STAND_INS}
    if name not in known:
        raise UserError(f"precision {name!r} is not one of {', '.join(PRECISIONS)}")
    return known[name]
