"""The built-in models and clusters as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoddl.costmodel.units import format_bytes, format_seconds

from .tables import Column, Table, Text

__all__ = ["clusters_text", "models_text"]

#: An entry of the document of ``autoddl models --json`` or ``autoddl clusters --json``.
Record = Mapping[str, Any]

_MODELS: tuple[Column[Record], ...] = (
    Column("model", lambda model: model["name"]),
    Column("parameters", lambda model: f"{model['num_parameters']:,}", right=True),
    Column("layers", lambda model: f"{model['num_layers']}", right=True, rank=1),
    Column("sample", lambda model: f"{model['sample']} of {' x '.join(map(str, model['sample_shape']))}", rank=2),
    Column("GFLOPs forward", lambda model: f"{model['flops'] / 1e9:,.0f}", right=True, rank=3),
)
_CLUSTERS: tuple[Column[Record], ...] = (
    Column("cluster", lambda cluster: cluster["name"]),
    Column("nodes", lambda cluster: f"{cluster['num_nodes']} x {cluster['devices_per_node']}"),
    Column("device", lambda cluster: cluster["device"]),
    Column("memory", lambda cluster: format_bytes(cluster["memory_bytes"]), right=True, rank=1),
    Column("between nodes", lambda cluster: _link(cluster["inter_node"]), rank=2),
    Column("inside a node", lambda cluster: _link(cluster["intra_node"]), rank=3),
)


def models_text(records: Sequence[Record], forms: Sequence[str]) -> Text:
    """Return a table of models.

    Args:
        records: the models, from the document of ``autoddl models --json``.
        forms: the forms in which other models can be given, such as ``gpt:LAYERSxWIDTH``.
    """
    return Text(([Table.of(_MODELS, records, indent="")], [f"Others: {', '.join(forms)}"]))


def clusters_text(records: Sequence[Record]) -> Text:
    """Return a table of clusters, and how to plan for others.

    Args:
        records: the clusters, from the document of ``autoddl clusters --json``.
    """
    others = "Other numbers of nodes and devices: nodes=N, devices_per_node=G. Your own cluster: autoddl calibrate, autoddl fit."
    return Text(([Table.of(_CLUSTERS, records, indent="")], [others]))


def _link(link: Mapping[str, float]) -> str:
    return f"{link['bandwidth'] / 1e9:.3g} GB/s, {format_seconds(link['latency_s'])}"
