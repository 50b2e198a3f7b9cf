"""The network of Abnar & Zuidema 2020, section 2: six GPT-2 blocks without masking, read at a CLS token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt.mechanisms.chain import Chain
from overt.mechanisms.losses import Losses
from overt.mechanisms.mechanism import Mechanism
from overt.models.transformer import Encoder


class AgreementClassifier(nn.Module):
    """Predicts a verb's number from the words before it, from the first token's last hidden state.

    Its call signature is the one the Hugging Face Trainer uses. In training mode the KL of random weights is
    added to the loss. `step` is a buffer, saved with the weights; a training loop must set it before each
    step (`model.step.fill_(t)`), or every step draws the same noise.

    Args:
        vocabulary: number of token ids.
        mechanisms: added to every attention.
        layers: number of blocks.
        heads: attention heads per layer.
        width: of embeddings and hidden states.
        max_length: longest input.
        classes: number of answers.
        dropout: on embeddings, weights and block outputs.
        attention_dropout: on weights, if it differs from `dropout`.
        embedding_dropout: on embeddings, if it differs from `dropout`.
    """

    step: Tensor
    overt_losses: Losses | None = None  # of the last forward pass with labels, for `overt.losses`

    def __init__(
        self,
        vocabulary: int,
        mechanisms: Sequence[Mechanism] = (),
        layers: int = 6,
        heads: int = 8,
        width: int = 128,
        max_length: int = 32,
        classes: int = 2,
        dropout: float = 0.1,
        attention_dropout: float | None = None,
        embedding_dropout: float | None = None,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_length, width)
        self.dropout = nn.Dropout(dropout if embedding_dropout is None else embedding_dropout)
        self.encoder = Encoder(
            width, heads, layers, mechanisms, dropout=dropout, attention_dropout=attention_dropout
        )
        self.classifier = nn.Linear(width, classes)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor | None = None,
        examples: Tensor | None = None,
        chain: Chain | None = None,
    ) -> dict[str, Tensor]:
        """Logits (batch, classes) and, where labels are given, the loss.

        Args:
            input_ids: (batch, sequence), the CLS token first.
            attention_mask: (batch, sequence), 0 at padding.
            labels: (batch,).
            examples: (batch,), each example's number in the data set, which addresses its noise.
            chain: to request posterior samples, or to read the KL.
        """
        longest = self.positions.num_embeddings
        if input_ids.shape[1] > longest:
            got = input_ids.shape[1]
            raise ValueError(f"input_ids may be at most {longest} tokens long (max_length), got {got}")
        if chain is None:
            chain = Chain(step=self.step, examples=0 if examples is None else examples)
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.tokens(input_ids) + self.positions(places))
        hidden = self.encoder(x, attention_mask == 0, chain)
        output = {"logits": self.classifier(hidden[:, 0])}
        if labels is not None:
            loss = F.cross_entropy(output["logits"], labels)
            output["loss"] = loss + chain.penalty() if self.training else loss
            kl = chain.kl().detach() if chain.has_loss else None
            self.overt_losses = Losses(loss.detach(), kl, chain.weight(), labels.shape[0])
        return output
