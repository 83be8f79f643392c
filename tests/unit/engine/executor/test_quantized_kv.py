"""A quantized KV pool: however a sequence is run, its bytes and its tokens are the same.

Tiny random models in invariant numerics, one of them with latent attention, on torch and on the
compiled decoder. Bytes are compared within one of them: of sums that differ in their last bits a
few are rounded to another number. What both are given alike they write alike, to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from tandem.common.config.engine import EngineConfig, Kernels, KvDtype
from tandem.common.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.executor.native.decoder import NativeDecoder
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.executor.torch.steps import TorchSteps
from tandem.engine.executor.weights.decoder_weights import Linear
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.engine.types import FinalBlocks, Mode, SequenceSpec
from tandem.errors import ConfigError
from tandem.models.folder import ModelFolder
from tandem.models.gguf.convert import CACHE_DIR_VARIABLE
from tandem_kernels.kv_cache import make_pool
from tandem_kernels.kv_fp8 import FixedScales
from tests.engine_driver import GREEDY, drive, drive_all, make_spec
from tests.model_engines import make_model_engine
from tests.tiny_models import make_tiny_model
from tests.unit.engine.executor.native import native_shapes
from tests.unit.engine.executor.native.test_decoder import INSTRUCTIONS

PROMPT = torch.randint(0, 203, (96,), generator=torch.Generator().manual_seed(2)).tolist()
NUM_TOKENS = 40
LATENT = {"kv_lora_rank": 48, "qk_rope_head_dim": 16}  # multiples of 16
KV_DTYPES: list[KvDtype] = ["int8", "fp8_e4m3", "k8v4", "int4"]


class Bench:
    """One kind of kernels on the tiny model."""

    def __init__(self, folder: ModelFolder, kernels: Kernels, kv_dtype: KvDtype) -> None:
        self._folder = folder
        self._kernels = kernels
        self._kv_dtype = kv_dtype
        self.specs = [self.spec(f"s{i}", PROMPT[: 20 + 13 * i], seed=i) for i in range(5)]
        self.expected = drive_all(self.engine()[0], *self.specs).token_ids

    def engine(
        self, num_blocks: int = 64, budget: int = 512, **settings: Any
    ) -> tuple[Engine, torch.Tensor]:
        engine, runner = make_model_engine(
            self._folder,
            numerics="invariant",
            kernels=self._kernels,
            kv_dtype=self._kv_dtype,
            num_blocks=num_blocks,
            max_tokens_per_step=budget,
            **settings,
        )
        return engine, runner.pools[0].memory

    def spec(self, name: str, prompt: list[int], seed: int, **fields: object) -> SequenceSpec:
        """Odd seeds sample, even ones are greedy."""
        sampling = (
            SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, seed=seed)
            if seed % 2
            else GREEDY
        )
        return make_spec(name, prompt, sampling=sampling, max_tokens=NUM_TOKENS, **fields)  # type: ignore[arg-type]

    def prefilled(self, token_ids: list[int], budget: int) -> tuple[torch.Tensor, int]:
        """The bytes of the blocks after a prefill in chunks, and its first token."""
        engine, kv = self.engine(budget=budget)
        engine.add(make_spec("a", token_ids, mode=Mode.PREFILL_ONLY))
        (done,) = [p for report in drive(engine).reports for p in report.prefilled]
        return kv[engine.block_ids("a")], done.first_token_id


@pytest.fixture(
    scope="module",
    params=[
        *product(["llama"], ["torch", "native"], KV_DTYPES),
        *product(["deepseek-v3"], ["torch", "native"], ["int8"]),
    ],
    ids=str,
)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    family, *kinds = request.param
    latent = LATENT if family == "deepseek-v3" else {}
    folder, _ = make_tiny_model(family, tmp_path_factory.mktemp(family), **latent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_DIR_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield Bench(folder, *kinds)


def held(engine: Engine, token_ids: list[int]) -> tuple[list[bytes], list[int]]:
    """Computes a prompt: the hashes of its full blocks, and their ids, pinned."""
    engine.add(make_spec("warm", token_ids, max_tokens=1))
    hashes = [stored.block_hash for report in drive(engine).reports for stored in report.stored]
    engine.hold_prefix("chain", hashes)
    return hashes, engine.step().final_blocks[0].block_ids


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_chunks(bench: Bench, budget: int) -> None:
    whole, first_token = bench.prefilled(PROMPT, 512)
    assert int(whole.count_nonzero()) > whole.numel() // 2
    blocks, token = bench.prefilled(PROMPT, budget)
    assert torch.equal(blocks, whole)
    assert token == first_token


def test_a_token_that_was_made_has_the_bytes_of_one_that_was_prefilled(bench: Bench) -> None:
    engine, kv = bench.engine()
    engine.add(bench.spec("a", PROMPT[:33], 0))
    outcome = drive(engine)
    hashes = [stored.block_hash for report in outcome.reports for stored in report.stored]
    assert len(hashes) == (33 + NUM_TOKENS - 1) // 16
    engine.hold_prefix("chain", hashes)
    made = kv[engine.step().final_blocks[0].block_ids]
    prefilled, _ = bench.prefilled(PROMPT[:33] + outcome.token_ids["a"], 512)
    assert torch.equal(prefilled[: len(made)], made)


def test_warm(bench: Bench) -> None:
    engine, _ = bench.engine()
    for num_cached in (0, 64):
        outcome = drive_all(engine, *bench.specs)
        assert outcome.token_ids == bench.expected
        assert outcome.ends["s4"].num_cached_tokens >= num_cached


def test_preempted(bench: Bench) -> None:
    outcome = drive_all(bench.engine(num_blocks=12)[0], *bench.specs)
    assert outcome.token_ids == bench.expected
    assert sum(end.num_preemptions for end in outcome.ends.values()) > 0


def test_forked(bench: Bench) -> None:
    engine, _ = bench.engine()
    engine.add(bench.spec("s1", PROMPT[:33], 1))
    first = engine.step()
    engine.add(bench.spec("fork", PROMPT[:33], 3, fork_of="s1"))
    outcome = drive(engine)
    alone = drive_all(bench.engine()[0], bench.spec("fork", PROMPT[:33], 3)).token_ids["fork"]
    assert outcome.token_ids["fork"] == alone
    made = [new.token_ids for new in first.new_tokens if new.sequence_id == "s1"]
    assert [token for tokens in made for token in tokens] + outcome.token_ids[
        "s1"
    ] == bench.expected["s1"]


def test_pulled(bench: Bench) -> None:
    (source, source_kv), (here, here_kv) = bench.engine(budget=16), bench.engine()
    spec = bench.specs[4]
    here.add(structs.replace(spec, mode=Mode.WAITING_FOR_REMOTE_KV))
    here.step()
    source.add(structs.replace(spec, mode=Mode.PREFILL_ONLY))
    (done,) = [p for report in drive(source).reports for p in report.prefilled]
    here_kv[here.block_ids("s4")] = source_kv[source.block_ids("s4")]
    here.commit("s4", done.first_token_id)
    made = drive(here).token_ids["s4"]
    assert [done.first_token_id, *made] == bench.expected["s4"]


def test_moved_twice(bench: Bench) -> None:
    """All but the last blocks come from an engine that had them from another one."""
    first, first_kv = bench.engine()
    prompt = bench.specs[4].token_ids
    hashes, block_ids = held(first, prompt)
    moved = first_kv[block_ids]
    for _ in range(2):
        engine, kv = bench.engine()
        engine.add(structs.replace(bench.specs[4], prefix_blocks=len(hashes)))
        (reserved,) = engine.step().reserved
        kv[reserved.block_ids[: len(hashes)]] = moved
        engine.continue_prefill("s4", len(hashes))
        outcome = drive(engine)
        assert outcome.token_ids["s4"] == bench.expected["s4"]
        computed = sum(report.num_prefill_tokens for report in outcome.reports)
        assert computed == len(prompt) - 16 * len(hashes)
        engine.hold_prefix("chain", hashes)
        again = kv[engine.step().final_blocks[0].block_ids]
        assert torch.equal(again, moved)
        moved = again


def test_moved_from_a_tier(bench: Bench) -> None:
    """The blocks have left the pool of the first engine, which loads them for the second one."""
    first, first_kv = bench.engine(kv_host_bytes=1 << 24, kv_tier_policy="lru")
    prompt = bench.specs[4].token_ids
    hashes, block_ids = held(first, prompt)
    computed = first_kv[block_ids].clone()
    first.remove("chain")
    finish(first)
    first._kv.drop_cached()
    first_kv.zero_()
    first.hold_prefix("chain", hashes, 0, load_s_max=1000.0)
    (final,) = finish(first)
    assert torch.equal(first_kv[final.block_ids], computed)
    engine, kv = bench.engine()
    engine.add(structs.replace(bench.specs[4], prefix_blocks=len(hashes)))
    (reserved,) = engine.step().reserved
    kv[reserved.block_ids[: len(hashes)]] = first_kv[final.block_ids]
    engine.continue_prefill("s4", len(hashes))
    assert drive(engine).token_ids["s4"] == bench.expected["s4"]
    first.close()


def finish(engine: Engine) -> list[FinalBlocks]:
    """Steps until the engine and its tiers have nothing to do."""
    final = []
    while engine.has_work() or engine.awaits_threads():
        if engine.has_work():
            final += engine.step().final_blocks
    return final


@pytest.mark.parametrize(
    ("kv_dtype", "fixed"), [*((each, None) for each in KV_DTYPES), ("fp8_e4m3", (0.002, 1.0))]
)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_the_compiled_decoder_writes_torchs_bytes(
    instructions: str, kv_dtype: KvDtype, fixed: tuple[float, float] | None
) -> None:
    """First tokens of sequences, in a model whose first layer has K and V that are exact in fp32:
    of ordinary size, of scales below float16's normal numbers, large, and zeros."""
    shape = replace(native_shapes.BASE, kv=kv_dtype, num_threads=2)
    config = replace(native_shapes.config_of(shape), rms_norm_eps=0.0)
    weights = native_shapes.random_weights(shape)
    generator = torch.Generator().manual_seed(6)
    whole = partial(torch.randint, generator=generator)
    embedding = whole(0, 2, (shape.vocab, shape.hidden)).float() * 2 - 1  # their mean square is 1
    sizes = torch.tensor([2.0**-6, 2.0**-22, 2.0**6, 0.0]).repeat_interleave(64)
    kv_rows = whole(-64, 65, (256, shape.hidden)).float() * sizes.unsqueeze(1)
    layer = replace(
        weights.layers[0],
        attention_norm=torch.ones(shape.hidden),
        qkv=(weights.layers[0].qkv[0], Linear(kv_rows[:128], None), Linear(kv_rows[128:], None)),
    )
    weights = replace(weights, embedding=embedding, layers=(layer, weights.layers[1]))
    tokens = list(range(shape.vocab))
    batch = StepBatch([SequenceSlice([token], 1, [token], True) for token in tokens])
    ours, theirs = native_shapes.pool(shape, len(tokens)), native_shapes.pool(shape, len(tokens))
    if fixed:
        static = FixedScales(torch.tensor([fixed, fixed[::-1]], dtype=torch.float16))
        ours, theirs = (make_pool(pool.memory, pool.layout, static) for pool in (ours, theirs))
    NativeDecoder(config, weights, num_threads=2, instructions=instructions).forward(batch, [ours])
    TorchSteps(config, weights, "fast").forward(batch, [theirs])
    parts = [
        pool.memory.view(len(tokens), shape.num_kv_heads, 2, -1)[:, :, 0] for pool in (ours, theirs)
    ]
    assert int((parts[0] != 0).count_nonzero()) > 2 * 61 * 60
    assert torch.equal(*parts)


@pytest.mark.parametrize("kv_dtype", ["k8v4", "int4"])
def test_triton_refuses_it(kv_dtype: KvDtype, tmp_path: Path) -> None:
    folder, _ = make_tiny_model("llama", tmp_path)
    config = EngineConfig(model="", device="cpu", kernels="triton", kv_dtype=kv_dtype)
    with pytest.raises(ConfigError, match=f"only the native and torch kernels read {kv_dtype} KV"):
        ModelRunner(folder, config)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_a_tied_embedding_changes_no_arithmetic(instructions: str, kv_dtype: KvDtype) -> None:
    """A bf16 model whose embedding is read from its output matrix multiplies KV as bf16, too."""
    shape = replace(native_shapes.BASE, weights=torch.bfloat16, kv=kv_dtype)
    weights = native_shapes.random_weights(shape)
    logits = []
    for embedding in (weights.output, weights.output.clone()):
        decoder = NativeDecoder(
            native_shapes.config_of(shape),
            replace(weights, embedding=embedding),
            num_threads=1,
            instructions=instructions,
        )
        pools = native_shapes.pools(shape)
        logits.append([decoder.forward(b, pools).clone() for b in native_shapes.batches(shape)])
    assert all(map(torch.equal, *logits))
