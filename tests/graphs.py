"""Graphs for tests: a real small one, made ones, and made ones in the files of the citation graphs."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from torch_geometric.data import Data
from torch_geometric.datasets import KarateClub, Planetoid
from torch_geometric.utils import stochastic_blockmodel_graph


def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No data of the user's, and nothing to download."""

    def download(_: Planetoid) -> None:
        raise OSError("no network\nin tests")

    monkeypatch.delenv("OVERT_DATA", raising=False)
    monkeypatch.setattr(Planetoid, "download", download)


def karate() -> Data:
    """Zachary's karate club: 34 nodes, 156 edges, 4 classes; it comes with PyG."""
    return KarateClub()[0]


def blocks(
    nodes: int = 120, classes: int = 3, features: int = 24, per_class: int = 10, seed: int = 0
) -> Data:
    """A stochastic block model with class-dependent words; most links stay within a class.

    Args:
        nodes: how many, in no order.
        classes: of nearly equal size.
        features: words, 0 or 1; each class has its own share of them.
        per_class: training nodes of each class; the rest is halved into validation and test.
        seed: of all of it. The global generator is left as it was.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = [nodes // classes + (c < nodes % classes) for c in range(classes)]
    odds = torch.full((classes, classes), 1 / nodes)
    odds.fill_diagonal_(min(1.0, 4 * classes / nodes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        edge_index = stochastic_blockmodel_graph(sizes, odds)
    order = torch.randperm(nodes, generator=generator)  # old place → new place
    y = torch.empty(nodes, dtype=torch.long)
    y[order] = torch.arange(classes).repeat_interleave(torch.tensor(sizes))
    own = torch.arange(features)[None] % classes == y[:, None]
    x = torch.rand(nodes, features, generator=generator) < torch.where(own, 0.4, 0.1)
    train = torch.zeros(nodes, dtype=torch.bool)
    for c in range(classes):
        train[(y == c).nonzero().flatten()[:per_class]] = True
    rest = (~train).nonzero().flatten()
    validation, test = torch.zeros_like(train), torch.zeros_like(train)
    validation[rest[: len(rest) // 2]] = True
    test[rest[len(rest) // 2 :]] = True
    return Data(
        x=x.float(), edge_index=order[edge_index], y=y, train_mask=train, val_mask=validation, test_mask=test
    )


class _AsPublished(pickle.Pickler):
    """Arrays and matrices as Python 2 pickled them, for the names and the kinds of their parts."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, np.ndarray):
            make, (kind, shape, _), (*state, content) = thing.__reduce__()
            return make, (kind, shape, "b"), (*state, content.decode("latin1"))
        if isinstance(thing, csr_matrix):
            state = {"format": "csr", "_shape": thing.shape, "maxprint": 50}
            state |= {"indptr": thing.indptr, "indices": thing.indices, "data": thing.data}
            return copyreg.__newobj__, (csr_matrix,), state
        return NotImplemented


def as_published(thing: Any) -> bytes:
    """A pickle with the names that the modules had when the citation graphs were published."""
    buffer = io.BytesIO()
    _AsPublished(buffer, protocol=2).dump(thing)
    content = buffer.getvalue()
    for new, old in (
        ("numpy._core.multiarray", "numpy.core.multiarray"),
        ("scipy.sparse._csr", "scipy.sparse.csr"),
    ):
        content = content.replace(f"c{new}\n".encode(), f"c{old}\n".encode())
    return content


def write_planetoid(folder: Path, name: str, seed: int = 0) -> Data:
    """Write a made graph as the eight raw files of a citation graph, and return what must be read from them.

    Nodes come in the published order: 20 of each of 3 classes to train on, the 500 to validate on (PyG will
    have it so), 40 in no part, 100 to test on, shuffled. As in the real files, Citeseer's lack some nodes
    among the last, which have then no words, no links and no label, and all repeat some links and have loops.

    Args:
        folder: made if it is not there.
        name: "cora", "citeseer" or "pubmed".
        seed: of the graph.
    """
    train, before, nodes = 60, 600, 700
    made = blocks(nodes, seed=seed, per_class=train // 3)
    order = torch.argsort(~made.train_mask, stable=True)  # new place → old place
    x, y = made.x[order], made.y[order]
    edge_index = torch.argsort(order)[made.edge_index]
    test = torch.randperm(nodes - before, generator=torch.Generator().manual_seed(seed)) + before
    if name == "citeseer":
        absent = torch.tensor([before + 7, before + 31])
        test = test[~torch.isin(test, absent)]
        edge_index = edge_index[:, ~torch.isin(edge_index, absent).any(dim=0)]
        x[absent], y[absent] = 0, 0
    graph: defaultdict[int, list[int]] = defaultdict(list, {node: [] for node in range(nodes)})
    for source, target in edge_index.T.tolist():
        graph[source].append(target)
    for node in range(0, before, 50):
        graph[node] += [node, *graph[node]]
    labels = torch.nn.functional.one_hot(y, 3).int()
    words = {"x": x[:train], "tx": x[test], "allx": x[:before]}
    kinds = {"y": labels[:train], "ty": labels[test], "ally": labels[:before]}
    folder.mkdir(parents=True, exist_ok=True)
    contents = {part: as_published(csr_matrix(rows.numpy())) for part, rows in words.items()}
    contents |= {part: as_published(rows.numpy()) for part, rows in kinds.items()}
    contents |= {"graph": as_published(graph), "test.index": "".join(f"{node}\n" for node in test).encode()}
    for part, content in contents.items():
        (folder / f"ind.{name}.{part}").write_bytes(content)
    place = torch.arange(nodes)
    return Data(
        x=x,
        edge_index=edge_index,
        y=y,
        train_mask=place < train,
        val_mask=(place >= train) & (place < train + 500),
        test_mask=torch.isin(place, test),
    )
