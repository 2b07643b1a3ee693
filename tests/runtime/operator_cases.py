"""Functions of a tensor (samples, 6, 8), or of images (samples, 6, 8, 8), and of integers (samples, 6) below 6.

Each is one operator or a few. `test_replay` replays them. Needs OneFlow.
"""

from __future__ import annotations

from autoddl.pipelines.runtime.load import load_oneflow

flow = load_oneflow()
F, nn = flow.nn.functional, flow.nn


def _half_without_gradient(x, i):
    """The factor of each element has no gradient, and no_grad blocks are inside each other."""
    with flow.no_grad():
        factor = flow.exp(x)
        with flow.no_grad():
            factor = factor + i.unsqueeze(-1)
        factor = 2 * factor
    return x * factor


@flow.no_grad()
def _constant(x):
    return x.max(dim=-1, keepdim=True)[0]


#: By name, functions of (x, places); x is (samples, 6, 8).
ROWS = {
    **{name: (lambda x, i, name=name: getattr(F, name)(x)) for name in ("gelu", "selu", "silu", "mish", "softplus")},
    **{
        name: (lambda x, i, name=name: getattr(F, name)(x))
        for name in ("hardsigmoid", "hardswish", "softsign", "relu6")
    },
    **{
        name: (lambda x, i, name=name: getattr(flow, name)(x))
        for name in ("abs", "exp", "expm1", "log", "log1p", "sqrt")
    },
    **{
        name: (lambda x, i, name=name: getattr(flow, name)(x))
        for name in ("rsqrt", "square", "reciprocal", "sin", "cos")
    },
    **{name: (lambda x, i, name=name: getattr(flow, name)(x)) for name in ("tanh", "sigmoid", "erf", "negative")},
    "detach": lambda x, i: x.detach() * x + (2 * x).detach().sin() + x * (x - x.detach()),
    "no_grad": _half_without_gradient,
    "no_grad_of_a_function": lambda x, i: x / _constant(x),
    "repeat_interleave": lambda x, i: x.repeat_interleave(3, 1) + x.repeat_interleave(3, 1).flip(1),
    "product_with_a_view": lambda x, i: flow.matmul(x, flow.ones(5, 8, device=x.device).t()),
    "leaky_relu": lambda x, i: F.leaky_relu(x - 1, 0.2),
    "elu": lambda x, i: F.elu(x - 1, 0.7),
    "hardtanh": lambda x, i: nn.Hardtanh(0.2, 0.9)(x),
    "hardshrink": lambda x, i: F.hardshrink(x),
    "softshrink": lambda x, i: F.softshrink(x),
    "logsigmoid": lambda x, i: F.logsigmoid(x),
    "fast_gelu": lambda x, i: F.gelu(x, "tanh"),
    "quick_gelu": lambda x, i: flow._C.quick_gelu(x),
    "glu": lambda x, i: F.glu(x),
    "clamp": lambda x, i: x.clamp(0.2, 0.9) + x.clamp(min=0.4) + x.clamp(max=0.8),
    "clamp_integers": lambda x, i: x * i.clamp(1, 4).unsqueeze(-1),
    "numbers": lambda x, i: (2 * x - 1.5) / 3 + x**3 + 2.0**x + (1 - x) + 1 / (x + 1),
    "modulo": lambda x, i: x * (i % 3).unsqueeze(-1) + x * (i // 2).unsqueeze(-1),
    "pairs": lambda x, i: (
        (x + x[:, :1]) * x[:, 1:2] / (x[:, 2:3] + 1) - flow.maximum(x, x * x) + flow.minimum(x, x * x)
    ),
    "power": lambda x, i: flow.pow(x, x),
    "comparisons": lambda x, i: (
        x * ((x > 0.5).to(flow.float32) + (x >= x[:, :1]).to(flow.float32) + (x < 1) + (x <= 0.7))
    ),
    "logic": lambda x, i: x * flow.logical_and(i > 1, flow.logical_not(i == 3)).unsqueeze(-1),
    "where": lambda x, i: flow.where(x > 0.7, x, x * 2) + flow.where(x > 0.6, x, 0.0) + flow.where(x > 0.5, 1.0, x),
    "masked_fill": lambda x, i: x.masked_fill(x > 0.7, -2.0),
    "softmax": lambda x, i: F.softmax(x, -1) + F.softmax(x, 1) + F.log_softmax(x, -1),
    "reductions": lambda x, i: x.sum(1) + x.mean(1) + flow.amax(x, 1) + flow.amin(x, 1) + x.max(1)[0] + x.min(1)[0],
    "variance": lambda x, i: x.var(1) + x.std(1) + x.norm(dim=1),
    "product": lambda x, i: x.prod(1),
    "logsumexp": lambda x, i: flow.logsumexp(x, 1),
    "cumsum": lambda x, i: x.cumsum(1) + flow.cumprod(x, 1),
    "normalize": lambda x, i: F.normalize(x, dim=-1) + F.normalize(x, dim=1),
    "argmax": lambda x, i: x * x.argmax(-1, keepdim=True),
    "sort": lambda x, i: flow.sort(x, -1)[0] + x * flow.argsort(x, -1),
    "views": lambda x, i: (
        x.permute(0, 2, 1).reshape(x.shape[0], -1).unsqueeze(1).squeeze(1).view(-1, 8, 6).transpose(1, 2)
    ),
    "expand": lambda x, i: x[:, :1].expand(-1, 6, -1) * x.repeat(1, 2, 1)[:, 3:9],
    "slices": lambda x, i: x[:, 1:5:2] + x.narrow(1, 2, 2) + flow.stack([x[:, 0], x[:, 5]], 1),
    "parts": lambda x, i: flow.cat(x.chunk(2, -1)[::-1], -1) + flow.cat(flow.split(x, 2, 1)[::-1], 1),
    "flip": lambda x, i: x.flip(1) + flow.roll(x, 1, 1),
    "triangles": lambda x, i: flow.tril(x) + 2 * flow.triu(x, 1),
    "pad": lambda x, i: F.pad(x, (1, 2)) + F.pad(x, (2, 1), value=2.0),
    "gather": lambda x, i: flow.gather(x, 1, i.unsqueeze(-1).expand(-1, -1, 8)),
    "index_select": lambda x, i: flow.index_select(x, 1, 2 * flow.arange(3)) + x[:, flow.arange(3)],
    "one_hot": lambda x, i: x * F.one_hot(i, 8),
    "products": lambda x, i: flow.bmm(x, x.transpose(1, 2)) + flow.einsum("bij,bkj->bik", x, x),
    "time_first": lambda x, i: flow.cat([x.transpose(0, 1), x.transpose(0, 1)], 2).transpose(0, 1),
    "batches_joined": lambda x, i: flow.cat([x, 2 * x, 3 * x], 0).chunk(3, 0)[1],
    "samples_folded": lambda x, i: flow.matmul(x.reshape(-1, 4), x.reshape(-1, 4)[0:1].transpose(0, 1) * 0 + 1),
    "new": lambda x, i: x + flow.ones(6, 8) + flow.arange(8) + flow.full((8,), 2.0) + x.new_zeros(8) + flow.eye(8)[:6],
    "centred": lambda x, i: x - x.mean(0),
    "scaled_by_all": lambda x, i: x / x.abs().max(),
    "all_pairs": lambda x, i: F.softmax(flow.matmul(x.flatten(1), x.flatten(1).transpose(0, 1)), dim=1),
    "numbered": lambda x, i: x * flow.arange(x.shape[0]).unsqueeze(-1).unsqueeze(-1),
    "cross_entropy": lambda x, i: F.cross_entropy(x.reshape(-1, 8), i.reshape(-1), ignore_index=0),
    "weighted": lambda x, i: (
        F.cross_entropy(x.reshape(-1, 8), i.reshape(-1), reduction="none") * x[:, :, 0].reshape(-1)
    ).sum(),
    "sparse": lambda x, i: flow._C.sparse_softmax_cross_entropy(x, i).sum(),
    "mse": lambda x, i: F.mse_loss(x, x * x) + F.l1_loss(x, x * x),
    "smooth": lambda x, i: F.smooth_l1_loss(x, x * x, beta=0.5, reduction="mean"),
    "binary": lambda x, i: F.binary_cross_entropy(x.sigmoid(), (x > 1).to(flow.float32)),
    "binary_logits": lambda x, i: F.binary_cross_entropy_with_logits(x, (x > 1).to(flow.float32)),
    "divergence": lambda x, i: nn.KLDivLoss()(F.log_softmax(x, -1), F.softmax(x * x, -1)),
    "triplet": lambda x, i: nn.TripletMarginLoss()(x[:, 0], x[:, 1], x[:, 2]),
    "cosine": lambda x, i: F.cosine_similarity(x, x * x, -1),
    "largest": lambda x, i: flow.topk(x, 3, dim=-1)[0],
}
#: The same with images (samples, 6, 8, 8).
IMAGES = {
    "poolings": lambda x, i: F.max_pool2d(x, 3, 2, 1) + F.avg_pool2d(x, 3, 2, 1),
    "adaptive": lambda x, i: F.adaptive_avg_pool2d(x, 2),
    "pooling_of_rows": lambda x, i: F.max_pool1d(x[:, :, 0], 2) + F.avg_pool1d(x[:, :, 1], 2),
    "interpolation": lambda x, i: (
        F.interpolate(x, scale_factor=2, mode="nearest")
        + F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
    ),
    "sizes": lambda x, i: F.interpolate(x, size=(12, 12), mode="bilinear", align_corners=False),
    "paddings": lambda x, i: nn.ReflectionPad2d(1)(x) + nn.ReplicationPad2d(1)(x) + nn.ZeroPad2d(1)(x),
    "shuffle": lambda x, i: nn.PixelShuffle(2)(x[:, :4]),
    "unfold": lambda x, i: nn.Unfold(2, stride=2)(x),
    "convolution": lambda x, i: F.conv2d(x, x[0:1].mean() * 0 + flow.ones(6, 1, 3, 3), None, 1, 1, 1, 6),
}
