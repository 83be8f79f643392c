"""How a model scores texts: its head, and the prompt of a query and a document.

A worker computes the hidden state of the prompt's last token, as for an embedding, and the router
multiplies the state with the few rows of the head. There are two kinds of heads:

    checkpoint                       rows                                            labels
    ...ForSequenceClassification     `score`, or `classifier` of an encoder          its own
    Qwen3-Reranker (Qwen3ForCausalLM)  row of "yes" minus row of "no" of the output    yes

The second is exact, because the softmax of two logits is the sigmoid of their difference:
softmax(no, yes)[yes] = sigmoid(yes - no).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.errors import ConfigError, Incompatible
from tandem.models.checkpoint.headers import read_header
from tandem.models.checkpoint.weight_shapes import EMBEDDING, OUTPUT
from tandem.models.config.encoder import CLASSIFIER, CLASSIFIER_BIAS
from tandem.models.config.score_head import SCORE, ScoreHead
from tandem.models.files import naming
from tandem.models.folder import ModelFolder
from tandem.models.tokenizer.pair_template import QWEN3_RERANKER, PairTemplate
from tandem.models.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _Numbers = npt.NDArray[np.float32]

_YES = ScoreHead(("yes",), "sigmoid")
_RERANKER = "qwen3-reranker"  # part of the names of models that answer yes or no
_ANSWERING = "Qwen3ForCausalLM"  # the architecture that can answer yes or no


@dataclass(frozen=True, slots=True)
class Scorer:
    """The head of a model, with its rows."""

    head: ScoreHead
    rows: _Numbers = field(repr=False)  # float32 [labels, hidden]
    biases: _Numbers | None = field(default=None, repr=False)  # float32 [labels]
    # None: the prompt has the query and the document as the tokenizer joins two texts.
    template: PairTemplate | None = None

    @property
    def ranks(self) -> bool:
        """True if the head gives one number, by which documents can be ranked."""
        return len(self.head.labels) == 1

    def scores(self, state: Sequence[float], *, are_activated: bool = True) -> list[float]:
        """Returns the score of each label for a hidden state. Without `are_activated` the scores
        are logits.

        Raises Incompatible if the state is empty: old workers send none.
        """
        import numpy as np

        if not state:
            raise Incompatible("the worker is too old to compute scores; update the workers")
        logits = self.rows @ np.asarray(state, np.float32)
        if self.biases is not None:
            logits = logits + self.biases
        if not are_activated or self.head.activation == "none":
            return list(map(float, logits))
        if self.head.activation == "sigmoid":
            # tanh does not overflow for logits far below 0.
            return list(map(float, 0.5 * (1.0 + np.tanh(0.5 * logits))))
        powers = np.exp(logits - logits.max())
        return list(map(float, powers / powers.sum()))


def read_scorer(model: ModelFolder, tokenizer: Tokenizer, template: str) -> Scorer | None:
    """Reads the head of a model; None if it has none.

    `template` is the option `score_template`. Raises ConfigError if it is no template, or does not
    fit the model, and if the rows cannot be read.
    """
    is_reranker = _RERANKER in model.name.lower().replace("_", "-")
    chosen = _template(template, is_reranker=is_reranker)
    if (head := model.config.score_head) is not None and model.config.encoder is not None:
        rows, biases = (_rows(model, name, None) for name in (CLASSIFIER, CLASSIFIER_BIAS))
        return Scorer(head, rows, biases, template=chosen)
    if head is not None:
        return Scorer(head, _rows(model, SCORE, None), template=chosen)
    if chosen is None:
        return None
    if model.config.architecture != _ANSWERING or model.config.implementation != "tandem":
        raise ConfigError(
            f"score-template is {template!r:.80}, but the model has no head for scores and is no "
            f"{_ANSWERING}; set score-template to auto or none"
        )
    ids = [_token(tokenizer, word) for word in ("yes", "no")]
    name = EMBEDDING if model.config.tie_word_embeddings else OUTPUT
    yes, no = _rows(model, name, ids)
    return Scorer(_YES, (yes - no)[None], template=chosen)


def _template(option: str, *, is_reranker: bool) -> PairTemplate | None:
    if option == _RERANKER or (option == "auto" and is_reranker):
        return QWEN3_RERANKER
    if option in ("auto", "none"):
        return None
    path = Path(option).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"score-template is {option!r:.200}; it must be auto, none, {_RERANKER} or the path of "
            "a text file with {query} and {document}"
        )
    with naming(path):
        return PairTemplate(path.read_text())


def _token(tokenizer: Tokenizer, word: str) -> int:
    ids = tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1:
        raise ConfigError(
            f"the model cannot answer with one token {word!r}, because its tokenizer has no such "
            "token; set score-template to none"
        )
    return ids[0]


def _rows(model: ModelFolder, name: str, rows: Sequence[int] | None) -> _Numbers:
    """Reads rows of a matrix; None: all. Returns float32 [rows, hidden]. Raises ConfigError if the
    matrix is missing or quantized."""
    read = _gguf_rows if model.is_gguf else _safetensors_rows
    found = read(model, name, rows)
    if found is None:
        raise ConfigError(
            f"{model.path} has no matrix {name} of floating-point numbers, from which scores are "
            "computed"
        )
    return found


def _safetensors_rows(model: ModelFolder, name: str, rows: Sequence[int] | None) -> _Numbers | None:
    import numpy as np

    kinds = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2"}
    for file in model.weight_files:
        with naming(file):
            header = read_header(file)
            stored = model.config.names_of(header.tensors).get(name)
            if stored is None or (kind := kinds.get(header.tensors[stored].dtype)) is None:
                continue
            begin, _ = json.loads(header.raw)[stored]["data_offsets"]
            matrix = np.memmap(
                file,
                kind,
                "r",
                offset=8 + len(header.raw) + begin,
                shape=header.tensors[stored].shape,
            )
            chosen = np.array(matrix if rows is None else matrix[list(rows)])
            if kind == "<u2":  # bfloat16 is the upper half of a float32.
                return (chosen.astype(np.uint32) << 16).view(np.float32)
            return chosen.astype(np.float32)
    return None


def _gguf_rows(model: ModelFolder, name: str, rows: Sequence[int] | None) -> _Numbers | None:
    import gguf
    import numpy as np

    from tandem.models.gguf.headers import read_headers

    with naming(model.weight_files[0]):
        stored = read_headers(model.weight_files, model.config.architecture).get(name)
        if stored is None:
            return None
        num, _ = stored.shape
        data = np.memmap(stored.file, np.uint8, "r", offset=stored.begin)
        matrix = data[: stored.end - stored.begin].reshape(num, -1)
        chosen = np.array(matrix if rows is None else matrix[list(rows)])
        numbers: _Numbers = gguf.dequantize(chosen, stored.type).astype(np.float32)
        return numbers
