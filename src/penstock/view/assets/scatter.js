// Elements, the legend, and a scatter of points with names: in SVG, so that each point can be focused, read out and clicked.

function element(name, { text, kind, title, ...rest } = {}, ...children) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  if (title) made.title = title;
  for (const [key, value] of Object.entries(rest)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function byId(id) { return document.getElementById(id); }

// What the colours mean; of those that are there.
function legend(list, runs) {
  const there = new Set(runs.flatMap((run) => run.rows.flatMap((row) => [...new Set(row.op)])));
  const entries = [...there].sort().map((place) => {
    const op = OPS[OP_NAMES[place]], swatch = element("span", { text: op.pair ? "F B" : op.letter, kind: "swatch" });
    [swatch.style.background] = op.shades;
    return element("li", {}, swatch, op.meaning);
  });
  if (runs.some((run) => run.rows.some((row) => row.chunk.some((chunk) => chunk > 0)))) {
    entries.push(element("li", { text: "darker, with lines on top: a later stage of the same rank" }));
  }
  if (runs.some((run) => run.rows.some((row) => row.sends.start.length))) {
    const swatch = element("span", { kind: "swatch" });
    swatch.style.cssText = "background:var(--send);height:4px";
    entries.push(element("li", {}, swatch, "sending"));
  }
  list.replaceChildren(...entries);
}

const FINGER = 22; // pixels around a dot that count as the dot

class Scatter {
  // `xText` and `yText` write numbers of the axes; `choose(point, event)` is called with a point that was chosen.
  constructor(svg, { xName, yName, xText, yText, choose = null, joined = false }) {
    Object.assign(this, { svg, xName, yName, xText, yText, choose, joined });
  }

  make(name, kind, settings, text) {
    const made = document.createElementNS(this.svg.namespaceURI, name);
    if (kind) made.setAttribute("class", kind);
    for (const [key, value] of Object.entries(settings)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    this.svg.append(made);
    return made;
  }

  // Points are { x, y, name, mark, kind }; `lines` are { y, name } across all of it.
  draw(points, lines = []) {
    const width = this.svg.clientWidth || 640, height = this.svg.clientHeight || 280, [left, right, top, bottom] = [64, 24, 26, 44];
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    if (!points.length) return;
    const xs = points.map((point) => point.x), highest = Math.max(...points.map((point) => point.y), ...lines.map((line) => line.y)) * 1.08 || 1;
    const most = Math.max(...xs), least = this.joined ? Math.min(...xs) : 0, span = most * (this.joined ? 1 : 1.06) - least || 1;
    const X = (x) => left + ((x - least) / span) * (width - left - right), Y = (y) => height - bottom - (y / highest) * (height - top - bottom);
    for (const y of axisSteps(0, highest, 4)) {
      this.make("line", "grid", { x1: left, x2: width - right, y1: Y(y), y2: Y(y) });
      this.make("text", "", { x: left - 8, y: Y(y) + 4, "text-anchor": "end" }, this.yText(y));
    }
    for (const x of axisSteps(least, least + span, Math.max(3, width / 130))) {
      if (!this.joined || Number.isInteger(x)) this.make("text", "", { x: X(x), y: height - bottom + 18, "text-anchor": "middle" }, this.xText(x));
    }
    this.make("text", "axis", { x: width - right, y: height - 6, "text-anchor": "end" }, this.xName);
    this.make("text", "axis", { x: 4, y: 14 }, this.yName);
    for (const { y } of lines) this.make("line", "level", { x1: left, x2: width - right, y1: Y(y), y2: Y(y) });
    this.points(points, X, Y, width);
    for (const { y, name } of lines) this.make("text", "", { x: left + 4, y: Y(y) + 16 }, name);
  }

  points(points, X, Y, width) {
    const places = points.map((point) => ({ point, x: X(point.x), y: Y(point.y), size: point.kind ? 7 : 5 }));
    for (const place of places) this.dot(place);
    this.svg.onclick = this.choose && ((event) => this.nearest(places, event));
    const taken = places.map(({ x, y, size }) => ({ left: x - size - 2, right: x + size + 2, y }));
    for (const { point, x, y, size } of places) {
      const text = point.label ?? `${point.mark ? point.mark + " " : ""}${point.name}`, length = 6.8 * text.length, far = size + 5;
      if (!text) continue;
      const box = (dx, dy) => ({ left: dx > 0 ? x + dx : x + dx - length, right: dx > 0 ? x + dx + length : x + dx, y: y + dy - 4 });
      const clear = ({ left, right, y: at }) => right < width && left > 60 && !taken.some((other) => other.left < right && other.right > left && Math.abs(other.y - at) < 12);
      const spots = [4, -10, 18, -24, 32, -38, 46].flatMap((dy) => [[far, dy], [-far, dy]]);
      const [dx, dy] = spots.find((spot) => clear(box(...spot))) || spots[0];
      taken.push(box(dx, dy));
      this.make("text", point.kind ? "name chosen" : "name", { x: x + dx, y: y + dy, "text-anchor": dx > 0 ? "start" : "end" }, text);
    }
  }

  // A finger is wider than a dot: what is meant is the nearest one.
  nearest(places, event) {
    const box = this.svg.getBoundingClientRect(), away = ({ x, y }) => Math.hypot(x - event.clientX + box.left, y - event.clientY + box.top);
    const found = places.reduce((best, place) => (away(place) < away(best) ? place : best));
    if (away(found) <= FINGER) this.choose(found.point, event);
  }

  dot({ point, x, y, size }) {
    const words = `${point.mark ? point.mark + " " : ""}${point.name}: ${this.yName} ${this.yText(point.y)}, ${this.xName} ${this.xText(point.x)}`;
    const made = this.make("circle", `dot ${point.kind || ""}`, { cx: x, cy: y, r: size });
    made.append(Object.assign(document.createElementNS(this.svg.namespaceURI, "title"), { textContent: words }));
    if (!this.choose) return;
    for (const [key, value] of [["tabindex", 0], ["role", "button"], ["aria-label", words]]) made.setAttribute(key, value);
    made.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); this.choose(point, event); } });
  }
}
