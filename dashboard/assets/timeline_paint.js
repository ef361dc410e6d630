// How the timeline is painted: colours by kind, lanes, grid and labels.
(() => {
  "use strict";

  const parse = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const mix = (a, b, share) => `rgb(${parse(a).map((value, i) => Math.round(value * share + parse(b)[i] * (1 - share))).join(",")})`;
  const bright = (colour) => {
    const [r, g, b] = colour.startsWith("#") ? parse(colour) : colour.match(/\d+/g).map(Number);
    return 0.299 * r + 0.587 * g + 0.114 * b > 140;
  };

  function palette(root) {
    const style = getComputedStyle(root), value = (name) => style.getPropertyValue(`--${name}`).trim();
    const [computation, communication, memory, idle, text, quiet, line, surface, ground, backward, weight] =
      ["computation", "communication", "memory", "idle", "text", "quiet", "line", "surface", "ground", "backward", "weight"].map(value);
    const kinds = {
      compute: computation, communication, copy: memory, operator: mix(computation, surface, 0.38), runtime: mix(idle, surface, 0.75),
      annotation: mix(idle, surface, 0.4), python: mix(idle, surface, 0.3), loader: mix(idle, surface, 0.9), sync: mix(quiet, surface, 0.75),
      collector: mix(quiet, surface, 0.9), step: mix(idle, surface, 0.3), "phase:data": mix(idle, surface, 0.8), "phase:copy": memory,
      "phase:forward": computation, "phase:backward": mix(computation, surface, 0.72), "phase:optimizer": mix(computation, surface, 0.45),
      "phase:exposed_communication": communication, "phase:other": mix(idle, surface, 0.5),
      "micro-batch:forward": computation, "micro-batch:backward": backward, "micro-batch:backward_input": backward, "micro-batch:backward_weight": weight,
    };
    const inks = Object.fromEntries(Object.entries(kinds).map(([kind, colour]) => [kind, bright(colour) ? "#14171A" : "#FFFFFF"]));
    return { kinds, inks, text, quiet, line, surface, ground, computation, font: style.fontFamily };
  }

  // Round steps of time, about a hundred pixels apart.
  function ticks([begin, end], width) {
    const rough = (end - begin) / Math.max(2, width / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
    const found = [];
    for (let time = Math.ceil(begin / step) * step; time <= end; time += step) found.push(time);
    const [unit, scale] = step >= 1e9 ? ["s", 1e9] : step >= 1e6 ? ["ms", 1e6] : step >= 1e3 ? ["µs", 1e3] : ["ns", 1];
    const digits = Math.max(0, -Math.floor(Math.log10(step / scale) + 1e-9));
    return found.map((time) => ({ time, text: `${(Math.abs(time) < step / 2 ? 0 : time / scale).toFixed(digits)} ${unit}` }));
  }

  function paintGrid(pen, timeline, ticks, width, height) {
    const { GUTTER, AXIS } = window.trine.timelineSizes, { palette, view } = timeline;
    pen.fillStyle = palette.line;
    for (const { time } of ticks) pen.fillRect(Math.round(GUTTER + (time - view[0]) / (view[1] - view[0]) * timeline.width()), AXIS, 1, height);
  }

  // Spans of a pixel or more are rectangles; shorter ones add up in their pixel column, whose strength is how full it is.
  function paintLane(pen, timeline, row, y, width) {
    const { GUTTER } = window.trine.timelineSizes, { palette, view } = timeline, { lane } = row, { start, duration, kind, fill, name, head } = lane.data;
    const scale = timeline.width() / (view[1] - view[0]), top = y + 1.5, height = row.height - 3;
    const [first, stop] = timeline.columns.rows(lane, view[0], view[1]);
    const sums = new Float64Array(head.kinds.length), labels = [];
    let column = -1, used = 0, count = 0;
    const flush = () => {
      if (column < 0) return;
      let most = 0, total = 0;
      for (let k = 0; k < sums.length; k++) { total += sums[k]; if (sums[k] > sums[most]) most = k; }
      pen.globalAlpha = 0.22 + 0.78 * Math.min(1, total);
      pen.fillStyle = palette.kinds[head.kinds[most]];
      pen.fillRect(column, top, 1, height);
      sums.fill(0);
      column = -1;
      used++;
    };
    for (let i = first; i < stop; i++) {
      const x = GUTTER + (start[i] - view[0]) * scale, length = duration[i] * scale, filled = fill[i] / 255;
      if (length < 1) {
        const at = x | 0;
        if (at !== column) { flush(); column = at; }
        sums[kind[i]] += Math.max(length * filled, 0.02);
        continue;
      }
      const left = Math.max(x, GUTTER - 2), right = Math.min(x + length, width + 2);
      if (right <= left) continue;
      pen.globalAlpha = fill[i] === 255 ? 1 : 0.22 + 0.78 * filled;
      pen.fillStyle = palette.kinds[head.kinds[kind[i]]];
      // A hair of ground between neighbours, once there is room for it.
      pen.fillRect(left, top, right - left - (length > 3 ? 0.75 : 0), height);
      count++;
      if (right - left > 34 && fill[i] === 255 && labels.length < 800) labels.push(i, left, right);
    }
    flush();
    pen.globalAlpha = 1;
    write(pen, timeline, labels, lane, top, height);
    const chosen = timeline.selection;
    if (chosen?.row.lane === lane) outline(pen, timeline, lane, chosen.index, scale, top, height);
    return count + used;
  }

  function write(pen, timeline, labels, lane, top, height) {
    const { palette } = timeline, { kind, name, head } = lane.data;
    pen.font = `${height < 14 ? 10 : 11}px ${palette.font}`;
    pen.textBaseline = "middle";
    for (let at = 0; at < labels.length; at += 3) {
      const index = labels[at], left = Math.max(labels[at + 1], window.trine.timelineSizes.GUTTER), room = labels[at + 2] - left - 8;
      const letters = Math.floor(room / 5.6), text = head.names[name[index]] || "";
      if (letters < 3) continue;
      pen.fillStyle = palette.inks[head.kinds[kind[index]]];
      pen.fillText(text.length > letters ? text.slice(0, letters - 1) + "…" : text, left + 4, top + height / 2 + 0.5, room + 2);
    }
  }

  function outline(pen, timeline, lane, index, scale, top, height) {
    const { GUTTER } = window.trine.timelineSizes, { start, duration } = lane.data;
    const x = GUTTER + (start[index] - timeline.view[0]) * scale;
    pen.strokeStyle = timeline.palette.text;
    pen.lineWidth = 2;
    pen.strokeRect(x - 1, top - 0.5, Math.max(3, duration[index] * scale + 1), height + 1);
  }

  function paintFrame(pen, timeline, ticks, top, width, height) {
    const { GUTTER, AXIS } = window.trine.timelineSizes, { palette, view } = timeline;
    pen.fillStyle = palette.surface;
    pen.fillRect(0, 0, GUTTER, height);
    for (const row of timeline.rows) {
      const y = row.y - top;
      if (y + row.height < AXIS || y > height) continue;
      if (row.type === "rank") {
        pen.fillStyle = palette.ground;
        pen.fillRect(0, y, width, row.height - 2);
        label(pen, row.text, 10, y + row.height / 2 - 1, `600 12px ${palette.font}`, palette.text, GUTTER - 12);
        if (row.quiet) label(pen, row.quiet, GUTTER + 6, y + row.height / 2 - 1, `12px ${palette.font}`, palette.quiet, width - GUTTER);
      } else if (row.type === "note") {
        label(pen, row.text, GUTTER + 6, y + row.height / 2, `12px ${palette.font}`, palette.quiet, width - GUTTER - 12);
      } else if (row.text) label(pen, row.text, 10, y + row.height / 2, `12px ${palette.font}`, row.lane.group === "host" ? palette.quiet : palette.text, GUTTER - 14);
    }
    pen.fillStyle = palette.surface;
    pen.fillRect(0, 0, width, AXIS);
    pen.fillStyle = palette.line;
    pen.fillRect(0, AXIS - 1, width, 1);
    for (const { time, text } of ticks) {
      const x = GUTTER + (time - view[0]) / (view[1] - view[0]) * timeline.width();
      if (x >= GUTTER - 1 && x < width - 30) label(pen, text, x + 4, AXIS / 2, `11px ${palette.font}`, palette.quiet, 100);
    }
    if (timeline.brush) {
      pen.globalAlpha = 0.18;
      pen.fillStyle = palette.computation;
      pen.fillRect(timeline.brush[0], 0, timeline.brush[1] - timeline.brush[0], height);
      pen.globalAlpha = 1;
    }
  }

  function label(pen, text, x, y, font, colour, room) {
    pen.font = font;
    pen.fillStyle = colour;
    pen.textBaseline = "middle";
    pen.fillText(text, x, y, room);
  }

  window.trine = Object.assign(window.trine || {}, { palette, ticks, paintGrid, paintLane, paintFrame });
})();
