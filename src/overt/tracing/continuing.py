"""A prompt with what a language model writes after it, as one batch: a single pass then has all rows."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overt.attaching.find import name_of
from overt.tracing.generation import Generation, ends_of, generated_ids, output_text, text_of_ids
from overt.tracing.inputs import Inputs, pad_rows, padding_id, positions_of, special_ids, words_of
from overt.tracing.subject import take


def continued(model: Any, batch: Inputs, generation: Generation) -> Inputs:
    """The batch of prompts and what the model generates after them, padded on the right.

    Padding that was given is dropped. For generation, prompts are padded on the left if the model takes
    positions, and otherwise those of one length are written together, so that positions are those of each
    prompt alone. An end that was generated is no input.

    Args:
        model: a causal language model, which `check_generates` accepts.
        batch: the prompts.
        generation: how to generate.
    """
    ids = batch.arguments.get("input_ids")
    if not isinstance(ids, Tensor) or "inputs_embeds" in batch.arguments:
        raise ValueError(f"generate needs token ids or text, got {', '.join(batch.arguments)}")
    given = batch.arguments.get("attention_mask")
    if isinstance(given, Tensor) and given.shape != ids.shape:
        raise ValueError(
            f"attention_mask must have shape {tuple(ids.shape)} with generate, got {tuple(given.shape)}"
        )
    real = torch.ones(ids.shape, dtype=torch.bool) if batch.mask is None else batch.mask.cpu()
    prompts = [row[keep].tolist() for row, keep in zip(ids.cpu(), real, strict=True)]
    if not all(prompts):
        raise ValueError("generate needs prompts with at least one token, got one of padding alone")
    _check_room(model, max(map(len, prompts)), generation.length)
    kinds = _kinds(batch, ids, real)
    written = _written(model, batch, prompts, kinds, generation)
    if not any(written):
        raise ValueError(f"{name_of(model)} wrote nothing: the first token that it generated was an end")
    _check_rotary(model, max(map(len, prompts)), [a + b for a, b in zip(prompts, written, strict=True)])
    return _joined(model, batch, real, prompts, written, kinds)


def _check_room(model: nn.Module, prompt: int, more: int) -> None:
    """Refuse to generate more tokens than the model has learnt positions for."""
    limit = positions_of(model)
    if limit is not None and prompt + more > limit:
        raise ValueError(
            f"the prompt has {prompt} tokens and generate={more}, but the model has positions for {limit}: "
            "shorten either"
        )


def _check_rotary(model: nn.Module, prompt: int, whole: list[list[int]]) -> None:
    """Refuse a model that changed its rotary frequencies as it wrote: a single pass has one set of them.

    "dynamic" frequencies change with each token beyond the length of training, and those of "longrope" once,
    at that length.

    Args:
        model: the model.
        prompt: tokens of the longest prompt.
        whole: prompts with their outputs.
    """
    most = max(map(len, whole))
    for path, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        settings = getattr(getattr(module, "config", None), "rope_parameters", None)
        if not kinds or not isinstance(settings, dict):
            continue
        for layers, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            own = settings if layers is None else settings.get(layers, {})
            limit = getattr(module, "original_max_seq_len", most)
            if kind == "longrope":
                limit = own.get("original_max_position_embeddings", limit)
            changed = most > limit if "dynamic" in kind else kind == "longrope" and prompt <= limit < most
            if changed:
                raise ValueError(
                    f"{path} of {name_of(model)} changes its rotary positions beyond {limit} tokens, and "
                    f"prompt and output have {most}: rows of one pass would not be those of the steps"
                )


def _kinds(batch: Inputs, ids: Tensor, real: Tensor) -> dict[str, list[list[int]]]:
    """Arguments with the kind of each token, by name, as rows without padding; other such arguments fail."""
    kinds = {}
    for name, value in batch.arguments.items():
        aligned = isinstance(value, Tensor) and (value.shape == ids.shape or name == "position_ids")
        if not aligned or name in ("input_ids", "attention_mask"):
            continue
        if not name.endswith("token_type_ids"):
            raise ValueError(
                f"{name} cannot be given with generate: what is generated has none; leave it out"
            )
        kinds[name] = [row[keep].tolist() for row, keep in zip(value.cpu(), real, strict=True)]
    return kinds


def _written(
    model: Any,
    batch: Inputs,
    prompts: list[list[int]],
    kinds: dict[str, list[list[int]]],
    generation: Generation,
) -> list[list[int]]:
    """What the model generates after each prompt, without ends and what follows them."""
    ends, pad = ends_of(model, generation), _filler(model, batch)
    lengths = [len(prompt) for prompt in prompts]
    groups = [list(range(len(prompts)))]
    if "position_ids" not in inspect.signature(model.forward).parameters:
        # Padding on the left would move the prompts, for all that can be seen.
        groups = [[n for n, each in enumerate(lengths) if each == length] for length in sorted(set(lengths))]
    written: list[list[int]] = [[] for _ in prompts]
    for group in groups:
        longest = max(lengths[n] for n in group)
        arguments = {
            name: take(value, torch.tensor(group), len(prompts)) for name, value in batch.arguments.items()
        }
        arguments["input_ids"] = _pad_left([prompts[n] for n in group], longest, pad)
        arguments["attention_mask"] = _pad_left([[1] * lengths[n] for n in group], longest, 0)
        arguments |= {name: _pad_left([rows[n] for n in group], longest, 0) for name, rows in kinds.items()}
        ids = generated_ids(model, {**arguments, "pad_token_id": pad}, generation, batch.tokenizer)
        found = ids[:, longest:].tolist()
        for n, row in zip(group, found, strict=True):
            written[n] = row[: next((at for at, each in enumerate(row) if each in ends), len(row))]
    return written


def _filler(model: Any, batch: Inputs) -> int:
    """Id that fills up shorter rows."""
    if batch.tokenizer is not None:
        return padding_id(batch.tokenizer)
    known = getattr(model.config, "pad_token_id", None)
    return known if isinstance(known, int) and known >= 0 else 0


def _pad_left(rows: Sequence[Sequence[int]], length: int, filler: int) -> Tensor:
    return torch.tensor([[*[filler] * (length - len(row)), *row] for row in rows])


def _joined(
    model: Any,
    batch: Inputs,
    real: Tensor,
    prompts: list[list[int]],
    written: list[list[int]],
    kinds: dict[str, list[list[int]]],
) -> Inputs:
    """Prompts and outputs, with what is known of their tokens."""
    whole = [before + after for before, after in zip(prompts, written, strict=True)]
    longest = max(map(len, whole))
    ids = pad_rows(whole, longest, _filler(model, batch))
    mask = pad_rows([[1] * len(row) for row in whole], longest, 0)
    lengths = torch.tensor([len(row) for row in prompts]).unsqueeze(1)
    joined = Inputs(
        {**batch.arguments, "input_ids": ids, "attention_mask": mask},
        mask=mask.bool(),
        unknown=batch.unknown,
        tokenizer=batch.tokenizer,
        processor=batch.processor,
        grid=batch.grid,
        image=batch.image,
        extra=dict(batch.extra),
    )
    more = {
        name: [r + [0] * len(w) for r, w in zip(rows, written, strict=True)] for name, rows in kinds.items()
    }
    joined.arguments |= {name: pad_rows(rows, longest, 0) for name, rows in more.items()}
    joined.arguments |= _positions(model, mask)
    joined.extra["generated"] = mask.bool() & (torch.arange(longest) >= lengths)
    joined.extra["prompt lengths"] = [len(row) for row in prompts]
    joined.tokens = [list(map(str, row)) for row in ids.tolist()]
    if batch.tokenizer is None:
        return joined
    joined.tokens = words_of(batch.tokenizer, ids)
    joined.special = special_ids(batch.tokenizer, ids)
    if batch.special is not None and batch.special.shape == real.shape:  # it knows the frame of a text
        for number, keep in enumerate(real):
            joined.special[number, : len(prompts[number])] = batch.special[number, keep]
    _add_texts(batch, joined, real, prompts, written)
    return joined


def _positions(model: Any, mask: Tensor) -> dict[str, Tensor]:
    """The positions that transformers' `generate` gives the model; nothing where it has its own way.

    Those that RoBERTa has by itself, for example, are others.
    """
    takes = "position_ids" in inspect.signature(model.forward).parameters
    way = getattr(type(model), "_prepare_position_ids_for_generation", None)
    if not takes or getattr(way, "__module__", None) != "transformers.generation.utils":
        return {}
    return {"position_ids": (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 0)}


def _add_texts(
    batch: Inputs, joined: Inputs, real: Tensor, prompts: list[list[int]], written: list[list[int]]
) -> None:
    """The whole texts, and where each token is in them; nothing where the prompts' offsets are unknown."""
    tokenizer, texts, offsets = batch.tokenizer, [], torch.zeros(*joined.tokens_shape, 2, dtype=torch.int64)
    given = batch.extra.get("texts")
    for number, (prompt, output) in enumerate(zip(prompts, written, strict=True)):
        if given is not None and batch.offsets is not None:
            text, spans = given[number], batch.offsets[number, real[number]].tolist()
        else:
            found = text_of_ids(tokenizer, prompt)
            if found is None:
                return
            text, spans = found
        more, places = output_text(tokenizer, prompt[-1], output)
        spans = [*spans, *((len(text) + start, len(text) + stop) for start, stop in places)]
        offsets[number, : len(spans)] = torch.tensor(spans)
        texts.append(text + more)
    joined.offsets = offsets
    joined.extra["texts"] = texts
