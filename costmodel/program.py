"""Traced programs: the operators of a part of a model that is no layer of a known kind, as plain data.

A program has variables. Some are *sources*: outputs of other layers, inputs of the model, parameters, buffers, constants. Each
:class:`TracedCall` is one OneFlow operator, which assigns further variables. The *results* are the output of the layer. If there
are several, the output of a sample is their elements one after the other, as one row.

Ranks split the samples. Every variable is one of three:

- **fixed**: it does not depend on the inputs of the model, and every rank has it.
- **split**: every rank has the elements that belong to its own samples.
- **whole**: it belongs to all samples together, and every rank has it, like the mean of a batch.

A call has the context of its result: a split call runs on a rank's samples, a whole call on all of them. Where samples meet, a
*crossing* turns variables of one context into the other (:data:`CROSSINGS`):

================  ===============  ================================  ==================================
crossing          turns            forward pass                      backward pass
================  ===============  ================================  ==================================
gather_samples    split to whole   all-gather                        each rank takes its own samples
sum_samples       split to whole   all-reduce of partial sums        the gradient as it is
share_whole       whole to split   as it is                          all-reduce of the gradients
own_samples       whole to split   each rank takes its own samples   all-gather
whole_gradient    fixed to whole   as it is                          the gradient divided by the ranks
================  ===============  ================================  ==================================

The gradient of a whole variable is the same on every rank; those of split and fixed ones are summands. So the gradients of
parameters are summed over the ranks, as those of all layers.

Numbers that grow with the samples are :class:`Scaled`; the samples are those of the context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any, Union

from .documents import Fields, show_json
from .errors import UserError

__all__ = [
    "CROSSINGS",
    "ROLES",
    "Dims",
    "Program",
    "Result",
    "Scaled",
    "Source",
    "TracedCall",
    "at",
    "program_from_fields",
]

#: The calls between contexts, which are no operators of OneFlow.
CROSSINGS = ("gather_samples", "sum_samples", "share_whole", "own_samples", "whole_gradient")
#: What a result may be: a part of the output, or what is done to the scores of attention.
ROLES = ("", "add", "subtract", "multiply", "fill", "keep")
#: What a source of a program may be.
ORIGINS = ("layer", "data", "parameter", "buffer", "constant")


@dataclass(frozen=True)
class Scaled:
    """A number that depends on the number n of samples: ``times * n ** power + plus``.

    >>> Scaled(4).of(8), Scaled(3.0, power=-1).of(2), str(Scaled(4, 1))
    (32, 1.5, '4 * n + 1')
    """

    times: float
    plus: float = 0
    power: int = 1

    def of(self, samples: Any) -> Any:
        """Return the number for ``samples`` samples."""
        return self.times * (samples if self.power == 1 else samples**self.power) + self.plus

    def __str__(self) -> str:
        grown = "n" if self.power == 1 else f"n**{self.power}"
        return f"{self.times} * {grown}" + (f" + {self.plus}" if self.plus else "")


#: The lengths of a tensor's dimensions.
Dims = tuple[Union[int, Scaled], ...]


def at(value: Any, samples: int) -> Any:
    """Return a value with every :class:`Scaled` number in it for ``samples`` samples.

    >>> at((Scaled(2), 7), 4)
    (8, 7)
    """
    if isinstance(value, Scaled):
        return value.of(samples)
    return type(value)(at(part, samples) for part in value) if isinstance(value, (tuple, list)) else value


@dataclass(frozen=True)
class Source:
    """A variable that the program reads.

    Attributes:
        variable: Its name.
        origin: One of `ORIGINS`.
        index: Of a layer: which of the layer's inputs; of data: which input of the model; of a parameter: which of the layer's.
        name: Of a buffer: its path in the module. "" otherwise.
        shape: Its shape in the traced model.
        outer: Number of elements before the samples: 1 if they are the first dimension, the sequence length if time comes first.
            The output of a layer begins with the samples, so their dimension is moved if it is not 1. 0: it has no samples.
        is_whole: Whether the variable has all samples. Data alone can have them.
        values: Of a constant: its elements.
        dtype: Of a constant: the name of its type.
    """

    variable: str
    origin: str
    index: int = 0
    name: str = ""
    shape: Dims = ()
    outer: int = 1

    is_whole: bool = False
    values: tuple[float, ...] = ()
    dtype: str = ""

    @property
    def sample_elements(self) -> int:
        """Number of elements of one sample."""
        return prod(at(self.shape, 1))


@dataclass(frozen=True)
class Result:
    """A variable that is an output of the program, or a part of it; or what changes the scores of attention.

    Attributes:
        variable: Its name.
        shape: Its shape in the traced model. Of attention: (samples, windows, heads, queries, keys), 1 where all have the same.
        outer: As in `Source`; 0 if it has no samples, as a loss.
        role: Of attention: it is added to the scores, subtracted, multiplies them, or they become ``value`` where it is true
            (``fill``) or where it is not (``keep``).
        value: See ``role``.
    """

    variable: str
    shape: Dims = ()
    outer: int = 1
    role: str = ""
    value: float = 0.0


@dataclass(frozen=True)
class TracedCall:
    """One operator of the traced model, or a crossing.

    Attributes:
        kind: OneFlow's name of the operator type, or one of `CROSSINGS`.
        arguments: Names of variables by OneFlow's argument name.
        results: Names of the assigned variables by OneFlow's result name.
        attributes: OneFlow's attributes. Of a crossing: ``elements`` (of the whole variable, `Scaled` if it has samples), ``dim``
            and ``outer`` (the dimension with the samples, and the number of elements before them in this dimension), and whether
            its variable ``is_trained``, so that a gradient comes back. Of a batch norm: the number of ``channels``, and whether it
            is ``synchronised``.
        is_whole: Whether it runs on all samples.
        path: Path of the module that called the operator.
    """

    kind: str
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    results: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    is_whole: bool = False
    path: str = ""

    @property
    def is_synchronised(self) -> bool:
        """Whether it is a batch norm of a rank's samples with the statistics of the samples of all ranks."""
        return not self.is_whole and bool(self.attributes.get("synchronised"))


@dataclass(frozen=True)
class Program:
    """The operators of a layer; see the module.

    Attributes:
        sources: Variables that it reads.
        calls: The operators, in execution order.
        results: The output, at least one.
        is_loss: Whether the result is the loss of the model.
    """

    sources: tuple[Source, ...]
    calls: tuple[TracedCall, ...]
    results: tuple[Result, ...]
    is_loss: bool = False

    @property
    def crossings(self) -> Iterator[TracedCall]:
        """The calls that communicate, in execution order."""
        communicating = set(CROSSINGS) - {"whole_gradient"}
        return (call for call in self.calls if call.kind in communicating or call.is_synchronised)

    @property
    def reads_data(self) -> bool:
        """Whether it reads an input of the model."""
        return any(source.origin == "data" for source in self.sources)

    def document(self) -> dict[str, Any]:
        """The program as a JSON value."""
        return {
            "sources": [_encoded_fields(source) for source in self.sources],
            "calls": [_encoded_fields(call) for call in self.calls],
            "results": [_encoded_fields(result) for result in self.results],
            "is_loss": self.is_loss,
        }


def program_from_fields(fields: Fields, *, is_of_scores: bool = False) -> Program:
    """Read a program from its JSON value.

    Args:
        fields: The value.
        is_of_scores: Whether its results change the scores of attention; then there may be none.

    Raises:
        UserError: A field is missing, unknown or of another type, or a variable is read before it is assigned.
    """
    parts = {}
    for name, kind in (("sources", Source), ("calls", TracedCall), ("results", Result)):
        parts[name] = tuple(_decoded_fields(entry, kind) for entry in fields.objects(name))
    program = Program(is_loss=fields.boolean("is_loss"), **parts)
    fields.finish()
    known = {source.variable for source in program.sources}
    for call in program.calls:
        for name in (name for names in call.arguments.values() for name in names):
            if name not in known:
                raise UserError(f"{fields.where}: {call.kind} reads {name!r}, which is not assigned before")
        known.update(name for names in call.results.values() for name in names)
    for result in program.results:
        if result.variable not in known:
            raise UserError(f"{fields.where}: the result {result.variable!r} is not assigned")
        if result.role not in ROLES or bool(result.role) != is_of_scores:
            roles = ", ".join(ROLES[1:]) if is_of_scores else "none"
            raise UserError(f"{fields.where}: the role of {result.variable!r} is {result.role!r}, should be {roles}")
    has_results = bool(program.results) or is_of_scores
    if not has_results or any(source.origin not in ORIGINS for source in program.sources):
        raise UserError(f"{fields.where}: a program should have results, and sources of {', '.join(ORIGINS)}")
    return program


def _encoded_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, as JSON values."""
    encoded = {}
    for name, spec in type(value).__dataclass_fields__.items():
        here = getattr(value, name)
        default = spec.default_factory() if callable(spec.default_factory) else spec.default
        if here != default:
            encoded[name] = _encoded(here)
    return encoded


def _encoded(value: Any) -> Any:
    if isinstance(value, Scaled):
        return {"times": value.times, "plus": value.plus, "power": value.power}
    if isinstance(value, float) and not isfinite(value):
        return {"number": str(value)}  # JSON has no such numbers
    if isinstance(value, Mapping):
        return {key: _encoded(part) for key, part in value.items()}
    return [_encoded(part) for part in value] if isinstance(value, (tuple, list)) else value


def _decoded_fields(fields: Fields, kind: Any) -> Any:
    types = {"variable": str, "origin": str, "kind": str, "name": str, "path": str, "dtype": str, "index": int}
    types |= {"outer": int, "is_whole": bool, "role": str}
    mappings = ("arguments", "results", "attributes")
    values: dict[str, Any] = {}
    for name in kind.__dataclass_fields__:
        if name not in fields:
            continue
        value = fields.get(name)
        if name in mappings:
            if not isinstance(value, dict):
                raise UserError(f"{fields.where}: {name} is {show_json(value)}, should be an object")
            values[name] = {key: _decoded(part) for key, part in value.items()}
        elif name in types and type(value) is not types[name]:
            raise UserError(f"{fields.where}: {name} is {show_json(value)}, should be a {types[name].__name__}")
        else:
            values[name] = _decoded(value)
    fields.finish()
    required = "kind" if kind is TracedCall else "variable"
    if required not in values:
        raise UserError(f"{fields.where}: field {required!r} is missing")
    return kind(**values)


def _decoded(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"times", "plus", "power"}:
        return Scaled(**value)
    if isinstance(value, dict) and set(value) == {"number"}:
        return float(value["number"])
    return tuple(_decoded(part) for part in value) if isinstance(value, list) else value
