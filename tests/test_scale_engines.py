"""Tracers in `datasets` and Ray Data."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="install the extra scale")
datasets = pytest.importorskip("datasets", reason="install the extra scale")

import overt  # noqa: E402
from data_sets import data_set  # noqa: E402
from overt.corpus import running  # noqa: E402
from small_corpora import TEXTS, DyingOnce, small_classifier  # noqa: E402

METHODS = ("raw", "rollout", "flow")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_classifier(tmp_path_factory.mktemp("classifier"))


def check(rows: list[dict[str, Any]], model: str) -> None:
    """Rows are those of the tracer itself, in order."""
    expected = overt.Tracer(model, methods=METHODS)({"text": [row["text"] for row in rows]})
    for place, row in enumerate(rows):
        assert list(row["tokens"]) == list(expected["tokens"][place])
        assert row["prediction"] == expected["prediction"][place]
        for name in METHODS:
            np.testing.assert_allclose(row[name], expected[name][place], atol=1e-6)


@pytest.mark.slow
def test_datasets_map_takes_a_tracer(model: str, tmp_path: Path) -> None:
    tracer = overt.Tracer(model, methods=METHODS)
    data = data_set(tmp_path, [{"text": text, "label": n} for n, text in enumerate([*TEXTS, None, ""])])
    mapped = data.map(tracer, batched=True, batch_size=3, with_rank=True)
    assert list(mapped["label"]) == list(range(10))
    check(list(mapped)[:8], model)
    assert list(mapped["error"]) == [*[""] * 8, "text is missing", "text is empty"]
    features = datasets.Features({**data.features, **tracer.features})
    typed = data.map(tracer, batched=True, features=features)
    assert typed.features["raw"] == tracer.features["raw"]
    assert str(typed.features.arrow_schema.field("flow").type) == "list<item: float>"


def environment(folder: Path, **more: str) -> dict[str, str]:
    """That of a fresh process."""
    path = ":".join(filter(None, sys.path))
    return {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "HF_HOME": str(folder), **more}


MAP = """
import pickle, sys
from pathlib import Path
import overt
from data_sets import data_set
from small_corpora import TEXTS
folder = Path(sys.argv[2])
data = data_set(folder, [{"text": text, "label": n} for n, text in enumerate(TEXTS)])
tracer = overt.Tracer(sys.argv[1], methods=("raw", "rollout", "flow"))
mapped = data.map(tracer, batched=True, batch_size=3, with_rank=True, num_proc=2)
(folder / "rows").write_bytes(pickle.dumps(list(mapped)))
"""


@pytest.mark.slow
def test_datasets_map_takes_a_tracer_in_two_processes(model: str, tmp_path: Path) -> None:
    # They are forked, from one that has not computed with threads, as this one has.
    command = [sys.executable, "-c", MAP, model, str(tmp_path)]
    subprocess.run(command, env=environment(tmp_path), check=True, capture_output=True, timeout=300)
    rows = pickle.loads((tmp_path / "rows").read_bytes())
    assert [row["label"] for row in rows] == list(range(8))
    check(rows, model)


HASH = """
import sys, overt
from datasets.fingerprint import Hasher
tracer = overt.Tracer(sys.argv[1], methods=("raw", "flow"), columns={"label": "int64", "b": "string"})
before = Hasher.hash(tracer)
tracer({"text": ["good film"], "label": [1], "b": [""]})
print(before, Hasher.hash(tracer))
"""


@pytest.mark.slow
def test_the_hash_of_a_tracer_is_the_same_in_every_process_and_depends_on_its_settings(
    model: str, tmp_path: Path
) -> None:
    found = []
    for seed in ("1", "2"):
        path = environment(tmp_path, PYTHONHASHSEED=seed)
        command = [sys.executable, "-c", HASH, model]
        found += subprocess.run(command, env=path, check=True, capture_output=True, text=True).stdout.split()
    assert len(found) == 4
    assert len(set(found)) == 1
    from datasets.fingerprint import Hasher

    hashes = {Hasher.hash(overt.Tracer(model, queries=queries)) for queries in (None, "cls", 0)}
    hashes.add(Hasher.hash(overt.Tracer(small_classifier(tmp_path / "other", seed=1))))
    assert len(hashes) == 4, "other settings, and another model at another path"


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A local Ray with two workers."""
    ray = pytest.importorskip("ray", reason="install the extra scale")
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    found = {"env_vars": {"PYTHONPATH": paths}}  # workers import what these tests share
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, runtime_env=found)
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, of its settings
def test_ray_data_maps_batches_with_the_class(model: str, ray: Any) -> None:
    data = ray.data.from_items([{"text": text, "label": label} for label, text in enumerate(TEXTS * 3)])
    settings = {"model": model, "methods": METHODS}
    mapped = data.map_batches(
        overt.Tracer,
        fn_constructor_kwargs=settings,
        compute=ray.data.ActorPoolStrategy(size=2),
        batch_size=5,
    )
    rows = sorted(mapped.take_all(), key=lambda row: row["label"])
    assert [row["label"] for row in rows] == list(range(24))
    check(rows, model)


@pytest.mark.slow
def test_a_worker_that_ray_loses_is_replaced(tmp_path: Path, ray: Any) -> None:
    assert ray.is_initialized()
    job: Any = DyingOnce(tmp_path / "died")
    told: list[int] = []
    done = dict(running._on_ray(job, [0, 1, 2, 3], 2, told.append))
    assert done == {number: {"rows": number} for number in range(4)}
    assert sorted(told) == [0, 1, 2, 3]
    with pytest.raises(OSError, match=r"Ray lost shard 1 3 times .*the same command resumes"):
        dict(running._on_ray(DyingOnce(tmp_path / "died", always=True), [0, 1, 2], 2, told.append))


@pytest.mark.slow
def test_workers_that_the_cluster_has_no_room_for_are_not_waited_for(tmp_path: Path, ray: Any) -> None:
    assert ray.cluster_resources()["CPU"] == 3
    job: Any = DyingOnce(tmp_path / "died")
    done: dict[int, Any] = {}
    work = threading.Thread(
        target=lambda: done.update(running._on_ray(job, list(range(8)), 6, lambda _: None)), daemon=True
    )
    work.start()
    work.join(120)
    assert not work.is_alive(), "it waits for workers that cannot start"
    assert done == {number: {"rows": number} for number in range(8)}


def test_a_pickled_tracer_is_small(model: str) -> None:
    import dill

    tracer = overt.Tracer(model)
    tracer({"text": TEXTS[:1]})
    assert len(pickle.dumps(tracer)) < 1000
    assert len(dill.dumps(tracer)) < 1000
