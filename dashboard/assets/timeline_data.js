// Columns of the timeline: decoding the binary answer, searching a lane, summing what is in view. No drawing here.
(() => {
  "use strict";

  const MERGED = 0xffffffff;

  // uint32 length, JSON header padded to 8, float64 start, float64 duration, uint32 name, uint8 kind, uint8 fill.
  function decode(buffer) {
    const length = new DataView(buffer).getUint32(0, true);
    const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    const count = head.lanes.reduce((sum, lane) => sum + lane.count, 0);
    let at = 4 + length;
    const take = (type, bytes) => { const column = new type(buffer, at, count); at += bytes * count; return column; };
    const data = { head, count };
    data.start = take(Float64Array, 8);
    data.duration = take(Float64Array, 8);
    data.name = take(Uint32Array, 4);
    data.kind = take(Uint8Array, 1);
    data.fill = take(Uint8Array, 1);
    data.reach = new Float64Array(count);
    let first = 0;
    data.lanes = head.lanes.map((lane) => {
      const own = { ...lane, first, last: first + lane.count, data };
      let furthest = -Infinity;
      for (let i = own.first; i < own.last; i++) data.reach[i] = furthest = Math.max(furthest, data.start[i] + data.duration[i]);
      first = own.last;
      return own;
    });
    return data;
  }

  // First row in [low, high) whose value is at least x.
  function lower(column, low, high, x) {
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (column[middle] < x) low = middle + 1; else high = middle;
    }
    return low;
  }

  // Rows of a lane that may touch the range.
  function rows(lane, begin, end) {
    const first = lower(lane.data.reach, lane.first, lane.last, begin);
    return [first, Math.max(first, lower(lane.data.start, lane.first, lane.last, end))];
  }

  // The row under a time, or the nearest within a tolerance; -1 where there is none.
  function at(lane, time, tolerance) {
    const { start, duration } = lane.data;
    const [first, stop] = rows(lane, time - tolerance, time + tolerance);
    let best = -1, distance = Infinity;
    for (let i = stop - 1, looked = 0; i >= first && looked < 4000; i--, looked++) {
      const away = time < start[i] ? start[i] - time : Math.max(0, time - start[i] - duration[i]);
      if (away < distance) { distance = away; best = i; if (away === 0) break; }
    }
    return distance <= tolerance ? best : -1;
  }

  // Of each thread the outermost lane that holds mostly operators: steps and Python frames stand above it.
  function operators(lanes) {
    const found = new Map();
    for (const lane of lanes) {
      const key = `${lane.data.head.rank} ${lane.label}`;
      if (lane.group !== "host" || found.has(key)) continue;
      const wanted = lane.data.head.kinds.indexOf("operator");
      let count = 0;
      for (let i = lane.first; i < lane.last; i++) count += lane.data.kind[i] === wanted;
      if (2 * count > lane.count) found.set(key, lane);
    }
    return [...found.values()];
  }

  // Time by name over some lanes in the range: [{name, kind, calls, total}], the longest first, and how many merged.
  function totals(lanes, begin, end) {
    const sums = new Map();
    let merged = 0;
    for (const lane of lanes) {
      const { start, duration, name, kind, head } = lane.data;
      const [first, stop] = rows(lane, begin, end);
      for (let i = first; i < stop; i++) {
        const inside = Math.min(end, start[i] + duration[i]) - Math.max(begin, start[i]);
        if (inside < 0) continue;
        if (name[i] === MERGED) { merged++; continue; }
        // Micro-batches are many; what they do are few.
        const key = lane.group === "microbatches" ? head.kinds[kind[i]].split(":")[1].replaceAll("_", " of the ") : head.names[name[i]];
        const sum = sums.get(key);
        if (sum) { sum.calls++; sum.total += inside; } else sums.set(key, { name: key, kind: head.kinds[kind[i]], calls: 1, total: inside });
      }
    }
    return { rows: [...sums.values()].sort((a, b) => b.total - a.total), merged };
  }

  function duration(ns) {
    const size = Math.abs(ns);
    const digits = (value) => (value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2));
    for (const [unit, scale] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
      if (size >= scale * 0.9995) return `${ns < 0 ? "−" : ""}${digits(size / scale)} ${unit}`;
    }
    return `${ns < 0 ? "−" : ""}${size.toFixed(0)} ns`;
  }

  window.trine = Object.assign(window.trine || {}, { columns: { MERGED, decode, lower, rows, at, operators, totals, duration } });
})();
