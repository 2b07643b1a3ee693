"""The built-in families of models as plain OneFlow modules, as a user would write them.

Modules and parameters have the names that the layer graphs of :mod:`autoddl.zoo` use, so that a graph extracted from one of
these modules equals the built-in graph. ``forward(inputs, targets)`` returns the loss. Inputs and targets are (batch, sequence)
token indices for transformers, (batch, 3, height, width) images and (batch,) classes for VGG, and (batch, features) each for
perceptrons.

Numpy draws the initial value of a parameter from the seed and the parameter's name. So initial values are the same on any number of
ranks, and in different models for parameters of the same name and shape.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .backend import HOST
from .load import load_oneflow
from .model_constants import LAYER_NORM_EPS, POOLING, RMS_NORM_EPS, ROTARY_BASE

flow = load_oneflow()
nn: Any = flow.nn
functional: Any = flow.nn.functional

__all__ = ["ACTIVATIONS", "GPT", "MLP", "VGG", "Bert", "Llama", "LlamaBiases", "initialize"]

#: Channels of VGG's convolutions, "M" for a max pooling.
VGG_FEATURES: dict[int, tuple[int | str, ...]] = {
    11: (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"),
    13: (64, 64, "M", 128, 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"),
    16: (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"),
    19: (64, 64, "M", 128, 128, "M", *(256,) * 4, "M", *(512,) * 4, "M", *(512,) * 4, "M"),
}


def _quick_gelu(x: Any) -> Any:
    """x sigmoid(1.702 x)."""
    return x * flow.sigmoid(1.702 * x)


#: Activations by the names that the layer graphs use.
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "gelu": functional.gelu,
    "quick_gelu": _quick_gelu,
    "relu": functional.relu,
    "sigmoid": flow.sigmoid,
    "silu": functional.silu,
    "tanh": flow.tanh,
}


def initialize(module: Any, seed: int) -> Any:
    """Initialise a module's parameters in place, and return it.

    Matrices are normal with standard deviation max(0.02, 1/sqrt(fan-in)); biases are 0, and scales of norms 1.
    """
    for name, parameter in module.named_parameters():
        parameter.data.copy_(HOST.tensor(initial_value(name, tuple(parameter.shape), seed)))
    return module


def initial_value(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return the initial value of a parameter; see `initialize`."""
    if len(shape) > 1:
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        deviation = max(0.02, 1 / math.sqrt(math.prod(shape[1:])))
        return generator.standard_normal(shape, dtype=np.float32) * np.float32(deviation)
    return np.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=np.float32)


class MLP(nn.Module):
    """Linear layers without bias, with relu between them and a mean-squared-error loss."""

    def __init__(self, widths: Sequence[int]):
        super().__init__()
        for i, (fan_in, fan_out) in enumerate(zip(widths, widths[1:])):
            setattr(self, f"fc{i + 1}", nn.Linear(fan_in, fan_out, bias=False))
        self.num_layers = len(widths) - 1

    def forward(self, inputs: Any, targets: Any) -> Any:
        x = inputs
        for i in range(self.num_layers):
            x = getattr(self, f"fc{i + 1}")(x)
            if i < self.num_layers - 1:
                x = functional.relu(x)
        return functional.mse_loss(x, targets)


class VGG(nn.Module):
    """VGG without batch norm and dropout; the width of the first dense layer follows from the image size."""

    def __init__(self, depth: int, image: int = 224, classes: int = 1000, hidden: int = 4096):
        super().__init__()
        modules: list[Any] = []
        channels = 3
        for entry in VGG_FEATURES[depth]:
            if isinstance(entry, int):
                modules += [nn.Conv2d(channels, entry, kernel_size=3, padding=1), nn.ReLU()]
                channels = entry
            else:
                modules.append(nn.MaxPool2d(**POOLING))
        self.features = nn.Sequential(*modules)
        flat = channels * (image // 32) ** 2
        # nn.Identity replaces the dropouts of the original, so that the modules keep their indices.
        self.classifier = nn.Sequential(
            nn.Linear(flat, hidden),
            nn.ReLU(),
            nn.Identity(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Identity(),
            nn.Linear(hidden, classes),
        )

    def forward(self, inputs: Any, targets: Any) -> Any:
        x = flow.flatten(self.features(inputs), start_dim=1)
        return functional.cross_entropy(self.classifier(x), targets)


def _attend(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
    """softmax(q k^T / sqrt(head_dim)) v on (batch, heads, sequence, head_dim); positions with ``mask`` 0 are not attended to."""
    scores = flow.matmul(query, key.transpose(-2, -1)) * (1.0 / math.sqrt(query.size(-1)))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    return flow.matmul(functional.softmax(scores, dim=-1), value)


def split_heads(x: Any, heads: int) -> Any:
    """(batch, sequence, features) -> (batch, heads, sequence, head_dim)."""
    batch, sequence, features = x.shape
    return x.reshape(batch, sequence, heads, features // heads).transpose(1, 2)


def merge_heads(x: Any) -> Any:
    """(batch, heads, sequence, head_dim) -> (batch, sequence, features)."""
    batch, heads, sequence, head_dim = x.shape
    return x.transpose(1, 2).reshape(batch, sequence, heads * head_dim)


def causal_mask(sequence: int, device: Any) -> Any:
    """Ones on and below the diagonal."""
    return flow.tril(flow.ones(sequence, sequence, device=device))


def token_loss(logits: Any, targets: Any) -> Any:
    """Cross entropy over all tokens of the batch."""
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


class GPTAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        query, key, value = (split_heads(part, self.heads) for part in self.c_attn(x).chunk(3, dim=-1))
        return self.c_proj(merge_heads(_attend(query, key, value, causal_mask(x.shape[1], x.device))))


class GPTMLP(nn.Module):
    def __init__(self, width: int, inner: int, activation: str = "gelu"):
        super().__init__()
        self.c_fc = nn.Linear(width, inner)
        self.c_proj = nn.Linear(inner, width)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Any) -> Any:
        return self.c_proj(self.activation(self.c_fc(x)))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, activation: str = "gelu"):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.attn = GPTAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.mlp = GPTMLP(width, inner, activation)

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2: pre-norm decoder with learned positions; the output may be tied to the token table."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int,
        positions: int,
        *,
        inner: int | None = None,
        activation: str = "gelu",
        tied: bool = True,
    ):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(positions, width)
        self.h = nn.ModuleList([GPTBlock(width, heads, inner or 4 * width, activation) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, inputs: Any, targets: Any) -> Any:
        x = self.wte(inputs) + self.wpe(flow.arange(inputs.shape[1], device=inputs.device))
        for block in self.h:
            x = block(x)
        return token_loss(self.lm_head(self.ln_f(x)), targets)


class BertEmbeddings(nn.Module):
    def __init__(self, vocabulary: int, positions: int, types: int, width: int):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, width)
        self.token_type_embeddings = nn.Embedding(types, width)
        self.position_embeddings = nn.Embedding(positions, width)
        self.LayerNorm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)

    def forward(self, tokens: Any) -> Any:
        x = self.word_embeddings(tokens) + self.token_type_embeddings(flow.zeros_like(tokens))
        return self.LayerNorm(x + self.position_embeddings(flow.arange(tokens.shape[1], device=tokens.device)))


class BertSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        parts = (split_heads(project(x), self.heads) for project in (self.query, self.key, self.value))
        return merge_heads(_attend(*parts))


class BertOutput(nn.Module):
    """Projection, residual, norm."""

    def __init__(self, fan_in: int, width: int):
        super().__init__()
        self.dense = nn.Linear(fan_in, width)
        self.LayerNorm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)

    def forward(self, x: Any, residual: Any) -> Any:
        return self.LayerNorm(self.dense(x) + residual)


class BertAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.self = BertSelfAttention(width, heads)
        self.output = BertOutput(width, width)

    def forward(self, x: Any) -> Any:
        return self.output(self.self(x), x)


class BertIntermediate(nn.Module):
    def __init__(self, width: int, inner: int, activation: str = "gelu"):
        super().__init__()
        self.dense = nn.Linear(width, inner)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Any) -> Any:
        return self.activation(self.dense(x))


class BertLayer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, activation: str = "gelu"):
        super().__init__()
        self.attention = BertAttention(width, heads)
        self.intermediate = BertIntermediate(width, inner, activation)
        self.output = BertOutput(inner, width)

    def forward(self, x: Any) -> Any:
        x = self.attention(x)
        return self.output(self.intermediate(x), x)


class BertEncoder(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, inner: int, activation: str = "gelu"):
        super().__init__()
        self.layer = nn.ModuleList([BertLayer(width, heads, inner, activation) for _ in range(layers)])

    def forward(self, x: Any) -> Any:
        for layer in self.layer:
            x = layer(x)
        return x


class BertTransform(nn.Module):
    def __init__(self, width: int, activation: str = "gelu"):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.LayerNorm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Any) -> Any:
        return self.LayerNorm(self.activation(self.dense(x)))


class BertPredictions(nn.Module):
    def __init__(self, width: int, vocabulary: int, activation: str = "gelu"):
        super().__init__()
        self.transform = BertTransform(width, activation)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, x: Any) -> Any:
        return self.decoder(self.transform(x))


class BertHead(nn.Module):
    def __init__(self, width: int, vocabulary: int, activation: str = "gelu"):
        super().__init__()
        self.predictions = BertPredictions(width, vocabulary, activation)

    def forward(self, x: Any) -> Any:
        return self.predictions(x)


class Bert(nn.Module):
    """BERT with the masked-language-model head; the loss counts every token."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int,
        positions: int,
        *,
        inner: int | None = None,
        types: int = 2,
        activation: str = "gelu",
        tied: bool = True,
    ):
        super().__init__()
        self.embeddings = BertEmbeddings(vocabulary, positions, types, width)
        self.encoder = BertEncoder(layers, width, heads, inner or 4 * width, activation)
        self.cls = BertHead(width, vocabulary, activation)
        if tied:
            self.cls.predictions.decoder.weight = self.embeddings.word_embeddings.weight

    def forward(self, inputs: Any, targets: Any) -> Any:
        return token_loss(self.cls(self.encoder(self.embeddings(inputs))), targets)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), scaled."""

    def __init__(self, width: int, eps: float = RMS_NORM_EPS):
        super().__init__()
        self.weight = nn.Parameter(flow.ones(width, device=HOST.device))
        self.eps = eps

    def forward(self, x: Any) -> Any:
        return self.weight * (x * flow.rsqrt(flow.mean(x * x, dim=-1, keepdim=True) + self.eps))


def _rotate(x: Any, cosine: Any, sine: Any) -> Any:
    """Rotary positions: rotate the pairs (i, i + head_dim / 2) of (batch, heads, sequence, head_dim) by their angles."""
    half = x.shape[-1] // 2
    rotated = flow.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cosine + rotated * sine


@dataclass(frozen=True)
class LlamaBiases:
    """Which projections have a bias: none in LLaMA, some in similar models.

    Attributes:
        qkv: query, key and value projections.
        output: output projection of the attention.
        mlp: projections of the MLP.
    """

    qkv: bool = False
    output: bool = False
    mlp: bool = False


class LlamaAttention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, biases: LlamaBiases):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.q_proj = nn.Linear(width, heads * head_dim, bias=biases.qkv)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=biases.qkv)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=biases.qkv)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=biases.output)

    def repeat(self, x: Any) -> Any:
        """Repeat each key-value head for the query heads of its group."""
        groups = self.heads // self.kv_heads
        if groups == 1:
            return x
        batch, kv_heads, sequence, head_dim = x.shape
        x = x.unsqueeze(2).expand(batch, kv_heads, groups, sequence, head_dim)
        return x.reshape(batch, self.heads, sequence, head_dim)

    def forward(self, x: Any, cosine: Any, sine: Any) -> Any:
        query = _rotate(split_heads(self.q_proj(x), self.heads), cosine, sine)
        key = _rotate(split_heads(self.k_proj(x), self.kv_heads), cosine, sine)
        value = split_heads(self.v_proj(x), self.kv_heads)
        attended = _attend(query, self.repeat(key), self.repeat(value), causal_mask(x.shape[1], x.device))
        return self.o_proj(merge_heads(attended))


class LlamaMLP(nn.Module):
    def __init__(self, width: int, inner: int, activation: str, bias: bool):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Any) -> Any:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    def __init__(
        self, width: int, heads: int, kv_heads: int, head_dim: int, inner: int, activation: str, biases: LlamaBiases
    ):
        super().__init__()
        self.input_layernorm = RMSNorm(width)
        self.self_attn = LlamaAttention(width, heads, kv_heads, head_dim, biases)
        self.post_attention_layernorm = RMSNorm(width)
        self.mlp = LlamaMLP(width, inner, activation, biases.mlp)

    def forward(self, x: Any, cosine: Any, sine: Any) -> Any:
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """LLaMA: pre-norm decoder with RMS norms, rotary positions, grouped key-value heads and a gated MLP."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int,
        inner: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        activation: str = "silu",
        biases: LlamaBiases = LlamaBiases(),
        tied: bool = False,
        theta: float = ROTARY_BASE,
    ):
        super().__init__()
        self.head_dim, self.theta = head_dim or width // heads, theta
        self.embed_tokens = nn.Embedding(vocabulary, width)
        block = (width, heads, kv_heads or heads, self.head_dim, inner, activation, biases)
        self.layers = nn.ModuleList([LlamaBlock(*block) for _ in range(layers)])
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def angles(self, sequence: int, device: Any) -> tuple[Any, Any]:
        """Return cosine and sine of the angles of all positions, each (sequence, head_dim).

        They are computed by operators only. In OneFlow 0.9.0, a tensor that is created from values while a graph is traced
        occasionally aborts the process when another graph is traced later.
        """
        pairs = flow.arange(0, self.head_dim, 2, dtype=flow.float32, device=device)
        frequencies = flow.exp(pairs * (-math.log(self.theta) / self.head_dim))
        positions = flow.arange(sequence, dtype=flow.float32, device=device)
        angles = positions.unsqueeze(1) * flow.cat([frequencies, frequencies], dim=0).unsqueeze(0)
        return flow.cos(angles), flow.sin(angles)

    def forward(self, inputs: Any, targets: Any) -> Any:
        x = self.embed_tokens(inputs)
        cosine, sine = self.angles(inputs.shape[1], inputs.device)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return token_loss(self.lm_head(self.norm(x)), targets)
