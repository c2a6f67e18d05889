"use strict";
/* Copying of commands and sorting of tables; everything else is plain HTML. */
(() => {
  /** Copy the command that stands next to a button. */
  async function copy(button) {
    const command = button.closest(".command");
    const said = command.querySelector(".said");
    try {
      await navigator.clipboard.writeText(command.querySelector("code").textContent);
      said.textContent = "Copied.";
    } catch {
      // Without permission the command is selected, ready to be copied by key.
      getSelection().selectAllChildren(command.querySelector("code"));
      said.textContent = "Selected; copy it with Ctrl-C.";
    }
  }

  /** Return the number that a cell begins with, or null. */
  function numberIn(cell) {
    const number = parseFloat(cell.textContent.replace(/^[▲≈]|,/g, ""));
    return Number.isNaN(number) ? null : number;
  }

  /** Sort the rows of a table by a column: numbers from the highest, then from the lowest. */
  function sort(head) {
    const table = head.closest("table");
    const place = Array.from(head.parentNode.children).indexOf(head);
    const order = head.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
    const sign = order === "descending" ? -1 : 1;
    const compare = (a, b) => {
      const [first, second] = [a, b].map((row) => row.children[place]);
      const [one, other] = [numberIn(first), numberIn(second)];
      if (one !== null && other !== null) return sign * (one - other);
      if (one !== null || other !== null) return one === null ? 1 : -1;
      return -sign * first.textContent.localeCompare(second.textContent, "en", { numeric: true });
    };
    for (const each of head.parentNode.children) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order);
    table.tBodies[0].append(...Array.from(table.tBodies[0].rows).sort(compare));
  }

  document.addEventListener("click", ({ target }) => {
    if (target.matches("button.copy")) copy(target);
    else if (target.matches(".sortable thead th")) sort(target);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.matches(".sortable thead th")) sort(event.target);
  });
  for (const head of document.querySelectorAll(".sortable thead th")) head.tabIndex = 0;
  document.documentElement.dataset.ready = "true";
})();
