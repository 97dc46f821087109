// The data as typed arrays, and the few questions that every drawing asks of them.

const OPS = DATA.ops;
const OP_NAMES = Object.keys(OPS);

class Row {
  constructor(run, given) {
    this.run = run;
    this.rank = given.rank;
    this.idle = given.idle;
    this.each = given.stages; // stages of this rank
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
    this.faults = new Set();
  }

  end(place) { return this.start[place] + this.length[place]; }

  name(place) {
    return this.names[place] ?? `${this.stage[place]}${OP_NAMES[this.op[place]]}${this.microbatch[place]}`;
  }

  // The first span that ends after a time.
  after(ticks, low = 0) {
    let high = this.count;
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

  // What is held, in whole-rank microbatches: a microbatch of a stage is a part of one.
  held(level) { return level / Math.max(1, this.each); }
}

class Run {
  constructor(given, number) {
    Object.assign(this, given);
    this.number = number;
    this.letter = number < 26 ? String.fromCharCode(65 + number) : `${number + 1}`;
    this.rows = given.rows.map((row) => new Row(this, row));
    this.peak = Math.max(0, ...this.rows.map((row) => row.held(row.peak)));
    this.peakSize = Math.max(0, ...this.rows.map((row) => row.held(row.peak) * this.sizeOf(row)));
  }

  // Bytes of one microbatch on a rank, where they are known; else microbatches are the unit.
  sizeOf(row) { return this.activation ? this.activation[row.rank] : 1; }

  time(ticks) { return timeText(ticks * this.tick, this.unit); }

  memory(size) { return this.activation ? bytesText(size) : short(size); }
}

// Which runs are shown, which of them with their ranks, and in which window of time, order and scale.
class View {
  constructor(runs) {
    Object.assign(this, { from: 0, to: 1, order: "run", critical: false, arrows: false, range: null, selected: null, cap: null, folds: true });
    this.take(runs);
    this.scale = this.sameUnit ? "same" : "fit";
    this.open = this.usuallyOpen();
    this.to = this.whole;
  }

  take(runs) { this.runs = runs; }

  // Few ranks are all shown; of many, the runs are compared first.
  usuallyOpen() {
    const rows = this.runs.reduce((sum, run) => sum + run.rows.length, 0);
    return new Set(rows <= 24 || !this.several ? this.runs.keys() : []);
  }

  get several() { return this.runs.length > 1; }

  get sameUnit() { return new Set(this.runs.map((run) => run.unit)).size === 1; }

  get whole() { return this.scale === "same" ? Math.max(...this.runs.map((run) => run.makespan)) || 1 : 1; }

  perTick(run) { return this.scale === "same" ? run.tick : run.tick / (run.makespan || 1); }

  isOpen(run) { return this.open.has(run.number); }

  text(at) { return this.scale === "same" ? timeText(at, this.runs[0].unit) : percent(at); }

  show(from, to) {
    const { whole } = this, size = Math.min(whole, Math.max(to - from, whole / 1e6));
    this.from = Math.min(Math.max(0, from), whole - size);
    this.to = this.from + size;
  }
}

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

function bytesText(value) {
  const place = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.max(value, 1)) / 3)));
  return `${short(value / 1e3 ** place)} ${["B", "kB", "MB", "GB", "TB"][place]}`;
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

function rowName(row, several) {
  return several ? `${row.run.letter}, rank ${row.rank}` : `rank ${row.rank}`;
}

// What is at a time of a row: the same words for the tooltip, the status line and a screen reader.
function described(row, place, several) {
  const op = OPS[OP_NAMES[row.op[place]]];
  const parts = [
    op.pair ? op.meaning : `${op.meaning} of stage ${row.stage[place]}, microbatch ${row.microbatch[place]}`,
    `${rowName(row, several)}: starts at ${row.run.time(row.start[place])}, takes ${row.run.time(row.length[place])}`,
  ];
  if (row.wait[place] > 0) {
    const whom = row.peer[place] < 0 ? "" : ` for rank ${row.peer[place]} (${row.maker(place)})`;
    parts.push(`waited ${row.run.time(row.wait[place])}${whom}`);
  }
  if (row.critical[place]) parts.push("on the critical path");
  return { title: row.name(place), lines: parts };
}

function describedIdle(row, ticks, several) {
  const next = row.after(ticks);
  const before = next > 0 ? row.end(next - 1) : 0;
  if (next >= row.count) {
    return { title: "drain", lines: [`${rowName(row, several)} has ended at ${row.run.time(before)}`] };
  }
  const gap = `${row.run.time(row.start[next] - before)}, until ${row.name(next)} at ${row.run.time(row.start[next])}`;
  const kind = next === 0 ? "fill" : row.wait[next] > 0 ? "wait" : "idle";
  const why = row.wait[next] > 0 && row.peer[next] >= 0 ? [`waits for rank ${row.peer[next]} (${row.maker(next)})`] : [];
  return { title: kind, lines: [`${rowName(row, several)}: ${gap}`, ...why] };
}
