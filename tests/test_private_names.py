"""Names that begin with an underscore: for their own file, and for subclasses of its classes."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src" / "penstock"
# Private names of torch, Python and Lightning that files of ours happen to use as well.
FOREIGN = {
    "_base",
    "_buffers",
    "_functions",
    "_layout",
    "_make",
    "_modules",
    "_ops",
    "_optimizer",
    "_parameters",
    "_replace",
    "_timeout",
    "_version",
}
# The names here are those of torch.distributed.pipelining, where they are private too.
MIRRORED = "compat/pipelining/"

DEFINED = re.compile(r"\b(?:def|class) (_\w+)|\b(?:self|cls)\.(_\w+)|^ *(_\w+)(?:: .*?)? = ", re.MULTILINE)
# What an object of a class elsewhere may use of itself is of its base class.
USED = re.compile(r"(?<!\bself)(?<!\bcls)(?<!\bsuper\(\))\.(_[A-Za-z]\w*)\b(?!__)")
IMPORTED = re.compile(r"^ *from penstock[\w.]* import (?:\([^)]*\)|.*)", re.MULTILINE)


def defined_in(text: str) -> set[str]:
    """The private names that a file gives to functions, classes, variables and attributes of its own objects."""
    return {name for names in DEFINED.findall(text) for name in names if name and not name.endswith("__")}


def used_from_elsewhere(text: str) -> set[str]:
    """The private names that a file uses of other objects and modules."""
    imported = (name for line in IMPORTED.findall(text) for name in re.findall(r"\b_[A-Za-z]\w*", line))
    return {name for name in (*USED.findall(text), *imported) if not name.endswith("__")}


def test_no_file_uses_a_private_name_of_another() -> None:
    """Names that no file of Penstock defines are of other libraries, and not looked at."""
    texts = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")}
    own = {file: defined_in(text) for file, text in texts.items()}
    ours = set().union(*own.values()) - FOREIGN
    assert {
        file: found
        for file, text in texts.items()
        if not file.startswith(MIRRORED) and (found := (used_from_elsewhere(text) & ours) - own[file])
    } == {}


def test_the_rule_sees_attributes_and_imports_of_other_files() -> None:
    text = """
from penstock.rules import _check, check
from penstock.errors import (
    _text,
)
_LIMIT: int = 3
class Part(Base):
    def run(self, other):
        self._done = super()._run()
        return other._left.__name__
"""
    assert used_from_elsewhere(text) == {"_check", "_text", "_left"}
    assert defined_in(text) == {"_done", "_LIMIT"}


def test_no_test_imports_a_private_name() -> None:
    """What a test needs of a module is a name of that module, or is seen by what the module does."""
    texts = {path.relative_to(TESTS).as_posix(): path.read_text() for path in TESTS.rglob("*.py")}
    names = {
        file: {name for line in IMPORTED.findall(text) for name in re.findall(r"\b_[A-Za-z]\w*", line)}
        for file, text in texts.items()
        if not file.startswith("compat/") and file != Path(__file__).name
    }
    assert {file: found for file, found in names.items() if found} == {}
