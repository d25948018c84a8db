"""`kvjax report`: prints the table of a finished comparison, for a terminal, a spreadsheet or a paper."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from kvjax.base.atomic_files import in_short
from kvjax.base.errors import InputError
from kvjax.base.streams import escaped

if TYPE_CHECKING:
    from kvjax.eval.report.folder import Results

HELP = "print the results of a finished comparison as a table, CSV, LaTeX or a page"
EXAMPLE = """examples:
  kvjax report kvjax-results/20260101-120000
  kvjax report results --format csv > results.csv
  kvjax report results --format latex"""
FORMATS = ("table", "csv", "latex", "html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the --out of a `kvjax compare`")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="table",
        help="on standard output; html is the page without marked prompts (default: table)",
    )


def run(args: argparse.Namespace) -> None:
    from kvjax.eval.report.folder import read_results

    found = read_results(args.folder)
    try:
        text = (_of_text if found.of_text else _of_questions)(found, args.format)
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise InputError(
            f"the results in {args.folder} hold other values than a comparison's ({type(error).__name__}: "
            f"{in_short(error)}): run kvjax compare again"
        ) from error
    # Tokens may hold half a surrogate pair, which no file can.
    sys.stdout.write(escaped(text.encode("utf-8", errors="backslashreplace").decode()))


def _of_questions(found: Results, form: str) -> str:
    from kvjax.eval.report.cells import summarise
    from kvjax.eval.report.comparison_table import print_table
    from kvjax.eval.report.duels import duels_of
    from kvjax.eval.report.export import cell_records, csv_text, latex_cells
    from kvjax.eval.report.page import report_html

    cells = summarise(found.rows)
    if form == "csv":
        return csv_text(cell_records(cells, found.timings))
    if form == "latex":
        return latex_cells(cells)
    if form == "html":
        return report_html(
            found.metrics, cells, [], timings=found.timings, duels=duels_of(found.rows), rows=found.rows
        )
    print_table(cells, found.timings)
    return ""


def _of_text(found: Results, form: str) -> str:
    from kvjax.eval.report.export import csv_text, latex_text, text_records
    from kvjax.eval.report.text_page import text_html
    from kvjax.eval.report.text_table import print_stream, summarise_text, text_duels

    rows = summarise_text(found.rows)
    if form == "csv":
        return csv_text(text_records(rows))
    if form == "latex":
        return latex_text(rows)
    if form == "html":
        return text_html(found.metrics, rows, text_duels(found.rows))
    print_stream(rows)
    return ""
