"""Citation graphs of Sen et al. 2008 in the split of Yang et al. 2016 ("Planetoid"): Cora, Citeseer, Pubmed.

Read by PyG's `Planetoid` from the eight raw files as published, ind.NAME.x … ind.NAME.test.index, of a
folder, or else downloaded by it. Seven of the eight are pickles, which can run anything when they are
opened. So they are read here first, by an unpickler that knows the few names of the published files and
builds nothing but arrays and lists; what PyG is given to open are copies that were written from these.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
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
from overt.data.files import data_folder

# Our name → the name that PyG's folders have.
NAMES = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")


@dataclass(frozen=True, eq=False)
class Citations:
    """Documents, what they cite, and which of them to train, choose and test on.

    Fan et al. 2020 (Table 6) count 5429 links in Cora and 4732 in Citeseer, half the entries of the raw
    lists; PyG drops repeated links and self-loops, so that 5278 and 4552 are left, and `edge_index` has twice
    as many columns, 10556 and 9104.

    Attributes:
        name: cora, citeseer or pubmed.
        x: (nodes, features) float32; each row sums to one, as in GAT, or is zero for want of words.
        edge_index: (2, edges) int64, both directions of each link, without self-loops.
        y: (nodes,) int64 classes. The 15 nodes of Citeseer that have no label are 0, and in no part.
        train: (nodes,) bool.
        validation: (nodes,) bool.
        test: (nodes,) bool.
        classes: number of classes.
        sha256: of the eight raw files together.
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
        """Sizes of the graph and its split, for a result's file."""
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
    """A citation graph with its public split.

    Nothing that was processed is kept, so that changed raw files cannot be met by old tensors.

    Args:
        name: "cora", "citeseer" or "pubmed".
        data: folder with the raw files (else OVERT_DATA): in itself, in planetoid/, or in Cora/raw/ of
            either, as PyG lays them out. It is only read from.
        folder: ours to write to; a download is kept in its planetoid/, for the next call.

    Raises:
        FileNotFoundError: some raw files are missing, or all are and they cannot be downloaded.
        ValueError: a raw file is not as published, or asks for a name that the published ones do not.
    """
    if name not in NAMES:
        raise ValueError(f"name {name!r} must be one of {', '.join(NAMES)}")
    need("torch_geometric", "graphs")
    data = data_folder(data)
    kept = folder / "planetoid" / NAMES[name] / "raw"
    found = None if data is None else _find(data, name)
    if found is None and not _missing(kept, name):
        found = kept
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".planetoid-", dir=folder) as stage:
        place = found or _download(name, Path(stage) / "download", data)
        raw = {file: (place / file).read_bytes() for file in _files(name)}
        _checked(name, raw, Path(stage) / NAMES[name] / "raw")
        graph, classes = _process(Path(stage), name)
        if found is None:
            _keep(place, kept)
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
    """The raw files that a folder has not."""
    return [file for file in _files(name) if not (place / file).is_file()]


def _find(data: Path, name: str) -> Path | None:
    """The folder, in the user's, that has the raw files; none if no place has any."""
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
            raise FileNotFoundError(f"--data: {place} has raw files of {name} but lacks {', '.join(missing)}")
    return None


def _download(name: str, into: Path, data: Path | None) -> Path:
    """The folder, in another, that PyG downloaded the raw files to; they are not opened yet."""
    planetoid = need("torch_geometric.datasets", "graphs").Planetoid
    source = planetoid.__new__(planetoid)  # its __init__ would open the pickles at once
    source.root, source.name, source.split = str(into), NAMES[name], "public"
    raw = Path(source.raw_dir)
    raw.mkdir(parents=True)
    why = ""
    try:
        source.download()
        if missing := _missing(raw, name):
            why = f"no {missing[0]} came"
    except Exception as error:  # whatever the network, its libraries or the server come up with
        why = " ".join(f"{type(error).__name__}: {error}".split())
    if why:
        where = "no --data was given" if data is None else f"--data {data} has none"
        raise FileNotFoundError(
            f"raw files of {name}: {where}, and PyG could not download them ({why}); "
            f"put ind.{name}.{{{','.join(PARTS)}}} into a folder and give it as --data DIR"
        )
    return raw


def _keep(found: Path, kept: Path) -> None:
    """Put a whole, checked download where the next call looks; another run may do the same meanwhile."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(kept, ignore_errors=True)
    with suppress(OSError):
        os.replace(found, kept)


def _process(stage: Path, name: str) -> tuple[Any, int]:
    """PyG's graph, and its number of classes, from checked raw files."""
    planetoid = need("torch_geometric.datasets", "graphs").Planetoid
    try:
        # PyG adds a filter to the warnings for good, and tells stderr that it processes.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            dataset = planetoid(str(stage), NAMES[name])
        graph = dataset[0]
        nodes = graph.x.shape[0]
        if graph.y.shape[0] != nodes or int(graph.edge_index.max()) >= nodes:
            raise IndexError(f"labels or links of more than {nodes} nodes")
    except (IndexError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"the raw files of {name} do not fit together: {why}") from error
    return graph, int(dataset.num_classes)


class _Told:
    """What a pickle tells of an object: the arguments it is made with and its state, kept as they are."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_Told):
    """A numpy array: state (version, shape, dtype, whether in Fortran's order, content)."""

    def read(self) -> Any:
        """The array, of plain numbers."""
        import numpy

        _, shape, dtype, fortran, content = self.state
        code, order = dtype.args[0], dtype.state[1]
        if not re.fullmatch("[biuf][1248]", code) or order not in ("<", ">", "=", "|"):
            raise TypeError(f"an array of {order}{code}, not of numbers")
        content = content.encode("latin1") if isinstance(content, str) else content
        return numpy.frombuffer(content, order + code).reshape(shape, order="F" if fortran else "C")


class _Dtype(_Told):
    """A numpy dtype: arguments (code, …) and state (version, byte order, …)."""


class _Matrix(_Told):
    """A scipy matrix in compressed rows: its attributes are its state."""

    def read(self) -> Any:
        """The matrix, its indices checked."""
        from scipy import sparse  # type: ignore[import-untyped, unused-ignore]

        parts = tuple(_expect(self.state[part], _Array).read() for part in ("data", "indices", "indptr"))
        matrix = sparse.csr_matrix(parts, shape=self.state["_shape"])
        matrix.check_format(full_check=True)
        return matrix


def _table(*_: Any) -> dict[Any, Any]:
    """A dictionary in the place of a defaultdict, whose factory is not needed."""
    return {}


# All the names that the published files ask for, and what they get: nothing that acts.
_KNOWN = {
    ("scipy.sparse.csr", "csr_matrix"): _Matrix,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("collections", "defaultdict"): _table,
    ("__builtin__", "list"): list,
}


class _ForeignError(Exception):
    """A name that no published file asks for."""


class _Unpickler(pickle.Unpickler):
    """Knows the names of the published files and refuses every other, before anything is imported."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise _ForeignError(f"{module}.{name}")
        return _KNOWN[module, name]


def _expect(thing: Any, kind: type[Any]) -> Any:
    """A thing of that kind."""
    if not isinstance(thing, kind):
        raise TypeError(f"a {type(thing).__name__} in the place of a {kind.__name__.lstrip('_').lower()}")
    return thing


def _checked(name: str, raw: dict[str, bytes], into: Path) -> None:
    """Read raw files as data only and write them anew for PyG: same content, nothing but arrays and lists."""
    whole = {}
    for file, content in raw.items():
        part = file.split(".", 2)[2]
        try:
            whole[part] = _part(part, content)
        except _ForeignError as error:
            raise ValueError(
                f"{file} asks for {error}, which no published file does; refused, since a pickle could run it"
            ) from None
        except Exception as error:  # a broken pickle can fail in any way
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"{file} must be a raw file as published, and cannot be read as one: {why}"
            ) from None
    # PyG would take a list of test nodes that is too short, and put words to wrong nodes.
    rows = {part: whole[part].shape[0] for part in PARTS[:6]}
    test = whole["test.index"]
    rows |= {"length of test.index": len(set(test)), "first of test.index": min(test)}
    for one, other in (
        ("x", "y"),
        ("tx", "ty"),
        ("allx", "ally"),
        ("tx", "length of test.index"),
        ("allx", "first of test.index"),
    ):
        if rows[one] != rows[other]:
            why = f"rows of {one} are {rows[one]}, {other} {rows[other]}"
            raise ValueError(f"the raw files of {name} do not fit together: {why}")
    into.mkdir(parents=True)
    for file, content in zip(raw, whole.values(), strict=True):
        if content is test:
            (into / file).write_text("".join(f"{node}\n" for node in test))
        else:
            (into / file).write_bytes(pickle.dumps(content))


def _part(part: str, content: bytes) -> Any:
    """What a raw file holds: a matrix or an array of numbers, lists of nodes, or a list of nodes."""
    if part == "test.index":
        nodes = [_node(int(line)) for line in content.decode("ascii").split()]
        if not nodes:
            raise ValueError("no nodes")
        return nodes
    told = _Unpickler(io.BytesIO(content), encoding="latin1").load()
    if part == "graph":
        return {_node(node): [*map(_node, _expect(to, list))] for node, to in _expect(told, dict).items()}
    table = _expect(told, _Matrix if part.endswith("x") else _Array).read()
    if table.ndim != 2:
        raise TypeError(f"{table.ndim} dimensions in the place of 2")
    return table


def _node(node: Any) -> int:
    """The number of a node."""
    if type(node) is not int or node < 0:
        raise TypeError(f"{type(node).__name__} {str(node)[:20]!r} in the place of a node")
    return node
