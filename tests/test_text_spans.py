"""Values by words, sentences, turns and named ranges, against sums and means by definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

import overt
from overt.tracing.spans import Characters, Span
from writing import SIZES, TEMPLATE, TEXT, byte_tokenizer, tiny


def traced(inputs: Any = TEXT, **options: Any) -> overt.Trace:
    known = byte_tokenizer(chat_template=TEMPLATE)
    return overt.trace(tiny("Llama"), inputs, tokenizer=known, **options)


def by_definition(values: torch.Tensor, rows: list[list[int]], columns: list[list[int]]) -> torch.Tensor:
    """(layer, query, token) → (layer, row, column): means of the rows, sums of the columns."""
    found = torch.zeros(values.shape[0], len(rows), len(columns), dtype=torch.float64)
    for layer in range(values.shape[0]):
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                for query in row:
                    for token in column:
                        found[layer, i, j] += values[layer, query, token] / len(row)
    return found


def places(spans: list[Span], shift: int = 0) -> list[list[int]]:
    return [[at - shift for at in range(span.start, span.stop)] for span in spans]


def held(listed: list[list[int]]) -> list[int]:
    return sorted(place for each in listed for place in each)


@pytest.mark.parametrize("method", ["raw", "rollout"])
def test_words_are_joined_by_offsets_and_summed(method: str) -> None:
    trace = traced()
    (found,) = trace.spans(method)
    words = [span.name for span in found.tokens]
    shown = " ".join(word for word in words if word not in ("Ċ", "\n"))
    assert shown.startswith("The code of the vault is 7429 , and nobody else knows it . Keep it safe ! What")
    assert len(trace.tokens[0]) > len(words), "there are pieces to join"
    assert held(places(found.tokens)) == list(range(trace.mask.shape[1])), "each token once"
    values = trace.read(method)[0]
    torch.testing.assert_close(
        found.values, by_definition(values, places(found.queries), places(found.tokens))
    )
    torch.testing.assert_close(found.values.sum(dim=-1), torch.ones(found.values.shape[:-1]).double())


def test_generated_words_have_the_rows_that_wrote_them() -> None:
    trace = traced([TEXT, "Keep it"], generate=8)
    assert trace.generated is not None
    for number, found in enumerate(trace.spans(tokens="turns")):
        output = trace.turns[number][1]
        assert [span.name for span in found.tokens] == ["prompt", "output"]
        assert held(places(found.queries)) == list(range(output.start, output.stop))
        want = by_definition(trace.raw()[number], places(found.queries, 1), places(found.tokens))
        torch.testing.assert_close(found.values, want)
        own = by_definition(trace.raw()[number], places(found.queries), places(found.tokens))
        assert not torch.allclose(found.values, own), "the rows of the words themselves are others"
    (first, second) = trace.spans(queries="generated tokens", tokens="tokens")
    assert len(first.queries) == len(second.queries) == 8
    (whole, _) = trace.spans(queries="generated turns", tokens="tokens")
    assert [span.name for span in whole.queries] == ["output"]
    torch.testing.assert_close(whole.values[:, 0], first.values.mean(dim=1))


def test_what_was_written_on_to_the_first_word_or_sentence_has_rows() -> None:
    # Without a token that begins the text, the span that holds the output starts at token 0.
    for prompt in ("Ke", "What is the code"):
        trace = traced(prompt, generate=6)
        output = trace.turns[0][1]
        for unit in ("words", "sentences"):
            (found,) = trace.spans(queries=f"generated {unit}", tokens="tokens")
            assert held(places(found.queries)) == list(range(output.start, output.stop)), (prompt, unit)
    first, second = traced(["Ke", TEXT], generate=6).spans(tokens="tokens")
    assert sum(span.stop - span.start for span in first.queries) == 6
    assert sum(span.stop - span.start for span in second.queries) == 6


def test_named_ranges_have_the_rows_that_wrote_them_if_asked() -> None:
    trace = traced(generate=8)
    output = trace.turns[0][1]
    part = (output.start + 2, output.start + 5)
    (own,) = trace.spans(queries={"part": part}, tokens="tokens")
    (wrote,) = trace.spans(queries={"part": part}, tokens="tokens", written=True)
    raw = trace.raw()[0]
    torch.testing.assert_close(own.values[:, 0], raw[:, part[0] : part[1]].mean(dim=1))
    torch.testing.assert_close(wrote.values[:, 0], raw[:, part[0] - 1 : part[1] - 1].mean(dim=1))
    (tokens,) = trace.spans(queries="generated tokens", tokens="tokens")
    torch.testing.assert_close(wrote.values[:, 0], tokens.values[:, 2:5].mean(dim=1))
    with pytest.raises(ValueError, match=r"^queries must be tokens of the target, from 1 on, got"):
        trace.spans(queries={"start": (0, 2)}, written=True)


def test_bytes_of_one_character_are_one_word() -> None:
    text = "code 北京 is ✓ 🦊"
    (found,) = traced(text).spans()
    assert [span.name for span in found.tokens if span.name != "Ġ"] == ["code", "北", "京", "is", "✓", "🦊"]
    assert len(traced(text).tokens[0]) > 12


def test_the_end_of_a_line_belongs_to_no_word() -> None:
    trace = traced("Keep it.\n\nWhat is it")
    (found,) = trace.spans()
    ends = [number for number, token in enumerate(trace.tokens[0]) if token == "Ċ"]
    assert len(ends) == 2
    assert [span for span in found.tokens if span.start in ends] == [Span("Ċ", at, at + 1) for at in ends]


def test_sentences_and_turns() -> None:
    trace = traced()
    (found,) = trace.spans(queries="sentences", tokens="sentences", layers=-1)
    names = [span.name for span in found.tokens]
    assert names == [
        "The code of the vault is 7429, and nobody else knows it.",
        "Keep it safe!",
        "What is the code?",
        "It is",
    ]
    assert found.values.shape == (1, 4, 4)
    assert (found.values[0].triu(1) == 0).all(), "nothing comes from later sentences"
    chat = [{"role": "user", "content": "Keep it safe! It is 7429"}, {"role": "assistant", "content": "safe"}]
    (turns,) = traced(chat).spans(queries="turns", tokens="turns")
    assert [span.name for span in turns.tokens] == ["user", "assistant"]
    torch.testing.assert_close(turns.values[:, 0, 0], torch.ones(2).double())


def test_ranges_are_tokens_characters_or_passages() -> None:
    trace = traced()
    start = TEXT.index("7429")
    count = trace.mask.shape[1]
    given = {
        "code": "7429",
        "same": Characters(start, start + 4),
        "first": (0, 2),
        "last": (count - 2, count),
    }
    (found,) = trace.spans("rollout", queries={"end": (-1, trace.mask.shape[1])}, tokens=given, layers=-1)
    values = trace.rollout(-1, layers=-1)[0, 0, 0]
    code = found.tokens[0]
    assert trace.offsets is not None
    assert TEXT[trace.offsets[0, code.start, 0] : trace.offsets[0, code.stop - 1, 1]].strip() == "7429"
    sums = [values[span.start : span.stop].sum() for span in found.tokens]
    torch.testing.assert_close(found.values[0, 0], torch.stack(sums))
    assert found.tokens[0][1:] == found.tokens[1][1:]
    every = trace.spans("raw", queries={"end": (-1, trace.mask.shape[1])}, tokens="tokens", heads="mean")[0]
    torch.testing.assert_close(every.values[:, 0], trace.raw(-1)[0, :, 0])


def test_a_model_with_one_output_has_one_row() -> None:
    config = hf.BertConfig(**SIZES, intermediate_size=48, vocab_size=290)
    trace = overt.trace(
        hf.BertForSequenceClassification(config), ["Keep it safe", "It is"], tokenizer=byte_tokenizer()
    )
    found = trace.spans("blankout", unk=5)
    assert [[span.name for span in each.tokens] for each in found] == [["Keep", "it", "safe"], ["It", "is"]]
    assert [span.name for span in found[0].queries] == ["output"]
    torch.testing.assert_close(found[1].values.sum(), trace.blankout(unk=5)[1].sum())


def test_wrong_spans_are_refused_in_a_line() -> None:
    trace = traced()
    ids = overt.trace(tiny("Llama"), [[5, 6, 7]])
    with pytest.raises(ValueError, match=r"^words are found by offsets in a text, which this trace has not"):
        ids.spans()
    assert ids.spans(queries="tokens", tokens={"all": (0, 3)})[0].values.shape == (2, 3, 1)
    with pytest.raises(ValueError, match=r"^queries must be one of 'tokens', 'words'.* got 'lines'"):
        trace.spans(queries="lines")
    with pytest.raises(ValueError, match=r"^nothing was generated in this trace, got queries='generated wo"):
        trace.spans(queries="generated words")
    with pytest.raises(ValueError, match=r"^this trace has no turns: trace messages of a chat"):
        trace.spans(tokens="turns")
    with pytest.raises(ValueError, match=r"^tokens\['a'\] must be in the text once, and is 2 times: 'code'"):
        trace.spans(tokens={"a": "code"})
    with pytest.raises(ValueError, match=r"^tokens\['a'\] must lie in 0 to"):
        trace.spans(tokens={"a": (0, 999)})
    with pytest.raises(ValueError, match=r"^tokens\['a'\] must hold at least one token, got \(5, 5\)"):
        trace.spans(tokens={"a": (5, 5)})
    with pytest.raises(ValueError, match=r"^tokens\['a'\] must be a pair of tokens, Characters or a passage"):
        trace.spans(tokens={"a": 5})
    with pytest.raises(ValueError, match=r"^tokens must name at least one range, got \{\}"):
        trace.spans(tokens={})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cafe\u0301s nai\u0308ve", ["cafe\u0301s", "nai\u0308ve"]),
        ("हिन्दी में लिखना", ["हिन्दी", "में", "लिखना"]),
        ("שָׁלוֹם עולם", ["שָׁלוֹם", "עולם"]),
        ("می\u200cخواهم بروم", ["می\u200cخواهم", "بروم"]),
        ("I ❤\ufe0f it", ["I", "❤\ufe0f", "it"]),
        ("👩\u200d👧 is", ["👩\u200d👧", "is"]),
    ],
)
def test_accents_vowel_signs_and_joiners_are_inside_words(text: str, words: list[str]) -> None:
    (found,) = traced(text).spans(layers=-1)
    assert [span.name for span in found.tokens] == words


def test_a_turn_without_a_token_is_no_span() -> None:
    free = traced(["Keep it", "It is safe"], generate=3)
    assert free.subject is not None
    end = int(free.subject.inputs.arguments["input_ids"][0, free.turns[0][1].start])
    trace = traced(["Keep it", "It is safe"], generate={"max_new_tokens": 3, "eos_token_id": end})
    assert [turn.role for turn in trace.turns[0]] == ["prompt", "output"]
    first, second = trace.spans(queries="turns", tokens="turns")
    assert [span.name for span in first.queries] == [span.name for span in first.tokens] == ["prompt"]
    assert [span.name for span in second.queries] == ["prompt", "output"]
    torch.testing.assert_close(first.values, torch.ones(2, 1, 1).double())
