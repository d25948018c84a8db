"""Tokenizers' files, each with the ids of TEXT, which those of transformers 5.2.0 equal (tests/parity)."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

TEXT = "hi<|end|> <pad>hi"
_LETTERS = "<|end>pahiĠ"
_BOS, _END, _PAD = "<s>", "<|end|>", "<pad>"
# TEXT in letters; with both added tokens; with <pad> alone, and with <|end|> alone.
_SPLIT = [8, 9, 0, 1, 2, 3, 4, 1, 5, 10, 0, 6, 7, 4, 5, 8, 9]
_WHOLE, _PADDED, _ENDED = [8, 9, 12, 10, 13, 8, 9], [*_SPLIT[:10], 12, 8, 9], [8, 9, 12, *_SPLIT[9:]]


# Written texts, and what transformers 5.2.0 shows of them with clean_up_tokenization_spaces (tests/parity).
SHOWN = {
    "a . b ? c ! d , e": "a. b? c! d, e",
    "do n't , I 'm , it 's , we 've , you 're": "don't, I'm, it's, we've, you're",
    "x ' y": "x'y", "x  ' .": "x  '.", " n ' t": "n't", "a  . . .": "a ...", "he 'll : ; )": "he 'll : ; )",
}  # fmt: skip


class Files(NamedTuple):
    """The ids that TEXT becomes, the files beside tokenizer.json, and what is done to that one."""

    ids: list[int]
    tokenizer_config: dict[str, Any] = {}
    special_tokens_map: dict[str, Any] | None = None
    added_tokens: dict[str, Any] | None = None
    change: Any = lambda made: None


def tokenizer() -> Tokenizer:
    """Letters, and <s> with the id 11."""
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(_LETTERS)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    made.decoder = decoders.ByteLevel()  # pyright: ignore
    made.add_special_tokens([AddedToken(_BOS, special=True)])
    return made


def write(files: Files, folder: Path) -> Path:
    """Write the folder of a checkpoint with these files."""
    made = tokenizer()
    files.change(made)
    made.save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config", "special_tokens_map", "added_tokens"):
        if (data := getattr(files, name)) is not None:
            (folder / f"{name}.json").write_text(json.dumps(data))
    return folder


def entry(text: str, **more: Any) -> dict[str, Any]:
    """Write an added token as files describe it."""
    plain = dict(lstrip=False, normalized=False, rstrip=False, single_word=False, special=True)
    return {"content": text, **plain, **more}


def _cut(made: Tokenizer) -> None:
    made.enable_truncation(4)
    made.enable_padding(length=40, pad_id=5, pad_token="p")


def _opens(made: Tokenizer) -> None:
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[(_BOS, 11)])  # pyright: ignore


_BOTH = {"12": entry(_END), "13": entry(_PAD)}
_NAMES = {"bos_token": _BOS, "eos_token": _END}

CASES = {
    "alone": Files(_SPLIT),
    "truncation and padding": Files(_SPLIT, change=_cut),
    "added_tokens_decoder": Files(_WHOLE, {"added_tokens_decoder": _BOTH}),
    "an added token that strips": Files(
        [8, 9, 12, 13, 8, 9], {"added_tokens_decoder": {**_BOTH, "12": entry(_END, rstrip=True)}}
    ),
    "named tokens": Files(_WHOLE, {"eos_token": _END, "pad_token": _PAD}),
    "named tokens in another order": Files(_WHOLE, {"pad_token": _PAD, "eos_token": _END}),
    "extra tokens": Files(_WHOLE, {"eos_token": _END, "additional_special_tokens": [_PAD]}),
    "a token of this model": Files(_PADDED, {"extra_special_tokens": {"image_token": _PAD}}),
    "special_tokens_map": Files(_WHOLE, {}, {"eos_token": entry(_END), "additional_special_tokens": [_PAD]}),
    "added_tokens.json": Files(_WHOLE, {}, None, {_PAD: 13, _END: 12}),
    "older files beside added_tokens_decoder": Files(
        _PADDED, {"added_tokens_decoder": {"12": entry(_PAD)}}, {"eos_token": _END}, {_END: 13}
    ),
    "split_special_tokens": Files(_SPLIT, {"split_special_tokens": True, "added_tokens_decoder": _BOTH}),
    "a post-processor": Files([11, *_SPLIT], {"bos_token": _BOS, "add_bos_token": False}, change=_opens),
    "add_bos_token alone": Files(_ENDED, {**_NAMES, "add_bos_token": True, "add_eos_token": True}),
    "add_prefix_space": Files(_SPLIT, {"add_prefix_space": True}),
}
