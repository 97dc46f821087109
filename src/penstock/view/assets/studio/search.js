// The quick search: every family's order with W placed anew for the costs and the cap, warm-ups of every length, and
// rhythms on a V. The shortest that keeps within the cap is taken. `penstock search` looks much further.

const RHYTHMS = [0, null].flatMap((slack) => [0, 0.3].flatMap((patience) => [0, 0.6].flatMap((overrun) =>
  [0.7, 1].map((weightTime) => ({ slack, patience, overrun, weightTime, hopTime: 1 })))));
const MOST_SEARCHED = 20000; // microbatch-stages

// Costs of one stage, from those of a whole rank. A hop costs the same however small the stages are.
function stageCosts({ forward, input, weight, hop }, each) {
  return { forward: forward / each, input: input / each, weight: weight / each, hop };
}

const splitOrder = (row) => row.flatMap((cell) => (cell || []).filter(({ op }) => op !== W).map(({ stage, op, microbatch }) => part(stage, op === B ? I : op, microbatch)));

function* searchOrders(ranks, microbatches, costs, cap) {
  const room = (each) => Math.floor(cap * each + EPSILON);
  for (const [name, { layout, stages }] of Object.entries(FAMILIES)) {
    if (name === "forward-only") continue;
    const schedule = build(name, ranks, microbatches, stages);
    yield schedule;
    const each = stagesPerRank(name, stages), orders = schedule.rows.map(splitOrder);
    for (const overrun of [1e-9, 0.5]) {
      yield { ...schedule, rows: fillWeights(orders, schedule.placement, room(each), stageCosts(costs, each), overrun).orders.map(single), from: `${name}'s order` };
    }
  }
  const warmups = Math.min(microbatches, room(1), 2 * ranks);
  for (let most = 1; most <= warmups; most++) {
    const orders = range(ranks).map((rank) => alternate(everyMicrobatch(rank, F, microbatches), everyMicrobatch(rank, I, microbatches),
      Math.max(1, Math.min(most, 2 * (ranks - rank) - 1))));
    const placement = PLACEMENTS.block(ranks, 1);
    yield { rows: fillWeights(orders, placement, room(1), costs).orders.map(single), placement, microbatches, forwardOnly: false, from: `a warm-up of ${most} at most` };
  }
  for (const each of [2, 4]) {
    const placement = PLACEMENTS.v(ranks, each), own = stageCosts(costs, each);
    for (const rhythm of RHYTHMS) {
      const orders = follow({ placement, microbatches, costs: own, cap: cap * each, activation: 1 }, rhythm);
      if (orders) yield { rows: fillWeights(orders, placement, room(each), own).orders.map(single), placement, microbatches, forwardOnly: false, from: `a rhythm on a V of ${each} stages per rank` };
    }
  }
}

// The shortest schedule within `cap` whole-rank microbatches; null where none of them is. Costs are of a whole rank.
// `rest` is awaited between two orders, and ends the search by returning false: then there is no answer.
async function quickSearch(ranks, microbatches, costs, cap, rest) {
  if (4 * ranks * microbatches > MOST_SEARCHED) return null;
  let best = null, shortest = Infinity;
  for (const schedule of searchOrders(ranks, microbatches, costs, cap)) {
    if (!(await rest())) return undefined;
    const timeline = simulate(schedule, stageCosts(costs, schedule.placement.length / ranks));
    if (peakMemory(schedule, timeline.peaks) <= cap * (1 + EPSILON) && timeline.makespan < shortest * (1 - EPSILON)) {
      best = schedule; shortest = timeline.makespan;
    }
  }
  return best && { ...align(packed(best)), name: "quick search", from: best.from || best.name };
}
