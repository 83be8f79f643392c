"""HTTP routes under `/v1/keys`: operators create, list, rotate and revoke API keys.

When a key changes, the router sends the changed record to the route `/v1/keys/records` of each
other router, with a signature.
"""

import time
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from tandem.api.http.body import read_body, read_json_object
from tandem.api.http.errors import JsonResponse
from tandem.api.http.guard import caller, log_refusal
from tandem.common.config.router import RouterConfig
from tandem.errors import BadRequest, Unauthenticated
from tandem.net.security.audit_trail import AuditTrail
from tandem.net.security.key_service import RECORDS_PATH, SIGNATURE_HEADER, KeyService, listed
from tandem.net.security.keys import NewKey, Role
from tandem.net.security.limits import NO_LIMITS, changed
from tandem.router.admission.tenants import TENANT_CHARACTERS_MAX
from tandem.router.scaling.changes import logged_change

_Tenant = Annotated[
    str, msgspec.Meta(pattern="^[ -~]*$", min_length=1, max_length=TENANT_CHARACTERS_MAX)
]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=100 * 365 * 24 * 3600)]


class _Create(msgspec.Struct, forbid_unknown_fields=True):
    tenant: _Tenant
    role: Role = "user"
    expires_in_s: _Seconds = 0.0  # seconds; 0 means that the key never expires
    limits: dict[str, Any] = {}


class _Rotate(msgspec.Struct, forbid_unknown_fields=True):
    grace_s: _Seconds = 3600.0  # seconds during which the old secret remains valid


class _Update(msgspec.Struct, forbid_unknown_fields=True):
    limits: dict[str, Any]  # new values of the limits to change, by the limit's name


def add_key_routes(app: FastAPI, config: RouterConfig, keys: KeyService, trail: AuditTrail) -> None:
    @app.get("/v1/keys")
    async def keys_of_all_tenants() -> Response:
        """Lists the API keys of all tenants, without their secrets."""
        return JsonResponse({"keys": listed(list(keys.ring.records.values()), time.time())})

    @app.post("/v1/keys", status_code=201)
    async def create(request: Request) -> Response:
        """Creates a key. The answer is the only place where its secret is ever shown."""
        body = _read(_Create, await read_json_object(request, config))
        with logged_change(trail, caller(request.scope), f"key of {body.tenant}") as change:
            change.before = "none"
            expires_at = time.time() + body.expires_in_s if body.expires_in_s else 0.0
            limits = changed(NO_LIMITS, body.limits)
            key = await keys.create(body.tenant, body.role, expires_at=expires_at, limits=limits)
            change.after = f"{body.role} {key.record.key_id}"
        return _new_key_response(key)

    @app.post("/v1/keys/{key_id}/rotate", status_code=201)
    async def rotate(key_id: str, request: Request) -> Response:
        """Gives a key a new secret. The old one works for `grace_s` seconds more."""
        body = _read(_Rotate, await read_json_object(request, config))
        with logged_change(trail, caller(request.scope), f"key {key_id}") as change:
            key = await keys.rotate(key_id, grace_s=body.grace_s)
            change.before = f"version {key.record.version - 1}"
            change.after = f"version {key.record.version}"
        return _new_key_response(key)

    @app.post("/v1/keys/{key_id}/update")
    async def update(key_id: str, request: Request) -> Response:
        """Changes some limits of a key; its secret stays."""
        body = _read(_Update, await read_json_object(request, config))
        with logged_change(trail, caller(request.scope), f"limits of key {key_id}") as change:
            record = await keys.update(key_id, body.limits)
            change.after = f"version {record.version}, {body.limits}"
        return JsonResponse(listed([record], time.time())[0])

    @app.post("/v1/keys/{key_id}/revoke")
    async def revoke(key_id: str, request: Request) -> Response:
        """Revokes a key for good. The answer says which routers confirmed it."""
        await read_json_object(request, config)
        with logged_change(trail, caller(request.scope), f"key {key_id}") as change:
            change.after = "revoked"
            done = await keys.revoke(key_id)
        return JsonResponse(done)


def add_record_route(
    app: FastAPI, config: RouterConfig, keys: KeyService, trail: AuditTrail
) -> None:
    """Adds the route by which another router sends a changed key. The route is on the public port,
    because the admin port may listen on loopback only, where other routers cannot reach it."""

    @app.post(RECORDS_PATH, include_in_schema=False)
    async def take(request: Request) -> Response:
        body = await read_body(request, config)
        try:
            taken = keys.take(bytes(body), request.headers.get(SIGNATURE_HEADER, ""))
        except Unauthenticated as error:
            log_refusal(trail, request.scope, error)
            raise
        for record in taken:
            what = f"key {record.key_id}, from another router"
            with logged_change(trail, caller(request.scope), what) as change:
                state = record.state(time.time())
                change.after = f"{state} {record.role} of {record.tenant}, version {record.version}"
        return JsonResponse({})


def _read(kind: Any, body: dict[str, Any]) -> Any:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the body is not valid: {error}") from None


def _new_key_response(key: NewKey) -> Response:
    record = listed([key.record], time.time())[0]
    return JsonResponse({"key": key.text, **record}, 201)
