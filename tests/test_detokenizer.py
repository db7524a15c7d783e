"""Text as it grows, against the decoding of all ids at once, for tokenizers of each kind and ids that make no sense."""

from os.path import commonprefix

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CORPUS, make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nanoserve.detokenizer import REPLACEMENT, Detokenizer

SPECIAL = ["<unk>", "<s>", "</s>"]


def fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def make_unigram() -> PreTrainedTokenizerFast:
    """As Llama 2's: a space is written "▁", and what has no token is spelt in bytes."""
    pieces = ["▁", *"abcdefgh", "▁a", "▁the", "▁fox", "ing", "▁▁", "é", REPLACEMENT, "ab", "▁cafe"]
    vocab = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in vocab], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(tokenizer)


def make_metaspace() -> PreTrainedTokenizerFast:
    """As XLM-R's: no bytes, and the decoder drops the first space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=60, special_tokens=SPECIAL))
    return fast(tokenizer)


BYTE_LEVEL, UNIGRAM, METASPACE = make_tokenizer(), make_unigram(), make_metaspace()
TOKENIZERS = {"byte-level": BYTE_LEVEL, "unigram": UNIGRAM, "metaspace": METASPACE}
TEXT = " the fox 🦊, 日本語 café\n\n é́ 👩‍👩‍👧 the end\n"
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def letters(text: str) -> list[int]:
    """One token for each byte, of the byte-level tokenizer."""
    pieces = BYTE_LEVEL.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return BYTE_LEVEL.convert_tokens_to_ids(list("".join(piece for piece, _ in pieces)))


def byte_ids(data: str | bytes) -> list[int]:
    """One token for each byte, of the unigram tokenizer."""
    data = data if isinstance(data, bytes) else data.encode()
    return UNIGRAM.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in data])


def decode(tokenizer, ids, skip=True):
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def stream(tokenizer, prompt, steps, stop=(), skip=True):
    """What is shown after each step's ids, the last of which finish the output, and the stop string."""
    detokenizer, shown = Detokenizer(tokenizer, prompt, stop, skip), []
    for n, ids in enumerate(steps, start=1):
        matched = detokenizer.append(ids, finished=n == len(steps))
        shown.append(detokenizer.shown(n == len(steps) or matched is not None))
        if matched is not None:
            return shown, matched
    return shown, None


@st.composite
def outputs(draw):
    """(tokenizer, prompt ending in a whole character, output in steps, skip_special_tokens)."""
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    tokenizer = TOKENIZERS[name]
    some_id = st.integers(0, len(tokenizer) + 2)  # the last have no token
    if name == "unigram":  # bytes of whole characters, bytes of parts, pieces
        some_id = st.one_of(some_id, st.integers(259, len(tokenizer) - 1), st.sampled_from(byte_ids("\né€🦊")))
    elif name == "byte-level":
        some_id = st.one_of(some_id, st.sampled_from(letters("aé€🦊")))
    prompt = draw(st.lists(some_id, max_size=12)) + tokenizer.encode("a fox", add_special_tokens=False)
    return (
        tokenizer,
        prompt,
        draw(st.lists(st.lists(some_id, max_size=4), min_size=1, max_size=25)),
        draw(st.booleans()),
    )


@given(outputs())
@settings(max_examples=600, deadline=None)
def test_what_is_shown_only_grows_and_ends_as_the_decoding_of_all_ids(case):
    tokenizer, prompt, steps, skip = case
    shown, _ = stream(tokenizer, prompt, steps, skip=skip)
    before, after = decode(tokenizer, prompt, skip), decode(tokenizer, prompt + sum(steps, []), skip)
    assert after.startswith(before) and shown[-1] == after[len(before) :]
    assert all(new.startswith(old) for old, new in zip(shown, shown[1:], strict=False))


@every_tokenizer
@pytest.mark.parametrize("skip", [True, False])
def test_a_text_cut_off_anywhere_is_the_decoding_of_its_ids(tokenizer, skip):
    ids = tokenizer.encode(TEXT, add_special_tokens=False) + [tokenizer.eos_token_id] + tokenizer.encode("the dog")
    for end in range(1, len(ids) + 1):
        shown, _ = stream(tokenizer, [tokenizer.bos_token_id], [[i] for i in ids[:end]], skip=skip)
        assert shown[-1] == decode(tokenizer, [tokenizer.bos_token_id, *ids[:end]], skip).removeprefix("<s>")
        assert all(shown[-1].startswith(text) for text in shown)
        assert tokenizer is not BYTE_LEVEL or shown[-1] == decode(tokenizer, ids[:end], skip)


def test_a_character_is_shown_as_soon_as_it_is_certain():
    steps = [[i] for i in letters("🦊éa")]
    assert stream(BYTE_LEVEL, letters("x"), steps)[0] == ["", "", "", "🦊", "🦊", "🦊é", "🦊éa"]
    # Of byte tokens, only when no broken one can follow: the decoder would replace the fox as well.
    steps = [[i] for i in byte_ids("🦊") + UNIGRAM.convert_tokens_to_ids(["▁a"])]
    assert stream(UNIGRAM, UNIGRAM.encode("b"), steps)[0] == ["", "", "", "", "🦊 a"]


def test_of_broken_bytes_at_most_the_last_is_held_back():
    bad = BYTE_LEVEL.convert_tokens_to_ids("ÿ")  # byte-level BPE's letter for the byte 0xff
    shown, _ = stream(BYTE_LEVEL, letters("a"), [[bad]] * 40 + [letters("b")])
    assert shown == [REPLACEMENT * n for n in range(40)] + [REPLACEMENT * 40 + "b"]


@pytest.mark.parametrize(
    "prompt,output,expected",
    [
        (letters("ab€")[:-1], letters("ab€")[-1:] + letters("c"), ["€", "€c", "€c"]),  # half is in the prompt
        (letters("ab€")[:-1], letters("c"), ["c", "c"]),  # and stays half: the prompt's text has said so
        (letters("ab€")[:-2], letters("ab€")[-2:-1], ["", ""]),
        (letters("ab" + REPLACEMENT), letters("c"), ["c", "c"]),
        (letters("ab" + REPLACEMENT), letters(REPLACEMENT), ["", "", "", REPLACEMENT]),
    ],
)
def test_a_prompt_may_end_in_half_a_character(prompt, output, expected):
    assert stream(BYTE_LEVEL, prompt, [[i] for i in output] + [[]])[0] == expected


def test_a_run_of_byte_tokens_may_begin_in_the_prompt():
    run, letter = byte_ids("🦊🐕🦝"), UNIGRAM.convert_tokens_to_ids(["b"])
    for border in range(len(run)):
        prompt = letter + run[:border]
        shown = stream(UNIGRAM, prompt, [[i] for i in run[border:]] + [letter])[0]
        known = commonprefix([decode(UNIGRAM, prompt), "b🦊🐕🦝b"])
        assert known + shown[-1] == "b🦊🐕🦝b"


@pytest.mark.parametrize(
    "tokenizer,ids",
    {
        "text": (BYTE_LEVEL, BYTE_LEVEL.encode(" the quick brown 🦊" * 500)),
        "pieces": (UNIGRAM, UNIGRAM.encode(" the quick brown 🦊" * 200)),
        "continuation bytes": (BYTE_LEVEL, letters("€")[-1:] * 5000),
        "lead bytes": (BYTE_LEVEL, letters("€")[:1] * 5000),
        "byte tokens": (UNIGRAM, byte_ids("🦊" * 1250)),
        "broken byte tokens": (UNIGRAM, byte_ids(b"\xff") * 5000),
        "special tokens": (UNIGRAM, [UNIGRAM.eos_token_id] * 5000),
        "ids without a token": (BYTE_LEVEL, [5000] * 5000),
        "replacement characters": (UNIGRAM, UNIGRAM.convert_tokens_to_ids([REPLACEMENT]) * 5000),
    }.values(),
)
def test_a_long_output_is_decoded_in_linear_time(tokenizer, ids, monkeypatch):
    num_decoded, decode_ids = 0, tokenizer.decode

    def count(token_ids, **options):
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return decode_ids(token_ids, **options)

    monkeypatch.setattr(tokenizer, "decode", count)
    shown, _ = stream(tokenizer, tokenizer.encode("a") * 10000, [[i] for i in ids], stop=("\n",))
    assert num_decoded <= 25 * len(ids) + 1000
    assert shown[-1] == decode_ids(tokenizer.encode("a") + ids, skip_special_tokens=True)[1:]


@pytest.mark.parametrize(
    "text,stop,expected,matched",
    [
        ("one two three", ("two",), "one ", "two"),  # across tokens of one letter
        ("one two three", ("x", "three", "two"), "one ", "two"),  # the leftmost
        ("one two three", ("o",), "", "o"),
        ("ab", ("abc", "ab"), "", "ab"),  # one is the other's start: the shorter is complete first
        ("abc", ("abc", "b"), "a", "b"),  # one is inside the other: likewise
        ("aab", ("ab",), "a", "ab"),  # a start that failed holds another start
        ("one two", ("two three",), "one two", None),  # never completed: what was held is shown
        ("café!", ("é!",), "caf", "é!"),
        ("🦊🐕", ("🐕",), "🦊", "🐕"),
        ("a\n\nb", ("\n\n",), "a", "\n\n"),
        ("ab", (), "ab", None),
    ],
)
def test_a_stop_string_ends_the_text_before_it(text, stop, expected, matched):
    ids = letters("x")
    steps = [[i] for c in text for i in letters(c)]
    shown, stopped_by = stream(BYTE_LEVEL, ids, steps, stop)
    assert (shown[-1], stopped_by) == (expected, matched)
    assert all(expected.startswith(each) for each in shown)


def test_of_stop_strings_completed_by_one_token_the_leftmost_counts():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["abcd", "bcdbc"])
    shown = [stream(tokenizer, [5], [[tokenizer.convert_tokens_to_ids(token)]], stop) for token, stop in (
        ("abcd", ("c", "d", "bcd")), ("bcdbc", ("db", "bc")), ("abcd", ("abc", "ab")))]  # fmt: skip
    assert shown == [(["a"], "bcd"), ([""], "bc"), ([""], "ab")]


@given(
    st.text("abc", min_size=1, max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), min_size=20, max_size=20),
)
@settings(max_examples=300, deadline=None)
def test_however_many_tokens_come_at_once_the_first_complete_stop_string_counts(text, stop, sizes):
    end = next((n for n in range(len(text) + 1) if any(s in text[:n] for s in stop)), None)
    found = [(text[:end].find(s), s) for s in stop if end and s in text[:end]]
    place, matched = min(found, default=(len(text), None))
    detokenizer = Detokenizer(BYTE_LEVEL, letters("x"), tuple(stop), True)
    ids, got = letters(text), None
    while ids and got is None:
        size = sizes.pop()
        got = detokenizer.append(ids[:size], finished=size >= len(ids))
        num_read = detokenizer.num_read - 1  # the prompt is one token
        ids = ids[size:]
        if got is None and ids:  # held back: from the first place on that may yet become a stop string, no more
            seen = text[:num_read]
            held = next((i for i in range(num_read) if any(s.startswith(seen[i:]) for s in stop)), num_read)
            assert detokenizer.shown(False) == seen[:held]
    assert (detokenizer.shown(True), got, detokenizer.num_read - 1) == (text[:place], matched, end or len(text))


def test_a_stop_string_in_byte_tokens_counts_at_once_though_they_are_not_shown_yet():
    detokenizer = Detokenizer(UNIGRAM, UNIGRAM.encode("a"), ("\n",), True)
    assert detokenizer.append(UNIGRAM.convert_tokens_to_ids(["b"]), finished=False) is None
    assert detokenizer.append(byte_ids("é\n"), finished=False) == "\n"
    assert detokenizer.shown(True) == "bé"


def test_the_end_may_complete_a_stop_string():
    detokenizer = Detokenizer(BYTE_LEVEL, letters("x"), (REPLACEMENT,), True)
    assert detokenizer.append(letters("a€")[:-1], finished=False) is None  # may yet become a euro sign
    assert detokenizer.append([], finished=True) == REPLACEMENT and detokenizer.text == "a"


def test_skip_special_tokens_both_ways():
    ids = [*letters("a"), BYTE_LEVEL.eos_token_id, *letters("b")]
    assert stream(BYTE_LEVEL, letters("x"), [ids])[0] == ["ab"]
    assert stream(BYTE_LEVEL, letters("x"), [ids], skip=False)[0] == ["a</s>b"]
    assert stream(BYTE_LEVEL, letters("x"), [ids], stop=("</s>",), skip=False) == (["a"], "</s>")
