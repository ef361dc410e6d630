// The address bar is the state. Small clientside functions that read it, change it, and set the theme.
(() => {
  "use strict";

  // Readable addresses: slashes, colons and commas need no escape in a query.
  const text = (parameters) => {
    const query = parameters.toString().replace(/%2F/gi, "/").replace(/%3A/gi, ":").replace(/%2C/gi, ",").replace(/\+/g, "%20");
    return query ? "?" + query : "";
  };

  const change = (edit) => {
    const parameters = new URLSearchParams(location.search);
    const before = text(parameters);
    edit(parameters);
    const after = text(parameters);
    return after === before ? window.dash_clientside.no_update : after;
  };

  const put = (parameters, name, value, normal) => {
    if (value === null || value === undefined || value === "" || value === normal) parameters.delete(name);
    else parameters.set(name, value);
  };

  const paint = (theme) => {
    document.documentElement.dataset.theme = theme;
    // AG Grid does not follow Mantine's scheme by itself.
    document.body.dataset.agThemeMode = theme;
  };

  // Before Dash starts: without a theme in the address, the one chosen last, else the system's.
  const start = new URLSearchParams(location.search);
  if (!start.has("theme")) {
    let saved = null;
    try { saved = localStorage.getItem("trine-theme"); } catch { /* storage may be forbidden: the system decides */ }
    if (saved ? saved === "dark" : matchMedia("(prefers-color-scheme: dark)").matches) {
      start.set("theme", "dark");
      history.replaceState(history.state, "", location.pathname + text(start));
    }
  }
  document.documentElement.dataset.theme = start.get("theme") === "dark" ? "dark" : "light";

  window.trine = Object.assign(window.trine || {}, { text });

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    trine: {
      look(search) {
        const theme = new URLSearchParams(search || "").get("theme") === "dark" ? "dark" : "light";
        paint(theme);
        return theme;
      },
      otherTheme(clicks) {
        if (!clicks) return window.dash_clientside.no_update;
        return change((parameters) => {
          const theme = parameters.get("theme") === "dark" ? "light" : "dark";
          try { localStorage.setItem("trine-theme", theme); } catch { /* then it lives in the address alone */ }
          put(parameters, "theme", theme, "light");
        });
      },
      set_steps(value) {
        // A field that is being emptied is not a choice yet.
        if (!value) return window.dash_clientside.no_update;
        if (!/^(complete|all|\d+:\d*|:\d+)$/.test(value.trim())) return window.dash_clientside.no_update;
        return change((parameters) => put(parameters, "steps", value.trim(), "complete"));
      },
      set_rank(values) {
        return change((parameters) => put(parameters, "rank", (values || []).map(Number).sort((a, b) => a - b).join(",")));
      },
      set_against(value) {
        return change((parameters) => put(parameters, "against", value));
      },
      timeline(spec) {
        window.trine.timeline.mount(spec);
        return window.dash_clientside.no_update;
      },
      newer(token, path) {
        return path === "/timeline" ? window.trine.timeline.newer(token) : "";
      },
    },
  });
})();
