"""The KV budget of one sequence, as requested: plain data that is encoded by msgspec.

With the policy `heavy_hitters` a sequence keeps the blocks that received the most attention
(engine/cache/heavy_hitters.py). With `sinks_window` the token at position i sees the keys at
positions j with

    j < sinks  or  i - (tokens - sinks) < j <= i

So a token sees at most `tokens` keys, including its own. Example: with tokens = 8 and sinks = 4,
the token at position 20 sees the keys 0 to 3 and 17 to 20.

Which keys a token sees does not depend on chunks, blocks, workers or migrations. Layers that have
their own sliding window use that window instead.
"""

from typing import NamedTuple

import msgspec

from tandem.errors import BadRequest

SINKS_WINDOW = "sinks_window"
HEAVY_HITTERS = "heavy_hitters"
SINKS_DEFAULT = 4
BUDGET_TOKENS_MAX = 2**31 - 1


class VisibleKeys(NamedTuple):
    """The keys that a token sees: the first and the last keys of its context."""

    num_first: int  # number of visible keys at the start of the context
    num_last: int  # number of visible keys at the end of the context, including the token's own key


class KvBudget(msgspec.Struct, frozen=True):
    tokens: int  # largest number of keys that a token sees
    # All tokens see the keys of this number of tokens at the start of the context.
    sinks: int = SINKS_DEFAULT
    policy: str = SINKS_WINDOW

    @property
    def keeps_hitters(self) -> bool:
        return self.policy == HEAVY_HITTERS

    @property
    def visible(self) -> VisibleKeys:
        """The keys that a token sees with `sinks_window`."""
        return VisibleKeys(self.sinks, self.tokens - self.sinks)


def check_budget(budget: KvBudget) -> None:
    """Raises BadRequest for an invalid budget. The message says which values are allowed."""
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
            f"sinks is {budget.sinks}; it must be from 0 to {budget.tokens - 1}, so that at "
            f"least one of the budget's {budget.tokens} tokens is left for the window"
        )
    return ""
