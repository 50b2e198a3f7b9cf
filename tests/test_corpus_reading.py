"""Inputs of a run over a corpus, and how they are cut."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overt.corpus import plan
from overt.corpus.reading import LineSource, open_source


def everything(source: Any) -> dict[str, Any]:
    return dict(source.read(0, source.rows).columns)


def test_lines_of_text_are_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\ntwo \xc3\xa9\nthree")
    source = open_source(path, every=2)
    assert (source.rows, source.types) == (4, {"text": "string"})
    assert everything(source)["text"] == ["one", "", "two é", "three"]


def test_json_lines_have_types_that_hold_all_their_values(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"text": "a", "n": 1, "x": 1, "b": True, "m": "s", "deep": {"k": [1]}, "big": 2**70},
        {"text": "b", "n": None, "x": 0.5, "b": False, "m": 3, "deep": None, "big": 1},
        {"text": None, "extra": "é"},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    source = open_source(path, every=1)
    assert source.types == {
        "text": "string", "n": "int64", "x": "double", "b": "bool", "m": "string", "deep": "string",
        "big": "string", "extra": "string",
    }  # fmt: skip
    found = everything(source)
    assert found["x"] == [1.0, 0.5, None]
    assert found["m"] == ["s", "3", None]
    assert found["deep"] == ['{"k": [1]}', None, None]
    assert found["extra"] == [None, None, "é"]


def test_bad_lines_are_errors_of_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": \n\n[1]\n{"text": "\xff"}\n{"text": 5}\n{"text": "b"}\n')
    source = open_source(path, every=4)
    read = source.read(0, source.rows)
    assert read.columns["text"][0] == "a"
    assert read.columns["text"][6] == "b"
    assert {place: error.split(":")[0] for place, error in read.errors.items()} == {
        1: "the line is not JSON",
        2: "the line is empty",
        3: "the line must be a JSON object, got list",
        4: "the row is not in UTF-8",
        5: "text must be a string, got 5",
    }


def test_values_that_cannot_be_written_are_errors_of_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    deep = "[" * 5000 + "]" * 5000
    lines = [
        json.dumps({"text": "a", "more": {"k": ["\ud83d"]}}),
        json.dumps({"text": "b", "\ud83d": 1}),
        "[" * 100_000,
        f'{{"text": "d", "more": {deep}}}',
        f'{{"text": "e", "more": {"[" * 102 + "]" * 102}}}',
        json.dumps({"text": "f", "more": {"k": ["\U0001f600"]}}),
    ]
    path.write_text("\n".join(lines))
    source = open_source(path, every=2)
    read = source.read(0, source.rows)
    encoding, brackets = "the row is not in UTF-8", "the line has more than 100 brackets within brackets"
    assert read.errors == {0: encoding, 1: encoding, 2: brackets, 3: brackets, 4: brackets}
    assert list(read.columns) == ["text", "more"]
    assert read.columns["more"][5] == '{"k": ["\U0001f600"]}'


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_ends_of_lines_within_fields_are_kept(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.csv"
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator=end).writerows([["text", "n"], [f"one{end}two", "1"], ["three", "2"]])
    with open(path, newline="") as file:
        expected = [row["text"] for row in csv.DictReader(file)]
    source = open_source(path, every=1)
    assert source.types == {"text": "string", "n": "int64"}
    assert everything(source)["text"] == expected == [f"one{end}two", "three"]
    assert source.read(1, 2).columns["n"] == [2]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.tsv", "a.parquet"])
def test_an_input_that_changes_while_it_is_read_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name

    def write(texts: list[str]) -> None:
        if path.suffix == ".parquet":
            pa = pytest.importorskip("pyarrow")
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pa.table({"text": texts}), path, row_group_size=2)
        else:
            lines = [json.dumps({"text": text}) if path.suffix == ".jsonl" else text for text in texts]
            path.write_text("".join(f"{line}\n" for line in (["text"] if "sv" in name else []) + lines))

    write(["one", "two", "three", "four"])
    source = open_source(path, every=2)
    assert len(source.read(0, 2).columns["text"]) == 2
    write(["zero", "one", "two", "three", "four"])
    with pytest.raises(ValueError, match=f"{name} has changed while it was read"):
        source.read(2, 4)


def test_fields_are_numbers_only_where_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    rows = [
        ["text", "n", "x", "zip", "version", "gap", "huge"],
        ['a "quoted", line\nand another', "1", "0.5", "007", "1.10", "", str(2**64)],
        ["5", "-2", "3", "123", "1.2", "4", "1"],
    ]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)
    source = open_source(path, every=1)
    kinds = {"text": "string", "n": "int64", "x": "double", "zip": "string", "version": "string"}
    assert source.types == {**kinds, "gap": "int64", "huge": "string"}
    found = everything(source)
    assert found["text"] == ['a "quoted", line\nand another', "5"]
    assert found["gap"] == [None, 4]
    assert source.read(1, 2).columns["n"] == [-2], "rows are found after a line break within a field"


def test_rows_of_csv_with_other_fields_are_errors_and_open_quotes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,n\na,1,2\nb\n"c"d,1\ne,2\n')
    read = open_source(path, every=10).read(0, 4)
    assert read.errors[0] == "the row has 3 fields, and the header 2"
    assert read.errors[1] == "the row has 1 fields, and the header 2"
    assert read.errors[2].startswith("the line is not CSV")
    assert read.columns["text"][3] == "e"
    path.write_text('text,n\n"a,1\nb,2\n')
    with pytest.raises(ValueError, match=r"a.csv: a quote is opened and never closed"):
        open_source(path, every=10)


def test_tabs_separate_fields_and_quotes_are_letters(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('text\tlabel\n"so they said\t1\nyes\t0\n')
    assert everything(open_source(path, every=10)) == {"text": ['"so they said', "yes"], "label": [1, 0]}


@pytest.mark.parametrize("every", [1, 3, 100])
def test_every_range_of_several_files_is_read(tmp_path: Path, every: int) -> None:
    for name, count in (("b", 4), ("a", 3), ("c", 0), ("d", 5)):
        rows = "".join(f"{name}{number},{number}\n" for number in range(count))
        (tmp_path / f"{name}.csv").write_text("text,n\n" + rows)
    (tmp_path / "README.md").write_text("not a row")
    source = open_source(tmp_path, every)
    whole = everything(source)["text"]
    assert whole == [
        f"{name}{number}" for name, count in (("a", 3), ("b", 4), ("d", 5)) for number in range(count)
    ]
    for start in range(source.rows):
        for stop in range(start, source.rows + 1):
            assert source.read(start, stop).columns["text"] == whole[start:stop]


def test_the_hash_is_of_the_content(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    before = LineSource([path], 1).hash
    assert LineSource([path], 2).hash == before
    path.write_text("one\ntwa\n")
    assert LineSource([path], 1).hash != before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "body,n\na,1\n", "has no column text; it has body, n: give --text"),
        ("a.jsonl", '{"text": 1}\n', "column text of .* must hold texts, and holds int64"),
        ("a.jsonl", "[1, 2]\n", "line 1: the line must be a JSON object, got list; each line must be a JSON"),
        ("a.jsonl", '{"text": 1\n', "line 1: the line is not JSON: .*; each line must be a JSON object"),
        ("a.jsonl", "{}\n", "line 1: the line has no keys; each line must be a JSON object such"),
        ("a.jsonl", "", "a.jsonl has no texts"),
        ("a.csv", "", "it is empty: the first line must name the columns"),
        ("a.csv", "text,text\n", "the first line must name the columns, each differently"),
        ("a.doc", "", r"must end in one of \.txt, .*: rename it"),
        ("a.json", "[]", "a JSON file has one object per line, in .jsonl"),
        ("a.txt.gz", "", "decompress it"),
    ],
)
def test_inputs_that_are_not_understood_are_refused(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        open_source(tmp_path / name, 10)


def test_text_in_utf_16_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good\nbad\n", encoding="utf-16")
    with pytest.raises(ValueError, match=r"a.txt: it is in UTF-16 or UTF-32: convert it to UTF-8"):
        open_source(tmp_path / "a.txt", 10)


def test_missing_and_mixed_inputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none does not exist; a data set on the hub is named"):
        open_source(tmp_path / "none", 10)
    with pytest.raises(ValueError, match="it holds none of them"):
        open_source(tmp_path, 10)
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "b.csv").write_text("text\na\n")
    with pytest.raises(ValueError, match=r"it holds files of several forms \(.csv, .txt\)"):
        open_source(tmp_path, 10)
    (tmp_path / "a.txt").rename(tmp_path / "c.csv")
    with pytest.raises(ValueError, match=r"c.csv: its columns are \['a'\], and those of b.csv \['text'\]"):
        open_source(tmp_path, 10)


@given(st.lists(st.integers(1, 3000), max_size=40), st.integers(1, 9))
def test_batches_hold_every_row_once_and_little_padding(lengths: list[int], size: int) -> None:
    batches = plan.batches(lengths, size)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    order = [lengths[place] for batch in batches for place in batch]
    assert order == sorted(order)
    for batch in batches:
        cells = len(batch) * max(lengths[place] for place in batch) ** 2
        assert len(batch) == 1 or (len(batch) <= size and cells <= plan.CELLS)


@given(st.integers(0, 50), st.integers(1, 12))
def test_shards_hold_every_row_once_and_an_empty_corpus_has_one(rows: int, size: int) -> None:
    shards = plan.shards(rows, size)
    assert [row for shard in shards for row in shard] == list(range(rows))
    assert all(len(shard) == size for shard in shards[:-1])
    assert shards
