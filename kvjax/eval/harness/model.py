"""The model class of lm-evaluation-harness that answers over compressed caches: `KvjaxLM`."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
    get_rolling_token_windows,
    make_disjoint_window,
)
from tqdm import tqdm

from kvjax.api.chunks import bucket
from kvjax.api.likelihood import likelihood, needs_context, room_for
from kvjax.api.prefill import method_of
from kvjax.base.checks import whole_number
from kvjax.base.errors import InputError
from kvjax.compat.model_fit import check_budget
from kvjax.eval.harness.rows import CacheBytes, ScoredRow, batches, written
from kvjax.eval.harness.sampling import Writing, writing_of
from kvjax.eval.harness.texts import HarnessTokenizer, Marker
from kvjax.eval.run.memory import fitting_rows
from kvjax.grammar import Method
from kvjax.io.load import load
from kvjax.methods import as_method
from kvjax.models.model import Model, check_single

_log = logging.getLogger("lm_eval.kvjax")
# The limit of generated tokens for tasks without one, as in the harness' `hf` backend.
MAX_NEW = 256
# The most rows of an automatic batch.
AUTO_ROWS = 16


@register_model("kvjax")
class KvjaxLM(TemplateLM):
    """A model of kvjax for lm-evaluation-harness, whose caches a method compresses.

    Requests are tokenised, cut from the left and scored as by the harness' own `hf` backend. The context of a
    request, which is read as a prompt and compressed, is the text before the last `marker`; without a marker
    it is everything but the prompt's last token. The text after it is read over the compressed cache, and so
    are tokens that are scored or generated.

    model: a `Model`, or what `kvjax.load` takes. drop_marker: the marker is not part of the prompt. chunk:
    for `loglikelihood_rolling`, which scores requests from their first token, the method compresses again
    after every `chunk` tokens. max_length: shortens the model's positions. batch_size: rows at a time, or
    "auto", at most max_batch_size then. device: ignored, though the harness passes it; JAX_PLATFORMS chooses.

    Raises InputError for a model without a tokenizer, of two decoders, or that the method does not fit.
    """

    def __init__(
        self,
        model: Model | str,
        method: Method | str | None = None,
        *,
        marker: str | None = None,
        drop_marker: bool = False,
        chunk: int | None = None,
        dtype: str = "float32",
        max_length: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        mesh: str | None = None,
        rules: str | None = None,
        device: str | None = None,
    ):
        super().__init__()
        self.method = Method() if method is None else as_method(method)
        self.chunk = None if chunk is None else whole_number("chunk", chunk, 1, "tokens")
        self.batch_size, self.most_rows = _batch_size(batch_size), max_batch_size or AUTO_ROWS
        mark = None if marker is None else Marker(marker, drop_marker)
        self.model = load(model, dtype=dtype, mesh=mesh, rules=rules) if isinstance(model, str) else model
        check_single(self.model, "load one for lm-evaluation-harness")
        self.method = method_of(self.model, self.method, None)
        self.texts = HarnessTokenizer(self.model, mark)
        most = self.model.config.max_positions
        self.max_length = whole_number("max_length", max_length or most, 2, "tokens", most)
        self.bytes = CacheBytes.newest = CacheBytes()

    # --- the harness' interface of a model -----------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self.texts.end

    @property
    def prefix_token_id(self) -> int:
        return self.texts.start

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness caches tokenised requests."""
        return f"{self.model.name}-{self.model.fingerprint}".replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        return self.texts.encode(string, add_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the model's template; InputError if it has none, or another one is asked for by name."""
        if isinstance(chat_template, str) and chat_template != "default":
            raise InputError(
                f"the chat template {chat_template!r} was asked for, expected the model's default: write "
                "--apply_chat_template alone"
            )
        if chat_template and self.model.chat_template is None:
            raise InputError(f"{self.model.name} has no chat template: leave --apply_chat_template out")
        return self.model.chat_template if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Write a conversation as text; without system messages if the template rejects them."""
        try:
            return self.texts.chat(chat_history, add_generation_prompt)
        except InputError as error:
            plain = [message for message in chat_history if message["role"] != "system"]
            if len(plain) == len(chat_history):
                raise
            _log.warning("%s; messages of the system are left out", error)
            return self.texts.chat(plain, add_generation_prompt)

    def get_model_info(self) -> dict[str, Any]:
        """Describe the model, and the sizes of its caches, for the results."""
        leaves = jax.tree.leaves(self.model.params)
        return {
            "model_num_parameters": sum(x.size for x in leaves),
            "model_dtype": leaves[0].dtype.name,
            "model_sha": self.model.fingerprint,
            "max_length": self.max_length,
            "method": repr(self.method),
            "cache": {
                "requests": self.bytes.requests, "kept_bytes": self.bytes.kept, "full_bytes": self.bytes.full
            },
        }  # fmt: skip

    # --- likelihoods ---------------------------------------------------------------------------------------

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        return super()._encode_pair(self.texts.without_marker(context), continuation)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **options: Any,
    ) -> list[tuple[float, bool]]:
        rows = [self._row(*request) for request in requests]
        self._note_cut(sum(len(c) + len(e) > self.max_length + 1 for _, c, e in requests), len(requests))
        self._check_contexts(rows)
        found = self._scores(rows, "Running loglikelihood requests", disable_tqdm)
        for (strings, _, _), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", strings, answer)
        return found

    def _row(self, strings: tuple[str, str], context: list[int], end: list[int]) -> ScoredRow:
        if not 0 < len(end) <= self.max_length:
            raise InputError(
                f"the continuation {strings[1][:60]!r} has {len(end)} tokens, expected 1 to "
                f"{self.max_length}, the model's positions: correct the task"
            )
        count = len(context) - 1
        if self.texts.marker is not None:
            count = min(count, self.texts.prompt(strings[0]).context)
        return ScoredRow.fitted(context, max(1, count), end, self.max_length + 1)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [request.args[0] for request in requests]
        if needs_context(self.method) and self.chunk is None:
            raise InputError(
                f"{self.method.id} acts at the ends of prompts, and a task of loglikelihood_rolling scores a "
                "text from its first token: give --chunk N, after how many tokens it compresses again"
            )
        if self.texts.marker is not None and any(self.texts.marker.text in text for text in texts):
            raise InputError(
                f"the marker {self.texts.marker.text!r} is in a text of which loglikelihood_rolling scores "
                "every token: leave --marker out"
            )
        rows, owners = [], []
        for i, text in enumerate(texts):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text), prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length, context_len=1,
            )  # fmt: skip
            for context, end in map(make_disjoint_window, windows):
                rows.append(ScoredRow([*context, *end], max(1, len(context) - 1), len(end)))
                owners.append(i)
        found = self._scores(rows, "Running rolling loglikelihood requests", disable_tqdm, self.chunk, False)
        totals = np.zeros(len(texts))
        np.add.at(totals, owners, [total for total, _ in found])
        for text, total in zip(texts, totals.tolist(), strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals.tolist()

    def _scores(
        self, rows: list[ScoredRow], what: str, quiet: bool, chunk: int | None = None, weighed: bool = True
    ) -> list[tuple[float, bool]]:
        """Compute log p of the end of each row, and whether all of it is greedy."""
        out: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        kinds: list[Hashable] | None = None if chunk is None else [(len(r.ids), r.context) for r in rows]
        with tqdm(total=len(rows), desc=what, disable=quiet) as bar:
            for places, batch in batches(rows, self._rows_at_once(rows), kinds):
                contexts = [row.context for row in batch]
                found = likelihood(
                    self.model, [row.ids for row in batch], method=self.method, context=contexts, chunk=chunk
                )
                for i, row, logprobs, greedy in zip(
                    places, batch, found.logprobs, found.greedy, strict=False
                ):
                    end = slice(len(row.ids) - row.scored, len(row.ids))
                    out[i] = float(logprobs[end].sum(dtype=np.float64)), bool(greedy[end].all())
                if weighed:
                    room = room_for(self.model, self.method, int(found.tokens.max()))
                    self.bytes.add(self.model, found.cache_bytes, batch, room, len(places))
                bar.update(len(places))
        return out

    # --- generation ----------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        rows, hows, untils, lost = [], [], [], 0
        for request in requests:
            ids, context, how, until = self._asked(*request.args)
            rows.append(ScoredRow.fitted(ids, context, (), self.max_length - how.new))
            hows.append(how)
            untils.append(until)
            lost += len(ids) > len(rows[-1].ids)
        self._note_cut(lost, len(rows))
        out = [""] * len(rows)
        self._check_contexts(rows)
        with tqdm(total=len(rows), desc="Running generate_until requests", disable=disable_tqdm) as bar:
            groups = batches(rows, self._rows_at_once(rows), hows)
            for number, (places, batch) in enumerate(groups):
                ids, held, room = written(self.model, self.method, batch, hows[places[0]], number)
                for i, row in zip(places, ids, strict=False):
                    text = self.texts.decode([token for token in row if token not in self.model.stop_ids])
                    out[i] = postprocess_generated_text(text, untils[i], None)
                    self.cache_hook.add_partial("generate_until", requests[i].args, out[i])
                self.bytes.add(self.model, held, batch, room, len(places))
                bar.update(len(places))
        return out

    def _asked(self, prompt: str, gen_kwargs: dict[str, Any]) -> tuple[list[int], int, Writing, list[str]]:
        """Return a prompt's tokens and context, how to write after it, and the strings that end the text."""
        if not isinstance(gen_kwargs, dict):
            raise InputError(
                f"generation_kwargs are {gen_kwargs!r}, expected names and values: correct the task"
            )
        asked, end = normalize_gen_kwargs(gen_kwargs, MAX_NEW), self.texts.ending
        until = handle_stop_sequences(asked.get("until"), eos=end)
        # The end-of-text token needs no stop string.
        how = writing_of(asked, [text for text in until if text != end])
        if not 0 < how.new < self.max_length:
            raise InputError(
                f"a task writes up to {how.new} tokens, expected 1 to {self.max_length - 1}, because the "
                "model has so many positions beside a prompt: give --gen_kwargs max_gen_toks=N"
            )
        found = self.texts.prompt(prompt)
        if not found.ids:
            return [self.texts.start], 1, how, until
        return found.ids, found.context, how, until

    # --- all requests --------------------------------------------------------------------------------------

    def _check_contexts(self, rows: Sequence[ScoredRow]) -> None:
        """Raise InputError, before anything is read, if a context is too short for the method's budget."""
        check_budget(self.method, [row.context for row in rows], "tokens of a context")

    def _note_cut(self, lost: int, requests: int) -> None:
        if lost:
            _log.warning(
                "%d of %d requests are longer than %d tokens and lose their first ones", lost, requests,
                self.max_length,
            )  # fmt: skip

    def _rows_at_once(self, rows: Sequence[ScoredRow]) -> int:
        """Rows of a batch; for "auto" as many as memory allows."""
        if self.batch_size != "auto":
            return int(self.batch_size)
        itemsize = jax.tree.leaves(self.model.params)[0].dtype.itemsize
        longest = bucket(max((len(row.ids) for row in rows), default=1))
        return fitting_rows(self.model.config, longest, itemsize, self.most_rows)


def _batch_size(asked: int | str) -> int | str:
    """Rows at a time; "auto:N" is "auto"."""
    if isinstance(asked, str) and asked.startswith("auto"):
        return "auto"
    try:
        return whole_number("batch_size", int(asked), 1, "rows")
    except ValueError:
        raise InputError(f'batch_size is {asked!r}, expected a number of rows or "auto"') from None
