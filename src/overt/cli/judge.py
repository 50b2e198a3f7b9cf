"""`overt judge`: which explanation of a classifier to believe, judged on texts of your own."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overt import _check
from overt._files import check_folder
from overt.cli.inputs import open_model
from overt.cli.shared import app, imported, join_and, join_or
from overt.corpus.reading import TEXT, open_source
from overt.recipes._runs import load_tokenizer, read_model_config
from overt.recipes._training import torch_device, versions

if TYPE_CHECKING:
    from overt.judge.intervals import Interval
    from overt.judge.rationales import Evaluation
    from overt.judge.rationales.kept import Kept
    from overt.judge.rationales.words import Text

EVERY = 30.0  # seconds between two lines of progress, where there is no terminal
TIMED = 12  # texts above which a few are timed first, and what is measured is kept
KEPT = Path("runs") / "judge"  # what interrupted runs have measured
READ = 4096  # rows that are read at a time
ALL = "all"
FIRST = "comprehensiveness"  # the measure that methods are sorted by, unless --by says otherwise
PAGE, SHUFFLED = "writing the page", "shuffled weights"  # what is told after the methods
# What is judged unless `--methods` says otherwise: LIME and the remaining mixings take long or differ little.
STANDARD = (
    "raw", "rollout", "flow", "rollout/gradient", "flow/gradient", "rollout/relevance", "rollout/alti",
    "value-zeroing", "gradients", "gradient-input", "integrated", "blankout", "random", "oracle",
)  # fmt: skip
PACKAGES = {"integrated": "captum", "lime": "lime"}  # what a method needs


@dataclass(frozen=True, eq=False)
class Given:
    """Texts and what belongs to them.

    Attributes:
        texts: in the order of the file.
        rows: their numbers in the file, from 1.
        labels: as the file has them; None without any.
        rationales: 0 or 1 for each word, or passages; None without any.
        queries: second parts; None without any.
        all: how many texts the file has.
    """

    texts: list[str]
    rows: list[int]
    labels: list[Any] | None = None
    rationales: list[Any] | None = None
    queries: list[str] | None = None
    all: int = 0


def read_given(
    path: str | Path,
    text: str = TEXT,
    labels: str | None = None,
    rationales: str | None = None,
    queries: str | None = None,
    most: int | None = None,
) -> Given:
    """Read texts, and columns or a file of what belongs to them; one-line errors name the row.

    Args:
        path: of the texts, as for `overt corpus run`.
        text: their column.
        labels: column of the labels, or a file with one in each line.
        rationales: column of JSON lists.
        queries: column of second parts.
        most: texts to keep, spread evenly.
    """
    columns, count = _columns(path, text)
    for option, name in (("--rationales", rationales), ("--queries", queries)):
        if name is not None and name not in columns:
            raise ValueError(f"{option} {name}: {path} has the columns {', '.join(columns)}")
    if not count:
        raise ValueError(f"{path} has no texts")
    for number, value in enumerate(columns[text], start=1):
        if value is None or not str(value).split():
            raise ValueError(f"{path}: text {number} has no words")
    found = None
    if labels is not None:
        found = columns[labels] if labels in columns else _labels_in(labels, columns)
        if len(found) != count:
            raise ValueError(f"--labels {labels} has {len(found):,} labels, and {path} {count:,} texts")
        if None in found:
            raise ValueError(f"--labels {labels}: text {found.index(None) + 1} has no label")
    marked = None if rationales is None else [_listed(v, n + 1) for n, v in enumerate(columns[rationales])]
    asked = None if queries is None else [str(value or "") for value in columns[queries]]
    from overt.view.judging import spread_evenly

    keep = spread_evenly(count, count if most is None else most)

    def some(values: list[Any] | None) -> list[Any] | None:
        return None if values is None else [values[place] for place in keep]

    texts = some(columns[text])
    assert texts is not None
    return Given(texts, [place + 1 for place in keep], some(found), some(marked), some(asked), count)


def _columns(path: str | Path, text: str) -> tuple[dict[str, list[Any]], int]:
    source = open_source(path, READ, text)
    columns: dict[str, list[Any]] = {name: [] for name in source.types}
    for start in range(0, source.rows, READ):
        rows = source.read(start, min(start + READ, source.rows))
        for place, why in rows.errors.items():
            raise ValueError(f"{path}: row {start + place + 1}: {why}")
        for name, values in rows.columns.items():
            columns[name] += values if isinstance(values, list) else values.to_pylist()
    return columns, source.rows


def _labels_in(path: str, columns: dict[str, list[Any]]) -> list[Any]:
    """The lines of a file of labels."""
    if not Path(path).is_file():
        raise ValueError(f"--labels {path} is neither a file nor one of the columns {', '.join(columns)}")
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"--labels {path} is not in UTF-8") from None
    return [line.strip() or None for line in lines]


def _listed(value: Any, number: int) -> Any:
    """A rationale of a column: a list, or JSON of one."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise ValueError(f"--rationales: text {number} must have a JSON list, got {str(value)[:40]!r}")
    # Passages come as lists of two.
    return [tuple(each) if isinstance(each, list) else each for each in found]


def has_marks(rationale: Sequence[Any]) -> bool:
    """Whether any word is marked; passages mark some."""
    return any(each != 0 for each in rationale)


def classes_of(labels: Sequence[Any], names: Sequence[str], rows: Sequence[int]) -> list[int]:
    """Labels, which are numbers or names of classes, as numbers.

    Args:
        labels: as a file has them.
        names: of the model's classes.
        rows: numbers of the texts, for errors.
    """
    confused = [name for place, name in enumerate(names) if name.isdecimal() and int(name) != place]
    if confused:
        place = names.index(confused[0])
        raise ValueError(
            f"--labels: class {place} of the model is named {confused[0]}, so that a number may be its place "
            "or its name: leave --labels out"
        )
    found = []
    for number, label in zip(rows, labels, strict=True):
        text = str(label)
        if text in names and not isinstance(label, bool):
            found.append(names.index(text))
        elif text.isdecimal() and int(text) < len(names):
            found.append(int(text))
        else:
            raise ValueError(
                f"--labels: {text[:40]!r} of text {number} is no class of the model: give 0 to "
                f"{len(names) - 1}, or {join_or(names)[:200]}"
            )
    if len(found) == 1:
        raise ValueError(
            "--labels: accuracy needs texts of two classes, got one text: give more of them, or leave "
            "--labels out"
        )
    if len(set(found)) == 1:
        raise ValueError(
            f"--labels: all {len(found):,} texts have one class, {names[found[0]]}, and accuracy says "
            "nothing: add texts of another class, or leave --labels out"
        )
    return found


def chosen_methods(given: str | None) -> tuple[list[str], list[str]]:
    """Names of methods between commas, and notes on what is left out."""
    from overt.judge.rationales.methods import every_method, known_methods, title_of

    if given is not None and given.strip() != ALL:
        names = [name.strip() for name in given.split(",") if name.strip()]
        for name in names:
            _check.one_of("--methods", name, (ALL, *known_methods()))
        if not names:
            raise ValueError(f"--methods must name at least one method, or {ALL}, got {given!r}")
        return list(dict.fromkeys(names)), []
    names = list(STANDARD if given is None else every_method())
    lacking = {name for name in names if name in PACKAGES and not importlib.util.find_spec(PACKAGES[name])}
    notes = [f"{title_of(name)} needs the extra rationales, and is left out" for name in sorted(lacking)]
    return [name for name in names if name not in lacking], notes


def made_with() -> dict[str, str]:
    """What a method's numbers depend on: versions of packages, and digests of the modules from --import."""
    found = versions()
    for package in ("captum", "lime", "scikit-learn"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    for name in imported:
        file = getattr(sys.modules.get(name), "__file__", None)
        found[f"--import {name}"] = hashlib.sha256(Path(file).read_bytes() if file else b"").hexdigest()
    return found


def tell(words: str) -> None:
    """Say something on standard error."""
    typer.echo(words, err=True)


def kept_of(model: Any, tokenizer: Any, read: Sequence[Text], **given: Any) -> Kept:
    """Where a judgement keeps what it has measured; nowhere with few texts, or if it has no digest.

    Args:
        model: the classifier.
        tokenizer: its tokenizer.
        read: the texts.
        given: what else the numbers of a method depend on.
    """
    from overt.judge.rationales.kept import Kept, digest_of

    if len(read) <= TIMED:
        return Kept(None)
    try:
        return Kept(KEPT / digest_of(model, tokenizer, read, made=made_with(), **given), tell)
    except (AttributeError, RuntimeError, TypeError, ValueError, pickle.PicklingError) as error:
        tell(f"what is measured is not kept, should this be interrupted: {error}")
        return Kept(None)


def open_classifier(name: str, device: str = "auto") -> tuple[Any, Any]:
    """A classifier of texts and its tokenizer, on a device; one line says what else a folder holds."""
    from overt.attaching.loading import load
    from overt.attaching.settings import settings_in
    from overt.models.rationale import RationaleClassifier, RationaleConfig
    from overt.view.judging import HEAD, has_head

    settings = read_model_config(name)
    model: Any
    if settings.get("model_type") != RationaleConfig.model_type:
        model = open_model(name)
    elif settings_in(settings) is not None:
        model = load(name, cls=RationaleClassifier)
    else:
        model = RationaleClassifier.from_pretrained(name)
        model.eval()
    if not has_head(model):
        raise ValueError(
            f"--model {name} is a {type(model).__name__}, which has no classifier head: give a model "
            f"that was trained to classify texts, such as a …{HEAD}"
        )
    if model.config.num_labels < 2:
        raise ValueError(
            f"--model {name} has one class only, and nothing to decide: give a classifier of two or more"
        )
    tokenizer = load_tokenizer(name)
    return model.to(torch_device(device)), tokenizer


@dataclass(eq=False)
class Shown:
    """How far it is, on standard error: a line that changes on a terminal, else one now and then."""

    methods: Sequence[str]  # their titles
    seconds: float | None = None  # that all takes, if known
    begun: list[str] = field(default_factory=list)  # titles
    began: float = field(default_factory=time.monotonic)
    said: float = field(default_factory=time.monotonic)
    width: int = 0

    def __call__(self, words: str, done: int, total: int) -> None:
        """What is being done, how many texts of it are done, and how many there are."""
        again = words == PAGE or words.endswith(SHUFFLED)
        # What is done for a method stands after its title, which may itself have a comma.
        titles = [each for each in self.methods if words == each or words.startswith(f"{each}, ")]
        if not again and titles and (title := max(titles, key=len)) not in self.begun:
            self.begun.append(title)
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if now - self.said < (0.3 if terminal else EVERY):
            return
        self.said = now
        line = f"{words}: {done} of {total} texts"
        if not again:
            line = f"method {len(self.begun)} of {len(self.methods)}, {line}"
            if self.seconds is not None:
                line += f", {duration(max(self.seconds - (now - self.began), 1.0))} left"
        if terminal:
            self.width = max(self.width, len(line))
            sys.stderr.write("\r" + line.ljust(self.width))
            sys.stderr.flush()
        else:
            typer.echo(line, err=True)

    def stop(self) -> None:
        """Remove the line."""
        if self.width:
            sys.stderr.write("\r" + " " * self.width + "\r")
            sys.stderr.flush()


def duration(seconds: float) -> str:
    """A time in few words."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def expected(
    lengths: Sequence[int], jobs: Sequence[tuple[Callable[[list[int]], object], int]]
) -> float | None:
    """Seconds that all will take, from two texts, at the quartiles of length; None for a few texts.

    Args:
        lengths: words of each text.
        jobs: what is done with some of the texts, by number, and how many it will be done with.
    """
    count = len(lengths)
    if count <= TIMED:
        return None
    by_length = sorted(range(count), key=lambda number: lengths[number])
    some = [by_length[count // 4], by_length[3 * count // 4]]
    seconds = 0.0
    for job, texts in jobs:
        job([by_length[0]])  # compiles what is compiled on first use
        began = time.monotonic()
        job(some)
        seconds += (time.monotonic() - began) * texts / len(some)
    return seconds


def table_of(found: Evaluation, by: str, left: Mapping[str, Interval] | None = None) -> str:
    """Methods, the best first, with all measures, their intervals over texts, and time per text.

    Args:
        found: from `evaluate`.
        by: the measure that methods are sorted by.
        left: from `after_shuffling`.
    """
    from overt.judge.rationales.evaluation import LESS_IS_BETTER
    from overt.judge.rationales.methods import CONTROLS, ORACLE, title_of
    from overt.judge.rationales.ranking import beating_chance, columns_of, heading_of, leading, ordered

    columns = columns_of(found)
    ahead = {measure: leading(found, measure) for measure in columns}
    beats = {measure: beating_chance(found, measure) for measure in columns}
    arrows = {measure: "↓" if measure in LESS_IS_BETTER else "↑" for measure in columns}
    last = ["ρ shuffled → 0  "] if left else []
    rows = [["", "texts", *(f"{heading_of(name)} {arrows[name]} " for name in columns), *last, "s per text"]]
    for name in ordered(found, by):
        own = found.methods[name]
        cells = []
        for measure in columns:
            known = own.measures.get(measure) is not None
            mark = "*" * (name in ahead[measure]) + "°" * (not beats[measure].get(name, True))
            cells.append(_cell(found.interval(name, measure) if known else None) + mark.ljust(2))
        if left:
            cells.append(_cell(left.get(name)) + "  ")
        title = f"({title_of(name)})" if name in CONTROLS else title_of(name)
        # The best order comes from a search whose answers the normalised measures use as well.
        spent = "–" if own.seconds is None or name == ORACLE else f"{own.seconds:.3f}"
        rows.append([title, str(len(own.texts)), *cells, spent])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) if place == 0 else cell.rjust(width) for place, (cell, width) in
                  enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip
    lines += [f"{title_of(name).ljust(widths[0])}  – {reason}" for name, reason in found.refused.items()]
    return "\n".join([*lines, *_texts_of(found, columns, left or {})])


def none_beats_chance(found: Evaluation) -> bool:
    """Whether random scores were judged, and no method is told to be better by any measure."""
    from overt.judge.rationales.ranking import beating_chance, columns_of

    told = [beating_chance(found, measure) for measure in columns_of(found)]
    return any(told) and not any(better for each in told for better in each.values())


def _texts_of(found: Evaluation, columns: Sequence[str], left: Mapping[str, Interval]) -> list[str]:
    """Lines on the columns that have fewer texts, and on the best order where it has fewer."""
    from overt.judge.rationales.deleting import SEARCHED
    from overt.judge.rationales.methods import ORACLE, title_of
    from overt.judge.rationales.ranking import coverage, coverage_after_shuffling, heading_of

    headings: dict[tuple[str, str], list[str]] = {}  # by how many texts they have, and why
    for measure in columns:
        if (some := coverage(found, measure)) is not None:
            headings.setdefault(some, []).append(heading_of(measure))
    if (some := coverage_after_shuffling(found, left)) is not None:
        headings.setdefault(some, []).append("ρ shuffled")
    told = [f"{', '.join(names)} {count} ({why})" for (count, why), names in headings.items()]
    lines = [f"texts: {'; '.join(told)}"] if told else []
    own = found.methods.get(ORACLE)
    if own is not None and len(own.texts) < found.texts:
        lines.append(
            f"({title_of(ORACLE)}) has {len(own.texts):,} of {found.texts:,} texts, those of up to "
            f"{SEARCHED} words: it stands last, except by a measure that the others have of these texts alone"
        )
    return lines


def _cell(found: Interval | None) -> str:
    """A mean, and half of its interval if it has one."""
    if found is None:
        return "–"
    value = f"{found.mean:.3f}".replace("-", "−").replace("−0.000", "0.000")
    return value if math.isnan(found.low) else f"{value} ±{(found.high - found.low) / 2:.3f}"


@app.command(rich_help_panel="Judge explanations")
def judge(
    text_file: Annotated[
        str,
        typer.Argument(help="Texts: .txt (a text is a line), .jsonl, .csv, .tsv, or as `overt corpus run`."),
    ],
    model: Annotated[str, typer.Option(help="Folder of a classifier, or its name on the hub.")],
    labels: Annotated[
        str | None,
        typer.Option(help="Column of the right classes, or a file with one in each line: numbers or names."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Methods between commas, or all. Default: the usual ones, without LIME."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Page to write, a self-contained .html file.")] = None,
    by: Annotated[str, typer.Option(help="Measure that methods are sorted by.")] = FIRST,
    text: Annotated[str, typer.Option(help="Column of the texts.")] = TEXT,
    queries: Annotated[
        str | None, typer.Option(help="Column of second parts, such as questions, which are never deleted.")
    ] = None,
    rationales: Annotated[
        str | None,
        typer.Option(help="Column of what people marked: a JSON list of 0 and 1, one for each word."),
    ] = None,
    most: Annotated[
        int | None, typer.Option(help="Judge at most so many texts, spread evenly over the file.", min=1)
    ] = None,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda or auto.")] = "auto",
    seed: Annotated[int, typer.Option(help="Random seed of ties, LIME and the random control.", min=0)] = 0,
    fresh: Annotated[
        bool,
        typer.Option(help="Judge all methods again, whatever an interrupted run has left in runs/judge."),
    ] = False,
) -> None:
    """Judge which explanation of a classifier to believe, on texts of your own."""
    try:
        run(text_file, model, labels, methods, out, by, text, queries, rationales, most, device, seed, fresh)
    except KeyboardInterrupt:
        typer.secho("\ninterrupted; nothing was written", err=True)
        raise typer.Exit(130) from None


def run(
    text_file: str | Path,
    model_name: str,
    labels: str | None = None,
    methods: str | None = None,
    out: Path | None = None,
    by: str = FIRST,
    text: str = TEXT,
    queries: str | None = None,
    rationales: str | None = None,
    most: int | None = None,
    device: str = "auto",
    seed: int = 0,
    fresh: bool = False,
) -> Evaluation:
    """Judge, print the table and write the page; the arguments are the options of `overt judge`.

    Where there are more than a few texts, what is measured is kept in runs/judge until all is done.
    """
    from overt.judge.rationales import evaluate
    from overt.judge.rationales.evaluation import HUMAN, marked_words
    from overt.judge.rationales.methods import title_of
    from overt.judge.rationales.randomising import MOST, after_shuffling
    from overt.judge.rationales.ranking import COLUMNS, heading_of
    from overt.judge.rationales.words import WordClassifier
    from overt.view.judging import class_names, judge_page

    _check.one_of("--by", by, COLUMNS)
    if by in HUMAN and rationales is None:
        raise ValueError(f"--by {by} compares with what people marked: name its column with --rationales")
    torch_device(device)  # refuses one that is not there
    if out is not None and check_folder("--out", out).suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out must end in .html, got {out}")
    names, notes = chosen_methods(methods)
    given = read_given(text_file, text, labels, rationales, queries, most)
    if by in HUMAN and not any(map(has_marks, given.rationales or ())):
        raise ValueError(
            f"--by {by} compares with what people marked, and no text of --rationales {rationales} has a "
            "marked word: choose another measure, or another column"
        )
    model, tokenizer = open_classifier(model_name, device)
    classifier = WordClassifier(model, tokenizer)
    known = class_names(model, classifier.classes)
    right = None if given.labels is None else classes_of(given.labels, known, given.rows)
    asked = given.queries or [""] * len(given.texts)
    read = [
        classifier.read(each, query, str(row))
        for row, each, query in zip(given.rows, given.texts, asked, strict=True)
    ]
    if given.rationales is not None:
        try:
            marked_words(given.rationales, read)
        except ValueError as error:
            raise ValueError(f"--rationales {rationales}: {error}") from None
    if len(given.texts) < given.all:
        notes.append(
            f"{len(given.texts):,} of the {given.all:,} texts of {Path(text_file).name}, spread evenly"
        )
    if cut := sum(each.cut > 0 for each in read):
        notes.append(
            f"{cut:,} of {len(read):,} texts are longer than the {classifier.longest} tokens that the model "
            "takes; their ends are cut"
        )
    predicted = {int(row[0].argmax()) for row in classifier.ask([(each, _all(each)) for each in read])}
    if len(predicted) == 1 and len(read) > 1:
        notes.append(f"the model predicts {known[predicted.pop()]} for all texts: this judges one class only")

    def some(values: list[Any] | None, numbers: Sequence[int]) -> list[Any] | None:
        return None if values is None else [values[number] for number in numbers]

    kept = kept_of(model, tokenizer, read, rationales=given.rationales, seed=seed)
    if fresh:
        kept.discard(names)
    earlier = kept.methods(names)
    now = [name for name in names if name not in earlier]
    if earlier:
        count = f"{count_of(len(earlier), 'method')} of {len(names)}"
        tell(f"an interrupted run has judged {count}; --fresh judges all again")

    def judged(numbers: Sequence[int], progress: Any, methods: list[str], **kept_as: Any) -> Evaluation:
        return evaluate(
            model,
            tokenizer,
            [given.texts[number] for number in numbers],
            some(given.rationales, numbers),
            methods,
            queries=some(given.queries, numbers),
            labels=some(right, numbers),
            names=[read[number].name for number in numbers],
            seed=seed,
            correlation=True,
            progress=progress,
            **kept_as,
        )

    def remaining(found: Evaluation, numbers: Sequence[int], progress: Any) -> dict[str, Interval]:
        texts, second = some(given.texts, numbers), some(given.queries, numbers)
        assert texts is not None
        return after_shuffling(found, model, tokenizer, texts, queries=second, seed=seed, progress=progress)

    lengths = [len(each.words) for each in read]
    everything = list(range(len(read)))
    first: list[Evaluation] = []  # of the few texts that are timed
    # What is known of a method need not be judged again, but shuffled weights are asked about all.
    shuffled = min(MOST, len(read)) * len(names) // max(1, len(now))
    jobs: list[tuple[Callable[[list[int]], object], int]] = [
        (lambda numbers: first.append(judged(numbers, False, now)), len(read)),
        (lambda numbers: remaining(first[len(numbers) - 1], numbers, lambda *_: None), shuffled),
    ]
    where = next(model.parameters()).device.type
    timed = "; timing a few of them" if len(read) > TIMED and now else ""
    counts = f"{count_of(len(read), 'text')}, {count_of(len(names), 'method')}"
    tell(f"{counts}, on {where}{timed}")
    shown = Shown([])

    try:
        seconds = expected(lengths, jobs) if now else None
        if seconds is not None:
            tell(f"{'what is left' if earlier else 'all'} will take about {duration(seconds)}")
        shown = Shown([title_of(name) for name in now], seconds)
        found = judged(everything, shown, names, known=earlier, done=kept.add)
        if not found.methods:
            kept.discard(names)
            reasons = "; ".join(f"{title_of(name)}: {why}" for name, why in found.refused.items())
            raise ValueError(f"--methods: none applies to this model and these texts: {reasons}")
        if found.unmarked == found.texts:
            headings = join_and([heading_of(measure) for measure in COLUMNS if measure in HUMAN])
            notes.append(f"--rationales {rationales}: no text has a marked word; {headings} are left out")
        elif found.unmarked:
            notes.append(
                f"{found.unmarked:,} of {found.texts:,} texts have no marked word, and count for "
                "faithfulness alone"
            )
        if not _has(found, by):
            notes.append(f"no text has {heading_of(by)}: methods are sorted by comprehensiveness")
            by = FIRST
        left = kept.shuffled(list(found.methods))
        if left is None:
            left = remaining(found, everything, shown)
            kept.add_shuffled(list(found.methods), left)
        page = None
        if out is not None:
            page = judge_page(
                found,
                model,
                tokenizer,
                given.texts,
                queries=given.queries,
                labels=right,
                names=[each.name for each in read],
                title=f"Which explanation of {Path(model_name).name} to believe",
                facts=[Path(text_file).name, *_performance(found)],
                notes=notes,
                shuffled=left,
                sort=by,
                seed=seed,
                report=lambda done, total: shown(PAGE, done, total),
            )
    except BaseException as error:
        shown.stop()
        if before := kept.names(names):
            count = f"{count_of(len(before), 'method')} of {len(names)}"
            tell(f"\nthe same command goes on after {count}, which it has judged")
            if isinstance(error, KeyboardInterrupt):
                raise typer.Exit(130) from None
        raise
    finally:
        shown.stop()
    typer.echo(table_of(found, by, left))
    typer.echo(
        "Means over texts ± half of the 95 % interval. * the best, or not told apart from it by these texts. "
        "° not told to be better than random scores. In brackets: controls."
    )
    if none_beats_chance(found):
        typer.echo("No method is told to be better than random scores by any measure.")
    if found.performance:
        typer.echo(", ".join(_performance(found)))
    for note in notes:
        typer.echo(note)
    if page is not None and out is not None:
        page.save(out)
        typer.echo(f"page: {out}")
    kept.discard(names)
    return found


def count_of(number: int, noun: str) -> str:
    """A number of things, in words."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _all(text: Any) -> Any:
    import numpy as np

    return np.ones((1, len(text.words)), dtype=bool)


def _has(found: Evaluation, measure: str) -> bool:
    return any(own.measures.get(measure) is not None for own in found.methods.values())


def _performance(found: Evaluation) -> list[str]:
    return [f"{name} {value:.3f}" for name, value in found.performance.items()]
