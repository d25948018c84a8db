"""Writing result files so that a reader, or a killed run, never meets half of one."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary name in the same folder that becomes `path` once its content is on disk.

    No two calls get the same name. If anything raises, an old file stays as it was and the temporary one is
    removed.
    """
    target = Path(path)
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
    """Replaces the file at `path` by `data` in one step: readers see the old content or all of the new.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomic(Path(folder) / "a.txt", b"new")
    ...     (Path(folder) / "a.txt").read_bytes()
    b'new'
    """
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)
