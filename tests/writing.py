"""Small random models that write, and a tokenizer for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = "The code of the vault is 7429, and nobody else knows it. Keep it safe!\nWhat is the code? It is"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}


def byte_tokenizer(**options: Any) -> Any:
    """A byte-level tokenizer of some hundred pieces, with the signs of a chat."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"],
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", **options)


def tiny(name: str, **options: Any) -> Any:
    """A small random model whose words are those of the tokenizer; without an end, unless one is given."""
    torch.manual_seed(1)
    given = {"vocab_size": 290, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0, **options}
    if name == "GPT-2":
        config: Any = hf.GPT2Config(n_embd=32, n_head=4, n_layer=2, n_positions=128, **given)
        made: Any = hf.GPT2LMHeadModel(config)
    elif name == "T5":
        given |= {"decoder_start_token_id": 0}
        config = hf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, **given)
        made = hf.T5ForConditionalGeneration(config)
    else:
        config = hf.LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=2, **given)
        made = hf.LlamaForCausalLM(config)
    for parameter in made.parameters():  # so that attention is not even
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
    return made.eval()
