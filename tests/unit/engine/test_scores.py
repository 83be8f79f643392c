"""Scores of classification models and of Qwen3-Reranker, as transformers has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.models.config.score_head import ScoreHead
from tandem.models.folder import ModelFolder
from tandem.models.scoring import Scorer, read_scorer
from tandem.models.source import read_folder
from tandem.models.tokenizer.tokenizer import Tokenizer
from tests.engine_driver import drive_all, make_spec
from tests.model_engines import make_model_engine
from tests.tiny_models import make_tiny_classifier, make_tiny_model

PROMPTS = [[5, 9, 5, 17, 90, *range(60)], [7], list(range(40, 56))]


def states(model: ModelFolder, kernels: str) -> list[list[float]]:
    settings = {"block_size": 4, "num_blocks": 128, "max_model_len": 128, "kernels": kernels}
    engine = make_model_engine(model, dtype="float32", max_num_seqs=5, **settings)[0]
    specs = [make_spec(str(n), p, max_tokens=1, embed=True) for n, p in enumerate(PROMPTS)]
    ends = drive_all(engine, *specs).ends
    return [ends[str(index)].embedding for index in range(len(PROMPTS))]


def scorer_of(model: ModelFolder, template: str = "auto") -> Scorer:
    scorer = read_scorer(model, Tokenizer.of(model), template)
    assert scorer is not None
    return scorer


@pytest.mark.parametrize(
    ("family", "kernels"),
    [("qwen3", "native"), ("llama", "native"), ("gemma2", "torch"), ("qwen3-next", "torch")],
)
def test_a_classifiers_logits_are_transformers(tmp_path: Path, family: str, kernels: str) -> None:
    model, reference = make_tiny_classifier(family, tmp_path, num_labels=3)
    scorer = scorer_of(model)
    assert scorer.head.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert not scorer.ranks
    for prompt, state in zip(PROMPTS, states(model, kernels), strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt])).logits[0]
        found = scorer.scores(state, are_activated=False)
        np.testing.assert_allclose(found, logits.numpy(), atol=1e-4)
        probabilities = torch.softmax(logits, -1).numpy()
        np.testing.assert_allclose(scorer.scores(state), probabilities, atol=1e-4)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_reranker_answers_yes_as_transformers(tmp_path: Path, is_tied: bool) -> None:
    """Its score is the probability of "yes" beside "no"."""
    model, reference = make_tiny_model("qwen3", tmp_path, tie_word_embeddings=is_tied)
    scorer = read_scorer(model, WordTokenizer(yes=57, no=78), "qwen3-reranker")  # type: ignore[arg-type]
    assert scorer is not None
    assert scorer.ranks
    for prompt, state in zip(PROMPTS, states(model, "native"), strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt])).logits[0, -1]
        expected = torch.softmax(logits[[78, 57]], -1)[1].item()
        assert scorer.scores(state)[0] == pytest.approx(expected, abs=1e-4)


class WordTokenizer:
    """A tokenizer with one token for each of its words."""

    def __init__(self, **words: int) -> None:
        self._words = words

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [self._words[text]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_in_16_bits_are_read_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    model, reference = make_tiny_classifier("llama", tmp_path / "wide", num_labels=2)
    reference.to(dtype).save_pretrained(tmp_path / "narrow", max_shard_size="20KB")
    narrow = tmp_path / "narrow"
    (narrow / "tokenizer.json").write_bytes((model.path / "tokenizer.json").read_bytes())
    folder = read_folder(narrow)
    assert len(folder.weight_files) > 1
    rows = reference.score.weight.float().detach().numpy()
    np.testing.assert_array_equal(scorer_of(folder).rows, rows)


def test_a_score_without_overflow() -> None:
    rows = np.array([[1.0], [-1.0]], np.float32)
    for activation, expected in (("sigmoid", [1.0, 0.0]), ("softmax", [1.0, 0.0])):
        scorer = Scorer(ScoreHead(("a", "b"), activation), rows)  # type: ignore[arg-type]
        with np.errstate(all="raise", under="ignore"):
            assert scorer.scores([1e4]) == pytest.approx(expected)
