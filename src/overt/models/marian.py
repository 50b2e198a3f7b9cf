"""The Transformers of Evolving Attention, Tables 5 and 6, as Hugging Face Marian models.

Marian has sinusoidal positions, tied embeddings and LayerNorm after each block, as in Vaswani et al. 2017.
Its parameters without embeddings are those that the paper counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from transformers import MarianMTModel


class Size(NamedTuple):
    """Sizes of one network.

    Attributes:
        width: of embeddings and hidden states.
        feed_forward: hidden width of the feed-forward blocks.
        heads: of each attention. For Lite the paper does not say; only 4 give the FLOPs that it counts.
        layers: of the encoder, and of the decoder.
    """

    width: int
    feed_forward: int
    heads: int
    layers: int = 6


SIZES = {
    "lite": Size(160, 160, 4),  # Wu et al. 2020; 2,482,560 parameters without embeddings
    "base": Size(512, 2048, 8),  # Vaswani et al. 2017; 44,138,496
    "tiny": Size(64, 64, 4, layers=2),  # for tests and for the stand-in language
    "small": Size(96, 192, 4, layers=3),
}
LONGEST = 1024  # tokens that there are positions for


def marian(
    size: Size, vocabulary: int, *, pad: int, eos: int, dropout: float = 0.1, most_new_tokens: int = 256
) -> MarianMTModel:
    """An untrained Marian with one vocabulary for both languages.

    Args:
        size: of the network.
        vocabulary: number of token ids.
        pad: id of padding.
        eos: id of the end of a sentence, which also starts the decoder.
        dropout: on embeddings and block outputs.
        most_new_tokens: `generate` stops after so many.
    """
    from transformers import GenerationConfig, MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=vocabulary,
        decoder_vocab_size=vocabulary,
        d_model=size.width,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_ffn_dim=size.feed_forward,
        decoder_ffn_dim=size.feed_forward,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        max_position_embeddings=LONGEST,
        dropout=dropout,
        attention_dropout=0.0,
        activation_dropout=0.0,
        # Marian's own defaults for these are not the paper's network; without scaled embeddings a network of
        # Lite's width hardly learns at the paper's learning rate.
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=pad,
        eos_token_id=eos,
        bos_token_id=None,
        decoder_start_token_id=eos,
        forced_eos_token_id=eos,
    )
    model = MarianMTModel(config)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        pad_token_id=pad,
        eos_token_id=eos,
        decoder_start_token_id=eos,
        forced_eos_token_id=eos,
        num_beams=5,
        max_new_tokens=most_new_tokens,
    )
    return model


def size_without_embeddings(model: nn.Module) -> int:
    """Number of parameters as the paper counts them: without embeddings, positions and the output layer."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in embeddings)
