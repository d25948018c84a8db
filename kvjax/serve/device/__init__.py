"""The engine on a device: it carries out the loop's plans with kvjax's own functions.

It has no attention, codec or score of its own. `pages` is a pool with page tables. `lanes` are stacked
ordinary caches, which any method can use. `engine` assigns each request to one of the two.
"""

from __future__ import annotations
