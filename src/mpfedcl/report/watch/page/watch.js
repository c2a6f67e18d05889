"use strict";
/* What the server says as things change, and which page shows it. */
(() => {
  const { html } = Charts;
  const store = { runs: new Map(), folder: "", note: "" };
  const main = document.getElementById("content");
  const connection = document.getElementById("connection");
  let page = null;
  let stream = null;
  let known = false;

  /** Open the page that the address asks for. */
  function open(moved) {
    const [kind, rest = ""] = location.hash.slice(1).split("=");
    const ids = rest.split(",").filter((id) => /^[0-9a-f]{20}$/.test(id)).slice(0, 20);
    page?.close();
    delete document.documentElement.dataset.round;
    if (kind === "run" && ids.length) page = Pages.run(store, ids[0]);
    else if (kind === "compare" && ids.length) page = Pages.compare(store, ids);
    else page = RunList.open(store);
    document.title = `${page.title} - mpfedcl watch`;
    const heading = html("h1", { tabindex: -1 }, page.title);
    document.getElementById("top").replaceChildren(html("p", { class: "brand" }, "mpfedcl watch"), heading);
    main.replaceChildren(page.node);
    page.draw();
    if (moved) {
      scrollTo(0, 0);
      heading.focus();
    }
  }

  function listen() {
    if (stream || document.hidden) return;
    stream = new EventSource("/events");
    stream.addEventListener("runs", (event) => {
      const found = Charts.parse(event.data);
      store.runs = new Map(found.runs.map((entry) => [entry.id, entry]));
      store.folder = found.folder;
      store.note = found.note;
      connection.hidden = true;
      document.getElementById("bottom").replaceChildren(
        html("p", {}, `mpfedcl ${found.version}, watching `, html("span", { class: "folder" }, found.folder), ". This page only reads. Accuracies are of the last round that was evaluated, never of the best one."),
      );
      if (known) page.changed(null);
      else open(false);
      known = true;
      document.documentElement.dataset.ready = "true";
    });
    stream.addEventListener("changed", (event) => {
      const entries = Charts.parse(event.data);
      for (const entry of entries) store.runs.set(entry.id, entry);
      page.changed(entries.map((entry) => entry.id));
    });
    stream.addEventListener("gone", (event) => {
      const ids = Charts.parse(event.data);
      for (const id of ids) store.runs.delete(id);
      page.changed(ids);
    });
    stream.addEventListener("error", () => {
      connection.hidden = false;
      connection.textContent = "Not connected: mpfedcl watch has ended or is out of reach. This page continues automatically when it is back.";
      // A browser tries again by itself, but gives up for good where a port answers otherwise.
      if (stream?.readyState === EventSource.CLOSED) {
        stop();
        setTimeout(listen, 2000);
      }
    });
  }

  function stop() {
    stream?.close();
    stream = null;
  }

  // A browser has few connections to one server: pages that nobody sees give theirs back.
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : listen()));
  addEventListener("pagehide", stop);
  addEventListener("pageshow", listen);
  addEventListener("hashchange", () => {
    if (known && location.hash !== "#content") open(true);
  });
  listen();
})();
