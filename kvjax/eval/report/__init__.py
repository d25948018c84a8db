"""The results of `kvjax compare`: cells, the printed table, the frontier plot and the report page.

One row per sample goes in (`results.jsonl`, one JSON object per line):

    {"id": str, "method": str, "budget": float | int | None, "task": str,
     "protocol": "agnostic" | "aware" | "multi-turn", "prediction": str, "answer": str,
     "score": float in [0, 1], "kept_bytes": int, "full_bytes": int, "read_bytes": int,
     "span_kept": float | None, "seconds": float, "seed": int, "context_tokens": int, "depth": float | None,
     "nll": float where right answers were fed}

    cells = summarise(rows)                  # cells.py: the arithmetic
    print_table(cells, timings)              # comparison_table.py: the terminal
    write_frontier("frontier.png", panels_of(cells))    # frontier.py: quality against measured bytes
    write_report("report.html", metrics, cells, examples, timings=timings, duels=duels_of(rows), rows=rows)

page.py puts the page together of its sections: about_section.py, best_section.py, plots_section.py (drawn by
svg_plot.py), page_table.py, needles.py, page_prompts.py, scores_section.py, method_cards.py; page_assets.py
holds its style and script. paired.py and duels.py compare methods by the samples that both answered;
export.py writes CSV and LaTeX of what folder.py reads again; text_table.py and text_page.py show the windows
of a text.

Running methods and timing them belongs in the runner; nothing here measures.
"""
