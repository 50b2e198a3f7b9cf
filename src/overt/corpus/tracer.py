"""`Tracer`: rows of traces as a function of a batch, for `datasets`, Ray Data, Spark and corpus runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from overt import _check
from overt._extras import need
from overt._modes import device_of, evaluating
from overt._predictions import linked
from overt._workers import Tell
from overt.corpus import plan, store
from overt.corpus.models import cutting_the_end, hash_of, hash_of_module, limit_of, open_named
from overt.tracing.inputs import Inputs, check_ids, is_pair, names_of, padding_id, tokenizer_of
from overt.tracing.methods.method import method_of
from overt.tracing.methods.method import methods as known_methods
from overt.tracing.options import numbers
from overt.tracing.pixels import attends_to_pixels
from overt.tracing.result import Trace, main_queries
from overt.tracing.tracer import trace, trace_batch

Queries = Literal["cls", "last"] | int | None
PROBE = "a b"
PART = "\ufffd"  # stands for bytes that are no character
KEPT = 2  # models that a process keeps
_PROCESS = os.getpid()  # another in a process that was forked, as by `datasets`
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(eq=False)
class _Opened:
    """A model that is ready to trace.

    Attributes:
        model: the model.
        tokenizer: of its texts.
        length: most tokens that it takes; None for no limit.
        tried: the trace of a short text.
        ids: its argument's name that takes token ids.
        takes: names of the arguments that it takes.
        predicts: whether it has an output for the text as a whole, or for the next token.
        words: token → name, of those that have been seen.
    """

    model: nn.Module
    tokenizer: Any
    length: int | None
    tried: Trace
    ids: str = "input_ids"
    takes: tuple[str, ...] = ()
    predicts: bool = False
    words: dict[int, str] = field(default_factory=dict)

    def name(self, ids: Sequence[int]) -> list[str]:
        """Names of tokens."""
        if unknown := {number for number in ids if number not in self.words}:
            known = names_of(self.tokenizer, sorted(unknown))
            self.words |= {number: self._different(number, known.get(number)) for number in unknown}
        return [self.words[number] for number in ids]

    def _different(self, number: int, name: str | None) -> str:
        """A name that no other token has: tokens that are parts of a character would all be called �."""
        if name is None:
            return str(number)
        return f"{PART}{self.tokenizer.convert_ids_to_tokens(number)}" if PART in name else name


# Path, hash, dtype, device and length → the model, loaded once however many copies of a tracer there are.
_opened: dict[tuple[Any, ...], _Opened] = {}


@dataclass(eq=False)
class _Text:
    """One text as the model reads it; lists have one entry per token."""

    ids: list[int]
    kinds: list[int] | None
    special: list[bool]
    offsets: Any
    cut: bool


class Tracer:
    """What each text's main token draws on, as columns: a function of a batch that other processes can run.

    It is pickled as its settings and the model's path; each process loads the model once, when it is first
    needed. A model given as an object is pickled with its weights.

        dataset.map(tracer, batched=True, with_rank=True)                                     # datasets
        data.map_batches(overt.Tracer, fn_constructor_kwargs={"model": …}, compute=…)         # Ray Data
        frame.mapInPandas(tracer.pandas, schema=tracer.schema)                                # Spark

    Called with a batch, a mapping of columns (lists or arrays), it returns the batch's columns and those that
    docs/corpus.md lists: `tokens`, `starts`, `ends`, `special`, `cut`, `query`, `prediction`, `probability`,
    one per method; and `error`, which is empty but for rows that cannot be traced.

    Args:
        model: folder of a model, its name on the hub, or the model itself.
        methods: names of methods that read maps.
        queries: whose row: "cls" for the first token, "last" for the last one, or a number, negative from the
            end; None for CLS in an encoder and the last token of a language model.
        layers: a layer, several, or None for all; negative numbers count from the top.
        text: the column of texts.
        columns: the columns to carry along, all by default. `schema` needs their types: {"label": "int64"}.
        batch: most texts that the model reads at once.
        length: most tokens of a text, of which the beginning is read; by default what the model takes.
        tokenizer: for a model that is given as an object; by default the one saved with its weights.
        device: "cpu" or "cuda"; by default a GPU if there is one, and of several the one of the `rank`. A
            model that is given as an object stays where it is.
        dtype: of the weights; by default as they are saved.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module,
        methods: Sequence[str] = ("raw", "rollout", "flow"),
        queries: Queries = None,
        layers: int | Sequence[int] | None = -1,
        *,
        text: str = "text",
        columns: Sequence[str] | Mapping[str, str] | None = None,
        batch: int = plan.BATCH,
        length: int | None = None,
        tokenizer: Any = None,
        device: str | None = None,
        dtype: str | None = None,
    ) -> None:
        self.methods = (methods,) if isinstance(methods, str) else tuple(methods)
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ValueError(f"methods must name one method or several different ones, got {methods!r}")
        for name in self.methods:
            method_of(name, known_methods("maps"), "methods")
        if not (queries in ("cls", "last", None) or _is_whole(queries)):
            raise ValueError(f'queries must be "cls", "last" or a whole number, got {queries!r}')
        if not (layers is None or _is_whole(layers)):
            listed = not isinstance(layers, str | int) and list(layers)
            if not listed or not all(_is_whole(layer) for layer in listed):
                raise ValueError(f"layers must be a whole number, several, or None for all, got {layers!r}")
            layers = tuple(map(int, listed))
        self.queries, self.layers = queries, layers
        _check.whole("batch", batch, 1)
        if length is not None:
            _check.whole("length", length, 1)
        if device is not None:
            _check.one_of("device", device, ("cpu", "cuda"))
        if dtype is not None:
            _check.one_of("dtype", dtype, DTYPES)
        self.text, self.batch, self.length, self.dtype = text, batch, length, dtype
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.columns = (
            dict(columns) if isinstance(columns, Mapping) else None if columns is None else tuple(columns)
        )
        store.data_types(dict.fromkeys([*(self.columns or ()), text], ""), self.methods, layers)
        self._own: _Opened | None = None  # of a model that is given as an object
        if isinstance(model, nn.Module):
            if dtype is not None or device is not None:
                raise ValueError("dtype and device are for a model that is given by its path: leave them out")
            self.model: str | nn.Module = model
            self.tokenizer = tokenizer_of(model, tokenizer)
            self.hash = ""
            self.device = next((p.device.type for p in model.parameters()), "cpu")
        else:
            if tokenizer is not None:
                raise ValueError("tokenizer is for a model that is given as an object: leave it out")
            self.model, self.tokenizer = os.fspath(model), None
            self.hash = hash_of(self.model)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_own": None}

    def __repr__(self) -> str:
        name = self.model if isinstance(self.model, str) else type(self.model).__name__
        return f"Tracer({name!r}, methods={self.methods}, queries={self.queries!r}, layers={self.layers!r})"

    @property
    def types(self) -> dict[str, str]:
        """Column → type, of what a text becomes, with `error`."""
        return {**store.output_types(self.methods, self.layers), store.ERROR: "string"}

    @property
    def schema(self) -> str:
        """The columns of `pandas` as Spark writes them."""
        if self.columns is not None and not isinstance(self.columns, dict):
            first = (*self.columns, "label")[0]
            raise ValueError(f'schema needs the types of columns: give columns={{"{first}": "int64", …}}')
        return store.spark_schema({self.text: "string", **(self.columns or {}), **self.types})

    @property
    def features(self) -> Any:
        """The columns that are added, as `datasets` describes them: `map(…, features=…)` takes them."""
        datasets = need("datasets", "scale")

        def feature(kind: str) -> Any:
            if kind.startswith("list<"):
                return datasets.Sequence(feature(kind[5:-1]))
            return datasets.Value({"float": "float32"}.get(kind, kind))

        return datasets.Features({name: feature(kind) for name, kind in self.types.items()})

    def model_hash(self) -> str:
        """A hash of the model's weights, config and tokenizer."""
        return self.hash or hash_of_module(self.model, self.tokenizer)

    def open(self, rank: int | None = None) -> _Opened:
        """The model, loaded and tried once per process."""
        if os.getpid() != _PROCESS:
            torch.set_num_threads(1)  # others were forked beside this one
        if isinstance(self.model, nn.Module):
            if self._own is None:
                self._own = self._tried(self.model, self.tokenizer)
            return self._own
        device = self.device
        if device == "cuda" and rank is not None:
            device = f"cuda:{rank % torch.cuda.device_count()}"
        key = (self.model, self.hash, self.dtype, device, self.length)
        if key not in _opened:
            model = open_named(self.model, self.hash, self.dtype).to(device)
            opened = self._tried(model, tokenizer_of(model, None))
            if len(_opened) >= KEPT:
                del _opened[next(iter(_opened))]
            _opened[key] = opened
        opened = _opened[key]
        self._check_methods(opened.tried)
        return opened

    def _tried(self, model: nn.Module, tokenizer: Any) -> _Opened:
        """A model that was traced once: what fails now is the model's fault, and later a text's."""
        if is_pair(model) or attends_to_pixels(model):
            what = "an encoder–decoder" if is_pair(model) else "a network over pixels"
            raise ValueError(
                f"{type(model).__name__} is {what}: Tracer takes encoders and language models of text; "
                "overt.trace traces it"
            )
        tried = trace(model, [PROBE], tokenizer=tokenizer)
        subject = tried.subject
        assert subject is not None
        arguments = subject.inputs.arguments
        if "attention_mask" not in arguments:
            raise ValueError(f"{type(model).__name__} takes no attention_mask, so texts cannot be padded")
        limit = limit_of(model, tokenizer)
        length = limit if self.length is None else min(self.length, limit or self.length)
        special = sum(map(bool, tokenizer(PROBE, return_special_tokens_mask=True)["special_tokens_mask"]))
        if length is not None and length <= special:
            raise ValueError(
                f"length must be at least {special + 1}, since {special} tokens of each text are special, "
                f"got {length}"
            )
        ids = str(subject.inputs.extra.get("ids", "input_ids"))
        opened = _Opened(model, tokenizer, length, tried, ids)
        opened.takes = tuple(arguments)
        if tried.outputs is not None:
            with evaluating(model), torch.no_grad():
                single = subject.logits(arguments).shape[1] == 1
            opened.predicts = single or tried.kind == "causal"
        self._check_methods(tried)
        return opened

    def _check_methods(self, tried: Trace) -> None:
        numbers("layers", self.layers, tried.layers)
        for name in self.methods:
            if (reason := tried.why_not(name)) is not None:
                raise ValueError(f"{name}: {reason}")

    def __call__(self, batch: Mapping[str, Any], rank: int | None = None) -> dict[str, Any]:
        """The batch's columns and those of its texts' traces, each with as many rows as the batch.

        Args:
            batch: column → list or array.
            rank: number of the process, which chooses among GPUs.
        """
        carried = [self.text, *(name for name in self._carried(batch) if name != self.text)]
        store.data_types(dict.fromkeys(carried, ""), self.methods, self.layers)
        return {**{name: batch[name] for name in carried}, **self.rows(list(batch[self.text]), rank)}

    def _carried(self, batch: Mapping[str, Any]) -> list[str]:
        for name in (self.text, *(self.columns or ())):
            if name not in batch:
                raise ValueError(f"the batch has no column {name}; it has {', '.join(batch)}")
        return list(batch) if self.columns is None else list(self.columns)

    def pandas(self, frames: Iterable[Any]) -> Iterator[Any]:
        """Frames with the columns of `schema`, for frames with a column of texts; for mapInPandas."""
        pandas = need("pandas", "scale")
        for frame in frames:
            batch = {
                name: frame[name].tolist() for name in [self.text, *(self.columns or ())] if name in frame
            }
            yield pandas.DataFrame({name: list(values) for name, values in self(batch).items()})

    def rows(
        self, texts: Sequence[Any], rank: int | None = None, tell: Tell = lambda _: None
    ) -> dict[str, Any]:
        """Columns of traces, one row per text.

        Args:
            texts: strings; anything else has an `error`.
            rank: as in a call.
            tell: called with the number of texts that are done since it was last called.
        """
        opened = self.open(rank)
        table = _Table(len(texts), self.methods)
        good = table.good(texts, self.text)
        coded = dict(zip(good, _coded(opened, [texts[place] for place in good]), strict=True))
        for place, code in list(coded.items()):
            if all(code.special):
                table.error[place] = f"{self.text} is empty"
            elif isinstance(self.queries, int) and not -len(code.ids) <= self.queries < len(code.ids):
                table.error[place] = f"{self.text} has {len(code.ids)} tokens, and none number {self.queries}"
            elif unknown := _unknown(opened.model, code.ids):
                table.error[place] = unknown
            else:
                continue
            del coded[place]
        tell(len(texts) - len(coded))
        places = list(coded)
        for cut in plan.batches([len(coded[place].ids) for place in places], self.batch):
            chosen = [places[number] for number in cut]
            self._fill(opened, table, chosen, coded)
            tell(len(chosen))
        return table.columns()

    def _fill(self, opened: _Opened, table: _Table, places: list[int], coded: Mapping[int, _Text]) -> None:
        """Trace some texts together; if that fails, each alone, so that a bad one spoils no other."""
        try:
            with torch.inference_mode():
                self._trace(opened, table, places, [coded[place] for place in places])
        except ValueError as error:
            if len(places) == 1:
                table.error[places[0]] = " ".join(str(error).split())
                return
            for place in places:
                self._fill(opened, table, [place], coded)

    def _trace(self, opened: _Opened, table: _Table, places: list[int], texts: list[_Text]) -> None:
        counts = [len(text.ids) for text in texts]
        mask = torch.arange(max(counts)) < torch.tensor(counts).unsqueeze(1)
        traced = trace_batch(opened.model, _inputs(opened, texts, mask))
        queries = self._queries(traced, mask)
        values = self._values(traced, queries)
        likely = _predictions(traced, opened) if opened.predicts else None
        for number, (place, text) in enumerate(zip(places, texts, strict=True)):
            count = counts[number]
            table.query[place] = queries[number]
            table.tokens[place] = opened.name(text.ids)
            table.special[place] = np.array(text.special, dtype=bool)
            table.cut[place] = text.cut
            if text.offsets is not None:
                table.starts[place], table.ends[place] = np.array(text.offsets, dtype=np.int32).T.copy()
            if likely is not None:
                table.prediction[place], table.probability[place] = likely[number]
            for name in self.methods:
                rows = values[name][number][:, :count]
                table.values[name][place] = rows[0] if isinstance(self.layers, int) else list(rows)

    def _queries(self, traced: Trace, mask: Tensor) -> list[int]:
        if self.queries is None:
            return main_queries(traced.kind, mask, mask.shape[1])
        counts = mask.sum(dim=1).tolist()
        if isinstance(self.queries, int):
            return [self.queries % count for count in counts]
        return [0 if self.queries == "cls" else count - 1 for count in counts]

    def _values(self, traced: Trace, queries: list[int]) -> dict[str, list[Any]]:
        """Method → one float32 (layer, token) per text."""
        found: dict[str, list[Any]] = {name: [] for name in self.methods}
        threads = {"threads": torch.get_num_threads(), "progress": False}
        start = 0
        for query, group in groupby(
            queries
        ):  # texts are sorted by length: those with one query are neighbours
            stop = start + len(list(group))
            part = traced if stop - start == len(queries) else traced[start:stop]
            for name in self.methods:
                options = {"layers": self.layers, **method_of(name).fitting(threads)}
                rows = part.read(name, query, **options)[:, :, 0]
                found[name].extend(rows.to(torch.float32).numpy())
            start = stop
        return found


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Table:
    """Columns that are filled row by row, in any order; a row with an error stays empty."""

    def __init__(self, rows: int, methods: Sequence[str]) -> None:
        none = np.zeros(0, dtype=np.int32)
        self.tokens: list[Any] = [[] for _ in range(rows)]
        self.starts: list[Any] = [none] * rows
        self.ends: list[Any] = [none] * rows
        self.special: list[Any] = [none.astype(bool)] * rows
        self.cut = np.zeros(rows, dtype=bool)
        self.query = np.full(rows, -1, dtype=np.int32)
        self.prediction: list[str | None] = [None] * rows
        self.probability = np.full(rows, np.nan, dtype=np.float32)
        self.values: dict[str, list[Any]] = {name: [none.astype(np.float32)] * rows for name in methods}
        self.error = [""] * rows

    def good(self, texts: Sequence[Any], name: str) -> list[int]:
        """Places of the strings."""
        good = []
        for place, text in enumerate(texts):
            if isinstance(text, str):
                good.append(place)
            elif _is_missing(text):
                self.error[place] = f"{name} is missing"
            else:
                self.error[place] = f"{name} must be a string, got {text!r}"[:80]
        return good

    def columns(self) -> dict[str, Any]:
        """Name → array."""
        ragged = {"tokens": self.tokens, "starts": self.starts, "ends": self.ends, "special": self.special}
        columns = {name: _objects(values) for name, values in ragged.items()}
        columns |= {"cut": self.cut, "query": self.query, "prediction": _objects(self.prediction)}
        columns["probability"] = self.probability
        columns |= {name: _objects(values) for name, values in self.values.items()}
        return {**columns, store.ERROR: _objects(self.error)}


def _is_missing(value: Any) -> bool:
    """Whether it is None, NaN, or what pandas writes in their place."""
    try:
        return value is None or not bool(value == value)
    except TypeError:  # pandas.NA is neither equal to itself nor different
        return True
    except ValueError:  # an array
        return False


def _objects(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """An array of objects with one axis, whatever the objects are."""
    out = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        out[place] = value
    return out


def _unknown(model: nn.Module, ids: list[int]) -> str:
    """Why a model cannot read tokens, as where its tokenizer has got more of them; empty if it can."""
    try:
        check_ids(model, torch.tensor(ids), "numbers of tokens")
    except ValueError as error:
        return str(error)
    return ""


def _coded(opened: _Opened, texts: list[str]) -> list[_Text]:
    """Texts as token ids, cut at the model's length."""
    if not texts:
        return []
    tokenizer, fast = opened.tokenizer, bool(getattr(opened.tokenizer, "is_fast", False))
    cutting = {} if opened.length is None else {"truncation": True, "max_length": opened.length}
    with cutting_the_end(tokenizer):
        codes = tokenizer(texts, return_special_tokens_mask=True, return_offsets_mapping=fast, **cutting)
    kinds = codes.get("token_type_ids")
    found = []
    for number, ids in enumerate(codes["input_ids"]):
        if fast:
            cut = bool(codes.encodings[number].overflowing)
        else:  # a text that fills the model may have been cut
            full = opened.length is not None and len(ids) >= opened.length
            cut = full and len(tokenizer(texts[number])["input_ids"]) > len(ids)
        special = [bool(mark) for mark in codes["special_tokens_mask"][number]]
        offsets = codes["offset_mapping"][number] if fast else None
        found.append(_Text(ids, None if kinds is None else kinds[number], special, offsets, cut))
    return found


def _inputs(opened: _Opened, texts: list[_Text], mask: Tensor) -> Inputs:
    """A batch of texts, padded on the right."""
    device = device_of(opened.model)

    def padded(rows: list[list[int]], filler: int) -> Tensor:
        out = torch.full(mask.shape, filler)
        out[mask] = torch.tensor([number for row in rows for number in row])
        return out.to(device)

    filler = padding_id(opened.tokenizer, opened.model)
    arguments = {opened.ids: padded([text.ids for text in texts], filler)}
    arguments["attention_mask"] = mask.long().to(device)
    if "token_type_ids" in opened.takes:
        arguments["token_type_ids"] = padded([text.kinds or [0] * len(text.ids) for text in texts], 0)
    if "use_cache" in opened.takes:
        arguments["use_cache"] = False  # type: ignore[assignment]
    batch = Inputs(arguments, mask=mask, tokenizer=opened.tokenizer)
    batch.extra |= {} if opened.ids == "input_ids" else {"ids": opened.ids}
    return batch


def _predictions(traced: Trace, opened: _Opened) -> list[tuple[str, float]]:
    """Each text's likeliest class and its probability; of a regression, its number and NaN."""
    assert traced.outputs is not None
    divisor = traced.temperature if traced.link == "softmax" else 1.0
    chances, best = linked(traced.outputs.double() / divisor, traced.link).max(dim=-1)
    if traced.link == "identity":
        return [(f"{value:.6g}", float("nan")) for value in traced.outputs[:, 0].tolist()]
    names = [
        traced.labels[number]
        if traced.labels
        else opened.name([number])[0]
        if number in traced.words
        else str(number)
        for number in best.tolist()
    ]
    return list(zip(names, chances.tolist(), strict=True))
