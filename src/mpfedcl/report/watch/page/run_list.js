"use strict";
/* The list of all runs: a row each, changed in place, so that focus and choice stay where they are. */
const RunList = {};

(() => {
  const { html, svg } = Charts;
  const MOST = 300;
  const STATES = ["running", "finished", "stopped", "damaged"];
  const chosen = new Set();

  /** Return a time in words that need no clock. */
  RunList.since = (milliseconds) => {
    const seconds = Math.max(0, (Date.now() - milliseconds) / 1000);
    if (seconds < 90) return "just now";
    const [size, unit] = [[86400 * 2, 86400, "days"], [7200, 3600, "hours"], [0, 60, "minutes"]].find(([from]) => seconds >= from).slice(1);
    return `${Math.floor(seconds / size)} ${unit} ago`;
  };

  /** Return the page of all runs. */
  RunList.open = (store) => {
    const state = { words: "", state: "", most: MOST };
    const rows = new Map();
    const body = html("tbody");
    const counted = html("p", { class: "about", role: "status" });
    const nothing = html("p", { class: "note" });
    const more = html("button", { type: "button", class: "copy", hidden: true }, "Show more");
    const compare = html("button", { type: "button", class: "copy" }, "Compare");
    const search = html("input", { type: "search", id: "search", autocomplete: "off", spellcheck: "false" });
    search.addEventListener("input", () => { state.words = search.value.toLowerCase(); draw(); });
    more.addEventListener("click", () => { state.most += MOST; draw(); });
    compare.addEventListener("click", () => { location.hash = `compare=${[...chosen].join(",")}`; });
    const states = Parts.choice("State", [["", "all"], ...STATES.map((each) => [each, each])], (value) => { state.state = value; draw(); });

    const choose = (id, on) => {
      if (on) chosen.add(id);
      else chosen.delete(id);
      tellChosen();
    };
    const tellChosen = () => {
      compare.textContent = chosen.size > 20 ? "Compare: choose at most twenty" : chosen.size > 1 ? `Compare ${chosen.size} runs` : "Compare: choose at least two";
      compare.disabled = chosen.size < 2 || chosen.size > 20;
    };
    const draw = () => {
      for (const id of [...rows.keys()]) {
        if (store.runs.has(id)) continue;
        rows.get(id).node.remove();
        rows.delete(id);
        chosen.delete(id);
      }
      const wanted = [...store.runs.values()].filter((entry) => fits(entry, state)).sort(order);
      const shown = wanted.slice(0, state.most);
      const focused = document.activeElement;
      const kept = new Set(shown.map((entry) => entry.id));
      for (const [id, row] of rows) if (!kept.has(id)) row.node.remove();
      let next = body.firstChild;
      for (const entry of shown) {
        if (!rows.has(entry.id)) rows.set(entry.id, makeRow(entry.id, choose));
        const row = rows.get(entry.id);
        row.show(entry);
        if (row.node === next) next = next.nextSibling;
        else body.insertBefore(row.node, next);
      }
      // A row that was moved has lost its focus.
      if (focused !== document.activeElement && body.contains(focused)) focused.focus({ preventScroll: true });
      more.hidden = wanted.length <= shown.length;
      more.textContent = `Show more (${wanted.length - shown.length} left)`;
      // Set anew it would be read out anew.
      if (counted.textContent !== count(store.runs)) counted.textContent = count(store.runs);
      nothing.textContent = wanted.length ? "" : store.runs.size ? "No run matches." : "There is no run here yet. A run started below this folder appears automatically: mpfedcl run";
      tellChosen();
    };
    const heads = ["", "run", "state", "method", "rounds", "accuracy", "", "changed"];
    const classes = { 5: "number", 7: "number" };
    const table = html(
      "table", { "aria-label": "Runs" },
      html("thead", {}, html("tr", {}, heads.map((name, place) => html("th", { scope: "col", class: classes[place] || null }, name || html("span", { class: "unseen" }, place ? "curve" : "compare"))))),
      body,
    );
    const node = html(
      "div", {},
      counted,
      store.note ? Parts.sentence(store.note) : null,
      Parts.controls(html("span", { class: "control" }, html("label", { for: "search" }, "Find"), search), states, compare),
      html("section", { class: "block runs", "aria-label": "Runs" }, table, nothing, more),
    );
    const clock = setInterval(draw, 30000);
    return { title: "Runs", node, draw, changed: draw, close: () => clearInterval(clock) };
  };

  function count(runs) {
    const all = [...runs.values()];
    const parts = STATES.map((name) => [all.filter((entry) => entry.state === name).length, name]).filter(([many]) => many);
    return `${all.length} ${all.length === 1 ? "run" : "runs"}${parts.length ? `: ${parts.map(([many, name]) => `${many} ${name}`).join(", ")}` : ""}.`;
  }

  function fits(entry, { words, state }) {
    if (state && entry.state !== state) return false;
    const text = [entry.folder, entry.name, entry.method, entry.dataset, entry.setting, `seed ${entry.seed}`].join(" ").toLowerCase();
    return words.split(/\s+/).every((word) => text.includes(word));
  }

  /** Running ones first, in an order that does not change with each round; then the newest. */
  function order(a, b) {
    const [first, second] = [a.state === "running", b.state === "running"];
    if (first !== second) return first ? -1 : 1;
    const names = `${a.folder}/${a.name}`.localeCompare(`${b.folder}/${b.name}`, "en", { numeric: true });
    return first ? names : b.changed - a.changed || names;
  }

  function makeRow(id, choose) {
    const box = html("input", { type: "checkbox" });
    box.checked = chosen.has(id);
    box.addEventListener("change", () => choose(id, box.checked));
    const link = html("a", { href: `#run=${id}` });
    const folder = html("small");
    const trouble = html("small", { class: "trouble" });
    const state = html("span", { class: "state" });
    const method = html("span");
    const setting = html("small");
    const bar = html("progress");
    const done = html("small");
    const accuracy = html("td", { class: "number accuracy-cell" });
    const curve = html("td", { class: "curve-cell" });
    const changed = html("td", { class: "number changed-cell" });
    const node = html(
      "tr", {},
      html("td", { class: "chosen-cell" }, box),
      html("th", { scope: "row", class: "where" }, link, folder, trouble),
      html("td", { class: "state-cell" }, state),
      html("td", { class: "method-cell" }, method, setting),
      html("td", { class: "progress-cell" }, bar, done),
      accuracy, curve, changed,
    );
    let last = null;
    const show = (entry) => {
      changed.textContent = RunList.since(entry.changed);
      changed.title = new Date(entry.changed).toLocaleString();
      if (entry === last) return;
      last = entry;
      box.setAttribute("aria-label", `Compare ${entry.name}`);
      link.textContent = entry.name;
      folder.textContent = entry.folder;
      trouble.textContent = entry.trouble || warn(entry);
      state.className = `state ${entry.state}`;
      state.textContent = entry.state;
      method.textContent = entry.method || "";
      setting.textContent = entry.dataset ? `${entry.dataset}, ${entry.setting}, seed ${entry.seed}` : "";
      bar.max = entry.planned || 1;
      bar.value = entry.round;
      bar.setAttribute("aria-label", "rounds done");
      done.textContent = entry.planned ? `${entry.round} of ${entry.planned}` : "";
      accuracy.textContent = entry.accuracy === null ? "-" : `${Charts.fixed(entry.accuracy)} %`;
      curve.replaceChildren(spark(entry.curve));
    };
    return { node, show };
  }

  function warn(entry) {
    const many = (number, one, several) => (number ? [`${number} ${number === 1 ? one : several}`] : []);
    return [
      ...many(entry.rejected, "update rejected", "updates rejected"),
      ...many(entry.missing, "answer missing", "answers missing"),
      ...many(entry.damaged, "damaged record", "damaged records"),
    ].join(", ");
  }

  function spark(points) {
    const drawing = svg("svg", { width: 92, height: 26, viewBox: "0 0 92 26", "aria-hidden": "true" });
    if (points.length < 2) return drawing;
    const x = Charts.scale([points[0][0], points[points.length - 1][0]], [2, 90]);
    const values = points.map(([, value]) => value);
    const low = Math.min(...values);
    // A curve that hardly moves must look as if it hardly moved.
    const y = Charts.scale([low, Math.max(low + 20, ...values)], [24, 2]);
    drawing.append(svg("polyline", { class: "spark", points: points.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }));
    return drawing;
  }
})();
