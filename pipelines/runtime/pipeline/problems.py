"""Training problems: built-in models that learn the bytes of a text. Needs no OneFlow: only the ranks load the models.

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

from ..samples import passages, text_task
from .data import BatchSource

__all__ = [
    "FAMILIES",
    "CountedInSamples",
    "TextModel",
    "TextPerceptron",
    "TrainingProblem",
    "random_batches",
    "shipped_text",
]

#: The transformer families that a `TextModel` can have.
FAMILIES = ("gpt", "bert", "llama")


class TrainingProblem(Protocol):
    """A model and its data. Problems are pickled to be sent to the ranks."""

    @property
    def unit(self) -> str:
        """Unit of throughput in the plural, for example "tokens"."""

    @property
    def units_per_sample(self) -> int:
        """Number of units in a sample."""

    def check(self) -> None:
        """Check the sizes and the text, as far as this is possible without OneFlow.

        Raises:
            UserError: A size is not allowed, or the text cannot be read or is too short.
        """

    def load(self, micro_batch: int, seed: int) -> tuple[Any, BatchSource]:
        """Build the model and its data; called on every rank.

        Args:
            micro_batch: Samples per micro-batch.
            seed: Seed of the initial values and of the data.

        Returns:
            The `ModuleChain` or `PlannedModel`, with the same initial values on every rank, and a function that maps the number of
            a micro-batch to its (inputs, targets).

        Raises:
            UserError: The model cannot be built.
        """


class CountedInSamples:
    """Mixin for training problems whose throughput is counted in samples."""

    @property
    def unit(self) -> str:
        return "samples"

    @property
    def units_per_sample(self) -> int:
        return 1


def random_batches(seed: int, draw: Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]) -> BatchSource:
    """Return micro-batches that are drawn at random, reproducibly and in any order.

    Args:
        seed: Seed of all micro-batches.
        draw: Draws the (inputs, targets) of one micro-batch. Its generator is seeded by ``seed`` and the micro-batch's number.

    >>> batches = random_batches(0, lambda rng: (rng.integers(10, size=3), rng.integers(10, size=3)))
    >>> (batches(7)[0] == batches(7)[0]).all()
    True
    """
    return lambda number: draw(np.random.default_rng([seed, number]))


def shipped_text() -> Path:
    """Return the path of the text that is learned by default: AutoDDL's license."""
    return Path(__file__).with_name("license.txt")


@dataclass(frozen=True)
class TextModel:
    """A transformer on the bytes of a text.

    Attributes:
        text: Path of the text.
        family: One of `FAMILIES`.
        layers: Number of transformer blocks.
        width: Number of features of the residual stream.
        heads: Number of attention heads.
        sequence: Number of bytes in a sample.
        tied: Whether the output projection shares the weight of the embedding.
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
        _read_text(self.text, self.sequence + 1)

    def load(self, micro_batch: int, seed: int) -> tuple[Any, BatchSource]:
        from ..models import GPT, Bert, Llama, initialize
        from .chain import module_chain_of

        sizes = (self.layers, self.width, self.heads)
        model: Any
        if self.family == "gpt":
            model = GPT(*sizes, self.num_tokens, self.sequence, tied=self.tied)
        elif self.family == "bert":
            model = Bert(*sizes, self.num_tokens, self.sequence, tied=self.tied)
        else:
            model = Llama(*sizes, self.num_tokens, _gated_width(self.width), tied=self.tied)
        return module_chain_of(initialize(model, seed)), self.batches(micro_batch, seed)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that samples consist of: the smallest possible vocabulary."""
        return text_task(self.family).num_tokens

    def batches(self, micro_batch: int, seed: int) -> BatchSource:
        """Return the micro-batches of ``micro_batch`` samples each, by number."""
        samples = text_task(self.family).samples
        data = _read_text(self.text, self.sequence + 1)
        return random_batches(seed, lambda rng: samples(rng, data, micro_batch, self.sequence))


@dataclass(frozen=True)
class TextPerceptron(CountedInSamples):
    """A multi-layer perceptron that predicts the next bytes of a text, scaled to numbers from -1 to 1.

    Attributes:
        text: Path of the text.
        widths: Number of features of the input, of each hidden layer, and of the output.
    """

    text: Path
    widths: tuple[int, ...]

    def check(self) -> None:
        if len(self.widths) < 2 or min(self.widths) < 1:
            shown = ", ".join(map(str, self.widths))
            raise UserError(f"widths of a perceptron are {shown}; give at least two numbers of at least 1")
        _read_text(self.text, self.widths[0] + self.widths[-1])

    def load(self, micro_batch: int, seed: int) -> tuple[Any, BatchSource]:
        from ..models import MLP, initialize
        from .chain import module_chain_of

        num_inputs, length = self.widths[0], self.widths[0] + self.widths[-1]
        data = _read_text(self.text, length)

        def draw(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
            rows = passages(rng, data, micro_batch, length)
            scaled = (rows / 127.5 - 1).astype(np.float32)
            return scaled[:, :num_inputs], scaled[:, num_inputs:]

        return module_chain_of(initialize(MLP(self.widths), seed)), random_batches(seed, draw)


def _gated_width(width: int) -> int:
    """Return LLaMA's inner width: 8/3 of ``width``, rounded up to a multiple of 8.

    The three matrices of a gated block then have as many parameters as the two of an ordinary one of inner width 4 ``width``.
    """
    return -(-width // 3) * 8


def _read_text(path: Path, min_bytes: int) -> np.ndarray:
    """Return the bytes of a text as integers; raise UserError if there are fewer than ``min_bytes``."""
    data = np.frombuffer(read_bytes(path, "text", MAX_TEXT_BYTES), dtype=np.uint8).astype(np.int64)
    if len(data) < min_bytes:
        raise UserError(f"text {path} has {len(data)} bytes; a sample takes {min_bytes}")
    return data
