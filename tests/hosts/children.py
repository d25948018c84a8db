"""What each of several processes does in the tests: `python -m tests.hosts.children NAME FOLDER [MORE]`."""

import json
import sys
from pathlib import Path

import numpy as np

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [5, 6, 7, 8, 9, 10, 11], [7, 8, 9, 4, 4, 4, 4, 4, 4], [1, 1, 3, 3, 3, 3]]
TOKENS = [1, 2, 3, 4]
# Of dense lists, and of pages in a pool.
METHODS = ("snapkv:budget=0.6,window=1", "adakv:budget=0.6,window=1")


def conversation(model, method, folder: Path | None = None, onto=None) -> dict[str, np.ndarray]:
    """Logits of a prompt, of steps and of steps over the saved cache; folder: where it is saved.

    onto: the model that the saved cache is loaded for.
    """
    import kvjax
    from kvjax.methods.parse import parse_method

    logits, cache = kvjax.prefill(model, PROMPTS, method=method and parse_method(method)[1](None))
    found = {"prompt": kvjax.fetch(logits)}
    logits, cache = kvjax.step(model, cache, TOKENS)
    found["step"] = kvjax.fetch(logits)
    for i, layer in enumerate(kvjax.kept_positions(cache)):
        found[f"kept{i}"] = (layer[..., None] == np.arange(16)).any(2)
    if folder is not None:
        kvjax.save_cache(folder / "a.cache", cache)
        model = onto or model
        cache = kvjax.load_cache(folder / "a.cache", model)
    logits, cache = kvjax.step(model, cache, TOKENS)
    return found | {"again": kvjax.fetch(logits)}


def load_and_answer(folder: Path) -> None:
    """Load a sharded checkpoint, counting bytes, onto two meshes; a saved cache goes to the second."""
    import kvjax
    from kvjax.models.files import Stored

    count, read = [0], Stored.read

    def counted(self, *index):
        piece = read(self, *index)
        count[0] += piece.nbytes
        return piece

    Stored.read = counted
    model = kvjax.load(folder / "model", mesh="model=4,data=2", rules="tensor")
    held = sum(s.data.nbytes for x in model.params.values() if not isinstance(x, tuple) for s in shards(x))
    held += sum(s.data.nbytes for group in model.params["layers"] for x in group.values() for s in shards(x))
    found = {"read": count[0], "held": held, "fingerprint": model.fingerprint}
    other = kvjax.load(folder / "model", mesh="data=4,model=2", rules="tensor")
    (folder / f"said{me()}.json").write_text(json.dumps(found))
    for i, method in enumerate(METHODS):
        np.savez(folder / f"{i}-{me()}.npz", **conversation(model, method, folder / f"cache{i}", other))
    out = kvjax.generate(model, PROMPTS, max_new_tokens=5)
    np.savez(folder / f"written-{me()}.npz", tokens=np.asarray(out.tokens))


def shards(x):
    """Return what this process holds of an array, each piece once."""
    return {str(s.index): s for s in x.addressable_shards}.values()


def train(folder: Path, mesh: str, rules: str, stop: str) -> None:
    """Training by the settings of the test, which stops before a step, as a user would stop it."""
    from kvjax.hosts.messages import by_first
    from kvjax.train import loop as loops
    from tests.hosts.test_two_processes import settings

    parts, seen = loops.in_parts, [0]

    def counted(*args):
        seen[0] += 1
        if seen[0] > int(stop):
            raise KeyboardInterrupt
        return parts(*args)

    loops.in_parts = counted
    goes_on = by_first(lambda: (folder / "run" / "run.json").exists())
    try:
        loops.train(settings(folder, mesh, rules), folder / "run", resume=goes_on)
    except KeyboardInterrupt:
        pass


def step_without_end(folder: Path) -> None:
    import kvjax

    model = kvjax.load("recall-tiny", mesh="data=2,model=4", rules="tensor")
    _, cache = kvjax.prefill(model, PROMPTS, room=128)
    while True:
        _, cache = kvjax.step(model, cache, TOKENS)
        cache = kvjax.rollback(cache, 1)
        (folder / f"steps{me()}").touch()


def wait_without_end(folder: Path) -> None:
    import time

    (folder / f"steps{me()}").touch()
    time.sleep(600)


def me() -> int:
    import jax

    return jax.process_index()


if __name__ == "__main__":
    import kvjax

    kvjax.start_hosts(wait_seconds=60)
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
