"""`penstock generate`: one text as it is written, several when all are complete, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.errors import UsageError
from penstock.tools.train.generation import opening
from penstock.tools.train.generation.codec import ByteCodec
from penstock.tools.train.generation.continuing import Sampling

ASKED: list[tuple[Any, ...]] = []


class Questions(ByteCodec):
    """Bytes, with a chat template that puts a question in brackets; the zero byte ends a text."""

    end = 0

    def encode_question(self, text: str) -> list[int]:
        return self.encode(f"[{text}]")


def continue_rows(prompts: list[list[int]], count: int, sampling: Sampling) -> Iterator[tuple[int, int]]:
    """Each row is answered by itself in capitals, a letter of each in turn, and then ended."""
    ASKED.append((prompts, count, sampling))
    answers = [bytes(prompt).decode().upper().encode() + b"\0" for prompt in prompts]
    for place in range(min(count, max(map(len, answers)))):
        yield from ((row, answer[place]) for row, answer in enumerate(answers) if place < len(answer))


@pytest.fixture(autouse=True)
def writer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ASKED.clear()
    monkeypatch.setattr(opening, "open_writer", lambda *_: opening.Writer(Questions(), continue_rows))
    monkeypatch.setattr(sys.modules["penstock.cli.generate"], "find_checkpoint", lambda place: tmp_path)


def said(*options: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["generate", "run", *options])
    assert done.exit_code == code, done.output
    return done.output


def test_an_answer_is_written_without_its_question_and_a_text_goes_on_from_its_prompt() -> None:
    assert said("--chat", "why ü?") == "[WHY Ü?]\n"
    assert said("--prompt", "abc") == "abcABC\n"
    assert said("--chat", "why", "--tokens", "3") == "[WH\n"


def test_a_prompt_that_is_refused_is_not_written_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length is known to be too much when the first token is asked for; by then the prompt was on the screen."""

    def refuse(*_: Any) -> Iterator[tuple[int, int]]:
        raise UsageError("too long")
        yield

    monkeypatch.setattr(opening, "open_writer", lambda *_: opening.Writer(Questions(), refuse))
    assert said("--prompt", "abc", code=2) == "penstock: too long\n"


def test_several_are_written_when_all_are_complete() -> None:
    assert said("--chat", "a", "--chat", "longer") == "--- 1\na\n[A]\n--- 2\nlonger\n[LONGER]\n"
    assert json.loads(said("--chat", "a", "--json")) == [{"prompt": "a", "text": "[A]"}]
    assert len(ASKED) == 2
    assert len(ASKED[0][0]) == 2  # one batch


def test_options_reach_the_drawing_of_tokens() -> None:
    said("--chat", "a", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9", "--seed", "7", "-n", "2")
    said("--chat", "a", "--greedy")
    assert [asked[1:] for asked in ASKED] == [
        (2, Sampling(temperature=0.5, top_k=3, top_p=0.9, seed=7)),
        (300, Sampling(temperature=0.0)),
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--chat", "a", "--prompt", "b"], "give one of them"),
        (["--chat", "a", "--temperature", "hot"], "--temperature: 'hot' is not a number"),
        (["--chat", "a", "--temperature", "nan"], "give a number of 0 or more"),
        (["--chat", "a", "--top-p", "2"], "give a share above 0 and up to 1"),
        (["--chat", "a", "--tokens", "0"], "0 is too small"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: list[str], words: str) -> None:
    assert words in " ".join(said(*options, code=2).split())
