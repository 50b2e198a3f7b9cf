"""Traces of recurrent decoders: the LSTM translator's map of source and target, from ids and from text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from typer.testing import CliRunner

import overt
from overt.cli import app
from overt.cli.serve import open_served
from overt.data import reordered, subwords
from overt.judge.correlation import correlate
from overt.mechanisms.attention_map import AttentionMap
from overt.mechanisms.chain import Chain
from overt.mechanisms.seen import Seen
from overt.mechanisms.site import Site
from overt.models.seq2seq import ATTENTIONS, Seq2Seq
from overt.recipes import lstm_training
from overt.recipes.lstm_training import BOS, EOS, UNKNOWN, LstmRow, collate, vocabularies
from overt.recipes.translation_training import Encoded, encode
from overt.tracing.tracer import everything
from overt.view.pages import page
from overt.view.server.limits import Limits
from overt.view.server.trace_request import TraceRequest, trace_answer
from traces import field, pair, recurrent

SIZES = {"embedding": 6, "encoder": 5, "decoder": 7, "score": 4}
SOURCE = torch.tensor([[5, 6, 7, 2], [8, 9, 2, 0], [5, 2, 0, 0]])
LABELS = torch.tensor([[4, 5, 2], [6, 2, -100], [7, 8, 2]])
REAL = LABELS != -100
BATCH = {
    "input_ids": SOURCE,
    "attention_mask": SOURCE.ne(0).long(),
    "decoder_input_ids": torch.tensor([[1, 4, 5], [1, 6, 2], [1, 7, 8]]),
    "labels": LABELS,
}


def network(attention: Any = "soft", *mechanisms: Any) -> Seq2Seq:
    torch.manual_seed(0)
    model = Seq2Seq(12, 11, attention, mechanisms, **SIZES, init=0.9)
    for parameter in (model.score, model.key.weight, model.query.weight):
        parameter.data *= 4.0  # so that maps are not uniform, and words differ
    return model


def by_hand(model: Seq2Seq, source: Tensor, target: Tensor) -> Tensor:
    """The weights of one sentence without padding, (target, source), word by word with torch's cells."""
    read, _ = model.encoder.lstm(model.source_words(source))
    h0, c0, h1, c1 = (torch.zeros(1, SIZES["decoder"]) for _ in range(4))
    context, rows = torch.zeros_like(read[:, 0]), []
    for word in target[0]:
        h0, c0 = model.lower(torch.cat([model.target_words(word.view(1)), context], dim=1), (h0, c0))
        h1, c1 = model.upper(h0, (h1, c1))
        scores = [model.score @ torch.tanh(model.query(h1)[0] + model.key(x)) for x in read[0]]
        rows.append(torch.stack(scores).softmax(dim=0))
        context = (rows[-1].unsqueeze(0) @ read[0]).view(1, -1)
    return torch.stack(rows).detach()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_map_is_the_prior_attention_of_each_word(attention: str) -> None:
    model = network(attention).train()
    traced = overt.trace(model, BATCH)
    assert model.training
    assert "rows" not in vars(model.map)
    assert (traced.kind, traced.maps, traced.layers, traced.queries) == ("encoder–decoder", [], 1, 3)
    raw = traced.raw()[:, 0]  # (batch, target, source and target)
    assert raw.shape == (3, 3, 7)
    torch.testing.assert_close(raw.sum(dim=-1), REAL.double(), msg="rows sum to one, those of padding to 0")
    assert bool((raw[..., 4:] == 0).all()), "nothing is attended to in the target"
    for example in range(3):
        tokens, words = int(BATCH["attention_mask"][example].sum()), int(REAL[example].sum())
        ids, target = SOURCE[example : example + 1, :tokens], BATCH["decoder_input_ids"][example, :words]
        want = by_hand(model.eval(), ids, target.unsqueeze(0))
        torch.testing.assert_close(raw[example, :words, :tokens].float(), want)
        assert bool((raw[example, :, tokens:] == 0).all()), "padding gets nothing"
        alone = overt.trace(model, ids, decoder=target.unsqueeze(0))
        torch.testing.assert_close(alone.raw()[0, 0, :, :tokens].float(), want)
    assert float(raw[0, :, :4].std(dim=0).max()) > 0.02, "words differ in what they attend to"


def test_without_decoder_inputs_the_model_translates_or_labels_are_read() -> None:
    model = network()
    translated, _ = model.translate(SOURCE, BATCH["attention_mask"], beam=1, max_length=64)
    inputs = {name: BATCH[name] for name in ("input_ids", "attention_mask")}
    traced = overt.trace(model, inputs)
    ids = traced.subject.inputs.arguments["decoder_input_ids"]  # type: ignore[union-attr]
    assert torch.equal(ids[:, 0], torch.ones(3, dtype=torch.long))
    assert torch.equal(ids[:, 1:], translated[:, :-1])
    assert torch.equal(traced.mask[:, 5:], (ids[:, 1:] != 0) & (ids[:, 1:] != 2)), "an end is no input"
    shifted = overt.trace(model, {**inputs, "labels": LABELS})
    given = overt.trace(model, BATCH)
    assert torch.equal(shifted.cross[0], given.cross[0])
    assert torch.equal(shifted.mask[:, 4:], REAL)
    assert torch.equal(given.mask[:, 4:], REAL)


def test_a_bayesian_map_is_that_of_the_mean_and_samples_are_the_models_own() -> None:
    model = network("soft", overt.Bayesian(k=3.0)).eval()
    traced = overt.trace(model, BATCH, samples=3, seed=7)
    assert torch.equal(traced.cross[0], overt.trace(model, BATCH).cross[0])

    def weights(**more: Any) -> Tensor:
        with torch.no_grad():
            return model(**BATCH, output_attentions=True, **more)["attentions"]

    torch.testing.assert_close(traced.cross[0][REAL], weights()[REAL])
    for number in range(3):
        chain = Chain(step=model.step, sample=number, seed=7)
        torch.testing.assert_close(traced.draws[number].cross[0][REAL], weights(chain=chain)[REAL])
    drawn = torch.stack([draw.cross[0] for draw in traced.draws]).double()
    spread = traced.spread("raw").spread[:, 0, :, :4]
    torch.testing.assert_close(spread[REAL], drawn.std(dim=0, correction=0)[REAL])
    assert float(spread.max()) > 0.05


def test_importances_are_differences_and_derivatives_of_its_probabilities() -> None:
    model = network("marginal").eval()
    traced = overt.trace(model, BATCH)

    def probabilities(ids: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            logits = model(ids, BATCH["attention_mask"], target)["logits"].double()
        return logits.exp().gather(-1, LABELS.clamp(min=0).unsqueeze(-1)).squeeze(-1)

    whole = probabilities(SOURCE, BATCH["decoder_input_ids"])
    effects = traced.blankout(unk=3)[:, 0]
    for name, place in (("input_ids", 1), ("decoder_input_ids", 1)):
        changed = {"input_ids": SOURCE.clone(), "decoder_input_ids": BATCH["decoder_input_ids"].clone()}
        changed[name][:, place] = 3
        effect = whole - probabilities(changed["input_ids"], changed["decoder_input_ids"])
        token = place + (4 if name == "decoder_input_ids" else 0)
        torch.testing.assert_close(effects[..., token][REAL], effect[REAL])
    # Along the embedding of one word, gradient × input is the derivative by the embedding's length.
    slopes, step = traced.gradients(kind="input")[:, 0], 1e-2
    for words, id_, token in ((model.source_words, 9, 1), (model.target_words, 6, 5)):
        ends = []
        for factor in (1 + step, 1 - step):
            scaled = words.weight.data.clone()
            scaled[id_] *= factor
            kept, words.weight.data = words.weight.data, scaled
            ends.append(probabilities(SOURCE, BATCH["decoder_input_ids"])[1, :2])
            words.weight.data = kept
        torch.testing.assert_close(
            slopes[1, :2, token], (ends[0] - ends[1]) / (2 * step), rtol=2e-2, atol=1e-5
        )
        assert float(slopes[1, 1, token].abs()) > 1e-4


NO_PATHS = "no (rollout|flow) through a recurrent decoder, .*raw shows the map"
RANDOM = "no (blank-out|gradients): the outputs of Seq2Seq are random"


@pytest.mark.parametrize(
    ("read", "match"),
    [
        (lambda t: t.rollout(), NO_PATHS),
        (lambda t: t.flow(), NO_PATHS),
        (lambda t: t.levels().level(1, "mean", 0.5), "a recurrent decoder has no levels"),
        (lambda t: t.encoder, "no separate encoder"),
        (lambda t: t.blankout(unk=3), RANDOM),
        (lambda t: t.gradients(), RANDOM),
        (lambda t: t.plot("cross", method="rollout"), NO_PATHS),
        (lambda t: t.plot("heads"), 'a recurrent decoder has none: view="cross"'),
    ],
)
def test_what_such_a_trace_cannot_say_is_refused(read: Any, match: str) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=match):
        read(overt.trace(network("variational-relaxed"), BATCH))


@pytest.mark.parametrize(
    ("inputs", "options", "match"),
    [
        (BATCH, {"stack": "encoder"}, "no attention ran in 'encoder'; stacks that did: 'map'"),
        (BATCH, {"mixing": "norm"}, "mixing='norm' needs more .*mixing=\"attention\""),
        (BATCH, {"mixing": "effective"}, "mixing='effective' needs more than weights"),
        (BATCH, {"mixing": "gradient"}, "mixing='gradient' needs more than weights"),
        (BATCH, {"parts": True}, "made row by row, and has no parts"),
        (BATCH, {"samples": 2}, "samples needs random weights"),
        (BATCH, {"mixing": "value-zeroing"}, "value zeroing|mixing='value-zeroing' needs more"),
        ("a b", {}, "Seq2Seq needs its tokenizer"),
        (SOURCE, {"decoder": [[1, 99]] * 3}, "must hold ids from 0 to 10, got 99"),
        (SOURCE, {"decoder": [1, 4]}, r"decoder_input_ids must have shape \(3, 2\), got \(1, 2\)"),
        ({**BATCH, "labels": LABELS.flip(1)}, {}, "labels must have its padding on the right"),
        (
            {**BATCH, "decoder_attention_mask": torch.ones(3, 2)},
            {},
            r"decoder_attention_mask must have shape \(3, 3\), got \(3, 2\)",
        ),
    ],
)
def test_what_a_recurrent_decoder_lacks_is_refused(inputs: Any, options: dict[str, Any], match: str) -> None:
    model = network("soft", overt.Evolving())
    with pytest.raises(ValueError, match=match):
        overt.trace(model, inputs, **options)
    assert "rows" not in vars(model.map), "the model is as it was"
    assert everything(model) == {"heads": True, "parts": False, "samples": 0}


class Reader(nn.Module):
    """Somebody else's recurrent decoder, over an encoder of Overt's; its rows in one go, or in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = overt.Encoder(8, 2, 1)
        self.cell = nn.GRUCell(8, 8)
        self.map = AttentionMap((), Site(1, 8, "cross", encoder_decoder=True))

    def forward(self, x: Tensor, words: int, pieces: bool = False, early: bool = False) -> Tensor:
        memory, state = self.encoder(x), x.new_zeros(x.shape[0], 8)
        chain = Chain(keep=pieces)
        rows = self.map.rows(memory.unsqueeze(1), 1 if pieces else words, chain, Seen())
        for _ in range(words - 1 if early else words):
            if pieces:
                rows = self.map.rows(memory.unsqueeze(1), 1, chain, Seen())
            weights = rows.weights((memory @ state.unsqueeze(-1)).mT.unsqueeze(1))
            state = self.cell((weights.squeeze(1) @ memory).squeeze(1), state)
        return state


def test_any_map_that_is_made_row_by_row_is_traced_beside_an_encoders() -> None:
    torch.manual_seed(0)
    model = Reader().eval()
    inputs = {"x": torch.randn(2, 5, 8), "words": 3}
    traced = overt.trace(model, inputs)
    assert (traced.maps, traced.cross[0].shape) == ([], (2, 3, 5))
    torch.testing.assert_close(traced.cross[0].sum(dim=-1), torch.ones(2, 3))
    torch.testing.assert_close(traced.cross[0][:, 0], torch.full((2, 5), 0.2), msg="the first state is zero")
    assert traced.encoder.maps[0].shape == (2, 5, 5)
    with pytest.raises(ValueError, match="map was made in 3 pieces: trace one pass over the whole target"):
        overt.trace(model, {**inputs, "pieces": True})
    with pytest.raises(ValueError, match="map was to have 3 rows, and only 2 were made"):
        overt.trace(model, {**inputs, "early": True})


# --- Pages, figures, files ---


def test_a_page_has_the_map_and_says_why_it_has_no_paths() -> None:
    trace = recurrent(samples=4)
    shown = page(trace, mass=1.0)
    (entry,) = shown.index["traces"]
    group = {"layers": 1, "heads": 1, "rows": [4, 9], "columns": [0, 4]}
    assert json.loads(json.dumps(entry["groups"])) == {"cross": group}
    assert (entry["layers"], entry["heads"], entry["main"]) == (1, 1, 4)
    assert "through a recurrent decoder" in entry["missing"]["rollout"]
    assert not {"mean", "rollout", "rollout average"} & set(entry["fields"])
    torch.testing.assert_close(field(shown, "cross mean", 0).float(), trace.cross[0][:, 0], atol=5e-3, rtol=0)
    drawn = torch.stack([draw.cross[0][0] for draw in trace.draws])
    torch.testing.assert_close(field(shown, "average", 0).float(), drawn.mean(dim=0), atol=5e-3, rtol=0)


def test_a_page_has_the_paths_of_the_traces_beside_it() -> None:
    plain, lstm = page({"one": pair(layers=1, heads=1), "two": recurrent()}).index["traces"]
    assert "rollout" in plain["fields"]
    assert "rollout" not in plain["missing"]
    assert "through a recurrent decoder" in lstm["missing"]["rollout"]


def test_figures_compare_what_all_traces_have() -> None:
    pytest.importorskip("matplotlib")
    from overt.view.plots import plot_compare

    for names in (("one", "two"), ("two", "one")):
        traces = {"one": pair(layers=1, heads=1), "two": recurrent()}
        assert plot_compare({name: traces[name] for name in names}).axes
    with pytest.raises(ValueError, match=NO_PATHS):
        plot_compare(traces, method="rollout")


def test_correlations_are_over_the_source_which_alone_is_attended_to() -> None:
    traced = overt.trace(network().eval(), BATCH)
    found = correlate(traced, methods=["raw"], references=["gradients"], query=0)
    words = slice(0, int(BATCH["attention_mask"][0].sum()))
    raw, gradients = traced.raw(0)[0, 0, 0, words], traced.gradients(0)[0, 0, 0, words]
    assert found.values["raw", "gradients"][0, 0] == pytest.approx(spearmanr(raw, gradients).statistic)


def test_figures_draw_the_map() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.collections import QuadMesh

    trace = recurrent(samples=4)

    def close(view: str, want: Tensor) -> None:
        drawn = [one for axes in trace.plot(view, special=True).axes for one in axes.collections]
        sizes = [one for one in drawn if isinstance(one, QuadMesh) and one.get_array().size == want.numel()]
        cells = torch.as_tensor(sizes[0].get_array().data).reshape(want.shape)
        torch.testing.assert_close(cells, want.double())

    close("cross", trace.cross[0][0, 0])
    close("strip", torch.nn.functional.pad(trace.cross[0][0, 0, -1:], (0, 5)))
    mean = torch.stack([draw.cross[0][0, 0] for draw in trace.draws]).double().mean(dim=0)
    close("uncertainty", torch.nn.functional.pad(mean, (0, 5)))


def test_it_survives_a_file(tmp_path: Path) -> None:
    traced = overt.trace(network("soft", overt.Bayesian()), BATCH, heads=True, samples=2)
    traced.save(tmp_path / "t.safetensors")
    loaded = overt.Trace.load(tmp_path / "t.safetensors")
    assert repr(loaded) == repr(traced)
    for options in ({}, {"heads": "each"}, {"receptive_field": True}):
        assert torch.equal(loaded.raw(**options), traced.raw(**options))
    assert torch.equal(loaded.spread().spread, traced.spread().spread)
    assert torch.equal(loaded[1].raw(), traced[1].raw())


# --- Text, folders, commands ---


@pytest.fixture(scope="module")
def data() -> Encoded:
    corpus = reordered.corpus(200, 8, 8)
    return encode(corpus, subwords.train([side for pair in corpus.train for side in pair], 400), 100)


@pytest.fixture(scope="module")
def folder(data: Encoded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("lstm") / "model"
    row = LstmRow("soft", (overt.Bayesian(k=5.0),), SIZES)
    lstm_training.save(lstm_training.network(row, vocabularies(data), 0.0, 0), data, place)
    return place


def names(data: Encoded, ids: list[int]) -> list[str]:
    """Pieces without the sign that ends a word, as in the trace of a Transformer with this tokenizer."""
    return [str(data.tokenizer.id_to_token(number)).removesuffix("</w>") for number in ids]


def test_text_is_cut_and_named_as_for_a_transformer_with_ids_of_each_side(
    data: Encoded, folder: Path
) -> None:
    model = lstm_training.load(folder)
    source, target = data.test[0]
    text, other = (data.tokenizer.decode(ids) for ids in (source, target))
    traced = overt.trace(model, text, decoder=other)
    assert traced.tokens == [[*names(data, source), "<s>", *names(data, target)[:-1]]]
    assert names(data, source)[-1] == "</s>"
    assert traced.special[0].nonzero().flatten().tolist() == [len(source) - 1, len(source)]
    want = collate(vocabularies(data), [(source, target)])
    arguments = traced.subject.inputs.arguments  # type: ignore[union-attr]
    for name in ("input_ids", "attention_mask", "decoder_input_ids"):
        assert torch.equal(arguments[name], want[name]), name
    spans = traced.offsets[0, : len(source) - 1]  # type: ignore[index]
    assert [text[start:stop] for start, stop in spans.tolist()] == names(data, source)[:-1]
    with torch.no_grad():
        probable = model(**{name: want[name] for name in arguments})["logits"][0, -1].exp()
    (best,) = traced.predictions(1)
    number = int(probable.argmax())
    piece = [*["<pad>", "<s>", "</s>", "<unk>"], *names(data, vocabularies(data)[1].pieces)][number]
    assert best.labels == [piece]
    assert float(best.mean) == pytest.approx(float(probable.max()), rel=1e-4)
    # A piece that the tokenizer knows but the source never had, and a letter that nobody knows.
    foreign = next(w for w in other.split() if len(data.tokenizer.encode(w).ids) == 2 and w not in text)
    ids = overt.trace(model, f"{foreign} Ж", decoder=other).subject.inputs.arguments["input_ids"]  # type: ignore[union-attr]
    assert ids[0, 1:].tolist() == [UNKNOWN, EOS]
    alone = overt.trace(model, text)
    ids = alone.subject.inputs.arguments["decoder_input_ids"]  # type: ignore[union-attr]
    assert int(ids[0, 0]) == BOS


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_the_command_prints_the_map_and_writes_page_and_trace(
    data: Encoded, folder: Path, tmp_path: Path
) -> None:
    text, other = (data.tokenizer.decode(ids) for ids in data.test[0])
    traced = overt.trace(lstm_training.load(folder), text, decoder=other)
    command = ["trace", text, "--model", str(folder), "--decoder", other]
    saved = run(*command, "--query", "1", "--out", str(tmp_path / "t.safetensors"))
    assert saved.exit_code == 0, saved.output
    row = traced.raw(1)[0, 0, 0]
    for token, value in zip(traced.tokens[0], row.tolist(), strict=True):
        assert f"{token}" in saved.output
        assert f"{value:6.3f}" in saved.output
    assert "rollout" not in saved.output
    loaded = overt.Trace.load(tmp_path / "t.safetensors")
    assert torch.equal(loaded.cross[0], traced.cross[0])
    assert loaded.tokens == traced.tokens
    shown = run("trace", text, "--model", str(folder), "--out", str(tmp_path / "page.html"))
    assert shown.exit_code == 0, shown.output
    html = (tmp_path / "page.html").read_text()
    index = json.loads(html.partition('id="overt-index">')[2].partition("</script>")[0])
    (entry,) = index["traces"]
    assert list(entry["groups"]) == ["cross"]
    assert entry["samples"] == 20
    assert entry["tokens"][: len(data.test[0][0])] == names(data, data.test[0][0])


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--method", "rollout"], "no rollout through a recurrent decoder"),
        (["--mixing", "effective"], "mixing='effective' needs more than weights"),
        (["--query", "99"], "queries must lie in"),
        (["--layer", "1"], "layers must lie in 0 to 0"),
    ],
)
def test_bad_options_are_refused(folder: Path, words: list[str], match: str) -> None:
    result = run("trace", "the key", "--model", str(folder), "--decoder", "x", *words)
    assert isinstance(result.exception, ValueError)
    assert match in str(result.exception)


def test_bad_folders_and_texts_are_refused(folder: Path, tmp_path: Path) -> None:
    def refused(place: Path, text: str = "the key") -> str:
        result = run("trace", text, "--model", str(place))
        assert result.exit_code == 1
        assert isinstance(result.exception, ValueError | OSError)
        line = str(result.exception)
        assert "\n" not in line
        return line

    assert "at least one token" in refused(folder, " ")
    picture = pytest.importorskip("PIL.Image").new("RGB", (8, 8))
    with pytest.raises(ValueError, match="images for Seq2Seq need its image processor"):
        overt.trace(lstm_training.load(folder), picture)
    for name, content, words in (
        ("vocabularies.json", None, "holds no vocabularies.json"),
        ("vocabularies.json", "[]", "must hold"),
        ("vocabularies.json", '{"source": [3], "target": [4]}', "the vocabularies have 5 and 5 ids"),
        ("model.safetensors", "cut", "weights cannot be read"),
        ("tokenizer.json", None, "holds no tokenizer that can be read"),
        ("tokenizer.json", "cut", "holds no tokenizer that can be read"),
    ):
        broken = tmp_path / "broken"
        shutil.copytree(folder, broken)
        (broken / name).unlink() if content is None else (broken / name).write_text(content)
        assert words in refused(broken)
        shutil.rmtree(broken)


def test_other_ways_of_opening_a_folder_say_which_is_right(folder: Path) -> None:
    model = lstm_training.load(str(folder))
    with pytest.raises(ValueError, match=r"the tokenizer has .* ids, and Seq2Seq .* for the source"):
        overt.trace(model, "the key", tokenizer=model.tokenizer.joint)
    with pytest.raises(ValueError, match=r"holds an LSTM translator: overt.recipes.lstm_training.load"):
        overt.load(folder)


def test_the_server_reads_text_with_the_networks_ids(data: Encoded, folder: Path) -> None:
    served = open_served("lstm", str(folder))
    assert (served.layers, served.decodes) == (1, True)
    text, other = (data.tokenizer.decode(ids) for ids in data.test[1])
    answer = json.loads(trace_answer(TraceRequest(served, text, decoder=other), Limits(), lambda: True))
    (entry,) = answer["index"]["traces"]
    source, target = data.test[1]
    assert entry["tokens"] == [*names(data, source), "<s>", *names(data, target)[:-1]]
    assert "recurrent" in entry["missing"]["flow"]
