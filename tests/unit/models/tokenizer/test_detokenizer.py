import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from tandem.models.source import resolve
from tandem.models.tokenizer.detokenizer import IncrementalDetokenizer
from tandem.models.tokenizer.tokenizer import Tokenizer

TEXT = st.text(st.characters(codec="utf-8") | st.sampled_from("🙂👩‍🚀東京語é한"), max_size=40)
# The tokens of single bytes, where half characters and invalid UTF-8 come from.
ANY_BYTE = st.integers(0, 49151) | st.sampled_from(range(216, 480))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer(resolve("smollm2").path)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    """Makes a tokenizer like Llama 2's: words with a mark for the space before them, single bytes
    for all else."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "▁the", "▁cat", "s", "a", "é", "東"]
    backend = Backend(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    folder = tmp_path_factory.mktemp("sentencepiece")
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def stream(tokenizer: Tokenizer, ids: list[int], *, group: int = 1, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(ids[i : i + group]) for i in range(0, len(ids), group)]
    return [*pieces, detokenizer.flush()]


@given(ids=st.lists(ANY_BYTE, max_size=60), group=st.integers(1, 9), skip=st.booleans())
def test_random_ids_give_what_decoding_all_gives(smollm2, ids, group, skip):
    whole = smollm2.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(smollm2, ids, group=group, skip=skip)) == whole


@given(text=TEXT)
def test_texts_come_back_without_half_characters(smollm2, text):
    ids = smollm2.encode(text)
    whole = smollm2.decode(ids)  # not always `text`: the vocabulary lacks a few bytes
    pieces = stream(smollm2, ids)
    assert "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in whole


@example(text=" 𐀀")  # the space in front is a token without text
@given(text=TEXT)
def test_sentencepiece_texts_come_back_without_half_characters(sentencepiece, text):
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert "".join(stream(sentencepiece, ids)) == sentencepiece.decode(ids)


@given(ids=st.lists(st.integers(1, 2) | st.integers(259, 265), max_size=30), skip=st.booleans())
def test_sentencepiece_spaces_survive_special_tokens(sentencepiece, ids, skip):
    whole = sentencepiece.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(sentencepiece, ids, skip=skip)) == whole


def test_an_emoji_comes_out_with_its_last_token(smollm2):
    ids = smollm2.encode("🫠")
    assert len(ids) > 1
    assert stream(smollm2, ids) == [""] * (len(ids) - 1) + ["🫠", ""]


def test_an_invalid_byte_is_replaced_as_soon_as_it_is_known(smollm2):
    first, *_ = smollm2.encode("🫠")
    letter = smollm2.encode("a")[0]
    detokenizer = IncrementalDetokenizer(smollm2)
    assert detokenizer.push([first]) == ""
    assert detokenizer.push([letter]) == "\ufffda"
    assert detokenizer.push([first]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_a_run_of_invalid_bytes_does_not_pile_up(sentencepiece):
    lone = 3 + 0xFF
    detokenizer = IncrementalDetokenizer(sentencepiece)
    shown = [detokenizer.push([lone]) for _ in range(1000)]
    assert len("".join(shown)) > 990
    assert max(map(len, shown)) <= 4


@pytest.mark.parametrize("kind", ["smollm2", "sentencepiece"])
def test_the_cost_of_a_token_does_not_grow(kind, request):
    """Counted in ids decoded, not in seconds: no push looks further back than a few tokens."""
    tokenizer = request.getfixturevalue(kind)
    seen = []
    decode = tokenizer.decode
    tokenizer.decode = lambda ids, **options: (seen.append(len(ids)), decode(ids, **options))[1]
    rng = random.Random(0)
    try:
        stream(tokenizer, [rng.randrange(tokenizer.vocab_size) for _ in range(2000)])
    finally:
        del tokenizer.decode
    assert max(seen, default=0) <= 8
