"""Whether the ranks of one pipeline were given the same batch: what every rank saw of it, compared.

Each rank's report at the end of a step has one checksum per argument (`fingerprint`). Equal ones are the rule, and cost
nothing more. Where they differ, all ranks know, and tell each other what is behind: then rounding is told from another
batch, and the difference is named. An argument may be left out, or be None, on ranks that do not read it; a rank that
does read it would compute without it, which is refused too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from penstock.runtime.batch.fingerprint import BatchFingerprint, Detail, Key, alike
from penstock.runtime.transport.failure.blame import name_ranks

Readers = Callable[[Key], Collection[int]]  # the ranks whose stages read an argument
NUMBERS = 3  # Numbers of a tensor that an error shows.

REMEDY = (
    "so inputs would be trained against other rows' labels; pass the same batch on every rank of a pipeline (as from "
    "penstock.ReplicaSampler; torch's DistributedSampler goes by the world), or leave an argument out on ranks whose "
    "stages do not read it"
)


def unlike(fingerprints: Sequence[BatchFingerprint | None]) -> list[Key]:
    """Return the arguments whose checksums differ between ranks that were given them."""
    given = [each for each in fingerprints if each is not None]
    if len({whole for whole, _ in given}) > 1:
        # These ranks have not succeeded in the same steps so far: their checksums are of different numbers.
        return []
    first: dict[Key, int] = {}
    odd: dict[Key, None] = {}
    for _, checksums in given:
        for name, checksum in checksums.items():
            if first.setdefault(name, checksum) != checksum:
                odd[name] = None
    return list(odd)


def different_batches(details: Sequence[Mapping[Key, list[Detail]]]) -> str:
    """Describe what differs by more than rounding; empty where nothing does."""
    names = dict.fromkeys(name for each in details for name in each)
    for name in names:
        # Values that differ from each other, each with the ranks that have it.
        kinds: list[tuple[list[Detail], list[int]]] = []
        for rank, each in enumerate(details):
            if name in each:
                _sort_in(kinds, each[name], rank)
        if len(kinds) > 1:
            return f"the ranks were given different batches ({_in_words(name, kinds)}), {REMEDY}"
    return ""


def _sort_in(kinds: list[tuple[list[Detail], list[int]]], leaves: list[Detail], rank: int) -> None:
    for known, ranks in kinds:
        if len(known) == len(leaves) and all(map(_fits, known, leaves)):
            ranks.append(rank)
            return
    kinds.append((leaves, [rank]))


def _fits(one: Detail, other: Detail) -> bool:
    """Return whether both may be of the same value."""
    same = (one.path, one.words, one.exact, len(one.numbers)) == (
        other.path,
        other.words,
        other.exact,
        len(other.numbers),
    )
    return same and alike(one.numbers, other.numbers, one.rounding)


def _in_words(name: Key, kinds: Sequence[tuple[list[Detail], list[int]]]) -> str:
    """Describe the first leaf that is not alike on all ranks, as each of them has it."""
    first, second = kinds[0][0], kinds[1][0]
    place = next((n for n, pair in enumerate(zip(first, second, strict=False)) if not _fits(*pair)), None)
    if place is None:
        found = [(f"{len(leaves)} values", ranks) for leaves, ranks in kinds]
        return f"{name_of(name)}: {_listed(found)}"
    path, words = first[place].path, [leaves[place].words for leaves, _ in kinds if place < len(leaves)]
    if len(set(words)) == 1:
        numbers = [leaves[place].numbers for leaves, _ in kinds if place < len(leaves)]
        at = next((n for n, column in enumerate(zip(*numbers, strict=False)) if len(set(column)) > 1), 0)
        words = [_with_numbers(text, each[at : at + NUMBERS]) for text, each in zip(words, numbers, strict=True)]
    found = list(zip(words, [ranks for leaves, ranks in kinds if place < len(leaves)], strict=True))
    return f"{name_of(name)}{path}: {_listed(found)}"


def _with_numbers(words: str, numbers: Sequence[float]) -> str:
    return f"{words} with {', '.join(f'{value:.4g}' for value in numbers)}" if numbers else f"{words} of its own"


def _listed(found: Sequence[tuple[str, Sequence[int]]]) -> str:
    return "; ".join(f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {words}" for words, ranks in found)


def left_out(fingerprints: Sequence[BatchFingerprint | None], readers: Readers) -> str:
    """Describe an argument that some rank was given and a rank that reads it was not; empty where there is none."""
    given = [set() if each is None else set(each[1]) for each in fingerprints]
    if all(names == given[0] for names in given):
        return ""
    for name in dict.fromkeys(name for each in fingerprints if each is not None for name in each[1]):
        giver = next(rank for rank, names in enumerate(given) if name in names)
        lacking = [
            rank
            for rank in readers(name)
            if name not in given[rank]
            and fingerprints[rank] is not None
            and not _in_another_form(given[rank], given[giver])
        ]
        if lacking:
            return (
                f"rank {giver} was given {name_of(name)} and {name_ranks(sorted(lacking))}, which reads it, was not; "
                f"pass the same batch on every rank, or make the Pipeline with "
                f"batch_options=BatchOptions(inputs='first')"
            )
    return ""


def _in_another_form(one: set[Key], other: set[Key]) -> bool:
    """Return whether one rank may have been given by position what another was given by name."""
    places = [[name for name in names if isinstance(name, int)] for names in (one, other)]
    named = [[name for name in names if isinstance(name, str) and name != "target"] for names in (one, other)]
    return len(places[0]) != len(places[1]) and len(places[0] + named[0]) == len(places[1] + named[1])


def name_of(name: Key) -> str:
    """Describe an argument."""
    if isinstance(name, int):
        return f"argument {name}"
    return repr(name) if isinstance(name, str) else f"loss_kwargs[{name[1]!r}]"
