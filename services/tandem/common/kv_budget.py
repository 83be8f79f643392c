"""A KV budget of one sequence, as a request asks for it: plain data that travels by msgspec.

With `heavy_hitters` a sequence keeps the blocks that attracted most attention
(engine/cache/heavy_hitters.py). With `sinks_window` the token at position i sees the keys at
positions j with

    j < sinks  or  i - (tokens - sinks) < j <= i

so `tokens` of them at most, itself the last. Nothing else enters the mask: no chunk, block, worker
or migration. Layers with a sliding window of their own keep that instead.
"""

from typing import NamedTuple

import msgspec

from tandem.errors import BadRequest

SINKS_WINDOW = "sinks_window"
HEAVY_HITTERS = "heavy_hitters"
SINKS_DEFAULT = 4
BUDGET_TOKENS_MAX = 2**31 - 1


class VisibleKeys(NamedTuple):
    """The keys that each token sees."""

    num_first: int  # of the context
    num_last: int  # the token's own is one of them


class KvBudget(msgspec.Struct, frozen=True):
    tokens: int  # KV that a token sees at most
    sinks: int = SINKS_DEFAULT  # first tokens, which all see
    policy: str = SINKS_WINDOW

    @property
    def keeps_hitters(self) -> bool:
        return self.policy == HEAVY_HITTERS

    @property
    def visible(self) -> VisibleKeys:
        """The keys that a token sees with `sinks_window`."""
        return VisibleKeys(self.sinks, self.tokens - self.sinks)


def check_budget(budget: KvBudget) -> None:
    """Raises BadRequest naming what is wrong with a budget, and what is allowed."""
    if wrong := _what_is_wrong(budget):
        raise BadRequest(f"kv_budget is not valid: its {wrong}", param="kv_budget")


def _what_is_wrong(budget: KvBudget) -> str:
    if budget.policy not in (SINKS_WINDOW, HEAVY_HITTERS):
        allowed = f"{SINKS_WINDOW!r} or {HEAVY_HITTERS!r}"
        return f"policy is {budget.policy[:40]!r}; it must be {allowed}"
    if not 1 <= budget.tokens <= BUDGET_TOKENS_MAX:
        return f"tokens is {budget.tokens}; it must be from 1 to {BUDGET_TOKENS_MAX}"
    if not 0 <= budget.sinks < budget.tokens:
        return (
            f"sinks is {budget.sinks}; it must be from 0 to {budget.tokens - 1}, so that a token "
            f"of the budget's {budget.tokens} is left for the window"
        )
    return ""
