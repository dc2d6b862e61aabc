"""Short stories from a plot grammar: a hero, a place, a thing, a trouble, a helper and an ending that fits."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .words import ANIMALS, OBJECT_TRAITS, OBJECTS, PEOPLE, PLACES, ROLES, SEASONS, TRAITS, article, plural

PET_NAMES = ("Pip Bramble Hazel Moss Fern Tuck Willow Nib Rusty Poppy Dusk Clover Barley Juniper Flint Maple Wisp "
             "Thistle Pebble Acorn").split()

OPEN = [
    "{Season}, {art_t_hero} named {N} {walked} {place}.",
    "Once upon a time there was {art_t_hero} named {N} who lived {place}.",
    "There once lived {art_t_hero} {place}. {P_poss} name was {N}.",
    "{N} was {art_t_hero} who lived {place}.",
    "Long ago, {place}, there lived {art_t_hero} called {N}.",
    "{Season}, {N} the {hero} sat {place} and looked at the sky.",
]
LIKES = [
    "{P} loved to {hobby}, and {p} did it every day.", "Every day {p} liked to {hobby}.",
    "What {p} liked most was to {hobby}.", "{P} had {art_o} that {p} took everywhere.",
    "People said that {N} was the most {trait} {hero} of all.", "{P} dreamed of seeing the world.",
    "{P} lived alone, but {p} had many friends.", "Nobody could {hobby} as well as {N}.",
]
HOBBIES = ("sing songs", "count the stars", "bake bread", "climb trees", "swim in the lake", "draw pictures",
           "tell jokes", "collect shells", "read old books", "dance in the rain", "grow flowers", "watch the boats",
           "build little houses", "listen to the wind")

LOST = {
    "trouble": [
        "One day {p} could not find {poss} {o}.", "But when {p} woke up, the {o} was gone.",
        "On the way home {p} lost {poss} {o}.", "Then a strong wind came and carried the {o} away.",
    ],
    "try": [
        "{P} looked under the bed and behind the door, but it was not there.",
        "{P} searched the whole house and found only dust.", "{P} walked back along the path, step by step.",
        "{P} asked everyone in the street, but nobody had seen it.", "{P} looked in every corner until it was dark.",
    ],
    "help": [
        "{art_H} heard about it and said, \"I will help you look.\"",
        "Then {p} met {art_H}. \"I saw something shiny near the bridge,\" said the {helper}.",
        "{art_H} came by and asked, \"Why are you so sad?\" {N} told the whole story.",
        "\"Do not cry,\" said {art_H}. \"Two can search better than one.\"",
    ],
    "solve": [
        "Together they found the {o} under a pile of leaves.", "They followed the path and there it was, the {o}, in the tall grass.",
        "At last they saw the {o} hanging in a tree, and the {helper} brought it down.",
        "In the end the {o} had been in {poss} own bag all the time, and they both laughed.",
    ],
    "moral": [
        "From then on {N} always looked after {poss} things.", "{N} learned that a friend is worth more than any {o}.",
        "That night {N} put the {o} in a safe place and slept well.",
    ],
}
STORM = {
    "trouble": [
        "Suddenly dark clouds came and a great storm began.", "Then the rain started, and it did not stop for three days.",
        "That night the wind blew so hard that the roof began to shake.", "All at once it grew dark and thunder rolled over the hills.",
    ],
    "try": [
        "{N} ran to the nearest tree, but the tree gave no shelter.", "{P} closed the door and lit a candle.",
        "{P} was afraid, but {p} took {poss} {o} and stayed calm.", "The water rose higher and higher, and {N} climbed on a stone.",
    ],
    "help": [
        "Then {p} heard a voice. It was {art_H} who was lost in the rain.",
        "{art_H} knocked at the door, wet and cold.", "Out of the dark came {art_H}. \"Follow me,\" it called.",
        "Nearby, {art_H} was calling for help.",
    ],
    "solve": [
        "{N} shared {poss} blanket, and they waited together until the sun came out.",
        "Side by side they found a dry cave and told each other stories.",
        "With the {o} they made a little roof, and both stayed dry.",
        "They held on to each other, and in the morning the sky was blue again.",
    ],
    "moral": [
        "After that day they were never afraid of storms again.", "Since then {N} and the {helper} have been best friends.",
        "\"A storm is only half as bad with a friend,\" said {N}.",
    ],
}
FOUND = {
    "trouble": [
        "There {p} found {art_to}.", "Under a stone {p} saw {art_to} that {p} had never seen before.",
        "In the middle of the road lay {art_to}.", "When {p} opened an old box, {p} found {art_to} inside.",
    ],
    "try": [
        "{P} turned it around and around, but nothing happened.", "{P} wondered who had left it there.",
        "{N} wanted to keep it, but {p} knew that it belonged to someone.", "When {p} touched it, it began to glow.",
        "{P} carried it carefully to the village.",
    ],
    "help": [
        "{art_H} saw it and cried, \"That is mine! I lost it long ago.\"",
        "\"Where did you find that?\" asked {art_H}.", "Soon {p} met {art_H} who was looking for something.",
        "A {helper} sat at the side of the road and wept because a {o} was missing.",
    ],
    "solve": [
        "{N} gave the {o} back at once, and the {helper} was very happy.",
        "{N} smiled and put the {o} into the hands of the {helper}.",
        "So {N} returned the {o}, and the {helper} thanked {obj} with a warm meal.",
        "The {helper} took the {o} and showed {obj} how it worked.",
    ],
    "moral": [
        "{N} went home with empty hands and a full heart.", "And that is how {N} found a friend instead of a treasure.",
        "Being honest made {N} happier than any treasure could.",
    ],
}
QUARREL = {
    "trouble": [
        "One day {N} and {art_helper} both wanted the same {o}.", "{N} had a friend, {art_helper}, but one day they had a quarrel about {art_o}.",
        "Both {N} and {art_helper} said, \"The {o} belongs to me!\"",
    ],
    "try": [
        "They pulled at it until it nearly broke.", "They did not speak to each other for a whole week.",
        "{N} went home angry and could not sleep.", "Each of them sat alone and felt sad.",
    ],
    "help": [
        "An old {third} watched them and shook {its} head. \"Why don't you share it?\" asked the {third}.",
        "\"A thing is only fun if you can share it,\" said a wise {third}.",
        "Then a {third} told them a story about two friends who lost everything in a fight.",
    ],
    "solve": [
        "So {N} said sorry, and the {helper} said sorry too.", "{N} took the {o} one day, and the {helper} took it the next.",
        "They thought about it, laughed, and used the {o} together.",
    ],
    "moral": [
        "From that day on they shared everything.", "The {o} was soon forgotten, but the two stayed friends.",
        "{N} learned that it is good to share.",
    ],
}
JOURNEY = {
    "trouble": [
        "One day {N} decided to visit the {third} who lived far away.", "{N} wanted to see what was behind the mountain.",
        "One morning {p} packed {poss} {o} and set off on a long journey.", "A letter came. It asked {N} to bring the {o} to the king.",
    ],
    "try": [
        "The road was long, and soon {poss} feet were tired.", "{P} crossed a river, a field and a dark forest.",
        "After two days {p} came to a wide river without a bridge.", "{P} lost the way and had to sleep under the stars.",
    ],
    "help": [
        "There {p} met {art_H}. \"I know the way,\" said the {helper}.",
        "{art_H} was resting beside the road and shared some bread with {obj}.",
        "\"May I come with you?\" asked {art_H}, and {N} was glad.",
    ],
    "solve": [
        "Together they walked on and reached the end of the road before sunset.",
        "With the help of the {helper}, {p} crossed the river and saw a wonderful land.",
        "When they arrived at last, everybody came out to greet them.",
    ],
    "moral": [
        "{N} came home much later, and {p} had many stories to tell.", "It had been the best journey of {poss} life.",
        "\"The best part of the road was the company,\" said {N}.",
    ],
}
PLOTS = {"lost": LOST, "storm": STORM, "found": FOUND, "quarrel": QUARREL, "journey": JOURNEY}
CLOSE = ["The end.", "And they lived happily for many years.", "", "", "That was a day to remember.", ""]

ASKS = {
    "lost": "{art_hero} who loses {art_o}",
    "storm": "{art_hero} and a storm",
    "found": "{art_hero} who finds {art_o}",
    "quarrel": "{art_hero} who learns to share {art_o}",
    "journey": "{art_hero} who goes on a journey",
}
REQUESTS = [
    "Write a short story about {what}.", "Tell me a story about {what}.", "Please write a story about {what}.",
    "Can you tell me a short story about {what}?", "I would like a story about {what}.", "Write a little tale about {what}.",
    "Make up a story about {what}.", "Tell my children a story about {what}.",
]
PLANS = [
    "The story needs a hero, a trouble and a good end. The hero is {N}, {art_t_hero}. {Trouble_plan} {Helper_plan}",
    "I will call the {hero} {N}. It happens {place}. {Trouble_plan} {Helper_plan}",
    "Hero: {N} the {hero}. Place: {place}. {Trouble_plan} {Helper_plan} I end with a short lesson.",
]
TROUBLE_PLANS = {
    "lost": "The {o} gets lost.", "storm": "A storm comes.", "found": "{N} finds {art_to}.",
    "quarrel": "Two friends both want the {o}.", "journey": "{N} goes on a long journey.",
}


@dataclass
class Story:
    """A request with the plan and the text that answer it."""

    request: str
    plan: str
    text: str
    title: str


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def make(rng: random.Random) -> Story:
    """Return one story with its request."""
    plot = rng.choice(list(PLOTS))
    is_animal = rng.random() < 0.6
    if is_animal:
        hero, name = rng.choice(ANIMALS), rng.choice(PET_NAMES)
        pronouns = rng.choice([("he", "him", "his"), ("she", "her", "her")])
    else:
        person = rng.choice(PEOPLE)
        hero, name, pronouns = rng.choice(ROLES), person.name, (person.subject, person.object, person.possessive)
    others = [x for x in (ANIMALS if is_animal else ANIMALS + ROLES) if x != hero]
    helper, third = rng.sample(others, 2)
    trait, helper_trait = rng.sample(TRAITS, 2)
    thing, thing_trait = rng.choice(OBJECTS), rng.choice(OBJECT_TRAITS)
    f = {
        "N": name, "p": pronouns[0], "P": pronouns[0].capitalize(), "obj": pronouns[1], "poss": pronouns[2],
        "P_poss": pronouns[2].capitalize(), "hero": hero, "trait": trait, "art_hero": article(hero),
        "art_t_hero": article(f"{trait} {hero}"), "o": thing, "art_o": article(thing),
        "art_to": article(f"{thing_trait} {thing}"), "helper": helper, "art_helper": article(helper),
        "art_H": article(f"{helper_trait} {helper}"), "third": third, "its": "its" if third in ANIMALS else "his",
        "place": rng.choice(PLACES), "Season": rng.choice(SEASONS), "hobby": rng.choice(HOBBIES),
        "walked": rng.choice(["walked", "was resting", "was playing", "stood"]), "many": plural(thing),
    }
    parts = PLOTS[plot]
    lines = [rng.choice(OPEN), *rng.sample(LIKES, rng.choice((1, 1, 2))), rng.choice(parts["trouble"]),
             *rng.sample(parts["try"], rng.choice((1, 2))), rng.choice(parts["help"]), rng.choice(parts["solve"]),
             rng.choice(parts["moral"]), rng.choice(CLOSE)]
    sentences = [_upper(line.format(**f)) for line in lines if line]
    cut = rng.choice((2, 3, 4))
    joint = "\n\n" if rng.random() < 0.5 else " "
    text = " ".join(sentences[:cut]) + joint + " ".join(sentences[cut:])
    what = ASKS[plot].format(**f)
    if rng.random() < 0.25:
        what += rng.choice([" named {N}", ", with a happy end", ", set {place}"]).format(**f)
        if what.endswith(f" named {name}"):
            what = f"{article(hero)} named {name}"
    helper_plan = f"{_upper(article(helper if plot != 'quarrel' else third))} helps."
    plan = rng.choice(PLANS).format(Trouble_plan=TROUBLE_PLANS[plot].format(**f), Helper_plan=helper_plan, **f)
    title = f"The {_upper(hero)} and the {_upper(thing if plot != 'storm' else 'storm')}"
    return Story(rng.choice(REQUESTS).format(what=what), plan, text, title)
