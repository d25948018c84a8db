"""The documentation site: `sphinx-build -W --keep-going docs build/site`."""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from scripts import site  # noqa: E402
from scripts.site.api import plain_docstring  # noqa: E402

project = "kvjax"
author = copyright = "The kvjax Authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
exclude_patterns = ["examples"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # tests run the notebooks and the code of the pages
napoleon_use_rtype = False  # a class before the colon of Returns stands in its own sentence
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "sphinx_book_theme"
html_title = "kvjax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["filter.js"]
html_theme_options = {"home_page_in_toc": True, "show_navbar_depth": 1, "use_download_button": False}
python_maximum_signature_line_length = 80


def setup(app):
    site.write(DOCS)
    app.connect("autodoc-process-signature", _short)
    app.connect("autodoc-process-docstring", _plain, priority=400)  # before napoleon


def _plain(app, what, name, obj, options, lines):
    lines[:] = plain_docstring(lines)


# Defaults that are functions print what Sphinx cannot parse.
FUNCTION = re.compile(r"<function .*? at 0x[0-9a-f]+>|<built-in function \w+>")


def _short(app, what, name, obj, options, signature, returns):
    """Arrays by their short name, and no addresses of functions."""
    texts = (signature, returns)
    return tuple(text and FUNCTION.sub("...", text.replace("jaxlib._jax.Array", "Array")) for text in texts)
