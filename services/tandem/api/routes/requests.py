"""The route `/v1/requests/{id}`: what happened to a request, and when. The public and the admin
listener have it."""

from fastapi import FastAPI, Request
from starlette.responses import Response

from tandem.api.http.errors import JsonResponse
from tandem.api.http.guard import log_refusal
from tandem.errors import RequestNotFound
from tandem.net.security.audit_trail import AuditTrail
from tandem.router.admission.tenants import visible_tenant
from tandem.router.request.models import Models


def add_request_route(app: FastAPI, models: Models, trail: AuditTrail) -> None:
    @app.get("/v1/requests/{request_id}")
    async def request(request_id: str, request: Request) -> Response:
        """Returns the record of one of the last 4,096 requests of this router."""
        tenant = visible_tenant(request.state.key)
        requests = models.log_of(request_id, tenant)
        if choices := requests.find_choices(request_id, tenant):
            found = {"id": request_id, "object": "list", "data": [r.as_dict() for r in choices]}
            return JsonResponse(found)
        try:
            return JsonResponse(requests.find(request_id, tenant).as_dict())
        except RequestNotFound as error:
            if requests.is_of_another(request_id, tenant):
                log_refusal(trail, request.scope, error)
            raise
