"""Requests to judge explanations of one text: checking them, and computing the answers."""

from __future__ import annotations

import json
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from overt.judge.rationales.methods import title_of
from overt.view.judging import live_index
from overt.view.server.limits import GoneError, Limits, RefusedError, Served
from overt.view.server.trace_request import (
    LINK,
    check_known,
    check_tokens,
    clean,
    fields_of,
    served_of,
    text_of,
)
from overt.view.server.work import StillWanted

SCORING = 0.5  # share of a request's time after which no further method is begun


@dataclass(frozen=True)
class JudgeRequest:
    """A checked request to judge explanations of a text.

    Attributes:
        served: the classifier.
        text: the text.
    """

    served: Served
    text: str

    def key(self) -> Hashable:
        """Equal for requests with equal answers, and unequal to that of a trace."""
        return "judge", self.served.name, self.text

    def link(self) -> str | None:
        """The address of the same request; None if it would be too long."""
        link = f"/?{urlencode([('model', self.served.name), ('text', self.text), ('judge', '1')])}"
        return link if len(link) <= LINK else None


def judge_from_json(body: bytes, models: Mapping[str, Served], limits: Limits) -> JudgeRequest:
    """A request with a text."""
    fields = fields_of(body)
    check_known(fields, ("model", "text"))
    served = served_of(fields.get("model"), models)
    if not served.judges:
        raise RefusedError(400, f"model {served.name!r} is no classifier of texts: it can be traced")
    return JudgeRequest(served, text_of("text", fields.get("text"), limits))


def judge_answer(request: JudgeRequest, limits: Limits, still_wanted: StillWanted) -> bytes:
    """Score and delete words, and build the answer: {judged, link, seconds}. Runs in a separate thread."""
    served = request.served
    with served.turn:
        began = time.monotonic()
        check_tokens(served, "text", request.text, limits)

        def why_not(method: str) -> str | None:
            if not still_wanted():
                raise GoneError
            if time.monotonic() - began > SCORING * limits.seconds:
                return f"{title_of(method)} would take the server too long"
            return None

        try:
            index = live_index(
                served.model, served.tokenizer, request.text, title=served.name, why_not=why_not
            )
        except (ValueError, TypeError, NotImplementedError) as error:
            raise RefusedError(422, clean(str(error), served)) from error
        for entry in index["refused"]:
            entry["reason"] = clean(entry["reason"], served)
        seconds = round(time.monotonic() - began, 3)
    answer = {"judged": index, "link": request.link(), "seconds": seconds}
    return json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
