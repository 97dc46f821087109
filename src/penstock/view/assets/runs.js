// The data as typed arrays, and the few questions that every drawing asks of them.

const DATA = JSON.parse(document.getElementById("data").textContent);
const OPS = DATA.ops;
const OP_NAMES = Object.keys(OPS);

class Row {
  constructor(run, given) {
    this.run = run;
    this.rank = given.rank;
    this.idle = given.idle;
    this.count = given.start.length;
    this.op = Uint8Array.from(given.op, (name) => Math.max(0, OP_NAMES.indexOf(name)));
    for (const name of ["stage", "chunk", "microbatch", "start", "length", "wait", "peer", "cause"]) {
      this[name] = Int32Array.from(given[name]);
    }
    this.names = given.names;
    this.critical = new Uint8Array(this.count);
    for (const place of given.critical) this.critical[place] = 1;
    this.times = Int32Array.from(given.memory[0]);
    this.levels = Int32Array.from(given.memory[1]);
    this.peak = this.levels.reduce((most, level) => Math.max(most, level), 0);
    this.sends = { start: Int32Array.from(given.sends[0]), length: Int32Array.from(given.sends[1]), names: given.sends[2] };
  }

  end(place) { return this.start[place] + this.length[place]; }

  name(place) {
    return this.names[place] ?? `${this.stage[place]}${OP_NAMES[this.op[place]]}${this.microbatch[place]}`;
  }

  // The first span that ends after a time.
  after(ticks) {
    let low = 0, high = this.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end(middle) > ticks) high = middle; else low = middle + 1;
    }
    return low;
  }

  maker(place) {
    const peer = this.peer[place];
    return peer < 0 ? "" : this.run.rows[peer].name(this.cause[place]);
  }
}

class Run {
  constructor(given, number) {
    Object.assign(this, given);
    this.letter = number < 26 ? String.fromCharCode(65 + number) : `${number + 1}`;
    this.rows = given.rows.map((row) => new Row(this, row));
  }

  time(ticks) { return timeText(ticks * this.tick, this.unit); }
}

const RUNS = DATA.runs.map((given, number) => new Run(given, number));
const SEVERAL = RUNS.length > 1;
const SAME_UNIT = new Set(RUNS.map((run) => run.unit)).size === 1;

function short(value) {
  return `${Number(value.toPrecision(4))}`;
}

const ROUNDED = 0.99995; // of a unit is written as a whole one

function timeText(value, unit) {
  if (unit !== "s") return `${short(value)}${unit ? " " + unit : ""}`;
  if (Math.abs(value) >= ROUNDED || value === 0) return `${short(value)} s`;
  if (Math.abs(value) >= ROUNDED * 1e-3) return `${short(value * 1e3)} ms`;
  return `${short(value * 1e6)} \u00b5s`;
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

function rowName(row) {
  return SEVERAL ? `${row.run.letter}, rank ${row.rank}` : `rank ${row.rank}`;
}

// What is at a time of a row: the same words for the tooltip, the status line and a screen reader.
function described(row, place) {
  const op = OPS[OP_NAMES[row.op[place]]];
  const parts = [
    op.pair ? op.meaning : `${op.meaning} of stage ${row.stage[place]}, microbatch ${row.microbatch[place]}`,
    `${rowName(row)}: starts at ${row.run.time(row.start[place])}, takes ${row.run.time(row.length[place])}`,
  ];
  if (row.wait[place] > 0) {
    parts.push(`waited ${row.run.time(row.wait[place])}${waitedFor(row, place)}`);
  }
  if (row.critical[place]) parts.push("on the critical path");
  return { title: row.name(place), lines: parts };
}

function waitedFor(row, place) {
  return row.peer[place] < 0 ? "" : ` for rank ${row.peer[place]} (${row.maker(place)})`;
}

function describedIdle(row, ticks) {
  const next = row.after(ticks);
  const before = next > 0 ? row.end(next - 1) : 0;
  if (next >= row.count) {
    return { title: "drain", lines: [`${rowName(row)} has ended at ${row.run.time(before)}`] };
  }
  const gap = `${row.run.time(row.start[next] - before)}, until ${row.name(next)} at ${row.run.time(row.start[next])}`;
  const kind = next === 0 ? "fill" : row.wait[next] > 0 ? "wait" : "idle";
  const why = row.wait[next] > 0 && row.peer[next] >= 0 ? [`waits for rank ${row.peer[next]} (${row.maker(next)})`] : [];
  return { title: kind, lines: [`${rowName(row)}: ${gap}`, ...why] };
}
