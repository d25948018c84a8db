"""The routes: completions, chat completions, models and metrics, in OpenAI's formats."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvjax.api.streamed_text import CONTEXT
from kvjax.base.errors import InputError
from kvjax.serve.http.answers import AnswerPiece, AnswerStream, Failed
from kvjax.serve.http.choices import Choice, Head, choice_of, head_of, part_of
from kvjax.serve.http.metrics_page import metrics_page
from kvjax.serve.http.schema import CheckedBody, UnknownModel, asked, read_json
from kvjax.serve.http.service import Closed, Full, Service


class AppState(NamedTuple):
    """The state of the routes: the service, the model's name, the clients' API key, and the largest body."""

    service: Service
    name: str
    key: str | None
    most_bytes: int


def app_of(service: Service, name: str, *, key: str | None = None, most_bytes: int = 2**20) -> Starlette:
    """Build the ASGI application over a service, which starts and closes the service.

    name: the model's name. key: the bearer token that clients must send; None accepts all. most_bytes: the
    largest body, in bytes.
    """
    door = AppState(service, name, key, most_bytes)

    @asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        await run_in_threadpool(service.close)

    def completion(request: Request) -> Awaitable[Response]:
        return _answered(door, request, chat=False)

    def chat(request: Request) -> Awaitable[Response]:
        return _answered(door, request, chat=True)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_about(door)]})

    async def model(request: Request) -> Response:
        if (wanted := request.path_params["name"]) != name:
            raise UnknownModel(wanted, name)
        return JSONResponse(_about(door))

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(metrics_page(service), media_type="text/plain; version=0.0.4")

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok" if service.thread.is_alive() else "ended", 200)

    routes = [
        Route("/v1/completions", _guarded(door, completion), methods=["POST"]),
        Route("/v1/chat/completions", _guarded(door, chat), methods=["POST"]),
        Route("/v1/models", _guarded(door, models)),
        Route("/v1/models/{name:path}", _guarded(door, model)),
        Route("/metrics", _guarded(door, metrics)),
        Route("/health", health),
    ]
    paths = ", ".join(route.path for route in routes)

    async def no_route(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        what = f"{request.method} {request.url.path:.80} is no request to this server"
        return refused(status, f"{what}, expected one of {paths}", "not_found")

    async def fault(_: Request, error: Exception) -> Response:
        return refused(500, f"the server failed: {error!r:.200}", "failed")

    handlers: dict[Any, Any] = {HTTPException: no_route, Exception: fault}
    return Starlette(routes=routes, lifespan=life, exception_handlers=handlers)


def _about(door: AppState) -> dict[str, Any]:
    """Build the entry of the served model."""
    service = door.service
    return {
        "id": door.name, "object": "model", "created": 0, "owned_by": "kvjax",
        "vocab_size": service.model.config.vocab, "max_model_len": service.limits.context,
        "method": str(service.method or "full"),
    }  # fmt: skip


def refused(status: int, message: str, code: str) -> JSONResponse:
    """Build an error response in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return JSONResponse(body, status, headers={"Retry-After": "1"} if status in (429, 503) else None)


def _guarded(
    door: AppState, inner: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """Make a route that checks the API key, and answers wrong input and full servers with OpenAI's errors."""

    async def route(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode()
        if door.key is not None and not hmac.compare_digest(given, f"Bearer {door.key}".encode()):
            return refused(401, "the API key is missing or wrong: send Authorization: Bearer KEY", "api_key")
        try:
            return await inner(request)
        except UnknownModel as error:
            return refused(404, str(error), "model_not_found")
        except InputError as error:
            return refused(400, str(error), "invalid_value")
        except Full:
            return refused(429, "as many requests are under way as may be: try again", "overloaded")
        except Closed:
            return refused(503, "this server is ending: ask another", "closed")
        except Failed as error:
            closed = door.service.source.closed
            return refused(503 if closed else 500, str(error), "closed" if closed else "failed")

    return route


async def _body(request: Request, most: int) -> bytes:
    """Read the body of a request, of which at most `most` bytes are read."""
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > most:
            raise _TooLong
    return bytes(found)


class _TooLong(Exception):
    """A body exceeds the most bytes that are accepted."""


async def _answered(door: AppState, request: Request, chat: bool) -> Response:
    service = door.service
    try:
        body = read_json(await _body(request, door.most_bytes))
    except _TooLong:
        return refused(413, f"the body has more than {door.most_bytes} bytes: send less", "too_long")
    given = await run_in_threadpool(asked, service.model, door.name, body, chat, service.limits.context)
    jobs: list[AnswerStream] = []
    try:
        jobs = await _started(service, given)
        # Answers to one prompt share its echo.
        once = [await run_in_threadpool(head_of, service, given, i) for i in range(0, len(jobs), given.n)]
        heads = [head for head in once for _ in range(given.n)]
    except BaseException:
        _leave(jobs)
        raise
    if given.stream:
        events = _events(door, given, jobs, heads)
        return StreamingResponse(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
    try:
        choices = await _unless_gone(request, asyncio.gather(*map(_whole, jobs)))
    finally:
        _leave(jobs)
    if choices is None:
        return Response(status_code=499)
    each = [choice_of(service, given, i, one, heads[i]) for i, one in enumerate(choices)]
    return JSONResponse(_frame(door, given, jobs) | {"choices": each, "usage": _usage(given, jobs)})


async def _started(service: Service, given: CheckedBody) -> list[AnswerStream]:
    """Submit all prompts of a body; if one is refused, none is submitted."""
    if len(given.prompts) > (most := service.limits.waiting):
        raise InputError(f"{len(given.prompts)} answers are asked at once, expected at most {most}: ask less")
    jobs: list[AnswerStream] = []
    try:
        for prompt in given.prompts:
            jobs.append(AnswerStream(service, prompt, given.stops, not given.chat))
    except BaseException:
        _leave(jobs)
        raise
    return jobs


def _leave(jobs: list[AnswerStream]) -> None:
    for job in jobs:
        job.leave()


async def _unless_gone(request: Request, answers: asyncio.Future[list[Choice]]) -> list[Choice] | None:
    """Wait for the complete answers; None if the client disconnects first."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({answers, watch}, return_when=asyncio.FIRST_COMPLETED)
        return answers.result() if answers.done() else None
    finally:
        watch.cancel()
        if answers.cancel():
            # A cancelled future whose result nobody asks for would be logged as an error.
            await asyncio.wait({answers})
            if not answers.cancelled():
                answers.exception()


async def _whole(job: AnswerStream) -> Choice:
    text, tokens = "", []
    async for piece in job.pieces():
        text += piece.text
        if piece.token is not None:
            tokens.append(piece.token)
    return Choice(text, tokens, job.reason, job.job.tokens.tolist())


def _frame(
    door: AppState, given: CheckedBody, jobs: list[AnswerStream], chunk: bool = False
) -> dict[str, Any]:
    kind = "chat.completion" + ".chunk" * chunk if given.chat else "text_completion"
    id = f"{'chatcmpl' if given.chat else 'cmpl'}-{uuid.uuid4().hex}"
    return {"id": id, "object": kind, "created": int(time.time()), "model": door.name}


def _usage(given: CheckedBody, jobs: list[AnswerStream]) -> dict[str, int]:
    prompt = sum(len(job.job.tokens) for job in jobs[:: given.n])
    written = sum(job.written for job in jobs)
    written = 0 if given.most == 0 else written
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


async def _events(
    door: AppState, given: CheckedBody, jobs: list[AnswerStream], heads: list[Head | None]
) -> AsyncIterator[str]:
    """Yield the server-sent events of all choices; if the client disconnects, cancel the requests."""
    frame, queue = _frame(door, given, jobs, True), asyncio.Queue()

    async def pump(index: int) -> None:
        try:
            async for piece in jobs[index].pieces():
                await queue.put((index, piece))
            await queue.put((index, None))
        except Failed as error:
            await queue.put((index, error))

    pumps = [asyncio.ensure_future(pump(i)) for i in range(len(jobs))]
    try:
        for i, head in enumerate(heads):
            if given.chat:
                yield _event(frame, [{"index": i, "delta": {"role": "assistant", "content": ""}}])
            elif head is not None:
                yield _event(frame, [part_of(door.service, given, i, Choice("", [], ""), head)])
        seen = [job.job.tokens.tolist()[-CONTEXT:] for job in jobs]
        at = [0 if head is None else sum(head.widths) for head in heads]
        left = len(jobs)
        while left:
            index, thing = await queue.get()
            if isinstance(thing, AnswerPiece):
                if given.most:
                    tokens = [] if thing.token is None else [thing.token]
                    one = Choice(thing.text, tokens, "", seen[index][-CONTEXT:], at[index])
                    yield _event(frame, [part_of(door.service, given, index, one, None)])
                    if given.logprobs is not None:
                        at[index] += sum(one.widths(door.service))
                        seen[index] += one.ids
                continue
            left -= 1
            if thing is None:
                one = Choice("", [], jobs[index].reason)
                yield _event(frame, [part_of(door.service, given, index, one, None)])
            else:
                yield _data({"error": {"message": str(thing), "type": "server_error", "code": "failed"}})
        if given.usage:
            yield _data(frame | {"choices": [], "usage": _usage(given, jobs)})
        yield "data: [DONE]\n\n"
    finally:
        for one in pumps:
            one.cancel()
        _leave(jobs)


def _event(frame: dict[str, Any], choices: list[dict[str, Any]]) -> str:
    return _data(frame | {"choices": choices})


def _data(thing: dict[str, Any]) -> str:
    return f"data: {json.dumps(thing)}\n\n"
