"""The module that `pip install -e` puts on Python's path; it loads the package of this checkout."""

import importlib.util
import sys
from pathlib import Path

_home = Path(__file__).resolve().parents[3] / "kvjax"
_spec = importlib.util.spec_from_file_location(
    __name__, _home / "__init__.py", submodule_search_locations=[str(_home)]
)
assert _spec is not None and _spec.loader is not None
# `import` returns the entry of `sys.modules` that exists after this module has run.
sys.modules[__name__] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[__name__])
