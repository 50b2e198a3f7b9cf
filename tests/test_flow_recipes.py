"""Flow Tables 1–3 by several definitions, against importances and correlations computed by hand."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy.stats import rankdata, spearmanr
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

import overt
from overt.data import linzen
from overt.data.gap import Case
from overt.judge import spearman
from overt.models.agreement import AgreementClassifier
from overt.recipes import (
    flow_definitions,
    flow_figures,
    flow_pronouns,
    flow_sentiment,
    flow_tables,
    reproduce,
)
from overt.recipes._recipe import Outcome

QUIET = Console(quiet=True)
UNK, END = linzen.UNK, 8
IDS = torch.tensor([[1, 3, 4, 5, 6, END], [1, 4, 7, END, 0, 0]])
LABELS = torch.tensor([1, 0])


def network(seed: int = 0) -> AgreementClassifier:
    torch.manual_seed(seed)
    model = AgreementClassifier(9, layers=2, heads=2, width=8, max_length=6, dropout=0.0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model


def test_dense_ranks_leave_no_gap_after_equal_values() -> None:
    scores, other = np.array([[0.1, 0.1, 0.5, 0.9]]), np.array([2.0, 1.0, 1.0, 4.0])
    expected = np.corrcoef(rankdata(scores[0], "dense"), rankdata(other, "dense"))[0, 1]
    assert spearman(scores, other, "dense")[0] == pytest.approx(expected)
    assert spearman(scores, other)[0] == pytest.approx(spearmanr(scores[0], other).statistic)
    assert expected != pytest.approx(spearmanr(scores[0], other).statistic)
    assert np.isnan(spearman(scores, np.ones(4), "dense")[0])
    with pytest.raises(ValueError, match="ties must be"):
        spearman(scores, other, "first")  # type: ignore[arg-type]


def test_the_sum_of_a_gradient_is_rounding_error_where_blocks_begin_with_a_norm() -> None:
    inputs = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}
    trace = overt.trace(network(), inputs)
    sums, norms = (trace.gradients(target=LABELS, kind=kind) for kind in ("sum", "norm"))
    assert float(norms[0].min()) > 1e-5
    assert float((sums.abs() / norms.clamp_min(1e-12)).max()) < 1e-4
    bert = overt.trace(tiny_bert(), inputs)  # whose embeddings pass through a norm, too
    assert float(bert.gradients(target=LABELS, kind="sum").abs().max()) < 1e-6


def test_the_sum_of_a_gradient_is_that_of_its_dimensions() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=9,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
        pad_token_id=0,
        num_labels=2,
    )
    model = LlamaForSequenceClassification(config).eval()  # its norms do not subtract a mean
    found = overt.trace(model, {"input_ids": IDS[:1]}).gradients(target=LABELS[:1], kind="sum")
    leaf = model.get_input_embeddings()(IDS[:1]).detach().requires_grad_()
    torch.softmax(model(inputs_embeds=leaf).logits, dim=-1)[0, 1].backward()
    assert leaf.grad is not None
    assert float(found.abs().min()) > 1e-4
    assert found.flatten().tolist() == pytest.approx(leaf.grad[0].sum(dim=-1).tolist(), abs=1e-6)


def test_each_definition_is_the_correlation_that_its_name_says() -> None:
    model, mask = network(seed=1), (IDS != 0).long()
    ready = [({"input_ids": IDS, "attention_mask": mask}, LABELS)]
    found = flow_definitions.measure(model, ready, QUIET, "test", UNK, END)
    rollout = overt.trace(model, ready[0][0]).rollout(queries=0)[:, :, 0].numpy()

    def by_hand(
        words: bool, sign: bool, last: bool = False, zero: bool = False, dense: bool = False
    ) -> list[list[float]]:
        rows = []
        for sentence in range(2):
            length = int(mask[sentence].sum())
            ids, right = IDS[sentence : sentence + 1, :length], int(LABELS[sentence])

            def p(ids: torch.Tensor, right: int = right) -> float:
                with torch.no_grad():
                    logits = model(ids, torch.ones_like(ids))["logits"]
                return float(torch.softmax(logits.double(), dim=-1)[0, right])

            importance = []
            for place in range(length):
                blank = ids.clone()
                blank[0, place] = UNK
                importance.append(p(ids) - p(blank))
            importance = importance if sign else [abs(value) for value in importance]
            if zero:
                importance[-1] = 0.0
            tokens = slice(1 if words else 0, length if last else length - 1)
            row = []
            for layer in rollout[sentence]:
                pair = layer[:length][tokens], np.array(importance)[tokens]
                ranks = [rankdata(values, "dense" if dense else "average") for values in pair]
                row.append(float(np.corrcoef(*ranks)[0, 1]))
            rows.append(row)
        return rows

    expected = {
        "signed": by_hand(words=True, sign=True),
        "absolute": by_hand(words=True, sign=False),
        "cls": by_hand(words=False, sign=False),
        "end": by_hand(words=False, sign=False, last=True),
        "zero": by_hand(words=False, sign=False, last=True, zero=True, dense=True),
    }
    for key, rows in expected.items():
        assert found[key]["rollout"]["n"] == [2, 2], key
        assert found[key]["rollout"]["mean"] == pytest.approx(np.mean(rows, axis=0).tolist(), abs=1e-6), key
        assert found[key]["rollout"]["sd"] == pytest.approx(np.std(rows, axis=0, ddof=1).tolist()), key
    assert len({tuple(found[key]["rollout"]["mean"]) for key in expected}) == 5, "they differ"
    assert found["sum of gradients"]["largest"] < 1e-4
    without = flow_definitions.measure(model, ready, QUIET, "test", UNK)
    assert "end" not in without
    assert "zero" not in without


def tiny_bert() -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=9,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        initializer_range=0.5,
    )
    return BertForSequenceClassification(config).eval()


def test_the_released_measure_of_table_3_sums_gradients_and_takes_the_largest_weight() -> None:
    model, inputs = tiny_bert(), {"input_ids": IDS, "attention_mask": (IDS != 0).long()}
    found = flow_definitions.measure_as_released(model, [(inputs, LABELS)], QUIET, "test")
    assert found is not None
    rows = []
    for sentence, length in enumerate((6, 4)):
        ids = IDS[sentence : sentence + 1, :length]
        leaf = model.bert.embeddings(ids).detach().requires_grad_()
        hidden = model.bert.encoder(leaf)[0]
        model.classifier(model.bert.pooler(hidden)).sum().backward()
        importance = leaf.grad[0].sum(dim=-1).abs()
        maps = overt.trace(model, {"input_ids": ids}).raw()[0]  # (layer, query, token)
        row = []
        for weights in maps:
            ranks = [rankdata(values.numpy(), "dense") for values in (weights.amax(dim=0), importance)]
            row.append(float(np.corrcoef(*ranks)[0, 1]))
        rows.append(row)
    assert found["raw"]["mean"] == pytest.approx(np.mean(rows, axis=0).tolist(), abs=1e-6)
    assert found["raw"]["n"] == [2, 2]


def test_table_3_says_on_how_many_sentences_each_measure_is() -> None:
    by_layer = {"mean": [0.1, 0.2], "sd": [0.1, 0.1], "defined": [6, 6]}
    numbers = dict.fromkeys(flow_tables.METHODS, by_layer)
    ours = {"count": 6, "gradients": numbers, "common": {"count": 6, "gradients": numbers}}
    row = {"as_released": numbers, "spearman": {"few": ours, "all": ours}}
    sentences = {"train": 8, "dev": 872, "few": 6, "as_released": 101}
    grid = flow_sentiment._measures_grid(Outcome({"sentences": sentences}, {0: row, 1: row}))
    assert grid is not None
    assert grid.title.startswith("The released measure on 101 sentences beside ours on 6, Spearman")
    assert dict(grid.rows)["flow, published"] == ["0.11", "–"]


def test_the_regularised_network_has_three_dropouts_and_a_token_that_ends_sentences() -> None:
    prefix = linzen.Prefix(("the", "keys", "to"), plural=True)
    corpus = linzen.Corpus("small", [prefix] * 2, [prefix], [prefix], {}, "by hand")
    corpus = replace(corpus, train=[prefix, replace(prefix, tokens=("the", "keys", "of", "to"))])
    ended = replace(corpus, ended=True)
    assert ended.vocabulary == (*corpus.vocabulary, "<eos>")
    assert ended.encode(prefix) == [*corpus.encode(prefix), ended.end]
    assert corpus.end is None
    assert ended.longest == corpus.longest + 1
    model = flow_tables.build(ended, flow_tables.NETWORKS[flow_tables.REGULARISED])
    block: Any = model.encoder.blocks[0]
    assert (block.attention.dropout, block.dropout.p, model.dropout.p) == (0.6, 0.4, 0.2)
    assert model.tokens.num_embeddings == len(corpus.vocabulary) + 1


@pytest.fixture
def agreement(tmp_path: Path) -> Path:
    """Small files of the published layout."""
    nouns = ("key", "dog", "tree", "bird", "cup", "ship", "wall", "road", "hill", "lamp")
    for name, middle in (("val", "near the"), ("test.1", "of the"), ("test.2", "by the")):
        lines = []
        for first in nouns:
            for second in nouns[:6]:
                lines.append(f"VBZ\tthe {first} {middle} {second}s")
                lines.append(f"VBP\tthe {first}s {middle} {second}")
        (tmp_path / f"numpred.{name}").write_text("\n".join(lines) + "\n")
    return tmp_path


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HEADS": 2, "WIDTH": 8, "BATCH": 8, "CHECKPOINTS": 3, "WARMUP": 2}.items():
        monkeypatch.setattr(flow_tables, name, value)


@pytest.mark.slow
def test_tables_show_both_networks_by_every_definition(
    agreement: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch)

    def run(name: str) -> dict[str, Any]:
        extra = ("--forms", "plain,regularised", "--steps", "6", "--examples", "12")
        out, results = tmp_path / "run", tmp_path / "results"
        return reproduce.run(
            name, data=agreement, out=out, results=results, device="cpu", seeds=1, extra=extra
        )

    first = run("flow-table-1")
    tables = {table["title"]: table for table in first["tables"]}
    [definitions] = [table for title, table in tables.items() if title.startswith("Which definition")]
    assert definitions["columns"][0] == "signed, words"
    assert definitions["columns"][-2:] == ["`<eos>` := 0, dense ranks", "published"]
    rows = dict(definitions["rows"])
    assert rows["ours, rollout, L6"][-3:] == ["–", "–", "0.71"], "ours has no <eos>"
    assert "–" not in rows["regularised, rollout, L6"]
    mean = first["per_seed"]["0"]["plain"]["definitions"]["cls"]["flow"]["mean"][5]
    assert rows["ours, flow, L6"][2] == f"{mean:.2f}".replace("-", "−")
    [beside] = [table for title, table in tables.items() if title.startswith("The regularised network")]
    assert dict(beside["rows"])["flow, published"][2] == "0.70±0.25"
    assert first["notes"][0].startswith("Which definition gives which number")
    assert not any("Not measured yet" in note for note in first["notes"])
    # the same by the other code, where both have it
    plain = first["per_seed"]["0"]["plain"]
    for key, reference in (("signed", "blankout"), ("absolute", "blankout-absolute"), ("norm", "gradients")):
        for method in flow_tables.METHODS:
            known = plain["spearman"]["common"][reference][method]["mean"]
            assert plain["definitions"][key][method]["mean"] == pytest.approx(known, abs=1e-6)
    ended = first["per_seed"]["0"]["regularised"]
    known = ended["spearman"]["common"]["blankout"]["flow"]["mean"]
    assert ended["definitions"]["signed"]["flow"]["mean"] == pytest.approx(known, abs=1e-6), (
        "<eos> is no word"
    )

    second = run("flow-table-2")
    titles = [table["title"] for table in second["tables"]]
    assert any(title.startswith("abs(Σ_d g) / ‖g‖") for title in titles)
    assert "the sum of g over the embedding's dimensions, of CLS and `<eos>` too" in second["notes"][0]
    assert "CLS token is ranked only where a row or a column says so" in " ".join(first["notes"])
    settings = json.loads((tmp_path / "run" / "regularised" / "seed-0" / "settings.json").read_text())
    assert settings["network"]["attention_dropout"] == 0.6


@pytest.mark.slow
def test_networks_may_be_trained_and_measured_side_by_side(
    agreement: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch)
    done: list[Any] = []

    def in_turn(tasks: Any, perform: Any, shared: Any, workers: int, prepare: Any) -> Any:
        """As other processes do: all that they need is copied."""
        assert (workers, prepare) == (2, flow_tables.one_thread)
        for task in reversed(tasks):
            done.append(task)
            yield task, perform(task, pickle.loads(pickle.dumps(shared)), lambda _: None)

    train, trained = flow_tables._train, []
    monkeypatch.setattr(flow_tables, "side_by_side", in_turn)
    monkeypatch.setattr(flow_tables, "_train", lambda *args: trained.append(args[2]) or train(*args))
    found = reproduce.run(
        "flow-table-1",
        data=agreement,
        out=tmp_path / "run",
        results=tmp_path / "results",
        device="cpu",
        seeds=2,
        fresh=True,
        extra=("--forms", "evolving", "--steps", "2", "--examples", "4", "--workers", "2"),
    )
    assert done == [("evolving", 1), ("evolving", 0)]
    assert trained == ["evolving, seed 1", "evolving, seed 0"], "once each, though --fresh was given"
    assert set(found["per_seed"]) == {"0", "1"}


def test_one_word_of_each_sentence_is_changed() -> None:
    for sentence in flow_figures.SENTENCES:
        pairs = zip(sentence.words, sentence.changed, strict=True)
        differing = [pair for pair in pairs if pair[0] != pair[1]]
        assert differing == [(sentence.old, sentence.new)]


@pytest.mark.slow
def test_figures_say_what_the_network_answers_and_are_drawn_again_from_the_result(
    agreement: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch)
    out, results = tmp_path / "run", tmp_path / "results"

    def run(name: str) -> dict[str, Any]:
        extra = ("--steps", "3")
        return reproduce.run(
            name, data=agreement, out=out, results=results, device="cpu", seeds=1, extra=extra
        )

    result = run("flow-figure-2")
    corpus = linzen.load(agreement)
    model = flow_tables.load_trained(out / "plain" / "seed-0", corpus)
    rows, page = dict(result["tables"][0]["rows"]), results / "flow-figure-2.html"
    for sentence in flow_figures.SENTENCES:
        answers = []
        for words in (sentence.words, sentence.changed):
            ids = torch.tensor([corpus.encode(linzen.Prefix(words, plural=False))])
            with torch.no_grad():
                answers.append(float(torch.softmax(model(ids, torch.ones_like(ids))["logits"][0], dim=-1)[1]))
        found = result["per_seed"]["0"]["sentences"][sentence.text]
        assert [found["plural"], found["changed"]] == pytest.approx(answers, abs=1e-5)
        flips = (answers[0] < 0.5) != (answers[1] < 0.5)
        assert rows[sentence.text][1] == f"{int(answers[0] < 0.5)} of 1"
        assert rows[sentence.text][4] == f"{int(flips)} of 1"
        for words, plural in zip((sentence.words, sentence.changed), answers, strict=True):
            answer = f"are ({plural:.2f})" if plural > 0.5 else f"is ({1 - plural:.2f})"
            assert f"{' '.join(words)} … {answer}" in page.read_text()
        trace = flow_figures.trace_of(model, corpus, sentence.words)
        again = flow_figures.restored(result["config"]["maps"][sentence.text])
        for method in ("raw", "rollout", "flow"):
            expected, read = (each.read(method, 0) for each in (trace, again))
            assert torch.allclose(read, expected, atol=1e-4)
    assert "systems" in " ".join(result["notes"]), "a word that these data lack"
    figure = results / "flow-figure-2.svg"
    before = figure.read_bytes()
    assert "the articles on NNP large systems" in page.read_text()
    figure.unlink()
    reproduce.retell("flow-figure-2", results)
    assert figure.read_bytes() == before
    monkeypatch.setattr(flow_tables, "train_classifier", None)  # the others take the same model
    assert [name for name, _ in run("flow-figure-1")["tables"][0]["rows"]] == ["the key to the cabinets"]
    assert (results / "flow-figure-1.png").exists()


def case_of(text: str, pronoun: str, first: str, second: str, right: int) -> Case:
    spans = [(text.index(word), text.index(word) + len(word)) for word in (pronoun, first, second)]
    return Case(text, spans[0], (spans[1], spans[2]), right)


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random causal language model with a tokenizer of whole words."""
    place = tmp_path_factory.mktemp("causal")
    texts = [case.text for case in flow_pronouns.SENTENCES.values()]
    words = sorted(
        {
            *" ".join(texts).replace(".", " .").split(),
            *["he", "him", "his", "she", "hers", "Ann", "Bob", "met", "so"],
        }
    )
    vocabulary = {word: code for code, word in enumerate(["[UNK]", *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]").save_pretrained(place)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.7,
    )
    LlamaForCausalLM(config).save_pretrained(place)
    return place


def test_a_causal_model_reads_the_text_before_the_pronoun(causal: Path) -> None:
    model, tokenizer = flow_pronouns.load_model(str(causal))
    reader = flow_pronouns.reader_of(model, tokenizer)
    assert reader.kind == "causal"
    reading = reader.read(case_of("Laura met Bob so she saw David .", "she", "Laura", "Bob", 0))
    assert not isinstance(reading, str)
    ids = torch.tensor([tokenizer("Laura met Bob so")["input_ids"]])
    assert ids.shape == (1, 4)
    model.set_attn_implementation("eager")

    def his(hidden: int | None = None) -> float:
        mask = torch.ones(1, 4, dtype=torch.long)
        if hidden is not None:
            mask[0, hidden] = 0
        with torch.no_grad():
            likely = model(ids, attention_mask=mask).logits[0, -1].double().softmax(dim=-1)
        one, other = (
            sum(likely[tokenizer.convert_tokens_to_ids(word)] for word in words)
            for words in (("he", "him", "his"), ("she", "her", "hers"))
        )
        return float(one / (one + other))

    assert reading["his"] == pytest.approx(his(), abs=1e-6)
    falls = [his(place) - his() for place in (0, 2)]  # of p(she …)
    assert reading["blanked"] == int(falls[1] > falls[0])
    with torch.no_grad():
        maps = model(ids, output_attentions=True).attentions
    for layer, cells in enumerate(maps):
        row = cells[0].mean(dim=0)[-1]
        assert reading["first"]["raw"][layer] == pytest.approx(float(row[0] / (row[0] + row[2])), abs=1e-5)
        assert reading["sink"]["raw"][layer] == pytest.approx(float(row[0]), abs=1e-5)
    assert reading["first"]["rollout, receptive field"] != reading["first"]["rollout"]
    assert "raw, receptive field" not in reading["first"], "it would change nothing"


@pytest.mark.slow
def test_a_name_after_the_pronoun_is_left_out_and_counted(
    causal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL"
    rows = [
        "1\tLaura met Bob so she\tshe\t17\tLaura\t0\tTRUE\tBob\t10\tFALSE\tu",
        "2\tLaura met so she Bob\tshe\t13\tLaura\t0\tTRUE\tBob\t17\tFALSE\tu",
    ]
    (tmp_path / "gap-validation.tsv").write_text("\n".join([head, *rows]) + "\n")

    def run() -> dict[str, Any]:
        return reproduce.run(
            "flow-figure-4",
            data=tmp_path,
            out=tmp_path / "run",
            results=tmp_path / "results",
            device="cpu",
            model=str(causal),
        )

    # A run that is interrupted goes on with the texts that it has not read.
    monkeypatch.setattr(flow_pronouns, "TOGETHER", 1)
    read, seen = flow_pronouns.Reader.read, []

    def interrupted(reader: Any, case: Case) -> Any:
        seen.append(case.text)
        if len(seen) == len(flow_pronouns.SENTENCES) + 2:
            raise KeyboardInterrupt
        return read(reader, case)

    monkeypatch.setattr(flow_pronouns.Reader, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    result = run()
    own = [case.text for case in flow_pronouns.SENTENCES.values()]
    assert seen == [*own, *seen[2:4], *own, seen[3]]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["result.json", "settings.json"]
    row = result["per_seed"]["0"]
    assert row["left_out"] == {"long": 0, "after": 1, "lost": 0}
    assert row["gap"]["texts"] == 1
    assert row["gap"]["rules"]["right"] == {"first name": 1.0, "nearest name": 0.0}
    assert any("1 in which a name follows the pronoun" in note for note in result["notes"])
    for kind in ("svg", "png"):
        assert (tmp_path / "results" / f"flow-figure-4.{kind}").stat().st_size > 5_000


def test_swapping_two_names_moves_the_rules_and_not_the_score() -> None:
    def reading(share: float) -> dict[str, Any]:
        by_layer = {name: [share] for name in flow_pronouns.READ}
        sink = {name: [0.0] for name in flow_tables.METHODS}
        return {"his": 0.2, "first": by_layer, "sink": sink, "blanked": int(share < 0.5)}

    straight, swapped = [], []
    for woman, man in (("Ann", "Bob"), ("Laura", "David")):
        text = f"{woman} met {man} so she"
        straight.append((case_of(text, "she", woman, man, right=0), reading(0.9)))
        text = f"{man} met {woman} so she"
        swapped.append((case_of(text, "she", woman, man, right=0), reading(0.9)))
    before, after = flow_pronouns.statistics_of(straight), flow_pronouns.statistics_of(swapped)
    assert before["right"] == after["right"] == {name: [1.0] for name in flow_pronouns.READ}
    assert before["rules"]["right"] == {"first name": 1.0, "nearest name": 0.0}
    assert after["rules"]["right"] == {"first name": 0.0, "nearest name": 1.0}
    assert before["pronoun"] == before["feminine"] == before["model_is_right"] == 1.0
    # where both names have the same, nothing is preferred
    tied = flow_pronouns.statistics_of([(straight[0][0], reading(0.5))])
    assert tied["right"]["flow"] == [0.5]
