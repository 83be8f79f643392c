"""Keys and tenants of the APIs beside OpenAI's completions and chats."""

from __future__ import annotations

import httpx
import pytest

from tandem.router.admission.tenants import cache_salt
from tests.security.test_keys import TOKEN, Routers, create, ready, routers

__all__ = ["routers"]
pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

QUESTION = [{"role": "user", "content": "x"}]


async def test_a_key_in_anthropics_header_opens_anthropics_paths_alone(routers: Routers) -> None:
    url = await routers.start("r1")
    await ready(url)
    key = await create(routers.admin_of(url), "acme")
    asked = {"messages": QUESTION, "max_tokens": 1}
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        for path, header, status in (
            ("/v1/messages", {"x-api-key": key}, 200),
            ("/v1/messages/count_tokens", {"x-api-key": key}, 200),
            ("/v1/messages", {"authorization": f"Bearer {key}"}, 200),
            ("/v1/messages", {"x-api-key": key, "authorization": "Bearer wrong"}, 401),
            ("/v1/messages", {"x-api-key": "wrong"}, 401),
            ("/v1/messages", {}, 401),
            ("/v1/chat/completions", {"x-api-key": key}, 401),
        ):
            answer = await http.post(path, json=asked, headers=header)
            assert answer.status_code == status, (path, header, answer.text)
            if status == 401 and path == "/v1/messages":
                assert answer.json()["type"] == "error"
                assert answer.json()["error"]["type"] == "authentication_error"
    salts = {s.input.cache_salt for s in routers.worker.submitted}  # type: ignore[attr-defined]
    assert salts == {cache_salt(TOKEN, "acme")}
