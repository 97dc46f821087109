// The figures as tables: text that can be read out, copied and searched. Nothing is ever parsed as HTML.

function idleMean(run, part) {
  return run.rows.reduce((sum, row) => sum + row.idle[part], 0) / run.rows.length;
}

const KINDS = [["fill", "before the first compute"], ["wait", "for a peer"], ["drain", "after the last compute"], ["other", "sends and host"]];

// One line per run, with a button that opens its ranks.
function runsTable(view, toggle) {
  const heads = ["run", "makespan", "idle", "memory", "fill", "wait", "drain", "other", "ranks", "stages", "microbatches"];
  const kind = (place) => (place > 3 ? "more" : "");
  const least = (of) => (view.several && view.sameUnit ? Math.min(...view.runs.map(of)) : NaN);
  const oneUnit = view.runs.every((run) => Boolean(run.activation) === Boolean(view.runs[0].activation));
  const best = [least((run) => run.makespan), least((run) => run.idle), oneUnit ? least((run) => run.peakSize) : NaN];
  const body = view.runs.map((run) => {
    const name = element("span", { kind: "name" });
    if (view.several) {
      const button = element("button", { kind: "key", text: run.letter, type: "button", title: "Show or hide its ranks in the timeline", "aria-label": `Ranks of ${run.letter}, ${run.label}` });
      button.addEventListener("click", () => toggle(run));
      run.button = button;
      name.append(button);
    }
    name.append(`${run.label} (${run.kind})`);
    const figures = [run.makespan, run.idle, run.peakSize];
    const cells = [timeText(run.makespan, run.unit), percent(run.idle), run.memory(run.peakSize), ...KINDS.map((_, part) => percent(idleMean(run, part))), ...run.sizes];
    return element("tr", {}, element("td", {}, name), ...cells.map((text, place) => element("td", { text, kind: place < 3 && figures[place] === best[place] ? "best" : kind(place + 1) })));
  });
  byId("runs").append(
    element("thead", {}, element("tr", {}, ...heads.map((text, place) => element("th", { text, scope: "col", kind: kind(place) })))),
    element("tbody", {}, ...body),
  );
}

function adviceList(view) {
  for (const run of view.runs) {
    if (!run.account) continue;
    const { advice } = run.account;
    byId("advice").append(element("li", { text: `${view.several ? `${run.letter}: ${advice}` : advice[0].toUpperCase() + advice.slice(1)}.` }));
  }
}

function idleTable(view) {
  const heads = [["rank", "text"], ["", "wide"], ...KINDS.map(([name]) => [name, "figure"]), ["idle", "figure total"]];
  const rows = view.runs.filter((run) => view.isOpen(run)).flatMap((run) => run.rows.map((row) => {
    const bar = element("span", { kind: "stack", "aria-hidden": "true" });
    KINDS.forEach(([name, meaning], part) => {
      const piece = element("i", { title: `${name}, ${meaning}: ${percent(row.idle[part])}` });
      piece.style.cssText = `width:${100 * row.idle[part]}%;background:var(--${name})`;
      bar.append(piece);
    });
    const total = row.idle.reduce((sum, part) => sum + part, 0);
    return element("tr", {}, element("td", { text: rowName(row, view.several) }), element("td", { kind: "wide" }, bar),
      ...row.idle.map((part) => element("td", { text: percent(part), kind: "figure" })), element("td", { text: percent(total), kind: "figure total" }));
  }));
  byId("idle").replaceChildren(
    element("thead", {}, element("tr", {}, ...heads.map(([text, kind]) => element("th", { text, kind, scope: "col" })))),
    element("tbody", {}, ...rows),
  );
  byId("idle-none").hidden = rows.length > 0;
  byId("idle").hidden = !rows.length;
}

function idleKey() {
  for (const [name, meaning] of KINDS) {
    const swatch = element("span", { kind: "swatch" });
    swatch.style.cssText = `background:var(--${name});`;
    byId("idle-key").append(element("li", {}, swatch, `${name}: ${meaning}`));
  }
}

function booksTables(view) {
  for (const run of view.runs) {
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
      element("h3", { text: `${view.several ? run.letter + "  " : ""}${run.label}` }),
      element("div", { kind: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows))),
      element("p", { kind: "hint", text: `Critical path: ${path}` })));
  }
}
