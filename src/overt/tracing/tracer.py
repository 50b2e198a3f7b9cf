"""`trace` runs a model on an input and returns the trace."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from overt import _check
from overt.attaching.api import state_in
from overt.attaching.settings import temperature_of
from overt.mechanisms.attention_map import AttentionMap
from overt.models.seq2seq import Seq2Seq
from overt.tracing.assemble import Frame, assemble, make_frame, posterior_draw, sort_calls, stack_of
from overt.tracing.collect import Collector, collect, sampling
from overt.tracing.inputs import Inputs, is_pair, names_of, prepare
from overt.tracing.mixing.mixing import Mixing, mixing_of
from overt.tracing.options import check_bytes, numbers
from overt.tracing.result import Trace
from overt.tracing.subject import Output, Subject

if TYPE_CHECKING:
    from overt.tracing.generation import Generation

NAMED = 50  # a language model's trace keeps the names of this many likeliest tokens per example


def trace(
    model: nn.Module,
    inputs: Any,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    decoder: Any = None,
    generate: int | Mapping[str, Any] | None = None,
    tokens: Sequence[Sequence[str]] | None = None,
    heads: bool = False,
    mixing: str = "attention",
    target: Any = None,
    query: int | None = None,
    parts: bool = False,
    samples: int = 0,
    seed: int = 0,
    stack: str | Mapping[str, str | Sequence[str]] | None = None,
    output: Output | None = None,
    memory: int = 2**30,
) -> Trace:
    """Run a model once, in evaluation mode, and keep its attention maps.

    Works with any Hugging Face model that dispatches its attention, plain or attached, whatever its attention
    implementation; with models built on `torch.nn.MultiheadAttention`; and with Overt's own models. Of these,
    the LSTM translator has only cross-attention, and networks of `overt.vision` attend to pixels, beside
    convolutions: a trace of them has maps, but neither rollout nor flow. In any other PyTorch model attention
    is recognised as it runs: scaled_dot_product_attention, flex_attention, multi_head_attention_forward, and
    a softmax over keys that is next multiplied with values; such a model is run again on a few tokens, to see
    that nothing else mixes or moves them. Compiled models run uncompiled while they are traced. The model is
    left unchanged, even if an error occurs.

    Args:
        model: the model.
        inputs: text or a list of texts; messages of a chat, {"role": …, "content": …}, in a list or several
            such lists; token ids; images (PIL, or a float tensor of pixel values; for a
            network of `overt.vision` also paths); or a mapping of the model's arguments, as tokenizers and
            collators return.
        tokenizer: for text; by default the one saved with the model's weights.
        processor: for PIL images; by default the one saved with the weights.
        decoder: text or token ids to feed to an encoder–decoder's decoder. By default the model generates
            them by greedy decoding.
        generate: most tokens that a language model is to write after the prompt, or an encoder–decoder as its
            target, by greedy decoding; one pass over both then has all rows. Or a mapping of settings of
            transformers' `generate`: {"max_new_tokens": 64, "do_sample": True, "temperature": 0.7}. See
            `Trace.generated`. Of a model that sees pictures as well, the language model is traced.
        tokens: names of the tokens, per example, for inputs that have none.
        heads: keep each head's maps, for `heads="each"` and lists of heads; by default only their mean.
        mixing: what the maps hold. "attention": the weights. "effective": the weights without the part that
            changes no output (Brunner et al. 2020); signed in rollout, clipped at zero and renormalised in
            flow. "norm": ‖α f(x)‖, the size of what is added (Kobayashi et al. 2020). "gradient":
            max(0, A ⊙ ∂y/∂A) with y the target's logit. The rows of these two are normalised to sum to one
            before the residual is added. "relevance": the same as "gradient", not normalised; its rollout is
            gradient-weighted attention (Chefer et al. 2021). "value-zeroing": how far each token's output of
            a layer turns when another token's values are zeroed (Mohebbi et al. 2023); it includes the
            residual, so methods add none by default. It runs each layer again for every token. "alti": how
            much of what attention makes of a token, residual included, each token accounts for (Ferrando et
            al. 2022).
        target: for "gradient" and "relevance": a class or token, or one per example; the default is that of
            `Trace.blankout`.
        query: for these two, on models with one output per position: the position to explain; by default the
            first token of an encoder, the last real token of other models.
        parts: keep the parts of the maps that the model's mechanisms expose, as Evolving does.
        samples: number of posterior samples to draw from a model with random weights, in addition to the
            pass at the mean of its weights, which the maps come from.
        seed: random seed of the samples, and of sampling by `generate`.
        stack: path of the stack to trace, such as "vision_model", for a model that has several. Networks of
            `overt.vision` have one for each size of their maps, such as "14x14" and "7x7", the first of which
            is the default. Where the calls of one chain cannot be inferred, a mapping names them: "encoder",
            "decoder" or "cross" → paths of the calls, in order, such as `t.paths` has, or of modules that
            contain them.
        output: extracts the logits from what the model returns, for models that return no `logits`.
        memory: bytes that maps may take, together with the weights of one layer. Where shapes say that they
            would take more, queries and keys are kept in their place, and rows are computed from them, up to
            results of this many bytes. This is possible for mixing="attention", without parts and samples.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__name__}")
    kind = mixing_of(mixing)
    _check.whole("samples", samples, 0)
    for name, requested, supported in (("samples", samples, kind.samples), ("heads", heads, kind.heads)):
        if requested and not supported:
            raise ValueError(f"{name} with mixing={mixing!r} is not supported: use one or the other")
    model = _unwrapped(model)
    _check.whole("memory", memory, 1)
    generation = None
    if generate is not None:
        from overt.tracing.generation import generation_of  # on first use

        generation = generation_of(generate, seed)
        if stack is None and not is_pair(model):
            from overt.tracing.images import language_stack

            stack = language_stack(model)
    batch = _read(model, inputs, tokenizer, processor, decoder, tokens, generation)
    return trace_batch(
        model,
        batch,
        heads=heads,
        kind=kind,
        target=target,
        query=query,
        parts=parts,
        samples=samples,
        seed=seed,
        stack=stack,
        output=output,
        memory=memory,
    )


def _read(
    model: nn.Module,
    inputs: Any,
    tokenizer: Any,
    processor: Any,
    decoder: Any,
    tokens: Sequence[Sequence[str]] | None,
    generation: Generation | None,
) -> Inputs:
    """The batch of a trace, with what the model generates."""
    from overt.tracing.pixels import attends_to_pixels, pixel_inputs  # and the networks, on first use

    given: dict[str, Any] = {"tokenizer": tokenizer, "processor": processor, "decoder": decoder}
    pixels = attends_to_pixels(model)
    if generation is None:
        batch = (pixel_inputs if pixels else prepare)(model, inputs, **given, tokens=tokens)
        _drop_cache(batch)
        return batch
    if tokens is not None:
        raise ValueError("tokens cannot be given with generate, whose tokens are not known yet: leave it out")
    from overt.tracing.continuing import continued
    from overt.tracing.generation import check_generates

    if pixels or not isinstance(model, Seq2Seq):
        check_generates(model)
    if "forced_bos_token_id" in generation.settings and not is_pair(model):
        raise ValueError(
            "generate['forced_bos_token_id'] is the first word of an encoder–decoder's target, and "
            f"{type(model).__name__} is none: leave it out"
        )
    batch = prepare(model, inputs, **given, generation=generation)
    _drop_cache(batch)
    if is_pair(model):
        return batch
    batch = continued(model, batch, generation)
    batch.to_device_of(model)
    return batch


def trace_batch(
    model: nn.Module,
    batch: Inputs,
    *,
    heads: bool = False,
    kind: type[Mixing] | None = None,
    target: Any = None,
    query: int | None = None,
    parts: bool = False,
    samples: int = 0,
    seed: int = 0,
    stack: str | Mapping[str, str | Sequence[str]] | None = None,
    output: Output | None = None,
    memory: int = 2**30,
) -> Trace:
    """The trace of a batch that `prepare` made, or that is like one that it made.

    Args:
        model: the model.
        batch: its arguments, on its device, and their tokens.
        heads: as for `trace`, and so are the other arguments.
        kind: the mixing; None for attention.
        target: for mixings that need a gradient.
        query: for mixings that need a gradient.
        parts: keep the parts of the maps.
        samples: number of posterior samples.
        seed: random seed of the samples.
        stack: path of the stack to trace.
        output: extracts the logits from what the model returns.
        memory: bytes that maps may take.
    """
    from overt.tracing.budget import Budget

    kind = mixing_of("attention") if kind is None else kind
    chosen = stack_of(stack)
    budget = Budget(memory, heads, _why_maps(kind, parts, samples), target=_target_length(model, batch))
    collector = Collector(kind(heads), parts, chosen, budget)
    arguments = _last_logits(model, batch, memory) if output is None and not kind.gradients else None

    def score(result: Any) -> Tensor:
        return _score(make_frame(model, batch, collector, output), result, target, query)

    result = collect(model, arguments or batch.arguments, collector, score, sort_calls)
    frame = make_frame(model, batch, collector, output)
    result_trace = assemble(frame, collector)
    _check_rows(result_trace, memory)
    if arguments is None:
        result_trace.outputs = frame.subject.outputs_in(result, frame.main_queries())
    elif frame.groups.kind == "causal":
        result_trace.outputs = result.logits[:, -1].to("cpu", torch.float32, copy=True)
    del result  # its logits at all positions may be large
    for number in range(samples):
        draw_collector = Collector(kind(heads), False, chosen)
        with sampling(model, batch, number, seed) as arguments:
            result = collect(model, arguments, draw_collector)
        result_trace.draws.append(
            posterior_draw(draw_collector, frame.subject.outputs_in(result, frame.main_queries()))
        )
    _name_classes(result_trace)
    return result_trace


def _why_maps(kind: type[Mixing], parts: bool, samples: int) -> str | None:
    """Why a trace must keep maps, as a clause; None if queries and keys would do."""
    if kind.name != "attention":
        return f"mixing={kind.name!r} makes maps of its own"
    if parts:
        return "parts are maps"
    return "each posterior sample has maps" if samples else None


def _drop_cache(batch: Inputs) -> None:
    """Refuse a cache that holds tokens, whose maps would be missing; an empty one is not filled."""
    cache = batch.arguments.pop("past_key_values", None)
    length: Any = getattr(cache, "get_seq_length", lambda: 0 if cache is None else len(cache))
    if int(length()):
        raise ValueError(
            "past_key_values holds tokens already, and a trace has the maps of one pass: trace without a "
            "cache, with the whole sequence as inputs"
        )


def _target_length(model: nn.Module, batch: Inputs) -> int | None:
    """Length of the decoder's sequence, as the inputs have it; None where they do not."""
    for name in ("decoder_input_ids", "decoder_inputs_embeds"):
        if isinstance(given := batch.arguments.get(name), Tensor) and given.dim() > 1:
            return given.shape[1]
    given = batch.arguments.get("tgt")  # of torch.nn.Transformer
    if not isinstance(given, Tensor) or given.dim() not in (2, 3):
        return None
    return given.shape[1 if given.dim() == 3 and getattr(model, "batch_first", False) else 0]


def _last_logits(model: nn.Module, batch: Inputs, memory: int) -> dict[str, Any] | None:
    """Arguments that ask for the logits of the last position alone, where those of all would take too much.

    None where the model does not take such a request, or where examples end before that position.
    """
    ids = batch.arguments.get("input_ids")
    takes = "logits_to_keep" in inspect.signature(model.forward).parameters
    if not (takes and isinstance(ids, Tensor) and ids.dim() == 2):
        return None
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    words = getattr(text, "vocab_size", None)
    if not isinstance(words, int):
        return None
    size = next((p.element_size() for p in model.parameters()), 4)
    ends = batch.mask is None or bool(batch.mask[:, -1].all())
    if ids.numel() * words * size <= memory or not ends or "logits_to_keep" in batch.arguments:
        return None
    return {**batch.arguments, "logits_to_keep": 1}


def _check_rows(trace: Trace, memory: int) -> None:
    """Refuse a budget that is too small for anything to be read."""
    if trace.of_states:
        row = trace.mask.numel() * 8
        check_bytes(f"a single row of {trace.mask.shape[1]:,} tokens", row, memory, f"give at least {row}")


def _score(frame: Frame, result: Any, target: Any, query: int | None) -> Tensor:
    """The targets' logits at the queries that are explained, summed over examples."""
    subject, batch = frame.subject, frame.mask.shape[0]
    logits = subject.logits_in(result)
    queries = frame.main_queries() if query is None else [query] * batch
    queries = [0] * batch if logits.shape[1] == 1 else numbers("query", queries, logits.shape[1])
    distinct = sorted(set(queries))
    goal = subject.target(logits.detach(), target, distinct)
    examples = list(range(batch))
    chosen = goal[examples, [distinct.index(position) for position in queries]]
    return logits[examples, queries, chosen].sum()


def _name_classes(trace: Trace) -> None:
    """Add the names of the output's classes, and how outputs become probabilities."""
    subject = trace.subject
    if trace.outputs is None or subject is None:
        return
    classes = trace.outputs.shape[1]
    trace.link, trace.labels = subject.link(classes), subject.labels(classes)
    trace.temperature = _temperature(subject)
    if trace.labels or not subject.speaks(classes):
        return
    rows = [trace.outputs, *(draw.outputs for draw in trace.draws if draw.outputs is not None)]
    if trace.draws:
        rows.append(torch.stack([trace._probabilities(example)[0] for example in range(len(trace))]))
    likely = {number for row in rows for number in row.topk(min(NAMED, classes)).indices.flatten().tolist()}
    trace.words = names_of(subject.inputs.tokenizer, sorted(likely))


def _temperature(subject: Subject) -> float:
    """The temperature of the model's own outputs, fitted without dropout, which traces are without."""
    state = state_in(subject.model)
    base: nn.Module = subject.model
    if state is not None:  # it may be inside a PEFT model
        base = next(part for part in base.modules() if part._modules.get("overt_state") is state)
    fitted = temperature_of(base, state)
    return 1.0 if fitted is None or fitted.dropout or subject.output is not None else fitted.value


def everything(model: nn.Module, mixing: str = "attention", samples: int = 20) -> dict[str, Any]:
    """Arguments of `trace` that keep everything a model has: heads, parts and posterior samples.

    Args:
        model: the model.
        mixing: what the maps hold. Heads are kept if the map without heads is their mean.
        samples: number of posterior samples, for a Bayesian model.
    """
    maps = [module for module in model.modules() if isinstance(module, AttentionMap)]
    has_parts = any(layer.part_names for map in maps for layer in map.layers)
    random = any(map.random for map in maps)
    kind = mixing_of(mixing)
    return {
        "heads": kind.heads and kind.averages,
        "parts": has_parts and kind.parts and not isinstance(model, Seq2Seq),  # made row by row
        "samples": samples if random and kind.samples else 0,
    }


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of torch.compile and data parallelism."""
    if isinstance(model, torch.jit.ScriptModule):
        name = getattr(model, "original_name", type(model).__name__)
        raise ValueError(f"{name} is scripted, and its attention cannot be seen: trace the module behind it")
    for name in ("_orig_mod", "module"):
        inner = model._modules.get(name)
        if inner is not None and type(model).__module__.startswith("torch."):
            return _unwrapped(inner)
    return model
