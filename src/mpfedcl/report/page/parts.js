"use strict";
/* The parts that views are made of: tables, controls, commands to copy, sentences. */
const Parts = {};

(() => {
  const { html } = Charts;
  const MARKS = { best: ["best", "the best mean"], within: ["≈", "cannot be told from the best"] };
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

  /** Return a labelled choice among [value, text] pairs; `changed(value)` hears of it. */
  Parts.choice = (label, options, changed, value) => {
    const id = `choice-${(count += 1)}`;
    const select = html("select", { id }, options.map(([each, text]) => html("option", { value: each }, text)));
    if (value !== undefined) select.value = value;
    select.addEventListener("change", () => changed(select.value));
    return html("span", { class: "control" }, html("label", { for: id }, label), select);
  };

  /** Return a labelled switch. */
  Parts.toggle = (label, on, changed) => {
    const id = `choice-${(count += 1)}`;
    const box = html("input", { type: "checkbox", id, checked: on });
    box.addEventListener("change", () => changed(box.checked));
    return html("span", { class: "control" }, box, html("label", { for: id }, label));
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

  /** Return a block and how to draw it once it is on the page: only there a chart knows its width. */
  Parts.ready = (node, draw = () => {}) => ({ node, draw });

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
