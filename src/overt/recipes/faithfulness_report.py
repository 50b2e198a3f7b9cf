"""The comparison of explanations: methods on the same texts, intervals, ranks, tables and the picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from overt._extras import need
from overt.judge.correlation import spearman
from overt.judge.intervals import Interval, interval_over
from overt.judge.rationales.evaluation import REFERENCES
from overt.judge.rationales.methods import CONTROLS, ORACLE, POOLING, RANDOM, title_of
from overt.recipes._figures import save_figure
from overt.recipes._recipe import Grid, Outcome, Report, cell, counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

POINTS = 6  # of curves
GROUND, SHUFFLED, PLAUSIBLE = "ground_truth", "randomised", "average_precision"
# Key → heading, and whether more (1) or less (−1) is better; 0 for what should be near 0.
PROTOCOLS: dict[str, tuple[str, int]] = {
    "comprehensiveness": ("comprehensiveness ↑", 1),
    "sufficiency": ("sufficiency ↓", -1),
    "between": ("LeRF − MoRF ↑", 1),
    "normalised_comprehensiveness": ("normalised AOPC ↑", 1),
    "correlation": ("ρ with blank-out ↑", 1),
    SHUFFLED: ("ρ with shuffled weights → 0", 0),
    PLAUSIBLE: ("plausibility (AP) ↑", 1),
    GROUND: ("subject first ↑", 1),
}
# Those that say how faithful a method is. It must not be deaf to shuffled weights, but is no better for it;
# to agree with people is no faithfulness; and to agree with blank-out is asked of all methods but blank-out,
# whose mean would then be over fewer protocols than theirs.
COUNTED = tuple(
    key for key, (_, sign) in PROTOCOLS.items() if sign != 0 and key not in (PLAUSIBLE, "correlation")
)
# Is a gain that of the method or of the maps that it reads?
PAIRS = (
    ("rollout", "raw"),
    ("flow", "rollout"),
    ("rollout/gradient", "rollout"),
    ("flow/gradient", "flow"),
    ("flow/gradient", "rollout/gradient"),
    ("rollout/relevance", "rollout/gradient"),
    ("rollout/alti", "rollout"),
    ("rollout/alti", "rollout/norm"),
    ("rollout/alti", "value-zeroing"),
    ("integrated", "gradient-input"),
    ("rollout", RANDOM),
)


# --- Compare ---


def table_of(
    found: Mapping[int, dict[str, Any]], protocol: str, methods: Sequence[str]
) -> dict[str, NDArray[np.float64]]:
    """Method → (seeds, texts) of the texts for which all of these methods have a value, NaN elsewhere."""
    tables = {}
    for method in methods:
        table = np.full((len(found), max(numbers["texts"] for numbers in found.values())), np.nan)
        for row, numbers in enumerate(found.values()):
            of_method = numbers["methods"].get(method)
            if of_method is not None and protocol in of_method["by_text"]:
                values = [math.nan if value is None else value for value in of_method["by_text"][protocol]]
                table[row, of_method["texts"]] = values
        tables[method] = table
    known = np.logical_and.reduce([~np.isnan(table) for table in tables.values()])
    return {method: np.where(known, table, np.nan) for method, table in tables.items()}


def compared(found: Mapping[int, dict[str, Any]], protocol: str) -> list[str]:
    """Methods that a protocol compares: those that have a value for at least half as many texts as any."""
    counts: dict[str, int] = {}
    for numbers in found.values():
        for method, each in numbers["methods"].items():
            values = each["by_text"].get(protocol, ())
            counts[method] = counts.get(method, 0) + sum(value is not None for value in values)
    most = max(counts.values(), default=0)
    return [method for method, count in counts.items() if count and count >= most / 2 and method != ORACLE]


def cells_of(found: Mapping[int, dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Protocol → method → mean, low, high, texts, seeds, whether it leads and beats chance.

    Of texts there are two numbers: those of the model that has the fewest, and of the one that has the most.

    All methods are compared on the same texts; the best order on those of them that it has. A method leads
    if the texts do not tell it apart from the best one, and beats chance if they tell that it is better than
    random scores: the interval of the difference does not hold zero.
    """
    cells: dict[str, dict[str, list[float]]] = {}
    for protocol in PROTOCOLS:
        methods = compared(found, protocol)
        if not methods:
            continue
        tables = table_of(found, protocol, methods)
        if any(ORACLE in numbers["methods"] for numbers in found.values()) and protocol != SHUFFLED:
            tables[ORACLE] = table_of(found, protocol, [*methods, ORACLE])[ORACLE]
        leads, beats = told_apart(tables, protocol)
        cells[protocol] = {}
        for method, table in tables.items():
            each, known = interval_over(table), (~np.isnan(table)).sum(axis=1)
            if each.texts:
                texts = [int(known.min()), int(known.max())]
                told = [float(method in names) for names in (leads, beats)]
                cells[protocol][method] = [*each[:3], *texts, each.seeds, *told]
    return cells


def told_apart(tables: Mapping[str, NDArray[np.float64]], protocol: str) -> tuple[set[str], set[str]]:
    """Methods that are the best or not told apart from it, and those that are told to beat random scores.

    Args:
        tables: method → (seeds, texts), of the same texts.
        protocol: of `PROTOCOLS`; nothing leads or beats where none is better for more or for less.
    """
    sign = PROTOCOLS[protocol][1]
    apart = (*CONTROLS, *(REFERENCES if protocol == "correlation" else ()))
    names = [method for method in tables if method not in apart]
    if sign == 0 or not names:
        return set(), set()
    best = max(names, key=lambda method: sign * interval_over(tables[method]).mean)

    def low(one: str, other: str) -> float:
        """Of the interval of how much better one is; NaN if there is none, as of a single text."""
        return interval_over(sign * (tables[one] - tables[other])).low

    leads = {method for method in names if method == best or not low(best, method) > 0.0}
    controlled = [method for method in tables if method not in CONTROLS] if RANDOM in tables else []
    return leads, {method for method in controlled if low(method, RANDOM) > 0.0}


def pairs_of(found: Mapping[int, dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Protocol → "one − other" → mean difference, low, high, texts and seeds, over the texts of both."""
    pairs: dict[str, dict[str, list[float]]] = {}
    for protocol in PROTOCOLS:
        for one, other in PAIRS:
            tables = table_of(found, protocol, [one, other])
            each: Interval = interval_over(tables[one] - tables[other])
            if each.texts:
                pairs.setdefault(protocol, {})[f"{title_of(one)} − {title_of(other)}"] = list(each)
    return pairs


def means_of(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Protocol → method → mean over the same texts, of one model."""
    return {
        protocol: {method: values[0] for method, values in methods.items()}
        for protocol, methods in cells_of({0: found}).items()
    }


def seconds_of(found: Mapping[int, dict[str, Any]]) -> dict[str, float]:
    """Method → seconds of a text, of the model with the least: other work may have slowed the others."""
    methods = dict.fromkeys(method for numbers in found.values() for method in numbers["methods"])
    return {
        method: min(float(numbers["methods"][method]["seconds"]) for numbers in found.values())
        for method in methods
        if all(method in numbers["methods"] for numbers in found.values())
    }


def beaten_of(cells: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Protocol → method → share of the other methods that do worse in a model; equal ones count as half.

    Unlike a rank, a share is as good among few methods as among many. Controls have none, and blank-out has
    none where methods are compared with it.
    """
    from scipy.stats import rankdata  # type: ignore[import-untyped, unused-ignore]

    found = {}
    for protocol, methods in cells.items():
        sign = PROTOCOLS[protocol][1]
        apart = (*CONTROLS, *(REFERENCES if protocol == "correlation" else ()))
        names = [method for method in methods if method not in apart]
        if len(names) < 2:
            continue
        means = np.array([methods[name][0] for name in names])
        better = rankdata(-np.abs(means) if sign == 0 else sign * means) - 1
        found[protocol] = dict(zip(names, (better / (len(names) - 1)).tolist(), strict=True))
    return found


# --- Report ---


def order_of(config: Mapping[str, Any]) -> dict[str, tuple[float, dict[str, float]]]:
    """Method → the share of others that it beats, and the same by protocol, mean over rows.

    The first is, for each row, the mean over protocols that are `COUNTED`; then over the rows of the same
    data, and over data, so that each kind of network weighs the same. The best comes first, but methods that
    apply to fewer than half of the rows come last.
    """
    shares: dict[str, dict[str, list[float]]] = {}
    rows: dict[str, dict[str, list[float]]] = {}  # method → data → of each row
    data = {name: each for each, names in by_data(config).items() for name in names}
    for name, cells in config["cells"].items():
        own: dict[str, list[float]] = {}
        for protocol, methods in beaten_of(cells).items():
            for method, share in methods.items():
                shares.setdefault(method, {}).setdefault(protocol, []).append(share)
                if protocol in COUNTED:
                    own.setdefault(method, []).append(share)
        for method, values in own.items():
            rows.setdefault(method, {}).setdefault(data[name], []).append(float(np.mean(values)))
    found = {}
    for method, by_protocol in shares.items():
        means = {protocol: float(np.mean(values)) for protocol, values in by_protocol.items()}
        by_kind = [float(np.mean(values)) for values in rows.get(method, {}).values()]
        found[method] = (float(np.mean(by_kind)) if by_kind else math.nan, means)

    def place(method: str) -> tuple[bool, bool, float]:
        share = found[method][0]
        return 2 * rows_with(config, method) < len(config["cells"]), math.isnan(share), -share

    return {method: found[method] for method in sorted(found, key=place)}


def rows_with(config: Mapping[str, Any], method: str) -> int:
    """How many rows a method applies to."""
    return sum(any(method in found for found in cells.values()) for cells in config["cells"].values())


def by_data(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Data → the rows of models that were judged on them, "DATA FORM"."""
    found: dict[str, list[str]] = {}
    for name in config["cells"]:
        found.setdefault(name.removesuffix(f" {config['rows'][name]['form']}"), []).append(name)
    return found


def overview(config: Mapping[str, Any]) -> Grid:
    """How many of the others each method beats, by protocol and by data, and what it costs."""
    order = order_of(config)
    shown = [key for key in PROTOCOLS if any(key in cells for cells in config["cells"].values())]
    data = by_data(config)
    parts = {
        each: order_of({**config, "cells": {name: config["cells"][name] for name in rows}})
        for each, rows in data.items()
        if len(data) > 1
    }
    lines = []
    for method, (share, means) in order.items():
        cells = [_percent(share), *(_percent(part.get(method, (None,))[0]) for part in parts.values())]
        cells += [_percent(means.get(key)) for key in shown]
        for rows in data.values():
            seconds = [found[method] for name in rows if method in (found := config["seconds"][name])]
            cells.append(f"{1000 * min(seconds):,.0f}" if seconds else "–")
        lines.append((title_of(method), [*cells, str(rows_with(config, method))]))
    headings = ["faithfulness", *parts, *(PROTOCOLS[key][0].rstrip(" ↑↓") for key in shown)]
    times = [f"ms a text, {each}" for each in data] if parts else ["ms a text"]
    title = "How many of the other methods each one beats, in %, and its cost"
    return Grid(title, [*headings, *times, "rows"], lines)


def _percent(share: float | None) -> str:
    return "–" if share is None or math.isnan(share) else f"{100 * share:.0f}"


def row_grid(config: Mapping[str, Any], name: str) -> Grid:
    """All methods and protocols of a model, with intervals."""
    cells = config["cells"][name]
    methods = [*order_of(config), *CONTROLS]
    shown = [key for key in PROTOCOLS if key in cells]
    counts = []
    for key in shown:
        first = cells[key].get(RANDOM) or next(iter(cells[key].values()))
        total = config["rows"][name]["texts"]
        fewest, most = (int(count) for count in first[3:5])
        alike = f"{most} ({total - most})"
        counts.append(alike if fewest == most else f"{fewest} to {most} ({total - most} to {total - fewest})")
    lines = [("texts of a model (skipped)", [*counts, ""])]
    refused = config["refused"][name]
    for method in methods:
        if method in refused:
            lines.append((title_of(method), ["–"] * (len(shown) + 1)))
            continue
        # The best order is searched for before it is asked for, as the normalised measures need it.
        seconds = None if method == ORACLE else config["seconds"][name].get(method)
        time = "–" if seconds is None else f"{1000 * seconds:,.0f}"
        values = [_marked(cells[key].get(method), key, method) for key in shown]
        lines.append((title_of(method), [*values, time]))
    row = config["rows"][name]
    seeds = max(int(values[5]) for found in cells.values() for values in found.values())
    title = f"{name}: {row['texts']} texts, {seeds} model{'s' if seeds > 1 else ''}"
    return Grid(title, [*(PROTOCOLS[key][0] for key in shown), "ms a text"], lines)


def _with_interval(values: Sequence[float | None] | None) -> str:
    if values is None or values[0] is None:
        return "–"
    mean, low, high = values[:3]
    if low is None or high is None or math.isnan(low):
        return cell(mean)
    return f"{cell(mean)} [{cell(low)}, {cell(high)}]"


def _marked(values: Sequence[float | None] | None, key: str, method: str) -> str:
    """As `_with_interval`; * for those that lead, ° for those that do not beat random scores."""
    text = _with_interval(values)
    if values is None or values[0] is None or PROTOCOLS[key][1] == 0 or method in CONTROLS:
        return text
    return f"{text}{'*' if values[6] else ''}{'' if values[7] else '°'}"


def pairs_grid(config: Mapping[str, Any], name: str) -> Grid:
    """Paired differences of a model."""
    pairs = config["pairs"][name]
    shown = [key for key in PROTOCOLS if key in pairs and key != SHUFFLED]
    names = dict.fromkeys(pair for key in shown for pair in pairs[key])
    lines = [(pair, [_with_interval(pairs[key].get(pair)) for key in shown]) for pair in names]
    return Grid(f"{name}: differences on the same texts", [PROTOCOLS[key][0] for key in shown], lines)


def report(outcome: Outcome) -> Report:
    """The overview, and every model's methods and differences."""
    config = outcome.config
    grids = [overview(config)]
    for name in config["cells"]:
        grids += [row_grid(config, name), pairs_grid(config, name)]
    return Report([grid for grid in grids if grid.rows], notes_of(outcome))


def disagreements(config: Mapping[str, Any]) -> list[str]:
    """How far protocols order methods alike: the mean rank correlation of each two, over methods, by row."""
    pairs: dict[tuple[str, str], list[float]] = {}
    for cells in config["cells"].values():
        shares = beaten_of(cells)
        keys = [key for key in PROTOCOLS if key in shares and PROTOCOLS[key][1] != 0]
        for place, one in enumerate(keys):
            for other in keys[place + 1 :]:
                both = [method for method in shares[one] if method in shares[other]]
                values = [np.array([shares[key][method] for method in both]) for key in (one, other)]
                pairs.setdefault((one, other), []).append(float(spearman(values[0][None], values[1])[0]))
    means = {pair: float(np.nanmean(values)) for pair, values in pairs.items() if not np.isnan(values).all()}
    if not means:
        return []
    low, high = min(means, key=lambda pair: means[pair]), max(means, key=lambda pair: means[pair])

    def told(pair: tuple[str, str]) -> str:
        one, other = (PROTOCOLS[key][0].rstrip(" ↑↓") for key in pair)
        return f"{one} and {other} ({cell(means[pair])})"

    return [
        f"Protocols do not agree alike on the order of methods. Rank correlation over methods, mean over "
        f"rows: most for {told(high)}, least for {told(low)}."
    ]


def notes_of(outcome: Outcome) -> list[str]:
    """What a reader needs to know."""
    config = outcome.config
    notes = [
        "Words are deleted and the text is tokenized again; always the class that is predicted from the "
        "whole text. Comprehensiveness and sufficiency are means over 1, 5, 10, 20 and 50 % of the words. "
        f"LeRF − MoRF is the mean distance of both curves at {POINTS} points. Normalised AOPC is 0 for the "
        "worst and 1 for the best order, of texts up to 30 words. ρ is Spearman's: of the scores' sizes "
        "with those of blank-out, which is 1 for blank-out itself; and with the same method's scores on a "
        "copy of the model whose weights are shuffled, which should be near 0. Plausibility is average "
        "precision against people's rationales: agreement with people, not with the model.",
        "Subject first: the share of sentences in which the subject's noun has the highest score, of those "
        "that the model gets right and whose answer flips when the subject's number alone is flipped, so "
        "that this word is known to decide.",
        "[ ] are 95 % intervals for other texts and, with several models, other seeds: the half-width is "
        "√(a² + b²), a of Student's interval of the models' means and b of the texts' means. All methods of "
        "a column are compared on the same texts, those for which each has a value; “skipped” are the "
        "others. A method that has a value for fewer than half of the texts is in no comparison of its "
        "column. The best order is on those of these texts that have up to 30 words, and is the best for "
        "the normalised AOPC alone.",
        "A star marks the best method of a column, and those that texts and seeds do not tell apart from it; "
        "° marks methods that they do not tell to be better than random scores. Both are by the interval of "
        "the difference on the same texts.",
        "A method beats another where its mean is better, by however little: neighbours often do not differ, "
        "as the intervals and differences below show. The share is of the methods that apply to the "
        "same row, which is a kind of data with a form of attention; “rows” says to how many a method does, "
        "and those of fewer than half of them come last. “Faithfulness” is the mean of the columns named "
        "after data, so that each kind of data weighs the same; with one kind there are none, and it is that "
        "of this kind. Such a column is the mean, over its rows, of all protocols but three: plausibility, "
        "which is agreement with people; shuffled weights, which a method must not be deaf to, but is no "
        "better for; and agreement with blank-out, in which blank-out has no part. A method that does not "
        "apply to some data is averaged over the rest. Columns named after protocols are means over rows. "
        "Controls are not counted.",
        "Each interval and each difference is for itself. There are hundreds: where nothing differs, 1 of 20 "
        "says that something does.",
        "ms a text is the median time of one text's scores, for methods that read maps with the trace, "
        "beside what else was judged at the time, which slows some models: for each method, that of the "
        "model in which it was fastest. "
        f"Hardware: {_hardware(config)}.",
        "The picture: above, a point is the share of other methods that a method beats, as in the table, and "
        "its line goes from the least to the most in any row of the table. Below are the time of a text and "
        "means with their intervals, by the form of attention; dotted lines are random scores, dashed ones "
        "the best order. Right is better, except for shuffled weights, where 0 is.",
        *disagreements(config),
    ]
    if config["missing"] and not config["quick"]:
        left = ", ".join(f"{name} ({counted(count, 'model')})" for name, count in config["missing"].items())
        notes.append(f"Not measured yet: {left}.")
    if any(POOLING in methods for methods in config["seconds"].values()):
        notes.append(
            "The classifier of reviews reads its words' states, and pools them. Methods that read maps show "
            "what the first token of each window draws on, as is usual, but that token has no part in the "
            "answer there."
        )
    for name, tried in config["tried"].items():
        notes.append(
            f"{name}: the model was not trained on the grammar. It is judged on those of the first {tried:,} "
            "sentences that it gets right, and whose answer flips with the subject's number, so that its "
            "accuracy is 1 by choice. Its tokenizer knows all words; what stands for an unknown one in "
            "blank-out and integrated gradients is a token that ends texts."
        )
    if config["half_difference"]:
        moved = max(config["half_difference"].values())
        notes.append(
            "On a GPU, the encoder reads reviews with deleted or blanked-out words with float16 products: "
            f"probabilities from whole reviews differ by at most {moved:.1g} from those in float32. Maps and "
            "gradients of reviews are read with TF32 products."
        )
    if config["quick"]:
        notes.append(
            "A trial on a few short texts of generated data, with one model of each form: it shows that "
            "everything runs, and its intervals show how little it says."
        )
    reasons: dict[str, dict[str, list[str]]] = {}
    for name, refused in config["refused"].items():
        for method, reason in refused.items():
            reasons.setdefault(reason, {}).setdefault(name, []).append(title_of(method))
    for reason, by_row in reasons.items():
        told = "; ".join(f"{name}: {', '.join(methods)}" for name, methods in by_row.items())
        notes.append(f"–, not applicable, and in no comparison: {told} ({reason}).")
    return notes


def _hardware(config: Mapping[str, Any]) -> str:
    """What models were judged on: one piece of hardware, or several with the names of their rows."""
    rows: dict[str, list[str]] = {}
    for name, found in config["hardware"].items():
        rows.setdefault(" and ".join(found), []).append(name)
    if len(rows) == 1:
        return next(iter(rows))
    return "; ".join(f"{hardware} ({', '.join(names)})" for hardware, names in rows.items())


def draw(outcome: Outcome, path: Path) -> None:
    """Methods, the best first, by protocol: what they beat in all models, then values of each data set.

    In the first row of panels a point is the share of other methods that a method beats, as `overview` has
    it, and its line goes from the least to the most in any row of the table; the first panel has what methods
    are ordered by. Below, the first panel is the time of a text, and in the others a point is a
    mean, and its line the 95 % interval; dotted lines are scores at random, dashed ones the best order of
    deletion. Right is better in every panel, except for shuffled weights, where 0 is.
    """
    need("matplotlib", "view")
    from matplotlib.figure import Figure

    config = outcome.config
    methods = list(order_of(config))
    by_data: dict[str, list[str]] = {}
    for name in config["cells"]:
        by_data.setdefault(name.removesuffix(f" {config['rows'][name]['form']}"), []).append(name)
    shown = [key for key in PROTOCOLS if any(key in cells for cells in config["cells"].values())]
    forms = list(dict.fromkeys(form_of(config, name) for name in config["rows"]))
    rows = len(by_data) + 1
    figure: Any = Figure(figsize=(2.0 + 1.6 * (len(shown) + 1), rows * (0.55 + 0.155 * len(methods)) + 0.3))
    figure.set_layout_engine("constrained", hspace=0.03)
    axes = figure.subplots(rows, len(shown) + 1, squeeze=False, sharey=True)
    axes[0][0].set_title("faithfulness, all", fontsize=8, fontweight="bold")
    draw_beaten(axes[0][0], config, None, methods)
    for axis, key in zip(axes[0][1:], shown, strict=True):
        axis.set_title(PROTOCOLS[key][0].rstrip(" ↑↓"), fontsize=8)
        draw_beaten(axis, config, key, methods)
    axes[0][0].set_ylabel("% of others beaten,\nmean and range", fontsize=8)
    for panels, (data, names) in zip(axes[1:], by_data.items(), strict=True):
        draw_seconds(panels[0], config, names, methods, forms)
        panels[0].set_ylabel(data, fontsize=8)
        for axis, key in zip(panels[1:], shown, strict=True):
            if not any(key in config["cells"][name] for name in names):
                axis.set_axis_off()
                continue
            for name in names:
                draw_values(axis, config, name, key, methods, forms)
            if PROTOCOLS[key][1] < 0:
                axis.invert_xaxis()
            elif PROTOCOLS[key][1] == 0:
                axis.axvline(0, color="black", linewidth=0.6)
    for axis in axes.flat:
        if axis.axison:
            draw_stripes(axis, len(methods))
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=6.5)
        axis.tick_params(axis="y", length=0)
    axes[0][0].set_yticks(range(len(methods)), [title_of(method) for method in methods])
    axes[0][0].set_ylim(len(methods) - 0.4, -0.6)
    figure.legend(
        handles=_key(forms), loc="outside lower center", ncols=len(forms) + 4, fontsize=7, frameon=False
    )
    save_figure(figure, path)


def _key(forms: Sequence[str]) -> list[Any]:
    """What the marks of the picture stand for."""
    from matplotlib.lines import Line2D

    return [
        *(
            Line2D([], [], color=f"C{place}", marker="o", markersize=3, label=f"{form} attention")
            for place, form in enumerate(forms)
        ),
        Line2D([], [], color="black", linewidth=0.8, label="line: 95 % interval"),
        Line2D(
            [],
            [],
            color="black",
            linewidth=0,
            marker="o",
            markerfacecolor="white",
            markersize=3,
            label="open: not told to beat random",
        ),
        Line2D([], [], color="black", linewidth=0.8, linestyle=":", label="random scores"),
        Line2D([], [], color="black", linewidth=0.8, linestyle="--", label="best order of deletion"),
    ]


def draw_stripes(axis: Any, rows: int) -> None:
    """Every other row in grey; as one shape, since a file of many is large."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    corners = [(0.0, -0.5), (1.0, -0.5), (1.0, 0.5), (0.0, 0.5), (0.0, -0.5)]
    stripes = [Outline([(x, y + row) for x, y in corners], closed=True) for row in range(0, rows, 2)]
    whole = Outline.make_compound_path(*stripes)
    place = axis.get_yaxis_transform()
    axis.add_patch(PathPatch(whole, color="0.95", linewidth=0, zorder=0, transform=place))


def draw_lines(axis: Any, lines: Sequence[tuple[float, float, float]], **how: Any) -> None:
    """Horizontal lines as one shape: each one's height, start and end."""
    ends = [
        end for height, start, stop in lines for end in ((start, height), (stop, height), (math.nan,) * 2)
    ]
    axis.plot(*zip(*ends, strict=True), solid_capstyle="butt", **how)


def draw_beaten(axis: Any, config: Mapping[str, Any], only: str | None, methods: Sequence[str]) -> None:
    """The share of others that a method beats, as `order_of` has it, with the least and the most of rows.

    Args:
        axis: to draw on.
        config: of the outcome.
        only: one protocol; None for the mean over all that are counted.
        methods: from the top down.
    """
    order, lines = order_of(config), list[tuple[float, float, float]]()
    keys = COUNTED if only is None else [only]
    every = [beaten_of(cells) for cells in config["cells"].values()]
    for height, method in enumerate(methods):
        own = [[found[key][method] for key in keys if method in found.get(key, {})] for found in every]
        shares = [100 * float(np.mean(values)) for values in own if values]
        if shares:
            share, means = order[method]
            lines.append((height, min(shares), max(shares)))
            axis.plot(100 * (share if only is None else means[only]), height, "ok", markersize=2.5)
    if lines:
        draw_lines(axis, lines, color="0.6", linewidth=1, zorder=1)
    axis.set_xlim(-4, 104)


def form_of(config: Mapping[str, Any], name: str) -> str:
    """A row's form of attention; some rows write evolving attention with a capital letter."""
    form = str(config["rows"][name]["form"])
    return form.lower() if form == "Evolving" else form


def draw_seconds(
    axis: Any, config: Mapping[str, Any], names: Sequence[str], methods: Sequence[str], forms: Sequence[str]
) -> None:
    """The time of a text by method; right is faster."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for name in names:
        spent = config["seconds"][name]
        form = form_of(config, name)
        known = [height for height, method in enumerate(methods) if spent.get(method)]
        times = [1000 * spent[methods[height]] for height in known]
        axis.plot(times, known, "o", color=f"C{forms.index(form)}", markersize=2)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.invert_xaxis()
    axis.set_title("ms a text", fontsize=8)


def draw_values(
    axis: Any,
    config: Mapping[str, Any],
    name: str,
    key: str,
    methods: Sequence[str],
    forms: Sequence[str],
) -> None:
    """Means and intervals of a model's methods, a little above or below those of other forms of attention."""
    found = config["cells"][name].get(key, {})
    any_beats = PROTOCOLS[key][1] != 0
    known = [
        (height, [*found[method][:3], found[method][7] if any_beats else 1.0])
        for height, method in enumerate(methods)
        if method in found
    ]
    place = forms.index(form_of(config, name))
    colour = f"C{place}"
    heights = [height + 0.24 * (place - (len(forms) - 1) / 2) for height, _ in known]
    whole = [
        (height, values[1], values[2])
        for height, (_, values) in zip(heights, known, strict=True)
        if None not in values and not math.isnan(values[1])
    ]
    if whole:
        draw_lines(axis, whole, color=colour, linewidth=0.8)
    for beats, face in ((True, colour), (False, "white")):
        some = [place for place, (_, values) in enumerate(known) if bool(values[-1]) == beats]
        axis.plot(
            [known[place][1][0] for place in some],
            [heights[place] for place in some],
            "o",
            color=colour,
            markerfacecolor=face,
            markeredgewidth=0.6,
            markersize=2.4,
        )
    for control, style in ((RANDOM, ":"), (ORACLE, "--")):
        if control in found:
            axis.axvline(found[control][0], color=colour, linewidth=0.6, linestyle=style)
