"use strict";
(() => {
  const { parts, whole: figures } = JSON.parse(document.getElementById("data").textContent);

  // What a value means, with the parts that it shares with others in their places.
  const meant = (value) => {
    if (value === null || typeof value !== "object") return value;
    if (Array.isArray(value)) return value.map(meant);
    if (Object.hasOwn(value, "$")) return meant(parts[value.$]);
    return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, meant(one)]));
  };
  const root = document.documentElement;
  const column = (values) => (values && values.of ? values.at.map((place) => values.of[place]) : values);

  // Rows of a data set, from its columns.
  const rows = (columns) => {
    const names = Object.keys(columns);
    const values = names.map((name) => column(columns[name]));
    return names.length === 0
      ? []
      : values[0].map((_, row) => Object.fromEntries(names.map((name, place) => [name, values[place][row]])));
  };

  // What a mark says, as text and nothing else.
  const tip = document.createElement("dl");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);
  const told = (value) => Object.entries(value).filter(([, text]) => text !== "" && text !== "null");
  const showTip = (_handler, event, _item, value) => {
    tip.hidden = value === null || value === undefined || typeof value !== "object";
    if (tip.hidden) return;
    tip.replaceChildren(...told(value).flatMap(([name, text]) => {
      const term = document.createElement("dt");
      const said = document.createElement("dd");
      term.textContent = name;
      said.textContent = String(text);
      return [term, said];
    }));
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - width - 8))}px`;
    tip.style.top = `${event.clientY + 16 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 16}px`;
  };
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

  const chosen = (id) => Number(document.querySelector(`select[data-choice="${id}"]`)?.value ?? 0);
  const chartOf = (id) => {
    const charts = Object.hasOwn(figures[id], "$") ? parts[figures[id].$] : figures[id];
    return meant(charts[chosen(id)]);
  };
  const views = new Map();

  const draw = async (id) => {
    const place = document.getElementById(id);
    const chart = chartOf(id);
    const datasets = Object.fromEntries(Object.entries(chart.data).map(([name, columns]) => [name, rows(columns)]));
    views.get(id)?.finalize();
    const { view } = await window.drawChart(place, { ...chart.spec, params: chart.params, datasets }, {
      actions: false, ast: true, defaultStyle: false, renderer: "svg", tooltip: showTip,
    });
    views.set(id, view);
    place.querySelector("svg").setAttribute("aria-hidden", "true"); // its place says what it is, the table what is in it
    place.dataset.drawn = chart.label;
  };

  // The table behind a drawing, made when it is asked for.
  const list = (id) => {
    const behind = document.querySelector(`details[data-behind="${id}"]`);
    const chart = chartOf(id);
    const [name, titles] = chart.table;
    const fields = Object.keys(titles);
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    for (const field of fields) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = titles[field];
      head.append(cell);
    }
    const body = table.createTBody();
    for (const row of rows(chart.data[name])) {
      const line = body.insertRow();
      for (const field of fields) {
        const cell = line.insertCell();
        cell.textContent = row[field] ?? "-";
        if (typeof row[field] === "string") cell.className = "text";
      }
    }
    const box = document.createElement("div");
    box.className = "scroll";
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", behind.querySelector("summary").textContent);
    box.append(body.rows.length ? table : "Nothing to list.");
    behind.replaceChildren(behind.querySelector("summary"), box);
  };

  for (const behind of document.querySelectorAll("details[data-behind]")) {
    behind.addEventListener("toggle", () => { if (behind.open) list(behind.dataset.behind); });
  }
  for (const choice of document.querySelectorAll("select[data-choice]")) {
    const id = choice.dataset.choice;
    choice.addEventListener("change", () => {
      document.querySelector(`[data-note="${id}"]`).textContent = chartOf(id).note;
      draw(id);
      if (document.querySelector(`details[data-behind="${id}"]`).open) list(id);
    });
  }

  // Drawings are made when they come near the window, or when the browser has nothing else to do.
  const waiting = new Set();
  const start = (id) => { if (waiting.delete(id)) draw(id).catch((error) => console.error(error)); };
  const watcher = new IntersectionObserver((seen) => {
    for (const one of seen) {
      if (one.isIntersecting) {
        watcher.unobserve(one.target);
        start(one.target.id);
      }
    }
  }, { rootMargin: "400px" });
  for (const place of document.querySelectorAll("[data-figure]")) {
    waiting.add(place.id);
    watcher.observe(place);
  }
  const visible = (id) => document.getElementById(id).closest("details:not([open])") === null;
  const later = (work) => ("requestIdleCallback" in window ? requestIdleCallback(work) : setTimeout(work, 50));
  const drawNext = () => {
    const next = [...waiting].find(visible);
    if (next !== undefined) {
      start(next);
      later(drawNext);
    }
  };
  later(drawNext);
  for (const run of document.querySelectorAll("details.run")) {
    run.addEventListener("toggle", () => { if (run.open) later(drawNext); });
  }

  // A link to something inside a closed part opens it.
  const reveal = () => {
    const target = document.getElementById(location.hash.slice(1));
    for (let part = target; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
    target?.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  if (location.hash) reveal();

  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.addEventListener("click", async () => {
      const text = document.getElementById(button.dataset.copy);
      try {
        await navigator.clipboard.writeText(text.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(text);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  const theme = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    name();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  theme.hidden = false;
  name();
})();
