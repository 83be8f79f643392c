"""The effect of a KV budget on a request's token limit."""

from tandem.common.config.router import RouterConfig
from tandem.errors import BadRequest
from tandem.router.request.request import ClientRequest


def pool_tokens_of(
    request: ClientRequest, pool_tokens: int | None, config: RouterConfig
) -> int | None:
    """Returns the largest number of tokens of the request in pools of `pool_tokens`; None: no
    limit.

    A sequence with a budget holds at most the budget rounded up to blocks. This is at most twice
    the budget in a pool of several blocks. Raises BadRequest if the operator allows no budgets.
    """
    budget = request.kv_budget
    if budget is not None and config.kv_budgets == "refuse":
        raise BadRequest(
            "kv_budget must be left out: this cluster allows none (--kv-budgets refuse)",
            param="kv_budget",
        )
    if budget is None or pool_tokens is None:
        return pool_tokens
    return None if 2 * budget.tokens <= pool_tokens else pool_tokens
