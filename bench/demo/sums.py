"""Worded sums of one to three steps: question, written-out reasoning and answer, from templates written here.

Operands stay below 100.  Every operation is worked out digit by digit in the reasoning, in one fixed form,
so a small model can learn the algorithm instead of a table.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from .words import FOODS, PEOPLE, THINGS, plural


@dataclass
class Sum:
    """One problem; `equations` are short ("17 + 25 = 42"), `steps` the worked-out forms."""

    question: str
    steps: list[str]
    equations: list[str]
    answer: str
    value: int

    def thinking(self) -> str:
        """Return the reasoning text."""
        return " ".join([*self.steps, f"The answer is {self.value}."])


def _columns(n: int) -> list[int]:
    return [int(c) for c in reversed(str(n))]


NAMES = ("ones", "tens", "hundreds")


def add(a: int, b: int) -> str:
    """Work out a + b."""
    if a < 10 and b < 10:
        return f"{a} + {b} = {a + b}."
    da, db = _columns(a), _columns(b)
    parts, carry, width = [], 0, max(len(da), len(db))
    for i in range(width):
        terms = [d[i] for d in (da, db) if i < len(d)] + ([carry] if carry else [])
        total = sum(terms)
        text = f"{NAMES[i]} " + (f"{' + '.join(map(str, terms))} = {total}" if len(terms) > 1 else str(total))
        if total > 9 and i < width - 1:
            text += f", write {total % 10} carry 1"
        parts.append(text)
        carry = total // 10
    return f"{a} + {b}: {'; '.join(parts)}. So {a} + {b} = {a + b}."


def subtract(a: int, b: int) -> str:
    """Work out a - b for a >= b."""
    if a < 10:
        return f"{a} - {b} = {a - b}."
    da, db = _columns(a), _columns(b)
    parts, borrow = [], 0
    for i, top in enumerate(da):
        low = db[i] if i < len(db) else 0
        value = top - low - borrow
        terms = f"{top} - {low}" + (" - 1" if borrow else "")
        if value < 0:
            parts.append(f"{NAMES[i]} {terms} is too small, borrow, {value + 10}")
        else:
            parts.append(f"{NAMES[i]} {terms} = {value}")
        borrow = int(value < 0)
    return f"{a} - {b}: {'; '.join(parts)}. So {a} - {b} = {a - b}."


def multiply(a: int, k: int) -> str:
    """Work out a x k for a one-digit k."""
    if a < 10:
        return f"{a} x {k} = {a * k}."
    parts, carry, digits = [], 0, _columns(a)
    for i, d in enumerate(digits):
        total = d * k + carry
        text = f"{NAMES[i]} {d} x {k}" + (f" + {carry}" if carry else "") + f" = {total}"
        if total > 9 and i < len(digits) - 1:
            text += f", write {total % 10} carry {total // 10}"
        parts.append(text)
        carry = total // 10
    return f"{a} x {k}: {'; '.join(parts)}. So {a} x {k} = {a * k}."


def divide(a: int, k: int) -> str:
    """Work out a / k for an exact quotient."""
    return f"{k} x {a // k} = {a}, so {a} / {k} = {a // k}."


WORK = {"+": add, "-": subtract, "x": multiply, "/": divide}
APPLY = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "x": lambda a, b: a * b, "/": lambda a, b: a // b}

GAIN = [
    "{P} buys {b} more.",
    "Then {p} finds {b} more.",
    "{M} gives {o} {b} more.",
    "Later {p} gets {b} more {it}.",
    "{P} picks up {b} more {it}.",
    "Then {p} wins {b} more {it}.",
    "The next day {p} collects {b} more.",
    "{G} brings {o} {b} {it}.",
]
LOSS = [
    "{P} gives {b} to {M}.",
    "Then {p} loses {b} of them.",
    "{P} sells {b}.",
    "{P} gives away {b} {it}.",
    "Later {p} drops {b} of them.",
    "{M} borrows {b} {it}.",
    "Then {p} puts {b} {it} in a drawer for {M}.",
]
EATEN = ["{P} eats {b}.", "{P} and {M} eat {b} of them.", "A dog eats {b} {it}."]
START = [
    "{N} has {a} {it}.",
    "{N} starts with {a} {it}.",
    "There are {a} {it} in {N}'s basket.",
    "In the morning {N} has {a} {it}.",
    "{N} collects {a} {it}.",
    "{N} owns {a} {it}.",
    "{N} counts {a} {it} on the table.",
]
GROUPS = ["bags", "boxes", "baskets", "jars", "shelves", "rows", "trays", "crates"]
ASK = [
    "How many {it} does {N} have now?",
    "How many {it} does {N} have?",
    "How many {it} are there in the end?",
    "How many {it} are left with {N}?",
]
FINAL = [
    "{N} has {v} {it}.",
    "{N} has {v} {it} now.",
    "There are {v} {it}.",
    "So {N} ends up with {v} {it}.",
]


def _fields(rng: random.Random) -> dict[str, str]:
    who, other, third = rng.sample(PEOPLE, 3)
    item = rng.choice(FOODS + THINGS)
    return {
        "N": who.name,
        "p": who.subject,
        "P": who.subject.capitalize(),
        "o": who.object,
        "M": other.name,
        "G": third.name,
        "it": plural(item),
        "one": item,
    }


def _record(value: int, op: str, operand: int) -> tuple[str, str, int]:
    result = APPLY[op](value, operand)
    return WORK[op](value, operand), f"{value} {op} {operand} = {result}", result


def chain(rng: random.Random, num_steps: int) -> Sum:
    """Return a problem about one person whose count of one thing changes `num_steps` times."""
    f = _fields(rng)
    item_is_food = f["one"] in FOODS
    steps, equations, text = [], [], []
    value = rng.randint(2, 99)
    if rng.random() < 0.3:
        groups, each, kind = rng.randint(2, 9), rng.randint(2, 25), rng.choice(GROUPS)
        text.append(
            rng.choice(
                [
                    f"{f['N']} has {groups} {kind} with {each} {f['it']} each.",
                    f"There are {groups} {kind}. Each of them holds {each} {f['it']}. "
                    f"They belong to {f['N']}.",
                    f"{f['N']} fills {groups} {kind} with {each} {f['it']} in each.",
                ]
            )
        )
        work, equation, value = _record(each, "x", groups)
        steps.append(work)
        equations.append(equation)
    else:
        text.append(rng.choice(START).format(a=value, **f))
    while len(steps) < num_steps:
        op = rng.choice("+++---x/")
        if op == "/":
            divisors = [k for k in range(2, 10) if value % k == 0 and 2 <= value // k <= 12]
            if not divisors or len(steps) < num_steps - 1:
                continue
            operand = rng.choice(divisors)
            work, equation, value = _record(value, "/", operand)
            steps.append(work)
            equations.append(equation)
            question = (
                " ".join(text)
                + " "
                + rng.choice(
                    [
                        f"{f['P']} shares all of them equally among {operand} friends. "
                        f"How many {f['it']} does each friend get?",
                        f"{f['P']} puts them into {operand} equal piles. "
                        f"How many {f['it']} are in each pile?",
                    ]
                )
            )
            unit = "friend gets" if "friends" in question else "pile has"
            return Sum(question, steps, equations, f"Each {unit} {value} {f['it']}.", value)
        if op == "x":
            if value > 49:
                continue
            operand = 2 if rng.random() < 0.6 else 3
            text.append(f"Then the number of {f['it']} {'doubles' if operand == 2 else 'triples'}.")
        elif op == "+":
            operand = rng.randint(2, 99)
            if value + operand > 999:
                continue
            text.append(rng.choice(GAIN).format(b=operand, **f))
        else:
            if value < 4:
                continue
            operand = rng.randint(2, min(99, value - 2))
            text.append(rng.choice(LOSS + (EATEN if item_is_food else [])).format(b=operand, **f))
        work, equation, value = _record(value, op, operand)
        steps.append(work)
        equations.append(equation)
    question = " ".join(text) + " " + rng.choice(ASK).format(**f)
    answer = rng.choice(FINAL).format(v=value, **f)
    return Sum(question, steps, equations, answer.replace(" 1 " + f["it"], " 1 " + f["one"]), value)


def compare(rng: random.Random) -> Sum:
    """Return a problem that compares or joins two people's counts."""
    f = _fields(rng)
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    kind = rng.randrange(4)
    if kind == 0:
        text = (
            f"{f['N']} has {a} {f['it']} and {f['M']} has {b} {f['it']}. "
            f"How many {f['it']} do they have together?"
        )
        work, equation, value = _record(a, "+", b)
        return Sum(text, [work], [equation], f"Together they have {value} {f['it']}.", value)
    if kind == 1:
        a, b = max(a, b) + 1, min(a, b)
        text = f"{f['N']} has {a} {f['it']} and {f['M']} has {b}. How many more {f['it']} does {f['N']} have?"
        work, equation, value = _record(a, "-", b)
        return Sum(text, [work], [equation], f"{f['N']} has {value} more {f['it']} than {f['M']}.", value)
    if kind == 2:
        text = (
            f"{f['N']} has {a} {f['it']}. {f['M']} has {b} more than {f['N']}. "
            f"How many {f['it']} do they have together?"
        )
        work, equation, other = _record(a, "+", b)
        work2, equation2, value = _record(a, "+", other)
        return Sum(
            text,
            [f"{f['M']}: {work}", f"Together: {work2}"],
            [equation, equation2],
            f"Together they have {value} {f['it']}.",
            value,
        )
    total = rng.randint(20, 99)
    first = rng.randint(2, total - 5)
    second = rng.randint(1, total - first - 1)
    text = (
        f"A book has {total} pages. {f['N']} reads {first} pages on Monday and {second} pages on Tuesday. "
        "How many pages are left?"
    )
    work, equation, rest = _record(total, "-", first)
    work2, equation2, value = _record(rest, "-", second)
    return Sum(text, [work, work2], [equation, equation2], f"There are {value} pages left.", value)


def bare(rng: random.Random) -> Sum:
    """Return a sum without a story."""
    op = rng.choice("++--x")
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    if op == "-":
        a, b = max(a, b), min(a, b)
    if op == "x":
        b = rng.randint(2, 9)
    words = {
        "+": ("plus", "Add {a} and {b}."),
        "-": ("minus", "Subtract {b} from {a}."),
        "x": ("times", "Multiply {a} by {b}."),
    }
    work, equation, value = _record(a, op, b)
    text = rng.choice(
        [
            f"What is {a} {op} {b}?",
            f"What is {a} {words[op][0]} {b}?",
            f"{a} {op} {b} = ?",
            words[op][1].format(a=a, b=b),
            f"How much is {a} {op} {b}?",
            f"Calculate {a} {op} {b}.",
        ]
    )
    return Sum(text, [work], [equation], rng.choice([f"{a} {op} {b} = {value}.", f"It is {value}."]), value)


def make(rng: random.Random) -> Sum:
    """Return one problem; one-step ones are the most common."""
    u = rng.random()
    if u < 0.2:
        return bare(rng)
    if u < 0.4:
        return compare(rng)
    return chain(rng, rng.choice((1, 1, 2, 2, 3)))
