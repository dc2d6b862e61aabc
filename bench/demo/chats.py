"""Small talk: greetings, what the model is, what it cannot do, and a few closed word games."""

from __future__ import annotations

import random

from .words import ANIMALS, OBJECTS, PEOPLE, THINGS, plural

GREETINGS = ["Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there", "Hi there", "Good afternoon"]
GREET_TAILS = ["!", ".", ", how are you?", "! How are you today?", ", nice to meet you.", ""]
GREET_REPLIES = [
    "Hello! How can I help you?", "Hi! What would you like to do today?",
    "Hello! I can write a short story, a small Python function or solve a sum. What would you like?",
    "Hi, nice to meet you. What can I do for you?", "Good to see you! Ask me for a story, some code or a sum.",
]
NAME_REPLIES = ["Hello {n}! How can I help you?", "Nice to meet you, {n}. What can I do for you?",
                "Hi {n}! Would you like a story, some code or a sum?"]
WHO = ["Who are you?", "What are you?", "What is your name?", "Are you a person?", "Tell me about yourself.",
       "Who made you?", "Are you a human?", "What model are you?", "Introduce yourself."]
WHO_REPLIES = [
    "I am the flashnext demo model, a very small language model that runs on your own computer.",
    "I am the flashnext demo, a tiny language model. I can write short stories, small Python functions and solve sums.",
    "I am a very small language model made to try out flashnext. I know only a few things.",
    "I am not a person. I am the flashnext demo model, a small program that writes text.",
]
CAN = ["What can you do?", "How can you help me?", "What do you know?", "Help", "What are you good at?",
       "What should I ask you?"]
CAN_REPLIES = [
    "I can write short stories, write small Python functions and solve worded sums with numbers below 100.",
    "Three things: short stories, small Python functions, and sums. Try \"What is 17 + 25?\"",
    "Ask me for a story about an animal, a Python function about lists, or a sum.",
]
THANKS = ["Thanks!", "Thank you.", "Thank you very much!", "Great, thanks.", "That is nice, thank you.", "Good job!"]
THANKS_REPLIES = ["You are welcome!", "You are welcome. Would you like something else?", "My pleasure!",
                  "I am glad you like it."]
BYES = ["Goodbye!", "Bye!", "See you later.", "Good night.", "That is all for today."]
BYE_REPLIES = ["Goodbye! Have a nice day.", "See you soon!", "Bye! Come back any time."]
UNKNOWN = [
    "What is the capital of {x}?", "Who won the game last night?", "What is the weather like today?",
    "Translate \"{y}\" into French.", "What happened in the news today?", "How far away is the moon?",
    "Can you book a table for {n}?", "What is the best phone to buy?", "Who is the president of {x}?",
    "Explain quantum physics.", "How do I fix my car?", "What time is it?", "Can you draw {y}?",
]
LANDS = "France Japan Brazil Kenya Canada Norway India Spain Peru Egypt Italy China".split()
UNKNOWN_REPLIES = [
    "I am sorry, I do not know that. I am a very small demo model. I can tell stories, write small Python functions and solve sums.",
    "I cannot answer that. I only know short stories, small Python functions and sums.",
    "That is too hard for me. I am only a small demo model. Would you like a story or a sum instead?",
]
COLORS = {"grass": "green", "snow": "white", "the sky": "blue", "a lemon": "yellow", "coal": "black",
          "a strawberry": "red", "a carrot": "orange", "chocolate": "brown"}
OPPOSITES = dict(zip("big hot fast old happy dark full hard early loud wet tall open near strong clean high long".split(),
                     "small cold slow young sad light empty soft late quiet dry short closed far weak dirty low brief".split(),
                     strict=True))
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = ("January February March April May June July August September October November December").split()
SOUNDS = {"dog": "woof", "cat": "meow", "cow": "moo", "lamb": "baa", "duck": "quack", "owl": "hoo", "crow": "caw"}

Turn = tuple[str, str, str]


def _word_game(rng: random.Random) -> Turn:
    kind = rng.randrange(8)
    if kind == 0:
        thing, color = rng.choice(list(COLORS.items()))
        return f"What color is {thing}?", f"The usual color of {thing} is {color}.", f"{thing.capitalize()} is {color}."
    if kind == 1:
        a, b = rng.choice(list(OPPOSITES.items()))
        if rng.random() < 0.4:
            a, b = b, a
        return f"What is the opposite of {a}?", f"The opposite of {a} is {b}.", f"The opposite of {a} is {b}."
    if kind == 2:
        i = rng.randrange(7)
        return f"Which day comes after {DAYS[i]}?", f"After {DAYS[i]} comes {DAYS[(i + 1) % 7]}.", f"{DAYS[(i + 1) % 7]}."
    if kind == 3:
        i = rng.randrange(12)
        return (f"Which month comes after {MONTHS[i]}?", f"After {MONTHS[i]} comes {MONTHS[(i + 1) % 12]}.",
                f"{MONTHS[(i + 1) % 12]} comes after {MONTHS[i]}.")
    if kind == 4:
        noun = rng.choice(ANIMALS + THINGS + OBJECTS)
        return f"What is the plural of {noun}?", f"One {noun}, two {plural(noun)}.", f"The plural of {noun} is {plural(noun)}."
    if kind == 5:
        animal, sound = rng.choice(list(SOUNDS.items()))
        return f"What sound does a {animal} make?", f"A {animal} says {sound}.", f"A {animal} says \"{sound}\"."
    if kind == 6:
        words = rng.sample(ANIMALS, 3)
        ordered = ", ".join(sorted(words))
        return f"Sort these words: {', '.join(words)}.", f"By the first letters the order is {ordered}.", f"{ordered}"
    lo = rng.randint(1, 40)
    numbers = ", ".join(str(n) for n in range(lo, lo + 6))
    return f"Count from {lo} to {lo + 5}.", f"I start at {lo} and stop at {lo + 5}.", f"{numbers}."


def make(rng: random.Random) -> Turn:
    """Return (user text, reasoning, reply) of one small-talk turn."""
    kind = rng.choices(("greet", "name", "who", "can", "unknown", "game"), (3, 1, 3, 2, 2, 6))[0]
    if kind == "greet":
        return rng.choice(GREETINGS) + rng.choice(GREET_TAILS), "The user greets me. I greet back.", rng.choice(GREET_REPLIES)
    if kind == "name":
        name = rng.choice(PEOPLE).name
        text = rng.choice(["My name is {n}.", "Hi, I am {n}.", "Hello, my name is {n}."]).format(n=name)
        return text, f"The user is called {name}. I greet back.", rng.choice(NAME_REPLIES).format(n=name)
    if kind == "who":
        return rng.choice(WHO), "The user asks who I am. I say what I am.", rng.choice(WHO_REPLIES)
    if kind == "can":
        return rng.choice(CAN), "The user asks what I can do. I name my three subjects.", rng.choice(CAN_REPLIES)
    if kind == "unknown":
        text = rng.choice(UNKNOWN).format(x=rng.choice(LANDS), n=rng.randint(2, 6),
                                          y=rng.choice(["a " + rng.choice(OBJECTS), "my " + rng.choice(THINGS)]))
        return text, "I do not know this. I say so.", rng.choice(UNKNOWN_REPLIES)
    return _word_game(rng)


def closing(rng: random.Random) -> Turn:
    """Return a thanks or goodbye turn."""
    if rng.random() < 0.7:
        return rng.choice(THANKS), "The user says thanks.", rng.choice(THANKS_REPLIES)
    return rng.choice(BYES), "The user says goodbye.", rng.choice(BYE_REPLIES)
