"""Keys and tenants in the APIs other than OpenAI's completions and chats."""

from __future__ import annotations

import httpx
import pytest

from tandem.router.admission.tenants import cache_salt
from tests.harness.keyed_routers import TOKEN, Routers, create, ready, routers

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
        for header, status, kind in (
            ({"x-api-key": key, "anthropic-version": "2023-06-01"}, 200, None),
            ({"x-api-key": "wrong", "anthropic-version": "2023-06-01"}, 401, "error"),
            ({"x-api-key": key}, 401, None),
        ):
            answer = await http.get("/v1/models", headers=header)
            assert (answer.status_code, answer.json().get("type")) == (status, kind), header
    salts = {s.input.cache_salt for s in routers.worker.submitted}  # type: ignore[attr-defined]
    assert salts == {cache_salt(TOKEN, "acme")}


async def test_a_kept_response_is_its_tenants(routers: Routers) -> None:
    url = await routers.start("r1", responses_kept=8)
    await ready(url)
    admin = routers.admin_of(url)
    keys = [await create(admin, tenant) for tenant in ("acme", "other")]
    own, other = ({"authorization": f"Bearer {key}"} for key in keys)
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        asked = {"input": "x", "max_output_tokens": 1}
        made = await http.post("/v1/responses", json=asked, headers=own)
        assert made.json()["store"] is True
        path = f"/v1/responses/{made.json()['id']}"
        assert (await http.get(path, headers=other)).status_code == 404
        assert (await http.delete(path, headers=other)).status_code == 404
        assert (await http.get(f"{path}/input_items", headers=other)).status_code == 404
        assert (await http.post(f"{path}/cancel", headers=other)).status_code == 404
        assert (await http.get(path)).status_code == 401
        following = {**asked, "previous_response_id": made.json()["id"]}
        refused = await http.post("/v1/responses", json=following, headers=other)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "previous_response_not_found"
        assert (await http.get(path, headers=own)).json() == made.json()
        continued = await http.post("/v1/responses", json=following, headers=own)
        assert continued.status_code == 200
        assert (await http.delete(path, headers=own)).json()["deleted"] is True
        assert (await http.get(path, headers=own)).status_code == 404


async def test_nothing_is_kept_if_the_router_may_not(routers: Routers) -> None:
    url = await routers.start("r1", responses_kept=0)
    await ready(url)
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        asked = {"input": "x", "max_output_tokens": 1, "store": True}
        made = await http.post("/v1/responses", json=asked)
        assert (made.status_code, made.json()["store"]) == (200, False)
        gone = await http.get(f"/v1/responses/{made.json()['id']}")
        assert gone.status_code == 404
        assert "--responses-kept" in gone.json()["error"]["message"]
