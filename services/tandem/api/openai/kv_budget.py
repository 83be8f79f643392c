"""The field `kv_budget` of completions and chats, which OpenAI's API does not have."""

from pydantic import Field

from tandem.api.openai.structured import Strict
from tandem.common.kv_budget import SINKS_DEFAULT, SINKS_WINDOW, KvBudget
from tandem.router.request.allowed import ALLOWED


class SentKvBudget(Strict):
    policy: str = SINKS_WINDOW
    tokens: int
    sinks: int = SINKS_DEFAULT


class BudgetField(Strict):
    kv_budget: SentKvBudget | None = Field(None, description=ALLOWED["kv_budget"])

    def budget(self) -> KvBudget | None:
        """Returns the budget, not checked yet."""
        return None if self.kv_budget is None else KvBudget(**self.kv_budget.model_dump())
