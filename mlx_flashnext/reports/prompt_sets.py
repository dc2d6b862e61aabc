"""What figures are taken with: the texts of the demo model, salted, or asked as a chat would ask them."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from mlx_flashnext.demo import demo_dir
from mlx_flashnext.text.template import ChatTemplate
from mlx_flashnext.tokenizer import Tokenizer

SALTED_SET: Final = "texts of the demo model, salted"
CHAT_SET: Final = "tasks of the demo model, one a genre in turns, through the model's chat template"


class _Task(msgspec.Struct):
    genre: str
    prompt: str


def demo_tasks() -> list[str]:
    """Return the tasks that ship with the demo model, their genres in turns."""
    sets = msgspec.json.decode((demo_dir() / "prompts.json").read_bytes(), type=dict[str, list[_Task]])
    by_genre: dict[str, list[str]] = {}
    for task in (task for tasks in sets.values() for task in tasks):
        by_genre.setdefault(task.genre, []).append(task.prompt)
    longest = max(map(len, by_genre.values()))
    return [tasks[turn] for turn in range(longest) for tasks in by_genre.values() if turn < len(tasks)]


def salted_prompt(tokenizer: Tokenizer, texts: Sequence[str], num_tokens: int, salt: int) -> list[int]:
    """Return a prompt of exactly so many tokens: a number, then texts in an order of its own."""
    chance = random.Random(salt)
    tokens = tokenizer.encode(f"{chance.getrandbits(64):016x}\n")
    while len(tokens) < num_tokens:
        tokens += tokenizer.encode(chance.choice(texts) + "\n")
    return tokens[:num_tokens]


def chat_prompts(directory: Path, tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return each text as the first message of a chat, rendered by the model's own template.

    Raises:
        ModelError: the template is missing, or refused the message.
    """
    with ChatTemplate.open(directory) as template:
        rendered = [template.render([{"role": "user", "content": text}]) for text in texts]
    return [tokenizer.encode(text) for text in rendered]
