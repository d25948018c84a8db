"""The arguments with which RULER's own generator wrote tests/fixtures/authors/ruler.json, and its output."""

import json
import re
from pathlib import Path

from kvjax.eval.tasks.ruler.suite import TASKS

FILE = Path(__file__).parents[1] / "fixtures" / "authors" / "ruler.json"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
NEEDLE = re.compile(r"One of the special magic (\w+) for (.+?) is: ([\w-]+)\.")
# Task and length of every record.
LENGTHS = [*((task, 1500) for task in TASKS), ("cwe", 4096)]
SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"Article {a}, part {p}. The tower {a}{p} was built in the year 1{a}{p}5.",
                    "qas": [
                        {
                            "question": f"When was tower {a}{p} built?",
                            "answers": [{"text": f"1{a}{p}5"}],
                            "is_impossible": False,
                        },
                        {"question": "Why?", "answers": [], "is_impossible": True},
                    ],
                }
                for p in range(3)
            ]
        }
        for a in range(4)
    ]
}
HOTPOT = [
    {
        "question": f"Who waited at gate {q}?",
        "answer": f"Ada {q}",
        "context": [[f"Gate {q}{i}", [f"Ada {q} waited. ", "It rained."]] for i in range(4)],
        "supporting_facts": [[f"Gate {q}1", 0], [f"Gate {q}3", 1], [f"Gate {q}3", 0]],
    }
    for q in range(5)
]


def pieces(text):
    """Tokens of the records: up to four letters or digits, or any one other sign."""
    return re.findall(r"\w{1,4}|\S", text)


def records():
    return json.loads(FILE.read_text())
