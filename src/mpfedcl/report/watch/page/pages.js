"use strict";
/* The page of one run, and of several side by side. They ask for what they show when it has changed. */
const Pages = {};

(() => {
  const { html } = Charts;

  /**
   * Return a function that asks an address and hands on what it says: one question at a time, with
   * a pause between two, and once more where it was called meanwhile. Once its page has been left,
   * by `node`, it is silent.
   */
  Pages.follow = (node, address, pause, take, fail) => {
    let busy = false;
    let again = false;
    const ask = async () => {
      if (busy) { again = true; return; }
      busy = true;
      again = false;
      try {
        const answer = await fetch(address);
        const text = await answer.text();
        if (!node.isConnected) return;
        if (answer.ok) take(Charts.parse(text));
        else fail();
      } catch (error) {
        // The server is out of reach; the stream of events says so, and asks anew when it is back.
        if (!(error instanceof TypeError)) throw error;
      } finally {
        setTimeout(() => { busy = false; if (again && node.isConnected) ask(); }, pause);
      }
    };
    return ask;
  };

  const back = () => html("p", { class: "back" }, html("a", { href: "#" }, "All runs"));

  function status(entry) {
    return html("p", {}, html("span", { class: `state ${entry.state}` }, entry.state), ` ${entry.method || ""}${entry.dataset ? ` on ${entry.dataset}, ${entry.setting}, seed ${entry.seed}` : ""}`);
  }

  /** A place for a view: updated where it can be, made anew where its kind has changed. */
  function slot(space, make) {
    let view = null;
    let kind = null;
    let shown = null;
    return (data, nextKind = "") => {
      const text = JSON.stringify(data);
      if (view && text === shown) return;
      shown = text;
      if (view?.update && kind === nextKind) { view.update(data); return; }
      const next = make(data);
      if (view) view.node.replaceWith(next.node);
      else space.append(next.node);
      [view, kind] = [next, nextKind];
      view.draw();
    };
  }

  /** Return the page of one run. */
  Pages.run = (store, id) => {
    const entry = () => store.runs.get(id);
    const head = html("div");
    const troubles = html("div");
    const space = html("div", { class: "closer" });
    const node = html("div", {}, back(), head, troubles, space);
    const place = () => { const spot = html("div"); space.append(spot); return spot; };
    const slots = {
      latest: slot(place(), Views.latest),
      drift: slot(place(), Views.drift),
      rounds: slot(place(), Views.rounds),
      clients: slot(place(), Views.clients),
      map: slot(place(), Views.map),
      attendance: slot(place(), Views.attendance),
      absences: slot(place(), Views.absences),
      cost: slot(place(), Views.cost),
      table: slot(place(), (table) => Parts.ready(Parts.block("Result", null, Parts.table(table)))),
      behind: slot(place(), Views.behind),
      confusion: slot(place(), Views.confusion),
      partition: slot(place(), Views.partition),
      settings: slot(place(), Views.settings),
    };
    const warn = (sentences) => troubles.replaceChildren(...sentences.map((each) => html("p", { class: "warning" }, each)));
    const take = (found) => {
      warn(found.troubles);
      if (!found.run || !entry()) return;
      const { run, group } = found;
      slots.latest({ run: { rounds: run.rounds, planned: run.planned, clients: run.clients, population: run.population, fairness: run.fairness, read_in: run.read_in }, latest: found.latest, group });
      if (found.drift.length) slots.drift(found.drift);
      slots.rounds([group]);
      slots.clients(found.clients);
      slots.attendance(found.attendance);
      if (run.absences.rows.length) slots.absences({ absences: run.absences });
      slots.cost([group]);
      slots.table(found.table);
      slots.behind({ clients: run.clients, population: run.population, fairness: run.fairness, confusion: run.confusion, predictor: run.predictor, read_in: run.read_in });
      slots.confusion({ confusion: run.confusion });
      slots.partition({ partition: run.partition, setting: run.setting });
      slots.settings({ settings: run.settings });
      document.documentElement.dataset.round = String(run.rounds);
      askMap();
    };
    const lost = () => warn(["This run no longer exists."]);
    const ask = Pages.follow(node, `/run?id=${id}`, 150, take, lost);
    const askMap = Pages.follow(node, `/map?id=${id}`, 1000, (map) => slots.map({ map }, map.missing ? "missing" : "frames"), () => {});
    let told = 0;
    const changed = () => {
      const now = entry();
      if (!now) { lost(); return; }
      head.replaceChildren(status(now), html("p", { class: "folder" }, [store.folder, now.folder, now.name].filter(Boolean).join("/")));
      if (now.state === "running" && Date.now() - told > 10000) {
        told = Date.now();
        document.getElementById("said").textContent = `Round ${now.round} of ${now.planned}${now.accuracy === null ? "" : `, accuracy ${Charts.fixed(now.accuracy)} %`}`;
      }
      ask();
    };
    return { title: entry()?.name || "A run", node, draw: changed, changed: (ids) => { if (!ids || ids.includes(id)) changed(); }, close: () => {} };
  };

  /** Return the page of several runs. */
  Pages.compare = (store, ids) => {
    const space = html("div");
    const links = html("ul");
    const node = html("div", {}, back(), html("p", { class: "about" }, "Runs that differ only in their seed are one line with a band."), links, space);
    const place = () => { const spot = html("div"); space.append(spot); return spot; };
    const troubles = html("div");
    space.append(troubles);
    const slots = {
      tables: slot(place(), (tables) => Parts.ready(Parts.block("Result", null, tables.map(Parts.table)))),
      rounds: slot(place(), Views.rounds),
      cost: slot(place(), Views.cost),
    };
    const take = (found) => {
      troubles.replaceChildren(...found.troubles.map((each) => Parts.sentence(each)));
      if (!found.groups.length) {
        troubles.append(Parts.sentence("None of these runs can be shown."));
        return;
      }
      const names = found.groups.map((group) => group.name).join("\n");
      slots.tables(found.tables);
      slots.rounds(found.groups, names);
      slots.cost(found.groups, names);
    };
    const ask = Pages.follow(node, `/compare?${ids.map((id) => `id=${id}`).join("&")}`, 1000, take, () => {});
    const changed = () => {
      const here = ids.map((id) => store.runs.get(id)).filter(Boolean);
      links.replaceChildren(...here.map((entry) => html("li", {}, html("a", { href: `#run=${entry.id}` }, entry.name), ` ${entry.state}, round ${entry.round}`)));
      ask();
    };
    return { title: `${ids.length} runs compared`, node, draw: changed, changed: (some) => { if (!some || some.some((id) => ids.includes(id))) changed(); }, close: () => {} };
  };
})();
