"""Users' models that are exported; each function returns a module and its example inputs."""

import math

import oneflow as flow
import oneflow.nn as nn
from oneflow.nn import functional as F  # noqa: N812


class Block(nn.Module):
    def __init__(self, width, heads, scale):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width, eps=1e-3), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.heads, self.scale = heads, scale

    def split(self, x):
        return x.reshape(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x):
        h = self.norm_1(x)
        q, k, v = self.split(self.q(h)), self.split(self.k(h)), self.split(self.v(h))
        scores = (q @ k.transpose(-2, -1)) * (self.scale / math.sqrt(q.shape[-1]))
        out = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(*x.shape)
        x = x + self.o(out)
        return x + self.down(F.silu(self.up(self.norm_2(x))))


class Model(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.places = nn.Parameter(flow.randn(1, 8, 32))
        self.blocks = nn.ModuleList([Block(32, 4, scale) for _ in range(2)])
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64)
        self.head.bias.requires_grad_(False)

    def forward(self, tokens, targets):
        x = self.table(tokens) + self.places[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).reshape(-1, 64), targets.reshape(-1))


def transformer():
    return Model(), (flow.randint(0, 64, (2, 8)), flow.randint(0, 64, (2, 8)))


def trained(scale=1.0):
    """All of it is trained, as pipelines do."""
    model = Model(scale)
    model.head.bias.requires_grad_(True)
    return model, transformer()[1]


def noisy():
    model, inputs = transformer()
    model.blocks = nn.ModuleList([RandomBlock(32, 4, 1.0) for _ in range(2)])
    return model, inputs


def scaled():
    """The same layers; a layer graph does not say that they compute something else."""
    return trained(scale=20.0)


class RandomBlock(Block):
    """With dropouts, and a path that whole samples drop."""

    def __init__(self, width, heads, scale):
        super().__init__(width, heads, scale)
        self.drop_scores, self.drop = nn.Dropout(0.2), nn.Dropout(0.3)

    def forward(self, x):
        h = self.norm_1(x)
        q, k, v = self.split(self.q(h)), self.split(self.k(h)), self.split(self.v(h))
        scores = (q @ k.transpose(-2, -1)) * (self.scale / math.sqrt(q.shape[-1]))
        out = (self.drop_scores(F.softmax(scores, dim=-1)) @ v).transpose(1, 2).reshape(*x.shape)
        x = x + self.drop(self.o(out))
        h = self.down(F.silu(self.up(self.norm_2(x))))
        return x + h * flow.floor(0.7 + flow.rand(x.shape[0], 1, 1)) / 0.7


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2, 2))
        self.more = nn.Conv2d(8, 16, 3, padding=1, groups=2)
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, images, classes):
        x = self.more(self.features(images))
        return F.cross_entropy(self.head(flow.flatten(flow.relu(x), start_dim=1)), classes)


def pictures():
    return Pictures(), (flow.randn(2, 3, 16, 16), flow.randint(0, 10, (2,)))
