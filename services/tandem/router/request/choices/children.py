"""The jobs of one request with several completions of its prompt.

    child 0       the same as the job of a request with n = 1
    child 1...    begin once child 0's prompt is committed on child 0's decode worker, or child 0
                  has ended; they are placed on that worker if possible and share the prompt's
                  blocks
So the prompt is computed once and its KV is transferred once. The children share no block into
which a KV transfer may still write. Each child generates its own tokens. Refusal, preemption,
migration and the loss of a worker are handled for each child as for any request.
"""

from dataclasses import replace

import msgspec

from tandem.router.metrics.timeline import Timeline
from tandem.router.request.job import Job, PreparedRequest, Progress

_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def child_seed(seed: int, index: int) -> int:
    """Returns the seed of a child.

    Child 0 uses the request's seed. Child i uses the i-th output of the generator SplitMix64
    (Steele, Lea and Flood, 2014), started with the request's seed.
    """
    if not index:
        return seed
    z = (seed + index * _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def child_request(request: PreparedRequest, index: int) -> PreparedRequest:
    """Returns the request of a child."""
    if not index:
        return request
    sampling = msgspec.structs.replace(
        request.sampling,
        seed=child_seed(request.sampling.seed or 0, index),
        prompt_logprobs=None,  # only child 0 computes them, for all children
    )
    return replace(request, sampling=sampling)


def children(job: Job, count: int) -> list[Job]:
    """Returns the jobs of a request: `job` and `count` - 1 forks of it."""
    return [job, *(_child(job, index) for index in range(1, count))]


def _child(parent: Job, index: int) -> Job:
    request = child_request(parent.request, index)
    timeline = Timeline(parent.progress.timeline.span)
    return Job(
        request,
        Progress(list(parent.progress.block_hashes), timeline),
        index=index,
        parent=parent,
    )
