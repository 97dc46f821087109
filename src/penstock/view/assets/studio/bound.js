// A time that no schedule of a placement can beat, for stages that are alike: penstock/tools/search/bounds/lower_bound.py and
// heads_and_tails.py explain why. Costs are of one stage, `activation` is what one holds, and `cap` is of each rank.

const FEW = 8000, MANY = 40000, FEW_STAGES = 6, ROUNDING = 1e-9;

function lowerBound(placement, count, costs, activation, cap) {
  const ranks = Math.max(...placement) + 1, ways = waysOf(placement, costs);
  let bound = 0;
  for (let rank = 0; rank < ranks; rank++) bound = Math.max(bound, rankBound(stagesOf(placement, rank), count, costs, activation, cap, ways));
  return Math.max(bound, pacedBound(placement, count, costs, activation, cap));
}

// How long one microbatch is under way, when it never waits. By stage.
function waysOf(placement, { forward, input, weight, hop }) {
  const stages = placement.length, hops = range(stages - 1).map((stage) => (placement[stage] === placement[stage + 1] ? 0 : hop));
  const forwardStarts = [0], inputStarts = new Array(stages), rests = [];
  for (const time of hops) forwardStarts.push(forwardStarts[forwardStarts.length - 1] + (forward + time));
  let now = forwardStarts[stages - 1] + forward;
  for (let stage = stages - 1; stage >= 0; stage--) {
    inputStarts[stage] = now;
    if (stage) now += input + hops[stage - 1];
  }
  for (let stage = 0; stage < stages; stage++) rests.push(Math.max(weight, stage ? hops[stage - 1] + input + rests[stage - 1] : 0));
  return { forwardStarts, inputStarts, rests, hops };
}

function rankBound(stages, count, { forward, input, weight }, activation, cap, ways) {
  const each = stages.length, head = ways.forwardStarts[stages[0]], turn = ways.inputStarts[stages[each - 1]];
  const inputRests = stages.map((stage) => ways.rests[stage]);
  const trips = stages.map((stage) => ways.inputStarts[stage] + input + ways.rests[stage] - ways.forwardStarts[stage] - forward);
  const forwards = count * each * forward, inputs = count * each * input, weights = count * each * weight;
  const fitting = Math.min(each * count, Math.floor((cap * (1 + ROUNDING)) / activation));
  const early = Math.min(fitting * forward, turn - head);
  const found = [
    head + forwards + inputs + weights, head + forwards + inputs + Math.min(...inputRests),
    head + forwards + Math.min(...trips), turn + forwards + inputs + weights - early,
  ];
  const over = count * each * activation - cap * (1 + ROUNDING);
  if (over > 0) {
    const room = Math.min(each * count, Math.ceil(over / activation - ROUNDING)) * (input + weight);
    if (room > 0) found.push(turn + forwards - early + room + Math.min(...trips));
  }
  return Math.max(...found);
}

// -- from when the n-th microbatch can be somewhere at the earliest, and what must still follow it

const mostOf = (cap, one, each) => (each <= 0 || cap === Infinity ? Infinity : 1 + Math.max(0, Math.floor((cap - one) / each)));

// By stage of F: { most, stage, longer, weight }, no more than `most` microbatches from there to the end of a backward.
function limitsOf(placement, count, { forward, input, weight, hop }, activation, cap) {
  const stages = placement.length, limits = placement.map(() => []), away = new Array(stages);
  let now = 0;
  for (let stage = stages - 1; stage >= 0; stage--) {
    away[stage] = now;
    if (stage) now += input + (placement[stage] === placement[stage - 1] ? 0 : hop);
  }
  const full = cap * (1 + ROUNDING), add = (stage, limit) => { if (limit.most < count) limits[stage].push(limit); };
  for (let rank = 0; rank <= Math.max(...placement); rank++) {
    const own = stagesOf(placement, rank), last = own[own.length - 1], whole = own.length * activation;
    const longer = own.map((stage, place) => Math.min(...own.slice(0, place + 1).map((other) => away[other] + input + weight)) - away[stage] - input);
    if (own.length > 1 && own.length <= FEW_STAGES && mostOf(full, whole, activation) === 1) {
      add(last, { most: 1, stage: last, longer: (own.length - 1) * forward + leastRoom(own, activation, input, weight, 2 * whole - full), weight: false });
    }
    own.forEach((stage, place) => {
      const size = (place + 1) * activation, together = mostOf(full, whole, size);
      add(stage, { most: mostOf(full, size, size), stage, longer: longer[place], weight: false });
      add(stage, { most: mostOf(full, activation, activation), stage, longer: 0, weight: true });
      add(stage, { most: together, stage: last, longer: longer[own.length - 1], weight: false });
      add(last, { most: together, stage, longer: longer[place], weight: false });
    });
  }
  return limits;
}

// The least time in which a rank that has done I of its last stage can give back so much of that microbatch.
function leastRoom(own, activation, input, weight, size) {
  let best = Infinity;
  for (let chosen = 0; chosen < 1 << own.length; chosen++) {
    const places = own.map((_, place) => place).filter((place) => chosen & (1 << place));
    if (places.length * activation < size * (1 - ROUNDING)) continue;
    const passed = places.length ? own.length - 1 - Math.min(places[0], own.length - 1) : 0;
    best = Math.min(best, passed * input + places.length * weight);
  }
  return best < Infinity ? best : 0;
}

function pacedBound(placement, count, costs, activation, cap) {
  const stages = placement.length;
  if (stages * count > MANY) return 0;
  const limits = limitsOf(placement, count, costs, activation, cap);
  const delays = range(stages - 1).map((stage) => (placement[stage] === placement[stage + 1] ? 0 : costs.hop));
  const heads = headsOf(stages, count, costs, delays, limits), tails = tailsOf(stages, count, costs, delays, limits);
  const lengths = [costs.forward, costs.input, costs.weight], machines = new Map();
  let bound = 0;
  for (let op = 0; op < 3; op++) {
    for (let stage = 0; stage < stages; stage++) {
      for (let n = 0; n < count; n++) {
        const job = [heads[op][stage][n], lengths[op], tails[op][stage][count - 1 - n]];
        bound = Math.max(bound, job[0] + job[1] + job[2]);
        if (!machines.has(placement[stage])) machines.set(placement[stage], []);
        machines.get(placement[stage]).push(job);
      }
    }
  }
  // messages are no machine without a bandwidth, but what they carry on is late by them
  if (stages * count > FEW) return bound;
  for (const jobs of machines.values()) bound = Math.max(bound, preemptive(jobs));
  return bound;
}

const grid = (stages) => range(stages).map(() => []);
const after = (times, length) => (times.length ? times[times.length - 1] + length : 0);

function headsOf(stages, count, { forward, input, weight }, delays, limits) {
  const forwards = grid(stages), inputs = grid(stages), weights = grid(stages);
  for (let n = 0; n < count; n++) {
    let arrival = 0;
    for (let s = 0; s < stages; s++) {
      let start = Math.max(arrival, after(forwards[s], forward));
      for (const { most, stage, longer, weight: byWeight } of limits[s]) {
        if (n >= most) start = Math.max(start, (byWeight ? weights[stage][n - most] + weight : inputs[stage][n - most] + input) + longer);
      }
      forwards[s].push(start);
      arrival = start + forward + delays[s];
    }
    arrival = forwards[stages - 1][n] + forward;
    for (let s = stages - 1; s >= 0; s--) {
      const start = Math.max(arrival, after(inputs[s], input));
      inputs[s].push(start);
      weights[s].push(Math.max(start + input, after(weights[s], weight)));
      if (s) arrival = start + input + delays[s - 1];
    }
  }
  return [forwards, inputs, weights];
}

function tailsOf(stages, count, { forward, input, weight }, delays, limits) {
  const mirrored = range(stages).map(() => []);
  limits.forEach((found, source) => { for (const { most, stage, longer, weight: byWeight } of found) mirrored[stage].push([source, most, longer, byWeight]); });
  const forwards = grid(stages), inputs = grid(stages), weights = grid(stages);
  for (let n = 0; n < count; n++) {
    let rest = 0;
    for (let s = 0; s < stages; s++) {
      let done = after(weights[s], weight), tail = Math.max(rest, after(inputs[s], input));
      for (const [source, most, longer, byWeight] of mirrored[s]) {
        if (n < most) continue;
        const before = forwards[source][n - most] + forward + longer;
        if (byWeight) done = Math.max(done, before); else tail = Math.max(tail, before);
      }
      weights[s].push(done);
      inputs[s].push(Math.max(tail, done + weight));
      if (s + 1 < stages) rest = inputs[s][n] + input + delays[s];
    }
    rest = inputs[stages - 1][n] + input;
    for (let s = stages - 1; s >= 0; s--) {
      const tail = Math.max(rest, after(forwards[s], forward));
      forwards[s].push(tail);
      if (s) rest = tail + forward + delays[s - 1];
    }
  }
  return [forwards, inputs, weights];
}

// The end of the order that always runs the ready job with the longest tail, tails included.
function preemptive(jobs) {
  jobs.sort((one, other) => one[0] - other[0] || one[1] - other[1] || one[2] - other[2]);
  const ready = new Queue([]); // of [minus the tail, what is left]
  let now = 0, end = 0, place = 0;
  while (place < jobs.length || ready.items.length) {
    if (!ready.items.length) now = Math.max(now, jobs[place][0]);
    for (; place < jobs.length && jobs[place][0] <= now; place++) ready.push([-jobs[place][2], jobs[place][1]]);
    const first = ready.items[0], until = place < jobs.length ? jobs[place][0] : Infinity;
    if (now + first[1] <= until) {
      now += first[1];
      end = Math.max(end, now - first[0]);
      ready.pop();
    } else {
      first[1] -= until - now;
      now = until;
    }
  }
  return end;
}
