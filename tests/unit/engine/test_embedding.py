"""Embeddings: the prompt's last hidden state, by each kind of kernels, as transformers has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tandem.engine.engine import Engine
from tandem.engine.types import Mode, SequenceSpec
from tandem.models.folder import ModelFolder
from tests.engine_driver import drive_all, make_spec
from tests.model_engines import make_model_engine
from tests.tiny_models import make_tiny_model

PROMPTS = [[5, 9, 5, 17, 100, *range(60)], [7], [8, *range(30)], list(range(40, 56))]
# The interpreter of Triton's kernels is slow.
KERNELS = ("torch", "native", "triton")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFolder, PreTrainedModel]:
    """A tiny random model in fp32, and transformers' own."""
    return make_tiny_model("mistral-wide-heads", tmp_path_factory.mktemp("tiny"))


def make(tiny: tuple[ModelFolder, PreTrainedModel], **settings: Any) -> Engine:
    settings = {"block_size": 4, "num_blocks": 128, "max_model_len": 128, **settings}
    return make_model_engine(tiny[0], dtype="float32", max_num_seqs=5, **settings)[0]


def asked(sequence_id: str, prompt: list[int], **fields: Any) -> SequenceSpec:
    return make_spec(sequence_id, prompt, max_tokens=1, **{"embed": True, **fields})


def expected(model: PreTrainedModel, prompt: list[int]) -> Any:
    with torch.inference_mode():
        told = model(torch.tensor([prompt]), output_hidden_states=True)
    return told.hidden_states[-1][0, -1].numpy()


@pytest.mark.parametrize("kernels", KERNELS)
def test_embeddings_are_transformers(
    tiny: tuple[ModelFolder, PreTrainedModel], kernels: str
) -> None:
    """Prompts of one step, in chunks, from the cache and beside a sequence that decodes."""
    engine = make(tiny, kernels=kernels, max_tokens_per_step=24)
    other = make_spec("other", [3, 4, 5], max_tokens=8)
    specs = [asked(str(index), prompt) for index, prompt in enumerate(PROMPTS)]
    outcome = drive_all(engine, other, *specs)
    again = drive_all(engine, *(asked(f"again-{s.sequence_id}", s.token_ids) for s in specs))
    for index, prompt in enumerate(PROMPTS):
        first, second = outcome.ends[str(index)], again.ends[f"again-{index}"]
        assert (second.num_cached_tokens > 0) == (len(prompt) > 4)
        for end in (first, second):
            assert (len(end.token_ids), end.finish_reason) == (1, "length")
            np.testing.assert_allclose(end.embedding, expected(tiny[1], prompt), atol=1e-4)
    assert not outcome.ends["other"].embedding


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_what_shares_the_step_changes_no_bit(
    tiny: tuple[ModelFolder, PreTrainedModel], kernels: str
) -> None:
    engine = make(tiny, kernels=kernels, numerics="invariant")
    alone = drive_all(engine, asked("alone", PROMPTS[0])).ends["alone"].embedding
    specs = [asked(str(index), prompt) for index, prompt in enumerate(PROMPTS)]
    company = drive_all(make(tiny, kernels=kernels, numerics="invariant"), *specs)
    assert company.ends["0"].embedding == alone


def test_a_producer_reports_it_with_the_first_token(
    tiny: tuple[ModelFolder, PreTrainedModel],
) -> None:
    engine = make(tiny, kernels="native")
    outcome = drive_all(engine, asked("for-peer", PROMPTS[0], mode=Mode.PREFILL_ONLY))
    (prefilled,) = (p for r in outcome.reports for p in r.prefilled)
    np.testing.assert_allclose(prefilled.embedding, expected(tiny[1], PROMPTS[0]), atol=1e-4)
    engine.remove("for-peer")
    engine.check_integrity()
