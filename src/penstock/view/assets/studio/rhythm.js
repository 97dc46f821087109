// Orders on a V that keep to a rhythm in which no rank waits: what penstock/schedule/builders/rhythm.py explains and does,
// for stages that are alike. A problem is { placement, microbatches, costs, cap, activation }, memory being that of a rank.

const EPSILON = 1e-9;

// A queue of [time, rank], the least first.
class Queue {
  constructor(items) { this.items = items; }

  push(item) {
    const { items } = this;
    let place = items.push(item) - 1;
    while (place) {
      const above = (place - 1) >> 1;
      if (!Queue.before(items[place], items[above])) break;
      [items[place], items[above]] = [items[above], items[place]];
      place = above;
    }
  }

  pop() {
    const { items } = this, first = items[0], last = items.pop();
    if (!items.length) return first;
    items[0] = last;
    for (let place = 0; ;) {
      let least = place;
      for (const below of [2 * place + 1, 2 * place + 2]) if (below < items.length && Queue.before(items[below], items[least])) least = below;
      if (least === place) return first;
      [items[place], items[least]] = [items[least], items[place]];
      place = least;
    }
  }

  static before(one, other) { return one[0] < other[0] || (one[0] === other[0] && one[1] < other[1]); }
}

// The order of F and I of each rank; null where memory does not let it end.
function follow(problem, wanted) {
  const rhythm = { down: 0.5, slack: 0, shape: 0.8, patience: 0.3, overrun: 0.6, weightTime: 0.7, hopTime: 0, ...wanted };
  const { placement, microbatches: count, costs, activation } = problem, stages = placement.length, ranks = Math.max(...placement) + 1;
  const size = stages * count, own = range(ranks).map((rank) => stagesOf(placement, rank));
  const caps = own.map((mine) => Math.max(problem.cap * (1 + EPSILON), mine.length * activation * (1 + EPSILON)));
  const times = rhythmTimes(problem, ranks, rhythm.down), quota = quotas(problem, rhythm, own, caps, times);
  const at = [new Float64Array(size).fill(-1), new Float64Array(size).fill(-1)]; // of F and of I: when it can start
  at[0].fill(0, 0, count);
  const done = [new Int32Array(stages), new Int32Array(stages)], inFlight = new Int32Array(stages);
  const free = new Float64Array(ranks), held = new Float64Array(ranks), owed = own.map(() => []), orders = own.map(() => []);
  const events = new Queue(range(ranks).map((rank) => [0, rank]));
  const patience = rhythm.patience * costs.forward, weightTime = costs.weight * rhythm.weightTime;
  const fits = (rank) => held[rank] + activation <= caps[rank];

  function pay(rank, now, stage) {
    inFlight[stage] -= 1;
    owed[rank].splice(owed[rank].indexOf(stage), 1);
    held[rank] -= activation;
    free[rank] = now + weightTime;
    events.push([free[rank], rank]);
  }

  function take(rank, now, half, stage) {
    const microbatch = done[half][stage]++, end = now + (half ? costs.input : costs.forward);
    orders[rank].push(part(stage, half ? I : F, microbatch));
    if (half) owed[rank].push(stage);
    else { inFlight[stage] += 1; held[rank] += activation; }
    const turn = !half && stage === stages - 1, target = turn ? stage : half ? stage - 1 : stage + 1;
    if (target >= 0) {
      const there = placement[target] === rank ? end : end + costs.hop * rhythm.hopTime;
      at[half || turn ? 1 : 0][target * count + microbatch] = there;
      events.push([there, placement[target]]);
    }
    free[rank] = end;
    events.push([end, rank]);
  }

  // Take the first that is there, unless one that should come before it is there soon; else a W.
  function step(rank, now) {
    let first = null, firstKey = Infinity, soon = Infinity, soonKey = Infinity, full = -1, fullKey = Infinity;
    const debts = owed[rank];
    for (const stage of own[rank]) {
      for (const half of [0, 1]) {
        const microbatch = done[half][stage];
        if (microbatch >= count) continue;
        const arrival = at[half][stage * count + microbatch];
        if (arrival < 0) continue;
        const key = times.starts[half][stage] + microbatch * times.period, wait = arrival - now;
        if (!half && !(inFlight[stage] < quota[stage] && fits(rank))) {
          if (wait <= EPSILON && debts.length && key < fullKey) { full = stage; fullKey = key; }
        } else if (wait <= EPSILON) {
          if (key < firstKey) { first = [half, stage]; firstKey = key; }
        } else {
          soon = Math.min(soon, wait);
          if (wait < patience) soonKey = Math.min(soonKey, key);
        }
      }
    }
    if (fullKey < firstKey) pay(rank, now, debts.includes(full) ? full : debts[0]);
    else if (first && soonKey >= firstKey) {
      if (first[0] ? held[rank] <= caps[rank] || !debts.length : fits(rank)) take(rank, now, ...first);
      else pay(rank, now, debts[0]);
    } else if (debts.length && soon >= (1 - rhythm.overrun) * weightTime - EPSILON) pay(rank, now, debts[0]);
  }

  while (events.items.length) {
    const [now, rank] = events.pop();
    if (free[rank] <= now + EPSILON) step(rank, now);
  }
  return orders.reduce((sum, order) => sum + order.length, 0) === 2 * size ? orders : null;
}

// When the first microbatch's F and I would start in each stage, and after what time the next one follows.
function rhythmTimes({ placement, costs }, ranks, down) {
  const stages = placement.length, each = stages / ranks;
  const { forward, input, weight } = costs, slot = forward + input + weight;
  const least = Math.min(Math.max(forward, input) + (ranks > 1 ? costs.hop : 0), slot / 2);
  const downTakes = least + down * (slot - 2 * least), rests = restsOf(ranks, each);
  const starts = [new Float64Array(stages), new Float64Array(stages)];
  let now = 0;
  for (let leg = 0; leg < 2 * each; leg++) {
    const first = leg < each ? leg * ranks : (2 * each - leg) * ranks - 1;
    for (let step = 0; step < ranks; step++) {
      if (step) now += leg % 2 === 0 ? downTakes : slot - downTakes;
      if (leg < each) starts[0][first + step] = now;
      else starts[1][first - step] = now;
    }
    if (leg < rests.length) now += slot / 2 + rests[leg] * slot;
  }
  return { starts, period: each * slot };
}

// Whole slots of rest at each turn: the fewest with which legs of one direction are in slots of their own.
function restsOf(ranks, each) {
  const turns = 2 * each - 1;
  function placed(rests, slots, left) {
    const leg = rests.length + 1;
    if (leg > turns) return rests;
    for (let rest = 0; rest <= left; rest++) {
      const slot = leg > 1 ? slots[leg - 2] + ranks + rests[rests.length - 1] + rest : 0;
      const others = slots.filter((_, place) => place >= leg % 2 && (place - (leg % 2)) % 2 === 0);
      if (others.every((other) => (slot - other) % each !== 0)) {
        const found = placed([...rests, rest], [...slots, slot], left - rest);
        if (found) return found;
      }
    }
    return null;
  }
  for (let left = 0; left < each * turns; left++) {
    const found = placed([], [0], left);
    if (found) return found;
  }
  return new Array(turns).fill(0);
}

// How many microbatches each stage may hold.
function quotas({ placement, microbatches, activation }, rhythm, own, caps, { starts, period }) {
  if (rhythm.slack !== null) {
    return starts[0].map((start, stage) => Math.max(1, Math.ceil((starts[1][stage] - start) / period + rhythm.slack - EPSILON)));
  }
  const found = new Array(placement.length).fill(1);
  own.forEach((stages, rank) => {
    const room = caps[rank] === Infinity ? stages.length * activation * microbatches : caps[rank];
    const shares = stages.map((stage) => (placement.length - stage - 0.5) ** rhythm.shape);
    for (let left = room - stages.length * activation; left >= activation; left -= activation) {
      let best = -1;
      stages.forEach((stage, place) => {
        if (found[stage] < microbatches && (best < 0 || found[stage] / shares[place] < found[stages[best]] / shares[best])) best = place;
      });
      if (best < 0) break;
      found[stages[best]] += 1;
    }
  });
  return found;
}
