"""`overt caption`: words, weights, prior and spread of a picture, its page, and the commands beside it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

import overt
from overt.cli import app
from overt.cli.caption import drawn_words
from overt.cli.serve import open_served
from overt.data.named_images import square
from overt.mechanisms.chain import Chain
from overt.mechanisms.mechanism import Mechanism
from overt.models.att2in import Att2in
from overt.models.image_encoder import ImageEncoder
from overt.recipes import caption_training
from overt.recipes.caption_reading import prior_weights, read_caption
from overt.view.captions import END, RARE, CaptionMaps, Draw, caption_entry
from overt.view.pages import caption_page
from traces import caption

WORDS = ("a", "dog", "<script>alert(1)</script>", "runs", "cat")
WC = overt.Bayesian.paper("WC", k=1.0, d_mid=4)
LC = overt.Bayesian.paper("LC", sigma=0.5, d_mid=4)
SIDE = 32


def written(folder: Path, *mechanisms: Mechanism, attention: Any = "soft") -> Path:
    """A folder as training leaves it, of a network whose weights are not all alike."""
    torch.manual_seed(3)
    net = Att2in(len(WORDS) + 2, 12, attention, list(mechanisms), 16, 16, 8)
    for parameter in net.parameters():
        parameter.data.mul_(3.0)
    net.generator.bias.data[0] = -1.0  # so that captions have some words
    net.save(folder)
    encoder = ImageEncoder(3, channels=(4, 6, 8, 10), width=12, blocks=1)
    encoder.save(folder / "encoder")
    card = {"words": WORDS, "length": 6, "side": SIDE, "name": "a row, scenes"}
    (folder / "vocabulary.json").write_text(json.dumps(card))
    return folder


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    pixels = torch.randint(256, (40, 50, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    path = tmp_path / "photo.png"
    Image.fromarray(pixels.numpy()).save(path)
    return path


def pixels_of(path: Path) -> Tensor:
    return square(path, "photo", SIDE)


def test_a_caption_has_the_weights_and_probabilities_of_its_words(tmp_path: Path, picture: Path) -> None:
    model = caption_training.load(written(tmp_path / "model", WC))
    model.net.generator.bias.data[0] = 0.0  # so that it ends
    maps = read_caption(model, pixels_of(picture), samples=3)
    regions = model.regions(pixels_of(picture))
    with torch.no_grad():
        ids, score = model.net.caption(regions, max_length=7, never=[len(WORDS) + 1])
        output = model.net(regions, labels=ids, output_attentions=True)
    assert maps.text == model.vocabulary.decode(ids[0].tolist())
    assert maps.words[-1] == END
    torch.testing.assert_close(maps.weights, output["attentions"][0])
    torch.testing.assert_close(maps.probabilities.log().sum(), score[0])
    for word, probability, others in zip(maps.words, maps.probabilities, maps.others, strict=True):
        assert [one[1] for one in others] == sorted((one[1] for one in others), reverse=True)
        known = {one[0]: one[1] for one in others}
        assert word not in known or known[word] == pytest.approx(float(probability))


def test_the_spread_is_that_of_single_draws_which_write_captions_themselves(
    tmp_path: Path, picture: Path
) -> None:
    model = caption_training.load(written(tmp_path / "model", WC))
    maps = read_caption(model, pixels_of(picture), samples=6)
    assert maps.spread is not None
    regions = model.regions(pixels_of(picture))
    numbers = [0 if word == END else model.vocabulary.numbers[word] for word in maps.words]
    labels = torch.tensor([numbers])
    with torch.no_grad():
        drawn = [
            model.net(
                regions, labels=labels, chain=Chain(step=model.net.step, sample=n), output_attentions=True
            )
            for n in range(6)
        ]
        texts = [
            model.net.caption(regions, max_length=7, never=[len(WORDS) + 1], sample=n)[0] for n in range(6)
        ]
        further = [
            model.net.caption(regions, max_length=20, never=[len(WORDS) + 1], sample=n)[0] for n in range(6)
        ]
    every = torch.stack([one["attentions"][0] for one in drawn])
    torch.testing.assert_close(maps.spread, every.std(dim=0, correction=0))
    assert float(maps.spread.max()) > 0.01
    said, on = ([model.vocabulary.decode(text[0].tolist()) for text in each] for each in (texts, further))
    expected = [(short, short == long) for short, long in zip(said, on, strict=True)]
    assert sorted(expected) == sorted(draw[:2] for draw in maps.draws for _ in range(draw.times))
    assert {draw.ended for draw in maps.draws} == {False}, "this network goes on and on"


def test_draws_of_the_same_words_may_have_an_end_or_be_cut(tmp_path: Path, picture: Path) -> None:
    model = caption_training.load(written(tmp_path / "model", WC))
    model = replace(model, length=1)  # so that the end, or what would go on, is at the limit
    model.net.generator.bias.data[0] = -0.65  # so that some go on
    maps = read_caption(model, pixels_of(picture), samples=12)
    regions = model.regions(pixels_of(picture))
    further = [
        model.net.caption(regions, max_length=20, never=[len(WORDS) + 1], sample=n)[0][0].tolist()
        for n in range(12)
    ]
    texts = [model.vocabulary.decode(ids) for ids in further]
    expected = [(text.split(" ")[0], " " not in text) for text in texts]
    assert sorted(expected) == sorted(draw[:2] for draw in maps.draws for _ in range(draw.times))
    assert [(draw.text, draw.ended) for draw in maps.draws] == [("cat", True), ("cat", False)]


def test_the_prior_is_what_it_expects_before_any_word(tmp_path: Path, picture: Path) -> None:
    for mechanism in (WC, LC):
        model = caption_training.load(written(tmp_path / mechanism.family, mechanism))
        regions = model.regions(pixels_of(picture))
        found = prior_weights(model.net, regions)
        layer: Any = model.net.map.layers[0]
        psi = layer.prior(model.net.region(regions).relu())[0].softmax(dim=-1)
        expected = psi if mechanism is WC else psi.exp() / psi.exp().sum()
        assert found is not None
        torch.testing.assert_close(found, expected.detach())
    plain = caption_training.load(written(tmp_path / "plain"))
    assert prior_weights(plain.net, regions) is None


@pytest.mark.parametrize("attention", ["soft", "none"])
def test_what_a_model_has_not_is_left_out(tmp_path: Path, picture: Path, attention: str) -> None:
    model = caption_training.load(written(tmp_path / "model", attention=attention))
    maps = read_caption(model, pixels_of(picture))
    assert (maps.prior, maps.spread, maps.samples, maps.draws) == (None, None, 0, [])
    assert (maps.weights is None) == (attention == "none")
    entry = caption_entry(maps)
    assert entry["caption"]["others"][0][0][2] is None
    assert 0 <= entry["main"] < len(maps.words)


def test_no_word_becomes_code_in_a_page_that_needs_nothing_else() -> None:
    text = caption_page([caption((WORDS[2], END))], title="</script><b>").html()
    assert "<script>alert" not in text
    assert "</script><b>" not in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "data:image/png;base64," in text


def test_equal_captions_of_two_models_are_told_apart() -> None:
    one, other = caption(("a", END)), replace(caption(("a", END)), model="another row")
    names = [entry["name"] for entry in caption_page([one, other]).index["traces"]]
    assert names == [f"{one.model}: a", "another row: a"]
    assert [entry["name"] for entry in caption_page([one]).index["traces"]] == ["a"]


def test_maps_must_have_the_regions_of_the_grid() -> None:
    with pytest.raises(ValueError, match="weights must have 4 regions, 2 × 2, got 5"):
        caption_page([caption(("a", END), regions=5)])
    with pytest.raises(ValueError, match="at least one caption"):
        caption_page([])


# --- Commands ---


def invoked(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    return result.output if result.exception is None else f"{result.output}{result.exception}"


def test_the_command_writes_captions_and_a_page_and_trace_opens_the_folder(
    tmp_path: Path, picture: Path
) -> None:
    folder = str(written(tmp_path / "model", WC))
    page = tmp_path / "page.html"
    said = invoked("caption", str(picture), "--model", folder, "--samples", "4", "--out", str(page))
    first = said.splitlines()[0]
    assert set(first.split()) <= set(WORDS)
    assert "4 draws of the attention weights lead to" in said
    assert "overt-index" in page.read_text()
    traced = invoked("trace", str(picture), "--model", folder, "--samples", "4")
    assert traced.splitlines()[0] == first
    both = invoked("caption", str(picture), "--model", folder, "--model", folder)
    assert both.count(first) >= 2


def test_other_commands_say_which_one_opens_the_folder(tmp_path: Path, picture: Path) -> None:
    folder = str(written(tmp_path / "model"))
    with pytest.raises(ValueError, match=r"is a captioning network, which is not served: overt caption"):
        open_served("model", folder)
    out = str(tmp_path / "plot.png")
    assert "a captioning network, which overt caption photo.jpg --model" in invoked(
        "plot", "a", "--model", folder, "--out", out
    )
    assert "--method is not for captioning networks" in invoked(
        "trace", str(picture), "--model", folder, "--method", "raw"
    )
    assert "is an image encoder, which has no attention" in invoked(
        "trace", str(picture), "--model", f"{folder}/encoder"
    )


def test_a_folder_that_is_named_as_the_right_one_is_the_right_one(tmp_path: Path, picture: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    written(right / "model")
    (right / "model" / "encoder").rename(wrong.parent / "encoder")
    (wrong / "model").parent.mkdir()
    (tmp_path / "encoder").rename(wrong / "model")
    said = invoked("caption", str(picture), "--model", str(right))
    assert said.strip().endswith(f"{right / 'model'} is one")
    said = invoked("caption", str(picture), "--model", str(wrong))
    assert "must be the folder of a captioning network" in said
    assert " is one" not in said


def test_a_folder_without_its_encoder_is_told_with_both_reasons(tmp_path: Path, picture: Path) -> None:
    folder = written(tmp_path / "M")
    shutil.rmtree(folder / "encoder")
    said = invoked("caption", str(picture), "--model", str(folder))
    assert "holds no encoder: either it was trained on given features, or its folder" in said
    assert "has been removed" in said


# --- Captions that are cut ---


def never_ending(folder: Path, *mechanisms: Mechanism) -> Path:
    """A folder whose network hardly ever expects the end."""
    model = caption_training.load(written(folder, *mechanisms))
    model.net.generator.bias.data[0] = -20.0
    model.net.save(folder)
    return folder


@pytest.mark.parametrize("beam", [1, 3])
def test_a_caption_of_the_longest_length_is_cut_and_has_no_end(
    tmp_path: Path, picture: Path, beam: int
) -> None:
    model = caption_training.load(never_ending(tmp_path / "model", WC))
    maps = read_caption(model, pixels_of(picture), beam, samples=3)
    assert not maps.ended
    assert END not in maps.words
    assert len(maps.words) == len(maps.probabilities) == len(maps.others) == 6
    assert maps.text == " ".join(maps.words)
    assert maps.weights is not None
    assert maps.spread is not None
    assert len(maps.weights) == len(maps.spread) == 6
    entry = caption_entry(maps)
    assert not entry["caption"]["ended"]
    assert entry["tokens"] == list(maps.words)


def test_a_caption_whose_likeliest_next_word_is_its_end_is_not_cut_however_long_it_is(
    tmp_path: Path, picture: Path
) -> None:
    folder = never_ending(tmp_path / "model")
    model = caption_training.load(folder)
    whole = read_caption(model, pixels_of(picture))
    ids = torch.tensor([[model.vocabulary.numbers[word] for word in whole.words]])
    with torch.no_grad():
        inputs = torch.cat([torch.tensor([[model.net.bos_id]]), ids], dim=1)
        log_p = model.net(model.regions(pixels_of(picture)), decoder_input_ids=inputs)["logits"][0]
    # At which place the end comes nearest to the likeliest word, and how much is missing there.
    missing = log_p[:, 1 : len(WORDS) + 1].amax(dim=1) - log_p[:, 0]
    last = int(missing.argmin())
    model.net.generator.bias.data[0] += float(missing[last]) + 1e-3
    ended = read_caption(replace(model, length=last), pixels_of(picture))
    assert len(ended.words) == last + 1, "the longest that it may be"
    assert ended.ended
    assert ended.words[-1] == END
    model.net.generator.bias.data[0] -= 2e-3
    assert not read_caption(replace(model, length=last), pixels_of(picture)).ended


def test_the_command_says_of_a_cut_caption_that_it_is_cut(tmp_path: Path, picture: Path) -> None:
    said = invoked("caption", str(picture), "--model", str(never_ending(tmp_path / "model")))
    assert "cut at 6 words: the network would have gone on" in said
    assert END not in said
    folder = written(tmp_path / "other")
    model = caption_training.load(folder)
    model.net.generator.bias.data[0] = 20.0
    model.net.save(folder)
    said = invoked("caption", str(picture), "--model", str(folder))
    assert END in said
    assert "cut at" not in said


@pytest.mark.parametrize(
    ("draws", "words"),
    [
        ({"a": 1}, "1 draw of the attention weights leads to this caption"),
        ({"a dog": 1}, "1 draw of the attention weights leads to another caption"),
        ({"a": 5}, "5 draws of the attention weights lead to this caption"),
        (
            {"a": 4, "a dog": 16},
            "20 draws of the attention weights lead to 2 different captions; 4 of the draws to this one",
        ),
        (
            {"a": 1, "a dog": 2},
            "3 draws of the attention weights lead to 2 different captions; 1 of the draws to this one",
        ),
        (
            {"dog": 1, "a dog": 1},
            "2 draws of the attention weights lead to 2 different captions; none of the draws to this one",
        ),
    ],
)
def test_draws_are_told_in_words(draws: dict[str, int], words: str) -> None:
    assert drawn_words(drawn_caption(draws)) == words


def drawn_caption(draws: dict[str, int]) -> CaptionMaps:
    """The caption "a", and those of draws, of which a sign says that they are cut."""
    found = [Draw(text.removesuffix("…"), not text.endswith("…"), count) for text, count in draws.items()]
    return replace(caption(("a", END)), draws=found, samples=sum(draws.values()))


def test_a_draw_that_is_cut_is_another_caption() -> None:
    maps = drawn_caption({"a…": 3, "a": 1, "dog…": 1})
    words = "5 draws of the attention weights lead to 3 different captions; 1 of the draws to this one"
    assert drawn_words(maps) == f"{words}; 4 of the draws are cut"
    entry = caption_entry(maps)["caption"]["draws"]
    assert entry == [["a", 3, False, False], ["a", 1, True, True], ["dog", 1, False, False]]
    assert drawn_words(drawn_caption({"a…": 2})).endswith("lead to another caption, cut")
    cut = replace(maps, words=["a"], ended=False)
    assert [draw[2] for draw in caption_entry(cut)["caption"]["draws"]] == [True, False, False]


# --- One page ---


def test_all_captions_of_a_page_have_one_scale() -> None:
    one = caption(("a", END))
    assert one.weights is not None
    assert one.spread is not None
    weights = one.weights / 3
    other = replace(one, weights=weights, prior=None, spread=None)
    third = replace(one, prior=torch.tensor([0.97, 0.01, 0.01, 0.01]), spread=one.spread * 4)
    for some in ([one, other], [other, one], [other, third]):
        entries = caption_page(some).index["traces"]
        first = entries[0]["caption"]["peaks"]
        assert all(entry["caption"]["peaks"] == first for entry in entries)
    assert first["sizes"] == pytest.approx(0.97), "a prior may be the largest"
    assert first["spreads"] == pytest.approx(4 * float(one.spread.max()), rel=1e-3)
    alone = caption_entry(other)["caption"]["peaks"]
    assert alone["sizes"] == pytest.approx(float(weights.max()), rel=1e-3)
    assert alone["spreads"] == 1.0


def test_a_second_caption_is_shown_beside_the_first() -> None:
    one = caption(("a", END))
    assert caption_page([one, one]).index["beside"] == 1
    assert "beside" not in caption_page([one]).index


def test_a_picture_has_the_proportions_of_its_file(tmp_path: Path) -> None:
    written(tmp_path / "M")
    path, page = tmp_path / "wide.jpg", tmp_path / "page.html"
    turned = Image.Exif()
    turned[0x0112] = 6  # lies on its side
    Image.new("RGB", (30, 90)).save(path, exif=turned)
    invoked("caption", str(path), "--model", str(tmp_path / "M"), "--out", str(page))
    start = page.read_text().split('id="overt-index">')[1].split("</script>")[0]
    index = json.loads(start)
    assert index["traces"][0]["image"] == [30, 90]
    assert index["traces"][0]["seen"] == [SIDE, SIDE]
    assert index["title"] == "wide.jpg"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.png", "--model", "M"], "picture nowhere.png does not exist"),
        (["PICTURE", "--model", "M", "--beam", "9"], "--beam must be at most 7 for"),
        (
            ["PICTURE", "--model", "M", "--beam", "9"],
            "5 words, the end, and one id for all rare words; got 9",
        ),
        (["FOLDER", "--model", "M"], "is a folder: give a file in it"),
        (["PICTURE", "--model", "M", "--out", "page.png"], "--out must end in .html"),
        (["PICTURE", "--model", "M/encoder"], "is an image encoder, which has no attention"),
        (
            ["PICTURE", "--model", "nothing"],
            "nothing must be the folder of a captioning network, with config.json",
        ),
        (["M/config.json", "--model", "M"], "cannot be read as an image"),
    ],
)
def test_bad_input_is_refused_by_name(tmp_path: Path, picture: Path, words: list[str], message: str) -> None:
    folder = str(written(tmp_path / "M"))
    places = {"PICTURE": str(picture), "M": folder, "FOLDER": str(tmp_path)}
    given = [
        places.get(word, word.replace("M/", f"{folder}/") if word.startswith("M/") else word)
        for word in words
    ]
    assert message in invoked("caption", *given)


def test_a_word_outside_the_vocabulary_is_never_written_and_called_what_it_is(
    tmp_path: Path, picture: Path
) -> None:
    model = caption_training.load(written(tmp_path / "model", WC))
    unknown = len(WORDS) + 1
    model.net.generator.bias.data[unknown] = 40.0  # by far the likeliest
    for beam in (1, 3):
        maps = read_caption(model, pixels_of(picture), beam, samples=3)
        assert RARE not in maps.words
        assert not any("<unk>" in text or RARE in text for text, *_ in maps.draws)
        for likely, own in zip(maps.others, maps.probabilities, strict=True):
            assert likely[0][0] == RARE
            assert likely[0][1] > 0.99
            assert float(own) < 0.01, "the others keep the probabilities that they have"
            assert "<unk>" not in [word for word, *_ in likely]
