"""The LSTM translation network of Deng et al. 2018, which Bayesian Attention Modules takes over (Table 4).

A source sentence is read by a bidirectional LSTM. The decoder, word by word, attends to what was read, and
predicts the next word from its query and one vector of the source, the context x:

    f(x) = softmax(generator(tanh(output([query; x]))))

The attentions differ in what x is: the mean under the prior attention p (soft), or one latent position i,
which is summed out (marginal), bounded (hard), or inferred by a posterior q that sees the target
(variational). In every one of them the mean context is what the decoder's next step receives. The recurrence
is therefore the same, and everything about single positions is computed after it, for all words at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

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
    choose,
    log_softmax,
    loss_of_words,
    reinforce,
    reorder,
)

MODEL_TYPE = "overt-seq2seq"
Attention = Literal[
    "soft",
    "marginal",
    "hard-enumerated",
    "hard-sampled",
    "variational-enumerated",
    "variational-sampled",
    "variational-relaxed",
]
ATTENTIONS: tuple[Attention, ...] = Attention.__args__  # type: ignore[attr-defined]
EOS_NORM = 3.0  # of the released translation command
# Scores over the vocabulary that exist at once where source positions are enumerated: beyond that, words are
# taken in chunks, recomputed in the backward pass. It bounds memory (0.5 GB), not the result.
SCORES_AT_ONCE = 2**27
# log α of a Dirichlet is kept in this range: beyond it, float32 has no digits left for its KL.
LEAST_LOG_ALPHA, MOST_LOG_ALPHA = -10.0, 10.0


class Source(NamedTuple):
    """A source sentence that has been read."""

    memory: Tensor  # (batch, source, 2 · encoder)
    keys: Tensor  # (batch, source, score), W_k x
    shown: Tensor  # boolean (batch, source), False at padding
    lengths: Tensor  # (batch,)


class State(NamedTuple):
    """What the decoder carries from word to word, each (batch, width); zeros at the start."""

    lower: Tensor
    lower_cell: Tensor
    upper: Tensor
    upper_cell: Tensor
    context: Tensor


class Decoded(NamedTuple):
    """What the recurrence leaves for all target words."""

    queries: Tensor  # (batch, target, decoder)
    contexts: Tensor  # (batch, target, 2 · encoder), Σ_i weights_i x_i
    scores: Tensor  # (batch, target, source), before the softmax
    weights: Tensor  # (batch, target, source)
    state: State


class Reader(nn.Module):
    """Two layers of bidirectional LSTMs: (batch, sequence, width) → (batch, sequence, 2 · hidden)."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, hidden, 2, batch_first=True, dropout=dropout, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Read sequences that end where `lengths`, (batch,) on the CPU, say; zeros after that."""
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.lstm(packed)
        return pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0]


class InferenceNetwork(nn.Module):
    """The posterior's scores: two readers, of the source and of the target, and a bilinear form."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.source = Reader(width, hidden, dropout)
        self.target = Reader(width, hidden, dropout)
        self.bilinear = nn.Linear(2 * hidden, 2 * hidden, bias=False)

    def forward(self, source: Tensor, target: Tensor, lengths: tuple[Tensor, Tensor]) -> Tensor:
        """Embeddings of source and target → (batch, target, source)."""
        read, words = self.source(source, lengths[0]), self.target(target, lengths[1])
        return self.bilinear(words) @ read.mT  # type: ignore[no-any-return]


class Seq2Seq(nn.Module):
    """Translates; its call signature is the one the Hugging Face Trainer uses.

    In training mode the loss is the attention's objective per target word, plus the KL of random weights; in
    evaluation mode it is the negative log-likelihood under the rule for testing: soft attention as it is,
    with the mean of random weights; Σ_i p_i f(x_i) where the position is latent; one draw of the weights
    with "variational-relaxed". `step` is a buffer, saved with the weights; a training loop must set it before
    each step (`model.step.fill_(t)`), or every step draws the same noise.

    Bayesian Attention is `attention="soft"` with

        mechanisms=[overt.Bayesian.paper("WC", k=5, prior_beta=1e-6, rho=1, d_mid=5)]

    Dropout is on embeddings, between LSTM layers and on the generator's input, where all positions of a word
    share one mask. All parameters but those of mechanisms start from U(−init, init). Positions and relaxed
    weights are drawn from torch's global generator, the noise of mechanisms from the chain's address.

    Args:
        source_vocabulary: number of source token ids.
        target_vocabulary: number of target token ids.
        attention: one of `ATTENTIONS`. Objectives per word: "soft" −log f(E_p x); "marginal"
            −log Σ p_i f(x_i); "hard-enumerated" −Σ p_i log f(x_i); "variational-enumerated"
            −Σ q_i log f(x_i) + KL(q‖p). "hard-sampled" and "variational-sampled" estimate these from one
            position, by REINFORCE with the baseline log f(E_p x). In "variational-relaxed" the weights
            follow Dirichlet distributions, with α = exp(score).
        mechanisms: of the attention map; with "soft" only.
        embedding: width of embeddings.
        encoder: width of the encoder, per direction.
        decoder: width of the decoder.
        score: width of the additive score, v·tanh(W_q q + W_k x).
        dropout: see above.
        init: see above.
        pad_id: of padding, which is never generated.
        bos_id: the decoder's first input; never generated, unless it is `eos_id`.
        eos_id: ends a translation.

    Attributes:
        jensen: train "variational-relaxed" on E_p log f(x), whose weights are drawn from the prior, without
            posterior and KL. The paper starts that way before it trains on the whole objective.
    """

    step: Tensor
    jensen: bool = False
    accepts_loss_kwargs = True  # tells the Trainer to pass `num_items_in_batch`
    overt_losses: Losses | None = None  # of the last forward pass with labels, for `overt.losses`
    tokenizer: Any = None  # of its text, for `overt.trace`; that of the target is `tokenizer.target`

    def __init__(
        self,
        source_vocabulary: int,
        target_vocabulary: int,
        attention: Attention = "soft",
        mechanisms: Sequence[Mechanism] = (),
        embedding: int = 512,
        encoder: int = 512,
        decoder: int = 768,
        score: int = 512,
        dropout: float = 0.3,
        init: float = 0.1,
        pad_id: int = 0,
        bos_id: int = 1,
        eos_id: int = 2,
    ) -> None:
        super().__init__()
        _check.one_of("attention", attention, ATTENTIONS)
        if mechanisms and attention != "soft":
            raise ValueError(f'mechanisms need attention="soft", got attention={attention!r}')
        sizes = {"source_vocabulary": source_vocabulary, "target_vocabulary": target_vocabulary}
        sizes |= {"embedding": embedding, "encoder": encoder, "decoder": decoder, "score": score}
        ids = {"pad_id": pad_id, "bos_id": bos_id, "eos_id": eos_id}
        for name, value in sizes.items():
            _check.whole(name, value, 1)
        for name, value in ids.items():
            _check.whole(name, value, 0)
            if value >= target_vocabulary:
                raise ValueError(f"{name} must be below target_vocabulary ({target_vocabulary}), got {value}")
        _check.fraction("dropout", dropout)
        _check.positive("init", init)
        self.attention, self.dropout = attention, dropout
        self.pad_id, self.bos_id, self.eos_id = pad_id, bos_id, eos_id
        self._words = Words(target_vocabulary, pad_id, bos_id, eos_id)
        self.settings = {**sizes, "attention": attention, "dropout": dropout, "init": init, **ids}
        self.mechanisms = tuple(mechanisms)

        memory = 2 * encoder
        self.source_words = nn.Embedding(source_vocabulary, embedding)
        self.target_words = nn.Embedding(target_vocabulary, embedding)
        self.encoder = Reader(embedding, encoder, dropout)
        self.lower = nn.LSTMCell(embedding + memory, decoder)
        self.upper = nn.LSTMCell(decoder, decoder)
        self.query = nn.Linear(decoder, score, bias=False)  # W_q
        self.key = nn.Linear(memory, score, bias=False)  # W_k
        self.score = nn.Parameter(torch.empty(score))  # v
        self.output = nn.Linear(decoder + memory, decoder)
        self.generator = nn.Linear(decoder, target_vocabulary)
        variational = attention.startswith("variational")
        self.inference = InferenceNetwork(embedding, encoder, dropout) if variational else None
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -init, init)
        self.map = AttentionMap(mechanisms, Site(1, score, "cross", encoder_decoder=True))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    @property
    def random_outputs(self) -> bool:
        """Whether outputs are random in evaluation mode, too."""
        return self.attention == "variational-relaxed"

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """`bos_id`, and the labels moved by one, (batch, target); named as in Hugging Face's models."""
        return self._words.inputs(labels)

    # --- The recurrence ---

    def _read(self, embedded: Tensor, shown: Tensor, lengths: Tensor) -> Source:
        memory = self.encoder(embedded, lengths)
        return Source(memory, self.key(memory), shown, lengths.to(memory.device))

    def _start(self, source: Source) -> State:
        width = self.upper.hidden_size
        zeros = source.memory.new_zeros(source.memory.shape[0], width)
        return State(zeros, zeros, zeros, zeros, torch.zeros_like(source.memory[:, 0]))

    def _decode(self, words: Tensor, source: Source, rows: Rows, state: State) -> Decoded:
        """Run the decoder over words (batch, target), which make the next rows of the map."""
        lower, upper, embedding = self.lower, self.upper, self.target_words.embedding_dim
        embedded = self.target_words(words).transpose(0, 1)  # (target, batch, embedding)
        embedded = self._dropped(embedded.contiguous())
        # Everything that does not wait for the word before it is computed here, for all words at once.
        from_word, from_context = torch.split(lower.weight_ih, [embedding, source.memory.shape[-1]], 1)
        bias, upper_bias = lower.bias_ih + lower.bias_hh, upper.bias_ih + upper.bias_hh
        word_gates = F.linear(embedded, from_word, bias)  # (target, batch, 4·decoder)
        from_context, from_lower, from_upper = from_context.t(), lower.weight_hh.t(), upper.weight_hh.t()
        between = self._dropped(torch.ones_like(word_gates[..., : upper.hidden_size])).unbind()
        memory, keys, vector, to_query = source.memory, source.keys, self.score, self.query.weight.t()
        batch, length = keys.shape[:2]

        h0, c0, h1, c1, context = state
        steps: list[tuple[Tensor, ...]] = []
        for gates, kept in zip(word_gates.unbind(), between, strict=True):
            h0, c0 = _cell(torch.addmm(gates, context, from_context), h0 @ from_lower, c0)
            below = h0 * kept if self.training else h0
            h1, c1 = _cell(F.linear(below, upper.weight_ih, upper_bias), h1 @ from_upper, c1)
            scores = torch.tanh(keys + (h1 @ to_query).unsqueeze(1)) @ vector  # (batch, source)
            weights = rows.weights(scores.view(batch, 1, 1, length)).view(batch, 1, length)
            context = torch.bmm(weights.to(memory.dtype), memory).squeeze(1)  # (batch, 2·encoder)
            steps.append((h1, context, scores, weights.squeeze(1)))
        queries, contexts, all_scores, all_weights = (torch.stack(x, dim=1) for x in zip(*steps, strict=True))
        return Decoded(queries, contexts, all_scores, all_weights, State(h0, c0, h1, c1, context))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    # --- f(x), the distribution of the next word given one vector of the source ---

    def _halves(self, decoded: Decoded) -> tuple[Tensor, Tensor]:
        """The query's part of the output layer, (batch, target, 1, decoder), and the weights of x's part."""
        decoder = decoded.queries.shape[-1]
        from_query, from_x = torch.split(self.output.weight, [decoder, self.output.in_features - decoder], 1)
        return F.linear(decoded.queries, from_query, self.output.bias).unsqueeze(2), from_x

    def _log_f(self, halves: tuple[Tensor, Tensor], x: Tensor, labels: Tensor, kept: Tensor) -> Tensor:
        """log f(x) of the labels, (batch, target, x); 0 at padding.

        Args:
            halves: from `_halves`.
            x: (batch, target or 1, x, 2·encoder).
            labels: (batch, target).
            kept: (batch, target, 1, decoder), the dropout of the generator's input.
        """
        query_part, from_x = halves
        x_part = F.linear(x, from_x)  # (batch, target or 1, x, decoder)

        def chunk(query_part: Tensor, x_part: Tensor, labels: Tensor, kept: Tensor) -> Tensor:
            hidden = torch.tanh(query_part + x_part) * kept  # (batch, words, x, decoder)
            labels = labels.unsqueeze(-1).expand(hidden.shape[:-1])
            scores = self.generator(hidden).flatten(0, -2)  # (batch·words·x, target vocabulary)
            losses = F.cross_entropy(scores, labels.flatten(), ignore_index=IGNORED, reduction="none")
            return -losses.view(labels.shape)

        batch, target = labels.shape
        words = max(1, SCORES_AT_ONCE // (batch * x.shape[2] * self.generator.out_features))
        if words >= target:
            return chunk(query_part, x_part, labels, kept)
        x_part = x_part.expand(-1, target, -1, -1)
        parts = zip(
            *(torch.split(part, words, 1) for part in (query_part, x_part, labels, kept)), strict=True
        )
        # The only randomness is in `kept`, an argument.
        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return torch.cat([checkpoint(chunk, *part, **settings) for part in parts], dim=1)

    def _word_log_probs(self, decoded: Decoded, source: Source) -> Tensor:
        """Log-probabilities of all words under the rule for testing, (batch, target, target vocabulary)."""
        query_part, from_x = self._halves(decoded)
        latent = self.attention not in ("soft", "variational-relaxed")
        x = source.memory.unsqueeze(1) if latent else self._test_contexts(decoded, source).unsqueeze(2)
        log_p = log_softmax(decoded.scores, source.shown) if latent else torch.zeros_like(x[..., 0])
        x_part = F.linear(x, from_x)
        rows = query_part.shape[1] * x.shape[2] * self.generator.out_features
        parts = (torch.split(part, max(1, SCORES_AT_ONCE // rows)) for part in (query_part, x_part, log_p))
        mixtures = []
        for query_rows, x_rows, log_weights in zip(*parts, strict=True):
            log_f = self.generator(torch.tanh(query_rows + x_rows)).log_softmax(dim=-1)
            mixtures.append((log_f + log_weights.unsqueeze(-1)).logsumexp(dim=2))
        return torch.cat(mixtures)

    def _test_contexts(self, decoded: Decoded, source: Source) -> Tensor:
        """The context of soft attention, or one draw of the relaxed one, (batch, target, 2·encoder)."""
        if self.attention != "variational-relaxed":
            return decoded.contexts
        return draw_dirichlet(decoded.scores, source.shown) @ source.memory

    # --- The objectives ---

    def _losses(self, decoded: Decoded, source: Source, labels: Tensor, posterior: Tensor | None) -> Tensor:
        """The objective of each word in training, or its negative log-likelihood; (batch, target)."""
        halves = self._halves(decoded)
        kept = self._dropped(torch.ones_like(halves[0]))
        attention, shown = self.attention, source.shown

        def log_f(x: Tensor) -> Tensor:  # of one vector for each word, (batch, target, 2·encoder)
            return self._log_f(halves, x.unsqueeze(2), labels, kept).squeeze(2)

        if attention == "soft" or (attention == "variational-relaxed" and not self.training):
            return -log_f(self._test_contexts(decoded, source))
        if attention == "variational-relaxed" and posterior is None:  # Jensen's bound
            return -log_f(draw_dirichlet(decoded.scores, shown) @ source.memory)
        if attention == "variational-relaxed":
            assert posterior is not None
            drawn = draw_dirichlet(posterior, shown) @ source.memory
            return dirichlet_kl(posterior, decoded.scores, shown) - log_f(drawn)

        log_p = log_softmax(decoded.scores, shown)  # (batch, target, source)
        log_q = log_p if posterior is None else log_softmax(posterior, shown)
        kl = 0.0 if posterior is None else (log_q.exp() * (log_q - log_p)).sum(dim=-1)
        if attention.endswith("sampled") and self.training:
            place = self._choose(log_q.detach().exp()).unsqueeze(-1)  # (batch, target, 1)
            x = source.memory.gather(1, place.expand(-1, -1, source.memory.shape[-1]))
            with torch.no_grad():
                baseline = log_f(decoded.contexts)
            return kl - reinforce(log_f(x), log_q.gather(-1, place).squeeze(-1), baseline)
        every = self._log_f(halves, source.memory.unsqueeze(1), labels, kept)  # (batch, target, source)
        if attention == "marginal" or not self.training:
            return -(log_p + every).logsumexp(dim=-1)
        return kl - (log_q.exp() * every).sum(dim=-1)

    def _choose(self, probabilities: Tensor) -> Tensor:
        """One source position per word: (batch, target, source) → (batch, target)."""
        return choose(probabilities)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        examples: Tensor | None = None,
        chain: Chain | None = None,
        num_items_in_batch: int | Tensor | None = None,
        output_attentions: bool = False,
    ) -> dict[str, Tensor]:
        """Loss and log-probabilities of the labels; without labels, log-probabilities of all words.

        Padding is on the right, of the source and of the target.

        Args:
            input_ids: (batch, source).
            attention_mask: (batch, source), 0 at padding.
            decoder_input_ids: (batch, target): `bos_id`, and the labels moved by one.
            labels: (batch, target), −100 at padding.
            examples: (batch,), each example's number in the data set, which addresses its noise.
            chain: to request posterior samples, or to read the KL.
            num_items_in_batch: number of labels that the loss is divided by; those of this batch by default.
            output_attentions: whether to return the map and its entropy.

        Returns:
            loss: with labels. Each example's KL weighs as much as its labels.
            log_probs: (batch, target) with labels, 0 at padding: the negative of what the loss averages. In
                evaluation the log-probability of each label, in training the objective.
            logits: (batch, target, target vocabulary) without labels, log-probabilities.
            attentions: (batch, target, source) on request, the weights of the mean context.
            entropy: (batch, target) on request, of the prior attention, in nats; 0 at padding.
        """
        if decoder_input_ids is None:
            raise ValueError("decoder_input_ids must hold bos_id and the target's words, got None")
        if self.jensen and self.attention != "variational-relaxed":
            raise ValueError(f'jensen needs attention="variational-relaxed", got {self.attention!r}')
        shown, lengths, target_lengths = self._checked(input_ids, attention_mask, decoder_input_ids, labels)
        if chain is None:
            chain = Chain(step=self.step, examples=0 if examples is None else examples)
        embedded = self._dropped(self.source_words(input_ids))  # (batch, source, embedding)
        source = self._read(embedded, shown, lengths)
        real = None if labels is None else labels != IGNORED  # (batch, target)
        seen = Seen(shown, real)
        rows = self.map.rows(source.keys.unsqueeze(1), decoder_input_ids.shape[1], chain, seen)
        decoded = self._decode(decoder_input_ids, source, rows, self._start(source))
        rows.finish()

        output: dict[str, Tensor] = {}
        if labels is None or real is None:
            output["logits"] = self._word_log_probs(decoded, source)
        else:
            posterior = None
            if self.inference is not None and self.training and not self.jensen:
                target = self._dropped(self.target_words(labels.clamp(min=0)))  # the posterior sees y_j
                posterior = self.inference(embedded, target, (lengths, target_lengths))
            losses = self._losses(decoded, source, labels, posterior).masked_fill(~real, 0.0)
            output["log_probs"] = -losses
            output["loss"], self.overt_losses = loss_of_words(
                losses, real, chain, self.training, num_items_in_batch
            )
        if output_attentions:
            log_p = log_softmax(decoded.scores, shown)
            entropy = -(log_p.exp() * log_p).sum(dim=-1)
            output["attentions"] = decoded.weights
            output["entropy"] = entropy if real is None else entropy.masked_fill(~real, 0.0)
        return output

    def _checked(
        self, source: Tensor, mask: Tensor | None, target: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Refuse bad input; which source tokens are real, and lengths of source and target on the CPU."""
        if source.dim() != 2 or source.shape[1] == 0:
            raise ValueError(f"input_ids must have shape (batch, source), got {tuple(source.shape)}")
        mask = torch.ones_like(source) if mask is None else mask
        others = {"attention_mask": (mask, source.shape)}
        if target is not None:
            rows = torch.Size([source.shape[0], target.shape[-1]])
            others["decoder_input_ids"] = target, rows
            if rows[1] == 0:
                raise ValueError(f"decoder_input_ids must hold bos_id at least, got {tuple(target.shape)}")
            if labels is not None:
                others["labels"] = labels, rows
        for name, (tensor, shape) in others.items():
            if tensor.shape != shape:
                raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
        shown = mask != 0
        ids = {"input_ids": (source, self.source_words.num_embeddings)}
        words = self.target_words.num_embeddings
        ids |= {} if target is None else {"decoder_input_ids": (target, words)}
        real = shown[:, :1] if labels is None else labels != IGNORED
        if labels is not None:
            ids["labels"] = labels.masked_fill(~real, 0), words
        found = check_words(ids, {"attention_mask": shown, "labels": real})
        lengths, target_lengths = found["attention_mask"], found["labels"]
        if int(lengths.min()) == 0:
            raise ValueError(f"example {int(lengths.argmin())} has no source word: attention_mask hides all")
        return shown, lengths, target_lengths.clamp(min=1)

    # --- Translation ---

    @torch.no_grad()
    def translate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        beam: int = 10,
        length_penalty: float = 1.0,
        max_length: int = 100,
        preset: Literal["official"] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The best translation by beam search, (batch, longest), with `eos_id` and then `pad_id` at the end.

        All hypotheses of all sentences advance together. A hypothesis of n words, `eos_id` among them, has
        the score log-probability / ((5 + n) / 6)^length_penalty. The search of a sentence ends when as many
        hypotheses as the beam is wide have ended.

        Args:
            input_ids: (batch, source).
            attention_mask: (batch, source), 0 at padding.
            beam: hypotheses per sentence; 1 takes the likeliest word each time.
            length_penalty: see above.
            max_length: of a translation; its last word is `eos_id`.
            preset: "official" adds what the released command has and the paper does not mention: to end a
                hypothesis costs 3·|source| / (length + 1). As there, lengths include `bos_id`.

        Returns:
            translations: (batch, longest).
            scores: (batch,).
        """
        _check.whole("beam", beam, 1)
        _check.whole("max_length", max_length, 1)
        _check.finite("length_penalty", length_penalty)
        _check.one_of("preset", preset, (None, "official"))
        with evaluating(self):
            return self._search(input_ids, attention_mask, beam, length_penalty, max_length, preset)

    def _search(
        self, ids: Tensor, mask: Tensor | None, beam: int, penalty: float, longest: int, preset: str | None
    ) -> tuple[Tensor, Tensor]:
        shown, lengths, _ = self._checked(ids, mask, None, None)
        source = self._read(self.source_words(ids), shown, lengths)
        source = Source(*(x.repeat_interleave(beam, dim=0) for x in source))  # (batch·beam, …)
        state, chain, length = self._start(source), Chain(step=self.step, keep=True), 0

        def advance(words: Tensor, order: Tensor | None) -> Tensor:
            nonlocal state, length
            if order is not None:
                state = State(*(x[order] for x in state))
                reorder(chain, order)
            rows = self.map.rows(source.keys.unsqueeze(1), 1, chain, Seen(source.shown))
            decoded = self._decode(words, source, rows, state)
            state, length = decoded.state, length + 1
            log_probs = self._word_log_probs(decoded, source).squeeze(1)
            if preset == "official":
                log_probs[:, self.eos_id] -= EOS_NORM * source.lengths / (length + 1)
            return log_probs

        never = self._words.never(ids.new_empty(0))
        counted = 1 if preset == "official" else 0
        return beam_search(advance, len(ids), beam, self._words, never, longest, penalty, counted)

    # --- Files ---

    def save(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors`, completely or not at all."""
        mechanisms = [as_dict(mechanism) for mechanism in self.mechanisms]
        save_network(self, folder, MODEL_TYPE, {**self.settings, "mechanisms": mechanisms})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The model that `save` wrote, in evaluation mode on the CPU."""
        return load_network(cls, folder, MODEL_TYPE, ("source_vocabulary", "target_vocabulary"))


def _cell(from_input: Tensor, from_hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """The next hidden state and cell of an LSTM, whose gates are the sum of two parts, (batch, 4·width)."""
    if from_input.is_cuda:  # the kernel of nn.LSTMCell, which would multiply the input once more
        cell = cell.to(from_input.dtype)  # the start is float32, whatever autocast makes of the gates
        hidden, cell, _ = torch.ops.aten._thnn_fused_lstm_cell(from_input, from_hidden, cell)
        return hidden, cell
    into, forget, new, out = (from_input + from_hidden).chunk(4, dim=1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(into) * torch.tanh(new)
    return torch.sigmoid(out) * torch.tanh(cell), cell


def draw_dirichlet(scores: Tensor, shown: Tensor) -> Tensor:
    """Weights from a Dirichlet distribution with α = exp(scores) over shown positions, differentiable.

    A Gamma(α) variable is one of Gamma(α + 1) times U^(1/α); with its logarithm, small α do not underflow.
    """
    alpha = _alpha(scores)
    uniform = torch.rand_like(alpha).clamp(min=torch.finfo(alpha.dtype).tiny)
    log_gamma = torch.distributions.Gamma(alpha + 1.0, 1.0).rsample().log() + uniform.log() / alpha
    return log_softmax(log_gamma, shown).exp().to(scores.dtype)


def dirichlet_kl(posterior: Tensor, prior: Tensor, shown: Tensor) -> Tensor:
    """KL(Dirichlet(exp(posterior)) ‖ Dirichlet(exp(prior))) over shown positions, (batch, target)."""
    hidden = ~shown.unsqueeze(1)
    a, b = (_alpha(scores).masked_fill(hidden, 1.0) for scores in (posterior, prior))
    a_sum, b_sum = (x.masked_fill(hidden, 0.0).sum(dim=-1, keepdim=True) for x in (a, b))
    cells = torch.lgamma(b) - torch.lgamma(a) + (a - b) * (torch.digamma(a) - torch.digamma(a_sum))
    return cells.masked_fill(hidden, 0.0).sum(dim=-1) + (torch.lgamma(a_sum) - torch.lgamma(b_sum)).squeeze(
        -1
    )


def _alpha(scores: Tensor) -> Tensor:
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores.clamp(LEAST_LOG_ALPHA, MOST_LOG_ALPHA).exp()
