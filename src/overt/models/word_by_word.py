"""What networks that write word by word share: labels, the loss with its KL, REINFORCE, and beam search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overt.mechanisms.chain import Chain, Kept
from overt.mechanisms.losses import Losses

IGNORED = -100  # the label of padding


class Words(NamedTuple):
    """The ids of a vocabulary's words."""

    size: int
    pad_id: int
    bos_id: int
    eos_id: int

    def inputs(self, labels: Tensor) -> Tensor:
        """The decoder's input: `bos_id`, and the labels moved by one, (batch, words)."""
        words = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, self.pad_id)
        return F.pad(words, (1, 0), value=self.bos_id)

    def never(self, others: Tensor) -> Tensor:
        """Words that are never generated, boolean (size,): padding, the start, and `others`, a list of ids.

        `eos_id` always may be.
        """
        never = torch.zeros(self.size, dtype=torch.bool, device=others.device)
        never[others] = True
        never[[self.pad_id, self.bos_id]] = True
        never[self.eos_id] = False
        return never


def check_words(
    ids: Mapping[str, tuple[Tensor, int]],
    padded: Mapping[str, Tensor],
    scattered: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Refuse ids outside their vocabulary, and padding that is not on the right; one transfer for all.

    Args:
        ids: name → ids, and the size of their vocabulary.
        padded: name → boolean (batch, length), False at padding, which must be on the right.
        scattered: name → boolean (batch, length), whose hidden places may be anywhere.

    Returns:
        name → (batch,) on the CPU, how many places of each example are not padding.
    """
    masks = {**padded, **(scattered or {})}
    extremes = [extreme for tensor, _ in ids.values() for extreme in tensor.aminmax()]
    holes = [(x[:, 1:] & ~x[:, :-1]).any() for x in padded.values()]
    counts = [mask.sum(dim=1) for mask in masks.values()]
    singles = [single.view(1) for single in (*extremes, *holes)]
    facts = torch.cat([*counts, *singles]).cpu()
    *lengths, rest = torch.split(facts, [*map(len, counts), len(singles)])
    numbers = iter(rest.tolist())
    for name, (_, size) in ids.items():
        least, most = next(numbers), next(numbers)
        if least < 0 or most >= size:
            raise ValueError(f"{name} must hold ids from 0 to {size - 1}, got {least if least < 0 else most}")
    for name, hole in zip(padded, numbers, strict=True):
        if hole:
            raise ValueError(f"{name} must have its padding on the right")
    return dict(zip(masks, lengths, strict=True))


def loss_of_words(
    losses: Tensor, real: Tensor, chain: Chain, training: bool, items: int | Tensor | None
) -> tuple[Tensor, Losses]:
    """The words' mean loss, with the KL in training, and its parts.

    Args:
        losses: (batch, words), 0 at padding.
        real: boolean (batch, words), False at padding.
        chain: of this forward pass. Each example's KL weighs as much as its words.
        training: whether the KL is part of the loss.
        items: number of words that the loss is divided by; those of this batch by default.
    """
    words = real.sum(dim=1)  # (batch,)
    here = words.sum().clamp(min=1)
    kl = (chain.kl(per_example=True) * words).sum().detach() / here if chain.has_loss else None
    parts = Losses(losses.sum().detach() / here, kl, chain.weight(), words.sum())
    total = losses.sum()
    if chain.has_loss and training:
        total = total + (chain.penalty(per_example=True) * words).sum()
    return total / (here if items is None else items), parts


def log_softmax(scores: Tensor, shown: Tensor | None) -> Tensor:
    """Log-probabilities over shown positions, at least float32, the lowest number at hidden ones.

    `scores` is (batch, target, source), `shown` boolean (batch, source), or None for all.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if shown is None:
        return scores.log_softmax(dim=-1)
    lowest = torch.finfo(scores.dtype).min
    return scores.masked_fill(~shown.unsqueeze(1), lowest).log_softmax(dim=-1)


def reinforce(
    value: Tensor, log_probability: Tensor, baseline: Tensor, reward: Tensor | None = None
) -> Tensor:
    """The value, with its expectation's gradient, estimated from positions that were drawn.

    Averaged over draws, the gradient is that of the expected value, whatever the baseline, as long as this
    does not depend on the position drawn.

    Args:
        value: what is to be large, such as log f (Deng et al. 2018, section 4).
        log_probability: of the positions drawn.
        baseline: of the reward.
        reward: all that the draw influenced; the value alone by default.
    """
    advantage = ((value if reward is None else reward) - baseline).detach()
    return value + advantage * (log_probability - log_probability.detach())


def choose(probabilities: Tensor) -> Tensor:
    """One position for each distribution, from torch's global generator: (…, positions) → (…)."""
    return torch.multinomial(probabilities.flatten(0, -2), 1).view(probabilities.shape[:-1])


# --- Beam search ---


def beam_search(
    advance: Callable[[Tensor, Tensor | None], Tensor],
    batch: int,
    beam: int,
    words: Words,
    never: Tensor,
    longest: int,
    length_penalty: float,
    counted: int = 0,
) -> tuple[Tensor, Tensor]:
    """The best sequence of each example, (batch, longest found), with `eos_id` and `pad_id` at the end.

    All hypotheses of all examples advance together. One of n words, `eos_id` among them, has the score
    log-probability / ((5 + n) / 6)^length_penalty. The search of an example ends when as many hypotheses as
    the beam is wide have ended.

    Args:
        advance: called with the last word of each hypothesis, (batch·beam, 1), and with the rows,
            (batch·beam,), whose states they continue; None at the start. Returns log-probabilities of the
            next word, (batch·beam, vocabulary).
        batch: number of examples.
        beam: hypotheses per example; 1 takes the likeliest word each time.
        words: ids of the vocabulary.
        never: boolean (vocabulary,), words that are not generated, on the device of the search.
        longest: number of words at most; the last one is then `eos_id`.
        length_penalty: see above.
        counted: what n counts besides.

    Returns:
        sequences: (batch, longest found).
        scores: (batch,).
    """
    size, eos, device = words.size, words.eos_id, never.device
    first_beam = torch.arange(batch, device=device).view(-1, 1) * beam  # rows of each example
    tokens = torch.empty(batch, beam, 0, dtype=torch.int64, device=device)
    last = torch.full((batch * beam, 1), words.bos_id, device=device)
    best = torch.full((batch, longest), words.pad_id, device=device)
    ended_before = torch.zeros_like(first_beam)
    not_eos = torch.arange(size, device=device) != eos
    order: Tensor | None = None

    for length in range(1, longest + 1):
        log_probs = advance(last, order).view(batch, beam, size)
        log_probs = log_probs.masked_fill(never if length < longest else not_eos, -torch.inf)
        if length == 1:
            scores = log_probs.new_full((batch, beam), -torch.inf)  # of hypotheses that go on
            best_scores = scores[:, 0].clone()
            scores[:, 0] = 0.0
        totals = (scores.unsqueeze(-1) + log_probs).flatten(1)  # (batch, beam·vocabulary)
        # Twice as many as needed: at most half of them end here.
        top, place = totals.topk(min(2 * beam, totals.shape[1]))
        parent, word = place // size, place % size
        ends = word == eos
        extended = torch.cat([_pick(tokens, parent), word.unsqueeze(-1)], dim=-1)  # (batch, 2·beam, length)

        ending = ends[:, :beam] & top[:, :beam].isfinite()
        ended = top[:, :beam] / ((5 + length + counted) / 6) ** length_penalty
        score, which = ended.masked_fill(~ending, -torch.inf).max(dim=1)
        better = score > best_scores
        best_scores = torch.where(better, score, best_scores)
        hypothesis = _pick(extended, which.unsqueeze(1)).squeeze(1)
        best[:, :length] = torch.where(better.unsqueeze(1), hypothesis, best[:, :length])

        ended_before = ended_before + ending.sum(dim=1, keepdim=True)
        scores, going_on = top.masked_fill(ends, -torch.inf).topk(beam)
        scores = scores.masked_fill(ended_before >= beam, -torch.inf)
        if not bool(scores.isfinite().any()):
            break
        tokens, order = _pick(extended, going_on), (first_beam + parent.gather(1, going_on)).flatten()
        last = tokens[..., -1].reshape(-1, 1)
    return best[:, :length], best_scores


def reorder(chain: Chain, order: Tensor) -> None:
    """Let the kept rows of a chain follow their hypotheses: row n now continues row order[n]."""
    chain.rows = {owner: Kept(kept.in_order(), order) for owner, kept in chain.rows.items()}


def _pick(hypotheses: Tensor, which: Tensor) -> Tensor:
    """Some hypotheses of each example: (batch, all, length), (batch, some) → (batch, some, length)."""
    return hypotheses.gather(1, which.unsqueeze(-1).expand(-1, -1, hypotheses.shape[-1]))
