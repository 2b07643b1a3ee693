"""What the functions of layers compute, in double precision with numpy. Needs no OneFlow.

Each `Case` has the shapes of its tensors and a numpy function of them. `projected_gradients` differentiates the function by finite
differences, so gradients are compared with something that knows nothing of backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from scipy.special import erf

__all__ = ["CASES", "IMAGES", "TARGETS", "TOKENS", "Case", "draw", "projected_gradients", "relative_error"]

Arrays = Sequence[np.ndarray]

SAMPLES, ROWS, FEATURES, VOCABULARY = 4, 6, 16, 24
TOKENS = np.random.default_rng(11).integers(0, VOCABULARY, (SAMPLES, ROWS))
TARGETS = np.random.default_rng(12).integers(0, VOCABULARY, (SAMPLES, ROWS))
TARGETS[0, :2] = -100  # ignored, as in nn.functional.cross_entropy
GOALS = np.random.default_rng(13).standard_normal((SAMPLES, ROWS, FEATURES)).astype(np.float32)
#: Images of two channels and 5 x 5 pixels, as data and as the shape of activations.
IMAGES = np.random.default_rng(14).standard_normal((SAMPLES, 2, 5, 5)).astype(np.float32)
_IMAGES = (SAMPLES, 1, 50)
_STEP, _NUM_DIRECTIONS = 1e-5, 24


@dataclass(frozen=True)
class Case:
    """A function of layers.

    Attributes:
        shapes: of its tensors.
        function: what it computes of arrays of double precision.
        positive: whether its inputs are kept away from zero, where the function has a kink.
    """

    shapes: tuple[tuple[int, ...], ...]
    function: Callable[..., np.ndarray]
    positive: bool = False


def _softmax(x: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def _attend(
    x: np.ndarray,
    groups: int,
    group_heads: int,
    head_dim: int,
    causal: bool,
    theta: float | None,
    biases: np.ndarray | None = None,
    rotate: Callable[[np.ndarray, float], np.ndarray] | None = None,
):
    """Attention head by head; biases of the scores are (heads, queries, keys)."""
    rotate = rotate or _rotate
    samples, sequence, _ = x.shape
    parts = x.reshape(samples, sequence, groups, group_heads + 2, head_dim)
    out = np.empty((samples, sequence, groups, group_heads, head_dim))
    for group in range(groups):
        key, value = parts[:, :, group, -2], parts[:, :, group, -1]
        for head in range(group_heads):
            query = parts[:, :, group, head]
            turned = [query, key] if theta is None else [rotate(query, theta), rotate(key, theta)]
            scores = np.einsum("sqd,skd->sqk", *turned) / sqrt(head_dim)
            if biases is not None:
                scores = scores + biases[group * group_heads + head]
            if causal:
                scores = np.where(np.tri(sequence, dtype=bool), scores, -np.inf)
            out[:, :, group, head] = np.einsum("sqk,skd->sqd", _softmax(scores), value)
    return out.reshape(samples, sequence, -1)


def _rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotary positions as products of complex numbers."""
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(x.shape[-2]), theta ** (-np.arange(half) / half))
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _rotate_first_pair(x: np.ndarray, theta: float) -> np.ndarray:
    """The first two features of four: their angle is the position, whatever the base."""
    turned = (x[..., 0] + 1j * x[..., 1]) * np.exp(1j * np.arange(x.shape[-2]))
    return np.stack([turned.real, turned.imag, x[..., 2], x[..., 3]], axis=-1)


def _norm(x: np.ndarray, weight: np.ndarray, *bias: np.ndarray) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True) if bias else x
    y = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5) * weight
    return y + bias[0] if bias else y


def _cross_entropy(logits: np.ndarray) -> np.ndarray:
    logs = np.log(_softmax(logits.reshape(-1, VOCABULARY)))
    targets = TARGETS.reshape(-1)
    counted = np.flatnonzero(targets >= 0)
    return np.array(-logs[counted, targets[counted]].mean())


def _convolve(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """3 x 3 with a padding of 1, pixel by pixel."""
    y = np.einsum("schwij,ocij->sohw", _windows(x, 3, 1), weight) + bias[:, None, None]
    return y.reshape(len(x), 1, -1)


def _windows(x: np.ndarray, kernel: int, padding: int) -> np.ndarray:
    """The windows of images of two channels, (samples, channels, rows, columns, kernel, kernel)."""
    images = np.pad(x.reshape(-1, 2, 5, 5), ((0, 0), (0, 0), (padding,) * 2, (padding,) * 2))
    return np.lib.stride_tricks.sliding_window_view(images, (kernel, kernel), axis=(2, 3))


def _batch_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Channel by channel."""
    images = x.reshape(len(x), 2, 25)
    normalised = [(c - c.mean()) / np.sqrt(c.var() + 1e-5) for c in np.moveaxis(images, 1, 0)]
    y = np.stack(normalised, axis=1) * weight[:, None] + bias[:, None]
    return y.reshape(len(x), 1, -1)


def _grouped(*parts: np.ndarray) -> np.ndarray:
    """Two rows of the first part, one of the second, one of the third, and so on."""
    rows = []
    for group in range(len(parts[1])):
        rows += [parts[0][2 * group], parts[0][2 * group + 1], parts[1][group], parts[2][group]]
    return np.stack(rows)


def _heads(*parts: np.ndarray) -> np.ndarray:
    """Of each of two groups: its part of q, of k, and of v."""
    halves = [np.split(part, 2, axis=-1) for part in parts]
    return np.concatenate([half[group] for group in range(2) for half in halves], axis=-1)


def _tanh_gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(x))


def _selu(x: np.ndarray) -> np.ndarray:
    return 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * (np.exp(x) - 1))


_ACTIVATION = (SAMPLES, ROWS, FEATURES)


def _of_one(function: Callable[[np.ndarray], np.ndarray], positive: bool = False) -> Case:
    return Case((_ACTIVATION,), function, positive)


CASES: dict[str, Case] = {
    # Functions of statements.
    "add": Case((_ACTIVATION, _ACTIVATION, _ACTIVATION), lambda a, b, c: a + b + c),
    "multiply": Case((_ACTIVATION, _ACTIVATION), lambda a, b: a * b),
    "matmul": Case((_ACTIVATION, (20, FEATURES)), lambda x, w: x @ w.T),
    "summa_product": Case((_ACTIVATION, (20, FEATURES)), lambda x, w: x @ w.T),
    "run_module": Case((_ACTIVATION, (20, FEATURES)), lambda x, w: x @ w.T),
    "attend": Case(((SAMPLES, ROWS, 32),), lambda x: _attend(x, 2, 2, 4, False, None)),
    "attend, causal and rotary": Case(((SAMPLES, ROWS, 32),), lambda x: _attend(x, 2, 2, 4, True, 100.0)),
    "attend, neighbours turned": Case(
        ((SAMPLES, ROWS, 32),), lambda x: _attend(x, 2, 2, 4, True, 100.0, rotate=_rotate_first_pair)
    ),
    "attend, fused in two blocks": Case(((1, 300, 32),), lambda x: _attend(x, 2, 2, 4, True, None)),
    "attend_changed": Case(
        ((SAMPLES, ROWS, 32), (1, 1, 4, ROWS, ROWS)),
        lambda x, biases: _attend(x, 2, 2, 4, True, 100.0, 0.5 * biases[0, 0]),
    ),
    "own_heads": Case(((4, 3, 5),), lambda x: x[None, None]),
    "among_zeros": Case(((6, 4),), lambda table: table),
    "normalise": Case((_ACTIVATION, (FEATURES,), (FEATURES,)), _norm),
    "normalise, not centred": Case((_ACTIVATION, (FEATURES,)), _norm),
    "cross_entropy": Case(((SAMPLES, ROWS, VOCABULARY),), _cross_entropy),
    "mean_error": Case((_ACTIVATION,), lambda x: ((x - GOALS) ** 2).mean()),
    "mean_error, absolute": Case((_ACTIVATION,), lambda x: np.abs(x - GOALS).mean()),
    "lookup": Case(((VOCABULARY, FEATURES),), lambda table: table[TOKENS]),
    "positions": Case(((ROWS + 2, FEATURES),), lambda table: np.stack([table[:ROWS]] * SAMPLES)),
    "convolve": Case((_IMAGES, (3, 2, 3, 3), (3,)), _convolve),
    "add_to_channels": Case((_IMAGES, (2,)), lambda x, bias: x + np.repeat(bias, 25)),
    "pool_windows": Case((_IMAGES,), lambda x: _windows(x, 2, 0).max(axis=(4, 5)).reshape(SAMPLES, 1, -1)),
    "pool_windows, means": Case(
        (_IMAGES,), lambda x: _windows(x, 3, 1).mean(axis=(4, 5))[:, :, ::2, ::2].reshape(SAMPLES, 1, -1)
    ),
    "normalise_batch": Case((_IMAGES, (2,), (2,)), _batch_norm),
    "normalise_batch, synchronised": Case((_IMAGES,), lambda x: _batch_norm(x, np.ones(2), np.zeros(2))),
    "image_data": Case((), lambda: IMAGES.reshape(SAMPLES, 1, -1).astype(np.float64)),
    "concat_grouped": Case(((4, 8), (2, 8), (2, 8)), _grouped),
    "concat_heads": Case(((SAMPLES, ROWS, 8), (SAMPLES, ROWS, 4), (SAMPLES, ROWS, 4)), _heads),
    "split_gate": Case((_ACTIVATION,), lambda x: np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)),
    "data": Case((), lambda: GOALS.astype(np.float64)),
    # Element-wise operations after layers.
    "tanh_gelu": _of_one(_tanh_gelu),
    "quick_gelu": _of_one(lambda x: x * _sigmoid(1.702 * x)),
    "functional.gelu": _of_one(lambda x: x * (1 + erf(x / sqrt(2))) / 2),
    "functional.silu": _of_one(lambda x: x * _sigmoid(x)),
    "functional.mish": _of_one(lambda x: x * np.tanh(_softplus(x))),
    "functional.softplus": _of_one(_softplus),
    "elu": _of_one(lambda x: np.where(x > 0, x, np.exp(x) - 1)),
    "functional.selu": _of_one(_selu, positive=True),
    "flow.relu": _of_one(lambda x: np.maximum(x, 0), positive=True),
    "flow.abs": _of_one(np.abs, positive=True),
    "flow.sigmoid": _of_one(_sigmoid),
    "flow.tanh": _of_one(np.tanh),
    "flow.square": _of_one(np.square),
    "flow.exp": _of_one(np.exp),
}


def draw(name: str) -> list[np.ndarray]:
    """The tensors of a case."""
    case, rng = CASES[name], np.random.default_rng(sorted(CASES).index(name))
    arrays = [rng.standard_normal(shape) for shape in case.shapes]
    return [x + 0.1 * np.sign(x) for x in arrays] if case.positive else arrays


def projected_gradients(name: str, inputs: Arrays, weights: np.ndarray, gradients: Arrays) -> tuple[np.ndarray, ...]:
    """Of the weighted sum of a case's output, derivatives in random directions: by the given gradients, and by finite differences.

    Args:
        name: of the case.
        inputs: its tensors.
        weights: of the elements of the output.
        gradients: of each tensor, to be compared.
    """
    rng, function = np.random.default_rng(3), CASES[name].function
    found, expected = [], []
    for i, (x, gradient) in enumerate(zip(inputs, gradients)):
        for _ in range(_NUM_DIRECTIONS):
            direction = rng.standard_normal(x.shape)
            ends = []
            for sign in (1, -1):
                moved = [value + sign * _STEP * direction if j == i else value for j, value in enumerate(inputs)]
                ends.append(float((function(*moved) * weights).sum()))
            found.append(float((gradient * direction).sum()))
            expected.append((ends[0] - ends[1]) / (2 * _STEP))
    return np.array(found), np.array(expected)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The difference relative to what is expected, in the Euclidean norm; infinite if anything is not finite."""
    error = float(np.linalg.norm(found - expected) / max(float(np.linalg.norm(expected)), 1e-12))
    return error if np.isfinite(error) else float("inf")
