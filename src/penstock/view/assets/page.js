// The page: the runs side by side, their scatter, the timeline with its tools, and the view as a part of the address.

const view = new View(DATA.runs.map((given, number) => new Run(given, number)));
const { runs } = view;
const gantt = new Gantt(byId("chart"), view), memory = new Memory(byId("memory"), view), overview = new Overview(byId("overview"), gantt);
const known = runs.every((run) => run.activation);
let due = 0, late = 0, stale = false;

function draw(fresh = false) {
  gantt.draw();
  memory.draw(gantt);
  overview.draw(fresh);
}

function redraw(fresh = false) {
  stale ||= fresh;
  if (!due) due = requestAnimationFrame(() => { due = 0; draw(stale); stale = false; });
}

function changed(opened = false) {
  redraw();
  showRange(byId("range"), view);
  byId("arrow-note").hidden = !(view.arrows && gantt.hiddenArrows);
  for (const run of runs) if (run.button) run.button.setAttribute("aria-expanded", view.isOpen(run));
  if (opened) idleTable(view);
  clearTimeout(late);
  late = setTimeout(write, 150);
}

const controls = new Navigator({ chart: byId("chart"), overview: byId("overview"), tip: byId("tip"), status: byId("status"), gantt, view, changed });
const toggle = (run) => controls.toggle(run);

// -- the view in the address

function write() {
  const words = new URLSearchParams(), put = (name, value, usual) => { if (value !== usual) words.set(name, value); };
  const number = (value) => Number(value.toPrecision(7));
  if (view.from > 0 || view.to < view.whole * (1 - 1e-9)) words.set("t", [view.from, view.to].map(number).join("-"));
  put("order", view.order, "run");
  put("scale", view.scale, view.sameUnit ? "same" : "fit");
  put("critical", view.critical, false);
  put("arrows", view.arrows, false);
  if (view.several) words.set("open", [...view.open].sort((one, other) => one - other).join("."));
  if (view.selected) words.set("at", [view.selected.row.run.number, view.selected.row.rank, view.selected.place].join("."));
  if (view.range) words.set("range", [view.range.from, view.range.to].map(number).join("-"));
  history.replaceState(null, "", `#${words}`);
}

function read() {
  const words = new URLSearchParams(location.hash.slice(1)), window = (name) => (words.get(name) || "").split("-").map(Number);
  if (words.get("order") === "rank") view.order = "rank";
  if (["same", "fit"].includes(words.get("scale")) && view.sameUnit) view.scale = words.get("scale");
  view.critical = words.get("critical") === "true";
  view.arrows = words.get("arrows") === "true";
  if (words.has("open")) view.open = new Set(words.get("open").split(".").filter(Boolean).map(Number).filter((number) => runs[number]));
  view.show(0, view.whole);
  const [from, to] = window("t"), [begin, end] = window("range");
  if (to > from) view.show(from, to);
  if (end > begin) view.range = { from: begin, to: end };
  const [run, rank, place] = (words.get("at") || "").split(".").map(Number), row = runs[run] && runs[run].rows[rank];
  if (row && place < row.count) controls.choose(row, place);
  byId("order").value = view.order; byId("scale").value = view.scale;
  byId("critical").checked = view.critical; byId("arrows").checked = view.arrows;
}

// -- the tools

for (const [id, act] of [["zoom-in", () => controls.zoom(1.6)], ["zoom-out", () => controls.zoom(1 / 1.6)], ["zoom-all", () => controls.showAll()], ["pan-left", () => controls.pan(-0.25)], ["pan-right", () => controls.pan(0.25)]]) {
  byId(id).addEventListener("click", act);
}
byId("critical").addEventListener("change", (event) => { view.critical = event.target.checked; changed(); });
byId("arrows").addEventListener("change", (event) => { view.arrows = event.target.checked; draw(); changed(); });
byId("order").addEventListener("change", (event) => { view.order = event.target.value; changed(); });
byId("scale").addEventListener("change", (event) => { view.scale = event.target.value; view.range = null; controls.showAll(); });
byId("ranges").addEventListener("click", (event) => {
  controls.selecting = !controls.selecting;
  event.currentTarget.setAttribute("aria-pressed", controls.selecting);
  byId("chart").style.touchAction = controls.selecting ? "none" : "";
});
byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("wanted").value, count = controls.find(text);
  byId("found").textContent = count ? `${count} found` : text.trim() ? "none" : "";
});
byId("open-all").addEventListener("click", () => {
  view.open = new Set(view.open.size === runs.length ? [] : runs.keys());
  view.selected = null;
  changed(true);
});
controls.keys["/"] = () => byId("wanted").focus();

// -- the figures

function drawScatters() {
  if (runs.length > 2) {
    const unit = known ? (value) => bytesText(value) : short;
    const scatter = new Scatter(byId("scatter"), {
      xName: known ? "memory" : "memory, in whole-rank microbatches", yName: "idle", xText: unit, yText: percent,
      choose: (point) => { toggle(point.run); byId("chart").scrollIntoView({ block: "nearest" }); },
    });
    scatter.draw(runs.map((run) => ({ run, x: known ? run.peakSize : run.peak, y: run.idle, name: run.label, mark: run.letter, label: runs.length > 16 ? run.letter : undefined })));
  }
  if (DATA.steps) {
    const { steps, median, outliers, shown } = DATA.steps, slow = new Set(outliers);
    const scatter = new Scatter(byId("steps"), { xName: "step", yName: "makespan", xText: String, yText: (value) => timeText(value, "s"), joined: true });
    const points = steps.map(([step, makespan], place) => ({
      x: step, y: makespan, name: slow.has(place) ? `step ${step}, an outlier` : `step ${step}`, kind: step === shown ? "chosen" : slow.has(place) ? "outlier" : "",
      label: step === shown ? `step ${step}, shown below` : slow.has(place) ? `${step}` : "",
    }));
    scatter.draw(points, [{ y: median, name: `median ${timeText(median, "s")}` }]);
  }
}

// -- the start

byId("scatter-section").hidden = runs.length < 3; // of two, the table says it all
byId("steps-section").hidden = !DATA.steps;
if (DATA.steps) byId("steps-text").textContent = DATA.steps.text;
for (const group of document.querySelectorAll(".several")) group.hidden = !view.several;
if (!view.sameUnit) byId("scale").parentNode.hidden = true;
const spans = runs.reduce((sum, run) => sum + run.rows.reduce((count, row) => count + row.count, 0), 0);
byId("summary").textContent = view.several
  ? `${runs.length} runs, ${spans.toLocaleString("en")} actions`
  : `${runs[0].sizes[0]} ranks, ${runs[0].sizes[1]} stages, ${runs[0].sizes[2]} microbatches; ${spans.toLocaleString("en")} actions, ${runs[0].kind}`;
byId("memory-text").textContent = `What each rank holds between a forward and its backward (B, or W), ${known ? "in bytes" : "in whole-rank microbatches: a microbatch in one of a rank's two stages counts as a half"}.`;
runsTable(view, toggle); adviceList(view); legend(byId("legend"), runs); idleKey(); booksTables(view);
read();
draw(true);
changed(true);
drawScatters();
new ResizeObserver(() => { redraw(); drawScatters(); }).observe(byId("chart"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw(true));
addEventListener("hashchange", () => { read(); redraw(true); });
window.penstock = { view, draw, show: (from, to) => controls.show(from, to), zoom: (factor, at) => controls.zoom(factor, at), gantt, runs, controls, get selected() { return view.selected; } };
