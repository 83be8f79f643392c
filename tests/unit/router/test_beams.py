"""Beam search on a real engine: the reference's beams, and few blocks for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
import torch
from transformers import PreTrainedModel

from tandem.common.sampling_params import SamplingParams
from tandem.engine.scheduler.batch import StepBatch
from tandem.engine.types import NewTokens
from tandem.models.folder import ModelFolder
from tandem.net.rpc.tandem.v1.worker_pb2 import LogprobEntry
from tandem.router.metrics.timeline import Timeline
from tandem.router.request.choices.beams import Beam, BeamOptions, extend, ranked, search
from tandem.router.request.job import Job, JobStep, PreparedRequest, Progress
from tandem.router.request.request import ClientRequest
from tests.engine_driver import make_spec
from tests.harness.beam_reference import beams_of
from tests.model_engines import make_model_engine
from tests.tiny_models import make_tiny_model

ENDS = tuple(range(0, 203, 9))
PROMPT = [7 * i % 190 + 3 for i in range(40)]
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFolder, PreTrainedModel]:
    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


class EngineRun:
    """Runs jobs on an engine, all that were begun in one step; `blocks` are those of each step."""

    def __init__(self, folder: ModelFolder) -> None:
        self.engine, runner = make_model_engine(folder, num_blocks=256, numerics="invariant")
        forward = runner.forward

        def counted(batch: StepBatch, on_kv_written: object) -> torch.Tensor:
            self.blocks.append(len({b for piece in batch.slices for b in piece.block_table}))
            return forward(batch, on_kv_written)  # type: ignore[arg-type]

        runner.forward = counted  # type: ignore[assignment]
        self.blocks: list[int] = []
        self._found: dict[str, NewTokens] = {}

    async def __call__(self, job: Job) -> AsyncGenerator[JobStep, None]:
        request = job.request
        made = job.progress.output_token_ids
        spec = make_spec(
            job.request_id,
            [*request.token_ids, *made],
            num_prompt_tokens=len(request.token_ids),
            max_tokens=request.max_tokens,
            sampling=request.sampling,
        )
        self.engine.add(spec)
        await asyncio.sleep(0.001)  # the other beams come into the same step
        while job.request_id not in self._found:
            self._found |= {new.sequence_id: new for new in self.engine.step().new_tokens}
            self.engine.check_integrity()
        (measured,) = self._found.pop(job.request_id).logprobs
        top = LogprobEntry(top_ids=measured.top_ids, top_logprobs=measured.top_logprobs)
        yield JobStep([0], "length", [top])


def job_of(width: int, max_tokens: int) -> Job:
    sampling = SamplingParams(n=width, temperature=0, max_tokens=max_tokens)
    client = ClientRequest(tuple(PROMPT), sampling=sampling, use_beam_search=True)
    request = PreparedRequest(client, sampling.resolved(logprobs=2 * width), PROMPT)
    return Job(request, Progress([], Timeline()))


@pytest.mark.parametrize("width", [1, 3, 4])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -3.0])
@pytest.mark.parametrize("ignores_end", [False, True])
async def test_beams_are_the_reference(
    tiny: tuple[ModelFolder, PreTrainedModel], width: int, length_penalty: float, ignores_end: bool
) -> None:
    folder, model = tiny
    options = BeamOptions(width, length_penalty, ENDS, ignores_end)
    found = await search(job_of(width, 24), options, EngineRun(folder))
    expected = beams_of(
        model,
        PROMPT,
        width=width,
        max_tokens=24,
        length_penalty=length_penalty,
        end_token_ids=ENDS,
        ignore_eos=ignores_end,
    )
    assert [list(beam.token_ids) for beam in found] == expected


async def test_four_beams_hold_half_the_blocks_of_four_copies(
    tiny: tuple[ModelFolder, PreTrainedModel],
) -> None:
    run = EngineRun(tiny[0])
    beams = await search(job_of(4, 128), BeamOptions(4, 1.0, (), ignores_end=True), run)
    assert [len(beam.token_ids) for beam in beams] == [128] * 4
    copies = 4 * -(-(len(PROMPT) + 127) // BLOCK_SIZE)
    assert max(run.blocks) <= copies / 2
    assert run.engine.load().blocks_used == 0


def test_an_end_token_gives_up_no_other_beam() -> None:
    entries = [LogprobEntry(top_ids=[9, 1, 2, 3], top_logprobs=[-0.1, -1.0, -2.0, -3.0])]
    options = BeamOptions(2, 1.0, {9}, ignores_end=False)
    running, ended = extend([Beam()], entries, options)
    assert [beam.token_ids for beam in running] == [(1,), (2,)]
    assert ended == [Beam((9,), pytest.approx(-0.1), 0, is_ended=True)]


def test_equal_beams_keep_their_order() -> None:
    entries = [LogprobEntry(top_ids=[1, 2], top_logprobs=[-1.0, -1.0])] * 2
    options = BeamOptions(2, 1.0, (), ignores_end=False)
    running, _ = extend([Beam((5,), -1.0), Beam((6,), -1.0)], entries, options)
    assert [beam.token_ids for beam in running] == [(5, 1), (5, 2)]
    assert ranked([*running, Beam((7, 1), -2.0)], 3, options) == running


def test_the_length_counts_the_prompt_and_no_end_token() -> None:
    options = BeamOptions(2, 2.0, {9}, ignores_end=False)
    short = Beam((1, 9), -2.0, is_ended=True)
    long = Beam((1, 2), -2.5)
    # -2 / (3 + 1)^2 = -0.125 and -2.5 / (3 + 2)^2 = -0.1
    assert ranked([short, long], 3, options) == [long, short]
    assert ranked([short, long], 3, BeamOptions(2, 0.0, {9}, ignores_end=False)) == [short, long]
