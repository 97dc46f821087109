// What both pages have around a timeline: its toolbar, and the view as words of the address.

const BOXES = ["critical", "arrows"]; // of the toolbar, each by the name that the view has for it

function toolbar(controls, changed) {
  const { view } = controls;
  const buttons = {
    "zoom-in": () => controls.zoom(1.6), "zoom-out": () => controls.zoom(1 / 1.6), "zoom-all": () => controls.showAll(),
    "pan-left": () => controls.pan(-0.25), "pan-right": () => controls.pan(0.25),
  };
  for (const [id, act] of Object.entries(buttons)) byId(id).addEventListener("click", act);
  for (const name of BOXES) byId(name).addEventListener("change", (event) => { view[name] = event.target.checked; changed(); });
  byId("ranges").addEventListener("click", (event) => {
    controls.selecting = !controls.selecting;
    event.currentTarget.setAttribute("aria-pressed", controls.selecting);
    controls.touch();
  });
}

function drawAll(gantt, memory, overview, fresh) {
  gantt.draw();
  memory.draw(gantt);
  overview.draw(fresh);
  byId("arrow-note").hidden = !gantt.hiddenArrows;
}

// Window, range, boxes and the chosen action, where they are not the usual ones.
function writeView(view, words) {
  const pair = ({ from, to }) => [from, to].map((value) => Number(value.toPrecision(10))).join("_");
  if (view.from > 0 || view.to < view.whole * (1 - 1e-9)) words.set("t", pair(view));
  if (view.range) words.set("range", pair(view.range));
  for (const name of BOXES) if (view[name]) words.set(name, true);
  if (view.selected) words.set("at", [view.selected.row.run.number, view.selected.row.rank, view.selected.place].join("."));
}

// The same from an address, which may hold anything: what makes no sense is as if it were not there.
function readView(controls, words) {
  const { view } = controls;
  const pair = (name) => {
    const [from, to] = (words.get(name) || "").split("_").map(Number).map((at) => Math.min(view.whole, Math.max(0, at)));
    return to > from ? { from, to } : null;
  };
  const shown = pair("t"), [run, rank, place] = (words.get("at") || "").split(".").map(Number), row = view.runs[run]?.rows[rank];
  view.show(shown ? shown.from : 0, shown ? shown.to : view.whole);
  view.range = pair("range");
  for (const name of BOXES) byId(name).checked = view[name] = words.get(name) === "true";
  if (row && Number.isInteger(place) && place >= 0 && place < row.count) controls.mark(row, place);
  else controls.nothing(view.range);
}
