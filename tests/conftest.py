"""Settings and helpers that several test files share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

import interpreter

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the hub, for minutes, where there is none

# One profile for all: no timing enters a verdict, and a failure can be repeated.
settings.register_profile(
    "overt", deadline=None, max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("overt")

# Helpers whose assertions are worth as much as those of tests.
pytest.register_assert_rewrite("attached", "battery", "sharded", "training")

# Without a GPU its kernels are run by Triton's interpreter, chosen before anything imports them.
if not torch.cuda.is_available() and find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"
    interpreter.trim()

# Workers share the cores: with a thread of torch's for each core, they would wait for each other.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    share = max(1, (os.cpu_count() or 1) // workers)
    torch.set_num_threads(share)
    os.environ.setdefault("OMP_NUM_THREADS", str(share))  # of processes that tests start

# What is imported stays: looking through it for garbage, again and again, is a tenth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# torch gives most warnings once per process; then which test fails for one would depend on their order.
torch.set_warn_always(True)


# Without a GPU, `torch.manual_seed` notes where it was called from, which takes longer than many a test.
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _seeded() -> None:
    _seed(0)


@pytest.fixture(autouse=True)
def _onednn_as_it_was() -> Iterator[None]:
    """On a CPU without bfloat16 its first product makes torch turn oneDNN off, for all that comes after."""
    enabled = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = enabled


def live_kernel(
    heads: int, size: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """A random convolution with bias whose ReLU lets much through."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(heads, heads, size, size, generator=generator, dtype=dtype) * 0.5
    bias = torch.rand(heads, generator=generator, dtype=dtype) + 0.5
    return weight, bias


def random_maps(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal maps that do not depend on the global generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# `pytest --support FILE` writes what the tests recorded of families and features (`make support`).
_records: list[tuple[int, tuple[str, str, str]]] = []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that is slow as a whole is not even imported for `make test-quick`."""
    if "not slow" not in config.getoption("markexpr") or not collection_path.name.startswith("test_"):
        return None
    return "\npytestmark = pytest.mark.slow\n" in collection_path.read_text() or None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--support", type=Path, help="write family × feature, as recorded by the tests, to a file"
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        for name, value in report.user_properties:
            if name == "support" and isinstance(value, tuple | list):
                order, *record = value
                _records.append((int(order), (record[0], record[1], record[2])))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path = session.config.getoption("--support")
    if path is None or exitstatus != 0 or hasattr(session.config, "workerinput"):
        return
    import transformers

    from battery import DECODING, FEATURES
    from support import render, write

    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    features = [feature for feature in FEATURES if feature not in DECODING]
    records = [record for _, record in sorted(_records)]
    write(path, render(records, features, list(DECODING), versions))
