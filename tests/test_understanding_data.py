"""Readers of GLUE and SQuAD: small files in their original layouts, and the real ones if they are here."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overt.data import glue, squad
from overt.data.files import read_text
from overt.data.glue import SUBMITTED_ONLY, TASKS, Row, load

REAL = os.environ.get("OVERT_DATA")
PARSES = "sentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
MNLI = f"index\tpromptID\tpairID\tgenre\t{PARSES}\tsentence1\tsentence2"
STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
MSR = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
# Task → (columns of train and dev, those of test, and a line of each); as the published files have them.
LAYOUTS = {
    "CoLA": ("", "index\tsentence", "gj04\t{}\t*\ta", "0\ta"),
    "SST-2": ("sentence\tlabel", "index\tsentence", "a \t{}", "0\ta"),
    "MRPC": (MSR, "index\t#1 ID\t#2 ID\t#1 String\t#2 String", "{}\t10\t11\ta\tb", "0\t10\t11\ta\tb"),
    "STS-B": (f"{STSB}\tscore", STSB, "7\tg\tf\ty\t1\ts\ts\ta\tb\t{}", "0\tg\tf\ty\t1\ts\ts\ta\tb"),
    "QQP": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "id\tquestion1\tquestion2",
        "7\t1\t2\ta\tb\t{}",
        "0\ta\tb",
    ),
    "MNLI": (
        f"{MNLI}\tlabel1\tgold_label",
        MNLI,
        "7\t1\t1n\tg\tp\tp\tp\tp\ta\tb\tneutral\t{}",
        "0\t1\t1n\tg\tp\tp\tp\tp\ta\tb",
    ),
    "QNLI": ("index\tquestion\tsentence\tlabel", "index\tquestion\tsentence", "7\ta\tb\t{}", "0\ta\tb"),
    "RTE": (
        "index\tsentence1\tsentence2\tlabel",
        "index\tsentence1\tsentence2",
        "7\ta\tb\t{}",
        "0\ta\tb",
    ),
}
WORDS = {
    "MNLI": ["entailment", "neutral", "contradiction"],
    "QNLI": ["entailment", "not_entailment"],
    "RTE": ["entailment", "not_entailment"],
    "STS-B": ["0.000", "3.250", "5.000"],
}
LABELS = {"MNLI": [0, 1, 2], "STS-B": [0.0, 3.25, 5.0]}


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads what happens to be on this computer or on the hub, unless it asks for it."""
    monkeypatch.delenv("OVERT_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(line for line in lines if line) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def write_task(folder: Path, name: str, ending: str = "") -> None:
    """Small files of a task, one row of each label in train and in dev, and one in test."""
    head, test_head, line, test_line = LAYOUTS[name]
    rows = [line.format(word) for word in WORDS.get(name, ["0", "1"])]
    suffixes = ["_matched", "_mismatched"] if name == "MNLI" else [""]
    write(folder / f"train.tsv{ending}", head, *rows)
    for suffix in suffixes:
        write(folder / f"dev{suffix}.tsv{ending}", head, *rows[::-1])
        write(folder / f"test{suffix}.tsv{ending}", test_head, test_line)


# --- GLUE ---


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_read_in_its_original_layout(name: str, ending: str, tmp_path: Path) -> None:
    write_task(tmp_path / "glue" / name, name, ending)
    splits = load(name, tmp_path)
    texts = ("a",) if name in ("CoLA", "SST-2") else ("a", "b")
    rows = [Row(texts, label) for label in LABELS.get(name, [0, 1])]
    parts = ["MNLI-m", "MNLI-mm"] if name == "MNLI" else [name]
    assert splits.train == rows
    assert splits.dev == dict.fromkeys(parts, rows[::-1])
    assert splits.test == {part: [Row(texts, None)] for part in parts}
    assert splits.describe()["train"] == len(rows)
    assert splits.remarks == ()


def test_the_table_of_tasks_is_glues() -> None:
    first = {name: task.metrics for name, task in TASKS.items()}
    assert first == {
        "CoLA": ("MCC",),
        "SST-2": ("accuracy",),
        "MRPC": ("F1", "accuracy"),
        "STS-B": ("Pearson", "Spearman"),
        "QQP": ("F1", "accuracy"),
        "MNLI": ("accuracy",),
        "QNLI": ("accuracy",),
        "RTE": ("accuracy",),
    }
    assert list(SUBMITTED_ONLY) == ["AX", "WNLI"]


def test_hashes_are_of_the_text_not_of_its_packing(tmp_path: Path) -> None:
    write_task(tmp_path / "plain" / "RTE", "RTE")
    write_task(tmp_path / "zipped" / "RTE", "RTE", ".gz")
    plain, zipped = (load("RTE", tmp_path / name).sha256 for name in ("plain", "zipped"))
    assert plain == zipped
    write(tmp_path / "plain" / "RTE" / "test.tsv", LAYOUTS["RTE"][1], "0\tother\tb")
    assert load("RTE", tmp_path / "plain").sha256 != plain


def test_what_only_a_submission_needs_is_read_without_training_files(tmp_path: Path) -> None:
    write(tmp_path / "diagnostic" / "diagnostic.tsv", "index\tsentence1\tsentence2", "0\ta\tb")
    write(tmp_path / "WNLI" / "test.tsv", "index\tsentence1\tsentence2", "0\tc\td")
    assert load("AX", tmp_path).test == {"AX": [Row(("a", "b"), None)]}
    wnli = load("WNLI", tmp_path)
    assert (wnli.train, wnli.dev, wnli.test) == ([], {}, {"WNLI": [Row(("c", "d"), None)]})


def test_quotation_marks_do_not_join_rows(tmp_path: Path) -> None:
    for part in ("train", "dev"):
        write(tmp_path / "SST-2" / f"{part}.tsv", "sentence\tlabel", '" a good film\t1', 'no " end\t0')
    splits = load("SST-2", tmp_path)
    assert splits.train == splits.dev["SST-2"] == [Row(('" a good film',), 1), Row(('no " end',), 0)]
    assert splits.test == {}


def test_only_a_line_feed_ends_a_row(tmp_path: Path) -> None:
    for part in ("train", "dev"):
        write(tmp_path / "SST-2" / f"{part}.tsv", "sentence\tlabel\r", "one\x85two\u2028three\x0cfour\t1\r")
    assert load("SST-2", tmp_path).train == [Row(("one\x85two\u2028three\x0cfour",), 1)]


def test_mrpc_is_microsofts_file_without_the_rows_of_dev(tmp_path: Path) -> None:
    folder = tmp_path / "MRPC"
    write(folder / "msr_paraphrase_train.txt", MSR, "1\t10\t11\ta\tb", "0\t12\t13\tc\td", "1\t11\t10\te\tf")
    write(folder / "msr_paraphrase_test.txt", MSR, "1\t20\t21\tg\th")
    write(folder / "dev_ids.tsv", "10\t11")
    write(folder / "dev.tsv", MSR, "1\t10\t11\ta\tb")
    splits = load("MRPC", tmp_path)
    assert splits.train == [Row(("c", "d"), 0), Row(("e", "f"), 1)]
    assert splits.dev == {"MRPC": [Row(("a", "b"), 1)]}
    assert splits.test == {"MRPC": [Row(("g", "h"), 1)]}, "its test is labelled in Microsoft's file"
    (folder / "dev_ids.tsv").unlink()
    with pytest.raises(FileNotFoundError, match=r"dev_ids\.tsv, which lists them, is missing"):
        load("MRPC", tmp_path)
    write(folder / "train.tsv", MSR, "0\t30\t31\ti\tj")
    assert load("MRPC", tmp_path).train == [Row(("i", "j"), 0)]


def test_a_list_of_mrpcs_dev_rows_that_names_others_is_refused_and_its_spaces_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "MRPC"
    write(folder / "msr_paraphrase_train.txt", MSR, "1\t10\t11\ta\tb", "0\t12\t13\tc\td")
    write(folder / "dev.tsv", MSR, "1\t10\t11\ta\tb")
    write(folder / "dev_ids.tsv", "\ufeff10\t11 \r", "")
    assert load("MRPC", tmp_path).train == [Row(("c", "d"), 0)]
    for ids in ("10,11", "0", "11\t10"):
        write(folder / "dev_ids.tsv", ids)
        with pytest.raises(ValueError, match=r"dev_ids\.tsv must list rows of .*, and 1 of 1 are not there"):
            load("MRPC", tmp_path)


def test_qqps_broken_lines_are_left_out_and_counted_but_not_in_its_test(tmp_path: Path) -> None:
    folder = tmp_path / "QQP"
    write_task(folder, "QQP")
    head, test_head, line, _ = LAYOUTS["QQP"]
    write(folder / "train.tsv", head, line.format(1), "8\t3\t4\tcut", "in two\td\t0", line.format(0))
    splits = load("QQP", tmp_path)
    assert [row.label for row in splits.train] == [1, 0]
    assert splits.remarks == ("train.tsv: 2 lines that are no whole rows were left out",)
    write(folder / "test.tsv", test_head, "0\ta")
    with pytest.raises(ValueError, match=r"test\.tsv, line 2: must have 3 columns .* got 2"):
        load("QQP", tmp_path)


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("SST-2", ["sentence\tlabel", "fine\t1", "bad\t2"], r"line 3: the label must be 0 or 1, got '2'"),
        ("SST-2", ["sentence\tlabel", "fine"], r"line 2: must have 2 columns \(sentence, label\), got 1"),
        ("SST-2", ["sentence\tlabel", "fine\t1\t1"], r"line 2: must have 2 columns .* got 3"),
        ("SST-2", ["text\tstars", "fine\t1"], r"line 1: SST-2 needs the columns sentence, label; sentence"),
        ("SST-2", [], "is empty"),
        ("SST-2", ["sentence\tlabel"], r"must have rows of 2 columns \(sentence, label\), got none"),
        ("QQP", [LAYOUTS["QQP"][0], "0 1 2 a b 1"], r"must have rows of 6 columns .* got none"),
        ("CoLA", ["source\tlabel\tmark\tsentence"], r"line 1: the label must be 0 or 1, got 'label'"),
        ("RTE", [LAYOUTS["RTE"][0], "0\ta\tb\t1"], r"must be entailment or not_entailment, got '1'"),
        ("MNLI", [LAYOUTS["MNLI"][0], LAYOUTS["MNLI"][2].format("-")], r"neutral or contradiction, got '-'"),
        ("STS-B", [LAYOUTS["STS-B"][0], LAYOUTS["STS-B"][2].format("6")], r"from 0 to 5, got '6'"),
        ("STS-B", [LAYOUTS["STS-B"][0], LAYOUTS["STS-B"][2].format("nan")], r"from 0 to 5, got 'nan'"),
    ],
)
def test_errors_name_file_and_line(name: str, lines: list[str], message: str, tmp_path: Path) -> None:
    write_task(tmp_path / name, name)
    write(tmp_path / name / "train.tsv", *lines)
    with pytest.raises(ValueError, match=rf"train\.tsv.*{message}"):
        load(name, tmp_path)


def test_an_unknown_task_and_a_missing_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be one of CoLA, .*, WNLI, got 'SNLI'"):
        load("SNLI", tmp_path)
    advice = r"put train\.tsv and dev\.tsv into DIR/CoLA and give --data DIR$"
    with pytest.raises(FileNotFoundError, match=rf"CoLA: not found in --data .*overt\[datasets\].*{advice}"):
        load("CoLA", tmp_path)
    write(tmp_path / "QNLI" / "dev.tsv", LAYOUTS["QNLI"][0], "0\ta\tb\tentailment")
    with pytest.raises(FileNotFoundError, match=r"QNLI has no train\.tsv\), and"):
        load("QNLI", tmp_path)


def test_missing_tasks_are_listed_and_broken_ones_fail(tmp_path: Path) -> None:
    for name in ("CoLA", "MNLI"):
        write_task(tmp_path / name, name)
    found, missing = glue.load_available(tmp_path)
    assert list(found) == ["CoLA", "MNLI"]
    assert list(missing) == ["SST-2", "MRPC", "STS-B", "QQP", "QNLI", "RTE"]
    assert all(reason.startswith(f"{name}: not found") for name, reason in missing.items())
    write(tmp_path / "MNLI" / "dev_matched.tsv", "index")
    with pytest.raises(ValueError, match=r"dev_matched\.tsv, line 1"):
        glue.load_available(tmp_path)
    with pytest.raises(FileNotFoundError, match="must be a folder"):
        glue.load_available(tmp_path / "nowhere")


class Column(list[Any]):
    """As far as the readers use it, a split of Hugging Face `datasets`."""

    names: list[str] | None = None

    @property
    def column_names(self) -> list[str]:
        return list(self[0])

    @property
    def features(self) -> dict[str, Any]:
        return {"label": SimpleNamespace(names=self.names) if self.names else SimpleNamespace()}

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


def on_hub(monkeypatch: pytest.MonkeyPatch, splits: dict[str, Column]) -> list[Any]:
    """A stub of `datasets` that has these splits; returns the arguments of its calls."""
    calls: list[Any] = []

    def load_dataset(*arguments: Any) -> dict[str, Column]:
        calls.append(arguments)
        return splits

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


def hub_mnli(label: int = 2) -> dict[str, Column]:
    splits = {}
    for name in ("train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched"):
        value = -1 if name.startswith("test") else label
        splits[name] = Column([{"premise": "a ", "hypothesis": "b", "label": value, "idx": 0}])
        splits[name].names = ["entailment", "neutral", "contradiction"]
    return splits


def test_a_task_that_the_folder_lacks_comes_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = hub_mnli()
    calls = on_hub(monkeypatch, splits)
    found = load("MNLI", tmp_path)
    assert calls == [("nyu-mll/glue", "mnli")]
    assert found.train == found.dev["MNLI-m"] == found.dev["MNLI-mm"] == [Row(("a", "b"), 2)]
    assert found.test["MNLI-mm"] == [Row(("a", "b"), None)]
    assert found.source == "nyu-mll/glue (mnli) on the hub"
    assert load("MNLI").sha256 == found.sha256
    write_task(tmp_path / "MNLI", "MNLI")
    assert load("MNLI", tmp_path).source == str(tmp_path / "MNLI")


def test_wrong_data_of_the_hub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = hub_mnli()
    on_hub(monkeypatch, splits)
    splits["train"].names = ["contradiction", "neutral", "entailment"]
    with pytest.raises(ValueError, match=r"train of .* must have the classes entailment, neutral, .* got c"):
        load("MNLI")
    on_hub(monkeypatch, hub_mnli(label=-1))
    with pytest.raises(ValueError, match=r"train of .*: labels must be from 0 to 2, got -1"):
        load("MNLI")
    del splits["test_matched"]
    splits["train"].names = None
    on_hub(monkeypatch, splits)
    with pytest.raises(ValueError, match=r"must have the split test_matched, got train, validation_matched"):
        load("MNLI")


def test_a_hub_that_cannot_be_reached_is_a_reason_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(FileNotFoundError, match=r"^RTE: no --data .*\(ConnectionError: no route to host\)"):
        load("RTE")


# --- Rows set apart ---


@given(st.lists(st.integers(0, 2), min_size=1, max_size=200), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_every_class_gives_the_same_share(labels: list[int], share: float) -> None:
    rows = [Row((str(place),), label) for place, label in enumerate(labels)]
    kept, held = glue.set_apart(rows, share, seed=3)
    assert sorted(kept + held, key=lambda row: int(row.texts[0])) == rows
    counts = Counter(labels)
    assert Counter(row.label for row in held) == Counter(
        {label: round(share * count) for label, count in counts.items() if round(share * count)}
    )
    assert (kept, held) == glue.set_apart(rows, share, seed=3)


def test_scores_are_held_out_evenly_over_their_range() -> None:
    rows = [Row((str(place),), 5.0 * (place / 1000) ** 2) for place in range(1000)]
    kept, held = glue.set_apart(rows)
    assert (len(kept), len(held)) == (900, 100)
    for start in range(0, 1000, 100):
        assert sum(start <= int(row.texts[0]) < start + 100 for row in held) == 10
    assert glue.set_apart(rows, seed=1)[1] != held
    with pytest.raises(ValueError, match="rows must have labels, and row 1 has none"):
        glue.set_apart([Row(("a",), 1), Row(("b",), None)])


# --- SQuAD ---

CONTEXT = "The tower was built in 1889 by Gustave Eiffel."


def asked(name: str, text: str, *answers: tuple[str, int], impossible: bool | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "id": name,
        "question": text,
        "answers": [{"text": answer, "answer_start": start} for answer, start in answers],
    }
    return made if impossible is None else {**made, "is_impossible": impossible}


def write_squad(path: Path, *questions: dict[str, Any], context: str = CONTEXT, title: str = "Tower") -> Path:
    paragraph = {"context": context, "qas": list(questions)}
    return write(path, json.dumps({"version": "x", "data": [{"title": title, "paragraphs": [paragraph]}]}))


@pytest.mark.parametrize("place", ["train-v1.1.json", "squad/train-v1.1.json.gz"])
def test_squad_is_read_in_its_original_layout(place: str, tmp_path: Path) -> None:
    path = write_squad(tmp_path / place, asked("q1", "When?", ("1889", 23)))
    dev = path.with_name(path.name.replace("train", "dev"))
    write_squad(dev, asked("q2", "Who?", ("Gustave Eiffel", 31), ("Eiffel", 39)))
    found = squad.load("1.1", tmp_path)
    assert found.train == [squad.Question("q1", "Tower", CONTEXT, "When?", ("1889",), (23,))]
    assert found.test[0].answers == ("Gustave Eiffel", "Eiffel")
    assert found.describe()["dev"] == {"SQuAD 1.1": 1}


def test_impossible_questions_belong_to_2_0_only(tmp_path: Path) -> None:
    questions = [
        asked("q1", "When?", ("1889", 23), impossible=False),
        asked("q2", "How high?", impossible=True),
    ]
    for part in ("train", "dev"):
        for version in ("1.1", "2.0"):
            write_squad(tmp_path / f"{part}-v{version}.json", *questions)
    assert [row.impossible for row in squad.load("2.0", tmp_path).train] == [False, True]
    with pytest.raises(ValueError, match=r"train-v1\.1\.json, question q2: it has no answer, and all"):
        squad.load("1.1", tmp_path)


def test_an_answer_two_characters_away_is_moved_and_one_further_away_is_refused(tmp_path: Path) -> None:
    for part in ("train", "dev"):
        write_squad(tmp_path / f"{part}-v1.1.json", asked("q1", "When?", ("1889", 21)))
    found = squad.load("1.1", tmp_path)
    assert found.train[0].starts == (23,)
    assert found.remarks[0].endswith(
        "train-v1.1.json: 1 answers were up to 2 characters away from their start"
    )
    write_squad(tmp_path / "dev-v1.1.json", asked("q1", "When?", ("1889", 20)))
    with pytest.raises(
        ValueError, match=r"dev-v1\.1\.json, question q1: the answer '1889' is not at char.* 20"
    ):
        squad.load("1.1", tmp_path)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (asked("q", "Why?", ("1889", -1)), "an answer must be a text and its start, got '1889' and -1"),
        (asked("q", "Why?", ("", 3)), "an answer must be a text and its start"),
        (asked("q", "Why?", ("1889", 23), impossible=True), "it is marked impossible, but has answers"),
        (asked("q", "Why?", impossible=False), "it is marked possible, but has no answer"),
        (
            {"id": "q", "question": "Why?"},
            r"must have SQuAD's layout .* after question q: KeyError 'answers'",
        ),
    ],
)
def test_errors_name_the_question(question: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        squad.read(write_squad(tmp_path / "some.json", question))
    with pytest.raises(ValueError, match="question q: ids must be texts, each of one question"):
        squad.read(write_squad(tmp_path / "two.json", *[asked("q", "When?", ("1889", 23))] * 2))


def test_what_is_no_json_or_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"some\.json must be JSON"):
        squad.read(write(tmp_path / "some.json", "{"))
    with pytest.raises(ValueError, match=r"version must be one of '1\.1', '2\.0'; got '3'"):
        squad.load("3", tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"SQuAD 2\.0: train-v2\.0\.json and dev-v2\.0\.json not found"
    ):
        squad.load("2.0", tmp_path)


def test_squad_comes_from_the_hub_if_the_folder_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"id": "q1", "title": "Tower", "context": CONTEXT, "question": "When?"}
    possible = {**row, "answers": {"text": ["1889"], "answer_start": [23]}}
    impossible = {**row, "id": "q2", "answers": {"text": [], "answer_start": []}}
    calls = on_hub(monkeypatch, {"train": Column([possible]), "validation": Column([possible, impossible])})
    found = squad.load("2.0")
    assert calls == [("rajpurkar/squad_v2",)]
    assert found.train == [squad.Question("q1", "Tower", CONTEXT, "When?", ("1889",), (23,))]
    assert [row.impossible for row in found.test] == [False, True]
    with pytest.raises(ValueError, match=r"validation of rajpurkar/squad on the hub, question q2"):
        squad.load("1.1")


def test_the_subset_takes_what_the_test_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    articles, rows, test = (tmp_path / "squad" / name for name in squad.SUBSET)
    tower, bridge, river = (f"The {name} is old. It is a {name}." for name in ("tower", "bridge", "river"))
    article = json.loads(
        write_squad(articles, asked("q1", "What?", ("old", 14)), context=bridge, title="Bridge").read_text()
    )
    paragraphs = [{"context": river, "qas": [asked("q2", "What?", ("old", 13))]}]
    article["data"].append({"title": "Tower", "paragraphs": paragraphs})
    write(articles, json.dumps(article))
    write_squad(test, asked("q3", "What?", ("old", 13)), context=tower, title="Tower")
    write(
        rows,
        json.dumps(
            [
                {"context": "A hill is high.", "question": "What is high?", "answer": "A hill"},
                {"context": "A hill is a hill.", "question": "What is it?", "answer": "hill"},  # two places
                {"context": tower, "question": "What is old?", "answer": "The tower"},  # tested
                {"context": river, "question": "What is old?", "answer": "The river"},  # in the other file
            ]
        ),
    )
    with pytest.raises(
        ValueError, match=r"known split, but has: questions of other articles 1 of 3,939; rows"
    ):
        squad.load_subset(tmp_path)
    counts = dict.fromkeys(squad.SUBSET_COUNTS, 1)
    monkeypatch.setattr(squad, "SUBSET_COUNTS", counts)
    found = squad.load_subset(tmp_path)
    assert [row.context for row in found.train] == [bridge, "A hill is high."]
    assert found.train[1].starts == (0,)
    assert [row.id for row in found.test] == ["q3"]
    rows.unlink()
    with pytest.raises(FileNotFoundError, match=r"routerlens_squad_dev\.json, .*not found in --data"):
        squad.load_subset(tmp_path)


# --- The real files ---


def real(name: str) -> Any:
    missing = REAL is None or not (Path(REAL) / name).is_dir()
    return pytest.mark.skipif(missing, reason=f"OVERT_DATA has no {name}/ to read")


@real("glue")
@pytest.mark.slow
def test_no_row_of_the_real_files_is_lost() -> None:
    assert REAL is not None
    sizes = {
        "CoLA": (8551, 1043, 1063),
        "SST-2": (67_349, 872, 1821),
        "MRPC": (3668, 408, 1725),
        "STS-B": (5749, 1500, 1379),
    }
    for name, expected in sizes.items():
        splits = load(name, Path(REAL))
        assert (len(splits.train), len(splits.dev[name]), len(splits.test[name])) == expected
        assert TASKS[name].server_rows == {name: expected[2]}
    labelled = load("MRPC", Path(REAL)).test["MRPC"]
    folder = Path(REAL) / "glue"
    plain = [line.split("\t") for line in read_text(folder / "MRPC" / "test.tsv.gz").split("\n")[1:] if line]
    assert [row.texts for row in labelled] == [(cells[3].strip(), cells[4].strip()) for cells in plain]
    assert Counter(row.label for row in labelled) == {1: 1147, 0: 578}
    qnli = glue.read_rows(TASKS["QNLI"], read_text(folder / "QNLI" / "dev.tsv.gz"), "dev.tsv")
    assert len(qnli) == 5463
    assert len(load("AX", Path(REAL)).test["AX"]) == 1104
    places = glue.cola_out_of_domain(Path(REAL))
    assert len(places) == 516
    assert places == list(range(527, 1043)), "the out-of-domain file follows the in-domain one"


@real("squad")
@pytest.mark.slow
def test_the_split_of_the_real_subsets() -> None:
    assert REAL is not None
    found = squad.load_subset(Path(REAL))
    assert (len(found.train), len(found.test)) == (3939 + 3678, 1190)
    tested = {row.context for row in found.test}
    assert not any(row.context in tested for row in found.train)
    for row in found.train + found.test:
        for answer, start in zip(row.answers, row.starts, strict=True):
            assert row.context[start : start + len(answer)] == answer
