"""Checkpoints of random bfloat16 weights, written a tensor at a time, so that writing needs little memory.

`python -m tests.models.random_checkpoint FOLDER` writes Llama 3.1 8B at its published size: 16 GB in 4 files.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np

from kvjax.models.hf_config import config_from_hf
from kvjax.models.hf_tensors import hf_name, tensors
from kvjax.plan.named import rows


def written(folder: Path, sizes: dict, most: float) -> int:
    """Write a model of that config.json into files of at most `most` bytes; return those of the largest."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(sizes))
    config = config_from_hf(sizes)
    shapes = {hf_name(name, config): tensor.shape for name, tensor in tensors(config).items()}
    files: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if files[-1] and nbytes(files[-1]) + nbytes({name: shape}) > most:
            files.append({})
        files[-1][name] = shape
    rng, index = np.random.default_rng(0), {}
    for i, part in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        _write(folder / file, part, rng)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return max(map(nbytes, files))


def nbytes(shapes: dict[str, tuple[int, ...]]) -> int:
    """Bytes of arrays of these shapes in bfloat16."""
    return 2 * sum(map(math.prod, shapes.values()))


def _write(path: Path, shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> None:
    """Write a safetensors file: the length of its header, the header, the arrays."""
    header, start = {}, 0
    for name, shape in shapes.items():
        end = start + nbytes({name: shape})
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            left = math.prod(shape)
            while left:
                count = min(left, 2**24)
                # Any sign and mantissa, and an exponent of -7: between 2**-7 and 2**-6.
                bits = rng.integers(0, 2**16, count, np.uint16) & 0x807F | 0x3C00
                file.write(bits.tobytes())
                left -= count


if __name__ == "__main__":
    print(written(Path(sys.argv[1]), rows()["llama-3.1-8b"]["config"], 5e9))
