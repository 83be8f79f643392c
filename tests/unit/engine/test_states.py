"""Sequences of models with states: reuse of frozen states, preemption and forks give the tokens of
transformers. The states of the tiny models last for thousands of tokens (`A_log`), but for those of
short convolutions, which have the last inputs only."""

from __future__ import annotations

from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tandem.common.kv_budget import KvBudget
from tandem.common.retention import Retention
from tandem.common.sampling_params import SamplingParams
from tandem.engine.cache.checkpoints import Checkpoints
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.types import Mode, SequenceSpec, TokenLogprobs
from tandem.errors import BadRequest, ConfigError, NeverFits
from tandem.models.folder import ModelFolder
from tandem_kernels.state_pool import StatePool
from tests.engine_driver import Outcome, drive, drive_all, make_spec
from tests.grouped_toy import (
    STATE,
    GroupedToyRunner,
    Windows,
    continuation,
    make_grouped_engine,
)
from tests.model_engines import make_model_engine, make_runner
from tests.tiny_models import make_tiny_model

NUM_TOKENS = 20
_WITH_LOGPROBS = SamplingParams(temperature=0, logprobs=5)
_PROMPT = torch.randint(0, 203, (300,), generator=torch.Generator().manual_seed(1)).tolist()


class Oracle:
    """The greedy tokens of transformers' model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        model.generation_config.eos_token_id = None
        self.tokens = cache(self._tokens)

    def _tokens(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        with torch.no_grad():
            made = self._model.generate(
                torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False
            )
        tokens: list[int] = made[0, len(prompt) :].tolist()
        return tokens

    def check(self, engine: Engine, *prompts: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        """Runs the prompts at the same time, and compares their tokens with transformers'. Returns
        the number of reused tokens of each."""
        specs = [
            make_spec(f"{i}", prompt, max_tokens=num_tokens) for i, prompt in enumerate(prompts)
        ]
        outcome = drive_all(engine, *specs)
        for spec in specs:
            expected = self.tokens(tuple(spec.token_ids), num_tokens)
            assert outcome.token_ids[spec.sequence_id] == expected
        return [outcome.ends[spec.sequence_id].num_cached_tokens for spec in specs]


_OF_EACH_KIND = (
    *("qwen3-next", "granite4", "falcon-h1", "nemotron-h", "lfm2", "lfm3", "olmo-hybrid"),
    "kimi-linear",
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(family, marks=[] if family == "qwen3-next" else pytest.mark.slow)
        for family in _OF_EACH_KIND
    ],
)
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelFolder, Oracle]:
    folder, model = make_tiny_model(request.param, tmp_path_factory.mktemp("model"))
    return folder, Oracle(model)


def make(folder: ModelFolder, **settings: Any) -> tuple[Engine, ModelRunner]:
    settings = {"num_blocks": 100, "max_num_seqs": 4, "max_tokens_per_step": 100} | settings
    return make_model_engine(folder, dtype="float32", block_size=16, **settings)


@pytest.mark.parametrize(
    ("kernels", "tokens_per_step"),
    [("native", 1), ("native", 7), ("native", 64), ("native", 100), ("torch", 100)],
)
def test_a_prompt_resumes_at_each_frozen_state(
    tiny: tuple[ModelFolder, Oracle], kernels: str, tokens_per_step: int
) -> None:
    folder, oracle = tiny
    engine, runner = make(folder, kernels=kernels, max_tokens_per_step=tokens_per_step)
    assert runner.kernels_name.split()[0] == kernels
    assert oracle.check(engine, _PROMPT[:200]) == [0]
    # The prompt's last positions are 192 and, more than 8 tokens before its end, 128.
    assert oracle.check(engine, _PROMPT[:200]) == [192]
    assert oracle.check(engine, [*_PROMPT[:192], 5, 6]) == [192]
    assert oracle.check(engine, [*_PROMPT[:191], 5, 6]) == [128]
    assert oracle.check(engine, _PROMPT[:100]) == [0]
    assert oracle.check(engine, _PROMPT[:250]) == [192]
    assert oracle.check(engine, _PROMPT[:260]) == [192]


def test_a_second_turn_computes_its_new_tokens_and_at_most_64_more(
    tiny: tuple[ModelFolder, Oracle],
) -> None:
    folder, oracle = tiny
    engine, _ = make(folder)
    oracle.check(engine, _PROMPT, num_tokens=150)
    answer = oracle.tokens(tuple(_PROMPT), 150)
    second = [*_PROMPT, *answer, *_PROMPT[:30]]
    (num_cached,) = oracle.check(engine, second)
    assert num_cached == 448  # the last multiple of 64 before the 449 tokens that have KV


def test_each_turn_of_a_long_chat_computes_its_new_tokens_and_at_most_64_more(
    tmp_path: Path,
) -> None:
    """The pattern of layers is that of Qwen3-Next. The template ends a prompt with 7 tokens, of
    which the next prompt has 3, and drops the first 5 tokens of an answer, its reasoning."""
    layers = {"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"]}
    folder, _ = make_tiny_model(
        "qwen3-next", tmp_path, max_position_embeddings=8192, mlp_only_layers=[], **layers
    )
    engine, _ = make(folder, num_blocks=400, max_tokens_per_step=512)
    tokens = torch.randint(0, 203, (4500,), generator=torch.Generator().manual_seed(2)).tolist()
    ending = [7, 3, 90, 41, 5, 5, 6]
    chat, rest = tokens[:3990], tokens[3990:]
    before: list[int] = []  # the tokens of the turn before
    for turn in range(7):
        prompt = [*chat, *ending]
        outcome = drive_all(engine, make_spec(f"{turn}", prompt, max_tokens=15 + 4 * turn))
        num_computed = sum(report.num_prefill_tokens for report in outcome.reports)
        pairs = zip(before, prompt, strict=False)
        num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert num_computed <= len(prompt) - num_common + 64
        assert num_common > 3990 or not turn
        answer = outcome.token_ids[f"{turn}"]
        before = [*prompt, *answer]
        chat = [*chat, *ending[:3], *answer[5:], *rest[: 17 + 5 * turn]]
        rest = rest[17 + 5 * turn :]
    engine.reset_prefix_cache()
    cold = drive_all(engine, make_spec("cold", prompt, max_tokens=len(answer)))
    assert cold.token_ids["cold"] == answer
    assert cold.ends["cold"].num_cached_tokens == 0


@pytest.mark.parametrize("destroy", [True, False])
def test_a_restored_state_that_is_zeroed_changes_the_tokens(
    tiny: tuple[ModelFolder, Oracle], destroy: bool
) -> None:
    folder, oracle = tiny
    engine, runner = make(folder)
    # One token is computed after the state. A short convolution has only its last inputs.
    prompt = _PROMPT[:257]
    oracle.check(engine, prompt)
    if destroy:
        (states,) = (pool for pool in runner.pools if isinstance(pool, StatePool))
        states.memory.zero_()
        with pytest.raises(AssertionError):
            oracle.check(engine, prompt)
    else:
        assert oracle.check(engine, prompt) == [256]


def test_preempted_sequences_restart_from_a_frozen_state(
    tiny: tuple[ModelFolder, Oracle],
) -> None:
    folder, oracle = tiny
    engine, _ = make(folder, num_blocks=26)
    prompts = [_PROMPT[:100], _PROMPT[100:210], _PROMPT[50:160]]
    specs = [make_spec(f"{i}", prompt, max_tokens=60) for i, prompt in enumerate(prompts)]
    outcome = drive_all(engine, *specs)
    for spec in specs:
        expected = oracle.tokens(tuple(spec.token_ids), 60)
        assert outcome.token_ids[spec.sequence_id] == expected
    assert sum(end.num_preemptions for end in outcome.ends.values()) > 0


def test_four_answers_to_one_prompt_share_its_frozen_state(
    tiny: tuple[ModelFolder, Oracle],
) -> None:
    folder, oracle = tiny
    engine, _ = make(folder)
    assert oracle.check(engine, *[_PROMPT[:200]] * 4) == [0, 192, 192, 192]


def test_slots_are_within_the_memory(tiny: tuple[ModelFolder, Oracle]) -> None:
    """At most half of the KV memory is for states, and all sequences run if it is tight."""
    folder, oracle = tiny
    slot_bytes = make_runner(folder).layout().groups[-1].layout.block_bytes
    kv_bytes = 16 * slot_bytes
    engine, runner = make(folder, num_blocks=None, kv_bytes_max=kv_bytes, max_num_seqs=64)
    assert engine.layout.sizes[-1] == 8
    assert runner.kv.numel() <= kv_bytes
    oracle.check(engine, *[_PROMPT[i : i + 20] for i in range(12)])


def test_settings_without_support_are_refused_before_weights_are_read(
    tiny: tuple[ModelFolder, Oracle],
) -> None:
    folder, _ = tiny
    for settings, why in (
        ({"numerics": "invariant"}, "numerics invariant"),
        ({"tensor_parallel": 2}, "several ranks"),
        ({"kernels": "triton"}, "only the native and torch kernels support states in int8"),
    ):
        with pytest.raises(ConfigError, match=why):
            make_runner(folder, state_dtype="int8", **settings)
    engine, _ = make(folder)
    with pytest.raises(BadRequest, match="state"):
        engine.add(make_spec("a", _PROMPT, kv_budget=KvBudget(64, 4)))


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_with_invariant_numerics_bits_do_not_depend_on_the_cuts(
    tiny: tuple[ModelFolder, Oracle], kernels: str
) -> None:
    """Neither on the chunks of a prompt nor on a restored state."""
    folder, _ = tiny
    found = []
    for tokens_per_step in (100, 7):
        engine, _ = make(
            folder, kernels=kernels, numerics="invariant", max_tokens_per_step=tokens_per_step
        )
        for name in ("cold", "warm"):
            spec = make_spec(name, _PROMPT[:200], max_tokens=4, sampling=_WITH_LOGPROBS)
            outcome = drive_all(engine, spec)
            found.append([one for r in outcome.reports for n in r.new_tokens for one in n.logprobs])
        assert outcome.ends["warm"].num_cached_tokens == 192
    assert len(found[0]) == 4
    assert all(each == found[0] for each in found)


# Largest change of a log probability by a rounded state. Random models change more than others.
_ROUNDING = {"bfloat16": 0.06, "int8": 0.25}


def _logprobs(engine: Engine, spec: SequenceSpec) -> tuple[list[TokenLogprobs], int]:
    """Returns the log probabilities of a request's tokens, and the number of reused tokens."""
    outcome = drive_all(engine, spec)
    found = [one for r in outcome.reports for new in r.new_tokens for one in new.logprobs]
    return found, outcome.ends[spec.sequence_id].num_cached_tokens


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_states_of_another_dtype_are_rounded_where_a_request_resumes_and_nowhere_else(
    tiny: tuple[ModelFolder, Oracle], kernels: str, dtype: str
) -> None:
    folder, oracle = tiny
    engine, _ = make(folder, kernels=kernels, state_dtype=dtype, max_num_seqs=2)
    plain, _ = make(folder, kernels=kernels)
    prompts = [_PROMPT[:200], _PROMPT[100:210], _PROMPT[50:160]]
    assert oracle.check(engine, *prompts, num_tokens=70) == [0, 0, 0]
    spec = make_spec("a", [*_PROMPT[:192], 5], max_tokens=1, sampling=_WITH_LOGPROBS)
    (exact,), _ = _logprobs(plain, spec)
    (rounded,), num_cached = _logprobs(engine, spec)
    assert num_cached == 192
    assert rounded.top_ids == exact.top_ids
    assert 0 < abs(rounded.logprob - exact.logprob) < _ROUNDING[dtype]
    slots = [each.layout.groups[-1].layout.block_bytes for each in (engine, plain)]
    assert slots[0] < (0.51 if dtype == "bfloat16" else 0.4) * slots[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_states_of_another_dtype_come_from_a_peer(
    tiny: tuple[ModelFolder, Oracle], dtype: str
) -> None:
    """The decode worker continues from the running states, and a later request resumes after the
    frozen ones."""
    folder, _ = tiny
    here, runner = make(folder, state_dtype=dtype)
    there, far_runner = make(folder, state_dtype=dtype)
    identities = [
        each._new_sequences.identity for each in (here, there, make(folder, max_num_seqs=1)[0])
    ]
    assert identities[0] == identities[1] != identities[2]
    prompt = _PROMPT[:200]
    spec = make_spec("a", prompt, max_tokens=3, sampling=_WITH_LOGPROBS)
    here.add(msgspec.structs.replace(spec, mode=Mode.WAITING_FOR_REMOTE_KV))
    (reserved,) = here.step().reserved
    lease = drive_all(there, msgspec.structs.replace(spec, mode=Mode.PREFILL_ONLY))
    sent = [i for report in lease.reports for run in report.final_blocks for i in run.block_ids]
    for source, target in zip(sent, reserved.block_ids, strict=True):
        bytes_sent = far_runner.kv[there.layout.spans.span(source)]
        runner.kv[here.layout.spans.span(target)] = bytes_sent
    (prefilled,) = [one for report in lease.reports for one in report.prefilled]
    here.commit("a", prefilled.first_token_id)
    outcome = drive(here)
    found = [one for r in outcome.reports for new in r.new_tokens for one in new.logprobs]
    exact, _ = _logprobs(make(folder)[0], spec)
    assert abs(found[-2].logprob - exact[1].logprob) < _ROUNDING[dtype]
    if dtype == "bfloat16":  # int8 may choose another token here
        assert found[-2].top_ids[0] == exact[1].top_ids[0]
    again, num_cached = _logprobs(here, msgspec.structs.replace(spec, sequence_id="b"))
    assert num_cached == 192
    assert abs(again[0].logprob - exact[0].logprob) < _ROUNDING[dtype]


def test_positions_follow_from_the_prompt() -> None:
    rule = Checkpoints(spacing=64, interval=1024)

    def positions(num_prompt: int, num_tokens: int) -> list[int]:
        return [p for p in range(num_tokens + 1) if rule.includes(p, num_prompt)]

    assert positions(63, 63) == []
    assert positions(64, 64) == [64]  # a longer prompt may resume here
    assert positions(65, 65) == [64]
    assert positions(220, 400) == [192, 256, 320, 384]
    assert positions(200, 200) == [128, 192]  # token 192 may be of the generation prompt
    assert positions(2500, 2500) == [1024, 2048, 2432, 2496]


def test_the_least_useful_states_are_evicted_first() -> None:
    """The frozen states of an answer replace each other; those of prompts stay."""
    windows = (None, STATE)
    engine, _ = make_grouped_engine(windows, num_blocks=60, max_num_seqs=1)
    num_slots = engine.layout.sizes[1]
    prompts = [[i, *range(10)] for i in range(num_slots - 3)]
    for prompt in prompts:
        drive_all(engine, make_spec("a", prompt, max_tokens=1))
    long = drive_all(engine, make_spec("a", [90, 91], max_tokens=60))
    assert long.token_ids["a"] == continuation([90, 91], 60, windows)
    for prompt in prompts[3:]:
        again = drive_all(engine, make_spec("a", prompt, max_tokens=1))
        assert again.ends["a"].num_cached_tokens == 8


@pytest.mark.parametrize("windows", [(None, STATE), (None, 7, STATE), (7, STATE)], ids=str)
def test_requests_resume_after_the_prompts_last_states_that_a_peer_has_sent(
    windows: Windows,
) -> None:
    """Forks do, and so does the same prompt when it is sent again. It is not pulled again. The
    blocks of a window that are seen after the states come with them."""
    here, runner = make_grouped_engine(windows, num_blocks=60)
    there, far_runner = make_grouped_engine(windows, num_blocks=60)
    prompt = list(range(22))
    here.add(make_spec("a", prompt, mode=Mode.WAITING_FOR_REMOTE_KV))
    (reserved,) = here.step().reserved
    lease = drive_all(there, make_spec("a", prompt, mode=Mode.PREFILL_ONLY))
    sent = [i for report in lease.reports for run in report.final_blocks for i in run.block_ids]
    for source, target in zip(sent, reserved.block_ids, strict=True):
        runner.block(here.layout, target).copy_(far_runner.block(there.layout, source))
    (prefilled,) = [one for report in lease.reports for one in report.prefilled]
    here.commit("a", prefilled.first_token_id)
    forks = [make_spec(name, prompt, fork_of="a", max_tokens=4) for name in "bc"]
    outcome = drive_all(here, *forks)
    for name in "bc":
        assert outcome.token_ids[name] == continuation(prompt, 4, windows)
    assert outcome.token_ids["a"] == continuation(prompt, 5, windows)[1:]
    assert [outcome.ends[name].num_cached_tokens for name in "bc"] == [20, 20]
    again = make_spec(
        "d", prompt, mode=Mode.WAITING_FOR_REMOTE_KV, remote_prefill_min_tokens=8, max_tokens=4
    )
    outcome = drive_all(here, again)
    assert outcome.token_ids["d"] == continuation(prompt, 4, windows)
    assert outcome.ends["d"].num_cached_tokens == 20
    there.remove("a")
    assert there.load().blocks_used == here.load().blocks_used == 0


def test_pins_report_the_depth_at_which_a_state_is() -> None:
    engine, _ = make_grouped_engine((None, STATE), num_blocks=60, max_num_seqs=2, kv_pin_share=1.0)
    prompt = list(range(43))
    drive_all(engine, make_spec("a", prompt, max_tokens=1))
    hashes = engine._new_sequences.make(make_spec("b", prompt)).block_hashes
    # There is a state after every second block of 4 tokens.
    for num_tokens, depth in ((0, 10), (28, 6), (16, 4), (4, 0)):
        kept = engine.kept.keep(b"t", Retention(pin_s=9.0, num_tokens=num_tokens), hashes)
        assert kept.num_blocks == depth
        assert bool(kept.reason) == (depth * 4 < num_tokens)
    drive_all(engine, *[make_spec(f"{i}", [100 + i] * 20, max_tokens=1) for i in range(200)])
    again = drive_all(engine, make_spec("a", prompt, max_tokens=1))
    assert again.ends["a"].num_cached_tokens == 40


def test_a_sequence_does_not_wait_for_a_slot_besides_the_state_after_which_it_resumes() -> None:
    """The pool has 5 slots. Four sequences run, and the last slot has a frozen state."""
    windows = (None, STATE)
    slot_bytes = GroupedToyRunner(windows, block_size=4).layout().groups[1].layout.block_bytes
    engine, _ = make_grouped_engine(
        windows, num_blocks=None, kv_bytes_max=10 * slot_bytes, max_num_seqs=5
    )
    assert engine.layout.sizes[1] == 5
    prompt = list(range(20))
    drive_all(engine, make_spec("first", prompt, max_tokens=1))
    for number in range(4):
        engine.add(make_spec(f"{number}", [100 + number] * 3, max_tokens=30))
    engine.step()
    engine.add(make_spec("b", [*prompt, 7], max_tokens=4))
    outcome = Outcome()
    while "b" not in outcome.ends:
        outcome.take(engine.step())
        engine.check_integrity()
    assert set(outcome.ends) == {"b"}
    assert outcome.token_ids["b"] == continuation([*prompt, 7], 4, windows)
    assert outcome.ends["b"].num_cached_tokens == 20


def test_prompts_with_the_same_beginning_resume_where_they_branch() -> None:
    """The first prompt has no state at the end of the system prompt. The second one shows where it
    ends, because its KV is cached there."""
    windows = (None, STATE)
    engine, _ = make_grouped_engine(windows, num_blocks=60)
    engine._new_sequences._checkpoints = Checkpoints(4, 1000)
    system = list(range(22))
    cached = []
    for user in range(4):
        prompt = [*system, *[50 + user] * 21]
        outcome = drive_all(engine, make_spec("a", prompt, max_tokens=4))
        assert outcome.token_ids["a"] == continuation(prompt, 4, windows)
        cached.append(outcome.ends["a"].num_cached_tokens)
    assert cached == [0, 0, 20, 20]


@pytest.mark.parametrize("fields", [{"system_tokens": 22}, {"retention": Retention(num_tokens=22)}])
def test_chats_resume_at_the_end_of_their_system_prompt_from_the_second_on(
    fields: dict[str, Any],
) -> None:
    """The first one freezes a state there, because its request says where the system prompt, or the
    part that is pinned, ends."""
    windows = (None, STATE)
    engine, _ = make_grouped_engine(windows, num_blocks=60)
    engine._new_sequences._checkpoints = Checkpoints(4, 1000)
    system = list(range(22))
    cached = []
    for user in range(3):
        prompt = [*system, *[50 + user] * 21]
        outcome = drive_all(engine, make_spec("a", prompt, max_tokens=4, **fields))
        assert outcome.token_ids["a"] == continuation(prompt, 4, windows)
        cached.append(outcome.ends["a"].num_cached_tokens)
    assert cached == [0, 20, 20]


def test_a_pinned_state_does_not_become_the_state_of_a_sequence() -> None:
    """The pool has 5 slots. Four sequences run, and the last slot has a pinned state. A request
    that resumes after it waits for a slot."""
    windows = (None, STATE)
    slot_bytes = GroupedToyRunner(windows, block_size=4).layout().groups[1].layout.block_bytes
    engine, _ = make_grouped_engine(
        windows,
        num_blocks=None,
        kv_bytes_max=10 * slot_bytes,
        max_num_seqs=5,
        kv_pin_share=1.0,
    )
    prompt = list(range(20))
    pinned = Retention(pin_s=99.0, num_tokens=16)
    drive_all(engine, make_spec("first", prompt, max_tokens=1, retention=pinned))
    states = engine._kv.pools[1]
    (slot,) = (
        i for i, (_, h, _) in enumerate(states.copies()) if h and states._blocks[i].is_pinned
    )
    for number in range(4):
        engine.add(make_spec(f"{number}", [100 + number] * 3, max_tokens=6))
    engine.step()
    engine.add(make_spec("b", [*prompt, 7], max_tokens=4))
    outcome = drive(engine)
    assert outcome.token_ids["b"] == continuation([*prompt, 7], 4, windows)
    assert outcome.ends["b"].num_cached_tokens == 16
    assert states._blocks[slot].is_pinned
    assert next(iter(outcome.ends)) != "b"


def _prefill_for_peers(engine: Engine, num_prompts: int) -> set[str]:
    """Computes prompts of 255 tokens for peers, which free each one's blocks once it is computed.
    Returns the ids of the computed ones. States are frozen after 192 tokens."""
    for number in range(num_prompts):
        prompt = [(7 * number + each) % 50 for each in range(255)]
        engine.add(make_spec(f"{number}", prompt, mode=Mode.PREFILL_ONLY, max_tokens=1))
    computed: set[str] = set()
    for _ in range(600):
        if not engine.has_work():
            break
        report = engine.step()
        engine.check_integrity()
        for each in report.prefilled:
            computed.add(each.sequence_id)
            engine.remove(each.sequence_id)
    return computed


@pytest.mark.parametrize("windows", [(None, 16, STATE), (16, 9, STATE)])
@pytest.mark.parametrize("num_blocks", [5, 6, 12, 19, 20, 21, 63, 64])
def test_a_prompt_for_a_peer_is_computed_or_refused(windows: Any, num_blocks: int) -> None:
    """The peer gets the blocks that are seen after the frozen states, which are up to 64 tokens
    before the prompt's end."""
    engine, _ = make_grouped_engine(
        windows, num_blocks=num_blocks, max_num_seqs=1, max_tokens_per_step=8
    )
    engine._new_sequences._checkpoints = Checkpoints.of(engine.layout)
    try:
        computed = _prefill_for_peers(engine, 1)
    except NeverFits:
        assert engine.load().longest_sequence * 4 < 255
    else:
        assert computed == {"0"}
        assert not 0 < engine.load().longest_sequence * 4 < 255


@pytest.mark.parametrize("num_blocks", [20, 38, 41, 57])
def test_prompts_for_peers_do_not_wait_for_each_other(num_blocks: int) -> None:
    engine, _ = make_grouped_engine(
        (16, STATE), num_blocks=num_blocks, max_num_seqs=4, max_tokens_per_step=8
    )
    engine._new_sequences._checkpoints = Checkpoints.of(engine.layout)
    assert _prefill_for_peers(engine, 4) == {"0", "1", "2", "3"}
