"""Small models with mechanisms attached, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import families
import overt
from families import Family, inputs_of

LIVE = overt.Evolving(alpha=0.3, beta=0.3, decoder_alpha=0.3)


def enliven(model: Any, seed: int = 5) -> Any:
    """Random parameters that let much through, so that nothing hides behind an identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".overt." in name and ".bayesian." not in name:
                drawn = torch.randn(parameter.shape, generator=generator) * 0.3
                if ".evolving." in name:
                    parameter.copy_(drawn + (0.2 if name.endswith("bias") else 0.0))
                else:
                    parameter.add_(drawn)
    return model


def tokens_of(family: Family, model: Any, inputs: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Per-token outputs of each stack, (batch, token, width), with what is real in them, (batch, token)."""
    output = model(**inputs, output_hidden_states=True)
    if family.inputs == "image":
        pairs = [(output.hidden_states[-1], None)]
    elif family.inputs == "both":
        text, vision = output.text_model_output, output.vision_model_output
        pairs = [(text.last_hidden_state, inputs["attention_mask"]), (vision.last_hidden_state, None)]
    elif family.inputs in ("pair", "sound"):
        pairs = [
            (output.encoder_last_hidden_state, inputs.get("attention_mask")),
            (output.decoder_hidden_states[-1], inputs.get("decoder_attention_mask")),
        ]
    else:
        pairs = [(output.hidden_states[-1], inputs["attention_mask"])]
    return [(x, torch.ones(x.shape[:2]) if real is None else real) for x, real in pairs]


def loss_inputs(family: Family, model: Any) -> dict[str, Any]:
    """Inputs with which the model returns a loss."""
    inputs: dict[str, Any] = inputs_of(family, padded=True)
    if family.inputs == "both":
        return {**inputs, "return_loss": True}
    if family.inputs in ("pair", "sound"):
        target = inputs.pop("decoder_input_ids")
        return {**inputs, "labels": target.masked_fill(target == families.PAD, -100)}
    if family.generates:
        ids = inputs["input_ids"]
        return {**inputs, "labels": ids.masked_fill(ids == families.PAD, -100)}
    return {**inputs, "labels": torch.tensor([0, 1, 1]) % model.config.num_labels}


def attached(family: Family, *mechanisms: Any, **settings: Any) -> Any:
    return enliven(overt.attach(family.make(), *mechanisms, **settings))


def shallow(model: Any, layers: int = 2) -> Any:
    """A model of fewer layers, where each costs a compiler seconds."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.ModuleList) and len(child) == families.LAYERS:
                setattr(module, name, child[:layers])
    model.config.num_hidden_layers = layers
    return model


def without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model
