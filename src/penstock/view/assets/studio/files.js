// Schedules as the files that the command reads and writes: CSV, one row per rank, and JSON.

const PLAIN_CELL = /^([0-9]+)(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|F|B|I|W)([0-9]+)?(?:(?:->|<-)([0-9]+))?$/;
const PAIR_CELL = /^\(([^;()]*);([^;()]*)\)OVERLAP_(?:F_B|B_F)$/;

class FileError extends Error {}

const MOST = DATA.limits.size; // stages times microbatches that a page draws
const LARGEST = 2e7; // bytes of a file; the largest schedule that is drawn has a tenth of that

// What is too large for a page, or has no size at all.
function checkSize({ rows, placement, microbatches }) {
  if (!(Number.isInteger(microbatches) && microbatches > 0 && placement.every((rank) => Number.isInteger(rank) && rank >= 0))) throw new FileError("the placement or the number of microbatches is missing or wrong");
  const actions = rows.reduce((sum, row) => sum + row.filter(Boolean).length, 0);
  for (const [what, count, most] of [["ranks", rows.length, DATA.limits.ranks], ["stages times microbatches", placement.length * microbatches, MOST], ["actions", actions, 4 * MOST]]) {
    if (count > most) throw new FileError(`${what}: ${count.toLocaleString("en")}, which is too much for a page (${most.toLocaleString("en")}); penstock view takes it`);
  }
}

// A cell of text as parts; null for what is no compute. `lost` counts those.
function readCell(text, row, column, lost) {
  const refuse = () => { throw new FileError(`row ${row}, column ${column}: ${JSON.stringify(text)} is not an action, such as 2F0, 1I3 or (1F3;0B2)OVERLAP_F_B`); };
  const pair = PAIR_CELL.exec(text);
  if (pair) {
    const parts = pair.slice(1).map((half) => (readCell(half, row, column, lost) || refuse())[0]);
    if (parts.filter((each) => each.op === F).length !== 1) refuse();
    return parts;
  }
  const plain = PLAIN_CELL.exec(text);
  if (!plain) refuse();
  const op = LETTERS.indexOf(plain[2]);
  if (plain[2].length > 1) { lost.count += 1; if (plain[4] !== undefined) lost.skips += 1; return null; }
  if (plain[3] === undefined || plain[4] !== undefined) refuse();
  return [part(Number(plain[1]), op, Number(plain[3]))];
}

function readRows(rows, lost) {
  return rows.map((row, number) => row.map((cell, column) => {
    const text = (cell ?? "").trim();
    return text === "" ? null : readCell(text, number + 1, column + 1, lost);
  }));
}

// { schedule, note } of a file's text; FileError says what is wrong with it.
function readFile(text, name) {
  const lost = { count: 0, skips: 0 };
  const schedule = /\.json$/i.test(name) || /^\s*\{/.test(text) ? readJson(text, lost) : readCsv(text, lost);
  if (!schedule.rows.some((row) => row.some(Boolean))) throw new FileError("the file has no compute in any row");
  if (lost.skips) throw new FileError("a transfer in the file skips stages; the studio knows chains of stages only");
  checkSize(schedule);
  schedule.name ||= name.replace(/\.(csv|json)$/i, "");
  return { schedule, note: lost.count ? `${lost.count} transfers and other actions that are no computes are left out` : "" };
}

function readCsv(text, lost) {
  const lines = text.replace(/^\ufeff/, "").split(/\r\n|\n|\r/);
  while (lines.length && !lines[lines.length - 1].replace(/"/g, "").trim()) lines.pop();
  const rows = readRows(lines.map((line) => line.split(",").map((cell) => cell.replace(/^\s*"|"\s*$/g, ""))), lost);
  const seen = new Map(), forwards = new Map();
  rows.forEach((row, rank) => row.forEach((cell) => (cell || []).forEach(({ stage, op, microbatch }) => {
    if (!seen.has(stage)) seen.set(stage, new Map());
    seen.get(stage).set(rank, (seen.get(stage).get(rank) || 0) + 1);
    if (op === F) { if (!forwards.has(stage)) forwards.set(stage, new Set()); forwards.get(stage).add(microbatch); }
  })));
  if (!forwards.size) throw new FileError("the schedule has no forward, so the number of microbatches is unknown");
  const stages = [...seen.keys()].reduce((most, stage) => Math.max(most, stage), 0) + 1;
  if (stages > 2 * seen.size + rows.length) throw new FileError(`stage numbers go up to ${stages - 1}, but only ${seen.size} appear: number them from 0 without gaps`);
  const placement = range(stages).map((stage) => (seen.has(stage) ? [...seen.get(stage)].reduce((best, each) => (each[1] > best[1] ? each : best))[0] : 0));
  const counts = new Map();
  for (const numbers of forwards.values()) counts.set(numbers.size, (counts.get(numbers.size) || 0) + 1);
  const [microbatches] = [...counts].reduce((best, each) => (each[1] > best[1] || (each[1] === best[1] && each[0] > best[0]) ? each : best));
  const forwardOnly = !rows.some((row) => row.some((cell) => cell && cell.some(({ op }) => op !== F)));
  return { rows, placement, microbatches, forwardOnly, name: "" };
}

function readJson(text, lost) {
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new FileError(`not JSON: ${error.message}`);
  }
  if (!found || found.penstock_schedule !== 1) throw new FileError('a schedule in JSON has "penstock_schedule": 1 at its top');
  const { placement, rows, edges, microbatches } = found;
  const whole = (value) => Number.isInteger(value) && value >= 0;
  if (!Array.isArray(placement) || !placement.length || !placement.every(whole) || !whole(microbatches) || !microbatches ||
      !Array.isArray(rows) || !rows.every((row) => Array.isArray(row) && row.every((cell) => cell === null || typeof cell === "string"))) {
    throw new FileError("the JSON is not a complete schedule: placement, microbatches or rows are missing or wrong");
  }
  const chain = Array.isArray(edges) && edges.length === placement.length - 1 && edges.every((edge, place) => Array.isArray(edge) && edge.length === 2 && edge[0] === place && edge[1] === place + 1);
  if (!chain) throw new FileError("the schedule has stages that skip others; the studio knows chains of stages only");
  if (found.recompute && found.recompute.length) throw new FileError("the schedule has stages that recompute; the studio does not price that");
  return { rows: readRows(rows, lost), placement, microbatches, forwardOnly: found.forward_only === true, name: String(found.name || "") };
}

const cellsOf = ({ rows }, idle) => rows.map((row) => row.map((cell) => (cell ? cellText(cell) : idle)));

const toCsv = (schedule) => cellsOf(schedule, "").map((row) => `${row.join(",")}\r\n`).join("");

function toJson(schedule) {
  const { name, placement, microbatches, forwardOnly } = schedule;
  const head = JSON.stringify({
    penstock_schedule: 1, name, placement, microbatches, edges: range(placement.length - 1).map((stage) => [stage, stage + 1]),
    forward_only: forwardOnly, recompute: [], passes: [],
  }, null, 2);
  const rows = cellsOf(schedule, null).map((row) => `    [${row.map((cell) => JSON.stringify(cell)).join(", ")}]`);
  return `${head.slice(0, -2)},\n  "rows": [\n${rows.join(",\n")}\n  ]\n}\n`;
}
