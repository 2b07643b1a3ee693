"""The call that computes each type of OneFlow operator, by OneFlow's name of the type. Needs no OneFlow.

An entry gets the operator's arguments as variables and its attributes, and returns a call. Numbers that grow with the samples
(:class:`autoddl.costmodel.program.Scaled`) are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autoddl.costmodel.program import TracedCall

from ..statements import RANKS, Call, Name

__all__ = ["RANDOM", "is_replayed", "operator_call"]

#: Names of OneFlow's types, by the numbers that its operators have as attribute ``dtype``.
DTYPES: Mapping[int, str] = {
    **{2: "float32", 3: "float64", 4: "int8", 5: "int32", 6: "int64", 7: "uint8", 9: "float16", 11: "bfloat16"},
    12: "bool",
}
#: Random operators, whose elements are drawn for all samples.
RANDOM = frozenset({"dropout", "bernoulli", "normal", "uniform", "uniform_int"})


class Reader:
    """The arguments and attributes of an operator.

    Args:
        call: The operator.
    """

    def __init__(self, call: TracedCall):
        self._call = call

    def __call__(self, *keys: str) -> Name:
        """Return the variable of the first argument with one of the given names; by default of the only argument."""
        arguments = self._call.arguments
        for key in keys or tuple(arguments):
            if arguments.get(key):
                return Name(arguments[key][0])
        raise KeyError(keys)

    def has(self, key: str) -> bool:
        """Return whether the operator has an argument."""
        return bool(self._call.arguments.get(key))

    def every(self, key: str) -> list[Name]:
        """Return the variables of an argument that is a list."""
        return [Name(name) for name in self._call.arguments[key]]

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute; tuples as lists."""
        value = self._call.attributes.get(key, default)
        return list(value) if isinstance(value, tuple) else value

    @property
    def number(self) -> Any:
        """The number that an operator of a tensor and a number has as attribute."""
        for kind in ("int", "float", "bool"):
            if self.get(f"has_{kind}_operand"):
                return self.get(f"{kind}_operand")
        return self.get("float_operand")

    @property
    def dtype(self) -> str:
        """Name of the type of the result."""
        return DTYPES[self.get("dtype")]


Maker = Callable[[Reader], Call]


def _names(table: str) -> list[str]:
    return table.split()


def _plain(function: str, *attributes: str) -> Maker:
    """The function of the only argument and of attributes."""
    return lambda op: Call(function, (op(), *(op.get(name) for name in attributes)))


def _numbered(function: str) -> Maker:
    """The function of a tensor and a number."""
    return lambda op: Call(function, (op(), op.number))


def _pair(function: str) -> Maker:
    """The function of the arguments x and y."""
    return lambda op: Call(function, (op("x"), op("y")))


def _pool(function: str, is_maximum: bool) -> Maker:
    def make(op: Reader) -> Call:
        options = {"kernel_size": op.get("kernel_size"), "stride": op.get("stride"), "padding": op.get("padding")}
        options["ceil_mode"] = op.get("ceil_mode")
        if is_maximum:
            return Call("first_of", (function, op("x")), {**options, "dilation": op.get("dilation")})
        options["count_include_pad"] = op.get("count_include_pad")
        if op.get("divisor_override"):
            options["divisor_override"] = op.get("divisor_override")
        return Call(function, (op("x"),), options)

    return make


def _convolution(function: str, is_transposed: bool = False) -> Maker:
    def make(op: Reader) -> Call:
        bias = op("bias") if op.has("bias") else None
        options = {
            "stride": op.get("strides"),
            "padding": op.get("padding_before"),
            "dilation": op.get("dilation_rate"),
        }
        options["groups"] = op.get("groups")
        if is_transposed:
            options["output_padding"] = op.get("output_padding")
        return Call(function, (op("in"), op("weight"), bias), options)

    return make


def _product(op: Reader) -> Call:
    options = {name: True for name in ("transpose_a", "transpose_b") if op.get(name)}
    if op.get("alpha", 1.0) != 1.0:
        options["alpha"] = op.get("alpha")
    return Call("flow.matmul", (op("a"), op("b")), options)


def _reduction(function: str) -> Maker:
    return lambda op: Call(function, (op(), op.get("axis")), {"keepdim": op.get("keepdims")})


def _upsampling(mode: str) -> Maker:
    def make(op: Reader) -> Call:
        size = op.get("output_size")
        scales = [op.get(key) for key in ("scale_factor", "depth_scale", "height_scale", "width_scale")]
        known = [scale for scale in scales if scale is not None]
        options = {"size": size} if size else {"scale_factor": known[0] if len(set(known)) == 1 else known}
        if op.get("align_corners") is not None and mode != "nearest":
            options["align_corners"] = op.get("align_corners")
        return Call("functional.interpolate", (op("x"),), {**options, "mode": mode})

    return make


def _lookup(op: Reader) -> Call:
    if op.get("axis", 0) == 0:
        return Call("functional.embedding", (op("indices"), op("in")))
    return Call("take", (op("in"), op("indices"), op.get("axis")))


def _padding(op: Reader) -> Call:
    before, after = op.get("padding_before"), op.get("padding_after")
    sides = [length for pair in zip(reversed(before), reversed(after)) for length in pair]
    while sides[-2:] == [0, 0] and len(sides) > 2:
        sides = sides[:-2]
    value = op.get("floating_constant_value") or op.get("integral_constant_value") or 0.0
    return Call("functional.pad", (op("x"), sides), {"value": value} if value else {})


def _mode_padding(mode: str) -> Maker:
    return lambda op: Call("functional.pad", (op("x"), op.get("padding")), {"mode": mode})


def _clip(op: Reader) -> Call:
    # An operator of integers has 0 as its floating-point bounds, one of floating-point numbers has them rounded as integers.
    bounds = {name: op.get(f"floating_{name}") or op.get(f"integral_{name}") for name in ("min", "max")}
    return Call("flow.clamp", (op("x"),), {name: value for name, value in bounds.items() if value is not None})


def _constant(op: Reader) -> Call:
    value = op.get("floating_value") if op.get("is_floating_value") else op.get("integer_value")
    return Call("filled", (op.get("shape"), value, op.dtype, RANKS))


def _range(op: Reader) -> Call:
    kind = "float" if op.dtype.startswith(("float", "bfloat")) else "integer"
    numbers = [op.get(f"{kind}_{name}") for name in ("start", "limit", "delta")]
    return Call("numbers", (*numbers, op.dtype, RANKS))


def _one_hot(op: Reader) -> Call:
    kind = "floating" if op.dtype.startswith(("float", "bfloat")) else "integer"
    values = (op.get(f"{kind}_on_value"), op.get(f"{kind}_off_value"))
    return Call("one_hot", (op("indices"), op.get("depth"), *values, op.dtype, RANKS))


def _random(function: str, *attributes: str) -> Maker:
    """A random operator; the statement gets the random stream of the layer and the place of the samples from its program."""
    return lambda op: Call(function, (op.get("shape"), *(op.get(name) for name in attributes), op.dtype, RANKS))


def _entropy(op: Reader) -> Call:
    return Call("sparse_entropy", (op("prediction"), op("label")))


_UNARY_OF_FLOW = _names(
    """
    abs exp expm1 log log1p sqrt rsqrt square reciprocal negative sin cos tan tanh sigmoid sign erf erfc floor ceil round relu
    sinh cosh atan asin acos
    """
)
_COMPARISONS = {
    "equal": "eq",
    "not_equal": "ne",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
}

_MAKERS: dict[str, Maker] = {
    # Element-wise operators.
    **{name: _plain(f"flow.{name}") for name in _UNARY_OF_FLOW},
    **{
        name: _plain(f"flow._C.{name}")
        for name in _names("gelu quick_gelu fast_gelu silu selu mish hardsigmoid hardswish softsign")
    },
    "sigmoid_v2": _plain("flow.sigmoid"),
    "log_sigmoid": _plain("flow._C.logsigmoid"),
    "leaky_relu": _plain("flow._C.leaky_relu", "alpha"),
    "elu": _plain("flow._C.elu", "alpha"),
    "celu": lambda op: Call("flow._C.celu", (op(),), {"alpha": op.get("alpha")}),
    "softplus": lambda op: Call("flow._C.softplus", (op(), op.get("beta"), op.get("threshold"))),
    "hardtanh": lambda op: Call("flow.clamp", (op(),), {"min": op.get("min_val"), "max": op.get("max_val")}),
    "hardshrink": lambda op: Call("flow._C.hardshrink", (op(),), {"lambd": op.get("lambd")}),
    "softshrink": lambda op: Call("flow._C.softshrink", (op(),), {"alpha": op.get("alpha")}),
    "threshold": lambda op: Call(
        "flow._C.threshold", (op(),), {"threshold": op.get("threshold_val"), "value": op.get("value")}
    ),
    "prelu": lambda op: Call("flow._C.prelu", (op("x"), op("alpha"))),
    "clip_by_scalar": _clip,
    "clip_by_scalar_min": _clip,
    "clip_by_scalar_max": _clip,
    **{name: _plain("identity") for name in _names("identity copy to_contiguous")},
    "cast": lambda op: Call("cast", (op(), op.dtype, RANKS)),
    "scalar_add": _numbered("flow.add"),
    "scalar_mul": _numbered("flow.mul"),
    "scalar_div": _numbered("flow.div"),
    "scalar_pow": _numbered("flow.pow"),
    "scalar_fmod": _numbered("flow.fmod"),
    "scalar_floordiv": _numbered("flow.floor_divide"),
    "scalar_reverse_pow": lambda op: Call("flow.pow", (op.number, op())),
    **{f"scalar_logical_{name}": _numbered(f"flow.{short}") for name, short in _COMPARISONS.items()},
    **{f"broadcast_{name}": _pair(f"flow.{short}") for name, short in _COMPARISONS.items()},
    **{f"broadcast_logical_{name}": _pair(f"flow.logical_{name}") for name in ("and", "or", "xor")},
    "logical_not": _plain("flow.logical_not"),
    "add_n": lambda op: Call("add", tuple(op.every("in"))),
    "broadcast_add": _pair("flow.add"),
    "broadcast_sub": _pair("flow.sub"),
    "broadcast_mul": _pair("flow.mul"),
    "broadcast_div": _pair("flow.div"),
    "broadcast_maximum": _pair("flow.maximum"),
    "broadcast_minimum": _pair("flow.minimum"),
    "elementwise_maximum": _pair("flow.maximum"),
    "elementwise_minimum": _pair("flow.minimum"),
    "pow": _pair("flow.pow"),
    "broadcast_pow": _pair("flow.pow"),
    "broadcast_fmod": _pair("flow.fmod"),
    "floordiv": _pair("flow.floor_divide"),
    "xdivy": _pair("divide_nonzero"),
    "bias_add": lambda op: Call("flow._C.bias_add", (op("a"), op("b")), {"axis": op.get("axis")}),
    "where": lambda op: Call("flow.where", (op("condition"), op("x"), op("y"))),
    "where_scalar_x": lambda op: Call("flow.where", (op("condition"), op.number, op("y"))),
    "where_scalar_y": lambda op: Call("flow.where", (op("condition"), op("x"), op.number)),
    "masked_fill": lambda op: Call("flow.masked_fill", (op("x"), op("mask"), op.number)),
    # Views and selections.
    "reshape": lambda op: Call("flow.reshape", (op(), op.get("shape"))),
    "transpose": lambda op: Call("flow.permute", (op(), op.get("perm"))),
    "squeeze": lambda op: Call("flow.squeeze", (op(), op.get("axes"))),
    "expand_dims": lambda op: Call("flow.unsqueeze", (op(), op.get("axis"))),
    "detach": lambda op: Call("stopped", (op(),)),
    "repeat_elements": lambda op: Call("repeat_elements", (op(), op.get("repeats"), op.get("dim"))),
    "expand": lambda op: Call("expand", (op(), op.get("expand_shape"))),
    "concat": lambda op: Call("flow.cat", (op.every("in"),), {"dim": op.get("axis")}),
    "stack": lambda op: Call("flow.stack", (op.every("in"),), {"dim": op.get("axis")}),
    "narrow": lambda op: Call("flow.narrow", (op(), op.get("dim"), op.get("start"), op.get("length"))),
    "slice": lambda op: Call("flow._C.slice", (op(), op.get("start"), op.get("stop"), op.get("step"))),
    "slice_update": lambda op: Call(
        "updated_slice", (op("ref"), op("value"), op.get("start"), op.get("stop"), op.get("step"))
    ),
    "flip": _plain("flow.flip", "dims"),
    "roll": _plain("flow.roll", "shifts", "dims"),
    "tril": _plain("flow.tril", "diagonal"),
    "triu": _plain("flow.triu", "diagonal"),
    "diagonal": lambda op: Call("flow._C.diagonal", (op(), op.get("offset"), 0, 1)),
    "pad": _padding,
    **{f"reflection_pad{n}d": _mode_padding("reflect") for n in (1, 2)},
    **{f"replication_pad{n}d": _mode_padding("replicate") for n in (1, 2)},
    "gather": _lookup,
    "embedding": lambda op: Call(
        "functional.embedding", (op("indices"), op("weight")), {"padding_idx": op.get("padding_idx")}
    ),
    "gather_nd": lambda op: Call("flow._C.gather_nd", (op("params"), op("indices"))),
    "dim_gather": lambda op: Call("flow.gather", (op("input"), op.get("dim"), op("index"))),
    "one_hot": _one_hot,
    "arg_sort": lambda op: Call(
        "flow.argsort", (op(),), {"dim": -1, "descending": op.get("direction") == "DESCENDING"}
    ),
    "argmax": lambda op: Call("flow.argmax", (op(),), {"dim": -1}),
    "top_k": lambda op: Call("top_places", (op(), op.get("k"))),
    # Reductions, and operators along one dimension.
    "reduce_sum": _reduction("flow.sum"),
    "reduce_mean": _reduction("flow.mean"),
    "reduce_prod": _reduction("flow._C.reduce_prod"),
    "reduce_any": _reduction("flow._C.reduce_any"),
    "reduce_all": _reduction("flow._C.reduce_all"),
    "reduce_max": _reduction("flow.amax"),
    "reduce_min": _reduction("flow._C.reduce_min"),
    "var": lambda op: Call(
        "flow.var", (op(), op.get("dim")), {"unbiased": op.get("unbiased"), "keepdim": op.get("keepdim")}
    ),
    "softmax": lambda op: Call("flow._C.softmax", (op(), -1)),
    "log_softmax": lambda op: Call("flow._C.log_softmax", (op(), -1)),
    "cumsum": _plain("flow.cumsum", "dim"),
    "cumprod": _plain("flow.cumprod", "dim"),
    "l2_normalize": lambda op: Call("flow._C.normalize", (op(), 2.0, op.get("axis"), op.get("epsilon"))),
    # Products and convolutions.
    **{name: _product for name in _names("matmul batch_matmul broadcast_matmul")},
    "matrix_vector_product": lambda op: Call("flow.matmul", (op("a"), op("b"))),
    "vector_matrix_product": lambda op: Call("flow.matmul", (op("a"), op("b"))),
    "dot": _pair("flow.dot"),
    **{f"conv{n}d": _convolution(f"flow._C.conv{n}d") for n in (1, 2, 3)},
    **{f"deconv{n}d": _convolution(f"flow._C.deconv{n}d", is_transposed=True) for n in (1, 2, 3)},
    "unfold": lambda op: Call(
        "flow._C.unfold",
        (op(), op.get("kernel_size"), op.get("dilation_rate"), op.get("padding"), op.get("strides"), "channels_first"),
    ),
    "fold": lambda op: Call(
        "flow._C.fold",
        (
            op(),
            op.get("output_size"),
            op.get("kernel_size"),
            op.get("dilation_rate"),
            op.get("padding"),
            op.get("strides"),
        ),
    ),
    # Pooling and interpolation.
    **{f"max_pool_{n}d": _pool(f"max_pool{n}d", True) for n in (1, 2, 3)},
    **{f"avg_pool_{n}d": _pool(f"flow._C.avg_pool{n}d", False) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": _plain(f"flow._C.adaptive_avg_pool{n}d", "output_size") for n in (1, 2, 3)},
    **{
        f"adaptive_max_pool{n}d": (
            lambda op, n=n: Call(
                "first_of", (f"adaptive_max_pool{n}d", op("x")), {"output_size": op.get("output_size")}
            )  # type: ignore[misc]
        )
        for n in (1, 2, 3)
    },
    **{f"upsample_nearest_{n}d": _upsampling("nearest") for n in (1, 2, 3)},
    "upsample_linear_1d": _upsampling("linear"),
    "upsample_bilinear_2d": _upsampling("bilinear"),
    "upsample_bicubic_2d": _upsampling("bicubic"),
    "upsample_trilinear_3d": _upsampling("trilinear"),
    "grid_sample": lambda op: Call(
        "functional.grid_sample",
        (op("input"), op("grid")),
        {
            "mode": op.get("interpolation_mode"),
            "padding_mode": op.get("padding_mode"),
            "align_corners": op.get("align_corners"),
        },
    ),
    "affine_grid": lambda op: Call(
        "functional.affine_grid", (op("theta"), op.get("size")), {"align_corners": op.get("align_corners")}
    ),
    # Norms of the model's own samples, and losses.
    "nll": lambda op: Call(
        "likelihoods", (op("input"), op("target"), op("weight") if op.has("weight") else None, op.get("ignore_index"))
    ),
    "sparse_softmax_cross_entropy": _entropy,
    "binary_cross_entropy": lambda op: Call(
        "functional.binary_cross_entropy",
        (op("input"), op("target"), op("weight") if op.has("weight") else None),
        {"reduction": "none"},
    ),
    "binary_cross_entropy_with_logits": lambda op: Call(
        "binary_entropies",
        (
            op("input"),
            op("target"),
            op("weight") if op.has("weight") else None,
            op("pos_weight") if op.has("pos_weight") else None,
        ),
    ),
    "binary_cross_entropy_with_logits_reduce_mean": lambda op: Call(
        "functional.binary_cross_entropy_with_logits", (op("input"), op("target"))
    ),
    "kl_div_loss": lambda op: Call("flow._C.kl_div_loss", (op("input"), op("target"), op.get("log_target"), "none")),
    "smooth_l1_loss": lambda op: Call("flow._C.smooth_l1_loss", (op("input"), op("target"), op.get("beta"), "none")),
    # Tensors without inputs.
    "constant": _constant,
    "empty": lambda op: Call("filled", (op.get("shape"), 0, op.dtype, RANKS)),
    "arange": _range,
    "eye": lambda op: Call("identity_matrix", (op.get("rows"), op.get("cols"), op.dtype, RANKS)),
    "ones_like": lambda op: Call("flow.ones_like", (op(),)),
    "zeros_like": lambda op: Call("flow.zeros_like", (op(),)),
    # Random operators.
    "dropout": lambda op: Call("drop", (op("in"), op.get("rate"))),
    "bernoulli": lambda op: Call("coins", (op("in"), op.get("p"))),
    "normal": _random("normal_numbers", "mean", "std"),
    "uniform": _random("uniform_numbers", "from", "to"),
    "uniform_int": _random("uniform_integers", "from", "to"),
}


def is_replayed(kind: str) -> bool:
    """Return whether ranks can run operators of a type."""
    return kind in _MAKERS or kind == "normalization"


def operator_call(call: TracedCall) -> Call:
    """Return the call of an operator, without its results."""
    return _MAKERS[call.kind](Reader(call))
