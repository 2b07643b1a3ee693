"""The fields of a ``config.json``, with the defaults of HuggingFace's configuration classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from autoddl.costmodel.documents import show_json
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.limits import MAX_SIZES

__all__ = ["ACTIVATIONS", "Config"]

#: Epilogues by HuggingFace's names of activations.
ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_10": "gelu",
    "gelu_accurate": "gelu",
    "gelu_fast": "gelu",
    "gelu_new": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


class Config:
    """The fields of a configuration, with defaults; errors name the field and the values allowed.

    Args:
        value: the parsed document, without other names of fields.
        defaults: of the configuration class; None: derived from other fields.
        name: of the model.
        kind: the ``model_type``.
        where: the path of the document, for errors.

    Attributes:
        notes: what the graph leaves out: sentences without a period.  Readers add to it.
        window: the sliding window that the graph leaves out, and the layers that have it; None if there is none.
    """

    def __init__(self, value: Mapping[str, Any], defaults: Mapping[str, Any], name: str, kind: str, where: str):
        self._value, self._defaults, self._where = value, defaults, where
        self.name, self.kind = name, kind
        self.notes: list[str] = []
        self.window: tuple[int, str] | None = None

    def fault(self, name: str, value: Any, right: str) -> UserError:
        return UserError(f"{self._where}: {name} is {show_json(value)}, should be {right}")

    def get(self, name: str) -> Any:
        return self._value.get(name, self._defaults[name])

    def count(self, name: str, size: str, minimum: int = 1) -> int:
        """A whole number; 0 for null if the default is null.

        Args:
            name: of the field.
            size: the size of `MAX_SIZES` that bounds it.
            minimum: the smallest value.
        """
        value, largest = self.get(name), MAX_SIZES[size]
        if value is None and self._defaults[name] is None:
            return 0
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= largest:
            raise self.fault(name, value, f"a whole number from {minimum} to {largest}")
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.fault(name, value, "true or false")
        return value

    def activation(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.fault(name, value, f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def refuse(self, name: str, *allowed: Any) -> None:
        """Raise an error if the field has none of the allowed values, which would make another architecture."""
        value = self.get(name)
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
            raise self.fault(name, value, f"{json.dumps(allowed[0])}: other architectures are not built in")

    def note_rotary(self) -> None:
        """Note what is left out of rotary positions: scaled angles, and features that are not rotated."""
        scaling = self._value.get("rope_scaling")
        if scaling:
            way = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else scaling
            self.notes.append(f"the scaling of rotary positions (rope_scaling {show_json(way)}) is left out")

    def note_partial_rotary(self, part: Any) -> None:
        """Note that only a part of the features of a head is rotated.

        Args:
            part: the rotated features, as text or number; nothing is noted for 1.
        """
        if part != 1:
            self.notes.append(
                f"rotary positions apply to a part of each head's features ({show_json(part)}), which has no price"
            )

    def note_window(self, name: str, layers: str) -> None:
        """Note a sliding window, if the field is not null.

        Args:
            name: of the field.
            layers: the layers that have the window, such as "all layers".
        """
        if self.get(name) is not None:
            self.window = self.count(name, "sequence"), layers
