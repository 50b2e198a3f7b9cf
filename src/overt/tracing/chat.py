"""Chats: messages rendered by a tokenizer's template, and which part of the text each message became."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

SIGN = "\ue000overt\ue000"  # of private use, and in no message


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
    """Whether it is a message of a chat: a mapping with a role, and a content or calls of tools."""
    return isinstance(value, Mapping) and "role" in value and ("content" in value or "tool_calls" in value)


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
    once others follow, a message's part is its content.

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

    def text(some: Sequence[Mapping[str, Any]], open_: bool) -> str:
        made: str = tokenizer.apply_chat_template(list(some), tokenize=False, add_generation_prompt=open_)
        return made

    try:
        whole = text(messages, reply)
    except Exception as error:  # a template raises what it likes
        why = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise ValueError(f"the chat template cannot render these messages: {why}") from error
    return whole, _by_prefixes(whole, messages, text) or _by_contents(whole, messages, text, reply)


def _by_prefixes(whole: str, messages: Sequence[Mapping[str, Any]], text: Any) -> list[Turn]:
    """Messages by what each adds to the text; empty where the template does not just add."""
    turns: list[Turn] = []
    end = 0
    for count, message in enumerate(messages, start=1):
        try:
            part = text(messages[:count], False)
        except Exception:  # a template raises what it likes, of a chat that ends here
            return []
        if not whole.startswith(part) or len(part) <= end:
            return []
        turns.append(Turn(str(message["role"]), end, len(part)))
        end = len(part)
    return turns


def _by_contents(whole: str, messages: Sequence[Mapping[str, Any]], text: Any, reply: bool) -> list[Turn]:
    """Messages by their contents; an error where one is not in the text as it is.

    A content such as "user" may be in the text several times: its place is where a sign that is put in its
    stead turns up.
    """
    turns: list[Turn] = []
    for number, message in enumerate(messages):
        content = message.get("content")
        shown = content.strip() if isinstance(content, str) else ""
        changed = [{**each, "content": SIGN} if at == number else each for at, each in enumerate(messages)]
        try:
            before, *after = text(changed, reply).split(SIGN)
        except Exception:  # as above
            before, after = "", []
        start, stop = len(before), len(whole) - sum(map(len, after))
        same = len(after) == 1 and whole.startswith(before) and whole.endswith(after[0])
        if not shown or not same or whole[start:stop].strip() != shown:
            raise ValueError(
                f"the chat template changes the message {str(content)[:40]!r}, so its tokens cannot be "
                "found: render the chat, and give it as text"
            )
        start += whole[start:stop].index(shown)
        turns.append(Turn(str(message["role"]), start, start + len(shown)))
    return turns


def in_tokens(turns: Sequence[Turn], spans: Sequence[Sequence[int]]) -> list[Turn]:
    """Turns of characters as turns of tokens, each of which belongs to the turn that it begins in.

    Args:
        turns: in characters.
        spans: where each token begins and ends.
    """
    found: list[Turn] = []
    for role, start, stop in turns:
        inside = [at for at, (first, last) in enumerate(spans) if start <= first < stop and last > first]
        if not inside:
            raise ValueError(
                f"message {len(found)}, of role {role!r}, has no token of its own, so that it has no turn: "
                "render the chat, and give it as text"
            )
        found.append(Turn(role, inside[0], inside[-1] + 1))
    return found
