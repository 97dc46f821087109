// The studio: controls in, two schedules out, drawn, proved and priced while they change.

const LETTER = ["A", "B"];
let shown = [], due = 0, late = 0, slow = 0, view = null, linked = null; // linked: the words of an address whose view is to come

// -- drawing

const frame = () => drawAll(gantt, memory, overview, true);

function redraw() {
  if (!due) due = requestAnimationFrame(() => { due = 0; frame(); });
}

// Everything anew, from the state. The selection stays where it is unless its run has changed.
function update() {
  const begin = performance.now();
  shown = state.slots.map((slot) => {
    const { schedule, ...rest } = scheduleOf(slot);
    return schedule ? shownOf(schedule) : rest;
  });
  const runs = [];
  shown.forEach((each, place) => {
    if (!each.schedule) return;
    const run = new Run(runData(each.timeline, nameOf(each.schedule), each.proved), runs.length);
    run.slot = place; run.letter = LETTER[place];
    markFaults(run, each);
    runs.push(run);
  });
  takeRuns(runs);
  frame(); // before anything else changes, so that no layout is asked for twice
  showControls();
  state.slots.forEach(showSlot);
  spent = performance.now() - begin;
  showRange(byId("range"), view);
  legend(byId("legend"), runs);
  searchSoon();
  if (linked && !shown.some((each) => each.waiting)) {
    const words = linked;
    linked = null;
    readView(controls, words);
  }
  writeSoon();
  clearTimeout(slow); slow = setTimeout(drawScatter, 80);
}
let spent = 0;

function takeRuns(runs) {
  const all = view.from === 0 && view.to >= view.whole * (1 - 1e-9);
  view.take(runs.length ? runs : [new Run({ label: "nothing to show", kind: "", unit: "", tick: 1, makespan: 1, idle: 0, sizes: [0, 0, 0], rows: [] }, 0)]);
  view.open = new Set(runs.keys());
  view.cap = state.cap || null;
  if (view.selected) {
    const { row, place } = view.selected, same = view.runs.find((run) => run.letter === row.run.letter);
    const now = same && same.rows[row.rank];
    view.selected = now && place < now.count && now.name(place) === row.name(place) ? { row: now, place } : null;
  }
  if (all) view.show(0, view.whole); else view.show(view.from, view.to);
}

const nameOf = (schedule) => (schedule.from ? `${schedule.name}: ${schedule.from}` : schedule.name || "own");

let search = ""; // the key of the search that is under way

// The quick search takes a moment: it rests now and then, so that the page answers, and ends when it is no longer wanted.
async function searchSoon() {
  const key = shown.some((each) => each.waiting) ? searchKey() : "";
  if (key === search) return;
  search = key;
  if (!key) return;
  let since = performance.now();
  const rest = async () => {
    if (performance.now() - since > 25) {
      await new Promise((go) => { setTimeout(go); });
      since = performance.now();
    }
    return key === search;
  };
  const found = await quickSearch(state.ranks, state.microbatches, costsOfRank(), state.cap || Infinity, rest);
  if (found === undefined) return;
  remembered(key, () => found);
  search = "";
  update();
}

// -- the cards of the two schedules

function showSlot(slot, place) {
  const box = byId(`slot-${place}`), each = shown[place], part = (kind) => box.querySelector(`.${kind}`);
  part("source").value = slot.source;
  part("source").querySelector('[value="own"]').hidden = !slot.own;
  const family = FAMILIES[slot.source], fixed = !family || family.layout === "v";
  part("each").disabled = fixed;
  part("each").value = fixed && each.schedule ? short(each.schedule.placement.length / each.schedule.rows.length) : slot.each;
  part("undo").disabled = !slot.past.length;
  part("message").textContent = slot.note;
  for (const kind of ["csv", "json"]) part(kind).disabled = !each.schedule;
  part("about").textContent = family ? family.summary : { search: "the shortest of a few hundred orders within the memory cap; penstock search looks further", own: "moved or loaded; it keeps its own sizes", none: "" }[slot.source];
  const figures = part("figures");
  if (!each.schedule) {
    figures.replaceChildren(element("p", { text: each.waiting ? "searching ..." : each.reason || "" }));
    part("proof").replaceChildren();
    return;
  }
  figures.replaceChildren(figuresOf(each));
  part("proof").replaceChildren(...proofOf(each));
}

function figuresOf({ proved, timeline, memory, bound, over, schedule }) {
  const entries = [
    ["makespan", proved ? short(timeline.makespan) : "-"],
    ["idle", proved ? percent(timeline.bubble) : "-"],
    ["memory", `${short(memory)}${over ? " (over the cap)" : ""}`],
    ["lower bound", bound === null ? "-" : over ? `${short(bound)} within the cap` : `${short(bound)} (${timeline.makespan > bound * (1 + 1e-9) ? `${percent(timeline.makespan / bound - 1)} above it` : "reached"})`],
    ["sizes", `${schedule.rows.length} x ${schedule.microbatches}, ${schedule.placement.length} stage${schedule.placement.length > 1 ? "s" : ""}`],
  ];
  const list = element("dl");
  for (const [name, text] of entries) list.append(element("div", { kind: over && name === "memory" ? "bad" : "", title: name === "memory" ? "in whole-rank microbatches" : "" }, element("dt", { text: name }), element("dd", { text })));
  return list;
}

function proofOf({ faults, proved }) {
  if (proved) return [element("p", { kind: "holds", text: "\u2713 The proof holds: complete, in order, no deadlock." })];
  const count = `\u2717 No proof: ${faults.length} fault${faults.length > 1 ? "s" : ""}. Drawn as if nobody waited.`;
  const list = element("ul", {}, ...faults.slice(0, 6).map((each) => element("li", { text: faultText(each) })));
  if (faults.length > 6) list.append(element("li", { text: `... and ${faults.length - 6} more` }));
  return [element("p", { kind: "fails", text: count }), list];
}

// -- the scatter of all families

function drawScatter() {
  const costs = costsOfRank(), points = [];
  for (const [name, { stages }] of Object.entries(FAMILIES)) {
    const each = stagesPerRank(name, stages);
    if (name === "forward-only" || state.ranks * state.microbatches * each > MOST / 4) continue;
    const schedule = remembered(JSON.stringify([name, state.ranks, state.microbatches, each]), () => build(name, state.ranks, state.microbatches, each));
    const timeline = simulate(schedule, stageCosts(costs, each));
    points.push({ x: peakMemory(schedule, timeline.peaks), y: timeline.bubble, name });
  }
  shown.forEach((each, place) => {
    if (!each.proved || each.schedule.forwardOnly) return;
    const at = { x: each.memory, y: each.timeline.bubble, mark: LETTER[place] };
    const same = points.find((point) => !point.kind && point.name === each.schedule.name && Math.abs(point.x - at.x) < 1e-9 && Math.abs(point.y - at.y) < 1e-9);
    if (same) Object.assign(same, { mark: same.mark ? `${same.mark}, ${LETTER[place]}` : LETTER[place], kind: "chosen" });
    else points.push({ ...at, name: each.schedule.name, kind: "chosen" });
  });
  scatter.draw(points);
  byId("scatter-none").hidden = points.length > 0;
}

// -- the address and files

let complaint = ""; // about the address that was given

function readAddress() {
  linked = new URLSearchParams(location.hash.length > 1 ? location.hash.slice(1) : DATA.begin);
  complaint = readState(linked);
}

function writeSoon() {
  clearTimeout(late);
  late = setTimeout(writeAddress, 200);
}

function writeAddress() {
  if (linked) return; // a search is still on its way
  const { words, complete } = stateWords();
  writeView(view, words);
  history.replaceState(null, "", `#${words}`);
  byId("address").textContent = complete ? complaint : "The schedule is too long for an address: save it as a file to pass it on.";
}

function fileText(place, kind) {
  const { schedule, proved } = shown[place], whole = proved ? align(packed(schedule)) : schedule;
  return kind === "csv" ? toCsv(whole) : toJson(whole);
}

function save(place, kind) {
  const name = shown[place].schedule.name.replace(/[^\w.-]+/g, "-") || "schedule", type = kind === "csv" ? "text/csv" : "application/json";
  const link = element("a", { href: URL.createObjectURL(new Blob([fileText(place, kind)], { type })), download: `${name}.${kind}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// A file that was chosen or dropped.
async function take(place, file) {
  if (!file) return;
  if (file.size <= LARGEST) { load(place, await file.text(), file.name); return; }
  state.slots[place].note = `${file.name} has ${bytesText(file.size)}, too much for a page (${bytesText(LARGEST)}); penstock view takes it`;
  showSlot(state.slots[place], place);
}

function load(place, text, name) {
  const slot = state.slots[place];
  try {
    const { schedule, note } = readFile(text, name);
    editor.keep(slot, { ranks: state.ranks, microbatches: state.microbatches });
    slot.source = "own";
    slot.own = packed(schedule);
    if (schedule.rows.length <= LIMITS.ranks[1]) state.ranks = schedule.rows.length;
    if (schedule.microbatches <= LIMITS.microbatches[1]) state.microbatches = schedule.microbatches;
    slot.note = note;
    update();
  } catch (error) {
    if (!(error instanceof FileError)) throw error;
    slot.note = `${name}: ${error.message}`;
    showSlot(slot, place);
  }
}

// -- controls

function showControls() {
  for (const name of Object.keys(LIMITS)) {
    for (const input of document.querySelectorAll(`[name="${name}"]`)) {
      if (input !== document.activeElement || input.type === "range") input.value = name === "cap" && !state.cap && input.type !== "range" ? "" : state[name];
    }
  }
}

for (const input of document.querySelectorAll("#controls input")) {
  if (input.type === "number") [input.min, input.max] = LIMITS[input.name];
  input.addEventListener("input", () => {
    if (!setNumber(input.name, input.value === "" && input.name === "cap" ? 0 : input.value === "" ? NaN : Number(input.value))) return;
    update();
  });
  input.addEventListener("blur", showControls);
}

state.slots.forEach((_, place) => {
  const box = byId(`slot-${place}`), on = (kind, event, act) => box.querySelector(`.${kind}`).addEventListener(event, act);
  const options = Object.keys(FAMILIES).map((name) => [name, name]);
  const more = [["search", "quick search"], ["own", "own"], ...(place ? [["none", "nothing"]] : [])];
  box.querySelector(".source").append(...[...options, ...more].map(([value, text]) => element("option", { value, text })));
  on("source", "change", (event) => {
    const slot = state.slots[place];
    editor.keep(slot);
    slot.source = event.target.value;
    if (FAMILIES[slot.source]) slot.each = FAMILIES[slot.source].stages;
    update();
  });
  on("each", "input", (event) => {
    const each = Number(event.target.value);
    if (Number.isInteger(each) && each >= 1 && each <= 16) { state.slots[place].each = each; update(); }
  });
  on("undo", "click", () => editor.undo(state.slots[place]));
  for (const kind of ["csv", "json"]) on(kind, "click", () => save(place, kind));
  on("load", "click", () => box.querySelector("input[type=file]").click());
  box.querySelector("input[type=file]").addEventListener("change", async (event) => {
    await take(place, event.target.files[0]);
    event.target.value = "";
  });
  box.addEventListener("dragover", (event) => event.preventDefault());
  box.addEventListener("drop", (event) => {
    event.preventDefault();
    take(place, event.dataTransfer.files[0]);
  });
});

// -- the start

readAddress();
view = new View([new Run({ label: "", kind: "", unit: "", tick: 1, makespan: 1, idle: 0, sizes: [0, 0, 0], rows: [] }, 0)]);
const gantt = new Gantt(byId("chart"), view, 900), memory = new Memory(byId("memory"), view), overview = new Overview(byId("overview"), gantt);
const editor = new Editor({
  view, gantt, chart: byId("chart"), status: byId("status"), slotOf: (run) => state.slots[run.slot], shown: (run) => shown[run.slot],
  changed: (light) => (light ? redraw() : update()),
});
const scatter = new Scatter(byId("scatter"), {
  xName: "memory, in whole-rank microbatches", yName: "idle", xText: short, yText: percent,
  choose: (point, event) => {
    if (!FAMILIES[point.name]) return;
    const slot = state.slots[event.shiftKey ? 1 : 0];
    editor.keep(slot);
    Object.assign(slot, { source: point.name, each: FAMILIES[point.name].stages });
    update();
  },
});
const controls = new Navigator({
  chart: byId("chart"), overview: byId("overview"), tip: byId("tip"), status: byId("status"), gantt, view,
  changed: () => { redraw(); showRange(byId("range"), view); writeSoon(); }, grab: (hit, event) => (controls.moving ? editor.grab(hit, event) : null),
});
controls.toggle = () => {};
view.folds = false;
Object.assign(controls.keys, {
  "[": () => editor.move(-1, 0), "]": () => editor.move(1, 0), "{": () => editor.move(0, -1), "}": () => editor.move(0, 1),
  u: () => { if (editor.last) editor.undo(editor.last); },
});
toolbar(controls, controls.changed);
byId("moving").addEventListener("change", (event) => { controls.moving = event.target.checked; controls.touch(); });
byId("moving").checked = controls.moving = !matchMedia("(pointer: coarse)").matches;
controls.touch();
update();
new ResizeObserver(() => { redraw(); drawScatter(); }).observe(byId("chart"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("hashchange", () => { readAddress(); update(); });
window.studio = { state, view, gantt, editor, controls, update, load, text: fileText, get shown() { return shown; }, get spent() { return spent; } };
