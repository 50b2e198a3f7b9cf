"""Transformers for translation: their sizes, their training, and what the recipes make of it."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import overt
from fresh import start_pair
from overt.cli import app
from overt.cli.inputs import open_model
from overt.data import reordered, subwords
from overt.judge.bleu import multi_bleu
from overt.models.marian import SIZES, marian, size_without_embeddings
from overt.recipes import ea_translation, reproduce, translation_runs, translation_training
from overt.recipes._runs import earlier_result
from overt.recipes.translation_training import (
    EOS_ID,
    IGNORED,
    PAD_ID,
    Batches,
    Encoded,
    Row,
    Schedule,
    SmoothedLoss,
    Training,
    average,
    collate,
    encode,
    save,
    token_batches,
    train,
    translate,
)

# --- The networks ---


@pytest.mark.parametrize(
    ("size", "plain", "evolving", "first"),
    [("lite", 2_482_560, 2220, 2664), ("base", 44_138_496, 8760, 10_512)],
)
def test_parameters_are_those_that_the_paper_counts(size: str, plain: int, evolving: int, first: int) -> None:
    with torch.device("meta"):
        model = marian(SIZES[size], 8000, pad=0, eos=1)
    assert size_without_embeddings(model) == plain
    heads = SIZES[size].heads
    # 5 layers of 3 attentions, or 6 with a chain's first.
    assert evolving == 15 * (9 * heads + 1) * heads
    assert first == 18 * (9 * heads + 1) * heads


def test_attached_convolutions_are_15_or_18() -> None:
    for config, count in ((overt.Evolving(), 3), (overt.Evolving(first=True), 6)):
        model = overt.attach(marian(SIZES["tiny"], 50, pad=0, eos=1), config)
        added = sum(p.numel() for name, p in model.named_parameters() if ".overt." in name)
        assert added == count * (9 * 4 + 1) * 4  # 2 layers of 3 kinds


def test_the_saved_settings_are_the_papers_network(tmp_path: Path) -> None:
    marian(SIZES["tiny"], 50, pad=0, eos=1).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert config["activation_function"] == "relu"
    assert config["scale_embedding"] is True
    assert config["decoder_start_token_id"] == generation["decoder_start_token_id"] == 1
    assert generation["forced_eos_token_id"] == generation["eos_token_id"] == 1
    assert generation["pad_token_id"] == config["pad_token_id"] == 0
    assert generation["max_new_tokens"] == 256


# --- Batches ---


def some_pairs(count: int = 60) -> list[tuple[list[int], list[int]]]:
    torch.manual_seed(0)
    lengths = torch.randint(2, 12, (count, 2)).tolist()
    return [([5] * (a - 1) + [EOS_ID], [6] * (b - 1) + [EOS_ID]) for a, b in lengths]


def test_batches_hold_every_pair_once_and_not_too_many_tokens() -> None:
    pairs = some_pairs()
    batches = token_batches(pairs, 40, 0)
    assert sorted(number for batch in batches for number in batch) == list(range(60))
    for batch in batches:
        longest = max(len(side) for number in batch for side in pairs[number])
        assert longest * len(batch) <= 40 or len(batch) == 1


def test_each_epoch_has_all_batches_in_another_order() -> None:
    schedule = Schedule(7, 21, seed=3)
    epochs = [[schedule[update][0] for update in range(start, start + 7)] for start in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [schedule[update][0] for update in range(7)] == epochs[0], "also when an epoch is taken again"


def test_parts_for_processes_make_up_the_batch() -> None:
    pairs, processes = some_pairs(), 3
    numbers = token_batches(pairs, 80, 0)
    batches, schedule = Batches(pairs, numbers, collate, processes), Schedule(len(numbers), 2, 0, 3)
    for update in range(2):
        places = [schedule[update * processes + part] for part in range(processes)]
        assert len({number for number, _ in places}) == 1
        whole = collate([pairs[n] for n in batches.numbers[places[0][0]]])
        assert sum(int((batches[place]["labels"] != IGNORED).sum()) for place in places) == int(
            (whole["labels"] != IGNORED).sum()
        )


def test_a_batch_starts_the_decoder_with_the_end_of_a_sentence() -> None:
    batch = collate([([7, 8, EOS_ID], [9, EOS_ID]), ([7, EOS_ID], [9, 10, 11, EOS_ID])], multiple=4)
    assert batch["decoder_input_ids"].tolist() == [[1, 9, 1, 0], [1, 9, 10, 11]]
    assert batch["labels"].tolist() == [[9, 1, -100, -100], [9, 10, 11, 1]]
    assert batch["input_ids"].tolist() == [[7, 8, 1, 0], [7, 1, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]


def test_rounded_lengths_change_no_loss() -> None:
    model = overt.attach(
        marian(SIZES["tiny"], 20, pad=PAD_ID, eos=EOS_ID, dropout=0.0), overt.Evolving()
    ).eval()
    loss = SmoothedLoss(model, 0.1)
    found = []
    for multiple in (1, 16):
        batch = collate(some_pairs(9), multiple)
        labels = batch.pop("labels")
        found.append(loss(model(**batch), labels))
    torch.testing.assert_close(*found)


# --- The loss ---


def test_the_learning_rate_peaks_at_the_end_of_warm_up_and_has_halved_at_four_times_that() -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = get_scheduler("inverse_sqrt", optimizer, num_warmup_steps=10, num_training_steps=100)
    rates = []
    for _ in range(45):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[9] == pytest.approx(2.0) == max(rates)
    assert rates[39] == pytest.approx(1.0)


def prior_gradient(folder: Path, smoothing: Any) -> float:
    """Sum of the prior network's absolute gradients in one step of the Trainer."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model = overt.attach(marian(SIZES["tiny"], 20, pad=PAD_ID, eos=EOS_ID), overt.Bayesian(kl_weight=1.0))
    found = []

    class Noting(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            prior = [p.grad for name, p in self.model.named_parameters() if "prior" in name]
            found.append(sum(0.0 if grad is None else float(grad.abs().sum()) for grad in prior))
            return loss

    arguments = TrainingArguments(
        str(folder), max_steps=1, use_cpu=True, report_to="none", remove_unused_columns=False,
        per_device_train_batch_size=1, disable_tqdm=True, save_strategy="no", **smoothing,
    )  # fmt: skip
    loss = None if smoothing else SmoothedLoss(model, 0.1)
    Noting(
        model, arguments, data_collator=lambda ready: collate(ready[0]), train_dataset=[some_pairs(4)],
        compute_loss_func=loss,
    ).train()  # fmt: skip
    return found[0]


@pytest.mark.slow
def test_the_prior_learns_under_label_smoothing(tmp_path: Path) -> None:
    assert prior_gradient(tmp_path, {}) > 0.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_control_the_trainers_own_smoothing_leaves_the_prior_without_a_gradient(tmp_path: Path) -> None:
    assert prior_gradient(tmp_path, {"label_smoothing_factor": 0.1}) == 0.0


def test_smoothing_is_torchs_and_counts_the_labels_of_all_accumulated_batches() -> None:
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[1, 2, IGNORED], [4, IGNORED, IGNORED]])
    loss = SmoothedLoss(nn.Linear(1, 1), 0.1)({"logits": logits}, labels)
    want = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(SmoothedLoss(nn.Linear(1, 1), 0.1)({"logits": logits}, labels, 6), want / 2)


def test_the_average_of_weights_and_their_opposites_is_zero_and_buffers_stay(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = nn.BatchNorm1d(3)
    model.num_batches_tracked.fill_(7)
    paths = [tmp_path / f"{sign}.safetensors" for sign in (1, -1)]
    for sign, path in zip((1.0, -1.0), paths, strict=True):
        save_file({name: sign * torch.arange(1.0, 4.0) for name, _ in model.named_parameters()}, path)
    average(model, paths)
    assert all(not parameter.any() for parameter in model.parameters())
    assert int(model.num_batches_tracked) == 7


# --- Training ---


@pytest.fixture(scope="module")
def data() -> Encoded:
    corpus = reordered.corpus(8000, 100, 100, longest=6)
    tokenizer = subwords.train([side for pair in corpus.train for side in pair], 3000)
    return encode(corpus, tokenizer, 100)


@pytest.mark.slow
def test_a_small_model_learns_the_order_that_a_dictionary_lacks(data: Encoded, tmp_path: Path) -> None:
    training = Training(350, tokens=192, warmup=100, learning_rate=4e-3, dropout=0.0, average=1, patience=9)
    model, numbers = train(tmp_path / "run", data, Row("tiny"), training, 0, "cpu")
    sources = [source for source, _ in data.test]
    texts = translate(model, data.tokenizer, sources, beam=3)
    english = [line.split() for line in data.tokenizer.decode_batch(sources)]
    dictionary = [" ".join(reordered.DICTIONARY[word] for word in line) for line in english]
    assert multi_bleu(texts, data.references).score > 80
    assert multi_bleu(dictionary, data.references).score < 30
    assert numbers["curve"][0][1] > numbers["curve"][-1][1]

    # Its folder is an ordinary one, and commands open it.
    folder = tmp_path / "model"
    save(model, data, folder)
    line = data.tokenizer.decode(sources[0])
    runner = CliRunner()
    result = runner.invoke(app, ["translate", line, "--model", str(folder), "--beam", "3", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == texts[0]
    lines = tmp_path / "lines.txt"
    lines.write_text(f"{line}\n\n{data.tokenizer.decode(sources[1])}\n")
    runner.invoke(
        app, ["translate", str(lines), "--model", str(folder), "--beam", "3", "--out", f"{lines}.out"]
    )
    assert Path(f"{lines}.out").read_text() == f"{texts[0]}\n\n{texts[1]}\n"
    traced = overt.trace(open_model(str(folder)), line)
    assert not any("</w>" in token for token in traced.tokens[0])

    # Translations with the cache are those without it.
    ids = torch.tensor([sources[2]])
    with_cache, without = (
        model.generate(input_ids=ids, num_beams=3, max_new_tokens=20, use_cache=cache)
        for cache in (True, False)
    )
    assert torch.equal(with_cache, without)


SHORT = Training(6, tokens=128, warmup=2, learning_rate=1e-3, dropout=0.1, average=2, patience=9)


@pytest.mark.slow
def test_an_interrupted_training_goes_on_as_if_it_had_not_been(
    data: Encoded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(data, train=data.train[:40], valid=data.valid[:8])
    row = Row("tiny", (overt.Evolving(), overt.Bayesian()))
    monkeypatch.setattr(translation_training, "LOGS", 6)

    def stop(update: int) -> None:
        if update == 5:
            raise KeyboardInterrupt

    whole, numbers = train(tmp_path / "whole", small, row, SHORT, 0, "cpu")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", small, row, SHORT, 0, "cpu", stop)
    resumed, again = train(tmp_path / "stopped", small, row, SHORT, 0, "cpu")
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), name
    for key in ("valid_losses", "valid_loss", "updates", "curve", "epochs"):
        assert numbers[key] == again[key], key


@pytest.mark.slow
def test_a_training_that_had_stopped_early_is_not_trained_on(
    data: Encoded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(data, train=data.train[:40], valid=data.valid[:8])
    monkeypatch.setattr(translation_training, "CHECKPOINTS", 2)
    batches = len(token_batches(small.train, 128, 0))
    # Nothing is learnt, so the first epoch is the best, and the third the last; a checkpoint is there too.
    training = replace(SHORT, updates=6 * batches, learning_rate=0.0, patience=2)
    _, numbers = train(tmp_path, small, Row("tiny"), training, 0, "cpu")
    assert numbers["updates"] == 3 * batches
    assert (tmp_path / "checkpoints" / f"checkpoint-{3 * batches}").is_dir()
    # As if it had been killed before its numbers were written.
    _, again = train(tmp_path, small, Row("tiny"), training, 0, "cpu")
    for key in ("updates", "epochs", "averaged", "valid_loss"):
        assert again[key] == numbers[key], key


@pytest.mark.slow
def test_weights_from_before_an_interruption_are_not_averaged(data: Encoded, tmp_path: Path) -> None:
    small = replace(data, train=data.train[:40], valid=data.valid[:8])
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "epoch-9.safetensors").write_bytes(b"of a run that went further before it was killed")
    _, numbers = train(tmp_path, small, Row("tiny"), SHORT, 0, "cpu")
    assert numbers["averaged"] <= numbers["epochs"]


def test_batches_that_processes_could_not_share_are_joined() -> None:
    pairs = some_pairs()
    for least in (2, 7):
        batches = token_batches(pairs, 30, 0, least)
        assert min(map(len, batches)) >= least
        assert sorted(number for batch in batches for number in batch) == list(range(60))
    assert min(map(len, token_batches(pairs, 30, 0))) < 7, "control: some are smaller"


def test_sentences_without_positions_are_refused(data: Encoded) -> None:
    model = marian(SIZES["tiny"], 20, pad=PAD_ID, eos=EOS_ID)
    with pytest.raises(ValueError, match="sentence 2 has 1,025 pieces, and the model takes up to 1,024"):
        translate(model, data.tokenizer, [[5, EOS_ID], [5] * 1025])
    assert translation_training.most_new_tokens(model, [[5] * 900]) == 1023


def test_text_is_tokenised_for_a_model_as_its_training_text_was() -> None:
    seen = []

    class Tokenizer:
        def __call__(self, text: str) -> Any:
            seen.append(text)
            raise KeyboardInterrupt

    model = marian(SIZES["tiny"], 20, pad=PAD_ID, eos=EOS_ID)
    for escaped in (True, False):
        card = {"source": "en", "target": "de", "tokenised": True, "lowercase": True, "escaped": escaped}
        with pytest.raises(KeyboardInterrupt):
            translation_training.translate_lines(model, Tokenizer(), ["It's here."], card)
    assert seen == ["it &apos;s here .", "it 's here ."]


TWO = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from overt.recipes.translation_training import Encoded, Row, Training, train
import overt
data = Encoded(**json.loads(Path({data!r}).read_text()))
row = Row("tiny", (overt.Evolving(), overt.Bayesian(k=1e6, kl_weight=1.0)))
_, numbers = train(Path({folder!r}), data, row, Training(**{training!r}), 0, "cpu")
Path({folder!r}, "numbers.json").write_text(json.dumps(numbers))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(data: Encoded, tmp_path: Path) -> None:
    from dataclasses import asdict

    small = replace(data, train=data.train[:40], valid=data.valid[:8], test=data.test[:4])
    training = replace(SHORT, dropout=0.0)
    file = tmp_path / "data.json"
    file.write_text(json.dumps(asdict(small)))
    code = TWO.format(data=str(file), folder=str(tmp_path / "two"), training=asdict(training))
    pair = start_pair(code)
    for process in pair:
        assert not (failed := process.ended()), failed
    two = json.loads((tmp_path / "two" / "numbers.json").read_text())
    row = Row("tiny", (overt.Evolving(), overt.Bayesian(k=1e6, kl_weight=1.0)))
    _, one = train(tmp_path / "one", small, row, training, 0, "cpu")
    assert two["valid_losses"] == pytest.approx(one["valid_losses"], abs=2e-5)


# --- Recipes ---


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run of ea-table-5 without data, of a small network, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OVERT_DATA", raising=False)
    monkeypatch.setattr(translation_runs.reordered, "corpus", lambda: reordered_corpus)
    monkeypatch.setitem(SIZES, "lite", SIZES["tiny"])

    def run(
        name: str = "ea-table-5", seeds: int = 1, out: str = "runs/a", fresh: bool = False, **options: str
    ) -> dict[str, Any]:
        extra = [word for key, value in options.items() for word in (f"--{key}", value)]
        extra += ["--steps", "2", "--beam", "1"]
        return reproduce.run(name, None, seeds, "cpu", None, Path(out), Path("results"), fresh, extra)

    return run


reordered_corpus = reordered.corpus(200, 8, 8)


@pytest.mark.slow
def test_a_table_is_filled_over_several_runs(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = recipe(rows="Lite,EA-Lite")
    performed = []
    perform = translation_runs.perform

    def note(task: Any, *rest: Any) -> dict[str, Any]:
        performed.append((task.name, task.seed))
        return perform(task, *rest)

    monkeypatch.setattr(translation_runs, "perform", note)
    # In another folder of runs: what is known is in the result file alone.
    second = recipe(rows="Lite", seeds=2, out="runs/b")
    assert performed == [("Lite", 1)]
    assert list(second["per_seed"]) == ["0", "1"]
    assert second["per_seed"]["0"]["EA-Lite"] == json.loads(json.dumps(first["per_seed"]["0"]["EA-Lite"]))
    assert set(second["per_seed"]["1"]) == {"Lite"}
    run = second["per_seed"]["0"]["Lite"]["run"]
    assert {"settings", "command", "hardware", "versions", "date"} == set(run)
    assert second["mean"]["Lite"]["bleu"] is not None
    assert [f"--seeds {seeds}" in each for seeds, each in enumerate(second["commands"], 1)] == [True, True]

    # A run that measures nothing leaves the file's origin as it is; `--fresh` measures.
    file = Path("results") / "ea-table-5.json"
    marked = json.loads(file.read_text()) | {"hardware": "another machine"}
    file.write_text(json.dumps(marked))
    assert recipe(rows="Lite", seeds=1, out="runs/b")["hardware"] == "another machine"
    assert json.loads(file.read_text())["commands"] == second["commands"]
    assert performed == [("Lite", 1)]
    table = dict(second["tables"][0]["rows"])
    assert table["Lite"][0] == "2"
    assert table["EA-Lite"][0] == "1"

    # Tables share their runs: the ablations' baseline is known from the folder, or from the other's file.
    recipe("ea-table-6", rows="Lite,w/o skip", out="runs/a")
    assert performed == [("Lite", 1), ("w/o skip", 0)]
    (Path("results") / "ea-table-6.json").unlink()
    elsewhere = recipe("ea-table-6", rows="Lite", seeds=2, out="runs/d")
    assert len(performed) == 2
    assert elsewhere["commands"] == second["commands"]
    assert elsewhere["per_seed"]["1"]["Lite"] == second["per_seed"]["1"]["Lite"]
    assert "EA-Lite" not in elsewhere["per_seed"]["0"]
    # A file that lacked a seed says where it is from once the other file has it.
    origin = {name: elsewhere[name] for name in ("commands", "date", "hardware", "versions")}
    run = second["per_seed"]["1"]["Lite"]["run"]
    assert origin == {
        **{name: run[name] for name in origin if name != "commands"},
        "commands": second["commands"],
    }
    file = Path("results") / "ea-table-6.json"
    stored = json.loads(file.read_text())
    other = {
        "commands": second["commands"][:1],
        "date": "2000-01-01",
        "hardware": "another machine",
        "versions": {},
    }
    file.write_text(json.dumps(stored | {"per_seed": {"0": stored["per_seed"]["0"]}} | other))
    filled = recipe("ea-table-6", rows="Lite", seeds=2, out="runs/e")
    assert {name: filled[name] for name in origin} == origin
    assert len(performed) == 2

    # Other settings are another measurement.
    third = recipe(rows="Lite", out="runs/c", tokens="64")
    assert performed[-1] == ("Lite", 0)
    assert list(third["per_seed"]["0"]) == ["Lite"]
    assert len(third["commands"]) == 1
    assert [table["title"] for table in third["tables"]][1:] == ["Published BLEU", "Published sizes"]
    again = recipe("ea-table-6", rows="Lite", out="runs/d", fresh=True)
    assert performed[-1] == ("Lite", 0)
    assert len(performed) == 4
    # A finished run in the folder comes before another recipe's file.
    (Path("results") / "ea-table-6.json").unlink()
    known = recipe("ea-table-6", rows="Lite", out="runs/d")
    assert known["per_seed"]["0"]["Lite"]["run"] == again["per_seed"]["0"]["Lite"]["run"]
    assert len(performed) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": "Lite,Big"}, "--rows must be one of 'Lite', 'EA-Lite'"),
        ({"beam": "0"}, "--beam must be a whole number of at least 1, got 0"),
        ({"direction": "english"}, "--direction must be two languages, such as de-en, got english"),
        ({"dataset": "nowhere"}, "--dataset must be multi30k, iwslt14 or a folder, got nowhere"),
        ({"codes": "nowhere"}, "--codes must be a file of BPE codes, got nowhere"),
    ],
)
def test_bad_options_are_refused_in_one_line(options: dict[str, str], message: str, recipe: Any) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        recipe(**options)
    assert "\n" not in str(error.value)


def test_entities_in_ordinary_text_do_not_stop_its_scoring(data: Encoded) -> None:
    plain = replace(data, target="en", tokenised=False, lowercase=False)
    plain = replace(plain, references=["AT&amp;T sells it, cheaply ."])
    assert translation_runs.plain_score(["AT&T sells it, cheaply ."], plain).score == pytest.approx(100.0)
    assert translation_runs.tokenised(["it's cheap."], plain) == ["it 's cheap ."]


def test_codes_for_text_in_pieces_are_refused() -> None:
    corpus = replace(reordered_corpus, was_in_pieces=True)
    with pytest.raises(ValueError, match="are already split into BPE pieces"):
        translation_runs.tokenizer_of(corpus, "codes.txt")


def test_a_run_with_other_data_is_refused_without_their_hashes(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({"data": 64 * "a"}))
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has a run with other data than requested: delete it with --fresh"):
        earlier_result(tmp_path, {"data": 64 * "b"}, fresh=False)


@pytest.mark.parametrize("page", ["README.md", "docs/translation.md"])
def test_quoted_scores_are_those_of_the_result_file(page: str) -> None:
    root = Path(__file__).parents[1]
    result = json.loads((root / "results" / "ea-table-5.json").read_text())
    text = (root / page).read_text()
    for row in ("Lite", "EA-Lite", "Base", "EA-Base"):
        scores = [rows[row]["bleu"] for rows in result["per_seed"].values() if row in rows]
        assert f"{statistics.fmean(scores):.2f}" in text
    for name, cells in result["tables"][1]["rows"]:
        if "first" not in name:
            low, high = cells[2].split(" … ")
            assert re.search(rf"{low} (…|to) {high}", text)


def test_rows_are_the_papers() -> None:
    assert set(ea_translation.PUBLISHED_5) | {"EA-Lite first"} == set(ea_translation.IN_TABLE_5)
    assert set(ea_translation.PUBLISHED_6) == set(ea_translation.IN_TABLE_6)
    assert ea_translation.PUBLISHED_6["EA-Lite"] == ea_translation.PUBLISHED_5["EA-Lite"]
    assert ea_translation.ROWS["EA-Base"].mechanisms == (overt.Evolving(alpha=0.5, beta=0.1),)


# --- Figure 5 ---


def learning(step_ms: dict[str, float]) -> Any:
    """An outcome of made-up learning curves: two seeds of each row, EA-Lite ends lower."""
    from overt.recipes._recipe import Outcome

    falls = {"Lite": 3.0, "EA-Lite": 4.0}
    curve = {row: [[step, 6.0 - fall * step / 100] for step in (10, 50, 100)] for row, fall in falls.items()}
    run = {"date": "2026-01-01", "hardware": "a machine", "settings": {"precision": "float32"}}
    entry = {"run": run, "bleu_of_training": 60.0, "bleu_signature": "x", "bleu_13a_signature": "y"}
    rows = {row: {**entry, "curve": points} for row, points in curve.items()}
    corpus = reordered_corpus.describe()
    config = {
        "data": corpus, "left_out": 0, "beam": 5, "step_ms": step_ms, "timed_on": "a machine",
        "vocabulary": {"pieces": 9, "origin": "trained", "sha256": "0" * 64},
        "training": SHORT.settings(),
    }  # fmt: skip
    return Outcome(config, {0: rows, 1: rows})


def test_the_figure_compares_losses_after_the_same_time_not_after_the_same_updates() -> None:
    # With twice the time per update, 4 less per hundred updates is 2 less per hundred of the other's.
    outcome = learning({"Lite": 10.0, "EA-Lite": 20.0})
    report = ea_translation.report_figure_5(outcome)
    rows = dict(report.grids[0].rows)
    assert float(rows["EA-Lite"][-1]) == pytest.approx(6.0 - 2.0, abs=1e-3)
    assert float(rows["Lite"][-1]) == pytest.approx(6.0 - 3.0, abs=1e-3)
    assert rows["EA-Lite − Lite"][-1] == "1.000"  # two seeds: no interval
    updates = dict(report.grids[1].rows)
    assert [float(updates[row][-1]) for row in ("Lite", "EA-Lite")] == [3.0, 2.0]


def test_losses_between_points_are_numpys_interpolation() -> None:
    import numpy as np

    curve = [(1.0, 5.0), (2.0, 3.0), (4.0, 2.5)]
    for time in (1.0, 1.3, 2.0, 3.9, 4.0):
        want = np.interp(time, *zip(*curve, strict=True))
        assert ea_translation.loss_at(curve, time) == pytest.approx(want)


def test_the_figure_is_drawn_with_every_seed(tmp_path: Path) -> None:
    path = tmp_path / "figure.svg"
    ea_translation.draw_figure_5(learning({"Lite": 10.0, "EA-Lite": 11.0}), path)
    picture = path.read_text()
    for colour in ("#666666", "#00796b"):
        assert picture.count(f"stroke: {colour}") >= 3  # two seeds and the legend
