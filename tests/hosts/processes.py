"""Two processes of four CPU devices each, on one machine: started at a free port, ended by their ids."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 240


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Processes:
    """The same words to Python as several processes; each one's output is kept in files under `folder`.

    devices: of each process. flags: whether they are told where they meet by flags, not by the environment.
    """

    def __init__(self, folder: Path, words: list[str], count: int = 2, devices: int = 4, flags: bool = False):
        env = dict(os.environ, JAX_PLATFORMS="cpu", COLUMNS="200")
        more = f"--xla_force_host_platform_device_count={devices}"
        env["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {more}"
        address = f"127.0.0.1:{free_port()}"
        self.folder, self.running = folder, []
        folder.mkdir(exist_ok=True)
        for i in range(count):
            mine = {"KVJAX_HOSTS": address, "KVJAX_PROCESSES": str(count), "KVJAX_PROCESS": str(i)}
            given = ["--hosts", address, "--processes", str(count), "--process", str(i)] if flags else []
            with open(folder / f"out{i}", "w") as out, open(folder / f"err{i}", "w") as err:
                command = [sys.executable, *words, *given]
                one = env if flags else env | mine
                self.running.append(subprocess.Popen(command, env=one, cwd=ROOT, stdout=out, stderr=err))

    def out(self, i: int) -> str:
        return (self.folder / f"out{i}").read_text()

    def err(self, i: int) -> str:
        return (self.folder / f"err{i}").read_text()

    def codes(self, limit: float = LIMIT) -> list[int]:
        """Wait for the exit codes of all; those that have not ended in time are killed."""
        end = time.monotonic() + limit
        try:
            return [one.wait(max(0.1, end - time.monotonic())) for one in self.running]
        except subprocess.TimeoutExpired as error:
            said = "\n".join(self.err(i)[-2000:] for i in range(len(self.running)))
            raise AssertionError(f"still running after {limit} s: {said}") from error
        finally:
            for one in self.running:
                one.kill()

    def until(self, ready, limit: float = LIMIT) -> None:
        """Wait for what must come before the test goes on."""
        end = time.monotonic() + limit
        while not ready():
            ended = [one.poll() for one in self.running]
            assert time.monotonic() < end and ended == [None] * len(ended), (ended, self.err(0), self.err(1))
            time.sleep(0.1)


def well(processes: Processes) -> Processes:
    """Wait for the processes, and check that all end without an error."""
    codes = processes.codes()
    assert codes == [0] * len(codes), "\n".join(processes.err(i) for i in range(len(codes)))
    return processes
