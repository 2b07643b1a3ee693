"""Groups of keyword arguments that several public functions share, with their types, documentation and defaults.

A function declares a group as ``**options: Unpack[Group]``, which type checkers and editors understand.  The decorator `takes`
fills in the defaults, and writes every option of the group into the signature and the docstring, so that ``help`` and completion
show it.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from autoddl.costmodel.suggestions import did_you_mean
from autoddl.search.options import AUTO
from autoddl.search.planner import Options

if TYPE_CHECKING:
    from autoddl.costmodel.stopping import Stop

__all__ = ["PLANNING_DEFAULTS", "PlanningOptions", "takes"]

Function = TypeVar("Function", bound=Callable[..., Any])


class PlanningOptions(TypedDict, total=False):
    """Options of the model, the cluster, the training and the search.

    Attributes:
        nodes, devices_per_node: Size of the cluster; by default that of the cluster's description.
        latency_s, bandwidth: Latency [s] and bandwidth per device [bytes/s] of every link; by default those of the cluster.
        heads, sequence, vocabulary: Number of attention heads, sequence length and vocabulary size of a built-in transformer; by
            default those of the model.
        dropout: Whether a built-in transformer has dropouts.
        capacity_factor: Slots of an expert of a mixture, as a multiple of its share of a balanced load; by default the model's own.
        batch_norm: Samples whose statistics batch norms use, ``local`` (of each device) or ``all``; by default as the model says.
        batch: Samples per training step over all devices; by default 8 per device.
        micro_batch: Samples per forward pass over all devices (of a stage, with a pipeline); by default chosen by the search.
        precision: ``float32``, ``mixed``, ``bfloat16`` or ``fp8``; by default the usual precision of the device.
        optimizer: ``adam``, ``momentum`` or ``sgd``.
        recompute: What to recompute in the backward pass: ``none``, ``selective`` (dense attention), ``layers`` (each layer
            keeps its input), ``blocks`` (each repeated block keeps its input) or ``blocks:K`` (the first K blocks of each stage
            do).  True for any of them, False for none; None lets the search choose.
        attention: ``fused`` (no scores are kept, masked ones are skipped) or ``dense``.
        gradients: Type of gradients that are accumulated and summed over devices: ``compute`` or ``master`` (float32).
        zero: What the devices that hold the same parameters divide (ZeRO), in all layers: 0 nothing, 1 optimizer states, 2 also
            gradients, 3 also parameters. ``auto`` chooses it for each layer.
        activations: Between layers: ``kept`` (split, and gathered inputs are kept for the backward pass), ``regathered`` (gathered
            again) or ``copied`` (every device has all features). ``auto`` chooses between the first two for each layer.
        overlap: ``none``, ``gradients`` (all-reduces of gradients run beside the backward pass) or ``all`` (also the
            communication of linear layers, under their products).
        bucket_bytes: Gradients of layers with fewer bytes on a device are summed together, in buckets of at least so many bytes;
            0: layer by layer.
        memory_limit_bytes: Memory limit per device; by default the device's memory without the framework's share.
        objective: The time to minimize: ``step`` (the whole training step) or ``communication``.
        untied: Choose a strategy for every repetition of a block separately, instead of one strategy for all repetitions.
        summa: Offer Summa meshes to linear layers.
        executor: What executes the plan: ``eager`` executes all strategies; ``graph``, which is OneFlow's ``nn.Graph``, executes
            those on meshes of at most two axes, without a pipeline.
        seed: Seed of the random search methods.
        temperature_s: Constant temperature of ``metropolis-hastings`` [s]; by default the temperature decreases (annealing).
        evaluations: Maximum number of evaluations of one search; by default that of the method.
        time_limit_s: Time limit of one search (by default 20 s); with a pipeline, limit on the processor time of the whole
            search (by default 30 s).
        quiet: Show no progress bar.  Otherwise a progress bar is shown if stderr is a terminal.
        stop: A `Stop`.  When it is requested, the search ends and returns the best plan so far.
    """

    nodes: int | None
    devices_per_node: int | None
    latency_s: float | None
    bandwidth: float | None
    heads: int | None
    sequence: int | None
    vocabulary: int | None
    dropout: bool
    capacity_factor: float | None
    batch_norm: str | None
    batch: int | None
    micro_batch: int | None
    precision: str | None
    optimizer: str
    recompute: bool | str | None
    attention: str
    gradients: str
    zero: int | str
    activations: str
    overlap: str
    bucket_bytes: int
    memory_limit_bytes: float | None
    objective: str
    untied: bool
    summa: bool
    executor: str
    seed: int
    temperature_s: float | None
    evaluations: int | None
    time_limit_s: float | None
    quiet: bool
    stop: Stop | None


#: Defaults of `PlanningOptions`: those of the planner, but it chooses how each layer divides its parameters, and with a progress
#: bar; None for options that are not listed.
PLANNING_DEFAULTS: Mapping[str, Any] = {
    **{option.name: option.default for option in fields(Options)},
    "zero": AUTO,
    "activations": AUTO,
    "dropout": False,
    "quiet": False,
}


def takes(group: type, defaults: Mapping[str, Any]) -> Callable[[Function], Function]:
    """Return a decorator that replaces ``**options`` of a function by the options of a group.

    The decorated function fills in defaults and refuses unknown options.  Its signature lists every option, and its docstring
    documents the options in place of the line ``options: ...``.

    Args:
        group: A TypedDict whose docstring documents its options under ``Attributes``.
        defaults: Default of each option by name; None for options that are not listed.
    """
    option_defaults = {name: defaults.get(name) for name in group.__annotations__}

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own_parameters = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        own_names = {parameter.name for parameter in own_parameters}

        @functools.wraps(function)
        def with_options(*arguments: Any, **keywords: Any) -> Any:
            for name in keywords:
                if name not in option_defaults and name not in own_names:
                    hint = did_you_mean(name, [*option_defaults, *own_names])
                    message = f"{function.__name__}() got an unexpected keyword argument {name!r}"
                    raise TypeError(f"{message}{hint and '; ' + hint}")
            return function(*arguments, **{**option_defaults, **keywords})

        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_type_of(group, name))
            for name, default in option_defaults.items()
        ]
        with_options.__signature__ = signature.replace(parameters=[*own_parameters, *options])  # type: ignore[attr-defined]
        with_options.__doc__ = _with_options_documented(function.__doc__, group)
        return with_options  # type: ignore[return-value]

    return decorate


def _type_of(group: type, name: str) -> str:
    """Return the type of an option as text."""
    annotation = group.__annotations__[name]
    return str(getattr(annotation, "__forward_arg__", annotation))


def _with_options_documented(docstring: str | None, group: type) -> str | None:
    """Replace the line ``options: ...`` of a docstring by the documentation of a group's options."""
    if docstring is None or group.__doc__ is None:  # python -OO
        return docstring
    _, _, attributes = group.__doc__.partition("Attributes:\n")
    lines = textwrap.indent(textwrap.dedent(attributes).strip(), " " * 8)
    return re.sub(r"^ {8}options: .*$", lambda _: lines, docstring, flags=re.MULTILINE)
