"""What is written by somebody else and may loop for ever comes to an end, in any thread."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.errors import UsageError
from penstock.tools.train.data import chat
from penstock.tools.train.data.time_limit import time_limit


@pytest.mark.timeout(60)
def test_an_endless_loop_is_ended_in_a_thread_and_in_the_main_one() -> None:
    ended = []

    def loop() -> None:
        with time_limit(0.1, lambda: "it"):
            while True:
                pass

    def limited() -> None:
        with pytest.raises(UsageError, match=r"it has not come to an end within 0\.1 s"):
            loop()
        ended.append(True)

    thread = threading.Thread(target=limited)
    thread.start()
    thread.join()
    limited()
    assert len(ended) == 2


@pytest.mark.timeout(120)
def test_arithmetic_that_never_ends_is_ended_in_the_main_thread() -> None:
    """A chat template with `9 ** 9 ** 9` held Python's lock for ever, so that no other thread could end it."""
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(UsageError, match="it has not come to an end"), time_limit(0.1, lambda: "it"):
        pow(9, 9**9)
    assert signal.getsignal(signal.SIGVTALRM) == before


def test_what_ends_in_time_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    for _ in range(20):
        with time_limit(100.0, lambda: "it"):
            pass
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def write(template: str, folder: Path) -> None:
    """Write a chat by a template, in the sandbox that transformers has for them."""
    sandbox = pytest.importorskip("jinja2.sandbox")
    made = sandbox.ImmutableSandboxedEnvironment().from_string(template)
    inner = SimpleNamespace(chat_template=template, apply_chat_template=lambda *args, **kwargs: made.render())
    tokenizer = SimpleNamespace(of_transformers=inner, path=folder, spans=None)
    chat.encode_chat(tokenizer, [{"role": "user", "content": "?"}], False, "row 3")  # type: ignore[arg-type]


@pytest.mark.timeout(60)
def test_a_chat_template_that_loops_for_ever_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% if a < 0 %}{{ b }}{% endif %}{% endfor %}{% endfor %}"
    )
    monkeypatch.setattr(chat, "LONGEST", 0.2)
    with pytest.raises(UsageError, match=rf"row 3: the chat template of the tokenizer in {tmp_path} has not come"):
        write(text, tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text",
    [
        "{{ 'x' * 10 ** 11 }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ 'x' | center(10 ** 11) }}",
        "{% set n = namespace(t='x') %}{% for a in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
        "{{ [0] * 10 ** 11 }}",
    ],
)
def test_a_chat_template_that_fills_the_memory_is_named(text: str, tmp_path: Path) -> None:
    words = rf"row 3: the chat template of {tmp_path}: what it holds takes more than 1,073,741,824 bytes"
    with pytest.raises(UsageError, match=words):
        write(text, tmp_path)


def test_a_chat_template_that_writes_too_much_to_encode_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"row 3: .* writes 20,000,000 characters for this chat; at most 16,777,216"):
        write("{{ 'x' * 20000000 }}", tmp_path)
