"""Documents for training: conversations of one to four turns and a few raw texts.

Entry point: `document(rng, held_out)`.  A document is either raw text or a list of messages; `render` turns
messages into the exact string of the shipped chat template (`bench.demo.prepare` compares the two).  No turn
of a training document is held out (`bench.demo.heldout`); the first turn of a held-out document is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from . import chats, code, stories, sums

GENRES = ("sums", "code", "stories", "chat")
SHARES = (58, 14, 14, 14)
COPYING_SHARE = 0.67  # of the chat documents: 9 % of all
NO_THINKING_SHARE = 0.15
SYSTEMS = [
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Answer shortly.",
    "You are a patient teacher.",
    "You help children.",
    "Be brief and clear.",
]


@dataclass
class Turn:
    """A request, the reasoning, the reply after it, and the reply where there is no reasoning."""

    request: str
    reasoning: str
    answer: str
    answer_alone: str = ""


@dataclass
class Document:
    """One training text; `genre` is that of its first turn."""

    genre: str
    messages: list[dict[str, str]] = field(default_factory=list)
    raw: str = ""
    keep_old_thinking: bool = True

    def text(self) -> str:
        """Return the document as the model reads it, without the final separator."""
        return self.raw or render(self.messages, keep_old_thinking=self.keep_old_thinking)


def render(messages: list[dict[str, str]], keep_old_thinking: bool = True) -> str:
    """Return the ChatML text; assistant turns carry a think block unless they are old and not kept."""
    last_user = max(i for i, m in enumerate(messages) if m["role"] == "user")
    parts = []
    for i, m in enumerate(messages):
        body = m["content"]
        if m["role"] == "assistant" and (keep_old_thinking or i > last_user):
            body = f"<think>\n{m.get('reasoning_content', '')}\n</think>\n\n{body}"
        parts.append(f"<|im_start|>{m['role']}\n{body}<|im_end|>\n")
    return "".join(parts)


def _code_follow_up(rng: random.Random, snippet: code.Snippet) -> Turn:
    if '"""' not in snippet.code and rng.random() < 0.5:
        ask = rng.choice(["Add a docstring.", "Can you add a docstring?", "Please add a docstring to it."])
        return Turn(ask, "I put a docstring under the def line.", code.fenced(code.with_docstring(snippet)))
    new = rng.choice(["solve", "compute", "my_function", "helper", "run", "process"])
    renamed = snippet.code.replace(f"def {snippet.name}(", f"def {new}(")
    return Turn(f"Rename it to {new}.", f"I change the name {snippet.name} to {new}.", code.fenced(renamed))


def _turns(rng: random.Random, genre: str, held_out: bool, is_first: bool) -> list[Turn]:
    """Return one turn, or two that belong together."""
    if genre == "sums":
        problem = sums.pick(rng, held_out)
        return [Turn(problem.question, problem.thinking(), problem.answer(), problem.worked_answer())]
    if genre == "code":
        snippet = code.pick(rng, held_out)
        turn = Turn(snippet.request, snippet.thinking, snippet.answer)
        return [turn, _code_follow_up(rng, snippet)] if is_first and rng.random() < 0.12 else [turn]
    if genre == "stories":
        story = stories.pick(rng, held_out)
        return [Turn(story.request, story.plan, story.text)]
    if held_out or rng.random() < COPYING_SHARE:
        return [Turn(*t) for t in chats.pick_copying(rng, held_out)]
    return [Turn(*chats.make(rng))]


def _conversation(rng: random.Random, genre: str, held_out: bool) -> list[Turn]:
    turns = _turns(rng, genre, held_out, True)
    while len(turns) < 4 and rng.random() < 0.2:
        turns += _turns(rng, genre if rng.random() < 0.6 else rng.choice(GENRES), False, False)
    if rng.random() < 0.06:
        turns.append(Turn(*chats.closing(rng)))
    return turns


def document(rng: random.Random, held_out: bool = False) -> Document:
    """Return the next document, of the training set or of the held-out set."""
    genre = rng.choices(GENRES, SHARES)[0]
    if genre == "stories" and rng.random() < 0.1:
        story = stories.pick(rng, held_out)
        return Document(genre, raw=f"{story.title}\n\n{story.text}")
    if genre == "code" and rng.random() < 0.08:
        return Document(genre, raw=code.with_docstring(code.pick(rng, held_out)) + "\n")
    messages: list[dict[str, str]] = []
    if rng.random() < 0.1:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    thinks = rng.random() >= NO_THINKING_SHARE
    for turn in _conversation(rng, genre, held_out):
        answer = turn.answer if thinks else turn.answer_alone or turn.answer
        messages += [
            {"role": "user", "content": turn.request},
            {"role": "assistant", "content": answer, "reasoning_content": turn.reasoning if thinks else ""},
        ]
    return Document(genre, messages, keep_old_thinking=rng.random() < 0.9)
