"""Training steps, for `gpu.py`, of a BERT with one of many forms of attention, ours and baselines."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gpu_forms as forms
import gpu_rivals as baselines
import overt
from gpu_forms import AS_CHOSEN, DEFINITION, FLEX, FUSED, MASKED, TEN_LINES, Kind, Named, compiled


def base_model(layers: int) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    make: Any = BertForSequenceClassification
    # No dropout of attention weights, which FlexAttention lacks; hidden states have dropout.
    settings: dict[str, Any] = {
        "attn_implementation": "sdpa",
        "attention_probs_dropout_prob": 0.0,
        "num_hidden_layers": layers,
    }
    return make(BertConfig(**settings)).to(forms.DEVICE).train()


@dataclass
class Trained(Named):
    """A BERT with one of the forms of attention."""

    model: Any
    carried: baselines.Carried | None = None
    naive: bool = False
    optimizer: Any = None


GROUPS = ("plain", "Bayesian", "Evolving", "both")


def trained_forms(base: Any, group: str, compiles: bool, way: baselines.Way) -> Iterator[Trained]:
    """A group's models, one per form of attention; `way` as in `baselines.plain_lse`."""
    if group == "plain":
        yield Trained("plain", AS_CHOSEN, "plain", copy.deepcopy(base))
        return
    mechanisms: dict[str, list[overt.Mechanism]] = {
        "Bayesian": [overt.Bayesian()],
        "Evolving": [overt.Evolving()],
        "both": [overt.Evolving(), overt.Bayesian()],
    }
    for naive in (False, True):
        model = copy.deepcopy(base)
        overt.attach(model, *mechanisms[group])
        kind: Kind = "rival" if naive else "ours"
        yield Trained(group, DEFINITION if naive else FUSED, kind, model, naive=naive)
    for number, (name, rule) in enumerate(rules_of(group, compiles).items()):
        model = copy.deepcopy(base)
        attention = f"baseline_{group}_{number}".lower()
        prior, convolution = group != "Evolving", group != "Bayesian"
        carried = baselines.install(model, attention, rule, prior, convolution)
        carried.way = way if name in (FLEX, MASKED) else None
        yield Trained(group, name, "rival", model, carried)


def rules_of(group: str, compiles: bool) -> dict[str, baselines.Attend]:
    """The baselines' attentions by name."""
    if group == "Bayesian":
        rules = {TEN_LINES: baselines.bayesian_rule(baselines.bayesian)}
        if compiles:
            rules |= {
                f"{TEN_LINES}, compiled": baselines.bayesian_rule(compiled(baselines.bayesian)),
                FLEX: baselines.bayesian_rule(compiled(baselines.flexed), hashes=True),
                MASKED: baselines.bayesian_rule(compiled(baselines.masked_sdpa)),
            }
        return rules
    rule, random = (baselines.evolving, False) if group == "Evolving" else (baselines.both, True)
    rules = {TEN_LINES: baselines.evolving_rule(rule, random)}
    if compiles:
        rules[f"{TEN_LINES}, compiled"] = baselines.evolving_rule(compiled(rule), random)
    return rules


def step_of(form: Trained, ids: Tensor, labels: Tensor, real: Tensor | None) -> Callable[[], Tensor]:
    """A training step under autocast: forward, backward, AdamW; it returns the loss."""
    carried, weight = form.carried, overt.Bayesian().loss_weight(None)
    more: dict[str, Tensor] = {} if real is None else {"attention_mask": real.long()}
    if carried is not None:
        carried.real = real
        carried.blocks = None
        if real is not None and form.name in (FLEX, MASKED):
            carried.blocks = baselines.padding_blocks(real)
    if form.optimizer is None:
        form.optimizer = torch.optim.AdamW(form.model.parameters(), lr=1e-7, fused=forms.DEVICE == "cuda")

    def step() -> Tensor:
        if carried is not None:
            carried.begin()
        with torch.autocast(forms.DEVICE, forms.DTYPE):
            loss: Tensor = form.model(input_ids=ids, labels=labels, **more).loss
        if carried is not None and carried.kl:
            loss = loss + weight * carried.total_kl()
        loss.backward()  # type: ignore[no-untyped-call]
        form.optimizer.step()
        form.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def naive_step() -> Tensor:
        with overt.naive():
            return step()

    return naive_step if form.naive else step
