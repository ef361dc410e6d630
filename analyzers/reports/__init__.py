"""Reports: an :class:`~trine.analyzers.results.Analysis` as text, Markdown or one HTML page.

Each form is a module with ``render(analysis) -> str``. They draw and word; nothing is computed here.
"""
