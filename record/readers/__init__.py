"""Readers: each module here that does not begin with an underscore turns one format into the model.

A reader module has

``FORMAT``
    the format's name, as ``source.format`` shows it;
``recognizes(path) -> bool``
    whether this path is its format, by a look at it and no more;
``open_paths(paths, origin) -> Job``
    the job that several files make (``origin`` is what the user named), whose ranks are read when their turn
    comes. Raises ``UnreadableInput`` with one line. The record's reader, whose job is a folder, lacks it;
``open_job(path) -> Job``
    the job of one path.

:func:`trine.load` finds the reader by its file, shows it every file, and joins what several readers found;
nothing else is touched to add one.
"""
