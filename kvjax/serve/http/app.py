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
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvjax.base.errors import InputError
from kvjax.serve.device.jobs import Token
from kvjax.serve.device.scored import Scored, scored
from kvjax.serve.http.answers import Answering, Failed, Piece
from kvjax.serve.http.metrics_page import metrics_page
from kvjax.serve.http.schema import CheckedBody, asked, read_json
from kvjax.serve.http.service import Closed, Full, Service


class AppState(NamedTuple):
    """The state of the routes: the service, the model's name, the clients' API key, and the largest body."""

    service: Service
    name: str
    key: str | None
    most_bytes: int


class Choice(NamedTuple):
    """One answer, or a part of it."""

    text: str
    tokens: list[Token]
    reason: str

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


def app_of(service: Service, name: str, *, key: str | None = None, most_bytes: int = 2**20) -> Starlette:
    """The ASGI application over a service, which starts and closes the service.

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
        about = {"id": name, "object": "model", "created": 0, "owned_by": "kvjax"}
        about["vocab_size"] = service.model.config.vocab
        limits = {"max_model_len": service.limits.context, "method": str(service.method or "full")}
        return JSONResponse({"object": "list", "data": [about | limits]})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(metrics_page(service), media_type="text/plain; version=0.0.4")

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok" if service.thread.is_alive() else "ended", 200)

    routes = [
        Route("/v1/completions", _guarded(door, completion), methods=["POST"]),
        Route("/v1/chat/completions", _guarded(door, chat), methods=["POST"]),
        Route("/v1/models", _guarded(door, models)),
        Route("/metrics", _guarded(door, metrics)),
        Route("/health", health),
    ]
    return Starlette(routes=routes, lifespan=life)


def refused(status: int, message: str, code: str) -> JSONResponse:
    """An error response in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return JSONResponse(body, status, headers={"Retry-After": "1"} if status in (429, 503) else None)


def _guarded(
    door: AppState, inner: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """A route that checks the API key, and answers wrong input and a full server with OpenAI's errors."""

    async def route(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode()
        if door.key is not None and not hmac.compare_digest(given, f"Bearer {door.key}".encode()):
            return refused(401, "the API key is missing or wrong: send Authorization: Bearer KEY", "api_key")
        try:
            return await inner(request)
        except InputError as error:
            return refused(400, str(error), "invalid_value")
        except Full:
            return refused(429, "as many requests are under way as may be: try again", "overloaded")
        except Closed:
            return refused(503, "this server is ending: ask another", "closed")
        except Failed as error:
            return refused(500, str(error), "failed")

    return route


async def _body(request: Request, most: int) -> bytes:
    """The body of a request, of which at most `most` bytes are read."""
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
    jobs: list[Answering] = []
    try:
        jobs = await _started(service, given)
        heads = [await run_in_threadpool(_head, service, given, i) for i in range(len(jobs))]
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
    each = [_choice(service, given, i, one, heads[i]) for i, one in enumerate(choices)]
    return JSONResponse(_frame(door, given, jobs) | {"choices": each, "usage": _usage(given, jobs)})


async def _started(service: Service, given: CheckedBody) -> list[Answering]:
    """Submits all prompts of a body; if one is refused, none is submitted."""
    jobs: list[Answering] = []
    try:
        for prompt in given.prompts:
            jobs.append(Answering(service, prompt, given.stops))
    except BaseException:
        _leave(jobs)
        raise
    return jobs


def _leave(jobs: list[Answering]) -> None:
    for job in jobs:
        job.leave()


async def _unless_gone(request: Request, answers: asyncio.Future[list[Choice]]) -> list[Choice] | None:
    """The complete answers; None if the client disconnects first."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({answers, watch}, return_when=asyncio.FIRST_COMPLETED)
        return answers.result() if answers.done() else None
    finally:
        watch.cancel()
        answers.cancel()


async def _whole(job: Answering) -> Choice:
    text, tokens = "", []
    async for piece in job.pieces():
        text += piece.text
        if piece.token is not None:
            tokens.append(piece.token)
    return Choice(text, tokens, job.reason)


class _Head(NamedTuple):
    """An echoed prompt: its text, its ids, and their log-probabilities if they are asked for."""

    text: str
    ids: list[int]
    scored: Scored | None


def _head(service: Service, given: CheckedBody, index: int) -> _Head | None:
    if not given.echo:
        return None
    model, ids = service.model, [*given.prompts[index].tokens]
    text = "" if model.tokenizer is None else model.tokenizer.decode(ids, skip_special_tokens=False)
    return _Head(text, ids, None if given.logprobs is None else scored(model, ids, given.logprobs))


def _choice(
    service: Service, given: CheckedBody, index: int, one: Choice, head: _Head | None
) -> dict[str, Any]:
    """A choice of a response that is not streamed."""
    if given.most == 0:
        one = Choice("", [], "length")
    found: dict[str, Any] = {"index": index, "finish_reason": one.reason, "token_ids": one.ids}
    if given.chat:
        said = None if given.logprobs is None else _chat_logprobs(service, one)
        return found | {"message": {"role": "assistant", "content": one.text}, "logprobs": said}
    text = one.text if head is None else head.text + one.text
    said = None if given.logprobs is None else _logprobs(service, given, one, head)
    return found | {"text": text, "logprobs": said}


def _token(service: Service, id: int) -> str:
    tokenizer = service.model.tokenizer
    return str(id) if tokenizer is None else tokenizer.decode([id], skip_special_tokens=False)


def _logprobs(service: Service, given: CheckedBody, one: Choice, head: _Head | None) -> dict[str, Any]:
    """Log-probabilities in the format of completions; the first token of a prompt has none."""
    found = [*one.tokens]
    if head is not None and head.scored is not None:
        rows = zip(head.ids[1:], *(x.tolist() for x in head.scored), strict=True)
        prompt = [Token(id, own, [*zip(top, best, strict=True)]) for id, own, top, best in rows]
        found = prompt + found
    ids, known = [token.id for token in found], [token.logprob for token in found]
    top: list[dict[str, float] | None] = [_named(service, token) for token in found]
    if head is not None and head.scored is not None:
        ids, known, top = head.ids[:1] + ids, [None, *known], [None, *top]
    tokens, offsets, at = [_token(service, id) for id in ids], [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token)
    return {
        "tokens": tokens, "token_logprobs": known, "text_offset": offsets,
        "top_logprobs": top if given.logprobs else None,
    }  # fmt: skip


def _named(service: Service, token: Token) -> dict[str, float]:
    """The likeliest tokens and the drawn one, by text; of two with one text, the likelier one."""
    found: dict[str, float] = {}
    for id, logprob in (*token.top, token[:2]):
        found.setdefault(_token(service, id), logprob)
    return found


def _chat_logprobs(service: Service, one: Choice) -> dict[str, Any]:
    """Log-probabilities as chats have them."""

    def said(id: int, logprob: float) -> dict[str, Any]:
        text = _token(service, id)
        return {"token": text, "logprob": logprob, "bytes": [*text.encode()]}

    return {
        "content": [
            said(*token[:2]) | {"top_logprobs": [said(*top) for top in token.top]} for token in one.tokens
        ]
    }


def _frame(door: AppState, given: CheckedBody, jobs: list[Answering], chunk: bool = False) -> dict[str, Any]:
    kind = "chat.completion" + ".chunk" * chunk if given.chat else "text_completion"
    id = f"{'chatcmpl' if given.chat else 'cmpl'}-{uuid.uuid4().hex}"
    return {"id": id, "object": kind, "created": int(time.time()), "model": door.name}


def _usage(given: CheckedBody, jobs: list[Answering]) -> dict[str, int]:
    prompt, written = sum(len(job.job.tokens) for job in jobs), sum(job.written for job in jobs)
    written = 0 if given.most == 0 else written
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


async def _events(
    door: AppState, given: CheckedBody, jobs: list[Answering], heads: list[_Head | None]
) -> AsyncIterator[str]:
    """Yields the server-sent events of all choices; if the client disconnects, cancels the requests."""
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
                yield _event(frame, [_part(door.service, given, i, Choice("", [], ""), head)])
        left = len(jobs)
        while left:
            index, thing = await queue.get()
            if isinstance(thing, Piece):
                if given.most:
                    one = Choice(thing.text, [] if thing.token is None else [thing.token], "")
                    yield _event(frame, [_part(door.service, given, index, one, None)])
                continue
            left -= 1
            if thing is None:
                one = Choice("", [], jobs[index].reason)
                yield _event(frame, [_part(door.service, given, index, one, None)])
            else:
                yield _data({"error": {"message": str(thing), "type": "server_error", "code": "failed"}})
        if given.usage:
            yield _data(frame | {"choices": [], "usage": _usage(given, jobs)})
        yield "data: [DONE]\n\n"
    finally:
        for one in pumps:
            one.cancel()
        _leave(jobs)


def _part(
    service: Service, given: CheckedBody, index: int, one: Choice, head: _Head | None
) -> dict[str, Any]:
    """The entry of a choice in a server-sent event."""
    reason = one.reason or None
    if not given.chat:
        whole = _choice(service, given._replace(most=1), index, one, head)
        return whole | {"finish_reason": reason}
    delta = {"content": one.text} if one.text or not reason else {}
    said = None if given.logprobs is None else _chat_logprobs(service, one)
    return {"index": index, "delta": delta, "logprobs": said, "finish_reason": reason}


def _event(frame: dict[str, Any], choices: list[dict[str, Any]]) -> str:
    return _data(frame | {"choices": choices})


def _data(thing: dict[str, Any]) -> str:
    return f"data: {json.dumps(thing)}\n\n"
