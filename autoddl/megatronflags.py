"""Megatron-LM's flags: read as a configuration to price, and written for a uniform configuration.

A file of flags is a part of a shell script: flags and values between blanks or quotes, comments behind ``#``, lines that continue
behind a backslash.  Words up to the name of a script (``pretrain_gpt.py``) belong to the launcher and are ignored.

======================================================  =======================================================================
flag                                                    meaning
======================================================  =======================================================================
num-layers, hidden-size, num-attention-heads,           sizes of the model
seq-length, max-position-embeddings,
ffn-hidden-size, kv-channels,
group-query-attention, num-query-groups
swiglu                                                  gated MLP: the family ``llama``, else ``gpt``
disable-bias-linear, add-qkv-bias                       biases of a gated model
vocab-size, make-vocab-size-divisible-by                padded to a multiple of that number (128) times the tensor parallel degree
untie-embeddings-and-output-weights                     an output projection of its own
tensor-model-parallel-size,                             tp and pp; dp is the number of devices / (tp pp)
pipeline-model-parallel-size
num-layers-per-virtual-pipeline-stage,                  interleaving: num-layers / (pp layers) chunks, or the given number of them
num-virtual-stages-per-pipeline-rank
micro-batch-size, global-batch-size                     samples per replica, and per step
recompute-activations                                   attention is recomputed, as by recompute-granularity selective
recompute-granularity full                              blocks are recomputed: all with recompute-method uniform (and
                                                        recompute-num-layers 1), with block the first recompute-num-layers of
                                                        every chunk of a stage
sequence-parallel                                       activations are split and gathered again; else copied
use-distributed-optimizer                               ZeRO, stage 1
use-flash-attn, attention-backend                       fused attention (attention-backend flash, fused, auto); else dense
bf16, fp16, fp8-format                                  precision; float32 without
overlap-grad-reduce, tp-comm-overlap                    overlap of gradients; of everything
optimizer                                               adam (default) or sgd
======================================================  =======================================================================

Gradients are accumulated and summed in float32, as Megatron-LM does by default.  Flags of :data:`_REFUSED` change the price in ways
that the cost model does not know.  Other flags do not matter for the price, or hardly, such as the kind of norms and positions.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoddl.costmodel.errors import UserError, quote
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.kinds.epilogue import GATES
from autoddl.costmodel.reading import read_text, shown_path
from autoddl.costmodel.recomputation import block_limit, first_blocks
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.uniform import UniformLayout

from .zoo.builtin import recognise
from .zoo.mixtures import Mixture
from .zoo.named import FAMILIES, GPT_VOCABULARY
from .zoo.transformers import VOCABULARY_MULTIPLE, Transformer

__all__ = ["MegatronRun", "megatron_flags", "read_megatron_flags", "transformer_of"]

#: Flags with a value that matter.
_VALUES = (
    *("num-layers", "hidden-size", "num-attention-heads", "seq-length", "ffn-hidden-size", "kv-channels"),
    *("max-position-embeddings", "num-query-groups", "vocab-size", "make-vocab-size-divisible-by", "tokenizer-type"),
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "num-layers-per-virtual-pipeline-stage"),
    *("num-virtual-stages-per-pipeline-rank", "micro-batch-size", "global-batch-size"),
    *(
        "recompute-granularity",
        "recompute-method",
        "recompute-num-layers",
        "attention-backend",
        "fp8-format",
        "optimizer",
    ),
)
#: Flags without a value that matter.
_SWITCHES = (
    *("swiglu", "group-query-attention", "untie-embeddings-and-output-weights", "recompute-activations"),
    *("sequence-parallel", "use-distributed-optimizer", "use-flash-attn", "bf16", "fp16", "fp8-hybrid"),
    *("overlap-grad-reduce", "tp-comm-overlap", "disable-bias-linear", "add-qkv-bias"),
)
#: Flags that change the price in a way that is not known, with the value that changes nothing (empty: none does).
_REFUSED = {
    "context-parallel-size": "1",
    "expert-model-parallel-size": "1",
    "expert-tensor-parallel-size": "1",
    "num-experts": "",
    "multi-latent-attention": "",
    "mtp-num-layers": "0",
    "window-size": "",
    "decoder-first-pipeline-num-layers": "",
    "decoder-last-pipeline-num-layers": "",
    "pipeline-model-parallel-layout": "",
    "pipeline-model-parallel-split-rank": "",
    "account-for-embedding-in-pipeline-split": "",
    "account-for-loss-in-pipeline-split": "",
    "standalone-embedding-stage": "",
    "use-torch-fsdp2": "",
    "use-megatron-fsdp": "",
    "use-custom-fsdp": "",
    "data-parallel-sharding-strategy": "no_shard",
    "distribute-saved-activations": "",
    "cpu-offloading": "",
    "optimizer-cpu-offload": "",
    "recompute-modules": "core_attn",
    "rampup-batch-size": "",
    "squared-relu": "",
}
#: Words of Megatron-LM for precisions of products in 8 bits.
_FP8 = ("fp8-format", "fp8-hybrid")
_LARGEST = 2**40


@dataclass(frozen=True)
class MegatronRun:
    """A configuration that Megatron-LM's flags describe.  The data parallel degree follows from the number of devices.

    Attributes:
        family, model: family and sizes of the model.
        tensor_parallel, num_stages, interleave: degrees.
        micro_batch, batch: samples per replica and pass, and per step.
        words: other attributes of the :class:`autoddl.costmodel.workload.Workload`.
        ignored: flags that do not matter for the price.
    """

    family: str
    model: Transformer
    tensor_parallel: int
    num_stages: int
    interleave: int
    micro_batch: int
    batch: int
    words: Mapping[str, Any]
    ignored: tuple[str, ...]

    def graph(self) -> LayerGraph:
        """The model."""
        return FAMILIES[self.family](self.model)

    @property
    def notes(self) -> tuple[str, ...]:
        """The note that names the flags that were ignored; none if there are none."""
        if not self.ignored:
            return ()
        return (
            f"flags that do not matter for the price are ignored: {', '.join(f'--{name}' for name in self.ignored)}",
        )


class _Flags:
    """The flags of a file by name, with checks."""

    def __init__(self, given: Mapping[str, str | None], where: str):
        self.given, self.where = given, where

    def fault(self, text: str) -> UserError:
        return UserError(f"{self.where}: {text}")

    def has(self, name: str) -> bool:
        return name in self.given

    def text(self, name: str, default: str, choices: tuple[str, ...] = ()) -> str:
        value = self.given.get(name, default)
        if value is None:
            raise self.fault(f"--{name} has no value")
        if choices and value not in choices:
            raise self.fault(f"--{name} is {quote(value)}, should be one of {', '.join(choices)}")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        if name not in self.given and default is None:
            raise self.fault(f"lacks --{name}")
        text = self.text(name, str(default))
        if not (text.isascii() and text.isdigit()) or not 1 <= int(text) < _LARGEST:
            raise self.fault(f"--{name} is {quote(text)}, should be a whole number of at least 1")
        return int(text)


def read_megatron_flags(path: str | os.PathLike[str]) -> MegatronRun:
    """Read a file of Megatron-LM's flags (see the module's docstring).

    Raises:
        UserError: the file cannot be read, lacks a flag, a value is out of range, or a flag cannot be priced.
    """
    where = shown_path(path)
    flags = _Flags(_flags_of(read_text(path), where), where)
    _refuse(flags)
    tensor_parallel = flags.whole("tensor-model-parallel-size", 1)
    num_stages = flags.whole("pipeline-model-parallel-size", 1)
    try:
        family, model = _model(flags, tensor_parallel)
        run = MegatronRun(
            family=family,
            model=model,
            tensor_parallel=tensor_parallel,
            num_stages=num_stages,
            interleave=_interleave(flags, model.layers, num_stages),
            micro_batch=flags.whole("micro-batch-size"),
            batch=flags.whole("global-batch-size"),
            words=_words(flags, model.layers, num_stages),
            ignored=tuple(name for name in flags.given if name not in (*_VALUES, *_SWITCHES, *_REFUSED)),
        )
    except UserError as error:
        raise error if str(error).startswith(where) else flags.fault(str(error)) from None
    return run


def _flags_of(text: str, where: str) -> dict[str, str | None]:
    """The flags with their values; None for flags without one."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UserError(f"{where}: cannot be read as words of a shell ({str(error).lower()})") from None
    # An assignment of a shell, such as ARGS="--bf16 --swiglu" or ARGS=( --bf16 ), holds flags, too.
    words = [part for word in words for part in re.sub(r"^\w+\+?=(?=\s*(\(|--|$))|[()]", " ", word).split()]
    scripts = [number for number, word in enumerate(words) if word.endswith(".py")]
    given: dict[str, str | None] = {}
    name = None
    for word in words[scripts[-1] + 1 if scripts else 0 :]:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")
            given[name] = value if equals else None
        elif name is not None and given[name] is None:
            given[name] = word
    if not given:
        raise UserError(f"{where}: has no flags, should have those of Megatron-LM, such as --num-layers 24")
    return given


def _refuse(flags: _Flags) -> None:
    """Check that no flag changes the price in a way that the cost model does not know, and that switches have no values."""
    for name, value in flags.given.items():
        if name in _REFUSED and (value is None or value != _REFUSED[name]):
            shown = f"--{name}" if value is None else f"--{name} {value}"
            raise flags.fault(f"{shown} cannot be priced")
        if name.startswith("moe-"):
            raise flags.fault(
                f"--{name} cannot be priced: models with experts are none of Megatron-LM's that can be read"
            )
        if name in _SWITCHES and value is not None:
            raise flags.fault(f"--{name} is a switch, but is followed by {quote(value)}")


def _model(flags: _Flags, tensor_parallel: int) -> tuple[str, Transformer]:
    is_gated = flags.has("swiglu")
    layers, width, heads = flags.whole("num-layers"), flags.whole("hidden-size"), flags.whole("num-attention-heads")
    sequence = flags.whole("seq-length")
    kv_heads = flags.whole("num-query-groups", 1) if flags.has("group-query-attention") else 0
    head_dim = flags.whole("kv-channels", 0) if flags.has("kv-channels") else 0
    if not is_gated and kv_heads not in (0, heads):
        raise flags.fault("--group-query-attention cannot be priced without --swiglu")
    if not is_gated and head_dim not in (0, width // heads):
        raise flags.fault(f"--kv-channels {head_dim} cannot be priced without --swiglu")
    # Megatron-LM's default of a gated MLP: two thirds of 4 h, rounded down to a multiple of 64.
    inner = flags.whole("ffn-hidden-size", (4 * width * 2 // 3) // 64 * 64 if is_gated else 4 * width)
    multiple = flags.whole("make-vocab-size-divisible-by", VOCABULARY_MULTIPLE) * tensor_parallel
    is_gpt2 = flags.text("tokenizer-type", "") == "GPT2BPETokenizer"
    vocabulary = flags.whole("vocab-size", GPT_VOCABULARY if is_gpt2 else None)
    has_biases = is_gated and not flags.has("disable-bias-linear")
    model = Transformer(
        f"{'llama' if is_gated else 'gpt'}:{layers}x{width}",
        layers,
        width,
        heads,
        sequence,
        -(-vocabulary // multiple) * multiple,
        intermediate=inner,
        kv_heads=kv_heads if is_gated else 0,
        head_dim=head_dim if is_gated else 0,
        positions=flags.whole("max-position-embeddings", sequence),
        activation="silu" if is_gated else "gelu",
        tied=not flags.has("untie-embeddings-and-output-weights"),
        qkv_bias=has_biases or (is_gated and flags.has("add-qkv-bias")),
        output_bias=has_biases,
        mlp_bias=has_biases,
    )
    return ("llama" if is_gated else "gpt"), model


def _interleave(flags: _Flags, layers: int, num_stages: int) -> int:
    """Number of chunks of each stage's devices."""
    if flags.has("num-virtual-stages-per-pipeline-rank"):
        return flags.whole("num-virtual-stages-per-pipeline-rank")
    if not flags.has("num-layers-per-virtual-pipeline-stage"):
        return 1
    each = flags.whole("num-layers-per-virtual-pipeline-stage")
    if layers % (num_stages * each):
        raise flags.fault(
            f"--num-layers-per-virtual-pipeline-stage {each} does not divide the {layers} layers among {num_stages} stages"
        )
    return layers // (num_stages * each)


def _words(flags: _Flags, layers: int, num_stages: int) -> dict[str, Any]:
    """The attributes of the workload besides batch and micro-batch."""
    backend = flags.text("attention-backend", "", ("", "auto", "flash", "fused", "unfused", "local"))
    is_fused = flags.has("use-flash-attn") or backend in ("auto", "flash", "fused")
    precision = "bfloat16" if flags.has("bf16") else "mixed" if flags.has("fp16") else "float32"
    overlap = "gradients" if flags.has("overlap-grad-reduce") else "none"
    return {
        "precision": "fp8" if any(map(flags.has, _FP8)) else precision,
        "optimizer": flags.text("optimizer", "adam", ("adam", "sgd")),
        "recompute": _recompute(flags, layers, num_stages),
        "attention": "fused" if is_fused else "dense",
        "gradients": "master",
        "zero": int(flags.has("use-distributed-optimizer")),
        "activations": "regathered" if flags.has("sequence-parallel") else "copied",
        "overlap": "all" if flags.has("tp-comm-overlap") else overlap,
    }


def _recompute(flags: _Flags, layers: int, num_stages: int) -> str:
    granularity = flags.text("recompute-granularity", "", ("", "selective", "full"))
    if granularity != "full":
        return "selective" if granularity or flags.has("recompute-activations") else "none"
    method = flags.text("recompute-method", "uniform", ("uniform", "block"))
    count = flags.whole("recompute-num-layers", 1)
    of_chunk = -(-layers // (num_stages * _interleave(flags, layers, num_stages)))
    if method == "uniform" and count != 1:
        raise flags.fault(f"--recompute-num-layers {count} cannot be priced: every block keeps its input, as with 1")
    return first_blocks(count, of_chunk) if method == "block" else "blocks"


# ---- Writing -----------------------------------------------------------------------------------------------------------


def transformer_of(graph: LayerGraph) -> tuple[str, Transformer] | None:
    """Return family and sizes of a model that Megatron-LM's flags describe, or None if there are none.

    The sizes are read from the layers of the graph, and right only if the model of these sizes has the same layers.

    >>> from autoddl.zoo import resolve_model
    >>> family, model = transformer_of(resolve_model("gpt:2x64", sequence=128))
    >>> family, model.layers, model.width, model.sequence
    ('gpt', 2, 64, 128)
    """
    attention = next((layer for layer in graph.layers if layer.kind == "attention"), None)
    table = next((layer for layer in graph.layers if layer.kind == "embedding"), None)
    if attention is None or table is None or not attention.block:
        return None
    heads, head_dim = attention.attributes["heads"], attention.attributes["head_dim"]
    blocks = [layer for layer in graph.layers if layer.block == attention.block]
    first = [layer for layer in blocks if layer.block_index == 0 and layer.kind == "linear"]
    if len(first) != 4:
        return None
    is_gated, width = bool(GATES & set(first[2].epilogue)), table.output_shape[-1]
    biased = [len({len(parameter.shape) for parameter in layer.parameters}) > 1 for layer in first]
    positions = next((layer.attributes["positions"] for layer in graph.layers if layer.kind == "position"), 0)
    family = "llama" if is_gated else "gpt"
    kv_heads = attention.attributes["kv_heads"]
    model = Transformer(
        graph.name,
        1 + max(layer.block_index for layer in blocks),
        width,
        heads,
        attention.rows,
        table.attributes["vocabulary"],
        intermediate=first[3].attributes["in_features"],
        kv_heads=0 if kv_heads == heads else kv_heads,
        head_dim=head_dim if is_gated and head_dim * heads != width else 0,
        positions=positions,
        activation=first[2].epilogue[0] if first[2].epilogue else "gelu",
        tied=not any(layer.kind == "linear" and not layer.block and layer.num_parameters for layer in graph.layers),
        qkv_bias=is_gated and biased[0],
        output_bias=is_gated and biased[1],
        mlp_bias=is_gated and biased[2],
    )
    try:
        same = FAMILIES[family](model).hash == graph.hash
    except UserError:
        return None
    return (family, model) if same else None


def megatron_flags(graph: LayerGraph, layout: UniformLayout, workload: Workload) -> tuple[str, ...]:
    """Return the flags of a uniform configuration, in groups of those that belong together.

    Args:
        graph: the model; if no flags describe it, those of its sizes are left out.
        layout: the degrees.
        workload: the workload.  Activations that are kept are written as sequence parallelism, which gathers them again.
    """
    lines = list(_size_flags(graph))
    degrees = [
        f"--tensor-model-parallel-size {layout.tensor_parallel}",
        f"--pipeline-model-parallel-size {layout.num_stages}",
    ]
    if layout.expert_parallel > 1:
        degrees.append(f"--expert-model-parallel-size {layout.expert_parallel}")
    if layout.interleave > 1:
        degrees.append(f"--num-virtual-stages-per-pipeline-rank {layout.interleave}")
    lines.append(" ".join(degrees))
    lines.append(
        f"--micro-batch-size {workload.micro_batch // layout.data_parallel} --global-batch-size {workload.batch}"
    )
    num_blocks = block_limit(workload.recompute)
    switches = {
        "--sequence-parallel": layout.tensor_parallel > 1 and workload.activations != "copied",
        "--use-distributed-optimizer": workload.zero == 1,
        "--use-flash-attn": workload.attention == "fused",
        "--overlap-grad-reduce": workload.overlap != "none",
        "--tp-comm-overlap": workload.overlap == "all",
        "--bf16": workload.precision in ("bfloat16", "fp8"),
        "--fp16": workload.precision == "mixed",
        "--fp8-format hybrid": workload.precision == "fp8",
        "--optimizer sgd": workload.optimizer != "adam",
        "--recompute-granularity selective": workload.recompute == "selective",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": workload.recompute
        == "blocks",
        f"--recompute-granularity full --recompute-method block --recompute-num-layers {num_blocks}": num_blocks,
    }
    lines.append(" ".join(flag for flag, is_given in switches.items() if is_given))
    return tuple(line for line in lines if line)


def _size_flags(graph: LayerGraph) -> tuple[str, ...]:
    found = transformer_of(graph) or _mixture_of(graph)
    if found is None:
        return ()
    family, model = found
    model = replace(model, intermediate=model.expert_width if isinstance(model, Mixture) else model.mlp_width)
    flags = [
        f"--num-layers {model.layers} --hidden-size {model.width} --num-attention-heads {model.heads} "
        f"--seq-length {model.sequence} --ffn-hidden-size {model.intermediate}",
        # The vocabulary is padded already: it is a multiple of all tensor parallel degrees that divide it.
        f"--vocab-size {model.vocabulary} --make-vocab-size-divisible-by 1",
    ]
    if family == "gpt":
        flags[0] += f" --max-position-embeddings {model.num_positions}"
    if not model.tied:
        flags[1] += " --untie-embeddings-and-output-weights"
    if family == "llama":
        flags[1] += " --swiglu --normalization RMSNorm --position-embedding-type rope"
        if not model.mlp_bias:
            flags[1] += " --disable-bias-linear"
        if model.qkv_bias and not model.mlp_bias:
            flags[1] += " --add-qkv-bias"
        if model.kv_heads:
            flags[1] += f" --group-query-attention --num-query-groups {model.kv_heads}"
        if model.head_dim:
            flags[1] += f" --kv-channels {model.head_dim}"
    return (*flags, *_expert_flags(model)) if isinstance(model, Mixture) else tuple(flags)


def _mixture_of(graph: LayerGraph) -> tuple[str, Mixture] | None:
    """Family and sizes of a mixture that Megatron-LM's flags describe: a softmax chooses among all experts of every block."""
    found = recognise(graph)
    model = None if found is None else found.sizes
    if not isinstance(model, Mixture) or model.latent_rank or model.sigmoid or model.groups > 1:
        return None
    return None if model.dense_layers or model.has_shared_gate else ("llama", model)


def _expert_flags(model: Mixture) -> tuple[str, ...]:
    """Flags of experts with as many slots as the model's; the first choices of earlier tokens take slots first."""
    factor = model.capacity * model.experts / (model.per_token * model.sequence)
    flags = [
        f"--num-experts {model.experts} --moe-router-topk {model.per_token} --moe-ffn-hidden-size {model.expert_width}",
        "--moe-token-dispatcher-type alltoall",
        f"--moe-expert-capacity-factor {factor:g} --moe-pad-expert-input-to-capacity --moe-token-drop-policy position",
    ]
    if model.shared_width:
        flags[0] += f" --moe-shared-expert-intermediate-size {model.shared_width}"
    if not model.renormalises:
        flags[1] += " --moe-router-pre-softmax"
    return tuple(flags)
