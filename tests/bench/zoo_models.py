"""The models of `bench_zoo.py`, at reduced sizes: those of flowvision, and others written plainly.

A function of this module returns a model that computes its loss, and example inputs.
"""

from __future__ import annotations

import math

import oneflow as flow
import oneflow.nn as nn
import oneflow.nn.functional as F

# ruff: noqa: N812

BATCH = 8


class Classifier(nn.Module):
    """A model of images, with the cross entropy of its (first) output."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images, labels):
        logits = self.model(images)
        logits = logits[0] if isinstance(logits, (tuple, list)) else logits
        return F.cross_entropy(logits, labels)


def images(size=32, classes=10, channels=3):
    return flow.randn(BATCH, channels, size, size), flow.randint(0, classes, (BATCH,))


def _flowvision(name, size=32, **options):
    import flowvision.models as models

    options.setdefault("num_classes", 10)
    return Classifier(getattr(models, name)(**options)), images(size)


# ---- flowvision -------------------------------------------------------------------------------------------------------------


def alexnet():
    from flowvision.models import alexnet

    model = alexnet(num_classes=10)
    model.classifier = nn.Sequential(nn.Dropout(0.5), nn.Linear(256 * 6 * 6, 64), nn.ReLU(), nn.Linear(64, 10))
    return Classifier(model), images(64)


def vgg11_bn():
    from flowvision.models.vgg import cfgs, make_layers

    features = make_layers([width if width == "M" else width // 4 for width in cfgs["A"]], batch_norm=True)
    return Classifier(nn.Sequential(features, nn.Flatten(1), nn.Dropout(0.5), nn.Linear(128, 10))), images()


def resnet18():
    return _flowvision("resnet18")


def resnext():
    from flowvision.models.resnet import Bottleneck, ResNet

    return Classifier(ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10, groups=8, width_per_group=4)), images()


def squeezenet():
    return _flowvision("squeezenet1_1", 64)


def densenet():
    from flowvision.models.densenet import DenseNet

    return Classifier(
        DenseNet(growth_rate=8, block_config=(2, 2, 2, 2), num_init_features=16, num_classes=10)
    ), images()


def googlenet():
    return _flowvision("googlenet", 64, aux_logits=False, init_weights=False)


def mobilenet_v2():
    from flowvision.models.mobilenet_v2 import MobileNetV2

    return Classifier(MobileNetV2(num_classes=10, width_mult=0.25)), images(64)


def mobilenet_v3():
    return _flowvision("mobilenet_v3_small", 64)


def shufflenet():
    return _flowvision("shufflenet_v2_x0_5", 64)


def mnasnet():
    return _flowvision("mnasnet0_5", 64)


def ghostnet():
    return _flowvision("ghostnet", 64)


def efficientnet():
    return _flowvision("efficientnet_b0", 64)


def regnet():
    return _flowvision("regnet_x_400mf", 64)


def res2net():
    from flowvision.models.res2net import Bottle2neck, Res2Net

    return Classifier(Res2Net(Bottle2neck, [1, 1, 1, 1], baseWidth=8, scale=4, num_classes=10)), images()


def se_resnet():
    from flowvision.models.senet import SENet, SEResNetBottleneck

    model = SENet(SEResNetBottleneck, [1, 1, 1, 1], groups=1, reduction=16, dropout_p=None, inplanes=64, num_classes=10)
    model.avg_pool = nn.AdaptiveAvgPool2d(1)  # its own one is for images of 224 pixels
    return Classifier(model), images(64)


def genet():
    """Parts in a plain list, which are registered in a module list, too."""
    return _flowvision("genet_small", 64)


def vit():
    from flowvision.models.vision_transformer import VisionTransformer

    return Classifier(
        VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4, num_classes=10)
    ), images()


def swin(**options):
    from flowvision.models.swin_transformer import SwinTransformer

    sizes = {"img_size": 32, "patch_size": 2, "embed_dim": 16, "window_size": 4, "num_classes": 10}
    return Classifier(SwinTransformer(**sizes, depths=[2, 2], num_heads=[2, 4], **options)), images()


def mixer():
    from flowvision.models.mlp_mixer import MlpMixer

    return Classifier(MlpMixer(num_classes=10, img_size=32, patch_size=8, num_blocks=2, embed_dim=64)), images()


def gmlp():
    from flowvision.models.mlp_mixer import GatedMlp, MlpMixer, SpatialGatingBlock

    model = MlpMixer(
        num_classes=10,
        img_size=32,
        patch_size=8,
        num_blocks=2,
        embed_dim=64,
        mlp_ratio=4,
        block_layer=SpatialGatingBlock,
        mlp_layer=GatedMlp,
    )
    return Classifier(model), images()


def resmlp():
    from flowvision.models.res_mlp import ResMLP

    return Classifier(ResMLP(num_classes=10, img_size=32, patch_size=8, depth=2, embed_dim=64)), images()


def convnext():
    from flowvision.models.convnext import ConvNeXt

    return Classifier(ConvNeXt(num_classes=10, depths=[1, 1, 1, 1], dims=[16, 32, 64, 128])), images(64)


def dla():
    """Aggregated layers, with projections that nothing reads."""
    from flowvision.models.dla import DLA

    return Classifier(DLA([1, 1, 1, 2, 1, 1], [8, 8, 8, 16, 16, 32], num_classes=10, pool_size=2)), images(64)


def pvt():
    from flowvision.models.pvt import PyramidVisionTransformer

    model = PyramidVisionTransformer(
        img_size=64, patch_size=4, num_classes=10, embed_dims=[16, 32, 64, 64], num_heads=[1, 2, 4, 4], mlp_ratios=[2] * 4,
        depths=[1, 1, 1, 1], qkv_bias=True, sr_ratios=[8, 4, 2, 1],
    )  # fmt: skip
    return Classifier(model), images(64)


def crossformer():
    from flowvision.models.crossformer import CrossFormer

    model = CrossFormer(
        img_size=64, patch_size=[4, 8], num_classes=10, embed_dim=16, depths=[1, 1], num_heads=[2, 4], group_size=[4, 4],
        merge_size=[[2, 4]], drop_path_rate=0.0,
    )  # fmt: skip
    return Classifier(model), images(64)


def poolformer():
    from flowvision.models.poolformer import PoolFormer

    model = PoolFormer(
        [1, 1, 1, 1], embed_dims=[16, 32, 64, 64], mlp_ratios=[2] * 4, downsamples=[True] * 4, num_classes=10
    )
    return Classifier(model), images(64)


def convmixer():
    from flowvision.models.conv_mixer import ConvMixer

    return Classifier(ConvMixer(64, 2, kernel_size=5, patch_size=4, n_classes=10)), images()


def uniformer():
    from flowvision.models.uniformer import UniFormer

    model = UniFormer(depth=[1, 1, 1, 1], img_size=64, num_classes=10, embed_dim=[16, 32, 64, 64], head_dim=16)
    return Classifier(model), images(64)


def cswin():
    from flowvision.models.cswin import CSWinTransformer

    model = CSWinTransformer(
        img_size=64, patch_size=4, num_classes=10, embed_dim=16, depth=[1, 1, 1, 1], split_size=[1, 2, 2, 2],
        num_heads=[2, 2, 4, 4], mlp_ratio=2.0,
    )  # fmt: skip
    return Classifier(model), images(64)


def levit():
    return _flowvision("levit_128s", 224)


def fcn_head():
    """A backbone with a pyramid of features, as detectors have, and a dense prediction."""

    class Pyramid(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
            self.down = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
            self.lateral = nn.ModuleList([nn.Conv2d(16, 16, 1), nn.Conv2d(32, 16, 1)])
            self.classes = nn.Conv2d(16, 4, 3, padding=1)
            self.boxes = nn.Conv2d(16, 8, 3, padding=1)

        def forward(self, x, classes, boxes):
            a = self.stem(x)
            b = self.down(a)
            top = self.lateral[1](b)
            low = self.lateral[0](a) + F.interpolate(top, scale_factor=2, mode="nearest")
            scores = flow.cat([self.classes(p).flatten(2) for p in (low, top)], dim=2).transpose(1, 2)
            places = flow.cat([self.boxes(p).flatten(2) for p in (low, top)], dim=2).transpose(1, 2)
            loss = F.binary_cross_entropy_with_logits(scores, classes)
            positive = (classes.sum(dim=2, keepdim=True) > 2).to(flow.float32)
            return loss + (F.smooth_l1_loss(places, boxes, beta=1.0, reduction="none") * positive).sum() / (
                positive.sum() + 1
            )

    anchors = 16 * 16 + 8 * 8
    return Pyramid(), (
        flow.randn(BATCH, 3, 32, 32),
        (flow.rand(BATCH, anchors, 4) > 0.5).to(flow.float32),
        flow.randn(BATCH, anchors, 8),
    )


# ---- Language ----------------------------------------------------------------------------------------------------------------


class PlainBlock(nn.Module):
    """A transformer block as in textbooks."""

    def __init__(self, width=32, heads=4, causal=True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x):
        b, s, w = x.shape
        q, k, v = self.qkv(x).reshape(b, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        scores = flow.matmul(q, k.transpose(-2, -1)) / math.sqrt(w // self.heads)
        if self.causal:
            scores = scores.masked_fill(flow.tril(flow.ones(s, s)) == 0, float("-inf"))
        return flow.matmul(F.softmax(scores, dim=-1), v).transpose(1, 2).reshape(b, s, w)

    def forward(self, x):
        x = x + self.proj(self.attend(self.norm1(x)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def block_stack():
    """A plain stack of transformer blocks whose first sum reads the model's input."""

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.h = nn.ModuleList([PlainBlock() for _ in range(2)])

        def forward(self, x, y):
            for block in self.h:
                x = block(x)
            return ((x - y) ** 2).mean()

    return Stack(), (flow.randn(BATCH, 16, 32), flow.randn(BATCH, 16, 32))


def lstm_language():
    class Model(nn.Module):
        def __init__(self, cell=nn.LSTM):
            super().__init__()
            self.table = nn.Embedding(64, 32)
            self.rnn = cell(32, 32, batch_first=True)
            self.head = nn.Linear(32, 64)

        def forward(self, tokens, targets):
            x, _ = self.rnn(self.table(tokens))
            return F.cross_entropy(self.head(x).reshape(-1, 64), targets.reshape(-1))

    return Model(), _tokens(64, 8)


def gru_classifier():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(64, 32, padding_idx=0)
            self.rnn = nn.GRU(32, 32, batch_first=True, bidirectional=True)
            self.head = nn.Linear(64, 4)

        def forward(self, tokens, labels):
            x, _ = self.rnn(self.table(tokens))
            mask = (tokens != 0).to(flow.float32).unsqueeze(-1)
            return F.cross_entropy(self.head((x * mask).sum(1) / (mask.sum(1) + 1e-6)), labels)

    return Model(), (flow.randint(0, 64, (BATCH, 8)), flow.randint(0, 4, (BATCH,)))


def text_cnn():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(64, 16)
            self.convs = nn.ModuleList([nn.Conv2d(1, 8, (k, 16)) for k in (2, 3, 4)])
            self.head = nn.Linear(24, 4)

        def forward(self, tokens, labels):
            x = self.table(tokens).unsqueeze(1)
            parts = [F.relu(conv(x)).squeeze(3).max(dim=2)[0] for conv in self.convs]
            return F.cross_entropy(self.head(flow.cat(parts, dim=1)), labels)

    return Model(), (flow.randint(0, 64, (BATCH, 12)), flow.randint(0, 4, (BATCH,)))


def _tokens(vocabulary, length):
    return flow.randint(0, vocabulary, (BATCH, length)), flow.randint(0, vocabulary, (BATCH, length))


def bert_with_mask():
    """BERT as LiBai writes it: padding mask, token types, fused q, k and v of each head, masked loss."""

    class Attention(nn.Module):
        def __init__(self, width=32, heads=4):
            super().__init__()
            self.heads, self.head = heads, width // heads
            self.query_key_value, self.dense = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.factor = 1.0 / math.sqrt(self.head)

        def forward(self, x, mask):
            b, s, w = x.shape
            x = self.query_key_value(x).view(b, s, self.heads, 3 * self.head).permute(0, 2, 1, 3)
            q, k, v = flow.chunk(x, 3, dim=-1)
            scores = flow.matmul(q, k, transpose_b=True, alpha=self.factor)
            scores = flow.mul(scores, mask) - 10000.0 * (1 - mask)
            x = flow.matmul(F.softmax(scores, dim=-1), v).transpose(1, 2)
            return self.dense(x.reshape(b, s, w))

    class Layer(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.input_layernorm, self.post_layernorm = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attention = Attention(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x, mask):
            x = x + self.attention(self.input_layernorm(x), mask)
            return x + self.down(F.gelu(self.up(self.post_layernorm(x))))

    class Bert(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.words, self.types = nn.Embedding(64, width), nn.Embedding(2, width)
            self.positions = nn.Embedding(16, width)
            self.layers = nn.ModuleList([Layer(width) for _ in range(2)])
            self.final = nn.LayerNorm(width)
            self.bias = nn.Parameter(flow.zeros(64))

        def forward(self, tokens, padding, types, labels, counted):
            numbers = flow.arange(tokens.shape[1]).unsqueeze(0).expand(*tokens.shape)
            x = self.words(tokens) + self.positions(numbers) + self.types(types)
            mask = (padding.unsqueeze(1) * padding.unsqueeze(2)).unsqueeze(1).to(flow.float32)
            for layer in self.layers:
                x = layer(x, mask)
            logits = flow.matmul(self.final(x), self.words.weight, transpose_b=True) + self.bias
            losses = flow._C.sparse_softmax_cross_entropy(logits, labels)
            return (losses * counted).sum() / (counted.sum() + 1e-6)

    ids, labels = _tokens(64, 16)
    padding = (flow.rand(BATCH, 16) > 0.2).to(flow.int64)
    counted = (flow.rand(BATCH, 16) > 0.5).to(flow.float32)
    return Bert(), (ids, padding, flow.randint(0, 2, (BATCH, 16)), labels, counted)


def gpt2():
    """GPT-2 as it is published: products with weights (in, out), one matrix for q, k and v, a shared table."""

    class Product(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.weight = nn.Parameter(0.05 * flow.randn(inputs, outputs))
            self.bias = nn.Parameter(flow.zeros(outputs))

        def forward(self, x):
            y = flow.matmul(x.reshape(-1, x.shape[-1]), self.weight) + self.bias
            return y.reshape(*x.shape[:-1], self.bias.shape[0])

    class Block(nn.Module):
        def __init__(self, width, rows):
            super().__init__()
            self.ln_1, self.ln_2, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(0.1)
            self.c_attn, self.c_proj = Product(width, 3 * width), Product(width, width)
            self.c_fc, self.c_out = Product(width, 4 * width), Product(4 * width, width)
            self.register_buffer("mask", flow.tril(flow.ones(rows, rows)).reshape(1, 1, rows, rows))

        def forward(self, x):
            samples, rows, width = x.shape
            q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
            q, k, v = (t.reshape(samples, rows, 4, width // 4).permute(0, 2, 1, 3) for t in (q, k, v))
            scores = flow.matmul(q, k.transpose(-1, -2)) / (width // 4) ** 0.5
            scores = flow.where(self.mask > 0, scores, flow.tensor(-1e4))
            y = flow.matmul(self.drop(F.softmax(scores, dim=-1)), v).permute(0, 2, 1, 3).reshape(samples, rows, width)
            x = x + self.drop(self.c_proj(y))
            return x + self.drop(self.c_out(F.gelu(self.c_fc(self.ln_2(x)))))

    class GPT2(nn.Module):
        def __init__(self, width=64, rows=16):
            super().__init__()
            self.wte, self.wpe, self.ln_f = nn.Embedding(64, width), nn.Embedding(rows, width), nn.LayerNorm(width)
            self.h = nn.ModuleList([Block(width, rows) for _ in range(2)])
            self.head = nn.Linear(width, 64, bias=False)
            self.head.weight = self.wte.weight

        def forward(self, ids, labels):
            x = self.wte(ids) + self.wpe(flow.arange(ids.shape[1]))
            for block in self.h:
                x = block(x)
            return F.cross_entropy(self.head(self.ln_f(x)).reshape(-1, 64), labels.reshape(-1))

    return GPT2(), _tokens(64, 16)


def llama():
    """LLaMA as its authors wrote it: norms by hand, pairs of neighbours turned like complex numbers, keys of two query heads."""

    class Norm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(flow.ones(width))

        def forward(self, x):
            return x * flow.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight

    def turned(x, cosine, sine):
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        return flow.stack([a * cosine - b * sine, a * sine + b * cosine], dim=-1).reshape(*x.shape)

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
            self.wk, self.wv = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
            self.w1, self.w3 = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
            self.w2 = nn.Linear(2 * width, width, bias=False)
            self.attention_norm, self.ffn_norm = Norm(width), Norm(width)

        def forward(self, x, angles, mask):
            samples, rows, width = x.shape
            y = self.attention_norm(x)
            q, k, v = (f(y).reshape(samples, rows, -1, 16).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
            q, k = (turned(t, angles.cos(), angles.sin()) for t in (q, k))
            k, v = (flow.repeat_interleave(t, 2, dim=1) for t in (k, v))
            scores = flow.matmul(q, k.transpose(2, 3)) / 16**0.5 + mask
            y = flow.matmul(F.softmax(scores, dim=-1), v).transpose(1, 2).reshape(samples, rows, width)
            x = x + self.wo(y)
            y = self.ffn_norm(x)
            return x + self.w2(F.silu(self.w1(y)) * self.w3(y))

    class Llama(nn.Module):
        def __init__(self, width=64):
            super().__init__()
            self.tok_embeddings, self.norm = nn.Embedding(64, width), Norm(width)
            self.layers = nn.ModuleList([Block(width) for _ in range(2)])
            self.output = nn.Linear(width, 64, bias=False)
            self.register_buffer("frequencies", 10000.0 ** (-flow.arange(0, 16, 2).float() / 16))
            self.register_buffer("mask", flow.triu(flow.full((16, 16), float("-inf")), diagonal=1))

        def forward(self, ids, labels):
            x, angles = self.tok_embeddings(ids), flow.arange(16).float().unsqueeze(1) * self.frequencies
            for layer in self.layers:
                x = layer(x, angles, self.mask)
            return F.cross_entropy(self.output(self.norm(x)).reshape(-1, 64), labels.reshape(-1))

    return Llama(), _tokens(64, 16)


def stacked_lstm():
    """LSTMs with a dropout between them, in the module and after it."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.lstm = nn.Embedding(64, 32), nn.LSTM(32, 48, num_layers=2, dropout=0.2, batch_first=True)
            self.drop, self.head = nn.Dropout(0.3), nn.Linear(48, 64)

        def forward(self, ids, labels):
            y, _ = self.lstm(self.table(ids))
            return F.cross_entropy(self.head(self.drop(y)).reshape(-1, 64), labels.reshape(-1))

    return Model(), _tokens(64, 8)


def gpt_interleaved():
    """GPT as LiBai writes it: fused q, k and v of each head, a causal mask, tied output."""

    class Block(nn.Module):
        def __init__(self, width=32, heads=4):
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.query_key_value, self.dense = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            b, s, w = x.shape
            h = self.query_key_value(self.norm1(x)).view(b, s, self.heads, -1).permute(0, 2, 1, 3)
            q, k, v = flow.chunk(h, 3, dim=-1)
            scores = flow.matmul(q, k.transpose(-1, -2)) * (1.0 / math.sqrt(w // self.heads))
            mask = flow.tril(flow.ones(s, s))
            scores = scores * mask + (1 - mask) * -10000.0
            h = flow.matmul(F.softmax(scores, dim=-1), v).transpose(1, 2).reshape(b, s, w)
            x = x + self.dense(h)
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.words = nn.Embedding(64, width)
            self.positions = nn.Parameter(flow.randn(1, 16, width) * 0.02)
            self.h = nn.ModuleList([Block(width) for _ in range(2)])
            self.norm = nn.LayerNorm(width)

        def forward(self, tokens, targets):
            x = self.words(tokens) + self.positions[:, : tokens.shape[1]]
            for block in self.h:
                x = block(x)
            logits = flow.matmul(self.norm(x), self.words.weight, transpose_b=True)
            return F.cross_entropy(logits.reshape(-1, 64), targets.reshape(-1))

    return GPT(), _tokens(64, 16)


def t5():
    """An encoder and a decoder with relative positions, RMS norms and cross attention."""

    class Norm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(flow.ones(width)), 1e-6

        def forward(self, x):
            return self.weight * (x * flow.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.variance_epsilon))

    class Attention(nn.Module):
        def __init__(self, width, heads, has_bias):
            super().__init__()
            self.heads = heads
            self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
            if has_bias:
                self.relative_attention_bias = nn.Embedding(8, heads)

        def bias(self, rows, columns):
            distance = flow.arange(columns).unsqueeze(0) - flow.arange(rows).unsqueeze(1)
            buckets = flow.clamp(distance + 4, 0, 7)
            return self.relative_attention_bias(buckets).permute(2, 0, 1).unsqueeze(0)

        def forward(self, x, memory, bias=None, is_causal=False):
            def split(y):
                return y.reshape(y.shape[0], y.shape[1], self.heads, -1).transpose(1, 2)

            q, k, v = split(self.q(x)), split(self.k(memory)), split(self.v(memory))
            scores = flow.matmul(q, k.transpose(-1, -2))
            if bias is not None:
                scores = scores + bias
            if is_causal:
                mask = flow.triu(flow.ones(x.shape[1], x.shape[1]), 1)
                scores = scores.masked_fill(mask > 0, -1e9)
            y = flow.matmul(F.softmax(scores, dim=-1), v).transpose(1, 2)
            return self.o(y.reshape(x.shape[0], x.shape[1], -1))

    class Block(nn.Module):
        def __init__(self, width, heads, is_decoder, has_bias):
            super().__init__()
            self.attention, self.norm1 = Attention(width, heads, has_bias), Norm(width)
            if is_decoder:
                self.cross, self.norm2 = Attention(width, heads, False), Norm(width)
            self.wi_0, self.wi_1, self.wo = (
                nn.Linear(width, 64, bias=False),
                nn.Linear(width, 64, bias=False),
                nn.Linear(64, width, bias=False),
            )
            self.norm3 = Norm(width)

        def forward(self, x, bias, memory=None):
            h = self.norm1(x)
            x = x + self.attention(h, h, bias, memory is not None)
            if memory is not None:
                x = x + self.cross(self.norm2(x), memory)
            h = self.norm3(x)
            return x + self.wo(F.gelu(self.wi_0(h)) * self.wi_1(h))

    class T5(nn.Module):
        def __init__(self, width=32, heads=4):
            super().__init__()
            self.shared = nn.Embedding(64, width)
            self.encoder = nn.ModuleList([Block(width, heads, False, i == 0) for i in range(2)])
            self.decoder = nn.ModuleList([Block(width, heads, True, i == 0) for i in range(2)])
            self.norms = nn.ModuleList([Norm(width), Norm(width)])
            self.width = width

        def forward(self, source, target, labels):
            x, y = self.shared(source), self.shared(target)
            bias = self.encoder[0].attention.bias(source.shape[1], source.shape[1])
            for block in self.encoder:
                x = block(x, bias)
            x = self.norms[0](x)
            bias = self.decoder[0].attention.bias(target.shape[1], target.shape[1])
            for block in self.decoder:
                y = block(y, bias, x)
            logits = flow.matmul(self.norms[1](y) * self.width**-0.5, self.shared.weight, transpose_b=True)
            return F.cross_entropy(logits.reshape(-1, 64), labels.reshape(-1), ignore_index=0)

    return T5(), (*_tokens(64, 12), flow.randint(0, 64, (BATCH, 12)))


def seq2seq():
    """A recurrent encoder and decoder with additive attention."""

    class Model(nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.table = nn.Embedding(32, width)
            self.encoder = nn.LSTM(width, width)
            self.cell = nn.LSTMCell(2 * width, width)
            self.query, self.key, self.score = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
            self.head = nn.Linear(2 * width, 32)

        def forward(self, source, target, labels):
            memory, (h, c) = self.encoder(self.table(source).transpose(0, 1))
            memory = memory.transpose(0, 1)
            keys, h, c, steps = self.key(memory), h[0], c[0], []
            y = self.table(target)
            for i in range(target.shape[1]):
                weights = F.softmax(self.score(flow.tanh(keys + self.query(h).unsqueeze(1))).squeeze(-1), dim=-1)
                context = flow.matmul(weights.unsqueeze(1), memory).squeeze(1)
                h, c = self.cell(flow.cat([y[:, i], context], dim=-1), (h, c))
                steps.append(self.head(flow.cat([h, context], dim=-1)))
            return F.cross_entropy(flow.stack(steps, dim=1).reshape(-1, 32), labels.reshape(-1))

    return Model(), (*_tokens(32, 5), flow.randint(0, 32, (BATCH, 5)))


# ---- Recommendation --------------------------------------------------------------------------------------------------------


def wide_and_deep():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.table = nn.Embedding(100, 1), nn.Embedding(100, 8)
            self.deep = nn.Sequential(nn.Linear(6 * 8 + 4, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, wide, ids, dense, labels):
            deep = self.deep(flow.cat([self.table(ids).flatten(1), dense], dim=1))
            logits = self.wide(wide).sum(dim=1) + deep
            return F.binary_cross_entropy_with_logits(logits, labels)

    ids = [flow.randint(0, 100, (BATCH, 6)) for _ in range(2)]
    return Model(), (*ids, flow.randn(BATCH, 4), (flow.rand(BATCH, 1) > 0.5).to(flow.float32))


def deepfm():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Embedding(100, 1), nn.Embedding(100, 8)
            self.register_buffer("offsets", flow.tensor([0, 20, 40, 60, 80]))
            self.mlp = nn.Sequential(nn.Linear(40, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
            self.bias = nn.Parameter(flow.zeros(1))

        def forward(self, ids, labels):
            ids = ids + self.offsets
            x = self.second(ids)
            pairs = 0.5 * (x.sum(1).square() - x.square().sum(1)).sum(1, keepdim=True)
            logits = self.first(ids).sum(1) + pairs + self.mlp(x.flatten(1)) + self.bias
            return F.binary_cross_entropy(flow.sigmoid(logits), labels)

    return Model(), (flow.randint(0, 20, (BATCH, 5)), (flow.rand(BATCH, 1) > 0.5).to(flow.float32))


def dlrm():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList([nn.Embedding(50, 8) for _ in range(4)])
            self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
            self.top = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 1))
            pairs = [(i, j) for i in range(5) for j in range(i)]
            self.register_buffer("places", flow.tensor([i * 5 + j for i, j in pairs]))

        def forward(self, dense, ids, labels):
            x = self.bottom(dense)
            parts = [x.unsqueeze(1), *(table(ids[:, i]).unsqueeze(1) for i, table in enumerate(self.tables))]
            z = flow.cat(parts, dim=1)
            products = flow.index_select(flow.matmul(z, z.transpose(1, 2)).flatten(1), 1, self.places)
            logits = self.top(flow.cat([x, products], dim=1)).squeeze(1)
            return F.binary_cross_entropy_with_logits(logits, labels)

    return Model(), (flow.randn(BATCH, 6), flow.randint(0, 50, (BATCH, 4)), (flow.rand(BATCH) > 0.5).to(flow.float32))


def ncf():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.user, self.item = nn.Embedding(50, 16), nn.Embedding(60, 16)
            self.user_mlp, self.item_mlp = nn.Embedding(50, 16), nn.Embedding(60, 16)
            self.mlp = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
            self.head = nn.Linear(24, 1)

        def forward(self, users, items, labels):
            product = self.user(users) * self.item(items)
            deep = self.mlp(flow.cat([self.user_mlp(users), self.item_mlp(items)], dim=-1))
            logits = self.head(flow.cat([product, deep], dim=-1)).squeeze(-1)
            return F.binary_cross_entropy_with_logits(logits, labels)

    labels = (flow.rand(BATCH) > 0.5).to(flow.float32)
    return Model(), (flow.randint(0, 50, (BATCH,)), flow.randint(0, 60, (BATCH,)), labels)


# ---- Generative ------------------------------------------------------------------------------------------------------------


def dcgan_generator():
    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.main = nn.Sequential(
                nn.ConvTranspose2d(16, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
                nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh(),
            )  # fmt: skip

        def forward(self, noise, target):
            return F.l1_loss(self.main(noise), target)

    return Generator(), (flow.randn(BATCH, 16, 1, 1), flow.randn(BATCH, 3, 16, 16))


def dcgan_discriminator():
    class Discriminator(nn.Module):
        def __init__(self):
            super().__init__()
            self.main = nn.Sequential(
                nn.Conv2d(3, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2),
                nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2),
                nn.Conv2d(32, 1, 8, 1, 0, bias=False), nn.Sigmoid(),
            )  # fmt: skip

        def forward(self, image, label):
            return F.binary_cross_entropy(self.main(image).reshape(-1), label)

    return Discriminator(), (flow.randn(BATCH, 3, 32, 32), (flow.rand(BATCH) > 0.5).to(flow.float32))


def vae():
    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.mean, self.variance = nn.Linear(64, 32), nn.Linear(32, 8), nn.Linear(32, 8)
            self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

        def forward(self, x, noise):
            h = F.relu(self.encoder(x))
            mean, log_variance = self.mean(h), self.variance(h)
            z = mean + flow.exp(0.5 * log_variance) * noise
            error = F.binary_cross_entropy_with_logits(self.decoder(z), flow.sigmoid(x), reduction="sum")
            divergence = -0.5 * flow.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
            return (error + divergence) / x.shape[0]

    return VAE(), (flow.randn(BATCH, 64), flow.randn(BATCH, 8))


def autoencoder():
    """An autoencoder whose decoder has the transposed weights of the encoder."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(flow.randn(16, 64) * 0.1)
            self.bias, self.back = nn.Parameter(flow.zeros(16)), nn.Parameter(flow.zeros(64))

        def forward(self, x):
            code = flow.sigmoid(flow.matmul(x, self.weight.transpose(0, 1)) + self.bias)
            return (flow.matmul(code, self.weight) + self.back - x).square().mean()

    return Tied(), (flow.randn(BATCH, 64),)


def unet():
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down1, self.down2 = self.block(3, 8), self.block(8, 16)
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.last, self.head = self.block(16, 8), nn.Conv2d(8, 4, 1)

        @staticmethod
        def block(channels, width):
            return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())

        def forward(self, x, mask):
            a = self.down1(x)
            b = self.down2(F.max_pool2d(a, 2))
            logits = self.head(self.last(flow.cat([self.up(b), a], dim=1)))
            return F.cross_entropy(logits.permute(0, 2, 3, 1).reshape(-1, 4), mask.reshape(-1))

    return UNet(), (flow.randn(BATCH, 3, 16, 16), flow.randint(0, 4, (BATCH, 16, 16)))


def diffusion():
    """A denoiser with embeddings of time and group norms."""

    class Block(nn.Module):
        def __init__(self, width, time):
            super().__init__()
            self.norm, self.conv = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
            self.time = nn.Linear(time, 2 * width)

        def forward(self, x, t):
            scale, shift = self.time(F.silu(t)).unsqueeze(-1).unsqueeze(-1).chunk(2, dim=1)
            return x + self.conv(F.silu(self.norm(x) * (1 + scale) + shift))

    class Denoiser(nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
            self.blocks = nn.ModuleList([Block(width, 32) for _ in range(2)])

        def forward(self, x, time, noise):
            frequencies = flow.exp(flow.arange(0, 16, dtype=flow.float32) * (-math.log(10000.0) / 16))
            angles = time.unsqueeze(1) * frequencies.unsqueeze(0)
            t = flow.cat([flow.sin(angles), flow.cos(angles)], dim=1)
            h = self.first(x)
            for block in self.blocks:
                h = block(h, t)
            return F.mse_loss(self.last(h), noise)

    return Denoiser(), (flow.randn(BATCH, 3, 8, 8), flow.rand(BATCH) * 100, flow.randn(BATCH, 3, 8, 8))


# ---- Speech, pairs, graphs -------------------------------------------------------------------------------------------------


def speech():
    """Convolutions over spectra, then a recurrent layer."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Hardtanh(0, 20))
            self.rnn = nn.GRU(8 * 8, 16)
            self.head = nn.Linear(16, 12)

        def forward(self, x, labels):
            x = self.conv(x)
            b, c, f, t = x.shape
            x, _ = self.rnn(x.reshape(b, c * f, t).permute(2, 0, 1))
            return F.cross_entropy(self.head(x).transpose(0, 1).reshape(-1, 12), labels.reshape(-1))

    return Model(), (flow.randn(BATCH, 1, 16, 12), flow.randint(0, 12, (BATCH, 6)))


def conformer():
    class Block(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.first = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.SiLU(), nn.Linear(64, width))
            self.attention = PlainBlock(width, causal=False)
            self.norm, self.out = nn.LayerNorm(width), nn.LayerNorm(width)
            self.wide = nn.Conv1d(width, 2 * width, 1)
            self.depth = nn.Conv1d(width, width, 3, padding=1, groups=width)
            self.batch_norm, self.narrow = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)

        def forward(self, x):
            x = x + 0.5 * self.first(x)
            x = self.attention(x)
            h = self.wide(self.norm(x).transpose(1, 2))
            a, b = h.chunk(2, dim=1)
            h = self.narrow(F.silu(self.batch_norm(self.depth(a * flow.sigmoid(b)))))
            return self.out(x + h.transpose(1, 2))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.input = nn.Linear(20, 32)
            self.blocks = nn.ModuleList([Block() for _ in range(2)])
            self.head = nn.Linear(32, 12)

        def forward(self, x, labels):
            x = self.input(x)
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(x).reshape(-1, 12), labels.reshape(-1))

    return Model(), (flow.randn(BATCH, 16, 20), flow.randint(0, 12, (BATCH, 16)))


def clip():
    """Two towers whose products of all pairs of samples are the loss."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.image = nn.Sequential(nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 16))
            self.words, self.text = nn.Embedding(40, 16), nn.Linear(16, 16)
            self.scale = nn.Parameter(flow.ones(1))

        def forward(self, pixels, tokens):
            a = F.normalize(self.image(pixels), dim=-1)
            b = F.normalize(self.text(self.words(tokens).mean(dim=1)), dim=-1)
            logits = flow.exp(self.scale) * flow.matmul(a, b.transpose(0, 1))
            labels = flow.arange(pixels.shape[0])
            return 0.5 * (F.cross_entropy(logits, labels) + F.cross_entropy(logits.transpose(0, 1), labels))

    return Model(), (flow.randn(BATCH, 48), flow.randint(0, 40, (BATCH, 6)))


def siamese():
    """Two batches through one tower as one tensor, a triplet loss, and a frozen table."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(30, 16)
            self.table.weight.requires_grad_(False)
            self.tower = nn.Sequential(nn.Linear(16, 32), nn.ELU(), nn.Linear(32, 8, bias=False))

        def forward(self, a, b, c):
            x = self.tower(flow.cat([self.table(ids).mean(1) for ids in (a, b, c)], dim=0))
            a, b, c = x.chunk(3, dim=0)
            return F.relu((a - b).square().sum(1) - (a - c).square().sum(1) + 0.5).mean()

    return Model(), tuple(flow.randint(0, 30, (BATCH, 5)) for _ in range(3))


def graph_convolution():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16)])
            self.head = nn.Linear(16, 3)

        def forward(self, nodes, adjacency, labels):
            degrees = adjacency.sum(-1, keepdim=True) + 1
            for layer in self.layers:
                nodes = F.relu(layer((flow.matmul(adjacency, nodes) + nodes) / degrees))
            return F.cross_entropy(self.head(nodes.max(dim=1)[0]), labels)

    adjacency = (flow.rand(BATCH, 6, 6) > 0.5).to(flow.float32)
    return Model(), (flow.randn(BATCH, 6, 8), adjacency, flow.randint(0, 3, (BATCH,)))


def outputs_of_several_kinds():
    """A model without a loss that returns a dictionary of tensors."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(12, 24), nn.Softplus(), nn.Linear(24, 24))
            self.a, self.b = nn.Linear(24, 5), nn.Linear(24, 2)

        def forward(self, x):
            h = self.body(x)
            return {"scores": self.a(h), "boxes": (self.b(h), h)}

    return Model(), (flow.randn(BATCH, 12),)


def weighted_norm():
    """Linear layers whose weights are computed from parameters, and a penalty on them in the loss."""

    class Normed(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.g, self.v = nn.Parameter(flow.ones(b, 1)), nn.Parameter(flow.randn(b, a))

        def forward(self, x):
            w = self.g * self.v / self.v.square().sum(dim=1, keepdim=True).sqrt()
            return flow.matmul(x, w.transpose(0, 1))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Normed(12, 16), Normed(16, 4)

        def forward(self, x, labels):
            loss = F.cross_entropy(self.second(flow.tanh(self.first(x))), labels)
            return loss + 0.01 * self.first.v.square().sum()

    return Model(), (flow.randn(BATCH, 12), flow.randint(0, 4, (BATCH,)))


def random_parts():
    """Dropouts after linear layers and in attention, drop path, and noise."""

    class Block(nn.Module):
        def __init__(self, width=32, heads=4):
            super().__init__()
            self.heads = heads
            self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.attention_drop, self.drop = nn.Dropout(0.2), nn.Dropout(0.3)
            self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)

        def forward(self, x):
            b, s, w = x.shape
            q, k, v = self.qkv(self.norm(x)).reshape(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            scores = flow.matmul(q, k.transpose(-2, -1)) * (w // self.heads) ** -0.5
            h = flow.matmul(self.attention_drop(F.softmax(scores, dim=-1)), v).transpose(1, 2).reshape(b, s, w)
            x = x + self.drop(self.proj(h))
            h = self.down(self.drop(F.gelu(self.up(x))))
            if self.training:
                kept = flow.floor(0.7 + flow.rand(b, 1, 1))
                h = h / 0.7 * kept
            return x + h

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 32)
            self.h = nn.ModuleList([Block(), Block()])
            self.head = nn.Linear(32, 50)

        def forward(self, tokens, targets):
            x = self.table(tokens)
            x = x + 0.1 * flow.randn(*x.shape)
            for block in self.h:
                x = block(x)
            return F.cross_entropy(self.head(x).reshape(-1, 50), targets.reshape(-1))

    return Model(), _tokens(50, 8)


def sync_norms():
    """Batch norms over all samples, of images and of sequences."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.norm, self.norm_2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
            self.rows, self.norm_3 = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
            self.head = nn.Linear(8, 10)

        def forward(self, images, labels):
            x = F.relu(self.norm(self.first(images)))
            x = x + F.relu(self.norm_2(self.second(x)))
            x = F.relu(self.norm_3(self.rows(x.flatten(2))))
            return F.cross_entropy(self.head(x.mean(2)), labels)

    return nn.SyncBatchNorm.convert_sync_batchnorm(Model()), images(8)


def mixed_sharing():
    """A weight that a product and a penalty read, a norm that is used twice, and a parameter that nothing reads."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
            self.norm, self.never = nn.LayerNorm(64), nn.Linear(64, 4)

        def forward(self, x, labels):
            x = self.norm(F.relu(self.first(x)))
            x = self.norm(self.second(x).transpose(1, 2)).transpose(1, 2)
            penalty = flow.exp(0.1 * self.head.weight).mean()
            return F.cross_entropy(self.head(x.mean(1)), labels) + penalty

    return Model(), (flow.randn(BATCH, 64, 64), flow.randint(0, 10, (BATCH,)))


def two_heads():
    """A model that returns both heads in training, and their mean in evaluation."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm = nn.Linear(16, 32), nn.LayerNorm(32)
            self.heads = nn.ModuleList([nn.Linear(32, 10), nn.Linear(32, 10)])

        def forward(self, x):
            x = self.norm(F.gelu(self.body(x)))
            first, second = (head(x) for head in self.heads)
            return (first, second) if self.training else (first + second) / 2

    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def forward(self, x, labels):
            found = self.model(x)
            found = found if isinstance(found, tuple) else (found,)
            return sum(F.cross_entropy(logits, labels) for logits in found) / len(found)

    return Distilled(), (flow.randn(BATCH, 16), flow.randint(0, 10, (BATCH,)))
