"""The door of `kvjax serve http` as clients use it: `openai`, and lm-evaluation-harness over HTTP."""

import contextlib
import threading
import time

import numpy as np
import pytest

import kvjax
from kvjax.serve import system
from kvjax.serve.http.app import app_of
from kvjax.serve.http.service import Limits, Service
from tests.parity.test_lm_eval import PROMPTS, TEXT, folder, theirs  # noqa: F401  # fixtures
from tests.parity.test_lm_eval import asked as instances

openai = pytest.importorskip("openai", reason="needs the extra `parity`")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra `serve`")
pytest.importorskip("tenacity", reason="needs the extra `parity`")

# The harness imports packages that warn on Python 3.11.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
NAME, KEY, NEW = "tiny", "s3cret", 8


@pytest.fixture(scope="module")
def model(folder):  # noqa: F811
    return kvjax.load(folder)


@pytest.fixture(scope="module")
def url(model):
    """Yield the address of a server of this process, which drains at the end."""
    service = Service(model, system("sarathi(tokens=32,page=8)"), 64, Limits(96, 32, 4))
    app = app_of(service, NAME, key=KEY)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    server.should_exit = True
    thread.join(60)


@pytest.fixture
def client(url):
    with contextlib.closing(openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)) as found:
        yield found


@pytest.fixture
def harness(url, folder, monkeypatch):  # noqa: F811
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    return LocalCompletionsAPI(
        base_url=f"{url}/completions", model=NAME, tokenizer=str(folder), tokenizer_backend="huggingface",
        batch_size=2, max_length=96,
    )  # fmt: skip


def alone(model, ids, count=NEW):
    return kvjax.generate(model, [ids], max_new_tokens=count)


def test_the_openai_client_gets_what_generate_writes_in_whole_and_in_pieces(client, model):
    ids = model.tokenizer.encode(TEXT[:60]).ids
    want = alone(model, ids)
    how = {"model": NAME, "max_tokens": NEW, "temperature": 0}
    got = client.completions.create(prompt=TEXT[:60], logprobs=3, **how)
    assert got.choices[0].text == want.texts[0] and got.usage.prompt_tokens == len(ids)
    said = got.choices[0].logprobs
    np.testing.assert_allclose(said.token_logprobs, want.logprobs[0], atol=1e-4)
    assert [max(top.values()) for top in said.top_logprobs] == said.token_logprobs
    assert min(len(top) for top in said.top_logprobs) >= 2  # two tokens may have one text
    pieces = client.completions.create(prompt=TEXT[:60], stream=True, **how)
    assert "".join(piece.choices[0].text for piece in pieces) == want.texts[0]

    turns = [{"role": "user", "content": "when did the river rise?"}]
    rendered = "<s>[user] when did the river rise?\n[assistant] "
    ids = model.tokenizer.encode(rendered, add_special_tokens=False).ids
    chat = client.chat.completions.create(messages=turns, logprobs=True, top_logprobs=2, **how)
    assert chat.choices[0].message.content == alone(model, ids).texts[0]
    assert chat.choices[0].finish_reason == "length"
    assert [len(one.top_logprobs) for one in chat.choices[0].logprobs.content] == [2] * NEW
    stream = client.chat.completions.create(messages=turns, stream=True, **how)
    parts = [part.choices[0].delta.content or "" for part in stream]
    assert "".join(parts) == chat.choices[0].message.content and len(parts) > 2
    assert [one.id for one in client.models.list()] == [NAME] and client.models.retrieve(NAME).id == NAME
    several = client.completions.create(prompt=TEXT[:60], n=3, **how)
    assert [choice.text for choice in several.choices] == want.texts * 3


def test_the_openai_client_raises_its_own_errors(client, url):
    with pytest.raises(openai.BadRequestError, match="n is 0"):
        client.completions.create(model=NAME, prompt="The", n=0)
    with pytest.raises(openai.NotFoundError, match="expected 'tiny'"):
        client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "a"}])
    with (
        contextlib.closing(openai.OpenAI(base_url=url, api_key="wrong", max_retries=0)) as stranger,
        pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"),
    ):
        stranger.models.list()


def said_by_itself(harness):
    """Return a context and the token that the model says after it, which is read as it is written."""
    contexts = [TEXT[:n] for n in range(20, 60)]
    how = {"until": [], "max_gen_toks": 1}
    said = harness.generate_until(instances("generate_until", *((one, how) for one in contexts)))
    for context, end in zip(contexts, said, strict=True):
        if end and harness._encode_pair(context, end)[0] == harness.tok_encode(context):
            if len(harness._encode_pair(context, end)[1]) == 1 and "\ufffd" not in end:
                return context, end
    raise AssertionError("the model says nothing that its tokenizer reads back")


def test_the_harness_scores_over_http_what_torch_scores(harness, theirs):  # noqa: F811
    pairs = [(TEXT[:60], " the bridge"), (TEXT[:60], " in"), (TEXT[:31], " was closed."), ("The", " river")]
    encoded = [harness._encode_pair(*pair) for pair in pairs]
    pairs.append(said_by_itself(harness))
    encoded.append(harness._encode_pair(*pairs[-1]))
    found = harness.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    rows = [(pair, *both) for pair, both in zip(pairs, encoded, strict=True)]
    want = theirs._loglikelihood_tokens(rows, disable_tqdm=True)
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in want], rtol=0, atol=1e-3)
    assert [flag for _, flag in found] == [flag for _, flag in want]
    assert found[-1][1] and not all(flag for _, flag in found)


def test_the_harness_writes_over_http_what_generate_writes(harness, model):
    prompts = [one for one in PROMPTS if "repetition_penalty" not in one.args[1]][:3]
    found = harness.generate_until(prompts, disable_tqdm=True)
    for text, one in zip(found, prompts, strict=True):
        context, how = one.args
        want = alone(model, harness.tok_encode(context), how["max_gen_toks"]).texts[0]
        for stop in how.get("until", []):
            want = want.split(stop)[0]
        assert text == want
    assert len(set(found)) > 1
