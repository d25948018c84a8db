"""Saved conversations: a cache file, as of `kvjax.save_cache`, with the messages in the header."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from kvjax.api.chat import Chat, chat
from kvjax.api.prefill import check_cache
from kvjax.base.errors import InputError
from kvjax.io.cache_file import damage, load_cache, read_cache_header, write_cache
from kvjax.methods.user import Own
from kvjax.models.model import Model


def save_chat(path: str | os.PathLike[str], talk: Chat) -> None:
    """Write a conversation to one file, atomically.

    The file is a cache, too: `kvjax.load_cache` and `kvjax inspect` read it. Of the arguments of `kvjax.chat`
    it stores only the method and the system message.

    Args:
        path: of the file; an older one is replaced.
        talk: a conversation of `kvjax.chat`, after at least one question.

    Raises:
        InputError: for what `kvjax.save_cache` refuses, and for a conversation without a question.

    >>> import kvjax
    >>> save_chat("talk.cache", kvjax.load_chat("monday.cache", kvjax.load("smollm2-135m")))  # doctest: +SKIP
    """
    if talk.cache is None:
        raise InputError("the conversation holds no question yet, expected one to save: ask something first")
    write_cache(path, talk.cache, chat=json.dumps(talk.state()))


def load_chat(
    path: str | os.PathLike[str], model: Model, *, methods: Own | Sequence[Own] = (), **options: Any
) -> Chat:
    """Read a conversation that `save_chat` wrote, to continue it.

    Args:
        path: of the file.
        model: the model that filled the cache.
        methods: as in `kvjax.load_cache`.
        **options: those of `kvjax.chat`, except the method and the system message, which the file has.

    Returns:
        The `Chat`, with its messages and its cache.

    Raises:
        InputError: for a file that is not a conversation, a damaged one, and if another model filled the
            cache.

    >>> import kvjax
    >>> load_chat("talk.cache", kvjax.load("smollm2-135m")).say("Another?")  # doctest: +SKIP
    """
    head = read_cache_header(path)
    if not head.chat:
        raise InputError(
            f"{path} holds a cache and no conversation, expected one that kvjax.save_chat wrote: give it to "
            "kvjax.load_cache"
        )
    cache = load_cache(path, model, methods=methods)
    check_cache(model, cache)
    with damage(path):
        state = json.loads(head.chat)
        system = state["system"]
    talk = chat(model, cache.method, system=system, **options)
    with damage(path):
        talk.resume(state, cache)
    return talk
