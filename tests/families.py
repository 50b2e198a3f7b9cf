"""The families of the attach battery: small random models, their inputs, and where they attend.

`attends` is written by hand, from each family's own code, so that what `attach` finds by itself is held
against something that did not come from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor

WIDTH, HEADS, LAYERS, WORDS = 32, 4, 3, 60
PAD, BOS, EOS = 0, 1, 2
SMALL = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
# Wide enough for maps that are far from uniform.
SPREAD = 0.15
SPECIAL = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
TEXT = {**SMALL, "intermediate_size": 40, "vocab_size": WORDS, "initializer_range": SPREAD, **SPECIAL}
IMAGE = {**SMALL, "intermediate_size": 40, "image_size": 24, "patch_size": 8, "initializer_range": SPREAD}
PAIR = {
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "decoder_start_token_id": BOS,
    "forced_eos_token_id": None,
    "init_std": SPREAD,
    **SPECIAL,
}


@dataclass(frozen=True)
class Family:
    """One row of the battery.

    Attributes:
        name: how the documents call it.
        make: a small random model, in evaluation mode.
        attends: kind → names of its attentions, in order; "*" stands for the layer.
        inputs: "text", "pair", "image", "sound" or "both" (image and text).
        generates: whether it has generate().
        calls: how many layers call each attention, where they share one.
        checkpoints: whether the family has gradient checkpointing.
    """

    name: str
    make: Callable[[], Any]
    attends: dict[str, str]
    inputs: str = "text"
    generates: bool = False
    calls: int = 1
    checkpoints: bool = True

    @property
    def pads(self) -> bool:
        """Whether a batch can hold padding."""
        return self.inputs in ("text", "pair", "both")

    def paths(self, kind: str) -> list[str]:
        """Names of a kind's attentions, in order."""
        pattern = self.attends.get(kind)
        if pattern is None:
            return []
        return [pattern] if "*" not in pattern else [pattern.replace("*", str(i)) for i in range(LAYERS)]


def build(model: Any, config: Any) -> Callable[[], Any]:
    def make() -> Any:
        torch.manual_seed(1)
        made = model(config()).eval()
        if made.can_generate():
            made.generation_config.update(pad_token_id=PAD, eos_token_id=EOS)
        return made

    return make


def eager(model: Any) -> Any:
    """The model with its family's eager attention in every stack; T5's had configs of their own once."""
    model.set_attn_implementation("eager")
    for module in model.modules():
        if isinstance(module, hf.PreTrainedModel):
            module.config._attn_implementation_internal = "eager"
    return model


def tokens(batch: int = 3, length: int = 9, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, WORDS, (batch, length), generator=generator)


def lengths_mask(lengths: list[int], total: int, left: bool = False) -> Tensor:
    """1 for real tokens, 0 for padding."""
    position = torch.arange(total).expand(len(lengths), -1)
    length = torch.tensor(lengths).view(-1, 1)
    return ((position >= total - length) if left else (position < length)).long()


def inputs_of(family: Family, padded: bool = False, left: bool = False) -> dict[str, Tensor]:
    """A batch of three; `padded` cuts the second and third short."""
    generator = torch.Generator().manual_seed(7)
    lengths = [9, 6, 4] if padded else [9, 9, 9]
    mask = lengths_mask(lengths, 9, left)
    ids = tokens().masked_fill(mask == 0, PAD)
    pictures = torch.randn(3, 3, 24, 24, generator=generator)
    if family.inputs == "image":
        return {"pixel_values": pictures}
    if family.inputs == "both":
        ids = ids.clone()
        ids[torch.arange(3), mask.cumsum(1).argmax(1)] = EOS  # CLIP pools where the sentence ends
        return {"input_ids": ids, "attention_mask": mask, "pixel_values": pictures}
    if family.inputs == "sound":
        sound = torch.randn(3, 8, 40, generator=generator)
        return {"input_features": sound, "decoder_input_ids": tokens(length=6, seed=3)}
    if family.inputs == "pair":
        target_mask = lengths_mask([6, 5, 3] if padded else [6, 6, 6], 6, left)
        target = tokens(length=6, seed=3).masked_fill(target_mask == 0, PAD)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "decoder_input_ids": target,
            "decoder_attention_mask": target_mask,
        }
    return {"input_ids": ids, "attention_mask": mask}


def llama_like(kind: str, **more: Any) -> Callable[[], Any]:
    config = getattr(hf, f"{kind}Config")
    settings = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, **more}
    return build(getattr(hf, f"{kind}ForCausalLM"), lambda: config(**settings))


def pair_like(kind: str, model: str, **more: Any) -> Callable[[], Any]:
    config = getattr(hf, f"{kind}Config")
    return build(getattr(hf, model), lambda: config(**{**PAIR, **more}))


PAIR_PATHS = {
    "encoder": "model.encoder.layers.*.self_attn",
    "decoder": "model.decoder.layers.*.self_attn",
    "cross": "model.decoder.layers.*.encoder_attn",
}
LLAMA_PATHS = {"decoder": "model.layers.*.self_attn"}
MODERN = {
    **TEXT,
    "cls_token_id": BOS,
    "sep_token_id": EOS,
    "local_attention": 6,
    "global_attn_every_n_layers": 2,
}
T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 40, "num_layers": LAYERS, "num_heads": HEADS, "vocab_size": WORDS}
GPT2 = {
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "vocab_size": WORDS,
    "n_positions": 64,
    "initializer_range": SPREAD,
    **SPECIAL,
}
OPT = {
    **SMALL,
    "ffn_dim": 40,
    "vocab_size": WORDS,
    "word_embed_proj_dim": WIDTH,
    "init_std": SPREAD,
    **SPECIAL,
}
CLIP_TEXT = {**TEXT, "max_position_embeddings": 64}
BLOOM = {"hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": WORDS}


def bert_paths(prefix: str) -> dict[str, str]:
    return {"encoder": f"{prefix}encoder.layer.*.attention.self"}


FAMILIES = [
    Family(
        "BERT",
        build(hf.BertForSequenceClassification, lambda: hf.BertConfig(**TEXT)),
        bert_paths("bert."),
    ),
    Family(
        "RoBERTa",
        build(
            hf.RobertaForSequenceClassification,
            lambda: hf.RobertaConfig(**TEXT, max_position_embeddings=64),
        ),
        bert_paths("roberta."),
    ),
    Family(
        "ALBERT",
        build(
            hf.AlbertForSequenceClassification,
            lambda: hf.AlbertConfig(**TEXT, embedding_size=16, classifier_dropout_prob=0.0),
        ),
        {"encoder": "albert.encoder.albert_layer_groups.0.albert_layers.0.attention"},
        calls=LAYERS,
        checkpoints=False,
    ),
    Family(
        "GPT-2",
        build(hf.GPT2LMHeadModel, lambda: hf.GPT2Config(**GPT2)),
        {"decoder": "transformer.h.*.attn"},
        generates=True,
    ),
    Family("Llama", llama_like("Llama"), LLAMA_PATHS, generates=True),
    Family(
        "T5",
        build(
            hf.T5ForConditionalGeneration,
            lambda: hf.T5Config(**T5, decoder_start_token_id=BOS, pad_token_id=PAD, eos_token_id=EOS),
        ),
        {
            "encoder": "encoder.block.*.layer.0.SelfAttention",
            "decoder": "decoder.block.*.layer.0.SelfAttention",
            "cross": "decoder.block.*.layer.1.EncDecAttention",
        },
        inputs="pair",
        generates=True,
    ),
    Family("BART", pair_like("Bart", "BartForConditionalGeneration"), PAIR_PATHS, "pair", generates=True),
    Family(
        "ViT",
        build(hf.ViTForImageClassification, lambda: hf.ViTConfig(**IMAGE)),
        {"encoder": "vit.layers.*.attention"},
        inputs="image",
    ),
    Family(
        "DistilBERT",
        build(
            hf.DistilBertForSequenceClassification,
            lambda: hf.DistilBertConfig(
                dim=WIDTH,
                n_layers=LAYERS,
                n_heads=HEADS,
                hidden_dim=40,
                vocab_size=WORDS,
                pad_token_id=PAD,
                initializer_range=SPREAD,
            ),
        ),
        {"encoder": "distilbert.transformer.layer.*.attention"},
    ),
    Family(
        "ELECTRA",
        build(hf.ElectraForSequenceClassification, lambda: hf.ElectraConfig(**TEXT, embedding_size=16)),
        bert_paths("electra."),
    ),
    Family(
        "ModernBERT",
        build(hf.ModernBertForSequenceClassification, lambda: hf.ModernBertConfig(**MODERN)),
        {"encoder": "model.layers.*.attn"},
    ),
    Family(
        "XLM-R",
        build(
            hf.XLMRobertaForSequenceClassification,
            lambda: hf.XLMRobertaConfig(**TEXT, max_position_embeddings=64),
        ),
        bert_paths("roberta."),
    ),
    Family("Marian", pair_like("Marian", "MarianMTModel"), PAIR_PATHS, "pair", generates=True),
    Family("mBART", pair_like("MBart", "MBartForConditionalGeneration"), PAIR_PATHS, "pair", generates=True),
    Family(
        "Pegasus", pair_like("Pegasus", "PegasusForConditionalGeneration"), PAIR_PATHS, "pair", generates=True
    ),
    Family(
        "Whisper",
        pair_like(
            "Whisper",
            "WhisperForConditionalGeneration",
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=64,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        PAIR_PATHS,
        inputs="sound",
        generates=True,
    ),
    Family("Mistral", llama_like("Mistral", sliding_window=4), LLAMA_PATHS, generates=True),
    Family("Qwen 2", llama_like("Qwen2"), LLAMA_PATHS, generates=True),
    Family("Qwen 3", llama_like("Qwen3"), LLAMA_PATHS, generates=True),
    Family("Gemma", llama_like("Gemma"), LLAMA_PATHS, generates=True),
    Family("Gemma 2", llama_like("Gemma2", sliding_window=4), LLAMA_PATHS, generates=True),
    Family(
        "OPT",
        build(hf.OPTForCausalLM, lambda: hf.OPTConfig(**OPT, max_position_embeddings=64)),
        {"decoder": "model.decoder.layers.*.self_attn"},
        generates=True,
    ),
    Family(
        "GPT-NeoX",
        build(hf.GPTNeoXForCausalLM, lambda: hf.GPTNeoXConfig(**TEXT, max_position_embeddings=64)),
        {"decoder": "gpt_neox.layers.*.attention"},
        generates=True,
    ),
    Family(
        "DeiT",
        build(hf.DeiTForImageClassification, lambda: hf.DeiTConfig(**IMAGE)),
        {"encoder": "deit.layers.*.attention"},
        inputs="image",
    ),
    Family(
        "CLIP",
        build(
            hf.CLIPModel,
            lambda: hf.CLIPConfig(text_config=CLIP_TEXT, vision_config=IMAGE, projection_dim=16),
        ),
        {
            "decoder": "text_model.encoder.layers.*.self_attn",
            "encoder": "vision_model.encoder.layers.*.self_attn",
        },
        inputs="both",
    ),
]

BY_NAME = {family.name: family for family in FAMILIES}

# Families that must be refused, and what the error must say.
REFUSED: list[tuple[str, Callable[[], Any], str]] = [
    ("DeBERTa v2", build(hf.DebertaV2Model, lambda: hf.DebertaV2Config(**TEXT)), "not dispatched"),
    ("MPNet", build(hf.MPNetModel, lambda: hf.MPNetConfig(**TEXT)), "not dispatched"),
    (
        "BLOOM",
        build(
            hf.BloomModel,
            lambda: hf.BloomConfig(hidden_size=WIDTH, n_layer=2, n_head=HEADS, vocab_size=WORDS),
        ),
        "not dispatched",
    ),
    (
        "GPT-J",
        build(
            hf.GPTJModel,
            lambda: hf.GPTJConfig(n_embd=WIDTH, n_layer=2, n_head=HEADS, rotary_dim=4, vocab_size=WORDS),
        ),
        "not dispatched",
    ),
    (
        "gpt-oss",
        llama_like("GptOss", num_local_experts=2, num_experts_per_tok=1),
        "not a softmax of scaled scores",
    ),
]
