"""A task of your own asks which token follows the marked one in a text of random tokens.

    kvjax compare --tasks docs/examples/own_task.py:behind --methods snapkv kvzip

or, from Python, kvjax.compare(model, ["snapkv", "kvzip"], tasks=[behind]). Token ids need no tokenizer; a
task may also return three texts, which the model's tokenizer then encodes.
"""

import numpy as np

VOCABULARY, MARK = 200, 3


def behind(rng: np.random.Generator, tokens: int) -> tuple[list[int], list[int], list[int]]:
    """Context, question and answer, the first two of at most `tokens` tokens together."""
    context = rng.integers(MARK + 1, VOCABULARY, tokens - 2).tolist()
    at = int(rng.integers(len(context) - 2))
    name, value = context[at + 1], context[at + 2]
    context[at] = MARK
    return context, [MARK, name], [value]
