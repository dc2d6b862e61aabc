"""The demo's data: what is held out stays out of every training turn, and what is taught is true."""

import itertools
import json
import random
import re

import pytest

from bench.demo import card, chats, code, corpus, curves, heldout, judge, prompts, stories, sums
from bench.demo.code import Spec

EQUATION = re.compile(r"(\d+) ([+-]) (\d+) = (\d+)")
NUMBER = re.compile(r"\d+")


def equations(text: str) -> list[tuple[int, str, int, int]]:
    return [(int(a), op, int(b), int(r)) for a, op, b, r in EQUATION.findall(text)]


@pytest.fixture(scope="module")
def problems() -> list[sums.Sum]:
    rng = random.Random(1)
    return [sums.pick(rng, held_out=False) for _ in range(3000)]


@pytest.fixture(scope="module")
def documents() -> list[corpus.Document]:
    rng = random.Random(2)
    return [corpus.document(rng) for _ in range(3000)]


def value(plan: str) -> int:
    """Work a plan out from left to right."""
    first, *rest = re.findall(r"([+-]?) ?(\d+)", plan)
    total = int(first[1])
    for sign, number in rest:
        total += int(number) if sign == "+" else -int(number)
    return total


def test_a_sum_plans_the_numbers_of_its_question_in_their_order(problems):
    for problem in problems:
        asked, planned = NUMBER.findall(problem.question), NUMBER.findall(problem.plan())
        # "b more than a, together" uses its first number twice
        assert planned in (asked, [*asked, asked[0]])


def test_a_sum_ends_with_what_its_plan_comes_to(problems):
    for problem in problems:
        assert problem.value == value(problem.plan())
        assert problem.thinking().endswith(f"The answer is {problem.value}.")
        assert str(problem.value) in NUMBER.findall(problem.answer())
        assert str(problem.value) in NUMBER.findall(problem.worked_answer())


def test_every_written_equation_is_true(problems):
    for problem in problems:
        for text in (problem.answer(), problem.thinking()):
            # a column with a carry is a sum of three digits, of which the pattern sees the last two
            for a, op, b, r in equations(re.sub(r"(ones|tens|hundreds)[^;.]*", "", text)):
                assert r == (a + b if op == "+" else a - b), text


def test_operands_stay_below_a_hundred(problems):
    assert all(1 <= number <= 99 for problem in problems for a, _, b in problem.pairs for number in (a, b))


def test_no_training_document_works_out_a_held_out_equation(documents):
    found = [e for doc in documents for e in equations(doc.text())]
    assert len(found) > 5000
    assert not [e for e in found if heldout.equation_is_held_out(*e[:3])]


def test_an_addition_is_held_out_in_both_orders_or_in_none():
    for a in range(1, 100):
        for b in range(1, 100):
            assert heldout.equation_is_held_out(a, "+", b) == heldout.equation_is_held_out(b, "+", a)


def test_about_one_equation_in_sixteen_is_held_out_and_none_of_two_digits():
    pairs = [(a, "-", b) for a in range(10, 100) for b in range(1, a)]
    share = sum(heldout.equation_is_held_out(*p) for p in pairs) / len(pairs)
    assert 0.05 < share < 0.075
    assert not any(
        heldout.equation_is_held_out(a, op, b) for a in range(10) for b in range(10) for op in "+-"
    )


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_held_out_sum_has_a_held_out_equation(num_steps):
    rng = random.Random(3)
    for _ in range(100):
        problem = sums.pick(rng, held_out=True, num_steps=num_steps)
        assert len(problem.pairs) == num_steps
        assert any(heldout.equation_is_held_out(*pair) for pair in problem.pairs)


def test_no_training_request_describes_a_held_out_function():
    rng, keys = random.Random(4), {}
    for _ in range(4000):
        snippet = code.make(rng, True)
        assert snippet.spec is not None
        description = re.sub(r"( Use a for loop\.| Add a docstring\.)", "", snippet.request)
        keys.setdefault(snippet.description, set()).add(snippet.spec.key)
        assert snippet.description in description
    # the description tells everything that the rule looks at
    assert all(len(found) == 1 for found in keys.values())
    held = {d for d, (key,) in keys.items() if heldout.function_is_held_out(key)}
    assert len(held) > 50
    asked = " ".join(m["content"] for _ in range(2000) for m in corpus.document(rng).messages)
    assert not [d for d in held if re.search(re.escape(d) + "[.?]", asked)]


def test_no_training_story_has_a_held_out_subject():
    rng = random.Random(5)
    assert not any(stories.pick(rng, held_out=False).is_held_out for _ in range(300))
    assert all(stories.pick(rng, held_out=True).is_held_out for _ in range(20))


def test_a_copying_exercise_repeats_what_was_said():
    rng = random.Random(6)
    for _ in range(300):
        content, turns = chats.copying(rng)
        assert content in turns[0][0]
        name = content.rstrip(".").split()[-1]
        assert name in turns[-1][2]


def test_a_held_out_document_begins_with_a_held_out_turn():
    rng = random.Random(7)
    for _ in range(300):
        doc = corpus.document(rng, held_out=True)
        if doc.genre == "sums":
            last = next(m["content"] for m in doc.messages if m["role"] == "assistant")
            assert any(heldout.equation_is_held_out(*e[:3]) for e in equations(last))


def test_every_generated_function_does_what_its_reference_does():
    rng, loops = random.Random(8), 0
    for _ in range(1500):
        snippet = code.make(rng, True)
        assert snippet.spec is not None
        assert judge.refusal(snippet.code) is None
        names: dict = {}
        exec(snippet.code, names)
        for numbers in judge.cases(snippet.spec)[:4]:
            assert names[snippet.name](numbers) == judge.reference(snippet.spec, numbers), snippet.code
        assert ("for loop" in snippet.request) == ("\n    for x in" in snippet.code)
        assert ("docstring" in snippet.request) == ('"""' in snippet.code)
        loops += "for loop" in snippet.request
    assert loops > 100


SPEC = Spec("even", "squares", "sum", 0, 0)


def reply(body: str) -> str:
    return f"```python\ndef f(xs):\n    {body}\n```"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (reply("return sum(x * x for x in xs if x % 2 == 0)"), "right"),
        (reply("return sum(x for x in xs if x % 2 == 0)"), "wrong result"),
        (reply("return sum(y for x in xs)"), "fails: NameError"),
        ("I cannot do that.", "no code"),
        (reply("return sum(x for"), "refused: no valid syntax"),
        (reply("return open('x')"), "refused: calls open"),
        (reply("return xs.__class__"), "refused: uses the attribute __class__"),
        (reply("return __import__"), "refused: uses the name __import__"),
        (reply("import os"), "refused: uses Import"),
        (reply("while xs: pass"), "refused: uses While"),
        (reply("return (lambda: 1)()"), "refused: calls an expression"),
        ("```python\nx = 1\n```", "refused: not one function"),
    ],
)
def test_the_judge_runs_only_harmless_functions(text, verdict):
    assert judge.judge(text, SPEC).startswith(verdict)


def test_the_judge_stops_a_function_that_takes_all_memory():
    assert judge.judge(reply("return [x for x in range(999999999999)]"), SPEC).startswith("fails")


@pytest.mark.parametrize("path", prompts.files(), ids=lambda path: path.name)
def test_the_prompt_files_are_what_the_generator_gives(path):
    assert path.read_text() == prompts.dumps(prompts.files()[path])


def works_out_something_unseen(prompt: dict) -> bool:
    """Look for signs between the numbers of the question that give the answer over an unseen equation."""
    numbers = [int(n) for n in NUMBER.findall(prompt["prompt"])]
    numbers += numbers[: prompt["steps"] + 1 - len(numbers)]  # "b more than a, together" uses a twice
    for signs in itertools.product("+-", repeat=len(numbers) - 1):
        total, unseen = numbers[0], False
        for sign, number in zip(signs, numbers[1:], strict=True):
            unseen |= heldout.equation_is_unseen(total, sign, number)
            total += number if sign == "+" else -number
        if total == prompt["answer"] and unseen:
            return True
    return False


def test_the_prompts_are_unseen_and_the_two_sets_differ():
    first, sealed = (
        json.loads(path.read_text())[name]
        for path, name in zip(prompts.files(), ("held_out", "sealed"), strict=True)
    )
    for entries in (first, sealed):
        assert [sum(p["genre"] == g for p in entries) for g in ("sums", "code", "stories")] == [20] * 3
        for p in entries:
            if p["genre"] == "sums":
                assert works_out_something_unseen(p)
            if p["genre"] == "code":
                assert heldout.function_is_unseen(Spec(**p["function"]).key)
            if p["genre"] == "stories":
                assert heldout.story_is_unseen(p["subject"])
    assert not {p["prompt"] for p in first} & {p["prompt"] for p in sealed}


def test_what_the_first_run_saw_is_held_out_now_and_not_scored():
    seen = heldout.first_run()
    assert all(heldout.story_is_held_out(subject) for subject in seen["stories"])
    assert all(heldout.function_is_held_out(key) for key in seen["functions"])
    assert not any(heldout.function_is_unseen(key) for key in seen["functions"])
    for text in seen["equations"]:
        a, op, b = re.fullmatch(r"(\d+)([+-])(\d+)", text).groups()
        assert heldout.equation_is_held_out(int(a), op, int(b))
        assert not heldout.equation_is_unseen(
            int(b) if op == "+" else int(a), op, int(a) if op == "+" else int(b)
        )


def test_the_card_shows_the_measured_figures_and_the_picture_the_log():
    text = card.CARD.read_text()
    assert card.filled(text) == text
    rows = curves.read_log(curves.HERE / "log.csv")
    assert curves.draw(rows) == (curves.HERE / "curves.svg").read_text()
    assert curves.table(rows) in (curves.HERE / "README.md").read_text()
