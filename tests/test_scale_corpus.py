"""Runs over a corpus, written as Parquet files: whole, resumed, on any engine the same."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="install the extra scale")

import overt  # noqa: E402
from data_sets import data_set  # noqa: E402
from overt.corpus import running  # noqa: E402
from overt.corpus.store import Store, check_same  # noqa: E402
from small_corpora import TEXTS, small_classifier  # noqa: E402

METHODS = ("raw", "rollout", "flow")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_classifier(tmp_path_factory.mktemp("classifier"))


def corpus(folder: Path, rows: int = 30) -> Path:
    """A corpus in which every seventh text is bad, and some are too long for the model."""
    path = folder / "corpus.jsonl"
    with open(path, "w") as file:
        for row in range(rows):
            text: Any = " ".join(TEXTS[(row + shift) % len(TEXTS)] for shift in range(row % 3 + 1))
            text = ["", None, 7][row // 7 % 3] if row % 7 == 6 else text
            file.write(json.dumps({"text": text, "label": row % 2, "name": f"é{row}"}) + "\n")
    return path


def digests(folder: Path) -> dict[str, str]:
    """Content of all files but the log, which alone may differ between runs."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("log.jsonl", ".lock")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def table_of(folder: Path) -> Any:
    store = Store(folder)
    return pa.concat_tables([store.read(number) for number in sorted(store.complete())])


def test_every_row_is_there_once_with_the_tracers_values(model: str, tmp_path: Path) -> None:
    path = corpus(tmp_path)
    done = running.run(path, model, tmp_path / "out", methods=METHODS, shard=8, batch=4, workers=1)
    assert (done.rows, done.traced, done.errors) == (30, 30, 4)
    rows = table_of(tmp_path / "out").to_pylist()
    bad = [row for number in range(4) for row in _errors(tmp_path / "out", number)]
    assert [row["row"] for row in rows] == [row for row in range(30) if row % 7 != 6]
    assert [(row["row"], row["error"]) for row in bad] == [
        (6, "text is empty"),
        (13, "text is missing"),
        (20, "text must be a string, got 7"),
        (27, "text is empty"),
    ]
    assert [row["name"] for row in bad] == ["é6", "é13", "é20", "é27"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    expected = overt.Tracer(model, methods=METHODS)({"text": [lines[row["row"]]["text"] for row in rows]})
    for place, row in enumerate(rows):
        assert {name: row[name] for name in ("text", "label", "name")} == lines[row["row"]]
        assert row["tokens"] == expected["tokens"][place]
        assert row["prediction"] == expected["prediction"][place]
        for name in METHODS:
            np.testing.assert_allclose(row[name], expected[name][place], atol=1e-6)
    assert {row["cut"] for row in rows} == {True, False}
    kinds = {field.name: str(field.type) for field in table_of(tmp_path / "out").schema}
    assert list(kinds) == [
        "row", "text", "label", "name", "tokens", "starts", "ends", "special", "cut", "query", "prediction",
        "probability", *METHODS,
    ]  # fmt: skip
    assert kinds["flow"] == "list<element: float>"


def _errors(folder: Path, shard: int) -> list[dict[str, Any]]:
    found = Store(folder).read_errors(shard)
    return [] if found is None else found.to_pylist()


def test_pandas_and_duckdb_read_it_without_overt(model: str, tmp_path: Path) -> None:
    duckdb, pandas = pytest.importorskip("duckdb"), pytest.importorskip("pandas")
    running.run(corpus(tmp_path), model, tmp_path / "out", shard=8, workers=1)
    frame = pandas.read_parquet(tmp_path / "out" / "data")
    assert len(frame) == 26
    counted = duckdb.sql(
        f"select count(*), sum(len(tokens)), sum(list_sum(raw)) from '{tmp_path}/out/data/*.parquet'"
    ).fetchall()[0]
    assert counted[0] == 26
    assert counted[1] == sum(map(len, frame["tokens"]))
    assert counted[2] == pytest.approx(26, abs=1e-4), "rows of attention sum to one"


def test_no_head_leaves_predictions_null_and_layers_nest(tmp_path: Path) -> None:
    from small_text import small_bert

    path = tmp_path / "a.txt"
    path.write_text("good film\nbad\n")
    running.run(path, small_bert(tmp_path / "bert"), tmp_path / "out", layers=None, workers=1)
    table = table_of(tmp_path / "out")
    assert table["prediction"].null_count == table["probability"].null_count == 2
    assert [len(layers) for layers in table["rollout"].to_pylist()] == [2, 2]
    assert Store(tmp_path / "out").manifest()["labels"] is None


@pytest.mark.parametrize("rows", [0, 8])
def test_empty_corpora_and_full_shards_are_complete(model: str, tmp_path: Path, rows: int) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,n\n" + "good film,1\n" * rows)
    running.run(path, model, tmp_path / "out", shard=4, workers=1)
    assert table_of(tmp_path / "out").num_rows == rows
    assert len(Store(tmp_path / "out").complete()) == max(1, rows // 4)


@pytest.mark.slow
def test_files_are_the_same_for_every_engine_and_number_of_workers(model: str, tmp_path: Path) -> None:
    path = corpus(tmp_path)
    pytest.importorskip("ray", reason="install the extra scale")
    for name, settings in {
        "one": {"workers": 1},
        "two": {"workers": 2},
        "ray": {"engine": "ray", "workers": 2},
    }.items():
        running.run(path, model, tmp_path / name, methods=METHODS, shard=4, batch=3, **settings)
    one = digests(tmp_path / "one")
    assert len(one) == 1 + 8 + 4
    assert digests(tmp_path / "two") == one
    assert digests(tmp_path / "ray") == one
    # and another batch size makes other bytes, so that the comparison could fail
    running.run(path, model, tmp_path / "other", methods=METHODS, shard=4, batch=1, workers=1)
    assert digests(tmp_path / "other")["manifest.json"] != one["manifest.json"]


def command(path: Path, model: str, out: Path, *more: str) -> list[str]:
    settings = ["--methods", "raw,rollout,flow", "--shard", "4", "--batch", "3", "--out", str(out)]
    return [sys.executable, "-m", "overt", "corpus", "run", str(path), "--model", model, *settings, *more]


@pytest.mark.slow
def test_a_killed_run_leaves_whole_files_and_is_resumed_with_nothing_lost_or_doubled(
    model: str, tmp_path: Path
) -> None:
    path, out = corpus(tmp_path, rows=800), tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
    process = subprocess.Popen(command(path, model, out, "--workers", "2"), env=environment)
    try:
        until = time.monotonic() + 120
        while len(list(out.glob("data/part-*.parquet"))) < 3 and time.monotonic() < until:
            assert process.poll() is None, "the run ended by itself"
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    time.sleep(1)  # its workers end, too
    complete = Store(out).complete()
    assert 3 <= len(complete) < 200
    for number in complete:
        assert Store(out).read(number).num_rows + len(_errors(out, number)) == 4
    kept = {name: digest for name, digest in digests(out).items() if name.startswith("data/part-")}
    (out / "data" / ".part-00199.parquet.1-aa.unfinished").write_bytes(b"PAR1 half")
    running.run(path, model, out, methods=METHODS, shard=4, batch=3, workers=1)
    after = digests(out)
    assert kept.items() <= after.items(), "what was complete is left as it was"
    running.run(path, model, tmp_path / "whole", methods=METHODS, shard=4, batch=3, workers=1)
    assert after == digests(tmp_path / "whole")
    rows = table_of(out)["row"].to_pylist()
    assert rows == [row for row in range(800) if row % 7 != 6]


def test_a_full_disk_leaves_no_half_written_shard(model: str, tmp_path: Path) -> None:
    path, out = corpus(tmp_path), tmp_path / "out"
    running.run(path, model, tmp_path / "whole", shard=15, workers=1)
    size = Store(tmp_path / "whole").part(1).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))  # as if the disk were full by then
    try:
        with pytest.raises(OSError, match=r"part-00000.parquet cannot be written: .*[Ff]ile too large"):
            running.run(path, model, out, shard=15, workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(out.glob("data/*"))
    assert not list(out.glob("data/.*"))
    running.run(path, model, out, shard=15, workers=1)
    assert digests(out) == digests(tmp_path / "whole")


def test_a_folder_made_with_something_else_is_refused(model: str, tmp_path: Path) -> None:
    path, out = corpus(tmp_path), tmp_path / "out"
    running.run(path, model, out, shard=15, workers=1)
    before = digests(out)
    other = small_classifier(tmp_path / Path(model).name, seed=1)
    with pytest.raises(ValueError, match=r"out was made with another model: hash was \"\w+"):
        running.run(path, other, out, shard=15, workers=1)
    with pytest.raises(
        ValueError, match=r"other settings: methods was \[\"raw\", \"rollout\", \"flow\"\], now \[\"raw\"\]"
    ):
        running.run(path, model, out, shard=15, workers=1, methods=("raw",))
    corpus(tmp_path, rows=31)
    with pytest.raises(ValueError, match=r"another input: rows was 30, now 31; choose another folder"):
        running.run(path, model, out, shard=15, workers=1)
    assert digests(out) == before


def test_settings_that_an_earlier_version_did_not_have_are_a_difference(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="made with other settings: new was null, now null"):
        check_same({"settings": {"a": 1}}, {"settings": {"a": 1, "new": None}}, tmp_path)


def test_columns_of_one_name_are_refused(model: str, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    table = pa.Table.from_arrays([pa.array(["good"]), pa.array([1]), pa.array([2])], names=["text", "x", "x"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet has several columns that are called x: rename them"):
        running.run(tmp_path / "a.parquet", model, tmp_path / "out", workers=1)


def test_files_with_other_names_are_no_parts(model: str, tmp_path: Path) -> None:
    running.run(corpus(tmp_path), model, tmp_path / "out", shard=15, workers=1, methods=["raw"])
    (tmp_path / "out" / "data" / "part-00000 copy.parquet").write_bytes(b"")
    assert len(overt.corpus.open(tmp_path / "out")) == 26


def test_two_runs_into_one_folder_are_refused(model: str, tmp_path: Path) -> None:
    with Store(tmp_path / "out").lock(), pytest.raises(BlockingIOError, match="another run is writing to"):
        running.run(corpus(tmp_path), model, tmp_path / "out", workers=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": "body"}, "has no column body; it has text, label, name: give --text"),
        ({"columns": ["rank"]}, "corpus.jsonl has no column rank; it has text, label, name"),
        ({"methods": ("blankout",)}, "methods must be one of .*; got 'blankout'"),
        ({"layers": 5}, "layers must lie in 0 to 1"),
        ({"engine": "dask"}, "engine must be one of 'local', 'ray'; got 'dask'"),
        ({"workers": 0}, "workers must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(
    model: str, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        running.run(corpus(tmp_path), model, tmp_path / "out", **{"workers": 1, **arguments})
    assert not (tmp_path / "out").exists()


def test_a_column_with_the_name_of_one_that_is_written_is_refused_with_advice(
    model: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,row\ngood,1\n")
    with pytest.raises(ValueError, match=r"the input's column row has the name .*: choose .* with --columns"):
        running.run(path, model, tmp_path / "out", workers=1)
    running.run(path, model, tmp_path / "out", workers=1, columns=[])
    assert table_of(tmp_path / "out").column_names[:3] == ["row", "text", "tokens"]


def test_parquet_files_and_data_sets_are_read_with_their_types(model: str, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    datasets = pytest.importorskip("datasets", reason="install the extra scale")
    lines = [json.loads(line) for line in corpus(tmp_path).read_text().splitlines()]
    texts = [line["text"] if isinstance(line["text"], str) else None for line in lines]
    data = data_set(tmp_path, [{"text": t, "parts": [n, None], "x": {"y": n}} for n, t in enumerate(texts)])
    table = data.with_format("arrow")[:].combine_chunks()
    day = pa.array(range(30), type=pa.date32())
    (tmp_path / "files").mkdir()
    dated = table.append_column("day", day)
    pq.write_table(dated.slice(0, 13), tmp_path / "files" / "a.parquet", row_group_size=5)
    pq.write_table(dated.slice(13), tmp_path / "files" / "b.parquet", row_group_size=9)
    data.save_to_disk(tmp_path / "saved")
    good = [row for row in range(30) if texts[row]]
    for name, source, expected in (("parquet", "files", dated), ("datasets", "saved", table)):
        running.run(tmp_path / source, model, tmp_path / name, shard=4, batch=3, workers=1)
        found = table_of(tmp_path / name)
        assert found["row"].to_pylist() == good
        assert found.select(expected.column_names).to_pylist() == expected.take(good).to_pylist()
    left, right = table_of(tmp_path / "parquet"), table_of(tmp_path / "datasets")
    assert left.schema.field("day").type == pa.date32()
    assert left.drop_columns(["day"]).equals(right)
    datasets.DatasetDict(train=data).save_to_disk(tmp_path / "dict")
    with pytest.raises(ValueError, match=r"holds several data sets: give one of .*dict/train"):
        running.run(tmp_path / "dict", model, tmp_path / "other", workers=1)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"bad.parquet is not a Parquet file"):
        running.run(tmp_path / "bad.parquet", model, tmp_path / "other", workers=1)


def test_progress_does_not_count_the_time_before_the_first_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from overt.cli import corpus_run

    now = 0.0
    monkeypatch.setattr(corpus_run.time, "monotonic", lambda: now)
    shown = corpus_run.Shown()
    shown.begin(1000, 100)
    for now, rows in ((100.0, 5), (110.0, 200), (141.0, 100)):  # noqa: B007
        shown.advance(rows)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "100 of 1,000 rows are complete already",
        "305 of 1,000 rows, 20 a second, 35 s left",
        "405 of 1,000 rows, 7 a second, 81 s left",
    ]


def test_the_command_says_what_it_did_and_where_errors_are(model: str, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from overt.cli import app

    arguments = command(corpus(tmp_path), model, tmp_path / "out", "--workers", "1", "--columns", "label")[3:]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "30 rows in" in result.output
    assert "4 could not be traced, see" in result.output
    assert table_of(tmp_path / "out").column_names[1:4] == ["text", "label", "tokens"]
    again = CliRunner().invoke(app, arguments)
    assert "30 of 30 rows are complete already" in again.output
    events = [json.loads(line)["event"] for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert events == ["begin", *["shard"] * 8, "end", "begin", "end"]
