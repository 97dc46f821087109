"""The documents are tests: what README.md and docs/ tell a reader to run is run here.

- A file is one test. Its ```` ```python ```` blocks run in order, with one namespace and one temporary directory.
- ``<!-- file: train.py -->`` on the line before a block of any language saves it in that directory under this name
  instead.
- In ```` ```console ```` blocks, lines that begin with ``$ penstock`` go through bash, in that same directory; so do
  lines that begin with ``$ python`` or ``$ torchrun`` and name a file that the page has saved. All three are those of
  warm.py, which have torch loaded. Every command must exit with 0.
- Where one of the LITERAL documents shows what a command prints, it prints that.
- ``<!-- exit 2 -->`` on the line before a console block of one command says that it must exit with 2.
- ``<!-- not run: reason -->`` on the line before a block leaves it out. The reason is required.

A failure names the file and the line of its block.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from processes import free_port
from tiers import in_tiers
from warm import warm_commands

ROOT = Path(__file__).resolve().parent.parent
NOT_RUN = re.compile(r"<!--\s*not run\b:?\s*(?P<reason>.*?)\s*-->", re.DOTALL)
EXIT = re.compile(r"<!--\s*exit (?P<code>\d+)\s*-->")
FILE = re.compile(r"<!--\s*file: (?P<name>[\w.-]+)\s*-->")
COMMAND = re.compile(r"penstock\b|(?:python|torchrun)\b.*?(?P<script>[\w-]+\.py)")
COMMAND_SECONDS = 500  # below the timeout of a test, so that the command is named


@dataclass(frozen=True)
class Block:
    """One fenced block; ``line`` is that of its opening fence, counted from 1."""

    language: str
    text: str
    line: int
    comment: str = ""  # the HTML comment right before it

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Those that call penstock or a script, each with what is shown of its output."""
        joined = self.text.replace("\\\n", " ")
        parts = [part.partition("\n") for part in re.split(r"(?m)^\$ ", joined)[1:]]
        return [(command, shown) for command, _, shown in parts if COMMAND.match(command)]

    @property
    def is_run(self) -> bool:
        runnable = self.language == "python" or (self.language == "console" and bool(self.commands))
        runnable = runnable or FILE.match(self.comment) is not None
        excused = NOT_RUN.match(self.comment)
        return runnable and not (excused and excused["reason"])


def find_blocks(markdown: str) -> Iterator[Block]:
    before = None
    for token in MarkdownIt().parse(markdown):
        if token.type == "fence" and token.map:
            comment = before.content.strip() if before and before.type == "html_block" else ""
            yield Block(token.info.partition(" ")[0], token.content, token.map[0] + 1, comment)
        before = token


@dataclass
class Page:
    """One document being run, and what its blocks have in common."""

    path: Path
    folder: Path
    blocks: list[Block]
    is_literal: bool = False  # commands print what the document shows, letter by letter
    found_in: Path | None = None  # the folder of the commands; that of warm.py if it is None
    namespace: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    saved: set[str] = field(default_factory=set)  # files that its blocks are
    compared: int = 0

    def run_all(self) -> None:
        for block in self.blocks:
            self.run(block)

    def run(self, block: Block) -> None:
        where = f"{self.path}:{block.line}"
        if NOT_RUN.match(block.comment):
            pytest.fail(f"{where}: say why the block is not run: <!-- not run: reason -->", pytrace=False)
        file = FILE.match(block.comment)
        if file:
            (self.folder / file["name"]).write_text(block.text, encoding="utf-8")
            self.saved.add(file["name"])
        elif block.language == "python":
            source = "\n" * block.line + block.text  # tracebacks then show the document's own lines
            exec(compile(source, str(self.path), "exec", dont_inherit=True), self.namespace)
        else:
            self.run_commands(block, where)

    def run_commands(self, block: Block, where: str) -> None:
        stated = EXIT.match(block.comment)
        if stated and len(block.commands) != 1:
            pytest.fail(
                f"{where}: {len(block.commands)} commands under one exit code; give each a block", pytrace=False
            )
        expected = int(stated["code"]) if stated else 0
        path = os.pathsep.join([str(self.found_in or warm_commands()), os.environ.get("PATH", os.defpath)])
        for command, shown in block.commands:
            called = COMMAND.match(command)
            if called and called["script"] and called["script"] not in self.saved:
                continue
            result = subprocess.run(
                ["bash", "-o", "pipefail", "-c", command],
                cwd=self.folder,
                env={**os.environ, "PATH": path, "PET_MASTER_PORT": str(free_port())},  # where torchrun listens
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=COMMAND_SECONDS,
            )
            if result.returncode != expected:
                said = f"exited with {result.returncode}, not {expected}\n{result.stdout}"
                pytest.fail(f"{where}: `{command}` {said}", pytrace=False)
            if shown and self.is_literal:
                self.compared += 1
                assert result.stdout == shown, f"{where}: `{command}`"


DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): [
        block for block in find_blocks(path.read_text(encoding="utf-8")) if block.is_run
    ]
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
}


LONG = {
    "docs/explanations/security.md",
    "docs/guides/lora.md",
    "docs/guides/overlap.md",
    "docs/explanations/bubble.md",
    "docs/guides/integrations.md",
    "docs/guides/hugging-face.md",
    "docs/guides/fine-tune.md",
    "docs/guides/two-models.md",
    "docs/tutorial.md",
    "docs/explanations/transports.md",
    "docs/guides/checkpoints.md",
    "docs/guides/command.md",
    "docs/guides/choose-a-schedule.md",
    "docs/guides/parallel.md",
    "docs/guides/overlapped-steps.md",
    "docs/guides/plan.md",
    "docs/guides/rehearse.md",
    "docs/guides/several-hosts.md",
    "docs/guides/studio.md",
    "docs/guides/search.md",
    "docs/guides/seeing.md",
    "docs/guides/train-command.md",
    "docs/primer.md",
}
EXHAUSTIVE = {"docs/guides/doctor.md"}  # the tests of the command examine this machine too
LITERAL = {
    "docs/explanations/bubble.md",
    "docs/explanations/what-is-a-schedule.md",
    "docs/guides/command.md",
}


def test_the_long_and_the_literal_documents_exist() -> None:
    assert sorted((LONG | EXHAUSTIVE | LITERAL) - set(DOCUMENTS)) == []


def test_files_name_only_documents_that_exist() -> None:
    places = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]
    named = [
        (str(path), page)
        for path in [*places, *(ROOT / "examples").rglob("*.*"), ROOT / "Makefile"]
        if path.suffix in {".py", ".toml", ""}
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8"))
    ]
    assert len(named) > 5
    assert [where for where in named if not (ROOT / where[1]).exists()] == []


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", in_tiers(DOCUMENTS, set(DOCUMENTS) - LONG - EXHAUSTIVE, EXHAUSTIVE))
def test_a_document_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = Page(ROOT / name, tmp_path, DOCUMENTS[name], name in LITERAL)
    page.run_all()
    assert page.compared or not page.is_literal


# The rules above, tried on documents made up here.


def page_of(markdown: str, folder: Path) -> Page:
    return Page(folder / "page.md", folder, [block for block in find_blocks(markdown) if block.is_run])


def test_blocks_share_a_namespace(tmp_path: Path) -> None:
    page = page_of("```python\nx = 1\n```\ntext\n```python\nx += 1\n```\n", tmp_path)
    page.run_all()
    assert page.namespace["x"] == 2


def test_an_error_points_at_the_line_of_the_document(tmp_path: Path) -> None:
    page = page_of("# Title\n\n```python\nx = 1\nx / 0\n```\n", tmp_path)
    with pytest.raises(ZeroDivisionError) as caught:
        page.run_all()
    entry = caught.traceback[-1]
    assert (str(entry.path), entry.lineno + 1) == (str(page.path), 5)


def test_only_a_block_with_a_reason_is_left_out(tmp_path: Path) -> None:
    block = "```python\n1 / 0\n```\n"
    assert not page_of(f"<!-- not run: needs two hosts -->\n{block}", tmp_path).blocks
    for silent in ("<!-- not run -->", "<!-- not run: -->"):
        with pytest.raises(pytest.fail.Exception, match="say why"):
            page_of(f"{silent}\n{block}", tmp_path).run_all()


def test_a_block_that_is_a_file_is_saved_and_then_run_by_its_name(tmp_path: Path) -> None:
    saved = "<!-- file: mine.py -->\n```python\nopen('made', 'w').close()\n```\n"
    page = page_of(saved + "```console\n$ python other.py\n$ python mine.py\n```\n", tmp_path)
    page.run(page.blocks[0])
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    page.run_all()
    assert (tmp_path / "made").exists()


def test_a_file_may_be_of_any_language(tmp_path: Path) -> None:
    page_of("<!-- file: mine.toml -->\n```toml\nsteps = 1\n```\n```toml\nother = 2\n```\n", tmp_path).run_all()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["steps = 1\n"]


def test_only_lines_that_call_penstock_are_commands() -> None:
    (block,) = find_blocks("```console\n$ make train\n$ penstock show \\\n  1f1b\nits output\n$ penstocks\n```\n")
    assert [(command.split(), shown) for command, shown in block.commands] == [
        (["penstock", "show", "1f1b"], "its output\n")
    ]


def test_other_output_than_shown_is_noticed(tmp_path: Path) -> None:
    page = page_of("```console\n$ penstock show 1f1b -r 1 -m 1 | head -n 1\nshown\n```\n", tmp_path)
    page.run_all()
    page.is_literal = True
    with pytest.raises(AssertionError, match="penstock show"):
        page.run_all()


@pytest.mark.parametrize(("comment", "passes"), [("", False), ("<!-- exit 1 -->", False), ("<!-- exit 7 -->", True)])
def test_a_command_must_exit_as_stated(comment: str, passes: bool, tmp_path: Path) -> None:
    command = tmp_path / "penstock"
    command.write_text("#!/bin/sh\nexit 7\n")
    command.chmod(0o755)
    page = page_of(f"{comment}\n```console\n$ penstock show\n```\n", tmp_path)
    page.found_in = tmp_path
    if passes:
        page.run_all()
    else:
        with pytest.raises(pytest.fail.Exception, match="exited with 7"):
            page.run_all()


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("os.kill(os.getpid(), 9)", 137, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
def test_a_warm_command_has_its_own_folder_environment_and_end(end: str, code: int, said: str, tmp_path: Path) -> None:
    tells = "print(os.getcwd(), os.environ['MINE'], sys.argv, __name__, flush=True)"
    (tmp_path / "mine.py").write_text(f"import os, sys\n{tells}\n{end}\n")
    ran = subprocess.run(
        [warm_commands() / "python", "mine.py", "a b"],
        cwd=tmp_path,
        env={**os.environ, "MINE": end},
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
    )
    assert ran.returncode == code
    assert ran.stdout == f"{tmp_path} {end} ['mine.py', 'a b'] __main__\n"
    assert ran.stderr.endswith(said)
    assert bool(ran.stderr) == bool(said)
