"""Pages in HTML: one file that holds everything and requests nothing, and the live page's parts.

Text becomes markup only in `tag`, which escapes it: names from files stay text.
"""

import base64
import hashlib
import html
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import chain

from mpfedcl.core.json_files import Json
from mpfedcl.report.comparison_figures import (
    comparison_drawings,
    differences_drawing,
    reliability_drawing,
)
from mpfedcl.report.figures import DARK_COLORS, FIGURE_ID, Drawing, Panel
from mpfedcl.report.formatting import printable_name
from mpfedcl.report.run_figures import (
    accuracy_drawing,
    classes_drawing,
    clients_drawing,
    confusion_drawing,
    costs_drawing,
    draw_lines,
    loss_drawing,
    map_drawing,
    partition_drawing,
)
from mpfedcl.report.tables import MARKS

_MOST_DETAILED = 12
"""Runs that a comparison shows in detail: one per method."""
_MOST_MISTAKES = 6
_MARK_TITLES = {"best": "best mean", "within": "not clearly behind the best"}


class Markup(str):
    """HTML that needs no escaping."""

    __slots__ = ()


Content = Markup | str | None | Iterable["Content"]


def tag(name: str, *content: Content, **attributes: str | bool | None) -> Markup:
    """Return an element; text in it is escaped, None is left out.

    A trailing underscore of an attribute's name is dropped, others become hyphens.
    """
    words = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        quoted = "" if value is True else f'="{html.escape(str(value), quote=True)}"'
        words.append(f" {attribute}{quoted}")
    opening = f"<{name}{''.join(words)}>"
    return Markup(opening if name == "input" else f"{opening}{join(*content)}</{name}>")


def join(*content: Content) -> Markup:
    """Return pieces of content as one."""
    return Markup("".join(map(_to_markup, content)))


def _to_markup(content: Content) -> str:
    if content is None:
        return ""
    if isinstance(content, Markup):
        return content
    if isinstance(content, str):
        # Characters that turn the direction of text would turn the words around them too.
        shown = "".join(
            each if each.isprintable() or each == "\n" else "\ufffd" for each in content
        )
        return html.escape(shown, quote=False)
    return "".join(map(_to_markup, content))


# Elements


def show_table(table: Json) -> Markup:
    """Return a table of the report: caption, head, rows, notes."""
    caption = table["caption"]
    head = tag("tr", (tag("th", name, scope="col") for name in table["columns"]))
    rows = (
        tag("tr", (_show_cell(cell, place) for place, cell in enumerate(row)))
        for row in table["rows"]
    )
    return tag(
        "div",
        # Not the table's own caption: a narrow screen that scrolls the table would cut it off.
        tag("p", caption, class_="note"),
        tag(
            "div",
            tag(
                "table",
                tag("thead", head),
                tag("tbody", rows),
                aria_label=caption,
                class_="sortable",
            ),
            class_="scroll",
            tabindex="0",
            role="region",
            aria_label=caption,
        ),
        tag("p", " ".join(note for note in table["notes"] if note), class_="note"),
        class_="results",
    )


def _show_cell(cell: Json, place: int) -> Markup:
    mark = cell.get("mark")
    strong = "strong" if cell.get("strong") or mark == "best" else None
    return tag(
        "td" if place else "th",
        tag("span", MARKS[mark], class_="mark", title=_MARK_TITLES[mark]) if mark else None,
        cell["text"] + ("*" if cell.get("strong") else ""),
        tag("small", cell["note"]) if cell.get("note") else None,
        scope=None if place else "row",
        class_=strong,
    )


def show_drawing(drawing: Drawing, *, titled: bool = True) -> Markup:
    """Return a figure with its title and note; panels beyond those shown at once are folded."""
    drawn = [Markup(each) for each in drawing.svgs()]
    shown, folded = drawn[: drawing.shown], drawn[drawing.shown or len(drawn) :]
    wide = "wide" if drawing.size[0] > 5.4 else "panel"
    return tag(
        "figure",
        tag(
            "figcaption",
            tag("strong", printable(drawing.title)) if titled else None,
            tag("span", printable(drawing.note)),
        ),
        tag("div", shown, class_="panels" if len(shown) > 1 else wide),
        details(drawing.panels[-1].title, tag("div", folded, class_="panels")) if folded else None,
    )


def figure_block(drawing: Drawing, *content: Content, key: str | None = None) -> Markup:
    """Return a block under the title of its figure; a single small panel needs half a row."""
    small = len(drawing.panels) == 1 and drawing.size[0] <= 5.4
    figure = show_drawing(drawing, titled=False)
    return block(printable(drawing.title), figure, *content, key=key, small=small)


def printable(text: str) -> str:
    """Return a text of several sentences on one line."""
    return " ".join(text.split())


def details(summary: str, *content: Content) -> Markup:
    """Return content that opens on request."""
    return tag("details", tag("summary", summary), *content)


def block(title: str, *content: Content, key: str | None = None, small: bool = False) -> Markup:
    """Return a block under a heading; `key` identifies it on the live page."""
    name = "block small" if small else "block"
    shown = tag("section", tag("h3", title), *content, class_=name, id_=key)
    return number_figures(shown, key) if key else shown


def number_figures(shown: str, prefix: str) -> Markup:
    """Return markup in which the identifiers of each figure begin with the prefix and a number."""
    pieces = shown.split("<svg ")
    numbered = [each.replace(FIGURE_ID, f"{prefix}-{n}-") for n, each in enumerate(pieces)]
    return Markup("<svg ".join(numbered))


def sentence(text: str) -> Markup:
    """Return a sentence that stands in place of a figure or table."""
    return tag("p", text, class_="note")


def show_command(command: str, how: str) -> Markup:
    """Return a command with a button that copies it."""
    button = tag("button", "Copy", type="button", class_="copy")
    return tag(
        "div",
        tag(
            "div",
            tag("span", how),
            button,
            tag("span", "", class_="said", role="status"),
            class_="controls",
        ),
        tag("pre", tag("code", command)),
        class_="command",
    )


def _drawings(*several: Drawing | None) -> list[Markup]:
    return [show_drawing(each) for each in several if each is not None]


# Parts of sections


def show_rounds(groups: Sequence[Json], *, key: str | None = None) -> Markup:
    """Return accuracy per round, with loss and accuracy by costs on request."""
    loss = loss_drawing(groups)
    axes = [
        axis
        for axis in ("megabytes", "virtual_seconds")
        if any(max(group["costs_by_round"].get(axis) or [0]) > 0 for group in groups)
    ]
    return figure_block(
        accuracy_drawing(groups),
        details("Training loss", show_drawing(loss, titled=False)) if loss else None,
        (
            details(
                "By megabytes sent" if axis == "megabytes" else "By virtual time",
                show_drawing(accuracy_drawing(groups, axis), titled=False),
            )
            for axis in axes
        ),
        key=key,
    )


def show_costs(groups: Sequence[Json], *, key: str | None = None) -> Markup:
    """Return seconds by phase and traffic."""
    drawing = costs_drawing(groups)
    if drawing is None:
        return block("Time and traffic", sentence("No round is done yet."), key=key)
    return figure_block(drawing, key=key)


def show_run(run: Json) -> list[Markup]:
    """Return the blocks of one run: clients and classes, confusion, prototypes, settings."""
    return [
        show_clients(run),
        show_confusion(run),
        *([show_map(run["map"])] if "map" in run else []),
        show_absences(run),
        show_settings(run["settings"]),
    ]


def show_clients(run: Json, *, key: str | None = None) -> Markup:
    """Return accuracy by client and by class, and how it is spread."""
    told = []
    worst_client = _find_lowest(run["clients"])
    if fairness := run["fairness"]:
        told.append(
            f"Mean {fairness['mean']:.1f} % over {fairness['clients']:,} clients, standard deviation "
            f"{fairness['std']:.1f} (ddof 1), worst tenth {fairness['worst_decile']:.1f} %, Jain's "
            f"index {fairness['jain']:.3f}."
            if fairness["clients"] > 1
            else f"One client was evaluated: {fairness['mean']:.1f} %."
        )
        if quartiles := fairness.get("quartiles"):
            told.append("Quartiles {:.1f} %, {:.1f} %, {:.1f} %.".format(*quartiles))
    if worst_client:
        told.append(f"Worst client: {worst_client['name']} with {worst_client['accuracy']:.1f} %.")
    tested = [each for each in run["confusion"].get("by_class", ()) if each["tested"]]
    if worst_class := _find_lowest(tested):
        told.append(f"Worst class: {worst_class['name']} with {worst_class['accuracy']:.1f} %.")
    drawn = _drawings(clients_drawing(run), classes_drawing(run))
    return block(
        "Clients and classes",
        tag("p", " ".join(told), class_="finding") if told else None,
        tag("div", drawn, class_="pair") if drawn else sentence("No client is evaluated yet."),
        key=key,
    )


def _find_lowest(rows: Sequence[Json]) -> Json | None:
    known = [each for each in rows if each["accuracy"] is not None]
    if len({each["accuracy"] for each in known}) < 2:
        return None
    return min(known, key=lambda each: each["accuracy"])


def show_confusion(run: Json, *, key: str | None = None) -> Markup:
    """Return the confusion matrix and the most frequent mistakes."""
    found = run["confusion"]
    if "missing" in found:
        return block("Confusion matrix", sentence(found["missing"]), key=key)
    classes, counts = found["classes"], found["all"]
    wrong = sorted(
        (
            (-count, truth, said)
            for truth, row in enumerate(counts)
            for said, count in enumerate(row)
            if count and truth != said
        ),
    )
    items = [
        tag(
            "li",
            tag("strong", classes[truth]),
            " predicted as ",
            tag("strong", classes[said]),
            tag("small", f"{-count:,} of {sum(counts[truth]):,}"),
        )
        for count, truth, said in wrong[:_MOST_MISTAKES]
    ]
    mistakes = (
        [tag("p", tag("strong", "Most frequent mistakes")), tag("ol", items)]
        if items
        else [sentence("No sample was predicted as another class.")]
    )
    matrix = tag("div", show_drawing(confusion_drawing(found), titled=False))
    beside = tag("div", matrix, tag("div", mistakes), class_="beside")
    return block("Confusion matrix", beside, key=key)


def show_map(found: Json, *, key: str | None = None) -> Markup:
    """Return the prototype map."""
    if "missing" in found:
        return block("Prototype map", sentence(found["missing"]), key=key)
    return figure_block(map_drawing(found), key=key)


def show_partition(run: Json, *, key: str | None = None) -> Markup:
    """Return the training samples of each client and class."""
    held = run["partition"]
    if "missing" in held:
        return block("Partition", sentence(held["missing"]), key=key)
    clients = {each["name"]: each for each in held["clients"]}
    drawing = partition_drawing(held | {"clients": clients}, f"Partition: {run['setting']}")
    return figure_block(drawing, key=key)


def show_absences(run: Json, *, key: str | None = None) -> Markup:
    """Return the updates that were rejected and the clients that did not answer."""
    rows, left_out = run["absences"]["rows"], run["absences"]["left_out"]
    title = "Rejected and missing clients"
    if not rows:
        return block(
            title, sentence("Every sampled client answered, and no update was rejected."), key=key
        )
    table = {
        "caption": "Clients whose update was not used",
        "columns": ["client", "event", "reason", "times", "rounds"],
        "rows": [
            [
                {"text": text}
                for text in (
                    row["client"],
                    row["what"],
                    row["why"] or "-",
                    str(row["times"]),
                    str(row["first"])
                    if row["first"] == row["last"]
                    else f"{row['first']} to {row['last']}",
                )
            ]
            for row in rows
        ],
        "notes": [f"{left_out:,} more are left out."] if left_out else [],
    }
    return block(title, show_table(table), key=key)


def show_settings(settings: Json, *, key: str | None = None) -> Markup:
    """Return the commands that reproduce a run, all its settings and its versions."""
    versions = ", ".join(f"{name} {value}" for name, value in settings["versions"].items())
    threads = settings["threads"]
    unit = "thread" if threads == 1 else "threads"
    file = f"{'Or from' if settings['command'] else 'From'} experiment.toml, which holds every setting:"
    return block(
        "Reproduce",
        show_command(settings["command"], settings["how"]) if settings["command"] else None,
        show_command(settings["file_command"], file),
        details("All settings", tag("pre", tag("code", settings["toml"]), tabindex="0")),
        sentence(f"Versions: {versions}{f'; {threads} {unit}' if threads else ''}.")
        if versions
        else None,
        key=key,
    )


# Sections


def _show_section(section: Json, document: Json, place: int) -> Markup:
    alone = len(document["sections"]) == 1
    tables = [show_table(table) for table in section["tables"] if not table.get("later")]
    is_search = section["kind"] == "tuning"
    body = _show_tuning(section) if is_search else _show_runs(section, document)
    return tag(
        "section",
        # A single section has the title of the page.
        tag("h2", section["title"], id_=f"heading-{place}", class_="unseen" if alone else None),
        (tag("p", each, class_="about") for each in section["about"] if each),
        tag("p", section["folder"], class_="folder") if section.get("folder") else None,
        tag("div", block("Result", tables) if tables else None, body, class_="flow"),
        class_="report",
        id_=f"section-{place}",
        aria_labelledby=f"heading-{place}",
    )


def _show_runs(section: Json, document: Json) -> list[Markup]:
    groups = [document["groups"][place] for place in section["groups"]]
    runs = document["runs"]
    parts = [show_rounds(groups)]
    if len(groups) > 1:
        parts += _show_differences(groups, section)
    elif (reliability := reliability_drawing(groups)) is not None:
        parts.append(figure_block(reliability))
    parts.append(show_costs(groups))
    later = [show_table(table) for table in section["tables"] if table.get("later")]
    if later:
        parts.append(block("All predictors", details("Tables", later)))
    if section.get("command"):
        parts.append(block("Reproduce", show_command(section["command"], "The whole comparison:")))
    if not section.get("detail"):
        return parts
    firsts = [group["runs"][0] for group in groups]
    if section["kind"] == "run":
        run = runs[firsts[0]]
        return [*parts, show_partition(run), *show_run(run)]
    parts.append(show_partition(runs[firsts[0]]))
    detailed = [
        details(
            f"{group['name']}, seed {group['seeds'][0]}",
            tag("div", show_run(runs[group["runs"][0]]), class_="flow"),
        )
        for group in groups[:_MOST_DETAILED]
    ]
    more = "" if len(groups) <= _MOST_DETAILED else f" The first {_MOST_DETAILED} methods are here."
    about = f"The first seed of each method. mpfedcl report RUN shows any other run.{more}"
    heading = tag("div", tag("h3", "Runs in detail"), sentence(about), class_="chooser")
    return [*parts, heading, tag("div", detailed, class_="runs-in-detail")]


def _show_differences(groups: Sequence[Json], section: Json) -> list[Markup]:
    parts = []
    for name, drawing in comparison_drawings(groups, section).items():
        if name.startswith("accuracy"):
            continue
        best = None
        if name == "differences":
            found = differences_drawing(groups, section, "best")
            best = details("Differences to the best mean", show_drawing(found))
        parts.append(figure_block(drawing, best))
    return parts


def _show_tuning(section: Json) -> list[Markup]:
    parts = []
    for search in section["searches"]:
        figure = search["figure"]
        drawn = None
        if figure:
            axes = {"x": "round", "y": "validation accuracy (%)", "lines": figure["lines"]}
            drawn = show_drawing(_lines_drawing(figure["title"], figure["description"], axes))
        parts.append(block(search["title"], show_table(search["table"]), drawn))
    if section["command"]:
        parts.append(block("Reproduce", show_command(section["command"], "In one command:")))
    return parts


def _lines_drawing(title: str, note: str, figure: Json) -> Drawing:
    x, y, lines = figure["x"], figure["y"], figure["lines"]
    percent = "%" in y

    def draw(axes: object) -> None:
        draw_lines(axes, lines, x=x, y=y, percent=percent)  # type: ignore[arg-type]

    return Drawing(title, note, [Panel(draw)], (6.4, 3.6), legend=True)


# The page


def render_page(document: Json) -> str:
    """Return the page of a document."""
    style, script = page_style(), read_page_file("page.js")
    links = [
        tag(
            "li",
            tag("a", section["title"], href=f"#section-{place}"),
            tag("small", f" {section['folder']}") if section.get("folder") else None,
        )
        for place, section in enumerate(document["sections"])
    ]
    parts = {
        "TITLE": tag("title", printable_name(str(document["title"]))),
        "POLICY": html.escape(_content_security_policy(style, script)),
        "STYLE": style,
        "TOP": join(
            tag("p", "mpfedcl report", class_="brand"),
            tag("h1", document["title"]),
            tag("nav", tag("ol", links), aria_label="Sections") if len(links) > 1 else None,
        ),
        "CONTENT": number_figures(
            join(
                _show_section(section, document, place)
                for place, section in enumerate(document["sections"])
            ),
            "figure",
        ),
        "BOTTOM": tag(
            "p",
            f"mpfedcl {document['version']}. This file is self-contained. Accuracies are of the last "
            "round, not of the best one.",
        ),
        "SCRIPT": script,
    }
    # Split, not replaced one after the other: a name may itself look like a placeholder.
    pieces = read_page_file("page.html").split("@@")
    text = "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))
    return text.encode("utf-8", "replace").decode()


def page_style() -> str:
    """Return the rules of a page, with the colors of figures on a dark one."""
    return read_page_file("page.css").replace("/* DARK FIGURES */", _dark_rules(DARK_COLORS))


def _dark_rules(colors: Mapping[str, str]) -> str:
    return "\n".join(
        chain.from_iterable(
            (
                f'  figure [fill="{light}"] {{ fill: {dark}; }}',
                f'  figure [stroke="{light}"] {{ stroke: {dark}; }}',
            )
            for light, dark in colors.items()
        )
    )


def read_page_file(name: str, package: str = "mpfedcl.report") -> str:
    """Return a file that pages are made of."""
    return (files(package) / "page" / name).read_text(encoding="utf-8")


def _content_security_policy(style: str, script: str) -> str:
    """Return a policy that allows only this style, this script and embedded images."""
    rules = []
    for name, content in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        rules.append(f"{name} 'sha256-{digest}'")
    rules.append("img-src data:")
    return "; ".join(["default-src 'none'", *rules, "base-uri 'none'", "form-action 'none'"])
