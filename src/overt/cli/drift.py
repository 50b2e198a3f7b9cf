"""How much attaching changes a pretrained model before any training, by alpha, beta and init."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import torch
from torch import Tensor

import overt
from overt.cli.shared import EncoderOption, app
from overt.data.sst2 import packaged_rows
from overt.mechanisms.evolving import Evolving
from overt.recipes._runs import check_model, load_tokenizer

ALPHAS = (0.0, 0.1, 0.2, 0.5)
BETAS = (0.0, 0.1, 0.3)
SENTENCES = 64


def sentences(count: int = SENTENCES) -> list[str]:
    """The first of the sentences included in the package."""
    return [sentence for sentence, _ in packaged_rows()[:count]]


@torch.no_grad()
def states(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Last hidden states of the real tokens, (tokens, width)."""
    real = inputs["attention_mask"].bool()
    hidden: Tensor = model(**inputs).last_hidden_state
    return hidden[real]


def run(path: str) -> list[dict[str, Any]]:
    """Print and return cosines between a model's token states without and with Evolving attached."""
    from rich import box
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
    from transformers import AutoModel

    check_model(path)
    console = Console()
    tokenizer = load_tokenizer(path)
    model: Any = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    inputs = dict(tokenizer(sentences(), padding=True, return_tensors="pt"))
    plain = states(model, inputs)
    rows: list[dict[str, Any]] = []
    inits: tuple[Literal["dirac", "kaiming"], ...] = ("dirac", "kaiming")
    cases = list(itertools.product(inits, ALPHAS, BETAS))
    for init, alpha, beta in track(cases, "attaching", console=console, transient=True):
        if beta == 0.0 and init == "kaiming":
            continue  # beta is the weight of the convolution: at 0 its init makes no difference
        torch.manual_seed(0)
        overt.attach(model, Evolving(alpha=alpha, beta=beta, init=init))
        cosine = torch.nn.functional.cosine_similarity(states(model, inputs), plain, dim=-1)
        overt.detach(model)
        summary = {"least": cosine.min().item(), "mean": cosine.mean().item()}
        rows.append({"init": init, "alpha": alpha, "beta": beta, **summary})
    table = Table(
        title=f"Cosine between token states with and without Evolving, {SENTENCES} sentences", box=box.SIMPLE
    )
    for heading in ("init", "alpha", "beta", "least", "mean"):
        table.add_column(heading, justify="left" if heading == "init" else "right")
    for row in rows:
        cells = f"{row['alpha']:g}", f"{row['beta']:g}", f"{row['least']:.4f}", f"{row['mean']:.4f}"
        table.add_row(row["init"], *cells)
    console.print(table)
    return rows


@app.command(rich_help_panel="Attach to a pretrained model")
def drift(
    model: EncoderOption,
) -> None:
    """Show how much attaching Evolving changes a pretrained encoder, by alpha, beta and init."""
    run(model)
