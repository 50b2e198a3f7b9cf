"""`run`: a corpus through a model, shard by shard, in several processes or on Ray."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from overt import _check
from overt._extras import need
from overt._version import __version__
from overt._workers import Tell, cores, side_by_side
from overt.corpus import plan, store
from overt.corpus.reading import Source, open_source
from overt.corpus.store import Store
from overt.corpus.tracer import Queries, Tracer

ENGINES = ("local", "ray")
VERSIONS = ("torch", "transformers", "tokenizers", "numpy", "pyarrow")
ATTEMPTS = 3  # of a shard on Ray, where machines may go away


class Progress(Protocol):
    """Is told how far a run is."""

    def begin(self, total: int, done: int) -> None:
        """The corpus has so many rows, of which an earlier run has done some."""

    def advance(self, rows: int) -> None:
        """So many rows more are done."""


class Silent:
    """Shows nothing."""

    def begin(self, total: int, done: int) -> None:
        """Ignore it."""

    def advance(self, rows: int) -> None:
        """Ignore it."""


@dataclass(frozen=True)
class Finished:
    """What a run did.

    Attributes:
        folder: what it wrote.
        rows: of the corpus.
        traced: rows that this run traced; the others were complete already.
        errors: rows of the corpus that could not be traced.
        seconds: how long the tracing took.
    """

    folder: Path
    rows: int
    traced: int
    errors: int
    seconds: float


@dataclass(eq=False)
class Job:
    """What each process needs to trace a shard.

    Attributes:
        source: the input.
        tracer: the model and its settings.
        folder: where shards are written.
        columns: of the input, to carry along.
        shards: row numbers of each.
        schema: pyarrow schema of the parts.
    """

    source: Source
    tracer: Tracer
    folder: str
    columns: list[str]
    shards: list[range]
    schema: Any

    def perform(self, number: int, tell: Tell) -> dict[str, Any]:
        """Trace a shard and write it; the numbers of its rows and errors."""
        shard, text = self.shards[number], self.tracer.text
        rows = self.source.read(shard.start, shard.stop)
        rows.columns = {name: rows.columns[name] for name in self.columns}
        given = rows.columns[text]
        texts = given if isinstance(given, list) else given.to_pylist()
        if len(texts) != len(shard):
            raise ValueError(
                f"{self.source.names[0]} has changed: rows {shard.start} to {shard.stop} are not there"
            )
        texts = [None if place in rows.errors else value for place, value in enumerate(texts)]
        made = self.tracer.rows(texts, rank=_rank(), tell=tell)
        errors = made.pop(store.ERROR).tolist()
        for place, error in rows.errors.items():
            errors[place] = error
        good = [place for place, error in enumerate(errors) if not error]
        bad = [place for place, error in enumerate(errors) if error]
        data = {store.ROW: [shard[place] for place in good], **rows.some(good)}
        data |= {name: values[good] for name, values in made.items()}
        wrong = {store.ROW: [shard[place] for place in bad], **rows.some(bad)}
        wrong[store.ERROR] = [errors[place] for place in bad]
        Store(self.folder).write(number, data, wrong, self.schema)
        return {"rows": len(shard), "errors": len(bad)}


def perform_shard(task: int, shared: Job, tell: Tell) -> dict[str, Any]:
    """Trace the shard of a number, in another process."""
    return shared.perform(task, tell)


def _rank() -> int | None:
    """Number of this process among a pool's, to choose among GPUs; None outside a pool."""
    import multiprocessing

    identity = multiprocessing.current_process()._identity
    return identity[0] - 1 if identity else None


def prepare_worker() -> None:
    """Compute with one thread: the same numbers everywhere, and processes that do not wait for each other."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """As `prepare_worker`, in the caller's own process, for a while."""
    threads, parallel = torch.get_num_threads(), os.environ.get("TOKENIZERS_PARALLELISM")
    prepare_worker()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if parallel is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = parallel


def run(
    input: str | Path,
    model: str | Path | nn.Module,
    out: str | Path,
    *,
    methods: Sequence[str] = ("raw", "rollout", "flow"),
    queries: Queries = None,
    layers: int | Sequence[int] | None = -1,
    text: str = "text",
    columns: Sequence[str] | None = None,
    batch: int = plan.BATCH,
    shard: int = plan.SHARD,
    length: int | None = None,
    tokenizer: Any = None,
    device: str | None = None,
    dtype: str | None = None,
    engine: str = "local",
    workers: int | None = None,
    progress: Progress | None = None,
) -> Finished:
    """Trace each text of a corpus, and write what its main token draws on as Parquet files.

    Shards that are in the folder already are left as they are, so that the same call goes on with an
    interrupted run. Files are the same for every engine and any number of workers.

    Args:
        input: a text (a row is a line), .jsonl, .csv, .tsv or .parquet file, a folder of such files, a folder
            that `datasets` saved, or a data set on the hub, as NAME:SPLIT or NAME:CONFIG:SPLIT.
        model: as for `Tracer`, and so are the following arguments.
        out: the folder to write.
        methods: names of methods that read maps.
        queries: whose row.
        layers: which layers.
        text: the column of texts.
        columns: the columns to carry along besides the texts, all by default.
        batch: most texts that the model reads at once.
        shard: number of rows of a file.
        length: most tokens of a text.
        tokenizer: for a model that is given as an object.
        device: "cpu" or "cuda".
        dtype: of the weights.
        engine: "local" for processes on this machine, "ray" for a Ray cluster (RAY_ADDRESS) or a local Ray.
        workers: number of processes; one per core by default.
        progress: is told how far the run is.
    """
    need("pyarrow", "scale")
    _check.one_of("engine", engine, ENGINES)
    _check.whole("shard", shard, 1)
    if workers is not None:
        _check.whole("workers", workers, 1)
    if engine == "ray":
        need("ray", "scale")
    options = {"batch": batch, "length": length, "tokenizer": tokenizer, "device": device, "dtype": dtype}
    tracer = Tracer(model, methods, queries, layers, text=text, **options)
    source = open_source(input, shard, text)
    carried = _carried(source, text, columns)
    types = store.data_types({name: source.types[name] for name in carried}, tracer.methods, tracer.layers)
    opened = tracer.open()  # what is wrong with the model is said before anything is written
    shards = plan.shards(source.rows, shard)
    weights = next(opened.model.parameters())
    name = Path(tracer.model).name if isinstance(tracer.model, str) else type(tracer.model).__name__
    settings = {
        "methods": list(tracer.methods),
        "queries": queries,
        "layers": list(tracer.layers) if isinstance(tracer.layers, tuple) else tracer.layers,
        "text": text,
        "columns": carried,
        "batch": batch,
        "shard": shard,
        "length": opened.length,
        "device": tracer.device,
        "dtype": str(weights.dtype).removeprefix("torch."),
    }
    versions = {"overt": __version__} | {package: importlib.metadata.version(package) for package in VERSIONS}
    manifest = {
        "format": store.FORMAT,
        "model": {"name": name, "hash": tracer.model_hash()},
        "settings": settings,
        "input": {"name": source.names, "rows": source.rows, "hash": source.hash},
        "shards": len(shards),
        "schema": types,
        "labels": _labels(opened),
        "versions": versions,
    }
    folder = Store(out)
    job = Job(source, tracer, str(out), carried, shards, store.arrow_schema(types, source.arrow))
    progress = Silent() if progress is None else progress
    with folder.lock():
        complete = folder.begin(manifest)
        left = [number for number in range(len(shards)) if number not in complete]
        todo = sum(len(shards[number]) for number in left)
        progress.begin(source.rows, source.rows - todo)
        count = _workers(engine, workers, len(left))
        where = tracer.model if isinstance(tracer.model, str) else None  # which the manifest does not say
        where = str(Path(where).absolute()) if where is not None and Path(where).exists() else where
        folder.log("begin", model=where, engine=engine, workers=count, rows=source.rows, left=todo)
        began = time.monotonic()
        try:
            for number, done in _engine(engine)(job, left, count, progress.advance):
                folder.log("shard", shard=number, **done)
        except BaseException as error:
            with suppress(OSError):  # the disk may be full
                folder.log("end", error=" ".join(f"{type(error).__name__}: {error}".split()))
            raise
        seconds = time.monotonic() - began
        errors = _count_errors(folder, len(shards))
        folder.log("end", seconds=round(seconds, 1), errors=errors)
    return Finished(folder.folder, source.rows, todo, errors, seconds)


def _labels(opened: Any) -> list[str] | None:
    """Names of the classes that are predicted; None where there are none, as in a regression."""
    classes = opened.predicts and opened.tried.link != "identity"
    return list(opened.tried.labels) or None if classes else None


def _carried(source: Source, text: str, columns: Sequence[str] | None) -> list[str]:
    """The columns to carry along, in the input's order."""
    for name in columns or ():
        if name not in source.types:
            raise ValueError(f"{source.names[0]} has no column {name}; it has {', '.join(source.types)}")
    return [name for name in source.types if columns is None or name in (text, *columns)]


def _count_errors(folder: Store, shards: int) -> int:
    parquet = need("pyarrow.parquet", "scale")
    paths = [folder.errors_part(number) for number in range(shards)]
    return sum(parquet.read_metadata(path).num_rows for path in paths if path.is_file())


Engine = Callable[[Job, list[int], int, Tell], Iterator[tuple[int, dict[str, Any]]]]


def _engine(name: str) -> Engine:
    return _on_ray if name == "ray" else _locally


def _workers(engine: str, workers: int | None, shards: int) -> int:
    if (
        workers is None
        and engine == "ray"
        and (os.environ.get("RAY_ADDRESS") or need("ray", "scale").is_initialized())
    ):
        workers = int(_ray_started(None).cluster_resources().get("CPU", 1))
    return max(1, min(cores() if workers is None else workers, shards))


def _locally(job: Job, numbers: list[int], workers: int, tell: Tell) -> Iterator[tuple[int, dict[str, Any]]]:
    """Shards in processes of this machine; in this one if one is enough."""
    if workers > 1:
        yield from side_by_side(numbers, perform_shard, job, workers, prepare_worker, tell)
        return
    with _one_thread():
        for number in numbers:
            yield number, job.perform(number, tell)


class RayWorker:
    """A process of Ray's that traces shards."""

    def __init__(self, job: Job) -> None:
        prepare_worker()
        self.job = job

    def ready(self) -> None:
        """Nothing: an answer says that the process has started."""

    def perform(self, number: int) -> dict[str, Any]:
        """Trace a shard."""
        return self.job.perform(number, lambda _: None)


def _ray_started(workers: int | None) -> Any:
    """Ray, connected to the cluster of RAY_ADDRESS, or started on this machine."""
    ray = need("ray", "scale")
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS")
        where = {"address": address} if address else {"address": "local", "num_cpus": workers}
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        ray.init(**where, include_dashboard=None if address else False, **quiet)
    return ray


def _on_ray(job: Job, numbers: list[int], workers: int, tell: Tell) -> Iterator[tuple[int, dict[str, Any]]]:
    """Shards in actors of Ray's, each of which loads the model once; a shard that is lost is done again."""
    already = need("ray", "scale").is_initialized()
    ray = _ray_started(workers)
    try:
        gpus = ray.cluster_resources().get("GPU", 0) / workers if job.tracer.device == "cuda" else 0
        shared, actors = ray.put(job), ray.remote(num_cpus=1, num_gpus=min(gpus, 1))(RayWorker)
        left, attempts = deque(numbers), Counter[int | None]()
        idle: list[Any] = []
        busy: dict[Any, tuple[Any, int | None]] = {}  # with None for what has not started

        def start() -> None:
            actor = actors.remote(shared)
            busy[actor.ready.remote()] = actor, None

        for _ in range(min(workers, len(numbers))):
            start()
        # Actors that the cluster has no room for never start: nothing waits for them.
        while left or any(number is not None for _, number in busy.values()):
            while idle and left:
                actor, shard = idle.pop(), left.popleft()
                busy[actor.perform.remote(shard)] = actor, shard
            (ready,), _ = ray.wait(list(busy), num_returns=1)
            actor, number = busy.pop(ready)
            try:
                done = ray.get(ready)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None  # as without Ray
            except ray.exceptions.RayError as error:
                attempts[number] += 1
                if attempts[number] == ATTEMPTS:
                    what = "a worker that was starting" if number is None else f"shard {number}"
                    raise OSError(
                        f"Ray lost {what} {ATTEMPTS} times ({type(error).__name__}); the same command "
                        "resumes with what is unfinished"
                    ) from None
                if number is not None:
                    left.appendleft(number)
                if not idle:
                    start()
                continue
            idle.append(actor)
            if number is not None:
                attempts[None] = 0
                tell(done["rows"])
                yield number, done
    finally:
        if not already:
            ray.shutdown()
