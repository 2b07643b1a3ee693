"""Training problems: the built-in families on the bytes of a text. Needs no OneFlow here: only ranks load problems.

==========================  =====================================================  =========================================
problem                     a sample                                               loss
==========================  =====================================================  =========================================
`TextModel`, gpt and llama  ``sequence`` bytes at a random position of the text    cross entropy of each next byte
`TextModel`, bert           the same, with 15 % of the bytes masked                cross entropy of the masked bytes
`TextPerceptron`            as many bytes as the perceptron has inputs, scaled     squared error of the next bytes
==========================  =====================================================  =========================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.limits import MAX_TEXT_BYTES
from autoddl.costmodel.reading import read_bytes

from ..samples import MASK, following_bytes, masked_bytes, passages

__all__ = ["FAMILIES", "TextModel", "TextPerceptron", "TrainingProblem", "shipped_text"]

FAMILIES = ("gpt", "bert", "llama")
_NUM_BYTES = 256

Batches = Callable[[int], tuple[np.ndarray, np.ndarray]]


class TrainingProblem(Protocol):
    """A model and its data; picklable."""

    @property
    def unit(self) -> str:
        """The unit of throughput, for example tokens."""

    @property
    def units_per_sample(self) -> int: ...

    def check(self) -> None:
        """Check what can be checked without OneFlow.

        Raises:
            UserError: a size or the text does not fit.
        """

    def load(self, micro_batch: int, seed: int) -> tuple[Any, Batches]:
        """The model and its data; called on ranks.

        Args:
            micro_batch: samples per micro-batch.
            seed: of initial values and data.

        Returns:
            The `Chain` or `PlannedModel`, with the same initial values on every rank, and a function from a micro-batch's index to
            its (inputs, targets).

        Raises:
            UserError: the model cannot be loaded.
        """


def shipped_text() -> Path:
    """A text for users who give none: our license."""
    return Path(__file__).with_name("license.txt")


@dataclass(frozen=True)
class TextModel:
    """A transformer on the bytes of a text.

    Attributes:
        text: path of the text.
        family: one of `FAMILIES`.
        layers: number of blocks.
        width: features of the residual stream.
        heads: attention heads.
        sequence: bytes per sample.
        tied: whether the output projection is the embedding.
    """

    text: Path
    family: str
    layers: int
    width: int
    heads: int
    sequence: int
    tied: bool = True

    @property
    def unit(self) -> str:
        return "tokens"

    @property
    def units_per_sample(self) -> int:
        return self.sequence

    def check(self) -> None:
        for name in ("layers", "width", "heads", "sequence"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; give a whole number of at least 1")
        parts = self.heads * (2 if self.family == "llama" else 1)
        if self.width % parts:
            even = " of even width" if self.family == "llama" else ""
            raise UserError(f"width {self.width} does not divide into {self.heads} heads{even}")
        _read(self.text, self.sequence + 1)

    def load(self, micro_batch: int, seed: int) -> tuple[Any, Batches]:
        from ..models import GPT, Bert, Llama, initialize
        from .chain import chain_of

        sizes = (self.layers, self.width, self.heads)
        model: Any
        if self.family == "gpt":
            model = GPT(*sizes, _NUM_BYTES, self.sequence, tied=self.tied)
        elif self.family == "bert":
            model = Bert(*sizes, MASK + 1, self.sequence, tied=self.tied)
        else:
            model = Llama(*sizes, _NUM_BYTES, _gated(self.width), tied=self.tied)
        return chain_of(initialize(model, seed)), self.batches(micro_batch, seed)

    @property
    def num_tokens(self) -> int:
        """Least size of the vocabulary."""
        return MASK + 1 if self.family == "bert" else _NUM_BYTES

    def batches(self, micro_batch: int, seed: int) -> Batches:
        """A function from a micro-batch's index to its (inputs, targets)."""
        draw = masked_bytes if self.family == "bert" else following_bytes
        data = _read(self.text, self.sequence + 1)
        return lambda number: draw(np.random.default_rng([seed, number]), data, micro_batch, self.sequence)


@dataclass(frozen=True)
class TextPerceptron:
    """A multi-layer perceptron that predicts the next bytes, as numbers from -1 to 1.

    Attributes:
        text: path of the text.
        widths: features of its input, its hidden layers and its output.
    """

    text: Path
    widths: tuple[int, ...]

    @property
    def unit(self) -> str:
        return "samples"

    @property
    def units_per_sample(self) -> int:
        return 1

    def check(self) -> None:
        if len(self.widths) < 2 or min(self.widths) < 1:
            shown = ", ".join(map(str, self.widths))
            raise UserError(f"widths of a perceptron are {shown}; give at least two numbers of at least 1")
        _read(self.text, self.widths[0] + self.widths[-1])

    def load(self, micro_batch: int, seed: int) -> tuple[Any, Batches]:
        from ..models import MLP, initialize
        from .chain import chain_of

        num_inputs, length = self.widths[0], self.widths[0] + self.widths[-1]
        data = _read(self.text, length)

        def batches(number: int) -> tuple[np.ndarray, np.ndarray]:
            rows = passages(np.random.default_rng([seed, number]), data, micro_batch, length)
            scaled = (rows / 127.5 - 1).astype(np.float32)
            return scaled[:, :num_inputs], scaled[:, num_inputs:]

        return chain_of(initialize(MLP(self.widths), seed)), batches


def _gated(width: int) -> int:
    """LLaMA's inner width: 8/3 of the width, so that three matrices have the parameters of two; a multiple of 8."""
    return -(-width // 3) * 8


def _read(path: Path, num_bytes: int) -> np.ndarray:
    """The bytes of a text, at least ``num_bytes``, as integers."""
    data = np.frombuffer(read_bytes(path, "text", MAX_TEXT_BYTES), dtype=np.uint8).astype(np.int64)
    if len(data) < num_bytes:
        raise UserError(f"text {path} has {len(data)} bytes; a sample takes {num_bytes}")
    return data
