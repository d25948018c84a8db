"""A load over HTTP, to a server of OpenAI's completions; figures as `vllm bench serve` has them."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from kvjax.base.errors import InputError
from kvjax.serve.grammar import System
from kvjax.serve.load.metrics import Slo, metrics
from kvjax.serve.requests import ENDED, GONE, Request, RequestProgress
from kvjax.serve.sim import Outcome

# Of the figures of a run, those that a client cannot see.
UNSEEN = ("refused", "iterations", "preemptions", "recomputed_tokens", "moved_tokens", "hit_rate")


class Server(NamedTuple):
    """A server's address, and the key that clients send to it."""

    url: str
    key: str | None = None

    def connect(self) -> http.client.HTTPConnection:
        """Open a connection. Raises InputError for an address that is none."""
        parts = urlsplit(self.url)
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if parts.scheme not in kinds or not parts.hostname:
            raise InputError(f"--url is {self.url!r}, expected one such as http://127.0.0.1:8000")
        return kinds[parts.scheme](parts.hostname, parts.port, timeout=600)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request."""
        found = {"Content-Type": "application/json"}
        return found | {"Authorization": f"Bearer {self.key}"} if self.key else found

    def about(self) -> dict[str, Any]:
        """Ask what the server says of its first model. Raises InputError if it says nothing."""
        one = self.connect()
        try:
            one.request("GET", "/v1/models", headers=self.headers)
            return json.loads(one.getresponse().read())["data"][0]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise InputError(
                f"{self.url} names no model ({error!r:.100}): start `kvjax serve http` there, or give "
                "--api-key"
            ) from error
        finally:
            one.close()


def ask(server: Server, model: str, prompt: Sequence[int], output: int, began: float) -> list[float]:
    """Stream one completion; return when each token came, in seconds after `began`. Raises OSError."""
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": output, "temperature": 0, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    one, found = server.connect(), []
    try:
        one.request("POST", "/v1/completions", json.dumps(body), server.headers)
        answer = one.getresponse()
        if answer.status != 200:
            raise OSError(f"status {answer.status}: {answer.read(300)!r}")
        for line in answer:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise OSError(event["error"]["message"])
            tokens = [choice.get("token_ids", [choice.get("text")]) for choice in event["choices"]]
            found += [time.perf_counter() - began] * sum(map(len, tokens))
    finally:
        one.close()
    return found


def put_load(
    server: Server, model: str, requests: Sequence[Request], prompts: Sequence[Sequence[int]],
    concurrency: int | None = None, slo: Slo | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Send every request at its time, or once fewer than `concurrency` are under way; return the figures.

    errors: the first error of those that failed.
    """
    began, errors = time.perf_counter(), []

    def one(request: Request, prompt: Sequence[int]) -> list[float]:
        time.sleep(max(0.0, request.arrived - (time.perf_counter() - began)))
        try:
            return ask(server, model, prompt, request.output, began)
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            errors.append(f"request {request.id}: {error}")
            return []

    with ThreadPoolExecutor(concurrency or max(1, len(requests))) as threads:
        times = list(threads.map(one, requests, prompts))
    return {**seen(requests, times, slo), "errors": errors[:1]}


def seen(
    requests: Sequence[Request], times: Sequence[Sequence[float]], slo: Slo | None = None
) -> dict[str, Any]:
    """Compute the figures of requests whose tokens came at these times; of those without, that they failed.

    >>> found = seen([Request(0, 1.0, 5, 2), Request(1, 0.0, 5, 2)], [[1.5, 1.75], []])
    >>> found["completed"], found["failed"], found["mean_ttft_ms"], found["mean_tpot_ms"]
    (1, 1, 500.0, 250.0)
    """
    entries, ends = [], []
    for request, came in zip(requests, times, strict=True):
        # Every token has an iteration of its own.
        spans = [[len(ends) + i, 1] for i in range(len(came))]
        state = ENDED if came else GONE
        entries.append(RequestProgress(request, state=state, written=len(came), spans=spans, outside=True))
        ends += came
    figures = metrics(Outcome(entries, np.array(ends), 0, 0, System(), "a client's clock"), slo)
    failed = len(entries) - figures["completed"]
    return {name: x for name, x in figures.items() if name not in UNSEEN} | {"failed": failed}
