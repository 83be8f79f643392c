"""The fields of completions and chats that say what is worth keeping of their KV."""

from pydantic import Field

from tandem.api.openai.structured import Strict
from tandem.common.retention import PRIORITY_DEFAULT, Retention
from tandem.router.request.allowed import ALLOWED
from tandem.router.request.retention import asked_retention


class RetentionFields(Strict):
    """The fields that say how long KV is worth keeping. The first two are OpenAI's."""

    prompt_cache_retention: str | None = Field(None, description=ALLOWED["prompt_cache_retention"])
    prompt_cache_key: str | None = Field(None, description=ALLOWED["prompt_cache_key"])
    kv_priority: int = Field(PRIORITY_DEFAULT, description=ALLOWED["kv_priority"])

    def retention(self) -> Retention:
        """Raises BadRequest for values that are not allowed."""
        return asked_retention(self.prompt_cache_retention, self.prompt_cache_key, self.kv_priority)
