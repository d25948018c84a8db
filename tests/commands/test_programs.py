"""Compiled programs on disk: where, when, how many; and that a second run takes them from there."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from kvjax.commands import programs
from kvjax.commands.main import main
from kvjax.eval.compare import Comparison

FOLDER = ("kvjax", "programs")
# A command without the parts that take long: it keeps programs, as commands do, and compiles one.
COMPILE = """
import sys
from kvjax.commands import programs
programs.MOST_BYTES = int(sys.argv[1])
import jax, jax.numpy as jnp
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("/cache_hits")))
programs.keep_programs()
for scale in sys.argv[2:]:
    jax.jit(lambda x: jnp.sin(x * float(scale)))(jnp.ones(8)).block_until_ready()
print(sum(hits), programs.kept())
"""


def run(home, *words, most=2**30, **environment):
    """Return what the small command prints, and the programs in the user's cache folder afterwards."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_") or k == "JAX_PLATFORMS"}
    env |= {"XDG_CACHE_HOME": str(home)} | environment
    command = [sys.executable, "-c", COMPILE, str(most), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.strip(), sorted(p.name for p in home.joinpath(*FOLDER).glob("*-cache"))


@pytest.mark.rotating
def test_what_a_command_compiled_the_next_one_takes_from_disk(tmp_path):
    said, first = run(tmp_path, "1.5")
    assert said.startswith("0 ") and f"{tmp_path.joinpath(*FOLDER)}: {len(first)} files, " in said
    assert len(first) >= 1
    # One of them as a killed command leaves it: it is compiled anew, and others are stored.
    tmp_path.joinpath(*FOLDER, first[0].removesuffix("-cache") + "-atime").unlink()
    said, second = run(tmp_path, "1.5", "2.5")
    assert said.startswith(f"{len(first) - 1} ") and set(first) < set(second)


@pytest.mark.rotating
def test_there_are_never_more_bytes_than_allowed(tmp_path):
    _, files = run(tmp_path, "1.5", most=2**30)
    size = sum(p.stat().st_size for p in tmp_path.joinpath(*FOLDER).glob("*-cache"))
    _, after = run(tmp_path, *map(str, range(1, 9)), most=2 * size)
    assert sum(p.stat().st_size for p in tmp_path.joinpath(*FOLDER).glob("*-cache")) <= 2 * size
    assert files and after and set(files) != set(after)


@pytest.mark.rotating
def test_a_folder_of_the_users_is_taken_and_nothing_is_kept_where_that_is_turned_off(tmp_path):
    own = tmp_path / "own"
    said, mine = run(tmp_path, "1.5", JAX_COMPILATION_CACHE_DIR=str(own))
    assert (
        mine == [] and f"{tmp_path / 'own'}: " in said and len(list((tmp_path / "own").glob("*-cache"))) >= 1
    )
    said, mine = run(tmp_path, "1.5", JAX_ENABLE_COMPILATION_CACHE="false")
    assert mine == [] and "none are kept" in said


def test_a_folder_that_cannot_be_made_stops_no_command(tmp_path):
    (tmp_path / "kvjax").write_text("a file")
    assert run(tmp_path, "1.5") == (f"0 {tmp_path.joinpath(*FOLDER)}: 0 files, 0 B", [])


@pytest.fixture
def keeping_none():
    """JAX as it is with $JAX_ENABLE_COMPILATION_CACHE=false."""
    before = jax.config.jax_enable_compilation_cache, jax.config.jax_compilation_cache_dir
    for name, value in (("enable_compilation_cache", False), ("compilation_cache_dir", None)):
        jax.config.update(f"jax_{name}", value)
    yield
    for name, value in zip(("enable_compilation_cache", "compilation_cache_dir"), before, strict=True):
        jax.config.update(f"jax_{name}", value)


def test_nothing_is_kept_where_that_is_turned_off_and_info_says_so(keeping_none, capsys):
    assert programs.folder() is None
    programs.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None
    assert main(["info"]) == 0
    assert "none are kept" in capsys.readouterr().out


def test_info_says_where_the_programs_of_tests_are(pytestconfig, capsys):
    assert main(["info"]) == 0
    assert str(pytestconfig.cache.mkdir("programs")) in capsys.readouterr().out.replace("\n", "")


def test_commands_that_run_a_model_keep_their_programs(monkeypatch):
    called = []
    monkeypatch.setattr("kvjax.commands.generate.keep_programs", lambda: called.append("generate"))
    monkeypatch.setattr("kvjax.commands.generate_stream.stream", lambda *args, **options: None)
    assert main(["generate", "--tokens", "1"]) == 0
    monkeypatch.setattr("kvjax.commands.compare.keep_programs", lambda: called.append("compare"))
    monkeypatch.setattr("kvjax.eval.compare.compare", lambda **options: Comparison([], [], {}, {}, Path()))
    assert main(["compare"]) == 0
    assert called == ["generate", "compare"]
