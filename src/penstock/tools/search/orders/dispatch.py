"""Orders made by running the pipeline: each rank takes what a rule prefers among what is there.

A rank that is free looks at the forwards and input backwards that have arrived. Forwards and
backwards take turns; rules differ in whose turn it is, which stage goes first, and whether to
wait a little for the preferred kind.

Two things make this a search and not one heuristic:

- The clock that decides the order need not tell the true times. An order that is right
  under slightly different costs (all weight gradients short, hops free) is often better under
  the true ones than the order that those would give, since a greedy choice at a true tie
  breaker's mercy makes an uneven pattern that repeats. So the times of the clock are parameters.
- The order is all that is kept. `evaluate` prices it with the true times and fills in W anew.

Why it never gets stuck, whatever the rule: of the microbatches that have not passed all of a
rank's stages, the oldest has its remaining memory reserved; any other may take only what is
left beside that. So the oldest always can go forward on every rank, then backward, which needs
no memory (or what forwards leave alone for recomputing, once the W that are owed have run), and
then its W gives back at least what the next oldest needs.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.schedule.builders.problem import Orders, Problem

__all__ = ["Rule", "dispatch"]

EPSILON = 1e-9
NEVER = float("inf")


@dataclass(frozen=True)
class Rule:
    """What a rank prefers, and the clock by which it sees what has arrived."""

    turn: Literal["alternate", "forward", "input"] = "alternate"  # whose turn it is when both are there
    forward: Literal["deep", "rested", "same", "old"] = "deep"  # which stage's F goes first
    input: Literal["deep", "shallow", "rested", "same", "old"] = "deep"  # which stage's I goes first
    patience: float = 0.0  # how long to wait for the kind whose turn it is, in forwards
    input_time: float = 1.0  # the clock: of I and W in units of true forwards, of a hop in true hops
    weight_time: float = 0.3
    hop_time: float = 0.0


def dispatch(problem: Problem, rule: Rule) -> Orders:
    """The order of F and I that the rule makes."""
    run = _Dispatch(problem, rule)
    while run.events:
        time, rank = heapq.heappop(run.events)
        if run.free[rank] <= time + EPSILON:
            run.step(rank, time)
    return run.orders


class _Dispatch:
    """The state of one run.

    s: stage. `forwards[s]` and `inputs[s]` hold (when it is there, microbatch) in order of time.
    """

    def __init__(self, problem: Problem, rule: Rule) -> None:
        stages, ranks, count = problem.stages, problem.ranks, problem.microbatches
        self.problem, self.rule = problem, rule
        self.home = problem.placement.by_stage
        self.stages_of = [problem.placement.stages_of(rank) for rank in range(ranks)]
        self.forward_time = [problem.time[stage * count] for stage in range(stages)]
        backward = [problem.time[problem.size + stage * count] for stage in range(stages)]
        weight = [problem.time[2 * problem.size + stage * count] for stage in range(stages)]
        mean = sum(self.forward_time) / stages
        self.input_time = _scaled(backward, rule.input_time * mean)
        self.weight_time = _scaled(weight, rule.weight_time * mean)
        self.patience = rule.patience * mean
        self.hops = [sum(problem.wires[place * count][:2]) * rule.hop_time for place in range(2 * stages)]
        self.forwards: list[deque[tuple[float, int]]] = [deque() for _ in range(stages)]
        self.inputs: list[deque[tuple[float, int]]] = [deque() for _ in range(stages)]
        self.forwards[0].extend((0.0, microbatch) for microbatch in range(count))
        self.done = [0] * stages  # forwards so far
        self.used = [0] * (2 * stages)  # when a stage's F or I last had its turn
        self.turns = 0
        self.owed: list[deque[int]] = [deque() for _ in range(ranks)]
        self.held, self.free = [0.0] * ranks, [0.0] * ranks
        self.last = [(-1, True)] * ranks  # the stage of the last F or I, and whether it was an I
        self.events = [(0.0, self.home[0])]
        self.orders: Orders = [[] for _ in range(ranks)]

    def step(self, rank: int, now: float) -> None:
        """Let a free rank run one action, if there is one to run."""
        inputs, next_input = self._inputs(rank, now)
        forwards, next_forward, blocked = self._forwards(rank, now)
        owed, rule = self.owed[rank], self.rule
        forward_turn = rule.turn == "forward" or (rule.turn == "alternate" and self.last[rank][1])
        if forward_turn and forwards:
            self._run_forward(rank, now, self._pick(rank, forwards, self.forwards, rule.forward, 0))
        elif forward_turn and blocked and owed:
            self._run_weight(rank, now)  # it is the forward's turn: make room for it
        elif inputs:
            stage = self._pick(rank, inputs, self.inputs, rule.input, self.problem.stages)
            if owed and self.held[rank] + self.problem.input_room[stage] > self.problem.caps[rank]:
                self._run_weight(rank, now)  # it recomputes, and there is no room
            else:
                self._run_input(rank, now, stage)
        elif forwards and not (not forward_turn and next_input - now < self.patience):
            self._run_forward(rank, now, self._pick(rank, forwards, self.forwards, rule.forward, 0))
        elif owed and not forwards:
            gap = min(next_input, next_forward) - now
            if blocked or gap >= self.weight_time[owed[0]] - EPSILON:
                self._run_weight(rank, now)

    def _inputs(self, rank: int, now: float) -> tuple[list[int], float]:
        """The stages whose next I is there, and when the next other one will be."""
        there, soon = [], NEVER
        for stage in self.stages_of[rank]:
            queue = self.inputs[stage]
            if queue:
                arrival = queue[0][0]
                if arrival <= now + EPSILON:
                    there.append(stage)
                elif arrival < soon:
                    soon = arrival
        return there, soon

    def _forwards(self, rank: int, now: float) -> tuple[list[int], float, bool]:
        """The same of F, among those that memory allows; and whether it forbids one that is there."""
        stages, most, done = self.stages_of[rank], self.problem.most, self.done
        oldest = done[stages[-1]]  # of those that have not passed all stages here
        reserved = sum([most[stage] for stage in stages if done[stage] <= oldest])
        room = self.problem.caps[rank] - self.problem.spare[rank] - self.held[rank]
        there, soon, blocked = [], NEVER, False
        for stage in stages:
            queue = self.forwards[stage]
            if not queue:
                continue
            arrival, microbatch = queue[0]
            need = most[stage] + (0.0 if microbatch == oldest else reserved)
            if arrival > now + EPSILON:
                if need <= room and arrival < soon:
                    soon = arrival
            elif need <= room:
                there.append(stage)
            else:
                blocked = True
        return there, soon, blocked

    def _pick(
        self, rank: int, stages: list[int], queues: Sequence[deque[tuple[float, int]]], how: str, base: int
    ) -> int:
        if len(stages) == 1 or how == "shallow":
            return stages[0]
        if how == "deep":
            return stages[-1]
        if how == "old":
            return min(stages, key=lambda stage: queues[stage][0][1])
        if how == "same" and self.last[rank][0] in stages:
            return self.last[rank][0]
        if how == "same" and not base:
            return stages[-1]
        return min(stages, key=lambda stage: self.used[base + stage])

    def _run_weight(self, rank: int, now: float) -> None:
        stage = self.owed[rank].popleft()
        self.held[rank] -= self.problem.held[stage]
        self._busy(rank, now + self.weight_time[stage])

    def _run_forward(self, rank: int, now: float, stage: int) -> None:
        microbatch = self.forwards[stage].popleft()[1]
        self.done[stage] += 1
        self.held[rank] += self.problem.most[stage]
        end = now + self.forward_time[stage]
        self._log(rank, stage, stage * self.problem.microbatches + microbatch, is_input=False)
        self._busy(rank, end)
        if stage + 1 < self.problem.stages:
            self._hand_over(self.forwards[stage + 1], stage + 1, end + self.hops[stage], microbatch)
        else:
            self.inputs[stage].append((end, microbatch))

    def _run_input(self, rank: int, now: float, stage: int) -> None:
        microbatch = self.inputs[stage].popleft()[1]
        self.owed[rank].append(stage)
        self.held[rank] -= self.problem.most[stage] - self.problem.held[stage]
        end = now + self.input_time[stage]
        number = self.problem.size + stage * self.problem.microbatches + microbatch
        self._log(rank, stage, number, is_input=True)
        self._busy(rank, end)
        if stage:
            self._hand_over(self.inputs[stage - 1], stage - 1, end + self.hops[self.problem.stages + stage], microbatch)

    def _log(self, rank: int, stage: int, number: int, is_input: bool) -> None:
        self.turns += 1
        self.used[stage + (self.problem.stages if is_input else 0)] = self.turns
        self.last[rank] = (stage, is_input)
        self.orders[rank].append(number)

    def _busy(self, rank: int, end: float) -> None:
        self.free[rank] = end
        heapq.heappush(self.events, (end, rank))

    def _hand_over(self, queue: deque[tuple[float, int]], stage: int, arrival: float, microbatch: int) -> None:
        queue.append((arrival, microbatch))
        heapq.heappush(self.events, (arrival, self.home[stage]))


def _scaled(times: list[float], mean: float) -> list[float]:
    """The same proportions around another mean."""
    now = sum(times) / len(times)
    return [time * mean / now for time in times] if now else times
