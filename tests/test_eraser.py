"""The readers of ERASER's data sets: small files in their layouts, and the real ones if they are here."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overt.data.eraser import DATA_SETS, Example, Prediction, load, load_movies, write_predictions

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
    good = Example("b.txt", ("so", '"', "good", '"', "."), 1, ())
    assert found == {
        "train": [Example("a.txt", dull, 0, ((1, 3),))],
        "val": [good],
        "test": [good, Example("a.txt", dull, 0, ((1, 2), (4, 6))), good],
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


def test_a_folder_may_be_text_and_a_file_without_lines_is_no_split(tmp_path: Path) -> None:
    write(tmp_path / "movies")
    assert load("movies", str(tmp_path)) == load_movies(tmp_path)
    (tmp_path / "movies" / "val.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"val\.jsonl has no annotations"):
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
    with pytest.raises(FileNotFoundError, match=r"has no docs/, docs\.jsonl or docs\.json: put docs/"):
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


@pytest.mark.skipif(
    not REAL or not (Path(REAL) / "eraser" / "multirc").is_dir(), reason="OVERT_DATA has no eraser/multirc"
)
def test_the_real_multirc_has_its_questions_and_no_training_split() -> None:
    with pytest.raises(FileNotFoundError, match=r"multirc has no train\.jsonl: put docs/"):
        load("multirc")
    found = load("multirc", splits=("val", "test"))
    assert {split: len(examples) for split, examples in found.items()} == {"val": 3214, "test": 4848}
    assert all(" || " in example.query for example in found["val"])
    assert all(example.rationale.any() for example in found["val"])


# --- The other layouts ---


def row(name: str, label: str, query: str, docids: list[str] | None, *passages: dict[str, Any]) -> str:
    values = {"annotation_id": name, "classification": label, "query": query, "evidences": [list(passages)]}
    return json.dumps({**values, "docids": docids, "query_type": None})


def layout(folder: Path, name: str, line: str, texts: dict[str, str], kind: str) -> Path:
    place = folder / "eraser" / name
    place.mkdir(parents=True)
    for split in ("train", "val", "test"):
        (place / f"{split}.jsonl").write_text(line + "\n")
    if kind == "docs.jsonl":
        lines = [json.dumps({"docid": document, "document": text}) for document, text in texts.items()]
        (place / "docs.jsonl").write_text("\n".join(lines) + "\n")
    elif kind == "docs.json":
        (place / "docs.json").write_text(json.dumps(texts))
    else:
        (place / "docs").mkdir()
        for document, text in texts.items():
            (place / "docs" / document).write_text(text)
    return folder


LAYOUTS = {
    "multirc": (
        row("d.txt:0:1", "True", "Who sat ? || Allan", None, passage("d.txt", 0, 2, "Allan sat")),
        {"d.txt": "Allan sat .\nIt rained ."},
        "docs.json",
        Example("d.txt:0:1", ("Allan", "sat", ".", "It", "rained", "."), 1, ((0, 2),), "Who sat ? || Allan"),
    ),
    "fever": (
        row("91", "REFUTES", "Rome burns .", ["Rome"], passage("Rome", 1, 3, "is old")),
        {"Rome": "Rome is old ."},
        "docs",
        Example("91", ("Rome", "is", "old", "."), 0, ((1, 3),), "Rome burns ."),
    ),
    "cose": (
        row("q1", "C", "a [sep] b [sep] c [sep] d [sep] e", ["q1"], passage("q1", 2, 3, "read")),
        {"q1": "where to read ?"},
        "docs.jsonl",
        Example("q1", ("where", "to", "read", "?"), 2, ((2, 3),), "a [sep] b [sep] c [sep] d [sep] e"),
    ),
    "esnli": (
        row(
            "s",
            "neutral",
            "",
            ["s_hypothesis", "s_premise"],
            passage("s_hypothesis", 0, 1, "he"),
            passage("s_premise", 1, 2, "man"),
        ),
        {"s_premise": "a man sits", "s_hypothesis": "he waits"},
        "docs.jsonl",
        Example("s", ("a", "man", "sits", "he", "waits"), 2, ((3, 4), (1, 2))),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_data_set_is_read_in_its_own_layout(tmp_path: Path, name: str) -> None:
    text, texts, kind, expected = LAYOUTS[name]
    found = load(name, layout(tmp_path, name, text, texts, kind))
    assert found == {split: [expected] for split in ("train", "val", "test")}
    assert sum(document.words for document in found["val"][0].documents) == len(expected.words)


def test_no_document_is_lost_whose_words_nobody_marked(tmp_path: Path) -> None:
    """In e-SNLI's neutral pairs people mark words of the hypothesis alone."""
    text = row("s", "neutral", "", None, passage("s_hypothesis", 0, 1, "he"))
    (found,) = load("esnli", layout(tmp_path, "esnli", text, *LAYOUTS["esnli"][1:3]))["test"]
    assert found.words == ("a", "man", "sits", "he", "waits")
    assert found.evidence == ((3, 4),)
    other = row("s", "neutral", "", ["x", "y"], passage("y", 0, 1, "he"))
    texts = {"x": "a man sits", "y": "he waits"}
    (named,) = load("esnli", layout(tmp_path / "named", "esnli", other, texts, "docs"))["test"]
    assert (named.words, named.evidence) == (found.words, found.evidence)


def test_marked_words_are_those_of_the_passages_in_any_of_the_documents() -> None:
    assert LAYOUTS["esnli"][3].rationale.tolist() == [False, True, False, True, False]


def test_a_document_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    text = row("91", "REFUTES", "", ["Rome", "Rome"], passage("Rome", 1, 3, "is old"))
    (found,) = load("fever", layout(tmp_path, "fever", text, *LAYOUTS["fever"][1:3]))["test"]
    assert found.words == ("Rome", "is", "old", ".")
    assert found.evidence == ((1, 3),)
    assert [document.name for document in found.documents] == ["Rome"]


def test_passages_of_several_groups_and_documents_may_cross_lines(tmp_path: Path) -> None:
    texts = {"A": "x is big .\ny is small .", "B": "z is red ."}
    groups = [[passage("A", 2, 6, "big . y is"), passage("B", 2, 3, "red")], [passage("A", 2, 3, "big")]]
    values = {"annotation_id": "1", "classification": "SUPPORTS", "query": "q", "docids": ["A", "B"]}
    text = json.dumps({**values, "evidences": groups})
    (found,) = load("fever", layout(tmp_path, "fever", text, texts, "docs"))["test"]
    assert found.evidence == ((2, 6), (10, 11), (2, 3))
    assert found.rationale.nonzero()[0].tolist() == [2, 3, 4, 5, 10]


def by_the_benchmark(text: str, kind: str) -> list[str]:
    """Words as the benchmark's two readers count them."""
    words = []
    for line in text.split("\n"):
        words += line.strip().split(" ")
    return words if kind == "docs.jsonl" else [word for word in words if word]


@pytest.mark.parametrize("kind", ["docs", "docs.jsonl"])
@pytest.mark.parametrize(
    "text",
    ["10\u00a0km from here", "a  wide  gap here", "\u2003thin\u2003space \u00a0 here", "up here\n\nhere ."],
)
def test_words_are_counted_as_the_benchmark_counts_them(tmp_path: Path, kind: str, text: str) -> None:
    """Words end at spaces and lines alone; those of docs.jsonl may be empty, and count."""
    theirs = by_the_benchmark(text, kind)
    place = len(theirs) - 1 - theirs[::-1].index("here")
    bad = row("q", "C", "", ["q"], passage("q", place, place + 1, "here"))
    (found,) = load("cose", layout(tmp_path, "cose", bad, {"q": text}, kind))["test"]
    assert [found.words[start:end] for start, end in found.evidence] == [("here",)]
    assert list(found.words) == [word for word in theirs if word.strip()], "empty words are not judged"
    scores = np.arange(1.0, len(found.words) + 1)
    prediction = Prediction(scores, found.evidence, [0.2] * 5)
    write_predictions(tmp_path / "out.jsonl", "cose", [found], [prediction])
    (written,) = json.loads((tmp_path / "out.jsonl").read_text())["rationales"]
    assert written["hard_rationale_predictions"] == [{"start_token": place, "end_token": place + 1}]
    soft = written["soft_rationale_predictions"]
    assert len(soft) == len(theirs), "the benchmark's script wants a score for each"
    assert [score for score, word in zip(soft, theirs, strict=True) if word.strip()] == scores.tolist()
    assert all(score < 1.0 for score, word in zip(soft, theirs, strict=True) if not word.strip())


def test_a_name_with_a_slash_is_a_file_in_a_folder_and_no_other(tmp_path: Path) -> None:
    text = row("91", "REFUTES", "", ["AC/DC"])
    folder = layout(tmp_path, "fever", text, {"DC": "a city"}, "docs")
    with pytest.raises(ValueError, match=r"line 1: document 'AC/DC' is not in .*docs"):
        load("fever", folder)
    (folder / "eraser" / "fever" / "docs" / "AC").mkdir()
    (folder / "eraser" / "fever" / "docs" / "AC" / "DC").write_text("a band")
    assert load("fever", folder)["test"][0].words == ("a", "band")
    outside = row("91", "REFUTES", "", ["../train.jsonl"])
    (folder / "eraser" / "fever" / "test.jsonl").write_text(outside)
    with pytest.raises(ValueError, match=r"document '\.\./train\.jsonl' is not in .*docs"):
        load("fever", folder)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row("s", "neutral", "", "s_premise"), "docids must be a list"),  # type: ignore[arg-type]
        (row("s", "neutral", ["a"], None), "query text"),  # type: ignore[arg-type]
        (row("s", "maybe", "", None), "classification must be contradiction or entailment or neutral"),
        (row("t", "neutral", "", None), "document 't_premise' is not in"),
        (
            row("s", "neutral", "", None, passage("t_premise", 0, 1, "he")),
            "evidence must be in 's_premise' or 's_hypothesis', got 't_premise'",
        ),
        (
            row("s", "neutral", "", None, passage("s_hypothesis", 1, 3, "waits")),
            "words 1 to 3 of s_hypothesis are not",
        ),
    ],
)
def test_a_bad_line_of_several_documents_is_named(tmp_path: Path, bad: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"train\.jsonl, line 1: .*{message}"):
        load("esnli", layout(tmp_path, "esnli", bad, LAYOUTS["esnli"][1], "docs.jsonl"))


def test_bad_documents_and_names_are_named(tmp_path: Path) -> None:
    folder = layout(tmp_path, "cose", *LAYOUTS["cose"][:3])
    path = folder / "eraser" / "cose" / "docs.jsonl"
    path.write_text('{"docid": "q1"}\n')
    with pytest.raises(
        ValueError, match=r"docs\.jsonl, line 1: must be JSON with docid and document: KeyError"
    ):
        load("cose", folder)
    path.write_text('{"docid": "q1", "document": 3}\n')
    with pytest.raises(ValueError, match="docid and document must be text"):
        load("cose", folder)
    with pytest.raises(ValueError, match=r"name must be one of 'movies', .*; got 'boolq'"):
        load("boolq", folder)
    with pytest.raises(ValueError, match="splits must be one of 'train', 'val', 'test'; got 'dev'"):
        load("cose", folder, splits=("dev",))


# --- Predictions ---


def test_predictions_are_written_for_each_document_as_the_benchmark_reads_them(tmp_path: Path) -> None:
    name = "esnli"
    (example,) = load(name, layout(tmp_path, name, *LAYOUTS[name][:3]), splits=("test",))["test"]
    thirds = np.full((2, 3), 1 / 3)
    prediction = Prediction(np.arange(5.0), [(2, 4)], [0.2, 0.7, 0.1], (0.1, 0.5), thirds, thirds)
    prediction = prediction._replace(without_spans=[0.5, 0.4, 0.1], only_spans=[0.1, 0.6, 0.3])
    write_predictions(tmp_path / "out.jsonl", name, [example], [prediction])
    (found,) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found["annotation_id"] == "s"
    assert found["classification"] == "entailment"
    assert found["classification_scores"] == dict(zip(DATA_SETS[name].labels, (0.2, 0.7, 0.1), strict=True))
    premise, hypothesis = found["rationales"]
    assert (premise["docid"], hypothesis["docid"]) == ("s_premise", "s_hypothesis")
    assert premise["soft_rationale_predictions"] == [0, 1, 2]
    assert hypothesis["soft_rationale_predictions"] == [3, 4]
    assert premise["hard_rationale_predictions"] == [{"start_token": 2, "end_token": 3}]
    assert hypothesis["hard_rationale_predictions"] == [{"start_token": 0, "end_token": 1}]
    assert [entry["threshold"] for entry in found["thresholded_scores"]] == [0.1, 0.5]
    # The benchmark's script calls an instance with thresholds invalid that lacks these.
    assert list(found["comprehensiveness_classification_scores"].values()) == [0.5, 0.4, 0.1]
    assert list(found["sufficiency_classification_scores"].values()) == [0.1, 0.6, 0.3]
    few = Prediction(np.arange(5.0), [(2, 4)], [0.2, 0.7, 0.1])
    write_predictions(tmp_path / "few.jsonl", name, [example], [few])
    assert "thresholded_scores" not in json.loads((tmp_path / "few.jsonl").read_text()), "nor an empty list"
    bare = prediction._replace(only_spans=None)
    with pytest.raises(ValueError, match="s: shares need the probabilities without and from the chosen"):
        write_predictions(tmp_path / "out.jsonl", name, [example], [bare])
    for scores, message in (([0.0] * 4, "5 finite numbers"), ([np.nan] * 5, "5 finite numbers")):
        with pytest.raises(ValueError, match=f"s: scores must be {message}"):
            write_predictions(tmp_path / "out.jsonl", name, [example], [prediction._replace(scores=scores)])
    bad = prediction._replace(probabilities=[0.5, 0.5])
    with pytest.raises(ValueError, match="s: probabilities must be 3"):
        write_predictions(tmp_path / "out.jsonl", name, [example], [bad])
    with pytest.raises(ValueError, match="predictions must be 1, one for each example, got 0"):
        write_predictions(tmp_path / "out.jsonl", name, [example], [])
