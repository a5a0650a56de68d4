"""The HTTP server: OpenAI's routes, health, metrics and the tokenizer, over one engine."""

import asyncio
import hmac
import logging
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxfound.config.serve import ServeConfig
from jaxfound.serving.api_error import ApiError
from jaxfound.serving.protocol import Asked, read_chat, read_completion
from jaxfound.serving.reply import Front, Reply, too_slow
from jaxfound.serving.served import ServedModel
from jaxfound.serving.server_metrics import ServerMetrics
from jaxfound.serving.tokenizer_routes import detokenize, tokenize, tokenizer_info

log = logging.getLogger(__name__)

# A body that does not arrive in this time is given up (408).
BODY_TIMEOUT_S = 30.0
# Of a body that is too long, so many times the limit is read before the answer: a client that is
# cut off while it sends would never see it.
DISCARDED = 16
# A reader may take so much longer than the engine.
SLOW_READER_S = 60.0
# Open to everybody: who starts and watches servers.
OPEN_ROUTES = ("/health", "/metrics")
NO_MODEL = "model_not_found"


@dataclass(frozen=True)
class Service:
    """What the routes work with.

    Attributes:
        front: the engine.
        served: the model.
        metrics: what `/metrics` tells.
        cfg: limits.
    """

    front: Front
    served: ServedModel
    metrics: ServerMetrics
    cfg: ServeConfig

    async def health(self, request: HttpRequest) -> Response:
        """Say 200 while requests are taken, 503 while the server ends or the engine is dead."""
        if self.front.accepting:
            return JSONResponse({"status": "ok"})
        word = "shutting down" if self.front.healthy else "dead"
        return JSONResponse({"status": word}, 503)

    async def metrics_text(self, request: HttpRequest) -> Response:
        """Return Prometheus's text."""
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def models(self, request: HttpRequest) -> Response:
        """List the one model."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: HttpRequest) -> Response:
        """Describe the model of that name."""
        name = request.path_params["name"]
        if name != self.served.name:
            message = f"there is no model {name!r} here; this server has {self.served.name!r}"
            raise ApiError(404, message, param="model", code=NO_MODEL)
        return JSONResponse(self._card())

    async def completions(self, request: HttpRequest) -> ASGIApp:
        """Continue prompts."""
        raw = await self._body(request)
        # Long texts take the tokenizer a while, and others are being streamed to meanwhile.
        return self._reply(await run_in_threadpool(read_completion, raw, self.served))

    async def chat(self, request: HttpRequest) -> ASGIApp:
        """Answer a conversation."""
        raw = await self._body(request)
        return self._reply(await run_in_threadpool(read_chat, raw, self.served))

    async def tokenize(self, request: HttpRequest) -> Response:
        """Return the ids of a text or of a conversation."""
        raw = await self._body(request)
        return JSONResponse(await run_in_threadpool(tokenize, raw, self.served))

    async def detokenize(self, request: HttpRequest) -> Response:
        """Return the text of ids."""
        raw = await self._body(request)
        return JSONResponse(await run_in_threadpool(detokenize, raw, self.served))

    async def tokenizer_info(self, request: HttpRequest) -> Response:
        """Describe the tokenizer."""
        return JSONResponse(tokenizer_info(self.served))

    def _reply(self, asked: Asked) -> Reply:
        limit_s = self.cfg.request_timeout_s + SLOW_READER_S
        return Reply(asked, self.served, self.front, self.metrics, limit_s=limit_s)

    def _card(self) -> dict[str, object]:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self.served.created,
            "owned_by": "jaxfound",
            "max_model_len": self.served.max_length,
        }

    async def _body(self, request: HttpRequest) -> bytes:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await read_body(request, limit=self.cfg.max_body_bytes)
        except TimeoutError as error:
            message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
            raise ApiError(408, message, code="body_timeout") from error


async def read_body(request: HttpRequest, *, limit: int) -> bytes:
    """Return a body of at most `limit` bytes; ApiError 413 for a longer one."""
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size <= limit:
            pieces.append(piece)
        elif size > DISCARDED * limit:
            break
    if size <= limit:
        return b"".join(pieces)
    raise ApiError(
        413,
        f"the body is longer than {limit} bytes, the most this server reads "
        "(max_body_bytes): send several requests",
        code="body_too_long",
        headers={"Connection": "close"},
    )


class Gate:
    """Asks for the key where there is one, and counts every answer by route and status.

    Args:
        app: what lies behind.
        metrics: counts.
        api_key: of the routes that are not open; None = no key is asked for.
        routes: names for the counter; anything else counts as `other`.
    """

    def __init__(
        self, app: ASGIApp, *, metrics: ServerMetrics, api_key: str | None, routes: frozenset[str]
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._key = None if api_key is None else api_key.encode("utf-8")
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through who has the key."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in self._routes else "other"

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.answered(route, message["status"])
            await send(message)

        if scope["path"] in OPEN_ROUTES or self._has_key(scope):
            await self._app(scope, receive, counting)
            return
        refusal = ApiError(
            401,
            "the request has no valid key: send it as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await json_error(refusal)(scope, receive, counting)

    def _has_key(self, scope: Scope) -> bool:
        if self._key is None:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)


def json_error(error: ApiError) -> JSONResponse:
    """Return an error as clients read it."""
    return JSONResponse(error.body, error.status, headers=error.headers)


async def refuse(request: HttpRequest, error: Exception) -> Response:
    """Answer with the error that was raised."""
    if isinstance(error, ApiError):
        return json_error(error)
    if isinstance(error, TimeoutError):
        return json_error(too_slow())
    if isinstance(error, HTTPException):
        words = {404: "there is no such route here", 405: "this route has another method"}
        message = f"{request.method} {request.url.path}: {words.get(error.status_code, 'refused')}"
        return json_error(ApiError(error.status_code, message, code=None, headers=error.headers))
    # Nobody reads this one: the client left while it sent.
    if isinstance(error, ClientDisconnect):
        return Response(status_code=400)
    log.error("request.failed", exc_info=error, extra={"path": request.url.path})
    message = "the server met an error of its own; its log has the details"
    return json_error(ApiError(500, message, code="internal_error"))


def make_app(
    front: Front,
    served: ServedModel,
    metrics: ServerMetrics,
    *,
    cfg: ServeConfig,
    api_key: str | None = None,
) -> Starlette:
    """Return the server as an ASGI application.

    Args:
        front: the engine.
        served: the model.
        metrics: what `/metrics` tells.
        cfg: limits.
        api_key: asked for by every route but `/health` and `/metrics`; None = by none.
    """
    service = Service(front, served, metrics, cfg)
    routes = [
        Route("/health", service.health),
        Route("/metrics", service.metrics_text),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/tokenize", service.tokenize, methods=["POST"]),
        Route("/detokenize", service.detokenize, methods=["POST"]),
        Route("/tokenizer_info", service.tokenizer_info),
    ]
    paths = frozenset(route.path for route in routes)
    gate = Middleware(Gate, metrics=metrics, api_key=api_key, routes=paths)
    handled = (ApiError, HTTPException, TimeoutError, ClientDisconnect, Exception)
    return Starlette(
        routes=routes,
        middleware=[gate],
        exception_handlers=dict.fromkeys(handled, refuse),
    )
