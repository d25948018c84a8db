"""The engine on a device: the loop's plans carried out with kvjax' own functions.

It owns no attention, codec or score. `pages` is a pool with tables, `lanes` a stack of ordinary caches, which
serve every method; `engine` sends each request to one of them.
"""

from __future__ import annotations
