"use strict";
/*
 * Charts.lines(element, { title, description, x, y, low?, high?, digits?, lines })
 * lines: [{ name, x: [...], mean: [...], std?: [...], lost?: [...], level?, style?, plain?, notes? }]; x and
 * y are the titles of the axes. `lost` counts seeds without a number, seen as crosses below; a line's
 * style is { color, marker, dash }; a plain line has neither markers nor spots; notes say more of
 * each point.
 * A line that is level has one point, and is drawn across: it holds for every x.
 * Lines can be switched off and on in the legend.
 */
(() => {
  const HEIGHT = 320;
  const switchedOff = new WeakMap();

  Charts.lines = (element, data) => {
    const hidden = switchedOff.get(element) || new Set();
    switchedOff.set(element, hidden);
    Charts.frame(
      element,
      data,
      (width, redraw) => draw(data, width, hidden, redraw),
      () => tabulate(data),
    );
  };

  function draw(data, width, hidden, redraw) {
    const area = { left: 46, right: width - 14, top: 28, bottom: HEIGHT - 44 };
    const [first, last] = ends(data.lines);
    const edge = last === first ? first + 1 : last;
    const shown = data.lines.map((line, index) => ({ ...stretch(line, first, edge), index, look: Charts.look(line.style, index) })).filter((line) => !hidden.has(line.name));
    const reached = shown.flatMap((line) =>
      line.mean.flatMap((value, place) => {
        if (value === null) return [];
        const spread = line.std?.[place] || 0;
        return [value - spread, value + spread];
      }),
    );
    const bounds = { low: data.low ?? -Infinity, high: data.high ?? Infinity };
    const [low, high] = Charts.range(reached.map((each) => clamp(each, bounds.low, bounds.high)), bounds);
    const x = Charts.scale([first, edge], [area.left + 6, area.right - 6]);
    const y = Charts.scale([low, high], [area.bottom, area.top]);
    const svg = Charts.canvas(width, HEIGHT);
    Charts.axes(svg, area, {
      x: data.x,
      y: data.y,
      xTicks: xTicks(first, last, width).map((each) => [x(each), Charts.show(each, 3)]),
      yTicks: yTicks(low, high, data.digits).map((each) => [y(each), Charts.show(each, 4)]),
    });
    const limit = (value) => y(clamp(value, low, high));
    const spots = [];
    for (const line of shown) svg.append(band(line, x, limit));
    for (const line of shown) {
      svg.append(path(line, x, limit));
      line.lost?.forEach((count, place) => { if (count) svg.append(Charts.cross(x(line.x[place]), area.bottom - 6)); });
      spots.push(...spotsOf(line, x, limit, data));
    }
    return { svg, spots, legend: data.lines.length > 1 ? legend(data.lines, hidden, redraw) : [] };
  }

  /** Return the first and the last x of all lines; what is level has none of its own. */
  function ends(lines) {
    const longer = lines.filter((line) => !line.level);
    const places = (longer.length ? longer : lines).flatMap((line) => line.x.filter((_, place) => line.mean[place] !== null));
    return [minimum(places), maximum(places)];
  }

  /** Return a line that is level from one end to the other. */
  function stretch(line, first, edge) {
    if (!line.level) return line;
    const twice = ([value]) => [value, value];
    return { ...line, x: [first, edge], mean: twice(line.mean), ...(line.std ? { std: twice(line.std) } : {}) };
  }

  function band(line, x, y) {
    const group = Charts.svg("g", {});
    if (!line.std) return group;
    for (const piece of pieces(line)) {
      const upper = piece.map((place) => `${x(line.x[place])},${y(line.mean[place] + line.std[place])}`);
      const lower = piece.map((place) => `${x(line.x[place])},${y(line.mean[place] - line.std[place])}`);
      group.append(
        Charts.svg("polygon", { class: `band ${Charts.color(line.look.color)}`, points: [...upper, ...lower.reverse()].join(" ") }),
      );
    }
    return group;
  }

  function path(line, x, y) {
    const group = Charts.svg("g", { class: `line ${Charts.color(line.look.color)}` });
    const every = line.notes ? 1 : Math.max(1, Math.ceil(line.x.length / 9));
    for (const piece of pieces(line)) {
      const points = piece.map((place) => `${x(line.x[place]).toFixed(1)},${y(line.mean[place]).toFixed(1)}`);
      group.append(
        Charts.svg("polyline", { points: points.join(" "), "stroke-dasharray": Charts.dash(line.look.dash) || null }),
      );
    }
    if (line.plain) return group;
    line.mean.forEach((value, place) => {
      const marked = place % every === (line.index * 2) % every || place === line.x.length - 1;
      if (value === null || !marked) return;
      group.append(
        Charts.svg("path", {
          d: Charts.marker(line.look.marker, 3.6),
          transform: `translate(${x(line.x[place]).toFixed(1)},${y(value).toFixed(1)})`,
        }),
      );
    });
    return group;
  }

  /** Return the stretches of a line without gaps, as lists of places. */
  function pieces(line) {
    const found = [[]];
    line.mean.forEach((value, place) => {
      if (value === null) found.push([]);
      else found[found.length - 1].push(place);
    });
    return found.filter((piece) => piece.length);
  }

  function spotsOf(line, x, y, data) {
    if (line.plain) return [];
    return line.x.flatMap((at, place) => {
      const value = line.mean[place];
      if (value === null) return [];
      const spread = line.std ? ` ± ${Charts.fixed(line.std[place], data.digits ?? 1)}` : "";
      const where = line.level ? "" : `${data.x} ${Charts.show(at, 3)}: `;
      const text = [line.name, `${where}${Charts.fixed(value, data.digits ?? 1)}${spread}`];
      if (line.notes) text.push(line.notes[place]);
      if (line.lost?.[place]) text.push(`without ${line.lost[place]} diverged`);
      return [{ x: x(at), y: y(value), row: line.index, text }];
    });
  }

  function legend(lines, hidden, redraw) {
    return lines.map((line, index) => {
      const look = Charts.look(line.style, index);
      const swatch = Charts.svg(
        "svg",
        { class: `swatch line ${Charts.color(look.color)}`, width: 34, height: 14, viewBox: "0 0 34 14", "aria-hidden": "true" },
        Charts.svg("polyline", { points: "1,7 33,7", "stroke-dasharray": Charts.dash(look.dash) || null }),
        line.plain ? null : Charts.svg("path", { d: Charts.marker(look.marker, 3.6), transform: "translate(17,7)" }),
      );
      const button = Charts.html(
        "button",
        { type: "button", class: "key", "aria-pressed": hidden.has(line.name) ? "false" : "true", title: "Show or hide this line" },
        swatch,
        line.name,
      );
      button.addEventListener("click", () => {
        if (hidden.has(line.name)) hidden.delete(line.name);
        else hidden.add(line.name);
        redraw();
      });
      return button;
    });
  }

  function tabulate(data) {
    const digits = data.digits ?? 1;
    const rows = [...new Set(data.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const places = data.lines.map((line) => new Map(line.x.map((at, place) => [at, place])));
    return {
      columns: [data.x, ...data.lines.map((line) => line.name)],
      rows: rows.map((at) => [
        Charts.show(at, 3),
        ...data.lines.map((line, index) => {
          const place = places[index].get(at);
          if (place === undefined || line.mean[place] === null) return "-";
          const spread = line.std ? `(${Charts.fixed(line.std[place], digits)})` : "";
          return `${Charts.fixed(line.mean[place], digits)}${spread}${line.lost?.[place] ? `✗${line.lost[place]}` : ""}`;
        }),
      ]),
    };
  }

  function xTicks(first, last, width) {
    const found = Charts.ticks(first, last, Math.max(2, Math.floor(width / 90)));
    return Number.isInteger(first) && Number.isInteger(last) ? found.filter(Number.isInteger) : found;
  }

  /** Of what is counted there are no halves. */
  function yTicks(low, high, digits) {
    const found = Charts.ticks(low, high, 6);
    return digits === 0 ? found.filter(Number.isInteger) : found;
  }

  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  const minimum = (list) => list.reduce((a, b) => Math.min(a, b), Infinity);
  const maximum = (list) => list.reduce((a, b) => Math.max(a, b), -Infinity);
})();
