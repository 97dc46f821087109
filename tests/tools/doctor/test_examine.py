"""What `penstock doctor` checks, and when it finds fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.errors import UsageError
from penstock.tools.doctor import examine
from penstock.tools.doctor.findings import Finding
from penstock.tools.doctor.ranks import Answers

KILLED = "was killed by SIGKILL"


SOUND: dict[str, dict[str, object]] = {
    "compare_with_plain_loop": {"difference": 0.0},
    "compare_on_threads": {"difference": 0.0},
    "survive_a_death": {"seconds": 0.1},
    "count_host_reads": {"reads": 0, "operations": {}},
    "measure_products": {"flops": 1e12, "bandwidth": 1e12, "memory": 1e10, "dtype": "bfloat16"},
    "measure_links": {"pairs": {"0-1": {"latency": 1e-5, "bandwidth": 1e9}}},
    "measure_overlap": {"hidden": 0.9},
}


class Ranks:
    """A group of ranks whose answers are known: sound ones, but for one check."""

    def __init__(self, check: str, answers: Answers) -> None:
        self.check, self.answers = check, answers

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, check: Callable[..., object], *_: object, limit: float) -> Answers:
        name = check.__name__
        return self.answers if name == self.check else Answers({0: SOUND[name], 1: SOUND[name]})


def judged(monkeypatch: pytest.MonkeyPatch, function: str, answers: Answers, check: str, kind: str = "cpu") -> Finding:
    monkeypatch.setattr(examine, "RankGroup", lambda *_, **__: Ranks(function, answers))
    monkeypatch.setattr(examine, "device_type", lambda: kind)
    return next(each for each in examine.examine(["1f1b"], [2]) if each.check == check)


def test_names_of_other_libraries_are_families_too() -> None:
    assert examine.training_families(("ZBVZeroBubble", "1F1B")) == ("zb-v", "1f1b")
    assert "forward-only" not in examine.training_families()
    with pytest.raises(UsageError, match="forward-only has no backward"):
        examine.training_families(("forward-only",))


def test_families_are_tried_on_two_ranks_and_on_as_many_as_asked_for() -> None:
    assert examine.ranks_to_try(2) == (2,)
    assert examine.ranks_to_try(5) == (2, 5)


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "device_type", lambda: "cuda")
    monkeypatch.setattr(examine, "device_count", lambda kind: 2)
    with pytest.raises(UsageError, match="--ranks 3: this machine has 2 devices of type cuda"):
        examine.ranks_to_try(3)
    monkeypatch.setattr(examine, "device_count", lambda kind: 1)
    with pytest.raises(UsageError, match="needs two devices"):
        examine.ranks_to_try(None)


def test_a_difference_to_the_plain_loop_fails_with_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(figures={0: {"difference": 0.0}}, errors={1: ("AssertionError: differs by 0.1", "a traceback")})
    found = judged(monkeypatch, "compare_with_plain_loop", answers, "1f1b on 2")
    assert (found.outcome, found.text) == ("FAIL", "rank 1: AssertionError: differs by 0.1")
    assert "a traceback" in found.details


@pytest.mark.parametrize(
    ("answers", "outcome", "text"),
    [
        (Answers(figures={0: {"seconds": 0.4}}, missing={1: KILLED}), "PASS", "named by all others in 0.4 s"),
        (Answers(figures={0: {"seconds": 31.0}}, missing={1: KILLED}), "FAIL", "named by all others after 31.0 s"),
        (Answers(missing={0: "gave no answer within 45 s", 1: KILLED}), "FAIL", "rank 0 gave no answer"),
        (
            Answers(errors={0: ("AssertionError: rank 0 was named", "")}, missing={1: KILLED}),
            "FAIL",
            "rank 0 was named",
        ),
        (Answers(figures={0: {"seconds": 0.4}}, missing={1: "gave no answer within 45 s"}), "FAIL", "rank 1 gave no"),
    ],
)
def test_a_killed_rank_is_to_be_named_in_time_by_all_others(
    monkeypatch: pytest.MonkeyPatch, answers: Answers, outcome: str, text: str
) -> None:
    found = judged(monkeypatch, "survive_a_death", answers, "a killed rank")
    assert found.outcome == outcome
    assert text in found.text


def test_reads_by_the_host_are_a_warning_with_their_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers({0: {"reads": 1}, 1: {"reads": 9, "operations": {"_local_scalar_dense": 9}}})
    found = judged(monkeypatch, "count_host_reads", answers, "host reads")
    assert found.outcome == "WARN"
    assert "9 per step and rank" in found.text
    assert "_local_scalar_dense" in found.text


@pytest.mark.parametrize(("kind", "outcome"), [("cuda", "WARN"), ("cpu", "INFO")])
def test_transfers_that_kernels_do_not_hide_are_a_warning_where_they_could(
    monkeypatch: pytest.MonkeyPatch, kind: str, outcome: str
) -> None:
    answers = Answers({0: {"hidden": 0.9}, 1: {"hidden": 0.1}})
    found = judged(monkeypatch, "measure_overlap", answers, "overlap", kind)
    assert (found.outcome, found.text) == (outcome, "10% of a transfer is hidden by kernels that take as long")


def test_communicators_bound_to_devices_are_tried_where_there_are_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(missing={0: "gave no answer within 45 s"})
    found = judged(monkeypatch, "compare_with_plain_loop", answers, "1f1b on 2, device_id=", kind="cuda")
    assert (found.outcome, found.text) == ("FAIL", "rank 0 gave no answer within 45 s")
