"""How texts are split before byte-pair merges, by the pre-tokenizer names in GGUF files."""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers

from kvjax.base.errors import InputError

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKED = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"  # marks belong to letters
_MARKED += r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SEED = _WORDS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_THREE_DIGITS = _WORDS + r"\p{N}{1,3}" + _REST
_ONE_DIGIT = _WORDS + r"\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_REST_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(ending: str, digits: str) -> str:
    """Words that start anew at a capital letter, with or without an apostrophe ending."""
    words = (f"{_BEFORE}{_UPPER}*{_LOWER}+{ending}", f"{_BEFORE}{_UPPER}+{_LOWER}*{ending}")
    return "|".join((*words, digits)) + _REST_SLASH


_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")


class SplitPatterns(NamedTuple):
    """Patterns that isolate pieces, one after the other, and further settings of a pre-tokenizer.

    whole_words: whether a piece that is a token stays one, whatever merges say. bos: whether texts start with
    the beginning-of-text token if the file does not say. nfc: whether texts are normalised first, as their
    tokenizer.json says (llama.cpp does not).
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    bos: bool = False
    nfc: bool = False


_GPT_2_SPLIT = SplitPatterns((_GPT_2,))
_DIGITS_SPLIT = SplitPatterns((r"\p{N}", _GPT_2))
_LLAMA_3 = SplitPatterns((_THREE_DIGITS,), whole_words=True, bos=True)
_CL100K = SplitPatterns((_THREE_DIGITS,))
_QWEN_2 = SplitPatterns((_ONE_DIGIT,), nfc=True)

SPLITS: dict[str, SplitPatterns] = {
    "default": SplitPatterns((r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4"), _GPT_2_SPLIT),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS_SPLIT),
    "minerva-7b": _DIGITS_SPLIT,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA_3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN_2),
    "qwen35": SplitPatterns((_MARKED,), nfc=True),
    "seed-coder": SplitPatterns((_SEED,)),
    "stablelm2": SplitPatterns((_ONE_DIGIT,)),
    "falcon": SplitPatterns((r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2, "[0-9][0-9][0-9]")),
    "tekken": SplitPatterns((_cased("", r"\p{N}"),), whole_words=True, bos=True),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "minimax-m2"), SplitPatterns((_cased(f"{_ENDINGS}?", r"\p{N}{1,3}"),))
    ),
    "deepseek-v3": SplitPatterns(_DEEPSEEK_3),
    "deepseek-coder": SplitPatterns(_DEEPSEEK_CODER),
}
"""Every name that is read, with what it means."""


def split_of(name: str, path: object) -> SplitPatterns:
    """Find the split for a file's pre-tokenizer name. Raises InputError for an unsupported one."""
    if name in SPLITS:
        return SPLITS[name]
    raise InputError(
        f"{path} splits texts by the pre-tokenizer {name!r}, expected one that is read: {', '.join(SPLITS)}"
    )


def pre_tokenizer(split: SplitPatterns) -> pre_tokenizers.PreTokenizer:
    """Return the pieces of a split, as bytes written in printable characters."""
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    return pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
