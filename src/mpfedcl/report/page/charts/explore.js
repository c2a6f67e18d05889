"use strict";
/*
 * Looking closer: the pointer, a finger or the arrow keys move a ring from spot to spot, and a box
 * says what is there. A spot is { x, y, text, row?, radius?, box? }; text is a list of lines.
 */
(() => {
  const REACH = 30;

  const pointed = new WeakMap();

  Charts.explore = (canvas, svg, spots) => {
    const before = pointed.get(canvas) || null;
    const focused = canvas.contains(document.activeElement);
    const scrolled = canvas.scrollTop;
    const tip = canvas.querySelector(".tip") || Charts.html("output", { class: "tip", "aria-live": "polite" });
    tip.classList.remove("shown");
    const ring = Charts.svg("circle", { class: "ring" });
    ring.setAttribute("visibility", "hidden");
    svg.append(ring);
    canvas.replaceChildren(svg, tip);
    canvas.scrollTop = scrolled;
    if (!spots.length) return;
    svg.setAttribute("tabindex", "0");
    svg.setAttribute("aria-keyshortcuts", "ArrowLeft ArrowRight ArrowUp ArrowDown");
    let current = null;

    const point = (spot) => {
      // A drawing that has been replaced has nothing to say any more.
      if (!svg.isConnected) return;
      current = spot;
      pointed.set(canvas, spot);
      svg.classList.toggle("explored", spot !== null);
      ring.setAttribute("visibility", spot ? "visible" : "hidden");
      tip.classList.toggle("shown", spot !== null);
      if (!spot) return;
      ring.setAttribute("cx", spot.x);
      ring.setAttribute("cy", spot.y);
      ring.setAttribute("r", (spot.radius || 4) + 3);
      tip.replaceChildren(...spot.text.map((line) => Charts.html("span", {}, line)));
      place(spot);
    };

    const place = (spot) => {
      const drawn = svg.getBoundingClientRect();
      const around = canvas.getBoundingClientRect();
      const factor = drawn.width / (svg.viewBox.baseVal.width || drawn.width);
      const x = drawn.left - around.left + spot.x * factor + canvas.scrollLeft;
      const y = drawn.top - around.top + spot.y * factor + canvas.scrollTop;
      const package = canvas.clientWidth;
      const width = tip.offsetWidth;
      const above = y - tip.offsetHeight - 14 >= canvas.scrollTop;
      tip.style.left = `${Math.max(0, Math.min(package - width, x - width / 2))}px`;
      tip.style.top = `${above ? y - tip.offsetHeight - 12 : y + 14}px`;
    };

    const under = (event) => {
      const drawn = svg.getBoundingClientRect();
      const factor = (svg.viewBox.baseVal.width || drawn.width) / drawn.width;
      const x = (event.clientX - drawn.left) * factor;
      const y = (event.clientY - drawn.top) * factor;
      const inside = spots.find((spot) => spot.box && within(spot.box, x, y));
      if (inside) return inside;
      const near = least(spots, (spot) => Math.hypot(spot.x - x, spot.y - y));
      return near && Math.hypot(near.x - x, near.y - y) <= REACH + (near.radius || 0) ? near : null;
    };

    svg.addEventListener("pointermove", (event) => point(under(event)));
    svg.addEventListener("pointerdown", (event) => point(under(event)));
    svg.addEventListener("pointerleave", () => point(null));
    svg.addEventListener("blur", () => point(null));
    svg.addEventListener("focus", () => {
      if (svg.matches(":focus-visible") && !current) point(spots[0]);
    });
    svg.addEventListener("keydown", (event) => {
      const next = step(spots, current || spots[0], event.key);
      if (next === undefined) return;
      event.preventDefault();
      point(next);
      if (next && canvas.classList.contains("tall")) {
        canvas.scrollTop = Math.max(0, next.y - canvas.clientHeight / 2);
        place(next);
      }
    });
    if (before) point(successor(spots, before));
    if (focused) svg.focus({ preventScroll: true });
  };

  /** Return the spot that stands for another in a new drawing: the same, else one of its name. */
  function successor(spots, before) {
    const same = spots.find((spot) => spot.text.join() === before.text.join());
    return same || least(spots.filter((spot) => spot.text[0] === before.text[0]), (spot) => Math.hypot(spot.x - before.x, spot.y - before.y));
  }

  /** Return where a key leads: a spot, null for none, undefined for a key that is not ours. */
  function step(spots, from, key) {
    if (key === "Escape") return null;
    if (key === "Home") return spots[0];
    if (key === "End") return spots[spots.length - 1];
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
    if (!way) return undefined;
    const sideways = way[0] !== 0;
    const ahead = spots.filter((spot) => {
      const along = (spot.x - from.x) * way[0] + (spot.y - from.y) * way[1];
      if (along <= 0.01) return false;
      return from.row === undefined || !sideways || spot.row === from.row;
    });
    const cost = (spot) => {
      const [dx, dy] = [Math.abs(spot.x - from.x), Math.abs(spot.y - from.y)];
      return sideways ? dx + 3 * dy * (from.row === undefined ? 1 : 0) : dy + 3 * dx;
    };
    return least(ahead, cost) || from;
  }

  function within([x, y, width, height], px, py) {
    return px >= x && px <= x + width && py >= y && py <= y + height;
  }

  function least(list, measure) {
    let best = null;
    let lowest = Infinity;
    for (const each of list) {
      const value = measure(each);
      if (value < lowest) [best, lowest] = [each, value];
    }
    return best;
  }
})();
