"""Attached models compiled in place, `model.compile()` and `model.forward = torch.compile(model.forward)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch._dynamo.utils import counters

import overt
from attached import enliven
from selection import covering

EVOLVING, BAYESIAN = overt.Evolving(alpha=0.3, beta=0.3), overt.Bayesian(k=5.0, kl_weight=1.0)
FORMS = {"evolving": (EVOLVING,), "bayesian": (BAYESIAN,), "both": (EVOLVING, BAYESIAN)}
CALL, FORWARD = "model.compile()", "model.forward = torch.compile(model.forward)"
SMALL = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}

pytestmark = [
    # Compilers look whether the loss, which a hook reads, has a gradient.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch._dynamo.*"),
]


@pytest.fixture(autouse=True)
def _no_storm() -> Iterator[None]:
    """Fewer recompilations than torch gives up at, which it does in silence."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch.compiler.reset()


def made(name: str, form: str) -> Any:
    torch.manual_seed(0)
    if name == "BERT":
        wide = {"intermediate_size": 20, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model: Any = hf.BertForSequenceClassification(hf.BertConfig(**SMALL, **wide))
    elif name == "Llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, intermediate_size=20, num_key_value_heads=1))
    else:
        sizes = {"vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 2, "num_heads": 2}
        sizes["num_decoder_layers"] = 1  # where cross-attention is; the encoder has the chain
        model = hf.T5ForConditionalGeneration(
            hf.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, eos_token_id=None)
        )
    return enliven(overt.attach(model.eval(), *FORMS[form]))


def compile_in_place(model: Any, way: str) -> None:
    backend = "aot_eager" if isinstance(model, hf.BertForSequenceClassification) else "eager"
    if way == CALL:
        model.compile(backend=backend)
    else:
        model.forward = torch.compile(model.forward, backend=backend)


def inputs_of(name: str) -> dict[str, Tensor]:
    ids = torch.randint(5, 30, (2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2 if name == "BERT" else ids}


def step_of(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss of a training step, its KL, and all gradients."""
    model.train()
    model.zero_grad()
    model.overt_state.seen.zero_()
    loss = model(**inputs).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if "Bayesian" in {type(mechanism).__name__ for mechanism in model.overt_state.mechanisms}:
        found["KL"] = overt.kl(model).detach()
    model.eval()
    return {"loss": loss.detach(), **found}


def all_close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, atol=1e-6, rtol=1e-4, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form", "way"),
    covering(
        [
            ("BERT", "evolving", FORWARD),
            ("BERT", "bayesian", CALL),
            ("BERT", "both", CALL),
            ("T5", "both", FORWARD),
        ],
        # The other way is below. BERT with both is compiled in test_attach.py, and Bayesian alone in
        # test_losses.py.
        [("T5", "both", FORWARD)],
    ),
)
def test_outputs_and_gradients_are_those_of_the_model_uncompiled(name: str, form: str, way: str) -> None:
    model, inputs = made(name, form), inputs_of(name)
    with torch.no_grad():
        logits = model(**inputs).logits
    step = step_of(model, inputs)
    compile_in_place(model, way)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits, logits)
        all_close(step_of(model, inputs), step)
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", covering([CALL, FORWARD], [CALL]))
def test_generation_mixes_with_forwards_and_a_second_round_compiles_nothing(way: str) -> None:
    model, inputs = made("Llama", "both"), inputs_of("Llama")
    prompt = inputs["input_ids"]
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def found() -> list[Tensor]:
        with torch.no_grad():
            return [
                model.generate(prompt, **settings),
                model(**inputs).logits,
                model.generate(prompt, **settings),
            ]

    expected = found()
    compile_in_place(model, way)
    graphs = []
    for _ in range(2):
        for got, want in zip(found(), expected, strict=True):
            torch.testing.assert_close(got, want)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]
