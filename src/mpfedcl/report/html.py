"""Pages in HTML: one file that holds everything and requests nothing, and the live page's blocks.

Text becomes markup only in `tag`, which escapes it: names from files stay text.
"""

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from importlib.resources import files

import numpy

from mpfedcl.core.json_files import Json
from mpfedcl.report.drawings import (
    clients_drawing,
    comparison_drawings,
    confusion_drawing,
    loss_drawing,
    map_drawing,
    metric_drawing,
    run_partition_drawing,
)
from mpfedcl.report.figures import Drawing
from mpfedcl.report.run import ALL_EQUAL, find_worst_client_and_class
from mpfedcl.report.wording import MARKS, fairness_sentence, printable_name

_MOST_MISTAKES = 6
_MARK_TITLES = {"best": "best mean", "within": "not clearly behind the best"}
_COST_AXES = {"megabytes": "By megabytes sent", "virtual_seconds": "By virtual time"}


class Markup(str):
    """HTML that needs no escaping."""

    __slots__ = ()


Content = Markup | str | None | Iterable["Content"]


def tag(name: str, *content: Content, **attributes: str | bool | None) -> Markup:
    """Return an element; text in it is escaped, None is left out.

    A trailing underscore of an attribute's name is dropped, others become hyphens.
    """
    opening = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        opening += f" {attribute}" + ("" if value is True else f'="{html.escape(str(value))}"')
    is_void = name in ("input", "img")
    return Markup(f"<{opening}>" if is_void else f"<{opening}>{join(content)}</{name}>")


def join(content: Content) -> Markup:
    """Return pieces of content as one."""
    if content is None:
        return Markup()
    if isinstance(content, Markup):
        return content
    if isinstance(content, str):
        # Characters that turn the direction of text would also turn the words around them.
        shown = (each if each.isprintable() or each == "\n" else "\ufffd" for each in content)
        return Markup(html.escape("".join(shown), quote=False))
    return Markup("".join(map(join, content)))


# Blocks: a heading with tables, figures, sentences and commands


def block(title: str, *content: Content, small: bool = False) -> Markup:
    """Return content under a heading; a small block needs half a row."""
    return tag("section", tag("h3", title), content, class_="block small" if small else "block")


def details(summary: str, *content: Content) -> Markup:
    """Return content that opens on request."""
    return tag("details", tag("summary", summary), content)


def sentence(text: str) -> Markup:
    """Return a sentence below, or in place of, a figure or table."""
    return tag("p", text, class_="note")


def show_table(table: Json) -> Markup:
    """Return a table of the report: caption, head, rows, notes."""
    caption = table["caption"]
    head = tag("tr", (tag("th", name, scope="col") for name in table["columns"]))
    rows = (tag("tr", map(_show_cell, row, range(len(row)))) for row in table["rows"])
    shown = tag(
        "table", tag("thead", head), tag("tbody", rows), aria_label=caption, class_="sortable"
    )
    return tag(
        "div",
        # Not a caption element, which would scroll with a wide table on a narrow screen.
        sentence(caption),
        tag("div", shown, class_="scroll", tabindex="0", role="region", aria_label=caption),
        sentence(" ".join(note for note in table["notes"] if note)),
        class_="results",
    )  # fmt: skip


def _show_cell(cell: Json, column: int) -> Markup:
    mark = cell.get("mark")
    return tag(
        "td" if column else "th",
        tag("span", MARKS[mark], class_="mark", title=_MARK_TITLES[mark]) if mark else None,
        cell["text"] + ("*" if cell.get("strong") else ""),
        tag("small", cell["note"]) if cell.get("note") else None,
        scope=None if column else "row",
        class_="strong" if cell.get("strong") or mark == "best" else None,
    )


def text_cells(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Json:
    """Return a table of the report whose cells are plain text."""
    cells = [[{"text": text} for text in row] for row in rows]
    return {"caption": caption, "columns": columns, "rows": cells, "notes": []}


def show_drawing(drawing: Drawing, *, titled: bool = True) -> Markup:
    """Return a figure with its title and note."""
    shown = [tag("img", src=address, alt=_on_one_line(text)) for text, address in drawing.images()]
    wide = "wide" if drawing.size[0] > 5.4 else "panel"
    return tag(
        "figure",
        tag(
            "figcaption",
            tag("strong", _on_one_line(drawing.title)) if titled else None,
            tag("span", _on_one_line(drawing.note)),
        ),
        tag("div", shown, class_="panels" if len(shown) > 1 else wide),
    )


def show_figure(drawing: Drawing, *content: Content) -> Markup:
    """Return a block under the title of its figure; a single small panel needs half a row."""
    small = len(drawing.panels) == 1 and drawing.size[0] <= 5.4
    figure = show_drawing(drawing, titled=False)
    return block(_on_one_line(drawing.title), figure, content, small=small)


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def show_command(command: str, how: str) -> Markup:
    """Return a command with a button that copies it."""
    controls = tag(
        "div",
        tag("span", how),
        tag("button", "Copy", type="button", class_="copy"),
        tag("span", "", class_="said", role="status"),
        class_="controls",
    )
    return tag("div", controls, tag("pre", tag("code", command)), class_="command")


# The blocks of a section


def section_blocks(section: Json) -> list[Markup]:
    """Return the blocks of a run, a comparison or a search."""
    tables = [show_table(table) for table in section["tables"] if not table.get("later")]
    result = [block("Result", tables)] if tables else []
    if section["kind"] == "tuning":
        return result + _search_blocks(section)
    groups, shown = section["groups"], section.get("details", [])
    parts = [*result, _show_rounds(groups)]
    found = comparison_drawings(groups, is_ranked=section.get("is_ranked", False))
    shown_above = ["accuracy", "accuracy-over-time"]
    if len(groups) == 1:
        # A bar per client says the same of one run.
        shown_above.append("clients")
    parts += [show_figure(each) for name, each in found.items() if name not in shown_above]
    if later := [show_table(table) for table in section["tables"] if table.get("later")]:
        parts.append(block("All predictors", details("Tables", later)))
    if not shown:
        return parts
    first = groups[0]["runs"][0]
    partition = run_partition_drawing(first)
    why = "The run has no partition.json."
    if first.privacy is not None:
        why = "Under a privacy budget the data of clients are not shown."
    parts.append(show_figure(partition) if partition else block("Partition", sentence(why)))
    if section["kind"] == "run":
        return parts + _run_blocks(shown[0])
    detailed = [
        details(
            f"{group['name']}, seed {group['seeds'][0]}",
            tag("div", _run_blocks(run), class_="flow"),
        )
        for group, run in zip(groups, shown, strict=False)
    ]
    about = "The first seed of each method. mpfedcl report RUN shows any other run."
    if len(groups) > len(shown):
        about += f" The first {len(shown)} methods are here."
    heading = tag("div", tag("h3", "Runs in detail"), sentence(about), class_="chooser")
    return [*parts, heading, tag("div", detailed, class_="runs-in-detail")]


def _search_blocks(section: Json) -> list[Markup]:
    parts = []
    for search in section["searches"]:
        drawn = show_drawing(search["figure"], titled=False) if search["figure"] else None
        parts.append(block(search["title"], show_table(search["table"]), drawn))
    return parts


def _show_rounds(groups: Sequence[Json]) -> Markup:
    """Return the primary metric per round, with loss, accuracy and costs on request."""
    folded = {"Training loss": loss_drawing(groups)}
    if {group["metric"] for group in groups} - {"accuracy"}:
        folded["Accuracy"] = metric_drawing(groups, metric="accuracy")
    for axis, title in _COST_AXES.items():
        costs = [curve for group in groups if (curve := group["curves"][axis])]
        if any(max(curve["mean"]) > 0 for curve in costs):
            folded[title] = metric_drawing(groups, axis)
    return show_figure(
        metric_drawing(groups),
        (
            details(title, show_drawing(drawing, titled=False))
            for title, drawing in folded.items()
            if drawing
        ),
    )


def _run_blocks(run: Json) -> list[Markup]:
    """Return the blocks of one run: clients and classes, confusion, prototypes, settings."""
    parts = [_show_clients(run), _show_confusion(run["confusion"])]
    if found := run.get("map"):
        missing = found.get("missing")
        parts.append(
            block("Prototype map", sentence(missing))
            if missing
            else show_figure(map_drawing(found))
        )
    return [*parts, _show_absences(run["absences"]), _show_settings(run["settings"])]


def _show_clients(run: Json) -> Markup:
    """Return accuracy by client and by class, and how it is spread."""
    notes = []
    if fairness := run["fairness"]:
        notes.append(f"Evaluated clients: {fairness['clients']:,}, mean {fairness['mean']:.1f} %.")
    if spread := fairness_sentence(run):
        notes.append(f"{spread[0].upper()}{spread[1:]}.")
    for noun, worst in zip(("client", "class"), find_worst_client_and_class(run), strict=True):
        if worst and worst["name"] != ALL_EQUAL:
            notes.append(f"Worst {noun}: {worst['name']} with {worst['accuracy']:.1f} %.")
    drawing = clients_drawing(run)
    return block(
        "Clients and classes",
        tag("p", " ".join(notes), class_="finding"),
        show_drawing(drawing) if drawing else sentence("No client is evaluated yet."),
    )


def _show_confusion(found: Json) -> Markup:
    """Return the confusion matrix and the most frequent mistakes."""
    if "missing" in found:
        return block("Confusion matrix", sentence(found["missing"]))
    classes, counts = found["classes"], found["all"]
    wrong = [
        (-count, *place)
        for place, count in numpy.ndenumerate(counts)
        if count and place[0] != place[1]
    ]
    rows = [
        (classes[truth], classes[predicted], f"{-count:,} of {sum(counts[truth]):,}")
        for count, truth, predicted in sorted(wrong)[:_MOST_MISTAKES]
    ]
    mistakes = text_cells("Most frequent mistakes", ["true class", "predicted as", "samples"], rows)
    shown = show_table(mistakes) if rows else sentence("No sample was predicted as another class.")
    matrix = tag("div", show_drawing(confusion_drawing(found), titled=False))
    return block("Confusion matrix", tag("div", matrix, tag("div", shown), class_="beside"))


def _show_absences(found: Json) -> Markup:
    """Return the updates that were rejected and the clients that did not answer."""
    title = "Rejected and missing clients"
    if not found["rows"]:
        return block(title, sentence("Every sampled client answered, and no update was rejected."))
    columns = ["client", "event", "reason", "times", "rounds"]
    rows = []
    for row in found["rows"]:
        span = f"{row['first']} to {row['last']}" if row["times"] > 1 else str(row["first"])
        rows.append((row["client"], row["what"], row["why"] or "-", str(row["times"]), span))
    more = f"{found['left_out']:,} more are left out." if found["left_out"] else ""
    table = text_cells("Clients whose update was not used", columns, rows)
    return block(title, show_table(table | {"notes": [more]}))


def _show_settings(settings: Json) -> Markup:
    """Return the command that reproduces a run, all its settings and its versions."""
    versions = ", ".join(f"{name} {value}" for name, value in settings["versions"].items())
    threads = f"; threads: {settings['threads']}" if settings["threads"] else ""
    return block(
        "Reproduce",
        show_command(settings["command"], "From experiment.toml, which holds every setting:"),
        details("All settings", tag("pre", tag("code", settings["toml"]), tabindex="0")),
        sentence(f"Versions: {versions}{threads}.") if versions else None,
    )


# The page


def render_page(document: Json) -> str:
    """Return the page of a document."""
    style, script = read_page_file("page.css"), read_page_file("page.js")
    sections = document["sections"]
    links = [
        tag(
            "li",
            tag("a", section["title"], href=f"#section-{place}"),
            tag("small", f" {section['folder']}") if section.get("folder") else None,
        )
        for place, section in enumerate(sections)
    ]
    alone = len(sections) == 1
    shown = [_show_section(each, place, alone=alone) for place, each in enumerate(sections)]
    parts = {
        "TITLE": tag("title", printable_name(str(document["title"]))),
        "POLICY": html.escape(_content_security_policy(style, script)),
        "STYLE": style,
        "TOP": join((
            tag("p", "mpfedcl report", class_="brand"),
            tag("h1", document["title"]),
            tag("nav", tag("ol", links), aria_label="Sections") if len(links) > 1 else None,
        )),
        "CONTENT": join(shown),
        "BOTTOM": tag(
            "p",
            f"mpfedcl {document['version']}. This file is self-contained. Accuracies are of the "
            "last round, not of the best one.",
        ),
        "SCRIPT": script,
    }  # fmt: skip
    # Split, not replaced one after the other: a name may itself look like a placeholder.
    pieces = read_page_file("page.html").split("@@")
    text = "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))
    return text.encode("utf-8", "replace").decode()


def _show_section(section: Json, place: int, *, alone: bool) -> Markup:
    return tag(
        "section",
        # A single section has the title of the page.
        tag("h2", section["title"], id_=f"heading-{place}", class_="unseen" if alone else None),
        (tag("p", each, class_="about") for each in section["about"] if each),
        tag("p", section["folder"], class_="folder") if section.get("folder") else None,
        tag("div", section_blocks(section), class_="flow"),
        class_="report",
        id_=f"section-{place}",
        aria_labelledby=f"heading-{place}",
    )


def read_page_file(name: str, package: str = "mpfedcl.report") -> str:
    """Return a file that pages are made of."""
    return (files(package) / "page" / name).read_text(encoding="utf-8")


def _content_security_policy(style: str, script: str) -> str:
    """Return a policy that allows only this style, this script and embedded images."""
    digests = [
        base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        for content in (script, style)
    ]
    return (
        f"default-src 'none'; script-src 'sha256-{digests[0]}'; style-src 'sha256-{digests[1]}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
