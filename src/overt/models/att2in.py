"""Att2in, the captioning network of Rennie et al. 2017, as Bayesian Attention Modules uses it (Table 3).

A caption is written word by word by an LSTM. Before word t it looks at the regions I_1 … I_N of an image,
with its last state as the query:

    a_i = w·tanh(W_I I_i + W_h h_{t−1} + b) + b_α        α = softmax(a)        x = Σ_i α_i I_i

and x enters the cell in one place only, its input, which is a maxout of two halves; there is no tanh on it:

    i, f, o = sigmoid(U e_t + V h_{t−1})                  from the last word and the last state alone
    g, g'   = U' e_t + V' h_{t−1} + W_x x
    c_t     = f·c_{t−1} + i·max(g, g')                    h_t = o·tanh(c_t)

The next word's distribution is softmax(generator(h_t)). This is the variant called att2in2 in the code that
the paper builds on: embeddings e and regions I are each a layer followed by ReLU and dropout, and states
start at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt import _check
from overt._modes import evaluating
from overt.mechanisms.attention_map import AttentionMap
from overt.mechanisms.chain import Chain
from overt.mechanisms.losses import Losses
from overt.mechanisms.mechanism import Mechanism, as_dict
from overt.mechanisms.rows import Rows
from overt.mechanisms.seen import Seen
from overt.mechanisms.site import Site
from overt.models.folders import load_network, save_network
from overt.models.word_by_word import (
    IGNORED,
    Words,
    beam_search,
    check_words,
    log_softmax,
    loss_of_words,
    reinforce,
    reorder,
)

MODEL_TYPE = "overt-att2in"
Attention = Literal["soft", "hard", "none"]
ATTENTIONS: tuple[Attention, ...] = Attention.__args__  # type: ignore[attr-defined]


class Image(NamedTuple):
    """Images that have been projected."""

    regions: Tensor  # (batch, regions, hidden), I
    keys: Tensor  # (batch, regions, score), W_I I + b
    shown: Tensor | None  # boolean (batch, regions), False where there is no region; None where all are there


class State(NamedTuple):
    """What the decoder carries from word to word, each (batch, hidden); zeros at the start."""

    hidden: Tensor
    cell: Tensor


class Decoded(NamedTuple):
    """What the recurrence leaves for all words."""

    hidden: Tensor  # (batch, words, hidden), h
    state: State
    scores: Tensor | None  # (batch, words, regions), a; None without an image
    weights: Tensor | None  # (batch, words, regions), α


class Att2in(nn.Module):
    """Writes captions; its call signature is one that the Hugging Face Trainer can use.

    In training mode the loss is the attention's objective per word, plus the KL of random weights, which
    covers the maps of all words. In evaluation mode it is the negative log-likelihood of the words, with the
    mean of random weights. `step` is a buffer, saved with the weights; a training loop must set it before
    each step (`model.step.fill_(t)`), or every step draws the same noise.

    Bayesian Attention is `attention="soft"` with

        mechanisms=[overt.Bayesian.paper("WC", k=10, prior_beta=1e-6, rho=1, d_mid=10)]

    Its prior reads the projected regions. Every word has noise of its own.

    Hard attention draws one region for each word, which the recurrence then follows, and maximises the
    expectation of Σ_t (log p(y_t) + entropy·H(α_t)), estimated by REINFORCE from one draw (Xu et al. 2015).
    A region is credited with the reward to go, that of its own word and all later ones, since its own word's
    alone would bias the gradient. The baseline is the reward to go of the same caption under soft attention,
    which sees no draw. Evaluation takes the expected context, as soft attention does, and draws nothing.

    Dropout is on embeddings, on regions and on the generator's input. Regions are drawn from torch's global
    generator, the noise of mechanisms from the chain's address.

    Args:
        vocabulary: number of token ids.
        features: width of the image's regions.
        attention: "soft", "hard" or "none". The last has no image: a language model of captions, which
            takes regions and does not read them.
        mechanisms: of the attention map; with "soft" only.
        embedding: width of embeddings.
        hidden: width of the LSTM and of projected regions.
        score: width of the additive score.
        dropout: see above.
        entropy: weight of the weights' entropy in the objective; with "hard" only.
        soft_share: probability that a caption is trained with soft attention; with "hard" only. Xu et al.
            take 0.5.
        pad_id: of padding, which is never generated.
        bos_id: the decoder's first input; never generated, unless it is `eos_id`.
        eos_id: ends a caption. The code that the paper builds on has one id, 0, for all three.
    """

    step: Tensor
    accepts_loss_kwargs = True  # tells the Trainer to pass `num_items_in_batch`
    overt_losses: Losses | None = None  # of the last forward pass with labels, for `overt.losses`

    def __init__(
        self,
        vocabulary: int,
        features: int = 2048,
        attention: Attention = "soft",
        mechanisms: Sequence[Mechanism] = (),
        embedding: int = 512,
        hidden: int = 512,
        score: int = 512,
        dropout: float = 0.5,
        entropy: float = 0.0,
        soft_share: float = 0.0,
        pad_id: int = 0,
        bos_id: int = 0,
        eos_id: int = 0,
    ) -> None:
        super().__init__()
        _check.one_of("attention", attention, ATTENTIONS)
        if mechanisms and attention != "soft":
            raise ValueError(f'mechanisms need attention="soft", got attention={attention!r}')
        sizes = {"vocabulary": vocabulary, "features": features}
        sizes |= {"embedding": embedding, "hidden": hidden, "score": score}
        ids = {"pad_id": pad_id, "bos_id": bos_id, "eos_id": eos_id}
        for name, value in sizes.items():
            _check.whole(name, value, 1)
        for name, value in ids.items():
            _check.whole(name, value, 0)
            if value >= vocabulary:
                raise ValueError(f"{name} must be below vocabulary ({vocabulary}), got {value}")
        _check.fraction("dropout", dropout)
        _check.finite("entropy", entropy)
        _check.fraction("soft_share", soft_share)
        for name, number in (("entropy", entropy), ("soft_share", soft_share)):
            if number < 0.0:
                raise ValueError(f"{name} must be at least 0, got {number}")
            if number and attention != "hard":
                raise ValueError(f'{name} needs attention="hard", got attention={attention!r}')
        self.attention, self.dropout = attention, dropout
        self.entropy, self.soft_share = entropy, soft_share
        self.pad_id, self.bos_id, self.eos_id = pad_id, bos_id, eos_id
        self._words = Words(vocabulary, pad_id, bos_id, eos_id)
        self.settings = {**sizes, "attention": attention, "dropout": dropout, "entropy": entropy}
        self.settings |= {"soft_share": soft_share, **ids}
        self.mechanisms = tuple(mechanisms)

        self.words = nn.Embedding(vocabulary, embedding)
        self.from_word = nn.Linear(embedding, 5 * hidden)  # U, U'
        self.from_hidden = nn.Linear(hidden, 5 * hidden)  # V, V'
        self.generator = nn.Linear(hidden, vocabulary)
        if attention != "none":
            self.region = nn.Linear(features, hidden)
            self.key = nn.Linear(hidden, score)  # W_I, b
            self.query = nn.Linear(hidden, score)  # W_h
            self.score = nn.Linear(score, 1)  # w, b_α
            self.from_region = nn.Linear(hidden, 2 * hidden)  # W_x
            self.map = AttentionMap(mechanisms, Site(1, hidden, "cross", encoder_decoder=True))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    # --- The recurrence ---

    def _project(self, regions: Tensor, shown: Tensor | None) -> Image | None:
        if self.attention == "none":
            return None
        regions = regions.to(self.region.weight.dtype)
        if shown is not None:  # what stands where there is no region might not be a number
            regions = regions.masked_fill(~shown.unsqueeze(-1), 0.0)
        projected = self._dropped(F.relu(self.region(regions)))
        return Image(projected, self.key(projected), shown)

    def _word_parts(self, words: Tensor) -> Tensor:
        """What does not depend on the state, for all words at once: (words, batch, 5·hidden [+ score]).

        What each word adds to gates and input; with an attention, with all biases, that of the query, too.
        """
        embedded = self._dropped(F.relu(self.words(words)))  # (batch, words, embedding)
        bias = self.from_word.bias + self.from_hidden.bias
        if self.attention == "none":
            return F.linear(embedded, self.from_word.weight, bias).transpose(0, 1)
        bias = bias + F.pad(self.from_region.bias, (3 * self.generator.in_features, 0))
        parts = F.linear(embedded, self.from_word.weight, bias).transpose(0, 1)
        return torch.cat([parts, self.query.bias.to(parts.dtype).expand(*parts.shape[:2], -1)], dim=-1)

    def _start(self, word_parts: Tensor) -> State:
        weight = self.generator.weight  # the state has its precision, whatever autocast makes of the gates
        zeros = weight.new_zeros(word_parts.shape[1], weight.shape[1])
        return State(zeros, zeros)

    def _rows(self, image: Image | None, words: int, chain: Chain, real: Tensor | None) -> Rows | None:
        """The rows of the map to come, one for each word; `real` is False at padding."""
        if image is None:
            return None
        return self.map.rows(image.regions.unsqueeze(1), words, chain, Seen(image.shown, real))

    def _decode(
        self,
        word_parts: Tensor,
        image: Image | None,
        rows: Rows | None,
        state: State,
        pick: Callable[[Tensor], Tensor] | None = None,
    ) -> Decoded:
        """Run the decoder over words, which make the next rows of the map.

        Args:
            word_parts: from `_word_parts`.
            image: None without one.
            rows: of the map; None without an image.
            state: before the first word.
            pick: α → the weights of the context, both (batch, regions); α itself by default.
        """
        hidden, cell = state
        width = hidden.shape[1]
        hiddens, all_scores, all_weights = [], [], []
        # As few operations for a word as can be: on a GPU each takes longer to start than to compute. Gates,
        # input and query are one product.
        weight, sizes = self.from_hidden.weight, [3 * width, 2 * width]
        if image is not None:
            weight, sizes = torch.cat([weight, self.query.weight]), [*sizes, self.query.out_features]
            from_region = self.from_region.weight.t()
        weight = weight.t()
        for word_part in word_parts.unbind():
            gates, new, *queries = torch.split(torch.addmm(word_part, hidden, weight), sizes, dim=1)
            if image is not None and rows is not None:
                query = queries[0].unsqueeze(1)  # (batch, 1, score)
                scores = self.score(torch.tanh(image.keys + query)).squeeze(-1)  # (batch, regions)
                batch, regions = scores.shape
                weights = rows.weights(scores.view(batch, 1, 1, regions)).view(batch, regions)
                used = (weights if pick is None else pick(weights)).to(image.regions.dtype)
                context = torch.bmm(used.unsqueeze(1), image.regions).squeeze(1)  # (batch, hidden)
                new = torch.addmm(new, context, from_region)
                all_scores.append(scores)
                all_weights.append(weights)
            into, forget, out = torch.sigmoid(gates).chunk(3, dim=1)
            largest = new.view(-1, 2, width).max(dim=1).values  # whose gradient is simpler than maximum's
            cell = forget * cell + into * largest
            hidden = out * torch.tanh(cell)
            hiddens.append(hidden)
        maps = [torch.stack(x, dim=1) if x else None for x in (all_scores, all_weights)]
        return Decoded(torch.stack(hiddens, dim=1), State(hidden, cell), maps[0], maps[1])

    def _word_log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all words, at least float32: (batch, words, hidden) → (…, vocabulary)."""
        logits: Tensor = self.generator(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)

    # --- The objectives ---

    def _log_p(self, decoded: Decoded, labels: Tensor, kept: Tensor) -> Tensor:
        """Log-probabilities of the labels, (batch, words); 0 at padding.

        `kept`, (batch, words, hidden), is the dropout of the generator's input.
        """
        every = self._word_log_probs(decoded.hidden * kept)
        real = labels != IGNORED
        log_p = every.gather(-1, labels.masked_fill(~real, 0).unsqueeze(-1)).squeeze(-1)
        return log_p.masked_fill(~real, 0.0)

    def _value(self, decoded: Decoded, image: Image, labels: Tensor, kept: Tensor) -> Tensor:
        """What hard attention makes large: log p(y_t) + entropy·H(α_t), (batch, words); 0 at padding."""
        log_p = self._log_p(decoded, labels, kept)
        if not self.entropy:
            return log_p
        assert decoded.scores is not None
        return log_p + self.entropy * entropy_of(decoded.scores, image.shown).masked_fill(
            labels == IGNORED, 0.0
        )

    def _hard(self, word_parts: Tensor, image: Image, labels: Tensor, chain: Chain) -> tuple[Decoded, Tensor]:
        """The recurrence along regions that were drawn, and its objective of each word, (batch, words)."""
        state, real = self._start(word_parts), labels != IGNORED
        softly = self._choose_soft(len(labels), word_parts.device).unsqueeze(-1)  # (batch, 1)
        places: list[Tensor] = []

        def one_region(weights: Tensor) -> Tensor:
            place = self._choose(weights.detach())
            places.append(place)
            one = torch.zeros_like(weights).scatter_(1, place.unsqueeze(1), 1.0)
            return torch.where(softly, weights, one)

        def run(pick: Callable[[Tensor], Tensor] | None) -> Decoded:
            rows = self._rows(image, len(word_parts), chain, real)
            return self._decode(word_parts, image, rows, state, pick)

        decoded = run(one_region)
        kept = self._dropped(torch.ones_like(decoded.hidden))
        value = self._value(decoded, image, labels, kept)
        with torch.no_grad():
            baseline = to_go(self._value(run(None), image, labels, kept))
        assert decoded.scores is not None
        place = torch.stack(places, dim=1).unsqueeze(-1)  # (batch, words, 1)
        log_drawn = log_softmax(decoded.scores, image.shown).gather(-1, place).squeeze(-1)
        estimate = reinforce(value, log_drawn, baseline, to_go(value))
        return decoded, torch.where(softly, value, estimate).masked_fill(~real, 0.0)

    def _choose(self, probabilities: Tensor) -> Tensor:
        """One region per caption, from torch's global generator: (batch, regions) → (batch,).

        As torch.multinomial does it, which looks at the probabilities first, and waits for a GPU.
        """
        return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)

    def _choose_soft(self, captions: int, device: torch.device) -> Tensor:
        """Which captions are trained with soft attention, boolean (batch,)."""
        if not self.soft_share:
            return torch.zeros(captions, dtype=torch.bool, device=device)
        return torch.rand(captions, device=device) < self.soft_share

    def forward(
        self,
        regions: Tensor,
        region_mask: Tensor | None = None,
        labels: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        examples: Tensor | None = None,
        chain: Chain | None = None,
        num_items_in_batch: int | Tensor | None = None,
        output_attentions: bool = False,
        check: bool = True,
    ) -> dict[str, Tensor]:
        """Loss and log-probabilities of the labels; without labels, log-probabilities of all words.

        Args:
            regions: (batch, regions, features), those of each caption's image.
            region_mask: (batch, regions), 0 where there is no region; None where all are there.
            labels: (batch, words), `eos_id` at the end, then −100, the label of padding.
            decoder_input_ids: (batch, words): `bos_id`, and the labels moved by one, which is the default.
            examples: (batch,), each caption's number in the data set, which addresses its noise.
            chain: to request posterior samples, or to read the KL.
            num_items_in_batch: number of labels that the loss is divided by; those of this batch by default.
            output_attentions: whether to return the map and its entropy.
            check: whether to check what the inputs hold, for which a GPU must be waited for. Shapes are
                always checked.

        Returns:
            loss: with labels. Each caption's KL weighs as much as its labels.
            log_probs: (batch, words) with labels, 0 at padding: the negative of what the loss averages. In
                evaluation the log-probability of each label, in training the objective.
            logits: (batch, words, vocabulary) without labels, log-probabilities.
            attentions: (batch, words, regions) on request, the weights α.
            entropy: (batch, words) on request, of the softmax of scores, in nats; 0 at padding.
        """
        if decoder_input_ids is None and labels is None:
            raise ValueError("give labels, or decoder_input_ids: bos_id and the caption's words; got neither")
        if output_attentions and self.attention == "none":
            raise ValueError('output_attentions needs an attention, got attention="none"')
        shown = self._checked(regions, region_mask, decoder_input_ids, labels, check)
        if decoder_input_ids is None:
            assert labels is not None
            decoder_input_ids = self._words.inputs(labels)
        if chain is None:
            chain = Chain(step=self.step, examples=0 if examples is None else examples)
        image, word_parts = self._project(regions, shown), self._word_parts(decoder_input_ids)
        real = None if labels is None else labels != IGNORED  # (batch, words)

        output: dict[str, Tensor] = {}
        if labels is not None and image is not None and self.attention == "hard" and self.training:
            decoded, output["log_probs"] = self._hard(word_parts, image, labels, chain)
        else:
            rows = self._rows(image, len(word_parts), chain, real)
            decoded = self._decode(word_parts, image, rows, self._start(word_parts))
            if rows is not None:
                rows.finish()
            if labels is None:
                output["logits"] = self._word_log_probs(self._dropped(decoded.hidden))
            else:
                kept = self._dropped(torch.ones_like(decoded.hidden))
                output["log_probs"] = self._log_p(decoded, labels, kept)
        if real is not None:
            losses = -output["log_probs"]
            output["loss"], self.overt_losses = loss_of_words(
                losses, real, chain, self.training, num_items_in_batch
            )
        if output_attentions and decoded.scores is not None and decoded.weights is not None:
            entropy = entropy_of(decoded.scores, shown)
            output["attentions"] = decoded.weights
            output["entropy"] = entropy if real is None else entropy.masked_fill(~real, 0.0)
        return output

    def _checked(
        self,
        regions: Tensor,
        mask: Tensor | None,
        words: Tensor | None,
        labels: Tensor | None,
        values: bool = True,
    ) -> Tensor | None:
        """Refuse bad input; which regions there are, boolean (batch, regions), or None for all.

        Without `values`, of wrong shapes alone.
        """
        reads = self.attention != "none"
        features = int(self.settings["features"])
        if regions.dim() != 3 or len(regions) == 0 or (reads and 0 in regions.shape):
            raise ValueError(
                f"regions must have shape (batch, regions, features), got {tuple(regions.shape)}"
            )
        if reads and regions.shape[-1] != features:
            raise ValueError(
                f"regions must be {features} wide, as this network's are, got {regions.shape[-1]}"
            )
        if reads and not regions.is_floating_point():
            raise TypeError(f"regions must hold floating-point numbers, got {regions.dtype}")
        if mask is not None and mask.shape != regions.shape[:2]:
            raise ValueError(
                f"region_mask must have shape {tuple(regions.shape[:2])}, got {tuple(mask.shape)}"
            )
        given = {"decoder_input_ids": words, "labels": labels}
        present = {name: tensor for name, tensor in given.items() if tensor is not None}
        length = next((tensor.shape[-1] for tensor in present.values() if tensor.dim()), 0)
        for name, tensor in present.items():
            shape = regions.shape[0], length
            if tensor.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
            if length == 0:
                raise ValueError(f"{name} must hold a word at least, got {tuple(tensor.shape)}")
        shown = None if mask is None else mask != 0
        if not values:
            return shown
        ids, padded = {}, {}
        if words is not None:
            ids["decoder_input_ids"] = words, self._words.size
        if labels is not None:
            padded["labels"] = labels != IGNORED
            ids["labels"] = labels.masked_fill(~padded["labels"], 0), self._words.size
        scattered = {"region_mask": shown} if reads and shown is not None else {}
        if ids or scattered:
            counts = check_words(ids, padded, scattered).get("region_mask")
            if counts is not None and int(counts.min()) == 0:
                raise ValueError(f"example {int(counts.argmin())} has no region: region_mask hides all")
        return shown

    # --- Captions ---

    @torch.no_grad()
    def caption(
        self,
        regions: Tensor,
        region_mask: Tensor | None = None,
        beam: int = 1,
        length_penalty: float = 0.0,
        max_length: int = 21,
        never: Sequence[int] = (),
        sample: int | None = None,
        examples: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The best caption of each image by beam search, with `eos_id` and then `pad_id` at the end.

        All hypotheses of all images advance together. A hypothesis of n words, `eos_id` among them, has the
        score log-probability / ((5 + n) / 6)^length_penalty. The search of an image ends when as many
        hypotheses as the beam is wide have ended.

        Args:
            regions: (batch, regions, features).
            region_mask: (batch, regions), 0 where there is no region.
            beam: hypotheses per image; 1, greedy search, takes the likeliest word each time.
            length_penalty: see above; 0 compares log-probabilities.
            max_length: of a caption; its last word is `eos_id`.
            never: further ids that are not generated, such as that of unknown words.
            sample: which posterior sample of random weights to draw; None takes their mean.
            examples: (batch,), each image's number, which addresses the noise of a sample; their places in
                the batch by default.

        Returns:
            captions: (batch, longest).
            scores: (batch,).
        """
        _check.whole("beam", beam, 1)
        _check.whole("max_length", max_length, 1)
        _check.finite("length_penalty", length_penalty)
        size = self._words.size
        if beam > size:
            raise ValueError(f"beam must be at most the number of ids in the vocabulary, {size}; got {beam}")
        for word in never:
            _check.whole("never", word, 0)
            if word >= size or word == self.eos_id:
                which = "is eos_id, without which no caption ends" if word == self.eos_id else "is not there"
                raise ValueError(f"never must hold ids from 0 to {size - 1}, but {word} {which}")
        shown = self._checked(regions, region_mask, None, None)
        if examples is None:
            examples = torch.arange(len(regions))
        if examples.shape != regions.shape[:1]:
            raise ValueError(f"examples must have shape ({len(regions)},), got {tuple(examples.shape)}")
        with evaluating(self):
            image = self._project(regions, shown)
            if image is not None:
                # (batch·beam, …)
                image = Image(*(None if x is None else x.repeat_interleave(beam, dim=0) for x in image))  # type: ignore[arg-type]
            numbers = examples.repeat_interleave(beam)
            chain = Chain(step=self.step, keep=True, sample=sample, examples=numbers)
            state: State | None = None

            def advance(words: Tensor, order: Tensor | None) -> Tensor:
                nonlocal state
                word_parts = self._word_parts(words)
                if state is None or order is None:
                    state = self._start(word_parts)
                else:
                    state = State(*(x[order] for x in state))
                    reorder(chain, order)
                decoded = self._decode(word_parts, image, self._rows(image, 1, chain, None), state)
                state = decoded.state
                return self._word_log_probs(decoded.hidden).squeeze(1)

            device = self.generator.weight.device
            others = torch.tensor(list(never), dtype=torch.int64, device=device)
            unused = self._words.never(others)
            return beam_search(advance, len(regions), beam, self._words, unused, max_length, length_penalty)

    # --- Files ---

    def save(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors`, completely or not at all."""
        mechanisms = [as_dict(mechanism) for mechanism in self.mechanisms]
        save_network(self, folder, MODEL_TYPE, {**self.settings, "mechanisms": mechanisms})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The network that `save` wrote, in evaluation mode on the CPU."""
        return load_network(cls, folder, MODEL_TYPE, ("vocabulary", "features"))


def entropy_of(scores: Tensor, shown: Tensor | None) -> Tensor:
    """The entropy of the softmax of scores over shown regions, in nats, (batch, words).

    `scores` is (batch, words, regions), `shown` boolean (batch, regions), or None for all.
    """
    log_p = log_softmax(scores, shown)
    return -(log_p.exp() * log_p).sum(dim=-1)


def to_go(value: Tensor) -> Tensor:
    """Σ_{t' ≥ t} value_{t'}, the sum of this word's value and those of all later ones, (batch, words)."""
    return value.flip(1).cumsum(dim=1).flip(1)
