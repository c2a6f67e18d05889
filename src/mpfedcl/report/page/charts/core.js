"use strict";
/*
 * Charts in plain SVG. `Charts.lines(element, data)` and its siblings draw into an element, again
 * whenever its width changes. Called again with other data they change the drawing and leave the
 * rest as it is: what is focused, switched off or opened stays so. All data come as plain values;
 * every text goes through text nodes, so that no name can become markup.
 *
 * Each chart takes { title, description } and has a table of its numbers to open.
 */
const Charts = {};

(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const frames = new WeakMap();

  // Signs that turn the direction of text would turn the words around a name as well.
  const plain = (_, value) => (typeof value === "string" ? value.replace(/[\u202a-\u202e\u2066-\u2069]/g, "\ufffd") : value);

  /** Return what a JSON text says. */
  Charts.parse = (text) => JSON.parse(text, plain);

  /** Make an HTML element; strings among the children become text. */
  Charts.html = (tag, attributes = {}, ...children) =>
    fill(document.createElement(tag), attributes, children);

  /** Make an SVG element. */
  Charts.svg = (tag, attributes = {}, ...children) =>
    fill(document.createElementNS(SVG, tag), attributes, children);

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      node.setAttribute(name, value === true ? "" : String(value));
    }
    for (const child of children.flat(Infinity)) {
      if (child !== null && child !== undefined) node.append(child);
    }
    return node;
  }

  /** Return a number with at most so many decimals, a dash for none. */
  Charts.show = (value, digits = 1) =>
    value === null || value === undefined
      ? "-"
      : value.toLocaleString("en", { maximumFractionDigits: digits });

  /** Return a number with exactly so many decimals, a dash for none. */
  Charts.fixed = (value, digits = 1) =>
    value === null || value === undefined
      ? "-"
      : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

  /** Return as much of a text as fits so many pixels of a chart's small print. */
  Charts.fit = (text, pixels) => {
    const signs = Array.from(text);
    const most = Math.max(2, Math.floor(pixels / 7.2));
    return signs.length <= most ? text : `${signs.slice(0, most - 1).join("")}…`;
  };

  /** Return round numbers from low to high, about `count` of them. */
  Charts.ticks = (low, high, count) => {
    const rough = (high - low || 1) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((each) => each * power >= rough * 0.999);
    const first = Math.ceil(low / step - 1e-9);
    const last = Math.floor(high / step + 1e-9);
    const found = [];
    for (let number = first; number <= last; number += 1) {
      found.push(Number((number * step).toPrecision(12)));
    }
    return found;
  };

  /** Return the range that holds the values and ends on round numbers. */
  Charts.range = (values, { low = -Infinity, high = Infinity } = {}) => {
    const known = values.filter((value) => Number.isFinite(value));
    if (!known.length) return [0, 1];
    let least = known.reduce((a, b) => Math.min(a, b));
    let most = known.reduce((a, b) => Math.max(a, b));
    if (least === most) {
      const package = Math.abs(least) * 0.1 || 1;
      [least, most] = [least - room, most + package];
    }
    const steps = Charts.ticks(least, most, 5);
    const step = steps.length > 1 ? steps[1] - steps[0] : most - least;
    return [
      Math.max(low, Math.floor(least / step + 1e-9) * step),
      Math.min(high, Math.ceil(most / step - 1e-9) * step),
    ];
  };

  /** Return the function that maps a domain onto pixels. */
  Charts.scale = ([from, to], [start, end]) => {
    const factor = to === from ? 0 : (end - start) / (to - from);
    return (value) => start + (value - from) * factor;
  };

  /** Return a star of so many points; a pentagon where it is as deep as its sides. */
  const star = (points, long, short) =>
    `M${Array.from({ length: 2 * points }, (_, k) => {
      const [far, turn] = [k % 2 ? short : long, (k * Math.PI) / points];
      return `${(far * Math.sin(turn)).toFixed(2)},${(-far * Math.cos(turn)).toFixed(2)}`;
    }).join("L")}z`;
  const SHAPES = [
    (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0z`,
    (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
    (r) => `M0,${-1.2 * r}L${1.15 * r},${0.9 * r}H${-1.15 * r}z`,
    (r) => `M0,${-1.35 * r}L${1.35 * r},0L0,${1.35 * r}L${-1.35 * r},0z`,
    (r) => `M0,${1.2 * r}L${1.15 * r},${-0.9 * r}H${-1.15 * r}z`,
    (r) => `M${-r},${-r / 3}h${(2 * r) / 3}v${(-2 * r) / 3}h${(2 * r) / 3}v${(2 * r) / 3}h${(2 * r) / 3}v${(2 * r) / 3}h${(-2 * r) / 3}v${(2 * r) / 3}h${(-2 * r) / 3}v${(-2 * r) / 3}h${(-2 * r) / 3}z`,
    (r) => star(5, r * 1.2, r * 1.2 * Math.cos(Math.PI / 5)),
    (r) => `M${-1.2 * r},0L${0.9 * r},${-1.15 * r}V${1.15 * r}z`,
    (r) => `M${1.2 * r},0L${-0.9 * r},${-1.15 * r}V${1.15 * r}z`,
    (r) => star(5, 1.5 * r, 0.6 * r),
  ];
  const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "12 4", "5 2 1 2 1 2"];

  /** Return the outline of the n-th marker, and the n-th dash pattern: color is never alone. */
  Charts.marker = (index, radius) => SHAPES[index % SHAPES.length](radius);
  Charts.dash = (index) => DASHES[index % DASHES.length];
  Charts.color = (index) => `color-${index % 10}`;
  /** Return the look of the n-th thing of a chart, unless it has one of its own, as methods have. */
  Charts.look = (style, index) => style || { color: index, marker: index, dash: index };
  /** A cross where a seed diverged. */
  Charts.cross = (x, y) => Charts.svg("path", { class: "lost", d: "M-4,-4L4,4M-4,4L4,-4", transform: `translate(${x.toFixed(1)},${y.toFixed(1)})` });

  /** Return the key of a method in a legend. */
  Charts.key = (name, look) => {
    const shape = Charts.svg("path", { d: Charts.marker(look.marker, 4.4), transform: "translate(8,7)" });
    return Charts.html("span", { class: "key" }, Charts.svg("svg", { class: `swatch line ${Charts.color(look.color)}`, width: 16, height: 14, viewBox: "0 0 16 14", "aria-hidden": "true" }, shape), name);
  };

  /**
   * Lay a chart out: caption, legend, drawing, table. `draw(width)` returns
   * { svg, spots, legend?, tall? }; spots are what pointer and arrow keys find.
   */
  Charts.frame = (element, data, draw, tabulate) => {
    let frame = frames.get(element);
    if (!frame || frame.figure.parentNode !== element) {
      frame?.observer.disconnect();
      frame = lay(element);
      frames.set(element, frame);
    }
    frame.title.textContent = data.title;
    frame.description.textContent = data.description || "";
    frame.show = (width, redraw) => {
      const made = draw(width, redraw);
      label(made.svg, data);
      return made;
    };
    frame.redraw(true);
    frame.tabulate(() => Charts.numbers({ caption: data.title, ...tabulate() }));
  };

  function lay(element) {
    const canvas = Charts.html("div", { class: "canvas" });
    const legend = Charts.html("div", { class: "legend" });
    const title = Charts.html("strong");
    const description = Charts.html("span");
    const table = numbers();
    const figure = Charts.html("figure", { class: "chart" }, Charts.html("figcaption", {}, title, description), legend, canvas, table.node);
    element.replaceChildren(figure);
    let drawn = 0;
    const frame = { figure, title, description, show: null, tabulate: table.fill };
    frame.redraw = (force) => {
      const width = Math.floor(canvas.clientWidth);
      if (width < 40 || (!force && width === drawn)) return;
      drawn = width;
      const made = frame.show(width, () => frame.redraw(true));
      canvas.classList.toggle("tall", Boolean(made.tall));
      refill(legend, made.legend || []);
      Charts.explore(canvas, made.svg, made.spots || []);
    };
    frame.observer = new ResizeObserver(() => frame.redraw(false));
    frame.observer.observe(canvas);
    return frame;
  }

  /** Replace what is in a node; where one of its children was focused, its successor is. */
  function refill(node, children) {
    const place = Array.from(node.children).indexOf(document.activeElement);
    node.replaceChildren(...children);
    if (place >= 0) node.children[place]?.focus({ preventScroll: true });
  }

  function label(svg, data) {
    svg.prepend(
      Charts.svg("title", {}, data.title),
      Charts.svg("desc", {}, data.description || data.title),
    );
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${data.title}. ${data.description || ""}`);
  }

  /** The numbers behind a chart; the table is made when somebody looks at it. */
  function numbers() {
    const place = Charts.html("div");
    const node = Charts.html("details", { class: "numbers" }, Charts.html("summary", {}, "Numbers of this chart"), place);
    let make = null;
    const build = () => {
      if (!node.open || !make) return;
      const top = place.firstChild?.scrollTop || 0;
      place.replaceChildren(make());
      place.firstChild.scrollTop = top;
      make = null;
    };
    node.addEventListener("toggle", build);
    return { node, fill: (next) => { make = next; build(); } };
  }

  /** Return a plain table { caption, columns, rows } in a box that scrolls by itself. */
  Charts.numbers = ({ caption, columns, rows }) =>
    Charts.html(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
      Charts.html(
        "table",
        { "aria-label": caption },
        Charts.html("thead", {}, Charts.html("tr", {}, columns.map((name) => Charts.html("th", { scope: "col" }, name)))),
        Charts.html(
          "tbody",
          {},
          rows.map((row) =>
            Charts.html(
              "tr",
              {},
              row.map((cell, place) =>
                place ? Charts.html("td", {}, String(cell)) : Charts.html("th", { scope: "row" }, String(cell)),
              ),
            ),
          ),
        ),
      ),
    );

  /** Return an empty drawing of a size in pixels. */
  Charts.canvas = (width, height) =>
    Charts.svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height });

  /** Draw axes with grid lines; ticks are [position, text] pairs. */
  Charts.axes = (svg, { left, right, top, bottom }, { x, y, xTicks, yTicks }) => {
    for (const [place, text] of yTicks) {
      svg.append(
        Charts.svg("line", { class: "grid", x1: left, x2: right, y1: place, y2: place }),
        Charts.svg("text", { class: "tick", x: left - 6, y: place + 4, "text-anchor": "end" }, text),
      );
    }
    for (const [place, text] of xTicks) {
      svg.append(
        Charts.svg("line", { class: "grid faint", x1: place, x2: place, y1: top, y2: bottom }),
        Charts.svg("text", { class: "tick", x: place, y: bottom + 16, "text-anchor": "middle" }, text),
      );
    }
    svg.append(
      Charts.svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
      Charts.svg("text", { class: "axis-title", x: (left + right) / 2, y: bottom + 34, "text-anchor": "middle" }, x),
      Charts.svg("text", { class: "axis-title", x: left, y: top - 10, "text-anchor": "start" }, y),
    );
  };
})();
