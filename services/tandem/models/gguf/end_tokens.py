"""Finds the tokens of a GGUF model that end an answer.

A GGUF file often names only one of them: for an instruction-tuned Gemma it names `<eos>`, although
a turn ends with `<end_of_turn>`. So this module also recognizes end tokens by their text. The list
of texts, and the rules for when such a token does not end an answer, are those of llama.cpp
(special_eog_ids in https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp).
"""

from __future__ import annotations

from tandem.models.gguf.metadata import GgufMetadata

# Values of tokenizer.ggml.token_type.
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5

_NAMED = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Texts of end tokens. Ordinary text does not contain them, so tokens with these texts end an answer
# even if the converter did not mark them as control tokens.
_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>", "<|end|>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>", "<turn|>"),
        *("<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|tool_response>"),
    )
)
# Texts of tokens that end an answer only if the tokens are marked as control tokens. Ordinary text
# may contain these texts: `</s>` is also an HTML tag, for which Gemma has a token.
_ENDS_IF_CONTROL = frozenset(
    (
        *("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~["),
        # Code models write these tokens after the end of a source file.
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    )
)
_MESSAGE_END = "<|end|>"
# In models whose vocabulary has all tokens of one of these sets, an answer consists of several
# messages. `<|end|>` ends a message and is therefore no end token.
_WITH_MESSAGES = (
    frozenset(("<|return|>", "<|call|>")),
    frozenset(("<|return|>", "<|calls|>")),
    frozenset(("<|flush|>", "<|call|>")),
    frozenset(("<|flush|>", "<|calls|>")),
)


def token_types(metadata: GgufMetadata) -> list[int]:
    """Returns the type of each token. The type of a token whose text is in `_ENDS` is always
    CONTROL."""
    tokens = metadata.tokens()
    types = metadata.items("tokenizer.ggml.token_type", int, len(tokens))
    return [
        CONTROL if token in _ENDS else kind
        for token, kind in zip(tokens, types or [NORMAL] * len(tokens), strict=True)
    ]


def end_token_ids(metadata: GgufMetadata) -> list[int]:
    """Returns the ids of all tokens that end an answer. Tokens that are named in the GGUF file come
    first."""
    tokens = metadata.tokens()
    named = metadata.special_ids(**{name: name for name in _NAMED}).values()
    found = [
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, token_types(metadata), strict=True))
        if token in _ENDS or (kind == CONTROL and token in _ENDS_IF_CONTROL)
    ]
    ends = list(dict.fromkeys([*named, *found]))
    texts = {tokens[token_id] for token_id in ends}
    if any(texts >= others for others in _WITH_MESSAGES):
        texts.discard(_MESSAGE_END)
    if "<|tool_response>" in texts:
        texts.discard("</s>")
    return [token_id for token_id in ends if tokens[token_id] in texts]
