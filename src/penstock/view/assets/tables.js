// The figures as tables: text that can be read out, copied and searched. Nothing is ever parsed as HTML.

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

function idleMean(run, part) {
  return run.rows.reduce((sum, row) => sum + row.idle[part], 0) / run.rows.length;
}

const KINDS = [["fill", "before the first compute"], ["wait", "for a peer"], ["drain", "after the last compute"], ["other", "sends and host"]];

function runsTable() {
  const heads = ["run", "makespan", "idle", "peak in flight", "fill", "wait", "drain", "other", "ranks", "stages", "microbatches"];
  const kind = (place) => (place > 3 ? "more" : "");
  const body = RUNS.map((run) => {
    const name = element("td", {}, ...(SEVERAL ? [element("span", { text: run.letter, kind: "key" })] : []), `${run.label} (${run.kind})`);
    const peak = Math.max(0, ...run.rows.map((row) => row.peak));
    const cells = [timeText(run.makespan, run.unit), percent(run.idle), peak, ...KINDS.map((_, part) => percent(idleMean(run, part))), ...run.sizes];
    const best = SEVERAL && SAME_UNIT && run.makespan === Math.min(...RUNS.map((other) => other.makespan));
    return element("tr", {}, name, ...cells.map((text, place) => element("td", { text, kind: best && place === 0 ? "best" : kind(place + 1) })));
  });
  byId("runs").append(
    element("thead", {}, element("tr", {}, ...heads.map((text, place) => element("th", { text, scope: "col", kind: kind(place) })))),
    element("tbody", {}, ...body),
  );
}

function adviceList() {
  for (const run of RUNS) {
    if (!run.account) continue;
    byId("advice").append(element("li", { text: `${SEVERAL ? run.letter + ": " : ""}${run.account.advice}` }));
  }
}

function legend() {
  const there = new Set(RUNS.flatMap((run) => run.rows.flatMap((row) => [...new Set(row.op)])));
  for (const place of [...there].sort()) {
    const op = OPS[OP_NAMES[place]];
    const swatch = element("span", { text: op.pair ? "F B" : op.letter, kind: "swatch" });
    swatch.style.background = op.colour;
    byId("legend").append(element("li", {}, swatch, op.meaning));
  }
  if (RUNS.some((run) => run.rows.some((row) => row.chunk.some((chunk) => chunk > 0)))) {
    byId("legend").append(element("li", { text: "darker: a later stage of the same rank" }));
  }
  if (RUNS.some((run) => run.rows.some((row) => row.sends.start.length))) {
    const swatch = element("span", { kind: "swatch" });
    swatch.style.cssText = "background:var(--send);height:4px";
    byId("legend").append(element("li", {}, swatch, "sending"));
  }
}

function idleTable() {
  const heads = [["rank", "text"], ["", "wide"], ...KINDS.map(([name]) => [name, "figure"]), ["idle", "figure total"]];
  const rows = RUNS.flatMap((run) => run.rows.map((row) => {
    const bar = element("span", { kind: "stack", "aria-hidden": "true" });
    KINDS.forEach(([name, meaning], part) => {
      const piece = element("i", { title: `${name}, ${meaning}: ${percent(row.idle[part])}` });
      piece.style.cssText = `width:${100 * row.idle[part]}%;background:var(--${name})`;
      bar.append(piece);
    });
    const total = row.idle.reduce((sum, part) => sum + part, 0);
    return element("tr", {}, element("td", { text: rowName(row) }), element("td", { kind: "wide" }, bar),
      ...row.idle.map((part) => element("td", { text: percent(part), kind: "figure" })), element("td", { text: percent(total), kind: "figure total" }));
  }));
  const list = element("ul", { kind: "key-list", "aria-label": "Kinds of idle time" });
  list.style.cssText = "display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;margin:0 0 8px;padding:0;font-size:.85rem;color:var(--soft)";
  for (const [name, meaning] of KINDS) {
    const swatch = element("span", { kind: "swatch" });
    swatch.style.cssText = `background:var(--${name});margin-right:6px`;
    list.append(element("li", {}, swatch, `${name}: ${meaning}`));
  }
  byId("idle").parentNode.before(list);
  byId("idle").append(
    element("thead", {}, element("tr", {}, ...heads.map(([text, kind]) => element("th", { text, kind, scope: "col" })))),
    element("tbody", {}, ...rows),
  );
}

function booksTables() {
  for (const run of RUNS) {
    if (!run.account) continue;
    byId("account").hidden = false;
    const names = run.account.names;
    const rows = run.account.ranks.map((entry) => {
      const shares = Object.fromEntries(entry.parts);
      return element("tr", {}, element("td", { text: `rank ${entry.rank}` }), element("td", { text: entry.whole }),
        ...names.map((name) => element("td", { text: shares[name] ? percent(shares[name]) : "" })));
    });
    const head = element("tr", {}, ...["rank", "step", ...names].map((text) => element("th", { text, scope: "col" })));
    const path = run.account.path.slice(0, 8).map(([name, time]) => `${name} ${time}`).join(", ");
    byId("books").append(element("div", { kind: "books" },
      element("h3", { text: `${SEVERAL ? run.letter + "  " : ""}${run.label}` }),
      element("div", { kind: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows))),
      element("p", { kind: "hint", text: `Critical path: ${path}` })));
  }
}
