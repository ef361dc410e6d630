// The hand on the timeline: wheel, drag, keys, buttons, and the tooltip.
(() => {
  "use strict";

  const KEYS = {
    w: "zoom-in", s: "zoom-out", a: "left", d: "right", "+": "zoom-in", "=": "zoom-in", "-": "zoom-out", ArrowLeft: "left", ArrowRight: "right",
    ArrowUp: "up", ArrowDown: "down", Home: "fit", 0: "fit", "[": "previous", "]": "next", Enter: "enter", Escape: "clear",
  };

  function describe(timeline, { row, index }) {
    const { start, duration, name, kind, fill, head } = row.lane.data, { MERGED, duration: words } = window.trine.columns;
    const place = `rank ${row.rank}, ${row.lane.label}`;
    if (name[index] === MERGED) {
      return ["short spans", `mostly ${head.kinds[kind[index]]}, ${Math.round(fill[index] / 2.54)} % busy over ${words(duration[index])}`, place, "zoom in to see each"];
    }
    return [head.names[name[index]], head.kinds[kind[index]].replace("phase:", "phase "), words(duration[index]), `at ${words(start[index])}`, place];
  }

  function tooltip(timeline, hit, x, y) {
    const { tip, root } = timeline;
    tip.hidden = !hit;
    if (!hit) return;
    const [title, ...rest] = describe(timeline, hit);
    const head = document.createElement("strong"), body = document.createElement("span");
    head.textContent = title;
    body.textContent = rest.join(" · ");
    tip.replaceChildren(head, body);
    const left = root.offsetLeft + Math.min(x + 14, root.clientWidth - tip.offsetWidth - 8);
    const below = y + 18 + tip.offsetHeight < root.clientHeight;
    tip.style.left = `${Math.max(root.offsetLeft + 4, left)}px`;
    tip.style.top = `${root.offsetTop + (below ? y + 18 : y - tip.offsetHeight - 10)}px`;
  }

  function listen(timeline, { AXIS, GUTTER }) {
    const { root, canvas } = timeline, signal = timeline.abort.signal;
    const on = (target, kind, act, options = {}) => target.addEventListener(kind, act, { signal, ...options });
    const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    let held = null;

    on(canvas, "wheel", (event) => {
      const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        timeline.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.008), Math.max(GUTTER, place(event)[0]));
      } else if (sideways) {
        event.preventDefault();
        if (timeline.view) timeline.pan((event.deltaX || event.deltaY) / timeline.width());
      }
    }, { passive: false });

    on(canvas, "pointerdown", (event) => {
      if (event.button !== 0 || !timeline.view) return;
      const [x, y] = place(event);
      root.focus({ preventScroll: true });
      held = { x, y, view: [...timeline.view], range: event.shiftKey || (y < AXIS && x > GUTTER), moved: false };
      canvas.setPointerCapture(event.pointerId);
    });

    on(canvas, "pointermove", (event) => {
      const [x, y] = place(event);
      if (!held) { timeline.hover = timeline.hit(x, y); canvas.style.cursor = timeline.hover ? "pointer" : x > GUTTER ? "grab" : "default"; tooltip(timeline, timeline.hover, x, y); return; }
      held.moved = held.moved || Math.abs(x - held.x) > 3;
      if (!held.moved) return;
      tooltip(timeline, null);
      if (held.range) { timeline.brush = [Math.min(x, held.x), Math.max(x, held.x)]; timeline.draw(); return; }
      const step = (held.x - x) / timeline.width() * (held.view[1] - held.view[0]);
      timeline.show(held.view[0] + step, held.view[1] + step);
    });

    on(canvas, "pointerup", (event) => {
      const [x, y] = place(event), was = held;
      held = null;
      if (!was) return;
      if (was.moved && was.range && timeline.brush) {
        const [begin, end] = timeline.brush.map((edge) => timeline.time(Math.max(GUTTER, edge)));
        timeline.brush = null;
        timeline.show(begin, end);
      } else if (!was.moved) click(timeline, x, y, GUTTER);
      timeline.brush = null;
    });

    on(canvas, "pointerleave", () => { if (!held) tooltip(timeline, null); });
    on(canvas, "dblclick", (event) => { const hit = timeline.hit(...place(event)); if (hit) timeline.zoomTo(hit); });
    on(root, "scroll", () => { tooltip(timeline, null); timeline.draw(); });
    on(root, "keydown", (event) => {
      const action = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
      if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      timeline.act(action);
    });
    on(document, "click", (event) => {
      const button = event.target.closest?.("[data-timeline]");
      if (button) timeline.act(button.dataset.timeline);
    });
    const observer = new ResizeObserver(() => timeline.size());
    observer.observe(root.parentElement);
    signal.addEventListener("abort", () => observer.disconnect());
    on(window, "resize", () => timeline.size());
  }

  function click(timeline, x, y, gutter) {
    if (x < gutter) {
      const inside = y + timeline.root.scrollTop;
      const row = timeline.rows.find((r) => inside >= r.y && inside < r.y + r.height);
      if (!row?.key) return;
      if (!timeline.unfolded.delete(row.key)) timeline.unfolded.add(row.key);
      timeline.lay();
    } else timeline.select(timeline.hit(x, y));
  }

  function fillTable(target, { rows, merged }, [begin, end]) {
    if (!rows.length && !merged) {
      const none = document.createElement("p");
      none.className = "quiet";
      none.textContent = "Nothing with a name and a time is in view.";
      target.replaceChildren(none);
      return;
    }
    const words = window.trine.columns.duration;
    const element = (kind, text, name) => { const made = document.createElement(kind); if (text !== undefined) made.textContent = text; if (name) made.className = name; return made; };
    const head = element("tr"), body = element("tbody"), table = element("table");
    for (const [text, name] of [["Name", ""], ["Kind", ""], ["Calls", "number"], ["Time in view", "number"]]) { const cell = element("th", text, name); cell.scope = "col"; head.append(cell); }
    for (const row of rows.slice(0, 12)) {
      const line = element("tr");
      const name = element("td", row.name, "long-name");
      name.title = row.name;
      line.append(name, element("td", row.kind.split(":")[0]), element("td", row.calls.toLocaleString("en").replaceAll(",", "\u202f"), "number"), element("td", words(row.total), "number"));
      body.append(line);
    }
    const top = element("thead");
    top.append(head);
    table.append(top, body);
    const frame = element("div", undefined, "table-frame");
    frame.append(table);
    const parts = [`${words(end - begin)} in view`];
    if (rows.length > 12) parts.push(`the 12 longest of ${rows.length} names`);
    if (merged) parts.push(`${merged.toLocaleString("en")} cells of short spans are left out, zoom in to count them`);
    target.replaceChildren(element("p", parts.join("; ") + ".", "quiet"), frame);
  }

  function reloadLink() {
    return { type: "A", namespace: "dash_html_components", props: { children: "Newer data: reload", href: location.pathname + location.search, className: "quiet-button" } };
  }

  window.trine = Object.assign(window.trine || {}, { listen, describe, fillTable, reloadLink });
})();
