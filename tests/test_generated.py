"""Traces of generated text: one pass has the rows of every step; prompts, outputs, turns; refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

import overt
from overt.tracing.generation import Generation, WrittenToken, output_text
from overt.view.server.trace_request import newest
from writing import SIZES, TEMPLATE, TEXT, byte_tokenizer, tiny

ENDLESS = {"vocab_size": 290, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 1}


def by_steps(model: Any, prompt: Tensor, count: int) -> tuple[list[int], list[Tensor]]:
    """What a model writes token by token, with a cache, and each step's weights, (layer, token)."""
    model.set_attn_implementation("eager")
    ids, rows, cache = prompt, [], None
    words: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            out = model(ids, past_key_values=cache, use_cache=True, output_attentions=True)
        cache = out.past_key_values
        rows.append(torch.stack([weights[0, :, -1].mean(dim=0) for weights in out.attentions]))
        words.append(int(out.logits[0, -1].argmax()))
        ids = torch.tensor([[words[-1]]])
    model.set_attn_implementation("sdpa")
    return words, rows


@pytest.mark.parametrize("memory", [2**30, 3000], ids=["maps", "states"])
@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_one_pass_has_the_rows_of_every_step(name: str, memory: int) -> None:
    model = tiny(name)
    prompts = [torch.randint(4, 290, (1, length)) for length in (9, 4)]
    want = [by_steps(model, prompt, 7) for prompt in prompts]
    trace = overt.trace(model, [prompt[0].tolist() for prompt in prompts], generate=7, memory=memory)
    assert trace.of_states == (memory < 2**20)
    trace.memory = trace.memory and 2**20
    assert trace.generated is not None
    for number, (prompt, (words, rows)) in enumerate(zip(prompts, want, strict=True)):
        length = prompt.shape[1]
        assert trace.tokens[number][: length + 7] == [str(each) for each in [*prompt[0].tolist(), *words]]
        assert trace.generated[number].nonzero().flatten().tolist() == list(range(length, length + 7))
        assert [tuple(turn) for turn in trace.turns[number]] == [
            ("prompt", 0, length),
            ("output", length, length + 7),
        ]
        for step, row in enumerate(rows):
            found = trace.raw(length - 1 + step)[number, :, 0]
            torch.testing.assert_close(found[:, : row.shape[1]].float(), row, atol=1e-5, rtol=0)
            assert not found[:, row.shape[1] :].any(), "nothing is seen before it is written"
    assert trace.generating_queries() == list(range(3, 15))
    if trace.of_states:
        torch.testing.assert_close(trace.rollout(), trace.rollout(trace.generating_queries()))


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_tokens_are_told_as_they_are_written_with_the_rows_of_their_step(name: str) -> None:
    model, heard = tiny(name), list[WrittenToken]()
    words, rows = by_steps(model, torch.tensor([[5, 6, 7, 8, 9]]), 6)

    def told(token: WrittenToken) -> bool:
        heard.append(token)
        return len(token.ids) < 4

    trace = overt.trace(model, [[5, 6, 7, 8, 9]], generate=Generation({"max_new_tokens": 6}, told=told))
    assert [token.ids for token in heard] == [words[: n + 1] for n in range(4)], "it stops when it is told to"
    for token, row in zip(heard, rows, strict=False):
        torch.testing.assert_close(token.rows, row, atol=1e-5, rtol=0)
    assert trace.tokens[0] == [str(each) for each in [5, 6, 7, 8, 9, *words[:4]]]
    assert model.config._attn_implementation == "sdpa", "as before"
    with pytest.raises(ValueError, match=r"^words can be told as they are written for one prompt, got 2"):
        overt.trace(model, [[5, 6], [7, 8]], generate=Generation({"max_new_tokens": 6}, told=told))


def test_padding_on_the_left_is_dropped() -> None:
    model = tiny("GPT-2")
    alone = overt.trace(model, [[5, 6, 7]], generate=4)
    ids = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    both = overt.trace(model, {"input_ids": ids, "attention_mask": (ids > 0).long()}, generate=4)
    assert both.tokens[0][:7] == alone.tokens[0]
    assert both.mask.sum(dim=1).tolist() == [7, 9]
    torch.testing.assert_close(both.rollout()[:1, :, :7, :7], alone.rollout(), atol=1e-6, rtol=1e-5)


def test_an_end_is_no_token_and_ends_a_batch_one_by_one() -> None:
    model = tiny("Llama")
    free = overt.trace(model, [[5, 6, 7], [8, 9, 10, 11]], generate=6)
    words = [[int(word) for word in free.tokens[0][3:9]], [int(word) for word in free.tokens[1][4:10]]]
    end = next(word for word in words[0][1:] if word not in words[1] and word != words[0][0])
    kept = words[0].index(end)
    trace = overt.trace(
        model, [[5, 6, 7], [8, 9, 10, 11]], generate={"max_new_tokens": 6, "eos_token_id": end}
    )
    assert trace.generated is not None
    assert trace.generated.sum(dim=1).tolist() == [kept, 6]
    assert trace.tokens[0][: 3 + kept] == free.tokens[0][: 3 + kept]
    model.generation_config.eos_token_id = end
    endless = overt.trace(model, [[5, 6, 7]], generate={"max_new_tokens": 6, "eos_token_id": None})
    assert endless.tokens[0] == free.tokens[0][:9], "without an end, its token is one like the others"
    with pytest.raises(ValueError, match=r"^LlamaForCausalLM \(llama\) wrote nothing: the first token that"):
        overt.trace(model, [[5, 6, 7]], generate={"max_new_tokens": 6, "eos_token_id": words[0][0]})


def test_an_encoder_decoder_writes_as_many_words_and_has_their_rows() -> None:
    model = tiny("T5")
    source = torch.randint(4, 290, (1, 6))
    model.set_attn_implementation("eager")
    steps = model.generate(
        source, max_new_tokens=5, do_sample=False, output_attentions=True, return_dict_in_generate=True
    )
    trace = overt.trace(model, source, generate=5)
    assert trace.generated is not None
    assert trace.generated.tolist() == [[False] * 7 + [True] * 5]
    assert trace.tokens[0][6:] == [str(number) for number in steps.sequences[0].tolist()]
    assert [tuple(turn) for turn in trace.turns[0]] == [("prompt", 0, 6), ("output", 7, 12)]
    for query, (own, cross) in enumerate(zip(steps.decoder_attentions, steps.cross_attentions, strict=True)):
        for layer in range(2):
            found = trace.raw(query)[0, layer, 0]
            row = torch.cat([cross[layer][0, :, -1].mean(dim=0), own[layer][0, :, -1].mean(dim=0)])
            torch.testing.assert_close(found[: len(row)].float(), row, atol=1e-5, rtol=0)
    assert trace.generating_queries() == list(range(5))
    assert overt.trace(model, source).generated is None, "a target that was not asked for is no output"


def test_samples_follow_the_seed_and_leave_random_numbers_alone() -> None:
    model = tiny("Llama")
    settings = {"max_new_tokens": 12, "do_sample": True, "temperature": 3.0}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = [overt.trace(model, [[5, 6, 7]], generate=settings, seed=seed).tokens for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1] != found[2]


def test_texts_and_offsets_go_on_through_the_output(tmp_path: Path) -> None:
    model, known = tiny("Llama"), byte_tokenizer()
    trace = overt.trace(model, [TEXT, "It is"], tokenizer=known, generate=9)
    assert trace.offsets is not None
    assert trace.generated is not None
    for number, text in enumerate([TEXT, "It is"]):
        assert trace.texts[number].startswith(text)
        ends = trace.offsets[number][trace.mask[number]]
        assert ends[-1, 1] == len(trace.texts[number])
        assert (ends[1:, 0] >= ends[:-1, 0]).all()
    ids = known(TEXT)["input_ids"]
    by_ids = overt.trace(model, [ids], tokenizer=known, generate=9)
    assert by_ids.texts[0] == trace.texts[0]
    trace.save(tmp_path / "t.safetensors")
    back = overt.Trace.load(tmp_path / "t.safetensors")
    assert (back.texts, back.turns) == (trace.texts, trace.turns)
    assert back.generated is not None
    assert torch.equal(back.generated, trace.generated)
    assert back[1].texts == trace.texts[1:]


def test_pieces_of_a_character_share_its_place() -> None:
    known = byte_tokenizer()
    ids = known("code ✓ of")["input_ids"]
    spans = known("code ✓ of", return_offsets_mapping=True)["offset_mapping"]
    text, places = output_text(known, ids[0], ids[1:])
    first = spans[0][1]
    assert text == "code ✓ of"[first:]
    pieces = [place for place, span in zip(places, spans[1:], strict=True) if span[0] <= 5 < span[1]]
    assert len(pieces) > 1
    assert all(text[start:stop].strip() == "✓" for start, stop in pieces)
    added = [newest(known, ids[0], ids[1 : count + 1]) for count in range(1, len(ids))]
    assert "".join(added) == text
    assert "" in added, "while a character is not whole, nothing is added"


def test_a_space_and_the_first_byte_of_a_character_have_both() -> None:
    made = Tokenizer(models.BPE({"a": 0, "Ġå": 1, "į": 2, "Ĺ": 3, "å": 4, "Ġ": 5}, [("Ġ", "å")]))
    made.decoder = decoders.ByteLevel()
    known = hf.PreTrainedTokenizerFast(tokenizer_object=made)
    text, places = output_text(known, 0, [1, 2, 3])
    assert (text, places) == (" 南", [(0, 2), (1, 2), (1, 2)]), "as tokenizers tell it of a text"


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            {"eos_token_id": "."},
            r"^generate\['eos_token_id'\] must be a whole number of at least 0, got '\.'",
        ),
        ({"do_sample": True, "top_p": 7.0}, r"^generate\['top_p'\] must lie in \[0, 1\], got 7\.0"),
        (
            {"min_new_tokens": 9},
            r"^generate\['min_new_tokens'\] must be at most 'max_new_tokens' \(4\), got 9",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(setting: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        overt.trace(tiny("Llama"), [[5, 6, 7]], generate={"max_new_tokens": 4, **setting})


def test_settings_of_the_model_that_greedy_decoding_ignores_are_no_warning_and_its_strings_end_the_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, known = tiny("Llama"), byte_tokenizer()
    plain = overt.trace(model, "The code", tokenizer=known, generate=8)
    model.generation_config.update(do_sample=True, temperature=0.2, top_p=0.9, top_k=5)
    with caplog.at_level("WARNING", "transformers"):
        again = overt.trace(model, "The code", tokenizer=known, generate=8)
    assert again.tokens == plain.tokens
    assert not caplog.records
    output = plain.turns[0][1]
    model.generation_config.stop_strings = [
        known.decode(known.convert_tokens_to_ids(plain.tokens[0][output.start + 1]))
    ]
    cut = overt.trace(model, "The code", tokenizer=known, generate=8)
    assert cut.turns[0][1].stop - output.start <= 2


CHAT = [
    {"role": "system", "content": "Keep it safe!"},
    {"role": "user", "content": "What is the code?"},
]


def test_messages_become_turns_and_the_reply_is_one() -> None:
    model, known = tiny("Llama"), byte_tokenizer(chat_template=TEMPLATE)
    trace = overt.trace(model, CHAT, tokenizer=known, generate=5)
    turns = trace.turns[0]
    assert [turn.role for turn in turns] == ["system", "user", "assistant"]
    words = trace.tokens[0]
    assert [words[turn.start] for turn in turns] == ["<|system|>", "<|user|>", "<|assistant|>"]
    assert words[turns[0].stop - 1] == "<|end|>"
    assert (turns[0].start, turns[2].stop) == (0, len(words))
    assert trace.texts[0].startswith(
        "<|system|>Keep it safe!<|end|><|user|>What is the code?<|end|><|assistant|>"
    )
    assert trace.generated is not None
    assert not trace.generated[0, turns[2].start], "the template wrote the beginning of the reply"
    assert trace.generated[0, turns[2].start + 1 :].all()
    assert trace.special[0, turns[1].stop - 1]
    plain = overt.trace(model, [CHAT, CHAT[1:]], tokenizer=known)
    assert [[turn.role for turn in each] for each in plain.turns] == [["system", "user"], ["user"]]
    assert plain.generated is None


def test_a_template_that_rewrites_earlier_messages_has_turns_by_content() -> None:
    template = (
        "{{ messages | length }}:{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    )
    trace = overt.trace(tiny("Llama"), CHAT, tokenizer=byte_tokenizer(chat_template=template))
    start, stop = trace.turns[0][1][1:]
    assert trace.offsets is not None
    (first, _), (_, last) = trace.offsets[0, [start, stop - 1]].tolist()
    assert trace.texts[0][first:last].strip() == "What is the code?"
    # Contents that are elsewhere in the text as well: a role, the number of messages, another message.
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "user"}]
    chat += [{"role": "assistant", "content": "3"}, {"role": "user", "content": "user"}]
    trace = overt.trace(tiny("Llama"), chat, tokenizer=byte_tokenizer(chat_template=template))
    assert trace.texts[0] == "4:<|system|>s<|user|>user<|assistant|>3<|user|>user"
    assert trace.offsets is not None
    begins = [int(trace.offsets[0, turn.start, 0]) for turn in trace.turns[0]]
    assert [turn.role for turn in trace.turns[0]] == ["system", "user", "assistant", "user"]
    assert begins == [12, 21, 38, 47]
    with pytest.raises(ValueError, match=r"^the chat template changes the message '', so its tokens cannot"):
        overt.trace(
            tiny("Llama"),
            [{"role": "user", "content": ""}, *chat],
            tokenizer=byte_tokenizer(chat_template=template),
        )
    upper = byte_tokenizer(
        chat_template="{% for m in messages %}{{ loop.length }}{{ m['content'] | upper }}{% endfor %}"
    )
    with pytest.raises(
        ValueError, match=r"^the chat template changes the message 'Keep it safe!', so its to"
    ):
        overt.trace(tiny("Llama"), CHAT, tokenizer=upper)


def test_what_cannot_be_generated_is_refused_in_a_line() -> None:
    model, known = tiny("Llama"), byte_tokenizer()
    bert = hf.BertModel(hf.BertConfig(**SIZES, intermediate_size=48, vocab_size=290))
    with pytest.raises(
        ValueError, match=r"^BertModel \(bert\) cannot generate: use a language model, such as"
    ):
        overt.trace(bert, [[5, 6]], generate=4)
    both_ways = hf.BertLMHeadModel(hf.BertConfig(**SIZES, intermediate_size=48, vocab_size=290))
    with pytest.raises(
        ValueError, match=r"^generate needs causal attention, and this stack is of kind 'enco"
    ):
        overt.trace(both_ways, [[5, 6]], generate={"max_new_tokens": 2, "eos_token_id": 0})
    for empty in ("", ["Keep it", ""]):
        with pytest.raises(ValueError, match=r"^inputs must hold text with at least one token, got \[''\]"):
            overt.trace(model, empty, tokenizer=known, generate=4)
    for nothing in ([], [[]], torch.zeros(1, 0, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"^inputs must be text, token ids, images or a mapping"):
            overt.trace(model, nothing, generate=4)
    padding = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.tensor([[0, 0]])}
    with pytest.raises(ValueError, match=r"^generate needs prompts with at least one token, got one of pad"):
        overt.trace(model, padding, generate=4)
    for wrong in (0, True, 2.5, "many"):
        with pytest.raises(ValueError, match=r"^generate must be a whole number of at least 1, got "):
            overt.trace(model, [[5, 6]], generate=wrong)
    with pytest.raises(ValueError, match=r"^a setting in generate must be one of 'max_new_tokens'.*got 'nu"):
        overt.trace(model, [[5, 6]], generate={"max_new_tokens": 4, "num_return_sequences": 2})
    with pytest.raises(ValueError, match=r"^generate must hold 'max_new_tokens', got 'do_sample'"):
        overt.trace(model, [[5, 6]], generate={"do_sample": True})
    with pytest.raises(ValueError, match=r"^tokens cannot be given with generate"):
        overt.trace(model, [[5, 6]], generate=4, tokens=[["a", "b"]])
    with pytest.raises(ValueError, match=r"^generate writes the decoder's inputs, which were given as well"):
        overt.trace(tiny("T5"), [[5, 6]], decoder=[[0, 7]], generate=4)
    with pytest.raises(
        ValueError, match=r"^the prompt has 120 tokens and generate=9, but the model has posit"
    ):
        overt.trace(tiny("GPT-2"), [[5] * 120], generate=9)
    positions = {"input_ids": torch.tensor([[5, 6]]), "position_ids": torch.tensor([[0, 1]])}
    with pytest.raises(ValueError, match=r"^position_ids cannot be given with generate"):
        overt.trace(model, positions, generate=4)
    replied = [*CHAT, {"role": "assistant", "content": "It is 7429"}]
    with pytest.raises(ValueError, match=r"^messages need a tokenizer with a chat template"):
        overt.trace(model, CHAT, tokenizer=known, generate=4)
    with pytest.raises(
        ValueError, match=r"^the last message is the assistant's, and generate writes the next"
    ):
        overt.trace(model, replied, tokenizer=byte_tokenizer(chat_template=TEMPLATE), generate=4)
    with pytest.raises(ValueError, match=r"^nothing was generated in this trace: trace with generate=64"):
        overt.trace(model, [[5, 6]]).generating_queries()


LATER = {
    "bart": lambda: hf.BartForCausalLM(
        hf.BartConfig(
            d_model=32,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            is_decoder=True,
            is_encoder_decoder=False,
            **ENDLESS,
        )
    ),
    "roberta": lambda: hf.RobertaForCausalLM(
        hf.RobertaConfig(
            **SIZES, intermediate_size=48, is_decoder=True, max_position_embeddings=64, **ENDLESS
        )
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_positions_are_those_of_each_prompt_alone_as_generate_has_them(name: str) -> None:
    """BART takes no positions, so that padding on the left would move a prompt; RoBERTa has its own."""
    torch.manual_seed(0)
    model = LATER[name]().eval()
    for path, parameter in model.named_parameters():  # so that a position matters
        parameter.data.mul_(40.0 if "position" in path else 3.0 if parameter.dim() > 1 else 1.0)
    prompts = [torch.randint(4, 290, (1, length)) for length in (9, 4)]
    trace = overt.trace(model, [prompt[0].tolist() for prompt in prompts], generate=6)
    model.set_attn_implementation("eager")
    for number, prompt in enumerate(prompts):
        steps = model.generate(
            prompt, max_new_tokens=6, do_sample=False, output_attentions=True, return_dict_in_generate=True
        )
        length = prompt.shape[1]
        assert trace.tokens[number][: length + 6] == [str(each) for each in steps.sequences[0].tolist()]
        for step, layers in enumerate(steps.attentions):
            row = torch.stack([weights[0, :, -1].mean(dim=0) for weights in layers])
            found = trace.raw(length - 1 + step)[number, :, 0, : length + step].float()
            torch.testing.assert_close(found, row, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_positions_that_change_while_it_writes_are_refused(kind: str) -> None:
    own = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0}
    if kind == "longrope":
        own |= {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 8.0]}
        own |= {"original_max_position_embeddings": 12}
    model = tiny("Llama", max_position_embeddings=12, rope_parameters=own)
    short = torch.randint(4, 290, (1, 5))
    words, rows = by_steps(model, short, 6)
    trace = overt.trace(model, short, generate=6)
    assert trace.tokens[0][5:] == list(map(str, words))
    torch.testing.assert_close(trace.raw(9)[0, :, 0, :10].float(), rows[5], atol=1e-5, rtol=0)
    line = (
        r"^model.rotary_emb of Llama.* changes its rotary positions beyond 12 tokens, and prompt and output h"
    )
    with pytest.raises(ValueError, match=line):
        overt.trace(model, torch.randint(4, 290, (1, 9)), generate=6)


def test_masks_and_positions_of_other_shapes_are_refused() -> None:
    model, ids = tiny("Llama"), torch.tensor([[5, 6, 7, 8]])
    seen = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    seen[..., 2:, 1] = False
    with pytest.raises(
        ValueError, match=r"^attention_mask must have shape \(1, 4\) with generate, got \(1, "
    ):
        overt.trace(model, {"input_ids": ids, "attention_mask": seen}, generate=3)
    for places in (torch.arange(4), torch.arange(4).view(1, 1, 4).expand(3, 1, 4)):
        with pytest.raises(ValueError, match=r"^position_ids cannot be given with generate"):
            overt.trace(model, {"input_ids": ids, "position_ids": places}, generate=3)


@pytest.mark.parametrize("name", ["Llama", "T5"])
@pytest.mark.parametrize(
    "how", [{}, {"do_sample": True}, {"num_beams": 3}], ids=["greedy", "sampled", "beams"]
)
def test_a_model_that_returns_several_outputs_by_itself_writes_one(name: str, how: dict[str, Any]) -> None:
    settings = {"max_new_tokens": 4, **how}
    want = overt.trace(tiny(name), [[5, 6, 7]], generate=settings).tokens
    model = tiny(name)
    own = {"do_sample": True, "num_return_sequences": 2, "return_dict_in_generate": True}
    for setting, value in own.items():
        setattr(model.generation_config, setting, value)
    assert overt.trace(model, [[5, 6, 7]], generate=settings).tokens == want


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.3}, r"^generate\['temperature'\] would change nothing: give 'do_sample': True as"),
        ({"do_sample": False, "top_k": 5}, r"^generate\['top_k'\] would change nothing"),
        ({"length_penalty": 2.0}, r"^generate\['length_penalty'\] would change nothing: give 'num_beams' as"),
        ({"do_sample": "no"}, r"^generate\['do_sample'\] must be one of True, False; got 'no'"),
        ({"num_beams": 0}, r"^generate\['num_beams'\] must be a whole number of at least 1, got 0"),
        ({"forced_bos_token_id": 5}, r"^generate\['forced_bos_token_id'\] is the first word of an encoder"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        overt.trace(tiny("Llama"), [[5, 6, 7]], generate={"max_new_tokens": 4, **settings})


def test_more_words_than_a_decoder_has_positions_are_refused() -> None:
    sizes = {
        f"{side}_{what}": 4 for side in ("encoder", "decoder") for what in ("attention_heads", "ffn_dim")
    }
    config = hf.BartConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        max_position_embeddings=16,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        **sizes,
        **ENDLESS,
    )
    model = hf.BartForConditionalGeneration(config).eval()
    with pytest.raises(
        ValueError, match=r"^generate must be at most 15, as the model has positions for 16 to"
    ):
        overt.trace(model, [[5, 6]], generate=16)
    assert overt.trace(model, [[5, 6]], generate=15).queries == 16
    assert overt.trace(model, [[5, 6]]).queries == 16, "nor does it write more by itself"
    with pytest.raises(ValueError, match=r"^the input has 17 tokens, but the model has positions for 16"):
        overt.trace(model, [[5] * 17], generate=4)


def test_calls_of_tools_are_messages_and_what_a_template_cannot_render_is_refused() -> None:
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['tool_calls'] if m['tool_calls'] else m['content'] }}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    calls: list[dict[str, Any]] = [
        *CHAT,
        {"role": "assistant", "tool_calls": "f(7)"},
        {"role": "tool", "content": "7429"},
    ]
    known = byte_tokenizer(chat_template=template)
    trace = overt.trace(tiny("Llama"), calls, tokenizer=known, generate=3)
    assert [turn.role for turn in trace.turns[0]] == ["system", "user", "assistant", "tool", "assistant"]
    broken = byte_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(
        ValueError, match=r"^the chat template cannot render these messages: roles must alter"
    ):
        overt.trace(tiny("Llama"), CHAT, tokenizer=broken)


def test_a_model_that_returns_no_start_is_refused() -> None:
    sizes = {
        f"{side}_{what}": 4 for side in ("encoder", "decoder") for what in ("attention_heads", "ffn_dim")
    }
    config = hf.WhisperConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=80,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **sizes,
        **{**ENDLESS, "eos_token_id": 2},
    )
    torch.manual_seed(1)  # with other weights, it begins by writing its start
    model, sound = hf.WhisperForConditionalGeneration(config).eval(), torch.randn(1, 8, 40)
    line = (
        r"^WhisperForConditionalGeneration \(whisper\) returns what it writes without the tokens that the t"
    )
    for how in ({"generate": 4}, {}):
        with pytest.raises(ValueError, match=line):
            overt.trace(model, {"input_features": sound}, **how)
    assert overt.trace(model, {"input_features": sound}, decoder=[[3, 7, 8]]).queries == 3
