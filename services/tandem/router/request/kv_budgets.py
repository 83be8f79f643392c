"""A KV budget changes a request's limits at the router."""

from tandem.common.config.router import RouterConfig
from tandem.errors import BadRequest
from tandem.router.request.request import ClientRequest


def pool_tokens_of(
    request: ClientRequest, pool_tokens: int | None, config: RouterConfig
) -> int | None:
    """Returns how many tokens the request may have in pools of `pool_tokens`; None: any number.

    A sequence with a budget holds the budget, rounded up to blocks: no more than twice as much in a
    pool of some blocks. Raises BadRequest for a budget where the operator allows none.
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
