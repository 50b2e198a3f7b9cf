"""ALTI and gradient-weighted relevance, against their definitions written out for two architectures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overt
from families import BY_NAME, inputs_of, tokens


def bert() -> Any:
    """BERT in float64, with biases and normalisations that are not those of a fresh model."""
    model = BY_NAME["BERT"].make().double().eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "bias" in name or "LayerNorm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def by_definition(y: Tensor, parts: Tensor) -> Tensor:
    """c_ij from y (token, width) and parts (token, token, width), number by number."""
    n = len(y)
    out = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            out[i, j] = max(0.0, float(y[i].abs().sum() - (y[i] - parts[i, j]).abs().sum()))
        out[i] /= out[i].sum()
    return out


def test_a_layer_that_ends_in_its_normalisation_is_decomposed_as_published() -> None:
    model = bert()
    ids = tokens(1, 7)
    traced = overt.trace(model, {"input_ids": ids}, mixing="alti")
    base = model.base_model
    with torch.no_grad():
        states = base(input_ids=ids, output_hidden_states=True).hidden_states
    for number, layer in enumerate(base.encoder.layer):
        x = states[number][0]
        attention, output = layer.attention.self, layer.attention.output
        heads, size = attention.num_attention_heads, attention.attention_head_size
        query, key, value = (
            part(x).view(len(x), heads, size).transpose(0, 1)
            for part in (attention.query, attention.key, attention.value)
        )
        weights = (query @ key.mT / size**0.5).softmax(dim=-1)
        parts = torch.zeros(len(x), len(x), x.shape[-1], dtype=torch.float64)
        for i in range(len(x)):
            for j in range(len(x)):
                for head in range(heads):
                    projection = output.dense.weight[:, head * size : (head + 1) * size]
                    parts[i, j] += weights[head, i, j] * (projection @ value[head, j])
            parts[i, i] += x[i]
        whole = parts.sum(dim=1) + output.dense.bias
        y = output.LayerNorm(whole)
        deviation = (whole.var(dim=-1, unbiased=False) + output.LayerNorm.eps).sqrt()
        scaled = (
            (parts - parts.mean(dim=-1, keepdim=True)) / deviation[:, None, None] * output.LayerNorm.weight
        )
        want = by_definition(y.detach(), scaled.detach())
        torch.testing.assert_close(traced.maps[number][0].double(), want, rtol=1e-5, atol=1e-6)
        plain = by_definition(whole.detach(), parts.detach())  # as if nothing were normalised
        assert not torch.allclose(traced.maps[number][0].double(), plain, atol=1e-2)


def test_a_layer_that_begins_with_its_normalisation_is_decomposed_before_the_next() -> None:
    model = BY_NAME["Llama"].make().double().eval()
    ids = tokens(1, 6)
    traced = overt.trace(model, {"input_ids": ids}, mixing="alti")
    layer = model.model.layers[1]
    seen: dict[str, Any] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.update(x=(args or (kwargs["hidden_states"],))[0]), with_kwargs=True
        ),
        layer.self_attn.v_proj.register_forward_hook(lambda _, __, out: seen.update(value=out)),
        layer.post_attention_layernorm.register_forward_hook(lambda _, args, __: seen.update(y=args[0])),
    ]
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    maps = overt.trace(model, {"input_ids": ids}, heads=True).maps[1][0].double()
    x, y = seen["x"][0], seen["y"][0]
    heads, size = maps.shape[0], layer.self_attn.head_dim
    value = seen["value"][0].view(len(x), -1, size)
    group = heads // value.shape[1]
    parts = torch.zeros(len(x), len(x), x.shape[-1], dtype=torch.float64)
    for i in range(len(x)):
        for j in range(i + 1):
            for head in range(heads):
                projection = layer.self_attn.o_proj.weight[:, head * size : (head + 1) * size]
                parts[i, j] += maps[head, i, j] * (projection @ value[j, head // group])
        parts[i, i] += x[i]
    torch.testing.assert_close(parts.sum(dim=1), y, rtol=1e-5, atol=1e-6)
    want = by_definition(y, parts.detach())
    torch.testing.assert_close(traced.maps[1][0].double(), want, rtol=1e-5, atol=1e-6)
    assert torch.equal(traced.maps[1][0].triu(1), torch.zeros(6, 6))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_torchs_own_layers(norm_first: bool, batch_first: bool) -> None:
    torch.manual_seed(0)
    make = nn.TransformerEncoderLayer(16, 4, 24, norm_first=norm_first, batch_first=batch_first)
    model = nn.TransformerEncoder(make, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 16)
    traced = overt.trace(model, {"src": x if batch_first else x.transpose(0, 1)}, mixing="alti")
    assert traced.maps[0].shape == (2, 5, 5)
    alone = overt.trace(model, {"src": x[1:] if batch_first else x[1:].transpose(0, 1)}, mixing="alti")
    torch.testing.assert_close(traced.maps[1][1:], alone.maps[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["BERT", "ALBERT", "GPT-2", "Llama", "ViT", "ModernBERT", "Mistral"])
def test_rows_sum_to_one_and_rollout_adds_no_residual(name: str) -> None:
    family = BY_NAME[name]
    traced = overt.trace(family.make(), inputs_of(family), mixing="alti")
    real = traced.mask
    for cells in traced.maps:
        torch.testing.assert_close(cells.sum(dim=-1)[real], torch.ones(int(real.sum())), rtol=1e-5, atol=1e-5)
    product = torch.eye(real.shape[1], dtype=torch.float64).expand(len(real), -1, -1)
    for cells in traced.maps:
        product = cells.double() @ product
    found = traced.rollout(layers=-1)[:, 0]
    torch.testing.assert_close(found[real], product[real], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("BART", "encoder_attn is cross-attention"),
        ("Gemma 2", "normalises nothing that is the sum of its input and its attention's output"),
    ],
)
def test_what_it_is_not_defined_for_is_refused(name: str, message: str) -> None:
    family = BY_NAME[name]
    with pytest.raises(ValueError, match=message):
        overt.trace(family.make(), inputs_of(family), mixing="alti")


def classifier() -> Any:
    torch.manual_seed(2)
    config = BY_NAME["BERT"].make().config
    config.num_labels = 3
    import transformers

    return transformers.BertForSequenceClassification(config).double().eval()


def test_relevance_is_the_published_update() -> None:
    model = classifier()
    ids = tokens(2, 7)
    model.set_attn_implementation("eager")
    given = model(input_ids=ids, output_attentions=True)
    want = torch.eye(7, dtype=torch.float64).repeat(2, 1, 1)
    slopes = torch.autograd.grad(given.logits[:, 1].sum(), given.attentions)
    for weights, slope in zip(given.attentions, slopes, strict=True):
        update = (weights * slope).clamp(min=0.0).mean(dim=1).detach()
        want = want + update @ want
    traced = overt.trace(model, {"input_ids": ids}, mixing="relevance", target=1)
    found = traced.rollout(layers=-1)[:, 0] * 2 ** len(given.attentions)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-7)
    shares = overt.trace(model, {"input_ids": ids}, mixing="gradient", target=1).rollout(layers=-1)[:, 0]
    assert not torch.allclose(traced.rollout(layers=-1, normalize=True)[:, 0], shares, atol=1e-3)


def test_relevance_of_cross_attention_is_refused() -> None:
    family = BY_NAME["BART"]
    with pytest.raises(ValueError, match='cross-attention: use mixing="gradient"'):
        overt.trace(family.make(), inputs_of(family), mixing="relevance")
