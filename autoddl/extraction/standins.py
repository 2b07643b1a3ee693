"""Lets the objects that stand for modules in a lazy graph of OneFlow (its *proxies*) behave like these modules.

A forward pass runs on such an object. It may look at the classes of its parts, go through its parameters, take slices of its
sequences, or keep parts in lists of its own; OneFlow 0.9.0 refuses this, or aborts the process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

from autoddl.pipelines.runtime.load import load_oneflow

__all__ = ["stand_ins_as_modules", "stand_ins_called"]


@contextlib.contextmanager
def stand_ins_as_modules() -> Iterator[None]:
    """Let the objects that stand for modules in a lazy graph be instances of the classes of these modules, and lists of parameters
    be lists of tensors when a loop reads them, and let sequences of modules have slices, while the context is active."""
    flow: Any = load_oneflow()
    proxy: Any = importlib.import_module("oneflow.nn.graph.proxy")
    graph: Any = importlib.import_module("oneflow.nn.graph.graph")
    graph_module = proxy.GraphModule
    proxy_class, iterate = proxy.get_proxy_cls, proxy.ProxyParameterList.__iter__
    sequences = {kind: kind.__getitem__ for kind in (proxy.ProxySequential, proxy.ProxyModuleList)}

    class Instance(proxy.ProxyModule):  # type: ignore[misc]
        __class__ = property(lambda self: type(self.to(flow.nn.Module)))

        def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Any]]:
            """The tensors of the graph that stand for the parameters, for a forward pass that goes through them."""
            for name, _ in self.to(flow.nn.Module).named_parameters(recurse=recurse):
                owner = self
                *parts, last = name.split(".")
                for part in parts:
                    owner = owner._modules[part]
                tensor = owner._parameters[last]
                tensor.try_build()
                yield f"{prefix}.{name}" if prefix else name, tensor.lazy_origin

        def parameters(self, recurse: bool = True) -> Iterator[Any]:
            is_read = self.to(graph_module)._is_executing_forward
            return (
                (value for _, value in self.named_parameters("", recurse)) if is_read else super().parameters(recurse)
            )

    class Slice(list):  # type: ignore[type-arg]
        """Some modules of a sequence."""

        def __call__(self, x: Any) -> Any:
            return functools.reduce(lambda y, part: part(y), self, x)

    def item(self: Any, place: Any) -> Any:
        is_slice = isinstance(place, slice)
        return Slice(list(self._modules.values())[place]) if is_slice else sequences[type(self)](self, place)

    def choose(item: Any) -> Any:
        found = proxy_class(item)
        return Instance if found is proxy.ProxyModule else found

    proxy.get_proxy_cls = graph.get_proxy_cls = choose
    proxy.ProxyParameterList.__iter__ = lambda self: (self[i] for i in range(len(self)))
    for kind in sequences:
        kind.__getitem__ = item
    try:
        yield
    finally:
        proxy.get_proxy_cls = graph.get_proxy_cls = proxy_class
        proxy.ProxyParameterList.__iter__ = iterate
        for kind, item_of in sequences.items():
            kind.__getitem__ = item_of


@contextlib.contextmanager
def stand_ins_called(root: Any) -> Iterator[None]:
    """Call the objects that stand for a module and its parts in a lazy graph in place of them while the context is active.

    A module may keep its parts in a plain list, too, where OneFlow does not replace them. It aborts the process when such a part
    uses a parameter of the graph.
    """
    flow: Any = load_oneflow()
    call = flow.nn.Module.__call__
    stand_ins: dict[int, Any] = {}
    pending = [root]
    while pending:
        stand_in = pending.pop()
        stand_ins.setdefault(id(stand_in.to(flow.nn.Module)), stand_in)
        pending += [part for part in stand_in.__dict__["_modules"].values() if part is not None]

    def call_stand_in(self: Any, *args: Any, **kwargs: Any) -> Any:
        stand_in = stand_ins.get(id(self))
        return call(self, *args, **kwargs) if stand_in is None else stand_in(*args, **kwargs)

    flow.nn.Module.__call__ = call_stand_in
    try:
        yield
    finally:
        flow.nn.Module.__call__ = call
