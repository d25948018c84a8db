"""Written answers whose scores the benchmarks' own code recorded: (family, task, right answer, texts)."""

TSV = "name\tyear\nThe Tower\t1901\nA bridge, old\t1888"
ROUTE = "From Ulm, take a bus to Bonn.\nFrom Bonn, take a train to Kiel."
BELIEFS = "- Step 1: Ada believes the pen is in the box.\n- Step 2: Ada knows the pen is on the table."
PLAN = {"ground_truth_cities": "Ulm**Bonn**Kiel", "ground_truth_durations": "3**2**4"}
DAYS = (
    "**Day 1-{}:** Arriving in Ulm and visit Ulm.\n**Day {}:** Fly from Ulm to Bonn.\n"
    "**Day 3-4:** Visit Bonn.\n"
    "**Day 4:** Fly from Bonn to {}.\n**Day 4-7:** Visit it."
)
COUNTDOWN = {"nums": [40, 19, 23, 7], "target": 29}
CHOICES = [
    "B",
    "(B)",
    "B. a tower",
    "a tower",
    "The answer is B",
    "answer: B or C",
    "A or B",
    "",
    "I think C.",
    "AB",
    "The letter of the correct answer is\nB",
    "option is B",
    "the answer is:",
    "no letter",
    "B and then D",
    "A tower stands there",
    "The answer is: a tower",
    "Definitely B\nA",
]
NUMBERS = ["12", "It is 12.", "3.5", "-12", "", "none", "12.9 or so", "1 2", "012", "It is 112", "12,5"]
WORDS = ["Ada", "ada lovelace", "It was ADA!", "", "Ad", "the Ada of old", "grace, ada"]
CODE = ["42", "The return value is 42", "42.", "`42`", "42 is it", "", "4 2", "-42", "it returns: 42'"]
DEBUG = [
    "B",
    "run_fast",
    "The correct option is: B",
    "answer is: B",
    "Option B",
    "A. or B",
    "C",
    "",
    "B then D",
    "the answer is: run_fast",
    "is: C",
    "-run_fast-",
]
SENTENCES = [
    "Ada waited by the wall",
    "Ada waited. By the wall she stood.",
    "the wall",
    "",
    "wall the by waited Ada",
    "Ada waited by the wall.\nShe waited by the wall.",
    "Grace ran.",
    "ada WAITED by the Wall!",
]
SUMMED = "Ada waited by the wall.\nThe red tower fell. Then Ada left the tower by the sea."

CASES = [
    *(("infinitebench", "longbook_choice_eng", ["B"], text) for text in CHOICES),
    *(
        ("infinitebench", "kv_retrieval", ["ab-12"], t)
        for t in ("ab-12", "key: ab-12.", "ab-123", '"ab-12"', "")
    ),
    *(("infinitebench", "passkey", ["12"], text) for text in NUMBERS),
    *(("infinitebench", "number_string", ["12"], text) for text in NUMBERS),
    *(("infinitebench", "longdialogue_qa_eng", ["ADA", "GRACE"], text) for text in WORDS),
    *(("infinitebench", "longbook_qa_eng", ["Ada Lovelace", "the Ada"], text) for text in WORDS),
    *(
        ("infinitebench", "longbook_qa_chn", ["北京城", "上海"], t)
        for t in ("在北京。", "北京 城", "", "上 海！", "东京")
    ),
    *(("infinitebench", "code_run", [42], text) for text in CODE),
    *(("infinitebench", "code_debug", ["run_fast", "B"], text) for text in DEBUG),
    *(("infinitebench", "math_find", [12], t) for t in NUMBERS if "." not in t),
    *(("infinitebench", "math_find", [3.5], t) for t in NUMBERS),
    *(
        ("infinitebench", "math_calc", [1, 4, 8], t)
        for t in ("[1, 4, 8]", "1 4", "1, 5, 8", "", "4", "1 4 8 9")
    ),
    *(("scbench", "choice_eng", ["a tower", "B"], text) for text in CHOICES),
    *(("scbench", "kv", ["12"], t) for t in ("12", "key 12.", "1 2", "")),
    *(("scbench", "passkey", ["12"], text) for text in NUMBERS),
    *(("scbench", "qa_eng", ["Ada"], text) for text in WORDS),
    *(("scbench", "many_shot", ["(A)"], t) for t in ("(A)", "(a) is it", "A", "(B)")),
    *(("scbench", "qa_chn", ["北京城"], t) for t in ("在北京。", "北京 城", "")),
    *(("scbench", "mf", [12], text) for text in NUMBERS),
    *(("scbench", "vt", ["A1", "B2", "C3"], t) for t in ("A1 and b2", "a1 b2 c3", "", "C33")),
    *(
        ("scbench", "summary", [SUMMED], text)
        for text in (*SENTENCES, SUMMED, "The tower fell.\n\nAda left.")
    ),
    *(("loogle", "shortdep_qa", [SENTENCES[0]], text) for text in SENTENCES if text),
    *(("loogle", "shortdep_qa", [SENTENCES[5]], text) for text in SENTENCES if text),
    *(
        ("longbench-v2", "longbench-v2", ["B"], t)
        for t in (
            "The correct answer is (B)",
            "The correct answer is B.",
            "**The correct answer is (B)**",
            "(B)",
            "",
            "The correct answer is (A). The correct answer is (B)",
            "The correct answer is A, (B)",
            "The correct answer is A. The correct answer is (B)",
            "the correct answer is (B)",
        )
    ),
    *(
        ("babilong", "qa1", ["garden", "Where is Ada?"], t)
        for t in (
            "garden",
            "The garden. Not the kitchen.",
            "garden or kitchen",
            "",
            "It is in the Garden",
            "hall",
        )
    ),
    *(
        ("babilong", "qa4", ["garden", "What is the kitchen south of?"], t)
        for t in ("garden", "the kitchen is south of the garden", "kitchen", "garden, office")
    ),
    *(
        ("babilong", "qa8", ["apple,milk", "What is Ada carrying?"], t)
        for t in ("apple, milk", "milk and apple", "apple", "apple,milk,football", "nothing")
    ),
    *(
        ("babilong", "qa19", ["s,e", "How do you go from the kitchen to the garden?"], t)
        for t in ("s,e", "S,E.", "e,s", "s, e", "s,e or n,n")
    ),
    *(
        ("longproc", "path_traversal", [ROUTE, {}], t)
        for t in (
            f"<Route>\n{ROUTE}\n</Route>",
            ROUTE,
            f"<Route>{ROUTE}",
            f"<Route>\n{ROUTE.lower()}\n</Route>",
        )
    ),
    *(
        ("longproc", "tom_tracking", [BELIEFS, {}], t)
        for t in (
            BELIEFS,
            "So:\n" + BELIEFS.replace("believes", "thinks") + "\nDone.",
            BELIEFS.split("\n")[0],
            "",
            BELIEFS.replace("box", "bag"),
            BELIEFS.replace("\n", "\n  "),
        )
    ),
    *(
        ("longproc", "countdown", ["", COUNTDOWN], f"<Solution>\n{t}\n</Solution>")
        for t in (
            "40 - 19 = 21\n23 + 7 = 30\n21 + 30 = 51",
            "40 - 23 = 17\n19 - 7 = 12\n17 + 12 = 29",
            "40 + 19 = 59\n59 - 23 = 36\n36 - 7 = 29",
            "40 + 19 = 59\n59 - 23 = 36",
            "29 + 0 = 29\n1 + 1 = 2\n2 + 2 = 4",
            "40 + 19 = 58\n58 - 23 = 35\n35 - 6 = 29",
            "7 - 19 = -12\n-12 + 40 = 28\n28 + 23 = 51",
            "7 - 23 = -16\n-16 + 40 = 24\n24 - 19 = 5",
            "40 + 19 = 59\n59 - 23 = 36\n36 - 7 = twenty",
        )
    ),
    *(
        ("longproc", "travel_planning", ["", PLAN], f"<Plan>\n{t}\n</Plan>")
        for t in (
            DAYS.format(3, 3, "Kiel"),
            DAYS.format(4, 4, "Kiel"),
            DAYS.format(3, 3, "Rome"),
            "Ulm, Bonn, Kiel",
            "Here is the trip plan for visiting the 3 European cities for 7 days:\n\n"
            + DAYS.format(3, 3, "Kiel"),
        )
    ),
    *(
        ("longproc", "html_to_tsv", [TSV, {}], t)
        for t in (
            f"```tsv\n{TSV}\n```",
            TSV,
            f"```tsv\n{TSV}",
            "name\tyear\ntower\t1901\nbridge\t1888",
            "",
            "name\tyear",
            "name\tyear\nBridge, old\t1888\nTOWER\t1901",
            "name\nTower\nBridge",
            f"```tsv\n{TSV}\nx\ty\nz\n```",
            "name\tyear\nThe Tower\t1901\nBridge\nA bridge, old\t1888",
        )
    ),
    *(
        ("kvpress", task, ["12"], text)
        for task in ("math500", "aime25")
        for text in (
            "\\boxed{12}",
            "\\boxed{1} \\boxed{12}",
            "\\boxed{12} \\boxed{1}",
            "12",
            "",
            "\\boxed{\\frac{1}{2}}",
        )
    ),
    *(
        ("kvpress", task, ["5217940", "Ada"], text)
        for task in ("niah_multivalue", "vt", "qa_2")
        for text in ("5217940 and ada.", "521\n7940", "\x00 ADA", "ADA", "", "5217")
    ),
    *(
        ("kvpress", "shortdep_cloze", ["{'<mask-0>': 'Ada', '<mask-1>': 'Ulm'}"], text)
        for text in (
            "{'<mask-0>': 'Ada', '<mask-1>': 'Ulm'}",
            " {'<mask-0>': 'Ada', '<mask-1>': 'Bonn', '<mask-2>': 'x'}",
            "{'<mask-0>': 'Ada'",
            "['Ada']",
            "",
            "{'<mask-1>': 'Ulm'}",
        )
    ),
    *(
        ("kvpress", "longbench-v2", ["B"], text)
        for text in (
            "The correct answer is (B)",
            "The correct answer is B",
            "(B)",
            "**The correct answer is** (B)",
        )
    ),
    *(
        ("boxed", "math", [right], said)
        for said, right in (
            ("\\frac{1}{2}", "0.5"),
            ("\\dfrac12", "\\frac{1}{2}"),
            ("1,000", "1000"),
            ("x = 3", "3"),
            ("3", "4"),
            ("\\sqrt3", "\\sqrt{3}"),
            ("50\\%", "50"),
            ("\\text{east}", "east"),
            ("90^\\circ", "90"),
            ("-3", "3"),
            ("(1, 2)", "(1,2)"),
            ("\\$5", "5"),
            ("5 \\text{ cm}", "5"),
            ("2/4", "\\frac{1}{2}"),
            ("7.0", "7"),
            (".5", "0.5"),
            ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})"),
            ("10", "100"),
        )
    ),
]
