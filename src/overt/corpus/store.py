"""The folder that a run over a corpus writes: its columns, Parquet parts, errors, manifest and log.

This is the only module that knows the schema. Types of columns are words, such as "list<string>", until
pyarrow is needed, so that the rest works without it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from overt._extras import need

FORMAT = 1
ROW = "row"
# Columns after those of the input, before one for each method.
OUTPUTS = {
    "tokens": "list<string>",
    "starts": "list<int32>",
    "ends": "list<int32>",
    "special": "list<bool>",
    "cut": "bool",
    "query": "int32",
    "prediction": "string",
    "probability": "float",
}
ERROR = "error"
ONE_LAYER, LAYERS = "list<float>", "list<list<float>>"

MANIFEST, LOG, LOCK = "manifest.json", "log.jsonl", ".lock"
DATA, ERRORS = "data", "errors"
UNFINISHED = ".unfinished"  # ends the names of files that are being written

SPARK = {"int64": "BIGINT", "int32": "INT", "bool": "BOOLEAN", "string": "STRING", "float": "FLOAT"}
SPARK |= {"double": "DOUBLE"}


def output_types(methods: Iterable[str], layers: int | Sequence[int] | None) -> dict[str, str]:
    """Column → type, of what a model makes of a text.

    Args:
        methods: their names.
        layers: which layers are kept. With a single number, a method has one value per token; with several or
            None, which is all, it has a list of values for each layer.
    """
    return {**OUTPUTS, **dict.fromkeys(methods, ONE_LAYER if isinstance(layers, int) else LAYERS)}


def data_types(
    inputs: Mapping[str, str], methods: Iterable[str], layers: int | Sequence[int] | None
) -> dict[str, str]:
    """Column → type, of a part of the data."""
    outputs = output_types(methods, layers)
    if taken := [name for name in inputs if name in outputs or name in (ROW, ERROR)]:
        raise ValueError(
            f"the input's column {taken[0]} has the name of a column that is written: choose the columns to "
            "carry along with --columns (columns=…)"
        )
    return {ROW: "int64", **inputs, **outputs}


def error_types(inputs: Mapping[str, str]) -> dict[str, str]:
    """Column → type, of a part of the errors."""
    return {ROW: "int64", **inputs, ERROR: "string"}


def spark_schema(types: Mapping[str, str]) -> str:
    """Columns as Spark writes them: "row BIGINT, tokens ARRAY<STRING>, …"."""

    def spelled(kind: str) -> str:
        inner = re.fullmatch(r"list<(.*)>", kind)
        if not inner and kind not in SPARK:
            raise ValueError(f"types of columns must be {', '.join(SPARK)}, or list<…> of one, got {kind!r}")
        return f"ARRAY<{spelled(inner[1])}>" if inner else SPARK[kind]

    return ", ".join(f"`{name}` {spelled(kind)}" for name, kind in types.items())


def arrow_type(kind: str) -> Any:
    """The pyarrow type of a word such as "list<string>"."""
    pa = need("pyarrow", "scale")
    inner = re.fullmatch(r"list<(.*)>", kind)
    if inner:
        return pa.list_(arrow_type(inner[1]))
    return {"float": pa.float32(), "double": pa.float64(), "bool": pa.bool_()}.get(kind) or pa.type_for_alias(
        kind
    )


def arrow_schema(types: Mapping[str, str], given: Mapping[str, Any] | None = None) -> Any:
    """A pyarrow schema.

    Args:
        types: column → type.
        given: column → pyarrow type, of columns of the input that have types without a word here.
    """
    pa = need("pyarrow", "scale")
    return pa.schema([(name, (given or {}).get(name) or arrow_type(kind)) for name, kind in types.items()])


@contextmanager
def _lasting(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder, whose file is on the disk before it becomes `path`."""
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{UNFINISHED}")
    try:
        yield part
        _flush(part)
        os.replace(part, path)
        _flush(path.parent)
    except OSError as error:
        raise type(error)(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Store:
    """The folder of a run.

    Args:
        folder: its path; `begin` makes it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def part(self, shard: int) -> Path:
        """Path of a shard's data; if it is there, the shard is complete."""
        return self.folder / DATA / f"part-{shard:05d}.parquet"

    def errors_part(self, shard: int) -> Path:
        """Path of a shard's bad rows; not there if it has none."""
        return self.folder / ERRORS / f"part-{shard:05d}.parquet"

    def manifest(self) -> dict[str, Any]:
        """What the folder was made from and with."""
        path = self.folder / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(
                f"{self.folder} must be a folder that overt corpus run made: it has no {MANIFEST}"
            )
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} must be JSON: {error}") from None
        if not isinstance(read, dict) or read.get("format") != FORMAT:
            found = read.get("format") if isinstance(read, dict) else type(read).__name__
            raise ValueError(
                f"{path} must have format {FORMAT}, got {found}: another version of overt made it"
            )
        return read

    def begin(self, manifest: Mapping[str, Any]) -> set[int]:
        """Make the folder, or go on with one of the same manifest; the numbers of complete shards.

        Files that a killed run left unfinished are removed. The caller holds the `lock`.
        """
        path = self.folder / MANIFEST
        for folder in (self.folder / DATA, self.folder / ERRORS):
            folder.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            check_same(self.manifest(), manifest, self.folder)
        elif any(self.folder.glob(f"{DATA}/*.parquet")):
            raise FileExistsError(
                f"{self.folder} holds Parquet files but no {MANIFEST}: choose another folder"
            )
        for place in (self.folder, self.folder / DATA, self.folder / ERRORS):
            for left in place.glob(f".*{UNFINISHED}"):
                left.unlink(missing_ok=True)
        if not path.is_file():
            with _lasting(path) as part:
                part.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return self.complete()

    def complete(self) -> set[int]:
        """Numbers of the shards that are complete."""
        names = (path.name for path in (self.folder / DATA).glob("part-*.parquet"))
        return {int(found[1]) for name in names if (found := re.fullmatch(r"part-(\d+)\.parquet", name))}

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Refuse a second run into the folder while this one is at work; a killed run holds no lock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            import fcntl
        except ImportError:  # not on Windows
            yield
            return
        with open(self.folder / LOCK, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError(f"another run is writing to {self.folder}: wait for its end") from None
            yield

    def write(
        self, shard: int, data: Mapping[str, Sequence[Any]], errors: Mapping[str, Sequence[Any]], schema: Any
    ) -> None:
        """Write a shard's rows: first its errors, then its data, whose presence says that both are complete.

        Args:
            shard: its number.
            data: column → one value per good row.
            errors: column → one value per bad row; none to write no file.
            schema: pyarrow schema of the data; the errors' columns are those of it that they share.
        """
        pa = need("pyarrow", "scale")
        if errors and len(errors[ROW]):
            kinds = {field.name: field.type for field in schema}
            fields = pa.schema([(name, kinds.get(name, pa.string())) for name in errors])
            self._write_table(self.errors_part(shard), errors, fields)
        self._write_table(self.part(shard), data, schema)

    def _write_table(self, path: Path, columns: Mapping[str, Sequence[Any]], schema: Any) -> None:
        pa, pq = need("pyarrow", "scale"), need("pyarrow.parquet", "scale")
        arrays = [_array(columns[field.name], field.type) for field in schema]
        table = pa.Table.from_arrays(arrays, schema=schema)
        with _lasting(path) as part:
            pq.write_table(table, part, compression="zstd", use_dictionary=_repeated(schema))

    def read(self, shard: int, columns: Sequence[str] | None = None) -> Any:
        """A shard's data as a pyarrow table, all columns or some."""
        return need("pyarrow.parquet", "scale").ParquetFile(self.part(shard)).read(columns=columns)

    def read_errors(self, shard: int) -> Any | None:
        """A shard's bad rows as a pyarrow table; None if it has none."""
        path = self.errors_part(shard)
        return need("pyarrow.parquet", "scale").ParquetFile(path).read() if path.is_file() else None

    def log(self, event: str, **details: Any) -> None:
        """Add a line to the log: what happened, when, and on which machine."""
        import socket

        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = {"time": when, "host": socket.gethostname(), "event": event, **details}
        with open(self.folder / LOG, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _array(values: Any, kind: Any) -> Any:
    """Values as a pyarrow array; NaN in an array of numbers, which a tracer makes, is a missing one."""
    pa = need("pyarrow", "scale")
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    ragged = pa.types.is_list(kind) and not pa.types.is_nested(kind.value_type)
    if not ragged or not isinstance(values, np.ndarray) or not len(values):
        return pa.array(values, type=kind, from_pandas=isinstance(values, np.ndarray))
    # One array of all entries is made quickly, and so are the places where rows begin.
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    flat = np.concatenate(values) if isinstance(values[0], np.ndarray) else list(chain.from_iterable(values))
    return pa.ListArray.from_arrays(ends, pa.array(flat, type=kind.value_type), type=kind)


def _repeated(schema: Any) -> list[str]:
    """Columns whose values repeat: strings, as opposed to numbers; for them a dictionary saves room."""
    names = []
    for field in schema:
        kind, path = field.type, field.name
        while str(kind).startswith("list<"):
            kind, path = kind.value_type, f"{path}.list.element"
        if str(kind) in ("string", "large_string"):
            names.append(path)
    return names


def check_same(earlier: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Refuse to go on in a folder that was made from or with something else; the error says what differs."""
    for name in now:
        was, is_, key = earlier.get(name), now[name], name
        if was == is_:
            continue
        if isinstance(was, Mapping) and isinstance(is_, Mapping):
            key = next(key for key in {**was, **is_} if key not in was or was[key] != is_.get(key, ...))
            was, is_ = was.get(key), is_.get(key)
        what = f"other {name}" if name.endswith("s") else f"another {name}"
        raise ValueError(
            f"{folder} was made with {what}: {key} was {_short(was)}, now {_short(is_)}; "
            "choose another folder"
        )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
