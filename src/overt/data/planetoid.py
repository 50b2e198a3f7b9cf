"""Citation graphs of Sen et al. 2008 in the split of Yang et al. 2016 ("Planetoid"): Cora, Citeseer, Pubmed.

PyG's `Planetoid` reads the eight raw files as published, ind.NAME.x … ind.NAME.test.index, from a folder, or
else downloads them. Seven of the eight are pickles, which can run arbitrary code when they are opened. They
are therefore read as data first (`overt.data.pickles`); PyG opens copies written from what was read.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import shutil
import tempfile
import warnings
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overt._extras import need
from overt.data import pickles
from overt.data.files import data_folder
from overt.data.pickles import ARRAYS, Array, Names, Pickled, expect, named

# Our name → the name of PyG's folder.
NAMES = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")


@dataclass(frozen=True, eq=False)
class Citations:
    """Documents, their citations, and the split into training, validation and test nodes.

    Fan et al. 2020 (Table 6) count 5429 links in Cora and 4732 in Citeseer, half the entries of the raw
    lists; PyG drops repeated links and self-loops, which leaves 5278 and 4552, and `edge_index` has twice as
    many columns, 10556 and 9104.

    Attributes:
        name: cora, citeseer or pubmed.
        x: (nodes, features) float32; each row sums to one, as in GAT, or is zero if it has no words.
        edge_index: (2, edges) int64, both directions of each link, without self-loops.
        y: (nodes,) int64 classes. The 15 nodes of Citeseer without a label have class 0 and are in no part.
        train: (nodes,) bool.
        validation: (nodes,) bool.
        test: (nodes,) bool.
        classes: number of classes.
        sha256: hash of the eight raw files together.
    """

    name: str
    x: Tensor
    edge_index: Tensor
    y: Tensor
    train: Tensor
    validation: Tensor
    test: Tensor
    classes: int
    sha256: str

    def describe(self) -> dict[str, Any]:
        """Sizes of the graph and its split, for the result file."""
        nodes, features = self.x.shape
        pairs = torch.unique(self.edge_index.sort(dim=0).values, dim=1)
        linked = torch.zeros(nodes, dtype=torch.bool)
        linked[self.edge_index.flatten()] = True
        return {
            "name": self.name,
            "nodes": nodes,
            "edges": self.edge_index.shape[1],
            "undirected edges": pairs.shape[1],
            "isolated nodes": int((~linked).sum()),
            "features": features,
            "classes": self.classes,
            "train": int(self.train.sum()),
            "validation": int(self.validation.sum()),
            "test": int(self.test.sum()),
            "sha256": self.sha256,
        }


def load(name: str, data: Path | None, folder: Path) -> Citations:
    """Load a citation graph with its public split.

    Processed data are not cached, so changed raw files never meet old tensors.

    Args:
        name: "cora", "citeseer" or "pubmed".
        data: folder with the raw files (by default OVERT_DATA): directly in it, in planetoid/, or in
            Cora/raw/ of either, as PyG lays them out. It is never written to.
        folder: folder to write to; its planetoid/ caches a download for the next call.

    Raises:
        FileNotFoundError: some raw files are missing, or all of them are and cannot be downloaded.
        ValueError: a raw file is not as published, or refers to a name that no published file uses.
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    need("torch_geometric", "graphs")
    data = data_folder(data)
    cache = folder / "planetoid" / NAMES[name] / "raw"
    source = None if data is None else _find(data, name)
    if source is None and not _missing(cache, name):
        source = cache
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".planetoid-", dir=folder) as stage:
        place = source or _download(name, Path(stage) / "download", data)
        raw = {file: (place / file).read_bytes() for file in _files(name)}
        _write_checked(name, raw, Path(stage) / NAMES[name] / "raw")
        graph, classes = _process(Path(stage), name)
        if source is None:
            _move_to_cache(place, cache)
    total = graph.x.sum(dim=1, keepdim=True)
    digests = [f"{file} {hashlib.sha256(content).hexdigest()}" for file, content in raw.items()]
    return Citations(
        name=name,
        x=graph.x / total.where(total != 0, 1),
        edge_index=graph.edge_index,
        y=graph.y,
        train=graph.train_mask,
        validation=graph.val_mask,
        test=graph.test_mask,
        classes=classes,
        sha256=hashlib.sha256("\n".join(digests).encode()).hexdigest(),
    )


def _files(name: str) -> list[str]:
    """The names of the eight raw files."""
    return [f"ind.{name}.{part}" for part in PARTS]


def _missing(place: Path, name: str) -> list[str]:
    """The raw files that a folder lacks."""
    return [file for file in _files(name) if not (place / file).is_file()]


def _find(data: Path, name: str) -> Path | None:
    """The folder under `data` that has the raw files; None if there are none."""
    places = []
    for base in (data, data / "planetoid"):
        inner = sorted(base.iterdir()) if base.is_dir() else []
        places += [base, *(path / "raw" for path in inner if path.name.lower() == name)]
    lacking = {place: _missing(place, name) for place in places}
    for place, missing in lacking.items():
        if not missing:
            return place
    for place, missing in lacking.items():
        if len(missing) < len(PARTS):
            raise FileNotFoundError(f"--data: {place} has raw files of {name}, but not {', '.join(missing)}")
    return None


def _download(name: str, into: Path, data: Path | None) -> Path:
    """Let PyG download the raw files under `into`, without opening them; return their folder."""
    planetoid = need("torch_geometric.datasets", "graphs").Planetoid
    source = planetoid.__new__(planetoid)  # its __init__ would open the pickles at once
    source.root, source.name, source.split = str(into), NAMES[name], "public"
    raw = Path(source.raw_dir)
    raw.mkdir(parents=True)
    why = ""
    try:
        source.download()
        if missing := _missing(raw, name):
            why = f"{missing[0]} is missing"
    except Exception as error:  # the network, its libraries or the server can fail in any way
        why = " ".join(f"{type(error).__name__}: {error}".split())
    if why:
        where = "no --data was given" if data is None else f"not found in --data {data}"
        raise FileNotFoundError(
            f"raw files of {name}: {where}, and PyG could not download them ({why}); "
            f"put ind.{name}.{{{','.join(PARTS)}}} into a folder and pass --data DIR"
        )
    return raw


def _move_to_cache(download: Path, cache: Path) -> None:
    """Move a complete, checked download to the cache; another run may be doing the same."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(cache, ignore_errors=True)
    with suppress(OSError):
        os.replace(download, cache)


def _process(stage: Path, name: str) -> tuple[Any, int]:
    """PyG's graph and its number of classes, from checked raw files."""
    planetoid = need("torch_geometric.datasets", "graphs").Planetoid
    try:
        # PyG adds a permanent warning filter, and reports its progress on stderr.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            dataset = planetoid(str(stage), NAMES[name])
        graph = dataset[0]
        nodes = graph.x.shape[0]
        if graph.y.shape[0] != nodes or int(graph.edge_index.max()) >= nodes:
            raise IndexError(f"labels or links refer to more than {nodes} nodes")
    except (IndexError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"the raw files of {name} do not fit together: {why}") from error
    return graph, int(dataset.num_classes)


class _Matrix(Pickled):
    """A scipy matrix in compressed-row format: its attributes are its state."""

    def read(self) -> Any:
        """The matrix, with checked indices."""
        from scipy import sparse  # type: ignore[import-untyped, unused-ignore]

        parts = tuple(expect(self.state[part], Array).read() for part in ("data", "indices", "indptr"))
        matrix = sparse.csr_matrix(parts, shape=self.state["_shape"])
        matrix.check_format(full_check=True)
        return matrix


def _table(*_: Any) -> dict[Any, Any]:
    """A dictionary instead of a defaultdict, whose factory is not needed."""
    return {}


# All names in the published files, and their harmless replacements.
_KNOWN: Names = {
    **ARRAYS,
    ("scipy.sparse.csr", "csr_matrix"): _Matrix,
    ("collections", "defaultdict"): _table,
    ("__builtin__", "list"): list,
}


def _write_checked(name: str, raw: dict[str, bytes], into: Path) -> None:
    """Read raw files as data only, and write copies for PyG that contain plain arrays and lists."""
    contents = {}
    for file, content in raw.items():
        part = file.split(".", 2)[2]
        with named(file):
            contents[part] = _part(part, content)
    # PyG would accept a list of test nodes that is too short, and assign words to the wrong nodes.
    rows = {part: contents[part].shape[0] for part in PARTS[:6]}
    test = contents["test.index"]
    rows |= {"length of test.index": len(set(test)), "first of test.index": min(test)}
    for first, second in (
        ("x", "y"),
        ("tx", "ty"),
        ("allx", "ally"),
        ("tx", "length of test.index"),
        ("allx", "first of test.index"),
    ):
        if rows[first] != rows[second]:
            why = f"{first} has {rows[first]} rows, {second} {rows[second]}"
            raise ValueError(f"the raw files of {name} do not fit together: {why}")
    into.mkdir(parents=True)
    for file, content in zip(raw, contents.values(), strict=True):
        if content is test:
            (into / file).write_text("".join(f"{node}\n" for node in test))
        else:
            (into / file).write_bytes(pickle.dumps(content))


def _part(part: str, content: bytes) -> Any:
    """The content of a raw file: a matrix, an array of numbers, lists of nodes or a list of nodes."""
    if part == "test.index":
        nodes = [_node(int(line)) for line in content.decode("ascii").split()]
        if not nodes:
            raise ValueError("no nodes")
        return nodes
    loaded = pickles.read(content, _KNOWN)
    if part == "graph":
        return {_node(node): [*map(_node, expect(to, list))] for node, to in expect(loaded, dict).items()}
    table = expect(loaded, _Matrix if part.endswith("x") else Array).read()
    if table.ndim != 2:
        raise TypeError(f"{table.ndim} dimensions instead of 2")
    return table


def _node(node: Any) -> int:
    """`node`, if it is the number of a node."""
    if type(node) is not int or node < 0:
        raise TypeError(f"{type(node).__name__} {str(node)[:20]!r} instead of a node")
    return node
