"""Options that functions of the face have in groups: typed, documented and given a default in one place.

A function takes a group as ``**options: Unpack[Group]``, which type checkers and editors know.  `takes` gives it the signature and
the docstring that it would have with every option written down, so that ``help`` and completion show them, and fills in defaults.
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
from autoddl.search.planner import Options

if TYPE_CHECKING:
    from autoddl.costmodel.stopping import Stop

__all__ = ["PLANNING_DEFAULTS", "PlanningOptions", "takes"]

Function = TypeVar("Function", bound=Callable[..., Any])


class PlanningOptions(TypedDict, total=False):
    """Of the model, the cluster, the training and the search.

    Attributes:
        nodes, devices_per_node: in place of the cluster's own.
        latency_s, bandwidth: of every link [s], [bytes/s for each device], in place of the cluster's own.
        heads, sequence, vocabulary: of a built-in transformer, in place of its own.
        batch: samples per step over all devices; 8 for each device by default.
        micro_batch: samples per pass over all devices (of a stage); chosen by default.
        precision: ``float32`` or ``mixed``; by default what the device usually trains in.
        optimizer: ``adam``, ``momentum`` or ``sgd``.
        recompute: of activations: always (True), never (False), or whatever is better (None).
        memory_limit_bytes: for each device; 9/10 of the device's memory by default.
        objective: what is minimised: ``step``, or ``communication`` alone.
        untied: a choice of its own for every repetition of a block.
        summa: offer Summa meshes to linear layers.
        seed, temperature_s, evaluations: of the random methods.
        time_limit_s: of one search (20 s by default); with a pipeline, processor time of the whole search (30 s).
        quiet: no progress bar; without it there is one where stderr is a terminal.
        stop: whoever requests it ends the search; the best plan until then is the answer.
    """

    nodes: int | None
    devices_per_node: int | None
    latency_s: float | None
    bandwidth: float | None
    heads: int | None
    sequence: int | None
    vocabulary: int | None
    batch: int | None
    micro_batch: int | None
    precision: str | None
    optimizer: str
    recompute: bool | None
    memory_limit_bytes: float | None
    objective: str
    untied: bool
    summa: bool
    seed: int
    temperature_s: float | None
    evaluations: int | None
    time_limit_s: float | None
    quiet: bool
    stop: Stop | None


#: The planner's own, but for the progress bar; None of all others.
PLANNING_DEFAULTS: Mapping[str, Any] = {**{each.name: each.default for each in fields(Options)}, "quiet": False}


def takes(group: type, defaults: Mapping[str, Any]) -> Callable[[Function], Function]:
    """Let a function of ``**options`` take those of a group: with their defaults, in its signature and in its docstring.

    Args:
        group: a TypedDict, documented under ``Attributes``.
        defaults: by name; None of options that are not in it.
    """
    own = {name: defaults.get(name) for name in group.__annotations__}

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        before = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        names = {each.name for each in before}

        @functools.wraps(function)
        def taking(*arguments: Any, **given: Any) -> Any:
            for name in given:
                if name not in own and name not in names:
                    hint = did_you_mean(name, [*own, *names])
                    said = f"{function.__name__}() got an unexpected keyword argument {name!r}"
                    raise TypeError(f"{said}{hint and '; ' + hint}")
            return function(*arguments, **{**own, **given})

        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=_shown(group, name))
            for name, value in own.items()
        ]
        taking.__signature__ = signature.replace(parameters=[*before, *options])  # type: ignore[attr-defined]
        taking.__doc__ = _documented(function.__doc__, group)
        return taking  # type: ignore[return-value]

    return decorate


def _shown(group: type, name: str) -> str:
    annotation = group.__annotations__[name]
    return str(getattr(annotation, "__forward_arg__", annotation))


def _documented(text: str | None, group: type) -> str | None:
    """A docstring with the lines of a group's options in the place of ``options: ...``."""
    if text is None or group.__doc__ is None:  # python -OO
        return text
    _, _, attributes = group.__doc__.partition("Attributes:\n")
    lines = textwrap.indent(textwrap.dedent(attributes).strip(), " " * 8)
    return re.sub(r"^ {8}options: .*$", lambda _: lines, text, flags=re.MULTILINE)
