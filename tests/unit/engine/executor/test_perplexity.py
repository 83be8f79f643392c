"""`tandem bench perplexity` measures what transformers computes, and its error is the pairs'."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tandem.common.config.engine import EngineConfig
from tandem.errors import ConfigError
from tandem.models.folder import ModelFolder
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem_bench.perplexity import compare, cut, losses, main
from tandem_bench.prose import english_prose
from tests.harness.terminal import Terminal
from tests.tiny_models import make_random_speaker

WINDOW = 100


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return make_random_speaker(tmp_path_factory.mktemp("speaker"))


@pytest.fixture(scope="module")
def windows(speaker: ModelFolder) -> list[list[int]]:
    return cut(Tokenizer(speaker.path), english_prose(), tokens=3 * WINDOW, window=WINDOW)


def config(kv_dtype: str) -> EngineConfig:
    return EngineConfig(
        model="",
        dtype="float32",
        kv_dtype=kv_dtype,  # type: ignore[arg-type]
        device="cpu",
        num_blocks=10,
        max_tokens_per_step=32,  # several chunks a window
    )


def test_losses_are_those_of_transformers(speaker: ModelFolder, windows: list[list[int]]) -> None:
    model = LlamaForCausalLM.from_pretrained(speaker.path, dtype=torch.float32).eval()
    for window, found in zip(windows, losses(speaker, config("float32"), windows), strict=True):
        ids = torch.tensor([window])
        with torch.no_grad():
            expected = torch.nn.functional.cross_entropy(
                model(ids).logits[0, :-1], ids[0, 1:], reduction="none"
            )
        assert found == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_kv_dtype_is_what_differs(speaker: ModelFolder, windows: list[list[int]]) -> None:
    exact = losses(speaker, config("float32"), windows)
    rounded = losses(speaker, config("bfloat16"), windows)
    assert rounded != exact
    assert losses(speaker, config("float32"), windows) == exact
    assert abs(compare(rounded, exact).change) < 0.01


def test_windows_are_whole_and_follow_each_other(
    speaker: ModelFolder, windows: list[list[int]]
) -> None:
    """Three windows of 100 predict 297 tokens only."""
    assert [len(window) for window in windows] == [WINDOW] * 4
    ids = Tokenizer(speaker.path).encode(english_prose(), add_special_tokens=False)
    assert [token_id for window in windows for token_id in window] == ids[: 4 * WINDOW]
    assert len(ids) > 50_000
    with pytest.raises(ConfigError, match=r"the text has 4 tokens; 20 are needed for 2 windows"):
        cut(Tokenizer(speaker.path), "a b c d", tokens=18, window=10)


def test_the_error_is_that_of_the_differences() -> None:
    """The windows differ much from each other, and their differences little."""
    against = [[1.0, 3.0], [5.0, 5.0], [0.0, 0.0]]
    worse = [[loss + 0.1 for loss in against[0]], against[1], [loss + 0.2 for loss in against[2]]]
    found = compare(worse, against)
    assert found.against == pytest.approx(math.exp(7 / 3))
    assert found.perplexity == pytest.approx(math.exp(7 / 3 + 0.1))
    assert found.change == pytest.approx(math.exp(0.1) - 1)
    assert found.change_error == pytest.approx(math.exp(0.1) * 0.1 / math.sqrt(3))
    assert found.num_predictions == 6


def test_the_command(
    speaker: ModelFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    with Terminal() as terminal:
        main(f"{speaker.path}", tokens=90, window=32, dtype="float32", output=output)
    assert "run 2 of 2" in terminal.text
    printed = capsys.readouterr().out
    assert "93 tokens in 3 windows of 32" in printed
    assert "KV in bfloat16: perplexity" in printed
    written = json.loads(output.read_text())
    assert (written["kv_dtype"], written["against_kv_dtype"]) == ("bfloat16", "float32")
    assert written["num_predictions"] == 93


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"kv_dtype": "int3"}, "int3"),
        ({"text": Path("no/such/file")}, "no/such/file cannot be read as text"),
    ],
)
def test_what_is_wrong_is_named(
    speaker: ModelFolder,
    arguments: dict[str, object],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(f"{speaker.path}", **arguments)  # type: ignore[arg-type]
    assert ended.value.code == 1
    assert named in capsys.readouterr().err
