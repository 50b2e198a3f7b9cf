"""Do methods find where a generated fact was copied from?

A sentence with a code is planted in a long text, the model is asked for the code, and generates its digits.
Which share of the code's tokens in the text is among the top tokens by each method, read at the queries that
generated the digits? Prompts whose answer is wrong are counted, and not judged. The text is made of unrelated
sentences in a random order. Tokens that were generated, and the first one, are not ranked; its share shows
how much of a row goes to the start of the text, whatever is asked. "raw, best layer" is the layer with the
highest recall on the other half of the prompts.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import time
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import overt
from overt._files import write_whole

SENTENCES = (
    "The ferry was late again, and nobody on the pier complained.",
    "My aunt keeps bees behind the old mill.",
    "A row of poplars hides the railway from the road.",
    "In winter the school opens half an hour later.",
    "The clerk stamped both forms and kept the blue one.",
    "Rain is expected in the north, and wind along the coast.",
    "She sold the piano, but not the stool.",
    "Every second house in this street has a green door.",
    "The soup needs salt, a bay leaf and an hour of patience.",
    "They painted the bridge for the third time since the war.",
    "His report on the harbour was read by four people.",
    "At noon the market square belongs to the pigeons.",
    "The museum lends umbrellas to visitors without a coat.",
    "Nobody remembers who planted the walnut tree.",
    "The last train stops at every village on its way.",
    "A baker on the hill still uses a wooden oven.",
)
PLANTED = "The secret code is {code}."
QUESTION = "\n\nQuestion: What is the secret code?\nAnswer: The secret code is"
NEW = 8  # tokens that are generated
ALL_LAYERS = "raw, mean of layers"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "raw, last layer": ("raw", {"layers": -1}),
    ALL_LAYERS: ("raw", {}),
    "rollout": ("rollout", {"layers": -1}),
    "rollout, receptive field": ("rollout", {"layers": -1, "receptive_field": True}),
    "gradient norm": ("gradients", {}),
    "gradient × input": ("gradients", {"kind": "input"}),
}


def prompt_of(tokenizer: Any, tokens: int, seed: int) -> tuple[str, str]:
    """A prompt of about so many tokens, and the code in it."""
    drawn = random.Random(seed)
    code = str(drawn.randrange(1000, 10_000))
    text = " ".join(drawn.choices(SENTENCES, k=tokens))  # a sentence has several tokens
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    extra = len(tokenizer(PLANTED.format(code=code) + QUESTION)["input_ids"])
    around = tokenizer.decode(ids[: tokens - extra])
    ends = [match.end() for match in re.finditer(r"\. ", around)]
    inside = [end for end in ends if 0.05 * len(around) < end < 0.8 * len(around)]
    place = drawn.choice(inside or [0])
    return f"{around[:place]}{PLANTED.format(code=code)} {around[place:]}{QUESTION}", code


Row: TypeAlias = "np.ndarray[Any, Any]"


def rows_of(trace: Any, queries: list[int]) -> tuple[dict[str, Row], dict[str, float], list[Row]]:
    """Each method's values, averaged over the queries, (token,), and its seconds; raw's of each layer."""
    found, seconds, layers = {}, {}, list[Row]()
    for name, (method, options) in METHODS.items():
        began = time.perf_counter()
        values = getattr(trace, method)(queries, **options)[0].double().abs()  # (layer, query, token)
        found[name] = values.mean(dim=(0, 1)).cpu().numpy()
        seconds[name] = time.perf_counter() - began
        if name == ALL_LAYERS:
            layers = list(values.mean(dim=1).cpu().numpy())
    return found, seconds, layers


def recall(values: Row, wanted: list[int], top: int) -> float:
    """The share of some tokens among those with the largest values, but for the first one."""
    best = 1 + np.argsort(-values[1:], kind="stable")[:top]
    return float(np.isin(wanted, best).mean())


def judged(model: Any, tokenizer: Any, prompt: str, code: str, top: int) -> dict[str, Any]:
    """Recall, first token's share and seconds of each method; only whether it was right, if it was not."""
    trace = overt.trace(model, prompt, tokenizer=tokenizer, generate=NEW)
    text = trace.texts[0]
    end = len(prompt)
    answer = re.match(r"\D*(\d+)", text[end:])
    if answer is None or answer[1] != code:
        return {"right": False, "answer": text[end:], "code": code}
    assert trace.offsets is not None
    assert trace.generated is not None
    spans = trace.offsets[0].tolist()

    def tokens(start: int, stop: int) -> list[int]:
        return [n for n, (a, b) in enumerate(spans) if a < stop and b > start and b > a]

    planted = prompt.index(PLANTED.format(code=code)) + PLANTED.index("{")
    wanted = tokens(planted, planted + len(code))
    # The query that generates a token is the one before it.
    written = [number - 1 for number in tokens(end + answer.start(1), end + answer.end(1))]
    before = int(trace.generated[0].int().argmax())
    rows, seconds, layers = rows_of(trace, written)
    result: dict[str, Any] = {"right": True, "code": code, "tokens": before, "methods": {}}
    result["layers"] = [recall(values[:before], wanted, top) for values in layers]
    for name, values in rows.items():
        result["methods"][name] = {
            "recall": recall(values[:before], wanted, top),
            "first token": float(values[0] / values.sum()),
            "seconds": seconds[name],
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or name of a causal language model")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=4000, help="of a prompt, about")
    parser.add_argument("--top", type=int, default=10, help="tokens that count as found")
    parser.add_argument("--out", type=Path, default=Path("runs/planted-facts.json"), help="goes on from here")
    parser.add_argument("--report", type=Path, help="a file for the table, in Markdown")
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cuda = torch.cuda.is_available()
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(options.model, dtype=torch.float32).eval().to("cuda" if cuda else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    settings = {"model": Path(options.model).name, "tokens": options.tokens, "top": options.top}
    stored = json.loads(options.out.read_text()) if options.out.exists() else {**settings, "prompts": {}}
    if {name: stored[name] for name in settings} != settings:
        raise SystemExit(f"{options.out} holds other settings: give another --out")
    for number in range(options.prompts):
        if str(number) in stored["prompts"]:
            continue
        began = time.perf_counter()
        prompt, code = prompt_of(tokenizer, options.tokens, number)
        stored["prompts"][str(number)] = judged(model, tokenizer, prompt, code, options.top)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(options.out, json.dumps(stored, indent=1))
        took = time.perf_counter() - began
        left = took * (options.prompts - number - 1)
        print(f"prompt {number + 1} of {options.prompts}: {took:.0f} s, {left / 60:.0f} min left", flush=True)
    report(stored, options, torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU")


def cells(recalls: list[float]) -> list[str]:
    """The mean, and its 95 % interval over prompts by Student's t."""
    from scipy.stats import t

    values = np.array(recalls)
    spread = float("nan")
    if len(values) > 1:
        spread = float(t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5)
    return [f"{values.mean():.2f}", f"{values.mean() - spread:.2f} to {values.mean() + spread:.2f}"]


def report(stored: dict[str, Any], options: argparse.Namespace, device: str) -> None:
    """Print the table, and write it."""
    every = list(stored["prompts"].values())[: options.prompts]
    right = [each for each in every if each["right"]]
    title = (
        f"{stored['model']}: {len(right)} of {len(every)} answers are right; prompts of about "
        f"{options.tokens:,} tokens, the top {options.top}; {device}"
    )
    names = ["method", "recall of the planted code", "95 % interval over prompts", "first token's share", "s"]
    lines = []
    for method in METHODS if right else ():
        found = [each["methods"][method] for each in right]
        share, seconds = (float(np.mean([each[key] for each in found])) for key in ("first token", "seconds"))
        lines.append([method, *cells([each["recall"] for each in found]), f"{share:.2f}", f"{seconds:.1f}"])
    if len(right) > 1:
        layers = np.array([each["layers"] for each in right])
        best = [int(layers[half::2].mean(axis=0).argmax()) for half in (0, 1)]
        values = [float(row[best[1 - number % 2]]) for number, row in enumerate(layers)]
        lines.append([f"raw, best layer ({best[0] + 1} and {best[1] + 1})", *cells(values), "", ""])
    chance = options.top / np.mean([each["tokens"] for each in right]) if right else 0.0
    lines.append(["random order", f"{chance:.3f}", "", "", ""])
    table = Table(*names, title=title)
    for line in lines:
        table.add_row(*line)
    Console().print(table)
    if options.report is not None:
        rows = [names, ["---"] * len(names), *lines]
        shown = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        write_whole(options.report, f"# Planted facts\n\n{title}\n\n{shown}\n")


if __name__ == "__main__":
    main()
