// The timeline: lanes of spans on one canvas. Panning and zooming draw what is already here; ranks too large for the
// browser are asked for again, merged to the resolution of the screen.
(() => {
  "use strict";

  const AXIS = 26, GUTTER = 172, RANK = 24, SHORTEST_NS = 20;
  const HEIGHT = { steps: 17, phases: 17, microbatches: 21, collectives: 19, device: 23, host: 15 };
  const FOLDED = 3;
  let now = null;

  class Timeline {
    constructor(root, spec) {
      Object.assign(this, { root, spec, ranks: new Map(), unfolded: new Set(), rows: [], failed: new Map(), waiting: new Map() });
      this.columns = window.trine.columns;
      this.view = spec.begin !== null && spec.end !== null ? [spec.begin, spec.end] : null;
      this.abort = new AbortController();
      this.canvas = document.createElement("canvas");
      this.space = document.createElement("div");
      this.tip = document.createElement("div");
      this.tip.className = "timeline-tip";
      this.tip.hidden = true;
      root.replaceChildren(this.canvas, this.space);
      root.parentElement.querySelectorAll(".timeline-tip").forEach((old) => old.remove());
      root.parentElement.append(this.tip);
      this.palette = window.trine.palette(root);
      this.listen();
      this.load();
    }

    // --- data ------------------------------------------------------------------------------------------------------

    async load() {
      // The lowest rank first, so that something stands there soon; the others three at a time.
      const queue = [...this.spec.ranks];
      const work = async () => { while (queue.length) await this.fetch(queue.shift()); };
      await this.fetch(queue.shift());
      await Promise.all([work(), work(), work()]);
      this.loaded = true;
      this.draw();
    }

    async fetch(rank, range = null) {
      const query = new URLSearchParams({ run: this.spec.run, rank, limit: this.spec.limit, columns: Math.max(600, 3 * this.width()) });
      if (range) { query.set("from", range[0]); query.set("to", range[1]); }
      this.waiting.set(rank, (this.waiting.get(rank) || 0) + 1);
      this.say();
      try {
        for (;;) {
          const answer = await fetch("/data/timeline?" + query, { signal: this.abort.signal });
          if (answer.status === 202) { await new Promise((done) => setTimeout(done, 400)); continue; }
          if (!answer.ok) throw new Error((await answer.json()).error);
          this.take(rank, this.columns.decode(await answer.arrayBuffer()));
          break;
        }
      } catch (error) {
        if (error.name === "AbortError") return;
        this.failed.set(rank, error.message);
      } finally {
        this.waiting.set(rank, this.waiting.get(rank) - 1);
        this.say();
      }
    }

    take(rank, data) {
      this.ranks.set(rank, data);
      this.failed.delete(rank);
      const all = [...this.ranks.values()].map((known) => known.head);
      this.extent = [Math.min(...all.map((h) => h.begin)), Math.max(...all.map((h) => h.end))];
      if (this.extent[1] <= this.extent[0]) this.extent[1] = this.extent[0] + 1000;
      if (!this.view || this.fitted) this.fit();
      this.lay();
      this.changed();
    }

    // Ranks whose columns are too coarse for the view, or end inside it, are asked for again.
    refine() {
      const [begin, end] = this.view, span = end - begin;
      for (const [rank, { head }] of this.ranks) {
        if (head.whole) continue;
        const outside = (begin < head.from && head.from > head.begin) || (end > head.to && head.to < head.end);
        const coarse = head.merged > 0 && span < 0.55 * (head.to - head.from) / 3;
        if (outside || coarse) this.fetch(rank, [begin - span, end + span]);
      }
    }

    // --- layout ----------------------------------------------------------------------------------------------------

    lay() {
      this.rows = [];
      let y = AXIS;
      const push = (row, height) => { this.rows.push({ ...row, y, height }); y += height; };
      for (const rank of this.spec.ranks) {
        const data = this.ranks.get(rank);
        if (this.spec.ranks.length > 1 || data?.head.host) push({ type: "rank", rank, text: `rank ${rank}`, quiet: data?.head.host || "" }, RANK);
        if (this.failed.has(rank)) push({ type: "note", text: this.failed.get(rank) }, RANK);
        if (!data) continue;
        const deepest = new Map();
        for (const lane of data.lanes) deepest.set(lane.label, Math.max(deepest.get(lane.label) || 0, lane.depth));
        for (const lane of data.lanes) {
          const key = `${rank} ${lane.label}`, foldable = lane.group === "host" && deepest.get(lane.label) >= FOLDED;
          if (foldable && lane.depth >= FOLDED && !this.unfolded.has(key)) continue;
          if (lane.depth === 0 && lane.group === "host") y += 4;
          const sign = foldable ? (this.unfolded.has(key) ? "▾ " : "▸ ") : "";
          push({ type: "lane", rank, lane, key: foldable ? key : null, text: lane.depth ? "" : sign + lane.label }, HEIGHT[lane.group]);
        }
        if (!data.lanes.length) push({ type: "note", text: "this rank has no spans with a time" }, RANK);
        for (const note of data.head.notes) push({ type: "note", text: note }, RANK);
        y += 8;
      }
      this.total = y + 6;
      this.size();
    }

    width() { return Math.max(50, this.root.clientWidth - GUTTER); }

    size() {
      const room = Math.max(140, Math.min(this.total || 140, window.innerHeight - 250));
      this.root.style.height = `${room}px`;
      const ratio = window.devicePixelRatio || 1, width = this.root.clientWidth;
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(room * ratio);
      Object.assign(this.canvas.style, { width: `${width}px`, height: `${room}px`, marginBottom: `-${room}px` });
      this.space.style.height = `${this.total || 0}px`;
      this.draw();
    }

    // --- view ------------------------------------------------------------------------------------------------------

    fit() {
      const margin = 0.01 * (this.extent[1] - this.extent[0]);
      this.fitted = true;
      this.view = [this.extent[0] - margin, this.extent[1] + margin];
    }

    show(begin, end) {
      if (!this.extent) return;
      const room = 0.25 * (this.extent[1] - this.extent[0]);
      const span = Math.min(Math.max(end - begin, SHORTEST_NS), this.extent[1] - this.extent[0] + 2 * room);
      const centre = (begin + end) / 2;
      begin = Math.min(Math.max(centre - span / 2, this.extent[0] - room), this.extent[1] + room - span);
      this.fitted = false;
      this.view = [begin, begin + span];
      this.changed();
    }

    zoom(factor, x = null) {
      if (!this.view) return;
      const [begin, end] = this.view, at = x === null ? (begin + end) / 2 : this.time(x);
      this.show(at - (at - begin) * factor, at + (end - at) * factor);
    }

    pan(share) {
      const step = share * (this.view[1] - this.view[0]);
      this.show(this.view[0] + step, this.view[1] + step);
    }

    time(x) { return this.view[0] + (x - GUTTER) / this.width() * (this.view[1] - this.view[0]); }

    changed() {
      this.draw();
      clearTimeout(this.settling);
      this.settling = setTimeout(() => { this.settled(); }, 160);
    }

    settled() {
      if (!this.view || !this.extent) return;
      this.refine();
      this.table();
      const query = new URLSearchParams(location.search);
      if (location.pathname !== "/timeline") return;
      if (this.fitted) { query.delete("from"); query.delete("to"); } else {
        query.set("from", this.view[0].toFixed(0));
        query.set("to", Math.max(this.view[1], this.view[0] + 1).toFixed(0));
      }
      history.replaceState(history.state, "", location.pathname + window.trine.text(query));
      const link = document.getElementById("timeline-download");
      if (link) link.href = "/data/trace.json?" + new URLSearchParams({ run: this.spec.run, rank: this.spec.ranks.join(","), from: this.view[0], to: this.view[1] });
    }

    // --- drawing ---------------------------------------------------------------------------------------------------

    draw() {
      if (this.frame) return;
      this.frame = requestAnimationFrame(() => { this.frame = null; this.paint(); });
    }

    paint() {
      const began = performance.now(), pen = this.canvas.getContext("2d"), ratio = window.devicePixelRatio || 1;
      const width = this.canvas.width / ratio, height = this.canvas.height / ratio, top = this.root.scrollTop;
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, width, height);
      let rectangles = 0;
      if (this.view) {
        // An axis over nothing would look like a measurement.
        const ticks = [...this.ranks.values()].some(({ head }) => head.spans > 0) ? window.trine.ticks(this.view, this.width()) : [];
        window.trine.paintGrid(pen, this, ticks, width, height);
        for (const row of this.rows) {
          const y = row.y - top;
          if (y + row.height < AXIS || y > height) continue;
          if (row.type === "lane") rectangles += window.trine.paintLane(pen, this, row, y, width);
        }
        window.trine.paintFrame(pen, this, ticks, top, width, height);
      }
      this.statistics = { milliseconds: performance.now() - began, rectangles };
    }

    say() {
      const status = document.getElementById("timeline-status");
      if (!status) return;
      const busy = [...this.waiting].filter(([, count]) => count > 0).map(([rank]) => rank);
      const spans = [...this.ranks.values()].reduce((sum, { head }) => sum + head.spans, 0);
      const merged = [...this.ranks.values()].some(({ head }) => head.merged > 0);
      const words = [`${spans.toLocaleString("en")} spans`];
      if (merged) words.push("short ones merged, zoom in to see each");
      if (busy.length) words.push(`reading rank ${busy.join(", ")}…`);
      status.textContent = words.join(", ");
      this.root.dataset.state = busy.length ? "reading" : "ready";
    }

    table() {
      const target = document.getElementById("timeline-table");
      if (!target) return;
      const lanes = [...this.ranks.values()].flatMap(({ lanes }) => lanes);
      let chosen = lanes.filter((lane) => lane.group === "device" || lane.group === "collectives");
      if (!chosen.some((lane) => lane.group === "device")) chosen = chosen.concat(this.columns.operators(lanes));
      if (!chosen.length) chosen = lanes.filter((lane) => lane.group === "microbatches");
      if (!chosen.length) chosen = lanes.filter((lane) => lane.group === "phases");
      window.trine.fillTable(target, this.columns.totals(chosen, ...this.view), this.view);
    }

    // --- selection -------------------------------------------------------------------------------------------------

    hit(x, y) {
      if (x < GUTTER || y < AXIS || !this.view) return null;
      const inside = y + this.root.scrollTop;
      const row = this.rows.find((r) => inside >= r.y && inside < r.y + r.height);
      if (row?.type !== "lane") return null;
      const tolerance = 2.5 / this.width() * (this.view[1] - this.view[0]);
      const index = this.columns.at(row.lane, this.time(x), tolerance);
      return index < 0 ? null : { row, index };
    }

    select(hit) {
      this.selection = hit;
      const target = document.getElementById("timeline-selection");
      if (target) target.textContent = hit ? window.trine.describe(this, hit).join(", ") : "";
      this.draw();
    }

    // Brackets walk along a lane; up and down change it.
    walk(step) {
      const lanes = this.rows.filter((row) => row.type === "lane");
      if (!lanes.length) return;
      let { row, index } = this.selection || { row: lanes[0], index: null };
      row = lanes.find((other) => other.lane === row.lane) || lanes[0];
      const { start, duration } = row.lane.data, centre = (this.view[0] + this.view[1]) / 2;
      if (index === null) index = Math.min(this.columns.lower(start, row.lane.first, row.lane.last, this.view[0]), row.lane.last - 1);
      else index = Math.min(Math.max(index + step, row.lane.first), row.lane.last - 1);
      this.select({ row, index });
      const middle = start[index] + duration[index] / 2, half = (this.view[1] - this.view[0]) / 2;
      if (start[index] < this.view[0] || start[index] + duration[index] > this.view[1]) this.show(middle - half, middle + half);
      return centre;
    }

    change(step) {
      const lanes = this.rows.filter((row) => row.type === "lane");
      const at = this.selection ? lanes.findIndex((row) => row.lane === this.selection.row.lane) : -1;
      const row = lanes[Math.min(Math.max(at + step, 0), lanes.length - 1)];
      if (!row) return;
      const time = this.selection ? this.selection.row.lane.data.start[this.selection.index] : this.view[0];
      const index = Math.min(this.columns.lower(row.lane.data.start, row.lane.first, row.lane.last, time), row.lane.last - 1);
      this.select({ row, index });
      const y = row.y - this.root.scrollTop;
      if (y < AXIS || y + row.height > this.root.clientHeight) this.root.scrollTop = row.y - this.root.clientHeight / 2;
    }

    zoomTo(hit) {
      const { start, duration } = hit.row.lane.data, length = Math.max(duration[hit.index], SHORTEST_NS);
      this.show(start[hit.index] - 0.6 * length, start[hit.index] + 1.6 * length);
    }

    act(action) {
      const actions = {
        "zoom-in": () => this.zoom(0.6), "zoom-out": () => this.zoom(1 / 0.6), left: () => this.pan(-0.25), right: () => this.pan(0.25),
        fit: () => { this.fit(); this.changed(); }, previous: () => this.walk(-1), next: () => this.walk(1), up: () => this.change(-1),
        down: () => this.change(1), enter: () => this.selection && this.zoomTo(this.selection), clear: () => this.select(null),
      };
      if (this.extent) actions[action]?.();
    }

    listen() { window.trine.listen(this, { AXIS, GUTTER }); }

    close() {
      this.abort.abort();
      clearTimeout(this.settling);
      this.tip.remove();
    }
  }

  window.trine = Object.assign(window.trine || {}, {
    timelineSizes: { AXIS, GUTTER },
    timeline: {
      get current() { return now; },
      mount(spec) {
        now?.close();
        now = null;
        const root = document.getElementById("timeline");
        if (root && spec) now = new Timeline(root, spec);
      },
      newer(token) {
        const version = Number((token || "").split(":")[1]);
        return now && version > now.spec.version ? window.trine.reloadLink() : "";
      },
    },
  });
})();
