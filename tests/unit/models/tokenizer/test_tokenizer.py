import json
from pathlib import Path

import pytest

from tandem.errors import BadRequest, ConfigError
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer

GOLDEN = json.loads((Path(__file__).parents[3] / "data/golden_smollm2.json").read_text())["entries"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve("smollm2").path)


@pytest.mark.parametrize("entry", GOLDEN, ids=lambda entry: entry["prompt"][:20])
def test_golden_prompts_encode_to_the_reference_ids(tokenizer, entry):
    if entry["kind"] == "chat":
        text = tokenizer.render_chat([{"role": "user", "content": entry["prompt"]}])
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(entry["prompt"])
    assert ids == entry["prompt_token_ids"]


@pytest.mark.parametrize("entry", GOLDEN, ids=lambda entry: entry["prompt"][:20])
def test_golden_tokens_decode_to_the_reference_text(tokenizer, entry):
    ids = entry["greedy_token_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == entry["text"]


def test_digits_are_split_one_by_one(tokenizer):
    assert tokenizer.encode("1987") == [tokenizer.encode(digit)[0] for digit in "1987"]


def test_special_tokens_are_left_out_when_asked(tokenizer):
    ids = tokenizer.encode("Hi<|im_end|>")
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "Hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "Hi<|im_end|>"


def test_added_tokens_are_found_inside_a_text(tokenizer):
    """A mark of a format may be text around a token, as `<|im_start|>assistant`."""
    start, end = (tokenizer.added_token_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    split = tokenizer.split_at_added
    assert split("a<|im_start|>b<|im_end|>") == [
        ("a", None),
        ("<|im_start|>", start),
        ("b", None),
        ("<|im_end|>", end),
    ]
    assert (split("a"), split("")) == ([("a", None)], [])
    assert tokenizer.special_ids(["x<|im_start|>y", "<think>"]) == {start}
    assert "<|im_end|>" in tokenizer.added_tokens


def test_what_the_model_says_of_its_vocabulary(tokenizer):
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2, 0, 4)
    assert tokenizer.is_special(2)
    assert not tokenizer.is_special(504)


def test_chat_ends_where_the_assistant_speaks(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == prompt
    assert tokenizer.render_chat(messages) == prompt + "<|im_start|>assistant\n"


def test_pieces_in_a_row_are_the_text(tokenizer):
    text = "naïve 東京 🙂\tx\n"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.piece, ids)).decode() == text
    assert tokenizer.piece(49152) == b""


def test_lone_surrogates_are_refused(tokenizer):
    with pytest.raises(BadRequest, match="surrogate at character 2"):
        tokenizer.encode("ab\ud800")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
