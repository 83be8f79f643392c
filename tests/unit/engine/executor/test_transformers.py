"""Models that the transformers library computes: logits however prompts are cut, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomForCausalLM, PreTrainedModel

from tandem.engine.executor.transformers import steps
from tandem.engine.executor.transformers.load import check_class
from tandem.errors import UnsupportedModel
from tandem.models.folder import ModelFolder
from tandem.models.source import read_folder
from tests.model_engines import make_runner
from tests.step_batches import mixed_steps
from tests.tiny_models import make_tiny_model
from tests.transformers_models import MODELS, make_model

# learned positions; windows in some layers; chunks in some layers, and experts
_IN_CI = ("gpt2", "cohere2", "llama4")
_CASES = [pytest.param(name, marks=[] if name in _IN_CI else pytest.mark.slow) for name in MODELS]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", _CASES)
def test_logits_equal_the_librarys_however_prompts_are_cut(name: str, tmp_path: Path) -> None:
    model = make_model(name, tmp_path)
    _check_logits(read_folder(tmp_path, model_impl="transformers"), model)


def test_a_family_runs_through_transformers_if_it_is_chosen(tmp_path: Path) -> None:
    folder, model = make_tiny_model("gemma3", tmp_path)
    other = read_folder(tmp_path, model_impl="transformers")
    assert folder.config.implementation == "tandem"
    assert folder.fingerprint != other.fingerprint
    _check_logits(other, model)


def _check_logits(folder: ModelFolder, model: PreTrainedModel) -> None:
    assert folder.config.implementation == "transformers"
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(3, folder.config.vocab_size, (length,), generator=generator).tolist()
        for length in (90, 33, 5)
    ]
    runner = make_runner(folder, dtype="float32")
    assert runner.dtype_name == "float32+transformers"
    with torch.no_grad():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    for prompt, done, logits in mixed_steps(runner, prompts, chunks=(1, 7, 40), seed=3):
        torch.testing.assert_close(logits, expected[prompt][done - 1], atol=1e-4, rtol=1e-4)


def test_hidden_states_are_the_input_of_the_output_matrix(tmp_path: Path) -> None:
    model = make_model("gpt2", tmp_path)
    runner = make_runner(read_folder(tmp_path, model_impl="transformers"), dtype="float32")
    prompt = list(range(3, 23))
    list(mixed_steps(runner, [prompt], chunks=(20,), seed=0))
    with torch.no_grad():
        expected = model.transformer(torch.tensor([prompt])).last_hidden_state[0, -1]
    found = torch.tensor(runner.final_hidden([0])[0])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_another_window_than_the_models_is_refused(tmp_path: Path) -> None:
    make_model("cohere2", tmp_path)
    folder = read_folder(tmp_path, model_impl="transformers")
    layers = tuple(replace(layer, window=None) for layer in folder.config.layers)
    wrong = replace(folder, config=replace(folder.config, layers=layers))
    with pytest.raises(UnsupportedModel, match=r"Cohere2ForCausalLM .* layer 0 has the window"):
        make_runner(wrong, dtype="float32")


def test_other_kv_heads_than_the_models_are_refused(tmp_path: Path) -> None:
    make_model("gpt2", tmp_path)
    folder = read_folder(tmp_path, model_impl="transformers")
    wrong = replace(folder, config=replace(folder.config, num_kv_heads=2))
    with pytest.raises(UnsupportedModel, match=r"layer 0 has keys of the shape \(4, 2, 16\)"):
        make_runner(wrong, dtype="float32")


def test_a_model_that_mixes_tokens_outside_of_attention_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("gpt2", tmp_path)
    load_model = steps.load_model

    def load_mixing(*args: Any, **kwargs: Any) -> PreTrainedModel:
        model = load_model(*args, **kwargs)
        model.transformer.wte.register_forward_hook(lambda _, __, out: out + out.roll(1, 1))
        return model

    monkeypatch.setattr(steps, "load_model", load_mixing)
    with pytest.raises(UnsupportedModel, match=r"GPT2LMHeadModel .* logits of 40 tokens by"):
        make_runner(read_folder(tmp_path, model_impl="transformers"), dtype="float32")


def test_a_checkpoint_without_a_tensor_is_refused(tmp_path: Path) -> None:
    model = make_model("gpt2", tmp_path)
    state = {k: v for k, v in model.state_dict().items() if k != "transformer.h.1.ln_2.bias"}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(UnsupportedModel, match=r"lacks transformer\.h\.1\.ln_2\.bias"):
        make_runner(read_folder(tmp_path, model_impl="transformers"), dtype="float32")


def test_a_class_without_the_attention_interface_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"BloomForCausalLM .*_supports_attention_backend"):
        check_class(BloomForCausalLM)
