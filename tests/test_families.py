"""A sample of what `make families` does for every model type, and how it keeps its books."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

import support
import sweep
from selection import covering
from zoo.checks import judge
from zoo.models import model_types
from zoo.table import differences, page, refusals_of, write_page

# Types of many kinds, none of which has a row of its own in the battery.
SAMPLE = {
    "altclip": "works",
    "bamba": "works",  # recurrence between the attentions
    "bert-generation": "works",
    "cohere2": "works",
    "convnext": "refused",  # no attention
    "deberta": "refused",
    "deepseek_v3": "works",  # latent attention, experts
    "dinov2": "works",
    "falcon": "refused",
    "gpt_oss": "refused",  # sinks
    "hubert": "works",
    "jetmoe": "works",  # attention through experts
    "layoutlm": "works",
    "llava": "works",
    "m2m_100": "works",
    "recurrent_gemma": "works",
    "siglip": "works",
    "swin": "refused",  # windows
    "wav2vec2-conformer": "works",  # convolutions between the attentions
    "xlnet": "refused",
}
# One of each kind: two towers, recurrence, latent attention with experts, sound, an encoder–decoder;
# no attention, sinks, windows.
KEPT = ["altclip", "bamba", "deepseek_v3", "hubert", "m2m_100", "convnext", "gpt_oss", "swin", "xlnet"]


@pytest.fixture
def _quiet() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of families, which are not under test
@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("kind", covering(list(SAMPLE), KEPT))
def test_a_type_is_what_the_table_says(kind: str) -> None:
    record = judge(kind)
    assert (record["verdict"], record["reason"] if SAMPLE[kind] == "works" else "") == (SAMPLE[kind], "")


def test_every_type_of_the_battery_is_swept() -> None:
    kinds = model_types()
    assert len(kinds) > 400
    assert {"bert", "llama", "t5", "whisper", "vit", "clip", *SAMPLE} <= set(kinds)


RESULTS: dict[str, dict[str, Any]] = {
    "one": {"verdict": "works", "reason": "", "inputs": "text"},
    "two": {"verdict": "works", "reason": "", "inputs": "text"},
    "three": {
        "verdict": "refused",
        "reason": "model.layers.0.attn attends over 2 windows",
        "stage": "first forward",
        "where": ["decoder"],
    },
    "four": {"verdict": "could not be built", "reason": "a | b"},
}


def test_the_table_groups_types_and_counts_verdicts() -> None:
    table = page(RESULTS, {"transformers": "1", "torch": "2", "python": "3"})
    assert "| works | 2 |" in table
    assert "| text | one, two |" in table
    assert (
        'attends over n windows (raised at the first forward pass); `where="decoder"` works | three |'
        in table
    )
    assert "| a \\| b | four |" in table
    assert "### Wrong results\n\nNone." in table


def test_both_tables_live_in_one_page(tmp_path: Path) -> None:
    path = tmp_path / "support.md"
    support.write(path, "# first\n")
    assert path.read_text() == "# first\n"
    table = page(RESULTS, {"transformers": "1", "torch": "2", "python": "3"})
    write_page(path, table)
    write_page(path, table)
    assert path.read_text() == f"# first\n\n{table}"
    support.write(path, "# first again\n")
    assert path.read_text() == f"# first again\n\n{table}"


def test_differences_name_what_changed_its_verdict() -> None:
    new = {**RESULTS, "two": {"verdict": "WRONG", "reason": "moves"}}
    assert differences(RESULTS, new) == ["two: works → WRONG  moves"]
    assert differences(RESULTS, RESULTS) == []


def test_the_table_of_refusals_comes_from_verdicts() -> None:
    late = {"verdict": "refused", "stage": "first forward", "attention": "OddAttention"}
    results: dict[str, dict[str, Any]] = {
        "windows": {
            **late,
            "reason": "layers.0.attn attends over 8 windows or groups of its 2 inputs",
        },
        "pictures": {
            **late,
            "reason": "visual.blocks.0.attn attends over 1 windows or groups of its 4 inputs; so no",
            "where": ["decoder"],
        },
        "told": {**late, "reason": "layers.0.attn ran twice in one forward pass", "bayesian alone": True},
        "prefix": {
            **late,
            "reason": "layers.0.attn was taken for causal, but its mask is not",
        },
        "early": {"verdict": "refused", "stage": "attach", "reason": "no place"},
        "harmful": {"verdict": "WRONG", "reason": "outputs move", "where": ["encoder"]},
        "wrong": {"verdict": "WRONG", "reason": "outputs move"},
        "mended": {"verdict": "works", "reason": ""},
    }
    old = {"reason": "by hand", "where": [], "rows": False, "attentions": []}
    before = {"told": old, "harmful": old, "mended": old}
    assert refusals_of(results, before, "1") == {
        "transformers": "1",
        "types": {
            "windows": {
                "reason": "its attentions attend over windows or groups of each input",
                "where": [],
                "rows": False,
                "attentions": [],
            },
            "pictures": {
                "reason": "its vision tower attends over several pictures at once",
                "where": ["decoder"],
                "rows": False,
                "attentions": ["OddAttention"],
            },
            "told": {"reason": "by hand", "where": [], "rows": True, "attentions": []},
            "harmful": {"reason": "by hand", "where": ["encoder"], "rows": False, "attentions": []},
        },
    }
    assert results["harmful"]["verdict"] == "refused"
    assert results["wrong"]["verdict"] == "WRONG"
    assert (results["prefix"]["stage"], results["windows"]["stage"]) == ("first forward", "attach")


def test_the_librarys_table_is_that_of_the_last_sweep() -> None:
    """Whoever edits one has to run the other."""
    swept = json.loads((sweep.ROOT / "results" / "families.json").read_text())
    table = json.loads(sweep.TABLE.read_text())
    assert table["transformers"] == swept["versions"]["transformers"]
    assert swept["counts"]["WRONG"] == 0
    for kind, refusal in table["types"].items():
        record = swept["types"][kind]
        if record["verdict"] != "could not be built":
            assert (record["verdict"], record["reason"]) == ("refused", refusal["reason"])
            assert record.get("where", []) == refusal["where"]


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    part = tmp_path / "part.jsonl"
    part.write_text(sweep.key() + "\n" + json.dumps(["one", RESULTS["one"]]) + "\n")
    assert sweep.sweep(["one"], part, workers=1, seconds=60) == {"one": RESULTS["one"]}
    part.write_text("other code\n" + json.dumps(["one", RESULTS["one"]]) + "\n")
    assert sweep.read_part(part) == {}


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced_and_its_type_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, sys, time\n"
        "say = lambda **news: print(json.dumps(news), flush=True)\n"
        "say(ready=True)\n"
        "for kind in map(str.strip, sys.stdin):\n"
        "    say(stage='build' if kind == 'early' else 'training')\n"
        "    if kind in ('early', 'late'): sys.exit(1)\n"
        "    while kind == 'endless': pass\n"
        "    say(kind=kind, record={'verdict': 'works', 'reason': ''})\n"
    )
    start = subprocess.Popen

    def instead(_: list[str], **settings: Any) -> Any:
        return start([sys.executable, str(script)], **settings)

    monkeypatch.setattr(subprocess, "Popen", instead)
    kinds = ["early", "fine", "late", "endless", "well"]
    results = sweep.sweep(kinds, tmp_path / "part.jsonl", workers=2, seconds=1.5)
    assert {kind: record["verdict"] for kind, record in results.items()} == {
        "early": "could not be built",
        "fine": "works",
        "late": "WRONG",
        "endless": "WRONG",
        "well": "works",
    }
    assert results["late"]["reason"] == "the process died (training)"
