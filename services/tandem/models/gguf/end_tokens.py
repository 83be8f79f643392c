"""Finds the tokens of a GGUF file that end an answer.

They are those that the file names, and those that are recognized by their text: converters write
`<eos>` as the end of an instruction-tuned Gemma, whose turns end with `<end_of_turn>`. The texts
and the exceptions are llama.cpp's (special_eog_ids in
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp).
"""

from __future__ import annotations

from tandem.models.gguf.metadata import GgufMetadata

# Values of tokenizer.ggml.token_type.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

_NAMED = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# No text has these, so that a converter that did not mark them as control tokens was wrong.
_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>", "<|end|>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>", "<turn|>"),
        *("<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|tool_response>"),
    )
)
# A text may have these: `</s>` is also an HTML tag, and a token of Gemma's for it.
_ENDS_IF_CONTROL = frozenset(
    (
        *("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~["),
        # After these a model of code goes on with the next file, or with padding.
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    )
)
_OF_MESSAGE = "<|end|>"
# Beside all of these `<|end|>` ends a message, after which the turn goes on.
_WITH_MESSAGES = (
    frozenset(("<|return|>", "<|call|>")),
    frozenset(("<|return|>", "<|calls|>")),
    frozenset(("<|flush|>", "<|call|>")),
    frozenset(("<|flush|>", "<|calls|>")),
)


def token_types(metadata: GgufMetadata) -> list[int]:
    """Returns the types of all tokens. Each that is an end by its text is a control token."""
    tokens = metadata.tokens()
    types = metadata.items("tokenizer.ggml.token_type", int, len(tokens))
    return [
        CONTROL if token in _ENDS else kind
        for token, kind in zip(tokens, types or [NORMAL] * len(tokens), strict=True)
    ]


def end_token_ids(metadata: GgufMetadata) -> list[int]:
    """Returns the ids of all tokens that end an answer; those that the file names come first."""
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
        texts.discard(_OF_MESSAGE)
    if "<|tool_response>" in texts:
        texts.discard("</s>")
    return [token_id for token_id in ends if tokens[token_id] in texts]
