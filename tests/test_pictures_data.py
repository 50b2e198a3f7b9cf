"""Images with captions and questions: words, files in their original layouts, features of regions."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from overt.data import daquar, flickr8k, named_images
from overt.data.daquar import kind_of
from overt.data.pictures import opened
from overt.data.questions import Asked, QuestionData, kinds, outside
from overt.data.region_features import RegionFeatures
from overt.data.vocabulary import Vocabulary, tokenise, vocabulary_of

REAL = os.environ.get("OVERT_DATA")


def real(name: str) -> Any:
    missing = REAL is None or not (Path(REAL) / name).is_dir()
    return pytest.mark.skipif(missing, reason=f"OVERT_DATA has no {name}/ to read")


# --- Words ---


# What Stanford's PTBTokenizer makes of them, without punctuation marks.
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A dog 's ball .", "a dog 's ball"),
        ("Two dogs' bowls, and the dog's T-shirt.", "two dogs bowls and the dog 's t-shirt"),
        ("He doesn't see, we cannot see .", "he does n't see we can not see"),
        ('The sign " U.S. " reads 3:30 ; 10,000 people !', "the sign u.s. reads 3:30 10,000 people"),
        (
            "A St. Bernard ( dog ) & Dale Earnhardt , Jr. .",
            "a st. bernard -lrb- dog -rrb- & dale earnhardt jr.",
        ),
        ("rock 'n' roll at 5 o'clock", "rock 'n' roll at 5 o'clock"),
        ("A man at avrovulcan.com .", "a man at avrovulcan.com"),
        ("a man/woman <unk> #5", "a man/woman <unk> # 5"),
        (" . ", ""),
    ],
)
def test_words_are_those_of_the_treebank(text: str, words: str) -> None:
    assert " ".join(tokenise(text)) == words


def test_a_vocabulary_has_the_frequent_words() -> None:
    vocabulary = vocabulary_of(["A dog runs .", "a dog", "a cat runs"], least=2)
    assert vocabulary.words == ("a", "dog", "runs")
    assert len(vocabulary) == 5, "with padding and unknown words"
    assert vocabulary.encode("A cat runs!") == [1, vocabulary.unknown, 3]
    assert vocabulary.decode([1, 4, 3, 0, 2]) == "a <unk> runs"
    with pytest.raises(ValueError, match=r"^numbers must lie in 0 to 4, got 5$"):
        vocabulary.decode([5])
    with pytest.raises(ValueError, match=r"^words must differ, got 'a' more than once$"):
        Vocabulary(("a", "b", "a"))


def test_a_caption_ends_and_one_that_is_cut_does_not() -> None:
    vocabulary = Vocabulary(("a", "b", "c"))
    numbers, counts = vocabulary.captions(["a b", "a b c", "c b a b c"], length=3)
    assert numbers.tolist() == [[1, 2, 0, 0], [1, 2, 3, 0], [3, 2, 1, 2]]
    assert counts.tolist() == [[True, True, True, False], [True] * 4, [True] * 4]


def test_questions_are_padded_and_cut_and_have_words() -> None:
    vocabulary = Vocabulary(("a", "b", "c"))
    assert vocabulary.questions(["a b ?", "c b a d"], length=3).tolist() == [[1, 2, 0], [3, 2, 1]]
    with pytest.raises(ValueError, match=r"^a question must have a word, got ' \?'$"):
        vocabulary.questions(["a", " ?"], length=3)


# --- Images ---


def picture(shade: int, size: tuple[int, int] = (8, 8)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (shade, shade, shade)).save(file, "JPEG")
    return file.getvalue()


def write_npz(path: Path, images: Mapping[str, bytes]) -> None:
    offsets = np.cumsum([0, *map(len, images.values())])
    blob = np.frombuffer(b"".join(images.values()), np.uint8)
    np.savez(path, jpeg=blob, offsets=offsets, names=np.array(list(images)))


def write_files(folder: Path, images: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, content in images.items():
        (folder / name).write_bytes(content)


def test_images_in_one_file_and_in_a_folder_are_the_same(tmp_path: Path) -> None:
    shown = {"b.jpg": picture(200), "a.jpg": picture(10)}
    (tmp_path / "one").mkdir()
    write_npz(tmp_path / "one" / "images8.npz", shown)
    write_files(tmp_path / "many" / "images", shown)
    packed, loose = (named_images.find(tmp_path / name, ("images",)) for name in ("one", "many"))
    for images in (packed, loose):
        pixels = images.pixels(["a", "b.png"], 8)
        assert pixels.shape == (2, 3, 8, 8)
        assert pixels.dtype == torch.uint8
        assert pixels.float().mean(dim=(1, 2, 3)).tolist() == pytest.approx([10, 200], abs=2)
        assert "a.jpg" in images
        assert "c.jpg" not in images
        with pytest.raises(ValueError, match=r"has no image c$"):
            images.pixels(["c"], 8)


def test_the_whole_of_an_image_is_scaled_to_a_square(tmp_path: Path) -> None:
    wide = np.zeros((8, 32, 3), np.uint8)
    wide[:, :8, 0] = 255  # its left quarter is red
    write_files(tmp_path / "images", {})
    Image.fromarray(wide).save(tmp_path / "images" / "wide.png")
    pixels = named_images.find(tmp_path, ("images",)).pixels(["wide"], 8)[0]
    assert pixels[0].float().mean() == pytest.approx(255 / 4, rel=0.05)
    assert pixels[0, :, 0].min() == 255


def test_missing_doubled_and_broken_images_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no images: put image files into images/ there, or an "):
        named_images.find(tmp_path, ("images",))
    write_files(tmp_path / "images", {"a.jpg": picture(1), "a.png": picture(2)})
    with pytest.raises(ValueError, match=r"one image of each name, got a twice$"):
        named_images.find(tmp_path, ("images",))
    (tmp_path / "images" / "a.png").unlink()
    (tmp_path / "images" / "b.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"^image b of .*images cannot be read as an image$"):
        named_images.find(tmp_path, ("images",)).pixels(["b"], 8)
    write_npz(tmp_path / "images1.npz", {"a": picture(1)})
    write_npz(tmp_path / "images2.npz", {"a": picture(1)})
    with pytest.raises(ValueError, match=r"of which one must be left: images1\.npz, images2\.npz$"):
        named_images.find(tmp_path, ("images",))


# --- Flickr8k ---

TOKENS = """one.jpg#0\tA dog runs .
one.jpg#1\tThe dog is running .
two.jpg#0\tA dog sits .
two.jpg#1\tA sitting dog
three.jpg#0\tA cat .
four.jpg#0\tA cat sits .
gone.jpg.1#0\tNobody sees it .
gone.jpg.1#1\tIt is gone .
five.jpg#0\tIn no part .
"""
SPLITS = {"train": "two.jpg\none.jpg\n", "dev": "three.jpg\n", "test": "four.jpg\n"}


def write_flickr(folder: Path, tokens: str = TOKENS, splits: Mapping[str, str] = SPLITS) -> Path:
    folder.mkdir()
    (folder / "Flickr8k.token.txt.gz").write_bytes(gzip.compress(tokens.encode()))
    for name, lines in splits.items():
        (folder / f"Flickr_8k.{name}Images.txt").write_text(lines)
    names = ("one.jpg", "two.jpg", "three.jpg", "four.jpg", "five.jpg")
    write_npz(folder / "images8.npz", {name: picture(40 * n) for n, name in enumerate(names)})
    return folder


@pytest.fixture
def rare_words_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flickr8k, "LEAST", 2)


@pytest.mark.usefixtures("rare_words_count")
def test_flickr8k_has_its_published_parts_and_counts_what_it_leaves_out(tmp_path: Path) -> None:
    write_flickr(tmp_path / "flickr8k")
    data = flickr8k.load(tmp_path, side=8)
    assert [row.image for row in data.train] == ["two.jpg", "one.jpg"]
    assert data.train[1].captions == ("A dog runs .", "The dog is running .")
    assert data.vocabulary.words == ("dog", "a"), "words of training alone"
    assert data.counts == {"captions_without_image": 2, "images_in_no_part": 1}
    for part, shades in (("train", [40, 0]), ("validation", [80]), ("test", [120])):
        rows, pixels = data.part(part)
        assert pixels is not None
        assert len(rows) == len(shades)
        assert pixels.float().mean(dim=(1, 2, 3)).tolist() == pytest.approx(shades, abs=2)
    assert data.describe()["captions"] == 6
    again, bare = flickr8k.load(tmp_path / "flickr8k", side=8), flickr8k.load(tmp_path, pictures=False)
    assert again.sha256 == data.sha256
    assert bare.images is None
    assert bare.part("test")[1] is None


@pytest.mark.usefixtures("rare_words_count")
@pytest.mark.parametrize(
    ("tokens", "splits", "message"),
    [
        (
            "one.jpg A dog\n",
            {},
            r"token\.txt\.gz, line 1: must be IMAGE#NUMBER, a tab and a caption, got 'one",
        ),
        (
            TOKENS + "\nsix.jpg#0\t . \n",
            {},
            r"line 11: the caption of six\.jpg#0 must have a word, got ' \. '$",
        ),
        ("\n", {}, r"token\.txt\.gz must have captions, a line each, got none$"),
        (TOKENS + "one.jpg#1\tA dog\n", {}, r"line 10: one\.jpg#1 has a caption already$"),
        (
            TOKENS.replace("three.jpg", "other.jpg"),
            {},
            r"devImages\.txt, line 1: three\.jpg has no captions in Flickr8k\.token\.txt$",
        ),
        (
            None,
            {"test": "four.jpg\n\none.jpg\n"},
            r"line 3: one\.jpg must be in one part only, and is in .*train",
        ),
        (None, {"test": "nine.jpg\n"}, r"line 1: nine\.jpg has no image in .*images8\.npz$"),
        (None, {"dev": "\n"}, r"devImages\.txt must name images, a line each, got none$"),
    ],
)
def test_what_is_wrong_in_flickr8k_is_named_with_its_line(
    tmp_path: Path, tokens: str | None, splits: Mapping[str, str], message: str
) -> None:
    write_flickr(tmp_path / "flickr8k", tokens or TOKENS, {**SPLITS, **splits})
    with pytest.raises(ValueError, match=message):
        flickr8k.load(tmp_path, side=8)


def test_missing_files_of_flickr8k_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OVERT_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"Flickr8k needs a folder with .*: give --data DIR"):
        flickr8k.load()
    with pytest.raises(FileNotFoundError, match=r"has no Flickr8k: put Flickr8k\.token\.txt and "):
        flickr8k.load(tmp_path)
    write_flickr(tmp_path / "flickr8k", splits={"train": SPLITS["train"]})
    with pytest.raises(FileNotFoundError, match=r"has no Flickr_8k\.devImages\.txt$"):
        flickr8k.load(tmp_path)


@real("flickr8k")
@pytest.mark.slow
def test_rows_of_the_real_flickr8k() -> None:
    assert REAL is not None
    data = flickr8k.load(Path(REAL), pictures=False)
    sizes = [len(part) for part in (data.train, data.validation, data.test)]
    assert sizes == [6000, 1000, 1000]
    assert {len(row.captions) for row in (*data.train, *data.validation, *data.test)} == {5}
    assert data.counts["images_in_no_part"] == 92
    assert len(data.vocabulary.words) == 2539
    lengths = [len(tokenise(text)) for row in data.train for text in row.captions]
    shares = [sum(length <= most for length in lengths) / len(lengths) for most in (16, 20)]
    assert shares == pytest.approx([0.926, 0.985], abs=5e-4)
    images = named_images.find(Path(REAL) / "flickr8k", flickr8k.PLACES)
    assert len(images.files) == 8091
    assert "2258277193_586949ec62.jpg.1" not in images
    assert images.pixels([row.image for row in data.test[:20]], 128).shape == (20, 3, 128, 128)


# --- DAQUAR ---

HEADER = "question,answer,image_id\n"


def write_daquar(
    folder: Path, train: Sequence[str], test: Sequence[str], answers: str | None = "1\nred\nchair\n"
) -> Path:
    folder.mkdir()
    for name, lines in zip(daquar.TABLES, (train, test), strict=True):
        (folder / name).write_text(HEADER + "".join(f"{line}\n" for line in lines))
    if answers:
        (folder / "answer_space.txt").write_text(answers)
    write_npz(folder / "images8.npz", {f"image{n}.png": picture(5 * n) for n in range(40)})
    return folder


def lines_about(images: Sequence[int]) -> list[str]:
    return [f"what is in room {n},chair,image{n}" for n in images]


def test_daquar_is_split_by_image_in_the_order_of_hashes(tmp_path: Path) -> None:
    write_daquar(tmp_path / "daquar", lines_about([*range(30), 3, 3]), lines_about([*range(20, 40), 3]))
    data = daquar.load(tmp_path, side=8)
    parts = [{row.image for row in rows} for rows in (data.train, data.validation, data.test)]
    assert [len(part) for part in parts] == [28, 3, 9], "40 images in the proportions of 1,000, 100 and 347"
    assert not parts[0] & parts[1]
    assert not (parts[0] | parts[1]) & parts[2]
    ordered = sorted(
        {f"image{n}" for n in range(40)}, key=lambda name: hashlib.sha256(name.encode()).hexdigest()
    )
    assert parts[0] == set(ordered[:28])
    assert parts[2] == set(ordered[31:])
    assert sum(len(rows) for rows in (data.train, data.validation, data.test)) == 53, "no row is lost"
    assert data.images is not None
    rows = [*data.test, *data.train]
    shades = data.images[data.image_numbers(rows)].float().mean(dim=(1, 2, 3))
    assert shades.tolist() == pytest.approx([5 * int(row.image[5:]) for row in rows], abs=2)


def test_the_published_split_of_daquar_says_that_it_leaks(tmp_path: Path) -> None:
    write_daquar(tmp_path / "daquar", lines_about(range(30)), lines_about(range(20, 40)))
    data = daquar.load(tmp_path, "published", side=8)
    assert (len(data.train), len(data.validation), len(data.test)) == (30, 0, 20)
    assert data.remarks == ("the published split: 10 of 20 test images are also in training",)
    with pytest.raises(ValueError, match=r"^split must be one of 'image', 'published'; got 'csv'$"):
        daquar.load(tmp_path, "csv")  # type: ignore[arg-type]


def test_several_answers_share_the_credit_and_those_outside_the_space_count(tmp_path: Path) -> None:
    test = [
        'what is there,"chair, red",image1',
        'what is this,"lamp, chair, lamp",image2',
        "who,nobody,image3",
    ]
    write_daquar(tmp_path / "daquar", [*lines_about(range(5)), "how many,7,image7"], test)
    data = daquar.load(tmp_path, "published", side=8)
    assert data.answers == ("1", "red", "chair")
    assert [row.answers for row in data.test] == [("chair", "red"), ("lamp", "chair"), ("nobody",)]
    assert data.targets(data.test).tolist() == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert data.credits(data.test).tolist() == [[0, 0.5, 0.5], [0, 0, 0.5], [0, 0, 0]]
    assert data.counts == {
        "answers_outside_in_train": 1,
        "answers_outside_in_validation": 0,
        "answers_outside_in_test": 2,
    }
    assert {kind: found.tolist() for kind, found in kinds([data.train[5], data.test[0]]).items()} == {
        "number": [True, False],
        "other": [False, True],
    }
    assert outside(data.test, ["chair", "red", "lamp"]) == 1


def test_without_a_list_of_answers_those_of_training_are_the_space(tmp_path: Path) -> None:
    write_daquar(tmp_path / "daquar", ["a,2,image1", 'b,"x, 1",image2'], ["c,9,image3"], answers=None)
    data = daquar.load(tmp_path, "published", side=8)
    assert data.answers == ("1", "2", "x")
    assert data.counts["answers_outside_in_test"] == 1


def test_kinds_of_questions() -> None:
    questions = ("how many chairs are there", "what colour is it", "what is the color of it", "what is there")
    assert [kind_of(question) for question in questions] == ["number", "colour", "colour", "other"]
    assert kind_of("how many colours are there") == "number"


def test_questions_in_a_text_file_are_read_too(tmp_path: Path) -> None:
    folder = write_daquar(tmp_path / "daquar", [], [])
    for name in daquar.TABLES:
        (folder / name).unlink()
    pairs = "what is in the image3 ?\nchair\nhow many lamps are on the table of the image4 ?\n1, red\n" * 10
    rows = [f"what is this in this image{n} ?\nchair\n" for n in range(5, 40)]
    (folder / "all_qa_pairs.txt").write_text(pairs + "".join(rows))
    data = daquar.load(tmp_path, side=8)
    found = Counter((*data.train, *data.validation, *data.test))
    assert found[Asked("image3", "what is", ("chair",), "other")] == 10
    assert found[Asked("image4", "how many lamps are on the table", ("1", "red"), "number")] == 10
    assert sum(found.values()) == 55
    with pytest.raises(FileNotFoundError, match=r"must have data_train\.csv and .* for the published split$"):
        daquar.load(tmp_path, "published")
    (folder / "all_qa_pairs.txt").write_text("what is there ?\nchair\n")
    with pytest.raises(
        ValueError, match=r"pairs\.txt, line 1: must be a question … in the imageNUMBER \?, got"
    ):
        daquar.load(tmp_path)
    (folder / "all_qa_pairs.txt").write_text("what is in the image1 ?\n")
    with pytest.raises(ValueError, match=r"line 1: the question has no line with answers after it$"):
        daquar.load(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (",chair,image1", r"train\.csv, line 3: the question must have a word, got ''$"),
        ("? ,chair,image1", r"line 3: the question must have a word, got '\?'$"),
        ("what,,image1", "line 3: answers must be words with commas between them, got ''$"),
        ('what,"a, , b",image1', "line 3: answers must be words"),
        ("what,chair,", "line 3: the question names no image$"),
        ("what,chair", "line 3: must have 3 columns, got 2$"),
        ("what,chair,image99", r"images8\.npz has no image image99, which questions are about$"),
    ],
)
def test_what_is_wrong_in_daquar_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    write_daquar(tmp_path / "daquar", ["what is it,chair,image1", line], lines_about(range(5)))
    with pytest.raises(ValueError, match=message):
        daquar.load(tmp_path, "published", side=8)


def test_other_columns_missing_files_and_too_few_images_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"has no DAQUAR: put data_train\.csv and data_eval\.csv, or "
    ):
        daquar.load(tmp_path)
    folder = write_daquar(tmp_path / "daquar", lines_about([1]), lines_about([2]))
    with pytest.raises(
        ValueError, match=r"must have questions about more images: none is left for validation$"
    ):
        daquar.load(tmp_path)
    (folder / "answer_space.txt").write_text("red\nred\n")
    with pytest.raises(ValueError, match=r"must list answers, each once, got 2, 1 different$"):
        daquar.load(tmp_path, "published")
    (folder / "data_eval.csv").write_text("q,a,i\n")
    with pytest.raises(
        ValueError, match=r"eval\.csv, line 1: columns must be question, answer, image_id, got "
    ):
        daquar.load(tmp_path)


def majority(data: QuestionData) -> float:
    """Accuracy of the most frequent answer of training."""
    best = data.credits([*data.train, *data.validation]).sum(dim=0).argmax()
    return float(data.credits(data.test)[:, best].mean())


@real("daquar")
@pytest.mark.slow
def test_rows_of_the_real_daquar() -> None:
    assert REAL is not None
    data, leaking = (daquar.load(Path(REAL), split, pictures=False) for split in ("image", "published"))
    assert (len(leaking.train), len(leaking.test)) == (9974, 2494)
    assert leaking.remarks == ("the published split: 1,124 of 1,129 test images are also in training",)
    rows = [*data.train, *data.validation, *data.test]
    assert Counter(rows) == Counter([*leaking.train, *leaking.test]), "no row is lost"
    assert data.describe()["images"] == {"train": 1000, "validation": 100, "test": 347}
    assert len({row.image for row in rows}) == 1447, "so that no image is in two parts"
    assert {kind: int(found.sum()) for kind, found in kinds(rows).items()} == {
        "number": 1683,
        "colour": 1274,
        "other": 9511,
    }
    assert len(data.answers) == 582
    assert set(data.counts.values()) == {0}
    assert majority(leaking) == pytest.approx(0.045, abs=1e-3)
    pairs = daquar._pairs(Path(REAL) / "daquar" / "all_qa_pairs.txt.gz", hashlib.sha256())
    assert Counter(pairs) == Counter(rows), "both layouts have the same questions"


# --- Features of regions ---


def features(seed: int, regions: int, width: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(regions, width)).astype(np.float32)


def test_features_are_read_in_both_layouts_and_padded(tmp_path: Path) -> None:
    np.savez(tmp_path / "12.npz", feat=features(0, 3))
    np.savez(tmp_path / "COCO_val2014_000000000042.jpg.npz", x=features(1, 5).T, bbox=np.zeros((5, 4)))
    np.savez(tmp_path / "dog.jpg.npz", feat=features(2, 4))
    store = RegionFeatures(tmp_path, width=6)
    found = store.read(["42", "12", "dog.jpg", "COCO_val2014_000000000042.jpg", "dog"], regions=4)
    assert found.features.shape == (5, 4, 6)
    assert found.real.tolist() == [[True] * 4, [True, True, True, False], *[[True] * 4] * 3]
    np.testing.assert_array_equal(found.features[0], features(1, 5)[:4])
    np.testing.assert_array_equal(found.features[1, :3], features(0, 3))
    assert not found.features[1, 3].any()
    np.testing.assert_array_equal(found.features[3], found.features[0])
    np.testing.assert_array_equal(found.features[4], features(2, 4))


def test_an_h5_file_has_the_features_by_id(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "features.h5"
    with h5py.File(path, "w") as file:
        file["7"] = features(0, 3)
        file["8"] = features(1, 2, width=5)
        file.create_group("9")
    for place in (path, tmp_path):
        store = RegionFeatures(place, width=6)
        found = store.read(["7"], regions=4)
        np.testing.assert_array_equal(found.features[0, :3], features(0, 3))
        assert found.real.tolist() == [[True, True, True, False]]
        with pytest.raises(ValueError, match=r"features\.h5, 8: must have regions × 6 features, got 2 × 5$"):
            store.read(["8"])
        with pytest.raises(ValueError, match=r"features\.h5, 9: must be an array of numbers"):
            store.read(["9"])
        with pytest.raises(ValueError, match=r"features\.h5 has no image 10, of 1$"):
            store.read(["10"])
        store.close()
    path.write_bytes(b"no h5")
    with pytest.raises(ValueError, match=r"features\.h5 cannot be read as an h5 file"):
        RegionFeatures(path)


def test_an_h5_file_without_h5py_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    (tmp_path / "features.h5").write_bytes(b"")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'overt\[features\]'"):
        RegionFeatures(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"feat": features(0, 3, 5)}, r"1\.npz: feat must have regions × 6 features, got 3 × 5$"),
        ({"x": features(0, 3)}, r"1\.npz: the transpose of x must have regions × 6 features, got 6 × 3$"),
        ({"feat": features(0, 0)}, "must have regions × 6 features, got 0 × 6$"),
        ({"feat": features(0, 3)[0]}, "must have regions × 6 features, got 6$"),
        ({"feat": np.full((2, 6), np.nan)}, "must hold finite numbers"),
        ({"feat": np.array([["a"]])}, "must be an npz file of numbers: an array of <U1"),
        ({"feat": np.array([None])}, r"must be an npz file of numbers: it is something else$"),
        ({"y": features(0, 3)}, r"must have feat \(regions × width\) or x \(width × regions\), got y$"),
    ],
)
def test_features_that_do_not_fit_are_named(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "1.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        RegionFeatures(tmp_path, width=6).read(["1"])


def test_a_picture_that_is_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=r"^picture mine is a folder: give a file in it$"):
        opened(tmp_path, "mine")


def test_images_without_features_are_named_before_any_is_read(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"^features must be a folder of npz files, or an h5 file, got "
    ):
        RegionFeatures(tmp_path / "nowhere")
    with pytest.raises(
        ValueError, match=r"must have npz files, or else one h5 file, got 0 npz and 0 h5 files$"
    ):
        RegionFeatures(tmp_path)
    (tmp_path / "1.npz").write_bytes(b"broken")
    store = RegionFeatures(tmp_path)
    with pytest.raises(ValueError, match=r"has no image 2 and 1 more, of 3$"):
        store.read(["1", "2", "3"])
    with pytest.raises(ValueError, match=r"1\.npz must be an npz file of numbers"):
        store.read(["1"])
    np.savez(tmp_path / "COCO_train2014_000000000001.jpg.npz", feat=features(0, 1))
    with pytest.raises(ValueError, match=r"features of each image once, got 1 and COCO_train2014"):
        RegionFeatures(tmp_path)
