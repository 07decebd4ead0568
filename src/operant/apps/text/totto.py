"""ToTTo (arXiv:2004.14373): a table with highlighted cells, and sentences that describe these.

The prompt is the text of the highlighted cells with their headers, as the baseline of its authors and RL4LMs have it:

<page_title> T </page_title> <section_title> S </section_title> <table> <cell> 15.3 <col_header> PPG </col_header>
<row_header> 2010-11 </row_header> </cell> </table>
"""

from collections.abc import Mapping
from typing import Any

from operant.data.forms import Row, found_in, texts_in
from operant.types import OperantError, shown

TITLES = ("page_title", "section_title")


def totto(row: Row, *, whole: bool = False, titles: bool = True, repeat: bool = False, cue: str = "\n") -> Row:
    """ToTTo: a linearised table, and the sentences of its annotators as references.

    The target is the row without these: its table, highlighted_cells and titles, as the reward `parent` reads them, and
    `overlap`, whether the row is of the subset whose headers also occur in the training set (null: not published).

    whole: the whole table, with its highlighted cells marked, and not the highlighted cells alone. titles: those of
    page and section stand before the table. repeat: the table without titles stands before that with titles (RL4LMs).
    """
    table, chosen = checked(found_in(row, ("table",)), found_in(row, ("highlighted_cells",)))
    if not chosen and not whole:
        raise OperantError("no cell is highlighted, so there is nothing to describe; read the table: --form.whole true")
    above = [f"<{name}> {row[f'table_{name}']} </{name}>" for name in TITLES if row.get(f"table_{name}")]
    parts = [] if whole else [cell_text(table, i, j, "cell") for i, j in chosen]
    for i, cells in enumerate(table if whole else ()):
        marks = ["highlighted_cell" if (i, j) in chosen else "cell" for j in range(len(cells))]
        parts.append(f"<row> {' '.join(cell_text(table, i, j, mark) for j, mark in enumerate(marks))} </row>")
    text = f"<table> {' '.join(parts)} </table>"
    notes = row.get("sentence_annotations") or {}  # a list of mappings, or on the Hub a mapping of lists
    final = notes if isinstance(notes, Mapping) else {"final_sentence": [note.get("final_sentence") for note in notes]}
    overlap = str(row.get("overlap_subset", "")).lower()  # on the Hub a text
    known = {name: row[name] for name in row if name.startswith("table") or name == "highlighted_cells"}
    return {
        "prompt": " ".join([text] * repeat + above * titles + [text]),
        "cue": cue,
        "references": texts_in(final, ("final_sentence",)),
        "target": known | {"overlap": {"true": True, "false": False}.get(overlap)},
    }


def checked(table: object, chosen: Any) -> tuple[list[list[Row]], list[tuple[int, int]]]:
    """The rows of a table, and the places of its highlighted cells."""
    if not isinstance(table, (list, tuple)) or not all(isinstance(cells, (list, tuple)) for cells in table):
        raise OperantError(f"the table cannot be linearised: it is {shown(table)} and not a list of rows")
    for number, cell in ((number, cell) for number, cells in enumerate(table) for cell in cells):
        span = cell.get("column_span", 1) if isinstance(cell, Mapping) else None
        if span is None or not isinstance(cell.get("value"), str) or not isinstance(span, int) or span < 1:
            raise OperantError(
                f"the table cannot be linearised: in its row {number + 1} stands {shown(cell)}, and a cell has a text "
                "as value, and a column_span of at least 1"
            )
    places = list[tuple[int, int]]()
    for place in chosen:
        known = isinstance(place, (list, tuple)) and len(place) == 2 and all(isinstance(x, int) for x in place)
        if not known or not 0 <= place[0] < len(table) or not 0 <= place[1] < len(table[place[0]]):
            raise OperantError(
                f"the table cannot be linearised: the highlighted cell {shown(place)} is not in the table of "
                f"{len(table)} rows"
            )
        places.append((place[0], place[1]))
    return [list(cells) for cells in table], places


def cell_text(table: list[list[Row]], i: int, j: int, mark: str) -> str:
    """A cell with its headers: those above it that share a column, and those to its left in its row."""
    begin, end = columns(table[i])[j]
    above = [cell for cells in table[:i] for cell, (a, b) in zip(cells, columns(cells)) if a < end and b > begin]
    headers = [("col_header", cell) for cell in above] + [("row_header", cell) for cell in table[i][:j]]
    parts = [f"<{name}> {cell['value']} </{name}> " for name, cell in headers if cell.get("is_header")]
    return f"<{mark}> {table[i][j]['value']} {''.join(parts)}</{mark}>"


def columns(cells: list[Row]) -> list[tuple[int, int]]:
    """The first column of each cell of a row, and the one after its last."""
    made, begin = list[tuple[int, int]](), 0
    for cell in cells:
        made.append((begin, begin + cell.get("column_span", 1)))
        begin = made[-1][1]
    return made
