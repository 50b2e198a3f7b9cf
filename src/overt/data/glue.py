"""GLUE (Wang et al. 2018, arXiv:1804.07461): its tasks, from files in their original layout or from the hub.

Quotation marks have no special meaning in these files: a reader that interprets them merges and loses rows.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from overt import _check
from overt.data import hub
from overt.data.files import data_folder, find_file, read_text

HUB = "nyu-mll/glue"
BINS = 10  # strata of a task whose labels are scores


class Row(NamedTuple):
    """An example: one or two texts, and the index of its class, its score, or None if that is not known."""

    texts: tuple[str, ...]
    label: int | float | None


@dataclass(frozen=True)
class Task:
    """A task of GLUE.

    Attributes:
        name: its name in GLUE.
        texts: columns of the texts.
        label: column of the label.
        classes: names of the classes, by index; empty if labels are scores.
        metrics: what GLUE reports, by the names of `overt.judge.understanding`.
        server_rows: file that GLUE's server expects, without its ending → its number of rows. The names are
            also those of the development and test parts.
        hub: its configuration on the hub.
        hub_texts: columns of the texts on the hub, if they have other names there.
        folder: name of its folder; its own name by default.
        suffixes: endings of the names of development and test files, in the order of `server_rows`.
        columns: columns of training and development files without a line of column names.
        instead: usual file → a file that is preferred to it.
        words: whether labels are written as names of classes, not as their indices.
        scale: smallest and largest score.
        trained: whether it has training and development parts.
        broken: whether training and development lines with too many or too few columns are known to occur:
            they are left out and counted. Everywhere else they are errors.
    """

    name: str
    texts: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    metrics: tuple[str, ...]
    server_rows: Mapping[str, int]
    hub: str
    hub_texts: tuple[str, ...] = ()
    folder: str = ""
    suffixes: tuple[str, ...] = ("",)
    columns: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)
    words: bool = False
    scale: tuple[float, float] = (0.0, 0.0)
    trained: bool = True
    broken: bool = False

    def parts(self, kind: str) -> dict[str, str]:
        """Parts of a kind ("train", "dev" or "test") → their usual files."""
        if kind == "train":
            return {"train": "train.tsv"} if self.trained else {}
        if kind == "dev" and not self.trained:
            return {}
        return {
            name: f"{kind}{suffix}.tsv" for name, suffix in zip(self.server_rows, self.suffixes, strict=True)
        }

    def written(self, label: float) -> str:
        """A label as it stands in GLUE's files, and as its server expects it."""
        if not self.classes:
            return f"{label:.6f}"
        return self.classes[int(label)] if self.words else str(int(label))


PAIR = ("sentence1", "sentence2")
ENTAILMENT = ("entailment", "not_entailment")
THREE_WAY = ("entailment", "neutral", "contradiction")
_ALL = (
    Task(
        "CoLA",
        ("sentence",),
        "label",
        ("unacceptable", "acceptable"),
        ("MCC",),
        {"CoLA": 1063},
        "cola",
        columns=("source", "label", "mark", "sentence"),
    ),
    Task(
        "SST-2",
        ("sentence",),
        "label",
        ("negative", "positive"),
        ("accuracy",),
        {"SST-2": 1821},
        "sst2",
    ),
    Task(
        "MRPC",
        ("#1 String", "#2 String"),
        "Quality",
        ("not_equivalent", "equivalent"),
        ("F1", "accuracy"),
        {"MRPC": 1725},
        "mrpc",
        hub_texts=PAIR,
        # Microsoft's files: train.tsv lacks a row in some copies, and test.tsv has no labels.
        instead={"train.tsv": "msr_paraphrase_train.txt", "test.tsv": "msr_paraphrase_test.txt"},
    ),
    Task(
        "STS-B",
        PAIR,
        "score",
        (),
        ("Pearson", "Spearman"),
        {"STS-B": 1379},
        "stsb",
        scale=(0.0, 5.0),
    ),
    Task(
        "QQP",
        ("question1", "question2"),
        "is_duplicate",
        ("not_duplicate", "duplicate"),
        ("F1", "accuracy"),
        {"QQP": 390_965},
        "qqp",
        broken=True,  # some questions contain line breaks
    ),
    Task(
        "MNLI",
        PAIR,
        "gold_label",
        THREE_WAY,
        ("accuracy",),
        {"MNLI-m": 9796, "MNLI-mm": 9847},
        "mnli",
        hub_texts=("premise", "hypothesis"),
        suffixes=("_matched", "_mismatched"),
        words=True,
    ),
    Task(
        "QNLI",
        ("question", "sentence"),
        "label",
        ENTAILMENT,
        ("accuracy",),
        {"QNLI": 5463},
        "qnli",
        words=True,
    ),
    Task("RTE", PAIR, "label", ENTAILMENT, ("accuracy",), {"RTE": 3000}, "rte", words=True),
    Task(
        "AX",
        PAIR,
        "label",
        THREE_WAY,
        ("MCC",),
        {"AX": 1104},
        "ax",
        hub_texts=("premise", "hypothesis"),
        folder="diagnostic",
        instead={"test.tsv": "diagnostic.tsv"},
        words=True,
        trained=False,
    ),
    Task(
        "WNLI",
        PAIR,
        "label",
        ("not_entailment", "entailment"),
        ("accuracy",),
        {"WNLI": 146},
        "wnli",
        trained=False,
    ),
)
TASKS = {task.name: task for task in _ALL if task.trained}
# Parts of a submission only: the diagnostic set, and a task that no model is trained on here.
SUBMITTED_ONLY = {task.name: task for task in _ALL if not task.trained}


@dataclass(frozen=True, eq=False)
class Splits:
    """The rows of a task.

    Attributes:
        task: what they belong to.
        train: rows for training; none for the tasks of `SUBMITTED_ONLY`.
        dev: part → rows; MNLI has two parts, MNLI-m and MNLI-mm, the others one with the task's name.
        test: the same, as far as the files are there. Labels are None, except MRPC's if Microsoft's file of
            the test rows is there or they come from the hub.
        source: folder, or place on the hub.
        sha256: hash of all that was read.
        remarks: what was left out.
    """

    task: Task
    train: list[Row]
    dev: dict[str, list[Row]]
    test: dict[str, list[Row]]
    source: str
    sha256: str
    remarks: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """Sizes and origin, for the result file."""
        return {
            "task": self.task.name,
            "train": len(self.train),
            "dev": {part: len(rows) for part, rows in self.dev.items()},
            "test": {part: len(rows) for part, rows in self.test.items()},
            "source": self.source,
            "sha256": self.sha256,
            "remarks": list(self.remarks),
        }


def load(name: str, data: Path | None = None) -> Splits:
    """A task from a folder that contains GLUE's folders, or else from the hub.

    Args:
        name: one of `TASKS` or `SUBMITTED_ONLY`.
        data: the folder (by default OVERT_DATA). The task's files are in CoLA/ or glue/CoLA/ inside, or in
            the folder itself if it is called CoLA.

    Raises:
        FileNotFoundError: neither has the task.
        ValueError: a file is not as published; the error names it and the line.
    """
    task = _named(name)
    data = data_folder(data)
    folder = None if data is None else find_folder(task, data)
    return _from_hub(task, data) if folder is None else read_folder(task, folder)


def load_available(
    data: Path | None = None, names: Iterable[str] = TASKS
) -> tuple[dict[str, Splits], dict[str, str]]:
    """The tasks that `load` finds, and for each of the others the reason.

    A file that is there and is not as published is still an error.
    """
    data = data_folder(data)
    found, missing = {}, {}
    for name in names:
        try:
            found[name] = load(name, data)
        except FileNotFoundError as error:
            missing[name] = str(error)
    return found, missing


def set_apart(rows: Sequence[Row], share: float = 0.1, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows to choose settings with, both in their order.

    Every class, or every tenth of the scores, gives the same share. The split depends on the rows and on the
    seed only.
    """
    _check.fraction("share", share)
    strata: dict[Any, list[int]] = defaultdict(list)
    labels = [row.label for row in rows]
    if None in labels:
        raise ValueError(f"rows must have labels, and row {labels.index(None)} has none")
    if any(isinstance(label, float) for label in labels):
        ranked = sorted(range(len(rows)), key=lambda place: (labels[place], place))
        for rank, place in enumerate(ranked):
            strata[rank * BINS // len(rows)].append(place)
    else:
        for place, label in enumerate(labels):
            strata[label].append(place)
    random = Random(seed)
    held: set[int] = set()
    for stratum in sorted(strata):
        held.update(random.sample(strata[stratum], round(share * len(strata[stratum]))))
    kept = [row for place, row in enumerate(rows) if place not in held]
    return kept, [rows[place] for place in sorted(held)]


def cola_out_of_domain(data: Path | None = None) -> list[int]:
    """Places of CoLA's development rows whose source has no training rows: its out-of-domain part.

    Only the original files name the sources, the hub does not.
    """
    task, data = TASKS["CoLA"], data_folder(data)
    folder = None if data is None else find_folder(task, data)
    if folder is None:
        raise FileNotFoundError(f"CoLA's out-of-domain rows need its original files; {_advice(task)}")
    parts = []
    for kind in ("train", "dev"):
        path = find_file(folder, f"{kind}.tsv")
        assert path is not None
        parts.append([cells[0] for _, cells in _table(task, read_text(path), str(path), labelled=True).lines])
    train, dev = parts
    known = set(train)
    return [place for place, source in enumerate(dev) if source not in known]


# --- Files ---


def find_folder(task: Task, data: Path) -> Path | None:
    """The folder in `data` that has all files of a task that are needed, if there is one."""
    folder = task.folder or task.name
    places = [data / folder, data / "glue" / folder, *([data] if data.name == folder else [])]
    return next((place for place in places if not _missing(task, place)), None)


def read_folder(task: Task, folder: Path) -> Splits:
    """A task from its own folder."""
    if missing := _missing(task, folder):
        raise FileNotFoundError(f"{folder} has no {' and no '.join(missing)}; {_advice(task)}")
    digest, remarks = hashlib.sha256(), []
    read: dict[str, dict[str, list[Row]]] = {"train": {}, "dev": {}, "test": {}}
    for kind, parts in read.items():
        for part, usual in task.parts(kind).items():
            path = _file(task, folder, usual)
            if path is None:
                continue
            text = read_text(path)
            digest.update(text.encode())
            table = _table(task, text, str(path), labelled=kind != "test")
            if path.name.startswith("msr_paraphrase_train"):
                table = _without_dev(table, folder)
            parts[part] = _rows(task, table)
            if table.broken:
                remarks.append(f"{path.name}: {table.broken} lines that are no whole rows were left out")
    train = read["train"].get("train", [])
    return Splits(task, train, read["dev"], read["test"], str(folder), digest.hexdigest(), tuple(remarks))


def read_rows(task: Task, text: str, name: str) -> list[Row]:
    """The labelled rows of a training or development file, called `name` in errors."""
    return _rows(task, _table(task, text, name, labelled=True))


def _named(name: str) -> Task:
    known = TASKS | SUBMITTED_ONLY
    if name not in known:
        raise ValueError(f"the task must be one of {', '.join(known)}, got {name!r}")
    return known[name]


def _file(task: Task, folder: Path, usual: str) -> Path | None:
    """The file of a part: the preferred one, if it is there and can be used."""
    other = task.instead.get(usual)
    preferred = find_file(folder, other) if other else None
    fallback = find_file(folder, usual)
    # Microsoft's training file cannot be used without the list of the development rows in it.
    if preferred and usual == "train.tsv" and fallback and find_file(folder, DEV_IDS) is None:
        return fallback
    return preferred or fallback


def _missing(task: Task, folder: Path) -> list[str]:
    """Files that a task cannot do without and a folder lacks."""
    return [name for usual, name in _needed(task).items() if _file(task, folder, usual) is None]


def _needed(task: Task) -> dict[str, str]:
    """Usual file that a task cannot do without → its name in errors."""
    if task.trained:
        return {usual: usual for kind in ("train", "dev") for usual in task.parts(kind).values()}
    return {usual: task.instead.get(usual, usual) for usual in task.parts("test").values()}


def _advice(task: Task) -> str:
    return (
        f"put {' and '.join(_needed(task).values())} into DIR/{task.folder or task.name} and give --data DIR"
    )


class _Table(NamedTuple):
    name: str
    header: Sequence[str]
    labelled: bool
    lines: list[tuple[int, list[str]]]  # number of the line, and its cells
    broken: int


def _table(task: Task, text: str, name: str, labelled: bool) -> _Table:
    """The cells of a file; labelled are those of training and development."""
    lines = [line.rstrip("\r") for line in text.removeprefix("\ufeff").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise ValueError(f"{name} is empty")
    header: Sequence[str] = lines[0].split("\t")
    first = 2
    if labelled and task.columns:
        header, first = task.columns, 1
    kept, broken = [], 0
    for number, line in enumerate(lines[first - 1 :], start=first):
        cells = line.split("\t")
        if len(cells) == len(header):
            kept.append((number, cells))
        elif labelled and task.broken:
            broken += 1
        else:
            raise ValueError(
                f"{name}, line {number}: must have {len(header)} columns ({', '.join(header)}), "
                f"got {len(cells)}"
            )
    return _Table(name, header, labelled, kept, broken)


def _rows(task: Task, table: _Table) -> list[Row]:
    """The rows of a file; without labels if it has no column of them and need not."""
    wanted = [*task.texts, *([task.label] if table.labelled or task.label in table.header else [])]
    if absent := [column for column in wanted if column not in table.header]:
        raise ValueError(
            f"{table.name}, line 1: {task.name} needs the columns {', '.join(wanted)}; "
            f"{', '.join(absent)} not in {', '.join(table.header)[:200]}"
        )
    if not table.lines:
        columns = f"{len(table.header)} columns ({', '.join(table.header)})"
        raise ValueError(f"{table.name} must have rows of {columns}, got none")
    places = [table.header.index(column) for column in wanted]
    texts, label = places[: len(task.texts)], places[len(task.texts) :]
    known = {task.written(index): index for index in range(len(task.classes))}
    rows = []
    for number, cells in table.lines:
        value = (
            _label(task, cells[label[0]].strip(), known, f"{table.name}, line {number}") if label else None
        )
        rows.append(Row(tuple(cells[place].strip() for place in texts), value))
    return rows


def _label(task: Task, word: str, known: dict[str, int], where: str) -> int | float:
    if task.classes:
        if word not in known:
            raise ValueError(f"{where}: the label must be {' or '.join(known)}, got {word[:40]!r}")
        return known[word]
    low, high = task.scale
    try:
        score = float(word)
    except ValueError:
        score = math.nan
    if not low <= score <= high:
        raise ValueError(f"{where}: the score must be a number from {low:g} to {high:g}, got {word[:40]!r}")
    return score


DEV_IDS = "dev_ids.tsv"


def _without_dev(table: _Table, folder: Path) -> _Table:
    """The rows of Microsoft's training file that are not GLUE's development rows.

    A listed row that the file lacks is an error: with other ids than the file's, development rows would stay.
    """
    path = find_file(folder, DEV_IDS)
    if path is None:
        raise FileNotFoundError(
            f"{table.name} also contains development rows: {DEV_IDS}, which lists them, is missing"
        )
    lines = read_text(path).removeprefix("\ufeff").split("\n")
    ids = {tuple(line.split()) for line in lines if line.strip()}
    if unknown := ids - {(cells[1], cells[2]) for _, cells in table.lines}:
        raise ValueError(
            f"{path} must list rows of {table.name} by both of their ids, and {len(unknown)} of {len(ids)} "
            f"are not there, such as {' '.join(min(unknown))[:40]!r}"
        )
    return table._replace(
        lines=[(number, cells) for number, cells in table.lines if (cells[1], cells[2]) not in ids]
    )


# --- The hub ---


def _from_hub(task: Task, data: Path | None) -> Splits:
    where = "no --data was given" if data is None else f"not found in --data {data}{_lacking(task, data)}"
    splits = hub.load(HUB, task.hub, f"{task.name}: {where}", _advice(task))
    source = f"{HUB} ({task.hub}) on the hub"
    digest = hashlib.sha256()
    read: dict[str, dict[str, list[Row]]] = {"train": {}, "dev": {}, "test": {}}
    for kind, parts in read.items():
        for part, usual in task.parts(kind).items():
            split = Path(usual).stem.replace("dev", "validation")
            names = [*(task.hub_texts or task.texts), "label"]
            *columns, labels = hub.columns(splits, split, names, source)
            classes = getattr(splits[split].features["label"], "names", task.classes)
            if tuple(classes) != task.classes:
                raise ValueError(
                    f"{split} of {source} must have the classes {', '.join(task.classes)} in this order, "
                    f"got {', '.join(classes)}"
                )
            parts[part] = [
                Row(
                    tuple(cell.strip() for cell in cells),
                    _hub_label(task, label, kind != "test", f"{split} of {source}"),
                )
                for *cells, label in zip(*columns, labels, strict=True)
            ]
            for row in parts[part]:
                digest.update("\t".join((*row.texts, str(row.label), "\n")).encode())
    train = read["train"].get("train", [])
    return Splits(task, train, read["dev"], read["test"], source, digest.hexdigest())


def _hub_label(task: Task, label: Any, labelled: bool, where: str) -> int | float | None:
    """A label of the hub, which writes −1 for one that is not public."""
    if not labelled and label == -1:
        return None
    if task.classes and label in range(len(task.classes)):
        return int(label)
    if not task.classes and task.scale[0] <= label <= task.scale[1]:
        return float(label)
    allowed = f"from 0 to {len(task.classes) - 1 if task.classes else task.scale[1]:g}"
    raise ValueError(f"{where}: labels must be {allowed}, got {label!r}")


def _lacking(task: Task, data: Path) -> str:
    """What is missing from a folder of the task that is there, in brackets."""
    folder = task.folder or task.name
    for place in (data / folder, data / "glue" / folder):
        if place.is_dir():
            return f" ({place} has no {' and no '.join(_missing(task, place))})"
    return ""
