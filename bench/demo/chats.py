"""Small talk: greetings, what the model is, what it cannot do, closed word games and exercises in copying."""

from __future__ import annotations

import random

from .heldout import exercise_is_held_out
from .words import (
    ANIMALS,
    FOODS,
    OBJECT_TRAITS,
    OBJECTS,
    PEOPLE,
    ROLES,
    THINGS,
    TRAITS,
    article,
    grammar,
    plural,
)

GRAMMAR = grammar("chats")
DAYS, MONTHS = GRAMMAR["days"].split(), GRAMMAR["months"].split()

Turn = tuple[str, str, str]


def _word_game(rng: random.Random) -> Turn:
    kind = rng.randrange(8)
    if kind == 0:
        thing, color = rng.choice(list(GRAMMAR["colors"].items()))
        return (
            f"What color is {thing}?",
            f"The usual color of {thing} is {color}.",
            f"{thing.capitalize()} is {color}.",
        )
    if kind == 1:
        a, b = rng.choice(list(GRAMMAR["opposites"].items()))
        if rng.random() < 0.4:
            a, b = b, a
        return f"What is the opposite of {a}?", f"The opposite of {a} is {b}.", f"The opposite of {a} is {b}."
    if kind == 2:
        i = rng.randrange(7)
        return (
            f"Which day comes after {DAYS[i]}?",
            f"After {DAYS[i]} comes {DAYS[(i + 1) % 7]}.",
            f"{DAYS[(i + 1) % 7]}.",
        )
    if kind == 3:
        i = rng.randrange(12)
        return (
            f"Which month comes after {MONTHS[i]}?",
            f"After {MONTHS[i]} comes {MONTHS[(i + 1) % 12]}.",
            f"{MONTHS[(i + 1) % 12]} comes after {MONTHS[i]}.",
        )
    if kind == 4:
        noun = rng.choice(ANIMALS + THINGS + OBJECTS)
        return (
            f"What is the plural of {noun}?",
            f"One {noun}, two {plural(noun)}.",
            f"The plural of {noun} is {plural(noun)}.",
        )
    if kind == 5:
        animal, sound = rng.choice(list(GRAMMAR["sounds"].items()))
        return f"What sound does a {animal} make?", f"A {animal} says {sound}.", f'A {animal} says "{sound}".'
    if kind == 6:
        words = rng.sample(ANIMALS, 3)
        ordered = ", ".join(sorted(words))
        return (
            f"Sort these words: {', '.join(words)}.",
            f"By the first letters the order is {ordered}.",
            f"{ordered}",
        )
    lo = rng.randint(1, 40)
    numbers = ", ".join(str(n) for n in range(lo, lo + 6))
    return f"Count from {lo} to {lo + 5}.", f"I start at {lo} and stop at {lo + 5}.", f"{numbers}."


def make(rng: random.Random) -> Turn:
    """Return (user text, reasoning, reply) of one small-talk turn."""
    kind = rng.choices(("greet", "name", "who", "can", "unknown", "game"), (3, 1, 3, 2, 2, 6))[0]
    if kind == "greet":
        return (
            rng.choice(GRAMMAR["greetings"]) + rng.choice(GRAMMAR["greet_tails"]),
            "The user greets me. I greet back.",
            rng.choice(GRAMMAR["greet_replies"]),
        )
    if kind == "name":
        name = rng.choice(PEOPLE).name
        text = rng.choice(["My name is {n}.", "Hi, I am {n}.", "Hello, my name is {n}."]).format(n=name)
        return (
            text,
            f"The user is called {name}. I greet back.",
            rng.choice(GRAMMAR["name_replies"]).format(n=name),
        )
    if kind == "who":
        return (
            rng.choice(GRAMMAR["who"]),
            "The user asks who I am. I say what I am.",
            rng.choice(GRAMMAR["who_replies"]),
        )
    if kind == "can":
        return (
            rng.choice(GRAMMAR["can"]),
            "The user asks what I can do. I name my three subjects.",
            rng.choice(GRAMMAR["can_replies"]),
        )
    if kind == "unknown" and rng.random() < 0.25:
        text = rng.choice(GRAMMAR["products"]).format(a=rng.randint(2, 99), b=rng.randint(2, 20))
        return text, "I only know + and -. I say so.", GRAMMAR["product_reply"]
    if kind == "unknown":
        text = rng.choice(GRAMMAR["unknown"]).format(
            x=rng.choice(GRAMMAR["lands"].split()),
            n=rng.randint(2, 6),
            y=rng.choice(["a " + rng.choice(OBJECTS), "my " + rng.choice(THINGS)]),
        )
        return text, "I do not know this. I say so.", rng.choice(GRAMMAR["unknown_replies"])
    return _word_game(rng)


WORDS = sorted({*ANIMALS, *FOODS, *THINGS, *OBJECTS, *ROLES, *TRAITS, *OBJECT_TRAITS})
REPEAT = ["Repeat after me: {x}.", "Say this: {x}.", "Please repeat: {x}.", "Repeat: {x}.", "Say {x}."]


def _content(rng: random.Random) -> str:
    """Return two to twelve random words, names and numbers."""
    pools = (WORDS, [p.name for p in PEOPLE], [str(n) for n in range(1, 100)])
    kinds = rng.choice([(0,), (0,), (1,), (1,), (2,), (0, 1, 2)])
    joint = rng.choice([" ", ", "])
    return joint.join(rng.choice(pools[rng.choice(kinds)]) for _ in range(rng.randint(2, 12)))


def copying(rng: random.Random) -> tuple[str, list[Turn]]:
    """Return what is to be copied and the exercise: say it in this turn, or remember it for the next."""
    kind = rng.randrange(5)
    if kind < 3:
        content = _content(rng)
        return content, [(rng.choice(REPEAT).format(x=content), f"I repeat: {content}.", f"{content}.")]
    if kind == 3:
        name = rng.choice(PEOPLE).name
        hello = rng.choice(["My name is {n}.", "Hi, I am {n}.", "Hello, my name is {n}."]).format(n=name)
        reply = rng.choice(GRAMMAR["name_replies"]).format(n=name)
        return hello, [
            (hello, f"The user is called {name}. I greet back.", reply),
            ("What is my name?", f"The user is called {name}.", f"Your name is {name}."),
        ]
    count, things = rng.randint(2, 99), plural(rng.choice(THINGS))
    have = f"{article(rng.choice(OBJECT_TRAITS))} {rng.choice(OBJECTS)} and {count} {things}"
    reply = f"The user has {have}.", f"You have {have}."
    return have, [(f"I have {have}.", *reply), ("What do I have?", *reply)]


def pick_copying(rng: random.Random, held_out: bool) -> list[Turn]:
    """Return a copying exercise that is or is not held out."""
    while True:
        content, turns = copying(rng)
        if exercise_is_held_out(content) == held_out:
            return turns


def closing(rng: random.Random) -> Turn:
    """Return a thanks or goodbye turn."""
    if rng.random() < 0.7:
        return rng.choice(GRAMMAR["thanks"]), "The user says thanks.", rng.choice(GRAMMAR["thanks_replies"])
    return rng.choice(GRAMMAR["byes"]), "The user says goodbye.", rng.choice(GRAMMAR["bye_replies"])
