"""The Python API on tiny random models: what it returns, refuses and frees.

That it returns what the HTTP API returns is in tests/e2e/test_python.py.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tandem import (
    LLM,
    AsyncLLM,
    CompletionOutput,
    LoRARequest,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from tandem import (
    llm as api,
)
from tandem.errors import BadRequest, ConfigError, ContextTooLong, NeverFits, NotNow
from tandem.models.source import ModelFolder
from tests.lora_adapters import write_adapter
from tests.tiny_models import make_random_speaker

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "numerics": "invariant",
    "num_gpu_blocks_override": 64,
    "num_threads": 1,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8)
DRAWN = SamplingParams(temperature=1.2, top_p=0.9, min_p=0.001, seed=5, max_tokens=8)
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return make_random_speaker(tmp_path_factory.mktemp("speaker"))


@pytest.fixture(scope="module")
def llm(folder: ModelFolder) -> Iterator[LLM]:
    with LLM(folder.path, enable_lora=True, max_loras=2, max_lora_rank=8, **SETTINGS) as made:
        yield made
        assert made.generate("idle", GREEDY)  # no test has broken it


def completion(outputs: list[RequestOutput]) -> CompletionOutput:
    [output] = outputs
    assert output.finished
    [only] = output.outputs
    return only


def test_a_batch_has_an_output_for_each_prompt_in_order(llm: LLM) -> None:
    token_ids = completion(llm.generate("One", GREEDY)).token_ids
    prompts: list[Any] = ["One", [5, 6, 7], {"prompt": "Two"}, {"prompt_token_ids": [5, 6, 7]}]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == ["One", None, None, None]
    assert outputs[1].prompt_token_ids == outputs[3].prompt_token_ids == [5, 6, 7]
    assert outputs[0].outputs[0].token_ids == token_ids
    assert outputs[1].outputs[0].token_ids == outputs[3].outputs[0].token_ids
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert llm.generate([]) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    short = SamplingParams(temperature=0, max_tokens=2)
    outputs = llm.generate(["One", "Two"], [GREEDY, short])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 2]
    with pytest.raises(BadRequest, match="sampling_params has 1 values, but there are 2 prompts"):
        llm.generate(["One", "Two"], [GREEDY])


def test_more_prompts_than_running_slots_and_than_a_workers_queue_holds(llm: LLM) -> None:
    one = SamplingParams(temperature=0, max_tokens=1)
    outputs = llm.generate([[index % 100 + 3] for index in range(400)], one)
    assert len(outputs) == 400
    assert outputs[0].outputs == outputs[100].outputs


def test_completions_of_one_prompt_share_it_and_differ(llm: LLM) -> None:
    several = SamplingParams(n=3, temperature=1.5, seed=5, max_tokens=8)
    [output] = llm.generate("Some words of a prompt", several)
    assert [each.index for each in output.outputs] == [0, 1, 2]
    assert len({tuple(each.token_ids) for each in output.outputs}) == 3
    [again] = llm.generate("Some words of a prompt", several)
    assert again.outputs == output.outputs
    assert again.num_cached_tokens == 0  # it is shorter than a block


def test_a_stream_ends_with_what_generate_returns(llm: LLM) -> None:
    steps = list(llm.generate_stream("Once", DRAWN))
    assert len(steps) > 1
    texts = [step.outputs[0].text for step in steps]
    assert all(later.startswith(text) for text, later in pairwise(texts))
    assert [step.finished for step in steps] == [False] * (len(steps) - 1) + [True]
    assert steps[-1].outputs[0] == completion(llm.generate("Once", DRAWN))


def test_a_stream_that_is_closed_frees_its_blocks(llm: LLM) -> None:
    everything = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    for _ in range(4):  # two of them fill the pool
        stream = llm.generate_stream("Once", everything)
        next(stream)
        stream.close()
    assert len(completion(llm.generate("Once", everything)).token_ids) == 400


def test_streams_of_several_prompts_come_as_they_are_made(llm: LLM) -> None:
    last = {output.request_id: output for output in llm.generate_stream(["One", "Two"], GREEDY)}
    assert [output.prompt for output in last.values()] == ["One", "Two"]
    assert all(output.finished for output in last.values())


def test_threads_share_the_engine(llm: LLM) -> None:
    alone = [completion(llm.generate(str(number), GREEDY)) for number in range(8)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda n: completion(llm.generate(str(n), GREEDY)), range(8)))
    assert together == alone


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = completion(llm.generate("Once", GREEDY))
    stop = whole.text[3:6]
    stopped = completion(
        llm.generate("Once", SamplingParams(temperature=0, max_tokens=8, stop=stop))
    )
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)


def test_log_probabilities_of_completions_and_prompts(llm: LLM) -> None:
    measured = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate("abc", measured)
    only = output.outputs[0]
    assert only.logprobs is not None
    assert [next(iter(entry)) for entry in only.logprobs] == only.token_ids
    assert all(len(entry) == 2 for entry in only.logprobs)  # greedy: the token is the likeliest
    total = sum(entry[t].logprob for t, entry in zip(only.token_ids, only.logprobs, strict=True))
    assert only.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_the_models_defaults_apply_without_parameters(folder: ModelFolder, tmp_path: Path) -> None:
    for file in folder.path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 1, "eos_token_id": 2}))
    with LLM(tmp_path, **SETTINGS) as with_defaults:
        drawn = completion(with_defaults.generate("Once"))
        greedy = SamplingParams(temperature=0)
        assert drawn == completion(with_defaults.generate("Once", greedy))
        assert len(drawn.token_ids) == 16
    with LLM(tmp_path, generation_config="none", seed=3, **SETTINGS) as without:
        first = completion(without.generate("Once"))
        assert first != drawn
    with LLM(tmp_path, generation_config="none", seed=3, **SETTINGS) as again:
        assert completion(again.generate("Once")) == first


def test_texts_get_the_tokens_that_the_tokenizer_adds(folder: ModelFolder, tmp_path: Path) -> None:
    """As in the HTTP API: a model that expects a bos would give another answer without it."""
    for file in folder.path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    tokens = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    bos = "<|im_start|>"
    tokens.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokens.token_to_id(bos))]
    )
    (tmp_path / "tokenizer.json").unlink()
    tokens.save(str(tmp_path / "tokenizer.json"))
    with LLM(tmp_path, **SETTINGS) as made:
        [output] = made.generate("Once", GREEDY)
        assert output.prompt_token_ids == tokens.encode("Once").ids
        assert output.prompt_token_ids[0] == tokens.token_to_id(bos)


def test_chats_and_their_streams(llm: LLM) -> None:
    only = completion(llm.chat(HELLO, GREEDY))
    assert completion([*llm.chat_stream(HELLO, GREEDY)][-1:]) == only
    several = llm.chat([HELLO, [{"role": "system", "content": "Be brief."}, *HELLO]], GREEDY)
    assert several[0].outputs[0] == only
    assert len(several[1].prompt_token_ids) != len(several[0].prompt_token_ids)
    final = {"role": "assistant", "content": "It is"}
    [continued] = llm.chat([*HELLO, final], GREEDY, continue_final_message=True)
    [begun] = llm.chat([*HELLO, final], GREEDY)
    assert len(continued.prompt_token_ids) < len(begun.prompt_token_ids)


def test_a_chat_that_must_call_a_tool_returns_its_call(llm: LLM) -> None:
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "now", "parameters": parameters}}
    long = SamplingParams(temperature=0, max_tokens=100)
    called = completion(llm.chat(HELLO, long, tools=[tool], tool_choice="required"))
    assert called.tool_calls[0]["function"]["name"] == "now"
    assert called.text == ""


def test_embeddings_have_length_1(llm: LLM) -> None:
    first, second = llm.embed(["One", [5, 6, 7]])
    assert first.outputs.hidden_size == 96
    for output in (first, second):
        assert sum(value**2 for value in output.outputs.embedding) == pytest.approx(1, abs=1e-5)
    assert first.outputs != second.outputs
    assert llm.embed([5, 6, 7])[0].outputs == second.outputs


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"choice": ["left", "right"]}, {"left", "right"}),
        ({"regex": "x|yy"}, {"x", "yy"}),
        ({"json": {"const": 7}}, {"7"}),
        ({"grammar": 'root ::= "0" | "1"'}, {"0", "1"}),
    ],
)
def test_a_completion_has_the_form_that_was_asked_for(
    llm: LLM, form: dict[str, Any], texts: set[str]
) -> None:
    params = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(**form))
    for outputs in (llm.generate("Answer:", params), llm.chat(HELLO, params)):
        assert completion(outputs).text in texts


def test_an_adapter_changes_what_is_made(llm: LLM, folder: ModelFolder, tmp_path: Path) -> None:
    write_adapter(tmp_path / "one", folder.config, scale=0.6)
    lora = LoRARequest("one", 1, str(tmp_path / "one"))
    plain, adapted = llm.generate(["Once", "Once"], GREEDY, lora_request=[None, lora])
    assert adapted.lora_request == adapted.outputs[0].lora_request == lora
    assert plain.outputs[0] == completion(llm.generate("Once", GREEDY))
    assert plain.outputs[0].token_ids != adapted.outputs[0].token_ids
    assert llm.embed("Once", lora_request=lora)[0].outputs != llm.embed("Once")[0].outputs
    with pytest.raises(ConfigError, match=r"no adapter_config\.json"):
        llm.generate("Once", GREEDY, lora_request=LoRARequest("two", 2, str(tmp_path)))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "prompt must be a non-empty string"),
        (7, "prompt is not valid"),
        ([5, "a"], "prompt is not valid"),
        ([["a", "b"]], "a list in a list"),
        ({"text": "a"}, "must have one key, prompt or prompt_token_ids; the dict has text"),
        (["right", [99_999]], r"prompt 1 \(from 0\): prompt has the token id 99999"),
    ],
)
def test_a_wrong_prompt_is_refused(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        llm.generate(prompts, GREEDY)


def test_what_does_not_fit_is_refused(llm: LLM, folder: ModelFolder) -> None:
    assert llm.max_model_len == 512
    with pytest.raises(ContextTooLong, match="maximum context length is 512 tokens"):
        llm.generate([[5] * 600], GREEDY)
    with (
        LLM(folder.path, **SETTINGS | {"num_gpu_blocks_override": 4}) as small,
        pytest.raises(NeverFits),
    ):
        small.generate([[5] * 100], GREEDY)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature must be a number from 0"),
        ({"stop": 5}, "stop is not valid"),
        ({"logprobs": 50}, "logprobs must be an integer from 0 to 20"),
        ({"structured_outputs": StructuredOutputsParams()}, "exactly one of json"),
    ],
)
def test_wrong_parameters_are_refused_when_they_are_made(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        SamplingParams(**fields)


def test_a_draft_model_proposes_tokens(llm: LLM, folder: ModelFolder) -> None:
    draft = {"method": "draft_model", "model": str(folder.path), "num_speculative_tokens": 4}
    with LLM(folder.path, speculative_config=draft, **SETTINGS) as drafted:
        expected, found = (each.generate(["Once upon a time"], GREEDY) for each in (llm, drafted))
    assert found[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    with pytest.raises(ConfigError, match="speculative-config has the method 'medusa'"):
        LLM(folder.path, speculative_config={"method": "medusa"})


def test_arguments_that_do_not_exist_are_named(llm: LLM, folder: ModelFolder) -> None:
    with pytest.raises(TypeError, match="detokenize"):
        SamplingParams(detokenize=False)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="no option data_parallel_size; allowed are model, seed"):
        LLM(folder.path, data_parallel_size=2)
    with pytest.raises(ConfigError, match=r"pipeline parallelism .* is not supported"):
        LLM(folder.path, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="must be one of auto, cpu, cuda"):
        LLM(folder.path, device="gpu")
    with pytest.raises(
        BadRequest, match="`chat` has no argument mm_processor_kwargs; allowed are add_"
    ):
        llm.chat(HELLO, GREEDY, mm_processor_kwargs={})
    with (
        LLM(folder.path, **SETTINGS) as plain,
        pytest.raises(BadRequest, match="enable_lora=True"),
    ):
        plain.generate("Once", GREEDY, lora_request=LoRARequest("one", 1, "/nowhere"))


def other_ranks() -> list[psutil.Process]:
    """Returns the processes of the ranks of this process's engine, but for the first one."""
    return [p for p in psutil.Process().children() if "rank_program" in " ".join(p.cmdline())]


def test_several_ranks_answer_the_same(llm: LLM, folder: ModelFolder) -> None:
    with LLM(folder.path, tensor_parallel_size=2, **SETTINGS) as two:
        ranks = other_ranks()
        assert len(ranks) == 1
        ranks[0].send_signal(signal.SIGUSR2)  # it writes the stacks of its threads, and goes on
        assert two.generate("Once", GREEDY)[0].outputs == llm.generate("Once", GREEDY)[0].outputs
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    with pytest.raises(ConfigError, match="2 KV heads cannot be divided among 4 ranks"):
        LLM(folder.path, tensor_parallel_size=4)


def test_a_rank_that_stays_stopped_is_an_error_that_names_it(
    llm: LLM, folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = api._engine_config
    monkeypatch.setattr(
        api, "_engine_config", lambda *given: replace(config(*given), rank_stopped_s_max=2.0)
    )
    with LLM(folder.path, tensor_parallel_size=2, **SETTINGS) as two:
        (rank,) = other_ranks()
        rank.suspend()
        threading.Timer(0.3, rank.resume).start()
        assert two.generate("Once", GREEDY)[0].outputs == llm.generate("Once", GREEDY)[0].outputs
        stream = two.generate_stream("Once", SamplingParams(max_tokens=500, ignore_eos=True))
        next(stream)
        rank.suspend()
        told = r"rank 1 of the engine does not answer: its process was stopped \(SIGSTOP\) for 2 s"
        began = time.monotonic()
        with pytest.raises(NotNow, match=told):
            list(stream)
        assert time.monotonic() - began < 10
        with pytest.raises(NotNow, match=told):
            two.generate("Once", GREEDY)
        assert not rank.is_running()


def test_closing_frees_the_engine_and_its_threads(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners: list[weakref.ref[Any]] = []

    class Watched(api.ModelRunner):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            runners.append(weakref.ref(self))

    monkeypatch.setattr(api, "ModelRunner", Watched)
    before = set(threading.enumerate())
    form = StructuredOutputsParams(choice=["left", "right"])  # its threads make grammars
    made = LLM(folder.path, **SETTINGS)
    made.generate("Once", SamplingParams(structured_outputs=form))
    stream = made.generate_stream("Once", SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    began = set(threading.enumerate()) - before
    assert began
    made.close()
    assert runners[0]() is None
    for thread in began:
        thread.join(60)
        assert not thread.is_alive()
    with pytest.raises(NotNow, match="this LLM is closed"):
        list(stream)
    with pytest.raises(NotNow, match="this LLM is closed"):
        made.generate("Once")
    made.close()

    left = LLM(folder.path, **SETTINGS)
    assert left.embed("Once")
    del left
    gc.collect()  # jinja's errors in probes of the template refer to the frames around them
    gc.collect()
    assert runners[1]() is None


def test_an_engine_that_fails_ends_its_requests(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a broken device")

    with LLM(folder.path, **SETTINGS) as broken:
        monkeypatch.setattr(api.ModelRunner, "forward", fail)
        for _ in range(2):
            with pytest.raises(NotNow, match="a broken device"):
                broken.generate("Once")


async def test_asynchronous_requests_are_those_of_llm(llm: LLM, folder: ModelFolder) -> None:
    async with await asyncio.to_thread(partial(AsyncLLM, folder.path, **SETTINGS)) as made:

        async def last(prompt: str) -> RequestOutput:
            return [output async for output in made.generate(prompt, GREEDY)][-1]

        outputs = await asyncio.gather(*map(last, ("One", "Two", "Three")))
        expected = llm.generate(["One", "Two", "Three"], GREEDY)
        assert [output.outputs for output in outputs] == [output.outputs for output in expected]
        chat = [output async for output in made.chat(HELLO, GREEDY)]
        assert chat[-1].outputs == llm.chat(HELLO, GREEDY)[0].outputs
        [embedding] = await made.embed("One")
        assert embedding.outputs == llm.embed("One")[0].outputs
        with pytest.raises(BadRequest, match="prompt must be a non-empty string"):
            [output async for output in made.generate("", GREEDY)]
        for _ in range(4):  # two of them fill the pool
            stream = made.generate("One", SamplingParams(max_tokens=400, ignore_eos=True))
            await anext(stream)
            await stream.aclose()
        assert [output async for output in made.generate("One", GREEDY)][-1].finished
