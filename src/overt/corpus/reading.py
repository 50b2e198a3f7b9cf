"""Inputs of a run over a corpus: text, JSON lines, CSV, Parquet, and data sets of Hugging Face.

An input is read through once, to count its rows, to find the types of its columns and to compute a hash of
its content; then it is read by ranges of rows, never as a whole.
"""

from __future__ import annotations

import bisect
import csv
import hashlib
import json
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from overt._extras import need

SUFFIXES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
TEXT = "text"  # the column of lines of text
STRINGS = ("string", "large_string", "string_view")
BOM = b"\xef\xbb\xbf"
UTF_16 = b"\xff\xfe", b"\xfe\xff"  # their marks, which begin no text in UTF-8
INT64 = range(-(2**63), 2**63)
EXACT = 2**53  # whole numbers up to here are exact as floats
DEEPEST = 100  # brackets within brackets of a JSON value: far fewer than what Python can follow
TOO_DEEP = f"the line has more than {DEEPEST} brackets within brackets"
HUB = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+){1,2}")


@dataclass(eq=False)
class Rows:
    """A range of rows.

    Attributes:
        columns: name → one value per row, as a list or a pyarrow array.
        errors: place in the range → why the row could not be read.
    """

    columns: dict[str, Any]
    errors: dict[int, str] = field(default_factory=dict)

    def some(self, places: Sequence[int]) -> dict[str, Any]:
        """The columns at some places."""
        return {
            name: [values[place] for place in places]
            if isinstance(values, list)
            else values.take(np.array(places, dtype=np.int64))
            for name, values in self.columns.items()
        }


class Stamps:
    """Sizes and times of files, by which a change while they are read is noticed.

    Args:
        paths: of the files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self.seen = [self._stamp(path) for path in self.paths]

    @staticmethod
    def _stamp(path: Path) -> tuple[int, int]:
        found = path.stat()
        return found.st_size, int(found.st_mtime)  # whole seconds: file systems keep more or fewer digits

    def check(self, number: int) -> Path:
        """The path of a file that has not changed."""
        path = self.paths[number]
        if self._stamp(path) != self.seen[number]:
            raise ValueError(f"{path} has changed while it was read: choose another folder, and start again")
        return path


class Source(ABC):
    """An input.

    Attributes:
        names: of its files.
        rows: how many it has.
        hash: of its content.
        types: column → type, as `store` writes types.
        arrow: column → pyarrow type, where the input has types of its own.
    """

    names: list[str]
    rows: int
    hash: str
    types: dict[str, str]
    arrow: Mapping[str, Any] = {}

    @abstractmethod
    def read(self, start: int, stop: int) -> Rows:
        """The rows of a range."""


# Files of lines


@dataclass(frozen=True)
class _Form:
    """How records are read from a file: an iterator over (record, error) that takes lines.

    Attributes:
        records: lines → records with their errors; takes the column names, which the file's head may give.
        header: whether the first record has the names of columns.
    """

    records: Callable[[Iterator[str]], Iterator[tuple[Any, str]]]
    header: bool


def _without_end(line: str) -> str:
    return line.removesuffix("\n").removesuffix("\r")


def _text_records(lines: Iterator[str]) -> Iterator[tuple[Any, str]]:
    for line in lines:
        yield {TEXT: _without_end(line)}, ""


def _json_records(lines: Iterator[str]) -> Iterator[tuple[Any, str]]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError as error:
            yield {}, f"the line is not JSON: {error}" if line.strip() else "the line is empty"
            continue
        except RecursionError:
            yield {}, TOO_DEEP
            continue
        if isinstance(record, dict):
            yield record, ""
        else:
            yield {}, f"the line must be a JSON object, got {type(record).__name__}"


def _fields(lines: Iterator[str], **form: Any) -> Iterator[tuple[Any, str]]:
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(lines, strict=True, **form)  # with the ends of lines: fields may have some
    while True:
        try:
            yield next(reader), ""
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise ValueError("a quote is opened and never closed") from None
            yield [], f"the line is not CSV: {error}"


def _tab_separated(lines: Iterator[str]) -> Iterator[tuple[Any, str]]:
    for line in lines:
        yield _without_end(line).split("\t"), ""


FORMS = {
    ".txt": _Form(_text_records, header=False),
    ".jsonl": _Form(_json_records, header=False),
    ".csv": _Form(_fields, header=True),
    ".tsv": _Form(_tab_separated, header=True),
}


class _Lines:
    """Lines of a file from a place on, decoded, with their ends; `place` is where the next one starts."""

    def __init__(self, path: Path, place: int = 0, seen: Callable[[bytes], object] = lambda _: None) -> None:
        self.path, self.place, self.seen = path, place, seen

    def __iter__(self) -> Iterator[str]:
        with open(self.path, "rb") as file:
            file.seek(self.place)
            for line in file:
                self.seen(line)
                content = line.removeprefix(BOM) if self.place == 0 else line
                self.place += len(line)
                # Bytes that are not UTF-8 become lone surrogates, which are found later.
                yield content.decode("utf-8", "surrogateescape")


class LineSource(Source):
    """Files of text, JSON lines or CSV.

    Args:
        paths: of files of one form.
        every: number of rows after which the place in the files is kept, to start reading there.
        text: the column of texts, which holds strings, whatever they look like.
    """

    def __init__(self, paths: Sequence[Path], every: int, text: str = TEXT) -> None:
        self.paths, self.every, self.text = list(paths), every, text
        self.stamps = Stamps(paths)
        self.names = [path.name for path in paths]
        self.form = FORMS[paths[0].suffix.lower()]
        self.heads: list[list[str]] = []  # names of columns, per file
        self.files, self.places = array("q"), array("q")  # of every row whose number `every` divides
        self.types, self.rows = {}, 0
        digest, kinds = hashlib.sha256(), _Kinds(strings=self.form.header)
        for number, path in enumerate(self.paths):
            digest.update(f"{path.name}\n".encode())
            try:
                self._survey(number, path, digest.update, kinds)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        self.types = kinds.types()
        if self.form.header and text in self.types:
            self.types[text] = "string"
        self.hash = digest.hexdigest()

    def _survey(self, number: int, path: Path, seen: Callable[[bytes], object], kinds: _Kinds) -> None:
        with open(path, "rb") as file:
            if file.read(2) in UTF_16:
                raise ValueError("it is in UTF-16 or UTF-32: convert it to UTF-8")
        lines = _Lines(path, seen=seen)
        records = self.form.records(iter(lines))
        if self.form.header:
            head, error = next(records, ([], "it is empty: the first line must name the columns"))
            if error or len(set(head)) < len(head) or not all(head):
                raise ValueError(
                    error or f"the first line must name the columns, each differently, got {head}"
                )
            if self.heads and head != self.heads[0]:
                raise ValueError(f"its columns are {head}, and those of {self.names[0]} {self.heads[0]}")
            self.heads.append(head)
            for name in head:
                kinds.see(name, "")
        elif self.form is FORMS[".txt"]:
            kinds.see(TEXT, "")
        place = lines.place
        for record, error in records:
            if self.rows % self.every == 0:
                self.files.append(number)
                self.places.append(place)
            self.rows += 1
            place = lines.place
            values, error = self._named(record, error)
            if not error:
                for name, value in values.items():
                    kinds.see(name, value)

    def _named(self, record: Any, error: str) -> tuple[dict[str, Any], str]:
        """A record as column → value, and why it is none."""
        if not error and self.form.header:
            head = self.heads[0]
            if len(record) != len(head):
                return {}, f"the row has {len(record)} fields, and the header {len(head)}"
            record = dict(zip(head, record, strict=True))
        error = error or _fault(record)
        return ({}, error) if error else (record, "")

    def _records(self, start: int) -> Iterator[tuple[dict[str, Any], str]]:
        entry = start // self.every
        number, skipped = self.files[entry], start - entry * self.every
        for current in range(number, len(self.paths)):
            begins = self.places[entry] if current == number else 0
            records = self.form.records(iter(_Lines(self.stamps.check(current), begins)))
            if self.form.header and current != number:
                next(records, None)
            for record, error in records:
                if skipped:
                    skipped -= 1
                    continue
                yield self._named(record, error)

    def read(self, start: int, stop: int) -> Rows:
        """The rows of a range."""
        columns: dict[str, list[Any]] = {name: [] for name in self.types}
        errors = {}
        records = islice(self._records(start), stop - start) if start < stop else ()
        for place, (record, error) in enumerate(records):
            given = record.get(self.text)
            if not error and given is not None and not isinstance(given, str):
                error = f"{self.text} must be a string, got {json.dumps(given, ensure_ascii=False)[:40]}"
            if error:
                errors[place] = error
            for name, kind in self.types.items():
                columns[name].append(_converted(record.get(name), kind, numbers_as_text=self.form.header))
        return Rows(columns, errors)


def _fault(value: Any, depth: int = 0) -> str:
    """Why a value, or something in it, cannot be written; empty if it can."""
    if isinstance(value, str):
        whole = value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)
        return "" if whole else "the row is not in UTF-8"
    if not isinstance(value, dict | list):
        return ""
    if depth > DEEPEST:
        return TOO_DEEP
    inside = [*value, *value.values()] if isinstance(value, dict) else value
    return next(filter(None, (_fault(entry, depth + 1) for entry in inside)), "")


class _Kinds:
    """The type of each column that holds all its values.

    Args:
        strings: whether all values are strings, of which some may stand for numbers.
    """

    def __init__(self, strings: bool) -> None:
        self.strings = strings
        self.kinds: dict[str, set[str]] = {}

    def see(self, name: str, value: Any) -> None:
        """Take a value into account."""
        self.kinds.setdefault(name, set()).add(_kind_of_text(value) if self.strings else _kind(value))

    def types(self) -> dict[str, str]:
        """Column → type. A column of whole numbers and others is one of floats if all are exact as such."""
        found = {}
        for name, kinds in self.kinds.items():
            numbers = kinds - {"null"}
            if len(numbers) == 1:
                (kind,) = numbers
                found[name] = {"exact": "int64"}.get(kind, kind)
            elif numbers == {"exact", "int64"}:
                found[name] = "int64"
            else:
                found[name] = "double" if numbers == {"exact", "double"} else "string"
        return found


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "exact" if abs(value) <= EXACT else "int64" if value in INT64 else "string"
    return "double" if isinstance(value, float) else "string"


def _kind_of_text(text: str) -> str:
    """A number only where writing it gives the text again: 007 and 1.10 are no numbers."""
    if not text:
        return "null"
    first = text[1:2] if text[0] == "-" else text[0]
    if not first.isdigit() or len(text) > 32:
        return "string"
    for read, kind in ((int, "int64"), (float, "double")):
        try:
            value = read(text)
        except ValueError:
            continue
        if str(value) == text:
            return _kind(value) if kind == "int64" else kind
    return "string"


def _converted(value: Any, kind: str, numbers_as_text: bool) -> Any:
    """A value in its column's type; what is no string is written as JSON into a column of strings."""
    if value is None or (value == "" and kind != "string"):
        return None
    if kind == "string":
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if numbers_as_text:
        return int(value) if kind == "int64" else float(value)
    return float(value) if kind == "double" else value


# Parquet and data sets


class ParquetSource(Source):
    """Parquet files of one schema.

    Args:
        paths: of the files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        parquet = need("pyarrow.parquet", "scale")
        self.stamps, self.names = Stamps(paths), [path.name for path in paths]
        digest = hashlib.sha256()
        self.starts: list[int] = []  # of each row group
        self.groups: list[tuple[int, int]] = []  # file and number in it
        self.rows, schema = 0, None
        for number, path in enumerate(paths):
            digest.update(f"{path.name}\n".encode())
            update_from_file(digest, path)
            try:
                file = parquet.ParquetFile(path)
            except (OSError, ValueError) as error:
                raise ValueError(f"{path} is not a Parquet file: {str(error).splitlines()[0]}") from None
            with file:
                own = file.schema_arrow.remove_metadata()
                if schema is not None and not own.equals(schema):
                    raise ValueError(f"{path} has other columns than {self.names[0]}: {own.names}")
                schema = own
                for group in range(file.metadata.num_row_groups):
                    self.starts.append(self.rows)
                    self.groups.append((number, group))
                    self.rows += file.metadata.row_group(group).num_rows
        assert schema is not None
        if twice := {name for name in schema.names if schema.names.count(name) > 1}:
            raise ValueError(f"{paths[0]} has several columns that are called {min(twice)}: rename them")
        self.hash = digest.hexdigest()
        self.arrow = {field.name: field.type for field in schema}
        self.types = {name: str(kind) for name, kind in self.arrow.items()}
        self._held: tuple[int, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_held": None}

    def _group(self, number: int) -> Any:
        """A row group; shards are read in order, and several may be in one."""
        if self._held is None or self._held[0] != number:
            self._held = None
            file, group = self.groups[number]
            with need("pyarrow.parquet", "scale").ParquetFile(self.stamps.check(file)) as opened:
                self._held = number, opened.read_row_group(group)
        return self._held[1]

    def read(self, start: int, stop: int) -> Rows:
        """The rows of a range."""
        pa = need("pyarrow", "scale")
        parts = []
        number = max(0, bisect.bisect_right(self.starts, start) - 1)
        while number < len(self.starts) and self.starts[number] < stop:
            first = self.starts[number]
            whole = self._group(number)
            begin = max(start - first, 0)
            parts.append(whole.slice(begin, max(0, min(stop - first, whole.num_rows) - begin)))
            number += 1
        table = pa.concat_tables(parts) if parts else pa.schema(list(self.arrow.items())).empty_table()
        return _rows_of(table)


class DatasetSource(Source):
    """A data set of Hugging Face, saved in a folder or from the hub.

    Args:
        name: path of the folder, or the data set's name, for errors and the manifest.
        load: opens the data set, in each process anew.
    """

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.names, self._load, self._opened = [name], load, None
        digest = hashlib.sha256()
        opened = self._data()
        for file in opened.cache_files:
            update_from_file(digest, Path(file["filename"]))
        if (indices := opened._indices) is not None:
            digest.update(str(indices.column(0).to_pylist()).encode())
        self.hash, self.rows = digest.hexdigest(), len(opened)
        self.arrow = {field.name: field.type for field in opened.features.arrow_schema}
        self.types = {column: str(kind) for column, kind in self.arrow.items()}

    def _data(self) -> Any:
        if self._opened is None:
            self._opened = self._load()
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}

    def read(self, start: int, stop: int) -> Rows:
        """The rows of a range."""
        return _rows_of(self._data().with_format("arrow")[start:stop])


@dataclass(frozen=True)
class _FromDisk:
    folder: str

    def __call__(self) -> Any:
        datasets = need("datasets", "scale")
        found = datasets.load_from_disk(self.folder)
        if isinstance(found, datasets.DatasetDict):
            parts = ", ".join(str(Path(self.folder) / name) for name in found)
            raise ValueError(f"{self.folder} holds several data sets: give one of {parts}")
        return found


@dataclass(frozen=True)
class _FromHub:
    name: str

    def __call__(self) -> Any:
        datasets = need("datasets", "scale")
        repository, *config, split = self.name.split(":")
        try:
            return datasets.load_dataset(repository, *config, split=split)
        except Exception as error:  # the network, its libraries or the server can fail in any way
            why = " ".join(f"{type(error).__name__}: {error}".split())
        raise FileNotFoundError(
            f"{self.name} is no file or folder, and could not be read from the hub as NAME:SPLIT or "
            f"NAME:CONFIG:SPLIT ({why})"
        )


def _rows_of(table: Any) -> Rows:
    table = table.combine_chunks()
    columns = {}
    for name in table.column_names:
        column = table.column(name)
        columns[name] = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return Rows(columns)


def update_from_file(digest: Any, path: Path) -> None:
    """Add a file's content to a hash."""
    with open(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)


def open_source(name: str | Path, every: int, text: str = TEXT) -> Source:
    """Open an input and read through it once.

    Args:
        name: path of a file or folder; or a data set on the hub, as NAME:SPLIT or NAME:CONFIG:SPLIT.
        every: number of rows that are read at a time.
        text: the column of texts.
    """
    source = _opened(name, every, text)
    if not source.types and source.rows:  # JSON lines without a single key
        why = source.read(0, 1).errors.get(0, "the line has no keys")
        raise ValueError(f'{name}: line 1: {why}; each line must be a JSON object such as {{"{text}": "…"}}')
    if not source.types:
        raise ValueError(f"{name} has no texts")
    if text not in source.types:
        raise ValueError(f"{name} has no column {text}; it has {', '.join(source.types)}: give --text")
    if source.types[text] not in STRINGS:
        raise ValueError(f"column {text} of {name} must hold texts, and holds {source.types[text]}")
    return source


def _opened(name: str | Path, every: int, text: str) -> Source:
    path = Path(name)
    if path.is_dir():
        if any((path / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
            return DatasetSource(path.name, _FromDisk(str(path)))
        files = sorted(file for file in path.iterdir() if file.is_file() and file.suffix.lower() in SUFFIXES)
        kinds = sorted({file.suffix.lower() for file in files})
        if len(kinds) != 1:
            held = f"files of several forms ({', '.join(kinds)})" if kinds else "none of them"
            raise ValueError(
                f"{path} must hold files that end in one of {', '.join(SUFFIXES)}, or a data set that "
                f"save_to_disk wrote; it holds {held}"
            )
        return _of_files(files, every, text)
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise ValueError(f"{path} must end in one of {', '.join(SUFFIXES)}: {_advice(path)}")
        return _of_files([path], every, text)
    if HUB.fullmatch(str(name)):
        return DatasetSource(str(name), _FromHub(str(name)))
    raise FileNotFoundError(f"{name} does not exist; a data set on the hub is named as NAME:SPLIT")


def _of_files(paths: list[Path], every: int, text: str) -> Source:
    return ParquetSource(paths) if paths[0].suffix.lower() == ".parquet" else LineSource(paths, every, text)


def _advice(path: Path) -> str:
    if path.suffix in (".gz", ".zst", ".bz2", ".xz"):
        return "decompress it"
    return "a JSON file has one object per line, in .jsonl" if path.suffix == ".json" else "rename it"
