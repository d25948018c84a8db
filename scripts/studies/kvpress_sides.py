"""One prompt in transformers + kvpress, and in kvjax: kept tokens, the answer, the seconds."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts.studies.presses import Press

REPEAT = "\n\nRepeat the previous context exactly."


class Prompt(NamedTuple):
    """Token ids of a context, which is compressed, and of the question after it, which is not."""

    context: list[int]
    question: list[int]


class Found(NamedTuple):
    """One library's results on a prompt; seconds are processor time.

    kept: [L, K, T]. scores: the press's own [L, K, T], if one number per slot decides. answer: None if the
    library fails to generate one, for the reason in `error`. gaps: the difference of the two largest logits
    at every generated token. compile_s: seconds of compilation, which the other times exclude.
    """

    kept: np.ndarray
    read_s: float
    answer: list[int] | None
    answer_s: float
    scores: np.ndarray | None = None
    gaps: tuple[float, ...] = ()
    compile_s: float = 0.0
    error: str = ""


class Theirs:
    """transformers + kvpress on a folder that `save_hf` wrote."""

    def __init__(self, folder: Path, dtype: str = "float32"):
        import kvpress
        import torch
        import transformers
        from transformers import AutoModelForCausalLM, AutoTokenizer

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        logging.getLogger("kvpress").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        # A chat template would add tokens that presses which repeat a context would not repeat.
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        self.kvpress = kvpress
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.encode = AutoTokenizer.from_pretrained(folder).encode

    def repeat_prefix(self) -> tuple[int, ...]:
        """Return what a press reads before it repeats a context: the instruction, and the end of the turn."""
        return tuple(i for text in (REPEAT, "\n") for i in self.encode(text, add_special_tokens=False))

    def run(self, press: Press | None, prompt: Prompt, removed: float, new: int) -> Found:
        import torch
        from transformers import DynamicCache

        made = None if press is None else press.theirs(self.kvpress, removed)
        record = Record(made)
        self.model.set_attn_implementation("eager" if press and press.eager else "sdpa")
        for layer in self.model.model.layers:
            layer.self_attn.masked_key_indices = None
        cache = DynamicCache()
        start = time.process_time()
        with torch.no_grad(), contextlib.nullcontext() if made is None else made(self.model):
            self.model.model(input_ids=torch.tensor([prompt.context]), past_key_values=cache)
        read = time.process_time() - start
        self.model.set_attn_implementation("sdpa")
        found = Found(self._kept(record, len(prompt.context)), read, None, 0.0, record.scores())
        start = time.process_time()
        try:
            answer, gaps = self._answer(cache, prompt, new, press is not None and press.per_layer)
        except (ValueError, RuntimeError) as error:
            return found._replace(error=f"{type(error).__name__}: {error}")
        return found._replace(answer=answer, gaps=gaps, answer_s=time.process_time() - start)

    def _answer(
        self, cache: Any, prompt: Prompt, new: int, one_by_one: bool
    ) -> tuple[list[int], tuple[float, ...]]:
        """Greedy tokens after the question, read one by one if layers keep different numbers of slots."""
        import torch

        ids = torch.tensor([prompt.question])
        place = torch.arange(len(prompt.context), len(prompt.context) + ids.shape[1])[None]
        pieces = range(ids.shape[1]) if one_by_one else (slice(None),)
        answer: list[int] = []
        gaps: list[float] = []
        with torch.no_grad():
            for piece in pieces:
                cut = slice(piece, piece + 1) if isinstance(piece, int) else piece
                out = self.model(
                    input_ids=ids[:, cut], position_ids=place[:, cut], past_key_values=cache, logits_to_keep=1
                )
            for i in range(new):
                best = out.logits[0, -1].topk(2)
                answer.append(int(best.indices[0]))
                gaps.append(float(best.values[0] - best.values[1]))
                if i + 1 < new:
                    out = self.model(
                        input_ids=best.indices[None, :1], position_ids=place[:, -1:] + 1 + i,
                        past_key_values=cache,
                    )  # fmt: skip
        return answer, tuple(gaps)

    def _kept(self, record: Record, tokens: int) -> np.ndarray:
        config = self.model.config
        kept = np.ones((config.num_hidden_layers, config.num_key_value_heads, tokens), bool)
        for i, layer in enumerate(self.model.model.layers):
            masked = layer.self_attn.masked_key_indices
            if masked is not None:
                kept[i][masked[1].numpy(), masked[2].numpy()] = False
            elif i in record.keys:
                before, after = record.keys[i]
                kept[i] = [_rows_of(*pair) for pair in zip(after[0].numpy(), before[0].numpy(), strict=True)]
        return kept


class Record:
    """The inputs and results of a press, layer by layer, and the scores by which it selects."""

    def __init__(self, press: Any):
        self.keys: dict[int, tuple[Any, Any]] = {}
        self.by_layer: dict[int, Any] = {}
        self.all_layers: Any = None
        if hasattr(press, "compress"):
            self._around(press, "compress", self._compressed)
        scorer = press if hasattr(press, "score") else getattr(press, "press", None)
        if hasattr(scorer, "score"):
            self._around(scorer, "score", self._scored)
        if hasattr(press, "compress_post"):
            self._around(press, "compress_post", lambda _, __: self._stacked(press))

    def _around(self, of: Any, name: str, note: Callable[[Any, Any], None]) -> None:
        call = getattr(of, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            out = call(*args, **kwargs)
            note(args, out)
            return out

        setattr(of, name, noting)

    def _compressed(self, args: Any, out: Any) -> None:
        self.keys[args[0].layer_idx] = args[2], out[0]

    def _scored(self, args: Any, out: Any) -> None:
        # Presses that wrap others overwrite these results.
        self.by_layer[args[0].layer_idx] = out[0].clone()

    def _stacked(self, press: Any) -> None:
        self.all_layers = press.score_val[:, 0].clone()

    def scores(self) -> np.ndarray | None:
        if self.all_layers is not None:
            return self.all_layers.numpy()
        return np.stack([self.by_layer[i].numpy() for i in sorted(self.by_layer)]) if self.by_layer else None


def _rows_of(some: np.ndarray, every: np.ndarray) -> np.ndarray:
    """Which rows [T, H] of `every` are among `some`, compared bit by bit; ValueError if one is missing."""
    at = {row.tobytes(): i for i, row in enumerate(every)}
    if len(at) < len(every):
        raise ValueError("two tokens have one key, so that keys do not say which token stays")
    found = np.zeros(len(every), bool)
    found[[at[row.tobytes()] for row in some]] = True
    return found


class Ours:
    """kvjax on a model; contexts and questions are padded to `widths` tokens, so each has one program."""

    def __init__(self, model: Any, widths: tuple[int, int], prefix: Sequence[int]):
        import jax

        self.model, self.widths, self.prefix = model, widths, tuple(prefix)
        self.compiles = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        self.compiles += event.startswith("/jax/core/compile")

    def run(self, press: Press | None, prompt: Prompt, removed: float, new: int) -> Found:
        import jax

        import kvjax

        hyper = {"prefix": self.prefix} if press is not None and press.repeats else {}
        method = "full" if press is None else press.ours(1 - removed, **hyper)
        context, question = (_padded(ids, n) for ids, n in zip(prompt, self.widths, strict=True))

        room = self.widths[1] + new

        def read() -> Any:
            return jax.block_until_ready(
                kvjax.prefill(self.model, context[0], lengths=context[1], method=method, room=room)
            )[1]

        cache, read_s, first = self._timed(read)
        kept = _kept(cache, self.model.config, len(prompt.context))
        # Without a method nothing is evicted while the question is read and answered, as in kvpress.
        bare = dataclasses.replace(cache, method=None)

        def answer() -> Any:
            return kvjax.generate(
                self.model, question[0], lengths=question[1], cache=bare, stop=(), max_new_tokens=new
            )

        out, answer_s, second = self._timed(answer)
        return Found(kept, read_s, out.tokens[0].tolist(), answer_s, compile_s=first + second)

    def _timed(self, call: Callable[[], Any]) -> tuple[Any, float, float]:
        """Return (result, seconds, further seconds of a first call): a call that compiled is repeated."""
        self.compiles, start = 0, time.process_time()
        out, seconds = call(), time.process_time() - start
        if not self.compiles:
            return out, seconds, 0.0
        start = time.process_time()
        out, again = call(), time.process_time() - start
        return out, again, seconds - again


def _padded(ids: Sequence[int], width: int) -> tuple[np.ndarray, list[int]]:
    rows = np.zeros((1, width), np.int32)
    rows[0, : len(ids)] = ids
    return rows, [len(ids)]


def _kept(cache: Any, config: Any, tokens: int) -> np.ndarray:
    import kvjax

    kept = np.zeros((config.layers, config.kv_heads, tokens), bool)
    for i, lists in enumerate(kvjax.kept_positions(cache)):
        for head, positions in enumerate(np.asarray(lists)[0]):
            kept[i, head, positions[positions >= 0]] = True
    return kept
