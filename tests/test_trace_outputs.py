"""What a trace keeps for a viewer: the picture that the model saw, and what the model said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

import overt
from families import (
    BY_NAME,
    IMAGE,
    PAD,
    PAIR,
    TEXT,
    build,
    inputs_of,
    lengths_mask,
    llama_like,
    tokens,
)
from overt.models.agreement import AgreementClassifier
from overt.tracing.tracer import NAMED


def classifier(**settings: Any) -> Any:
    return build(hf.BertForSequenceClassification, lambda: hf.BertConfig(**{**TEXT, **settings}))()


def logits_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """By the model itself, outside of any trace: the oracle."""
    with torch.no_grad():
        found: Tensor = model(**inputs).logits
    return found


def tokenizer(count: int) -> Any:
    """Words w0, w1, …; "Ġ" marks w1's space, which a reader is not shown."""
    words = {("Ġw1" if n == 1 else f"w{n}"): n for n in range(count)}
    pieces = Tokenizer(models.WordLevel(words, unk_token="w3"))
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.Whitespace(), decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="w3", pad_token="w0")


# Outputs


@pytest.mark.parametrize("mixing", ["attention", "gradient"])
@pytest.mark.parametrize("name", ["BERT", "ViT"])
def test_outputs_of_a_classifier_are_its_logits(name: str, mixing: Any) -> None:
    family = BY_NAME[name]
    model, inputs = family.make(), inputs_of(family, padded=family.pads)
    traced = overt.trace(model, inputs, mixing=mixing)
    assert traced.outputs is not None
    assert traced.outputs.dtype == torch.float32
    assert not traced.outputs.requires_grad
    torch.testing.assert_close(traced.outputs, logits_of(model, inputs), atol=1e-5, rtol=1e-4)
    assert traced.labels == ["LABEL_0", "LABEL_1"]


@pytest.mark.parametrize("left", [False, True])
def test_outputs_of_a_causal_model_are_those_after_the_last_real_token(left: bool) -> None:
    family = BY_NAME["Llama"]
    model, inputs = family.make(), inputs_of(family, padded=True, left=left)
    traced = overt.trace(model, inputs)
    last = [8, 8, 8] if left else [8, 5, 3]
    logits = logits_of(model, inputs)
    torch.testing.assert_close(traced.outputs, logits[[0, 1, 2], last], atol=1e-5, rtol=1e-4)
    assert traced.outputs is not None
    assert traced.outputs.untyped_storage().nbytes() == 4 * 3 * 60, "other positions are let go"
    alone = overt.trace(model, inputs["input_ids"][2:, 5:] if left else inputs["input_ids"][2:, :4])
    torch.testing.assert_close(traced[2].outputs, alone.outputs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_outputs_of_an_encoder_decoder_are_those_after_its_last_target(name: str) -> None:
    family = BY_NAME[name]
    model, inputs = family.make(), inputs_of(family, padded=True)
    traced = overt.trace(model, inputs)
    expected = logits_of(model, inputs)[[0, 1, 2], [5, 4, 2]]
    torch.testing.assert_close(traced.outputs, expected, atol=1e-5, rtol=1e-4)
    assert traced.encoder.outputs is None
    with pytest.raises(ValueError, match="this trace has no outputs"):
        traced.encoder.predictions()


def test_a_contrasting_model_chooses_from_the_other_side() -> None:
    clip = BY_NAME["CLIP"]
    model, inputs = clip.make(), inputs_of(clip)
    with torch.no_grad():
        expected = model(**inputs)
    images = overt.trace(model, inputs, stack="vision_model")
    texts = overt.trace(model, inputs, stack="text_model")
    torch.testing.assert_close(images.outputs, expected.logits_per_image, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(texts.outputs, expected.logits_per_text, atol=1e-5, rtol=1e-4)
    two = {name: value[:2] for name, value in inputs.items()}
    assert overt.trace(model, two, stack="vision_model").labels == [], "no classes of its own"


class Torch(nn.Module):
    """torch's own stack, with or without a head."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3) if head else None

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layers(x)
        return hidden if self.head is None else self.head(hidden[:, 0])


def electra() -> Any:
    return build(hf.ElectraForPreTraining, lambda: hf.ElectraConfig(**TEXT, embedding_size=16))()


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (build(hf.BertModel, lambda: hf.BertConfig(**TEXT)), tokens()),
        (build(hf.ViTModel, lambda: hf.ViTConfig(**IMAGE)), torch.randn(1, 3, 24, 24)),
        (build(hf.BertForQuestionAnswering, lambda: hf.BertConfig(**TEXT)), tokens()),
        (lambda: overt.Encoder(16, 2, 1), {"x": torch.randn(1, 3, 16)}),
        (lambda: Torch(False), torch.randn(2, 5, 16)),
        (electra, tokens()),
    ],
    ids=["BERT", "ViT", "two answers", "overt", "torch", "one logit per token"],
)
def test_a_model_without_classes_is_traced_without_outputs(make: Any, inputs: Any) -> None:
    traced = overt.trace(make(), inputs)
    assert traced.outputs is None
    with pytest.raises(ValueError, match="this trace has no outputs") as caught:
        traced.predictions()
    assert "\n" not in str(caught.value)


def test_an_encoder_traced_alone_has_none_of_its_decoder_s_positions() -> None:
    model = BY_NAME["BART"].make()
    inputs = {"input_ids": tokens(length=6), "decoder_input_ids": tokens(length=6, seed=3)}
    assert overt.trace(model, inputs).outputs is not None
    alone = overt.trace(model, inputs, stack="model.encoder")
    assert alone.kind == "encoder"
    assert alone.outputs is None


def test_logits_are_taken_by_the_function_that_is_given() -> None:
    x = torch.randn(2, 5, 16)
    model = Torch(True).eval()
    with torch.no_grad():
        torch.testing.assert_close(overt.trace(model, x).outputs, model(x))
    bert = build(hf.BertModel, lambda: hf.BertConfig(**TEXT))()
    traced = overt.trace(bert, tokens(), output=lambda given: given.last_hidden_state[:, 0, :4])
    with torch.no_grad():
        expected = bert(tokens()).last_hidden_state[:, 0, :4]
    torch.testing.assert_close(traced.outputs, expected, atol=1e-5, rtol=1e-4)
    assert set(traced.predictions()[0].labels) == {"0", "1", "2", "3"}


# Posterior samples


def test_draws_have_the_outputs_that_a_loop_over_samples_gives() -> None:
    model = AgreementClassifier(60, [overt.Bayesian(k=3.0)], layers=3, width=32, heads=4).eval()
    inputs = {"input_ids": tokens(), "attention_mask": torch.ones(3, 9)}
    traced = overt.trace(model, inputs, samples=5, seed=2)
    with torch.no_grad():
        chains = [overt.Chain(step=0, sample=number, seed=2, kl=False) for number in range(5)]
        drawn = torch.stack([model(**inputs, chain=chain)["logits"] for chain in chains])
        mean = model(**inputs)["logits"]
    assert (drawn[0] - drawn[1]).abs().max() > 1e-4, "samples differ"
    torch.testing.assert_close(torch.stack([d.outputs for d in traced.draws if d.outputs is not None]), drawn)
    torch.testing.assert_close(traced.outputs, mean)
    torch.testing.assert_close(traced.draw(3).outputs, drawn[3])
    for example, found in enumerate(traced.predictions()):
        p = drawn[:, example].double().softmax(dim=-1)
        order = p.mean(dim=0).argsort(descending=True)
        assert found.labels == [str(number) for number in order.tolist()]
        torch.testing.assert_close(found.mean, p.mean(dim=0)[order])
        torch.testing.assert_close(found.draws, p[:, order])


def test_probabilities_of_draws_are_those_of_the_posterior() -> None:
    model = BY_NAME["BERT"].make()
    overt.attach(model, overt.Bayesian(k=1.0))
    inputs = {"input_ids": tokens(), "attention_mask": lengths_mask([9, 6, 4], 9)}
    told = overt.posterior(model, inputs, samples=6)
    for example, found in enumerate(overt.trace(model, inputs, samples=6).predictions()):
        order = [int(name.removeprefix("LABEL_")) for name in found.labels]
        assert found.draws is not None
        torch.testing.assert_close(found.draws.float(), told.samples[:, example, order])
        torch.testing.assert_close(found.mean.float(), told.mean[example, order])
        assert float(told.spread[example].max()) > 1e-4


def test_the_model_runs_once_and_once_for_each_sample() -> None:
    model = BY_NAME["BERT"].make()
    overt.attach(model, overt.Bayesian(k=3.0))
    runs: list[int] = []
    model.register_forward_hook(lambda *_: runs.append(1))
    overt.trace(model, tokens()).predictions()
    assert len(runs) == 1
    overt.trace(model, tokens(), samples=4).predictions()
    assert len(runs) == 1 + 5


# Predictions


def test_predictions_are_the_likeliest_classes_by_name() -> None:
    names = ["cat", "dog", "cow", "owl"]
    model = classifier(id2label=dict(enumerate(names)))
    traced = overt.trace(model, tokens())
    assert traced.labels == names
    p = logits_of(model, {"input_ids": tokens()}).double().softmax(dim=-1)
    for number, found in enumerate(traced.predictions(top=3)):
        best = sorted(range(4), key=lambda one: -float(p[number, one]))[:3]
        assert found.labels == [names[one] for one in best]
        torch.testing.assert_close(found.mean, p[number, best], atol=1e-5, rtol=1e-4)
        assert found.draws is None
    assert [len(found.labels) for found in traced.predictions(top=99)] == [4, 4, 4]
    torch.testing.assert_close(traced.predictions(4)[0].mean.sum(), torch.ones((), dtype=torch.float64))
    for top in (0, 1.5):
        with pytest.raises(ValueError, match="top must be a whole number of at least 1"):
            traced.predictions(top)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "link"),
    [
        ({"problem_type": "multi_label_classification", "num_labels": 3}, torch.sigmoid),
        ({"problem_type": "regression", "num_labels": 3}, lambda logits: logits),
        ({"num_labels": 1}, lambda logits: logits),
    ],
    ids=["several labels", "regression", "a number"],
)
def test_what_is_no_choice_of_one_class_gets_no_softmax(settings: Any, link: Any, tmp_path: Path) -> None:
    model = classifier(**settings)
    expected = link(logits_of(model, {"input_ids": tokens()}).double()).sort(descending=True).values
    traced = overt.trace(model, tokens())
    traced.save(tmp_path / "t")
    for one in (traced, overt.Trace.load(tmp_path / "t")):
        found = torch.stack([found.mean for found in one.predictions()])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_language_model_s_classes_are_named_by_its_tokenizer(tmp_path: Path) -> None:
    count = 2 * NAMED + 20
    model = llama_like("Llama", vocab_size=count)()
    with torch.no_grad():
        model.lm_head.weight[[1, 4]] = 3.0 * model.lm_head.weight[[1, 4]]
    inputs = {"input_ids": tokens(), "attention_mask": torch.ones(3, 9, dtype=torch.long)}
    # A model's vocabulary may be larger than its tokenizer's; the last ten tokens have no name.
    traced = overt.trace(model, inputs, tokenizer=tokenizer(count - 10))
    traced.save(tmp_path / "t")
    assert traced.labels == []
    assert traced.outputs is not None
    order = traced.outputs.argsort(descending=True)
    for one in (traced, overt.Trace.load(tmp_path / "t"), traced[0:3]):
        for row, found in zip(order.tolist(), one.predictions(NAMED), strict=True):
            assert found.labels == [f"w{n}" if n < count - 10 else str(n) for n in row[:NAMED]]
    assert len(traced[0:1].words) < count, "not every token is kept"
    assert overt.trace(model, inputs).predictions(1)[0].labels == [str(int(order[0, 0]))], "no tokenizer"


def test_the_last_names_are_there_for_every_draw() -> None:
    model = build(hf.GPT2LMHeadModel, lambda: hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=400))()
    overt.attach(model, overt.Bayesian(k=0.5))
    traced = overt.trace(model, tokens(), samples=3, tokenizer=tokenizer(400))
    for one in (traced, traced.draw(0), traced.draw(2)):
        assert all(name.startswith("w") for found in one.predictions(NAMED) for name in found.labels)


def test_a_decoder_s_classes_are_named_too() -> None:
    model = build(hf.BartForConditionalGeneration, lambda: hf.BartConfig(**PAIR))()
    traced = overt.trace(model, "w5 w6 w7", decoder="w8 w9", tokenizer=tokenizer(60))
    assert all(name.startswith("w") for name in traced.predictions()[0].labels)


# Pictures


def photo(width: int = 24, height: int = 24) -> Any:
    pil = pytest.importorskip("PIL.Image", reason="needs pillow")
    colours = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return pil.fromarray(colours)


def vit(**settings: Any) -> Any:
    return build(hf.ViTForImageClassification, lambda: hf.ViTConfig(**{**IMAGE, **settings}))()


def processor(**settings: Any) -> Any:
    pytest.importorskip("PIL", reason="needs pillow")
    return hf.ViTImageProcessor(size={"height": 24, "width": 24}, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
        {"do_normalize": False},
        {"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [127.5] * 3},
    ],
    ids=["ViT", "ImageNet", "not normalised", "not rescaled"],
)
def test_a_photo_comes_back_in_its_own_colours(settings: Any) -> None:
    image = photo()
    traced = overt.trace(vit(), [image, image.transpose(0)], processor=processor(**settings))
    assert traced.picture is not None
    assert traced.picture.dtype == torch.uint8
    assert traced.picture.shape == (2, 24, 24, 3)
    assert traced.image == (24, 24)
    for shown, given in zip(traced.picture, (image, image.transpose(0)), strict=True):
        assert np.abs(shown.numpy().astype(int) - np.asarray(given).astype(int)).max() <= 1


def test_a_photo_is_shown_as_resized() -> None:
    image = photo(60, 40)
    traced = overt.trace(vit(), image, processor=processor(resample=0))
    shown = np.asarray(image.resize((24, 24), resample=0)).astype(int)
    assert traced.picture is not None
    assert np.abs(traced.picture[0].numpy().astype(int) - shown).max() <= 1


class Silent:
    """A processor that does not say what it does."""

    def __call__(self, images: Any, return_tensors: str) -> dict[str, Tensor]:
        del return_tensors
        return {"pixel_values": torch.rand(len(images), 3, 24, 24)}


def test_pixels_of_unknown_scale_are_stretched_each_image_by_itself() -> None:
    pixels = torch.randn(2, 3, 24, 24) * torch.tensor([1.0, 50.0]).view(2, 1, 1, 1)
    for inputs in (pixels, {"pixel_values": pixels}):
        traced = overt.trace(vit(), inputs)
        assert traced.picture is not None
        for shown, given in zip(traced.picture, pixels, strict=True):
            scaled = np.interp(given.permute(1, 2, 0).numpy(), [given.min(), given.max()], [0, 255])
            assert np.abs(shown.numpy() - scaled).max() <= 0.51
    flat = overt.trace(vit(), torch.ones(1, 3, 24, 24)).picture
    assert flat is not None
    assert not flat.any()
    silent = overt.trace(vit(), photo(), processor=Silent()).picture
    assert silent is not None
    assert (int(silent.min()), int(silent.max())) == (0, 255)


def test_grey_images_have_three_equal_channels_and_others_no_picture() -> None:
    grey = overt.trace(vit(num_channels=1), torch.randn(2, 1, 24, 24)).picture
    assert grey is not None
    assert grey.shape == (2, 24, 24, 3)
    assert torch.equal(grey[..., 0], grey[..., 1])
    assert torch.equal(grey[..., 0], grey[..., 2])
    assert int(grey.max()) == 255
    many = overt.trace(vit(num_channels=5), torch.randn(1, 5, 24, 24))
    assert many.grid == (3, 3)
    assert many.picture is None


def test_only_a_trace_of_an_image_has_a_picture() -> None:
    clip = BY_NAME["CLIP"]
    model, inputs = clip.make(), inputs_of(clip)
    assert overt.trace(model, inputs, stack="vision_model").picture is not None
    assert overt.trace(model, inputs, stack="text_model").picture is None
    assert overt.trace(BY_NAME["BERT"].make(), tokens()).picture is None


# Parts and files


def same(ours: overt.Trace, theirs: overt.Trace) -> None:
    for name in ("picture", "outputs"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    assert [ours.labels, ours.words, ours.link] == [theirs.labels, theirs.words, theirs.link]
    assert len(ours.draws) == len(theirs.draws)
    for one, other in zip(ours.predictions(), theirs.predictions(), strict=True):
        assert one.labels == other.labels
        assert torch.equal(one.mean, other.mean)
        assert (one.draws is None) == (other.draws is None)
        assert one.draws is None or (other.draws is not None and torch.equal(one.draws, other.draws))


def test_pictures_and_outputs_are_sliced_and_saved(tmp_path: Path) -> None:
    model = vit(num_labels=7)
    overt.attach(model, overt.Bayesian(k=3.0))
    for samples in (0, 3):
        traced = overt.trace(model, torch.randn(3, 3, 24, 24), samples=samples)
        traced.save(tmp_path / "t")
        loaded = overt.Trace.load(tmp_path / "t")
        assert repr(loaded) == repr(traced)
        same(loaded, traced)
        same(loaded[1:], traced[1:])
        assert traced.outputs is not None
        assert traced.picture is not None
        one = traced[1]
        assert one.outputs is not None
        assert one.picture is not None
        assert torch.equal(one.outputs, traced.outputs[1:2])
        assert torch.equal(one.picture, traced.picture[1:2])
        assert one.predictions()[0].labels == traced.predictions()[1].labels
    same(loaded.draw(1), traced.draw(1))
    drawn, whole = one.draws[2].outputs, traced.draws[2].outputs
    assert drawn is not None
    assert whole is not None
    assert torch.equal(drawn, whole[1:2])


def test_files_from_before_pictures_and_outputs_are_read(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    model = vit()
    overt.attach(model, overt.Bayesian())
    traced = overt.trace(model, torch.randn(2, 3, 24, 24), samples=2)
    traced.save(tmp_path / "new")
    with safe_open(tmp_path / "new", framework="pt") as file:
        names = [n for n in file.keys() if n != "picture" and not n.endswith("outputs")]  # noqa: SIM118
        tensors = {name: file.get_tensor(name) for name in names}
        about = json.loads(file.metadata()["overt"])
    for name in ("labels", "words", "link"):
        del about[name]
    save_file(tensors, tmp_path / "old", {"format": "1", "overt": json.dumps(about)})
    old = overt.Trace.load(tmp_path / "old")
    assert torch.equal(old.rollout(), traced.rollout())
    assert [old.picture, old.outputs, old.draws[0].outputs, old.labels] == [None, None, None, []]
    assert len(old[1]) == 1
    with pytest.raises(ValueError, match="this trace has no outputs"):
        old.predictions()


def test_an_encoder_keeps_the_picture_that_it_read() -> None:
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        hf.ViTConfig(**IMAGE), hf.BertConfig(**TEXT)
    )
    config.decoder_start_token_id, config.pad_token_id = 1, PAD
    torch.manual_seed(1)
    model = hf.VisionEncoderDecoderModel(config).eval()
    inputs = {"pixel_values": torch.randn(2, 3, 24, 24), "decoder_input_ids": tokens(2, 4)}
    traced = overt.trace(model, inputs)
    assert traced.picture is not None
    assert traced.encoder.picture is traced.picture
    torch.testing.assert_close(traced.outputs, logits_of(model, inputs)[:, -1], atol=1e-5, rtol=1e-4)


def test_an_encoders_outputs_are_of_its_first_real_token() -> None:
    model = build(hf.BertForMaskedLM, lambda: hf.BertConfig(**TEXT))().eval()
    ids = torch.tensor([[0, 0, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    trace = overt.trace(model, {"input_ids": ids, "attention_mask": mask})
    assert trace.main_queries() == [2]
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits[:, 2]
    torch.testing.assert_close(trace.outputs, expected)
