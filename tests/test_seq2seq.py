"""The LSTM translation network: against a slow reading of the paper, its objectives by enumeration, beams."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import overt
from overt.mechanisms.seen import Seen
from overt.models import seq2seq
from overt.models.seq2seq import ATTENTIONS, Decoded, Seq2Seq, Source

SIZES = {"embedding": 4, "encoder": 3, "decoder": 5, "score": 4, "dropout": 0.0, "init": 0.9}
PAPER = overt.Bayesian.paper("WC", k=5, prior_beta=1e-6, rho=1, d_mid=5)
PAD, BOS, EOS = 0, 1, 2
SOURCE = torch.tensor([[3, 4, 5, 6], [6, 3, PAD, PAD], [5, 5, 4, PAD]])
LABELS = torch.tensor([[3, 5, 4, EOS], [5, EOS, -100, -100], [4, 3, EOS, -100]])
INPUTS = {
    "input_ids": SOURCE,
    "attention_mask": (SOURCE != PAD).long(),
    "decoder_input_ids": torch.cat([torch.full((3, 1), BOS), LABELS[:, :-1].clamp(min=PAD)], dim=1),
}
every_attention = pytest.mark.parametrize("attention", ATTENTIONS)


def made(attention: str = "soft", mechanisms: Any = (), seed: int = 0, **settings: Any) -> Seq2Seq:
    torch.manual_seed(seed)
    return Seq2Seq(7, 6, attention, mechanisms, **{**SIZES, **settings}).double()  # type: ignore[arg-type]


def slopes(loss: Tensor, model: Seq2Seq) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, retain_graph=True)
    return {
        name: torch.zeros_like(parameters[name]) if slope is None else slope
        for name, slope in zip(parameters, found, strict=True)
    }


# --- The network ---


def test_the_published_sizes_have_the_published_numbers_of_parameters() -> None:
    with torch.device("meta"):
        counts = {
            name: sum(p.numel() for p in Seq2Seq(12_000, 9_000, name).parameters()) for name in ATTENTIONS
        }
        bayesian = sum(p.numel() for p in Seq2Seq(12_000, 9_000, mechanisms=[PAPER]).parameters())
    latent = {name: 64_331_816 if name.startswith("variational") else 42_278_952 for name in ATTENTIONS}
    assert counts == latent
    assert bayesian == 42_278_952 + 512 * 5 + 5 + 5


def slowly(
    model: Seq2Seq, source: list[int], target: list[int], kept: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """One sentence as the paper describes it: log f(E_p x), log Σ p_i f(x_i) per word, and p, (word, …).

    What dropout acts on is multiplied by `kept`.
    """
    memory, _ = model.encoder.lstm(kept * model.source_words(torch.tensor(source)))  # (source, 2·encoder)
    lower = upper = (memory.new_zeros(1, 5), memory.new_zeros(1, 5))
    context = torch.zeros_like(memory[:1])
    soft, marginal, maps = [], [], []
    for before, word in zip([BOS, *target], target, strict=False):
        embedded = kept * model.target_words.weight[before : before + 1]
        lower = model.lower(torch.cat([embedded, context], 1), lower)
        upper = model.upper(kept * lower[0], upper)
        query = upper[0]
        scores = torch.tanh(model.query(query) + model.key(memory)) @ model.score
        p = scores.softmax(dim=0)
        context = p.unsqueeze(0) @ memory

        def f(x: Tensor, query: Tensor = query, word: int = word) -> Tensor:
            hidden = torch.tanh(model.output(torch.cat([query.expand(len(x), -1), x], dim=1)))
            return model.generator(kept * hidden).softmax(dim=1)[:, word]

        soft.append(f(context)[0].log())
        marginal.append((p * f(memory)).sum().log())
        maps.append(p)
    return torch.stack(soft), torch.stack(marginal), torch.stack(maps)


@every_attention
def test_a_padded_batch_gives_what_each_sentence_alone_gives_word_by_word(attention: str) -> None:
    model = made(attention).eval()
    got = model(**INPUTS, labels=LABELS, output_attentions=True)
    for n in range(3):
        source, target = SOURCE[n][SOURCE[n] != PAD].tolist(), LABELS[n][LABELS[n] >= 0].tolist()
        soft, marginal, p = slowly(model, source, target)
        words = len(target)
        if attention != "variational-relaxed":  # which draws
            want = soft if attention == "soft" else marginal
            torch.testing.assert_close(got["log_probs"][n, :words], want)
        torch.testing.assert_close(got["attentions"][n, :words, : len(source)], p)
        torch.testing.assert_close(got["entropy"][n, :words], torch.special.entr(p).sum(dim=1))
        for name in ("log_probs", "entropy"):
            assert not got[name][n, words:].any()
    torch.testing.assert_close(got["loss"], -got["log_probs"].sum() / (LABELS >= 0).sum())


@pytest.mark.parametrize("attention", ["soft", "marginal"])
def test_dropout_is_on_embeddings_between_layers_and_before_the_generator(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(attention)
    monkeypatch.setattr(model, "_dropped", lambda x: 0.6 * x)
    want = slowly(model, SOURCE[0].tolist(), LABELS[0].tolist(), 0.6)[attention == "marginal"]
    torch.testing.assert_close(model(**INPUTS, labels=LABELS)["log_probs"][0], want)
    torch.testing.assert_close(made(dropout=0.4).encoder.lstm.dropout, 0.4)


@every_attention
def test_more_padding_changes_neither_loss_nor_gradients(attention: str) -> None:
    model = made(attention)
    wide = {
        "input_ids": F.pad(SOURCE, (0, 2), value=6),
        "attention_mask": F.pad(INPUTS["attention_mask"], (0, 2)),
        "decoder_input_ids": F.pad(INPUTS["decoder_input_ids"], (0, 1), value=5),
    }
    if "sampled" in attention or "relaxed" in attention:  # draws depend on shapes: take the first positions
        model._choose = lambda p: torch.zeros(p.shape[:2], dtype=torch.int64)  # type: ignore[method-assign]
    if "relaxed" in attention:
        model.eval()
        got = [model(**x, output_attentions=True)["attentions"][:, :4, :4] for x in (INPUTS, wide)]
        torch.testing.assert_close(*got)
        return
    losses = [
        model(**INPUTS, labels=LABELS)["loss"],
        model(**wide, labels=F.pad(LABELS, (0, 1), value=-100))["loss"],
    ]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(slopes(loss, model) for loss in losses))


@every_attention
def test_every_parameter_learns(attention: str) -> None:
    model = made(attention, dropout=0.2)
    found = slopes(model(**INPUTS, labels=LABELS)["loss"], model)
    assert [name for name, slope in found.items() if not slope.any() or not slope.isfinite().all()] == []


def test_without_labels_all_words_have_the_log_probabilities_that_labels_get() -> None:
    for attention in ("soft", "marginal"):
        model = made(attention).eval()
        every = model(**INPUTS)["logits"]
        torch.testing.assert_close(every.exp().sum(dim=-1), torch.ones(3, 4, dtype=torch.float64))
        want = every.gather(-1, LABELS.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        got = model(**INPUTS, labels=LABELS)["log_probs"]
        torch.testing.assert_close(got, want.masked_fill(LABELS < 0, 0.0))


@pytest.mark.parametrize("attention", ["marginal", "variational-enumerated"])
def test_chunks_of_words_change_nothing(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, results = made(attention), []
    for at_once in (seq2seq.SCORES_AT_ONCE, 1, 3 * 4 * 6 * 2):
        monkeypatch.setattr(seq2seq, "SCORES_AT_ONCE", at_once)
        loss = model(**INPUTS, labels=LABELS)["loss"]
        results.append((loss, slopes(loss, model), model(**INPUTS)["logits"]))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def test_shares_of_a_batch_add_up_to_its_loss() -> None:
    model = made("soft", [PAPER])
    model.step.fill_(3)
    whole = model(**INPUTS, labels=LABELS)["loss"]
    shares = [
        model(
            **{name: x[part] for name, x in INPUTS.items()},
            labels=LABELS[part],
            examples=torch.arange(3)[part],
            num_items_in_batch=int((LABELS >= 0).sum()),
        )["loss"]
        for part in (slice(0, 1), slice(1, 3))
    ]
    torch.testing.assert_close(sum(shares), whole)
    seen = overt.losses(model)
    assert int(seen.items) == 5, "of the last share alone, and so are its means"  # type: ignore[arg-type]


# --- The objectives ---


def parts(model: Seq2Seq) -> tuple[Decoded, Source, Tensor, Tensor]:
    """What the recurrence leaves, and of each position p and f of the labels, (batch, target, source)."""
    shown = SOURCE != PAD
    source = model._read(model.source_words(SOURCE), shown, shown.sum(dim=1))
    words = INPUTS["decoder_input_ids"]
    rows = model.map.rows(source.keys.unsqueeze(1), 4, overt.Chain(), Seen(shown))
    decoded = model._decode(words, source, rows, model._start(source))
    p = decoded.scores.masked_fill(~shown.unsqueeze(1), -torch.inf).softmax(dim=-1)
    joined = torch.cat(
        [
            decoded.queries.unsqueeze(2).expand(-1, -1, 4, -1),
            source.memory.unsqueeze(1).expand(-1, 4, -1, -1),
        ],
        dim=-1,
    )
    every = model.generator(torch.tanh(model.output(joined))).softmax(dim=-1)  # (3, 4, 4, vocabulary)
    labels = LABELS.clamp(min=0).view(3, 4, 1, 1).expand(-1, -1, 4, -1)
    return decoded, source, p, every.gather(-1, labels).squeeze(-1)


def test_the_elbo_misses_the_marginal_by_the_divergence_from_the_true_posterior() -> None:
    model, real = made("variational-enumerated", init=2.0), LABELS >= 0
    decoded, source, p, f = parts(model)
    elbo = model(**INPUTS, labels=LABELS)["log_probs"]
    marginal = model.eval()(**INPUTS, labels=LABELS)["log_probs"]
    torch.testing.assert_close(marginal[real], (p * f).sum(dim=-1).log()[real])
    true = p * f / (p * f).sum(dim=-1, keepdim=True)
    assert model.inference is not None
    lengths = (SOURCE != PAD).sum(dim=1), real.sum(dim=1)
    scores = model.inference(model.source_words(SOURCE), model.target_words(LABELS.clamp(min=0)), lengths)
    q = scores.masked_fill((SOURCE == PAD).unsqueeze(1), -torch.inf).softmax(dim=-1)
    gap = (torch.special.xlogy(q, q) - torch.special.xlogy(q, true)).sum(dim=-1)
    torch.testing.assert_close((marginal - elbo)[real], gap[real])
    assert bool((gap[real] > 0.0).all())
    assert float(gap[real].detach().mean()) > 0.05
    # With the true posterior the bound is tight; with the prior it is hard attention's.
    model.train()
    tight = -model._losses(decoded, source, LABELS, true.clamp(min=1e-300).log())
    torch.testing.assert_close(tight[real], marginal[real])
    hard = made("hard-enumerated", init=2.0)
    hard.load_state_dict(model.state_dict(), strict=False)
    with_prior = -model._losses(decoded, source, LABELS, decoded.scores)
    torch.testing.assert_close(hard(**INPUTS, labels=LABELS)["log_probs"][real], with_prior[real])
    torch.testing.assert_close(with_prior[real], (p * f.log()).sum(dim=-1)[real])


@pytest.mark.parametrize("kind", ["hard", "variational"])
@pytest.mark.parametrize("baseline", [True, False], ids=["baseline", "no baseline"])
def test_reinforce_summed_over_all_positions_has_the_enumerated_gradient(
    kind: str, baseline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = seq2seq.reinforce
    if not baseline:
        monkeypatch.setattr(seq2seq, "reinforce", lambda f, p, b: plain(f, p, torch.zeros_like(b)))
    model, enumerated = made(f"{kind}-sampled"), made(f"{kind}-enumerated")
    enumerated.load_state_dict(model.state_dict())
    total = torch.zeros((), dtype=torch.float64)
    at_one = None
    for place in range(4):
        seen: list[Tensor] = []

        def choose(probabilities: Tensor, place: int = place, seen: list[Tensor] = seen) -> Tensor:
            seen.append(probabilities)
            return torch.full(probabilities.shape[:2], place)

        monkeypatch.setattr(model, "_choose", choose)
        log_probs = model(**INPUTS, labels=LABELS)["log_probs"]
        total = total - (seen[0][..., place].detach() * log_probs).sum()
        at_one = -log_probs.sum() if at_one is None else at_one
    want = -enumerated(**INPUTS, labels=LABELS)["log_probs"].sum()
    torch.testing.assert_close(total, want)
    got, wanted = slopes(total, model), slopes(want, enumerated)
    torch.testing.assert_close(got, wanted)
    assert at_one is not None
    single = slopes(at_one, model)
    assert not torch.allclose(single["key.weight"], wanted["key.weight"]), "one position alone is an estimate"


def test_positions_are_drawn_as_often_as_they_are_probable() -> None:
    p = torch.tensor([[[0.2, 0.5, 0.3, 0.0]]]).expand(1, 20_000, 4)
    share = made()._choose(p).flatten().bincount(minlength=4) / 20_000
    torch.testing.assert_close(share, p[0, 0], atol=0.02, rtol=0.0)


def test_dirichlet_draws_and_kl_are_those_of_torch_over_the_shown_positions() -> None:
    shown = torch.tensor([[True, True, True, False]])
    scores, other = torch.tensor([[[0.5, -1.0, 1.2, 9.0]]]), torch.tensor([[[-0.3, 0.4, 0.1, 9.0]]])
    a, b = (torch.distributions.Dirichlet(x[0, 0, :3].exp()) for x in (scores, other))
    torch.testing.assert_close(
        seq2seq.dirichlet_kl(scores, other, shown)[0, 0], torch.distributions.kl_divergence(a, b)
    )
    drawn = seq2seq.draw_dirichlet(scores.expand(1, 50_000, 4), shown)[0]
    assert not drawn[:, 3].any()
    torch.testing.assert_close(drawn[:, :3].mean(dim=0), a.mean, atol=5e-3, rtol=0.0)
    torch.testing.assert_close(drawn[:, :3].var(dim=0), a.variance, atol=2e-3, rtol=0.0)
    tiny = torch.full((1, 100, 4), -40.0, requires_grad=True)
    corners = seq2seq.draw_dirichlet(tiny, shown)
    corners.square().sum().backward()
    torch.testing.assert_close(corners.amax(dim=-1), torch.ones(1, 100))
    assert tiny.grad is not None
    assert bool(tiny.grad.isfinite().all())


def test_a_dirichlet_draw_has_the_gradient_of_its_mean() -> None:
    scores = torch.tensor([[[0.5, -0.5, 0.2]]], requires_grad=True)
    shown, towards = torch.ones(1, 3, dtype=torch.bool), torch.tensor([1.0, 2.0, -1.0])
    drawn = seq2seq.draw_dirichlet(scores.expand(1, 100_000, 3), shown)
    (got,) = torch.autograd.grad((drawn @ towards).mean(), scores)
    (want,) = torch.autograd.grad((scores.softmax(dim=-1) @ towards).sum(), scores)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=0.0)


def test_relaxed_weights_are_drawn_in_evaluation_and_jensens_bound_needs_no_posterior() -> None:
    model = made("variational-relaxed").eval()
    first, second = (model(**INPUTS, labels=LABELS)["loss"] for _ in range(2))
    assert first != second
    model.train()
    model.jensen = True
    found = slopes(model(**INPUTS, labels=LABELS)["loss"], model)
    assert all(bool(slope.any()) != name.startswith("inference") for name, slope in found.items())
    soft = made("soft")
    soft.jensen = True
    with pytest.raises(ValueError, match="jensen needs attention=\"variational-relaxed\", got 'soft'"):
        soft(**INPUTS, labels=LABELS)


# --- Bayesian ---


def test_weights_with_little_noise_are_soft_attention() -> None:
    soft, nearly = made(), made("soft", [overt.Bayesian.paper("WC", k=1e6)])
    drawn = made("soft", [overt.Bayesian.paper("WC", k=5)])
    for model in (nearly, drawn):
        model.load_state_dict(soft.state_dict(), strict=False)
    want = soft(**INPUTS, labels=LABELS)["log_probs"]
    torch.testing.assert_close(nearly(**INPUTS, labels=LABELS)["log_probs"], want, atol=1e-4, rtol=0.0)
    assert not torch.allclose(drawn(**INPUTS, labels=LABELS)["log_probs"], want, atol=1e-2)
    torch.testing.assert_close(drawn.eval()(**INPUTS, labels=LABELS)["log_probs"], want)


def test_bayesian_weights_drawn_ahead_equal_those_drawn_word_by_word() -> None:
    model = made("soft", [PAPER])
    model.step.fill_(2)
    results = []
    for naively in (False, True):
        chain = overt.Chain(step=model.step)
        if naively:
            with overt.naive():
                loss = model(**INPUTS, labels=LABELS, chain=chain)["loss"]
        else:
            loss = model(**INPUTS, labels=LABELS, chain=chain)["loss"]
        results.append((loss, chain.kl(per_example=True), slopes(loss, model)))
    torch.testing.assert_close(*results)
    assert all(bool(slope.any()) for slope in results[0][2].values()), "the prior's network learns, too"


def test_the_loss_is_the_words_and_the_weighted_kl() -> None:
    model = made("soft", [PAPER])
    model.step.fill_(1)
    loss = model(**INPUTS, labels=LABELS)["loss"]
    seen = overt.losses(model)
    assert seen.task is not None
    assert seen.kl is not None
    weight = torch.sigmoid(torch.tensor(1.0))
    torch.testing.assert_close(seen.task + weight * seen.kl, loss.detach())
    assert int(seen.items) == 9  # type: ignore[arg-type]
    model.step.fill_(2)
    assert model(**INPUTS, labels=LABELS)["loss"] != loss
    assert overt.losses(model.eval()) is not None
    assert model(**INPUTS, labels=LABELS)["loss"] == model(**INPUTS, labels=LABELS)["loss"]


# --- Translation ---


@torch.no_grad()
def exhaustive(model: Seq2Seq, source: Tensor, longest: int, penalty: float, eos_norm: float) -> tuple:
    """The best of all translations, each scored by the network as a target."""
    counted = 1 if eos_norm else 0
    best: tuple[float, list[int]] = (-torch.inf, [])
    for words in range(longest):
        for sentence in itertools.product([3, 4, 5], repeat=words):
            target = [*sentence, EOS]
            inputs = torch.tensor([[BOS, *sentence]])
            labels = torch.tensor([target])
            total = model(source, decoder_input_ids=inputs, labels=labels)["log_probs"].sum()
            total = total - eos_norm * source.shape[1] / (len(target) + 1)
            score = float(total) / ((5 + len(target) + counted) / 6) ** penalty
            best = max(best, (score, target))
    return best


@pytest.mark.parametrize("attention", ["soft", "marginal"])
@pytest.mark.parametrize(("penalty", "preset"), [(1.0, None), (0.0, None), (1.0, "official")])
def test_a_beam_as_wide_as_all_sentences_finds_the_best_of_all(
    attention: str, penalty: float, preset: Any
) -> None:
    model = made(attention, seed=3, init=1.5).eval()
    eos_norm = 3.0 if preset == "official" else 0.0
    settings = {"beam": 6**3, "length_penalty": penalty, "max_length": 3, "preset": preset}
    mask = INPUTS["attention_mask"]
    found, scores = model.translate(SOURCE, mask, **settings)
    for n in range(3):
        score, target = exhaustive(model, SOURCE[n : n + 1, : mask[n].sum()], 3, penalty, eos_norm)
        assert found[n].tolist()[: len(target)] == target
        assert not found[n, len(target) :].any()
        assert float(scores[n]) == pytest.approx(score)


def test_a_beam_of_one_takes_the_likeliest_word_each_time() -> None:
    for seed in range(4):
        model = made("marginal", seed=seed).eval()
        found, _ = model.translate(SOURCE[:1], beam=1, max_length=6)
        words = [BOS]
        while words[-1] != EOS and len(words) < 6:
            every = model(SOURCE[:1], decoder_input_ids=torch.tensor([words]))["logits"][0, -1]
            every[[PAD, BOS]] = -torch.inf
            words.append(int(every.argmax()))
        words = words if words[-1] == EOS else [*words, EOS]
        assert found[0].tolist() == words[1:]


@pytest.mark.parametrize(
    "mechanisms",
    [(), (PAPER,), (overt.Evolving(first=True, beta=0.9), PAPER)],
    ids=["plain", "bayesian", "both"],
)
def test_a_batch_is_translated_as_each_sentence_alone_with_the_scores_of_its_targets(mechanisms: Any) -> None:
    mask = INPUTS["attention_mask"]
    for seed in range(3):
        model = made("soft", mechanisms, seed, init=1.5)
        with torch.no_grad():
            model.generator.bias[EOS] -= 4.0  # long translations, of which some change places in the beam
            for name, parameter in model.map.named_parameters():
                if "evolving" in name:  # a convolution that matters: rows kept for another one would show
                    parameter.uniform_(1.0, 2.0)
        found, scores = model.translate(SOURCE, mask, beam=4, max_length=8)
        assert model.training, "the mode is restored"
        assert found.shape[1] > 4
        model.eval()
        for n in range(3):
            source = SOURCE[n : n + 1, : mask[n].sum()]
            alone, score = model.translate(source, beam=4, max_length=8)
            assert torch.equal(found[n, : alone.shape[1]], alone[0])
            assert not found[n, alone.shape[1] :].any()
            torch.testing.assert_close(scores[n], score[0])
            target = alone[:, : int((alone[0] == EOS).nonzero()[0]) + 1]
            inputs = F.pad(target[:, :-1], (1, 0), value=BOS)
            total = model(source, decoder_input_ids=inputs, labels=target)["log_probs"].sum()
            torch.testing.assert_close(total / ((5 + target.shape[1]) / 6), score[0])


# --- Files and refusals ---


@pytest.mark.parametrize("mechanisms", [(), (PAPER,)], ids=["plain", "bayesian"])
def test_a_saved_model_is_the_same_after_loading(mechanisms: Any, tmp_path: Path) -> None:
    model = made("soft", mechanisms, pad_id=0).float()
    model.step.fill_(17)
    model.save(tmp_path / "model")
    again = Seq2Seq.load(tmp_path / "model")
    assert again.settings == model.settings
    assert again.mechanisms == model.mechanisms
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert not again.training
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "overt-seq2seq"


def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        Seq2Seq.load(tmp_path)
    made().save(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"bridge": True}, "settings that Seq2Seq does not: bridge"),
        ({"model_type": "bert"}, "must be 'overt-seq2seq', got 'bert'"),
        ({"decoder": 6}, r"does not fit config\.json: generator\.weight has shape \(6, 6\), and \(6, 5\)"),
        ({"attention": "loud"}, "attention must be one of 'soft'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**settings, **change}))
        with pytest.raises(ValueError, match=message):
            Seq2Seq.load(tmp_path)


def test_bad_input_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"attention must be one of 'soft', 'marginal'.*got 'loud'"):
        made("loud")
    with pytest.raises(ValueError, match="mechanisms need attention=\"soft\", got attention='marginal'"):
        made("marginal", [PAPER])
    with pytest.raises(ValueError, match=r"eos_id must be below target_vocabulary \(6\), got 6"):
        made(eos_id=6)
    model, mask = made(), INPUTS["attention_mask"]
    with pytest.raises(ValueError, match="beam must be a whole number of at least 1, got 0"):
        model.translate(SOURCE, beam=0)
    cases = [
        ({"input_ids": SOURCE + 1}, "input_ids must hold ids from 0 to 6, got 7"),
        ({"decoder_input_ids": SOURCE - 1}, "decoder_input_ids must hold ids from 0 to 5, got -1"),
        ({"labels": LABELS + 4}, "labels must hold ids from 0 to 5, got"),
        ({"attention_mask": mask.flip(1)}, "attention_mask must have its padding on the right"),
        ({"attention_mask": mask * torch.tensor([[1], [0], [1]])}, "example 1 has no source word"),
        ({"labels": LABELS[:, :3]}, r"labels must have shape \(3, 4\), got \(3, 3\)"),
        ({"input_ids": SOURCE[:, :0]}, r"input_ids must have shape \(batch, source\), got \(3, 0\)"),
        ({"decoder_input_ids": None}, "decoder_input_ids must hold bos_id"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            model(**{**INPUTS, "labels": LABELS, **change})
