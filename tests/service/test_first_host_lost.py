"""The first machine is lost with Ray's head and the only Redis: the second one serves on.

first machine: head, Redis, router, workers    --lost-->    nothing
second machine: router, workers                              router, workers: no scaling
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.harness.hosts import why_not
from tests.harness.joined import TANDEM, Joined, two_machines
from tests.harness.waiting import wait_until

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.service, pytest.mark.slow]

PROMPTS = [f"Count from {n} and tell me about gravity, please." for n in range(6)]
MAX_TOKENS = 32
NUM_CLIENTS = 3
ANSWER_MAX_S = 45.0  # a stream whose worker is cut off learns of it by gRPC's pings
RAY_ENDS_S = 240.0  # Ray ends a node about a minute after its head is gone
READY_S = 180.0


@dataclass
class Chats:
    """Clients that chat at the second machine's router between `with` and its end."""

    joined: Joined
    seconds: list[float] = field(default_factory=list)
    answers: list[tuple[int, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Chats:
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        while not self._ended.is_set():
            number = (number + 1) % len(PROMPTS)
            began = time.monotonic()
            try:
                self.answers.append((number, answer(self.joined, number)))
            except OSError as error:
                self.faults.append(repr(error))
            self.seconds.append(time.monotonic() - began)


def answer(joined: Joined, number: int) -> str:
    """Returns the second router's answer to a prompt."""
    reply = joined.chat(PROMPTS[number], joined.second, max_tokens=MAX_TOKENS)
    return str(reply["choices"][0]["message"]["content"])


def state(joined: Joined) -> dict[str, Any]:
    return dict(joined.get("/v1/cluster", joined.second))


def is_whole(joined: Joined) -> bool:
    """Returns whether each machine has a router and a worker of each pool, all known there."""
    told = state(joined)
    places = {
        (w["role"], w["address"].rpartition(":")[0])
        for w in told["workers"]
        if w["state"] == "ready" and w["connected"] is not False
    }
    routers = [a for a in told["pools"]["router"]["agents"] if a["state"] == "running"]
    return len(places) == 4 and len(routers) == 2 and told["router"]["ready"]


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[Joined]:
    options = ["--routers", "2", "--prefill", "1", "--decode", "1"]
    with two_machines(tmp_path, *options) as made:
        made.scale("prefill=2", "decode=2")
        wait_until(lambda: "connect" not in why_not_ready(made), READY_S)
        wait_until(lambda: is_whole(made), READY_S)
        yield made


def why_not_ready(joined: Joined) -> str:
    """Returns why the second machine's router does not answer yet; empty if it does."""
    try:
        joined.get("/ready", joined.second)
    except OSError as error:
        return f"cannot connect: {error}"
    return ""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_cut_off", [True, False], ids=["power", "processes"])
def test_the_second_machine_serves_on_and_says_why_it_does_not_scale(
    joined: Joined, is_cut_off: bool
) -> None:
    expected = {number: answer(joined, number) for number in range(len(PROMPTS))}
    with Chats(joined) as chats:
        wait_until(lambda: len(chats.answers) >= 2 * len(PROMPTS))
        assert joined.second.has_process("raylet")
        if is_cut_off:  # no connection is closed, and nobody refuses one
            joined.network.cut(joined.first.place)
        joined.first.kill()
        wait_until(lambda: state(joined)["redis"] == "lost", 30)
        check_that_nothing_is_scaled(joined)
        # What Ray started there stays.
        wait_until(lambda: not joined.second.has_process("raylet"), RAY_ENDS_S)
        num_answers = len(chats.answers)
        wait_until(lambda: len(chats.answers) >= num_answers + 2 * len(PROMPTS))
    assert chats.faults == []
    assert set(chats.answers) == set(expected.items())
    print(f"{len(chats.answers)} answers, the slowest took {max(chats.seconds):.1f} s")
    assert max(chats.seconds) < ANSWER_MAX_S
    check_that_prompts_are_prefilled_there(joined)
    check_that_nothing_is_scaled(joined)


def check_that_nothing_is_scaled(joined: Joined) -> None:
    url = joined.admin_url_of(joined.second)
    command = [*TANDEM, "scale", "decode=3", "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode
    assert "Redis does not answer" in done.stdout + done.stderr


def check_that_prompts_are_prefilled_there(joined: Joined) -> None:
    """Sees that a prompt still goes to the second machine's prefill worker."""
    at_second = {
        w["worker_id"]
        for w in state(joined)["workers"]
        if w["address"].startswith(f"{joined.second.address}:")
    }
    reply = joined.chat("What is a prompt that nobody has in a cache?", joined.second)
    record = joined.get(f"/v1/requests/{reply['id']}", joined.second)
    assert {record["decode_worker"], record["prefill_worker"]} == at_second, json.dumps(record)
