"""What maps of text classifiers hold: the maps, the second network, its controls, and appendix Figure 6."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overt
from overt.data.glue import Row
from overt.models.map_probe import TextMapProbe
from overt.recipes import (
    ea_figure_a6,
    ea_probe_text,
    map_probing,
    reproduce,
    text_training,
    understanding_runs,
)
from overt.recipes._recipe import Outcome
from overt.recipes.map_probing import Probed, permuted, scores_of
from overt.recipes.text_maps import LONGEST, layers_of, sentence_maps, uniform_maps, untrained
from overt.recipes.text_training import encode
from small_text import WORDS, cola, small_bert


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_bert(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def sentences(count: int) -> list[Row]:
    return [Row((" ".join(WORDS[: 1 + (5 * n) % 7]),), n % 2) for n in range(count)]


# --- The maps ---


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    "mechanisms", [(), (overt.Evolving(alpha=0.3, beta=0.3),)], ids=["plain", "Evolving"]
)
def test_maps_are_those_of_a_trace_of_each_sentence_alone(
    model: str, tokenizer: Any, mechanisms: Any, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "padding_side", side)
    net = untrained(model, ("bad", "good"), mechanisms, seed=1)
    rows = encode(sentences(9), tokenizer, LONGEST)
    for layer in (1, 2):
        found = sentence_maps(net, rows, tokenizer, layer)
        assert found.maps.shape == (9, 2, LONGEST, LONGEST)
        assert found.maps.dtype == torch.float16
        for place, row in enumerate(rows):
            length = len(row["input_ids"])
            assert int(found.lengths[place]) == length
            alone = overt.trace(net, {"input_ids": torch.tensor([row["input_ids"]])}, heads=True)
            expected = torch.zeros(2, LONGEST, LONGEST)
            if side == "right":  # positions are counted from the left: padding there moves them
                expected[:, :length, :length] = alone.maps[layer - 1][0]
                torch.testing.assert_close(found.maps[place].float(), expected, atol=1e-3, rtol=0)
            else:
                assert not found.maps[place, :, length:].any()
                assert not found.maps[place, :, :, length:].any()
                sums = found.maps[place, :, :length].float().sum(dim=-1)
                torch.testing.assert_close(sums, torch.ones(2, length), atol=5e-3, rtol=0)


@pytest.mark.parametrize("family", ["albert", "t5"])
def test_layers_are_counted_where_weights_are_shared_and_in_the_encoder_of_two(
    family: str, tokenizer: Any
) -> None:
    from transformers import (
        AlbertConfig,
        AlbertForSequenceClassification,
        T5Config,
        T5ForSequenceClassification,
    )

    torch.manual_seed(0)
    size = len(tokenizer)
    net: Any
    if family == "albert":
        sizes = {"hidden_size": 16, "embedding_size": 8, "num_attention_heads": 2, "intermediate_size": 32}
        net = AlbertForSequenceClassification(AlbertConfig(vocab_size=size, num_hidden_layers=3, **sizes))
    else:
        numbers = {"num_layers": 3, "num_heads": 2, "decoder_start_token_id": 0, "eos_token_id": 3}
        net = T5ForSequenceClassification(
            T5Config(vocab_size=size, d_model=16, d_kv=8, d_ff=32, pad_token_id=0, **numbers)
        )
    text = "good bad film"
    net = net.eval()
    [row] = encode([Row((text,), 0)], tokenizer, LONGEST)
    traced = ea_figure_a6.of_text(ea_figure_a6.traced(net, text, tokenizer, parts=False))
    assert len(traced.maps) == 3
    for layer in (1, 2, 3):
        found = sentence_maps(net, [text_training.without_label(row)], tokenizer, layer)
        torch.testing.assert_close(
            found.maps[0, :, :5, :5].float(), traced.maps[layer - 1][0], atol=1e-3, rtol=0
        )
    with pytest.raises(ValueError, match="layer 4 has no map: 3 attentions ran"):
        sentence_maps(net, [row], tokenizer, 4)


def test_longer_sentences_must_be_cut(model: str, tokenizer: Any) -> None:
    long = [Row((" ".join(WORDS * 5),), 0)]
    [cut] = encode(long, tokenizer, LONGEST)
    assert len(cut["input_ids"]) == LONGEST
    assert cut["input_ids"][-1] == tokenizer.sep_token_id
    net = untrained(model, ("bad", "good"), (), seed=0)
    with pytest.raises(ValueError, match="sentences must have at most 32 tokens, got 52"):
        sentence_maps(net, encode(long, tokenizer, 128), tokenizer, 1)


def test_layers_are_the_second_the_middle_and_the_last_two_that_there_are(model: str, tmp_path: Path) -> None:
    from transformers import BertConfig

    def default(count: int) -> tuple[int, ...]:
        return 2, count // 2, count - 1, count

    for count, expected in ((1, (1,)), (2, (1, 2)), (6, (2, 3, 5, 6)), (12, (2, 6, 11, 12))):
        BertConfig(num_hidden_layers=count).save_pretrained(tmp_path)
        assert layers_of(str(tmp_path), None, default) == expected
    assert layers_of(model, "2", default) == (2,)
    for text in ("0", "3", "last", "1,,2"):
        with pytest.raises(
            ValueError, match=f"--layers must be numbers of attentions, from 1 to 2, .*{text}"
        ):
            layers_of(model, text, default)


# --- The second network ---


@pytest.mark.parametrize("training", [False, True], ids=["tested", "in training"])
def test_padding_changes_nothing_that_the_second_network_says(training: bool) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([2, 5, 7, 1])
    maps = torch.rand(4, 3, 7, 7)
    logits = []
    for side, rubbish in ((7, 0.0), (9, 0.0), (LONGEST, 0.0), (LONGEST, 5.0)):
        padded = torch.zeros(4, 3, side, side)
        padded[:, :, :7, :7] = maps
        for number, length in enumerate(lengths.tolist()):
            padded[number, :, length:] = rubbish
            padded[number, :, :, length:] = rubbish
        torch.manual_seed(1)
        probe = TextMapProbe(3, 2, width=8).train(training)
        logits.append(probe(padded, lengths))
        statistics = torch.cat([norm.running_mean for norm in probe.norms])  # type: ignore[misc]
        logits[-1] = torch.cat([logits[-1].flatten(), statistics])
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], atol=1e-5, rtol=1e-5)
    assert logits[0][0] != logits[0][2], "maps change it"


def accuracy(maps: Tensor, lengths: Tensor, labels: Tensor, shuffled: bool = False) -> float:
    """In %, on the second half, after a short training on the first."""
    torch.manual_seed(0)
    half = len(maps) // 2
    told = permuted(labels[:half], seed=0) if shuffled else labels[:half]
    probed = Probed(TextMapProbe(maps.shape[1], 2, width=8), maps[:half], told, lengths[:half])
    optimizer = torch.optim.SGD(probed.parameters(), 0.05, 0.9)
    for update in range(30):
        optimizer.zero_grad()
        probed(torch.arange(64) + 64 * (update % (half // 64)))["loss"].backward()
        optimizer.step()
    scores = scores_of(probed.eval(), maps[half:], lengths[half:])
    return 100 * float((scores.argmax(dim=1) == labels[half:]).double().mean())


def test_it_finds_a_pattern_in_maps_and_the_controls_stay_at_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    count = 384
    labels = torch.randint(2, (count,), generator=generator)
    rows = [{"input_ids": [0] * int(n)} for n in torch.randint(4, 10, (count,), generator=generator)]
    uniform = uniform_maps(rows)
    maps = uniform.maps.repeat(1, 2, 1, 1)
    for number, row in enumerate(rows):
        for place in torch.randperm(len(row["input_ids"]) - 1, generator=generator)[:2].tolist():
            query, key = (place, place + 1) if labels[number] else (place + 1, place)
            maps[number, 1, query] = 0.0
            maps[number, 1, query, key] = 1.0  # two tokens attend to the next, or to the one before
    assert accuracy(maps, uniform.lengths, labels) > 90
    assert 40 < accuracy(maps, uniform.lengths, labels, shuffled=True) < 60
    assert 40 < accuracy(*uniform, labels) < 60


def test_maps_of_an_untrained_model_tell_nothing_about_what_words_mean() -> None:
    """The class is that of the words, of which each occurs about twice: similar words look no more alike."""
    from transformers import BertConfig, BertForSequenceClassification

    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (512,), generator=generator)
    words = 2 * torch.randint(2, 1000, (512, 6), generator=generator) + labels.unsqueeze(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    net = BertForSequenceClassification(BertConfig(vocab_size=2002, initializer_range=0.5, **sizes))
    traced = overt.trace(net, {"input_ids": words}, heads=True)
    maps = torch.zeros(512, 2, LONGEST, LONGEST)
    maps[:, :, :6, :6] = traced.maps[0]
    assert 40 < accuracy(maps, torch.full((512,), 6), labels) < 60


def test_uniform_maps_hold_the_number_of_tokens_alone() -> None:
    maps, lengths = uniform_maps([{"input_ids": [5, 6, 7]}, {"input_ids": [7, 6, 5]}, {"input_ids": [1]}])
    assert torch.equal(maps[0], maps[1])
    assert lengths.tolist() == [3, 3, 1]
    torch.testing.assert_close(maps[0, 0, :3, :3].float(), torch.full((3, 3), 1 / 3), atol=1e-3, rtol=0)
    assert int(maps[0].count_nonzero()) == 9
    assert int(maps[2].count_nonzero()) == 1


def test_rows_for_the_second_network_are_always_the_same_and_chance_is_the_most_frequent_class() -> None:
    rows = sentences(50)
    some = ea_probe_text.some_of(rows, 20)
    assert len(some) == 20
    assert some == ea_probe_text.some_of(rows, 20)
    assert ea_probe_text.some_of(rows, 50) == ea_probe_text.some_of(rows, 1000) == rows
    labels = torch.tensor([1, 1, 1, 0])
    assert ea_probe_text.chance("SST-2", labels) == 75
    assert ea_probe_text.chance("CoLA", labels) == 0


# --- The recipes ---


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("everything is there")


@pytest.mark.slow
def test_the_probe_has_both_forms_and_its_controls_and_the_figure_shares_the_models(
    model: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(understanding_runs, "RATES", (3e-2,))
    monkeypatch.setattr(understanding_runs, "RATE_SEEDS", 1)
    data = cola(tmp_path / "data")

    def run(name: str, *extra: str, out: str = "runs", path: str | None = model) -> dict[str, Any]:
        places = {"out": Path(out), "results": Path("results")}
        return reproduce.run(name, data, 1, "cpu", path, extra=["--epochs", "4", *extra], **places)

    probe = ("ea-probe-text", "--probe-epochs", "2", "--probe-rows", "60", "--layers", "2")
    with pytest.raises(ValueError, match=r"--layers must be numbers of attentions, from 1 to 2, .*got 3"):
        run(*probe, "--layers", "3")
    with pytest.raises(ValueError, match="this recipe fine-tunes a pretrained model: give --model"):
        run("ea-figure-a6", path=None)
    with pytest.raises(
        ValueError, match=r"--to must be a word that the sentence has once, got 'Jon', .* 0 ti"
    ):
        run("ea-figure-a6", "--to", "Jon")
    assert not Path("runs").exists(), "nothing is trained before that is known"

    given: dict[str, Probed] = {}
    fit = map_probing.vision_training.fit

    def note(probed: Any, folder: Path, *rest: Any, **arguments: Any) -> dict[str, Any]:
        given[folder.parent.name] = probed
        return fit(probed, folder, *rest, **arguments)

    monkeypatch.setattr(map_probing.vision_training, "fit", note)
    result = run(*probe)
    assert set(given) == {
        "plain-CoLA-layer-2", "Evolving-CoLA-layer-2", "untrained-Evolving-CoLA-layer-2",
        "Evolving-permuted-labels-CoLA-layer-2", "uniform-maps-CoLA",
    }  # fmt: skip
    trained, other, shuffled = (
        given[f"{name}-layer-2"]
        for name in ("Evolving-CoLA", "untrained-Evolving-CoLA", "Evolving-permuted-labels-CoLA")
    )
    assert trained.maps.shape == (60, 2, LONGEST, LONGEST), "of 72 rows that are not held out"
    assert torch.equal(trained.maps, shuffled.maps)
    assert not torch.equal(trained.labels, shuffled.labels)
    assert torch.equal(trained.labels.bincount(), shuffled.labels.bincount())
    assert torch.equal(trained.labels, other.labels)
    assert not torch.equal(trained.maps, other.maps)
    rows = result["per_seed"]["0"]
    assert len(rows) == len(given) + 1, "and the training that chose the learning rate"
    assert rows["plain, CoLA, layer 2"]["model_score"] == 100
    table = dict(result["tables"][0]["rows"])
    assert list(table) == [
        "plain", "Evolving", "untrained Evolving", "Evolving, permuted labels", "uniform maps",
        "the most frequent class",
    ]  # fmt: skip
    assert table["uniform maps"] == ["1", "0.00", "–"], "all sentences have four tokens"
    assert table["the most frequent class"] == ["", "0.00", "–"]
    assert result["config"]["probed"] == {"CoLA": 60}

    rows = copy.deepcopy(rows)
    for name, numbers in rows.items():  # as on a GPU
        numbers["run"]["settings"]["precision"] = "tf32" if "rate" in name else "bfloat16"
    told = " ".join(ea_probe_text.report(Outcome(result["config"], {0: rows})).notes)
    assert "as a cosine, bfloat16." in told, "the second network"
    assert "the last step's weights, float32 with products in TF32." in told, "the models"

    monkeypatch.setattr(map_probing.vision_training, "fit", refuse)
    monkeypatch.setattr(text_training, "train", refuse)
    assert run(*probe)["per_seed"] == result["per_seed"]
    assert run(*probe, out="elsewhere")["per_seed"] == result["per_seed"], "a result file holds all of it"
    assert not list(Path("elsewhere").rglob("model.safetensors"))

    check_figure(run, tokenizer)
    shutil.rmtree(next(Path("runs").rglob("Evolving-CoLA")) / "seed-0" / "model")
    with pytest.raises(
        FileNotFoundError, match=r"needs the model of Evolving, CoLA, and .* has none: ea-table-3 --fresh"
    ):
        run("ea-figure-a6")


def check_figure(run: Any, tokenizer: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    sentence = "fine good-film actor."
    figure = run("ea-figure-a6", "--sentence", sentence, "--from", "good-film", "--to", "actor")
    place = next(Path("runs").rglob("plain-CoLA"))
    config = figure["config"]
    assert config["tokens"] == ["[CLS]", "fine", "good", "[UNK]", "film", "actor", "[UNK]", "[SEP]"]
    assert config["places"] == {"from": [2, 3, 4], "to": [5]}
    net = AutoModelForSequenceClassification.from_pretrained(
        place / "seed-0" / "model", attn_implementation="eager"
    )
    with torch.no_grad():
        output = net(**tokenizer(sentence, return_tensors="pt"), output_attentions=True)
    numbers = figure["per_seed"]["0"]
    plain, evolving = numbers["plain, CoLA"], numbers["Evolving, CoLA"]
    for layer, cells in enumerate(output.attentions, start=1):
        rows = [sum(float(head[query, 5]) for head in cells[0]) / 2 for query in (2, 3, 4)]
        assert plain[f"weight, plain, layer {layer}"] == pytest.approx(sum(rows) / 3, abs=1e-6)
    says = ("unacceptable", "acceptable")[int(output.logits.argmax())]
    assert plain["says"] == says
    assert plain["p unacceptable"] == pytest.approx(float(output.logits.softmax(-1)[0, 0]), abs=1e-6)
    assert plain["score"] == 100, "the numbers of the model's training are there too"
    own = evolving["weight, Evolving, own map, layer 1"]
    assert evolving["weight, Evolving, layer 1"] == pytest.approx(own), "the first layer does not evolve"
    assert evolving["weight, Evolving, convolution, layer 1"] is None
    assert evolving["weight, Evolving, convolution, layer 2"] is not None
    weights, verdicts = (dict(table["rows"]) for table in figure["tables"][:2])
    assert weights["Evolving, convolution"][1] == "–"
    assert weights["uniform weights"] == ["", "0.125", "0.125"]
    assert verdicts["plain"][:2] == ["1", f"{int(says == 'unacceptable')} of 1"]
    assert Path("results/ea-figure-a6.svg").read_text().count("<image") == 7
    assert Path("results/ea-figure-a6.png").read_bytes()[1:4] == b"PNG"
    page = (place.parent / "ea-figure-a6.html").read_text()
    assert "Evolving, seed 0" in page


def test_words_are_found_as_their_tokens_and_others_are_refused(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def places(word: str, sentence: str = "good film, film-scene good-bad plots") -> list[int]:
        return ea_figure_a6.places_of(model, sentence, "from", word)

    # [CLS] good film , film - scene good - bad plots [SEP]
    assert places("film-scene") == [4, 5, 6]
    assert places("film,") == [2, 3]
    assert places("bad") == [9]
    for word, times in (("film", 2), ("plot", 0), ("", 0), ("Bad", 0)):
        with pytest.raises(
            ValueError, match=rf"--from must be a word .* once, got '{word}', .* {times} times"
        ):
            places(word)
    cells = torch.arange(16.0).view(4, 4)
    assert ea_figure_a6.weight_between(cells, [1, 2], [0, 3]) == ((4 + 7) + (8 + 11)) / 2

    class Slow:
        is_fast = False

    monkeypatch.setattr(ea_figure_a6, "load_tokenizer", lambda _: Slow())
    with pytest.raises(ValueError, match=r"must have a fast tokenizer, .* got Slow"):
        places("bad")
