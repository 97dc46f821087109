// What differs between a case as Python answered it and as the studio's rules do; an empty list where nothing does.
function differences(given) {
  const found = [], same = (name, one, other) => {
    if (JSON.stringify(one) !== JSON.stringify(other)) found.push(`${name}: ${JSON.stringify(one).slice(0, 300)} is not ${JSON.stringify(other).slice(0, 300)}`);
  };
  const schedule = build(...given.build);
  same("rows", cellsOf(schedule, ""), given.rows);
  same("placement", schedule.placement, given.placement);
  same("no faults", faultsOf(schedule), []);
  const timeline = simulate(schedule, given.costs);
  same("start", [...timeline.starts], given.start);
  same("end", [...timeline.ends], given.end);
  same("makespan", timeline.makespan, given.makespan);
  same("bubble", timeline.bubble.toPrecision(12), given.bubble.toPrecision(12));
  same("peaks", timeline.peaks, given.peaks);
  same("critical path", [...criticalPath(timeline)].sort((a, b) => a - b), given.critical);
  const bound = lowerBound(schedule.placement, schedule.microbatches, given.costs, 1, given.cap ?? Infinity);
  same("bound", bound.toPrecision(12), given.bound.toPrecision(12));
  const damaged = { ...schedule, rows: readRows(given.damaged, { count: 0, skips: 0 }) };
  same("faults", faultsOf(damaged).map(({ rank, position, action, message }) => [rank, position, action, message]), given.faults);
  return found;
}
