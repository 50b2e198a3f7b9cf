"""`trace`: a model, an input, and the trace of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overt import _check
from overt.mechanisms.attention_map import AttentionMap
from overt.tracing.assemble import Frame, assembled, drawn, framed, sort_calls
from overt.tracing.collect import Collector, collect, sampling
from overt.tracing.inputs import names_of, prepare
from overt.tracing.mixing.mixing import mixing_of
from overt.tracing.options import numbers
from overt.tracing.result import Trace
from overt.tracing.subject import Output

NAMED = 50  # likeliest tokens of each example whose names a trace of a language model keeps


def trace(
    model: nn.Module,
    inputs: Any,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    decoder: Any = None,
    tokens: Sequence[Sequence[str]] | None = None,
    heads: bool = False,
    mixing: str = "attention",
    target: Any = None,
    query: int | None = None,
    parts: bool = False,
    samples: int = 0,
    seed: int = 0,
    stack: str | None = None,
    output: Output | None = None,
) -> Trace:
    """Run a model once, in evaluation mode, and keep its attention maps.

    Any Hugging Face model that dispatches its attention will do, plain or attached to, whatever its attention
    implementation; models built on `torch.nn.MultiheadAttention`; and Overt's own. The model is left as it
    was, also when something fails.

    Args:
        model: the model.
        inputs: text or a list of texts; token ids; images (PIL, or a float tensor of pixel values); or a
            mapping of the model's arguments, as tokenizers and collators give it.
        tokenizer: for text; by default the one that lies beside the model's weights.
        processor: for PIL images; by default the one that lies beside the weights.
        decoder: text or token ids that an encoder–decoder's decoder is fed. By default the model writes
            them itself, greedily.
        tokens: names of the tokens, per example, where the inputs have none.
        heads: keep each head's maps, for `heads="each"` and lists of heads; by default only their mean.
        mixing: what the maps are. "attention": the weights. "effective": without the part that changes no
            output (Brunner et al. 2020); signed in rollout, cut at zero and renormalised in flow.
            "norm": ‖α f(x)‖, the size of what is added (Kobayashi et al. 2020). "gradient": max(0, A ⊙ ∂y/∂A)
            with y the target's logit. Rows of these two are made to sum to one before the residual joins.
            "value-zeroing": how far each token's output of a layer turns when another's values are zeroed
            (Mohebbi et al. 2023); the residual is in it, so methods add none by default. It runs each layer
            again for every token.
        target: of "gradient": class or token, or one per example; by default as for `Trace.blankout`.
        query: of "gradient", for models with one output per position: which one; by default the first of an
            encoder's, the last real one of others'.
        parts: keep the parts of maps that the model's mechanisms show, as Evolving does.
        samples: number of posterior samples of a model with random weights to draw beside the mean of its
            weights, which the maps are of.
        seed: of the samples' noise.
        stack: path of the stack to trace, where a model has several, such as "vision_model".
        output: takes the logits from what the model returns, where it has no `logits`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__name__}")
    kind = mixing_of(mixing)
    _check.whole("samples", samples, 0)
    for name, asked, has in (("samples", samples, kind.samples), ("heads", heads, kind.heads)):
        if asked and not has:
            raise ValueError(f"{name} with mixing={mixing!r} is not supported: trace one or the other")
    model = _unwrapped(model)
    given = prepare(model, inputs, tokenizer=tokenizer, processor=processor, decoder=decoder, tokens=tokens)
    collector = Collector(kind(heads), parts, stack)

    def score(result: Any) -> Tensor:
        return _score(framed(model, given, collector, output), result, target, query)

    result = collect(model, given.arguments, collector, score, sort_calls)
    frame = framed(model, given, collector, output)
    made = assembled(frame, collector)
    made.outputs = frame.subject.outputs_in(result, frame.main_queries())
    del result  # its logits of all positions may be large
    for number in range(samples):
        again = Collector(kind(heads), False, stack)
        with sampling(model, given, number, seed) as arguments:
            result = collect(model, arguments, again)
        made.draws.append(drawn(again, frame.subject.outputs_in(result, frame.main_queries())))
    _name_classes(made)
    return made


def _score(frame: Frame, result: Any, target: Any, query: int | None) -> Tensor:
    """The targets' logits at the queries that are explained, summed over examples."""
    subject, batch = frame.subject, frame.mask.shape[0]
    logits = subject.logits_in(result)
    queries = frame.main_queries() if query is None else [query] * batch
    queries = [0] * batch if logits.shape[1] == 1 else numbers("query", queries, logits.shape[1])
    asked = sorted(set(queries))
    goal = subject.target(logits.detach(), target, asked)
    examples = list(range(batch))
    chosen = goal[examples, [asked.index(one) for one in queries]]
    return logits[examples, queries, chosen].sum()


def _name_classes(made: Trace) -> None:
    """What the classes of the outputs are called, and how outputs become probabilities."""
    subject = made.subject
    if made.outputs is None or subject is None:
        return
    classes = made.outputs.shape[1]
    made.link, made.labels = subject.link(classes), subject.labels(classes)
    if made.labels or not subject.speaks(classes):
        return
    rows = [made.outputs, *(draw.outputs for draw in made.draws if draw.outputs is not None)]
    if made.draws:
        rows.append(torch.stack([made._probabilities(example)[0] for example in range(len(made))]))
    likely = {number for row in rows for number in row.topk(min(NAMED, classes)).indices.flatten().tolist()}
    made.words = names_of(subject.inputs.tokenizer, sorted(likely))


def everything(model: nn.Module, mixing: str = "attention", samples: int = 20) -> dict[str, Any]:
    """Arguments of `trace` that keep all there is: heads, parts, posterior samples, as a model has them.

    Args:
        model: the model.
        mixing: what the maps are. Heads are kept where their mean is the map without them.
        samples: of a Bayesian model's posterior.
    """
    maps = [module for module in model.modules() if isinstance(module, AttentionMap)]
    parted = any(layer.part_names for one in maps for layer in one.layers)
    random = any(one.random for one in maps)
    kind = mixing_of(mixing)
    return {
        "heads": kind.heads and kind.averages,
        "parts": parted and kind.parts,
        "samples": samples if random and kind.samples else 0,
    }


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what torch.compile or data parallelism put around it."""
    for name in ("_orig_mod", "module"):
        inner = model._modules.get(name)
        if inner is not None and type(model).__module__.startswith("torch."):
            return _unwrapped(inner)
    return model
