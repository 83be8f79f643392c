"""Replays recorded tool loops, and scores proposed tokens against the recorded answers. No model
computes anything.

    python -m benchmarks.engine.tool_loops [--model smollm2]

`benchmarks/data/tool_loops.jsonl` has forty loops, one a line: a list of messages. Each loop is a
commit of this repository. The user gives its title, and the assistant reads the changed lines,
edits them, runs tests and reports. The edits are those of the commits; the words around them come
from templates, as do the results of the tests.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tandem.common.perf_model.step_time import StepTimeModel, StepWork
from tandem.common.sampling_params import SamplingParams
from tandem.common.speculation import parse_speculation
from tandem.engine.speculation.speculator import Speculator
from tandem.engine.types import Mode, SequenceSpec
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem_bench.framework import options, run_main

_FILE = Path(__file__).parents[1] / "data" / "tool_loops.jsonl"
_SYSTEM = (
    "You edit the files of a project. You call tools like this: <tool_call>\n"
    '{"name": "NAME", "arguments": {...}}\n</tool_call>\n'
    "read_file has the arguments path, first and last (numbers of lines); edit_file has path, old "
    "and new (text); run_tests has path."
)
_STEP_S = 0.01  # duration of a step without proposed tokens; only ratios count
_MAX_MODEL_LEN = 1 << 20


@options
class Options:
    model: str = "smollm2"
    """The model whose tokenizer is used."""


@dataclass
class Score:
    """What the steps of all answers yielded."""

    num_tokens: int = 0
    num_steps: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    # Predicted speed of decoding in relation to that without proposed tokens.
    speed: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.num_tokens / self.num_steps:.2f} tokens per step, "
            f"{self.num_accepted / max(1, self.num_proposed):.2f} of the proposed tokens accepted, "
            f"{self.speed:.2f} times the speed without, as predicted from the assumed price"
        )


def read_turns(tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """Returns the prompt and the answer of each turn of each assistant, in order."""
    turns = []
    for line in _FILE.read_text().splitlines():
        text = _message("system", _SYSTEM)
        for message in json.loads(line):
            if message["role"] == "assistant":
                prompt = tokenizer.encode(f"{text}<|im_start|>assistant\n")
                turns.append((prompt, tokenizer.encode(f"{message['content']}<|im_end|>")))
            text += _message(message["role"], message["content"])
    return turns


def _message(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def replay(turns: list[tuple[list[int], list[int]]], setting: str) -> Score:
    """Decodes the answers one after the other, as one worker does with --speculative-config
    `setting`. A proposed token is accepted if the recorded answer has it."""
    step_time = StepTimeModel(0.0)
    work = StepWork(decode_tokens=1)
    step_time.observe(work, _STEP_S)
    speculator = Speculator(parse_speculation(setting), step_time, _MAX_MODEL_LEN)
    score = Score()
    seconds = 0.0
    for prompt, answer in turns:
        spec = SequenceSpec("", prompt, len(prompt), Mode.LOCAL, SamplingParams(max_tokens=10**6))
        drafter = speculator.drafter(spec)
        tokens = [*prompt, answer[0]]  # prefill yields the first token
        while rest := answer[len(tokens) - len(prompt) :]:
            proposal = [] if drafter is None else drafter.propose(tokens)
            drafts, gains = proposal or ([], [])
            drafts = drafts[: speculator.num_worthwhile(gains, work)]
            pairs = zip(drafts, rest[:-1], strict=False)
            num_accepted = next(
                (at for at, (draft, token) in enumerate(pairs) if draft != token),
                min(len(drafts), len(rest) - 1),
            )
            tokens += rest[: num_accepted + 1]
            price = step_time.draft_price(work)
            assert price is not None
            seconds += price.step_s
            seconds += price.fixed_s * bool(drafts) + price.token_s * len(drafts)
            score.num_steps += 1
            score.num_tokens += num_accepted + 1
            score.num_proposed += len(drafts)
            score.num_accepted += num_accepted
        speculator.keep(spec, tokens)
    score.speed = score.num_tokens * _STEP_S / seconds
    return score


def main(options: Options = Options()) -> None:
    """Prints the score with and without recent answers."""
    turns = read_turns(Tokenizer(resolve(options.model).path))
    without = '{"method": "suffix", "num_speculative_tokens": 16, '
    without += '"suffix_decoding_max_spec_factor": 64, "suffix_decoding_min_token_prob": 0, '
    without += '"suffix_decoding_max_cached_requests": 0}'
    for name, setting in (("auto", "auto"), ("without recent answers", without)):
        print(f"forty tool loops, {name}: {replay(turns, setting)}", flush=True)


if __name__ == "__main__":
    run_main(main)
