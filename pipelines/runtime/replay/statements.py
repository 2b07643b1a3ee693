"""A traced program as the statements of a layer. Needs no OneFlow.

The crossings of the program are statements that execute the layer's priced steps, in the order of
:func:`autoddl.costmodel.kinds.opaque.crossing_steps`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autoddl.costmodel.program import CROSSINGS, Program, Scaled, Source, TracedCall

from ..statements import RANKS, Call, Fact, LayerContext, Name, Size
from .operators import RANDOM, operator_call

__all__ = ["feed_calls", "program_calls", "score_calls", "weight_name"]

#: Variables with the numbers of samples: those of this rank, and those of all ranks.
OWN_SAMPLES, ALL_SAMPLES = "own_samples_count", "num_samples"


def weight_name(index: int) -> str:
    """Return the variable of a parameter of the layer."""
    return f"weight_{index}"


def program_calls(context: LayerContext, program: Program, rows: int) -> list[Call]:
    """Return the calls that run a program, and assign its packed results to ``x``.

    Args:
        context: The layer and its strategy.
        program: The program.
        rows: Rows per sample of the layer's output.
    """
    maker = _Maker(context)
    calls = [maker.source(source) for source in program.sources if source.origin != "parameter"]
    calls += [maker.call(call) for call in program.calls]
    if program.is_loss:
        return [*calls, Call("scalar", (Name(program.results[0].variable),))]
    names = [Name(result.variable) for result in program.results]
    outers = [max(result.outer, 1) for result in program.results]
    return [*calls, Call("packed", (names, outers, Name(OWN_SAMPLES), rows))]


def score_calls(context: LayerContext, program: Program, heads: int) -> tuple[list[Call], list[list[Any]]]:
    """Return the calls that compute what changes the scores of attention, and the option ``changes`` of `attend_changed`.

    Args:
        context: The layer and its strategy.
        program: The program.
        heads: Query heads of all ranks.
    """
    maker, calls = _Maker(context), []
    tables = {}
    if context.layout.num_parts > 1:
        for source in program.sources:
            if source.origin == "parameter":
                tables[source.variable] = f"table_{source.index}"
                arguments = (Name(source.variable), context.layout, heads, RANKS)
                calls.append(Call("among_zeros", arguments, result=(tables[source.variable],)))
    calls += [maker.source(source) for source in program.sources if source.origin != "parameter"]
    for call in program.calls:
        named = {key: tuple(tables.get(name, name) for name in names) for key, names in call.arguments.items()}
        calls.append(maker.call(replace(call, arguments=named)))
    changes: list[list[Any]] = []
    for number, result in enumerate(program.results):
        variable = tables.get(result.variable, result.variable)
        shape = _sized(list(result.shape), is_whole=False)
        of_all = (Name(variable), shape, context.layout, heads, RANKS)
        calls.append(Call("own_heads", of_all, result=(f"change_{number}",)))
        changes.append([result.role, Name(f"change_{number}"), result.value])
    return calls, changes


def feed_calls(program: Program) -> list[Call]:
    """Return the calls that compute the data of a layer for all samples, and assign it to ``data``."""
    maker = _Maker(None)
    calls = [maker.source(source) for source in program.sources]
    calls += [maker.call(call) for call in program.calls]
    (result,) = program.results
    arguments = [Name(result.variable)], [max(result.outer, 1)], Name(ALL_SAMPLES), 1
    return [*calls, Call("packed_data", arguments, result=("data",))]


class _Maker:
    """Makes the calls of a program.

    Args:
        context: The layer and its strategy; None for a program of all samples.
    """

    def __init__(self, context: LayerContext | None):
        self._layout = None if context is None else context.layout
        self._axes = list(context.layout.axes(0)) if context is not None else []

    def source(self, source: Source) -> Call:
        """Return the call that assigns a source."""
        result = (source.variable,)
        if source.origin == "layer":
            variable = "x" if source.index == 0 else f"input_{source.index}"
            options: dict[str, Any] = {"outer": source.outer} if source.outer > 1 else {}
            shape = _sized(list(source.shape), is_whole=False)
            return Call("unpacked", (Name(variable), shape), options, result)
        if source.origin == "data":
            is_split = source.outer > 0 and not source.is_whole
            layout = self._layout if is_split else None
            return Call("model_data", (Name(f"argument_{source.index}"), layout, RANKS), result=result)
        if source.origin == "buffer":
            owner, _, name = source.name.rpartition(".")
            fact = Fact(f"buffer {source.name}", "buffer_of", owner, (name,))
            return Call("given_tensor", (fact, RANKS), result=result)
        shape = [int(length) for length in source.shape]  # type: ignore[arg-type]
        return Call("constant_tensor", (list(source.values), shape, source.dtype, RANKS), result=result)

    def call(self, traced: TracedCall) -> Call:
        """Return the call of an operator or a crossing."""
        results = tuple(name for names in traced.results.values() for name in names)
        if traced.kind in CROSSINGS:
            return self._crossing(traced, results)
        if traced.kind == "normalization":
            return self._batch_norm(traced, results)
        call = operator_call(traced)
        options = dict(call.options)
        if traced.kind in RANDOM:
            place = traced.attributes["place"]
            options |= {"place": list(place) if place else None, "stream": traced.attributes["stream"]}
            options |= {"step": Name("step"), "axes": [] if traced.is_whole else self._axes, "ranks": RANKS}
            if RANKS in call.arguments:
                del options["ranks"]
        return replace(
            call,
            arguments=tuple(_sized(value, traced.is_whole) for value in call.arguments),
            options={name: _sized(value, traced.is_whole) for name, value in options.items()},
            # Operators with several results have the used ones first.
            result=results,
        )

    def _crossing(self, traced: TracedCall, results: tuple[str, ...]) -> Call:
        (variable,) = (Name(name) for names in traced.arguments.values() for name in names)
        attributes = traced.attributes
        if traced.kind == "whole_gradient":
            return Call("whole_gradient", (variable, self._axes), result=results)
        if traced.kind in ("gather_samples", "own_samples"):
            arguments = (variable, self._axes, attributes["dim"], attributes["outer"], RANKS)
            count = len(self._axes) if traced.kind == "gather_samples" else 0
            return Call(traced.kind, arguments, result=results, num_steps=count)
        function = "mean_of_ranks" if attributes.get("is_mean") else traced.kind
        count = len(self._axes) if traced.kind == "sum_samples" else 0
        return Call(function, (variable, self._axes, RANKS), result=results, num_steps=count)

    def _batch_norm(self, traced: TracedCall, results: tuple[str, ...]) -> Call:
        """A batch norm is the one of its kind of layer, with the running statistics of its module."""
        names = {key: Name(values[0]) for key, values in traced.arguments.items()}
        channels = traced.attributes["channels"]
        statistics = Fact("statistics", "running_statistics", traced.path, (channels,))
        training = Name("training") if traced.attributes.get("training") else False
        arguments = (names["x"], names.get("gamma"), names.get("beta"), statistics, self._layout, RANKS, training)
        if not traced.is_synchronised:
            return Call("normalise_batch", arguments, result=results)
        return Call("normalise_batch", arguments, {"synchronised": True}, result=results, num_steps=len(self._axes))


def _sized(value: Any, is_whole: bool) -> Any:
    """Replace numbers that grow with the samples by those of a pass."""
    if isinstance(value, Scaled):
        return Size(value, Name(ALL_SAMPLES if is_whole else OWN_SAMPLES))
    return [_sized(part, is_whole) for part in value] if isinstance(value, (list, tuple)) else value
