"""Finds rotary positions: how attention turns its queries and keys by their positions.

Rotary positions (Su et al., RoFormer, 2021) turn r of the features of each head, in pairs (a, b). The pair i of position n,
counted from 0, is turned by the angle n f_i, with the frequency f_i = base^(-2 i / r):

    a' = a cos(n f_i) - b sin(n f_i)        b' = b cos(n f_i) + a sin(n f_i)

Pairs are the features (i, i + r / 2) or the neighbours (2 i, 2 i + 1). Models write this in many ways: with tables of cosines or
with angles that the forward pass computes, with halves that are joined again or with every other feature, with or without a factor.
So it is recognised by what it does. The traced operators between the source and the queries run on numbers, and

1. rows of ones show the common factor at position 0, where no feature is turned;
2. rows of which all numbers are different show there which feature of the source each feature of each head is;
3. random rows show, by complex division of the pairs, the angles of all positions, and with those of the last pair the base.

All numbers have to be those of the formula then.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from .behaviour import Part, part_between
from .operators import OperatorGraph

__all__ = ["Turn", "rotary_attributes", "turn_of"]

#: Largest relative error of turned features: tables of cosines have single precision, and so have the angles in radians.
_ERROR, _ERROR_OF_POSITION = 2e-5, 5e-7
#: Base of pairs that are all turned by whole radians.
_ANY_BASE = 10_000


@dataclass(frozen=True)
class Turn:
    """What happens to the queries or keys between their source and the scores.

    Attributes:
        places: Which feature of the source each feature of each head is; array of shape (heads, features of a head).
        factor: What all of them are multiplied by.
        base: The base of the frequencies; 0 if nothing is turned.
        features: The number r of turned features, the first ones of a head.
        is_of_neighbours: Whether pairs are (2 i, 2 i + 1).
    """

    places: np.ndarray
    factor: float
    base: int = 0
    features: int = 0
    is_of_neighbours: bool = False

    @property
    def angles(self) -> tuple[int, int, bool]:
        """Base, turned features and pairs."""
        return self.base, self.features, self.is_of_neighbours


def rotary_attributes(angles: tuple[int, int, bool], head_dim: int, said: float | None) -> dict[str, int]:
    """Return what a layer says of rotary positions: nothing if its module says it all, as in the models of known families.

    Args:
        angles: See `Turn.angles`.
        head_dim: Features of a head.
        said: The base that the module says (:func:`autoddl.pipelines.runtime.facts.rotary_base_of`).
    """
    base, features, is_of_neighbours = angles
    if (base, features, is_of_neighbours) == (said or 0, base and head_dim, False):
        return {}
    return {
        "rotary_base": base,
        **({"rotary_features": features} if base and features != head_dim else {}),
        **({"rotary_neighbours": 1} if is_of_neighbours else {}),
    }


def turn_of(
    graph: OperatorGraph, tensor: str, source: str, length: int, head_dim: int, *, is_transposed: bool
) -> Turn | str:
    """Return how queries or keys are turned, or why ranks cannot do that, as the end of a sentence.

    Args:
        graph: The traced operators.
        tensor: The queries or keys of the product of the scores.
        source: The tensor that they are computed from.
        length: Number of positions.
        head_dim: Features of a head.
        is_transposed: Whether the last two dimensions of ``tensor`` are features and positions.
    """
    part = part_between(graph, (source,), tensor)
    if isinstance(part, str):
        return f"its attention {part} between rows and their queries or keys"
    features = graph.elements(source) // (graph.batch * length)
    return _turn(part, length, features, head_dim, is_transposed)


@functools.lru_cache(maxsize=16)  # the layers of a model are alike
def _turn(part: Part, length: int, features: int, head_dim: int, is_transposed: bool) -> Turn | str:
    """See `turn_of`; ``part`` computes queries or keys from the source."""

    def of_heads(values: np.ndarray) -> np.ndarray:
        """Return the result for a source (positions, features): (heads, positions, features of a head)."""
        y = part.run(values)
        y = y.reshape(-1, *y.shape[-2:])
        return np.swapaxes(y, 1, 2) if is_transposed else y

    other = "its attention computes its queries or keys from their rows in another way than by rotary positions"
    random = np.random.default_rng(0)
    x = random.uniform(1.0, 2.0, (length, features)) * random.choice((-1.0, 1.0), (length, features))
    x[0] = 1.0
    first = of_heads(x)
    factor = float(first[0, 0, 0])
    if first.shape[1:] != (length, head_dim) or not factor or not np.allclose(first[:, 0], factor, rtol=1e-5):
        return other
    x[0] = random.permutation(np.arange(features) * 2 - features + 1) / features
    y = of_heads(x) / factor
    if not np.isfinite(y).all():
        return other
    ascending = np.argsort(x[0])
    places = ascending[np.searchsorted(x[0], y[:, 0] - 1.0 / features, sorter=ascending).clip(0, features - 1)]
    unturned = np.swapaxes(x[:, places], 0, 1)
    if not np.allclose(y[:, 0], unturned[:, 0], rtol=1e-5, atol=1e-6):
        return other
    if np.allclose(y, unturned, rtol=1e-5):
        return Turn(places, factor)
    turned = np.nonzero(np.abs(y - unturned).max(axis=(0, 1)) > 1e-4)[0]
    for number in dict.fromkeys((head_dim, int(turned[-1]) // 2 * 2 + 2)):
        for is_of_neighbours in (False, True):
            pairs = _pairs(number, is_of_neighbours)
            base = _base_of(_complex(y, pairs)[:, 1:], _complex(unturned, pairs)[:, 1:])
            if base and np.allclose(y[..., number:], unturned[..., number:], rtol=1e-5):
                return Turn(places, factor, base, number, is_of_neighbours)
    return f"{other} with a whole number as base"


def _pairs(features: int, is_of_neighbours: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the second feature of each pair."""
    pairs = np.arange(features).reshape(-1, 2).T if is_of_neighbours else np.arange(features).reshape(2, -1)
    return pairs[0], pairs[1]


def _complex(x: np.ndarray, pairs: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    return x[..., pairs[0]] + 1j * x[..., pairs[1]]


def _base_of(turned: np.ndarray, unturned: np.ndarray) -> int:
    """Return the base of the frequencies of pairs; 0 if there is none.

    Args:
        turned, unturned: Pairs of features as complex numbers, arrays of shape (heads, positions from 1 on, pairs).
    """
    turns = turned / unturned
    mean = turns.mean(axis=0)
    number = mean.shape[-1]
    angle = 0.0
    for position, last in enumerate(mean[:, -1], start=1):  # far positions tell the frequency more exactly
        near = angle * position
        angle = (near + float(np.angle(last * np.exp(-1j * near)))) / position
    exact = float(_ANY_BASE) if number == 1 else max(angle, 1e-12) ** (-number / (number - 1))
    positions = np.arange(1, len(mean) + 1)[:, None]
    # Few positions do not tell the last digits.
    for base in dict.fromkeys(round(float(f"{exact:.{digits}g}")) for digits in range(1, 9)):
        if base < 1:
            continue
        expected = np.exp(1j * positions * float(base) ** (-np.arange(number) / number))
        if (np.abs(turns - expected) <= _ERROR + _ERROR_OF_POSITION * positions).all():
            return base
    return 0
