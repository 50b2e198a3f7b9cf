"""The folder of a run over a corpus, opened: its rows, filters, summaries, and single rows traced again."""

from __future__ import annotations

import dataclasses
import json
import operator
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from overt import _check
from overt._extras import need
from overt.corpus.store import LOG, Store
from overt.corpus.summary import Sentences, Summary, Summing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from overt.tracing.result import Trace

RIGHT, WRONG = "right", "wrong"
LABEL = "label"  # the name of the column of labels, unless another is given
SHOWN = 60  # characters of a value in an error

Test = Callable[[dict[str, Any]], Any]


def open(folder: str | Path) -> Corpus:
    """Open the folder of a run over a corpus.

    Args:
        folder: what `overt corpus run --out` wrote; of a run that has not finished, what is there.
    """
    return Corpus(folder)


class Corpus:
    """The rows of a run over a corpus, read part by part: memory does not depend on how many there are.

    `corpus[i]` is a row as a dictionary of plain values, `for row in corpus` goes through all of them, and
    `corpus.filter(…)` is a corpus with some of them. Rows are those of complete shards, without bad rows.

    Attributes:
        folder: its path.
        manifest: what it was made from and with.
        shards: numbers of the complete shards, of `manifest["shards"]`.
        columns: column → type.
        methods: names of the methods.
    """

    def __init__(self, folder: str | Path) -> None:
        need("pyarrow", "scale")
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{folder} must be a folder that overt corpus run made: there is none")
        self._store = Store(self.folder)
        self.manifest = self._store.manifest()
        try:
            self.columns: dict[str, str] = dict(self.manifest["schema"])
            self.methods: tuple[str, ...] = tuple(self.manifest["settings"]["methods"])
            self._planned = int(self.manifest["shards"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.folder}: its manifest lacks {error}: another program made it") from None
        self.shards = sorted(self._store.complete())
        self._equal: dict[str, Any] = {}
        self._tests: tuple[Test, ...] = ()
        self._counts: list[int] | None = None
        self._places: dict[int, NDArray[np.int64]] = {}
        self._last: tuple[int, Any] | None = None
        self._model: tuple[Any, Any] | None = None
        self._logged: str | None = None

    # --- what there is

    @property
    def complete(self) -> bool:
        """Whether the run finished."""
        return len(self.shards) == self._planned

    @property
    def filtered(self) -> bool:
        """Whether these are some of the rows."""
        return bool(self._equal or self._tests)

    @property
    def missing(self) -> str | None:
        """What an unfinished run lacks, in one line; None for a finished one."""
        if self.complete:
            return None
        return (
            f"incomplete: {len(self.shards):,} of {self._planned:,} shards are there, and these are shown; "
            "the same overt corpus run goes on with the others"
        )

    @property
    def text(self) -> str:
        """Name of the column with the texts."""
        return str(self.manifest["settings"]["text"])

    @property
    def carried(self) -> list[str]:
        """Names of the input's columns."""
        names = list(self.columns)
        return names[1 : names.index("tokens")]

    def __len__(self) -> int:
        return sum(self._rows_of_shards())

    def __repr__(self) -> str:
        state = "" if self.complete else f", {len(self.shards)} of {self._planned} shards"
        some = ", filtered" if self.filtered else ""
        return f"Corpus({str(self.folder)!r}, {len(self):,} rows, {', '.join(self.methods)}{state}{some})"

    def _rows_of_shards(self) -> list[int]:
        if self._counts is None:
            if self.filtered:
                self._counts = [len(self._places_in(shard)) for shard in self.shards]
            else:
                self._counts = [_count(self._store.part(shard)) for shard in self.shards]
        return self._counts

    def _read(self, shard: int, columns: Sequence[str] | None = None) -> Any:
        try:
            return self._store.read(shard, columns)
        except need("pyarrow", "scale").ArrowInvalid as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{self._store.part(shard)} is damaged: {reason}") from None

    def errors(self) -> Iterator[dict[str, Any]]:
        """The bad rows of complete shards, each with what is wrong with it in "error"."""
        for shard in self.shards:
            table = self._store.read_errors(shard)
            if table is not None:
                yield from table.to_pylist()

    def bad_rows(self) -> int:
        """How many rows are bad."""
        return sum(
            _count(path) for shard in self.shards if (path := self._store.errors_part(shard)).is_file()
        )

    # --- rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _, table in self.tables():
            for chunk in table.to_batches(max_chunksize=256):
                yield from chunk.to_pylist()

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            index = operator.index(index)
        except TypeError:
            raise TypeError(
                f"rows are selected by number, got {index!r}: filter(…) selects several"
            ) from None
        shard, place = self._place(index)
        if self._last is None or self._last[0] != shard:
            self._last = shard, self._read(shard)
        rows: list[dict[str, Any]] = self._last[1].slice(place, 1).to_pylist()
        return rows[0]

    def _place(self, index: int) -> tuple[int, int]:
        """Shard, and place in it, of the row with this number among the rows here."""
        counts = self._rows_of_shards()
        total = sum(counts)
        if not -total <= index < total:
            raise IndexError(f"the corpus holds {total:,} rows, got {index}")
        left = index % total
        for shard, count in zip(self.shards, counts, strict=True):
            if left < count:
                return shard, int(self._places_in(shard)[left]) if self.filtered else left
            left -= count
        raise AssertionError(index)

    def filter(self, *tests: Test, **equal: Any) -> Corpus:
        """The rows that pass, as a corpus: `corpus.filter(label=1)`.

        Args:
            tests: functions of a row as a dictionary, such as `lambda row: row["probability"] < 0.6`; each
                must return something true. They read all columns, which is slower than equality.
            equal: column → value that it must have; None for rows without a value.
        """
        for name in equal:
            self._check_column(name)
        for test in tests:
            if not callable(test):
                raise TypeError(f"a test must be a function of a row, got {test!r}")
        some = Corpus(self.folder)
        some.shards = list(self.shards)
        some._equal = {**self._equal, **equal}
        some._tests = (*self._tests, *tests)
        twice = [name for name in equal if name in self._equal and self._equal[name] != equal[name]]
        if twice:
            some._tests = (*some._tests, lambda _: False)
        some._model = self._model
        return some

    def _check_column(self, name: str) -> None:
        if name not in self.columns:
            raise ValueError(
                f"there is no column {name!r} in {self.folder}: it has {', '.join(self.columns)}"
            )

    def _passing(self, table: Any) -> NDArray[np.bool_]:
        """(row,), which rows of a table pass."""
        pa, pc = need("pyarrow", "scale"), need("pyarrow.compute", "scale")
        passing = np.ones(table.num_rows, dtype=bool)
        for name, value in self._equal.items():
            column = table[name]
            try:
                same = pc.is_null(column) if value is None else pc.equal(column, pa.scalar(value))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
                kind = self.columns[name]
                raise ValueError(f"column {name!r} holds {kind}, which {value!r} cannot equal") from None
            passing &= np.asarray(pc.fill_null(same, False), dtype=bool)
        if self._tests:
            rows = table.filter(pa.array(passing)).to_pylist()
            passed = [all(test(row) for test in self._tests) for row in rows]
            passing[np.flatnonzero(passing)] = np.array(passed, dtype=bool)
        return passing

    def _places_in(self, shard: int) -> NDArray[np.int64]:
        """Places in a shard of the rows that pass; 8 bytes for each are kept."""
        if shard not in self._places:
            columns = None if self._tests else list(self._equal)
            self._places[shard] = np.flatnonzero(self._passing(self._read(shard, columns)))
        return self._places[shard]

    def tables(self, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Any]]:
        """Number and rows of each shard, as a pyarrow table; rows that do not pass the filter are left out.

        Args:
            columns: names of those to read; by default all.
        """
        pa = need("pyarrow", "scale")
        for shard in self.shards:
            if not self.filtered:
                yield shard, self._read(shard, columns)
                continue
            wanted = None
            if columns is not None and not self._tests:
                wanted = list(dict.fromkeys([*columns, *self._equal]))
            table = self._read(shard, wanted)
            table = table.filter(pa.array(self._passing(table)))
            yield shard, table if columns is None else table.select(list(columns))

    # --- one row, traced again

    def to_trace(self, index: int, model: Any = None, **arguments: Any) -> Trace:
        """A row traced again, with all that a trace has: every layer, query and method.

        Args:
            index: of the row, as in `corpus[index]`.
            model: a folder or name, if the model is not where it was; by default the one that the manifest
                names. It is refused unless its hash is the manifest's. Loaded once.
            arguments: further arguments of `overt.trace`: heads, samples, mixing, ….
        """
        from overt.tracing.tracer import trace

        row = self[index]
        opened = self._open_model(model)
        tokenizer = _Cutting(opened.tokenizer, opened.length) if row["cut"] else opened.tokenizer
        return trace(opened.model, row[self.text], tokenizer=tokenizer, **arguments)

    def _open_model(self, model: Any) -> Any:
        """The run's model, loaded and checked once."""
        from overt.corpus.tracer import Tracer

        about, settings = self.manifest["model"], self.manifest["settings"]
        source = self._path_of_model() if model is None else model
        if self._model is not None and self._model[0] is source:
            return self._model[1]
        named = isinstance(source, str | os.PathLike)
        dtype = {"dtype": settings["dtype"]} if named else {}
        try:
            tracer = Tracer(source, self.methods, text=self.text, length=settings["length"], **dtype)
        except OSError as error:
            raise type(error)(f"{error}; model=… says where the run's model {about['name']} is now") from None
        found = tracer.model_hash()
        if found != about["hash"]:
            what = source if named else type(source).__name__
            raise ValueError(
                f"model {what} is not the one that {self.folder} was made with, {about['name']}: its hash is "
                f"{found[:12]}…, not {about['hash'][:12]}…"
            )
        self._model = source, tracer.open()
        return self._model[1]

    def _path_of_model(self) -> str:
        """Where the run found its model, by the log; else its name."""
        if self._logged is None:
            paths = [entry["model"] for entry in _entries(self.folder / LOG) if entry.get("model")]
            self._logged = str(paths[-1] if paths else self.manifest["model"]["name"])
        return self._logged

    # --- summaries

    def summary(
        self,
        by: str = "token",
        *,
        methods: Sequence[str] | None = None,
        layer: int = -1,
        label: str = LABEL,
        report: Callable[[int, int], None] | None = None,
    ) -> Summary:
        """What the model draws on, over all sentences: means with intervals over sentences.

        Args:
            by: "token"; "position"; "label", the values of the column of labels; "error", whether the
                prediction differs from the label; or the name of any other column, whose values group the
                sentences. Rows of groups are tokens within each group.
            methods: names; by default all that the run has.
            layer: which of the layers that the run kept; by default the last.
            label: name of the column with labels, for "label" and "error".
            report: called with the number of shards done and of all.
        """
        return self.summaries([by], methods=methods, layer=layer, label=label, report=report)[by]

    def summaries(
        self,
        by: Sequence[str],
        *,
        methods: Sequence[str] | None = None,
        layer: int = -1,
        label: str = LABEL,
        report: Callable[[int, int], None] | None = None,
    ) -> dict[str, Summary]:
        """Several summaries in one pass over the parts.

        Args:
            by: as for `summary`, each.
            methods: as for `summary`.
            layer: as for `summary`.
            label: as for `summary`.
            report: as for `summary`.
        """
        return self.summaries_but(by, (), methods=methods, layer=layer, label=label, report=report)[0]

    def summaries_but(
        self,
        by: Sequence[str],
        optional: Collection[str],
        *,
        methods: Sequence[str] | None = None,
        layer: int = -1,
        label: str = LABEL,
        report: Callable[[int, int], None] | None = None,
    ) -> tuple[dict[str, Summary], dict[str, str]]:
        """Several summaries without those that are refused on the way; and why these are.

        Args:
            by: as for `summary`, each.
            optional: which of them may be left out, as where a later row has a label that the model has not.
            methods: as for `summary`.
            layer: as for `summary`.
            label: as for `summary`.
            report: as for `summary`.
        """
        chosen = self.methods if methods is None else tuple(methods)
        for method in chosen:
            _check.one_of("methods", method, self.methods)
        refused: dict[str, str] = {}
        grouping = {each: self.grouping(each, label) for each in by}
        summing = {each: Summing(chosen, each) for each in by}
        columns = ["tokens", "special", "query", *chosen]
        columns += [name for group in grouping.values() if group is not None for name in group.columns]
        tables = self.tables(list(dict.fromkeys(columns)))
        for done, (shard, table) in enumerate(tables, start=1):
            if table.num_rows:
                flat = sentences_of(table, chosen, layer, str(self._store.part(shard)))
                for each, one in summing.items():
                    group = grouping[each]
                    if each in refused:
                        continue
                    try:
                        one.add(flat if group is None else _grouped(flat, group.values(table)))
                    except ValueError as error:
                        if each not in optional:
                            raise
                        refused[each] = str(error)
            if report is not None:
                report(done, len(self.shards))
        return {each: one.result() for each, one in summing.items() if each not in refused}, refused

    def grouping(self, by: str, label: str = LABEL) -> Grouping | None:
        """How `by` groups sentences; None for "token" and "position", which do not.

        Args:
            by: as for `summary`.
            label: name of the column with labels.
        """
        if by in ("token", "position"):
            return None
        if by == "error":
            return self._errors_of(label)
        name = label if by == "label" else by
        if by == "label" and name not in self.columns:
            raise ValueError(
                f"by={by!r} needs a column of labels, and there is no {name!r}: name it with --label "
                f"(label=…); columns: {', '.join(self.carried)}"
            )
        self._check_column(name)
        if self.columns[name].startswith(("list", "large_list", "fixed_size_list", "struct", "map")):
            raise ValueError(f"by must be a column of single values, {name!r} holds {self.columns[name]}")
        names = self.manifest.get("labels") if by == "label" else None
        return Grouping((name,), lambda table: [_named(one, names) for one in _given(table[name])])

    def _errors_of(self, label: str) -> Grouping:
        """Whether a prediction differs from the label."""
        if label not in self.columns:
            raise ValueError(
                f"by='error' needs a column of labels, and there is no {label!r}: name it with --label "
                f"(label=…); columns: {', '.join(self.carried)}"
            )
        names = self.manifest.get("labels")

        def right(prediction: str | None, truth: Any) -> bool:
            if prediction is None:
                raise ValueError(
                    "by='error' compares predictions with labels, and this model predicts nothing: it has no "
                    "classifier"
                )
            if names is None and not prediction.isdigit():
                raise ValueError(
                    "by='error' compares classes with labels, and this model predicts tokens or numbers, "
                    f"such as {prediction[:SHOWN]!r}"
                )
            # Classes without names are predicted by their numbers.
            named = str(truth) if names is None else _named(truth, names)
            if not (named.isdigit() if names is None else named in names):
                classes = "numbers from 0" if names is None else ", ".join(names)[:SHOWN]
                classes += ", or their numbers" if names is not None and not _are_numbers(names) else ""
                raise ValueError(
                    f"label {str(truth)[:SHOWN]!r} of column {label!r} is none of the model's: {classes}"
                )
            return bool(prediction == named)

        def values(table: Any) -> list[str | None]:
            pairs = zip(table["prediction"].to_pylist(), _given(table[label]), strict=True)
            return [
                None if truth is None else RIGHT if right(said, truth) else WRONG for said, truth in pairs
            ]

        return Grouping(("prediction", label), values)


class _Cutting:
    """A tokenizer that cuts texts as the run did."""

    def __init__(self, tokenizer: Any, length: int | None) -> None:
        self._tokenizer, self._length = tokenizer, length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *texts: Any, **options: Any) -> Any:
        from overt.corpus.models import cutting_the_end

        with cutting_the_end(self._tokenizer):
            return self._tokenizer(*texts, truncation=True, max_length=self._length, **options)


class Grouping:
    """What sentences are grouped by.

    Attributes:
        columns: that it reads.
        values: table → (row,), each row's group; None is a group, too: of rows without a value.
    """

    def __init__(self, columns: tuple[str, ...], values: Callable[[Any], list[Any]]) -> None:
        self.columns, self.values = columns, values


def _given(column: Any) -> list[Any]:
    """Values of a column, with None for NaN, which would be another group in each row."""
    return [None if value != value else value for value in column.to_pylist()]


def _named(label: Any, names: Sequence[str] | None) -> Any:
    """A label by the name that the model has for it, if it is one of these names or the number of one.

    Where names are numbers themselves, such as one to five stars, a number is a name: it may not mean the
    first class in one row and the second in another.
    """
    if names is None or label is None:
        return label
    number: int | None
    try:
        number = int(label) if int(label) == float(label) else None
    except (TypeError, ValueError, OverflowError):
        number = None
    for spelled in (str(label), str(number)):
        if spelled in names:
            return spelled
    if number is None or _are_numbers(names):
        return label
    return names[number] if 0 <= number < len(names) else label


def _are_numbers(names: Sequence[str]) -> bool:
    """Whether the name of some class could be the number of one."""
    return any(name.isdecimal() for name in names)


def _grouped(flat: Sentences, groups: list[Any]) -> Sentences:
    """The same sentences with their groups."""
    return dataclasses.replace(flat, groups=groups)


def sentences_of(table: Any, methods: Sequence[str], layer: int, source: str) -> Sentences:
    """A part's rows for a summary.

    Args:
        table: pyarrow table with the columns tokens, special, query and those of the methods.
        methods: their names.
        layer: which layer, of several that were kept.
        source: what to call the table in errors.
    """
    pa, pc = need("pyarrow", "scale"), need("pyarrow.compute", "scale")
    tokens = table["tokens"].combine_chunks()
    lengths = np.asarray(pc.list_value_length(tokens), dtype=np.int64)
    named = pc.dictionary_encode(tokens.flatten())
    special = np.asarray(table["special"].combine_chunks().flatten(), dtype=bool)
    rows = []
    for method in methods:
        column = table[method].combine_chunks()
        if pa.types.is_list(column.type.value_type):
            column = _layer(column, layer, method, pc)
        elif layer not in (-1, 0):
            raise ValueError(f"layer must be −1 or 0, as the run kept one layer, got {layer}")
        row = np.asarray(column.flatten(), dtype=np.float64)
        same = np.array_equal(np.asarray(pc.list_value_length(column), dtype=np.int64), lengths)
        if not same or len(special) != len(row):
            raise ValueError(f"{source} is damaged: {method} has another number of values than tokens")
        rows.append(row)
    return Sentences(
        names=named.dictionary.to_pylist(),
        codes=np.asarray(named.indices, dtype=np.int64),
        special=special,
        lengths=lengths,
        queries=np.asarray(table["query"], dtype=np.int64),
        values=np.stack(rows),
    )


def _entries(path: Path) -> list[dict[str, Any]]:
    """Lines of a log; those that a killed run left unfinished are skipped."""
    found = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            found += [entry] if isinstance(entry, dict) else []
    return found


def _count(path: Path) -> int:
    """Rows of a Parquet file, from its end alone."""
    pa, pq = need("pyarrow", "scale"), need("pyarrow.parquet", "scale")
    try:
        return int(pq.ParquetFile(path).metadata.num_rows)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is damaged: {str(error).splitlines()[0]}") from None


def _layer(column: Any, layer: int, method: str, pc: Any) -> Any:
    """One layer of a column with several."""
    counts = np.unique(np.asarray(pc.list_value_length(column)))
    count = int(counts.min())
    if not -count <= layer < count:
        raise ValueError(f"layer must be one of the {count} that {method} was kept for, got {layer}")
    return pc.list_element(column, layer % count)
