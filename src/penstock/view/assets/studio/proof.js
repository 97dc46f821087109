// The proof: every fault of a schedule of computes, in the words of `penstock verify`. An empty list is the proof.

const fault = (message, rank = null, position = null, action = null) => ({ rank, position, action, message });

function faultText({ rank, position, action, message }) {
  const where = [];
  if (rank !== null) where.push(`rank ${rank}`);
  if (position !== null) where.push(`position ${position}`);
  if (action !== null) where.push(action);
  return where.length ? `${where.join(", ")}: ${message}` : message;
}

function faultsOf(schedule) {
  const found = shapeFaults(schedule), { rows, placement } = schedule;
  if (rows.length !== Math.max(...placement) + 1) return found;
  if (found.length) {
    const odd = new Set(found.filter((each) => each.action !== null).map((each) => `${each.rank} ${each.position}`));
    schedule = { ...schedule, rows: rows.map((row, rank) => row.map((cell, place) => (odd.has(`${rank} ${place}`) ? null : cell))) };
  }
  const columns = columnsOf(schedule), all = found.concat(completenessFaults(schedule, columns), orderFaults(schedule, columns));
  if (all.length) return all;
  const { stuck } = runRows(columns, new Float64Array(columns.parts.length), waitsOf(columns));
  return stuckFaults(schedule, columns, stuck);
}

// What makes it no schedule at all: rows, stages and microbatches that do not fit together.
function shapeFaults({ rows, placement, microbatches }) {
  const found = [], stages = placement.length, ranks = Math.max(...placement) + 1;
  if (rows.length !== ranks) found.push(fault(`${rows.length} rows for a placement on ${ranks} ranks; give each rank one row`));
  rows.forEach((row, rank) => { if (!row.some(Boolean)) found.push(fault("the row has no action; every rank runs something", rank)); });
  const seen = new Set();
  rows.forEach((row, rank) => row.forEach((cell, place) => {
    for (const each of cell || []) {
      const at = [rank, place, partText(each)];
      if (each.stage >= stages) found.push(fault(`there is no stage ${each.stage}: stages are 0 to ${stages - 1}`, ...at));
      else {
        seen.add(each.stage);
        if (placement[each.stage] !== rank) found.push(fault(`stage ${each.stage} lives on rank ${placement[each.stage]}`, ...at));
      }
      if (each.microbatch >= microbatches) {
        found.push(fault(`microbatch ${each.microbatch} is out of range: there are ${microbatches}, 0 to ${microbatches - 1}`, ...at));
      }
    }
  }));
  for (let stage = 0; stage < stages; stage++) {
    if (!seen.has(stage)) found.push(fault(`stage ${stage} appears in no row; is the row of its rank missing?`));
  }
  return found;
}

// Each (stage, microbatch) has exactly one F and one B, or one I and one W.
function completenessFaults({ placement, microbatches, forwardOnly }, columns) {
  const there = new Uint8Array(placement.length * microbatches), twice = [], found = []; // a bit for each op
  columns.parts.forEach((each, number) => {
    const key = each.stage * microbatches + each.microbatch;
    if (there[key] & (1 << each.op)) twice.push(fault("is there twice; it must run once", columns.rank[number], columns.position[number], partText(each)));
    there[key] |= 1 << each.op;
  });
  const right = forwardOnly ? [1 << F] : [(1 << F) | (1 << B), (1 << F) | (1 << I) | (1 << W)];
  there.forEach((ops, key) => { if (!right.includes(ops)) found.push(...incomplete(Math.floor(key / microbatches), key % microbatches, ops, placement, forwardOnly)); });
  return [...twice, ...found];
}

// What is wrong with the computes of one microbatch in one stage, by which of F, B, I and W there are.
function incomplete(stage, microbatch, ops, placement, forwardOnly) {
  const found = [], name = (op) => `${stage}${LETTERS[op]}${microbatch}`, has = (op) => Boolean(ops & (1 << op));
  const add = (op, message) => found.push(fault(message, placement[stage], null, name(op)));
  const halves = [I, W].filter(has).map(name);
  if (!has(F)) add(F, "never runs");
  if (forwardOnly) {
    for (const op of [B, I, W].filter(has)) add(op, "is a backward in a forward-only schedule");
  } else if (has(B)) {
    if (halves.length) add(B, `is a full backward, yet ${halves.join(" and ")} runs too`);
  } else if (!halves.length) add(B, `never runs, nor do ${name(I)} and ${name(W)}`);
  else if (halves.length === 1) add(has(I) ? W : I, `never runs, but its other half ${halves[0]} does`);
  return found;
}

// On its own rank nothing stands before what it needs.
function orderFaults({ placement, rows }, columns) {
  const makers = makersOf(columns), found = [];
  for (let turn = 0; turn < 2; turn++) {
    columns.parts.forEach((each, number) => {
      const need = needsOf(each, columns.stages)[turn], rank = columns.rank[number];
      if (!need || placement[need[1]] !== rank) return;
      const maker = makers[keyOf(columns, need[0], need[1], each.microbatch)];
      if (maker >= 0 && columns.cell[maker] < columns.cell[number]) return;
      const position = columns.position[number], [value, source] = need;
      const inside = rows[rank][position].length < 2 ? undefined : rows[rank][position].find(
        (other) => other.microbatch === each.microbatch && other.stage === source && RULES.makes[other.op].includes(value));
      const name = value === OUTPUT ? `${source}F${each.microbatch}` : `${source}B${each.microbatch} or ${source}I${each.microbatch}`;
      const why = inside
        ? `needs what ${partText(inside)} makes, and the parts of a pair may run at the same time; write them apart`
        : `stands before ${name}, which it needs`;
      found.push([number, fault(why, rank, position, partText(each))]);
    });
  }
  return found.sort((one, other) => one[0] - other[0]).map((each) => each[1]);
}

// Where each rank stops, and the ring of ranks that wait for each other.
function stuckFaults({ rows }, columns, stuck) {
  const where = new Map(), found = [], waits = new Map();
  columns.parts.forEach((each, number) => where.set(partText(each), number));
  stuck.forEach((wait, rank) => {
    if (!wait) return;
    const position = columns.position[wait.who], action = cellText(rows[rank][position]);
    const { microbatch } = columns.parts[wait.who];
    const names = (wait.value === OUTPUT ? [F] : [B, I]).map((op) => `${wait.source}${LETTERS[op]}${microbatch}`);
    const name = names.filter((each) => where.has(each)).pop();
    if (name === undefined) {
      found.push(fault(`stops here: it waits for ${names[0]}, which no rank runs`, rank, position, action));
      return;
    }
    const number = where.get(name), there = columns.rank[number];
    const text = `stops here: it waits for ${name}, which is at position ${columns.position[number]} of rank ${there}`;
    found.push(fault(text, rank, position, action));
    waits.set(rank, [there, `rank ${rank} at ${action} waits for ${name} of rank ${there}`]);
  });
  return [...found, ...ringFaults(waits)];
}

function ringFaults(waits) {
  for (const start of waits.keys()) {
    const seen = [];
    let rank = start;
    while (waits.has(rank) && !seen.includes(rank)) { seen.push(rank); rank = waits.get(rank)[0]; }
    if (!seen.includes(rank)) continue;
    const ring = seen.slice(seen.indexOf(rank));
    const names = [...ring, ring[0]].map((member) => `rank ${member}`).join(" -> ");
    const arrows = ring.map((member) => `    ${waits.get(member)[1]}`).join("\n");
    return [fault(`deadlock, each waits for the next: ${names}\n${arrows}`)];
  }
  return [];
}
