"""Growing delays for loops that retry, built from the wait rules of the library tenacity."""

from tenacity import RetryCallState, Retrying, wait_exponential, wait_random_exponential
from tenacity.wait import wait_base


def doubling(first_s: float, longest_s: float) -> wait_base:
    return wait_exponential(multiplier=first_s, max=longest_s)


def doubling_at_random(first_s: float, longest_s: float) -> wait_base:
    """Returns a rule whose delays double up to `longest_s`. Half of each delay is random, so that
    clients that failed together do not retry together."""
    half_s = first_s / 2
    longest_half_s = longest_s / 2
    return wait_exponential(half_s, longest_half_s) + wait_random_exponential(
        half_s, longest_half_s
    )


class Backoff:
    """The delays of one retry loop. The rule `wait` computes the delays."""

    def __init__(self, wait: wait_base) -> None:
        self._wait = wait
        self._state = RetryCallState(Retrying(), None, (), {})

    def reset(self) -> None:
        """Starts again with the first delay."""
        self._state.attempt_number = 1

    def next_s(self) -> float:
        """Returns the next delay in seconds. The delays grow from call to call, up to the longest
        delay of `wait`."""
        wait_s = self._wait(self._state)
        self._state.attempt_number += 1
        return wait_s
