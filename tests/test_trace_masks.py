"""Families whose masks depend on the name of their attention, against their eager attention."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import overt
from long_traces import states_of
from overt.tracing.capture import watching
from zoo.inputs import batch_of, fitting
from zoo.models import build

# Families that ask for the name of their attention while they run. The keys that they choose for each query
# come with the call instead, in `indices`; those of `block_indices` are refused. To the others it makes no
# difference: they attend by themselves (Falcon), or take a mask of either type.
CHOOSING = {"axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "mistral_large4"}
ASKING = CHOOSING | {"minimax_m3_vl", "decision_transformer", "falcon", "glm5_next", "gpt2"}


def eager_of(model: Any) -> Any:
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


def attended_by(model: Any, inputs: dict[str, Any], name: str = "attentions") -> list[Tensor]:
    """Maps that eager attention returns, averaged over heads."""
    with torch.no_grad():
        found = getattr(eager_of(model)(**inputs, output_attentions=True), name)
    return [weights.mean(dim=1) for weights in found]


@pytest.mark.parametrize("padding", ["", "left"])
def test_keys_that_a_family_has_not_chosen_are_hidden(padding: str) -> None:
    model = build("deepseek_v32")
    inputs = batch_of(model, fitting(model), padding)
    maps = attended_by(model, inputs)
    real = inputs["attention_mask"].bool()
    rows = real[:, :, None] & real[:, None, :]
    seen = rows & torch.ones(rows.shape[1:], dtype=torch.bool).tril()
    assert bool((maps[0][seen] == 0).any())  # it does choose
    with torch.no_grad():
        logits = model(**inputs).logits
    for t in (overt.trace(model, inputs), states_of(model, inputs)):
        for got, want in zip(t.maps, maps, strict=True):
            torch.testing.assert_close(got * rows, want * rows, rtol=0.0, atol=2e-6)
        torch.testing.assert_close(t.outputs, logits[:, -1], rtol=1e-4, atol=1e-5)


def test_blocks_of_keys_that_are_chosen_are_refused_in_one_line() -> None:
    model = build("llama")
    inputs = batch_of(model, fitting(model))
    with (
        pytest.raises(ValueError, match=r"^LlamaAttention cannot be traced: it chooses blocks of keys \(bl"),
        watching(model, lambda _: None),
    ):
        model(**inputs, block_indices=torch.zeros(2, 1, 9, 1, dtype=torch.int64))


def test_families_that_ask_for_the_name_of_their_attention_are_known() -> None:
    folder = Path(transformers.__file__).parent / "models"
    asks = re.compile(r"config\._attn_implementation (?:==|!=|in|not in) [\"(\[{]")
    builders = {"timm_backbone", "timm_wrapper", "qwen2_5_omni"}  # ask before they run
    found = {path.parent.name for path in folder.glob("*/modeling_*.py") if asks.search(path.read_text())}
    assert found - builders == ASKING


def test_a_mask_that_was_not_made_is_the_one_that_was_asked_for() -> None:
    # Its attentions call themselves not causal, and its text has causal masks.
    model = build("aimv2")
    inputs = batch_of(model, fitting(model))
    text = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    maps = attended_by(model.text_model, text)
    assert not any(bool(cells.triu(1).any()) for cells in maps)
    for t in (overt.trace(model, inputs, stack="text_model"), states_of(model, inputs, stack="text_model")):
        assert t.kind == "causal"
        for got, want in zip(t.maps, maps, strict=True):
            torch.testing.assert_close(got, want, rtol=0.0, atol=2e-6)
    image = states_of(model, inputs, stack="vision_model")  # which has no masks at all
    assert image.kind == "encoder"
    assert bool((image.raw(0) > 0).all())


@pytest.mark.parametrize("padding", ["", "right"])
def test_models_without_sdpa_have_the_masks_of_eager_attention(padding: str) -> None:
    # Its encoder, which is not dispatched, adds its mask.
    model = build("bigbird_pegasus")
    inputs = batch_of(model, fitting(model), padding)
    with torch.no_grad():
        logits = model(**inputs).logits
    decoder, cross = (attended_by(model, inputs, f"{name}_attentions") for name in ("decoder", "cross"))
    t = states_of(model, inputs, stack="model.decoder")
    real = inputs["decoder_attention_mask"].bool()[:, :, None]
    for got, want in zip([*t.maps, *t.cross], [*decoder, *cross], strict=True):
        torch.testing.assert_close(got * real, want * real, rtol=0.0, atol=2e-6)
    last = [int(row.nonzero().max()) for row in real]
    torch.testing.assert_close(t.outputs, logits[[0, 1], last], rtol=1e-4, atol=1e-5)


def test_a_model_with_two_text_configs_is_traced() -> None:
    model = build("musicgen")
    inputs = batch_of(model, fitting(model))
    t = overt.trace(model, inputs)
    assert (t.kind, len(t.maps), len(t.encoder_maps), len(t.cross)) == ("encoder–decoder", 2, 2, 2)
    for got, want in zip(t.cross, attended_by(model, inputs, "cross_attentions"), strict=True):
        torch.testing.assert_close(got, want, rtol=0.0, atol=2e-6)
