// Draws the figures of a page from its data (figures.py says what each kind holds) with Observable Plot.
// Filters above all figures: methods, seed, client. In a figure: drag to zoom, or keys + - and arrows; 0 resets.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const DASHES = ["none", "7 3", "2 3", "9 3 2 3"]; // lines differ by more than their colour
  const state = { hidden: new Set(), seed: data.seeds?.[0], client: null };

  const colour = (place) => `var(--s${place % 8})`;
  const dash = (place) => DASHES[place % DASHES.length];
  const merit = data.merit ?? { name: "Accuracy", percent: true, higher: true }; // what methods are compared by
  const percent = (value) => `${+(100 * value).toFixed(1)}%`;
  const plain = (value) => (Math.abs(value) >= 1e4 ? value.toLocaleString("en") : String(+value.toPrecision(4)));
  const score = merit.percent ? percent : plain;
  const clientName = (client) => data.names?.[client] ?? `client ${client}`;
  const bytes = (count) => {
    const power = Math.min(4, Math.floor(Math.log10(Math.max(count, 1)) / 3));
    return `${+(count / 1000 ** power).toPrecision(3)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
  };

  function element(tag, attributes = {}, ...children) {
    const made = Object.assign(document.createElement(tag), attributes);
    made.append(...children);
    return made;
  }

  // What each kind of figure gives to Plot. `legend` lists {name, place}; `zooms` says which axes can be zoomed.

  function points(spec) {
    const shown = spec.points.filter((point) => !state.hidden.has(point.place));
    const within = (value) => Math.min(merit.percent ? 1 : Infinity, Math.max(0, value)); // as far as a score can go
    const x = (p, side) => within(p.x + side * p.x_half), y = (p, side) => within(p.y + side * p.y_half);
    const cross = { stroke: (p) => colour(p.place), strokeWidth: 1.5, strokeOpacity: 0.6, clip: true };
    return {
      zooms: "xy",
      x: { label: spec.x, tickFormat: score, grid: true, inset: 24 },
      y: { label: spec.y, tickFormat: score, grid: true, inset: 24 },
      height: 380,
      marks: [
        Plot.link(shown, { x1: (p) => x(p, -1), x2: (p) => x(p, 1), y1: "y", y2: "y", ...cross }),
        Plot.link(shown, { x1: "x", x2: "x", y1: (p) => y(p, -1), y2: (p) => y(p, 1), ...cross }),
        Plot.dot(shown, { x: "x", y: "y", r: 6, fill: (p) => colour(p.place), clip: true }),
        tip(shown, "x", "y", (p) => `${p.name}\nown ${score(p.y)}\nglobal ${score(p.x)}`),
      ],
      labels: shown,
    };
  }

  function lines(spec, local) {
    const view = spec.views[local.view];
    const series = view.series.filter((one) => spec.own_colours || !state.hidden.has(one.place));
    const format = view.percent ? percent : plain;
    const all = series.flatMap((one) => one.points.map(([x, y]) => ({ x, y, name: one.name })));
    return {
      zooms: "xy",
      legend: series,
      x: { label: view.x, grid: true, tickFormat: view.diagonal ? percent : undefined, ...(view.log ? { type: "log", tickFormat: plain } : {}) },
      y: { label: view.y, tickFormat: format, grid: true, zero: view.zero, nice: true },
      height: view.diagonal ? 380 : 320,
      marks: [
        ...(view.diagonal ? [Plot.line([[0, 0], [1, 1]], { stroke: "var(--soft)", strokeDasharray: "1 4", clip: true })] : []),
        ...series.map((one) =>
          Plot.line(one.points, {
            x: (p) => p[0], y: (p) => p[1], stroke: colour(one.place), strokeWidth: 2, strokeDasharray: dash(one.place),
            clip: true,
          })),
        ...(view.dots ? series.map((one) => Plot.dot(one.points, { fill: colour(one.place), r: 3.5, clip: true })) : []),
        tip(all, "x", "y", (p) => `${p.name}\n${view.x} ${plain(p.x)}\n${format(p.y)}`),
      ],
    };
  }

  function heat(spec, local, width) {
    const { values } = spec.frames[local.frame];
    const cells = values.flatMap((row, y) => row.map((value, x) => ({ x, y, value }))).filter((one) => one.value > 0);
    const largest = Math.max(...spec.frames.flatMap((frame) => frame.values.flat()), Number.MIN_VALUE);
    const tall = Math.min(22, Math.max(4, 480 / spec.rows.length));
    const left = Math.min(140, 24 + 6.5 * Math.max(...spec.rows.map((name) => String(name).length)));
    const wide = (width - left) / spec.columns.length;
    const longest = Math.max(...spec.columns.map((name) => String(name).length));
    const slanted = 7 * longest > wide;
    const every = (count, step) => [...Array(count).keys()].filter((k) => k % step === 0);
    const short = (name, most) => (String(name).length > most ? `${String(name).slice(0, most - 1)}…` : name);
    return {
      x: {
        label: spec.column, axis: "top", domain: [...spec.columns.keys()], tickRotate: slanted ? -40 : 0,
        tickFormat: (k) => short(spec.columns[k], 14), ticks: every(spec.columns.length, Math.ceil(16 / wide)),
      },
      y: {
        label: spec.row, domain: [...spec.rows.keys()], tickFormat: (k) => short(spec.rows[k], 18),
        ticks: every(spec.rows.length, Math.ceil(14 / tall)),
      },
      marginLeft: left + 16, marginTop: slanted ? 34 + 4.2 * Math.min(longest, 14) : 40, marginBottom: 8,
      width: Math.min(width, left + 60 * spec.columns.length),
      height: tall * spec.rows.length + 60 + (slanted ? 60 : 0),
      marks: [
        Plot.cell(cells, { x: "x", y: "y", fill: "var(--s0)", fillOpacity: (one) => one.value / largest, inset: tall > 6 ? 0.5 : 0 }),
        tip(cells, "x", "y", (one) =>
          `${spec.row} ${spec.rows[one.y]}\n${spec.column} ${spec.columns[one.x]}\n${plain(one.value)} ${spec.value}`),
      ],
    };
  }

  function bars(spec, local) {
    const shown = spec.views[local.view].bars;
    return {
      x: { label: "bytes", tickFormat: bytes, grid: true, ticks: 5 },
      y: { axis: null, domain: shown.map((bar) => bar.name) },
      marginLeft: 8, height: 60 + 32 * shown.length,
      marks: [
        Plot.barX(shown, { x: "value", y: "name", fill: "var(--s0)", insetTop: 15, insetBottom: 3 }),
        Plot.text(shown, { x: 0, y: "name", text: (bar) => `${bar.name}  ${bytes(bar.value)}`, textAnchor: "start", dy: -8 }),
      ],
    };
  }

  const clientCharts = {
    own_global(rows) {
      return scattered(rows.filter((row) => row.own !== null && row.everyone !== null), "everyone", "own", {
        x: `${merit.name} on the global test`, y: `${merit.name} on the client's own test data`,
      });
    },

    worth(rows, spec) {
      const alone = new Map(rowsOfSeed().filter((row) => row.place === spec.alone).map((row) => [row.client, row.own]));
      const base = (row) => (spec.alone === null ? row.before : alone.get(row.client));
      const shown = rows
        .filter((row) => row.place !== spec.alone && row.own !== null && base(row) != null)
        .map((row) => ({ ...row, base: base(row), harmed: merit.higher ? row.own < base(row) : row.own > base(row) }));
      const ends = shown.flatMap((row) => [row.base, row.own]);
      const corners = [[Math.min(...ends), Math.min(...ends)], [Math.max(...ends), Math.max(...ends)]];
      const reference = spec.alone === null ? "before personalisation" : "training alone";
      return scattered(shown, "base", "own", { x: `${merit.name} of ${reference}`, y: `${merit.name} of the method` },
        [Plot.line(corners, { stroke: "var(--soft)", strokeDasharray: "3 3", clip: true })]);
    },

    strips(rows, _spec, width) {
      const shown = rows.filter((row) => row.own !== null);
      const places = [...new Set(shown.map((row) => row.place))];
      const most = Math.max(...places.map((place) => shown.filter((row) => row.place === place).length));
      const r = most <= 60 ? 4 : most <= 300 ? 2.6 : 1.6, tall = 74;
      const low = Math.min(...shown.map((row) => row.own)), high = Math.max(...shown.map((row) => row.own));
      const column = Math.max(1e-9, ((high - low) * 2 * r) / (width - 40));
      const marks = places.flatMap((place) => strip(shown.filter((row) => row.place === place), column, r, tall));
      return {
        zooms: "x",
        x: { label: `${merit.name} on the client's own test data`, tickFormat: score, grid: true, inset: 8 },
        y: { axis: null, domain: [-tall / 2, tall / 2] },
        fy: { axis: null, domain: places, padding: 0.1 },
        marginLeft: 12, marginTop: 8, height: 50 + (tall + 8) * places.length,
        marks: [...marks, tip(shown, "x", "y", describe, { fy: "place" })],
      };
    },
  };

  // Dots that would cover one another are stacked: where many clients are, the strip is thick.
  function strip(rows, column, r, tall) {
    const stacks = new Map();
    for (const row of rows) {
      const key = Math.round(row.own / column);
      stacks.set(key, [...(stacks.get(key) ?? []), row]);
    }
    const highest = Math.max(...[...stacks.values()].map((stack) => stack.length));
    const gap = Math.min(2 * r, (tall - 30) / highest);
    for (const [key, stack] of stacks) {
      stack.forEach((row, i) => Object.assign(row, { x: key * column, y: gap * (i - (stack.length - 1) / 2) - 8 }));
    }
    const { place } = rows[0];
    const sorted = rows.map((row) => row.own).sort((a, b) => (merit.higher ? a - b : b - a));
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    const worst = mean(sorted.slice(0, Math.max(1, Math.floor(sorted.length / 10))));
    const rule = { fy: () => place, y1: -tall / 2, y2: tall / 2 - 16, stroke: "var(--ink)", clip: true };
    const seed = data.seeds.length > 1 ? `, seed ${state.seed}` : "";
    const words = `${data.methods[place]}${seed}: mean ${score(mean(sorted))}, worst tenth ${score(worst)}`;
    return [
      Plot.dot(rows, { x: "x", y: "y", fy: "place", r, fill: colour(place), clip: true }),
      Plot.ruleX([mean(sorted)], { ...rule, strokeWidth: 2 }),
      Plot.ruleX([worst], { ...rule, strokeDasharray: "3 3" }),
      Plot.text([words], { fy: () => place, frameAnchor: "top-left", dx: 4 }),
      ring(rows, "x", "y", { fy: "place" }),
    ];
  }

  function scattered(rows, x, y, names, under = []) {
    const some = rows.length > 400 ? 2.5 : 4;
    const dot = { x, y, clip: true };
    return {
      zooms: "xy",
      legend: data.methods.map((name, place) => ({ name, place, dots: true })).filter((one) => rows.some((row) => row.place === one.place)),
      x: { label: names.x, tickFormat: score, grid: true, inset: 8 },
      y: { label: names.y, tickFormat: score, grid: true, inset: 8 },
      height: 380,
      marks: [
        ...under,
        Plot.dot(rows.filter((row) => !row.harmed), { ...dot, r: some, fill: (row) => colour(row.place), fillOpacity: 0.7 }),
        Plot.dot(rows.filter((row) => row.harmed), { ...dot, r: some, symbol: "times", strokeWidth: 2, stroke: (row) => colour(row.place) }),
        ring(rows, x, y),
        tip(rows, x, y, describe),
      ],
    };
  }

  const ring = (rows, x, y, more = {}) =>
    Plot.dot(rows.filter((row) => row.client === state.client), { x, y, r: 8, stroke: "var(--ink)", strokeWidth: 2, ...more });

  const tip = (rows, x, y, title, more = {}) =>
    Plot.tip(rows, Plot.pointer({ x, y, title, stroke: "var(--soft)", ...more }));

  function describe(row) {
    const facts = [["own", row.own], ["own, before personalising", row.before], ["own, reference", row.base], ["global", row.everyone]];
    const known = facts.filter(([, value]) => value != null).map(([name, value]) => `${name} ${score(value)}`);
    return [clientName(row.client), data.methods[row.place], ...known].join("\n");
  }

  function rowsOfSeed() {
    return data.clients.filter((table) => table.seed === state.seed).flatMap((table) =>
      table.clients.map((client, i) => ({
        client, place: table.place, own: table.own[i], everyone: table.everyone[i], before: table.before[i],
      })));
  }

  function clients(spec, _local, width) {
    const rows = rowsOfSeed().filter((row) => !state.hidden.has(row.place));
    return rows.length ? clientCharts[spec.chart](rows, spec, width) : { marks: [] };
  }

  const kinds = { points, lines, heat, bars, clients };

  // A figure on the page: its controls, its legend, its drawing and its zoom.

  class Figure {
    constructor(home) {
      this.home = home;
      this.spec = data.figures[home.dataset.figure];
      this.chart = home.querySelector(".chart");
      this.local = { view: 0, frame: (this.spec.frames?.length ?? 1) - 1, zoom: null };
      this.legend = element("ul", { className: "legend" });
      this.chart.before(this.legend);
      this.reset = element("button", { type: "button", textContent: "Reset zoom", hidden: true, onclick: () => this.zoom(null) });
      home.querySelector(".controls").append(...this.controls(), this.reset);
      this.chart.addEventListener("keydown", (event) => this.onKey(event));
      this.width = 0;
      new ResizeObserver(() => this.chart.clientWidth !== this.width && this.draw()).observe(this.chart);
    }

    controls() {
      const { views, frames } = this.spec;
      const title = this.home.querySelector("h3").textContent;
      if (views?.length > 1) {
        const choose = element("select", { ariaLabel: `${title}: what is shown` }, ...views.map((view, i) => new Option(view.label, i)));
        choose.onchange = () => { this.local.view = +choose.value; this.zoom(null); };
        return [choose];
      }
      if (frames?.length > 1) {
        const said = element("output", { textContent: frames.at(-1).label });
        const slide = element("input", { type: "range", min: 0, max: frames.length - 1, value: frames.length - 1, ariaLabel: `${title}: round` });
        slide.oninput = () => { this.local.frame = +slide.value; said.textContent = frames[+slide.value].label; this.draw(); };
        return [element("label", {}, slide, said)];
      }
      return [];
    }

    draw() {
      this.width = this.chart.clientWidth;
      if (this.width < 120) return; // no room for axes: hidden, or not laid out yet
      const { legend = [], zooms = "", labels, ...options } = kinds[this.spec.kind](this.spec, this.local, this.width);
      for (const axis of zooms) {
        if (this.local.zoom) options[axis] = { ...options[axis], domain: this.local.zoom[axis], nice: false, inset: 0 };
      }
      const base = { width: this.width, marginLeft: 56, marginTop: 34, marginBottom: 40, ...options };
      this.plot = Plot.plot(base);
      if (labels) this.plot = Plot.plot({ ...base, marks: [...nameTags(this.plot, labels), ...base.marks] });
      this.plot.setAttribute("aria-hidden", "true"); // its label says it in words
      this.legend.replaceChildren(...legend.map(legendEntry));
      this.chart.replaceChildren(this.plot);
      this.reset.hidden = !this.local.zoom;
      this.zooms = zooms;
      if (zooms) this.plot.addEventListener("pointerdown", (event) => this.onDrag(event));
      this.plot.addEventListener("click", () => this.plot.value?.client !== undefined && pick(this.plot.value.client));
    }

    zoom(domains) {
      this.local.zoom = domains;
      this.draw();
    }

    onDrag(start) {
      if (start.pointerType === "touch" || start.button !== 0) return;
      const box = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      box.classList.add("selection");
      const from = this.place(start);
      const corners = (event) => {
        const to = this.place(event);
        return [Math.min(from.x, to.x), Math.min(from.y, to.y), Math.abs(from.x - to.x), Math.abs(from.y - to.y)];
      };
      const move = (event) => {
        const [x, y, width, height] = corners(event);
        if (width + height < 8) return;
        Object.entries({ x, y, width, height }).forEach(([name, value]) => box.setAttribute(name, value));
        this.plot.append(box);
      };
      const up = (event) => {
        removeEventListener("pointermove", move);
        removeEventListener("pointerup", up);
        box.remove();
        const [x, y, width, height] = corners(event);
        if (width < 8 || (this.zooms === "xy" && height < 8)) return; // a click
        this.zoom({ x: this.values("x", x, x + width), y: this.zooms === "xy" ? this.values("y", y + height, y) : undefined });
      };
      start.preventDefault();
      addEventListener("pointermove", move);
      addEventListener("pointerup", up);
    }

    place(event) {
      const box = this.plot.getBoundingClientRect();
      const scale = this.plot.viewBox.baseVal.width / box.width;
      return { x: (event.clientX - box.left) * scale, y: (event.clientY - box.top) * scale };
    }

    values(axis, from, to) {
      const scale = this.plot.scale(axis);
      const [low, high] = scale.range[0] < scale.range[1] ? scale.range : [...scale.range].reverse();
      return [from, to].map((pixel) => scale.invert(Math.min(high, Math.max(low, pixel))));
    }

    onKey(event) {
      if (!this.zooms || event.ctrlKey || event.metaKey || event.altKey) return;
      const steps = { "+": [0.8, 0, 0], "=": [0.8, 0, 0], "-": [1.25, 0, 0], ArrowLeft: [1, -0.1, 0], ArrowRight: [1, 0.1, 0],
        ArrowUp: [1, 0, 0.1], ArrowDown: [1, 0, -0.1] };
      if (event.key === "0" || event.key === "Escape") { this.zoom(null); return; }
      if (!(event.key in steps) || (event.key.startsWith("Arrow") && !this.local.zoom)) return; // arrows scroll the page
      event.preventDefault();
      const [factor, right, up] = steps[event.key];
      const moved = (axis, shift) => {
        const { domain, type } = this.plot.scale(axis), [to, back] = type === "log" ? [Math.log, Math.exp] : [Number, Number];
        const [low, high] = domain.map(to), middle = (low + high) / 2 + shift * (high - low);
        return [middle - (factor * (high - low)) / 2, middle + (factor * (high - low)) / 2].map(back);
      };
      this.zoom({ x: moved("x", right), y: this.zooms === "xy" ? moved("y", up) : undefined });
    }
  }

  // A name beside each point: the first place around it where it covers no point and no other name.
  const PLACES = [[12, 0, "start"], [-12, 0, "end"], [0, -17, "middle"], [0, 17, "middle"], [10, -17, "start"], [10, 17, "start"],
    [-10, -17, "end"], [-10, 17, "end"], [0, -32, "middle"], [0, 32, "middle"]];

  function nameTags(plot, shown) {
    const x = plot.scale("x"), y = plot.scale("y");
    const at = shown.map((point) => ({ point, x: x.apply(point.x), y: y.apply(point.y) }));
    const taken = at.map((dot) => [dot.x - 7, dot.y - 7, dot.x + 7, dot.y + 7]);
    const box = (dot, [dx, dy, anchor]) => {
      const wide = 6.8 * dot.point.name.length, left = dot.x + dx - { start: 0, middle: wide / 2, end: wide }[anchor];
      return [left, dot.y + dy - 8, left + wide, dot.y + dy + 8];
    };
    const fits = (one) => one[0] >= x.range[0] && one[2] <= x.range[1] + 8
      && taken.every((other) => one[2] < other[0] || one[0] > other[2] || one[3] < other[1] || one[1] > other[3]);
    return at.map((dot) => {
      const place = PLACES.find((candidate) => fits(box(dot, candidate))) ?? PLACES[0];
      taken.push(box(dot, place));
      const [dx, dy, textAnchor] = place;
      return Plot.text([dot.point], { x: "x", y: "y", text: "name", dx, dy, textAnchor, stroke: "var(--paper)", strokeWidth: 3, fill: "currentColor" });
    });
  }

  function legendEntry({ name, place, dots }) {
    const key = document.createElement("span");
    key.className = `s${place % 8}`;
    key.innerHTML = dots
      ? '<svg width="12" height="12" aria-hidden="true"><circle cx="6" cy="6" r="5" fill="currentColor"/></svg>'
      : `<svg width="26" height="12" aria-hidden="true"><path d="M0 6h26" stroke="currentColor" stroke-width="2.5" stroke-dasharray="${dash(place)}"/></svg>`;
    return element("li", {}, key, name);
  }

  // Filters above all figures.

  function filters(form) {
    if (data.methods?.length > 1) {
      data.methods.forEach((name, place) => {
        const box = element("input", { type: "checkbox", checked: true });
        box.onchange = () => {
          if (box.checked) state.hidden.delete(place);
          else state.hidden.add(place);
          document.querySelector(`tr[data-method="${place}"]`)?.classList.toggle("hidden", !box.checked);
          redraw();
        };
        form.append(element("label", {}, box, element("i", { className: `swatch s${place % 8}` }), name));
      });
    }
    if (data.seeds?.length > 1) {
      const seed = element("select", {}, ...data.seeds.map((number) => new Option(number, number)));
      seed.onchange = () => { state.seed = +seed.value; redraw(); };
      form.append(element("label", {}, "Seed of clients", seed));
    }
    const known = [...new Set((data.clients ?? []).flatMap((table) => table.clients))].sort((a, b) => a - b);
    if (known.length > 1) {
      const choose = element("select", { id: "client" }, new Option("all", ""), ...known.map((client) => new Option(clientName(client), client)));
      choose.onchange = () => pick(choose.value === "" ? null : +choose.value);
      form.append(element("label", {}, "Client", choose));
    }
    form.onsubmit = () => false;
  }

  function pick(client) {
    state.client = client === state.client ? null : client;
    const choose = document.getElementById("client");
    if (choose) choose.value = state.client ?? "";
    redraw();
  }

  // What the picked client has, in words and numbers.
  function showPicked() {
    const home = document.querySelector(".picked");
    if (!home) return;
    const rows = rowsOfSeed().filter((row) => row.client === state.client);
    if (!rows.length) { home.replaceChildren(); return; }
    const cell = (value) => element("td", { textContent: value == null ? "–" : score(value) });
    const line = (row) =>
      element("tr", {}, element("th", { scope: "row" }, element("i", { className: `swatch s${row.place % 8}` }), data.methods[row.place]),
        cell(row.before), cell(row.own), cell(row.everyone));
    const head = ["Method", "Own, before", "Own", "Global"].map((name) => element("th", { scope: "col", textContent: name }));
    home.replaceChildren(
      element("h3", { textContent: `${clientName(state.client)}, seed ${state.seed}` }),
      element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows.map(line))));
  }

  const drawn = [];
  function redraw() {
    drawn.forEach((figure) => figure.draw());
    showPicked();
  }

  document.querySelectorAll(".filters").forEach(filters);
  drawn.push(...[...document.querySelectorAll("figure[data-figure]")].map((home) => new Figure(home)));
  redraw();
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
})();
