"""The citation graphs: found, checked before anything opens them, read as PyG reads them."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.datasets import Planetoid

from graphs import as_published, blocks, karate, without_network, write_planetoid
from overt.data.planetoid import NAMES, PARTS, load

REAL = os.environ.get("OVERT_DATA")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No data of the user's, and no network."""
    without_network(monkeypatch)


def links(edge_index: Tensor) -> list[tuple[int, int]]:
    return sorted((int(source), int(target)) for source, target in edge_index.T)


def downloads_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let PyG download from a folder; the names that it asked for are noted."""
    asked: list[str] = []

    def download(source: Planetoid) -> None:
        asked.append(source.name)
        for file in source.raw_file_names:
            shutil.copy(folder / file, source.raw_dir)

    monkeypatch.setattr(Planetoid, "download", download)
    return asked


class Runs:
    """Something that makes a file when its pickle is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"echo > '{self.path}'",)


@pytest.mark.parametrize("name", NAMES)
def test_the_graph_is_the_one_that_was_written(name: str, tmp_path: Path) -> None:
    truth = write_planetoid(tmp_path / "data", name)
    read = load(name, tmp_path / "data", tmp_path / "run")
    assert torch.equal(read.x > 0, truth.x > 0)
    assert torch.equal(read.y, truth.y)
    assert links(read.edge_index) == links(truth.edge_index), (
        "loops and repeated links are dropped, no others"
    )
    for ours, true in zip(
        (read.train, read.validation, read.test),
        (truth.train_mask, truth.val_mask, truth.test_mask),
        strict=True,
    ):
        assert torch.equal(ours, true)
    assert read.classes == 3


@pytest.mark.parametrize("name", NAMES)
def test_the_graph_is_the_one_that_pyg_reads_from_the_same_files(name: str, tmp_path: Path) -> None:
    raw = tmp_path / "pyg" / NAMES[name] / "raw"
    write_planetoid(raw, name)
    read = load(name, tmp_path / "pyg", tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old names of numpy's and scipy's modules
        theirs = Planetoid(str(tmp_path / "pyg"), NAMES[name])[0]
    assert torch.equal(read.edge_index, theirs.edge_index)
    assert torch.equal(read.y, theirs.y)
    assert torch.equal(read.x, theirs.x / theirs.x.sum(dim=1, keepdim=True).clamp_min(1))


@pytest.mark.parametrize(
    "place",
    [".", "planetoid", "CiteSeer/raw", "planetoid/CiteSeer/raw", "citeseer/raw", "planetoid/citeseer/raw"],
)
def test_raw_files_are_found_in_each_accepted_place(place: str, tmp_path: Path) -> None:
    write_planetoid(tmp_path / "data" / place, "citeseer")
    assert load("citeseer", tmp_path / "data", tmp_path / "run").x.shape == (700, 24)


def test_raw_files_are_found_through_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_planetoid(tmp_path / "data", "cora")
    monkeypatch.setenv("OVERT_DATA", str(tmp_path / "data"))
    assert load("cora", None, tmp_path / "run").name == "cora"


def test_a_place_with_all_files_is_preferred_to_one_with_some(tmp_path: Path) -> None:
    write_planetoid(tmp_path / "planetoid", "cora")
    (tmp_path / "ind.cora.x").write_bytes(b"")
    assert load("cora", tmp_path, tmp_path / "run").name == "cora"


def test_rows_sum_to_one_and_empty_rows_stay_zero(tmp_path: Path) -> None:
    truth = write_planetoid(tmp_path / "data", "citeseer")
    x = load("citeseer", tmp_path / "data", tmp_path / "run").x
    empty = truth.x.sum(dim=1) == 0
    assert x.dtype == torch.float32
    assert int(empty.sum()) >= 2
    assert torch.equal(x[empty], torch.zeros_like(x[empty]))
    torch.testing.assert_close(x[~empty].sum(dim=1), torch.ones(int((~empty).sum())))


def test_the_description_counts(tmp_path: Path) -> None:
    truth = write_planetoid(tmp_path / "data", "citeseer")
    described = load("citeseer", tmp_path / "data", tmp_path / "run").describe()
    assert len(described.pop("sha256")) == 64
    assert described == {
        "name": "citeseer",
        "nodes": 700,
        "edges": truth.edge_index.shape[1],
        "undirected edges": len({frozenset(link) for link in links(truth.edge_index)}),
        "isolated nodes": 700 - len(set(truth.edge_index.flatten().tolist())),
        "features": 24,
        "classes": 3,
        "train": 60,
        "validation": 500,
        "test": 98,
    }


def test_the_data_folder_may_be_read_only_and_the_other_is_left_clean(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_planetoid(data, "cora")
    before = {path: path.stat().st_mtime_ns for path in (data, *data.iterdir())}
    data.chmod(0o555)
    try:
        load("cora", data, tmp_path / "run")
    finally:
        data.chmod(0o755)
    assert {path: path.stat().st_mtime_ns for path in (data, *data.iterdir())} == before
    assert list((tmp_path / "run").iterdir()) == []


def test_changed_raw_files_are_read_anew(tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    write_planetoid(data, "cora")
    old = load("cora", data, run)
    again = load("cora", data, run)
    truth = write_planetoid(data, "cora", seed=1)
    new = load("cora", data, run)
    assert old.sha256 == again.sha256 != new.sha256
    assert torch.equal(new.x > 0, truth.x > 0)
    assert not torch.equal(new.x, old.x)


def test_neither_warnings_nor_random_numbers_are_touched(tmp_path: Path) -> None:
    write_planetoid(tmp_path / "data", "cora")
    filters, state = list(warnings.filters), torch.get_rng_state()
    load("cora", tmp_path / "data", tmp_path / "run")
    assert list(warnings.filters) == filters
    assert torch.equal(torch.get_rng_state(), state)


def test_missing_files_are_named(tmp_path: Path) -> None:
    write_planetoid(tmp_path / "planetoid", "cora")
    for part in ("tx", "graph"):
        (tmp_path / "planetoid" / f"ind.cora.{part}").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"^--data: .*planetoid has .*, but not ind.cora.tx, ind.cora.graph$"
    ):
        load("cora", tmp_path, tmp_path / "run")


@pytest.mark.parametrize("given", [True, False])
def test_nothing_there_and_no_network_says_what_to_do(given: bool, tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    write_planetoid(data, "cora")  # of another graph
    why = r"^raw files of pubmed: .*--data.*OSError: no network in tests.*ind\.pubmed\.\{x,tx,.*--data DIR$"
    with pytest.raises(FileNotFoundError, match=why) as caught:
        load("pubmed", data if given else None, run)
    assert "\n" not in str(caught.value)
    assert list(run.iterdir()) == []
    write_planetoid(data, "pubmed")
    assert load("pubmed", data, run).name == "pubmed", "the next call is none the worse"


@pytest.mark.parametrize("last", ["ind.cora.graph", "ind.cora.test.index"])
def test_a_download_that_breaks_off_leaves_nothing(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_planetoid(tmp_path / "server", "cora")

    def download(source: Planetoid) -> None:
        for file in source.raw_file_names:
            content = (tmp_path / "server" / file).read_bytes()
            (Path(source.raw_dir) / file).write_bytes(content[:5] if file == last else content)
            if file == last:
                raise ConnectionResetError("cut off")

    monkeypatch.setattr(Planetoid, "download", download)
    with pytest.raises(FileNotFoundError, match=r"could not download them \(ConnectionResetError: cut off\)"):
        load("cora", None, tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_download_without_error_must_bring_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Planetoid, "download", lambda _: None)
    with pytest.raises(FileNotFoundError, match=r"could not download them \(ind.cora.x is missing\)"):
        load("cora", None, tmp_path / "run")


def test_a_download_is_kept_for_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_planetoid(tmp_path / "server", "citeseer")
    asked = downloads_from(tmp_path / "server", monkeypatch)
    first, second = (load("citeseer", None, tmp_path / "run") for _ in range(2))
    assert asked == ["CiteSeer"]
    local = load("citeseer", tmp_path / "server", tmp_path / "other")
    assert first.sha256 == second.sha256 == local.sha256
    (tmp_path / "run" / "planetoid" / "CiteSeer" / "raw" / "ind.citeseer.x").unlink()
    assert load("citeseer", None, tmp_path / "run").sha256 == first.sha256
    assert asked == ["CiteSeer"] * 2, "a kept download that is not whole is fetched again"


@pytest.mark.parametrize("part", PARTS[:-1])
def test_a_pickle_that_asks_for_more_is_refused_and_not_run(part: str, tmp_path: Path) -> None:
    write_planetoid(tmp_path / "data", "cora")
    file, mark = tmp_path / "data" / f"ind.cora.{part}", tmp_path / "was run"
    file.write_bytes(as_published([Runs(mark)]))
    name = rf"{os.system.__module__}\.system"
    with pytest.raises(ValueError, match=rf"^ind\.cora\.{part} refers to {name}, .* refused.*$"):
        load("cora", tmp_path / "data", tmp_path / "run")
    assert not mark.exists()
    assert list((tmp_path / "run").iterdir()) == []


def test_the_pickle_of_that_test_does_run_where_it_is_trusted(tmp_path: Path) -> None:
    mark = tmp_path / "was run"
    pickle.loads(as_published([Runs(mark)]))
    assert mark.exists()


def test_a_download_is_checked_before_it_is_opened_or_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_planetoid(tmp_path / "server", "cora")
    mark = tmp_path / "was run"
    (tmp_path / "server" / "ind.cora.ally").write_bytes(as_published([Runs(mark)]))
    downloads_from(tmp_path / "server", monkeypatch)
    with pytest.raises(ValueError, match=r"^ind\.cora\.ally refers to"):
        load("cora", None, tmp_path / "run")
    assert not mark.exists()
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("part", "content"),
    [
        ("x", b"version https://git-lfs.github.com/spec/v1\n"),
        ("allx", b""),
        ("tx", as_published([1, 2])),
        ("ty", as_published({0: [1]})),
        ("graph", as_published({0: ["1"]})),
        ("graph", as_published({0: [-1]})),
        ("test.index", b"1\ntwo\n"),
        ("test.index", b""),
    ],
)
def test_a_file_of_another_kind_is_named_in_one_line(part: str, content: bytes, tmp_path: Path) -> None:
    write_planetoid(tmp_path / "data", "cora")
    (tmp_path / "data" / f"ind.cora.{part}").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^ind\.cora\.{part} must be a raw file as published.*$") as caught:
        load("cora", tmp_path / "data", tmp_path / "run")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "content"), [("graph", as_published({0: [700], 700: [0]})), ("test.index", b"600\n")]
)
def test_files_that_do_not_belong_together_are_refused(part: str, content: bytes, tmp_path: Path) -> None:
    write_planetoid(tmp_path / "data", "cora")
    (tmp_path / "data" / f"ind.cora.{part}").write_bytes(content)
    with pytest.raises(ValueError, match=r"^the raw files of cora do not fit together"):
        load("cora", tmp_path / "data", tmp_path / "run")


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^name must be one of cora, citeseer, pubmed, got 'Cora'$"):
        load("Cora", None, tmp_path)


@pytest.mark.skipif(
    REAL is None or not (Path(REAL) / "planetoid").is_dir(), reason="OVERT_DATA has no planetoid/ to read"
)
@pytest.mark.parametrize(
    ("name", "nodes", "features", "classes", "edges", "isolated"),
    [("cora", 2708, 1433, 7, 10556, 0), ("citeseer", 3327, 3703, 6, 9104, 48)],
)
def test_the_real_graphs_have_the_sizes_of_the_papers(
    name: str, nodes: int, features: int, classes: int, edges: int, isolated: int, tmp_path: Path
) -> None:
    assert REAL is not None
    described = load(name, Path(REAL), tmp_path).describe()
    assert [described[key] for key in ("nodes", "features", "classes")] == [nodes, features, classes]
    assert [described[key] for key in ("edges", "undirected edges")] == [edges, edges // 2]
    assert described["isolated nodes"] == isolated
    assert [described[key] for key in ("train", "validation", "test")] == [20 * classes, 500, 1000]


def test_the_made_graphs_of_the_tests_are_what_they_say() -> None:
    assert (karate().num_nodes, karate().num_edges) == (34, 156)
    state = torch.get_rng_state()
    made, again, other = blocks(), blocks(), blocks(seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(made.edge_index, again.edge_index)
    assert torch.equal(made.x, again.x)
    assert not torch.equal(made.x, other.x)
    assert links(made.edge_index) == links(made.edge_index.flip(0)), "undirected"
    source, target = made.edge_index
    assert float((made.y[source] == made.y[target]).float().mean()) > 0.6, "most links stay within a class"
    parts = torch.stack([made.train_mask, made.val_mask, made.test_mask])
    assert torch.equal(parts.sum(dim=0), torch.ones(120, dtype=torch.long))
    assert made.y[made.train_mask].bincount().tolist() == [10, 10, 10]
