"""Of a schedule: the order of its actions, where it comes from, and the files that it is read from and written to."""

from __future__ import annotations

from typing import Any, Literal

from penstock import writing
from penstock.compat.pipelining.actions import Orders, check_order, orders_of, schedule_of
from penstock.compat.pipelining.errors import InvalidOrder, UnsupportedFormat
from penstock.compat.pipelining.stage import _PipelineStageBase
from penstock.errors import UsageError
from penstock.schedule import Op, Schedule, build, lower
from penstock.schedule.files.reading import read_file
from penstock.schedule.files.text import from_csv, rows_to_csv

Format = Literal["compute_only", "compute_comms"]


class Ordered:
    """An order of actions for the stages of this rank and of the others."""

    family: str | None = None  # A family of penstock.schedule; None where the order comes from elsewhere.
    _use_full_backward: bool | None = None  # False: in the order, B is the backward for the inputs alone
    _given_ranks: dict[int, int] | None = None  # The ranks of stages, where they were passed.
    _n_microbatches: int

    def __init__(self, stages: list[_PipelineStageBase]) -> None:
        self._all_stages = stages
        self._num_stages = stages[0].num_stages
        self.pp_group_size, self.rank = stages[0].group_size, stages[0].group_rank
        self.pipeline_order: dict[int, list[Any]] = {}
        self._with_comms: dict[int, list[Any]] | None = None

    def close(self) -> None:
        """End what was made of the order."""
        raise NotImplementedError

    def _built(self, family: str) -> Schedule:
        per_rank, left = divmod(self._num_stages, self.pp_group_size)
        if left or per_rank != len(self._all_stages):
            raise UsageError(
                f"{type(self).__name__}: {self._num_stages} stages on {self.pp_group_size} ranks are "
                f"{self._num_stages / self.pp_group_size:g} per rank, but this rank has {len(self._all_stages)}; give "
                f"each rank the same number"
            )
        return build(family, self.pp_group_size, self._n_microbatches, per_rank)

    @property
    def pipeline_order_with_comms(self) -> dict[int, list[Any]]:
        if self._with_comms is not None:
            return self._with_comms
        return orders_of(lower(self._schedule()))

    @pipeline_order_with_comms.setter
    def pipeline_order_with_comms(self, orders: dict[int, list[Any]]) -> None:
        self._with_comms = orders

    @property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        return dict(enumerate(self._schedule().placement))

    def _tell_stages(self, placed: dict[int, int]) -> None:
        for stage in self._all_stages:
            stage.stage_index_to_group_rank = placed

    def _schedule(self) -> Schedule:
        """Return what runs: the order as it stands now, or with the transfers that it was given."""
        orders: Orders = self.pipeline_order if self._with_comms is None else self._with_comms
        if not orders:
            raise UsageError(f"{type(self).__name__} has no order yet; set pipeline_order, or call _load_csv(file)")
        schedule = self._read(orders)
        return schedule if self._with_comms is None else schedule.replace(passes=("transfers",))

    def _read(self, orders: Orders) -> Schedule:
        """Read an order as a schedule, by what `use_full_backward` says about its `B`."""
        name = self.family or type(self).__name__
        full = self._use_full_backward is not False
        schedule = schedule_of(orders, self._n_microbatches, name, full_backward=full)
        if self._use_full_backward and any(action.op in (Op.I, Op.W) for _, _, action in schedule.parts()):
            raise InvalidOrder(
                "use_full_backward=True, but the order has backwards in two halves, I and W; leave it out, or pass "
                "False if B is the backward for the inputs alone"
            )
        return schedule

    def _load_csv(self, filename: str, format: Format = "compute_only") -> None:
        """Take the order of a file, torch's or one that `penstock` wrote, and prove at once that it can run.

        A file in torch's older notation for zero bubble, `0F0,0B0,0W0`, is read by a schedule that was made with
        `use_full_backward=False`.
        """
        found = from_csv(read_file(filename), {"microbatches": self._n_microbatches})
        self._prepare_schedule_with_comms(orders_of(found), format)

    def _prepare_schedule_with_comms(self, actions: dict[int, list[Any]], format: Format = "compute_only") -> None:
        if format not in ("compute_only", "compute_comms"):
            raise UnsupportedFormat(f"format={format!r} is not implemented: choose 'compute_only' or 'compute_comms'")
        schedule = self._read(actions)
        if format == "compute_only" and schedule.passes:
            rank, place, action = next(each for each in schedule.parts() if not each[2].op.is_compute)
            raise UsageError(
                f"Expected compute-only schedule but found communication action '{action}' at rank {rank}, position "
                f"{place}; pass format='compute_comms' for an order that has its transfers"
            )
        check_order(schedule, self.pp_group_size, self._num_stages)
        self._check_ranks(schedule)
        self.close()
        actions = orders_of(schedule)
        if format == "compute_comms":
            self._with_comms = actions
        else:
            self.pipeline_order, self._with_comms = actions, None
        self._tell_stages(dict(enumerate(schedule.placement)))

    _load_actions = _prepare_schedule_with_comms  # Its older name.

    def _dump_csv(self, filename: str, format: Format = "compute_comms") -> None:
        """Write the order, in the dialect that torch and `penstock` read."""
        schedule = self._schedule()
        if format == "compute_comms" and self._with_comms is None:
            schedule = lower(schedule)
        elif format == "compute_only":
            schedule = schedule.compute()
        writing.save(filename, rows_to_csv(schedule.rows))

    def _check_ranks(self, schedule: Schedule) -> None:
        """Check that a placement that was passed is the order's: the order decides."""
        placed = dict(enumerate(schedule.placement))
        for stage, rank in ({} if self._given_ranks is None else self._given_ranks).items():
            if placed.get(stage) != rank:
                raise UsageError(
                    f"stage_index_to_group_rank has stage {stage} on rank {rank}, but the order runs it on "
                    f"{f'rank {placed[stage]}' if stage in placed else 'no rank'}; give both the same placement"
                )
