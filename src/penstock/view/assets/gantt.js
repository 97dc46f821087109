// The Gantt chart on a canvas. Spans that are wide enough are drawn one by one, with their names; where many share a
// pixel, each pixel gets the mix of what it covers. A run that is not open is one small picture of all its ranks.

const HEAD = 22, AXIS = 24, MOST_ARROWS = 1500, BETWEEN = 28;

// Where each row and each head of some runs stands; `small` is the height of a run that is not open.
function arrange(view, rowHeight, small, shown = view.runs) {
  const rows = [], heads = [], minis = [];
  let y = 0;
  const put = (row) => { rows.push({ row, y }); y += rowHeight; };
  if (view.order === "rank" && view.several) {
    const runs = view.runs.filter((run) => view.isOpen(run)), ranks = Math.max(0, ...runs.map((run) => run.rows.length));
    for (let rank = 0; rank < ranks; rank++) {
      for (const run of runs) if (run.rows[rank]) put(run.rows[rank]);
      y += 6;
    }
    return { rows, heads, minis, height: y };
  }
  for (const run of shown) {
    if (view.several) { heads.push({ run, y }); y += HEAD; }
    if (!view.several || view.isOpen(run)) run.rows.forEach(put);
    else if (small) { minis.push({ run, y, height: small(run) }); y += small(run); }
    if (view.several) y += 8;
  }
  return { rows, heads, minis, height: y };
}

function rowHeightOf(view, room, least, most) {
  const total = view.runs.reduce((sum, run) => sum + (view.isOpen(run) || !view.several ? run.rows.length : 0), 0);
  return Math.max(total > 600 ? 4 : least, Math.min(most, Math.floor(room / Math.max(1, total))));
}

// Names of rows, as many as have room; heads, with a mark that says whether the run is open.
function drawNames(pen, view, places, rowHeight, gutter, width) {
  pen.textBaseline = "middle";
  pen.font = `600 13px ${FONT}`;
  pen.fillStyle = ink("text");
  for (const { run, y } of places.heads) {
    const mark = view.folds ? (view.isOpen(run) ? "\u25be " : "\u25b8 ") : "";
    pen.fillText(`${mark}${run.letter}  ${run.label}`, 0, y + 11, width);
  }
  pen.font = `${rowHeight < 12 ? 10 : 12}px ${FONT}`;
  pen.fillStyle = ink("soft");
  const every = Math.ceil(11 / rowHeight), narrow = gutter < 60;
  for (const { row, y } of places.rows) {
    if (row.rank % every) continue;
    const letter = view.several ? `${row.run.letter}${narrow ? "" : " "}` : "";
    pen.fillText(`${letter}${narrow ? "" : "rank "}${row.rank}`, 0, y + rowHeight / 2, gutter - 6);
  }
}

class Gantt {
  // `wide`: so many pixels across, two runs stand side by side.
  constructor(canvas, view, wide = Infinity) {
    this.canvas = canvas;
    this.view = view;
    this.wide = wide;
  }

  // The runs that stand one above the other, column by column, with where a column begins; all are equally wide.
  columns() {
    const { view } = this, width = this.canvas.clientWidth;
    const beside = view.runs.length === 2 && width >= this.wide && view.order !== "rank";
    this.column = beside ? Math.floor((width - BETWEEN) / 2) : width;
    this.stride = beside ? this.column + BETWEEN : width + 1;
    return (beside ? view.runs.map((run) => [run]) : [view.runs]).map((runs, place) => ({ runs, left: place * this.stride }));
  }

  draw() {
    const { view } = this, columns = this.columns();
    inks = {};
    this.rowHeight = rowHeightOf(view, 620 * columns.length, 11, 26);
    this.gutter = this.column < 560 ? (view.several ? 34 : 24) : 74;
    this.plot = Math.max(40, this.column - this.gutter);
    const small = (run) => Math.min(56, Math.max(16, 3 * run.rows.length));
    for (const each of columns) each.places = arrange(view, this.rowHeight, small, each.runs);
    const { pen, height, ratio } = fitCanvas(this.canvas, Math.max(40, ...columns.map(({ places }) => places.height)) + AXIS);
    const all = (kind) => columns.flatMap(({ places, left }) => places[kind].map((entry) => ({ ...entry, left })));
    this.places = all("rows"); this.heads = all("heads"); this.minis = all("minis");
    this.hiddenArrows = false;
    for (const { places, left } of columns) {
      pen.save();
      pen.translate(left, 0);
      this.grid(pen, this.column, height);
      drawNames(pen, view, places, this.rowHeight, this.gutter, this.column);
      for (const { run, y, height: size } of places.minis) {
        const { slope, shift } = this.pixels(run);
        paintRows(pen, run.rows, slope, shift, view.critical, this.gutter, y, this.plot, size - 2, ratio);
      }
      for (const { row, y } of places.rows) this.row(pen, row, y, ratio);
      if (view.arrows) this.arrows(pen, places.rows);
      if (view.range) this.range(pen, height - AXIS);
      const chosen = view.selected && places.rows.find((entry) => entry.row === view.selected.row);
      if (chosen) this.mark(pen, view.selected, chosen.y);
      pen.restore();
    }
  }

  grid(pen, width, height) {
    const { from, to } = this.view;
    pen.strokeStyle = ink("line");
    pen.fillStyle = ink("soft");
    pen.font = `11px ${FONT}`;
    pen.textBaseline = "alphabetic";
    for (const at of axisSteps(from, to, this.plot / 110)) {
      const x = Math.round(this.x(at)) + 0.5, text = this.view.text(at), size = pen.measureText(text).width;
      pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, height - AXIS + 5); pen.stroke();
      pen.fillText(text, Math.min(Math.max(x - size / 2, this.gutter), width - size), height - 6);
    }
  }

  // Where a time of the view stands, and the other way round.
  x(at) { return this.gutter + ((at - this.view.from) / (this.view.to - this.view.from)) * this.plot; }

  // A point of any column, as if it were in the first.
  fold(x) { return x >= this.stride ? x - this.stride : x; }

  time(x) { return this.view.from + ((x - this.gutter) / this.plot) * (this.view.to - this.view.from); }

  // Pixels of the plot for ticks of a run.
  pixels(run) {
    const factor = this.plot / (this.view.to - this.view.from);
    return { slope: this.view.perTick(run) * factor, shift: -this.view.from * factor };
  }

  row(pen, row, y, ratio) {
    const height = this.rowHeight - (this.rowHeight > 14 ? 4 : this.rowHeight > 10 ? 2 : 1);
    const { slope, shift } = this.pixels(row.run);
    const first = row.after(-shift / slope), last = Math.min(row.count, row.after((this.plot - shift) / slope) + 1);
    if (last - first > this.plot / 4) {
      paintRows(pen, [row], slope, shift, this.view.critical, this.gutter, y, this.plot, height, ratio);
      return;
    }
    pen.fillStyle = ink("idle");
    pen.fillRect(this.gutter, y, this.plot, height);
    this.each(pen, row, first, last, slope, shift, y, height);
    if (row.sends.start.length) this.sends(pen, row, slope, shift, y + height);
  }

  each(pen, row, first, last, slope, shift, y, height) {
    const far = this.gutter + this.plot;
    pen.font = `${height >= 18 ? 12 : 10}px ${LETTERS_FONT}`;
    pen.textBaseline = "middle";
    const letter = height >= 18 ? 7.3 : 6.1;
    for (let place = first; place < last; place++) {
      const start = Math.max(this.gutter, this.gutter + row.start[place] * slope + shift);
      const end = Math.min(far, this.gutter + row.end(place) * slope + shift);
      if (end <= start) continue;
      pen.globalAlpha = this.view.critical && !row.critical[place] ? PALE : 1;
      pen.fillStyle = FILLS[row.op[place]][Math.min(row.chunk[place], LAST_SHADE)];
      const gap = end - start > 4 ? 1 : 0;
      pen.fillRect(start, y, end - start - gap, height);
      if (row.chunk[place] && end - start > 8) this.lines(pen, start, y, end - start - gap, height >= 14 ? Math.min(row.chunk[place], LAST_SHADE) : 1);
      if (row.faults.has(place)) this.cross(pen, start, y, end - start - gap, height);
      const room = end - start - gap - 3;
      if (height < 9 || room < letter) continue;
      const name = row.name(place);
      const text = name.length * letter <= room ? name : this.small(row, place, room / letter);
      if (text) {
        pen.fillStyle = "#111";
        pen.fillText(text, start + (end - start - gap - text.length * letter) / 2, y + height / 2 + 0.5);
      }
    }
    pen.globalAlpha = 1;
  }

  // A line for each stage of the rank before this one.
  lines(pen, x, y, width, count) {
    pen.fillStyle = "rgb(0 0 0 / .5)";
    for (let line = 0; line < count; line++) pen.fillRect(x, y + 2 * line, width, 1);
  }

  // A fault is a frame and a diagonal, so that it is seen without colours.
  cross(pen, x, y, width, height) {
    pen.strokeStyle = ink("fault");
    pen.lineWidth = 2.5;
    pen.strokeRect(x + 1, y + 1, Math.max(1, width - 2), height - 2);
    pen.beginPath(); pen.moveTo(x, y + height); pen.lineTo(x + width, y); pen.stroke();
    pen.lineWidth = 1;
  }

  small(row, place, letters) {
    const op = OP_NAMES[row.op[place]], number = `${row.microbatch[place]}`;
    if (OPS[op].pair) return "";
    return op.length + number.length <= letters ? op + number : number.length <= letters ? number : "";
  }

  sends(pen, row, slope, shift, bottom) {
    pen.fillStyle = ink("send");
    const { start, length } = row.sends;
    for (let place = 0; place < start.length; place++) {
      const x = this.gutter + start[place] * slope + shift;
      if (x < this.gutter || x > this.gutter + this.plot) continue;
      pen.fillRect(x, bottom - 3, Math.max(1, Math.min(length[place] * slope, this.gutter + this.plot - x)), 3);
    }
  }

  // From what made a value to what uses it on another rank. Of many, none: zoom in.
  arrows(pen, places) {
    const where = new Map(places.map(({ row, y }) => [row, y])), found = [];
    for (const { row, y } of places) {
      const { slope, shift } = this.pixels(row.run), chosen = this.view.selected;
      const first = row.after(-shift / slope), last = Math.min(row.count, row.after((this.plot - shift) / slope) + 1);
      for (let place = first; place < last; place++) {
        const source = row.peer[place] < 0 ? null : row.run.rows[row.peer[place]];
        if (!source || !where.has(source)) continue;
        if (chosen && !(chosen.row === row && chosen.place === place) && !(chosen.row === source && chosen.place === row.cause[place])) continue;
        found.push([source.end(row.cause[place]) * slope + shift, where.get(source), row.start[place] * slope + shift, y]);
        if (found.length > MOST_ARROWS) { this.hiddenArrows = true; return; }
      }
    }
    pen.save();
    pen.beginPath(); pen.rect(this.gutter, 0, this.plot, 1e6); pen.clip();
    pen.strokeStyle = pen.fillStyle = ink("arrow");
    for (const [from, top, to, bottom] of found) {
      const x = this.gutter + from, X = this.gutter + to, y = top + this.rowHeight / 2, Y = bottom + this.rowHeight / 2;
      pen.beginPath(); pen.moveTo(x, y); pen.lineTo(X, Y); pen.stroke();
      const angle = Math.atan2(Y - y, X - x);
      pen.beginPath(); pen.moveTo(X, Y);
      for (const turn of [0.45, -0.45]) pen.lineTo(X - 7 * Math.cos(angle + turn), Y - 7 * Math.sin(angle + turn));
      pen.fill();
    }
    pen.restore();
  }

  range(pen, height) {
    const [left, right] = [this.view.range.from, this.view.range.to].map((at) => Math.min(this.gutter + this.plot, Math.max(this.gutter, this.x(at))));
    pen.globalAlpha = 0.16;
    pen.fillStyle = ink("focus");
    pen.fillRect(left, 0, right - left, height);
    pen.globalAlpha = 1;
    for (const x of [left, right]) pen.fillRect(x - 0.5, 0, 1, height);
  }

  mark(pen, { row, place }, y) {
    const { slope, shift } = this.pixels(row.run);
    const start = Math.max(this.gutter, this.gutter + row.start[place] * slope + shift);
    const end = Math.min(this.gutter + this.plot, this.gutter + row.end(place) * slope + shift);
    pen.strokeStyle = ink("text");
    pen.lineWidth = 2;
    pen.strokeRect(start, y, Math.max(2, end - start - 1), this.rowHeight - 3);
    pen.lineWidth = 1;
  }

  // What a point of the canvas shows: the head of a run; or a row, ticks of its run, and a span where there is one.
  at(across, y) {
    const x = this.fold(across), left = across - x;
    const hit = (entries, height) => (entries || []).find((entry) => entry.left === left && y >= entry.y && y < entry.y + (height || entry.height));
    const head = hit(this.heads, HEAD) || hit(this.minis);
    if (head) return { run: head.run };
    const found = hit(this.places, this.rowHeight);
    if (!found || x < this.gutter || x > this.gutter + this.plot) return null;
    const { slope, shift } = this.pixels(found.row.run);
    const ticks = (x - this.gutter - shift) / slope;
    const place = found.row.after(ticks);
    const inside = place < found.row.count && found.row.start[place] <= ticks;
    return { row: found.row, ticks, place: inside ? place : -1 };
  }
}

// The strip above the chart: all of the time, small, with the window that is shown.
class Overview {
  constructor(canvas, gantt) {
    this.canvas = canvas;
    this.gantt = gantt;
    this.picture = document.createElement("canvas");
  }

  draw(fresh) {
    const { view, gutter } = this.gantt, plot = Math.max(40, this.canvas.clientWidth - gutter), each = Math.max(6, Math.min(40, Math.floor(60 / view.runs.length)));
    const height = Math.min(view.runs.length, 20) * each + 6;
    const { pen, ratio } = fitCanvas(this.canvas, height), key = [plot, height, ratio, view.scale, view.critical, ink("idle")].join(" ");
    if (fresh || key !== this.key) {
      this.key = key;
      this.picture.width = Math.round(plot * ratio); this.picture.height = height;
      const own = this.picture.getContext("2d");
      view.runs.slice(0, 20).forEach((run, place) => {
        const slope = (view.perTick(run) * plot) / view.whole;
        paintRows(own, run.rows, slope * ratio, 0, view.critical, 0, 3 + place * each, this.picture.width, each - 1, 1);
      });
    }
    pen.imageSmoothingEnabled = false;
    pen.drawImage(this.picture, gutter, 0, plot, height);
    const left = gutter + (view.from / view.whole) * plot, size = Math.max(4, ((view.to - view.from) / view.whole) * plot);
    pen.fillStyle = ink("ground");
    pen.globalAlpha = 0.62;
    pen.fillRect(gutter, 0, left - gutter, height);
    pen.fillRect(left + size, 0, gutter + plot - left - size, height);
    pen.globalAlpha = 1;
    pen.strokeStyle = ink(size < plot - 0.5 ? "focus" : "line");
    pen.lineWidth = 2;
    pen.strokeRect(left + 1, 1, size - 2, height - 2);
    pen.lineWidth = 1;
  }
}
