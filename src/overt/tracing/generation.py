"""What a model writes: settings of generation, checked, and the ids that it generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overt import _check
from overt._modes import device_of, evaluating
from overt.attaching.find import name_of

LENGTH = "max_new_tokens"
UNFINISHED = "\ufffd"  # how a decoder shows bytes that are no whole character
# Those of transformers' `generate` that change which tokens are chosen, and nothing else about the result.
KNOWN = (
    LENGTH,
    "min_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "num_beams",
    "length_penalty",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "forced_bos_token_id",
    "eos_token_id",
)
# What the others mean something for: alone, they would be ignored.
SAMPLED = ("temperature", "top_k", "top_p", "min_p", "typical_p")
BEAMS = ("length_penalty",)


class WrittenToken(NamedTuple):
    """A token as it is written.

    Attributes:
        ids: all that were generated so far, this one last.
        rows: raw attention of the query that wrote it, (layer, token), the mean of heads, over prompt and
            output up to this query.
    """

    ids: list[int]
    rows: Tensor


@dataclass(frozen=True)
class Generation:
    """How a model is to generate. `overt.trace(…, generate=Generation(…))` takes one as it is.

    Attributes:
        settings: arguments of transformers' `generate`, among them `max_new_tokens`.
        seed: random seed, for sampling.
        told: called with each token of a causal model as it is written, for one prompt; the model stops once
            it returns False. It then attends by its eager attention, whose weights can be seen.
    """

    settings: Mapping[str, Any]
    seed: int = 0
    told: Callable[[WrittenToken], bool] | None = None

    @property
    def length(self) -> int:
        """Most tokens that are generated."""
        return int(self.settings[LENGTH])

    @property
    def chooses(self) -> bool:
        """Whether anything but greedy decoding is asked for."""
        return set(self.settings) != {LENGTH}


def generation_of(generate: Any, seed: int) -> Generation:
    """The argument `generate` of `trace`, checked: a number of tokens, or settings."""
    if isinstance(generate, Generation):
        return generate
    if not isinstance(generate, Mapping):
        _check.whole("generate", generate, 1)
        return Generation({LENGTH: int(generate)}, seed)
    for name in generate:
        _check.one_of("a setting in generate", name, KNOWN)
    if LENGTH not in generate:
        raise ValueError(f"generate must hold {LENGTH!r}, got {', '.join(map(repr, generate)) or 'nothing'}")
    _check.whole(f"generate[{LENGTH!r}]", generate[LENGTH], 1)
    sampled, beams = generate.get("do_sample", False), generate.get("num_beams", 1)
    _check.one_of("generate['do_sample']", sampled, (True, False))
    _check.whole("generate['num_beams']", beams, 1)
    if generate.get("eos_token_id") is not None:
        ends = generate["eos_token_id"]
        for end in ends if isinstance(ends, list | tuple) else [ends]:
            _check.whole("generate['eos_token_id']", end, 0)
    for name, least, most in (("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0), ("typical_p", 0.0, 1.0)):
        if name in generate:
            _check.finite(f"generate[{name!r}]", generate[name])
            if not least <= generate[name] <= most:
                raise ValueError(f"generate[{name!r}] must lie in [0, 1], got {generate[name]}")
    if generate.get("min_new_tokens", 0) > generate[LENGTH]:
        raise ValueError(
            f"generate['min_new_tokens'] must be at most {LENGTH!r} ({generate[LENGTH]}), got "
            f"{generate['min_new_tokens']}"
        )
    for names, applies, need in ((SAMPLED, sampled, "'do_sample': True"), (BEAMS, beams > 1, "'num_beams'")):
        if not applies and (idle := [name for name in names if name in generate]):
            raise ValueError(f"generate[{idle[0]!r}] would change nothing: give {need} as well")
    return Generation(dict(generate), seed)


def check_generates(model: nn.Module) -> None:
    """Refuse a model that cannot generate."""
    able: Any = getattr(model, "can_generate", None)
    if not hasattr(model, "generate") or (callable(able) and not able()):
        raise ValueError(
            f"{name_of(model)} cannot generate: use a language model, such as AutoModelForCausalLM loads, or "
            "leave generate out"
        )


def ends_of(model: Any, generation: Generation | None = None) -> list[int]:
    """Ids that end what a model generates."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if generation is not None:
        ends = generation.settings.get("eos_token_id", ends)
    return [ends] if isinstance(ends, int) else [int(end) for end in ends or []]


@torch.no_grad()
def generated_ids(
    model: Any, arguments: Mapping[str, Any], generation: Generation, tokenizer: Any = None
) -> Tensor:
    """What a model's `generate` returns, (batch, token), in evaluation mode; greedy unless settings say else.

    The state of torch's random numbers is as before.

    Args:
        model: one that `check_generates` accepts.
        arguments: those of its forward, without a cache.
        generation: how to generate.
        tokenizer: of the model, which finds the strings that end what it writes, where its config has some.
    """
    device = device_of(model)
    moved = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in arguments.items()}
    settings = {"do_sample": False, "num_beams": 1, **generation.settings}
    if not settings["do_sample"]:  # those of the model's own would be ignored, with a warning
        settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "typical_p": 1.0, "min_p": None} | settings
    if getattr(getattr(model, "generation_config", None), "stop_strings", None):
        settings["tokenizer"] = tokenizer
    settings |= {"num_return_sequences": 1, "return_dict_in_generate": False}  # whatever the model's own are
    moved.pop("use_cache", None)
    devices = [device] if device.type == "cuda" else []
    with evaluating(model), torch.random.fork_rng(devices, enabled=bool(settings["do_sample"])):
        if settings["do_sample"]:
            torch.manual_seed(generation.seed)
        if generation.told is None:
            ids: Tensor = model.generate(**moved, **settings)
        else:
            ids = _telling(model, {**moved, **settings}, generation.told)
    return ids.cpu()


def _telling(model: Any, arguments: dict[str, Any], told: Callable[[WrittenToken], bool]) -> Tensor:
    """What `generate` returns, with a call for each token: its id, and the rows that wrote it."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    from overt.tracing.capture import CapturedAttention, watching

    prompt = arguments["input_ids"]
    if len(prompt) != 1:
        raise ValueError(f"words can be told as they are written for one prompt, got {len(prompt)}")
    rows: dict[str, Tensor] = {}  # of the pass that wrote the last token, by path

    def seen(call: CapturedAttention) -> None:
        if call.kind == "decoder" and call.weights.dim() == 4:
            rows[call.path] = call.weights[0, :, -1].mean(dim=0, dtype=torch.float32).cpu()

    class Teller(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
            del scores
            count = input_ids.shape[1] - 1  # tokens that the last query could see
            held, layers = torch.zeros(len(rows), count), list(rows.values())
            for layer, row in zip(held, layers, strict=True):
                few = min(len(row), count)  # a window holds the last ones only
                layer[count - few :] = row[len(row) - few :]
            rows.clear()
            on = told(WrittenToken(input_ids[0, prompt.shape[1] :].tolist(), held))
            return torch.full((1,), not on, dtype=torch.bool, device=input_ids.device)

    with watching(model, seen):
        ids: Tensor = model.generate(**arguments, stopping_criteria=StoppingCriteriaList([Teller()]))
    return ids


def text_of_ids(tokenizer: Any, ids: list[int]) -> tuple[str, list[list[int]]] | None:
    """The text of token ids and where each is in it; None unless the text has exactly these tokens."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    code = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if code["input_ids"] != ids:
        return None
    return text, [list(span) for span in code["offset_mapping"]]


def output_text(tokenizer: Any, before: int, ids: list[int]) -> tuple[str, list[tuple[int, int]]]:
    """What was generated as text, and where each of its tokens begins and ends in it.

    Args:
        tokenizer: of the model.
        before: id of the token before, after which a word may begin with a space.
        ids: what was generated.
    """
    context = tokenizer.decode([before], clean_up_tokenization_spaces=False)

    def text(count: int) -> str:
        whole: str = tokenizer.decode([before, *ids[:count]], clean_up_tokenization_spaces=False)
        return whole.removeprefix(context)

    shown = text(len(ids))
    spans: list[tuple[int, int]] = []
    unfinished: list[bool] = []
    at = 0
    for count in range(1, len(ids) + 1):
        so_far = text(count)
        stop = max(at, min(len(so_far.rstrip(UNFINISHED)), len(shown)))
        spans.append((at, len(shown) if count == len(ids) else stop))
        unfinished.append(so_far.endswith(UNFINISHED))
        at = stop
    # Bytes of one character share its place, as in offsets of tokenizers.
    for place in reversed(range(len(spans) - 1)):
        start, stop = spans[place]
        following = spans[place + 1]
        if following[1] > stop and following[0] == stop:
            if start == stop:
                spans[place] = following
            elif unfinished[place]:  # such as a space and the first byte of a character
                spans[place] = (start, stop + 1)
    return shown, spans
