from __future__ import annotations

import pytest

from tandem.errors import QueueFull, RequestNotFound
from tandem.router.metrics.timeline import Timeline
from tandem.router.request.job import JobState
from tandem.router.request.log import RequestLog, RequestRecord
from tests.unit.router.test_job import job_of


def record(request_id: str) -> RequestRecord:
    return RequestRecord(request_id, "chat", Timeline())


def test_the_oldest_are_forgotten_and_ids_of_replies_are_known() -> None:
    log = RequestLog(requests_max=2)
    for request_id in ("a", "b", "c"):
        log.open(record(request_id))
    for name in ("b", "cmpl-b", "chatcmpl-b"):
        assert log.find(name).request_id == "b"
    with pytest.raises(RequestNotFound, match="last 2 requests"):
        log.find("a")


def test_the_requests_of_one_answer_are_found_by_its_id() -> None:
    log = RequestLog()
    for request_id in ("a-0", "a-1", "ab-0", "c"):
        log.open(record(request_id))
    assert [r.request_id for r in log.find_choices("cmpl-a")] == ["a-0", "a-1"]
    assert log.find("cmpl-a-1").request_id == "a-1"
    for name in ("c", "a-1", "cmpl-", ""):
        assert log.find_choices(name) == []


def test_a_refused_one_has_its_reason_and_no_stages() -> None:
    refused = record("a")
    refused.fail(QueueFull("full", retry_after_s=1))
    refused.end()
    told = refused.as_dict()
    assert (told["outcome"], told["error"]) == ("queue_full", "full")
    assert told["e2e_ms"] >= 0
    assert told["ttft_ms"] is None
    assert told["stages_ms"] == {}
    assert told["usage"] == {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}


def test_requests_of_one_client_id_are_all_found_and_kept_apart() -> None:
    log = RequestLog()
    for request_id, tenant in (("a", "t1"), ("b", "t1"), ("c", "t2")):
        log.open(RequestRecord(request_id, "chat", Timeline(), tenant, client_id="mine"))
    assert [r.request_id for r in log.find_choices("mine", "t1")] == ["a", "b"]
    assert [r.request_id for r in log.find_choices("mine")] == ["a", "b", "c"]
    assert log.find_choices("") == []
    assert log.find("a").as_dict()["client_request_id"] == "mine"


@pytest.mark.parametrize(
    ("state", "num_submissions", "attempts", "phase"),
    [
        (JobState.PLACING, 0, set(), "router"),
        (JobState.WAITING, 0, set(), "queued"),
        (JobState.PENDING, 1, {1}, "queued"),
        (JobState.SUBMITTED, 1, set(), "prefill"),
        (JobState.SUBMITTED, 1, {1}, "decoding"),
        (JobState.SUBMITTED, 2, {1}, "moved"),
        (JobState.MIGRATING, 2, {1}, "decoding"),
        (JobState.MIGRATING, 2, set(), "prefill"),
    ],
)
def test_an_open_request_has_a_phase(
    state: JobState, num_submissions: int, attempts: set[int], phase: str
) -> None:
    opened = record("a")
    assert opened.phase == "router"
    job = job_of(state)
    job.routing.num_submissions = num_submissions
    job.progress.attempts |= attempts
    opened.jobs = [job_of(), job]
    assert opened.phase == phase
    assert opened.num_prompt_tokens == 5
    log = RequestLog()
    log.open(opened)
    assert log.num_in_router() == (phase in ("router", "queued"))
    opened.end()
    opened.outcome = "stop"
    assert log.num_in_router() == 0
