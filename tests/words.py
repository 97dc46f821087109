"""Counts how the source speaks to whoever reads it; `make lint` runs this, so that the counts stay low.

    python tests/words.py [FOLDER or FILE ...] [--list]

Two habits make code hard to read. A function's docstring that opens with a noun clause ("What each rank holds") leaves
the reader to find out what a call does; one that opens with a verb ("Return what each rank holds") says it. And a
comment that continues a sentence which is not there ("of the backward") has to be pieced together with the line beside
it. `--list` shows every place; without paths the whole source is counted and compared with the limits.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "penstock"
NOUN_OPENINGS, FRAGMENTS = 0.12, 0.08  # the largest shares allowed, of docstrings and of comments

_VERBS = """
    Abort Accept Accumulate Act Add Adjust Adopt Advance Agree Align Allocate Allow Alternate Announce Answer Append
    Apply Arrange Ask Assemble Assert Assign Attach Average Await Balance Begin Bind Block Bound Break Bring Broadcast
    Build Cache Calibrate Call Cancel Capture Carry Cast Catch Change Check Choose Clamp Classify Clean Clear Clip Clone
    Close Collate Collect Combine Commit Compare Compile Complete Compose Compress Compute Concatenate Confirm Connect
    Construct Consume Continue Convert Copy Correct Count Cover Create Cut Deal Decide Declare Decode Decorate Defer
    Delay Delegate Delete Deliver Deny Depend Derive Describe Detach Detect Determine Discard Discover Distribute Divide
    Do Double Draw Drive Drop Emit Enable Encode End Enforce Enter Enumerate Escape Estimate Evaluate Exchange Exclude
    Execute Exit Expand Expect Explain Export Extend Extract Fail Feed Fetch Fill Filter Find Fingerprint Finish Fit
    Flatten Flush Fold Follow Forbid Force Forget Fork Format Forward Free Freeze Gather Generate Get Give Go Group
    Guard Guess Hand Handle Hash Have Hide Hold Identify Ignore Import Include Increase Infer Inform Initialise Insert
    Inspect Install Interpolate Interpret Interrupt Introduce Invert Invite Iterate Join Judge Keep Kill Label Launch
    Lay Lead Learn Leave Let Limit Link List Listen Load Lock Log Look Lower Make Map Mark Mask Match Mean Measure Meet
    Merge Mirror Modify Move Multiply Mute Name Narrow Normalise Note Notify Observe Obtain Offer Open Order Overlap
    Pack Pad Pair Parse Partition Pass Pause Pay Perform Permit Pin Place Plan Plot Point Poll Pop Populate Post Predict
    Prefer Prefix Prepare Present Preserve Press Prevent Price Print Probe Process Produce Promise Propagate Propose
    Protect Prove Provide Publish Pull Push Put Query Queue Quote Raise Rank Re-raise Reach Read Rebalance Rebuild
    Receive Recognise Recompute Reconstruct Record Recover Reduce Refer Refuse Register Rehearse Reject Release Remember
    Remove Rename Render Renumber Repair Repeat Replace Replay Report Represent Request Require Reserve Reset Reshape
    Resize Resolve Respond Restart Restore Restrict Resume Retry Return Reuse Reverse Rewrite Roll Rotate Round Run
    Sample Save Scale Scan Schedule Score Search See Seed Select Send Separate Serialise Serve Set Settle Share Shift
    Show Shrink Shuffle Shut Sign Simulate Skip Slice Solve Sort Specify Spend Split Spread Stack Stand Start State Stay
    Step Stop Store Stream Strip Substitute Subtract Suggest Sum Summarise Surround Suspend Swap Sweep Switch
    Synchronise Take Tell Terminate Test Tie Time Total Trace Track Train Transform Translate Traverse Treat Trim
    Truncate Try Turn Undo Unlock Unpack Unwrap Update Use Validate Verify Visit Wait Wake Walk Warm Warn Watch Weigh
    Widen Withdraw Withhold Work Wrap Write Yield Zero
"""
_CONNECTIVES = """
    after and as at because before behind between but by else except for from if in instead into is it its like nor of
    on only or rather since so than that their then these they those through to too under unless until when where which
    while who whoever whom whose with within without
"""
VERBS, CONNECTIVES = frozenset(_VERBS.split()), frozenset(_CONNECTIVES.split())


def functions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the first word of a function's docstring; properties read like values and are left out."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text and not any(ast.unparse(each).endswith("property") for each in node.decorator_list):
            yield node.lineno, text.split()[0].strip(",:;.")


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every comment; of several lines that stand below each other only the first."""
    before = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, text = token.start[0], token.string.lstrip("#").strip()
        alone = token.line.lstrip().startswith("#")
        continues = alone and before == row - 1
        before = row if alone else None
        if text and not continues and not text.startswith(("type:", "noqa", "fmt:", "!")):
            yield row, text


def find(paths: Sequence[Path]) -> tuple[list[str], int, list[str], int]:
    """Return the docstrings without a verb at their beginning and the number of all, then the same of fragments."""
    nouns, fragments = [], []
    docstrings = remarks = 0
    for path in sorted(file for each in paths for file in ([each] if each.is_file() else each.rglob("*.py"))):
        source = path.read_text()
        for line, word in functions(ast.parse(source)):
            docstrings += 1
            if word not in VERBS:
                nouns.append(f"{path}:{line}: a docstring opens with {word!r}")
        for line, text in comments(source):
            remarks += 1
            if text.split()[0].rstrip(",;:") in CONNECTIVES:
                fragments.append(f"{path}:{line}: # {text}")
    return nouns, docstrings, fragments, remarks


def main() -> int:
    paths = [Path(each) for each in sys.argv[1:] if each != "--list"]
    nouns, docstrings, fragments, remarks = find(paths or [SOURCE])
    if "--list" in sys.argv:
        print(*nouns, *fragments, sep="\n")
    shares = len(nouns) / max(docstrings, 1), len(fragments) / max(remarks, 1)
    print(
        f"{shares[0]:.1%} of {docstrings:,} docstrings open without a verb, "
        f"{shares[1]:.1%} of {remarks:,} comments are fragments of a sentence"
    )
    if not paths and (shares[0] > NOUN_OPENINGS or shares[1] > FRAGMENTS):
        print(
            f"At most {NOUN_OPENINGS:.0%} and {FRAGMENTS:.0%} are allowed: begin with what the function does "
            "(a verb that is missing in VERBS belongs there), and write comments as sentences; "
            "`python tests/words.py --list src/penstock/ROOM` shows where."
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
