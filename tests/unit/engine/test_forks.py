"""Forks: sequences that begin with a copy of another one's half-filled block. Exact block ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.common.config.engine import Kernels, Numerics
from tandem.common.sampling_params import SamplingParams
from tandem.engine.types import Mode
from tests.engine_driver import Outcome, drive, drive_all, make_engine, make_spec
from tests.model_engines import make_model_engine
from tests.tiny_models import make_tiny_model
from tests.toy_runner import continuation

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.mark.parametrize("length", range(1, 13))
def test_a_fork_computes_one_token_at_every_offset(length: int) -> None:
    engine, _ = make_engine()
    prompt = PROMPT[:length]
    engine.add(make_spec("a", prompt))
    outcome = Outcome()
    outcome.take(engine.step())
    for name in "bc":
        engine.add(make_spec(name, prompt, fork_of="a"))
    outcome.take(engine.step())
    engine.check_integrity()
    # Of two forks and one that decodes: a token each. Full blocks are shared, the next is its own.
    assert outcome.reports[-1].num_prefill_tokens == 2
    shared = (length - 1) // 4
    tables = [engine.block_ids(name)[: shared + 1] for name in "abc"]
    assert tables[0][:shared] == tables[1][:shared] == tables[2][:shared]
    if length % 4:  # else the block is full by now, and one of the three is everybody's
        assert len({table[shared] for table in tables}) == 3
    drive(engine, outcome)
    expected = continuation(prompt, 5)
    assert [outcome.token_ids[name] for name in "abc"] == [expected] * 3
    cached = length - 1
    assert [outcome.ends[name].num_cached_tokens for name in "abc"] == [0, cached, cached]
    assert engine.load().blocks_used == 0


def test_a_fork_asks_no_peer_and_pulls_no_prefix() -> None:
    for fields in ({"remote_prefill_min_tokens": 1, "mode": Mode.WAITING_FOR_REMOTE_KV}, {}):
        for length in (4, 5, 6):
            engine, _ = make_engine()
            engine.add(make_spec("a", PROMPT[:length]))
            engine.step()
            engine.add(make_spec("b", PROMPT[:length], fork_of="a", **fields))
            report = engine.step()
            assert report.reserved == []
            assert drive(engine).token_ids["b"] == continuation(PROMPT[:length], 5)[1:]


def test_a_fork_of_a_parent_that_awaits_its_kv_waits_for_it() -> None:
    engine, runner = make_engine()
    engine.add(make_spec("a", PROMPT[:6], mode=Mode.WAITING_FOR_REMOTE_KV))
    (reserved,) = engine.step().reserved
    runner.scribble(reserved.block_ids)  # a read may be writing them
    engine.add(make_spec("b", PROMPT[:6], fork_of="a"))
    report = engine.step()
    assert (report.num_prefill_tokens, report.admitted) == (0, [])
    # Once they are committed they can be copied.
    runner.fill(engine.block_ids("a"), PROMPT[:6], 0)
    engine.commit("a", continuation(PROMPT[:6], 1)[0])
    engine.add(make_spec("c", PROMPT[:6], fork_of="a"))
    outcome = Outcome()
    outcome.take(engine.step())
    assert outcome.reports[-1].num_prefill_tokens == 2
    drive(engine, outcome)
    assert outcome.token_ids["b"] == outcome.token_ids["c"] == continuation(PROMPT[:6], 5)
    engine.check_integrity()


def test_a_fork_of_half_a_prompt_takes_what_the_cache_has() -> None:
    engine, _ = make_engine(max_tokens_per_step=5)
    engine.add(make_spec("a", PROMPT))
    engine.step()  # of 12 tokens the parent has 5
    engine.add(make_spec("b", PROMPT, fork_of="a"))
    assert drive(engine).token_ids["b"] == continuation(PROMPT, 5)


def test_a_fork_whose_parent_is_gone_or_another_is_computed() -> None:
    engine, _ = make_engine()
    outcome = drive_all(engine, make_spec("a", PROMPT[:6]))
    engine.reset_prefix_cache()
    others = {"x": [*PROMPT[:5], 7], "y": [7, *PROMPT[1:6]], "z": PROMPT[:6]}
    for name, prompt in others.items():
        engine.add(make_spec(name, prompt, cache_salt=b"salt" if name == "z" else b""))
    outcome.take(engine.step())
    for name in "axyz":
        engine.add(make_spec(f"of-{name}", PROMPT[:6], fork_of=name))
    outcome.take(engine.step())
    assert outcome.reports[-1].num_prefill_tokens == 4 * 2 - 1  # "x" has all that is missing
    drive(engine, outcome)
    for name in "axyz":
        assert outcome.token_ids[f"of-{name}"] == continuation(PROMPT[:6], 5)


def test_a_fork_that_wants_log_probabilities_of_its_prompt_computes_it() -> None:
    engine, _ = make_engine()
    engine.add(make_spec("a", PROMPT[:6]))
    engine.step()
    engine.add(make_spec("b", PROMPT[:6], fork_of="a", prompt_logprobs=0))
    report = engine.step()
    assert report.num_prefill_tokens == 6
    (new,) = [n for n in report.new_tokens if n.sequence_id == "b"]
    assert len(new.prompt_logprobs) == 5


def test_the_parent_ends_first_and_a_fork_is_forked_in_turn() -> None:
    engine, _ = make_engine()
    engine.add(make_spec("a", PROMPT[:6], max_tokens=2))
    engine.step()
    engine.add(make_spec("b", PROMPT[:6], fork_of="a", max_tokens=8))
    outcome = Outcome()
    outcome.take(engine.step())
    assert "a" in outcome.ends
    engine.add(make_spec("c", PROMPT[:6], fork_of="b", max_tokens=8))
    outcome.take(engine.step())
    assert outcome.reports[-1].num_prefill_tokens == 1
    drive(engine, outcome)
    assert outcome.token_ids["b"] == outcome.token_ids["c"] == continuation(PROMPT[:6], 8)


def test_preempted_forks_are_forked_or_computed_again() -> None:
    engine, _ = make_engine(num_blocks=5)
    outcome = Outcome()
    engine.add(make_spec("a", PROMPT[:6], max_tokens=9))
    outcome.take(engine.step())
    for name in "bc":
        engine.add(make_spec(name, PROMPT[:6], max_tokens=9, fork_of="a"))
    drive(engine, outcome)
    assert max(outcome.ends[name].num_preemptions for name in "abc") > 0
    for name in "abc":
        assert outcome.token_ids[name] == continuation(PROMPT[:6], 9)


@pytest.mark.parametrize("kernels", ["torch", "native", "triton"])
def test_forks_of_a_real_model_draw_as_sequences_of_their_own_do(
    kernels: Kernels, tmp_path: Path
) -> None:
    folder, _ = make_tiny_model("llama", tmp_path)
    prompt = [7 * i % 90 + 3 for i in range(21)]
    # Triton's interpreter takes long.
    numerics: Numerics = "fast" if kernels == "triton" else "invariant"
    max_tokens = 6 if kernels == "triton" else 24
    made = []
    for fork_of in ("", "0"):
        engine, _ = make_model_engine(
            folder,
            device="auto",
            num_blocks=32,
            numerics=numerics,
            kernels=kernels,
            dtype="float32",
        )
        outcome = Outcome()
        for seed in range(3):
            sampling = SamplingParams(temperature=1.0, seed=seed)
            engine.add(
                make_spec(
                    str(seed), prompt, sampling=sampling, max_tokens=max_tokens, fork_of=fork_of
                )
            )
            outcome.take(engine.step())
        drive(engine, outcome)
        made.append(outcome.token_ids)
        num_prefill = sum(report.num_prefill_tokens for report in outcome.reports)
        assert num_prefill == len(prompt) + 2 * (1 if fork_of else 5)
    assert made[0] == made[1]
    assert made[0]["0"] != made[0]["1"]
