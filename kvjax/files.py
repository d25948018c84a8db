"""Writing result files so that a reader, or a killed run, never meets half of one."""

import os
from pathlib import Path


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Replaces the file at `path` by `data` in one step: readers see the old content or all of the new.

    The bytes go to a temporary name in the same folder and are renamed once they are on disk; if anything
    raises, the old file stays as it was and the temporary one is removed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomic(Path(folder) / "a.txt", b"new")
    ...     (Path(folder) / "a.txt").read_bytes()
    b'new'
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
