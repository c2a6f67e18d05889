"use strict";
/* Asks the server, at most every two seconds, for the part that the address names, and shows what has changed. */
(() => {
  const PAUSE = 2000;
  const at = (id) => document.getElementById(id);
  const chosen = new Set();
  let asked = "";
  let etag = "";
  let timer = null;

  /** Return the address on the server for the page that the browser's address names. */
  function addressOf() {
    const [kind, rest = ""] = location.hash.slice(1).split("=");
    const ids = rest.split(",").filter((id) => /^[0-9a-f]{20}$/.test(id)).slice(0, 20);
    if (kind === "run" && ids.length) return `/run?id=${ids[0]}`;
    if (kind === "compare" && ids.length) return `/compare?${ids.map((id) => `id=${id}`).join("&")}`;
    return `/runs?${new URLSearchParams({ words: at("search").value })}`;
  }

  /** Show another page, or the list of other runs. */
  function open(moved) {
    asked = addressOf();
    etag = "";
    const isList = asked.startsWith("/runs");
    at("controls").hidden = !isList;
    at("back").hidden = isList;
    if (moved) {
      delete document.documentElement.dataset.round;
      at("view").replaceChildren();
      scrollTo(0, 0);
    }
    ask(moved);
  }

  async function ask(moved = false) {
    clearTimeout(timer);
    if (document.hidden) return;
    const address = asked;
    const began = performance.now();
    try {
      const answer = await fetch(address, { cache: "no-store", headers: etag ? { "If-None-Match": etag } : {} });
      const text = await answer.text();
      if (address !== asked) return;
      at("connection").hidden = true;
      if (answer.status === 200) {
        etag = answer.headers.get("ETag");
        show(new DOMParser().parseFromString(text, "text/html").body.firstElementChild, moved);
      } else if (answer.status === 404) {
        lose();
        return;
      }
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      at("connection").hidden = false;
      at("connection").textContent = "Not connected: mpfedcl watch has ended or is out of reach. This page continues automatically when it is back.";
    }
    clearTimeout(timer);
    // Figures are drawn for an answer: that may take a fifth of the server's time at most.
    timer = setTimeout(ask, Math.max(PAUSE, 4 * (performance.now() - began)));
  }

  function lose() {
    const warning = document.createElement("p");
    warning.className = "warning";
    warning.textContent = "This run no longer exists.";
    at("view").replaceChildren(warning);
  }

  function show(fresh, moved) {
    const { title, round, said } = fresh.dataset;
    const focused = document.activeElement?.id;
    document.title = `${title} - mpfedcl watch`;
    if (at("title").textContent !== title) at("title").textContent = title;
    const old = at("view").firstElementChild;
    if (old?.dataset.title === title) merge(old, fresh);
    else at("view").replaceChildren(fresh);
    if (round !== undefined) document.documentElement.dataset.round = round;
    if (said && at("said").textContent !== said) at("said").textContent = said;
    for (const box of at("view").querySelectorAll("input[type=checkbox]")) box.checked = chosen.has(box.value);
    if (moved) at("title").focus();
    else if (focused && document.activeElement?.id !== focused) at(focused)?.focus({ preventScroll: true });
    document.documentElement.dataset.ready = "true";
  }

  /** Replace the parts that differ; what is open stays open. */
  function merge(old, fresh) {
    const parts = (node) => [...node.querySelectorAll(":scope > :not(.flow), :scope > .flow > *")];
    if (parts(old).length !== parts(fresh).length) {
      keepOpen(old, fresh);
      old.replaceWith(fresh);
      return;
    }
    const known = parts(old);
    parts(fresh).forEach((part, place) => {
      // Compared as the server sent them: the reader may have opened or sorted something.
      if (sources.get(known[place]) === part.outerHTML) return;
      const source = part.outerHTML;
      keepOpen(known[place], part);
      known[place].replaceWith(part);
      sources.set(part, source);
    });
  }
  const sources = new WeakMap();

  function keepOpen(old, fresh) {
    const open = new Set([...old.querySelectorAll("details[open] > summary")].map((each) => each.textContent));
    for (const summary of fresh.querySelectorAll("details > summary")) summary.parentNode.open = open.has(summary.textContent);
  }

  function count() {
    const button = at("compare");
    button.disabled = chosen.size < 2 || chosen.size > 20;
    button.textContent = chosen.size > 20 ? "Compare: choose at most twenty" : chosen.size > 1 ? `Compare ${chosen.size} runs` : "Compare: choose at least two";
  }

  at("search").addEventListener("input", () => open(false));
  at("compare").addEventListener("click", () => { location.hash = `compare=${[...chosen].join(",")}`; });
  at("view").addEventListener("change", ({ target }) => {
    if (target.checked) chosen.add(target.value);
    else chosen.delete(target.value);
    count();
  });
  document.addEventListener("visibilitychange", () => ask());
  addEventListener("hashchange", () => { if (location.hash !== "#content") open(true); });
  delete document.documentElement.dataset.ready;
  open(false);
})();
