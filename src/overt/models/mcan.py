"""MCAN (Yu et al. 2019): the network of Bayesian Attention Modules' Tables 2 and 7, which answers questions.

A question's words are read by an LSTM and by layers of self-attention (the encoder); the regions of an image
pass through layers of self-attention and of guided attention, whose keys are the words (the decoder). Each
side is then averaged by a last, learned attention (`Flatten`), and the sum of the two is classified:

    logits = answers(norm(flatten(words) + flatten(regions)))

Several answers may be right, so that each one has its own probability, sigmoid(logit).

The authors' code takes rows of zeros for padding. Here masks are given, since noise would make padding
visible: `feature_noise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt import _check
from overt.mechanisms import noise
from overt.mechanisms.attention import MultiheadAttention
from overt.mechanisms.chain import Chain
from overt.mechanisms.losses import Losses
from overt.mechanisms.maps import softmax
from overt.mechanisms.mechanism import Mechanism, as_dict
from overt.mechanisms.site import KINDS, Kind
from overt.models.folders import checked_names, load_network, save_network
from overt.models.multi_label import REDUCTIONS, Reduction, multi_label_loss

MODEL_TYPE = "overt-mcan"
NoiseWay = Literal["image", "published"]
NOISE_WAYS: tuple[NoiseWay, ...] = get_args(NoiseWay)
# Arguments of `MCAN` for the published sizes. With 3129 answers and features of 2048 they have 51,640,891 and
# 195,551,291 parameters without word vectors.
SIZES = {"small": {"width": 512, "heads": 8}, "large": {"width": 1024, "heads": 16}}
# Of a grid's vectors at the start, as much as regions hold. With 0.1, "left of" was learned far later.
PLACES = 0.5
AT_ONCE = 512  # images whose features are summed at once
NOISE_KIND = len(KINDS)  # of noise on features, in the address of the noise: no attention is of this kind


class LayerNorm(nn.Module):
    """MCAN's: (x − mean) / (std + eps), with the unbiased standard deviation; torch's has √(variance + eps).

    At least float32 inside. The result has the precision of the parameters. In float32 it is torch's,
    rescaled, which takes one operation rather than nine: it divides by √(std² + eps²), off by eps / std.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor, rescaled: Tensor | None = None) -> Tensor:
        """(…, width) → the same; `rescaled` is the weight as `rescaled_weights` has it, (width,)."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if wide.dtype == torch.float32 and (width := x.shape[-1]) > 1:
            unbiased = (width - 1) / width
            weight = self.weight.to(wide.dtype) * unbiased**0.5 if rescaled is None else rescaled
            scaled = F.layer_norm(
                wide, (width,), weight.to(wide.dtype), self.bias.to(wide.dtype), unbiased * self.eps**2
            )
            return scaled.to(self.weight.dtype)
        variance, mean = torch.var_mean(wide, dim=-1, keepdim=True)
        # A row of equal values has no spread: its root would have an infinite slope, and NaN as its gradient.
        spread = variance.clamp(min=torch.finfo(wide.dtype).tiny).sqrt()
        return (self.weight * ((wide - mean) / (spread + self.eps)) + self.bias).to(self.weight.dtype)


def rescaled_weights(norms: Sequence[LayerNorm]) -> dict[LayerNorm, Tensor]:
    """Weights (width,) of norms of one width as torch's norm needs them, all by one product.

    On a GPU, starting a product for each of them would take longer than the products themselves.
    """
    weights = torch.stack([norm.weight for norm in norms])
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    width = weights.shape[-1]
    return dict(zip(norms, (weights * ((width - 1) / width) ** 0.5).unbind(), strict=True))


class Layer(nn.Module):
    """Self-attention, guided attention in the decoder, and a feed-forward network; a norm after each."""

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        dropout: float,
        mechanisms: Sequence[Mechanism],
        place: tuple[int, int, bool],
    ) -> None:
        super().__init__()
        number, layers, guided = place

        def attention(kind: Kind, layer: int, start: bool) -> MultiheadAttention:
            made = MultiheadAttention(
                width,
                heads,
                dropout,
                batch_first=True,
                mechanisms=mechanisms,
                kind=kind,
                layer=layer,
                encoder_decoder=True,
                start=start,
            )
            bound = width**-0.5  # as in MCAN, whose projections are four nn.Linear
            for parameter in (made.in_proj_weight, made.in_proj_bias, made.out_proj.bias):
                if parameter is not None:
                    nn.init.uniform_(parameter, -bound, bound)
            return made

        # Words and regions are in the chain of one kind, and so numbered on: their noise differs.
        own = layers + number if guided else number
        self.attention = attention("encoder", own, number == 0)
        self.norm = LayerNorm(width)
        self.guided_attention = attention("cross", number, False) if guided else None
        self.guided_norm = LayerNorm(width) if guided else None
        self.inner = nn.Linear(width, hidden)
        self.outer = nn.Linear(hidden, width)
        self.mlp_norm = LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def norms(self) -> list[LayerNorm]:
        """Its norms, all of one width."""
        guided = [] if self.guided_norm is None else [self.guided_norm]
        return [self.norm, *guided, self.mlp_norm]

    def forward(
        self,
        x: Tensor,
        padding: Tensor | None,
        chain: Chain,
        rescaled: Mapping[LayerNorm, Tensor],
        words: Tensor | None = None,
        word_padding: Tensor | None = None,
    ) -> Tensor:
        """(batch, sequence, width) → the same; `padding` is boolean (batch, sequence), True at padding.

        None where there is no padding. `rescaled` holds the weights of its norms (`rescaled_weights`).
        """
        mixed, _ = self.attention(x, x, x, padding, need_weights=False, chain=chain)
        x = self.norm(x + self.dropout(mixed), rescaled[self.norm])
        if self.guided_attention is not None and self.guided_norm is not None:
            assert words is not None
            mixed, _ = self.guided_attention(
                x, words, words, word_padding, need_weights=False, query_padding_mask=padding, chain=chain
            )
            x = self.guided_norm(x + self.dropout(mixed), rescaled[self.guided_norm])
        hidden = self.dropout(F.relu(self.inner(x)))
        x = x + self.dropout(self.outer(hidden))
        return self.mlp_norm(x, rescaled[self.mlp_norm])  # type: ignore[no-any-return]


class Flatten(nn.Module):
    """MCAN's AttFlat: the average of a sequence under learned weights, projected."""

    def __init__(self, width: int, hidden: int, out: int, dropout: float) -> None:
        super().__init__()
        self.inner, self.score = nn.Linear(width, hidden), nn.Linear(hidden, 1)
        self.dropout = nn.Dropout(dropout)
        self.merge = nn.Linear(width, out)

    def forward(self, x: Tensor, mask: Tensor | None, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """(batch, sequence, width) → (batch, out), and the weights, (batch, sequence), zeros at padding.

        `mask` is boolean (batch, sequence), False at padding, and `padding` its opposite; None without any.
        """
        scores = self.score(self.dropout(F.relu(self.inner(x)))).squeeze(-1)
        if mask is None:
            weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        else:
            weights = softmax(scores, mask, hidden=padding)
        return self.merge((weights.to(x.dtype).unsqueeze(1) @ x).squeeze(1)), weights


class MCAN(nn.Module):
    """Answers questions about images; sizes of its defaults are the paper's (MCAN-small).

    Its call signature is the one the Hugging Face Trainer uses. In training mode the KL of random weights is
    added to the loss. `step` is a buffer, saved with the weights; a training loop must set it before each
    step (`model.step.fill_(t)`), or every step draws the same noise.

    Predictive samples, with dropout on as published:

        overt.posterior(model, inputs, dropout=True, problem_type="sigmoid")

    Args:
        words: number of word ids of questions.
        answers: number of answers.
        mechanisms: added to every attention.
        features: width of the regions.
        width: of hidden states.
        heads: attention heads per layer.
        layers: of the encoder, and of the decoder.
        hidden: width of the feed-forward layers, 4·width by default.
        fused: width of the two sides' sum, 2·width by default.
        flat: hidden width of the two last attentions.
        embedding: width of word vectors.
        dropout: on attention weights, on each block's output and inside feed-forward layers.
        grid: (rows, columns) of the regions, if they are the cells of a grid, row by row: each gets learned
            vectors of its row and its column. None, as published, knows nothing of places.
        reduction: of the loss, which is always summed over answers: "sum" over the batch, as published, or
            "mean". The KL is a mean over the batch. With "mean", the published weight of the KL is
            kl_weight = 1 / batch.

    Attributes:
        word_names: of each word id, for `save`; None if they are not known.
        answer_names: of each answer, likewise.
    """

    step: Tensor
    overt_losses: Losses | None = None  # of the last forward pass with labels, for `overt.losses`
    word_names: list[str] | None = None
    answer_names: list[str] | None = None

    def __init__(
        self,
        words: int,
        answers: int,
        mechanisms: Sequence[Mechanism] = (),
        features: int = 2048,
        width: int = 512,
        heads: int = 8,
        layers: int = 6,
        hidden: int | None = None,
        fused: int | None = None,
        flat: int = 512,
        embedding: int = 300,
        dropout: float = 0.1,
        grid: Sequence[int] | None = None,
        reduction: Reduction = "sum",
    ) -> None:
        super().__init__()
        sizes = {"words": words, "answers": answers, "features": features, "width": width, "heads": heads}
        sizes |= {"layers": layers, "flat": flat, "embedding": embedding}
        for name, value in sizes.items():
            _check.whole(name, value, 1)
        sizes["hidden"] = 4 * width if hidden is None else hidden
        sizes["fused"] = 2 * width if fused is None else fused
        for name in ("hidden", "fused"):
            _check.whole(name, sizes[name], 1)
        if width % heads:
            raise ValueError(f"heads must divide width ({width}), got {heads}")
        _check.fraction("dropout", dropout)
        _check.one_of("reduction", reduction, REDUCTIONS)
        if grid is not None:
            if not isinstance(grid, list | tuple) or len(grid) != 2:
                raise ValueError(f"grid must be numbers of rows and columns, such as (8, 8), got {grid!r}")
            for count in grid:
                _check.whole("grid", count, 1)
        self.grid = None if grid is None else (int(grid[0]), int(grid[1]))
        self.reduction: Reduction = reduction
        places = None if self.grid is None else list(self.grid)
        self.settings = {**sizes, "dropout": dropout, "grid": places, "reduction": reduction}
        self.mechanisms = tuple(mechanisms)

        self.words = nn.Embedding(words, embedding)
        self.lstm = nn.LSTM(embedding, width, batch_first=True)
        self.regions = nn.Linear(features, width)
        self.rows = nn.Embedding(self.grid[0], width) if self.grid is not None else None
        self.columns = nn.Embedding(self.grid[1], width) if self.grid is not None else None
        for places_of in (self.rows, self.columns):
            if places_of is not None:
                nn.init.normal_(places_of.weight, std=PLACES)
        shape = width, heads, sizes["hidden"], dropout, mechanisms
        self.encoder = nn.ModuleList(Layer(*shape, (number, layers, False)) for number in range(layers))
        self.decoder = nn.ModuleList(Layer(*shape, (number, layers, True)) for number in range(layers))
        self.flat_words = Flatten(width, flat, sizes["fused"], dropout)
        self.flat_regions = Flatten(width, flat, sizes["fused"], dropout)
        self.norm = LayerNorm(sizes["fused"])
        self.answers = nn.Linear(sizes["fused"], answers)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(
        self,
        words: Tensor,
        word_mask: Tensor,
        regions: Tensor,
        region_mask: Tensor | None = None,
        labels: Tensor | None = None,
        examples: Tensor | None = None,
        chain: Chain | None = None,
        check: bool = True,
    ) -> dict[str, Tensor]:
        """Logits, the weights of the last attentions and, where labels are given, the loss.

        What is hidden by a mask has no influence, whatever it holds.

        Args:
            words: (batch, length), ids of a question's words.
            word_mask: boolean (batch, length), True at words, False at padding, which is on the right.
            regions: (batch, regions, features).
            region_mask: boolean (batch, regions), True at regions, False at padding; None without any.
            labels: (batch, answers), how right each answer is, from 0 to 1.
            examples: (batch,), each example's number in the data set, which addresses its noise.
            chain: to request posterior samples, or to read the KL.
            check: whether to check what the inputs hold, for which a GPU must be waited for; `check_values`
                does it beforehand. Shapes are always checked.

        Returns:
            logits: (batch, answers); an answer's probability is the sigmoid of its logit.
            word_weights: (batch, length), of each word in the sum that is classified.
            region_weights: (batch, regions), of each region.
            loss: with labels.
        """
        self._check_shapes(words, word_mask, regions, region_mask, labels)
        if check and not torch.compiler.is_compiling():
            self.check_values(words, word_mask, region_mask, labels)
        if chain is None:
            chain = Chain(step=self.step, examples=0 if examples is None else examples)
        no_word, no_region = ~word_mask, None if region_mask is None else ~region_mask
        x, _ = self.lstm(self.words(words.masked_fill(no_word, 0)))
        y = regions if no_region is None else regions.masked_fill(no_region.unsqueeze(-1), 0.0)
        y = self.regions(y.to(self.regions.weight.dtype))
        if self.rows is not None and self.columns is not None:
            places = self.rows.weight.unsqueeze(1) + self.columns.weight  # (rows, columns, width)
            y = y + places.flatten(0, 1)
        norms = [norm for layer in (*self.encoder, *self.decoder) for norm in layer.norms()]
        rescaled = rescaled_weights(norms)
        for layer in self.encoder:
            x = layer(x, no_word, chain, rescaled)
        for layer in self.decoder:
            y = layer(y, no_region, chain, rescaled, x, no_word)
        from_words, word_weights = self.flat_words(x, word_mask, no_word)
        from_regions, region_weights = self.flat_regions(y, region_mask, no_region)
        logits = self.answers(self.norm(from_words + from_regions))
        output = {"logits": logits, "word_weights": word_weights, "region_weights": region_weights}
        if labels is not None:
            loss = multi_label_loss(logits, labels, self.reduction)
            output["loss"] = loss + chain.penalty() if self.training else loss
            kl = chain.kl().detach() if chain.has_loss else None
            self.overt_losses = Losses(loss.detach(), kl, chain.weight(), labels.shape[0])
        return output

    def _check_shapes(
        self,
        words: Tensor,
        word_mask: Tensor,
        regions: Tensor,
        region_mask: Tensor | None,
        labels: Tensor | None,
    ) -> None:
        """Refuse inputs of wrong shapes."""
        if words.dim() != 2 or words.is_floating_point():
            got = f"{tuple(words.shape)} of {words.dtype}"
            raise ValueError(f"words must be ids of shape (batch, length), got {got}")
        batch, width = words.shape[0], self.regions.in_features
        if regions.dim() != 3 or regions.shape[0] != batch:
            shape = f"({batch}, regions, {width})"
            raise ValueError(f"regions must have shape {shape}, got {tuple(regions.shape)}")
        if regions.shape[-1] != width:
            raise ValueError(f"regions must be {width} wide (features), got {regions.shape[-1]}")
        if self.grid is not None and regions.shape[1] != math.prod(self.grid):
            wanted = f"{self.grid[0]}·{self.grid[1]} regions (grid)"
            raise ValueError(f"an image must have {wanted}, got {regions.shape[1]}")
        masks = {"word_mask": (word_mask, words.shape)}
        if region_mask is not None:
            masks["region_mask"] = region_mask, regions.shape[:2]
        for name, (mask, size) in masks.items():
            if mask.dtype != torch.bool:
                raise TypeError(f"{name} must be boolean, False at padding, got {mask.dtype}")
            if mask.shape != size:
                raise ValueError(f"{name} must have shape {tuple(size)}, got {tuple(mask.shape)}")
        answers = batch, self.answers.out_features
        if labels is not None and labels.shape != answers:
            raise ValueError(f"labels must have shape {answers}, got {tuple(labels.shape)}")
        if 0 in (batch, words.shape[1], regions.shape[1]):
            got = f"{tuple(words.shape)} and {tuple(regions.shape)}"
            raise ValueError(f"words and regions must hold at least one of each, got {got}")

    def check_values(
        self, words: Tensor, word_mask: Tensor, region_mask: Tensor | None, labels: Tensor | None
    ) -> None:
        """Refuse inputs that hold what they must not; shaped as for `forward`."""
        # One transfer from the device for all that must be known here.
        hole = (word_mask[:, 1:] & ~word_mask[:, :-1]).any()
        regions = word_mask if region_mask is None else region_mask
        counts = [count for mask in (word_mask, regions) for count in mask.sum(dim=1).min(dim=0)]
        facts = [*words.masked_fill(~word_mask, 0).aminmax(), *counts, hole]
        facts += [] if labels is None else list(labels.aminmax())
        numbers = torch.stack([fact.to(torch.float32) for fact in facts]).tolist()
        least, most, fewest_words, at_words, fewest_regions, at_regions, holes, *right = numbers
        if least < 0 or most >= self.words.num_embeddings:
            last, wrong = self.words.num_embeddings - 1, int(least if least < 0 else most)
            raise ValueError(f"words must hold ids from 0 to {last}, got {wrong}")
        if fewest_words == 0:
            raise ValueError(f"the question of example {int(at_words)} is empty: word_mask hides all")
        if fewest_regions == 0:
            raise ValueError(f"the image of example {int(at_regions)} is empty: region_mask hides all")
        if holes:
            raise ValueError("word_mask must have its padding on the right")
        if right and not 0.0 <= right[0] <= right[1] <= 1.0:
            raise ValueError(f"labels must lie in [0, 1], got {right[0]:g} to {right[1]:g}")

    # --- Files ---

    def save(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors`, completely or not at all."""
        names = {
            "word_names": checked_names("word_names", self.word_names, self.words.num_embeddings),
            "answer_names": checked_names("answer_names", self.answer_names, self.answers.out_features),
        }
        mechanisms = [as_dict(mechanism) for mechanism in self.mechanisms]
        save_network(self, folder, MODEL_TYPE, {**self.settings, **names, "mechanisms": mechanisms})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The model that `save` wrote, in evaluation mode on the CPU.

        A mechanism that is not Overt's own must be registered before.
        """
        names = {
            "word_names": lambda model: model.words.num_embeddings,
            "answer_names": lambda model: model.answers.out_features,
        }
        return load_network(cls, folder, MODEL_TYPE, ("words", "answers", "features", "mechanisms"), names)


def feature_deviation(regions: Tensor, region_mask: Tensor, images: Tensor | None = None) -> float:
    """Standard deviation of all values of all regions, without padding: the unit of `feature_noise`.

    In float64, a few images at a time, as the features of all may fill the memory.

    Args:
        regions: (images, regions, features).
        region_mask: boolean (images, regions), False at padding.
        images: (chosen,), numbers of the images that count; None for all.
    """
    _check_regions(regions, region_mask)
    if images is None:
        images = torch.arange(len(regions), device=regions.device)
    parts = torch.split(images, AT_ONCE)
    count = int(region_mask[images].sum()) * regions.shape[-1]
    if count < 2:
        raise ValueError(f"a standard deviation needs two values or more, got {count}")

    def total(of: Callable[[Tensor], Tensor]) -> Tensor:
        values = (regions[part][region_mask[part]].double() for part in parts)
        return torch.stack([of(each).sum() for each in values]).sum()

    mean = total(lambda values: values) / count
    return float((total(lambda values: (values - mean).square()) / count).sqrt())


def feature_noise(
    regions: Tensor,
    region_mask: Tensor,
    strength: float,
    *,
    deviation: float,
    images: Tensor,
    seed: int = 0,
    step: int = 0,
    way: NoiseWay = "image",
) -> Tensor:
    """Regions with Gaussian noise of standard deviation strength·deviation, (batch, regions, features).

    Noise depends on its address alone, so that every model sees the same. It never makes padding visible:
    masks do not change, and must be given to the model.

    Args:
        regions: (batch, regions, features).
        region_mask: boolean (batch, regions), False at padding.
        strength: in units of `deviation`; 0 adds nothing.
        deviation: of the features (`feature_deviation`); 1 for a strength in their own units.
        images: (batch,), each image's number in the data set.
        seed: of the noise.
        step: number of the batch or training step; other steps draw other noise.
        way: "image" draws noise for each image, and adds it to regions alone. "published" is what the later
            code of the authors does: one tensor is added to every image of the batch, padding included. There
            the padding, no longer zero, was then seen: a `region_mask` of True everywhere does the same here.
    """
    _check_regions(regions, region_mask)
    _check.finite("strength", strength)
    _check.positive("deviation", deviation)
    _check.whole("step", step, 0)
    _check.one_of("way", way, NOISE_WAYS)
    if strength < 0.0:
        raise ValueError(f"strength must be at least 0, got {strength}")
    if images.shape != regions.shape[:1] or images.is_floating_point():
        got = f"{tuple(images.shape)} of {images.dtype}"
        raise ValueError(f"images must number the {regions.shape[0]} images of the batch, got {got}")
    if strength == 0.0:
        return regions
    address = Chain(step=step, seed=seed)
    assert address.step is not None
    zero = torch.zeros((), dtype=torch.int64)
    key = noise.stream(address.seed, address.step, 0, zero, NOISE_KIND).to(regions.device)
    numbers = images if way == "image" else images.new_zeros(1)
    numbers = numbers.to(device=regions.device, dtype=torch.int64)
    unit = noise.uniform(key, numbers, 1, *regions.shape[1:]).squeeze(1)
    added = torch.erfinv(2.0 * unit - 1.0) * (math.sqrt(2.0) * strength * deviation)
    if way == "image":
        added = added.masked_fill(~region_mask.unsqueeze(-1), 0.0)
    return regions + added.to(regions.dtype)


def _check_regions(regions: Tensor, region_mask: Tensor) -> None:
    if regions.dim() != 3 or not regions.is_floating_point():
        got = f"{tuple(regions.shape)} of {regions.dtype}"
        raise ValueError(f"regions must be numbers of shape (batch, regions, features), got {got}")
    if region_mask.dtype != torch.bool or region_mask.shape != regions.shape[:2]:
        wanted, got = tuple(regions.shape[:2]), f"{tuple(region_mask.shape)} of {region_mask.dtype}"
        raise ValueError(f"region_mask must be boolean of shape {wanted}, got {got}")
