"""Documents for training: conversations of one to four turns and a few raw texts.

Entry point: `document(rng)`.  A document is either raw text or a list of messages; `render` turns messages
into the exact string of the shipped chat template (`bench.demo.prepare` compares the two).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from . import chats, code, stories, sums

GENRES = ("sums", "code", "stories", "chat")
SYSTEMS = [
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Answer shortly.",
    "You are a patient teacher.",
    "You help children.",
    "Be brief and clear.",
]


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


def _sum_turn(rng: random.Random) -> tuple[str, str, str]:
    problem = sums.make(rng)
    show = ", ".join(problem.equations)
    answer = problem.answer if problem.equations[-1] in problem.answer else f"{show}. {problem.answer}"
    return problem.question, problem.thinking(), answer


def _turn(rng: random.Random, genre: str) -> tuple[str, str, str]:
    if genre == "sums":
        return _sum_turn(rng)
    if genre == "code":
        return code.reply(rng, code.make(rng))
    if genre == "stories":
        story = stories.make(rng)
        titled = f"{story.title}\n\n{story.text}" if rng.random() < 0.15 else story.text
        return story.request, story.plan, titled
    return chats.make(rng)


def _code_follow_up(rng: random.Random, snippet: code.Snippet) -> tuple[str, str, str]:
    if rng.random() < 0.5:
        ask = rng.choice(["Add a docstring.", "Can you add a docstring?", "Please add a docstring to it."])
        return ask, "I put a docstring under the def line.", code.fenced(code.with_docstring(snippet))
    new = rng.choice(["solve", "compute", "my_function", "helper", "run", "process"])
    renamed = snippet.code.replace(f"def {snippet.name}(", f"def {new}(")
    return f"Rename it to {new}.", f"I change the name {snippet.name} to {new}.", code.fenced(renamed)


def _conversation(rng: random.Random, genre: str) -> list[tuple[str, str, str]]:
    if genre == "code" and rng.random() < 0.2:
        snippet = code.make(rng)
        return [(snippet.request, snippet.thinking, code.fenced(snippet.code)), _code_follow_up(rng, snippet)]
    turns = [_turn(rng, genre)]
    while len(turns) < 4 and rng.random() < 0.25:
        turns.append(_turn(rng, genre if rng.random() < 0.5 else rng.choice(GENRES)))
    if rng.random() < 0.08:
        turns.append(chats.closing(rng))
    return turns


def document(rng: random.Random) -> Document:
    """Return the next document: 92 % conversations, 8 % raw stories and code."""
    genre = rng.choices(GENRES, (44, 21, 21, 14))[0]
    if genre == "stories" and rng.random() < 0.2:
        story = stories.make(rng)
        return Document(genre, raw=f"{story.title}\n\n{story.text}" if rng.random() < 0.3 else story.text)
    if genre == "code" and rng.random() < 0.15:
        snippet = code.make(rng)
        return Document(genre, raw=code.with_docstring(snippet) + "\n")
    messages: list[dict[str, str]] = []
    if rng.random() < 0.12:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    thinks = rng.random() < 0.7
    for user, reasoning, answer in _conversation(rng, genre):
        messages += [
            {"role": "user", "content": user},
            {"role": "assistant", "content": answer, "reasoning_content": reasoning if thinks else ""},
        ]
    return Document(genre, messages, keep_old_thinking=rng.random() < 0.75)


def is_held_out(doc: Document) -> bool:
    """Return whether a document belongs to the held-out set, by a stable hash.

    The key is the first question, so no training document starts with a held-out sum, story or code
    request.  Small talk has few questions; there it is the whole text.
    """
    first = next((m["content"] for m in doc.messages if m["role"] == "user"), doc.raw)
    value = 2166136261
    for byte in (doc.text() if doc.genre == "chat" else first).encode():
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    return value % 64 == 0
