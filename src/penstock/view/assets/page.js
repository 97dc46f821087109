// The page: the runs side by side, their scatter, the timeline with its tools, and the view as a part of the address.

const view = new View(DATA.runs.map((given, number) => new Run(given, number)));
const { runs } = view;
const gantt = new Gantt(byId("chart"), view), memory = new Memory(byId("memory"), view), overview = new Overview(byId("overview"), gantt);
const known = runs.every((run) => run.activation);
let due = 0, late = 0, stale = false;

const draw = (fresh = false) => drawAll(gantt, memory, overview, fresh);

function redraw(fresh = false) {
  stale ||= fresh;
  if (!due) due = requestAnimationFrame(() => { due = 0; draw(stale); stale = false; });
}

function changed(opened = false) {
  redraw();
  showRange(byId("range"), view);
  for (const run of runs) if (run.button) run.button.setAttribute("aria-expanded", view.isOpen(run));
  if (opened) idleTable(view);
  clearTimeout(late);
  late = setTimeout(write, 150);
}

const controls = new Navigator({ chart: byId("chart"), overview: byId("overview"), tip: byId("tip"), status: byId("status"), gantt, view, changed });
const toggle = (run) => controls.toggle(run);

// -- the view in the address

function write() {
  const words = new URLSearchParams();
  writeView(view, words);
  if (view.order !== "run") words.set("order", view.order);
  if (view.sameUnit && view.scale !== "same") words.set("scale", view.scale);
  if (view.several) words.set("open", [...view.open].sort((one, other) => one - other).join("."));
  history.replaceState(null, "", `#${words}`);
}

function read() {
  const words = new URLSearchParams(location.hash.slice(1));
  byId("order").value = view.order = words.get("order") === "rank" ? "rank" : "run";
  byId("scale").value = view.scale = view.sameUnit && words.get("scale") !== "fit" ? "same" : "fit";
  view.open = view.several && words.has("open") ? new Set(words.get("open").split(".").filter(Boolean).map(Number).filter((number) => runs[number])) : view.usuallyOpen();
  readView(controls, words);
  changed(true);
}

// -- the tools

toolbar(controls, changed);
byId("order").addEventListener("change", (event) => { view.order = event.target.value; changed(); });
byId("scale").addEventListener("change", (event) => { view.scale = event.target.value; view.range = null; controls.showAll(); });
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
      choose: (point) => { if (!view.isOpen(point.run)) toggle(point.run); byId("chart").scrollIntoView({ block: "nearest" }); },
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
byId("runs-text").textContent = `Memory is the most that a rank holds at once, in ${known ? "bytes" : "whole-rank microbatches"}; fill, wait, drain and other are its idle time by cause.`;
byId("memory-text").textContent = `What each rank holds between a forward and its backward (B, or W), ${known ? "in bytes" : "in whole-rank microbatches: a microbatch in one of a rank's two stages counts as a half"}.`;
runsTable(view, toggle); adviceList(view); legend(byId("legend"), runs); idleKey(); booksTables(view);
read();
draw(true);
drawScatters();
new ResizeObserver(() => { redraw(); drawScatters(); }).observe(byId("chart"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw(true));
addEventListener("hashchange", () => { read(); redraw(true); });
window.penstock = { view, draw, show: (from, to) => controls.show(from, to), zoom: (factor, at) => controls.zoom(factor, at), gantt, runs, controls, get selected() { return view.selected; } };
