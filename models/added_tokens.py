"""Reads the tokenizer of a checkpoint: tokenizer.json, and the files beside it that add tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from kvjax.base.errors import InputError
from kvjax.models.clean_spaces import clean_spaces
from kvjax.models.files import read_json

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
EVEN_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
_EXTRA = ("extra_special_tokens", "additional_special_tokens")


def read_tokenizer(folder: Path, settings: Mapping[str, Any]) -> tuple[Tokenizer | None, dict[str, str]]:
    """Read the tokenizer of a checkpoint (None without tokenizer.json) and its special tokens by name.

    Truncation, padding and merge dropout that a file sets are switched off, so that a text is encoded whole
    and always to the same ids. Tokens that are only in tokenizer_config.json, or else in
    special_tokens_map.json and added_tokens.json, are added as transformers 5 adds them. As there,
    add_bos_token and add_eos_token are ignored beside a tokenizer.json, whose post-processor decides. With
    clean_up_tokenization_spaces it decodes to text without spaces before punctuation; as in transformers
    since 5.7 not where the model is BPE, whose spaces were in the text. Raises InputError for a broken file,
    and if a file gives a token another id than it gets.
    """
    file = folder / _newest(settings)
    if not file.is_file():
        return None, _named(settings)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{file} is no tokenizer that `tokenizers` can read ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None  # pyright: ignore[reportAttributeAccessIssue]
    if settings.get("split_special_tokens"):
        tokenizer.encode_special_tokens = True
    if settings.get("clean_up_tokenization_spaces") and (
        settings.get(EVEN_BPE) or not isinstance(tokenizer.model, BPE)
    ):
        clean_spaces(tokenizer)
    before = tokenizer.get_vocab()
    listed, settings = _listed(folder, settings)
    named, extra = _named(settings), list(_extra(settings))
    for token in listed.values():
        # A named token is special, whatever its own entry says.
        token.special = token.special or token.content in named.values()
    tokenizer.add_tokens([token for _, token in sorted(listed.items())])
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    new = [_special(settings.get(name), text) for name, text in named.items() if text not in known]
    new += [token for token in extra if token.content not in known]
    tokenizer.add_tokens(new)
    for given, token in listed.items():
        if token.content not in before and (found := tokenizer.token_to_id(token.content)) != given:
            raise InputError(
                f"the files of {folder} give {token.content!r} the id {given}; after those of {file.name} "
                f"it gets {found}: write the tokenizer again with the library that made it"
            )
    return tokenizer, named


def _newest(settings: Mapping[str, Any]) -> str:
    """Find the name of the tokenizer's file; of files with a version in their names, the newest."""
    files = settings.get("fast_tokenizer_files")
    numbered = {}
    for name in files if isinstance(files, list) else ():
        version = str(name).removeprefix("tokenizer.").removesuffix(".json")
        if name == f"tokenizer.{version}.json" and version.replace(".", "").isdigit():
            numbered[tuple(int(part) for part in version.split(".") if part)] = name
    return numbered[max(numbered)] if numbered else "tokenizer.json"


def _listed(folder: Path, settings: Mapping[str, Any]) -> tuple[dict[int, AddedToken], Mapping[str, Any]]:
    """Read added tokens by id, and the settings, completed from older files."""
    listed: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in settings:
        for number, entry in _object(settings["added_tokens_decoder"], "added_tokens_decoder").items():
            listed[_id(number, "added_tokens_decoder")] = _token(entry, "added_tokens_decoder")
        return listed, settings
    older, ids = (
        read_json(folder / name) if (folder / name).is_file() else {}
        for name in ("special_tokens_map.json", "added_tokens.json")
    )
    merged = {**settings, **older}
    special = {*_named(merged).values(), *(token.content for token in _extra(merged))}
    for text, number in ids.items():
        known = text in special
        listed[_id(number, "added_tokens.json")] = AddedToken(text, normalized=not known, special=known)
    return listed, merged


def _named(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name, model-specific ones included."""
    out, entries = {}, settings.get("extra_special_tokens")
    known = {name: settings.get(name) for name in _NAMED}
    for name, token in {**known, **settings, **(entries if isinstance(entries, Mapping) else {})}.items():
        of_model = isinstance(token, str | Mapping) and name.endswith("_token")
        if of_model or (name in _NAMED and token is not None):
            out[name] = _token(token, name).content
    return out


def _extra(settings: Mapping[str, Any]) -> Iterable[AddedToken]:
    """Yield special tokens without a name."""
    for name in _EXTRA:
        for token in entries if isinstance(entries := settings.get(name), list) else ():
            yield _special(token, _token(token, name).content)


def _special(entry: Any, text: str) -> AddedToken:
    token = _token(entry, text) if isinstance(entry, Mapping) else AddedToken(text, special=True)
    token.special = True
    return token


def _token(entry: Any, where: str) -> AddedToken:
    """Make a token from its text, or from a JSON object with its matching rules."""
    if isinstance(entry, str):
        return AddedToken(entry)
    if isinstance(entry, Mapping) and isinstance(entry.get("content"), str):
        try:
            return AddedToken(**{key: entry[key] for key in _FLAGS if key in entry})
        except TypeError as error:
            raise InputError(f"{where} of the tokenizer describes no token ({error}): {entry!r}") from error
    raise InputError(
        f"{where} of the tokenizer is {entry!r}, expected a text, or an object with its "
        "content: correct the file"
    )


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{where} of the tokenizer is {value!r}, expected an object: correct the file")
    return value


def _id(value: Any, where: str) -> int:
    if isinstance(value, bool) or not str(value).isdecimal():
        raise InputError(f"{where} of the tokenizer has the id {value!r}, expected a whole number")
    return int(value)
