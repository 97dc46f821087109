// What the page shows, as a part of its address: sizes, costs, the cap, and the two schedules, own ones with their rows.

const LIMITS = { ranks: [1, DATA.limits.ranks], microbatches: [1, DATA.limits.microbatches], forward: [0, 1e6], input: [0, 1e6], weight: [0, 1e6], hop: [0, 1e6], cap: [0, 1e6] };
const SHORT = { ranks: "r", microbatches: "m", forward: "f", input: "i", weight: "w", hop: "h", cap: "cap" };
const LONGEST = 60000; // letters of an address; longer ones get lost on their way

const USUAL = ["1f1b", "zb-v"], NUMBERS = { ranks: 8, microbatches: 16, forward: 1, input: 1, weight: 1, hop: 0, cap: 0 }; // where nothing is said
const isFamily = (name) => Object.hasOwn(FAMILIES, name);
const state = { ...NUMBERS, slots: USUAL.map(newSlot) };

function newSlot(source) { return { source, each: isFamily(source) ? FAMILIES[source].stages : 1, own: null, past: [], note: "" }; }

function setNumber(name, value) {
  const [least, most] = LIMITS[name], whole = name === "ranks" || name === "microbatches";
  if (!Number.isFinite(value)) return false;
  state[name] = Math.min(most, Math.max(least, whole ? Math.round(value) : value));
  return true;
}

const rowsText = ({ rows }) => rows.map((row) => row.filter(Boolean).map((cell) => cell.map(partText).join("-")).join(".")).join("_");

function readRowsText(text) {
  return text.split("_").map((row) => row.split(".").filter(Boolean).map((cell) => {
    const parts = cell.split("-").map((word) => /^(\d+)([FBIW])(\d+)$/.exec(word)), forwards = parts.filter((found) => found && found[2] === "F").length;
    if (parts.includes(null) || parts.length > 2 || (parts.length === 2 && forwards !== 1)) throw new FileError(`the address holds ${JSON.stringify(cell.slice(0, 20))}, which is not an action`);
    return parts.map((found) => part(Number(found[1]), LETTERS.indexOf(found[2]), Number(found[3])));
  }));
}

// A schedule that an address holds with all its rows.
function readOwn(words, key) {
  if (!words.has(`${key}rows`)) throw new FileError("the address names a schedule of your own without its rows");
  const told = (name) => words.get(`${key}${name}`) || "", rows = readRowsText(told("rows")), placement = told("on").split(".").map(Number);
  const schedule = { rows, placement, microbatches: Number(told("m")), forwardOnly: words.has(`${key}f`), name: (told("name") || "own").slice(0, 80) };
  checkSize(schedule);
  return schedule;
}

// The words of what is shown; own schedules that are too long for an address are left out.
function stateWords() {
  const words = new URLSearchParams();
  for (const [name, key] of Object.entries(SHORT)) if (name !== "cap" || state.cap) words.set(key, state[name]);
  let complete = true;
  state.slots.forEach(({ source, each, own }, place) => {
    const key = "ab"[place];
    words.set(key, source);
    if (source !== "search" && source !== "none") words.set(`${key}v`, each);
    if (source !== "own") return;
    const text = rowsText(own);
    if (text.length > LONGEST) { complete = false; return; }
    words.set(`${key}rows`, text);
    words.set(`${key}on`, own.placement.join("."));
    words.set(`${key}m`, own.microbatches);
    words.set(`${key}name`, own.name);
    if (own.forwardOnly) words.set(`${key}f`, 1);
  });
  return { words, complete };
}

// Take everything from an address that makes sense; what does not is returned in words.
function readState(words) {
  Object.assign(state, NUMBERS);
  for (const [name, key] of Object.entries(SHORT)) if (words.has(key)) setNumber(name, Number(words.get(key)));
  const wrong = [];
  state.slots = ["a", "b"].map((key, place) => {
    const source = words.get(key), known = isFamily(source) || source === "search" || (source === "none" && place);
    const slot = newSlot(known ? source : USUAL[place]), each = Number(words.get(`${key}v`));
    if (Number.isInteger(each) && each >= 1 && each <= 16) slot.each = each;
    if (source === null || known) return slot;
    try {
      if (source !== "own") throw new FileError(`there is no family ${JSON.stringify(source.slice(0, 40))}`);
      return Object.assign(slot, { source, own: readOwn(words, key) });
    } catch (error) {
      if (!(error instanceof FileError)) throw error;
      wrong.push(`${error.message}; ${USUAL[place]} is shown instead.`);
      return newSlot(USUAL[place]);
    }
  });
  return wrong.join(" ");
}

// -- what a slot shows

const costsOfRank = () => ({ forward: state.forward, input: state.input, weight: state.weight, hop: state.hop });
const built = new Map(); // schedules by what they were made from

function remembered(key, make) {
  if (!built.has(key)) {
    if (built.size > 60) built.delete(built.keys().next().value);
    built.set(key, make());
  }
  return built.get(key);
}

const searchKey = () => JSON.stringify(["search", state.ranks, state.microbatches, costsOfRank(), state.cap]);

// The schedule of a slot; null where there is none, with the reason; waiting: a search has yet to find it.
function scheduleOf({ source, each, own }) {
  const { ranks, microbatches, cap } = state;
  if (source === "none") return { schedule: null, reason: "" };
  if (source === "own") return { schedule: own };
  if (source === "search") {
    const schedule = built.get(searchKey()), many = 4 * ranks * microbatches > MOST_SEARCHED;
    return { waiting: schedule === undefined, schedule, reason: many ? "too large for the quick search; use penstock search" : `the quick search found nothing within ${short(cap)} whole-rank microbatches; penstock search looks further` };
  }
  each = stagesPerRank(source, each);
  if (ranks * microbatches * each > MOST) return { schedule: null, reason: `${(ranks * microbatches * each).toLocaleString("en")} microbatch-stages are too many for a page (${MOST.toLocaleString("en")}); use penstock view` };
  return { schedule: remembered(JSON.stringify([source, ranks, microbatches, each]), () => build(source, ranks, microbatches, each)) };
}

// Everything that is shown of a schedule: the proof first, then the clock.
function shownOf(schedule) {
  const ranks = schedule.rows.length, each = Math.max(1, schedule.placement.length / ranks), costs = stageCosts(costsOfRank(), each);
  const faults = faultsOf(schedule), proved = !faults.length;
  const timeline = proved ? simulate(schedule, costs) : withoutWaits(schedule, costs);
  const memory = peakMemory(schedule, timeline.peaks);
  const bound = schedule.forwardOnly || !proved ? null : lowerBound(schedule.placement, schedule.microbatches, costs, 1, state.cap ? state.cap * each : Infinity);
  return { schedule, faults, proved, timeline, memory, bound, over: state.cap > 0 && memory > state.cap * (1 + 1e-9) };
}
