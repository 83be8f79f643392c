"""ModelRunner on the real small model: exact tokens, exact bits, and what it decides at start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.engine.executor.runner import ModelRunner
from tandem.engine.scheduler.batch import StepBatch
from tandem.errors import ConfigError
from tandem.models.folder import ModelFolder
from tandem.models.source import resolve
from tests.model_engines import make_runner
from tests.step_batches import Progress, logits_after, mixed_steps, place
from tests.tiny_models import FAMILIES, KNOWN_KINDS, make_tiny_model

ENTRIES = json.loads((Path(__file__).parents[3] / "data/golden_smollm2.json").read_text())[
    "entries"
]
PAGE_BYTES = 4096


@pytest.fixture(scope="module")
def smollm2() -> ModelFolder:
    return resolve("smollm2")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_prompts(lengths: tuple[int, ...], vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


class TestExactness:
    @pytest.mark.parametrize("numerics", ["fast", "invariant"])
    def test_every_golden_token_follows_its_prefix(
        self, smollm2: ModelFolder, numerics: str
    ) -> None:
        """All prompts in one step; then all golden tokens in one step, each as a decode of its
        own: a layer's KV is written before it is read, so each sees those before it."""
        runner = make_runner(smollm2, dtype="float32", numerics=numerics)
        entries = [e for e in ENTRIES if len(e["prompt_token_ids"]) < 300]
        sequences = place(runner, [e["prompt_token_ids"] + e["greedy_token_ids"] for e in entries])
        lengths = [len(e["prompt_token_ids"]) for e in entries]
        prefill = [s.take(length) for s, length in zip(sequences, lengths, strict=True)]
        first = runner.forward(StepBatch(prefill)).argmax(-1)
        decode = [s.take(1) for s in sequences for _ in range(63)]
        rest = runner.forward(StepBatch(decode)).argmax(-1).view(-1, 63)
        made = torch.cat((first.unsqueeze(1), rest), dim=1).tolist()
        assert made == [e["greedy_token_ids"] for e in entries]

    def test_a_long_prompt_in_chunks(self, smollm2: ModelFolder) -> None:
        (entry,) = (e for e in ENTRIES if len(e["prompt_token_ids"]) > 1000)
        runner = make_runner(smollm2, dtype="float32")
        prompt = entry["prompt_token_ids"]
        (sequence,) = place(runner, [prompt + entry["greedy_token_ids"]])
        while sequence.done < len(prompt):
            logits = runner.forward(
                StepBatch([sequence.take(min(512, len(prompt) - sequence.done))])
            )
        made = [int(logits.argmax())]
        while len(made) < 8:
            made.append(int(runner.forward(StepBatch([sequence.take(1)])).argmax()))
        assert made == entry["greedy_token_ids"][:8]


class TestInvariance:
    """Bit-equal logits after every prefix, whatever shares the step."""

    @pytest.mark.parametrize(
        "family",
        [
            pytest.param(family, marks=[pytest.mark.slow] * (family in KNOWN_KINDS))
            for family in FAMILIES
        ],
    )
    def test_random_steps_block_sizes_and_threads(self, family: str, tmp_path: Path) -> None:
        folder, _ = make_tiny_model(family, tmp_path)
        prompts = random_prompts((1, 15, 16, 63, 65, 140), folder.config.vocab_size)
        seen: dict[tuple[int, int], torch.Tensor] = {}
        # Blocks of compressed attention divide the runs of its entries.
        odd = 8 if family == "deepseek-v4" else 12
        for seed, (block_size, num_threads) in enumerate([(16, 1), (1, 2), (64, 1), (odd, 2)]):
            runner = make_runner(
                folder, numerics="invariant", block_size=block_size, num_threads=num_threads
            )
            for index, num_done, logits in mixed_steps(runner, prompts, (1, 1, 5, 33, 200), seed):
                assert torch.equal(seen.setdefault((index, num_done), logits), logits)
        runner = make_runner(folder, numerics="invariant")
        for index, prompt in enumerate(prompts):
            assert torch.equal(seen[index, len(prompt)], logits_after(runner, prompt))

    def test_the_real_model(self, smollm2: ModelFolder) -> None:
        prompts = random_prompts((3, 30, 90), smollm2.config.vocab_size)
        runner = make_runner(smollm2, numerics="invariant")
        alone = [logits_after(runner, prompt) for prompt in prompts]
        runner = make_runner(smollm2, numerics="invariant", block_size=64)
        for index, num_done, logits in mixed_steps(runner, prompts, (17, 70), seed=0):
            if num_done == len(prompts[index]):
                assert torch.equal(logits, alone[index])
        threaded = make_runner(smollm2, numerics="invariant", num_threads=2)
        assert torch.equal(logits_after(threaded, prompts[1]), alone[1])


class TestForward:
    @pytest.fixture
    def runner(self, tmp_path: Path) -> ModelRunner:
        return make_runner(make_tiny_model("llama", tmp_path)[0], dtype="float32", block_size=4)

    def test_logits_come_for_the_slices_that_want_them_in_their_order(
        self, runner: ModelRunner
    ) -> None:
        prompts = random_prompts((30, 3, 11), 203)
        expected = [logits_after(runner, prompt) for prompt in prompts]
        slices = [s.take(30) for s in place(runner, prompts)]
        quiet = [(30, False), (3, True), (11, True)]
        slices = [
            type(s)(s.token_ids, s.context_len, s.block_table, wants)
            for s, (_, wants) in zip(slices, quiet, strict=True)
        ]
        logits = runner.forward(StepBatch(slices))
        torch.testing.assert_close(logits, torch.stack(expected[1:]), rtol=1e-4, atol=1e-4)

    def test_a_step_that_wants_no_logits(self, runner: ModelRunner) -> None:
        runner.allocate(4)
        piece = Progress([1, 2, 3], [0]).take(3)
        silent = type(piece)(piece.token_ids, 3, [0], False)
        assert runner.forward(StepBatch([silent])).shape == (0, 203)
        expected = runner.forward(StepBatch([piece])).clone()
        assert runner.forward(StepBatch([silent])).shape == (0, 203)
        torch.testing.assert_close(runner.forward(StepBatch([piece])), expected)

    def test_only_the_tokens_own_slots_are_written(self, runner: ModelRunner) -> None:
        runner.allocate(6)
        runner.pools[0].kv.fill_(7.0)
        runner.forward(StepBatch([Progress([1, 2, 3, 4, 5], [4, 1]).take(5)]))
        untouched = runner.pools[0].kv == 7.0
        assert bool(untouched[[0, 2, 3, 5]].all())
        assert bool(untouched[1, :, :, :, 1:].all())
        assert not bool(untouched[4].any())
        assert not bool(untouched[1, :, :, :, 0].any())

    def test_kv_may_be_narrower_than_the_arithmetic(self, tmp_path: Path) -> None:
        folder, _ = make_tiny_model("llama", tmp_path)
        (prompt,) = random_prompts((50,), 203)
        wide = make_runner(folder, dtype="float32")
        narrow = make_runner(folder, dtype="float32", kv_dtype="bfloat16")
        assert (narrow.dtype_name, narrow.kv_dtype_name) == ("float32", "bfloat16")
        difference = logits_after(wide, prompt) - logits_after(narrow, prompt)
        assert narrow.pools[0].dtype == torch.bfloat16
        assert 0 < difference.abs().max() < 0.1 * logits_after(wide, prompt).std()


class TestChoices:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> ModelFolder:
        return make_tiny_model("llama", tmp_path)[0]

    def test_invariant_is_float32(self, folder: ModelFolder) -> None:
        runner = make_runner(folder, numerics="invariant")
        assert (runner.dtype_name, runner.kv_dtype_name) == ("float32", "float32")

    def test_the_pool_has_the_layouts_shape_and_starts_at_a_page(self, folder: ModelFolder) -> None:
        runner = make_runner(folder, dtype="bfloat16", block_size=8)
        runner.allocate(5)
        assert runner.pools[0].kv.shape == (5, 2, 3, 2, 8, 16)
        assert runner.pools[0].kv.dtype == torch.bfloat16
        assert runner.kv.shape == (runner.layout(5).pool_bytes,)
        assert runner.kv.data_ptr() % PAGE_BYTES == 0
        assert not runner.kv.any()

    def test_a_context_longer_than_the_models_is_refused(self, folder: ModelFolder) -> None:
        assert make_runner(folder).max_model_len == 512
        assert make_runner(folder, max_model_len=100).max_model_len == 100
        with pytest.raises(ConfigError, match="1 to 512"):
            make_runner(folder, max_model_len=513)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
    def test_a_device_that_is_not_there_is_refused(self, folder: ModelFolder) -> None:
        with pytest.raises(ConfigError, match="cuda"):
            make_runner(folder, device="cuda")
