"""The page's modules in Node.js: every tests/page/*.test.js, with fields that Python packed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from overt.view.pack import pack, unpack
from traces import maps

pytest_plugins = ["browser"]
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent / "page"


def packed(path: Path) -> None:
    """Fields of all sorts with what they read as here."""
    fields = {
        "softmax": (maps(3, 17, 23, sharp=4.0), 0.98),
        "causal": (maps(2, 12, 12, causal=True), 0.98),
        "all of it": (maps(1, 9, 9), 1.0),
        "signed": (torch.randn(2, 7, 11), 0.9),
        "zeros": (torch.zeros(2, 3, 5), 0.98),
        "one column": (torch.rand(1, 6, 1), 0.98),
        "no column": (torch.zeros(1, 6, 0), 0.98),
        "one cell": (torch.tensor([[[0.25]]]), 0.98),
        "far apart": (torch.tensor([[[1e30, 1e-30, 1.0], [1e-20, 2e-20, 0.0]]]), 1.0),
        "no numbers": (torch.tensor([[[torch.nan, 1.0], [torch.inf, -2.0]]]), 0.98),
    }
    cases: list[dict[str, Any]] = []
    for (name, (cells, mass)), small in itertools.product(fields.items(), (-1, 1 << 60)):
        with mock.patch("overt.view.pack.SMALL", small):  # codes of one byte, and of two
            about, data = pack(cells, mass)
        found, dropped = unpack(about, data)
        here = {"cells": found.tolist(), "dropped": dropped.tolist()}
        cases.append({"name": name, "about": about, "data": base64.b64encode(data).decode(), **here})
    path.write_text(json.dumps(cases))


def test_modules_of_the_page(node: str, tmp_path: Path) -> None:
    packed(tmp_path / "fields.json")
    files = sorted(str(path) for path in HERE.glob("*.test.js"))
    assert files
    variables = {**os.environ, "OVERT_FIELDS": str(tmp_path / "fields.json"), "NO_COLOR": "1"}
    variables.pop("NODE_OPTIONS", None)
    command = [node, "--test", "--test-reporter=spec", *files]
    run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert "skipped 0" in run.stdout, (
        "a test that is skipped everywhere tests nothing:\n" + run.stdout[-4000:]
    )
