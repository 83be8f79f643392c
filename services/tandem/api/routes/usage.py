"""The route `/v1/usage` of the public and the admin listener.

A call with a user's key gets the usage of the key's tenant. A call with an operator's key gets the
usage of all tenants.
"""

import time
from dataclasses import asdict

from fastapi import FastAPI, Request
from starlette.responses import Response

from tandem.api.http.errors import JsonResponse
from tandem.errors import BadRequest
from tandem.router.limits.usage import UsageQuery
from tandem.router.request.generator import Generator


def add_usage_route(app: FastAPI, generator: Generator) -> None:
    @app.get("/v1/usage")
    async def usage(request: Request) -> Response:
        """Returns the use of each tenant in the `last` windows (`day` or `minute`, in UTC)."""
        params = request.query_params
        window = params.get("window", "day")
        last = params.get("last", "1")
        if not (last.isascii() and last.isdecimal() and len(last) < 10):
            raise BadRequest(
                "the query parameter `last` must be an integer: the number of days or minutes "
                "to show",
                param="last",
            )
        query = UsageQuery.of(window, int(last), params.get("tenant"), request.state.key)
        rows = await generator.tenants.usage.read(query, now=time.time())
        data = [{"object": "usage", "window": window, **asdict(row)} for row in rows]
        return JsonResponse({"object": "list", "data": data})
