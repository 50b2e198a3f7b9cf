"""`overt ask`: answers and how sure they are, what they drew on, the page, tracing, and bad input."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from typer.testing import CliRunner

import overt
from overt.cli import app, ask
from overt.models.image_encoder import ImageEncoder
from overt.models.mcan import MCAN
from overt.recipes.asking import Answerer, answer, inputs_of, open_answerer
from overt.view.answers import COVER, Likely, Reply, answers_page

WORDS = ["<pad>", "how", "many", "chairs", "are", "there", "<unk>"]
ANSWERS = ["1", "2", "<3>"]
QUESTION = "how many chairs are there ?"


def saved(folder: Path, seed: int = 0, width: int = 6, **settings: Any) -> Path:
    """A model and its encoder, untrained."""
    torch.manual_seed(seed)
    sizes = {"features": 6, "width": 8, "heads": 2, "layers": 1, "flat": 4, "embedding": 4, "grid": (2, 2)}
    net = MCAN(len(WORDS), len(ANSWERS), **{**sizes, **settings})  # type: ignore[arg-type]
    net.word_names, net.answer_names = WORDS, ANSWERS
    net.save(folder)
    ImageEncoder(3, (2, 3, 4, 5), width, 1).save(folder / "encoder")
    (folder / "image.json").write_text('{"size": [32, 32]}')
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "Soft" / "seed-0" / "model")


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    noise = np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def asked(folder: Path, picture: Path) -> tuple[Answerer, Any, Any]:
    answerer, image = open_answerer(folder, "a"), Image.open(picture).convert("RGB")
    return answerer, image, answer(answerer, image, QUESTION, samples=6)


def test_the_answer_is_that_of_the_network_and_p_is_welchs(folder: Path, picture: Path) -> None:
    answerer, image, reply = asked(folder, picture)
    inputs = inputs_of(answerer, image, QUESTION)
    assert inputs["words"].tolist() == [[1, 2, 3, 4, 5]]
    output = answerer.net(**inputs)
    one = output["logits"][0].sigmoid().tolist()
    assert reply.answer == ANSWERS[int(np.argmax(one))]
    assert reply.probability == pytest.approx(max(one))
    torch.testing.assert_close(reply.region_weights.flatten(), output["region_weights"][0])
    samples = overt.posterior(answerer.net, inputs, 6, dropout=True, problem_type="sigmoid").samples[:, 0]  # type: ignore[union-attr]
    first, second = samples.mean(dim=0).argsort(descending=True)[:2].tolist()
    assert [each.name for each in reply.likely[:2]] == [ANSWERS[first], ANSWERS[second]]
    a, b = (samples[:, place].double().numpy() for place in (first, second))
    assert reply.p == pytest.approx(stats.ttest_ind(a, b, equal_var=False)[1], rel=1e-4)


def test_what_is_lost_by_hiding_a_region_is_what_a_picture_without_it_loses(
    folder: Path, picture: Path
) -> None:
    answerer, image, reply = asked(folder, picture)
    inputs = inputs_of(answerer, image, QUESTION)
    inputs["region_mask"][0, 2] = False
    hidden = answerer.net(**inputs)["logits"][0].sigmoid()[ANSWERS.index(reply.answer)]
    assert float(reply.lost[1, 0]) == pytest.approx(reply.probability - hidden.item(), abs=1e-6)


class Texts(HTMLParser):
    """Tags and texts of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        assert not any(name.startswith("on") or name == "style" for name, _ in attrs)
        for name, value in attrs:
            assert name not in ("href", "src") or value.startswith("data:image/png;base64,")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_self_contained_and_texts_stay_texts(folder: Path, picture: Path) -> None:
    _, image, reply = asked(folder, picture)
    evil = "how many <script>alert(1)</script> chairs ?"
    page = answers_page(image, evil, [reply, reply], "<img src=x>.png")
    read = Texts()
    read.feed(page)
    assert {"script", "img", "link", "iframe"}.isdisjoint(read.tags)
    assert evil in read.texts
    assert "<3>" in read.texts, "an answer that looks like a tag"
    assert read.tags.count("section") == 2
    assert read.tags.count("rect") >= 2 * 2 * 4, "two maps of four regions for each model"
    assert "default-src &#x27;none&#x27;; style-src &#x27;sha256-" in page


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_the_command_has_a_row_for_each_model_and_writes_a_page(folder: Path, picture: Path) -> None:
    other = saved(picture.parent / "WC" / "seed-0" / "model", 1)
    out = picture.parent / "page.html"
    done = run(
        "ask", picture, "how many sofas are there ?", "--model", folder, "--model", other, "--out", out
    )
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert sum(bool(re.search(r"^ *(Soft|WC) .* (agree|differ)", line)) for line in lines) == 2
    assert "Soft does not know sofas" in done.output
    page = out.read_text()
    assert "<h2>WC</h2>" in page
    assert page.count("not in this model’s vocabulary: “sofas”") == 2
    assert page.count("% (equal weights: 25.0&nbsp;%)") == 2, "of the four regions"
    assert page.count("% (equal weights: 20.0&nbsp;%)") == 2, "of the five words"
    assert "vocabulary" not in answers_page(*page_of(folder, picture))


def made(**changes: Any) -> Reply:
    """What a model might have answered: of four regions and five words, all with equal weights."""
    likely = [Likely("2", 0.137, 0.004), Likely("1", 0.12, 0.004)]
    even, words = torch.full((2, 2), 0.25), ["how", "many", "chairs", "are", "there"]
    lost = torch.zeros(2, 2)
    reply = Reply("a", "2", 0.137, likely, 20, 0.0001, words, torch.full((5,), 0.2), even, lost, 5)
    return replace(reply, **changes)


def page(reply: Reply, size: tuple[int, int] = (20, 20)) -> str:
    return answers_page(Image.new("RGB", size), QUESTION, [reply])


def drawings(text: str) -> list[str]:
    """The picture, the weights over it, and what is lost."""
    found = re.findall(r"<svg .*?</svg>", text)
    return [each for each in found if "<image" in each]


def opacities(drawing: str) -> list[float]:
    return [float(each) for each in re.findall(r'fill-opacity="(.*?)"', drawing)]


def test_the_page_and_the_command_say_how_many_words_are_read(folder: Path, picture: Path) -> None:
    out, line = picture.parent / "page.html", "only the first 14 of 20 words are read"
    for count, said in ((20, 1), (14, 0)):
        question = " ".join(["how many chairs are there"] * 4).split()[:count]
        done = run("ask", picture, " ".join(question), "--model", folder, "--out", out)
        assert done.output.count(line) == said
        text = out.read_text()
        assert text.count(line) == said
        assert text.count('class="word"') == 14
        assert text.count("… 6 not read") == said, "where the words end"


@pytest.mark.parametrize("size", [(90, 30), (30, 90), (20, 20)])
def test_a_picture_keeps_its_proportions_in_the_header_and_in_both_maps(size: tuple[int, int]) -> None:
    shown = drawings(page(made(), size))
    assert len(shown) == 3
    for drawing in shown:
        left, top, wide, tall = map(float, re.findall(r'viewBox="(.*?)"', drawing)[0].split())
        assert (left, top) == (0, 0)
        assert wide / tall == pytest.approx(size[0] / size[1], rel=1e-3)
        (image,) = re.findall(r'<image .*? width="(.*?)" height="(.*?)"', drawing)
        assert tuple(map(float, image)) == (wide, tall)
        for cell in re.findall(r'<rect .*? width="(.*?)" height="(.*?)"', drawing):
            assert tuple(map(float, cell)) == pytest.approx((wide / 2, tall / 2), abs=0.01)


def test_equal_weights_have_no_colour_and_unequal_ones_as_much_as_they_exceed_them() -> None:
    def colours(weights: list[float]) -> list[float]:
        grid = torch.tensor(weights).view(2, -1)
        return opacities(drawings(page(made(region_weights=grid)))[1])

    assert colours([0.25] * 4) == [0.0] * 4
    nearly = colours([0.06, 0.096, 0.0625, *[0.06] * 13])  # of 16 regions
    assert max(nearly) == nearly[1] < 0.2
    assert nearly[0] == nearly[2] == 0
    once, twice, full, below = colours([0.1, 0.15, 0.6, *[0.15 / 17] * 17])[:4]  # equal: 0.05
    assert full == COVER < 1, "the picture shows through"
    assert twice == pytest.approx(2 * once, abs=0.002)
    assert below == 0
    assert colours([1.0, 0.0])[0] == COVER
    words = page(made(word_weights=torch.tensor([0.21, 0.2, 0.2, 0.2, 0.19])))
    under = opacities(words[words.index('class="words"') : words.index("over words")])
    assert under[1:] == [0.0] * 4
    assert 0 < under[0] < 0.05
    assert "equal or less</span><span>80.0&nbsp;%" in words, "the legend's ends"


@pytest.mark.parametrize(
    ("lost", "scale", "most"),
    [
        ([0.0, 0.0, 0.0, 0.0], "1.0", "nothing lost, nothing gained"),
        ([0.0002, 0.0, 0.0, -0.004], "1.0", "under 0.1 lost, at most 0.4 gained"),
        ([0.02, 0.01, 0.0, -0.08], "8.0", "at most 2.0 lost, at most 8.0 gained"),
    ],
)
def test_what_is_lost_is_told_apart_from_the_ends_of_its_scale(
    lost: list[float], scale: str, most: str
) -> None:
    text = page(made(lost=torch.tensor(lost).view(2, 2)))
    assert f"<span>gained {scale}</span><span>lost {scale}</span>" in text
    assert f"percentage points; {most}<" in text
    drawn = drawings(text)[2]
    top = float(scale) / 100
    assert opacities(drawn) == pytest.approx([COVER * abs(each) / top for each in lost], abs=0.001)
    classes = re.findall(r'<rect class="(\w+)"', drawn)
    assert classes == ["less" if each < 0 else "more" for each in lost]


def test_an_unlikely_answer_is_not_called_certain_where_passes_agree(folder: Path, picture: Path) -> None:
    for p, passes in ((0.0001, "agree"), (0.3, "differ")):
        text = page(made(p=p))
        assert f": the passes {passes}</p>" in text
        assert "certain" not in text
    done = run("ask", picture, QUESTION, "--model", folder)
    assert "certain" not in done.output
    assert (
        "below 0.05 the passes agree which of them is likelier, however unlikely both may be" in done.output
    )


def test_a_question_of_one_word_has_a_page(folder: Path, picture: Path) -> None:
    answerer, image = open_answerer(folder, "a"), Image.open(picture).convert("RGB")
    text = answers_page(image, "chairs", [answer(answerer, image, "chairs", samples=2)])
    assert "largest: 100.0&nbsp;% (equal weights: 100.0&nbsp;%)" in text


def page_of(folder: Path, picture: Path) -> Any:
    _, image, reply = asked(folder, picture)
    return image, QUESTION, [reply]


def test_models_are_named_by_what_sets_them_apart() -> None:
    runs = [Path(f"/runs/scenes/rows/{row}/seed-{seed}/model") for row, seed in (("Soft", 0), ("WC", 0))]
    assert ask.names_of(runs) == ["Soft", "WC"]
    assert ask.names_of(runs[:1]) == ["Soft seed-0"]
    assert ask.names_of([runs[0], runs[0]]) == ["model 1", "model 2"]


def test_a_trace_names_words_and_regions(folder: Path, picture: Path) -> None:
    done = run("trace", QUESTION, "--model", folder, "--image", picture, "--method", "raw")
    assert done.exit_code == 0, done.output
    for name in ("chairs", "1,1", "2,2"):
        assert f" {name} " in done.output


def broken(folder: Path, what: str) -> Path:
    config = json.loads((folder / "config.json").read_text())
    if what == "kind":
        config["model_type"] = "bert"
    elif what == "captions":
        config["model_type"] = "overt-att2in"
    elif what == "names":
        config["word_names"] = None
    (folder / "config.json").write_text(json.dumps(config))
    return folder


BAD = [
    ("", "a question must have a word, got ''"),
    ("?!", "a question must have a word"),
    ("wie viele", "knows no word of 'wie viele': it knows 5, such as how, many"),
    ("run", "/model is one"),
    ("nothing", "must be the folder of a network that answers questions, with config.json"),
    ("kind", "must be the folder of a network that answers questions, but it holds another model"),
    ("captions", "but it holds a captioning network: overt caption photo.jpg --model"),
    ("names", "must name its words and answers"),
    ("encoder", "must hold an encoder/ of images"),
    ("size", "image.json must hold"),
    ("width", "makes 4 regions of width 7, but the model takes 4 of width 6"),
    ("picture", "cannot be read as an image"),
    ("out", "--out must end in .html"),
]


@pytest.mark.parametrize(("case", "message"), BAD, ids=[case or "empty" for case, _ in BAD])
def test_bad_input_is_named(folder: Path, picture: Path, case: str, message: str) -> None:
    question, out = QUESTION, None
    if case in ("", "?!", "wie viele"):
        question = case
    elif case in ("kind", "captions", "names"):
        broken(folder, case)
    elif case in ("run", "nothing"):
        folder = folder.parent if case == "run" else folder.parent.parent
    elif case == "encoder":
        (folder / "encoder").rename(folder / "other")
    elif case == "size":
        (folder / "image.json").write_text("[]")
    elif case == "width":
        ImageEncoder(3, (2, 3, 4, 5), 7, 1).save(folder / "encoder")
    elif case == "picture":
        picture.write_text("no picture")
    else:
        out = picture.parent / "page.txt"
    with pytest.raises((ValueError, OSError), match=re.escape(message)):
        ask.run(picture, question, [folder], out=out)


def test_other_commands_say_which_one_opens_such_a_folder(folder: Path) -> None:
    done = run("serve", "--model", folder)
    assert "answers questions, which is not served: overt ask photo.jpg" in str(done.exception)
    done = run("translate", QUESTION, "--model", folder)
    assert 'a network that answers questions, which overt ask photo.jpg "QUESTION" --model' in str(
        done.exception
    )
    done = run("trace", QUESTION, "--model", folder)
    assert "give it with --image" in str(done.exception)


def test_the_device_can_be_chosen_and_one_that_is_not_there_is_named(folder: Path, picture: Path) -> None:
    given = ["ask", picture, QUESTION, "--model", folder]
    auto, cpu = (run(*given, *more) for more in ([], ["--device", "cpu"]))
    assert cpu.exit_code == 0
    if not torch.cuda.is_available():
        assert cpu.output == auto.output
    bad = run(*given, "--device", "tpu")
    assert bad.exit_code != 0
    assert "--device must be cpu, cuda or auto, got tpu" in str(bad.exception)
