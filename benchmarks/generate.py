"""Cost of an attached decoder's beam search: the same Marian, never attached (sdpa) and with Evolving.

Random weights at the size of Evolving Attention's EA-Lite, or `--model FOLDER`. The settings are the paper's:
alpha .1 in the encoder, 0 in the decoder, beta .1. All sentences get the same number of tokens: the end of a
sentence is suppressed. In bfloat16 on a GPU, in float32 on a CPU.
"""

from __future__ import annotations

import argparse
import cProfile
import platform
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import overt

PLAIN, ATTACHED, DEFINITION = "never attached, sdpa", "Evolving", "Evolving, plain operations"
PAD, END = 0, 1


def build(options: argparse.Namespace) -> Any:
    """A Marian with the settings of the paper's network, on the device."""
    from transformers import MarianConfig, MarianMTModel

    if options.model is not None:
        model: Any = MarianMTModel.from_pretrained(options.model, attn_implementation="sdpa")
    else:
        torch.manual_seed(0)
        width, heads, layers = options.width, options.heads, options.layers
        settings: dict[str, Any] = {
            "vocab_size": options.vocabulary,
            "d_model": width,
            "encoder_ffn_dim": width,
            "decoder_ffn_dim": width,
            "encoder_attention_heads": heads,
            "decoder_attention_heads": heads,
            "encoder_layers": layers,
            "decoder_layers": layers,
            "activation_function": "relu",
            "scale_embedding": True,
            "pad_token_id": PAD,
            "eos_token_id": END,
            "decoder_start_token_id": END,
            "forced_eos_token_id": END,
            "attn_implementation": "sdpa",
        }
        model = MarianMTModel(MarianConfig(**settings))
    half = options.device == "cuda" and not options.autocast
    return model.eval().to(options.device, torch.bfloat16 if half else torch.float32)


def attach(model: Any) -> Any:
    """The model with Evolving; its convolutions do something, as those of a trained model do."""
    overt.attach(model, overt.Evolving(alpha=0.1, beta=0.1))
    for name, parameter in model.named_parameters():
        if ".overt." in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def sentences(options: argparse.Namespace, vocabulary: int) -> dict[str, Tensor]:
    """Sentences of half to full length."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(options.length // 2, options.length, options.sentences).long().view(-1, 1)
    mask = (torch.arange(options.length) < lengths).long()
    ids = torch.randint(2, vocabulary, (options.sentences, options.length), generator=generator)
    inputs = {"input_ids": ids * mask + PAD * (1 - mask), "attention_mask": mask}
    return {name: x.to(options.device) for name, x in inputs.items()}


def translate(model: Any, inputs: dict[str, Tensor], options: argparse.Namespace) -> Tensor:
    """The sequences that beam search finds."""
    half: AbstractContextManager[Any] = nullcontext()
    if options.autocast:
        half = torch.autocast(options.device, torch.bfloat16)
    with half:
        found: Tensor = model.generate(
            **inputs,
            num_beams=options.beams,
            min_new_tokens=options.tokens,
            max_new_tokens=options.tokens,
            do_sample=False,
        )
    if options.device == "cuda":
        torch.cuda.synchronize()
    return found


def milliseconds(forms: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Times of each form, taken in turn after one run each."""
    seen: dict[str, list[float]] = {form: [] for form in forms}
    for repeat in range(repeats + 1):
        for form, run in forms.items():
            start = time.perf_counter()
            run()
            if repeat:  # the first one compiles
                seen[form].append(1000.0 * (time.perf_counter() - start))
    return seen


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations; those that only make views too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[operation._schema.name] += 1
        return operation(*args, **(kwargs or {}))


def kernels(run: Callable[[], object]) -> Counter[str]:
    """The kernels that a GPU ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
    return Counter(event.name for event in trace.events() if "CUDA" in str(event.device_type))


def show_profile(form: str, run: Callable[[], object], options: argparse.Namespace) -> None:
    """Print how many kernels run (on a CPU: operations), the most frequent, and Python's largest costs."""
    if options.device == "cuda":
        counts, what = kernels(run), "kernels and copies"
    else:
        with Operations() as operations:
            run()
        counts, what = operations.counts, "operations"
    print(f"\n{form}: {counts.total()} {what}, {counts.total() / options.tokens:.0f} a token")
    for name, count in counts.most_common(12):
        print(f"{count:8d}  {name[:100]}")
    python = cProfile.Profile()
    python.runcall(run)
    pstats.Stats(python).sort_stats("tottime").print_stats(15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder with a plain Marian, in place of random weights")
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--sentences", type=int, default=250)
    parser.add_argument("--length", type=int, default=24, help="of the longest sentence")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of every sentence")
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--autocast", action="store_true", help="float32 weights under bfloat16 autocast")
    parser.add_argument("--definition", action="store_true", help="time overt.naive() as well")
    parser.add_argument("--profile", action="store_true", help="count kernels, and list Python's costs")
    options = parser.parse_args()
    plain, attached = build(options), attach(build(options))
    inputs = sentences(options, plain.config.vocab_size)

    def by_definition() -> None:
        with overt.naive():
            translate(attached, inputs, options)

    forms: dict[str, Callable[[], object]] = {
        PLAIN: lambda: translate(plain, inputs, options),
        ATTACHED: lambda: translate(attached, inputs, options),
    }
    if options.definition:
        forms[DEFINITION] = by_definition
    on_gpu = options.device == "cuda"
    where = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} threads"
    kind = "bfloat16 autocast" if options.autocast else "bfloat16" if on_gpu else "float32"
    print(f"torch {torch.__version__}, {where}, {platform.machine()}; {kind}, medians of {options.repeats}")
    size = f"{options.sentences} sentences × {options.tokens} tokens, beam {options.beams}"
    print(f"{size}, {options.layers} + {options.layers} layers")
    seen = milliseconds(forms, options.repeats)
    baseline = statistics.median(seen[PLAIN])
    for form, times in seen.items():
        median, spread = statistics.median(times), f"{min(times):.0f}–{max(times):.0f}"
        print(f"{form:30} {median:8.1f} ms  {median / baseline:5.2f} ×  ({spread})")
    if options.profile:
        for form, run in forms.items():
            show_profile(form, run, options)


if __name__ == "__main__":
    main()
