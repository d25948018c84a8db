"""One row of every form of benchmark file, written for the tests in the published schema."""

import json

import jax
from tokenizers import AddedToken

from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from tests.eval.test_words import byte_level

KVPRESS = {
    "context": "The special magic number for old-tower is: 5217940. The bag stayed near the wall. " * 3,
    "question": "What is the special magic number for old-tower mentioned in the provided text?",
    "answer_prefix": " The special magic number for old-tower mentioned in the provided text is",
    "answer": ["5217940"],
    "task": "niah_single_1",
    "max_new_tokens": 9,
}
LOOGLE = {**KVPRESS, "answer": "Ada waited by the wall", "task": "shortdep_qa", "max_new_tokens": 30}
LONGBENCH = {**KVPRESS, "answers": ["the wall", "a wall"], "all_classes": None, "task": "hotpotqa"}

KV = {
    "id": 3,
    "context": '{"aa": "11", "bb": "22", "cc": "33"}',
    "multi_turns": [
        {"input": f'Key: "{key}"\nThe value associated with the specified key is:', "answer": value}
        for key, value in (("bb", "22"), ("aa", "11"), ("cc", "33"))
    ],
}
CHOICE = {
    "id": 0,
    "context": "Ada lived in a tower by the sea.",
    "multi_turns": [
        {
            "input": "Where did Ada live?",
            "options": ["a hut", "a tower", "a ship", "a tent"],
            "answer": "a tower",
        },
        {"input": "By what?", "options": ["the sea", "a hill", "a lake", "a wall"], "answer": "the sea"},
    ],
}
FIND = {
    "id": 0,
    "context": [4, 9, 2],
    "multi_turns": [
        {"input": "The largest number of the list is:", "answer": 9},
        {"input": "The smallest number of the list is:", "answer": 2},
    ],
}
TRACE = {
    "id": 0,
    "input": "VAR A = 12 \nVAR B = VAR A",
    "multi_turns": [{"input": "Which variables are 12?", "answer": ["A", "B"]}] * 2,
}
SUMMARY = {
    "id": 0,
    "context": "We study towers.",
    "multi_turns": [
        {"input": "Summarize the paper:", "answer": "Towers are studied.", "task": "scbench_summary"},
        {"input": "What is the pass key?", "answer": "71432", "task": "scbench_passkey"},
    ],
}

# One row of every task of SCBench.
SCBENCH = {
    **dict.fromkeys(("kv", "kv_hard", "kv_compressible", "hashhop", "prefix_suffix", "passkey"), KV),
    **dict.fromkeys(("qa_eng", "qa_chn", "many_shot", "summary"), KV),
    "choice_eng": CHOICE,
    "mf": FIND,
    "vt": TRACE,
    "summary_with_needles": SUMMARY,
}

V2 = {
    "_id": "66f36490821e116aacb2cc22",
    "domain": "Single-Document QA",
    "sub_domain": "Detective",
    "difficulty": "easy",
    "length": "short",
    "question": " Who waited? ",
    "choice_A": "Ada",
    "choice_B": "Grace",
    "choice_C": "Alan",
    "choice_D": "Kurt",
    "answer": "B",
    "context": "\nGrace waited by the gate of the old tower. " * 12,
}
MESSAGES = [
    {"role": "user", "content": "Write a poem about rain."},
    {"role": "assistant", "content": "Rain falls."},
    {"role": "user", "content": "Write a poem about rain."},
    {"role": "assistant", "content": "It rains again."},
    {"role": "user", "content": "Prepend x7Kq to the 2nd poem about rain. Do not include any other text."},
]
MRCR = {
    "prompt": json.dumps(MESSAGES),
    "answer": "x7KqIt rains again.",
    "random_string_to_prepend": "x7Kq",
    "n_needles": 2,
    "desired_msg_index": 3,
    "total_messages": 6,
    "n_chars": 200,
}
GRAPH = {
    "prompt": "Here is a graph as a list of directed edges.\n\nOperation:\nFind the parents of node x.\n"
    "Final Answer: []\n\nThe graph has the following edges:\nab -> cd\nef -> cd\n\n\n"
    "Operation:\nFind the parents of node cd.\n\nReturn your final answer in the last line.",
    "answer_nodes": ["ab", "ef"],
    "prompt_chars": 240,
    "problem_type": "parents",
}
BABI = {
    "input": " It was a dark night. Ada moved to the garden. The wind blew. ",
    "question": "Where is Ada? ",
    "target": "garden",
}
LONGPROC = {
    "input_prompt": "Cities: Ulm flies to Bonn. Bonn flies to Kiel.\n\nGo from Ulm to Kiel in <Route>.",
    "reference_output": "From Ulm to Bonn.\nFrom Bonn to Kiel.",
    "metadata": "{}",
}
GSM8K = {"question": "Ada has 3 pens and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
MATH = {
    "problem": "What is $1/2 + 1/4$?",
    "solution": "It is $\\boxed{\\frac{3}{4}}$.",
    "answer": "\\frac{3}{4}",
    "subject": "Algebra",
    "level": 1,
    "unique_id": "test/algebra/1.json",
}
NEEDLES = [
    {
        "id": "0401",
        "reasoning_type": "commonsense_knowledge",
        "system_prompt": "",
        "needle": "Actually, {CHAR} lives next to {1}.",
        "questions": {"onehop": "Who has been to {2}?", "twohop": "Who has been near {2}?"},
        "character_set": ["Yuki", "Stuart", "Mandy"],
        "tests": {"T10_C02": {"input_args": ["the old tower", "the sea"]}},
    }
]
TEMPLATE = "Read this:\n\n{haystack}\n\nAnswer shortly.\n\nQuestion: {question}\n\nOnly the answer."

# Where a row lies, and what it is recognised as.
ROWS = {
    "ruler.jsonl": ("kvpress", KVPRESS),
    "scbench_kv.jsonl": ("scbench", KV),
    "data.json": ("longbench-v2", V2),
    "2needle.parquet": ("mrcr", MRCR),
    "graphwalks.parquet": ("graphwalks", GRAPH),
    "qa1/4k-00000-of-00001.parquet": ("babilong", BABI),
    "path_traversal_0.5k.jsonl": ("longproc", LONGPROC),
    "gsm8k/test.jsonl": ("gsm8k", GSM8K),
    "MATH-500/test.jsonl": ("math", MATH),
}


def write(path, *rows):
    """Write a file of rows, in the form that its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows), indent=1), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chatting(chat: str | None, max_positions: int = 4096) -> Model:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    config = Config(
        vocab=960, d_model=16, layers=1, heads=2, kv_heads=1, head_dim=8, d_ff=16, max_positions=max_positions
    )
    special = {"bos_token": "<s>"}
    return Model(
        config,
        init(config, jax.random.key(0)),
        tokenizer=tokenizer,
        special_tokens=special,
        chat_template=chat,
    )
