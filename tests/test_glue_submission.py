"""The files of a submission to GLUE: names, headers, labels and counts that its server expects."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from overt.recipes.glue_submission import FILES, write

# What gluebenchmark.com expects: rows of each test set.
SERVER = {
    "CoLA": 1063,
    "SST-2": 1821,
    "MRPC": 1725,
    "STS-B": 1379,
    "QQP": 390965,
    "MNLI-m": 9796,
    "MNLI-mm": 9847,
    "QNLI": 5463,
    "RTE": 3000,
    "AX": 1104,
    "WNLI": 146,
}
FEW: dict[str, list[float]] = {
    "CoLA": [0, 1],
    "SST-2": [1, 0],
    "MRPC": [1, 1],
    "STS-B": [2.5, 5.2, -0.1],
    "QQP": [0, 1],
    "MNLI-m": [0, 1, 2],
    "MNLI-mm": [2],
    "QNLI": [0, 1],
    "RTE": [1, 0],
    "AX": [2, 1, 0],
}
COUNTS = {**{name: len(values) for name, values in FEW.items()}, "WNLI": 4}


def read(path: Path) -> dict[str, list[str]]:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name).decode().split("\n") for name in file.namelist()}


def test_files_have_the_servers_names_headers_and_labels(tmp_path: Path) -> None:
    remarks = write(tmp_path / "glue.zip", FEW, COUNTS)
    files = read(tmp_path / "glue.zip")
    assert files.keys() == {f"{name}.tsv" for name in SERVER}
    for name, lines in files.items():
        assert lines[0] == "index\tprediction", name
        assert [line.split("\t")[0] for line in lines[1:-1]] == [
            str(index) for index in range(COUNTS[name.removesuffix(".tsv")])
        ]
        assert lines[-1] == ""
    values = {name: [line.split("\t")[1] for line in lines[1:-1]] for name, lines in files.items()}
    assert values["CoLA.tsv"] == ["0", "1"]
    assert values["MNLI-m.tsv"] == ["entailment", "neutral", "contradiction"]
    assert values["AX.tsv"] == ["contradiction", "neutral", "entailment"]
    assert values["QNLI.tsv"] == ["entailment", "not_entailment"]
    assert values["RTE.tsv"] == ["not_entailment", "entailment"]
    assert values["WNLI.tsv"] == ["0"] * 4
    assert [float(value) for value in values["STS-B.tsv"]] == [2.5, 5.0, 0.0], "clipped to the scale"
    assert remarks == [
        "WNLI is the majority class, not_entailment, for every row",
        "AX is predicted by the model trained on MNLI",
    ]


def test_counts_are_the_servers(tmp_path: Path) -> None:
    assert {name: count for name, (_, count) in FILES.items()} == SERVER
    remarks = write(tmp_path / "glue.zip", {"RTE": [0] * 3000})
    files = read(tmp_path / "glue.zip")
    assert {name: len(lines) - 2 for name, lines in files.items()} == {"RTE.tsv": 3000, "WNLI.tsv": 146}
    assert remarks[-1].endswith("missing: CoLA, SST-2, MRPC, STS-B, QQP, MNLI-m, MNLI-mm, QNLI, AX")


def test_the_same_predictions_make_the_same_file(tmp_path: Path) -> None:
    for name in ("one.zip", "two.zip"):
        write(tmp_path / name, FEW, COUNTS)
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("RTE", [0, 1, 1], "RTE must have 3,000 test rows in a submission, got 3"),
        ("SNLI", [0], "predictions must be one of 'CoLA', .* got 'SNLI'"),
        ("WNLI", [0], "predictions must be one of .* got 'WNLI'"),
    ],
)
def test_what_the_server_would_refuse_is_refused(
    name: str, values: list[float], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "glue.zip", {name: values})
    assert list(tmp_path.iterdir()) == []


def test_wrong_labels_and_places_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="CoLA must have classes from 0 to 1, got 2"):
        write(tmp_path / "glue.zip", {"CoLA": [2]}, {"CoLA": 1})
    with pytest.raises(ValueError, match="STS-B must be finite, got nan"):
        write(tmp_path / "glue.zip", {"STS-B": [float("nan")]}, {"STS-B": 1})
    with pytest.raises(ValueError, match=r"must be a file that ends in \.zip"):
        write(tmp_path / "glue.tsv", {})
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        write(tmp_path / "nowhere" / "glue.zip", {})
    assert list(tmp_path.iterdir()) == []
