"""Models for tests of fused kernels, on a GPU where there is one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import overt

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
EVOLVING = overt.Evolving(alpha=0.3, beta=0.4)
MECHANISMS: dict[str, list[overt.Mechanism]] = {
    "evolving": [EVOLVING],
    "bayesian": [overt.Bayesian()],
    "both": [EVOLVING, overt.Bayesian(k=2.0)],
}


def attached(kind: str, mechanisms: list[overt.Mechanism], **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    """A small Hugging Face model and a padded batch."""
    import transformers as hf

    torch.manual_seed(0)
    size = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    ids = torch.randint(3, 50, (2, 9))
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(9) < torch.tensor([[6], [9]])).long()}
    if kind == "bert":
        drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model: Any = hf.BertForSequenceClassification(hf.BertConfig(**size, **drop, num_attention_heads=2))
        inputs["labels"] = torch.tensor([0, 1])
    elif kind == "llama":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**size, **heads))
        inputs["labels"] = ids
    else:
        size = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 50}
        layers = {"encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        model = hf.BartForConditionalGeneration(hf.BartConfig(**size, **layers, **heads))
        inputs["labels"] = ids
    overt.attach(model.train(), *mechanisms, **settings)
    for name, parameter in model.named_parameters():
        if ".overt." in name:
            nn.init.normal_(parameter, std=0.3)
    return model.to(DEVICE), {name: value.to(DEVICE) for name, value in inputs.items()}


def kernels_in(graphs: list[torch.fx.GraphModule]) -> int:
    """How many attentions are kernels in compiled graphs."""
    ops = torch.ops.overt.bayesian.default, torch.ops.overt.evolving.default
    return sum(node.target in ops for graph in graphs for node in graph.graph.nodes)


def spied(graphs: list[torch.fx.GraphModule], backend: str) -> Any:
    """A backend that keeps the graphs it is given."""
    from torch._dynamo import lookup_backend

    def compile_fx(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend(backend)(graph, inputs)

    return compile_fx
