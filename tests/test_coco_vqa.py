"""COCO's captions and VQA-v2 in their published layouts: what is read and refused, and recipes on them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overt.data import coco, vqa
from overt.data.questions import Asked, QuestionData
from overt.data.region_features import RegionFeatures
from overt.data.vocabulary import vocabulary_of
from overt.models.mcan import MCAN
from overt.recipes import bam_questions, caption_training, question_training, reproduce
from overt.recipes.caption_training import CaptionTraining

# --- COCO ---


def image(number: int, split: str, *captions: str) -> dict[str, Any]:
    """An image as Karpathy's file has it."""
    sentences = [
        {"raw": text, "tokens": text.lower().split(), "imgid": number, "sentid": 5 * number + place}
        for place, text in enumerate(captions)
    ]
    name = f"COCO_{'val' if split != 'train' else 'train'}2014_{number:012d}.jpg"
    return {"filename": name, "filepath": "val2014", "split": split, "sentences": sentences, "cocoid": number}


IMAGES = [
    image(9, "train", "A dog runs.", "The dog\nruns fast"),
    image(4, "val", "A cat sits"),
    image(7, "restval", "A dog sits", "  "),
    image(5, "test", "A zebra runs"),
]


def write_coco(folder: Path, images: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    return folder


def test_cocos_rest_of_validation_is_trained_on_and_only_training_makes_the_vocabulary(
    tmp_path: Path,
) -> None:
    write_coco(tmp_path / "coco", IMAGES)
    data = coco.load(tmp_path, least=2)
    numbers = [[int(row.image[-16:-4]) for row in part] for part in (data.train, data.validation, data.test)]
    assert numbers == [[9, 7], [4], [5]]
    assert data.train[0].captions == ("A dog runs.", "The dog runs fast")
    assert data.vocabulary.words == ("dog", "a", "runs"), "“sits” is once in training"
    assert data.images is None
    assert data.counts == {"empty_captions": 1}
    assert coco.load(tmp_path / "coco", least=2).sha256 == data.sha256


BAD_IMAGES: list[tuple[dict[str, Any], str]] = [
    (
        {"split": "dev"},
        "image COCO_train2014_000000000009.jpg: split must be one of train, restval, val, test",
    ),
    ({"filename": 3}, "image 0: filename must be a name, got 3"),
    ({"filename": IMAGES[1]["filename"]}, "must be there once"),
    ({"sentences": [{"tokens": ["a"]}]}, 'sentences must be a list of {"raw": …}'),
    ({"sentences": []}, "must have a caption with a word, got none"),
]


@pytest.mark.parametrize(("change", "message"), BAD_IMAGES, ids=[message[:30] for _, message in BAD_IMAGES])
def test_what_is_wrong_in_cocos_file_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_coco(tmp_path, [{**IMAGES[0], **change}, *IMAGES[1:]])
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        coco.load(tmp_path)
    assert message in str(caught.value)
    assert "dataset_coco.json" in str(caught.value)


def test_a_file_that_is_missing_or_no_json_or_lacks_a_part_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OVERT_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="give --data DIR"):
        coco.load(None)
    with pytest.raises(FileNotFoundError, match=r"put dataset_coco\.json there or into coco/"):
        coco.load(tmp_path)
    write_coco(tmp_path, IMAGES[:2])
    with pytest.raises(ValueError, match="must have images for test, got none"):
        coco.load(tmp_path)
    for text, message in (
        ("{", "must be JSON"),
        ('{"images": []}', "with one entry or more"),
        ("[]", "images"),
    ):
        (tmp_path / "dataset_coco.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            coco.load(tmp_path)


# --- VQA-v2 ---


def write_vqa(folder: Path, rows: dict[str, list[tuple[int, str, str, list[str]]]]) -> Path:
    """Questions of each part: image, question, kind and the ten answers."""
    folder.mkdir(exist_ok=True)
    number = itertools.count(1)
    for part, asked in rows.items():
        questions, annotations = [], []
        for image_id, question, kind, answers in asked:
            own = {"image_id": image_id, "question_id": next(number)}
            questions.append({**own, "question": question})
            most = Counter(answers).most_common(1)[0][0]
            given = [
                {"answer": answer, "answer_confidence": "yes", "answer_id": n}
                for n, answer in enumerate(answers, 1)
            ]
            annotations.append({**own, "answers": given, "answer_type": kind, "multiple_choice_answer": most})
        names = vqa.QUESTIONS.format(part), vqa.ANNOTATIONS.format(part)
        for name, key, entries in zip(
            names, ("questions", "annotations"), (questions, annotations), strict=True
        ):
            (folder / name).write_text(json.dumps({"info": {}, key: entries}))
    return folder


def ten(**answers: int) -> list[str]:
    return [answer for answer, count in answers.items() for _ in range(count)]


ROWS = {
    "train2014": [
        (9, "What is this?", "other", ten(dog=4, cat=3, cow=2, pig=1)),
        (9, "Is it a dog?", "yes/no", ten(yes=10)),
        (3, "Is it a cat?", "yes/no", ten(yes=6, no=4)),
        (4, "How many?", "number", ["2"] * 5 + ["Two."] * 5),
    ],
    "val2014": [(5, "What is the animal?", "other", ten(dog=9, elephant=1))],
}


def test_an_answer_is_as_right_as_people_agree_and_the_space_has_the_most_frequent(tmp_path: Path) -> None:
    data = vqa.load(write_vqa(tmp_path / "vqa-v2", ROWS).parent, answers=3)
    assert data.answers == ("yes", "2", "dog"), "in training questions; equals by alphabet"
    assert [row.kind for row in data.train] == ["other", "yes/no", "yes/no", "number"]
    assert data.train[0].image == "COCO_train2014_000000000009"
    assert dict(zip(data.train[0].answers, data.train[0].scores, strict=True)) == {
        "dog": 1.0, "cat": 0.9, "cow": 0.6, "pig": 0.3,
    }  # fmt: skip
    assert data.train[3].answers == ("2",), "“Two.” is the same"
    torch.testing.assert_close(data.targets(data.train[:1]), torch.tensor([[0.0, 0.0, 1.0]]))
    torch.testing.assert_close(data.credits(data.test), torch.tensor([[0.0, 0.0, 1.0]]))
    assert data.counts == {"answers_outside_in_train": 4, "answers_outside_in_test": 1}
    assert data.validation == []


def test_a_score_is_the_mean_over_leaving_out_one_of_ten() -> None:
    for count in range(11):
        given = [True] * count + [False] * (10 - count)
        means = [min(sum(given) - given[out], 3) / 3 for out in range(10)]
        assert vqa.vqa_score(count) == pytest.approx(np.mean(means), abs=1e-6)
    assert [vqa.vqa_score(count) for count in range(5)] == [0.0, 0.3, 0.6, 0.9, 1.0]


def test_answers_are_compared_as_the_evaluation_does() -> None:
    pairs = {
        "The Dog!": "dog", "two": "2", "1,000": "1000", "3.5": "3.5", "a t-shirt": "t shirt", "none": "0",
    }  # fmt: skip
    assert {answer: vqa.normalised(answer) for answer in pairs} == pairs


def test_what_is_wrong_in_vqa_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OVERT_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="give --data DIR"):
        vqa.load(None)
    with pytest.raises(FileNotFoundError, match="there or into vqa-v2/"):
        vqa.load(tmp_path)
    write_vqa(tmp_path, {"train2014": ROWS["train2014"]})
    with pytest.raises(FileNotFoundError, match="has no v2_OpenEnded_mscoco_val2014_questions"):
        vqa.load(tmp_path)
    bad = [
        ((9, " ?", "other", ten(dog=10)), "question 5: the question must have a word"),
        (
            (9, "What?", "colour", ten(dog=10)),
            "answer_type must be one of yes/no, number, other, got 'colour'",
        ),
    ]
    for row, message in bad:
        write_vqa(tmp_path, {**ROWS, "val2014": [row]})
        with pytest.raises(ValueError, match=message):
            vqa.load(tmp_path)
    write_vqa(tmp_path, ROWS)
    (tmp_path / vqa.ANNOTATIONS.format("val2014")).write_text('{"annotations": [{"question_id": 77}]}')
    with pytest.raises(ValueError, match="must have the same questions: 5 is in one"):
        vqa.load(tmp_path)


# --- Validation ---


def asked(image: str, question: str = "what is it ?", answer: str = "dog") -> Asked:
    return Asked(image, question, (answer,), "other")


def questions(train: list[Asked], validation: list[Asked], test: list[Asked]) -> QuestionData:
    names = tuple(sorted({row.image for row in [*train, *validation, *test]}))
    words = vocabulary_of(row.question for row in train)
    return QuestionData(
        "x", train, validation, test, words, ("dog",), None, names, "0", {"answers_outside_in_test": 9}
    )


def test_settings_are_chosen_without_the_test_questions() -> None:
    train, test = [asked(f"t{n // 2}") for n in range(20)], [asked("u")]
    held = [asked("v", answer="cat")]
    with_part = questions(train, held, test).for_validation(0.2)
    assert (with_part.train, with_part.test, with_part.validation) == (train, held, [])
    assert with_part.counts == {"answers_outside_in_test": 1}
    assert with_part.sha256 != "0"
    without = questions(train, [], test).for_validation(0.2)
    images = [{row.image for row in part} for part in (without.train, without.test)]
    assert [len(each) for each in images] == [8, 2]
    assert images[0].isdisjoint(images[1])
    assert sorted([*without.train, *without.test]) == sorted(train), "no test question"
    with pytest.raises(ValueError, match="too few training images to set some apart: 1"):
        questions(train[:2], [], test).for_validation(0.2)


# --- Recipes ---


def features_of(folder: Path, names: list[str], key: str) -> Path:
    random = np.random.default_rng(0)
    for number, name in enumerate(names):
        place = folder / name.split("_")[1]  # train2014 or val2014
        place.mkdir(parents=True, exist_ok=True)
        array = random.normal(size=(2 + number % 2, 2048)).astype(np.float32)
        np.savez(place / f"{name}.npz", **{key: array if key == "feat" else array.T})
    return folder


def test_features_may_be_in_folders_of_the_parts(tmp_path: Path) -> None:
    names = ["COCO_train2014_000000000009.jpg", "COCO_val2014_000000000005.jpg"]
    found = RegionFeatures(features_of(tmp_path, names, "x"))
    assert found.read(["COCO_val2014_000000000005", "9"], 4).real.sum(dim=1).tolist() == [3, 2]


@pytest.mark.slow
def test_the_papers_tables_are_trained_on_given_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train = [(n, f"Is it {'a dog' if n % 2 else 'red'}?", "yes/no", ten(yes=10)) for n in range(10, 16)]
    data = write_vqa(tmp_path / "vqa-v2", {**ROWS, "train2014": [*ROWS["train2014"], *train]})
    names = sorted({f"COCO_{part}_{n:012d}.jpg" for part, rows in ROWS.items() for n, *_ in rows})
    names += [f"COCO_train2014_{n:012d}.jpg" for n in range(10, 16)]
    features = features_of(tmp_path / "features", names, "x")
    monkeypatch.setattr(bam_questions, "STRENGTHS", (1.0,))
    monkeypatch.setattr(question_training, "step_times", lambda *_: [1.0])
    small = {"width": 8, "heads": 2, "layers": 1, "flat": 4, "embedding": 4, "dropout": 0.1}
    monkeypatch.setitem(bam_questions.NETWORKS, vqa.NAME, small)
    options = ["--dataset", "vqa-v2", "--features", str(features), "--epochs", "1", "--rows"]
    result = reproduce.run("bam-table-7", data.parent, 1, "cpu", extra=[*options, "WC"])
    assert result["config"]["kinds"] == ["other"]
    assert result["config"]["training"]["learning_rate"] == 1e-4
    notes = " ".join(result["notes"])
    assert "Other than in the paper:" in notes
    assert "rather than 6 + 6 layers of width 512" in notes
    assert "ten people" not in notes, "these data have them"
    net = MCAN.load("runs/questions/vqa-v2/rows/WC/seed-0/model")
    assert net.grid is None
    assert net.regions.in_features == 2048
    held = reproduce.run("bam-table-2", data.parent, 1, "cpu", extra=[*options, "Soft", "--validation"])
    assert any("set apart" in note for note in held["notes"])
    assert Path("runs/questions/vqa-v2-validation/rows-validation/Soft/seed-0/result.json").is_file()
    with pytest.raises(ValueError, match="--dataset vqa-v2 needs --features DIR"):
        reproduce.run("bam-table-2", data.parent, 1, "cpu", extra=["--dataset", "vqa-v2"])


@pytest.mark.slow
def test_captions_of_coco_are_trained_as_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    images = [
        image(n, split, "A dog runs", "A cat sits")
        for n, split in enumerate(["train"] * 12 + ["val"] * 2 + ["test"] * 3, 20)
    ]
    write_coco(tmp_path / "coco", images)
    features = features_of(tmp_path / "features", [each["filename"] for each in images], "feat")
    monkeypatch.setattr(caption_training, "step_times", lambda *_: [1.0])
    made = caption_training.Att2in
    monkeypatch.setattr(
        caption_training,
        "Att2in",
        lambda *given, **more: made(*given, **{**more, "embedding": 8, "hidden": 8, "score": 8}),
    )
    options = ["--dataset", "coco", "--features", str(features), "--epochs", "1", "--rows", "soft"]
    result = reproduce.run("bam-table-3", tmp_path, 1, "cpu", extra=options)
    training = result["config"]["training"]
    assert (training["batch"], training["learning_rate"], training["length"]) == (10, 5e-4, 16)
    assert (CaptionTraining.batch, CaptionTraining.learning_rate) != (10, 5e-4)
    assert result["config"]["data"]["words"] == 5
    assert not any("do not compare" in note for note in result["notes"])
    with pytest.raises(ValueError, match="--dataset coco needs --features DIR"):
        reproduce.run("bam-table-3", tmp_path, 1, "cpu", extra=["--dataset", "coco"])


@pytest.mark.parametrize(
    ("size", "layers", "width"), [("own", 3, 256), ("small", 6, 512), ("large", 6, 1024)]
)
def test_the_published_sizes_can_be_asked_for(size: str, layers: int, width: int) -> None:
    options: dict[str, Any] = {name: option.default for name, option in bam_questions.OPTIONS.items()}
    data = questions([asked(f"t{n}") for n in range(64)], [], [asked("u")])
    object.__setattr__(data, "name", "scenes")
    plan = bam_questions.plan(data, 16, {**options, "size": size}, "image")
    assert (plan.network["layers"], plan.network["width"]) == (layers, width)
    with pytest.raises(ValueError, match="--size must be one of 'own', 'small', 'large'"):
        bam_questions.plan(data, 16, {**options, "size": "huge"}, "image")
    with pytest.raises(ValueError, match="--learning-rate must be a positive number"):
        bam_questions.plan(data, 16, {**options, "learning-rate": "-1"}, "image")
