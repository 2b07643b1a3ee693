"""A plan as one self-contained HTML page: no request, readable on a phone, in the dark, on paper and without JavaScript.

``report_page`` makes the page of an explanation (:mod:`autoddl.explain`).  Everything that stands in it comes from the plan's
document and is escaped; the page's policy forbids requests, and all scripts but the one that sorts tables (``sort.js``).
"""

from __future__ import annotations

from .page import report_page

__all__ = ["report_page"]
