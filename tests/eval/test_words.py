"""Questions in English: their answers stand in the text, their length holds, and their spans are right."""

import re

import jax
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvjax.base.errors import InputError
from kvjax.eval.tasks import plain_english as words
from kvjax.eval.tasks import recall
from kvjax.eval.tasks.plain_english import PlainEnglish, make_words
from kvjax.eval.tasks.reader import reader_of
from kvjax.eval.tasks.sample import TASKS
from kvjax.eval.tasks.suite import RecallSuite, make_suite
from kvjax.io.load import load
from kvjax.models.config import Config
from kvjax.models.hf import save_hf
from kvjax.models.model import Model
from kvjax.models.params import init

CORPUS = [
    words._INTRO,
    *(" " + " ".join(w) for w in (words._FIRST, words._SECOND, words._THINGS)),
    *(text.format("a", "b", "c") for text in words._FILLERS),
    *(text.format("a", "b") for text in (words._VALUE, words._POINTER, words._SECOND_VALUE)),
    "".join(words._PADDING) + words._COPY,
    *((question + answer).format("a", "b", "c") for question, answer in words._ASKED.values()),
    " ".join(words._NUMBERS) + ".",
]
SPECIAL = ["<s>", "</s>", "<unk>"]


def byte_level() -> Tokenizer:
    """Like those of GPT-2, Llama 3 and Qwen."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(made, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, **_OPTIONS))


def metaspace() -> Tokenizer:
    """Like those of Llama 2 and Gemma."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return _trained(made, trainers.BpeTrainer(vocab_size=700, **_OPTIONS))


def word_level() -> Tokenizer:
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return _trained(made, trainers.WordLevelTrainer(**_OPTIONS))


_OPTIONS = {"special_tokens": SPECIAL, "show_progress": False}


def _trained(made: Tokenizer, trainer: object) -> Tokenizer:
    made.train_from_iterator(CORPUS * 3, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


TOKENIZERS = {"byte level": byte_level(), "metaspace": metaspace(), "word level": word_level()}


def hf_folder(folder, tokenizer: Tokenizer | None, max_positions: int = 1024, layers: int = 2) -> str:
    """Write a random small Llama with a tokenizer, as a Hugging Face directory."""
    config = Config(
        vocab=960,
        d_model=32,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=16,
        d_ff=48,
        max_positions=max_positions,
    )
    model = Model(
        config,
        init(config, jax.random.key(0)),
        tokenizer=tokenizer,
        stop_ids=(1,),
        special_tokens={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    )
    save_hf(model, folder)
    return str(folder)


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def model(request, tmp_path_factory):
    return load(hf_folder(tmp_path_factory.mktemp("hf") / "model", TOKENIZERS[request.param]), progress=False)


def samples(suite: PlainEnglish, count: int = 6):
    return [row[0] for i in range(count) for row in suite.rows(i, "agnostic")]


# --- the questions ---------------------------------------------------------------------------------------


def squeezed(suite: PlainEnglish, ids) -> str:
    """Text without blanks, which not every tokenizer gives back."""
    return suite.reader.text(ids).replace(" ", "")


def test_every_answer_is_the_one_that_the_text_gives(model):
    suite = make_words(model, length=640)
    name, code = r"([a-z]+)", r"(\d{6})"
    for s in samples(suite):
        text, question, answer = (squeezed(suite, ids) for ids in (s.context, s.question, s.answer))
        codes = dict(re.findall(rf"Thecodeof{name}is{code}\.", text))
        seconds = dict(re.findall(rf"Thesecondcodeof{name}is{code}\.", text))
        shares = dict(re.findall(rf"Thecodeof{name}isthesameasthatof{name}\.", text))
        if s.task == "copy":
            cue = question.split("thesewords:")[1]
            assert text.count(cue) == 1 and cue + answer in text
        elif s.task == "chase":
            asked = re.search(rf"Whosecodedoes{name}share", question)[1]
            assert answer == f"{shares[asked]},{codes[shares[asked]]}."
        elif s.task == "all":
            asked = re.search(rf"bothcodesof{name}\?", question)[1]
            assert answer == f"{codes[asked]}and{seconds[asked]}."
        else:
            asked = re.search(rf"codeof{name}\?", question)[1]
            assert answer == f"{codes[asked]}." and asked not in shares


def test_the_pieces_are_what_the_tokenizer_makes_of_the_whole_text(model):
    suite = make_words(model, length=640)
    for s in samples(suite, 3):
        if s.task != "copy":  # its answer may end inside a word
            whole = [*s.context, *s.question, *s.answer]
            assert model.tokenizer.encode(suite.reader.text(whole)).ids == whole


def test_spans_are_the_needed_sentences(model):
    suite = make_words(model, length=640)
    for s in samples(suite):
        spans = [squeezed(suite, s.context[a:b]) for a, b in s.spans]
        if s.task == "copy":
            assert spans[0].endswith(squeezed(suite, s.answer))
            continue
        assert all(span.startswith("The") and span.endswith(".") and span.count(".") == 1 for span in spans)
        assert len(spans) == {"get": 1, "multikey": 1, "chase": 2, "all": 2}[s.task]
        for number in re.findall(r"\d{6}", squeezed(suite, s.answer)):
            assert number in "".join(spans)


@pytest.mark.rotating
@pytest.mark.parametrize("length", [400, 512, 777])
def test_context_and_question_fit_the_length_and_use_it(model, length):
    suite = make_words(model, length=length)
    longest = max(len(s.context) + len(s.question) for s in samples(suite, 12))
    assert length - 16 <= longest <= length
    contexts = {len(s.context) for s in samples(suite, 12)}
    assert max(contexts) - min(contexts) <= 3


def test_one_token_words_are_chosen_where_there_are_enough():
    suite = make_words(Model(*tiny(), tokenizer=TOKENIZERS["byte level"]), ["get"])
    vocabulary = suite.vocabulary
    for chosen in (vocabulary.first, vocabulary.second, vocabulary.things):
        assert len(chosen) >= words._ENOUGH and all(vocabulary.cost[w] == 1 for w in chosen)
    # Then context and question fill the length to the token.
    assert {len(s.context) for s in samples(suite)} == {len(samples(suite)[0].context)}


def test_words_of_other_tokenizers_are_of_their_vocabulary_or_longer():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    own = ["zorbel", "quintap", "mervold", "drasken"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([" " + w for w in own] * 9, trainer)
    suite = make_words(Model(*tiny(), tokenizer=made), ["get"], length=900)
    assert set(own) <= {*suite.vocabulary.first, *suite.vocabulary.second, *suite.vocabulary.things}
    assert max(suite.vocabulary.cost.values()) > 1
    for s in samples(suite, 3):
        assert len(s.context) + len(s.question) <= 900


def test_a_context_opens_with_bos_and_serves_all_its_questions(model):
    rows = make_words(model, length=640).rows(3, "agnostic")
    assert [row[0].task for row in rows] == list(TASKS)
    assert len({row[0].context for row in rows}) == 1 and rows[0][0].context[0] == 0


def test_look_alikes_share_a_word_with_the_asked_name(model):
    suite = make_words(model, ["multikey"], length=640)
    for s in samples(suite):
        text = squeezed(suite, s.context)
        asked = re.search(r"codeof([a-z]+)\?", squeezed(suite, s.question))[1]
        first = next(w for w in suite.vocabulary.first if asked.startswith(w) and asked[len(w) :] in
                     suite.vocabulary.second)  # fmt: skip
        names = re.findall(r"Thecodeof([a-z]+)is\d", text)
        alike = [n for n in names if n != asked and (n.startswith(first) or n.endswith(asked[len(first) :]))]
        assert len(alike) >= words._LOOKALIKES


def test_a_sample_is_a_pure_function_of_its_arguments(model):
    suite, again = make_words(model, length=640, seed=1), make_words(model, length=640, seed=1)
    later = [suite.rows(i, "aware") for i in (4, 2)]
    assert [again.rows(i, "aware") for i in (2, 4)] == later[::-1]
    assert make_words(model, tuple(reversed(TASKS)), length=640, seed=1).rows(2, "aware") == later[1][::-1]
    others = [make_words(model, length=640, seed=s).rows(i, "aware") for s, i in [(1, 3), (2, 2)]]
    assert len({rows[0][0].context for rows in (later[1], *others)}) == 3
    ids = [s.id for s in samples(suite, 9)]
    assert len(set(ids)) == len(ids)


def test_a_conversation_asks_about_different_names(model):
    suite = make_words(model, ["get", "copy"], length=640)
    (row,) = suite.rows(0, "multi-turn")
    assert [s.task for s in row] == ["get", "copy", "get", "copy", "get"]
    assert len({s.question for s in row}) == 5 and len({s.context for s in row}) == 1


def test_grading_is_exact_and_partial_only_for_copy(model):
    suite = make_words(model, ["get", "copy"], length=640)
    get, copy = (row[0] for row in suite.rows(0, "agnostic"))
    assert suite.grade(get, get.answer).score == 1.0
    assert suite.grade(get, [*get.answer[:-1], 2]).score == 0.0
    half = [*copy.answer[: len(copy.answer) // 2]]
    assert suite.grade(copy, half).score == pytest.approx(len(half) / len(copy.answer))
    assert suite.grade(get, get.answer).answer.replace(" ", "") == squeezed(suite, get.answer)
    assert len(suite.words(get.question)) == len(get.question)


# --- what is refused -------------------------------------------------------------------------------------


def tiny(vocab: int = 960, max_positions: int = 1024):
    config = Config(
        vocab=vocab,
        d_model=16,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=8,
        d_ff=16,
        max_positions=max_positions,
    )
    return config, init(config, jax.random.key(0))


def test_a_length_too_short_names_the_minimum_that_works(model):
    with pytest.raises(InputError, match=r"need a length of (\d+) tokens") as caught:
        make_words(model, length=40)
    least = int(re.search(r"length of (\d+)", str(caught.value))[1])
    with pytest.raises(InputError):
        make_words(model, length=least - 1)
    suite = make_words(model, length=least)
    assert all(len(s.context) + len(s.question) <= least for s in samples(suite, 20))


def test_a_conversation_too_long_for_the_length_is_refused(model):
    suite = make_words(model, ["multikey"], length=230)
    with pytest.raises(InputError, match="5 question"):
        suite.rows(0, "multi-turn")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": None}, "no tokenizer.json"),
        ({"tasks": ["gat"]}, "did you mean 'get'"),
        ({"length": 1020}, "beyond the model's 1024 positions"),
    ],
)
def test_what_cannot_be_asked_is_refused(change, message):
    tokenizer = change.get("tokenizer", TOKENIZERS["byte level"])
    with pytest.raises(InputError, match=message):
        make_words(
            Model(*tiny(), tokenizer=tokenizer), change.get("tasks", ["get"]), length=change.get("length")
        )


def test_a_tokenizer_without_english_words_is_refused():
    made = Tokenizer(models.WordLevel({"<unk>": 0, "hund": 1}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(InputError, match="cannot write 'This'"):
        make_words(Model(*tiny(), tokenizer=made))


# --- which suite a model gets ----------------------------------------------------------------------------


def test_a_directory_with_a_tokenizer_gets_english_and_the_shipped_model_its_own_words(model):
    suite = make_suite(model)
    assert isinstance(suite, PlainEnglish) and suite.length == 512 and suite.tasks == TASKS
    assert isinstance(make_suite(load("recall-tiny")), RecallSuite)
    assert isinstance(make_suite(Model(*tiny(recall.VOCAB))), RecallSuite)
    with pytest.raises(InputError, match="did you mean 'get'"):
        make_suite(load("recall-tiny"), ["gat"])
    with pytest.raises(InputError, match="beyond the model's 1024 positions"):
        make_suite(model, length=2000)


def test_a_model_of_few_positions_gets_shorter_questions_by_default(tmp_path):
    short = load(hf_folder(tmp_path / "short", TOKENIZERS["byte level"], max_positions=360), progress=False)
    suite = make_suite(short, ["get"])
    assert suite.length < 360 and len(samples(suite, 1)[0].context) < 360


def test_settings_that_a_checkpoint_left_in_its_tokenizer_do_not_cut_the_text():
    cutting = Tokenizer.from_str(TOKENIZERS["byte level"].to_str())
    cutting.enable_truncation(8)
    cutting.enable_padding(length=64)
    reader = reader_of(Model(*tiny(), tokenizer=cutting))
    assert len(reader.split(words._INTRO)[0]) == len(TOKENIZERS["byte level"].encode(words._INTRO).ids) - 1
    assert cutting.truncation is not None


@pytest.mark.parametrize(
    ("template", "expected"), [("<s> $A", (0,)), ("<s> $A </s>", (0,)), ("$A </s>", ()), ("$A", ())]
)
def test_only_what_opens_a_text_is_put_before_it(template, expected):
    made = Tokenizer.from_str(TOKENIZERS["byte level"].to_str())
    special = [(t, i) for t, i in (("<s>", 0), ("</s>", 1)) if t in template]
    made.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    assert reader_of(Model(*tiny(), tokenizer=made, stop_ids=(1,))).bos == expected


def test_a_token_over_a_border_belongs_to_what_follows():
    made = Tokenizer(models.WordLevel({"<unk>": 0, "ab": 1, "cd": 2}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_tokens([AddedToken("ab", normalized=False)])
    reader = reader_of(Model(*tiny(), tokenizer=made))
    assert reader.split("a", "b cd") == [(), (1, 2)]
