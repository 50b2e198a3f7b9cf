"""Capture: what a trace holds, for every family, and that the model is left as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import overt
from families import BY_NAME, FAMILIES, SMALL, Family, build, eager, inputs_of, llama_like, tokens
from overt.models.agreement import AgreementClassifier
from overt.tracing.capture import CapturedAttention
from overt.tracing.collect import Collector
from overt.tracing.mixing.attention import Attention

EACH = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def eager_maps(family: Family, inputs: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Weights by the family's own eager attention: the oracle."""
    model = eager(family.make())
    with torch.no_grad():
        output = model(**inputs, output_attentions=True)
    if family.inputs == "both":
        output = output.vision_model_output
    if family.inputs in ("pair", "sound"):
        return {
            "encoder_maps": list(output.encoder_attentions),
            "maps": list(output.decoder_attentions),
            "cross": list(output.cross_attentions),
        }
    return {"maps": list(output.attentions)}


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("attached", [False, True], ids=["plain", "attached"])
def test_maps_are_those_of_eager_attention(family: Family, attached: bool) -> None:
    inputs = inputs_of(family, padded=family.pads)
    model = family.make()
    if attached:
        overt.attach(model, overt.Bayesian())  # its mean is plain attention
    stack = "vision_model" if family.inputs == "both" else None
    traced = overt.trace(model, inputs, heads=True, stack=stack)
    averaged = overt.trace(model, inputs, stack=stack)
    for name, expected in eager_maps(family, inputs).items():
        found = getattr(traced, name)
        assert len(found) == len(expected)
        for ours, mean, theirs in zip(found, getattr(averaged, name), expected, strict=True):
            real = torch.ones_like(ours, dtype=torch.bool)
            if (
                attached and family.inputs in ("text", "pair") and name != "cross"
            ):  # attached models hide padded queries
                rows = inputs[
                    "decoder_attention_mask" if name == "maps" and traced.cross else "attention_mask"
                ]
                real = rows.bool()[:, None, :, None].expand_as(ours)
            if attached and name == "cross" and family.inputs == "pair":
                real = inputs["decoder_attention_mask"].bool()[:, None, :, None].expand_as(ours)
            torch.testing.assert_close(ours[real], theirs[real], atol=2e-6, rtol=1e-4)
            torch.testing.assert_close(mean, ours.mean(dim=1), atol=1e-6, rtol=1e-5)


KINDS = {"pair": "encoder–decoder", "sound": "encoder–decoder", "image": "encoder", "both": "encoder"}


@pytest.mark.slow
@EACH
def test_kind_tokens_and_padding_are_known(family: Family) -> None:
    inputs = inputs_of(family, padded=family.pads)
    stack = "vision_model" if family.inputs == "both" else None
    traced = overt.trace(family.make(), inputs, stack=stack)
    causal = "causal" if "decoder" in family.attends else "encoder"
    assert traced.kind == KINDS.get(family.inputs, causal)
    assert all(len(words) == traced.mask.shape[1] for words in traced.tokens)
    for method in (traced.raw, traced.rollout, traced.flow):
        found = method(layers=-1)
        assert found.shape == (3, 1, traced.maps[0].shape[-2], traced.mask.shape[1])
        assert found.dtype == torch.float64
        assert not found.masked_fill(~traced.mask[:, None, None], 0.0).ne(found).any()
        real = traced.mask[:, traced.mask.shape[1] - found.shape[2] :]
        assert not found[:, 0][~real].any()
        assert (found[:, 0][real].sum(dim=-1) > 0.99).all()
    if family.inputs in ("image", "both"):
        assert traced.grid == (3, 3)
        assert traced.tokens[0][0] == "[CLS]"
        assert bool(traced.special[0, 0])
        assert not bool(traced.special[0, -1])
        assert traced.pixels(traced.rollout(queries=0)).shape == (3, 3, 1, 24, 24)


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "BART", "ViT"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    family = BY_NAME[name]
    model = family.make()
    model.train()
    next(model.children()).eval()
    modes = [module.training for module in model.modules()]
    before = model.config._attn_implementation
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    overt.trace(model, inputs_of(family), mixing="norm")
    for inputs in ({"no_such_argument": torch.ones(1)}, {}):
        with pytest.raises((TypeError, ValueError, AttributeError)):
            overt.trace(model, inputs)
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == before == "sdpa"
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_failing_forward_leaves_no_trace_behind() -> None:
    model = BY_NAME["BERT"].make().train()

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    handle = model.bert.encoder.layer[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        overt.trace(model, tokens())
    handle.remove()
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert overt.trace(model, tokens()).maps[0].shape == (3, 9, 9)


def test_families_that_attach_refuses_can_be_traced_by_their_own_attention() -> None:
    make = llama_like("GptOss", num_local_experts=2, num_experts_per_tok=1)
    traced = overt.trace(make(), tokens())
    sums = traced.maps[0].sum(dim=-1)
    assert traced.kind == "causal"
    assert bool((sums < 0.999).any()), "sinks take a part of each row"
    torch.testing.assert_close(traced.rollout().sum(dim=-1), torch.ones(3, 3, 9, dtype=torch.float64))
    # As in any other model, rows are normalised before the residual is added.
    assert not traced.sums_to_one
    share = traced.maps[0].double() / sums.double().unsqueeze(-1)
    torch.testing.assert_close(traced.rollout(layers=0)[:, 0], 0.5 * share + 0.5 * torch.eye(9).double())


def test_what_cannot_be_traced_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Linear cannot be traced: no attention .*overt.rollout"):
        overt.trace(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(TypeError, match="torch module, got str"):
        overt.trace("bert", tokens())  # type: ignore[arg-type]
    clip = BY_NAME["CLIP"]
    with pytest.raises(
        ValueError, match=r"several stacks of attention layers, choose one with stack=…: 'vision_model\.enc"
    ):
        overt.trace(clip.make(), inputs_of(clip))
    with pytest.raises(ValueError, match="no attention ran in 'nowhere'"):
        overt.trace(clip.make(), inputs_of(clip), stack="nowhere")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (3.0, "inputs must be text, token ids, images"),
        ([[1, 2], ["x"]], "inputs must be lists of whole numbers"),
        ([[1, 2], [61]], "input_ids must lie in 0 to 59, got 61"),
        (
            torch.zeros(1, 513, dtype=torch.long),
            "the input has 513 tokens, but the model has positions for 512",
        ),
        ([], "inputs must be text"),
        (torch.zeros(2, 3, 4, dtype=torch.long), "got a tensor of shape"),
        ("text", "needs its tokenizer"),
    ],
)
def test_inputs_that_are_none_are_refused_in_one_line(inputs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        overt.trace(BY_NAME["BERT"].make(), inputs)


class TorchPair(nn.Module):
    """torch's own encoder–decoder."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.transformer = nn.Transformer(16, 2, 2, 2, 24, batch_first=True, **settings)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=torch.bool)
        return self.transformer(source, target, tgt_mask=mask, src_key_padding_mask=padding)


def torch_weights(
    attention: nn.MultiheadAttention, query: Tensor, key: Tensor, hidden: Tensor | None
) -> Tensor:
    """Weights of torch's attention, by hand."""
    width, heads = attention.embed_dim, attention.num_heads
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    q = (query @ weight[:width].T + bias[:width]).unflatten(-1, (heads, -1)).transpose(1, 2)
    k = (
        (key @ weight[width : 2 * width].T + bias[width : 2 * width])
        .unflatten(-1, (heads, -1))
        .transpose(1, 2)
    )
    logits = q @ k.mT / (width // heads) ** 0.5
    return (logits if hidden is None else logits.masked_fill(hidden, -torch.inf)).softmax(dim=-1)


@pytest.mark.parametrize("norm_first", [False, True])
def test_torch_attention_is_traced_past_its_fast_path(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padding = torch.randn(2, 5, 16), torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=padding)
    traced = overt.trace(model, {"src": x, "src_key_padding_mask": padding}, heads=True)
    assert torch.equal(traced.mask, ~padding)
    seen = model.layers[0].norm1(x) if norm_first else x
    first = torch_weights(model.layers[0].self_attn, seen, seen, padding[:, None, None])
    torch.testing.assert_close(traced.maps[0], first.detach())
    with torch.no_grad():
        torch.testing.assert_close(model(x, src_key_padding_mask=padding), plain)


def test_torch_encoder_decoders_have_all_three_kinds_of_map() -> None:
    model = TorchPair().eval()
    source, target = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    padding = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()
    traced = overt.trace(model, {"source": source, "target": target, "padding": padding})
    assert traced.kind == "encoder–decoder"
    assert [len(traced.maps), len(traced.encoder_maps), len(traced.cross)] == [2, 2, 2]
    assert traced.cross[0].shape == (2, 4, 5)
    assert not traced.maps[0].triu(1).any()
    assert traced.rollout().shape == (2, 2, 4, 9)
    torch.testing.assert_close(traced.flow(queries=0)[..., 6:], torch.zeros(2, 2, 1, 3, dtype=torch.float64))


@pytest.mark.parametrize("form", ["plain", "evolving", "Bayesian", "both"])
def test_our_own_networks_are_traced(form: str) -> None:
    from overt.recipes.forms import FORMS

    model = AgreementClassifier(20, FORMS[form], layers=3, width=32, heads=4)
    ids = torch.tensor([[1, 4, 5, 6], [1, 7, 0, 0]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    traced = overt.trace(model, inputs, tokens=[["[CLS]", "a", "b", "c"], ["[CLS]", "d", "", ""]])
    assert traced.kind == "encoder"
    assert len(traced.maps) == 3
    assert torch.equal(traced.mask, ids != 0)
    assert traced.tokens[0][1] == "a"
    alone = overt.trace(model, {"input_ids": ids[1:, :2], "attention_mask": torch.ones(1, 2)})
    torch.testing.assert_close(traced[1].rollout()[..., :2, :2], alone.rollout(), atol=1e-6, rtol=1e-5)


def test_our_decoder_with_memory_has_source_tokens() -> None:
    decoder = overt.Decoder(16, 2, 2, cross=True)
    inputs = {"x": torch.randn(1, 4, 16), "memory": torch.randn(1, 6, 16)}
    traced = overt.trace(decoder, inputs)
    assert traced.kind == "encoder–decoder"
    assert traced.mask.shape == (1, 10)
    assert not traced.encoder_maps
    torch.testing.assert_close(traced.rollout().sum(dim=-1), torch.ones(1, 2, 4, dtype=torch.float64))


def test_evolving_parts_are_the_maps_of_the_equation() -> None:
    model = AgreementClassifier(20, [overt.Evolving(alpha=0.4, beta=0.3)], layers=3, width=32, heads=4)
    inputs = {"input_ids": torch.tensor([[1, 4, 5, 6]]), "attention_mask": torch.ones(1, 4)}
    traced = overt.trace(model, inputs, parts=True, heads=True)
    assert set(traced.parts) == {"attention", "convolution", "fused"}
    assert traced.parts["convolution"][0] is None
    for fused, used in zip(traced.parts["fused"], traced.maps, strict=True):
        assert fused is not None
        assert torch.equal(fused, used)
    torch.testing.assert_close(traced.parts["attention"][0], traced.maps[0])
    assert (traced.parts["attention"][2] - traced.maps[2]).abs().max() > 1e-3
    # With everything from the convolution, its part is the map.
    all_of_it = AgreementClassifier(20, [overt.Evolving(alpha=0.4, beta=1.0)], layers=3, width=32, heads=4)
    whole = overt.trace(all_of_it, inputs, parts=True)
    torch.testing.assert_close(whole.parts["convolution"][1], whole.maps[1])
    # And with nothing from anywhere else, so is the layer's own.
    own = AgreementClassifier(20, [overt.Evolving(alpha=0.0, beta=0.0)], layers=3, width=32, heads=4)
    plain = overt.trace(own, inputs, parts=True)
    torch.testing.assert_close(plain.parts["attention"][2], plain.maps[2])
    with pytest.raises(ValueError, match="parts=True needs a mechanism that exposes its parts"):
        overt.trace(BY_NAME["BERT"].make(), tokens(), parts=True)


def test_parts_of_an_attached_model() -> None:
    model = BY_NAME["GPT-2"].make()
    overt.attach(model, overt.Evolving(alpha=0.3, beta=0.4))
    traced = overt.trace(model, tokens(), parts=True)
    assert traced.parts["convolution"][0] is None
    assert traced.parts["convolution"][2] is not None
    assert not traced.parts["convolution"][2].triu(1).any()


@pytest.mark.parametrize("attached", [False, True])
def test_posterior_samples_have_mean_and_spread(attached: bool) -> None:
    if attached:
        model = BY_NAME["BERT"].make()
        overt.attach(model, overt.Bayesian(k=3.0))
        inputs: Any = tokens()
    else:
        model = AgreementClassifier(60, [overt.Bayesian(k=3.0)], layers=3, width=32, heads=4)
        inputs = {"input_ids": tokens(), "attention_mask": torch.ones(3, 9)}
    traced = overt.trace(model, inputs, samples=6)
    again = overt.trace(model, inputs, samples=6)
    assert len(traced.draws) == 6
    drawn = torch.stack([draw.maps[1] for draw in traced.draws])
    plain = overt.trace(model, inputs)
    assert (traced.samples, plain.samples) == (6, 0)
    assert torch.equal(traced.maps[1], plain.maps[1]), "maps are of the mean of the weights, samples or not"
    torch.testing.assert_close(traced.spread().mean[:, 1].float(), drawn.mean(dim=0))
    assert not torch.allclose(traced.maps[1], drawn.mean(dim=0), atol=1e-3), "which is another map"
    assert torch.equal(traced.draws[1].maps[1], again.draws[1].maps[1]), "the same seed draws the same"
    other = overt.trace(model, inputs, samples=6, seed=1)
    assert not torch.equal(traced.draws[1].maps[1], other.draws[1].maps[1])
    mean, spread = traced.spread("rollout", queries=0)
    by_hand = torch.stack([traced.draw(i).rollout(queries=0) for i in range(6)])
    torch.testing.assert_close(mean, by_hand.mean(dim=0))
    torch.testing.assert_close(spread, by_hand.std(dim=0, correction=0))
    assert float(spread.max()) > 1e-4
    with pytest.raises(ValueError, match="no posterior samples were traced"):
        plain.spread("flow")
    with pytest.raises(ValueError, match="samples needs random weights"):
        overt.trace(BY_NAME["BERT"].make(), tokens(), samples=2)


@pytest.mark.parametrize("name", ["BERT", "BART", "ViT"])
def test_a_trace_survives_a_file(name: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    traced = overt.trace(family.make(), inputs_of(family, padded=family.pads), heads=True)
    traced.save(tmp_path / "t.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]
    loaded = overt.Trace.load(tmp_path / "t.safetensors")
    assert repr(loaded) == repr(traced)
    assert loaded.tokens == traced.tokens
    assert loaded.grid == traced.grid
    for options in ({}, {"heads": "each"}, {"receptive_field": True}):
        assert torch.equal(loaded.flow(layers=-1, **options), traced.flow(layers=-1, **options))
    with pytest.raises(ValueError, match="blank-out needs the model"):
        loaded.blankout()


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(FileNotFoundError, match="no trace at"):
        overt.Trace.load(tmp_path / "none")
    (tmp_path / "junk").write_bytes(b"\x80\x04junk of some other kind")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        overt.Trace.load(tmp_path / "junk")
    save_file({"x": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(ValueError, match="holds no trace"):
        overt.Trace.load(tmp_path / "other")
    for about in ("{}", "[1]", "nonsense", '{"parts": {}, "draws": 0, "tokens": [["a"]]}'):
        save_file({"mask": torch.ones(1, 2)}, tmp_path / "broken", {"format": "1", "overt": about})
        with pytest.raises(ValueError, match="holds a broken trace") as caught:
            overt.Trace.load(tmp_path / "broken")
        assert "\n" not in str(caught.value)


def test_examples_are_taken_out_whole() -> None:
    family = BY_NAME["T5"]
    traced = overt.trace(family.make(), inputs_of(family, padded=True))
    one, some = traced[1], traced[1:]
    assert len(one) == 1
    assert len(some) == 2
    assert torch.equal(one.rollout(), traced.rollout()[1:2])
    assert torch.equal(some.flow(queries=-1), traced.flow(queries=-1)[1:])
    torch.testing.assert_close(one.blankout(unk=3), traced.blankout(unk=3)[1:2], atol=1e-6, rtol=1e-4)
    for index in (3, -4, slice(3, 5)):
        with pytest.raises(IndexError, match="trace holds 3 examples"):
            traced[index]


@pytest.mark.slow
def test_an_encoder_decoder_writes_its_own_target() -> None:
    family = BY_NAME["BART"]
    inputs = {name: inputs_of(family)[name] for name in ("input_ids", "attention_mask")}
    model = family.make().train()
    traced = overt.trace(model, inputs)
    assert model.training
    written = model.eval().generate(**inputs, max_new_tokens=64, do_sample=False)
    assert traced.maps[0].shape[-1] == written.shape[1] - 1
    given = overt.trace(model, inputs, decoder=[[1, 5, 6]] * 3)
    assert given.maps[0].shape[-1] == 3
    assert given.encoder.kind == "encoder"
    torch.testing.assert_close(
        given.encoder.rollout(), overt.rollout([m[:, None] for m in given.encoder_maps])
    )


def test_long_traces_keep_one_average_per_layer() -> None:
    model = llama_like("Llama", num_hidden_layers=2, max_position_embeddings=600)()
    traced = overt.trace(model, tokens(1, 512))
    assert [cells.shape for cells in traced.maps] == [(1, 512, 512)] * 2
    assert all(
        cells.dtype == torch.float32 and cells.untyped_storage().size() == 4 * 512**2 for cells in traced.maps
    )
    assert traced.visible[0] is traced.visible[1], "layers share their mask"
    np.testing.assert_allclose(traced.maps[1].sum(dim=-1).numpy(), 1.0, rtol=1e-5)


def test_only_averages_outlive_their_layer() -> None:
    collector = Collector(Attention())
    weights = torch.rand(1, 2, 3, 3)
    collector(CapturedAttention("a.0.b", "a", "encoder", weights))
    assert collector.calls[0].weights.untyped_storage().nbytes() == 0
    assert collector.map(0).untyped_storage().nbytes() == 4 * 9


def test_threads_take_turns_and_leave_the_model_as_it_was() -> None:
    from concurrent.futures import ThreadPoolExecutor

    model = BY_NAME["BERT"].make()
    expected = overt.trace(model, tokens()).maps[2]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: overt.trace(model, tokens()).maps[2], range(24)))
    assert all(torch.equal(cells, expected) for cells in found)
    assert model.config._attn_implementation == "sdpa"


def test_layers_that_do_not_attend_are_missed_not_skipped() -> None:
    make = llama_like("Lfm2", layer_types=["conv", "full_attention", "conv"], conv_L_cache=3)
    with pytest.raises(ValueError, match=r"layers 0, 2 of model\.layers do not attend"):
        overt.trace(make(), tokens())


def test_a_pooling_head_is_no_layer() -> None:
    config = {**SMALL, "intermediate_size": 40, "image_size": 24, "patch_size": 8}
    model = build(hf.SiglipVisionModel, lambda: hf.SiglipVisionConfig(**config))()
    traced = overt.trace(model, torch.randn(2, 3, 24, 24))
    assert traced.kind == "encoder"
    assert traced.grid == (3, 3)
    assert len(traced.maps) == 3
    assert traced.tokens[0][0] == "0,0", "no CLS"


def test_tokens_that_are_no_patches_are_not_named_so() -> None:
    config = {
        **SMALL,
        "intermediate_size": 40,
        "image_size": [24, 24],
        "patch_size": 8,
        "num_detection_tokens": 2,
    }
    traced = overt.trace(build(hf.YolosModel, lambda: hf.YolosConfig(**config))(), torch.randn(1, 3, 24, 24))
    assert traced.grid is None
    assert traced.tokens[0][1] == "1"


def test_lists_of_ids_of_several_lengths_are_padded() -> None:
    model = BY_NAME["BERT"].make()
    traced = overt.trace(model, [[5, 6, 7, 8], [9, 10]])
    assert traced.mask.tolist() == [[True] * 4, [True, True, False, False]]
    alone = overt.trace(model, [9, 10])
    torch.testing.assert_close(traced[1].rollout()[..., :2, :2], alone.rollout(), atol=1e-6, rtol=1e-5)


def test_labels_of_an_encoder_decoder_are_what_its_decoder_is_fed() -> None:
    model = BY_NAME["T5"].make()
    labels = torch.tensor([[5, 6, 7, -100], [8, 9, 10, 11], [12, 13, -100, -100]])
    traced = overt.trace(model, {"input_ids": tokens(), "labels": labels})
    by_hand = model.prepare_decoder_input_ids_from_labels(labels=labels)
    given = overt.trace(model, tokens(), decoder=by_hand)
    assert traced.maps[0].shape[-1] == 4
    torch.testing.assert_close(traced[1].rollout(), given[1].rollout(), atol=1e-6, rtol=1e-5)
    explained = traced.blankout(unk=3)[1]
    told = given.blankout(unk=3, target=labels.clamp(min=0))[1]
    torch.testing.assert_close(explained, told, atol=1e-6, rtol=1e-4)


def test_parts_and_one_layer_survive_a_file(tmp_path: Path) -> None:
    model = BY_NAME["BART"].make()
    overt.attach(model, overt.Evolving(alpha=0.3, beta=0.4))
    traced = overt.trace(model, inputs_of(BY_NAME["BART"]), parts=True)
    assert set(traced.parts) == {
        f"{kind}{part}"
        for kind in ("", "encoder ", "cross ")
        for part in ("attention", "convolution", "fused")
    }
    assert set(traced.encoder.parts) == {"attention", "convolution", "fused"}
    traced.save(tmp_path / "t")
    loaded = overt.Trace.load(tmp_path / "t")
    for name, maps in traced.parts.items():
        for ours, theirs in zip(loaded.parts[name], maps, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)
    one = AgreementClassifier(20, [overt.Evolving()], layers=1, width=32, heads=4)
    overt.trace(one, {"input_ids": tokens() % 20, "attention_mask": torch.ones(3, 9)}, parts=True).save(
        tmp_path / "one"
    )
    assert overt.Trace.load(tmp_path / "one").parts["convolution"] == [None]


def test_wrong_names_and_indices_are_refused() -> None:
    model = BY_NAME["BERT"].make()
    with pytest.raises(ValueError, match=r"tokens must be 3 lists of 9 words, got lists of \[2\]"):
        overt.trace(model, tokens(), tokens=[["a", "b"]])
    with pytest.raises(ValueError, match="got a flat list"):
        overt.trace(model, tokens(), tokens=["a", "b"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="examples are selected by number or slice"):
        overt.trace(model, tokens())[[0, 2]]  # type: ignore[index]
    assert len(overt.trace(model, tokens())[torch.tensor(1)]) == 1  # type: ignore[index]
    with pytest.raises(ValueError, match=r"no attention ran in 'nowhere'; stacks that did: 'bert\.encoder"):
        overt.trace(model, tokens(), stack="nowhere")
