// The Gantt chart on a canvas. Spans that are wide enough are drawn one by one, with their names; where
// many share a pixel, each pixel gets the mix of what it covers, so a hundred thousand cost no more than a few.

const style = getComputedStyle(document.documentElement);
const ink = (name) => style.getPropertyValue(`--${name}`).trim();

function rgb(hex) {
  const value = parseInt(hex.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

// Second and later stages of a rank are darker, so that rounds can be told apart.
const SHADES = OP_NAMES.map((name) => [0, 1, 2, 3].map((chunk) => rgb(OPS[name].colour).map((part) => Math.round(part * (1 - 0.11 * chunk)))));
const FILLS = SHADES.map((chunks) => chunks.map((colour) => `rgb(${colour.join(" ")})`));

function fitCanvas(canvas, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height, ratio };
}

// Where each row stands: order "run" puts a run's ranks together, order "rank" puts the same rank of all runs together.
function arrange(order, rowHeight, headHeight) {
  const rows = [], heads = [];
  let y = 0;
  const put = (row) => { rows.push({ row, y }); y += rowHeight; };
  if (order === "rank" && SEVERAL) {
    const ranks = Math.max(...RUNS.map((run) => run.rows.length));
    for (let rank = 0; rank < ranks; rank++) {
      for (const run of RUNS) if (run.rows[rank]) put(run.rows[rank]);
      y += 6;
    }
  } else {
    for (const run of RUNS) {
      if (SEVERAL) { heads.push({ text: `${run.letter}  ${run.label}`, y }); y += headHeight; }
      run.rows.forEach(put);
      if (SEVERAL) y += 8;
    }
  }
  return { rows, heads, height: y };
}

function axisSteps(from, to, wanted) {
  const rough = (to - from) / Math.max(wanted, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to + step * 1e-9; at += step) found.push(at);
  return found;
}

class Gantt {
  constructor(canvas, view) {
    this.canvas = canvas;
    this.view = view;
    this.strip = document.createElement("canvas");
  }

  layout() {
    const total = RUNS.reduce((sum, run) => sum + run.rows.length, 0);
    this.rowHeight = Math.max(9, Math.min(26, Math.floor(620 / total)));
    this.gutter = this.canvas.clientWidth < 560 ? (SEVERAL ? 34 : 24) : 74;
    this.axis = 24;
    return arrange(this.view.order, this.rowHeight, 22);
  }

  draw(selected) {
    const places = this.layout();
    const { pen, width, height, ratio } = fitCanvas(this.canvas, places.height + this.axis);
    this.places = places.rows;
    this.plot = Math.max(40, width - this.gutter);
    this.grid(pen, width, height);
    pen.font = "600 13px system-ui, sans-serif";
    pen.fillStyle = ink("text");
    pen.textBaseline = "middle";
    for (const head of places.heads) pen.fillText(head.text, 0, head.y + 11, width);
    const narrow = this.gutter < 60;
    pen.font = "12px system-ui, sans-serif";
    for (const { row, y } of places.rows) {
      const name = narrow ? `${SEVERAL ? row.run.letter : ""}${row.rank}` : `${SEVERAL ? row.run.letter + " " : ""}rank ${row.rank}`;
      pen.fillStyle = ink("soft");
      if (this.rowHeight >= 11) pen.fillText(name, 0, y + this.rowHeight / 2, this.gutter - 6);
    }
    for (const { row, y } of places.rows) this.row(pen, row, y, ratio);
    if (selected) this.mark(pen, selected);
  }

  grid(pen, width, height) {
    const { from, to } = this.view;
    pen.strokeStyle = ink("line");
    pen.fillStyle = ink("soft");
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "alphabetic";
    for (const at of axisSteps(from, to, this.plot / 110)) {
      const x = Math.round(this.gutter + ((at - from) / (to - from)) * this.plot) + 0.5;
      pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, height - this.axis + 5); pen.stroke();
      const text = this.view.scale === "same" ? timeText(at, RUNS[0].unit) : percent(at);
      const size = pen.measureText(text).width;
      pen.fillText(text, Math.min(Math.max(x - size / 2, this.gutter), width - size), height - 6);
    }
  }

  // Pixels of the plot for ticks of a run.
  pixels(run) {
    const { from, to } = this.view;
    const factor = this.plot / (to - from);
    return { slope: this.view.perTick(run) * factor, shift: -from * factor };
  }

  row(pen, row, y, ratio) {
    const height = this.rowHeight - (this.rowHeight > 14 ? 4 : this.rowHeight > 10 ? 2 : 1);
    pen.fillStyle = ink("idle");
    pen.fillRect(this.gutter, y, this.plot, height);
    const { slope, shift } = this.pixels(row.run);
    const first = row.after(-shift / slope);
    const last = Math.min(row.count, row.after((this.plot - shift) / slope) + 1);
    if (last - first > this.plot / 3) this.dense(pen, row, first, last, slope, shift, y, height, ratio);
    else this.each(pen, row, first, last, slope, shift, y, height);
    if (row.sends.start.length && last - first <= this.plot / 3) this.sends(pen, row, slope, shift, y + height);
  }

  each(pen, row, first, last, slope, shift, y, height) {
    const far = this.gutter + this.plot;
    pen.font = `${height >= 18 ? 12 : 10}px ui-monospace, SFMono-Regular, Menlo, monospace`;
    pen.textBaseline = "middle";
    const letter = height >= 18 ? 7.3 : 6.1;
    for (let place = first; place < last; place++) {
      const start = Math.max(this.gutter, this.gutter + row.start[place] * slope + shift);
      const end = Math.min(far, this.gutter + row.end(place) * slope + shift);
      if (end <= start) continue;
      pen.globalAlpha = this.view.critical && !row.critical[place] ? 0.22 : 1;
      pen.fillStyle = FILLS[row.op[place]][Math.min(row.chunk[place], 3)];
      const gap = end - start > 4 ? 1 : 0;
      pen.fillRect(start, y, end - start - gap, height);
      if (height < 9) continue;
      const room = end - start - gap - 3;
      if (room < letter) continue;
      const name = row.name(place);
      const text = name.length * letter <= room ? name : this.small(row, place, room / letter);
      if (text) {
        pen.fillStyle = "#111";
        pen.fillText(text, start + (end - start - gap - text.length * letter) / 2, y + height / 2 + 0.5);
      }
    }
    pen.globalAlpha = 1;
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

  dense(pen, row, first, last, slope, shift, y, height, ratio) {
    const width = Math.round(this.plot * ratio);
    slope *= ratio; shift *= ratio;
    const red = new Float32Array(width), green = new Float32Array(width), blue = new Float32Array(width);
    const covered = new Float32Array(width);
    const { start, length, op, chunk, critical } = row;
    for (let place = first; place < last; place++) {
      const from = Math.max(0, start[place] * slope + shift);
      const to = Math.min(width, (start[place] + length[place]) * slope + shift);
      const colour = SHADES[op[place]][Math.min(chunk[place], 3)];
      const weight = this.view.critical && !critical[place] ? 0.22 : 1;
      for (let pixel = Math.floor(from); pixel < to; pixel++) {
        const share = weight * (Math.min(to, pixel + 1) - Math.max(from, pixel));
        covered[pixel] += share;
        red[pixel] += share * colour[0]; green[pixel] += share * colour[1]; blue[pixel] += share * colour[2];
      }
    }
    const ground = rgb(ink("idle"));
    if (this.strip.width !== width) { this.strip.width = width; this.strip.height = 1; }
    const strip = this.strip.getContext("2d");
    const image = strip.createImageData(width, 1);
    for (let pixel = 0, at = 0; pixel < width; pixel++, at += 4) {
      const rest = Math.max(0, 1 - covered[pixel]);
      image.data[at] = red[pixel] + rest * ground[0];
      image.data[at + 1] = green[pixel] + rest * ground[1];
      image.data[at + 2] = blue[pixel] + rest * ground[2];
      image.data[at + 3] = 255;
    }
    strip.putImageData(image, 0, 0);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(this.strip, 0, 0, width, 1, this.gutter, y, this.plot, height);
  }

  mark(pen, { row, place }) {
    const found = this.places.find((entry) => entry.row === row);
    if (!found) return;
    const { slope, shift } = this.pixels(row.run);
    const start = Math.max(this.gutter, this.gutter + row.start[place] * slope + shift);
    const end = Math.min(this.gutter + this.plot, this.gutter + row.end(place) * slope + shift);
    pen.strokeStyle = ink("text");
    pen.lineWidth = 2;
    pen.strokeRect(start, found.y, Math.max(2, end - start - 1), this.rowHeight - 3);
    pen.lineWidth = 1;
  }

  // What a point of the canvas shows: a row, ticks of its run, and a span where there is one.
  at(x, y) {
    const found = (this.places || []).find((entry) => y >= entry.y && y < entry.y + this.rowHeight);
    if (!found || x < this.gutter || x > this.gutter + this.plot) return null;
    const { slope, shift } = this.pixels(found.row.run);
    const ticks = (x - this.gutter - shift) / slope;
    const place = found.row.after(ticks);
    const inside = place < found.row.count && found.row.start[place] <= ticks;
    return { row: found.row, ticks, place: inside ? place : -1 };
  }
}
