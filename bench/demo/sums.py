"""Worded sums of one to three steps: question, written-out reasoning and answer, from templates written here.

Only + and -; every operand, also a result that is worked on, is below 100.  The reasoning begins with what is
counted and the plan, the question's numbers in the question's order ("The apples of Tom: 17 + 25 - 8."), and
then works out every step digit by digit in one fixed form.  So a small model can learn to read, to copy and
to add columns instead of a table.  Reasoning and answer follow from the question alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from .heldout import equation_is_held_out
from .words import FOODS, PEOPLE, THINGS, plural

Pair = tuple[int, str, int]


@dataclass
class Sum:
    """One problem: `pairs` are the steps in order, `subject` says what is counted, `conclusion` how many."""

    question: str
    pairs: list[Pair]
    conclusion: str
    subject: str = ""

    @property
    def value(self) -> int:
        """Return the result of the last step."""
        return result(self.pairs[-1])

    @property
    def is_held_out(self) -> bool:
        """Return whether some step is a held-out equation."""
        return any(equation_is_held_out(*pair) for pair in self.pairs)

    def plan(self) -> str:
        """Return the whole sum in one line, with the question's numbers in its order."""
        rest = "".join(f" {op} {b}" for _, op, b in self.pairs)
        return f"{self.pairs[0][0]}{rest}."

    def work(self) -> str:
        """Return what is counted, the plan, and every step worked out."""
        plan = f"{self.subject}: {self.plan()}" if self.subject else self.plan()
        return " ".join([plan, *(WORK[op](a, b) for a, op, b in self.pairs)])

    def thinking(self) -> str:
        """Return the reasoning text."""
        return f"{self.work()} The answer is {self.value}."

    def answer(self) -> str:
        """Return the reply after the reasoning: the equations, then a sentence if the question was worded."""
        equations = ", ".join(f"{a} {op} {b} = {result((a, op, b))}" for a, op, b in self.pairs) + "."
        return f"{equations} {self.conclusion}".rstrip()

    def worked_answer(self) -> str:
        """Return the reply without reasoning before it, which works the sum out by itself."""
        return f"{self.work()} {self.conclusion or f'The answer is {self.value}.'}"


def result(pair: Pair) -> int:
    """Return the value of one step."""
    a, op, b = pair
    return a + b if op == "+" else a - b


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


WORK = {"+": add, "-": subtract}

GAIN = [
    "buys {b} more",
    "buys {b} more {it}",
    "finds {b} more",
    "gets {b} more",
    "gets {b} more {it} from {M}",
    "picks up {b} more {it}",
    "wins {b} more",
    "collects {b} more",
    "makes {b} more {it}",
]
LOSS = [
    "gives {b} to {M}",
    "gives {b} {it} to {M}",
    "gives away {b}",
    "loses {b}",
    "loses {b} of them",
    "sells {b}",
    "sells {b} {it}",
    "drops {b} of them",
    "lends {b} to {M}",
]
EATEN = ["eats {b}", "eats {b} of them"]
OTHERS = {
    "+": ["{M} gives {o} {b} more.", "{M} brings {o} {b} {it}.", "Then {M} gives {o} {b} {it}."],
    "-": ["{M} takes {b} of them.", "{M} borrows {b} {it}.", "Then {M} takes away {b} {it}."],
}
SENTENCES = ["{P} {does}.", "{P} {does}.", "Then {p} {does}.", "Later {p} {does}.", "{N} {does}."]
START = [
    "{N} has {a} {it}",
    "{N} has {a} {it}",
    "{N} has {a} {it}",
    "{N} starts with {a} {it}",
    "{N} owns {a} {it}",
    "{N} collects {a} {it}",
    "In the morning {N} has {a} {it}",
]
ASK = [
    "How many {it} does {N} have now?",
    "How many {it} does {N} have?",
    "How many {it} does {p} have?",
    "How many {it} does {p} have now?",
    "How many {it} are there in the end?",
]
ASK_LESS = [
    "How many {it} are left?",
    "How many {it} does {p} have left?",
    "How many {it} does {N} have left?",
]
ASK_MORE = ["How many {it} does {N} have in total?", "How many {it} does {p} have altogether?"]
PLAIN = ["What is {s}?", "What is {s}?", "{s} = ?", "How much is {s}?", "Calculate {s}.", "{s}"]


def _fields(rng: random.Random) -> dict[str, str]:
    who, other = rng.sample(PEOPLE, 2)
    item = rng.choice(FOODS + THINGS)
    return {
        "N": who.name,
        "p": who.subject,
        "P": who.subject.capitalize(),
        "o": who.object,
        "M": other.name,
        "it": plural(item),
    }


def _steps(rng: random.Random, num_steps: int) -> list[Pair] | None:
    """Return random steps, each working on the last result, or None beyond the range or for a result of 1."""
    value, pairs = rng.randint(2, 99), []
    for _ in range(num_steps):
        if value > 99:
            return None
        op = rng.choice("+-")
        if op == "-" and value < 4:
            op = "+"
        operand = rng.randint(2, 99 if op == "+" else min(99, value - 1))
        pairs.append((value, op, operand))
        value = result(pairs[-1])
    return None if value == 1 else pairs


def steps(rng: random.Random, num_steps: int) -> list[Pair]:
    """Return random steps within the range."""
    while True:
        pairs = _steps(rng, num_steps)
        if pairs is not None:
            return pairs


def chain(rng: random.Random, num_steps: int) -> Sum:
    """Return a problem about one person whose count of one thing changes `num_steps` times."""
    f = _fields(rng)
    pairs = steps(rng, num_steps)
    losses = LOSS + (EATEN if f["it"] in map(plural, FOODS) else [])
    sentences = [rng.choice(START).format(a=pairs[0][0], **f)]
    for i, (_, op, b) in enumerate(pairs):
        if rng.random() < 0.15:
            sentences.append(rng.choice(OTHERS[op]).format(b=b, **f))
            continue
        does = rng.choice(GAIN if op == "+" else losses).format(b=b, **f)
        joins = rng.random() < (0.4 if i == 0 else 0.25) and not sentences[-1].endswith(".")
        if joins and " and " not in sentences[-1]:
            sentences[-1] += f" and {does}"
        elif joins and i > 1 and rng.random() < 0.5:
            sentences[-1] += f", and then {does}"
        else:
            sentences.append(rng.choice(SENTENCES).removesuffix(".").format(does=does, **f))
    ops = {op for _, op, _ in pairs}
    asks = ASK + (ASK_LESS if ops == {"-"} else ASK_MORE if ops == {"+"} else [])
    text = " ".join(s.removesuffix(".") + "." for s in sentences)
    value = result(pairs[-1])
    return Sum(
        f"{text} {rng.choice(asks).format(**f)}",
        pairs,
        f"{f['N']} has {value} {f['it']}.",
        f"The {f['it']} of {f['N']}",
    )


def compare(rng: random.Random) -> Sum:
    """Return a problem that joins or compares two people's counts."""
    f = _fields(rng)
    if rng.random() < 0.5:
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        text = rng.choice(
            [
                "{N} has {a} {it} and {M} has {b} {it}. How many {it} do they have together?",
                "{N} has {a} {it} and {M} has {b}. How many {it} do they have together?",
                "{N} has {a} {it}. {M} has {b} {it}. How many {it} do they have in total?",
            ]
        ).format(a=a, b=b, **f)
        return Sum(text, [(a, "+", b)], f"Together they have {a + b} {f['it']}.", f"The {f['it']} together")
    a = rng.randint(4, 99)
    b = rng.randint(2, a - 2)
    text = rng.choice(
        [
            "{N} has {a} {it} and {M} has {b}. How many more {it} does {N} have?",
            "{N} has {a} {it} and {M} has {b} {it}. How many more {it} does {N} have than {M}?",
        ]
    ).format(a=a, b=b, **f)
    conclusion = f"{f['N']} has {a - b} more {f['it']}."
    return Sum(text, [(a, "-", b)], conclusion, f"The {f['it']} of {f['N']}")


def two_people(rng: random.Random) -> Sum:
    """Return a problem of two steps in which one number is used twice: a, b more than a, together."""
    f = _fields(rng)
    a = rng.randint(2, 60)
    b = rng.randint(2, 99 - a)
    text = "{N} has {a} {it}. {M} has {b} more than {N}. How many {it} do they have together?"
    return Sum(
        text.format(a=a, b=b, **f),
        [(a, "+", b), (a + b, "+", a)],
        f"Together they have {a + b + a} {f['it']}.",
        f"The {f['it']} together",
    )


def book(rng: random.Random) -> Sum:
    """Return a problem about a book that is read on two days."""
    f = _fields(rng)
    total = rng.randint(20, 99)
    first = rng.randint(2, total - 6)
    second = rng.randint(2, total - first - 2)
    left = total - first - second
    text = (
        f"A book has {total} pages. {f['N']} reads {first} pages on Monday and {second} pages on Tuesday. "
        "How many pages are left?"
    )
    conclusion = f"There are {left} pages left."
    pairs = [(total, "-", first), (total - first, "-", second)]
    return Sum(text, pairs, conclusion, "The pages")


def bare(rng: random.Random, num_steps: int) -> Sum:
    """Return a sum without a story."""
    pairs = steps(rng, num_steps)
    sign = {"+": "plus", "-": "minus"}
    words = rng.random() < 0.2
    text = str(pairs[0][0])
    for _, op, b in pairs:
        text += f" {sign[op] if words else op} {b}"
    if num_steps == 1 and pairs[0][1] == "+" and rng.random() < 0.15:
        return Sum(f"Add {pairs[0][0]} and {pairs[0][2]}.", pairs, "")
    return Sum(rng.choice(PLAIN).format(s=text), pairs, "")


def make(rng: random.Random, num_steps: int | None = None) -> Sum:
    """Return one problem, of `num_steps` steps if given; shorter ones are more common."""
    n = num_steps or rng.choices((1, 2, 3), (42, 33, 25))[0]
    u = rng.random()
    if u < 0.2:
        return bare(rng, n)
    if n == 1 and u < 0.4:
        return compare(rng)
    if n == 2 and u < 0.35:
        return two_people(rng) if u < 0.27 else book(rng)
    return chain(rng, n)


def pick(rng: random.Random, held_out: bool, num_steps: int | None = None) -> Sum:
    """Return one problem that is or is not held out."""
    while True:
        problem = make(rng, num_steps)
        if problem.is_held_out == held_out:
            return problem
