"""Why a program is no layer of a kind with more strategies, and texts of notes that name many layers.

A program has the reasons of those of its operators that come first in this order:

1. what looks like a layer of a known kind and is unusual: a convolution with groups, a norm without a constant, ...
2. the operators that no layer of a known kind has: sums over rows, random numbers, ...
3. the operators that rearrange elements
4. element-wise operators that follow no layer
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from .images import POOLINGS
from .operators import (
    CROSS_ENTROPIES,
    ELEMENTWISE,
    ELEMENTWISE_LOSSES,
    LOOKUPS,
    REDUCTIONS,
    UNARY,
    VIEWS,
    Operator,
    OperatorGraph,
    lookup_arguments,
)
from .samples import Samples

__all__ = ["join_names", "program_reason"]

_CONVOLUTIONS = {
    **{f"conv{n}d": f"its convolution is {n}-dimensional" for n in (1, 3)},
    **{f"deconv{n}d": "its convolution is transposed" for n in (1, 2, 3)},
}
_OTHER = {
    **dict.fromkeys(("dropout", "bernoulli", "normal", "uniform", "uniform_int"), "it draws random numbers"),
    **dict.fromkeys(("softmax", "log_softmax"), "its softmax is not in attention that ranks know"),
    **dict.fromkeys(("sort", "arg_sort", "top_k", "argmax"), "it compares the elements of a row"),
    **dict.fromkeys(("cumsum", "cumprod"), "it adds up the elements of a row"),
    **dict.fromkeys(("gather_nd", "dim_gather", "one_hot"), "it reads elements at places that are computed"),
    **dict.fromkeys(
        ("layer_norm", "l2_normalize", "rms_norm"), "its norm is not along the features, or has no parameters"
    ),
}
_CUTS = frozenset(
    {"narrow", "slice", "concat", "stack", "pad", "roll", "flip", "slice_update", "unfold", "fold", "expand"}
)


def program_reason(
    operators: Sequence[Operator],
    graph: OperatorGraph,
    samples: Samples,
    known: Mapping[str, str],
    is_loss: bool = False,
) -> str:
    """Return why some operators are no layer of a kind with more strategies, as the end of a sentence.

    Args:
        operators: The operators of a program.
        graph: All operators.
        samples: Where their samples lie.
        known: Reasons that were found before, by operator name.
        is_loss: Whether the program returns the loss of the model.
    """
    own = [op for op in operators if any(graph.is_active(tensor) for tensor in op.outputs)] or list(operators)
    unusual = (known.get(op.name) or _unusual(op, graph, samples) for op in own)
    ranks: list[Callable[[], Iterable[str]]] = [
        lambda: unusual,
        lambda: ("it is a loss of its own form",) if is_loss else (),
        lambda: (_computing(op) for op in own),
        lambda: (_moving(op) for op in own),
        lambda: (_elementwise(op) for op in own),
    ]
    for rank in ranks:
        found = list(dict.fromkeys(filter(None, rank())))
        if found:
            return " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)
    return "no layer of a known kind has these operators"


def _unusual(op: Operator, graph: OperatorGraph, samples: Samples) -> str:
    """Return what is unusual about an operator that others of its type make a layer of."""
    if op.kind == "conv2d":
        return _unusual_convolution(op, graph)
    if op.kind in _CONVOLUTIONS:
        return _CONVOLUTIONS[op.kind]
    if re.fullmatch(r"(adaptive_)?(avg|max)_?pool_?[13]d", op.kind):
        return f"its pooling is {op.kind[-2]}-dimensional"
    if op.kind in POOLINGS or re.fullmatch(r"(adaptive_)?(avg|max)_?pool_?[123]d", op.kind):
        return "its pooling has windows that are not square, or reach over the border"
    if op.kind == "normalization":
        return "its batch norm is not of images or rows of features, or is no module nn.BatchNorm"
    if op.kind in LOOKUPS:
        return _unusual_lookup(op, graph)
    if op.kind in ("matmul", "batch_matmul", "broadcast_matmul"):
        if graph.learned_inputs(op):
            return "its product is with a weight that is computed, or along another dimension than the features"
        return "it multiplies matrices that are both computed from the input"
    if op.kind in CROSS_ENTROPIES or op.kind in ELEMENTWISE_LOSSES or op.kind in ("nll", "ctc_loss"):
        return "its loss is not the mean cross entropy of rows"
    state = samples.states.get(op.output) if op.outputs else None
    if state is not None and state.kind == "split" and state.dim > 0 and op.kind not in VIEWS:
        return "its samples are not the first dimension"
    return ""


def _unusual_convolution(op: Operator, graph: OperatorGraph) -> str:
    attributes = op.attributes
    if attributes["groups"] != 1:
        return "its convolution has groups"
    if set(attributes["dilation_rate"]) != {1}:
        return "its convolution has a dilation"
    if any(len(set(attributes[key])) > 1 for key in ("kernel_size", "strides", "padding_before")):
        return "its convolution has a window, stride or padding that differs between height and width"
    if attributes["data_format"] != "channels_first":
        return "its convolution has the channels last"
    if not graph.is_learned(op.arguments["weight"][0]) or graph.producer.get(op.arguments["weight"][0]) is not None:
        return "its convolution has a weight that is computed"
    return "its convolution does not reach the border of the image with its last window, or its samples are not the first dimension"


def _unusual_lookup(op: Operator, graph: OperatorGraph) -> str:
    table, indices = lookup_arguments(op)
    module = graph.modules.get(op.path)
    if not graph.is_learned(table):
        return "it reads elements at places that are computed"
    for name in ("padding_idx", "max_norm", "scale_grad_by_freq"):
        value = getattr(module, name, None)
        if value is not None and value is not False:
            return f"its table has {name} = {value}"
    if not graph.is_raw(indices):
        return "the indices of its table are computed"
    return "its table is no parameter of a module nn.Embedding"


def _computing(op: Operator) -> str:
    """Return what an operator computes that no layer of a known kind computes."""
    if op.kind in _OTHER:
        return _OTHER[op.kind]
    if op.kind in REDUCTIONS or op.kind.startswith("reduce_"):
        return "it reduces dimensions of a sample"
    if op.kind.startswith("upsample") or op.kind in ("grid_sample", "affine_grid"):
        return "it resizes images"
    is_simple = op.kind in ELEMENTWISE or op.kind in VIEWS or op.kind in _CUTS
    return "" if is_simple or op.kind.endswith(("_like", "empty", "constant")) else f"it has {op.kind}"


def _moving(op: Operator) -> str:
    if op.kind in _CUTS:
        return "it cuts, joins or shifts features"
    return "it changes which elements are the features of a row" if op.kind in VIEWS else ""


def _elementwise(op: Operator) -> str:
    if op.kind in UNARY:
        return "its element-wise operators follow no layer whose result they alone read"
    return "it combines tensors otherwise than by a sum of equal shapes"


# ---- Names -------------------------------------------------------------------------------------------------------------------


#: A number at the end of a part of a path, without leading zeros.
_NUMBER = re.compile(r"(?<!\d)(?:0|[1-9]\d*)(?=\.|$)")


def join_names(names: Sequence[str]) -> str:
    """Return all names as a list in text; names that differ in numbers are one, with the ranges of the numbers.

    >>> join_names(["stem", *(f"layers.{i}.blocks.{j}.mlp" for i in (0, 1) for j in range(6)), "layers.3.blocks.0.mlp"])
    'stem, layers.{0,1}.blocks.{0..5}.mlp, layers.3.blocks.0.mlp'
    >>> join_names(["layer1.0.conv2", "layer2.0.conv2", "layer3.0.conv2", "rnn", "rnn_2", "rnn_3"])
    'layer{1..3}.0.conv2, rnn, rnn_{2,3}'
    """
    numbers_of: dict[str, list[tuple[int, ...]]] = {}
    for name in dict.fromkeys(names):
        form = _NUMBER.sub("{}", name.replace("{", "{{").replace("}", "}}"))
        numbers_of.setdefault(form, []).append(tuple(map(int, _NUMBER.findall(name))))
    return ", ".join(form.format(*ranges) for form, numbers in numbers_of.items() for ranges in _ranges(numbers))


def _ranges(numbers: Sequence[tuple[int, ...]]) -> list[tuple[str, ...]]:
    """Return the tuples of numbers as products of ranges.

    >>> _ranges([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)])
    [('{0,1}', '{0,1}'), ('2', '0')]
    """
    if not numbers[0]:
        return [()]
    rest_of: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in numbers:
        rest_of.setdefault(first, []).append(tuple(rest))
    firsts_of: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for first, rests in rest_of.items():
        firsts_of.setdefault(tuple(sorted(set(rests))), []).append(first)
    return [(_range(firsts), *ranges) for rests, firsts in firsts_of.items() for ranges in _ranges(rests)]


def _range(numbers: Sequence[int]) -> str:
    """Return numbers as text.

    >>> _range([3]), _range([0, 1]), _range([0, 1, 2, 5])
    ('3', '{0,1}', '{0..2,5}')
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return texts[0] if len(numbers) == 1 else f"{{{','.join(texts)}}}"
