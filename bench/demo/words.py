"""Word lists of the training grammars, all written for this project."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Person:
    """A name with its pronouns."""

    name: str
    subject: str
    object: str
    possessive: str


def _people(names: str, subject: str, obj: str, possessive: str) -> list[Person]:
    return [Person(n, subject, obj, possessive) for n in names.split()]


PEOPLE = _people(
    "Anna Maya Lily Rosa Emma Nora Zoe Clara Ivy Ruth Mia Olga Tina Leah Grace Hana Priya Amara Sofia Elsa",
    "she", "her", "her",
) + _people(
    "Tom Ben Sam Leo Max Omar Jack Finn Noah Hugo Paul Ravi Kenji Luca Peter Otto Ali Felix Oscar Milo",
    "he", "him", "his",
)

FOODS = ("apple pear plum cookie muffin carrot orange lemon cherry peach cake sandwich grape nut pancake egg "
         "tomato strawberry bun sweet").split()
THINGS = ("book pencil marble coin stamp sticker card button shell stone toy ball flower key crayon ribbon postcard "
          "bead brick candle feather ticket balloon badge photo").split()

IRREGULAR = {"cherry": "cherries", "strawberry": "strawberries", "tomato": "tomatoes", "peach": "peaches",
             "sandwich": "sandwiches", "goose": "geese", "mouse": "mice", "wolf": "wolves", "fox": "foxes",
             "bush": "bushes", "box": "boxes", "knife": "knives", "leaf": "leaves", "child": "children"}


def plural(noun: str) -> str:
    """Return the plural of a noun of these lists."""
    return IRREGULAR.get(noun, noun + "s")


def article(phrase: str) -> str:
    """Return the phrase with a or an in front."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


ANIMALS = ("fox bear rabbit mouse owl badger hedgehog squirrel frog turtle goose otter cat dog pony lamb crow wolf "
           "mole duck deer beaver sparrow lizard").split()
ROLES = ("baker sailor gardener farmer painter shepherd teacher fisherman knight princess clockmaker miller tailor "
         "carpenter weaver potter").split()
TRAITS = ("small brave curious quiet clever shy old young lonely cheerful gentle sleepy proud patient careful hungry "
          "stubborn kind nervous busy").split()
PLACES = [
    "by the river", "at the edge of the forest", "in a small village", "near the old mill", "on a green hill",
    "beside the sea", "in a tall tower", "under a big oak tree", "in a quiet valley", "at the foot of a mountain",
    "on a tiny island", "in a cottage with a red door", "next to a deep lake", "in a busy harbour town",
    "behind the market square", "in a garden full of roses",
]
OBJECTS = ("lantern key map kite boat drum bell hat scarf basket mirror violin clock book coin feather ladder wagon "
           "umbrella compass blanket flute jar ring").split()
OBJECT_TRAITS = "golden silver old tiny blue red wooden broken shiny strange dusty magic round heavy".split()
SEASONS = ["One morning", "One evening", "On a cold winter day", "One day in spring", "On a warm summer night",
           "One rainy afternoon", "Late one autumn day", "Early on a Sunday", "One windy day", "On the first day of snow"]
