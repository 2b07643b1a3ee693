"""Writes a plan as one self-contained HTML page. It makes no requests, and is readable on phones, on paper and without JavaScript.

:func:`report_page` writes the page of an explanation (:mod:`autoddl.explain`).

=======================================================  =========================================================================
modules                                                  contents
=======================================================  =========================================================================
:mod:`.page`                                             the page: head, title, key figures, navigation, sections
:mod:`.plansections`                                     sections on time, layers, memory and alternatives
:mod:`.pipelinesection`                                  section on the stages and the timeline of a pipeline
:mod:`.proofsections`                                    sections on baselines, certificate, trust and provenance
:mod:`.sections`, :mod:`.charts`, :mod:`.markup`         tables, lists and figures; SVG pictures; HTML elements
``style.css``, ``sort.js``                               style sheet; script that sorts tables
=======================================================  =========================================================================

Texts of the plan's document are escaped. The Content-Security-Policy of the page forbids all requests, and all scripts but
``sort.js``.
"""

from __future__ import annotations

from .page import report_page

__all__ = ["report_page"]
