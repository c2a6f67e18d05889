"use strict";
/* The parts that views are made of: tables, controls, commands to copy, sentences. */
const Parts = {};

(() => {
  const { html } = Charts;
  const MARKS = { best: ["best", "the best mean"], within: ["≈", "not clearly different from the best"] };
  let count = 0;

  /** Return a table { caption, columns, rows, notes } of cells { text, mark?, note?, strong? }. */
  Parts.table = ({ caption, columns, rows, notes }) =>
    html(
      "div",
      { class: "results" },
      // Not the table's own caption: that would be cut off where a narrow screen scrolls the table.
      html("p", { class: "note" }, caption),
      html(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
        html(
          "table",
          { "aria-label": caption },
          html("thead", {}, html("tr", {}, columns.map((name) => html("th", { scope: "col" }, name)))),
          html("tbody", {}, rows.map((row) => html("tr", {}, row.map(cell)))),
        ),
      ),
      (notes || []).map((note) => html("p", { class: "note" }, note)),
    );

  function cell(content, place) {
    const mark = content.mark ? MARKS[content.mark] : null;
    return html(
      place ? "td" : "th",
      { scope: place ? null : "row", class: content.strong || content.mark === "best" ? "strong" : null },
      content.text,
      mark ? html("span", { class: `mark ${content.mark}`, title: mark[1] }, mark[0]) : null,
      content.note ? html("small", {}, content.note) : null,
    );
  }

  /** Return a labeled choice among [value, text] pairs; `changed(value)` hears of it. */
  Parts.choice = (label, options, changed, value) => {
    const id = `choice-${(count += 1)}`;
    const select = html("select", { id });
    const node = html("span", { class: "control" }, html("label", { for: id }, label), select);
    /** Offer other options; what was chosen stays so, where it still can be. */
    node.offer = (offered) => {
      const chosen = select.value;
      select.replaceChildren(...offered.map(([each, text]) => html("option", { value: each }, text)));
      if (offered.some(([each]) => each === chosen)) select.value = chosen;
    };
    node.offer(options);
    if (value !== undefined) select.value = value;
    select.addEventListener("change", () => changed(select.value));
    return node;
  };

  /** Return a labeled switch. */
  Parts.toggle = (label, on, changed) => {
    const id = `choice-${(count += 1)}`;
    const box = html("input", { type: "checkbox", id, checked: on });
    box.addEventListener("change", () => changed(box.checked));
    return html("span", { class: "control" }, box, html("label", { for: id }, label));
  };

  const PACE = 350;

  /** Return a labeled slider over named steps, at the last of them, and a button that walks it. */
  Parts.slider = (label, names, changed) => {
    const id = `choice-${(count += 1)}`;
    const input = html("input", { type: "range", id, min: 0, step: 1 });
    const said = html("output", { for: id });
    const button = html("button", { type: "button", class: "copy" }, "Play");
    const node = html("span", { class: "control wide" }, html("label", { for: id }, label), input, said, button);
    let steps = [];
    let walk = null;
    const say = () => {
      said.textContent = steps[Number(input.value)];
      input.setAttribute("aria-valuetext", steps[Number(input.value)]);
    };
    const go = (place) => { input.value = place; say(); changed(Number(input.value)); };
    const stop = () => { clearInterval(walk); walk = null; button.textContent = "Play"; };
    const step = () => {
      if (!node.isConnected || Number(input.value) >= steps.length - 1) stop();
      else go(Number(input.value) + 1);
    };
    /** Offer other steps: whoever stood at the last one stays at the last one. */
    node.offer = (offered) => {
      const before = steps[Number(input.value)];
      const follows = !steps.length || (!walk && Number(input.value) === steps.length - 1);
      steps = offered;
      input.max = steps.length - 1;
      input.disabled = button.disabled = steps.length < 2;
      // A step may be gone: rounds are thinned as a run goes on.
      const same = steps.indexOf(before);
      input.value = follows ? steps.length - 1 : same >= 0 ? same : input.value;
      say();
    };
    node.offer(names);
    input.addEventListener("input", () => { stop(); say(); changed(Number(input.value)); });
    button.addEventListener("click", () => {
      if (walk) { stop(); return; }
      if (Number(input.value) >= steps.length - 1) go(0);
      button.textContent = "Stop";
      walk = setInterval(step, PACE);
    });
    return node;
  };

  Parts.controls = (...controls) => html("div", { class: "controls" }, controls);

  /** Return a block under a heading that says what it shows. */
  Parts.block = (title, about, ...content) =>
    html(
      "section",
      { class: "block" },
      html("h3", {}, title),
      about ? html("p", { class: "about" }, about) : null,
      content,
    );

  /**
   * Return a block and how to draw it once it is on the page: only there a chart knows its width.
   * `update` takes newer data of the same kind; a view without it is made anew.
   */
  Parts.ready = (node, draw = () => {}, update = null) => ({ node, draw, update });

  Parts.sentence = (text, kind = "note") => html("p", { class: kind }, text);

  /** Return text to copy, with a button that does it. */
  Parts.copy = (text, label) => {
    const code = html("code", {}, text);
    const button = html("button", { type: "button", class: "copy" }, "Copy");
    const said = html("span", { class: "said", role: "status" });
    button.addEventListener("click", async () => {
      said.textContent = (await put(text, code)) ? "copied" : "selected: press Ctrl-C";
      setTimeout(() => { said.textContent = ""; }, 2500);
    });
    return html(
      "div",
      { class: "command" },
      html("p", { class: "about" }, label),
      html("pre", { tabindex: 0, "aria-label": label }, code),
      html("div", { class: "controls" }, button, said),
    );
  };

  /** Put a text on the clipboard; where a browser refuses, select it instead. */
  async function put(text, node) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const range = document.createRange();
      range.selectNodeContents(node);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      return false;
    }
  }
})();
