// Activations in flight over time, a strip for each rank, in the same window and order as the timeline.

class Memory {
  constructor(canvas, view) {
    this.canvas = canvas;
    this.view = view;
  }

  draw(gantt) {
    const total = RUNS.reduce((sum, run) => sum + run.rows.length, 0);
    const height = Math.max(12, Math.min(40, Math.floor(480 / total)));
    const places = arrange(this.view.order, height, 22);
    const { pen, width } = fitCanvas(this.canvas, places.height);
    const most = Math.max(1, ...RUNS.map((run) => Math.max(0, ...run.rows.map((row) => row.peak))));
    pen.textBaseline = "middle";
    pen.font = "600 13px system-ui, sans-serif";
    pen.fillStyle = ink("text");
    for (const head of places.heads) pen.fillText(head.text, 0, head.y + 11, width);
    pen.font = "12px system-ui, sans-serif";
    for (const { row, y } of places.rows) {
      const narrow = gantt.gutter < 60;
      pen.fillStyle = ink("soft");
      const name = narrow ? `${SEVERAL ? row.run.letter : ""}${row.rank}` : `${SEVERAL ? row.run.letter + " " : ""}rank ${row.rank}`;
      if (height >= 12) pen.fillText(name, 0, y + height / 2, gantt.gutter - 6);
      this.row(pen, gantt, row, y, height - 4, most);
    }
  }

  row(pen, gantt, row, y, height, most) {
    pen.fillStyle = ink("idle");
    pen.fillRect(gantt.gutter, y, gantt.plot, height);
    const { high, low } = this.levels(gantt, row);
    pen.fillStyle = ink("memory");
    for (const [levels, alpha] of [[high, 0.4], [low, 0.75]]) {
      pen.globalAlpha = alpha;
      pen.beginPath();
      pen.moveTo(gantt.gutter, y + height);
      for (let pixel = 0; pixel < levels.length; pixel++) {
        const top = y + height - (levels[pixel] / most) * height;
        pen.lineTo(gantt.gutter + pixel, top);
        pen.lineTo(gantt.gutter + pixel + 1, top);
      }
      pen.lineTo(gantt.gutter + levels.length, y + height);
      pen.fill();
    }
    pen.globalAlpha = 1;
    if (height >= 12) {
      const text = `peak ${row.peak}`;
      pen.fillStyle = ink("text");
      pen.font = "11px system-ui, sans-serif";
      const x = gantt.gutter + gantt.plot - pen.measureText(text).width - 4;
      pen.strokeStyle = ink("ground");
      pen.lineWidth = 3;
      pen.strokeText(text, x, y + 8);
      pen.lineWidth = 1;
      pen.fillText(text, x, y + 8);
      pen.font = "12px system-ui, sans-serif";
    }
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
