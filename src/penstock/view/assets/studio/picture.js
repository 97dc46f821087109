// A schedule as the data that the timeline draws: the same that Python writes into its pages.

const TICKS = 1e7;

// What a rank holds over time: F takes one as it starts, B or W gives it back.
function heldOf(parts, starts, ends, forwardOnly) {
  const changes = parts.flatMap(({ op }, place) => {
    if (op === F) return forwardOnly ? [[starts[place], 1], [ends[place], -1]] : [[starts[place], 1]];
    return op === I ? [] : [[ends[place], -1]];
  }).sort((one, other) => one[0] - other[0] || one[1] - other[1]);
  const times = [], levels = [];
  let held = 0;
  for (const [time, change] of changes) {
    held += change;
    if (times.length && times[times.length - 1] === time) levels[levels.length - 1] = held;
    else { times.push(time); levels.push(held); }
  }
  return [times, levels];
}

// Without a proof there is no clock: every rank's computes one after the other, as if nobody waited.
function withoutWaits(schedule, costs) {
  const columns = columnsOf(schedule, true), times = [costs.forward, costs.input + costs.weight, costs.input, costs.weight];
  const starts = new Float64Array(columns.parts.length), ends = new Float64Array(columns.parts.length);
  columns.parts.forEach(({ op }, number) => {
    starts[number] = number === columns.starts[columns.rank[number]] ? 0 : ends[number - 1];
    ends[number] = starts[number] + times[op];
  });
  return { schedule, columns, costs, starts, ends, free: starts, start: 0, makespan: ends.reduce((most, end) => Math.max(most, end), 0), busy: [], bubble: 0, peaks: peaksOf(columns, schedule.forwardOnly) };
}

function runData(timeline, label, proved) {
  const { schedule, columns, starts, ends, free, costs, makespan } = timeline, { placement } = schedule;
  const tick = makespan / TICKS || 1, whole = (time) => Math.round((time - timeline.start) / tick);
  const makers = proved ? makersOf(columns) : null, path = proved ? criticalPath(timeline) : new Set();
  const causeOf = (number) => {
    let best = null;
    const { microbatch } = columns.parts[number];
    for (const [value, source] of makers ? needsOf(columns.parts[number], columns.stages) : []) {
      const maker = makers[keyOf(columns, value, source, microbatch)];
      if (maker >= 0 && columns.rank[maker] !== columns.rank[number] && (best === null || ends[maker] + costs.hop > best[0])) best = [ends[maker] + costs.hop, maker];
    }
    return best && best[1];
  };
  const rows = schedule.rows.map((_, rank) => {
    const first = columns.starts[rank], numbers = range(columns.starts[rank + 1] - first, first), own = stagesOf(placement, rank);
    const parts = numbers.map((number) => columns.parts[number]), causes = numbers.map(causeOf), of = (values) => numbers.map((number) => values[number]);
    const [times, levels] = heldOf(parts, of(starts), of(ends), schedule.forwardOnly);
    return {
      rank, stages: own.length, idle: [0, 0, 0, 0],
      op: parts.map(({ op }) => LETTERS[op]), stage: parts.map(({ stage }) => stage), microbatch: parts.map(({ microbatch }) => microbatch),
      chunk: parts.map(({ stage }) => Math.max(0, own.indexOf(stage))), names: {},
      start: of(starts).map(whole), length: numbers.map((number) => Math.round((ends[number] - starts[number]) / tick)),
      wait: numbers.map((number) => (proved ? Math.round((starts[number] - free[number]) / tick) : 0)),
      peer: causes.map((cause) => (cause === null ? -1 : columns.rank[cause])),
      cause: causes.map((cause) => (cause === null ? -1 : cause - columns.starts[columns.rank[cause]])),
      critical: numbers.flatMap((number, place) => (path.has(number) ? [place] : [])),
      memory: [times.map(whole), levels], sends: [[], [], []],
    };
  });
  return { label, kind: proved ? "simulated" : "not proved", unit: "", tick, makespan, idle: timeline.bubble, sizes: [schedule.rows.length, placement.length, schedule.microbatches], rows };
}

// Which cell of its row, without idle slots, each span of a row belongs to: what a drag moves.
function cellsOfSpans(row) {
  const found = [];
  row.filter(Boolean).forEach((cell, place) => cell.forEach(() => found.push(place)));
  return found;
}

// The spans of a run that its faults are about.
function markFaults(run, { schedule: { rows }, faults }) {
  const firsts = rows.map((row) => { let count = 0; return row.map((cell) => (count += cell ? cell.length : 0) - (cell ? cell.length : 0)); });
  for (const { rank, position } of faults) {
    const cell = rank === null || position === null ? null : rows[rank][position];
    (cell || []).forEach((_, place) => run.rows[rank].faults.add(firsts[rank][position] + place));
  }
}
