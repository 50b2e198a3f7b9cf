"""What attached models install in the process, and when: nothing before the first of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import overt
from attached import enliven
from families import FAMILIES, inputs_of
from fresh import fresh

BERT = next(family for family in FAMILIES if family.name == "BERT")
HOOKS = "from torch.optim.optimizer import _global_optimizer_post_hooks as hooks\n"
pytestmark = pytest.mark.slow


def printed(code: str) -> str:
    """What a fresh interpreter prints; families and Overt can be imported there."""
    found, failed = fresh(code)
    assert not failed, failed
    return found


def test_importing_overt_installs_nothing_and_the_first_attached_model_one_hook() -> None:
    found = printed(
        "import torch\n" + HOOKS + "import overt\n"
        "counts = [len(hooks)]\n"
        "from transformers import AttentionInterface\n"
        "known = 'overt' in AttentionInterface().valid_keys()\n"
        "from families import FAMILIES\n"
        "make = next(family.make for family in FAMILIES if family.name == 'BERT')\n"
        "for _ in range(2):\n"
        "    model = overt.attach(make(), overt.Bayesian())\n"
        "    counts.append(len(hooks))\n"
        "import copy\n"
        "copy.deepcopy(model)\n"
        "print(counts, len(hooks), known, 'overt' in AttentionInterface().valid_keys())"
    )
    assert found == "[0, 1, 1] 1 False True"


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    model = enliven(overt.attach(BERT.make(), overt.Evolving(0.3, 0.3), overt.Bayesian()))
    inputs = inputs_of(BERT)
    traced = overt.trace(model, inputs)
    torch.save((model, inputs, model(**inputs).logits.detach(), traced.maps), tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_a_model_that_is_unpickled_in_a_fresh_process_runs_trains_and_is_traced(pickled: Path) -> None:
    found = printed(
        "import torch\n"
        + HOOKS
        + f"model, inputs, want, maps = torch.load({str(pickled)!r}, weights_only=False)\n"
        "torch.testing.assert_close(model(**inputs).logits, want)\n"
        "import overt\n"
        "for a, b in zip(overt.trace(model, inputs).maps, maps, strict=True):\n"
        "    torch.testing.assert_close(a, b)\n"
        "optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)\n"
        "model(**inputs, labels=torch.tensor([0, 1, 1])).loss.backward()\n"
        "optimizer.step()\n"
        "print(int(model.overt_state.step), len(hooks))"
    )
    assert found == "1 1"


def test_a_model_whose_first_use_in_a_process_is_a_trace(pickled: Path) -> None:
    found = printed(
        "import torch, overt\n"
        f"model, inputs, _, maps = torch.load({str(pickled)!r}, weights_only=False)\n"
        "for a, b in zip(overt.trace(model, inputs).maps, maps, strict=True):\n"
        "    torch.testing.assert_close(a, b)\n"
        "print('same')"
    )
    assert found == "same"


def test_threads_that_attach_at_once_install_one_hook() -> None:
    found = printed(
        "import threading, torch\n" + HOOKS + "import overt\n"
        "from families import FAMILIES\n"
        "make = next(family.make for family in FAMILIES if family.name == 'BERT')\n"
        "models, barrier = [make() for _ in range(4)], threading.Barrier(4)\n"
        "def run(model):\n"
        "    barrier.wait()\n"
        "    overt.attach(model, overt.Bayesian())\n"
        "threads = [threading.Thread(target=run, args=(model,)) for model in models]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
        "print(len(hooks))"
    )
    assert found == "1"
