"""`overt reproduce`: honest splits, runs that go on after an interruption, results that are written down."""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from scipy.stats import ttest_ind
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from typer.testing import CliRunner

import overt
from families import TEXT
from overt.cli import app
from overt.data import agreement, linzen, sst2
from overt.data import gap as gap_data
from overt.data.sst2 import load_rows
from overt.recipes import _result_files, fine_tuning, flow_pronouns, flow_tables, reproduce
from overt.recipes._recipe import (
    Grid,
    Option,
    Outcome,
    Recipe,
    Report,
    Request,
    cell,
    mean,
    over_seeds,
    spread,
)
from overt.recipes._result_files import read_result, write_result

FILES = ("val", "test.1", "test.2")


def lines(count: int, seed: int, marked: str = "") -> list[str]:
    """Lines of a data file; `marked` puts a word of its own into each, twice, so that it could be learnt."""
    out = []
    for number, sentence in enumerate(agreement.generate(count, seed)):
        own = f" {marked}{number} {marked}{number}" if marked else ""
        out.append(f"{'VBP' if sentence.plural else 'VBZ'}\t{sentence}{own}")
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Like the published folder without its training file; some prefixes come twice, or in two files."""
    place = tmp_path / "data" / "agreement"
    place.mkdir(parents=True)
    files = {name: lines(60, seed, f"{name}-") for seed, name in enumerate(FILES)}
    files["val"] += files["val"][:20]
    files["test.1"] += files["val"][:30]
    files["test.2"] += files["test.1"][:10]
    for name, text in files.items():
        content = "".join(f"{line}\n" for line in text).encode()
        zipped = name != "test.2"
        path = place / f"numpred.{name}{'.gz' if zipped else ''}"
        path.write_bytes(gzip.compress(content) if zipped else content)
    return tmp_path / "data"


def test_no_prefix_is_in_two_parts_and_the_vocabulary_is_of_the_training_part(folder: Path) -> None:
    corpus = linzen.load(folder)
    parts = [corpus.train, corpus.validation, corpus.test]
    sets = [{prefix.tokens for prefix in part} for part in parts]
    assert all(sets)
    for number, part in enumerate(sets):
        for other in sets[number + 1 :]:
            assert not part & other
    assert len(set().union(*sets)) == 180, "nothing is lost"
    assert corpus.overlap == 0
    for part in parts[1:]:
        assert len(part) == len({prefix.tokens for prefix in part}), "each counts once"
        own = {word for prefix in part for word in prefix.tokens if "-" in word}
        assert own
        assert not own & set(corpus.vocabulary)
    assert {word for prefix in corpus.train for word in prefix.tokens if "-" in word} < set(corpus.vocabulary)
    assert corpus.vocabulary[:3] == ("[PAD]", "[CLS]", "[UNK]")
    assert corpus.by_attractors.keys() == {1, 2}
    assert corpus.test == linzen.load(folder / "agreement").test, "the split is the same every time"
    by_file = [corpus.natural, *corpus.by_attractors.values()]
    assert sorted(map(len, by_file)) == [7, 7, 7], "the same share of every file"
    assert {p.tokens for part in by_file for p in part} == sets[2]


def test_published_parts_are_used_as_published(folder: Path) -> None:
    place = folder / "agreement"
    (place / "numpred.train").write_text("\n".join(lines(40, 7)))
    (place / "numpred.test.0").write_text("\n".join(lines(40, 7)[:3] + lines(20, 8)))
    corpus = linzen.load(folder)
    assert [len(corpus.train), len(corpus.validation), len(corpus.test)] == [40, 80, 23 + 90 + 70]
    assert corpus.overlap >= 3
    assert corpus.describe()["test_prefixes_also_trained_on"] == corpus.overlap


def test_long_prefixes_keep_their_end(folder: Path) -> None:
    words = " ".join(f"w{number}" for number in range(linzen.LONGEST + 3))
    with (folder / "agreement" / "numpred.test.2").open("a") as file:
        file.write(f"VBZ\t{words}\n")
    corpus = linzen.load(folder)
    assert corpus.shortened == 1
    everywhere = corpus.train + corpus.by_attractors[2]
    assert max(len(prefix.tokens) for prefix in everywhere) == linzen.LONGEST
    assert any(prefix.tokens[-1] == f"w{linzen.LONGEST + 2}" for prefix in everywhere)


def test_wrong_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no agreement data: put numpred.val and numpred.test"):
        linzen.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"--data \(or OVERT_DATA\) must be a folder, got .*nowhere"):
        linzen.load(tmp_path / "nowhere")
    for name in FILES:
        (tmp_path / f"numpred.{name}").write_text("VBZ\tthe key\nVBX\tthe keys\n")
    with pytest.raises(ValueError, match=r"numpred.val, line 2 must be VBZ or VBP, a tab and words, got"):
        linzen.load(tmp_path)


@pytest.mark.slow
def test_without_data_the_grammar_says_so() -> None:
    corpus = linzen.load(None)
    assert corpus.name.startswith("no data: sentences of the package's own grammar")
    assert corpus.overlap == 0
    assert not {p.tokens for p in corpus.validation} & {p.tokens for p in corpus.train + corpus.test}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = {"plain": (), "both": (overt.Evolving(), overt.Bayesian())}
    networks = {form: flow_tables.Network(mechanisms) for form, mechanisms in forms.items()}
    monkeypatch.setattr(flow_tables, "NETWORKS", networks)
    for name, value in {"HEADS": 2, "WIDTH": 8, "BATCH": 8, "CHECKPOINTS": 3, "WARMUP": 2}.items():
        monkeypatch.setattr(flow_tables, name, value)


def run(name: str, place: Path, *extra: str, **options: Any) -> dict[str, Any]:
    return reproduce.run(
        name, out=place / "run", results=place / "results", device="cpu", extra=extra, **options
    )


SHORT = ("--steps", "6", "--examples", "12")


def numbers(value: Any) -> list[float]:
    """Every number of a result but the clock's."""
    if isinstance(value, dict):
        return [n for key, entry in value.items() if key != "step_ms" for n in numbers(entry)]
    if isinstance(value, list):
        return [n for entry in value for n in numbers(entry)]
    return [value] if isinstance(value, float) else []


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_an_interrupted_run_goes_on_and_ends_where_an_uninterrupted_one_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"data": folder, "seeds": 1}
    whole = run("flow-table-1", tmp_path / "whole", *SHORT, **options)
    real, calls = transformers.Trainer.training_step, 0

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (6 + 5, 6 + 5 + 2):  # in the second form, after its checkpoint of step 4; then once more
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.Trainer, "training_step", failing)
    with pytest.raises(KeyboardInterrupt):
        run("flow-table-1", tmp_path / "cut", *SHORT, **options)
    cut = tmp_path / "cut" / "run"
    assert (cut / "plain" / "seed-0" / "result.json").exists(), "what is done is kept"
    assert not (cut / "both" / "seed-0" / "result.json").exists()
    torn = cut / "both" / "seed-0" / "checkpoints" / "checkpoint-5"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half of")
    with pytest.raises(KeyboardInterrupt):
        run("flow-table-1", tmp_path / "cut", *SHORT, **options)
    with monkeypatch.context() as patch:
        patch.setattr(flow_tables, "hits", stop)  # trained, but not tested
        with pytest.raises(KeyboardInterrupt):
            run("flow-table-1", tmp_path / "cut", *SHORT, **options)
    again = run("flow-table-1", tmp_path / "cut", *SHORT, **options)
    assert calls == 6 + 5 + 2 + 2, "no more than the steps since the last checkpoint are taken again"
    found, expected = (numbers(result["per_seed"]) for result in (again, whole))
    assert len(expected) > 50
    assert found == pytest.approx(expected, abs=1e-5)
    assert not list(tmp_path.rglob("checkpoints"))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_results_hold_what_they_must_and_render_published_beside_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERT_DATA", str(folder))
    told = run("flow-table-1", tmp_path, *SHORT, seeds=2)
    result = json.loads((tmp_path / "results" / "flow-table-1.json").read_text())
    assert result["commands"] == [
        "overt reproduce flow-table-1 --data DIR --seeds 2 --device cpu --examples 12 --steps 6"
    ]
    assert result["seeds"] == [0, 1]
    assert {"python", "torch", "transformers", "overt", "numpy"} <= result["versions"].keys()
    assert result["hardware"].startswith("CPU ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
    assert result["config"]["steps"] == 6
    parts = result["config"]["data"]["parts"]
    assert parts["test"]["prefixes"] == 21
    assert 0 < parts["train"]["plural"] < 1
    assert "numpred.train is not in the folder" in result["config"]["data"]["split"]
    first, second = (result["per_seed"][seed]["plain"]["test"] for seed in "01")
    assert told["mean"]["plain"]["test"] == pytest.approx((first + second) / 2)
    assert told["spread"]["plain"]["test"] == pytest.approx(abs(first - second) / 2**0.5)
    assert result["published"]["spearman"]["flow"][2] == [0.70, 0.25]
    measured = told["mean"]["plain"]["spearman"]["blankout"]["rollout"]
    for low, value, high in zip(*(measured[key] for key in ("low", "mean", "high")), strict=True):
        assert low <= value <= high

    page = (tmp_path / "RESULTS.md").read_text()
    rows = {line.split(" | ")[0]: line for line in page.splitlines() if line.startswith("| ")}
    assert rows["| raw, published"].startswith("| raw, published | 0.69±0.27 | 0.10±0.43 | −0.11±0.49 |")
    cells = rows["| rollout, measured"].split(" | ")[1:]
    assert cells[0].startswith(f"{measured['mean'][0]:.2f}".replace("-", "−"))
    assert "0.96" in rows["| published (plain)"]
    assert f"`{result['commands'][0]}`" in page

    # the second table is measured on the same models
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("trained again")

    (tmp_path / "results" / "flow-table-1.remark.md").write_text("The layers differ, *honestly*.\n")
    (tmp_path / "results" / "other.json").write_text('{"format": "something else"}')
    (tmp_path / "results" / "bench.md").write_text("Times.\n")
    monkeypatch.setattr(flow_tables, "train_classifier", refuse)
    run("flow-table-2", tmp_path, *SHORT, seeds=2)
    page = (tmp_path / "RESULTS.md").read_text()
    assert page.index("Table 1") < page.index("The layers differ, *honestly*.") < page.index("Table 2")
    assert "| 0.53±0.33 |" in page
    assert "[bench](results/bench.md)" in page
    message = (
        r"plain/seed-0 has a run with steps 6, but 7 was requested: delete it with --fresh, or choose another"
    )
    with pytest.raises(ValueError, match=message):
        run("flow-table-2", tmp_path, "--steps=7", "--examples=12", seeds=2)
    with pytest.raises(AssertionError, match="trained again"):
        run("flow-table-2", tmp_path, *SHORT, seeds=2, fresh=True)


def test_means_and_spreads_over_seeds_are_of_equal_places() -> None:
    results = [{"a": [1.0, 2.0], "b": "x", "c": 3}, {"a": [3.0, None], "b": "y", "c": 5}]
    assert over_seeds(results, mean) == {"a": [2.0, None], "b": None, "c": 4.0}
    assert over_seeds(results, spread) == {
        "a": [pytest.approx(2**0.5), None],
        "b": None,
        "c": pytest.approx(2**0.5),
    }
    assert over_seeds(results[:1], spread)["c"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["flow-table-9"],
            "the recipe must be one of flow-table-1, flow-table-2, ",
        ),
        (
            ["flow-table-1", "--exampels", "3"],
            "has no option --exampels; its own options are --examples, --steps",
        ),
        (["flow-table-1", "--examples"], "--examples needs a value: number of test examples to correlate on"),
        (["flow-table-1", "--examples=few"], "--examples must be a whole number of at least 2, got 'few'"),
        (
            ["flow-table-1", "--forms", "plane"],
            "--forms must be a comma-separated list of plain, evolving, Bayesian, both",
        ),
        (["flow-table-1", "--device", "abacus"], "--device must be cpu, cuda or auto, got abacus"),
        (["flow-table-1", "--data", "nowhere"], "--data (or OVERT_DATA) must be a folder, got nowhere"),
        (["flow-table-3"], "flow-table-3 fine-tunes a pretrained BERT: give --model"),
        (["flow-table-3", "--model", "./nowhere"], "./nowhere must be a folder with config.json"),
        (
            ["flow-figure-4"],
            "flow-figure-4 needs --model: give an English masked or causal language model",
        ),
        (
            ["flow-figure-4", "--model", "x", "--seeds", "2"],
            "--seeds must be 1 for flow-figure-4, which trains nothing; got 2",
        ),
    ],
)
def test_the_command_names_what_is_wrong_in_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OVERT_DATA", raising=False)
    result = CliRunner().invoke(app, ["reproduce", *words])
    assert isinstance(result.exception, ValueError | OSError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not list(tmp_path.iterdir()), "nothing was written"


def test_recipes_are_listed_with_their_options() -> None:
    for words in ([], ["--list"]):
        output = CliRunner().invoke(app, ["reproduce", *words]).output
        for name, recipe in reproduce.RECIPES.items():
            assert name in output
            assert all(f"--{option}" in output for option in recipe.options)


def test_one_recipe_is_shown_with_its_options_alone() -> None:
    for words in (["bam-nan", "--help"], ["--help", "bam-nan"], ["bam-nan", "--list"]):
        output = CliRunner().invoke(app, ["reproduce", *words]).output
        assert reproduce.RECIPES["bam-nan"].title.split()[0] in output
        assert "--encoder-epochs" in output
        assert "flow-table-1" not in output
    for words in ([], ["--model", "bam-nan"], ["--out", "bam-nan", "--fresh"]):
        output = CliRunner().invoke(app, ["reproduce", *words, "--help"]).output
        assert "--encoder-epochs" not in output
    assert "--presets" not in output
    for asked in ("--list", "--help"):
        unknown = CliRunner().invoke(app, ["reproduce", "bam-nil", asked])
        assert str(unknown.exception).startswith("the recipe must be one of ")


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random masked language model with a WordPiece tokenizer."""
    place = tmp_path_factory.mktemp("masked")
    text = (
        " ".join(case.text for case in flow_pronouns.SENTENCES.values())
        + " he she him her his hers Ann Bob saw"
    )
    text += " " + " ".join(sentence for sentence, _ in load_rows(None, 0)[0][:30])
    words = sorted(set(re.findall(r"\w+|[^\w\s]", text.lower())) - {"david"})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, "dav", "##id"]
    inner = Tokenizer(
        models.WordPiece({word: code for code, word in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(place)
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**TEXT, "vocab_size": len(vocabulary)})
    transformers.BertForMaskedLM(config).save_pretrained(place)
    return place


GAP = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL\n"


@pytest.mark.slow
def test_figure_4_reads_masked_pronouns(
    masked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        "1\tAnn saw Laura and her David .\ther\t18\tAnn\t0\tTRUE\tDavid\t22\tFALSE\tu",
        "2\this David saw Bob .\tHis\t0\tDavid\t4\tFALSE\tBob\t14\tTRUE\tu",
        "3\tAnn saw her .\ther\t8\tAnn\t0\tFALSE\tsaw\t4\tFALSE\tu",  # neither: left out
    ]
    (tmp_path / "gap-development.tsv").write_text(GAP + "\n".join(rows) + "\n")
    cases = gap_data.read(tmp_path)
    assert [case.right for case in cases] == [0, 1]
    assert [case.feminine for case in cases] == [True, False]

    model, tokenizer = flow_pronouns.load_model(str(masked))
    reader = flow_pronouns.reader_of(model, tokenizer)
    reading = reader.read(cases[1])
    assert not isinstance(reading, str)
    # by hand: [CLS] [MASK] dav ##id saw bob . [SEP]
    inputs = tokenizer("[MASK] David saw Bob .", return_tensors="pt")
    assert tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])[1:6] == [
        "[MASK]",
        "dav",
        "##id",
        "saw",
        "bob",
    ]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(**inputs, output_attentions=True)
    likely = output.logits[0, 1].double().softmax(dim=-1)
    his, her = (
        likely[tokenizer.convert_tokens_to_ids(list(words))].sum() for words in (gap_data.HIS, gap_data.HER)
    )
    assert reading["his"] == pytest.approx(float(his / (his + her)), abs=1e-6)
    for layer, maps in enumerate(output.attentions):
        row = maps[0].mean(dim=0)[1]
        one, two = row[2:4].mean(), row[5]
        assert reading["first"]["raw"][layer] == pytest.approx(float(one / (one + two)), abs=1e-5)

    result = run("flow-figure-4", tmp_path, model=str(masked), data=tmp_path)
    gap = result["per_seed"]["0"]["gap"]
    assert gap["texts"] == 2
    assert gap["rules"]["right"]["first name"] == 0.5
    kept = [reader.read(case) for case in cases]
    last = [found["first"]["flow"][-1] < 0.5 for found in kept if not isinstance(found, str)]
    assert gap["right"]["flow"][-1] == sum(a == b for a, b in zip(last, [False, True], strict=True)) / 2
    assert len(result["tables"]) == 2 + 5
    assert (tmp_path / "results" / "flow-figure-4.svg").exists()
    monkeypatch.setattr(flow_pronouns, "_measure", None)
    assert run("flow-figure-4", tmp_path, model=str(masked), data=tmp_path)["per_seed"] == result["per_seed"]


def test_figure_4_refuses_a_model_without_a_head_of_its_own(masked: Path, tmp_path: Path) -> None:
    headless = tmp_path / "headless"
    transformers.AutoTokenizer.from_pretrained(masked).save_pretrained(headless)
    transformers.AutoModel.from_pretrained(masked).save_pretrained(headless)
    with pytest.raises(ValueError, match="must be a masked or causal language model with its own head"):
        run("flow-figure-4", tmp_path, model=str(headless))


@pytest.mark.slow
def test_table_3_fine_tunes_measures_and_keeps(
    masked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OVERT_DATA", raising=False)
    load = load_rows

    def few(data: Path | None, seed: int) -> Any:
        train, test, what = load(data, seed)
        return train[:40], test[:12], what

    monkeypatch.setattr(sst2, "load_rows", few)
    half = tmp_path / "half"
    transformers.AutoTokenizer.from_pretrained(masked).save_pretrained(half)
    transformers.AutoModelForMaskedLM.from_pretrained(masked).half().save_pretrained(half)
    result = run("flow-table-3", tmp_path, "--steps=3", "--examples=5", model=str(half), seeds=2)
    layers = TEXT["num_hidden_layers"]
    found = result["per_seed"]["1"]["spearman"]
    assert [found[part]["count"] for part in ("few", "all")] == [5, 12]
    assert len(found["all"]["gradients"]["flow"]["mean"]) == layers
    table = dict(result["tables"][0]["rows"])
    assert table["rollout, published"][:3] == ["0.11±0.19", "–", "0.12±0.21"]
    assert any("instead of the paper's DistilBERT" in note for note in result["notes"])
    assert any("flow all rank each of the 12 sentences" in note for note in result["notes"])
    [weights] = tmp_path.glob("**/seed-0/model/model.safetensors")
    assert {weight.dtype for weight in load_file(weights).values()} == {torch.float32}  # whatever it came in
    monkeypatch.setattr(fine_tuning, "fine_tune", None)
    again = run("flow-table-3", tmp_path, "--steps=3", "--examples=5", model=str(half), seeds=2)
    assert again["per_seed"] == result["per_seed"]


# Telling stored results anew.

STORED = Path(__file__).parents[1] / "results"
RETOLD = [
    ("bam-table-1", []),
    ("bam-table-1", ["--dataset", "citeseer"]),
    ("bam-nan", []),
    ("bam-table-2", []),
    ("bam-table-2", ["--dataset", "daquar"]),
    ("bam-table-2", ["--dataset", "daquar", "--split", "published"]),
    ("bam-table-3", []),
    ("bam-table-4", []),
    ("bam-table-5", []),
    ("bam-table-7", []),
    ("bam-table-7", ["--dataset", "daquar"]),
    ("bam-table-8", []),
    ("ea-figure-1", []),
    ("ea-figure-4", []),
    ("ea-figure-5", []),
    ("ea-figure-a1", []),
    ("ea-figure-a6", []),
    ("ea-probe-text", []),
    ("ea-table-1", []),
    ("ea-table-2", []),
    ("ea-table-3", []),
    ("ea-table-4", []),
    ("ea-table-5", []),
    ("ea-table-5", ["--dataset", "iwslt14"]),
    ("ea-table-6", []),
    ("ea-table-7", []),
    ("ea-table-8", []),
    ("faithfulness", []),
    ("flow-figure-1", []),
    ("flow-figure-2", []),
    ("flow-figure-3", []),
    ("flow-figure-4", []),
    ("flow-table-1", []),
    ("flow-table-1", ["--part", "natural"]),
    ("flow-table-2", []),
    ("flow-table-2", ["--part", "natural"]),
    ("flow-table-3", []),
    ("uncertainty", []),
]


def test_result_files_with_one_command_can_be_read(tmp_path: Path) -> None:
    place = tmp_path / "results"
    place.mkdir()
    result = stored("flow-table-3")
    (command,) = result.pop("commands")
    (place / "flow-table-3.json").write_text(
        json.dumps(result | {"command": command, "format": "overt reproduce 1"})
    )
    assert f"`{command}`" in reproduce.render(place).read_text()
    assert reproduce.retell("flow-table-3", place)["commands"] == [command]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "extra"), RETOLD, ids=["-".join([name, *extra[1::2]]) for name, extra in RETOLD]
)
def test_stored_results_say_what_their_recipes_say_of_their_numbers(
    name: str, extra: list[str], tmp_path: Path
) -> None:
    place = tmp_path / "results"
    place.mkdir()
    path = place / f"{'-'.join([name, *extra[1::2]])}.json"
    for own in STORED.glob(f"{path.stem}*"):
        if own.is_dir() and own.name == path.stem:
            shutil.copytree(own, place / own.name)
        elif own.name.partition(".")[0] == path.stem:
            shutil.copy(own, place)
    before = path.read_bytes()
    # out of its numbers, and of nothing that was told before
    result = json.loads(before)
    path.write_text(json.dumps(result | {"tables": [], "notes": ["forgotten"]}))
    told = CliRunner().invoke(app, ["reproduce", name, "--retell", "--results", str(place), *extra])
    assert told.exit_code == 0, told.output
    assert path.read_bytes() == before


def test_the_page_of_results_is_what_the_stored_files_say(tmp_path: Path) -> None:
    shutil.copytree(STORED, tmp_path / "results")
    page = reproduce.render(tmp_path / "results")
    assert page.read_text() == (STORED.parent / "RESULTS.md").read_text()


def test_what_runs_share_is_stored_once_and_read_in_its_place(tmp_path: Path) -> None:
    def run_of(row: str, seed: int, date: str) -> dict[str, Any]:
        record = {"settings": {"row": {"name": row, "sizes": [1, 2]}, "seed": seed}, "date": date}
        return {"value": seed / 3, "run": record | {"hardware": "CPU", "versions": {"torch": "2"}}}

    per_seed = {
        str(seed): {row: run_of(row, seed, f"2026-01-0{seed + 1}") for row in ("plain", "Evolving")}
        for seed in (0, 1)
    }
    per_seed["1"]["older"] = {"run": {"date": "2025-01-01"}, "value": 2.0}  # without settings
    per_seed["1"]["count"] = 3
    result = {"recipe": "ea-table-3", "commands": ["x"], "per_seed": per_seed, "mean": {"plain": 1.0}}
    write_result(tmp_path / "a.json", result)
    text = (tmp_path / "a.json").read_text()
    assert text.count('"sizes"') == 2, "one for each row"
    assert text.count('"torch"') == 2, "one for each date"
    assert '"mean"' not in text, "it follows from the seeds"
    found = read_result(tmp_path / "a.json")
    assert found is not None
    assert found["per_seed"] == per_seed
    write_result(tmp_path / "b.json", found)
    assert (tmp_path / "b.json").read_text() == text
    older = {"format": "overt reproduce 1", "recipe": "ea-table-3", "command": "x", "per_seed": per_seed}
    (tmp_path / "c.json").write_text(json.dumps(older))
    before = read_result(tmp_path / "c.json")
    assert before is not None
    assert (before["per_seed"], before["commands"]) == (per_seed, ["x"])
    (tmp_path / "d.json").write_text(json.dumps(older | {"format": "overt reproduce 9"}))
    assert read_result(tmp_path / "d.json") is None


def test_a_long_result_has_its_numbers_in_a_file_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"settings": {"row": {"name": "plain"}, "seed": 0}, "date": "2026-01-01"}
    per_seed = {"0": {"plain": {"values": [number / 7 for number in range(500)], "run": run}}}
    result = {"recipe": "ea-table-3", "commands": ["x"], "per_seed": per_seed, "notes": ["a note"]}
    path, numbers = tmp_path / "a.json", tmp_path / "a.numbers.json.gz"
    write_result(path, result)
    assert not numbers.exists()
    whole = read_result(path)
    monkeypatch.setattr(_result_files, "MOST", 1000)
    write_result(path, result)
    assert len(path.read_bytes()) < 1000
    assert json.loads(path.read_text())["per_seed"] == "a.numbers.json.gz"
    found = read_result(path)
    assert found == whole
    assert found is not None
    before = path.read_bytes(), numbers.read_bytes()
    write_result(path, found)
    assert (path.read_bytes(), numbers.read_bytes()) == before
    numbers.rename(tmp_path / "elsewhere")
    with pytest.raises(
        FileNotFoundError, match=r"the numbers of .*a\.json must be in .*a\.numbers\.json\.gz"
    ):
        read_result(path)
    (tmp_path / "elsewhere").rename(numbers)
    path.write_bytes(before[0].replace(b"a.numbers", b"../a.numbers"))
    with pytest.raises(ValueError, match=r"must have its numbers in a\.numbers\.json\.gz, got '\.\./a"):
        read_result(path)
    monkeypatch.undo()
    write_result(path, found)
    assert not numbers.exists(), "and what was beside a long result goes once it is short"
    assert read_result(path) == whole


def test_a_result_that_is_not_there_or_of_another_recipe_is_not_told(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"--retell needs a stored result, but .*-natural.json does not exist"
    ):
        reproduce.retell("flow-table-1", tmp_path, ["--part=natural"])
    (tmp_path / "flow-table-1.json").write_text((STORED / "flow-table-2.json").read_text())
    with pytest.raises(ValueError, match=r"flow-table-1.json must be a result of flow-table-1"):
        reproduce.retell("flow-table-1", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["flow-table-1.json"]


def stored(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((STORED / f"{name}.json").read_text())
    return found


def test_columns_say_how_many_sentences_they_have_and_tables_what_their_spread_is() -> None:
    for name in ("flow-table-1", "flow-table-2-natural"):
        tables = {table["title"]: table for table in stored(name)["tables"]}
        columns = tables["Accuracy, mean±sd over seeds"]["columns"]
        assert columns[2:4] == ["natural mix (n = 1,669)", "1 attractor (n = 6,048)"]
        assert columns[-2:] == ["4 attractors (n = 67)", "5 attractors (n = 19)"]
        [randomisation] = [title for title in tables if title.startswith("Weight randomisation")]
        assert randomisation.startswith("Weight randomisation, 128 sentences: ")
        assert "mean±sd over seeds" in randomisation
    for name in ("flow-table-1", "flow-table-3"):
        assert "bootstrapped over the sentences of one trained model" in " ".join(stored(name)["notes"])


def outcome(old: bool = False) -> Outcome:
    """A small run of flow-table-1 with numbers made up; an old one has less in it."""

    def numbers(value: float, n: int) -> dict[str, Any]:
        rows = {name: [value + layer / 100 for layer in range(6)] for name in ("mean", "sd", "low", "high")}
        return rows | {"defined": [float(n - layer) for layer in range(6)]}

    def correlations(value: float, n: dict[str, int]) -> dict[str, Any]:
        found = {
            reference: {method: numbers(value + place / 10, n[method]) for place, method in enumerate(n)}
            for reference in ("blankout", "gradients", *(() if old else ("blankout-absolute",)))
        }
        return {"count": 40, **found}

    def row(value: float) -> dict[str, Any]:
        own, shared = {"raw": 40, "rollout": 39, "flow": 30}, dict.fromkeys(("raw", "rollout", "flow"), 30)
        spearman = correlations(value, own)
        if not old:
            spearman["common"] = correlations(value + 0.2, shared)
        left: dict[str, Any] = {method: [value] * 7 for method in own}
        spearman["randomised"] = left if old else left | {"n": [33] * 7}
        part = {"validation": 0.9, "test": 0.8, "natural": 0.7, "by_attractors": {"1": 0.6}}
        return {"spearman": spearman, **part}

    prefixes = {"validation": 50, "test": 400, "test, 1 attractors": 12, "test, natural mix": 388}
    if old:
        del prefixes["test, natural mix"]
    config = {
        "forms": {"plain": "()", "both": "(…)"},
        "shuffled": 35,
        "data": {
            "name": linzen.SPLIT,
            "split": "somehow",
            "shortened": 0,
            "longest": 50,
            "parts": {name: {"prefixes": count} for name, count in prefixes.items()},
        },
    }
    if old:
        del config["shuffled"]
    values = {"plain": (0.1, 0.12, 0.11), "both": (0.3, 0.2, 0.25)}
    per_seed = {seed: {form: row(given[seed]) for form, given in values.items()} for seed in range(3)}
    return Outcome(config, per_seed)


def test_tables_compare_methods_on_equal_sentences_and_say_how_many() -> None:
    told = flow_tables.report(outcome(), "blankout")
    rows = dict(told.grids[0].rows)
    assert rows["rollout, measured"][0] == "0.41±0.41", "0.11 of the seeds, 0.1 of rollout, 0.2 of the common"
    assert rows["n of 40"] == [str(30 - layer) for layer in range(6)]
    assert not any(name.startswith("flow, n") for name in rows)
    assert told.grids[1].title.startswith("Which definition of importance gives which number: blank-out")
    assert [grid.title.split(",")[1].strip() for grid in told.grids[2:4]] == [
        "Spearman correlation with blank-out",
        "Spearman correlation with absolute blank-out",
    ]
    assert dict(told.grids[2].rows)["both, flow"][0] == "0.65±0.05"
    assert "35 sentences" in told.grids[4].title
    text = " ".join(told.notes)
    assert "that raw attention, rollout and flow all rank in one model, out of 40: plain 25–30" in text
    assert "(at least 33 of them ranked by all methods)" in text
    expected = ttest_ind([0.3, 0.2, 0.25], [0.1, 0.12, 0.11], equal_var=False).pvalue
    assert (
        f"3 comparisons (1 form × 3 methods), Welch's t-test over the seeds. The smallest p is {expected:.3f}"
        in text
    )
    assert f"by Holm {3 * expected:.2f}" in text


def test_an_old_result_says_that_its_rows_average_different_sentences() -> None:
    told = flow_tables.report(outcome(old=True), "blankout")
    rows = dict(told.grids[0].rows)
    assert rows["rollout, measured"][0] == "0.21±0.21"
    assert rows["raw, n of 40"] == ["40", "39", "38", "37", "36", "35"]
    assert rows["flow, n of 40"] == ["30", "29", "28", "27", "26", "25"]
    assert len(told.grids) == 4, "no table of what was not measured"
    assert "natural mix (n = 388)" in told.grids[-1].columns
    text = " ".join(told.notes)
    assert (
        "before methods were compared on the same sentences: each row is a mean over those that its own"
        in text
    )
    assert "raw 35–40, rollout 34–39, flow 25–30" in text
    assert "made before the recipe measured absolute blank-out" in text


def test_one_seed_has_no_spread_and_no_comparison_of_forms() -> None:
    many = outcome()
    told = flow_tables.report(Outcome(many.config, {0: copy.deepcopy(many.per_seed[0])}), "blankout")
    text = " ".join(told.notes)
    assert "sd over seeds" not in text
    assert "comparisons" not in text
    assert dict(told.grids[2].rows)["both, flow"][0] == "0.70"


def test_sizes_are_of_every_part_and_the_natural_mix_is_no_part_of_the_checksum(folder: Path) -> None:
    corpus = linzen.load(folder)
    described = corpus.describe()
    expected = {"train": len(corpus.train), "validation": len(corpus.validation), "test": 21}
    expected |= {"natural": 7, "1": 7, "2": 7}
    assert linzen.part_sizes(described) == expected
    del described["parts"]["test, natural mix"]  # as it was described before
    assert linzen.part_sizes(described) == expected
    # models that were trained before are still of these data
    parts = {"train": corpus.train, "validation": corpus.validation, "test": corpus.test}
    parts |= {f"test, {n} attractors": part for n, part in corpus.by_attractors.items()}
    text = "\n".join(f"{name} {p.plural} {' '.join(p.tokens)}" for name in parts for p in parts[name])
    assert described["sha256"] == hashlib.sha256(text.encode()).hexdigest()


def test_a_try_does_not_overwrite_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "RECIPES", {"toy": _toy()})
    for options, place in (
        ({}, "results"),
        ({"extra": ["--size", "3"]}, "runs/toy/results"),
        ({"seeds": 1}, "runs/toy/results"),
        ({"extra": ["--kind", "b"]}, "results"),
        ({"results": tmp_path / "mine", "extra": ["--size", "3"]}, "mine"),
    ):
        before = set(tmp_path.rglob("*.json"))
        reproduce.run("toy", device="cpu", **options)
        [new] = set(tmp_path.rglob("*.json")) - before or {tmp_path / "runs/toy/results/toy.json"}
        assert new.parent == tmp_path / place
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"toy.json", "toy-b.json"}
    assert (tmp_path / "RESULTS.md").exists()
    assert (tmp_path / "mine" / "RESULTS.md").exists()
    (tmp_path / "results" / "toy.json").unlink()
    (tmp_path / "results" / "toy.remark.md").write_text("It awaits weights.")
    assert "It awaits weights." in reproduce.render(tmp_path / "results").read_text()


def _toy() -> Recipe:
    def run(request: Request) -> Outcome:
        numbers = {seed: {"x": float(seed)} for seed in range(request.seeds)}
        return Outcome({}, numbers)

    def report(outcome: Outcome) -> Report:
        return Report([Grid("x", ["x"], [("x", [cell(outcome.mean["x"])])])])

    options = {"size": Option("how much", 2, least=1), "kind": Option("which", "a", names=True)}
    return Recipe("toy", "A toy", "Nobody 2020", {}, run, report, seeds=2, folder="toy", options=options)


def test_result_files_name_no_folder_of_one_machine() -> None:
    def strings(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for each in value.values() if isinstance(value, dict) else value:
                yield from strings(each)

    for path in sorted(STORED.glob("*.json")):
        absolute = [text for text in strings(json.loads(path.read_text())) if re.match(r"/\w+/", text)]
        assert not absolute, f"{path.name}: {absolute[:3]}"
