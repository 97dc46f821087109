// The families of schedules: each rank's order of computes, from whole numbers. What each is for: penstock/schedule/builders.

const range = (count, first = 0) => Array.from({ length: Math.max(0, count) }, (_, number) => first + number);
const single = (row) => row.map((each) => [each]);
const repeated = (count, values) => range(count).flatMap(() => values);

function alternate(forwards, backwards, warmup) {
  warmup = Math.min(warmup, forwards.length);
  const order = forwards.slice(0, warmup);
  forwards.slice(warmup).forEach((forward, place) => order.push(backwards[place], forward));
  return [...order, ...backwards.slice(forwards.length - warmup)];
}

const everyMicrobatch = (stage, op, microbatches) => range(microbatches).map((microbatch) => part(stage, op, microbatch));

const forwardRows = (ranks, microbatches, each) => range(ranks).map((rank) =>
  range(each).flatMap((turn) => everyMicrobatch(rank + turn * ranks, F, microbatches)));

// Sizes of the rounds: as even as can be, the larger ones first.
function roundsOf(count, microbatches) {
  const size = Math.floor(microbatches / count), larger = microbatches % count;
  return range(count).map((turn) => (turn < larger ? size + 1 : size));
}

// One op of all microbatches: round by round, and in a round stage by stage.
function inRounds(stages, op, sizes) {
  let first = 0;
  return sizes.flatMap((size) => {
    const begin = first;
    first += size;
    return stages.flatMap((stage) => range(size, begin).map((microbatch) => part(stage, op, microbatch)));
  });
}

const loopStages = (rank, ranks, each) => range(each).map((turn) => rank + turn * ranks);

function oneForwardOneBackward(ranks, microbatches) {
  return range(ranks).map((rank) =>
    alternate(everyMicrobatch(rank, F, microbatches), everyMicrobatch(rank, B, microbatches), ranks - rank));
}

function interleaved1f1b(ranks, microbatches, each) {
  if (each === 1) return oneForwardOneBackward(ranks, microbatches);
  const sizes = roundsOf(Math.max(1, Math.floor(microbatches / ranks)), microbatches);
  return range(ranks).map((rank) => {
    const stages = loopStages(rank, ranks, each);
    const warmup = (each - 1) * sizes[0] + 2 * (ranks - 1 - rank) + 1;
    return alternate(inRounds(stages, F, sizes), inRounds([...stages].reverse(), B, sizes), warmup);
  });
}

// -- zero bubble: the order of F and I, with each W where its rank would idle or would hold more than its cap

function fillWeights(orders, placement, cap, durations = { forward: 1, input: 1, weight: 1, hop: 0 }, overrun = 1e-9) {
  const last = placement.length - 1, leastGap = (1 - overrun) * durations.weight;
  const count = 1 + orders.reduce((most, order) => order.reduce((high, { microbatch }) => Math.max(high, microbatch), most), 0);
  const keyOfPart = (stage, op, microbatch) => ((op === F ? 0 : last + 1) + stage) * count + microbatch;
  const arrivals = new Float64Array(2 * (last + 1) * count).fill(-1), waiting = new Map();
  const ranks = orders.map((order) => ({ order, next: 0, clock: 0, owed: [], held: 0, peak: 0, filled: [] }));
  const pay = (rank) => {
    const { stage, microbatch } = rank.owed.shift();
    rank.filled.push(part(stage, W, microbatch));
    rank.clock += durations.weight;
    rank.held -= 1;
  };
  const ready = range(ranks.length);
  while (ready.length) {
    const number = ready.pop(), rank = ranks[number];
    for (; rank.next < rank.order.length; rank.next++) {
      const { stage, op, microbatch } = rank.order[rank.next], own = keyOfPart(stage, op, microbatch);
      const arrival = stage === (op === F ? 0 : last) ? 0 : arrivals[own];
      if (arrival < 0) { waiting.set(own, number); break; }
      while (rank.owed.length && (arrival - rank.clock >= leastGap || (op === F && rank.held >= cap))) pay(rank);
      if (op === F) rank.peak = Math.max(rank.peak, ++rank.held);
      else rank.owed.push(rank.order[rank.next]);
      rank.clock = Math.max(rank.clock, arrival) + (op === F ? durations.forward : durations.input);
      rank.filled.push(rank.order[rank.next]);
      const target = op === F ? stage + 1 : stage - 1;
      if (target < 0 || target > last) continue;
      const key = keyOfPart(target, op, microbatch);
      arrivals[key] = rank.clock + (placement[target] === placement[stage] ? 0 : durations.hop);
      if (waiting.has(key)) { ready.push(waiting.get(key)); waiting.delete(key); }
    }
  }
  if (waiting.size) throw new NeverEnds("this order never finishes");
  for (const rank of ranks) while (rank.owed.length) pay(rank);
  return { orders: ranks.map((rank) => rank.filled), makespan: Math.max(...ranks.map((rank) => rank.clock)), peaks: ranks.map((rank) => rank.peak) };
}

// The first of the fillings that keeps within the cap, or comes closest, and is shortest.
function preferred(found, cap) {
  const key = ({ peaks, makespan }) => [Math.max(cap, ...peaks), makespan];
  return found.reduce((best, each) => {
    const [memory, time] = key(each), [least, shortest] = key(best);
    return memory < least || (memory === least && time < shortest) ? each : best;
  });
}

function zbH2(ranks, microbatches) {
  const orders = range(ranks).map((rank) =>
    alternate(everyMicrobatch(rank, F, microbatches), everyMicrobatch(rank, I, microbatches), 2 * (ranks - rank) - 1));
  return fillWeights(orders, range(ranks), 2 * ranks - 1).orders;
}

function bestRounds(ranks, microbatches, each, size, cap) {
  const rounds = Math.floor(microbatches / size), remainder = microbatches % size;
  const choices = [[...repeated(rounds, [size]), ...(remainder ? [remainder] : [])]];
  if (rounds && remainder && each > 1) {
    choices.push(roundsOf(rounds + 1, microbatches));
    if (size < ranks) choices.push(roundsOf(rounds, microbatches));
  }
  return preferred(choices.map((sizes) => interleavedFill(ranks, sizes, each, cap)).filter(Boolean), cap).orders;
}

function interleavedFill(ranks, sizes, each, cap) {
  const orders = range(ranks).map((rank) => {
    const stages = loopStages(rank, ranks, each);
    const warmup = (each - 1) * sizes[0] + ranks - rank;
    return alternate(inRounds(stages, F, sizes), inRounds([...stages].reverse(), I, sizes), warmup);
  });
  let ahead = 0;
  for (const { stage, op } of orders[ranks - 1]) {
    if (stage === each * ranks - 1) ahead += op === F ? 1 : -1;
    if (ahead < 0) return null; // a microbatch would go back before it has passed the last stage
  }
  try {
    return fillWeights(orders, PLACEMENTS.loop(ranks, each), cap);
  } catch (error) {
    if (error instanceof NeverEnds) return null;
    throw error;
  }
}

const groupCap = (ranks, each) => (each - 1) * Math.floor((ranks + 1) / 2) + ranks;

// -- the V placement

const PERIOD = 6, LARGE = 100000;
const V_HALF = [[1, 2, 1, 2, 0, 0, 0], [1, 2, 1, 2, 2, 0, 2], [1, 2, 1, 2, 2, 2, 2], [1, 2, 2, 1, 2, 0, 2]];
const V_MIN = [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 2], [1, 1, 1, 1, 1, 1, 1]];
const halfCap = (ranks) => 2 * Math.floor((ranks + 2) / 2);
const minCap = (ranks) => 2 * Math.floor((ranks + 4) / 3);

// Give each leg's microbatches their turns in order, and leave out the turns past the last.
function numbered(legs, microbatches) {
  const counts = new Map();
  return legs.flatMap(([stage, op]) => {
    const key = `${stage} ${op}`, microbatch = counts.get(key) || 0;
    counts.set(key, microbatch + 1);
    return microbatch < microbatches ? [part(stage, op, microbatch)] : [];
  });
}

function zbV(ranks, microbatches) {
  const orders = range(ranks).map((rank) => {
    const down = rank, up = 2 * ranks - 1 - rank;
    return numbered([
      ...repeated(2 * (ranks - rank) - 1, [[down, F]]),
      ...repeated(rank, [[up, F], [down, F]]),
      ...repeated(ranks - rank, [[up, F], [up, I]]),
      ...repeated(microbatches, [[down, F], [down, I], [up, F], [up, I]]),
    ], microbatches);
  });
  return fillWeights(orders, PLACEMENTS.v(ranks, 2), 2 * ranks).orders;
}

function bestBlock(blocks, ranks, microbatches, cap) {
  const trial = Math.min(microbatches, 2 * ranks);
  const makers = blocks.map((block) => (count) => repeatBlock(block, ranks, count, cap));
  if (PERIOD * ranks * microbatches <= LARGE) makers.push((count) => inRhythm(ranks, count, cap));
  const trials = makers.map((maker) => [maker, maker(trial)]).filter(([, filled]) => filled);
  const filled = preferred(trials.map((each) => each[1]), cap);
  if (trial === microbatches) return filled.orders;
  const [maker] = trials.find((each) => each[1] === filled);
  return (maker(microbatches) || repeatBlock(blocks[0], ranks, microbatches, cap)).orders;
}

function inRhythm(ranks, microbatches, cap) {
  const placement = PLACEMENTS.v(ranks, 2);
  const costs = { forward: 1, input: 1, weight: 1, hop: 0 };
  const found = follow({ placement, microbatches, costs, cap, activation: 1 }, { patience: 0, overrun: 0, weightTime: 1 });
  return found && fillWeights(found, placement, cap);
}

function repeatBlock([down, up, backDown, backUp, ...rests], ranks, microbatches, cap) {
  const last = ranks - 1, [turn, top, again] = rests.map((rest) => 1 + rest);
  const upStarts = down * last + turn, backDownStarts = upStarts + up * last + top, backUpStarts = backDownStarts + backDown * last + again;
  const orders = range(ranks).map((rank) => {
    const far = 2 * ranks - 1 - rank;
    const legs = [
      [down * rank, rank, F], [upStarts + up * (last - rank), far, F],
      [backDownStarts + backDown * rank, far, I], [backUpStarts + backUp * (last - rank), rank, I],
    ];
    const timed = legs.flatMap(([slot, stage, op], leg) => range(microbatches).map((microbatch) => [slot + PERIOD * microbatch, leg, part(stage, op, microbatch)]));
    return timed.sort((one, other) => one[0] - other[0] || one[1] - other[1]).map((each) => each[2]);
  });
  return fillWeights(orders, PLACEMENTS.v(ranks, 2), cap);
}

// DualPipeV's table, with pairs in the middle and split backwards in fill and drain.
function dualpipeV(ranks, microbatches) {
  const absent = Math.max(0, 2 * ranks - 1 - microbatches);
  return range(ranks).map((rank) => pairNumbered(dualpipeSteps(rank, ranks, absent + microbatches), absent));
}

function dualpipeSteps(rank, ranks, microbatches) {
  const below = ranks - 1 - rank, down = rank, up = 2 * ranks - 1 - rank;
  const forwardDown = [[down, F]], forwardUp = [[up, F]], backwardUp = [[up, B]];
  const pairDown = [[down, F], [up, B]], pairUp = [[up, F], [down, B]];
  let middle = repeated(microbatches - 2 * ranks + rank + 1, [pairDown, pairUp]);
  if (middle.length && below === 0) middle = [forwardDown, backwardUp, ...middle.slice(1)];
  const stages = repeated(rank + 1, [up, down]);
  const split = [...stages.slice(rank + 1), ...repeated(below, [down])];
  const weights = split.map((stage) => [[stage, W]]);
  return [
    ...repeated(2 * below, [forwardDown]), ...repeated(rank + 1, [forwardDown, forwardUp]),
    ...repeated(below, [[[up, I]], [[up, W]], forwardUp]), ...middle, ...repeated(below, [backwardUp, pairUp]),
    ...stages.slice(0, rank + 1).map((stage) => [[stage, B]]), ...split.slice(0, rank + 1).map((stage) => [[stage, I]]),
    ...range(below).flatMap((turn) => [weights[turn], [[down, I]]]), ...weights.slice(below),
  ];
}

function pairNumbered(steps, absent) {
  const counts = new Map();
  return steps.flatMap((step) => {
    const parts = step.flatMap(([stage, op]) => {
      const halves = (op === B ? [I, W] : [op]).map((half) => `${stage} ${half}`);
      const microbatch = (counts.get(halves[0]) || 0) - absent;
      for (const half of halves) counts.set(half, (counts.get(half) || 0) + 1);
      return microbatch >= 0 ? [part(stage, op, microbatch)] : [];
    });
    return parts.length ? [parts] : [];
  });
}

// -- by name

const ORDERS = {
  "gpipe": (ranks, count) => range(ranks).map((rank) => [F, B].flatMap((op) => everyMicrobatch(rank, op, count))),
  "1f1b": oneForwardOneBackward,
  "looped-bfs": (ranks, count, each) => forwardRows(ranks, count, each).map((row) =>
    [...row, ...[...row].reverse().map(({ stage, microbatch }) => part(stage, B, microbatch))]),
  "interleaved-1f1b": interleaved1f1b,
  "zb-h1": (ranks, count) => bestRounds(ranks, count, 1, ranks, ranks),
  "zb-h2": zbH2,
  "interleaved-zb": (ranks, count, each) => bestRounds(ranks, count, each, ranks, each * ranks),
  "group-interleaved": (ranks, count, each) => bestRounds(ranks, count, each, Math.floor((ranks + 1) / 2), groupCap(ranks, each)),
  "zb-v": zbV,
  "v-half": (ranks, count) => bestBlock(V_HALF, ranks, count, halfCap(ranks)),
  "v-min": (ranks, count) => bestBlock(V_MIN, ranks, count, minCap(ranks)),
  "dualpipe-v": dualpipeV,
  "forward-only": forwardRows,
};

// Each action on stage s becomes the same on stages s*size ... s*size+size-1, in model order.
function inBlocks(row, size) {
  return row.flatMap(({ stage, op, microbatch }) => {
    const block = range(size, stage * size);
    return (op === F ? block : block.reverse()).map((each) => part(each, op, microbatch));
  });
}

const stagesPerRank = (name, wanted) => (FAMILIES[name].layout === "v" ? 2 : wanted);

// The schedule of a family, with idle slots where a rank waits.
function build(name, ranks, microbatches, each) {
  const { layout } = FAMILIES[name];
  each = stagesPerRank(name, each);
  let rows = ORDERS[name](ranks, microbatches, each);
  if (layout === "block" && each > 1) rows = rows.map((row) => inBlocks(row, each));
  if (name !== "dualpipe-v") rows = rows.map(single);
  return align({ rows, placement: PLACEMENTS[layout](ranks, each), microbatches, forwardOnly: name === "forward-only", name });
}
