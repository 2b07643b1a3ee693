"""Built-in models as OneFlow modules, and random batches for them. Needs OneFlow."""

from __future__ import annotations

from typing import Any

import numpy as np

from autoddl.pipelines.runtime.mixtures import ExpertSizes, LatentSizes, MixtureOfExperts
from autoddl.pipelines.runtime.models import GPT, MLP, VGG, Bert, Llama, LlamaBiases
from autoddl.pipelines.runtime.residual import ResNet

from .builtin import BuiltIn, MLPSizes, ResNetSizes, VGGSizes
from .mixtures import Mixture
from .residual import RESNET_BLOCKS
from .transformers import Transformer

__all__ = ["build_module", "make_batch"]


def build_module(built_in: BuiltIn) -> Any:
    """Return the OneFlow module of a built-in model."""
    sizes = built_in.sizes
    if isinstance(sizes, MLPSizes):
        return MLP(sizes.widths)
    if isinstance(sizes, VGGSizes):
        return VGG(sizes.depth, sizes.image, sizes.classes, sizes.hidden)
    if isinstance(sizes, ResNetSizes):
        return ResNet(*RESNET_BLOCKS[sizes.depth], sizes.classes, sizes.width, sizes.synchronised)
    common: dict[str, Any] = {"inner": sizes.mlp_width, "activation": sizes.activation, "tied": sizes.tied}
    shape = (sizes.layers, sizes.width, sizes.heads, sizes.vocabulary)
    if built_in.family == "gpt":
        return GPT(*shape, sizes.num_positions, **common)
    if built_in.family == "bert":
        return Bert(*shape, sizes.num_positions, types=sizes.types, **common)
    biases = LlamaBiases(sizes.qkv_bias, sizes.output_bias, sizes.mlp_bias)
    common.update(kv_heads=sizes.kv_heads or None, head_dim=sizes.head_dim or None, biases=biases)
    if isinstance(sizes, Mixture):
        latent = LatentSizes(sizes.query_rank, sizes.latent_rank, sizes.head_dim, sizes.rotary_dim, sizes.value_dim)
        common.update(latent=latent if sizes.latent_rank else None, dense_layers=sizes.dense_layers)
        return MixtureOfExperts(*shape, sizes=_expert_sizes(sizes), **common)
    return Llama(*shape, **common)


def _expert_sizes(sizes: Mixture) -> ExpertSizes:
    return ExpertSizes(
        sizes.experts,
        sizes.per_token,
        sizes.expert_width,
        sizes.capacity,
        sizes.renormalises,
        sizes.sigmoid,
        sizes.scaling / 1000,
        sizes.groups,
        sizes.groups_per_token,
        sizes.shared_width,
        sizes.has_shared_gate,
    )


def make_batch(built_in: BuiltIn, num_samples: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return random inputs and targets of a built-in model for ``num_samples`` samples."""
    sizes = built_in.sizes
    if isinstance(sizes, Transformer):
        tokens = rng.integers(sizes.vocabulary, size=(2, num_samples, sizes.sequence))
        return tokens[0], tokens[1]
    if isinstance(sizes, (VGGSizes, ResNetSizes)):
        images = rng.standard_normal((num_samples, 3, sizes.image, sizes.image), dtype=np.float32)
        return images, rng.integers(sizes.classes, size=num_samples)
    first, last = (
        rng.standard_normal((num_samples, width), dtype=np.float32) for width in (sizes.widths[0], sizes.widths[-1])
    )
    return first, last
