"""The door: answers are those of `kvjax.generate`, faults cost nobody else anything, nothing is leaked."""

import asyncio
import contextlib
import dataclasses
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from functools import cache

import jax
import numpy as np
import pytest

import kvjax
from kvjax.commands.main import main
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.serve import Prompt, System
from kvjax.serve.device.engine import Engine
from kvjax.serve.grammar import words
from kvjax.serve.ledger.audit import audit

pytest.importorskip("starlette", reason="the door needs the extra `serve`")
uvicorn, httpx = pytest.importorskip("uvicorn"), pytest.importorskip("httpx")

from kvjax.serve.http.answers import AnswerText  # noqa: E402
from kvjax.serve.http.app import app_of  # noqa: E402
from kvjax.serve.http.draining import Draining  # noqa: E402
from kvjax.serve.http.service import Closed, Full, Limits, Service  # noqa: E402

NEW, PAGES, LIMITS = 8, 24, Limits(48, 32, 4)
SYSTEM = System(words.Blocks(4), words.Tree(), words.LRU(), batch=words.Chunked(32, 8))
WORDS = "road to <set> calm fox 1 2 3 <.> a hill <get> brave otter"


@cache
def model():
    """Build a small decoder with the words of the shipped model, and a plain chat template."""
    shipped = kvjax.load("recall-tiny")
    size = dict(d_model=32, head_dim=16, d_ff=48, layers=2, heads=4, kv_heads=2)
    config = Config(vocab=shipped.config.vocab, max_positions=64, **size)
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    made = Model(config, init(config, jax.random.key(1)), name="small")
    return dataclasses.replace(made, tokenizer=shipped.tokenizer, chat_template=template)


@cache
def ids():
    return tuple(model().tokenizer.encode(WORDS).ids)


@cache
def alone(count=NEW):
    out = kvjax.generate(model(), [[*ids()]], max_new_tokens=NEW)
    return out.tokens[0, :count].tolist(), out.texts[0]


def service(**more):
    return Service(model(), **(dict(system=SYSTEM, pages=PAGES, limits=LIMITS) | more))


@contextlib.contextmanager
def door(one, started=True, **more):
    """Yield a client of a server on a free port of this machine; at the end the server drains."""
    # uvicorn's configuration of logging closes all handlers, and that of absl closes pytest's standard error.
    how = dict(port=0, log_config=None, log_level="warning", ws="none", lifespan="on" if started else "off")
    server = uvicorn.Server(uvicorn.Config(app_of(one, "small", **more), **how))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(300)


def clean(one):
    loop = one.engine.loop
    assert not one.jobs and not loop.ledger.tables and not audit(loop.ledger, loop.tree)
    assert loop.ledger.free + loop.ledger.idle == loop.ledger.pages


def events(text):
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert found[-1] == "[DONE]"
    return [json.loads(one) for one in found[:-1]]


GREEDY = {"prompt": WORDS, "max_tokens": NEW, "temperature": 0}


def test_completions_and_chats_are_what_generate_writes():
    one = service()
    with door(one) as client:
        got = client.post("/v1/completions", json=GREEDY | {"model": "small", "logprobs": 0}).json()
        (choice,) = got["choices"]
        # The text continues the prompt's: this tokenizer's decoder puts a space between them.
        assert (choice["token_ids"], choice["text"]) == (alone()[0], " " + alone()[1])
        assert choice["finish_reason"] == "length"
        assert got["usage"] == {
            "prompt_tokens": len(ids()), "completion_tokens": NEW, "total_tokens": len(ids()) + NEW,
        }  # fmt: skip
        assert len(choice["logprobs"]["token_logprobs"]) == NEW
        both = client.post("/v1/completions", json=GREEDY | {"prompt": [[*ids()], [*ids()][:9]]}).json()
        assert [c["index"] for c in both["choices"]] == [0, 1]
        assert both["choices"][0]["token_ids"] == alone()[0] != both["choices"][1]["token_ids"]

        streamed = events(client.post("/v1/completions", json=GREEDY | {"stream": True}).text)
        assert "".join(e["choices"][0]["text"] for e in streamed) == " " + alone()[1]
        assert streamed[-1]["choices"][0]["finish_reason"] == "length"

        chat = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": NEW, "temperature": 0}
        whole = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
        want = kvjax.generate(
            model(), [model().tokenizer.encode(WORDS + " ", add_special_tokens=False).ids], max_new_tokens=NEW
        )
        assert whole == want.texts[0]
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        parts = events(client.post("/v1/chat/completions", json=chat | usage).text)
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in parts[:-1]) == whole
        assert parts[-1]["usage"]["completion_tokens"] == NEW

        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 48
        assert client.get("/v1/models/small").json() == client.get("/v1/models").json()["data"][0]
        page = client.get("/metrics").text
        assert "kvjax_requests_ended_total 6" in page and f"kvjax_pages_free {PAGES}" in page
        assert client.get("/health").text == "ok"
    clean(one)


def test_a_seed_draws_the_same_text_and_none_draws_others():
    body = GREEDY | {"temperature": 2.0, "ignore_eos": True}
    with door(service()) as client:
        texts = [
            client.post("/v1/completions", json=body | more).json()["choices"][0]["token_ids"]
            for more in ({"seed": 3}, {"seed": 3}, {}, {})
        ]
    sampler, key = kvjax.Sampler(2.0), jax.random.key(3)
    want = kvjax.generate(model(), [[*ids()]], max_new_tokens=NEW, sampler=sampler, key=key, stop=[])
    assert texts[0] == texts[1] == want.tokens[0].tolist() and texts[2] != texts[3]


def test_n_answers_are_drawn_by_keys_one_apart_and_their_prompt_counts_once():
    body = GREEDY | {"temperature": 2.0, "ignore_eos": True, "prompt": [[*ids()], [*ids()][:9]], "n": 2}
    with door(service()) as client:
        got = client.post("/v1/completions", json=body | {"seed": 3, "best_of": 2}).json()
        long = [
            client.post("/v1/completions", json=GREEDY | {"temperature": 2.0, "seed": seed}).json()["choices"]
            for seed in (2**40 + 3, 2**41 + 3, -3)
        ]
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2, 3]
    assert got["usage"]["prompt_tokens"] == len(ids()) + 9 and got["usage"]["completion_tokens"] == 4 * NEW
    how = dict(max_new_tokens=NEW, sampler=kvjax.Sampler(2.0), stop=[])
    for i, choice in enumerate(got["choices"]):
        want = kvjax.generate(model(), [body["prompt"][i // 2]], key=jax.random.key(3 + i), **how)
        assert choice["token_ids"] == want.tokens[0].tolist()
    assert len({str(choices) for choices in long}) == 3


def test_offsets_say_where_tokens_begin_in_whole_answers_and_in_pieces():
    body = GREEDY | {"logprobs": 1, "echo": True}
    with door(service()) as client:
        (whole,) = client.post("/v1/completions", json=body).json()["choices"]
        parts = events(client.post("/v1/completions", json=body | {"stream": True}).text)
        (plain,) = client.post("/v1/completions", json=body | {"echo": False}).json()["choices"]
    said = whole["logprobs"]
    # Spaces stand between the words of this tokenizer.
    assert whole["text"] == model().tokenizer.decode([*ids(), *alone()[0]], skip_special_tokens=False)
    assert len(said["text_offset"]) == len(said["tokens"])
    for at, word in zip(said["text_offset"], said["tokens"], strict=True):
        assert whole["text"][at:].lstrip(" ").startswith(word)
    pieces = [e["choices"][0]["logprobs"]["text_offset"] for e in parts]
    assert sum(pieces, []) == said["text_offset"]
    first = said["text_offset"][-NEW]
    assert plain["logprobs"]["text_offset"] == [at - first for at in said["text_offset"][-NEW:]]


@pytest.mark.rotating
def test_a_prompt_is_scored_where_it_is_echoed():
    """As lm-evaluation-harness asks: zip(token_logprobs, top_logprobs)[context:-1]."""
    with door(service()) as client:
        body = GREEDY | {"prompt": [[*ids()]], "max_tokens": 1, "echo": True, "logprobs": 1}
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    want = kvjax.likelihood(model(), [[*ids()]])
    said = choice["logprobs"]
    assert said["token_logprobs"][0] is None and len(said["token_logprobs"]) == len(ids()) + 1
    np.testing.assert_allclose(said["token_logprobs"][1:-1], want.logprobs[0, 1:], atol=1e-4)
    tops = [
        max(top.values()) == x
        for x, top in zip(said["token_logprobs"], said["top_logprobs"], strict=True)
        if top
    ]
    assert tops[:-1] == want.greedy[0, 1:].tolist() and tops[-1]


@pytest.mark.rotating
def test_likeliest_tokens_are_named_in_completions_chats_and_echoes():
    sampled = {"temperature": 2.0, "seed": 3, "ignore_eos": True}
    with door(service()) as client:
        body = GREEDY | sampled | {"logprobs": 4, "echo": True, "max_tokens": 6}
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
        echoed = client.post("/v1/completions", json=body | {"stream": True})
        chat = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 6, "logprobs": True}
        post = lambda more: client.post("/v1/chat/completions", json=chat | sampled | more)  # noqa: E731
        (whole,) = post({"top_logprobs": 3}).json()["choices"]
        parts = events(post({"top_logprobs": 3, "stream": True}).text)
        (plain,) = post({}).json()["choices"]
    said, written = choice["logprobs"], choice["token_ids"]
    text = [*ids(), *written]
    want = kvjax.likelihood(model(), [text])
    np.testing.assert_allclose(said["token_logprobs"][1:], want.logprobs[0, 1:], atol=1e-4)
    decode = lambda id: model().tokenizer.decode([id], skip_special_tokens=False)  # noqa: E731
    for id, own, top in zip(text[1:], said["token_logprobs"][1:], said["top_logprobs"][1:], strict=True):
        assert top[decode(id)] == own and len(top) in (4, 5)
        ranked = sorted(top.values(), reverse=True)
        # A fifth is there only where the token itself is none of the four likeliest.
        assert len(top) == 4 or ranked[4] == own
    pairs = zip(said["token_logprobs"][1:], said["top_logprobs"][1:], strict=True)
    greedy = [max(top.values()) == own for own, top in pairs]
    assert greedy == want.greedy[0, 1:].tolist() and not all(greedy[-6:])
    assert [e["choices"][0]["logprobs"]["tokens"] for e in events(echoed.text)[:-1]][0] == [
        decode(id) for id in ids()
    ]
    content = whole["logprobs"]["content"]
    assert [len(one["top_logprobs"]) for one in content] == [3] * 6
    for one in content:
        best = [top["logprob"] for top in one["top_logprobs"]]
        assert best == sorted(best, reverse=True) and one["logprob"] <= best[0]
    streamed = [one for e in parts if (got := e["choices"][0].get("logprobs")) for one in got["content"]]
    assert streamed == content
    assert [one["top_logprobs"] for one in plain["logprobs"]["content"]] == [[]] * 6


REFUSED = [
    ({"content": b"{"}, 400, "the body is no JSON"),
    ({"json": {"prompt": "zebra"}}, 400, "cannot read 'zebra'"),
    ({"content": b"[1]"}, 400, "expected an object"),
    ({"content": b" " * 5000}, 413, "more than 4096 bytes"),
    ({"json": GREEDY | {"prompt": [1, 9999]}}, 400, "token id 9999"),
    ({"json": GREEDY | {"prompt": [1, -1]}}, 400, "token id -1 is outside the vocabulary"),
    ({"json": GREEDY | {"prompt": [1, 2**63]}}, 400, "token id 9223372036854775808 is outside the vocab"),
    ({"json": GREEDY | {"prompt": [[1], [2**70, 1]]}}, 400, "token id 1180591620717411303424 is outside"),
    ({"json": GREEDY | {"prompt": []}}, 400, "prompt is []"),
    ({"json": GREEDY | {"prompt": "\ud800"}}, 400, "prompt"),
    ({"json": GREEDY | {"max_tokens": 40}}, 400, "more than the 48 that this server takes"),
    ({"json": GREEDY | {"max_tokens": 100000}}, 400, "more than the 48 that this server takes"),
    ({"json": GREEDY | {"max_tokens": 0}}, 400, "max_tokens is 0"),
    ({"json": GREEDY | {"max_tokens": True}}, 400, "max_tokens is True"),
    ({"json": GREEDY | {"temperature": -1}}, 400, "temperature is -1"),
    ({"json": GREEDY | {"top_p": 0}}, 400, "top_p"),
    ({"json": GREEDY | {"n": 0}}, 400, "n is 0, expected a whole number from 1 to 128"),
    ({"json": GREEDY | {"n": 2, "best_of": 3}}, 400, "best_of is 3 and n is 2"),
    ({"json": GREEDY | {"n": 33}}, 400, "33 answers are asked at once, expected at most 32"),
    ({"json": GREEDY | {"model": "gpt"}}, 404, "model is 'gpt', expected 'small'"),
    ({"json": GREEDY | {"max_token": 3}}, 400, "max_token is no field that this server knows: did you mean"),
    ({"json": GREEDY | {"guided_json": {}}}, 400, "guided_json is no field that this server knows: leave"),
    ({"json": GREEDY | {"repetition_penalty": 1.2}}, 400, "repetition_penalty is 1.2, which this server"),
    ({"json": GREEDY | {"seed": 2**63}}, 400, "seed is 9223372036854775808, expected"),
    ({"json": GREEDY | {"top_p": 2}}, 400, "top_p is 2, expected a number from 0 to 1"),
    ({"json": GREEDY | {"temperature": 1e308}}, 400, "temperature is 1e+308, expected a number from 0 to 1e"),
    ({"json": GREEDY | {"stream_options": 5}}, 400, "stream_options is 5, expected an object"),
    ({"content": b"\xff\xfe{}"}, 400, "the body is no JSON ('utf-8' codec"),
    ({"json": GREEDY | {"stop": 0}}, 400, "stop is 0"),
    ({"json": GREEDY | {"stop": ""}}, 400, "stop is ''"),
    ({"json": GREEDY | {"logprobs": 21}}, 400, "logprobs is 21, expected at most 20"),
    ({"json": GREEDY | {"stop": [""]}}, 400, "stop is"),
    ({"json": GREEDY | {"stream": 1}}, 400, "stream is 1"),
]  # fmt: skip


def test_what_cannot_be_answered_is_refused_in_openais_form():
    with door(service(), started=False, most_bytes=4096) as client:
        for sent, status, said in REFUSED:
            if "json" in sent:
                sent = {"content": json.dumps(sent["json"]).encode()}
            got = client.post("/v1/completions", **sent)
            assert got.status_code == status and said in got.json()["error"]["message"], said
        for sent, status in (("/v1/completions", 405), ("/v1/embeddings", 404), ("/v1/models/gpt", 404)):
            got = client.get(sent)
            assert got.status_code == status and "expected" in got.json()["error"]["message"]


def test_keys_full_servers_small_pools_and_ended_ones_are_answered_so():
    one = service(limits=Limits(48, 1, 4), pages=4)
    short = GREEDY | {"prompt": [1, 2, 3]}
    with door(one, started=False, key="s3cret") as client:
        assert client.post("/v1/completions", json=GREEDY).status_code == 401
        assert client.get("/metrics", headers={"Authorization": "Bearer s3cre"}).status_code == 401
        client.headers["Authorization"] = "Bearer s3cret"
        got = client.post("/v1/completions", json=GREEDY)
        assert got.status_code == 400 and "the pool of 4 pages" in got.json()["error"]["message"]
        one.submit(Prompt([1, 2], 4), lambda _: None, lambda _: None)
        got = client.post("/v1/completions", json=short)
        assert got.status_code == 429 and got.headers["Retry-After"] == "1"
        with pytest.raises(Full):
            one.submit(Prompt([1], 1), lambda _: None, lambda _: None)
        one.source.close()
        one.jobs.clear()
        assert client.post("/v1/completions", json=short).status_code == 503
        with pytest.raises(Closed):
            one.submit(Prompt([1], 1), lambda _: None, lambda _: None)
        chat = client.post("/v1/chat/completions", json={"messages": [{"content": "x"}]})
        assert chat.status_code == 400 and "role and content" in chat.json()["error"]["message"]


def test_a_stop_text_ends_an_answer_and_frees_its_pages():
    text = alone()[1]
    stop = text.split()[3]
    one = service()
    with door(one) as client:
        for stream in (False, True):
            got = client.post("/v1/completions", json=GREEDY | {"stop": stop, "stream": stream})
            parts = events(got.text) if stream else [got.json()]
            said = "".join(e["choices"][0]["text"] for e in parts)
            assert said == " " + text[: text.index(stop)]
            assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    clean(one)


def test_what_may_begin_a_stop_text_is_held_back():
    class Spelled:
        """One letter for each id."""

        def decode(self, ids, skip_special_tokens=True):
            return "".join(map(chr, ids))

    def written(text, stops):
        one, found = AnswerText(None, stops), []
        one.decoding = kvjax_decoding(Spelled())
        for letter in text:
            if one.over:
                break
            found.append(one.add(ord(letter)))
        return found, one.rest(), one.over

    assert written("abcab", ["bd"]) == (["", "a", "b", "c", "a"], "b", False)
    assert written("abcde", ["cd", "xyz"])[0] == ["", "", "a", "b"]
    assert written("abcde", ["cd", "xyz"])[1:] == ("", True)


def kvjax_decoding(tokenizer):
    from kvjax.api.streamed_text import Decoding

    one = Decoding.__new__(Decoding)
    one.tokenizer, one.ids, one.shown, one.cleans = tokenizer, [], "", False
    return one


def test_a_policy_that_raises_costs_nobody_an_answer(monkeypatch):
    from kvjax.serve.loop import loop as loops

    legal, calls = loops.decide, []

    def decide(system, view):
        calls.append(1)
        if len(calls) % 2:
            raise ZeroDivisionError("no rows")
        return legal(system, view)

    monkeypatch.setattr(loops, "decide", decide)
    one = service()
    with door(one) as client:
        got = client.post("/v1/completions", json=GREEDY).json()
        assert got["choices"][0]["token_ids"] == alone()[0]
        assert "kvjax_policy_faults_total 0" not in client.get("/metrics").text
    clean(one)


def test_an_engine_that_fails_answers_with_an_error_and_a_new_one_goes_on(monkeypatch):
    run, failed = Engine._run, []

    def breaks(self, effect):
        if not failed:
            failed.append(1)
            raise RuntimeError("out of memory")
        return run(self, effect)

    monkeypatch.setattr(Engine, "_run", breaks)
    one = service()
    with door(one) as client:
        got = client.post("/v1/completions", json=GREEDY)
        assert got.status_code == 500 and "out of memory" in got.json()["error"]["message"]
        assert client.post("/v1/completions", json=GREEDY).json()["choices"][0]["token_ids"] == alone()[0]
        assert "kvjax_engine_faults_total 1" in client.get("/metrics").text
    clean(one)


@pytest.mark.rotating
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_pages(stream, monkeypatch):
    run = Engine._run

    def slow(self, effect):
        time.sleep(0.1)
        return run(self, effect._replace(steps=1))

    monkeypatch.setattr(Engine, "_run", slow)
    one = service()
    body = GREEDY | {"max_tokens": 30, "ignore_eos": True, "stream": stream}
    with door(one) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json=body) as got:
                next(got.iter_text())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body, timeout=1)
        until = time.monotonic() + 120
        while one.jobs and time.monotonic() < until:
            time.sleep(0.05)
        assert one.counts["requests_gone"] == 1 and one.counts["generated_tokens"] < 30
    clean(one)


def test_clients_that_go_away_during_an_iteration_leave_when_it_ends(monkeypatch):
    """An iteration takes seconds while its program compiles; nobody's pages are freed before it ends."""
    run, began, go = Engine._run, threading.Event(), threading.Event()

    def held(self, effect):
        if len(effect.write) == 3:
            began.set()
            assert go.wait(120)
        return run(self, effect._replace(steps=1))

    def said(client):
        rows = [line.split() for line in client.get("/metrics").text.splitlines() if line[0] != "#"]
        page = {name.removeprefix("kvjax_"): int(value) for name, value in rows}
        return page["requests_running"], page["requests_leaving"], page["pages_free"]

    def until(client, true):
        limit = time.monotonic() + 60
        while not true(said(client)) and time.monotonic() < limit:
            time.sleep(0.02)
        return said(client)

    monkeypatch.setattr(Engine, "_run", held)
    one = service()
    body = GREEDY | {"prompt": [1, 2, 3], "max_tokens": 40, "ignore_eos": True, "stream": True}
    with door(one) as client:
        with contextlib.ExitStack() as clients:
            for _ in range(3):
                clients.enter_context(client.stream("POST", "/v1/completions", json=body))
            assert began.wait(120)
        running, leaving, free = until(client, lambda page: page[1] == 3)
        assert (running, leaving) == (3, 3) and free < PAGES
        go.set()
        assert until(client, lambda page: page[0] == 0) == (0, 0, PAGES)
        assert one.counts["requests_gone"] == 3 and one.counts["generated_tokens"] < 60
    clean(one)


def test_what_drains_too_long_ends_with_an_error_and_frees_its_pages(monkeypatch):
    run = Engine._run

    def slow(self, effect):
        time.sleep(0.1)
        return run(self, effect._replace(steps=1))

    monkeypatch.setattr(Engine, "_run", slow)
    one, found = service(), []
    config = uvicorn.Config(app_of(one, "small"), port=0, log_config=None, log_level="warning", ws="none")
    server = Draining(config, one, 0.2)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1/completions"
    body = GREEDY | {"max_tokens": 30, "ignore_eos": True}
    whole = threading.Thread(target=lambda: found.append(httpx.post(url, json=body, timeout=300)))
    whole.start()
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=300) as got:
        lines = got.iter_lines()
        next(lines)
        while len(one.jobs) < 2:
            time.sleep(0.01)
        server.should_exit = True
        rest = [line.removeprefix("data: ") for line in lines if line]
    thread.join(300)
    whole.join(300)
    assert "the server is ending" in json.loads(rest[-2])["error"]["message"] and rest[-1] == "[DONE]"
    assert found[0].status_code == 503 and "the server is ending" in found[0].json()["error"]["message"]
    assert one.counts["generated_tokens"] < 58
    clean(one)


def test_closing_ends_those_under_way_and_takes_no_more():
    one, ended = service(), []
    for _ in range(3):
        one.submit(Prompt(ids(), NEW), lambda _: None, ended.append)
    one.start()
    assert one.close(300.0) and [job.written for job in ended] == [alone()[0]] * 3
    clean(one)


@pytest.mark.rotating
def test_five_hundred_streams_of_which_some_are_killed_leave_nothing():
    one, draw = service(limits=Limits(48, 600, 8), pages=60), random.Random(0)

    async def ask(client, i):
        prompt = [*ids()][: draw.randint(1, len(ids()))]
        request = client.post("/v1/completions", json=GREEDY | {"prompt": prompt, "stream": bool(i % 2)})
        if i % 5:
            return prompt, await request
        task = asyncio.ensure_future(request)
        await asyncio.sleep(draw.random() * 5)
        task.cancel()
        return None

    async def talk(url):
        limits = httpx.Limits(max_connections=600)
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(500)))

    with door(one) as client:
        answers = [found for found in asyncio.run(talk(client.base_url)) if found is not None]
    want = {}
    for prompt, got in answers:
        assert got.status_code == 200
        if got.headers["content-type"].startswith("text/event-stream"):
            continue
        if tuple(prompt) not in want:
            out = kvjax.generate(model(), [prompt], max_new_tokens=NEW)
            want[tuple(prompt)] = out.tokens[0, : out.lengths[0]].tolist()
        assert got.json()["choices"][0]["token_ids"] == want[tuple(prompt)]
    clean(one)


@pytest.mark.rotating
def test_the_command_listens_on_this_machine_and_ends_when_it_is_told_to():
    words_of = [sys.executable, "-m", "kvjax", "serve", "http", "--port", "0", "--context", "64"]
    process = subprocess.Popen(words_of, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "running on" in line:
            break
    url = line.split("running on ")[1].split()[0]
    assert url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(f"{url}/v1/models") as got:
        assert json.load(got)["data"][0]["id"] == "recall-tiny"
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGTERM) and time.monotonic() - began < 40


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "http", "--model", "nowhere", "--port", str(port)])
    assert f"nothing can listen at 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given, said",
    [
        (["--system", "vlm"], "did you mean vllm?"),
        (["--rows", "0"], "--rows"),
        (["--port", "65536"], "expected one of 0 to 65535"),
    ],
)
def test_options_of_the_command_are_checked_first(given, said, capsys):
    assert main(["serve", "http", *given]) == 2
    assert said in capsys.readouterr().err
