"""Atomic writes of result files: neither a reader nor a killed run sees half of a file."""

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from kvjax.base.errors import InputError


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary name in the same folder that is renamed to `path` once its content is on disk.

    No two calls get the same name. If anything raises, the old file is kept and the temporary one removed. Of
    a link, the file that it leads to is replaced. InputError for a device, a pipe or a socket.
    """
    check_plain(path)
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace the file at `path` by `data` in one step: readers see the old content or all of the new.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomic(Path(folder) / "a.txt", b"new")
    ...     (Path(folder) / "a.txt").read_bytes()
    b'new'
    """
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def disk_says(error: Exception) -> str | None:
    """Return the disk's reason, if it caused the error, which libraries may wrap in their own; else None.

    >>> disk_says(ValueError("RESOURCE_EXHAUSTED: failed: No space left on device [os_error_code='28']"))
    'No space left on device'
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    code = re.search(r"os_error_code='(\d+)|os error (\d+)", str(error))
    return None if code is None else os.strerror(int(code[1] or code[2]))


def in_short(error: Exception) -> str:
    r"""Return the first line of an error's message, cut to fit into a sentence.

    >>> in_short(ValueError("no array\nof that name"))
    'no array'
    """
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return said.partition(". See full TensorStore")[0].partition(" [tensorstore_spec")[0][:160]


def check_plain(path: str | os.PathLike[str]) -> None:
    """Raise InputError if `path` is a device, a pipe or a socket: a file would take its place in the folder.

    >>> check_plain("new.json")
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise InputError(f"{path} is a device or a pipe, expected the path of a file: choose another path")


def check_file(path: str | os.PathLike[str] | None) -> None:
    """Raise InputError if no file can be written to a path given by a user; called before the work for it.

    >>> check_file("new.json")
    """
    if path is None:
        return
    check_plain(path)
    folder = Path(path).absolute().parent
    if Path(path).is_dir():
        raise InputError(f"{path} is a folder, expected the path of a file")
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder} for {path}: make it first, or choose another path")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{path} cannot be written (Permission denied): choose another path")


def write_named(path: str | os.PathLike[str], data: bytes) -> None:
    """`write_atomic` to a path given by a user. Raises InputError if the disk refuses."""
    try:
        write_atomic(path, data)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): choose another path") from error


def check_unwritten(path: str | os.PathLike[str], overwrite: bool = False) -> None:
    """Raise InputError if `path` exists and must not be replaced, or cannot be written."""
    check_plain(path)
    if not overwrite and os.path.lexists(path):
        raise InputError(f"{path} exists and is not replaced unasked: give another path, or add --overwrite")
    folder = next(one for one in Path(path).absolute().parents if one.exists())
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{path} cannot be written: give the path of a file in a folder of yours")


def check_kind(path: str | os.PathLike[str], kind: str) -> None:
    """Raise InputError if `path` exists and is not a safetensors file of this kind."""
    check_plain(path)
    if not os.path.lexists(path) or os.path.isdir(path) or os.path.getsize(path) == 0:
        return
    try:
        with safe_open(path, framework="np") as file:
            found = (file.metadata() or {}).get("kind")
    except (SafetensorError, OSError):
        found = None
    if found != kind:
        raise InputError(f"{path} holds something else than {kind}, which would be lost: choose another path")


def hold(folder: str | os.PathLike[str]) -> FileLock:
    """Lock a folder for one run, until the lock is released or the process ends.

    The folder is created if it does not exist. Raises InputError if another run holds it or it cannot be
    created.
    """
    lock = FileLock(Path(folder) / ".lock")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(NotImplementedError):  # a file system without locks
            lock.acquire(timeout=0)
    except Timeout as error:
        raise InputError(
            f"{folder} is in use by a run that is alive: wait until it ends, or choose another folder"
        ) from error
    except OSError as error:
        raise InputError(
            f"{folder} cannot be made ({error.strerror}): choose a folder that can be written"
        ) from error
    return lock
