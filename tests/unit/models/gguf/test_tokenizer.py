import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from tandem.models.gguf.convert import converted_folder
from tandem.models.gguf.layout import read_layout
from tandem.models.gguf.metadata import GgufMetadata
from tandem.models.gguf.tokenizer import write_tokenizer

TEXT = "I'LL pay $12345.67  for\n\n the naïve 東京 ½²³ x_y;\t end 🙂 'tis  "


@pytest.fixture
def convert(tmp_path, tiny_gguf):
    def backend(pre: str) -> Tokenizer:
        norm = {"output_norm.weight": np.ones(64, np.float32)}
        file = tiny_gguf.write(tmp_path / f"{pre}.gguf", norm, pre=pre)
        return Tokenizer.from_file(
            str(converted_folder(file, cache_dir=tmp_path) / "tokenizer.json")
        )

    return backend


def cuts(pre_tokenizer, text: str = TEXT) -> list[tuple[int, int]]:
    return [offsets for _, offsets in pre_tokenizer.pre_tokenize_str(text)]


def test_gpt2_cuts_as_the_library_does(convert):
    assert cuts(convert("gpt-2").pre_tokenizer) == cuts(
        pre_tokenizers.ByteLevel(add_prefix_space=False)
    )


def test_smollm_cuts_digits_first(convert):
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    assert cuts(convert("smollm").pre_tokenizer) == cuts(theirs)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "45", ".Go"]),
        ("gpt-4o", ["I'LL", " pay", " ", "123", "45", ".Go"]),
        ("qwen2", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", ".Go"]),
        ("gpt-2", ["I", "'", "LL", " pay", " 12345", ".", "Go"]),
        ("smollm", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", ".", "Go"]),
        ("default", ["I", "'", "LL", " pay", " ", "123", "45", ".", "Go"]),
        ("deepseek-llm", ["I", "'", "LL", " pay", " ", "12345", ".", "Go"]),
        ("deepseek-coder", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", ".", "Go"]),
        ("deepseek-v3", ["I", "'LL", " pay", " ", "123", "45", ".Go"]),
        ("tekken", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", ".Go"]),
        ("kimi-k2", ["I'LL", " pay", " ", "123", "45", ".Go"]),
    ],
)
def test_each_rule_cuts_in_its_own_way(convert, pre, pieces):
    text = "I'LL pay 12345.Go"
    found = cuts(convert(pre).pre_tokenizer, text)
    assert [text[start:end] for start, end in found] == pieces


def test_gpt_4o_cuts_where_capitals_begin(convert):
    text = "getURLparts/\n naïveCafé"
    found = cuts(convert("gpt-4o").pre_tokenizer, text)
    pieces = [text[start:end] for start, end in found]
    assert pieces == ["get", "URLparts", "/\n", " naïve", "Café"]


def test_tekken_and_kimi_cut_words_at_capitals_and_han(convert):
    text = "getURLparts/\n 中文abc漢it's naïveCafé"
    for pre, pieces in (
        ("tekken", ["get", "URLparts", "/\n", " 中文abc漢it", "'s", " naïve", "Café"]),
        (
            "kimi-k2",
            ["get", "URLparts", "/\n", " ", "中文", "abc", "漢", "it's", " naïve", "Café"],
        ),
    ):
        found = cuts(convert(pre).pre_tokenizer, text)
        assert [text[start:end] for start, end in found] == pieces


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("deepseek-llm", "  |\n|\n|東京タワー| Ü|n|ï|ა| |한국|\t|。| "),
        ("deepseek-coder", "  |\n|\n|東京タワー| Ünï|ა| |한국|\t|。| "),
        ("deepseek-v3", "  \n\n|東京タワー| Ünïა| 한국|\t|。| "),
    ],
)
def test_deepseek_cuts_scripts_apart(convert, pre, pieces):
    text = pieces.replace("|", "")
    found = cuts(convert(pre).pre_tokenizer, text)
    assert "|".join(text[start:end] for start, end in found) == pieces


def test_merges_and_added_tokens(convert, tiny_gguf):
    backend = convert("gpt-2")
    the = backend.token_to_id("Ġthe")
    assert backend.encode(" the<think> the</s>").ids == [the, tiny_gguf.think, the, tiny_gguf.eos]
    assert backend.decode([the, tiny_gguf.think, tiny_gguf.eos]) == " the<think>"
    assert backend.token_to_id("[PAD]") is None  # unused rows of the embedding are no tokens


def test_llama_3_begins_every_text_with_bos(convert, tiny_gguf):
    assert convert("llama-bpe").encode("a").ids[0] == tiny_gguf.bos
    assert convert("llama-bpe").encode("a", add_special_tokens=False).ids != []
    assert convert("tekken").encode("a").ids[0] == tiny_gguf.bos
    assert convert("qwen2").encode("a").ids[0] != tiny_gguf.bos
    assert convert("kimi-k2").encode("a").ids[0] != tiny_gguf.bos


def test_qwen_composes_characters_first(convert):
    assert convert("qwen2").encode("e\u0301").ids == convert("qwen2").encode("é").ids
    assert convert("gpt-2").encode("e\u0301").ids != convert("gpt-2").encode("é").ids


PIECES = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "c", "ab", "bc", "▁ab", "abc", "\n\n"]
SCORES = [0.0, 0.0, 0.0, 0.0, -5.0, -6.0, -7.0, -8.0, -3.0, -1.0, -2.0, -4.0, 0.0]
TYPES = [2, 3, 3, 6, 1, 1, 1, 1, 1, 1, 1, 1, 4]


@pytest.mark.parametrize(
    ("adds_space", "text", "pieces"),
    [
        (False, "ab", ["ab"]),
        (True, "ab", ["▁ab"]),
        (False, "abc", ["abc"]),  # b and c first: their piece has the higher score
        (False, "abab", ["ab", "ab"]),
        (False, "a bc", ["a", "▁", "bc"]),
        (False, "a\nb\n\n", ["a", "<0x0A>", "b", "\n\n"]),
        (False, "aé", ["a", "<unk>"]),
        (False, "<s>ab", ["<s>", "ab"]),
    ],
)
def test_sentence_piece(tmp_path, adds_space, text, pieces):
    """The neighbours whose piece has the highest score are joined first."""
    file = tmp_path / "pieces.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(PIECES)
    writer.add_token_scores(SCORES)
    writer.add_token_types(TYPES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_add_space_prefix(adds_space)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    write_tokenizer(GgufMetadata(read_layout(file).keys), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    encoded = tokenizer.encode(text)
    assert encoded.tokens == ["<s>", *pieces]
    if "<unk>" not in pieces:
        assert tokenizer.decode(encoded.ids) == text.removeprefix("<s>")
