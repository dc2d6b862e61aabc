"""Short stories from a plot grammar: a hero, a place, a thing, a trouble, a helper and an ending."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from .heldout import story_is_held_out
from .words import (
    ANIMALS,
    OBJECT_TRAITS,
    OBJECTS,
    PEOPLE,
    PLACES,
    ROLES,
    SEASONS,
    TRAITS,
    article,
    grammar,
    plural,
)

GRAMMAR = grammar("stories")
SHE_PETS, HE_PETS = GRAMMAR["she_pets"].split(), GRAMMAR["he_pets"].split()
PLOTS: dict[str, dict[str, Any]] = GRAMMAR["plots"]


@dataclass
class Story:
    """A request with the plan and the text that answer it; `subject` names hero, plot and thing."""

    request: str
    plan: str
    text: str
    title: str
    subject: str

    @property
    def is_held_out(self) -> bool:
        """Return whether training must not see this story."""
        return story_is_held_out(self.subject)


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def make(rng: random.Random) -> Story:
    """Return one story with its request."""
    plot = rng.choice(list(PLOTS))
    is_animal = rng.random() < 0.6
    if is_animal:
        hero, name = rng.choice(ANIMALS), rng.choice([*SHE_PETS, *HE_PETS])
        pronouns = ("she", "her", "her") if name in SHE_PETS else ("he", "him", "his")
    else:
        hero = rng.choice(ROLES)
        person = rng.choice([p for p in PEOPLE if hero != "princess" or p.subject == "she"])
        name, pronouns = person.name, (person.subject, person.object, person.possessive)
    others = [x for x in (ANIMALS if is_animal else ANIMALS + ROLES) if x != hero]
    helper, third = rng.sample(others, 2)
    trait, helper_trait = rng.sample(TRAITS, 2)
    thing, thing_trait = rng.choice(OBJECTS), rng.choice(OBJECT_TRAITS)
    f = {
        "N": name,
        "p": pronouns[0],
        "P": pronouns[0].capitalize(),
        "obj": pronouns[1],
        "poss": pronouns[2],
        "P_poss": pronouns[2].capitalize(),
        "hero": hero,
        "trait": trait,
        "art_hero": article(hero),
        "art_t_hero": article(f"{trait} {hero}"),
        "o": thing,
        "art_o": article(thing),
        "art_to": article(f"{thing_trait} {thing}"),
        "helper": helper,
        "art_helper": article(helper),
        "art_H": article(f"{helper_trait} {helper}"),
        "third": third,
        "its": "its" if third in ANIMALS else "his",
        "place": rng.choice(PLACES),
        "Season": rng.choice(SEASONS),
        "hobby": rng.choice(GRAMMAR["hobbies"]),
        "walked": rng.choice(["walked", "was resting", "was playing", "stood"]),
        "many": plural(thing),
    }
    parts = PLOTS[plot]
    lines = [
        rng.choice(GRAMMAR["open"]),
        *rng.sample(GRAMMAR["likes"], rng.choice((1, 1, 2))),
        rng.choice(parts["trouble"]),
        *rng.sample(parts["try"], rng.choice((1, 2))),
        rng.choice(parts["help"]),
        rng.choice(parts["solve"]),
        rng.choice(parts["moral"]),
        rng.choice(GRAMMAR["close"]),
    ]
    sentences = [_upper(line.format(**f)) for line in lines if line]
    cut = rng.choice((2, 3, 4))
    joint = "\n\n" if rng.random() < 0.5 else " "
    text = " ".join(sentences[:cut]) + joint + " ".join(sentences[cut:])
    what = parts["ask"].format(**f)
    if rng.random() < 0.25:
        what += rng.choice([" named {N}", ", with a happy end", ", set {place}"]).format(**f)
        if what.endswith(f" named {name}"):
            what = f"{article(hero)} named {name}"
    helps = f"A {third} helps." if plot == "quarrel" else "{art_H} helps.".format(**f)
    plan = " ".join(
        [
            "The hero is {N}, {art_t_hero}, who lives {place}.".format(**f),
            parts["plan"].format(**f),
            _upper(helps),
        ]
    )
    title = f"The {_upper(hero)} and the {_upper(thing if plot != 'storm' else 'storm')}"
    return Story(
        rng.choice(GRAMMAR["requests"]).format(what=what),
        plan,
        text,
        title,
        parts["ask"].format(**f),
    )


def pick(rng: random.Random, held_out: bool) -> Story:
    """Return one story that is or is not held out."""
    while True:
        story = make(rng)
        if story.is_held_out == held_out:
            return story
