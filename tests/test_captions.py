"""Scores of captions: values of the standard program, cases worked out by hand, floors and a ceiling."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from overt._extras import present
from overt.data import flickr8k
from overt.data.vocabulary import tokenise
from overt.judge import captions
from overt.judge.captions import (
    cider_d,
    constant_caption,
    floors,
    human,
    meteor,
    random_captions,
    rouge_l,
    score,
)

REAL = os.environ.get("OVERT_DATA")
standard = pytest.mark.skipif(not present("pycocoevalcap"), reason="pycocoevalcap is not installed")
java = pytest.mark.skipif(
    not present("pycocoevalcap") or shutil.which("java") is None,
    reason="pycocoevalcap or Java is not installed",
)

REFERENCES = [
    [
        "A brown dog runs across the wet grass .",
        "The dog is running on grass.",
        "A dog's ball lies on the grass, and the dog runs to it.",
    ],
    [
        "Two children in T-shirts play with a red ball .",
        "Children playing ball on the beach .",
        "Two kids with a ball",
    ],
    [
        "A man rides a bicycle down a steep, snowy hill .",
        "A cyclist doesn't stop on the hill .",
        "The man on the bike goes down a hill covered with snow .",
    ],
    [
        "A woman in a white dress holds an umbrella .",
        "The woman with the umbrella is laughing .",
        "A lady in white stands in the rain with an umbrella .",
    ],
]
SYSTEMS = {
    "close": [
        "a dog runs on the grass",
        "two children play with a ball on the beach",
        "a man on a bicycle goes down a hill",
        "a woman in white holds an umbrella",
    ],
    "repeating": [
        "the dog the dog the dog the dog",
        "a ball a ball",
        "a man a man on a hill hill hill",
        "a woman in in in a white dress",
    ],
    "poor": ["a man in a"] * 4,
}
# By pycocoevalcap 1.2 with its PTB tokeniser: BLEU-1 to 4, ROUGE-L of each caption, CIDEr-D of each, METEOR.
GOLDEN: dict[str, tuple[list[float], list[float], list[float], float]] = {
    "close": (
        [99.99999999677419, 90.26709338171646, 68.31633036198447, 42.80184561421053],
        [69.63470319634702, 75.58859975216852, 72.99145299145299, 85.57114228456915],
        [167.45983567527668, 286.16654701125304, 211.52723587251336, 240.1312058674288],
        37.11905391915206,
    ),
    "repeating": (
        [65.51724137705112, 51.19267188746078, 33.45331691446741, 21.66292809746552],
        [38.607594936708864, 43.57142857142857, 52.13675213675214, 69.8473282442748],
        [44.36953844745922, 49.057992984164834, 64.70629985624174, 192.057733949623],
        21.692823529375797,
    ),
    "poor": (
        [30.108455350429658, 16.38896723358989, 0.0, 0.0],
        [15.721649484536082, 28.77358490566038, 39.78260869565217, 43.160377358490564],
        [0.0, 5.592836369591274, 38.32548199000343, 24.397733666144877],
        6.690547734923749,
    ),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_scores_are_those_of_the_standard_program(name: str) -> None:
    bleu, rouge, cider, _ = GOLDEN[name]
    found = score(SYSTEMS[name], REFERENCES)
    assert found.bleu == pytest.approx(bleu, rel=1e-6, abs=1e-3)  # it adds 1e-9 against divisions by 0
    assert found.rouge_l == pytest.approx(sum(rouge) / 4)
    assert found.cider_d == pytest.approx(sum(cider) / 4)
    assert rouge_l(SYSTEMS[name], REFERENCES) == pytest.approx(rouge)
    assert cider_d(SYSTEMS[name], REFERENCES) == pytest.approx(cider)


@standard
@pytest.mark.parametrize("name", SYSTEMS)
def test_the_standard_program_says_so_today(name: str) -> None:
    module: Any = importlib.import_module
    wanted = {row: [" ".join(tokenise(text)) for text in texts] for row, texts in enumerate(REFERENCES)}
    said = {row: [" ".join(tokenise(text))] for row, text in enumerate(SYSTEMS[name])}
    found = score(SYSTEMS[name], REFERENCES)
    bleu, _ = module("pycocoevalcap.bleu.bleu").Bleu(4).compute_score(wanted, said, verbose=0)
    assert found.bleu == pytest.approx([100 * value for value in bleu], rel=1e-6, abs=1e-3)
    rouge, _ = module("pycocoevalcap.rouge.rouge").Rouge().compute_score(wanted, said)
    assert found.rouge_l == pytest.approx(100 * rouge)
    cider, _ = module("pycocoevalcap.cider.cider").Cider().compute_score(wanted, said)
    assert found.cider_d == pytest.approx(100 * cider)


def test_rouge_takes_the_best_precision_and_the_best_recall_each_for_itself() -> None:
    # Common with the first reference: 2 of 3 said, 2 of 6 wanted; with the second: 1 of 3, 1 of 1.
    found = rouge_l(["one two three"], [["one two x y z w", "three"]])
    precision, recall, squared = 2 / 3, 1.0, 1.2**2
    assert found == pytest.approx([100 * (1 + squared) * precision * recall / (recall + squared * precision)])


def test_cider_by_hand() -> None:
    # Two images: "a" is in both and weighs log(2/2) = 0, every other word weighs log 2.
    # n = 1: (dog) against (dog): 1. n = 2: (a dog): 1. n = 3, 4: none, 0. Of 4 orders: 1/2, times 10.
    assert cider_d(["a dog", "a cat"], [["a dog"], ["a man"]]) == pytest.approx([500.0, 0.0])


def test_one_image_alone_has_no_rare_words_and_repeating_one_does_not_pay() -> None:
    assert cider_d(["a dog"], [["a dog"]]) == [0.0]
    once, thrice = (cider_d([text, ""], [["dog on grass"], ["cat"]])[0] for text in ("dog", "dog dog dog"))
    assert thrice < once


def test_an_empty_caption_scores_nothing() -> None:
    found = score(["", "a cat"], [["a dog runs"], ["a cat"]])
    assert rouge_l(["", "a cat"], [["a dog runs"], ["a cat"]]) == pytest.approx([0.0, 100.0])
    assert found.cider_d > 0.0


def test_images_may_have_different_numbers_of_references() -> None:
    found = score(["a dog runs", "a cat"], [["a dog runs", "the dog"], ["a cat"]])
    assert found.bleu[:2] == pytest.approx((100.0, 100.0))


@pytest.mark.parametrize(
    ("said", "wanted", "message"),
    [
        (["a dog"], [], "captions must be one for each image: got 1, and references of 0"),
        ([], [], "captions must be of at least one image, got none"),
        (["a", "b"], [["a"], []], r"references of image 1 must be captions with words, got \[\]"),
        (["a"], [["..."]], r"references of image 0 must be captions with words, got \['...'\]"),
        (["a"], ["a dog"], "references of image 0 must be captions with words, got 'a dog'"),
    ],
)
def test_what_cannot_be_scored_is_named(said: list[str], wanted: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        score(said, wanted)


def test_without_sacrebleu_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'overt\[translation\]'"):
        score(["a"], [["a"]])


# --- METEOR ---


def test_meteor_without_java_or_its_package_is_none_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert meteor(["a"], [["a"]]) == (None, "METEOR needs Java")
    monkeypatch.setattr(shutil, "which", lambda _: "/bin/java")
    monkeypatch.setattr(captions, "present", lambda _: False)
    found = meteor(["a"], [["a"]])
    assert found.score is None
    assert "pip install pycocoevalcap" in found.reason


@java
@pytest.mark.slow
def test_meteor_is_that_of_its_program() -> None:
    assert meteor(SYSTEMS["close"], REFERENCES).score == pytest.approx(GOLDEN["close"][3])


# --- Floors and a ceiling ---


def test_people_are_scored_against_the_other_references() -> None:
    said, wanted = human(REFERENCES, 1)
    assert said == [texts[1] for texts in REFERENCES]
    assert wanted == [[texts[0], texts[2]] for texts in REFERENCES]
    with pytest.raises(
        ValueError, match=r"^image 1 must have more than 1 references to set one apart, got 1$"
    ):
        human([["a", "b"], ["a"]])


def test_floors_see_no_image() -> None:
    pool = [text for texts in REFERENCES for text in texts]
    assert random_captions(pool, 5) == random_captions(pool, 5)
    assert random_captions(pool, 5) != random_captions(pool, 5, seed=1)
    assert set(random_captions(pool, 50)) <= set(pool)
    assert constant_caption(["a man in a hat", "A man in a car .", "a dog"]) == "a man in a"
    found = floors(pool, REFERENCES)
    assert list(found) == ["human, against the others", "random caption", "always “a brown dog runs”"]
    assert found["human, against the others"] == score(*human(REFERENCES))
    for make in (lambda: random_captions([], 1), lambda: constant_caption([])):
        with pytest.raises(ValueError, match=r"^pool must hold captions, got none$"):
            make()


@pytest.mark.skipif(
    REAL is None or not (Path(REAL) / "flickr8k").is_dir(), reason="OVERT_DATA has no flickr8k/ to read"
)
@pytest.mark.slow
def test_floors_and_ceiling_of_the_real_captions() -> None:
    assert REAL is not None
    data = flickr8k.load(Path(REAL), pictures=False)
    pool = [text for row in data.train for text in row.captions]
    found = floors(pool, [row.captions for row in data.test])
    # BLEU-1, BLEU-4, ROUGE-L and CIDEr-D by pycocoevalcap 1.2.
    wanted = {
        "human, against the others": (63.64, 20.95, 48.75, 78.86),
        "random caption": (30.30, 1.53, 22.83, 3.23),
        "always “a man in a”": (33.81, 8.33, 36.24, 5.16),
    }
    assert found.keys() == wanted.keys()
    for name, scores in wanted.items():
        got = found[name]
        assert (got.bleu[0], got.bleu[3], got.rouge_l, got.cider_d) == pytest.approx(scores, abs=0.006), name
