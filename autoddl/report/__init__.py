"""A plan as one self-contained HTML page: no script, no request, readable on a phone, in the dark and on paper.

``report_page`` makes the page of an explanation (:mod:`autoddl.explain`).  Everything that stands in it comes from the plan's
document and is escaped; the page's policy forbids scripts and requests besides.
"""

from __future__ import annotations

from .page import report_page

__all__ = ["report_page"]
