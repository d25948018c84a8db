"""Tokenizer, special tokens, chat template and stop ids from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from kvjax.base.errors import InputError
from kvjax.models.gguf.pre_tokenizers import pre_tokenizer, split_of
from kvjax.models.gguf.reader import Gguf
from kvjax.models.tokenizer import Text

_KEY = "tokenizer.ggml."
# Kinds of tokens, as in `gguf.TokenType`.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
_STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")
# These end an answer in models whose files name no such token.
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")
_SPACE = "▁"


def text_of(file: Gguf) -> Text:
    """Read the text data of a file. Raises InputError for an unsupported or broken tokenizer."""
    template = file.get("tokenizer.chat_template")
    model = file.get(f"{_KEY}model")
    if model in (None, "none", "no_vocab", "rwkv"):
        # RWKV's takes the longest token at each place, which the library has no model for.
        return Text(None, template, (), {})
    makers = {"gpt2": _byte_level, "llama": _sentence_piece, "gemma4": _spaced}
    if model not in makers:
        raise InputError(
            f"{file.path} has a tokenizer of the kind {model!r}, expected one of {', '.join(makers)} or none"
        )
    tokens = file.get(f"{_KEY}tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise InputError(f"{file.path} has no list of texts in {_KEY}tokens: fetch or convert it again")
    kinds = _numbers(file, "token_type", len(tokens)) or [1] * len(tokens)
    ids = {name: _id(file, key, len(tokens)) for name, key in _NAMES.items()}
    tokenizer, bos = makers[model](file, tokens, kinds, ids["unk_token"])
    _add_tokens(tokenizer, file, tokens, kinds)
    _add_ends(tokenizer, file, tokens, ids, bos)
    special = {name: tokens[i] for name, i in ids.items() if i is not None}
    return Text(tokenizer, template, _stop_ids(file, tokens, kinds), special)


def _byte_level(
    file: Gguf, tokens: list[str], kinds: Sequence[int], unknown: int | None
) -> tuple[Tokenizer, bool]:
    """(byte-level BPE, whether texts start with the first token unless the file says otherwise)."""
    split = split_of(str(file.get(f"{_KEY}pre", "default")), file.path)
    tokenizer = Tokenizer(_bpe(file, tokens, ignore_merges=split.whole_words))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.bos


def _spaced(
    file: Gguf, tokens: list[str], kinds: Sequence[int], unknown: int | None
) -> tuple[Tokenizer, bool]:
    """BPE with the file's merges over texts whose spaces are written as a letter, as of Gemma 4."""
    unk = tokens[0 if unknown is None else unknown]
    tokenizer = Tokenizer(_bpe(file, tokens, unk_token=unk, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer, True


def _bpe(file: Gguf, tokens: list[str], **settings: Any) -> models.BPE:
    """Build the model of the file's tokens and merges."""
    merges = [tuple(pair.split(" ")) for pair in file.get(f"{_KEY}merges", [])]
    if wrong := next((pair for pair in merges if len(pair) != 2), None):
        raise InputError(
            f"{file.path} merges {' '.join(wrong)!r:.60}, expected two texts with a space between"
        )
    vocab = _vocab(file, tokens)
    try:
        return models.BPE(vocab, merges, **settings)  # type: ignore[arg-type]
    except Exception as error:  # the library raises bare Exception
        raise InputError(
            f"{file.path} has merges that do not fit its tokens ({error}): fetch it again"
        ) from error


def _sentence_piece(
    file: Gguf, tokens: list[str], kinds: Sequence[int], unknown: int | None
) -> tuple[Tokenizer, bool]:
    """BPE with merges derived from scores: neighbours whose token scores highest merge first."""
    scores = _numbers(file, "scores", len(tokens))
    if scores is None:
        raise InputError(f"{file.path} has a SentencePiece tokenizer without {_KEY}scores: convert it again")
    vocab = _vocab(file, tokens)
    usual = {token for token, kind in zip(tokens, kinds, strict=True) if kind in (1, _USER_DEFINED)}
    model = models.BPE(
        vocab,
        _merges(tokens, scores, kinds, usual),
        unk_token=tokens[0 if unknown is None else unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = bool(file.get(f"{_KEY}add_space_prefix", True))
    start = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*start, normalizers.Replace(" ", _SPACE)])
    end = [decoders.Strip(" ", 1, 0)] if prefix else []
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _merges(
    tokens: list[str], scores: Sequence[float], kinds: Sequence[int], usual: set[str]
) -> list[tuple[str, str]]:
    """Every way to build a token from two others, highest score first; of equal scores the first token."""
    found: list[tuple[float, int, tuple[str, str]]] = []
    for i, (token, score, kind) in enumerate(zip(tokens, scores, kinds, strict=True)):
        if kind != 1:
            continue
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        found += [(-score, i, pair) for pair in halves if pair[0] in usual and pair[1] in usual]
    return [pair for _, _, pair in sorted(found, key=lambda one: one[:2])]


def _vocab(file: Gguf, tokens: list[str]) -> dict[str, int]:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        double = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise InputError(f"{file.path} has the token {double!r:.40} twice: convert it again")
    return vocab


def _add_tokens(tokenizer: Tokenizer, file: Gguf, tokens: list[str], kinds: Sequence[int]) -> None:
    """Add tokens that are matched in the text before anything else; control tokens are special.

    Phi-3's tokens include following spaces, which its file does not say.
    """
    strips = file.architecture == "phi3" and file.get(f"{_KEY}model") == "llama"
    keep = ("<unk>", "<s>", "<|endoftext|>")
    added = [
        AddedToken(
            token,
            special=kind in (_CONTROL, _UNKNOWN),
            normalized=False,
            rstrip=strips and kind == _CONTROL and token not in keep,
        )
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) and token
    ]
    tokenizer.add_tokens(added)


def _add_ends(
    tokenizer: Tokenizer, file: Gguf, tokens: list[str], ids: dict[str, int | None], bos: bool
) -> None:
    """Make texts start and end with the tokens that the file says."""
    wanted = {
        "bos_token": bool(file.get(f"{_KEY}add_bos_token", bos)),
        "eos_token": bool(file.get(f"{_KEY}add_eos_token", False)),
    }
    given = {name: ids[name] for name, wants in wanted.items() if wants and ids[name] is not None}
    if not given:
        return
    special = {name: (tokens[i], i) for name, i in given.items() if i is not None}
    parts = [special["bos_token"][0]] if "bos_token" in special else []
    parts += ["$A"] + ([special["eos_token"][0]] if "eos_token" in special else [])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=parts, pair=None, special_tokens=list(dict.fromkeys(special.values()))
    )


def _stop_ids(file: Gguf, tokens: list[str], kinds: Sequence[int]) -> tuple[int, ...]:
    """Ids that end an answer: those that the file names, and control tokens known to end a turn."""
    named = {i for key in _STOPS if (i := _id(file, key, len(tokens))) is not None}
    known = {i for i, token in enumerate(tokens) if token in _ENDS and kinds[i] == _CONTROL}
    return tuple(sorted(named | known))


def _id(file: Gguf, key: str, count: int) -> int | None:
    value = file.get(f"{_KEY}{key}")
    if value is None or value < 0 or value == 2**32 - 1:
        return None
    if not isinstance(value, int) or value >= count:
        raise InputError(f"{file.path} gives {_KEY}{key} = {value}, expected one of its {count} tokens")
    return value


def _numbers(file: Gguf, key: str, count: int) -> list[Any] | None:
    """Read a list of one number per token. Raises InputError if it has another length."""
    values = file.get(f"{_KEY}{key}")
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != count:
        raise InputError(
            f"{file.path} has {_KEY}{key} of another length than its {count} tokens: fetch it again"
        )
    return values
