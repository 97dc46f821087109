"""A chat as tokens, and which of them are the assistant's answers.

The tokenizer's template writes the chat. Where it marks answers itself (`{% generation %}`), its marks are taken. Else
the chat is written once more up to each answer, and up to its end: what lies between is the answer. That holds only if
both are beginnings of the whole, and if no token lies across an edge; where it does not, the row is refused and never
guessed.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from penstock.errors import UsageError
from penstock.reading import NONSENSE, memory_limit
from penstock.tools.train.data.time_limit import time_limit
from penstock.tools.train.data.tokenizer import Tokenizer

MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
ASSISTANT = "assistant"
LONGEST = 10.0  # seconds in which a template, which has loops of its own, writes a chat
MOST_MEMORY = 2**30  # bytes that this may take
MOST_TEXT = 2**24  # characters of a chat; each may become a token, which takes a hundred times its memory
REMEDY = (
    'put {% generation %} and {% endgeneration %} around the answers in the chat template, or set data.loss_on to "all"'
)


def check_chats(tokenizer: Tokenizer) -> None:
    """Raise UsageError where the tokenizer has no template for chats."""
    if tokenizer.of_transformers is None or not _template(tokenizer):
        raise UsageError(
            f"data.tokenizer: the tokenizer in {tokenizer.path} has no chat template; give it one "
            f"(tokenizer.chat_template = ..., then save_pretrained), or rows with text, or with prompt and completion"
        )


def encode_chat(tokenizer: Tokenizer, messages: Any, answers: bool, place: object) -> tuple[list[int], list[bool]]:
    """Return the tokens of a chat, and for each whether it is learned: the answers, or all."""
    _check_messages(messages, place, tools="tool_calls" in _template(tokenizer))
    with _limited(tokenizer, place):
        if not answers:
            ids = tokenizer.spans(_written(tokenizer, messages, place)).ids
            return ids, [True] * len(ids)
        if MARKS.search(_template(tokenizer)):
            return _marked(tokenizer, messages, place)
        return _by_beginnings(tokenizer, messages, place)


def _limited(tokenizer: Tokenizer, place: object) -> AbstractContextManager[None]:
    return time_limit(LONGEST, lambda: f"{place}: the chat template of the tokenizer in {tokenizer.path}")


def _check_messages(messages: Any, place: object, *, tools: bool) -> None:
    """Refuse what a template would write as something else, such as "None" for a content of null.

    A message that calls tools may have no content, where the template knows of `tools`.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        what = "an empty list" if messages in ([], ()) else f"a {type(messages).__name__}"
        raise UsageError(f"{place}: messages is {what}; it takes a list of {{role, content}}")
    for number, message in enumerate(messages):
        calls = isinstance(message, dict) and bool(message.get("tool_calls"))
        if not isinstance(message, dict) or "role" not in message or not ("content" in message or calls):
            raise UsageError(
                f"{place}: message {number} is {str(message)[:60]!r}; it takes a role and a content{_renamed(message)}"
            )
        content = message.get("content")
        if isinstance(content, (str, list)) or (content is None and calls and tools):
            continue
        if content is None and calls:
            raise UsageError(
                f"{place}: message {number} has tool_calls and no content, and the chat template does not mention "
                f"tool_calls; take a template that writes them, or leave the row out"
            )
        shown = "null" if content is None else f"a {type(content).__name__}"
        raise UsageError(f"{place}: the content of message {number} is {shown}; it takes a text, or a list of parts")


def _renamed(message: Any) -> str:
    """Suggest how to rewrite chats that name their parts `from` and `value`."""
    if not isinstance(message, dict) or not {"from", "value"} <= set(message):
        return ""
    return (
        '. Rows with {from, value} must be rewritten: {"messages": [{"role": "user", "content": ...}, '
        '{"role": "assistant", "content": ...}]}, with "human" as "user" and "gpt" as "assistant"'
    )


def question_of(tokenizer: Tokenizer, text: str) -> str:
    """Write a user's question by the template, up to where the assistant's answer begins."""
    check_chats(tokenizer)
    with _limited(tokenizer, "--chat"):
        return _written(tokenizer, [{"role": "user", "content": text}], "--chat", prompt=True)


def roles_in(messages: Any) -> list[str]:
    """Return the roles of a chat that was checked, each once."""
    return list(dict.fromkeys(str(message["role"]) for message in messages))


def _template(tokenizer: Tokenizer) -> str:
    found = tokenizer.of_transformers.chat_template
    return found if isinstance(found, str) else (found or {}).get("default", "")


class _TemplateAt(NamedTuple):
    """A chat template and the row that it writes; as text, which counts the lines of the file, only in an error."""

    place: object
    path: object

    def __str__(self) -> str:
        return f"{self.place}: the chat template of {self.path}"


def _written(tokenizer: Tokenizer, messages: Any, place: object, *, prompt: bool = False) -> str:
    from jinja2 import TemplateError  # transformers writes chats with it, in a sandbox

    what = _TemplateAt(place, tokenizer.path)
    with memory_limit(what, MOST_MEMORY):
        try:
            text = tokenizer.of_transformers.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt
            )
        except (TemplateError, *NONSENSE) as error:
            why = str(error) or type(error).__name__
            raise UsageError(f"{what} does not take this chat: {why}") from None
    if len(text) > MOST_TEXT:
        raise UsageError(f"{what} writes {len(text):,} characters for this chat; at most {MOST_TEXT:,} are read")
    return str(text)


def _marked(tokenizer: Tokenizer, messages: Any, place: object) -> tuple[list[int], list[bool]]:
    _written(tokenizer, messages, place)  # A wrong chat is refused here.
    with memory_limit(place):  # A template may draw random numbers, and so write something else this time.
        found = tokenizer.of_transformers.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    return list(found["input_ids"]), [bool(mark) for mark in found["assistant_masks"]]


def _by_beginnings(tokenizer: Tokenizer, messages: Any, place: object) -> tuple[list[int], list[bool]]:
    text = _written(tokenizer, messages, place)
    answers: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = _written(tokenizer, messages[:number], place, prompt=True)
        after = _written(tokenizer, messages[: number + 1], place)
        if not (text.startswith(after) and after.startswith(before) and len(before) < len(after)):
            raise UsageError(
                f"{place}: which tokens are the answer of message {number} cannot be told: the chat up to it, as the "
                f"template writes it, is no beginning of the whole chat; {REMEDY}"
            )
        answers.append((len(before), len(after)))
    encoded = tokenizer.spans(text)
    return encoded.ids, _inside(encoded.spans, answers, text, place)


def _inside(spans: list[tuple[int, int]], answers: list[tuple[int, int]], text: str, place: object) -> list[bool]:
    """Return for each token whether its characters are an answer's."""
    learned = [False] * len(spans)
    for first, end in answers:
        for number, (begin, stop) in enumerate(spans):
            if begin >= first and stop <= end and stop > begin:
                learned[number] = True
            elif begin < first < stop or begin < end < stop:
                raise UsageError(
                    f"{place}: the token {text[begin:stop]!r} lies across the edge of an answer, so that it is neither "
                    f"learned nor not; {REMEDY}"
                )
    return learned
