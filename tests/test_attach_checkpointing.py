"""Gradient checkpointing of families whose layers hand their keyword arguments no further."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import overt
from attached import enliven
from overt.attaching import passes

pytestmark = pytest.mark.slow
EVOLVING = overt.Evolving(alpha=0.3, beta=0.3)
SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def made(kind: str, *mechanisms: overt.Mechanism) -> Any:
    torch.manual_seed(0)
    model = getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}Config")(**SMALL))
    return enliven(overt.attach(model, *mechanisms)).train()


def gradients_of_two_forwards(model: Any) -> dict[str, Tensor]:
    """Of two batches whose passes are both alive when the backward pass begins."""
    generator = torch.Generator().manual_seed(1)
    losses = []
    for rows in (2, 3):
        ids = torch.randint(5, 40, (rows, 7), generator=generator)
        losses.append(model(ids, labels=ids, use_cache=False).loss)
    (losses[0] + 2 * losses[1]).backward()
    assert not passes._running.passes
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["StableLm", "Nemotron", "Llama"])
@pytest.mark.parametrize(
    ("mechanisms", "reentrant"),
    [
        ((EVOLVING,), False),
        ((overt.Bayesian(),), False),
        ((EVOLVING, overt.Bayesian()), False),
        ((overt.Bayesian(prior=None),), True),  # reentrant checkpointing has no gradient of a KL
    ],
    ids=["evolving", "bayesian", "both", "reentrant"],
)
def test_each_of_two_passes_is_found_again(
    kind: str, mechanisms: tuple[overt.Mechanism, ...], reentrant: bool
) -> None:
    expected = gradients_of_two_forwards(made(kind, *mechanisms))
    model = made(kind, *mechanisms)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = gradients_of_two_forwards(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("kind", ["StableLm", "Nemotron"])
@pytest.mark.parametrize("mechanism", [EVOLVING, overt.Bayesian()], ids=["evolving", "bayesian"])
def test_reentrant_checkpointing_is_refused_where_it_would_lose_gradients(
    kind: str, mechanism: overt.Mechanism
) -> None:
    model = made(kind, mechanism)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(RuntimeError, match="reentrant checkpointing cuts the chain of maps"):
        gradients_of_two_forwards(model)
