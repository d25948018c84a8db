"""Prompts that are shortened for the report: what is left out, and that what is needed never is."""

from kvjax.eval.run.examples import AROUND, HEAD, TAIL, shortened


def text_of(pieces: list[dict]) -> str:
    return "".join(piece.get("text", "|") for piece in pieces)


def test_a_short_prompt_is_whole() -> None:
    words = [f"w{i}" for i in range(HEAD + TAIL)]
    assert shortened(words, [(3, 5)], " ") == [
        {"text": "w0 w1 w2 ", "needed": False},
        {"text": "w3 w4 ", "needed": True},
        {"text": " ".join(words[5:]), "needed": False},
    ]
    assert shortened([], []) == []


def test_a_long_prompt_keeps_its_ends_and_what_is_needed_with_its_surroundings() -> None:
    words = [f" w{i}" for i in range(1000)]
    pieces = shortened(words, [(500, 503), (999, 1000)])
    assert [piece.get("left_out") for piece in pieces] == [None, 440, None, None, None, 453, None, None]
    assert pieces[3] == {"text": " w500 w501 w502", "needed": True}
    assert pieces[2]["text"].split()[0] == f"w{500 - AROUND}"
    shown = sum(len(piece["text"].split()) for piece in pieces if "text" in piece)
    assert shown + 440 + 453 == 1000
    assert text_of(pieces).startswith(" w0 w1 ") and text_of(pieces).endswith(" w999")
