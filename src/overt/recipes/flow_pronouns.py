"""Figure 4 of Abnar & Zuidema 2020: which name does a masked pronoun look back to?

A pronoun is masked, a masked language model gives the probabilities of "he" and "she" in its place, and raw
attention, rollout and flow of the masked position show which of two names it reads. The paper shows two
sentences; here are two written for this package, and the GAP sentences, whose names are annotated (Webster et
al. 2018).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from random import Random
from typing import Any

import torch

import overt
from overt.data import gap
from overt.data.files import data_folder
from overt.data.gap import HER, HIS, Case
from overt.recipes import flow_measure
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request, cell
from overt.recipes._runs import check_model, earlier_result, finish_run, finite
from overt.recipes._training import torch_device
from overt.recipes.flow_measure import METHODS, layer_names
from overt.recipes.text_maps import tokens_in

EXAMPLES = 500  # GAP sentences
LONGEST = 256  # tokens; longer texts are left out and counted


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
    """Trace every masked pronoun. Nothing is trained, so there is one seed."""
    if request.model is None:
        raise ValueError("flow-figure-4 needs --model: give an English masked language model")
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
    cases = outcome.config["gap"]
    notes = [
        "Our own sentences: of the attention that the masked position pays to both names, the share of the "
        'name that "his" would refer to, and the model\'s share of "he", "him" and "his".',
        "The attention to a name of several tokens is their mean. On GAP, the right name is the annotators' "
        "choice; the model's is the name whose masking lowers the probability of the true pronoun's gender "
        "more.",
    ]
    left_out, longest = outcome.per_seed[0]["left_out"], outcome.config["longest"]
    notes.append(
        f"GAP: {cases} texts drawn from its development and validation sets, of which {left_out} were left "
        f"out, because they are longer than {longest} tokens or a name has no tokens."
        if cases
        else "No GAP data were given with --data: only our own sentences were measured."
    )
    return Report(_grids(outcome.mean), notes)


def load_model(path: str) -> tuple[Any, Any]:
    """A masked language model with its own head, and its tokenizer."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    refusal = f"--model {path} must be a masked language model with its own head and a fast tokenizer"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        model, info = AutoModelForMaskedLM.from_pretrained(
            path, output_loading_info=True, dtype=torch.float32
        )
    except (ValueError, KeyError):
        raise ValueError(refusal) from None
    # A head that is missing from the weights has random weights now, and would give answers all the same.
    if info["missing_keys"] or tokenizer.mask_token is None or not tokenizer.is_fast:
        raise ValueError(refusal)
    return model.eval(), tokenizer


def _measure(request: Request, cases: list[Case]) -> dict[str, Any]:
    """Readings of our own sentences, and statistics of GAP."""
    from rich.progress import track

    model, tokenizer = load_model(request.model or "")
    reader = Reader(model.to(torch_device(request.device)), tokenizer)
    sentence_readings = {sentence: reader.read(case) for sentence, case in SENTENCES.items()}
    for sentence, reading in sentence_readings.items():
        if reading is None:
            raise ValueError(
                f"--model {request.model} must read English, but its tokenizer loses words of {sentence!r}"
            )
    row: dict[str, Any] = {"own": sentence_readings, "left_out": 0}
    if not cases:
        return row
    readings = [(case, reader.read(case)) for case in track(cases, "tracing GAP", console=request.console)]
    known = [(case, reading) for case, reading in readings if reading is not None]
    row["left_out"] = len(readings) - len(known)
    if not known:
        return row

    def agreement(method: str, other: list[int]) -> list[float]:
        """How often a method prefers the same name as `other`, by layer."""
        shares = torch.tensor([reading["first"][method] for _, reading in known])  # (texts, layer)
        return ((shares < 0.5).int() == torch.tensor(other)[:, None]).double().mean(dim=0).tolist()

    right = [case.right or 0 for case, _ in known]
    blanked = [reading["blanked"] for _, reading in known]
    row["gap"] = {
        "texts": len(known),
        "pronoun": sum((reading["his"] < 0.5) == case.feminine for case, reading in known) / len(known),
        "first_name_is_right": right.count(0) / len(known),
        "model_is_right": sum(a == b for a, b in zip(right, blanked, strict=True)) / len(known),
        "right": {method: agreement(method, right) for method in METHODS},
        "model": {method: agreement(method, blanked) for method in METHODS},
    }
    return row


class Reader:
    """Reads masked pronouns with a model."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        vocabulary = tokenizer.get_vocab()
        lead = "" if "his" in vocabulary else "Ġ"  # byte-level tokenizers keep the space before a word

        def codes(words: tuple[str, ...]) -> list[int]:
            return [vocabulary[lead + word] for word in words if lead + word in vocabulary]

        self.his, self.her = codes(HIS), codes(HER)
        if not self.his or not self.her:
            raise ValueError("--model must have he, him or his, and she, her or hers, as single tokens")

    def read(self, case: Case) -> dict[str, Any] | None:
        """p(his) given his or her, each method's share of the first name, and the model's name for one case.

        None if the text is too long or a name has no tokens.
        """
        start, end = case.pronoun
        mask = self.tokenizer.mask_token
        text = case.text[:start] + mask + case.text[end:]
        coded = self.tokenizer(text, return_tensors="pt", return_offsets_mapping=True)
        offsets = coded.pop("offset_mapping")[0].tolist()
        inputs = {name: value.to(self.model.device) for name, value in coded.items()}
        ids = inputs["input_ids"][0]
        if len(ids) > LONGEST:
            return None
        masked = (ids == self.tokenizer.mask_token_id).nonzero().flatten().tolist()
        shift = len(mask) - (end - start)
        names = []
        for first, last in case.names:
            moved = shift if first >= end else 0
            names.append(tokens_in(offsets, first + moved, last + moved))
        if len(masked) != 1 or not all(names):
            return None
        trace = overt.trace(self.model, inputs, tokenizer=self.tokenizer)
        first_share = {}
        for method in METHODS:
            weights = getattr(trace, method)(queries=masked[0])[0, :, 0]  # (layer, token)
            to_first, to_second = (weights[:, places].mean(dim=-1) for places in names)
            first_share[method] = (to_first / (to_first + to_second)).tolist()
        his = self._his(inputs, masked[0])
        # which name's masking lowers the probability of the true gender more
        drops = []
        for places in names:
            blank = inputs["input_ids"].clone()
            blank[0, places] = self.tokenizer.mask_token_id
            fall = his - self._his(inputs | {"input_ids": blank}, masked[0])
            drops.append(-fall if case.feminine else fall)
        return {"his": his, "first": first_share, "blanked": int(drops[1] > drops[0])}

    @torch.no_grad()
    def _his(self, inputs: dict[str, Any], place: int) -> float:
        """p(his) given his or her."""
        likely = torch.softmax(self.model(**inputs).logits[0, place].double(), dim=-1)
        his, her = likely[self.his].sum(), likely[self.her].sum()
        return float(his / (his + her))


def _grids(numbers: dict[str, Any]) -> list[Grid]:
    grids = []
    for sentence, reading in numbers["own"].items():
        columns = layer_names(len(reading["first"]["raw"]))
        rows = [(method, [cell(value) for value in reading["first"][method]]) for method in METHODS]
        rows.append(("model: his", [cell(reading["his"])] + [""] * (len(columns) - 1)))
        grids.append(Grid(f"{sentence} Share of the name that goes with “his”", columns, rows))
    if "gap" not in numbers:
        return grids
    gap = numbers["gap"]
    columns = layer_names(len(gap["right"]["raw"]))
    for key, title in (("right", "the right name"), ("model", "the name that the model needs")):
        rows = [(method, [cell(value) for value in gap[key][method]]) for method in METHODS]
        grids.append(
            Grid(f"GAP, {int(gap['texts'])} texts: how often attention prefers {title}", columns, rows)
        )
    rules = [
        ("pronoun's gender predicted", [cell(gap["pronoun"])]),
        ("the model's name is right", [cell(gap["model_is_right"])]),
        ("the first name is right", [cell(gap["first_name_is_right"])]),
    ]
    return [*grids, Grid("GAP, for comparison", ["share"], rules)]


FIGURE_4 = Recipe(
    name="flow-figure-4",
    title="Which name a masked pronoun looks back to",
    paper=f"{flow_measure.PAPER}, Figure 4",
    published={"figure": "bars and maps of two sentences, without numbers"},
    run=run,
    report=report,
    seeds=1,
    folder="flow-pronouns",
    options={"examples": Option("number of GAP texts, if --data has them", EXAMPLES, least=1)},
)
