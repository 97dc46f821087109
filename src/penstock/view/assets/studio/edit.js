// Moving actions: by dragging, or by keys. Every move is a new schedule, proved at once; undo brings the one before back.

// The schedule with the cell of one row moved to a place of a row, counted without it.
function movedCell(schedule, rank, cell, targetRank, target) {
  const rows = packed(schedule).rows.map((row) => [...row]), [taken] = rows[rank].splice(cell, 1);
  rows[targetRank].splice(Math.max(0, Math.min(rows[targetRank].length, target)), 0, taken);
  return { ...schedule, rows };
}

class Editor {
  // `slotOf(run)` is the slot of a run; `changed()` draws again.
  constructor({ view, gantt, chart, slotOf, shown, changed, status }) {
    Object.assign(this, { view, gantt, chart, slotOf, shown, changed, status });
  }

  put(slot, schedule, remember = true) {
    if (remember) this.keep(slot);
    slot.source = "own";
    slot.own = { ...schedule, name: schedule.name.startsWith("own") ? schedule.name : `own, from ${schedule.name || "a file"}` };
  }

  // Before a change: what undo brings back, and the sizes where the change is going to set them.
  keep(slot, sizes = {}, before = { source: slot.source, each: slot.each, own: slot.own }) {
    slot.past.push({ before, sizes });
    slot.note = "";
    if (slot.past.length > 200) slot.past.shift();
    this.last = slot;
  }

  undo(slot) {
    if (!slot.past.length) return;
    const { before, sizes } = slot.past.pop();
    Object.assign(slot, before, { note: "" });
    Object.assign(state, sizes);
    this.view.selected = null;
    this.changed();
  }

  // A drag that began on an action; null where it moves the window instead.
  grab(hit, event) {
    if (event.shiftKey || !hit || !hit.row || hit.place < 0) return null;
    const { row, place } = hit, run = row.run, { slope } = this.gantt.pixels(run);
    if (row.length[place] * slope < 4) return null;
    const slot = this.slotOf(run), schedule = this.shown(run).schedule, cells = run.rows.map((each) => cellsOfSpans(schedule.rows[each.rank]));
    const from = { rank: row.rank, cell: cells[row.rank][place] }, tops = this.gantt.places.filter((entry) => entry.row.run === run);
    const before = { source: slot.source, each: slot.each, own: slot.own };
    const { slope: scale, shift } = this.gantt.pixels(run), { gutter, rowHeight } = this.gantt;
    let last = "";
    byId("slots").style.minHeight = `${byId("slots").offsetHeight}px`; // nothing moves under the pointer
    const target = (now) => {
      const box = this.chart.getBoundingClientRect(), y = now.clientY - box.top, ticks = (now.clientX - box.left - tops[0].left - gutter - shift) / scale;
      const near = tops.reduce((best, entry) => (Math.abs(entry.y + rowHeight / 2 - y) < Math.abs(best.y + rowHeight / 2 - y) ? entry : best)).row;
      const passed = new Set();
      for (let other = 0; other < near.count; other++) {
        const cell = cells[near.rank][other];
        if (near.rank === from.rank && cell === from.cell) continue;
        if (near.start[other] + near.length[other] / 2 < ticks) passed.add(cell);
      }
      return [near.rank, passed.size];
    };
    return {
      move: (now) => {
        const [rank, cell] = target(now), key = `${rank} ${cell}`;
        if (key === last) return;
        last = key;
        Object.assign(slot, before);
        if (rank !== from.rank || cell !== from.cell) this.put(slot, movedCell(schedule, from.rank, from.cell, rank, cell), false);
        this.chosen(run.number, rank, cell, slot);
      },
      end: () => {
        byId("slots").style.minHeight = "";
        if (slot.own !== before.own) this.keep(slot, {}, before);
        if (last) this.changed();
      },
    };
  }

  // The selected action, moved by so many places, or to another rank.
  move(places, ranks) {
    const { selected } = this.view;
    if (!selected) { this.status.textContent = "Choose an action first."; return; }
    const { row, place } = selected, run = row.run, slot = this.slotOf(run), { schedule } = this.shown(run);
    const cell = cellsOfSpans(schedule.rows[row.rank])[place], rank = Math.min(run.rows.length - 1, Math.max(0, row.rank + ranks));
    const length = schedule.rows[rank].filter(Boolean).length - (rank === row.rank ? 1 : 0), target = Math.min(length, Math.max(0, cell + places));
    if (rank === row.rank && target === cell) return;
    this.put(slot, movedCell(schedule, row.rank, cell, rank, target));
    this.chosen(run.number, rank, target, slot);
  }

  // Draw, and keep the moved action selected.
  chosen(run, rank, cell, slot) {
    this.view.selected = null;
    this.changed();
    const row = this.view.runs[run] && this.view.runs[run].rows[rank];
    if (!row || slot.source !== "own") return;
    const place = cellsOfSpans(slot.own.rows[rank]).indexOf(cell);
    if (place >= 0) this.view.selected = { row, place };
    this.changed(true);
  }
}
