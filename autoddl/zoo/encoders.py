"""DistilBERT and ViT; layers have the names of the corresponding HuggingFace modules."""

from __future__ import annotations

from dataclasses import dataclass

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.layer import Layer, Parameter

from .layers import BLOCK_INPUT, GraphBuilder, add, attention, conv2d, embedding, linear, loss, norm, position
from .transformers import Transformer

__all__ = ["VisionTransformer", "distilbert", "vit"]


@dataclass(frozen=True)
class VisionTransformer:
    """The sizes of a vision transformer on square images.

    Attributes:
        name: of the model.
        layers: number of blocks.
        width: features of the residual stream.
        heads: attention heads.
        intermediate: features inside the MLP.
        image: pixels along each side.
        patch: pixels along each side of a patch.
        channels: of the images.
        classes: outputs of the classifier.
        activation: of the MLP.
        qkv_bias: whether the query, key and value projections have biases.
        dropout: whether there are dropouts, as in :class:`.transformers.Transformer`.
    """

    name: str
    layers: int
    width: int
    heads: int
    intermediate: int
    image: int
    patch: int
    channels: int = 3
    classes: int = 1000
    activation: str = "gelu"
    qkv_bias: bool = True
    dropout: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise UserError(
                f"{self.name}: width {self.width} does not divide into {self.heads} heads; "
                "heads should be a divisor of the width"
            )
        if self.patch > self.image:
            raise UserError(f"{self.name}: patch_size is {self.patch}, should be at most image_size, {self.image}")

    @property
    def drop(self) -> tuple[str, ...]:
        """The epilogue of layers that a dropout follows."""
        return ("dropout",) if self.dropout else ()

    @property
    def rows(self) -> int:
        """Rows of a sample: the patches and the class token."""
        return (self.image // self.patch) ** 2 + 1


def distilbert(model: Transformer) -> LayerGraph:
    """DistilBERT with the masked-language-model head: BERT's post-norm blocks, without token types."""
    rows, width, inner = model.sequence, model.width, model.mlp_width
    builder = GraphBuilder(model.name, "sequence")
    tokens = builder.add(embedding("embeddings.word_embeddings", rows, model.vocabulary, width))
    places = builder.add(position("embeddings.position_embeddings", rows, model.num_positions, width))
    entry = builder.add(add("embeddings.embed", (rows, width), epilogue=model.drop), tokens, places)
    entry = builder.add(norm("embeddings.LayerNorm", rows, width), entry)
    qkv = "attention.q_lin+k_lin+v_lin"
    parts = [(f"attention.{part}_lin", width) for part in "qkv"]
    block = [
        (linear(qkv, rows, width, 3 * width, parts=parts), [BLOCK_INPUT]),
        (attention("attention", rows, model.heads, width // model.heads, causal=False, dropout=model.dropout), [qkv]),
        (linear("attention.out_lin", rows, width, width), ["attention"]),
        (add("add_1", (rows, width)), ["attention.out_lin", BLOCK_INPUT]),
        (norm("sa_layer_norm", rows, width), ["add_1"]),
        (linear("ffn.lin1", rows, width, inner, epilogue=(model.activation,)), ["sa_layer_norm"]),
        (linear("ffn.lin2", rows, inner, width, epilogue=model.drop), ["ffn.lin1"]),
        (add("add_2", (rows, width)), ["ffn.lin2", "sa_layer_norm"]),
        (norm("output_layer_norm", rows, width), ["add_2"]),
    ]
    end = builder.repeat("transformer.layer", model.layers, block, entry)
    tied_to = "embeddings.word_embeddings" if model.tied else None
    builder.chain(
        end,
        [
            linear("vocab_transform", rows, width, width, epilogue=(model.activation,)),
            norm("vocab_layer_norm", rows, width),
            linear("vocab_projector", rows, width, model.vocabulary, tied_to=tied_to),
            loss("loss", rows, model.vocabulary),
        ],
    )
    return builder.build()


def vit(model: VisionTransformer) -> LayerGraph:
    """A vision transformer with its classifier, which reads the class token.

    The patch embedding is a convolution.  Its pixels become rows, the class token comes before them, and learned positions are
    added: one opaque layer with both parameters.
    """
    rows, width, inner = model.rows, model.width, model.intermediate
    builder = GraphBuilder(model.name, "image")
    patches = conv2d(
        "embeddings.patch_embeddings.projection",
        (model.channels, model.image, model.image),
        width,
        kernel_size=model.patch,
        stride=model.patch,
    )
    tables = (
        Parameter("embeddings.cls_token", (1, 1, width)),
        Parameter("embeddings.position_embeddings", (1, rows, width)),
    )
    embed = Layer(
        "embeddings",
        "opaque",
        patches.output_shape,
        (rows, width),
        parameters=tables,
        epilogue=model.drop,
        modules=("embeddings",),
    )
    entry = builder.add(embed, builder.add(patches))
    attend = "attention.attention"
    qkv = f"{attend}.query+key+value"
    parts = [(f"{attend}.{part}", width) for part in ("query", "key", "value")]
    heads, head_dim = model.heads, width // model.heads
    block = [
        (norm("layernorm_before", rows, width), [BLOCK_INPUT]),
        (linear(qkv, rows, width, 3 * width, parts=parts, bias=model.qkv_bias), ["layernorm_before"]),
        (attention(attend, rows, heads, head_dim, causal=False, dropout=model.dropout), [qkv]),
        (linear("attention.output.dense", rows, width, width, epilogue=model.drop), [attend]),
        (add("add_1", (rows, width)), ["attention.output.dense", BLOCK_INPUT]),
        (norm("layernorm_after", rows, width), ["add_1"]),
        (linear("intermediate.dense", rows, width, inner, epilogue=(model.activation,)), ["layernorm_after"]),
        (linear("output.dense", rows, inner, width, epilogue=model.drop), ["intermediate.dense"]),
        (add("add_2", (rows, width)), ["output.dense", "add_1"]),
    ]
    end = builder.repeat("encoder.layer", model.layers, block, entry)
    builder.chain(
        end,
        [
            norm("layernorm", rows, width),
            Layer("class_token", "opaque", (rows, width), (1, width)),
            linear("classifier", 1, width, model.classes),
            loss("loss", 1, model.classes),
        ],
    )
    return builder.build()
