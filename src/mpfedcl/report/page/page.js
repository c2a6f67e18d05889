"use strict";
/* The report: reads the document that stands in the page and lays its sections out. */
(() => {
  const { html } = Charts;
  const report = Charts.parse(document.getElementById("document").textContent);
  const main = document.getElementById("content");

  function show(node, views) {
    for (const view of views) node.append(view.node);
    for (const view of views) view.draw();
  }

  function heading(section, place) {
    // One section alone has the page's title already.
    return [
      html("h2", { id: `heading-${place}`, class: report.sections.length > 1 ? null : "unseen" }, section.title),
      section.about.filter(Boolean).map((each) => html("p", { class: "about" }, each)),
      section.folder ? html("p", { class: "folder" }, section.folder) : null,
    ];
  }

  function open(section, place) {
    const node = html("section", { class: "report", id: `section-${place}`, "aria-labeledby": `heading-${place}` }, heading(section, place));
    main.append(node);
    const results = section.tables.filter((table) => !table.later).map(Parts.table);
    if (results.length) node.append(Parts.block("Result", null, results));
    if (section.kind === "tuning") tuning(node, section);
    else runs(node, section);
  }

  function tuning(node, section) {
    for (const { title, table, figure } of section.searches) {
      const chart = html("div");
      node.append(Parts.block(title, null, Parts.table(table), chart));
      if (figure) Charts.lines(chart, { ...figure, x: "round", y: "validation accuracy (%)", low: 0, high: 100 });
    }
    if (section.command) node.append(Parts.block("Run it again", null, Parts.copy(section.command, "In one command:")));
  }

  function runs(node, section) {
    const groups = section.groups.map((place) => report.groups[place]);
    const more = groups.length > 1;
    show(node, [
      Views.rounds(groups),
      more ? Views.seeds(groups) : null,
      section.differences ? Views.differences(groups, section.differences) : null,
      Views.cost(groups),
      more ? Views.worth(groups) : null,
      section.heat ? Views.clientHeat(groups, section.heat) : null,
      Views.reliability(groups),
    ].filter(Boolean));
    const later = section.tables.filter((table) => table.later).map(Parts.table);
    if (later.length) node.append(Parts.block("All predictors", null, later));
    if (section.command) node.append(Parts.block("Run it again", null, Parts.copy(section.command, "The whole comparison in one command:")));
    if (section.detail) closer(node, groups);
  }

  /** One run of a section in detail; where there are several, one is chosen. */
  function closer(node, groups) {
    const places = groups.flatMap((group) => group.runs.map((place, index) => [String(place), `${group.name}, seed ${group.seeds[index]}`]));
    const space = html("div", { class: "closer" });
    const draw = (place) => {
      const run = report.runs[Number(place)];
      const views = [Views.behind, Views.confusion, Views.partition, Views.map, Views.absences, Views.settings].map((view) => view(run));
      const chosen = places.find(([each]) => each === place)[1];
      space.replaceChildren(places.length > 1 ? html("p", { class: "chosen" }, `Shown: ${chosen}`) : "");
      show(space, views);
    };
    if (places.length > 1) {
      node.append(
        html("div", { class: "chooser" }, html("h3", {}, "A closer look at one run"), Parts.controls(Parts.choice("Run", places, draw))),
      );
    }
    node.append(space);
    draw(places[0][0]);
  }

  function frame() {
    const links = report.sections.map((section, place) => html("li", {}, html("a", { href: `#section-${place}` }, section.title), section.folder ? html("small", {}, ` ${section.folder}`) : null));
    document.getElementById("top").append(
      html("p", { class: "brand" }, "mpfedcl report"),
      html("h1", {}, report.title),
      links.length > 1 ? html("nav", { "aria-label": "Sections" }, html("ol", {}, links)) : "",
    );
    document.getElementById("bottom").append(
      html("p", {}, `Made by mpfedcl ${report.version}. Everything is in this one file; it loads nothing from the network. Accuracies are of the last round, never of the best one.`),
    );
  }

  frame();
  report.sections.forEach(open);
  document.documentElement.dataset.ready = "true";
})();
