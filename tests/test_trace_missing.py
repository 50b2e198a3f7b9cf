"""Models of transformers whose maps would be too many or too few: they are refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import overt
from long_traces import BYTES
from zoo.inputs import batch_of, fitting
from zoo.models import build, small_settings


def made(kind: str) -> tuple[Any, dict[str, Any]]:
    model = build(kind)
    return model, batch_of(model, fitting(model))


def eager_maps(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return [weights.mean(dim=1) for weights in model(**inputs, output_attentions=True).attentions]


@pytest.mark.parametrize("memory", [2**30, BYTES])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("diffllama", r"model\.layers\.0\.self_attn cannot be traced: it attends more than once in one call"),
        ("timesfm2_5", r"model\.layers\.0\.self_attn cannot be traced: it runs 2 times, and whether"),
        ("bigbird_pegasus", r"model\.encoder\.layers\.0\.self_attn \(BigBirdPegasusEncoderAttention\)"),
        ("git", r"git\.encoder\.layer\.0\.attention \(GitAttention\) attends, and not through.*…: 'git"),
    ],
)
def test_maps_that_are_not_one_per_layer_are_refused(kind: str, message: str, memory: int) -> None:
    model, inputs = made(kind)
    with pytest.raises(ValueError, match=rf"^{message}[^\n]*$"):
        overt.trace(model, inputs, memory=memory)


def test_an_encoder_whose_attention_is_not_recognised_is_not_left_out() -> None:
    model, inputs = made("led")
    with pytest.raises(ValueError, match=r"^no attention was recognised in what makes the states that led\."):
        overt.trace(model, inputs)
    decoder = overt.trace(model, inputs, stack="led.decoder.layers")  # whose source is the encoder's states
    assert (len(decoder.maps), len(decoder.cross), len(decoder.encoder_maps)) == (2, 2, 0)
    with torch.no_grad():
        states = model.get_encoder()(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
    given = {**inputs, "encoder_outputs": (states,)}  # then they are an input
    assert torch.equal(overt.trace(model, given).cross[0], decoder.cross[0])


def test_pictures_are_traced_one_at_a_time() -> None:
    model, inputs = made("qwen2_vl")
    with pytest.raises(ValueError, match=r"^model\.visual\.blocks\.0\.attn cannot be traced: it attends"):
        overt.trace(model, inputs, stack="model.visual")
    pair = overt.trace(model, inputs, stack="model.language_model")
    one = {name: value[: len(value) // 2] for name, value in inputs.items()}
    picture = overt.trace(model, one, stack="model.visual")
    assert len(picture.maps) == len(model.model.visual.blocks)
    for got, want in zip(pair.maps, eager_maps(model, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=0.0, atol=2e-6)


def test_a_model_whose_layers_share_one_attention_runs_it_several_times() -> None:
    model, inputs = made("albert")
    t = overt.trace(model, inputs)
    assert len(t.maps) == model.config.num_hidden_layers > len(set(t.paths))
    for got, want in zip(t.maps, eager_maps(model, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=0.0, atol=2e-6)


def test_layers_that_have_the_values_of_an_earlier_one_are_named() -> None:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    settings = {**small_settings(Gemma4TextConfig, "gemma4_text"), "num_hidden_layers": 4}
    kinds = ["sliding_attention", "full_attention"] * 2
    model = Gemma4ForCausalLM(
        Gemma4TextConfig(**{**settings, "layer_types": kinds, "num_kv_shared_layers": 1})
    )
    ids = torch.randint(3, 90, (2, 9))
    message = r"^model\.layers\.3\.self_attn attends to the values of model\.layers\.1\.self_attn, as layers"
    with pytest.warns(UserWarning, match=message):
        t = overt.trace(model.eval(), ids)
    for got, want in zip(t.maps, eager_maps(model, {"input_ids": ids}), strict=True):
        torch.testing.assert_close(got, want, rtol=0.0, atol=2e-6)
