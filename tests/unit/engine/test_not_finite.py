"""A request whose logits are NaN ends with an error. The other requests of its steps continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.types import Mode
from tandem.models.source import read_folder
from tests.engine_driver import GREEDY, drive_all, make_spec
from tests.model_engines import make_model_engine
from tests.tiny_models import make_tiny_model

POISON = 100  # the embedding of this token has a NaN
DRAWN = msgspec.structs.replace(GREEDY, temperature=1.0, logprobs=2)
POISONED = msgspec.structs.replace(GREEDY, logit_bias={POISON: 100.0})
SETTINGS: list[dict[str, Any]] = [
    {"kernels": "native", "num_threads": 2},
    {"kernels": "torch"},
    {"kernels": "triton"},
]


@pytest.mark.parametrize("launches_ahead", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: str(each["kernels"]))
def test_logits_with_a_nan_end_the_request(
    tmp_path: Path, settings: dict[str, Any], launches_ahead: bool
) -> None:
    make_tiny_model("llama", tmp_path, tie_word_embeddings=False)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON, 3] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    folder = read_folder(tmp_path)

    def run(*names: str) -> Any:
        engine, runner = make_model_engine(folder, num_blocks=64, dtype="float32", **settings)
        runner.launches_ahead = launches_ahead
        prompts = {
            "good": make_spec("good", [*range(20)], max_tokens=6),
            "greedy": make_spec("greedy", [7, POISON, 9], max_tokens=6),
            "drawn": make_spec("drawn", [8, POISON], sampling=DRAWN, max_tokens=6),
            # The second token's KV has a NaN, which was computed in a step of its own.
            "later": make_spec("later", [5, 6], sampling=POISONED, max_tokens=6),
            "leased": make_spec("leased", [8, POISON], max_tokens=6, mode=Mode.PREFILL_ONLY),
        }
        outcome = drive_all(engine, *(prompts[name] for name in names))
        engine.check_integrity()
        return outcome

    alone, together = run("good"), run("greedy", "good", "drawn", "later", "leased")
    assert together.token_ids["good"] == alone.token_ids["good"]
    failed = {one.sequence_id: one for report in together.reports for one in report.failed}
    assert sorted(failed) == ["drawn", "greedy", "later", "leased"]
    assert together.token_ids["later"] == [POISON]
    assert "a NaN or an infinity" in failed["greedy"].message
    assert not {"greedy", "drawn"} & set(together.token_ids)
