"""The local server: what it answers, what it refuses, and that it stays up."""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import os
import pickle
import re
import signal
import socket
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

pytest.importorskip("starlette", reason="needs starlette")
pytest.importorskip("uvicorn", reason="needs uvicorn")
Image = pytest.importorskip("PIL.Image", reason="needs pillow")


import overt  # noqa: E402
from families import IMAGE, PAIR, TEXT, build  # noqa: E402
from fresh import start  # noqa: E402
from overt.cli import serve as command  # noqa: E402
from overt.tracing.mixing.mixing import mixings  # noqa: E402
from overt.view.server import (  # noqa: E402
    Limits,
    Served,
    app,
    host_of,
    is_loopback,
    judge_request,
    trace_request,
)
from overt.view.server.run import bound, server  # noqa: E402
from overt.view.server.trace_request import clean  # noqa: E402
from overt.view.server.work import Cache  # noqa: E402
from writing import byte_tokenizer, tiny  # noqa: E402

pytest_plugins = ["browser"]
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "the", "key", "to", "cabinets", "lies", "here", "wait"]
ROOT = Path(__file__).parent.parent
JSON = {"Content-Type": "application/json"}
HEAD = b"POST /api/trace HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def tokenizer() -> Any:
    pieces = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    pieces.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=pieces, **names)


class Gated:
    """A tokenizer at which texts with the word "wait" wait until the gate is open."""

    def __init__(self) -> None:
        self.inner, self.gate = tokenizer(), threading.Event()
        self.gate.set()

    def __call__(self, text: str = "", **more: Any) -> Any:
        if "wait" in text:
            assert self.gate.wait(30)
        return self.inner(text, **more) if text else self.inner(**more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Processor:
    def __call__(self, images: Any, return_tensors: str) -> dict[str, torch.Tensor]:
        assert return_tensors == "pt"
        small = [torch.tensor(list(one.resize((24, 24)).tobytes())) for one in images]
        return {"pixel_values": torch.stack(small).view(-1, 24, 24, 3).permute(0, 3, 1, 2) / 255}


gated = Gated()


@pytest.fixture(scope="module")
def served() -> dict[str, Served]:
    bert = build(hf.BertForSequenceClassification, lambda: hf.BertConfig(**TEXT))()
    bart = build(hf.BartForConditionalGeneration, lambda: hf.BartConfig(**PAIR))()
    vit = build(hf.ViTForImageClassification, lambda: hf.ViTConfig(**IMAGE))()
    secret = {"/srv/models/bert": "bert"}
    return {
        "bert": Served("bert", bert, gated, layers=3, secrets=secret),
        "bart": Served("bart", bart, tokenizer(), layers=3),
        "vit": Served("vit", vit, processor=Processor(), kind="image", layers=3),
    }


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        assert self.headers["content-type"] == "application/json"
        assert set(self.json) == {"error"}
        line: str = self.json["error"]
        assert "\n" not in line
        assert "Traceback" not in line
        return line


class Running:
    """A real server on a free port of this machine."""

    def __init__(self, models: dict[str, Served], limits: Limits, **more: Any) -> None:
        self.socket = bound("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.application = app(models, limits, threads=1, **more)
        self.server = server(self.application, limits)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))
        self.thread.start()

    @property
    def state(self) -> Any:
        return self.application.state.serving

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, found, answer.read())
        finally:
            connection.close()

    def trace(self, text: Any, **more: Any) -> Reply:
        return self.ask("POST", "/api/trace", json.dumps({"model": "bert", "text": text, **more}), JSON)

    def picture(self, data: bytes, kind: str = "image/png", query: str = "model=vit") -> Reply:
        return self.ask("POST", f"/api/trace?{query}", data, {"Content-Type": kind})

    def raw(self, data: bytes) -> bytes:
        """What comes back for these bytes until the server closes, as it should."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as client:
            client.sendall(data)
            found = b""
            while piece := client.recv(65536):
                found += piece
            return found

    def until(self, true: Callable[[], bool]) -> None:
        for _ in range(3000):
            if true():
                return
            time.sleep(0.01)
        raise AssertionError("it never came to pass")


@contextmanager
def running(models: dict[str, Served], **limits: Any) -> Iterator[Running]:
    made = Running(models, Limits(**limits))
    try:
        made.until(lambda: made.server.started)
        yield made
    finally:
        gated.gate.set()
        made.server.should_exit = True
        made.thread.join(30)
        assert not made.thread.is_alive()


@pytest.fixture(scope="module")
def up(served: dict[str, Served]) -> Iterator[Running]:
    with running(served) as made:
        yield made


@pytest.fixture
def closed_gate() -> Iterator[threading.Event]:
    gated.gate.clear()
    yield gated.gate
    gated.gate.set()


def later(pool: ThreadPoolExecutor, up: Running, text: str) -> Future[Reply]:
    return pool.submit(up.trace, text)


def png(width: int = 30, height: int = 20, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(out, kind)
    return out.getvalue()


# What it answers


def test_a_sentence_comes_back_as_a_trace_with_a_link(up: Running) -> None:
    found = up.trace("the key to cabinets", methods=["rollout", "raw"])
    assert found.status == 200, found.body
    answer = found.json
    assert set(answer) == {"index", "blocks", "link", "seconds"}
    assert "cabinets" in json.dumps(answer["index"])
    for block in answer["blocks"]:
        assert base64.b64decode(block, validate=True)
    asked = parse_qs(urlsplit(answer["link"]).query)
    assert asked == {"model": ["bert"], "text": ["the key to cabinets"], "method": ["raw", "rollout"]}


class Paced:
    """A small language model that writes, and waits before it writes a token while its gate is closed."""

    def __init__(self) -> None:
        self.model, self.tokenizer = tiny("Llama"), byte_tokenizer()
        self.gate, self.passes = threading.Event(), 0
        self.after = 3  # passes that do not wait
        self.gate.set()
        self.model.register_forward_pre_hook(self._pass)

    def _pass(self, *_: Any) -> None:
        self.passes += 1
        if self.passes > self.after:
            assert self.gate.wait(30)

    def begin(self, closed: bool = True) -> None:
        self.passes = 0
        (self.gate.clear if closed else self.gate.set)()


@pytest.fixture(scope="module")
def paced() -> Paced:
    return Paced()


@pytest.fixture(scope="module")
def writer(served: dict[str, Served], paced: Paced) -> Iterator[Running]:
    llama = Served("llama", paced.model, paced.tokenizer, layers=2)
    with running({"llama": llama, "bert": served["bert"]}) as made:
        yield made
        paced.gate.set()


def asking(up: Running, text: str, count: Any, **more: Any) -> tuple[http.client.HTTPConnection, Any]:
    """A request whose answer is read line by line."""
    connection = http.client.HTTPConnection("127.0.0.1", up.port, timeout=30)
    body = {"model": "llama", "text": text, "generate": count, **more}
    connection.request("POST", "/api/trace", json.dumps(body), JSON)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    assert answer.getheader("Content-Type") == "application/x-ndjson"
    return connection, answer


def test_words_come_as_they_are_written_with_their_rows_and_then_the_trace(
    writer: Running, paced: Paced
) -> None:
    text = "The code of the vault is"
    want = overt.trace(paced.model, text, tokenizer=paced.tokenizer, generate=8)
    start = want.turns[0][1].start
    paced.begin()
    connection, answer = asking(writer, text, 8)
    with closing(connection):
        lines = [json.loads(answer.readline()) for _ in range(4)]
        writer.until(lambda: paced.passes == 4)  # it waits, and three words are here already
        assert "".join(lines[0]["prompt"]) == text
        assert len(lines[0]["prompt"]) == start
        other, late = asking(writer, text, 8)  # hears the same from the beginning
        with closing(other):
            heard = [late.readline() for _ in range(4)]
            assert [json.loads(line) for line in heard] == lines
            paced.gate.set()
            lines += [json.loads(line) for line in answer]
            heard += list(late)
    assert [json.loads(line) for line in heard] == lines
    words = lines[1:-1]
    assert len(words) == 8
    assert "".join(lines[0]["prompt"] + [line["word"] for line in words]) == want.texts[0]
    for step, line in enumerate(words):
        row = want.raw(start - 1 + step)[0].mean(dim=0)[0]
        assert line["row"] == pytest.approx(row[: start + step].tolist(), abs=1e-4)
        assert not row[start + step :].any()
    assert paced.passes == 8 + 1, "each word once, and one pass over them all"
    entry = lines[-1]["index"]["traces"][0]
    assert entry["rows"]["generated"] == [start, start + 8]
    assert {"raw", "rollout"} <= set(entry["fields"])
    assert entry["missing"]["flow"] == "flow of each generated word would take the server too long"
    assert parse_qs(urlsplit(lines[-1]["link"]).query)["generate"] == ["8"]
    passes = paced.passes
    connection, answer = asking(writer, text, 8)
    with closing(connection):
        assert [set(json.loads(line)) for line in answer] == [{"index", "blocks", "link", "seconds"}]
    assert paced.passes == passes, "the answer is cached"


def test_a_client_that_leaves_stops_the_writing(writer: Running, paced: Paced) -> None:
    paced.begin()
    skipped = writer.state.metrics.counts["skipped"]
    connection, answer = asking(writer, "Keep it safe", 200)
    assert "prompt" in json.loads(answer.readline())
    assert "word" in json.loads(answer.readline())
    answer.close()
    connection.close()
    writer.until(lambda: not any(job.waiters for job in writer.state.work._jobs.values()))
    paced.gate.set()
    writer.until(lambda: writer.state.metrics.counts["skipped"] == skipped + 1)
    assert paced.passes <= 5, "of 200"
    paced.begin(closed=False)
    connection, answer = asking(writer, "Keep it safe", 2)
    with closing(connection):
        assert len(list(answer)) == 4


def test_what_fails_after_the_first_word_is_the_last_line(
    writer: Running, paced: Paced, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("no page today")

    monkeypatch.setattr(trace_request, "page", fail)
    paced.begin(closed=False)
    connection, answer = asking(writer, "It is", 2)
    with closing(connection):
        lines = [json.loads(line) for line in answer]
    assert lines[-1] == {"error": "no page today", "status": 422}
    assert len(lines) == 4


def test_writing_that_takes_too_long_ends_with_a_line_that_says_so(paced: Paced) -> None:
    paced.begin()
    with running({"llama": Served("llama", paced.model, paced.tokenizer, layers=2)}, seconds=0.5) as made:
        connection, answer = asking(made, "It is", 9)
        with closing(connection):
            lines = [json.loads(line) for line in answer]
        paced.gate.set()
    assert lines[-1]["status"] == 504
    assert lines[-1]["error"].startswith("no answer within 0.5 s")
    assert [next(iter(line)) for line in lines[:-1]] == ["prompt", "word", "word", "word"]


@pytest.mark.parametrize(
    ("more", "status", "line"),
    [
        ({"generate": 0}, 400, "generate must be a whole number from 1 to 256"),
        ({"generate": True}, 400, "generate must be a whole number from 1 to 256"),
        ({"generate": "8"}, 400, "generate must be a whole number from 1 to 256"),
        ({"generate": 257}, 400, "generate must be a whole number from 1 to 256"),
        ({"generate": 4, "model": "bert"}, 400, "model 'bert' cannot generate after a text: leave generate"),
        (
            {"generate": 4, "mixing": "value-zeroing"},
            400,
            "of generated words would take the server too long",
        ),
        ({"generate": 4, "text": " "}, 400, "text must contain words, got nothing"),
        ({"generate": 4, "text": "a" * 3000}, 413, "text must have at most 256 tokens"),
    ],
)
def test_what_cannot_be_written_is_refused(writer: Running, more: Any, status: int, line: str) -> None:
    found = writer.trace(**{"text": "the key", "model": "llama", **more})
    assert found.status == status
    assert line in found.error


def judged(up: Running, text: Any, **more: Any) -> Reply:
    return up.ask("POST", "/api/judge", json.dumps({"model": "bert", "text": text, **more}), JSON)


def test_explanations_of_a_sentence_are_judged_at_once(up: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(up, "the <b>key</b> to cabinets")
    assert found.status == 200, found.body
    answer = found.json
    assert parse_qs(urlsplit(answer["link"]).query)["judge"] == ["1"]
    index = answer["judged"]
    (entry,) = index["texts"]
    assert entry["words"] == ["the", "<b>key</b>", "to", "cabinets"]
    assert {"raw", "rollout", "flow", "gradient-input", "blankout", "random"} <= set(entry["methods"])
    for own in entry["methods"].values():
        assert own["probabilities"][0] == pytest.approx(entry["probability"], abs=1e-3), "nothing is deleted"
    assert all(set(row["measures"]) == {"comprehensiveness", "sufficiency"} for row in index["methods"])
    monkeypatch.setattr(judge_request, "SCORING", 0.0)
    slow = judged(up, "the key").json["judged"]
    assert slow["methods"] == []
    assert "would take the server too long" in slow["refused"][0]["reason"]


@pytest.mark.parametrize(
    ("text", "more", "status", "line"),
    [
        ("the key", {"model": "bart"}, 400, "'bart' is no classifier of texts"),
        ("the key", {"model": "vit"}, 400, "'vit' is no classifier of texts"),
        ("the key", {"model": "other"}, 404, "there is no model 'other' here"),
        ("the key", {"methods": ["raw"]}, 400, "methods"),
        (" ", {}, 400, "text must contain words"),
        (7, {}, 400, "text must be a string"),
        ("key " * 300, {}, 413, "at most 256 tokens"),
    ],
)
def test_what_cannot_be_judged_is_refused_in_one_line(
    up: Running, text: Any, more: dict[str, Any], status: int, line: str
) -> None:
    found = judged(up, text, **more)
    assert found.status == status
    assert line in found.error


def test_judging_is_kept_from_other_pages_and_types(up: Running) -> None:
    body = json.dumps({"model": "bert", "text": "the key"})
    assert up.ask("POST", "/api/judge", body, {"Content-Type": "text/plain"}).status == 415
    assert up.ask("POST", "/api/judge", body, {**JSON, "Origin": "https://other.example"}).status == 403


def test_decoders_are_fed_or_write_themselves(up: Running) -> None:
    fed = up.trace("the key", model="bart", decoder="key lies here", methods=["raw"])
    assert fed.status == 200, fed.body
    assert "lies" in json.dumps(fed.json["index"])
    assert up.trace("the key", model="bart", methods=["raw"]).status == 200
    assert up.trace("the key", decoder="key").error == "model 'bert' has no decoder that takes a text"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_images_of_five_formats_are_traced(up: Running, kind: str) -> None:
    found = up.picture(png(kind=kind), f"image/{kind.lower()}", "model=vit&methods=raw")
    assert found.status == 200, found.body


def test_a_picture_has_a_link_as_long_as_it_is_kept(served: dict[str, Served]) -> None:
    with running(served, cache=2) as up:
        first = up.picture(png(), query="model=vit&methods=raw")
        name = parse_qs(urlsplit(first.json["link"]).query)["picture"][0]
        again = up.ask("GET", f"/api/picture?name={name}")
        assert again.body == first.body
        for width in (31, 32):
            assert up.picture(png(width), query="model=vit&methods=raw").status == 200
        gone = up.ask("GET", f"/api/picture?name={name}")
        assert gone.status == 404
        assert "no longer cached" in gone.error


def test_layers_and_mixings_are_taken(up: Running) -> None:
    kinds = [{"mixing": name} for name in mixings() if name != "attention"]
    for more in ({"layers": 1}, *kinds):
        found = up.trace("the key lies", methods=["raw"], **more)
        assert found.status == 200, found.body
        ((name, value),) = more.items()
        assert parse_qs(urlsplit(found.json["link"]).query)[name] == [str(value)]


def test_what_runs_the_model_is_asked_for_and_bounded(up: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = up.trace("the key lies").json["index"]["traces"]
    assert entry["importances"] == []
    assert entry["missing"]["blankout"] == "blank-out was not requested"
    (entry,) = up.trace("the key lies", methods=["raw", "blankout"]).json["index"]["traces"]
    assert [one["method"] for one in entry["importances"]] == ["blankout"]
    monkeypatch.setattr(trace_request, "RUNNING", 0.0)
    (entry,) = up.trace("the key lies by", methods=["raw", "blankout"]).json["index"]["traces"]
    assert entry["importances"] == []
    assert "would take the server too long" in entry["missing"]["blankout"]
    monkeypatch.setattr(trace_request, "TRACING", 0.0)
    refused = up.trace("the key lies by", mixing="value-zeroing")
    assert refused.status == 422
    assert "value zeroing of 6 tokens would take the server too long" in refused.error


def test_the_page_runs_its_own_script_and_no_other(up: Running) -> None:
    found = up.ask("GET", "/?model=bert&text=%3Cscript%3Ealert(1)%3C/script%3E")
    policy, page = found.headers["content-security-policy"], found.body.decode()
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    assert "alert(1)" not in page, "what a link says is for the script to read"
    for tag in ("script", "style"):
        inside = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", page, re.S)
        assert len(inside) == 1
        digest = base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert not re.search(r"<[^>]* (on\w+|style|src)=", page.partition("<script")[0])


def test_a_head_has_no_body(up: Running) -> None:
    found = up.ask("HEAD", "/")
    assert (found.status, found.body) == (200, b"")
    assert int(found.headers["content-length"]) == len(up.ask("GET", "/").body)


def test_every_answer_has_the_headers_that_keep_others_out(up: Running) -> None:
    for method, path in (
        ("GET", "/"),
        ("GET", "/nowhere"),
        ("PUT", "/"),
        ("GET", "/health"),
        ("POST", "/api/trace"),
    ):
        headers = up.ask(method, path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["cache-control"] == "no-store"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers


def test_health_models_and_metrics(up: Running) -> None:
    assert up.ask("GET", "/health").json["status"] == "ok"
    listed = up.ask("GET", "/api/models").json
    assert {one["name"]: (one["kind"], one["decoder"], one["layers"]) for one in listed["models"]} == {
        "bert": ("text", False, 3),
        "bart": ("text", True, 3),
        "vit": ("image", False, 3),
    }
    up.ask("GET", "/never/heard/of")
    text = up.ask("GET", "/metrics").body.decode()
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) .+|\w+(\{(\w+="[^"]*",?)+\})? [\d.e+-]+', line), line
    assert 'overt_requests_total{route="/health",status="200"}' in text
    assert 'overt_requests_total{route="other",status="404"}' in text
    assert "never/heard" not in text, "addresses that clients make up are no labels"
    assert "overt_queue 0" in text


def test_only_the_layers_asked_for_are_sent(up: Running) -> None:
    whole, last = (up.trace("the key lies here", layers=n).json for n in (3, 1))
    fields, cut = (one["index"]["traces"][0]["fields"] for one in (whole, last))
    assert set(cut) == set(fields)
    for name, layers in cut.items():
        assert layers[:2] == [None, None]
        now, before = last["blocks"][layers[2]["at"]], whole["blocks"][fields[name][2]["at"]]
        assert now == before
    assert 3 * len(last["blocks"]) == len(whole["blocks"])
    assert "only the last 1 of 3 layers" in last["index"]["traces"][0]["missing"]["layers"]


def test_heads_are_sent_as_long_as_they_are_few(up: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def heads(text: str, **more: Any) -> int:
        return int(up.trace(text, methods=["raw"], **more).json["index"]["traces"][0]["heads"])

    assert heads("the key lies to") == 4
    assert heads("the key lies to", mixing="norm") == 0, "the norm of a sum is not the mean of norms"
    monkeypatch.setattr(trace_request, "CELLS", 10)
    assert heads("the key lies to cabinets") == 0


# Sharing and keeping


def test_equal_requests_are_computed_once(served: dict[str, Served], closed_gate: threading.Event) -> None:
    with running(served) as up, ThreadPoolExecutor(3) as pool:
        asked = [later(pool, up, "wait here") for _ in range(3)]
        up.until(lambda: up.state.metrics.counts["shared"] == 2)
        closed_gate.set()
        bodies = {one.result().body for one in asked}
        assert len(bodies) == 1
        assert up.trace("wait here").body in bodies
        counts = up.state.metrics.counts
        assert (counts["traces"], counts["cache_hits"]) == (1, 1)


def test_the_cache_forgets_by_number_and_by_size() -> None:
    cache = Cache(2, 10)
    for key in "abc":
        cache.put(key, b"xxxx")
    assert [cache.get(key) for key in "abc"] == [None, b"xxxx", b"xxxx"]
    cache.get("b")
    cache.put("d", b"xxxxxx")
    assert cache.get("c") is None, "the one used longest ago goes first"
    assert (cache.get("b"), cache.size) == (b"xxxx", 10)
    cache.put("e", b"x" * 11)
    assert cache.get("e") is None
    assert len(Cache(0, 10)) == 0


# Load


@pytest.mark.slow
def test_fifty_at_once_are_answered_or_told_that_it_is_busy(
    served: dict[str, Served], closed_gate: threading.Event
) -> None:
    with running(served, queue=8) as up, ThreadPoolExecutor(50) as pool:
        asked = [later(pool, up, f"wait {'key ' * n}") for n in range(1, 51)]
        up.until(lambda: up.state.metrics.counts["busy"] == 41)
        health = up.ask("GET", "/health").json
        assert (health["status"], health["running"], health["waiting"]) == ("ok", 1, 8)
        closed_gate.set()
        found = [one.result() for one in asked]
        busy = [one for one in found if one.status == 503]
        assert sorted({one.status for one in found}) == [200, 503]
        assert len(busy) == 41
        for one in busy:
            assert one.error == "busy: 8 requests are waiting, try again in a moment"
            assert int(one.headers["retry-after"]) >= 1

        def patient(text: str) -> int:
            while (found := up.trace(text, methods=["raw"])).status == 503:
                time.sleep(0.05)
            return found.status

        everybody = list(pool.map(patient, [f"here {'to ' * n}" for n in range(1, 26)]))
        assert everybody == [200] * 25, "who asks again is answered"
        assert up.ask("GET", "/health").json["waiting"] == 0
        assert up.state.bodies.held == 0


def test_connections_beyond_the_limit_are_told_too(served: dict[str, Served]) -> None:
    with running(served, connections=2) as up:
        idle = [socket.create_connection(("127.0.0.1", up.port)) for _ in range(2)]
        up.until(lambda: len(up.server.server_state.connections) == 2)
        found = up.ask("GET", "/health")
        assert (found.status, found.headers["retry-after"]) == (503, "2")
        assert "too many connections" in found.error
        for one in idle:
            one.close()
        up.until(lambda: not up.server.server_state.connections)
        assert up.ask("GET", "/health").status == 200


def test_who_left_before_his_turn_is_skipped(served: dict[str, Served], closed_gate: threading.Event) -> None:
    with running(served) as up, ThreadPoolExecutor(1) as pool:
        first = later(pool, up, "wait")
        up.until(lambda: up.state.work.running == 1)
        body = json.dumps({"model": "bert", "text": "the key"}).encode()
        head = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
        with socket.create_connection(("127.0.0.1", up.port)) as client:
            client.sendall(head + body)
            up.until(lambda: up.state.work.waiting == 1)
        up.until(lambda: up.state.work.waiting == 0)
        closed_gate.set()
        assert first.result().status == 200
        assert up.state.metrics.counts["skipped"] == 1
        assert up.state.metrics.counts["traces"] == 1


def test_an_answer_that_takes_too_long_is_given_up(
    served: dict[str, Served], closed_gate: threading.Event
) -> None:
    with running(served, seconds=0.2) as up:
        found = up.trace("wait here")
        assert found.status == 504
        assert found.error.startswith("no answer within 0.2 s")
        closed_gate.set()
        up.until(lambda: up.trace("wait here").status == 200)


# Abuse


@pytest.mark.parametrize(
    ("body", "status", "line"),
    [
        (b"", 400, "must be JSON"),
        (b"{", 400, "must be JSON"),
        (b"\xff\xfe", 400, "must be JSON"),
        (b"[]", 400, "must be a JSON object, got a list"),
        (b"null", 400, "must be a JSON object, got null"),
        (b"[" * 200_000, 400, "must be JSON|nested too deep"),
        (b'{"a":' * 100_000, 400, "must be JSON|nested too deep"),
        (b'{"text": ' + b"9" * 100_000 + b"}", 400, "number that is too long"),
        (b'{"model": "bert", "text": NaN}', 400, "NaN is not a JSON number"),
        (b'{"model": "bert", "text": 1e999}', 400, "text must be a string, got a number"),
        (b'{"model": "bert", "text": true}', 400, "text must be a string, got a truth value"),
        (b'{"model": "bert", "text": ["a"]}', 400, "text must be a string, got a list"),
        (b'{"model": "bert"}', 400, "text must be a string, got null"),
        (b'{"model": "bert", "text": ""}', 400, "must contain words, got nothing"),
        (b'{"model": "bert", "text": " \\n\\t "}', 400, "must contain words, got nothing"),
        (b'{"model": "bert", "text": "a\\u0000b"}', 400, "must not contain NUL"),
        (b'{"model": "bert", "text": "\\ud800"}', 400, "half of a surrogate pair"),
        (b'{"model": "bert", "text": "a", "path": "/etc/passwd"}', 400, "there is no field 'path'"),
        (
            b'{"model": "bert", "text": "a", "methods": []}',
            400,
            "methods must be a list of one or more of raw, rollout, flow",
        ),
        (
            b'{"model": "bert", "text": "a", "methods": "raw"}',
            400,
            "methods must be a list of one or more of",
        ),
        (
            b'{"model": "bert", "text": "a", "methods": ["__class__"]}',
            400,
            "methods must be a list of one or more of",
        ),
        (
            b'{"model": "bert", "text": "a", "methods": [["raw"]]}',
            400,
            "methods must be a list of one or more of",
        ),
        (b'{"model": "bert", "text": "a", "layers": 0}', 400, "layers must be at least 1"),
        (b'{"model": "bert", "text": "a", "layers": true}', 400, "layers must be a whole number"),
        (b'{"model": "bert", "text": "a", "layers": 1e9}', 400, "layers must be a whole number"),
        (b'{"model": "bert", "text": "a", "layers": ' + b"9" * 4000 + b"}", 400, "at most 10000"),
        (b'{"model": "bert", "text": "a", "mixing": "magic"}', 400, "mixing must be one of attention"),
        (b'{"model": "bert", "text": "a", "mixing": {}}', 400, "mixing must be one of attention"),
        (b'{"model": 7, "text": "a"}', 400, "model must be a string, got a number"),
        (b'{"text": "a"}', 400, "model must be a string, got null"),
        (b'{"model": "vit", "text": "a"}', 400, "'vit' takes an image"),
    ],
    ids=lambda value: value[:40].decode("latin-1") if isinstance(value, bytes) else None,
)
def test_what_is_no_request_is_refused_in_one_line(up: Running, body: bytes, status: int, line: str) -> None:
    found = up.ask("POST", "/api/trace", body, JSON)
    assert found.status == status
    assert re.search(line, found.error)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc",
        "/etc/passwd",
        "bert/../bert",
        "bert-base-uncased",
        "google-bert/bert-base-uncased",
        "file:///etc/passwd",
        "http://127.0.0.1/",
        "BERT",
        "bert\u0000",
        "",
        "__class__",
        "x" * 10_000,
    ],
)
def test_only_models_named_at_start_can_be_asked_for(
    up: Running, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **more: Any) -> Any:
        raise AssertionError(f"a request loaded {arguments} {more}")

    for thing in (hf.AutoModel, hf.AutoTokenizer, hf.PreTrainedModel):
        monkeypatch.setattr(thing, "from_pretrained", never)
    monkeypatch.setattr(command, "open_model", never)
    for found in (
        up.trace("the key", model=name),
        up.picture(
            png(),
            query="model=" + name.encode().hex(" ").replace(" ", "%").join(["%", ""]) if name else "model=",
        ),
    ):
        assert found.status == 404
        assert found.error.endswith("models: bert, bart, vit")
        assert len(found.error) < 250


def test_text_that_is_too_long_says_how_long_it_is(served: dict[str, Served]) -> None:
    with running(served, tokens=8) as up:
        found = up.trace("the " * 20)
        assert (found.status, found.error) == (413, "text must have at most 8 tokens, got 22")
        found = up.trace("the key", model="bart", decoder="key " * 9)
        assert (found.status, found.error) == (413, "decoder must have at most 8 tokens, got 11")
        found = up.trace("x" * 801)
        assert found.status == 413
        assert "got 801 characters" in found.error
        assert up.trace("the key").status == 200


def test_hostile_text_is_text(up: Running) -> None:
    hostile = "<script>alert(1)</script>\r\nSet-Cookie: x=1\r\n\r\n<img src=x onerror=alert(1)> \u2028 ‮ 𝕏"
    found = up.trace(hostile, methods=["raw"])
    assert found.status == 200, found.body
    assert found.headers["content-type"] == "application/json"
    assert "set-cookie" not in found.headers
    assert parse_qs(urlsplit(found.json["link"]).query)["text"] == [hostile]
    assert re.fullmatch(r"[\x21-\x7e]+", found.json["link"])
    echoed = up.ask("GET", "/<script>alert(1)</script>")
    assert (echoed.status, echoed.error) == (404, "there is nothing at this address")


@pytest.mark.slow
def test_bodies_that_are_too_large_are_not_read(served: dict[str, Served]) -> None:
    with running(served, text_bytes=1000, image_bytes=2000, patience=0.5) as up:
        found = up.ask("POST", "/api/trace", b" " * 1001, JSON)
        assert (found.status, found.error) == (413, "the body must have at most 1,000 bytes, got 1001")
        assert up.picture(b" " * 2001).status == 413
        pieces = (b" " * 500 for _ in range(5))
        found = up.ask("POST", "/api/trace", pieces, JSON)  # chunked
        assert (found.status, found.error) == (413, "the body must have at most 1,000 bytes, got more")
        answer = up.raw(HEAD + b"Content-Length: 99999999999999999999\r\nExpect: 100-continue\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413 "), "before anything was sent"
        assert up.state.bodies.held == 0
        assert up.ask("GET", "/health").status == 200


def test_a_body_without_end_is_cut_off(served: dict[str, Served]) -> None:
    with running(served, text_bytes=1000) as up:
        with socket.create_connection(("127.0.0.1", up.port), timeout=30) as client:
            client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
            piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
            sent = 0
            with suppress(OSError):  # reset or broken pipe, as the system likes
                while sent < 10_000:
                    client.sendall(piece)
                    sent += 1
            assert sent < 10_000, "nobody read 650 megabytes"
        assert up.ask("GET", "/health").status == 200
        assert up.state.bodies.held == 0


def test_bodies_are_held_within_one_limit(served: dict[str, Served]) -> None:
    with running(served, text_bytes=1000, image_bytes=1000, held_bytes=1500) as up:
        head = HEAD + b"Content-Length: 1000\r\n\r\n"
        with socket.create_connection(("127.0.0.1", up.port)) as client:
            client.sendall(head + b" " * 999)
            up.until(lambda: up.state.bodies.held == 999)
            found = up.ask("POST", "/api/trace", b" " * 900, JSON)
            assert (found.status, found.headers["retry-after"]) == (503, "2")
        up.until(lambda: up.state.bodies.held == 0)
        assert up.trace("the key").status == 200


@pytest.mark.slow
def test_slow_clients_are_let_go(served: dict[str, Served]) -> None:
    with running(served, patience=0.3) as up:
        slow_body = up.raw(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert slow_body.startswith(b"HTTP/1.1 408 ")
        assert b"did not arrive within 0.3 s" in slow_body
        for head in (b"", b"GET / HTTP/1.1\r\nHost: loc"):
            with suppress(ConnectionResetError):
                assert up.raw(head) == b""
        # And on a connection that has been good before.
        with socket.create_connection(("127.0.0.1", up.port), timeout=30) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
            client.sendall(b"GET /hea")
            with suppress(ConnectionResetError):
                while client.recv(65536):
                    pass
        up.until(lambda: not up.server.server_state.connections)


@pytest.mark.slow
def test_who_does_not_read_his_answer_is_let_go(served: dict[str, Served]) -> None:
    with running(served, patience=0.3) as up:
        up.state.shell = type(up.state.shell)(b" " * 2**25, up.state.shell.policy)
        with socket.create_connection(("127.0.0.1", up.port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            up.until(lambda: up.state.metrics.in_progress == 1)
            up.until(lambda: not up.server.server_state.connections)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/trace", 405),
        ("DELETE", "/api/trace", 405),
        ("POST", "/", 405),
        ("TRACE", "/", 405),
        ("BREW", "/health", 405),
        ("GET", "/api/trace/", 404),
        ("GET", "/..%2f..%2fetc/passwd", 404),
        ("GET", "/static/../../etc/passwd", 404),
        ("GET", "//evil.example/", 404),
        ("GET", "/api/picture", 404),
        ("GET", "/api/picture?name=../x&name=y", 400),
        ("GET", "/api/picture?name=%ff", 400),
        ("POST", "/api/trace", 415),
    ],
)
def test_other_methods_and_addresses(up: Running, method: str, path: str, status: int) -> None:
    found = up.ask(method, path)
    assert found.status == status
    assert found.error


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "image/svg+xml",
        "image/tiff",
        "application/octet-stream",
    ],
)
def test_other_content_types_are_refused(up: Running, kind: str) -> None:
    found = up.ask("POST", "/api/trace?model=vit", b"{}", {"Content-Type": kind})
    assert found.status == 415
    assert "application/json, image/png" in found.error


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "evil.example:80",
        "127.0.0.1@evil.example",
        "",
        "169.254.169.254",
    ],
)
def test_other_hosts_are_refused(up: Running, host: str) -> None:
    for method, path in (("GET", "/"), ("GET", "/metrics"), ("POST", "/api/trace")):
        found = up.ask(method, path, headers={"Host": host})
        assert found.status == 403
        assert "answers only under its own names" in found.error


def test_beyond_this_machine_a_host_is_an_address_or_a_known_name(served: dict[str, Served]) -> None:
    made = Running(served, Limits(), hosts=["box"], addresses=True)
    try:
        made.until(lambda: made.server.started)
        for host, status in (
            ("10.1.2.3", 200),
            ("[fe80::1]:8321", 200),
            ("box:80", 200),
            ("evil.example", 403),
        ):
            assert made.ask("GET", "/health", headers={"Host": host}).status == status, host
    finally:
        made.server.should_exit = True
        made.thread.join(30)


@pytest.mark.slow
def test_mechanisms_come_with_what_there_is_to_see_of_them() -> None:
    bert = build(hf.BertForSequenceClassification, lambda: hf.BertConfig(**TEXT))()
    overt.attach(bert, overt.Evolving(), overt.Bayesian())
    with running({"both": Served("both", bert, tokenizer(), layers=3)}) as made:
        [entry] = made.trace("the key", model="both").json["index"]["traces"]
    assert entry["samples"] == 10
    assert {"part convolution", "spread", "rollout spread"} <= set(entry["fields"])
    assert len(entry["outputs"]["draws"]) == 10


def test_probabilities_have_the_temperature_of_their_model() -> None:
    model = build(hf.BertForSequenceClassification, lambda: hf.BertConfig(**TEXT))()
    inputs = dict(tokenizer()("the key", return_tensors="pt"))
    with torch.no_grad():
        logits = model(**inputs).logits.double()
    with pytest.warns(
        UserWarning, match=r"^the temperature, 0.05, is at an end"
    ):  # one label, predicted right
        overt.calibrate(model, [{**inputs, "labels": logits.argmax(dim=-1)}])
    with running({"cold": Served("cold", model, tokenizer(), layers=3)}) as made:
        [entry] = made.trace("the key", model="cold").json["index"]["traces"]
    expected = (logits[0] / 0.05).softmax(dim=-1).sort(descending=True).values
    assert entry["outputs"]["mean"] == pytest.approx(expected.tolist(), abs=1e-3)


@pytest.mark.parametrize(
    ("header", "host"),
    [("localhost", "localhost"), ("LOCALHOST:80", "localhost"), ("[::1]:80", "::1"), ("[::1]", "::1"),
     ("localhost/x", None), ("a@localhost", None), ("localhost:x", None), ("[::1", None),
     ("localhost:99999", None)],
)  # fmt: skip
def test_hosts_are_read_whole_or_not_at_all(header: str, host: str | None) -> None:
    assert host_of(header) == host


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Origin": "file://"},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_other_origins_are_refused(up: Running, headers: dict[str, str]) -> None:
    body = json.dumps({"model": "bert", "text": "the key"})
    found = up.ask("POST", "/api/trace", body, {**JSON, **headers})
    assert (found.status, found.error) == (403, "requests from pages of other origins are refused")
    ours = {"Origin": f"http://127.0.0.1:{up.port}", "Sec-Fetch-Site": "same-origin"}
    assert up.ask("POST", "/api/trace", body, {**JSON, **ours}).status == 200


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is huge."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


# As many pixels as a GIF can have, and no data.
SIZE = struct.pack("<HH", 65535, 65535)
GIF_BOMB = b"GIF89a" + SIZE + bytes(3) + b"," + bytes(4) + SIZE + b"\0\2\2D\1\0;"
MARK = Path(tempfile.gettempdir()) / "overt-was-here"


class Evil:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {MARK}",)


@pytest.mark.parametrize(
    ("data", "kind", "status"),
    [
        (bomb(60_000, 60_000), "image/png", 413),
        (bomb(6_000, 6_000), "image/png", 413),
        (bomb(2**31 - 1, 2**31 - 1), "image/png", 413),
        (bomb(10, 10)[:40], "image/png", 400),
        (bomb(100, 1000), "image/png", 400),
        (bomb(0, 10), "image/png", 400),
        (png()[:50], "image/png", 400),
        (png(), "image/jpeg", 400),
        (png(kind="TIFF"), "image/png", 400),
        (pickle.dumps(Evil()), "image/png", 400),
        (pickle.dumps(torch.zeros(2)), "image/gif", 400),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/png", 400),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "image/bmp", 400),
        (GIF_BOMB, "image/gif", 413),
        (b"\xff\xd8\xff\xe0" + b"\0" * 100, "image/jpeg", 400),
        (b"", "image/png", 400),
        (bytes(range(256)) * 10, "image/webp", 400),
    ],
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else None,  # a pickle's may change
)
def test_images_that_are_none_or_too_large(up: Running, data: bytes, kind: str, status: int) -> None:
    found = up.picture(data, kind)
    assert found.status == status
    assert found.error
    assert not MARK.exists()
    assert up.picture(png(), query="model=vit&methods=raw").status == 200


@pytest.mark.parametrize(
    ("query", "status", "line"),
    [
        ("model=bert", 400, "takes text as JSON"),
        ("model=vit&layers=x", 400, "layers must be a whole number"),
        ("model=vit&layers=" + "9" * 50, 400, "layers must be a whole number"),
        ("model=vit&methods=", 400, "methods must be a list of one or more of"),
        ("model=vit&methods=raw,magic", 400, "methods must be a list of one or more of"),
        ("model=vit&file=/etc/passwd", 400, "there is no field 'file'"),
        ("model=vit&model=bert", 400, "came twice"),
        ("&".join(f"a{n}=1" for n in range(40)), 400, "at most 32 fields"),
        ("model=vit&decoder=x", 400, "has no decoder"),
    ],
)
def test_queries_of_images_are_checked(up: Running, query: str, status: int, line: str) -> None:
    found = up.picture(png(), query=query)
    assert found.status == status
    assert line in found.error


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\0" * 70_000,
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n",
        b"POST /api/trace HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /api/trace HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    ],
)
def test_what_is_no_http_is_closed(up: Running, data: bytes) -> None:
    with suppress(ConnectionResetError):
        assert re.match(rb"HTTP/1.1 40[03] ", up.raw(data))
    assert up.ask("GET", "/health").status == 200


def test_errors_say_nothing_of_the_machine(served: dict[str, Served]) -> None:
    one = served["bert"]
    assert clean("no file /srv/models/bert/x.json", one) == "no file bert/x.json"
    assert clean("cannot open /home/somebody/secret/file.txt here", one) == "cannot open … here"
    assert clean(r"cannot open C:\Users\somebody\file.txt", one) == "cannot open …"
    assert clean("maps must be 3 / 4 of it\nTraceback", one) == "maps must be 3 / 4 of it"

    class Broken:
        def __call__(self, text: str = "", **more: Any) -> Any:
            if "boom" in text and more:
                raise RuntimeError(f"/srv/models/bert said {text}")
            return gated(text, **more)

        def __getattr__(self, name: str) -> Any:
            return getattr(gated, name)

    broken = {"bert": Served("bert", one.model, Broken())}
    with running(broken) as up:
        found = up.trace("boom")
        assert (found.status, found.error) == (500, "the trace failed; the server's log says why")
        assert up.trace("the key").status == 200


def test_what_a_model_cannot_do_is_said() -> None:
    small = build(
        hf.BertForSequenceClassification, lambda: hf.BertConfig(**TEXT, max_position_embeddings=8)
    )()
    with running({"small": Served("small", small, tokenizer())}) as up:
        found = up.trace("the " * 20, model="small")
        assert found.status == 422
        assert found.error == "the input has 22 tokens, but the model has positions for 8: shorten it"


# In a browser


@contextmanager
def looking(browser: Any, up: Running, path: str = "/", **settings: Any) -> Iterator[Any]:
    """The page in a browser; anything that goes wrong there, or breaks the page's policy, fails the test."""
    faults: list[str] = []
    context = browser.new_context(**settings)
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.on("console", lambda said: said.type in ("error", "warning") and faults.append(said.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
    page.goto(f"http://127.0.0.1:{up.port}{path}")
    yield page
    context.close()
    assert faults == []


TOOK = re.compile(r"^took [\d.]+ s$")


@pytest.mark.slow
def test_a_sentence_is_typed_and_its_link_shows_it_again(browser: Any, up: Running) -> None:
    text = "the <img src=x onerror=alert(1)> key & lies"
    with looking(browser, up) as page:
        page.get_by_label("Model", exact=True).select_option("bert")
        page.get_by_label("flow", exact=True).uncheck()
        page.get_by_label("Sentence").fill(text)
        page.get_by_label("Sentence").press("Control+Enter")
        page.get_by_text(TOOK).wait_for()
        assert page.locator(".serve-view .overt").count() == 1
        assert page.locator(".serve-view img").count() == 0
        link = page.url.removeprefix(f"http://127.0.0.1:{up.port}")
        assert parse_qs(urlsplit(link).query)["text"] == [text]
    with looking(browser, up, link, viewport={"width": 390, "height": 800}) as page:
        page.get_by_text(TOOK).wait_for()
        assert page.get_by_label("Sentence").input_value() == text
        assert not page.get_by_label("flow", exact=True).is_checked()
        assert page.get_by_role("button", name="Trace", exact=True).bounding_box()["width"] > 100


@pytest.mark.slow
def test_a_sentence_is_judged_and_its_link_judges_it_again(browser: Any, up: Running) -> None:
    text = "the <img src=x onerror=alert(1)> key & lies"
    with looking(browser, up) as page:
        page.get_by_label("Model", exact=True).select_option("bart")
        assert not page.get_by_role("button", name="Judge").is_visible()
        page.get_by_label("Model", exact=True).select_option("bert")
        page.get_by_label("Sentence").fill(text)
        page.get_by_role("button", name="Judge").click()
        page.get_by_text(TOOK).wait_for()
        assert page.locator(".serve-view .overt.judge article").count() > 5
        assert page.locator(".serve-view img").count() == 0
        page.get_by_role("slider", name="Delete").fill("0")
        assert page.locator("del").count() == 0
        page.get_by_label("Sentence").press("End")
        page.keyboard.type(" n")
        assert page.get_by_label("Sentence").input_value() == f"{text} n", "typing is no shortcut"
        link = page.url.removeprefix(f"http://127.0.0.1:{up.port}")
    with looking(browser, up, link, viewport={"width": 390, "height": 800}) as page:
        page.get_by_text(TOOK).wait_for()
        assert page.locator(".overt.judge").count() == 1
        assert page.evaluate("document.scrollingElement.scrollWidth - innerWidth") <= 0


@pytest.mark.slow
def test_enter_traces_and_shift_enter_breaks_the_line(browser: Any, up: Running) -> None:
    with looking(browser, up) as page:
        page.get_by_label("Model", exact=True).select_option("bart")
        box = page.get_by_label("Sentence")
        assert page.get_by_text("Enter to trace, Shift+Enter for a new line").all_inner_texts()[0]
        box.fill("the key")
        tall = box.bounding_box()["height"]
        for _ in range(4):
            box.press("Shift+Enter")
        box.press_sequentially("lies")
        assert box.input_value() == "the key\n\n\n\nlies"
        assert box.bounding_box()["height"] > tall, "the box grows with its lines"
        assert page.locator(".serve-status").inner_text() == ""
        # The Enter that takes over what an input method composed.
        composed = (
            "(box) => box.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter', isComposing: true }))"
        )
        box.evaluate(composed)
        assert page.locator(".serve-status").inner_text() == ""
        box.press("Enter")
        page.get_by_text(TOOK).wait_for()
        assert box.input_value() == "the key\n\n\n\nlies"
        assert parse_qs(urlsplit(page.url).query)["text"] == ["the key\n\n\n\nlies"]
        decoder = page.get_by_label("Decoder")
        decoder.fill("a key")
        decoder.press("Enter")
        page.wait_for_url(re.compile(r"[?&]decoder=a\+key"))
        page.get_by_text(TOOK).wait_for()
        assert decoder.input_value() == "a key"


@pytest.mark.slow
def test_an_image_is_dropped_and_its_link_shows_it_again(browser: Any, up: Running) -> None:
    file = {"name": "a.png", "mimeType": "image/png", "buffer": png(64, 48)}
    with looking(browser, up) as page:
        page.get_by_label("Model", exact=True).select_option("vit")
        page.locator("#serve-file").set_input_files({**file, "name": "a.svg", "mimeType": "image/svg+xml"})
        page.get_by_text("is not a supported image").wait_for()
        page.locator("#serve-file").set_input_files(file)
        page.get_by_text(TOOK).wait_for()
        link = page.url.removeprefix(f"http://127.0.0.1:{up.port}")
        assert link.startswith("/?picture=")
    with looking(browser, up, link) as page:
        page.get_by_text(TOOK).wait_for()
        assert page.locator(".serve-view .overt").count() == 1


@pytest.mark.slow
def test_the_page_says_what_is_wrong(browser: Any, up: Running) -> None:
    with looking(browser, up, "/?model=nobody&text=a") as page:
        page.get_by_text("the link names the model “nobody”, which is not served here").wait_for()
        page.get_by_role("button", name="Trace", exact=True).click()
        page.get_by_text("type a sentence first").wait_for()


# Its beginning and its end


@pytest.mark.parametrize(
    ("limits", "line"),
    [
        ({"tokens": 0}, "tokens must be a whole number of at least 1, got 0"),
        ({"workers": 1.5}, "workers must be a whole number"),
        ({"seconds": 0.0}, "seconds must be positive and finite"),
        ({"seconds": float("inf")}, "seconds must be positive and finite"),
        ({"held_bytes": 10}, "held_bytes must be at least text_bytes"),
    ],
)
def test_limits_are_checked(limits: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        Limits(**limits)


def test_models_are_named_by_their_folders_or_as_told(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "a=b").mkdir()
    one = str(tmp_path / "one")
    assert command.parse_models([one, f"two={one}", "google/some-bert", str(tmp_path / "a=b")]) == {
        "one": one,
        "two": one,
        "some-bert": "google/some-bert",
        "a=b": str(tmp_path / "a=b"),
    }
    with pytest.raises(
        ValueError, match="another model is already named 'one'; give this one a name: NAME=PATH"
    ):
        command.parse_models([one, f"{one}/"])
    for wrong in ("", "x=", "a\nb=c"):
        with pytest.raises(ValueError, match="model"):
            command.parse_models([wrong])
    with pytest.raises(ValueError, match="--model must be given"):
        command.parse_models([])


def test_pickled_weights_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "other.safetensors").write_bytes(b"")  # which is not the model's
    with pytest.raises(ValueError, match="has no safetensors weights, and pickled weights are not loaded"):
        command.open_served("x", str(tmp_path))
    assert not MARK.exists()


def test_a_port_that_is_taken_is_said_in_one_line() -> None:
    with bound("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            OSError,
            match=rf"cannot listen on --host 127.0.0.1 --port {port} \(address .*\): choose another",
        ):
            command.run(["./nowhere"], port=port)
    with pytest.raises(OSError, match="is not an address of this machine"):
        bound("no such host", 1)


def test_this_machine_alone_is_told_from_others() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "::1", "[::1]", "127.5.5.5")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.1", "example.org", "localhost.example.org")))


@pytest.mark.slow
def test_what_runs_too_long_at_the_end_is_told_so(
    served: dict[str, Served], closed_gate: threading.Event
) -> None:
    with running(served, finish=1.0) as up, ThreadPoolExecutor(1) as pool:
        stuck = later(pool, up, "wait")
        up.until(lambda: up.state.work.running == 1)
        held = up.state.bodies.held
        with socket.create_connection(("127.0.0.1", up.port)) as half:
            half.sendall(HEAD + b"Content-Length: 9\r\n\r\n{")
            up.until(lambda: up.state.bodies.held == held + 1)
            up.server.should_exit = True
            assert half.recv(65536).startswith(b"HTTP/1.1 503 "), "bodies are not waited for"
        found = stuck.result()
        assert (found.status, found.error) == (503, "the server is shutting down")
        up.thread.join(30)
        assert up.state.work.running == 1, "the thread itself cannot be stopped"
        closed_gate.set()


COMMAND = """
import time
import overt.view.server as server
from overt.cli.serve import run
real = server.trace_answer
def slow(request, limits, wanted):
    time.sleep(1)
    return real(request, limits, wanted)
server.trace_answer = slow
run([{!r}], port=0)
"""


@pytest.mark.slow
def test_a_signal_ends_it_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    build(hf.BertForSequenceClassification, lambda: hf.BertConfig(**TEXT))().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    child = start(COMMAND.format(str(folder)), COLUMNS="200")
    try:
        while not (found := re.search(r"Overt serves tiny at http://127.0.0.1:(\d+)/", child.printed())):
            assert not child.place.with_suffix(".end").exists(), child.ended()
            time.sleep(0.05)
        port = int(found[1])

        def ask(method: str, path: str, body: Any = None) -> tuple[int, Any]:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
                connection.request(method, path, body, JSON)
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read())

        with ThreadPoolExecutor(2) as pool:
            runs = pool.submit(ask, "POST", "/api/trace", json.dumps({"text": "the key"}))
            while ask("GET", "/health")[1]["running"] == 0:
                time.sleep(0.01)
            waits = pool.submit(ask, "POST", "/api/trace", json.dumps({"text": "the key to"}))
            while ask("GET", "/health")[1]["waiting"] == 0:
                time.sleep(0.01)
            os.kill(child.process, signal.SIGTERM)
            assert waits.result() == (503, {"error": "the server is shutting down"})
            status, answer = runs.result()
            assert status == 200, "what runs is finished"
            assert answer["link"] == "/?model=tiny&text=the+key"
        assert not (failed := child.ended(30.0)), failed
        assert "Traceback" not in child.printed("err")
        assert "stopped" in child.printed()
    finally:
        with suppress(ProcessLookupError):
            os.kill(child.process, signal.SIGKILL)
