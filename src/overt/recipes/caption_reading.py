"""Write a caption of a picture with a trained network, and read what each word drew on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from overt import _check
from overt.mechanisms.bayesian.layer import BayesianLayer
from overt.mechanisms.bayesian.naive import prior_of
from overt.mechanisms.chain import Chain
from overt.models.att2in import Att2in
from overt.recipes.caption_training import CaptionModel
from overt.view.captions import END, RARE, CaptionMaps, Draw

OTHERS = 5  # likeliest words that are told at each place
SAMPLES = 20


@torch.no_grad()
def read_caption(
    model: CaptionModel,
    pixels: Tensor,
    beam: int = 1,
    samples: int = SAMPLES,
    size: tuple[int, int] | None = None,
) -> CaptionMaps:
    """The caption of a picture by beam search with the mean of random weights, and how draws vary it.

    Weights and probabilities of draws are those of the same words; each draw also writes a caption itself. A
    word outside the vocabulary is never written, but is among the likeliest, as `RARE`, where the network
    expects one: without it, the probabilities of the others would not tell how likely they are. A caption of
    the longest length whose next word is likelier than its end has not ended: the search has cut it.

    Args:
        model: of `caption_training.load`, wherever it is.
        pixels: uint8 (3, side, side).
        beam: hypotheses; 1 takes the likeliest word each time.
        samples: number of draws, for a network with random weights.
        size: height and width of the picture in its file; by default those of `pixels`.
    """
    _check.whole("samples", samples, 1)
    net, vocabulary = model.net, model.vocabulary
    device = net.step.device
    regions = model.regions(pixels.to(device)).to(device)
    search = {"beam": beam, "max_length": model.length + 1, "never": [vocabulary.unknown]}

    def written(sample: int | None) -> list[int]:
        found, _ = net.caption(regions, sample=sample, **search)  # type: ignore[arg-type]
        ids: list[int] = found[0].tolist()
        return ids[: ids.index(net.eos_id) + 1]

    ids = written(None)
    sees, random = net.attention != "none", is_random(net)
    inputs = torch.tensor([[net.bos_id, *ids[:-1]]], device=device)
    plain = net(regions, decoder_input_ids=inputs, output_attentions=sees)
    log_p = plain["logits"][0]  # (words, vocabulary)

    def has_ended(caption: Sequence[int], log_p: Tensor) -> bool:
        if len(caption) <= model.length:
            return True
        could = log_p[-1].clone()  # here the search leaves nothing but the end
        could[vocabulary.unknown] = -math.inf
        return int(could.argmax()) == net.eos_id

    def drawn_caption(sample: int) -> tuple[str, bool]:
        """The caption of a draw, and whether it has ended."""
        own, chain = written(sample), Chain(step=net.step, sample=sample)
        before = torch.tensor([[net.bos_id, *own[:-1]]], device=device)
        read = net(regions, decoder_input_ids=before, chain=chain)
        return vocabulary.decode(own), has_ended(own, read["logits"][0])

    ended = has_ended(ids, log_p)
    if not ended:
        ids, inputs, log_p = ids[:-1], inputs[:, :-1], log_p[:-1]
    probabilities = log_p.exp().cpu()
    spread, drawn, draws = None, None, list[Draw]()
    if random:
        # All draws of one picture in one pass: its noise is that of example 0.
        chain = Chain(
            step=net.step,
            sample=torch.arange(samples, device=device),
            examples=torch.zeros(samples, dtype=torch.int64, device=device),
        )
        many = net(
            regions.expand(samples, -1, -1),
            decoder_input_ids=inputs.expand(samples, -1),
            chain=chain,
            output_attentions=True,
        )
        spread = many["attentions"].std(dim=0, correction=0).cpu()
        drawn = many["logits"].exp().std(dim=0, correction=0).cpu()
        texts = Counter(drawn_caption(number) for number in range(samples))
        draws = [Draw(*caption, count) for caption, count in texts.most_common()]

    def name_of(number: int) -> str:
        special = {net.eos_id: END, vocabulary.unknown: RARE}
        return special.get(number) or vocabulary.decode([number])

    words = [name_of(number) for number in ids]
    others = []
    for place in range(len(ids)):
        best = probabilities[place].topk(min(OTHERS, probabilities.shape[1])).indices.tolist()
        others.append(
            [
                (
                    name_of(number),
                    float(probabilities[place, number]),
                    None if drawn is None else float(drawn[place, number]),
                )
                for number in best
            ]
        )
    side = math.isqrt(regions.shape[1])
    return CaptionMaps(
        picture=pixels.cpu(),
        grid=(side, side),
        words=words,
        ended=ended,
        probabilities=probabilities.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1),
        others=others,
        weights=plain["attentions"][0, : len(ids)].cpu() if sees else None,
        prior=prior_weights(net, regions),
        spread=spread,
        samples=samples if random else 0,
        draws=draws,
        model=model.name,
        size=size,
    )


def is_random(net: Att2in) -> bool:
    """Whether its attention weights are drawn."""
    return net.attention != "none" and net.map.random


@torch.no_grad()
def prior_weights(net: Att2in, regions: Tensor) -> Tensor | None:
    """The contextual prior over the regions of a picture, (regions,), on the CPU; None without one.

    Its mean, normalised as weights are: α of a Gamma prior, exp(μ) of a Lognormal one, over their sum.
    """
    layers = list(net.map.layers) if net.attention != "none" else []
    layer = layers[0] if layers else None
    if not isinstance(layer, BayesianLayer) or layer.prior is None:
        return None
    keys = F.relu(net.region(regions)).unsqueeze(1)  # (1, 1, regions, hidden), in evaluation
    visible = torch.ones(1, 1, 1, regions.shape[1], dtype=torch.bool, device=regions.device)
    parameter = prior_of(layer.prior, keys, visible, layer.config)
    return torch.softmax(parameter[0, 0], dim=-1).cpu()
