"""Readers: each module here that does not begin with an underscore turns one format into the model.

A reader module has

``FORMAT``
    the format's name, as ``source.format`` shows it;
``recognizes(path) -> bool``
    whether this path is its format, by a look at it and no more;
``open_job(path) -> Job``
    the job, whose ranks are read when their turn comes. Raises ``UnreadableInput`` with one line.

:func:`trine.load` finds the reader by its file; nothing else is touched to add one.
"""
