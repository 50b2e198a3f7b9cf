"""Chats: messages rendered by a tokenizer's template, and which part of the text each message became."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Turn(NamedTuple):
    """A message of a chat, or the prompt or output of other generated text.

    Attributes:
        role: who wrote it: "user", "assistant", "prompt", "output", …
        start: its first token; in a text that is being prepared, its first character.
        stop: one after its last.
    """

    role: str
    start: int
    stop: int


def is_message(value: Any) -> bool:
    """Whether it is a message of a chat: a mapping with a role and a content."""
    return isinstance(value, Mapping) and "role" in value and "content" in value


def chats_in(inputs: Any) -> list[list[Any]] | None:
    """Lists of messages, if inputs are a list of messages or several of these; otherwise None."""
    if not isinstance(inputs, list | tuple) or not inputs:
        return None
    if all(is_message(each) for each in inputs):
        return [list(inputs)]
    if all(isinstance(each, list | tuple) and each and all(map(is_message, each)) for each in inputs):
        return [list(each) for each in inputs]
    return None


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], reply: bool) -> tuple[str, list[Turn]]:
    """A chat as text, and the characters of each message in it.

    A message's part of the text is what the template adds for it after those before it; a system message that
    the template adds by itself is part of the first. Where a template renders earlier messages in another way
    once others follow, their contents are looked for in the text.

    Args:
        tokenizer: one with a chat template.
        messages: each with "role" and "content".
        reply: whether the model is to reply: the text then ends where its reply begins.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("messages need a tokenizer with a chat template, and this one has none: give text")
    if reply and messages[-1]["role"] == "assistant":
        raise ValueError(
            "the last message is the assistant's, and generate writes the next one: leave it out"
        )

    def text(count: int, open_: bool) -> str:
        made: str = tokenizer.apply_chat_template(
            list(messages[:count]), tokenize=False, add_generation_prompt=open_
        )
        return made

    whole = text(len(messages), reply)
    return whole, _by_prefixes(whole, messages, text) or _by_contents(whole, messages)


def _by_prefixes(whole: str, messages: Sequence[Mapping[str, Any]], text: Any) -> list[Turn]:
    """Messages by what each adds to the text; empty where the template does not just add."""
    turns: list[Turn] = []
    end = 0
    for count, message in enumerate(messages, start=1):
        try:
            part = text(count, False)
        except Exception:  # a template raises what it likes, of a chat that ends here
            return []
        if not whole.startswith(part) or len(part) <= end:
            return []
        turns.append(Turn(str(message["role"]), end, len(part)))
        end = len(part)
    return turns


def _by_contents(whole: str, messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Messages by their contents; an error where one is not in the text as it is."""
    turns: list[Turn] = []
    end = 0
    for message in messages:
        content = str(message["content"]).strip()
        start = whole.find(content, end) if content else -1
        if start < 0:
            raise ValueError(
                f"the chat template changes the message {content[:40]!r}, so its tokens cannot be found: "
                "render the chat, and give it as text"
            )
        turns.append(Turn(str(message["role"]), start, start + len(content)))
        end = start + len(content)
    return turns


def in_tokens(turns: Sequence[Turn], spans: Sequence[Sequence[int]]) -> list[Turn]:
    """Turns of characters as turns of tokens, each of which belongs to the turn that it begins in.

    Args:
        turns: in characters.
        spans: where each token begins and ends.
    """
    found = []
    for role, start, stop in turns:
        inside = [at for at, (first, last) in enumerate(spans) if start <= first < stop and last > first]
        if inside:
            found.append(Turn(role, inside[0], inside[-1] + 1))
    return found
