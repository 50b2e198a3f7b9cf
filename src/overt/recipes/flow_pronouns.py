"""Figure 4 of Abnar & Zuidema 2020: which of two names does a pronoun's place look back to?

A masked language model reads a text whose pronoun is masked, a causal one the text before the pronoun. It
gives the probabilities of "he" and "she", and raw attention, rollout and flow of that place show which name
it reads. The paper shows two sentences; here are two written for this package, and the GAP texts, whose names
are annotated (Webster et al. 2018), with rules that know only where the names stand.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

import overt
from overt._extras import need
from overt._files import write_whole
from overt._workers import Tell, side_by_side
from overt.data import gap
from overt.data.files import data_folder
from overt.data.gap import HER, HIS, Case
from overt.recipes import flow_measure
from overt.recipes._figures import PNG_DPI
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request, cell
from overt.recipes._runs import check_model, earlier_result, finish_run, finite, read_model_config
from overt.recipes._training import be_quiet, one_thread, progress_bar, torch_device
from overt.recipes.flow_measure import METHODS, layer_names
from overt.recipes.text_maps import tokens_in

LONGEST = 256  # tokens; longer texts are left out and counted
LONG, AFTER, LOST = "long", "after", "lost"  # why texts are left out
CAUSAL = ("ForCausalLM", "LMHeadModel")  # how names of classes end
FIELD = ", receptive field"
READ = {  # name → method, and whether it is divided by the receptive field; raw rows would stay as they are
    "raw": ("raw", False),
    "rollout": ("rollout", False),
    f"rollout{FIELD}": ("rollout", True),
    "flow": ("flow", False),
    f"flow{FIELD}": ("flow", True),
}
TOGETHER = 32  # texts of a part, which an interruption loses
TIE = 1e-9  # shares that differ by less are equal
GOALS = {"right": "the right name", "model": "the name that the model needs"}
Reading = dict[str, Any]


def _case(text: str, pronoun: str, his: str, her: str) -> Case:
    """A sentence whose first name goes with "his" and whose second goes with "her"."""

    def place(word: str) -> tuple[int, int]:
        start = text.index(word)
        return start, start + len(word)

    return Case(text, place(pronoun), (place(his), place(her)))


# Like the paper's two: a noun without a gender and a woman's name; a woman's name and a man's.
SENTENCES = {
    "The pilot wrote to Emma about [?] journey.": _case(
        "The pilot wrote to Emma about her journey.", "her", "pilot", "Emma"
    ),
    "Laura reminded David of [?] promise.": _case(
        "Laura reminded David of his promise.", "his", "David", "Laura"
    ),
}


def run(request: Request) -> Outcome:
    """Trace every pronoun. Nothing is trained, so there is one seed."""
    if request.model is None:
        raise ValueError("flow-figure-4 needs --model: give an English masked or causal language model")
    if request.seeds != 1:
        raise ValueError(f"--seeds must be 1 for flow-figure-4, which trains nothing; got {request.seeds}")
    check_model(request.model)
    folder = data_folder(request.data)
    cases = [] if folder is None else gap.read(folder)
    Random(0).shuffle(cases)
    cases = cases[: request.options["examples"]]
    settings = {
        "version": overt.__version__,
        "model": request.model,
        "gap": len(cases),
        "longest": LONGEST,
        "methods": list(READ),
        "cases": hashlib.sha256(repr([cases, SENTENCES]).encode()).hexdigest(),
    }
    row = earlier_result(request.out, settings, request.fresh)
    if row is None:
        row = finite(_measure(request, cases))
        finish_run(request.out, row)
    config = settings | {"model": Path(request.model).name, "his": list(HIS), "her": list(HER)}
    return Outcome(config, {0: row})


def report(outcome: Outcome) -> Report:
    """Our own sentences, and GAP if its data were given."""
    row = outcome.per_seed[0]
    causal = row["kind"] == "causal"
    place = "the last position before the pronoun" if causal else "the masked position"
    blanked = "hiding (attention_mask = 0)" if causal else "masking"
    notes = [
        f"{outcome.config['model']} is a {row['kind']} language model. Our own sentences: of the attention "
        f'that {place} pays to both names, the share of the name that "his" would refer to, and the model\'s '
        'share of "he", "him" and "his".',
        "The attention to a name of several tokens is their mean; where both names have the same, a text "
        "counts half. On GAP, the right name is the annotators' choice; the model's is the name whose "
        f"{blanked} lowers the probability of the true pronoun's gender more. “Receptive field” divides "
        "by the values of uniform maps, in which a causal model's first tokens have more paths. The "
        "rules know no attention: always the name that stands first in the text, or the one nearest to "
        "the pronoun.",
    ]
    if not outcome.config["gap"]:
        notes.append("No GAP data were given with --data: only our own sentences were measured.")
        return Report(_grids(row), notes)
    left = row["left_out"]
    notes.append(
        f"GAP: {outcome.config['gap']} texts of its development and validation sets in which one name is "
        f"right. Left out: {left[LONG]} with more than {outcome.config['longest']} tokens, {left[AFTER]} in "
        "which a name follows the pronoun, which a causal model has not read, "
        f"{left[LOST]} in which a name has no tokens."
    )
    if "gap" in row:
        margin = 1.96 * 0.5 / row["gap"]["texts"] ** 0.5
        notes.append(
            f"With {row['gap']['texts']:,} texts, the 95 % interval of a share is at most ±{margin:.3f}."
        )
    return Report(_grids(row), notes)


def load_model(path: str) -> tuple[Any, Any]:
    """A masked or causal language model with its own head, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

    refusal = (
        f"--model {path} must be a masked or causal language model with its own head and a fast tokenizer"
    )
    causal = str((read_model_config(path).get("architectures") or [""])[0]).endswith(CAUSAL)
    auto: Any = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        model, info = auto.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    except (ValueError, KeyError):
        raise ValueError(refusal) from None
    # A head that is missing from the weights has random weights now, and would give answers all the same.
    if info["missing_keys"] or not tokenizer.is_fast or not (causal or tokenizer.mask_token):
        raise ValueError(refusal)
    return model.eval(), tokenizer


class Part(NamedTuple):
    """Some of the GAP texts, and the file for what the model makes of them."""

    cases: list[Case]
    file: Path


class Shared(NamedTuple):
    """What all parts need: the model's path and the device."""

    model: str
    device: str


@lru_cache(maxsize=1)
def _reader(shared: Shared) -> Reader:
    be_quiet()
    model, tokenizer = load_model(shared.model)
    return reader_of(model.to(torch_device(shared.device)), tokenizer)


def perform(task: Part, shared: Shared, tell: Tell) -> dict[str, Any]:
    """Read some of the texts, unless an earlier run has."""
    if task.file.exists():
        tell(len(task.cases))
    else:
        readings = []
        for case in task.cases:
            readings.append(_reader(shared).read(case))
            tell(1)
        write_whole(task.file, json.dumps(readings))
    return {"readings": json.loads(task.file.read_text())}


def _measure(request: Request, cases: list[Case]) -> dict[str, Any]:
    """Readings of our own sentences, and statistics of GAP."""
    shared = Shared(request.model or "", request.device)
    reader = _reader(shared)
    own = {sentence: reader.read(case) for sentence, case in SENTENCES.items()}
    for sentence, reading in own.items():
        if isinstance(reading, str):
            raise ValueError(
                f"--model {request.model} must read English, but its tokenizer loses words of {sentence!r}"
            )
    row: dict[str, Any] = {"kind": reader.kind, "own": own, "left_out": dict.fromkeys((LONG, AFTER, LOST), 0)}
    folder = request.out / "checkpoints"  # deleted when the run is finished
    folder.mkdir(exist_ok=True)
    parts = [
        Part(cases[start : start + TOGETHER], folder / f"texts-{start}.json")
        for start in range(0, len(cases), TOGETHER)
    ]
    workers = min(request.options["workers"] or 1, max(1, len(parts)))
    readings: dict[str, list[Any]] = {}
    with progress_bar(request.console) as progress:
        bar = progress.add_task("tracing GAP", total=len(cases))

        def tell(texts: int) -> None:
            progress.update(bar, advance=texts)

        if workers > 1:
            _reader.cache_clear()
            done: Iterable[tuple[Part, Any]] = side_by_side(parts, perform, shared, workers, one_thread, tell)
        else:
            done = ((part, perform(part, shared, tell)) for part in parts)
        for part, found in done:
            readings[part.file.name] = found["readings"]
    _reader.cache_clear()
    known = []
    for part in parts:
        for case, reading in zip(part.cases, readings[part.file.name], strict=True):
            if isinstance(reading, str):
                row["left_out"][reading] += 1
            else:
                known.append((case, reading))
    return row | ({"gap": statistics_of(known)} if known else {})


def statistics_of(known: Sequence[tuple[Case, Reading]]) -> dict[str, Any]:
    """How often methods and rules prefer the right name, and the one that the model needs."""

    def agreement(chosen: Sequence[float], other: Sequence[int]) -> float:
        return sum(1 - abs(a - b) for a, b in zip(chosen, other, strict=True)) / len(known)

    def preferred(method: str, layer: int) -> list[float]:
        return [_preferred(reading["first"][method][layer]) for _, reading in known]

    right, blanked = [case.right or 0 for case, _ in known], [reading["blanked"] for _, reading in known]
    first = [first_name(case) for case, _ in known]
    nearest = [nearest_name(case) for case, _ in known]
    methods = known[0][1]["first"]
    layers = range(len(methods["raw"]))
    goals = {"right": right, "model": blanked}
    sinks = torch.tensor([[reading["sink"][method] for method in METHODS] for _, reading in known])
    return {
        "texts": len(known),
        "feminine": sum(case.feminine for case, _ in known) / len(known),
        "pronoun": sum((reading["his"] < 0.5) == case.feminine for case, reading in known) / len(known),
        "model_is_right": agreement(right, blanked),
        **{
            goal: {
                method: [agreement(preferred(method, layer), names) for layer in layers] for method in methods
            }
            for goal, names in goals.items()
        },
        "rules": {
            goal: {"first name": agreement(first, names), "nearest name": agreement(nearest, names)}
            for goal, names in goals.items()
        },
        "sink": dict(zip(METHODS, sinks.double().mean(dim=0).tolist(), strict=True)),
    }


def _preferred(share: float) -> float:
    """Index of the name with the greater share, given that of the first; one half if both have the same."""
    return 0.0 if share > 0.5 + TIE else 1.0 if share < 0.5 - TIE else 0.5


def first_name(case: Case) -> int:
    """The rule that takes the name that stands first in the text."""
    return int(case.names[1][0] < case.names[0][0])


def nearest_name(case: Case) -> int:
    """The rule that takes the name nearest to the pronoun, in letters; the first of two equally near."""
    start, end = case.pronoun
    gaps = [start - last if last <= start else first - end for first, last in case.names]
    return int(gaps[1] < gaps[0])


class Reader(ABC):
    """Reads pronouns with a model.

    Attributes:
        kind: of the language model: "masked" or "causal".
    """

    kind = ""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        vocabulary = tokenizer.get_vocab()
        # byte-level tokenizers keep the space before a word
        lead = next((lead for lead in ("Ġ", "▁", "") if f"{lead}his" in vocabulary), "")

        def codes(words: tuple[str, ...]) -> list[int]:
            return [vocabulary[lead + word] for word in words if lead + word in vocabulary]

        self.his, self.her = codes(HIS), codes(HER)
        if not self.his or not self.her:
            raise ValueError("--model must have he, him or his, and she, her or hers, as single tokens")

    def read(self, case: Case) -> Reading | str:
        """What the model makes of one case; why it is left out, if it is.

        "his" is p(his) given his or her, "first" each method's share of the first of the two names by layer,
        "blanked" the index of the name without which p(true gender) falls more, and "sink" the share of the
        first position in a method's row, by layer.
        """
        if not self._sees(case):
            return AFTER
        text, moved = self._text(case)
        coded = self.tokenizer(text, return_tensors="pt", return_offsets_mapping=True)
        offsets = coded.pop("offset_mapping")[0].tolist()
        inputs = {name: value.to(self.model.device) for name, value in coded.items()}
        if inputs["input_ids"].shape[1] > LONGEST:
            return LONG
        names = [tokens_in(offsets, *span) for span in moved]
        place = self._place(inputs["input_ids"][0])
        if place is None or not all(names):
            return LOST
        trace = overt.trace(self.model, inputs, tokenizer=self.tokenizer)
        first, sink = {}, {}
        for name, (method, field) in READ.items():
            row = trace.read(method, place, receptive_field=field)[0, :, 0]  # (layer, token)
            to_first, to_second = (row[:, places].mean(dim=-1) for places in names)
            first[name] = (to_first / (to_first + to_second)).tolist()
            if not field:
                sink[method] = (row[:, 0] / row.sum(dim=-1)).tolist()
        his = self._his(inputs, place)
        falls = [his - self._his(self._blank(inputs, places), place) for places in names]
        drops = [-fall if case.feminine else fall for fall in falls]
        return {"his": his, "first": first, "sink": sink, "blanked": int(drops[1] > drops[0])}

    @torch.no_grad()
    def _his(self, inputs: dict[str, Any], place: int) -> float:
        """p(his) given his or her."""
        likely = torch.softmax(self.model(**inputs).logits[0, place].double(), dim=-1)
        his, her = likely[self.his].sum(), likely[self.her].sum()
        return float(his / (his + her))

    @abstractmethod
    def _sees(self, case: Case) -> bool:
        """Whether the model reads both names."""

    @abstractmethod
    def _text(self, case: Case) -> tuple[str, list[tuple[int, int]]]:
        """The text that the model reads, and where the names are in it."""

    @abstractmethod
    def _place(self, ids: Tensor) -> int | None:
        """The position that predicts the pronoun; None if it is lost."""

    @abstractmethod
    def _blank(self, inputs: dict[str, Any], places: list[int]) -> dict[str, Any]:
        """Inputs in which a name cannot be read."""


class MaskedReader(Reader):
    """The pronoun is masked; so is a name, to blank it out."""

    kind = "masked"

    def _sees(self, case: Case) -> bool:
        del case
        return True

    def _text(self, case: Case) -> tuple[str, list[tuple[int, int]]]:
        (start, end), mask = case.pronoun, self.tokenizer.mask_token
        shift = len(mask) - (end - start)
        names = [
            (first + shift, last + shift) if first >= end else (first, last) for first, last in case.names
        ]
        return case.text[:start] + mask + case.text[end:], names

    def _place(self, ids: Tensor) -> int | None:
        masked: list[int] = (ids == self.tokenizer.mask_token_id).nonzero().flatten().tolist()
        return masked[0] if len(masked) == 1 else None

    def _blank(self, inputs: dict[str, Any], places: list[int]) -> dict[str, Any]:
        blank = inputs["input_ids"].clone()
        blank[0, places] = self.tokenizer.mask_token_id
        return inputs | {"input_ids": blank}


class CausalReader(Reader):
    """The text before the pronoun is read; a name is blanked out by a zero in the attention mask."""

    kind = "causal"

    def _sees(self, case: Case) -> bool:
        return all(last <= case.pronoun[0] for _, last in case.names)

    def _text(self, case: Case) -> tuple[str, list[tuple[int, int]]]:
        return case.text[: case.pronoun[0]].rstrip(), list(case.names)  # the pronoun's token has the space

    def _place(self, ids: Tensor) -> int | None:
        return len(ids) - 1

    def _blank(self, inputs: dict[str, Any], places: list[int]) -> dict[str, Any]:
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, places] = 0
        return inputs | {"attention_mask": mask}


def reader_of(model: Any, tokenizer: Any) -> Reader:
    """The reader for a model."""
    causal = type(model).__name__.endswith(CAUSAL)
    return (CausalReader if causal else MaskedReader)(model, tokenizer)


def _grids(row: dict[str, Any]) -> list[Grid]:
    grids = []
    for sentence, reading in row["own"].items():
        columns = layer_names(len(reading["first"]["raw"]))
        rows = [(method, [cell(value) for value in shares]) for method, shares in reading["first"].items()]
        rows.append(("model: his", [cell(reading["his"])] + [""] * (len(columns) - 1)))
        grids.append(Grid(f"{sentence} Share of the name that goes with “his”", columns, rows))
    if "gap" not in row:
        return grids
    gap = row["gap"]
    columns = layer_names(len(gap["right"]["raw"]))
    for goal, title in GOALS.items():
        rows = [(method, [cell(value) for value in shares]) for method, shares in gap[goal].items()]
        grids.append(Grid(f"GAP, {gap['texts']} texts: how often attention prefers {title}", columns, rows))
    shares = [(method, [cell(value) for value in values]) for method, values in gap["sink"].items()]
    grids.append(
        Grid("GAP: share of the first position in the place's row, mean over texts", columns, shares)
    )
    compared = [
        (f"{method}, {columns[-1]}", [cell(gap[goal][method][-1]) for goal in GOALS]) for method in READ
    ]
    rules = gap["rules"]
    compared += [(f"rule: {rule}", [cell(rules[goal][rule]) for goal in GOALS]) for rule in rules["right"]]
    compared.append((GOALS["model"], [cell(gap["model_is_right"]), "–"]))
    title = f"GAP, {gap['texts']} texts: methods at the last layer beside rules, how often they choose"
    grids.append(Grid(title, list(GOALS.values()), compared))
    model = [
        ("pronoun's gender predicted", [cell(gap["pronoun"])]),
        ("always the commoner gender", [cell(max(gap["feminine"], 1 - gap["feminine"]))]),
    ]
    return [*grids, Grid("GAP, the model", ["share"], model)]


def draw(outcome: Outcome, path: Path) -> None:
    """Shares by layer, for our sentences and GAP, as SVG and PNG."""
    need("matplotlib", "view")
    from matplotlib.figure import Figure

    from overt.view.plots import save

    row = outcome.per_seed[0]
    panels = list(row["own"].items())
    goals = list(GOALS.items()) if "gap" in row else []
    figure = Figure(figsize=(3.4 * 2, 2.8 * (1 + bool(goals))), layout="constrained")
    grid = figure.subplots(1 + bool(goals), 2, squeeze=False, sharey="row")
    for axes, (sentence, reading) in zip(grid[0], panels, strict=True):
        _draw_methods(axes, reading["first"])
        axes.axhline(reading["his"], color="black", linestyle=":", lw=1, label="model: his")
        axes.set_title(sentence, fontsize="small")
    grid[0, 0].set_ylabel("share of the name of “his”", fontsize="small")
    if goals:
        grid[-1, 0].set_ylabel("share of texts that prefer it", fontsize="small")
    for axes, (goal, title) in zip(grid[-1], goals, strict=False):
        _draw_methods(axes, row["gap"][goal])
        for (rule, share), style in zip(row["gap"]["rules"][goal].items(), ("--", "-."), strict=True):
            axes.axhline(share, color="grey", linestyle=style, lw=1, label=f"rule: {rule}")
        if goal == "right":
            share = row["gap"]["model_is_right"]
            label = f"how often {GOALS['model']} is the right one"
            axes.axhline(share, color="C3", linestyle=":", lw=1, label=label)
        axes.set_title(f"GAP: {title}", fontsize="small")
    for axes in grid.flat:
        layers = max((len(line.get_xdata()) for line in axes.lines), default=2)
        axes.set_xlim(0.5, layers + 0.5)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(labelsize="x-small")
    grid[0, 0].set_ylim(0, 1)
    if goals:  # shares near one half, which a whole axis would draw over each other
        low, high = grid[-1, 0].get_ylim()
        grid[-1, 0].set_ylim(max(0.0, min(low, 0.4)), min(1.0, max(high, 0.6)))
    for axes in grid[-1]:
        axes.set_xlabel("layer", fontsize="small")
    named: dict[str, Any] = {}
    for axes in grid.flat:
        named |= {label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        named.values(), named.keys(), loc="outside lower center", ncols=3, fontsize="x-small", frameon=False
    )
    save(figure, path)
    save(figure, path.with_suffix(".png"), dpi=PNG_DPI)


def _draw_methods(axes: Any, by_method: Mapping[str, Sequence[float]]) -> None:
    """A line per method, dashed with the receptive field."""
    for method, values in by_method.items():
        colour = f"C{METHODS.index(method.removesuffix(FIELD))}"
        layers = range(1, len(values) + 1)
        axes.plot(
            layers, values, color=colour, linestyle="--" if FIELD in method else "-", label=method, lw=1
        )


FIGURE_4 = Recipe(
    name="flow-figure-4",
    title="Which name a pronoun looks back to",
    paper=f"{flow_measure.PAPER}, Figure 4",
    published={"figure": "bars and maps of two sentences, without numbers"},
    run=run,
    report=report,
    seeds=1,
    folder="flow-pronouns",
    options={
        "examples": Option("number of GAP texts, if --data has them; all by default", least=1),
        "workers": Option("processes that read texts; 1 by default, on all threads", least=1, moves=False),
    },
    draw=draw,
)
