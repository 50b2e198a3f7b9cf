"""Blank-out, gradients and the other graphs, against loops, finite differences and linear algebra."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import overt
from families import BY_NAME, TEXT, build, inputs_of, llama_like, tokens
from overt.models.agreement import AgreementClassifier
from overt.tracing.capture import CapturedAttention
from overt.tracing.methods import gradients
from overt.tracing.mixing.effective import effective_map
from overt.tracing.mixing.norm import norm_map
from overt.tracing.mixing.projected import projected

UNK = 3


def agreement(seed: int = 0) -> tuple[AgreementClassifier, dict[str, Tensor]]:
    torch.manual_seed(seed)
    model = AgreementClassifier(20, layers=2, width=16, heads=2).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    ids = torch.tensor([[1, 4, 5, 6], [1, 7, 0, 0]])
    return model.eval(), {"input_ids": ids, "attention_mask": (ids != 0).long()}


@torch.no_grad()
def probability(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs)["logits"].double().softmax(-1)


def test_blankout_is_what_a_loop_over_tokens_gives() -> None:
    model, inputs = agreement()
    target = torch.tensor([0, 1])
    found = overt.trace(model, inputs).blankout(target=target, unk=2)
    assert found.shape == (2, 1, 1, 4)
    whole = probability(model, inputs)
    for example, token in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)):
        ids = inputs["input_ids"].clone()
        ids[example, token] = 2
        changed = probability(model, {**inputs, "input_ids": ids})
        expected = whole[example, target[example]] - changed[example, target[example]]
        assert float(found[example, 0, 0, token]) == pytest.approx(float(expected), abs=1e-12)
    assert not found[1, 0, 0, 2:].any(), "padding"
    traced = overt.trace(model, inputs)
    few = traced.blankout(target=target, unk=2, rows=1)
    torch.testing.assert_close(few, found, atol=1e-12, rtol=0)
    absolute = traced.blankout(target=target, unk=2, absolute=True)
    assert torch.equal(absolute, found.abs())
    sizes = traced.blankout(target=target, unk=2, normalize=True)
    torch.testing.assert_close(sizes.abs().sum(-1), torch.ones(2, 1, 1, dtype=torch.float64))
    assert torch.equal(sizes.sign(), found.sign())


def test_the_default_target_is_the_label_or_else_the_prediction() -> None:
    model, inputs = agreement()
    likely = probability(model, inputs).argmax(-1)
    by_default = overt.trace(model, inputs).blankout(unk=2)
    torch.testing.assert_close(by_default, overt.trace(model, inputs).blankout(unk=2, target=likely))
    labelled = overt.trace(model, {**inputs, "labels": 1 - likely}).blankout(unk=2)
    torch.testing.assert_close(labelled, overt.trace(model, inputs).blankout(unk=2, target=1 - likely))
    assert not torch.allclose(labelled, by_default)


def test_blankout_of_a_causal_model_explains_the_next_token_at_each_position() -> None:
    family = BY_NAME["GPT-2"]
    model, inputs = family.make(), {"input_ids": tokens(1, 5)}
    found = overt.trace(model, inputs).blankout(unk=UNK)
    assert found.shape == (1, 1, 5, 5)
    assert not found[0, 0].triu(1).any(), "later tokens change nothing"
    with torch.no_grad():
        whole = model(**inputs).logits.double().softmax(-1)
        ids = inputs["input_ids"].clone()
        ids[0, 1] = UNK
        changed = model(input_ids=ids).logits.double().softmax(-1)
    following = inputs["input_ids"][0, 4]
    expected = float(whole[0, 3, following] - changed[0, 3, following])
    assert float(found[0, 0, 3, 1]) == pytest.approx(expected, abs=1e-6)
    one = overt.trace(model, inputs).blankout(queries=3, unk=UNK)
    torch.testing.assert_close(one, found[:, :, 3:4])


def test_encoder_decoders_blank_source_and_target() -> None:
    family = BY_NAME["BART"]
    model, inputs = family.make(), inputs_of(family, padded=True)
    found = overt.trace(model, inputs).blankout(unk=UNK)
    assert found.shape == (3, 1, 6, 15)
    with torch.no_grad():
        whole = model(**inputs).logits.double().softmax(-1)
        ids = inputs["decoder_input_ids"].clone()
        ids[:, 1] = UNK
        changed = model(**{**inputs, "decoder_input_ids": ids}).logits.double().softmax(-1)
    following = inputs["decoder_input_ids"][0, 3]
    assert float(found[0, 0, 2, 9 + 1]) == pytest.approx(
        float(whole[0, 2, following] - changed[0, 2, following]), abs=1e-6
    )
    assert not found[2, 0, :, 4:9].any(), "padding of the source"


def test_patches_of_images_are_blanked_to_nought() -> None:
    family = BY_NAME["ViT"]
    model, inputs = family.make(), inputs_of(family)
    traced = overt.trace(model, inputs)
    found = traced.blankout()
    assert found.shape == (3, 1, 1, 10)
    pixels = inputs["pixel_values"].clone()
    pixels[:, :, 8:16, 16:24] = 0.0  # row 1, column 2
    whole, changed = probability(model, inputs), probability(model, {"pixel_values": pixels})
    target = whole.argmax(-1, keepdim=True)
    expected = (whole - changed).gather(1, target).squeeze(1)
    torch.testing.assert_close(found[:, 0, 0, 1 + 5], expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(traced.patches(found)[:, 0, 0, 1, 2], found[:, 0, 0, 6])
    slopes = traced.patches(traced.gradients())
    assert slopes.shape == (3, 1, 1, 3, 3)
    assert bool((slopes > 0).all())


def test_gradients_are_those_of_finite_differences() -> None:
    model, inputs = agreement()
    target = torch.tensor([0, 1])
    traced = overt.trace(model, inputs)
    norms, products = traced.gradients(target=target), traced.gradients(target=target, kind="input")
    table, step = model.tokens.weight.data, 1e-6
    for example, token, word in ((0, 2, 5), (1, 1, 7)):
        slopes = []
        for column in range(table.shape[1]):
            sides = []
            for sign in (1, -1):
                table[word, column] += sign * step
                sides.append(probability(model, inputs)[example, target[example]])
                table[word, column] -= sign * step
            slopes.append(float(sides[0] - sides[1]) / (2 * step))
        slope = torch.tensor(slopes, dtype=torch.float64)
        assert float(norms[example, 0, 0, token]) == pytest.approx(float(slope.norm()), rel=1e-5)
        expected = float((slope * table[word]).sum())
        assert float(products[example, 0, 0, token]) == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert not norms[1, 0, 0, 2:].any()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_integrated_gradients_add_up_to_the_change_from_a_blank_sentence() -> None:
    pytest.importorskip("captum", reason="needs the extra interpret")
    model, inputs = agreement()
    target = torch.tensor([0, 1])
    found = overt.trace(model, inputs).gradients(target=target, kind="integrated", unk=2, steps=200)
    blank = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 1, 2)
    change = probability(model, inputs) - probability(model, {**inputs, "input_ids": blank})
    expected = change.gather(1, target.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found.sum(dim=-1).flatten(), expected, atol=2e-4, rtol=0)


def test_a_pass_of_integrated_gradients_has_so_many_tokens_at_most_but_the_whole_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("captum", reason="needs the extra interpret")
    model, inputs = agreement()
    rows: list[int] = []
    model.register_forward_hook(lambda _module, _args, output: rows.append(len(output["logits"])))
    options: Any = {"target": torch.tensor([0, 1]), "kind": "integrated", "unk": 2}

    def found() -> tuple[Tensor, int]:
        rows.clear()
        values = overt.trace(model, inputs).gradients(**options)
        return values, max(rows)

    values, most = found()
    assert most == gradients.TOGETHER
    for tokens_of_a_pass, expected in ((4 * 10, 10), (4 * 3, 2), (1, 2)):  # whole sentences, both at least
        monkeypatch.setattr(gradients, "TOKENS", tokens_of_a_pass)
        others, most = found()
        assert most == expected
        torch.testing.assert_close(others, values, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["BERT", "ALBERT", "Llama", "T5", "BART", "DistilBERT"])
def test_gradients_reach_the_words_of_every_kind_of_model(name: str) -> None:
    family = BY_NAME[name]
    inputs = inputs_of(family, padded=True)
    model = family.make()
    traced = overt.trace(model, inputs)
    last = {"queries": 2} if name in ("Llama", "T5", "BART") else {}
    found = traced.gradients(**last)[:, 0, 0]
    real = traced.mask.clone()
    if name == "Llama":
        real[:, 3:] = False
    if traced.cross:
        real[:, 9 + 3 :] = False
    assert bool((found[real] > 0).all())
    assert not found[~real].any()


def test_models_without_logits_are_told_so() -> None:
    model = build(hf.BertModel, lambda: hf.BertConfig(**TEXT))()
    traced = overt.trace(model, tokens())
    for method in (traced.blankout, traced.gradients):
        with pytest.raises(ValueError, match="returns no logits to explain"):
            method(unk=UNK)
    chosen = overt.trace(model, tokens(), output=lambda output: output.pooler_output)
    assert chosen.blankout(unk=UNK).shape == (3, 1, 1, 9)
    with pytest.raises(ValueError, match="blank-out needs the id of an unknown token"):
        chosen.blankout()
    with pytest.raises(ValueError, match="target must lie in 0 to 31"):
        chosen.blankout(unk=UNK, target=32)
    with pytest.raises(ValueError, match="one per example"):
        chosen.blankout(unk=UNK, target=torch.tensor([1, 2]))


def bert_vectors(model: Any, layer: int, x: Tensor) -> Tensor:
    """W_O W_V x of a BERT layer by hand: (batch, head, key, width)."""
    block = model.bert.encoder.layer[layer].attention
    value = block.self.value(x).unflatten(-1, (4, 8)).transpose(1, 2)
    weight = block.output.dense.weight  # (width, head·dim)
    return torch.stack([value[:, head] @ weight[:, 8 * head : 8 * head + 8].T for head in range(4)], dim=1)


@torch.no_grad()
def test_norm_maps_are_sizes_of_what_is_added() -> None:
    family = BY_NAME["BERT"]
    model, inputs = family.make(), inputs_of(family)
    x = model(**inputs, output_hidden_states=True).hidden_states[1]
    vectors = bert_vectors(model, 1, x)
    weights = overt.trace(model, inputs, heads=True).maps[1]
    each = overt.trace(model, inputs, heads=True, mixing="norm").maps[1]
    both = overt.trace(model, inputs, mixing="norm").maps[1]
    added = weights.unsqueeze(-1) * vectors.unsqueeze(2)  # (batch, head, query, key, width)
    torch.testing.assert_close(each, added.norm(dim=-1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(both, added.sum(dim=1).norm(dim=-1), atol=1e-5, rtol=1e-4)


def test_norms_of_negative_weights_are_positive() -> None:
    weights, value = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 4, 5)
    call = CapturedAttention("a.0", "a", "encoder", weights, value=value, output=torch.randn(6, 10))
    for each in (False, True):
        assert bool((norm_map(call, each) > 0).all())
        opposite = norm_map(replace(call, weights=-weights), each)
        torch.testing.assert_close(opposite, norm_map(call, each))


@torch.no_grad()
def test_effective_attention_gives_the_same_output_and_no_more() -> None:
    config = {**TEXT, "num_attention_heads": 8}  # heads of width 4, shorter than the sentence
    model = build(hf.BertForSequenceClassification, lambda: hf.BertConfig(**config))()
    inputs = {"input_ids": tokens(2, 9)}
    plain = overt.trace(model, inputs, heads=True).maps[0].double()
    effective = overt.trace(model, inputs, heads=True, mixing="effective").maps[0].double()
    assert (plain - effective).abs().max() > 1e-3
    hidden = model.bert.embeddings(**inputs)
    value = model.bert.encoder.layer[0].attention.self.value(hidden).unflatten(-1, (8, 4)).transpose(1, 2)
    torch.testing.assert_close(effective @ value.double(), plain @ value.double(), atol=1e-5, rtol=1e-4)
    assert bool((effective.norm(dim=-1) <= plain.norm(dim=-1) + 1e-6).all()), "the shortest such rows"
    short = {"input_ids": tokens(2, 4)}
    same = overt.trace(model, short, heads=True, mixing="effective").maps[0]
    torch.testing.assert_close(same, overt.trace(model, short, heads=True).maps[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("width", [24, 3], ids=["wider than a head", "narrower than a head"])
def test_effective_attention_projects_onto_the_space_of_what_heads_write(width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights, value = torch.rand(1, 2, 9, 9, generator=generator), torch.rand(1, 2, 9, 5, generator=generator)
    output = torch.rand(width, 10, generator=generator)
    output[:, 4] = 2 * output[:, 3]  # the first head writes in fewer directions than it is wide
    call = CapturedAttention("a.0", "a", "encoder", weights, value=value, output=output)
    written = projected(call)
    expected = weights.double() @ written @ torch.linalg.pinv(written)
    torch.testing.assert_close(effective_map(call), expected, atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_effective_attention_of_causal_models_stays_causal() -> None:
    family = BY_NAME["Llama"]
    traced = overt.trace(family.make(), tokens(1, 12), mixing="effective", heads=True)
    assert not traced.maps[0].triu(1).any()
    signed = traced.rollout()
    assert bool(torch.isfinite(signed).all())
    flowed = traced.flow(queries=-1)
    assert bool((flowed >= 0).all())
    assert float(flowed.max()) <= 1 + 1e-12


def test_gradient_maps_are_those_of_finite_differences() -> None:
    model, inputs = agreement()
    target = torch.tensor([0, 1])
    traced = overt.trace(model, inputs, mixing="gradient", heads=True, target=target)
    weights = overt.trace(model, inputs, heads=True).maps[0].double()
    step = 1e-6
    for cell in ((0, 1, 0, 2), (0, 0, 3, 1), (1, 1, 0, 1)):
        sides = []
        for sign in (1.0, -1.0):

            def nudge(
                _: nn.Module, args: Any, output: Tensor, sign: float = sign, cell: Any = cell
            ) -> Tensor:
                del args
                changed = output.clone()
                changed[cell] += sign * step
                return changed

            handle = model.encoder.blocks[0].attention.map.register_forward_hook(nudge)
            with torch.no_grad():
                sides.append(model(**inputs)["logits"][cell[0], target[cell[0]]])
            handle.remove()
        slope = float(sides[0] - sides[1]) / (2 * step)
        expected = max(0.0, float(weights[cell]) * slope)
        assert float(traced.maps[0][cell]) == pytest.approx(expected, rel=1e-4, abs=1e-8)
    mean = overt.trace(model, inputs, mixing="gradient", target=target).maps[0]
    torch.testing.assert_close(mean, traced.maps[0].mean(dim=1))


@pytest.mark.slow
@pytest.mark.parametrize("mixing", ["gradient", "norm", "effective"])
@pytest.mark.parametrize("name", ["BERT", "ALBERT", "GPT-2", "Llama", "T5", "ViT", "Gemma 2", "Whisper"])
def test_other_graphs_serve_rollout_and_flow_in_every_kind_of_family(name: str, mixing: Any) -> None:
    family = BY_NAME[name]
    for attached in (False, True):
        model = family.make()
        if attached:
            overt.attach(model, overt.Bayesian())
        traced = overt.trace(model, inputs_of(family, padded=family.pads), mixing=mixing)
        for method in (traced.rollout, traced.flow):
            found = method(layers=-1, queries=0)
            assert bool(torch.isfinite(found).all())
            if method == traced.flow or mixing != "effective":
                assert bool((found >= 0).all())
            assert float(found.abs().max()) > 0.0


@pytest.mark.parametrize("mixing", ["gradient", "norm", "effective"])
def test_torch_and_own_attention_have_the_other_mixings_too(mixing: Any) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 5, 16)
    traced = overt.trace(model, {"src": x}, mixing=mixing, output=lambda states: states[:, 0])
    assert bool(traced.maps[0].abs().sum() > 0)
    with torch.no_grad():
        torch.testing.assert_close(traced.rollout().shape, torch.Size([2, 2, 5, 5]))
    own, inputs = agreement()
    assert overt.trace(own, inputs, mixing=mixing).flow().shape == (2, 2, 4, 4)


def test_norms_of_torch_attention_are_those_by_hand() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    x = torch.randn(1, 4, 8)
    traced = overt.trace(Holder(), {"x": x}, mixing="norm", heads=True)
    weights = attention(x, x, x, average_attn_weights=False)[1]
    value = (x @ attention.in_proj_weight[16:].T + attention.in_proj_bias[16:]).unflatten(-1, (2, 4))
    for head in range(2):
        added = value[0, :, head] @ attention.out_proj.weight[:, 4 * head : 4 * head + 4].T
        expected = weights[0, head] * added.norm(dim=-1)
        torch.testing.assert_close(traced.maps[0][0, head], expected.detach())


def test_a_projection_that_is_not_there_is_not_made_up() -> None:
    model = llama_like("BitNet")()  # a norm lies between attention and projection
    for mixing in ("norm", "effective"):
        with pytest.raises(ValueError, match=r"model\.layers.* is not followed by a linear projection"):
            overt.trace(model, tokens(), mixing=mixing)  # type: ignore[arg-type]


def test_adapters_on_the_projection_count() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    model = peft.get_peft_model(BY_NAME["BERT"].make(), peft.LoraConfig(target_modules=["dense"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    adapted = overt.trace(model, tokens(), mixing="norm").maps
    merged = overt.trace(model.merge_and_unload(), tokens(), mixing="norm").maps
    for ours, theirs in zip(adapted, merged, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("stack", ["vision_model", "text_model"])
def test_the_two_sides_of_clip_are_explained_against_each_other(stack: str) -> None:
    family = BY_NAME["CLIP"]
    model, inputs = family.make(), inputs_of(family)
    traced = overt.trace(model, inputs, stack=stack)
    found = traced.blankout(unk=3, target=1)
    name = "logits_per_image" if stack == "vision_model" else "logits_per_text"
    with torch.no_grad():
        whole = model(**inputs)[name].double().softmax(-1)
        changed = dict(inputs)
        if stack == "vision_model":
            changed["pixel_values"] = inputs["pixel_values"].clone()
            changed["pixel_values"][0, :, 0:8, 8:16] = 0.0
            token = 1 + 1
        else:
            changed["input_ids"] = inputs["input_ids"].clone()
            changed["input_ids"][0, 2] = 3
            token = 2
        expected = whole[0, 1] - model(**changed)[name].double().softmax(-1)[0, 1]
    assert float(found[0, 0, 0, token]) == pytest.approx(float(expected), abs=1e-6)
    slopes = traced.gradients(target=1)[:, 0, 0]
    assert slopes.shape == traced.mask.shape
    if stack == "vision_model":
        assert bool((slopes[:, 1:] > 0).all())
        assert not slopes[:, 0].any()


def test_classes_that_depend_on_the_batch_are_refused() -> None:
    class Compares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.encoder = nn.Embedding(20, 16), overt.Encoder(16, 2, 1)

        def forward(self, input_ids: Tensor) -> Tensor:
            states = self.encoder(self.embedding(input_ids))[:, 0]
            return states @ states.T

    traced = overt.trace(Compares(), {"input_ids": tokens(2, 5) % 20})
    with pytest.raises(ValueError, match="classes that depend on the batch"):
        traced.blankout(unk=3)


def test_labels_of_tokens_are_their_targets() -> None:
    model = build(hf.BertForTokenClassification, lambda: hf.BertConfig(**TEXT, num_labels=3))()
    labels = torch.randint(0, 3, (3, 9))
    labelled = overt.trace(model, {"input_ids": tokens(), "labels": labels}).blankout(unk=UNK)
    told = overt.trace(model, tokens()).blankout(unk=UNK, target=labels)
    torch.testing.assert_close(labelled, told)


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({"num_labels": 1, "problem_type": "regression"}, torch.rand(3)),
        ({"num_labels": 4, "problem_type": "multi_label_classification"}, torch.rand(3, 4)),
    ],
    ids=["regression", "several labels"],
)
def test_numbers_for_labels_are_no_classes(settings: dict[str, Any], labels: Tensor) -> None:
    model = build(hf.BertForSequenceClassification, lambda: hf.BertConfig(**TEXT, **settings))()
    found = overt.trace(model, {"input_ids": tokens(), "labels": labels}).blankout(unk=UNK)
    assert float(found.abs().max()) > 0


def test_frozen_models_and_inference_mode_have_gradients() -> None:
    model = BY_NAME["BERT"].make()
    expected = overt.trace(model, tokens(), mixing="gradient").maps[0]
    slopes = overt.trace(model, tokens()).gradients()
    model.requires_grad_(False)
    torch.testing.assert_close(overt.trace(model, tokens(), mixing="gradient").maps[0], expected)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with torch.inference_mode():
        ids = tokens().clone()
        torch.testing.assert_close(overt.trace(model, ids, mixing="gradient").maps[0], expected)
        torch.testing.assert_close(overt.trace(model, ids).gradients(), slopes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"unk": "[UNK]"}, "unk must be a whole number"),
        ({"unk": 60}, "unk must lie in 0 to 59, got 60"),
        ({"unk": 3, "target": "positive"}, "target must be the number of a class"),
        ({"unk": 3, "rows": 0}, "rows must be a whole number of at least 1"),
    ],
)
def test_mistaken_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        overt.trace(BY_NAME["BERT"].make(), tokens()).blankout(**arguments)


def test_gradient_maps_of_padded_causal_models_are_those_of_each_alone() -> None:
    model = BY_NAME["Llama"].make()
    ids = tokens(2, 6)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    both = overt.trace(model, {"input_ids": ids, "attention_mask": mask}, mixing="gradient")
    alone = overt.trace(model, ids[1:, :4], mixing="gradient")
    torch.testing.assert_close(both.maps[1][1:, :4, :4], alone.maps[1], atol=1e-6, rtol=1e-3)
