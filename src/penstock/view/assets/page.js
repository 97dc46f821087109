// The view (which window of time, in which order and scale) and what the user does to it.

const view = {
  from: 0, to: 1, order: SEVERAL ? "rank" : "run", scale: SAME_UNIT ? "same" : "fit", critical: false,
  get whole() { return this.scale === "same" ? Math.max(...RUNS.map((run) => run.makespan)) || 1 : 1; },
  perTick(run) { return this.scale === "same" ? run.tick : run.tick / (run.makespan || 1); },
};
const gantt = new Gantt(byId("chart"), view);
const memory = new Memory(byId("memory"), view);
const chart = byId("chart"), tip = byId("tip"), status = byId("status"), overview = byId("overview");
const HINT = "Point at an action, tap it, or choose one with the keys.";
let selected = null, due = 0;
status.textContent = HINT;

function draw() {
  gantt.draw(selected);
  memory.draw(gantt);
  drawOverview();
}

function redraw() {
  if (!due) due = requestAnimationFrame(() => { due = 0; draw(); });
}

function drawOverview() {
  const { pen, width, height } = fitCanvas(overview, 18);
  const plot = width - gantt.gutter;
  pen.fillStyle = ink("idle");
  pen.fillRect(gantt.gutter, 5, plot, height - 10);
  pen.fillStyle = ink(view.to - view.from < view.whole * 0.999 ? "focus" : "line");
  const start = (view.from / view.whole) * plot, size = ((view.to - view.from) / view.whole) * plot;
  pen.fillRect(gantt.gutter + start, 3, Math.max(4, size), height - 6);
}

function show(from, to) {
  const whole = view.whole;
  const size = Math.min(whole, Math.max(to - from, whole / 1e6));
  view.from = Math.min(Math.max(0, from), whole - size);
  view.to = view.from + size;
  redraw();
}

function zoom(factor, at = 0.5) {
  const size = (view.to - view.from) / factor, middle = view.from + at * (view.to - view.from);
  show(middle - at * size, middle + (1 - at) * size);
}

function pan(share) {
  const step = share * (view.to - view.from);
  show(view.from + step, view.to + step);
}

function showAll() { show(0, view.whole); }

// -- telling what is there

function tell(found, x, y) {
  if (!found) { tip.hidden = true; return; }
  const words = found.place >= 0 ? described(found.row, found.place) : describedIdle(found.row, found.ticks);
  tip.replaceChildren(element("b", { text: words.title }), words.lines.join("\n"));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 4))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 18}px`;
}

function choose(row, place) {
  selected = { row, place };
  const words = described(row, place);
  status.textContent = `${words.title}: ${words.lines.join("; ")}`;
  const scale = view.perTick(row.run);
  const start = row.start[place] * scale, end = row.end(place) * scale, size = view.to - view.from;
  if (start < view.from || end > view.to) show((start + end - size) / 2, (start + end + size) / 2);
  redraw();
}

// -- pointer, wheel, keys

const pointers = new Map();
let moved = false;

function share(event) {
  const box = chart.getBoundingClientRect();
  return Math.min(1, Math.max(0, (event.clientX - box.left - gantt.gutter) / gantt.plot));
}

function found(event) {
  const box = chart.getBoundingClientRect();
  return gantt.at(event.clientX - box.left, event.clientY - box.top);
}

chart.addEventListener("pointerdown", (event) => {
  chart.setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, event);
  moved = false;
});
chart.addEventListener("pointermove", (event) => {
  const before = pointers.get(event.pointerId);
  if (!before) { tell(found(event), event.clientX, event.clientY); return; }
  const unit = (view.to - view.from) / gantt.plot;
  if (pointers.size === 1) {
    const step = event.clientX - before.clientX;
    if (Math.abs(event.clientX - before.clientX) > 2 || moved) {
      moved = true;
      chart.classList.add("dragging");
      tip.hidden = true;
      show(view.from - step * unit, view.to - step * unit);
      pointers.set(event.pointerId, event);
    }
  } else {
    moved = true;
    const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
    const was = Math.abs(before.clientX - other.clientX), now = Math.abs(event.clientX - other.clientX);
    if (was > 8 && now > 8) zoom(now / was, (share(event) + share(other)) / 2);
    pointers.set(event.pointerId, event);
  }
});
function release(event) {
  pointers.delete(event.pointerId);
  chart.classList.remove("dragging");
  if (event.type === "pointerup" && !moved) {
    const hit = found(event);
    tell(hit, event.clientX, event.clientY);
    if (hit && hit.place >= 0) choose(hit.row, hit.place);
  }
}
chart.addEventListener("pointerup", release);
chart.addEventListener("pointercancel", release);
chart.addEventListener("pointerleave", () => { tip.hidden = true; });
chart.addEventListener("dblclick", (event) => zoom(2, share(event)));
chart.addEventListener("wheel", (event) => {
  const sideways = event.shiftKey ? event.deltaY : event.deltaX;
  if (event.ctrlKey || event.metaKey || event.altKey) zoom(Math.exp(-event.deltaY / 300), share(event));
  else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) pan(sideways / gantt.plot);
  else return;
  event.preventDefault();
}, { passive: false });

function chooseBeside(rows, places) {
  const order = gantt.places.map((entry) => entry.row);
  if (!selected) { const row = order.find((entry) => entry.count); if (row) choose(row, Math.min(row.count - 1, row.after(view.from / view.perTick(row.run)))); return; }
  const row = order[Math.min(order.length - 1, Math.max(0, order.indexOf(selected.row) + rows))];
  if (!row || !row.count) return;
  const time = selected.row.start[selected.place] * view.perTick(selected.row.run);
  const place = rows ? row.after(time / view.perTick(row.run)) : selected.place + places;
  choose(row, Math.min(row.count - 1, Math.max(0, place)));
}

const KEYS = {
  ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1), ArrowUp: () => chooseBeside(-1, 0), ArrowDown: () => chooseBeside(1, 0),
  "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: showAll, Home: showAll,
  ",": () => chooseBeside(0, -1), ".": () => chooseBeside(0, 1), Escape: () => { selected = null; tip.hidden = true; status.textContent = HINT; redraw(); },
};
chart.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  KEYS[event.key]();
  event.preventDefault();
});

overview.addEventListener("pointerdown", (event) => overview.setPointerCapture(event.pointerId));
for (const kind of ["pointerdown", "pointermove"]) {
  overview.addEventListener(kind, (event) => {
    if (!event.buttons) return;
    const box = overview.getBoundingClientRect(), size = view.to - view.from;
    const middle = ((event.clientX - box.left - gantt.gutter) / gantt.plot) * view.whole;
    show(middle - size / 2, middle + size / 2);
  });
}

for (const [id, act] of [["zoom-in", () => zoom(1.6)], ["zoom-out", () => zoom(1 / 1.6)], ["zoom-all", showAll], ["pan-left", () => pan(-0.25)], ["pan-right", () => pan(0.25)]]) {
  byId(id).addEventListener("click", act);
}
byId("critical").addEventListener("change", (event) => { view.critical = event.target.checked; redraw(); });
byId("order").addEventListener("change", (event) => { view.order = event.target.value; redraw(); });
byId("scale").addEventListener("change", (event) => { view.scale = event.target.value; showAll(); });

// -- the start

byId("order").value = view.order;
byId("scale").value = view.scale;
if (!SEVERAL) for (const group of document.querySelectorAll(".several")) group.hidden = true;
if (!SAME_UNIT) byId("scale").parentNode.hidden = true;
const spans = RUNS.reduce((sum, run) => sum + run.rows.reduce((count, row) => count + row.count, 0), 0);
byId("summary").textContent = SEVERAL
  ? `${RUNS.length} runs, ${spans.toLocaleString("en")} actions`
  : `${RUNS[0].sizes[0]} ranks, ${RUNS[0].sizes[1]} stages, ${RUNS[0].sizes[2]} microbatches; ${spans.toLocaleString("en")} actions, ${RUNS[0].kind}`;
byId("memory-text").textContent = "Microbatch-stages held by each rank: a forward takes one, its backward (B, or W) gives it back.";
runsTable(); adviceList(); legend(); idleTable(); booksTables();
view.to = view.whole;
draw();
new ResizeObserver(redraw).observe(chart);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
window.penstock = { view, draw, show, zoom, gantt, runs: RUNS, get selected() { return selected; } };
