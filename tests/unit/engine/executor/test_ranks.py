"""Runners of several ranks: their logits have the bits of a runner of one process."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.common.cached_tokens import CachedTokens
from tandem.common.config.engine import EngineConfig
from tandem.common.sampling_params import SamplingParams
from tandem.engine.executor.kernel_choice import why_not_triton_model
from tandem.engine.executor.native.decoder import why_not_native
from tandem.engine.executor.ranks import members
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.scheduler.batch import StepBatch
from tandem.errors import AdapterUnavailable, ConfigError, WorkerLost
from tandem.models.config.model import ModelConfig
from tandem.models.folder import ModelFolder
from tandem.models.limits import why_irregular
from tandem_kernels.native.library import RankEnded
from tandem_kernels.sampling import Draw
from tests.engine_driver import Outcome, make_spec
from tests.harness.forked_ranks import rank_template
from tests.lora_adapters import ALL, describe, write_adapter
from tests.model_engines import make_model_engine
from tests.step_batches import mixed_steps, place
from tests.tiny_models import FAMILIES, make_tiny_model
from tests.unit.engine.executor.test_lora import add, run
from tests.unit.engine.tiers.test_tiers import run as answer
from tests.unit.engine.tiers.test_tiers import settle

PROMPTS = [[(7 * i + 3 * size) % 200 for i in range(size)] for size in (40, 17, 5, 33)]
CHUNKS = (1, 3, 16, 40)


LATENT = ("deepseek", "glm5", "glm4-moe-lite", "kimi-linear", "mistral4")


@pytest.fixture(scope="module")
def template() -> Iterator[SimpleNamespace]:
    with rank_template() as forking:
        yield forking


@pytest.fixture
def quick_ranks(template: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves hundreds of tests the imports of each rank."""
    monkeypatch.setattr(members, "subprocess", template)


def tiny(family: str, path: Path, num_kv_heads: int = 4, **more: Any) -> ModelFolder:
    """A model with 8 query heads, and KV heads that 2 and 4 ranks can share."""
    sizes = {"num_attention_heads": 8, "hidden_size": 128}
    has_latents = family.startswith(LATENT)
    kv_heads = {"num_key_value_heads": 8 if has_latents else num_kv_heads}
    if family == "minimax-m3":
        kv_heads["index_n_heads"] = num_kv_heads
    if family == "deepseek-v4":
        kv_heads = {"num_key_value_heads": 1, "o_groups": 4}
    return make_tiny_model(family, path, **sizes | kv_heads | more)[0]


def why_not_share(model: ModelConfig, kernels: str, num_ranks: int) -> str:
    """Why ranks cannot share the states of a model, or ""."""
    for sizes in filter(None, (layer.linear for layer in model.layers)):
        if kernels == "torch" and sizes.num_heads % num_ranks:
            return f"{num_ranks} ranks cannot share {sizes.num_heads} heads of states"
        if kernels == "triton" and not sizes.shares_nothing(num_ranks):
            return "ranks of Triton kernels cannot share heads of keys"
    return ""


def runner_of(folder: ModelFolder, num_ranks: int, **more: Any) -> ModelRunner:
    settings = {"model": "", "device": "cpu", "kernels": "native", "block_size": 8} | more
    if "kv_dtype" in settings and (why := why_irregular(folder.config)):
        pytest.skip(why)
    if settings["kernels"] == "triton" and (why := why_not_triton_model(folder.config)):
        pytest.skip(why)
    if num_ranks > 1 and (why := why_not_share(folder.config, settings["kernels"], num_ranks)):
        pytest.skip(why)
    return ModelRunner(folder, EngineConfig(tensor_parallel=num_ranks, **settings))


def logits_of(folder: ModelFolder, num_ranks: int, **more: Any) -> list[torch.Tensor]:
    runner = runner_of(folder, num_ranks, **more)
    try:
        return [logits for _, _, logits in mixed_steps(runner, PROMPTS, CHUNKS, seed=7)]
    finally:
        runner.close()


@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize(
    ("family", "num_ranks", "num_kv_heads", "settings"),
    [
        ("qwen3-moe", 2, 4, {"numerics": "invariant"}),
        ("llama", 4, 1, {}),
        ("gemma4", 2, 1, {"numerics": "invariant"}),
        ("qwen3-next", 2, 1, {"numerics": "invariant"}),
        *(
            pytest.param(family, num_ranks, num_kv_heads, settings, marks=pytest.mark.slow)
            for family in FAMILIES
            for num_ranks in (2, 4)
            for num_kv_heads, settings in (
                (4, {"numerics": "invariant"}),
                (2, {"dtype": "bfloat16"}),
                (1, {"dtype": "bfloat16", "kv_dtype": "int8", "weights": "int8"}),
            )
            if not (family.startswith(LATENT) and "kv_dtype" in settings)
        ),
    ],
)
def test_logits_do_not_depend_on_the_number_of_ranks(
    family: str, num_ranks: int, num_kv_heads: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = tiny(family, tmp_path, num_kv_heads)
    if why := why_not_native(folder.config):
        pytest.skip(why)
    alone = logits_of(folder, 1, **settings)
    assert all(map(torch.equal, alone, logits_of(folder, num_ranks, **settings)))


INVARIANT: dict[str, Any] = {"kernels": "torch", "numerics": "invariant"}


def sizes_of_shares(family: str) -> dict[str, Any]:
    """Sizes of models for torch and Triton kernels: windows are shorter than most prompts, and
    ranks have whole heads of states."""
    if family == "kimi-linear":
        return {"linear_num_heads": 4}
    return {"sliding_window": 8} if family.startswith(("gemma3", "gemma4", "mimo")) else {}


@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize(
    ("family", "num_ranks", "num_kv_heads"),
    [
        ("llama", 2, 4),
        ("gemma3", 4, 2),
        ("qwen3-moe", 4, 1),
        *(
            pytest.param(family, num_ranks, num_kv_heads, marks=pytest.mark.slow)
            for family in FAMILIES
            for num_ranks, num_kv_heads in ((2, 4), (4, 2), (4, 1))
        ),
    ],
)
def test_invariant_logits_of_torch_do_not_depend_on_the_number_of_ranks(
    family: str, num_ranks: int, num_kv_heads: int, tmp_path: Path
) -> None:
    folder = tiny(family, tmp_path, num_kv_heads, **sizes_of_shares(family))
    alone = logits_of(folder, 1, **INVARIANT)
    assert all(map(torch.equal, alone, logits_of(folder, num_ranks, **INVARIANT)))


@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize(
    ("family", "num_ranks", "num_kv_heads", "settings"),
    [
        ("olmo2", 4, 2, {"kernels": "torch"}),
        ("llama-linear-biases", 2, 1, {"kernels": "triton"}),
        ("gpt-oss", 2, 4, {"kernels": "torch", "expert_parallel": True}),
        *(
            pytest.param(
                family,
                num_ranks,
                4,
                {"kernels": kernels, "expert_parallel": True},
                marks=pytest.mark.slow,
            )
            for family in ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v2-groups", "deepseek-v3")
            for kernels, num_ranks in (("torch", 4), ("triton", 2))
        ),
        *(
            pytest.param(family, num_ranks, num_kv_heads, settings, marks=pytest.mark.slow)
            for family in FAMILIES
            for num_ranks, num_kv_heads, settings in (
                (2, 4, {"kernels": "torch"}),
                (4, 1, {"kernels": "torch", "kv_dtype": "int8"}),
                (2, 2, {"kernels": "triton"}),
            )
        ),
    ],
)
def test_other_kernels_compute_nearly_the_same_on_several_ranks(
    family: str, num_ranks: int, num_kv_heads: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """The ranks' sums are added in another order than one process adds all."""
    folder = tiny(family, tmp_path, num_kv_heads, **sizes_of_shares(family))
    latent = folder.config.latent
    if "kv_dtype" in settings and latent is not None and latent.kv_rank % 16:
        pytest.skip("int8 needs latents whose size is a multiple of 16")
    settings = {"dtype": "float32", "max_num_seqs": 4} | settings
    alone = logits_of(folder, 1, **settings | {"expert_parallel": False})
    several = logits_of(folder, num_ranks, **settings)
    # A number that is rounded to int8 on the other side of a tie changes a logit visibly.
    tolerance = 2e-2 if settings.get("kv_dtype") == "int8" else 1e-4
    for one, other in zip(alone, several, strict=True):
        torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance)


def test_decode_steps_have_the_same_rows_on_all_ranks(tmp_path: Path) -> None:
    """The sequences of a step change their order and leave, and the last step is launched before
    its tokens are on the host."""
    folder = tiny("llama", tmp_path)
    found = []
    for num_ranks in (1, 2):
        runner = runner_of(folder, num_ranks, kernels="triton", dtype="float32", max_num_seqs=4)
        try:
            sequences = place(runner, PROMPTS)
            runner.forward(StepBatch([each.take(2) for each in sequences]))
            for order in ((0, 1, 2, 3), (3, 1, 0), (1, 3, 0), (2, 0, 1)):
                batch = StepBatch([sequences[i].take(1) for i in order])
                found.append(runner.forward(batch).clone())
            few = runner.forward(StepBatch(batch.slices, top_k=3))
            is_read = few > float("-inf")
            num_read = 6 if num_ranks > 1 else runner.vocab_size
            assert is_read.sum(1).tolist() == [num_read] * 3
            assert torch.equal(few[is_read], found[-1][is_read])
            assert torch.equal(few.topk(3).indices, found[-1].topk(3).indices)
            greedy = Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0)
            tokens = runner.start_sampling(found[-1], [greedy] * 3)
            ahead = [sequences[i].take(1)._replace(token_ids=[-1 - i]) for i in (2, 0, 1)]
            found.append(runner.forward(StepBatch(ahead, is_ahead=True)).clone())
            assert tokens.wait() == found[-2].argmax(-1).tolist()
        finally:
            runner.close()
    for one, other in zip(found[:5], found[5:], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def test_a_step_fails_when_a_rank_is_killed(tmp_path: Path) -> None:
    ended: list[str] = []
    config = EngineConfig(model="", device="cpu", tensor_parallel=2, **INVARIANT)
    runner = ModelRunner(tiny("llama", tmp_path), config, on_rank_end=ended.append)
    try:
        (sequence,) = place(runner, [PROMPTS[0]])
        runner.forward(StepBatch([sequence.take(4)]))
        assert runner._members is not None
        runner._members._ranks[0].process.kill()
        with pytest.raises(RankEnded):
            runner.forward(StepBatch([sequence.take(4)]))
        assert ended == ["rank 1 of the engine ended with status -9"]
    finally:
        runner.close()


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("ranks_share_gpu", [True, False])
def test_two_ranks_on_gpus(kernels: str, ranks_share_gpu: bool, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2 and not ranks_share_gpu:
        pytest.skip("NCCL needs a GPU for each rank")
    folder = tiny("llama", tmp_path)
    settings = {"device": "cuda", "kernels": kernels, "dtype": "float32", "max_num_seqs": 4}
    alone = logits_of(folder, 1, **settings)
    several = logits_of(folder, 2, ranks_share_gpu=ranks_share_gpu, **settings)
    for one, other in zip(alone, several, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_all_ranks_have_written_their_kv_when_the_engine_is_told(
    kernels: str, tmp_path: Path
) -> None:
    runner = runner_of(tiny("llama", tmp_path), 4, kernels=kernels, max_num_seqs=4)
    try:
        told: list[torch.Tensor] = []
        for sequence in place(runner, PROMPTS):
            piece = sequence.take(len(sequence.token_ids))
            runner.forward(StepBatch([piece]), lambda: told.append(runner.kv.clone()))
            assert torch.equal(told.pop(), runner.kv)
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"kernels": "native"}),
        ("llama", INVARIANT),
        pytest.param("phi3", INVARIANT, marks=pytest.mark.slow),
        pytest.param("deepseek-v2", INVARIANT, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", INVARIANT, marks=pytest.mark.slow),
        *(
            pytest.param(family, settings, marks=pytest.mark.slow)
            for family in ("qwen3-next", "falcon-h1", "nemotron-h", "kimi-linear")
            for settings in ({"kernels": "native"}, INVARIANT)
        ),
    ],
)
def test_adapters_are_on_all_ranks(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny(family, tmp_path / "model", **sizes_of_shares(family))
    modules = list(ALL) if family == "llama" else "all-linear"
    write_adapter(tmp_path / "one", folder.config, target_modules=modules, r=20)
    found = []
    for num_ranks in (1, 2):
        runner = runner_of(folder, num_ranks, dtype="float32", **settings)
        runner.allocate(*[80] * len(runner.layout().groups))
        digest = add(runner, tmp_path / "one")
        asked = [(prompt, digest if i % 2 else "") for i, prompt in enumerate(PROMPTS)]
        found.append(run(runner, asked))
        runner.drop_adapter(digest)
        found.append(run(runner, [(prompt, "") for prompt in PROMPTS]))
        runner.close()
    assert all(map(torch.equal, found[0], found[2]))
    assert all(map(torch.equal, found[1], found[3]))
    assert not torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {**INVARIANT, "ranks_own_pools": True}),
        pytest.param(
            *("llama", {"device": "cuda", "kernels": "triton", "ranks_share_gpu": True}),
            marks=pytest.mark.gpu,
        ),
        ("qwen3-next", {}),
        *(
            pytest.param(family, settings, marks=pytest.mark.slow)
            for family, settings in (
                ("qwen3-next", {**INVARIANT, "ranks_own_pools": True}),
                ("kimi-linear", {}),
                ("glm5", {**INVARIANT, "ranks_own_pools": True}),
                ("deepseek-v4", {**INVARIANT, "ranks_own_pools": True}),
            )
        ),
    ],
)
def test_copies_on_disk_do_not_depend_on_the_number_of_ranks(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = tiny(family, tmp_path / "model")
    tier = {"kv_disk_path": str(tmp_path / "kv"), "kv_disk_bytes": 64 << 20}
    prompt = [(13 * i) % 200 for i in range(70)]
    found = []
    for num_ranks in (2, 1):
        if num_ranks == 1:
            settings = {name: v for name, v in settings.items() if name != "ranks_share_gpu"}
        engine, runner = make_model_engine(
            folder,
            tensor_parallel=num_ranks,
            num_blocks=9,
            kv_tier_policy="lru",
            **tier,
            **settings,
        )
        found.append(answer(engine, prompt))
        engine.close()
        runner.close()
    assert [outcome.ends["0"].cached for outcome in found] == [
        CachedTokens(),
        CachedTokens(disk=64),
    ]
    assert found[0].token_ids == found[1].token_ids


def test_samplings_of_few_logits_exchange_no_others(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)
    some = {"temperature": 0.7, "seed": 3}
    samplings = {
        "greedy": (SamplingParams(temperature=0), 1),
        "top k": (SamplingParams(**some, top_k=5, top_p=0.9), 5),
        "any": (SamplingParams(**some), 0),
        "penalty": (SamplingParams(temperature=0, repetition_penalty=1.5), 0),
        "log probabilities": (SamplingParams(temperature=0, logprobs=2), 0),
    }
    tokens: list[dict[str, list[int]]] = []
    for num_ranks in (1, 2):
        engine, runner = make_model_engine(
            folder, tensor_parallel=num_ranks, num_blocks=40, dtype="float32", **INVARIANT
        )
        forward, seen = runner.forward, list[tuple[int, torch.Tensor]]()

        def watched(
            batch: StepBatch,
            told: Any = None,
            forward: Any = forward,
            seen: list[tuple[int, torch.Tensor]] = seen,
        ) -> torch.Tensor:
            logits = forward(batch, told)
            seen.append((batch.top_k, logits.clone()))
            return logits

        runner.forward = watched  # type: ignore[method-assign]
        tokens.append({})
        for name, (sampling, top_k) in samplings.items():
            seen.clear()
            outcome = Outcome()
            engine.add(make_spec(name, PROMPTS[0], sampling=sampling, max_tokens=6))
            settle(engine, outcome)
            tokens[-1][name] = outcome.token_ids[name]
            is_sharded = num_ranks > 1
            assert {found for found, _ in seen} == {top_k if is_sharded else 0}
            num_exchanged = 2 * top_k if top_k and is_sharded else runner.vocab_size
            assert all((logits > float("-inf")).sum() == num_exchanged for _, logits in seen), name
        engine.close()
        runner.close()
    assert tokens[0] == tokens[1]


def test_a_broken_adapter_is_refused_and_the_ranks_go_on(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path / "model")
    write_adapter(tmp_path / "one", folder.config, target_modules=list(ALL), r=4)
    adapter = describe("one", tmp_path / "one", folder.config)
    runner = runner_of(folder, 2, dtype="float32")
    try:
        (tmp_path / "one" / "adapter_model.safetensors").write_bytes(b"nothing")
        with pytest.raises((ConfigError, AdapterUnavailable)):
            runner.load_adapter(adapter)
        assert runner._members is not None
        nothing: Any = None
        with pytest.raises(ConfigError, match="rank 1: AttributeError"):
            runner._members.load_adapter(nothing)
        assert len([*mixed_steps(runner, PROMPTS, CHUNKS, seed=7)]) > 4
    finally:
        runner.close()


def test_a_rank_that_stays_stopped_while_it_loads_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(subprocess.Popen[bytes]):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.send_signal(signal.SIGSTOP)

    monkeypatch.setattr(subprocess, "Popen", Stopped)
    with pytest.raises(WorkerLost, match=r"rank 1 of the engine does not answer: .* for 1 s"):
        runner_of(tiny("llama", tmp_path), 2, rank_stopped_s_max=1.0)


def test_an_error_of_a_rank_while_it_loads_is_the_error_of_the_runner(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError):
        runner_of(folder, 2)
