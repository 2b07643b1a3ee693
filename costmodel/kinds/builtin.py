"""Registers the built-in kinds."""

from __future__ import annotations

from .add import Add
from .attention import Attention
from .batchnorm import BatchNorm
from .conv2d import Conv2d
from .embedding import Embedding
from .experts import Experts
from .latent import LatentAttention
from .linear import Linear
from .loss import Loss
from .norm import Norm
from .opaque import Opaque
from .pool import Pool
from .position import Position
from .registry import register
from .tokengate import TokenGate

__all__ = ["BUILT_IN"]

BUILT_IN = (
    Linear(),
    Embedding(),
    Position(),
    Attention(),
    Norm(),
    Add(),
    Conv2d(),
    BatchNorm(),
    Pool(),
    Experts(),
    TokenGate(),
    LatentAttention(),
    Loss(),
    Opaque(),
)
for _kind in BUILT_IN:
    register(_kind)
