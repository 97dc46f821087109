// Elements, and a scatter of points with names: in SVG, so that each point can be focused, read out and clicked.

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
    for (const { y, name } of lines) {
      this.make("line", "level", { x1: left, x2: width - right, y1: Y(y), y2: Y(y) });
      this.make("text", "", { x: width - right, y: Y(y) - 5, "text-anchor": "end" }, name);
    }
    this.points(points, X, Y, width);
  }

  points(points, X, Y, width) {
    const taken = [];
    for (const point of points) {
      const x = X(point.x), y = Y(point.y), settings = { cx: x, cy: y, r: point.kind ? 7 : 5 };
      const dot = this.make("circle", `dot ${point.kind || ""}`, settings);
      const words = `${point.mark ? point.mark + " " : ""}${point.name}: ${this.yName} ${this.yText(point.y)}, ${this.xName} ${this.xText(point.x)}`;
      dot.append(Object.assign(document.createElementNS(this.svg.namespaceURI, "title"), { textContent: words }));
      if (this.choose) {
        for (const [key, value] of [["tabindex", 0], ["role", "button"], ["aria-label", words]]) dot.setAttribute(key, value);
        dot.addEventListener("click", (event) => this.choose(point, event));
        dot.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); this.choose(point, event); } });
      }
      if (point.label === "") continue;
      const text = point.label ?? `${point.mark ? point.mark + " " : ""}${point.name}`, size = 6.6 * text.length;
      const box = (dx, dy) => ({ left: dx > 0 ? x + dx : x + dx - size, right: dx > 0 ? x + dx + size : x + dx, y: y + dy });
      const clear = ({ left, right, y: at }) => right < width && left > 60 && !taken.some((other) => other.left < right && other.right > left && Math.abs(other.y - at) < 12);
      const spots = [[9, 4], [-9, 4], [9, -10], [9, 18], [-9, -10], [-9, 18], [9, -24], [9, 32]];
      const [dx, dy] = spots.find((spot) => clear(box(...spot))) || spots[0];
      taken.push(box(dx, dy), { left: x - 6, right: x + 6, y });
      this.make("text", point.kind ? "name chosen" : "name", { x: x + dx, y: y + dy, "text-anchor": dx > 0 ? "start" : "end" }, text);
    }
  }
}
