"""Parallel corpora, byte pair encoding, the stand-in language and BLEU."""

from __future__ import annotations

import gzip
import math
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overt.data import pairs, reordered, subwords
from overt.data.pairs import Pair
from overt.judge import bleu

REAL = os.environ.get("OVERT_DATA")
real = pytest.mark.skipif(
    REAL is None or not (Path(REAL) / "iwslt14").is_dir(), reason="OVERT_DATA has no iwslt14/ to read"
)
words = st.text("abc", min_size=1, max_size=6)
texts = st.lists(st.lists(words, min_size=1, max_size=6).map(" ".join), min_size=1, max_size=8)


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / name.replace("__", ".")
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text, encoding="utf-8")
    return folder


def whole(folder: Path, **changes: str) -> Path:
    """A folder of two languages; changes replace files or, with "", leave them out."""
    lines = {"train": "ein hund .\nzwei hunde .\n", "valid": "drei .\n", "test": "vier .\n"}
    files = {f"{split}__{language}": text for split, text in lines.items() for language in ("de", "en")}
    return write(folder, **{name: text for name, text in {**files, **changes}.items() if text})


# --- Corpora ---


def test_a_folder_is_read_plain_or_gzipped_in_both_directions(tmp_path: Path) -> None:
    folder = whole(tmp_path / "x", train__en="", train__en__gz="a dog .\ntwo dogs .\n")
    corpus = pairs.load(str(folder), None, "de-en")
    assert corpus.train == [Pair("ein hund .", "a dog ."), Pair("zwei hunde .", "two dogs .")]
    assert corpus.tokenised
    assert corpus.direction == "de-en"
    assert pairs.load(str(folder), None, "en-de").train[0] == Pair("a dog .", "ein hund .")


def test_only_line_feeds_separate_sentences(tmp_path: Path) -> None:
    folder = whole(tmp_path, train__de="ein\x85hund .\r\nzwei\u2028 .\n")
    assert [pair.source for pair in pairs.load(str(folder)).train] == ["ein\x85hund .", "zwei\u2028 ."]


def test_multi30k_is_trained_on_tokenised_text_and_keeps_the_raw_references(tmp_path: Path) -> None:
    root = tmp_path / "multi30k"
    names = ("train", "val", "test_2016_flickr")
    write(
        root / "tok",
        **{f"{n}__lc__norm__tok__{lang}": "ein hund .\n" for n in names for lang in ("de", "en")},
    )
    write(root / "raw", **{f"{n}__{lang}__gz": "Ein Hund.\n" for n in names for lang in ("de", "en")})
    corpus = pairs.load("multi30k", tmp_path)
    assert corpus.test == [Pair("ein hund .", "ein hund .")]
    assert corpus.references == ["Ein Hund."]
    assert pairs.has("multi30k", tmp_path)
    assert not pairs.has("iwslt14", tmp_path)


def test_a_partial_training_set_is_told(tmp_path: Path) -> None:
    whole(tmp_path / "iwslt14", train__de="", train__en="", train_partial__de="a\n", train_partial__en="b\n")
    assert pairs.load("iwslt14", tmp_path).remark == "1 of the 160,239 training pairs"


def test_pieces_of_words_are_joined_and_told(tmp_path: Path) -> None:
    corpus = pairs.load(str(whole(tmp_path, train__de="ein h@@ u@@ nd .\nzwei .\n")))
    assert corpus.train[0].source == "ein hund ."
    assert corpus.was_in_pieces


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__en": "a dog .\n"}, r"train.de has 2 lines and .*train.en 1:"),
        ({"valid__en": ""}, r"has no valid.en \(or valid.en.gz\)"),
        ({"test__de": "", "test__en": ""}, r"must have test.de and test.en; it has train.de, "),
    ],
)
def test_incomplete_folders_are_refused_by_name(
    changes: dict[str, str], message: str, tmp_path: Path
) -> None:
    folder = whole(tmp_path, **changes)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        pairs.load(str(folder))
    assert "\n" not in str(error.value)


def test_an_empty_test_set_is_refused(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    for language in ("de", "en"):
        (folder / f"test.{language}").write_text("")
    with pytest.raises(ValueError, match=r"test\.de and .*test\.en are empty"):
        pairs.load(str(folder))


@pytest.mark.parametrize(
    ("dataset", "direction", "message"),
    [
        ("multi30k", "de-fr", "--direction must be de-en or en-de for multi30k, got de-fr"),
        ("multi30k", "german", "--direction must be two languages, such as de-en, got german"),
        ("nowhere", "de-en", "--dataset must be multi30k, iwslt14 or a folder, got nowhere"),
    ],
)
def test_unknown_directions_and_data_sets_are_refused(
    dataset: str, direction: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        pairs.load(dataset, tmp_path, direction)


def test_files_that_are_not_utf_8_are_named(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    (folder / "train.de").write_bytes("für alle .\nzwei .\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"train\.de must be text in UTF-8"):
        pairs.load(str(folder))


# --- Byte pair encoding ---


def plain_bpe(word: str, merges: list[tuple[str, str]]) -> list[str]:
    """Sennrich et al. 2016, by the book: all merges in turn."""
    parts = [*word[:-1], word[-1] + "</w>"]
    for merge in merges:
        place = 0
        while place + 1 < len(parts):
            if (parts[place], parts[place + 1]) == merge:
                parts[place : place + 2] = ["".join(merge)]
            place += 1
    return parts


@given(texts, st.integers(10, 30))
def test_pieces_are_those_of_all_merges_in_turn(lines: list[str], size: int) -> None:
    import json

    tokenizer = subwords.train(lines, size)
    merges = [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    for line in lines:
        want = [piece for word in line.split() for piece in plain_bpe(word, merges)]
        assert tokenizer.encode(line, add_special_tokens=False).tokens == want
        assert tokenizer.decode(tokenizer.encode(line).ids) == line


@given(texts, st.randoms())
def test_merges_have_one_order_whatever_order_equal_ones_came_in(lines: list[str], random: object) -> None:
    import json

    merges = [tuple(m) for m in json.loads(subwords.train(lines, 40).to_str())["model"]["merges"]]
    used = subwords._frequencies(merges, lines)
    shuffled = sorted(range(len(merges)), key=lambda n: (-used[n], random.random()))  # type: ignore[attr-defined]
    made: set[str] = set()
    order: list[tuple[str, str]] = []
    while len(order) < len(merges):  # the shuffled order, as far as merges have what they are built on
        products = {"".join(merge) for merge in merges}
        ready = next(
            n for n in shuffled
            if merges[n] not in order and all(part in made or part not in products for part in merges[n])
        )  # fmt: skip
        order.append(merges[ready])
        made.add("".join(merges[ready]))
    if subwords._frequencies(order, lines) == [used[merges.index(merge)] for merge in order]:
        assert subwords._canonical(order, lines) == subwords._canonical(merges, lines)


def test_training_twice_gives_the_same_ids() -> None:
    corpus = reordered.corpus(500, 1, 1)
    lines = [side for pair in corpus.train for side in pair]
    first, second = subwords.train(lines, 300), subwords.train(lines, 300)
    assert first.get_vocab() == second.get_vocab()
    assert subwords.sha256(first) == subwords.sha256(second)
    assert subwords.sha256(first) != subwords.sha256(subwords.train(lines, 301))


def test_codes_are_read_and_bad_ones_named() -> None:
    tokenizer = subwords.from_codes("#version: 0.2\nl o\nlo w</w>\n", ["low lot"])
    assert tokenizer.encode("low lot", add_special_tokens=False).tokens == ["low</w>", "lo", "t</w>"]
    assert tokenizer.token_to_id("</s>") == subwords.EOS_ID
    with pytest.raises(ValueError, match="codes, line 2: a merge is two pieces, got 'l o w x'"):
        subwords.from_codes("#version: 0.2\nl o w x\n", ["low"])
    with pytest.raises(ValueError, match="codes, line 2: 'lo' is no letter, and no earlier line makes it"):
        subwords.from_codes("#version: 0.2\nlo w</w>\n", ["low"])
    with pytest.raises(ValueError, match=r"codes of version 0\.1"):
        subwords.from_codes("#version: 0.1\nl o\n", ["low"])


@real
@pytest.mark.slow
def test_published_codes_give_all_published_lines() -> None:
    assert REAL is not None
    folder, count = Path(REAL) / "iwslt14", 0
    codes = gzip.decompress((folder / "10k_bpe" / "code.gz").read_bytes()).decode()
    for split in ("valid", "test"):
        for language in ("de", "en"):
            plain, published = (
                gzip.decompress((place / f"{split}.{language}.gz").read_bytes()).decode().split("\n")[:-1]
                for place in (folder, folder / "10k_bpe")
            )
            tokenizer = subwords.from_codes(codes, plain)
            for line, want in zip(
                tokenizer.encode_batch(plain, add_special_tokens=False), published, strict=True
            ):
                pieces = [p.removesuffix("</w>") if p.endswith("</w>") else f"{p}@@" for p in line.tokens]
                count += " ".join(pieces) == want
    assert count == 28_066


# --- The stand-in ---


def test_no_held_out_sentence_is_in_training_and_none_occurs_twice() -> None:
    corpus = reordered.corpus(3000, 200, 200)
    held_out = [pair.source for pair in corpus.valid + corpus.test]
    assert len(set(held_out)) == 400
    assert not set(held_out) & {pair.source for pair in corpus.train}
    assert corpus == reordered.corpus(3000, 200, 200)


def test_the_made_up_language_has_the_words_of_the_english_sentence_in_another_order() -> None:
    back = {made: word for word, made in reordered.DICTIONARY.items()}
    assert len(back) == len(reordered.DICTIONARY)
    for pair in reordered.corpus(300, 1, 1).train:
        target = [back[word] for word in pair.target.split()]
        assert Counter(target) == Counter(word for word in pair.source.split() if word != ",")
        assert target[-1] in ("is", "are")


def test_the_example_of_the_module() -> None:
    back = {made: word for word, made in reordered.DICTIONARY.items()}
    words = ("near", "the", "lamp", ",", "the", "boy", "who", "saw", "the", "dogs")
    sentence = reordered.Sentence(words, False, 1, "fronted subject relative", (), ())
    pair = reordered.translate(sentence, "happy")
    assert pair.source == "near the lamp , the boy who saw the dogs is happy"
    want = "the dogs saw who the boy the lamp near happy is"
    assert " ".join(back[word] for word in pair.target.split()) == want


# --- BLEU ---


def plain_bleu(hypotheses: list[str], references: list[str]) -> float:
    """Papineni et al. 2002, by the book."""
    logs, length, wanted = 0.0, 0, 0
    for n in range(1, 5):
        hits = total = 0
        for one, other in zip(hypotheses, references, strict=True):
            grams, there = (
                Counter(tuple(line.split()[i : i + n]) for i in range(len(line.split()) - n + 1))
                for line in (one, other)
            )
            hits += sum(min(count, there[gram]) for gram, count in grams.items())
            total += sum(grams.values())
        if not hits:
            return 0.0
        logs += math.log(hits / total) / 4
    length = sum(len(line.split()) for line in hypotheses)
    wanted = sum(len(line.split()) for line in references)
    return 100 * math.exp(logs + min(0.0, 1 - wanted / length))


@given(
    st.lists(
        st.tuples(*[st.lists(st.sampled_from("ab"), min_size=1, max_size=9)] * 2), min_size=1, max_size=5
    )
)
def test_bleu_on_tokenised_text_is_that_of_the_paper(lines: list[tuple[list[str], list[str]]]) -> None:
    ours, theirs = ([" ".join(pair[side]) for pair in lines] for side in (0, 1))
    assert bleu.multi_bleu(ours, theirs).score == pytest.approx(plain_bleu(ours, theirs), abs=1e-9)


def test_hyphenated_words_are_split_on_both_sides() -> None:
    assert bleu.split_hyphens("a well-known man - ex-wife") == (
        "a well ##AT##-##AT## known man - ex ##AT##-##AT## wife"
    )
    ours, theirs = ["a well-known man sat down"], ["a well-known man stood up"]
    split = [[bleu.split_hyphens(line) for line in side] for side in (ours, theirs)]
    assert bleu.tokenised_bleu(ours, theirs).score == pytest.approx(plain_bleu(*split))
    assert bleu.tokenised_bleu(ours, theirs).score > bleu.multi_bleu(ours, theirs).score


@pytest.mark.parametrize("line", ["a well @-@ known man", "it &apos;s here"])
def test_tokenised_text_is_refused_where_ordinary_text_is_scored(line: str) -> None:
    for ours, theirs in (([line], ["a"]), (["a"], [line])):
        with pytest.raises(ValueError, match="needs ordinary text, and this is tokenised"):
            bleu.plain_bleu(ours, theirs)


def test_text_is_detokenised_and_scored_with_13a() -> None:
    lines = bleu.detokenise(["he &apos;s here , isn &apos;t he ?"], "en")
    assert lines == ["he's here, isn't he?"]
    score = bleu.plain_bleu(lines, ["He's here, isn't he?"], lowercase=True)
    assert score.score == pytest.approx(100.0)
    assert "tok:13a" in score.signature
    assert "case:lc" in score.signature


def test_the_bootstrap_finds_a_large_difference_and_no_difference() -> None:
    references = [f"the {n} dogs run over the wide field ." for n in range(60)]
    worse = [line.replace("wide field", "road") for line in references]
    assert bleu.paired_bootstrap(references, worse, references, samples=200) < 0.05
    assert bleu.paired_bootstrap(references, worse, worse) == 1.0


def test_bleu_needs_a_reference_for_each_sentence() -> None:
    with pytest.raises(ValueError, match="got 1 hypotheses, 2"):
        bleu.multi_bleu(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="at least one sentence"):
        bleu.multi_bleu([], [])
