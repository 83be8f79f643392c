"""Bounds on what a router keeps of responses, and their fairness among tenants."""

from __future__ import annotations

from tandem.api.responses.kept import KeptResponse, KeptResponses

LARGE = 4 << 20  # characters, as many as a body may have


def keep(kept: KeptResponses, tenant: str, number: int, text: str = "x") -> str:
    name = f"resp_{tenant}_{number}"
    body = {"id": name, "metadata": {"a": text}}
    kept.keep(name, KeptResponse.of(tenant, body, [{"role": "user", "content": text}], []))
    return name


def num_found(kept: KeptResponses, tenant: str, names: list[str]) -> int:
    found = [kept.find(name) for name in names]
    return sum(response is not None and response.tenant == tenant for response in found)


def test_a_tenant_with_many_responses_pushes_out_its_own() -> None:
    kept = KeptResponses(10)
    first = keep(kept, "b", 0)
    names = [keep(kept, "a", number) for number in range(100)]
    response = kept.find(first)
    assert response is not None
    assert response.conversation == [{"role": "user", "content": "x"}]
    assert num_found(kept, "a", names) == 9
    assert num_found(kept, "a", names[-9:]) == 9


def test_large_responses_are_bounded_by_their_bytes_and_push_out_their_tenants_own() -> None:
    kept = KeptResponses(500)
    first = keep(kept, "b", 0)
    names = [keep(kept, "a", number, "y" * LARGE) for number in range(20)]
    assert num_found(kept, "a", names) == (32 << 20) // (2 * LARGE + 200)
    assert num_found(kept, "a", names[-1:]) == 1
    response = kept.find(first)
    assert response is not None
    assert response.num_bytes < 200
    kept.delete(names[-1])
    assert kept.find(names[-1]) is None
    assert keep(kept, "a", 21, "y" * LARGE) == "resp_a_21"
    assert num_found(kept, "a", ["resp_a_21"]) == 1
