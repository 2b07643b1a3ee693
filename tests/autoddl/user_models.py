"""OneFlow models as users write them: each function returns a module and its example inputs."""

import math

import oneflow as flow
import oneflow.nn as nn
import oneflow.nn.functional as F  # noqa: N812

BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 4, 6, 32, 4, 50


def tokens(batch=BATCH, length=LENGTH):
    return flow.zeros(batch, length, dtype=flow.int64)


def heads(x):
    return x.reshape(x.shape[0], x.shape[1], HEADS, WIDTH // HEADS).transpose(1, 2)


# ---- A GPT in another style than the built-in one: dropout, mask in a buffer, position table as a parameter ---------------


class Attention(nn.Module):
    def __init__(self, length=LENGTH):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.register_buffer("bias", flow.tril(flow.ones(length, length)).view(1, 1, length, length))

    def forward(self, x):
        length = x.shape[1]
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        scores = (heads(q) @ heads(k).transpose(-2, -1)) * (1.0 / math.sqrt(WIDTH // HEADS))
        scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        out = self.attn_dropout(F.softmax(scores, dim=-1)) @ heads(v)
        return self.resid_dropout(self.c_proj(out.transpose(1, 2).contiguous().view(*x.shape)))


class Block(nn.Module):
    def __init__(self, length=LENGTH):
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention(length)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Nano(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.pos = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(flow.zeros(1, 8, WIDTH))
        self.drop, self.blocks = nn.Dropout(0.1), nn.Sequential(*[Block() for _ in range(3)])
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x, y):
        h = self.drop(self.wte(x) + self.pos[:, : x.shape[1]])
        return F.cross_entropy(self.head(self.ln(self.blocks(h))).transpose(1, 2), y)


def nano():
    return Nano(), (tokens(), tokens())


class Trunk(nn.Module):
    """Blocks on data that are no tokens."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def trunk():
    return Trunk(), flow.randn(BATCH, LENGTH, WIDTH)


# ---- Attention in other forms ---------------------------------------------------------------------------------------


class Projections(nn.Module):
    """What the attentions below share: four projections of an embedding."""

    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(VOCABULARY, WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))


class Einsum(Projections):
    def forward(self, x):
        h = self.e(x)
        q, k, v = (p(h).view(*h.shape[:2], HEADS, WIDTH // HEADS) for p in (self.q, self.k, self.v))
        scores = F.softmax(flow.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(WIDTH // HEADS), -1)
        return self.o(flow.einsum("bhqk,bkhd->bqhd", scores, v).reshape(*h.shape))


def einsum():
    return Einsum(), tokens()


class OneHead(Projections):
    def forward(self, x):
        h = self.e(x)
        return self.o(
            flow.bmm(F.softmax(flow.bmm(self.q(h), self.k(h).transpose(1, 2)) / math.sqrt(WIDTH), -1), self.v(h))
        )


def one_head():
    return OneHead(), tokens()


class Biased(Projections):
    """One reshaped product for queries, keys and values; a learned bias of the scores; a mask from the inputs."""

    def __init__(self):
        super().__init__()
        self.w, self.bias = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(flow.zeros(1, HEADS, LENGTH, LENGTH))

    def forward(self, x, mask):
        h = self.e(x)
        q, k, v = self.w(h).reshape(*h.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / 3 + self.bias + (1 - mask)[:, None, None, :] * -1e4
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def biased():
    return Biased(), tokens(), flow.ones(BATCH, LENGTH)


class Cross(Projections):
    """Keys and values of another sequence; queries normed head by head."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH // HEADS)

    def forward(self, x, y):
        a, b = self.e(x), self.e(y)
        q, k, v = self.norm(heads(self.q(a))), heads(self.k(b)), heads(self.v(b))
        return self.o((F.softmax(q @ k.transpose(-1, -2) / 3, -1) @ v).transpose(1, 2).reshape(*a.shape))


def cross():
    return Cross(), tokens(), tokens()


def cross_of_unequal_lengths():
    return Cross(), tokens(), tokens(length=7)


# ---- Images ---------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, channels, out, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.down = None
        if stride != 1:
            self.down = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.down is None else self.down(x)))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.bn, self.pool = nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential(
            Residual(8, 8), Residual(8, 8), Residual(8, 16, 2), Residual(16, 16), Residual(16, 16)
        )
        self.avg, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(16, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.bn(self.stem(x))))
        return self.fc(flow.flatten(self.avg(self.layers(x)), 1))


def resnet():
    return ResNet(), flow.randn(2, 3, 32, 32)


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls, self.pos = nn.Parameter(flow.zeros(1, 1, WIDTH)), nn.Parameter(flow.zeros(1, 5, WIDTH))
        self.blocks, self.head = nn.ModuleList([Block(5) for _ in range(2)]), nn.Linear(WIDTH, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = flow.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def vision_transformer():
    return VisionTransformer(), flow.randn(BATCH, 3, 8, 8)


class OddConvolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.dilated, self.groups = nn.Conv2d(3, 8, 3, dilation=2), nn.GroupNorm(2, 8)
        self.up, self.prelu, self.depthwise = nn.ConvTranspose2d(8, 4, 2), nn.PReLU(), nn.Conv2d(4, 4, 3, groups=4)

    def forward(self, x):
        return self.depthwise(self.prelu(self.up(self.groups(self.dilated(x)))))


def odd_convolutions():
    return OddConvolutions(), flow.randn(BATCH, 3, 16, 16)


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up, self.out = (
            nn.Conv2d(3, 12, 3, padding=1),
            nn.Upsample(scale_factor=2.0),
            nn.Conv2d(12, 3, 1),
        )

    def forward(self, x):
        return F.l1_loss(self.out(self.up(flow.sigmoid(self.down(x))))[:, :, ::2, ::2], x)


def auto_encoder():
    return AutoEncoder(), flow.randn(2, 3, 8, 8)


# ---- Everything else ------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """One module called twice."""

    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.out(F.relu(self.fc(F.relu(self.fc(x)))))


def shared():
    return Shared(), (flow.randn(BATCH, 8),)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 4)

    def forward(self, x):
        a, b = self.a(x), self.b(x).tanh()
        c = self.c(a * b + a)
        return {"out": self.out(flow.cat([c, a], dim=-1)), "extra": [a.mean(), x]}


def branches():
    return Branches(), (flow.randn(BATCH, 8),)


class Unknown(nn.Module):
    """Operators nobody plans for, features that turn into rows, an input without the batch."""

    def __init__(self):
        super().__init__()
        self.a, self.w, self.g = nn.Linear(8, 8), nn.Parameter(flow.randn(6, 6)), nn.Parameter(flow.ones(8))
        self.never = nn.Linear(3, 3)

    def forward(self, x, m):
        h = flow.matmul(self.w, self.a(x) * self.g)
        h = flow.roll(flow.cumsum(h, 1), 1, 1) + m
        return F.softmax(h.transpose(1, 2), -1).sum(1), h.max()


def unknown():
    return Unknown(), (flow.randn(BATCH, 6, 8), flow.randn(6, 8))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.columns, self.ln, self.head = nn.Linear(6, 6), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        x = x + self.rows(self.ln(x).transpose(1, 2)).transpose(1, 2)
        return self.head((x + F.gelu(self.columns(x))).mean(1))


def mixer():
    return Mixer(), flow.randn(BATCH, 6, 8)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.lstm, self.o = (
            nn.Embedding(VOCABULARY, 8),
            nn.LSTM(8, 8, batch_first=True),
            nn.Linear(8, VOCABULARY),
        )

    def forward(self, x):
        return self.o(self.lstm(self.e(x))[0])


def recurrent():
    return Recurrent(), tokens()


def stacked(module: nn.Module):
    """A recurrent module behind a linear layer, on sequences of 5 rows of 8 features."""
    return nn.Sequential(nn.Linear(8, 8), module), flow.randn(BATCH, 5, 8)


def lstm():
    return stacked(nn.LSTM(8, 16, batch_first=True))


def deep_lstm():
    return stacked(nn.LSTM(8, 16, num_layers=2, bidirectional=True, batch_first=True))


def projected_lstm():
    return stacked(nn.LSTM(8, 16, proj_size=6, batch_first=True))


def gru():
    return stacked(nn.GRU(8, 16, batch_first=True))


def rnn():
    return stacked(nn.RNN(8, 16, batch_first=True))


class Gated(nn.Module):
    """Gate and up side by side in one matrix, the gate second."""

    def __init__(self):
        super().__init__()
        self.wi, self.wo = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x):
        up, gate = self.wi(x).chunk(2, -1)
        return self.wo(up * F.gelu(gate)) + x


def gated():
    return Gated(), flow.randn(BATCH, 6, 8)


class NormsByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.l = nn.Parameter(flow.ones(8)), nn.Linear(8, 8)

    def forward(self, x):
        h = self.l(x)
        h = self.w * (h * flow.rsqrt(h.to(flow.float32).pow(2).mean(-1, keepdim=True) + 1e-6))
        centred = h - h.mean(-1, keepdim=True)
        return F.layer_norm(centred / flow.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5), (8,))


def norms_by_hand():
    return NormsByHand(), flow.randn(BATCH, 6, 8)


class Parallel(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.attn, self.fc = nn.LayerNorm(WIDTH), Attention(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.ln(x)
        return x + self.attn(h) + self.fc(h)


class ParallelBranches(nn.Module):
    """Sums of three, and an output tied by a function."""

    def __init__(self):
        super().__init__()
        self.e, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([Parallel(), Parallel()])

    def forward(self, x):
        x = self.e(x)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.e.weight)


def parallel_branches():
    return ParallelBranches(), tokens()


class AcrossSamples(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        h = self.a(x)
        return (h - h.mean(0)).sum(), flow.matmul(h.transpose(0, 1), h)


def across_samples():
    return AcrossSamples(), flow.randn(BATCH, 8)


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.a, self.b = nn.Linear(16, 16), nn.Parameter(flow.randn(2, 16)), nn.Parameter(flow.zeros(16, 2))
        self.l.weight.requires_grad = False

    def forward(self, x):
        return F.linear(x, self.l.weight + flow.matmul(self.b, self.a), self.l.bias)


def low_rank():
    return LowRank(), flow.randn(BATCH, 16)


class Bag(nn.Module):
    """A row for padding, a mean over rows."""

    def __init__(self):
        super().__init__()
        self.e, self.o = nn.Embedding(VOCABULARY, 8, padding_idx=0), nn.Linear(8, 3)

    def forward(self, x, mask):
        h = self.e(x) * mask.unsqueeze(-1)
        return nn.BCEWithLogitsLoss()(self.o(h.sum(1) / mask.sum(1, keepdim=True)), flow.zeros(x.shape[0], 3))


def bag():
    return Bag(), tokens(), flow.ones(BATCH, LENGTH)


class TwoLosses(nn.Module):
    """A token's loss and a sentence's, weighted; a mask that the model does not know of."""

    def __init__(self):
        super().__init__()
        self.e, self.attn, self.head = nn.Embedding(VOCABULARY, WIDTH), Attention(), nn.Linear(WIDTH, VOCABULARY)
        self.pooler, self.sentence, self.criterion = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.CrossEntropyLoss()
        del self.attn.bias
        self.attn.bias = flow.tril(flow.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH)

    def forward(self, x, y, z):
        h = self.attn(self.e(x))
        words = F.cross_entropy(self.head(h).reshape(-1, VOCABULARY), y.reshape(-1))
        return words + 0.5 * self.criterion(self.sentence(flow.tanh(self.pooler(h[:, 0]))), z)


class MaskInList(nn.Module):
    """A mask whose values nobody finds."""

    def __init__(self):
        super().__init__()
        self.e, self.attn = nn.Embedding(VOCABULARY, WIDTH), Attention()
        del self.attn.bias
        self.masks = [flow.ones(1, 1, LENGTH, LENGTH)]

    def forward(self, x):
        self.attn.bias = self.masks[0]
        h = self.attn(self.e(x))
        del self.attn.bias
        return h


def mask_in_list():
    return MaskInList(), tokens()


def two_losses():
    return TwoLosses(), tokens(), tokens(), flow.zeros(BATCH, dtype=flow.int64)


def single():
    return nn.Linear(8, 8), flow.randn(BATCH, 8)


# ---- What is wrong --------------------------------------------------------------------------------------------------


class Forward(nn.Module):
    """Any forward."""

    def __init__(self, function):
        super().__init__()
        self.a, self.function = nn.Linear(8, 8), function

    def forward(self, x):
        return self.function(self.a(x))


def looks_at_values():
    return Forward(lambda h: h if h.sum().item() > 0 else -h), flow.randn(BATCH, 8)


def looks_at_arrays():
    return Forward(lambda h: h.numpy()), flow.randn(BATCH, 8)


def raises_in_forward():
    def fail(h):
        raise KeyError("first\nsecond")

    return Forward(fail), flow.randn(BATCH, 8)


def returns_no_tensor():
    return Forward(lambda h: None), flow.randn(BATCH, 8)


def wrong_shape():
    return nn.Linear(8, 8), flow.randn(BATCH, 9)


def too_few_inputs():
    return Cross(), tokens()


def no_batch():
    return nn.Linear(8, 8), flow.tensor(1.0)


def no_parameters():
    return nn.ReLU(), flow.randn(BATCH, 8)


def no_module():
    return flow.randn(3), flow.randn(3)


def no_inputs():
    return nn.Linear(8, 8), ()


def only_a_module():
    return nn.Linear(8, 8)


def nothing():
    return None


def an_array():
    return nn.Linear(8, 8), [[1.0, 2.0]]


def raises():
    raise RuntimeError("no such\nthing")


def leaves():
    raise SystemExit(3)


def wants_arguments(width):
    return nn.Linear(width, width), flow.randn(BATCH, width)


not_callable = 3
