"""RULER's tasks: what each context holds, that it fits, and where what the answer needs stands."""

import hashlib
import json
import re
from collections import Counter

import jax
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers import models as kinds

from kvjax.base.errors import InputError
from kvjax.commands.texts import read_texts
from kvjax.eval.tasks.benchmarks import RULER
from kvjax.eval.tasks.reader import joiner_of
from kvjax.eval.tasks.ruler import shipped
from kvjax.eval.tasks.ruler.prompts import PROMPTS, text_of
from kvjax.eval.tasks.ruler.sizes import largest
from kvjax.eval.tasks.ruler.suite import GENERATED, TASKS, make_ruler
from kvjax.eval.tasks.suite import CombinedSuite, make_suite
from kvjax.io.load import load
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from tests.eval.ruler_records import HOTPOT, NEEDLE, SQUAD, UUID

LENGTH = 1300
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUMBER = r"\d{7}"


def trained(kind):
    """Train a byte-level or a metaspace tokenizer, of a few of the words that are asked."""
    texts = [*(p.template + p.prefix for p in PROMPTS.values()), shipped.NOISE]
    texts += [" ".join(shipped.haystack().words[:4000]), " ".join(shipped.words_of("all")[::3])]
    options = {"special_tokens": ["<s>", "<|im_start|>", "<|im_end|>", "<unk>"], "show_progress": False}
    if kind == "byte level":
        made = Tokenizer(kinds.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    else:
        made = Tokenizer(kinds.BPE(unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
        options["initial_alphabet"] = [chr(i) for i in range(32, 127)] + ["\n", "ñ"]
    made.train_from_iterator(texts * 2, trainers.BpeTrainer(vocab_size=3000, **options))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    return made


def of_tokenizer(tokenizer, **given):
    config = Config(
        vocab=3008, d_model=16, layers=1, heads=2, kv_heads=1, head_dim=8, d_ff=16, max_positions=8192
    )
    special = {"bos_token": "<s>"}
    return Model(
        config, init(config, jax.random.key(0)), tokenizer=tokenizer, special_tokens=special, **given
    )


@pytest.fixture(scope="module", params=["byte level", "metaspace"])
def model(request):
    return of_tokenizer(trained(request.param), chat_template=CHAT if request.param == "byte level" else None)


@pytest.fixture(scope="module")
def qa(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qa")
    for name, data in (("squad", SQUAD), ("hotpot", HOTPOT)):
        (folder / f"{name}.json").write_text(json.dumps(data))
    return [f"qa_1:file={folder / 'squad.json'}", f"qa_2:file={folder / 'hotpot.json'}"]


@pytest.fixture(scope="module")
def suite(model, qa):
    return make_ruler(model, ["ruler", *qa], length=LENGTH)


def decoded(suite, ids):
    return suite.reader.tokenizer.decode(list(ids), skip_special_tokens=False)


def context(suite, task, index=0):
    return "".join(suite.draft(task, index).context)


@pytest.mark.rotating
def test_fits_get_questions_with_their_right_answers(model):
    how = dict(text=None, tasks=["niah_single_1"], rows=2, length=LENGTH, seed=0)
    samples = read_texts(model, questions=True, **how)
    needles = [
        re.search(NUMBER, context(make_ruler(model, ["niah_single_1"], length=LENGTH), "niah_single_1", i))
        for i in range(2)
    ]
    for sample, needle in zip(samples, needles, strict=True):
        assert needle.group() in model.tokenizer.decode(list(sample.answer)).replace(" ", "") and sample.spans
    assert all(not hasattr(row, "answer") for row in read_texts(model, questions=False, **how))


@pytest.mark.rotating
def test_words_read_as_they_stand_in_the_text(suite):
    sample = suite.sample("niah_single_2", 0)
    for ids in (sample.context, sample.question):
        words = suite.words(ids)
        said = joiner_of(words).join(words)
        assert len(words) == len(ids) and said.strip() == decoded(suite, ids).strip()
        # What a tokenizer writes for white space is not shown.
        assert not {*said} & {*"ĠĊ▁"}


# --- every task ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_and_its_answer_fit_and_no_larger_one_does(suite, task):
    for index in (0, 1):
        sample = suite.sample(task, index)
        used = len(sample.context) + len(sample.question) + sample.max_new_tokens
        assert used <= LENGTH and sample.max_new_tokens == RULER[task.partition("_")[0]].new_tokens
        size = suite.found[task, index]
        if size < suite.forms[task].most:
            larger = suite._tokens(suite._draw(task, index, size + 1)) + sample.max_new_tokens
            assert larger > LENGTH
        else:
            assert task in ("qa_1", "qa_2")


@pytest.mark.parametrize("task", TASKS)
def test_answers_stand_in_the_context_and_score_one(suite, task):
    for index in (0, 1):
        sample = suite.sample(task, index)
        ids = suite.reader.split(" ".join(sample.references))[0]
        assert suite.grade(sample, ids).score == suite.grade(sample, sample.context).score == 1.0
        assert suite.grade(sample, sample.question).score == 0.0
        if task.startswith("niah"):
            assert all(context(suite, task, index).count(value) == 1 for value in sample.references)


@pytest.mark.parametrize("task", TASKS)
def test_spans_decode_to_what_the_answer_needs(suite, task):
    sample, made = suite.sample(task, 0), suite.draft(task, 0)
    needed = made.context[1::2]
    assert len(sample.spans) == len(needed) > 0
    for (start, end), text in zip(sample.spans, needed, strict=True):
        # The last full stop may share a token with the line end after it.
        assert decoded(suite, sample.context[start:end]).strip().rstrip(".") == text.strip().rstrip(".")


def test_a_prompt_is_the_published_text_within_the_chat_template(suite, model):
    for task in TASKS:
        sample, made = suite.sample(task, 0), suite.draft(task, 0)
        said = decoded(suite, sample.context + sample.question)
        asked = "".join(made.context) + made.question
        if model.chat_template:
            asked = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        assert said.removeprefix("<s>").lstrip() == asked + made.prefix
        opens = RULER[task.partition("_")[0]].question
        assert re.match(opens, decoded(suite, sample.question).lstrip())


@pytest.mark.rotating
def test_the_same_seed_draws_the_same_and_another_does_not(model, suite, qa):
    again = make_ruler(model, ["ruler", *qa], length=LENGTH)
    # Whatever was asked first.
    later = [again.sample(task, 1) for task in reversed(TASKS)]
    assert [*reversed(later)] == [suite.sample(task, 1) for task in TASKS]
    other = make_ruler(model, ["vt", "niah_single_1"], length=LENGTH, seed=1)
    for task in other.tasks:
        texts = {text_of(s.draft(task, i)) for s in (suite, other) for i in (0, 1)}
        assert len(texts) == 4


# --- needles ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task, keys, values, asked, kind",
    [
        ("niah_single_1", 1, 1, 1, NUMBER),
        ("niah_single_2", 1, 1, 1, NUMBER),
        ("niah_single_3", 1, 1, 1, UUID),
        ("niah_multikey_1", 4, 1, 1, NUMBER),
        ("niah_multikey_2", None, 1, 1, NUMBER),
        ("niah_multikey_3", None, 1, 1, UUID),
        ("niah_multivalue", 1, 4, 1, NUMBER),
        ("niah_multiquery", 4, 1, 4, NUMBER),
    ],
)
def test_needles_have_as_many_keys_and_values_as_published(suite, task, keys, values, asked, kind):
    made = suite.draft(task, 0)
    found = NEEDLE.findall(context(suite, task))
    by_key = Counter(key for _, key, _ in found)
    assert set(by_key.values()) == {values} and all(re.fullmatch(kind, value) for *_, value in found)
    # Haystacks of needles: one more than their size.
    assert len(by_key) == (keys or suite.found[task, 0] + 1)
    in_question = [key for key in by_key if key in made.question]
    assert len(in_question) == asked and all(key in made.prefix for key in in_question)
    assert Counter(value for _, key, value in found if key in in_question) == Counter(made.references)
    assert len(made.references) == asked * values
    one = len(made.references) == 1
    start = "A special magic {} is hidden" if one else "Some special magic {} are hidden"
    assert made.context[0].startswith(start.format(found[0][0][:-1] if one else found[0][0]))
    if task == "niah_multikey_3":
        assert all(re.fullmatch(UUID, key) for key in by_key)


@pytest.mark.parametrize("task", ["niah_single_2", "niah_multikey_1", "niah_multivalue"])
def test_a_text_around_needles_is_left_whole(suite, task):
    text = NEEDLE.sub("", context(suite, task).split("\n")[1])
    words = shipped.haystack().words[: suite.found[task, 0]]
    assert text.split() == list(words)


@pytest.mark.rotating
def test_a_short_haystack_repeats_and_a_given_one_is_used(model, tmp_path):
    file = tmp_path / "own.txt"
    file.write_text("\ufeffBees hum.  Ants\nwalk by.", encoding="utf-8")
    suite = make_ruler(model, [f"ruler:haystack={file}"], length=LENGTH)
    assert set(suite.tasks) == set(GENERATED) and len(suite.sources) == 1
    text = NEEDLE.sub("", context(suite, "niah_single_2").split("\n")[1]).split()
    assert text[:10] == ["Bees", "hum.", "Ants", "walk", "by."] * 2
    assert len(text) == suite.found["niah_single_2", 0]


# --- other tasks -----------------------------------------------------------------------------------------


def test_a_chain_assigns_one_value_to_five_names_in_order(suite):
    made = suite.draft("vt", 0)
    lines = [line.split() for line in made.context[1::2]]
    names = list(made.references)
    assert len(set(names)) == 5 and all(re.fullmatch("[A-Z]{5}", name) for name in names)
    assert lines[0][:3] == ["VAR", names[0], "="] and lines[0][3] in made.question
    assert lines[1:] == [["VAR", b, "=", "VAR", a] for a, b in zip(names, names[1:], strict=False)]
    example, rest = made.context[0].split("\n\nMemorize", 1)
    assert example.count("VAR ") == 9 and re.search(r"they are:  ([A-Z]{3} ){4}[A-Z]{3}$", example)
    assert not set(example.split()) & {*names, lines[0][3]}
    assert suite._tokens(suite.draft("vt", 0)) > 500 and rest.startswith(" and track")


@pytest.mark.parametrize("length, common, other", [(LENGTH, 6, 1), (4096, 30, 3)])
def test_common_words_repeat_as_published(model, length, common, other):
    suite = make_ruler(model, ["cwe"], length=length)
    made = suite.draft("cwe", 0)
    solved, text = "".join(made.context).split("\n\nBelow")[0].rsplit("Below", 1)[0], context(suite, "cwe")
    entries = re.findall(r"(\d+)\. ([^\d]+?)(?= \d+\.|\n|$)", text.rsplit("often.\n", 1)[1])
    assert [int(i) for i, _ in entries] == [*range(1, len(entries) + 1)]
    counts = Counter(word for _, word in entries)
    assert {w for w, n in counts.items() if n == common} == set(made.references)
    assert set(counts.values()) == {common, other} and len(counts) == suite.found["cwe", 0]
    assert solved.count("Question: What are the 10 most common words") == 1


def test_coded_words_follow_a_zeta_law(suite):
    made = suite.draft("fwe", 0)
    counts = Counter(context(suite, "fwe").split("words. ", 1)[1].split())
    (dots, most), *rest = counts.most_common()
    assert dots == "..." and [word for word, _ in rest[:3]] == list(made.references)
    # n / zeta(2) of the first rank fixes all others up to rounding.
    for rank, (word, count) in enumerate(rest, 2):
        assert abs(count - most / rank**2) < 1.01 and re.fullmatch("[a-z]{6}", word)
    assert rest[2][1] > rest[3][1]


@pytest.mark.rotating
def test_documents_hold_the_question_s_own_first(suite):
    made = suite.draft("qa_1", 4)
    numbers = re.findall(r"Document (\d+):\nArticle (\d), part (\d)", context(suite, "qa_1", 4))
    assert [int(i) for i, *_ in numbers] == [*range(1, len(numbers) + 1)]
    assert {("1", str(p)) for p in range(3)} <= {(a, p) for _, a, p in numbers}
    assert made.references == ("1115",) and made.context[1] == SQUAD["data"][1]["paragraphs"][1]["context"]
    made = suite.draft("qa_2", 2)
    assert sorted(made.context[1::2]) == [f"Gate 2{i}\nAda 2 waited. It rained." for i in (1, 3)]
    assert all(f"Gate 2{i}\n" in context(suite, "qa_2", 2) for i in range(4))
    assert suite.forms["qa_1"].contexts == 12 and suite.contexts is None
    assert len(suite.rows(11, "aware")) == 12 and len(suite.rows(12, "agnostic")) == 11


def test_few_documents_are_those_of_the_article(model, qa):
    suite = make_ruler(model, qa[:1], length=230)
    size = suite.found["qa_1", 0]
    found = re.findall(r"Document \d+:\nArticle (\d)", context(suite, "qa_1"))
    assert 1 <= size <= 3 and found == ["0"] * size and suite.contexts == 12


# --- metrics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task, written, references, score",
    [
        ("niah", " 1234567.", ["1234567"], 1.0),
        ("niah", "123456", ["1234567"], 0.0),
        ("niah", "1, 2 and 4", ["1", "2", "3", "4"], 0.75),
        ("vt", "AB CD", ["ab", "CD", "EF", "GH"], 0.5),
        ("cwe", "1. Apple 2. bear", ["apple", "bear"], 1.0),
        ("fwe", "", ["abcdef", "b", "c"], 0.0),
        ("qa", "It was ADA.", ["ada", "Grace"], 1.0),
        ("qa", "Nobody", ["ada", "Grace"], 0.0),
    ],
)
def test_metrics_are_those_of_the_benchmark(task, written, references, score):
    assert RULER[task].score(written, references, ()) == score


# --- asking ----------------------------------------------------------------------------------------------


def test_tasks_are_asked_by_name_beside_others(model):
    suite = make_suite(model, ["niah_single_1", "get"], length=600)
    assert isinstance(suite, CombinedSuite) and set(suite.tasks) == {"niah_single_1", "get"}
    assert len(suite.rows(0, "aware")) == 2
    assert make_suite(model, ["niah_single_1"]).length == 1024


@pytest.mark.parametrize(
    "tasks, said",
    [
        (["qa_1"], "give qa_1:file=FILE, SQuAD 2.0's dev-v2.0.json"),
        (["niah_single_2:haystak=x"], "no option 'haystak': did you mean 'haystack'"),
        (["vt:haystack=x"], "no option 'haystack': it has none"),
        (["ruler:qa_1"], "has the option 'qa_1', expected NAME=FILE"),
        (["niah_single_2:haystack=/none.txt"], "the haystack /none.txt cannot be read"),
        (["ruler", "niah_single_2:haystack=/none.txt"], "niah_single_2 was given with two files"),
        (["qa_2:file=/none.json"], "/none.json cannot be read"),
    ],
)
def test_wrong_options_are_one_sentence(model, tasks, said):
    with pytest.raises(InputError, match=re.escape(said)):
        make_suite(model, tasks, length=LENGTH)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "task, data, said",
    [
        ("qa_1", [], "x.json is [], expected an object"),
        ("qa_1", {"data": [{}]}, "x.json.data[0] has no field 'paragraphs'"),
        ("qa_1", {"data": [{"paragraphs": [{"context": 5, "qas": []}]}]}, "paragraphs[0].context is 5"),
        ("qa_1", {"data": []}, "holds no question"),
        ("qa_2", {}, "x.json is {}, expected a list"),
        ("qa_2", [{"question": "q", "context": [["t"]]}], "x.json[0].context[0] is ['t'], expected a pair"),
    ],
)
def test_another_schema_names_file_and_field(model, tmp_path, task, data, said):
    (tmp_path / "x.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=re.escape(said)):
        make_suite(model, [f"{task}:file={tmp_path / 'x.json'}"], length=LENGTH)


def test_a_broken_file_names_the_line(model, tmp_path):
    (tmp_path / "x.json").write_text('{"data":\n[}')
    with pytest.raises(InputError, match=r"x\.json is not JSON .*line 2"):
        make_suite(model, [f"qa_1:file={tmp_path / 'x.json'}"], length=LENGTH)


@pytest.mark.parametrize("task", GENERATED)
def test_a_short_length_says_how_many_tokens_are_needed(model, task):
    with pytest.raises(InputError, match=f"{task} takes at least") as caught:
        make_ruler(model, [task], length=140)
    needed = int(re.search(r"at least (\d+)", str(caught.value))[1])
    if task != "fwe":  # whose vocabulary grows with the length
        suite = make_ruler(model, [task], length=needed)
        assert suite.found[task, 0] == suite.forms[task].least(0)


def test_a_model_of_another_language_is_refused_in_one_sentence():
    with pytest.raises(InputError, match="knows no word"):
        make_suite(load("recall-tiny"), ["niah_single_1"])


# --- files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, digest",
    [
        ("alice29.txt", "7467306ee0feed4971260f3c87421154a05be571d944e9cb021a5713700c38f0"),
        ("nounlist.txt", "8d88b3ebc2e2969ed92ebe49cdb0c8a87c2ad3b27493d7afdff608f2e51c5bc9"),
        ("adjectivelist.txt", "66814d46b7e292c83e839d12fe2fa083c8f66779b14b294e1be4e1342c5d4131"),
        ("verblist.txt", "9fbf5e4e69b8869aebd88e6d545312ff9f878a747327ede5f6dbbba5c27b08ad"),
    ],
)
def test_shipped_files_are_unchanged(name, digest):
    assert hashlib.sha256((shipped.DATA / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("limit", [1, 5, 37, 1000])
@pytest.mark.parametrize("guess", [1, 5, 36, 999, 5000])
def test_the_largest_size_is_found_from_any_guess(limit, guess):
    assert largest(lambda size: size <= limit, 1, 10**6, guess) == limit
    assert largest(lambda size: size <= limit, limit + 1, 10**6, guess) is None
    assert largest(lambda size: True, 1, limit, guess) == limit


# --- right answers that are fed ----------------------------------------------------------------------


@pytest.mark.rotating
def test_a_fed_answer_follows_the_prompt_in_the_same_tokens(model, qa):
    """Context, question and answer are the tokens of their text; parts of the answer are the references."""
    made = make_ruler(model, ["ruler", *qa], length=LENGTH, gold=True)
    for task in made.tasks:
        sample, drawn = made.sample(task, 0), made.draft(task, 0)
        head, tail = made.chat
        gold = "".join(drawn.gold(task.partition("_")[0]))
        text = head + "".join(drawn.context) + drawn.question + tail + drawn.prefix + gold
        assert (*sample.context, *sample.question, *sample.answer) == (
            *made.reader.bos,
            *made.reader.split(text)[0],
        )
        said = [made.reader.text(sample.answer[a:b]).strip() for a, b in sample.parts]
        assert said == [*drawn.references[: 1 if task.startswith("qa") else None]]
        assert made.grade(sample, sample.answer).score == 1.0
        spoilt = [*sample.answer]
        spoilt[sample.parts[0][0]] += 1
        assert made.grade(sample, spoilt).score == pytest.approx(1 - 1 / len(said))


@pytest.mark.rotating
def test_a_fed_answer_is_as_long_as_its_task_allows(model):
    suite = make_ruler(model, ["ruler"], length=LENGTH, gold=True)
    for task in suite.tasks:
        sample = suite.sample(task, 0)
        assert len(sample.answer) <= RULER[task.partition("_")[0]].new_tokens
        assert len(sample.context) + len(sample.question) + len(sample.answer) <= LENGTH
