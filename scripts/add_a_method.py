"""Adds a method to a fresh clone, as CONTRIBUTING.md describes, and runs lint and tests there.

    python scripts/add_a_method.py selection              # its own row, then the whole plain suite
    python scripts/add_a_method.py codec tests/methods    # what is named after the kind goes to pytest
    python scripts/add_a_method.py codec -k nf4 -m "not slow" tests

A selection method is a function and a row in the tests' table. A method with a codec of its own is a file,
with the codec and the function, and a row. Two files change for either, and all checks must pass. HEAD is
cloned to a temporary folder with its own environment, which is removed at the end.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Edit(NamedTuple):
    """Text that goes into a file before a text that stands there, or at the end; a new file is made."""

    file: str
    before: str
    text: str


SELECTION = (
    Edit(
        "kvjax/methods/selection_static_keys.py",
        "",
        '''
@paper(
    "Attention Score is not All You Need for Token Importance Indicator in KV Cache Reduction: "
    "Value Also Matters",
    arxiv="2406.12335",
    family="selection-static",
    exact="deviates",
)
def valuenorm(budget: Amount) -> Method:
    """Value norms (Guo et al., 2024, arXiv:2406.12335): keeps the slots of the largest ||v_j||_1.

    Deviation: the paper multiplies them by attention.
    """
    return Method(Keep(ValueNorm(), Budget(budget), Uniform()))
''',
    ),
    Edit(
        "kvjax/methods/selection_static_keys.py",
        "from kvjax.keep.scores.score",
        "from kvjax.keep.scores.score import ValueNorm\n",
    ),
    Edit(
        "tests/methods/table_selection.py",
        '    row(\n        "sepllm"',
        """    row(
        "valuenorm", dense(half),
        kept=each_layer(lambda prompt, layer: np.abs(prompt.v[layer]).sum(-1)),
    ),
""",
    ),
)

CODEC = (
    Edit(
        "kvjax/methods/quant_normal_float.py",
        "",
        '''"""Quantisation to quantiles of the normal distribution."""

from __future__ import annotations

import dataclasses
from statistics import NormalDist

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.base.checks import is_whole
from kvjax.grammar import Method, Store
from kvjax.methods.papers import paper
from kvjax.methods.shared import Group
from kvjax.ops.base.bit_packing import pack, unpack
from kvjax.state.codes import Codec


def _levels() -> list[float]:
    """Return 16 ascending levels from -1 to 1: 7 quantiles of N(0, 1) below 0, and 9 from 0 on."""
    most = (1 - 1 / 32 + 1 - 1 / 30) / 2
    above = [NormalDist().inv_cdf(0.5 + (most - 0.5) * i / 8) for i in range(9)]
    below = [-NormalDist().inv_cdf(0.5 + (most - 0.5) * i / 7) for i in range(7, 0, -1)]
    return [level / above[-1] for level in below + above]


@dataclasses.dataclass(frozen=True)
class NormalFloat(Codec):
    """x ~ the nearest of 16 quantiles of the normal distribution, times the largest |x| of `block` channels.

    Stored are words of 4 bits a number [*b, S, H / 8] and "scale" float32 [*b, S, H / block]. Raises
    ValueError for a block that is no positive whole number or does not divide the channels.

    >>> codec = NormalFloat(8)
    >>> codec.decode(codec.encode(jnp.array([[2.0, -2.0] + [0.0] * 6])), 8, jnp.float32)[0, :3].tolist()
    [2.0, -2.0, 0.0]
    """

    block: int

    granule = 1

    def __post_init__(self):
        if not is_whole(self.block):
            raise ValueError(f"block must be a number of channels, at least 1, got {self.block!r}")

    @property
    def says(self) -> str:
        return f"4 bits a number, and a float32 scale for {self.block} channels."

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        if x.shape[-1] % self.block:
            raise ValueError(f"block={self.block} must divide the {x.shape[-1]} channels of a head")
        rows = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, self.block)
        scale = jnp.abs(rows).max(-1)
        unit = rows / jnp.where(scale == 0, 1.0, scale)[..., None]
        levels = jnp.array(_levels(), jnp.float32)
        codes = jnp.searchsorted((levels[1:] + levels[:-1]) / 2, unit).reshape(x.shape)
        return {"words": pack(codes.astype(jnp.uint32), 4), "scale": scale}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        unit = jnp.array(_levels(), jnp.float32)[unpack(data["words"], 4, width)]
        rows = unit.reshape(*unit.shape[:-1], -1, self.block) * data["scale"][..., None]
        return rows.reshape(unit.shape).astype(dtype)


@paper(
    "QLoRA: Efficient Finetuning of Quantized LLMs",
    arxiv="2305.14314",
    family="quant",
    exact="deviates",
)
def nf4(*, block: Group = 64) -> Method:
    """NormalFloat (Dettmers et al., 2023, arXiv:2305.14314), section 3: 4-bit quantiles of N(0, 1).

    A block lies in one head and token. Deviation: the paper encodes weights, and encodes their scales again.
    """
    return Method(store=Store(NormalFloat(block), NormalFloat(block)))
''',
    ),
    Edit(
        "tests/methods/table_stores.py",
        "STORES = [\n",
        """def nf4(block):
    above = [0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]  # arXiv:2305.14314, appendix E
    levels = np.array([-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, *above])

    def code(x):
        rows = x.reshape(-1, block)
        most = np.abs(rows).max(-1, keepdims=True)
        return (levels[np.abs(rows[..., None] / most[..., None] - levels).argmin(-1)] * most).reshape(x.shape)

    return code


""",
    ),
    Edit(
        "tests/methods/table_stores.py",
        '    alike("four-over-six"',
        '    alike("nf4", lambda s: s.h // 2 + s.h // 8 * 4, nf4(8), block=8),\n',
    ),
)
KINDS = {"selection": ("valuenorm", SELECTION), "codec": ("nf4", CODEC)}


def add(clone: Path, edits: tuple[Edit, ...]) -> list[str]:
    """Write a method into a clone; return the files that changed."""
    for name, before, text in edits:
        file = clone / name
        old = file.read_text() if file.exists() else ""
        head, mark, tail = old.partition(before) if before else (old and old.rstrip() + "\n\n", "", "")
        assert mark == before, f"{name} has no {before!r}: say in its Edit where the text goes"
        file.write_text(head + text + mark + tail)
    git(clone, "add", "--all")
    return git(clone, "diff", "--cached", "--name-only").split()


def git(clone: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=clone, check=True, capture_output=True, text=True).stdout


def main(words: list[str]) -> int:
    if not words or words[0] not in KINDS:
        print(f"usage: python scripts/add_a_method.py {{{'|'.join(KINDS)}}} [arguments of pytest]")
        return 2
    id, edits = KINDS[words[0]]
    with tempfile.TemporaryDirectory() as folder:
        clone, python = Path(folder) / "clone", Path(folder) / "env" / "bin" / "python"
        git(ROOT, "clone", "--quiet", str(ROOT), str(clone))
        changed = add(clone, edits)
        venv.create(Path(folder) / "env", with_pip=True)
        commands = (
            ["pip", "install", "--quiet", "-e", ".[dev]"],
            ["ruff", "check", "--fix", "--quiet", *changed],
            ["ruff", "format", "--check", *changed],
            # A new row takes turns with the others, so it is asked for by name.
            ["pytest", "-q", "-k", id, "-m", "not slow and not tpu", "tests/methods"],
            ["pytest", "-q", *words[1:]],
        )
        for command in commands:
            print("$", *command, flush=True)
            if code := subprocess.run([python, "-m", *command], cwd=clone).returncode:
                return code
        print(git(clone, "diff", "--cached", "--stat"), end="")
        return int(len(changed) != 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
