// What the user does to a timeline: pointer, wheel and keys. And what is told of it: the tooltip, the status line, totals.

const HINT = "Point at an action, tap it, or choose one with the keys.";

class Navigator {
  // `changed(fresh)` is called after every change; `grab(hit, event)` may take a drag for itself and return what follows it.
  constructor({ chart, overview, tip, status, gantt, view, changed, grab = () => null }) {
    Object.assign(this, { chart, overview, tip, status, gantt, view, changed, grab });
    this.pointers = new Map();
    this.moving = this.selecting = false; // what a drag does, by touch too: moves actions, or selects a range
    this.keys = {
      ArrowLeft: () => this.pan(-0.1), ArrowRight: () => this.pan(0.1), a: () => this.pan(-0.1), d: () => this.pan(0.1),
      ArrowUp: () => this.beside(-1, 0), ArrowDown: () => this.beside(1, 0), w: () => this.zoom(1.5), s: () => this.zoom(1 / 1.5),
      "+": () => this.zoom(1.5), "=": () => this.zoom(1.5), "-": () => this.zoom(1 / 1.5), 0: () => this.showAll(), Home: () => this.showAll(),
      ",": () => this.beside(0, -1), ".": () => this.beside(0, 1), r: () => this.rangeHere(), Escape: () => this.nothing(),
    };
    this.listen();
    this.status.textContent = HINT;
  }

  // A finger that moves up or down scrolls the page, unless the drag is ours.
  touch() { this.chart.style.touchAction = this.moving || this.selecting ? "none" : ""; }

  show(from, to) { this.view.show(from, to); this.changed(); }

  zoom(factor, at = 0.5) {
    const { from, to } = this.view, size = (to - from) / factor, middle = from + at * (to - from);
    this.show(middle - at * size, middle + (1 - at) * size);
  }

  pan(share) {
    const step = share * (this.view.to - this.view.from);
    this.show(this.view.from + step, this.view.to + step);
  }

  showAll() { this.show(0, this.view.whole); }

  // Nothing chosen; a range is kept where one is given.
  nothing(range = null) {
    this.view.selected = null;
    this.view.range = range;
    this.tip.hidden = true;
    this.status.textContent = HINT;
    this.changed();
  }

  // The selected action as a range; without one, what is shown.
  rangeHere() {
    const { selected, from, to } = this.view;
    if (selected) {
      const scale = this.view.perTick(selected.row.run);
      this.view.range = { from: selected.row.start[selected.place] * scale, to: selected.row.end(selected.place) * scale };
    } else this.view.range = { from, to };
    this.changed();
  }

  tell(hit, x, y) {
    if (!hit || hit.run) { this.tip.hidden = true; return; }
    const { several } = this.view;
    const words = hit.place >= 0 ? described(hit.row, hit.place, several) : describedIdle(hit.row, hit.ticks, several);
    this.tip.replaceChildren(element("b", { text: words.title }), words.lines.join("\n"));
    this.tip.hidden = false;
    const box = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 4))}px`;
    this.tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 18}px`;
  }

  // Choose an action where it stands; `choose` also moves the window to it.
  mark(row, place) {
    const { view } = this, words = described(row, place, view.several), opened = !view.isOpen(row.run);
    view.selected = { row, place };
    view.open.add(row.run.number);
    this.status.textContent = `${words.title}: ${words.lines.join("; ")}`;
    this.changed(opened);
  }

  choose(row, place) {
    const { view } = this;
    this.mark(row, place);
    const scale = view.perTick(row.run), start = row.start[place] * scale, end = row.end(place) * scale, size = view.to - view.from;
    if (start < view.from || end > view.to) this.show((start + end - size) / 2, (start + end + size) / 2);
  }

  toggle(run) {
    if (this.view.open.has(run.number)) this.view.open.delete(run.number); else this.view.open.add(run.number);
    if (this.view.selected && !this.view.open.has(this.view.selected.row.run.number)) this.view.selected = null;
    this.changed(true);
  }

  beside(rows, places) {
    const order = this.gantt.places.map((entry) => entry.row), { view } = this;
    if (!view.selected) {
      const row = order.find((entry) => entry.count);
      if (row) this.choose(row, Math.min(row.count - 1, row.after(view.from / view.perTick(row.run))));
      return;
    }
    const { row: now, place: at } = view.selected;
    const row = order[Math.min(order.length - 1, Math.max(0, order.indexOf(now) + rows))];
    if (!row || !row.count) return;
    const place = rows ? row.after((now.start[at] * view.perTick(now.run)) / view.perTick(row.run)) : at + places;
    this.choose(row, Math.min(row.count - 1, Math.max(0, place)));
  }

  // The next action after the selected one whose name begins or ends with the text, or is it without its stage.
  find(text) {
    const wanted = text.trim().toUpperCase();
    if (!wanted) return 0;
    const found = [];
    for (const run of this.view.runs) {
      for (const row of run.rows) {
        for (let place = 0; place < row.count; place++) {
          const name = row.name(place);
          if (name === wanted || name.replace(/^\d+/, "") === wanted || (/[A-Z]$/.test(wanted) && name.startsWith(wanted)) || (name[0] === "(" && name.includes(wanted))) found.push([row, place]);
        }
      }
    }
    const { selected } = this.view, now = selected ? found.findIndex(([row, place]) => row === selected.row && place === selected.place) : -1;
    if (found.length) this.choose(...found[(now + 1) % found.length]);
    return found.length;
  }

  // -- events

  hit(event) {
    const box = this.chart.getBoundingClientRect();
    return this.gantt.at(event.clientX - box.left, event.clientY - box.top);
  }

  at(event) {
    const box = this.chart.getBoundingClientRect(), { gantt } = this;
    return gantt.time(Math.min(gantt.gutter + gantt.plot, Math.max(gantt.gutter, gantt.fold(event.clientX - box.left))));
  }

  share(event) { return (this.at(event) - this.view.from) / (this.view.to - this.view.from); }

  listen() {
    const { chart, overview, tip } = this;
    chart.addEventListener("pointerdown", (event) => this.down(event));
    chart.addEventListener("pointermove", (event) => this.move(event));
    for (const kind of ["pointerup", "pointercancel"]) chart.addEventListener(kind, (event) => this.up(event));
    chart.addEventListener("pointerleave", () => { tip.hidden = true; });
    chart.addEventListener("dblclick", (event) => this.zoom(2, this.share(event)));
    chart.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    chart.addEventListener("keydown", (event) => {
      const act = this.keys[event.key] || this.keys[event.key.toLowerCase()]; // with caps lock too
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      act();
      event.preventDefault();
    });
    overview.addEventListener("pointerdown", (event) => overview.setPointerCapture(event.pointerId));
    for (const kind of ["pointerdown", "pointermove"]) {
      overview.addEventListener(kind, (event) => {
        if (!event.buttons) return;
        const box = overview.getBoundingClientRect(), size = this.view.to - this.view.from;
        const { gutter } = this.gantt, middle = ((event.clientX - box.left - gutter) / Math.max(40, box.width - gutter)) * this.view.whole;
        this.show(middle - size / 2, middle + size / 2);
      });
    }
  }

  down(event) {
    const hit = this.hit(event);
    this.chart.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, event);
    this.moved = false;
    if (this.held) this.held.end();
    this.held = null;
    if (this.pointers.size > 1) return;
    this.held = this.selecting ? null : this.grab(hit, event);
    if (!this.held && (event.shiftKey || this.selecting)) {
      const from = this.at(event);
      this.held = { move: (now) => { const to = this.at(now); this.view.range = { from: Math.min(from, to), to: Math.max(from, to) }; this.changed(); }, end: () => {} };
    }
  }

  move(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) { this.tell(this.hit(event), event.clientX, event.clientY); return; }
    const step = event.clientX - before.clientX;
    if (this.pointers.size === 1) {
      if (!this.moved && Math.hypot(step, this.held ? event.clientY - before.clientY : 0) <= 2) return;
      this.moved = true;
      this.tip.hidden = true;
      if (this.held) { this.held.move(event); return; }
      this.chart.classList.add("dragging");
      const unit = (this.view.to - this.view.from) / this.gantt.plot;
      this.show(this.view.from - step * unit, this.view.to - step * unit);
    } else {
      this.moved = true;
      const other = [...this.pointers].find(([id]) => id !== event.pointerId)[1];
      const was = Math.abs(before.clientX - other.clientX), now = Math.abs(event.clientX - other.clientX);
      if (was > 8 && now > 8) this.zoom(now / was, (this.share(event) + this.share(other)) / 2);
    }
    this.pointers.set(event.pointerId, event);
  }

  up(event) {
    if (!this.pointers.delete(event.pointerId)) return;
    this.chart.classList.remove("dragging");
    if (this.held) this.held.end();
    this.held = null;
    if (event.type !== "pointerup" || this.moved) return;
    const hit = this.hit(event);
    this.tell(hit, event.clientX, event.clientY);
    if (hit && hit.run) this.toggle(hit.run);
    else if (hit && hit.place >= 0) this.choose(hit.row, hit.place);
  }

  wheel(event) {
    const sideways = event.shiftKey ? event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey || event.altKey) this.zoom(Math.exp(-event.deltaY / 300), this.share(event));
    else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) this.pan(sideways / this.gantt.plot);
    else return;
    event.preventDefault();
  }
}

// Of a range of time: how much of it the ranks of a run spent in each op, and idle.
function totalsOf(run, from, to) {
  const found = new Map();
  let busy = 0;
  for (const row of run.rows) {
    for (let place = row.after(from); place < row.count && row.start[place] < to; place++) {
      const time = Math.min(to, row.end(place)) - Math.max(from, row.start[place]), name = OP_NAMES[row.op[place]];
      found.set(name, (found.get(name) || 0) + time);
      busy += time;
    }
  }
  const whole = (to - from) * run.rows.length;
  return { parts: [...found, ["idle", Math.max(0, whole - busy)]], whole };
}

// The table of a range, for every run that is open; nothing without a range.
function showRange(box, view) {
  box.hidden = !view.range;
  if (!view.range) { box.replaceChildren(); return; }
  const { from, to } = view.range;
  const runs = view.runs.filter((run) => view.isOpen(run)), tables = runs.map((run) => totalsOf(run, from / view.perTick(run), to / view.perTick(run)));
  const names = [...OP_NAMES, "idle"].filter((name) => tables.some(({ parts }) => parts.some((each) => each[0] === name)));
  const head = element("tr", {}, ...["", ...runs.map((run) => (view.several ? `${run.letter} ${run.label}` : "all ranks"))].map((text) => element("th", { text, scope: "col" })));
  const body = names.map((name) => element("tr", {}, element("th", { text: name === "idle" ? name : `${name}: ${OPS[name].meaning}`, scope: "row", kind: "text" }),
    ...tables.map(({ parts, whole }, place) => {
      const time = (parts.find((each) => each[0] === name) || [0, 0])[1];
      return element("td", { text: `${runs[place].time(time)}, ${percent(whole ? time / whole : 0)}` });
    })));
  box.replaceChildren(
    element("p", {}, element("b", { text: `From ${view.text(from)} to ${view.text(to)}` }), `, ${view.text(to - from)} on each rank; sums over all ranks:`),
    element("div", { kind: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body))));
}
