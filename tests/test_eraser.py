"""The reader of ERASER's movie reviews: small files in its layout, and the real ones if they are here."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from overt.data.eraser import Review, load_movies

REAL = os.environ.get("OVERT_DATA")
TEXTS = {"a.txt": "a dull film .\nreally dull", "b.txt": 'so " good " \n.'}


def passage(document: str, start: int, end: int, text: str) -> dict[str, Any]:
    return {"docid": document, "start_token": start, "end_token": end, "text": text}


def line(document: str, label: str, *groups: list[dict[str, Any]]) -> str:
    return json.dumps({"annotation_id": document, "classification": label, "evidences": groups})


GOOD = {
    "train": [line("a.txt", "NEG", [passage("a.txt", 1, 3, "dull film")])],
    "val": [line("b.txt", "POS")],
    "test": [
        line("b.txt", "POS"),
        line("a.txt", "NEG", [passage("a.txt", 1, 2, "dull"), passage("a.txt", 4, 6, "really dull")]),
        line("b.txt", "POS", [passage("b.txt", 3, 3, "")]),  # as a few of the published ones
    ],
}


def write(folder: Path, splits: dict[str, list[str]] = GOOD, together: bool = False) -> Path:
    """The files, plain with a document each as published, or gzipped and with the documents in one."""
    folder.mkdir(parents=True)
    for split, lines in splits.items():
        text = "\n".join(lines) + "\n"
        if together:
            (folder / f"{split}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / f"{split}.jsonl").write_text(text)
    if together:
        (folder / "docs.json.gz").write_bytes(gzip.compress(json.dumps(TEXTS).encode()))
    else:
        (folder / "docs").mkdir()
        for name, text in TEXTS.items():
            (folder / "docs" / name).write_text(text)
    return folder


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("inside", ["eraser/movies", "movies", "."])
def test_reviews_have_their_words_their_class_and_the_words_that_show_it(
    tmp_path: Path, together: bool, inside: str
) -> None:
    write(tmp_path / "data" / inside, together=together) if inside != "." else write(tmp_path / "data")
    found = load_movies(tmp_path / "data")
    dull = ("a", "dull", "film", ".", "really", "dull")
    good = Review("b.txt", ("so", '"', "good", '"', "."), 1, ())
    assert found == {
        "train": [Review("a.txt", dull, 0, ((1, 3),))],
        "val": [good],
        "test": [good, Review("a.txt", dull, 0, ((1, 2), (4, 6))), good],
    }
    assert good.text == 'so " good " .'


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "must be JSON with annotation_id, classification and evidences"),
        ('["a.txt"]', "must be JSON with annotation_id, classification and evidences"),
        ('{"annotation_id": "a.txt", "evidences": []}', "KeyError 'classification'"),
        (line("a.txt", "MEH"), "classification must be NEG or POS, got 'MEH'"),
        (line("c.txt", "NEG"), r"document 'c\.txt' is not in .*docs"),
        (line("a.txt", "NEG", [passage("b.txt", 0, 1, "so")]), r"evidence must be in 'a\.txt', got 'b\.txt'"),
        (line("a.txt", "NEG", [passage("a.txt", 0, 1, "dull")]), r"words 0 to 1 of a\.txt are not its ev"),
        (line("a.txt", "NEG", [passage("a.txt", 9, 12, "")]), r"words 9 to 12 of a\.txt are not its evid"),
        (line("a.txt", "NEG", [passage("a.txt", -2, -1, "really")]), "words -2 to -1 of a"),
        (line("a.txt", "NEG", [passage("a.txt", 0, None, "dull")]), "words 0 to None of a"),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("together", [False, True])
def test_a_bad_line_is_named_with_its_file(tmp_path: Path, bad: str, message: str, together: bool) -> None:
    write(tmp_path / "movies", GOOD | {"val": [GOOD["val"][0], bad]}, together)
    with pytest.raises(ValueError, match=rf"val\.jsonl(\.gz)?, line 2: .*{message}"):
        load_movies(tmp_path)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OVERT_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="no --data was given; put docs/"):
        load_movies()
    with pytest.raises(FileNotFoundError, match="has no movies of ERASER: put docs/"):
        load_movies(tmp_path)
    folder = write(tmp_path / "movies", together=True)
    (folder / "test.jsonl.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no test\.jsonl: put docs/"):
        load_movies(tmp_path)
    (folder / "docs.json.gz").write_bytes(gzip.compress(b'{"a.txt":\n 1'))
    with pytest.raises(ValueError, match=r"docs\.json\.gz, line 2: no JSON"):
        load_movies(tmp_path)
    (folder / "docs.json.gz").write_bytes(gzip.compress(b'{"a.txt": 1}'))
    with pytest.raises(ValueError, match=r"docs\.json\.gz must be a JSON object of texts by name"):
        load_movies(tmp_path)
    (folder / "docs.json.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no docs/ and no docs\.json: put docs/"):
        load_movies(tmp_path)


@pytest.mark.skipif(not REAL or not (Path(REAL) / "eraser").is_dir(), reason="OVERT_DATA has no eraser/")
def test_no_review_of_the_real_files_is_lost() -> None:
    found = load_movies()
    assert {split: len(reviews) for split, reviews in found.items()} == {
        "train": 1600,
        "val": 200,
        "test": 199,
    }
    reviews = [review for part in found.values() for review in part]
    assert [sum(review.label == label for review in reviews) for label in (0, 1)] == [1000, 999]
    assert sum(len(review.evidence) for review in reviews) == 17_442  # of 17,462, 20 without words
