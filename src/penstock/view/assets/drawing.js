// What all drawings use: colours, canvases, the axis, and the mix of colours where many spans share a pixel.

const style = getComputedStyle(document.documentElement);
let inks = {}; // read once per drawing
const ink = (name) => (inks[name] ??= style.getPropertyValue(`--${name}`).trim());
const FONT = "system-ui, sans-serif", LETTERS_FONT = "ui-monospace, SFMono-Regular, Menlo, monospace";

function rgb(hex) {
  const value = parseInt(hex.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

// Second and later stages of a rank are slightly darker; where a span is drawn by itself, a line per stage says which.
const FILLS = OP_NAMES.map((name) => OPS[name].shades), SHADES = FILLS.map((chunks) => chunks.map(rgb));
const LAST_SHADE = FILLS[0].length - 1;
const PALE = 0.22; // of what is not on the critical path

function fitCanvas(canvas, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2, 16000 / height);
  const width = canvas.clientWidth;
  if (canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height, ratio };
}

function axisSteps(from, to, wanted) {
  const rough = (to - from) / Math.max(wanted, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to + step * 1e-9; at += step) found.push(at);
  return found;
}

// Sums over the spans before each one: time that is covered, and colour times time. With them a pixel costs the same
// whether it holds one span or a thousand.
function mixOf(row, critical) {
  const kept = critical ? "criticalMix" : "mix";
  if (row[kept]) return row[kept];
  const sums = range4(row.count + 1);
  for (let place = 0; place < row.count; place++) {
    const time = row.length[place] * (critical && !row.critical[place] ? PALE : 1), colour = SHADES[row.op[place]][Math.min(row.chunk[place], LAST_SHADE)];
    sums[0][place + 1] = sums[0][place] + time;
    for (let part = 0; part < 3; part++) sums[part + 1][place + 1] = sums[part + 1][place] + time * colour[part];
  }
  return (row[kept] = sums);
}

const range4 = (size) => [0, 1, 2, 3].map(() => new Float64Array(size));

// The colours of a row's pixels, written to a line of an image; pixel = ticks * slope + shift.
function paintLine(row, slope, shift, width, critical, data, offset) {
  const [covered, red, green, blue] = mixOf(row, critical), [r, g, b] = rgb(ink("idle")), per = 1 / slope;
  const sums = new Float64Array(4), before = new Float64Array(4);
  let place = 0;
  for (let pixel = 0; pixel <= width; pixel++) {
    const ticks = (pixel - shift) * per;
    place = row.after(ticks, place);
    sums[0] = covered[place]; sums[1] = red[place]; sums[2] = green[place]; sums[3] = blue[place];
    if (place < row.count && row.start[place] < ticks) {
      const share = (ticks - row.start[place]) / row.length[place];
      sums[0] += share * (covered[place + 1] - covered[place]);
      sums[1] += share * (red[place + 1] - red[place]);
      sums[2] += share * (green[place + 1] - green[place]);
      sums[3] += share * (blue[place + 1] - blue[place]);
    }
    if (pixel) {
      const at = offset + 4 * (pixel - 1), rest = Math.max(0, 1 - (sums[0] - before[0]) * slope);
      data[at] = (sums[1] - before[1]) * slope + rest * r;
      data[at + 1] = (sums[2] - before[2]) * slope + rest * g;
      data[at + 2] = (sums[3] - before[3]) * slope + rest * b;
      data[at + 3] = 255;
    }
    before.set(sums);
  }
}

const strip = document.createElement("canvas");

// Rows as one picture, a line each, in a box of the drawing.
function paintRows(pen, rows, slope, shift, critical, x, y, width, height, ratio) {
  if (!rows.length) return;
  const across = Math.max(1, Math.round(width * ratio));
  if (strip.width !== across || strip.height !== rows.length) { strip.width = across; strip.height = rows.length; }
  const own = strip.getContext("2d"), image = own.createImageData(across, rows.length);
  rows.forEach((row, line) => paintLine(row, slope * ratio, shift * ratio, across, critical, image.data, 4 * across * line));
  own.putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(strip, 0, 0, across, rows.length, x, y, width, height);
}
