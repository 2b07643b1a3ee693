"""Layer profiles: per layer the times of its forward and backward, the size of its output and what it keeps.

A profile is measured at one micro-batch b (the samples of one forward on one device). Activations and kept bytes are scaled
**linearly** to other micro-batches, which is exact; parameters do not depend on the micro-batch. The time of n samples on one
device is

    t(n) = t(b) max(n, b) / b

Above b this is an assumption, and a fair one. Below b a device is poorly utilised: linear scaling would be a lower bound of the
time there, t(b) is an upper bound and is taken (the *floor* for small batches). n counts the samples of one device: the share
of a micro-batch that is split over the replicas of a stage. A profile whose layers are priced instead of measured (``price``)
has no floor: it is priced at each n.

Two forms are read:

*our own JSON*, format ``autoddl-profile``, version 1, in seconds and bytes::

    {"format": "autoddl-profile", "version": 1, "name": "bert-48", "micro_batch": 2,
     "layers": [{"name": "embeddings", "forward_s": 5.6e-5, "backward_s": 0, "activation_bytes": 4325376,
                 "parameter_bytes": 127131648},
                {"name": "encoder", "repeat": 48, "forward_s": 0.00269, "backward_s": 0.00447,
                 "activation_bytes": 4325376, "parameter_bytes": 50384896, "stored_bytes": 145000000}],
     "edges": [[0, 1], [1, 2]]}

``repeat`` stands for that many equal layers. ``edges`` are pairs of positions (after repetition); by default each layer feeds
the next one. ``stored_bytes`` is what a layer keeps for its backward; by default only its output, which is a lower estimate for
a layer of several operations.

*PipeDream's text graph* (also DAPPLE's), times in milliseconds, sizes in bytes, one node or one tab-indented edge per line::

    node2 -- Conv2d_1_1 -- forward_compute_time=3.4, backward_compute_time=6.8, activation_size=384e6, parameter_size=6835
    <TAB>node1 -- node2

Nodes named ``Input...`` do no work and are left out: data is loaded where it is needed. The micro-batch is the ``N`` of
``pbs-N`` in the file's name, or an argument. ``activation_size`` is only the node's output. What a node keeps for its backward
is the field ``stored_size``, if it has one, and otherwise follows from what the node is:

- an operation that overwrites its input (``inplace`` in its name) keeps nothing;
- a *transformer layer*, recognised by its 12 h^2 + 13 h parameters in fp32, keeps per sequence of s tokens and with a = h/64
  heads

      4 (28 s h + 3 a s^2) bytes

  as TensorFlow 1, with which these profiles were measured, keeps a tensor per operation and in fp32: q, k, v (3 s h); softmax,
  dropout mask and their product (3 a s^2); context (s h); per residual branch the dropout mask, the sum and the scale of the
  normalisation (2 x 3 s h) and its output (2 x s h); the inner layer of width 4 h before and after its activation, and the two
  factors of the activation (16 s h). Its output has s h numbers per sequence, and s^2 more if it passes on an attention mask
  (an input that nothing trained precedes). For the 24 encoders of BERT (h = 1024, s = 384) that makes 1,736,441,856 bytes per
  sequence; DAPPLE's planner states 1,736,689,664;
- every other node is taken for one operation, and keeps its output.

Graphs need not be chains. Layers are put into a topological order (that of the file, if it is one) and stages are runs of that
order. A cut is crossed once by every tensor that is made before it and used after it: a stage passes on what it does not use
itself. A gradient comes back for the tensors that depend on something trained (a parameter, or a layer with a backward).
"""

from __future__ import annotations

import heapq
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from autoddl.costmodel.documents import Fields, check_document, load_document, parse_json, show_json
from autoddl.costmodel.errors import UserError, quote
from autoddl.costmodel.limits import MAX_BATCH, MAX_BYTES, MAX_FIGURE, MAX_PROFILE_LAYERS, MAX_SECONDS
from autoddl.costmodel.reading import parse_figure, read_text, shown_path, whole_number
from autoddl.costmodel.writing import write_document

__all__ = [
    "Cut",
    "Profile",
    "ProfileError",
    "ProfiledLayer",
    "load_profile",
    "parse_graph",
    "profile_names",
    "write_profile",
]

FORMAT = "autoddl-profile"
MILLISECOND = 1e-3

#: Upper bounds of a layer's figures.
_LARGEST = {
    "forward_s": MAX_SECONDS,
    "backward_s": MAX_SECONDS,
    "activation_bytes": float(MAX_BYTES),
    "parameter_bytes": float(MAX_BYTES),
    "kept_bytes": float(MAX_BYTES),
}


class ProfileError(UserError):
    """A profile that cannot be read or is inconsistent."""


class Cut(NamedTuple):
    """The bytes that cross a cut, for the profiled micro-batch.

    Attributes:
        forward_bytes: activations.
        backward_bytes: gradients.
    """

    forward_bytes: float
    backward_bytes: float


@dataclass(frozen=True)
class ProfiledLayer:
    """One layer at the profile's micro-batch, on one device.

    Attributes:
        name: of the layer.
        forward_s: time of a forward, in seconds.
        backward_s: time of a backward, in seconds.
        activation_bytes: size of its output, which crosses a cut behind it.
        parameter_bytes: size of its parameters.
        stored_bytes: what it keeps from its forward to its backward; None: only its output.
    """

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float
    stored_bytes: float | None = None

    @property
    def kept_bytes(self) -> float:
        """Bytes kept from the forward to the backward."""
        return self.activation_bytes if self.stored_bytes is None else self.stored_bytes

    @property
    def is_trained(self) -> bool:
        """Whether gradients reach it."""
        return self.parameter_bytes > 0 or self.backward_s > 0


@dataclass(frozen=True)
class Profile:
    """A model's layers in topological order, and the edges between them.

    Attributes:
        name: of the profile.
        micro_batch: number of samples that the figures are of.
        layers: in topological order.
        edges: (position of the producer, position of the consumer), producers first.
        price: the times of the layers for a number of samples on one device, as (forward, backward) in seconds; None: they are
            scaled from ``layers``. Documents do not contain it.

    Raises:
        ProfileError: there is no layer or no work, a number is out of range, or an edge goes backwards.
    """

    name: str
    micro_batch: int
    layers: tuple[ProfiledLayer, ...]
    edges: tuple[tuple[int, int], ...]
    price: Callable[[float], Sequence[tuple[float, float]]] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ProfileError(f"profile {quote(self.name)} has no layers")
        if len(self.layers) > MAX_PROFILE_LAYERS:
            raise ProfileError(
                f"profile {quote(self.name)} has {len(self.layers):,} layers, should have at most {MAX_PROFILE_LAYERS:,}"
            )
        if not 1 <= self.micro_batch <= MAX_BATCH:
            raise ProfileError(
                f"profile {quote(self.name)}: micro-batch {self.micro_batch} should be from 1 to {MAX_BATCH}"
            )
        for layer in self.layers:
            for figure, most in _LARGEST.items():
                value = getattr(layer, figure)
                if not 0 <= value <= most:
                    raise ProfileError(
                        f"profile {quote(self.name)}: {figure} of layer {quote(layer.name)} is {value}, "
                        f"should be from 0 to {most:g}"
                    )
        if not sum(layer.forward_s + layer.backward_s for layer in self.layers):
            raise ProfileError(f"profile {quote(self.name)}: no layer takes any time")
        for producer, consumer in self.edges:
            if not 0 <= producer < consumer < len(self.layers):
                raise ProfileError(
                    f"profile {quote(self.name)}: edge {producer} -> {consumer} should lead from a layer to a later one "
                    f"of 0 to {len(self.layers) - 1}"
                )

    @classmethod
    def chain(cls, name: str, micro_batch: int, layers: Iterable[ProfiledLayer]) -> Profile:
        """A profile in which each layer feeds only the next one."""
        rows = tuple(layers)
        return cls(name, micro_batch, rows, tuple((i, i + 1) for i in range(len(rows) - 1)))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def parameter_bytes(self) -> float:
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def least_micro_batch(self) -> int:
        """The smallest number of samples on one device whose time is known: below it the floor applies."""
        return self.micro_batch if self.price is None else 1

    def times(self, samples: float) -> list[tuple[float, float]]:
        """Per layer the seconds of a forward and of a backward of ``samples`` samples on one device (module's docstring).

        >>> profile = Profile.chain("one", 4, [ProfiledLayer("only", 1.0, 2.0, 8.0, 8.0)])
        >>> profile.times(8), profile.times(2)
        ([(2.0, 4.0)], [(1.0, 2.0)])
        """
        if self.price is not None:
            return list(self.price(samples))
        scale = max(samples, self.micro_batch) / self.micro_batch
        return [(layer.forward_s * scale, layer.backward_s * scale) for layer in self.layers]

    def trained(self) -> tuple[bool, ...]:
        """Per layer, whether its output has a gradient: it or a layer before it is trained."""
        trained = [layer.is_trained for layer in self.layers]
        for producer, consumer in sorted(self.edges):
            trained[consumer] = trained[consumer] or trained[producer]
        return tuple(trained)

    def cuts(self) -> tuple[Cut, ...]:
        """The bytes that cross each possible cut: entry c is the cut before layer c.

        Entries 0 and ``num_layers`` are the ends of the model, which nothing crosses.
        """
        last_use = list(range(self.num_layers))
        trained = self.trained()
        for producer, consumer in self.edges:
            last_use[producer] = max(last_use[producer], consumer)
        cuts = []
        crossing: list[int] = []
        for cut in range(self.num_layers + 1):
            crossing = [i for i in (*crossing, cut - 1) if i >= 0 and last_use[i] >= cut]
            cuts.append(
                Cut(
                    sum(self.layers[i].activation_bytes for i in crossing),
                    sum(self.layers[i].activation_bytes for i in crossing if trained[i]),
                )
            )
        return tuple(cuts)


@cache
def profile_names() -> tuple[str, ...]:
    """Names of the profiles that come with AutoDDL.

    >>> profile_names()
    ('bert-48', 'resnet-50', 'vgg-19')
    """
    files = resources.files("autoddl.pipelines.profiles").iterdir()
    return tuple(sorted(file.name[: -len(".json")] for file in files if file.name.endswith(".json")))


def load_profile(name: str | os.PathLike[str], micro_batch: int | None = None) -> Profile:
    """A profile that comes with AutoDDL, by name, or one from a file of either form.

    Args:
        name: of an included profile, or the path of a file.
        micro_batch: the profiled micro-batch, for a text graph whose file name does not contain it.

    Raises:
        UserError: there is no such profile or file, or it is malformed.
    """
    text = os.fspath(name)
    if text in profile_names():
        source = resources.files("autoddl.pipelines.profiles").joinpath(f"{text}.json")
        with resources.as_file(source) as path:
            return _from_fields(load_document(path, FORMAT))
    path = Path(text)
    if not os.path.exists(text):  # not Path.exists, which raises OSError for texts too long to be a file's name
        raise ProfileError(f"profile {quote(text)} is neither a file nor one of {', '.join(profile_names())}")
    content, where = read_text(path), shown_path(path)
    if content.lstrip().startswith("{"):
        return _from_fields(check_document(parse_json(content, where), FORMAT, 1, where))
    if micro_batch is None:
        batch = re.search(r"pbs-([0-9]+)", path.name)
        if batch is None:
            raise ProfileError(f"{where}: its name has no pbs-N; give the micro-batch that was profiled, profile_batch")
        micro_batch = whole_number(batch[1], f"{where}: micro-batch pbs-N", 1, MAX_BATCH)
    return parse_graph(content, micro_batch, where=where, name=re.sub(r"-pbs-[0-9]+$", "", path.stem))


# The JSON form


def from_document(value: Any, where: str) -> Profile:
    """A profile from its parsed JSON document.

    Raises:
        UserError: a field is missing, unknown or out of range.
    """
    return _from_fields(check_document(value, FORMAT, 1, where))


def _from_fields(fields: Fields) -> Profile:
    layers: list[ProfiledLayer] = []
    for entry in fields.objects("layers"):
        layers += _layers(entry, MAX_PROFILE_LAYERS - len(layers))
    edges = [(i, i + 1) for i in range(len(layers) - 1)]
    if "edges" in fields:
        edges = []
        for pair in fields.sequence("edges"):
            if not (isinstance(pair, list) and len(pair) == 2 and all(type(end) is int for end in pair)):
                raise ProfileError(
                    f"{fields.where}: edges holds {show_json(pair)}, should hold pairs of layer positions"
                )
            edges.append((pair[0], pair[1]))
    profile = Profile(fields.text("name"), fields.integer("micro_batch", 1), tuple(layers), tuple(edges))
    fields.finish(ignored=("description",))
    return profile


def _layers(entry: Fields, most: int) -> list[ProfiledLayer]:
    """The layer, repeated as its entry says; at most ``most`` layers."""
    repeat = entry.integer("repeat", 1) if "repeat" in entry else 1
    if repeat > most:
        raise ProfileError(
            f"{entry.where}: repeat is {repeat}; with it the profile should have at most {MAX_PROFILE_LAYERS:,} layers"
        )
    name = entry.text("name")
    layer = ProfiledLayer(
        name=name,
        forward_s=entry.number("forward_s"),
        backward_s=entry.number("backward_s"),
        activation_bytes=entry.number("activation_bytes"),
        parameter_bytes=entry.number("parameter_bytes"),
        stored_bytes=entry.number("stored_bytes") if "stored_bytes" in entry else None,
    )
    entry.finish()
    if repeat == 1:
        return [layer]
    return [replace(layer, name=f"{name}_{i}") for i in range(repeat)]


def to_document(profile: Profile) -> dict[str, Any]:
    """The JSON document that :func:`load_profile` reads back as an equal profile."""
    layers = []
    for layer in profile.layers:
        row: dict[str, Any] = {
            "name": layer.name,
            "forward_s": layer.forward_s,
            "backward_s": layer.backward_s,
            "activation_bytes": layer.activation_bytes,
            "parameter_bytes": layer.parameter_bytes,
        }
        if layer.stored_bytes is not None:
            row["stored_bytes"] = layer.stored_bytes
        layers.append(row)
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": 1,
        "name": profile.name,
        "micro_batch": profile.micro_batch,
        "layers": layers,
    }
    if profile.edges != Profile.chain("", 1, profile.layers).edges:
        document["edges"] = [list(edge) for edge in profile.edges]
    return document


def write_profile(path: str | os.PathLike[str], profile: Profile) -> None:
    """Write a profile as JSON.

    Raises:
        UserError: the file cannot be written.
    """
    write_document(path, to_document(profile))


# PipeDream's text graph

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


def parse_graph(text: str, micro_batch: int, where: str = "graph", name: str = "graph") -> Profile:
    """Read PipeDream's text graph; form and units are those of the module's docstring.

    Raises:
        ProfileError: naming ``where``, the line number and the fault.
    """
    nodes: dict[str, ProfiledLayer] = {}
    edges: list[tuple[str, str, int]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if len(nodes) > 2 * MAX_PROFILE_LAYERS:  # twice: inputs are nodes, but no layers
            raise ProfileError(f"{where}: should have at most {MAX_PROFILE_LAYERS:,} layers")
        if not line.strip():
            continue
        place = f"{where}, line {number}"
        parts = [part.strip() for part in line.strip().split(" -- ")]
        if line[0].isspace():
            if len(parts) != 2 or not all(parts):
                raise ProfileError(f"{place}: {quote(line.strip())} should be an edge, such as 'node1 -- node2'")
            edges.append((parts[0], parts[1], number))
            continue
        if len(parts) < 3 or not all(parts):
            raise ProfileError(
                f"{place}: {quote(line.strip())} should be 'node -- name -- forward_compute_time=..., ...'"
            )
        if parts[0] in nodes:
            raise ProfileError(f"{place}: {quote(parts[0])} is defined a second time")
        nodes[parts[0]] = _node(parts[1], parts[2], place)
    for producer, consumer, number in edges:
        for end in (producer, consumer):
            if end not in nodes:
                raise ProfileError(f"{where}, line {number}: {quote(end)} is not a node of this graph")
    kept = [node for node, layer in nodes.items() if not layer.name.startswith("Input")]
    position = {node: i for i, node in enumerate(kept)}
    pairs = sorted({(position[a], position[b]) for a, b, _ in edges if a in position and b in position})
    order = _topological_order(len(kept), pairs)
    if len(order) < len(kept):
        looped = nodes[next(node for node in kept if position[node] not in set(order))].name
        raise ProfileError(f"{where}: the edges form a cycle through or before layer {quote(looped)}")
    rank = {i: place_in_order for place_in_order, i in enumerate(order)}
    return _with_kept_bytes(
        Profile(
            name=name,
            micro_batch=micro_batch,
            layers=tuple(nodes[kept[i]] for i in order),
            edges=tuple(sorted((rank[a], rank[b]) for a, b in pairs)),
        )
    )


#: Bytes of a number in the public profiles, which are all of fp32.
_FP32 = 4
#: Width of a head of attention in BERT and most transformers.
_HEAD_WIDTH = 64


def _with_kept_bytes(profile: Profile) -> Profile:
    """The profile with the bytes that each node keeps, where they are not given (rules: module's docstring)."""
    trained = profile.trained()
    masked = {consumer for producer, consumer in profile.edges if not trained[producer]}
    layers = []
    for i, layer in enumerate(profile.layers):
        stored = layer.stored_bytes
        if stored is None and "inplace" in layer.name:
            stored = 0.0
        elif stored is None:
            stored = _kept_by_transformer(layer, profile.micro_batch, passes_mask=trained[i] and i in masked)
        layers.append(replace(layer, stored_bytes=stored))
    return replace(profile, layers=tuple(layers))


def _kept_by_transformer(layer: ProfiledLayer, micro_batch: int, passes_mask: bool) -> float | None:
    """Bytes that a transformer layer keeps; None if its parameters or its output are not those of one."""
    parameters, output = layer.parameter_bytes / _FP32, layer.activation_bytes / _FP32 / micro_batch
    hidden = round((math.sqrt(169 + 48 * parameters) - 13) / 24)
    if not hidden or hidden % _HEAD_WIDTH or 12 * hidden**2 + 13 * hidden != parameters:
        return None
    sequence = round((math.sqrt(hidden**2 + 4 * output) - hidden) / 2) if passes_mask else round(output / hidden)
    if not sequence or sequence * hidden + passes_mask * sequence**2 != output:
        return None
    scores = hidden // _HEAD_WIDTH * sequence**2
    return float(_FP32 * micro_batch * (28 * sequence * hidden + 3 * scores))


def _node(name: str, text: str, place: str) -> ProfiledLayer:
    values: dict[str, float] = {}
    for item in re.split(r",\s*(?![^\[]*\])", text):
        key, separator, value = item.partition("=")
        if not separator:
            raise ProfileError(f"{place}: {quote(item)} should read 'field=number'")
        values[key.strip()] = _number(key.strip(), value.strip(), place)
    missing = [field for field in _FIELDS if field not in values]
    if missing:
        raise ProfileError(f"{place}: {missing[0]} is missing")
    forward, backward, activation, parameters = (values[field] for field in _FIELDS)
    return ProfiledLayer(
        name, forward * MILLISECOND, backward * MILLISECOND, activation, parameters, values.get("stored_size")
    )


def _number(field: str, text: str, place: str) -> float:
    """A number; PipeDream's list ``[a; b]``, of a layer with several outputs, counts as the sum of its entries."""
    total = sum(map(parse_figure, text.strip("[]").split(";")))
    if math.isnan(total) or (field in (*_FIELDS, "stored_size") and total < 0):
        raise ProfileError(f"{place}: {quote(field)} is {quote(text)}, should be a number from 0 to {MAX_FIGURE:g}")
    return total


def _topological_order(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The topological order closest to the given one; shorter than ``count`` if the graph has a cycle."""
    consumers: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for producer, consumer in edges:
        consumers[producer].append(consumer)
        missing[consumer] += 1
    ready = [i for i in range(count) if not missing[i]]
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for consumer in consumers[node]:
            missing[consumer] -= 1
            if not missing[consumer]:
                heapq.heappush(ready, consumer)
    return order
