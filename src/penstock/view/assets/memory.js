// What each rank holds over time, in the same window as the timeline; of a run that is not open, the fullest rank.

class Memory {
  constructor(canvas, view) {
    this.canvas = canvas;
    this.view = view;
  }

  draw(gantt) {
    const { view } = this, height = rowHeightOf(view, 480, 12, 40), mini = 26;
    const columns = gantt.columns().map((each) => ({ ...each, places: arrange(view, height, () => mini, each.runs) }));
    const { pen } = fitCanvas(this.canvas, Math.max(20, ...columns.map(({ places }) => places.height)));
    const known = view.runs.every((run) => run.activation); // else a microbatch is as high in one run as in the other
    const size = (row) => (known ? row.run.sizeOf(row) : 1) / Math.max(1, row.each);
    const most = Math.max(view.cap || 0, ...view.runs.flatMap((run) => run.rows.map((row) => row.peak * size(row)))) || 1;
    for (const { places, left } of columns) {
      pen.save();
      pen.translate(left, 0);
      drawNames(pen, view, places, height, gantt.gutter, gantt.column);
      for (const { row, y } of places.rows) this.row(pen, gantt, row, y, height - 4, most / size(row));
      for (const { run, y } of places.minis) {
        const row = run.rows.reduce((best, each) => (each.peak * size(each) > best.peak * size(best) ? each : best));
        this.row(pen, gantt, row, y, mini - 6, most / size(row), `rank ${row.rank}, `);
      }
      pen.restore();
    }
  }

  row(pen, gantt, row, y, height, most, name = "") {
    pen.fillStyle = ink("idle");
    pen.fillRect(gantt.gutter, y, gantt.plot, height);
    const { high, low } = this.levels(gantt, row);
    pen.fillStyle = ink("memory");
    for (const [levels, alpha] of [[high, 0.4], [low, 0.75]]) {
      pen.globalAlpha = alpha;
      for (let first = 0, pixel = 1; pixel <= levels.length; pixel++) {
        if (pixel < levels.length && levels[pixel] === levels[first]) continue;
        const size = (levels[first] / most) * height;
        if (size) pen.fillRect(gantt.gutter + first, y + height - size, pixel - first, size);
        first = pixel;
      }
    }
    pen.globalAlpha = 1;
    if (this.view.cap) {
      const at = y + height - (this.view.cap * row.each * height) / most;
      pen.fillStyle = ink(row.held(row.peak) > this.view.cap * (1 + 1e-9) ? "fault" : "soft");
      for (let x = gantt.gutter; x < gantt.gutter + gantt.plot; x += 8) pen.fillRect(x, at - 0.5, 4, 1);
    }
    if (height < 8) return;
    const text = `${name}peak ${row.run.memory(row.held(row.peak) * row.run.sizeOf(row))}`;
    pen.font = `11px ${FONT}`;
    const x = gantt.gutter + gantt.plot - pen.measureText(text).width - 4;
    pen.strokeStyle = ink("ground");
    pen.lineWidth = 3;
    pen.strokeText(text, x, y + Math.min(8, height / 2));
    pen.lineWidth = 1;
    pen.fillStyle = ink("text");
    pen.fillText(text, x, y + Math.min(8, height / 2));
  }

  // The most and the least that is held within each pixel.
  levels(gantt, row) {
    const width = Math.floor(gantt.plot);
    const high = new Int32Array(width), low = new Int32Array(width);
    const { slope, shift } = gantt.pixels(row.run);
    const { times, levels } = row;
    let next = 0, level = 0;
    for (let pixel = 0; pixel < width; pixel++) {
      const until = (pixel + 1 - shift) / slope, from = (pixel - shift) / slope;
      while (next < times.length && times[next] <= from) level = levels[next++];
      let most = level, least = level;
      while (next < times.length && times[next] < until) {
        level = levels[next++];
        most = Math.max(most, level); least = Math.min(least, level);
      }
      high[pixel] = most; low[pixel] = least;
    }
    return { high, low };
  }
}
