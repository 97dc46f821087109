// Schedules in the page: who needs what, the slots, the clock and the proof. The dependency rule is no text of this
// file: RULES is made from Python's. The rest are Python's rules once more; a test compares both in 1,000 random cases.
//
// A schedule is { rows, placement, microbatches, forwardOnly, name }; a row holds cells, null where the rank idles, and a
// cell holds one part { stage, op, microbatch }, or the two of an overlapped pair. Stages are a chain.

const [F, B, I, W] = [0, 1, 2, 3];
const LETTERS = "FBIW";
const [OUTPUT, GRADIENT] = [0, 1];

const part = (stage, op, microbatch) => ({ stage, op, microbatch });
const partText = ({ stage, op, microbatch }) => `${stage}${LETTERS[op]}${microbatch}`;

function cellText(cell) {
  if (cell.length === 1) return partText(cell[0]);
  return `(${cell.map(partText).join(";")})${cell[0].op === F ? "OVERLAP_F_B" : "OVERLAP_B_F"}`;
}

const PLACEMENTS = {
  block: (ranks, each) => Array.from({ length: ranks * each }, (_, stage) => Math.floor(stage / each)),
  loop: (ranks, each) => Array.from({ length: ranks * each }, (_, stage) => stage % ranks),
  v: (ranks, each) => Array.from({ length: ranks * each }, (_, stage) =>
    Math.floor(stage / ranks) % 2 ? ranks - 1 - (stage % ranks) : stage % ranks),
};

function stagesOf(placement, rank) {
  return [...placement.keys()].filter((stage) => placement[stage] === rank);
}

// All parts, rank by rank: `cell[i]` is the number of the first part of its cell. Opened, each part has its own.
function columnsOf({ rows, placement, microbatches }, opened = false) {
  const parts = [], rank = [], cell = [], position = [], starts = [0];
  rows.forEach((row, number) => {
    row.forEach((entry, place) => {
      const first = parts.length;
      for (const each of entry || []) {
        cell.push(opened ? parts.length : first);
        parts.push(each); rank.push(number); position.push(place);
      }
    });
    starts.push(parts.length);
  });
  return { parts, rank, cell, position, starts, stages: placement.length, microbatches };
}

const keyOf = (columns, value, stage, microbatch) => (value * columns.stages + stage) * columns.microbatches + microbatch;

// By op and stage: the (value, stage) pairs that must exist before a compute, for the same microbatch.
const needTables = new Map();

function needsOf({ stage, op }, stages) {
  if (!needTables.has(stages)) {
    const inside = ([, source]) => source >= 0 && source < stages;
    needTables.set(stages, RULES.needs.map((needs) => Array.from({ length: stages }, (_, own) => needs.map(([value, offset]) => [value, own + offset]).filter(inside))));
  }
  return needTables.get(stages)[op][stage];
}

// By key: the first part that makes a value; -1 where none does.
function makersOf(columns) {
  const found = new Int32Array(3 * columns.stages * columns.microbatches).fill(-1);
  columns.parts.forEach(({ stage, op, microbatch }, number) => {
    for (const value of RULES.makes[op]) {
      const key = keyOf(columns, value, stage, microbatch);
      if (found[key] < 0) found[key] = number;
    }
  });
  return found;
}

// By event: { on, value, source, who } of everything that it waits for, but for what a rank's own order sees to.
function waitsOf(columns) {
  const makers = makersOf(columns), found = new Array(columns.parts.length);
  for (let turn = 0; turn < 2; turn++) {
    columns.parts.forEach((each, who) => {
      const need = needsOf(each, columns.stages)[turn];
      if (!need) return;
      const key = keyOf(columns, need[0], need[1], each.microbatch), on = makers[key], event = columns.cell[who];
      if (on >= 0 && columns.rank[on] === columns.rank[who] && columns.cell[on] < event) return;
      (found[event] ??= []).push({ on, value: need[0], source: need[1], who });
    });
  }
  return found;
}

const NOTHING = [];

// Rows of events that run in order, each when what it waits for has ended: ends, and the wait that each row is stuck at.
function runRows({ starts }, lengths, waits, delayOf = () => 0) {
  const ranks = starts.length - 1, ends = new Float64Array(lengths.length).fill(-1);
  const cursor = starts.slice(0, -1), clock = new Float64Array(ranks), waiting = new Map(), stuck = new Array(ranks).fill(null);
  const ready = [...Array(ranks).keys()].reverse();
  while (ready.length) {
    const row = ready.pop();
    stuck[row] = null;
    let step = cursor[row], now = clock[row];
    steps: for (; step < starts[row + 1]; step++) {
      for (const wait of waits[step] || NOTHING) {
        const there = wait.on < 0 ? -1 : ends[wait.on];
        if (there < 0) {
          stuck[row] = wait;
          if (!waiting.has(wait.on)) waiting.set(wait.on, []);
          waiting.get(wait.on).push(row);
          break steps;
        }
        now = Math.max(now, there + delayOf(wait));
      }
      now += lengths[step];
      ends[step] = now;
      if (waiting.has(step)) { ready.push(...waiting.get(step)); waiting.delete(step); }
    }
    cursor[row] = step; clock[row] = now;
  }
  return { ends, stuck };
}

class NeverEnds extends Error {}

// The same order with idle slots where a rank must wait, so that all rows have equal length.
function align(schedule) {
  const columns = columnsOf(schedule);
  const lengths = columns.cell.map((first, number) => (first === number ? 1 : 0));
  const { ends, stuck } = runRows(columns, lengths, waitsOf(columns));
  if (stuck.some(Boolean)) throw new NeverEnds("this order never finishes");
  const slots = ends.reduce((most, end) => Math.max(most, end), 0);
  const rows = schedule.rows.map(() => new Array(slots).fill(null));
  columns.parts.forEach((each, number) => {
    const row = rows[columns.rank[number]], slot = ends[number] - 1;
    row[slot] = row[slot] ? [...row[slot], each] : [each];
  });
  return { ...schedule, rows };
}

// Without idle slots.
const packed = (schedule) => ({ ...schedule, rows: schedule.rows.map((row) => row.filter(Boolean)) });

// -- the clock

// When each part of a proved schedule starts and ends. Costs are of one stage: { forward, input, weight, hop }.
function simulate(schedule, costs) {
  const columns = columnsOf(schedule, true), { placement } = schedule, ranks = schedule.rows.length;
  const times = [costs.forward, costs.input + costs.weight, costs.input, costs.weight];
  const lengths = Float64Array.from(columns.parts, ({ op }) => times[op]);
  const waits = waitsOf(columns);
  const delayOf = ({ source, who }) => (placement[source] === columns.rank[who] ? 0 : costs.hop);
  const { ends, stuck } = runRows(columns, lengths, waits, delayOf);
  if (stuck.some(Boolean)) throw new NeverEnds("this order never finishes");
  const starts = new Float64Array(lengths.length), free = new Float64Array(lengths.length);
  const busy = new Array(ranks).fill(0);
  let first = Infinity, last = -Infinity;
  for (let number = 0; number < lengths.length; number++) {
    free[number] = number === columns.starts[columns.rank[number]] ? 0 : ends[number - 1];
    starts[number] = (waits[number] || NOTHING).reduce((most, wait) => Math.max(most, ends[wait.on] + delayOf(wait)), free[number]);
    busy[columns.rank[number]] += ends[number] - starts[number];
    first = Math.min(first, starts[number]); last = Math.max(last, ends[number]);
  }
  const makespan = last - first, whole = ranks * makespan;
  const bubble = whole ? (whole - busy.reduce((sum, time) => sum + time, 0)) / whole : 0;
  return { schedule, columns, costs, starts, ends, free, start: first, makespan, busy, bubble, peaks: peaksOf(columns, schedule.forwardOnly) };
}

// The most microbatch-stages that each rank holds at once: F takes one, B or W gives it back.
function peaksOf({ parts, starts }, forwardOnly) {
  return starts.slice(0, -1).map((first, rank) => {
    if (forwardOnly) return 1;
    let held = 0, most = 0;
    for (let number = first; number < starts[rank + 1]; number++) {
      held += [1, -1, 0, -1][parts[number].op];
      most = Math.max(most, held);
    }
    return most;
  });
}

// The same in whole-rank microbatches: what a microbatch holds in all stages of the rank.
function peakMemory(schedule, peaks) {
  return Math.max(...peaks.map((peak, rank) => peak / Math.max(1, stagesOf(schedule.placement, rank).length)));
}

// The parts of the chain that decides the makespan, by number.
function criticalPath(timeline) {
  const { columns, ends, costs, schedule: { placement } } = timeline, makers = makersOf(columns);
  let number = 0;
  for (let other = 1; other < ends.length; other++) if (ends[other] > ends[number]) number = other;
  const seen = new Set([number]);
  for (;;) {
    const { stage, op, microbatch } = columns.parts[number];
    const before = number > columns.starts[columns.rank[number]] ? [[ends[number - 1], number - 1]] : [];
    for (const [value, source] of needsOf({ stage, op }, columns.stages)) {
      const maker = makers[keyOf(columns, value, source, microbatch)];
      const delay = placement[source] === columns.rank[number] ? 0 : costs.hop;
      if (maker >= 0 && maker !== number) before.push([ends[maker] + delay, maker]);
    }
    if (!before.length) return seen;
    number = before.reduce((best, each) => (each[0] > best[0] ? each : best))[1];
    if (seen.has(number)) return seen;
    seen.add(number);
  }
}
