"use strict";
/*
 * Charts.bars(element, { title, description, unit, digits?, most?, parts, bars, reference? })
 * bars: [{ name, values: [one a part], note?, worst? }]; parts: names of what is stacked.
 * reference: { value, name } draws a line across. More than 40 bars stand side by side, unnamed.
 */
(() => {
  const ROW = 26;
  const MANY = 40;

  Charts.bars = (element, data) => {
    Charts.frame(
      element,
      data,
      (width) => (data.bars.length > MANY ? drawMany(data, width) : draw(data, width)),
      () => tabulate(data),
    );
  };

  const total = (bar) => bar.values.reduce((sum, value) => sum + (value || 0), 0);
  const highest = (data) => data.most ?? (Math.max(...data.bars.map(total), 0) || 1);

  function draw(data, width) {
    const longest = Math.max(0, ...data.bars.map((bar) => Array.from(bar.name).length));
    const left = Math.min(width * 0.36, 16 + longest * 7.4);
    const area = { left, right: width - 58, top: 12, bottom: 12 + data.bars.length * ROW };
    const svg = Charts.canvas(width, area.bottom + 30);
    const x = Charts.scale([0, highest(data)], [area.left, area.right]);
    for (const each of Charts.ticks(0, highest(data), Math.max(2, Math.floor(width / 130)))) {
      svg.append(
        Charts.svg("line", { class: "grid", x1: x(each), x2: x(each), y1: area.top, y2: area.bottom }),
        Charts.svg("text", { class: "tick", x: x(each), y: area.bottom + 16, "text-anchor": "middle" }, Charts.show(each, 3)),
      );
    }
    const spots = [];
    data.bars.forEach((bar, row) => {
      const y = area.top + row * ROW + 4;
      const height = ROW - 8;
      svg.append(
        Charts.svg("text", { class: bar.worst ? "tick strong" : "tick", x: area.left - 8, y: y + height / 2 + 4, "text-anchor": "end" }, Charts.fit(bar.name, left - 10)),
      );
      let start = 0;
      bar.values.forEach((value, part) => {
        if (value === null) return;
        const [from, to] = [x(start), x(start + value)];
        start += value;
        svg.append(
          Charts.svg("rect", { class: `bar ${kind(data, bar, part)}`, x: from, y, width: Math.max(to - from, value > 0 ? 1 : 0), height }),
        );
        spots.push({ x: (from + to) / 2, y: y + height / 2, row, box: [from, y - 4, Math.max(to - from, 6), ROW], text: say(data, bar, part) });
      });
    });
    mark(svg, data, x, area);
    data.bars.forEach((bar, row) => {
      const known = bar.values.some((value) => value !== null);
      const text = known ? Charts.fixed(total(bar), data.digits ?? 1) : "not read";
      svg.append(Charts.svg("text", { class: "value", x: x(total(bar)) + 6, y: area.top + (row + 0.5) * ROW + 4 }, text));
    });
    return { svg, spots, legend: legend(data) };
  }

  function drawMany(data, width) {
    const height = 220;
    const area = { left: 46, right: width - 10, top: 26, bottom: height - 42 };
    const svg = Charts.canvas(width, height);
    const y = Charts.scale([0, highest(data)], [area.bottom, area.top]);
    Charts.axes(svg, area, {
      x: "from the lowest to the highest",
      y: data.unit,
      xTicks: [],
      yTicks: Charts.ticks(0, highest(data), 5).map((each) => [y(each), Charts.show(each, 3)]),
    });
    const ordered = [...data.bars].filter((bar) => bar.values[0] !== null).sort((a, b) => total(a) - total(b));
    const step = (area.right - area.left) / Math.max(1, ordered.length);
    const spots = ordered.map((bar, place) => {
      const left = area.left + place * step;
      const top = y(total(bar));
      svg.append(
        Charts.svg("rect", { class: `bar ${kind(data, bar, 0)}`, x: left, y: top, width: Math.max(1, step - (step > 3 ? 1 : 0)), height: Math.max(1, area.bottom - top) }),
      );
      return { x: left + step / 2, y: top, row: 0, radius: 2, box: [left, area.top, step, area.bottom - area.top], text: say(data, bar, 0) };
    });
    if (data.reference) {
      const at = y(data.reference.value);
      svg.append(Charts.svg("line", { class: "reference", x1: area.left, x2: area.right, y1: at, y2: at }));
    }
    return { svg, spots, legend: legend(data) };
  }

  function kind(data, bar, part) {
    if (data.parts.length > 1) return `${Charts.color(part)} texture-${part % 4}`;
    return bar.worst ? "worst" : "plain";
  }

  function say(data, bar, part) {
    const value = `${Charts.fixed(bar.values[part], data.digits ?? 1)} ${data.unit}`;
    const lines = [bar.name, data.parts.length > 1 ? `${data.parts[part]}: ${value}` : value];
    return bar.note ? [...lines, bar.note] : lines;
  }

  function mark(svg, data, x, area) {
    if (!data.reference) return;
    const at = x(data.reference.value);
    svg.append(Charts.svg("line", { class: "reference", x1: at, x2: at, y1: area.top - 4, y2: area.bottom }));
  }

  function legend(data) {
    const keys = data.parts.length > 1
      ? data.parts.map((name, part) => key(Charts.svg("rect", { class: `bar ${Charts.color(part)}`, width: 14, height: 12, y: 1 }), name))
      : [];
    if (data.reference) {
      const line = Charts.svg("line", { class: "reference", x1: 7, x2: 7, y1: 0, y2: 14 });
      keys.push(key(line, `${data.reference.name} ${Charts.fixed(data.reference.value)}`));
    }
    return keys;
  }

  function key(shape, name) {
    const swatch = Charts.svg("svg", { class: "swatch", width: 16, height: 14, viewBox: "0 0 16 14", "aria-hidden": "true" }, shape);
    return Charts.html("span", { class: "key" }, swatch, name);
  }

  function tabulate(data) {
    const several = data.parts.length > 1;
    return {
      columns: ["", ...data.parts.map((name) => `${name} (${data.unit})`), ...(several ? ["total"] : [])],
      rows: data.bars.map((bar) => [
        bar.name,
        ...bar.values.map((value) => Charts.fixed(value, data.digits ?? 1)),
        ...(several ? [Charts.fixed(total(bar), data.digits ?? 1)] : []),
      ]),
    };
  }
})();
