"""Ctrl-C: a command ends within seconds, wherever the signal finds it, and says how it goes on."""

import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from kvjax.base.interrupts import GRACE
from tests.sweep import sweep

# How long a busy machine may take over the seconds that are promised.
SLACK = 10.0
MAIN = """
import sys
import kvjax.commands.info as info, kvjax.base.interrupts
from kvjax.commands import main as cli
kvjax.base.interrupts.GRACE = {grace}
"""
END = "info.run = run; sys.argv = ['kvjax', 'info']; sys.exit(cli.main())"
COMPARE = "--samples 4 --methods snapkv h2o int8 --tasks get --length 128 --budgets 0.5"

# What an interrupt may meet: code that is no Python, a callback that swallows it or makes an error of it.
BUSY = {
    "asleep": "import time; time.sleep(600)",
    "compiled": "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)",
    "swallowed": """
import time
until = time.time() + 600
while time.time() < until:
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        pass""",
    "turned into an error": """
import time
try:
    time.sleep(600)
except KeyboardInterrupt:
    raise RuntimeError("INTERNAL: CpuCallback error")""",
    "in a destructor": """
import time
class Slow:
    def __del__(self):
        time.sleep(600)
Slow()
time.sleep(600)""",
}


def process_of(code, *words):
    """Start a Python process that Ctrl-C reaches, though these tests may run where a shell ignores it."""
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", heard + code, *words], stdout=pipe, stderr=pipe, text=True)


def started(script, grace=GRACE / 4):
    """Start a process that runs `kvjax info` with this body, and return once it is in it."""
    body = "\n".join(f"    {line}" for line in f"print('ready', flush=True)\n{script}".splitlines())
    code = f"{MAIN.format(grace=grace)}\ndef run(args):\n{body}\n{END}"
    process = process_of(code)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    return process


def interrupted(process, times=1):
    """(seconds until the process ended, what it said)."""
    start = time.monotonic()
    for i in range(times):
        time.sleep(0.3 * bool(i))
        process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    return time.monotonic() - start, said


@pytest.mark.parametrize("name", sweep(BUSY, "asleep", "turned into an error"))
def test_an_interrupt_ends_a_command_wherever_it_is(name):
    process = started(BUSY[name])
    seconds, said = interrupted(process)
    assert process.returncode == 130 and said == "interrupted\n"
    assert seconds < GRACE + SLACK


def test_a_second_interrupt_ends_it_at_once():
    process = started(BUSY["compiled"], grace=600)
    seconds, said = interrupted(process, times=2)
    assert process.returncode == 130 and said == "interrupted\n" and seconds < SLACK


PART = """
from kvjax.base.interrupts import ends_a_part
with ends_a_part() as came:
    {busy}
    assert came.wait(60)
print("on", flush=True)
import time
time.sleep(600)"""


@pytest.mark.rotating
@pytest.mark.parametrize("busy", ["pass", "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2**22)"])
def test_an_interrupt_of_a_part_ends_the_part_alone(busy):
    process = started(PART.format(busy=busy))
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "on\n"
    # The thread does not wait for the whole command to end.
    time.sleep(GRACE / 4 + 0.5)
    assert process.poll() is None
    _, said = interrupted(process)
    assert process.returncode == 130 and said == "interrupted\n"


@pytest.mark.rotating
def test_a_second_interrupt_of_a_part_ends_the_command():
    process = started(PART.format(busy=BUSY["compiled"]))
    seconds, said = interrupted(process, times=2)
    assert process.returncode == 130 and said == "interrupted\n" and seconds < GRACE + SLACK


@pytest.mark.rotating
@pytest.mark.parametrize(
    "moment", ["import", *(pytest.param(x, marks=pytest.mark.rotating) for x in ("opened", "first unit"))]
)
def test_an_interrupted_comparison_ends_and_says_how_it_goes_on(moment, tmp_path):
    folder = tmp_path / "its results"
    words = ["compare", *COMPARE.split(), "--out", str(folder)]
    process = process_of("import runpy; runpy.run_module('kvjax', run_name='__main__')", *words)
    units, until = folder / "units.jsonl", time.monotonic() + 120
    if moment == "import":
        time.sleep(1.5)
    while time.monotonic() < until and process.poll() is None and moment != "import":
        if units.exists() and (moment == "opened" or units.stat().st_size):
            break
        time.sleep(0.02)
    time.sleep(0.5)
    seconds, said = interrupted(process)
    assert process.returncode == 130 and "Traceback" not in said
    assert seconds < GRACE + SLACK
    lines = units.read_bytes().splitlines() if units.exists() else []
    # How far the first seconds bring it depends on the machine: units may be done at any moment.
    if moment != "import" or said != "interrupted\n":
        line = re.search(r"interrupted; what was done is in .*\. Go on with: kvjax (.*)\n", said)
        assert line and shlex.split(line[1]) == [*words, "--resume"]
    assert lines or moment != "first unit"
