"""`operant label`: serve the labelling page, and export or compare the labels of its database."""

import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from operant.net.listening import is_local
from operant.options import convert
from operant.runs.trackers.console import emit
from operant.tools.cli.arguments import Options, refuse, taken
from operant.tools.labels.agreement import agreement, win_rates
from operant.tools.labels.export import export
from operant.tools.labels.items import KINDS, read_items
from operant.tools.labels.server import LabelServer, LabelServing
from operant.tools.labels.store import Store
from operant.tools.report.diagnosis.history import counted
from operant.tools.report.summary import aligned
from operant.types import require, shown

MAGIC = b"SQLite format 3\0"
"""How every SQLite file begins."""


def label(words: Sequence[str], options: Options) -> int:
    """`operant label replies.jsonl` serves the page; with --export or --agreement it works on the labels."""
    require(len(words) == 1, "expected a file of replies or a database of labels: operant label replies.jsonl")
    path = Path(words[0])
    exporting, comparing = options.pop("export", None), bool(options.pop("agreement", False))
    counting = bool(options.pop("wins", False))
    form, skips = options.pop("form", None), bool(options.pop("skips", False))
    require(exporting or not (form or skips), "--form and --skips are about what is exported: give --export FILE too")
    if exporting is not None or comparing or counting:
        database = options.pop("database", None)
        refuse(options, options, " is for the page; leave it out beside --export, --agreement, --wins")
        with Store(database_of(path, database), create=False) as store:
            if exporting is not None:
                number = export(store, exporting, form, skips=skips)
                print(f"{number} rows exported: {exporting}")
            sentences, table = agreement(store) if comparing else ([], [])
            lines = [*sentences, *([""] if table else []), *aligned(table)]
            for line in [*lines, *(aligned(win_rates(store)) if counting else [])]:
                emit(line)
        return 0
    return serve(path, options)


def database_of(path: Path, database: str | None) -> Path:
    """The database of a file of replies, or the file itself if it is one."""
    if is_database(path):
        require(database is None, f"{path} is a database itself: leave --database {database} out")
        return path
    names = Path(path.name.removesuffix(".gz")).stem, path.name.partition(".")[0]
    own, older = (path.with_name(f"{name}.labels.sqlite") for name in names)
    if database is None and older.exists() and not own.exists():  # the name ended at the first dot
        with Store(older, create=False) as store:
            kept = (i for i in read_items(path) if store.number_of(i.id) and store.item(i.id).content() == i.content())
            own = older if any(kept) else own
    return own if database is None else Path(database)


def is_database(path: Path) -> bool:
    """Whether a file is a SQLite database, or is named as one and does not exist or is empty."""
    if not path.is_file() or not path.stat().st_size:
        return path.suffix == ".sqlite"
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def serve(path: Path, options: Options) -> int:
    """Serve the page of a file or database until Ctrl-C."""
    kind, overlap = options.pop("kind", None), options.pop("overlap", None)
    require(kind in (None, *KINDS), f"--kind {shown(kind)}: it must be {', '.join(KINDS)}")
    overlap = None if overlap is None else convert(overlap, int, "overlap")
    gold, opens, refused = options.pop("gold", None), options.pop("open", False), options.pop("no_open", False)
    require(not (opens and refused), "--open and --no-open: give one of the two")
    serving = LabelServing(options.pop("host", LabelServing.host), taken(options, "port", 0))
    itself, database = is_database(path), database_of(path, options.pop("database", None))
    items, known = [] if itself else read_items(path), read_items(gold) if gold is not None else []
    with Store(database, kind=kind, overlap=overlap, create=not itself or kind is not None) as store:
        store.add_items(items)
        store.add_items(known, gold=True)
        with LabelServer(store, serving) as server:
            counts = store.counts()
            so_far = f"{counted(counts['items'], 'prompt')}, {counted(counts['labels'], 'label')} so far"
            print(f"{server.url}\n{so_far}, in {database}")
            if not is_local(serving.host):
                print("everyone with this address and token can label; it is not encrypted: use a network you trust")
            print("open the address in a browser; press Ctrl-C to end", flush=True)
            if opens or (sys.stdout.isatty() and not refused):
                webbrowser.open(server.url)
            try:
                server.run()
            except KeyboardInterrupt:
                print()
        counts, end = store.counts(), f"no labels yet in {store.path}; the same command continues"
        if counts["labels"]:
            end = f"{counted(counts['labels'], 'label')} by {counted(counts['labellers'], 'labeller')} in {store.path}"
            end += f"; export with: operant label {store.path} --export labels.jsonl"
        print(end)
    return 0
