"""Model types that `attach` refuses by name, before anything runs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import overt
from overt.attaching.refusals import Refusal, check_type, refusals
from zoo.inputs import batch_of, fitting, outputs_of, run
from zoo.models import build, config_of, model_class

pytestmark = pytest.mark.slow


def made(kind: str) -> Any:
    """A small model of a type, without any weights."""
    with torch.device("meta"):
        return model_class(kind)(config_of(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(refusals()))
def test_a_type_of_the_table_is_refused_by_name_without_weights(kind: str) -> None:
    model, refusal = made(kind), refusals()[kind]
    model.forward = None  # nobody may call it
    if refusal.where:
        overt.attach(model, overt.Bayesian(), where=list(refusal.where))
        overt.detach(model)
    before = dict(model.named_modules())
    start = time.perf_counter()
    with pytest.raises(ValueError, match=f"{kind}.* cannot be attached to") as error:
        overt.attach(model, overt.Evolving(), overt.Bayesian())
    took = time.perf_counter() - start
    assert refusal.reason in str(error.value)
    assert all(f'"{one}"' in str(error.value) for one in refusal.where)
    assert dict(model.named_modules()) == before
    assert took < 5.0  # no forward, whatever the machine


class Typed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.config = type("Config", (), {"model_type": kind})()


def test_what_would_do_is_let_through_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "odd": Refusal("it is odd", ("encoder", "cross")),
        "chunky": Refusal("it has chunks", rows=True),
        "partly": Refusal("its towers are odd", ("cross",), attentions=("Linear",)),
    }
    monkeypatch.setattr("overt.attaching.refusals.refusals", lambda: table)
    one, other = nn.Linear(1, 1), nn.Identity()
    check_type(Typed("even"), [("decoder", one)], lambda: True)
    check_type(Typed("odd"), [("encoder", one)], lambda: True)
    check_type(Typed("odd"), [("encoder", one), ("cross", one)], lambda: True)
    with pytest.raises(ValueError, match=r'it is odd; where=\["encoder", "cross"\] would do'):
        check_type(Typed("odd"), [("encoder", one), ("decoder", one)], lambda: False)
    check_type(Typed("chunky"), [("encoder", one)], lambda: False)
    with pytest.raises(
        ValueError, match="it has chunks; mechanisms that keep to their row, such as Bayesian"
    ):
        check_type(Typed("chunky"), [("encoder", one)], lambda: True)
    check_type(Typed("partly"), [("encoder", other), ("cross", one)], lambda: True)
    with pytest.raises(ValueError, match='its towers are odd; where="cross" would do'):
        check_type(Typed("partly"), [("encoder", other), ("encoder", one)], lambda: True)


def test_attentions_that_stay_plain_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = build("siglip")
    overt.attach(model, overt.Bayesian())
    overt.describe(model)
    assert "vision_model.head.attention (MultiheadAttention) is not dispatched, and stays plain" in (
        capsys.readouterr().out
    )


@torch.no_grad()
@pytest.mark.parametrize("mechanism", [overt.Bayesian(), overt.Evolving(alpha=0, beta=0)])
def test_attentions_that_nothing_is_attached_to_may_be_odd(mechanism: overt.Mechanism) -> None:
    model = build("conditional_detr").eval()
    batch = batch_of(model, fitting(model))
    plain = outputs_of(run(model, batch))
    overt.attach(model, mechanism, where="encoder")
    for name, ours in outputs_of(run(model, batch)).items():
        torch.testing.assert_close(ours, plain[name], atol=1e-4, rtol=1e-4)
