"""Makes a tokenizer from the pieces and scores of a GGUF file (tokenizer.ggml.model = llama).

llama.cpp joins the two neighbours that give the piece of the highest score until none are left
(https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp). That is byte-pair encoding
whose merges are ordered by the score of what they give, the best first.
"""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from tandem.errors import UnsupportedModel
from tandem.models.gguf.metadata import GgufMetadata, special_key

_SPACE = "▁"
_PIECE_MAX = 1024  # characters; the time to find a piece's merges grows with their square


def build_sentence_piece(metadata: GgufMetadata, tokens: Sequence[str]) -> Tokenizer:
    """Returns the tokenizer, without its special tokens. Raises UnsupportedModel without scores."""
    scores = metadata.items("tokenizer.ggml.scores", float, len(tokens))
    if scores is None:
        raise UnsupportedModel(
            "the GGUF file has no score for each token (tokenizer.ggml.scores), which "
            "tokenizer.ggml.model llama needs"
        )
    unknown = metadata.token_id(special_key("unknown"))
    if (longest := max(map(len, tokens))) > _PIECE_MAX:
        raise UnsupportedModel(
            f"tokenizer.ggml.tokens has a token of {longest} characters; they must have at most "
            f"{_PIECE_MAX}"
        )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(vocab, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_space = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    to_pieces = normalizers.Replace(" ", _SPACE)
    from_pieces: list[Any] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if adds_space:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), to_pieces])
        from_pieces.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = to_pieces
    tokenizer.decoder = decoders.Sequence(from_pieces)
    return tokenizer


def _merges(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Returns all pairs of pieces that give a piece, the highest score first, then the longest."""
    found = [
        (-scores[token_id], -len(piece), token_id, cut, piece)
        for piece, token_id in vocab.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    return [(piece[:cut], piece[cut:]) for *_, cut, piece in sorted(found)]
